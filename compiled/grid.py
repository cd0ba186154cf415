"""The time of a Pallas kernel: the steps of its grid beside the DMAs of their blocks.

    operands = [Operand("lhs", index=tile, nbytes=1 << 20), Operand("out", index=tile, nbytes=1 << 19, output=True)]
    walk(cycles, operands).seconds

**Idea.** compiled/bundles.py counts the cycles of a step. They are the time of a kernel only if each block is in VMEM
when its step begins. A kernel requests a block one step ahead, into the other of two buffers. So a block must arrive
within one step. The bytes of a call may take far less time than its cycles, and the kernel may wait nevertheless: a
group of a grouped matmul has several steps, and the matrix of the next group has only the last of them to arrive in.

**Formula.** A clock `now`, and a queue for the memory of the core:

    request     begin = max(now, end of the queue), end = begin + bytes / W      the queue then ends at `end`
    arrival     end + latency
    a step      now = max(now, arrival of its blocks) + cycles / clock

The steps do as the pipeline of Pallas does (`emit_pipeline`, and the grid of `pallas_call`). Step i first requests the
inputs of step i + buffers - 1, if they differ from those of the step before that. Then it waits for its own inputs and
computes. If its output is complete, it requests the write. The next step waits for this write at its own end, since its
successor needs the buffer. With `lookahead`, an input is requested as soon as a buffer is free, however many steps
ahead. This is `pl.Buffered(use_lookahead=True)`, and what gmm.py does with the matrices of its groups.

The kernels of gmm.py loop over a plan of their own, which depends on the groups' sizes. For given sizes, `executions`
has how often each part of the compiled kernel is executed, and `moved_bytes` the bytes between HBM and VMEM.

**Constants** (`TPU7X`). The clock of 1.76 GHz and the 3.2 TB/s of a copy are those of compiled/schedule.py. The latency
of 1 us is the only one that is new. benchmarks/kernel_timings.py fits all three to half of the times that hardware
measured, of those kernels that were compiled, and checks them on the others.

**Left out.** Reads and writes share one queue, in order of their requests. A row's width does not matter here. Other
users of HBM: the other core of the chip, SparseCores and collectives beside the kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import groups
from hardware import CHIPS, HBM_REACHED, KERNEL_CLOCK

CHIP = CHIPS["tpu7x"]


COLUMN_BYTES = 128 * 4  # of a row of a float32 array [rows, 1] in HBM, where it has the lanes of a register


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A core's clock in a kernel, and its way to HBM."""

    clock_hz: float
    hbm_bytes_per_s: float
    latency_s: float  # from the end of a transfer to the step that waits for it


TPU7X = Memory(
    clock_hz=KERNEL_CLOCK * CHIP.running_hz,
    hbm_bytes_per_s=HBM_REACHED * CHIP.hbm_bytes_per_s / CHIP.devices,
    latency_s=1e-6,
)


@dataclass(frozen=True)
class Operand:
    """The blocks of an operand that the steps of a grid read, or write.

    Args:
      index: a number for the block of each step; equal numbers in a row are one block.
      nbytes: of a block, or of the block of each step. A block of 0 bytes is not moved.
      buffers: in VMEM.
      output: whether the steps write it.
      lookahead: whether an input is requested as soon as a buffer is free, not `buffers - 1` steps ahead.
    """

    name: str
    index: Sequence[int]
    nbytes: float | Sequence[float]
    buffers: int = 2
    output: bool = False
    lookahead: bool = False


@dataclass(frozen=True)
class Time:
    """The seconds of a call of a kernel."""

    seconds: float
    compute_s: float
    hbm_s: float  # of all transfers, one after the other
    waits_s: dict[str, float] = field(default_factory=dict)  # of the steps, by operand; with the start and the end


REQUEST, WAIT, COMPUTE = range(3)


