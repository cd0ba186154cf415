"""What is refused: for a run as for its prediction, and no more and no less than what has no program."""

import dataclasses
import functools
import math
import random
from functools import partial

import jax
import pytest
from test_composition import SETTINGS
from test_parallel import SMALL, init, make_batch, on_mesh

import calibration
import config as config_lib
import parameters
import planner
import rules
import sharding
from config import NEEDS, PRESETS, Config, from_preset
from hardware import CHIPS
from placement import MESH_AXES, fill_mesh, parse_mesh
from step import predict
from workload import run_of

LATENT = dict(kv_lora_rank=8, rope_head_dim=2, q_lora_rank=16)
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_dim=16)
MODELS = (
    dict(),
    dict(window=5, global_every=2),
    dict(window=5),
    LATENT,
    EXPERTS | dict(num_shared_experts=1),
    EXPERTS | LATENT | dict(num_dense_layers=1),
)


def refusal(call) -> str:
    """The sentence, or nothing."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def drawn(generator: random.Random) -> tuple[Config, dict[str, int]] | None:
    """A model of odd sizes with flags of any kind on 8 devices; None where the flags alone are refused."""
    of = generator.choice
    sizes = dict.fromkeys(MESH_AXES, 1)
    for _ in range(3):
        sizes[of(MESH_AXES)] *= 2
    names = [name for name in SETTINGS if name not in (*MESH_AXES, "model", "remat", "fp8", "fp8_granularity")]
    flags = {name: of(SETTINGS[name]) for name in generator.sample(names, 5)}
    flags |= dict(pipeline_rounds=2) if flags.get("pipeline_schedule") == "circular" else {}
    flags |= of((dict(), dict(context_heads=2), dict(max_logit=8.0)))
    flags |= of((dict(), dict(fp8="dynamic", fp8_modules=of(("out,mlp", "qkv,out", "mlp")))))
    if "fp8" in flags:
        flags |= of((dict(), dict(fp8_granularity="block", fp8_block=of((4, 8, 16))), dict(fp8_rounding="stochastic")))
    model = of(MODELS)
    flags |= dict(num_layers=of((4, 6)), model_dim=of((32, 64, 96, 36)), ff_dim=of((16, 32, 20)), seq_len=of((24, 20)))
    heads = of(((8, 8), (16, 4), (8, 2), (12, 12)))
    flags |= dict(num_heads=heads[0], num_kv_heads=heads[0] if "kv_lora_rank" in model else heads[1])
    mesh = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    try:
        return Config(**SMALL | dict(mesh=mesh) | model | flags), sizes
    except ValueError:
        return None


@functools.cache
def draws(number: int, seed: int = 0) -> list[tuple[Config, dict[str, int]]]:
    generator = random.Random(seed)
    return [found for _ in range(number) if (found := drawn(generator))]


def test_a_prediction_refuses_what_a_run_refuses():
    verdicts = []
    for config, sizes in draws(2000):
        ours = refusal(partial(rules.check, config, sizes))
        theirs = refusal(lambda config=config: predict(run_of(config, CHIPS["tpu7x"], (2, 2, 1))))
        assert ours == theirs, config
        verdicts.append(bool(ours))
    assert 50 < sum(verdicts) < len(verdicts) - 50


def test_every_shard_is_whole_where_the_rules_say_so_and_only_there():
    """The table of cuts against the layouts in parameters.py."""
    verdicts = []
    for config, sizes in draws(1000, seed=1):
        if config.num_dense_layers and sizes["pipe"] > 1:  # refused for another reason
            continue
        ways = lambda axes, sizes=sizes: math.prod(sizes[axis] for axis in axes)
        cut = all(size % ways(axes) == 0 for _, size, axes in rules.cuts(config, sizes))
        cut &= config.num_layers % sizes["pipe"] == 0
        shapes, specs = parameters.param_shapes(config), parameters.param_specs(config)
        whole = all(
            size % ways(sharding.axes_of((entry,))) == 0
            for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True)
            for size, entry in zip(leaf.shape, spec, strict=True)
        )
        whole &= config.num_experts % sizes["expert"] == 0  # whole experts, of rows cut as one
        assert whole == cut, (config, sizes)
        verdicts.append(whole)
    assert 20 < sum(verdicts) < len(verdicts) - 20


def traced(config: Config) -> None:
    """The gradients' program, but not compiled."""
    mesh, per_device, place = on_mesh(config)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), make_batch(config))
    scaling = parameters.Scaling(calibration.expected(calibration.initial(config), config))
    assert not scaling.amax
    jax.eval_shape(per_device, jax.eval_shape(lambda: init(config)), batch)


