"""The cost of a matmul on one chip, and of a sharded one on a mesh: FLOPs, bytes, what binds. Arithmetic, no jax.

    python roofline.py matmul --m=8192 --k=8192 --n=28672 --explain
    python roofline.py matmul "A[I_X, J] . B[J_X, K_Y] -> C[I_X, K_Y]" --sizes=I:8192,J:8192,K:28672 --mesh=X:4,Y:8

**Formula** (the scaling book: Austin et al. 2025, part 1, https://jax-ml.github.io/scaling-book). A matmul
[m, k] . [k, n] runs on a chip of C FLOP/s with a memory of W bytes/s. Each array passes once between memory and core:

    FLOPs        2 * m * k * n
    bytes        m*k*b_lhs + k*n*b_rhs + m*n*b_out          b: bytes of an element
    intensity    FLOPs / bytes                              compute-bound where it is over C/W, the chip's ridge
    seconds      max(FLOPs / C, bytes / W) at least, their sum if nothing overlaps

    compute-bound from   m = k*n*b_rhs / (2*k*n * W/C - k*b_lhs - n*b_out)      at no m, if that is not over 0
    for large k and n    m = C/W * b_rhs/2                                      the book's rule; bf16: C/W

m is the batch in tokens, [k, n] the weights. The time is a lower bound: an array that VMEM cannot hold is read more
than once.

**Sharded matmuls** (part 3 of the book). A[I_XY, J] is sharded along I over the mesh axes X and Y, X being the outer
one, and not along J. C[I, K]{U_X} is unreduced: each chip along X has a summand of C. An axis shards at most one dim of
an array. The cases:

    1    A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]    no communication
    2    A[I, J_X] . B[J, K] -> C[I, K]          the contracted dim is sharded in one operand only, or differently in
                                                 both: it is all-gathered over the axes that differ
    3    A[I, J_X] . B[J_X, K] -> C[I, K]{U_X}   sharded alike: each chip computes a summand. Unless the output is
                                                 {U_X}, it becomes [I, K] by an all-reduce, or [I_X, K] or [I, K_X] by a
                                                 reduce-scatter
    4    A[I_X, J] . B[J, K_X] -> C[I_X, K_X]    illegal: a chip would have the blocks (x, x) of C, none the others.
                                                 For C[I_X, K], B is all-gathered, for C[I, K_X] A, else the smaller

A dim that only the output shards is sliced before the matmul: no communication, less work. A dim that the output does
not shard is gathered after the matmul. An axis that moves from one dim to another is an all-to-all. The last axis of a
dim can be gathered alone, an earlier one cannot: I_XY becomes I_Y by a gather over both and a slice, because its blocks
are ordered otherwise than those of I_YX. (The book calls it an all-gather over X.) To choose another strategy, write an
operand in the layout that it needs: A[I, J_X] . B[J_X, K] for an unsharded B, as a slice costs nothing.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
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
    """A matmul [m, k] . [k, n] -> [m, n] with its dtypes; in a layer, m is the tokens and [k, n] the weights."""

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
            _check_dtype(dtype)

    @property
    def flops(self) -> float:
        return 2 * self.m * self.k * self.n

    @property
    def nbytes(self) -> float:
        """The bytes of the three arrays, each counted once."""
        lhs, rhs, out = (DTYPE_BYTES[dtype] for dtype in (self.lhs_dtype, self.rhs_dtype, self.out_dtype))
        return self.m * self.k * lhs + self.k * self.n * rhs + self.m * self.n * out

    @property
    def intensity(self) -> float:
        return self.flops / self.nbytes

    @property
    def dtype(self) -> str:
        """The dtype of the multiplication: the wider one of the operands, to which the narrower one is converted."""
        lhs, rhs = sorted((self.lhs_dtype, self.rhs_dtype), key=DTYPE_BYTES.get)
        if lhs != rhs and DTYPE_BYTES[lhs] == DTYPE_BYTES[rhs]:
            raise ValueError(f"a matmul of {self.lhs_dtype} and {self.rhs_dtype}: neither represents the other")
        return rhs


@dataclass(frozen=True)
class Bounds:
    """The seconds of a matmul's arithmetic alone and of its bytes alone."""

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
    """The speed of a chip's hbm, vmem or pcie (for operands in the host's memory)."""
    speeds = {"hbm": chip.hbm_bytes_per_s, "vmem": chip.vmem_bytes_per_s, "pcie": chip.pcie_bytes_per_s}
    if not speeds.get(memory):
        raise ValueError(f"{chip.name} has no published speed of memory {memory!r}")
    return speeds[memory]


