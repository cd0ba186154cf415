"""Compiles the train step for a TPU slice without having one, and reports its memory, schedule and time.

    python aot.py --topology=tpu7x:2x2x1 --preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --seq_len=2048
    python aot.py --topology=tpu7x:4x4x4 --preset=llama3.1-70b --batch=128 --xla_flags=recommended --json
    python aot.py --topology=tpu7x:2x2x1 --preset=llama3.1-8b --batch=8 --compare=prefetch
    python aot.py results [REGEX]           stored results of compiled steps (compiled/results.py)
    python aot.py schedule FILE.hlo         time of a compiled program, by operation (compiled/schedule.py)
    python aot.py timeline DIR              time of a profiled run, by operation (compiled/timeline.py)
    python aot.py bundles MODULE:BUILDER    cycles of a kernel (compiled/bundles.py)

**Idea.** libtpu, the compiler and runtime of TPUs, compiles for any slice on any x86 machine (`pip install -e
".[tpu]"`). This script compiles train.py's own step, `train.make_train_step`, with the flags of train.py, for the
devices of the topology. No array is allocated: a model that fills a pod compiles on a laptop. The report has

    memory      bytes of HBM and of host memory that the program needs; the largest buffers that are live at the peak,
                by operation and source line (compiled/liveness.py). For a program that does not fit also the excess,
                and flags with which the planner predicts that it fits; the exit status is then 3
    schedule    every collective: count, size, engine, and the computation that hides it. The time of the step:
                compiled/schedule.py walks the program in order of execution with the compiler's estimates of cycles,
                and with the cycles of kernels that compiled/bundles.py counts
    prediction  for comparison, the prediction of roofline.py for the same step

`--trace=step.json` writes the walked schedule as a picture for ui.perfetto.dev (compiled/trace.py), `--report=DIR` the
report as a page of HTML (report.py).

Memory, order and engines are compiled. The seconds are predicted from the compiled program; no TPU has run it.

**Traps** that this script handles. A slice of whole cubes wraps around; the compiler needs the option `wrap` for that.
Devices must be in the order of their ids, or collectives over a slice use a third of the links or become other
collectives (sharding.py). A compiled program cannot be read back from JAX's compilation cache, so its report and text
are cached here, under the program, its devices in order, the flags and the versions. Two processes block each other on
libtpu's lock unless several are allowed.
"""

import argparse
import dataclasses
import gzip
import hashlib
import importlib.util
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import command
import compiler_flags
import flags as flags_lib
import outputs
import placement
import report as pages
import rules
from compiled import bundles, hlo, liveness, operations, results, schedule, timeline, trace
from compiled.trace import mesh_axes
from config import Config
from hardware import CHIPS, Chip, by, parse_topology, si
from predicted import page, planner, recompute
from predicted.step import GiB, Prediction, predict
from predicted.workload import run_of

if TYPE_CHECKING:
    import jax

DOES_NOT_FIT = 3  # exit status
MARGIN = 1.1  # a step is refused without compilation if its predicted memory exceeds the limit by this factor


class DoesNotFitError(ValueError):
    """The compiler refused the program; `details` has the memory used, the limit, and the largest buffers."""

    def __init__(self, text: str, peak: liveness.Peak | None = None):
        self.details = liveness.refusal(text) | (peak.as_dict() if peak else {})
        super().__init__(text)


# -- compiling


# Settings of JAX that change what is compiled, with their defaults. A version of JAX has some of them.
EFFORT = {
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_effort": 0.0,
    "jax_optimization_level": "UNKNOWN",
    "jax_memory_fitting_level": "O2",
}


