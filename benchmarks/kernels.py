"""Cycles of our kernels and of other libraries' for the same work, counted by one instrument in one run, without a TPU.

    python benchmarks/kernels.py [--only=REGEX] [--json]

compiled/bundles.py compiles each kernel for TPU7x and counts cycles in the program that the compiler made of it. So all
columns are compiled, by the libtpu that the first line names. The anchors are other libraries' kernels, in good tiles:

    jax       splash attention, in blocks of 1024 x 1024, 512 keys at once, backward fused; megablox, all of K and 128
              rows in a tile of gmm, 256 rows and 2048 x 1536 of the result for tgmm: of 128, 256 and 512 rows the best
              for these groups
    tokamax   splash attention, likewise, with the compiler's other scheduler, which it offers (`pip install tokamax`)

A head is causal, with 8192 queries and keys of 128, in bfloat16, unless the row says otherwise. All that a kernel does
for it is counted: grid steps, starts, ends and masks. For the anchors this is compute alone; for ours the time of HBM's
traffic counts, if it is longer. Ours have the block sizes of their rules, not those of a search (kernels.py).

Milliseconds are the cycles at the clock of compiled/grid.py, which counts no wait here but those for the first and last
blocks. "hardware" is tokamax's kernel at the blocks that its autotuner found best on TPU7x, a head's share of a call
without what XLA does beside it (kernel_timings.py).

**Left out.** What XLA does beside a kernel. This favours the anchors, too: their backward passes leave dq in 8 partial
sums in HBM, which XLA then adds up.

Goals ("reach") are the project's own. A share of the MXU limit must be at least its goal, every other figure at most.

    / 64          a head without a mask has 64 blocks of 1024 x 1024 scores
    window        63 such blocks have scores that are seen; 31.5 would hold them
    x ideal       over the cycles of 2MKN FLOPs at the MXUs' full rate, with all that is computed in vain, for groups of
                  1000 1100 900 1024 700 1300 1068 1100 rows, K = 4096 and N = 1536
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import command
import compiler_flags

compiler_flags.without_tpu()

import jax
import jax.numpy as jnp
import numpy as np

import dense
import flash
import flash_backward
import groups
import masks
import tuned
from benchmarks.kernel_timings import kernel_ms_per_head as on_hardware
from compiled import builders, bundles, grid

CLOCK_HZ = grid.TPU7X.clock_hz
COLUMNS = ("ironwood", "jax", "tokamax")
HEADS = 2  # that are compiled; cycles are given for one
BLOCK, KEYS = 1024, 512  # the anchors' blocks in VMEM, and keys that are computed at once
M, K, N, RAGGED = 8192, 4096, 1536, (1000, 1100, 900, 1024, 700, 1300, 1068, 1100)
GMM_TILES, TGMM_TILES = (128, 4096, 1536), (256, 2048, 1536)  # of megablox: rows, K, N
MORE_VMEM = f"--xla_tpu_scoped_vmem_limit_kib={tuned.VMEM_BYTES // 1024}"  # which megablox cannot ask for by itself


# -- the anchors, for bundles.py


def build_splash(T=8192, H=128, causal=True, window=0, packed=False, backward=False):
    """Returns (function, [jax.ShapeDtypeStruct, ...]) of jax's splash attention, as compiled/bundles.py wants them."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mask = splash.MultiHeadMask([_mask_of(splash, T, causal, window)] * HEADS)
    sizes = splash.BlockSizes(**_sizes(), use_fused_bwd_kernel=True)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)
    return _attention(kernel, splash.SegmentIds, T, H, packed, backward)


def build_tokamax(T=8192, H=128, causal=True, window=0, packed=False, backward=False, max_logit=None):
    """The same of tokamax's splash attention. Its public function would choose the sizes itself."""
    attention = "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_"
    splash, kinds = (importlib.import_module(attention + module) for module in ("kernel", "mask"))
    config = splash.SplashConfig(**_sizes(), use_experimental_scheduler=True, max_logit_const=max_logit)
    mask = _mask_of(kinds, T, causal, window)
    kernel = splash.make_splash_mha_single_device(mask, config=config, save_residuals=False)
    return _attention(kernel, splash.SegmentIds, T, H, packed, backward)


