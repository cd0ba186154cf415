"""Checksums of the arrays of a state, computed on their shards, to detect bits that a disk or a network changed.

**Formula.**

    checksum = sum over the elements of  mix(bits) * (2 * index + 1)   mod 2^32,   mix(b) = b xor (b >> 16)

`bits` is an element as an unsigned integer. `index` is its row-major index in the unsharded array, so the checksum does
not depend on the mesh, and exchanged elements change it. An odd factor has an inverse mod 2^32, and `mix` is
invertible: any change of a single element, of one bit or of 32, changes the sum. Other damage escapes once in 2^32.

**Cost.** The state is read once, without a copy of it, and one message of 4 bytes an array crosses the mesh. A save
writes as many bytes to a disk: `python benchmarks/checksums.py` has the ratio.

**Left out.** The replicas of a shard but the first, which corruption.py compares (`of_devices`); types of 64 bits;
repair of the damage.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

# Elements summed at once: on a CPU they fit the L1 cache; on a TPU they outweigh the start of a loop iteration.
BLOCK_ON_CPU, BLOCK = 2**10, 2**18


def named_arrays(tree) -> tuple[list[str], list[jax.Array]]:
    """Returns the paths of the arrays in a tree, such as `params.layers.w_q`, and the arrays."""
    named = jax.tree.leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named], [array for _, array in named]


def checksums(state) -> dict[str, int]:
    """Returns {path: checksum} of a tree of arrays on one mesh, equal on every process; all must call it together."""
    names, arrays = named_arrays(state)
    values = _checksums(arrays, tuple(array.sharding for array in arrays))
    return dict(zip(names, jax.device_get(values).tolist(), strict=True))


def checksum_of_block(block: np.ndarray, start: int) -> int:
    """Returns the terms of a contiguous block of a float32 array, whose first element has the index `start`, summed.

    The checksum of the array is the sum of those of its blocks, mod 2^32.
    """
    bits, total = np.ascontiguousarray(block, np.float32).reshape(-1).view(np.uint32), 0
    for begin in range(0, bits.size, BLOCK):
        part = bits[begin : begin + BLOCK]
        index = np.arange(start + begin, start + begin + part.size).astype(np.uint32)
        total += int(np.sum((part ^ (part >> 16)) * (2 * index + 1), dtype=np.uint32))
    return total % 2**32


def of_devices(state) -> dict[str, np.ndarray]:
    """Returns {path: checksums of the shards that the devices hold, uint32 [device]}, devices in the order of the mesh.

    Replicas of a shard have the same checksum as long as they have the same bits. All processes must call it together.
    """
    names, arrays = named_arrays(state)
    values = jax.device_get(_checksums(arrays, tuple(array.sharding for array in arrays), of_devices=True))
    return dict(zip(names, values.T, strict=True))


@partial(jax.jit, static_argnames=("shardings", "of_devices"))
def _checksums(arrays: list[jax.Array], shardings: tuple[NamedSharding, ...], of_devices: bool = False) -> jax.Array:
    """Returns the checksum of each array; with `of_devices` those of the shards of each device, [device, array]."""
    mesh = shardings[0].mesh
    block_size = BLOCK_ON_CPU if mesh.devices.flat[0].platform == "cpu" else BLOCK
    axes_of = [_axes_of(sharding.spec, array.ndim) for array, sharding in zip(arrays, shardings, strict=True)]

    def sum_shards(*shards):
        sums = []
        for shard, array, axes, sharding in zip(shards, arrays, axes_of, shardings, strict=True):
            to_device = sharding.memory_kind == "pinned_host"
            total = _sum_shard(shard, array.shape, axes, block_size, to_device)
            others = [axis for axis in mesh.axis_names if axis not in sum(axes, ())]
            replica = sum((lax.axis_index(axis) for axis in others), jnp.int32(0))
            counts = (replica == 0) | of_devices
            sums.append(jnp.where(counts, total, jnp.uint32(0)))
        collect = partial(lax.all_gather, to="invarying") if of_devices else lax.psum
        return collect(jnp.stack(sums), mesh.axis_names)

    specs = tuple(sharding.spec for sharding in shardings)
    return jax.shard_map(sum_shards, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*arrays)


def _axes_of(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes over which each dim is sharded."""
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return axes + [()] * (ndim - len(axes))


def _sum_shard(shard, shape, axes, block_size: int, to_device: bool) -> jax.Array:
    """Sums the terms of one shard block by block. On a CPU, XLA's own sum copies the shard, at a fifth of the rate.

    Args:
      shape: the shape of the unsharded array.
      axes: the mesh axes over which each of its dims is sharded.
      block_size: elements that are summed at once.
      to_device: the array is in host memory.
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
        for size, dim_size, stride in reversed(list(zip(block, shard.shape, strides, strict=True))):
            index.insert(0, number % (dim_size // size) * size)
            place += index[0].astype(jnp.uint32) * jnp.uint32(stride)
            number //= dim_size // size
        elements = lax.dynamic_slice(shard, index, block)
        bits = _bits(jax.device_put(elements, jax.memory.Space.Device) if to_device else elements)
        return (bits ^ (bits >> 16)) * (2 * (place + within) + 1)

    num_blocks = shard.size // math.prod(block)
    total = lax.fori_loop(1, num_blocks, lambda number, total: total + terms(number), terms(jnp.int32(0)))
    return jnp.sum(total, dtype=jnp.uint32)


def _block_of(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """A shape that divides `shape`, of at most `block_size` elements; of full rows if only thin blocks divide a row."""
    block, capacity = [], block_size
    for dim_size in reversed(shape):
        size = next(size for size in range(min(dim_size, capacity), 0, -1) if dim_size % size == 0)
        if not block and size < min(dim_size, capacity) / 16:
            size = dim_size
        block.insert(0, size)
        capacity = max(capacity // size, 1)
    return tuple(block)


def _bits(x: jax.Array) -> jax.Array:
    """Returns elements of 8, 16 or 32 bits, or bools, as uint32."""
    if x.dtype.itemsize > 4:
        raise TypeError(f"{x.dtype} has more than 32 bits")
    if x.dtype != jnp.bool_:
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x.astype(jnp.uint32)
