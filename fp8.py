"""FP8 training: matmuls of 8-bit floats, their scales, and their gradients.

    python fp8.py                 the errors of every recipe, on a matrix with outliers

A TPU7x multiplies 8-bit floats twice as fast as bfloat16, and they are half as large where they are kept and moved.
What they lack is range and precision. e4m3fn (sign, 4 bits of exponent, 3 of mantissa; Micikevicius et al. 2022, FP8
formats for deep learning, arXiv:2209.05433) reaches 448 in steps of 1/8 to 1/16 of a number, down to 2^-6, below which
its steps are 2^-9; e5m2 reaches 57344 in steps twice as coarse, down to 2^-14, then 2^-16. Activations and weights are
e4m3fn; gradients, which spread over more orders of magnitude, are e5m2. So a matrix is multiplied as

    x = s * q     q = round(x / s) in 8 bits, s a float32     y = x w  ~  s_x * s_w * (q_x q_w), summed in float32

**Scales are powers of two**, the smallest with max|x| / s <= 448. A float loses no precision by it, only its reach, by
less than a bit of seventeen; in return x / s and every product with a scale is exact, so that scales can be moved from
one factor of a product to another (below), and every device and every way to compute them agrees bit for bit.

**Error.** |x - s q| <= max(2^-4 |x|, 2^-10 s), s < max|x| / 224 (e5m2: 2^-3, 2^-17, 28672). What is 2^17 times smaller
than the largest element is lost; so one outlier costs all that share its scale, and the granularity says who does:

    per_tensor   one scale
    per_axis     one for each row of x, one for each column of w: of what remains in y
    block        one for 1 x 128 elements of x along the contraction, one for 128 x 128 of w (DeepSeek-V3, section 3.3,
                 arXiv:2412.19437); each block is a product of its own, scaled and added in float32

**Scaling.** `dynamic`: the largest element now; right at once, but each operand is read twice, once for its maximum.
`delayed`: the largest of the last steps (arXiv:2209.05433 and NVIDIA's Transformer Engine); x is rounded as it is made,
and larger elements saturate, for one step. `static`: the largest of a profile, and nothing is computed. `fixed`: +-224,
whatever comes, a range in which normed activations and weights lie; gradients do not, their size is that of 1/tokens,
so theirs stays dynamic.

**Gradients.** dx = dy w^T contracts the columns, dw = x^T dy the rows. The forward pass keeps q_x and q_w, 8 bits each,
and these are multiplied again; only dy is quantised in the backward pass. Per tensor: once, for both. Per axis, the
scales of w are along what dx contracts, and must move to dy first:

    dx[m, k] = sum_n (dy[m, n] s_w[n]) q_w[k, n]       dw[k, n] = sum_m q_x[m, k] (s_x[m] dy[m, n])

so that dy is quantised twice, each time with one scale a row of the result. In blocks, q_x has its blocks along what dw
does not contract: it is quantised once more, which costs, as powers of two are exact, only what falls below 2^-6.
Quantisation itself is differentiated as the identity (the straight-through estimator, arXiv:1308.3432).

**Cost** for each operand of N columns of the result, at C FLOP/s of bfloat16 and W bytes/s of HBM: N/C seconds an
element are saved; made in bfloat16, read for its maximum, read again and rounded, it costs 5 bytes more than an operand
that goes straight into a matmul. Dynamic scaling wins if N > 5 C/W = 1500 on TPU7x (C = 957e12, W = 3.2e12, reached).
Delayed and static write 1 byte where bfloat16 writes 2, and win everywhere. Blocks of 128 fill half of the rows of an
MXU of 256, and add up in memory: 4 bytes of float32 read and written a block; on TPU7x they are for study.

**Rounding** is to nearest, ties to even. `stochastic` rounds gradients up with the probability of what is cut off, from
a key: unbiased, with twice the variance or more. Forward it would be noise that the loss sees, and is not done.

**Non-finite numbers** are not made finite: NaN stays NaN, infinity stays infinity (in e4m3fn, which has none: NaN), and
the scale is then 1. Finite numbers beyond the range saturate.

**Meshes.** The maximum is taken over all devices that have a part of the tensor, so the scale, and every q, is the same
on one device and on eight, if x is (`tensor` adds up in another order, and a number near the middle between two may
then round the other way); per tensor that is one number to agree on. What is gathered, a weight over `fsdp` or an
activation over `tensor`, is gathered as q (but rows on their way to routed experts travel as they were). Gradients are
scattered and added up in the unquantised dtype: a sum of n numbers of 8 bits needs log2(n) bits more of range, and each
partial sum would be rounded to 2 or 3 bits.

**Left out.** Attention's two matmuls, grouped matmuls with more than one scale a tensor, 8-bit
optimizer states (arXiv:2110.02861), 8-bit reduce-scatters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec

from collectives import all_gather, reduce_scatter, vary_alike
from gmm import gated_products, gmm, summed_gmm, tgmm
from sharding import axes_of, dim_of

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALINGS = ("dynamic", "static", "fixed", "delayed")
GRANULARITIES = ("per_tensor", "per_axis", "block")
ROUNDINGS = ("nearest", "stochastic")
GRADIENTS = {"e5m2": E5M2, "e4m3": E4M3}
FIXED_RANGE = 224.0


@dataclass(frozen=True)
class Recipe:
    """How the operands of a matmul become 8 bits. See the head of this file.

    Args:
      scaling: one of SCALINGS. static and delayed are given the largest elements (`amax`), and are per_tensor.
      granularity: one of GRANULARITIES.
      rounding: of gradients, one of ROUNDINGS; stochastic needs a key.
      gradients: format of gradients, one of GRADIENTS.
      block: length of a block.
      row_axes: mesh axes that cut the rows of x, and so of dy.
      feature_axes: mesh axes that may cut its other dims.

    Raises:
      ValueError: a name that is not known, or two that do not go together.
    """

    scaling: str = "dynamic"
    granularity: str = "per_tensor"
    rounding: str = "nearest"
    gradients: str = "e5m2"
    block: int = 128
    row_axes: tuple[str, ...] = ()
    feature_axes: tuple[str, ...] = ()

    def __post_init__(self):
        known = dict(scaling=SCALINGS, granularity=GRANULARITIES, rounding=ROUNDINGS, gradients=tuple(GRADIENTS))
        for name, allowed in known.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"fp8 {name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.scaling != "dynamic" and self.granularity != "per_tensor":
            raise ValueError(
                f"fp8 granularity={self.granularity!r} is for dynamic scaling: {self.scaling} has one scale a tensor"
            )
        if self.block < 1:
            raise ValueError(f"fp8 block={self.block} must be at least 1")

    @property
    def axes(self) -> tuple[str, ...]:
        """All that cut an activation."""
        return self.row_axes + self.feature_axes

    @property
    def uses_amax(self) -> bool:
        """Whether `amax` decides the scales."""
        return self.scaling in ("static", "delayed")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """source ~ values * scale.

    `source` is the array that was quantised, or zeros in its place after a gather. Nobody reads it; it is where the
    gradient leaves, as JAX gives an 8-bit array none but an 8-bit one.

    `scale` has a dim of size 1 for all that share one. In blocks: rows x blocks, or blocks x blocks, all else merged.
    """

    values: jax.Array
    scale: jax.Array
    source: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A quantised weight, and what its matmul has to know of the other operands."""

    quantized: Quantized
    amax_x: jax.Array | None = None  # the largest |x| to expect, where `recipe.uses_amax`
    amax_dy: jax.Array | None = None  # and the largest |dy|
    key: jax.Array | None = None  # for stochastic rounding of dy


