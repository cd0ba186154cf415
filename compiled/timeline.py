"""Reports where a profiled run spent its time, from the profiler's trace and the program that ran.

    python train.py --profile_dir=runs/trace --steps=6         run and trace steps 3 to 5
    python aot.py timeline runs/trace                          report its times; xprof runs/trace displays the trace
    python aot.py timeline runs/trace --predicted=step.json    beside the prediction of `aot.py --json > step.json`
    python aot.py timeline runs/trace --trace=run.json         draw it as `aot.py --trace` draws the prediction

**Idea.** The profiler records when each device began and ended each instruction. The purpose of an instruction and its
line in the source are in the compiled program, which train.py writes next to the trace as train_step.hlo. So measured
time has the categories of the predicted time (compiled/schedule.py), except that all copies that are waited for are one
category. All figures are means over devices and steps.

An instruction that contains others (a loop, a call) counts only the time that the others leave. Time in which no
instruction runs is `idle`: the device waits for its host, or a simulated device for a CPU core. On simulated devices a
collective mostly waits until the other devices get the same cores. So their times show how to read a trace, but say
nothing about a TPU.

**Matmuls.** A measured matmul is printed beside a prediction for simulated devices: its FLOPs, from the shapes of the
instructions that ran, at the speed of one large matmul on the machine that reads the trace, shared by all devices.

**Left out**: events of the host. For a TPU this follows the profiler's format, one plane per device and one line for
its instructions; only traces of simulated devices have been read so far.
"""

import json
import math
import re
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import command
import compiler_flags
import outputs
from compiled import hlo, trace
from compiled.schedule import COLLECTIVES, category_of, fused_reduce_scatter, opcodes_of
from hardware import si

ROOT = Path(__file__).parents[1]
PROGRAM = "train_step.hlo"  # the file beside the trace
MODULE = "jit_train_step"


@dataclass(frozen=True)
class Event:
    """One execution of an instruction."""

    name: str
    device: str
    lane: str  # thread or queue; its events are nested or one after another
    run: int  # which execution of the program
    begin: float  # seconds
    seconds: float


@dataclass(frozen=True)
class Summary:
    """Means over devices and steps."""

    devices: int
    steps: int
    step_s: float
    categories: dict[str, float]  # seconds, which add up to the step's; the longest first, `idle` last
    lines: dict[str, float]  # seconds by line of source, the longest first
    ops: tuple[tuple[str, float, float, str], ...]  # (name, seconds, times, op_name), the longest first
    matmul_flops: float


# -- the trace


def newest(folder: str) -> Path:
    """The newest trace in a folder. Raises ValueError if there is none."""
    # Only where jax.profiler writes: to search all of a folder such as / would search the machine.
    if traces := sorted(Path(folder).glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime):
        return traces[-1]
    raise ValueError(f"{folder!r} has no *.xplane.pb: python train.py --profile_dir={folder} writes one")


def read(planes: Iterable) -> Iterator[Event]:
    """Yields the instructions of the train step from the planes of jax.profiler.ProfileData."""
    for plane in planes:
        if plane.name.startswith("/device:TPU:"):
            lines = {line.name: list(line.events) for line in plane.lines if line.name in ("XLA Modules", "XLA Ops")}
            modules = [event for event in lines["XLA Modules"] if event.name.startswith(MODULE)]
            for event in lines["XLA Ops"]:
                name = re.match(r"%?([\w.-]+)", event.name)[1]
                for run, module in enumerate(modules):
                    if 0 <= event.start_ns - module.start_ns < module.duration_ns:
                        yield Event(name, plane.name, "XLA Ops", run, event.start_ns * 1e-9, event.duration_ns * 1e-9)
            continue
        for line in plane.lines:
            # Simulated devices run on XLA's threads; the other threads have Python's many calls.
            for event in line.events if line.name.startswith("tf_XLA") else ():
                stats = dict(event.stats)
                if stats.get("hlo_module") == MODULE and "device_ordinal" in stats:
                    times = event.start_ns * 1e-9, event.duration_ns * 1e-9
                    yield Event(stats["hlo_op"], str(stats["device_ordinal"]), line.name, stats["run_id"], *times)


