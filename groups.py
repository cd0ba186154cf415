"""Groups of rows as tiles: where a grouped matmul cuts them, how large tiles are, and what they cost.

**Idea.** A router's groups begin and end anywhere, and where is known only when the program runs. On a fixed grid of
tiles (as in `megablox`, which comes with JAX) a tile with rows of two groups is computed twice, and masked: with 1024
rows a group, a grid of 512 rows does 1.44 times the work, one of 128 rows 1.11 times, but a matmul of so few rows keeps
the matrix units busy 0.92 of the time only. So each group has tiles of its own:

    group 0          group 1                  group 2          rows, of which a register holds 8, 16 or 32
    |---------------|------------------------|--------|
    [ tile ][ tile ]
                  [  tile   ][  tile   ]                       a tile begins at the register of its group's first row
                                        [ tile  ]              and is as high as there is code for (`heights`)

A group has the fewest tiles, nearly equal in height. The list (`plan_of`) is made of jnp, beside the kernels of gmm.py
that walk through it; it is as long as there can be tiles (`most_tiles`), and says how many of them there are.

**Sizes.** All that a kernel holds in VMEM is a list of buffers, the kernel's own (`gmm_buffers`, `tgmm_buffers`), so
that what they take is counted from what they are. The rules (`default_tiles`, `default_tgmm_tiles`) were found by
compiled cycles; tuned.py has what a search found for a shape.

A dim that is a multiple of 128 is cut into parts that divide it. Where these would be so narrow that reading takes
longer than multiplying (`slowdown`), its parts overlap: 14,464 columns, 113 times 128, are 6 of 2,560, 6% more, and not
113 of 128, which HBM would feed in 2.9 times the time. What two parts share both compute, and both write, alike.

**Cost.** For group sizes that are given, as to rank tiles: how often each part of a compiled kernel is executed
(`executions`, for bundles.py), and what passes between HBM and VMEM (`moved_bytes`).
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

from tuned import VMEM_BYTES

if TYPE_CHECKING:  # predictions take sizes of tiles from here, and need no jax
    import jax

# bf16 FLOP/s of a TPU7x chip over its HBM's bytes/s (hardware.py); FP8 has twice the FLOPs for half the bytes.
FLOPS_A_BYTE = 312.6
MXU = 256  # rows and columns of a matrix unit, of which a core has two
LARGEST_SUM = 2048 * 1536  # elements of a result of tgmm, added up at once: enough to hide latency; code grows with it
SPILL_BYTES = 2 * 2**20  # at most 0.5 MiB in the kernels compiled so far
WORTH_AN_OVERLAP = 1.2  # of `slowdown`: parts that divide a dim and cost less are as good as any
LEAST_ROWS = MXU // 2  # below, a matmul takes as long as bringing its stationary operand into the matrix units


class Tiles(NamedTuple):
    """Of gmm: out[rows, cols] = lhs[rows, K] . rhs[K, cols]. K is never cut."""

    rows: int  # of a tile at most; a multiple of step
    cols: int  # one of widths(N)
    step: int = 32  # there is code for heights that are multiples of it; a multiple of a register's rows


class TgmmTiles(NamedTuple):
    """Of tgmm: out[k, n] += lhs[rows, k]^T . dout[rows, n]."""

    rows: int  # of a tile at most; a multiple of 256, in which the sum runs through the matrix units
    k: int  # one of widths(K)
    n: int  # one of widths(N)
    outs: int = 2  # results in VMEM: 2, or 1, which waits for the last one to be written


class Variant(NamedTuple):
    """What gmm's kernel is compiled for, beside shapes and types. All are flags."""

    transpose_rhs: bool = False
    lhs_scale: bool = False  # one for each row
    rhs_scale: bool = False  # any other scale
    gated: bool = False  # one lhs, two rhs, three results
    summed: bool = False  # two lhs, two rhs, one result

    def operands(self) -> tuple[int, int, int]:
        """The numbers of lhs, of rhs and of results."""
        return (1, 2, 3) if self.gated else (2, 2, 1) if self.summed else (1, 1, 1)


