"""The compiler as judge: what is read of a compiled step, of a refusal, and what is kept of it."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import aot
import placement
from config import Config, from_preset

ROOT = Path(aot.__file__).parent
SMALL = (
    "--num_layers=4 --model_dim=512 --ff_dim=1024 --num_heads=4 --num_kv_heads=2 --head_dim=128 --seq_len=512 "
    "--vocab_size=2048 --dtype=bfloat16 --remat=full --mesh=fsdp:8 --batch=8"
).split()


# -- a compiled step


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def ran(capsys, cache, *flags: str) -> str:
    assert aot.main([*SMALL, f"--compilation_cache={cache}", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_step_is_compiled_once_and_read_twice(capsys, cache, tmp_path):
    path = tmp_path / "step.hlo"
    found = json.loads(ran(capsys, cache, "--json", f"--hlo_out={path}"))
    keys = "fits step_s mfu peak_hbm_bytes exposed_comm_s collectives compile_s tokens_per_s_per_chip roofline"
    assert {*keys.split()} <= found.keys() and found["fits"] and not found["cached"]
    assert path.read_text().startswith("HloModule jit_train_step, is_scheduled=true")
    # Weights and moments in float32, an eighth of them each: no array is whole.
    params = found["argument_bytes"] / 12 * 8
    config = Config(**{n: int(v) for n, v in (f[2:].split("=") for f in SMALL) if v.isdecimal()}, mesh="fsdp:8")
    import transformer

    assert params == pytest.approx(transformer.num_params(config), rel=0.02)
    assert found["argument_bytes"] < found["peak_hbm_bytes"] < found["hbm_limit_bytes"]
    assert found["step_s"] == pytest.approx(sum(found["by_category_s"].values()))
    assert found["mfu"] == pytest.approx(found["flops_per_step"] / found["step_s"] / 4 / 2307e12)

    # FSDP: 7 matrices and 2 norms of 4 layers gathered forward and backward, their gradients scattered once.
    rows = [row for row in found["collectives"] if row["mesh_axes"] == ["fsdp"]]
    of = lambda kind, least: [row for row in rows if row["kind"] == kind and row["bytes"] >= least]
    matrices = 256 * 512 * 2  # the smallest of them, w_k, in bytes
    assert sum(row["count"] for row in of("all-gather", matrices) if "while" in row["op"]) == 2 * 7 * 4
    assert sum(row["count"] for row in of("reduce-scatter", matrices) if "while" in row["op"]) == 7 * 4
    assert {row["engine"] for row in of("all-gather", matrices) + of("reduce-scatter", matrices)} == {"SparseCore"}
    assert not any(row["synchronous"] for row in of("all-gather", matrices))

    again = json.loads(ran(capsys, cache, "--json"))
    assert again.pop("cached") and again == {name: value for name, value in found.items() if name != "cached"}
    shown = ran(capsys, cache)
    for words in (
        "tpu7x:2x2x1, 4 chips, mesh fsdp 8",
        "(predicted from the compiled schedule)",
        "SparseCore",
        "roofline",
    ):
        assert words in shown, shown
    assert max(map(len, shown.splitlines())) <= 132


@pytest.mark.slow
def test_prefetch_hides_what_the_layer_would_wait_for(capsys, cache):
    with_it, without = json.loads(ran(capsys, cache, "--json", "--compare=prefetch"))
    assert (with_it["setting"], without["setting"]) == ("prefetch=True", "prefetch=False")
    gathers = lambda found: [row for row in found["collectives"] if row["kind"] == "all-gather" and row["bytes"] > 2e5]
    count = lambda found: sum(row["count"] for row in gathers(found))
    beside = lambda found: sum(row["computed_between_s"] for row in gathers(found))
    # One layer more each way, the last one's, which nobody needs; and more computation beside them.
    assert count(with_it) == count(without) + 2 * 7
    assert beside(with_it) > 1.5 * beside(without)


# -- refusals


def refused(size: int) -> str:
    """The compiler's own words for a program with an array of size x size in float32."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[0]
    x = jax.ShapeDtypeStruct((size, 128), jnp.float32, sharding=SingleDeviceSharding(device))
    f = lambda x: jnp.sin(x @ x.T).sum(0) @ jnp.cos(x @ x.T)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(f).lower(x).compile()
    return str(error.value)


def test_a_program_that_does_not_fit_in_hbm():
    found = aot.refusal(refused(200_000))
    assert found["memory"] == "hbm" and found["limit_bytes"] / aot.GiB == pytest.approx(94.74, abs=0.02)
    assert found["used_bytes"] >= 200_000**2 * 4


