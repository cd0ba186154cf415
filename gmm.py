"""Grouped matmul: each expert of a mixture multiplies its own rows, however many they are (MegaBlocks).

**Idea** (Gale et al. 2022, "MegaBlocks", arXiv:2211.15841). A router sends tokens to experts, and how many each expert
gets is known only at run time. A fixed capacity for each expert pads those with fewer tokens and drops tokens of those
with more. Instead, sort the rows by expert and let *one* kernel loop over them. A list, computed outside of the kernel,
says which rows belong to which expert.

**Formula.**

    gmm               out[rows of e] = lhs[rows of e] . rhs[e]            -> [M, N]        forward, and dlhs
    gated_gmm         factors * f(gmm(lhs, gate), gmm(lhs, up))           -> [M, N]        f: silu(gate) * up
    summed_gmm        gmm(dgate, gate^T) + gmm(dup, up^T)                 -> [M, K]        its dlhs
    tgmm              out[e] = lhs[rows of e]^T . dout[rows of e]         -> [E, K, N]     drhs
    gated_gradients   the gradients of gate's and up's products and of the factors, from gmm(dout, down)

**The list** (groups.py, to be read first) is in SMEM (scalar prefetch), where the scalar unit reads row numbers, starts
DMAs from them and branches on them. A kernel is one loop over the tiles of these group sizes. The next tile and the
next expert's matrix are fetched while the current ones are multiplied.

**Group boundaries** cost rows of a register, not rows of a tile:

    own tiles     A tile has rows of one group and starts at the register of its first row. It is computed once.
    one writer    A register at a boundary has rows of two groups or more. Each group leaves its rows to the next group
                  in VMEM, and the last one writes the register. No row of out is read back or written twice, so no
                  write waits for another.
    all of K      Partial sums stay in the matrix units. VMEM limits K to about 20,000 in bf16.

Rows beyond the last group are zeros. In `gmm` and `tgmm` rhs may be one device's shard of the experts (`group_offset`).
Then rows of the others are zeros, too.

**tgmm** sums over rows, 256 at a time, the height of a matrix unit: 257 rows cost as much as 512. No schedule avoids
this, as a pass over rows of two experts only yields the sum of their products. So it takes at least
sum(ceil(R_e / 256)) * 256 / M times the ideal, about 1 + 128 * E/M: 1.125 with 1024 rows an expert. Rows of other
groups are zeroed in both operands, as 0 * NaN is NaN. A group's sum stays in VMEM in float32; its last tile rounds the
sum and writes it.

A group's last tile may have few rows, and then the next tile has little time to arrive. So tgmm requests tiles two
ahead, where VMEM has space for three. With one ahead it waited 4% in DeepSeek-V3's shapes, and 9% in FP8
(predicted, compiled/grid.py).

**gated_gmm** multiplies a tile of rows with gate and up, adds the biases of its group if there are any (gpt-oss),
applies the activation, multiplies each row by its factor, the router's weight, and writes both products for backward. A
bias's gradient, a sum over rows, is XLA's: a pass over the gradients of both products.

**gated_gradients** computes what is dlhs in `gmm` for the matmul with down, where lhs is the third result of gated_gmm.
Before it leaves VMEM, in float32, it becomes the gradients of gate, of up and of the factors, which are sums over
columns. 256 columns are multiplied while the vector units finish those before. So `gated_gmm` has gradients in both
products, and none in its third result; `activated_gmm` computes them.

In FP8 both kernels also find the largest elements of their last results, of which the scales of these are made.

**summed_gmm** adds the two cotangents of the common lhs of gate and up in VMEM, in float32, as matrix units do.

**Cost**, with b bytes of an element, R = M/E rows an expert, on a core of C FLOP/s and W bytes/s of HBM:

    FLOPs    2 M K N
    bytes    M K b * N/cols  +  E K N b  +  M N b
    bound by FLOPs if       b/2 * C/W * (1/cols + 1/R + 1/K) < 1

In bf16 on TPU7x C/W is 312: with cols = 1536, K = 4096 and 1024 rows an expert the left side is 0.58. With fewer than
about 430 rows, reading the weights takes longer than using them, and the cost of boundaries is hidden.

**On TPU7x.** Cycles, compiled with libtpu 0.0.50 (benchmarks/kernels.py), over the ideal of 2MKN / 524,288. All wasted
work is included, for M=8192, K=4096, N=1536 in bf16, 8 groups. Ragged: 1000 1100 900 1024 700 1300 1068 1100 rows.

                                                       ragged    8 x 1024
    gmm     tiles of 640 x 1536 rows and columns       1.07      1.05
    tgmm    1024 rows, out in tiles of 2048 x 1536     1.24      1.05      at least 1.16 and 1.00, see above

HBM is not included. It is hidden (`grid.moved_bytes`: 0.55 and 0.63 of the time), except for the first expert's
matrix and tile, about 10,000 cycles.

In gated_gmm the vector units, which are mostly idle, compute the activation in parallel with the matrix units. Those 8
experts take 1.083 of the ideal of both matmuls, where `gmm` takes 1.072 of the ideal of one. XLA's separate pass for
silu(gate) * up, 7.4 cycles for 1024 elements (compiled), would add 90,000 cycles. That is 0.15 of the three matmuls of
an expert with K = 4096, forward, and once more if the backward pass recomputes it.

In FP8, for 131,072 rows in 128 groups, K = 4096 and N = 1536, gated_gradients takes 2.24 million cycles with
silu(gate) * up, and gmm 1.71. It takes 2.68 if a part of the columns is finished before the next one is multiplied.
gated_gmm takes 3.45, 0.05 of it for factors and largest elements, for which XLA's pass takes 0.48 (compiled).

In place of summed_gmm, two calls of `gmm` and XLA's sum of their results would take 7.2 ms more in a layer of Qwen3
235B (compiled), and hold one more array of all rows.

**Left out.** The sums of the biases' gradients in `tgmm`, which reads the same rows. A bias of `gmm` itself, as that of
gpt-oss's down. An FP8 result: its scale would have to be known before it. Scales of blocks along K. Splitting K.
Forward-mode derivatives.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import tuned
from collectives import vary_alike
from groups import (
    FLOPS_A_BYTE,
    MXU,
    TgmmTiles,
    Tiles,
    Variant,
    check_tgmm_tiles,
    check_tiles,
    default_tgmm_tiles,
    default_tiles,
    gmm_buffers,
    heights,
    other_columns,
    plan_of,
    register_rows,
    result_dtype,
    tgmm_buffers,
)

# -- the functions


class Activated(NamedTuple):
    """The lhs of a matmul is factors * activation(gate, up): its gradient goes to these."""

    activation: Callable[[jax.Array, jax.Array], jax.Array]
    products: tuple[jax.Array, jax.Array]  # gate and up, [M, N]
    factors: jax.Array  # [M], float32
    largest: jax.Array | None = None  # FP8 only, [2]: zeros, whose cotangent is the largest |dgate| and |dup|


def gmm(
    lhs_MK: jax.Array,
    rhs_EKN: jax.Array,
    group_sizes_E: jax.Array,
    *,
    transpose_rhs: bool = False,
    group_offset: jax.Array | int = 0,
    lhs_scale: jax.Array | float | None = None,
    rhs_scale: jax.Array | float | None = None,
    out_dtype=None,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Each group's rows times its own matrix: out[rows of e] = lhs[rows of e] . rhs[e]. Code of one device.

    Differentiable in lhs and rhs: by `gmm` with the other `transpose_rhs`, and by `tgmm`. On platforms other than TPU
    it computes `reference_gmm`, unless `interpret` is set.

    Args:
      lhs_MK: rows sorted by group, in bfloat16, float32, float8_e4m3fn or float8_e5m2. Rows beyond the last group may
        hold anything, also NaN. If M is not a multiple of a register's rows (32 bytes / bytes of the narrowest of lhs
        and out), it is padded, which copies lhs and out.
      rhs_EKN: with `transpose_rhs` rhs_ENK. Its type has as many bits as that of lhs.
      group_sizes_E: int32, the rows of each group, computed by the program. Their sum is at most M.
      group_offset: rhs holds the experts [offset, offset + its dim 0) of the E in group_sizes. Rows of other experts
        give zeros, like those beyond the last group.
      lhs_scale: a factor of lhs, or [M], one for each row. It is applied to the float32 product.
      rhs_scale: a factor of rhs, or [E], one for each expert in rhs, or [E, N], one for each of its columns; likewise.
      out_dtype: the default is that of lhs, bfloat16 for FP8.
      tiles: the default is a search's result (tuned.py), or else `default_tiles`. Gradients have tiles of their own.
      interpret: True or `pltpu.InterpretParams(...)` simulates the kernel on CPU. In a `jax.shard_map` this needs
        check_vma=False, as jax's simulator does not pass the check. The compiled kernel does.

    Returns:
      out_MN.

    Raises:
      ValueError: shapes, types or tiles do not fit, VMEM is too small, or a gradient of FP8 or with scales is taken.
    """
    shape = check_gmm(lhs_MK, rhs_EKN, group_sizes_E, transpose_rhs)
    out_dtype = jnp.dtype(out_dtype or result_dtype(lhs_MK.dtype))
    M, K, E, N = shape
    scales = (lhs_scale, rhs_scale) if lhs_scale is not None or rhs_scale is not None else None
    lhs_row_scale, rhs_col_scale = (None, None) if scales is None else _gmm_scales(*scales, shape)
    options = (transpose_rhs, out_dtype, tiles, None, _interpreter(interpret))
    arrays = (lhs_MK, rhs_EKN, group_sizes_E, jnp.asarray(group_offset, jnp.int32), lhs_row_scale, rhs_col_scale)
    return _gmm(options, *vary_alike(arrays))


