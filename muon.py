"""Muon: momentum whose matrices are orthogonalised, each on one device, and AdamW for the other parameters.

**Idea** (Jordan et al. 2024, kellerjordan.github.io/posts/muon). The momentum of a weight matrix has a few large
singular values, so an update along it moves few directions. Muon replaces the momentum U S V^T by U V^T: every
direction moves by the same length. Matrices are the linear maps of hidden states. Embedding, unembedding, router, norms
and biases have AdamW.

**Formula.** For a matrix W of n x m, with its gradient G and the learning rate r:

    M = 0.95 M + 0.05 G                    momentum
    X = 0.95 M + 0.05 G                    Nesterov
    X = X / |X|                            Frobenius norm
    X = a X + (b A + c A A) X, A = X X^T   five times: Newton-Schulz, with a, b, c = 3.4445, -4.7750, 2.0315
    W = W - r (0.2 sqrt(max(n, m)) X + weight_decay W)

The iteration takes singular values to about 1, between 0.7 and 1.2. An orthogonal matrix of n x m has elements of root
mean square 1 / sqrt(max(n, m)). The factor makes it 0.2, as AdamW's updates have, so that AdamW's learning rate and
decay serve (Liu et al. 2025, Moonlight, arXiv:2502.16982; Kimi K2, arXiv:2507.20534). optax.contrib.muon has this
factor as `consistent_rms=0.2`; by default it has Jordan's sqrt(max(1, m/n)). It also divides M and G by 1 - 0.95^t
before Nesterov's sum, which the published code does not.

**Matrices.** A layer has one matrix of each weight. An expert is a matrix, and so is a head of the projections of
queries, keys and values (GLM-5, arXiv:2602.15763, "Muon Split"). The output projection is one matrix for all heads. The
projection to per-layer embeddings has a matrix for each layer.

**Layout.** Momentum is sharded as the weight is, but a product X X^T needs all of X. Of S matrices in a stack, sharded
over d devices, each device gathers S/d in full, orthogonalises them, and returns the shards:

    [S, r, c]  all-to-all  [S/d, R, C]  Newton-Schulz  [S/d, R, C]  all-to-all  [S, r, c]

A stack whose size is no multiple of d is padded with zeros. Weights of equal shape are one stack, such as gate, up and
the transposed down. Over an axis that replicates a weight, each device orthogonalises a share of the stack, and the
results are all-gathered. Heads need no message over `tensor`, nor experts over `expert`, since these axes shard the
stack. Experts need none over `fsdp` if each of its devices has full experts; with more devices than experts, only those
that share an expert exchange its shards.

**Cost** for P parameters in matrices of n x m, n <= m, on d devices:

    FLOPs      5 (4 n + 2 n^2/m) P           all devices together, without padding
    messages   4 P/d bytes in bfloat16       half of them before, half after
    memory     4 bytes a parameter of state, where AdamW has 8; 4 P/d bytes for X and the result, while it runs

The alternative shards the iteration: each device multiplies its columns, and A is summed over devices five times. A
device then receives 10 n^2 elements a matrix instead of 2 n m/d. For Llama 3.1 70B on 128 devices (n = 8,192,
m = 28,672) that is 180 times as much. So only the all-to-all is here.

**On TPU7x.** A step of Llama 3.1 70B on 128 devices, with 256 sequences, takes 10.76 s instead of 10.60: 1.5%. The
update has 117 ms of matmuls and 26 ms of all-to-alls. These run on the TensorCore, so nothing hides them (compiled). A
step of Llama 3.1 8B on 8 devices, with a sequence each, takes 1.09 s instead of 0.94 (compiled).

**Left out.** If neither the devices of `fsdp` are a multiple of the experts nor the reverse, all experts of a layer are
gathered together, and some devices wait. All heads as one matrix. Symmetric products at half the FLOPs.
"""

import dataclasses
import itertools
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import anatomy
import collectives
import parameters
import sharding
from config import Config

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2  # root mean square of an update before the learning rate, as AdamW's usually is
EPSILON = 1e-8
ELEMENTS = 2**24  # of matrices that are orthogonalised at once: small ones together, large ones one after the other


class State(NamedTuple):
    """The optimizer's state: the number of updates and the moments of the parameters."""

    count: jax.Array  # int32
    mu: parameters.Params  # the first moments of all parameters, in `mu_dtype`
    nu: parameters.Params  # the second moments, in float32; None for matrices


