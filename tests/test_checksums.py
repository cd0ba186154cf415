"""Tests checksums: they equal the formula in plain Python on every mesh, and differ for every flipped bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import checksums
import placement
import sharding

MESH = sharding.make_mesh(placement.parse_mesh("data:2,fsdp:2,tensor:2"))


def plainly(array: np.ndarray) -> int:
    """Computes the formula in Python's integers, element by element."""
    unsigned = array.astype(np.uint8) if array.dtype == bool else array.view(f"uint{8 * array.dtype.itemsize}")
    bits = [int(b) for b in np.ravel(unsigned)]
    return sum((b ^ (b >> 16)) * (2 * i + 1) for i, b in enumerate(bits)) % 2**32


def laid_out(array: np.ndarray, spec: P, memory: str = "device") -> jax.Array:
    return jax.device_put(array, NamedSharding(MESH, spec, memory_kind=memory))


def drawn(shape, dtype) -> np.ndarray:
    """Draws random bits; bools are 0 and 1."""
    rng = np.random.default_rng(0)
    if dtype is bool:
        return rng.integers(0, 2, shape).astype(bool)
    size = jnp.dtype(dtype).itemsize
    return rng.integers(0, 2 ** (8 * size), shape, f"uint{8 * size}").view(jnp.dtype(dtype))


SPECS = [P(), P("fsdp"), P(None, ("data", "fsdp")), P(("tensor", "data"), None, "fsdp"), P(None, "tensor", "fsdp")]


@pytest.mark.parametrize("block", [1, 5, 12, 2**10], ids=lambda block: f"block={block}")
def test_checksums_equal_the_formula_on_every_mesh(block, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_ON_CPU", block)
    checksums._checksums.clear_cache()
    array = drawn((8, 4, 6), jnp.float32)
    state = {str(i): laid_out(array, spec) for i, spec in enumerate(SPECS)}
    assert checksums.checksums(state) == dict.fromkeys(state, plainly(array))
    checksums._checksums.clear_cache()


def test_checksums_of_blocks_add_up(monkeypatch):
    """On the host, in parts of 5 elements; the last block is one element."""
    monkeypatch.setattr(checksums, "BLOCK", 5)
    array = drawn((7, 6), jnp.float32)
    starts = [0, 12, 12, 41, 42]
    blocks = [checksums.checksum_of_block(array.reshape(-1)[a:b], a) for a, b in itertools.pairwise(starts)]
    assert sum(blocks) % 2**32 == plainly(array) == checksums.checksum_of_block(array, 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.int8, jnp.uint16, bool], ids=str)
def test_checksums_of_every_type(dtype):
    array = drawn((4, 6), dtype)
    assert checksums.checksums({"a": laid_out(array, P("fsdp"))}) == {"a": plainly(array)}


def test_checksums_of_a_scalar_an_empty_array_and_one_on_the_host():
    scalar, empty, on_host = np.float32(3.5), np.zeros((0, 4), np.float32), drawn((4, 6), jnp.float32)
    state = {
        "scalar": laid_out(scalar, P()),
        "empty": laid_out(empty, P()),
        "on": {"host": laid_out(on_host, P("data"), "pinned_host")},
    }
    assert checksums.checksums(state) == {
        "scalar": plainly(np.array(scalar)),
        "empty": 0,
        "on.host": plainly(on_host),
    }


def test_the_factors_wrap_around_at_two_to_the_32():
    """An array has more elements than that; the shards have the first elements of its two rows."""
    shape = (2, 2**31 + 3)
    row = drawn((1, 5), jnp.uint16)
    place = 2**31 + 3
    expected = sum(int(b) * (2 * (place + i) + 1) for i, b in enumerate(row[0])) % 2**32

    def sum_second_row(shard):
        return jax.lax.psum(checksums._sum_shard(shard, shape, [("data",), ()], 4, False), "data")

    rows = jax.device_put(np.concatenate([0 * row, row]), NamedSharding(MESH, P("data")))
    total = jax.jit(jax.shard_map(sum_second_row, mesh=MESH, in_specs=P("data"), out_specs=P()))
    assert total(rows) == expected


def test_every_flipped_bit_and_every_exchange_changes_the_checksum():
    bits = drawn((6,), jnp.uint32)
    flipped = [bits ^ (np.arange(6) == i) * np.uint32(1 << bit) for i in range(6) for bit in range(32)]
    rolled = [np.roll(bits, by) for by in range(1, 6)]
    both_signs = [bits ^ np.uint32([1 << 31, 1 << 31, 0, 0, 0, 0])]
    changed = [checksums.checksums([laid_out(b.view(np.float32), P())])["0"] for b in flipped + rolled + both_signs]
    assert len(changed) == 198 and plainly(bits) not in changed


@pytest.mark.parametrize(
    "shape, block_size, block",
    [
        ((512, 14_336), 1024, (1, 1024)),
        ((512, 32, 128), 1024, (1, 8, 128)),
        ((4, 6), 1024, (4, 6)),
        ((8, 50_257), 1024, (1, 50_257)),  # 29 * 1733: blocks of 29 would be slow
        ((3, 3), 1, (1, 1)),
        ((), 1024, ()),
    ],
)
def test_blocks_divide_a_shard(shape, block_size, block):
    assert checksums._block_of(shape, block_size) == block