# -- a number


def amax_of(x: jax.Array, dims: tuple[int, ...] | None = None, axes: tuple[str, ...] = ()) -> jax.Array:
    """Largest |x| along `dims` (kept, with size 1; default: all) and over the mesh axes that cut them; 0 of nothing."""
    amax = jnp.max(jnp.abs(x), axis=dims, keepdims=True, initial=0).astype(jnp.float32)
    return lax.pmax(amax, axes) if axes else amax


def scale_of(amax: jax.Array, dtype) -> jax.Array:
    """The smallest power of two s with amax / s <= the largest number of `dtype`; 1 where amax is 0 or not finite."""
    # Of a float32 in bits: 23 of mantissa below 8 of exponent, biased by 127. Both formats end at 1.75 * 2^n, so s has
    # the exponent of amax less n, and one more if the mantissa is above 1.75, 0x600000: then the sum below carries.
    n = {E4M3: 8, E5M2: 15}[dtype]
    exponent = ((lax.bitcast_convert_type(amax, jnp.int32) + 0x1FFFFF) >> 23) - n
    s = lax.bitcast_convert_type(jnp.maximum(exponent, 1) << 23, jnp.float32)
    return jnp.where((amax > 0) & (amax < jnp.inf), s, 1)


def inverse(s: jax.Array) -> jax.Array:
    """1 / s of a power of two, which a division on a TPU need not give exactly."""
    return lax.bitcast_convert_type((254 << 23) - lax.bitcast_convert_type(s, jnp.int32), jnp.float32)


