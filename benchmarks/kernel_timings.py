"""The time of kernels by compiled/grid.py, beside 167 times that hardware measured: the constants and their error.

    python benchmarks/kernel_timings.py            the table: measured, predicted, and by cycles alone; compiles nothing
    python benchmarks/kernel_timings.py own        what this project's grouped matmuls wait for, by the same walk
    python benchmarks/kernel_timings.py fit        the constants again, fitted to half of the timings
    python benchmarks/kernel_timings.py run        compiles each kernel again: an hour, with tokamax 0.0.12 and libtpu

kernel_timings.json has the times of tokamax's kernels on one TensorCore of a TPU7x, as tokamax's autotuner stored them,
with their shapes and block sizes. kernel_timings_compiled.json has the cycles of the parts of a step, counted by
compiled/bundles.py in the program of each kernel at those block sizes. A part is what one `pl.when` encloses, or the
rest of a step. This file has what the kernels do in each step of their grid: which parts, and which blocks they read
and write. compiled/grid.py makes a time of both.

**What each effect gains**, in the median error and the share within 8%, all by one set of constants:

                                57 of ragged_dot    all 167
    cycles, even groups           29%      5%
    with groups as drawn          11%     44%       15%     42%       tokamax draws each row's group, see below
    and XLA's copies               4.4%   58%        4.7%   63%
    and DMAs                       1.8%  100%        2.3%   96%       compiled/grid.py
    without latency                                  2.3%   84%       the worst then 21%
    with half the bandwidth                         12%     29%

**Halves.** A timing is fitted if the SHA-256 of its kernel, shapes and block sizes is even, and held back otherwise.
Timings that differ by their results alone (`residuals`, `reduction`) are in the same half. Only the constants depend on
the half: what a step does was read in tokamax's code, and what XLA does in the compiled programs, with all timings in
view, but for 12 of attention, 8 of them held back: these were compiled last, and are 1.1% to 8.1% too long. The
constants in use are round figures near the first fit (1.78 GHz, 3.27 TB/s, 1.18 us; 1.63 TB/s a relayout; 42 us a call,
which are not used), two of which the project had before. With these 12, `fit` gives 1.79 GHz, 2.82 TB/s, 0.94 us and
1.70 TB/s. Of the half that was held back 88% are within 8% by that fit, and 94% by the constants in use.

**Beside the kernel** XLA does the following, and it counts in the measured time:

    residuals     ragged_dot returns its result twice: a copy
    relayout      an array whose last dim is no multiple of 128 is stored with another dim last, as this needs less
                  padding, and is copied into the kernel's layout, or back from it (gpt-oss: 2880)
    transposes    flash_attention takes [B, S, H, D] and its kernel [B, H, S, D]: copies before the kernel, and after it
                  by the SparseCores, at the rate of a relayout

**The version.** The times are of July 2026. Compiled is tokamax 0.0.12, of March, as later versions do not fit them.
For dlhs of ragged_dot they read tile_k as the tile of K, where it was that of the contracted dim: then nine timings
would be faster than the peak of the chip. And their gradient of the cross entropy takes as long with "mean" as with
"sum", where it was slower.

**The groups** of ragged_dot are not even. tokamax draws them: each row's group uniformly at random, with seed 0. So
nearly each group ends within a tile, which two groups then compute: 1.06 to 2 times the tiles of even groups.
"""

import functools
import hashlib
import importlib
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import numpy as np

import command
import groups
import outputs
from compiled import bundles, grid, schedule
from groups import cdiv

TIMINGS = Path(__file__).with_suffix(".json")
COMPILED = Path(__file__).with_name("kernel_timings_compiled.json")


@functools.cache
def timings() -> tuple[dict, ...]:
    """The measured times, in the order of their file."""
    return tuple(json.loads(TIMINGS.read_text())["timings"])


@functools.cache
def compiled() -> dict[str, dict[str, int]]:
    """{key of a kernel: {part of a step: cycles}}"""
    return json.loads(COMPILED.read_text())["kernels"]


def shape_of(text: str) -> tuple[int, ...]:
    """The dims of a text like bf16[8,128]."""
    dims = text.partition("[")[2].rstrip("]")
    return tuple(map(int, dims.split(","))) if dims else ()


def is_fitted(timing: Mapping) -> bool:
    """Whether a timing is in the half that the constants are fitted to."""
    results = ("ms", "residuals", "reduction")
    text = json.dumps({name: value for name, value in timing.items() if name not in results}, sort_keys=True)
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2 == 0


# -- what a kernel does in each step


