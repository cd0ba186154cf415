"""Tests of compiled/results.py: stored under the flags that determine the program, and close to predictions."""

import dataclasses
import json
import os
import re
from types import SimpleNamespace

import pytest

import aot
import command
import config as config_lib
import flags as flags_lib
import sharding
import train
import tuned
from compiled import results
from hardware import parse_topology
from placement import parse_mesh
from predicted.step import predict
from predicted.workload import run_of

RESULT = dict(fits=True, step_s=2.0, mfu=0.5, exposed_comm_s=0.1, peak_hbm_bytes=2**35, host_bytes=0, compile_s=9.0)
REFUSED = dict(fits=False, memory="hbm", used_bytes=2**37)


def predicted(config, topology="tpu7x:4x4x4", **options):
    return predict(run_of(config, *parse_topology(topology), **options))


def test_the_key_has_the_flags_that_determine_the_program():
    recipe = predicted(flags_lib.from_recipe("llama3.1-70b-8k-bf16", steps=7, sample=0, seed=3, compilation_cache=""))
    key = results.key_of(recipe)
    assert key.startswith("--topology=tpu7x:4x4x4 --preset=llama3.1-70b ")
    assert "recipe" not in key and "steps" not in key and "mu_dtype=bfloat16" in key
    assert results.key_of(results.prediction_of(key)) == key
    assert results.prediction_of(key).step_s == recipe.step_s
    key_of_mesh = lambda mesh, **flags: results.key_of(
        predicted(flags_lib.from_preset("llama3.1-8b", mesh=mesh, batch=128, remat="full", **flags))
    )
    assert key_of_mesh("fsdp:*") == key_of_mesh("fsdp:128") != key_of_mesh("fsdp:64,context:2")
    assert key_of_mesh("fsdp:128", prefetch=False) == key_of_mesh("fsdp:128") + " --no-prefetch"
    slices = predicted(flags_lib.from_preset("llama3.1-8b", mesh="data:2,fsdp:128", batch=256), num_slices=2)
    assert "--num_slices=2" in results.key_of(slices)
    assert results.prediction_of(results.key_of(slices)).run.num_slices == 2


# -- every field of Config is in the key or does not change the program

