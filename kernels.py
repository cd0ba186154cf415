"""The Pallas kernels of the project, and a search for their block sizes that needs no TPU.

    python kernels.py                                            the block sizes that were found, by kernel and shape
    python kernels.py tune attention --T=8192 --head_dim=128
    python kernels.py tune attention --T=8192 --head_dim=256 --window=1024
    python kernels.py tune gmm --M=8192 --K=4096 --N=1536 --E=8

**Idea.** XLA compiles one operation at a time and writes its result to HBM, or to VMEM if it fits. The scores of
attention are an intermediate result that fits nowhere. A mixture of experts has matmuls whose sizes the router decides
at run time. In Pallas the loops are explicit: which blocks are in VMEM at what time, and which operations overlap. Read
the modules in this order:

    dense.py             a matmul: grid, blocks, accumulator, and the distance from the limit of the matrix units
    groups.py            rows in groups as tiles, in a list that is computed at run time
    gmm.py               each group's rows times a matrix of its own (and tgmm, the gradient of the matrices)
    flash.py             attention, forward: a running softmax, tiles in a list, software pipelining
    flash_backward.py    its gradient: five matmuls a tile, and no partial sum in HBM
    remote_dma.py        collectives that write into the memory of other chips
    compiled/bundles.py  counts the cycles of a kernel in the program that the compiler made of it
    compiled/grid.py     the time of these cycles, with the waits for memory

**Block size tuning.** Block sizes determine how often an operand is read from HBM, how much VMEM is used, and how well
the compiler can fill the instructions. The last has no formula. So a rule gives sizes that fit, and a search looks for
better ones. Candidates that fit into VMEM by arithmetic are compiled, several at a time, and ranked by their time. For
grouped matmuls this is their cycles and their waits for memory, for attention the longer of their cycles and the time
of their HBM traffic. On a TPU they are run and timed instead. tuned.py stores the best.

**On TPU7x** XLA sees a kernel as one operation. To schedule a gather or a copy to the host beside it, XLA needs its
duration, from `cost_estimate`; the kernels of attention and of gmm.py set it. Without an estimate XLA assumes that a
kernel takes no time, and hides a message behind other work or not at all. XLA takes the longest of flops / 996 T/s (the
peak of bfloat16 at its 1.9 GHz), bytes / 3.7 TB/s and transcendentals / 1.9 T/s (libtpu 0.0.50.1, by its
`compiled.cost_analysis()`). So these kernels state the bfloat16 flops that would take as long: half of the flops in
FP8, and as many as if heads and experts' matrices were padded to the 256 columns of a matrix unit. Rows of experts are
counted up to the buffer size, which with experts on several devices is about twice the rows that arrive
(`--buffer_factor`). The cycles passed to compiled/schedule.py are for the rows that arrive.

**Source**: tune-jax (https://github.com/rdyro/tune-jax) and tokamax's autotuner search in this way on a TPU; the latter
has a cache by shape and chip (tokamax/experimental/utils/tuning/tpu/README.md in https://github.com/openxla/tokamax).
"""

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import command
import compiler_flags
import flash
import flash_backward
import groups
import tuned
from compiled import builders, bundles, grid, schedule
from flash import flash_attention  # noqa: F401
from gmm import activated_gmm, fits_two, gated_gmm, gmm, summed_gmm, tgmm  # noqa: F401
from masks import Mask, block_ranges

CLOCK_HZ = schedule.TPU7X.kernel_clock_hz
VMEM_KIB = tuned.VMEM_BYTES // 1024
HEADS = 2  # of attention in a call that is compiled or timed, to share the cost per call


@dataclass(frozen=True)
class Tunable:
    """A kernel with tunable block sizes. A shape is {name: value}, as in the kernel's key in tuned.py."""

    rule: Callable[[dict], object]  # shape -> blocks, a dataclass or a named tuple
    choices: Callable[[dict], Iterator]  # shape -> other blocks
    vmem_bytes: Callable[[dict, object], int]
    job: Callable[[dict, object], tuple[str, dict]]  # (builder, options) for bundles.measure
    cycles: Callable[[bundles.Report, dict, object], float]  # of the call that `job` builds
    products: Callable[[dict], float]  # a lower bound on the multiplications in its matmuls