def matmul_bounds(matmul: Matmul, chip: Chip, *, memory: str = "hbm", per: str = "chip") -> Bounds:
    """The bounds of a matmul on a chip, whose devices share the work evenly, or on one of its devices."""
    share = {"chip": 1, "device": 1 / chip.devices}[per]
    return Bounds(
        matmul.flops / (chip.flops_per_s(matmul.dtype) * share),
        matmul.nbytes / (memory_bytes_per_s(chip, memory) * share),
    )


def critical_batch(matmul: Matmul, chip: Chip, *, memory: str = "hbm") -> float:
    """The m from which a matmul is compute-bound, or inf; the same for a chip and a device."""
    ridge = chip.flops_per_s(matmul.dtype) / memory_bytes_per_s(chip, memory)
    lhs, rhs, out = (DTYPE_BYTES[dtype] for dtype in (matmul.lhs_dtype, matmul.rhs_dtype, matmul.out_dtype))
    # The bytes that the FLOPs of one row of m hide, less the bytes of the row itself.
    gain = 2 * matmul.k * matmul.n / ridge - matmul.k * lhs - matmul.n * out
    return matmul.k * matmul.n * rhs / gain if gain > 0 else math.inf


def critical_batch_rule(matmul: Matmul, chip: Chip, *, memory: str = "hbm") -> float:
    """`critical_batch` for large k and n: C/W * bytes of a weight / 2."""
    return chip.flops_per_s(matmul.dtype) / memory_bytes_per_s(chip, memory) * DTYPE_BYTES[matmul.rhs_dtype] / 2


# -- sharded matmuls


@dataclass(frozen=True)
class Layout:
    """An array, and for each of its dims the mesh axes that shard it, the outermost first."""

    name: str
    sharding: dict[str, tuple[str, ...]]
    unreduced: tuple[str, ...] = ()  # along these axes each chip has a summand of the array

    def __str__(self):
        dims = ", ".join(f"{dim}_{''.join(axes)}" if axes else dim for dim, axes in self.sharding.items())
        return f"{self.name}[{dims}]" + (f"{{U_{''.join(self.unreduced)}}}" if self.unreduced else "")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.sharding.values() for axis in axes)

    def local(self, sizes: dict[str, float], mesh: dict[str, Axis]) -> dict[str, float]:
        """The size of each dim of a chip's shard."""
        return {dim: sizes[dim] / math.prod(mesh[axis].size for axis in axes) for dim, axes in self.sharding.items()}


@dataclass(frozen=True)
class Step:
    """One step of a sharded matmul: the local matmul, or a slice or collective that changes a layout."""

    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, slice or matmul
    axes: tuple[str, ...]  # the mesh axes of the collective
    dim: str  # the dim that is gathered, scattered or sliced
    to_dim: str  # the dim that an all-to-all shards instead of `dim`
    before: str
    after: str
    nbytes: float = 0  # V or B of a collective; the three arrays of a matmul
    flops: float = 0
    seconds: float = 0
    bound: str | None = None
    why: str = ""
    rounds: Sequence[Sequence[Phase]] = ()


@dataclass(frozen=True)
class ShardedMatmul:
    """The prediction of a sharded matmul. Times are those of each chip, as all chips do the same."""

    steps: list[Step]
    num_chips: int
    flops: float  # of the unsharded matmul, done once

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
        """The share of the chips' FLOPs that is no repetition: 1/8 if eight chips do the same."""
        return self.flops / (self.num_chips * sum(step.flops for step in self.steps))


