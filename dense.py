"""Dense: a matmul as a Pallas kernel, the first one to read. It runs near the MXU's limit in bfloat16 and FP8.

    python dense.py                     how near the limit: compiled for TPU7x, on a machine without one
    python dense.py --tiles 512,512,2048 --size 4096,4096,4096

**Idea.** The operands of a large matmul are in HBM; the matrix units (MXUs) read VMEM, 64 MiB for a TensorCore. So
out_MN = lhs_MK @ rhs_KN is split into blocks of m x n, m x k and k x n. The kernel is the code for one step on such
blocks:

    grid        (M/m, N/n, K/k): one step for each index. The last index is the fastest, so that the sum over K of one
                block of the result is complete before the next block begins
    BlockSpec   which block of each array a step works on. Pallas copies blocks in and out by DMA while the steps before
                and after compute (so each has two buffers). It copies nothing if the next step has the same block
    sum_mn      VMEM that lasts from step to step: the sum so far, in float32. With k = K there is one step and no sum

**Formula.** With c bytes for an element, a step has 2*m*n*k FLOPs. For every m rows of the result the grid fetches all
of rhs. It fetches m rows of lhs once if k = K, and otherwise for every block of the result:

    compute     2*M*N*K / P       P = 2 MXUs * 256*256 * 2 rows * 2 = 524,288 FLOPs a cycle in bf16, fp8 twice that
    HBM         c*K*N*(M/m) / W   W = 1677 bytes a cycle (7380 GB/s, two cores, 2.2 GHz); and c*M*K once
    hidden if   m > c*P/(2*W)     = 313, in bf16 (c = 2) and in fp8 (c = 1, 2*P); if k < K: 1/m + 1/n < 1/313
    VMEM        2*(m*k + k*n)*c + 2*m*n*c_out, and 4*m*n if k < K; at most 60 MiB, the rest is for spilled registers

**Edges.** M, K and N may have any size. The part of a block beyond an array holds arbitrary values. Rows and columns
beyond the result are not written. Elements beyond K are set to 0 in both operands, as 0 * NaN is NaN.

**On TPU7x.** About 500 cycles of a step are not compute: the loop over the grid, and filling and draining the MXUs. If
a block is summed in several steps, each reads and writes it in VMEM, in instruction slots that the MXUs' results need.
So k is K up to 8192, and m and n are as large as then fits. Shares of the MXU limit for 8192^3, predicted from the
compiled schedule (libtpu 0.0.50.1; the defaults, 96.8% and 96.7%, are the same with 0.0.42.1):

    tiles m, n, k          bf16    fp8
    1024,  512, 8192      96.8%  94.8%
    1024, 1024, 8192          -  96.7%    in bf16, 68 MiB of VMEM
    1024, 1024, 1024      87.4%  78.3%

At the limit a 256^3 tile takes 64 cycles in bf16 and 32 in FP8. FP8 operands (float8_e4m3fn, float8_e5m2, in any pair)
enter the MXUs without a conversion.

**Left out.** FP8 scales, gradients, and sums wider than float32 (the MXU has no other). Training calls XLA's own
matmul, which fuses the operations around it.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import command
from compiled import bundles
from hardware import CHIPS, MiB
from tuned import VMEM_BYTES

FP8 = ("float8_e4m3fn", "float8_e5m2")
TILES = {2: (1024, 512, 8192), 1: (1024, 1024, 8192)}  # m, n, k by bytes per element: the best that were compiled


def matmul(
    lhs_MK: jax.Array,
    rhs_KN: jax.Array,
    *,
    tiles: tuple[int, int, int] | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    interpret: bool = False,
) -> jax.Array:
    """lhs_MK @ rhs_KN, summed in float32: [M, K], [K, N] -> [M, N]. Code of one device, without a gradient.

    Args:
      lhs_MK, rhs_KN: both in bfloat16, or both in an FP8 dtype (float8_e4m3fn, float8_e5m2).
      tiles: m, n, k of a block, reduced to the size of the array. Default: TILES, with K in equal parts.
      dtype: the dtype of the result.
      interpret: True simulates the kernel on CPU, slowly.

    Raises:
      ValueError: shapes do not match, the kernel cannot take a dtype or a tile, or the blocks do not fit in VMEM.
    """
    (M, K), (N, m, n, k) = lhs_MK.shape, _checked(lhs_MK, rhs_KN, tiles, dtype)
    steps = pl.cdiv(K, k)
    return pl.pallas_call(
        partial(_kernel, left=K % k),
        out_shape=jax.ShapeDtypeStruct((M, N), dtype),
        grid=(pl.cdiv(M, m), pl.cdiv(N, n), steps),
        in_specs=[
            pl.BlockSpec((m, k), lambda row, column, step: (row, step)),
            pl.BlockSpec((k, n), lambda row, column, step: (step, column)),
        ],
        out_specs=pl.BlockSpec((m, n), lambda row, column, step: (row, column)),
        scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)] if steps > 1 else [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),  # steps along K depend on each other
            vmem_limit_bytes=VMEM_BYTES + 3 * MiB,
        ),
        interpret=interpret,
        name="dense",
    )(lhs_MK, rhs_KN)


def _kernel(lhs_mk, rhs_kn, out_mn, *sum_mn, left):
    """One step. `left`: the columns of lhs and rows of rhs that the last step along K has, or 0 if it has all k."""
    step, last = pl.program_id(2), pl.num_programs(2) - 1
    if not sum_mn:
        out_mn[...] = _product(lhs_mk[...], rhs_kn[...]).astype(out_mn.dtype)
        return
    (sum_mn,) = sum_mn

    @pl.when(step == 0)
    def _():
        with jax.named_scope("begin"):
            sum_mn[...] = jnp.zeros_like(sum_mn)

    @pl.when((step < last) | (left == 0))
    def _():
        with jax.named_scope("add"):
            sum_mn[...] += _product(lhs_mk[...], rhs_kn[...])

    @pl.when((step == last) & (left > 0))
    def _():
        with jax.named_scope("add remainder"):
            sum_mn[...] += _product(_masked(lhs_mk[...], left, axis=1), _masked(rhs_kn[...], left, axis=0))

    @pl.when(step == last)
    def _():
        with jax.named_scope("end"):
            out_mn[...] = sum_mn[...].astype(out_mn.dtype)


def _product(lhs_mk, rhs_kn):
    return jnp.dot(lhs_mk, rhs_kn, preferred_element_type=jnp.float32)


def _masked(block, left, axis):
    return jnp.where(lax.broadcasted_iota(jnp.int32, block.shape, axis) < left, block, jnp.zeros_like(block))


def _checked(lhs_MK, rhs_KN, tiles, dtype) -> tuple[int, int, int, int]:
    """Checks the operands and returns N and the tiles m, n, k."""
    (M, K), (also_K, N) = lhs_MK.shape, rhs_KN.shape
    if K != also_K or 0 in (M, K, N):
        raise ValueError(f"{lhs_MK.shape} @ {rhs_KN.shape}: K must be the same in both, and no dim 0")
    dtypes = {lhs_MK.dtype.name, rhs_KN.dtype.name}
    if dtypes != {"bfloat16"} and not dtypes <= {*FP8}:
        raise ValueError(f"operands are both bfloat16, or both of {', '.join(FP8)}, not {' and '.join(sorted(dtypes))}")
    size = lhs_MK.dtype.itemsize
    if tiles is None:
        m, n, k = TILES[size]
        tiles = m, n, 128 * pl.cdiv(K, 128 * pl.cdiv(K, k))
    m, n, k = (min(tile, dim) for tile, dim in zip(tiles, (M, N, K), strict=True))
    for name, tile, dim, unit in (("m", m, M, 32 // size), ("n", n, N, 128), ("k", k, K, 128)):
        if tile < 1 or (tile < dim and tile % unit):
            raise ValueError(f"tile {name}={tile} of a dim of {dim}: not a multiple of {unit}, the size of a register")
    used = 2 * (m * k + k * n) * size + 2 * m * n * jnp.dtype(dtype).itemsize + (4 * m * n if k < K else 0)
    if used > VMEM_BYTES:
        raise ValueError(f"tiles {m}, {n}, {k} take {used:,} bytes of VMEM, of {VMEM_BYTES:,}: take a smaller k")
    return N, m, n, k


# -- how near the limit it runs


def build(M=8192, K=8192, N=8192, lhs="bfloat16", rhs=None, tiles=None):
    """Returns `matmul` and the shapes of its operands, for `compiled/bundles.py`."""
    shapes = [jax.ShapeDtypeStruct((M, K), lhs), jax.ShapeDtypeStruct((K, N), rhs or lhs)]
    return partial(matmul, tiles=tiles and tuple(tiles)), shapes


def mxu_cycles(M: int, K: int, N: int, dtype: str) -> float:
    """The least number of cycles on one TensorCore of a TPU7x."""
    chip = CHIPS["tpu7x"]
    bf16_flops = chip.mxus_per_core * chip.mxu_size**2 * chip.mxu_rows_per_cycle * 2
    return 2 * M * K * N / (bf16_flops * (2 if dtype in FP8 else 1))


def cycles(report: bundles.Report, tiles: tuple[int, int, int], M: int, K: int, N: int) -> bundles.Cycles:
    """The cycles of a compiled kernel of `build`, from how often each branch of it is executed."""
    rows, columns, steps = report.kernel().grid
    blocks = rows * columns
    executions = {"begin": blocks, "end": blocks} if steps > 1 else {}
    if steps > 1 and K % tiles[2]:
        executions |= {"add": blocks * (steps - 1), "add remainder": blocks}
    return report.cycles(executions)


def demonstrate(size: tuple[int, int, int], tiles: tuple[int, int, int] | None) -> list[str]:
    """How near the compiled kernel is to the MXU limit, in bfloat16 and FP8, as lines of text."""
    M, K, N = size
    options = {"M": M, "K": K, "N": N} | ({"tiles": tiles} if tiles else {})
    dtypes = ("bfloat16", "float8_e4m3fn")
    lines = [f"dense {M} x {K} x {N} on one TensorCore of a TPU7x"]
    reports = bundles.measure_many([("dense:build", options | {"lhs": dtype}) for dtype in dtypes])
    for dtype, report in zip(dtypes, reports, strict=True):
        if report.error:
            lines.append(f"  {dtype:14} refused: {report.error}")
            continue
        shapes = [jax.ShapeDtypeStruct((M, K), dtype), jax.ShapeDtypeStruct((K, N), dtype)]
        _, m, n, k = _checked(*shapes, tiles, jnp.bfloat16)
        call, least = cycles(report, (m, n, k), M, K, N), mxu_cycles(M, K, N, dtype)
        lines.append(
            f"  {dtype:14} tiles {m}, {n}, {k}: {call.total:,.0f} cycles (predicted from the compiled schedule), "
            f"{least / call.total:.1%} of the MXU limit; HBM busy for {call.hbm / call.total:.0%}"
        )
    return lines


def small_case() -> str:
    """Runs a matmul with edges on CPU and returns its error as text."""
    draw = np.random.default_rng(0).standard_normal
    lhs_MK, rhs_KN = (jnp.asarray(draw(shape), jnp.bfloat16) for shape in [(300, 200), (200, 150)])
    out_MN = matmul(lhs_MK, rhs_KN, tiles=(128, 128, 128), dtype=jnp.float32, interpret=True)
    error = np.abs(out_MN - np.asarray(lhs_MK, np.float64) @ np.asarray(rhs_KN, np.float64)).max()
    return (
        f"300 x 200 x 150 in blocks of 128, interpreted on CPU: differs from float64 by {error:.1e} at most (measured)"
    )


def _three(text: str) -> tuple[int, int, int]:
    sizes = tuple(map(command.at_least(1), text.split(",")))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text} is not three numbers")
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__file__)
    parser.add_argument("--size", type=_three, default=(8192, 8192, 8192), metavar="M,K,N", help="[8192,8192,8192]")
    parser.add_argument("--tiles", type=_three, metavar="m,n,k", help="size of a block [by dtype]")
    args = command.arguments(parser, argv)
    if importlib.util.find_spec("libtpu"):
        print("\n".join(demonstrate(args.size, args.tiles)))
    else:
        print('how near the limit it is takes libtpu: pip install -e ".[tpu]"', small_case(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