MIXED = dict(num_experts=8, experts_per_token=2, expert_dim=128)
CAPACITY = MIXED | dict(moe_impl="capacity")
LATENT = dict(kv_lora_rank=64, q_lora_rank=64, rope_head_dim=16)
YARN = dict(rope_type="yarn", rope_scaling=8.0, rope_original_len=64)
FP8 = dict(fp8="dynamic")
CIRCULAR = dict(pipeline_schedule="circular", pipeline_rounds=2)
PROGRAM_FIELDS = {  # for each field the flags under which it has an effect, and another value
    "preset": ({}, "tiny-moe"),
    "batch": ({}, 32),
    "seq_len": ({}, 256),
    "vocab_size": ({}, 512),
    "num_layers": ({}, 4),
    "model_dim": ({}, 256),
    "dim_multiple": ({}, 128),
    "ff_dim": ({}, 256),
    "num_heads": ({}, 16),
    "num_kv_heads": ({}, 4),
    "head_dim": ({}, 32),
    "rope_theta": ({}, 5e5),
    "rope_type": (dict(rope_type="llama3", rope_scaling=8.0), "linear"),
    "rope_scaling": (dict(rope_type="llama3"), 8.0),
    "rope_original_len": (dict(rope_type="llama3", rope_scaling=8.0), 4096),
    "rope_beta_fast": (YARN, 16.0),
    "rope_beta_slow": (YARN, 2.0),
    "rope_truncate": (YARN, False),
    "rope_mscale": (YARN, 0.5),
    "rope_mscale_all_dim": (LATENT | YARN, 1.0),
    "mlp_activation": ({}, "gelu"),
    "rope_fraction": ({}, 0.5),
    "global_rope_theta": (dict(window=64, global_every=3), 1e6),
    "global_head_dim": (dict(window=64, global_every=3), 32),
    "global_kv_heads": (dict(window=64, global_every=3), 4),
    "num_kv_shared_layers": (dict(window=64, global_every=2, global_head_dim=32, num_layers=4), 2),
    "double_wide_mlp": (
        dict(window=64, global_every=2, global_head_dim=32, num_layers=4, num_kv_shared_layers=2),
        True,
    ),
    "ple_dim": (dict(post_norms=True), 16),
    "post_norms": ({}, True),
    "qk_norm": ({}, True),
    "value_norm": ({}, True),
    "keys_as_values": ({}, True),
    "layer_scale": ({}, True),
    "qkv_bias": ({}, True),
    "output_bias": ({}, True),
    "attention_sinks": ({}, True),
    "tied_embeddings": ({}, True),
    "embedding_scale": ({}, True),
    "window": ({}, 64),
    "global_every": (dict(window=64), 3),
    "attention_scale": ({}, 0.5),
    "attention_soft_cap": ({}, 50.0),
    "logit_soft_cap": ({}, 30.0),
    "z_loss": ({}, 1e-4),
    "mtp": ({}, True),
    "mtp_loss": (dict(mtp=True), 0.1),
    "norm_eps": ({}, 1e-6),
    "dtype": ({}, "bfloat16"),
    "num_experts": (MIXED, 16),
    "experts_per_token": (MIXED, 4),
    "expert_dim": (MIXED, 256),
    "num_shared_experts": (MIXED, 1),
    "num_dense_layers": (MIXED, 1),
    "expert_bias": (MIXED, True),
    "swiglu_limit": (MIXED, 7.0),
    "expert_norms": (MIXED, True),
    "expert_scale": (MIXED, True),
    "router_scores": (MIXED, "sigmoid"),
    "renormalise": (MIXED, False),
    "router_groups": (MIXED | dict(router_groups=2), 4),
    "router_groups_kept": (MIXED | dict(router_groups=4), 2),
    "router_scale": (MIXED, 2.5),
    "load_balance_loss": (MIXED, 0.02),
    "router_z_loss": (MIXED, 1e-3),
    "selection_bias": (MIXED, True),
    "selection_bias_rate": (MIXED | dict(selection_bias=True), 0.01),
    "moe_impl": (MIXED, "capacity"),
    "buffer_factor": (MIXED | dict(mesh="expert:8"), 3.0),
    "moe_parts": (MIXED | dict(mesh="expert:8"), 2),
    "capacity_factor": (CAPACITY, 2.0),
    "kv_lora_rank": (LATENT, 32),
    "q_lora_rank": (LATENT, 32),
    "rope_head_dim": (LATENT, 8),
    "value_head_dim": (LATENT, 32),
    "mesh": ({}, "fsdp:4,tensor:2"),
    "core_axis": (dict(mesh="fsdp:4,tensor:2"), "fsdp"),
    "collectives": ({}, "ring"),
    "collective_matmul": (dict(mesh="fsdp:4,tensor:2"), True),
    "prefetch": ({}, False),
    "double_buffer": ({}, True),
    "shard_update": (dict(mesh="data:2,fsdp:4"), True),
    "context_impl": (dict(mesh="fsdp:4,context:2"), "all_gather"),
    "context_heads": (dict(mesh="fsdp:2,context:4"), 2),
    "context_balance": (dict(mesh="fsdp:4,context:2"), False),
    "microbatches": ({}, 2),
    "pipeline_schedule": (dict(mesh="pipe:3,fsdp:4"), "gpipe"),
    "pipeline_rounds": (CIRCULAR | dict(mesh="pipe:2,fsdp:4", num_layers=12, microbatches=4), 3),
    "remat_stage": (dict(mesh="pipe:3,fsdp:4"), True),
    "remat": ({}, "full"),
    "remat_tensors": (dict(remat="custom"), "context:device"),
    "fp8": ({}, "dynamic"),
    "fp8_granularity": (FP8, "per_axis"),
    "fp8_block": (FP8 | dict(fp8_granularity="block", fp8_block=8, mesh="data:8"), 16),
    "fp8_rounding": (FP8, "stochastic"),
    "fp8_gradients": (FP8, "e4m3"),
    "fp8_modules": (FP8, "mlp"),
    "fp8_skip_layers": (FP8, 1),
    "fp8_scales": (dict(fp8="calibrate", fp8_scales="a"), "b"),
    "attention": ({}, "reference"),
    "max_logit": ({}, 8.0),
    "loss_chunk": ({}, 16),
    "optimizer": ({}, "sgd"),
    "clip_norm": ({}, 0.0),
    "skip_spikes": ({}, 6.0),
    "qk_clip": ({}, 100.0),
    "grad_dtype": ({}, "bfloat16"),
    "mu_dtype": ({}, "bfloat16"),
    "nu_dtype": ({}, "bfloat16"),
    "offload_optimizer": ({}, True),
    "xla_flags": ({}, "recommended"),
}
RUN_FIELDS = dict(  # not used by the program
    corpus="c.bin",
    eval_every=7,
    eval_batches=3,
    log_every=3,
    metrics_file="m",
    sample=5,
    sample_every=3,
    profile_dir="p",
) | dict(
    tensorboard_dir="t",
    profile_steps="1:2",
    checkpoint_dir="c",
    save_every=3,
    keep_checkpoints=4,
    skip_damaged_checkpoints=True,
    num_processes=2,
    process_id=1,
)
RUN_FIELDS |= dict(coordinator="h:1", peer_timeout=9, compilation_cache="c", max_skipped=3, check_every=5)
SCHEDULES = dict(schedule="wsd", decay_ratio=0.2, decay_shape="1-sqrt", batch_rampup="0:4")  # of the run's steps
NUMBERS = dict(  # only constants of the program
    steps=70, seed=3, learning_rate=0.1, warmup_ratio=0.2, final_lr_ratio=0.3, weight_decay=0.4, beta1=0.5, beta2=0.6
)


