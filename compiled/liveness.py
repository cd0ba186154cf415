"""Lists the buffers that fill a device's memory at the peak of a compiled program, by operation and source line.

**Idea.** An array of a program is live from the first to the last instruction that needs it. Two arrays that are never
live at once may share the same memory. So one point in the order of execution decides how much memory a device needs:

    peak = arguments + max over t of sum of bytes(v), for the values v that are live at t

To save memory, change what is live at that point: what is freed before it or made after it costs nothing. The answer to
"what fills the memory" is thus a point in the order of execution and a list of buffers.

**Inputs.** The compiler writes its buffer assignment next to the program if the option `xla_dump_to` of a compilation
is set, also if it then refuses the program for lack of memory. This module reads

    *-buffer-assignment.txt     the allocations: one for each argument, output and constant, and one for all
                                temporaries, in which each value has an offset. Sizes are those in memory, where the
                                last two dims are padded to tiles: f32[200000,200000] has 64 columns more
    *-live-range.txt            the first and the last instruction of each value, in the order of execution; the body
                                of a loop is listed once, where the loop is
    *-buffer-assignment-values.txt, and the text of the program: the instructions, with op_name and source line

Shapes and uses alone do not show which operations write in place. The values that a loop carries, updates of slices, a
donated argument and an asynchronous copy share a buffer with their operand; counted twice they would exceed the memory
of the device. In the assignment they have one place (an allocation and an offset), and each place counts once.

**Names.** A value that a loop carries has the name of the loop, which says little. It is reported under the name of the
operation that writes the same place closest to the peak. A copy or a conversion without a name is named after its
operand.

**On TPU7x** the sum is less than the memory that the compiler sets aside. Values with the longest lives are placed
first and leave holes that no other value fits: 2.4% for Llama 3.1 8B's step on 8 devices with libtpu 0.0.50, 7.5% with
0.0.42. The memory that is set aside decides whether a program fits. The peak of `memory_analysis()` excludes holes; it
is printed beside the sum.

**Left out**: VMEM, the host's memory, and the code of the program, which is in HBM as well (some tens of MB).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compiled import hlo

GiB = 2**30
ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*):")
VALUE = re.compile(r" value: <(\d+) (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
EXECUTED = re.compile(r"^    (\d+):(\S+)$", re.MULTILINE)
LIVE = re.compile(r"^    ([^\s{}:]+)(\{[\d,]*\})?:(\d+)-(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Buffer:
    """A buffer in HBM, named by the operation that writes it."""

    nbytes: int  # in memory, padded to tiles
    kind: str  # argument, donated argument, output, constant, temporary
    shape: str  # as in f32[8,128]
    op: str  # op_name: the path of functions in the source, or an argument's name
    source: str  # file:line


@dataclass(frozen=True)
class Peak:
    """The point in a program's order of execution at which most bytes are live."""

    total_bytes: int  # HBM that the compiler sets aside
    op: str  # the operation that runs at the peak
    source: str
    buffers: tuple[Buffer, ...]  # live at the peak, the largest first
    over_step: tuple[tuple[str, int], ...] = ()  # (instruction, bytes that are live at it), in the order of execution

    @property
    def live_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def as_dict(self) -> dict:
        rows = grouped(self.buffers)
        return {"live_bytes": self.live_bytes, "peak_op": self.op, "peak_source": self.source, "largest_buffers": rows}


@dataclass(frozen=True)
class Value:
    """The result of an instruction, or an element of it if it is a tuple, with the time from first to last use."""

    number: str
    is_phi: bool  # merges the values that enter a loop, or that leave the branches of a conditional
    nbytes: int
    shape: str
    begin: int
    end: int


# -- a compiled program


def read(folder: str | Path) -> Peak:
    """The peak of the program that was last compiled with `xla_dump_to` set to this folder.

    Raises:
      ValueError: the compiler wrote no buffer assignment there, or one that this cannot parse.
    """
    assignments = sorted(Path(folder).glob("*-buffer-assignment.txt"), key=lambda path: path.stat().st_mtime)
    if not assignments:
        raise ValueError(f"the compiler wrote no buffer assignment to {folder}; xla_dump_to makes it do so")
    stem = str(assignments[-1]).removesuffix("-buffer-assignment.txt")
    endings = ("-buffer-assignment.txt", "-live-range.txt", "-buffer-assignment-values.txt", ".txt")
    return peak(*(Path(stem + ending).read_text() for ending in endings))


def read_refused(folder: str | Path, message: str) -> Peak | None:
    """The peak of a program that was refused; None if HBM was not the reason, or no buffers were assigned before."""
    assigned = any(Path(folder).glob("*-buffer-assignment.txt"))
    return read(folder) if assigned and refusal(message)["memory"] == "hbm" else None


