"""Groups of rows as tiles: where a grouped matmul splits its rows, how large tiles are, and what they cost.

**Idea.** A router's groups of rows begin and end anywhere, and where is known only at run time. With a fixed grid of
tiles (as in `megablox`, which comes with JAX) a tile with rows of two groups is computed twice, and masked. With 1024
rows a group, a grid of 512 rows does 1.44 times the work and one of 128 rows 1.11 times, but a matmul of so few rows
keeps the matrix units busy only 0.92 of the time. So here each group has tiles of its own:

    group 0          group 1                  group 2          rows; a register holds 8, 16 or 32 of them
    |---------------|------------------------|--------|
    [ tile ][ tile ]
                  [  tile   ][  tile   ]                       a tile begins at the register of its group's first row
                                        [ tile  ]              and has one of the compiled heights (`heights`)

A group has as few tiles as possible, nearly equal in height. `plan_of` computes the list of tiles in jnp, outside of
the kernels of gmm.py that loop over it. The list is as long as it can get (`most_tiles`), and has a count.

**Layout.** `gmm_buffers` and `tgmm_buffers` list all that a kernel holds in VMEM. The kernels allocate these lists, and
`vmem_bytes` counts them, so both agree. The rules `default_tiles` and `default_tgmm_tiles` are fitted to compiled
cycles; tuned.py holds the tiles that a search found for a shape.

A dim that is a multiple of 128 is split into parts that divide it. If these are so narrow that reading takes longer
than multiplying (`slowdown`), the parts overlap instead. 14,464 columns are 113 times 128: 6 parts of 2,560 are 6% more
columns, while HBM would feed 113 parts of 128 in 2.9 times the time. Where two parts overlap, both compute and write
the same values. Other numbers of columns of `gmm` are split into parts of a multiple of 128 and a wider last part,
2,880 of gpt-oss into 1,408 and 1,472: a DMA may end with a dim, but not elsewhere within a register.

compiled/grid.py counts what is executed and moved for given group sizes, to rank tiles.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

from tuned import VMEM_BYTES

if TYPE_CHECKING:  # predictions import this module without jax
    import jax

# bf16 FLOP/s of a TPU7x chip over its HBM's bytes/s (hardware.py); FP8 has twice the FLOPs for half the bytes.
FLOPS_A_BYTE = 312.6
MXU = 256  # rows and columns of a matrix unit, of which a core has two
LARGEST_SUM = 2048 * 1536  # elements of a tgmm tile: enough to hide latency; the code grows with it
SPILL_BYTES = 2 * 2**20  # at most 0.5 MiB in the kernels compiled so far
WORTH_AN_OVERLAP = 1.2  # a `slowdown` below this does not justify overlapping parts
LEAST_ROWS = MXU // 2  # with fewer, loading the stationary operand into the matrix units takes longer than the matmul


class Tiles(NamedTuple):
    """Tiles of gmm: out[rows, cols] = lhs[rows, K] . rhs[K, cols]. K is never split."""

    rows: int  # the most rows of a tile; a multiple of step
    cols: int  # one of columns(N)
    step: int = 32  # heights are multiples of it; a multiple of a register's rows


class TgmmTiles(NamedTuple):
    """Tiles of tgmm: out[k, n] += lhs[rows, k]^T . dout[rows, n]."""

    rows: int  # the most rows of a tile; a multiple of 256, over which the matrix units sum at once
    k: int  # one of widths(K)
    n: int  # one of widths(N)
    outs: int = 2  # buffers for results in VMEM; with 1, a tile waits until the last result is written
    buffers: int = 2  # for tiles of lhs and dout; with 3, a tile is requested two tiles ahead


class Variant(NamedTuple):
    """The variant of gmm's kernel, as flags."""

    transpose_rhs: bool = False
    lhs_scale: bool = False  # a scale for each row
    rhs_scale: bool = False  # any other scale
    gated: bool = False  # one lhs, two rhs, three results
    bias: bool = False  # a row for each rhs, which is added to its product
    summed: bool = False  # two lhs, two rhs, one result
    gradient: bool = False  # two results: the gradients of what an activation takes; it has a factor for each row

    def operands(self) -> tuple[int, int, int]:
        """The numbers of lhs, rhs and results."""
        return (1, 2, 3) if self.gated else (2, 2, 1) if self.summed else (1, 1, 2) if self.gradient else (1, 1, 1)


