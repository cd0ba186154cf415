"""Tests of aot.py: reports of compiled steps, refusals, and the cache."""

import argparse
import dataclasses
import gzip
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import libtpu
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import ON_TENSOR_CORES

import aot
import command
import compiler_flags
import groups
import kernels
import placement
import report
import sharding
from compiled import hlo, liveness, schedule
from config import Config
from flags import from_preset
from hardware import parse_topology
from predicted import transformer
from predicted.workload import run_of

ROOT = Path(aot.__file__).parent
SMALL = (
    "--num_layers=4 --model_dim=512 --ff_dim=1024 --num_heads=4 --num_kv_heads=2 --head_dim=128 --seq_len=512 "
    "--vocab_size=2048 --dtype=bfloat16 --remat=full --mesh=fsdp:8 --batch=8"
).split()
# -- a compiled step


def output_of(capsys, programs, *flags: str) -> str:
    assert aot.main([*SMALL, f"--compilation_cache={programs}", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_step_is_compiled_once_and_then_read_from_the_cache(capsys, programs, tmp_path):
    path = tmp_path / "step.hlo"
    result = json.loads(output_of(capsys, programs, "--json", f"--hlo_out={path}"))
    keys = "fits step_s mfu peak_hbm_bytes exposed_comm_s collectives compile_s tokens_per_s_per_chip roofline"
    keys += " largest_buffers live_bytes peak_op peak_source"
    assert {*keys.split()} <= result.keys() and result["fits"]
    assert path.read_text().startswith("HloModule jit_train_step, is_scheduled=true")
    # Weights and moments in float32, an eighth of each: every array is sharded.
    params = result["argument_bytes"] / 12 * 8
    config = Config(**{n: int(v) for n, v in (f[2:].split("=") for f in SMALL) if v.isdecimal()}, mesh="fsdp:8")
    from predicted import transformer

    assert params == pytest.approx(transformer.num_params(config), rel=0.02)
    assert result["argument_bytes"] < result["peak_hbm_bytes"] < result["hbm_limit_bytes"]
    assert result["step_s"] == pytest.approx(sum(result["by_category_s"].values()))
    assert result["mfu"] == pytest.approx(result["flops_per_step"] / result["step_s"] / 4 / 2307e12)

    # All matmuls outside of the attention kernel; rotary embeddings are a matmul in each pass.
    forward = transformer.forward_flops_per_token(config)
    again = transformer.recomputed_flops_per_token(dataclasses.replace(config, remat="full"))
    flops = sum(3 * forward[name] + again.get(name, 0) for name in ("attention", "mlp", "unembedding"))
    flops += 3 * 4 * (4 + 2) * 2 * 128 * 128  # passes, layers, heads
    seconds = flops * config.batch * config.seq_len / 4 / 2307e12
    assert result["matmul_of_peak"] * result["by_category_s"]["matmul"] == pytest.approx(seconds, rel=0.01)
    assert all(op["of_peak"] is None or 0 < op["of_peak"] < 1 for op in result["top_ops"])
    assert any(op["of_peak"] for op in result["top_ops"])

    # The live buffers are the memory that the compiler sets aside, without holes; the arguments are those it reports.
    buffers = result["largest_buffers"]
    assert sum(row["bytes"] for row in buffers) == result["live_bytes"]
    assert 0.8 * result["peak_hbm_bytes"] < result["live_bytes"] <= result["peak_hbm_bytes"]
    donated = sum(row["bytes"] for row in buffers if row["kind"] == "donated argument")
    assert donated == pytest.approx(result["argument_bytes"], rel=0.01)  # all but the batch
    weights = next(row for row in buffers if row["op"] == "state.params.layers.*")
    assert (weights["count"], weights["bytes"]) == (9, pytest.approx(donated / 3, rel=0.2))
    assert any(row["source"].endswith(".py:" + row["source"].rpartition(":")[2]) for row in buffers)

    # FSDP: 7 matrices and 2 norms of 4 layers gathered forward and backward, their gradients scattered once.
    rows = [row for row in result["collectives"] if row["mesh_axes"] == ["fsdp"]]
    smallest = 256 * 512 * 2  # bytes of w_k
    matrices = lambda kind: [row for row in rows if row["kind"] == kind and row["bytes"] >= smallest]
    assert sum(row["count"] for row in matrices("all-gather") if "while" in row["op"]) == 2 * 7 * 4
    assert sum(row["count"] for row in matrices("reduce-scatter") if "while" in row["op"]) == 7 * 4
    assert {row["engine"] for row in matrices("all-gather") + matrices("reduce-scatter")} == {"SparseCore"}
    assert not any(row["synchronous"] for row in matrices("all-gather"))

    again = json.loads(output_of(capsys, programs, "--json"))
    assert again.pop("cached") and again == {name: value for name, value in result.items() if name != "cached"}
    # A power state changes the clock, not the program.
    fast = json.loads(output_of(capsys, programs, "--json", "--topology=tpu7x+p_state=7:2x2x1"))
    assert fast["cached"] and fast["topology"] == "tpu7x+p_state=7:2x2x1" and fast["step_s"] < result["step_s"]
    matmul_s, fast_s = (each["by_category_s"]["matmul"] for each in (result, fast))
    assert fast_s == pytest.approx(1.9 / 2.2 * matmul_s)
    traced = tmp_path / "step.json"
    shown = output_of(capsys, programs, f"--trace={traced}", f"--report={tmp_path / 'page'}")
    spans = [event for event in json.loads(traced.read_text())["traceEvents"] if event["ph"] == "X"]
    named = {category: 0.0 for category in result["by_category_s"]}
    for args in (span["args"] for span in spans if span["cat"] == "op"):
        named[args["category"]] += args["times"] * args["seconds"]
    waits = [name for name in named if name.startswith("waits") or name == "synchronous collectives"]
    assert named == pytest.approx(result["by_category_s"] | dict.fromkeys(waits, 0.0))
    waited = sum(s["args"]["times"] * s["args"]["seconds"] for s in spans if s["cat"] in ("wait", "synchronous"))
    assert waited == pytest.approx(sum(result["by_category_s"][name] for name in waits))
    page = (tmp_path / "page" / report.PAGE).read_text()
    embedded = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    assert embedded["report"] == again | {"cached": True} and "GiB live" in page and len(page) < 5e6
    for words in (
        "tpu7x:2x2x1, 4 chips, mesh fsdp 8",
        "(predicted from the compiled schedule)",
        "by its estimates (--bundles counts them)",
        "SparseCore",
        "roofline",
        "of memory_analysis's",
        "state.params.layers.*",
    ):
        assert words in shown, shown
    assert max(map(len, shown.splitlines())) <= 132


def test_counted_cycles_in_the_cache_are_read_with_bundles_alone(tmp_path):
    """A step that was compiled with --bundles is timed by estimates without it, as stored results are."""
    (entry := tmp_path / "aot" / "key").mkdir(parents=True)
    (entry / "found.json").write_text(json.dumps({"compile_s": 1.0, "cycles": {"fusion": 7.0}}))
    (entry / "program.hlo.gz").write_bytes(gzip.compress(b"HloModule m"))
    lowered = SimpleNamespace(key=lambda flags: "key")
    memory, program = aot.compile_step(lowered, {}, str(tmp_path), dump=tmp_path)
    assert (memory, program) == ({"compile_s": 1.0, "cycles": {"fusion": 7.0}, "cached": True}, "HloModule m")
    memory, _ = aot.compile_step(lowered, {}, str(tmp_path))
    assert memory == {"compile_s": 1.0, "cached": True}


def test_cycles_of_a_kernel_are_cached_until_its_code_changes(monkeypatch, tmp_path):
    counted, call = [], dict(tuned_key="gmm M=8 chip=tpu7x", blocks="rows=8", calls="1")
    monkeypatch.setattr(kernels, "cycles_of", lambda *args: counted.append(args) or 100.0 * len(counted))
    cycles = lambda filled, **waits: [*aot.kernel_cycles([call], filled, str(tmp_path), **waits).values()]
    assert cycles(1.0) == cycles(1.0) == [100.0]
    assert cycles(0.5) == cycles(0.5) == [200.0]
    monkeypatch.setattr(kernels, "version", lambda: "another")
    assert cycles(1.0) == cycles(1.0) == [300.0]
    assert cycles(1.0, waits=False) == cycles(1.0, waits=False) == [400.0]
    assert counted == [(call, 1.0, True), (call, 0.5, True), (call, 1.0, True), (call, 1.0, False)]
    for package in (jax, libtpu):
        monkeypatch.setattr(package, "__version__", "another")
        assert cycles(1.0) == cycles(1.0) == [100.0 * len(counted)]
    assert len(counted) == 6


@pytest.mark.slow
def test_compare_compiles_the_step_with_prefetch_and_without(capsys, programs):
    with_it, without = json.loads(output_of(capsys, programs, "--json", "--compare=prefetch"))
    assert (with_it["setting"], without["setting"]) == ("prefetch=True", "prefetch=False")
    count = lambda result: sum(row["count"] for row in result["collectives"] if row["kind"] == "all-gather")
    # Prefetch gathers the MLP of one layer more in each pass: the last iteration's, which is not used. The weights of
    # attention are gathered ahead without it, too.
    assert count(with_it) == count(without) + 2 * 3


@pytest.mark.slow
def test_a_program_grows_neither_with_its_layers_nor_with_its_devices(programs):
    """Counts instructions: unrolled layers, or code per device, would add hundreds."""

    def num_instructions(topology: str, **changes) -> int:
        dims = dict(model_dim=256, ff_dim=512, num_heads=2, num_kv_heads=1, head_dim=128, seq_len=256, vocab_size=1024)
        config = Config(**dims, dtype="bfloat16", remat="full", **changes)
        _, program = aot.compile_step(aot.lower_step(config, topology), ON_TENSOR_CORES, str(programs))
        return sum(map(len, hlo.parse(program).computations.values()))

    small = num_instructions("tpu7x:2x2x1", num_layers=4, mesh="fsdp:8", batch=8)
    large = num_instructions("tpu7x:4x4x4", num_layers=16, mesh="data:16,fsdp:8", batch=128)
    assert small > 1000
    assert abs(large - small) < 0.03 * small


# -- refusals


def test_a_slice_smaller_than_a_host_is_an_error(monkeypatch):
    """libtpu 0.0.42 refuses it; later versions accept it."""

    def refused(**_):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Topology is no host")

    monkeypatch.setattr(topologies, "get_topology_desc", refused)
    with pytest.raises(ValueError, match=r"topology=tpu7x:1x1x1: libtpu has no such slice .* 2x2x1 chips each"):
        aot.lower_step(Config(mesh="fsdp:2"), "tpu7x:1x1x1")


BETWEEN = dict(batch=32, seq_len=256, vocab_size=2048, num_layers=2, model_dim=1024, ff_dim=512, num_heads=4) | dict(
    num_kv_heads=2, head_dim=128, dtype="bfloat16", remat="full"
)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [dict(mesh="data:2,fsdp:8"), dict(mesh="pipe:2,fsdp:8", microbatches=4)])
def test_bytes_between_slices_are_those_predicted(flags, programs):
    """All groups of collectives are within a slice; between slices go sums of shards, or messages between stages."""
    config = Config(**BETWEEN | flags)
    _, text = aot.compile_step(aot.lower_step(config, "tpu7x:2x2x1", 2), ON_TENSOR_CORES, str(programs))
    breakdown = schedule.walk(hlo.parse(text), uncounted=True)
    assert {device for message in breakdown.collectives for group in message.groups for device in group} == {*range(8)}
    sent = math.fsum(message.count * message.nbytes for message in breakdown.messages if message.kind == "send")
    tables = 2 * config.vocab_size * config.model_dim
    if "data" in config.mesh:  # this device's shards of all gradients, in float32
        expected = 4 * transformer.num_params(config) / 8
    else:  # a message per tick and direction, and the gradients of embedding and unembedding
        b = config.batch // 8 // config.microbatches
        message = 2 * b * config.seq_len * config.model_dim
        expected = 2 * (config.microbatches + 1) * message + 4 * tables / 8
    assert sent == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_no_device_has_all_of_the_table_of_per_layer_embeddings(programs, full_effort):
    """With layers that share keys and values, compiled for TPU7x: each device looks up its columns of the table."""
    flags = dict(num_layers=6, window=128, global_every=3, global_head_dim=256, num_kv_shared_layers=3, head_dim=128)
    flags |= dict(ple_dim=128, post_norms=True, qk_norm=True, double_wide_mlp=True, tied_embeddings=True)
    flags |= dict(vocab_size=4096, model_dim=512, ff_dim=1024, num_heads=4, num_kv_heads=1, remat="full")
    config = from_preset("tiny", **flags, seq_len=512, batch=8, mesh="fsdp:8", dtype="bfloat16")
    memory, program = aot.compile_step(aot.lower_step(config, "tpu7x:2x2x1"), {}, str(programs))
    assert "[4096,96]" in program and "[4096,768]" not in program  # V = 4096, and 6 layers of 128 on 8 devices
    assert memory["peak_hbm_bytes"] < 2**30


PADDED = {compiler_flags.PADS_SUMS: "true"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, mesh, columns, flags, rings",
    [
        ("4x4x4", "fsdp:128", 2048, {}, 2),
        ("4x4x4", "fsdp:128", 1536, {}, 6),
        ("4x4x4", "fsdp:128", 2048, PADDED, 6),
        ("4x8x8", "fsdp:256,tensor:2", 2048, {}, 2),
        ("4x8x8", "fsdp:256,tensor:2", 2048, PADDED, 6),
        ("4x4x4", "data:2,fsdp:64", 1536, PADDED, 2),
        ("4x4x4", "data:4,fsdp:32", 2048, {}, 4),
    ],
)
def test_a_reduce_scatter_uses_the_rings_that_are_predicted(topology, mesh, columns, flags, rings):
    """On one ring the predicted time is close; over all axes the walk assumes that all phases have one size."""
    chip, chips = parse_topology(f"tpu7x:{topology}")
    wrap = tuple(axis.wrap for axis in chip.axes(chips))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=f"tpu7x:{topology}", wrap=wrap).devices
    on = sharding.make_mesh(placement.parse_mesh(mesh), devices)
    x = jax.ShapeDtypeStruct((3584 * on.shape["fsdp"], columns), "bfloat16", sharding=NamedSharding(on, P()))
    scatter = partial(jax.lax.psum_scatter, axis_name="fsdp", tiled=True)
    # check_vma would refuse the sum of an array that is replicated.
    sums = jax.shard_map(scatter, mesh=on, in_specs=P(), out_specs=P("fsdp"), check_vma=False)
    program = hlo.parse(jax.jit(sums).lower(x).compile(compiler_options=flags).as_text())
    breakdown = schedule.walk(program, chips=[(0, *device.coords) for device in on.devices.flat])
    (message,) = breakdown.collectives
    assert (message.kind, message.nbytes, message.rings) == ("reduce-scatter", 2 * x.size, rings)
    xla_flags = ",".join(f"{name}={value}" for name, value in flags.items()) or "none"
    run = run_of(from_preset("llama3.1-70b", mesh=mesh, batch=512, xla_flags=xla_flags), chip, chips)
    divisible = run.pads_sums or columns % 3 == 0
    predicted = run.collective_s("reduce_scatter", message.nbytes, "fsdp", divisible_by_3=divisible)
    if rings == 2:
        assert predicted == pytest.approx(message.seconds, rel=0.02)
    else:
        assert message.seconds < predicted < 2 * message.seconds


