"""Mixture of experts: E feed-forward networks in a layer, of which each token visits X; and experts spread over a mesh.

    scores_E = softmax(x_D @ w_router_DE)         or sigmoid
    chosen   = the X largest
    y_D      = sum over chosen e of  scores_E[e] * expert_e(x_D)

(Shazeer et al. 2017, arXiv:1701.06538.) Parameters grow with E, FLOPs with X. What is new is not the arithmetic of an
expert but its way there: each token goes to other weights, and how many go to each is known only when they go.

**Routing** (`route`), in float32. Softmax over all experts and the X largest, their weights made to sum to 1 or not
(Mixtral, arXiv:2401.04088, Qwen 3, arXiv:2505.09388, and gpt-oss do); or a sigmoid of each, of which a sum of 1 is made
(DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Groups: only the experts of the best groups can be chosen, a group being
as good as the sum of its two best.

**Balance.** Left alone, a router learns to send all to a few. Two ways to keep it from that:

    a loss      E * sum over e of f_e * p_e     f: share of the choices, p: mean score. 1 where all is equal. Switch
                                                (Fedus et al. 2021, arXiv:2101.03961, section 2.2). f counts the tokens
                                                of all devices, which lets one sequence be of one kind (Qiu et al. 2025,
                                                arXiv:2501.11873)
    a bias      b_e += u * sign(mean load - load of e)   after each step, outside the gradient; the choice sees
                                                scores + b, the weights the scores alone (Wang et al. 2024,
                                                arXiv:2408.15664). The task's gradient stays as it is

The z-loss, mean of logsumexp(logits)^2, keeps logits small (Zoph et al. 2022, ST-MoE, arXiv:2202.08906, section 3).

**Dispatch.** t tokens of a device make t*X (token, choice) pairs. Three ways to their experts and back, one result:

    dropless    Pairs are sorted by expert and sent as they are: as many rows to each device as there are, which write
                themselves sorted by expert there, whoever sent them. A grouped matmul (gmm.py) multiplies each expert's
                rows by its matrix; the rows go back the way they came. No padding is multiplied, and nothing dropped
                that fits in the receiver's buffer: `room` rows, a static bound. What does not is counted.
    capacity    Every expert has room for C = factor * t*X/E tokens of each device (Lepikhin et al. 2020, GShard,
                arXiv:2006.16668, section 2.2): dense arrays and an ordinary all-to-all. First choices come first; those
                that find no room are dropped, and counted. Of the matmuls 1 - 1/factor is padding.
    reference   Every expert multiplies every token and the weights, zero for most, choose. E/X times the FLOPs.

    x_td  ->  x_pd sorted  ->  all-to-all over `expert`  ->  x_rd  ->  experts  ->  y_rd  ->  back  ->  y_td

**Cost**, a layer, a device, forward, in bfloat16, at C FLOP/s, W bytes/s into a device, on an expert axis of N:

    compute              6 t X D M / C
    all-to-all           4 t X D (1 - 1/N) / W        out and back
    gather over fsdp     6 E D M / W / N              the expert axis divides it: those experts are here already

With N = 1 (FSDP alone, no all-to-all) the gather hides when t > E/X * C/W tokens a device; on TPU7x C/W is about 2100
(fsdp.py), and Qwen3-30B (E/X = 16) takes 34,000 tokens. An all-to-all hides when M > 2/3 * C/W at its W, which is less
than a gather's: across a ring of N devices each byte makes N/4 hops. Expert parallelism moves less where

    4 t X D < 6 E D M     <=>     t < 1.5 M E/X          18,000 tokens a device of Qwen3-30B, 98,000 of DeepSeek-V3

so it is for many experts and few tokens a device: large slices, long training of small batches. Published runs on TPU
with much batch a device found FSDP alone faster; `roofline.py plan` compares.

**Over fsdp** the experts' matrices are cut as one of E*D rows, down's transposed: each of E devices has an expert, each
of 2E half of one. What is gathered is then a run of memory. Cut by D, every matrix comes in parts of D/N rows; where
these are no multiple of 8, a register, XLA:TPU copies them to where they belong, and gradients before they are
scattered: DeepSeek-V3 on `fsdp:512`, 14 rows each, took 4.3 s of a step of 29 for that (compiled).

**In parts** (`in_parts`). Nothing of a layer can be computed before its rows are there, and little else is beside it.
With the tokens in n parts the rows of one travel while those of another are multiplied:

    links      there 1   there 2   back 1    back 2         1 - 1/n of what travels is beside a matmul
    experts              of 1      of 2

XLA:TPU finds that order for a layer that stands alone (compiled, tests/test_moe.py). In a step it hardly does: of two
parts 7% of the messages are hidden (RESULTS.md, "Experts"). It costs matmuls of fewer rows an expert, and a weight's
gradient is a sum of n.

Tokens could go over the axis once, not once for each of their experts there: for N <= X an all-gather of x_td, (N-1) t
D, moves less than X (1 - 1/N) t D. **Left out**, with limits on the devices that a token may go to (DeepSeek-V3, 2.1.2:
its groups are there for that), its balance within a sequence, routing by the experts' choice (arXiv:2202.09368), noise
in the router, and forward-mode derivatives.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import collectives
import sharding
from gmm import gated_gmm, gmm

# experts(x, sizes): [rows, d] sorted by expert, with the rows of each; or [experts, rows, d] and None
Experts = Callable[[jax.Array, jax.Array | None], jax.Array]


# -- the router


class Routing(NamedTuple):
    """What a router says of t tokens."""

    experts_tX: jax.Array  # int32: chosen, the best first
    weights_tX: jax.Array  # float32: of their results, differentiable in the logits
    scores_tE: jax.Array  # float32: of all experts, a sum of 1


def route(
    logits_tE: jax.Array,
    choices: int,
    *,
    scores: str = "softmax",
    renormalise: bool = True,
    bias_E: jax.Array | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    scale: float = 1.0,
) -> Routing:
    """Chooses experts for each token, and says how much each of them counts.

    Args:
      logits_tE: float32.
      choices: X, how many.
      scores: softmax over the experts, or sigmoid of each.
      renormalise: the weights of the chosen ones are divided by their sum.
      bias_E: added to the scores for the choice only.
      groups: the experts are cut into so many, of which the `groups_kept` best can be chosen from.
      scale: of the weights, in the end (DeepSeek-V3: 2.5).

    Of equal scores the lower number is chosen.
    """
    t, E = logits_tE.shape
    scores_tE = jax.nn.softmax(logits_tE) if scores == "softmax" else jax.nn.sigmoid(logits_tE)
    choice_tE = lax.stop_gradient(scores_tE if bias_E is None else scores_tE + bias_E)
    if groups_kept < groups:
        by_group = choice_tE.reshape(t, groups, E // groups)
        best_two = top_k(by_group, min(2, E // groups))[0]
        kept = top_k(jnp.sum(best_two, -1), groups_kept)[1]
        is_kept = jnp.any(kept[:, :, None] == jnp.arange(groups), 1)
        choice_tE = jnp.where(is_kept[:, :, None], by_group, -jnp.inf).reshape(t, E)
    experts_tX = top_k(choice_tE, choices)[1]
    # A sum over all of them, of which one is chosen: the gradient of a look-up would be a scatter.
    chosen_tXE = experts_tX[..., None] == jnp.arange(E)
    weights_tX = jnp.sum(jnp.where(chosen_tXE, scores_tE[:, None], 0), -1)
    if renormalise:
        weights_tX /= jnp.sum(weights_tX, -1, keepdims=True) + 1e-20
    if scores == "sigmoid":
        scores_tE /= jnp.sum(scores_tE, -1, keepdims=True) + 1e-20
    return Routing(experts_tX, weights_tX * scale, scores_tE)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest along the last dim, and their places, as `lax.top_k`; at least k of them must be above -inf.

    One maximum after the other. XLA:TPU sorts every row for its own: 5.8 ms for the 8 best of 128 of 65,536 tokens
    (Qwen3 235B), 11.6 ms of 256 (DeepSeek-V3), where this takes 1.8 and 1.9 (compiled).
    """
    number, values, places = jnp.arange(x.shape[-1]), [], []
    for _ in range(k):
        values.append(jnp.max(x, -1))
        places.append(jnp.argmax(x, -1).astype(jnp.int32))
        x = jnp.where(number == places[-1][..., None], -jnp.inf, x)
    return jnp.stack(values, -1), jnp.stack(places, -1)


