"""Refusals: the same for a run as for its prediction, no more and no less than what cannot run."""

import dataclasses
import functools
import math
import random
import re
from functools import partial

import jax
import pytest
from support import SMALL, init, make_batch, on_mesh

import calibration
import config as config_lib
import parameters
import rules
import sharding
from benchmarks.composition import SETTINGS
from config import Config
from flags import PRESETS, from_preset
from hardware import CHIPS
from placement import MESH_AXES, fill_mesh, parse_mesh
from predicted import planner
from predicted.step import predict
from predicted.workload import run_of

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
    choose = generator.choice
    sizes = dict.fromkeys(MESH_AXES, 1)
    for _ in range(3):
        sizes[choose(MESH_AXES)] *= 2
    names = [name for name in SETTINGS if name not in (*MESH_AXES, "model", "remat", "fp8", "fp8_granularity")]
    flags = {name: choose(SETTINGS[name]) for name in generator.sample(names, 5)}
    flags |= dict(pipeline_rounds=2) if flags.get("pipeline_schedule") == "circular" else {}
    flags |= choose((dict(), dict(context_heads=2), dict(max_logit=8.0)))
    flags |= choose((dict(), dict(fp8="dynamic", fp8_modules=choose(("out,mlp", "qkv,out", "mlp")))))
    if "fp8" in flags:
        flags |= choose(
            (dict(), dict(fp8_granularity="block", fp8_block=choose((4, 8, 16))), dict(fp8_rounding="stochastic"))
        )
    model = choose(MODELS)
    flags |= dict(
        shard_update=choose((False, True)),
        num_layers=choose((4, 6)),
        model_dim=choose((32, 64, 96, 36)),
        ff_dim=choose((16, 32, 20)),
        seq_len=choose((24, 20)),
    )
    heads = choose(((8, 8), (16, 4), (8, 2), (12, 12)))
    flags |= dict(num_heads=heads[0], num_kv_heads=heads[0] if "kv_lora_rank" in model else heads[1])
    mesh = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    try:
        return Config(**SMALL | dict(mesh=mesh) | model | flags), sizes
    except ValueError:
        return None


@functools.cache
def draws(number: int, seed: int = 0) -> list[tuple[Config, dict[str, int]]]:
    generator = random.Random(seed)
    return [pair for _ in range(number) if (pair := drawn(generator))]


@pytest.mark.slow
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
        divides = all(
            size % ways(sharding.axes_of((entry,))) == 0
            for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True)
            for size, entry in zip(leaf.shape, spec, strict=True)
        )
        divides &= config.num_experts % sizes["expert"] == 0  # whole experts, of rows cut as one
        assert divides == cut, (config, sizes)
        verdicts.append(divides)
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
    error = refusal(lambda: rules.check(config, sizes))
    assert error.startswith(message) and bool(error) == bool(message)
    if message:  # and the program itself could not be made
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="fp8 blocks of"):
            patch.setattr(rules, "check", lambda *_: None)
            traced(config)
    else:
        traced(config)


