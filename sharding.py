"""The mesh: which devices there are, in which order they stand, and which part of an array each of them holds.

**Mesh.** A TPU pod is a torus of chips; a program sees a grid of devices with named axes. Every run has the same six
axes, outermost first, most of them of size 1:

    data      replicas of the whole model; outermost, so this is what crosses slices, over the data-centre network
    pipe      stages of the layer stack
    fsdp      shards of every weight, gathered just before use; also splits the batch
    expert    experts of a mixture; outside the experts it splits the batch
    context   parts of the sequence
    tensor    parts of heads, feed-forward and vocabulary; of the residual stream between blocks

**Layout.** `PartitionSpec` P(None, "fsdp", "tensor") says of an array w_LDF: dim L whole on each device, dim D cut over
`fsdp`, dim F cut over `tensor`. Inside per-device code the array is then w_Ldf: a capital is the full dim, a lower-case
letter this device's shard. The letters, with one meaning everywhere:

    B batch   T query positions   S key positions   D model   F feed-forward   V vocabulary   L layers
    N query heads   K key/value heads   G = N/K   H head dim

**Order.** On TPU7x a chip is two devices, joined by a die-to-die link of about six times the bandwidth of a link
between chips (Google Cloud, "TPU7x performance optimizations"). Device ids count cores first, then x, y, z, so in id
order the last axis of the mesh lies on the cores of a chip and the collectives over the others run along torus rings.
"""

import difflib
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

MESH_AXES = ("data", "pipe", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
LOSS_AXES = MESH_AXES[:-1]  # every device holds a share of the loss, those of `tensor` the same one
BATCH_SPEC = PartitionSpec(BATCH_AXES, "context")  # of tokens, [B, T]


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of all mesh axes from a flag like `data:2,fsdp:*,tensor:2`. Axes left out have size 1; `*` becomes 0.

    Raises:
      ValueError: an axis that does not exist or stands twice, a size that is no positive number, more than one `*`.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    seen = set()
    for part in filter(None, text.split(",")):
        axis, _, size = part.strip().partition(":")
        if axis not in MESH_AXES:
            near = difflib.get_close_matches(axis, MESH_AXES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(MESH_AXES)}"
            raise ValueError(f"mesh={text!r}: there is no axis {axis!r}; {hint}")
        if axis in seen:
            raise ValueError(f"mesh={text!r}: axis {axis!r} stands twice")
        if size != "*" and not (size.isdecimal() and int(size)):
            raise ValueError(f"mesh={text!r}: the size of {axis!r} must be a positive number or *, not {size!r}")
        seen.add(axis)
        sizes[axis] = 0 if size == "*" else int(size)
    if list(sizes.values()).count(0) > 1:
        raise ValueError(f"mesh={text!r}: only one axis can be *")
    return sizes


def fill_mesh(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
    """Gives the axis of size 0 what the others leave of `num_devices`. Raises ValueError where they do not fit."""
    fixed = math.prod(size for size in sizes.values() if size)
    shown = ",".join(f"{axis}:{size or '*'}" for axis, size in sizes.items() if size != 1) or "(all axes 1)"
    if 0 in sizes.values():
        if num_devices % fixed:
            raise ValueError(
                f"mesh {shown}: {num_devices} devices are not a multiple of {fixed}; {_near(fixed, num_devices)}"
            )
        return {axis: size or num_devices // fixed for axis, size in sizes.items()}
    if fixed != num_devices:
        raise ValueError(f"mesh {shown} is for {fixed} devices and there are {num_devices}; let one axis be *")
    return sizes


def check_multiple(name: str, size: int, axes: dict[str, int]) -> None:
    """Raises ValueError unless `size` can be cut over the mesh axes, with the nearest sizes that can."""
    ways = math.prod(axes.values())
    if size % ways:
        product = "*".join(axes)
        raise ValueError(f"{name}={size} must be a multiple of {product}={ways}; nearest are {_near(ways, size)}")


def _near(step: int, number: int) -> str:
    below = number // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def core_axis_of(sizes: dict[str, int], asked: str = "") -> str:
    """The mesh axis that lies on the two cores of a TPU7x chip: the one asked for, else the last one of even size.

    Raises:
      ValueError: two axes are asked for, or one that does not exist or that has an odd size.
    """
    if not asked:
        return next((axis for axis in reversed(MESH_AXES) if sizes[axis] % 2 == 0), MESH_AXES[-1])
    if len(asked.split(",")) > 1:
        raise ValueError(
            f"core_axis={asked!r}: a chip has two cores and one link between them, so only one axis can lie on it"
        )
    if asked not in MESH_AXES:
        raise ValueError(f"core_axis={asked!r} is no mesh axis; there are {', '.join(MESH_AXES)}")
    if sizes[asked] % 2:
        raise ValueError(f"core_axis={asked!r} has size {sizes[asked]}; on the two cores of a chip it must be even")
    return asked


def make_mesh(sizes: dict[str, int], devices: list | None = None, core_axis: str = "") -> Mesh:
    """The mesh over `devices` (default: all there are), slices outermost, the cores of a chip along `core_axis`.

    Raises ValueError where the sizes do not make up the devices, or the core axis cannot lie on the cores.
    """
    devices = jax.devices() if devices is None else devices
    sizes = fill_mesh(sizes, len(devices))
    core_axis = core_axis_of(sizes, core_axis)
    ordered = sorted(devices, key=lambda device: (getattr(device, "slice_index", 0) or 0, device.id))
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    shape = [sizes[axis] for axis in MESH_AXES]
    if sizes[core_axis] % 2 == 0:  # ids count cores first: peel a last dim of 2, put it inside the core axis
        at = MESH_AXES.index(core_axis)
        if 1 < math.prod(shape[: at + 1]) <= num_slices:
            raise ValueError(f"core_axis={core_axis!r}: its {shape[at]} parts are the {num_slices} slices, not cores")
        shape[at] //= 2
        grid = np.moveaxis(np.array(ordered).reshape(*shape, 2), -1, at + 1)
        shape[at] *= 2
    else:
        grid = np.array(ordered)
    # Auto: the optimizer update outside the shard_map is partitioned by the compiler.
    return Mesh(grid.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def describe_mesh(mesh: Mesh, core_axis: str = "") -> str:
    """One line for the log; on TPU7x it says which axis lies on the cores of a chip, and which of size 2 do not."""
    sizes = dict(mesh.shape)
    text = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
    kind = mesh.devices.flat[0].device_kind
    if kind == "TPU7x" and mesh.size > 1:
        core_axis = core_axis_of(sizes, core_axis)
        others = [axis for axis, size in sizes.items() if size == 2 and axis != core_axis]
        text += f"; {core_axis} lies on the two cores of a chip"
        text += f", {' and '.join(others)} cannot as well" if others else ""
    return f"{mesh.size} x {kind}: {text}"


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes that occur in a spec."""
    return tuple(axis for entry in spec for axis in _entry(entry))


def dim_of(spec: PartitionSpec, axis: str) -> int | None:
    """The dim that `axis` cuts, or None."""
    return next((dim for dim, entry in enumerate(spec) if axis in _entry(entry)), None)


def add_axis(spec: PartitionSpec, axis: str, beside: str) -> PartitionSpec:
    """Cuts the dim of `beside` further over `axis` (as the minor of the two); a spec without `beside` stays."""
    return PartitionSpec(*((*_entry(entry), axis) if beside in _entry(entry) else entry for entry in spec))


def _entry(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
