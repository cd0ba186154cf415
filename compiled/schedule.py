"""Predicts the time of a compiled program, and what it waits for, from the text of its schedule. No jax, no TPU.

    python aot.py schedule step.hlo
    python aot.py schedule step.hlo --kernel='attention.*=4.6e6' --link_bytes_per_s=45e9 --json

**Idea.** `compiled.as_text()` of a program for TPU7x is its scheduled HLO. With `is_scheduled=true` in the first line,
the order of the lines is the order in which the TensorCore issues the instructions. A loop names the computations of
its body and its condition, a fusion names the computation that it fuses. An asynchronous operation has two
instructions: `x-start` issues it and returns at once, `x-done` waits for its result. Collectives on the SparseCores are
a `call-start` and a `call-done` with `async_execution_thread="sparsecore"`. They call the computation that contains the
collective. With newer compilers `call-start` has no operands: a `call-update` has them, and begins the work.

**The walk** goes through the lines with a clock, `now`, and a queue of transfers for each engine:

    TensorCore        now += max(cycles / clock,            cycles counted in bundles (compiled/operations.py); bytes
                                 bytes in HBM / W_hbm)      of outputs and operands. If a slice is read from or
                                                            written into an array, the bytes of the slice
      not counted     now += estimate / clock of estimates  XLA writes the estimate of its cycles into the instruction
      no estimate     now += bytes in HBM / W_hbm           sorting n elements reads and writes them
                                                            log n (log n + 1) / 2 times, the passes of a sorting network
    Pallas kernel     now += cycles / kernel clock          the caller passes the cycles (compiled/bundles.py)
    x-start           ready = max(now, end of queue) + t    t from the table below; the queue then ends at `ready`
    x-done            now = max(now, ready)                 a stall: the share of t that no computation hid is exposed
    sync. collective  now += t                              exposed in full
    while             trips * body                          trips from the condition's constant, start and step
    conditional       time of one branch                    the branch with the known index; the longest branch if the
                                                            text does not determine the index

The queues persist from one iteration of a loop to the next. So do transfers in flight that the loop carries. Iterations
are walked until one leaves both unchanged. All later iterations take the time of that one. A loop may contain branches,
for example if every sixth layer attends to more tokens. Then the loop's integers, such as the index of the layer, are
evaluated (`hlo.evaluate`), and every iteration is walked.

**Formula.** The time t of a transfer:

    all-gather        V (n-1)/n / (rings W)                 V: bytes of the gathered array, n: devices of a group
    reduce-scatter    V (n-1)/n / (rings W)
    all-reduce        2 V (n-1)/n / (rings W)
    all-to-all        n V/4 / (links over the middle W)     V: bytes that a device sends. Half of all bytes cross the
                                                            middle of the longest axis, and half of these go each way.
                                                            A link carries V on 2x2x1 and on a torus of 4x4x4. Without
                                                            `chips`, t is V (n-1)/n / W. The sizes of a ragged
                                                            all-to-all are known only at run time, so V is its smaller
                                                            buffer
    permute           V / W                                 one queue for each direction
    copy, slice       V / W_hbm, V / W_host                 between HBM and VMEM, or device and host; 2V for a copy
                                                            within HBM, or to gather or transpose on the SparseCores

XLA writes a strategy into a collective, with a number of "colours". Each colour is a direction in which data goes
round. `rings` is the number of colours, or 1 without a strategy. Between two chips, or along a line, two colours share
the same links. So rings are at most the number of links from a chip to others of the group. These are two for each
torus axis that wraps around and that the group spans in full. They are one for each other axis on which the group has
several chips.

W is the bandwidth of a link, one way. Both devices of a chip send through the chip's links. So W is divided by the
number of groups with a device on the same chip. For permutes it is divided by the number of pairs with the same source
chip and the same target chip. Between the two devices of a chip, W is that of the die-to-die link, with one ring. The
text does not say where the chips are: aot.py passes `chips`. On the command line there are none. Then devices 2i and
2i + 1 are taken for a chip, and rings are not limited.

**Constants** (`Rates`; hardware.py defines the shares of the peaks):

    clock     1.9 GHz      of the chip's power state (hardware.py). At this clock a large matmul takes the time that
                           was measured (compiled/operations.py)
    estimates 2.2 GHz      XLA's estimates are cycles of 1.9 GHz, but too many: even at 2.2 GHz, those of a step of
                           Llama 3.1 8B take 1.11 times the time of its counted cycles
    kernels   1.76 GHz     from times of attention kernels on TPU7x that tokamax publishes: their compiled cycles over
                           these times are 1.7 to 1.8 GHz. The count of cycles left out some waits that
                           compiled/bundles.py counts, so kernels may be up to 9% faster
    W         89 GB/s      0.89 of the peak of 100 GB/s; measured: an all-gather, 178.8 of 200 GB/s. The same share is
                           taken for the die-to-die link
    W_hbm     3.2 TB/s     a device's half of 7.38 TB/s, times 0.87; measured: a copy
    W_host    16 GB/s      assumed; no figure is published
    network   6.25 GB/s    a device's half of a chip's 100 Gb/s; for sends and receives between slices

The clocks depend on the power state, the bandwidths do not. With half the W each t doubles, but the total grows only by
the time that the computations beside the transfer do not hide. `Rates` and the flags let you vary the constants.

**Other chips** (`rates_of`; aot.py compiles for them too) are taken to achieve the same shares of their own peaks.
Their kernels are taken to need the cycles of TPU7x, as compiled/bundles.py reads no other chip's program. This fits
v6e, whose matrix units do as much in a cycle. Axes are taken to wrap around as on TPU7x, if all are multiples of 4. For
v6e this is right except for axes of 16.

**On TPU7x** the estimates predict too much time for elementwise operations and for copies into another layout: they
count windows of up to 64 x 16 registers, and as many for bfloat16 as for float32 (compiled/operations.py has examples).

**Left out.** The walk ignores these effects. Transfers, SparseCores and the TensorCore share the bandwidth of HBM. A
ring over several axes has phases of different sizes. A collective takes time to start, and 1 us for each hop, so small
ones take longer than predicted. A message to a distant chip occupies all links on its way. A synchronous collective
waits for those in flight. Other devices may be late, and so may the host.

**Source**: rates measured in https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import command
from compiled.hlo import PASS_THROUGH, Instruction, Numbers, Program, Shape, evaluate, parse
from hardware import CHIPS, HBM_REACHED, HOST_BYTES_PER_S, KERNEL_CLOCK, LINKS_REACHED, Chip

CHIP = CHIPS["tpu7x"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates that the engines of a device achieve. The head of this file has the sources."""

    clock_hz: float
    estimates_hz: float
    kernel_clock_hz: float
    link_bytes_per_s: float
    die_to_die_bytes_per_s: float
    hbm_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float