@dataclass(frozen=True)
class Steps:
    """A call of a kernel: what each step of its grid computes, reads and writes, and what XLA does beside it."""

    parts: dict[str, np.ndarray]  # {part: whether each step executes it}
    operands: tuple[grid.Operand, ...]
    copied: float = 0.0  # bytes that XLA reads and writes in copies and in transposes of dims before the last
    relaid: float = 0.0  # and in copies into another layout

    def cycles(self, cycles: Mapping[str, int]) -> np.ndarray:
        """The cycles of each step, from those of the parts; 0 for a part that the compiled program does not have."""
        return sum(cycles.get(part, 0) * steps for part, steps in self.parts.items())


def groups_of(timing: Mapping) -> np.ndarray:
    """The rows of each group, as tokamax draws them."""
    if not isinstance(timing["groups"], int):
        return np.array(timing["groups"])
    (rows, _), groups = shape_of(timing["lhs"]), timing["groups"]
    return np.bincount(np.random.default_rng(0).choice(groups, (rows,), replace=True), minlength=groups)


def visits(sizes: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """(group, tile of rows) for each visit of a tile by a group that has rows in it."""
    ends = np.cumsum(sizes)
    first, last = (ends - sizes) // tile, cdiv(ends, tile)
    counts = np.where(sizes > 0, last - first, 0)
    group = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return group, first[group] + nth


def relayout_bytes(*shapes: tuple[int, ...]) -> float:
    """The bytes that XLA reads and writes to copy bfloat16 arrays whose last dim is no multiple of 128."""
    return sum(2 * 2.0 * math.prod(shape) for shape in shapes if shape[-1] % 128)


def ragged_dot(timing: Mapping) -> Steps:
    """tokamax's ragged_dot, v1: gmm (also with rhs transposed), or tgmm if the rows are contracted.

    The grid of gmm is (columns, visits of tiles, K), that of tgmm (columns, K, visits).
    """
    (rows, K), sizes, config = shape_of(timing["lhs"]), groups_of(timing), timing["config"]
    is_tgmm, transposed = timing["contract"][0] == [0], timing["contract"][1] == [2]
    N = shape_of(timing["rhs"])[1 if is_tgmm or transposed else 2]
    m, k, n, count = (config[name] for name in ("tile_m", "tile_k", "tile_n", "input_buffer_count"))
    group, tile = visits(sizes, m)
    across_k, across_n, ahead = cdiv(K, k), cdiv(N, n), dict(buffers=count, lookahead=count > 2)
    if is_tgmm:
        j, i, v = (index.ravel() for index in np.indices((across_n, across_k, len(tile))))
    else:
        j, v, i = (index.ravel() for index in np.indices((across_n, len(tile), across_k)))
    height, width = np.minimum(k, K - i * k), np.minimum(n, N - j * n)
    lhs = grid.Operand("lhs", tile[v] * across_k + i, 2.0 * m * height, **ahead)
    if is_tgmm:
        matrix = (group[v] * across_k + i) * across_n + j
        begins, ends = np.diff(matrix, prepend=-1) != 0, np.diff(matrix, append=-1) != 0
        rhs = grid.Operand("rhs", tile[v] * across_n + j, 2.0 * m * width, **ahead)
        out = grid.Operand("out", matrix, 2.0 * height * width, output=True)
        result = (len(sizes), K, N)
    else:
        begins, ends = i == 0, i == across_k - 1
        rhs = grid.Operand("rhs", (group[v] * across_n + j) * across_k + i, 2.0 * height * width)
        out = grid.Operand("out", tile[v] * across_n + j, 2.0 * m * width, output=True)
        result = (rows, N)
    parts = {"step": np.ones(len(v))}
    if is_tgmm or across_k > 1:  # else the program has no branches for them
        parts |= {"first": begins, "last": ends} | ({} if is_tgmm else {"not last": ~ends})
    copied = 2 * 2.0 * math.prod(result) * timing["residuals"]
    return Steps(parts, (lhs, rhs, out), copied, relayout_bytes((rows, K), shape_of(timing["rhs"]), result))


def cross_entropy(timing: Mapping) -> Steps:
    """tokamax's linear_softmax_cross_entropy_loss: a grid of (rows, vocabulary, hidden)."""
    (B, H), (_, V), config = shape_of(timing["x"]), shape_of(timing["w"]), timing["config"]
    b, h, v = (config[f"{name}_block_size"] for name in "bhv")
    i, j, k = (index.ravel() for index in np.indices((cdiv(B, b), cdiv(V, v), cdiv(H, h))))
    width = np.minimum(v, V - j * v)
    x = grid.Operand("x", i * cdiv(H, h) + k, 4.0 * b * h)
    w = grid.Operand("w", j * cdiv(H, h) + k, 2.0 * h * width)
    parts = {"step": np.ones(len(i))}
    parts["end"] = (j == cdiv(V, v) - 1) & (k == cdiv(H, h) - 1)
    if H > h:
        parts |= {"first": k == 0, "not first": k > 0, "last": k == cdiv(H, h) - 1}
    if V % v:
        parts["partial"] = j == V // v
    return Steps(parts, (x, w))


def cross_entropy_vjp(timing: Mapping) -> Steps:
    """Its gradient: for each block of logits, passes over the hidden dim for the logits and for both gradients.

    In the second pass a step reads the sums of both gradients so far, adds, writes them, and waits for the writes
    itself. It is three steps here: dw, dx, and the wait.
    """
    (B, H), (_, V), config = shape_of(timing["x"]), shape_of(timing["w"]), timing["config"]
    b, h, v = (config[f"{name}_block_size"] for name in "bhv")
    hs = cdiv(H, h)
    inner = [("logits", k) for k in range(hs)] + [(name, k) for k in range(hs) for name in ("dw", "dx", "wait")]
    kinds, ks = np.array([name for name, _ in inner]), np.array([k for _, k in inner])
    i, j, s = (index.ravel() for index in np.indices((cdiv(B, b), cdiv(V, v), len(inner))))
    kind, k, step, width = kinds[s], ks[s], np.arange(len(s)), np.minimum(v, V - j * v)
    x = grid.Operand("x", i * hs + k, 4.0 * b * h)
    w = grid.Operand("w", j * hs + k, 2.0 * h * width)
    logits, dw, dx, wait = (kind == name for name in ("logits", "dw", "dx", "wait"))
    dw_bytes, dx_bytes = 4.0 * h * width, 4.0 * b * h
    sums = (  # read from the begin of dw on, each until its matmul ends; written after it, until the wait
        grid.Operand("dw read", step, np.where(dx & (i > 0), dw_bytes, 0), buffers=2),
        grid.Operand("dx read", step, np.where(wait & (j > 0), dx_bytes, 0), buffers=3),
        grid.Operand("dw written", step, np.where(dw, dw_bytes, 0), buffers=3, output=True),
        grid.Operand("dx written", step, np.where(dx, dx_bytes, 0), buffers=2, output=True),
    )
    parts = {"step": logits | dw, "first": logits & (k == 0), "not first": logits & (k > 0)}
    parts |= {"logits": logits, "gradients": dw, "softmax": dw & (k == 0)}
    parts |= {"dx": dx & (j == 0), "dx added": dx & (j > 0)}
    parts |= {"dw scaled": dw & (i == cdiv(B, b) - 1), "dx scaled": dx & (j == cdiv(V, v) - 1)}
    if B > b:  # else dw is never added to, and part of "gradients"
        parts |= {"dw": dw & (i == 0), "dw added": dw & (i > 0)}
    if V % v:
        parts["partial"] = logits & (j == V // v)
    return Steps(parts, (x, w, *sums))


def attention_blocks(T: int, S: int, rows: int, cols: int, causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(block of queries, block of keys, whether it is masked) for each pair that is computed, by queries."""
    i, j = (index.ravel() for index in np.indices((T // rows, S // cols)))
    seen = (j * cols < (i + 1) * rows) | (not causal)
    masked = ((j + 1) * cols - 1 > i * rows) & causal
    return i[seen], j[seen], masked[seen]


def attention_parts(row: np.ndarray, masked: np.ndarray, causal: bool, is_row_one_step: bool) -> dict[str, np.ndarray]:
    """The parts of the steps of attention. Where a row of blocks has one step, its first and last need no branch."""
    parts = {"step": np.ones(len(row))}
    if not is_row_one_step:
        parts |= {"first": np.diff(row, prepend=-1) != 0, "last": np.diff(row, append=-1) != 0}
    return parts | ({"masked": masked, "full": ~masked} if causal else {})


def padded(width: int) -> int:
    """A last dim as it is stored: a multiple of 128."""
    return cdiv(width, 128) * 128


def flash_attention(timing: Mapping) -> Steps:
    """tokamax's splash attention: a grid of (batch, heads, pairs of blocks that are not masked), by queries."""
    (B, T, N, H), (_, S, K, V), config = shape_of(timing["q"]), shape_of(timing["v"]), timing["config"]
    rows, cols = config["block_q"], config["block_kv"]
    i, j, masked = attention_blocks(T, S, rows, cols, timing["causal"])
    head = np.repeat(np.arange(B * N), len(i))
    i, j, masked = (np.tile(each, B * N) for each in (i, j, masked))
    query, key = head * (T // rows) + i, (head // (N // K)) * (S // cols) + j
    stored = lambda width, layout: padded(width) if layout == 1 else width
    operands = [
        grid.Operand("q", query, 2.0 * rows * stored(H, config["q_layout"])),
        grid.Operand("k", key, 2.0 * cols * stored(H, config["k_layout"])),
        grid.Operand("v", key, 2.0 * cols * stored(V, config["v_layout"])),
        grid.Operand("out", query, 2.0 * rows * padded(V), output=True),
    ]
    if timing["residuals"]:
        operands += [grid.Operand(name, query, 4.0 * rows * 128, output=True) for name in ("logsumexp", "maximum")]
    parts = attention_parts(query, masked, timing["causal"], is_row_one_step=S == cols and not timing["causal"])
    layouts = {name: config[f"{name}_layout"] for name in "qkv"}
    arrays = {"q": B * T * N * H, "k": B * S * K * H, "v": B * S * K * V}
    copied, relaid = 2 * 2.0 * arrays["q"], 2 * 2.0 * B * T * N * V  # q is scaled; out is transposed
    for name in "kv":
        if layouts[name] == 1 or H % 128 == 0:  # else it is stored as the kernel reads it
            copied += 2 * 2.0 * arrays[name]
    maxima = 2 * 4.0 * B * N * T * 128 * timing["residuals"]
    return Steps(parts, tuple(operands), copied + maxima, relaid)


def flash_attention_vjp(timing: Mapping) -> Steps:
    """Its gradient: by keys, with dq in partial sums in HBM, one for each block of keys. Its grid has all pairs."""
    (B, T, N, H), (_, S, K, V), config = shape_of(timing["q"]), shape_of(timing["v"]), timing["config"]
    rows, cols = config["block_q_dkv"], config["block_kv_dkv"]
    batch, j, n, i = (index.ravel() for index in np.indices((B, S // cols, N, T // rows)))
    head, kv_head = batch * N + n, batch * K + n // (N // K)
    query, key, group = head * (T // rows) + i, head * (S // cols) + j, kv_head * (S // cols) + j
    seen = (j * cols < (i + 1) * rows) | (not timing["causal"])
    masked = seen & ((j + 1) * cols - 1 > i * rows)
    sums = S // cols
    itemsize = 2.0 if sums <= 4 else 4.0
    operands = [
        grid.Operand("q", query, 2.0 * rows * padded(H)),
        grid.Operand("k", group, 2.0 * cols * padded(H)),
        grid.Operand("v", group, 2.0 * cols * padded(V)),
        grid.Operand("logsumexp", query, 4.0 * rows * 8),
        grid.Operand("dout", query, 2.0 * rows * padded(V)),
        grid.Operand("di", query, 4.0 * rows * 8),
        grid.Operand("dq", np.arange(len(i)), itemsize * rows * padded(H), output=True),
        grid.Operand("dk", key, 2.0 * cols * padded(H), output=True),
        grid.Operand("dv", key, 2.0 * cols * padded(V), output=True),
    ]
    parts = {"step": np.ones(len(i))} | ({"first": np.diff(key, prepend=-1) != 0} if T > rows else {})
    parts |= {"last": np.diff(key, append=-1) != 0} if T > rows else {}
    parts |= {"masked": masked, "full": seen & ~masked} if timing["causal"] else {}
    heads, inputs = B * T * N, 2 * 2.0 * B * (T * N * (H + V) + S * K * (H + V))  # q, dout, k and v
    results = 2 * 2.0 * B * (T * N * H + S * K * (H + V))
    copied = heads * ((2 + 4) * V + (4 + 2) * V)  # di: out as float32, times dout
    copied += heads * (itemsize * sums * padded(H) + 2.0 * H)  # the sums of dq
    is_padded = H % 128 > 0  # then what the kernel reads has another dim last
    return Steps(parts, tuple(operands), copied + inputs * (not is_padded), results + inputs * is_padded)


STEPS: dict[str, Callable[[Mapping], Steps]] = {
    "ragged_dot": ragged_dot,
    "flash_attention": flash_attention,
    "flash_attention_vjp": flash_attention_vjp,
    "linear_softmax_cross_entropy_loss": cross_entropy,
    "linear_softmax_cross_entropy_loss_vjp": cross_entropy_vjp,
}


BRANCHES = {  # the parts in the order of their branches in a step's program; "" is never executed
    "gmm": ["first", "last", "not last"],
    "tgmm": ["first", "step", "last"],
    "flash_attention": ["first", "full", "masked", "last"],
    "flash_attention_vjp": ["first", "full", "masked", "last"],
    "linear_softmax_cross_entropy_loss": ["partial", "first", "not first", "last", "end"],
    "linear_softmax_cross_entropy_loss_vjp": [
        *("logits", "partial", "first", "not first", "gradients", "softmax"),
        *("dw", "", "dx", "", "dw added", "dw scaled", "dx added", "dx scaled"),
    ],
}
SMALL = 20  # cycles of a branch that is left out


def branches_of(timing: Mapping) -> list[str]:
    """The names of BRANCHES that the program of a timing's kernel has."""
    kind = ("tgmm" if timing["contract"][0] == [0] else "gmm") if "contract" in timing else timing["kernel"]
    parts, names = STEPS[timing["kernel"]](timing).parts, BRANCHES[kind]
    if "dw" in names and "dw" not in parts:  # one block of rows: no branch for what always runs
        names = [*names[: names.index("dw")], "dx", "", "dx added", "dx scaled"]
    return [name for name in names if not name or name in parts]


def parts_of(kernel: bundles.Kernel, names: Sequence[str], may_lack: str = "") -> dict[str, int]:
    """{part: cycles} of a kernel's grid. "step" has the loop over the grid, and what always runs in it.

    Args:
      names: of the branches, in their order.
      may_lack: one of them that may be missing, as the program has it among its copies, in "step".

    Raises:
      ValueError: the program has other branches.
    """
    total = lambda region: region.cycles + sum(map(total, region.children))
    loop = max((r for r, _ in bundles.walk(kernel.root) if r.kind in ("loop", "grid")), key=total)
    parts, branches = {"step": loop.cycles}, []

    def enter(regions):
        for region in regions:
            if region.kind == "copy" or any(child.kind == "loop" for child in region.children):
                parts["step"] += total(region)  # requests blocks
            elif total(region) >= SMALL:
                branches.append(region)
                enter(region.children)

    outer = [region for region in loop.children if region.kind != "copy" and total(region) >= SMALL]
    if len(outer) == 1 and 2 * total(outer[0]) > total(loop):  # a step; the grid has iterations without one, too
        parts["step"] += outer[0].cycles + sum(total(copy) for copy in loop.children if copy.kind == "copy")
        loop = outer[0]
    enter(loop.children)
    if len(branches) == len(names) - 1:
        names = [name for name in names if name != may_lack]
    if len(branches) != len(names):
        cycles = ", ".join(str(total(branch)) for branch in branches)
        raise ValueError(f"{kernel.name} has branches of {cycles} cycles in a step, not {', '.join(names)}")
    for name, branch in zip(names, branches, strict=True):
        if name:
            parts[name] = parts.get(name, 0) + branch.cycles
    return parts


def key_of(timing: Mapping) -> str:
    """The name of a timing's kernel: what determines the program of a step."""
    config = " ".join(f"{name}={value}" for name, value in sorted(timing["config"].items()) if name != "combine_scopes")
    if timing["kernel"] == "ragged_dot":
        (_, K), (*_, N) = shape_of(timing["lhs"]), shape_of(timing["rhs"])
        kind = {1: "gmm", 2: "gmm transposed", 0: "tgmm"}[timing["contract"][1][0]]
        return f"{kind} K={K} rhs={shape_of(timing['rhs'])[1:] if kind != 'tgmm' else N} {config}"
    if "q" in timing:
        heads = "x".join(str(shape_of(timing[name])[3]) for name in "qv")
        one = "" if "first" in STEPS[timing["kernel"]](timing).parts else "one step a row "
        return f"{timing['kernel']} {heads} {'causal ' * timing['causal']}{one}{config}"
    (B, H), (b, h) = shape_of(timing["x"]), (timing["config"][f"{name}_block_size"] for name in "bh")
    kinds = {"one block of hidden": H == h}
    kinds["one block of rows"] = B == b and timing["kernel"].endswith("vjp")
    return " ".join([timing["kernel"], config, *(kind for kind, is_so in kinds.items() if is_so)])


# -- predicted times


@dataclass(frozen=True)
class Beside:
    """The rates of what XLA does beside the kernels: a relayout is fitted, a copy is that of hardware.py."""

    copied_bytes_per_s: float = schedule.TPU7X.hbm_bytes_per_s
    relaid_bytes_per_s: float = 1.65e12
    start_s: float = 0.0  # of each call: small operations, such as those that list the tiles of ragged_dot


@dataclass(frozen=True)
class Prediction:
    seconds: float
    compute_s: float  # by cycles alone, at the same clock; XLA's work included
    beside_s: float


@functools.cache
def _events(kernel: str, text: str) -> tuple[list, list[str], Steps]:
    timing = json.loads(text)
    steps = STEPS[kernel](timing)
    cycles = steps.cycles(compiled()[key_of(timing)]).tolist()
    return grid.events(cycles, steps.operands), [operand.name for operand in steps.operands], steps


def predicted(timing: Mapping, memory: grid.Memory = grid.TPU7X, beside: Beside = Beside()) -> Prediction:
    """The predicted time of a timing's call.

    Of a cross entropy at most three blocks of rows are walked. Each further one takes as long as the third.
    """
    if "x" in timing:
        (B, H), b = shape_of(timing["x"]), timing["config"]["b_block_size"]
        if (count := cdiv(B, b)) > 3:
            fewer = [timing | {"x": f"f32[{b * blocks},{H}]"} for blocks in (2, 3)]
            two, three = (predicted(each, memory, replace(beside, start_s=0)) for each in fewer)
            last = lambda figure: figure(three) + (count - 3) * (figure(three) - figure(two))
            start = beside.start_s
            return Prediction(last(lambda p: p.seconds) + start, last(lambda p: p.compute_s) + start, start)
    shape = {name: value for name, value in timing.items() if name not in ("ms", "reduction")}
    events, names, steps = _events(timing["kernel"], json.dumps(shape, sort_keys=True))
    time = grid.timed(events, names, memory)
    other_s = beside_s(steps, beside)
    return Prediction(time.seconds + other_s, time.compute_s + other_s, other_s)


# -- errors, and the fit


def counted() -> list[dict]:
    """The timings whose kernels were compiled."""
    return [timing for timing in timings() if key_of(timing) in compiled()]


def kernel_ms_per_head(T: int, H: int, causal: bool) -> float | None:
    """The measured ms of a head of flash_attention without XLA's part, which is predicted; None if none is known."""
    for timing in timings():
        if timing["kernel"] != "flash_attention" or timing["causal"] != causal:
            continue
        (B, tokens, N, width), (*_, V) = shape_of(timing["q"]), shape_of(timing["v"])
        if (tokens, width, V) == (T, H, H):
            return (timing["ms"] - beside_s(flash_attention(timing)) * 1e3) / (B * N)
    return None


def beside_s(steps: Steps, beside: Beside = Beside()) -> float:
    """The predicted seconds of what XLA does beside a kernel."""
    copies = steps.copied / beside.copied_bytes_per_s + steps.relaid / beside.relaid_bytes_per_s
    return beside.start_s + copies


def errors(chosen: Sequence[Mapping], memory: grid.Memory = grid.TPU7X, beside: Beside = Beside()) -> list[float]:
    """predicted / measured - 1 of each timing."""
    return [predicted(timing, memory, beside).seconds * 1e3 / timing["ms"] - 1 for timing in chosen]


def summary(values: Sequence[float]) -> dict[str, float]:
    """The median error, the shares within 8% and 20%, and the largest."""
    sizes = sorted(map(abs, values))
    within = lambda limit: sum(size <= limit for size in sizes) / len(sizes)
    shares = {"within 8%": within(0.08), "within 20%": within(0.2)}
    return {"median": statistics.median(sizes)} | shares | {"worst": sizes[-1]}


FITTED = ("clock_hz", "hbm_bytes_per_s", "latency_s")


def fit() -> tuple[grid.Memory, Beside]:
    """The constants with the least squares of log(predicted / measured) over the fitted half.

    Timings of one program count as much as one: the square root of their number divides their errors.
    """
    from scipy.optimize import least_squares

    chosen = list(filter(is_fitted, counted()))
    alike = Counter(map(key_of, chosen))
    weights = np.array([alike[key_of(timing)] ** -0.5 for timing in chosen])
    start = np.array([*(getattr(grid.TPU7X, name) for name in FITTED), Beside().relaid_bytes_per_s, 1e-5])

    def constants(scales):
        *of_memory, relaid, small = (scales * start).tolist()
        memory = replace(grid.TPU7X, **dict(zip(FITTED, of_memory, strict=True)))
        return memory, Beside(relaid_bytes_per_s=relaid, start_s=small)

    def residuals(scales):
        return np.log1p(errors(chosen, *constants(scales))) * weights

    result = least_squares(residuals, np.ones(len(start)), diff_step=0.02, loss="soft_l1", f_scale=0.05)
    return constants(result.x)


# -- command line


def table() -> str:
    """A summary of both halves and of each kernel, and the table of all timings, worst first."""
    rows = [(error, predicted(timing), timing) for timing, error in zip(counted(), errors(counted()), strict=True)]
    kinds = {"fitted": is_fitted, "held back": lambda timing: not is_fitted(timing)}
    kinds |= {kernel: lambda timing, kernel=kernel: timing["kernel"] == kernel for kernel in STEPS}
    missing = "; the kernels of the others were not compiled" if len(rows) < len(timings()) else ""
    lines = [f"{len(rows)} of {len(timings())} timings{missing}.", ""]
    lines += ["| timings | number | median error | within 8% | within 20% | worst | by cycles alone, median |"]
    lines += ["|---" * 7 + "|"]
    for name, which in kinds.items():
        chosen = [(error, p.compute_s * 1e3 / t["ms"] - 1) for error, p, t in rows if which(t)]
        if chosen:
            with_memory, alone = (summary(column) for column in zip(*chosen, strict=True))
            shares = " | ".join(f"{share:.1%}" for share in with_memory.values())
            lines.append(f"| {name} | {len(chosen)} | {shares} | {alone['median']:.1%} |")
    lines += ["", "| kernel | shapes | blocks | half | measured, ms | predicted | error | by cycles alone |"]
    lines += ["|---" * 8 + "|"]
    for error, prediction, timing in sorted(rows, key=lambda row: -abs(row[0])):
        shapes = ", ".join(timing[name] for name in ("lhs", "rhs", "q", "k", "x", "w") if name in timing)
        blocks = " ".join(f"{value:g}" for value in timing["config"].values())
        half = "fitted" if is_fitted(timing) else "held back"
        name = timing["kernel"] + ", residuals" * bool(timing.get("residuals"))
        predicted_ms, alone_ms = (f"{seconds * 1e3:.3f}" for seconds in (prediction.seconds, prediction.compute_s))
        times = f"{timing['ms']:.3f} | {predicted_ms} | {error:+.1%} | {alone_ms}"
        lines.append(f"| {name} | {shapes} | {blocks} | {half} | {times} |")
    return "\n".join(lines)


def own_table() -> str:
    """The times of this project's grouped matmuls in the shapes of recipes: by their stored cycles, and with waits.

    The cycles of a call are spread over its tiles by their heights. "one ahead" is with two buffers for rows in tgmm.
    """
    import kernels
    import tuned

    lines = ["| kernel and shape | ms, by cycles | with waits | one ahead | waits for |", "|---" * 5 + "|"]
    for key, entry in tuned.read(tuned.CHECKED_IN).items():
        name, s = tuned.shape_of(key)
        if name not in ("gmm", "tgmm"):
            continue
        kind = groups.Tiles if name == "gmm" else groups.TgmmTiles
        sizes, tiles = kernels.ragged(s["M"], s["E"]), kind(**entry["blocks"])
        plan = grid.listed(sizes, s["M"], tiles, s["dtype"])
        heights = np.array(groups.heights(tiles))[plan.tile_height].astype(float)
        one_pass = entry["cycles"] * heights / heights.sum()
        passes = cdiv(s["N"], tiles.cols) if name == "gmm" else cdiv(s["K"], tiles.k) * cdiv(s["N"], tiles.n)
        shallow = tiles if name == "gmm" else tiles._replace(buffers=2)
        now, before = (
            kernels.walked(name, s, each, plan, one_pass / passes, entry["cycles"]) for each in (tiles, shallow)
        )
        alone, longest = entry["cycles"] / grid.TPU7X.clock_hz, max(now.waits_s, key=now.waits_s.get, default="")
        times = " | ".join(f"{seconds * 1e3:.3f}" for seconds in (alone, now.seconds))
        share = f"{now.waits_s.get(longest, 0) / now.seconds:.1%}"
        shown = f"{before.seconds * 1e3:.3f}" if name == "tgmm" else "-"
        lines.append(f"| {key.removesuffix(' chip=tpu7x')} | {times} | {shown} | {longest} {share} |")
    return "\n".join(lines)


def build(timing: Mapping) -> tuple:
    """(function, [jax.ShapeDtypeStruct, ...]) of a timing's call, as compiled/bundles.py wants them."""
    import jax
    import jax.numpy as jnp

    dtypes = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32}
    shaped = lambda text: jax.ShapeDtypeStruct(shape_of(text), dtypes[text.partition("[")[0]])
    ops, config = "tokamax._src.ops.", timing["config"]
    if timing["kernel"] == "ragged_dot":
        kernel = importlib.import_module(ops + "ragged_dot.pallas_mosaic_tpu_kernel")
        precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
        options = dict(precision=precision, out_dtype=jnp.bfloat16, input_buffer_count=config["input_buffer_count"])
        options["tiling"] = tuple(config[name] for name in ("tile_m", "tile_k", "tile_n"))

        def run(lhs, rhs, sizes):
            if timing["contract"][0] == [0]:
                return kernel.tgmm(lhs.mT, rhs, group_sizes=sizes, **options)
            return kernel.gmm(lhs, rhs, group_sizes=sizes, transpose_rhs=timing["contract"][1] == [2], **options)

        sizes = jax.ShapeDtypeStruct((len(groups_of(timing)),), jnp.int32)
        return run, [shaped(timing["lhs"]), shaped(timing["rhs"]), sizes]
    if timing["kernel"].startswith("flash"):
        return _build_attention(timing, importlib.import_module, shaped)
    kernel = importlib.import_module(ops + "linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel")
    kernel._get_vmem_limit_bytes = lambda: 48 << 20  # libtpu 0.0.50 needs 0.1% more than the 32 MiB of that time
    arrays = [shaped(timing[name]) for name in ("x", "labels", "w")]
    options = dict(config, reduction=timing["reduction"])
    if timing["kernel"].endswith("vjp"):
        dout, lse = shaped("f32[]"), jax.ShapeDtypeStruct(arrays[1].shape, jnp.float32)
        return partial(kernel.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu, **options), [dout, lse, *arrays]
    return partial(kernel.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu, **options), arrays


def _build_attention(timing: Mapping, module: Callable, shaped: Callable) -> tuple:
    """`build` of flash_attention and its gradient."""
    import jax
    import jax.numpy as jnp

    base, forward, backward = (
        module(f"tokamax._src.ops.attention.{name}") for name in ("base", "pallas_mosaic_tpu", "pallas_mosaic_tpu_vjp")
    )
    layouts = module("tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel").QKVLayout
    q, k, v = (shaped(timing[name]) for name in "qkv")
    options = dict.fromkeys(("bias", "dropout_mask", "paging_info", "q_indices", "k_indices"))
    options |= dict(precision=(jax.lax.DotAlgorithmPreset.BF16_BF16_F32,) * 2, logits_dtype=jnp.dtype("float32"))
    options |= dict(logits_scale=q.shape[-1] ** -0.5, logits_soft_cap=timing["soft_cap"], dropout_rate=0.0)
    options |= dict(mask=base.Mask(is_causal=timing["causal"]), normalize_output=True)
    options |= dict(return_residuals=timing["residuals"])
    config = {name: layouts(value) if "layout" in name else value for name, value in timing["config"].items()}
    if timing["kernel"] == "flash_attention":
        op = forward.PallasMosaicTpuFlashAttention()
        return lambda *qkv: op._fwd(*qkv, **options, config=forward.Config(**config)), [q, k, v]
    op, (B, T, N, _) = backward.PallasMosaicTpuFlashAttentionVjp(), q.shape
    statistic = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    out = jax.ShapeDtypeStruct((B, T, N, v.shape[3]), q.dtype)

    def run(maximum, logsumexp, *arrays):
        return op._fwd((maximum, logsumexp), *arrays, **options, config=backward.Config(**config))[0]

    return run, [statistic, statistic, out, out, q, k, v]


def run(only: re.Pattern) -> None:
    """Compiles each program whose key matches, one timing of each, and stores the cycles of its parts."""
    kernels = dict(compiled())
    for timing in {key_of(timing): timing for timing in timings()}.values():
        if not re.search(only, key_of(timing)):
            continue
        report = bundles.measure(f"{__file__}:build", timeout_s=3600, timing=timing)
        if report.error:
            raise ValueError(f"{key_of(timing)}: {report.error}")
        (kernel,) = report.kernels
        may_lack = "last" if timing["kernel"] == "flash_attention_vjp" else ""
        kernels[key_of(timing)] = parts_of(kernel, branches_of(timing), may_lack)
        print(f"{key_of(timing)}: {kernels[key_of(timing)]}, {report.compile_s:.0f} s", flush=True)
        versions = {name: metadata.version(name) for name in ("libtpu", "jax", "tokamax")}
        with outputs.replacing(COMPILED) as file:
            file.write(json.dumps({"versions": versions, "kernels": dict(sorted(kernels.items()))}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__)
    parser.add_argument(
        "what", nargs="?", choices=("table", "own", "fit", "run"), default="table", help="default: table"
    )
    parser.add_argument("--only", type=command.regex, default="", metavar="REGEX", help="run: kernels by their names")
    arguments = command.arguments(parser, argv)
    if arguments.what == "run":
        return run(arguments.only)
    if arguments.what in ("table", "own"):
        return print(table() if arguments.what == "table" else own_table())
    for part in (which := fit()):
        print(part)
    for name, half in (("fitted", True), ("held back", False)):
        print(f"{name}: {summary(errors([timing for timing in counted() if is_fitted(timing) == half], *which))}")


if __name__ == "__main__":
    sys.exit(command.run(main))