def build_megablox(which="gmm"):
    """The same of megablox's "gmm", or of its "tgmm", which takes lhs transposed."""
    megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    tiling = GMM_TILES if which == "gmm" else TGMM_TILES
    shapes = [(M, K), (len(RAGGED), K, N)] if which == "gmm" else [(K, M), (M, N)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    run = partial(getattr(megablox, which), preferred_element_type=jnp.bfloat16, tiling=tiling)
    return run, [*arrays, jax.ShapeDtypeStruct((len(RAGGED),), jnp.int32)]


def _sizes():
    return dict(
        block_q=BLOCK,
        block_kv=BLOCK,
        block_kv_compute=KEYS,
        block_q_dkv=BLOCK,
        block_kv_dkv=BLOCK,
        block_kv_dkv_compute=KEYS,
    )


def _mask_of(kinds, T, causal, window):
    if window:
        return kinds.LocalMask((T, T), (window - 1, 0), 0)
    return kinds.CausalMask((T, T)) if causal else kinds.FullMask((T, T))


def _attention(kernel, segment_ids, T, H, packed, backward):
    per_head, ids = jax.ShapeDtypeStruct((HEADS, T, H), jnp.bfloat16), jax.ShapeDtypeStruct((T,), jnp.int32)
    forward = lambda q, k, v, *ids: kernel(q, k, v, *([segment_ids(*ids)] if ids else []))
    gradients = lambda dout, *qkv: jax.vjp(forward, *qkv)[1](dout)
    return (gradients, [per_head] * 4) if backward else (forward, [per_head] * 3 + [ids] * (2 * packed))


# -- what is compiled, and how its cycles are read


@dataclass(frozen=True)
class Call:
    builder: str
    options: dict
    read: Callable[[bundles.Report], float]
    flags: str = ""


def forward(column: str, T: int = 8192, H: int = 128, causal=True, window=0, documents=1, max_logit=None) -> Call:
    """The forward pass of a head, in cycles, with `documents` of T/documents tokens each."""
    window_of, packed = dict(causal=causal, window=window), documents > 1
    ids = np.arange(T, dtype=np.int32)[None] // (T // documents)
    mask = masks.Mask(**window_of, segments=(ids, ids) if packed else None)
    limit = {} if max_logit is None else dict(max_logit=max_logit)
    if column == "ironwood":
        options = dict(seq=T, heads=HEADS, head_dim=H, packed=packed) | window_of | limit
        return Call("compiled.builders:flash_forward", options, partial(read_forward, T, H, mask))
    if column == "jax":  # masks documents, but leaves no block out
        mask = masks.Mask(**window_of)
    builder = "build_splash" if column == "jax" else "build_tokamax"
    options = dict(T=T, H=H, packed=packed) | window_of | limit
    return Call(f"{__file__}:{builder}", options, partial(read_splash, column, T, mask))


def read_splash(column: str, T: int, mask: masks.Mask, report: bundles.Report) -> float:
    """Cycles that an anchor's forward pass takes for a head."""
    blocks = masks.block_ranges((T, T), (BLOCK, BLOCK), mask)[0][0]
    rows, seen, full = len(blocks), int((blocks[:, 3] - blocks[:, 0]).sum()), int((blocks[:, 2] - blocks[:, 1]).sum())
    if column == "jax":
        return read_anchor(seen, [rows, seen, rows], report)
    masked = mask.causal or mask.window or mask.segments is not None
    return read_anchor(seen, [rows, full, seen - full, rows] if masked else [rows, rows], report)


def read_forward(T: int, H: int, mask: masks.Mask, report: bundles.Report) -> float:
    """Cycles of our kernel a head. It moves q and out once, k and v for each pair of superblocks that is not masked."""
    kernel, sizes = report.kernel("flash_forward"), flash.default_blocks(T, T, H, H, window=mask.window)
    pairs = masks.block_ranges((T, T), (sizes.q_rows, sizes.k_rows), mask)[0][0]
    num_pairs = int((pairs[:, 3] - pairs[:, 0]).sum())
    executions = builders.forward_executions(kernel, T, T, HEADS, sizes, mask)
    moved = HEADS * (T + num_pairs * sizes.k_rows) * 2 * H * 2
    return kernel.cycles(executions, moved_bytes=moved).total / HEADS


def read_anchor(steps: int, branches: Sequence[int], report: bundles.Report, name: str | None = None) -> float:
    """Cycles of an anchor, a head. `branches` are executions in the order of the program.

    A grid whose size is data is a branch, a loop and a branch of its own. It has two iterations more than steps, as
    compiled/bundles.py has it for a known grid.
    """
    kernel = report.kernel(name)
    grid = [1, HEADS * steps + 2, HEADS * steps] if len(kernel.unknown()) == len(branches) + 3 else []
    return kernel.cycles(grid + [HEADS * count for count in branches], moved_bytes=0).compute / HEADS


def backward(column: str, T: int = 8192, H: int = 128, step: bool = False) -> Call:
    """Cycles of a causal head's backward pass, or of a `step`: a grid step of 1024 x 1024 scores without a mask."""
    rows = T // BLOCK
    cut, full = rows, rows * (rows - 1) // 2
    if column == "ironwood":
        read = read_backward_step if step else partial(read_backward, T, H)
        return Call("compiled.builders:flash_backward", dict(seq=T, heads=HEADS, head_dim=H), read)
    branches = [rows, full + cut, rows] if column == "jax" else [rows, full, cut, rows]
    read_head = partial(read_anchor, rows * rows, branches, name="splash_mha_dkv_no_residuals")
    builder = "build_splash" if column == "jax" else "build_tokamax"
    return Call(f"{__file__}:{builder}", dict(T=T, H=H, backward=True), read_anchor_step if step else read_head)


def read_backward(T: int, H: int, report: bundles.Report) -> float:
    kernel, sizes = report.kernel("flash_backward"), flash_backward.default_blocks(T, T, H, H)
    executions = builders.backward_executions(kernel, T, T, HEADS, HEADS, sizes, masks.CAUSAL)
    moved = HEADS * T * (7 * H * 2 + 2 * 4)  # q, k, v, dout and three gradients; two numbers of each query
    return kernel.cycles(executions, moved_bytes=moved).total / HEADS


def read_backward_step(report: bundles.Report) -> float:
    return report.kernel("flash_backward").region("full block").cycles


def read_anchor_step(report: bundles.Report) -> float:
    kernel = report.kernel("splash_mha_dkv_no_residuals")
    rounds = [region.cycles for region, _ in bundles.walk(kernel.root) if region.kind in ("grid", "step")]
    return sum(rounds) + kernel.unknown()[1].cycles  # the first is the start of a row of blocks


def grouped(column: str, which: str) -> Call:
    """gmm, tgmm or gated_gmm of the RAGGED groups, in cycles."""
    if column == "ironwood":
        return Call(f"compiled.builders:{which}", dict(M=M, K=K, N=N, groups=len(RAGGED)), partial(read_grouped, which))
    return Call(f"{__file__}:build_megablox", dict(which=which), partial(read_megablox, which), MORE_VMEM)


def read_grouped(which: str, report: bundles.Report) -> float:
    kernel, shape, gated = report.kernel("tgmm" if which == "tgmm" else "gmm"), (M, K, N), which == "gated_gmm"
    variant = groups.Variant(gated=gated)
    of_gmm = partial(groups.default_tiles, variant=variant)
    tiles = (groups.default_tgmm_tiles if which == "tgmm" else of_gmm)(*shape, len(RAGGED), "bfloat16")
    executions = grid.executions(kernel, RAGGED, *shape, tiles, "bfloat16")
    moved = grid.moved_bytes(RAGGED, *shape, tiles, "bfloat16", variant=variant)
    return kernel.cycles(executions, moved_bytes=moved).total


def read_megablox(which: str, report: bundles.Report) -> float:
    """Cycles of megablox, where each group visits every tile that has rows of it."""
    rows, k, n = GMM_TILES if which == "gmm" else TGMM_TILES
    ends, passes = np.cumsum(RAGGED), (K // k) * (N // n)
    visits = passes * int(np.sum(-(-ends // rows) - (ends - RAGGED) // rows))
    branches = [] if which == "gmm" else [passes * len(RAGGED), visits, passes * len(RAGGED)]  # clear, add, write
    return report.kernel(which).cycles([1, visits + 2, visits, *branches], moved_bytes=0).compute


def square(dtype: str, size: int = 8192) -> Call:
    """A dense matmul, as a share of the MXU limit."""

    def read(report):
        tiles = dense.TILES[jnp.dtype(dtype).itemsize]
        return dense.mxu_cycles(size, size, size, dtype) / dense.cycles(report, tiles, size, size, size).total

    return Call("dense:build", dict(M=size, K=size, N=size, lhs=dtype), read)


# -- the table


@dataclass(frozen=True)
class Row:
    """A row of the table: `figure` computes a column's cell from the results of its calls; no calls, no cell."""

    name: str
    unit: str  # cycles, x or share
    calls: dict[str, tuple[Call, ...]]
    goal: float | None = None  # the most; for a share, the least
    lead: float = 0.0  # another goal: tokamax's figure is at least so many times ours
    figure: Callable[..., float] = lambda only: only
    measured_ms: float | None = None  # tokamax's kernel at its best blocks, on hardware


def by_column(call: Callable[..., Call], columns: Sequence[str] = COLUMNS, **options) -> dict[str, tuple[Call, ...]]:
    return {column: (call(column, **options),) for column in columns}


def both(first: dict, second: dict) -> dict[str, tuple[Call, ...]]:
    return {column: first[column] + second[column] for column in first}


def rows() -> list[Row]:
    ideal = dense.mxu_cycles(M, K, N, "bfloat16")
    starts = np.cumsum(RAGGED) - RAGGED
    passes = int(
        np.sum(-(-(starts % 16 + RAGGED) // groups.MXU))
    )  # passes of 256 rows, from the register of a group's first row
    by_jax = lambda which: by_column(partial(grouped, which=which), COLUMNS[:2])
    num_blocks, needed = (8192 // BLOCK) ** 2, 2 * (32768 // BLOCK) - 1
    unmasked = by_column(forward, causal=False)
    return [
        Row("forward, head", "cycles", by_column(forward), 80_000, measured_ms=on_hardware(8192, 128, True)),
        Row(
            "forward, head, constant max logit",
            "cycles",
            by_column(forward, ("ironwood", "tokamax"), max_logit=30.0),
            70_000,
        ),
        Row(
            "forward, head, no mask, / 64: 1024 x 1024",
            "cycles",
            unmasked,
            2000,
            figure=lambda head: head / num_blocks,
            measured_ms=on_hardware(8192, 128, False) / num_blocks,
        ),
        Row("forward, head of 64", "cycles", by_column(forward, H=64), lead=1.2),
        Row(
            "forward, head of 256",
            "cycles",
            by_column(forward, H=256),
            lead=1.2,
            measured_ms=on_hardware(8192, 256, True),
        ),
        Row(
            "forward, 4 documents of 2k in 8k, / 4 heads of 2k",
            "x",
            both(by_column(forward, documents=4), by_column(forward, T=2048)),
            1.15,
            figure=lambda packed, alone: packed / (4 * alone),
        ),
        Row(
            f"forward, 32k, window of 1k, / its {needed} blocks at the price without a mask",
            "x",
            both(by_column(forward, T=32768, window=1024), unmasked),
            1.2,
            figure=lambda head, full: head / (needed * full / num_blocks),
        ),
        Row("backward, 1024 x 1024, no mask", "cycles", by_column(backward, step=True), 4400),
        Row("backward, head", "cycles", by_column(backward)),
        Row("gmm, ragged, x ideal", "x", by_jax("gmm"), 1.08, figure=lambda cycles: cycles / ideal),
        Row(
            "gated_gmm, ragged: two matmuls, silu(gate) * up and factors, x ideal",
            "x",
            {"ironwood": (grouped("ironwood", "gated_gmm"),)},
            1.08,
            figure=lambda cycles: cycles / (2 * ideal),
        ),
        Row("tgmm, ragged, x ideal", "x", by_jax("tgmm"), 1.08, figure=lambda cycles: cycles / ideal),
        Row(
            f"tgmm, ragged, x its {passes} passes of 256 rows, {passes * groups.MXU / M:.3f} x ideal",
            "x",
            by_jax("tgmm"),
            1.08,
            figure=lambda cycles: cycles / (ideal * passes * groups.MXU / M),
        ),
        Row("dense 8192^3, bf16, of the MXU limit", "share", {"ironwood": (square("bfloat16"),)}, 0.92),
        Row("dense 8192^3, fp8, of the MXU limit", "share", {"ironwood": (square("float8_e4m3fn"),)}, 0.95),
    ]


@dataclass(frozen=True)
class Result:
    name: str
    unit: str
    goal: float | None  # None where there is none, or it is unknown
    lead: float
    figures: dict[str, float | str]  # by column: a figure, or why there is none
    measured_ms: float | None = None

    @property
    def met(self) -> bool | None:
        ours = self.figures["ironwood"]
        if self.goal is None or isinstance(ours, str):
            return None
        return ours >= self.goal if self.unit == "share" else ours <= self.goal


def evaluate(row: Row, reports: Callable[[Call], bundles.Report], absent: Sequence[str] = ()) -> Result:
    """Evaluates a row. `reports` compiles a call or remembers it; `absent` are columns that are not installed."""
    figures = {}
    for column in COLUMNS:
        calls = row.calls.get(column, ())
        if not calls or column in absent:
            figures[column] = "not installed" if calls else "-"
            continue
        compiled = [reports(call) for call in calls]
        try:
            figures[column] = float(row.figure(*(c.read(r) for c, r in zip(calls, compiled, strict=True))))
        except ValueError as error:  # refused by the compiler, or a kernel of an unknown form
            figures[column] = f"failed: {error}"
    goal = row.goal
    if row.lead and isinstance(figures["tokamax"], float):
        goal = figures["tokamax"] / row.lead
    return Result(row.name, row.unit, goal, row.lead, figures, row.measured_ms)


FORMATS = {"cycles": ",.0f", "x": ".3f", "share": ".1%"}


def text_of(figure: float | str | None, unit: str) -> str:
    if isinstance(figure, str):
        return figure.split(":")[0]
    return "-" if figure is None else format(figure, FORMATS[unit])


def line_of(row: Result) -> str:
    """A line of the table; main prints errors below the table."""
    met = {None: "-", True: "yes", False: "no"}[row.met]
    reach = text_of(row.goal, row.unit)
    if row.lead:
        reach = f"tokamax / {row.lead:g}" + (f" = {reach}" if row.goal else "")
        met = met if row.goal else "unknown"
    figures = " | ".join(text_of(row.figures[column], row.unit) for column in COLUMNS)
    cycles = [row.figures[column] if row.unit == "cycles" else None for column in COLUMNS]
    times = [None if not isinstance(count, float) else count / CLOCK_HZ * 1e3 for count in cycles]
    shown = " | ".join("-" if ms is None else f"{ms:.3g}" for ms in (*times, row.measured_ms))
    return f"| {row.name} | {reach} | {figures} | {met} | {shown} |"


TIMES = [f"{column}, ms" for column in (*COLUMNS, "hardware")]
HEADER = f"| compiled | reach | {' | '.join(COLUMNS)} | met | {' | '.join(TIMES)} |\n{'|---' * 10}|"


def compiler(progress: bool = True) -> Callable[[Call], bundles.Report]:
    """Returns a function that compiles a call, once in this run."""
    known = {}

    def report_of(call):
        key = json.dumps([call.builder, call.options, call.flags])
        if key not in known:
            known[key] = bundles.measure(call.builder, flags=call.flags, **call.options)
            if progress:
                options = " ".join(f"{name}={value}" for name, value in call.options.items())
                name = call.builder.rsplit("/", 1)[-1]
                print(f"{len(known)}: {name} {options}, {known[key].compile_s:.0f} s", file=sys.stderr, flush=True)
        return known[key]

    return report_of


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__file__)
    parser.add_argument("--only", type=command.regex, default="", metavar="REGEX", help="rows with this in their names")
    parser.add_argument("--json", action="store_true", help="one object for each line of the table")
    arguments = command.arguments(parser, argv)
    if not importlib.util.find_spec("libtpu"):
        raise ValueError('compiling for TPU7x needs libtpu: pip install -e ".[tpu]"')
    chosen = [row for row in rows() if re.search(arguments.only, row.name)]
    if not chosen:
        raise ValueError(f"--only={arguments.only.pattern}: rows are {', '.join(row.name for row in rows())}")
    versions = {"libtpu": metadata.version("libtpu"), "jax": jax.__version__}
    absent = [] if importlib.util.find_spec("tokamax") else ["tokamax"]
    versions["tokamax"] = "not installed" if absent else metadata.version("tokamax")
    if not arguments.json:
        print(", ".join(f"{name} {version}" for name, version in versions.items()), HEADER, sep="\n\n", flush=True)
    reports, done = compiler(), []
    for row in chosen:
        done.append(evaluate(row, reports, absent))
        if not arguments.json:
            print(line_of(done[-1]), flush=True)
    failed = [(row.name, column, text) for row in done for column, text in row.figures.items() if ":" in str(text)]
    if arguments.json:
        print(json.dumps({"versions": versions, "rows": [vars(row) | {"met": row.met} for row in done]}, indent=1))
    else:
        print("".join(f"\n{name}, {column}: {text}" for name, column, text in failed), end="\n" if failed else "")
    return 1 if any(column == "ironwood" for _, column, _ in failed) else 0


if __name__ == "__main__":
    sys.exit(command.run(main))
