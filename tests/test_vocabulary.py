"""The vocabulary-parallel loss and embedding, against all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import on_tensor_mesh

import placement
import vocabulary


def vary(*arrays):
    axes = placement.MESH_AXES[:-1]
    return jax.tree.map(lambda a: jax.lax.pcast(a, axes, to="varying"), arrays)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4, 5, 7, 11, 12])
@pytest.mark.parametrize(("soft_cap", "z_loss"), [(0.0, 0.0), (3.0, 0.1)])
def test_chunked_cross_entropy_is_exact(chunk, soft_cap, z_loss):
    rng = np.random.default_rng(0)
    b, t, D, V = 3, 12, 16, 32
    x = rng.normal(size=(b, t, D)).astype(np.float32) * 3
    w = rng.normal(size=(V, D)).astype(np.float32)
    targets = rng.integers(0, V, (b, t))
    weights = rng.random((b, t)).astype(np.float32) * (rng.random((b, t)) > 0.3)

    def plain(x, w, z_loss=z_loss):
        logits = jnp.einsum("btD,VD->btV", x, w)
        logits = soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits
        lse = jax.nn.logsumexp(logits, -1)
        label = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.sum(weights * (lse - label + z_loss * lse**2))

    def sharded(x, w):
        x, w, weights_, targets_ = vary(x, w, weights, targets)
        x = jax.lax.pcast(x, ("tensor",), to="varying")
        loss = lambda x, w: vocabulary.cross_entropy(x, w, targets_, weights_, None, chunk, soft_cap, z_loss)
        (value, z_part), (dx, dw) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)
        everywhere = placement.MESH_AXES[:-1]
        return (
            jax.lax.psum((value, z_part), everywhere),
            jax.lax.psum(dx, (*everywhere, "tensor")),
            jax.lax.psum(dw, everywhere),
        )

    (value, z_part), dx, dw = on_tensor_mesh(sharded, (P(), P("tensor")), (P(), P(), P("tensor")))(x, w)
    without = value - z_part if z_loss else value
    want, (want_dx, want_dw) = jax.value_and_grad(plain, argnums=(0, 1))(x, w)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(without, plain(x, w, z_loss=0.0), rtol=1e-6)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5, atol=1e-5)


def test_every_token_is_found_on_one_device():
    """Also the first and last token of a shard: two devices would add up two rows, or none would have one."""
    w = jnp.arange(1.0, 9)[:, None]
    embed = on_tensor_mesh(
        lambda w: jax.lax.psum(vocabulary.embed(*vary(w, jnp.arange(8)[None])), placement.MESH_AXES),
        (P("tensor"),),
        P(),
    )
    np.testing.assert_array_equal(embed(w)[0], w)


def test_embedding_gradient_counts_a_frequent_token_in_full():
    """4096 summands of 1. A bfloat16 sum would stop at 256."""
    tokens = jnp.zeros((1, 4096), jnp.int32)

    def per_device(w):
        (w, tokens_) = vary(w, tokens)
        _, backward = jax.vjp(lambda w: vocabulary.embed(w, tokens_), w)
        ones = jnp.ones((1, 4096, 4), jnp.bfloat16)
        (ones,) = vary(ones)
        (dw,) = backward(jax.lax.pcast(ones, ("tensor",), to="varying"))
        return jax.lax.psum(dw, placement.MESH_AXES[:-1])

    dw = on_tensor_mesh(per_device, (P("tensor"),), P("tensor"))(jnp.zeros((8, 4), jnp.bfloat16))
    assert (np.asarray(dw[0], np.float32) == 4096).all() and not np.asarray(dw[1:], np.float32).any()
