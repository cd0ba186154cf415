"""Context parallelism: one sequence over several devices, for contexts that no device could hold.

The mesh axis `context` cuts the sequence: each of its c devices has t = T/c positions. Everything but attention works
on single positions and needs nothing of the others (rotary embeddings are told theirs). Attention needs the keys and
values of all earlier positions, and there are three ways to them:

    all-gather   Each device gathers all keys and values and attends with its own queries. The memory for them grows
                 with T (Llama 3, arXiv:2407.21783, section 3.3.2).
    ring         Keys and values travel round the ring of devices, and each attends to what is there while the next
                 part is on its way (Liu et al. 2023, Ring Attention, arXiv:2310.01889). Nobody holds more than three
                 parts, so that sequence and devices can grow together without end.
    all-to-all   Heads are exchanged for positions: each device gets all positions of n/c heads, attends, and sends the
                 result back (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509). c is at most n.

**Merging.** Attention over parts of the keys, out_j and lse_j = log(sum(exp(scores))), is merged into that over all:

    lse = log(sum_j exp(lse_j))         out = sum_j exp(lse_j - lse) out_j

Backwards nothing has to be merged: with lse and out of the whole row, P = exp(S - lse) is right for any part of the
keys (flash_backward.py), so each device adds its part of dk and dv to sums that travel behind the keys, in float32,
and arrive at home after c-1 hops. Saved are q, k, v, out and lse; what travels, travels again.

**Balance.** Under a causal mask the last of c devices has the work of all rows' ends, 2 - 1/c times the mean, and all
wait for it. In zigzag order (Llama 3, section 3.3.2) the sequence is cut into 2c chunks, and device i holds chunks i
and 2c-1-i, one with little to see and one with much. With the keys of another device j, device i then has exactly two
of the four pairs of chunks to compute, both without a mask, at every hop: (late queries, early keys),
and (early, early) if j < i or (late, late) if j > i. So the two go through one call of the kernel whose mask is known
when it is compiled, none. One's own chunks, put together, are a causal square. The host lays the tokens, targets,
positions and ids out in this order (`order`).

**Window.** With a sliding window a device needs the last window-1 keys before its first, and nothing else: a halo from
its neighbour (from several, if the window is longer than t), whatever the way of the layers without one. It needs
positions in order and is balanced by itself. A model that has both kinds of layers keeps its sequence in order, and
its global layers are then balanced only by the all-to-all.

**Cost** a layer for each device, forward, with B bytes for the keys and values of the whole sequence (B = 2*2*b*T*k*H
in bfloat16, k heads on each device), W bytes/s in one direction, C FLOP/s; G = n/k:

                    bytes received                  backward                            hidden behind
    ring            (c-1)/c B                       (c-1)/c (1 + 2) B                   each hop's attention
    all-gather      (c-1)/c B                       the same                            nothing of its own
    all-to-all      (c-1)/c (1 + G) B/c             the same as forward                 nothing
    halo            (window-1)/T B                  the same as forward                 nothing

where 1 + 2 is keys and values again and their gradients in float32. Segment ids come beside, 4 bytes a position, and
with the all-to-all lse, 4 bytes a position and head, where it is asked for. A hop of the ring moves 4*b*t*k*H bytes and
has 2*b*t*t*n*H FLOPs, balanced, beside it: it hides when t > 2/G * C/W. For a device of a TPU7x and one direction of a
torus axis, C/W is 1153e12/45e9 = 26k: t > 13k at G = 4; over the die-to-die link, six times as fast, t > 2.2k. Results
of a hop are merged in float32, 10 bytes read and written for each of t*n*H numbers. The all-to-all moves (1 + G)/c of
what the ring does, less from c > 1 + G on, but it waits for all of it.

**Two at once** (Fang & Zhao 2024, arXiv:2405.07719): `head_ways` devices side by side exchange heads for positions, and
the ring goes across such groups, with fewer and larger hops: c beyond the number of heads, and rings beyond their
latency.

**Left out.** A ring in both directions: XLA's permutes here use one link each way, and a hop that is not hidden in one
direction has half the bytes in two. Masks that are not causal, prefixes. Balance for packed documents: a device whose
documents are short has less to do.
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

IMPLS = ("ring", "all_gather", "all_to_all")
QUERIES_AT_ONCE = 128  # of the reference: so many rows of scores exist at a time
NOBODY = -1  # the segment of keys before the first one


class Method(NamedTuple):
    """How the queries of a device meet the keys of the others."""

    axis: str = "context"  # the mesh axis, of size c
    impl: str = "ring"  # one of IMPLS, in layers without a window
    head_ways: int = 1  # in a ring: so many neighbours exchange heads, and the ring goes across c/head_ways groups
    balanced: bool = False  # positions are in the zigzag order of `order(T, ring_size(c, impl, head_ways), True)`
    algorithm: str = "xla"  # of gathers and exchanges, one of collectives.ALGORITHMS; among head_ways always XLA's


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
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of a sequence that is cut over a mesh axis. Per-device code, differentiable.

    Args:
      q_btnH, k_btkH, v_btkV: of this device's positions; n a multiple of k. Head dims of keys and values may differ.
      mask: causal, without a prefix and an offset; with one window. `segments` are ids_bt of this device's positions,
        twice, at least 0.
      scores: `max_logit` not where parts of a row are merged, in a ring.
      sinks: sinks_n, as for `attention.attention`.
      method: how queries meet the keys of other devices.
      kernel: flash.py for the blocks; otherwise attention.py, some queries at a time.
      interpret: the kernel is simulated, on CPU.

    Returns:
      out_btnV in the dtype of the values, and the log-sum-exp of the scores (and the sink), lse_bnt in float32.

    Raises:
      ValueError: heads or positions that cannot be cut, a zigzag order with a window, max_logit in a ring, a mask that
        is not causal or has a prefix.
    """
    axis, impl, head_ways, balanced, _ = method
    window, max_logit = mask.window, scores.max_logit
    if not mask.causal or mask.prefix is not None:
        raise ValueError(f"attention over {axis!r} is causal, without a prefix: causal={mask.causal}")
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
        out_btnV, lse_bnt = _attend(plan, *_with_halo(axis, before, *operands))
    elif groups < c:
        out_bunV, lse_bnu = _attend(plan, *_heads_for_positions(plan, c // groups, *operands))
        out_btnV, lse_bnt = _exchange(plan, out_bunV, 1, 2), _exchange(plan, lse_bnu, 2, 1)
    else:
        out_btnV, lse_bnt = _attend(plan, *operands)
    return (out_btnV, lse_bnt) if sinks is None else flash.with_sinks(out_btnV, lse_bnt, sinks)


def ring_size(c: int, impl: str, head_ways: int = 1) -> int:
    """Parts that the sequence is in when a device attends, of the c of the mesh axis: what `order` is made for."""
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLS)}")
    if head_ways > 1 and (impl != "ring" or c % head_ways):
        raise ValueError(f"head_ways={head_ways} must divide the {c} devices of a ring; impl={impl!r}")
    return 1 if impl == "all_to_all" else c // head_ways