class Lowered(NamedTuple):
    """A step that is lowered but not compiled."""

    program: "jax.stages.Lowered"
    devices: list  # of the mesh, in its order, which the text of the program does not contain

    @property
    def chips(self) -> list[tuple[int, ...]]:
        """(slice, x, y, z) of the chip of each device, in the program's order."""
        return [(getattr(d, "slice_index", 0), *d.coords) for d in self.devices]

    def key(self, flags: dict[str, str]) -> str:
        """The cache key: the same for steps that compile to the same program."""
        import jax
        import libtpu

        places = [[d.device_kind, *chip, d.core_on_chip] for chip, d in zip(self.chips, self.devices, strict=True)]
        content = [self.program.as_text(), json.dumps(places), json.dumps(flags, sort_keys=True)]
        content += [jax.__version__, libtpu.__version__]
        values = {name: getattr(jax.config, name, default) for name, default in EFFORT.items()}
        content += [f"{name}={value}" for name, value in values.items() if value != EFFORT[name]]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


def devices_of(topology: str, num_slices: int = 1) -> list:
    """The devices of a topology, for which programs are compiled. Raises ValueError if there is no such slice."""
    import jax
    from jax.experimental import topologies

    chip, chips = parse_topology(topology)
    real = CHIPS[chip.name.partition("+")[0]]  # the compiler makes the same program for each power state
    if dataclasses.replace(chip, name=real.name, p_state=real.p_state) != real:
        raise ValueError(f"{topology}: there is no compiler for a chip that is not there; roofline.py predicts it")
    options = {"wrap": tuple(axis.wrap for axis in chip.axes(chips))} if chip.torus_axes == 3 else {}
    options |= {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        name = f"{real.name}:{by(chips)}"
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        if "opology" not in str(error):
            raise
        raise ValueError(
            f"topology={topology}: libtpu has no such slice ({error}); a slice has whole hosts of {by(chip.host)} "
            "chips each; roofline.py predicts part of a host"
        ) from None


def lower_step(config: Config, topology: str, num_slices: int = 1) -> Lowered:
    """The step of train.py, lowered for the devices of a topology; nothing is compiled or allocated.

    Raises:
      ValueError: there is no such slice, the mesh is for another number of devices, or it cannot shard the model or the
        batch.
    """
    import sharding
    import train

    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), devices_of(topology, num_slices), config.core_axis)
    config = rules.settled(config, dict(mesh.shape))
    rules.check(config, dict(mesh.shape))
    return Lowered(train.lower_step(config, mesh), list(mesh.devices.flat))


def compile_step(lowered: Lowered, flags: dict[str, str], cache: str, dump: Path | None = None) -> tuple[dict, str]:
    """(memory that the compiled program needs, its HLO in order of execution); from `cache` if compiled before.

    Args:
      dump: the folder of operations.dumped; then the memory also has the `cycles` of operations.count.

    Raises:
      DoesNotFitError: the compiler refused the program for lack of memory.
    """
    import jax

    entry = Path(cache) / "aot" / lowered.key(flags) if cache else None
    if entry and (entry / "found.json").exists():
        memory = json.loads((entry / "found.json").read_text())
        if not dump:  # the entry may have them from an earlier --bundles
            memory.pop("cycles", None)
        if not dump or "cycles" in memory:
            return memory | {"cached": True}, gzip.decompress((entry / "program.hlo.gz").read_bytes()).decode()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder} | compiler_flags.compiler_options(flags)
        try:
            executable = lowered.program.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" in str(error):
                raise ValueError(f"--xla_flags: libtpu has no such flag: {error}") from None
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFitError(str(error), liveness.read_refused(options["xla_dump_to"], str(error))) from None
        compile_s = time.perf_counter() - begun
        peak = liveness.read(options["xla_dump_to"])
    analysis = executable.memory_analysis()
    memory = {
        "compile_s": compile_s,
        "peak_hbm_bytes": peak.total_bytes,  # decides whether the program fits
        "stated_peak_bytes": analysis.peak_memory_in_bytes,  # of live buffers, on the host too
        "argument_bytes": analysis.argument_size_in_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "host_bytes": analysis.host_temp_size_in_bytes + analysis.host_argument_size_in_bytes,
        **peak.as_dict(),
        "live_over_step": peak.over_step,
        "cached": False,
    }
    program = executable.as_text()
    if dump:
        memory["cycles"] = operations.count(dump, hlo.parse(program))
    if entry:
        entry.mkdir(parents=True, exist_ok=True)
        with outputs.replacing(entry / "program.hlo.gz", "wb") as file:
            file.write(gzip.compress(program.encode(), 1))
        with outputs.replacing(entry / "found.json") as file:  # last: if it exists, so does the program
            json.dump(memory, file)
    return memory, program


