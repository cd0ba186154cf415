"""Fully sharded data parallelism: every weight is stored in shards and gathered only while it is used.

**Idea** (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277). N devices
train on N shards of the batch, and each owns 1/N of every weight, gradient and optimizer slot. Before a layer runs, its
weights are all-gathered; after its backward pass, its weight gradients are reduce-scattered. Only the gather is
written: the transpose of an all-gather *is* a reduce-scatter, so differentiation yields the rest.

    forward    w_DF = all_gather(w_dF)         y = x @ w_DF
    backward   w_DF = all_gather(w_dF)         dw_dF = reduce_scatter(x^T @ dy)

**Prefetch.** In program order a layer would wait for its own weights. `scan_layers(prefetch=True)` carries the gathered
weights of layer i through iteration i, and starts the gather of layer i+1 (backward: i-1) beside the computation, which
does not depend on it. At most two layers are gathered at once, and each pass gathers L+1 times instead of L. The loop
is differentiated by hand: a differentiated `lax.scan` would save the gathered weights in its carry for every layer.

**Double buffering.** The loop carry is one buffer, busy until the layer is done. So XLA:TPU gathers the next layer
elsewhere, and copies it over at the end of the iteration. With `double_buffer` an iteration has two layers, the buffers
swap roles, and nothing is copied:

    one layer     [layer(a) | gather b], a = copy(b)
    two layers    [layer(a) | gather b], [layer(b) | gather a]

A barrier makes the second gather wait until the first layer is done; without it XLA:TPU copies as before.

**Sharded update** (Xu et al. 2020, "Automatic cross-replica sharding of weight update", arXiv:2004.13336; ZeRO-1).
Plain data parallelism stores the full state on every replica, all-reduces the gradients and does the same update
everywhere. With `shard_update` the master weights and the optimizer state are sharded over `data` as well. A step then
all-gathers the weights once, in the compute dtype (`gather_over_data`), and reduce-scatters the gradients once, in
float32 (`sum_gradients`).

    all-reduce of float32 gradients     8 * P bytes a device (reduce-scatter, then all-gather)
    sharded update, bfloat16 weights    6 * P bytes, state memory and update time divided by the axis

**Cost** of a layer of P parameters in bfloat16, with b*t tokens a device, C FLOP/s and W bytes/s into a device:

    compute    forward 2*P*b*t / C
    gather     2*P / W, hidden when   b*t > C / W   tokens a device

The condition does not depend on the model: a larger batch a device hides more communication. The backward pass has
twice the FLOPs to hide a gather and a reduce-scatter, which is in the compute dtype, too.

**On TPU7x** C is 1153.5e12. With rings in all six directions of a torus, of about 90e9 bytes/s each, whose chips pass
on what they receive to both of their devices, C/W is about 2100. A reduce-scatter is compiled to six, four or two rings
(predicted/workload.py has the rule); those with two are the first to be exposed.

Without double buffering, the copy is missing where the backward pass frees a buffer early, as with the weights of a
dense MLP: XLA:TPU starts to gather these when the buffer is free. With it, the loop's body is twice as large, and
compiling takes about half as long again (compiled, Llama 3.1 8B on fsdp:8 in two sequences a device, 60 MiB of VMEM:
1.21 s a step in place of 1.25, in 324 s in place of 213).

Summing the gradients of layer i within iteration i-1 would let all of a layer's computation hide the sums, and is left
out: XLA:TPU starts them as late as before, and holds one more layer of gradients (compiled, Llama 3.1 70B on
fsdp:64,tensor:2 in four microbatches: 12.91 s a step in place of 11.56, of which 3.1 and 2.0 s wait).

**Left out.** Gathering several small layers at once, and keeping some layers gathered between forward and backward.
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
    """All-gathers a shard over one mesh axis, along the dim that `spec` shards over it; without such a dim returns it.

    Per-device code. Its transpose is the reduce-scatter of the gradient. `algorithm`: one of collectives.ALGORITHMS.
    """
    dim = dim_of(spec, axis)
    return w if dim is None else all_gather(w, axis, dim=dim, algorithm=algorithm)


def gather_over_data(params, specs, dtypes, algorithm="xla"):
    """Returns the parameters as the model takes them, once a step: gathered over `data`, and varying over every axis.

    With the sharded update this is the step's one all-gather over `data`, in `dtypes`; without it, nothing moves.
    """

    def prepare(w, spec, dtype):
        w = w.astype(dtype)
        w = gather(w, spec, "data", algorithm) if "data" in axes_of(spec) else w
        # A change of type alone. Its transpose is a sum over these axes, which `sum_gradients` does once.
        return lax.pcast(w, _replicated_axes(spec), to="varying")

    return jax.tree.map(prepare, params, specs, dtypes)


def sum_gradients(grads, specs, algorithm="xla"):
    """The transpose of `gather_over_data`, once a step: sums in float32 over the axes that do not shard a parameter.

    Over `data` that is an all-reduce; with the sharded update, one reduce-scatter in its place.
    """

    def reduce(dw, spec):
        dw = dw.astype(jnp.float32)
        if (dim := dim_of(spec, "data")) is not None:
            dw = reduce_scatter(dw, "data", dim=dim, algorithm=algorithm)
        return all_reduce(dw, _replicated_axes(spec), algorithm=algorithm, to="invarying")

    return jax.tree.map(reduce, grads, specs)


def _replicated_axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for axis in MESH_AXES if axis not in axes_of(spec))


def scan_layers(layer, gather_layer, shards_L, x, aux, *, prefetch: bool, double_buffer: bool = False):
    """x = layer(gather_layer(shards_L[i]), x, aux, i) for each layer i; one is gathered at a time, two with prefetch.

    Args:
      layer: (weights, x, aux, i) -> x. Wrap it in `jax.checkpoint` to choose what it saves for the backward pass. The
        gathered weights are never saved, but what it computes from them (a cast, say) would be, for every layer.
      gather_layer: one layer's shards -> its weights; its transpose reduce-scatters the gradient.
      shards_L: a tree of arrays with a leading layer dim.
      x: the residual stream; or a tree of the stream, its largest array, and of sums that the layers add to. Gradients
        flow to the sums, too.
      aux: a tree of constants that all layers see. The layer itself must stop gradients to it.
      double_buffer: with prefetch, run two layers in an iteration of the loop. A last odd layer has its own loop.
    """
    return _scan_layers(layer, gather_layer, prefetch, double_buffer, shards_L, x, aux)


def _run(step, gather_layer, prefetch, double_buffer, shards_L, x, saved=None, reverse=False):
    """Runs x, out = step(weights, x, i, *saved) over the layers i; with prefetch, gathers weights one layer ahead.

    Returns x, and the outs of all layers as `_loop` stacks them; `saved` is stacked in the same way.
    """
    num_layers = jax.tree.leaves(shards_L)[0].shape[0]
    weights = lambda i: gather_layer(_index(shards_L, i))
    if not prefetch:
        return _loop(lambda x, i, *saved: step(weights(i), x, i, *saved), x, num_layers, 1, saved, reverse)
    first, ahead = (num_layers - 1, -1) if reverse else (0, 1)

    def gather_beside(carry, i, *saved):
        x, w = carry
        following = (i + ahead).clip(0, num_layers - 1)  # the last one again: cheaper than a second loop body
        if double_buffer:
            x, following = _after(x, following)
        w_next = weights(following)
        x, out = step(w, x, i, *saved)
        return (x, w_next), out

    per_iteration = 2 if double_buffer else 1
    (x, _), out = _loop(gather_beside, (x, weights(first)), num_layers, per_iteration, saved, reverse)
    return x, out


def _after(x, i):
    """Returns (x, i) behind a barrier: users of i wait for the layer that made x, whose weights' buffer is then free.

    Only the largest array of x, the residual stream, is behind it: a barrier makes arrays vary over each other's axes.
    """
    leaves, tree = jax.tree.flatten(x)
    stream = max(range(len(leaves)), key=lambda n: leaves[n].size)
    i, leaves[stream] = lax.optimization_barrier((i, leaves[stream]))
    return jax.tree.unflatten(tree, leaves), i


def _loop(body, carry, num_layers, per_iteration, saved, reverse):
    """Runs carry, out = body(carry, i, *saved[i]) over the layers i, with `per_iteration` of them in an iteration.

    Layers that are left over have a loop of their own. Returns the carry and, for each loop, a tuple with the outs of
    each layer of an iteration, stacked over the iterations: they are interleaved only where that is needed.
    """

    def iteration(start, size, carry, xs):
        # A number, not a row of arange(L).reshape(-1, size): a compiled program's text leaves out such tables.
        number, *saved = xs
        out = {}
        for j in sorted(range(size), reverse=reverse):
            carry, out[j] = body(carry, start + number * size + j, *(residuals[j] for residuals in saved))
        return carry, tuple(out[j] for j in range(size))

    iterations, left_over = divmod(num_layers, per_iteration)
    loops = [(0, per_iteration, iterations)] * (iterations > 0)  # (first layer, layers in an iteration, iterations)
    loops += [(iterations * per_iteration, left_over, 1)] * (left_over > 0)
    out = {}
    for n in sorted(range(len(loops)), reverse=reverse):
        start, size, iterations = loops[n]
        xs = (jnp.arange(iterations), *([saved[n]] if saved else []))
        carry, out[n] = lax.scan(partial(iteration, start, size), carry, xs, reverse=reverse)
    return carry, [out[n] for n in range(len(loops))]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _scan_layers(layer, gather_layer, prefetch, double_buffer, shards_L, x, aux):
    step = lambda w, x, i: (layer(w, x, aux, i), None)
    return _run(step, gather_layer, prefetch, double_buffer, shards_L, x)[0]


def _forward(layer, gather_layer, prefetch, double_buffer, shards_L, x, aux):
    def step(w, x, i):
        x, backward = jax.vjp(layer, w, x, aux, i)
        # The backward pass gathers the weights again, and has aux and i: saved, they would take memory for every layer.
        # For removing residuals from a vjp see JAX's "First-class VJPs",
        # https://docs.jax.dev/en/latest/301/vjp-objects.html
        backward.args_res[0] = backward.args_res[2] = backward.args_res[3] = None
        return x, backward

    x, backwards = _run(step, gather_layer, prefetch, double_buffer, shards_L, x)
    return x, (backwards, shards_L, aux)


def _backward(layer, gather_layer, prefetch, double_buffer, residuals, dx):
    backwards, shards_L, aux = residuals

    def step(w, dx, i, backward):
        backward.args_res[0], backward.args_res[2], backward.args_res[3] = w, aux, i
        dw, dx, *_ = backward(dx)
        scatter = jax.linear_transpose(gather_layer, _index(shards_L, i))
        return dx, scatter(dw)[0]

    dx, dshards = _run(step, gather_layer, prefetch, double_buffer, shards_L, dx, backwards, reverse=True)
    interleave = lambda *layers: jnp.stack(layers, axis=1).reshape(-1, *layers[0].shape[1:])
    loops = [jax.tree.map(interleave, *layers) for layers in dshards]
    return jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *loops), dx, None


_scan_layers.defvjp(_forward, _backward)


def _index(tree_L, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree_L)


def main(n: int = 8, L: int = 6, D: int = 512, tokens: int = 1024):
    """Prints layouts of a weight, the loss and gradient of a sharded stack of matmuls, and exposed gathers on TPU7x."""
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
        for device, shard in NamedSharding(mesh, spec).devices_indices_map((n, n)).items():
            grid[shard] = device.id if len(spec) else "-"
        grids.append(grid)
    for rows in zip(*grids, strict=True):
        print("  " + "   ".join(f"{' '.join(row):{2 * n}}" for row in rows))

    keys = jax.random.split(jax.random.key(0))
    w_LDD = jax.random.normal(keys[0], (L, D, D)) / math.sqrt(D)
    x_bD = jax.random.normal(keys[1], (tokens, D))
    spec = PartitionSpec("fsdp")

    def plain(w_LDD, x_bD):
        return jnp.sum(lax.scan(lambda x, w: (jax.nn.gelu(x @ w), None), x_bD, w_LDD)[0] ** 2)

    def sharded(w_LdD, x_bD, prefetch):
        layer = lambda w_DD, x_bD, aux, i: jax.nn.gelu(x_bD @ w_DD)
        y_bD = scan_layers(layer, lambda w_dD: gather(w_dD, spec, "fsdp"), w_LdD, x_bD, None, prefetch=prefetch)
        return lax.psum(jnp.sum(y_bD**2), "fsdp")

    print(f"\n{L} layers of one matmul [{D}, {D}], {tokens} tokens: loss and gradient on simulated devices, measured")
    expected, expected_gradient = jax.jit(jax.value_and_grad(plain))(w_LDD, x_bD)
    in_specs = PartitionSpec(None, "fsdp"), spec
    for prefetch in (False, True):
        per_device = partial(sharded, prefetch=prefetch)
        loss = jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())
        step = jax.jit(jax.value_and_grad(loss))
        value, gradient = step(w_LDD, x_bD)
        off = jnp.abs(gradient - expected_gradient).max() / jnp.abs(expected_gradient).max()
        print(f"  prefetch={prefetch!s:6} {value:.1f} as {expected:.1f} on one; gradient off by {off:.0e}")

    D, F = 8192, 28_672
    print(f"\na layer of one matmul [{D}, {F}], forward, on TPU7x, predicted (formula at the head of fsdp.py), ms")
    print("  tokens a device     compute       gather         exposed   exposed, with prefetch")
    for t in (512, 1024, 2048, 4096, 8192):
        compute_ms, gather_ms = 1e3 * 2 * D * F * t / 1153.5e12, 1e3 * 2 * D * F / (6 * 90e9)
        waits_ms = max(gather_ms - compute_ms, 0.0)
        print(f"  {t:15,}{compute_ms:12.3f}{gather_ms:13.3f}{gather_ms:16.3f}{waits_ms:25.3f}")


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
