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


YARN = dict(rope_type="yarn", rope_scaling=32.0, rope_original_len=4096, rope_truncate=False)
LATENT = dict(kv_lora_rank=16, rope_head_dim=64)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        dict(rope_type="linear", rope_scaling=8.0),
        dict(rope_type="llama3", rope_scaling=8.0),
        YARN,
        YARN | dict(rope_truncate=True, rope_mscale=0.7, rope_beta_fast=20.0, rope_beta_slow=2.0),
        YARN | LATENT | dict(rope_mscale_all_dim=0.5),
        YARN | dict(rope_original_len=8),  # all pairs make less than a period
    ],
    ids=str,
)
def test_rope_is_the_published_formula(flags):
    config = Config(**dict(head_dim=64, rope_theta=500_000.0) | flags)
    positions = jnp.arange(4000)[None, ::37]
    x = jax.random.normal(jax.random.key(0), (1, positions.shape[1], 2, 64))
    rotated = decoder.rope(x, *decoder.rope_tables(positions, config))
    np.testing.assert_allclose(rotated, reference.rotate(x, positions, config), atol=2e-3)


def test_rms_norm_of_a_sharded_dim_equals_that_of_the_full_dim():
    x = jax.random.normal(jax.random.key(0), (2, 3, 16)) * 5
    scale = jnp.arange(16.0)
    normed = on_tensor_mesh(
        partial(decoder.rms_norm, config=Config(model_dim=16)),
        (P(None, None, "tensor"), P("tensor")),
        P(None, None, "tensor"),
    )
    np.testing.assert_allclose(normed(x, scale), reference.norm(x, scale, 1e-5), rtol=1e-5, atol=1e-6)
