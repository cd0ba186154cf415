"""Generation with a cache: each token and its log-probability are those of the reference on all tokens before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import EXPERTS, MIXTURES, init

import anatomy
import data
import generation
import placement
import reference
import sharding
from config import Config

TINY = dict(vocab_size=64, num_layers=2, model_dim=32, ff_dim=32, num_heads=8, num_kv_heads=4, head_dim=4, seq_len=24)
LATENT = dict(kv_lora_rank=8, q_lora_rank=8, rope_head_dim=4, num_kv_heads=8)
MODELS = {
    "dense": dict(),
    "window": dict(window=4, global_every=2),
    "window in all": dict(window=3, attention_sinks=True, qk_norm=True, qkv_bias=True, output_bias=True),
    "latent": LATENT,
    "latent, no query latent": LATENT | dict(q_lora_rank=0, value_head_dim=6, attention_soft_cap=2.0),
    "mixture": EXPERTS,
    "deepseek": MIXTURES["deepseek"] | LATENT,
    "gpt-oss": MIXTURES["gpt-oss"] | dict(num_layers=3),
    "gemma": dict(window=4, global_every=2, global_rope_theta=1e6, embedding_scale=True, post_norms=True)
    | dict(tied_embeddings=True, logit_soft_cap=5.0, attention_soft_cap=4.0, attention_scale=0.3),
}
MODELS["two kinds"] = MODELS["gemma"] | dict(num_layers=6, global_every=3, global_head_dim=8, global_kv_heads=2)
MODELS["two kinds"] |= dict(qk_norm=True, value_norm=True, keys_as_values=True, rope_fraction=0.5, layer_scale=True)
MODELS["shared keys"] = MODELS["two kinds"] | dict(keys_as_values=False, num_kv_shared_layers=3, double_wide_mlp=True)
MODELS["shared keys"] |= dict(ple_dim=8)
LENGTHS, NEW = (7, 3, 9, 1), 12  # tokens of the prompts, the longest of which exceeds every window; tokens to generate


def on_mesh(config: Config):
    """(config, mesh, params) for generation."""
    sizes = placement.parse_mesh(config.mesh)
    mesh = sharding.make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    config, mesh = generation.for_generation(config, mesh)
    return config, mesh, generation.placed(init(config), config, mesh)


def prompts(config: Config) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, config.vocab_size, length) for length in LENGTHS]


def padded(rows: list, width: int, left: bool) -> np.ndarray:
    pad = lambda row: np.pad(row, (width - len(row), 0) if left else (0, width - len(row)))
    return np.array([pad(np.asarray(row)) for row in rows], np.int32)


@functools.partial(jax.jit, static_argnums=2)
def _reference(params, tokens_bt, config):
    columns = jnp.broadcast_to(jnp.arange(tokens_bt.shape[1]), tokens_bt.shape)
    batch = data.Batch(tokens_bt, tokens_bt, jnp.ones_like(tokens_bt), columns, jnp.ones_like(tokens_bt))
    return reference.logits(params, batch, config)


def reference_logits(rows: list, config: Config) -> np.ndarray:
    """The reference's logits of each row, padded on the right: positions after a token do not change its logits."""
    return np.asarray(_reference(init(config), padded(rows, max(map(len, rows)), left=False), config))


def check_generation(model: str, mesh: str) -> None:
    config = Config(**TINY | MODELS[model], mesh=mesh)
    own, devices, params = on_mesh(config)
    rows = prompts(config)
    lengths = np.array(LENGTHS, np.int32)
    state = generation.make_prefill(own, devices, max(LENGTHS) + NEW)(params, padded(rows, max(LENGTHS), True), lengths)
    extend = generation.make_extend(own, devices, lambda logits_bV, u_b: jnp.argmax(logits_bV, -1))
    key, results = jax.random.key(0), []
    for first, count in ((0, 5), (5, NEW - 5)):  # the second call goes on where the first one stopped
        state, *more = extend(params, state, key, jnp.int32(first), jnp.int32(count))
        results.append([np.asarray(each)[:, :count] for each in more])
    tokens, log_p = (np.concatenate(each, 1) for each in zip(*results, strict=True))
    texts = [[*row, *new] for row, new in zip(rows, tokens, strict=True)]
    logits = reference_logits(texts, config)
    for n, length in enumerate(LENGTHS):
        expected = jax.nn.log_softmax(logits[n, length - 1 : length - 1 + NEW])
        np.testing.assert_array_equal(tokens[n], np.argmax(expected, -1))
        np.testing.assert_allclose(log_p[n], np.max(expected, -1), atol=1e-5)


@pytest.mark.slow
def test_generation_with_windows_and_global_layers_equals_the_reference():
    check_generation("window", "fsdp:2,tensor:2")