def test_the_cache_key_depends_on_the_devices_the_versions_and_the_effort(monkeypatch):
    """The text of a program has the mesh, but not its chips and cores."""
    program = SimpleNamespace(as_text=lambda: "module")
    devices_of = lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    devices = {name: devices_of(name) for name in ("tpu7x:2x2x1", "v6e:2x4", "v6e:4x2")}
    sizes = placement.parse_mesh("fsdp:4,tensor:2")
    order = lambda core_axis: sharding.make_mesh(sizes, devices["tpu7x:2x2x1"], core_axis).devices.flat
    lowered = [aot.Lowered(program, list(order(axis))) for axis in ("", "tensor", "fsdp")]
    lowered += [aot.Lowered(program, list(chips)) for name, chips in devices.items() if name != "tpu7x:2x2x1"]
    keys = [step.key({}) for step in lowered]
    assert keys[0] == keys[1] and len({*keys}) == len(keys) - 1
    assert lowered[0].key({"xla_flag": "true"}) not in keys
    assert aot.Lowered(SimpleNamespace(as_text=lambda: "another"), lowered[0].devices).key({}) not in keys
    for package in (jax, libtpu):
        with monkeypatch.context() as patch:
            patch.setattr(package, "__version__", "another")
            assert lowered[0].key({}) not in keys
    for setting in [setting for setting in aot.EFFORT if hasattr(jax.config, setting)]:
        value = getattr(jax.config, setting)
        with monkeypatch.context() as patch:  # a value that was the default is none now, or the reverse
            patch.setitem(aot.EFFORT, setting, "another" if value == aot.EFFORT[setting] else value)
            assert lowered[0].key({}) not in keys
    pairs = lambda chips: [[i for i, chip in enumerate(chips) if chip == each] for each in dict.fromkeys(chips)]
    assert pairs(lowered[1].chips) == [[0, 1], [2, 3], [4, 5], [6, 7]]  # tensor, the inner axis
    assert pairs(lowered[2].chips) == [[0, 2], [1, 3], [4, 6], [5, 7]]  # fsdp, the outer axis