def parse_matmul(notation: str) -> tuple[Layout, Layout, Layout]:
    """Returns A, B and C of "A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]", where C may be C[I, K]{U_X}.

    Mesh axes have one letter each.
    """
    subscript = r"_\{?([A-Za-z]+)\}?"
    array = rf"\s*([A-Za-z]\w*)\s*\[([^\]]*)\]\s*(?:\{{\s*U{subscript}\s*\}})?\s*"
    match = re.fullmatch(rf"{array}[.·*@]{array}(?:->|→){array}", notation)
    if not match or len({match[1], match[4], match[7]}) < 3:
        raise ValueError(f"{notation!r} is not of the form A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]")
    arrays = []
    for name, inside, unreduced in (match.groups()[i : i + 3] for i in (0, 3, 6)):
        sharding = {}
        for text in inside.split(","):
            dim = re.fullmatch(rf"\s*([A-Za-z]+)(?:{subscript})?\s*", text)
            if not dim or dim[1] in sharding:
                raise ValueError(f"{name}[{inside}]: each dim needs its own name, then _ and the axes that shard it")
            sharding[dim[1]] = tuple(dim[2] or "")
        arrays.append(Layout(name, sharding, tuple(unreduced or "")))
        axes = [*arrays[-1].axes, *arrays[-1].unreduced]
        if twice := [axis for axis in axes if axes.count(axis) > 1]:
            raise ValueError(
                f"{arrays[-1]} uses {twice[0]} twice: chip i along {twice[0]} would have its block (i, i), and no chip "
                "a block (i, j)"
            )
    lhs, rhs, out = arrays
    summed = [dim for dim in lhs.sharding if dim in rhs.sharding]
    if lhs.unreduced or rhs.unreduced:
        raise ValueError(f"{notation!r}: only the result may be left unreduced")
    if not summed or {*out.sharding} != {*lhs.sharding} ^ {*rhs.sharding}:
        raise ValueError(
            f"{notation!r}: dims of both {lhs.name} and {rhs.name} are summed over ({', '.join(summed) or 'none'}), "
            f"{out.name} has all the others, not {', '.join(out.sharding)}"
        )
    return lhs, rhs, out


def local_layouts(lhs: Layout, rhs: Layout, out: Layout, smaller: str) -> tuple[Layout, Layout, Layout]:
    """Returns the layouts of the local matmul: those of its operands and of its product.

    Args:
      smaller: name of the operand that is gathered if the output does not decide.
    """
    sharding, summed = {}, ()
    for dim in lhs.sharding:
        if dim in rhs.sharding:
            alike = _common_prefix(lhs.sharding[dim], rhs.sharding[dim])
            # If the output is {U_X}, an operand that X does not shard along the contracted dim is sliced.
            unreduced = (axis for axis in (*lhs.sharding[dim], *rhs.sharding[dim]) if axis in out.unreduced)
            sharding[dim] = alike + tuple(axis for axis in dict.fromkeys(unreduced) if axis not in (*summed, *alike))
            summed += sharding[dim]
    if missing := [axis for axis in out.unreduced if axis not in summed]:
        raise ValueError(f"{out}: {missing[0]} shards a contracted dim of neither {lhs.name} nor {rhs.name}")

    array_of = {dim: array for array in (lhs, rhs) for dim in array.sharding if dim in out.sharding}
    for dim, array in array_of.items():
        sharding[dim] = tuple(takewhile(lambda axis: axis not in summed, array.sharding[dim]))
    for axis in lhs.axes:
        dims = [dim for dim in array_of if axis in sharding[dim]]
        if len(dims) == 2:
            wanted = [dim for dim in dims if axis in out.sharding[dim]]
            sharded = wanted[0] if wanted else next(dim for dim in dims if array_of[dim].name != smaller)
            gathered = dims[1 - dims.index(sharded)]
            sharding[gathered] = sharding[gathered][: sharding[gathered].index(axis)]
    used = {axis for axes in sharding.values() for axis in axes}
    for dim in array_of:
        is_prefix = _common_prefix(sharding[dim], out.sharding[dim]) == sharding[dim]
        more = out.sharding[dim][len(sharding[dim]) :] if is_prefix else ()
        sharding[dim] += tuple(takewhile(lambda axis: axis not in used, more))
    layout = lambda array, unreduced=(): Layout(array.name, {dim: sharding[dim] for dim in array.sharding}, unreduced)
    return layout(lhs), layout(rhs), layout(out, summed)


