"""A checksum of each array of a state, computed where its shards are: a bit that a disk or a network changed shows.

    checksum = sum over the elements of  mix(bits) * (2 * index + 1)   mod 2^32,   mix(b) = b xor (b >> 16)

`bits` is an element as an unsigned integer. `index` is its place in the whole array, row by row, so that the checksum
does not depend on the mesh, and elements that change places change it. An odd factor has an inverse mod 2^32, and `mix`
can be undone: whatever happens to one element, a flipped bit or 32, changes the sum. Other damage escapes once in 2^32.

**Cost**: the state is read once, without a copy of it, and one message of 4 bytes an array crosses the mesh. A save
writes as many bytes to a disk: `python benchmarks/checksums.py` has the ratio.
**Left out**: the replicas of a shard but the first; types of 64 bits; what could mend the damage.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

# Elements that are added up at once: their sums stay in a CPU's first cache, or outweigh the start of a TPU's loop.
BLOCK_ON_CPU, BLOCK = 2**10, 2**18


def checksums(state) -> dict[str, int]:
    """{path: checksum} of a tree of arrays on one mesh, the same on every process: all have to call it together."""
    named = jax.tree.leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named]
    arrays = [array for _, array in named]
    values = _checksums(arrays, tuple(array.sharding for array in arrays))
    return dict(zip(names, jax.device_get(values).tolist(), strict=True))


@partial(jax.jit, static_argnames="shardings")
def _checksums(arrays: list[jax.Array], shardings: tuple[NamedSharding, ...]) -> jax.Array:
    mesh = shardings[0].mesh
    block_size = BLOCK_ON_CPU if mesh.devices.flat[0].platform == "cpu" else BLOCK
    axes_of = [_axes_of(sharding.spec, array.ndim) for array, sharding in zip(arrays, shardings, strict=True)]

    def of_mesh(*shards):
        sums = []
        for shard, array, axes, sharding in zip(shards, arrays, axes_of, shardings, strict=True):
            to_device = sharding.memory_kind == "pinned_host"
            of_shard = _of_shard(shard, array.shape, axes, block_size, to_device)
            others = [axis for axis in mesh.axis_names if axis not in sum(axes, ())]
            replica = sum((lax.axis_index(axis) for axis in others), jnp.int32(0))
            sums.append(jnp.where(replica == 0, of_shard, jnp.uint32(0)))
        return lax.psum(jnp.stack(sums), mesh.axis_names)

    specs = tuple(sharding.spec for sharding in shardings)
    return jax.shard_map(of_mesh, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*arrays)


def _axes_of(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that shard each dim."""
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return axes + [()] * (ndim - len(axes))


def _of_shard(shard, shape, axes, block_size: int, to_device: bool) -> jax.Array:
    """The terms of one shard, added up block by block. XLA's own sum on a CPU copies the shard, at a fifth of the rate.

    Args:
      shape: of the whole array.
      axes: the mesh axes that shard each of its dims.
      block_size: elements that are added up at once.
      to_device: the array is in the memory of the host.
    """
    if shard.size == 0:
        return jnp.uint32(0)
    strides = [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]
    start = jnp.uint32(0)
    for size, stride, names in zip(shard.shape, strides, axes, strict=True):
        start += lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(size * stride % 2**32) if names else 0
    block = _block_of(shard.shape, block_size)
    within = jnp.zeros(block, jnp.uint32)
    for dim, stride in enumerate(strides):
        within += lax.broadcasted_iota(jnp.uint32, block, dim) * jnp.uint32(stride)

    def terms(number):
        place, index = start, []
        for size, whole, stride in reversed(list(zip(block, shard.shape, strides, strict=True))):
            index.insert(0, number % (whole // size) * size)
            place += index[0].astype(jnp.uint32) * jnp.uint32(stride)
            number //= whole // size
        elements = lax.dynamic_slice(shard, index, block)
        bits = _bits(jax.device_put(elements, jax.memory.Space.Device) if to_device else elements)
        return (bits ^ (bits >> 16)) * (2 * (place + within) + 1)

    num_blocks = shard.size // math.prod(block)
    total = lax.fori_loop(1, num_blocks, lambda number, total: total + terms(number), terms(jnp.int32(0)))
    return jnp.sum(total, dtype=jnp.uint32)


def _block_of(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """A shape that divides `shape`, of `block_size` elements at most, or of whole rows that only thin ones divide."""
    block, room = [], block_size
    for whole in reversed(shape):
        size = next(size for size in range(min(whole, room), 0, -1) if whole % size == 0)
        if not block and size < min(whole, room) / 16:
            size = whole
        block.insert(0, size)
        room = max(room // size, 1)
    return tuple(block)


def _bits(x: jax.Array) -> jax.Array:
    """Elements of 8, 16 or 32 bits, or bools, as uint32."""
    if x.dtype.itemsize > 4:
        raise TypeError(f"{x.dtype} has more than 32 bits")
    if x.dtype != jnp.bool_:
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x.astype(jnp.uint32)