def legal(**flags):
    """A case that is refused by no rule. To trace it takes a while."""
    return pytest.param(flags, "", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(context_heads=4), ""),
        legal(context_heads=4, seq_len=20, loss_chunk=4),  # whole sequences: no zigzag, no multiple of 8
        legal(context_heads=2, seq_len=20, loss_chunk=4),  # two parts, and 20 is a multiple of 2 * 2
        (dict(seq_len=20), "seq_len=20 must be a multiple of context*2 (context_balance)=8"),
        legal(seq_len=20, context_balance=False, loss_chunk=5),
        legal(num_heads=6, num_kv_heads=6, context_heads=2),
        (dict(num_heads=6, num_kv_heads=6, context_heads=4), "num_heads=6 must be a multiple of tensor*4 (exchanged"),
        (dict(num_heads=6, num_kv_heads=6, context_impl="all_to_all"), "num_heads=6 must be a multiple of tensor*4"),
        legal(num_heads=6, num_kv_heads=6, window=5),  # a halo exchanges no heads
        (dict(context_heads=3), "context_heads=3 must divide the mesh axis context:4"),
        (dict(max_logit=8.0), "max_logit=8.0 needs whole rows of scores"),
        (dict(max_logit=8.0, attention="flash"), "max_logit=8.0 needs whole rows of scores"),
        (dict(max_logit=8.0, window=5, global_every=2), "max_logit=8.0 needs whole rows of scores"),
        legal(max_logit=8.0, window=5),
        legal(max_logit=8.0, context_heads=4),
        legal(max_logit=8.0, context_impl="all_gather"),
        legal(context_heads=4, context_balance=False),
    ],
    ids=str,
)
def test_sequences_are_cut_where_a_program_can_be_traced(flags, message):
    config = Config(**SMALL | dict(num_layers=2, mesh="fsdp:2,context:4") | flags)
    error = refusal(lambda: rules.check(config, fill_mesh(parse_mesh(config.mesh), 8)))
    assert error.startswith(message) and bool(error) == bool(message)
    if not message:
        traced(config)


@pytest.mark.slow
def test_what_is_not_refused_can_be_traced():
    legal = [config for config, sizes in draws(2000, seed=2) if not refusal(partial(rules.check, config, sizes))]
    for config in legal[:12]:
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


# -- the last size that is taken, and the first that is not
# Meshes of 6, 12 or 16 devices, so that no size fits because it fits 8.

ROUND = dict(num_layers=12, model_dim=72, ff_dim=36, num_heads=12, num_kv_heads=6, head_dim=4, vocab_size=252)
ROUND |= dict(batch=24, seq_len=24, loss_chunk=8)
MIXED = dict(num_experts=6, experts_per_token=2, expert_dim=12)
CIRCULAR = dict(pipeline_schedule="circular", pipeline_rounds=2)
FP8 = dict(fp8="dynamic")