SMALL_BLOCKS = SMALL | dict(fp8="dynamic", fp8_granularity="block", num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(mesh="fsdp:4,tensor:2", fp8_block=16), ""),  # of model_dim=64 each axis cuts its own part
        (dict(mesh="fsdp:4,tensor:2", fp8_block=32), "model_dim=64 must be a multiple of fsdp*fp8_block=128"),
        (
            dict(mesh="fsdp:2,tensor:4", fp8_block=16, fp8_modules="mlp"),
            "ff_dim=32 must be a multiple of tensor*fp8_block=64",
        ),
        (dict(mesh="tensor:8", fp8_block=8, fp8_modules="qkv"), "num_kv_heads*head_dim=32 must be a multiple of"),
        (dict(mesh="fsdp:8", fp8_block=8, seq_len=18, loss_chunk=6), "batch*seq_len=288 must be a multiple of"),
        (dict(mesh="fsdp:8", fp8_block=8, microbatches=2), ""),
    ],
    ids=str,
)
def test_blocks_are_whole_where_a_program_can_be_traced_and_only_there(flags, message):
    config = Config(**SMALL_BLOCKS | flags)
    sizes = fill_mesh(parse_mesh(config.mesh), 8)
    found = refusal(lambda: rules.check(config, sizes))
    assert found.startswith(message) and bool(found) == bool(message)
    if message:  # and the program itself could not be made
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="fp8 block of"):
            patch.setattr(rules, "check", lambda *_: None)
            traced(config)
    else:
        traced(config)


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(context_heads=4, seq_len=20, loss_chunk=4), ""),  # whole sequences: no zigzag, no multiple of 8
        (dict(context_heads=2, seq_len=20, loss_chunk=4), ""),  # two parts, and 20 is a multiple of 2 * 2
        (dict(seq_len=20), "seq_len=20 must be a multiple of context/context_heads*2 (context_balance)=8"),
        (dict(seq_len=20, context_balance=False, loss_chunk=5), ""),
        (dict(num_heads=6, num_kv_heads=6, context_heads=2), ""),
        (dict(num_heads=6, num_kv_heads=6, context_heads=4), "num_heads=6 must be a multiple of tensor*4 (exchanged"),
        (dict(num_heads=6, num_kv_heads=6, context_impl="all_to_all"), "num_heads=6 must be a multiple of tensor*4"),
        (dict(num_heads=6, num_kv_heads=6, window=5), ""),  # a halo exchanges no heads
        (dict(context_heads=3), "context_heads=3 must divide the mesh axis context:4"),
        (dict(max_logit=8.0), "max_logit=8.0 needs whole rows of scores"),
        (dict(max_logit=8.0, attention="flash"), "max_logit=8.0 needs whole rows of scores"),
        (dict(max_logit=8.0, window=5, global_every=2), "max_logit=8.0 needs whole rows of scores"),
        (dict(max_logit=8.0, window=5), ""),
        (dict(max_logit=8.0, context_heads=4), ""),
        (dict(max_logit=8.0, context_impl="all_gather"), ""),
        (dict(context_heads=4, context_balance=False), "context_balance=False has no effect: context_heads=4 brings"),
    ],
    ids=str,
)
def test_sequences_are_cut_where_a_program_can_be_traced(flags, message):
    config = Config(**SMALL | dict(num_layers=2, mesh="fsdp:2,context:4") | flags)
    found = refusal(lambda: rules.check(config, fill_mesh(parse_mesh(config.mesh), 8)))
    assert found.startswith(message) and bool(found) == bool(message)
    if not message:
        traced(config)


