"""Tiles of groups of rows: the list of them, how many there are, and which sizes fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import groups
from compiled import grid
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
    counts = grid.tile_counts([1024, 0, 1000], 2048, Tiles(512, 128, 32), BF16, passes=3)
    nonzero = {name: count for name, count in counts.items() if count}
    assert nonzero == {"tile": 12, "first of group": 6, "last of group": 6, "512 rows": 12, "block": 3 * 2032 // 16}
    counts = grid.tile_counts([1024, 0, 700], 2048, TgmmTiles(512, 128, 128), BF16)
    assert {name: count for name, count in counts.items() if "finish" in name} == {"finish 256": 1, "finish 512": 1}
    assert counts["add"] == 2


def test_each_group_may_have_a_tile_of_its_own():
    assert groups.most_tiles(64, num_groups=4, unit=8, rows=64) >= 4
    assert groups.most_tiles(512, num_groups=4, unit=8, rows=64) >= 8 + 3  # three of 8 rows


def test_bytes_in_vmem_are_those_of_whole_registers():
    assert groups._padded_bytes((3, 5, 100), BF16) == 3 * 16 * 128 * 2
    assert groups._padded_bytes((1, 100), F32) == 128 * 4


def test_parts_of_columns_that_128_does_not_divide():
    """All parts but the last have the same multiple of 128; the last ends with the dim and is no narrower."""
    assert groups.columns(2880)[:2] == [2880, 1472] and groups.other_columns(1472, 2880) == 1408
    for N in (520, 2880, 14_335):
        for cols in groups.columns(N)[1:]:
            others = groups.other_columns(cols, N)
            assert others % 128 == 0 and others <= cols and (-(-N // cols) - 1) * others + cols == N


def test_gate_and_up_of_gpt_oss_fit_in_bfloat16():
    """Both matrices, twice, would take 68 MB in whole; as two parts each of 64."""
    tiles = groups.default_tiles(327_680, 2880, 2880, 128, BF16, variant=groups.Variant(gated=True))
    assert tiles == Tiles(640, 1472)


@pytest.mark.parametrize("K", [2048, *(pytest.param(K, marks=pytest.mark.slow) for K in (4096, 8192))])
def test_no_multiple_of_128_is_cut_into_narrow_parts(K):
    """Not 113 times 128, 113 being a prime: HBM feeds a tile in time, and what overlaps costs less than 1.3."""
    for N in range(640, 16_385, 128):
        tiles = groups.default_tiles(65_536, K, N, 16, BF16)
        assert 2307e12 / 7.38e12 * (1 / tiles.rows + 1 / tiles.cols) < 1.2, (N, tiles)
        assert N <= -(-N // tiles.cols) * tiles.cols < 1.3 * N, (N, tiles)


def test_a_dim_that_is_not_cut_is_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"more than the limit of .*; only multiples of 128 .*K=2,880 to 2,944 and N=14,335 to 14,336$"
    ):
        groups.default_tgmm_tiles(65_536, 2880, 14_335, 16, BF16)


@pytest.mark.parametrize(("K", "N"), [(4096, 14336), (14336, 4096), (7168, 2048), (2880, 2880), (128, 128), (100, 90)])
@pytest.mark.parametrize("dtype", [F32, BF16, E4M3])
def test_default_tiles_fit(K, N, dtype):
    if dtype == F32 and 2880 in (K, N):
        with pytest.raises(ValueError, match="more than the limit of 62,914,560"):  # 2880 is no multiple of 128
            groups.default_tgmm_tiles(8192, K, N, 8, dtype)
        return
    groups.check_tiles(groups.default_tiles(8192, K, N, 8, dtype, BF16), K, N, dtype, BF16)
    groups.check_tgmm_tiles(groups.default_tgmm_tiles(8192, K, N, 8, dtype, BF16), K, N, dtype, BF16)