def kernels_of(lowered: Lowered) -> list[dict[str, str]]:
    """The metadata (tuned.metadata) of the project's own kernels in a lowered program."""
    texts = re.findall(r'kernel_metadata = "([^"]*tuned_key[^"]*)"', lowered.program.as_text())
    plain = (re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), text) for text in texts)
    return [json.loads(text) for text in dict.fromkeys(plain)]


def kernel_cycles(calls: Sequence[dict[str, str]], filled: float, cache: str, waits: bool = True) -> dict[str, float]:
    """{tuned_key, blocks and calls, a line each: cycles}. Compiles each kernel alone, two at a time.

    Args:
      calls: the metadata of the kernels.
      filled, waits: as for kernels.cycles_of.
    """
    import jax
    import libtpu

    import kernels

    version = kernels.version()

    def cycles_of(call):
        filled_of_gmm = filled if "gmm" in call["tuned_key"] else None
        content = json.dumps(
            [call, filled_of_gmm, waits, version, jax.__version__, libtpu.__version__],
            sort_keys=True,
        )
        number = hashlib.sha256(content.encode()).hexdigest()
        entry = Path(cache) / "aot" / f"kernel-{number}.json" if cache else None
        if entry and entry.exists():
            return json.loads(entry.read_text())["cycles"]
        cycles = kernels.cycles_of(call, filled, waits)
        if entry:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with outputs.replacing(entry) as file:
                json.dump(call | {"cycles": cycles}, file)
        return cycles

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(map(_call_key, calls), pool.map(cycles_of, calls), strict=True))


def vmem_of(calls: Sequence[dict[str, str]]) -> list[dict]:
    """The kernels of a program with their blocks and the VMEM that these need by arithmetic, the largest first."""
    import kernels

    rows = [
        {"kernel": call["tuned_key"], "blocks": call["blocks"], "vmem_bytes": kernels.vmem_of(call)} for call in calls
    ]
    return sorted(rows, key=lambda row: -row["vmem_bytes"])


def _call_key(metadata: dict[str, str]) -> str:
    return "\n".join(metadata[name] for name in ("tuned_key", "blocks", "calls"))


def compile_with_kernels(
    lowered: Lowered,
    calls: Sequence[dict[str, str]],
    flags: dict[str, str],
    cache: str,
    dump: Path | None,
    **options,
) -> tuple[dict, str, dict[str, float]]:
    """(memory, HLO) of compile_step and the kernels' cycles of kernel_cycles, computed beside each other.

    Args:
      options: those of kernel_cycles.

    Raises:
      DoesNotFitError: as compile_step, with the kernels' `vmem_of` where VMEM is short; the cycles are cached first.
    """
    with ThreadPoolExecutor(1) as pool:
        cycles = pool.submit(kernel_cycles, calls, cache=cache, **options)
        try:
            memory, program = compile_step(lowered, flags, cache, dump)
        except DoesNotFitError as error:
            error.details |= {"kernels": vmem_of(calls)} if error.details["memory"] == "vmem" else {}
            raise
    return memory, program, cycles.result()