def loads(experts_tX: jax.Array, num_experts: int) -> jax.Array:
    """int32 [E]: how many of the choices fell on each expert."""
    chosen_tXE = experts_tX[..., None] == jnp.arange(num_experts)
    return jnp.sum(chosen_tXE, (0, 1), dtype=jnp.int32)


def load_balance_loss(scores_tE: jax.Array, loads_E: jax.Array, num_tokens: float) -> jax.Array:
    """This device's share of E * sum f_e * p_e: 1 where all experts have as much, E where one has all.

    Args:
      scores_tE: of this device's tokens; the gradient flows through them.
      loads_E: of the tokens over which it is to be balanced, those of other devices included.
      num_tokens: of all tokens whose shares are added up.
    """
    f_E = loads_E / jnp.sum(loads_E)
    return scores_tE.shape[1] * jnp.sum(f_E * jnp.sum(scores_tE, 0)) / num_tokens


def z_loss(logits_tE: jax.Array, num_tokens: float) -> jax.Array:
    """This device's share of the mean of log(Z)^2, Z the denominator of the softmax."""
    return jnp.sum(jax.nn.logsumexp(logits_tE, -1) ** 2) / num_tokens


def entropy(scores_tE: jax.Array, num_tokens: float) -> jax.Array:
    """This device's share of the mean entropy, in nats: log(E) of one that knows nothing, 0 of a sure one."""
    return -jnp.sum(jax.scipy.special.xlogy(scores_tE, scores_tE)) / num_tokens