def cast(x: jax.Array, s: jax.Array, dtype, *, saturates: bool = True, key: jax.Array | None = None) -> jax.Array:
    """x / s in 8 bits, to nearest, or with a key stochastically.

    Args:
      saturates: False where s comes from the maximum of this x, so that nothing can be too large.
    """
    x = x.astype(jnp.float32)
    q = x * inverse(s)
    if saturates:
        largest = float(jnp.finfo(dtype).max)
        q = jnp.where(jnp.abs(x) < jnp.inf, jnp.clip(q, -largest, largest), q)  # infinities and NaN stay
    return (q if key is None else _round_up_or_down(q, dtype, key)).astype(dtype)


def _round_up_or_down(q, dtype, key):
    """The number of `dtype` above or below q, either with the probability that makes the mean q.

    A q that is one of them stays as it is, whatever is drawn: so the largest never rounds to infinity or NaN.
    """
    format = jnp.finfo(dtype)
    exponent = (lax.bitcast_convert_type(jnp.abs(q), jnp.int32) >> 23).clip(format.minexp + 127, 254)
    step = lax.bitcast_convert_type((exponent - format.nmant) << 23, jnp.float32)
    in_steps = q * inverse(step)
    below = jnp.floor(in_steps)
    # Not floor(in_steps + draw), which float32 rounds: 14 + (1 - 2^-23) is 15 there.
    goes_up = jax.random.uniform(key, q.shape) >= 1 - (in_steps - below)
    return (below + goes_up) * step


# -- an operand


def quantize(
    x: jax.Array,
    recipe: Recipe,
    contracted: tuple[int, ...],
    *,
    axes: tuple[str, ...] | None = None,
    amax: jax.Array | None = None,
    is_weight: bool = False,
) -> Quantized:
    """An operand of the forward pass, in e4m3fn.

    Args:
      x: an activation [batch.., rows.., contracted..], or a weight [batch.., contracted.., columns..].
      contracted: the dims that the matmul contracts.
      axes: mesh axes over which the maximum is taken: per tensor those that cut x, per axis those that cut
        `contracted`. Default: those of an activation, by the recipe.
      amax: scalar, the largest |x| to expect: needed where `recipe.uses_amax`, but not of weights.
      is_weight: its maximum is always today's (but for fixed), as it is read by whoever has it, in shards.
    """
    if recipe.uses_amax and amax is None and not is_weight:
        raise ValueError(f"{recipe.scaling} scaling needs the amax of its operand")
    if axes is None:
        axes = recipe.axes if recipe.granularity == "per_tensor" else recipe.feature_axes
    x_in = lax.stop_gradient(x)
    if amax is not None and recipe.scaling != "static":
        largest, _ = vary_alike((amax_of(x_in, None, recipe.axes).reshape(()), amax))
        x = _tell(x, amax, largest)
    if recipe.granularity == "block":
        shared = math.prod(x.shape[i] for i in contracted)
        other = math.prod(x.shape[i] for i in range(x.ndim) if i not in contracted)
        merged = x_in.reshape((shared, other) if is_weight else (other, shared))
        values, scale = _in_blocks(merged, E4M3, (recipe.block if is_weight else 1, recipe.block))
        return Quantized(values.reshape(x.shape), scale, x)
    if recipe.scaling == "fixed":
        amax_now = jnp.full((1,) * x.ndim, FIXED_RANGE, jnp.float32)
    elif recipe.uses_amax and not is_weight:
        amax_now = lax.stop_gradient(amax).reshape((1,) * x.ndim)
    else:
        amax_now = amax_of(x_in, contracted if recipe.granularity == "per_axis" else None, axes)
    scale = scale_of(amax_now, E4M3)
    saturates = recipe.scaling == "fixed" or (recipe.uses_amax and not is_weight)
    return Quantized(cast(x_in, scale, E4M3, saturates=saturates), scale, x)