def own_seconds(events: Sequence[Event]) -> list[float]:
    """The seconds of each event without those of the events nested in it on the same lane."""
    own = [event.seconds for event in events]
    lanes = defaultdict(list)
    for i, event in enumerate(events):
        lanes[event.device, event.lane].append(i)
    for lane in lanes.values():
        lane.sort(key=lambda i: (events[i].begin, -events[i].seconds))
        around = []
        for i in lane:
            while around and events[around[-1]].begin + events[around[-1]].seconds <= events[i].begin:
                around.pop()
            if around:
                own[around[-1]] -= events[i].seconds
            around.append(i)
    return own


# -- with the program


def kind_of(program: hlo.Program, instruction: hlo.Instruction) -> str:
    """The category of an instruction, as in compiled/schedule.py; the start or end of a transfer counts as a wait."""
    kinds = {opcode.removesuffix("-start").removesuffix("-done") for opcode in opcodes_of(program, instruction)}
    if instruction.opcode.endswith(("-start", "-done")):
        return "waits for collectives" if kinds & {*COLLECTIVES} else "waits for copies"
    blocking = fused_reduce_scatter(program, instruction) or instruction
    return "synchronous collectives" if blocking.opcode in COLLECTIVES else category_of(program, instruction)


def summarize(events: Iterable[Event], program: hlo.Program) -> Summary:
    """The summary of a trace. Raises ValueError: no event of the train step, or one that the program does not have."""
    events = list(events)
    if not events:
        raise ValueError(f"the trace has no instruction of {MODULE}")
    by_name = {name: (inside, inner) for inside in program.computations.values() for name, inner in inside.items()}
    if missing := {event.name for event in events} - by_name.keys():
        raise ValueError(f"the program has no {sorted(missing)[0]!r}: trace and {PROGRAM} are not of the same run")
    spans = defaultdict(list)
    for event in events:
        spans[event.run].append((event.begin, event.begin + event.seconds))
    step_s = statistics.mean(max(end for _, end in run) - min(begin for begin, _ in run) for run in spans.values())
    devices = len({event.device for event in events})
    share = 1 / devices / len(spans)
    seconds, times = Counter(), Counter()
    for event, own in zip(events, own_seconds(events), strict=True):
        seconds[event.name] += own * share
        times[event.name] += share
    categories, lines = Counter(), Counter()
    for name, own in seconds.items():
        instruction = by_name[name][1]
        categories[kind_of(program, instruction)] += own
        lines[instruction.source.removeprefix(f"{ROOT}/") or "(no line)"] += own
    idle = step_s - math.fsum(categories.values())
    return Summary(
        devices,
        len(spans),
        step_s,
        dict(categories.most_common()) | {"idle": idle},
        dict(lines.most_common()),
        tuple((name, own, times[name], by_name[name][1].op_name) for name, own in seconds.most_common()),
        math.fsum(
            flops * number
            for name, number in times.items()
            for flops in hlo.matmul_flops(program, *by_name[name]).values()
        ),
    )


def spans_of(events: Sequence[Event], program: hlo.Program) -> list[trace.Span]:
    """The spans of a trace for compiled/trace.py: a process for each device, a thread for each lane.

    Waits are those of `kind_of`. The clock begins with the first event.
    """
    by_name = {name: inner for inside in program.computations.values() for name, inner in inside.items()}
    first = min(event.begin for event in events)
    spans = []
    for event, own in zip(events, own_seconds(events), strict=True):
        instruction = by_name[event.name]
        category = kind_of(program, instruction)
        args = {"op": instruction.op_name or event.name, "source": instruction.source.removeprefix(f"{ROOT}/")}
        args |= {"category": category, "seconds": event.seconds, "own_seconds": own, "run": event.run}
        args["concept"] = trace.concept(instruction)
        kind = "wait" if category.startswith("waits") or category == "synchronous collectives" else "op"
        begin = event.begin - first
        device = event.device if event.device.startswith("/") else f"device {event.device}"
        span = trace.Span(device, event.lane, event.name, kind, category, begin, begin + event.seconds, args)
        spans.append(span)
    return sorted(spans, key=lambda span: (span.process, span.thread, span.begin, -span.end))


# -- command line