def events(cycles: Sequence[float], operands: Sequence[Operand]) -> list[tuple[int, int, float]]:
    """Lists what the steps do: (REQUEST, transfer, bytes), (WAIT, transfer, operand) or (COMPUTE, 0, cycles).

    Raises:
      ValueError: an input has no buffer, or an output fewer than two.
    """
    steps, at = len(cycles), [([], [], [], []) for _ in cycles]  # requests, waits; then of the outputs
    transfers, final = 0, []
    for number, operand in enumerate(operands):
        if operand.buffers < 1 + operand.output:
            raise ValueError(f"{operand.name}: {operand.buffers} buffers; an input needs one, an output two")
        index = np.broadcast_to(np.asarray(operand.index), steps)
        first = np.flatnonzero(np.diff(index, prepend=index[:1] - 1))
        nbytes = np.broadcast_to(np.asarray(operand.nbytes, float), steps)[first].tolist()
        first = first.tolist()
        for block, (begin, size) in enumerate(zip(first, nbytes, strict=True)):
            if not size:
                continue
            request, wait = (REQUEST, transfers, size), (WAIT, transfers, number)
            transfers += 1
            if operand.output:
                end = first[block + 1] - 1 if block + 1 < len(first) else steps - 1
                at[end][2].append(request)
                awaits = block + operand.buffers - 1  # its first step waits, as the block after it needs the buffer
                (at[first[awaits]][3] if awaits < len(first) else final).append(wait)
            else:
                ahead = first[max(0, block + 1 - operand.buffers)] if operand.lookahead else begin + 1 - operand.buffers
                at[max(0, ahead)][0].append((begin, request))
                at[begin][1].append(wait)
    listed = []
    for count, (requests, waits, writes, written) in zip(cycles, at, strict=True):
        if not listed:  # the blocks of the first step come before those of the next ones
            requests.sort(key=lambda pair: pair[0])
        listed += [*(request for _, request in requests), *waits, (COMPUTE, 0, count), *writes, *written]
    return listed + final


def walk(cycles: Sequence[float], operands: Sequence[Operand], memory: Memory = TPU7X) -> Time:
    """The time of a call whose steps compute for these cycles, each. Raises ValueError as `events` does."""
    return timed(events(cycles, operands), [operand.name for operand in operands], memory)


def timed(events: Sequence[tuple[int, int, float]], names: Sequence[str], memory: Memory) -> Time:
    """The time of a list of `events` of operands with these names."""
    now = queue = nbytes = compute = 0.0
    arrival, waits = {}, [0.0] * len(names)
    for kind, transfer, amount in events:
        if kind == COMPUTE:
            now += amount / memory.clock_hz
            compute += amount
        elif kind == REQUEST:
            queue = max(now, queue) + amount / memory.hbm_bytes_per_s
            arrival[transfer] = queue + memory.latency_s
            nbytes += amount
        elif (until := arrival[transfer]) > now:
            waits[amount] += until - now
            now = until
    waits_s = {name: seconds for name, seconds in zip(names, waits, strict=True) if seconds}
    return Time(now, compute / memory.clock_hz, nbytes / memory.hbm_bytes_per_s, waits_s)


# -- the kernels of gmm.py, for given group sizes


def listed(group_sizes, num_rows: int, tiles, dtype, out_dtype=None) -> groups.Plan:
    """The plan of a call with these group sizes, as numpy arrays without the unused ends of the lists."""
    import jax
    import jax.numpy as jnp

    unit = groups.register_rows(dtype, out_dtype or groups.result_dtype(dtype))
    step = tiles.step if isinstance(tiles, groups.Tiles) else tiles.rows
    shape = (0, len(group_sizes), num_rows, unit, step, tiles)
    plan = jax.jit(lambda sizes: groups.plan_of(sizes, *shape))(jnp.asarray(group_sizes, jnp.int32))
    totals = np.asarray(plan.totals)
    sizes = [totals[0] if name.startswith("tile") else totals[1] for name in groups.Plan._fields[1:]]
    return groups.Plan(totals, *(np.asarray(array)[:size] for array, size in zip(plan[1:], sizes, strict=True)))