def next_move(now: Layout, target: Layout) -> tuple[str, tuple[str, ...], str, str] | None:
    """Returns (kind, axes, dim, to_dim) of the cheapest slice or collective towards another layout."""
    missing = {}  # for dims that only lack inner axes, those axes
    for dim, axes in now.sharding.items():
        if target.sharding[dim][: len(axes)] == axes:
            missing[dim] = target.sharding[dim][len(axes) :]
    to_reduce = [axis for axis in now.unreduced if axis not in target.unreduced]
    for dim, axes in missing.items():
        if run := tuple(takewhile(lambda axis: axis not in (*now.axes, *now.unreduced), axes)):
            return "slice", run, dim, ""
    for dim, axes in missing.items():
        if run := tuple(takewhile(lambda axis: axis in to_reduce, axes)):
            return "reduce_scatter", run, dim, ""
    wrong = {}  # for the other dims, the axes behind those that they share with the target
    for dim, axes in now.sharding.items():
        if dim not in missing:
            wrong[dim] = axes[len(_common_prefix(axes, target.sharding[dim])) :]
    for dim, axes in wrong.items():
        for to_dim, wanted in missing.items():
            if wanted[:1] == axes[-1:]:
                return "all_to_all", axes[-1:], dim, to_dim
    if to_reduce:  # also for an axis that is to shard a dim with a wrong axis: before the gather there are fewer bytes
        return "all_reduce", tuple(to_reduce), "", ""
    for dim, axes in wrong.items():
        return "all_gather", axes, dim, ""
    return None


def layout_after(now: Layout, kind: str, axes: tuple[str, ...], dim: str, to_dim: str) -> Layout:
    """The layout after a step of `next_move`."""
    sharding = dict(now.sharding)
    if kind in ("slice", "reduce_scatter"):
        sharding[dim] += axes
    elif kind in ("all_gather", "all_to_all"):
        sharding[dim] = sharding[dim][: -len(axes)]
    if kind == "all_to_all":
        sharding[to_dim] += axes
    unreduced = now.unreduced
    if kind in ("reduce_scatter", "all_reduce"):
        unreduced = tuple(axis for axis in unreduced if axis not in axes)
    return Layout(now.name, sharding, unreduced)


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
    """Predicts the steps of a sharded matmul on the chips of a mesh.

    Args:
      notation: "A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]", see the top of this file.
      sizes: of each dim.
      mesh: chips along each mesh axis, which is an axis of the chip's torus (see `mesh_axes`); or the Axis itself.
      out_dtype: of the result and of its summands.
      options: bidirectional and spread, of `rounds_of`.

    Raises:
      ValueError: the notation cannot be read, is illegal, or a dim does not divide.
    """
    lhs, rhs, out = parse_matmul(notation)
    mesh = mesh_axes(chip, mesh)
    dtypes = {lhs.name: lhs_dtype, rhs.name: rhs_dtype, out.name: out_dtype}
    for array in (lhs, rhs, out):
        _check_layout(array, sizes, mesh)
    for dtype in dtypes.values():
        _check_dtype(dtype)

    nbytes = lambda array: math.prod(array.local(sizes, mesh).values()) * DTYPE_BYTES[dtypes[array.name]]
    matmul = lambda lhs, rhs: Matmul(*_mkn(lhs.local(sizes, mesh), rhs.local(sizes, mesh)), *dtypes.values())
    reshard = lambda now, target: _reshard(now, target, out, nbytes, mesh, **options)
    local_lhs, local_rhs, product = local_layouts(lhs, rhs, out, min(lhs, rhs, key=nbytes).name)
    local = matmul(local_lhs, local_rhs)
    bounds = matmul_bounds(local, chip)
    local_step = Step(
        *("matmul", (), "", "", f"{local_lhs} . {local_rhs}", str(product)),
        *(local.nbytes, local.flops, bounds.lower_s, bounds.bound, "of each chip's shards"),
    )
    steps = [*reshard(lhs, local_lhs), *reshard(rhs, local_rhs), local_step, *reshard(product, out)]
    unsharded = matmul(*(Layout(array.name, dict.fromkeys(array.sharding, ())) for array in (lhs, rhs)))
    return ShardedMatmul(steps, math.prod(axis.size for axis in mesh.values()), unsharded.flops)


