"""The cost of a collective on a line, a ring, a torus, and across slices: bytes, hops, seconds. Arithmetic, no jax.

    python roofline.py collective all_reduce --bytes=1e9 --topology=tpu7x:4x4x4 --explain
    python roofline.py collective scaling --plot=scaling.png

collectives.py has the programs; tests hold both to the same bytes.

**Formula**, along one axis (the scaling book: Austin et al. 2025, part 3,
https://jax-ml.github.io/scaling-book/sharding). N devices are on an axis, each linked to its two neighbours. A link
carries W bytes/s one way and as many the other way (the book's W_ICI is both, 2W). A message takes t_hop to the
neighbour, however small it is. Every collective is a ring: h times, each device passes a block on. In two directions
the farthest device is N//2 hops away, in one N-1:

    h = N//2       both ways around an axis that wraps around; the busier direction (even N: the other has N/2 - 1)
    h = N-1        one way; and both ways on an axis that does not wrap around: what goes around the ring has to go back
                   along the full line, on the links of the other direction, which so gains nothing

                   steps   bytes over a link, in its busier direction
    all-gather     h       h * V/N                 V: bytes of the gathered array
    reduce-scatter h       h * V/N                 V: bytes of the array of which each device has a summand
    all-reduce     2h      2h * V/N                a reduce-scatter, then an all-gather
    all-to-all     h       h(h+1)/2 * B/N          B: bytes that each device holds, a block for every device. Both ways
                                                   on a line: N/2 devices send N/2 blocks each across its middle,
                                                   N*N/4 * B/N
    permute        1       B                       to the neighbour
    halo           1       max(before, after)      to both neighbours, in opposite directions

    seconds      = max(steps * t_hop, bytes / W)   of a phase; consecutive phases add up

Around an even ring the all-gather takes V / 2W, whatever N is: more devices pass on more and smaller blocks. That ends
where a block takes no longer than a hop; from there more devices take longer. An all-gather, reduce-scatter or
all-reduce is latency-bound when

    V/N  <  W * t_hop          100 kB a block on TPU7x

For large N the all-to-all takes a quarter of the all-gather of the same array (V = N*B) both ways, and half of it one
way. It relays: a ring has two links between its halves, and a quarter of all bytes must cross them in either direction.

**Axes of a torus** n1, n2, ... are used one after another: reduce-scatter V along the first, V/n1 along the second, and
so on, then all-gather in reverse order (Kumar & Chen, "Exploring Limits of ML Training on Google TPUs", Hot Chips 2020:
"payload in phase 1 is scaled down by the size of the columns"). A slower axis, the network between slices, comes last,
where the fewest bytes are left. An all-to-all moves all of B along each axis.

So the links of one axis work while the others idle. With `spread` the array is split into as many parts as there are
equal axes. Each part takes the axes in another order, and all links work at once. With k axes the all-gather takes
about V / (k * 2W), the book's V / (W_ICI * n_axes), and the all-to-all about a quarter of B * max(n1, n2, ...) / 2W.

**Layout** (`links_of`). Mesh axes take the axes of the torus from the first, x, and from the innermost mesh axis; the
number of a slice is the outermost. tpu7x:4x4x4 with fsdp:64,tensor:2 has `tensor` on the dies of a chip and `fsdp` on
x, y and z. A mesh axis may take a part of a torus axis. With fsdp:32,tensor:4, `tensor` has half of x, a line of
neighbours without wrap-around. `fsdp` has the other factor of x and jumps over these neighbours: two messages share
each link, and it wraps around if x does. The links belong to the chip. Both devices of a TPU7x send through them, each
its own share of the bytes, so each device has half of their bandwidth.

**Left out**: other traffic on the links, and the time to add up. The times are lower bounds at the published speed.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import command
from hardware import CHIPS, Axis, Chip, by, check_size, chip_of, parse_topology, si
from placement import MESH_AXES, check_slices, core_axis_of, fill_mesh

# -- collectives along one axis


@dataclass(frozen=True)
class Traffic:
    """The traffic on an axis: consecutive messages, and their bytes over a link in its busier direction."""

    steps: int
    link_bytes: float

    def seconds(self, axis: Axis) -> float:
        return max(self.steps * axis.hop_s, self.link_bytes / axis.link_bytes_per_s)

    def bound(self, axis: Axis) -> str:
        return "latency" if self.steps * axis.hop_s > self.link_bytes / axis.link_bytes_per_s else "bandwidth"


def ring_hops(size: int, *, bidirectional: bool = True, wrap: bool = True) -> int:
    """h, the number of times that a device passes a block on, in the busier direction."""
    check_size(size)
    return size // 2 if bidirectional and wrap else size - 1


def all_gather(nbytes: float, size: int, *, bidirectional: bool = True, wrap: bool = True) -> Traffic:
    """The traffic of an all-gather to `nbytes`, the gathered array."""
    hops = ring_hops(size, bidirectional=bidirectional, wrap=wrap)
    return Traffic(hops, hops * _checked(nbytes) / size)


def reduce_scatter(nbytes: float, size: int, *, bidirectional: bool = True, wrap: bool = True) -> Traffic:
    """The traffic of a reduce-scatter of `nbytes`, a device's summand."""
    return all_gather(nbytes, size, bidirectional=bidirectional, wrap=wrap)  # in reverse, summing at each hop


