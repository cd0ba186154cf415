"""Flash attention, forward: softmax(mask(scale * q k^T)) v, with only a few tiles of the scores in memory.

**Idea** (Dao et al. 2022, arXiv:2205.14135, section 3.1; the running softmax: Milakov & Gimelshein 2018,
arXiv:1805.02867, section 3). Scores are computed in tiles of queries x keys. For each query the kernel holds the
largest score m so far, the sum l of the exponentials, and the sum o of the values weighted by them.

**Formula.** A tile of scores s updates them to

    m' = max(m, max s)    p = exp(s - m')    l' = l * exp(m - m') + sum p    o' = o * exp(m - m') + p v

and after the last tile out = o / l, lse = m + log l. Inside the kernel, logarithms are to base 2, as the hardware has
exp2 only: scale * log2(e) is multiplied into q, in float32, before q is rounded.

**Constant max logit.** If scores are known to stay within 60 of a constant, the constant can replace m: no search for
the maximum, no rescaling. A sum below 2^-96 or above 2^96 is not trusted (float32 ends at 2^+-126). Such a row gets NaN
and an lse of -inf or +inf, which `out_of_range` counts. A row that sees no key is not such a row.

**Attention sinks** (Xiao et al. 2023, arXiv:2309.17453; a learned logit in gpt-oss). Each head has one more term
exp(sink) in the denominator. This is a factor sigmoid(lse - sink) of out, applied outside of the kernel.

**Alternating windows**, as in the layers of Gemma and gpt-oss. `Mask.window` may be several, and `Mask.which` selects
one. Tiles are listed for each window, and `lax.switch` branches around the kernel alone. If the branches contained all
of attention, each would save its residuals for the gradient (two sets, one of zeros), and XLA would move neighbouring
operations into both.

**Cost.** A head takes 2*T*S*(H + V) FLOPs and moves (T + S)*(H + V) numbers. A matrix of scores that is written and
read would add 4*T*S.

**On TPU7x.** Four choices make it fast:

    transposed     S^T = K Q^T [keys, queries], O^T = V^T P^T. An MXU holds 256 x 256 numbers and streams rows past
                   them. With heads of 128, Q^T fills half of it, in any order of the product, and so would V. P^T, 256
                   keys x 256 queries, fills all of it: 1024 + 512 cycles for 1024 x 1024 scores, not 1024 + 1024. Also,
                   the max and sum of a query run down the rows of registers, where any VALU computes them; along the
                   lanes only the XLUs could. The XLUs transpose q, v and out, once.
    list of tiles  All tiles of a head (256 queries x 512 keys) that the mask leaves form one list, made outside of the
                   kernel for any mask: first those that need no mask, then the others. The accumulators of all queries
                   stay in VMEM, so no row of tiles has a start or an end, and few unseen scores are computed: a causal
                   head of 8192 takes 34 * 1024^2 scores, of which 32 are seen; blocks of 1024 would take 36.
    pipelined      The scores of a tile are computed four tiles before its softmax. So the MXUs have K Q^T of one tile
                   and V^T P^T of another to work on while VALUs and EUP compute exponentials. At the end of an
                   iteration the pipeline drains, 370 cycles: so an iteration has 24 tiles.
    superblocks    At most 8192 queries and 16384 keys are in VMEM. Longer sequences are streamed, and superblocks of
                   keys that no query sees are not fetched.

Cycles for a head with all that the kernel does, compiled (libtpu 0.0.50.1; bf16, causal, T = S):

    T = 8192, H = V = 128     68,309  (tokamax 111,300)    with a constant max logit       66,410
              H = V = 64      62,955  (tokamax 109,600)    4 documents of 2048             27,290
              H = V = 256     87,059  (tokamax 142,100)    H = 192, V = 128                69,229
    T = 32768, window = 1024  101,900                      T = 131072, H = V = 128     14,770,509

where tokamax is its 0.0.17's splash attention, counted in the same way, in blocks of 1024 (512 keys at once,
experimental scheduler). 1024 x 1024 scores without a mask are 1761 cycles, of which the MXUs need 1536, 87% (1280 of
1607 for heads of 64, 2048 of 2215 for 256). The rest of a causal head: draining iterations (6%), masks (1%), VALUs, 76%
busy and sometimes late, transposing q, v and out (6%). Seconds are predicted to be cycles / 1.76e9. Two things run
outside of the kernel and are not counted: XLA's transposes from [B, T, N, H], and the list of tiles, a sort of
T*S / 2^17 numbers in a call.

**Left out.** Dropout, biases, masks given as arrays. FP8: with q and k in e4m3 a full step takes 13% less, with v and p
as well 10% (22% with a constant max), as P has to be rounded and VALUs become the limit. These did not help: the
compiler's LP scheduler (no spills, same cycles, slower to compile); tiles of 512 queries (the schedule stalls) or 1024
keys; storing P in VMEM for a step; pushing Q untransposed; 32 tiles an iteration (2% less; compiles 1.5 times as long).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import flash_backward
import tuned
from collectives import vary_alike
from masks import CAUSAL, SCORES, TRUSTED, UNSEEN, Mask, Scores, block_ranges

LOG2_E = math.log2(math.e)
LANES = 128  # columns of a register
MASKED, PADDING = 1 << 29, 1 << 30  # flags in the number of a tile, above chunk << 16 | block


@dataclass(frozen=True)
class Blocks:
    """Sizes of the kernel: of a tile, and of what is in VMEM at once.

    A tile is a chunk of queries x a block of keys. A superblock is what is in VMEM.
    """

    q_rows: int  # queries in VMEM, a multiple of `queries`
    k_rows: int  # keys in VMEM, a multiple of `keys`
    queries: int = 256  # in a chunk, a multiple of 128
    keys: int = 512  # in a block, a multiple of 128
    full_unroll: int = 24  # tiles in an iteration of the loop over tiles without a mask
    masked_unroll: int = 8  # tiles in an iteration of the loop over tiles with a mask
    ahead: int = 4  # tiles between scores and softmax; both unrolls are multiples of twice this


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    mask: Mask = CAUSAL,
    scores: Scores = SCORES,
    sinks: jax.Array | None = None,
    *,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, ...]:
    """Attention on a TPU. Both results are differentiable in q, k, v and sinks. Code of one device.

    Args:
      q_BTNH, k_BSKH, v_BSKV: queries, keys and values of one dtype, bfloat16 or float32. N is a multiple of K: query
        head n uses the keys of head n // (N/K). T and S may have any length.
      mask: which keys a query sees. It is fastest if the segment ids do not decrease.
      scores: if `max_logit` is too far from a row's largest score, the row gets NaN, and `out_of_range` counts it.
      sinks: array_N, a logit in the denominator of each head, or None.
      blocks: sizes of the forward kernel; None takes a search's result (tuned.py), or else `default_blocks`.
      interpret: True or `pltpu.InterpretParams(...)` simulates the kernel on CPU.

    Returns:
      out_BTNV in the dtype of v, and lse_BNT in float32, the log-sum-exp of a query's scores (and sink). A query that
      sees no key gets zeros, and UNSEEN (or its sink). `scores.largest` adds largest_BNT, below -1e28 without a key.

    Raises:
      ValueError: shapes or dtypes do not match, blocks do not fit, or there are several windows and no `which`.
    """
    mask = replace(mask, q_offset=jnp.asarray(mask.q_offset, jnp.int32))
    out_BTNV, lse_BNT, *largest = _attend((scores, blocks, interpret), q_BTNH, k_BSKH, v_BSKV, mask)
    return *((out_BTNV, lse_BNT) if sinks is None else with_sinks(out_BTNV, lse_BNT, sinks)), *largest


def out_of_range(lse_BNT: jax.Array) -> jax.Array:
    """The number of rows (one query and one head) for which max_logit was too low (+inf) or too high (-inf).

    Their output is NaN, so that a step with such a row is detected and skipped. They send no gradient to queries, keys
    and values. The count is for a log.
    """
    return jnp.isinf(lse_BNT).sum()


def with_sinks(out_BTNV, lse_BNT, sinks_N):
    """Adds sinks to the results of attention without them."""
    trusted_BNT = ~jnp.isinf(lse_BNT)
    safe_BNT, sinks_BNT = jnp.where(trusted_BNT, lse_BNT, 0.0), sinks_N.astype(jnp.float32)[None, :, None]
    share_BTN = jax.nn.sigmoid(safe_BNT - sinks_BNT).swapaxes(1, 2)
    out_BTNV = (out_BTNV * share_BTN[..., None]).astype(out_BTNV.dtype)
    return out_BTNV, jnp.where(trusted_BNT, jnp.logaddexp(safe_BNT, sinks_BNT), lse_BNT)


def saved_heads(out_BTNV: jax.Array) -> jax.Array:
    """Returns out_BTNV, named `context`. If V is no multiple of 128, a row of a tile, heads are saved side by side."""
    rows = out_BTNV if out_BTNV.shape[-1] % 128 == 0 else out_BTNV.reshape(*out_BTNV.shape[:2], -1)
    return checkpoint_name(rows, "context").reshape(out_BTNV.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q_BTNH, k_BSKH, v_BSKV, mask):
    scores, blocks, interpret = static
    heads_first = [x.swapaxes(1, 2) for x in (q_BTNH, k_BSKH, v_BSKV)]
    out_BNTV, *of_rows = forward(*heads_first, mask, scores, blocks=blocks, interpret=interpret)
    return out_BNTV.swapaxes(1, 2), *of_rows


def _attend_forward(static, *args):
    out_BTNV, lse_BNT, *largest = _attend(static, *args)
    # With these two saved, jax.checkpoint need not run the kernel again.
    out_BTNV, lse_BNT = saved_heads(out_BTNV), checkpoint_name(lse_BNT, "log_sum_exp")
    return (out_BTNV, lse_BNT, *largest), (*args, out_BTNV, lse_BNT)


def _attend_backward(static, saved, cotangents):
    scores, _, interpret = static  # the blocks are the forward kernel's
    q_BTNH, k_BSKH, v_BSKV, mask, out_BTNV, lse_BNT = saved
    dout_BTNV, dlse_BNT, *_ = cotangents
    q_BNTH, k_BKSH, v_BKSV, out_BNTV, dout_BNTV = [
        x.swapaxes(1, 2) for x in (q_BTNH, k_BSKH, v_BSKV, out_BTNV, dout_BTNV)
    ]
    lse_BNT = jnp.where(jnp.isinf(lse_BNT), jnp.inf, lse_BNT)  # exp(score - inf) = 0: such rows send back no gradient
    results, cotangents = (out_BNTV, lse_BNT), (dout_BNTV, dlse_BNT)
    gradients = flash_backward.backward(q_BNTH, k_BKSH, v_BKSV, results, cotangents, mask, scores, interpret=interpret)
    return *(x.swapaxes(1, 2) for x in gradients), None


_attend.defvjp(_attend_forward, _attend_backward)


# -- sizes


def default_blocks(T: int, S: int, H: int, V: int, dtype=jnp.bfloat16, window: int = 0) -> Blocks:
    """The largest superblocks that fit in VMEM, of equal size, with at most 8192 queries and 16384 keys.

    Tiles have 512 keys, or 256 under a narrow window: those take 8% longer for their scores, but more are unmasked.
    """
    unit = Blocks(0, 0, keys=256, masked_unroll=16) if 0 < window <= 2048 else Blocks(0, 0)
    q_rows, k_rows = 8192, 16_384
    while True:
        split = lambda length, rows, step: pl.cdiv(pl.cdiv(length, pl.cdiv(length, rows)), step) * step
        blocks = replace(unit, q_rows=split(T, q_rows, unit.queries), k_rows=split(S, k_rows, unit.keys))
        if vmem_bytes(blocks, H, V, dtype) <= tuned.VMEM_BYTES or q_rows == unit.queries:
            return blocks
        q_rows, k_rows = (q_rows, k_rows // 2) if k_rows > q_rows else (q_rows // 2, k_rows)


def vmem_bytes(blocks: Blocks, H: int, V: int, dtype=jnp.bfloat16) -> int:
    """The VMEM of the kernel's buffers, with segment ids. Buffers of the grid are double."""
    lanes = lambda dim: pl.cdiv(dim, LANES) * LANES
    rows, size = blocks.q_rows + blocks.k_rows, jnp.dtype(dtype).itemsize
    grid = rows * (lanes(H) + lanes(V)) * size + (rows + blocks.q_rows) * 4 * 8  # lse and ids: one of 8 rows is used
    transposed = (blocks.q_rows + blocks.queries) * H * size + blocks.k_rows * V * size
    sums = (blocks.q_rows + blocks.queries) * (V + 2 * 8) * 4
    scores = (2 * blocks.ahead + 1) * blocks.queries * (blocks.keys + 8) * 4
    spills = 6 * 2**20 if size == 4 else 0  # a float32 product is several bfloat16 ones
    return 2 * grid + transposed + sums + scores + spills