def tile_counts(group_sizes, num_rows: int, tiles, dtype, out_dtype=None, passes: int = 1) -> dict[str, int]:
    """{region: executions} in a call of the kernel for these group sizes."""
    plan = listed(group_sizes, num_rows, tiles, dtype, out_dtype)
    group, bucket = plan.tile_group, plan.tile_height
    num_tiles, num_groups = len(group), len(plan.group_expert)
    is_last = np.diff(group, append=num_groups) > 0
    names = {"tile": num_tiles, "first of group": num_groups, "last of group": num_groups}
    if isinstance(tiles, groups.TgmmTiles):
        names["add"] = int(np.sum(~is_last))
        for k, height in enumerate(groups.heights(tiles)):
            names[f"finish {height}"] = int(np.sum(is_last & (bucket == k)))
    else:
        names |= {f"{height} rows": int(np.sum(bucket == k)) for k, height in enumerate(groups.heights(tiles))}
        names["block"] = int(np.sum(plan.tile_blocks))
    return {name: passes * count for name, count in names.items()}


def executions(kernel, group_sizes, num_rows: int, K: int, N: int, tiles, dtype, out_dtype=None) -> list[int]:
    """How often each region of a compiled kernel that depends on the group sizes is executed, for its `cycles`.

    A named region as often as `tile_counts` says; a branch with named regions inside as often as all of them; any other
    region in the loop over tiles once for each tile.
    """
    is_tgmm, cdiv = isinstance(tiles, groups.TgmmTiles), groups.cdiv
    passes = cdiv(K, tiles.k) * cdiv(N, tiles.n) if is_tgmm else cdiv(N, tiles.cols)
    counts = tile_counts(group_sizes, num_rows, tiles, dtype, out_dtype, passes)
    loop = kernel.region("tile")

    def inside(region):
        return [inner for child in region.children for inner in (child, *inside(child))]

    def count(region):
        if known := [counts[name] for name in region.names if name in counts]:
            return known[0]
        named = [name for inner in inside(region) for name in inner.names if name in counts]
        if "tile" in named:
            return 1
        if named:
            return sum(counts[name] for name in named)
        return counts["tile"] if loop.first <= region.first <= loop.last else 0

    return [count(region) for region in kernel.unknown()]


def moved_bytes(
    group_sizes, num_rows: int, K: int, N: int, tiles, dtype, out_dtype=None, variant: groups.Variant = groups.PLAIN
) -> int:
    """The bytes between HBM and VMEM in a call of the kernel for these group sizes, without scales."""
    inputs, matrices, results = variant.operands()
    out_dtype = out_dtype or groups.result_dtype(dtype)
    in_bytes, out_bytes = (np.dtype(each).itemsize for each in (dtype, out_dtype))
    sizes = np.asarray(group_sizes)
    unit = groups.register_rows(dtype, out_dtype)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    rows = int(np.sum(np.where(sizes > 0, -(-ends // unit) - starts // unit, 0))) * unit
    if isinstance(tiles, groups.TgmmTiles):
        across, down = groups.cdiv(N, tiles.n), groups.cdiv(K, tiles.k)
        computed_K, computed_N = down * tiles.k, across * tiles.n
        return (
            rows * (computed_K * across + computed_N * down) * in_bytes
            + len(sizes) * computed_K * computed_N * out_bytes
        )
    experts, passes = int(np.sum(sizes > 0)), groups.cdiv(N, tiles.cols)
    computed_N = passes * tiles.cols if N % 128 == 0 else N
    read = inputs * rows * K * passes + matrices * experts * K * computed_N
    products = rows * 2 * computed_N * out_bytes if variant.gradient else 0
    products += rows * passes * COLUMN_BYTES * (variant.gradient * 2 or variant.gated)
    return read * in_bytes + products + results * num_rows * computed_N * out_bytes
