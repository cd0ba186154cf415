"""Context parallelism: one sequence is sharded over several devices, for contexts that one device cannot hold.

**Idea.** The mesh axis `context` shards the sequence: each of its c devices has t = T/c positions. Everything but
attention works on single positions and needs no other device (rotary embeddings get the device's positions). Attention
needs the keys and values of all earlier positions. There are three ways to get them:

    all-gather   Each device gathers all keys and values and attends with its own queries. The memory for keys and
                 values grows with T (Llama 3, arXiv:2407.21783, section 3.3.2).
    ring         Keys and values travel round the ring of devices. Each device attends to one shard of them while the
                 next one is on its way (Liu et al. 2023, Ring Attention, arXiv:2310.01889). No device holds more than
                 three shards, so the sequence can grow with the number of devices.
    all-to-all   Heads are exchanged for positions: each device gets all positions of n/c heads, attends, and sends the
                 result back (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509). c is at most n.

**Formula.** Attention over parts j of the keys, out_j and lse_j = log(sum(exp(scores))), is merged by

    lse = log(sum_j exp(lse_j))         out = sum_j exp(lse_j - lse) out_j

The backward pass merges nothing: with lse and out over all keys, P = exp(S - lse) holds for any part of the keys
(flash_backward.py). Each device adds its share of dk and dv to float32 sums, which follow their keys round the ring and
arrive at their owner after c-1 hops. q, k, v, out and lse are saved; keys and values travel again.

**Layout.** Under a causal mask in sequence order, the last of c devices has 2 - 1/c times the mean work, and all wait
for it. In zigzag order (Llama 3, section 3.3.2) the sequence is split into 2c chunks. Device i holds chunks i and
2c-1-i, one that sees few keys and one that sees many. With the keys of another device j, device i has exactly two of
the four pairs of chunks to compute at every hop, both without a mask: (late queries, early keys), and (early, early) if
j < i or (late, late) if j > i. Both pairs go through one call of the kernel, compiled without a mask. The device's own
chunks, joined, are a causal square. The host puts tokens, targets, positions and ids into this order (`order`).

**Window.** With a sliding window a device needs only the window-1 keys before its first position: a halo from its
neighbour, or from several if the window is longer than t. Layers with a window use the halo whichever method the other
layers use. The halo needs positions in sequence order, and its work is balanced. So a model with both kinds of layers
keeps the sequence in order, and its global layers are balanced only with the all-to-all.

**Two methods at once** (Fang & Zhao 2024, arXiv:2405.07719). Groups of `head_ways` neighbouring devices exchange heads
for positions, and the ring connects the groups, with fewer and larger hops. This allows c beyond the number of heads,
and helps a ring whose hops are bound by latency.

**Cost** of a layer for each device, forward. B is the bytes of the keys and values of the whole sequence
(B = 2*2*b*T*k*H in bfloat16, k heads on each device), W bytes/s in one direction, C FLOP/s; G = n/k:

                    bytes received                  backward                            hidden behind
    ring            (c-1)/c B                       (c-1)/c (1 + 2) B                   each hop's attention
    all-gather      (c-1)/c B                       the same                            nothing of its own
    all-to-all      (c-1)/c (1 + G) B/c             the same as forward                 nothing
    halo            (window-1)/T B                  the same as forward                 nothing

where 1 + 2 is keys and values once more and their gradients in float32. In addition come segment ids, 4 bytes a
position, and with the all-to-all lse, where the caller uses it, 4 bytes for each position and head.

A hop of the ring moves 4*b*t*k*H bytes beside 2*b*t*t*n*H FLOPs (balanced), and is hidden when t > 2/G * C/W. For a
device of a TPU7x and one direction of a torus axis, C/W is 1153e12/45e9 = 26k: t > 13k at G = 4; over the die-to-die
link, six times as fast, t > 2.2k. The results of a hop are merged in float32, 10 bytes read and written for each of
t*n*H numbers. The all-to-all moves (1 + G)/c of the ring's bytes, less from c > 1 + G on, but waits for all of them.

**Left out.** A ring in both directions: XLA's permutes here use one link each way, and a hop that is not hidden in one
direction has half the bytes in two. Masks that are not causal, prefixes. Balance for packed documents: a device whose
documents are short has less work.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flash
import flash_backward
from attention import attention, attention_gradients, attention_in_chunks
from collectives import all_gather, all_to_all, reduce_scatter
from masks import CAUSAL, SCORES, Mask, Scores
from placement import ring_size

QUERIES_AT_ONCE = 128  # in the reference: rows of scores that exist at a time
NO_SEGMENT = -1  # the segment id of keys before the sequence


class Method(NamedTuple):
    """How a device's queries attend to the keys of other devices."""

    axis: str = "context"  # the mesh axis, of size c
    impl: str = "ring"  # one of placement.CONTEXT_IMPLS; layers with a window use the halo
    head_ways: int = 1  # in a ring: neighbours that exchange heads; the ring connects c/head_ways groups of them
    balanced: bool = False  # positions are in the zigzag order of `order(T, ring_size(c, impl, head_ways), True)`
    algorithm: str = "xla"  # of gathers and exchanges, one of collectives.ALGORITHMS; within head_ways always XLA's