def order(T: int, ring: int, balanced: bool) -> np.ndarray:
    """int [T]: which position of the sequence stands at each place, when the places are cut over the devices in turn.

    Raises:
      ValueError: the positions cannot be cut into 2*ring chunks.
    """
    if not balanced or ring == 1:
        return np.arange(T)
    if T % (2 * ring):
        raise ValueError(f"T={T} must be a multiple of 2*{ring} for the zigzag order of {ring} parts")
    chunks = np.arange(T).reshape(2 * ring, -1)
    return np.stack([chunks[:ring], chunks[: ring - 1 : -1]], 1).reshape(-1)


def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(out_bntV, lse_bnt) of two sets of keys -> of both together, in float32; `masks.UNSEEN` is of no keys."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    share = lambda part: jnp.exp(part - lse)[..., None]
    return out_a * share(lse_a) + out_b * share(lse_b), lse


@dataclass(frozen=True)
class _Plan:
    """All that is known when the program is traced."""

    method: Method
    groups: int  # of the devices of the axis: parts that the sequence is in
    scores: Scores
    kernel: bool
    interpret: bool
    window: int = 0
    q_offset: int = 0  # keys before the first query: the halo


# -- what moves


def _with_halo(axis, before, q_btnH, k_btkH, v_btkV, q_ids_bt, k_ids_bt):
    """Keys, values and ids with the `before` ones that stand before this device's first. Differentiable."""
    c, t, me = lax.axis_size(axis), q_btnH.shape[1], lax.axis_index(axis)
    to_next = [(i, i + 1) for i in range(c - 1)]

    def extend(x):
        arrived, parts = x, [x]
        for left in range(before, 0, -t):
            arrived = lax.ppermute(arrived[:, -left:], axis, to_next)  # all of it, if there is no more than that
            parts = [arrived, *parts]
        return jnp.concatenate(parts, 1)

    if k_ids_bt is None:
        q_ids_bt = k_ids_bt = jnp.zeros_like(q_btnH[:, :, 0, 0], jnp.int32)
    there_s = jnp.arange(before + t) >= before - me * t  # what lies before the sequence is zeros, and nobody's
    return q_btnH, extend(k_btkH), extend(v_btkV), q_ids_bt, jnp.where(there_s, extend(k_ids_bt), NOBODY)