def refuses(monkeypatch, message: str, peak: liveness.Peak | None = None) -> None:
    def compile_step(*_):
        raise aot.DoesNotFitError(message, peak)

    monkeypatch.setattr(aot, "compile_step", compile_step)
    monkeypatch.setattr(aot, "lower_step", lambda *_: None)
    monkeypatch.setattr(aot, "kernels_of", lambda lowered: [])


TOO_LARGE = "RESOURCE_EXHAUSTED: total memory required for HLO temporaries (152.11G) exceeds available HBM (94.75G)."


@pytest.mark.slow
def test_a_refusal_ends_with_status_3_the_buffers_and_the_way_out(capsys, monkeypatch):
    buffer = liveness.Buffer(100 * 2**30, "temporary", "bf16[32,8,4096]", "jit(train_step)/mul", "/x/model.py:12")
    refuses(monkeypatch, TOO_LARGE, liveness.Peak(152 * 2**30, "jit(train_step)/dot", "/x/model.py:34", (buffer,)))
    flags = ["--preset=llama3.1-8b", "--remat=none", "--batch=8", "--seq_len=8192", "--mesh=fsdp:8", "--compile_anyway"]
    assert aot.main(flags) == aot.DOES_NOT_FIT == 3
    out = capsys.readouterr().out
    assert "does not fit: 152.11 of 94.75 GiB of hbm, 57.36 GiB over (compiled)" in out
    assert "live at the peak  100.00 GiB; of the compiler's 152.11 52.11, 34.3%, are holes" in out
    assert " 100.00     1  bf16[32,8,4096]" in out and "model.py:12" in out and "model.py:34" in out
    assert "way out: --" in out and "a step" in out and "(predicted)" in out
    assert aot.main([*flags, "--json"]) == 3
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["fits"] is False and refusal["used_bytes"] == pytest.approx(152.11 * 2**30)
    assert refusal["over_bytes"] == pytest.approx(57.36 * 2**30)
    assert refusal["largest_buffers"][0]["bytes"] == 100 * 2**30
    # With the proposed flags the prediction for the step is the one that was printed, and it fits.
    proposal = refusal["way_out"]
    assert proposal["flags"] and proposal["hbm_bytes"] < refusal["limit_bytes"]
    config = changed([flag for flag in flags if flag != "--compile_anyway"], proposal["flags"])
    chip, chips = aot.parse_topology("tpu7x:2x2x1")
    again = aot.predict(aot.run_of(config, chip, chips))
    assert again.step_s == pytest.approx(proposal["step_s"]) and again.hbm_bytes <= proposal["hbm_bytes"]