@pytest.mark.slow
def test_what_is_not_refused_can_be_traced():
    legal = [config for config, sizes in draws(2000, seed=2) if not refusal(partial(rules.check, config, sizes))]
    for config in legal[:24]:
        if config.attention != "flash":
            traced(config)


@pytest.mark.parametrize(
    "flags, mesh, words",
    [
        (dict(num_layers=10), "pipe:4", "num_layers=10 .* 4 \\* 1 = 4.* pipe can be 1, 2, 5, 10"),
        (
            dict(num_layers=10, pipeline_rounds=2),
            "pipe:2",
            "2 \\* 2 = 4.* with pipeline_rounds=2 pipe can be 1, 5",
        ),
        (dict(num_layers=9, pipeline_rounds=2), "pipe:2", "with pipeline_rounds=2 pipe can be nothing"),
    ],
)
def test_stages_of_unequal_layers_are_refused_with_those_that_are_not(flags, mesh, words):
    flags |= dict(pipeline_schedule="circular") if "pipeline_rounds" in flags else {}
    with pytest.raises(ValueError, match=words):
        rules.check(Config(**flags), parse_mesh(mesh))


# -- flags without effect


def test_no_flag_is_idle_by_default():
    """Not in any preset, on any mesh that it can be cut for."""
    for preset in PRESETS:
        for mesh in ("fsdp:1", "fsdp:2", "data:2", "tensor:2", "context:2"):
            rules.check(dataclasses.replace(from_preset(preset), seq_len=4096), parse_mesh(mesh))


def test_every_flag_is_a_field_and_every_reason_can_be_said():
    for names, _, why, _ in (*NEEDS, *rules.NEEDS):
        assert all(hasattr(Config, name) for name in names.split())
        assert why.format_map(vars(Config()))


def test_of_several_reasons_the_first_is_given():
    with pytest.raises(ValueError, match=r"buffer_factor=4\.0 has no effect: num_experts=0 is a dense model"):
        Config(buffer_factor=4.0)
    with pytest.raises(ValueError, match="context_balance=False has no effect: the mesh axis context has size 1"):
        rules.check(Config(context_balance=False), parse_mesh("fsdp:1"))


def test_what_is_changed_takes_along_what_hangs_on_it():
    config = Config(
        fp8="dynamic", fp8_modules="mlp", fp8_rounding="stochastic", remat="custom", remat_tensors="context:device"
    )
    changed = config_lib.changed(config, fp8="none", steps=3, remat="full")
    assert changed == Config(steps=3, remat="full")
    assert config_lib.changed(config, fp8_modules="out") == dataclasses.replace(config, fp8_modules="out")


def test_settled_is_legal_and_the_same_where_nothing_is_idle():
    config = Config(shard_update=True, context_impl="all_gather", buffer_factor=2.0)
    assert rules.settled(config, parse_mesh("data:2")) == Config(shard_update=True)
    both = parse_mesh("data:2,context:2")
    assert rules.settled(config, both) is config


def test_the_planner_says_nothing_that_has_no_effect():
    """A flag for an axis that a mesh lacks is no reason not to propose that mesh; but it is left out."""
    config = from_preset("llama3.1-8b", batch=64, context_impl="all_gather", shard_update=True)
    found = planner.plan(config, CHIPS["tpu7x"], (2, 2, 1))
    for one in found.families:
        rules.check(one.of.config, one.of.sizes)
    assert {one.of.config.context_impl for one in found.families} == {"ring", "all_gather"}