def gated_gmm(
    lhs_MK: jax.Array,
    rhs_EKN: tuple[jax.Array, jax.Array],
    group_sizes_E: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    factors_M: jax.Array,
    *,
    biases: tuple[jax.Array, jax.Array] | None = None,
    rhs_scale: tuple[jax.Array | float, jax.Array | float] | None = None,
    out_dtype=None,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(lhs . gate[e], lhs . up[e], factors * activation of both, its largest element) of each group's rows.

    One kernel computes all. Both products, with their biases, are rounded, and go through the activation in float32
    before they leave VMEM. Code of one device. Differentiable in lhs, gate, up and biases, from the gradients of both
    products, which must be finite in rows without a group. The third result has no gradient: the matmul that follows
    (`activated_gmm`) takes the products, too, and computes theirs.

    Args:
      lhs_MK, group_sizes_E, out_dtype, interpret: as for `gmm`.
      rhs_EKN: gate and up, of one shape and type.
      activation: an elementwise function of two arrays, such as silu(gate) * up. It maps zeros to zero.
      factors_M: of rows without a group they may hold anything.
      biases: of gate and of up, [E, N] each, added to the scaled products of the group's rows.
      rhs_scale: one for gate and one for up, as for `gmm`.
      tiles: default as for `gmm`, with a key for `gated`.

    Returns:
      Three arrays [M, N]; rows without a group are zeros. The largest element is without its sign, and None if lhs is
      not FP8.

    Raises:
      ValueError: shapes, types or tiles do not fit, VMEM is too small, or a gradient of FP8 or with scales is taken.
    """
    M, _, E, N = _check_gated(lhs_MK, *rhs_EKN, group_sizes_E, biases)
    scales = None if rhs_scale is None else tuple(_column_scale(scale, E, N, "rhs_scale") for scale in rhs_scale)
    out_dtype = jnp.dtype(out_dtype or result_dtype(lhs_MK.dtype))
    options = (False, out_dtype, tiles, activation, _interpreter(interpret))
    arrays = (lhs_MK, *rhs_EKN, group_sizes_E, biases, _column_of(factors_M, M), scales)
    gate, up, *others = _gated(options, *vary_alike(arrays))
    rows, largest = lax.stop_gradient(others if len(others) == 2 else (*others, None))
    return gate, up, rows, largest


def _column_of(factors: jax.Array, M: int) -> jax.Array:
    """The factors [M] as float32 [M, 1]."""
    if jnp.shape(factors) != (M,):
        raise ValueError(f"factors has shape {jnp.shape(factors)}; it must be [M] = [{M}]")
    return factors.astype(jnp.float32)[:, None]


def activated_gmm(
    lhs_MK: jax.Array,
    rhs_EKN: jax.Array,
    group_sizes_E: jax.Array,
    through: Activated,
    *,
    transpose_rhs: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """`gmm` of an lhs that is `through`: its gradient goes to the products and factors, by `gated_gradients`.

    It has no gradient in lhs. The other arguments and the result are those of `gmm`.

    Raises:
      ValueError: as `gmm`; or operands are FP8.
    """
    M, K, *_ = check_gmm(lhs_MK, rhs_EKN, group_sizes_E, transpose_rhs)
    if lhs_MK.dtype.itemsize == 1:
        raise ValueError("activated_gmm of fp8 has no gradient: call gated_gradients in a custom_vjp of your own")
    _checked(through, M, K)
    options = (transpose_rhs, lhs_MK.dtype, None, None, _interpreter(interpret))
    arrays = vary_alike((lhs_MK, rhs_EKN, group_sizes_E, through.products, through.factors))
    return _activated(options, through.activation, *arrays)


def summed_gmm(
    pair_MK: tuple[jax.Array, jax.Array],
    rhs_ENK: tuple[jax.Array, jax.Array],
    group_sizes_E: jax.Array,
    *,
    rhs_scale: tuple[jax.Array | float, jax.Array | float] | None = None,
    out_dtype=None,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """The sum of `gmm(lhs, rhs, transpose_rhs=True)` over two pairs.

    It is dlhs of `gated_gmm`, from the cotangents of its products; not differentiable. One kernel computes it and
    rounds once, if VMEM holds tiles of both pairs so large that reading them is hidden behind the matmuls (`fits_two`).
    Otherwise it is the sum of two rounded results of `gmm`.

    Args:
      pair_MK: two lhs of the same shape and type.
      rhs_ENK: two rhs, likewise.
      rhs_scale: one for each rhs, as for `gmm`. The other arguments are as for `gmm`.

    Returns:
      out_MN, as `gmm`.

    Raises:
      ValueError: shapes, types or tiles do not fit, or VMEM is too small.
    """
    (lhs, lhs_too), (rhs, rhs_too) = pair_MK, rhs_ENK
    _, _, E, N = check_gmm(lhs, rhs, group_sizes_E, True)
    alike = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    if not (alike(lhs, lhs_too) and alike(rhs, rhs_too)):
        types = [f"{a.dtype}{list(a.shape)}" for a in (*pair_MK, *rhs_ENK)]
        raise ValueError(f"both lhs must have one shape and type, and both rhs; they are {types}")
    scales = [] if rhs_scale is None else [_column_scale(scale, E, N, "rhs_scale") for scale in rhs_scale]
    options = (True, jnp.dtype(out_dtype or result_dtype(lhs.dtype)), tiles, None, _interpreter(interpret))
    arrays = (*pair_MK, *rhs_ENK, group_sizes_E, jnp.int32(0), *scales)
    lhs, lhs_too, rhs, rhs_too, sizes, offset, *scales = vary_alike(arrays)
    return _summed(options, (lhs, lhs_too), (rhs, rhs_too), sizes, offset, tuple(scales) or None)


def gated_gradients(
    dout_MK: jax.Array,
    rhs_EKN: jax.Array,
    group_sizes_E: jax.Array,
    through: Activated,
    *,
    transpose_rhs: bool = False,
    rhs_scale: jax.Array | float | None = None,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """The gradients of what `through` takes in out = through . rhs^T, in one kernel; not differentiable.

    dout . rhs is the gradient of `through`. It goes on in float32, before it leaves VMEM.

    Args:
      dout_MK, rhs_EKN, group_sizes_E, transpose_rhs, rhs_scale: as for `gmm`, of the product dout . rhs.
      through: its products may hold anything in rows without a group.
      tiles, interpret: as for `gmm`, with a key for `gradient`.

    Returns:
      dgate_MN, dup_MN, in the type of the products, and dfactors_M in float32. Rows without a group are zeros.
      The largest |dgate| and |dup|, of which FP8 makes scales; None if dout is not FP8.

    Raises:
      ValueError: shapes, types or tiles do not fit, or VMEM is too small.
    """
    M, _, E, N = check_gmm(dout_MK, rhs_EKN, group_sizes_E, transpose_rhs)
    activation, products, column = _checked(through, M, N)
    scale = None if rhs_scale is None else _column_scale(rhs_scale, E, N, "rhs_scale")
    options = (transpose_rhs, products[0].dtype, tiles, activation, _interpreter(interpret))
    arrays = (dout_MK, rhs_EKN, group_sizes_E, scale, products, column)
    return _gated_gradients(options, *vary_alike(arrays))


def _checked(through: Activated, M: int, N: int):
    """(activation, products, factors [M, 1]); raises ValueError if products or factors do not fit."""
    gate, up = through.products
    if not gate.shape == up.shape == (M, N) or gate.dtype != up.dtype:
        types = [f"{a.dtype}{list(a.shape)}" for a in (gate, up)]
        raise ValueError(f"gate and up must have one type and the shape [M, N] = {[M, N]}; they are {types}")
    return through.activation, through.products, _column_of(through.factors, M)


def tgmm(
    lhs_MK: jax.Array,
    dout_MN: jax.Array,
    group_sizes_E: jax.Array,
    *,
    group_offset: jax.Array | int = 0,
    num_groups: int | None = None,
    scale: jax.Array | float | None = None,
    out_dtype=None,
    tiles: TgmmTiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """The gradient of `gmm` in rhs: out[e] = lhs[rows of e]^T . dout[rows of e]. Code of one device.

    Not differentiable. A group without rows gives zeros.

    Args:
      lhs_MK, dout_MN, group_sizes_E: as for `gmm`. Rows without a group may hold anything in both.
      group_offset, num_groups: the groups [offset, offset + num_groups) are computed. Default: the E of group_sizes.
      scale: a factor of the result, or [E], one for each group, or [E, N], one for each of its columns. (Scales of rows
        of lhs and dout are inside the sum: multiply before.)
      out_dtype: default as for `gmm`.
      tiles: the default is a search's result (tuned.py), or else `default_tgmm_tiles`.
      interpret: as for `gmm`.

    Returns:
      out_EKN.

    Raises:
      ValueError: shapes, types or tiles do not fit, or VMEM is too small.
    """
    if lhs_MK.ndim != 2 or dout_MN.ndim != 2 or lhs_MK.shape[0] != dout_MN.shape[0]:
        raise ValueError(f"tgmm takes [M, K] and [M, N], not {lhs_MK.shape} and {dout_MN.shape}")
    _check_types(lhs_MK, dout_MN, group_sizes_E)
    E = group_sizes_E.shape[0] if num_groups is None else num_groups
    out_dtype = jnp.dtype(out_dtype or result_dtype(lhs_MK.dtype))
    scale = None if scale is None else _column_scale(scale, E, dout_MN.shape[1], "scale")
    arrays = (lhs_MK, dout_MN, group_sizes_E, jnp.asarray(group_offset, jnp.int32), scale)
    return _tgmm((E, out_dtype, tiles, _interpreter(interpret)), *vary_alike(arrays))


def reference_gmm(
    lhs, rhs, group_sizes, group_offset=0, lhs_scale=None, rhs_scale=None, bias=None, *, transpose_rhs, out_dtype
):
    """Defines `gmm`: each expert multiplies all rows, and its own are selected. Scales [M, 1], [E, 1, N], as bias."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0]), side="right")

    def add_expert(e, out):
        weights = (rhs[e].T if transpose_rhs else rhs[e]).astype(jnp.float32)
        product = jnp.dot(lhs.astype(jnp.float32), weights, precision="highest")
        product = product if rhs_scale is None else product * rhs_scale[e]
        product = product if lhs_scale is None else product * lhs_scale
        product = product if bias is None else product + bias[e]
        return jnp.where((group == e + group_offset)[:, None], product.astype(out_dtype), out)

    zeros = jnp.zeros((lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]), out_dtype)
    return lax.fori_loop(0, rhs.shape[0], add_expert, vary_alike((zeros, lhs))[0])