PLAIN = Variant()


# -- tiles


def cdiv(a, b):
    """a / b rounded up, for ints and arrays."""
    return -(-a // b)


def heights(tiles: Tiles | TgmmTiles) -> list[int]:
    """The compiled heights of a tile. For gmm, fewer below half of `rows`, which only small groups use."""
    if isinstance(tiles, TgmmTiles):
        return list(range(MXU, tiles.rows + 1, MXU))
    half = cdiv(tiles.rows // 2, tiles.step) * tiles.step
    return [*range(min(LEAST_ROWS, half), half, 2 * tiles.step), *range(half, tiles.rows + 1, tiles.step)]


def register_rows(*dtypes) -> int:
    """The rows of a register (8 x 128 x 4 bytes) of the narrowest type. A DMA starts and ends at multiples of them."""
    return 32 // min(np.dtype(dtype).itemsize for dtype in dtypes)


def result_dtype(dtype):
    """The default result dtype of a grouped matmul: the operands' dtype, bfloat16 for FP8."""
    return np.dtype(ml_dtypes.bfloat16 if np.dtype(dtype).itemsize == 1 else dtype)


def _padded_bytes(shape: Sequence[int], dtype) -> int:
    """The bytes of an array in VMEM, whose last two dims are padded to registers (a single row to one row of them)."""
    *outer, rows, cols = shape
    unit = 1 if rows == 1 else register_rows(dtype)
    return int(np.prod(outer)) * cdiv(rows, unit) * unit * cdiv(cols, 128) * 128 * np.dtype(dtype).itemsize


def gmm_buffers(tiles: Tiles, K, N, dtype, out_dtype, variant: Variant = PLAIN, rhs_dtype=None):
    """The shapes and types of the buffers of `_gmm_kernel`. Those that DMAs fill or empty are double."""
    unit, cols = register_rows(dtype, out_dtype), tiles.cols
    inputs, matrices, results = variant.operands()
    gradient, in_fp8 = variant.gradient, np.dtype(dtype).itemsize == 1
    largest = (2 if gradient else 1 if variant.gated else 0) * in_fp8  # results whose largest elements are found
    return dict(
        lhs=((2, inputs, tiles.rows, K), dtype),
        rhs=((2, matrices, cols, K) if variant.transpose_rhs else (2, matrices, K, cols), rhs_dtype or dtype),
        lhs_scale=((2, tiles.rows, 1), np.float32) if variant.lhs_scale else None,
        rhs_scale=((2, matrices, 1, cols), np.float32) if variant.rhs_scale else None,
        bias=((2, matrices, 1, cols), np.float32) if variant.bias else None,
        out=((2, results, tiles.rows, cols), out_dtype),
        shared=((results, unit, cols), out_dtype),
        zeros=((unit, N), out_dtype),
        products=((2, 2, tiles.rows, cols), out_dtype) if gradient else None,
        factors=((2, tiles.rows, 1), np.float32) if gradient or variant.gated else None,
        product=((2, tiles.rows, MXU), np.float32) if gradient else None,
        folded=((tiles.rows, 128), np.float32) if gradient else None,
        sums=((2, 1, tiles.rows, 1), np.float32) if gradient else None,
        shared_sums=((1, unit, 1), np.float32) if gradient else None,
        largest=((largest, unit, 128), out_dtype) if largest else None,
    )


def tgmm_buffers(tiles: TgmmTiles, K, N, dtype, out_dtype, dout_dtype=None, scale=False):
    """The shapes and types of the buffers of `_tgmm_kernel`."""
    unit = register_rows(out_dtype)
    return dict(
        lhs=((tiles.buffers, tiles.rows, tiles.k), dtype),
        dout=((tiles.buffers, tiles.rows, tiles.n), dout_dtype or dtype),
        scale=((tiles.buffers, 1, tiles.n), np.float32) if scale else None,
        sum=((tiles.k, tiles.n), np.float32),
        out=((tiles.outs, tiles.k, tiles.n), out_dtype),
        zeros=((K if K % unit else unit, N), out_dtype),
    )


def vmem_bytes(tiles: Tiles, K, N, dtype, out_dtype, variant: Variant = PLAIN) -> int:
    """The most VMEM that `gmm` takes, with SPILL_BYTES for registers that the compiler spills."""
    buffers = gmm_buffers(tiles, K, N, dtype, out_dtype, variant)
    if variant.summed and variant.rhs_scale:  # products with scales of their own are not added in the matrix units
        buffers["product"] = (tiles.rows, tiles.cols), np.float32
    return _bytes_of(buffers)


def tgmm_vmem_bytes(tiles: TgmmTiles, K, N, dtype, out_dtype, scale: bool = False) -> int:
    """The most VMEM that `tgmm` takes."""
    return _bytes_of(tgmm_buffers(tiles, K, N, dtype, out_dtype, scale=scale))


def _bytes_of(buffers):
    return sum(_padded_bytes(*buffer) for buffer in buffers.values() if buffer) + SPILL_BYTES


def widths(size: int) -> list[int]:
    """Returns the possible widths of the parts of a dim: divisors that are multiples of 128, and multiples of MXU.

    For each number of parts there is one such multiple of MXU; the last part then overlaps the one before. A dim that
    is not a multiple of 128 is not split.
    """
    if size % 128:
        return [size]
    dividing = {width for width in range(128, size + 1, 128) if size % width == 0}
    overlapping = {MXU * cdiv(size, MXU * count) for count in range(2, size // MXU + 1)}
    return sorted(dividing | overlapping, reverse=True)


def columns(N: int) -> list[int]:
    """Returns the possible `cols` of Tiles: widths(N), and if 128 does not divide N, widths of a last, widest part."""
    if N % 128 == 0:
        return widths(N)
    lasts = [N - (count - 1) * (N // 128 // count * 128) for count in range(2, N // MXU + 1)]
    return [N, *(last for count, last in enumerate(lasts, 2) if cdiv(N, last) == count)]


def other_columns(cols: int, N: int) -> int:
    """The columns of each part of N but the last, which has `cols`."""
    return (N - cols) // (cdiv(N, cols) - 1) if N % 128 and cols < N else cols


def slowdown(tiles: Tiles | TgmmTiles, K: int, N: int) -> float:
    """Returns the time of a call over that of the matrix units alone on dims without overlap.

    A tile of r rows and c columns has r c / (r + c) FLOPs for each byte that it reads from HBM, for every type.
    """
    full = lambda width: cdiv(width, MXU) * MXU
    overlap = lambda width, size: cdiv(size, width) * full(width) / full(size)
    if isinstance(tiles, TgmmTiles):
        height, width, computed = tiles.k, tiles.n, overlap(tiles.k, K) * overlap(tiles.n, N)
    else:
        height, width, computed = tiles.rows, tiles.cols, overlap(tiles.cols, N)
    return max(1.0, FLOPS_A_BYTE * (1 / height + 1 / width)) * computed


def default_tiles(M: int, K: int, N: int, E: int, dtype, out_dtype=None, variant: Variant = PLAIN) -> Tiles:
    """The largest tile of out with up to 640 rows that fits in VMEM; among equals, the widest.

    Parts of N overlap only if those that divide it are so narrow that the matrix units wait for HBM.
    """
    out_dtype = out_dtype or result_dtype(dtype)
    step = max(32, register_rows(dtype, out_dtype))
    most = min(640, cdiv(M, step) * step)
    rows = [most] + [rows for rows in (512, 384, 256, 128, 64, 32) if rows < most]
    fitting = [
        tiles
        for tiles in (Tiles(r, c, step) for r in rows for c in columns(N))
        if vmem_bytes(tiles, K, N, dtype, out_dtype, variant) <= VMEM_BYTES
    ]
    if not fitting:
        check_tiles(Tiles(min(rows), min(columns(N)), step), K, N, dtype, out_dtype, variant)  # raises
    return max(
        fitting, key=lambda t: (-max(slowdown(t, K, N), WORTH_AN_OVERLAP), N % t.cols == 0, t.rows * t.cols, t.cols)
    )


def default_tgmm_tiles(M: int, K: int, N: int, E: int, dtype, out_dtype=None, scale: bool = False) -> TgmmTiles:
    """Up to 1024 rows, and a tile of out of at least LARGEST_SUM if VMEM has space, nearly square as this reads least.

    Parts of K and N overlap as those of `default_tiles` do. VMEM that is left holds a third buffer of rows, as a full
    tile has little time to arrive after a short one.
    """
    out_dtype = out_dtype or result_dtype(dtype)
    rows = range(MXU, min(1024, cdiv(M, MXU) * MXU) + 1, MXU)
    sizes = [(k, n) for k in widths(K) for n in widths(N)]
    tiles = [TgmmTiles(r, k, n, outs) for r in rows for k, n in sizes for outs in (2, 1)]
    worth = lambda t: (-max(slowdown(t, K, N), WORTH_AN_OVERLAP), K % t.k == N % t.n == 0)
    size = lambda t: (*worth(t), t.outs, min(t.rows * t.k * t.n, LARGEST_SUM * max(rows)), t.rows, -t.k - t.n)
    fitting = [t for t in tiles if tgmm_vmem_bytes(t, K, N, dtype, out_dtype, scale) <= VMEM_BYTES]
    if not fitting:
        check_tgmm_tiles(TgmmTiles(MXU, min(widths(K)), min(widths(N)), 1), K, N, dtype, out_dtype, scale)
    best = max(fitting, key=size)
    deeper = best._replace(buffers=3)
    return deeper if tgmm_vmem_bytes(deeper, K, N, dtype, out_dtype, scale) <= VMEM_BYTES else best


def check_tiles(tiles: Tiles, K, N, dtype, out_dtype, variant: Variant = PLAIN):
    """Raises ValueError if tiles are not multiples of what they must be, or take too much VMEM."""
    unit = register_rows(dtype, out_dtype)
    if tiles.cols not in columns(N):
        raise ValueError(f"{tiles}: cols must be N or, in parts of multiples of 128, of {N} one of {columns(N)}")
    if tiles.step % unit or tiles.rows % tiles.step or tiles.rows <= 0:
        raise ValueError(f"{tiles}: rows must be a multiple of step, and step of {unit}, the rows of a register")
    if (needed := vmem_bytes(tiles, K, N, dtype, out_dtype, variant)) > VMEM_BYTES:
        raise ValueError(
            f"{tiles} take {needed:,} bytes of VMEM with K={K}, more than the limit of {VMEM_BYTES:,}: "
            "take fewer rows or cols, or split K and add the results"
        )


def check_tgmm_tiles(tiles: TgmmTiles, K, N, dtype, out_dtype, scale: bool = False):
    """Raises ValueError as `check_tiles` does."""
    for name, width, size in (("k", tiles.k, K), ("n", tiles.n, N)):
        if width not in widths(size):
            raise ValueError(f"{tiles}: {name} must be {size} or, in parts of multiples of 128, one of {widths(size)}")
    if tiles.rows % MXU or tiles.rows <= 0:
        raise ValueError(f"{tiles}: rows must be a multiple of {MXU}, the rows of a matrix unit")
    if tiles.buffers < 2:
        raise ValueError(f"{tiles}: buffers must be at least 2, one to compute from and one to fill")
    if (needed := tgmm_vmem_bytes(tiles, K, N, dtype, out_dtype, scale)) > VMEM_BYTES:
        raise ValueError(
            f"{tiles} take {needed:,} bytes of VMEM, more than the limit of {VMEM_BYTES:,}: lower any of them"
            f"{_not_split(K=K, N=N)}"
        )


def _not_split(**dims: int) -> str:
    """Returns advice for dims that cannot be split."""
    odd = [f"{name}={size:,} to {cdiv(size, 128) * 128:,}" for name, size in dims.items() if size % 128]
    return f"; only multiples of 128 are split: pad {' and '.join(odd)}" if odd else ""


# -- the list of tiles


class Plan(NamedTuple):
    """The tiles in order, and the groups that are wanted and have rows. A block is as many rows as a register has.

    All are int32 [most tiles] or [groups], in SMEM, where the scalar unit reads them.
    """

    totals: "jax.Array"  # number of tiles, number of groups, first row, end of the last row
    tile_group: "jax.Array"  # the tile's group, an index among the groups with rows
    tile_block: "jax.Array"  # its first block; a group's first tile starts at the block with the group's first row
    tile_blocks: "jax.Array"  # number of its blocks, all of which hold rows of the group
    tile_write: "jax.Array"  # number of blocks to write: the last one is left out if the next group has rows in it
    tile_height: "jax.Array"  # the height in which it is computed, an index in `heights`
    group_expert: "jax.Array"
    group_start: "jax.Array"  # first row
    group_end: "jax.Array"


def most_tiles(num_rows: int, num_groups: int, unit: int, rows: int) -> int:
    """The most tiles for any group sizes: a group has one tile that may be small, and shares a block at either end."""
    return (num_rows + 2 * unit * num_groups) // rows + num_groups


def plan_of(group_sizes, offset, num_groups: int, num_rows: int, unit: int, step: int, tiles) -> Plan:
    """Splits each group into as few tiles as possible, of equal height except for the last, which has the remainder.

    Args:
      group_sizes: [E]. Groups [offset, offset + num_groups) are wanted.
      unit: rows of a block.
      step: heights of tiles are multiples of it, except for the last tile of a group.
    """
    import jax.numpy as jnp  # here, so that predictions need no jax
    from jax import lax

    per_tile, per_step = tiles.rows // unit, step // unit
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), num_rows)
    wanted = partial(lax.dynamic_slice, start_indices=(offset,), slice_sizes=(num_groups,))
    ends, starts = wanted(ends), wanted(jnp.concatenate([jnp.zeros_like(ends, shape=1), ends[:-1]]))
    some = ends > starts
    expert = jnp.argsort(~some, stable=True)  # groups without rows are last
    ordinal = jnp.cumsum(some, dtype=jnp.int32) - 1
    groups = ordinal[-1] + 1

    first = starts // unit
    blocks = jnp.where(some, cdiv(ends, unit) - first, 0)
    count = cdiv(blocks, per_tile)  # tiles of each group
    height = cdiv(cdiv(blocks, jnp.maximum(count, 1)), per_step) * per_step
    before = jnp.cumsum(count) - count

    t = jnp.arange(most_tiles(num_rows, num_groups, unit, tiles.rows), dtype=jnp.int32)
    g = jnp.minimum(jnp.searchsorted(before + count, t, side="right"), num_groups - 1)
    nth = t - before[g]
    block = first[g] + nth * height[g]
    size = jnp.minimum(height[g], first[g] + blocks[g] - block)
    is_shared = (nth == count[g] - 1) & (ends[g] % unit > 0) & (ordinal[g] < groups - 1)
    bucket = jnp.searchsorted(jnp.asarray(heights(tiles)), size * unit)

    begin = jnp.min(jnp.where(some, starts, num_rows))
    end = jnp.max(jnp.where(some, ends, 0))
    totals = jnp.stack([jnp.sum(count), groups, jnp.minimum(begin, end), end])
    plan = Plan(totals, ordinal[g], block, size, size - is_shared, bucket, expert, starts[expert], ends[expert])
    return Plan(*(array.astype(jnp.int32) for array in plan))