def peak(assignment: str, ranges: str, values: str, program: str) -> Peak:
    """The peak from the four texts that the compiler wrote (head of this module, in that order)."""
    times = {m[1] + (m[2] or "{}"): (int(m[3]), int(m[4])) for m in re.finditer(LIVE, ranges)}
    names = Names(values, program)
    total_bytes, number, kind, buffers = 0, 0, "", []
    places: dict[tuple[int, int], list[Value]] = {}  # by allocation and offset
    for line in assignment.splitlines()[1:]:
        if match := ALLOCATION.fullmatch(line):
            number, kind = number + 1, kind_of(match[2])
            first, size = True, int(match[1])
            total_bytes += size if kind else 0
        elif not (match := VALUE.fullmatch(line)):
            raise ValueError(f"neither a value nor an allocation: {line[:80]}")
        elif kind == "temporary":
            name, shape = match[2] + (match[3] or "{}"), match[7].partition("{")[0]
            if name not in times:
                raise ValueError(f"{name} has {match[5]} bytes in HBM and no live range")
            value = Value(match[1], bool(match[4]), int(match[5]), shape, *times[name])
            places.setdefault((number, int(match[6])), []).append(value)
        elif kind and first:  # live as long as the program; later values overwrite it
            buffers.append(Buffer(size, kind, match[7].partition("{")[0], *names.describe(match[1])))
            first = False
    sums = live_bytes(places.values())
    at, _ = busiest(sums)
    constant, nbytes, over_step, changes = sum(buffer.nbytes for buffer in buffers), 0, [], iter([*sums, (math.inf, 0)])
    change = next(changes)
    executed = [(int(time), name) for time, name in re.findall(EXECUTED, ranges)]
    for time, name in executed:
        while change[0] <= time:
            nbytes, change = change[1], next(changes)
        over_step.append((name, constant + nbytes))
    for place in places.values():
        if live := [value for value in place if value.begin <= at <= value.end]:
            value = max(live, key=lambda value: (value.nbytes, not value.is_phi))
            described = names.describe(writer(value, place, at).number)
            buffers.append(Buffer(value.nbytes, "temporary", value.shape, *described))
    name = next((name for time, name in executed if time == at), "")
    op, source = names.describe_instruction(name) if name else ("", "")
    return Peak(total_bytes, op, source, tuple(sorted(buffers, key=lambda buffer: -buffer.nbytes)), tuple(over_step))


def kind_of(allocation: str) -> str:
    """The kind of a buffer from the compiler's text on its allocation; "" if it is not in HBM."""
    if re.search(r"\bcolor \d", allocation):
        return ""
    if "parameter" in allocation:
        return "donated argument" if "maybe-live-out" in allocation else "argument"
    kinds = {"preallocated-temp": "temporary", "maybe-live-out": "output", "constant": "constant"}
    return next((kind for word, kind in kinds.items() if word in allocation), "scratch")


def live_bytes(places: Sequence[Sequence[Value]]) -> list[tuple[int, int]]:
    """[(time, bytes that are live from it on)] where they change; a place counts the largest value that is live."""
    change: Counter = Counter()
    for place in places:
        bounds = sorted({value.begin for value in place} | {value.end + 1 for value in place})
        for begin, end in itertools.pairwise(bounds):
            nbytes = max((value.nbytes for value in place if value.begin <= begin <= value.end), default=0)
            change[begin] += nbytes
            change[end] -= nbytes
    return list(zip(sorted(change), itertools.accumulate(change[at] for at in sorted(change)), strict=True))