PLAIN = Variant()


# -- tiles


def cdiv(a, b):
    """a / b, rounded up: of ints and of arrays."""
    return -(-a // b)


def heights(tiles: Tiles | TgmmTiles) -> list[int]:
    """Heights of a tile that there is code for. Of gmm, fewer below half of rows, where only small groups need them."""
    if isinstance(tiles, TgmmTiles):
        return list(range(MXU, tiles.rows + 1, MXU))
    half = cdiv(tiles.rows // 2, tiles.step) * tiles.step
    return [*range(min(LEAST_ROWS, half), half, 2 * tiles.step), *range(half, tiles.rows + 1, tiles.step)]


def register_rows(*dtypes) -> int:
    """Rows of a register (8 x 128 x 4 bytes) of the narrowest type: a DMA starts and ends at multiples of them."""
    return 32 // min(np.dtype(dtype).itemsize for dtype in dtypes)


def result_dtype(dtype):
    """Of a grouped matmul, where nothing else is asked: that of its operands, of 8 bits bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if np.dtype(dtype).itemsize == 1 else dtype)


def _padded_bytes(shape: Sequence[int], dtype) -> int:
    """Of an array in VMEM, whose last two dims are whole registers (a single row takes but one row of them)."""
    *outer, rows, cols = shape
    unit = 1 if rows == 1 else register_rows(dtype)
    return int(np.prod(outer)) * cdiv(rows, unit) * unit * cdiv(cols, 128) * 128 * np.dtype(dtype).itemsize


def gmm_buffers(tiles: Tiles, K, N, dtype, out_dtype, variant: Variant = PLAIN, rhs_dtype=None):
    """Shapes and types of what `_gmm_kernel` holds in VMEM. Two of what moves while there is work on the other."""
    unit, cols = register_rows(dtype, out_dtype), tiles.cols
    inputs, matrices, results = variant.operands()
    return dict(
        lhs=((2, inputs, tiles.rows, K), dtype),
        rhs=((2, matrices, cols, K) if variant.transpose_rhs else (2, matrices, K, cols), rhs_dtype or dtype),
        lhs_scale=((2, tiles.rows, 1), np.float32) if variant.lhs_scale else None,
        rhs_scale=((2, matrices, 1, cols), np.float32) if variant.rhs_scale else None,
        out=((2, results, tiles.rows, cols), out_dtype),
        shared=((results, unit, cols), out_dtype),
        zeros=((unit, N), out_dtype),
    )


def tgmm_buffers(tiles: TgmmTiles, K, N, dtype, out_dtype, dout_dtype=None, scale=False):
    unit = register_rows(out_dtype)
    return dict(
        lhs=((2, tiles.rows, tiles.k), dtype),
        dout=((2, tiles.rows, tiles.n), dout_dtype or dtype),
        scale=((2, 1, tiles.n), np.float32) if scale else None,
        sum=((tiles.k, tiles.n), np.float32),
        out=((tiles.outs, tiles.k, tiles.n), out_dtype),
        zeros=((K if K % unit else unit, N), out_dtype),
    )


def vmem_bytes(tiles: Tiles, K, N, dtype, out_dtype, variant: Variant = PLAIN) -> int:
    """That `gmm` takes at most: with SPILL_BYTES for registers that the compiler stores for a while."""
    buffers = gmm_buffers(tiles, K, N, dtype, out_dtype, variant)
    if variant.summed and variant.rhs_scale:  # what has scales of its own is not added in the matrix units
        buffers["product"] = (tiles.rows, tiles.cols), np.float32
    return _bytes_of(buffers)


def tgmm_vmem_bytes(tiles: TgmmTiles, K, N, dtype, out_dtype, scale: bool = False) -> int:
    """Likewise of `tgmm`."""
    return _bytes_of(tgmm_buffers(tiles, K, N, dtype, out_dtype, scale=scale))


def _bytes_of(buffers):
    return sum(_padded_bytes(*buffer) for buffer in buffers.values() if buffer) + SPILL_BYTES


def widths(size: int) -> list[int]:
    """Returns how wide the parts of a dim can be: all of it, or multiples of 128 that divide it, or of MXU that do not.

    Of the latter one for each number of parts, of which the last overlaps the one before. A dim that is no multiple of
    128 is not cut.
    """
    if size % 128:
        return [size]
    dividing = {width for width in range(128, size + 1, 128) if size % width == 0}
    overlapping = {MXU * cdiv(size, MXU * count) for count in range(2, size // MXU + 1)}
    return sorted(dividing | overlapping, reverse=True)


def slowdown(tiles: Tiles | TgmmTiles, K: int, N: int) -> float:
    """Returns the time of a call over that of the matrix units alone, if the dims were whole.

    A tile of r rows and c columns multiplies r c / (r + c) FLOPs for each byte that HBM brings it, of any type.
    """
    full = lambda width: cdiv(width, MXU) * MXU
    overlap = lambda width, size: cdiv(size, width) * full(width) / full(size)
    if isinstance(tiles, TgmmTiles):
        height, width, computed = tiles.k, tiles.n, overlap(tiles.k, K) * overlap(tiles.n, N)
    else:
        height, width, computed = tiles.rows, tiles.cols, overlap(tiles.cols, N)
    return max(1.0, FLOPS_A_BYTE * (1 / height + 1 / width)) * computed


def default_tiles(M: int, K: int, N: int, E: int, dtype, out_dtype=None, variant: Variant = PLAIN) -> Tiles:
    """The largest tile of out with up to 640 rows that fits in VMEM; of equals, the widest.

    Parts of N overlap only where those that divide it are so narrow that HBM keeps the matrix units waiting.
    """
    out_dtype = out_dtype or result_dtype(dtype)
    step = max(32, register_rows(dtype, out_dtype))
    most = min(640, cdiv(M, step) * step)
    rows = [most] + [rows for rows in (512, 384, 256, 128, 64, 32) if rows < most]
    fitting = [
        tiles
        for tiles in (Tiles(r, c, step) for r in rows for c in widths(N))
        if vmem_bytes(tiles, K, N, dtype, out_dtype, variant) <= VMEM_BYTES
    ]
    if not fitting:
        check_tiles(Tiles(min(rows), min(widths(N)), step), K, N, dtype, out_dtype, variant)  # says why
    return max(
        fitting, key=lambda t: (-max(slowdown(t, K, N), WORTH_AN_OVERLAP), N % t.cols == 0, t.rows * t.cols, t.cols)
    )


def default_tgmm_tiles(M: int, K: int, N: int, E: int, dtype, out_dtype=None, scale: bool = False) -> TgmmTiles:
    """Up to 1024 rows, and a tile of out of at least LARGEST_SUM if VMEM has room, nearly square: it reads least.

    Parts of K and N overlap as those of `default_tiles`.
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
    return max(fitting, key=size)


def check_tiles(tiles: Tiles, K, N, dtype, out_dtype, variant: Variant = PLAIN):
    """Raises ValueError: tiles do not divide what they must, or take more VMEM than there is."""
    unit = register_rows(dtype, out_dtype)
    if tiles.cols not in widths(N):
        raise ValueError(f"{tiles}: cols must be N or, in parts of multiples of 128, of {N} one of {widths(N)}")
    if tiles.step % unit or tiles.rows % tiles.step or tiles.rows <= 0:
        raise ValueError(f"{tiles}: rows must be a multiple of step, and step of {unit}, the rows of a register")
    if (needed := vmem_bytes(tiles, K, N, dtype, out_dtype, variant)) > VMEM_BYTES:
        raise ValueError(
            f"{tiles} take {needed:,} bytes of VMEM with K={K}, more than the limit of {VMEM_BYTES:,}: "
            f"take fewer rows or cols, or cut K into parts and add their results{_not_cut(N=N)}"
        )


def check_tgmm_tiles(tiles: TgmmTiles, K, N, dtype, out_dtype, scale: bool = False):
    for name, width, size in (("k", tiles.k, K), ("n", tiles.n, N)):
        if width not in widths(size):
            raise ValueError(f"{tiles}: {name} must be {size} or, in parts of multiples of 128, one of {widths(size)}")
    if tiles.rows % MXU or tiles.rows <= 0:
        raise ValueError(f"{tiles}: rows must be a multiple of {MXU}, the rows of a matrix unit")
    if (needed := tgmm_vmem_bytes(tiles, K, N, dtype, out_dtype, scale)) > VMEM_BYTES:
        raise ValueError(
            f"{tiles} take {needed:,} bytes of VMEM, more than the limit of {VMEM_BYTES:,}: take less of any"
            f"{_not_cut(K=K, N=N)}"
        )


def _not_cut(**dims: int) -> str:
    """Returns the way out for dims that have but one width."""
    odd = [f"{name}={size:,} to {cdiv(size, 128) * 128:,}" for name, size in dims.items() if size % 128]
    return f"; only multiples of 128 are cut: pad {' and '.join(odd)}" if odd else ""


# -- which tile belongs to which group


class Plan(NamedTuple):
    """Of the tiles, one after the other, and of the groups that have rows and are wanted. A block: rows of a register.

    All int32 [tiles at most] or [groups], in SMEM, where the scalar unit reads them.
    """

    totals: "jax.Array"  # tiles, groups, first row, end of the last row
    tile_group: "jax.Array"  # which of the groups, in the order of those that have rows
    tile_block: (
        "jax.Array"  # where it starts: the first tile of a group with the block that holds the group's first row
    )
    tile_blocks: "jax.Array"  # its blocks that hold rows of the group
    tile_write: "jax.Array"  # of these, the ones to write: not the last one, if the next group has rows in it
    tile_height: "jax.Array"  # the height in which it is computed, an index in `heights`
    group_expert: "jax.Array"
    group_start: "jax.Array"  # row
    group_end: "jax.Array"


def most_tiles(num_rows: int, num_groups: int, unit: int, rows: int) -> int:
    """Of any group sizes: each group has one tile that may be small, and shares a block at either end."""
    return (num_rows + 2 * unit * num_groups) // rows + num_groups


def plan_of(group_sizes, offset, num_groups: int, num_rows: int, unit: int, step: int, tiles) -> Plan:
    """Cuts each group into the fewest tiles, of equal height but for the last one, which has what is left.

    Args:
      group_sizes: [E]. Groups [offset, offset + num_groups) are wanted.
      unit: rows of a block.
      step: heights of tiles are multiples of it, but for the last one of a group.
    """
    import jax.numpy as jnp  # here: see above
    from jax import lax

    per_tile, per_step = tiles.rows // unit, step // unit
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), num_rows)
    wanted = partial(lax.dynamic_slice, start_indices=(offset,), slice_sizes=(num_groups,))
    ends, starts = wanted(ends), wanted(jnp.concatenate([jnp.zeros_like(ends, shape=1), ends[:-1]]))
    some = ends > starts
    expert = jnp.argsort(~some, stable=True)  # those without rows last
    ordinal = jnp.cumsum(some, dtype=jnp.int32) - 1
    groups = ordinal[-1] + 1

    first = starts // unit
    blocks = jnp.where(some, cdiv(ends, unit) - first, 0)
    count = cdiv(blocks, per_tile)  # tiles of each
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
    found = Plan(totals, ordinal[g], block, size, size - is_shared, bucket, expert, starts[expert], ends[expert])
    return Plan(*(each.astype(jnp.int32) for each in found))


