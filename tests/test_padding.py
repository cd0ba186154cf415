"""Padding of dims (dim_multiple): every mesh then trains the model without it, and the padding stays exactly zero."""

import dataclasses
import operator

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import (
    EXPERTS,
    MIXTURES,
    SMALL,
    assert_close,
    check_gradients,
    check_steps,
    first_state,
    init,
    make_batch,
    make_batches,
    on_mesh,
    relative_error,
    without_padding,
)

import anatomy
import checksums
import initialisation
import parameters
import placement
import rules
import sharding
import train
import weights
from config import Config
from flags import from_preset
from hardware import parse_topology
from predicted import step, transformer
from predicted.workload import run_of

UNEVEN = SMALL | dict(model_dim=36, ff_dim=20, dim_multiple=8)
# With no value at the limit: a gradient is 0 beyond it, and sums in another order are on another side of it.
GPT_OSS = MIXTURES["gpt-oss"] | dict(expert_dim=12, swiglu_limit=50.0)
slow = pytest.mark.slow


def case(mesh, option, *marks):
    return pytest.param(mesh, option, id=mesh, marks=marks)


@pytest.mark.at_most(4)
@pytest.mark.parametrize(
    ("mesh", "option"),
    [
        case("fsdp:8", dict()),
        case("fsdp:2,tensor:4", dict(tied_embeddings=True, embedding_scale=True, post_norms=True, norm_eps=0.1), slow),
        case("data:2,fsdp:4", dict(shard_update=True, collectives="ring", dim_multiple=24), slow),
        case("fsdp:4,fsdp_transpose:2", dict(double_buffer=True), slow),
        case("pipe:2,fsdp:4", dict(num_layers=2, microbatches=2), slow),
        case("fsdp:4,tensor:2", dict(collective_matmul=True), slow),
        case("fsdp:4,expert:2", GPT_OSS, slow),
        case("fsdp:2,expert:4", GPT_OSS | dict(moe_impl="capacity", capacity_factor=8.0, buffer_factor=2.0), slow),
        case("expert:2,tensor:4", MIXTURES["deepseek"] | dict(expert_dim=12, mtp=True), slow),
    ],
)
def test_gradients_are_those_of_the_model_and_zero_in_its_padding(mesh, option):
    check_gradients(Config(**UNEVEN | option, mesh=mesh))


@slow
@pytest.mark.parametrize(
    "option", [dict(optimizer="sgd"), dict(shard_update=True), GPT_OSS], ids=["sgd", "adamw", "moe"]
)
def test_five_steps_are_those_of_the_model(option):
    check_steps(Config(**UNEVEN | option, mesh="data:2,fsdp:4"), steps=5)


def after_steps(config: Config, steps: int = 3):
    """The parameters after these steps of the program on its mesh."""
    mesh, *_ = on_mesh(config, jax.devices()[: 1 if config.mesh == "fsdp:1" else 8])
    state = first_state(config, mesh, init(config))
    run = train.make_train_step(config, mesh)
    for batch in make_batches(config, steps):
        state, _ = run(state, jax.device_put(batch, NamedSharding(mesh, sharding.BATCH_SPEC)))
    assert int(state.step) == steps
    return state.params


@slow
@pytest.mark.parametrize(
    "option",
    [
        dict(optimizer="muon", qk_clip=0.5),
        dict(optimizer="muon", weight_decay=0.3) | GPT_OSS,
        dict(mu_dtype="bfloat16", nu_dtype="bfloat16"),
    ],
    ids=["muon", "muon of experts", "bfloat16"],
)
def test_optimizers_leave_the_padding_and_train_the_model(option):
    config = Config(**UNEVEN | option, mesh="fsdp:8")
    plain = dataclasses.replace(config, mesh="fsdp:1", dim_multiple=1)
    tolerance = 1e-2 if config.nu_dtype == "bfloat16" else 1e-4  # rounding is random, and other for other shapes
    assert_close(without_padding(after_steps(config), config), after_steps(plain), tolerance)