RING = Method()


def context_attention(
    q_btnH: jax.Array,
    k_btkH: jax.Array,
    v_btkV: jax.Array,
    mask: Mask = CAUSAL,
    scores: Scores = SCORES,
    sinks: jax.Array | None = None,
    *,
    method: Method = RING,
    kernel: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Causal attention of a sequence that is sharded over a mesh axis. Per-device code, differentiable.

    Args:
      q_btnH, k_btkH, v_btkV: this device's positions; n is a multiple of k. Keys and values may differ in head dim.
      mask: causal, with one window, without a prefix and an offset. `segments` are the ids_bt of this device's
        positions, for queries and keys; ids are at least 0.
      scores: `max_logit` is refused in a ring, which merges parts of a row.
      sinks: sinks_n, as for `attention.attention`.
      method: how queries attend to the keys of other devices.
      kernel: True uses flash.py, False attention.py for a chunk of queries at a time.
      interpret: True simulates the kernel on CPU.

    Returns:
      out_btnV in the dtype of the values, and the log-sum-exp of the scores (and the sink), lse_bnt in float32. With
      `scores.largest` also the largest score, like lse.

    Raises:
      ValueError: heads or positions cannot be split, zigzag order has a window, a ring has max_logit, or the mask has
        a prefix or is not causal.
    """
    axis, impl, head_ways, balanced, _ = method
    window, max_logit = mask.window, scores.max_logit
    if not mask.causal or mask.prefix is not None:
        raise ValueError(f"attention over {axis!r} is causal, without a prefix, not {mask.causal=}, {mask.prefix=}")
    c, t = lax.axis_size(axis), q_btnH.shape[1]
    groups = ring_size(c, impl, head_ways)
    if balanced and (window or (groups > 1 and t * c % (2 * groups))):
        raise ValueError(f"zigzag order takes 2*{groups} equal chunks of {t * c} positions, and no window: {window}")
    if max_logit is not None and impl == "ring" and groups > 1 and not window:
        raise ValueError(f"max_logit={max_logit} needs whole rows of scores; a ring merges parts: take another impl")
    plan = _Plan(method, groups, scores, kernel, interpret)
    operands = q_btnH, k_btkH, v_btkV, *(mask.segments or (None, None))
    if window:
        before = min(window - 1, (c - 1) * t)
        plan = replace(plan, groups=1, method=method._replace(impl="ring"), window=window, q_offset=before)
        out_btnV, *of_rows = _attend(plan, *_with_halo(axis, before, *operands))
    elif groups < c:
        out_bunV, *of_rows = _attend(plan, *_heads_for_positions(plan, c // groups, *operands))
        out_btnV, of_rows = _exchange(plan, out_bunV, 1, 2), [_exchange(plan, x_bnu, 2, 1) for x_bnu in of_rows]
    else:
        out_btnV, *of_rows = _attend(plan, *operands)
    return (out_btnV, *of_rows) if sinks is None else (*flash.with_sinks(out_btnV, of_rows[0], sinks), *of_rows[1:])


def order(T: int, ring: int, balanced: bool) -> np.ndarray:
    """int [T]: the position in the sequence of each element of the array that is sharded over the devices.

    Raises:
      ValueError: the positions cannot be split into 2*ring chunks.
    """
    if not balanced or ring == 1:
        return np.arange(T)
    if T % (2 * ring):
        raise ValueError(f"T={T} must be a multiple of 2*{ring} for the zigzag order of {ring} parts")
    chunks = np.arange(T).reshape(2 * ring, -1)
    return np.stack([chunks[:ring], chunks[: ring - 1 : -1]], 1).reshape(-1)


def merge(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Merges (out_bntV, lse_bnt, perhaps largest_bnt) over two sets of keys. The lse of no keys is `masks.UNSEEN`."""
    (out_a, lse_a, *largest_a), (out_b, lse_b, *largest_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    share = lambda lse_part: jnp.exp(lse_part - lse)[..., None]
    return out_a * share(lse_a) + out_b * share(lse_b), lse, *map(jnp.maximum, largest_a, largest_b)


@dataclass(frozen=True)
class _Plan:
    """The static arguments of an attention."""

    method: Method
    groups: int  # of devices on the axis: the number of shards of the sequence
    scores: Scores
    kernel: bool
    interpret: bool
    window: int = 0
    q_offset: int = 0  # keys before the first query: the halo


# -- communication


def _with_halo(axis, before, q_btnH, k_btkH, v_btkV, q_ids_bt, k_ids_bt):
    """Keys, values and ids, preceded by those of the `before` positions before this device's first. Differentiable."""
    c, t, me = lax.axis_size(axis), q_btnH.shape[1], lax.axis_index(axis)
    to_next = [(i, i + 1) for i in range(c - 1)]

    def extend(x):
        received, parts = x, [x]
        for left in range(before, 0, -t):
            received = lax.ppermute(received[:, -left:], axis, to_next)  # all of it, if there are not more than `left`
            parts = [received, *parts]
        return jnp.concatenate(parts, 1)

    if k_ids_bt is None:
        q_ids_bt = k_ids_bt = jnp.zeros_like(q_btnH[:, :, 0, 0], jnp.int32)
    in_sequence_s = jnp.arange(before + t) >= before - me * t  # keys before the sequence are zeros of no segment
    return q_btnH, extend(k_btkH), extend(v_btkV), q_ids_bt, jnp.where(in_sequence_s, extend(k_ids_bt), NO_SEGMENT)


def _heads_for_positions(plan, ways, q_btnH, k_btkH, v_btkV, q_ids_bt, k_ids_bt):
    """Each of `ways` neighbours gets all of their positions for a share of the heads. Differentiable."""
    n, k = q_btnH.shape[2], k_btkH.shape[2]
    if n % ways:
        raise ValueError(f"{n} heads on each device cannot be exchanged among {ways}: {n} must be a multiple of {ways}")
    copies = ways // math.gcd(k, ways)  # of each key/value head, if several devices need it
    to_heads = lambda x: _exchange(plan, x, 2, 1)
    k_btkH, v_btkV = [jnp.repeat(x, copies, 2) for x in (k_btkH, v_btkV)]
    if q_ids_bt is not None:
        q_ids_bt = k_ids_bt = _gather(plan, q_ids_bt, 1)
    return to_heads(q_btnH), to_heads(k_btkH), to_heads(v_btkV), q_ids_bt, k_ids_bt


def _exchange(plan, x, split_dim, concat_dim):
    if plan.groups == 1:
        return all_to_all(
            x, plan.method.axis, split_dim=split_dim, concat_dim=concat_dim, algorithm=plan.method.algorithm
        )
    return lax.all_to_all(x, plan.method.axis, split_dim, concat_dim, axis_index_groups=_neighbours(plan), tiled=True)


def _gather(plan, x, dim):
    """Gathers x from the neighbours that exchange heads."""
    if plan.groups == 1:
        return all_gather(x, plan.method.axis, dim=dim, algorithm=plan.method.algorithm)
    return lax.all_gather(x, plan.method.axis, axis=dim, axis_index_groups=_neighbours(plan), tiled=True)


def _neighbours(plan):
    return np.arange(lax.axis_size(plan.method.axis)).reshape(plan.groups, -1).tolist()


def _shift(plan, tree):
    """Sends arrays to the next group and returns those of the previous one."""
    c = lax.axis_size(plan.method.axis)
    to_next = [(i, (i + c // plan.groups) % c) for i in range(c)]
    return jax.tree.map(lambda x: lax.ppermute(x, plan.method.axis, to_next), tree)


def _my_group(plan):
    return lax.axis_index(plan.method.axis) // (lax.axis_size(plan.method.axis) // plan.groups)


# -- attention over parts of the keys, and its gradient


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q_btnH, k_bskH, v_bskV, q_ids_bt, k_ids_bs):
    """(out_btnV, lse_bnt, perhaps largest_bnt) over all keys. Inside, heads come first, as the kernels need them."""
    heads_first = [x.swapaxes(1, 2) for x in (q_btnH, k_bskH, v_bskV)]
    forward = _gathered if plan.method.impl == "all_gather" else _ring
    out_bntV, *of_rows = forward(plan, *heads_first, q_ids_bt, k_ids_bs)
    return out_bntV.swapaxes(1, 2).astype(v_bskV.dtype), *of_rows


def _attend_forward(plan, *operands):
    out_btnV, lse_bnt, *largest = _attend(plan, *operands)
    # With these two saved, jax.checkpoint need not run the ring again.
    out_btnV, lse_bnt = flash.saved_heads(out_btnV), checkpoint_name(lse_bnt, "log_sum_exp")
    return (out_btnV, lse_bnt, *largest), (*operands, out_btnV, lse_bnt)


def _attend_backward(plan, saved, cotangents):
    q_btnH, k_bskH, v_bskV, q_ids_bt, k_ids_bs, out_btnV, lse_bnt = saved
    dout_btnV, dlse_bnt, *_ = cotangents
    lse_bnt = jnp.where(jnp.isinf(lse_bnt), jnp.inf, lse_bnt)  # exp(score - inf) = 0: such rows send back no gradient
    q, k, v, out, dout = [x.swapaxes(1, 2) for x in (q_btnH, k_bskH, v_bskV, out_btnV, dout_btnV)]
    backward = _gathered_gradients if plan.method.impl == "all_gather" else _ring_gradients
    gradients = backward(plan, (q, out, lse_bnt, dout, dlse_bnt, q_ids_bt), (k, v, k_ids_bs))
    gradients = [dx.swapaxes(1, 2).astype(x.dtype) for dx, x in zip(gradients, saved, strict=False)]
    return *gradients, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _ring(plan, q_bntH, k_bksH, v_bksV, q_ids, k_ids):
    queries, keys = (q_bntH, q_ids), (k_bksH, v_bksV, k_ids)
    if plan.groups == 1:
        return _block(plan, queries, keys, causal=True, window=plan.window, q_offset=plan.q_offset)

    def attend(so_far, keys, hop):
        def pairs(so_far):
            starts_q, starts_k, size = _pairs(plan, q_bntH.shape[2], hop)
            results = _block(plan, _take(queries, starts_q, size), _take(keys, starts_k, size), causal=False)
            for at, part in zip(starts_q, _split(results, len(starts_q)), strict=True):
                so_far = _put(so_far, merge(_take(so_far, [at], size), part), at)
            return so_far

        return pairs(so_far) if plan.method.balanced else lax.cond(hop <= _my_group(plan), pairs, lambda x: x, so_far)

    def one_hop(carry, hop):
        so_far, keys = carry
        next_keys = _shift(plan, keys)  # travel while this device attends to `keys`
        return (attend(so_far, keys, hop), next_keys), None

    next_keys = _shift(plan, keys)
    out_bntV, *of_rows = _block(plan, queries, keys, causal=True)
    carry = (out_bntV.astype(jnp.float32), *of_rows), next_keys
    (so_far, keys), _ = lax.scan(one_hop, carry, jnp.arange(1, plan.groups - 1))
    return attend(so_far, keys, plan.groups - 1)


def _ring_gradients(plan, queries, keys):
    """(dq, dk, dv) in float32. The sum of dk and dv starts at the device after their owner and follows their keys."""
    if plan.groups == 1:
        return _block_gradients(plan, queries, keys, causal=True, window=plan.window, q_offset=plan.q_offset)
    zeros = lambda arrays: [jnp.zeros_like(x, jnp.float32) for x in arrays]

    def terms(keys, hop):
        """[(start in dq, start in dk and dv, their terms)] from the keys of a hop."""
        starts_q, starts_k, size = _pairs(plan, queries[0].shape[2], hop)
        block = lambda: _block_gradients(
            plan, _take(queries, starts_q, size), _take(keys, starts_k, size), causal=False
        )
        unseen = lambda: zeros((queries[0], *keys[:2]))
        parts = block() if plan.method.balanced else lax.cond(hop <= _my_group(plan), block, unseen)
        return list(zip(starts_q, starts_k, _split(parts, len(starts_q)), strict=True))

    def add(dq, dkv, terms):
        for at_q, at_k, (dq_part, *dkv_part) in terms:
            (dq,) = _add_at([dq], [dq_part], at_q)
            dkv = _add_at(dkv, dkv_part, at_k)
        return dq, dkv

    def one_hop(carry, hop, last=False):
        keys, dq, dkv = carry
        next_keys = None if last else _shift(plan, keys)
        dkv_so_far = _shift(plan, dkv)  # the block's gradients need neither of the two
        return (next_keys, *add(dq, dkv_so_far, terms(keys, hop))), None

    own_keys = keys
    keys = _shift(plan, own_keys)
    next_keys = _shift(plan, keys) if plan.groups > 2 else None
    carry = (next_keys, *add(*zeros(queries[:1]), zeros(keys[:2]), terms(keys, 1)))
    if plan.groups > 2:
        carry, _ = lax.scan(one_hop, carry, jnp.arange(2, plan.groups - 1))
        carry, _ = one_hop(carry, plan.groups - 1, last=True)
    _, dq, dkv = carry
    dkv_so_far = _shift(plan, dkv)
    dq_part, *dkv_part = _block_gradients(plan, queries, own_keys, causal=True)
    return dq + dq_part, *_add(dkv_so_far, dkv_part)


def _pairs(plan, t, hop):
    """(starts of queries, starts of keys, size): the pairs of chunks to compute with the keys of `hop` groups back.

    That is group me - hop: an earlier one if hop <= me, and otherwise, round the ring, a later one.
    """
    if not plan.method.balanced:
        return [0], [0], t
    half = t // 2
    early_or_late = jnp.where(hop <= _my_group(plan), 0, half)
    return [half, early_or_late], [0, early_or_late], half


def _gathered(plan, q_bntH, k_bksH, v_bksV, q_ids, k_ids):
    keys = _gather_keys(plan, (k_bksH, v_bksV, k_ids))
    starts, positions, size = _chunks(plan, q_bntH.shape[2])
    parts = []
    for start, position in zip(starts, positions, strict=True):
        parts.append(_block(plan, _take((q_bntH, q_ids), [start], size), keys, causal=True, q_offset=position))
    return tuple(jnp.concatenate(x, 2) for x in zip(*parts, strict=True))


def _gathered_gradients(plan, queries, keys):
    keys = _gather_keys(plan, keys)
    starts, positions, size = _chunks(plan, queries[0].shape[2])
    dqs, dkv = [], [0.0, 0.0]
    for start, position in zip(starts, positions, strict=True):
        dq, *part = _block_gradients(plan, _take(queries, [start], size), keys, causal=True, q_offset=position)
        dqs, dkv = [*dqs, dq], _add(dkv, part)
    scatter = partial(reduce_scatter, axis=plan.method.axis, dim=2, algorithm=plan.method.algorithm)
    return jnp.concatenate(dqs, 2), *(scatter(_reorder(plan, dx, to_zigzag=True)) for dx in dkv)


def _chunks(plan, t):
    """(starts, their positions in the sequence, size) of the chunks of this device's queries."""
    if not plan.method.balanced:
        return [0], [_my_group(plan) * t], t
    half = t // 2
    return [0, half], [_my_group(plan) * half, (2 * plan.groups - 1 - _my_group(plan)) * half], half


def _gather_keys(plan, keys):
    gather = lambda x: all_gather(x, plan.method.axis, dim=_dim(x), algorithm=plan.method.algorithm)
    return jax.tree.map(lambda x: _reorder(plan, gather(x), to_zigzag=False), keys)


def _reorder(plan, x, to_zigzag):
    """Moves the positions of the whole sequence from zigzag to sequence order, or back."""
    if not plan.method.balanced:
        return x
    places = order(2 * plan.groups, plan.groups, True)  # an order of chunks
    chunks = jnp.split(x, 2 * plan.groups, _dim(x))
    return jnp.concatenate([chunks[at] for at in (places if to_zigzag else np.argsort(places))], _dim(x))


# -- slices of positions, in trees of arrays with heads first, [b, n, t, H] and [b, n, t], and of ids [b, t]


def _dim(x):
    """The dim of the positions."""
    return min(2, x.ndim - 1)


def _take(tree, starts, size):
    """`size` positions from each start, concatenated along the batch."""
    take = lambda x, at: lax.dynamic_slice_in_dim(x, at, size, _dim(x))
    return jax.tree.map(lambda x: jnp.concatenate([take(x, at) for at in starts]), tree)


def _split(arrays, parts):
    """The inverse of the concatenation along the batch: a list of `parts` tuples of arrays."""
    return list(zip(*(jnp.split(x, parts) for x in arrays), strict=True))


def _put(arrays, parts, at):
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, at, _dim(x)), arrays, parts)


def _add_at(arrays, parts, at):
    old = _take(arrays, [at], parts[0].shape[2])
    return _put(arrays, _add(old, parts), at)


def _add(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


# -- one block: some of the queries, some of the keys


def _block(plan, queries, keys, *, causal, window=0, q_offset=0):
    """(out_bntV, lse_bnt, perhaps largest_bnt) of these queries over these keys alone."""
    (q, q_ids), (k, v, k_ids) = queries, keys
    mask = Mask(causal, window, segments=None if q_ids is None else (q_ids, k_ids), q_offset=q_offset)
    if plan.kernel:
        return flash.forward(q, k, v, mask, plan.scores, interpret=plan.interpret)
    q, k, v = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, *of_rows = attention_in_chunks(q, k, v, mask, plan.scores, chunk=QUERIES_AT_ONCE)
    return out.swapaxes(1, 2), *of_rows


def _block_gradients(plan, queries, keys, *, causal, window=0, q_offset=0):
    """(dq, dk, dv) of these queries and keys in float32, from out and lse over all keys."""
    (q, out, lse, dout, dlse, q_ids), (k, v, k_ids) = queries, keys
    mask = Mask(causal, window, segments=None if q_ids is None else (q_ids, k_ids), q_offset=q_offset)
    if plan.kernel:
        rows = q, k, v, (out, lse), (dout, dlse)
        gradients = flash_backward.backward(*rows, mask, plan.scores, interpret=plan.interpret)
        return [dx.astype(jnp.float32) for dx in gradients]
    q, k, v, out, dout = [x.swapaxes(1, 2) for x in (q, k, v, out, dout)]
    gradients = attention_gradients(q, k, v, (out, lse), (dout, dlse), mask, plan.scores, chunk=QUERIES_AT_ONCE)
    return [dx.swapaxes(1, 2) for dx in gradients]


def main(c: int = 8, T: int = 2048):
    """Compares every method on simulated devices with attention on one device, and prints each device's work."""
    q_BTNH, k_BTKH, v_BTKH = [jax.random.normal(jax.random.key(i), (1, T, N, 16)) for i, N in enumerate((8, 4, 4))]
    mesh = jax.make_mesh((c,), ("context",), axis_types=(AxisType.Auto,))
    print(f"{T} positions on {c} simulated devices, float32: largest difference from attention on one device")
    methods = [dict(impl="ring"), dict(impl="ring", balanced=True), dict(impl="ring", balanced=True, head_ways=2)]
    methods += [dict(impl="all_gather", balanced=True), dict(impl="all_to_all")]
    for fields, window in [(fields, 0) for fields in methods] + [({}, 300)]:
        method, mask = Method(**fields), Mask(window=window)
        places = order(T, ring_size(c, method.impl, method.head_ways), method.balanced)
        per_device = partial(context_attention, mask=mask, method=method)
        specs = P(None, "context"), P(None, None, "context")
        run = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=specs[0], out_specs=specs))
        out_BTNH, _ = run(*(x[:, places] for x in (q_BTNH, k_BTKH, v_BTKH)))
        expected, _ = attention(q_BTNH, k_BTKH, v_BTKH, mask)
        shown = ", ".join(f"{name}={value}" for name, value in (fields or dict(window=window)).items())
        print(f"  {shown:45} {jnp.abs(out_BTNH - expected[:, places]).max():.1e}")
    print("\nkeys that the queries of each device see under a causal mask, of all that they could, by `order`")
    for name, balanced in (("in order", False), ("zigzag", True)):
        seen = (order(T, c, balanced) + 1).reshape(c, -1).mean(1) / T
        print(f"  {name:10}" + "".join(f"{share:7.1%}" for share in seen))


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
