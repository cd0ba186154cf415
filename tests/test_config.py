"""The flags: each documented, wrong ones answered with the way out, and the presets as published."""

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import command
import config as config_lib
import flags as flags_lib
from config import Config
from flags import PRESETS, from_preset, parse_flags
from predicted import transformer

ROOT = Path(config_lib.__file__).parent
FIELDS = dataclasses.fields(Config)


def parse(*argv: str) -> Config:
    return parse_flags(__file__, argv)


def refused(capsys, *argv: str) -> str:
    """The one line that a wrong command line is answered with."""
    with pytest.raises(SystemExit) as ended:
        command.run(parse, *argv)
    assert ended.value.code == 2
    *usage, line = capsys.readouterr().err.splitlines()
    assert len(usage) <= 1  # argparse's own
    return line


def flags_of(config: Config) -> list[str]:
    flags = {name: value for name, value in dataclasses.asdict(config).items() if not isinstance(value, bool)}
    switches = {name: value for name, value in dataclasses.asdict(config).items() if isinstance(value, bool)}
    return [f"--{n}={v}" for n, v in flags.items()] + [f"--{'' if v else 'no-'}{n}" for n, v in switches.items()]


# -- help


def test_every_field_is_documented_and_in_the_help(capsys):
    documented = {name: text for group in flags_lib._documentation().values() for name, text in group.items()}
    assert list(documented) == [field.name for field in FIELDS]
    assert all(flags_lib._documentation()) and all(documented.values())
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    unwrapped = "".join(shown.split())
    for field in FIELDS:
        assert re.search(rf"^  --{field.name}[ ,\n]", shown, re.MULTILINE), field.name
        assert "".join(f"{documented[field.name]} [{field.default!r}]".split()) in unwrapped
    assert all(name in shown for name in (*PRESETS, *config_lib.REMAT_POLICIES, *config_lib.ACTIVATIONS))
    assert flags_lib.ABOUT_FLAGS in shown


@pytest.mark.parametrize("program", ["flags.py", "train.py"])
def test_help_answers_at_once(program):
    """Under 2 s, and without jax: what takes the time is its import."""
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, ROOT / program, "--help"], capture_output=True, text=True)
        seconds.append(time.perf_counter() - begun)
        assert done.returncode == 0 and "--num_kv_heads" in done.stdout and not done.stderr
    assert min(seconds) < 2
    command = [sys.executable, "-X", "importtime", ROOT / program, "--help"]
    imported = re.findall(r"\|\s*(\S+)$", subprocess.run(command, capture_output=True, text=True).stderr, re.MULTILINE)
    assert "argparse" in imported and not {"jax", "numpy", "optax"} & set(imported)