@slow
@pytest.mark.at_most(3)
@pytest.mark.parametrize(
    "option",
    [
        dict(),
        EXPERTS | dict(expert_dim=12, fp8_modules="qkv,out,moe"),
        dict(fp8_granularity="per_axis"),
        dict(fp8_rounding="stochastic"),
        dict(fp8_granularity="block", fp8_block=8, dim_multiple=16),
    ],
    ids=["per tensor", "experts", "per axis", "stochastic", "block"],
)
def test_fp8_leaves_the_padding(option):
    """The model in float32 is near. In blocks, its dims without padding would be refused."""
    config = Config(**UNEVEN | option, fp8="dynamic", mesh="fsdp:2")
    mesh, per_device, place = on_mesh(config, jax.devices()[:2])
    loss, _, grads = per_device(place(init(config)), make_batch(config))
    plain = {name: getattr(Config, name) for name in vars(config) if name.startswith("fp8") or name == "dim_multiple"}
    plain = dataclasses.replace(config, **plain)
    _, per_device, place = on_mesh(plain, jax.devices()[:2])
    expected, _, expected_grads = per_device(place(init(plain)), make_batch(plain))
    assert abs(float(loss) - float(expected)) < 0.02 * float(expected)
    errors = jax.tree.map(relative_error, without_padding(grads, config), expected_grads)
    assert 0.01 < errors.layers.w_o < 0.4


SHARED = dict(num_layers=4, window=8, global_every=2, global_head_dim=32, num_kv_shared_layers=2)
SHARED |= dict(double_wide_mlp=True, ff_dim=200, ple_dim=24, post_norms=True)


@pytest.mark.parametrize(
    "flags", [dict(preset=preset) for preset in ("tiny", "tiny-moe", "tiny-mla")] + [dict(preset="tiny", **SHARED)]
)
def test_initial_values_have_the_variance_of_the_model_and_no_padding(flags):
    config = from_preset(**flags, model_dim=128, dim_multiple=96)
    values = jax.jit(lambda key: initialisation.init_params(config, key))(jax.random.key(0))
    values = without_padding(values, config)
    plain = dataclasses.replace(config, dim_multiple=1)

    def compare(name, shape, weight):
        mean, deviation = initialisation.initial(name, shape, weight, plain)
        array = operator.attrgetter(name if "." in name or weight.dims[0] != "L" else f"layers.{name}")(values)
        assert array.shape == shape and abs(array.mean() - mean) <= deviation / 10
        assert array.std() == pytest.approx(deviation, rel=0.1)

    parameters.tree(plain, compare)


MODEL = dict(vocab_size=32, num_layers=2, model_dim=20, ff_dim=12, num_heads=4, num_kv_heads=2, head_dim=8, seq_len=8)
MOE = dict(num_experts=4, experts_per_token=2, expert_dim=6)
BIASES = dict(qkv_bias=True, output_bias=True, attention_sinks=True, expert_bias=True, swiglu_limit=7.0)
DEEPSEEK = dict(kv_lora_rank=8, q_lora_rank=12, rope_head_dim=4, value_head_dim=6, num_kv_heads=4, norm_eps=1e-6)
DEEPSEEK |= dict(num_shared_experts=2, num_dense_layers=1, router_scores="sigmoid", selection_bias=True, mtp=True)
GEMMA = dict(mlp_activation="gelu", post_norms=True, embedding_scale=True, tied_embeddings=True, window=4)
FAMILIES = {
    "llama": MODEL,
    "gemma2": MODEL | GEMMA | dict(global_every=2, attention_soft_cap=50.0, logit_soft_cap=30.0),
    "gemma4_text": MODEL
    | GEMMA
    | dict(qk_norm=True, value_norm=True, layer_scale=True, attention_scale=1.0, num_layers=4, global_every=2)
    | dict(global_head_dim=16, num_kv_shared_layers=2, double_wide_mlp=True, ple_dim=8)
    | dict(global_rope_theta=1e6, rope_fraction=0.25),
    "qwen3_moe": MODEL | MOE | dict(qk_norm=True),
    "deepseek_v3": MODEL | MOE | DEEPSEEK,
    "gpt_oss": MODEL | MOE | BIASES | dict(rope_type="yarn", rope_scaling=4.0, window=4, global_every=2),
}
MESHES = dict(llama="fsdp:8", deepseek_v3="fsdp:2,expert:4", gpt_oss="fsdp:4,expert:2")