def _check(q_BNTH, k_BKSH, v_BKSV, mask, soft_cap, blocks):
    (B, N, T, H), (K, S), segments, window = q_BNTH.shape, k_BKSH.shape[1:3], mask.segments, mask.window
    if k_BKSH.shape != (B, K, S, H) or v_BKSV.shape[:3] != (B, K, S) or N % K:
        raise ValueError(
            f"queries {q_BNTH.shape}, keys {k_BKSH.shape} and values {v_BKSV.shape} (batch, heads, length, dim) must "
            f"be (B, N, T, H), (B, K, S, H) and (B, K, S, V), with N a multiple of K"
        )
    if not q_BNTH.dtype == k_BKSH.dtype == v_BKSV.dtype or q_BNTH.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"queries, keys and values must all be bfloat16 or all float32, not {q_BNTH.dtype}, {k_BKSH.dtype} and "
            f"{v_BKSV.dtype}: cast them"
        )
    if segments is not None and (segments[0].shape, segments[1].shape) != ((B, T), (B, S)):
        raise ValueError(
            f"segment ids of shapes {segments[0].shape} and {segments[1].shape} must be {(B, T)}, one for each query, "
            f"and {(B, S)}, one for each key"
        )
    if window < 0 or soft_cap < 0:
        raise ValueError(f"window={window} and soft_cap={soft_cap} must not be negative; 0 is none")
    multiples = [(blocks.queries, LANES), (blocks.keys, LANES), (blocks.q_rows, blocks.queries)]
    multiples += [(blocks.k_rows, blocks.keys)]
    multiples += [(unroll, 2 * blocks.ahead) for unroll in (blocks.full_unroll, blocks.masked_unroll)]
    if any(size < 1 or size % unit for size, unit in multiples):
        raise ValueError(
            f"{blocks}: queries and keys must be multiples of {LANES}, q_rows of queries, k_rows of keys, and both "
            f"unrolls of 2*ahead"
        )
    if (taken := vmem_bytes(blocks, H, v_BKSV.shape[3], q_BNTH.dtype)) > tuned.VMEM_BYTES:
        raise ValueError(f"{blocks} take {taken:,} bytes of VMEM, of {tuned.VMEM_BYTES:,}: lower q_rows or k_rows")


