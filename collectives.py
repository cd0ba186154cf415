"""Collectives from scratch: every one is built of messages between neighbours on a ring.

**Idea.** A pod is a torus: along each axis, each chip has a link to the next and one to the previous chip. A link
carries W bytes/s in each direction, and a message takes t_hop (about 1e-6 s) to arrive. One primitive makes all
collectives here: `lax.ppermute` by one place around the ring of a mesh axis.

**All-gather and reduce-scatter.** In an all-gather everybody has one block and wants all: each step passes on the block
that the last one brought, and after N-1 steps all blocks have been everywhere. In a reduce-scatter everybody has N
summands and wants one sum: a sum starts at the device after the one that wants it, and travels around the ring, each
device adding its own. The two are transposes of each other, so either is the other's gradient, and are written so
below. An all-reduce is a reduce-scatter, then an all-gather.

    reduce-scatter   {U_x} A[I, J] -> A[I_x, J]        all-gather   A[I_x, J] -> A[I, J]

**Both directions.** A link can carry a message each way at once, so blocks can take the shorter way around, in half the
steps (`ring_bidirectional`): half of the N-1 others come from behind and half from ahead; for even N, N/2 and N/2-1.

**A torus.** Over several axes a collective goes axis by axis, each on the result of the one before. Along y, then x:

    reduce-scatter along y, on V bytes    all-reduce along x, on V/Y    all-gather along y

(Kumar & Chen, "Exploring Limits of ML Training on Google TPUs", Hot Chips 2020: "payload in phase 1 is scaled down by
the size of the columns"). Where the last axis is a slow network between slices this is the hierarchical all-reduce:
only 1/Y of the bytes cross. Only one axis works at a time, unless the payload is split into as many chunks as there are
axes, which take the axes in rotated orders (`spread=True`).

**All-to-all.** Each device has a block for each other one. All blocks that go in one direction travel as a bundle,
which loses the block that has arrived at each stop.

**Collective matmuls.** A matmul that needs a gathered operand can start with the block that has arrived, while the next
one travels. A matmul whose result is to be scattered can send a sum while it multiplies the next block (Wang et al.
2023, "Overlap communication with dependent computation via decomposition", ASPLOS; Rafi Witten's High Performance LLMs,
session 4). Products that are summed on the way are rounded at each step. In bfloat16 on 8 devices the error (root mean
square, against float64) is 2.4 times that of one matmul, 2.2 times in a `matmul_reduce_scatter` in both directions, and
no larger where rows are gathered, whose products are not summed (measured on simulated devices, 64 x 8192 . 8192 x 256,
standard normal; the same within 0.1 for 1024 and 4096 summands).

**Cost** on an axis of N that wraps around; h hops are N-1, or N//2 in both directions. V is the bytes of the gathered
array (of the payload, for an all-reduce). B is the bytes that a device holds before an all-to-all, or sends as a halo
on the wider side. Latency or bandwidth bounds a time (https://jax-ml.github.io/scaling-book/sharding, whose W_ICI is
2W):

                        steps    bytes through a link, one way    time                              many devices, 2 ways
    all-gather            h        h V/N                          max(h t_hop, h V/(N W))           V/2W
    reduce-scatter        h        h V/N                          max(h t_hop, h V/(N W))           V/2W
    all-reduce           2h       2h V/N                          2 max(h t_hop, h V/(N W))         V/W
    all-to-all            h        h(h+1)/2 B/N                   max(h t_hop, h(h+1)/2 B/(N W))    B N/8W
    halo                  1        B                              max(t_hop, B/W)                   B/W

predicted/interconnect.py computes these; tests compare both with what the programs below permute. Phases add up.

**On TPU7x** (compiled: `python benchmarks/collectives.py`) XLA's own all-gather and reduce-scatter run on the
SparseCores over all links of up to three torus axes (sums over three: predicted/workload.py). The TensorCore starts the
permutes here, and they use the links of one axis. So a run takes XLA's by default, and these are here to be read. Only
the collective matmuls overlap where nothing else does: within one tensor-parallel block. Hence two defaults:
`algorithm` is "ring" in this file, since whoever calls these by name wants them, and "xla" in `fsdp.py` and the Config,
since whoever trains wants the fastest.

XLA:TPU splits an array into blocks without a copy, but for matrices whose blocks are not full registers of 8 rows. It
pads these and sums them on the TensorCore, which does nothing else meanwhile. With the blocks in a dim of their own the
sum runs on the SparseCores (`_xla_scatter`; tests/test_benchmarks.py). Four gradients [336, 21504] of 8,192 tokens, in
8 blocks, take 1.76 ms with their matmuls in place of 2.72, by the schedule that libtpu 0.0.50 compiles.

**Left out.** Trees for broadcast, scatter and gather from one root: training has no root (state is created in place, in
shards). `jax.vmap` over the rings, and forward-mode derivatives of the matmuls. Rings on a line without wrap-around
links work, but the last message travels back along the full line, so the second direction gains nothing. A mesh axis
over several axes of the torus is one ring in the order of its devices; some of its hops cross two links. A program
grows with its rings: one of 128 devices is 127 messages a gather, where a torus of 4 x 4 x 4 x 2 has 10.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

ALGORITHMS = ("xla", "ring", "ring_bidirectional")


# -- the ring


def _send(block, axis: str, direction: int):
    """Sends `block` to the next (+1) or previous (-1) neighbour, and returns that of the other one."""
    n = lax.axis_size(axis)
    return lax.ppermute(block, axis, [(i, (i + direction) % n) for i in range(n)])


def _hops(n: int, algorithm: str) -> tuple[int, int]:
    """Returns how many hops away the furthest block of a ring of n comes from: from behind, and from ahead."""
    return (n // 2, (n - 1) // 2) if algorithm == "ring_bidirectional" else (n - 1, 0)


def _arrivals(x: jax.Array, axis: str, algorithm: str) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yields (device, its x) for every device of the ring: its own first, then as they arrive, the nearest first."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    behind, ahead = _hops(n, algorithm)
    yield me, x
    from_behind = from_ahead = x
    for hop in range(1, behind + 1):
        from_behind = _send(from_behind, axis, +1)
        yield (me - hop) % n, from_behind
        if hop <= ahead:
            from_ahead = _send(from_ahead, axis, -1)
            yield (me + hop) % n, from_ahead


def _ring_sum(summand: Callable[[jax.Array], jax.Array], axis: str, algorithm: str) -> jax.Array:
    """Returns the sum over the devices of their summand(me); each device calls it once for every device of the ring.

    The device furthest from the sum's owner starts it, and each device on the way adds its summand.
    """
    n, me = lax.axis_size(axis), lax.axis_index(axis)

    def arriving(hops, direction):
        total = summand((me + direction * hops) % n)
        for left in range(hops - 1, 0, -1):
            total = _send(total, axis, direction) + summand((me + direction * left) % n)
        return _send(total, axis, direction)

    arrived = [arriving(hops, direction) for hops, direction in zip(_hops(n, algorithm), (+1, -1), strict=True) if hops]
    return sum(arrived, start=summand(me))


# -- gather, scatter, reduce


def all_gather(
    x: jax.Array, axis: str | tuple[str, ...], *, dim: int = 0, tiled: bool = True, algorithm: str = "ring"
) -> jax.Array:
    """The shards of all devices of a mesh axis in their order, along `dim`: A[I_x] -> A[I].

    Per-device code, as all of this file. Bit-equal to `lax.all_gather`. Its transpose is `reduce_scatter`.

    Args:
      axis: a mesh axis, or several, outermost first; with several, rings run along the last one first.
      tiled: lengthen `dim`; otherwise stack along a new one.
      algorithm: one of ALGORITHMS; "xla" is `lax.all_gather`, with `_xla_scatter` as transpose for odd rows.

    Cost: h steps, h V/N bytes through a link, V the bytes of the result.

    Raises:
      ValueError: an axis that is not in the mesh, a dim that x does not have, an unknown algorithm.
    """
    names = _check(x, axis, dim, algorithm, new_dim=not tiled)
    if lax.axis_size(names) == 1:  # otherwise XLA:CPU would change the layout of x, and of what is computed from it
        return vary_alike(x if tiled else jnp.expand_dims(x, dim), names)
    if algorithm == "xla":
        gather = partial(lax.all_gather, axis_name=names, axis=dim, tiled=tiled)
        if not tiled or _fills_registers(x.shape, x.shape[dim]):
            return gather(x)
        return _with_transpose(gather, partial(_xla_scatter, names=names, dim=dim), vary_alike(x, names))
    x = vary_alike(x if tiled else jnp.expand_dims(x, dim), names)
    for name in reversed(names):
        gather, scatter = (partial(f, axis=name, dim=dim, algorithm=algorithm) for f in (_ring_gather, _ring_scatter))
        x = _with_transpose(gather, scatter, x)
    return x


def reduce_scatter(
    x: jax.Array, axis: str | tuple[str, ...], *, dim: int = 0, tiled: bool = True, algorithm: str = "ring"
) -> jax.Array:
    """Sums over the devices of a mesh axis; each device gets its block along `dim`: {U_x} A[I] -> A[I_x].

    `lax.psum_scatter`, but for the order of the summation: device d's block is summed in x's dtype from the summand of
    device d+1 on, around the ring to d. In both directions, each side is summed so: (own + behind) + ahead.
    Its transpose is `all_gather`.

    Args: as `all_gather`; with several axes, rings run along the first one first. Not tiled: `dim`, of N, is dropped.

    Cost: h steps, h V/N bytes through a link, V the bytes of x.

    Raises:
      ValueError: as `all_gather`, and where `dim` does not split into N blocks.
    """
    names = _check(x, axis, dim, algorithm, split=True, tiled=tiled)
    if x.dtype == bool and algorithm != "xla":
        raise ValueError("bools have no sum: cast them to an integer type first")
    if lax.axis_size(names) == 1:
        return vary_alike(x if tiled else jnp.squeeze(x, dim), names)
    if algorithm == "xla":
        if not tiled or _fills_registers(x.shape, x.shape[dim] // lax.axis_size(names)):
            return lax.psum_scatter(x, names, scatter_dimension=dim, tiled=tiled)
        gather = partial(lax.all_gather, axis_name=names, axis=dim, tiled=True)
        return _with_transpose(partial(_xla_scatter, names=names, dim=dim), gather, vary_alike(x, names))
    x = vary_alike(x, names)
    for name in names:
        gather, scatter = (partial(f, axis=name, dim=dim, algorithm=algorithm) for f in (_ring_gather, _ring_scatter))
        x = _with_transpose(scatter, gather, x)
    return x if tiled else jnp.squeeze(x, dim)


def _fills_registers(shape: tuple[int, ...], block: int) -> bool:
    """Whether XLA:TPU splits an array into such blocks without a copy: a matrix only into full registers of 8 rows."""
    return len(shape) != 2 or block % 8 == 0


def _xla_scatter(x, *, names, dim):
    """`lax.psum_scatter` of blocks in a dim of their own, which XLA:TPU sums on the SparseCores (head of this file)."""
    n = lax.axis_size(names)
    blocks = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return lax.psum_scatter(blocks, names, scatter_dimension=dim, tiled=False)


def _ring_gather(x, *, axis, dim, algorithm):
    size = x.shape[dim]
    gathered = lax.empty((*x.shape[:dim], size * lax.axis_size(axis), *x.shape[dim + 1 :]), x.dtype)
    for device, block in _arrivals(x, axis, algorithm):
        gathered = lax.dynamic_update_slice_in_dim(gathered, block, device * size, dim)
    return gathered


def _ring_scatter(x, *, axis, dim, algorithm):
    return _ring_sum(partial(_block, x, axis=axis, dim=dim), axis, algorithm)


def _block(x, device, *, axis, dim):
    """The device's block of x."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, device * size, size, dim)