def rates_of(chip: Chip) -> Rates:
    """Returns the rates of a device: the shares of its peaks that were measured on TPU7x.

    The rate to the host is 16 GB/s for a chip without a published figure.
    """
    slowest_hz = chip.clocks[0][1] if chip.clocks else chip.clock_hz
    return Rates(
        clock_hz=chip.running_hz,
        estimates_hz=chip.clock_hz * chip.running_hz / slowest_hz,
        kernel_clock_hz=KERNEL_CLOCK * chip.running_hz,
        link_bytes_per_s=LINKS_REACHED * chip.link_bytes_per_s,
        die_to_die_bytes_per_s=LINKS_REACHED * chip.die_to_die_bytes_per_s,
        hbm_bytes_per_s=HBM_REACHED * chip.hbm_bytes_per_s / chip.devices,
        host_bytes_per_s=chip.pcie_bytes_per_s / chip.devices if chip.pcie_bytes_per_s else HOST_BYTES_PER_S,
        network_bytes_per_s=chip.dcn_bytes_per_s / chip.devices,
    )


TPU7X = rates_of(CHIP)


# -- what an instruction costs

# Opcodes that take no time.
FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier optimization-barrier"
    " partition-id replica-id domain".split()
)
# Opcodes that, without an estimate by XLA, take the time to move their bytes to and from HBM.
BYTES = set(
    "abs add and atan2 bitcast-convert broadcast cbrt ceil clamp clz compare complex concatenate convert copy cosine"
    " count-leading-zeros divide dynamic-reshape dynamic-slice dynamic-update-slice erf exponential"
    " exponential-minus-one floor fusion gather imag iota is-finite log log-plus-one logistic map maximum minimum"
    " multiply negate not or pad popcnt power real reduce reduce-precision reduce-window remainder reshape reverse"
    " rng-bit-generator round-nearest-afz round-nearest-even rsqrt scatter select select-and-scatter"
    " set-dimension-size get-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine slice sort"
    " sqrt stochastic-convert subtract tan tanh transpose xor".split()
)
# Targets of custom-calls that take no time.
FREE_TARGETS = set(
    "PrepareAsyncCallStart PrepareAsyncCallDone AllocateBuffer ConcatBitcast AssumeGatherIndicesInBound"
    " GatherScatterIndicesBitpacked Sharding SliceId SPMDFullToShardShape SPMDShardToFullShape".split()
)
# Targets of custom-calls that take the time of their bytes. ZeroCrop, used between slices, zeroes an array's padding in
# place, so its time is at most that.
BYTES_TARGETS = {"ZeroCrop"}
MATMULS = {"convolution", "dot"}
MOVES = FREE | set(  # opcodes that move data and compute nothing
    "broadcast concatenate copy dynamic-slice dynamic-update-slice fusion iota pad reshape reverse slice"
    " transpose".split()
)
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")
COLLECTIVES += ("collective-broadcast",)
BETWEEN_SLICES = ("send", "recv")  # what XLA makes of a collective over the network


def among(kind: str, kinds: Sequence[str]) -> bool:
    """Whether `kind` is one of `kinds`.

    Several messages that share one start have a kind such as "all-gather and all-reduce" (Walk.serialized). Then all of
    them must be among `kinds`.
    """
    return {*kind.split(" and ")} <= {*kinds}


@dataclass(frozen=True)
class Transfer:
    """A collective or a copy. It runs while the TensorCore computes or, if it is synchronous, while that waits."""

    kind: str  # the opcode, as in "all-gather"; for a copy also its direction, as in "copy to host"
    engine: str  # what runs it: SparseCore, TensorCore, DMA, network, or another thread of the HLO
    queue: str  # transfers with the same queue run one after another
    nbytes: float  # of the array; for a collective, of the gathered array
    seconds: float
    groups: tuple[tuple[int, ...], ...] = ()  # the devices of each group, or the (source, target) pairs of a permute
    rings: int = 0  # the number of colours in XLA's strategy


def num_rings(config: object) -> int:
    """The number of colours in a collective's strategy, 0 if it has none. `config` is its backend_config."""
    if isinstance(config, dict):
        if "color_strategies" in config:
            return len(config["color_strategies"])
        return max(map(num_rings, config.values()), default=0)
    match = re.search(r"colors:(\d+)", config) if isinstance(config, str) else None
    return int(match[1]) if match else 0