def test_every_field_is_of_the_program_or_of_the_run():
    """Add a new field to a table here and, if it does not change the program, to compiled/results.py."""
    fields = {field.name for field in dataclasses.fields(config_lib.Config)}
    tables = [*PROGRAM_FIELDS, *RUN_FIELDS, *NUMBERS, *SCHEDULES, "recipe", "weights"]  # these two are sets of flags
    assert len(tables) == len(fields) and fields == {*tables}


def key(**flags) -> str:
    mesh = dict(mesh="fsdp:8") if "mesh" not in flags else {}
    config = flags_lib.from_preset(**dict(preset="tiny", batch=48, **mesh) | flags)
    return results.key_of(predicted(config, "tpu7x:1x2x3" if "pipe:3" in config.mesh else "tpu7x:2x2x1"))


@pytest.mark.parametrize("field", PROGRAM_FIELDS)
def test_fields_that_change_the_program_are_in_the_key(field):
    needed, value = PROGRAM_FIELDS[field]
    default, changed = key(**needed), key(**needed | {field: value})
    assert default != changed and f"--{'no-' if value is False else ''}{field}" in changed
    assert results.key_of(results.prediction_of(changed)) == changed


def test_fields_of_the_run_are_not_in_the_key():
    assert key() == key(**RUN_FIELDS, **NUMBERS) == key(**SCHEDULES | dict(batch_rampup="0:8,9:48"))


