"""Fully sharded data parallelism: every weight is stored in shards and gathered only while it is used.

**Idea** (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277). N devices
train on N shards of the batch. Each device stores 1/N of every weight, of its gradient and of its optimizer state. The
weights of a layer are all-gathered before its forward pass, and again before its backward pass. After the backward pass
the gradients of its weights are reduce-scattered. The code contains the all-gather only: its transpose *is* a
reduce-scatter, so differentiation yields that. In the names, D is a full dim and d this device's shard of it:

    forward    w_DF = all_gather(w_dF)         y = x @ w_DF
    backward   w_DF = all_gather(w_dF)         dw_dF = reduce_scatter(x^T @ dy)

**Prefetch.** Without it a layer waits for its own weights. `scan_layers(prefetch=True)` carries the gathered weights of
layer i into iteration i of the loop. That iteration gathers the weights of layer i+1 (in the backward pass, i-1) while
it computes layer i, since neither depends on the other. At most two layers are gathered at once. A pass over L layers
gathers L+1 times, because the last iteration gathers its own layer again. `scan_layers` defines its own derivative.
That of `lax.scan` would save the gathered weights of every layer, because they are in the loop's carry.

**Large weights.** Two gathered layers of a large mixture do not fit. Of such a layer only some weights are gathered
ahead, those of attention, and the matrices of its experts while attention is computed. `gather_layer` is then a pair
of functions. The model does so with --no-prefetch.

**When a gather starts.** XLA:TPU's scheduler starts a message as late as it expects to hide it. It expects much of the
sorts and row look-ups of a mixture of experts, which are over before the gathers of its matrices are. So it started
these after attention, and the experts waited. Now what the router reads passes a barrier (`collectives.after`): the
gathers have to end before it, and are under way beside attention. The gather of the experts' last matrix may end later.
Where tokens are gathered over an axis of experts, it has to end before their last matmul, after which results are sent
back over the same links. If a result after attention is saved, XLA would recompute attention after the experts. So
attention's result passes that barrier, too, and the gradient of the mixture's result another one, for which attention
has to be recomputed. In the backward pass XLA sent gradients first, and gathered the next layer's weights at the end,
where little was left to hide them. There each gradient passes a barrier before it is sent, for which these gathers have
to end. One matrix of the experts is summed after another (`summed_first`), as XLA may merge sums that are near each
other. The compiler flag xla_tpu_aggressive_opt_barrier_removal, which published runs of mixtures set, removes barriers
and is not set here.

**Double buffering.** The carry is one buffer, and it is in use until the layer is done. So XLA:TPU gathers the next
layer into another buffer, and copies that into the carry at the end of the iteration. With `double_buffer` an iteration
has two layers, the two buffers swap roles, and nothing is copied. Here a and b are buffers, and | separates what runs
at the same time:

    one layer     [layer(a) | gather b], a = copy(b)
    two layers    [layer(a) | gather b], [layer(b) | gather a]

An optimization barrier (`_after`) makes the second gather wait for the first layer. Without it XLA:TPU copies. Another
one makes it wait for the first gather. XLA otherwise merged both, and so the second layer waited for them.

**Kinds of layers.** If some layers have weights of other shapes, every kind has a stack and a gather of its own. An
iteration of the loop has a period of layers, such as five local ones and a global one, in which the kind of each is
static. The carry at its end is the first layer of the next period. So prefetch goes on across kinds and periods.

**Two dims.** The mesh axis `fsdp_transpose`, named as in MaxText, shards the other dim of each matrix (F of w_DF), and
the batch. Weights are gathered over `fsdp`, then over `fsdp_transpose`; gradients are summed in the reverse order. With
n devices on the second axis, 1/n of the bytes go over the links of the first one, and all of them over those of the
second, which is best on the faster links. Norms, biases, router and the key of RoPE in latent attention are replicated
on the second axis. D is a multiple of `fsdp` alone: fsdp:64,fsdp_transpose:2 shards D = 2,880 over 128 devices.

**Padding.** With dim_multiple=128, fsdp:128 shards D = 2,880 as 2,944. The residual stream has 64 more columns, of
zeros, and so have the weights' dims D. They stay zero: dw = x^T dy, and there x is zero, or dy, since the weights that
dy comes through are zero. Norms take their mean over the 2,880. F and M are padded as well: activation(0) * up is zero.
Published weights are read into padding and written without, and MFU does not count it.

**Sharded update** (Xu et al. 2020, "Automatic cross-replica sharding of weight update", arXiv:2004.13336; ZeRO-1). The
mesh axis `data` replicates what `fsdp` shards. In plain data parallelism every replica has the full state, all-reduces
the gradients, and computes the same update. With `shard_update` master weights and optimizer state are sharded over
`data` as well. A step then all-gathers the weights over `data` once, in the compute dtype (`gather_over_data`), and
reduce-scatters the gradients once, in float32 (`sum_gradients`). For P parameters each device receives about

    all-reduce of float32 gradients     8 * P bytes (reduce-scatter, then all-gather)
    sharded update, bfloat16 weights    6 * P bytes; state memory and update time are divided by the size of `data`

**Cost** of one layer, in bfloat16. P is its number of parameters, b*t the tokens per device, C the FLOP/s of a device,
and W the bytes/s that it can receive:

    compute, forward    2*P*b*t / C  seconds
    gather              2*P / W      seconds, hidden when  b*t > C / W

The condition does not depend on the model: more tokens per device hide more communication. The backward pass has twice
the FLOPs, to hide a gather and a reduce-scatter. Both are in the compute dtype.

**On TPU7x** C is 1153.5e12. A gather over a 3D torus uses rings in all six directions, at about 90e9 bytes/s each. A
chip passes what it receives to both of its devices, so W is six times 90e9, and C/W is about 2100. XLA:TPU compiles a
reduce-scatter to six, four or two rings; predicted/workload.py has the rule. With two it is exposed first.

Without double buffering, some weights are not copied. The backward pass frees the buffer of a dense MLP's weights
early, and XLA:TPU starts the next gather into it at once. With double buffering the loop's body is twice as large, so
compilation takes about 1.5 times as long. For Llama 3.1 8B on fsdp:8, with two sequences per device and 60 MiB of
VMEM, a step takes 1.21 s instead of 1.25, and compilation 324 s instead of 213 (compiled). In two dims, with the second
one on the dies of a chip, a step takes as long as on fsdp:8 (compiled: 1.403 and 1.406 s, without double buffering).

**Left out.** Several small layers are not gathered at once. No layer stays gathered from forward to backward pass.

Gradients of layer i are not summed within iteration i-1, where the computation of a whole layer could hide the sums.
That was slower: XLA:TPU starts the sums as late as before, and the gradients of one more layer take memory. Llama 3.1
70B on fsdp:64,tensor:2 in four microbatches takes 12.91 s a step, 3.1 s exposed, instead of 11.56 and 2.0 (compiled).

With double buffering XLA merges the last sum of a mixture's first layer with the gather that follows. If the gather
waits for the sum, XLA sends the second layer's sums late. Qwen3 235B in FP8 takes 15.05 s instead of 14.51 (compiled).
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from collectives import after, all_gather, all_reduce, reduce_scatter
from placement import MESH_AXES
from sharding import axes_of, dim_of


def gather(w: jax.Array, spec: PartitionSpec, axis: str | tuple[str, ...], algorithm: str = "xla") -> jax.Array:
    """Returns the shard `w` all-gathered over a mesh axis, along the dim that `spec` shards over that axis.

    Over several axes it is gathered over one after the other, and not over those that shard no dim. Per-device code.
    The transpose is the reduce-scatter of the gradient. `algorithm` is one of collectives.ALGORITHMS.
    """
    for name in (axis,) if isinstance(axis, str) else axis:
        if (dim := dim_of(spec, name)) is not None:
            w = all_gather(w, name, dim=dim, algorithm=algorithm)
    return w


def summed_first(shards, weights):
    """Returns its arguments, trees. In the backward pass the gradients of `weights` wait for the sums of the shards'.

    XLA:TPU may otherwise send several as one message. It starts when the last of them is there, and takes 1.5 times as
    long as all of them apart (compiled).
    """

    def transposed(_, gradients):
        dshards, dweights = gradients
        return dshards, jax.tree.map(lambda dw: after(dw, dshards) if _may_wait(dw, dshards) else dw, dweights)

    return linear_call(lambda _, both: both, transposed, (), (shards, weights))


def gather_over_data(params, specs, dtypes, algorithm="xla"):
    """Returns the parameters as the model takes them, from this device's shards; called once per step.

    They are cast to `dtypes` and gathered over `data`, still sharded over the other axes, and typed as varying over all
    mesh axes (see `jax.shard_map`). With the sharded update this is the only all-gather over `data` in a step. Without
    it nothing is communicated. `params`, `specs` (PartitionSpecs) and `dtypes` are trees of the same structure.
    """

    def prepare(w, spec, dtype):
        w = w.astype(dtype)
        w = gather(w, spec, "data", algorithm) if "data" in axes_of(spec) else w
        # This changes the type only. Its transpose is a sum over these axes, which `sum_gradients` does once per step.
        return lax.pcast(w, _replicated_axes(spec), to="varying")

    return jax.tree.map(prepare, params, specs, dtypes)


def sum_gradients(grads, specs, algorithm="xla", dtype=jnp.float32):
    """Returns the gradients of the stored shards, in `dtype`: the transpose of `gather_over_data`, once per step.

    Each gradient is summed over the axes that do not shard its parameter. Over `data` this is an all-reduce, or with
    the sharded update a reduce-scatter. It is written out, not derived, since the step takes gradients with respect to
    the gathered weights and first adds up those of its microbatches.
    """

    def reduce(dw, spec):
        dw = dw.astype(dtype)
        if (dim := dim_of(spec, "data")) is not None:
            dw = reduce_scatter(dw, "data", dim=dim, algorithm=algorithm)
        return all_reduce(dw, _replicated_axes(spec), algorithm=algorithm, to="invarying")

    return jax.tree.map(reduce, grads, specs)


def _replicated_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes over which `spec` shards no dim."""
    return tuple(axis for axis in MESH_AXES if axis not in axes_of(spec))


