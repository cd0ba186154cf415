"""Fully sharded data parallelism: every weight lives in shards, whole only for the moment of its use.

**Idea** (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277). N devices
train on N parts of the batch and each owns 1/N of every weight, gradient and optimizer slot. Before a layer runs, its
weights are all-gathered; after its backward pass, its weight gradients are reduce-scattered. Neither is written twice:
the transpose of an all-gather *is* a reduce-scatter, so differentiating the gather gives the rest.

    forward    w_DF = all_gather(w_dF)         y = x @ w_DF
    backward   w_DF = all_gather(w_dF)         dw_dF = reduce_scatter(x^T @ dy)

**Cost** a layer of P parameters, in bfloat16, with b*t tokens a device, C FLOP/s and W bytes/s into a device:

    compute    forward 2*P*b*t / C
    gather     2*P / W, hidden when   b*t > C / W   tokens a device

That does not depend on the model: more batch a device hides more communication. On TPU7x (C = 1153.5e12) with rings in
all six directions of a torus of about 90e9 bytes/s each, whose chips pass what they receive on to both of their
devices, C/W is about 2100. The backward pass has twice the FLOPs to hide a gather and a reduce-scatter; the
reduce-scatter, in the compute dtype too, comes out with six, four or two rings (compiled; workload.py has the rule),
and what has two is what shows first.

**Prefetch.** In program order a layer would wait for its own weights. `scan_layers(prefetch=True)` carries the gathered
weights of layer i through iteration i and starts the gather of layer i+1 (backward: i-1) beside the computation, which
does not depend on it. At most two layers are whole at once, and each pass gathers L+1 times instead of L. The loop is
differentiated by hand, because a gathered weight in the carry of a differentiated `lax.scan` would be kept for every
layer until the backward pass.

**Turns.** What a turn of the loop carries on has its place, and that is taken until the layer is done: so XLA:TPU
gathers the next layer elsewhere, and copies it there at the end of the turn. (Not what a backward pass is done with
early, as it is with the weights of a dense MLP: it starts to gather these when their place is free.)
With `unroll=2` a turn is two layers, and what the second gathers goes where the first one's weights were:

    turn of one     [layer(a) | gather b], a = copy(b)
    turn of two     [layer(a) | gather b], [layer(b) | gather a]

A barrier has the second gather wait until the first layer is done, or XLA:TPU copies as before. The loop's body is
twice as large, and takes about half as long again to compile (compiled, Llama 3.1 8B on fsdp:8 in two sequences a
device, 60 MiB of VMEM: 1.21 s a step in place of 1.25, in 324 s in place of 213).

**Sharded update** (Xu et al. 2020, "Automatic cross-replica sharding of weight update", arXiv:2004.13336; ZeRO-1).
Plain data parallelism keeps the whole state on every replica, all-reduces the gradients and does the same update
everywhere. With `shard_update` the master weights and the optimizer state are cut over `data` as well; a step
all-gathers the weights once, in the compute dtype, and reduce-scatters the gradients once, in float32
(`whole_over_data`, `sum_gradients`).

    all-reduce of float32 gradients     8 * P bytes a device (reduce-scatter, then all-gather)
    sharded update, bfloat16 weights    6 * P bytes, state memory and update time divided by the axis

**Left out.** Gathering several small layers in one go, and keeping some layers whole between forward and backward. To
sum the gradients of layer i within iteration i-1, where all of a layer's computation could hide it: XLA:TPU starts
these sums as late as before, and holds a layer of gradients more (compiled, Llama 3.1 70B on fsdp:64,tensor:2 in four
microbatches: 12.91 s a step in place of 11.56, of which 3.1 and 2.0 s wait).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from collectives import all_gather, all_reduce, reduce_scatter
from placement import MESH_AXES
from sharding import axes_of, dim_of


def gather(w: jax.Array, spec: PartitionSpec, axis: str, algorithm: str = "xla") -> jax.Array:
    """All-gathers a shard over one mesh axis along the dim that `spec` gives it; whole already where `spec` has none.

    Per-device code. Its transpose, under differentiation, is the reduce-scatter of the gradient. `algorithm`: who moves
    it, one of collectives.ALGORITHMS.
    """
    dim = dim_of(spec, axis)
    return w if dim is None else all_gather(w, axis, dim=dim, algorithm=algorithm)


def whole_over_data(params, specs, dtypes, algorithm="xla"):
    """Once a step: the parameters as the model takes them, whole over `data` and varying over every axis.

    With the sharded update this is the step's one all-gather over `data`, in `dtypes`; without it, it moves nothing.
    """

    def one(w, spec, dtype):
        w = w.astype(dtype)
        w = gather(w, spec, "data", algorithm) if "data" in axes_of(spec) else w
        return lax.pcast(w, _uncut(spec), to="varying")  # a type only: its transpose is a sum over these axes

    return jax.tree.map(one, params, specs, dtypes)


def sum_gradients(grads, specs, algorithm="xla"):
    """Once a step, the way back of `whole_over_data`: float32 sums over the axes that do not cut a parameter.

    Over `data` that is an all-reduce; with the sharded update, one reduce-scatter in its place.
    """

    def one(dw, spec):
        dw = dw.astype(jnp.float32)
        if (dim := dim_of(spec, "data")) is not None:
            dw = reduce_scatter(dw, "data", dim=dim, algorithm=algorithm)
        return all_reduce(dw, _uncut(spec), algorithm=algorithm, to="invarying")

    return jax.tree.map(one, grads, specs)


def _uncut(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for axis in MESH_AXES if axis not in axes_of(spec))


def scan_layers(layer, gather_layer, shards_L, x, aux, *, prefetch: bool, unroll: int = 1):
    """x = layer(gather_layer(shards_L[i]), x, aux, i) for each layer i; one is whole at a time, two with prefetch.

    Args:
      layer: (weights, x, aux, i) -> x. Wrap it in `jax.checkpoint` to choose what it saves for the backward pass; the
        gathered weights are never saved, but what it computes from them (a cast, say) would be, for every layer.
      gather_layer: one layer's shards -> its weights; differentiated for the gradient's way back.
      shards_L: tree of arrays with a leading layer dim.
      x: the residual stream; or a tree of it, as its largest array, and of what the layers add up beside it, whose
        gradient flows as well.
      aux: tree of constants that all layers see. No gradient flows to it: the layer stops it.
      unroll: with prefetch, layers in a turn of the loop. Those that are left over have a loop of their own.
    """
    return _scan_layers(layer, gather_layer, prefetch, unroll, shards_L, x, aux)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _scan_layers(layer, gather_layer, prefetch, unroll, shards_L, x, aux):
    step = lambda w, x, i: (layer(w, x, aux, i), None)
    return _loops(step, gather_layer, prefetch, unroll, shards_L, x)[0]


def _forward(layer, gather_layer, prefetch, unroll, shards_L, x, aux):
    def step(w, x, i):
        x, backward = jax.vjp(layer, w, x, aux, i)
        # The weights are gathered again in the backward pass, aux is the same for all layers, and their number is
        # counted: none is kept, or there would be one for every layer. How to take residuals out of a vjp stands in
        # JAX's "First-class VJPs", https://docs.jax.dev/en/latest/301/vjp-objects.html
        backward.args_res[0] = backward.args_res[2] = backward.args_res[3] = None
        return x, backward

    x, backwards = _loops(step, gather_layer, prefetch, unroll, shards_L, x)
    return x, (backwards, shards_L, aux)


def _backward(layer, gather_layer, prefetch, unroll, residuals, dx):
    backwards, shards_L, aux = residuals

    def step(w, dx, i, backward):
        backward.args_res[0], backward.args_res[2], backward.args_res[3] = w, aux, i
        dw, dx, *_ = backward(dx)
        scatter = jax.linear_transpose(gather_layer, _index(shards_L, i))
        return dx, scatter(dw)[0]

    dx, dshards = _loops(step, gather_layer, prefetch, unroll, shards_L, dx, backwards, reverse=True)
    in_order = lambda *of_turn: jnp.stack(of_turn, axis=1).reshape(-1, *of_turn[0].shape[1:])
    of_loops = [jax.tree.map(in_order, *of_turns) for of_turns in dshards]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_loops), dx, None


_scan_layers.defvjp(_forward, _backward)


def _loops(step, gather_layer, prefetch, unroll, shards_L, x, kept=None, reverse=False):
    """x, out = step(weights, x, i, *kept) over the layers i, whose weights are gathered ahead or in turn.

    Returns x and, for each of one or two loops, a tuple with the results of each layer of a turn, stacked over the
    turns; `kept` comes like that.
    """
    num_layers = jax.tree.leaves(shards_L)[0].shape[0]
    whole = lambda i: gather_layer(_index(shards_L, i))
    ahead = -1 if reverse else 1

    def with_prefetch(carry, i, *kept):
        x, w = carry
        next_i = i + ahead
        if unroll > 1:
            # Only now: the weights of the layer before are done with, and their place is free. What x has beside the
            # stream keeps its type: a barrier has all of its arrays vary over the axes of any.
            leaves, tree = jax.tree.flatten(x)
            stream = max(range(len(leaves)), key=lambda n: leaves[n].size)
            next_i, leaves[stream] = lax.optimization_barrier((next_i, leaves[stream]))
            x = jax.tree.unflatten(tree, leaves)
        # The last turn gathers its own layer once more, for nothing: cheaper than a second copy of the loop body.
        w_next = whole(next_i.clip(0, num_layers - 1))
        x, out = step(w, x, i, *kept)
        return (x, w_next), out

    def without(x, i, *kept):
        return step(whole(i), x, i, *kept)

    def turn(start, size, carry, xs):
        # As arange(L).reshape(turns, size) they would be a table, which a compiled program's text leaves out.
        number, *kept = xs
        out = {}
        for j in sorted(range(size), reverse=reverse):
            i = start + number * size + j
            carry, out[j] = (with_prefetch if prefetch else without)(carry, i, *(of[j] for of in kept))
        return carry, tuple(out[j] for j in sorted(out))

    turns, left_over = divmod(num_layers, unroll)
    # First layer, layers in a turn, turns.
    loops = [(0, unroll, turns)] * (turns > 0) + [(turns * unroll, left_over, 1)] * (left_over > 0)
    carry = (x, whole(num_layers - 1 if reverse else 0)) if prefetch else x
    out = {}
    for n in sorted(range(len(loops)), reverse=reverse):
        start, size, turns = loops[n]
        xs = (jnp.arange(turns), *([kept[n]] if kept else []))
        carry, out[n] = lax.scan(partial(turn, start, size), carry, xs, reverse=reverse)
    return (carry[0] if prefetch else carry), [out[n] for n in sorted(out)]


def _index(tree_L, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree_L)


def main(n: int = 8, L: int = 6, D: int = 512, tokens: int = 1024):
    """Where a weight lies; a stack of one matmul a layer, its weights in shards; what of their gathers TPU7x hides."""
    mesh = jax.make_mesh((n,), ("fsdp",), axis_types=(AxisType.Auto,))
    layouts = {
        "P()": PartitionSpec(),
        "P('fsdp')": PartitionSpec("fsdp"),
        "P(None, 'fsdp')": PartitionSpec(None, "fsdp"),
    }
    print(f"which of {n} devices holds an element of a weight [{n}, {n}] (-: each of them)")
    print("  " + "   ".join(f"{name:{2 * n}}" for name in layouts))
    grids = []
    for spec in layouts.values():
        grid = np.full((n, n), "-")
        for device, part in NamedSharding(mesh, spec).devices_indices_map((n, n)).items():
            grid[part] = device.id if len(spec) else "-"
        grids.append(grid)
    for rows in zip(*grids, strict=True):
        print("  " + "   ".join(f"{' '.join(row):{2 * n}}" for row in rows))

    keys = jax.random.split(jax.random.key(0))
    w_LDD = jax.random.normal(keys[0], (L, D, D)) / math.sqrt(D)
    x_bD = jax.random.normal(keys[1], (tokens, D))
    cut = PartitionSpec("fsdp")

    def plain(w_LDD, x_bD):
        return jnp.sum(lax.scan(lambda x, w: (jax.nn.gelu(x @ w), None), x_bD, w_LDD)[0] ** 2)

    def sharded(w_LdD, x_bD, prefetch):
        layer = lambda w_DD, x_bD, aux, i: jax.nn.gelu(x_bD @ w_DD)
        y_bD = scan_layers(layer, lambda w_dD: gather(w_dD, cut, "fsdp"), w_LdD, x_bD, None, prefetch=prefetch)
        return lax.psum(jnp.sum(y_bD**2), "fsdp")

    print(f"\n{L} layers of one matmul [{D}, {D}], {tokens} tokens: loss and gradient on simulated devices, measured")
    whole, of_whole = jax.jit(jax.value_and_grad(plain))(w_LDD, x_bD)
    specs = PartitionSpec(None, "fsdp"), cut
    for prefetch in (False, True):
        per_device = partial(sharded, prefetch=prefetch)
        loss = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
        step = jax.jit(jax.value_and_grad(loss))
        value, gradient = step(w_LDD, x_bD)
        off = jnp.abs(gradient - of_whole).max() / jnp.abs(of_whole).max()
        print(f"  prefetch={prefetch!s:6} {value:.1f} as {whole:.1f} on one; gradient off by {off:.0e}")

    D, F = 8192, 28_672
    print(f"\na layer of one matmul [{D}, {F}], forward, on TPU7x, predicted (as at the head of fsdp.py, in ms)")
    print("  tokens a device    computes   its gather   waits in turn   waits with prefetch")
    for t in (512, 1024, 2048, 4096, 8192):
        compute_ms, gather_ms = 1e3 * 2 * D * F * t / 1153.5e12, 1e3 * 2 * D * F / (6 * 90e9)
        waits_ms = max(gather_ms - compute_ms, 0.0)
        print(f"  {t:15,}{compute_ms:12.3f}{gather_ms:13.3f}{gather_ms:16.3f}{waits_ms:22.3f}")


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