def _heads_for_positions(plan, ways, q_btnH, k_btkH, v_btkV, q_ids_bt, k_ids_bt):
    """Of `ways` neighbours each gets all their positions of a part of the heads. Differentiable."""
    n, k = q_btnH.shape[2], k_btkH.shape[2]
    if n % ways:
        raise ValueError(f"{n} heads on each device cannot be exchanged among {ways}: they must be a multiple")
    copies = ways // math.gcd(k, ways)  # of a key/value head that several devices need
    take_heads = lambda x: _exchange(plan, x, 2, 1)
    k_btkH, v_btkV = [jnp.repeat(x, copies, 2) for x in (k_btkH, v_btkV)]
    if q_ids_bt is not None:
        q_ids_bt = k_ids_bt = _gather(plan, q_ids_bt, 1)
    return take_heads(q_btnH), take_heads(k_btkH), take_heads(v_btkV), q_ids_bt, k_ids_bt


def _exchange(plan, x, split_dim, concat_dim):
    if plan.groups == 1:
        return all_to_all(
            x, plan.method.axis, split_dim=split_dim, concat_dim=concat_dim, algorithm=plan.method.algorithm
        )
    return lax.all_to_all(x, plan.method.axis, split_dim, concat_dim, axis_index_groups=_neighbours(plan), tiled=True)


def _gather(plan, x, dim):
    """Of the neighbours that exchange heads."""
    if plan.groups == 1:
        return all_gather(x, plan.method.axis, dim=dim, algorithm=plan.method.algorithm)
    return lax.all_gather(x, plan.method.axis, axis=dim, axis_index_groups=_neighbours(plan), tiled=True)


def _neighbours(plan):
    return np.arange(lax.axis_size(plan.method.axis)).reshape(plan.groups, -1).tolist()