def weights_of(config: Config) -> parameters.Params:
    """The row of anatomy.WEIGHTS of each weight that Muon orthogonalises; None for the others."""
    return parameters.tree(config, lambda _, __, weight: weight if weight.part in anatomy.MUON_PARTS else None)


def muon(learning_rate: optax.Schedule, config: Config, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """Muon for the matrices of a model, and AdamW for its other parameters.

    Args:
      learning_rate: the rate by the number of updates done, for both.
      config: the model; `beta1` and `beta2` of AdamW; `mu_dtype` and `weight_decay` of both. The orthogonalisation is
        in `config.dtype`.
      mesh: the mesh on which the parameters have the layout of parameters.param_specs. None is one device.
    """
    weights, decays = weights_of(config), parameters.is_matrix(config)
    mu_dtype, beta1, beta2 = jnp.dtype(config.mu_dtype), config.beta1, config.beta2

    def init(params) -> State:
        mu = jax.tree.map(lambda w: jnp.zeros_like(w, mu_dtype), params)
        nu = jax.tree.map(lambda w, matrix: None if matrix else jnp.zeros_like(w), params, weights)
        return State(jnp.int32(0), mu, nu)

    def update(grads, state: State, params):
        count, rate = state.count + 1, learning_rate(state.count)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)  # they may be in bfloat16
        blend = lambda beta, old, new: beta * old.astype(jnp.float32) + (1 - beta) * new
        mu = jax.tree.map(lambda g, m, matrix: blend(MOMENTUM if matrix else beta1, m, g), grads, state.mu, weights)
        nu = jax.tree.map(lambda g, v: None if v is None else blend(beta2, v, g**2), grads, state.nu)
        ahead = jax.tree.map(lambda g, m, matrix: blend(MOMENTUM, m, g) if matrix else None, grads, mu, weights)
        ahead = orthogonalise_tree(ahead, weights, config, mesh)

        def step(w, m, v, x, decay):
            if v is not None:
                x = m / (1 - beta1**count) / (jnp.sqrt(v / (1 - beta2**count)) + EPSILON)
            return -rate * (x + decay * config.weight_decay * w)

        updates = jax.tree.map(step, params, mu, nu, ahead, decays)
        return updates, State(count, jax.tree.map(lambda m: m.astype(mu_dtype), mu), nu)

    return optax.GradientTransformation(init, update)


