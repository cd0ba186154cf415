"""What a matmul costs on one chip, and a sharded one on a mesh of them: FLOPs, bytes, what binds. Arithmetic, no jax.

    python roofline.py matmul --m=8192 --k=8192 --n=28672 --explain
    python roofline.py matmul "A[I_X, J] . B[J_X, K_Y] -> C[I_X, K_Y]" --sizes=I:8192,J:8192,K:28672 --mesh=X:4,Y:8

**A matmul** [m, k] . [k, n] (the scaling book: Austin et al. 2025, part 1, https://jax-ml.github.io/scaling-book),
on a chip of C FLOP/s and a memory of W bytes/s, each array passing once between memory and core:

    FLOPs        2 * m * k * n
    bytes        m*k*b_lhs + k*n*b_rhs + m*n*b_out          b: bytes of an element
    intensity    FLOPs / bytes                              compute-bound where it is over C/W, the chip's ridge
    seconds      max(FLOPs / C, bytes / W) at least, their sum if nothing overlaps

    compute-bound from   m = k*n*b_rhs / (2*k*n * W/C - k*b_lhs - n*b_out)      at no m, if that is not over 0
    of large k and n     m = C/W * b_rhs/2                                      the book's rule; bf16: C/W

m is the batch in tokens, [k, n] the weights. A bound from below: an array that VMEM cannot hold is read more than once.

**A sharded matmul** (the same, part 3). A[I_XY, J] is cut along I over the mesh axes X and Y, first (outermost) over X;
along J it is whole. C[I, K]{U_X}: each chip along X has a summand of C. An axis cuts an array once at most. The cases:

    1    A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]    nothing to move
    2    A[I, J_X] . B[J, K] -> C[I, K]          what is summed over is cut in one operand only, or cut otherwise:
                                                 all-gather it, along what is not cut alike
    3    A[I, J_X] . B[J_X, K] -> C[I, K]{U_X}   cut alike: a matmul of summands; {U_X} unless asked for becomes [I, K]
                                                 by an all-reduce, or [I_X, K], [I, K_X] by a reduce-scatter
    4    A[I_X, J] . B[J, K_X] -> C[I_X, K_X]    illegal: a chip would have the blocks (x, x) of C, none the others. Of
                                                 C[I_X, K], B is all-gathered, of C[I, K_X] A, else the smaller

What the output is to be cut along, and nothing is yet, is sliced off before the matmul: no communication, less work.
What it is to be whole along is gathered after the matmul. An axis that goes from one dim to another is an all-to-all.
The last axis of a dim can go alone, one before it cannot: to become I_Y, I_XY is gathered over both and sliced, for its
blocks lie otherwise than those of I_YX (the book calls it an all-gather over X). A strategy that is not the rule's has
its notation, too: A[I, J_X] . B[J_X, K] for a B that is whole, as it costs nothing to slice it.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from operator import attrgetter

import command
from hardware import CHIPS, Axis, Chip, check_size, chip_of, si
from predicted.interconnect import Phase, explain, rounds_of, summary

# -- a matmul on one chip

DTYPE_BYTES = {"f32": 4, "bf16": 2, "fp8": 1, "int8": 1, "int4": 0.5}


@dataclass(frozen=True)
class Matmul:
    """[m, k] . [k, n] -> [m, n] and the types of the three; of a layer, m are the tokens and [k, n] the weights."""

    m: float
    k: float
    n: float
    lhs_dtype: str = "bf16"
    rhs_dtype: str = "bf16"
    out_dtype: str = "bf16"

    def __post_init__(self):
        if not all(0 < size < math.inf for size in (self.m, self.k, self.n)):
            raise ValueError(f"a matmul has m, k and n over 0, unlike {self.m:g}, {self.k:g}, {self.n:g}")
        for dtype in (self.lhs_dtype, self.rhs_dtype, self.out_dtype):
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")

    @property
    def flops(self) -> float:
        return 2 * self.m * self.k * self.n

    @property
    def nbytes(self) -> float:
        """Of the three arrays, each once."""
        lhs, rhs, out = (DTYPE_BYTES[dtype] for dtype in (self.lhs_dtype, self.rhs_dtype, self.out_dtype))
        return self.m * self.k * lhs + self.k * self.n * rhs + self.m * self.n * out

    @property
    def intensity(self) -> float:
        return self.flops / self.nbytes

    @property
    def dtype(self) -> str:
        """What is multiplied: the wider type of the two operands, to which the narrower one is converted."""
        lhs, rhs = sorted((self.lhs_dtype, self.rhs_dtype), key=DTYPE_BYTES.get)
        if lhs != rhs and DTYPE_BYTES[lhs] == DTYPE_BYTES[rhs]:
            raise ValueError(f"a matmul of {self.lhs_dtype} and {self.rhs_dtype}: neither holds the other's values")
        return rhs


@dataclass(frozen=True)
class Bounds:
    """Seconds of a matmul: of its arithmetic alone, and of its bytes alone."""

    compute_s: float
    memory_s: float

    @property
    def lower_s(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def upper_s(self) -> float:
        return self.compute_s + self.memory_s

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s >= self.memory_s else "memory"


def memory_bytes_per_s(chip: Chip, memory: str) -> float:
    """Of hbm, vmem or pcie (operands in the host's memory)."""
    speeds = {"hbm": chip.hbm_bytes_per_s, "vmem": chip.vmem_bytes_per_s, "pcie": chip.pcie_bytes_per_s}
    if not speeds.get(memory):
        raise ValueError(f"{chip.name} has no published speed of memory {memory!r}")
    return speeds[memory]


def matmul_bounds(matmul: Matmul, chip: Chip, *, memory: str = "hbm", per: str = "chip") -> Bounds:
    """On a whole chip, whose devices share the work evenly, or on one of its devices."""
    share = {"chip": 1, "device": 1 / chip.devices}[per]
    return Bounds(
        matmul.flops / (chip.flops_per_s(matmul.dtype) * share),
        matmul.nbytes / (memory_bytes_per_s(chip, memory) * share),
    )


def critical_batch(matmul: Matmul, chip: Chip, *, memory: str = "hbm") -> float:
    """The m from which this matmul is compute-bound, or inf; the same for a chip and a device."""
    ridge = chip.flops_per_s(matmul.dtype) / memory_bytes_per_s(chip, memory)
    lhs, rhs, out = (DTYPE_BYTES[dtype] for dtype in (matmul.lhs_dtype, matmul.rhs_dtype, matmul.out_dtype))
    # Bytes whose time the FLOPs of a row of m cover, less those of the row itself
    gain = 2 * matmul.k * matmul.n / ridge - matmul.k * lhs - matmul.n * out
    return matmul.k * matmul.n * rhs / gain if gain > 0 else math.inf


def critical_batch_rule(matmul: Matmul, chip: Chip, *, memory: str = "hbm") -> float:
    """The same of large k and n: B > C/W * bytes of a weight / 2."""
    return chip.flops_per_s(matmul.dtype) / memory_bytes_per_s(chip, memory) * DTYPE_BYTES[matmul.rhs_dtype] / 2


# -- sharded matmuls


@dataclass(frozen=True)
class Layout:
    """An array, and for each of its dims the mesh axes that cut it, the outermost first."""

    name: str
    cuts: dict[str, tuple[str, ...]]
    unreduced: tuple[str, ...] = ()  # along these each chip has a summand of the array

    def __str__(self):
        dims = ", ".join(f"{dim}_{''.join(cut)}" if cut else dim for dim, cut in self.cuts.items())
        return f"{self.name}[{dims}]" + (f"{{U_{''.join(self.unreduced)}}}" if self.unreduced else "")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for cut in self.cuts.values() for axis in cut)

    def local(self, sizes: dict[str, float], mesh: dict[str, Axis]) -> dict[str, float]:
        """The part of each dim that a chip has."""
        return {dim: sizes[dim] / math.prod(mesh[axis].size for axis in cut) for dim, cut in self.cuts.items()}


