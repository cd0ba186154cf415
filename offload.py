"""The optimizer state in the host's memory, on the device one layer at a time.

Adam keeps two numbers a parameter, its slots, that are read once a step (Kingma & Ba 2015, arXiv:1412.6980): 8 of the
16 bytes a parameter that training in float32 holds, idle through forward and backward pass. Here they wait on the host
(Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840, where the host also computes: here the device does; Rajbhandari et al.
2021, ZeRO-Infinity, arXiv:2104.07857). The layers of a stack are updated in a loop, in place,

    for each layer:  slots = device(slots_on_host[layer]);  params[layer], slots = update(grads[layer], slots);
                     slots_on_host[layer] = host(slots)

so that HBM holds the slots of one layer, and the host one copy of each. Moving all at once would need room for all.

**Cost** a step, with P parameters a device, s bytes of slots each (8 for Adam, 6 with its first moment in bfloat16) and
a link to the host of W bytes/s in each direction:

    HBM      s*P bytes less, and a layer's slots in its place
    time     s*P / W for each way, with nothing beside it: the update has 10 FLOPs a parameter

A TPU7x device (W = 16e9, the figure of other chips) takes 0.28 s each way for Llama 3.1 70B on 128 devices, with s = 8,
beside a step of 10 s. So it pays where the room buys a batch, or a policy that recomputes less, worth more than that;
over many devices, FSDP has made the slots small already.

Only what is elementwise can be updated in parts: adamw and sgd. Adafactor's slots are small as they are.

**Left out**: the transfer of a layer beside the update of another, and the update of a layer as soon as the backward
pass has its gradient, which clipping by the norm of all gradients forbids.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

MEMORY = "pinned_host"


def update(transform, grads, state, params, accept):
    """`transform.update` and its result added to the parameters, stack by stack, layer by layer. Per-device code.

    Args:
      transform: an elementwise optax.GradientTransformation: it does the same to a part of a tree as to the whole.
      grads, params: trees of one type, a dataclass; its fields that are trees themselves are stacks of layers, whose
        arrays have a leading layer dim.
      state: of `transform`; the trees of that type in it (the slots) lie in host memory, all else (counts) does not.
      accept: bool scalar. Where it is false, parameters and state come back as they were.

    Returns: (params, state), the slots in host memory again.
    """
    is_slots = lambda x: isinstance(x, type(params))
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_slots)
    slots = [leaf for leaf in leaves if is_slots(leaf)]
    counts = [leaf for leaf in leaves if not is_slots(leaf)]

    def join(slots, counts):
        slots, counts = iter(slots), iter(counts)
        return treedef.unflatten([next(slots if is_slots(leaf) else counts) for leaf in leaves])

    def updated(grads, slots, params):
        """(params, slots, counts) of a part of the trees, which is on the device, with or without its layer dim."""
        updates, new_state = transform.update(grads, join(slots, counts), params)
        new_leaves = treedef.flatten_up_to(new_state)
        new_slots = [leaf for leaf in new_leaves if is_slots(leaf)]
        new_counts = [leaf for leaf in new_leaves if not is_slots(leaf)]
        new, old = (optax.apply_updates(params, updates), new_slots, new_counts), (params, slots, counts)
        return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)

    stack_of = jax.tree.map_with_path(lambda path, _: path[0].name if len(path) > 1 else "", params)
    new_params, new_slots = params, slots
    for stack in sorted(set(jax.tree.leaves(stack_of))):  # the first is "", of what is in no stack
        one = (_part(stack_of, stack, params), [_part(stack_of, stack, tree) for tree in slots])
        grads_of = _part(stack_of, stack, grads)
        if stack:
            one = _layer_by_layer(updated, grads_of, *one)
        else:
            *one, new_counts = updated(grads_of, _to_device(one[1]), one[0])
            one = one[0], _to_host(one[1])
        new_params = _merged(stack_of, stack, new_params, one[0])
        new_slots = [_merged(stack_of, stack, *pair) for pair in zip(new_slots, one[1], strict=True)]
    return new_params, join(new_slots, new_counts)


def _layer_by_layer(updated, grads_L, params_L, slots_L):
    """In place: params_L and slots_L are what the loop carries, and a layer of them is taken out and put back."""

    def layer(i, carry):
        params_L, slots_L = carry
        params, slots, _ = updated(_at(grads_L, i), _to_device(_at(slots_L, i)), _at(params_L, i))
        return _put(params_L, i, params), _put(slots_L, i, _to_host(slots))

    num_layers = jax.tree.leaves(params_L)[0].shape[0]
    return lax.fori_loop(0, num_layers, layer, (params_L, slots_L))


def _part(stack_of, stack, tree):
    """The leaves of a stack, None in place of the others."""
    return jax.tree.map(lambda name, leaf: leaf if name == stack else None, stack_of, tree)


def _merged(stack_of, stack, tree, part):
    return jax.tree.map(lambda name, leaf, new: new if name == stack else leaf, stack_of, tree, part)


def _at(tree_L, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree_L)


def _put(tree_L, i, tree):
    return jax.tree.map(lambda a, x: lax.dynamic_update_index_in_dim(a, x, i, 0), tree_L, tree)


def _to_device(tree):
    return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device), tree)


def _to_host(tree):
    return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Host), tree)
