"""Flash attention, backward: the gradients of q, k and v, from the log-sum-exp of the scores instead of the scores.

**Idea** (Dao et al. 2022, arXiv:2205.14135, appendix B.2; Dao 2023, arXiv:2307.08691, section 3.1.2). The forward pass
saves its result and, for each row of scores s = scale * q k^T, lse = log(sum(exp(s))). From these, a tile of
probabilities is recomputed from q and k whenever it is needed, and no array of size T x S ever leaves the chip.

**Formula.**

    P = exp(S - lse)      dP = dO V^T      dS = P * (dP - di)      di = sum(out * dout) - dlse, a number for each query
    dV = P^T dO           dQ = scale * dS K                        dK = scale * dS^T Q

`dlse` is the gradient of the log-sum-exp, if attention over parts of the keys is merged by it or a loss depends on it.
As dlse/dS = P, it is part of di. A soft cap multiplies dS by 1 - tanh^2. One kernel computes five matmuls. The older
way, a kernel for dK and dV and another one for dQ, computes seven.

**Five matmuls, and which operand is stationary.** An MXU holds a tile of 256 x 256 weights and streams the rows of the
other operand through it, two a cycle. M rows take M/4 cycles on the two MXUs for each tile of [K, N], even if K or N is
128 and fills half of the tile. For a block of 1024 queries x 1024 keys, with H = V:

                                  streams       stationary                cycles: H = 64   128   192   256
    S     = Q K^T                 Q             K^T   [H, keys]                     1024  1024  1024  1024
    dP    = dO V^T                dO            V^T   [V, keys]                     1024  1024  1024  1024
    dV^T  = dO^T P                dO^T          P     [queries, keys]                256   512   768  1024
    dK^T  = Q^T dS                Q^T           dS    [queries, keys]                256   512   768  1024
    dQ^T  = K^T dS^T              K^T           dS^T  [keys, queries]                256   512   768  1024
                                                                                    2816  3584  4352  5120

The first two have K = H, which no arrangement improves. The others, written as usual (P^T streams, dO [queries, V] is
stationary), would have N = H and take 1024 each. With the block of P or dS as the stationary operand the MXUs are full.
So everything but Q, dO, P and dS is transposed in VMEM. P and dS are pushed into the MXUs as they are, except for dQ:
there the push transposes, which takes twice as long (128 cycles a tile), hidden behind other matmuls. If S^T were
computed instead, two of the three would need a transposing push, and pushes would be the limit (4900 cycles, not 4370).

**Schedule.** The grid is (batch, kv head, query head of its group, block of queries). All keys of a kv head stay in
VMEM, with dK and dV in float32, for the G query heads that share them: they are read once and written once. Blocks of
queries are streamed. An inner loop takes a block of queries through the keys that it sees (masks.py); its dQ is summed
in VMEM, too, so that no partial sum goes through HBM. The alternative, resident queries and streamed keys, would have
to hold dQ of G heads. An iteration over 1024 keys is unrolled into pieces of 256. The scores of two pieces are issued
ahead of the gradients of one, so that the MXUs have work while the VALUs and the EUP compute P and dS.

**Masks.** Full blocks have no mask. A block on an edge of the causal mask or the window is identified by its distance
from the diagonal. If q_offset is a multiple of the block, only few distances occur. Each has its own code, with a
constant mask, which skips unseen tiles of 256 x 256 (on the diagonal 10 of 16 are left). All other masks (documents,
prefix, odd offsets, a shorter last block of keys) compare positions. The log-sum-exp of a query that sees no key is set
so high that P is 0: with UNSEEN itself, exp(UNSEEN - UNSEEN) would be 1. Beyond T, q and dout are set to 0.

**More keys than fit** in VMEM are processed in parts, in a `lax.scan`. Each part streams all queries that see any of
its keys; their dQ is read and written once more, 8*H bytes. A part that no query sees costs one empty step a head.

**Cost.** A key takes 6*(H+V) bytes of VMEM transposed, and 8*(H+V), or half of that without double buffering, for
reading and writing: 16k keys at a time for H = V = 128. With keys in parts, the traffic of dQ, q and dout is hidden
behind compute if a part has more than (8*H + 2*(H+V)) * (2.2e9 / 3.7e12) / 4.2e-3 = 220 keys (3.7e12 bytes/s,
2.2e9 cycles/s, published; 4.2e-3 cycles for a query and a key).

**On TPU7x.** Cycles of blocks of 1024 x 1024, compiled, as by `python aot.py bundles
compiled.builders:flash_backward head_dim=128`:

    H                          64     128    192/128    256
    full block               4291    4370       4685   5408
    on the diagonal          2754    2834       3053   3494
    MXUs busy, full block     66%     82%        87%    95%

In addition each block of queries takes about 1500 before and after its loop (the XLUs transpose q, dout and dq, and
broadcast lse and di along the lanes), and each block of keys of a kv head 750. A causal head of 8192 is 28 full
blocks, 8 on the diagonal and 8 of each of these: 159,000 in all. In the last block of queries only pieces with queries
are computed: 2049 queries take 20,630 cycles, 2048 take 14,212, and with full blocks it would be 29,180. For H <= 128 a
full block is limited by waits for results of matmuls, which take 211 cycles. Most waits are at the end of an iteration,
as iterations do not overlap. (With libtpu's LP scheduler it takes 3965 cycles if an MXU queues matmuls and 4448 if not,
which only a TPU can show; by default it takes 4370 in both cases.)

**Left out.** Dropout. Heads of 64 are not joined to fill the MXUs for S and dP, which would need zeros. Queries that
see no key of a part are still read, if they are between others that do.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

import tuned
from collectives import vary_alike
from masks import UNSEEN, Mask, Scores, block_ranges, visible

LOG2_E = math.log2(math.e)
LANES = 128
MXU = 256  # rows and columns of a matrix unit
NO_GRADIENT = -UNSEEN  # the log-sum-exp for a query without a gradient: exp2(score - NO_GRADIENT) is 0 for any score


@dataclass(frozen=True)
class Blocks:
    """Sizes of the kernel.

    An iteration computes `queries` x `keys` scores, in pieces of `chunk` keys. `resident` keys are in VMEM at once.
    With `buffers` = 2 the keys of the next kv head are read, and dk and dv of the last one written, meanwhile.
    """

    queries: int
    keys: int
    resident: int
    chunk: int = 256
    buffers: int = 2


def default_blocks(T: int, S: int, H: int, V: int, dtype=jnp.bfloat16) -> Blocks:
    """1024 x 1024, smaller for short sequences. All keys are resident, or as large a half, quarter, ... as fits."""
    blocks = Blocks(queries=min(1024, _up(T, 256 if T > LANES else LANES)), keys=min(1024, _up(S, 256)), resident=0)
    parts = 1
    while True:
        resident = _up(pl.cdiv(S, parts), blocks.keys)
        for buffers in (2, 1):
            choice = replace(blocks, resident=resident, buffers=buffers)
            if vmem_bytes(choice, H, V, dtype) <= tuned.VMEM_BYTES or resident == blocks.keys:
                return choice
        parts *= 2


def vmem_bytes(blocks: Blocks, H: int, V: int, dtype=jnp.bfloat16) -> int:
    """An upper bound of the kernel's VMEM, up to 6 MiB above what the compiler reports."""
    size, lanes = jnp.dtype(dtype).itemsize, _up(H, LANES) + _up(V, LANES)  # 64 columns are padded to 128
    ids = 2 * 8 * 4
    key = 2 * blocks.buffers * lanes * size + (H + V) * (size + 4) + ids  # k, v, dk, dv; then transposed
    q_do = 4 * lanes * size  # two buffers, then scaled, then transposed
    dq = 5 * _up(H, LANES) * 4  # output and the sum of previous parts, in two buffers each; the sum
    query = q_do + dq + ids + 2 * 8 * 4 + 3 * LANES * 4  # lse, di, ids: as rows and as columns
    spilled = 6 * blocks.queries * blocks.chunk * 4  # scores and their gradients of three pieces
    return blocks.resident * key + blocks.queries * query + spilled


