"""Tests of compiled/timeline.py: a trace written by hand, and the trace of a run."""

import json
import re
from types import SimpleNamespace

import pytest
from support import SMALL

import command
import train
from compiled import hlo, timeline
from compiled.timeline import Event
from config import Config
from predicted import transformer

PROGRAM = hlo.parse(
    """HloModule jit_train_step, is_scheduled=true

%fused (p0: f32[4,8], p1: f32[8,2]) -> f32[4,2] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = f32[8,2]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,2]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %w = f32[8,2]{1,0} constant({...})
  %many = f32[4,2]{1,0} fusion(%p, %w), calls=%fused, metadata={op_name="f/dot" source_file="model.py" source_line=7}
  ROOT %added = f32[4,8]{1,0} add(%p, %p), metadata={source_file="model.py" source_line=9}
}

%condition (q: f32[4,8]) -> pred[] {
  %q = f32[4,8]{1,0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[4,8]) -> f32[32,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %while.3 = f32[4,8]{1,0} while(%x), condition=%condition, body=%body
  ROOT %gathered = f32[32,8]{1,0} all-gather(%while.3), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}
"""
)


def step(run, device, begin):
    """Events over 10 s: a loop of 7 around a matmul of 4 and an addition of 2; a collective of 2; 1 s idle."""
    event = lambda name, at, seconds: Event(name, device, "lane " + device, run, begin + at, seconds)
    return [event("while.3", 0, 7), event("many", 1, 4), event("added", 5, 2), event("gathered", 8, 2)]


def test_time_is_counted_once_and_adds_up():
    events = [event for run in (1, 2) for device in "ab" for event in step(run, device, 100 * run)]
    summary = timeline.summarize(events, PROGRAM)
    assert (summary.devices, summary.steps, summary.step_s) == (2, 2, 10)
    assert summary.categories == {"matmul": 4, "elementwise": 3, "synchronous collectives": 2, "idle": 1}
    assert summary.lines == {"model.py:7": 4, "model.py:9": 2, "(no line)": 3}
    assert summary.ops[0] == ("many", 4, 1, "f/dot")
    assert summary.matmul_flops == 2 * 4 * 8 * 2


def test_a_measured_run_is_drawn_with_its_own_seconds():
    events = [event for run in (1, 2) for device in "ab" for event in step(run, device, 100 * run)]
    spans = timeline.spans_of(events, PROGRAM)
    assert [(span.process, span.name, span.begin, span.end) for span in spans[:4]] == [
        ("device a", "while.3", 0, 7),
        ("device a", "many", 1, 5),
        ("device a", "added", 5, 7),
        ("device a", "gathered", 8, 10),
    ]
    summary = timeline.summarize(events, PROGRAM)
    for category, seconds in summary.categories.items():
        own = sum(span.args["own_seconds"] for span in spans if span.category == category)
        assert own == (0 if category == "idle" else seconds * 4)
    assert {span.kind for span in spans if span.name == "gathered"} == {"wait"}


def test_nested_time_counts_for_the_innermost_event():
    """In nested loops, the time of an event in the inner loop is subtracted from the inner loop alone."""
    spans = {"outer": (0, 10), "inner": (1, 8), "first": (2, 3), "second": (6, 2), "after": (11, 4)}
    events = [Event(name, "a", "lane", 1, begin, seconds) for name, (begin, seconds) in spans.items()]
    assert timeline.own_seconds(events) == [2, 3, 3, 2, 4]
    assert timeline.own_seconds(events[::-1]) == [4, 2, 3, 3, 2]


def test_lanes_do_not_nest_in_each_other():
    first, second = (Event("added", "a", lane, 0, 0.0, 5.0) for lane in "12")
    assert timeline.own_seconds([first, second]) == [5, 5]


def test_errors_name_what_the_trace_or_the_program_lacks(tmp_path):
    with pytest.raises(ValueError, match="no instruction of jit_train_step"):
        timeline.summarize([], PROGRAM)
    with pytest.raises(ValueError, match=r"the program has no 'else.1': trace and train_step.hlo are not of the same"):
        timeline.summarize([Event("else.1", "a", "", 0, 0, 1)], PROGRAM)
    with pytest.raises(ValueError, match=r"has no \*.xplane.pb: python train.py --profile_dir="):
        timeline.newest(str(tmp_path))
    with pytest.raises(ValueError, match=r"has no \*.xplane.pb"):  # at once, though there is one below
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "host.xplane.pb").write_bytes(b"")
        timeline.newest(str(tmp_path))
    with pytest.raises(SystemExit):
        command.run(timeline.main, [str(tmp_path)])