@jax.custom_vjp
def _tell(x, amax, found):
    """x, with `found` as the cotangent of `amax`: gradients come out of scans and recomputed layers by themselves."""
    return x


_tell.defvjp(lambda x, amax, found: (x, found), lambda found, dx: (dx, found, jnp.zeros_like(found)))


def gather(
    q: Quantized, recipe: Recipe, contracted: tuple[int, ...], axis: str, dim: int, *, is_weight=False, algorithm="xla"
) -> Quantized:
    """All-gathers the values over a mesh axis along `dim`, and the scales if they are cut as well.

    The way back is the reduce-scatter of the gradient, in the dtype of the source.
    """
    values = all_gather(q.values, axis, dim=dim, algorithm=algorithm)
    scale_dim = {
        "per_tensor": None,
        "per_axis": None if dim in contracted else dim,
        "block": 1 - is_weight if dim in contracted else is_weight,
    }[recipe.granularity]
    scale = q.scale if scale_dim is None else all_gather(q.scale, axis, dim=int(scale_dim), algorithm=algorithm)
    whole = lambda _, x: vary_alike((jnp.zeros(values.shape, x.dtype), values))[0]
    shard = lambda _, dx: reduce_scatter(dx, axis, dim=dim, algorithm=algorithm)
    return Quantized(values, scale, linear_call(whole, shard, (), q.source))


def gather_weight(
    w: jax.Array, spec: PartitionSpec, recipe: Recipe, contracted: int, axis: str = "fsdp", algorithm: str = "xla"
) -> Quantized:
    """This device's shard of a weight, quantised, then gathered over one mesh axis; in place of fsdp.gather.

    Args:
      w: [contracted.., columns..], laid out by `spec`; or the rows of all experts, with one scale a tensor.
      contracted: number of dims that its matmul contracts, the first ones; of experts it decides nothing.
    """
    dims, dim = tuple(range(contracted)), dim_of(spec, axis)
    axes = {"per_tensor": axes_of(spec), "per_axis": axes_of(PartitionSpec(*spec[:contracted])), "block": ()}
    options = dict(is_weight=True, algorithm=algorithm)

    def whole(_, w):
        q = quantize(w, recipe, dims, axes=axes[recipe.granularity], is_weight=True)
        return q if dim is None else gather(q, recipe, dims, axis, dim, **options)

    def shard(_, dq):
        return dq.source if dim is None else reduce_scatter(dq.source, axis, dim=dim, algorithm=algorithm)

    return linear_call(whole, shard, (), w)  # linear: as quantisation is differentiated


# -- a matmul


def dot(
    x: jax.Array | Quantized,
    w: jax.Array | Weight,
    recipe: Recipe,
    *,
    contracted: int = 1,
    batch: int = 0,
    transpose: bool = False,
) -> jax.Array:
    """x . w in 8 bits, with its gradients.

    [batch.., rows.., K..] . [batch.., K.., columns..] -> [batch.., rows.., columns..]; with `transpose` w is a Weight
    [batch.., columns, K].

    Args:
      x: an array, or what `quantize` made of it.
      w: an array of the same dtype, or a Weight.
      contracted: number of dims K.
      batch: number of dims that both have first; each element of them is a matmul of its own.

    Returns: in the dtype of x and w, before they were quantised. The cotangents of the largest elements to expect are,
      unless scaling is static, those that were found: a training step has them among its gradients.

    Raises:
      ValueError: shapes or dtypes that do not match, or are not cut by the blocks; a Weight that knows too little.
    """
    if not isinstance(w, Weight):
        w = Weight(quantize(w, recipe, tuple(range(batch, batch + contracted)), axes=(), is_weight=True))
    if not isinstance(x, Quantized):
        x = quantize(x, recipe, tuple(range(x.ndim - contracted, x.ndim)), amax=w.amax_x)
    w, amax, key = w.quantized, w.amax_dy, w.key
    shapes = x.values.shape, _swapped(w, transpose).values.shape
    if shapes[0][len(shapes[0]) - contracted :] != shapes[1][batch : batch + contracted] or (
        shapes[0][:batch] != shapes[1][:batch]
    ):
        raise ValueError(f"fp8.dot of {shapes[0]} and {shapes[1]} with {batch} batch and {contracted} contracted dims")
    if x.source.dtype != w.source.dtype:
        raise ValueError(f"fp8.dot of {x.source.dtype} and {w.source.dtype}: cast one of them")
    if recipe.granularity == "block" and batch:
        raise ValueError("fp8.dot in blocks has no batch dims: granularity per_tensor or per_axis")
    if recipe.rounding == "stochastic" and key is None:
        raise ValueError("fp8.dot rounds gradients stochastically: it needs a key")
    if recipe.uses_amax and amax is None:
        raise ValueError(f"{recipe.scaling} scaling needs the amax of the gradient")
    key = key if recipe.rounding == "stochastic" else None
    x, w = vary_alike((x, w))
    return _dot((recipe, contracted, batch), transpose, x, w, amax, key)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(how, transpose, x, w, amax, key):
    return _dot_forward(how, transpose, x, w, amax, key)[0]


