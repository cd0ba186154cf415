"""Mixture of experts: a router sends each token to X of a layer's E feed-forward networks, spread over a mesh axis.

**Idea** (Shazeer et al. 2017, arXiv:1701.06538). The parameters grow with E, but the FLOPs of a token only with X. An
expert computes what an MLP computes. The communication is new: each token is sent to the devices of its experts. The
number of tokens for each expert is known only at run time.

**Formula.**

    scores_E = softmax(x_D @ w_router_DE)         or a sigmoid of each logit
    chosen   = the X experts with the largest scores
    y_D      = sum over chosen e of  scores_E[e] * expert_e(x_D)

**Names of dims.** A device has t tokens and e of the E experts. Each token is sent to X experts. T are the tokens of
all devices along the axis of the experts. D is the model's width, d a device's shard of it. M is an expert's width, m a
device's shard of it. p counts (token, choice) pairs, r the rows of a buffer, and c the rows of an expert with a fixed
capacity.

**Routing** (`route`) is in float32. Mixtral (arXiv:2401.04088), Qwen 3 (arXiv:2505.09388) and gpt-oss take a softmax
over all experts, choose the X largest, and may renormalise their weights to a sum of 1. DeepSeek-V3 (arXiv:2412.19437,
section 2.1.2) takes a sigmoid of each logit and renormalises. With groups, only experts of the best groups can be
chosen; the score of a group is the sum of its two best.

**Balance.** A router that is trained on the task's loss alone learns to send all tokens to a few experts. There are two
remedies:

    a loss      E * sum over e of f_e * p_e     f: an expert's share of all choices, p: its mean score. It is 1 when all
                                                are equal. From Switch (Fedus et al. 2021, arXiv:2101.03961, section
                                                2.2). f counts the tokens of all devices, so that a single sequence may
                                                prefer some experts (Qiu et al. 2025, arXiv:2501.11873)
    a bias      b_e += u * sign(mean load - load of e)   after each step, outside the gradient. Experts are chosen by
                                                scores + b and weighted by scores alone (Wang et al. 2024,
                                                arXiv:2408.15664), so the gradient of the task is unchanged

The z-loss, the mean of logsumexp(logits)^2, keeps logits small (Zoph et al. 2022, ST-MoE, arXiv:2202.08906, section 3).

**Dispatch.** The t tokens of a device make t*X (token, choice) pairs. Three methods bring them to their experts and
combine the results. All give the same y, except for pairs that `capacity` drops:

    dropless    Pairs are sorted by expert, and a grouped matmul (gmm.py) multiplies the rows of each expert by its
                matrix. The buffer of a device's rows has a static size, `buffer_rows`. If there are more, there are
                more rounds: in round k, the rows from k * buffer_rows on. Their number depends on the router's choices
                alone. Rows get to the device of their experts in one of two ways:
                tokens gathered    Each of N devices gathers the tokens of all. It looks up the rows of its experts and
                                   adds up their results for each token. These sums are reduce-scattered. A token
                                   travels once to each device, and not once for each of its experts there.
                rows sent          Rows are sent without padding. In the receiver's buffer they are sorted by expert,
                                   and for each expert by sender. The results are sent back by the same plan with
                                   senders and receivers exchanged.
                The model gathers if N <= X (anatomy.gathers_tokens). Then it moves no more bytes than it would send.
    capacity    Every expert has C = factor * t*X/E slots for the tokens of each device (Lepikhin et al. 2020, GShard,
                arXiv:2006.16668, section 2.2). So arrays are dense, and the all-to-all is an ordinary one. The first
                choices of all tokens get slots before the second ones. Pairs without a slot are dropped and counted.
                1 - 1/factor of the matmuls is padding.
    reference   Every expert multiplies every token. The sum over experts is weighted, and most weights are zero. It
                takes E/X times the FLOPs.

    x_td  ->  x_pd sorted  ->  all-to-all over `expert`  ->  x_rd  ->  experts  ->  y_rd  ->  all-to-all  ->  y_td
    x_td  ->  all-gather over `expert`  ->  x_Td  ->  x_rd sorted  ->  experts  ->  y_Td  ->  reduce-scatter  ->  y_td

**Weights.** The last matmul of an expert is linear, so the scores multiply its operand, of width M, and not its result,
of width D. The gradient of a score is the sum of product * dproduct. So the backward pass reads no result of an expert:
it repeats neither the last matmul nor, over an axis, the exchange of its results. What is left of the combine adds up
rows. Its gradient is a copy of rows, as the dispatch is. If experts have a bias and rows are not sent, each token gets
the weighted sum of the biases once. Scores are sent with the rows. XLA:TPU pads each to 256 numbers.

**Chunks** (`in_chunks`). The matmuls of the experts cannot start before their rows arrive, and the layer has little
else to compute meanwhile. If the tokens are split into n chunks, the rows of one chunk are sent while those of another
are multiplied:

    links      dispatch 1   dispatch 2   combine 1   combine 2       1 - 1/n of the traffic is beside a matmul
    experts                 chunk 1      chunk 2

The price is that each matmul has fewer rows, and a weight's gradient is a sum of n.

**Layout.** fsdp shards the experts' matrices as if they were one matrix of E*D rows (those of `down` are stored
transposed). So each of E devices has the matrix of one expert, and each of 2E devices half of one. A gathered shard is
contiguous in memory.

**Cost** of a layer for one device in the forward pass, in bfloat16. C is the FLOP/s of a device, W the bytes/s that it
receives, N the size of the mesh axis `expert`:

    compute              6 t X D M / C
    all-to-all           4 t X D (1 - 1/N) / W        dispatch and combine, rows sent
    gather and scatter   4 t D (N - 1) / W            dispatch and combine, tokens gathered
    gather over fsdp     6 E D M / W / N              1/N of the experts: those of this device

With N = 1 (FSDP alone, nothing sent) the gather is hidden if t > E/X * C/W tokens a device. On TPU7x C/W is about 2100
(fsdp.py), so Qwen3-30B (E/X = 16) needs 34,000 tokens. An all-to-all is hidden if M > 2/3 * C/W. Its W is less than
that of a gather, because in a ring of N devices each byte passes N/4 links, and because the two devices of a chip share
its links and what is gathered over them. Expert parallelism sends fewer bytes if

    4 t X D < 6 E D M     <=>     t < 1.5 M E/X          18,000 tokens a device of Qwen3-30B, 98,000 of DeepSeek-V3

So it suits models with many experts, and runs with few tokens a device: large slices, or long training with small
batches. Published runs on TPU with many tokens a device found FSDP alone faster. `roofline.py plan` compares the two.

**On TPU7x.** If fsdp sharded D of every matrix instead, a shard would have D/N rows of each matrix. If D/N is not a
multiple of 8, the rows of a register, XLA:TPU copies gathered shards to their place, and gradients before they are
scattered. With DeepSeek-V3 on `fsdp:512` a shard had 14 rows of each matrix, and the copies took 4.3 s of a step of
29 s (compiled). The order of chunks above is the one that XLA:TPU schedules for a single layer (compiled,
tests/test_moe.py). In a full step with two chunks 7% of the messages are hidden (docs/RESULTS.md, "Experts").

Where a buffer may be too small, the program has loops for further rounds. With one layer and a step, `tiny-moe` on
`fsdp:2,expert:4` takes 20 s of a CPU, most to compile; 12 s with a `--buffer_factor` of the axis' size, without loops.

**Left out.** On an axis of more than X devices a token is sent once for each of its experts on a device, and could be
sent once. DeepSeek-V3 uses its groups to limit the devices to which a token may go, and balances within a sequence
(section 2.1.2); a gather sends each token to all. Also left out are experts that choose tokens
(arXiv:2202.09368), noise in the router, and forward-mode derivatives.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import collectives
import sharding
from gmm import Activated, activated_gmm, gated_gmm, gmm, tgmm

# A function experts(w, x, sizes, factors, copies=None, arriving=()): the result of a device's experts with weights w,
# for each row of x, times the row's factor. It has the shape of x. If x is [rows, d], its rows are sorted by expert,
# `sizes` has the rows of each expert, and `factors` is [rows], float32. If x is [experts, rows, d], `sizes` is None,
# and `factors` is [experts, rows]. With `copies` it returns add_copies(result, copies). Its last matmul may wait for
# the arrays `arriving`. It must depend on no other traced value.
Experts = Callable[..., jax.Array]


# -- the router


class Routing(NamedTuple):
    """The router's decision for t tokens."""

    experts_tX: jax.Array  # int32: the chosen experts of each token, the best first
    weights_tX: jax.Array  # float32: the weights of their results, differentiable with respect to the logits
    scores_tE: jax.Array  # float32: the scores of all experts, which sum to 1 for each token


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
    scale_E: jax.Array | None = None,
) -> Routing:
    """Returns the chosen experts of each token and the weights of their results.

    Of experts with equal scores, the one with the lower index is chosen.

    Args:
      logits_tE: the router's logits, float32.
      choices: X, the number of experts for each token.
      scores: "softmax" over the experts, or "sigmoid" of each.
      renormalise: divide the weights of the chosen experts by their sum.
      bias_E: added to the scores for the choice only.
      groups: the number of groups of experts. Only experts of the `groups_kept` best groups can be chosen.
      scale: a factor that multiplies all weights (DeepSeek-V3: 2.5).
      scale_E: a factor of each expert's weights, after they are renormalised.
    """
    t, E = logits_tE.shape
    scores_tE = jax.nn.softmax(logits_tE) if scores == "softmax" else jax.nn.sigmoid(logits_tE)
    choice_tE = lax.stop_gradient(scores_tE if bias_E is None else scores_tE + bias_E)
    if groups_kept < groups:
        by_group = choice_tE.reshape(t, groups, E // groups)
        best_two = top_k(by_group, min(2, E // groups))[0]
        best_groups = top_k(jnp.sum(best_two, -1), groups_kept)[1]
        is_best = jnp.any(best_groups[:, :, None] == jnp.arange(groups), 1)
        choice_tE = jnp.where(is_best[:, :, None], by_group, -jnp.inf).reshape(t, E)
    experts_tX = _tagged(top_k(choice_tE, choices)[1])
    # A masked sum in place of indexing, whose gradient would be a scatter.
    chosen_tXE = experts_tX[..., None] == jnp.arange(E)
    weights_tX = _tagged(jnp.sum(jnp.where(chosen_tXE, scores_tE[:, None], 0), -1))
    if renormalise:
        weights_tX /= jnp.sum(weights_tX, -1, keepdims=True) + 1e-20
    if scale_E is not None:
        weights_tX *= jnp.sum(jnp.where(chosen_tXE, scale_E, 0), -1)
    if scores == "sigmoid":
        scores_tE /= jnp.sum(scores_tE, -1, keepdims=True) + 1e-20
    return Routing(experts_tX, weights_tX * scale, scores_tE)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns (values, indices) of the k largest elements along the last dim, both [..., k], as `lax.top_k` does.

    At least k elements of each row must be above -inf. The k maxima are computed one after another. For `lax.top_k`
    XLA:TPU sorts every row. Compiled for 65,536 tokens, sorting takes 5.8 ms for the 8 best of 128 (Qwen3 235B), and
    11.6 ms for the 8 best of 256 (DeepSeek-V3). This function takes 1.8 and 1.9 ms.
    """
    index, values, indices = jnp.arange(x.shape[-1]), [], []
    for _ in range(k):
        values.append(jnp.max(x, -1))
        indices.append(jnp.argmax(x, -1).astype(jnp.int32))
        x = jnp.where(index == indices[-1][..., None], -jnp.inf, x)
    return jnp.stack(values, -1), jnp.stack(indices, -1)


def loads(experts_tX: jax.Array, num_experts: int) -> jax.Array:
    """Returns how many tokens chose each expert, int32 [E]."""
    chosen_tXE = experts_tX[..., None] == jnp.arange(num_experts)
    return jnp.sum(chosen_tXE, (0, 1), dtype=jnp.int32)


def load_balance_loss(scores_tE: jax.Array, loads_E: jax.Array, num_tokens: float) -> jax.Array:
    """Returns this device's share of E * sum f_e * p_e, a scalar; the sum over devices is the loss.

    The loss is 1 for equal loads, and E if one expert has all choices and a score of 1.

    Args:
      scores_tE: the scores of this device's tokens, through which the gradient flows.
      loads_E: how many of the tokens to balance over chose each expert, on all devices.
      num_tokens: the number of tokens whose shares are summed, on all devices.
    """
    f_E = loads_E / jnp.sum(loads_E)
    return scores_tE.shape[1] * jnp.sum(f_E * jnp.sum(scores_tE, 0)) / num_tokens


def z_loss(logits_tE: jax.Array, num_tokens: float) -> jax.Array:
    """Returns this device's share of the mean of log(Z)^2, a scalar, where Z is the denominator of the softmax."""
    return jnp.sum(jax.nn.logsumexp(logits_tE, -1) ** 2) / num_tokens


def entropy(scores_tE: jax.Array, num_tokens: float) -> jax.Array:
    """Returns this device's share of the scores' mean entropy in nats: log(E) if all are equal, 0 if one is 1."""
    return -jnp.sum(jax.scipy.special.xlogy(scores_tE, scores_tE)) / num_tokens


def updated_bias(bias: jax.Array, loads: jax.Array, rate: float) -> jax.Array:
    """Returns the bias [..., E] after a step with these loads [..., E].

    It is raised by `rate` for experts below the mean load, and lowered by `rate` for experts above it.
    """
    return bias + rate * jnp.sign(jnp.mean(loads, -1, keepdims=True) - loads)


# -- the experts' matmuls


def grouped_matmul(
    x_rK: jax.Array,
    w_eKN: jax.Array,
    sizes_e: jax.Array | None,
    *,
    transpose: bool = False,
    through: Activated | None = None,
) -> jax.Array:
    """Returns y_rN, each expert's rows times its matrix. It is differentiable. On a TPU gmm.py has the kernels.

    Args:
      x_rK: the rows of all experts, sorted by expert. The result is zero for rows after those of the last expert. Or
        x_ecK, with the same number of rows c for each expert; the result is then y_ecN.
      w_eKN: a matrix for each expert, or w_eNK with `transpose`.
      sizes_e: the number of rows of each expert; None for x_ecK.
      through: what x_rK is, on a TPU, if `gated_matmul` has computed it. Its gradient then goes to that.
    """
    if sizes_e is None:
        return _products(x_rK, w_eKN, transpose)
    if through is not None:
        return activated_gmm(x_rK, w_eKN, sizes_e, through, transpose_rhs=transpose)
    if sharding.platform() != "tpu":
        return _tiled_matmul(x_rK, w_eKN, sizes_e, transpose)
    return gmm(x_rK, w_eKN, sizes_e, transpose_rhs=transpose)


def gated_matmul(
    x_rD: jax.Array,
    gate_eDm: jax.Array,
    up_eDm: jax.Array,
    sizes_e: jax.Array | None,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    factors: jax.Array,
    biases: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (gate, up, factors * `activation` of both) of each row, [r, m] or [e, c, m], with `biases` [e, m] added.

    On a TPU one kernel computes all three. The activation hides behind the matmuls. In a kernel of its own it would
    take 0.15 of the time of an expert's three matmuls with dims of 4096 (compiled, gmm.py). It has no gradient there:
    the matmul that follows sends it `through` to gate and up. Elsewhere the third is None, and left to XLA.
    """
    if sizes_e is not None and sharding.platform() == "tpu":
        return gated_gmm(x_rD, (gate_eDm, up_eDm), sizes_e, activation, factors, biases=biases)[:3]
    products = [grouped_matmul(x_rD, w, sizes_e) for w in (gate_eDm, up_eDm)]
    products = products if biases is None else [add_bias(y, b, sizes_e) for y, b in zip(products, biases, strict=True)]
    return *products, None


def _products(x_ecK, w, transpose):
    """Returns y_ecN = x_ecK @ w_eKN, or the product with w_eNK if `transpose`.

    The einsum does not transpose w_eNK in memory: JAX would save the transposed copy of every layer as a residual.
    """
    if not transpose:
        return jnp.matmul(x_ecK, w)
    w_eNK = w
    return jnp.einsum("ecK,eNK->ecN", x_ecK, w_eNK)


def _tiled_matmul(x_rK, w_eKN, sizes_e, transpose: bool = False, rows: int = 64):
    """`grouped_matmul` in plain jax.numpy: each tile has rows of one expert, and is multiplied by a copy of its matrix.

    Where there is no kernel for `jax.lax.ragged_dot`, it multiplies all rows by the matrix of every expert. On a CPU,
    with 8 experts of 512 rows, its forward and backward pass take 12 times as long as this (measured).
    """
    num_rows, num_experts = x_rK.shape[0], w_eKN.shape[0]
    tiles_e = -(-sizes_e // rows)
    end_tile_e, end_e = jnp.cumsum(tiles_e), jnp.cumsum(sizes_e)
    tile = jnp.arange(-(-num_rows // rows) + num_experts)  # as many tiles as there can be
    expert = jnp.minimum(jnp.searchsorted(end_tile_e, tile, side="right"), num_experts - 1)
    nth = tile - (end_tile_e - tiles_e)[expert]  # the number of the tile among those of its expert
    row = ((end_e - sizes_e)[expert] + nth * rows)[:, None] + jnp.arange(rows)  # [tile, row of the tile]: row of x
    row = jnp.where(row < end_e[expert][:, None], row, num_rows)  # past the end: dropped
    tiles = jnp.take(x_rK, row, axis=0, mode="fill", fill_value=0)
    products = _products(tiles, w_eKN[expert], transpose)
    out = jnp.zeros_like(products, shape=(num_rows, products.shape[2]))
    return out.at[row].set(products, mode="drop")


def add_bias(
    y_rm: jax.Array, bias_em: jax.Array, sizes_e: jax.Array | None, factors_r: jax.Array | None = None
) -> jax.Array:
    """Returns y_rm with each expert's bias, times the row's factor, added to its rows, which are sorted by expert.

    The result is zero for rows after those of the last expert. If `sizes_e` is None, y is y_ecm, and factors_ec.
    """
    if sizes_e is None:
        return y_rm + (bias_em[:, None] if factors_r is None else times_factors(bias_em[:, None], factors_r))
    end_e = jnp.cumsum(sizes_e)
    row = jnp.arange(y_rm.shape[0])[:, None]
    is_in_re = (row >= end_e - sizes_e) & (row < end_e)
    bias_rm = jnp.matmul(is_in_re.astype(bias_em.dtype), bias_em)  # the gradient of indexing would be a scatter
    if factors_r is not None:  # after the last expert they are uninitialised, and 0 * NaN in a gradient is NaN
        bias_rm = times_factors(bias_rm, jnp.where(row[:, 0] < end_e[-1], factors_r, 0))
    return jnp.where(row < end_e[-1], y_rm + bias_rm, 0)


def times_factors(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns each row of x times its factor, computed in float32, in the dtype of x."""
    return (x * factors[..., None]).astype(x.dtype)


def glu(gate: jax.Array, up: jax.Array, activation: str = "silu", limit: float = 0.0) -> jax.Array:
    """Returns activation(gate) * up, elementwise: SwiGLU or GeGLU. With a limit, it is the SwiGLU of gpt-oss.

    That variant clamps gate from above and up on both sides, has a steeper sigmoid, and multiplies by up + 1.

    Source: the `swiglu` of openai/gpt-oss (gpt_oss/torch/model.py).
    """
    if not limit:
        return (jax.nn.gelu if activation == "gelu" else jax.nn.silu)(gate) * up
    gate, up = _clamped(gate, None, limit), _clamped(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _clamped(x: jax.Array, least: float | None, most: float) -> jax.Array:
    """jnp.clip with the derivative of PyTorch's clamp, 1 at its limits.

    JAX's is a mean of both sides there. With it, gpt-oss's SwiGLU adds 2.5 times the cycles to `gmm.gated_gradients`
    (compiled).
    """
    return jnp.clip(x, least, most)


@_clamped.defjvp
def _clamped_jvp(least, most, primals, tangents):
    (x,), (dx,) = primals, tangents
    inside = x <= most if least is None else (x >= least) & (x <= most)
    return _clamped(x, least, most), jnp.where(inside, dx, jnp.zeros_like(dx))


# -- pairs and rows


class Missing(NamedTuple):
    """Which index arrays of `Copies` may have indices past the end: for rows that do not exist."""

    sources: bool  # some copies have no source: they are zeros
    copies: bool  # some rows have fewer than k copies


NONE_MISSING = Missing(sources=False, copies=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Copies:
    """Which row each of r copies is of, and where the copies of each of n rows are: of `copy_rows` and `add_copies`.

    If each row has at most k copies, `places` is a [k, n] array, flattened. So both index rows and scatter none. It has
    an index past the end for each copy that a row lacks. XLA:TPU passes over all rows again to put zeros for indices
    past the end. That takes 6.2 ms for the 524,288 pairs of width 4096 in a layer of Qwen3 235B, and would be needed
    five times a layer (compiled). `missing` says whether there are any.

    Where a row may have many copies and has few on average, `sorted_copies` sorts the copies by row instead.
    """

    num_rows: int = field(metadata=dict(static=True))  # n
    source: jax.Array | None  # int32 [r]
    places: jax.Array | None  # int32 [k*n]; if sorted, [r]
    missing: Missing = field(default=NONE_MISSING, metadata=dict(static=True))
    rows: jax.Array | None = None  # int32 [r]; if sorted: of which row the copy at each of `places` is


@jax.custom_vjp
def copy_rows(x: jax.Array, copies: Copies) -> jax.Array:
    """Returns the copies of the rows of x [n, ...], as [r, ...]. Its gradient is `add_copies`."""
    return _rows(x, copies.source, copies.missing.sources)


@jax.custom_vjp
def add_copies(y: jax.Array, copies: Copies) -> jax.Array:
    """Returns the sum of the copies of each row, [n, ...], from y [r, ...]. Its gradient is `copy_rows`."""
    if copies.rows is not None:
        return _add_sorted(_rows(y, copies.places, False), copies)
    copies_kn = _rows(y, copies.places, copies.missing.copies)
    return _sum(list(copies_kn.reshape(-1, copies.num_rows, *y.shape[1:])))


copy_rows.defvjp(
    lambda x, copies: (copy_rows(x, copies), replace(copies, source=None)),
    lambda copies, dy: (add_copies(dy, copies), None),
)
add_copies.defvjp(
    lambda y, copies: (add_copies(y, copies), replace(copies, places=None)),
    lambda copies, dx: (copy_rows(dx, copies), None),
)


def sorted_copies(num_rows: int, source_r: jax.Array) -> Copies:
    """Returns the Copies with this source. A source of `num_rows` or more is none: such a copy has any content.

    `add_copies` then reads each copy once or twice, however many a row has.
    """
    rows_r, places_r = map(_tagged, lax.sort((source_r, jnp.arange(len(source_r), dtype=jnp.int32)), num_keys=1))
    return Copies(num_rows, source_r, places_r, rows=rows_r)


def _add_sorted(y_rd, copies: Copies, block: int = 128):
    """The sums of copies that are sorted by row, in the dtype of y.

    The sums of a block of rows are the product of a matrix of zeros and ones and of the block's copies, as the gradient
    of an expert's matrix is a product of all rows of this expert. On a TPU the kernel of the latter computes them.
    """
    n, rows_r = copies.num_rows, copies.rows
    if sharding.platform() != "tpu":
        zeros_nd = varying_as(y_rd, jnp.zeros((n, y_rd.shape[1]), jnp.float32))
        of_rows_rd = jnp.where(rows_r[:, None] < n, y_rd, 0).astype(jnp.float32)
        return zeros_nd.at[rows_r].add(of_rows_rd, mode="drop").astype(y_rd.dtype)
    num_blocks = -(-n // block)
    starts = jnp.sum(rows_r[:, None] < jnp.minimum(block * jnp.arange(num_blocks + 1), n), 0, dtype=jnp.int32)
    is_row = (rows_r[:, None] % block == jnp.arange(block)).astype(y_rd.dtype)
    return tgmm(is_row, y_rd, jnp.diff(starts)).reshape(num_blocks * block, -1)[:n]


def _rows(x, indices, may_miss):
    """x[indices]; with `may_miss`, zeros for indices past the end."""
    return jnp.take(x, indices, axis=0, **dict(mode="fill", fill_value=0) if may_miss else dict(mode="clip"))


@jax.custom_vjp
def permuted(a_p: jax.Array, source_p: jax.Array, place_p: jax.Array) -> jax.Array:
    """Returns a_p[source_p], for a permutation `source_p` with the inverse `place_p`.

    It sorts by `place_p`: 0.34 ms for 262,144 numbers on TPU7x (compiled, by XLA's estimate).
    """
    return lax.sort((place_p, a_p), num_keys=1)[1]


permuted.defvjp(
    lambda a_p, source_p, place_p: (permuted(a_p, source_p, place_p), (source_p, place_p)),
    lambda orders, da_p: (permuted(da_p, *orders[::-1]), None, None),
)


def _sum(terms: list[jax.Array]) -> jax.Array:
    """The sum of the terms, computed in float32, in the dtype of the terms.

    The terms are added one by one: by XLA:TPU's estimate, `jnp.sum` over the first dim of one array takes longer.
    """
    return sum(term.astype(jnp.float32) for term in terms).astype(terms[0].dtype)


class Pairs(NamedTuple):
    """The order of a device's (token, choice) pairs by expert. Pairs of an expert are ordered by choice, then by token.

    A pair has the number choice*t + token. All arrays are int32.
    """

    order_p: jax.Array  # the number of the pair at each position
    place_p: jax.Array  # the position of each pair, by its number
    loads_E: jax.Array  # the number of pairs of each expert


def sort_pairs(experts_tX: jax.Array, num_experts: int) -> Pairs:
    """Returns the pairs of these choices, sorted by expert."""
    expert_p = experts_tX.T.reshape(-1)
    order_p = _tagged(jnp.argsort(expert_p, stable=True))
    return Pairs(order_p, _tagged(jnp.argsort(order_p)), loads(experts_tX, num_experts))


def sort_factors(factors_p: jax.Array, pairs: Pairs) -> jax.Array:
    """Returns the router's weights of the pairs, given in the order of their numbers, in that of `pairs`."""
    return _tagged(permuted(factors_p, pairs.order_p, pairs.place_p))


def _tagged(a):
    """`a`, tagged as `routing` for a policy of `jax.checkpoint` (remat.py)."""
    return checkpoint_name(a, "routing")


# -- dispatch


def in_chunks(mixture: Callable, x_td: jax.Array, routing: Routing, num_chunks: int) -> tuple[jax.Array, jax.Array]:
    """Applies `mixture(x_td, routing)` to the tokens in chunks, and returns (y_td, the most rounds of a chunk).

    The rows of one chunk can be sent while those of another are multiplied. Each chunk has a buffer of its own, so one
    chunk may need a second round while the buffer of another is not full.
    """
    chunks = zip(*(jnp.split(a, num_chunks) for a in (x_td, *routing)), strict=True)
    y, rounds = zip(*(mixture(x_td, Routing(*chunk)) for x_td, *chunk in chunks), strict=True)
    return jnp.concatenate(y), jnp.max(jnp.stack(rounds))


def dropless(
    w, x_td: jax.Array, routing: Routing, experts: Experts, axis: str, buffer_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (y_td, the number of rounds), where rows are sent to their experts. To be called in `jax.shard_map`.

    A token for which all choices are E, one more than the last expert, goes nowhere: its result is zero.

    Args:
      w: the weights of the experts of this device.
      x_td: the tokens.
      experts: applies them to sorted rows. Rows after those of the last expert are uninitialised memory, in x and in
        the cotangent of the result. The results of such rows are not read.
      axis: the mesh axis of the experts, of size 2 or more.
      buffer_rows: the rows of the buffer that receives rows from all devices, this one included.
    """
    (t, E), pairs = routing.scores_tE.shape, sort_pairs(routing.experts_tX, routing.scores_tE.shape[1])
    loads_NE = collectives.all_gather(pairs.loads_E, axis, tiled=False, algorithm="xla")
    starts = buffer_starts(loads_NE)
    # The place of each pair in an endless buffer of its receiver; that of no expert is past the end.
    shift_E = starts[..., lax.axis_index(axis)].reshape(E) - (jnp.cumsum(pairs.loads_E) - pairs.loads_E)
    expert_p = routing.experts_tX.T.reshape(-1)
    shift_p = jnp.sum(jnp.where(expert_p[:, None] == jnp.arange(E), shift_E, 0), 1)
    row_p = jnp.where(expert_p < E, pairs.place_p + shift_p, jnp.iinfo(jnp.int32).max)
    exchanged = Exchanged(pairs, row_p, loads_NE)
    round_of = partial(one_round, experts, axis, buffer_rows)
    if buffer_rows >= len(loads_NE) * t * min(pairs.order_p.size // t, E // len(loads_NE)):  # all that can arrive
        return round_of(w, x_td, routing.weights_tX, exchanged, 0), jnp.int32(1)
    rows_N = jnp.sum(loads_NE, 0).reshape(len(loads_NE), -1).sum(1)
    rounds = num_rounds(jnp.max(rows_N), buffer_rows)
    return all_rounds(round_of, w, x_td, routing.weights_tX, exchanged, rounds), rounds


def num_rounds(rows: jax.Array, buffer_rows: int) -> jax.Array:
    """Returns the rounds until every device has computed its `rows`; the same number on all devices of the mesh.

    Otherwise one device could be in a round, with its collectives, while another is past them.
    """
    rounds = jnp.maximum(-(-rows // buffer_rows), 1)
    return lax.pmax(rounds, tuple(jax.typeof(rounds).mat.varying))


def local_experts(
    w, x_td: Any, routing: Routing, experts: Experts, num_experts: int, buffer_rows: int, arriving: Any = ()
) -> tuple[jax.Array, jax.Array]:
    """Returns (y_td, the number of rounds), where all tokens are here: the sums over choices of this device's experts.

    Args:
      w: the weights of the experts of this device.
      x_td: the tokens, or an fp8.Quantized with one scale.
      routing: its choices are among the `num_experts` of this device. All other numbers are experts elsewhere.
      experts: as for `dropless`.
      buffer_rows: the rows of a round. All pairs, if the router knows no other experts.
      arriving: arrays for `experts` to wait for, whose gradients are zero.
    """
    (t, X), pairs = routing.weights_tX.shape, sort_pairs(routing.experts_tX, num_experts)
    factors_p = sort_factors(routing.weights_tX.T.reshape(-1), pairs)
    if num_experts == routing.scores_tE.shape[1]:
        copies = Copies(t, pairs.order_p % t, pairs.place_p)
        return experts(w, _copied(x_td, copies), pairs.loads_E, factors_p, copies, arriving), jnp.int32(1)
    round_of = partial(local_round, experts, t, buffer_rows)
    if buffer_rows >= t * min(X, num_experts):
        return round_of(w, x_td, factors_p, (pairs, arriving), 0), jnp.int32(1)
    rounds = num_rounds(jnp.sum(pairs.loads_E), buffer_rows)
    return all_rounds(round_of, w, x_td, factors_p, (pairs, arriving), rounds), rounds


def own_choices(routing: Routing, axis: str, algorithm: str = "xla") -> Routing:
    """Returns the routing of the tokens of all devices along `axis`, as `local_experts` takes it. In `jax.shard_map`.

    Choices of experts elsewhere are the number of this device's experts. The scores stay those of its own tokens.
    """
    if (devices := lax.axis_size(axis)) == 1:
        return routing
    num_experts = routing.scores_tE.shape[1] // devices
    gather = partial(collectives.all_gather, axis=axis, algorithm=algorithm)
    number_TX = gather(routing.experts_tX) - num_experts * lax.axis_index(axis)
    own_TX = jnp.where((number_TX >= 0) & (number_TX < num_experts), number_TX, num_experts)
    return routing._replace(experts_tX=own_TX, weights_tX=gather(routing.weights_tX))


def local_round(experts, t: int, buffer_rows: int, w, x_td, factors_p, plan, number) -> jax.Array:
    """Returns the share of the results of the `buffer_rows` pairs of round `number`, in their order by expert.

    `plan` is (Pairs, `arriving` of `local_experts`). The look-up of the t tokens' rows waits until the order of rows is
    known: that is computed while the tokens are gathered. XLA:TPU would wait for the tokens first, then sort.
    """
    (pairs, arriving), first = plan, number * buffer_rows
    in_round = lambda a_p: lax.dynamic_slice_in_dim(jnp.pad(a_p, (0, buffer_rows)), first, buffer_rows)
    factors_r = in_round(factors_p)
    end_e = jnp.cumsum(pairs.loads_E)
    sizes_e = jnp.diff(jnp.clip(end_e - first, 0, buffer_rows), prepend=0)
    of_experts_r = jnp.arange(buffer_rows) < jnp.clip(end_e[-1] - first, 0, buffer_rows)
    copies = sorted_copies(t, jnp.where(of_experts_r, in_round(pairs.order_p) % t, t))
    x_rd = _copied(x_td, copies, (copies, factors_r))
    return experts(w, x_rd, sizes_e, factors_r, copies, arriving)


def _copied(x_td: Any, copies: Copies, first: Any = ()):
    """`copy_rows` of tokens, or of an fp8.Quantized, after `first` is computed."""
    copied = lambda a: copy_rows(collectives.after(a, first) if first else a, copies)
    return copied(x_td) if isinstance(x_td, jax.Array) else x_td.map_rows(copied)


class Exchanged(NamedTuple):
    """The routing of a device's pairs over the axis of the experts, all int32."""

    pairs: Pairs
    row_p: jax.Array  # the row of each pair, by its number, in an endless buffer of its receiver
    loads_NE: jax.Array  # the number of pairs that each device has for each expert


def one_round(experts, axis, buffer_rows, w, x_td, weights_tX, exchanged: Exchanged, number) -> jax.Array:
    """Returns this device's share y_td of the results whose rows are in round `number`: dispatch, experts, combine."""
    (t, d), (pairs, row_p, loads_NE) = x_td.shape, exchanged
    first = number * buffer_rows
    dispatch_plan, combine_plan, sizes_e = exchange_plan(loads_NE, axis, first, buffer_rows)
    num_pairs = row_p.shape[0]
    # A pair of another round gets an index past the end: zero is its result, and what it adds to the gradients.
    in_round_p = (row_p >= first) & (row_p < first + buffer_rows)
    place_p = jnp.where(in_round_p, pairs.place_p, num_pairs)
    factors_p = jnp.where(in_round_p, weights_tX.T.reshape(-1), 0)
    factors_p = sort_factors(factors_p, pairs)
    copies = Copies(t, pairs.order_p % t, place_p, Missing(sources=False, copies=True))
    x_pd = copy_rows(contiguous_rows(x_td), copies)
    send = lambda a: exchange(a, buffer_rows, dispatch_plan, combine_plan, axis, t)
    y_rd = experts(w, send(x_pd).reshape(buffer_rows, d), sizes_e, send(factors_p[:, None])[:, 0])
    y_pd = exchange(contiguous_rows(y_rd), num_pairs, combine_plan, dispatch_plan, axis, t)
    return add_copies(y_pd, copies).reshape(t, d)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_rounds(round_of, w, x_td, weights, plan: Any, rounds) -> jax.Array:
    """Returns the sum of the shares round_of(w, x_td, weights, plan, number) of the rounds. `plan` has no gradient.

    JAX differentiates no loop whose length depends on data, so the gradient is a loop of its own. It computes each
    round but the first again, so the memory that it needs does not depend on their number.
    """
    return _later_rounds(partial(round_of, w, x_td, weights, plan), round_of(w, x_td, weights, plan, 0), rounds)


def _later_rounds(share, y_td, rounds):
    with jax.named_scope("extra_rounds"):  # aot.py looks for this name
        return lax.fori_loop(1, rounds, lambda number, y_td: y_td + share(number), y_td)


def _all_rounds_forward(round_of, w, x_td, weights, plan, rounds):
    y_td, backward = jax.vjp(lambda *operands: round_of(*operands, plan, 0), w, x_td, weights)
    y_td = _later_rounds(partial(round_of, w, x_td, weights, plan), y_td, rounds)
    return y_td, (backward, (w, x_td, weights), plan, rounds)


def _all_rounds_backward(round_of, residuals, dy_td):
    """The gradients of the first round, and the sums of the others if there are any.

    Usually there are none. Then nothing is added, and no zeros are written. Each gradient has a loop of its own that
    adds a sum to it, once or never. So none waits for another.
    """
    backward, operands, plan, rounds = residuals
    gradients, structure = jax.tree.flatten(backward(dy_td))
    floats = [i for i, gradient in enumerate(gradients) if gradient.dtype != jax.dtypes.float0]

    def add_round(number, sums):
        backward = jax.vjp(lambda *operands: round_of(*operands, plan, number), *operands)[1]
        shares = jax.tree.leaves(backward(dy_td))
        return [jnp.where(number > 1, sums[n], 0) + shares[i] for n, i in enumerate(floats)]

    unwritten = [varying_as(gradients[i], uninitialised(gradients[i].shape, gradients[i].dtype)) for i in floats]
    with jax.named_scope("extra_rounds"):
        sums = lax.fori_loop(1, rounds, add_round, unwritten)
        for n, i in enumerate(floats):
            add = lambda _, gradient, n=n: gradient + sums[n]
            gradients[i] = lax.fori_loop(1, jnp.minimum(rounds, 2), add, gradients[i])
    return *jax.tree.unflatten(structure, gradients), None, None


all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


def contiguous_rows(x_rd: jax.Array) -> jax.Array:
    """Returns x as [r, d / 128, 128] if 128 divides d: in the memory layout of a TPU each row is then contiguous.

    The layout of [r, d] interleaves 8 rows, so a slice of rows is not contiguous. For the exchange XLA would convert
    its operand and its result to another layout. The operations before and after would use that layout, at a quarter of
    the speed. If 128 does not divide d, XLA makes the copies: 55 ms in a layer of gpt-oss with a buffer of 327,680 rows
    of 2880 (compiled). With rows padded to 2944, the columns of 23 registers, they took no less.
    """
    return x_rd.reshape(x_rd.shape[0], -1, 128) if x_rd.shape[1] % 128 == 0 else x_rd


class SendPlan(NamedTuple):
    """The slices of rows that this device sends and receives, in numbers of rows.

    Each array is int32 [E]: E/N slices for each of N devices. The names are those of `lax.ragged_all_to_all`. Dispatch
    sends one slice to each expert, and combine receives one from each.
    """

    input_offsets: jax.Array  # where each slice to send starts in this device's array
    send_sizes: jax.Array
    output_offsets: jax.Array  # where each sent slice starts in its receiver's buffer
    recv_sizes: jax.Array


def buffer_starts(loads_NE: jax.Array) -> jax.Array:
    """Returns where each sender's slice starts in an endless buffer of its receiver: [receiver, its expert, sender].

    A buffer is sorted by expert, then by sender.
    """
    N, E = loads_NE.shape
    wanted = loads_NE.T.reshape(N, -1)
    return (jnp.cumsum(wanted, 1) - wanted).reshape(N, E // N, N)


def exchange_plan(
    loads_NE: jax.Array, axis: str, first: jax.Array | int, buffer_rows: int
) -> tuple[SendPlan, SendPlan, jax.Array]:
    """Returns the plans of the exchanges for this device, of the rows `first` to `first + buffer_rows` of each buffer.

    All devices have gathered the N*E numbers `loads_NE`: the rows that each device has for each expert. So each device
    can compute where its slices start in a receiver's buffer.

    Returns (dispatch plan, combine plan, the rows that each expert of this device receives, int32 [E/N]).
    """
    N, E = loads_NE.shape
    me = lax.axis_index(axis)
    offsets_NE = jnp.cumsum(loads_NE, 1) - loads_NE  # [sender, expert]: where a slice starts among the sender's pairs
    # The slices in the buffer of each receiver, each array [receiver, its expert, sender]: all rows, start, rows that
    # are sent, and where these start at their sender.
    wanted, starts = loads_NE.T.reshape(N, E // N, N), buffer_starts(loads_NE)
    in_buffer = jnp.clip(starts - first, 0, buffer_rows)
    sizes = jnp.clip(starts + wanted - first, 0, buffer_rows) - in_buffer
    at_sender = jnp.moveaxis(offsets_NE.reshape(N, N, E // N), 0, 2) + jnp.clip(first - starts, 0, wanted)
    # `mine` is this device's entry of the first dim. `sent` are the slices that it sends, by receiver, then by expert.
    # `received` are the slices that it receives, by sender, then by expert.
    mine = lambda a: lax.dynamic_index_in_dim(a, me, 0, keepdims=False)
    sent = lambda a: lax.dynamic_index_in_dim(a, me, 2, keepdims=False).reshape(E)
    received = lambda a: mine(a).T.reshape(E)
    dispatch_plan = SendPlan(sent(at_sender), sent(sizes), sent(in_buffer), received(sizes))
    combine_plan = SendPlan(received(in_buffer), received(sizes), received(at_sender), sent(sizes))
    return dispatch_plan, combine_plan, jnp.sum(mine(sizes), 1)


def exchange(x: jax.Array, rows: int, plan: SendPlan, reverse_plan: SendPlan, axis: str, block_rows: int) -> jax.Array:
    """Sends slices of x by `plan`, and returns the received rows, [rows, ...].

    Rows of the result to which nothing is sent are uninitialised. The gradient is sent by `reverse_plan`. On a TPU this
    is `lax.ragged_all_to_all`, which the SparseCores run while the TensorCore computes. On other platforms it is the
    one of collectives.py, which pads each slice to `block_rows`, the largest size of a slice.
    """
    return _exchange((axis, block_rows), (rows, x.shape[0]), x, plan, reverse_plan)


def varying_as(like: jax.Array, x: jax.Array) -> jax.Array:
    """Returns x, the same on all devices, typed as varying over the mesh axes over which `like` varies."""
    axes = tuple(jax.typeof(like).mat.varying)
    return lax.pcast(x, axes, to="varying") if axes else x


def uninitialised(shape: tuple[int, ...], dtype) -> jax.Array:
    """Returns an array with arbitrary content, possibly NaN: it must be written before it is read."""
    return lax.empty(shape, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(options, rows, x, plan, reverse_plan):
    axis, block_rows = options
    out = varying_as(x, uninitialised((rows[0], *x.shape[1:]), x.dtype))
    if sharding.platform() == "tpu":
        return lax.ragged_all_to_all(x, out, *plan, axis_name=axis)
    return collectives.ragged_all_to_all(x, out, *plan[:3], axis, block_rows=block_rows, algorithm="xla")[0]


def _exchange_forward(options, rows, x, plan, reverse_plan):
    return _exchange(options, rows, x, plan, reverse_plan), (plan, reverse_plan)


def _exchange_backward(options, rows, plans, dy):
    plan, reverse_plan = plans
    return _exchange(options, rows[::-1], dy, reverse_plan, plan), None, None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def with_capacity(
    w, x_td: jax.Array, routing: Routing, experts: Experts, axis: str, capacity: int, algorithm: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """Returns (y_td, the number of this device's pairs that were dropped). To be called in `jax.shard_map`.

    Each expert takes at most `capacity` of this device's pairs. The first choices of tokens come before the second.

    Args:
      w: the weights of the experts of this device.
      experts: applies them to x [experts, rows, d], with `capacity` rows from each device.
      axis: the mesh axis of the experts.
      capacity: C, the slots of each expert for this device's pairs.
      algorithm: of the all-to-all, as in collectives.py.
    """
    t, E = routing.scores_tE.shape
    pairs = sort_pairs(routing.experts_tX, E)
    num_pairs = pairs.order_p.shape[0]
    start_E = jnp.cumsum(pairs.loads_E) - pairs.loads_E
    nth = jnp.arange(capacity)
    slot_EC = jnp.where(nth < pairs.loads_E[:, None], start_E[:, None] + nth, num_pairs)  # sorted position of its pair
    pair_r = jnp.take(pairs.order_p, slot_EC.reshape(-1), mode="fill", fill_value=num_pairs)
    expert_p = routing.experts_tX.T.reshape(-1)
    nth_p = pairs.place_p - start_E[expert_p]
    slot_p = jnp.where(nth_p < capacity, expert_p * capacity + nth_p, E * capacity)
    token_r = jnp.where(pair_r < num_pairs, pair_r % t, t)
    of_tokens = Copies(t, token_r, slot_p, missing := Missing(sources=True, copies=True))
    x_ECd = copy_rows(x_td, of_tokens).reshape(E, capacity, -1)
    factors_p = routing.weights_tX.T.reshape(-1)
    factors_EC = copy_rows(factors_p, Copies(num_pairs, pair_r, slot_p, missing)).reshape(E, capacity)
    if lax.axis_size(axis) == 1:
        y_ECd = experts(w, x_ECd, None, factors_EC)
    else:
        swap = partial(collectives.all_to_all, axis=axis, algorithm=algorithm)
        to_experts = partial(swap, split_dim=0, concat_dim=1)
        y_ECd = swap(experts(w, to_experts(x_ECd), None, to_experts(factors_EC)), split_dim=1, concat_dim=0)
    y_td = add_copies(y_ECd.reshape(E * capacity, -1), of_tokens)
    return y_td, jnp.sum(jnp.maximum(pairs.loads_E - capacity, 0))


def gates(routing: Routing, num_experts: int) -> jax.Array:
    """Returns the weight of each expert for each token, float32 [t, E], most of them zero."""
    chosen_tXE = jax.nn.one_hot(routing.experts_tX, num_experts)
    return jnp.einsum("tXE,tX->tE", chosen_tXE, routing.weights_tX)


def reference(w, x_td: jax.Array, routing: Routing, experts: Experts, axis: str) -> jax.Array:
    """Returns y_td, for which every expert multiplies every token. To be called in `jax.shard_map`.

    The tokens are gathered over `axis`, and the weighted sums over each device's experts are reduce-scattered.
    """
    gates_te = gates_tE = gates(routing, routing.scores_tE.shape[1])  # on one device: all experts are local
    if lax.axis_size(axis) > 1:
        x_td = collectives.all_gather(x_td, axis, dim=0, algorithm="xla")
        gates_te = collectives.all_to_all(gates_tE, axis, split_dim=1, concat_dim=0, algorithm="xla")
    y_etd = experts(w, jnp.broadcast_to(x_td, (gates_te.shape[1], *x_td.shape)), None, gates_te.T)
    y_td = jnp.sum(y_etd, 0, dtype=jnp.float32).astype(x_td.dtype)
    return collectives.reduce_scatter(y_td, axis, dim=0, algorithm="xla") if lax.axis_size(axis) > 1 else y_td


# -- a demonstration


def main() -> None:
    """Prints loads, rounds, dropped pairs and errors against the reference, for 8 experts on 8 simulated devices."""
    t, X, E, D, M = 64, 2, 8, 32, 64
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 5)
    x_TD = jax.random.normal(keys[0], (8 * t, D))
    gate, up, down = (
        jax.random.normal(key, shape) / shape[1] ** 0.5
        for key, shape in zip(keys[1:4], [(E, D, M), (E, D, M), (E, M, D)], strict=True)
    )
    # The first router has no preferences, the second prefers some experts.
    for name, skew in (("even", 0.0), ("skewed", 1.0)):
        logits_TE = jax.random.normal(keys[4], (8 * t, E)) + skew * jnp.arange(E) / 2

        def per_device(x_td, logits_tE, gate, up, down):
            routing = route(logits_tE, X)

            def experts(w, x, sizes, factors, copies=None, arriving=()):
                gate, up, down = w
                product = times_factors(glu(grouped_matmul(x, gate, sizes), grouped_matmul(x, up, sizes)), factors)
                y = grouped_matmul(product, down, sizes)
                return add_copies(y, copies) if copies else y

            operands = ((gate, up, down), x_td, routing, experts, "expert")
            want = reference(*operands)
            share = lambda y_td: jnp.sum((y_td - want) ** 2) / jnp.sum(want**2)
            y_td, dropped = with_capacity(*operands, 5 * t * X // E // 4)
            methods = {
                "dropless, a buffer of 4 times the mean": (*dropless(*operands, 4 * t * X), 0),
                "dropless, a buffer of 1.5 times the mean": (*dropless(*operands, 3 * t * X // 2), 0),
                "capacity, 1.25 times the mean": (y_td, 1, lax.psum(dropped, "expert")),
            }
            results = {name: (lax.pmean(share(y), "expert"), *rest) for name, (y, *rest) in methods.items()}
            return lax.psum(loads(routing.experts_tX, E), "expert"), results

        sharded = jax.shard_map(per_device, mesh=mesh, in_specs=P("expert"), out_specs=P())
        loads_E, results = jax.jit(sharded)(x_TD, logits_TE, gate, up, down)
        imbalance = loads_E.max() / loads_E.mean()
        print(f"{name} router: tokens by expert {' '.join(map(str, loads_E))}, max/mean {imbalance:.2f}")
        for method, (error, rounds, dropped) in results.items():
            dropped = f"dropped {dropped / (8 * t * X):6.1%}"
            print(f"    {method:42} rounds {rounds}   {dropped}   squared error {error:.1e}")


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
