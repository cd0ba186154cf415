"""Tests of compiled/bundles.py: cycles and regions against counts by hand and against the compiler's simulation."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from support import BRANCH, listing

import command
from compiled import bundles


def matmul(register, mxu=0, dtype="bf16", latched=""):
    return f"%1 = vmatmul.mubr.{dtype}.{latched}gmra.mrb[{register}].mxu{mxu} %v2"


def pop(register, mxu=0):
    return f"%v3_v4 = vpop.f32.mrb[{register}].mxu{mxu}"


PUSH = "%5 = vmatpush1.bf16.msra.mxu0 %v6"
PUSH_TRANSPOSED = "%5 = vmatpush3.bf16.xpose.msra.mxu0 %v6"


def test_bundles_that_span_lines_are_parsed():
    text = listing("%1 = nothing", "%2 = dma.hbm_to_vmem /* \nbase_bounds: (1, 2)\n */", "").replace(
        "0x0   : >", "0 LB: >>"
    )
    assert [("dma" in bundle, "base_bounds" in bundle) for bundle in bundles.read_bundles(text)] == [
        (False, False),
        (True, True),
        (False, False),
    ]


@pytest.mark.parametrize("text", ["", "no bundles here", listing("", "", "").replace("0x1", "0x2")])
def test_text_without_a_listing_is_an_error(text):
    with pytest.raises(ValueError, match="not a listing of bundles"):
        bundles.read_bundles(text)


# Bundles issue in order, one per cycle. A matmul that starts in cycle t has its result in t + 211. A bfloat16 or FP8
# matmul keeps its MXU busy for 8 cycles and fills 4 or 8 registers, a float32 matmul for 4 cycles and 2 registers.
@pytest.mark.parametrize(
    "program, cycles",
    [
        ([""] * 3, 3),
        ([matmul(0), pop(0)], 211 + 1),
        ([matmul(0), pop(0), pop(1), pop(2)], 211 + 3),
        ([matmul(0), pop(4)], 8),  # the result of another matmul; the MXU is busy until 8
        ([matmul(0), matmul(4), pop(4)], 8 + 211 + 1),
        ([matmul(0), matmul(4, mxu=1), pop(4, mxu=1)], 1 + 211 + 1),
        ([matmul(0, dtype="f8e4m3fn"), pop(7)], 211 + 1),
        ([matmul(0, dtype="f32"), matmul(2, dtype="f32"), pop(2)], 4 + 211 + 1),
        ([matmul(0, dtype="f32"), pop(2)], 4),
        ([matmul(4 * i) for i in range(10)], 80),
        ([f"{matmul(0)} ;; {matmul(4)}"] + [""] * 20, 21),
        ([PUSH, PUSH, matmul(0, latched="vlgmr.msra."), pop(0)], 8 + 211 + 1),
        ([PUSH_TRANSPOSED, PUSH, matmul(0, latched="vlgmr.msra."), pop(0)], 12 + 211 + 1),
        ([PUSH, PUSH, matmul(0), pop(0)], 2 + 211 + 1),  # multiplies by the earlier weights
        ([matmul(0), *[""] * 300, pop(0)], 302),
    ],
)
def test_simulation_of_programs_with_cycles_known_by_hand(program, cycles):
    assert bundles.simulate(bundles.read_bundles(listing(*program))) == cycles


def test_simulation_with_another_latency():
    assert bundles.simulate(bundles.read_bundles(listing(matmul(0), pop(0))), latency=100) == 101


def test_simulation_refuses_an_unknown_type():
    with pytest.raises(ValueError, match=r"vmatmul.mubr.s4.gmra: cycles are known for f32, bf16"):
        bundles.simulate(bundles.read_bundles(listing(matmul(0, dtype="s4"))))


def test_loops_branches_and_copies():
    """A loop over bundles 2-30; in it a jump over the branch 11-19."""
    program = [""] * 40
    program[4] = BRANCH.format(20)
    program[12] = "%v7 = vadd.f32 %v6, %v5"
    program[17] = BRANCH.format(26)
    program[24] = BRANCH.format(2)
    program[26] = "%v7 = vadd.f32 %v6, %v5 /* outside */"
    root = bundles.spans_of(bundles.read_bundles(listing(*program[:17], "", *program[18:])), {})
    assert (root.kind, root.first, root.last) == ("kernel", 0, 39)
    (loop,) = root.inside
    assert (loop.kind, loop.first, loop.last, loop.trips) == ("loop", 2, 30, None)
    (branch,) = loop.inside
    assert (branch.kind, branch.first, branch.last) == ("branch", 11, 19)
    assert loop.own() == [*range(2, 11), *range(20, 31)]


def test_both_sides_of_a_cond_are_branches():
    program = [""] * 40
    program[2] = BRANCH.format(20)
    program[13] = "%9 = sbr.rel target bundleno = 30 (0x1e), region = 8"
    spans = bundles.spans_of(bundles.read_bundles(listing(*program)), {}).inside
    assert [(span.kind, span.first, span.last) for span in spans] == [("branch", 9, 19), ("branch", 20, 29)]


@pytest.mark.parametrize("content, kind", [("dma.hbm_to_vmem /* iteration_bounds: (4,) */", "copy"), ("", "branch")])
def test_copies_of_the_grids_blocks_differ_from_branches(content, kind):
    program = [""] * 20
    program[1], program[10] = BRANCH.format(15), content
    assert [span.kind for span in bundles.spans_of(bundles.read_bundles(listing(*program)), {}).inside] == [kind]


@pytest.mark.parametrize(
    "branches, message",
    [
        ({2: BRANCH.format(20), 12: BRANCH.format(25)}, "overlap"),
        ({2: "%9 = sbr.ind %s1"}, "bundle 2 branches to an unknown target"),
    ],
)
def test_jumps_that_form_no_tree_are_an_error(branches, message):
    with pytest.raises(ValueError, match=message):
        bundles.spans_of(bundles.read_bundles(listing(*[branches.get(i, "") for i in range(40)])), {})


def test_trips_are_parsed():
    text = "\n".join(
        [
            "$region0: #{flash.1}",
            "  loop: start=0, step=1, limit=66",
            "  $region110: #{flash.1} parent=1 // loop_pre_header",
            "  $region115: #{flash.1} parent=1 // loop_body",
            "    // While loop",
            "    $region7: #{flash.1} parent=1 // loop_body",
            "    loop: start=2, step=3, limit=9",
            "    $region9: #{flash.1} parent=1 // loop_body",
        ]
    )
    assert bundles.read_trips(text) == {115: 66, 9: 3}


def test_result_latency_is_parsed():
    path = """
  Length to end: 225, %1 = vmatmul.mubr.bf16.gmra.mrb[248].mxu0 %v15253
  Length to end: 217, %2 = vmatmul.mubr.bf16.gmra.mrb[252].mxu0 %v15261
  Length to end: 6, %v10098 = vpop.f32.mrb[252].mxu0
  Length to end: 5, %v10100 = vpop.f32.mrb[253].mxu0"""
    assert bundles.result_latency(path) == 211
    assert bundles.result_latency("  Length to end: 5, %v10100 = vpop.f32.mrb[253].mxu0") is None


# -- a kernel in the format of the compiler's dump


def dump() -> dict[str, str]:
    """50 bundles: the loop over the grid in 2-41, 6 iterations; in it the step, 10-35; in it a branch and a loop."""
    program = [""] * 50
    program[2] = "%1 = smov 0 /* Start region 94 */"
    program[3] = BRANCH.format(36)
    program[10] = "%2 = vtrace 3087007744 /* TraceMeStart(block) [ */"
    program[11] = BRANCH.format(22)
    program[18] = "%v2 = vmov 0.0 ;; %3 = vtrace 1 /* TraceMeStart(begin) [ */"
    program[23] = "%4 = vtrace 1 /* TraceMeStart(keys) [ */"
    program[25] = BRANCH.format(23)
    program[35] = BRANCH.format(2)
    units = "MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
    rows = [[0, 0, 2 if i in (18, 19) else 0, 0, 0, 0, 0, 0, 1 if i == 18 else 0, 0] for i in range(50)]
    rows = [[2, 2, 4, 2, 1, 3, 3, 2, 2, 2], *rows]
    table = "\n".join(" ".join(map(str, row)) for row in rows[:1])
    table += "\n== UTILIZATION:\n" + "\n".join(" ".join(map(str, row)) for row in rows[1:])
    return {
        "schedule": listing(*program),
        "slots": f"CAPACITY:\n{units}\n{table}\n",
        "loops": "x\n  loop: start=0, step=1, limit=6\n  $region94: #{k.1} parent=1 // loop_body\n",
        "paths": "",
    }


def kernel(moved=16770) -> bundles.Kernel:
    return bundles.Kernel("k.1", bundles.regions_of(dump(), (2, 2)), 1000, 2000, (2, 2), moved, 1677)


def test_regions():
    regions = [(r.kind, r.names, r.first, r.last, r.cycles, r.executions) for r, _ in bundles.walk(kernel().root)]
    assert regions == [
        ("kernel", (), 0, 49, 50 - 40, 1),
        ("grid", (), 2, 41, 40 - 26, 6),
        ("step", ("block",), 10, 35, 26 - 4 - 9, 4),
        ("branch", ("begin",), 18, 21, 4, None),
        ("loop", ("keys",), 23, 31, 9, None),
    ]
    assert [depth for _, depth in bundles.walk(kernel().root)] == [0, 1, 2, 3, 3]


def test_slots_in_use():
    begin = kernel().region("begin")
    assert begin.slots["VALU"] == 4 / (4 * 4) and begin.slots["SPILL"] == 1
    assert begin.limit == ("VALU", 0.25)


def test_cycles_of_a_call():
    """10 + 14 * 6 + 13 * 4 cycles, and in the step 4 for each `begin` and 9 for each iteration over `keys`."""
    call = kernel().cycles({"begin": 2, "keys": 100})
    assert call.compute == 10 + 14 * 6 + 13 * 4 + 2 * 4 + 100 * 9
    assert kernel().cycles([2, 100]) == call
    assert kernel().cycles({"keys": 100}, otherwise=2) == call
    assert call.hbm == pytest.approx(16770 / (7380e9 / 2 / 2.2e9)) and call.hbm == pytest.approx(10, rel=1e-3)
    assert call.total == call.compute + call.ends and call.ends == pytest.approx(1, rel=1e-3)
    assert kernel(moved=10**9).cycles([0, 0]).total == pytest.approx(10**9 / 1677.27 + 1, rel=1e-4)


def test_a_branch_around_a_loop_is_executed_as_often_as_it_can_be():
    inner = bundles.Region("loop", ("keys",), 3, 4, 10, {}, None, None, ())
    guard = bundles.Region("branch", (), 2, 5, 100, {}, None, None, (inner,))
    root = bundles.Region("kernel", (), 0, 9, 7, {}, 1, None, (guard,))
    kernel = bundles.Kernel("k.1", root, 0, 0, (), 0, 0)
    assert kernel.cycles({"keys": 50}).compute == 7 + 100 + 500
    assert kernel.cycles({"keys": 0}).compute == kernel.cycles(otherwise=0).compute == 7


def test_a_constant_loop_in_a_branch_multiplies_its_executions():
    inner = bundles.Region("loop", ("keys",), 3, 4, 10, {}, None, 8, ())
    branch = bundles.Region("branch", ("some",), 2, 5, 100, {}, None, None, (inner,))
    kernel = bundles.Kernel("k.1", bundles.Region("kernel", (), 0, 9, 7, {}, 1, None, (branch,)), 0, 0, (), 0, 0)
    assert [region.names for region in kernel.unknown()] == [("some",)]
    assert kernel.cycles({"some": 3}).compute == 7 + 3 * 100 + 3 * 8 * 10


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, r"how often are these executed\? begin \(4 cycles\); keys \(9 cycles\)"),
        ({"executions": {"begin": 1}}, r"executed\? keys"),
        (
            {"executions": {"nothing": 1}},
            r"0 regions of k.1 are called 'nothing'; names are \['begin', 'block', 'keys'\]",
        ),
        ({"executions": [1]}, "1 executions for the 2 regions of k.1: begin, keys"),
    ],
)
def test_unknown_executions_must_be_given(arguments, message):
    with pytest.raises(ValueError, match=message):
        kernel().cycles(**arguments)


def test_bytes_that_depend_on_data_must_be_given():
    with pytest.raises(ValueError, match="give moved_bytes"):
        kernel(moved=None).cycles([1, 1])
    assert kernel(moved=None).cycles([1, 1], moved_bytes=16770) == kernel().cycles([1, 1])


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"slots": "CAPACITY:\nMXU, XLU\n2 2\n== UTILIZATION:\n0 0\n"}, "50 bundles in the schedule, 1 in the table"),
        ({"slots": "nothing"}, "not a table of slots"),
        ({"slots": "CAPACITY:\nMXU, XLU\n2 2\n== UTILIZATION:\n0\n"}, "not a table of slots of MXU, XLU"),
        ({"schedule": "nothing"}, "not a listing"),
    ],
)
def test_a_dump_that_cannot_be_parsed_is_an_error(changed, message):
    with pytest.raises(ValueError, match=message):
        bundles.regions_of(dump() | changed, (2, 2))


def test_a_grid_without_a_branch_for_its_step_is_an_error():
    with pytest.raises(ValueError, match="6 iterations for the 5 steps of a grid, and no branch"):
        text = dump()["schedule"].replace(BRANCH.format(36), "").replace(BRANCH.format(22), "")
        bundles.regions_of(dump() | {"schedule": text}, (5,))


def call_of(name: str) -> str:
    memory = '_memory_configs":[{"memory_space":"1","offset":"0","size":"'
    sizes = f'"scoped{memory}2000"}}], "used_scoped{memory}1000"}}]'
    return f'%{name} = f32[8] custom-call(), custom_call_target="tpu_custom_call", {sizes}'


def kernels_of(folder, dumps, calls=("k.1",)):
    """The kernels read from a folder with the dumps of successive compilations of k.1."""
    for time, texts in enumerate(dumps):
        for number, (kind, label) in enumerate(bundles.PASSES.items()):
            (folder / f"{time}-k.1-0{number}-{label}.txt").write_text(texts[kind])
    result = {"program": "\n".join(map(call_of, calls)), "scoped": len(dumps) == 2}
    return list(bundles._kernels(folder, result | {"grids": {"k": {"grid": [2, 2], "moved": 16770, "ends": 1677}}}))


def without_scopes() -> dict[str, str]:
    return dump() | {"schedule": re.sub("TraceMeStart", "", dump()["schedule"])}


def test_names_come_from_the_compilation_with_scopes_and_cycles_from_the_other(tmp_path):
    (compiled,) = kernels_of(tmp_path, [without_scopes(), dump()])
    assert compiled == kernel()
    waits = without_scopes()["schedule"].replace("%1 = smov 0", f"{pop(0)} ;; {matmul(0)} ;; %1 = smov 0", 1)
    waits = waits.replace(hex(3) + "   : > { ", hex(3) + f"   : > {{ {pop(0)} ;; ", 1)
    (compiled,) = kernels_of(tmp_path, [without_scopes() | {"schedule": waits}, dump()])
    assert compiled.root.children[0].cycles == kernel().root.children[0].cycles + 210
    assert compiled.region("begin") == kernel().region("begin") and not compiled.cycles_with_scopes


def test_cycles_are_with_scopes_if_the_regions_differ_without(tmp_path):
    other = without_scopes()["schedule"].replace(BRANCH.format(22), "")
    (compiled,) = kernels_of(tmp_path, [without_scopes() | {"schedule": other}, dump()])
    assert compiled.cycles_with_scopes and compiled.root == kernel().root


def test_every_kernel_must_be_in_the_dump(tmp_path):
    assert [k.name for k in kernels_of(tmp_path, [dump()], calls=("k.1", "k.2"))] == ["k.1"]  # equal kernels: one dump
    with pytest.raises(ValueError, match=r"\[0, 0, 0, 0\] dumps of other.1 in 1 compiles"):
        kernels_of(tmp_path, [dump()], calls=("other.1",))


# -- bytes that a grid moves


def blocks_of(grid, in_spec, out_spec, scalars=0):
    call = pl.pallas_call(
        lambda *refs: None,
        out_shape=jax.ShapeDtypeStruct((100, 256), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars, grid=grid, in_specs=[in_spec], out_specs=out_spec
        ),
        name="copy",
    )
    shapes = [jax.ShapeDtypeStruct((8,), jnp.int32)] * scalars + [jax.ShapeDtypeStruct((100, 256), jnp.bfloat16)]
    return bundles._grids(jax.jit(lambda *args: call(*args)).trace(*shapes).jaxpr.jaxpr)["copy"]


@pytest.mark.parametrize(
    "in_map, out_map, moved, ends",
    [
        # All rows once, in blocks of 32 (the last block has 4 rows); elements of 2 bytes in, 4 bytes out.
        (lambda i, j: (i, j), lambda i, j: (i, j), 100 * 256 * 6, 32 * 128 * 2 + 4 * 128 * 4),
        # A block is not moved again while its index stays the same.
        (lambda i, j: (i, 0), lambda i, j: (i, j), 100 * 128 * 2 + 100 * 256 * 4, 32 * 128 * 2 + 4 * 128 * 4),
        # The blocks of the operand are moved again for every row of the grid.
        (lambda i, j: (0, j), lambda i, j: (i, j), 4 * 32 * 256 * 2 + 100 * 256 * 4, 32 * 128 * 2 + 4 * 128 * 4),
    ],
)
def test_bytes_that_a_grid_moves(in_map, out_map, moved, ends):
    grid = blocks_of((4, 2), pl.BlockSpec((32, 128), in_map), pl.BlockSpec((32, 128), out_map))
    assert (tuple(grid["grid"]), grid["moved"], grid["ends"]) == ((4, 2), moved, ends)


def test_bytes_of_blocks_whose_index_is_data_are_unknown():
    rows = pl.BlockSpec((32, 256), lambda i, table: (i, 0))
    assert blocks_of((4,), rows, rows, scalars=1)["moved"] == 100 * 256 * 6
    assert blocks_of((4,), pl.BlockSpec((32, 256), lambda i, table: (table[i], 0)), rows, scalars=1)["moved"] is None


def test_bytes_that_the_kernel_itself_moves_are_not_counted():
    grid = blocks_of((4,), pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec((32, 256), lambda i: (i, 0)))
    assert grid["moved"] == 100 * 256 * 4


# -- refusals


def test_refusals_state_bytes_and_limit():
    text = "RESOURCE_EXHAUSTED: Scoped allocation with size 48.00M and limit 32.00M exceeded scoped vmem limit by 16M"
    assert bundles.refusal(text).startswith("VMEM: 50,331,648 bytes are used and 33,554,432 the limit")
    text = "XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 66.5M of 63.5M vmem. Exceeded"
    assert bundles.refusal(text).startswith("VMEM: 69,730,304 bytes are used and 66,584,576 the limit")
    assert bundles.refusal("\nValueError: no\nmore") == "ValueError: no"
    assert bundles.refusal("JaxRuntimeError:\n  INTERNAL: Mosaic failed to compile: x\n") == (
        "INTERNAL: Mosaic failed to compile: x"
    )


@pytest.mark.parametrize("builder", ["dense", "dense:", ":build", "dense.build", "dense:a b"])
def test_a_builder_is_a_module_and_a_function(builder):
    with pytest.raises(ValueError, match="module:function"):
        bundles.measure(builder)
    with pytest.raises(ValueError, match="module:function"):
        bundles.profile(builder)


@pytest.mark.slow
def test_errors_of_the_builder_are_in_the_report():
    report = bundles.measure("dense:build", rows=3)
    assert "unexpected keyword argument 'rows'" in report.error and report.kernels == ()
    with pytest.raises(ValueError, match="unexpected keyword"):
        report.cycles()


def test_a_child_that_takes_too_long_is_an_error():
    assert bundles.measure("dense:build", timeout_s=0.01).error == "not compiled within 0.01 s"


def test_command(monkeypatch, capsys):
    calls = []
    report = bundles.Report("m:b", {"seq": 8}, "", (kernel(),), 1.0)
    monkeypatch.setattr(bundles, "measure", lambda builder, **options: calls.append((builder, options)) or report)
    assert bundles.main(["m:b", "seq=8", "kind=fast", "tiles=[1, 2]"]) == 0
    assert calls == [("m:b", {"flags": "", "seq": 8, "kind": "fast", "tiles": [1, 2]})]
    out = capsys.readouterr().out
    assert "k.1: grid 2x2, 1,000 bytes of VMEM of 2,000" in out and re.search(r"\n {6}begin +4 +\? +0% +0% +25%", out)
    assert bundles.main(["m:b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0]["root"]["children"][0]["kind"] == "grid"
    monkeypatch.setattr(bundles, "measure", lambda *_, **__: bundles.Report("m:b", {}, "no VMEM", (), 1.0))
    assert bundles.main(["m:b"]) == 1 and "refused: no VMEM" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message", [(["m:b", "seq"], "'seq' is not name=value"), (["m"], "module:function")]
)
def test_command_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.run(bundles.main, arguments)
    assert message in capsys.readouterr().err


# -- the compiler


@pytest.mark.slow
def test_schedule_of_a_compiled_kernel(monkeypatch):
    """The simulation finds no wait in the schedule, and about the same cycles without its empty bundles."""
    dumps, regions_of = [], bundles.regions_of
    monkeypatch.setitem(bundles.PASSES, "final", "final_bundles")
    monkeypatch.setattr(bundles, "regions_of", lambda dump, grid: dumps.append(dump) or regions_of(dump, grid))
    report = bundles.measure("dense:build", M=512, K=1024, N=512)
    assert report.error == ""
    schedule = bundles.read_bundles(dumps[0]["schedule"])
    assert bundles.simulate(schedule) == report.kernel().root.cycles == pytest.approx(len(schedule), abs=2)
    final = bundles.read_bundles(dumps[0]["final"])
    assert len(final) < 0.9 * len(schedule)
    assert bundles.simulate(final) == pytest.approx(len(schedule), rel=0.1)
    assert bundles.result_latency(dumps[0]["paths"]) == bundles.RESULT_LATENCY


@pytest.mark.slow
def test_named_regions_of_a_compiled_kernel():
    report = bundles.measure("dense:build", M=1000, K=1000, N=1000, tiles=[512, 512, 512])
    assert report.error == "" and not report.kernel().cycles_with_scopes
    named = {name: region for region, _ in bundles.walk(report.kernel().root) for name in region.names}
    assert set(named) == {"begin", "add", "add remainder", "end"}
    # A quarter of 512^3 takes 512 cycles on two MXUs; two tiles of 8x128 zeros are stored per cycle.
    assert 512 < named["add"].cycles < 1000 and 512 * 512 / 1024 / 2 - 10 <= named["begin"].cycles < 160
    assert {region.kind for region, _ in bundles.walk(report.kernel().root)} >= {"grid", "step", "copy", "branch"}
    assert 3 * 2**20 < report.kernel().vmem_bytes < 6 * 2**20


@pytest.mark.slow
def test_cycles_are_those_of_the_compilers_simulation():
    """336,362 by libtpu 0.0.50.1 (`bundles.profile`); the simulation of 0.0.42.1 crashes."""
    report = bundles.measure("test_bundles:build_matmul")
    assert report.error == ""
    assert report.cycles({"begin": 32, "end": 32}).total == pytest.approx(336_362, rel=0.015)


@pytest.mark.slow
def test_many_jobs_of_which_one_does_not_fit(capsys):
    sizes = dict(size=4096, tile=4096, rows=16), dict(size=1024, tile=512)  # few rows: it is refused sooner
    large, small = bundles.measure_many([("test_bundles:build_matmul", each) for each in sizes])
    assert large.error.startswith("VMEM: ") and "33,554,432 the limit" in large.error
    assert small.error == "" and small.kernel("mm").grid == (2, 2, 2)
    assert "2/2 compiled, 1 refused" in capsys.readouterr().err


def build_matmul(size=4096, tile=1024, rows=512):
    """A matmul in blocks of rows x tile, summed over K in blocks of tile."""

    def body(lhs_mk, rhs_kn, out_mn, sum_mn):
        @pl.when(pl.program_id(2) == 0)
        def _():
            with jax.named_scope("begin"):
                sum_mn[...] = jnp.zeros_like(sum_mn)

        sum_mn[...] += jnp.dot(lhs_mk[...], rhs_kn[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            with jax.named_scope("end"):
                out_mn[...] = sum_mn[...].astype(out_mn.dtype)

    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((size, size), jnp.bfloat16),
        grid=(size // rows, pl.cdiv(size, tile), pl.cdiv(size, tile)),
        in_specs=[
            pl.BlockSpec((rows, tile), lambda i, j, k: (i, k)),
            pl.BlockSpec((tile, tile), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, tile), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, tile), jnp.float32)],
        name="mm",
    )
    return call, [jax.ShapeDtypeStruct((size, size), jnp.bfloat16)] * 2
