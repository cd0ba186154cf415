"""Vocabulary parallelism: embedding, unembedding and loss, with the vocabulary sharded over `tensor`.

**Idea** (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3). A look-up finds the tokens of this device's
shard of the vocabulary and leaves a partial sum. The loss needs only two numbers a position: the log-sum-exp of the
logits, and the logit of the label. Both are sums over the vocabulary, so no device ever has the full logits_BTV. It
computes those of its shard of the vocabulary, for a chunk of c positions of its sequences at a time.

**Formula.**

    x_btD  = where(token is in my shard, w_vD[token], 0)                {U_tensor}
    lse_bc = log sum_v exp(x_bcD . w_vD)                                an all-reduce of b*c numbers, twice
    loss   = sum weight_bc * (lse_bc - logit of the label + z * lse_bc^2)

**Chunks** are about equal, and as many as the requested size makes necessary (`anatomy.loss_chunk`). 8,193 positions by
1,024 are 9 chunks of 911, and the last one is padded with 6 positions of weight 0. So a length without divisors costs
what its neighbours do.

**Cost.** Memory: 4*b*c*v bytes of logits, in place of 4*b*t*V. With 128,256 tokens, 8 sequences of 8192 and tensor=1,
all logits would take 31 GiB; a chunk of 1,024 positions of one sequence takes 0.5 GiB. FLOPs: 6*b*t*D*v, forward and
backward. The gradient of a chunk is computed while its logits are in memory, so that they are not computed twice. Each
chunk adds to dw_vD in float32: 8 bytes of memory traffic an element. On TPU7x that takes as long as the matmuls of
4/3 C/W = 400 rows b*c.

**Left out.** A kernel that keeps a chunk's logits in VMEM.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def embed(w_vD: jax.Array, tokens_bt: jax.Array) -> jax.Array:
    """x_btD as a partial sum {U_tensor}: the embeddings of tokens in this device's shard of the vocabulary, else zeros.

    The gradient is accumulated in float32, whatever the dtype: the row of a frequent token has thousands of summands.
    """
    index_bt, mine_bt = _in_my_shard(tokens_bt, w_vD.shape[0])
    return jnp.where(mine_bt[..., None], w_vD[index_bt], 0)


def _in_my_shard(tokens_bt, num_rows):
    """(the row of each token in this device's shard of the vocabulary, whether it is in that shard)."""
    index_bt = tokens_bt - lax.axis_index("tensor") * num_rows
    mine_bt = (index_bt >= 0) & (index_bt < num_rows)
    return jnp.where(mine_bt, index_bt, 0), mine_bt


def _embed_backward(residuals, dx_btD):
    tokens_bt, w_vD = residuals  # w_vD for its shape and dtype only
    index_bt, mine_bt = _in_my_shard(tokens_bt, w_vD.shape[0])
    dx_btD = jnp.where(mine_bt[..., None], dx_btD, 0).astype(jnp.float32)
    dw_vD = jnp.zeros_like(w_vD, jnp.float32).at[index_bt].add(dx_btD)
    return dw_vD.astype(w_vD.dtype), None


embed.defvjp(lambda w_vD, tokens_bt: (embed(w_vD, tokens_bt), (tokens_bt, w_vD)), _embed_backward)


def matmul(x_bcD, w_vD, _, chunk):
    """(logits_bcv of a chunk in float32, gradients: dlogits_bcv -> (dx_bcD, dw_vD in float32))."""

    def gradients(dlogits_bcv):
        dlogits_bcv = dlogits_bcv.astype(x_bcD.dtype)
        dx_bcD = jnp.einsum("bcv,vD->bcD", dlogits_bcv, w_vD)  # {U_tensor}
        dlogits_rv, x_rD = [a.reshape(-1, a.shape[-1]) for a in (dlogits_bcv, x_bcD)]  # as in tensor.matmul
        return dx_bcD, jnp.einsum("rv,rD->vD", dlogits_rv, x_rD, preferred_element_type=jnp.float32)

    return jnp.einsum("bcD,vD->bcv", x_bcD, w_vD, preferred_element_type=jnp.float32), gradients


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def cross_entropy(
    x_btD, w_vD, targets_bt, weights_bt, operand, chunk: int, soft_cap: float, z_loss: float, matmul=matmul
):
    """The sum of weight * (-log softmax(x w^T)[target] + z_loss * logsumexp^2), and the z_loss term of it.

    Exact. It takes `chunk` positions of each sequence at a time, and pads the last chunk with positions of weight 0.
    Under differentiation the gradient of each chunk is computed while its logits are in memory. That takes 3 matmuls;
    recomputing the logits in a backward pass would take 4.

    Args:
      operand: further arrays for `matmul`, which get no gradient; or None.
      matmul: (x_bcD, w_vD, operand, number of the chunk) -> logits and their gradients, as `matmul` above. fp8.logits
        is the one in FP8.

    Returns:
      Two float32 scalars, the same on all devices of `tensor`. The gradient is that of the first.
    """

    def chunk_loss(_, xs):
        (x_bcD, *labels), i = xs
        return None, _chunk_loss(matmul(x_bcD, w_vD, operand, i)[0], *labels, soft_cap, z_loss)[0]

    losses, z_part = lax.scan(chunk_loss, None, _chunks((x_btD, targets_bt, weights_bt), chunk))[1]
    return jnp.sum(losses), jnp.sum(z_part)


def _chunks(arrays, chunk):
    """(arrays [b, t, ...] as [t/chunk, b, chunk, ...], numbers of the chunks). The last one is padded with zeros."""
    b, t = arrays[0].shape[:2]
    pad = lambda a: jnp.pad(a, [(0, 0), (0, -t % chunk), *[(0, 0)] * (a.ndim - 2)]) if t % chunk else a
    chunks = jax.tree.map(lambda a: pad(a).reshape(b, -1, chunk, *a.shape[2:]).swapaxes(0, 1), arrays)
    return chunks, jnp.arange(-(-t // chunk))


def _chunk_loss(logits_bcv, targets_bc, weights_bc, soft_cap, z_loss):
    """((loss of a chunk, its z_loss term), the gradient of the loss with respect to the logits)."""
    slope_bcv = 1.0
    if soft_cap:
        tanh_bcv = jnp.tanh(logits_bcv / soft_cap)
        logits_bcv, slope_bcv = soft_cap * tanh_bcv, 1 - tanh_bcv**2
    index_bc, mine_bc = _in_my_shard(targets_bc, logits_bcv.shape[-1])
    label_bc = jnp.take_along_axis(logits_bcv, index_bc[..., None], -1)[..., 0]
    max_bc = lax.pmax(jnp.max(logits_bcv, -1), "tensor")
    p_bcv = jnp.exp(logits_bcv - max_bc[..., None])
    sum_bc, label_bc = lax.psum((jnp.sum(p_bcv, -1), jnp.where(mine_bc, label_bc, 0.0)), "tensor")
    lse_bc = max_bc + jnp.log(sum_bc)
    loss = jnp.sum(weights_bc * (lse_bc - label_bc + z_loss * lse_bc**2))
    z_part = z_loss * jnp.sum(weights_bc * lse_bc**2)

    is_label_bcv = (jnp.arange(logits_bcv.shape[-1]) == index_bc[..., None]) & mine_bc[..., None]
    dlogits_bcv = p_bcv * ((1 + 2 * z_loss * lse_bc) / sum_bc)[..., None] - is_label_bcv
    return (loss, z_part), dlogits_bcv * slope_bcv * weights_bc[..., None]


def _cross_entropy_forward(x_btD, w_vD, targets_bt, weights_bt, operand, chunk, soft_cap, z_loss, matmul):
    def step(dw_vD, xs):
        (x_bcD, *labels), i = xs
        logits_bcv, gradients = matmul(x_bcD, w_vD, operand, i)
        losses, dlogits_bcv = _chunk_loss(logits_bcv, *labels, soft_cap, z_loss)
        dx_bcD, more_vD = gradients(dlogits_bcv)
        return dw_vD + more_vD, (losses, dx_bcD)

    zeros_vD = jnp.zeros_like(w_vD, jnp.float32)
    dw_vD, ((losses, z_part), dx_bcD) = lax.scan(step, zeros_vD, _chunks((x_btD, targets_bt, weights_bt), chunk))
    b, t, D = x_btD.shape
    dx_btD = dx_bcD.swapaxes(0, 1).reshape(b, -1, D)[:, :t]
    return (jnp.sum(losses), jnp.sum(z_part)), (dx_btD, dw_vD.astype(w_vD.dtype))


def _cross_entropy_backward(chunk, soft_cap, z_loss, matmul, residuals, cotangents):
    (dx_btD, dw_vD), (dloss, _) = residuals, cotangents
    return (dx_btD * dloss).astype(dx_btD.dtype), (dw_vD * dloss).astype(dw_vD.dtype), None, None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