def tile_counts(group_sizes, num_rows: int, tiles, dtype, out_dtype=None, passes: int = 1) -> dict[str, int]:
    """{region: executions} in a call of the kernel for these group sizes: what `bundles.py` wants to know."""
    import jax  # here: see above
    import jax.numpy as jnp

    unit = register_rows(dtype, out_dtype or result_dtype(dtype))
    step = tiles.step if isinstance(tiles, Tiles) else tiles.rows
    shape = (0, len(group_sizes), num_rows, unit, step, tiles)
    plan = jax.jit(lambda sizes: plan_of(sizes, *shape))(jnp.asarray(group_sizes, jnp.int32))
    num_tiles, num_groups = int(plan.totals[0]), int(plan.totals[1])
    group, bucket = (np.asarray(x)[:num_tiles] for x in (plan.tile_group, plan.tile_height))
    is_last = np.diff(group, append=num_groups) > 0
    names = {"tile": num_tiles, "first of group": num_groups, "last of group": num_groups}
    if isinstance(tiles, TgmmTiles):
        names["add"] = int(np.sum(~is_last))
        for k, height in enumerate(heights(tiles)):
            names[f"finish {height}"] = int(np.sum(is_last & (bucket == k)))
    else:
        names |= {f"{height} rows": int(np.sum(bucket == k)) for k, height in enumerate(heights(tiles))}
    return {name: passes * count for name, count in names.items()}


