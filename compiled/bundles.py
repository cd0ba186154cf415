"""Counts the cycles that a Pallas kernel takes on a TPU7x TensorCore, in the program that the compiler made of it.

    python aot.py bundles dense:build M=8192 K=8192 N=8192
    python aot.py bundles compiled.builders:flash_forward seq=8192 heads=8 --json

**Idea.** A TensorCore decides nothing at run time. Its instruction is a *bundle* (VLIW) with slots for every unit: 2
MXUs, 2 XLUs (transposes, reductions along lanes), 4 VALUs, the EUP (exp, reciprocal), 3 loads, 2 stores and a scalar
unit. Bundles issue in order, one per cycle; if one needs a result that is not ready, all wait. So the program alone
determines when each bundle issues. libtpu has to know this to schedule, and prints it on request, without a TPU:

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true"

Two passes in that dump have the cycles. `packed-bundles-post-ra` is the schedule after register allocation, with an
empty bundle for each cycle of waiting. `pre-delay_hlo-static-per-bundle-utilization` has the slots that each bundle
uses. The last bundles in the dump (`final_bundles`) leave out most of the empty ones, as the hardware waits by itself.
It is a common mistake to count those: a matmul's step that needs 2388 cycles has 1563 of them.

**Regions.** A kernel is a tree of loops (over the grid; `lax.fori_loop`) and branches (`pl.when`, and those that Pallas
puts around a grid step, because its pipeline starts and ends with DMA alone).

**Formula.** The cycles of a region are those of its own bundles, executed once, and

    compute = sum over regions of cycles * executions
    total   = max(compute, HBM) + ends,    HBM = bytes that the grid moves / bytes a cycle

where `ends` is the time to load the first blocks and to store the last ones, which nothing hides. The executions of the
grid's loop, step and copies are known. Those of branches, and of loops whose bounds are data, are passed by the caller,
by name. A `jax.named_scope` in the body of a `pl.when` or of a loop names that region (also `lax.cond`,
`lax.while_loop`).

    report = measure("compiled.builders:flash_forward", seq=8192, heads=8)
    report.region("full block").cycles                                      # once
    report.cycles({"full block": 8 * 28, "masked block": 8 * 8}).total      # a call of the kernel

A scope costs two bundles, and instructions do not move across it. So a second compilation with scopes gives the names,
and the one without scopes the cycles, unless their regions differ (`Kernel.cycles_with_scopes`).

**Validation.** `simulate` runs the bundles in order by rules of its own: a matmul instruction keeps its MXU busy for 8
cycles (16 rows in bfloat16, 32 in FP8), its result is ready 211 cycles later, a push of weights takes 4 cycles (8 if
transposed). On the schedule with empty bundles it must not find any further wait, and it does not. On the schedule
without them it gives the same cycles for matmuls and up to 8% fewer for loops of attention: there the compiler lets a
matmul wait for its MXU, while `simulate` queues it behind others. The larger figure is reported. The compiler's own
simulation of a call (`profile`) differs by under 1% for matmuls with large blocks and for attention without
data-dependent branches. It differs by 3.5% for a matmul with small blocks, as copies are counted too often here.

**Left out**: latency and sharing of HBM, and the start-up of a DMA; conflicts of VMEM banks; reloads of instruction
memory in huge kernels; throttling: published times of attention kernels on TPU7x are the cycles over 1.6 to 1.8 GHz,
not the 2.2 of the advertised peak. So trust ratios of two kernels more than seconds. The work of XLA before and after
the kernel (layouts, copies into VMEM of operands that fit) is not counted. Kernels of several devices are not compiled.
The dumps have no stable format: text that this module cannot parse is an error. It parses libtpu 0.0.42.1 and 0.0.50.1.
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
HBM_BYTES_PER_CYCLE = CHIP.hbm_bytes_per_s / CHIP.cores / CHIP.clock_hz  # per core

# A matmul instruction with a stationary 256x256 tile, by the type of its operands: the cycles that it keeps its MXU
# busy, and the result registers (8x128 float32) that it fills, rows * 256 / 1024. The cycles are distances in libtpu's
# *-critical-path.txt, and so are the constants below.
MATMUL_CYCLES = {"f32": 4, "bf16": 8, "f8e4m3fn": 8, "f8e4m3": 8, "f8e5m2": 8}
MATMUL_RESULTS = {"f32": 2, "bf16": 4, "f8e4m3fn": 8, "f8e4m3": 8, "f8e5m2": 8}
PUSH_CYCLES, PUSH_TRANSPOSED_CYCLES = 4, 8
RESULT_LATENCY = 211  # of a path `vmatmul, vpop`; `result_latency` reads it from a dump
DELAY_SLOTS = 6  # bundles after a branch that are executed whether it is taken or not

PASSES = {
    "schedule": "packed-bundles-post-ra",
    "slots": "pre-delay_hlo-static-per-bundle-utilization",
    "loops": "post-bundle-packing-post-ra",
    "paths": "critical-path",
}


# -- results


@dataclass(frozen=True)
class Region:
    """A loop, a branch or an entire kernel. Counts are for one execution of its own bundles, without inner regions."""

    kind: str  # kernel, grid (the loop over the grid), step (of the grid), copy (of its blocks), loop or branch
    names: tuple[str, ...]  # the jax.named_scopes that open in it
    first: int  # bundle
    last: int
    cycles: int
    slots: dict[str, float]  # {unit: share of its slots in use}; FILL and SPILL: number of instructions
    executions: int | None  # in a call of the kernel; for a loop its iterations; None if the program does not show it
    trips: int | None  # executions each time that the program reaches it, if constant
    children: tuple["Region", ...]

    @property
    def limit(self) -> tuple[str, float]:
        """The busiest unit and its utilization. If that is well under 1, the region waits for latencies."""
        return max(((unit, use) for unit, use in self.slots.items() if unit not in COUNTS), key=lambda pair: pair[1])

    @property
    def label(self) -> str:
        return ", ".join(self.names) or f"{self.kind} at {self.first}"


COUNTS = ("FILL", "SPILL")  # loads and stores of registers that were spilled


def walk(region: Region, depth: int = 0) -> Iterator[tuple[Region, int]]:
    """Yields (region, depth) for a region and those in it, in the order of the program."""
    yield region, depth
    for child in region.children:
        yield from walk(child, depth + 1)


@dataclass(frozen=True)
class Cycles:
    """The cycles of a call of a kernel, predicted from its compiled schedule."""

    compute: int  # of the TensorCore
    hbm: float  # to move the blocks of the grid at HBM's peak bandwidth
    ends: float  # to load the first blocks and to store the last ones

    @property
    def total(self) -> float:
        return max(self.compute, self.hbm) + self.ends


@dataclass(frozen=True)
class Kernel:
    """A compiled Pallas kernel."""

    name: str
    root: Region
    vmem_bytes: int  # in use
    vmem_limit_bytes: int
    grid: tuple[int, ...]
    moved_bytes: int | None  # between HBM and VMEM by the grid's blocks in a call; None if their indices depend on data
    ends_bytes: int | None  # of the first blocks loaded and the last ones stored
    cycles_with_scopes: bool = False  # scopes change the regions, so that the cycles include the cost of the scopes

    def region(self, name: str) -> Region:
        """The region in which the `jax.named_scope` of this name opens. Raises ValueError if it is not exactly one."""
        regions = [region for region, _ in walk(self.root) if name in region.names]
        if len(regions) != 1:
            names = sorted({name for region, _ in walk(self.root) for name in region.names})
            raise ValueError(f"{len(regions)} regions of {self.name} are called {name!r}; names are {names}")
        return regions[0]

    def unknown(self) -> list[Region]:
        """The regions whose executions the program does not determine, in its order."""
        return [region for region, _ in walk(self.root) if region.executions is None and region.trips is None]

    def cycles(
        self,
        executions: Mapping[str, int] | Sequence[int] = (),
        *,
        moved_bytes: int | None = None,
        otherwise: int | None = None,
    ) -> Cycles:
        """The cycles of one call.

        Args:
          executions: of the branches and loops for which the program does not determine them (`unknown`), summed over
            the call: {name: executions}, or all in order. For a loop, its iterations. The branch that Pallas puts
            around a loop, in case it has no iterations, may be left out: it counts as often as possible.
          moved_bytes: between HBM and VMEM, if `Kernel.moved_bytes` is None or the kernel itself moves some.
          otherwise: executions of each region that is not given.

        Raises:
          ValueError: executions or bytes are neither known nor given, or a name is not that of one region.
        """
        given = self._given(executions)
        compute, missing = self._compute(self.root, 1, given, otherwise)
        if missing:
            raise ValueError(f"{self.name}: how often are these executed? " + "; ".join(missing))
        moved = self.moved_bytes if moved_bytes is None else moved_bytes
        if moved is None:
            raise ValueError(f"{self.name}: the indices of its grid's blocks depend on data; give moved_bytes")
        return Cycles(compute, moved / HBM_BYTES_PER_CYCLE, (self.ends_bytes or 0) / HBM_BYTES_PER_CYCLE)

    def _given(self, executions) -> dict[int, int]:
        """{first bundle of a region: executions}"""
        if isinstance(executions, Mapping):
            return {self.region(name).first: count for name, count in executions.items()}
        unknown = self.unknown()
        if executions and len(executions) != len(unknown):
            labels = ", ".join(region.label for region in unknown)
            raise ValueError(f"{len(executions)} executions for the {len(unknown)} regions of {self.name}: {labels}")
        return {region.first: count for region, count in zip(unknown, executions or [], strict=False)}

    def _compute(self, region: Region, outer: int, given, otherwise) -> tuple[int, list[str]]:
        """(cycles of a region and those in it, the regions whose executions are missing)."""
        known = region.executions if region.first not in given else given[region.first]
        if known is None and region.trips is not None:
            known = outer * region.trips
        if known is None:
            inside = [given[inner.first] for inner, depth in walk(region) if depth and inner.first in given]
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
    """The kernels of a compiled function, or the compiler's reason to refuse it."""

    builder: str
    options: dict
    error: str  # empty if it compiled
    kernels: tuple[Kernel, ...]
    compile_s: float

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of this name (`pl.pallas_call(name=...)`), or the only one if no name is given.

        Raises:
          ValueError: the function did not compile, or it does not have exactly one such kernel.
        """
        if self.error:
            raise ValueError(f"{self.builder} {self.options}: {self.error}")
        kernels = [kernel for kernel in self.kernels if name in (None, kernel.name, re.sub(r"\.\d+$", "", kernel.name))]
        if len(kernels) != 1:
            raise ValueError(f"{self.builder} has the kernels {[k.name for k in self.kernels]}: give the name of one")
        return kernels[0]

    def region(self, name: str) -> Region:
        """`Kernel.region` of the only kernel."""
        return self.kernel().region(name)

    def cycles(self, executions: Mapping[str, int] | Sequence[int] = (), **options) -> Cycles:
        """`Kernel.cycles` of the only kernel."""
        return self.kernel().cycles(executions, **options)


# -- parsing the schedule

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
    """({unit: its slots}, [{unit: slots in use} for each bundle])."""
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
    """{region that is the body of a loop: its iterations} for loops with constant bounds."""
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
    pairs = re.findall(r"Length to end: (\d+), .*?\bvmatmul\..*\n +Length to end: (\d+), .*?\bvpop\.f32\.mrb", text)
    return min((int(matmul) - int(pop) for matmul, pop in pairs), default=None)


@dataclass
class Span:
    """A range of bundles that is a loop, a branch or the kernel, and the spans in it."""

    kind: str
    first: int
    last: int
    trips: int | None = None
    inside: list["Span"] = dataclasses.field(default_factory=list)

    def own(self) -> list[int]:
        taken = {i for span in self.inside for i in range(span.first, span.last + 1)}
        return [i for i in range(self.first, self.last + 1) if i not in taken]


def spans_of(bundles: Sequence[str], trips: Mapping[int, int]) -> Span:
    """The tree of loops and branches.

    A jump back closes a loop. A jump forward skips a branch, so that a `lax.cond` has two, side by side. A branch that
    uses no vector register and contains Pallas' DMA of the grid's blocks is a copy.
    """
    spans = []
    for i, bundle in enumerate(bundles):
        targets = [int(target) for target in BRANCH.findall(bundle)]
        if len(targets) != len(re.findall(r"\bsbr\b", bundle)):
            raise ValueError(f"bundle {i} branches to an unknown target: {bundle[:200]!r}")
        for target in targets:
            following = i + 1 + DELAY_SLOTS
            if target <= i:
                starts = {int(n) for n in re.findall(r"Start region (\d+)", bundles[target])}
                count = [trips[n] for n in starts & trips.keys()]
                spans.append(Span("loop", target, min(following, len(bundles)) - 1, count[0] if count else None))
            elif target > following:
                text = "".join(bundles[following:target])
                copies = "%v" not in text and ("iteration_bounds:" in text or "pipeline-emitter" in text)
                spans.append(Span("copy" if copies else "branch", following, target - 1))
    root = Span("kernel", 0, len(bundles) - 1)
    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
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
    """The cycles of a sequence of bundles that issue in order, one per cycle, and wait for results of the MXUs.

    An MXU has an unbounded queue: a matmul starts once those before it are done and, if it is the first with new
    weights, once these are pushed. Only a pop makes the core wait.

    Raises:
      ValueError: the cycles for the type of a matmul are unknown.
    """
    now, busy, pushed, ready = 0, {}, {}, {}
    for bundle in bundles:
        for register, mxu in POP.findall(bundle):
            now = max(now, ready.get((int(register), mxu), 0))
        for push in PUSH.finditer(bundle):
            cycles = PUSH_TRANSPOSED_CYCLES if ".xpose" in push[0] else PUSH_CYCLES
            pushed[push[1]] = max(pushed.get(push[1], 0), now) + cycles
        for modifiers, register, mxu in MATMUL.findall(bundle):
            dtype = next((part for part in modifiers.split(".") if part in MATMUL_CYCLES), None)
            if dtype is None:
                raise ValueError(f"vmatmul.{modifiers}: cycles are known for {', '.join(MATMUL_CYCLES)}")
            start = max(now, busy.get(mxu, 0), pushed.get(mxu, 0) if "vlgmr" in modifiers else 0)
            busy[mxu] = start + MATMUL_CYCLES[dtype]
            for entry in range(MATMUL_RESULTS[dtype]):
                ready[int(register) + entry, mxu] = start + latency
        now += 1
    return max(now, *busy.values()) if busy else now


def regions_of(dump: Mapping[str, str], grid: Sequence[int]) -> Region:
    """The tree of a kernel's regions from its dump, {key of PASSES: text}."""
    bundles = read_bundles(dump["schedule"])
    capacity, uses = read_slots(dump["slots"])
    if len(uses) != len(bundles):
        raise ValueError(f"{len(bundles)} bundles in the schedule, {len(uses)} in the table of slots")
    latency = result_latency(dump["paths"]) or RESULT_LATENCY

    def region(span: Span, executions: int | None) -> Region:
        own = span.own()
        names = tuple(dict.fromkeys(name for i in own for name in SCOPE.findall(bundles[i])))
        cycles = simulate([bundles[i] for i in own], latency)
        used = {unit: sum(uses[i][unit] for i in own) for unit in capacity}
        slots = {u: n if u in COUNTS else n / max(1, cycles) / capacity[u] for u, n in used.items()}
        children = tuple(region(*child) for child in _executions(span, executions, grid))
        trips = 1 if span.kind == "copy" else span.trips
        return Region(span.kind, names, span.first, span.last, cycles, slots, executions, trips, children)

    return region(spans_of(bundles, read_trips(dump["loops"])), 1)


