"""Tests of compiled/trace.py: the sums of a trace are those of the walk, and its file has the format of the viewers."""

import itertools
import json
import math
from collections import Counter, defaultdict

import pytest

from compiled import trace
from compiled.hlo import parse
from compiled.schedule import Event, walk


def fusion(name: str, cycles: int) -> str:
    config = json.dumps({"window_config": {"estimated_cycles": str(cycles)}})
    where = f'op_name="jit(step)/transpose(jvp())/{name}" source_file="a/flash.py" source_line=7'
    return f"%{name} = u8[8]{{0}} fusion(%p), kind=kLoop, calls=%vector, metadata={{{where}}}, backend_config={config}"


def loop_of(name: str, trips: int, *body: str) -> str:
    """The computations of a loop of so many trips that carries (an index, an array)."""
    head = f"%{name}.body (s: (s32[], u8[8])) -> (s32[], u8[8]) {{\n  %s = (s32[], u8[8]{{0}}) parameter(0)\n"
    head += "  %i = s32[] get-tuple-element(%s), index=0\n  %p = u8[8]{0} get-tuple-element(%s), index=1\n"
    head += "  %one = s32[] constant(1)\n  %next = s32[] add(%i, %one)\n"
    lines = "".join(f"  {line}\n" for line in body)
    condition = f"%{name}.condition (s: (s32[], u8[8])) -> pred[] {{\n  %s = (s32[], u8[8]{{0}}) parameter(0)\n"
    condition += f"  %i = s32[] get-tuple-element(%s), index=0\n  %n = s32[] constant({trips})\n"
    return (
        f"{head}{lines}  ROOT %out = (s32[], u8[8]{{0}}) tuple(%next, %p)\n}}\n\n"
        f"{condition}  ROOT %less = pred[] compare(%i, %n), direction=LT\n}}\n\n"
    )


def call(name: str) -> tuple[str, ...]:
    state = "(s32[], u8[8]{0})"
    return (
        f"%{name}.0 = s32[] constant(0)",
        f"%{name}.in = {state} tuple(%{name}.0, %p)",
        f"%{name} = {state} while(%{name}.in), condition=%{name}.condition, body=%{name}.body",
    )


def transfer(name: str, opcode: str, nbytes: int, more: str = "") -> str:
    shape = f"u8[{nbytes}]{{0}}"
    return f"%{name} = ({shape}, {shape}, u32[]{{:S(2)}}) {opcode}-start(%p){more}"


PAIRS = ", source_target_pairs={{0,2},{2,0}}"
SUM = ", replica_groups={{0,2},{1,3}}, to_apply=%vector"
BRANCH = "branch_computations={%short, %long}"
INNER = (fusion("inner_work", 900), transfer("hop", "collective-permute", 800_000, PAIRS))
INNER += ("%hopped = u8[8]{0} collective-permute-done(%hop)", f"%sum = u8[90000]{{0}} all-reduce(%p){SUM}")
OUTER = (fusion("outer_work", 5000), *call("inner"), transfer("fetch", "copy", 64_000_000), fusion("hides", 2200))
OUTER += ("%fetched = u8[8]{0} copy-done(%fetch)",)
PROGRAM = parse(
    "HloModule m, is_scheduled=true, num_partitions=8\n\n"
    "%vector (v: u8[8]) -> u8[8] {\n  %v = u8[8]{0} parameter(0)\n  ROOT %neg = u8[8]{0} negate(%v)\n}\n\n"
    f"%short (p: u8[8]) -> u8[8] {{\n  %p = u8[8]{{0}} parameter(0)\n  ROOT {fusion('brief', 10)}\n}}\n\n"
    f"%long (p: u8[8]) -> u8[8] {{\n  %p = u8[8]{{0}} parameter(0)\n  ROOT {fusion('lengthy', 4000)}\n}}\n\n"
    + loop_of("inner", 4, *INNER)
    + loop_of("outer", 7, *OUTER)
    + "ENTRY %main (p: u8[8], k: s32[]) -> u8[8] {\n  %p = u8[8]{0} parameter(0)\n  %k = s32[] parameter(1)\n"
    + "  %saved = (u8[16000]{0:S(5)}, u8[16000]{0}, u32[]{:S(2)}) copy-start(%p)\n"
    + "  %away = u8[16000]{0:S(5)} copy-done(%saved)\n"
    + "".join(f"  {line}\n" for line in call("outer"))
    + f"  %chosen = u8[8]{{0}} conditional(%k, %p, %p), {BRANCH}\n  ROOT {fusion('last', 300)}\n}}\n"
)
SIZES = {"fsdp": 4, "tensor": 2}