def executions(kernel, group_sizes, num_rows: int, K: int, N: int, tiles, dtype, out_dtype=None) -> list[int]:
    """Of the regions of a compiled kernel (of bundles.py) that depend on the group sizes, for its `cycles`.

    Of a named region as counted; of a branch that leads to such, the sum of theirs; of any other one in the loop over
    tiles, the number of tiles.
    """
    passes = cdiv(K, tiles.k) * cdiv(N, tiles.n) if isinstance(tiles, TgmmTiles) else cdiv(N, tiles.cols)
    counts = tile_counts(group_sizes, num_rows, tiles, dtype, out_dtype, passes)
    loop = kernel.region("tile")

    def inside(region):
        return [each for child in region.children for each in (child, *inside(child))]

    def of(region):
        if known := [counts[name] for name in region.names if name in counts]:
            return known[0]
        named = [name for each in inside(region) for name in each.names if name in counts]
        if "tile" in named:
            return 1
        if named:
            return sum(counts[name] for name in named)
        return counts["tile"] if loop.first <= region.first <= loop.last else 0

    return [of(region) for region in kernel.unknown()]


def moved_bytes(
    group_sizes, num_rows: int, K: int, N: int, tiles, dtype, out_dtype=None, variant: Variant = PLAIN
) -> int:
    """Between HBM and VMEM, in a call of the kernel for these group sizes, without scales."""
    inputs, matrices, results = variant.operands()
    out_dtype = out_dtype or result_dtype(dtype)
    of_in, of_out = (np.dtype(each).itemsize for each in (dtype, out_dtype))
    sizes = np.asarray(group_sizes)
    unit = register_rows(dtype, out_dtype)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    rows = int(np.sum(np.where(sizes > 0, -(-ends // unit) - starts // unit, 0))) * unit
    if isinstance(tiles, TgmmTiles):
        across, down = cdiv(N, tiles.n), cdiv(K, tiles.k)
        computed_K, computed_N = down * tiles.k, across * tiles.n
        return rows * (computed_K * across + computed_N * down) * of_in + len(sizes) * computed_K * computed_N * of_out
    experts, passes = int(np.sum(sizes > 0)), cdiv(N, tiles.cols)
    computed_N = passes * tiles.cols
    read = inputs * rows * K * passes + matrices * experts * K * computed_N
    return read * of_in + results * num_rows * computed_N * of_out