class Loop(NamedTuple):
    """How `scan_layers` runs its layers; the first two are tuples with an entry for each kind of layer."""

    layers: tuple
    gathers: tuple
    prefetch: bool
    double_buffer: bool
    ordered: bool
    pattern: tuple


def scan_layers(
    layer, gather_layer, shards_L, x, aux, *, prefetch: bool, double_buffer=False, ordered=False, pattern: tuple = ()
):
    """Runs the layers in order: x = layer(gather_layer(shards_L[i]), x, aux, i) for each i. Returns the last x.

    At most one layer is gathered at a time, two with prefetch. Per-device code, differentiable in `shards_L` and x.

    Args:
      layer: (weights, x, aux, i, arriving) -> x. Wrap it in `jax.checkpoint` to choose what it saves for the backward
        pass. The gathered weights are never saved. Without `jax.checkpoint`, what it computes from them (a cast, for
        example) is saved for every layer. `arriving` are weights that are gathered meanwhile, without a gradient, for
        `after`; () if not `ordered`.
      gather_layer: one layer's shards -> its weights. Its `jax.linear_transpose` must reduce-scatter the gradient. Or
        two such functions, for the weights of which one layer is gathered at a time with prefetch as well: the first
        one's are gathered a layer ahead, the second one's within their layer. `layer` then takes (weights of the first,
        weights of the second, x, aux, i, arriving).
      shards_L: a tree of arrays with a leading layer dim, the weights of all layers.
      x: the residual stream, or a tree with the stream and with sums to which the layers add. The stream must be the
        largest array of the tree. Gradients flow to the sums, too.
      aux: a tree of constants for all layers, without a gradient: `layer` must apply `lax.stop_gradient` to it.
      double_buffer: with prefetch, an iteration of the loop has two layers. If their number is odd, the last layer runs
        in a loop of its own.
      ordered: with prefetch and layers of one kind, orders messages by barriers ("When a gather starts" above).
      pattern: for layers of several kinds, whose weights have other shapes: the kind of each layer of a period, an
        index of `layer`, `gather_layer` and `shards_L`, which are then tuples. An iteration has a period of layers.
        With (0, 0, 1) layers 0 and 1 are rows 0 and 1 of the first stack, and layer 2 is row 0 of the second.
    """
    if not pattern:
        layer, gather_layer, shards_L, pattern = (layer,), (gather_layer,), (shards_L,), (0,)
    layers = tuple(lambda w, *rest, layer=layer: layer(*w, *rest) for layer in layer)
    gathers = tuple(gather if isinstance(gather, tuple) else (gather,) for gather in gather_layer)
    ordered = ordered and prefetch and len(pattern) == 1  # weights of another kind have other shapes in each pass
    return _scan_layers(Loop(layers, gathers, prefetch, double_buffer, ordered, pattern), shards_L, x, aux)


