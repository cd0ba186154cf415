"""The parts of a layer, each against its formula; test_parallel.py compares all of them at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import SMALL, equations, on_tensor_mesh, trace

import decoder
import reference
from config import Config


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {},
        dict(remat="minimal", num_kv_heads=4),
        dict(kv_lora_rank=16, q_lora_rank=24, rope_head_dim=4, num_kv_heads=16),
    ],
)
def test_no_matmul_sums_over_two_dims_of_tokens(flags):
    """Neither forward nor backward, in layers, attention and the loss: tensor.matmul merges b and t."""
    config = Config(**SMALL | dict(batch=24, seq_len=20) | flags, mesh="fsdp:8")
    matmuls = [eqn for eqn in equations(trace(config)) if eqn.primitive.name == "dot_general"]
    summed = [[eqn.invars[0].aval.shape[d] for d in eqn.params["dimension_numbers"][0][0]] for eqn in matmuls]
    assert [3 * 20] in summed  # b and t of a device, merged
    assert all(len(dims) == 1 or not {3, 20} & {*dims} for dims in summed), summed


@pytest.mark.parametrize("scaling", [1.0, 8.0])
def test_rope_is_the_published_formula(scaling):
    config = Config(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling)
    positions = jnp.arange(4000)[None, ::37]
    x = jax.random.normal(jax.random.key(0), (1, positions.shape[1], 2, 64))
    rotated = decoder.rope(x, *decoder.rope_tables(positions, config))
    np.testing.assert_allclose(rotated, reference.rotate(x, positions, config), atol=2e-3)


def test_rms_norm_of_a_sharded_dim_equals_that_of_the_full_dim():
    x = jax.random.normal(jax.random.key(0), (2, 3, 16)) * 5
    scale = jnp.arange(16.0)
    normed = on_tensor_mesh(
        partial(decoder.rms_norm, eps=1e-5), (P(None, None, "tensor"), P("tensor")), P(None, None, "tensor")
    )
    np.testing.assert_allclose(normed(x, scale), reference.norm(x, scale, 1e-5), rtol=1e-5, atol=1e-6)