def min_cycles(kernel: str, s: dict) -> float:
    """The cycles that a core's MXUs need for the matmuls of a call; a smaller count is a bug in the count."""
    rate = bundles.CHIP.flops_per_s("fp8" if jnp.dtype(s["dtype"]).itemsize == 1 else "bf16")
    return 2 * TUNABLES[kernel].products(s) * bundles.CHIP.clock_hz * bundles.CHIP.cores / rate


def _cycles(kernel: str, report: bundles.Report, s: dict, blocks: object) -> float:
    """The cycles of a call; the mean over `_query_offsets`, as the shape does not have the offset of the queries."""
    counts = []
    for offset in _query_offsets(s):
        shape = s | {"offset": offset}
        cycles, least = TUNABLES[kernel].cycles(report, shape, blocks), min_cycles(kernel, shape)
        if cycles < least:
            counted = f"{cycles:,.0f} cycles counted, and its matmuls take {least:,.0f}"
            raise ValueError(f"{kernel} {dict(shape)} with {blocks}: {counted}: a bug in compiled/bundles.py's count")
        counts.append(cycles)
    return statistics.mean(counts)


def _query_offsets(s: dict) -> set[int]:
    """The offsets of the first query among the keys to average over, if there are more keys than queries.

    With a window the offset is the largest, as the queries follow a halo. Otherwise it is the smallest and the largest:
    cycles grow linearly in between, so their mean is that over all offsets, and that of a device with two chunks in
    zigzag order (context.py).
    """
    if "S" not in s or not (s["causal"] or s["window"]):
        return {0}
    last = s["S"] - s["T"]
    return {last} if s["window"] else {0, last}


def _scores(s: dict) -> int:
    """The number of scores of a head that are in fully unmasked tiles of 128 x 128."""
    ranges, _ = block_ranges((s["T"], s["S"]), (128, 128), _mask(s))
    return int((ranges[..., 2] - ranges[..., 1]).sum()) * 128 * 128


def _mask(s: dict) -> Mask:
    return Mask(causal=s["causal"], window=s["window"], q_offset=s.get("offset", 0))


def _grouped_products(s: dict) -> int:
    _, matrices, _ = _variant(s).operands()
    return _rows_of_experts(s) * s["K"] * s["N"] * matrices


def _rows_of_experts(s: dict) -> int:
    """The number of the M rows that belong to an expert: the share `filled` (`cycles_of`), by default all."""
    return round(s["M"] * s.get("filled", 1))


