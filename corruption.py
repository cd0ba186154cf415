"""Silent data corruption: bits that a device computes or holds wrongly, found before they are saved.

**Idea.** A chip may give a wrong result without any error, once in a while or whenever it is warm. The run goes on, and
its checkpoints are of another training. Two things are free of doubt, bit for bit:

    a step again   the same program on the same state and batch gives the same state. Each --check_every steps the step
                   is run twice, and the two results are compared element by element on each device
    replicas       what several devices hold a copy of (parameters over `data`, norms and counts over all axes) is the
                   same on all of them. Checksums of the shards of each device are compared, then and before each save

Where something differs, the run ends with the device, its process and the array, and nothing is saved.

**Formula.** Bits of elements are compared as unsigned integers, so that NaN equals NaN and 0 is not -0. Checksums are
those of checksums.py: any single changed element changes the sum. Of several replicas the majority is right; of two,
both are named.

**Cost.** A checked step takes twice as long, and another copy of the state in HBM: the program updates a state in
place, so the first run is given a copy. That is 12 bytes a parameter of a device with adamw, 10 with its first moment
in bfloat16. The comparison of replicas reads the state once, and sends 4 bytes an array from each device to all.

**Left out.** A wrong bit in a shard that has no replica, outside of a checked step: both runs of a step read it. The
device behind a fault before a collective: sums carry it to others, so that all that differ are named, and how many.
Faults that happen in both runs alike. A state on the host (--offload_optimizer), which would need a copy there. XLA's
own checker, which repeats parts of a program (compiler_flags.py, "Silent data corruption").

**Source.** Dixit et al. 2021, "Silent Data Corruptions at Scale", arXiv:2102.11245; Gemini, arXiv:2312.11805, section
on training infrastructure, which replays steps for the same purpose.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import checksums
import collectives

SHOWN = 3  # devices in a message


class CorruptionError(FloatingPointError):
    """A device computed or holds wrong bits."""


def checked_step(step_fn: Callable, state, batch, step: int):
    """Returns (state, metrics) of a step, which is run twice.

    Args:
      step_fn: (state, batch) -> (state, metrics). It may donate the state.
      step: its number, for the message.

    Raises CorruptionError where the two results differ, or the replicas in the second one. All processes raise alike.
    """
    leaves, treedef = jax.tree.flatten(state)
    copied = _copies(leaves, tuple(leaf.sharding for leaf in leaves))
    first = step_fn(treedef.unflatten(copied), batch)
    again = step_fn(state, batch)
    counts = differing(first, again)
    if any(each.any() for each in counts.values()):
        raise CorruptionError(
            f"step {step} was run twice on the same state and batch, and gave other bits: "
            f"{_described(counts, _mesh_of(again), 'elements')}; {_ADVICE}"
        )
    check_replicas(again[0], step)
    return again


def check_replicas(state, step: int) -> None:
    """Raises CorruptionError where devices that hold the same part of an array have other bits, on all processes.

    Args:
      state: a tree of arrays on one mesh.
      step: its number, for the message.
    """
    mesh, wrong = _mesh_of(state), {}
    arrays = jax.tree.leaves(state)
    for array, (name, sums) in zip(arrays, checksums.of_devices(state).items(), strict=True):
        is_wrong = _outvoted(sums, _parts(array.sharding, array.shape, mesh))
        if is_wrong.any():
            wrong[name] = is_wrong
    if wrong:
        raise CorruptionError(
            f"after step {step} devices that should hold the same bits do not: {_described(wrong, mesh)}; {_ADVICE}"
        )


_ADVICE = (
    "this is silent data corruption, and this state is not saved: take the device out, and start again from the last "
    "checkpoint"
)


def differing(a, b) -> dict[str, np.ndarray]:
    """Returns {path: elements whose bits differ, int32 [device]} of two trees, devices in the order of the mesh."""
    names, leaves = checksums.named_arrays(a)
    counts = jax.device_get(_differing(leaves, jax.tree.leaves(b), tuple(leaf.sharding for leaf in leaves)))
    return dict(zip(names, counts.T, strict=True))


@partial(jax.jit, static_argnames="shardings")
def _differing(ours: list[jax.Array], theirs: list[jax.Array], shardings: tuple[NamedSharding, ...]) -> jax.Array:
    """Returns how many elements differ, int32 [device, array]."""
    mesh, specs = shardings[0].mesh, [sharding.spec for sharding in shardings]

    def count(ours, theirs):
        counts = [jnp.sum(_bits(a) != _bits(b), dtype=jnp.int32) for a, b in zip(ours, theirs, strict=True)]
        counts = jnp.stack(collectives.vary_alike(counts, mesh.axis_names))
        return lax.all_gather(counts, mesh.axis_names, to="invarying")

    return jax.shard_map(count, mesh=mesh, in_specs=(specs, specs), out_specs=PartitionSpec())(ours, theirs)


def _bits(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


@partial(jax.jit, static_argnames="shardings")
def _copies(arrays: list[jax.Array], shardings: tuple[NamedSharding, ...]) -> list[jax.Array]:
    return [lax.with_sharding_constraint(jnp.copy(a), sharding) for a, sharding in zip(arrays, shardings, strict=True)]


def _mesh_of(tree) -> jax.sharding.Mesh:
    return jax.tree.leaves(tree)[0].sharding.mesh


def _parts(sharding: NamedSharding, shape: tuple[int, ...], mesh) -> list[str]:
    """Returns a name for the part of an array that each device holds, the same for replicas."""
    index_of = sharding.devices_indices_map(shape)
    return [str(index_of[device]) for device in mesh.devices.flat]


def _outvoted(sums: np.ndarray, parts: list[str]) -> np.ndarray:
    """Returns which devices hold other bits than most of their replicas, bool [device]; all of them in a tie."""
    replicas: dict[str, list[int]] = {}
    for device, part in enumerate(parts):
        replicas.setdefault(part, []).append(device)
    wrong = np.zeros(len(sums), bool)
    for devices in replicas.values():
        votes = Counter(sums[devices].tolist()).most_common(2)
        is_tie = len(votes) > 1 and votes[0][1] == votes[1][1]
        wrong[devices] = is_tie | (sums[devices] != votes[0][0])
    return wrong


def _described(wrong: dict[str, np.ndarray], mesh, what: str = "") -> str:
    """Returns a text such as `3 elements of params.norm on device 5 of process 1, and 2 more arrays`.

    Args:
      wrong: {array: how many elements, or whether, [device]}.
    """
    wrong = {name: each for name, each in wrong.items() if each.any()}
    name, counts = min(wrong.items(), key=lambda item: int(np.count_nonzero(item[1])))  # the nearest to the fault
    devices = [mesh.devices.flat[number] for number in np.flatnonzero(counts)]
    named = [f"device {device.id} of process {device.process_index}" for device in devices[:SHOWN]]
    if devices[SHOWN:]:
        named.append(f"{len(devices) - SHOWN} more devices")
    text = f"{int(counts.sum())} {what} of {name}" if what else name
    arrays = f", and {len(wrong) - 1} more arrays" if wrong.keys() - {name} else ""
    return f"{text} on {' and '.join(named)}{arrays}"
