"""What the compiler said of steps: kept and found by what makes the program, and not far from what is predicted."""

import json
import os
from types import SimpleNamespace

import pytest

import aot
import command
import compiled
import config as config_lib
import tuned
from hardware import parse_topology
from step import predict
from workload import run_of

FOUND = dict(fits=True, step_s=2.0, mfu=0.5, exposed_comm_s=0.1, peak_hbm_bytes=2**35, host_bytes=0, compile_s=9.0)
REFUSED = dict(fits=False, memory="hbm", used_bytes=2**37)


def predicted(config, topology="tpu7x:4x4x4", **options):
    return predict(run_of(config, *parse_topology(topology), **options))


def test_key_is_what_makes_the_program():
    recipe = predicted(config_lib.from_recipe("llama3.1-70b-8k-bf16", steps=7, sample=0, seed=3, compilation_cache=""))
    key = compiled.key_of(recipe)
    assert key.startswith("--topology=tpu7x:4x4x4 --preset=llama3.1-70b ")
    assert "recipe" not in key and "steps" not in key and "mu_dtype=bfloat16" in key
    assert compiled.key_of(compiled.prediction_of(key)) == key
    assert compiled.prediction_of(key).step_s == recipe.step_s
    of = lambda mesh, **flags: compiled.key_of(
        predicted(config_lib.from_preset("llama3.1-8b", mesh=mesh, batch=128, remat="full", **flags))
    )
    assert of("fsdp:*") == of("fsdp:128") != of("fsdp:64,context:2")
    assert of("fsdp:128", prefetch=False) == of("fsdp:128") + " --no-prefetch"
    slices = predicted(config_lib.from_preset("llama3.1-8b", mesh="data:2,fsdp:128", batch=256), num_slices=2)
    assert "--num_slices=2" in compiled.key_of(slices)
    assert compiled.prediction_of(compiled.key_of(slices)).of.num_slices == 2


def test_what_is_kept_is_found(tmp_path):
    file, of = tmp_path / "compiled.json", predicted(config_lib.from_recipe("llama3.1-70b-8k-bf16"))
    assert compiled.find(of, file) is None
    compiled.keep(of, FOUND | dict(largest_buffers=[1, 2]), file)
    its = compiled.find(of, file)
    assert its.items() > FOUND.items() and {"jax", "libtpu"} == its.keys() - FOUND.keys()
    assert compiled.memory_of(its) == 2**35 and compiled.of_step(its) == "2.00 s" and compiled.of_step(None) == ""
    compiled.keep(of, REFUSED, file)
    its = compiled.find(of, file)
    assert compiled.of_step(its) == "refused" and compiled.memory_of(its) == 2**37
    assert compiled.memory_of(dict(fits=False, memory="vmem")) is None
    (row,) = compiled.rows("70b.*fsdp:128", file)
    assert row["predicted"]["step_s"] == of.step_s and not compiled.rows("70c", file)
    assert "refused" in compiled.table([row]) and "128.0" in compiled.table([row])