def _with_transpose(forward, backward, x):
    """forward(x), whose transpose is `backward`. JAX itself would transpose each slice to a block padded with zeros."""
    return linear_call(lambda _, x: forward(x), lambda _, ct: backward(ct), (), x)


def all_reduce(
    x: jax.Array, axis: str | tuple[str, ...], *, algorithm: str = "ring", spread: bool = False, to: str = "varying"
) -> jax.Array:
    """Sums over the devices of a mesh axis, for each of them: {U_x} A -> A. `lax.psum`, but for the order of summation.

    Reduce-scatter, then all-gather. Over several axes it goes in phases: reduce-scatter along the first, all-reduce
    along the others on the result, all-gather along the first. So name the fastest axis first, and a network between
    slices last. x is split along the first dim that divides, or else flattened and padded with zeros.

    Args:
      spread: split the payload into a chunk for each axis; each chunk starts with another axis, so all links work.
      to: the type of the result. "varying": it may differ between devices (it does not). "invarying": it is the same on
        all, as from `lax.psum`. Only XLA's own all-gather has that type, so it then does the second half.

    Cost, to="varying": 2h steps, 2h V/N bytes through a link of a single axis. Over axes n1, n2, ...: 2h1 V/n1,
    2h2 V/(n1 n2), ... With "invarying" only the first half, a `reduce_scatter`, costs this; the second is one
    all-gather of XLA's over all axes at once, on the links that it chooses.

    Raises:
      ValueError: an axis that is not in the mesh, an unknown algorithm.
    """
    names = _check(x, axis, None, algorithm)
    if algorithm == "xla" or lax.axis_size(names) == 1:
        x = lax.psum(x, names)
        return x if to == "invarying" else lax.pcast(x, names, to=to)
    x = vary_alike(x, names)
    rings = tuple(name for name in names if lax.axis_size(name) > 1)
    num_chunks = len(rings) if spread else 1
    blocks = num_chunks * lax.axis_size(names)
    dim = next((dim for dim, size in enumerate(x.shape) if size % blocks == 0), None)
    if dim is None:
        flat = jnp.pad(x.reshape(-1), (0, -x.size % blocks))
        return all_reduce(flat, names, algorithm=algorithm, spread=spread, to=to)[: x.size].reshape(x.shape)
    summed = []
    for number, chunk in enumerate(jnp.split(x, num_chunks, dim)):
        order = rings[number:] + rings[:number]
        chunk = reduce_scatter(chunk, order, dim=dim, algorithm=algorithm)
        if to == "varying":
            summed.append(all_gather(chunk, order, dim=dim, algorithm=algorithm))
        else:
            summed.append(lax.all_gather(chunk, order, axis=dim, tiled=True, to=to))
    x = jnp.concatenate(summed, dim)
    return x if to == "varying" else lax.psum(x, tuple(name for name in names if name not in rings))


