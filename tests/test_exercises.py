"""The answers to docs/EXERCISES.md."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
import context
import fp8
import groups
import masks
import pipeline
from compiled import grid
from flags import from_preset
from hardware import CHIPS, parse_topology
from placement import fill_mesh, parse_mesh
from predicted import bounds, interconnect, transformer
from predicted.interconnect import links_of

GB, GIB = 1e9, 2**30
PAGE = (Path(__file__).parents[1] / "docs/EXERCISES.md").read_text()


def test_each_exercise_has_an_answer():
    asked = [int(number) for number in re.findall(r"^(\d+)\. \*\*", PAGE, re.MULTILINE)]
    answered = [int(name.split("_")[2]) for name in globals() if name.startswith("test_exercise_")]
    assert asked == sorted(answered) == list(range(1, len(asked) + 1))


def test_exercise_1_both_ways_halve_the_steps_and_a_line_has_no_other_way():
    ring, line = (interconnect.all_gather(1 * GB, 8, wrap=wrap) for wrap in (True, False))
    assert (ring.steps, ring.link_bytes) == (4, 0.5 * GB)  # 4 blocks come one way, 3 the other
    assert (line.steps, line.link_bytes) == (7, 0.875 * GB)  # the end's neighbour passes on 7 of 8 blocks


def test_exercise_2_a_device_needs_fewer_tokens_than_a_sequence_has():
    """Both sides grow with the layer's weights: of a weight 2 FLOPs a token are to take longer than its 2 bytes."""
    config = from_preset("llama3.1-70b")
    chip, shape = parse_topology("tpu7x:4x4x4")
    weights = transformer.matmul_params(config) - config.vocab_size * config.model_dim
    links = links_of(fill_mesh(parse_mesh("fsdp:*"), 128), chip, shape)["fsdp"]
    gather_s = interconnect.collective_s("all_gather", 2 * weights / config.num_layers, links)
    flops = transformer.forward_flops_per_token(config)
    of_layer = (sum(flops.values()) - flops["unembedding"]) / config.num_layers
    tokens = gather_s / (of_layer / (chip.bf16_flops_per_s / chip.devices))
    assert 3000 < tokens < 8192


def test_exercise_3_32_chips_for_the_state_alone():
    nbytes = sum(transformer.state_bytes(from_preset("llama3.1-405b")).values())
    assert nbytes == 16 * transformer.num_params(from_preset("llama3.1-405b"))
    assert math.ceil(nbytes / CHIPS["tpu7x"].hbm_bytes) == 32


def test_exercise_4_an_eighth():
    assert 4 * 8192 * 128_256 / GIB == pytest.approx(3.91, abs=0.01)
    assert 4 * 1024 * 128_256 / GIB == pytest.approx(0.49, abs=0.01)


def test_exercise_5_the_logits_and_the_last_matmul_are_not_computed_again():
    def share(seq_len):
        config = from_preset("llama3.1-70b", remat="full", seq_len=seq_len)
        return sum(transformer.recomputed_flops_per_token(config).values()) / transformer.train_flops_per_token(config)

    assert "unembedding" not in transformer.recomputed_flops_per_token(from_preset("llama3.1-70b", remat="full"))
    assert 0.24 < share(8192) < 0.25 < share(131_072) < 1 / 3  # attention is computed again whole


def test_exercise_6_one_large_element_costs_the_small_ones():
    scale = fp8.scale_of(jnp.float32(500), fp8.E4M3)
    assert scale == 2  # 448 is the largest, and 250 < 448
    beside = lambda scale: scale * fp8.cast(jnp.float32(0.001), scale, fp8.E4M3).astype(jnp.float32)
    assert beside(scale) == 0  # under half of the smallest step, 2^-9
    alone = fp8.scale_of(jnp.float32(1), fp8.E4M3)
    assert alone == 2**-8 and beside(alone) == pytest.approx(0.001, rel=2**-4)


def blocks_by_device(order):
    """Counts, by device, the pairs (queries, keys) of 16 parts of a sequence, two a device, that the mask admits."""
    return [sum(keys <= queries for queries in its for keys in range(16)) for its in order.reshape(8, 2)]


def test_exercise_7_ten_times_as_many_or_as_many():
    in_order, zigzag = blocks_by_device(np.arange(16)), blocks_by_device(context.order(16, 8, True))
    assert (in_order[0], in_order[-1]) == (3, 31)
    assert set(zigzag) == {17}


@pytest.mark.slow
def test_exercise_8_three_of_which_two_need_a_mask():
    by_queries, _ = masks.block_ranges((32_768, 32_768), (512, 512), masks.Mask(window=1024))
    first, full_first, full_end, end = np.asarray(by_queries)[0, 40]
    assert end - first == 3 and full_end - full_first == 1


def test_exercise_9_27_or_16():
    need = lambda rounds: next(m for m in range(4, 100) if bounds.bubble(4, m, rounds) <= 0.1)
    assert (need(1), need(2)) == (27, 14)
    assert math.ceil(need(2) / 4) * 4 == 16  # several rounds need a multiple of the number of stages
    assert pipeline.idle_share(pipeline.make_schedule("1f1b", 4, 27)) == pytest.approx(0.1)


def test_exercise_10_512_rows_and_that_is_enough():
    rows = 8192 * 8 / 128
    chip = CHIPS["tpu7x"]
    assert rows == 512
    assert rows > chip.bf16_flops_per_s / chip.hbm_bytes_per_s  # 2 FLOPs of each weight and row, 2 bytes of each weight


def test_exercise_11_seven_or_six():
    sizes, tile = np.array([100, 0, 300, 400, 224]), 256
    ends = np.cumsum(sizes)
    some = [(begin, end) for begin, end in zip(ends - sizes, ends, strict=True) if begin < end]
    assert sum(-(-end // tile) - begin // tile for begin, end in some) == 7
    assert sum(-(-(end - begin) // tile) for begin, end in some) == 6
    assert grid.tile_counts(sizes, 1024, groups.Tiles(tile, 128), "float32")["tile"] == 6


@pytest.mark.slow
def test_exercise_12_a_mean_weighted_by_the_exponentials():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 6, 2, 4)) for i in range(3))
    attend = lambda keys: attention.attention(q, k[:, keys], v[:, keys], masks.Mask(causal=False))
    (out_a, lse_a), (out_b, lse_b) = attend(slice(0, 2)), attend(slice(2, 6))
    a, b = (jnp.exp(lse).transpose(0, 2, 1)[..., None] for lse in (lse_a, lse_b))
    out, lse = attend(slice(0, 6))
    np.testing.assert_allclose((a * out_a + b * out_b) / (a + b), out, rtol=1e-5)
    np.testing.assert_allclose(jnp.log(jnp.exp(lse_a) + jnp.exp(lse_b)), lse, rtol=1e-5)