def test_keys_are_read_as_a_shell_reads_them():
    of = predicted(
        config_lib.from_preset(
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
    key = compiled.key_of(of)
    assert "'--remat_tensors=mlp_up:device, context:offload'" in key and compiled.prediction_of(key).of == of.of
    for wrong in ("--preset=llama3.1-8b --no_such_flag=1", "--preset=llama3.1-8b --batch=many"):
        with pytest.raises(ValueError, match=r"no_such_flag|batch"):
            compiled.prediction_of(wrong)


def test_a_file_that_cannot_be_read_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "FILE", tmp_path / "compiled.json")
    of = predicted(config_lib.from_recipe("llama3.1-70b-8k-bf16"))
    assert compiled.read() == {} and compiled.find(of) is None
    compiled.FILE.write_text(text := "<<<<<<< HEAD")
    with pytest.raises(ValueError, match=r"compiled.json cannot be read as version 1: restore it"):
        compiled.keep(of, FOUND)
    with pytest.raises(SystemExit):
        command.run(compiled.main, [])
    assert "cannot be read" in capsys.readouterr().err and compiled.FILE.read_text() == text
    tuned.keep("--preset=tiny --no_such_flag=1", REFUSED | dict(libtpu="0.0.50"), compiled.FILE)
    compiled.main([])
    out = capsys.readouterr().out
    assert "there is no flag '--no_such_flag=1'" in out and "1 of 1 in compiled.json, compiled by libtpu 0.0.50" in out


def test_what_is_not_kept_is_asked_of_aot(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "FILE", tmp_path / "compiled.json")
    of, asked = predicted(config_lib.from_recipe("llama3.1-70b-8k-bf16")), []

    def run(command, env, **_):
        asked.append((command, env["IRONWOOD_TUNED"]))
        if len(asked) == 2:
            compiled.keep(of, FOUND)
        return SimpleNamespace(stderr="no libtpu")

    monkeypatch.setattr(compiled.subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"aot.py --topology=.* --keep: no libtpu"):
        compiled.ask(of)
    assert compiled.ask(of)["step_s"] == compiled.ask(of)["step_s"] == 2.0
    assert len(asked) == 2 and asked[0][1] == os.devnull and "--compile_anyway" in asked[0][0]


def test_aot_keeps_what_it_finds_and_a_refusal(capsys, monkeypatch):
    kept = []
    monkeypatch.setattr(compiled, "keep", lambda of, found: kept.append((compiled.key_of(of), found)))
    monkeypatch.setattr(aot, "report", lambda *_: FOUND)
    flags = ["--preset=llama3.1-8b", "--batch=8", "--seq_len=8192", "--mesh=fsdp:8", "--remat=full", "--json"]
    assert aot.main(flags) == 0 and not kept
    assert aot.main([*flags, "--keep"]) == 0

    def refused(*_):
        raise aot.DoesNotFitError("RESOURCE_EXHAUSTED: total memory required (99.00G) exceeds available HBM (94.75G)")

    monkeypatch.setattr(aot, "report", refused)
    assert aot.main([*flags, "--keep"]) == aot.DOES_NOT_FIT
    (key, found), (same, its) = kept
    assert key == same and found == FOUND and not its["fits"]
    assert "--topology=tpu7x:2x2x1" in key and "--batch=8" in key
    for other in ("--compare=prefetch", "--kernel=x=1"):
        with pytest.raises(SystemExit):
            command.run(aot.main, [*flags, "--keep", other])
        assert "--keep is for one program" in capsys.readouterr().err

    def cannot(*_):
        raise OSError("read-only")

    monkeypatch.setattr(aot, "report", lambda *_: FOUND)
    monkeypatch.setattr(compiled, "keep", cannot)
    with pytest.raises(SystemExit):
        command.run(aot.main, [*flags, "--keep"])
    said = capsys.readouterr()
    assert json.loads(said.out) == FOUND and "what was found is not kept: read-only" in said.err


@pytest.mark.parametrize("key", compiled.read())
def test_predictions_are_near_what_was_compiled(key):
    """The key is today's; memory within 15%, and steps within 20%; with the recommended flags they may be 25% too long.

    What flags of the compiler gain is not predicted: the VMEM that these give to matmuls takes 11% off a step of 8B.
    """
    its, expected = compiled.read()[key], compiled.prediction_of(key)
    assert compiled.key_of(expected) == key
    if needed := compiled.memory_of(its):
        assert expected.hbm_bytes == pytest.approx(needed, rel=0.15)
    if its["fits"] and "=" not in expected.of.config.xla_flags:
        recommended = expected.of.config.xla_flags == "recommended"
        assert 0.8 <= expected.step_s / its["step_s"] <= (1.25 if recommended else 1.2)


def test_command(capsys):
    compiled.main(["--json"])
    assert [row["flags"] for row in json.loads(capsys.readouterr().out)] == list(compiled.read())
    with pytest.raises(SystemExit):
        command.run(compiled.main, ["("])
    assert "is no regular expression" in capsys.readouterr().err
