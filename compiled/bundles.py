"""Bundles: how many cycles a Pallas kernel takes on a TPU7x TensorCore, counted in the program that the compiler made.

    python aot.py bundles dense:build M=8192 K=8192 N=8192
    python aot.py bundles flash:build_forward seq=8192 heads=8 --json

**Idea.** A TensorCore decides nothing at run time. Its instruction is a *bundle*, with slots for every unit: 2 MXUs, 2
XLUs (transposes, reductions along lanes), 4 VALUs, the EUP (exp, reciprocal), 3 loads, 2 stores and a scalar unit.
Bundles issue in order, one a cycle; if one needs what is not there yet, all wait. When each issues is thus known once
the program is, and libtpu, which must know it to schedule at all, prints it when asked, on a machine without a TPU:

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true"

Two passes of that are read for cycles. `packed-bundles-post-ra` is the schedule after the allocation of registers, with
an empty bundle for each cycle of waiting; the bundles at the very end (`final_bundles`) are the same without most of
the empty ones, as the hardware waits by itself. To count these is the common mistake: a matmul's step that needs 2388
cycles has 1563 of them. `pre-delay_hlo-static-per-bundle-utilization` has the slots that are used in each bundle.

**Regions.** A kernel is a tree of loops (over the grid; `lax.fori_loop`) and branches (`pl.when`, and what Pallas puts
round a step of the grid, as its pipeline starts and ends with nothing but DMA). A region's own bundles, executed once,
are its cycles, and

    compute = sum over regions of cycles * executions
    total   = max(compute, HBM) + ends,    HBM = bytes that the grid moves / bytes a cycle

with `ends` the first blocks' way in and the last ones' way out, which nothing hides. How often the parts of the grid
are executed is known. For branches, and for loops with bounds from data, the caller says it, by name: a
`jax.named_scope` in the body of a `pl.when` or of a loop names that region (also `lax.cond`, `lax.while_loop`).

    report = measure("flash:build_forward", seq=8192, heads=8)
    report.region("full block").cycles                                      # once
    report.cycles({"full block": 8 * 28, "masked block": 8 * 8}).total      # a call of the kernel

A scope costs two bundles and keeps instructions from crossing it. So names are read from a second compile, and cycles
from the one without them, unless that has other regions (`Kernel.cycles_with_scopes`).

**Why to believe it.** `simulate` runs the bundles by rules of its own: in order, a matmul instruction keeps its MXU
busy for 8 cycles (16 rows in bf16, 32 in fp8), its result is there 211 later, a push of weights takes 4 (8 transposed).
On the schedule with its empty bundles it must find nothing more to wait for, and finds none. On the one without them it
comes to the same cycles for matmuls, and to up to 8% fewer for loops of attention: there the compiler has a matmul wait
for its MXU, where `simulate` lets it queue up behind others; the larger figure is the one that is reported. The
compiler's simulation of a whole call (`profile`) differs by under 1% for matmuls with large blocks and for attention
without data-dependent branches, by 3.5% for a matmul with small blocks, as copies are counted too often here.

**Not seen.** That HBM is late or shared, and what a DMA takes to start; collisions of VMEM banks; instruction memory
that is loaded again in huge kernels; throttling: published times of attention kernels on TPU7x are the cycles over 1.6
to 1.8 GHz, not the 2.2 of the advertised peak. Ratios of two kernels are worth more than seconds. What XLA does before
and after the kernel (layouts, copies into VMEM of what fits there) is not in it. Kernels of several devices are not
compiled. Dumps have no stable format: what this file cannot read is an error. It reads libtpu 0.0.42.1 and 0.0.50.1.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import command
import compiler_flags
from compiled import liveness
from hardware import CHIPS

CHIP = CHIPS["tpu7x"]
HBM_BYTES_PER_CYCLE = CHIP.hbm_bytes_per_s / CHIP.cores / CHIP.clock_hz  # of a core

# What an instruction of a matmul does with a stationary 256x256 tile, by the type of the operands: cycles on its MXU,
# and result registers (8x128 float32) that it fills: rows * 256 / 1024. Distances in libtpu's *-critical-path.txt.
MATMUL_CYCLES = {"f32": 4, "bf16": 8, "f8e4m3fn": 8, "f8e4m3": 8, "f8e5m2": 8}
MATMUL_RESULTS = {"f32": 2, "bf16": 4, "f8e4m3fn": 8, "f8e4m3": 8, "f8e5m2": 8}
PUSH_CYCLES, PUSH_TRANSPOSED_CYCLES = 4, 8  # there, too
RESULT_LATENCY = 211  # likewise: of a path `vmatmul, vpop`; `result_latency` reads it from a dump
DELAY_SLOTS = 6  # bundles behind a branch that are executed whether it is taken or not

PASSES = {
    "schedule": "packed-bundles-post-ra",
    "slots": "pre-delay_hlo-static-per-bundle-utilization",
    "loops": "post-bundle-packing-post-ra",
    "paths": "critical-path",
}


# -- what is found


@dataclass(frozen=True)
class Region:
    """A loop, a branch or all of a kernel. Counts are of its own bundles, without those of the regions in it, once."""

    kind: str  # kernel, grid (the loop over it), step (of it), copy (of its blocks), loop or branch
    names: tuple[str, ...]  # of the jax.named_scopes that open in it
    first: int  # bundle
    last: int
    cycles: int
    slots: dict[str, float]  # {unit: share of its slots in use}; FILL and SPILL: instructions
    executions: int | None  # in a call of the kernel, where the program says; of a loop, iterations
    trips: int | None  # executions each time that the program comes to it, if always as many
    children: tuple["Region", ...]

    @property
    def limit(self) -> tuple[str, float]:
        """The unit with the least to spare, and its use. If that is well under 1, latency is what it waits for."""
        return max(((unit, use) for unit, use in self.slots.items() if unit not in COUNTS), key=lambda pair: pair[1])

    @property
    def label(self) -> str:
        return ", ".join(self.names) or f"{self.kind} at {self.first}"


COUNTS = ("FILL", "SPILL")  # registers that did not suffice: loads and stores of them


def walk(region: Region, depth: int = 0) -> Iterator[tuple[Region, int]]:
    """It and those in it, in the order of the program, and how deep they are."""
    yield region, depth
    for child in region.children:
        yield from walk(child, depth + 1)


@dataclass(frozen=True)
class Cycles:
    """Of a call of a kernel, predicted from its compiled schedule."""

    compute: int  # of the TensorCore
    hbm: float  # in which HBM could move the blocks of the grid
    ends: float  # the first blocks in, the last ones out

    @property
    def total(self) -> float:
        return max(self.compute, self.hbm) + self.ends


@dataclass(frozen=True)
class Kernel:
    name: str
    root: Region
    vmem_bytes: int  # that it uses, of
    vmem_limit_bytes: int
    grid: tuple[int, ...]
    moved_bytes: int | None  # between HBM and VMEM, by the grid's blocks in a call; None: their places depend on data
    ends_bytes: int | None  # of the first blocks in, and the last out
    cycles_with_scopes: bool = False  # they have regions of their own, so that cycles are with their cost

    def region(self, name: str) -> Region:
        """The region in which the `jax.named_scope` of this name opens. Raises ValueError: none, or several."""
        found = [region for region, _ in walk(self.root) if name in region.names]
        if len(found) != 1:
            there_are = sorted({name for region, _ in walk(self.root) for name in region.names})
            raise ValueError(f"{len(found)} regions of {self.name} are called {name!r}; names are {there_are}")
        return found[0]

    def unknown(self) -> list[Region]:
        """Regions whose executions the program does not say, in its order."""
        return [region for region, _ in walk(self.root) if region.executions is None and region.trips is None]

    def cycles(
        self,
        executions: Mapping[str, int] | Sequence[int] = (),
        *,
        moved_bytes: int | None = None,
        otherwise: int | None = None,
    ) -> Cycles:
        """Of one call.

        Args:
          executions: in the whole call, of the branches and loops of which the program does not say it (`unknown`):
            {name: executions}, or all in order. Of a loop, its iterations. The branch that Pallas puts round a loop,
            for the case that it has none, need not be given: it counts as often as possible.
          moved_bytes: between HBM and VMEM, where `Kernel.moved_bytes` is None, or the kernel moves some itself.
          otherwise: executions of each region that is not given.

        Raises:
          ValueError: executions, or bytes, are neither known nor given, or given for what is not there.
        """
        given = self._given(executions)
        compute, missing = self._compute(self.root, 1, given, otherwise)
        if missing:
            raise ValueError(f"{self.name}: how often are these executed? " + "; ".join(missing))
        moved = self.moved_bytes if moved_bytes is None else moved_bytes
        if moved is None:
            raise ValueError(f"{self.name}: where the blocks of its grid lie depends on data; give moved_bytes")
        return Cycles(compute, moved / HBM_BYTES_PER_CYCLE, (self.ends_bytes or 0) / HBM_BYTES_PER_CYCLE)

    def _given(self, executions) -> dict[int, int]:
        """{first bundle of a region: executions}"""
        if isinstance(executions, Mapping):
            return {self.region(name).first: count for name, count in executions.items()}
        unknown = self.unknown()
        if executions and len(executions) != len(unknown):
            asked = ", ".join(region.label for region in unknown)
            raise ValueError(f"{len(executions)} executions for the {len(unknown)} regions of {self.name}: {asked}")
        return {region.first: count for region, count in zip(unknown, executions or [], strict=False)}

    def _compute(self, region: Region, outer: int, given, otherwise) -> tuple[int, list[str]]:
        """Cycles of a region and those in it, and what is missing for that."""
        known = region.executions if region.first not in given else given[region.first]
        if known is None and region.trips is not None:
            known = outer * region.trips
        if known is None:
            inside = [given[each.first] for each, depth in walk(region) if depth and each.first in given]
            known = min(outer, sum(inside)) if inside else otherwise
        total, missing = (known or 0) * region.cycles, []
        if known is None:
            missing.append(f"{region.label} ({region.cycles:,} cycles)")
        for child in region.children:
            cycles, more = self._compute(child, known or 0, given, otherwise)
            total, missing = total + cycles, missing + more
        return total, missing


@dataclass(frozen=True)
class Report:
    """What the compiler made of a function, or why it refused."""

    builder: str
    options: dict
    error: str  # empty if it compiled
    kernels: tuple[Kernel, ...]
    compile_s: float

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of this name (`pl.pallas_call(name=...)`); the only one, if none is given.

        Raises:
          ValueError: it did not compile, or there is not one such kernel.
        """
        if self.error:
            raise ValueError(f"{self.builder} {self.options}: {self.error}")
        found = [kernel for kernel in self.kernels if name in (None, kernel.name, re.sub(r"\.\d+$", "", kernel.name))]
        if len(found) != 1:
            raise ValueError(f"{self.builder} has the kernels {[k.name for k in self.kernels]}: give the name of one")
        return found[0]

    def region(self, name: str) -> Region:
        """Of the only kernel; see `Kernel.region`."""
        return self.kernel().region(name)

    def cycles(self, executions: Mapping[str, int] | Sequence[int] = (), **how) -> Cycles:
        """Of the only kernel; see `Kernel.cycles`."""
        return self.kernel().cycles(executions, **how)