# -- the call


def forward(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSV: jax.Array,
    mask: Mask = CAUSAL,
    scores: Scores = SCORES,
    *,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, ...]:
    """The kernel with heads first and without derivatives. Arguments and results as for `flash_attention`."""
    shared = q_BNTH, k_BKSH, v_BKSV, *(ids[:, None].astype(jnp.int32) for ids in mask.segments or ())
    windows = mask.window if isinstance(mask.window, tuple) else (mask.window,)
    calls = [
        _call(q_BNTH, k_BKSH, v_BKSV, replace(mask, window=window), scores, blocks, interpret) for window in windows
    ]
    out_BNTV, rows_BNrT = flash_backward.one_of(mask.which, calls, *shared)
    return out_BNTV, *(rows_BNrT[:, :, row] for row in range(rows_BNrT.shape[2]))


def _call(q_BNTH, k_BKSH, v_BKSV, mask, scores, blocks, interpret):
    """(function, lists): the kernel for one window. The function takes the lists and the operands of all windows."""
    (B, N, T, H), (_, K, S, V), segments = q_BNTH.shape, v_BKSV.shape, mask.segments
    shape = dict(T=T, S=S, H=H, V=V, dtype=str(q_BNTH.dtype), causal=mask.causal, window=mask.window)
    key = tuned.key_of("flash_forward", **shape, packed=segments is not None, max_logit=scores.max_logit is not None)
    blocks = blocks or tuned.best(key, Blocks) or default_blocks(T, S, H, V, q_BNTH.dtype, mask.window)
    _check(q_BNTH, k_BKSH, v_BKSV, mask, scores.soft_cap, blocks)
    num_q, num_k = pl.cdiv(T, blocks.q_rows), pl.cdiv(S, blocks.k_rows)

    ranges_bn4, _ = block_ranges((T, S), (blocks.queries, blocks.keys), mask)
    tiles, groups, reach = list_tiles(ranges_bn4, (num_q, num_k), blocks)
    offset = jnp.reshape(jnp.asarray(mask.q_offset, jnp.int32), 1)
    prefixes_B = jnp.broadcast_to(jnp.asarray(-1 if mask.prefix is None else mask.prefix, jnp.int32), (B,))
    rows = 2 if scores.largest else 1  # of the second result: the log-sum-exp, and the largest score
    row = lambda b, i: (b * num_q if len(ranges_bn4) > 1 else 0) + i  # of the lists, of each sequence or of all
    in_specs, out_specs = _specs(blocks, row, num_k, (H, V, N // K), tiles.shape[-1], segments is not None, rows)
    static = _Static(
        scale=scores.scale_for(H),
        soft_cap=scores.soft_cap,
        max_logit=scores.max_logit,
        causal=mask.causal,
        window=mask.window,
        has_prefix=mask.prefix is not None,
        has_segments=segments is not None,
        S=S,
        G=N // K,
        row=row,
        blocks=blocks,
    )
    call = partial(
        pl.pallas_call,
        partial(_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B, N, num_q, num_k),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=_scratch(blocks, H, V, q_BNTH.dtype),
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=64 * 2**20),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name="flash_forward",
        metadata=tuned.metadata(key, blocks, calls=B * N),
        cost_estimate=flash_backward.cost_estimate(q_BNTH, k_BKSH, v_BKSV, (1, 1), mask),
    )

    def run(lists, *shared):
        operands = vary_alike([*lists, *shared])
        typed = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(operands[0]).mat)
        return call(out_shape=[typed((B, N, T, V), v_BKSV.dtype), typed((B, N, rows, T), jnp.float32)])(*operands)

    return run, [offset, prefixes_B, groups, reach, tiles]