def _check_layout(array: Layout, sizes: dict[str, int], mesh: dict[str, Axis]) -> None:
    for axis in (*array.axes, *array.unreduced):
        if axis not in mesh:
            raise ValueError(f"{array}: there is no axis {axis} in the mesh of {', '.join(mesh) or 'no axes'}")
    for dim, axes in array.sharding.items():
        if dim not in sizes or sizes[dim] < 1 or sizes[dim] != int(sizes[dim]):
            raise ValueError(f"{array}: {dim} needs a size, a whole number, not {sizes.get(dim)}")
        if sizes[dim] % (shards := math.prod(mesh[axis].size for axis in axes)):
            raise ValueError(f"{array}: {dim} = {sizes[dim]} does not divide into {shards} over {', '.join(axes)}")


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")


def _mkn(lhs: dict[str, float], rhs: dict[str, float]) -> tuple[float, float, float]:
    """m, k and n of the matmul of two arrays, whose common dims are contracted."""
    dims_of_mkn = lhs.keys() - rhs.keys(), lhs.keys() & rhs.keys(), rhs.keys() - lhs.keys()
    return tuple(math.prod((lhs | rhs)[dim] for dim in dims) for dims in dims_of_mkn)


def _reshard(
    now: Layout, target: Layout, out: Layout, nbytes: Callable[[Layout], float], mesh: dict[str, Axis], **options
) -> Iterator[Step]:
    """Yields the steps from one layout of an array to another."""
    while move := next_move(now, target):
        after = layout_after(now, *move)
        kind, axes, dim, _ = move
        if kind == "slice":
            yield Step(*move, str(now), str(after), why="each chip takes its shard")
        else:
            moving = nbytes(after if kind == "all_gather" else now)
            rounds = rounds_of(kind, moving, [mesh[axis] for axis in axes], **options)
            why = f"{out.name} is to be sharded like this"
            if now.name != out.name:
                why = f"case 2: {dim} is not sharded alike"
                if dim in out.sharding:
                    why = "case 4: no axis shards two dims"
            elif kind in ("reduce_scatter", "all_reduce"):
                why = "case 3: each chip has a summand"
            cost = summary(rounds)
            yield Step(*move, str(now), str(after), moving, 0, cost["predicted_seconds"], cost["bound"], why, rounds)
        now = after


def mesh_axes(chip: Chip, mesh: dict[str, int | Axis]) -> dict[str, Axis]:
    """Returns the mesh axes as axes of the chip's torus, whose other axes get sizes that let these wrap around.

    So X:4,Y:8 on TPU7x wraps around (full cubes, 4x8x4), X:4,Y:2 does not, and on v5e only an axis of 16 does.
    """
    for name, size in mesh.items():
        if len(name) != 1:
            raise ValueError(f"mesh axis {name!r}: axes have one letter, so that I_XY is sharded over X and Y")
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


def _common_prefix(first: tuple, second: tuple) -> tuple:
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


# -- command line


