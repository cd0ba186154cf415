"""benchmarks/collectives.py, kernels.py, scaling.py and memory.py: what they read off compiled programs, and print."""

import dataclasses
import importlib.util
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collectives as rings
import command
from benchmarks import collectives as benchmark
from benchmarks import kernels, memory, operations, scaling
from collectives import ALGORITHMS
from compiled import bundles, hlo, schedule
from compiled.bundles import Kernel, Region, Report
from compiled.schedule import TPU7X

LINK = TPU7X.link_bytes_per_s
RINGS = ALGORITHMS[1:]
PERMUTES, SPARSECORES = "collective-permute on the TensorCore's DMA", " on the SparseCores"


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "tpu7x:4x4x4"])
@pytest.mark.parametrize("case", ["all-gather", "reduce-scatter"])
def test_rings_are_permutes_and_xla_runs_on_the_sparsecores(case, topology, full_effort):
    chips = benchmark.places(topology)
    results = {name: benchmark.read(benchmark.compiled(case, name, topology), chips) for name in ALGORITHMS}
    assert results["xla"]["messages"] == {f"{case}{SPARSECORES}": 1}
    for name in RINGS:
        assert results[name]["messages"] == {PERMUTES: 3}
    # On 4x4x4 both devices of a chip send to the same other one; on 2x2x1 one of them does.
    shard_s = 8192 * 4096 * 2 / 4 / LINK * (2 if topology == "tpu7x:4x4x4" else 1)
    for name, hops in zip(RINGS, (3, 2), strict=True):
        # Copies of shards into the result are all that can hide messages.
        least_s = hops * shard_s - results[name]["tensorcore_s"]
        assert 0.999 * least_s < results[name]["exposed_s"] < 1.001 * hops * shard_s
        assert results[name]["tensorcore_s"] < 0.25 * hops * shard_s
        assert results[name]["exposed_s"] + results[name]["tensorcore_s"] == pytest.approx(results[name]["total_s"])
    # Two rings, each with half: both ways round on 4x4x4, over one link on 2x2x1.
    assert results["xla"]["exposed_s"] == pytest.approx((1.5 if topology == "tpu7x:4x4x4" else 3) * shard_s)