def _dot_forward(how, transpose, x, w, amax, key):
    y, (x, _, *known) = _forward(*how, x, _swapped(w, transpose), amax, key)
    return y, (x, Quantized(w.values, w.scale, None), *known)  # as it came: a layer need not keep its weights


def _dot_backward(how, transpose, residuals, dy):
    x, w, *known = residuals
    w = _swapped(w, transpose)
    dx, dw, *others = _backward(*how, (x, (w.values, w.scale), *known), dy)
    return dx, _swapped(dw, transpose), *others


_dot.defvjp(_dot_forward, _dot_backward)


def _swapped(w: Quantized, transpose: bool) -> Quantized:
    return jax.tree.map(lambda a: a.swapaxes(-1, -2), w) if transpose else w


def _forward(recipe, contracted, batch, x, w, amax, key):
    dtype, x, w = x.source.dtype, (x.values, x.scale), (w.values, w.scale)
    rows, columns = x[0].shape[: x[0].ndim - contracted], w[0].shape[batch + contracted :]
    shared = math.prod(w[0].shape[batch : batch + contracted])
    if recipe.granularity == "block":
        y = _block_product(_matrix(x, math.prod(rows), shared), _matrix(w, shared, math.prod(columns)), recipe.block)
    else:
        y = _product(x, w, _last(x, contracted), tuple(range(batch, batch + contracted)), batch)
    return y.astype(dtype).reshape(rows + columns), (x, w, amax, key)


def _backward(recipe, contracted, batch, residuals, dy):
    x, w, amax, key = residuals  # of x and w the values and the scale
    dtype, num_columns = dy.dtype, w[0].ndim - batch - contracted
    rows, columns = tuple(range(batch, dy.ndim - num_columns)), _last((dy,), num_columns)
    keys = (None, None) if key is None else jax.random.split(key)
    found = None
    if amax is not None:
        found = jnp.zeros_like(amax)
        if recipe.scaling != "static":
            found, _ = vary_alike((amax_of(dy, None, recipe.axes).reshape(()), amax))
    if recipe.granularity == "block":
        dy_MN = dy.reshape(*(math.prod(dy.shape[i] for i in dims) for dims in (rows, columns)))
        shared = math.prod(w[0].shape[:contracted])
        matrices = _matrix(x, dy_MN.shape[0], shared), _matrix(w, shared, dy_MN.shape[1])
        dx, dw = _block_gradients(*matrices, dy_MN, recipe, keys)
        dx, dw = dx.reshape(x[0].shape), dw.reshape(w[0].shape)
    else:
        if recipe.granularity == "per_tensor":
            dy_w = dy_x = _gradient(dy, None, recipe.axes, amax, recipe, keys[0])
        else:  # the scales along what is contracted move to dy
            s_w = w[1].reshape(*w[1].shape[:batch], *(1 for _ in rows), *w[1].shape[batch + contracted :])
            s_x = x[1].reshape(*x[1].shape[: x[1].ndim - contracted], *(1 for _ in columns))
            dy_w = _gradient(dy.astype(jnp.float32) * s_w, columns, recipe.feature_axes, None, recipe, keys[0])
            dy_x = _gradient(dy.astype(jnp.float32) * s_x, rows, recipe.row_axes, None, recipe, keys[1])
            x, w = ((values, jnp.ones((1,) * values.ndim)) for values, _ in (x, w))
        dx = _product(dy_w, w, columns, _last(w, num_columns), batch)
        dw = _product(x, dy_x, rows, rows, batch)
    return Quantized(None, None, dx.astype(dtype)), Quantized(None, None, dw.astype(dtype)), found, None