def changed(flags: list[str], changes: list[str]) -> Config:
    parser = argparse.ArgumentParser()
    aot.flags_lib.add_flags(parser)
    return aot.flags_lib.from_args(parser.parse_args([*flags, *changes]))


@pytest.mark.slow
def test_a_step_that_is_predicted_not_to_fit_is_not_compiled(capsys, monkeypatch):
    monkeypatch.setattr(aot, "lower_step", lambda *_: pytest.fail("lowered"))
    flags = ["--preset=llama3.1-8b", "--remat=none", "--batch=64", "--seq_len=8192", "--mesh=fsdp:8"]
    assert aot.main(flags) == aot.DOES_NOT_FIT
    out = capsys.readouterr().out
    assert "GiB over (predicted)" in out and "saved activations" in out and "--compile_anyway" in out
    assert "way out: --" in out
    assert aot.main([*flags, "--json"]) == aot.DOES_NOT_FIT
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["kind"] == "predicted"
    assert refusal["over_bytes"] == refusal["used_bytes"] - refusal["limit_bytes"] > 0
    assert sum(part["bytes"] for part in refusal["parts"]) == pytest.approx(refusal["used_bytes"])
    flags = ["--topology=tpu7x:4x4x4", "--preset=llama3.1-70b", "--batch=16", "--seq_len=131072"]
    assert aot.main([*flags, "--mesh=fsdp:16,tensor:2,context:4", "--remat=minimal_offloaded"]) == aot.DOES_NOT_FIT
    out = capsys.readouterr().out
    # The compiler reports the same use: "Used 185.00G of 128.00G host".
    assert "does not fit: 185.00 of 111.76 GiB of host, 73.24 GiB over (predicted)" in out
    assert "--compile_anyway" in out and "way out: --" in out