def newton_schulz(x: jax.Array) -> jax.Array:
    """A matrix with the singular vectors of x [..., rows, columns], and singular values of about 1."""
    a, b, c = COEFFICIENTS
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), (-2, -1), keepdims=True))
    x = (x / (norm + EPSILON)).astype(x.dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x  # X X^T is then the smaller product
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def orthogonalise(stack: jax.Array) -> jax.Array:
    """`newton_schulz` of the matrices of a stack [S, rows, columns], scaled so that elements have the size RMS."""
    *_, rows, columns = stack.shape
    at_once = min(len(stack), max(1, ELEMENTS // (rows * columns)))
    return RMS * math.sqrt(max(rows, columns)) * lax.map(newton_schulz, stack, batch_size=at_once)


# -- the matrices of a weight


def to_matrices(w: jax.Array, weight: anatomy.Weight, model_dim: int) -> jax.Array:
    """A weight, or a shard of it, as a stack of matrices [S, rows, columns].

    Experts are [S, E*D, columns] if the shard does not have full experts, one matrix below the other.
    """
    w = w.reshape(_with_layers(weight, w.shape))
    if weight.by_expert:
        return w.reshape(-1, model_dim, w.shape[-1]) if w.shape[1] % model_dim == 0 else w
    num_rows = _row_dims(weight)
    if w.ndim == 4 and num_rows == 1:  # [L, D, N, H]: a matrix for each head
        w = jnp.moveaxis(w, 2, 1)
        return w.reshape(-1, *w.shape[2:])
    return w.reshape(w.shape[0], -1, w.shape[-1])


def from_matrices(stack: jax.Array, weight: anatomy.Weight, shape: tuple[int, ...]) -> jax.Array:
    """The reverse of `to_matrices`, for a weight or a shard of this shape."""
    full = _with_layers(weight, shape)
    if len(full) == 4 and _row_dims(weight) == 1 and not weight.by_expert:
        layers, rows, heads, columns = full
        stack = jnp.moveaxis(stack.reshape(layers, heads, rows, columns), 1, 2)
    return stack.reshape(shape)


def _with_layers(weight: anatomy.Weight, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the dim of layers, which is 1 for a weight outside of them."""
    return shape if weight.dims[0] == "L" else (1, *shape)


def _row_dims(weight: anatomy.Weight) -> int:
    """The number of dims that a weight's matmul contracts, which are the rows of its matrix."""
    return len(weight.start.replace("L", ""))


# -- on a mesh


class Layout(NamedTuple):
    """How the matrices of a weight are sharded. The matrices of weights with one layout are one stack."""

    shape: tuple[int, int]  # rows and columns of a gathered matrix
    experts: int  # so many of them are gathered together, one below the other
    groups: int  # of consecutive devices that share matrices; 1 is all devices along `rows` and `columns`
    rows: tuple[str, ...]  # the mesh axes that shard the rows, outermost first
    columns: tuple[str, ...]  # and the columns
    axes: frozenset[str]  # all axes that shard the weight


def orthogonalise_tree(tree, weights, config: Config, mesh: Mesh | None = None):
    """`orthogonalise` of the matrices in a tree of global arrays, in float32; None in the tree stays None.

    Args:
      weights: `weights_of` the model.
      mesh: as in `muon`.
    """
    arrays, treedef = jax.tree.flatten(tree)
    table = jax.tree.leaves(weights)
    shapes = parameters.param_shapes(dataclasses.replace(config, dim_multiple=1))
    shapes = jax.tree.leaves(jax.tree.map(lambda shape, w: None if w is None else shape, shapes, weights))
    specs = jax.tree.map(lambda spec, w: None if w is None else spec, parameters.param_specs(config), weights)
    specs = jax.tree.leaves(specs)
    per_device = partial(orthogonalise_shards, table=table, shapes=shapes, specs=specs, sizes={}, config=config)
    if mesh is not None:
        per_device = partial(per_device, sizes=dict(mesh.shape))
        per_device = jax.shard_map(per_device, mesh=mesh, in_specs=(specs,), out_specs=specs)
    return treedef.unflatten(per_device(arrays))


def orthogonalise_shards(shards, table, shapes, specs, sizes: dict[str, int], config: Config) -> list[jax.Array]:
    """`orthogonalise` of the matrices of weights, as shards. Per-device code; with no `sizes` that of one device.

    Args:
      shards: this device's shard of each weight.
      table: the row of anatomy.WEIGHTS of each.
      shapes: the global shape of each, without the zeros that `config.dim_multiple` adds.
      specs: the layout of each.
      sizes: the sizes of the mesh axes.
    """
    stacks, numbers = {}, {}  # by layout; numbers of the weights, whether they are transposed, and the factor of RMS
    D = anatomy.sizes(config)["D"]
    for number, (shard, weight, model, spec) in enumerate(zip(shards, table, shapes, specs, strict=True)):
        stack = to_matrices(shard.astype(config.dtype), weight, D)
        layout = layout_of(stack, weight, spec, sizes, config)
        factor = math.sqrt(max(_matrix(model.shape, weight, config.model_dim)) / max(layout.shape))
        if is_tall := layout.experts * layout.groups == 1 and layout.shape[0] > layout.shape[1]:
            layout = layout._replace(shape=layout.shape[::-1], rows=layout.columns, columns=layout.rows)
        stacks.setdefault(layout, []).append(stack.mT if is_tall else stack)
        numbers.setdefault(layout, []).append((number, is_tall, factor))
    results = [None] * len(shards)
    for layout, parts in stacks.items():
        done = _orthogonalise_stack(jnp.concatenate(parts), layout, sizes, config)
        for part, (number, is_tall, factor) in zip(jnp.split(done, _ends(parts)), numbers[layout], strict=True):
            part = part.mT if is_tall else part
            results[number] = factor * from_matrices(part, table[number], shards[number].shape).astype(jnp.float32)
    return results


def _matrix(shape: tuple[int, ...], weight: anatomy.Weight, model_dim: int) -> tuple[int, int]:
    """Rows and columns of the matrices of a weight of this shape."""
    _, *dims = _with_layers(weight, shape)
    return model_dim if weight.by_expert else math.prod(dims[: _row_dims(weight)]), dims[-1]


def _ends(parts: list[jax.Array]) -> list[int]:
    """Where each part but the last ends in the concatenated stack."""
    return list(itertools.accumulate(len(part) for part in parts))[:-1]


def layout_of(stack: jax.Array, weight: anatomy.Weight, spec: PartitionSpec, sizes, config: Config) -> Layout:
    """The layout of the matrices of a weight, from the stack of this device's shards. Arguments: those above."""
    entries = spec[1:] if weight.dims[0] == "L" else spec
    axes_of = lambda entries: tuple(axis for axis in sharding.axes_of(entries) if sizes.get(axis, 1) > 1)
    rows, columns, experts, groups = axes_of(entries[: _row_dims(weight)]), axes_of(entries[-1:]), 1, 1
    if weight.by_expert:
        rows, local = tuple(axis for axis in axes_of(entries[:1]) if axis != "expert"), config.num_experts
        local //= sizes.get("expert", 1)
        if stack.shape[1] == anatomy.sizes(config)["D"]:
            rows = ()  # full experts
        elif _devices(rows, sizes) % local == 0:
            groups = local  # each device has a part of one expert
        else:
            experts = local
    num_rows = stack.shape[1] * _devices(rows, sizes) // experts // groups
    shape = num_rows, stack.shape[2] * _devices(columns, sizes)
    return Layout(shape, experts, groups, rows, columns, frozenset(sharding.axes_of(spec)))


def _devices(axes: tuple[str, ...], sizes: dict[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _orthogonalise_stack(stack: jax.Array, layout: Layout, sizes: dict[str, int], config: Config) -> jax.Array:
    """`orthogonalise` of a stack of shards [S, r, c], each matrix on one device of those that have it."""
    holders = layout.rows + layout.columns
    copies = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in layout.axes)
    S, n = len(stack), _devices(holders, sizes) // layout.groups
    stack = jnp.pad(stack, ((0, -S % (n * _devices(copies, sizes))), (0, 0), (0, 0)))
    if copies:
        shares = stack.reshape(_devices(copies, sizes), -1, *stack.shape[1:])
        stack = lax.dynamic_index_in_dim(shares, lax.axis_index(copies), keepdims=False)
    full = _gather(stack, layout, sizes, config)
    done = orthogonalise(full.reshape(-1, *layout.shape)).reshape(full.shape)
    stack = _scatter(done, layout, sizes, config)
    if copies:
        stack = lax.all_gather(stack, copies, tiled=True, to="invarying")
    return stack[:S]


def _gather(stack: jax.Array, layout: Layout, sizes, config: Config) -> jax.Array:
    """Some full matrices of a stack for each device that has shards of it: [S, r, c] -> [s, R, C]."""
    holders = layout.rows + layout.columns
    if not holders:
        return stack
    S, r, c = stack.shape
    blocks = _all_to_all(stack, holders, layout.groups, config)
    blocks = blocks.reshape(-1, _devices(layout.columns, sizes), S * layout.groups // _devices(holders, sizes), r, c)
    return blocks.transpose(2, 0, 3, 1, 4).reshape(blocks.shape[2], blocks.shape[0] * r, blocks.shape[1] * c)


def _scatter(full: jax.Array, layout: Layout, sizes, config: Config) -> jax.Array:
    """The reverse of `_gather`: [s, R, C] -> [S, r, c]."""
    holders = layout.rows + layout.columns
    if not holders:
        return full
    m, n = _devices(layout.rows, sizes) // layout.groups, _devices(layout.columns, sizes)
    blocks = full.reshape(len(full), m, full.shape[1] // m, n, full.shape[2] // n).transpose(1, 3, 0, 2, 4)
    blocks = blocks.reshape(-1, *blocks.shape[3:])
    return _all_to_all(blocks, holders, layout.groups, config)


def _all_to_all(blocks: jax.Array, axes: tuple[str, ...], groups: int, config: Config) -> jax.Array:
    """Exchanges blocks along the first dim among the devices of each of `groups` groups of consecutive devices."""
    # Without the barrier XLA:CPU gives blocks layouts of their own, and then refuses to exchange them.
    blocks = lax.optimization_barrier(blocks)
    if groups == 1:
        return collectives.all_to_all(blocks, axes, split_dim=0, concat_dim=0, algorithm=config.collectives)
    members = np.arange(lax.axis_size(axes)).reshape(groups, -1).tolist()
    return lax.all_to_all(blocks, axes, 0, 0, axis_index_groups=members, tiled=True)