def _forward_choices(s: dict) -> Iterator[flash.Blocks]:
    rule = _forward_rule(s)
    for queries, keys, ahead, full, cut in product((256, 512), (256, 512, 1024), (2, 4), (8, 16, 24), (8, 16)):
        if full % (2 * ahead) == 0 and cut % (2 * ahead) == 0 and cut <= full:
            q_rows = -(-rule.q_rows // queries) * queries
            k_rows = -(-rule.k_rows // keys) * keys
            yield flash.Blocks(q_rows, k_rows, queries, keys, full, cut, ahead)


def _forward_rule(s: dict) -> flash.Blocks:
    return flash.default_blocks(s["T"], s["S"], s["H"], s["V"], s["dtype"], s["window"])


def _forward_job(s: dict, blocks: flash.Blocks) -> tuple[str, dict]:
    options = _attention_options(s, blocks)
    return "compiled.builders:flash_forward", options | (dict(max_logit=30.0) if s["max_logit"] else {})


def _attention_options(s: dict, blocks) -> dict:
    options = dict(
        seq=s["T"], keys=s["S"], heads=HEADS, head_dim=s["H"], value_dim=s["V"], dtype=s["dtype"], packed=s["packed"]
    )
    options |= dict(causal=s["causal"], window=s["window"], sizes=dataclasses.asdict(blocks))
    return options | dict(q_offset=s.get("offset", 0))


def _forward_cycles(report: bundles.Report, s: dict, blocks: flash.Blocks) -> float:
    kernel = report.kernel("flash_forward")
    executions = builders.forward_executions(kernel, s["T"], s["S"], HEADS, blocks, _mask(s))
    moved = HEADS * (s["T"] + s["S"]) * (s["H"] + s["V"]) * (4 if s["dtype"] == "float32" else 2)
    return kernel.cycles(executions, moved_bytes=moved).total / HEADS


def _backward_choices(s: dict) -> Iterator[flash_backward.Blocks]:
    rule = _backward_rule(s)
    for queries, keys, chunk in product((512, 1024, 2048), (512, 1024, 2048), (128, 256, 512)):
        if queries <= max(rule.queries, s["T"]) and keys <= rule.resident and rule.resident % keys == 0:
            yield dataclasses.replace(rule, queries=queries, keys=keys, chunk=chunk)


def _backward_rule(s: dict) -> flash_backward.Blocks:
    return flash_backward.default_blocks(s["T"], s["S"], s["H"], s["V"], s["dtype"])


def _backward_job(s: dict, blocks: flash_backward.Blocks) -> tuple[str, dict]:
    return "compiled.builders:flash_backward", _attention_options(s, blocks)


def _backward_cycles(report: bundles.Report, s: dict, blocks: flash_backward.Blocks) -> float:
    kernel = report.kernel("flash_backward")
    executions = builders.backward_executions(kernel, s["T"], s["S"], HEADS, HEADS, blocks, _mask(s))
    moved = 2 * HEADS * (s["T"] + s["S"]) * (s["H"] + s["V"]) * (4 if s["dtype"] == "float32" else 2)
    return kernel.cycles(executions, moved_bytes=moved).total / HEADS


def _gmm_choices(s: dict) -> Iterator[groups.Tiles]:
    rule = _gmm_rule(s)
    for rows, cols in product((128, 256, 384, 512, 640, 768, 1024), groups.columns(s["N"])):
        if cols >= min(512, s["N"]) and rows % rule.step == 0:
            yield rule._replace(rows=rows, cols=cols)


def _gmm_rule(s: dict) -> groups.Tiles:
    return groups.default_tiles(s["M"], s["K"], s["N"], s["E"], s["dtype"], variant=_variant(s))


def _variant(s: dict) -> groups.Variant:
    flags = {name: bool(s.get(name)) for name in ("transpose_rhs", "gated", "summed", "gradient")}
    return groups.Variant(rhs_scale=_scaled(s), **flags)


def _scaled(s: dict) -> bool:
    """Whether calls have scales: those in FP8, by fp8.py. 1.2% more cycles for gate and up of Qwen3 235B (compiled)."""
    return jnp.dtype(s["dtype"]).itemsize == 1


def _result(s: dict):
    return groups.result_dtype(s["dtype"])


def _gmm_job(s: dict, tiles: groups.Tiles) -> tuple[str, dict]:
    options = dict(M=s["M"], K=s["K"], N=s["N"], groups=s["E"], dtype=s["dtype"]) | tiles._asdict()
    flags = _variant(s)._asdict()
    gated, gradient = flags.pop("gated"), flags.pop("gradient")
    if gated:
        return "compiled.builders:gated_gmm", options | dict(rhs_scale=_scaled(s))
    if gradient:
        transposed = dict(transpose_rhs=flags["transpose_rhs"])
        return "compiled.builders:gated_gradients", options | dict(rhs_scale=_scaled(s)) | transposed
    return "compiled.builders:gmm", options | flags


def _tgmm_choices(s: dict) -> Iterator[groups.TgmmTiles]:
    sizes = (256, 512, 1024), groups.widths(s["K"]), groups.widths(s["N"])
    for rows, k, n, outs, buffers in product(*sizes, (1, 2), (2, 3)):
        if k >= min(512, s["K"]) and n >= min(512, s["N"]):
            yield groups.TgmmTiles(rows, k, n, outs, buffers)


def _tgmm_rule(s: dict) -> groups.TgmmTiles:
    return groups.default_tgmm_tiles(s["M"], s["K"], s["N"], s["E"], s["dtype"], scale=_scaled(s))


def _tgmm_job(s: dict, tiles: groups.TgmmTiles) -> tuple[str, dict]:
    options = dict(M=s["M"], K=s["K"], N=s["N"], groups=s["E"], dtype=s["dtype"], scale=_scaled(s))
    return "compiled.builders:tgmm", options | tiles._asdict()


def ragged(M: int, E: int) -> list[int]:
    """Group sizes to rank tiles by: around M/E, all different, and not multiples of a tile."""
    weights = [1 + 0.3 * ((i * 0.618034) % 1 - 0.5) for i in range(E)]
    ends = [round(M * sum(weights[: i + 1]) / sum(weights)) for i in range(E)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _grouped_cycles(name: str, report: bundles.Report, s: dict, tiles) -> float:
    """The cycles of a call, with those in which it waits for memory, unless the shape has waits=False."""
    if s.get("waits", True):
        return grouped_time(name, report, s, tiles).seconds * CLOCK_HZ
    sizes = ragged(_rows_of_experts(s), s["E"])
    executions = grid.executions(report.kernel(name), sizes, s["M"], s["K"], s["N"], tiles, s["dtype"])
    moved = grid.moved_bytes(sizes, s["M"], s["K"], s["N"], tiles, s["dtype"], variant=_variant(s))
    return report.kernel(name).cycles(executions, moved_bytes=moved).total


def grouped_time(name: str, report: bundles.Report, s: dict, tiles) -> grid.Time:
    """The time of a call of gmm or tgmm, by a walk through its tiles with the DMAs of gmm.py.

    The cycles beside the matmuls of a tile are spread evenly over the tiles.
    """
    kernel, sizes = report.kernel(name), ragged(_rows_of_experts(s), s["E"])
    executions = grid.executions(kernel, sizes, s["M"], s["K"], s["N"], tiles, s["dtype"])
    plan = grid.listed(sizes, s["M"], tiles, s["dtype"])
    cycles = np.zeros(len(plan.tile_group))
    for bucket, height in enumerate(groups.heights(tiles)):
        last = f"finish {height}" if name == "tgmm" else f"{height} rows"
        cycles[plan.tile_height == bucket] = kernel.region(last).cycles
    if name == "tgmm":
        cycles[np.diff(plan.tile_group, append=-1) == 0] = kernel.region("add").cycles
    return walked(name, s, tiles, plan, cycles, kernel.cycles(executions, moved_bytes=0).compute)


def walked(
    name: str, s: dict, tiles, plan: groups.Plan, of_tiles: np.ndarray, total: float, memory: grid.Memory = grid.TPU7X
) -> grid.Time:
    """The time of a call of gmm or tgmm with these cycles in the matmuls of each tile, and in total."""
    operands = (_gmm_operands if name == "gmm" else _tgmm_operands)(plan, s, tiles)
    cycles = np.tile(of_tiles, len(operands[0].index) // max(1, len(of_tiles)))
    cycles = cycles + max(0, total - cycles.sum()) / max(1, len(cycles))
    return grid.walk(cycles.tolist(), operands, memory)


def _gmm_operands(plan: groups.Plan, s: dict, tiles: groups.Tiles) -> list[grid.Operand]:
    """The blocks that `gmm` reads and writes in each tile of each pass over the columns."""
    inputs, matrices, results = _variant(s).operands()
    in_bytes, out_bytes = (jnp.dtype(each).itemsize for each in (s["dtype"], _result(s)))
    unit, passes = groups.register_rows(s["dtype"], _result(s)), groups.cdiv(s["N"], tiles.cols)
    repeated = lambda array: np.tile(array, passes)
    tile, column = np.arange(passes * len(plan.tile_group)), np.repeat(np.arange(passes), len(plan.tile_group))
    matrix = column * len(plan.group_expert) + repeated(plan.tile_group)
    rows, variant = repeated(plan.tile_blocks) * float(unit), _variant(s)
    products = 2 * tiles.cols * out_bytes if variant.gradient else 0
    factor, of_sums = (grid.COLUMN_BYTES * each for each in (variant.gradient or variant.gated, variant.gradient))
    return [
        grid.Operand("lhs", tile, rows * (inputs * s["K"] * in_bytes + products + factor)),
        grid.Operand("rhs", matrix, float(matrices * s["K"] * tiles.cols * in_bytes), lookahead=True),
        grid.Operand(
            "out",
            tile,
            repeated(plan.tile_write) * float(unit * (results * tiles.cols * out_bytes + of_sums)),
            output=True,
        ),
    ]


def _tgmm_operands(plan: groups.Plan, s: dict, tiles: groups.TgmmTiles) -> list[grid.Operand]:
    """The blocks that `tgmm` reads and writes in each tile of each pass over the parts of its results."""
    in_bytes, out_bytes = (jnp.dtype(each).itemsize for each in (s["dtype"], _result(s)))
    unit = groups.register_rows(s["dtype"], _result(s))
    passes = groups.cdiv(s["K"], tiles.k) * groups.cdiv(s["N"], tiles.n)
    rows = np.tile(plan.tile_blocks, passes) * float(unit * in_bytes)
    tile, part = np.arange(len(rows)), np.repeat(np.arange(passes), len(plan.tile_group))
    result = part * len(plan.group_expert) + np.tile(plan.tile_group, passes)
    return [
        grid.Operand("lhs", tile, rows * tiles.k, tiles.buffers),
        grid.Operand("dout", tile, rows * tiles.n, tiles.buffers),
        grid.Operand("out", result, float(tiles.k * tiles.n * out_bytes), buffers=1 + tiles.outs, output=True),
    ]


TUNABLES = {
    "flash_forward": Tunable(
        _forward_rule,
        _forward_choices,
        lambda s, blocks: flash.vmem_bytes(blocks, s["H"], s["V"], s["dtype"]),
        _forward_job,
        _forward_cycles,
        lambda s: _scores(s) * (s["H"] + s["V"]),
    ),
    "flash_backward": Tunable(
        _backward_rule,
        _backward_choices,
        lambda s, blocks: flash_backward.vmem_bytes(blocks, s["H"], s["V"], s["dtype"]),
        _backward_job,
        _backward_cycles,
        lambda s: _scores(s) * (3 * s["H"] + 2 * s["V"]),
    ),
    "gmm": Tunable(
        _gmm_rule,
        _gmm_choices,
        lambda s, tiles: groups.vmem_bytes(tiles, s["K"], s["N"], s["dtype"], _result(s), _variant(s)),
        _gmm_job,
        partial(_grouped_cycles, "gmm"),
        _grouped_products,
    ),
    "tgmm": Tunable(
        _tgmm_rule,
        _tgmm_choices,
        lambda s, tiles: groups.tgmm_vmem_bytes(tiles, s["K"], s["N"], s["dtype"], _result(s), scale=_scaled(s)),
        _tgmm_job,
        partial(_grouped_cycles, "tgmm"),
        _grouped_products,
    ),
}


@dataclass(frozen=True)
class Candidate:
    """Blocks and their cost: compiled cycles or, on a TPU, measured time in cycles of CLOCK_HZ."""

    blocks: object
    vmem_bytes: int
    cycles: float  # infinite if refused
    error: str = ""


def candidates(kernel: str, shape: dict, vmem_kib: int = VMEM_KIB) -> list:
    """The blocks to compile: the rule's first, then others that take at most `vmem_kib` of VMEM."""
    tunable, rule = TUNABLES[kernel], TUNABLES[kernel].rule(shape)
    others = (blocks for blocks in tunable.choices(shape) if blocks != rule)
    return [rule, *(blocks for blocks in others if tunable.vmem_bytes(shape, blocks) <= vmem_kib * 1024)]


def tune(
    kernel: str, shape: dict, *, vmem_kib: int = VMEM_KIB, workers: int = 2, most: int = 0
) -> tuple[list[Candidate], dict]:
    """Compiles candidates for TPU7x or, on a TPU, times them. Does not store the result; `tuned.save` does.

    Args:
      kernel: of TUNABLES.
      shape: as in the kernel's key in tuned.py.
      vmem_kib: the VMEM that a candidate may take.
      workers: compilations at a time, 1 to 2 GB each.
      most: number of candidates, evenly chosen; 0 is all.

    Returns:
      (the candidates, best first and refused ones last; the best one's entry for tuned.py).

    Raises:
      ValueError: not even the rule's blocks compile, or fewer cycles were counted than the matmuls take.
    """
    tunable, tried = TUNABLES[kernel], candidates(kernel, shape, vmem_kib)
    tried = tried[:1] + tried[1 :: max(1, -(-len(tried[1:]) // (most - 1)))] if most > 1 else tried
    if compiler_flags.has_tpu():
        costs = [time_on_tpu(kernel, shape, blocks) for blocks in tried]
    else:
        costs, jobs = [], [tunable.job(shape, blocks) for blocks in tried]
        for report, blocks in zip(bundles.measure_many(jobs, workers), tried, strict=True):
            refused = bool(report.error)
            costs.append((math.inf if refused else _cycles(kernel, report, shape, blocks), report.error))
    ranked = [
        Candidate(blocks, tunable.vmem_bytes(shape, blocks), cycles, error)
        for blocks, (cycles, error) in zip(tried, costs, strict=True)
    ]
    if ranked[0].error:
        needs = f"which need {ranked[0].vmem_bytes:,} bytes of VMEM by arithmetic, do not compile"
        raise ValueError(f"{kernel} {shape}: the rule's {ranked[0].blocks}, {needs}: {ranked[0].error}")
    rule = ranked[0].cycles
    ranked.sort(key=lambda candidate: candidate.cycles)
    entry = {"blocks": tuned.fields_of(ranked[0].blocks), "cycles": round(ranked[0].cycles), "rule_cycles": round(rule)}
    entry["how"] = "measured" if compiler_flags.has_tpu() else "compiled"
    return ranked, entry


def cycles_of(metadata: Mapping[str, str], filled: float = 1, waits: bool = True) -> float:
    """The cycles of a call of a kernel with this metadata (tuned.metadata) in a compiled program.

    Compiles the kernel: 10 s, or some minutes. Assumes that each document is a full sequence and that groups of experts
    are `ragged`. If a call of attention covers only some of the keys, returns the mean over the calls.

    Args:
      metadata: of the call, from the program.
      filled: the share of a grouped matmul's rows that belong to an expert. A buffer for tokens from other devices is
        larger than the rows expected, and a kernel multiplies only the rows that arrived.
      waits: count the cycles of a grouped matmul in which it waits for memory (compiled/grid.py). Otherwise the time of
        all its traffic is counted where that is longer than its cycles.

    Raises:
      ValueError: the kernel does not compile by itself, or fewer cycles were counted than its matmuls take.
    """
    name, shape, blocks = _called(metadata)
    if "E" in shape:
        shape |= dict(filled=filled, waits=waits)
    builder, options = TUNABLES[name].job(shape, blocks)
    # The compilation of a step, up to half an hour, waits for the cycles: do not lose it to a busy machine.
    report = bundles.measure(builder, timeout_s=3600, **options)
    num_calls = -(-shape["S"] // blocks.resident) if name == "flash_backward" else 1  # one for each range of keys
    return _cycles(name, report, shape, blocks) * int(metadata["calls"]) / num_calls


def vmem_of(metadata: Mapping[str, str]) -> int:
    """The bytes of VMEM that a call of a kernel with this metadata needs, by arithmetic; nothing is compiled."""
    name, shape, blocks = _called(metadata)
    return TUNABLES[name].vmem_bytes(shape, blocks)


def _called(metadata: Mapping[str, str]) -> tuple[str, dict, object]:
    """The kernel, the shape and the blocks of a call with this metadata."""
    name, shape = tuned.shape_of(metadata["tuned_key"])
    fields = dict(part.split("=") for part in metadata["blocks"].split())
    return name, shape, type(TUNABLES[name].rule(shape))(**{field: int(value) for field, value in fields.items()})


def version() -> str:
    """A hash of the code that determines the cycles of a call: that of the kernels and of their instruments."""
    instruments = "compiled/builders compiled/bundles compiled/grid compiler_flags hardware kernels"
    names = f"{instruments} flash flash_backward gmm groups masks".split()
    return hashlib.sha256(b"".join((command.ROOT / f"{name}.py").read_bytes() for name in names)).hexdigest()


def time_on_tpu(kernel: str, shape: dict, blocks: object, repeats: int = 10) -> tuple[float, str]:
    """(cycles of CLOCK_HZ for a call, or for a head of attention; infinite if it fails, and then the error).

    Takes the median of `repeats` for each offset of the queries, and their mean as for compiled cycles.
    """
    sizes = jnp.asarray(ragged(shape["M"], shape["E"])) if "E" in shape else 1
    medians = []
    try:
        for offset in _query_offsets(shape):
            run, shapes = bundles.build(*TUNABLES[kernel].job(shape | {"offset": offset}, blocks))
            fill = lambda a: jnp.broadcast_to(sizes if a.dtype == jnp.int32 else 1, a.shape).astype(a.dtype)
            run, arrays = jax.jit(run), jax.tree.map(fill, shapes)
            jax.block_until_ready(run(*arrays))
            seconds = []
            for _ in range(repeats):
                begun = time.perf_counter()
                jax.block_until_ready(run(*arrays))
                seconds.append(time.perf_counter() - begun)
            medians.append(statistics.median(seconds))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return math.inf, str(error).splitlines()[0]
    return statistics.mean(medians) * CLOCK_HZ / (HEADS if "T" in shape else 1), ""


# -- command line


def shapes_of(args: argparse.Namespace) -> list[tuple[str, dict]]:
    """The (kernel, shape) of each call that a command line selects: a forward pass and its gradients."""
    if args.search == "gmm":
        sizes = dict(M=args.M, K=args.K, N=args.N, E=args.E, dtype=args.dtype)
        swapped, transposed = dict(K=args.N, N=args.K), dict(transpose_rhs=True)
        cotangents = dict(dtype=args.dtype.replace("e4m3fn", "e5m2"))  # in FP8 the format with the larger range
        # Gate and up: one kernel for both, or a kernel for each where a policy saves only some of their results.
        input_gradient = sizes | swapped | transposed | cotangents
        calls = [("gmm", sizes), ("gmm", sizes | dict(gated=True)), ("gmm", input_gradient), ("tgmm", sizes)]
        dtype, scaled = jnp.dtype(input_gradient["dtype"]), "float8" in args.dtype
        both = args.M, args.N, args.K, args.E, dtype, _result(input_gradient)
        if fits_two(*both, rhs_scale=scaled):
            calls.append(("gmm", input_gradient | dict(summed=True)))
        # Down's matrices are stored transposed (parameters.py).
        down = [("gmm", sizes | swapped | transposed), ("gmm", sizes | cotangents), ("tgmm", sizes | cotangents)]
        down.append(("gmm", sizes | cotangents | dict(gradient=True)))
        return calls + [call for call in down if call not in calls]
    if args.S and args.S < args.T and (args.causal or args.window):
        raise ValueError(f"--S={args.S} keys are fewer than --T={args.T} queries, some of which would see no key")
    sizes = dict(T=args.T, S=args.S or args.T, H=args.head_dim, V=args.value_dim or args.head_dim, dtype=args.dtype)
    mask = dict(causal=args.causal, window=args.window, packed=args.packed)
    return [("flash_forward", sizes | mask | dict(max_logit=args.max_logit)), ("flash_backward", sizes | mask)]


def print_search(args: argparse.Namespace) -> None:
    for kernel, shape in shapes_of(args):
        key = tuned.key_of(kernel, **shape)
        ranked, entry = tune(kernel, shape, vmem_kib=args.scoped_vmem_kib, workers=args.workers, most=args.most)
        tuned.save(key, entry, Path(args.out))
        if args.json:
            rows = [dataclasses.asdict(each) | {"blocks": tuned.fields_of(each.blocks)} for each in ranked]
            print(json.dumps({"key": key, "entry": entry, "candidates": rows}))
            continue
        print(f"\n{key}\n{'cycles':>12}{'VMEM MiB':>10}  blocks ({entry['how']})")
        for candidate in ranked[:8]:
            blocks, mib = tuned.fields_of(candidate.blocks), candidate.vmem_bytes / 2**20
            print(f"{candidate.cycles:12,.0f}{mib:10.1f}  {blocks}")
        gain = entry["rule_cycles"] / entry["cycles"]
        refused = sum(bool(candidate.error) for candidate in ranked)
        best = f"the best is {gain:.3f}x as fast as the rule's"
        print(f"{len(ranked)} tried, {refused} refused; {best}; stored in {args.out}")


def table(entries: dict[str, dict]) -> str:
    """A Markdown table of the best block sizes found for each shape, their cycles, and those of the rule's sizes."""
    lines = ["| kernel and shape | best blocks | cycles | by the rule | gain | by |", "|---|---|---|---|---|---|"]
    for key, entry in entries.items():
        blocks = " ".join(f"{name}={value}" for name, value in entry["blocks"].items())
        lines.append(
            f"| {key.removesuffix(' chip=tpu7x')} | {blocks} | {entry['cycles']:,} | {entry['rule_cycles']:,} | "
            f"{entry['rule_cycles'] / entry['cycles']:.3f} | {entry['how']} |"
        )
    return "\n".join(lines)


def print_entries(args: argparse.Namespace) -> None:
    entries = tuned.read(tuned.CHECKED_IN) | tuned.read(tuned.OWN)
    if args.json:
        return print(json.dumps(entries))
    print(table(entries))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__)
    parser.add_argument("--json", action="store_true", help="a JSON object in place of the table")
    parser.set_defaults(run=print_entries)
    search = parser.add_subparsers(metavar="tune").add_parser(
        "tune", help="search for block sizes, and store the best", allow_abbrev=False
    )
    search.add_argument(
        "search",
        choices=("attention", "gmm"),
        help="attention's kernels, or those of a mixture of experts (grouped matmuls): forward and gradients",
    )
    dtypes = ("bfloat16", "float32", "float8_e4m3fn")
    search.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of the operands [%(default)s]")
    search.add_argument(
        "--scoped_vmem_kib", type=command.at_least(1), default=VMEM_KIB, help="VMEM of a candidate [%(default)s]"
    )
    search.add_argument(
        "--workers", type=command.at_least(1), default=2, help="compilations at a time, 1 to 2 GB each [%(default)s]"
    )
    search.add_argument(
        "--most", type=command.at_least(0), default=0, help="candidates to try, evenly chosen; 0 is all [%(default)s]"
    )
    search.add_argument("--out", type=command.path, default=tuned.OWN, help="file that stores the best [%(default)s]")
    search.add_argument("--json", action="store_true", help="a JSON object for each call, with all candidates")
    of_attention = search.add_argument_group("attention")
    of_attention.add_argument("--T", type=command.at_least(1), default=8192, help="queries of a sequence [%(default)s]")
    of_attention.add_argument(
        "--S", type=command.at_least(0), default=0, help="keys of a sequence; 0 is as many as queries [%(default)s]"
    )
    of_attention.add_argument(
        "--head_dim", type=command.at_least(1), default=128, help="of queries and keys [%(default)s]"
    )
    of_attention.add_argument(
        "--value_dim", type=command.at_least(0), default=0, help="of values; 0 is the head_dim [%(default)s]"
    )
    of_attention.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="[%(default)s]")
    of_attention.add_argument(
        "--window", type=command.at_least(0), default=0, help="keys that a query sees; 0 is all [%(default)s]"
    )
    of_attention.add_argument("--packed", action=argparse.BooleanOptionalAction, default=True, help="documents")
    of_attention.add_argument("--max_logit", action="store_true", help="a constant in place of the running maximum")
    of_experts = search.add_argument_group("gmm")
    of_experts.add_argument("--M", type=command.at_least(1), default=8192, help="rows of all groups [%(default)s]")
    of_experts.add_argument(
        "--K", type=command.at_least(1), default=4096, help="contracted dim: model dim [%(default)s]"
    )
    of_experts.add_argument("--N", type=command.at_least(1), default=1536, help="columns: expert dim [%(default)s]")
    of_experts.add_argument(
        "--E", type=command.at_least(1), default=8, help="groups: experts of the device [%(default)s]"
    )
    search.set_defaults(run=print_search)
    args = command.arguments(parser, argv)
    if not compiler_flags.has_tpu():
        jax.config.update("jax_platforms", "cpu")
    args.run(args)


if __name__ == "__main__":
    command.run(main)