# -- all-to-all


def all_to_all(
    x: jax.Array, axis: str | tuple[str, ...], *, split_dim: int, concat_dim: int, algorithm: str = "ring"
) -> jax.Array:
    """Sends block i of `split_dim` to device i; joins what arrives along `concat_dim`: A[I_x, J] -> A[I, J_x].

    Bit-equal to `lax.all_to_all(..., tiled=True)`. Its transpose is the all-to-all with the dims exchanged. Over
    several axes, outermost first, it goes axis by axis: a block reaches the right column, then the right row.

    Cost: h steps, B/N h(h+1)/2 bytes through a link, B the bytes of x.

    Raises:
      ValueError: as `all_gather`, and where `split_dim` does not split into N blocks.
    """
    names = _check(x, axis, split_dim, algorithm, split=True)
    _check(x, axis, concat_dim, algorithm)
    if algorithm == "xla":
        return lax.all_to_all(x, names, split_dim, concat_dim, tiled=True)
    x = vary_alike(x, names)
    n, sizes = lax.axis_size(names), [lax.axis_size(name) for name in names]
    block = list(x.shape)
    block[split_dim] //= n
    blocks = x.reshape(*x.shape[:split_dim], n, block[split_dim], *x.shape[split_dim + 1 :])
    blocks = jnp.moveaxis(blocks, split_dim, 0).reshape(*sizes, *block)
    for dim in reversed(range(len(names))):
        exchange = partial(_exchange, axis=names[dim], algorithm=algorithm)
        blocks = jnp.moveaxis(_with_transpose(exchange, exchange, jnp.moveaxis(blocks, dim, 0)), 0, dim)
    block[concat_dim] *= n
    return jnp.moveaxis(blocks.reshape(n, *blocks.shape[len(names) :]), 0, concat_dim).reshape(block)