# -- reading the schedule

BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) +(?:[A-Z]{2})?: *(?:> *)*\{", re.M)
BRANCH = re.compile(r"\bsbr\.\w+ (?:\([^)]*\) )?target bundleno = (\d+)")
SCOPE = re.compile(r"TraceMeStart\((.*?)\) \[")


def read_bundles(text: str) -> list[str]:
    """The instructions of each bundle. Raises ValueError: it is not a listing of bundles, or one is missing."""
    starts = list(BUNDLE.finditer(text))
    if not starts or [int(start[1], 16) for start in starts] != list(range(len(starts))):
        raise ValueError(f"not a listing of bundles 0, 1, 2, ...: {len(starts)} were found in {len(text):,} characters")
    ends = [start.start() for start in starts[1:]] + [len(text)]
    return [text[start.start() : end] for start, end in zip(starts, ends, strict=True)]


def read_slots(text: str) -> tuple[dict[str, int], list[dict[str, int]]]:
    """({unit: its slots}, {unit: slots in use} of each bundle)."""
    lines = text.splitlines()
    if len(lines) < 3 or "MXU" not in lines[1]:
        raise ValueError("not a table of slots: its second line should name the units")
    units = [name.strip().split(":")[-1] for name in lines[1].split(",")]
    rows = [[int(cell) for cell in line.split()] for line in lines[2:] if re.fullmatch(r"[\d ]+", line)]
    if any(len(row) != len(units) for row in rows):
        raise ValueError(f"not a table of slots of {', '.join(units)}")
    slots, *uses = [dict(zip(units, row, strict=True)) for row in rows]
    return slots, uses


def read_trips(text: str) -> dict[int, int]:
    """{region that is the body of a loop: its iterations}, for loops with constant bounds."""
    trips = {}
    for loop in re.split(r"\n(?=\s*loop: )", text)[1:]:
        bounds = re.match(r"\s*loop: start=(-?\d+), step=(\d+), limit=(-?\d+)\n", loop)
        body = re.search(r"\$region(\d+): .*// loop_body", loop)
        if bounds and body:
            start, step, limit = map(int, bounds.groups())
            trips[int(body[1])] = max(0, -((start - limit) // step))
    return trips


def result_latency(text: str) -> int | None:
    """Cycles from a matmul to its result in libtpu's critical paths; None if none of them has both."""
    found = re.findall(r"Length to end: (\d+), .*?\bvmatmul\..*\n +Length to end: (\d+), .*?\bvpop\.f32\.mrb", text)
    return min((int(matmul) - int(pop) for matmul, pop in found), default=None)


@dataclass
class _Span:
    kind: str
    first: int
    last: int
    trips: int | None = None
    inside: list["_Span"] = dataclasses.field(default_factory=list)

    def own(self) -> list[int]:
        taken = {i for span in self.inside for i in range(span.first, span.last + 1)}
        return [i for i in range(self.first, self.last + 1) if i not in taken]


def spans_of(bundles: Sequence[str], trips: Mapping[int, int]) -> _Span:
    """The tree of loops and branches. A jump back makes a loop; one forward a branch, of what it leaves out, so that a
    `lax.cond` has two, side by side. Branches without a vector register that hold Pallas' DMA of the grid's blocks are
    copies."""
    found = []
    for i, bundle in enumerate(bundles):
        targets = [int(target) for target in BRANCH.findall(bundle)]
        if len(targets) != len(re.findall(r"\bsbr\b", bundle)):
            raise ValueError(f"bundle {i} branches to nobody knows where: {bundle[:200]!r}")
        for target in targets:
            landed = i + 1 + DELAY_SLOTS
            if target <= i:
                starts = {int(n) for n in re.findall(r"Start region (\d+)", bundles[target])}
                count = [trips[n] for n in starts & trips.keys()]
                found.append(_Span("loop", target, min(landed, len(bundles)) - 1, count[0] if count else None))
            elif target > landed:
                text = "".join(bundles[landed:target])
                copies = "%v" not in text and ("iteration_bounds:" in text or "pipeline-emitter" in text)
                found.append(_Span("copy" if copies else "branch", landed, target - 1))
    root = _Span("kernel", 0, len(bundles) - 1)
    for span in sorted(found, key=lambda span: (span.first, -span.last)):
        outer = root
        while inner := next((s for s in outer.inside if s.first <= span.first <= s.last), None):
            outer = inner
        if span.last > outer.last:
            raise ValueError(f"regions that overlap: bundles {span.first}-{span.last}, {outer.first}-{outer.last}")
        outer.inside.append(span)
    return root


# -- cycles

MATMUL = re.compile(r"\bvmatmul\.([\w.]+?)\.mrb\[(\d+)\]\.mxu(\d)")
PUSH = re.compile(r"\bvmatpush\d?\.[\w.]*mxu(\d)")
POP = re.compile(r"\bvpop\.f32\.mrb\[(\d+)\]\.mxu(\d)")


def simulate(bundles: Sequence[str], latency: int = RESULT_LATENCY) -> int:
    """Cycles that bundles take one after the other: in order, one a cycle, waiting for results of the MXUs.

    An MXU works on a queue without end: a matmul starts when those before it have, and if it is the first with new
    weights, when these are pushed. Only a pop makes the core wait.

    Raises:
      ValueError: a matmul of a type that has no known cycles.
    """
    now, busy, pushed, ready = 0, {}, {}, {}
    for bundle in bundles:
        for register, mxu in POP.findall(bundle):
            now = max(now, ready.get((int(register), mxu), 0))
        for push in PUSH.finditer(bundle):
            cycles = PUSH_TRANSPOSED_CYCLES if ".xpose" in push[0] else PUSH_CYCLES
            pushed[push[1]] = max(pushed.get(push[1], 0), now) + cycles
        for what, register, mxu in MATMUL.findall(bundle):
            dtype = next((part for part in what.split(".") if part in MATMUL_CYCLES), None)
            if dtype is None:
                raise ValueError(f"vmatmul.{what}: cycles are known of {', '.join(MATMUL_CYCLES)}")
            start = max(now, busy.get(mxu, 0), pushed.get(mxu, 0) if "vlgmr" in what else 0)
            busy[mxu] = start + MATMUL_CYCLES[dtype]
            for entry in range(MATMUL_RESULTS[dtype]):
                ready[int(register) + entry, mxu] = start + latency
        now += 1
    return max(now, *busy.values()) if busy else now


def regions_of(dump: Mapping[str, str], grid: Sequence[int]) -> Region:
    """The tree of a kernel from its dump, {of PASSES: text}."""
    bundles = read_bundles(dump["schedule"])
    capacity, uses = read_slots(dump["slots"])
    if len(uses) != len(bundles):
        raise ValueError(f"{len(bundles)} bundles in the schedule, {len(uses)} in the table of slots")
    latency = result_latency(dump["paths"]) or RESULT_LATENCY

    def region(span: _Span, executions: int | None) -> Region:
        own = span.own()
        names = tuple(dict.fromkeys(name for i in own for name in SCOPE.findall(bundles[i])))
        cycles = simulate([bundles[i] for i in own], latency)
        used = {unit: sum(uses[i][unit] for i in own) for unit in capacity}
        slots = {u: n if u in COUNTS else n / max(1, cycles) / capacity[u] for u, n in used.items()}
        inside = tuple(region(*each) for each in _executions(span, executions, grid))
        trips = 1 if span.kind == "copy" else span.trips
        return Region(span.kind, names, span.first, span.last, cycles, slots, executions, trips, inside)

    return region(spans_of(bundles, read_trips(dump["loops"])), 1)


def _executions(span: _Span, executions: int | None, grid: Sequence[int]) -> list[tuple[_Span, int | None]]:
    """Of the regions in one. The loop over the grid goes round more often than the grid has steps, as its pipeline
    starts and ends with nothing but DMA; the largest branch in it is the step, which is left out there. What starts
    and awaits DMA is taken to be executed every time: too often for blocks that stay."""
    steps = math.prod(grid)
    for inner in span.inside:
        if span.kind == "kernel" and grid and inner.trips in (steps, steps + 1, steps + 2):
            inner.kind = "grid"
    if span.kind == "grid" and span.trips > steps:
        branches = [inner for inner in span.inside if inner.kind == "branch"]
        if not branches:
            raise ValueError(f"{span.trips} rounds for the {steps} steps of a grid, and no branch for a step")
        max(branches, key=lambda inner: inner.last - inner.first).kind = "step"
    known = {"step": steps, "copy": executions}
    rounds = lambda inner: None if None in (executions, inner.trips) else executions * inner.trips
    return [(inner, known[inner.kind] if inner.kind in known else rounds(inner)) for inner in span.inside]


# -- compiling


def measure(
    builder: str, *, timeout_s: float = 600, flags: str = "", topology: str = "tpu7x:2x2x1", **options
) -> Report:
    """Compiles what a builder makes, for TPU7x, and reads the cycles of its kernels. About 4 to 10 s.

    libtpu takes the folder of its dump once in a process, so that compiles run in child processes.

    Args:
      builder: "module:function", to be found where this process finds modules, or "path/module.py:function". It gives
        (function, [jax.ShapeDtypeStruct, ...]).
      timeout_s: of the child process.
      flags: more of libtpu's, as in LIBTPU_INIT_ARGS, which counts too.
      topology: of which one device is compiled for.
      options: keywords for the builder; what JSON can hold.

    Returns:
      The report. If the builder or the compiler refuses, if there is no libtpu, or if this file cannot read its dump,
      `Report.error` says so.

    Raises:
      ValueError: builder is not of that form.
    """
    _check(builder)
    begun, kernels = time.perf_counter(), ()
    with tempfile.TemporaryDirectory(prefix="bundles_") as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        dump += f" --xla_jf_dump_llo_pass_label_regex={'|'.join(PASSES.values())}"
        spec = dict(builder=builder, options=options, topology=topology, scopes=True)
        found = _child(spec, folder, f"{dump} {flags}", timeout_s)
        error = found["error"]
        try:
            kernels = () if error else tuple(_kernels(folder, found))
        except ValueError as unreadable:
            error = f"the compiler's dump cannot be read: {unreadable}"
    return Report(builder, options, error, kernels, time.perf_counter() - begun)


def profile(
    builder: str, *, timeout_s: float = 600, flags: str = "", topology: str = "tpu7x:2x2x1", **options
) -> dict[str, int]:
    """Cycles of a call of each kernel by the compiler's own simulation, DMA in it: for a check of `Kernel.cycles`.

    It takes branches as it likes, takes 9 GB for a matmul of 16k, and makes the compiler die of some kernels (libtpu
    0.0.42.1: of all that were tried).

    Args: as for `measure`.

    Raises:
      ValueError: builder is not of the form of `measure`, or there is no answer.
    """
    _check(builder)
    with tempfile.TemporaryDirectory(prefix="bundles_") as folder:
        spec = dict(builder=builder, options=options, topology=topology, scopes=False)
        found = _child(spec, folder, f"--xla_jf_dump_static_llo_profile_to={folder} {flags}", timeout_s)
        texts = [path.read_text() for path in sorted(Path(folder).glob("*static_llo_profile.textproto"))]
    answers = [re.search(r'hlo_op_name: "(.*?)"\s+estimated_cycles: (\d+)', text) for text in texts]
    if found["error"] or not answers or not all(answers):
        raise ValueError(f"no simulation of {builder} by the compiler: {found['error'] or 'it has no word of it'}")
    return {answer[1]: int(answer[2]) for answer in answers}


def _check(builder: str) -> None:
    if not re.fullmatch(r"[^:]+:\w+", builder):
        raise ValueError(f'builder is "module:function", like "dense:build", not {builder!r}')


def measure_many(jobs: Sequence[tuple[str, dict]], workers: int = 2, progress: bool = True, **common) -> list[Report]:
    """`measure` of many, some at once, as a search for the best blocks needs it.

    Args:
      jobs: (builder, its options) of each.
      workers: child processes at a time: 1 to 2 GB, and a core, each.
      progress: say on stderr how many are done.
      common: further arguments of `measure`, for all.

    Returns:
      The reports, in the order of the jobs.
    """
    begun, reports = time.perf_counter(), {}
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(measure, job, **common, **options): i for i, (job, options) in enumerate(jobs)}
        for future in as_completed(futures):
            reports[futures[future]] = future.result()
            if progress:
                left_s = (time.perf_counter() - begun) / len(reports) * (len(jobs) - len(reports))
                refused = sum(bool(report.error) for report in reports.values())
                line = f"\r{len(reports)}/{len(jobs)} compiled, {refused} refused, {left_s:.0f} s left "
                print(line, end="\n" if len(reports) == len(jobs) else "", file=sys.stderr, flush=True)
    return [reports[i] for i in range(len(jobs))]


CHILD = "import sys; from compiled import bundles; bundles.answer(*sys.argv[1:])"


def answer(spec: str, path: str) -> None:
    """Writes what `_compile` finds; in a process of its own, which the compiler may take with it."""
    Path(path).write_text(json.dumps(_compile(json.loads(spec))))


def _child(spec: dict, folder: str, flags: str, timeout_s: float) -> dict:
    """Runs `_compile` in another process; {"error": ...} or what it found."""
    environment = (
        os.environ
        | compiler_flags.WITHOUT_TPU
        | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip(),
        }
    )
    answer = Path(folder, "answer.json")
    command = [sys.executable, "-c", CHILD, json.dumps(spec), str(answer)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not compiled within {timeout_s:g} s"}
    if not answer.exists():  # the compiler took the process with it
        said = [line for line in done.stderr.splitlines() if re.match(r"[EF]\d{4} |.*(Error|Check failed)", line)]
        return {"error": f"the compiler died, status {done.returncode}: {(said or ['without a word'])[0][:400]}"}
    return json.loads(answer.read_text())


def _compile(spec: dict) -> dict:
    """In the child: builds and compiles, once as it is, and if it has named scopes, again with them."""
    try:
        import jax
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        importlib.import_module("libtpu")
    except ImportError as error:
        return {"error": f'{error}: compiling for TPU needs libtpu: pip install -e ".[tpu]"'}
    try:
        device = topologies.get_topology_desc(platform="tpu", topology_name=spec["topology"]).devices[0]
        mesh = Mesh(np.array([device]), ("x",))
        target, shapes = build(spec["builder"], spec["options"])
        here = NamedSharding(mesh, PartitionSpec())
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas asks it for the kind of TPU
            traced = jax.jit(target).trace(*shapes)
            compiled = traced.lower().compile()
            program = compiled.as_text()
            if scoped := spec["scopes"] and _has_scopes(program):
                traced.lower().compile(compiler_options={"xla_enable_custom_call_region_trace": "true"})
    except Exception as error:  # whatever it is, it is the answer
        return {"error": refusal(f"{type(error).__name__}: {error}")}
    return {"error": "", "program": program, "scoped": scoped, "grids": _grids(traced.jaxpr.jaxpr)}


def build(builder: str, options: dict) -> tuple:
    """(function, [jax.ShapeDtypeStruct, ...]) of "module:function" or "path/module.py:function", with its options."""
    module, function = builder.rsplit(":", 1)
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).resolve().parent))
        module = Path(module).stem
    return getattr(importlib.import_module(module), function)(**options)