def _pass_on(plan, tree):
    """To the next group, from the previous one."""
    c = lax.axis_size(plan.method.axis)
    to_next = [(i, (i + c // plan.groups) % c) for i in range(c)]
    return jax.tree.map(lambda x: lax.ppermute(x, plan.method.axis, to_next), tree)


def _my_group(plan):
    return lax.axis_index(plan.method.axis) // (lax.axis_size(plan.method.axis) // plan.groups)


# -- attention by parts, and its gradient


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q_btnH, k_bskH, v_bskV, q_ids_bt, k_ids_bs):
    """(out_btnV, lse_bnt) over all keys of the sequence. Inside, heads come first: what the kernels take."""
    heads_first = [x.swapaxes(1, 2) for x in (q_btnH, k_bskH, v_bskV)]
    forward = _gathered if plan.method.impl == "all_gather" else _ring
    out_bntV, lse_bnt = forward(plan, *heads_first, q_ids_bt, k_ids_bs)
    return out_bntV.swapaxes(1, 2).astype(v_bskV.dtype), lse_bnt


def _attend_forward(plan, *operands):
    out_btnV, lse_bnt = _attend(plan, *operands)
    # With these two saved, jax.checkpoint need not go round the ring again.
    out_btnV, lse_bnt = checkpoint_name(out_btnV, "context"), checkpoint_name(lse_bnt, "log_sum_exp")
    return (out_btnV, lse_bnt), (*operands, out_btnV, lse_bnt)


def _attend_backward(plan, saved, cotangents):
    q_btnH, k_bskH, v_bskV, q_ids_bt, k_ids_bs, out_btnV, lse_bnt = saved
    dout_btnV, dlse_bnt = cotangents
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
            found = _block(plan, _take(queries, starts_q, size), _take(keys, starts_k, size), causal=False)
            for at, part in zip(starts_q, _split(found, len(starts_q)), strict=True):
                so_far = _put(so_far, merge(_take(so_far, [at], size), part), at)
            return so_far

        return pairs(so_far) if plan.method.balanced else lax.cond(hop <= _my_group(plan), pairs, lambda x: x, so_far)

    def turn(carry, hop):
        so_far, keys = carry
        arriving = _pass_on(plan, keys)  # while those that have arrived are attended to
        return (attend(so_far, keys, hop), arriving), None

    arriving = _pass_on(plan, keys)
    out_bntV, lse_bnt = _block(plan, queries, keys, causal=True)
    carry = (out_bntV.astype(jnp.float32), lse_bnt), arriving
    (so_far, keys), _ = lax.scan(turn, carry, jnp.arange(1, plan.groups - 1))
    return attend(so_far, keys, plan.groups - 1)


def _ring_gradients(plan, queries, keys):
    """(dq, dk, dv) in float32. A sum of dk and dv starts at the device after theirs and follows its keys home."""
    if plan.groups == 1:
        return _block_gradients(plan, queries, keys, causal=True, window=plan.window, q_offset=plan.q_offset)
    zeros = lambda arrays: [jnp.zeros_like(x, jnp.float32) for x in arrays]

    def found(keys, hop):
        """(where, what) there is to add to dq, dk and dv."""
        starts_q, starts_k, size = _pairs(plan, queries[0].shape[2], hop)
        block = lambda: _block_gradients(
            plan, _take(queries, starts_q, size), _take(keys, starts_k, size), causal=False
        )
        unseen = lambda: zeros((queries[0], *keys[:2]))
        parts = block() if plan.method.balanced else lax.cond(hop <= _my_group(plan), block, unseen)
        return list(zip(starts_q, starts_k, _split(parts, len(starts_q)), strict=True))

    def add(dq, dkv, found):
        for at_q, at_k, (dq_part, *dkv_part) in found:
            (dq,) = _add_at([dq], [dq_part], at_q)
            dkv = _add_at(dkv, dkv_part, at_k)
        return dq, dkv

    def turn(carry, hop, last=False):
        keys, dq, dkv = carry
        arriving = None if last else _pass_on(plan, keys)
        dkv_so_far = _pass_on(plan, dkv)  # neither is waited for by what is computed here
        return (arriving, *add(dq, dkv_so_far, found(keys, hop))), None

    here = keys
    keys = _pass_on(plan, here)
    arriving = _pass_on(plan, keys) if plan.groups > 2 else None
    carry = (arriving, *add(*zeros(queries[:1]), zeros(keys[:2]), found(keys, 1)))
    if plan.groups > 2:
        carry, _ = lax.scan(turn, carry, jnp.arange(2, plan.groups - 1))
        carry, _ = turn(carry, plan.groups - 1, last=True)
    _, dq, dkv = carry
    dkv_so_far = _pass_on(plan, dkv)
    dq_part, *dkv_part = _block_gradients(plan, queries, here, causal=True)
    return dq + dq_part, *_add(dkv_so_far, dkv_part)


def _pairs(plan, t, hop):
    """(starts of queries, starts of keys, positions from each): who sees whom of the keys of `hop` groups back.

    That is group me - hop, an earlier one if hop <= me and else, round the ring, a later one.
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
    """(starts, their positions in the sequence, positions from each) of this device's queries."""
    if not plan.method.balanced:
        return [0], [_my_group(plan) * t], t
    half = t // 2
    return [0, half], [_my_group(plan) * half, (2 * plan.groups - 1 - _my_group(plan)) * half], half


def _gather_keys(plan, keys):
    gather = lambda x: all_gather(x, plan.method.axis, dim=_dim(x), algorithm=plan.method.algorithm)
    return jax.tree.map(lambda x: _reorder(plan, gather(x), to_zigzag=False), keys)


def _reorder(plan, x, to_zigzag):
    """Positions of the whole sequence, from zigzag order to their own or back."""
    if not plan.method.balanced:
        return x
    places = order(2 * plan.groups, plan.groups, True)  # of the chunks
    chunks = jnp.split(x, 2 * plan.groups, _dim(x))
    return jnp.concatenate([chunks[at] for at in (places if to_zigzag else np.argsort(places))], _dim(x))


# -- parts of positions, in trees of arrays with heads first, [b, n, t, H] and [b, n, t], and of ids [b, t]


def _dim(x):
    """Of the positions."""
    return min(2, x.ndim - 1)


def _take(tree, starts, size):
    """`size` positions from each start, one below the other in the batch."""
    take = lambda x, at: lax.dynamic_slice_in_dim(x, at, size, _dim(x))
    return jax.tree.map(lambda x: jnp.concatenate([take(x, at) for at in starts]), tree)


def _split(arrays, parts):
    """The inverse in the batch: a list of `parts` tuples of arrays."""
    return list(zip(*(jnp.split(x, parts) for x in arrays), strict=True))


def _put(arrays, parts, at):
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, at, _dim(x)), arrays, parts)