def matmul_speed(n: int = 1024) -> float:
    """FLOP/s of a float32 matmul [n, n] . [n, n] on this machine, the best of five runs."""
    import jax
    import jax.numpy as jnp

    multiply, x = jax.jit(jnp.dot), jnp.ones((n, n))
    multiply(x, x).block_until_ready()

    def once() -> float:
        begin = time.perf_counter()
        multiply(x, x).block_until_ready()
        return time.perf_counter() - begin

    return 2 * n**3 / min(once() for _ in range(5))


def describe(summary: Summary, top: int, matmul_s: float | None, predicted: dict | None) -> str:
    """A summary as text, beside the predicted step of aot.py or, without one, the predicted time of its matmuls."""
    expected_s = predicted["by_category_s"] if predicted else {} if matmul_s is None else {"matmul": matmul_s}
    lines = [f"{MODULE}: {summary.steps} steps on {summary.devices} devices; measured, a device and a step", ""]
    lines.append(f"  {'category':28}{'measured':>12}{'of the step':>13}{'predicted':>12}")
    rows = summary.categories | {name: 0.0 for name in expected_s if name not in summary.categories}
    for name, seconds in rows.items():
        expected = si(expected_s[name], "s") if name in expected_s else ""
        lines.append(f"  {name:28}{si(seconds, 's'):>12}{seconds / summary.step_s:13.1%}{expected:>12}")
    expected = si(predicted["step_s"], "s") if predicted else ""
    lines.append(f"  {'step':28}{si(summary.step_s, 's'):>12}{1:13.1%}{expected:>12}")
    if matmul_s is not None and not predicted:
        lines += ["", f"  matmul, predicted: {si(summary.matmul_flops, 'FLOP')} at the speed of a large matmul here"]
    lines += ["", f"  {'source line':28}{'measured':>12}{'of the step':>13}"]
    for line, seconds in list(summary.lines.items())[:top]:
        lines.append(f"  {line[-28:]:28}{si(seconds, 's'):>12}{seconds / summary.step_s:13.1%}")
    lines += ["", f"  {'longest instructions':28}{'measured':>12}{'times':>13}   operation"]
    for name, seconds, number, op_name in summary.ops[:top]:
        lines.append(f"  {name[-28:]:28}{si(seconds, 's'):>12}{number:13,.0f}   {op_name[-56:]}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__, prog="aot.py timeline")
    parser.add_argument("folder", type=command.path, help="the --profile_dir of the run")
    parser.add_argument(
        "--predicted", type=command.path, metavar="FILE", help="the output of aot.py --json for the same step"
    )
    parser.add_argument(
        "--top", type=command.at_least(0), default=8, help="number of lines and of instructions to print [%(default)s]"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, FLOPs and bytes")
    parser.add_argument("--trace", type=command.path, metavar="FILE", help="draw the run for ui.perfetto.dev, in FILE")
    args = command.arguments(parser, argv)
    if args.trace:
        outputs.check_apart({"--trace": args.trace}, {"--predicted": args.predicted, "the profile": args.folder})
        outputs.check_writable(f"--trace={args.trace}", args.trace)
    compiler_flags.without_tpu()
    from jax.profiler import ProfileData

    trace_file = newest(args.folder)
    program = hlo.parse((Path(args.folder) / PROGRAM).read_text())
    predicted = json.loads(command.read_text(args.predicted)) if args.predicted else None
    if args.predicted and not (isinstance(predicted, dict) and "by_category_s" in predicted):
        raise ValueError(f"{args.predicted!r} is not the output of aot.py --json for a step that fits")
    try:
        profile = ProfileData.from_file(str(trace_file))  # must outlive its planes and events
    except RuntimeError as error:
        raise ValueError(f"{trace_file} is damaged, as after a run that was killed: {error}") from None
    with warnings.catch_warnings():  # jaxlib 0.12 warns about types of its own
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        events = list(read(profile.planes))
    summary = summarize(events, program)
    if args.trace:
        about = {"profile": str(trace_file), "step_s": summary.step_s, "by_category_s": summary.categories}
        trace.write(args.trace, spans_of(events, program), about)
    simulated = not events[0].device.startswith("/device:")
    matmul_s = summary.matmul_flops * summary.devices / matmul_speed() if simulated else None
    if args.json:
        print(json.dumps(vars(summary) | dict(matmul_predicted_s=matmul_s, predicted=predicted), indent=1))
    else:
        print(describe(summary, args.top, matmul_s, predicted))