def _has_scopes(program: str) -> bool:
    import base64

    bodies = re.findall(r'"custom_call_config":\{"body":"([^"]*)"', program)
    return any(b"trace_start" in base64.b64decode(body) for body in bodies)


def refusal(text: str) -> str:
    """The line that says it: bytes and limit if VMEM does not suffice, else the first of the message."""
    found = liveness.refusal(text)
    if found["memory"] == "vmem":
        used, limit = round(found["used_bytes"]), round(found["limit_bytes"])
        return f"VMEM: {used:,} bytes are used and {limit:,} the limit; smaller blocks, or a larger vmem_limit_bytes"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "Mosaic" in line or "RESOURCE_EXHAUSTED" in line), lines[0])[:600]


def _grids(jaxpr) -> dict[str, dict]:
    """{name of a kernel: its grid, and the bytes that the grid moves}, of all pallas_calls in a jaxpr."""
    import jax

    found = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            name = getattr(equation.params.get("name_and_src_info"), "name", None) or equation.params.get("name")
            found[name] = _moved(equation.params["grid_mapping"])
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                found |= _grids(inner)
    return found


def _moved(mapping) -> dict:
    """A block is moved when its place differs from that of the step before; at the edges, what is left of it."""
    import jax
    import jax.extend
    import numpy as np

    grid = tuple(mapping.grid)
    unknown = {"grid": [size if isinstance(size, int) else 0 for size in grid], "moved": None, "ends": None}
    if not all(isinstance(size, int) for size in grid):
        return unknown
    steps = np.indices(grid, dtype=np.int32).reshape(len(grid), math.prod(grid))
    moved = ends = 0
    for block in mapping.block_mappings:
        if not re.match(r"\w+<(default|vmem)>", str(block.ref_aval)):
            continue  # the kernel moves it
        kinds = {type(size).__name__ for size in block.block_shape}
        scalars = block.index_map_jaxpr.jaxpr.invars[len(grid) :]  # fetched before
        reads = [each for equation in block.index_map_jaxpr.eqns for each in equation.invars]
        if any(each is scalar for each in reads for scalar in scalars) or not kinds <= {
            "Blocked",
            "Squeezed",
            "NoneType",
            "int",
        }:
            return unknown  # the place depends on them, or is not counted in blocks
        sizes = [getattr(size, "block_size", size if isinstance(size, int) else 1) for size in block.block_shape]
        place = jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr)
        zeros = [np.int32(0)] * len(scalars)
        at_step = lambda *step, place=place, zeros=zeros: place(*step, *zeros)
        places = [np.broadcast_to(at, steps.shape[1]) for at in (jax.vmap(at_step)(*steps) if grid else at_step())]
        dims = zip(places, sizes, block.array_aval.shape, strict=True)
        num_bytes = math.prod(np.minimum(size, dim - at.astype(np.int64) * size) for at, size, dim in dims)
        num_bytes = num_bytes * block.array_aval.dtype.itemsize
        fresh = np.any([np.diff(at, prepend=-1) != 0 for at in places], axis=0)
        moved += int(num_bytes[fresh].sum())
        ends += int(num_bytes[-1 if block.origin == "outputs" else 0])
    return {"grid": grid, "moved": moved, "ends": ends}