def _last(operand, number):
    return tuple(range(operand[0].ndim - number, operand[0].ndim))


def _product(a, b, of_a, of_b, batch):
    """a . b, contracting the dims `of_a` and `of_b`, in float32: [batch.., the others of a.., the others of b..]."""
    (a, s_a), (b, s_b) = a, b
    first = tuple(range(batch))
    product = lax.dot_general(a, b, ((of_a, of_b), (first, first)), preferred_element_type=jnp.float32)
    s_a, s_b = lax.squeeze(s_a, of_a), lax.squeeze(s_b, of_b)
    s_b = s_b.reshape(*s_b.shape[:batch], *(1 for _ in s_a.shape[batch:]), *s_b.shape[batch:])
    return product * s_a.reshape(*s_a.shape, *(1 for _ in range(product.ndim - s_a.ndim))) * s_b


def _gradient(dy, dims, axes, amax, recipe, key):
    """(values, scale) of a gradient, with one scale for all that lies along `dims`."""
    dtype = GRADIENTS[recipe.gradients]
    expected = amax.reshape((1,) * dy.ndim) if recipe.uses_amax else amax_of(dy, dims, axes)
    scale = scale_of(expected, dtype)
    return cast(dy, scale, dtype, saturates=recipe.uses_amax, key=key), scale


# -- the logits


def logits(x_bcD: jax.Array, w_vD: jax.Array, operand, chunk, recipe: Recipe):
    """The matmuls of vocabulary.cross_entropy in 8 bits: logits_bcv, and what makes dx_bcD and dw_vD of their gradient.

    A chunk is a tensor of its own, with scales of its own. The logits, and dw, which is added up, stay in float32.

    Args:
      w_vD: the source of the weight, where its gradient leaves.
      operand: its values and scales, [D, v], and a key or None.
      recipe: not by `amax`: an element of x is multiplied by the whole vocabulary, and its maximum is cheap.
    """
    values, scale, key = operand
    x = quantize(x_bcD.astype(jnp.float32), recipe, (2,))
    x, values, scale = vary_alike((x, values, scale))
    key = None if key is None else jax.random.fold_in(key, chunk)
    w = Quantized(values, scale, None)
    logits_bcv, residuals = _forward(recipe, 1, 0, x, w, None, key)

    def gradients(dlogits_bcv):
        dx, dw, *_ = _backward(recipe, 1, 0, residuals, dlogits_bcv)
        return dx.source.astype(x_bcD.dtype), dw.source.T

    return logits_bcv, gradients


# -- grouped, for a mixture of experts


def grouped_dot(
    x_rK: jax.Array, weights: tuple[Weight, ...], sizes_e: jax.Array, recipe: Recipe, *, transpose: bool = False
) -> tuple[jax.Array, ...]:
    """Each group's rows times its matrix in each of `weights`, [e, K, N], in 8 bits, with gradients: gmm.py's kernels.

    With `transpose` they are [e, N, K].

    Args:
      x_rK: rows sorted by group. What those behind the last one hold does not matter; they give zeros.
      sizes_e: int32, rows of each group.
      recipe: per tensor.

    Raises:
      ValueError: another granularity; scaling by `amax`, which a mixture does not keep; no key for stochastic rounding.
    """
    x, quantized = _grouped_operands(x_rK, weights, sizes_e, recipe)
    options = (recipe, transpose)
    return tuple(_grouped(options, x, q, sizes_e, w.key) for q, w in zip(quantized, weights, strict=True))


def gated_dot(
    x_rK: jax.Array,
    gate: Weight,
    up: Weight,
    sizes_e: jax.Array,
    recipe: Recipe,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    names: tuple[str, str] = ("gate", "up"),
) -> jax.Array:
    """`activation` of what `grouped_dot` makes of gate and up, in one kernel: `gmm.gated_gmm` in 8 bits."""
    x, (q_gate, q_up) = _grouped_operands(x_rK, (gate, up), sizes_e, recipe)
    return _gated((recipe, activation, names), x, q_gate, q_up, sizes_e, (gate.key, up.key))


