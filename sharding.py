"""The mesh: its devices, their order, and the shard of an array that each of them holds.

**Layout.** With `PartitionSpec` P(None, "fsdp", "tensor"), an array w_LDF has dim L replicated on each device, dim D
sharded over `fsdp` and dim F over `tensor`. Inside per-device code it is then w_Ldf: a capital is the full dim, a
lower-case letter this device's shard. The letters have one meaning everywhere:

    B batch   T query positions   S key positions   D model   F feed-forward   V vocabulary   L layers
    N query heads   K key/value heads   G = N/K   H head dim, of queries and keys   U head dim of the values

for latent attention: Q, C latents of queries and of keys and values   R head dims with RoPE   I = H - R, without

for mixtures: E experts   M their feed-forward   Z = E*D, one matrix below the other   X experts of a token   J the
feed-forward of shared experts, side by side

for per-layer embeddings: P their dims   Y layers, where they are no stack of weights   A = Y*P, all layers side by side

placement.py defines the axes and maps them to links.
"""

import math
from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from placement import BATCH_AXES, MESH_AXES, check_slices, core_axis_of, fill_mesh

LOSS_AXES = MESH_AXES[:-1]  # each device holds a share of the loss, the same one along `tensor`
BATCH_SPEC = PartitionSpec(BATCH_AXES, "context")  # layout of tokens, [B, T]


def make_mesh(sizes: dict[str, int], devices: list | None = None, core_axis: str = "") -> Mesh:
    """The mesh over `devices` (default: all), slices outermost, the cores of a chip along `core_axis`.

    Raises ValueError where the sizes do not multiply to the devices, where an axis other than data and pipe would cross
    slices, or where the core axis cannot map to the cores.
    """
    devices = jax.devices() if devices is None else devices
    sizes = fill_mesh(sizes, len(devices))
    core_axis = core_axis_of(sizes, core_axis)
    ordered = sorted(devices, key=lambda device: (getattr(device, "slice_index", 0) or 0, device.id))
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    check_slices(sizes, num_slices)
    shape = [sizes[axis] for axis in MESH_AXES]
    if sizes[core_axis] % 2 == 0:  # ids count cores first: split off a last dim of 2, put it inside the core axis
        at = MESH_AXES.index(core_axis)
        if 1 < math.prod(shape[: at + 1]) <= num_slices:
            raise ValueError(f"core_axis={core_axis!r}: its {shape[at]} places are the {num_slices} slices, not cores")
        shape[at] //= 2
        grid = np.moveaxis(np.array(ordered).reshape(*shape, 2), -1, at + 1)
        shape[at] *= 2
    else:
        grid = np.array(ordered)
    # Auto: the optimizer update outside the shard_map is partitioned by the compiler.
    return Mesh(grid.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def describe_mesh(mesh: Mesh, core_axis: str = "") -> str:
    """A line for the log; on TPU7x with the axis that maps to the cores of a chip, and those of size 2 that do not."""
    sizes = dict(mesh.shape)
    text = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
    kind = mesh.devices.flat[0].device_kind
    if kind == "TPU7x" and mesh.size > 1:
        core_axis = core_axis_of(sizes, core_axis)
        others = [axis for axis, size in sizes.items() if size == 2 and axis != core_axis]
        text += f"; {core_axis} is on the two cores of a chip"
        text += f", not {' or '.join(others)}" if others else ""
    return f"{mesh.size} x {kind}: {text}"


def platform() -> str:
    """The platform that per-device code is traced for, "tpu" or "cpu"; its devices need not exist, see aot.py."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def place(kind: type, make_rows, num_rows: int, order: np.ndarray, mesh: Mesh):
    """Returns a global batch on the devices: a `kind`, a named tuple of arrays [num_rows, len(order)] by BATCH_SPEC.

    Args:
      make_rows: (rows=slice) -> a `kind` of these rows; called only for rows that this process's devices hold.
      order: the positions of a sequence in the order in which `context` shards them.
    """
    made = {}

    def shard(field, index):
        rows, columns = index
        if (rows.start, rows.stop) not in made:
            made[rows.start, rows.stop] = make_rows(rows=rows)
        return made[rows.start, rows.stop][field][:, order[columns]]

    layout = NamedSharding(mesh, BATCH_SPEC)
    array = lambda field: jax.make_array_from_callback((num_rows, len(order)), layout, partial(shard, field))
    return kind(*map(array, range(len(kind._fields))))


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that occur in a spec."""
    return tuple(axis for entry in spec for axis in _entry(entry))


def dim_of(spec: PartitionSpec, axis: str) -> int | None:
    """The dim that is sharded over `axis`, or None."""
    return next((dim for dim, entry in enumerate(spec) if axis in _entry(entry)), None)


def add_axis(spec: PartitionSpec, axis: str, beside: str) -> PartitionSpec:
    """Shards the dim of `beside` over `axis`, too, as the minor of the two; a spec without `beside` is unchanged."""
    return PartitionSpec(*((*_entry(entry), axis) if beside in _entry(entry) else entry for entry in spec))


def _entry(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