def _specs(blocks, row, num_k, head, num_tiles, packed, rows):
    """(in_specs, out_specs). `row` maps a sequence and a superblock of queries to a row of the lists. `head`: H, V, G.

    The index of a superblock of keys is clipped to the seen ones, so that unseen ones are not fetched.
    """
    H, V, G = head
    of_list = lambda b, n, i, j, *_: (row(b, i) * num_k + j, 0, 0)
    of_q = lambda b, n, i, j, *_: (b, n, i, 0)
    reached = lambda b, i, j, reach: jnp.clip(j, reach[2 * row(b, i)], reach[2 * row(b, i) + 1])
    of_k = lambda b, n, i, j, _, __, ___, reach: (b, n // G, reached(b, i, j, reach), 0)
    in_specs = [
        pl.BlockSpec((None, 1, num_tiles), of_list, memory_space=pltpu.SMEM),
        pl.BlockSpec((None, None, blocks.q_rows, H), of_q),
        pl.BlockSpec((None, None, blocks.k_rows, H), of_k),
        pl.BlockSpec((None, None, blocks.k_rows, V), of_k),
    ]
    if packed:
        in_specs += [
            pl.BlockSpec((None, 1, blocks.q_rows), lambda b, n, i, j, *_: (b, 0, i)),
            pl.BlockSpec((None, 1, blocks.k_rows), lambda b, n, i, j, *refs: (b, 0, reached(b, i, j, refs[-1]))),
        ]
    out_specs = [
        pl.BlockSpec((None, None, blocks.q_rows, V), of_q),
        pl.BlockSpec((None, None, rows, blocks.q_rows), lambda b, n, i, j, *_: (b, n, 0, i)),
    ]
    return in_specs, out_specs


def _scratch(blocks, H, V, dtype):
    """The shapes of `_State`. There is one more chunk, for padding tiles."""
    chunks, places = blocks.q_rows // blocks.queries, blocks.k_rows // blocks.keys
    f32 = lambda *shape: pltpu.VMEM(shape, jnp.float32)
    return [
        pltpu.VMEM((chunks + 1, blocks.queries // LANES, H, LANES), dtype),  # lanes are a dim of their own,
        pltpu.VMEM((places, blocks.keys // LANES, V, LANES), dtype),  # so that slices of bf16 are full registers
        f32(chunks + 1, V, blocks.queries),
        f32(chunks + 1, 1, blocks.queries),
        f32(chunks + 1, 1, blocks.queries),
        f32(2 * blocks.ahead, blocks.keys, blocks.queries),
        f32(2 * blocks.ahead, 1, blocks.queries),
        pltpu.VMEM((blocks.keys, blocks.queries), jnp.int32),
    ]


def list_tiles(ranges_bn4, num, blocks):
    """The tiles that each step of the grid visits, for b * num_q * num_k pairs of superblocks in this order. Returns

    tiles, int32 [pairs, 1, size]: chunk << 16 | block; tiles without a mask first, then those with one, then padding
    groups, int32 [pairs * 2]: iterations of the loop over tiles without a mask, and of the loop over the remaining ones
    reach, int32 [b * num_q * 2]: the first and the last superblock of keys that is seen
    """
    chunks, places = blocks.q_rows // blocks.queries, blocks.k_rows // blocks.keys
    (num_q, num_k), (b, n, _) = num, ranges_bn4.shape
    ranges = jnp.pad(ranges_bn4, ((0, 0), (0, num_q * chunks - n), (0, 0))).reshape(b, num_q, 1, chunks, 1, 4)
    block = jnp.arange(num_k * places).reshape(num_k, 1, places)
    seen = (block >= ranges[..., 0]) & (block < ranges[..., 3])  # [b, num_q, num_k, chunks, places]
    full = (block >= ranges[..., 1]) & (block < ranges[..., 2])

    tile = (jnp.arange(chunks)[:, None] << 16) + jnp.arange(places)
    padding = PADDING + (chunks << 16)
    tiles = jnp.sort(jnp.where(full, tile, jnp.where(seen, tile + MASKED, padding)).reshape(-1, 1, chunks * places))
    spare = max(blocks.full_unroll, blocks.masked_unroll) + blocks.ahead
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, spare)), constant_values=padding)

    num_full, num_seen = full.sum((-2, -1)), seen.sum((-2, -1))
    full_groups = num_full // blocks.full_unroll
    groups = [full_groups, pl.cdiv(num_seen - full_groups * blocks.full_unroll, blocks.masked_unroll)]
    some = num_seen > 0
    reach = [jnp.argmax(some, -1), num_k - 1 - jnp.argmax(some[..., ::-1], -1)]
    reach = jnp.where(some.any(-1)[..., None], jnp.stack(reach, -1), 0)
    return [x.astype(jnp.int32) for x in (tiles, jnp.stack(groups, -1).reshape(-1), reach.reshape(-1))]


# -- inside the kernel: q, k, v and the like are references to VMEM; c is a chunk of queries, j a block of keys


@dataclass(frozen=True)
class _Static:
    """The static arguments of the kernel."""

    scale: float
    soft_cap: float
    max_logit: float | None
    causal: bool
    window: int
    has_prefix: bool
    has_segments: bool
    S: int
    G: int
    row: Callable
    blocks: Blocks


@dataclass(frozen=True)
class _State:
    """The kernel's scratch memory, in the order of `_scratch`."""

    qT: jax.Ref  # Q^T of each chunk, scaled
    vT: jax.Ref  # V^T of each block
    sums: jax.Ref  # sums of the weighted values, [V, queries] for each chunk
    top: jax.Ref  # the largest score so far; with max_logit, whether any key was seen
    total: jax.Ref  # the sum of the exponentials
    scores: jax.Ref  # scores of the tiles between the two stages of the pipeline, [keys, queries]
    tops: jax.Ref  # their maxima
    apart: jax.Ref  # position of the query minus that of the key, within a tile [keys, queries]


def _kernel(p, offset, prefixes, groups, reach, tiles, q, k, v, *refs):
    ids, (out, lse, *scratch) = (refs[:2], refs[2:]) if p.has_segments else (None, refs)
    state, blocks = _State(*scratch), p.blocks
    b, n, i, j = [pl.program_id(axis) for axis in range(4)]
    num_k = pl.cdiv(p.S, blocks.k_rows)
    first_q, first_k = offset[0] + i * blocks.q_rows, j * blocks.k_rows
    prefix = prefixes[b] if p.has_prefix else None
    seen = partial(_seen, p, state, (first_q, first_k), prefix, ids)

    pl.when(j == 0)(lambda: _begin(p, q, state))
    at = 2 * (p.row(b, i) * num_k + j)
    new = (i == 0) & (n % p.G == 0) if num_k == 1 else groups[at] + groups[at + 1] > 0
    pl.when(new)(lambda: _transpose_values(p, v, state, first_k))
    masked = p.causal or p.window or p.has_segments or p.S % blocks.keys
    done = groups[at] * blocks.full_unroll
    _visit(p, state, tiles, k, 0, groups[at], blocks.full_unroll, None)
    _visit(p, state, tiles, k, done, groups[at + 1], blocks.masked_unroll, seen if masked else None)
    pl.when(j == num_k - 1)(lambda: _finish(p, out, lse, state))


def _begin(p, q, state):
    def one_chunk(c):
        scale = p.scale / p.soft_cap if p.soft_cap else p.scale * LOG2_E
        x = (q[_rows(c, p.blocks.queries)].astype(jnp.float32) * scale).astype(q.dtype)
        _put_lanes(state.qT, c, x.T)
        state.sums[c] = jnp.zeros_like(state.sums[c])
        state.top[c] = jnp.full_like(state.top[c], UNSEEN / 2)  # above masked scores, below all others
        state.total[c] = jnp.zeros_like(state.total[c])

    _for_each(p.blocks.q_rows // p.blocks.queries, one_chunk)
    if p.causal or p.window:
        position = lambda axis: lax.broadcasted_iota(jnp.int32, state.apart.shape, axis)
        state.apart[...] = position(1) - position(0)


def _transpose_values(p, v, state, first_k):
    def one_block(j):
        x = v[_rows(j, p.blocks.keys)]
        if p.S % p.blocks.k_rows:  # values beyond the end may be NaN, and 0 * NaN is not 0
            x = jnp.where(first_k + j * p.blocks.keys + lax.broadcasted_iota(jnp.int32, x.shape, 0) < p.S, x, 0)
        _put_lanes(state.vT, j, x.T)

    _for_each(p.blocks.k_rows // p.blocks.keys, one_block)


def _visit(p, state, tiles, k, first, count, unroll, seen):
    """Visits `count` groups of `unroll` tiles from tile `first` on. Scores are `ahead` tiles before their softmax."""
    ahead = p.blocks.ahead

    def tile(index):
        return (tiles[0, index] >> 16) & 0xFFF, tiles[0, index] & 0xFFFF

    def group(g, _):
        for u in range(unroll):
            index = first + g * unroll + u
            _score(p, state, k, *tile(index + ahead), (u + ahead) % (2 * ahead), seen)
            _absorb(p, state, *tile(index), u % (2 * ahead), seen)

    @pl.when(count > 0)
    def _():
        for u in range(ahead):
            _score(p, state, k, *tile(first + u), u, seen)
        lax.fori_loop(0, count, group, None)


def _score(p, state, k, c, j, slot, seen):
    """Computes the scores of a tile, to base 2, and their maxima."""
    s_kq = _dot(k[_rows(j, p.blocks.keys)], _get_lanes(state.qT, c))
    if p.soft_cap:
        s_kq = jnp.tanh(s_kq) * (p.soft_cap * LOG2_E)
    if seen:
        s_kq = jnp.where(seen(c, j), s_kq, UNSEEN)
    state.scores[slot] = s_kq
    if seen or p.max_logit is None:
        state.tops[slot] = s_kq.max(0, keepdims=True)


def _absorb(p, state, c, j, slot, seen):
    """Adds a tile of scores to the sums."""
    if p.max_logit is None:
        before = state.top[c]
        top = jnp.maximum(before, state.tops[slot])
        shrink = jnp.exp2(before - top)
        state.top[c] = top
        p_kq = jnp.exp2(state.scores[slot] - top)
        state.total[c] = state.total[c] * shrink + p_kq.sum(0, keepdims=True)
        vT = _get_lanes(state.vT, j)
        state.sums[c] = state.sums[c] * shrink + _dot(vT, p_kq.astype(vT.dtype))
    else:
        state.top[c] = jnp.maximum(state.top[c], state.tops[slot]) if seen else jnp.zeros_like(state.top[c])
        p_kq = jnp.exp2(state.scores[slot] - p.max_logit * LOG2_E)
        state.total[c] += p_kq.sum(0, keepdims=True)
        vT = _get_lanes(state.vT, j)
        state.sums[c] += _dot(vT, p_kq.astype(vT.dtype))


def _seen(p, state, first, prefix, ids, c, j):
    """The mask of a tile, bool [keys, queries]: `masks.visible` in as few operations as possible, as VALUs are busy.

    The distance between query and key is their distance within a tile, which all tiles share, plus a number.
    """
    (first_q, first_k), (queries, keys) = first, (p.blocks.queries, p.blocks.keys)
    first_k = first_k + j * keys
    shift = first_q + c * queries - first_k
    before = lambda end: lax.broadcasted_iota(jnp.int32, (keys, queries), 0) < end - first_k  # keys before a position
    mask = None
    if p.causal and p.window and prefix is None:  # 0 <= distance < window: negative numbers are large as uint32
        mask = (state.apart[...] + shift).astype(jnp.uint32) < p.window
    elif p.causal:
        mask = state.apart[...] >= -shift
        mask = mask if prefix is None else mask | before(prefix)
    if p.window and not (p.causal and prefix is None):
        near = (state.apart[...] < p.window - shift) & (state.apart[...] > -p.window - shift)
        mask = near if mask is None else mask & near
    if ids:
        real = jnp.minimum(c, p.blocks.q_rows // queries - 1)  # the padding chunk has no ids
        k_ids = jnp.broadcast_to(ids[1][:, _rows(j, keys)], (LANES, keys)).T  # transposed by the XLUs, which are idle
        same = jnp.concatenate([k_ids] * (queries // LANES), 1) == ids[0][:, _rows(real, queries)]
        mask = same if mask is None else mask & same
    if p.S % keys:
        mask = before(p.S) if mask is None else mask & before(p.S)
    return mask


def _finish(p, out, lse, state):
    def one_chunk(c):
        top, total = state.top[c], state.total[c]
        saw = (top > UNSEEN / 4) | (total != 0)  # a row with NaN is seen, whatever max returns, so that NaN is written
        base = top if p.max_logit is None else p.max_logit * LOG2_E
        value = jnp.where(saw, (base + jnp.log2(jnp.where(saw, total, 1.0))) * math.log(2), UNSEEN)
        if p.max_logit is not None:
            value = jnp.where(saw & (total < 1 / TRUSTED), -jnp.inf, jnp.where(total > TRUSTED, jnp.inf, value))
        known = saw & ~jnp.isinf(value)
        rows = [value, top * math.log(2)][: lse.shape[0]]
        lse[:, _rows(c, p.blocks.queries)] = jnp.concatenate(rows)
        unknown = 0.0 if p.max_logit is None else jnp.where(saw, jnp.nan, 0.0)
        mean = jnp.where(known, state.sums[c] / jnp.where(known, total, 1.0), unknown)
        out[_rows(c, p.blocks.queries)] = mean.astype(out.dtype).T

    _for_each(p.blocks.q_rows // p.blocks.queries, one_chunk)


def _rows(index, size):
    return pl.ds(pl.multiple_of(index * size, size), size)


def _put_lanes(ref, index, x):
    for lane in range(x.shape[1] // LANES):
        ref[index, lane] = x[:, lane * LANES : (lane + 1) * LANES]


def _get_lanes(ref, index):
    return jnp.concatenate([ref[index, lane] for lane in range(ref.shape[1])], axis=1)


def _dot(a, b):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _for_each(count, body):
    """Loops over body(0..count-1) with up to 8 in an iteration, whose latencies then overlap."""
    several = math.gcd(count, 8)
    lax.fori_loop(0, count // several, lambda g, _: [body(g * several + i) for i in range(several)] and None, None)


# -- a demonstration


def main(T: int = 256, H: int = 64):
    """Compares a causal head in the simulator with the definition."""
    q_BNTH, k_BKSH, v_BKSV = jax.random.normal(jax.random.key(0), (3, 1, 1, T, H), jnp.bfloat16)
    blocks = Blocks(T, T, queries=128, keys=128, full_unroll=2, masked_unroll=2, ahead=1)
    out_BNTV, _ = forward(q_BNTH, k_BKSH, v_BKSV, blocks=blocks, interpret=True)
    q, k, v = [x[0, 0].astype(jnp.float32) for x in (q_BNTH, k_BKSH, v_BKSV)]
    expected = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), q @ k.T * H**-0.5, UNSEEN)) @ v
    print(f"a causal head of {T} x {H} in bfloat16, largest error {abs(out_BNTV[0, 0] - expected).max():.4f}")
    print(f"of 8192 x 128: {vmem_bytes(default_blocks(8192, 8192, 128, 128), 128, 128):,} bytes of VMEM, predicted")


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__)