def one_of(which: jax.Array | None, calls: list[tuple], *shared):
    """call(own, *shared) for the `which`-th of [(call, own), ...], clamped as by `lax.switch`.

    The branches contain only kernels. Barriers keep XLA from moving the operations around them into each branch, such
    as biases, conversions to float32 and copies between layouts.

    Raises:
      ValueError: there are several calls and no `which`, or one call and a `which`.
    """
    if (which is None) != (len(calls) == 1):
        raise ValueError(f"which={which} is the index of one of several windows, and there are {len(calls)}")
    if which is None:
        ((call, own),) = calls
        return call(own, *shared)
    # Kernels need a row-major layout. Without this constraint XLA copies other layouts inside of the branch.
    in_rows = lambda x: with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
    owns, shared = jax.tree.map(in_rows, lax.optimization_barrier(([own for _, own in calls], shared)))
    branches = [lambda owns, *shared, i=i, call=call: call(owns[i], *shared) for i, (call, _) in enumerate(calls)]
    return lax.optimization_barrier(lax.switch(jnp.asarray(which, jnp.int32), branches, owns, *shared))


def backward(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSV: jax.Array,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
    mask: Mask,
    scores: Scores,
    *,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq_BNTH, dk_BKSH, dv_BKSV) of flash attention in the dtype of q, k and v. Code of one device.

    Args:
      q_BNTH, k_BKSH, v_BKSV: have one dtype. Query head n uses kv head n // (N/K).
      results: (out_BNTV, lse_BNT) of the forward pass. lse is in float32, a natural logarithm. If it is UNSEEN (no key
        seen) or infinite (overflow), the query has no gradient.
      cotangents: (dout_BNTV, dlse_BNT), the gradients of both.
      mask, scores: as in the forward pass; `max_logit` is not read.
      blocks: sizes; None takes a search's result (tuned.py), or else `default_blocks`.
      interpret: True or `pltpu.InterpretParams(...)` simulates the kernel on CPU.

    Raises:
      ValueError: shapes or blocks do not match, or do not fit in VMEM.
    """
    (B, N, T, H), (S, V), segments = q_BNTH.shape, v_BKSV.shape[2:], mask.segments
    (out_BNTV, lse_BNT), (dout_BNTV, dlse_BNT) = results, cotangents
    di_BNT = jnp.sum(out_BNTV.astype(jnp.float32) * dout_BNTV.astype(jnp.float32), -1) - dlse_BNT
    dead_BNT = (lse_BNT <= UNSEEN / 2) | (lse_BNT == jnp.inf)
    stats_BN2T = jnp.stack([jnp.where(dead_BNT, NO_GRADIENT, lse_BNT * LOG2_E), jnp.where(dead_BNT, 0.0, di_BNT)], 2)
    ids = None if segments is None else [ids[:, None].astype(jnp.int32) for ids in segments]
    shared = q_BNTH, dout_BNTV.astype(q_BNTH.dtype), stats_BN2T, k_BKSH, v_BKSV, ids

    def call_of(window):
        shape = dict(T=T, S=S, H=H, V=V, dtype=str(q_BNTH.dtype), causal=mask.causal, window=window)
        key = tuned.key_of("flash_backward", **shape, packed=segments is not None)
        sizes = blocks or tuned.best(key, Blocks) or default_blocks(T, S, H, V, q_BNTH.dtype)
        sizes = _checked(q_BNTH, k_BKSH, v_BKSV, sizes)
        described = tuned.metadata(key, sizes, calls=B * N)
        own = replace(mask, window=window, which=None)
        static = _Static(
            lengths=(T, S),
            mask=Mask(causal=mask.causal, window=window),
            soft_cap=scores.soft_cap,
            scale=scores.scale_for(H),
            blocks=sizes,
            interpret=interpret,
            metadata=described,
        )
        if S <= sizes.resident:
            scalars, _ = _scalars(static, B, own)
            return partial(_call, static), scalars
        return partial(_in_parts, static), own

    windows = mask.window if isinstance(mask.window, tuple) else (mask.window,)
    return one_of(mask.which, [call_of(window) for window in windows], *shared)


def cost_estimate(q_BNTH, k_BKSH, v_BKSV, products, mask: Mask) -> pl.CostEstimate:
    """The cost of a kernel for XLA's scheduler (kernels.py): its multiplications, averaged over its calls.

    Args:
      products: (numbers of matmuls with the dim H, with the dim V). A matrix unit pads both to 256.
    """
    (B, N, T, H), (S, V) = q_BNTH.shape, v_BKSV.shape[2:]
    scores = B * N * T * S // 2 if mask.causal else B * N * T * S
    if mask.window:  # plus the rest of the blocks at its edges
        scores = min(scores, B * N * min(T, S) * ((1 if mask.causal else 2) * mask.window + 512))
    flops = 2 * scores * (products[0] * _up(H, MXU) + products[1] * _up(V, MXU))
    nbytes = sum(x.size * x.dtype.itemsize for x in (q_BNTH, k_BKSH, v_BKSV))
    return pl.CostEstimate(flops=flops, transcendentals=scores, bytes_accessed=2 * nbytes)


def _in_parts(static, mask, q_BNTH, do_BNTV, stats_BN2T, k_BKSH, v_BKSV, ids):
    """The gradients, computed for `blocks.resident` keys at a time."""
    (B, N, T, H), (_, K, S, _), blocks = q_BNTH.shape, k_BKSH.shape, static.blocks
    prefix, segments = mask.prefix, mask.segments

    def one_part(dq_BNTH, start, size):
        take = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        k_BKsH, v_BKsV = take(k_BKSH, axis=2), take(v_BKSV, axis=2)
        some_prefix = None if prefix is None else prefix - start
        some_segments = None if segments is None else (segments[0], take(segments[1], axis=1))
        some_ids = None if ids is None else (ids[0], take(ids[1], axis=2))
        part = replace(static, lengths=(T, size))
        own = replace(mask, prefix=some_prefix, segments=some_segments, q_offset=mask.q_offset - start)
        scalars, seen = _scalars(part, B, own)
        operands = q_BNTH, do_BNTV, stats_BN2T, k_BKsH, v_BKsV, some_ids
        dq_BNTH, dk_BKsH, dv_BKsV = _call(part, scalars, *operands, dq_BNTH, seen)
        return dq_BNTH, (dk_BKsH, dv_BKsV)

    num_parts, left = divmod(S, blocks.resident)
    dq_BNTH = jnp.zeros((B, N, _up(T, blocks.queries), H), jnp.float32)  # full blocks: it is updated in place
    dq_BNTH, _ = vary_alike((dq_BNTH, q_BNTH))
    starts = jnp.arange(num_parts) * blocks.resident
    dq_BNTH, parts = lax.scan(partial(one_part, size=blocks.resident), dq_BNTH, starts)
    dk_BKSH, dv_BKSV = [jnp.moveaxis(part, 0, 2).reshape(B, K, -1, part.shape[-1]) for part in parts]
    if left:
        dq_BNTH, rest = one_part(dq_BNTH, S - left, left)
        dk_BKSH, dv_BKSV = [jnp.concatenate(both, 2) for both in zip((dk_BKSH, dv_BKSV), rest, strict=True)]
    return dq_BNTH[:, :, :T].astype(q_BNTH.dtype), dk_BKSH, dv_BKSV


def _checked(q_BNTH, k_BKSH, v_BKSV, blocks):
    """Checks shapes and blocks, and returns the blocks with no more resident keys than there are."""
    (B, N, _, H), (_, K, S, V) = q_BNTH.shape, v_BKSV.shape
    if N % K or k_BKSH.shape != (B, K, S, H):
        raise ValueError(
            f"q {q_BNTH.shape}, k {k_BKSH.shape}, v {v_BKSV.shape}: need k (B, K, S, H), N a multiple of K"
        )
    if not q_BNTH.dtype == k_BKSH.dtype == v_BKSV.dtype:
        raise ValueError(f"q, k and v are {q_BNTH.dtype}, {k_BKSH.dtype} and {v_BKSV.dtype}: cast them to one dtype")
    blocks = replace(blocks, resident=min(blocks.resident, _up(S, blocks.keys)))
    for name, unit in [("queries", LANES), ("chunk", LANES), ("keys", blocks.chunk), ("resident", blocks.keys)]:
        if (size := getattr(blocks, name)) % unit or not size:
            raise ValueError(f"blocks.{name}={size} must be a multiple of {unit}")
    if blocks.queries % min(blocks.chunk, blocks.queries):
        raise ValueError(f"blocks.queries={blocks.queries} must be a multiple of blocks.chunk={blocks.chunk}, or less")
    if (size := vmem_bytes(blocks, H, V, q_BNTH.dtype)) > tuned.VMEM_BYTES:
        raise ValueError(f"{blocks} takes {size:,} bytes of VMEM, of {tuned.VMEM_BYTES:,}: lower resident")
    return blocks


@dataclass(frozen=True)
class _Static:
    """The static arguments of the kernel."""

    lengths: tuple[int, int]
    mask: Mask  # its static fields alone: causal, window
    soft_cap: float
    scale: float
    blocks: Blocks
    interpret: bool | pltpu.InterpretParams
    metadata: dict[str, str]


def _scalars(static, B, mask):
    """The kernel's scalars in SMEM, by name, and whether each block of queries sees any of the keys."""
    (T, S), bq, bk = static.lengths, static.blocks.queries, static.blocks.keys
    nq = pl.cdiv(T, bq)
    # Queries beyond T have no gradient, so the last block counts as full.
    of_q, _ = block_ranges((nq * bq, S), (bq, bk), mask)
    scalars = dict(ranges=jnp.broadcast_to(of_q, (B, nq, 4)), offset=mask.q_offset, first_q=0)
    if mask.prefix is not None:
        scalars["prefix"] = jnp.broadcast_to(mask.prefix, (B,))
    scalars = {name: jnp.asarray(x, jnp.int32).reshape(-1) for name, x in scalars.items()}
    return scalars, (of_q[..., 3] > of_q[..., 0]).any(0)


