"""Sizes of the published models, and the parts of the model that no comparison of whole gradients would single out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec as P
from test_fsdp import equations, trace
from test_parallel import SMALL

import model
import placement
import sharding
import transformer
from config import PRESETS, Config, from_preset

# Numbers of parameters of the released checkpoints.
PUBLISHED = {
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset):
    assert model.num_params(from_preset(preset)) == PUBLISHED[preset]


def test_gemma_like_is_about_as_large_as_gemma():
    """30.7e9 parameters are published; here the global layers have the heads of the local ones."""
    assert model.num_params(from_preset("gemma-31b-like")) == pytest.approx(30.7e9, rel=0.02)


POD = placement.fill_mesh(placement.parse_mesh("fsdp:*,tensor:2"), 128)
PREDICTED_ONLY = {  # of each preset that cannot be trained yet, the field that says so
    "mixtral-8x7b": "num_experts=8",
    "qwen3-30b-a3b": "num_experts=128",
    "qwen3-235b-a22b": "num_experts=128",
    "deepseek-v3": "num_experts=256",
    "gpt-oss-120b": "num_experts=128",
}


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in {"tiny", *PREDICTED_ONLY}])
def test_presets_can_be_cut_as_a_pod_would(preset):
    model.check_divides(from_preset(preset), POD)


@pytest.mark.parametrize("preset", PREDICTED_ONLY)
def test_presets_that_cannot_be_trained_yet_are_refused(preset):
    with pytest.raises(ValueError, match=f"^{PREDICTED_ONLY[preset]}: no code for mixtures of experts yet"):
        model.check_divides(from_preset(preset), POD)


EXPERTS = dict(num_experts=8, experts_per_token=2, expert_dim=16)
LATENT = dict(kv_lora_rank=32, rope_head_dim=8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (EXPERTS, "num_experts=8: no code for mixtures of experts yet"),
        (EXPERTS | dict(num_shared_experts=1), "num_experts=8: "),
        (EXPERTS | dict(num_dense_layers=1), "num_experts=8: "),
        (EXPERTS | dict(expert_bias=True), "num_experts=8: "),
        (LATENT, "kv_lora_rank=32: no code for multi-head latent attention yet"),
        (LATENT | dict(q_lora_rank=16), "kv_lora_rank=32: "),
        (LATENT | dict(value_head_dim=16), "kv_lora_rank=32: "),
        (dict(fp8="dynamic"), "fp8=dynamic: only predicted yet; what runs is none"),
        (dict(attention_sinks=True), "attention_sinks=True: no code for attention sinks yet"),
        (dict(output_bias=True), "output_bias=True: no code for a bias on attention's output projection yet"),
    ],
)
def test_a_flag_without_code_behind_it_is_refused(flags, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        model.check_divides(Config(**flags), placement.fill_mesh(placement.parse_mesh("fsdp:8"), 8))


def test_flops_per_token_are_six_times_the_matmul_parameters_and_attention():
    config = from_preset("llama3.1-8b")
    flops = transformer.train_flops_per_token(config)
    norms = (2 * config.num_layers + 1) * config.model_dim
    look_up = config.vocab_size * config.model_dim
    attention = 6 * config.num_layers * config.seq_len * config.num_heads * config.head_dim
    assert flops == 6 * (model.num_params(config) - norms - look_up) + attention


def on_tensor_mesh(f, in_specs, out_specs, tensor=4):
    mesh = sharding.make_mesh(placement.parse_mesh(f"tensor:{tensor}"), jax.devices()[:tensor])
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def vary(*arrays):
    axes = placement.MESH_AXES[:-1]
    return jax.tree.map(lambda a: jax.lax.pcast(a, axes, to="varying"), arrays)


@pytest.mark.parametrize("chunk", [1, 4, 12])
@pytest.mark.parametrize(("soft_cap", "z_loss"), [(0.0, 0.0), (3.0, 0.1)])
def test_chunked_cross_entropy_is_exact(chunk, soft_cap, z_loss):
    rng = np.random.default_rng(0)
    b, t, D, V = 3, 12, 16, 32
    x = rng.normal(size=(b, t, D)).astype(np.float32) * 3
    w = rng.normal(size=(V, D)).astype(np.float32)
    targets = rng.integers(0, V, (b, t))
    weights = rng.random((b, t)).astype(np.float32) * (rng.random((b, t)) > 0.3)

    def plain(x, w):
        logits = jnp.einsum("btD,VD->btV", x, w)
        logits = soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits
        lse = jax.nn.logsumexp(logits, -1)
        label = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.sum(weights * (lse - label + z_loss * lse**2))

    def sharded(x, w):
        x, w, weights_, targets_ = vary(x, w, weights, targets)
        x = jax.lax.pcast(x, ("tensor",), to="varying")
        loss = lambda x, w: model.cross_entropy(x, w, targets_, weights_, chunk, soft_cap, z_loss)
        value, (dx, dw) = jax.value_and_grad(loss, argnums=(0, 1))(x, w)
        everywhere = placement.MESH_AXES[:-1]
        return jax.lax.psum(value, everywhere), jax.lax.psum(dx, (*everywhere, "tensor")), jax.lax.psum(dw, everywhere)

    value, dx, dw = on_tensor_mesh(sharded, (P(), P("tensor")), (P(), P(), P("tensor")))(x, w)
    want, (want_dx, want_dw) = jax.value_and_grad(plain, argnums=(0, 1))(x, w)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_chunk", [8, 12])
def test_logits_of_the_whole_sequence_exist_nowhere(loss_chunk):
    """Nor of the whole vocabulary, where it is cut: no array of the step has their size."""
    config = Config(**SMALL | dict(vocab_size=4096, batch=8, loss_chunk=loss_chunk), mesh="fsdp:4,tensor:2")
    b, c, v = config.batch // 4, config.loss_chunk, config.vocab_size // 2
    (per_device,) = (eqn for eqn in equations(trace(config)) if eqn.primitive.name == "shard_map")
    shapes = [var.aval.shape for eqn in equations(per_device.params["jaxpr"]) for var in eqn.outvars]
    logits = [shape for shape in shapes if shape[-1:] == (v,)]
    assert max(np.prod(shape) for shape in logits) == b * c * v  # a chunk's, of this device's part of the vocabulary
    assert not [shape for shape in shapes if config.vocab_size in shape]


def test_embedding_gradient_counts_a_frequent_token_in_full():
    """4096 summands of 1: in bfloat16, which counts to 256, they would stop there."""
    tokens = jnp.zeros((1, 4096), jnp.int32)

    def per_device(w):
        (w, tokens_) = vary(w, tokens)
        _, backward = jax.vjp(lambda w: model.embed(w, tokens_), w)
        ones = jnp.ones((1, 4096, 4), jnp.bfloat16)
        (ones,) = vary(ones)
        (dw,) = backward(jax.lax.pcast(ones, ("tensor",), to="varying"))
        return jax.lax.psum(dw, placement.MESH_AXES[:-1])

    dw = on_tensor_mesh(per_device, (P("tensor"),), P("tensor"))(jnp.zeros((8, 4), jnp.bfloat16))
    assert (np.asarray(dw[0], np.float32) == 4096).all() and not np.asarray(dw[1:], np.float32).any()


@pytest.mark.parametrize("scaling", [1.0, 8.0])
def test_rope_is_the_published_formula(scaling):
    config = Config(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling)
    positions = jnp.arange(4000)[None, ::37]
    x = jax.random.normal(jax.random.key(0), (1, positions.shape[1], 2, 64))
    turned = model.rope(x, *model.rope_tables(positions, config))
    np.testing.assert_allclose(turned, reference.rotate(x, positions, config), atol=2e-3)


def test_rms_norm_of_a_cut_dim_is_that_of_the_whole():
    x = jax.random.normal(jax.random.key(0), (2, 3, 16)) * 5
    scale = jnp.arange(16.0)
    normed = on_tensor_mesh(
        partial(model.rms_norm, eps=1e-5), (P(None, None, "tensor"), P("tensor")), P(None, None, "tensor")
    )
    np.testing.assert_allclose(normed(x, scale), reference.norm(x, scale, 1e-5), rtol=1e-5, atol=1e-6)