def _exchange(blocks, *, axis, algorithm):
    """Returns blocks of which the i-th is from device i, given blocks of which the i-th is for device i."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    take = lambda device: lax.dynamic_slice_in_dim(blocks, device % n, 1, 0)
    put = lambda arrived, block, device: lax.dynamic_update_slice_in_dim(arrived, block, device % n, 0)
    arrived = put(lax.empty(blocks.shape, blocks.dtype), take(me), me)
    for hops, direction in zip(_hops(n, algorithm), (+1, -1), strict=True):
        bundle = [take(me + direction * hop) for hop in range(1, hops + 1)]
        bundle = jnp.concatenate(bundle) if bundle else None
        for hop in range(1, hops + 1):
            bundle = _send(bundle, axis, direction)
            arrived = put(arrived, bundle[:1], me - direction * hop)
            bundle = bundle[1:]
    return arrived


def ragged_all_to_all(
    x: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    axis: str | tuple[str, ...],
    *,
    block_rows: int | None = None,
    algorithm: str = "ring",
) -> tuple[jax.Array, jax.Array]:
    """Sends rows of x, any number to each device, as expert parallelism does with tokens.

    Device i gets x[input_offsets[i]:][:send_sizes[i]], and writes it to output[output_offsets[i]:]; or k such slices,
    those from i*k on. As `lax.ragged_all_to_all`, which the CPU does not have; here every slice is padded to
    `block_rows`.

    Args:
      x, output: [rows, ...] of one dtype; rows of `output` that nobody writes are returned as they are.
      input_offsets, send_sizes, output_offsets: int32 [N * k]. `output_offsets` are in the receiver's output. Two
        devices must not send to the same rows; this is not checked.
      block_rows: the most rows of one slice; default all rows of x.

    Returns:
      output, and the number of this device's rows that were dropped: those past `block_rows`, or past the end of the
      receiver's output. int32.

    Cost: 2h steps, in two exchanges: an `all_to_all` of 8 bytes a slice for offsets and sizes, then one of
    N * k * block_rows rows.

    Raises:
      ValueError: as `all_gather`, and where the devices do not have equally many sizes and offsets.
    """
    names = _check(x, axis, 0, algorithm)
    n = lax.axis_size(names)
    for array in (input_offsets, send_sizes, output_offsets):
        if array.ndim != 1 or array.shape != input_offsets.shape or array.size % n or not array.size:
            raise ValueError(
                f"offsets and sizes of shape {array.shape} must be alike, and as many for each of the {n} devices on "
                f"{_show(names)}"
            )
    if x.shape[1:] != output.shape[1:] or x.dtype != output.dtype:
        raise ValueError(f"rows of x are {x.dtype}{x.shape[1:]}, those of output {output.dtype}{output.shape[1:]}")
    if block_rows is not None and block_rows < 0:
        raise ValueError(f"block_rows={block_rows} must be 0 or more")
    rows = jnp.arange(x.shape[0] if block_rows is None else block_rows)
    exchange = partial(all_to_all, axis=names, split_dim=0, concat_dim=0, algorithm=algorithm)

    sizes = jnp.minimum(send_sizes, rows.size)
    offset_i, size_i = exchange(jnp.stack([output_offsets, sizes], 1)).T
    blocks = jnp.take(x, (input_offsets[:, None] + rows).reshape(-1), axis=0, mode="clip")
    target = jnp.where(rows < size_i[:, None], offset_i[:, None] + rows, output.shape[0])  # past the end: dropped
    output = output.at[target.reshape(-1)].set(exchange(blocks), mode="drop")
    delivered = jnp.clip(output.shape[0] - output_offsets, 0, sizes)
    return output, jnp.sum(send_sizes - delivered)


# -- halo


def halo_exchange(x: jax.Array, axis: str, *, dim: int, before: int, after: int, periodic: bool = False) -> jax.Array:
    """Returns the shard with the edges of its neighbours, for a window that slides over several shards.

    For two dims exchange one, then the other on the result: that includes the corners.

    Args:
      before, after: how many rows of `dim` from the previous and from the next device; they may differ.
      periodic: the last device is the first one's previous. Otherwise rows beyond the ends are zeros.

    Returns: x with `dim` longer by before + after.

    Cost: 1 step, max(before, after) rows through a link: the two go opposite ways (but on a periodic axis of 2).

    Raises:
      ValueError: as `all_gather`, and for a halo wider than the shard, which would need the neighbour's neighbour.
    """
    _check(x, axis, dim, "ring", one_axis=True)
    size, n = x.shape[dim], lax.axis_size(axis)
    if not (0 <= before <= size and 0 <= after <= size):
        raise ValueError(
            f"a halo of {before} before and {after} after does not fit a shard of {size} along dim {dim}: it must be "
            f"between 0 and {size}; shard the dim over fewer than the {n} devices of {axis!r}"
        )
    neighbours = lambda step: [(i, (i + step) % n) for i in range(n) if periodic or 0 <= i + step < n]
    take = lambda start, stop: lax.slice_in_dim(x, start, stop, axis=dim)
    pieces = [x]
    if before:
        pieces = [lax.ppermute(take(size - before, size), axis, neighbours(+1)), *pieces]
    if after:
        pieces = [*pieces, lax.ppermute(take(0, after), axis, neighbours(-1))]
    return jnp.concatenate(pieces, dim)


# -- collective matmuls


def all_gather_matmul(
    x: jax.Array, weights: tuple[jax.Array, ...], axis: str, *, dim: int, algorithm: str = "ring"
) -> tuple[jax.Array, ...]:
    """tensordot(all_gather(x, axis, dim=dim), w, 1) for each w, multiplying each block of x while the next one travels.

    A[.., J_x] . B[J, K..] if `dim` is the last one of x, which is contracted: products of blocks add up in x's dtype.
    A[I_x, .., J] . B[J, K..] if it is another: products of blocks are blocks of the product.

    In the backward pass the gradient of x is a `matmul_reduce_scatter`, and those of the weights are one matmul each
    with the gathered x, which is saved for it (under `jax.checkpoint`: gathered again).

    Args:
      x: a shard, [.., j].
      weights: arrays [J, ..], multiplied by the same x.
      algorithm: "ring", "ring_bidirectional", or "xla": gather all of it first, then multiply.

    Cost: as `all_gather`, hidden where a block's products take longer than its hop: 2*rows*K/C > bytes/W at C FLOP/s.

    Raises:
      ValueError: as `all_gather`, and where the contracted sizes differ.
    """
    _check(x, axis, dim, algorithm, one_axis=True)
    contracted = x.shape[-1] * (lax.axis_size(axis) if dim == x.ndim - 1 else 1)
    for w in weights:
        _check_dtypes(x, w)
        if w.shape[0] != contracted:
            raise ValueError(f"x gathered over {axis!r} has {contracted} columns, and a weight of shape {w.shape} rows")
    if algorithm == "xla":
        gathered = lax.all_gather(x, axis, axis=dim, tiled=True)
        return tuple(jnp.tensordot(gathered, w, 1) for w in weights)
    x, *weights = vary_alike((x, *weights), (axis,))
    return _all_gather_matmul(axis, dim, algorithm, x, tuple(weights))


def matmul_reduce_scatter(x: jax.Array, w: jax.Array, axis: str, *, dim: int, algorithm: str = "ring") -> jax.Array:
    """reduce_scatter(x . w, axis, dim=dim), sending each block of the product while the next one is multiplied.

    A[I.., J_x] . B[J_x, K] -> C[I.., K] {U_x}, scattered along K (`dim` is the last one of the product) or one of I.
    All dims of w but the last are contracted with the last ones of x. In the backward pass the gradient of x is an
    `all_gather_matmul`, and that of w a matmul with the gathered gradient.

    Cost: as `reduce_scatter`, hidden where a block's product takes longer than its hop.

    Raises:
      ValueError: as `all_gather`, and where the contracted sizes differ or the dim does not split into N blocks.
    """
    k = w.ndim - 1
    if x.shape[x.ndim - k :] != w.shape[:k]:
        raise ValueError(f"the last dims of x, {x.shape[x.ndim - k :]}, are not the first ones of w, {w.shape[:k]}")
    product = jax.ShapeDtypeStruct((*x.shape[: x.ndim - k], w.shape[-1]), x.dtype)
    _check(product, axis, dim, algorithm, split=True, one_axis=True)
    _check_dtypes(x, w)
    if algorithm == "xla":
        return lax.psum_scatter(jnp.tensordot(x, w, k), axis, scatter_dimension=dim, tiled=True)
    return _matmul_reduce_scatter(axis, dim, algorithm, *vary_alike((x, w), (axis,)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_gather_matmul(axis, dim, algorithm, x, weights):
    return _multiply_arriving(x, weights, axis, dim, algorithm)[0]


def _all_gather_matmul_forward(axis, dim, algorithm, x, weights):
    ys, gathered = _multiply_arriving(x, weights, axis, dim, algorithm)
    return ys, (gathered, weights)


def _all_gather_matmul_backward(axis, dim, algorithm, residuals, dys):
    gathered, weights = residuals
    dx = _multiply_departing(dys, [jnp.moveaxis(w, 0, -1) for w in weights], axis, dim, algorithm)
    return dx, tuple(_weight_gradient(gathered, dy, gathered.ndim - 1) for dy in dys)


_all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _matmul_reduce_scatter(axis, dim, algorithm, x, w):
    return _multiply_departing([x], [w], axis, dim, algorithm)


def _matmul_reduce_scatter_forward(axis, dim, algorithm, x, w):
    return _matmul_reduce_scatter(axis, dim, algorithm, x, w), (x, w)


def _matmul_reduce_scatter_backward(axis, dim, algorithm, residuals, dy):
    x, w = residuals
    (dx,), gathered_dy = _multiply_arriving(dy, [jnp.moveaxis(w, -1, 0)], axis, dim, algorithm)
    return dx, _weight_gradient(x, gathered_dy, dy.ndim - 1)


_matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


def _multiply_arriving(x, weights, axis, dim, algorithm):
    """Returns tensordot(gathered, w, 1) for each w, and gathered: x gathered along `dim`."""
    n, size, contracted = lax.axis_size(axis), x.shape[dim], dim == x.ndim - 1
    put = lambda array, block, device: lax.dynamic_update_slice_in_dim(array, block, device * size, dim)
    gathered = lax.empty((*x.shape[:dim], n * size, *x.shape[dim + 1 :]), x.dtype)
    if contracted:
        ys = [0] * len(weights)
    else:
        ys = [lax.empty((*gathered.shape[:-1], *w.shape[1:]), x.dtype) for w in weights]
    for device, block in _arrivals(x, axis, algorithm):
        gathered = put(gathered, block, device)
        for i, w in enumerate(weights):
            if contracted:
                rows = lax.dynamic_slice_in_dim(w, device * size, size, 0)
                ys[i] += jnp.tensordot(block, rows, 1)
            else:
                ys[i] = put(ys[i], jnp.tensordot(block, w, 1), device)
    return tuple(ys), gathered


def _multiply_departing(xs, weights, axis, dim, algorithm):
    """The sum of the x . w, contracting all dims of each w but its last, scattered along `dim` of the product."""

    def summand(device):
        total = 0
        for x, w in zip(xs, weights, strict=True):
            k = w.ndim - 1
            if dim == x.ndim - k:
                w = _block(w, device, axis=axis, dim=k)
            else:
                x = _block(x, device, axis=axis, dim=dim)
            total += jnp.tensordot(x, w, k)
        return total

    return _ring_sum(summand, axis, algorithm)


def _weight_gradient(x, dy, num_leading):
    leading = tuple(range(num_leading))
    return jnp.tensordot(x, dy, (leading, leading))


# -- types, order and checks


@jax.custom_vjp
def after(x: jax.Array, others: Any) -> jax.Array:
    """Returns x through an optimization barrier: what uses it waits for `others` (fsdp.py). Gradients do not."""
    return lax.optimization_barrier((x, others))[0]


after.defvjp(lambda x, others: (after(x, others), None), lambda _, dx: (dx, None))


@jax.custom_vjp
def gradient_after(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns x. Its gradient passes an optimization barrier: what uses that waits until `other` is recomputed."""
    return x