def _executions(span: Span, executions: int | None, grid: Sequence[int]) -> list[tuple[Span, int | None]]:
    """(span, executions in a call, None if unknown) for each span in one that is executed `executions` times.

    The loop over the grid has more iterations than the grid has steps, because its pipeline starts and ends with DMA
    alone. The largest branch in that loop is the step, which those iterations skip. Copies are counted in every
    iteration, which is too often for a block that stays in VMEM.
    """
    steps = math.prod(grid)
    for inner in span.inside:
        if span.kind == "kernel" and grid and inner.trips in (steps, steps + 1, steps + 2):
            inner.kind = "grid"
    if span.kind == "grid" and span.trips > steps:
        branches = [inner for inner in span.inside if inner.kind == "branch"]
        if not branches:
            raise ValueError(f"{span.trips} iterations for the {steps} steps of a grid, and no branch for a step")
        max(branches, key=lambda inner: inner.last - inner.first).kind = "step"
    known = {"step": steps, "copy": executions}
    total = lambda inner: None if None in (executions, inner.trips) else executions * inner.trips
    return [(inner, known[inner.kind] if inner.kind in known else total(inner)) for inner in span.inside]


# -- compiling


def measure(
    builder: str, *, timeout_s: float = 600, flags: str = "", topology: str = "tpu7x:2x2x1", **options
) -> Report:
    """Compiles a function for TPU7x and counts the cycles of its kernels. About 4 to 10 s.

    libtpu reads the folder for its dump only once per process, so each compilation runs in a child process.

    Args:
      builder: "module:function", on the module path of this process, or "path/module.py:function". It returns
        (function, [jax.ShapeDtypeStruct, ...]).
      timeout_s: of the child process.
      flags: further flags of libtpu, added to those in LIBTPU_INIT_ARGS.
      topology: the slice for one device of which to compile.
      options: keywords for the builder, of types that JSON has.

    Returns:
      The report. `Report.error` is set if the builder or the compiler refuses, if libtpu is missing, or if this module
      cannot parse the dump.

    Raises:
      ValueError: the builder does not have that form.
    """
    _check(builder)
    begun, kernels = time.perf_counter(), ()
    with tempfile.TemporaryDirectory(prefix="bundles_") as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        dump += f" --xla_jf_dump_llo_pass_label_regex={'|'.join(PASSES.values())}"
        spec = dict(builder=builder, options=options, topology=topology, scopes=True)
        result = _run_child(spec, folder, f"{dump} {flags}", timeout_s)
        error = result["error"]
        try:
            kernels = () if error else tuple(_kernels(folder, result))
        except ValueError as unreadable:
            error = f"the compiler's dump cannot be parsed: {unreadable}"
    return Report(builder, options, error, kernels, time.perf_counter() - begun)