@dataclass(frozen=True)
class Step:
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, slice or matmul
    axes: tuple[str, ...]  # that it goes over
    dim: str  # that is gathered, scattered or sliced
    to_dim: str  # of an all-to-all: that is cut instead of dim
    before: str
    after: str
    nbytes: float = 0  # V or B of a collective; of a matmul, its three arrays
    flops: float = 0
    seconds: float = 0
    bound: str | None = None
    why: str = ""
    rounds: Sequence[Sequence[Phase]] = ()


@dataclass(frozen=True)
class ShardedMatmul:
    """Predicted for each chip, all of which do the same."""

    steps: list[Step]
    num_chips: int
    flops: float  # of the whole matmul, done once

    @property
    def compute_s(self) -> float:
        return sum(step.seconds for step in self.steps if step.kind == "matmul")

    @property
    def communication_s(self) -> float:
        return sum(step.seconds for step in self.steps if step.kind != "matmul")

    @property
    def overlapped_s(self) -> float:
        return max(self.compute_s, self.communication_s)

    @property
    def sequential_s(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def bound(self) -> str:
        return "computation" if self.compute_s >= self.communication_s else "communication"

    @property
    def useful_share(self) -> float:
        """Of the FLOPs that the chips do: 1/8 where eight of them do the same."""
        return self.flops / (self.num_chips * sum(step.flops for step in self.steps))


def parse_matmul(notation: str) -> tuple[Layout, Layout, Layout]:
    """A, B and C of A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y], where C may be C[I, K]{U_X}; axes have one letter each."""
    subscript = r"_\{?([A-Za-z]+)\}?"
    array = rf"\s*([A-Za-z]\w*)\s*\[([^\]]*)\]\s*(?:\{{\s*U{subscript}\s*\}})?\s*"
    match = re.fullmatch(rf"{array}[.·*@]{array}(?:->|→){array}", notation)
    if not match or len({match[1], match[4], match[7]}) < 3:
        raise ValueError(f"{notation!r} does not read as A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]")
    arrays = []
    for name, inside, unreduced in (match.groups()[i : i + 3] for i in (0, 3, 6)):
        cuts = {}
        for text in inside.split(","):
            dim = re.fullmatch(rf"\s*([A-Za-z]+)(?:{subscript})?\s*", text)
            if not dim or dim[1] in cuts:
                raise ValueError(f"{name}[{inside}]: dims have a name each, and behind a _ the axes that cut them")
            cuts[dim[1]] = tuple(dim[2] or "")
        arrays.append(Layout(name, cuts, tuple(unreduced or "")))
        axes = [*arrays[-1].axes, *arrays[-1].unreduced]
        if twice := [axis for axis in axes if axes.count(axis) > 1]:
            raise ValueError(
                f"{arrays[-1]} uses {twice[0]} twice: chip i along {twice[0]} would have its block (i, i), and no chip "
                "a block (i, j)"
            )
    lhs, rhs, out = arrays
    summed = [dim for dim in lhs.cuts if dim in rhs.cuts]
    if lhs.unreduced or rhs.unreduced:
        raise ValueError(f"{notation!r}: only the result may be left unreduced")
    if not summed or {*out.cuts} != {*lhs.cuts} ^ {*rhs.cuts}:
        raise ValueError(
            f"{notation!r}: dims of both {lhs.name} and {rhs.name} are summed over ({', '.join(summed) or 'none'}), "
            f"{out.name} has all the others, not {', '.join(out.cuts)}"
        )
    return lhs, rhs, out


def meet(lhs: Layout, rhs: Layout, out: Layout, smaller: str) -> tuple[Layout, Layout, Layout]:
    """The layouts in which the local matmul happens: of its operands and of its product.

    Args:
      smaller: name of the operand that is gathered where the output does not decide.
    """
    cuts, summed = {}, ()
    for dim in lhs.cuts:
        if dim in rhs.cuts:
            alike = _common(lhs.cuts[dim], rhs.cuts[dim])
            # {U_X} of the output: an operand that is whole along the sum drops to its part.
            asked = (axis for axis in (*lhs.cuts[dim], *rhs.cuts[dim]) if axis in out.unreduced)
            cuts[dim] = alike + tuple(axis for axis in dict.fromkeys(asked) if axis not in (*summed, *alike))
            summed += cuts[dim]
    if missing := [axis for axis in out.unreduced if axis not in summed]:
        raise ValueError(f"{out}: {missing[0]} cuts what is summed over in neither {lhs.name} nor {rhs.name}")

    array_of = {dim: array for array in (lhs, rhs) for dim in array.cuts if dim in out.cuts}
    for dim, array in array_of.items():
        cuts[dim] = tuple(takewhile(lambda axis: axis not in summed, array.cuts[dim]))
    for axis in lhs.axes:
        dims = [dim for dim in array_of if axis in cuts[dim]]
        if len(dims) == 2:
            wanted = [dim for dim in dims if axis in out.cuts[dim]]
            keeps = wanted[0] if wanted else next(dim for dim in dims if array_of[dim].name != smaller)
            loses = dims[1 - dims.index(keeps)]
            cuts[loses] = cuts[loses][: cuts[loses].index(axis)]
    used = {axis for cut in cuts.values() for axis in cut}
    for dim in array_of:
        more = out.cuts[dim][len(cuts[dim]) :] if _common(cuts[dim], out.cuts[dim]) == cuts[dim] else ()
        cuts[dim] += tuple(takewhile(lambda axis: axis not in used, more))
    of = lambda array, unreduced=(): Layout(array.name, {dim: cuts[dim] for dim in array.cuts}, unreduced)
    return of(lhs), of(rhs), of(out, summed)


def next_move(now: Layout, target: Layout) -> tuple[str, tuple[str, ...], str, str] | None:
    """(kind, axes, dim, to_dim) of a collective on the way from a layout to another, the cheapest first."""
    missing = {}  # dims that only lack some axes behind those that they have
    for dim, cut in now.cuts.items():
        if target.cuts[dim][: len(cut)] == cut:
            missing[dim] = target.cuts[dim][len(cut) :]
    to_reduce = [axis for axis in now.unreduced if axis not in target.unreduced]
    for dim, axes in missing.items():
        if run := tuple(takewhile(lambda axis: axis not in (*now.axes, *now.unreduced), axes)):
            return "slice", run, dim, ""
    for dim, axes in missing.items():
        if run := tuple(takewhile(lambda axis: axis in to_reduce, axes)):
            return "reduce_scatter", run, dim, ""
    wrong = {dim: cut[len(_common(cut, target.cuts[dim])) :] for dim, cut in now.cuts.items() if dim not in missing}
    for dim, axes in wrong.items():
        for to_dim, wanted in missing.items():
            if wanted[:1] == axes[-1:]:
                return "all_to_all", axes[-1:], dim, to_dim
    if to_reduce:  # also what is wanted behind a wrong axis: summed now, while there is less of it, and sliced then
        return "all_reduce", tuple(to_reduce), "", ""
    for dim, axes in wrong.items():
        return "all_gather", axes, dim, ""
    return None


def moved(now: Layout, kind: str, axes: tuple[str, ...], dim: str, to_dim: str) -> Layout:
    """The layout after it."""
    cuts = dict(now.cuts)
    if kind in ("slice", "reduce_scatter"):
        cuts[dim] += axes
    elif kind in ("all_gather", "all_to_all"):
        cuts[dim] = cuts[dim][: -len(axes)]
    if kind == "all_to_all":
        cuts[to_dim] += axes
    unreduced = now.unreduced
    if kind in ("reduce_scatter", "all_reduce"):
        unreduced = tuple(axis for axis in unreduced if axis not in axes)
    return Layout(now.name, cuts, unreduced)


def sharded_matmul(
    notation: str,
    *,
    sizes: dict[str, int],
    mesh: dict[str, int | Axis],
    chip: Chip = CHIPS["tpu7x"],
    lhs_dtype: str = "bf16",
    rhs_dtype: str = "bf16",
    out_dtype: str = "bf16",
    **options,
) -> ShardedMatmul:
    """The steps of a sharded matmul, and what they take on the chips of a mesh.

    Args:
      notation: "A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]", see the top of this file.
      sizes: of each dim.
      mesh: chips along each mesh axis, which is an axis of the chip's torus (see `mesh_axes`); or the Axis itself.
      out_dtype: of the result, and of its summands on the way.
      options: bidirectional and spread, of `rounds_of`.

    Raises:
      ValueError: what does not read, is illegal or does not divide.
    """
    lhs, rhs, out = parse_matmul(notation)
    mesh = mesh_axes(chip, mesh)
    dtypes = {lhs.name: lhs_dtype, rhs.name: rhs_dtype, out.name: out_dtype}
    for array in (lhs, rhs, out):
        for axis in (*array.axes, *array.unreduced):
            if axis not in mesh:
                raise ValueError(f"{array}: there is no axis {axis} in the mesh of {', '.join(mesh) or 'no axes'}")
        for dim, cut in array.cuts.items():
            if dim not in sizes or sizes[dim] < 1 or sizes[dim] != int(sizes[dim]):
                raise ValueError(f"{array}: {dim} needs a size, a whole number, not {sizes.get(dim)}")
            if sizes[dim] % (parts := math.prod(mesh[axis].size for axis in cut)):
                raise ValueError(f"{array}: {dim} = {sizes[dim]} does not divide into {parts} over {', '.join(cut)}")

    for dtype in dtypes.values():
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")

    def nbytes(array: Layout) -> float:
        return math.prod(array.local(sizes, mesh).values()) * DTYPE_BYTES[dtypes[array.name]]

    def matmul(lhs: Layout, rhs: Layout) -> Matmul:
        one, other = lhs.local(sizes, mesh), rhs.local(sizes, mesh)
        dims_of_mkn = one.keys() - other.keys(), one.keys() & other.keys(), other.keys() - one.keys()
        mkn = (math.prod((one | other)[dim] for dim in dims) for dims in dims_of_mkn)
        return Matmul(*mkn, lhs_dtype, rhs_dtype, out_dtype)

    def steps_between(now: Layout, target: Layout) -> Iterator[Step]:
        while move := next_move(now, target):
            after = moved(now, *move)
            kind, axes, dim, _ = move
            if kind == "slice":
                yield Step(*move, str(now), str(after), why="each chip keeps its part")
            else:
                moving = nbytes(after if kind == "all_gather" else now)
                rounds = rounds_of(kind, moving, [mesh[axis] for axis in axes], **options)
                why = f"{out.name} is asked for like this"
                if now.name != out.name:
                    why = "case 4: no axis cuts two dims" if dim in out.cuts else f"case 2: {dim} is not cut alike"
                elif kind in ("reduce_scatter", "all_reduce"):
                    why = "case 3: each chip has a summand"
                of = summary(rounds)
                yield Step(*move, str(now), str(after), moving, 0, of["predicted_seconds"], of["bound"], why, rounds)
            now = after

    lhs_met, rhs_met, product = meet(lhs, rhs, out, min(lhs, rhs, key=nbytes).name)
    local = matmul(lhs_met, rhs_met)
    bounds = matmul_bounds(local, chip)
    local_step = Step(
        *("matmul", (), "", "", f"{lhs_met} . {rhs_met}", str(product)),
        *(local.nbytes, local.flops, bounds.lower_s, bounds.bound, "of what each chip has"),
    )
    steps = [*steps_between(lhs, lhs_met), *steps_between(rhs, rhs_met), local_step, *steps_between(product, out)]
    whole = matmul(*(Layout(array.name, dict.fromkeys(array.cuts, ())) for array in (lhs, rhs)))
    return ShardedMatmul(steps, math.prod(axis.size for axis in mesh.values()), whole.flops)


def mesh_axes(chip: Chip, mesh: dict[str, int | Axis]) -> dict[str, Axis]:
    """Mesh axes as axes of the chip's torus; the torus's others are taken to wrap around if these can.

    So X:4,Y:8 on TPU7x wraps around (whole cubes, 4x8x4), X:4,Y:2 does not, and on v5e only an axis of 16 does.
    """
    for name, size in mesh.items():
        if len(name) != 1:
            raise ValueError(f"mesh axis {name!r}: axes have one letter, so that I_XY is cut over X and Y")
        if not isinstance(size, Axis):
            check_size(size)
    sizes = {name: size for name, size in mesh.items() if not isinstance(size, Axis) and size > 1}
    if len(sizes) > chip.torus_axes:
        raise ValueError(f"{', '.join(sizes)} are {len(sizes)} axes, the torus of {chip.name} has {chip.torus_axes}")
    others = [chip.cube or 1] * (chip.torus_axes - len(sizes))
    wraps = {name: axis.wrap for name, axis in zip(sizes, chip.axes([*sizes.values(), *others]), strict=False)}
    link = (chip.link_bytes_per_s, chip.hop_s)
    return {
        name: size if isinstance(size, Axis) else Axis(size, *link, wrap=wraps.get(name, False), name=name)
        for name, size in mesh.items()
    }


def _common(one: tuple, other: tuple) -> tuple:
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# -- command line


def print_matmul(args: argparse.Namespace) -> None:
    """A matmul on a chip, or a sharded one on a mesh."""
    chip = chip_of(args.chip)
    dtypes = {name: getattr(args, name) or args.dtype for name in ("lhs_dtype", "rhs_dtype", "out_dtype")}
    mkn = {name: getattr(args, name) for name in ("m", "k", "n")}
    if args.notation is None:
        if None in mkn.values() or args.sizes or args.mesh or args.one_way or args.spread:
            raise ValueError("a matmul has --m, --k and --n, or a notation with --sizes, --mesh, --one_way, --spread")
        return print_one_chip(Matmul(**mkn, **dtypes), chip, args)
    if {*mkn.values()} != {None} or args.memory != "hbm":
        raise ValueError("a notation goes with --sizes and --mesh, not with --m, --k, --n or --memory")
    sizes, mesh = pairs(args.sizes, "sizes"), pairs(args.mesh, "mesh")
    options = dict(bidirectional=not args.one_way, spread=args.spread)
    found = sharded_matmul(args.notation, sizes=sizes, mesh=mesh, chip=chip, **dtypes, **options)
    if args.json:
        names = "num_chips compute_s communication_s overlapped_s sequential_s bound useful_share"
        result = dict(kind="predicted", notation=args.notation, chip=chip.name)
        result |= {name: getattr(found, name) for name in names.split()}
        steps = [{name: value for name, value in asdict(step).items() if name != "rounds"} for step in found.steps]
        return print(json.dumps(result | dict(steps=steps)))
    wires = [
        f"{axis.name} ({'ring' if axis.wrap else 'line'} of {axis.size})" for axis in mesh_axes(chip, mesh).values()
    ]
    print(f"{args.notation} on {chip.name}, predicted, of each chip\n  mesh     {', '.join(wires)}")
    for number, step in enumerate(found.steps, 1):
        print(f"  {number}. {step.kind} {''.join(step.axes)}".ljust(24), f"{step.before} -> {step.after}")
        work = [] if step.kind == "slice" else [si(step.seconds, "s"), f"bound by {step.bound or 'nothing'}"]
        work += [si(step.flops, "FLOP")] if step.flops else []
        print(" " * 5 + ", ".join([*work, si(step.nbytes, "B"), step.why]))
        for phases in step.rounds if args.explain else []:
            print("     " + explain(max(phases, key=attrgetter("seconds"))))
        if args.explain and step.flops:
            C, W = chip.flops_per_s(Matmul(1, 1, 1, **dtypes).dtype), chip.hbm_bytes_per_s
            terms = f"{si(step.flops, 'FLOP')} / {si(C, 'FLOP/s')}, {si(step.nbytes, 'B')} / {si(W, 'B/s')}"
            print(f"     max(FLOPs / C, bytes / W) = max({terms}) = {si(step.seconds, 's')}")
    print(f"  compute  {si(found.compute_s, 's')}; communication {si(found.communication_s, 's')}: {found.bound} binds")
    print(f"  time     {si(found.overlapped_s, 's')} if they overlap, {si(found.sequential_s, 's')} if not")
    if found.useful_share < 1:
        print(f"  work     {1 / found.useful_share:.4g} times what has to be done: chips do the same")


def print_one_chip(matmul: Matmul, chip: Chip, args: argparse.Namespace) -> None:
    memory = args.memory
    C, W = chip.flops_per_s(matmul.dtype), memory_bytes_per_s(chip, memory)
    bounds = {per: matmul_bounds(matmul, chip, memory=memory, per=per) for per in ("chip", "device")}
    bound = bounds["chip"].bound if bounds["chip"].bound == "compute" else memory
    critical, rule = critical_batch(matmul, chip, memory=memory), critical_batch_rule(matmul, chip, memory=memory)
    if args.json:
        result = dict(kind="predicted", chip=chip.name, memory=memory, flops=matmul.flops, bytes=matmul.nbytes)
        result |= dict(flops_per_byte=matmul.intensity, ridge_flops_per_byte=C / W, bound=bound)
        result |= dict(critical_m=critical if critical < math.inf else None, critical_m_rule=rule)
        for per, of in bounds.items():
            result[f"per_{per}"] = asdict(of) | dict(predicted_seconds=of.lower_s, not_overlapped_s=of.upper_s)
        return print(json.dumps(result))
    m, k, n, lhs, rhs, out = (getattr(matmul, field) for field in matmul.__dataclass_fields__)
    since = lambda m: f"compute-bound from m = {m:.4g} on" if m < math.inf else "compute-bound at no m"
    in_vmem = since(critical_batch(matmul, chip, memory="vmem"))
    fits = "fit" if matmul.nbytes <= chip.vmem_bytes else "do not fit"
    print(f"{lhs}[{m:g}, {k:g}] . {rhs}[{k:g}, {n:g}] -> {out}[{m:g}, {n:g}] on {chip.name}, predicted")
    print(
        f"  work       {si(matmul.flops, 'FLOP')}, {si(matmul.nbytes, 'B')}: each array once through {memory.upper()}"
    )
    print(f"  intensity  {matmul.intensity:.4g} FLOPs/B; the chip has {C / W:.4g} = {si(C, 'FLOP/s')} / {si(W, 'B/s')}")
    for per, of in list(bounds.items())[: chip.devices]:
        print(f"  a {per:8} {si(of.lower_s, 's')} at least, {si(of.upper_s, 's')} if nothing overlaps")
    print(f"  bound      {bound}; {since(critical)} (C/W * bytes of a weight / 2 = {rule:.4g})")
    print(f"  in VMEM    {in_vmem}; the arrays {fits} in the {si(chip.vmem_bytes, 'B')} of a chip")
    if args.explain:
        of, array_bytes = bounds["chip"], lambda *sizes: si(math.prod(sizes), "B")
        b_lhs, b_rhs, b_out = (DTYPE_BYTES[dtype] for dtype in (lhs, rhs, out))
        arrays = f"{array_bytes(m, k, b_lhs)} + {array_bytes(k, n, b_rhs)} + {array_bytes(m, n, b_out)}"
        gain = f"{array_bytes(2, k, n, W / C)} - {array_bytes(k, b_lhs)} - {array_bytes(n, b_out)}"
        print(f"  FLOPs      2 * m * k * n = 2 * {m:g} * {k:g} * {n:g} = {si(matmul.flops, 'FLOP')}")
        print(f"  bytes      m*k*b_lhs + k*n*b_rhs + m*n*b_out = {arrays} = {si(matmul.nbytes, 'B')}")
        print(f"  a chip     max(FLOPs / C, bytes / W) = max({si(of.compute_s, 's')}, {si(of.memory_s, 's')})")
        print(f"  from m     k*n*b_rhs / (2*k*n * W/C - k*b_lhs - n*b_out) = {array_bytes(k, n, b_rhs)} / ({gain})")


def pairs(text: str | None, flag: str) -> dict[str, int]:
    """X:4,Y:8"""
    if not re.fullmatch(r"[A-Za-z]+:\d+(,[A-Za-z]+:\d+)*", text or ""):
        raise ValueError(f"--{flag}={text or ''}: names and sizes, as in X:4,Y:8")
    found = [pair.split(":") for pair in text.split(",")]
    if len(dict(found)) < len(found):
        raise ValueError(f"--{flag}={text} has a name twice")
    return {name: int(size) for name, size in found}


def add_matmul_command(commands) -> None:
    about = "time of a matmul on a chip, or of a sharded one on a mesh of chips"
    parser = commands.add_parser(
        "matmul",
        help=about,
        description=about,
        allow_abbrev=False,
        usage="%(prog)s {--m=M --k=K --n=N | NOTATION --sizes=I:8192,... --mesh=X:4,...} [--flag=value ...]",
    )
    parser.set_defaults(run=print_matmul, parser=parser)
    about = "of a sharded matmul: A[I, J_X] . B[J_X, K_Y] -> C[I, K_Y]{U_X}"
    parser.add_argument("notation", nargs="?", metavar="NOTATION", help=about)
    for name, what in dict(m="rows of A, tokens", k="columns of A, summed over", n="columns of B").items():
        parser.add_argument(f"--{name}", type=command.size, help=f"{what}, of A[m, k] . B[k, n]")
    parser.add_argument("--sizes", metavar="I:8192,J:...", help="of the dims of a sharded matmul")
    parser.add_argument("--mesh", metavar="X:4,Y:8", help="chips along each mesh axis, an axis of the torus each")
    parser.add_argument("--dtype", default="bf16", help=f"of all arrays: {', '.join(DTYPE_BYTES)} [%(default)s]")
    for name, what in dict(lhs="A", rhs="B", out="the result, and of its summands").items():
        parser.add_argument(f"--{name}_dtype", metavar="DTYPE", help=f"of {what}, if another")
    parser.add_argument("--chip", default="tpu7x", help=f"one of {', '.join(CHIPS)} [%(default)s]")
    parser.add_argument("--memory", default="hbm", help="where the arrays are: hbm, vmem or pcie [%(default)s]")
    parser.add_argument("--one_way", action="store_true", help="one way round every axis; default: both ways")
    parser.add_argument("--spread", action="store_true", help="all axes of a collective at once; default: in turn")
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, bytes and FLOPs")