def updated_bias(bias: jax.Array, loads: jax.Array, rate: float) -> jax.Array:
    """The bias [..., E] after a step with these loads [..., E]: up for experts below the mean, down for those above."""
    return bias + rate * jnp.sign(jnp.mean(loads, -1, keepdims=True) - loads)


# -- the experts' matmuls


def grouped_matmul(
    x_rK: jax.Array, w_eKN: jax.Array, sizes_e: jax.Array | None, *, transpose: bool = False
) -> jax.Array:
    """Each expert's rows times its matrix: x_rK sorted by expert, `sizes_e` of each; or x_ecK and None. Differentiable.

    With `transpose` w_eNK. Rows behind the last group give zeros. On a TPU the kernels of gmm.py.
    """
    if sizes_e is None:
        return _products(x_rK, w_eKN, transpose)
    if sharding.platform() != "tpu":
        return _tiled_matmul(x_rK, w_eKN, sizes_e, transpose)
    return gmm(x_rK, w_eKN, sizes_e, transpose_rhs=transpose)


def gated_matmul(
    x_rD: jax.Array,
    gate_eDm: jax.Array,
    up_eDm: jax.Array,
    sizes_e: jax.Array | None,
    limit: float = 0.0,
    names: tuple[str, str] = ("gate", "up"),
) -> jax.Array:
    """`swiglu` of `grouped_matmul` with gate and with up, which a policy of `jax.checkpoint` knows by these names.

    On a TPU one kernel computes all three. The activation then hides behind the matmuls, while on its own it would take
    the vector units 0.15 of the time of an expert's three matmuls of 4096 (compiled, gmm.py).
    """
    activation = partial(swiglu, limit=limit)
    if sizes_e is not None and sharding.platform() == "tpu":
        return gated_gmm(x_rD, gate_eDm, up_eDm, sizes_e, activation, names=names)
    products = (grouped_matmul(x_rD, w, sizes_e) for w in (gate_eDm, up_eDm))
    return activation(*map(checkpoint_name, products, names))


def _products(x_ecK, w, transpose):
    """x_ecK . w_eKN, or w_eNK as it lies: a copy with dims swapped would be kept for the gradient, of every layer."""
    if not transpose:
        return jnp.matmul(x_ecK, w)
    w_eNK = w
    return jnp.einsum("ecK,eNK->ecN", x_ecK, w_eNK)