gradient_after.defvjp(lambda x, other: (x, other), lambda other, dx: (lax.optimization_barrier((dx, other))[0], None))


def vary_alike(tree, axes: Sequence[str] = ()):
    """Casts each array of the tree to vary over `axes` and over every mesh axis over which another array varies.

    A gradient must have the type of its argument, and what comes around a ring varies. The cast moves nothing; its
    transpose is a sum over the axes over which an array did not vary.
    """
    axes = set(axes).union(*(jax.typeof(a).mat.varying for a in jax.tree.leaves(tree)))

    def cast(a):
        missing = tuple(axes - set(jax.typeof(a).mat.varying))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(cast, tree)


def _check_dtypes(x, w):
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype} and a weight is {w.dtype}: cast one of them")


def _check(x, axis, dim, algorithm, *, split=False, tiled=True, new_dim=False, one_axis=False) -> tuple[str, ...]:
    """Returns the axes as a tuple. Raises ValueError, with the numbers, if they, `dim` or `algorithm` do not fit x."""
    if one_axis and not isinstance(axis, str):
        raise ValueError(f"axis={axis!r} must be the name of one mesh axis")
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    for name in names:
        if name not in sizes:
            raise ValueError(f"there is no axis {name!r} in the mesh; it has {_show(sizes) or 'none'}")
    if len(set(names)) != len(names) or not names:
        raise ValueError(f"axis={axis!r} must name each axis once, and at least one")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    last = x.ndim - (0 if new_dim else 1)
    if dim is not None and not 0 <= dim <= last:
        raise ValueError(f"dim={dim} of an array of shape {x.shape} must be between 0 and {last}")
    if split:
        n = lax.axis_size(names)
        if x.shape[dim] % n or not (tiled or x.shape[dim] == n):
            rule = f"a multiple of {n}" if tiled else str(n)
            raise ValueError(f"dim {dim} of shape {x.shape} must be {rule}, the devices on {_show(names)}")
    return names