def _run(step, loop: Loop, stacks, x, saved=None, reverse=False):
    """Runs x, out = step(kind, w, x, i, w_next, *saved) for each layer i; with prefetch, gathers weights a layer ahead.

    `w_next` are the weights that are gathered ahead meanwhile; () if the loop is not ordered.

    Returns the last x, and `out` of all layers, stacked by `_iterate`. `saved` is None or is stacked in the same way.
    """
    rows, pattern, period = [jax.tree.leaves(stack)[0].shape[0] for stack in stacks], loop.pattern, len(loop.pattern)
    num_layers = sum(rows)
    weights = lambda kind, row, which: tuple(gather(_index(stacks[kind], row)) for gather in loop.gathers[kind][which])
    all_of_them, ahead_of_time, within_the_layer = slice(None), slice(1), slice(1, None)

    def gather_then(x, i, j, *saved):
        kind, row = _place(i, j % period, pattern)
        return step(kind, weights(kind, row, all_of_them), x, i, (), *saved)

    if not loop.prefetch:
        return _iterate(gather_then, x, num_layers, period, saved, reverse)
    first, ahead = (num_layers - 1, -1) if reverse else (0, 1)

    def gather_beside(carry, i, j, *saved):
        x, w = carry
        kind, row = _place(i + ahead, (j + ahead) % period, pattern)
        row = row.clip(0, rows[kind] - 1)  # the extra gather is cheaper than a second loop body
        if loop.double_buffer:
            x, row = _after(x, row)
            row = after(row, w)  # else XLA may merge this gather with that of w, and w would arrive as late
        w_next = weights(kind, row, ahead_of_time)
        kind, row = _place(i, j % period, pattern)
        w += weights(kind, row, within_the_layer)
        x, out = step(kind, w, x, i, w_next if loop.ordered else (), *saved)
        return (x, w_next), out

    per_iteration = 2 if loop.double_buffer and period == 1 else period
    carry = x, weights(*_place(first, first % period, pattern), ahead_of_time)
    (x, _), out = _iterate(gather_beside, carry, num_layers, per_iteration, saved, reverse)
    return x, out