def reference_tgmm(lhs, dout, group_sizes, group_offset=0, scale=None, *, num_groups, out_dtype):
    """Defines `tgmm`, expert by expert. Scale [E, 1, N]."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0]), side="right")

    def one_expert(e):
        own = (group == e + group_offset)[:, None]
        x, dy = (jnp.where(own, a.astype(jnp.float32), 0) for a in (lhs, dout))
        product = jnp.dot(x.T, dy, precision="highest")
        return (product if scale is None else product * scale[e]).astype(out_dtype)

    return lax.map(one_expert, jnp.arange(num_groups))


def _products(options, *arrays):
    """A tuple of results: one product, those of gated_gmm, or the sum of summed_gmm.

    lhs, rhs and the scales and biases of rhs are tuples, too, and the columns (scales of rows, factors).
    """
    transpose_rhs, out_dtype, _, activation, interpret = options

    def kernel(*arrays):
        results, _, largest = _gmm_call(*arrays, options=options)
        return (*results, *largest)

    def reference(lhs, rhs, group_sizes, group_offset, columns, rhs_scale=None, bias=None):
        dtype = jnp.float32 if len(lhs) == 2 else out_dtype
        gmm_of = partial(reference_gmm, transpose_rhs=transpose_rhs, out_dtype=dtype)
        scales, biases = (rows or (None,) * len(rhs) for rows in (rhs_scale, bias))
        each = zip(lhs * (len(rhs) // len(lhs)), rhs, scales, biases, strict=True)
        products = [gmm_of(x, w, group_sizes, group_offset, columns[0], s, b) for x, w, s, b in each]
        if len(lhs) == 2:
            return (sum(products).astype(out_dtype),)
        if not activation:
            return tuple(products)
        factors = jnp.where(has_group(lhs[0], group_sizes[: len(rhs[0])]), columns[1], 0)
        rows = activation(*(p.astype(jnp.float32) for p in products)) * factors
        rows = rows.astype(out_dtype)
        return *products, rows, *((_largest(rows),) if lhs[0].dtype.itemsize == 1 else ())

    return kernel(*arrays) if interpret else lax.platform_dependent(*arrays, tpu=kernel, default=reference)


def _gated_gradients(options, dout, rhs, group_sizes, rhs_scale, products, factors):
    transpose_rhs, out_dtype, _, activation, interpret = options
    in_fp8 = dout.dtype.itemsize == 1
    arrays = dout, rhs, group_sizes, rhs_scale, products, factors

    def kernel(dout, rhs, group_sizes, rhs_scale, products, factors):
        scale = None if rhs_scale is None else (rhs_scale,)
        arrays = (dout,), (rhs,), group_sizes, jnp.int32(0), (None, factors), scale, None, products
        gradients, sums, largest = _gmm_call(*arrays, options=options)
        own = has_group(dout, group_sizes[: len(rhs)])[:, 0]
        return *gradients, jnp.where(own, jnp.sum(sums[..., 0], 0), 0), largest or None

    def reference(dout, rhs, group_sizes, rhs_scale, products, factors):
        own = has_group(dout, group_sizes[: len(rhs)])
        gate, up, factors = (jnp.where(own, a.astype(jnp.float32), 0) for a in (*products, factors))
        options = dict(rhs_scale=rhs_scale, transpose_rhs=transpose_rhs, out_dtype=jnp.float32)
        product = reference_gmm(dout, rhs, group_sizes, **options)
        result, backward = jax.vjp(activation, gate, up)
        gradients = [gradient.astype(out_dtype) for gradient in backward(product * factors)]
        largest = tuple(map(_largest, gradients)) if in_fp8 else None
        return *gradients, jnp.sum(product * result, 1), largest

    return kernel(*arrays) if interpret else lax.platform_dependent(*arrays, tpu=kernel, default=reference)


def _largest(x) -> jax.Array:
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def has_group(rows, group_sizes):
    """Whether each row is of a group, [M, 1]."""
    return jnp.arange(len(rows))[:, None] < jnp.sum(group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gmm(options, lhs, rhs, group_sizes, group_offset, lhs_scale, rhs_scale):
    scales = None if rhs_scale is None else (rhs_scale,)
    return _products(options, (lhs,), (rhs,), group_sizes, group_offset, (lhs_scale, None), scales)[0]


def _gmm_forward(options, *arrays):
    if any(scale is not None for scale in arrays[4:]) or arrays[0].dtype.itemsize == 1:
        raise ValueError("gmm of fp8 or with scales has no gradient: call gmm and tgmm in a custom_vjp of your own")
    return _gmm(options, *arrays), arrays[:4]


def _gmm_backward(options, saved, dout):
    transpose_rhs, _, _, _, interpret = options
    lhs, rhs, group_sizes, group_offset = saved
    dout = dout.astype(lhs.dtype)
    backward = (not transpose_rhs, lhs.dtype, None, None, interpret)
    dlhs = _gmm(backward, dout, rhs, group_sizes, group_offset, None, None)
    return dlhs, _rhs_gradient(options, lhs, rhs, dout, group_sizes, group_offset), None, None, None, None


def _rhs_gradient(options, lhs, rhs, dout, group_sizes, group_offset):
    transpose_rhs, *_, interpret = options
    pair = (dout, lhs) if transpose_rhs else (lhs, dout)
    return _tgmm((rhs.shape[0], rhs.dtype, None, interpret), *pair, group_sizes, group_offset, None)


_gmm.defvjp(_gmm_forward, _gmm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activated(options, activation, lhs, rhs, group_sizes, products, factors):
    return _gmm(options, lhs, rhs, group_sizes, jnp.int32(0), None, None)


def _activated_forward(options, activation, *arrays):
    return _activated(options, activation, *arrays), arrays


def _activated_backward(options, activation, saved, dout):
    transpose_rhs, *_, interpret = options
    lhs, rhs, group_sizes, products, factors = saved
    dout, others = dout.astype(lhs.dtype), dict(transpose_rhs=not transpose_rhs, interpret=interpret)
    through = Activated(activation, products, factors)
    *dproducts, dfactors, _ = gated_gradients(dout, rhs, group_sizes, through, **others)
    drhs = _rhs_gradient(options, lhs, rhs, dout, group_sizes, jnp.int32(0))
    return None, drhs, None, tuple(dproducts), dfactors


_activated.defvjp(_activated_forward, _activated_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(options, lhs, gate, up, group_sizes, biases, factors, scales):
    columns, rows = (None, factors), _rows_of(biases)
    return _products(options, (lhs,), (gate, up), group_sizes, jnp.int32(0), columns, scales, rows)


def _gated_forward(options, *arrays):
    if arrays[-1] is not None or arrays[0].dtype.itemsize == 1:
        raise ValueError("gated_gmm of fp8 or with scales has no gradient: call it in a custom_vjp of your own")
    return _gated(options, *arrays), arrays[:-2]


def _rows_of(biases):
    """None, or each bias [E, N] as float32 [E, 1, N], of which a kernel reads a row."""
    return biases and tuple(bias.astype(jnp.float32)[:, None] for bias in biases)


def _gated_backward(options, saved, gradients):
    *_, interpret = options
    lhs, gate, up, group_sizes, biases = saved
    groups, dproducts = (group_sizes, jnp.int32(0)), gradients[:2]  # the activation's gradient is in them
    dbiases = bias_gradients(biases, dproducts, group_sizes)
    dlhs = _summed((True, lhs.dtype, None, None, interpret), dproducts, (gate, up), *groups, None)
    dgate, dup = (_tgmm((gate.shape[0], gate.dtype, None, interpret), lhs, d, *groups, None) for d in dproducts)
    return dlhs, dgate, dup, None, dbiases, None, None


def bias_gradients(biases, douts_MN, group_sizes):
    """The sum of each dout over each group's rows, [E, N] in the type of its bias; None without biases.

    A matmul with the rows' one-hot groups, as adding up rows at indices would be a scatter. Rows without a group are
    zeros. XLA reads every dout once more.
    """
    if biases is None:
        return None
    row, sizes_E1 = jnp.arange(len(douts_MN[0])), group_sizes[: len(biases[0]), None]
    ends_E1 = jnp.cumsum(sizes_E1, 0)
    is_in_EM = (row >= ends_E1 - sizes_E1) & (row < ends_E1)

    def sums(bias, dout_MN):
        return jnp.dot(is_in_EM.astype(dout_MN.dtype), dout_MN, preferred_element_type=jnp.float32).astype(bias.dtype)

    return tuple(map(sums, biases, douts_MN))


_gated.defvjp(_gated_forward, _gated_backward)


def _summed(options, pair, rhs, group_sizes, group_offset, rhs_scale):
    _, out_dtype, tiles, *_ = options
    (M, K), (E, N, _) = pair[0].shape, rhs[0].shape
    if tiles or fits_two(M, K, N, E, pair[0].dtype, out_dtype, bool(rhs_scale)):
        return _products(options, pair, rhs, group_sizes, group_offset, (None, None), rhs_scale)[0]
    scales = [None, None] if rhs_scale is None else [(scale,) for scale in rhs_scale]
    product = lambda x, w, scale: _products(options, (x,), (w,), group_sizes, group_offset, (None, None), scale)[0]
    return sum(map(product, pair, rhs, scales))


def fits_two(M, K, N, E, dtype, out_dtype, rhs_scale: bool) -> bool:
    """Whether reading two lhs and two rhs for each tile is hidden behind the matmuls (see **Cost**)."""
    try:
        variant = Variant(transpose_rhs=True, summed=True, rhs_scale=rhs_scale)
        cols = default_tiles(M, K, N, E, dtype, out_dtype, variant).cols
    except ValueError:  # not even the smallest tiles fit
        return False
    return cols == N or FLOPS_A_BYTE * (1 / cols + E / M + 1 / (2 * K)) < 1


def _tgmm(options, lhs, dout, group_sizes, group_offset, scale):
    num_groups, out_dtype, tiles, interpret = options
    arrays = (lhs, dout, group_sizes, group_offset, scale)
    kernel = partial(_tgmm_call, num_groups=num_groups, out_dtype=out_dtype, tiles=tiles, interpret=interpret)
    if interpret:
        return kernel(*arrays)
    reference = partial(reference_tgmm, num_groups=num_groups, out_dtype=out_dtype)
    return lax.platform_dependent(*arrays, tpu=kernel, default=reference)


def _interpreter(interpret):
    return pltpu.InterpretParams() if interpret is True else interpret


def check_gmm(lhs, rhs, group_sizes, transpose_rhs) -> tuple[int, int, int, int]:
    """Returns (M, K, E, N). Raises ValueError if shapes or types do not fit."""
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[2 if transpose_rhs else 1]:
        name = "[E, N, K], as transpose_rhs is set" if transpose_rhs else "[E, K, N]"
        raise ValueError(f"gmm takes [M, K] and {name}, not {lhs.shape} and {rhs.shape}")
    _check_types(lhs, rhs, group_sizes)
    if rhs.shape[0] > group_sizes.shape[0]:
        raise ValueError(f"rhs has {rhs.shape[0]} experts, group_sizes only {group_sizes.shape[0]} groups")
    return *lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]


def _check_gated(lhs, gate, up, group_sizes, biases) -> tuple[int, int, int, int]:
    shape = check_gmm(lhs, gate, group_sizes, False)
    for bias in biases or ():
        if bias.shape != shape[2:]:
            raise ValueError(f"a bias has shape {list(bias.shape)}; it must be [E, N] = {list(shape[2:])}")
    if (gate.shape, gate.dtype) != (up.shape, up.dtype) or (lhs.dtype.itemsize > 1 and lhs.dtype != gate.dtype):
        types = [f"{a.dtype}{list(a.shape)}" for a in (lhs, gate, up)]
        raise ValueError(f"lhs, gate and up must have one type, gate and up one shape; they are {types}")
    return shape


def _check_types(lhs, rhs, group_sizes):
    types = [jnp.dtype(t) for t in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2)]
    if lhs.dtype not in types or rhs.dtype not in types or lhs.dtype.itemsize != rhs.dtype.itemsize:
        raise ValueError(
            f"operands are {lhs.dtype} and {rhs.dtype}; they must be both bfloat16, both float32, or both "
            "float8_e4m3fn or float8_e5m2: cast one"
        )
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be [E] integers, not {group_sizes.shape} {group_sizes.dtype}")


def _gmm_scales(lhs_scale, rhs_scale, shape):
    """(None or [M, 1], None or [E, 1, N]). A single factor of lhs becomes one of rhs."""
    M, K, E, N = shape
    lhs_scale = None if lhs_scale is None else jnp.asarray(lhs_scale, jnp.float32)
    if lhs_scale is not None and lhs_scale.shape not in ((), (M,)):
        raise ValueError(f"lhs_scale has shape {lhs_scale.shape}; it must be one number or [M] = [{M}]")
    rhs_scale = None if rhs_scale is None else _column_scale(rhs_scale, E, N, "rhs_scale")
    if lhs_scale is None or lhs_scale.ndim:
        return None if lhs_scale is None else lhs_scale[:, None], rhs_scale
    ones = jnp.ones((E, 1, N), jnp.float32) if rhs_scale is None else rhs_scale
    return None, ones * lhs_scale


def _column_scale(scale, E, N, name):
    scale = jnp.asarray(scale, jnp.float32)
    if scale.shape not in ((), (E,), (E, N)):
        raise ValueError(f"{name} has shape {scale.shape}; it must be one number, [E] = [{E}] or [E, N] = [{E}, {N}]")
    return jnp.broadcast_to(scale.reshape(*scale.shape, *[1] * (2 - scale.ndim)), (E, N))[:, None]


# -- inside the kernels: lhs, rhs and out are references to HBM, buf holds the buffers in VMEM


def _start(copies):
    for copy in copies:
        copy.start()


def _wait(copies):
    for copy in copies:
        copy.wait()


def _rows(block, blocks, unit):
    return pl.ds(pl.multiple_of(block * unit, unit), pl.multiple_of(blocks * unit, unit))


def _block(block, unit):
    return pl.ds(pl.multiple_of(block * unit, unit), unit)


def _part(i, width, size):
    """Returns the i-th part of a dim. The last part ends with the dim and may overlap the one before.

    Both compute the same values there, so that their writes need no order.
    """
    if width == size:
        return slice(None)
    start = i * width if size % width == 0 else jnp.minimum(i * width, size - width)
    return pl.ds(pl.multiple_of(start, 128), width)


def _each_part(n, cols, N, act):
    """Calls act(columns in HBM, columns in VMEM) of the n-th part of N, whose last part may be wider than the others.

    The widths of DMAs are static, so there is a branch for either. The buffers have the last part's width.
    """
    width = other_columns(cols, N)
    if width == cols:
        return act(_part(n, cols, N), slice(None))
    pl.when(n * width < N - cols)(lambda: act(pl.ds(pl.multiple_of(n * width, 128), width), pl.ds(0, width)))
    pl.when(n * width == N - cols)(lambda: act(pl.ds(N - cols, cols), slice(None)))


def _position(plan, t):
    """Whether tile t is (the first tile of its group, the last tile of its group, the last tile of all)."""
    g, wraps = plan.tile_group[t], t + 1 == plan.totals[0]
    is_first = (t == 0) | (plan.tile_group[jnp.maximum(t - 1, 0)] != g)
    return is_first, wraps | (plan.tile_group[jnp.where(wraps, 0, t + 1)] != g), wraps


def _matmul(x, y, contract):
    # A core multiplies float32 in passes of bfloat16. HIGHEST takes as many as float32 needs; the default is one.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _gmm_kernel(plan, *operands, tiles, transpose_rhs, activation, unit):
    """Computes all tiles in the first `cols` columns of out, then in the next ones.

    lhs, rhs and out are tuples of `Variant.operands` references. `rows` has two tuples, the scales and the biases of
    rhs, which are rows of its columns, or None. `columns` are factors of the rows of lhs and of the activation, or
    None. `products` are those of `gated_gradients`, else (); `sums`, for each part of the columns, make its gradient of
    the factors. `largest` has the largest elements of the last results, if their scales are made of them.
    """
    lhs, rhs, rows, columns, products, (out, sums, largest), buf, *semaphores = operands
    (rhs_scale, bias), (lhs_scale, factors), (arrived, written, filled) = rows, columns, semaphores
    num_tiles, num_groups = plan.totals[0], plan.totals[1]
    num_rows, N = out[0].shape
    passes = pl.cdiv(N, tiles.cols)
    total = num_tiles * passes
    pass_before = lambda t, n: jnp.where(t == 0, n - 1, n)  # the pass of the tile before tile t of pass n

    def fetch_tile(act, t, n, slot):
        in_hbm, in_vmem = _rows(plan.tile_block[t], plan.tile_blocks[t], unit), _rows(0, plan.tile_blocks[t], unit)
        copy = lambda source, target: pltpu.make_async_copy(source, target, arrived.at[0, slot])
        copies = [copy(rows.at[in_hbm], buf["lhs"].at[slot, j, in_vmem]) for j, rows in enumerate(lhs)]
        for name, column in (("lhs_scale", lhs_scale), ("factors", factors)):
            if column is not None:
                copies.append(copy(column.at[in_hbm], buf[name].at[slot, in_vmem]))
        act(copies)

        def products_of(cols, cols_in_vmem):
            for j, rows in enumerate(products):
                yield copy(rows.at[:, cols].at[in_hbm], buf["products"].at[slot, j, in_vmem, cols_in_vmem])

        if products:
            _each_part(n, tiles.cols, N, lambda *part: act(products_of(*part)))

    def fetch_expert(act, g, n, slot):
        expert, cols_of = plan.group_expert[g], (lambda cols: (cols,) if transpose_rhs else (slice(None), cols))

        def copies(cols, in_vmem):
            for j, matrices in enumerate(rhs):
                weights, buffer = matrices.at[(expert, *cols_of(cols))], buf["rhs"].at[(slot, j, *cols_of(in_vmem))]
                yield pltpu.make_async_copy(weights, buffer, arrived.at[1, slot])
            for name, rows in (("rhs_scale", rhs_scale), ("bias", bias)):
                for j, row in enumerate(rows or ()):
                    buffer = buf[name].at[slot, j, :, in_vmem]
                    yield pltpu.make_async_copy(row.at[expert, :, cols], buffer, arrived.at[1, slot])

        _each_part(n, tiles.cols, N, lambda *part: act(copies(*part)))

    def write(act, t, n, slot):
        in_hbm, in_vmem = _rows(plan.tile_block[t], plan.tile_write[t], unit), _rows(0, plan.tile_write[t], unit)

        def copies(cols, cols_in_vmem):
            for j, result in enumerate(out):
                source = buf["out"].at[slot, j, in_vmem, cols_in_vmem]
                # In one slice the compiler dies, of a dynamic number of rows with columns that 128 does not divide.
                yield pltpu.make_async_copy(source, result.at[:, cols].at[in_hbm], written.at[slot])

        @pl.when(plan.tile_write[t] > 0)
        def _():
            _each_part(n, tiles.cols, N, lambda *part: act(copies(*part)))
            if sums is not None:
                source = buf["sums"].at[slot, 0, in_vmem]
                act([pltpu.make_async_copy(source, sums.at[n].at[in_hbm], written.at[slot])])

    def zero_blocks(act):
        """Zeros the blocks of rows without a group on this device."""
        for begin, end in ((0, plan.totals[2] // unit), (pl.cdiv(plan.totals[3], unit), num_rows // unit)):
            copy = lambda b, _: act([pltpu.make_async_copy(buf["zeros"], x.at[_block(b, unit)], filled) for x in out])
            lax.fori_loop(begin, end, copy, None)

    @jax.named_scope("tile")
    def one_tile(i, state):
        t, n, last_t, last_but_one_t = state
        slot, g = i & 1, plan.tile_group[t]
        is_first, is_last, wraps = _position(plan, t)
        next_t, next_n = jnp.where(wraps, 0, t + 1), n + wraps.astype(jnp.int32)
        pl.when(i + 1 < total)(lambda: fetch_tile(_start, next_t, next_n, 1 - slot))
        nth = n * num_groups + g  # index of the expert in the order of use

        @pl.when(is_first)
        @jax.named_scope("first of group")
        def _():
            fetch_expert(_wait, g, n, nth & 1)
            was_last = g + 1 == num_groups
            following = (jnp.where(was_last, 0, g + 1), n + was_last.astype(jnp.int32), 1 - (nth & 1))
            pl.when(nth + 1 < num_groups * passes)(lambda: fetch_expert(_start, *following))

        fetch_tile(_wait, t, n, slot)
        pl.when(i > 1)(lambda: write(_wait, last_but_one_t, pass_before(last_t, pass_before(t, n)), slot))
        own_columns = partial(_own_columns, n, tiles.cols, N)
        _gmm_tile(plan, t, slot, nth & 1, buf, tiles, transpose_rhs, activation, own_columns)
        pl.when(is_first)(lambda: _take_shared(plan, t, slot, buf, unit))
        pl.when(is_last)(lambda: _leave_shared(plan, t, slot, buf, unit))
        if largest is not None:
            _find_largest(plan, t, slot, buf, own_columns, unit)
        write(_start, t, n, slot)
        return next_t, next_n, t, last_t

    @pl.when(total > 0)
    def _():
        fetch_tile(_start, 0, 0, 0)
        fetch_expert(_start, 0, 0, 0)

    for name in ("zeros", "shared", "shared_sums", "largest"):
        if buf[name] is not None:
            buf[name][...] = jnp.zeros_like(buf[name])
    zero_blocks(_start)
    _, _, last_t, last_but_one_t = lax.fori_loop(0, total, one_tile, (0, 0, 0, 0))
    pl.when(total > 1)(lambda: write(_wait, last_but_one_t, pass_before(last_t, passes - 1), total & 1))
    pl.when(total > 0)(lambda: write(_wait, last_t, passes - 1, (total - 1) & 1))
    zero_blocks(_wait)
    if largest is not None:
        copy = pltpu.make_async_copy(buf["largest"], largest, filled)
        copy.start()
        copy.wait()


def _gmm_tile(plan, t, slot, expert_slot, buf, tiles, transpose_rhs, activation, own_columns):
    dtype, num_lhs, num_rhs = buf["out"].dtype, buf["lhs"].shape[1], buf["rhs"].shape[1]

    def product_of(j, height, cols=slice(None)):
        rows, weights = buf["lhs"][slot, j % num_lhs, :height], buf["rhs"]
        weights = weights[expert_slot, j, cols] if transpose_rhs else weights[expert_slot, j, :, cols]
        product = _matmul(rows, weights, ((1,), (1 if transpose_rhs else 0,)))
        if buf["rhs_scale"] is not None:
            product = product * buf["rhs_scale"][expert_slot, j, :, cols]
        if buf["lhs_scale"] is not None:
            product = product * buf["lhs_scale"][slot, :height]
        return product if buf["bias"] is None else product + buf["bias"][expert_slot, j, :, cols]

    def finish(height, cols, product):
        """The gradients of gate, up and factors in some columns, from the product with rhs there."""
        gate, up = (buf["products"][slot, j, :height, cols].astype(jnp.float32) for j in range(2))
        result, backward = jax.vjp(activation, gate, up)
        for j, gradient in enumerate(backward(product * buf["factors"][slot, :height])):
            buf["out"][slot, j, :height, cols] = gradient.astype(dtype)
        buf["folded"][:height] = _folded(jnp.add, buf["folded"][:height], own_columns(product * result, cols.start))

    def compute_gradients(height):
        """Multiplies some columns in the matrix units while the vector units finish those before.

        The compiler does so only in this order, and if it sees that both products are in different places.
        """
        buf["folded"][:height] = jnp.zeros((height, 128), jnp.float32)
        parts = [slice(begin, min(begin + MXU, tiles.cols)) for begin in range(0, tiles.cols, MXU)]
        product = lambda i: buf["product"].at[i % 2, :height, : parts[i].stop - parts[i].start]
        for i, cols in enumerate(parts):
            product(i)[...] = product_of(0, height, cols)
            if i > 0:
                finish(height, parts[i - 1], product(i - 1)[...])
        finish(height, parts[-1], product(len(parts) - 1)[...])
        buf["sums"][slot, 0, :height] = jnp.sum(buf["folded"][:height], 1, keepdims=True)

    def compute(height):
        if buf["products"] is not None:
            return compute_gradients(height)
        if num_lhs == 2:
            buf["out"][slot, 0, :height] = (product_of(0, height) + product_of(1, height)).astype(dtype)
            return
        for j in range(num_rhs):
            buf["out"][slot, j, :height] = product_of(j, height).astype(dtype)
        if activation:  # of the rounded products, which the backward pass uses
            rounded = (buf["out"][slot, j, :height].astype(jnp.float32) for j in range(num_rhs))
            result = activation(*rounded) * buf["factors"][slot, :height]
            buf["out"][slot, num_rhs, :height] = result.astype(dtype)

    bodies = [jax.named_scope(f"{height} rows")(partial(compute, height)) for height in heights(tiles)]
    _one_of(bodies, plan.tile_height[t])


def _one_of(bodies, which):
    """Calls bodies[which] by bisection: a branch costs about 10 cycles, and `lax.switch` tests one after the other."""
    if len(bodies) == 1:
        return bodies[0]()
    half = len(bodies) // 2
    lax.cond(which < half, lambda: _one_of(bodies[:half], which), lambda: _one_of(bodies[half:], which - half))


def _own_columns(n, cols, N, x, begin=0):
    """x, the columns from `begin` on of part n, with zeros in those that no part has, or the part before it too."""
    if N % cols == 0:
        return x
    column, width, parts = begin + lax.broadcasted_iota(jnp.int32, x.shape, 1), other_columns(cols, N), pl.cdiv(N, cols)
    first, end = (jnp.where(n == parts - 1, *choices) for choices in ((max(parts * width - N, 0), 0), (cols, width)))
    return jnp.where((column >= first) & (column < end), x, jnp.zeros_like(x))


def _find_largest(plan, t, slot, buf, own_columns, unit):
    """Keeps the largest elements of a tile's last results, in which rows of other groups are zeros by now.

    During the matmuls it would take longer: the vector units are busy with the activation then.
    """
    number = buf["largest"].shape[0]
    first = buf["out"].shape[1] - number

    def add_block(block, largest):
        for j in range(number):
            values = own_columns(jnp.abs(buf["out"][slot, first + j, _block(block, unit)]))
            largest[j] = _folded(jnp.maximum, largest[j], values)
        return largest

    with jax.named_scope("block"):
        largest = lax.fori_loop(0, plan.tile_blocks[t], add_block, [buf["largest"][j] for j in range(number)])
    for j, values in enumerate(largest):
        buf["largest"][j] = values


def _folded(add, total, x):
    """`add` of total [rows, 128] and each 128 columns of x, whose last columns may be fewer."""
    for begin in range(0, x.shape[1], 128):
        part = x[:, begin : begin + 128]
        if (missing := 128 - part.shape[1]) > 0:
            part = jnp.pad(part, ((0, 0), (0, missing)))
        total = add(total, part)
    return total


def _take_shared(plan, t, slot, buf, unit):
    """Copies the rows of previous groups into the first block of a group."""
    for results, shared in _results_and_shared(buf):
        row = lax.broadcasted_iota(jnp.int32, shared.shape, 1) + plan.tile_block[t] * unit
        is_own = row >= plan.group_start[plan.tile_group[t]]
        results[slot, :, :unit] = jnp.where(is_own, results[slot, :, :unit], shared[...])


def _leave_shared(plan, t, slot, buf, unit):
    """Keeps the last block of a group for the next one, with zeros in rows beyond the group."""
    last = plan.tile_blocks[t] - 1
    block = _block(last, unit)
    is_last_of_all = t + 1 == plan.totals[0]
    for results, shared in _results_and_shared(buf):
        row = lax.broadcasted_iota(jnp.int32, shared.shape, 1) + (plan.tile_block[t] + last) * unit
        is_own = row < plan.group_end[plan.tile_group[t]]
        own = jnp.where(is_own, results[slot, :, block], jnp.zeros_like(shared))
        results[slot, :, block] = own
        shared[...] = jnp.where(is_last_of_all, jnp.zeros_like(own), own)


def _results_and_shared(buf):
    return [(buf[a], buf[b]) for a, b in (("out", "shared"), ("sums", "shared_sums")) if buf[a] is not None]


def _tgmm_kernel(plan, lhs, dout, scale, out, buf, arrived, written, filled, *, tiles, unit):
    """Computes all tiles in the first [k, n] of all groups, then in the next ones."""
    num_tiles, num_groups = plan.totals[0], plan.totals[1]
    (K, N), num_experts = out.shape[1:], out.shape[0]
    across = pl.cdiv(N, tiles.n)
    passes = pl.cdiv(K, tiles.k) * across
    total, last_out, ahead = num_tiles * passes, tiles.outs - 1, tiles.buffers - 1
    place = lambda c: (_part(c // across, tiles.k, K), _part(c % across, tiles.n, N))

    def fetch_tile(t, c, slot):
        in_hbm, in_vmem = _rows(plan.tile_block[t], plan.tile_blocks[t], unit), _rows(0, plan.tile_blocks[t], unit)
        k, n = place(c)
        yield pltpu.make_async_copy(lhs.at[in_hbm, k], buf["lhs"].at[slot, in_vmem], arrived.at[slot])
        yield pltpu.make_async_copy(dout.at[in_hbm, n], buf["dout"].at[slot, in_vmem], arrived.at[slot])
        if scale is not None:
            expert = plan.group_expert[plan.tile_group[t]]
            yield pltpu.make_async_copy(scale.at[expert, :, n], buf["scale"].at[slot], arrived.at[slot])

    def following(t, c):
        wraps = t + 1 == num_tiles
        return jnp.where(wraps, 0, t + 1), c + wraps.astype(jnp.int32)

    def write(g, c, slot):
        target = out.at[(plan.group_expert[g], *place(c))]
        return pltpu.make_async_copy(buf["out"].at[slot], target, written.at[slot])

    def zero_experts(act):
        height = buf["zeros"].shape[0]

        def zero_expert(i, _):
            at = lambda b: out.at[plan.group_expert[i], pl.ds(pl.multiple_of(b * height, height), height)]
            copy = lambda b, _: act(pltpu.make_async_copy(buf["zeros"], at(b), filled))
            lax.fori_loop(0, K // height, copy, None)

        lax.fori_loop(num_groups, num_experts, zero_expert, None)

    @jax.named_scope("tile")
    def one_tile(i, state):
        t, c, slot, requested_t, requested_c = state
        g = plan.tile_group[t]
        is_first, is_last, _ = _position(plan, t)
        free = jnp.where(slot == 0, ahead, slot - 1)  # the slot of the tile before this one
        pl.when(i + ahead < total)(lambda: _start(fetch_tile(requested_t, requested_c, free)))
        nth = c * num_groups + g  # index of the result
        _wait(fetch_tile(t, c, slot))
        pl.when(is_first)(lambda: _clear_foreign(plan, t, 0, slot, buf, unit))

        @pl.when(is_last)
        @jax.named_scope("last of group")
        def _():
            _clear_foreign(plan, t, plan.tile_blocks[t] - 1, slot, buf, unit)
            _clear_rest(plan, t, slot, buf, unit)
            pl.when(nth >= tiles.outs)(lambda: write(g, c, nth & last_out).wait())  # all results have as many bytes

        _tgmm_tile(plan, t, slot, nth & last_out, is_first, is_last, buf, tiles)
        pl.when(is_last)(lambda: write(g, c, nth & last_out).start())
        return *following(t, c), jnp.where(slot == ahead, 0, slot + 1), *following(requested_t, requested_c)

    requested = (jnp.int32(0), jnp.int32(0))
    for i in range(ahead):
        pl.when(i < total)(partial(lambda tile, slot: _start(fetch_tile(*tile, slot)), requested, i))
        requested = following(*requested)
    buf["zeros"][...] = jnp.zeros_like(buf["zeros"])
    zero_experts(lambda copy: copy.start())
    lax.fori_loop(0, total, one_tile, (0, 0, 0, *requested))
    writes = num_groups * passes
    for out_slot in range(tiles.outs):
        pl.when(writes > out_slot)(partial(lambda slot: write(0, 0, slot).wait(), out_slot))
    zero_experts(lambda copy: copy.wait())


def _tgmm_tile(plan, t, slot, out_slot, is_first, is_last, buf, tiles):
    """Adds a tile to the sum in float32. The last tile of a group, maybe its only one, rounds and stores the sum."""

    def compute(height, last):
        for k in range(0, tiles.k, MXU):  # at once, all of k would need more registers than there are
            rows = slice(k, min(k + MXU, tiles.k))
            part = _matmul(buf["lhs"][slot, :height, rows], buf["dout"][slot, :height], ((0,), (0,)))
            total = jnp.where(is_first, 0, buf["sum"][rows]) + part  # at first, sum is another group's
            if not last:
                buf["sum"][rows] = total
                continue
            if buf["scale"] is not None:
                total = total * buf["scale"][slot]
            buf["out"][out_slot, rows] = total.astype(buf["out"].dtype)

    body = lambda name, *which: jax.named_scope(name)(partial(compute, *which))
    finish = [body(f"finish {height}", height, True) for height in heights(tiles)]
    _one_of([body("add", tiles.rows, False), *finish], jnp.where(is_last, 1 + plan.tile_height[t], 0))


def _clear_foreign(plan, t, block, slot, buf, unit):
    """Zeros the rows of other groups in a block, in both operands, as 0 * NaN is NaN."""
    rows, g = _block(block, unit), plan.tile_group[t]
    for name in ("lhs", "dout"):
        values = buf[name][slot, rows]
        row = lax.broadcasted_iota(jnp.int32, values.shape, 0) + (plan.tile_block[t] + block) * unit
        is_own = (row >= plan.group_start[g]) & (row < plan.group_end[g])
        buf[name][slot, rows] = jnp.where(is_own, values, jnp.zeros_like(values))


def _clear_rest(plan, t, slot, buf, unit):
    """Zeros the last tile below its rows, up to the height in which it is computed."""

    def clear(block, _):
        for name in ("lhs", "dout"):
            zeros = jnp.zeros((unit, buf[name].shape[2]), buf[name].dtype)
            buf[name][slot, _block(block, unit)] = zeros

    lax.fori_loop(plan.tile_blocks[t], (plan.tile_height[t] + 1) * (MXU // unit), clear, None)


# -- the calls


def _gmm_call(lhs, rhs, group_sizes, group_offset, columns, rhs_scale=None, bias=None, products=(), *, options):
    """Calls gmm's kernel: (results, sums of the gradient of the factors or None, largest elements of the last results).

    lhs, rhs, rhs_scale and bias are tuples, and `columns`, the scales of rows and the factors, [M, 1] or None each.
    `products` are those of `gated_gradients`. There are largest elements if lhs is FP8 and there are factors.
    """
    transpose_rhs, out_dtype, tiles, activation, interpret = options
    (M, K), dtype = lhs[0].shape, lhs[0].dtype
    E, N = rhs[0].shape[0], rhs[0].shape[1 if transpose_rhs else 2]
    gradient = bool(products)
    gated = activation is not None and not gradient
    flags = dict(transpose_rhs=transpose_rhs, gated=gated, summed=len(lhs) == 2, gradient=gradient)
    key = tuned.key_of("gmm", M=M, K=K, N=N, E=E, dtype=str(dtype), **flags)
    given = dict(lhs_scale=columns[0], rhs_scale=rhs_scale, bias=bias)
    variant = Variant(**flags, **{name: array is not None for name, array in given.items()})
    tiles = tiles or _tuned(key, Tiles, check_tiles, K, N, dtype, out_dtype, variant)
    tiles = tiles or default_tiles(M, K, N, E, dtype, out_dtype, variant)
    check_tiles(tiles, K, N, dtype, out_dtype, variant)
    unit = register_rows(dtype, out_dtype)
    padded = lambda x: x if M % unit == 0 else jnp.pad(x, ((0, -M % unit), (0, 0)))
    lhs, columns, products = jax.tree.map(padded, (lhs, columns, products))
    plan = plan_of(group_sizes, group_offset, E, M, unit, tiles.step, tiles)
    buffers = gmm_buffers(tiles, K, N, dtype, out_dtype, variant, rhs[0].dtype)
    kernel = partial(_gmm_kernel, tiles=tiles, transpose_rhs=transpose_rhs, activation=activation, unit=unit)
    operands = (plan, lhs, rhs, (rhs_scale, bias), columns, products)
    shape_of = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(lhs[0]).mat)
    rows, num_results = lhs[0].shape[0], variant.operands()[2]
    sums = shape_of((pl.cdiv(N, tiles.cols), rows, 1), jnp.float32) if gradient else None
    largest = buffers["largest"] and shape_of(*buffers["largest"])
    shapes = (shape_of((rows, N), out_dtype),) * num_results, sums, largest
    described, dims = tuned.metadata(key, tiles, calls=1), (M, K, N * len(rhs))
    (results,) = _call("gmm", kernel, operands, (shapes,), buffers, (2, 2), interpret, described, dims)
    results, sums, largest = results
    largest = () if largest is None else tuple(map(_largest, largest))
    return tuple(result[:M] for result in results), None if sums is None else sums[:, :M], largest


def _tuned(key, make, check, *call):
    """The tiles of a search, or None if they do not fit: the key has no scales, biases and result type."""
    if tiles := tuned.best(key, make):
        try:
            check(tiles, *call)
        except ValueError:
            return None
    return tiles


def _tgmm_call(lhs, dout, group_sizes, group_offset, scale, *, num_groups, out_dtype, tiles, interpret):
    """Calls tgmm's kernel."""
    (M, K), N = lhs.shape, dout.shape[1]
    scaled = scale is not None
    key = tuned.key_of("tgmm", M=M, K=K, N=N, E=num_groups, dtype=str(lhs.dtype))
    tiles = tiles or _tuned(key, TgmmTiles, check_tgmm_tiles, K, N, lhs.dtype, out_dtype, scaled)
    tiles = tiles or default_tgmm_tiles(M, K, N, num_groups, lhs.dtype, out_dtype, scaled)
    check_tgmm_tiles(tiles, K, N, lhs.dtype, out_dtype, scaled)
    unit = register_rows(lhs.dtype)
    lhs, dout = (x if M % unit == 0 else jnp.pad(x, ((0, -M % unit), (0, 0))) for x in (lhs, dout))
    plan = plan_of(group_sizes, group_offset, num_groups, M, unit, tiles.rows, tiles)
    buffers = tgmm_buffers(tiles, K, N, lhs.dtype, out_dtype, dout.dtype, scaled)
    kernel = partial(_tgmm_kernel, tiles=tiles, unit=unit)
    shape = jax.ShapeDtypeStruct((num_groups, K, N), out_dtype, manual_axis_type=jax.typeof(lhs).mat)
    described = tuned.metadata(key, tiles, calls=1)
    operands = (plan, lhs, dout, scale)
    return _call("tgmm", kernel, operands, shape, buffers, (tiles.buffers,), interpret, described, (M, K, N))