def all_reduce(nbytes: float, size: int, *, bidirectional: bool = True, wrap: bool = True) -> Traffic:
    """The traffic of an all-reduce of `nbytes`, a device's summand."""
    half = all_gather(nbytes, size, bidirectional=bidirectional, wrap=wrap)
    return Traffic(2 * half.steps, 2 * half.link_bytes)


def all_to_all(nbytes: float, size: int, *, bidirectional: bool = True, wrap: bool = True) -> Traffic:
    """The traffic of an all-to-all of `nbytes` a device, which has a block for every device."""
    hops = ring_hops(size, bidirectional=bidirectional, wrap=wrap)
    blocks = hops * (hops + 1) // 2  # h of them in the first step, then h-1, down to 1
    if bidirectional and not wrap:
        blocks = size // 2 * ((size + 1) // 2)  # across the middle, from each device to each one on the other side
    return Traffic(hops, blocks * _checked(nbytes) / size)


def bisection_bytes_per_s(axes: Sequence[Axis]) -> float:
    """The bandwidth of the torus's narrowest bisection, across the middle of one axis, one way."""
    chips = math.prod(axis.size for axis in axes)
    return min(chips / axis.size * (1 + axis.wrap) * axis.link_bytes_per_s for axis in axes if axis.size > 1)


def all_to_all_at_least_s(nbytes: float, axes: Sequence[Axis]) -> float:
    """The least time of an all-to-all: the bytes that cross a bisection of the torus, over its links."""
    least = 0.0
    for axis in axes:
        half, other_half = axis.size // 2, (axis.size + 1) // 2  # not equal if the size is odd
        link_bytes = _checked(nbytes) * half * other_half / axis.size / (1 + axis.wrap)
        least = max(least, link_bytes / axis.link_bytes_per_s)
    return least


def permute(nbytes: float) -> Traffic:
    """The traffic of `nbytes` from every device to its neighbour."""
    return Traffic(1, _checked(nbytes))


def halo(before_bytes: float, after_bytes: float) -> Traffic:
    """The traffic of the edges that every device gets from its two neighbours."""
    return Traffic(1, max(_checked(before_bytes), _checked(after_bytes)))


def _checked(nbytes: float) -> float:
    if not 0 <= nbytes < math.inf:  # NaN is not, either
        raise ValueError(f"a number of bytes is 0 or more, not {nbytes}")
    return nbytes


# -- collectives over several axes


@dataclass(frozen=True)
class Phase:
    """A collective along one axis, with its V or B."""

    kind: str
    nbytes: float
    axis: Axis
    traffic: Traffic

    @property
    def seconds(self) -> float:
        return self.traffic.seconds(self.axis)

    @property
    def bound(self) -> str:
        return self.traffic.bound(self.axis)