@pytest.mark.parametrize("name", FAMILIES)
def test_published_weights_are_read_into_padding_and_written_without(name, tmp_path, monkeypatch):
    config = Config(**FAMILIES[name], mesh=MESHES.get(name, "fsdp:4,tensor:2"), batch=8, dim_multiple=16)
    plain = dataclasses.replace(config, dim_multiple=1)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: np.float32(rng.integers(-99, 99, a.shape)), parameters.param_shapes(plain))
    weights.export(params, plain, str(tmp_path / "a"), "float32")
    sizes = placement.parse_mesh(config.mesh)
    loaded = weights.load(str(tmp_path / "a"), config, sharding.make_mesh(sizes))
    assert_close(without_padding(loaded, config), params, 1e-12)
    weights.export(loaded, config, str(tmp_path / "b"), "float32")
    monkeypatch.setattr(weights, "BLOCK_BYTES", 1500)  # a checkpoint is read in blocks
    blocks = weights.Blocks(Stored(jax.tree.map(np.asarray, loaded), config))
    weights.write(blocks.piece, blocks.config, str(tmp_path / "c"), "float32", verify=blocks.verify)
    for file in ("config.json", "model.safetensors"):
        written = (tmp_path / "a" / file).read_bytes()
        assert written == (tmp_path / "b" / file).read_bytes() == (tmp_path / "c" / file).read_bytes()


class Stored:
    """Stands for checkpoint.Stored: the arrays of `params`, with the checksums that a save computes."""

    path = "a checkpoint"

    def __init__(self, params, config: Config):
        self.params, self.values = params, dataclasses.asdict(config)
        names, arrays = checksums.named_arrays(dict(params=params))
        self.sums = {name: checksums.checksum_of_block(a, 0) for name, a in zip(names, arrays, strict=True)}

    def read(self, name, starts, sizes):
        places = (slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        return operator.attrgetter(name)(self)[tuple(places)]


def test_shared_experts_are_padded_side_by_side():
    """Two of width 6 are stored as 12 columns where an expert has 8, and 8 devices divide only the latter."""
    config = Config(**SMALL | EXPERTS | dict(expert_dim=6, num_shared_experts=2, dim_multiple=4), mesh="tensor:8")
    sizes = placement.parse_mesh(config.mesh)
    with pytest.raises(ValueError, match=r"num_shared_experts\*expert_dim=12 must be .*; or --dim_multiple=8, which"):
        rules.check(rules.settled(config, sizes), sizes)
    config = dataclasses.replace(config, dim_multiple=8)
    rules.check(rules.settled(config, sizes), sizes)


def test_predictions_count_the_padding_in_time_and_memory_alone():
    config = from_preset("gpt-oss-120b", batch=1280, seq_len=8192, mesh="fsdp:128", dim_multiple=128)
    plain = dataclasses.replace(config, mesh="data:2,fsdp:64", dim_multiple=1)
    with pytest.raises(ValueError, match=r"model_dim=2880 must be .*=128; .* or --dim_multiple=128, which adds zeros"):
        rules.check(dataclasses.replace(config, dim_multiple=1), dict.fromkeys(placement.MESH_AXES, 1) | dict(fsdp=128))
    assert anatomy.sizes(config) == anatomy.sizes(plain) | dict(D=2944, M=2944, F=2944, Z=128 * 2944)
    ours, theirs = (step.predict(run_of(each, *parse_topology("tpu7x:4x4x4"))) for each in (config, plain))
    assert ours.flops_per_step == theirs.flops_per_step
    stored = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(parameters.param_shapes(config)))
    assert transformer.num_params(config) == stored
    assert 1.02 < stored / transformer.num_params(transformer.without_padding(config)) < 1.05
    assert transformer.num_params(transformer.without_padding(config)) == transformer.num_params(plain)
    shown, other = transformer.summary(config), transformer.summary(plain)
    assert (
        shown["counted"] == other["counted"] and shown["predicted"]["state_bytes"] != other["predicted"]["state_bytes"]
    )
    flops = "forward_flops_per_token", "train_flops_per_token", "recomputed_flops_per_token", "recompute_by_policy"
    assert all(shown["predicted"][name] == other["predicted"][name] for name in flops)