def _call(name, kernel, operands, shapes, buffers, arrivals, interpret, metadata, products):
    """`products`: M, K, N of the matmuls. The cost has FP8 FLOPs as half, as XLA assumes bfloat16 (kernels.py)."""
    (M, K, N), moved = products, jax.tree.leaves((operands[1:], shapes))
    cost = pl.CostEstimate(
        flops=M * pl.cdiv(K, MXU) * pl.cdiv(N, MXU) * MXU**2 * moved[0].dtype.itemsize,
        transcendentals=0,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
    )
    anywhere = partial(jax.tree.map, lambda _: pl.BlockSpec(memory_space=pl.ANY))
    dma = pltpu.SemaphoreType.DMA
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=anywhere(operands[1:]),
            out_specs=anywhere(shapes),
            scratch_shapes=[
                {name: buffer and pltpu.VMEM(*buffer) for name, buffer in buffers.items()},
                *[dma(arrivals), dma((2,)), dma(())],
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=tuned.VMEM_BYTES),
        interpret=interpret,
        name=name,
        metadata=metadata,
        cost_estimate=cost,
    )(*operands)


# -- a demonstration


def main():
    """Compares every kernel in the simulator with numpy in float64."""
    rng = np.random.default_rng(0)
    sizes = np.array([100, 0, 1, 300, 47, 220])
    M, K, N = 700, 256, 384
    lhs, rhs, dout = (rng.standard_normal(shape) for shape in ((M, K), (len(sizes), K, N), (M, N)))
    ends = np.cumsum(sizes)
    rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    out, drhs = np.zeros((M, N)), np.zeros((len(sizes), K, N))
    for e, own in enumerate(rows):
        out[own], drhs[e] = lhs[own] @ rhs[e], lhs[own].T @ dout[own]

    def compare(name, f, *arrays, expected, tiles=Tiles(128, 128, 32)):  # noqa: B008
        simulated = pltpu.InterpretParams(detect_races=True)
        arrays = [jnp.asarray(a, jnp.float32) for a in arrays]
        result = np.asarray(f(*arrays, jnp.asarray(sizes), tiles=tiles, interpret=simulated))
        print(f"{name:16} largest error {abs(result - expected).max():.1e}")

    print(f"groups {' '.join(map(str, sizes))} of {M} rows")
    compare("gmm", gmm, lhs, rhs, expected=out)
    times = lambda gate, up: gate * up
    call = lambda x, w, sizes, **options: gated_gmm(x, (w, w), sizes, times, jnp.ones(M), **options)[2]
    compare("gated_gmm", call, lhs, rhs / 16, expected=(out / 16) ** 2)
    of_times = lambda a: Activated(times, (a, a), jnp.ones(M))
    call = lambda dy, w, a, sizes, **options: gated_gradients(dy, w, sizes, of_times(a), **options)[0]
    compare("gated_gradients", call, lhs, rhs, dout, expected=out * dout)
    call = lambda x, w, sizes, **options: summed_gmm((x, x), (w, -w / 2), sizes, **options)
    compare("summed_gmm", call, lhs, rhs.swapaxes(1, 2), expected=out / 2)
    compare("tgmm", tgmm, lhs, dout, expected=drhs, tiles=TgmmTiles(256, 128, 128))


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__)
