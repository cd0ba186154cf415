"""Draws the walk of a compiled step, or a profiled run, as a trace for ui.perfetto.dev and chrome://tracing. No jax.

    python aot.py --preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --trace=step.json     the schedule of a compiled step
    python aot.py timeline runs/trace --trace=run.json                               a measured run, the same way

**Idea.** compiled/schedule.py walks a compiled step with a clock and a queue for each engine. This module writes what
the walk meets as spans of that clock: one track for the TensorCore, one for each queue beside it. So a picture shows
which transfer hides behind which computation, and red spans show what the TensorCore waits for.

**Layout** of the picture, a process for each engine and a thread for each of its queues:

    TensorCore      operations; collectives that it runs itself; waits, in red, with the transfer that is waited for
                    loops: each loop, its iterations, and a span "x N" for iterations that repeat the one before it
    SparseCores     their copies, gathers and transposes
    links           collectives, a thread for the mesh axes of each, and one for each direction of a permute
    copies          DMAs between HBM and VMEM, to the host, and from it
    network         messages between slices

The walk skips the iterations of a loop that take the time of the one before. The walked iterations are drawn in full.
On each track that they use, one span "x N" takes the place of those that are skipped. The clock passes over them, so
the step is to scale. Each span has `times`, the number of its executions in the step: sums of seconds x times are the
seconds of the report, by category and by transfer.

**Format**: the JSON of Chrome's trace events. Metadata events name processes and threads, complete events (ph X) have a
begin and a duration in microseconds. Both are rounded to whole nanoseconds, so that spans of a track stay nested.

`python benchmarks/pages.py --trace=step.json` reads a trace with the parser of Chrome's viewer and compares the sum.

**Left out.** A span of a queue is the time of the queue alone: a transfer that waits in it begins when it moves. What
the SparseCores and the links do in skipped iterations is not repeated. A viewer may choose colours of its own; waits
are also found by their name and category, "wait".

**Source**: the Trace Event Format of https://github.com/catapult-project/catapult.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import outputs
from compiled.hlo import Instruction
from compiled.schedule import BETWEEN_SLICES, COLLECTIVES, Event, Transfer, among

PROCESSES = ("TensorCore", "SparseCores", "links", "copies", "network")
RED = "terrible"  # Chrome's names of colours
COLOURS = {"matmul": "thread_state_running", "elementwise": "rail_load", "copies and layouts": "yellow"}
COLOURS |= {"collective": "rail_response", "copy": "olive", "loop": "grey", "skipped": "white"}

# The concept of an operation, by the file that its source line is in.
OF_FILE = {"attention": "attention", "flash": "attention", "flash_backward": "attention", "masks": "attention"}
OF_FILE |= {"context": "attention over devices", "tensor": "projections and MLP", "decoder": "layer"}
OF_FILE |= {"moe": "mixture of experts", "mixture": "mixture of experts", "gmm": "experts", "groups": "experts"}
OF_FILE |= {"fsdp": "FSDP", "vocabulary": "embedding and loss", "fp8": "FP8", "train": "optimizer and step"}
OF_FILE |= {"model": "model", "pipeline": "pipeline", "offload": "offload", "collectives": "collectives"}

# The purpose of a collective, by its kind and a mesh axis over which it goes.
OF_COLLECTIVE = {
    ("all-gather", "fsdp"): "FSDP: weights gathered",
    ("reduce-scatter", "fsdp"): "FSDP: gradients reduce-scattered",
    ("all-gather", "fsdp_transpose"): "FSDP: weights gathered",
    ("reduce-scatter", "fsdp_transpose"): "FSDP: gradients reduce-scattered",
    ("all-gather", "tensor"): "tensor parallelism: activations gathered",
    ("reduce-scatter", "tensor"): "tensor parallelism: activations reduce-scattered",
    ("all-to-all", "expert"): "experts: dispatch or combine",
    ("ragged-all-to-all", "expert"): "experts: dispatch or combine",
    ("all-to-all", "context"): "context parallelism: heads exchanged for positions",
    ("collective-permute", "context"): "context parallelism: keys and values passed on",
    ("collective-permute", "pipe"): "pipeline: activations passed to the next stage",
    ("all-reduce", "data"): "data parallelism: gradients summed",
}


@dataclass(frozen=True)
class Span:
    """A span of a track, in seconds.

    Attributes:
      kind: op, transfer, wait, synchronous, loop, iteration or skipped, as in schedule.Event.
      category: that of the report; for a transfer its kind.
      issued: when the TensorCore started it, for what runs beside the TensorCore.
    """

    process: str
    thread: str
    name: str
    kind: str
    category: str
    begin: float
    end: float
    args: dict = field(default_factory=dict)
    issued: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


# -- from a walk


def mesh_axes(groups: Sequence[Sequence[int]], sizes: dict[str, int]) -> list[str]:
    """The mesh axes along which the devices of a group differ: in the program they are numbered as in the mesh."""
    if not groups:
        return []
    places, group = [], groups[0]
    for device in group:
        place = []
        for size in reversed(sizes.values()):
            device, index = divmod(device, size)
            place.append(index)
        places.append(place[::-1])
    return [axis for axis, indices in zip(sizes, zip(*places, strict=True), strict=True) if len({*indices}) > 1]


def concept(instruction: Instruction, axes: Sequence[str] = (), kind: str = "") -> str:
    """The purpose of an instruction in the model, with its pass: "attention, backward"; "" if its text does not say.

    Args:
      axes, kind: the mesh axes over which a collective goes, and its opcode.
    """
    stem = instruction.source.rpartition("/")[2].partition(".")[0]
    what = next((OF_COLLECTIVE[kind, axis] for axis in axes if (kind, axis) in OF_COLLECTIVE), OF_FILE.get(stem, ""))
    op = instruction.op_name
    passes = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
    return ", ".join(filter(None, (what, next((name for text, name in passes.items() if text in op), ""))))


def spans_of(events: Iterable[Event], sizes: dict[str, int] | None = None) -> list[Span]:
    """The spans of a walk, by track, and in the order of time in each.

    Args:
      events: what schedule.walk appended to its argument `events`.
      sizes: {mesh axis: size}, to name the axes of collectives.
    """
    spans: list[Span] = []
    concepts: dict[str, str] = {}  # of transfers, for the waits for them
    began = 0.0  # when the last walked iteration began
    for event in events:
        if event.kind == "iteration":
            began = event.begin
        if event.kind == "skipped":
            spans += [_of_loop(event, "loops"), _of_loop(event, "operations")]
            spans += _again(spans, event, began)
        elif event.kind in ("loop", "iteration"):
            spans.append(_of_loop(event, "loops"))
        else:
            span = _span(event, sizes or {})
            if event.kind == "wait":
                span.args["concept"] = concepts[event.instruction.name]
            concepts[event.instruction.name] = span.args["concept"]
            spans.append(span)
    return sorted(spans, key=lambda span: (PROCESSES.index(span.process), span.thread, span.begin, -span.end))


def _of_loop(event: Event, thread: str) -> Span:
    """The span of a loop, of an iteration that was walked, or of those that were skipped."""
    loop = event.instruction
    names = {"loop": f"{loop.name}, {event.detail} trips", "iteration": "one iteration"}
    names |= {"skipped": f"x {event.detail} more"}
    args = {"loop": loop.op_name or loop.name, "trips": event.detail, "source": loop.source}
    args |= {"seconds": event.end - event.begin, "times": 0}
    category = "skipped" if event.kind == "skipped" else "loop"
    return Span("TensorCore", thread, names[event.kind], event.kind, category, event.begin, event.end, args)


def _again(spans: Sequence[Span], skipped: Event, began: float) -> list[Span]:
    """The spans of skipped iterations on the tracks beside the TensorCore that the walked iteration used.

    Each begins where the last transfer of the iteration ends, and lasts as long as the skipped iterations. So it ends
    where the last transfer of the last iteration does.
    """
    last: dict[tuple[str, str], float] = {}
    for span in reversed(spans):
        if span.issued is not None and span.issued >= began:
            track = span.process, span.thread
            last[track] = max(last.get(track, 0.0), span.end)
    seconds = skipped.end - skipped.begin
    args = {"loop": skipped.instruction.op_name or skipped.instruction.name, "trips": skipped.detail, "times": 0}
    return [
        Span(*track, f"x {skipped.detail} more", "skipped", "skipped", end, end + seconds, args, skipped.begin)
        for track, end in last.items()
    ]


def _span(event: Event, sizes: dict[str, int]) -> Span:
    """The span of an operation, a transfer, a wait or a synchronous collective."""
    instruction, detail, seconds = event.instruction, event.detail, event.end - event.begin
    args = {"op": instruction.op_name or instruction.name, "source": instruction.source}
    args |= {"seconds": seconds, "times": event.times}
    process, thread, kind, axes = "TensorCore", "operations", "", []
    category = detail if isinstance(detail, str) else detail.kind
    if isinstance(detail, Transfer):
        kind, axes = detail.kind, mesh_axes(detail.groups, sizes)
        args |= {"bytes": detail.nbytes, "engine": detail.engine, "over": ", ".join(axes)}
        args |= {"devices": len(detail.groups[0])} if detail.groups else {}
    if event.kind == "transfer":
        process, thread = track_of(detail, axes)
        args["issued"] = event.issued
    elif event.kind == "op":
        args |= {"category": category, "bytes": event.nbytes}
        args |= {} if instruction.cycles is None else {"cycles": instruction.cycles}
    elif event.kind == "synchronous":
        category = "synchronous collectives"
    args["concept"] = concept(instruction, axes, kind)
    name = f"wait for {instruction.name}" if event.kind == "wait" else instruction.name
    issued = event.issued if event.kind == "transfer" else None
    return Span(process, thread, name, event.kind, category, event.begin, event.end, args, issued)


def track_of(transfer: Transfer, axes: Sequence[str]) -> tuple[str, str]:
    """(process, thread) of a transfer that runs beside the TensorCore; `axes` are the mesh axes of a collective."""
    if among(transfer.kind, COLLECTIVES):
        over = f"over {', '.join(axes)}" if axes else "collectives"
        return "links", over if transfer.queue == "links" else f"{over}, {transfer.queue}"
    if among(transfer.kind, BETWEEN_SLICES):
        return "network", transfer.queue
    process = {"SparseCore": "SparseCores", "network": "network"}.get(transfer.engine, "copies")
    return process, "HBM and VMEM" if transfer.queue == "DMA" else transfer.queue


# -- the file


def as_trace(spans: Iterable[Span], about: dict | None = None) -> dict:
    """The object of a trace file: metadata for each process and thread, and a complete event for each span.

    Args:
      about: further fields, for the viewer's page on the trace.
    """
    events, processes, threads = [], {}, {}
    metadata = lambda name, pid, tid, args: {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
    for span in spans:
        pid = processes.setdefault(span.process, len(processes) + 1)
        tid = threads.setdefault((span.process, span.thread), len(threads) + 1)
        begin, end = round(span.begin * 1e9), round(span.end * 1e9)
        event = {"ph": "X", "pid": pid, "tid": tid, "name": span.name, "cat": span.kind, "cname": colour(span)}
        events.append(event | {"ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": span.args})
    names = []
    for name, pid in processes.items():
        names.append(metadata("process_name", pid, 0, {"name": name}))
        names.append(metadata("process_sort_index", pid, 0, {"sort_index": pid}))
    for (process, thread), tid in threads.items():
        names.append(metadata("thread_name", processes[process], tid, {"name": thread}))
        names.append(metadata("thread_sort_index", processes[process], tid, {"sort_index": tid}))
    return {"traceEvents": names + events, "displayTimeUnit": "ns", "otherData": about or {}}


def colour(span: Span) -> str:
    """Chrome's name of the colour of a span."""
    if span.kind == "wait" or span.kind == "synchronous":
        return RED
    default = "good" if span.kind == "op" else COLOURS["collective" if span.process in ("links", "network") else "copy"]
    return COLOURS.get(span.category, default)


def write(path: str, spans: Iterable[Span], about: dict | None = None) -> None:
    """Writes a trace, completely or not at all. Raises OSError if the file cannot be written."""
    with outputs.replacing(path) as file:
        json.dump(as_trace(spans, about), file)