def rounds_of(
    kind: str, nbytes: float, axes: Sequence[Axis], *, bidirectional: bool = True, spread: bool = False
) -> list[list[Phase]]:
    """Returns the phases of a collective in consecutive rounds; the phases of a round run at once.

    Args:
      kind: all_gather, reduce_scatter, all_reduce or all_to_all.
      nbytes: V, or B of an all_to_all.
      axes: in the order of a reduce-scatter; an all-gather takes them from the last to the first.
      bidirectional: both ways around every axis that wraps around.
      spread: use all links at once. Among axes of the same speed, part p of the array takes axis p + r in round r.
    """
    options = dict(bidirectional=bidirectional, spread=spread)
    if kind == "all_reduce":
        return [r for half in ("reduce_scatter", "all_gather") for r in rounds_of(half, nbytes, axes, **options)]
    along = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_to_all": all_to_all}
    if kind not in along:
        raise ValueError(f"kind={kind!r} does not go over several axes; all_reduce, {', '.join(along)} do")
    rounds = []
    links = [axis for axis in axes if axis.size > 1]
    for _, equals in groupby(links, key=lambda axis: axis.link_bytes_per_s):
        equals = list(equals)
        num_parts = len(equals) if spread else 1
        left = [nbytes / num_parts] * num_parts  # bytes of each part that remain on a device
        for r in range(len(equals)):
            rounds.append([])
            for p in range(num_parts):
                axis = equals[(p + r) % len(equals)]
                traffic = along[kind](left[p], axis.size, bidirectional=bidirectional, wrap=axis.wrap)
                rounds[-1].append(Phase(kind, left[p], axis, traffic))
                left[p] /= 1 if kind == "all_to_all" else axis.size
        nbytes = sum(left)
    return rounds[::-1] if kind == "all_gather" else rounds


def seconds_of(rounds: list[list[Phase]]) -> float:
    """The seconds of all rounds, each of which takes as long as its slowest phase."""
    return math.fsum(max(phase.seconds for phase in phases) for phases in rounds)


def collective_s(kind: str, nbytes: float, axes: Sequence[Axis], **options) -> float:
    """The seconds of a collective over all axes. Arguments and options are those of `rounds_of`."""
    return seconds_of(rounds_of(kind, nbytes, axes, **options))


def summary(rounds: list[list[Phase]]) -> dict:
    """Returns what is predicted for a collective. Its bound is that of its longest phase."""
    phases = [phase for phases in rounds for phase in phases]
    load = {}
    for phase in phases:
        load[phase.axis.name] = load.get(phase.axis.name, 0) + phase.traffic.link_bytes
    return {
        "predicted_seconds": seconds_of(rounds),
        "bound": max(phases, key=attrgetter("seconds")).bound if phases else None,
        "steps": sum(max(phase.traffic.steps for phase in phases) for phases in rounds),
        "busiest_axis": max(load, key=load.get, default=None),
        "link_bytes": max(load.values(), default=0),
    }


# -- communication scaling