def _call(static, scalars, q_BNTH, do_BNTV, stats_BN2T, k_BKSH, v_BKSV, ids, dq_so_far=None, seen=None):
    """Calls the kernel for keys that fit in VMEM. With `dq_so_far` it adds to that, and skips queries that see none."""
    (B, N, T, H), (_, K, S, V) = q_BNTH.shape, v_BKSV.shape
    blocks, bq, bk = static.blocks, static.blocks.queries, static.blocks.keys
    nk, count_q = pl.cdiv(S, bk), pl.cdiv(T, bq)
    if dq_so_far is not None:
        first_q, count_q = _visited(seen)
        scalars = scalars | dict(first_q=first_q.reshape(1))

    block_of = lambda i, ranges, offset, first_q, *_: first_q[0] + i
    rows = lambda width: pl.BlockSpec(
        (None, None, bq, width), lambda b, k, g, *i: (b, k * (N // K) + g, block_of(*i), 0)
    )
    buffers = {} if blocks.buffers == 2 else dict(pipeline_mode=pl.Buffered(blocks.buffers))
    head = lambda width: pl.BlockSpec((None, None, nk * bk, width), lambda b, k, *_: (b, k, 0, 0), **buffers)
    stats = pl.BlockSpec((None, None, 2, bq), lambda b, k, g, *i: (b, k * (N // K) + g, 0, block_of(*i)))
    inputs = dict(q=(q_BNTH, rows(H)), do=(do_BNTV, rows(V)), stats=(stats_BN2T, stats))
    inputs |= dict(k=(k_BKSH, head(H)), v=(v_BKSV, head(V)))
    if ids is not None:
        q_ids, k_ids = ids
        inputs["q_ids"] = (q_ids, pl.BlockSpec((None, 1, bq), lambda b, k, g, *i: (b, 0, block_of(*i))))
        inputs["k_ids"] = (k_ids, pl.BlockSpec((None, 1, nk * bk), lambda b, *_: (b, 0, 0)))
    if dq_so_far is not None:
        inputs["dq_so_far"] = (dq_so_far, rows(H))
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(q_BNTH).mat)
    outputs = dict(dq=(like(q_BNTH if dq_so_far is None else dq_so_far), rows(H)))
    outputs |= dict(dk=(like(k_BKSH), head(H)), dv=(like(v_BKSV), head(V)))
    narrow, wide = partial(pltpu.VMEM, dtype=q_BNTH.dtype), partial(pltpu.VMEM, dtype=jnp.float32)
    scratch = dict(qs=narrow((bq, H)), dos=narrow((bq, V)), qT=narrow((H, bq)), doT=narrow((V, bq)))
    scratch |= dict(lse=wide((bq, LANES)), di=wide((bq, LANES)), dqT=wide((H, bq)))
    scratch |= dict(kT=narrow((nk, H, bk)), vT=narrow((nk, V, bk)), dkT=wide((nk, H, bk)), dvT=wide((nk, V, bk)))
    if ids is not None:
        scratch["ids"] = pltpu.VMEM((bq, LANES), jnp.int32)

    names = [*scalars, *inputs, *outputs, *scratch]
    absent = dict.fromkeys(("prefix", "q_ids", "k_ids", "ids", "dq_so_far"))
    return pl.pallas_call(
        lambda *refs: _kernel(SimpleNamespace(**absent | dict(zip(names, refs, strict=True))), static),
        out_shape=[shape for shape, _ in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B, K, N // K, count_q),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={} if dq_so_far is None else {names.index("dq_so_far"): 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=tuned.VMEM_BYTES),
        interpret=pltpu.InterpretParams() if static.interpret is True else static.interpret,
        name="flash_backward",
        metadata=static.metadata,
        cost_estimate=cost_estimate(q_BNTH, k_BKSH, v_BKSV, (3, 2), static.mask),
    )(*scalars.values(), *(array for array, _ in inputs.values()))


def _visited(flags):
    """(first, count) of the hull of the true flags; (0, 1) if there is none, as the kernel must run to write zeros."""
    first, last = jnp.argmax(flags), flags.shape[0] - 1 - jnp.argmax(flags[::-1])
    return jnp.where(flags.any(), jnp.stack([first, last - first + 1]), jnp.array([0, 1]))


# -- inside the kernel: r holds the references by name, to blocks in VMEM and scalars in SMEM


def _kernel(r, static):
    """One step: a block of queries of one head and all keys that it sees."""
    bq, bk = static.blocks.queries, static.blocks.keys
    b, g, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    pl.when((g == 0) & (i == 0))(partial(_load_keys, r, static))
    block = r.first_q[0] + i
    _load_queries(r, static, block)

    at = (b * pl.cdiv(static.lengths[0], bq) + block) * 4
    first, full_first, full_end, end = [r.ranges[at + n] for n in range(4)]
    before = full_first - first
    edges = edge_distances(bq, bk, static.mask) if r.prefix is None else []

    def attend(height, scope):
        """Computes the first `height` queries of the block."""

        def full(j, _):
            with jax.named_scope(scope + "full block"):
                _block(r, static, height, j)

        def masked(n, _):
            j = jnp.where(n < before, first + n, full_end + n - before)
            distance = block * bq + r.offset[0] - j * bk
            other = True
            for edge in edges:
                pl.when(distance == edge)(partial(edge_block, j, edge))
                other &= distance != edge
            pl.when(other)(partial(masked_block, j))

        def edge_block(j, edge):
            with jax.named_scope(scope + "edge block"):
                _block(r, static, height, j, partial(_seen, r, static, j, block, edge), edge)

        def masked_block(j):
            with jax.named_scope(scope + "masked block"):
                _block(r, static, height, j, partial(_seen, r, static, j, block, None))

        lax.fori_loop(full_first, full_end, full, None)
        if static.mask.causal or static.mask.window or r.ids is not None or static.lengths[1] % bk:
            lax.fori_loop(0, before + end - full_end, masked, None)

    last_height, is_last = last_queries(static.lengths[0], static.blocks), block == static.lengths[0] // bq
    if last_height == bq:
        attend(bq, "")
    else:
        pl.when(~is_last)(partial(attend, bq, ""))
        pl.when(is_last)(partial(attend, last_height, "last "))

    dq = (r.dqT[...] * static.scale).astype(r.dq.dtype).T
    r.dq[...] = dq if r.dq_so_far is None else r.dq_so_far[...] + dq
    pl.when((g == pl.num_programs(2) - 1) & (i == pl.num_programs(3) - 1))(partial(_store_keys, r, static))


def last_queries(T: int, blocks: Blocks) -> int:
    """The queries that are computed in the last block: a multiple of a piece."""
    return _up(T % blocks.queries, min(blocks.chunk, blocks.queries)) or blocks.queries


def _load_keys(r, static):
    def one_block(j, _):
        for x, xT, dxT in [(r.k, r.kT, r.dkT), (r.v, r.vT, r.dvT)]:
            xT[j] = _cleared(x[_rows(static, j)], 0, static.lengths[1], j * static.blocks.keys).T
            dxT[j] = jnp.zeros(dxT.shape[1:], jnp.float32)

    lax.fori_loop(0, r.kT.shape[0], one_block, None)


def _store_keys(r, static):
    def one_block(j, _):
        r.dk[_rows(static, j)] = (r.dkT[j] * static.scale).astype(r.dk.dtype).T
        r.dv[_rows(static, j)] = r.dvT[j].astype(r.dv.dtype).T

    lax.fori_loop(0, r.kT.shape[0], one_block, None)


def _rows(static, j):
    return pl.ds(pl.multiple_of(j * static.blocks.keys, static.blocks.keys), static.blocks.keys)


def _load_queries(r, static, block):
    bq = static.blocks.queries
    q, do, stats = [
        _cleared(x[...], dim, static.lengths[0], block * bq) for x, dim in [(r.q, 0), (r.do, 0), (r.stats, 1)]
    ]
    fold = static.scale / static.soft_cap if static.soft_cap else static.scale * LOG2_E
    r.qs[...], r.dos[...] = (q.astype(jnp.float32) * fold).astype(q.dtype), do  # rounded as in the forward pass
    r.qT[...], r.doT[...] = q.T, do.T
    r.dqT[...] = jnp.zeros_like(r.dqT)
    columns = [(r.lse, stats[:1]), (r.di, stats[1:])] + ([] if r.ids is None else [(r.ids, r.q_ids[...])])
    for column, row in columns:
        for c in range(0, bq, LANES):
            column[c : c + LANES] = jnp.broadcast_to(row[:, c : c + LANES], (LANES, LANES)).T


def _cleared(x, dim, length, start):
    """A block that starts at `start`, with 0 beyond `length`, where NaN may be: 0 * NaN is not 0."""
    if length % x.shape[dim] == 0:
        return x
    return jnp.where(_iota(x.shape, dim) < length - start, x, jnp.zeros_like(x))


def _block(r, static, queries, j, seen=None, distance=None):
    """Computes the first `queries` of a block with block j of keys.

    `seen` returns the mask of a piece. `distance` is given on an edge.
    """
    bk, chunk = static.blocks.keys, static.blocks.chunk
    height, pieces = min(chunk, static.blocks.queries), []
    for c in range(0, bk, chunk):
        some_seen = lambda q, c=c: distance is None or _tile(distance + q - c, height, chunk, static.mask)[0]
        if live := [q for q in range(0, queries, height) if some_seen(q)]:
            pieces.append((slice(live[0], live[-1] + height), slice(c, c + chunk)))
    ahead = [_scores(r, j, *piece) for piece in pieces[:2]]
    for n, piece in enumerate(pieces):
        ahead += [_scores(r, j, *after) for after in pieces[n + 2 : n + 3]]
        _gradients(r, static, j, *piece, *ahead.pop(0), seen and seen(*piece))


def _scores(r, j, rows, keys):
    return _dot(r.qs[rows], r.kT[j, :, keys]), _dot(r.dos[rows], r.vT[j, :, keys])


def _gradients(r, static, j, rows, keys, s, dp, seen):
    if static.soft_cap:
        capped = jnp.tanh(s)
        s = capped * (static.soft_cap * LOG2_E)
    if seen is not None:
        s = jnp.where(seen, s, UNSEEN)
    p = jnp.exp2(s - _across(r.lse[rows], s.shape[1]))
    ds = p * (dp - _across(r.di[rows], s.shape[1]))
    if static.soft_cap:
        ds *= 1 - capped * capped
    p, ds = p.astype(r.qs.dtype), ds.astype(r.qs.dtype)
    r.dvT[j, :, keys] += _dot(r.doT[:, rows], p)
    r.dkT[j, :, keys] += _dot(r.qT[:, rows], ds)
    r.dqT[:, rows] += _dot(r.kT[j, :, keys], ds.T)


def _seen(r, static, j, block, distance, rows, keys):
    """The mask of a piece. It is a constant if `distance` is given and nothing else hides keys."""
    (bq, bk), S = (static.blocks.queries, static.blocks.keys), static.lengths[1]
    shape = (rows.stop - rows.start, keys.stop - keys.start)
    q_at, k_at = _iota(shape, 0) + rows.start, _iota(shape, 1) + keys.start
    if distance is not None and r.ids is None and S % bk == 0:
        return visible(q_at + distance, k_at, static.mask)
    q_at, k_at, segments = q_at + (block * bq + r.offset[0]), k_at + j * bk, None
    if r.ids is not None:
        k_ids = r.k_ids[:, pl.ds(pl.multiple_of(j * bk + keys.start, shape[1]), shape[1])]
        segments = _across(r.ids[rows], shape[1]), k_ids
    prefix = None if r.prefix is None else r.prefix[pl.program_id(0)]
    seen = visible(q_at, k_at, replace(static.mask, prefix=prefix, segments=segments))
    return seen & (k_at < S) if S % bk else seen


def _across(column, width):
    return jnp.concatenate([column] * (width // LANES), 1)


def _tile(distance, rows, keys, mask):
    """Whether any query of a tile sees any key, and whether all see all. `distance` is first query minus first key."""
    causal, window = mask.causal, mask.window
    least, most = distance - keys + 1, distance + rows - 1
    some = (not causal or most >= 0) and (not window or (least < window and most > -window))
    every = (not causal or least >= 0) and (not window or (most < window and least > -window))
    return some, every


def edge_distances(bq: int, bk: int, mask: Mask) -> list[int]:
    """The distances of the blocks that need a mask, or [] if there are more than 4."""
    step, reach = math.gcd(bq, bk), mask.window + bq + bk
    distances = range(-_up(reach, step), _up(reach, step) + 1, step)
    edges = [d for d in distances if _tile(d, bq, bk, mask) == (True, False)]
    return edges if len(edges) <= 4 else []


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _iota(shape, dim):
    return lax.broadcasted_iota(jnp.int32, shape, dim)


def _up(x, multiple):
    return pl.cdiv(x, multiple) * multiple