def cycles_by_name(program: hlo.Program, cycles: dict[str, float]) -> dict[str, float]:
    """{pattern of a name: cycles} for the kernels in a compiled program, for schedule.walk."""
    patterns = {}
    for computation in program.computations.values():
        for instruction in computation.values():
            metadata = dict(re.findall(r'"(\w+)":"([^"]*)"', instruction.attributes.get("frontend_attributes", "")))
            if "tuned_key" in metadata:
                patterns[f"^{re.escape(instruction.name)}$"] = cycles[_call_key(metadata)]
    return patterns


# -- reporting


def predicted(config: Config, args: argparse.Namespace) -> Prediction:
    return predict(run_of(config, *parse_topology(args.topology), num_slices=args.num_slices))


def report(config: Config, args: argparse.Namespace, flags: dict[str, str], dump: Path | None = None) -> dict:
    """Compiles and predicts a step; returns the report, in seconds and bytes. `dump` is that of compile_step."""
    chip, chips = parse_topology(args.topology)
    kernels = schedule.parse_pairs(args.kernel, "--kernel")
    prediction = predicted(config, args)
    lowered = lower_step(config, args.topology, args.num_slices)
    calls = kernels_of(lowered)
    options = dict(filled=prediction.run.experts_filled, waits=not args.no_waits)
    memory, program, cycles = compile_with_kernels(lowered, calls, flags, config.compilation_cache, dump, **options)
    if args.hlo_out:
        with outputs.replacing(args.hlo_out) as file:
            file.write(program)
    over_step = memory.pop("live_over_step", ())  # programs that were cached before it was stored lack it
    counted = memory.pop("cycles", {})
    program = hlo.parse(program)
    cycles = kernels | cycles_by_name(program, cycles)
    trips = {"extra_rounds": 0}  # moe.py: the rows that are expected fit into the buffers
    events = [] if args.trace or args.report else None
    options = dict(rates=schedule.rates_of(chip), kernels=cycles, trips=trips, chips=lowered.chips)
    breakdown = schedule.walk(program, **options, events=events, counted=counted)
    estimated = schedule.walk(program, **options) if counted else breakdown
    ideal_s = at_peak(program, breakdown, chip)
    num_chips, flops, tokens = prediction.run.num_chips, prediction.flops_per_step, config.batch * config.seq_len
    result = {
        "preset": config.preset,
        "topology": f"{chip.name}:{by(chips)}",
        "num_slices": args.num_slices,
        "num_chips": num_chips,
        "mesh": {axis: size for axis, size in prediction.run.sizes.items() if size > 1},
        "remat": config.remat,
        "xla_flags": flags,
        "fits": True,
        **memory,
        "kernels": vmem_of(calls),
        "hbm_limit_bytes": prediction.run.hbm_limit,
        "host_limit_bytes": prediction.run.host_limit if math.isfinite(prediction.run.host_limit) else None,
        "step_s": breakdown.seconds,
        "counted": breakdown.counted if counted else 0.0,
        "estimated_step_s": estimated.seconds,
        "mfu": flops / breakdown.seconds / num_chips / chip.bf16_flops_per_s,
        "flops_per_step": flops,
        "tokens_per_s_per_chip": tokens / breakdown.seconds / num_chips,
        "exposed_comm_s": breakdown.exposed_s,
        "by_category_s": breakdown.categories,
        "estimated_by_category_s": estimated.categories,
        "matmul_of_peak": sum(ideal_s.values()) / breakdown.categories.get("matmul", math.inf),
        "collectives": collectives(breakdown, prediction.run.sizes),
        "top_ops": [
            dataclasses.asdict(op) | {"of_peak": ideal_s[op.name] / op.seconds if op.name in ideal_s else None}
            for op in breakdown.ops[:10]
        ],
        "roofline": {"step_s": prediction.step_s, "hbm_bytes": prediction.hbm_bytes, "bound": prediction.bound},
    }
    if events:
        draw(result, prediction, trace.spans_of(events, prediction.run.sizes), over_step, args)
    return result