def program(**flags) -> str:
    widths = dict(num_layers=2, model_dim=64, ff_dim=32, num_heads=4, num_kv_heads=4, head_dim=8, batch=8, seq_len=32)
    config = config_lib.Config(**widths | dict(mesh="fsdp:8") | flags)
    return train.lower_step(config, sharding.make_mesh(parse_mesh(config.mesh))).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        dict(),
        dict(optimizer="adafactor", mesh="data:2,fsdp:2,tensor:2"),
        dict(optimizer="sgd", fp8="dynamic", fp8_rounding="stochastic", fp8_modules="out", mesh="expert:8")
        | dict(num_experts=8, experts_per_token=2, expert_dim=16, selection_bias=True),
    ],
    ids=lambda model: model.get("optimizer", "adamw"),
)
def test_fields_outside_the_key_change_only_constants(model):
    """The lowered step has the same text; with other numbers only its constants differ."""
    plain = program(**model)
    assert program(**model, **RUN_FIELDS) == plain
    numbers = {name: value for name, value in NUMBERS.items() if name not in UNUSED[model.get("optimizer", "adamw")]}
    other = program(**model, **numbers)
    constant = re.compile(r"(stablehlo.constant )?dense<[^>]*>")
    assert other != plain and constant.sub("", other) == constant.sub("", plain)


UNUSED = {"adamw": (), "adafactor": ("beta1", "beta2"), "sgd": ("beta2", "weight_decay")}  # refused by the optimizer


def test_a_saved_result_is_loaded(tmp_path):
    file, prediction = tmp_path / "compiled.json", predicted(flags_lib.from_recipe("llama3.1-70b-8k-bf16"))
    assert results.load(prediction, file) is None
    results.save(prediction, RESULT | dict(largest_buffers=[1, 2]), file)
    stored = results.load(prediction, file)
    assert stored.items() > RESULT.items() and {"jax", "libtpu"} == stored.keys() - RESULT.keys()
    assert results.memory_of(stored) == 2**35
    assert results.step_text(stored) == "2.00 s" and results.step_text(None) == ""
    results.save(prediction, REFUSED, file)
    stored = results.load(prediction, file)
    assert results.step_text(stored) == "refused" and results.memory_of(stored) == 2**37
    assert results.memory_of(dict(fits=False, memory="vmem")) is None
    (row,) = results.list_rows("70b.*fsdp:128", file)
    assert row["predicted"]["step_s"] == prediction.step_s and not results.list_rows("70c", file)
    assert "refused" in results.table([row]) and "128.0" in results.table([row])


def test_keys_are_parsed_as_a_shell_parses_them():
    prediction = predicted(
        flags_lib.from_preset(
            "llama3.1-8b",
            mesh="fsdp:64,tensor:2",
            core_axis="fsdp",
            batch=128,
            remat="custom",
            remat_tensors="mlp_up:device, context:offload",
            xla_flags="xla_tpu_scoped_vmem_limit_kib=61440",
            prefetch=False,
        )
    )
    key = results.key_of(prediction)
    assert "'--remat_tensors=mlp_up:device, context:offload'" in key
    assert results.prediction_of(key).run == prediction.run
    for wrong in ("--preset=llama3.1-8b --no_such_flag=1", "--preset=llama3.1-8b --batch=many"):
        with pytest.raises(ValueError, match=r"no_such_flag|batch"):
            results.prediction_of(wrong)


def test_a_file_that_cannot_be_parsed_is_left_unchanged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FILE", tmp_path / "compiled.json")
    prediction = predicted(flags_lib.from_recipe("llama3.1-70b-8k-bf16"))
    assert results.read() == {} and results.load(prediction) is None
    results.FILE.write_text(text := "<<<<<<< HEAD")
    with pytest.raises(ValueError, match=r"compiled.json cannot be read as version 1: restore it"):
        results.save(prediction, RESULT)
    with pytest.raises(SystemExit):
        command.run(results.main, [])
    assert "cannot be read" in capsys.readouterr().err and results.FILE.read_text() == text
    tuned.save("--preset=tiny --no_such_flag=1", REFUSED | dict(libtpu="0.0.50"), results.FILE)
    results.main([])
    out = capsys.readouterr().out
    assert "there is no flag '--no_such_flag=1'" in out and "1 of 1 in compiled.json, compiled by libtpu 0.0.50" in out


