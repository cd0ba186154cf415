"""The optimizer state in host memory, on the device only for its update: a layer at a time, or all of Muon's.

**Idea** (Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840; Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857).
Adam has two slots a parameter, which are read once a step (Kingma & Ba 2015, arXiv:1412.6980). They are 8 of the 16
bytes a parameter of training in float32, and idle through forward and backward pass. Here they are stored on the host.
In ZeRO-Offload the host also computes the update; here the device does. The layers of a stack are updated in a loop, in
place:

    for each layer:  slots = device(slots_on_host[layer]);  params[layer], slots = update(grads[layer], slots);
                     slots_on_host[layer] = host(slots)

So HBM holds the slots of one layer, and the host one copy of each. Muon has one slot for each matrix. All of its state
is moved at once, since it orthogonalises the matrices of all layers together (muon.py). HBM then holds it during the
update, when the activations are freed.

**Cost** a step. A device has P parameters of s bytes of slots each: 8 for Adam, 6 with its first moment in bfloat16.
The link to the host has W bytes/s in each direction.

    HBM      s*P bytes less, and a layer's slots in their place; with Muon no less than weights, gradients and state
    time     s*P / W each way, with nothing to overlap: the update has 10 FLOPs a parameter

**On TPU7x** W is 16e9, the figure of other chips. Llama 3.1 70B on 128 devices with s = 8 then takes 0.28 s each way,
beside a step of 10 s. Offload pays if the free memory buys a larger batch, or a policy that recomputes less, worth more
than that. On many devices FSDP has made the slots small already. XLA moves part of Muon's state before the backward
pass, and hides two thirds of the transfers: a step of Llama 3.1 8B on 8 devices takes 0.18 s more, where 0.57 s are
predicted. But that part is then beside the activations, and the peak is 1.0 GiB lower for a state of 4.2 (compiled).

**Left out.** Adafactor: its sums over rows and columns cannot be updated layer by layer, and are small. Overlap of one
layer's transfer with another's update. Updates as soon as the backward pass has a layer's gradient, which clipping by
the norm of all gradients forbids.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

MEMORY = "pinned_host"


def update(transform, grads, state, params, accept):
    """Applies `transform` to the parameters, stack by stack and layer by layer. Per-device code.

    Args:
      transform: an elementwise optax.GradientTransformation, which treats part of a tree as it treats all of it.
      grads, params: trees of one type, a dataclass. Its fields that are trees are stacks of layers, whose arrays have a
        leading layer dim.
      state: the state of `transform`. Trees of that type in it are the slots, in host memory; the rest is counts.
      accept: bool scalar. If it is false, parameters and state are returned unchanged.

    Returns:
      (params, state), with the slots in host memory.
    """
    is_slots = lambda x: isinstance(x, type(params))
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_slots)
    slots = [leaf for leaf in leaves if is_slots(leaf)]
    counts = [leaf for leaf in leaves if not is_slots(leaf)]

    def join(slots, counts):
        slots, counts = iter(slots), iter(counts)
        return treedef.unflatten([next(slots if is_slots(leaf) else counts) for leaf in leaves])

    def updated(grads, slots, params):
        """(params, slots, counts) after the update of part of the trees, with or without the layer dim."""
        updates, new_state = transform.update(grads, join(slots, counts), params)
        new_leaves = treedef.flatten_up_to(new_state)
        new_slots = [leaf for leaf in new_leaves if is_slots(leaf)]
        new_counts = [leaf for leaf in new_leaves if not is_slots(leaf)]
        new, old = (optax.apply_updates(params, updates), new_slots, new_counts), (params, slots, counts)
        return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)

    stack_of = jax.tree.map_with_path(lambda path, _: path[0].name if len(path) > 1 else "", params)
    new_params, new_slots = params, slots
    for stack in sorted(set(jax.tree.leaves(stack_of))):  # the first is "", for leaves outside of stacks
        part_grads, part_params, *part_slots = (_part(stack_of, stack, tree) for tree in (grads, params, *slots))
        if stack:
            part_params, part_slots = _layer_by_layer(updated, part_grads, part_params, part_slots)
        else:
            part_params, part_slots, new_counts = updated(part_grads, to_device(part_slots), part_params)
            part_slots = _to_host(part_slots)
        new_params = _merged(stack_of, stack, new_params, part_params)
        new_slots = [_merged(stack_of, stack, *pair) for pair in zip(new_slots, part_slots, strict=True)]
    return new_params, join(new_slots, new_counts)


def _layer_by_layer(updated, grads_L, params_L, slots_L):
    """(params_L, slots_L) after the update, in place: they are the loop carry, and each layer is written back to it."""

    def layer(i, carry):
        params_L, slots_L = carry
        params, slots, _ = updated(_at(grads_L, i), to_device(_at(slots_L, i)), _at(params_L, i))
        return _put(params_L, i, params), _put(slots_L, i, _to_host(slots))

    num_layers = jax.tree.leaves(params_L)[0].shape[0]
    return lax.fori_loop(0, num_layers, layer, (params_L, slots_L))


def _part(stack_of, stack, tree):
    """The tree with the leaves of a stack, and None in place of the others."""
    return jax.tree.map(lambda name, leaf: leaf if name == stack else None, stack_of, tree)


def _merged(stack_of, stack, tree, part):
    """The tree with the leaves of a stack replaced by those of `part`."""
    return jax.tree.map(lambda name, leaf, new: new if name == stack else leaf, stack_of, tree, part)


def _at(tree_L, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree_L)


def _put(tree_L, i, tree):
    return jax.tree.map(lambda a, x: lax.dynamic_update_index_in_dim(a, x, i, 0), tree_L, tree)


def to_device(tree):
    return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device), tree)


def _to_host(tree):
    return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Host), tree)