def _tiled_matmul(x_rK, w_eKN, sizes_e, transpose: bool = False, rows: int = 64):
    """The same in plain jax.numpy: tiles of rows of one expert, each with a copy of its matrix.

    `jax.lax.ragged_dot` has every expert multiply all rows where there is no kernel for it: on a CPU, with 8 experts of
    512 rows, forward and backward take 12 times as long as this (measured).
    """
    num_rows, num_experts = x_rK.shape[0], w_eKN.shape[0]
    tiles_e = -(-sizes_e // rows)
    last_e, end_e = jnp.cumsum(tiles_e), jnp.cumsum(sizes_e)
    tile = jnp.arange(-(-num_rows // rows) + num_experts)
    expert = jnp.minimum(jnp.searchsorted(last_e, tile, side="right"), num_experts - 1)
    nth = tile - (last_e - tiles_e)[expert]
    row = ((end_e - sizes_e)[expert] + nth * rows)[:, None] + jnp.arange(rows)
    row = jnp.where(row < end_e[expert][:, None], row, num_rows)  # past the end: nobody's
    tiles = jnp.take(x_rK, row, axis=0, mode="fill", fill_value=0)
    products = _products(tiles, w_eKN[expert], transpose)
    out = jnp.zeros_like(products, shape=(num_rows, products.shape[2]))
    return out.at[row].set(products, mode="drop")


def add_bias(y_rm: jax.Array, bias_em: jax.Array, sizes_e: jax.Array | None) -> jax.Array:
    """A bias an expert, on rows as `grouped_matmul` has them. Rows behind the last group give zeros."""
    if sizes_e is None:
        return y_rm + bias_em[:, None]
    end_e = jnp.cumsum(sizes_e)
    row = jnp.arange(y_rm.shape[0])[:, None]
    is_of_re = (row >= end_e - sizes_e) & (row < end_e)
    bias_rm = jnp.matmul(is_of_re.astype(bias_em.dtype), bias_em)  # by a product: no scatter in its gradient
    return jnp.where(row < end_e[-1], y_rm + bias_rm, 0)


def swiglu(gate: jax.Array, up: jax.Array, limit: float = 0.0) -> jax.Array:
    """silu(gate) * up; with a limit as gpt-oss has it: clamped, the sigmoid steeper, and `up` counted from -1.

    Source: the `swiglu` of openai/gpt-oss (gpt_oss/torch/model.py).
    """
    if not limit:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


# -- pairs and rows


class Missing(NamedTuple):
    """Which of `copy_rows`' places may be past the end."""

    sources: bool
    copies: bool


NONE_MISSING = Missing(sources=False, copies=False)


def copy_rows(x: jax.Array, source: jax.Array, copies: jax.Array, missing: Missing) -> jax.Array:
    """x[source]: zeros where `source` is past the end.

    `copies` says the same from the other side, so that the gradient is a look-up too, and no scatter: [k * rows of x],
    the rows of the result that are copies of a row of x, k of them at most; past the end where there is none.

    XLA:TPU looks rows up, and then goes over all of them once more to put zeros for those past the end: 6.2 ms for the
    524,288 pairs of 4096 in a layer of Qwen3 235B, six times a layer (compiled). So it is asked for where they may be.
    """
    return _copy_rows((x.shape[0], missing), x, source, copies)


def _rows(x, places, may_miss):
    return jnp.take(x, places, axis=0, **dict(mode="fill", fill_value=0) if may_miss else dict(mode="clip"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copy_rows(options, x, source, copies):
    return _rows(x, source, options[1].sources)


def _copy_rows_backward(options, copies, dy):
    num_rows, missing = options
    dx = _rows(dy, copies, missing.copies)
    return _sum(list(dx.reshape(-1, num_rows, *dy.shape[1:]))), None, None


_copy_rows.defvjp(
    lambda options, x, source, copies: (_copy_rows(options, x, source, copies), copies), _copy_rows_backward
)


def _sum(terms: list[jax.Array]) -> jax.Array:
    """In float32, one after the other: XLA:TPU takes longer, by its own estimate, to reduce an array's first dim."""
    return sum(term.astype(jnp.float32) for term in terms).astype(terms[0].dtype)


class Pairs(NamedTuple):
    """All (token, choice) pairs of a device, sorted by expert. int32. pair = choice*t + token: first choices first."""

    order_p: jax.Array  # which pair stands at each place
    place_p: jax.Array  # where each pair stands
    loads_E: jax.Array


def sort_pairs(experts_tX: jax.Array, num_experts: int) -> Pairs:
    expert_p = experts_tX.T.reshape(-1)
    order_p = jnp.argsort(expert_p, stable=True)
    return Pairs(order_p, jnp.argsort(order_p), loads(experts_tX, num_experts))


def combine(
    y_rd: jax.Array, place_p: jax.Array, order_r: jax.Array, weights_tX: jax.Array, missing: Missing
) -> jax.Array:
    """Weighted sum of each token's results, which stand in `y_rd` where `place_p` says."""
    t, X = weights_tX.shape
    y_Xtd = copy_rows(y_rd, place_p, order_r, missing).reshape(X, t, *y_rd.shape[1:])
    over_d = lambda weight_t: weight_t.reshape(t, *(1 for _ in y_rd.shape[1:]))
    return sum(y_Xtd[k] * over_d(weights_tX[:, k]) for k in range(X)).astype(y_rd.dtype)  # in float32, as the weights


# -- dispatch


def in_parts(dispatch: Callable, x_td: jax.Array, routing: Routing, parts: int) -> tuple[jax.Array, jax.Array]:
    """What `dispatch(x_td, routing)` gives, of the tokens in parts: one could compute while another is on its way.

    XLA:TPU hides 7% of the messages so, and a step is 6% shorter (compiled, RESULTS.md, "Experts").
    Each part has a buffer of its own, so that one can be short of room where another is not.
    """
    cut = zip(*(jnp.split(a, parts) for a in (x_td, *routing)), strict=True)
    y, dropped = zip(*(dispatch(x_td, Routing(*of_part)) for x_td, *of_part in cut), strict=True)
    return jnp.concatenate(y), sum(dropped)


def dropless(x_td: jax.Array, routing: Routing, experts: Experts, axis: str, room: int) -> tuple[jax.Array, jax.Array]:
    """Each token's mixture, y_td, and how many of this device's pairs were dropped. Per-device code.

    Args:
      experts: of this device, on rows sorted by them. What rows behind the last group hold, here and in the cotangent
        of the result, is anything; what it gives for them is not read.
      axis: mesh axis of the experts. Of size 1, nothing is sent and nothing dropped.
      room: rows of the buffer in which other devices' rows arrive, its own among them. Where more come, the last ones
        in the order of the experts are dropped: their experts add nothing to their tokens.
    """
    (t, E), d = routing.scores_tE.shape, x_td.shape[1]
    pairs = sort_pairs(routing.experts_tX, E)
    if lax.axis_size(axis) == 1:
        x_pd = copy_rows(x_td, pairs.order_p % t, pairs.place_p, NONE_MISSING)
        y_pd, dropped = experts(x_pd, pairs.loads_E), 0 * pairs.loads_E[0]
        return combine(y_pd, pairs.place_p, pairs.order_p, routing.weights_tX, NONE_MISSING), dropped
    there, back, sizes_e, dropped = exchange_plan(pairs.loads_E, axis, room)
    is_of_pE = routing.experts_tX.T.reshape(-1, 1) == jnp.arange(E)
    end_p = jnp.sum(jnp.where(is_of_pE, there.start + there.size, 0), 1)  # of the slice that is sent to its expert
    num_pairs = end_p.shape[0]
    place_p = jnp.where(pairs.place_p < end_p, pairs.place_p, num_pairs)  # nothing of a dropped one comes back
    x_pd = copy_rows(in_rows(x_td), pairs.order_p % t, place_p, Missing(sources=False, copies=True))
    x_rd = exchange(x_pd, room, there, back, axis, t).reshape(room, d)
    y_rd = in_rows(experts(x_rd, sizes_e))
    y_pd = exchange(y_rd, num_pairs, back, there, axis, t)
    missing = Missing(sources=True, copies=False)
    return combine(y_pd, place_p, pairs.order_p, routing.weights_tX, missing).reshape(t, d), dropped


def in_rows(x_rd: jax.Array) -> jax.Array:
    """[r, d / 128, 128] where that divides: in the layout of a TPU, each row is then in one piece.

    In [r, d] 8 rows lie within each other, and a slice of some is no run of bytes: XLA would bring it into such a form
    for the exchange, and back, and have what comes before and after work in it at a quarter of the speed. Compiled, a
    layer of Qwen3-30B with its experts on 4 of 16 devices: with this, buffers that are not filled first, and `_sum`, it
    takes 23 ms beside its kernels, forward and backward, where it took 33. Where 128 does not divide, it is copies that
    take the time, 55 ms in a layer of gpt-oss with room for 327,680 rows of 2880; filled up to 2944, 23 registers'
    columns, they took no less (3072 was not tried).
    """
    return x_rd.reshape(x_rd.shape[0], -1, 128) if x_rd.shape[1] % 128 == 0 else x_rd


class Way(NamedTuple):
    """Rows from device to device, in slices, as many for each device as it has experts: int32 [E]."""

    start: jax.Array  # where this device's slices start
    size: jax.Array
    target: jax.Array  # where each goes in its receiver's buffer
    arriving: jax.Array  # the sizes of those that come


def exchange_plan(loads_E: jax.Array, axis: str, room: int) -> tuple[Way, Way, jax.Array, jax.Array]:
    """The way to the experts, the way back, the rows that each expert of this device gets, the pairs it must drop.

    Every device knows how many rows every other one has for each expert, so that all know where each slice lies: in a
    receiver's buffer first by expert, then by sender. N*E numbers are gathered for it.
    """
    N, E = lax.axis_size(axis), loads_E.shape[0]
    me = lax.axis_index(axis)
    loads_NE = collectives.all_gather(loads_E, axis, tiled=False, algorithm="xla")
    of_pair = jnp.cumsum(loads_NE, 1) - loads_NE  # [sender, expert]: where they start among the sender's pairs
    # In the buffer of each receiver, whose experts are e: [receiver, expert of it, sender].
    wanted = loads_NE.T.reshape(N, E // N, N)
    ends = jnp.cumsum(wanted.reshape(N, -1), 1).reshape(wanted.shape)
    in_buffer = jnp.minimum(ends - wanted, room)
    sizes = jnp.minimum(ends, room) - in_buffer
    mine = lambda a: lax.dynamic_index_in_dim(a, me, 0, keepdims=False)
    sent = lambda a: lax.dynamic_index_in_dim(a, me, 2, keepdims=False).reshape(E)  # [receiver, expert of it]
    received = lambda a: mine(a).T.reshape(E)  # [sender, expert of mine]
    at_sender = received(jnp.moveaxis(of_pair.reshape(N, N, E // N), 0, 2))
    there = Way(mine(of_pair), sent(sizes), sent(in_buffer), received(sizes))
    back = Way(received(in_buffer), received(sizes), at_sender, sent(sizes))
    return there, back, jnp.sum(mine(sizes), 1), jnp.sum(loads_E) - jnp.sum(sent(sizes))


def exchange(x: jax.Array, rows: int, there: Way, back: Way, axis: str, most: int) -> jax.Array:
    """Sends x's slices `there`: [rows, ...], where none arrives as it was found. Its gradient comes the way `back`.

    On a TPU the collective of that name, which the SparseCores do beside the computation; elsewhere collectives.py's,
    which pads each slice to the `most` rows that one can have.
    """
    return _exchange((axis, most), (rows, x.shape[0]), x, there, back)


def unwritten(shape: tuple[int, ...], dtype) -> jax.Array:
    """Memory as it is found, NaN perhaps: to be written, or not read."""
    return lax.empty(shape, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(options, rows, x, there, back):
    axis, most = options
    out = lax.pcast(unwritten((rows[0], *x.shape[1:]), x.dtype), tuple(jax.typeof(x).mat.varying), to="varying")
    if sharding.platform() == "tpu":
        return lax.ragged_all_to_all(x, out, there.start, there.size, there.target, there.arriving, axis_name=axis)
    slices = (there.start, there.size, there.target)
    return collectives.ragged_all_to_all(x, out, *slices, axis, block_rows=most, algorithm="xla")[0]


def _exchange_backward(options, rows, ways, dy):
    there, back = ways
    return _exchange(options, rows[::-1], dy, back, there), None, None


_exchange.defvjp(
    lambda options, rows, x, there, back: (_exchange(options, rows, x, there, back), (there, back)), _exchange_backward
)


def with_capacity(
    x_td: jax.Array, routing: Routing, experts: Experts, axis: str, capacity: int, algorithm: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """As `dropless`, where each expert takes `capacity` of this device's pairs, first choices first, and no more."""
    t, E = routing.scores_tE.shape
    pairs = sort_pairs(routing.experts_tX, E)
    num_pairs = pairs.order_p.shape[0]
    start_E = jnp.cumsum(pairs.loads_E) - pairs.loads_E
    nth = jnp.arange(capacity)
    slot_EC = jnp.where(nth < pairs.loads_E[:, None], start_E[:, None] + nth, num_pairs)  # place of the pair in it
    pair_r = jnp.take(pairs.order_p, slot_EC.reshape(-1), mode="fill", fill_value=num_pairs)
    expert_p = routing.experts_tX.T.reshape(-1)
    nth_p = pairs.place_p - start_E[expert_p]
    slot_p = jnp.where(nth_p < capacity, expert_p * capacity + nth_p, E * capacity)
    missing = Missing(sources=True, copies=True)
    x_rd = copy_rows(x_td, jnp.where(pair_r < num_pairs, pair_r % t, t), slot_p, missing)
    x_ECd = x_rd.reshape(E, capacity, -1)
    if lax.axis_size(axis) == 1:
        y_ECd = experts(x_ECd, None)
    else:
        swap = partial(collectives.all_to_all, axis=axis, algorithm=algorithm)
        y_ECd = swap(experts(swap(x_ECd, split_dim=0, concat_dim=1), None), split_dim=1, concat_dim=0)
    y_td = combine(y_ECd.reshape(E * capacity, -1), slot_p, pair_r, routing.weights_tX, missing)
    return y_td, jnp.sum(jnp.maximum(pairs.loads_E - capacity, 0))


def reference(x_td: jax.Array, routing: Routing, experts: Experts, axis: str) -> jax.Array:
    """All tokens through all experts. Over `axis` the tokens are gathered, and the experts' sums scattered."""
    E = routing.scores_tE.shape[1]
    chosen_tXE = jax.nn.one_hot(routing.experts_tX, E)
    gates_tE = jnp.einsum("tXE,tX->tE", chosen_tXE, routing.weights_tX)
    gates_te = gates_tE  # of all experts: they are here
    if lax.axis_size(axis) > 1:
        x_td = collectives.all_gather(x_td, axis, dim=0, algorithm="xla")
        gates_te = collectives.all_to_all(gates_tE, axis, split_dim=1, concat_dim=0, algorithm="xla")
    y_etd = experts(jnp.broadcast_to(x_td, (gates_te.shape[1], *x_td.shape)), None)
    y_td = jnp.einsum("etd,te->td", y_etd, gates_te).astype(x_td.dtype)
    return collectives.reduce_scatter(y_td, axis, dim=0, algorithm="xla") if lax.axis_size(axis) > 1 else y_td


# -- a demonstration


def main() -> None:
    """Eight experts on eight simulated devices: who is chosen, what is dropped, and the error against the reference."""
    t, X, E, D, M = 64, 2, 8, 32, 64
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 5)
    x_TD = jax.random.normal(keys[0], (8 * t, D))
    gate, up, down = (
        jax.random.normal(key, shape) / shape[1] ** 0.5
        for key, shape in zip(keys[1:4], [(E, D, M), (E, D, M), (E, M, D)], strict=True)
    )
    # A router that likes some experts better, and one that does not.
    for name, skew in (("even", 0.0), ("skewed", 1.0)):
        logits_TE = jax.random.normal(keys[4], (8 * t, E)) + skew * jnp.arange(E) / 2

        def per_device(x_td, logits_tE, gate, up, down):
            routing = route(logits_tE, X)

            def experts(x, sizes):
                return grouped_matmul(gated_matmul(x, gate, up, sizes), down, sizes)

            want = reference(x_td, routing, experts, "expert")
            share = lambda y_td: jnp.sum((y_td - want) ** 2) / jnp.sum(want**2)
            ways = {
                "dropless, room for 4 times the mean": dropless(x_td, routing, experts, "expert", 4 * t * X),
                "dropless, room for 1.5 times the mean": dropless(x_td, routing, experts, "expert", 3 * t * X // 2),
                "capacity, 1.25 times the mean": with_capacity(x_td, routing, experts, "expert", 5 * t * X // E // 4),
            }
            told = {
                way: (lax.pmean(share(y), "expert"), lax.psum(dropped, "expert")) for way, (y, dropped) in ways.items()
            }
            return lax.psum(loads(routing.experts_tX, E), "expert"), told

        sharded = jax.shard_map(per_device, mesh=mesh, in_specs=P("expert"), out_specs=P())
        loads_E, told = jax.jit(sharded)(x_TD, logits_TE, gate, up, down)
        imbalance = loads_E.max() / loads_E.mean()
        print(f"{name} router: tokens by expert {' '.join(map(str, loads_E))}, max/mean {imbalance:.2f}")
        for way, (error, dropped) in told.items():
            print(f"    {way:40} dropped {dropped / (8 * t * X):6.1%}   squared error {error:.1e}")


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
