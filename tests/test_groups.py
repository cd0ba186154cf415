"""Tiles of groups of rows: the list of them, how many there are, and which sizes fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import groups
from groups import TgmmTiles, Tiles

BF16, F32, E4M3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "here"), [(8, 8), (16, 3), (32, 5)])
def test_every_row_is_written_once(unit, here):
    rng = np.random.default_rng(0)
    tiles = Tiles(rows=128, cols=128, step=32)
    plan_of = jax.jit(lambda sizes, offset: groups.plan_of(sizes, offset, here, 1024, unit, tiles.step, tiles))
    for _ in range(100):
        sizes = rng.multinomial(int(rng.integers(0, 1025)), rng.dirichlet(np.full(8, 0.5)))
        offset = int(rng.integers(0, 8 - here + 1))
        plan = jax.tree.map(np.asarray, plan_of(sizes, offset))
        num_tiles, _, begin, end = plan.totals
        assert num_tiles <= groups.most_tiles(1024, here, unit, tiles.rows), sizes
        written = np.zeros(1024 // unit, int)
        written[: begin // unit] += 1
        written[-(-end // unit) :] += 1
        for t in range(num_tiles):
            assert plan.tile_blocks[t] * unit <= groups.heights(tiles)[plan.tile_height[t]] <= tiles.rows
            written[plan.tile_block[t] :][: plan.tile_write[t]] += 1
        assert (written == 1).all(), (sizes, offset)


def test_counts_of_tiles():
    counts = groups.tile_counts([1024, 0, 1000], 2048, Tiles(512, 128, 32), BF16, passes=3)
    found = {name: count for name, count in counts.items() if count}
    assert found == {"tile": 12, "first of group": 6, "last of group": 6, "512 rows": 12}
    counts = groups.tile_counts([1024, 0, 700], 2048, TgmmTiles(512, 128, 128), BF16)
    assert {name: count for name, count in counts.items() if "finish" in name} == {"finish 256": 1, "finish 512": 1}
    assert counts["add"] == 2


def test_each_group_may_have_a_tile_of_its_own():
    assert groups.most_tiles(64, num_groups=4, unit=8, rows=64) >= 4
    assert groups.most_tiles(512, num_groups=4, unit=8, rows=64) >= 8 + 3  # three of 8 rows


def test_bytes_in_vmem_are_those_of_whole_registers():
    assert groups._padded_bytes((3, 5, 100), BF16) == 3 * 16 * 128 * 2
    assert groups._padded_bytes((1, 100), F32) == 128 * 4


@pytest.mark.parametrize(("K", "N"), [(4096, 14336), (14336, 4096), (7168, 2048), (2880, 2880), (128, 128), (100, 90)])
@pytest.mark.parametrize("dtype", [F32, BF16, E4M3])
def test_default_tiles_fit(K, N, dtype):
    if dtype == F32 and 2880 in (K, N):
        with pytest.raises(ValueError, match="more than the limit of 62,914,560"):  # 2880 is no multiple of 128
            groups.default_tgmm_tiles(8192, K, N, 8, dtype)
        return
    groups.check_tiles(groups.default_tiles(8192, K, N, 8, dtype, BF16), K, N, dtype, BF16)
    groups.check_tgmm_tiles(groups.default_tgmm_tiles(8192, K, N, 8, dtype, BF16), K, N, dtype, BF16)