def draw(
    result: dict, prediction: Prediction, spans: list[trace.Span], over_step: list, args: argparse.Namespace
) -> None:
    """Writes the trace and the page of a compiled step, as far as the flags ask for them."""
    if args.trace:
        about = {name: result[name] for name in ("preset", "topology", "step_s", "by_category_s")}
        trace.write(args.trace, spans, about)
    if args.report:
        data = {"report": result, **page.data_of(prediction)}
        title = f"{result['preset']} on {result['topology']}: a training step, compiled without a TPU"
        pages.write(args.report, title, pages.of_compiled(data, spans, over_step), data)


def at_peak(program: hlo.Program, breakdown: schedule.Breakdown, chip: Chip) -> dict[str, float]:
    """{operation: seconds of its matmuls at the peak of the matrix units}; kernels are left out."""
    by_name = {name: (inside, inner) for inside in program.computations.values() for name, inner in inside.items()}
    ideal_s = {}
    for op in breakdown.ops:
        if op.name in by_name and (flops := hlo.matmul_flops(program, *by_name[op.name])):
            peaks = {bits: chip.flops_per_s("fp8" if bits == 8 else "bf16") / chip.devices for bits in flops}
            ideal_s[op.name] = op.count * sum(flops[bits] / peaks[bits] for bits in flops)
    return ideal_s


def collectives(breakdown: schedule.Breakdown, sizes: dict[str, int]) -> list[dict]:
    """A row for each collective of the program, the most exposed first."""
    rows = []
    for message in breakdown.collectives:
        rows.append(
            {
                "kind": message.kind,
                "mesh_axes": mesh_axes(message.groups, sizes),
                "bytes": message.nbytes,
                "count": message.count,
                "engine": message.engine,
                "synchronous": message.synchronous,
                "op": message.op_name or message.name,
                "source": message.source,
                "started_after": message.after,
                "done_before": message.before,
                "computed_between_s": message.computed_s,
                "seconds": message.seconds,
                "hidden_s": message.hidden_s,
                "exposed_s": message.exposed_s,
            }
        )
    return sorted(rows, key=lambda row: (-row["exposed_s"], -row["seconds"]))