def busiest(sums: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(the time when most bytes are live, their number) of the result of `live_bytes`."""
    return max(sums, key=lambda point: point[1], default=(0, 0))


def writer(value: Value, place: Sequence[Value], at: int) -> Value:
    """The value that is named in place of one that a loop only carries: of those in its place the nearest in time."""
    if not value.is_phi:
        return value
    others = [other for other in place if not other.is_phi and other.nbytes == value.nbytes]
    return min(others, key=lambda other: max(other.begin - at, at - other.end, 0), default=value)


class Names:
    """The operations and source lines of values, from the instructions that the compiler lists with them."""

    def __init__(self, values: str, program: str):
        self.sources = hlo.read_sources(program)
        blocks = re.split(r"^(?=<\d+ .*>$)", re.sub(r"/\*index=\d+\*/", "", values), flags=re.MULTILINE)[1:]
        self.blocks = {block[1 : block.index(" ")]: block for block in blocks}
        self.number_at = {}  # {name of an instruction: number of its value}
        for number, block in self.blocks.items():
            positions = block.partition(" positions:\n")[2].partition("\n uses:")[0]
            for name, index in re.findall(r"^  ([^\s{]+)(?: ?(\{[\d,]*\}))?$", positions, re.MULTILINE):
                if index in ("", "{}"):
                    self.number_at.setdefault(name, number)

    def describe(self, number: str) -> tuple[str, str]:
        """(op_name, file:line) of a value."""
        text = self.blocks[number].partition(" from instruction:")[2].rstrip()
        instruction = hlo.read_instruction(text, 0, 1, self.sources)
        op, source = instruction.op_name, instruction.source
        if instruction.opcode == "parameter" or "/" in op:
            return op or instruction.name, source
        operand = next((self.number_at[name] for name in instruction.operands if name in self.number_at), None)
        if not op and operand and operand != number:
            op, source = self.describe(operand)
        return f"{instruction.opcode} of {op}" if op else re.sub(r"\.\d+$", "", instruction.name), source

    def describe_instruction(self, name: str) -> tuple[str, str]:
        return self.describe(self.number_at[name]) if name in self.number_at else (name, "")


# -- a program that was refused


def refusal(text: str) -> dict:
    """The content of the compiler's message: the memory, bytes used, their limit, and the largest buffers if listed."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number = r"([\d.]+)([KMGT]?)"
    hbm = re.search(rf"Used {number} of {number} hbm|\({number}\) exceeds available HBM \({number}\)", text)
    vmem = re.search(rf"size {number} and limit {number} exceeded scoped vmem|Used {number} of {number} vmem", text)
    host = re.search(rf"Used {number} of {number} host", text)
    host = host or re.search(r"size=(\d+)()\) would exceed memory \(size=(\d+)()\) :: \S+ = \S*host", text)
    if not (match := hbm or vmem or host):
        return {"memory": "unknown", "message": text.splitlines()[0], "largest_buffers": []}
    figures = [figure for figure in match.groups() if figure is not None]
    used, limit = (float(figures[i]) * units[figures[i + 1]] for i in (0, 2))
    buffers = []
    for block in re.split(r"\n\s*\d+\. (?=Size:)", text)[1:]:
        size = re.match(rf"Size: {number}", block)
        name = re.search(r'op_name="?([^"\n]*)', block) or re.search(r"Operator: (.*)", block)
        source = re.search(r'source_file="([^"]*)" source_line=(\d+)', block)
        shape = re.search(r"Shape: ([^\s{]+)", block)
        line = f"{source[1]}:{source[2]}" if source else ""
        nbytes = round(float(size[1]) * units[size[2]])
        buffers.append(
            Buffer(nbytes, "", shape[1] if shape else "", name[1].strip() if name else "", line),
        )
    memory = "hbm" if hbm else "vmem" if vmem else "host"
    figures = {"memory": memory, "used_bytes": used, "limit_bytes": limit, "over_bytes": used - limit}
    return figures | {"largest_buffers": grouped(buffers)}


# -- for printing


def grouped(buffers: Sequence[Buffer]) -> list[dict]:
    """One row per operation and source line, one per subtree of the arguments; the largest first."""
    groups: dict[tuple, list[Buffer]] = {}
    for buffer in buffers:
        op = buffer.op if "/" in buffer.op else re.sub(r"(?<=[\w\])])(\.\w+|\[[^\]]*\])$", ".*", buffer.op)
        groups.setdefault((op, buffer.source, buffer.kind), []).append(buffer)
    rows = []
    for (op, source, kind), members in groups.items():
        largest = max(members, key=lambda buffer: buffer.nbytes)
        op = largest.op if len(members) == 1 else op
        nbytes = sum(buffer.nbytes for buffer in members)
        row = {"bytes": nbytes, "count": len(members), "kind": kind, "op": op, "source": source}
        rows.append(row | {"largest_shape": largest.shape, "largest_bytes": largest.nbytes})
    return sorted(rows, key=lambda row: -row["bytes"])


def describe(report: dict, total: float, top: int = 8) -> list[str]:
    """Lines of text: the largest buffers, and the holes between the live bytes and the compiler's total.

    Args:
      report: `largest_buffers`; with a buffer assignment also `live_bytes`, `peak_op` and `peak_source`; if the program
        was compiled `stated_peak_bytes`, which is `memory_analysis().peak_memory_in_bytes`.
      total: bytes that the compiler sets aside, or would have to.
    """
    rows, lines = report["largest_buffers"], []
    unit, name = (GiB, "GiB") if total >= GiB else (GiB / 1024, "MiB")
    if live := report.get("live_bytes"):
        stated, words = report.get("stated_peak_bytes"), ""
        if stated:
            words = f" ({live / stated - 1:+.1%} of memory_analysis's {stated / unit:.2f})"
        lines = [
            f"  live at the peak  {live / unit:.2f} {name}{words}; of the compiler's {total / unit:.2f} "
            f"{(total - live) / unit:.2f}, {1 - live / total:.1%}, are holes. At",
            f"      {report['peak_source'].rpartition('/')[2]} {report['peak_op'][-96:]}",
        ]
    lines.append(f"  {name:>7}{'count':>6}  {'largest':26}{'source':21}operation (compiled)")
    for row in rows[:top]:
        source = row["source"].rpartition("/")[2][-20:] or row["kind"]
        numbers = f"{row['bytes'] / unit:7.2f}{row['count']:6}"
        lines.append(f"  {numbers}  {row['largest_shape'][:25]:26}{source:21}{row['op'][-68:]}")
    if more := rows[top:]:
        lines.append(f"  {sum(r['bytes'] for r in more) / unit:7.2f}{sum(r['count'] for r in more):6}  in all others")
    return lines