def _place(i, j: int, pattern: tuple[int, ...]):
    """Returns (kind, row in the stack of that kind) of layer i, which is the j-th of its period."""
    if len(pattern) == 1:
        return 0, i
    return pattern[j], i // len(pattern) * pattern.count(pattern[j]) + pattern[:j].count(pattern[j])


def _after(x, i):
    """Returns (x, i) through an optimization barrier, so that what uses i starts only after x is computed.

    The buffer with the weights of the layer that computed x is then free. Only the residual stream, the largest array
    of x, goes through the barrier. A barrier would make the other arrays of x vary over all mesh axes of the stream.
    """
    leaves, tree = jax.tree.flatten(x)
    stream = max(range(len(leaves)), key=lambda n: leaves[n].size)
    i, leaves[stream] = lax.optimization_barrier((i, leaves[stream]))
    return jax.tree.unflatten(tree, leaves), i


def _may_wait(x, others) -> bool:
    """Whether x keeps its type in a barrier with the others, after which each varies over the mesh axes of all."""
    return all(jax.typeof(other).mat.varying <= jax.typeof(x).mat.varying for other in jax.tree.leaves(others))


def _iterate(body, carry, num_layers, per_iteration, saved, reverse):
    """Runs carry, out = body(carry, i, j, *saved of layer i) for each layer i, `per_iteration` layers in an iteration.

    Layer i is the j-th of its iteration. Layers that are left over run in a loop of their own.

    Returns:
      The last carry.
      The outs, a list with an entry for each loop. It is a tuple with an entry for each layer of an iteration: `out` of
      that layer, stacked over the iterations. Putting all layers in order is left to the caller.
    """

    def iteration(start, size, carry, xs):
        # xs has the number of the iteration, not a row of arange(L).reshape(-1, size). The text of a compiled program
        # leaves out such tables of constants, and compiled/hlo.py evaluates integers from that text.
        number, *saved = xs
        out = {}
        for j in sorted(range(size), reverse=reverse):
            carry, out[j] = body(carry, start + number * size + j, j, *(residuals[j] for residuals in saved))
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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_layers(loop: Loop, stacks, x, aux):
    """`scan_layers` of one or several kinds, as a function whose derivative is `_forward` and `_backward`."""
    step = lambda kind, w, x, i, w_next: (loop.layers[kind](w, x, aux, i, _arriving(w, w_next)), None)
    return _run(step, loop, stacks, x)[0]