def chips_of(devices: Sequence[int], chips: Sequence) -> list:
    """The chip of each device: its (slice, x, y, z) if `chips` are known (see `walk`), else a number."""
    return [chips[device] if chips else device // 2 for device in devices]


def on_one_chip(devices: Sequence[int], chips: Sequence) -> bool:
    """Whether `devices` are the two devices of one chip."""
    return len(devices) == 2 and devices[0] != devices[1] and len({*chips_of(devices, chips)}) == 1


def torus_axes(devices: Sequence[int], chips: Sequence) -> list[tuple[int, bool]]:
    """Returns (extent, is_ring) for each torus axis on which a group of devices has several chips.

    The extent is the number of the group's chips along the axis. They are a ring if the axis wraps around and they are
    all of its chips.
    """
    # [1:] leaves out the number of the slice, which is the first coordinate.
    extents, sizes = (
        [len({*coords}) for coords in zip(*places, strict=True)][1:] for places in (chips_of(devices, chips), chips)
    )
    axes = zip(extents, CHIP.axes(sizes), strict=True)
    return [(extent, axis.wrap and extent == axis.size) for extent, axis in axes if extent > 1]


def links_out(devices: Sequence[int], chips: Sequence) -> float:
    """The number of links from a chip to other chips of its group; infinite if the places of the chips are unknown."""
    return sum(1 + ring for _, ring in torus_axes(devices, chips)) if chips else math.inf


def busiest_link_share(devices: Sequence[int], chips: Sequence) -> float:
    """The bytes of an all-to-all that cross the busiest link in one direction, over the bytes that a device sends.

    Of n devices' bytes, n/4 cross the middle of an axis in each direction. They share the lines along that axis, of
    which a line has one link across its middle, and a ring two.
    """
    num_chips, axes = len({*chips_of(devices, chips)}), torus_axes(devices, chips)
    crossing = (len(devices) / 4 / (num_chips / extent * (1 + ring)) for extent, ring in axes)
    # A group with one device of each slice, at the same place, spans no torus axis.
    return max(crossing, default=1 - 1 / len(devices))


def link_users(instruction: Instruction, chips: Sequence) -> int:
    """The number of groups that send through the links of the same chip, at most.

    For a permute it is the number of pairs with the same source chip and the same target chip.
    """
    if instruction.pairs:
        directions = (tuple(chips_of(pair, chips)) for pair in instruction.pairs)
        users = Counter(direction for direction in directions if direction[0] != direction[1])
    else:
        users = Counter(chip for group in instruction.groups for chip in {*chips_of(group, chips)})
    return max(users.values(), default=1)


def collective(
    instruction: Instruction, operands: Sequence[Shape], rates: Rates, thread: str, chips: Sequence = ()
) -> Transfer:
    """Returns the transfer of a collective.

    Args:
      operands: the shapes of its operands, flattened.
      thread: the async_execution_thread that runs it, "sparsecore" or "main".
      chips: as for `walk`.
    """
    kind, start = instruction.opcode.removesuffix("-start"), instruction.opcode.endswith("-start")
    shapes = [shape for shape in instruction.shapes if not (start and not shape.dims and shape.space)]
    # The result of a start is (operands, results, semaphores); the line above removes the semaphores. For an all-reduce
    # it has no operands.
    if start and kind != "all-reduce":
        shapes = shapes[len(operands) :]
    nbytes = sum(shape.nbytes for shape in shapes)
    if kind == "ragged-all-to-all":
        nbytes = min(shape.nbytes for shape in operands[:2])
    size = len(instruction.groups[0]) if instruction.groups else 1
    rings = num_rings(instruction.config)
    sparse = thread == "sparsecore" or instruction.config.get("device_type") == "DEVICE_TYPE_SPARSECORE"
    groups = instruction.groups or instruction.pairs
    within_chips = bool(groups) and all(on_one_chip(devices, chips) for devices in groups)
    speed = rates.die_to_die_bytes_per_s if within_chips else rates.link_bytes_per_s
    queue = "links"
    if kind in ("collective-permute", "collective-broadcast"):
        moved = nbytes if instruction.pairs or size > 1 else 0.0
        queue = "link {} to {}".format(*min(instruction.pairs)) if instruction.pairs else queue
        speed /= 1 if within_chips else link_users(instruction, chips)
    else:
        nbytes *= size if kind == "reduce-scatter" else 1
        moved = nbytes * (size - 1) / size * (2 if kind == "all-reduce" else 1)
        if size > 1 and not within_chips:
            group = instruction.groups[0]
            if not kind.endswith("all-to-all"):
                speed *= max(min(rings, links_out(group, chips)), 1) / link_users(instruction, chips)
            elif chips:
                moved = nbytes * busiest_link_share(group, chips) * link_users(instruction, chips)
    engine = "SparseCore" if sparse else "TensorCore"
    groups = instruction.groups or tuple(pair for pair in instruction.pairs if pair[0] != pair[1])
    return Transfer(kind, engine, queue, nbytes, moved / speed, groups, rings)


def fused_reduce_scatter(program: Program, instruction: Instruction) -> Instruction | None:
    """Returns a fusion as the reduce-scatter that it was compiled from, or None for any other instruction.

    If the shards are padded, XLA:TPU compiles a reduce-scatter to a fusion of an all-reduce and a slice. It is
    synchronous: the TensorCore runs it and computes nothing else meanwhile.
    """
    algorithm = instruction.config.get("collective_algorithm_config", {})
    if instruction.opcode != "fusion" or not algorithm.get("emitter", "").endswith("AllReduceScatterFusion"):
        return None
    fused = [inner for name in instruction.called["calls"] for inner in program.computations[name].values()]
    sums = [inner for inner in fused if inner.opcode == "all-reduce"]
    if len(sums) != 1:
        raise ValueError(f"line {instruction.line}: a fused reduce-scatter has one all-reduce, not {len(sums)}")
    return replace(instruction, opcode="reduce-scatter", groups=sums[0].groups)


def opcodes_of(program: Program, instruction: Instruction) -> Iterator[str]:
    """Yields the opcode of an instruction and those of the instructions that it fuses.

    For a custom-call of a known target it yields an opcode of the same cost: bitcast if it is free, else broadcast.
    """
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    yield "bitcast" if target in FREE_TARGETS else "broadcast" if target in BYTES_TARGETS else instruction.opcode
    for name in instruction.called.get("calls", ()):
        for inner in program.computations[name].values():
            yield from opcodes_of(program, inner)


SAME = ("bitcast", "convert", "copy", "reshape")  # opcodes that, in a fusion, give an array another type or layout


def bytes_read(program: Program, instruction: Instruction, position: int, operand: Sequence[Shape]) -> float:
    """The bytes that an instruction reads of an operand: of one that it slices, or updates in place, only a part."""
    full = sum(shape.nbytes for shape in operand)
    if instruction.opcode == "fusion":
        return full * _share_used(program, instruction.called["calls"][0], position, 1.0)
    if position == 0 and instruction.opcode in ("slice", "dynamic-slice", "gather"):
        return sum(shape.nbytes for shape in instruction.shapes)
    if position == 0 and instruction.opcode in ("dynamic-update-slice", "scatter"):
        return 0.0
    return full


def _share_used(program: Program, fusion: str, parameter: int, of_result: float) -> float:
    """The share of a parameter that a fused computation reads, if that share of its result is used."""
    fused = program.computations[fusion]

    def share(value: Instruction) -> float:
        used = of_result if value.name == program.roots[fusion] else 0.0
        for user in fused.values():
            for position in (i for i, operand in enumerate(user.operands) if operand == value.name):
                if user.opcode in SAME:
                    used += share(user)
                elif user.opcode == "fusion":
                    used += _share_used(program, user.called["calls"][0], position, share(user))
                else:
                    full = sum(shape.nbytes for shape in value.shapes)
                    used += bytes_read(program, user, position, value.shapes) / (full or 1.0)
        return min(used, 1.0)

    return sum(share(i) for i in fused.values() if i.opcode == "parameter" and int(i.literal) == parameter)


def bytes_written(program: Program, instruction: Instruction, operands: Sequence[Sequence[Shape]]) -> list[float]:
    """The bytes that an instruction writes of each result, in its type: of one that it updates in place, the update."""
    if instruction.opcode == "dynamic-update-slice":
        return [operands[1][0].nbytes]
    if instruction.opcode == "scatter":  # it reads, adds and writes; its operands are arrays, indices, updates
        updates = operands[len(operands) // 2 + 1 :]
        return [2 * shape.nbytes for (shape,) in updates]
    if instruction.opcode != "fusion":
        return [shape.nbytes for shape in instruction.shapes]
    (name,) = instruction.called["calls"]
    fused, root = program.computations[name], program.root(name)
    written = []
    for result in [fused[each] for each in root.operands] if root.opcode == "tuple" else [root]:
        origin = _origin(program, fused, result)  # perhaps of another type, so its bytes are scaled to the result's
        of_origin = bytes_written(program, origin, [fused[each].shapes for each in origin.operands])
        sizes = zip(of_origin, origin.shapes, result.shapes, strict=True)
        written += [nbytes * own.nbytes / (computed.nbytes or 1.0) for nbytes, computed, own in sizes]
    return written


def _origin(program: Program, fused: Mapping[str, Instruction], value: Instruction) -> Instruction:
    """The instruction in a fused computation that computes a value, whose type or layout others then change."""
    while True:
        if value.opcode in SAME:
            value = fused[value.operands[0]]
            continue
        (name,) = value.called["calls"] if value.opcode == "fusion" else (None,)
        inner = _origin(program, program.computations[name], program.root(name)) if name else value
        if value.opcode != "fusion" or inner.opcode != "parameter":
            return value
        value = fused[value.operands[int(inner.literal)]]


def category_of(program: Program, instruction: Instruction) -> str:
    """The category of an instruction: "matmul", "elementwise", "copies and layouts", or "kernel <its name>"."""
    opcodes = set(opcodes_of(program, instruction))
    if instruction.opcode == "custom-call" and "custom-call" in opcodes:
        return f"kernel {re.sub(r'[.][0-9]+$', '', instruction.name)}"
    return "matmul" if opcodes & MATMULS else "copies and layouts" if opcodes <= MOVES else "elementwise"


# -- results


@dataclass(frozen=True)
class Op:
    """A TensorCore instruction, with its time and count over all trips of the loops around it."""

    name: str
    category: str
    seconds: float
    count: int
    by: str  # the source of its time: counted "bundles", "bytes" in HBM, estimated "cycles", or the "caller" (a kernel)
    op_name: str  # the operation in the JAX program
    source: str  # its file and line


@dataclass(frozen=True)
class Message:
    """A collective or a copy, with its time and count over all trips of the loops around it."""

    name: str
    kind: str
    engine: str  # SparseCore, TensorCore, DMA
    nbytes: float  # of the gathered array, in one trip
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    rings: int
    count: int
    op_name: str
    source: str
    after: str  # the op that the TensorCore ran last before the start
    before: str  # the op that the TensorCore ran first after the done
    synchronous: bool
    computed_s: float  # the time that the TensorCore computed between start and done
    seconds: float  # the time of the transfer
    exposed_s: float  # the part of `seconds` in which the TensorCore waited

    @property
    def hidden_s(self) -> float:
        return self.seconds - self.exposed_s


@dataclass(frozen=True)
class Breakdown:
    """The time of a program, by category, by operation and by message."""

    seconds: float
    categories: dict[str, float]  # {category: seconds}, which add up to `seconds`, the longest first
    ops: tuple[Op, ...]  # the longest first
    messages: tuple[Message, ...]
    by_bytes_s: float  # seconds of ops whose time is that of their bytes
    uncounted: tuple[str, ...]  # instructions without known cycles, and loops without known trips

    @property
    def counted(self) -> float:
        """The share of the ops' time, without kernels, that is not from XLA's estimates."""
        known = math.fsum(op.seconds for op in self.ops if op.by in ("bundles", "bytes"))
        return known / (known + math.fsum(op.seconds for op in self.ops if op.by == "cycles") or 1.0)

    @property
    def collectives(self) -> tuple[Message, ...]:
        return tuple(message for message in self.messages if among(message.kind, COLLECTIVES + BETWEEN_SLICES))

    @property
    def exposed_s(self) -> float:
        return math.fsum(message.exposed_s for message in self.collectives)


# -- the walk


@dataclass(frozen=True)
class Flight:
    """A transfer in flight. Without a queue, its start had no operands, and a call-update will begin it.

    Times are seconds of the walk's clock.
    """

    key: tuple[str, str]  # (computation, name of the instruction)
    queue: str = ""
    start: float = 0.0  # when the TensorCore issued it
    begin: float = 0.0  # when the transfers ahead of it in the queue are done
    ready: float = 0.0  # when it is done
    busy: float = 0.0  # Walk.busy at `start`
    value: object = None  # the integers that it transfers, if they are known


@dataclass
class Event:
    """A span of a walk's clock, in seconds. compiled/trace.py draws these."""

    kind: str  # op, transfer, wait (for a transfer), synchronous (collective), loop, iteration, skipped (iterations)
    instruction: Instruction  # what runs; for a wait, the transfer that is waited for
    begin: float
    end: float
    times: int = 1  # executions in the step that it counts for; 0 for a loop, an iteration and skipped iterations
    detail: object = ""  # category of an op or a wait; the Transfer; the number of iterations of a loop, or skipped
    issued: float = 0.0  # when the TensorCore started the transfer
    nbytes: float = 0.0  # that an op reads and writes in HBM


class Walk:
    """The state of a walk.

    Attributes:
      now: the clock, seconds since the first instruction.
      busy: the seconds in which the TensorCore computed.
      queues: {queue: its transfers, in order}, of which some may be done.
      ledger: {(quantity, key): seconds or count}. A quantity is count, seconds, computed, exposed or category. A key is
        (computation, name of an instruction), or for category the name of the category.
      missing: {instruction: what is unknown about it}.
      events: what was walked, in the order of its end on the TensorCore, if the caller asks for it; else None.
    """

    def __init__(
        self,
        program: Program,
        rates: Rates,
        kernels: Mapping[str, float],
        trips: Mapping[str, int],
        chips: Sequence,
        events: list[Event] | None = None,
        counted: Mapping[str, float] | None = None,
    ):
        self.program, self.rates, self.kernels, self.given_trips, self.chips = program, rates, kernels, trips, chips
        self.counted = counted or {}
        self.missing: dict[str, str] = {}
        self.events = events
        self.evaluates = True  # whether to evaluate integers: outside loops, and in loops with branches
        self.now = self.busy = 0.0
        self.queues: dict[str, list[Flight]] = {}
        self.ledger: Counter = Counter()
        # {key: (instruction, category, by) of an op, or (instruction, transfer, synchronous) of a message}.
        self.facts: dict[tuple, tuple] = {}
        self.last, self.ended = "", []  # the name of the last op, and the keys of messages that ended after it
        self.after, self.before = {}, {}  # {key of a message: the op before its start, or after its done}

    def run(self, computation: str, arguments: list) -> object:
        """Walks a computation, and returns the value of its root.

        A value is Numbers (known integers), a Flight, a tuple of values, or None if it is not known.
        """
        values = {}
        for name, instruction in self.program.computations[computation].items():
            values[name] = self.step(computation, instruction, [values[n] for n in instruction.operands], arguments)
        return values[self.program.roots[computation]]

    def step(self, computation: str, instruction: Instruction, values: list, arguments: list) -> object:
        """Walks one instruction and returns its value.

        Args:
          values: the values of its operands.
          arguments: the values of the parameters of its computation.
        """
        opcode, called = instruction.opcode, instruction.called
        key = computation, instruction.name
        first = values[0] if values else None
        if opcode == "parameter":
            number = int(instruction.literal)
            return arguments[number] if number < len(arguments) else None
        if opcode in ("constant", "tuple", "get-tuple-element"):
            return evaluate(self.program, instruction, values)
        if opcode == "while":
            return self.loop(instruction, first)
        if opcode == "conditional":
            return self.branch(instruction, values)
        if opcode == "call":
            return self.run(*called["to_apply"], values)
        if opcode.endswith("-start") or opcode in ("send", "recv"):
            if opcode == "call-start" and not instruction.operands:
                return Flight(key)
            flight = self.start(key, computation, instruction)
            return replace(flight, value=first) if opcode == "copy-start" and isinstance(first, Numbers) else flight
        if opcode.endswith("-update"):
            if isinstance(first, Flight) and not first.queue:
                return self.start(first.key, first.key[0], self.program.computations[first.key[0]][first.key[1]])
            return first
        if opcode.endswith("-done"):
            self.done(instruction, first)
            return first.value
        blocking = fused_reduce_scatter(self.program, instruction) or instruction
        if blocking.opcode in COLLECTIVES:
            return self.synchronous(key, blocking, self.operand_shapes(computation, instruction))
        self.compute(key, instruction, self.operand_shapes(computation, instruction))
        if opcode in PASS_THROUGH and not isinstance(first, Numbers):
            return first
        return evaluate(self.program, instruction, values) if self.evaluates or opcode in PASS_THROUGH else None

    def operand_shapes(self, computation: str, instruction: Instruction) -> list[tuple[Shape, ...]]:
        """The shapes of each operand; an operand that is a tuple has several."""
        return [self.program.computations[computation][name].shapes for name in instruction.operands]

    # the TensorCore

    def compute(self, key: tuple, instruction: Instruction, operands: list) -> None:
        """Advances the clock by the time of a TensorCore instruction."""
        if set(opcodes_of(self.program, instruction)) <= FREE:
            return
        seconds, by = self.cost(instruction, operands)
        if seconds == 0:
            return
        category = category_of(self.program, instruction)
        if self.events is not None:
            nbytes = self.hbm_bytes(instruction, operands)
            self.events.append(Event("op", instruction, self.now, self.now + seconds, detail=category, nbytes=nbytes))
        self.now += seconds
        self.busy += seconds
        self.ledger["count", key] += 1
        self.ledger["seconds", key] += seconds
        self.ledger["category", category] += seconds
        self.facts[key] = instruction, category, by
        self.last = instruction.op_name or instruction.name
        for ended in self.ended:
            self.before.setdefault(ended, self.last)
        self.ended = []

    def cost(self, instruction: Instruction, operands: list) -> tuple[float, str]:
        """Returns (seconds, `Op.by`), and records an instruction of unknown time as missing."""
        target = instruction.attributes.get("custom_call_target", "").strip('"')
        for pattern, cycles in self.kernels.items():
            if any(re.search(pattern, text) for text in (instruction.name, instruction.op_name, target)):
                if instruction.cycles is None:
                    return cycles / self.rates.kernel_clock_hz, "caller"
        opcodes = set(opcodes_of(self.program, instruction))
        if instruction.name in self.counted:
            seconds = self.counted[instruction.name] / self.rates.clock_hz
            in_hbm_s = self.hbm_bytes(instruction, operands) / self.rates.hbm_bytes_per_s
            return max((seconds, "bundles"), (in_hbm_s, "bytes"))
        if instruction.cycles is not None:
            return instruction.cycles / self.rates.estimates_hz, "cycles"
        if not opcodes <= BYTES | FREE:
            kind = target or instruction.opcode
            self.missing[instruction.name] = (
                f"line {instruction.line}: {kind} %{instruction.name} {instruction.op_name}"
            )
            return 0.0, "nothing"
        return self.hbm_bytes(instruction, operands) / self.rates.hbm_bytes_per_s, "bytes"

    def hbm_bytes(self, instruction: Instruction, operands: list) -> float:
        """The bytes that an instruction reads and writes in HBM."""
        results = instruction.shapes
        if instruction.opcode == "sort" and results[0].dims:  # a sorting network: log n (log n + 1) / 2 passes
            log_n = math.ceil(math.log2(max(max(results[0].dims), 2)))
            return 2 * sum(shape.nbytes for shape in results) * log_n * (log_n + 1) / 2
        # Space 0 is HBM, space 5 the host's memory.
        in_hbm = lambda shapes: any(shape.space in (0, 5) and shape.dims for shape in shapes)
        read = (bytes_read(self.program, instruction, i, shapes) for i, shapes in enumerate(operands) if in_hbm(shapes))
        written = zip(results, bytes_written(self.program, instruction, operands), strict=True)
        return sum(read) + sum(nbytes for shape, nbytes in written if in_hbm([shape]))

    # beside the TensorCore

    def start(self, key: tuple, computation: str, instruction: Instruction) -> Flight:
        """Appends a transfer to its queue, and returns it. It begins when the transfers ahead of it are done."""
        transfer = self.transfer(computation, instruction)
        queue = [flight for flight in self.queues.get(transfer.queue, []) if flight.ready > self.now]
        begin = max([self.now, *(flight.ready for flight in queue)])
        flight = Flight(key, transfer.queue, self.now, begin, begin + transfer.seconds, self.busy)
        self.queues[transfer.queue] = [*queue, flight]
        self.count(key, instruction, transfer, synchronous=False)
        if self.events is not None:
            self.events.append(Event("transfer", instruction, begin, flight.ready, detail=transfer, issued=self.now))
        return flight

    def done(self, instruction: Instruction, flight: object) -> None:
        """Advances the clock to the end of a transfer.

        The wait is counted as exposed time of each transfer that its queue runs meanwhile, this one and those ahead.
        """
        if not isinstance(flight, Flight) or not flight.queue:
            raise ValueError(f"line {instruction.line}: %{instruction.name} waits for what was not started before it")
        if flight.ready > self.now:
            for other in self.queues[flight.queue]:
                exposed = min(other.ready, flight.ready) - max(other.begin, self.now)
                self.ledger["exposed", other.key] += max(exposed, 0.0)
            started, transfer, _ = self.facts[flight.key]
            of_collectives = among(transfer.kind, COLLECTIVES)
            waits = "waits for collectives" if of_collectives else f"waits for {transfer.engine} copies"
            waits = "host" if transfer.queue.endswith("host") else waits
            self.ledger["category", waits] += flight.ready - self.now
            if self.events is not None:
                self.events.append(Event("wait", started, self.now, flight.ready, detail=waits))
            self.now = flight.ready
        self.ledger["computed", flight.key] += self.busy - flight.busy
        self.ended.append(flight.key)

    def synchronous(self, key: tuple, instruction: Instruction, operands: list) -> None:
        """Advances the clock by the time of a synchronous collective, which is exposed in full."""
        transfer = collective(instruction, [s for shapes in operands for s in shapes], self.rates, "main", self.chips)
        self.count(key, instruction, transfer, synchronous=True)
        self.ledger["exposed", key] += transfer.seconds
        self.ledger["category", "synchronous collectives"] += transfer.seconds
        if self.events is not None:
            end = self.now + transfer.seconds
            self.events.append(Event("synchronous", instruction, self.now, end, detail=transfer))
        self.now += transfer.seconds
        self.ended.append(key)

    def count(self, key: tuple, instruction: Instruction, transfer: Transfer, *, synchronous: bool) -> None:
        """Enters one execution of a transfer into the ledger."""
        self.ledger["count", key] += 1
        self.ledger["seconds", key] += transfer.seconds
        self.facts[key] = instruction, transfer, synchronous
        self.after.setdefault(key, self.last)

    def transfer(self, computation: str, instruction: Instruction) -> Transfer:
        """Returns the transfer of an `x-start`: its own operation, or that of the computation that it calls."""
        thread, inner = instruction.thread, instruction
        while inner.called.get("to_apply", inner.called.get("calls")) and inner.opcode in ("call-start", "async-start"):
            (computation,) = inner.called.get("to_apply", inner.called.get("calls"))
            instructions = self.program.computations[computation].values()
            working = [i for i in instructions if i.opcode not in FREE and not i.opcode.endswith("-done")]
            if len(working) > 1 and {i.opcode for i in working} <= set(COLLECTIVES):
                return self.serialized(computation, working, thread)
            if len(working) != 1:
                raise ValueError(f"line {instruction.line}: {computation} has {len(working)} operations, not one")
            inner = working[0]
        operands = self.operand_shapes(computation, inner)
        flat = [shape for shapes in operands for shape in shapes]
        if inner.opcode.removesuffix("-start") in COLLECTIVES:
            return collective(inner, flat, self.rates, thread, self.chips)
        rates = self.rates
        if thread == "sparsecore":
            opcodes = set(opcodes_of(self.program, inner))
            if opcodes <= BYTES | FREE:
                nbytes = self.hbm_bytes(inner, operands)
                return Transfer(inner.opcode, "SparseCore", "SparseCore", nbytes, nbytes / rates.hbm_bytes_per_s)
        kind = inner.opcode.removesuffix("-start")
        if kind in BETWEEN_SLICES:
            nbytes = inner.shapes[0].nbytes
            between_slices = "megascale" in inner.attributes.get("frontend_attributes", "")
            if between_slices or "is_host_transfer" not in inner.attributes:
                return Transfer(kind, "network", f"network, {kind}", nbytes, nbytes / rates.network_bytes_per_s)
            host = "to host" if kind == "send" else "from host"
            return Transfer(f"{kind} host", "DMA", host, nbytes, nbytes / rates.host_bytes_per_s)
        if kind not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice") or thread != "main":
            seconds, by = self.cost(inner, operands)
            if by == "bytes":  # Rates has no memory bandwidth for this engine
                self.missing[inner.name] = f"line {inner.line}: {kind} %{inner.name} on {thread} {inner.op_name}"
            return Transfer(kind, thread, thread, 0.0, seconds)
        if inner.opcode == "copy-start":  # its result is (target, origin, semaphore)
            target, origin = inner.shapes[:2]
        else:  # the result of another start is ((operands), target, semaphore); without a start, it is the target
            target, origin = inner.shapes[len(flat) if inner.opcode.endswith("-start") else 0], flat[0]
        origin = flat[1] if kind == "dynamic-update-slice" else origin
        nbytes = min(target.nbytes, origin.nbytes)
        if 5 in (target.space, origin.space) and target.space != origin.space:  # space 5 is the host's memory
            host = "to host" if target.space == 5 else "from host"
            return Transfer(f"{kind} {host}", "DMA", host, nbytes, nbytes / rates.host_bytes_per_s)
        passes = max((target.space == 0) + (origin.space == 0), 1)  # 2 if both ends are in HBM
        return Transfer(kind, "DMA", "DMA", nbytes, nbytes * passes / rates.hbm_bytes_per_s)

    def serialized(self, computation: str, instructions: Sequence[Instruction], thread: str) -> Transfer:
        """Returns one transfer for several collectives that share one start: they run one after another."""
        transfers = [
            collective(
                i, [s for shapes in self.operand_shapes(computation, i) for s in shapes], self.rates, thread, self.chips
            )
            for i in instructions
        ]
        kind = " and ".join(dict.fromkeys(transfer.kind for transfer in transfers))
        nbytes, seconds = (math.fsum(getattr(t, name) for t in transfers) for name in ("nbytes", "seconds"))
        return replace(transfers[0], kind=kind, nbytes=nbytes, seconds=seconds)

    # loops and branches

    def branch(self, instruction: Instruction, values: list) -> object:
        """Walks one branch of a conditional and returns its value: the branch taken or, if unknown, the longest."""
        names = [name for computations in instruction.called.values() for name in computations]
        if isinstance(values[0], Numbers):
            (index,) = values[0].values
            if "true_computation" in instruction.called:  # true, index 1, is named first
                index = 1 - index
            index = index if 0 <= index < len(names) else -1  # an index out of range takes the last branch
            return self.run(names[index], [values[1:][index]])
        begin, ends = self.state(), []
        for name, value in zip(names, values[1:], strict=True):
            self.restore(begin)
            ends.append((self.run(name, [value]), self.state()))
        value, longest = max(ends, key=lambda end: end[1][0])
        self.restore(longest)
        return value

    def state(self) -> tuple:
        """A copy of what walking a branch changes, for `restore`; the clock comes first."""
        queues = {name: list(flights) for name, flights in self.queues.items()}
        events = None if self.events is None else list(self.events)
        return self.now, self.busy, queues, Counter(self.ledger), self.last, list(self.ended), events

    def restore(self, state: tuple) -> None:
        self.now, self.busy, queues, ledger, self.last, ended, events = state
        if self.events is not None:
            self.events[:] = events
        self.queues = {name: list(flights) for name, flights in queues.items()}
        self.ledger, self.ended = Counter(ledger), list(ended)

    def loop(self, instruction: Instruction, carried: object) -> object:
        """Walks a loop, and returns the value that it carries at the end.

        It walks iterations until one leaves the state (`snapshot`) unchanged. Then it skips all others (`skip`).
        """
        (body,) = instruction.called["body"]
        trips = left = self.trips(instruction, carried)
        entered = self.now
        evaluates, self.evaluates = self.evaluates, self.evaluates and body in self.branching
        while left:
            before, begin, busy = self.snapshot(carried), self.now, self.busy
            outer, self.ledger = self.ledger, Counter()
            recorded = len(self.events or ())
            carried = self.run(body, [carried])
            times = left if self.snapshot(carried) == before else 1  # from the same state, all take the same time
            outer.update({key: times * amount for key, amount in self.ledger.items()})
            self.ledger = outer
            if self.events is not None:
                self.iterated(instruction, recorded, begin, times)
            if times > 1:
                carried = self.skip(carried, begin, (times - 1) * (self.now - begin), (times - 1) * (self.busy - busy))
            left -= times
        if self.events is not None and trips:
            self.events.append(Event("loop", instruction, entered, self.now, times=0, detail=trips))
        self.evaluates = evaluates
        return carried

    def iterated(self, loop: Instruction, recorded: int, begin: float, times: int) -> None:
        """Records an iteration that counts for several, and the span of those that are skipped.

        Args:
          recorded: the number of events before the iteration.
          begin: when the iteration began.
          times: the number of iterations, the walked one included.
        """
        for event in self.events[recorded:]:
            event.times *= times
        self.events.append(Event("iteration", loop, begin, self.now, times=0, detail=1))
        if times > 1:
            seconds = (times - 1) * (self.now - begin)
            self.events.append(Event("skipped", loop, self.now, self.now + seconds, times=0, detail=times - 1))

    @cached_property
    def branching(self) -> set[str]:
        """The computations that contain a branch, or call one that does."""
        branching: set[str] = set()
        for name, instructions in self.program.computations.items():  # a callee precedes its callers
            called = {callee for i in instructions.values() for names in i.called.values() for callee in names}
            if called & branching or any(i.opcode == "conditional" for i in instructions.values()):
                branching.add(name)
        return branching

    def snapshot(self, value: object) -> tuple:
        """The state that determines the time of the next iteration, in a form that can be compared.

        It has the transfers in flight, with times relative to the clock, and `value`, which the loop carries.
        """
        remaining = lambda time: round(max(time - self.now, 0.0), 12)

        def relative(value: object) -> object:
            if isinstance(value, Flight):
                computed = round(self.busy - value.busy, 12)
                return value.key, value.queue, remaining(value.ready), computed, relative(value.value)
            return tuple(map(relative, value)) if isinstance(value, tuple) else value

        queues = {
            name: [(f.key, remaining(f.begin), remaining(f.ready)) for f in flights if remaining(f.ready)]
            for name, flights in self.queues.items()
        }
        return relative(value), sorted((name, flights) for name, flights in queues.items() if flights)

    def skip(self, value: object, begin: float, seconds: float, busy: float) -> object:
        """Advances the clock over iterations that are not walked, and returns the value `value` that the loop carries.

        Transfers that the last walked iteration started are moved as well, as if the last iteration had started them.

        Args:
          begin: the time at which the last walked iteration began.
          seconds: the time of the iterations that are skipped.
          busy: the part of it in which the TensorCore computes.
        """

        def moved(value: object) -> object:
            if isinstance(value, Flight) and value.queue and value.start >= begin:
                times = dict(start=value.start + seconds, begin=value.begin + seconds, ready=value.ready + seconds)
                return replace(value, **times, busy=value.busy + busy)
            return tuple(map(moved, value)) if isinstance(value, tuple) else value

        value = moved(value)
        self.queues = {name: [moved(flight) for flight in flights] for name, flights in self.queues.items()}
        self.now += seconds
        self.busy += busy
        return value

    def breakdown(self) -> Breakdown:
        """Returns the result of the walk so far."""
        ops, messages = [], []
        for key, (instruction, detail, more) in self.facts.items():
            count, seconds = round(self.ledger["count", key]), self.ledger["seconds", key]
            if not count:  # in a branch that was walked, but is not the longest
                continue
            common = dict(op_name=instruction.op_name, source=instruction.source, count=count, seconds=seconds)
            if isinstance(detail, str):  # the category of an op
                ops.append(Op(instruction.name, detail, by=more, **common))
                continue
            group_size = len(detail.groups[0]) if detail.groups else 0
            fields = (detail.kind, detail.engine, detail.nbytes, group_size, detail.groups, detail.rings)
            times = dict(computed_s=self.ledger["computed", key], exposed_s=self.ledger["exposed", key])
            between = dict(after=self.after[key], before=self.before.get(key, ""))
            messages.append(Message(instruction.name, *fields, synchronous=more, **times, **between, **common))
        categories = {key: seconds for (quantity, key), seconds in self.ledger.items() if quantity == "category"}
        return Breakdown(
            seconds=self.now,
            categories=dict(sorted(categories.items(), key=lambda item: -item[1])),
            ops=tuple(sorted(ops, key=lambda op: -op.seconds)),
            messages=tuple(messages),
            by_bytes_s=math.fsum(op.seconds for op in ops if op.by == "bytes"),
            uncounted=tuple(self.missing.values()),
        )

    def trips(self, instruction: Instruction, carried: object) -> int:
        """The number of trips of a loop: from known_trip_count, from the caller, or from the loop's condition.

        The condition must compare a counter with a bound: start + trip * step + offset < bound, or with another sign.
        If the number is unknown, the loop is recorded as missing, and 1 is returned.
        """
        if known_trip_count := instruction.config.get("known_trip_count"):
            return int(known_trip_count["n"])
        for pattern, trips in self.given_trips.items():
            if any(re.search(pattern, text) for text in (instruction.name, instruction.op_name)):
                return trips
        (body,), (condition,) = instruction.called["body"], instruction.called["condition"]
        # Forms of scalars are those that `linear` returns. At the start, a carried value is a constant if it is known.
        known = lambda i: isinstance(carried, tuple) and isinstance(carried[i], Numbers) and len(carried[i].values) == 1
        start = lambda i: (None, *carried[i].values) if known(i) else None
        compare, bind = self.program.root(condition), None
        scope = condition
        if compare.opcode == "fusion":
            bind = [linear(self.program, scope, operand) for operand in compare.operands]
            (scope,) = compare.called["calls"]
            compare = self.program.root(scope)
        sides = [linear(self.program, scope, operand, bind) for operand in compare.operands]
        direction = compare.attributes.get("direction", "")
        if len(sides) == 2 and None not in sides and direction in DIRECTIONS:
            if sides[0][0] is None:  # the counter is on the right: exchange the sides
                sides, direction = sides[::-1], {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, "NE")
            (index, offset), bound = sides
            bound = start(bound[0]) if bound[0] is not None and bound[1] == 0 else bound
            step = linear(self.program, body, self.program.root(body).operands[index]) if index is not None else None
            first = start(index) if index is not None else None
            if first and bound and bound[0] is None and step and step[0] == index and step[1]:
                # The distance that the counter goes, and how far it goes in a trip.
                distance, by = bound[1] - first[1] - offset, step[1]
                distance += {"LE": 1, "GE": -1}.get(direction, 0)
                rising = {"LT": True, "LE": True, "GT": False, "GE": False, "NE": by > 0}[direction]
                if rising == (by > 0) and not (direction == "NE" and distance % by):
                    return max(math.ceil(distance / by), 0)
        self.missing[instruction.name] = f"line {instruction.line}: trips of %{instruction.name} {instruction.op_name}"
        return 1


DIRECTIONS = ("LT", "LE", "GT", "GE", "NE")  # comparisons in a loop's condition from which its trips can be computed


def linear(program: Program, computation: str, name: str, bind: list | None = None) -> tuple[int | None, int] | None:
    """Returns a scalar as (i, c), the i-th value that a loop carries plus a constant c, or as (None, c), the constant.

    Returns None if the scalar has neither form.

    Args:
      computation: the computation that has the instruction `name`.
      bind: the forms of the computation's parameters, if a fusion calls it. Without it, the computation is the body or
        the condition of a loop, and its only parameter is the tuple that the loop carries.
    """
    instruction = program.computations[computation][name]
    form = lambda operand: linear(program, computation, operand, bind)
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        return (None, int(instruction.literal)) if re.fullmatch(r"-?\d+", instruction.literal) else None
    if opcode == "parameter":
        return bind[int(instruction.literal)] if bind else None
    if opcode == "get-tuple-element":
        source = program.computations[computation][operands[0]]
        if source.opcode == "parameter" and bind is None:
            return int(instruction.attributes["index"]), 0
    if opcode in PASS_THROUGH or opcode in ("copy-start", "copy-done"):
        return form(operands[0])
    if opcode in ("add", "subtract"):
        a, b = map(form, operands)
        if a and b and opcode == "subtract" and b[0] is None:
            return a[0], a[1] - b[1]
        if a and b and opcode == "add" and None in (a[0], b[0]):
            return a[0] if b[0] is None else b[0], a[1] + b[1]
    if opcode == "fusion":
        (called,) = instruction.called["calls"]
        return linear(program, called, program.roots[called], list(map(form, operands)))
    return None


def walk(
    program: Program,
    *,
    rates: Rates = TPU7X,
    kernels: Mapping[str, float] | None = None,
    trips: Mapping[str, int] | None = None,
    chips: Sequence = (),
    uncounted: bool = False,
    events: list[Event] | None = None,
    counted: Mapping[str, float] | None = None,
) -> Breakdown:
    """Returns the time of a program from its first instruction to its last, broken down.

    Args:
      rates: the rates of the device's engines.
      kernels: {regular expression: cycles} for instructions without an estimate by XLA. The expression is searched in
        the name, the op_name and the target.
      trips: {regular expression: trips} for loops whose condition does not determine the number of trips. The
        expression is searched in the name and the op_name.
      chips: the (slice, x, y, z) of each device's chip, by the device's number in the program. By default devices 2i
        and 2i + 1 are a chip, and the number of its links is unknown.
      uncounted: count an instruction without known cycles as 0 s, and a loop without known trips as one trip. The
        result lists them. By default they are an error.
      events: a list to which what was walked is appended, for compiled/trace.py.
      counted: {name: cycles} of XLA's operations (compiled/operations.py). Others take the time of XLA's estimate.

    Raises:
      ValueError: the cycles or trips of an instruction are unknown, and `uncounted` is not set.
    """
    state = Walk(program, rates, kernels or {}, trips or {}, chips, events, counted)
    state.run(program.entry, [])
    if state.missing and not uncounted:
        raise ValueError(
            "cycles or trips are unknown for\n  "
            + "\n  ".join(state.missing.values())
            + "\ngive them: kernels={regular expression: cycles}, trips={regular expression: trips}; or uncounted=True"
        )
    return state.breakdown()


# -- command line


def print_breakdown(breakdown: Breakdown, top: int) -> None:
    """Prints the categories, the `top` longest operations, and the messages by kind with the most exposed of each."""
    total = breakdown.seconds or 1.0
    row = lambda name, seconds: print(f"{name:32}{seconds:12.6f} s {seconds / total:7.1%}")
    row("total, predicted", breakdown.seconds)
    for category, seconds in breakdown.categories.items():
        row(f"  {category}", seconds)
    if breakdown.by_bytes_s:
        row("of these by bytes, not cycles", breakdown.by_bytes_s)
    print(f"\n{'ms':>10}{'count':>7}  {'category':20}{'source':22}operation")
    for op in breakdown.ops[:top]:
        source = op.source.rpartition("/")[2][-20:]
        print(f"{op.seconds * 1e3:10.3f}{op.count:7}  {op.category[:18]:20}{source:22}{(op.op_name or op.name)[-58:]}")
    print(f"\n{'ms':>10}{'exposed':>9}{'computed':>10}{'count':>7}{'MB':>9}{'n':>5}{'rings':>6}  {'kind':23}operation")
    for kind in dict.fromkeys((m.kind, m.engine) for m in breakdown.messages):
        of_kind = [m for m in breakdown.messages if (m.kind, m.engine) == kind]
        print_messages(of_kind, kind[0], f"{len(of_kind)} in the text")
        for message in sorted(of_kind, key=lambda m: -m.exposed_s)[: top // 4]:
            print_messages([message], "", message.op_name or message.name)
    for instruction in breakdown.uncounted:
        print(f"not counted: {instruction}")


def print_messages(messages: Sequence[Message], kind: str, text: str) -> None:
    """Prints one row with the sums of messages. With kind="", the only message's MB, group size and rings are added."""
    columns = (1e3 * math.fsum(getattr(m, name) for m in messages) for name in ("seconds", "exposed_s", "computed_s"))
    first = messages[0]
    details = " " * 20 if kind else f"{first.nbytes / 1e6:9.3f}{first.group_size:5}{first.rings:6}"
    count = sum(m.count for m in messages)
    print("{:10.3f}{:9.3f}{:10.3f}".format(*columns) + f"{count:7}{details}  {kind:23}{first.engine}, {text[-27:]}")


def parse_pairs(values: Sequence[str], flag: str) -> dict[str, float]:
    """Returns {REGEX: NUMBER} for a flag's values, each REGEX=NUMBER. Raises ValueError for any other value."""
    pairs = dict(value.rpartition("=")[::2] for value in values)
    try:
        return {pattern: float(number) for pattern, number in pairs.items() if re.compile(pattern)}
    except (ValueError, re.error):
        raise ValueError(f"{flag} takes REGEX=NUMBER, as in {flag}='attention.*=4.6e6', not {values}") from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__, prog="aot.py schedule")
    parser.add_argument("file", type=command.path, metavar="FILE", help="the text that compiled.as_text() returned")
    parser.add_argument("--json", action="store_true", help="a JSON object, in bytes and seconds")
    parser.add_argument(
        "--top", type=command.at_least(0), default=20, help="rows of the table of operations; default: %(default)s"
    )
    for rate in dataclasses.fields(Rates):
        parser.add_argument(
            f"--{rate.name}", type=float, default=getattr(TPU7X, rate.name), help="default: %(default).4g"
        )
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="REGEX=CYCLES", help="cycles of kernels by name"
    )
    parser.add_argument("--trips", action="append", default=[], metavar="REGEX=TRIPS", help="trips of loops by name")
    parser.add_argument("--uncounted", action="store_true", help="instructions without known cycles take no time")
    args = command.arguments(parser, argv)
    breakdown = walk(
        parse(command.read_text(args.file)),
        rates=Rates(**{rate.name: getattr(args, rate.name) for rate in dataclasses.fields(Rates)}),
        kernels=parse_pairs(args.kernel, "--kernel"),
        trips={pattern: int(trips) for pattern, trips in parse_pairs(args.trips, "--trips").items()},
        uncounted=args.uncounted,
    )
    if args.json:
        messages = [dataclasses.asdict(message) | {"hidden_s": message.hidden_s} for message in breakdown.messages]
        return print(json.dumps(dataclasses.asdict(breakdown) | {"messages": messages}))
    print_breakdown(breakdown, args.top)