def _show(names) -> str:
    sizes = jax.sharding.get_abstract_mesh().shape
    return ", ".join(f"{name}:{sizes[name]}" for name in names)


# -- a demonstration


def messages(function: Callable, *args) -> dict[tuple[str, int], list[int]]:
    """Returns what a function sends around each ring: {(mesh axis, direction): [bytes of each message of a device]}.

    Read off the jaxpr; `function` takes unsharded arrays (a `jax.shard_map`). Loops count once.
    """
    sent = {}

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "ppermute" and any(source != target for source, target in eqn.params["perm"]):
                source, target = eqn.params["perm"][0]
                (block,) = (var.aval for var in eqn.invars)
                ring = (eqn.params["axis_name"][0], +1 if target == source + 1 else -1)
                sent.setdefault(ring, []).append(block.size * block.dtype.itemsize)
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return sent


def main() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x_IJ = jax.random.normal(jax.random.key(0), (64, 1024))
    w_JK = jax.random.normal(jax.random.key(1), (1024, 256))
    rows, columns = P("x"), P(None, "x")
    scatter_matmul = partial(matmul_reduce_scatter, axis="x", dim=1)
    gather_matmul = lambda x, w, algorithm: all_gather_matmul(x, (w,), "x", dim=1, algorithm=algorithm)[0]
    demonstrated = {
        "all-gather": (partial(all_gather, axis="x", dim=1), [x_IJ], [rows], rows),
        "reduce-scatter": (partial(reduce_scatter, axis="x", dim=1), [x_IJ], [rows], rows),
        "all-reduce": (partial(all_reduce, axis="x"), [x_IJ], [rows], rows),
        "all-to-all": (partial(all_to_all, axis="x", split_dim=1, concat_dim=0), [x_IJ], [rows], columns),
        "all-gather-matmul": (gather_matmul, [x_IJ, w_JK], [columns, columns], columns),
        "matmul-reduce-scatter": (scatter_matmul, [x_IJ, w_JK], [columns, rows], columns),
    }
    print("a ring of 8 simulated devices, float32; messages read off the jaxpr, differences measured\n")
    print("collective             algorithm            steps   KB through a link   largest difference from XLA's")
    for name, (function, args, in_specs, out_specs) in demonstrated.items():
        sharded = lambda algorithm, f=function, i=tuple(in_specs), o=out_specs: jax.shard_map(
            partial(f, algorithm=algorithm), mesh=mesh, in_specs=i, out_specs=o
        )
        expected = jax.jit(sharded("xla"))(*args)
        for algorithm in ALGORITHMS[1:]:
            sent = messages(sharded(algorithm), *args)
            steps, kilobytes = max(map(len, sent.values())), max(map(sum, sent.values())) / 1e3
            difference = jnp.abs(jax.jit(sharded(algorithm))(*args) - expected).max()
            print(f"{name:22} {algorithm:20} {steps:5} {kilobytes:19.1f}   {difference:.1e}")


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