def test_a_missing_result_is_compiled_by_aot(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FILE", tmp_path / "compiled.json")
    prediction, runs = predicted(flags_lib.from_recipe("llama3.1-70b-8k-bf16")), []

    def run(command, env, **_):
        runs.append((command, env["IRONWOOD_TUNED"]))
        if len(runs) == 2:
            results.save(prediction, RESULT)
        return SimpleNamespace(stderr="no libtpu")

    monkeypatch.setattr(results.subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"aot.py --topology=.* --keep: no libtpu"):
        results.load_or_compile(prediction)
    assert results.load_or_compile(prediction)["step_s"] == results.load_or_compile(prediction)["step_s"] == 2.0
    assert len(runs) == 2 and runs[0][1] == os.devnull and "--compile_anyway" in runs[0][0]


def test_aot_saves_a_result_and_a_refusal(capsys, monkeypatch):
    saved = []
    monkeypatch.setattr(results, "save", lambda prediction, result: saved.append((results.key_of(prediction), result)))
    monkeypatch.setattr(aot, "report", lambda *_: RESULT)
    flags = ["--preset=llama3.1-8b", "--batch=8", "--seq_len=8192", "--mesh=fsdp:8", "--remat=full", "--json"]
    assert aot.main(flags) == 0 and not saved
    assert aot.main([*flags, "--keep"]) == 0

    def refused(*_):
        raise aot.DoesNotFitError("RESOURCE_EXHAUSTED: total memory required (99.00G) exceeds available HBM (94.75G)")

    monkeypatch.setattr(aot, "report", refused)
    assert aot.main([*flags, "--keep"]) == aot.DOES_NOT_FIT
    (key, result), (same_key, refusal) = saved
    assert key == same_key and result == RESULT and not refusal["fits"]
    assert "--topology=tpu7x:2x2x1" in key and "--batch=8" in key
    for other in ("--compare=prefetch", "--kernel=x=1", "--bundles"):
        with pytest.raises(SystemExit):
            command.run(aot.main, [*flags, "--keep", other])
        assert "--keep is for one program" in capsys.readouterr().err

    def cannot(*_):
        raise OSError("read-only")

    monkeypatch.setattr(aot, "report", lambda *_: RESULT)
    monkeypatch.setattr(results, "save", cannot)
    with pytest.raises(SystemExit):
        command.run(aot.main, [*flags, "--keep"])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == RESULT and "the result is not stored: read-only" in printed.err


@pytest.mark.parametrize("key", results.read())
def test_predictions_are_close_to_compiled_steps(key):
    """Memory is within 15%, the step within 20%.

    With the optimizer state on the host the prediction may be 30% too long: the rate of its transfers is assumed, and
    that of XLA's estimates is higher. The step is not compared where flags move collectives off the SparseCores, which
    predictions do not model. Each stored key is also the one that today's flags give.
    """
    result = results.read()[key]
    prediction = results.prediction_of(key, result)
    assert results.key_of(prediction) == key
    if needed := results.memory_of(result):
        assert prediction.hbm_bytes == pytest.approx(needed, rel=0.15)
    on_sparse_cores = "sparse_core_collective_offload_all_gather=false" not in prediction.run.config.xla_flags
    if result["fits"] and on_sparse_cores:
        longest = 1.3 if prediction.run.config.offload_optimizer else 1.2
        assert 0.8 <= prediction.step_s / result["step_s"] <= longest


def test_command(capsys):
    results.main(["--json"])
    assert [row["flags"] for row in json.loads(capsys.readouterr().out)] == list(results.read())
    with pytest.raises(SystemExit):
        command.run(results.main, ["("])
    assert "is no regular expression" in capsys.readouterr().err