def describe(result: dict) -> str:
    """A report as text."""
    slices = f"{result['num_slices']} slices of " if result["num_slices"] > 1 else ""
    mesh = ", ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    by_hand = compiler_flags.unknown(result["xla_flags"])
    compiled = "read from the cache, it took" if result["cached"] else "in"
    flags = ", ".join(f"{name}={value}" for name, value in result["xla_flags"].items()) or "none but the defaults"
    flags += f" ({', '.join(by_hand)}: not in compiler_flags.py)" if by_hand else ""
    step_s, roofline = result["step_s"], result["roofline"]
    cycles = "of XLA's operations by its estimates (--bundles counts them)"
    if result["counted"]:
        estimated = si(result["estimated_step_s"], "s")
        cycles = (
            f"{result['counted']:.1%} of the time of XLA's operations counted in bundles; by its estimates {estimated}"
        )
    gib = lambda name: f"{result[name] / GiB:.2f}"
    host_limit = f" of {gib('host_limit_bytes')}" if result["host_bytes"] and result["host_limit_bytes"] else ""
    lines = [
        f"{result['preset']} on {slices}{result['topology']}, {result['num_chips']:,} chips, mesh {mesh}, "
        f"remat {result['remat']}",
        f"  compiled    {compiled} {result['compile_s']:.0f} s; flags {flags}",
        f"  memory      {gib('peak_hbm_bytes')} of {gib('hbm_limit_bytes')} GiB a device, arguments "
        f"{gib('argument_bytes')} of it; on its host {gib('host_bytes')}{host_limit} (compiled; by roofline.py "
        f"{roofline['hbm_bytes'] / GiB:.2f})",
        f"  step        {si(step_s, 's')}, MFU {result['mfu']:.1%}, {result['tokens_per_s_per_chip']:,.0f} tokens/s a "
        "chip (predicted from the compiled schedule)",
        f"  cycles      {cycles}",
        f"  roofline    {si(roofline['step_s'], 's')}, bound by {roofline['bound']} (predicted)",
        f"  exposed     {si(result['exposed_comm_s'], 's')} of communication, {result['exposed_comm_s'] / step_s:.1%}",
        "",
        *liveness.describe(result, result["peak_hbm_bytes"]),
        "",
        f"  {'category':24}{'time':>12}{'of the step':>13}",
    ]
    for name, seconds in result["by_category_s"].items():
        peak = f"   at {result['matmul_of_peak']:.1%} of the peak" if name == "matmul" else ""
        lines.append(f"  {name:24}{si(seconds, 's'):>12}{seconds / step_s:13.1%}{peak}")
    lines += [
        "",
        f"  {'collective':19}{'over':15}{'engine':11}{'count':>6}{'bytes':>11}{'time':>13}{'exposed':>13}  operation",
    ]
    for row in result["collectives"][:16]:
        axes = "slices" if row["engine"] == "network" else ",".join(row["mesh_axes"]) or "all"
        numbers = (
            f"{row['count']:6}{si(row['bytes'], 'B'):>11}{si(row['seconds'], 's'):>13}{si(row['exposed_s'], 's'):>13}"
        )
        lines.append(f"  {row['kind']:19}{axes:15}{row['engine']:11}{numbers}  {row['op'][-33:]}")
    if more := result["collectives"][16:]:
        lines.append(
            f"  and {len(more)} more, {si(sum(row['exposed_s'] for row in more), 's')} of them exposed (--json)"
        )
    lines += ["", f"  {'longest operations':24}{'time':>12}{'count':>7}{'of peak':>9}  name"]
    for op in result["top_ops"]:
        name = (op["op_name"] or op["name"])[-72:]
        peak = f"{op['of_peak']:9.1%}" if op["of_peak"] else " " * 9
        lines.append(f"  {op['category'][:22]:24}{si(op['seconds'], 's'):>12}{op['count']:7}{peak}  {name}")
    return "\n".join(lines)


def compare(config: Config, args: argparse.Namespace, flags: dict[str, str], dump: Path | None = None) -> list[dict]:
    """The reports for two settings of prefetch, sparsecore (offload of collectives), or vmem (of an operation)."""
    offload = "xla_tpu_enable_sparse_core_collective_offload_"
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    settings = {
        "prefetch": [(f"prefetch={on}", dataclasses.replace(config, prefetch=on), flags) for on in (True, False)],
        "sparsecore": [
            (f"sparsecore={on}", config, flags | {f"{offload}{kind}": on for kind in kinds}) for on in ("true", "false")
        ],
        "vmem": [
            (f"vmem={kib} KiB", config, flags | {"xla_tpu_scoped_vmem_limit_kib": kib}) for kib in ("32768", "61440")
        ],
    }
    return [
        {"setting": name} | report(variant, args, options, dump) for name, variant, options in settings[args.compare]
    ]