def test_what_the_compiler_says_where_it_lists_the_buffers():
    text = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 96.00G of 94.74G hbm. Exceeded by 1.26G.

  Largest program allocations in hbm:

  1. Size: 32.00G
     Operator: op_name="jit(step)/dot_general" source_file="/x/model.py" source_line=12
     Shape: bf16[131072,131072]{1,0:T(8,128)(2,1)}

  2. Size: 512.0M
     Shape: f32[8192,16384]{1,0:T(8,128)}
"""
    found = aot.refusal(text)
    assert (found["memory"], found["used_bytes"]) == ("hbm", 96 * 2**30)
    assert found["largest"][0]["bytes"] == 2**35 and "jit(step)/dot_general" in found["largest"][0]["op"]
    assert found["largest"][1] == {"bytes": 2**29, "shape": "f32[8192,16384]{1,0:T(8,128)}", "op": ""}
    vmem = (
        "RESOURCE_EXHAUSTED: Scoped allocation with size 48.00M and limit 32.00M exceeded scoped vmem limit by 16.00M."
    )
    assert aot.refusal(vmem) | {"largest": []} == {
        "memory": "vmem",
        "used_bytes": 48 * 2**20,
        "limit_bytes": 32 * 2**20,
        "largest": [],
    }
    assert aot.refusal("RESOURCE_EXHAUSTED: something else")["memory"] == "unknown"


def test_a_refusal_ends_with_status_3_and_the_way_out(capsys, monkeypatch, tmp_path):
    def compile_step(*_):
        raise aot.DoesNotFitError("total memory required for HLO temporaries (152.11G) exceeds available HBM (94.75G).")

    monkeypatch.setattr(aot, "compile_step", compile_step)
    monkeypatch.setattr(aot, "lower_step", lambda *_: None)
    flags = ["--preset=llama3.1-8b", "--remat=none", "--batch=8", "--mesh=fsdp:8"]
    assert aot.main(flags) == 3
    out = capsys.readouterr().out
    assert "does not fit: 152.11 of 94.75 GiB of hbm, 57.36 GiB short" in out
    assert "--remat=full, --microbatches=2" in out
    assert aot.main([*flags, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["used_bytes"] == pytest.approx(152.11 * 2**30)
    assert "xla_tpu_scoped_vmem_limit_kib" in aot.way_out(from_preset("tiny"), {"memory": "vmem"})


# -- flags


def test_help_answers_at_once_and_without_jax():
    command = [sys.executable, "-X", "importtime", ROOT / "aot.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "--topology" in done.stdout and "--num_layers" in done.stdout
    assert not {"jax", "numpy", "libtpu"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--topologi=tpu7x:2x2x1"], "did you mean --topology?"),
        (["--topology=tpu9:2x2x1"], "there is no chip 'tpu9'"),
        (["--mesh=fsdp:16"], "mesh fsdp:16 is for 16 devices and there are 8"),
        (["--preset=qwen3-30b-a3b", "--batch=8"], "no code for mixtures of experts yet"),
        (["--batch=3"], "batch=3 must be a multiple of"),
        (["--xla_flags=xla_tpu_scoped_vmem_limit_kb=1"], "did you mean"),
        (["--kernel=attention"], "--kernel takes REGEX=NUMBER"),
    ],
)
def test_wrong_flags(capsys, monkeypatch, flags, words):
    monkeypatch.setattr(aot, "compile_step", lambda *_: ({}, "HloModule m, is_scheduled=true"))
    with pytest.raises(SystemExit) as end:
        aot.main(flags)
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_without_libtpu_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        aot.main(["--batch=8"])
    assert 'compiling for TPU needs libtpu: pip install -e ".[tpu]"' in capsys.readouterr().err


def test_mesh_axes_of_groups():
    sizes = placement.parse_mesh("data:2,fsdp:4,tensor:2")
    assert aot.mesh_axes([(0, 1), (2, 3)], sizes) == ["tensor"]
    assert aot.mesh_axes([(0, 2, 4, 6), (1, 3, 5, 7)], sizes) == ["fsdp"]
    assert aot.mesh_axes([(0, 8)], sizes) == ["data"]
    assert aot.mesh_axes([tuple(range(16))], sizes) == ["data", "fsdp", "tensor"]
    assert aot.mesh_axes([(3,)], sizes) == [] == aot.mesh_axes([], sizes)
    assert math.prod(sizes.values()) == 16