@pytest.mark.slow
def test_collective_matmuls_multiply_while_their_messages_travel(full_effort):
    """Forward is a gather and a scatter; the backward of each is the other. At least half of the bytes are hidden.

    Rings in one direction are left out: they send the same blocks by the same code, one hop more.
    """
    program = benchmark.compiled("MLP forward", "ring_bidirectional", "tpu7x:2x2x1")
    both_ways = benchmark.read(program, benchmark.places("tpu7x:2x2x1"))
    block_s = 8192 * 1024 * 2 / LINK
    assert both_ways["messages"] == {PERMUTES: 6} and both_ways["exposed"] < 6
    assert both_ways["exposed_s"] < 0.5 * 2 * 2 * block_s  # two hops


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_a_gradient_in_parts_of_any_size_is_summed_by_the_sparsecores(dim):
    """Shards of 13 rows or columns: XLA sums them on the TensorCore, which waits; collectives.py does not."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
    uses = [jax.ShapeDtypeStruct((4, 1024, m), jnp.bfloat16, sharding=NamedSharding(mesh, P())) for m in (104, 1024)]

    def engines(scatter) -> set:
        layer = lambda _, xs: (None, scatter(jnp.einsum("bd,bf->df" if dim == 0 else "bd,bf->fd", *xs)))
        layers = lambda x, dy: jax.lax.scan(layer, None, (x, dy))[1]
        out = P(None, "x") if dim == 0 else P(None, None, "x")
        per_device = jax.shard_map(layers, mesh=mesh, in_specs=P(), out_specs=out)
        breakdown = schedule.walk(hlo.parse(jax.jit(per_device).lower(*uses).compile().as_text()))
        return {(m.engine, m.synchronous) for m in breakdown.collectives if m.kind == "reduce-scatter"}

    plain = lambda dw: jax.lax.psum_scatter(dw, "x", scatter_dimension=dim, tiled=True)
    assert engines(plain) == {("TensorCore", True)}
    assert engines(lambda dw: rings.reduce_scatter(dw, "x", dim=dim, algorithm="xla")) == {("SparseCore", False)}


@pytest.mark.slow
def test_across_slices_goes_only_what_must():
    """Compiled for two slices of 8 devices. The slow network sends an eighth: last in a sum, first in a gather."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1", num_slices=2)
    devices = sorted(topology.devices, key=lambda device: (device.slice_index, device.id))
    mesh = Mesh(np.array(devices).reshape(2, 8), ("slice", "x"), axis_types=(AxisType.Auto,) * 2)
    both = P(("slice", "x"))
    x = jax.ShapeDtypeStruct((16 * 1024, 1024), jnp.float32, sharding=NamedSharding(mesh, both))

    def sent(function) -> tuple[int, int]:
        """(rows that a device sends to the other slice, messages inside its slice)."""
        text = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=both, out_specs=both)).lower(x).compile().as_text()
        assert not re.search(r" (all-gather|all-reduce|reduce-scatter)(-start)?\(", text)
        sends = re.findall(r"= \(f32\[([\d,]+),1024\]\S* .*? send\(", text)
        return sum(math.prod(map(int, rows.split(","))) for rows in sends), text.count(" collective-permute-start(")

    assert sent(lambda x: rings.all_reduce(x, ("x", "slice"))) == (2 * 1024 // 16, 14)
    assert sent(lambda x: rings.all_reduce(x, ("slice", "x"))) == (2 * 1024 // 2, 14)
    assert sent(lambda x: rings.all_gather(x, ("slice", "x"))) == (8 * 1024, 7)


# -- reading a schedule


def program(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule m, is_scheduled=true, num_partitions=8

%called (q: bf16[2,45]) -> bf16[8,45] {{
  %q = bf16[2,45]{{1,0}} parameter(0)
  ROOT %all-gather.1 = bf16[8,45]{{1,0}} all-gather(%q), replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}, dimensions={{0}}, \
backend_config={{"color_strategies":[1,2]}}
}}

ENTRY %main (p: bf16[2,45]) -> bf16[2,45] {{
  %p = bf16[2,45]{{1,0}} parameter(0)
{body}
  ROOT %end = bf16[2,45]{{1,0}} bitcast(%p)
}}
"""


ROUND, OTHER_WAY = "{0,2},{2,4},{4,0}", "{0,4},{4,2},{2,0}"


def permute(number: int, pairs: str = ROUND) -> str:
    """A message of 44.5 GB: half a second at 89 GB/s."""
    shape = "bf16[22250,1000000]{1,0}"
    return (
        f"%collective-permute-start.{number} = ({shape}, {shape}) collective-permute-start(%p), "
        f"source_target_pairs={{{pairs}}}"
    )


def done(number: int) -> str:
    return f"%done.{number} = bf16[2,45]{{1,0}} collective-permute-done(%collective-permute-start.{number})"


def work(seconds: float) -> str:
    cycles = round(seconds * TPU7X.estimates_hz)
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%fusion.{cycles} = f32[1]{{0}} fusion(%p), kind=kLoop, {config}"


@pytest.mark.parametrize(
    "lines, exposed, exposed_s, total_s",
    [
        ([permute(1), done(1)], 1, 0.5, 0.5),
        ([permute(1), work(0.2), done(1)], 1, 0.3, 0.5),
        ([permute(1), work(0.7), done(1)], 0, 0.0, 0.7),
        ([work(0.7), permute(1), done(1)], 1, 0.5, 1.2),
        ([permute(1), permute(2), done(1), done(2)], 2, 1.0, 1.0),  # one after the other on the same link
        ([permute(1), permute(2, OTHER_WAY), done(1), done(2)], 1, 0.5, 0.5),  # at once, each its own way
        ([permute(1), work(0.4), permute(2), work(0.2), done(1), work(0.1), done(2)], 1, 0.3, 1.0),
    ],
)
def test_a_schedule_is_walked_on_a_clock(lines, exposed, exposed_s, total_s):
    result = benchmark.read(program(*lines))
    assert result["exposed"] == exposed
    assert (result["exposed_s"], result["total_s"]) == pytest.approx((exposed_s, total_s))
    assert result["tensorcore_s"] == pytest.approx(total_s - exposed_s)


def test_a_collective_on_the_sparsecores_takes_its_rings_at_once():
    call, end = "%ag = bf16[8,45]{1,0} call-start(%p), to_apply=%called", "%agd = bf16[8,45]{1,0} call-done(%ag)"
    result = benchmark.read(program(call + ', async_execution_thread="sparsecore"', end))
    assert result["messages"] == {f"all-gather{SPARSECORES}": 1}
    assert result["exposed_s"] == pytest.approx(8 * 45 * 2 * 3 / 4 / LINK)  # two rings, and two groups on each chip
    assert benchmark.read(program(call, end))["messages"] == {"all-gather on the TensorCore's DMA": 1}


def test_a_collective_that_is_not_asynchronous_is_named_so():
    alone = "%r = bf16[8,45]{1,0} all-reduce(%p), replica_groups={{0,2,4,6}}, to_apply=%called"
    result = benchmark.read(program(alone))
    assert result["messages"] == {"all-reduce on the TensorCore, which waits": 1}
    assert result["exposed_s"] == result["total_s"] == pytest.approx(2 * 8 * 45 * 2 * 3 / 4 / LINK)


def test_what_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match="cycles or trips are unknown for"):
        benchmark.read(program('%k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call"'))


# -- benchmarks/kernels.py: cycles of our kernels and others'


BUNDLES = itertools.count()  # a region is identified by its first bundle


def region(kind: str, cycles: int, *inside: Region, executions: int | None = None) -> Region:
    return Region(kind, (), next(BUNDLES), 0, cycles, {}, executions, None, inside)


def report_of(name: str, *inside: Region, grid=()) -> Report:
    kernel = Kernel(name, region("kernel", 10, *inside, executions=1), 0, 0, grid, None, None)
    return Report("invented:build", {}, "", (kernel,), 1.0)


def branches(*cycles: int) -> list[Region]:
    return [region("branch", each) for each in cycles]


@pytest.mark.slow
def test_an_anchor_with_a_known_grid():
    """2 heads with 8 rows of blocks have 64 steps each, of which 36 are not masked."""
    inside = region("grid", 40, region("step", 80, *branches(170, 3000, 130), executions=128), executions=130)
    call = kernels.forward("jax")
    of_both = 10 + 130 * 40 + 128 * 80 + 2 * (8 * 170 + 36 * 3000 + 8 * 130)
    assert call.read(report_of("splash.1", inside, grid=(2, 8, 8))) == of_both / 2
    with pytest.raises(ValueError, match="3 executions for the 2 regions"):
        call.read(report_of("splash.1", *branches(1, 2)))


@pytest.mark.slow
def test_an_anchor_with_a_grid_of_the_blocks_that_are_seen():
    step = region("branch", 100, *branches(180, 2700, 3000, 360))
    inside = region("branch", 5, region("loop", 60, step))
    of_both = 15 + 74 * 60 + 72 * 100 + 2 * (8 * 180 + 28 * 2700 + 8 * 3000 + 8 * 360)
    assert kernels.forward("tokamax").read(report_of("splash.1", inside)) == of_both / 2
    of_both = 15 + 26 * 60 + 24 * 100 + 2 * (8 * 180 + 4 * 2700 + 8 * 3000 + 8 * 360)  # 4 documents, 3 blocks each
    assert kernels.forward("tokamax", documents=4).read(report_of("splash.1", inside)) == of_both / 2
    of_both = 15 + 128 * 60 + 126 * 100 + 2 * (32 * 180 + 63 * 3000 + 32 * 360)  # a window cuts all of its blocks
    windowed = kernels.forward("tokamax", T=32768, window=1024)
    assert windowed.read(report_of("splash.1", inside)) == of_both / 2


def test_an_anchor_without_a_mask_has_no_branch_for_one():
    inside = region("grid", 40, region("step", 2800, *branches(180, 360), executions=128), executions=130)
    of_both = 10 + 130 * 40 + 128 * 2800 + 2 * 8 * (180 + 360)
    report = report_of("splash.1", inside, grid=(2, 64))
    assert kernels.forward("tokamax", causal=False).read(report) == of_both / 2


def test_backward_of_the_anchors():
    step = region("step", 260, *branches(115, 5400, 5600, 98), executions=128)
    report = report_of("splash_mha_dkv_no_residuals.1", region("grid", 60, step, executions=130), grid=(8, 2, 8))
    of_both = 10 + 130 * 60 + 128 * 260 + 2 * (8 * 115 + 28 * 5400 + 8 * 5600 + 8 * 98)
    assert kernels.backward("tokamax").read(report) == of_both / 2
    assert kernels.backward("tokamax", step=True).read(report) == 60 + 260 + 5400


def test_tiles_of_megablox_are_visited_by_every_group_in_them():
    """Rows of the eight groups are in 8 10 8 9 6 12 9 9 tiles of 128 rows."""
    inside = region("branch", 5, region("loop", 100, region("branch", 12_000)))
    assert kernels.grouped("jax", "gmm").read(report_of("gmm.1", inside)) == 15 + 73 * 100 + 71 * 12_000


@pytest.mark.slow
@pytest.mark.parametrize("column", ["ironwood", "jax"])
@pytest.mark.parametrize("heads_of_8k", [68_000.0, 90_000.0])
def test_a_row_of_the_table(column, heads_of_8k):
    """Four documents in 8k against four heads of 2k."""
    (row,) = [row for row in kernels.rows() if "documents" in row.name]
    packed, alone = row.calls[column]
    assert (packed.options["packed"], alone.options["packed"]) == (True, False)
    assert alone.options["seq" if column == "ironwood" else "T"] == 2048
    assert row.figure(heads_of_8k, 17_000.0) == heads_of_8k / 68_000


def table(row: kernels.Row, cycles: dict[str, float], absent=()) -> kernels.Result:
    """A row whose calls give these cycles."""
    calls = {column: (kernels.Call(column, {}, lambda report: cycles[report.builder]),) for column in row.calls}
    report = lambda call: Report(call.builder, {}, "", (), 2.0)
    return kernels.evaluate(dataclasses.replace(row, calls=calls, figure=lambda only: only), report, absent)


def row_of(text: str) -> kernels.Row:
    (row,) = [row for row in kernels.rows() if row.name == text]
    return row


@pytest.mark.slow
def test_goals_are_met_from_their_own_side():
    cycles = dict(ironwood=70_000, jax=140_000, tokamax=110_000)
    line = kernels.line_of(table(row_of("forward, head"), cycles))
    assert line == "| forward, head | 80,000 | 70,000 | 140,000 | 110,000 | yes | 0.0398 | 0.0795 | 0.0625 | 0.0641 |"
    assert table(row_of("forward, head"), cycles | dict(ironwood=80_001)).met is False
    dense = row_of("dense 8192^3, bf16, of the MXU limit")
    assert kernels.line_of(table(dense, dict(ironwood=0.968))).endswith(
        "| 92.0% | 96.8% | - | - | yes | - | - | - | - |"
    )
    assert table(dense, dict(ironwood=0.91)).met is False
    assert table(row_of("backward, head"), cycles).met is None


def test_a_lead_over_tokamax_needs_tokamax():
    row, cycles = row_of("forward, head of 64"), dict(ironwood=91_000, jax=140_000, tokamax=110_000)
    start, times = "| forward, head of 64 | tokamax / 1.2", "0.0517 | 0.0795"
    line = kernels.line_of(table(row, cycles))
    assert line == f"{start} = 91,667 | 91,000 | 140,000 | 110,000 | yes | {times} | 0.0625 | - |"
    assert table(row, cycles | dict(ironwood=92_000)).met is False
    line = kernels.line_of(table(row, cycles, absent=["tokamax"]))
    assert line == f"{start} | 91,000 | 140,000 | not installed | unknown | {times} | - | - |"


def test_what_fails_is_a_cell_and_not_the_end():
    row = row_of("forward, head")
    refused = lambda call: Report(call.builder, call.options, "VMEM: too much", (), 1.0)
    result = kernels.evaluate(row, refused, ["tokamax"])
    assert (
        kernels.line_of(result)
        == "| forward, head | 80,000 | failed | failed | not installed | - | - | - | - | 0.0641 |"
    )
    assert "VMEM: too much" in result.figures["ironwood"]


def test_the_table_without_tokamax(monkeypatch, capsys):
    """Runs the command without compiling anything."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        kernels.importlib.util, "find_spec", lambda name: None if name == "tokamax" else find_spec(name)
    )
    monkeypatch.setattr(bundles, "measure", lambda builder, **options: Report(builder, options, "refused", (), 1.0))
    assert kernels.main(["--only=^forward, head"]) == 1
    out, err = capsys.readouterr()
    assert "tokamax not installed" in out.splitlines()[0]
    assert [line.count("|") for line in out.splitlines() if line.startswith("|")] == [11] * 7
    assert "forward, head of 64, ironwood: failed: " in out
    assert len(err.splitlines()) == 9 and "build_tokamax" not in err  # a line for each compile
    kernels.main(["--json", "--only=dense.*fp8"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["goal"] == 0.95 and row["met"] is None and row["figures"]["jax"] == "-"
    with pytest.raises(SystemExit):
        command.run(kernels.main, ["--only=nothing of the kind"])
    assert "forward, head of 64" in capsys.readouterr().err


def test_work_is_of_the_ideal_with_what_is_computed_in_vain():
    ideal = 2 * 8192 * 4096 * 1536 / 524_288
    rows = [row for row in kernels.rows() if "gmm" in row.name]
    assert [row.figure(1.2 * ideal) for row in rows] == pytest.approx([1.2, 0.6, 1.2, 1.2 * 32 / 37])
    assert all(row.goal == 1.08 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dense 8192^3, bf16, of the MXU limit", pytest.param("forward, head", marks=pytest.mark.exhaustive)]
)
def test_a_row_compiled(name):
    result = kernels.evaluate(row_of(name), kernels.compiler(), absent=["tokamax"])
    assert result.met, result.figures
    if name == "forward, head":
        assert 1.5 < result.figures["jax"] / result.figures["ironwood"] < 2.5
        assert result.figures["ironwood"] < 70_500


@pytest.mark.slow
def test_scaling_has_a_row_for_each_slice_that_can_train(capsys, monkeypatch):
    """405B does not fit on 4 chips. Efficiency is MFU over that of the smallest slice."""
    monkeypatch.setattr(
        "sys.argv", ["scaling.py", "--models=llama3.1-8b,llama3.1-405b", "--slices=2x2x1,8x8x16", "--json"]
    )
    scaling.main()
    rows = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["chips"]) for row in rows if row["kind"] == "weak"] == [
        ("llama3.1-8b", 4),
        ("llama3.1-8b", 1024),
        ("llama3.1-405b", 1024),
    ]
    small, large = (row for row in rows if row["kind"] == "strong" and row["model"] == "llama3.1-8b")
    assert small["batch"] == large["batch"] == 2048 and small["efficiency"] == 1
    assert large["efficiency"] == pytest.approx(large["mfu"] / small["mfu"])
    assert large["efficiency"] == pytest.approx(small["step_s"] * 4 / (large["step_s"] * 1024))
    columns = scaling.table(rows).splitlines()
    assert len(columns) == 2 + len(rows) and len({line.count("|") for line in columns}) == 1


def test_memory_says_of_each_policy_what_was_compiled_or_why_it_was_refused(capsys, monkeypatch):
    """Where the host's memory is too small for a program, the compiler does not say how much HBM it needs."""
    known = {
        ("full", 8192): dict(fits=True, peak_hbm_bytes=2**33, host_bytes=0),
        ("none", 131_072): dict(fits=False, memory="hbm", used_bytes=2**37),
        ("qkv_proj_offloaded", 8192): dict(fits=True, peak_hbm_bytes=2**33, host_bytes=2**34),
        ("minimal_offloaded", 131_072): dict(fits=False, memory="host", used_bytes=2**37),
    }
    other = dict(fits=True, peak_hbm_bytes=2**30, host_bytes=0)
    case = lambda expected: (expected.run.config.remat, expected.run.config.seq_len)
    monkeypatch.setattr(memory.results, "load_or_compile", lambda expected: known.get(case(expected), other))
    memory.main(["8b"])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert {line.count("|") for line in lines} == {head.count("|")}
    rows = {line.split("`")[1]: [cell.strip() for cell in line.split("|")[2:10]] for line in lines}
    assert list(rows) == memory.POLICIES
    compiled_cells = {policy: [cells[0], cells[2], cells[4], cells[6]] for policy, cells in rows.items()}
    assert compiled_cells["full"] == ["8.0", "", "1.0", ""]
    assert compiled_cells["none"] == ["1.0", "", "128.0 refused", ""]
    assert compiled_cells["qkv_proj_offloaded"] == ["8.0", "16.0", "1.0", ""]
    assert compiled_cells["minimal_offloaded"] == ["1.0", "", "refused", "128.0"]


def test_the_table_of_memory_is_the_one_of_today(capsys, monkeypatch):
    """70B in docs/RESULTS.md: all results are stored. python benchmarks/readme.py "memory of 70B" writes the table."""
    monkeypatch.setattr(memory.results.subprocess, "run", lambda command, **_: pytest.fail(f"not stored: {command}"))
    memory.main(["70b"])
    shown = (memory.ROOT / "docs/RESULTS.md").read_text()
    written = re.search(r"<!-- compiled: memory of 70B -->\n(.*?)<!-- end -->", shown, re.DOTALL)[1]
    assert capsys.readouterr().out == written


def test_the_table_of_counted_steps_is_the_stored_one():
    """`python benchmarks/readme.py operations` writes it."""
    page = (command.ROOT / "docs/RESULTS.md").read_text()
    shown = re.search(r"<!-- compiled: operations -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1]
    steps = operations.known()
    assert shown == operations.table(steps) and {*steps} <= {*operations.STEPS}
    for name, step in steps.items():
        kinds = [sum(step[field].values()) for field in ("by_category_s", "estimated_by_category_s")]
        assert kinds == [pytest.approx(step["step_s"]), pytest.approx(step["estimated_step_s"])]
        lowest = 0.9 if name.startswith("llama") else 0.8  # the more elementwise work, the shorter
        assert step["counted"] > 0.95 and lowest < step["step_s"] / step["estimated_step_s"] < 1.1, name