def print_matmul(args: argparse.Namespace) -> None:
    """Prints the cost of a matmul on a chip, or of a sharded one on a mesh."""
    chip = chip_of(args.chip)
    dtypes = {name: getattr(args, name) or args.dtype for name in ("lhs_dtype", "rhs_dtype", "out_dtype")}
    mkn = {name: getattr(args, name) for name in ("m", "k", "n")}
    if args.notation is None:
        if None in mkn.values() or args.sizes or args.mesh or args.one_way or args.spread:
            raise ValueError("a matmul needs --m, --k and --n, or a notation with --sizes, --mesh, --one_way, --spread")
        return print_one_chip(Matmul(**mkn, **dtypes), chip, args)
    if {*mkn.values()} != {None} or args.memory != "hbm":
        raise ValueError("a notation goes with --sizes and --mesh, not with --m, --k, --n or --memory")
    sizes, mesh = pairs(args.sizes, "sizes"), pairs(args.mesh, "mesh")
    options = dict(bidirectional=not args.one_way, spread=args.spread)
    prediction = sharded_matmul(args.notation, sizes=sizes, mesh=mesh, chip=chip, **dtypes, **options)
    if not args.json:
        return print_sharded(prediction, chip, dtypes, mesh, args)
    names = "num_chips compute_s communication_s overlapped_s sequential_s bound useful_share"
    result = dict(kind="predicted", notation=args.notation, chip=chip.name)
    result |= {name: getattr(prediction, name) for name in names.split()}
    steps = [{name: value for name, value in asdict(step).items() if name != "rounds"} for step in prediction.steps]
    print(json.dumps(result | dict(steps=steps)))


def print_sharded(
    prediction: ShardedMatmul, chip: Chip, dtypes: dict[str, str], mesh: dict[str, int], args: argparse.Namespace
) -> None:
    """Prints the steps of a sharded matmul, and its time with and without overlap."""
    axes = [
        f"{axis.name} ({'ring' if axis.wrap else 'line'} of {axis.size})" for axis in mesh_axes(chip, mesh).values()
    ]
    print(f"{args.notation} on {chip.name}, predicted, for each chip\n  mesh     {', '.join(axes)}")
    for number, step in enumerate(prediction.steps, 1):
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
    compute, communication = si(prediction.compute_s, "s"), si(prediction.communication_s, "s")
    print(f"  compute  {compute}; communication {communication}: {prediction.bound} binds")
    print(f"  time     {si(prediction.overlapped_s, 's')} if they overlap, {si(prediction.sequential_s, 's')} if not")
    if prediction.useful_share < 1:
        print(f"  work     {1 / prediction.useful_share:.4g} times the work of one matmul: chips repeat each other's")