def _kernels(folder: str, found: dict) -> Iterator[Kernel]:
    """Of the dump of a child process: for each kernel, the first compile's, named as in the second, if there is one."""
    program = re.sub(r"kernel_metadata=\{\n.*?\n\}", "", found["program"], flags=re.DOTALL)  # it has several lines
    lines = re.findall(r'^.*custom_call_target="tpu_custom_call".*$', program, re.M)
    compiles = 1 + found["scoped"]
    for line in lines:
        name = re.search(r"%(\S+) =", line)[1]
        dumps = [_dumps(folder, name, label) for label in PASSES.values()]
        if not any(dumps) and len(lines) > 1:
            continue  # it equals another, and the compiler has compiled that
        if {len(texts) for texts in dumps} != {compiles}:
            raise ValueError(f"{[len(texts) for texts in dumps]} dumps of {name} in {compiles} compiles")
        plain, *scoped = (dict(zip(PASSES, texts, strict=True)) for texts in zip(*dumps, strict=True))
        grid = found["grids"].get(re.sub(r"\.\d+$", "", name), {"grid": [], "moved": None, "ends": None})
        root = regions_of(plain, grid["grid"])
        if scoped:
            named = regions_of(scoped[0], grid["grid"])
            same = shape(root) == shape(named)
            root = renamed(root, named) if same else named
        memory = r'_memory_configs":\[{"memory_space":"1","offset":"\d+","size":"(\d+)"'
        used, limit = re.search(f'"used_scoped{memory}', line), re.search(f'"scoped{memory}', line)
        if not (used and limit):
            raise ValueError(f"the program does not say how much VMEM {name} has and uses")
        steps = tuple(grid["grid"])
        other = bool(scoped) and not same
        yield Kernel(name, root, int(used[1]), int(limit[1]), steps, grid["moved"], grid["ends"], other)


