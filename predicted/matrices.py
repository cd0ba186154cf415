"""The stacks of matrices that Muon orthogonalises (muon.py), counted: how many a device has, FLOPs, bytes. No JAX.

    python roofline.py step --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --optimizer=muon

**Formula.** An iteration of Newton-Schulz on a matrix X of n x m, n <= m, has three products: A = X X^T, A A, and
(b A + c A A) X. They have 4 n^2 m + 2 n^3 FLOPs. Each is counted as reading both operands and an addend as large as
the result, and writing the result: 5 n m + 7 n^2 elements. predicted/step.py makes seconds of these and of messages.

**Left out.** A product that stays in VMEM from one step to the next, which takes fewer bytes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import anatomy
from config import Config
from placement import MESH_AXES

ITERATIONS = 5


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape and layout, which are orthogonalised together. A device has a shard of each.

    Attributes:
      rows, columns: of a full matrix.
      together: so many matrices of experts are gathered as one array.
      groups: of devices of `holders`; those of a group share matrices.
      holders: the mesh axes that shard the rows and columns, and
      copies: those that shard nothing of the weights.
      arrays: the number of arrays of which a device has a shard.
      sizes: the sizes of the mesh axes.
    """

    rows: int
    columns: int
    together: int
    groups: int
    holders: tuple[str, ...]
    copies: tuple[str, ...]
    arrays: int
    sizes: dict[str, int]

    @property
    def per_device(self) -> int:
        """The number of matrices that a device orthogonalises, with those of zeros that fill the stack."""
        devices = math.prod(self.sizes[axis] for axis in (*self.holders, *self.copies)) // self.groups
        return math.ceil(self.arrays / devices) * self.together

    @property
    def elements(self) -> int:
        """The number of elements of these matrices, which a device sends twice if `holders` has devices."""
        return self.per_device * self.rows * self.columns

    def products(self) -> Iterator[tuple[int, int, int]]:
        """(rows, contracted, columns) of the products of an iteration, for one matrix."""
        n, m = sorted((self.rows, self.columns))
        yield from ((n, m, n), (n, n, n), (n, n, m))

    @property
    def flops(self) -> int:
        """The FLOPs of a device, without padding to the tiles of the matrix unit."""
        return self.per_device * ITERATIONS * sum(2 * a * b * c for a, b, c in self.products())


def stacks(config: Config, sizes: dict[str, int]) -> list[Stack]:
    """Returns the stacks of matrices of a model on a mesh of these sizes; empty without optimizer=muon."""
    if config.optimizer != "muon":
        return []
    arrays = {}  # by all that makes a stack
    kinds = [(anatomy.stack_config(config, stack), *counts) for stack, counts in anatomy.layer_stacks(config).items()]
    weights = [(w, c, n) for c, n, experts in kinds for w in anatomy.layer_weights(c, experts=experts).values()]
    weights += [(weight, config, 1) for weight in anatomy.other_weights(config).values()]
    for weight, kind, num_layers in weights:
        if weight.part in anatomy.MUON_PARTS:
            key, number = _stack_of(weight, kind, num_layers, sizes)
            arrays[key] = arrays.get(key, 0) + number
    result = []
    for (rows, columns, together, groups, row_axes, column_axes, axes), number in arrays.items():
        copies = tuple(axis for axis in MESH_AXES if sizes[axis] > 1 and axis not in axes)
        result.append(Stack(rows, columns, together, groups, row_axes + column_axes, copies, number, sizes))
    return result


def _stack_of(weight: anatomy.Weight, config: Config, num_layers: int, sizes: dict[str, int]) -> tuple[tuple, int]:
    """Returns (what makes the stack of a weight, the arrays of it on a device)."""
    size = anatomy.sizes(config) | {"L": num_layers}
    layout = {}  # {position of a dim: the mesh axes that shard it}
    for position, entry in enumerate(weight.layout):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        layout[position] = axes + (("data",) if config.shard_update and "fsdp" in axes else ())
    axes = frozenset(axis for entry in layout.values() for axis in entry)
    larger = lambda entry: tuple(axis for axis in entry if sizes[axis] > 1)
    share = lambda position: math.prod(sizes[axis] for axis in layout[position])
    first, last = int(weight.dims[0] == "L"), len(weight.dims) - 1
    end = first + len(weight.start.replace("L", ""))  # of the dims that are rows; then come heads
    arrays = num_layers // share(0) if first else 1
    together, groups, column_axes = 1, 1, larger(layout[last])
    if weight.by_expert:
        rows, row_axes, local = size["D"], layout[first], config.num_experts // sizes["expert"]
        row_axes = tuple(axis for axis in larger(row_axes) if axis != "expert")
        if size["Z"] // share(first) % rows == 0:
            arrays, row_axes = arrays * (config.num_experts // share(first)), ()
        elif math.prod(sizes[axis] for axis in row_axes) % local == 0:
            groups = local
        else:
            together = local
    else:
        rows = math.prod(size[dim] for dim in weight.dims[first:end])
        row_axes = tuple(axis for position in range(first, end) for axis in larger(layout[position]))
        for position in range(end, last):
            arrays *= size[weight.dims[position]] // share(position)
    columns = size[weight.dims[last]]
    if rows > columns and together * groups == 1:
        rows, columns, row_axes, column_axes = columns, rows, column_axes, row_axes
    return (rows, columns, together, groups, row_axes, column_axes, axes), arrays