def _grouped_operands(x_rK, weights, sizes_e, recipe) -> tuple[Quantized, list[Quantized]]:
    if recipe.granularity != "per_tensor" or recipe.uses_amax:
        raise ValueError(
            f"grouped matmuls in fp8 have one scale a tensor, of today, not {recipe.granularity}, {recipe.scaling}"
        )
    if recipe.rounding == "stochastic" and any(w.key is None for w in weights):
        raise ValueError("grouped matmuls in fp8 round gradients stochastically: they need keys")
    x = quantize(jnp.where(_is_own(x_rK, sizes_e), x_rK, 0), recipe, (1,))
    return vary_alike((x, [w.quantized for w in weights]))


def _is_own(x, sizes_e):
    return jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes_e)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(options, x, w, sizes_e, key):
    return _grouped_forward(options, x, w, sizes_e, key)[0]


def _grouped_forward(options, x, w, sizes_e, key):
    scale, dtype = _times(x.scale, w.scale), x.source.dtype
    y = gmm(x.values, w.values, sizes_e, transpose_rhs=options[1], lhs_scale=scale, out_dtype=dtype)
    return y, (x.values, x.scale, w.values, w.scale, sizes_e, key)


def _grouped_backward(options, residuals, dy):
    (recipe, transpose), (x, s_x, w, s_w, sizes_e, key) = options, residuals
    dtype = dy.dtype
    q_dy, s_dy = _own_gradient(dy, sizes_e, recipe, key)
    options = dict(lhs_scale=_times(s_dy, s_w), out_dtype=dtype)
    dx = gmm(q_dy, w, sizes_e, transpose_rhs=not transpose, **options)
    pair = (q_dy, x) if transpose else (x, q_dy)
    dw = tgmm(*pair, sizes_e, scale=_times(s_dy, s_x), out_dtype=dtype)
    return Quantized(None, None, dx), Quantized(None, None, dw), None, None


def _own_gradient(dy, sizes_e, recipe, key):
    return _gradient(jnp.where(_is_own(dy, sizes_e), dy, 0), None, recipe.axes, None, recipe, key)


def _times(s, s_too):
    """Of two scales of whole tensors, as one number."""
    return (s * s_too.reshape(1, 1)).reshape(())