def profile(
    builder: str, *, timeout_s: float = 600, flags: str = "", topology: str = "tpu7x:2x2x1", **options
) -> dict[str, int]:
    """{kernel: cycles of a call} by the compiler's own simulation, DMA included, to check `Kernel.cycles`.

    The compiler chooses which branches it simulates. It needs 9 GB for a matmul of 16k and crashes on some kernels
    (libtpu 0.0.42.1: on all that were tried).

    Args: as for `measure`.

    Raises:
      ValueError: the builder does not have the form of `measure`, or the compiler gave no cycles.
    """
    _check(builder)
    with tempfile.TemporaryDirectory(prefix="bundles_") as folder:
        spec = dict(builder=builder, options=options, topology=topology, scopes=False)
        result = _run_child(spec, folder, f"--xla_jf_dump_static_llo_profile_to={folder} {flags}", timeout_s)
        texts = [path.read_text() for path in sorted(Path(folder).glob("*static_llo_profile.textproto"))]
    matches = [re.search(r'hlo_op_name: "(.*?)"\s+estimated_cycles: (\d+)', text) for text in texts]
    if result["error"] or not matches or not all(matches):
        raise ValueError(f"no simulation of {builder} by the compiler: {result['error'] or 'it wrote no cycles'}")
    return {match[1]: int(match[2]) for match in matches}