def print_one_chip(matmul: Matmul, chip: Chip, args: argparse.Namespace) -> None:
    """Prints the cost of a matmul on a chip and on one of its devices."""
    memory = args.memory
    C, W = chip.flops_per_s(matmul.dtype), memory_bytes_per_s(chip, memory)
    bounds = {per: matmul_bounds(matmul, chip, memory=memory, per=per) for per in ("chip", "device")}
    bound = bounds["chip"].bound if bounds["chip"].bound == "compute" else memory
    critical, rule = critical_batch(matmul, chip, memory=memory), critical_batch_rule(matmul, chip, memory=memory)
    if args.json:
        result = dict(kind="predicted", chip=chip.name, memory=memory, flops=matmul.flops, bytes=matmul.nbytes)
        result |= dict(flops_per_byte=matmul.intensity, ridge_flops_per_byte=C / W, bound=bound)
        result |= dict(critical_m=critical if critical < math.inf else None, critical_m_rule=rule)
        for per, times in bounds.items():
            result[f"per_{per}"] = asdict(times) | dict(predicted_seconds=times.lower_s, not_overlapped_s=times.upper_s)
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
    for per, times in list(bounds.items())[: chip.devices]:
        print(f"  a {per:8} {si(times.lower_s, 's')} at least, {si(times.upper_s, 's')} if nothing overlaps")
    print(f"  bound      {bound}; {since(critical)} (C/W * bytes of a weight / 2 = {rule:.4g})")
    print(f"  in VMEM    {in_vmem}; the arrays {fits} in the {si(chip.vmem_bytes, 'B')} of a chip")
    if args.explain:
        times, array_bytes = bounds["chip"], lambda *sizes: si(math.prod(sizes), "B")
        b_lhs, b_rhs, b_out = (DTYPE_BYTES[dtype] for dtype in (lhs, rhs, out))
        arrays = f"{array_bytes(m, k, b_lhs)} + {array_bytes(k, n, b_rhs)} + {array_bytes(m, n, b_out)}"
        gain = f"{array_bytes(2, k, n, W / C)} - {array_bytes(k, b_lhs)} - {array_bytes(n, b_out)}"
        print(f"  FLOPs      2 * m * k * n = 2 * {m:g} * {k:g} * {n:g} = {si(matmul.flops, 'FLOP')}")
        print(f"  bytes      m*k*b_lhs + k*n*b_rhs + m*n*b_out = {arrays} = {si(matmul.nbytes, 'B')}")
        print(f"  a chip     max(FLOPs / C, bytes / W) = max({si(times.compute_s, 's')}, {si(times.memory_s, 's')})")
        print(f"  from m     k*n*b_rhs / (2*k*n * W/C - k*b_lhs - n*b_out) = {array_bytes(k, n, b_rhs)} / ({gain})")


def pairs(text: str | None, flag: str) -> dict[str, int]:
    """Returns the sizes that a flag like X:4,Y:8 names."""
    if not re.fullmatch(r"[A-Za-z]+:\d+(,[A-Za-z]+:\d+)*", text or ""):
        raise ValueError(f"--{flag}={text or ''}: names and sizes, as in X:4,Y:8")
    items = [pair.split(":") for pair in text.split(",")]
    if len(dict(items)) < len(items):
        raise ValueError(f"--{flag}={text} has a name twice")
    return {name: int(size) for name, size in items}


def add_matmul_command(commands) -> None:
    about = "time of a matmul on a chip, or of a sharded matmul on a mesh of chips"
    parser = commands.add_parser(
        "matmul",
        help=about,
        description=about,
        allow_abbrev=False,
        usage="%(prog)s {--m=M --k=K --n=N | NOTATION --sizes=I:8192,... --mesh=X:4,...} [--flag=value ...]",
    )
    parser.set_defaults(run=print_matmul, parser=parser)
    about = "a sharded matmul, as in A[I, J_X] . B[J_X, K_Y] -> C[I, K_Y]{U_X}"
    parser.add_argument("notation", nargs="?", metavar="NOTATION", help=about)
    for name, what in dict(m="rows of A, tokens", k="columns of A, contracted", n="columns of B").items():
        parser.add_argument(f"--{name}", type=command.size, help=f"{what}, of A[m, k] . B[k, n]")
    parser.add_argument("--sizes", metavar="I:8192,J:...", help="sizes of the dims of a sharded matmul")
    parser.add_argument("--mesh", metavar="X:4,Y:8", help="chips along each mesh axis, each an axis of the torus")
    parser.add_argument("--dtype", default="bf16", help=f"type of all arrays: {', '.join(DTYPE_BYTES)} [%(default)s]")
    for name, what in dict(lhs="A", rhs="B", out="the result and its summands").items():
        parser.add_argument(f"--{name}_dtype", metavar="DTYPE", help=f"type of {what}, if another")
    parser.add_argument("--chip", default="tpu7x", help=f"one of {', '.join(CHIPS)} [%(default)s]")
    parser.add_argument("--memory", default="hbm", help="where the arrays are: hbm, vmem or pcie [%(default)s]")
    parser.add_argument("--one_way", action="store_true", help="one way around every axis; default: both ways")
    about = "all axes of a collective at once; default: one after another"
    parser.add_argument("--spread", action="store_true", help=about)
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, bytes and FLOPs")
