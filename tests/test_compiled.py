"""What the compiler said of steps: kept and found by what makes the program, and not far from what is predicted."""

import json

import pytest

import aot
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


@pytest.mark.parametrize("key", tuned.read(compiled.FILE))
def test_predictions_are_near_what_was_compiled(key):
    """The key is today's; memory within 15%, and steps within 20%."""
    its, expected = tuned.read(compiled.FILE)[key], compiled.prediction_of(key)
    assert compiled.key_of(expected) == key
    assert expected.hbm_bytes == pytest.approx(compiled.memory_of(its), rel=0.15)
    if its["fits"]:
        assert expected.step_s == pytest.approx(its["step_s"], rel=0.2)


def test_command(capsys):
    compiled.main(["--json"])
    assert [row["flags"] for row in json.loads(capsys.readouterr().out)] == list(tuned.read(compiled.FILE))
    with pytest.raises(SystemExit):
        compiled.main(["("])
    assert "is no regular expression" in capsys.readouterr().err