def _add_at(arrays, parts, at):
    there = _take(arrays, [at], parts[0].shape[2])
    return _put(arrays, _add(there, parts), at)


def _add(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


# -- one block: some queries, some keys


def _block(plan, queries, keys, *, causal, window=0, q_offset=0):
    """(out_bntV, lse_bnt) of the queries over these keys alone."""
    (q, q_ids), (k, v, k_ids) = queries, keys
    mask = Mask(causal, window, segments=None if q_ids is None else (q_ids, k_ids), q_offset=q_offset)
    if plan.kernel:
        return flash.forward(q, k, v, mask, plan.scores, interpret=plan.interpret)
    q, k, v = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, lse = attention_in_chunks(q, k, v, mask, plan.scores, chunk=QUERIES_AT_ONCE)
    return out.swapaxes(1, 2), lse


def _block_gradients(plan, queries, keys, *, causal, window=0, q_offset=0):
    """(dq, dk, dv) in float32: of these queries and keys, with out and lse of the whole rows."""
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
    """Every way on simulated devices against attention on one, and who has how much to do."""
    q_BTNH, k_BTKH, v_BTKH = [jax.random.normal(jax.random.key(i), (1, T, N, 16)) for i, N in enumerate((8, 4, 4))]
    mesh = jax.make_mesh((c,), ("context",), axis_types=(AxisType.Auto,))
    print(f"{T} positions on {c} simulated devices, float32: largest difference from attention on one device")
    methods = [dict(impl="ring"), dict(impl="ring", balanced=True), dict(impl="ring", balanced=True, head_ways=2)]
    methods += [dict(impl="all_gather", balanced=True), dict(impl="all_to_all")]
    for fields, window in [(fields, 0) for fields in methods] + [({}, 300)]:
        method, mask = Method(**fields), Mask(window=window)
        places = order(T, ring_size(c, method.impl, method.head_ways), method.balanced)
        per_device = partial(
            lambda q, k, v, **options: context_attention(q, k, v, **options)[0], mask=mask, method=method
        )
        run = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context")))
        out_BTNH = run(*(x[:, places] for x in (q_BTNH, k_BTKH, v_BTKH)))
        expected, _ = attention(q_BTNH, k_BTKH, v_BTKH, mask)
        shown = ", ".join(f"{name}={value}" for name, value in (fields or dict(window=window)).items())
        print(f"  {shown:45} {jnp.abs(out_BTNH - expected[:, places]).max():.1e}")
    print(
        "\nkeys that the queries of each device see under a causal mask, of all that they could, to be read off `order`"
    )
    for name, balanced in (("in order", False), ("zigzag", True)):
        seen = (order(T, c, balanced) + 1).reshape(c, -1).mean(1) / T
        print(f"  {name:10}" + "".join(f"{share:7.1%}" for share in seen))


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
