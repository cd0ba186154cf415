"""Where a profiled run spent its time: the profiler's trace, read with the program that ran.

    python train.py --profile_dir=runs/trace --steps=6         run; steps 3 to 5 are traced
    python aot.py timeline runs/trace                          read it here; to look at it: xprof runs/trace
    python aot.py timeline runs/trace --predicted=step.json    beside what `aot.py --json > step.json` said of it

The profiler writes when each device began and ended each instruction. What an instruction is for, and which line of
this project it comes from, stands in the compiled program, which train.py puts beside the trace as train_step.hlo: so
measured time has the same categories as the predicted time of schedule.py, with one for all copies that are waited for.
All figures are means over devices and steps.

An instruction that contains others (a loop, a call) counts only the time that these leave. What no instruction takes is
`idle`: the device waited for its host, or on simulated devices for a core. There a collective is mostly waiting for the
others' turns on the same cores, so that what is measured on simulated devices says how a trace is read, and nothing of
a TPU.

**Matmuls** are beside their FLOPs, counted from the shapes of the instructions that ran, at the speed that one large
matmul has on the machine that reads the trace, shared by its simulated devices.

**Left out**: events of the host. The layout of a TPU's trace, a plane a device and a line of its instructions, is the
profiler's own; here only traces of simulated devices were read.
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
from compiled import hlo
from compiled.schedule import COLLECTIVES, category_of, fused_reduce_scatter, opcodes_of
from hardware import si

ROOT = Path(__file__).parents[1]
PROGRAM = "train_step.hlo"  # the file beside the trace
MODULE = "jit_train_step"


@dataclass(frozen=True)
class Event:
    """An instruction that ran."""

    name: str
    device: str
    lane: str  # the thread or the queue, on which events are nested or one after another
    run: int  # which execution of the program
    begin: float  # seconds
    seconds: float


@dataclass(frozen=True)
class Summary:
    """Means of a device and a step."""

    devices: int
    steps: int
    step_s: float
    categories: dict[str, float]  # seconds, which add up to the step's; the longest first, `idle` last
    lines: dict[str, float]  # seconds by line of source, the longest first
    ops: tuple[tuple[str, float, float, str], ...]  # (name, seconds, times, op_name), the longest first
    matmul_flops: float


# -- the trace


def newest(folder: str) -> Path:
    """The newest trace under it. Raises ValueError if there is none."""
    # Where jax.profiler writes, and not all that is under a folder: of / that is the machine.
    if traces := sorted(Path(folder).glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime):
        return traces[-1]
    raise ValueError(f"{folder!r} has no *.xplane.pb: python train.py --profile_dir={folder} writes one")


def read(planes: Iterable) -> Iterator[Event]:
    """The instructions of the train step, from what jax.profiler.ProfileData has."""
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
            # Simulated devices run on XLA's threads; on others are Python's calls, many of them.
            for event in line.events if line.name.startswith("tf_XLA") else ():
                stats = dict(event.stats)
                if stats.get("hlo_module") == MODULE and "device_ordinal" in stats:
                    times = event.start_ns * 1e-9, event.duration_ns * 1e-9
                    yield Event(stats["hlo_op"], str(stats["device_ordinal"]), line.name, stats["run_id"], *times)


def own_seconds(events: Sequence[Event]) -> list[float]:
    """Of each event, the seconds in which none within it runs on the same lane."""
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
    """Its category, by the names that schedule.py gives predicted time; what begins or ends a transfer waits for it."""
    kinds = {opcode.removesuffix("-start").removesuffix("-done") for opcode in opcodes_of(program, instruction)}
    if instruction.opcode.endswith(("-start", "-done")):
        return "waits for collectives" if kinds & {*COLLECTIVES} else "waits for copies"
    alone = fused_reduce_scatter(program, instruction) or instruction
    return "synchronous collectives" if alone.opcode in COLLECTIVES else category_of(program, instruction)


def summarize(events: Iterable[Event], program: hlo.Program) -> Summary:
    """Raises ValueError: no event of the train step, or one that the program does not have."""
    events = list(events)
    if not events:
        raise ValueError(f"the trace has no instruction of {MODULE}")
    found = {name: (inside, its) for inside in program.computations.values() for name, its in inside.items()}
    if missing := {event.name for event in events} - found.keys():
        raise ValueError(f"the program has no {sorted(missing)[0]!r}: trace and {PROGRAM} are not of the same run")
    ends = defaultdict(list)
    for event in events:
        ends[event.run].append((event.begin, event.begin + event.seconds))
    step_s = statistics.mean(max(end for _, end in its) - min(begin for begin, _ in its) for its in ends.values())
    devices = len({event.device for event in events})
    share = 1 / devices / len(ends)
    seconds, times = Counter(), Counter()
    for event, own in zip(events, own_seconds(events), strict=True):
        seconds[event.name] += own * share
        times[event.name] += share
    categories, lines = Counter(), Counter()
    for name, its_s in seconds.items():
        instruction = found[name][1]
        categories[kind_of(program, instruction)] += its_s
        lines[instruction.source.removeprefix(f"{ROOT}/") or "(no line)"] += its_s
    idle = step_s - math.fsum(categories.values())
    return Summary(
        devices,
        len(ends),
        step_s,
        dict(categories.most_common()) | {"idle": idle},
        dict(lines.most_common()),
        tuple((name, its_s, times[name], found[name][1].op_name) for name, its_s in seconds.most_common()),
        math.fsum(
            flops * number
            for name, number in times.items()
            for flops in hlo.matmul_flops(program, *found[name]).values()
        ),
    )


# -- command line


def matmul_speed(n: int = 1024) -> float:
    """FLOP/s of a float32 matmul [n, n] . [n, n] on this machine, the best of five."""
    import jax
    import jax.numpy as jnp

    multiply, x = jax.jit(jnp.dot), jnp.ones((n, n))
    multiply(x, x).block_until_ready()

    def once() -> float:
        begin = time.perf_counter()
        multiply(x, x).block_until_ready()
        return time.perf_counter() - begin

    return 2 * n**3 / min(once() for _ in range(5))


def describe(found: Summary, top: int, matmul_s: float | None, predicted: dict | None) -> str:
    theirs = predicted["by_category_s"] if predicted else {} if matmul_s is None else {"matmul": matmul_s}
    lines = [f"{MODULE}: {found.steps} steps on {found.devices} devices; of a device and a step, measured", ""]
    lines.append(f"  {'where the time goes':28}{'measured':>12}{'of the step':>13}{'predicted':>12}")
    rows = found.categories | {name: 0.0 for name in theirs if name not in found.categories}
    for name, seconds in rows.items():
        expected = si(theirs[name], "s") if name in theirs else ""
        lines.append(f"  {name:28}{si(seconds, 's'):>12}{seconds / found.step_s:13.1%}{expected:>12}")
    expected = si(predicted["step_s"], "s") if predicted else ""
    lines.append(f"  {'step':28}{si(found.step_s, 's'):>12}{1:13.1%}{expected:>12}")
    if matmul_s is not None and not predicted:
        lines += ["", f"  matmul, predicted: {si(found.matmul_flops, 'FLOP')} at the speed of a large matmul here"]
    lines += ["", f"  {'lines':28}{'measured':>12}{'of the step':>13}"]
    for line, seconds in list(found.lines.items())[:top]:
        lines.append(f"  {line[-28:]:28}{si(seconds, 's'):>12}{seconds / found.step_s:13.1%}")
    lines += ["", f"  {'longest operations':28}{'measured':>12}{'times':>13}   of"]
    for name, seconds, number, op_name in found.ops[:top]:
        lines.append(f"  {name[-28:]:28}{si(seconds, 's'):>12}{number:13,.0f}   {op_name[-56:]}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__, prog="aot.py timeline")
    parser.add_argument("folder", type=command.path, help="what --profile_dir was")
    parser.add_argument(
        "--predicted", type=command.path, metavar="FILE", help="what aot.py --json printed for the same step"
    )
    parser.add_argument("--top", type=command.at_least(0), default=8, help="so many lines and operations [%(default)s]")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, FLOPs and bytes")
    args = command.arguments(parser, argv)
    compiler_flags.without_tpu()
    from jax.profiler import ProfileData

    trace = newest(args.folder)
    program = hlo.parse((Path(args.folder) / PROGRAM).read_text())
    predicted = json.loads(command.read_text(args.predicted)) if args.predicted else None
    if args.predicted and not (isinstance(predicted, dict) and "by_category_s" in predicted):
        raise ValueError(f"{args.predicted!r} is no step that fits, as aot.py --json prints one")
    try:
        profile = ProfileData.from_file(str(trace))  # what it gives is only there as long as it is itself
    except RuntimeError as error:
        raise ValueError(f"{trace} is damaged, as of a run that was killed: {error}") from None
    with warnings.catch_warnings():  # jaxlib 0.12 has types of its own to warn of
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        events = list(read(profile.planes))
    found = summarize(events, program)
    simulated = not events[0].device.startswith("/device:")
    matmul_s = found.matmul_flops * found.devices / matmul_speed() if simulated else None
    if args.json:
        print(json.dumps(vars(found) | dict(matmul_predicted_s=matmul_s, predicted=predicted), indent=1))
    else:
        print(describe(found, args.top, matmul_s, predicted))