@pytest.mark.at_most(6)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", "fsdp:2,tensor:2"])
@pytest.mark.parametrize("model", MODELS)
def test_generation_equals_the_reference(model, mesh):
    check_generation(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp:2,expert:2", "expert:2,tensor:2", "expert:4"])
@pytest.mark.parametrize("model", ["mixture", "deepseek", "gpt-oss"])
def test_generation_with_experts_on_several_devices_equals_the_reference(model, mesh):
    check_generation(model, mesh)


@pytest.mark.parametrize("mesh", ["fsdp:2,tensor:2"])
def test_logits_of_padded_texts_are_the_reference(mesh):
    config = Config(**TINY | MODELS["gemma"], mesh=mesh)
    own, devices, params = on_mesh(config)
    rows = prompts(config)
    logits = generation.make_logits(own, devices)(params, padded(rows, 10, False), np.array(LENGTHS, np.int32))
    assert logits.shape == (4, 10, config.vocab_size) and logits.dtype == jnp.float32
    for n, (row, expected) in enumerate(zip(rows, reference_logits(rows, config), strict=True)):
        np.testing.assert_allclose(logits[n, : len(row)], expected[: len(row)], atol=1e-5)


@pytest.mark.slow
def test_draws_depend_on_the_row_and_the_number_of_the_token_and_not_on_the_mesh():
    drawn = []
    for mesh in ("", "data:2,tensor:2"):
        config, devices, params = on_mesh(Config(**TINY | dict(num_layers=1), mesh=mesh))
        state = generation.make_prefill(config, devices, 6)(params, np.ones((2, 2), np.int32), np.full(2, 2, np.int32))
        extend = generation.make_extend(config, devices, lambda logits_bV, u_b: jnp.floor(u_b * 64))
        drawn.append(extend(params, state, jax.random.key(3), jnp.int32(8), jnp.int32(4))[1][:, :4])
    np.testing.assert_array_equal(*drawn)
    draw = lambda n, row: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 8 + n), row))
    np.testing.assert_array_equal(drawn[0], [[int(64 * draw(n, row)) for n in range(4)] for row in range(2)])


@pytest.mark.parametrize(
    "mesh, flags, sizes",
    [
        ("pipe:2,fsdp:2,context:2", {}, dict(fsdp=8)),
        ("pipe:2,tensor:4", {}, dict(fsdp=2, tensor=4)),
        ("data:2,context:2,tensor:2", dict(kv_lora_rank=3, rope_head_dim=4, num_kv_heads=8), dict(data=4, tensor=2)),
        ("expert:2,context:2,tensor:2", EXPERTS, dict(fsdp=2, expert=2, tensor=2)),
    ],
)
def test_pipe_and_context_become_fsdp_if_that_shards_the_weights_or_else_data(mesh, flags, sizes):
    config = Config(**TINY | flags, mesh=mesh)
    own, folded = generation.for_generation(config, sharding.make_mesh(placement.parse_mesh(mesh)))
    assert {axis: size for axis, size in folded.shape.items() if size > 1} == sizes
    assert [device.id for device in folded.devices.flat] == list(range(8))
    if flags == EXPERTS:  # no row is dropped
        assert anatomy.expert_rows(own, 5, 2) == 2 * 5 * own.experts_per_token


def test_generation_is_without_fp8_and_what_only_training_has():
    config = Config(**TINY, mesh="data:2,pipe:2,fsdp:2", fp8="dynamic", microbatches=2, remat="full", shard_update=True)
    own, _ = generation.for_generation(config, sharding.make_mesh(placement.parse_mesh(config.mesh)))
    assert (own.fp8, own.microbatches, own.remat, own.shard_update) == ("none", 1, "none", False)


def test_the_cache_of_latent_attention_holds_latents():
    shapes = lambda config: jax.shard_map(
        lambda: [jnp.zeros(shape) for shape in generation.cache_shapes(config, 3, 10)],
        mesh=sharding.make_mesh(placement.parse_mesh("tensor:4"), jax.devices()[:4]),
        in_specs=(),
        out_specs=jax.sharding.PartitionSpec(),
    )
    shapes_of = lambda flags: [array.shape for array in jax.eval_shape(shapes(Config(**TINY | flags)))]
    assert shapes_of({}) == [(2, 3, 10, 1, 4)] * 2
    assert shapes_of(LATENT) == [(2, 3, 10, 1, 8), (2, 3, 10, 1, 4)]
    two_kinds = dict(num_layers=6, window=4, global_every=3, global_head_dim=8)
    assert shapes_of(two_kinds) == [(4, 3, 10, 1, 4)] * 2 + [(2, 3, 10, 1, 8)] * 2
    shared = two_kinds | dict(num_kv_shared_layers=3)
    assert shapes_of(shared) == [(2, 3, 10, 1, 4)] * 2 + [(1, 3, 10, 1, 8)] * 2