@pytest.fixture(scope="module")
def walked():
    events: list[Event] = []
    breakdown = walk(PROGRAM, events=events)
    return breakdown, trace.spans_of(events, SIZES)


def tracks(spans) -> dict:
    by_track = defaultdict(list)
    for span in spans:
        by_track[span.process, span.thread].append(span)
    return by_track


def test_the_sums_of_a_trace_are_those_of_the_walk(walked):
    """The walk counts its seconds apart from what it records: by category, by transfer, and in all."""
    breakdown, spans = walked
    assert breakdown == walk(PROGRAM)  # recording changes nothing
    seconds, count = Counter(), Counter()
    for span in spans:
        if span.args["times"]:
            key = span.name if span.kind == "transfer" else span.category
            seconds[key] += span.seconds * span.args["times"]
            count[span.name] += span.args["times"]
    transfers = {message.name: message.seconds for message in breakdown.messages if not message.synchronous}
    assert set(transfers) == {"hop", "fetch", "saved"} and len(breakdown.categories) == 5
    assert seconds == pytest.approx(breakdown.categories | transfers)
    assert {op.name: op.count for op in breakdown.ops}.items() <= count.items()
    assert count["inner_work"] == count["hop"] == 28 and count["fetch"] == 7 and "brief" not in count


def test_the_tensorcore_is_covered_to_scale_and_no_track_overlaps(walked):
    breakdown, spans = walked
    by_track = tracks(spans)
    core = by_track["TensorCore", "operations"]
    assert core[0].begin == 0 and core[-1].end == pytest.approx(breakdown.seconds)
    assert math.fsum(span.seconds for span in core) == pytest.approx(breakdown.seconds)
    for (_, thread), track in by_track.items():
        for before, after in itertools.pairwise(track):
            assert after.begin >= before.end - 1e-12 or thread == "loops"


def test_loops_have_an_iteration_and_a_span_for_the_others(walked):
    """The spans of a loop are its iterations and those that are skipped, which the clock passes over."""
    _, spans = walked
    loops = tracks(spans)["TensorCore", "loops"]
    outer = next(span for span in loops if span.name == "outer, 7 trips")
    inside = [span for span in loops if outer.begin <= span.begin and span.end <= outer.end and span is not outer]
    own = [span for span in inside if span.args["loop"] == "outer"]
    assert sum(span.args["trips"] for span in own) == 7
    assert math.fsum(span.seconds for span in own) == pytest.approx(outer.seconds)
    skipped = next(span for span in own if span.kind == "skipped")
    beside = [span for span in spans if span.kind == "skipped" and span.process in ("links", "copies")]
    assert skipped.name in {span.name for span in beside} and {span.process for span in beside} == {"links", "copies"}
    assert [span.name for span in tracks(spans)["copies", "to host"]] == ["saved"]  # not in the loop
    assert skipped.seconds == pytest.approx(next(s.seconds for s in beside if s.name == skipped.name))


def test_spans_have_what_a_reader_asks_for(walked):
    _, spans = walked
    one = lambda name: next(span for span in spans if span.name == name)
    work, hop, fetch, wait = one("inner_work").args, one("hop"), one("fetch"), one("wait for hop")
    assert (work["cycles"], work["source"], work["concept"]) == (900, "a/flash.py:7", "attention, backward")
    assert (hop.process, hop.thread, hop.args["bytes"]) == ("links", "over fsdp, link 0 to 2", 800_000)
    assert hop.issued <= hop.begin and fetch.process == "copies"
    assert wait.kind == "wait" and wait.category == "waits for collectives" and wait.end == hop.end
    assert trace.colour(wait) == trace.colour(one("sum")) == trace.RED != trace.colour(one("inner_work"))
    assert one("sum").args["over"] == "fsdp"


def test_the_file_has_the_format_of_the_viewers(walked, tmp_path):
    """Complete events nest in whole nanoseconds, and metadata names each process and thread once."""
    breakdown, spans = walked
    path = tmp_path / "step.json"
    trace.write(str(path), spans, {"seconds": breakdown.seconds})
    content = json.loads(path.read_text())
    assert content["otherData"] == {"seconds": breakdown.seconds}
    events = content["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["TensorCore", "links", "copies"]
    complete = [e for e in events if e["ph"] != "M"]
    assert {e["ph"] for e in complete} == {"X"} and {(e["pid"], e["tid"]) for e in complete} == named.keys()
    assert len(named) == len({*named.values()}) and len(complete) == len(spans)
    open_until = defaultdict(list)
    for event in complete:  # in the order of the file
        begin, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        assert event["ts"] * 1000 == pytest.approx(begin, abs=1e-3) and event["dur"] >= 0
        stack = open_until[event["pid"], event["tid"]]
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1]
        stack.append(end)