_grouped.defvjp(_grouped_forward, _grouped_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(options, x, gate, up, sizes_e, keys):
    return _gated_forward(options, x, gate, up, sizes_e, keys)[0]


def _gated_forward(options, x, gate, up, sizes_e, keys):
    _, activation, names = options
    scale_of_gate, scale_of_up = (_times(x.scale, w.scale) for w in (gate, up))
    scales = dict(gate_scale=scale_of_gate, up_scale=scale_of_up, out_dtype=x.source.dtype)
    *products, product = gated_products(x.values, gate.values, up.values, sizes_e, activation, **scales)
    products = [*map(checkpoint_name, products, names)]
    return product, (x.values, x.scale, [(w.values, w.scale) for w in (gate, up)], sizes_e, keys, products)


def _gated_backward(options, residuals, dproduct):
    recipe, activation, _ = options
    x, s_x, weights, sizes_e, keys, products = residuals
    cotangents = jax.vjp(activation, *products)[1](dproduct)
    grads = [_own_gradient(dy, sizes_e, recipe, key) for dy, key in zip(cotangents, keys, strict=True)]
    q_dys, s_dys = zip(*grads, strict=True)
    dtype, matrices = dproduct.dtype, tuple(w for w, _ in weights)
    scales = tuple(_times(s_dy, s_w) for s_dy, (_, s_w) in zip(s_dys, weights, strict=True))
    dx = summed_gmm(q_dys, matrices, sizes_e, rhs_scale=scales, out_dtype=dtype)
    dgate, dup = (tgmm(x, q_dy, sizes_e, scale=_times(s_dy, s_x), out_dtype=dtype) for q_dy, s_dy in grads)
    return *(Quantized(None, None, d) for d in (dx, dgate, dup)), None, None


_gated.defvjp(_gated_forward, _gated_backward)


# -- in blocks


def _in_blocks(x_MN, dtype, block, key=None):
    """(values [M, N], scale [M/m, N/n]) with a scale for every m x n elements."""
    (M, N), (m, n) = x_MN.shape, block
    if M % m or N % n:
        raise ValueError(f"fp8 block of {m} x {n} does not cut {M} x {N}: no dim of a matmul may end within one")
    x = x_MN.reshape(M // m, m, N // n, n)
    scale = scale_of(amax_of(x, (1, 3)), dtype)
    return cast(x, scale, dtype, saturates=False, key=key).reshape(M, N), scale.reshape(M // m, N // n)


def _block_product(a, b, block):
    """[M, K] . [K, N], scales [M, k], [k, n]: sum over k of s_a[:, k] * s_b[k] * (a[:, block k] . b[block k])."""
    (a_MK, s_a), (b_KN, s_b) = a, b
    s_b = jnp.repeat(s_b, block, axis=1)

    def add(y_MN, k):
        cut = lambda x, axis: lax.dynamic_slice_in_dim(x, k * block, block, axis)
        y = jnp.dot(cut(a_MK, 1), cut(b_KN, 0), preferred_element_type=jnp.float32)
        at = lambda s, axis: lax.dynamic_slice_in_dim(s, k, 1, axis)
        return y_MN + y * at(s_a, 1) * at(s_b, 0), None

    zeros_MN, *_ = vary_alike((jnp.zeros((a_MK.shape[0], b_KN.shape[1])), a_MK, s_a, b_KN, s_b))
    if not a_MK.shape[1]:
        return zeros_MN
    return lax.scan(add, zeros_MN, jnp.arange(s_a.shape[1]))[0]


def _block_gradients(x, w, dy_MN, recipe, keys):
    """dx [M, K], dw [K, N]. The second product contracts the rows: x gets new blocks, and dy has others."""
    (x_MK, s_x), (w_KN, s_w), block, dtype = x, w, recipe.block, GRADIENTS[recipe.gradients]
    dx_MK = _block_product(_in_blocks(dy_MN, dtype, (1, block), keys[0]), (w_KN.T, s_w.T), block)
    again_MK = x_MK.astype(jnp.float32) * jnp.repeat(s_x, block, axis=1)
    x_KM = _in_blocks(again_MK.T, E4M3, (1, block))
    return dx_MK, _block_product(x_KM, _in_blocks(dy_MN, dtype, (block, block), keys[1]), block)


def _matrix(operand, rows, columns):
    values, scale = operand
    return values.reshape(rows, columns), scale


# -- a demonstration


def matmul_error(recipe: Recipe, x: jax.Array, w: jax.Array) -> float:
    """Of dot(x, w) against float64: norm over norm, of the median row."""
    y = np.asarray(dot(x, w, recipe), np.float64)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    return float(np.median(np.linalg.norm(y - exact, axis=1) / np.linalg.norm(exact, axis=1)))


def main() -> None:
    draw = np.random.default_rng(0).standard_normal
    x, w = jnp.asarray(draw((512, 1024)), jnp.float32), jnp.asarray(draw((1024, 512)), jnp.float32).at[0].set(0)
    cases = {"normal": x, "one element 1e6": x.at[0, 0].set(1e6), "one column 1e6": x.at[:, 0].set(1e6)}
    recipes = {f"dynamic, {granularity}": Recipe(granularity=granularity) for granularity in GRANULARITIES}
    recipes[f"fixed, +-{FIXED_RANGE:g}"] = Recipe("fixed")
    print("relative error of x w in the median row, 512 x 1024 x 512 on CPU, measured; row 0 of w is 0\n")
    print(f"{'':24}" + "".join(f"{name:>18}" for name in cases))
    for name, recipe in recipes.items():
        print(f"{name:24}" + "".join(f"{matmul_error(recipe, case, w):18.2%}" for case in cases.values()))
    print("\nmean of 100,000 times 1.03 in e5m2, whose neighbours are 1 and 1.25, measured\n")
    for name, key in (("to nearest", None), ("stochastic", jax.random.key(0))):
        mean = jnp.mean(cast(jnp.full(100_000, 1.03), jnp.float32(1), E5M2, key=key).astype(jnp.float32))
        print(f"{name:24}{mean:18.4f}")


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__)