@pytest.mark.parametrize(
    "mesh, flags, taken, refused, message",
    [
        # Tokens of a device, which every axis that cuts them and every microbatch makes fewer: 24 * 24 / 24.
        *(
            (mesh, MIXED | flags, dict(moe_parts=24), dict(moe_parts=48), "tokens of a device=24 must be a multiple")
            for mesh, flags in (
                ("data:2,expert:2", dict(microbatches=6)),
                ("fsdp:12,expert:2", {}),
                ("context:4,expert:2", dict(microbatches=3)),
            )
        ),
        # Stages.
        ("pipe:3", {}, dict(num_layers=9), dict(num_layers=10), "num_layers=10 must be a multiple of pipe"),
        ("pipe:3", CIRCULAR | dict(microbatches=3), dict(num_layers=6), dict(num_layers=9), "num_layers=9 must"),
        ("pipe:3", CIRCULAR, dict(microbatches=6), dict(microbatches=4), "microbatches=4 must be a multiple of pipe=3"),
        ("pipe:3", dict(microbatches=4), {}, MIXED | dict(num_dense_layers=1), "num_dense_layers=1: the stages"),
        (
            "pipe:3",
            dict(window=5, global_every=4, microbatches=4),
            {},
            dict(global_head_dim=8),
            "global_head_dim=8 and",
        ),
        ("pipe:3", dict(remat="minimal_offloaded"), dict(remat_stage=True), {}, "remat=minimal_offloaded offloads"),
        *(
            (mesh, dict(window=5), dict(global_every=taken), dict(global_every=5), f"pipe * pipeline_rounds = {stages}")
            for mesh, stages in (("pipe:3,context:2", "3 * 1 leaves 4"), ("pipe:2,context:3", "2 * 1 leaves 6"))
            for taken in ((2, 4) if "pipe:3" in mesh else (2, 3, 6))
        ),
        ("pipe:3", dict(window=5), dict(global_every=5), dict(num_layers=10), "num_layers=10 must be"),
        # Dims of the model.
        (
            "tensor:2,fsdp:3",
            {},
            dict(model_dim=66),
            dict(model_dim=64),
            "model_dim=64 must be a multiple of tensor*fsdp",
        ),
        ("data:3,fsdp:2", dict(shard_update=True), dict(model_dim=66), dict(model_dim=64), "model_dim=64 must be"),
        (
            "data:3,fsdp:2",
            {},
            dict(model_dim=64),
            dict(model_dim=63),
            "model_dim=63 must be a multiple of tensor*fsdp=2",
        ),
        ("tensor:3", {}, dict(vocab_size=255), dict(vocab_size=256), "vocab_size=256 must be a multiple of tensor=3"),
        ("tensor:3", {}, dict(num_heads=18), dict(num_heads=16, num_kv_heads=4), "num_heads=16 must be a multiple of"),
        ("tensor:3", {}, dict(num_kv_heads=3), dict(num_kv_heads=2), "num_kv_heads=2 must be a multiple of tensor=3"),
        (
            "tensor:3",
            dict(window=5, global_every=3),
            dict(global_kv_heads=3),
            dict(global_kv_heads=2),
            "global_kv_heads=2 must be",
        ),
        ("tensor:3", {}, dict(ff_dim=33), dict(ff_dim=32), "ff_dim=32 must be a multiple of tensor=3"),
        ("tensor:3", MIXED, dict(ff_dim=32), dict(ff_dim=32, num_dense_layers=1), "ff_dim=32 must be"),
        ("tensor:3", MIXED, dict(expert_dim=15), dict(expert_dim=16), "expert_dim=16 must be a multiple of tensor=3"),
        ("expert:3", MIXED, dict(num_experts=9), dict(num_experts=8), "num_experts=8 must be a multiple of expert=3"),
        *(
            (mesh, flags | dict(num_kv_heads=12, rope_head_dim=2, kv_lora_rank=12, q_lora_rank=6), {}, wrong, message)
            for mesh, flags in (("fsdp:3", {}), ("fsdp:1,data:3", dict(shard_update=True)))
            for wrong, message in (
                (dict(kv_lora_rank=8), "kv_lora_rank=8 must be a multiple of fsdp"),
                (dict(q_lora_rank=8), "q_lora_rank=8 must be a multiple of fsdp"),
            )
        ),
        ("data:3,fsdp:2", dict(microbatches=2), dict(batch=36), dict(batch=42), "batch=42 must be a multiple of"),
        # FP8 in a pipeline: each of the three alone.
        *(
            ("pipe:3", FP8, taken, wrong, "with pipe:3 stages fp8 is dynamic or fixed, rounds to nearest, and skips")
            for taken, wrong in (
                (dict(fp8="fixed"), dict(fp8="delayed")),
                (dict(fp8_rounding="nearest"), dict(fp8_rounding="stochastic")),
                (dict(fp8_skip_layers=0), dict(fp8_skip_layers=1)),
            )
        ),
        ("fsdp:2", FP8, dict(fp8_modules="mlp"), dict(fp8_modules="moe"), "fp8_modules=moe: this model has no such"),
        # Sequences.
        (
            "context:3",
            {},
            dict(seq_len=30),
            dict(seq_len=27),
            "seq_len=27 must be a multiple of context*2 (context_balance)=6",
        ),
        ("context:3", dict(context_balance=False), dict(seq_len=27), dict(seq_len=28), "seq_len=28 must be"),
        ("context:3", dict(window=5), dict(seq_len=27), dict(seq_len=28), "seq_len=28 must be a multiple of context=3"),
        ("context:3", dict(window=5, global_every=2), dict(seq_len=27), dict(seq_len=28), "seq_len=28 must be"),
        ("context:6", {}, dict(context_heads=3), dict(context_heads=4), "context_heads=4 must divide"),
        ("context:3", dict(context_impl="all_to_all"), {}, dict(num_heads=10, num_kv_heads=5), "num_heads=10 must be"),
        (
            "context:3",
            dict(context_impl="all_gather"),
            dict(num_heads=10, num_kv_heads=5),
            dict(num_heads=7),
            "num_heads",
        ),
        # An axis for a model that has no use for it.
        ("expert:3", {}, MIXED, {}, "mesh axis expert:3 is for mixtures of experts, and num_experts is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" in value and " " not in value else "",
)
def test_the_last_that_is_taken_and_the_first_that_is_not(mesh, flags, taken, refused, message):
    sizes = parse_mesh(mesh)
    rules.check(Config(**ROUND | flags | taken), sizes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        rules.check(Config(**ROUND | flags | refused), sizes)


@pytest.mark.parametrize(
    "flag, mesh, other",
    [
        ("collectives", "data:3", "fsdp:1"),
        ("collective_matmul", "tensor:3", "fsdp:3"),
        ("prefetch", "fsdp:3", "tensor:3"),
        ("double_buffer", "fsdp:3", "data:3"),
        ("shard_update", "data:3", "fsdp:3"),
        ("context_impl", "context:3", "fsdp:3"),
        ("context_heads", "context:3", "fsdp:3"),
        ("context_balance", "context:3", "fsdp:3"),
        ("pipeline_schedule", "pipe:3", "fsdp:3"),
        ("remat_stage", "pipe:3", "fsdp:3"),
        ("buffer_factor", "expert:3", "fsdp:3"),
        ("moe_parts", "expert:3", "fsdp:3"),
    ],
)
def test_a_flag_of_an_axis_is_taken_with_it_and_noted_without(flag, mesh, other):
    value = dict(
        collectives="ring", double_buffer=True, context_impl="all_gather", context_heads=3, pipeline_schedule="gpipe"
    )
    value |= dict(buffer_factor=3.0, moe_parts=2, prefetch=False, context_balance=False)
    config = Config(**ROUND | (MIXED if flag in ("buffer_factor", "moe_parts") else {}) | {flag: value.get(flag, True)})
    rules.check(config, parse_mesh(mesh))
    assert rules.settled(config, parse_mesh(mesh)) is config
    assert not rules.notes(config, parse_mesh(mesh))
    rules.check(config, parse_mesh(other))
    notes = rules.notes(config, parse_mesh(other))
    assert [note.partition("=")[0] for note in notes] == [flag] * (flag not in ("prefetch", "context_balance"))
    assert rules.settled(config, parse_mesh(other)) == dataclasses.replace(config, **{flag: getattr(Config, flag)})


# -- flags without effect


def test_no_flag_is_idle_by_default():
    """Not in any preset, on any mesh that it can be sharded over; one key/value head cannot be, over tensor."""
    for config in map(from_preset, PRESETS):
        meshes = ["fsdp:1", "fsdp:2", "data:2", "context:2", *(["tensor:2"] if config.num_kv_heads > 1 else [])]
        for mesh in meshes:
            rules.check(dataclasses.replace(config, seq_len=4096), parse_mesh(mesh))


def test_every_reason_can_be_said():
    for each in config_lib.FLAGS.values():
        for need in each.needs:
            assert need.why.format_map(vars(Config()))


def test_of_several_reasons_the_first_is_given():
    with pytest.raises(ValueError, match=r"buffer_factor=4\.0 has no effect: num_experts=0 is a dense model"):
        Config(buffer_factor=4.0)
    (note,) = rules.notes(Config(shard_update=True, context_balance=False), parse_mesh("fsdp:2"))
    assert note.startswith("shard_update=True has no effect: the mesh axis data has size 1")


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


@pytest.mark.slow
def test_the_planner_says_nothing_that_has_no_effect():
    """A flag for an axis that a mesh lacks is no reason not to propose that mesh; but it is left out."""
    config = from_preset("llama3.1-8b", batch=64, context_impl="all_gather", shard_update=True)
    plan = planner.plan(config, CHIPS["tpu7x"], (2, 2, 1))
    for one in plan.families:
        rules.check(one.run.config, one.run.sizes)
    assert {one.run.config.context_impl for one in plan.families} == {"ring", "all_gather"}