COMMANDS = {"results": results.main, "schedule": schedule.main, "timeline": timeline.main, "bundles": bundles.main}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    parser = command.parser(__file__, usage="%(prog)s [--flag=value ...]\n       %(prog)s COMMAND ...")
    machine = parser.add_argument_group("compiler")
    machine.add_argument("--compile_anyway", action="store_true", help="compile even if predicted not to fit")
    machine.add_argument("--compare", choices=("prefetch", "sparsecore", "vmem"), help="compile with it and without")
    about = "cycles of kernels that are not the project's own, or that replace their count; may be given several times"
    machine.add_argument("--kernel", action="append", default=[], metavar="REGEX=CYCLES", help=about)
    about = (
        "count the cycles of XLA's operations in their bundles rather than take its estimates; compiling takes 2 to "
    )
    about += "4 times as long (compiled/operations.py)"
    machine.add_argument("--bundles", action="store_true", help=about)
    about = "count the cycles of grouped matmuls without their waits for memory, as stored results did before these"
    machine.add_argument("--no_waits", action="store_true", help=about)
    machine.add_argument(
        "--hlo_out", type=command.path, metavar="FILE", help="write the compiled program, in order of execution, here"
    )
    about = "draw the schedule for ui.perfetto.dev, in this file of JSON (compiled/trace.py)"
    machine.add_argument("--trace", type=command.path, metavar="FILE", help=about)
    about = "draw the report as a page of HTML, in this folder (report.py)"
    machine.add_argument("--report", type=command.path, metavar="DIR", help=about)
    about = "store the result in compiled/results_tpu7x.json, which `aot.py results` shows"
    machine.add_argument("--keep", action="store_true", help=about)
    machine.add_argument("--json", action="store_true", help="a JSON object, in seconds and bytes")
    flags_lib.add_run_flags(parser, "tpu7x:2x2x1")
    args = command.arguments(parser, argv)
    try:
        config = flags_lib.from_args(args)
        args.topology, args.num_slices = flags_lib.slice_of(args)
        config = recompute.resolve(config, *parse_topology(args.topology), num_slices=args.num_slices)
        check_outputs(config, args)
        flags = compiler_flags.for_run(config)
        if not args.compile_anyway and (refusal := predicted_refusal(config, args)):
            return refuse(config, args, refusal)
        if not importlib.util.find_spec("libtpu"):
            raise ValueError('compiling for TPU needs libtpu: pip install -e ".[tpu]"')
        compiler_flags.without_tpu()
        compiler_flags.set_init_args(flags)
        with operations.dumped() if args.bundles else nullcontext() as dump:
            result = (compare if args.compare else report)(config, args, flags, dump)
    except DoesNotFitError as error:
        status = refuse(config, args, error.details)
        result = {"fits": False, **error.details}
    else:
        status = print_report(result, args)
    if args.keep:
        try:
            results.save(predicted(config, args), result)
        except (ValueError, OSError) as error:
            raise ValueError(f"the result is not stored: {error}") from None
    return status


def check_outputs(config: Config, args: argparse.Namespace) -> None:
    """Raises ValueError, before the compilation, for outputs that cannot be written or that do not go together."""
    if args.keep and (args.compare or args.kernel or args.no_waits or args.bundles):
        without = "without --compare, --kernel, --no_waits and --bundles"
        raise ValueError(f"--keep is for one program, timed as all stored ones are: {without}")
    if (args.trace or args.report) and args.compare:
        raise ValueError("--trace and --report draw one program: without --compare")
    scales = config.fp8_scales if config.fp8 == "static" else ""
    written = {"--hlo_out": args.hlo_out, "--trace": args.trace}
    outputs.check_apart(written, {"--fp8_scales": scales})
    for flag, path in written.items():
        if path:
            outputs.check_writable(f"{flag}={path}", path)
    if args.report:
        pages.check("--report", args.report, written)


def print_report(result: dict | list[dict], args: argparse.Namespace) -> int:
    """Prints a report, or the two reports of --compare. Returns the exit status."""
    if args.json:
        print(json.dumps(result))
    elif args.compare:
        print("\n\n".join(f"{each['setting']}: {describe(each)}" for each in result))
    else:
        print(describe(result))
    return 0


# -- a step that does not fit