def squarest(number: int, num_factors: int) -> tuple[int, ...]:
    """Factors a number as evenly as possible: 9216 in three factors is 16x24x24."""
    if num_factors == 1:
        return (number,)
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(((d, *squarest(number // d, num_factors - 1)) for d in divisors), key=sum)


def scaling(chip: Chip, nbytes: float) -> list[dict]:
    """Returns the cost of an all-reduce on meshes and tori of 1, 2, ... axes, and on the pods that were built."""
    slices = [("pod", chip.axes(pod)) for pod in chip.pods]
    largest = max(map(math.prod, chip.pods))
    for num_chips in sorted({largest, *(4**i for i in range(2, 8) if 4**i < largest)}):
        for shape in (squarest(num_chips, n + 1) for n in range(chip.torus_axes)):
            for kind in ("mesh", "torus"):
                link = dict(link_bytes_per_s=chip.link_bytes_per_s, hop_s=chip.hop_s, wrap=kind == "torus")
                slices.append((kind, [Axis(size, name=str(i), **link) for i, size in enumerate(shape)]))
    return [
        dict(chip=chip.name, kind=kind, shape=tuple(axis.size for axis in axes), bytes=nbytes)
        | summary(rounds_of("all_reduce", nbytes, axes, spread=True))
        for kind, axes in slices
    ]


def print_scaling(args: argparse.Namespace) -> None:
    """Prints the time of an all-reduce against chips, for each payload and chip."""
    payloads = [25.6e6 * 4, 1e9] if args.bytes is None else [args.bytes]
    chips = [chip_of(name) for name in args.chips.split(",")]
    tables = [(chip, nbytes, scaling(chip, nbytes)) for nbytes in payloads for chip in chips]
    if args.plot:
        plot_scaling(tables, args.plot)
    if args.json:
        return print(json.dumps([row for *_, rows in tables for row in rows]))
    print("Time of an all-reduce in ms, predicted: both ways around every axis, on all axes at once.")
    if args.bytes is None:
        print("102.4 MB are the gradients of ResNet-50, 25.6M parameters in float32.")
    text = lambda row: f"{row['predicted_seconds'] * 1e3:.3g}{'*' if row['bound'] == 'latency' else ' '}"
    for chip, nbytes, rows in tables:
        print(f"\n{si(nbytes, 'B')} on {chip.name}, {si(chip.link_bytes_per_s, 'B/s')} a link one way")
        print(" chips" + "".join(f"{f'{n + 1}-D':>10}{'mesh':>9}{'torus':>9}" for n in range(chip.torus_axes)))
        cell = {(row["shape"], row["kind"]): text(row) for row in rows}
        for num_chips, shapes in groupby([shape for shape, kind in cell if kind == "mesh"], math.prod):
            cells = (f"{by(shape):>10}{cell[shape, 'mesh']:>10}{cell[shape, 'torus']:>8}" for shape in shapes)
            print(f"{num_chips:6}{''.join(cells)}".rstrip())
        print(" built", ", ".join(f"{by(shape)} {ms.strip()}" for (shape, kind), ms in cell.items() if kind == "pod"))
    print("\n* bound by latency, others by bandwidth. A torus wraps around on every axis, a mesh on none: there")
    print("the second direction of a ring gains nothing. 1-D: all chips in one ring, on the links of one axis.")
    print("built: existing pods with their own wrap-around links; 128x32 has none along its axis of 128.")


def plot_scaling(tables: list[tuple[Chip, float, list[dict]]], path: str) -> None:
    """Draws a row of panels for each chip and a column for each payload."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ModuleNotFoundError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[plot]"') from None
    num_chips = len({chip for chip, *_ in tables})
    num_payloads = len(tables) // num_chips
    figure = Figure(figsize=(4.5 * num_payloads + 2, 3.6 * num_chips), layout="constrained")
    figure.suptitle("Time of an all-reduce against chips, predicted")
    panels = figure.subplots(num_chips, num_payloads, squeeze=False, sharey="col")
    looks = {"mesh": dict(ls="--", marker="."), "torus": dict(marker="."), "pod": dict(ls="", marker="*", color="k")}
    for panel, (chip, nbytes, rows) in zip(panels.T.flat, tables, strict=True):
        line_of = lambda row: (row["kind"] == "pod", len(row["shape"]), row["kind"])
        for (built, num_axes, kind), line in groupby(sorted(rows, key=line_of), line_of):
            points = [(math.prod(row["shape"]), row["predicted_seconds"] * 1e3) for row in line]
            look = dict(color=f"C{num_axes - 1}", label="as built" if built else f"{num_axes}-D {kind}") | looks[kind]
            panel.loglog(*zip(*points, strict=True), **look)
        panel.set(title=f"{si(nbytes, 'B')} on {chip.name}", xlabel="chips", ylabel="time, ms", xlim=(12, 12_000))
        panel.set_xticks([4**i for i in range(2, 7)])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        panel.grid(alpha=0.3)
    for panel in panels[:, -1]:
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


# -- links of mesh axes


def links_of(
    sizes: dict[str, int], chip: Chip, topology: Sequence[int], *, num_slices: int = 1, core_axis: str = ""
) -> dict[str, list[Axis]]:
    """Returns the links of each mesh axis, with a device's bandwidth, innermost first: the order of a reduce-scatter.

    Args:
      sizes: of all mesh axes, filled.
      topology: chips along each axis of a slice.
      core_axis: that of `core_axis_of`.

    Raises:
      ValueError: the product of the sizes is not the number of devices, or the sizes do not fit the torus or the slices
        (`check_slices`).
    """
    if num_slices < 1:
        raise ValueError(f"num_slices={num_slices} must be 1 or more")
    fill_mesh(sizes, chip.devices * math.prod(topology) * num_slices)
    check_slices(sizes, num_slices)
    links = {axis: [] for axis in MESH_AXES}
    left = dict(sizes)
    core_axis = core_axis_of(sizes, core_axis)
    if chip.devices == 2 and sizes[core_axis] % 2 == 0:
        # The speed inside a v2 or a v3 is not published; that of a link between chips is taken.
        speed = chip.die_to_die_bytes_per_s or chip.link_bytes_per_s
        links[core_axis].append(Axis(2, speed, chip.hop_s, wrap=False, name="die to die"))
        left[core_axis] //= 2
    wires = [*chip.axes(topology), *([chip.across(num_slices)] if num_slices > 1 else [])]
    at, stride = 0, 1  # the torus axis in use, and how much of it is taken
    for axis in reversed(MESH_AXES):
        while left[axis] > 1:
            while at < len(wires) and stride == wires[at].size:
                at, stride = at + 1, 1
            wire = wires[at]
            size = math.gcd(left[axis], wire.size // stride)
            if size == 1:
                raise ValueError(
                    f"mesh axis {axis}:{sizes[axis]} does not fit {chip.name}:{by(topology)}: {left[axis]} of its "
                    f"devices remain for {wire.size // stride} of the {wire.size} along {wire.name or 'an axis'}"
                )
            name = "xyz"[int(wire.name)] if wire.name.isdecimal() else wire.name
            links[axis].append(
                Axis(
                    size,
                    wire.link_bytes_per_s / chip.devices / stride,
                    wire.hop_s * stride,
                    wrap=wire.wrap and size * stride == wire.size,
                    name=name if size == wire.size else f"{size} of {name}",
                )
            )
            left[axis] //= size
            stride *= size
    return links


# -- command line


def explain(phase: Phase) -> str:
    """Returns the formulas of a phase with its numbers in them."""
    axis, h = phase.axis, phase.traffic.steps
    N, payload, moved = axis.size, si(phase.nbytes, "B"), si(phase.traffic.link_bytes, "B")
    hops, formula = f"{'N-1' if h == N - 1 else 'N//2'} = {h}", f"h * V/N = {h} * {payload} / {N}"
    if phase.kind == "all_to_all":
        blocks = round(phase.traffic.link_bytes * N / (phase.nbytes or 1))
        formula = f"{'h(h+1)/2' if blocks == h * (h + 1) // 2 else 'N*N//4'} * B/N = {blocks} * {payload} / {N}"
    elif phase.kind in ("permute", "halo"):
        hops, formula = "1", "B" if phase.kind == "permute" else "max(before, after)"
    latency, transfer = f"{h} * {si(axis.hop_s, 's')}", f"{moved} / {si(axis.link_bytes_per_s, 'B/s')}"
    return (
        f"{phase.kind} of {payload} along axis {axis.name}, N = {N}\n"
        f"      h = {hops}, bytes = {formula} = {moved}\n"
        f"      max(h * t_hop, bytes / W) = max({latency}, {transfer}) = {si(phase.seconds, 's')}, {phase.bound}"
    )


def print_collective(args: argparse.Namespace) -> None:
    """Prints the time of a collective on a slice, and with --explain its phases."""
    chip, topology = parse_topology(args.topology)
    axes = {axis.name: axis for axis in chip.axes(topology)}
    names = args.axes.split(",") if args.axes else list(axes)
    if not {*names} <= {*axes} or len({*names}) < len(names):
        raise ValueError(f"--axes={args.axes}: {args.topology} has the axes {','.join(axes)}; name each at most once")
    axes = [axes[name] for name in names]
    if args.kind in ("permute", "halo"):
        if len(axes) > 1:
            raise ValueError(f"--axes={args.axes}: a {args.kind} uses one axis, not {len(axes)}")
        traffic = permute(args.bytes) if args.kind == "permute" else halo(args.before_bytes, args.after_bytes)
        rounds = [[Phase(args.kind, traffic.link_bytes, axes[0], traffic)]]
    else:
        axes += [chip.across(args.slices)] if args.slices != 1 else []
        rounds = rounds_of(args.kind, args.bytes, axes, bidirectional=not args.one_way, spread=args.spread)
    result = dict(kind=args.kind, topology=args.topology, axes=[axis.name for axis in axes]) | summary(rounds)
    if args.json:
        return print(json.dumps(result))
    shapes = ", ".join(f"{axis.name} ({'ring' if axis.wrap else 'line'} of {axis.size})" for axis in axes)
    print(f"{args.kind} on {args.topology}, predicted\n  axes     {shapes}")
    if "spread" in args:
        ways, order = "one way" if args.one_way else "both ways", "at once" if args.spread else "one after another"
        print(f"  rings    {ways} around, axes {order}")
    print(f"  time     {si(result['predicted_seconds'], 's')}")
    print(f"  bound    {result['bound'] or 'none: there is no other chip'}")
    print(f"  steps    {result['steps']}, each of one hop")
    if args.kind == "all_to_all" and result["bound"]:
        bisection, least = bisection_bytes_per_s(axes), all_to_all_at_least_s(args.bytes, axes)
        print(f"  at least {si(least, 's')}: the bisection has {si(bisection, 'B/s')} one way")
    print(f"  traffic  {si(result['link_bytes'], 'B')} over the busiest link, in its busier direction")
    for number, phases in enumerate(rounds if args.explain else [], 1):
        at_once = f"{len(phases)} at once, on different axes; the slowest: " if len(phases) > 1 else ""
        print(f"  {number:2}. {at_once}{explain(max(phases, key=attrgetter('seconds')))}")


def add_collective_command(commands) -> None:
    about = "time of a collective on a slice; time of an all-reduce against chips"
    kinds = commands.add_parser("collective", help=about, description=about)
    kinds = kinds.add_subparsers(prog="roofline.py collective", metavar="KIND", required=True)
    style = dict(allow_abbrev=False, usage="%(prog)s [--flag=value ...]")
    for kind, about in {
        "all_gather": "every device has a shard and gets the array: --bytes of the array",
        "reduce_scatter": "every device has a summand and gets a shard of the sum: --bytes of the sum",
        "all_reduce": "every device has a summand and gets the sum: --bytes of the sum",
        "all_to_all": "every device has a block for every device: --bytes that a device holds",
        "permute": "every device sends to its neighbour: --bytes that a device sends",
        "halo": "every device gets the edges of both neighbours: --before_bytes, --after_bytes",
    }.items():
        parser = kinds.add_parser(kind, help=about, description=about, **style)
        parser.set_defaults(run=print_collective, parser=parser, kind=kind, slices=1)
        for name in ("before_bytes", "after_bytes") if kind == "halo" else ("bytes",):
            parser.add_argument(f"--{name}", type=float, required=True, metavar="BYTES", help="as in 1e9")
        parser.add_argument("--topology", default="tpu7x:4x4x4", help=f"slice of {', '.join(CHIPS)} [%(default)s]")
        if kind in ("permute", "halo"):
            parser.add_argument("--axes", default="0", help="axis to use, counted from 0 [%(default)s]")
        else:
            parser.add_argument("--axes", help="axes to use, in order and counted from 0, as in 0,1; default: all")
            parser.add_argument("--one_way", action="store_true", help="one way around every axis; default: both ways")
            about = "all axes at once, as XLA does; default: one after another"
            parser.add_argument("--spread", action="store_true", help=about)
        if kind in ("all_gather", "reduce_scatter", "all_reduce"):
            parser.add_argument("--slices", type=int, default=1, help="number of slices [%(default)s]")
        parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
        parser.add_argument("--json", action="store_true", help="a JSON object, in seconds and bytes")
    about = "time of an all-reduce against chips, on meshes and tori of 1, 2, ... axes"
    parser = kinds.add_parser("scaling", help=about, description=about, **style)
    parser.set_defaults(run=print_scaling, parser=parser)
    parser.add_argument("--bytes", type=float, metavar="BYTES", help="bytes of the sum; default: 102.4e6 and 1e9")
    parser.add_argument("--chips", default="v3,tpu7x", help=f"some of {', '.join(CHIPS)} [%(default)s]")
    parser.add_argument("--plot", type=command.path, metavar="FILE.png", help="draw the times; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="a list of JSON objects, in seconds and bytes")