def test_remat_auto_compiles_the_policy_that_it_chooses(capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(aot, "report", lambda config, *_: compiled.append(config.remat) or {})
    flags = ["--preset=llama3.1-8b", "--remat=auto", "--batch=8", "--seq_len=8192", "--mesh=fsdp:8", "--json"]
    assert aot.main(flags) == 0
    config = from_preset("llama3.1-8b", batch=8, mesh="fsdp:8", remat="auto")
    assert compiled == [aot.recompute.auto(config, *aot.parse_topology("tpu7x:2x2x1"))]


def test_the_way_out_if_nothing_fits(capsys, monkeypatch):
    refuses(monkeypatch, TOO_LARGE)
    assert aot.main(["--preset=llama3.1-70b", "--batch=8", "--seq_len=8192", "--mesh=fsdp:8", "--compile_anyway"]) == 3
    out = capsys.readouterr().out
    assert "way out: a smaller --batch or a larger --topology" in out and "nothing fits: llama3.1-70b on 4 chips" in out


def test_the_way_out_for_vmem_and_for_an_unknown_message(capsys, monkeypatch):
    refuses(monkeypatch, "RESOURCE_EXHAUSTED: Scoped allocation with size 48.00M and limit 32.00M exceeded scoped vmem")
    assert aot.main(["--preset=tiny", "--batch=8", "--mesh=fsdp:8"]) == 3
    out = capsys.readouterr().out
    assert "of vmem" in out and "--xla_flags=xla_tpu_scoped_vmem_limit_kib=61440" in out
    refuses(monkeypatch, "RESOURCE_EXHAUSTED: of something")
    assert aot.main(["--preset=tiny", "--batch=8", "--mesh=fsdp:8"]) == 3
    assert "does not fit: RESOURCE_EXHAUSTED: of something" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_that_the_compiler_refuses(capsys, few_tiles):
    """With an unsharded vocabulary its gradients and optimizer state exceed HBM; the planner shards it."""
    dims = "--num_layers=2 --model_dim=256 --ff_dim=512 --num_heads=2 --num_kv_heads=1 --seq_len=256 --remat=none"
    flags = [
        *SMALL,
        *dims.split(),
        "--mesh=data:8",
        f"--vocab_size={12 * 2**20}",
        "--compilation_cache=",
        "--compile_anyway",
        f"--xla_flags={','.join('='.join(flag) for flag in ON_TENSOR_CORES.items())}",
    ]
    assert aot.main([*flags, "--json"]) == 3
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["memory"] == "hbm" and 0 < refusal["over_bytes"] < 30 * aot.GiB
    assert refusal["live_bytes"] == pytest.approx(refusal["used_bytes"], rel=0.01)
    matrix = 12 * 2**20 * 256 * 4  # bytes of the embedding in float32; the unembedding is as large
    mu = next(row for row in refusal["largest_buffers"] if row["op"] == "state.opt_state[1][0].mu.*")
    assert (mu["count"], mu["kind"]) == (3, "donated argument") and mu["bytes"] == pytest.approx(2 * matrix, rel=1e-3)
    gradients = [row for row in refusal["largest_buffers"] if row["kind"] == "temporary" and row["bytes"] >= matrix]
    assert gradients and all(".py:" in row["source"] for row in gradients)
    # The proposed mesh gives each device an eighth.
    assert refusal["way_out"]["flags"][0].startswith("--mesh=fsdp:8")
    assert refusal["way_out"]["hbm_bytes"] < refusal["limit_bytes"]


# -- flags


def test_help_does_not_import_jax():
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
        (["--mesh=fsdp:4,expert:2", "--batch=8"], "mesh axis expert:2 is for mixtures of experts"),
        (["--batch=3"], "batch=3 must be a multiple of"),
        (["--xla_flags=xla_tpu_scoped_vmem_limit_kb=1"], "did you mean"),
        (["--kernel=attention"], "--kernel takes REGEX=NUMBER"),
    ],
)
def test_wrong_flags(capsys, monkeypatch, flags, words):
    monkeypatch.setattr(aot, "compile_step", lambda *_: ({}, "HloModule m, is_scheduled=true"))
    with pytest.raises(SystemExit) as end:
        command.run(aot.main, flags)
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_kernels_that_vmem_refuses_are_listed_with_their_blocks(capsys, monkeypatch):
    """The largest first; the compiler names one of them, in its own words."""
    key = "gmm M=8192 K=4096 N=1536 E=8 dtype=bfloat16 chip=tpu7x"
    small, large = ("rows=128 cols=512 step=32", "rows=640 cols=1536 step=32")
    metadata = [json.dumps(dict(tuned_key=key, blocks=blocks, calls="1")) for blocks in (small, large)]
    text = "\n".join('kernel_metadata = "{}"'.format(each.replace('"', "\\22")) for each in metadata)
    program = SimpleNamespace(as_text=lambda: text)
    monkeypatch.setattr(aot, "lower_step", lambda *_: aot.Lowered(program, []))
    monkeypatch.setattr(aot, "kernel_cycles", lambda *_, **__: {})

    def refused(*_):
        raise aot.DoesNotFitError("Scoped allocation with size 48.00M and limit 32.00M exceeded scoped vmem limit")

    monkeypatch.setattr(aot, "compile_step", refused)
    flags = ["--preset=tiny", "--batch=8", "--mesh=fsdp:8"]
    assert aot.main([*flags, "--json"]) == 3
    first, second = json.loads(capsys.readouterr().out)["kernels"]
    assert (first["blocks"], second["blocks"], first["kernel"]) == (large, small, key)
    # Two buffers for the rows of all of K, and for the columns, and for the results; in bfloat16.
    buffers = lambda rows, cols: 2 * 2 * (rows * 4096 + 4096 * cols + rows * cols)
    assert second["vmem_bytes"] == pytest.approx(buffers(128, 512) + groups.SPILL_BYTES, rel=0.01)
    assert first["vmem_bytes"] - second["vmem_bytes"] == pytest.approx(buffers(640, 1536) - buffers(128, 512), rel=0.01)
    assert aot.main(flags) == 3
    assert f"MiB of VMEM by arithmetic: gmm with {large}" in capsys.readouterr().out


