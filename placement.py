"""Mesh axes: their names, sizes and order, and what can be sharded over them. No jax here.

**Mesh.** A TPU pod is a torus of chips; a program sees a grid of devices with named axes. Every run has the same six
axes, outermost first, most of them of size 1:

    data      replicas of the whole model; outermost, so this is what crosses slices, over the data-centre network
    pipe      stages of the layer stack
    fsdp      shards of every weight, gathered just before use; also splits the batch
    expert    experts of a mixture; outside the experts it splits the batch
    context   parts of the sequence
    tensor    parts of heads, feed-forward and vocabulary; of the residual stream between blocks

**Order.** On TPU7x a chip is two devices, joined by a die-to-die link of about six times the bandwidth of a link
between chips (Google Cloud, "TPU7x performance optimizations"). Device ids count cores first, then x, y, z, so in id
order the last axis of the mesh lies on the cores of a chip and the collectives over the others run along torus rings.
sharding.py puts the devices in this order; interconnect.links_of says what it means for the messages.
"""

import difflib
import math

MESH_AXES = ("data", "pipe", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")


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


def check_multiple(name: str, size: int, axes: dict[str, int], instead: str = "") -> None:
    """Raises ValueError unless `size` can be cut over mesh axes: the nearest sizes that can, and what to do instead."""
    ways = math.prod(axes.values())
    if size % ways:
        near = f"{_near(ways, size)} (or {instead})" if instead else _near(ways, size)
        raise ValueError(f"{name}={size} must be a multiple of {'*'.join(axes)}={ways}; {near}")


def check_batch(batch: int, sizes: dict[str, int], microbatches: int) -> None:
    """The same for the sequences of a batch, which a mesh axis `context` can share where there are fewer."""
    axes = {axis: sizes[axis] for axis in BATCH_AXES} | {"microbatches": microbatches}
    spare = math.prod(axes.values()) / batch
    instead = f"a context axis, so that {spare:g} devices share a sequence" if spare == int(spare) > 1 else ""
    check_multiple("batch", batch, axes, instead)


def _near(step: int, number: int) -> str:
    below = number // step * step
    return f"nearest are {below} and {below + step}" if below else f"nearest is {step}"


def check_slices(sizes: dict[str, int], num_slices: int) -> None:
    """Raises ValueError where an axis other than data and pipe would lie between slices."""
    if (outer := sizes["data"] * sizes["pipe"]) % num_slices:
        inner = ", ".join(f"{axis}:{sizes[axis]}" for axis in MESH_AXES[2:] if sizes[axis] > 1)
        raise ValueError(
            f"data*pipe={outer} must be a multiple of the {num_slices} slices, or part of {inner} would lie between "
            "them: weights or activations of every layer would cross, over a network far slower than links. "
            f"--mesh=data:{num_slices},... crosses with the gradients, once a step; pipe:{num_slices},... with a "
            "message a microbatch"
        )


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