def predicted_refusal(config: Config, args: argparse.Namespace) -> dict | None:
    """A refusal in the format of the compiler's, if the predicted memory exceeds the limit by more than its error."""
    prediction = predicted(config, args)
    used, limit, parts = prediction.hbm_bytes, prediction.run.hbm_limit, prediction.memory
    memory = "hbm" if used > MARGIN * limit else "host" if "host" in prediction.shortfall() else None
    if not memory:
        return None
    if memory == "host":  # no margin: compiled programs have needed exactly what is predicted (tests/test_remat.py)
        used, limit, parts = prediction.host_bytes, prediction.run.host_limit, {"offloaded": prediction.host_bytes}
    largest = sorted(parts.items(), key=lambda item: -item[1])
    rows = [{"name": name, "bytes": nbytes} for name, nbytes in largest]
    return {
        "kind": "predicted",
        "memory": memory,
        "used_bytes": used,
        "limit_bytes": limit,
        "over_bytes": used - limit,
        "parts": rows,
        "largest_buffers": [],
    }


def way_out(config: Config, args: argparse.Namespace, refusal: dict) -> dict:
    """The flags that the planner would change so that the step fits, and the prediction with them.

    If the compiler needs more memory for the refused step than predicted, other steps are assumed to need more by the
    same factor. So the planner plans for a chip with memory smaller by that factor.
    """
    if refusal["memory"] == "vmem":
        words = "--xla_flags=xla_tpu_scoped_vmem_limit_kib=61440, or smaller blocks of the kernel that it names"
        return {"flags": [], "words": words}
    chip, chips = parse_topology(args.topology)
    refused = predicted(config, args)
    factor = max(refusal["used_bytes"] / refused.hbm_bytes, 1.0) if refusal["memory"] == "hbm" else 1.0
    smaller = dataclasses.replace(chip, hbm_bytes=chip.hbm_bytes / factor)
    try:
        best = planner.plan(config, smaller, chips, num_slices=args.num_slices).best
    except ValueError as error:
        needs = (
            f"; the compiler needs {factor:.3g} times the prediction for this step, which is assumed for all"
            if factor > 1
            else ""
        )
        return {"flags": [], "words": f"a smaller --batch or a larger --topology{needs}: {error}"}
    words = f"{si(best.step_s, 's')} a step, {factor * best.hbm_bytes / GiB:.2f} GiB a device (predicted)"
    flags = planner.changed_flags(config, refused.run.sizes, best)
    return {"flags": flags, "words": words, "step_s": best.step_s, "hbm_bytes": factor * best.hbm_bytes}


def refuse(config: Config, args: argparse.Namespace, refusal: dict) -> int:
    """Prints the excess memory, what fills the memory, and flags that would fit. Returns the exit status."""
    proposal = way_out(config, args, refusal)
    if args.json:
        print(json.dumps({"fits": False, **refusal, "way_out": proposal}))
        return DOES_NOT_FIT
    if refusal["memory"] == "unknown":
        print(f"does not fit: {refusal['message']}")
    else:
        used, limit, over = (refusal[name] / GiB for name in ("used_bytes", "limit_bytes", "over_bytes"))
        kind = refusal.get("kind", "compiled")
        print(f"does not fit: {used:.2f} of {limit:.2f} GiB of {refusal['memory']}, {over:.2f} GiB over ({kind})")
    if parts := refusal.get("parts"):
        print("  of it       " + ", ".join(f"{part['name']} {part['bytes'] / GiB:.2f}" for part in parts) + " GiB")
        limit = "allows a TPU7x device 128 GiB of it" if refusal["memory"] == "host" else "decides"
        print(f"  not compiled; --compile_anyway asks the compiler, which {limit}")
    for row in refusal.get("kernels", ()):
        name = row["kernel"].partition(" ")[0]
        print(f"  {row['vmem_bytes'] / 2**20:7.2f} MiB of VMEM by arithmetic: {name} with {row['blocks']}")
    if refusal["largest_buffers"]:
        print(*liveness.describe(refusal, refusal["used_bytes"]), sep="\n")
    print(f"  way out: {' '.join(proposal['flags'])}{': ' if proposal['flags'] else ''}{proposal['words']}")
    return DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(command.run(main))
