"""Mesh axes: their names, sizes and order, and what can be sharded over them. No jax here.

**Idea.** A TPU pod is a torus of chips; a program sees a grid of devices with named axes. Every run has the same seven
axes, outermost first, most of them of size 1:

    data      replicas of the full model; outermost, so this is what crosses slices, over the data-centre network
    pipe      stages of the layer stack
    fsdp      shards of every weight, gathered just before use; also splits the batch
    fsdp_transpose  the same for the other dim of each matrix
    expert    experts of a mixture; outside the experts it splits the batch
    context   shards of the sequence
    tensor    shards of heads, feed-forward and vocabulary; of the residual stream between blocks

**On TPU7x** a chip is two devices, joined by a die-to-die link of about six times the bandwidth of a link between chips
(Google Cloud, "TPU7x performance optimizations"). Device ids count cores first, then x, y, z. In id order, the last
axis of the mesh is on the cores of a chip, and the collectives over the others run along torus rings. sharding.py puts
the devices in this order; `links_of` of predicted/interconnect.py gives the links of each axis.
"""

import difflib
import math

MESH_AXES = ("data", "pipe", "fsdp", "fsdp_transpose", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "fsdp_transpose", "expert")
WEIGHT_AXES = ("fsdp", "fsdp_transpose")  # a layer's weights are gathered over them, in this order
CONTEXT_IMPLS = ("ring", "all_gather", "all_to_all")  # how attention reads a sequence that `context` shards


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes of all mesh axes from a flag like `data:2,fsdp:*,tensor:2`: 1 by default, 0 for `*`.

    Raises:
      ValueError: an axis does not exist or is named twice, a size is not a positive number, or there are several `*`.
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
            raise ValueError(f"mesh={text!r}: axis {axis!r} is named twice")
        if size != "*" and not (size.isdecimal() and int(size)):
            raise ValueError(f"mesh={text!r}: the size of {axis!r} must be a positive number or *, not {size!r}")
        seen.add(axis)
        sizes[axis] = 0 if size == "*" else int(size)
    if list(sizes.values()).count(0) > 1:
        raise ValueError(f"mesh={text!r}: only one axis can be *")
    return sizes


def fill_mesh(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
    """Sizes the axis of size 0 so that the mesh has `num_devices`. Raises ValueError if no size does."""
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


def check_multiple(name: str, size: int, axes: dict[str, int], *instead: str) -> None:
    """Raises ValueError unless mesh axes can shard `size`. It names the nearest sizes, and what to do `instead`."""
    ways = math.prod(axes.values())
    if size % ways:
        near = "; or ".join(filter(None, (_near(ways, size), *instead)))
        raise ValueError(f"{name}={size} must be a multiple of {'*'.join(axes)}={ways}; {near}")


def check_batch(batch: int, sizes: dict[str, int], microbatches: int) -> None:
    """`check_multiple` for the sequences of a batch. If there are too few, a `context` axis can share them."""
    axes = {axis: sizes[axis] for axis in BATCH_AXES} | {"microbatches": microbatches}
    spare = math.prod(axes.values()) / batch
    instead = f"a context axis, so that {spare:g} devices share a sequence" if spare == int(spare) > 1 else ""
    check_multiple("batch", batch, axes, instead)


def _near(step: int, number: int) -> str:
    below = number // step * step
    return f"nearest are {below} and {below + step}" if below else f"nearest is {step}"


def check_slices(sizes: dict[str, int], num_slices: int) -> None:
    """Raises ValueError if an axis other than data and pipe would cross slices."""
    if (outer := sizes["data"] * sizes["pipe"]) % num_slices:
        inner = ", ".join(f"{axis}:{sizes[axis]}" for axis in MESH_AXES[2:] if sizes[axis] > 1)
        raise ValueError(
            f"data*pipe={outer} must be a multiple of the {num_slices} slices, or part of {inner} would cross them: "
            "weights or activations of every layer would go over a network far slower than links. "
            f"--mesh=data:{num_slices},... sends gradients across, once a step; pipe:{num_slices},... one message for "
            "each microbatch"
        )


def core_axis_of(sizes: dict[str, int], chosen: str = "") -> str:
    """Returns the mesh axis on the two cores of a TPU7x chip: the chosen one, by default the last of even size.

    Raises:
      ValueError: several axes are chosen, or one that does not exist or has an odd size.
    """
    if not chosen:
        return next((axis for axis in reversed(MESH_AXES) if sizes[axis] % 2 == 0), MESH_AXES[-1])
    if len(chosen.split(",")) > 1:
        raise ValueError(
            f"core_axis={chosen!r}: a chip has two cores and one link between them, so only one axis can use it"
        )
    if chosen not in MESH_AXES:
        raise ValueError(f"core_axis={chosen!r} is no mesh axis; there are {', '.join(MESH_AXES)}")
    if sizes[chosen] % 2:
        raise ValueError(f"core_axis={chosen!r} has size {sizes[chosen]}; on the two cores of a chip it must be even")
    return chosen


def ring_size(c: int, impl: str, head_ways: int = 1) -> int:
    """The number of shards of a sequence while the c devices of `context` attend without a window.

    Raises ValueError for an unknown impl, or for head_ways that the devices do not have.
    """
    if impl not in CONTEXT_IMPLS:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(CONTEXT_IMPLS)}")
    if head_ways > 1 and (impl != "ring" or c % head_ways):
        raise ValueError(f"head_ways={head_ways} must divide the {c} devices of a ring; impl={impl!r}")
    return 1 if impl == "all_to_all" else c // head_ways