def _check(builder: str) -> None:
    if not re.fullmatch(r"[^:]+:\w+", builder):
        raise ValueError(f'builder is "module:function", like "dense:build", not {builder!r}')


def measure_many(jobs: Sequence[tuple[str, dict]], workers: int = 2, progress: bool = True, **common) -> list[Report]:
    """`measure` for many jobs, several at once, for a search of block sizes.

    Args:
      jobs: (builder, its options) for each.
      workers: child processes at a time; each takes 1 to 2 GB and a core.
      progress: print the number of finished jobs on stderr.
      common: further arguments of `measure`, for all jobs.

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


CHILD = "import sys; from compiled import bundles; bundles.child_main(*sys.argv[1:])"


def child_main(spec: str, path: str) -> None:
    """Writes the result of `_compile` to a file; runs in a process of its own, because the compiler may crash."""
    Path(path).write_text(json.dumps(_compile(json.loads(spec))))


def _run_child(spec: dict, folder: str, flags: str, timeout_s: float) -> dict:
    """The result of `_compile` from a child process, or {"error": ...} if the process died."""
    environment = (
        os.environ
        | compiler_flags.WITHOUT_TPU
        | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip(),
        }
    )
    result = Path(folder, "result.json")
    command = [sys.executable, "-c", CHILD, json.dumps(spec), str(result)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not compiled within {timeout_s:g} s"}
    if not result.exists():
        errors = [line for line in done.stderr.splitlines() if re.match(r"[EF]\d{4} |.*(Error|Check failed)", line)]
        return {"error": f"the compiler died, status {done.returncode}: {(errors or ['no message'])[0][:400]}"}
    return json.loads(result.read_text())


def _compile(spec: dict) -> dict:
    """Builds and compiles, once without named scopes and, if the kernel has any, again with them."""
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
        replicated = NamedSharding(mesh, PartitionSpec())
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), shapes)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas reads the kind of TPU from it
            traced = jax.jit(target).trace(*shapes)
            compiled = traced.lower().compile()
            program = compiled.as_text()
            if scoped := spec["scopes"] and _has_scopes(program):
                traced.lower().compile(compiler_options={"xla_enable_custom_call_region_trace": "true"})
    except Exception as error:  # reported, of whatever type
        return {"error": refusal(f"{type(error).__name__}: {error}")}
    return {"error": "", "program": program, "scoped": scoped, "grids": _grids(traced.jaxpr.jaxpr)}


def build(builder: str, options: dict) -> tuple:
    """(function, [jax.ShapeDtypeStruct, ...]) that a builder, as for `measure`, returns for these options."""
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
    """The reason in one line: bytes and limit if VMEM does not suffice, else the first line of the message."""
    parsed = liveness.refusal(text)
    if parsed["memory"] == "vmem":
        used, limit = round(parsed["used_bytes"]), round(parsed["limit_bytes"])
        return f"VMEM: {used:,} bytes are used and {limit:,} the limit; smaller blocks, or a larger vmem_limit_bytes"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "Mosaic" in line or "RESOURCE_EXHAUSTED" in line), lines[0])[:600]


def _grids(jaxpr) -> dict[str, dict]:
    """{name of a kernel: its grid, and the bytes that the grid moves} for all pallas_calls in a jaxpr."""
    import jax

    grids = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            name = getattr(equation.params.get("name_and_src_info"), "name", None) or equation.params.get("name")
            grids[name] = _moved(equation.params["grid_mapping"])
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                grids |= _grids(inner)
    return grids


def _moved(mapping) -> dict:
    """The grid, the bytes that it moves in a call (`moved`), and those of the first and last blocks (`ends`).

    A block is moved if its index differs from the previous step's. A block at the edge counts as far as it is in the
    array.
    """
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
            continue  # the kernel itself moves it
        kinds = {type(size).__name__ for size in block.block_shape}
        scalars = block.index_map_jaxpr.jaxpr.invars[len(grid) :]  # prefetched
        operands = [operand for equation in block.index_map_jaxpr.eqns for operand in equation.invars]
        if any(operand is scalar for operand in operands for scalar in scalars) or not kinds <= {
            "Blocked",
            "Squeezed",
            "NoneType",
            "int",
        }:
            return unknown  # the index depends on prefetched scalars, or does not count blocks
        sizes = [getattr(size, "block_size", size if isinstance(size, int) else 1) for size in block.block_shape]
        index_map = jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr)
        zeros = [np.int32(0)] * len(scalars)
        at_step = lambda *step, index_map=index_map, zeros=zeros: index_map(*step, *zeros)
        indices = [np.broadcast_to(at, steps.shape[1]) for at in (jax.vmap(at_step)(*steps) if grid else at_step())]
        dims = zip(indices, sizes, block.array_aval.shape, strict=True)
        num_bytes = math.prod(np.minimum(size, dim - at.astype(np.int64) * size) for at, size, dim in dims)
        num_bytes = num_bytes * block.array_aval.dtype.itemsize
        changed = np.any([np.diff(at, prepend=-1) != 0 for at in indices], axis=0)
        moved += int(num_bytes[changed].sum())
        ends += int(num_bytes[-1 if block.origin == "outputs" else 0])
    return {"grid": grid, "moved": moved, "ends": ends}


def _kernels(folder: str, result: dict) -> Iterator[Kernel]:
    """Yields the kernels in the dump of a child process: cycles from the first compilation, names from a second."""
    program = re.sub(r"kernel_metadata=\{\n.*?\n\}", "", result["program"], flags=re.DOTALL)  # it spans lines
    lines = re.findall(r'^.*custom_call_target="tpu_custom_call".*$', program, re.M)
    compiles = 1 + result["scoped"]
    for line in lines:
        name = re.search(r"%(\S+) =", line)[1]
        dumps = [_dumps(folder, name, label) for label in PASSES.values()]
        if not any(dumps) and len(lines) > 1:
            continue  # it equals another kernel, which was compiled in its place
        if {len(texts) for texts in dumps} != {compiles}:
            raise ValueError(f"{[len(texts) for texts in dumps]} dumps of {name} in {compiles} compiles")
        plain, *scoped = (dict(zip(PASSES, texts, strict=True)) for texts in zip(*dumps, strict=True))
        grid = result["grids"].get(re.sub(r"\.\d+$", "", name), {"grid": [], "moved": None, "ends": None})
        root = regions_of(plain, grid["grid"])
        if scoped:
            named = regions_of(scoped[0], grid["grid"])
            same = shape(root) == shape(named)
            root = renamed(root, named) if same else named
        memory = r'_memory_configs":\[{"memory_space":"1","offset":"\d+","size":"(\d+)"'
        used, limit = re.search(f'"used_scoped{memory}', line), re.search(f'"scoped{memory}', line)
        if not (used and limit):
            raise ValueError(f"the program does not state the VMEM limit and use of {name}")
        with_scopes = bool(scoped) and not same
        vmem = int(used[1]), int(limit[1])
        yield Kernel(name, root, *vmem, tuple(grid["grid"]), grid["moved"], grid["ends"], with_scopes)


def shape(region: Region) -> tuple:
    """The shape of a tree of regions: the kind and the executions of each, nested."""
    return region.kind, region.executions, tuple(shape(child) for child in region.children)


def renamed(region: Region, other: Region) -> Region:
    """A tree of regions with the names of another tree of the same shape."""
    pairs = zip(region.children, other.children, strict=True)
    return dataclasses.replace(region, names=other.names, children=tuple(renamed(*pair) for pair in pairs))


def _dumps(folder: str, name: str, label: str) -> list[str]:
    """The texts that a pass wrote for a kernel, one for each compilation."""
    file = re.compile(rf"(\d+)-{re.escape(name)}-\d+-{re.escape(label)}\.txt")
    return [path.read_text() for path in sorted(Path(folder).iterdir()) if file.fullmatch(path.name)]


# -- command line


def describe(report: Report) -> str:
    """The report as text."""
    options = " ".join(f"{name}={value}" for name, value in report.options.items())
    lines = [f"{report.builder} {options}, TPU7x, in {report.compile_s:.0f} s"]
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
            lines += ["  with the cost of named scopes: without them the regions differ"]
        if kernel.unknown():
            lines += ["  the call: give the executions marked ? to Kernel.cycles"]
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
    parser.add_argument("builder", metavar="MODULE:BUILDER", help="returns (function, [jax.ShapeDtypeStruct, ...])")
    parser.add_argument(
        "options", nargs="*", type=_option, metavar="NAME=VALUE", help="keywords for it, as JSON or as text"
    )
    parser.add_argument("--flags", default="", help="further flags of libtpu, as in LIBTPU_INIT_ARGS")
    parser.add_argument("--profile", action="store_true", help="also the compiler's own simulation of a call (slow)")
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