def test_config_prints_what_the_flags_make():
    command = [sys.executable, ROOT / "flags.py", "--preset=llama3.1-8b", "--batch=6", "--no-prefetch"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    printed = dict(re.fullmatch(r"(\w+) += (.+)", line).groups() for line in lines)
    config = from_preset("llama3.1-8b", batch=6, prefetch=False)
    assert printed == {name: repr(value) for name, value in dataclasses.asdict(config).items()}


# -- from flags to a Config


def test_no_flags_are_the_defaults():
    assert parse() == Config() == from_preset("tiny")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_field_can_be_set_by_its_flag(preset):
    assert parse(f"--preset={preset}") == from_preset(preset)
    assert parse(*flags_of(from_preset(preset))) == from_preset(preset)
    assert parse(*flags_of(dataclasses.replace(Config(), preset=preset))) == dataclasses.replace(
        Config(), preset=preset
    )


@pytest.mark.parametrize("name", [field.name for field in FIELDS if isinstance(field.default, bool)])
def test_switches(name):
    of_mixtures = (
        "expert_bias",
        "expert_norms",
        "expert_scale",
        "renormalise",
        "selection_bias",
    )  # a dense model refuses them
    needed = ["--preset=mixtral-8x7b"] if name in of_mixtures else []
    needed = ["--preset=gemma4-e2b"] if name == "double_wide_mlp" else needed
    assert getattr(parse(*needed, f"--{name}"), name) is True
    assert getattr(parse(*needed, f"--no-{name}"), name) is False
    assert getattr(parse(*needed, f"--{name}", f"--no-{name}"), name) is False


def test_flags_stand_above_the_preset_in_any_order():
    assert parse("--batch=3", "--preset=llama3.1-8b").batch == 3
    assert parse("--preset=llama3.1-8b", "--batch=3").batch == 3
    assert parse("--batch", "3", "--learning_rate", "1e-4").learning_rate == 1e-4


@pytest.mark.parametrize(
    "flag, way_out",
    [
        ("--presett=tiny", "there is no flag '--presett=tiny'; did you mean --preset or --prefetch?"),
        (
            "--num_layer=3",
            "there is no flag '--num_layer=3'; did you mean --num_layers, --num_dense_layers or",
        ),
        ("--lerning-rate=1", "did you mean --learning_rate?"),
        ("--no-prefetchh", "did you mean --no-prefetch or --prefetch?"),
        ("--batch_size=3", "did you mean --batch or --vocab_size?"),
        ("--warmup=3", "did you mean --warmup_ratio?"),  # and no abbreviations
        ("--zzz", "there is no flag '--zzz'; --help has them all"),
        ("stray", "'stray' is one argument too many"),
        (
            "--preset=llama3-8b",
            "preset='llama3-8b' does not exist; did you mean llama3.1-8b, llama3.2-1b or llama3.1-70b",
        ),
        ("--preset=qwen2-7b", "preset='qwen2-7b' does not exist; did you mean qwen2.5-7b"),
        ("--preset=zzz", "preset='zzz' does not exist; there are tiny, tiny-moe, tiny-mla"),
        ("--steps=many", "argument --steps: invalid int value: 'many'"),
        ("--steps=1.5", "argument --steps: invalid int value: '1.5'"),
        ("--learning_rate=high", "argument --learning_rate: invalid float value: 'high'"),
        ("--steps=0", "steps=0 must be at least 1"),
        ("--remat=some", "remat='some' is not one of none, full, save_out_proj"),
    ],
)
def test_a_wrong_flag_is_answered_with_the_way_out(capsys, flag, way_out):
    assert way_out in refused(capsys, flag)


def test_train_refuses_a_wrong_flag_before_it_loads_jax():
    command = [sys.executable, "-X", "importtime", ROOT / "train.py", "--optimiser=sgd"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "train.py: error: there is no flag '--optimiser=sgd'; did you mean --optimizer" in done.stderr
    assert not re.search(r"\| +jax$", done.stderr, re.MULTILINE)


TWO_KINDS = dict(num_layers=6, window=8, global_every=3, global_head_dim=32)
AT_LEAST_1 = (
    "steps batch seq_len vocab_size num_layers model_dim ff_dim num_heads num_kv_heads head_dim "
    "microbatches log_every max_skipped save_every keep_checkpoints"
).split()


@pytest.mark.parametrize(
    "wrong, message",
    [({name: value}, f"{name}={value} must be at least 1") for name in AT_LEAST_1 for value in (0, -3)]
    + [
        ({name: -1}, f"{name}=-1 must be at least 0")
        for name in "window loss_chunk global_every warmup_ratio eval_every eval_batches sample".split()
    ]
    + [
        (dict(learning_rate=float("nan")), "learning_rate=nan must be at least 0"),
        (dict(learning_rate=float("inf")), "learning_rate=inf must be at least 0, and finite"),
        (dict(seed=2**32), "seed=4294967296 must be under 2^32"),
        (dict(steps=2**31), "steps=2147483648 must be under 2^31"),
        (dict(clip_norm=-1.0), "clip_norm=-1.0 must be at least 0"),
        (dict(seed=-1), "seed=-1 must be at least 0"),
        (dict(rope_scaling=0.0), "rope_scaling=0.0 must be at least 1"),
        (dict(beta2=1.0), "beta2=1.0 must be under 1"),
        (dict(warmup_ratio=1.0), "warmup_ratio=1.0 must be under 1"),
        (dict(num_processes=2), "num_processes and process_id need the address"),
        (dict(process_id=0), "num_processes and process_id need the address"),
        (dict(coordinator="localhost"), "coordinator='localhost' has no port: it must be HOST:PORT"),
        (dict(coordinator="localhost:x"), "coordinator='localhost:x' has no port"),
        (dict(coordinator=":9911"), "coordinator=':9911' has no port"),
        (dict(coordinator="a:70000"), "coordinator='a:70000' has no port"),
        (dict(coordinator="a:1", num_processes=2), "process_id=-1 must be from 0 to under num_processes="),
        (dict(profile_steps="0:3"), "profile_steps='0:3' must be FIRST:LAST, 1 <= FIRST"),
        (
            dict(profile_dir="d", steps=40, profile_steps="41:42"),
            "profile_steps='41:42' is past the end: --profile_steps=1:40",
        ),
        (dict(num_heads=6, num_kv_heads=4), "num_heads=6 must be a multiple of num_kv_heads=4"),
        (dict(num_heads=2, num_kv_heads=4), "num_heads=2 must be a multiple of num_kv_heads=4"),
        (dict(head_dim=7), "head_dim=7 must be even"),
        (dict(num_experts=-1), "num_experts=-1 must be at least 0"),
        (dict(num_experts=4, expert_dim=8), "experts_per_token=0 must be from 1 to num_experts=4"),
        (dict(num_experts=4, experts_per_token=5, expert_dim=8), "experts_per_token=5 must be from 1 to num_experts=4"),
        (dict(num_experts=4, experts_per_token=1), "expert_dim=0 must be at least 1 with num_experts=4"),
        (
            dict(num_experts=4, experts_per_token=1, expert_dim=8, num_dense_layers=3),
            "num_dense_layers=3 must be under num_layers=3",
        ),
        (
            dict(experts_per_token=2),
            "experts_per_token=2 has no effect: num_experts=0 is a dense model",
        ),
        (dict(expert_dim=8), "expert_dim=8 has no effect: num_experts=0 is a dense model"),
        (
            dict(num_shared_experts=1),
            "num_shared_experts=1 has no effect: num_experts=0 is a dense model",
        ),
        (dict(num_dense_layers=1), "num_dense_layers=1 has no effect: num_experts=0 is a dense model"),
        (dict(expert_bias=True), "expert_bias=True has no effect: num_experts=0 is a dense model"),
        (dict(moe_impl="capacity"), "moe_impl=capacity has no effect: num_experts=0 is a dense model. Use"),
        (dict(num_experts=4, experts_per_token=1, expert_dim=8, moe_impl="dense"), "moe_impl='dense' is not one of"),
        (
            dict(num_experts=4, experts_per_token=1, expert_dim=8, router_groups=3),
            "router_groups=3 must divide num_experts=4, and router_groups_kept=1 be no more",
        ),
        (
            dict(num_experts=8, experts_per_token=3, expert_dim=8, router_groups=4),
            "router_groups_kept=1 of 4 groups have fewer than experts_per_token=3 experts",
        ),
        (
            dict(num_experts=4, experts_per_token=1, expert_dim=8, capacity_factor=0.0, moe_impl="capacity"),
            "capacity_factor=0 admits no token",
        ),
        (dict(kv_lora_rank=-1), "kv_lora_rank=-1 must be at least 0"),
        (dict(q_lora_rank=8), "q_lora_rank=8 has no effect: kv_lora_rank=0 is no latent attention"),
        (dict(rope_head_dim=8), "rope_head_dim=8 has no effect: kv_lora_rank=0 is no latent attention"),
        (dict(value_head_dim=8), "value_head_dim=8 has no effect: kv_lora_rank=0 is no latent attention"),
        (dict(kv_lora_rank=8), "rope_head_dim=0 must be even and at least 2 with kv_lora_rank=8"),
        (dict(kv_lora_rank=8, rope_head_dim=3), "rope_head_dim=3 must be even and at least 2 with kv_lora_rank=8"),
        (
            dict(kv_lora_rank=8, rope_head_dim=4, num_kv_heads=4),
            "num_kv_heads=4 must be num_heads=8 with kv_lora_rank=8",
        ),
        (TWO_KINDS | dict(num_layers=7), "num_layers=7 must be a multiple of global_every=3"),
        (TWO_KINDS | dict(global_every=1), "num_layers=6 must be a multiple of global_every=1, which is 2"),
        (TWO_KINDS | dict(global_head_dim=7), "global_head_dim=7 must be even"),
        (TWO_KINDS | dict(global_kv_heads=3), "num_heads=8 must be a multiple of global_kv_heads=3"),
        (TWO_KINDS | dict(mtp=True), "mtp=True goes with a single stack of layers"),
        (TWO_KINDS | dict(fp8="delayed"), "fp8=delayed goes with a single stack of layers"),
        (dict(rope_fraction=1.5), "rope_fraction=1.5 must be at most 1"),
        (dict(kv_lora_rank=8, rope_head_dim=4, qk_norm=True), "qk_norm goes with kv_lora_rank=0 only"),
        (dict(kv_lora_rank=8, rope_head_dim=4, qkv_bias=True), "qkv_bias goes with kv_lora_rank=0 only"),
        (
            dict(global_every=2),
            "global_every=2 has no effect: window=0 lets every layer see all. Use --window=64, or leave",
        ),
        (dict(dtype="float16"), "dtype='float16' is not one of float32, bfloat16"),
        (dict(mu_dtype="int8"), "mu_dtype='int8' is not one of float32, bfloat16"),
        (dict(optimizer="adam"), "optimizer='adam' is not one of adamw, adafactor, sgd"),
        (
            dict(remat_tensors="context:device"),
            "remat_tensors=context:device has no effect: remat=none has no use for it. Use --remat=custom, or leave "
            "remat_tensors at its default, ''",
        ),
        (
            dict(remat="custom", remat_tensors="contxt:device"),
            "remat_tensors: there is no activation 'contxt'; did you mean context?",
        ),
        (
            dict(remat="custom", remat_tensors="context:host"),
            "remat_tensors: context:'host' is not one of device, remat, offload",
        ),
        (
            dict(remat="custom", remat_tensors="decoder_layer_input:remat"),
            "remat_tensors: decoder_layer_input cannot be recomputed",
        ),
        (
            dict(remat="custom", remat_tensors="context:offload:0.5"),
            "remat_tensors: context:offload:0.5: only decoder_layer_input:offload:0.5 takes a share",
        ),
        (
            dict(remat="custom", remat_tensors="decoder_layer_input:offload:1.5"),
            "remat_tensors: decoder_layer_input:offload:1.5: only decoder_layer_input:offload:0.5 takes a share",
        ),
        (
            dict(remat="custom", remat_tensors="decoder_layer_input:offload:0.0"),
            "remat_tensors: decoder_layer_input:off",
        ),
        (dict(remat="custom", remat_tensors="context:offload:"), "remat_tensors: context:offload:: only"),
        (dict(fp8="e4m3"), "fp8='e4m3' is not one of none, dynamic, static"),
        (dict(remat=""), "remat='' is not one of none, full, save_out_proj"),
        (dict(profile_steps="5"), "profile_steps='5' must be FIRST:LAST"),
        (dict(profile_steps="5:4"), "profile_steps='5:4' must be FIRST:LAST"),
        (dict(profile_steps="a:b"), "profile_steps='a:b' must be FIRST:LAST"),
        (dict(profile_steps="3:5:7"), "profile_steps='3:5:7' must be FIRST:LAST"),
    ],
)
def test_wrong_values(wrong, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Config(**wrong)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        from_preset("tiny", **wrong)


MIXED = dict(num_experts=8, experts_per_token=2, expert_dim=8)
LATENT = dict(kv_lora_rank=8, rope_head_dim=2)


@pytest.mark.parametrize(
    "flags, taken, refused",
    [
        (dict(fp8="dynamic", num_layers=4), dict(fp8_skip_layers=1), dict(fp8_skip_layers=2)),
        (dict(fp8="dynamic", num_layers=5), dict(fp8_skip_layers=2), dict(fp8_skip_layers=3)),
        (MIXED, dict(experts_per_token=8), dict(experts_per_token=9)),
        (MIXED | dict(num_layers=4), dict(num_dense_layers=3), dict(num_dense_layers=4)),
        (MIXED | dict(router_groups=4, router_groups_kept=2), dict(experts_per_token=4), dict(experts_per_token=5)),
        (MIXED | dict(router_groups=4), dict(router_groups_kept=3), dict(router_groups_kept=5)),
        (LATENT, dict(rope_head_dim=4), dict(rope_head_dim=5)),
        ({}, dict(rope_scaling=1.0), dict(rope_scaling=0.99)),
        ({}, dict(beta1=0.0), dict(beta1=1.0)),
        ({}, dict(beta2=0.999), dict(beta2=1.0)),
        ({}, dict(warmup_ratio=0.99), dict(warmup_ratio=1.0)),
        ({}, dict(head_dim=2), dict(head_dim=1)),
        (dict(num_processes=2, process_id=0), dict(coordinator="h:65535"), dict(coordinator="h:65536")),
        (dict(num_processes=2, process_id=0), dict(coordinator="h:1"), dict(coordinator="h:0")),
        (dict(num_processes=2, coordinator="h:1"), dict(process_id=1), dict(process_id=2)),
        (dict(profile_dir="d", steps=3), dict(profile_steps="3:9"), dict(profile_steps="4:9")),
        # Each of several reasons alone.
        (MIXED | dict(fp8="dynamic"), dict(fp8="fixed"), dict(fp8="static")),
        (MIXED | dict(fp8="dynamic"), {}, dict(fp8="delayed")),
        (MIXED | dict(fp8="dynamic"), {}, dict(fp8="calibrate")),
        (MIXED | dict(fp8="dynamic", num_layers=8), {}, dict(fp8_skip_layers=1)),
        (MIXED | dict(fp8="dynamic", fp8_granularity="block"), dict(fp8_modules="out,mlp"), {}),
        (dict(fp8="dynamic", fp8_granularity="per_axis"), dict(fp8="calibrate"), dict(fp8="fixed")),
        (dict(fp8="dynamic", fp8_granularity="per_axis"), {}, dict(fp8="static")),
        (dict(fp8="dynamic", fp8_granularity="per_axis"), {}, dict(fp8="delayed")),
        (LATENT | dict(fp8="dynamic"), dict(fp8_modules="out,mlp"), dict(fp8_modules="out,qkv")),
        (dict(fp8="dynamic"), {}, dict(collective_matmul=True)),
        (dict(context_heads=2), {}, dict(context_impl="all_gather")),
        (dict(context_heads=2), {}, dict(context_impl="all_to_all")),
        (dict(context_heads=2), {}, dict(collectives="ring")),
        (dict(pipeline_schedule="circular", pipeline_rounds=2), {}, dict(pipeline_rounds=1)),
        (dict(pipeline_schedule="circular", pipeline_rounds=2), {}, dict(pipeline_schedule="gpipe")),
        (dict(offload_optimizer=True), dict(optimizer="sgd", weight_decay=0.1), dict(optimizer="adafactor")),
    ],
    ids=lambda flags: ",".join(f"{name}={value}" for name, value in flags.items()) or "-",
)
def test_the_last_that_is_taken_and_the_first_that_is_not(flags, taken, refused):
    Config(**flags | taken)
    with pytest.raises(ValueError, match="|".join(refused or flags)):
        Config(**flags | refused)


def test_profile_range():
    assert Config(profile_dir="d", profile_steps="3:12").profile_range == (3, 12)
    assert Config(profile_dir="d", profile_steps="4:4").profile_range == (4, 4)


def test_places_of_activations():
    """All three projections go by one name; the log-sum-exp goes where attention's result goes, if nothing is said."""
    places = lambda tensors: Config(remat="custom", remat_tensors=tensors).remat_places
    qkv = dict.fromkeys(("query_proj", "key_proj", "value_proj"), "offload")
    assert places("qkv_proj:offload") == {"decoder_layer_input": "device"} | qkv
    assert places("context:device")["log_sum_exp"] == "device"
    assert places("context:device,log_sum_exp:remat")["log_sum_exp"] == "remat"


def test_a_share_of_the_input_goes_to_the_host():
    half = Config(remat="custom", remat_tensors="mlp_up:device, decoder_layer_input:offload:0.5")
    assert half.share_on_host == 0.5
    for tensors in ("mlp_up:device", f"{half.remat_tensors},decoder_layer_input:offload"):  # the last one counts
        assert Config(remat="custom", remat_tensors=tensors).share_on_host == 1
    places = {"decoder_layer_input": "offload", config_lib.INPUT_ON_DEVICE: "device", "mlp_up": "device"}
    assert half.remat_places == places


# -- presets


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_build(preset):
    config = from_preset(preset)
    assert config.preset == preset
    assert {name: getattr(config, name) for name in PRESETS[preset]} == PRESETS[preset]


def test_from_preset_overrides():
    config = from_preset("llama3.1-70b", num_layers=2, mesh="data:2", prefetch=False)
    assert (config.num_layers, config.mesh, config.prefetch, config.model_dim) == (2, "data:2", False, 8192)
    assert from_preset("llama3.1-70b") == dataclasses.replace(config, num_layers=80, mesh="fsdp:*", prefetch=True)
    with pytest.raises(
        ValueError, match=r"^there is no field 'num_layer'; did you mean num_layers, num_dense_layers or"
    ):
        from_preset("tiny", num_layer=2)
    with pytest.raises(ValueError, match=re.escape("preset='llama3.1-80b' does not exist; did you mean llama3.1-")):
        from_preset("llama3.1-80b")


@pytest.mark.parametrize(
    "preset, num_params",
    [
        ("llama2-70b", 68_976_648_192),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_presets_have_the_published_size(preset, num_params):
    """The counts of the released weights, as their safetensors indices give them."""
    assert transformer.num_params(from_preset(preset)) == num_params


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = {name for name, each in config_lib.FLAGS.items() if each.path is not None}
    for name in paths:
        needs = dict(fp8="static", dtype="bfloat16") if name == "fp8_scales" else {}
        assert getattr(Config(**{name: "~/x"}, **needs), name) == "/home/me/x"
    named = {field.name for field in FIELDS if re.search("_(dir|file|cache)$", field.name)}
    assert named | {"fp8_scales", "weights"} == paths  # --corpus may have several: data_mixtures.py
    assert Config(checkpoint_dir="gs://bucket/run").checkpoint_dir == "gs://bucket/run"