def test_without_libtpu_the_error_names_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.run(aot.main, ["--batch=8"])
    assert 'compiling for TPU needs libtpu: pip install -e ".[tpu]"' in capsys.readouterr().err


def test_a_trace_is_of_one_program_in_a_file_of_its_own(capsys, tmp_path):
    for flags, words in (
        ([f"--trace={tmp_path}"], "exists, and is no file"),
        (["--trace=/dev/null/x"], "cannot be written"),
        ([f"--trace={tmp_path}/a", f"--hlo_out={tmp_path}/a"], "is --hlo_out, too"),
        (["--report=/dev/null/x"], "cannot be written"),
        ([f"--report={tmp_path}/a", f"--hlo_out={tmp_path}/a/index.html"], "is --hlo_out, too"),
        ([f"--trace={tmp_path}/a", "--compare=vmem"], "--trace and --report draw one program: without --compare"),
    ):
        with pytest.raises(SystemExit):
            command.run(aot.main, ["--batch=8", *flags])
        assert words in capsys.readouterr().err


def test_mesh_axes_of_groups():
    sizes = placement.parse_mesh("data:2,fsdp:4,tensor:2")
    assert aot.mesh_axes([(0, 1), (2, 3)], sizes) == ["tensor"]
    assert aot.mesh_axes([(0, 2, 4, 6), (1, 3, 5, 7)], sizes) == ["fsdp"]
    assert aot.mesh_axes([(0, 8)], sizes) == ["data"]
    assert aot.mesh_axes([tuple(range(16))], sizes) == ["data", "fsdp", "tensor"]
    assert aot.mesh_axes([(3,)], sizes) == [] == aot.mesh_axes([], sizes)
    assert math.prod(sizes.values()) == 16