def shape(region: Region) -> tuple:
    """Of the tree: which regions are in which."""
    return region.kind, region.executions, tuple(shape(child) for child in region.children)


def renamed(region: Region, other: Region) -> Region:
    """A tree with the names of another, of the same shape."""
    pairs = zip(region.children, other.children, strict=True)
    return dataclasses.replace(region, names=other.names, children=tuple(renamed(*pair) for pair in pairs))


def _dumps(folder: str, name: str, label: str) -> list[str]:
    """What a pass had to say of a kernel, in each compile."""
    file = re.compile(rf"(\d+)-{re.escape(name)}-\d+-{re.escape(label)}\.txt")
    return [path.read_text() for path in sorted(Path(folder).iterdir()) if file.fullmatch(path.name)]


# -- command line


def describe(report: Report) -> str:
    """As a person reads it."""
    given = " ".join(f"{name}={value}" for name, value in report.options.items())
    lines = [f"{report.builder} {given}, TPU7x, in {report.compile_s:.0f} s"]
    if report.error:
        return "\n".join([*lines, f"  refused: {report.error}"])
    for kernel in report.kernels:
        grid = "x".join(map(str, kernel.grid)) or "none"
        lines += [f"\n{kernel.name}: grid {grid}, {kernel.vmem_bytes:,} bytes of VMEM of {kernel.vmem_limit_bytes:,}"]
        lines += [f"{'cycles, compiled':>46}{'executed':>10}  share of the slots in use"]
        units = [unit for unit in kernel.root.slots]
        lines += [f"{'region':34}{'once':>12}{'':10}" + "".join(f"{unit:>7}" for unit in units) + "  most"]
        for region, depth in walk(kernel.root):
            executed = "?" if region.executions is None else f"{region.executions:,}"
            row = f"{'  ' * depth + region.label:34.34}{region.cycles:12,}{executed:>10}"
            row += "".join(f"{v:7,}" if u in COUNTS else f"{v:7.0%}" for u, v in region.slots.items())
            lines += [f"{row}  {region.limit[0] if region.cycles else ''}"]
        if kernel.cycles_with_scopes:
            lines += ["  with the cost of named scopes: without them, the regions are others"]
        if kernel.unknown():
            lines += ["  the call: give executions of ? to Kernel.cycles"]
        elif kernel.moved_bytes is None:
            lines += ["  the call: give moved_bytes to Kernel.cycles"]
        else:
            call = kernel.cycles()
            lines += [
                f"  the call: {call.total:,.0f} cycles: the larger of {call.compute:,} of compute and "
                f"{call.hbm:,.0f} of HBM, and {call.ends:,.0f} at the ends (predicted)"
            ]
    return "\n".join(lines)


def _option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__file__, prog="aot.py bundles")
    parser.add_argument("builder", metavar="MODULE:BUILDER", help="gives (function, [jax.ShapeDtypeStruct, ...])")
    parser.add_argument("options", nargs="*", type=_option, metavar="NAME=VALUE", help="for it, as JSON or as text")
    parser.add_argument("--flags", default="", help="more flags of libtpu's, as in LIBTPU_INIT_ARGS")
    parser.add_argument("--profile", action="store_true", help="also the compiler's own simulation of a call: slow")
    parser.add_argument("--json", action="store_true", help="a JSON object, in cycles and bytes")
    args = command.arguments(parser, argv)
    report = measure(args.builder, flags=args.flags, **dict(args.options))
    simulated = {}
    if args.profile and not report.error:
        try:
            simulated = profile(args.builder, flags=args.flags, **dict(args.options))
        except ValueError as error:
            print(error, file=sys.stderr)
    if args.json:
        print(json.dumps(dataclasses.asdict(report) | {"profile": simulated}))
    else:
        print(describe(report), *(f"  {name} by the compiler: {n:,} cycles" for name, n in simulated.items()), sep="\n")
    return 1 if report.error else 0