def test_a_damaged_trace_and_a_wrong_prediction_are_errors(tmp_path, capsys):
    trace = tmp_path / "plugins/profile/2026_01_01/host.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"\x0a\xff\xff")
    (tmp_path / timeline.PROGRAM).write_text(
        "HloModule m, is_scheduled=true\n\nENTRY %m (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"
    )
    wrong = "is not the output of aot.py --json for a step that fits"
    for content, words in (("7", wrong), ("[]", wrong), ("", "is damaged")):
        (tmp_path / "predicted").write_text(content)
        with pytest.raises(SystemExit):
            command.run(timeline.main, [str(tmp_path), *([f"--predicted={tmp_path / 'predicted'}"] if content else [])])
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("%a = f32[8] all-gather(%x), dimensions={0}", "synchronous collectives"),
        ("%a = (f32[4], f32[8]) all-gather-start(%x), dimensions={0}", "waits for collectives"),
        ("%a = f32[8] all-gather-done(%x)", "waits for collectives"),
        ("%a = f32[8] async-done(%x), calls=%scattered", "waits for collectives"),
        ("%a = f32[8] copy-done(%x)", "waits for copies"),
        ("%a = f32[8] copy(%x)", "copies and layouts"),
    ],
)
def test_waits_have_the_categories_of_predictions(line, kind):
    program = hlo.parse(
        "HloModule jit_train_step, is_scheduled=true\n\n"
        "%scattered (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n"
        "  ROOT %r = f32[8] reduce-scatter(%p), replica_groups={{0}}, dimensions={0}\n}\n\n"
        f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n  {line}\n"
        "  ROOT %y = f32[8] copy(%x)\n}\n"
    )
    assert timeline.kind_of(program, program.computations["main"]["a"]) == kind


def test_planes_of_hosts_and_of_devices():
    def event(name, begin, **stats):
        return SimpleNamespace(name=name, start_ns=begin * 1e9, duration_ns=1e9, stats=list(stats.items()))

    line = lambda name, *events: SimpleNamespace(name=name, events=list(events))
    plane = lambda name, *lines: SimpleNamespace(name=name, lines=list(lines))
    simulated = dict(hlo_module="jit_train_step", run_id=7, device_ordinal=3)
    host = plane(
        "/host:CPU",
        line("tf_XLAEigen/1", event("add", 1, hlo_op="added", **simulated), event("wait", 2)),
        line("tf_XLAEigen/2", event("add", 3, hlo_op="added", **simulated | dict(hlo_module="jit_init"))),
        line("python", event("add", 4, hlo_op="added", **simulated)),
    )
    tpu = plane(
        "/device:TPU:0",
        line("XLA Modules", event("jit_train_step(123)", 0), event("jit_init(4)", 5)),
        line("XLA Ops", event("%added = f32[4,8]{1,0} add(%p, %p)", 0.5), event("%added = ...", 5.5)),
    )
    megascale = plane("/device:CUSTOM:Megascale Trace")  # appears once libtpu is loaded
    assert list(timeline.read([host, megascale])) == [Event("added", "3", "tf_XLAEigen/1", 7, 1.0, 1.0)]
    assert list(timeline.read([tpu])) == [Event("added", "/device:TPU:0", "XLA Ops", 0, 0.5, 1.0)]


@pytest.mark.slow
def test_a_profiled_run_is_read(tmp_path, capsys):
    """Its matmuls are those of the model: 6 FLOPs a weight and token, and attention with all keys, masked or not."""
    options = dict(mesh="fsdp:8", steps=5, sample=0, eval_batches=0, profile_dir=str(tmp_path), compilation_cache="")
    config = Config(**SMALL | options)
    train.run(config)
    capsys.readouterr()
    timeline.main([str(tmp_path), "--json", f"--trace={tmp_path.parent / 'run.json'}"])
    drawn = json.loads((tmp_path.parent / "run.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in drawn}) == 8
    summary = json.loads(capsys.readouterr().out)
    assert (summary["devices"], summary["steps"]) == (8, 3)
    assert {"matmul", "synchronous collectives", "elementwise", "idle"} <= summary["categories"].keys()
    assert sum(summary["categories"].values()) == pytest.approx(summary["step_s"])
    heads = config.num_heads * 2 * config.head_dim
    flops = 6 * (transformer.matmul_params(config) + config.num_layers * heads * config.seq_len)
    assert summary["matmul_flops"] == pytest.approx(flops * config.batch * config.seq_len / 8, rel=0.02)
    predicted = tmp_path / "step.json"
    by_category_s = {"kernel flash": 0.25, "synchronous collectives": 0.125}
    predicted.write_text(json.dumps(dict(step_s=1.5, by_category_s=by_category_s)))
    timeline.main([str(tmp_path), f"--predicted={predicted}"])
    out = capsys.readouterr().out
    assert re.search(r"synchronous collectives +[\d.]+ m?s +[\d.]+% +125 ms", out)
    assert "kernel flash" in out and "fsdp.py:" in out and "measured, a device and a step" in out
