"""Tensor parallelism: a sub-layer as two matmuls, sharded so that nothing is communicated between them.

**Idea** (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053). The first matmul is sharded by columns, the second by
rows. Between sub-layers the residual stream is sharded over `tensor`, too. Norms, residual adds and what is saved for
the backward pass then take 1/tensor of the time and memory.

**Formula.**

    h_btd = norm(x_btd)                            its mean over D: an all-reduce of b*t numbers
    h_btD = all_gather(h_btd, "tensor")            in
    h_btf = h_btD @ w_Df                           columns: no communication
    y_btD = h_btf @ w_fD                           rows: contracting a lower-case letter leaves a partial sum {U_tensor}
    x_btd = x_btd + reduce_scatter(y_btD, "tensor")   out

The norm could instead follow the gather, on all of D on each device. That saves the all-reduce, and multiplies the
vector work by tensor.

**Overlap.** The matmul waits for its gathered operand, and the scatter for the matmul. `collective_matmul` splits both
into blocks, and multiplies one block while the next one travels (collectives.py).

**Cost** of the MLP, forward. Gather and scatter move 2 * 2*b*t*D bytes beside 6*b*t*D*F/tensor FLOPs. At C FLOP/s and
W bytes/s they can hide when F > 2/3 * tensor * C/W. (With two matmuls in the MLP instead of three it is
tensor * C/W.)

**On TPU7x.** For a chip and both directions of one torus axis, C/W is 2307e12/200e9 = 11.5k. At tensor=4 that takes
F > 31k, which Llama 3.1 70B (28,672) misses; an MLP of two matmuls takes 46k. On the die-to-die link of a chip, six
times as fast, tensor=2 hides from F > 2.6k.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

import fp8
from collectives import all_gather, all_gather_matmul, matmul_reduce_scatter, reduce_scatter
from config import Config
from parameters import fp8_recipe


def column_parallel(x_btd: jax.Array, weights: tuple[jax.Array | fp8.Weight, ...], config: Config) -> list[jax.Array]:
    """x_btD @ w for each weight [D, ...], sharded by columns. x is gathered over `tensor` first."""
    if isinstance(weights[0], fp8.Weight):
        recipe = fp8_recipe(config)
        x_btd = fp8.quantize(x_btd, recipe, (2,), amax=weights[0].amax_x)
        x_btD = fp8.gather(x_btd, recipe, (2,), "tensor", 2, algorithm=config.collectives)
        return [fp8.dot(x_btD, w, recipe) for w in weights]
    if config.collective_matmul:
        return all_gather_matmul(x_btd, weights, "tensor", dim=2, algorithm=_ring(config))
    x_btD = all_gather(x_btd, "tensor", dim=2, algorithm=config.collectives)
    return matmul(x_btD, *weights)


def row_parallel(x_btf: jax.Array, w_fD: jax.Array, config: Config) -> jax.Array:
    """x_btf @ w_fD, sharded by rows: y_btd, after the partial sums are reduce-scattered over `tensor`.

    f may be several dims: all of w's but the last.
    """
    if isinstance(w_fD, fp8.Weight):
        contracted = w_fD.quantized.values.ndim - 1
        y_btD = fp8.dot(x_btf, w_fD, fp8_recipe(config), contracted=contracted)  # {U_tensor}
        return reduce_scatter(y_btD, "tensor", dim=2, algorithm=config.collectives)
    if config.collective_matmul:
        return matmul_reduce_scatter(x_btf, w_fD, "tensor", dim=2, algorithm=_ring(config))
    if x_btf.ndim > 3:
        # Attention's kernel has heads outside of positions. In that layout XLA:TPU fuses the sum of x * dx, which the
        # kernel's backward pass takes, into the matmul of dx, and fills a quarter of the matrix unit with heads of 64.
        flat_btf = with_layout_constraint(x_btf.reshape(*x_btf.shape[:2], -1), Layout(major_to_minor=(0, 1, 2)))
        x_btf = flat_btf.reshape(x_btf.shape)
    (y_btD,) = matmul(x_btf, w_fD, dims=w_fD.ndim - 1)  # {U_tensor}
    return reduce_scatter(y_btD, "tensor", dim=2, algorithm=config.collectives)


def matmul(x_bt: jax.Array, *weights: jax.Array, dims: int = 1) -> list[jax.Array]:
    """x @ w for each weight, contracting the last `dims` dims of x with the first of w. b and t are merged to one dim.

    The gradient of w then sums over one dim. With two, XLA for CPUs computes its operands, such as the derivative of
    SiLU, in a layout in which that is several times slower (docs/RESULTS.md).
    """
    rows = x_bt.reshape(-1, *x_bt.shape[2:])  # once for all weights: without recomputation it is a saved residual
    return [jnp.tensordot(rows, w, dims).reshape(*x_bt.shape[:2], *w.shape[dims:]) for w in weights]


def _ring(config: Config) -> str:
    """The ring of the collective matmuls: that of the other collectives, or a ring both ways if those are XLA's."""
    return "ring_bidirectional" if config.collectives == "xla" else config.collectives