def _arriving(w, w_next) -> tuple:
    """Returns what is gathered during a layer of the forward pass: the next weights, and its own large ones."""
    return (*w_next, *w[len(w_next) :]) if w_next else ()


def _forward(loop: Loop, stacks, x, aux):
    """Returns the last x, and the residuals for `_backward`: the vjp of each layer, the stacks and aux."""

    def step(kind, w, x, i, w_next):
        x, backward = jax.vjp(loop.layers[kind], w, x, aux, i, _arriving(w, w_next))
        # args_res has the arguments (w, x, aux, i, arriving) that the vjp saves. The backward pass gathers w again, has
        # aux and i, and other weights that arrive. Saved here, these four would take memory for every layer. JAX's
        # "First-class VJPs" describes how to remove them: https://docs.jax.dev/en/latest/301/vjp-objects.html
        backward.args_res[0] = backward.args_res[2] = backward.args_res[3] = backward.args_res[4] = None
        return x, backward

    x, backwards = _run(step, loop, stacks, x)
    return x, (backwards, stacks, aux)


def _backward(loop: Loop, residuals, dx):
    """Returns the gradients of the stacks and of the first x, and None for aux, from the gradient dx of the last x."""
    backwards, stacks, aux = residuals

    def step(kind, w, dx, i, w_next, backward):
        # Most of a backward pass is after the router. There the router waits for the layer's own weights, and the next
        # layer's arrive until the first gradient is sent.
        arriving = w if w_next else ()
        backward.args_res[0], backward.args_res[2], backward.args_res[3], backward.args_res[4] = w, aux, i, arriving
        dw, dx, *_ = backward(dx)
        # The values and scales of weights in FP8 have no gradient: it is that of an array beside them.
        sent = lambda dw: dw.dtype.itemsize > 1 and _may_wait(dw, w_next)
        dw = jax.tree.map(lambda dw: after(dw, w_next) if w_next and sent(dw) else dw, dw)
        gather = lambda shards: tuple(gather(shards) for gather in loop.gathers[kind])
        return dx, jax.linear_transpose(gather, _index(stacks[kind], 0))(dw)[0]

    dx, dshards = _run(step, loop, stacks, dx, backwards, reverse=True)
    # Each loop has one stack for each layer of an iteration. Merge those of a kind to one, in the order of the layers.
    interleave = lambda *layers: jnp.stack(layers, axis=1).reshape(-1, *layers[0].shape[1:])

    def merged(kind):
        of_kind = lambda layers: [layer for layer, each in zip(layers, itertools.cycle(loop.pattern)) if each == kind]
        loops = [jax.tree.map(interleave, *of_kind(layers)) for layers in dshards]
        return jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *loops)

    return tuple(merged(kind) for kind in range(len(stacks))), dx, None


_scan_layers.defvjp(_forward, _backward)


def _index(tree_L, i):
    """Returns the arrays of layer i, from arrays with a leading layer dim."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree_L)


def main(n: int = 8, L: int = 6, D: int = 512, tokens: int = 1024):
    """Prints layouts of a weight, the loss and gradient of a sharded stack of matmuls, and exposed time on TPU7x."""
    mesh = jax.make_mesh((n,), ("fsdp",), axis_types=(AxisType.Auto,))
    P = PartitionSpec
    layouts = {"P()": P(), "P('fsdp')": P("fsdp"), "P(None, 'fsdp')": P(None, "fsdp")}
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
        layer = lambda w_DD, x_bD, aux, i, arriving: jax.nn.gelu(x_bD @ w_DD)
        y_bD = scan_layers(layer, lambda w_dD: gather(w_dD, spec, "fsdp"), w_LdD, x_bD, None, prefetch=prefetch)
        return lax.psum(jnp.sum(y_bD**2), "fsdp")

    print(f"\n{L} layers of one matmul [{D}, {D}], {tokens} tokens: loss and gradient on simulated devices, measured")
    expected, expected_gradient = jax.jit(jax.value_and_grad(plain))(w_LDD, x_bD)
    in_specs = PartitionSpec(None, "fsdp"), spec
    for prefetch in (False, True):
        per_device = partial(sharded, prefetch=prefetch)
        loss = jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())
        value, gradient = jax.jit(jax.value_and_grad(loss))(w_LDD, x_bD)
        error = jnp.abs(gradient - expected_gradient).max() / jnp.abs(expected_gradient).max()
        print(f"  prefetch={prefetch!s:6} {value:.1f}, on one device {expected:.1f}; error of the gradient {error:.0e}")

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
