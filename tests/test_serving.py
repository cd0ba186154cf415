"""The cost of serving, against the scaling book, by hand, and by brute force.

A test of the scaling book (https://jax-ml.github.io/scaling-book) is named by part and question. Where the book's
figures changed between 2025 and 2026, both are tested. Where it rounds or is wrong, the test says so.
"""

import argparse
import dataclasses
import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config
from flags import PRESETS, from_preset
from hardware import CHIPS, Axis, Chip
from predicted import serving, transformer
from predicted.interconnect import collective_s
from predicted.serving import Load, Step, critical_batch, decode, load_of, max_batch


def what_if(chip: str, **figures) -> Chip:
    """A chip with the book's figures in place of the table's."""
    return dataclasses.replace(CHIPS[chip], **figures)


v5e = what_if("v5e", hbm_bytes=16e9, hbm_bytes_per_s=8.2e11, link_bytes_per_s=4.5e10)
v5e_2025 = dataclasses.replace(v5e, hbm_bytes_per_s=8.1e11)
v5p = what_if("v5p", link_bytes_per_s=9e10)
rings = lambda *sizes: [Axis(size, 4.5e10) for size in sizes]  # the book takes every axis to wrap around
us, ms = 1e-6, 1e-3


def dense(params: float, *, weight_bytes: float, cache_bytes: float = 0.0) -> Load:
    """A model as in the book's estimates: 2 FLOPs a parameter, and all parameters are loaded."""
    return Load(weight_bytes * params, cache_bytes, 2 * params)


# -- the scaling book, part 7: "All About Transformer Inference"


@pytest.mark.parametrize("dtype, weight_bytes, batch", [("bf16", 2, 240), ("bf16", 1, 120), ("int8", 1, 240)])
def test_book_part_7_critical_batch(dtype, weight_bytes, batch):
    """240 in bf16; 120 for int8 parameters multiplied in bf16; 240 again for int8 by int8."""
    critical = critical_batch(dense(30e9, weight_bytes=weight_bytes), v5e, matmul_dtype=dtype)
    assert critical == pytest.approx(batch, abs=0.5)


def test_book_part_7_attention_of_one_query():
    """With a key head for each query head there is one FLOP a byte, whatever the context."""
    config = Config(num_heads=8, num_kv_heads=8)
    for context in (100, 10_000):
        load = load_of(config, context)
        assert load.attention_flops / load.cache_bytes == 1


@pytest.mark.parametrize("chip, small_ms", [(v5e_2025, 2.57), (v5e, 2.54)], ids=["2025", "2026"])
def test_book_part_7_pop_quiz(chip, small_ms):
    """30B in int8, bf16 FLOPs, 4x4, 819 MB a cache: 2.5 ms for 4 sequences, 21 ms for 256.

    The edition of 2025, at 8.1e11 bytes/s, should have rounded to 2.6.
    """
    load = dense(30e9, weight_bytes=1, cache_bytes=100e3 * 8192)
    assert decode(load, chip, 16, 4).step_s == pytest.approx(small_ms * ms, abs=0.005 * ms)
    large = decode(load, chip, 16, 256)
    assert large.step_s == pytest.approx(21 * ms, abs=0.5 * ms)
    assert large.flops_s > large.weights_s


def llama2_13b(**overrides) -> Config:
    shape = dict(num_layers=40, model_dim=5120, ff_dim=13_824, num_heads=40, num_kv_heads=40, head_dim=128)
    return Config(**shape | dict(vocab_size=32_000) | overrides)


def test_book_part_7_llama_2_13b_parameters():
    """13e9 parameters, 26 GB in bf16."""
    assert load_of(llama2_13b(), 8192).weight_bytes == pytest.approx(26e9, abs=0.5e9)


def test_book_part_7_llama_2_13b_cache():
    """6.7 GB for 8192 tokens in bf16, so 4 caches have more bytes than the parameters."""
    load = load_of(llama2_13b(), 8192)
    assert load.cache_bytes == pytest.approx(6.7e9, abs=0.05e9)
    assert 3 * load.cache_bytes < load.weight_bytes < 4 * load.cache_bytes


MHA_TABLE = {
    1: (32.7, 4.98, 200.61),
    8: (79.6, 12.13, 659.30),
    16: (133.2, 20.30, 787.99),
    32: (240.4, 36.65, 873.21),
    64: (454.8, 69.33, 923.13),
    240: (1634, 249.09, 963.53),
}
GQA_TABLE = {
    1: (27.34, 4.17, 239.94),
    8: (36.72, 5.60, 1429.19),
    16: (47.44, 7.23, 2212.48),
    32: (68.88, 10.50, 3047.62),
    64: (111.76, 17.04, 3756.62),
    240: (347.6, 52.99, 4529.34),
}


@pytest.mark.parametrize(
    "cache_gb, batch, total_gb, step_ms, tokens_per_s",
    [(gb, batch, *row) for gb, table in ((6.7, MHA_TABLE), (1.34, GQA_TABLE)) for batch, row in table.items()],
)
def test_book_part_7_llama_2_13b_tables(cache_gb, batch, total_gb, step_ms, tokens_per_s):
    """Both tables, on 8 v5e. Their "GiB" and "TiB/s" are GB and TB/s: a cache of 6.7 GB has 6.25 GiB."""
    load = dense(13e9, weight_bytes=2, cache_bytes=cache_gb * 1e9)
    step = decode(load, v5e, 8, batch)
    assert load.held_bytes(batch) == pytest.approx(total_gb * 1e9, abs=0.005e9)
    assert step.step_s == pytest.approx(step_ms * ms, abs=0.0051 * ms)
    assert step.tokens_per_s == pytest.approx(tokens_per_s, abs=0.005)


def test_book_part_7_llama_2_13b_runs_out_of_memory():
    """ "beyond batch size 16": the book's table has 133.2 there, over its 128. 16 fit if a chip has 16 GiB, else 15."""
    load = dense(13e9, weight_bytes=2, cache_bytes=6.7e9)
    assert max_batch(load, v5e, 8) == 15
    assert max_batch(load, CHIPS["v5e"], 8) == 16


def test_book_part_7_llama_2_13b_with_fewer_key_heads():
    """ "We can fit a much bigger batch of 64", but not 240, which would have 5 times the throughput."""
    load = dense(13e9, weight_bytes=2, cache_bytes=1.34e9)
    assert 64 <= max_batch(load, v5e, 8) < 240
    with pytest.raises(ValueError, match=r"short by 219\.6 GB"):
        serving.check_fit(load, v5e, 8, 240)


def test_book_part_7_shards_of_prefill():
    """F / 2200 for one axis, "around 4-8 way": 2200 is 1.97e14 / 9e10 = 2189, rounded."""
    shards = serving.max_shards((16_384, 16_384), 10**6, v5e, rings(16))
    assert 16_384 / shards == pytest.approx(2189, abs=0.5)
    assert 4 < shards < 8


def test_book_part_7_shards_of_decoding():
    """Y > F / (B * beta): 64 for F = 16,384, B = 32 and beta = 8, "usually around 8" on v5e. 9.1 would give 56."""
    at_8 = dataclasses.replace(v5e, hbm_bytes_per_s=8 * 9e10)
    assert serving.max_shards((16_384, 16_384), 32, at_8, rings(16)) == pytest.approx(64, rel=1e-12)
    assert serving.max_shards((16_384, 16_384), 32, v5e, rings(16)) == pytest.approx(56.2, abs=0.05)


def book(**overrides) -> Config:
    """The model of part 7's worked problems."""
    shape = dict(num_layers=64, model_dim=4096, ff_dim=16_384, num_heads=32, num_kv_heads=8, head_dim=256)
    return Config(**shape | dict(vocab_size=32_128, tied_embeddings=True) | overrides)


def test_book_part_7_question_1():
    """18.4e9 parameters; 262 kB a token in int8."""
    load = load_of(book(), 1, weight_dtype="int8", cache_dtype="int8")
    assert load.weight_bytes == pytest.approx(18.4e9, abs=0.05e9)
    assert load.cache_bytes == 2 * 64 * 8 * 256 == 262_144


def test_book_part_7_question_2():
    """7 caches of 128k tokens fit on 4x4 in int8, with one key head about 56. If k is 1024, 6 and 55 fit."""
    int8 = dict(weight_dtype="int8", cache_dtype="int8")
    fit = lambda context, heads: max_batch(load_of(book(num_kv_heads=heads), context, **int8), v5e, 16)
    assert (fit(128_000, 8), fit(128_000, 1)) == (7, 56)
    assert (fit(128 * 1024, 8), fit(128 * 1024, 1)) == (6, 55)


@pytest.mark.parametrize("chip, floor_ms", [(v5e_2025, 1.42), (v5e, 1.40)], ids=["2025", "2026"])
def test_book_part_7_question_3(chip, floor_ms):
    """1.4 ms (2026). 2025 has 1.3: 18e9 / (8.1e11 * 16) = 1.39, truncated, with 18 for 18.4."""
    load = load_of(book(), 8192, weight_dtype="int8", cache_dtype="int8")
    assert serving.floor_s(load, chip, 16) == pytest.approx(floor_ms * ms, abs=0.005 * ms)


MIXTURE = dict(num_experts=16, experts_per_token=2, expert_dim=16_384)


def test_book_part_7_question_5_parameters():
    """212e9, of which 31.2e9 are active: 31.27, truncated."""
    load = load_of(book(**MIXTURE), 8192, weight_dtype="int8")
    assert load.weight_bytes == pytest.approx(212e9, abs=0.5e9)
    assert load.loaded_bytes(1) == pytest.approx(31.27e9, abs=0.005e9)


def test_book_part_7_question_5_critical_batch():
    """The experts alone need 240 * 16/2 = 1920 tokens, the full model 1626: attention and unembedding need 240."""
    load = load_of(book(**MIXTURE), 8192)
    params = 3 * 4096 * 16_384 * 64
    experts = Load(2 * 16 * params, 0, 2 * 2 * params, 0, 0, 2 * 16 * params, 16, 2)
    assert critical_batch(experts, v5e) == pytest.approx(8 * 1.97e14 / 8.2e11, rel=1e-9)
    assert critical_batch(experts, v5e) == pytest.approx(1920, abs=4)  # 8 times the number that was rounded to 240
    assert critical_batch(load, v5e) == pytest.approx(1626, abs=0.5)
    assert critical_batch(load, v5e) == pytest.approx(240.24 * 211.7 / 31.27, abs=1)


def test_book_part_7_question_5_cache():
    """The cache is the same as without experts."""
    assert load_of(book(**MIXTURE), 8192).cache_bytes == load_of(book(), 8192).cache_bytes


def test_book_part_7_question_5_flops():
    """2 * 31.2e9 a token, again truncated from 31.27."""
    assert load_of(book(**MIXTURE), 8192).flops_per_token == pytest.approx(2 * 31.27e9, abs=0.01e9)


def test_book_part_7_latency_bound_messages():
    """Appendix C: 8-way messages below 360 kB are latency-bound, as "BS=16 and D=8192 in int8", 131 kB."""
    config = book(model_dim=8192, num_layers=1)
    seconds = [serving.messages_s(config, rings(8), batch, activation_bytes=1) for batch in (1, 16, 43, 44)]
    hops = 2 * 2 * 4 * us  # two all-reduces, each a reduce-scatter and an all-gather of 4 hops
    assert seconds[:3] == pytest.approx([hops] * 3, rel=1e-12)
    assert seconds[3] == pytest.approx(2 * 2 * 44 * 8192 / 9e10, rel=1e-12) and seconds[3] > hops


# -- the scaling book, part 8: "Serving LLaMA 3-70B on TPUs"

LLAMA = from_preset("llama3.1-70b")
INT8 = dict(weight_dtype="int8", cache_dtype="int8")


def test_book_part_8_cache():
    """160 kB a token in int8, which are KiB (2025: "160kiB", in the table 162 kB); 5.3 GB for 32k, 1.3 TB for 240."""
    assert load_of(LLAMA, 1, **INT8).cache_bytes == 160 * 1024
    load = load_of(LLAMA, 32_768, **INT8)
    assert load.cache_bytes == pytest.approx(5.37e9, abs=0.005e9)  # 5.3 follows from 162e3 a token; 160e3 give 5.24
    assert 240 * load.cache_bytes == pytest.approx(1.3e12, abs=0.05e12)


def test_book_part_8_chips_for_240_caches():
    """86 v5e, from 70e9 + 1.3e12 bytes; the exact number is 85."""
    assert serving.least_chips(Load(70e9, 1.3e12, 0), v5e, 1) == 86
    assert serving.least_chips(load_of(LLAMA, 32_768, **INT8), v5e, 240) == 85


def test_book_part_8_memory():
    """2026: batch 32, 8192 tokens, int8: 112 GB, 7 chips. With 160 KiB and 70.6e9 parameters: 113.5 GB, 8 chips."""
    load = dense(70e9, weight_bytes=1, cache_bytes=160e3 * 8192)
    assert load.held_bytes(32) == pytest.approx(112e9, abs=0.5e9)
    assert serving.least_chips(load, v5e, 32) == 7
    assert serving.least_chips(load_of(LLAMA, 8192, **INT8), v5e, 32) == 8


def test_book_part_8_latency():
    """2026: the same takes 17 ms on 4x2, 1882 tokens/s, 235 a chip (1875 and 234, as the book divides by 17 ms).

    On 4x4 it takes 8.5 ms, with as many tokens a chip.
    """
    load = dense(70e9, weight_bytes=1, cache_bytes=160e3 * 8192)
    step, half = decode(load, v5e, 8, 32), decode(load, v5e, 16, 32)
    assert step.step_s == pytest.approx(17 * ms, abs=0.5 * ms)
    assert step.tokens_per_s * step.step_s / 0.017 == pytest.approx(1882, abs=0.5)
    assert step.tokens_per_s_per_chip * step.step_s / 0.017 == pytest.approx(235, abs=0.5)
    assert (round(step.tokens_per_s), round(step.tokens_per_s_per_chip)) == (1875, 234)
    assert half.step_s == pytest.approx(8.5 * ms, abs=0.05 * ms)
    assert half.tokens_per_s_per_chip == pytest.approx(step.tokens_per_s_per_chip, rel=1e-12)


@pytest.mark.parametrize("chip, link, shards", [(v5e, 4.5e10, 26), (v5p, 9e10, 22)], ids=["2026", "2025"])
def test_book_part_8_shards(chip, link, shards):
    """2 * F / 2200 = 26 ways. 2025 has 2 * F / 2550 = 22, but 2550 is v5p's and this is about v5e."""
    most = serving.max_shards((28_672, 28_672), 10**6, chip, [Axis(4, link), Axis(8, link)])
    assert math.floor(most) == shards


def test_book_part_8_shards_without_wraparound():
    """No axis of a v5e 4x8 wraps around, which leaves 13 of 26 ways."""
    wrapped, line = (
        serving.max_shards((28_672, 28_672), 10**6, v5e, axes) for axes in (rings(4, 8), CHIPS["v5e"].axes((4, 8)))
    )
    assert line == pytest.approx(wrapped / 2 * 50 / 45, rel=1e-12)  # 50 GB/s in hardware.py, 45 in the book


@pytest.mark.parametrize(
    "weight_bytes, dtype, batch", [(2, "bf16", 240), (1, "bf16", 120), (0.5, "bf16", 60), (1, "int8", 240)]
)
def test_book_part_8_critical_batch(weight_bytes, dtype, batch):
    """240; 120 and (2025) 60 for int8 and int4 weights multiplied in bf16; 240 for int8 in int8."""
    critical = critical_batch(dense(70e9, weight_bytes=weight_bytes), v5e, matmul_dtype=dtype)
    assert critical == pytest.approx(batch, abs=0.5)


@pytest.mark.parametrize(
    "weight_bytes, least, chips, left_gb", [(2, 8.75, 16, 116), (1, 4.38, 8, 58), (0.5, 2.19, 4, 29)]
)
def test_book_part_8_smallest_slices(weight_bytes, least, chips, left_gb):
    """bf16, int8, int4 on 16, 8, 4 chips, with space for 43 caches each (2026).

    2025 had 68 GB left and 52 caches for int8, and 45 GB of weights, 19 GB left and 67 caches for int4, which is wrong.
    Its "2.81" is still in the edition of 2026.
    """
    load = dense(70e9, weight_bytes=weight_bytes, cache_bytes=weight_bytes * 162e3 * 8192)
    assert load.weight_bytes / 16e9 == pytest.approx(least, abs=0.006)
    assert 2 ** math.ceil(math.log2(serving.least_chips(load, v5e, 0))) == chips
    assert chips * 16e9 - load.weight_bytes == left_gb * 1e9
    assert max_batch(load, v5e, chips) == 43


@pytest.mark.parametrize("weight_bytes, chips, qps", [(2, 16, 0.276), (1, 8, 0.553), (0.5, 4, 1.105)])
def test_book_part_8_queries(weight_bytes, chips, qps):
    """A full HBM takes 19 ms a step (19.5, truncated), a query 512 steps: 0.27 (truncated), 0.55, 1.11 a chip (2026).

    2025 has 0.66 and 1.72 for the last two, from the wrong numbers of caches.
    """
    load = dense(70e9, weight_bytes=weight_bytes, cache_bytes=weight_bytes * 162e3 * 8192)
    step = decode(load, v5e, chips, max_batch(load, v5e, chips))
    assert 19 * ms < step.step_s < 16e9 / 8.2e11 < 20 * ms
    at_19_ms = step.tokens_per_s_per_chip / 512 * step.step_s / 0.019
    assert at_19_ms == pytest.approx(qps, abs=0.0006)


def test_book_part_8_floor():
    """int4 on 2x2 takes "about 10ms", which is 10.7."""
    assert serving.floor_s(dense(70e9, weight_bytes=0.5), v5e, 4) == pytest.approx(10.7 * ms, abs=0.05 * ms)


@pytest.mark.parametrize("weight_bytes, chips, qps", [(2, 32, 0.450), (1, 16, 0.899), (0.5, 8, 1.799)])
def test_book_part_8_twice_the_chips(weight_bytes, chips, qps):
    """140 caches in 372 GB on 4x8; 0.44 (truncated), 0.90, 1.80 a chip. 2025: 186 GB, 161 caches, 0.51, 1.03, 2.06."""
    load = dense(70e9, weight_bytes=weight_bytes, cache_bytes=weight_bytes * 162e3 * 8192)
    assert 2 / weight_bytes * (chips * 16e9 - load.weight_bytes) == 372e9
    assert max_batch(load, v5e, chips) == 140
    step = decode(load, v5e, chips, 140)
    assert step.tokens_per_s_per_chip / 512 * step.step_s / 0.019 == pytest.approx(qps, abs=0.0006)


def test_book_part_8_small_batches_can_be_sharded_more():
    """2026: batch 64, F / (8 * 64) = 56 ways; beta is 9.1, which gives 49. One matmul on 4x8: 11, 18, 4 us.

    The exact times are 11.7, 17.9 and 4.8 us: the first and the last are truncated.
    """
    at_8 = dataclasses.replace(v5e, hbm_bytes_per_s=8 * 9e10)
    widths = (28_672, 28_672)
    assert serving.max_shards(widths, 64, at_8, rings(16)) == pytest.approx(56, rel=1e-12)
    assert serving.max_shards(widths, 64, v5e, rings(16)) == pytest.approx(49.2, abs=0.05)
    step = decode(dense(8192 * 28_672, weight_bytes=2), v5e, 32, 64)
    message_s = collective_s("all_gather", 2 * 64 * 8192, rings(16))
    message, weights, flops = (seconds / us for seconds in (message_s, step.weights_s, step.flops_s))
    assert [message, weights, flops] == pytest.approx([11.7, 17.9, 4.8], abs=0.05)
    assert [math.floor(message), round(weights), math.floor(flops)] == [11, 18, 4]


def test_book_part_8_prefill():
    """2026: 8192 tokens at 40% on 16 v5e take 0.91 s, at 2 * 70e9 FLOPs a token. With attention it is 5% more."""
    matmuls_only = serving.prefill_s(2 * 70e9 * 8192, v5e, 16, mfu=0.4)
    assert matmuls_only == pytest.approx(0.91, abs=0.005)
    exact = serving.prefill_s(serving.prefill_flops(LLAMA, 8192), v5e, 16, mfu=0.4)
    matmuls = 8192 * 2 * (transformer.matmul_params(LLAMA) - 128_256 * 8192) + 2 * 128_256 * 8192
    attention = 80 * 2 * 2 * 64 * 128 * 8192 * 8192 / 2
    assert exact == pytest.approx((matmuls + attention) / (16 * 1.97e14 * 0.4), rel=1e-12)
    assert exact / matmuls_only == pytest.approx(1.0546, abs=0.0001)


def test_book_part_8_prefill_of_the_mlps():
    """2025: 240 tokens through the MLPs, int8, 4x2: 26e12 FLOPs, at least 8 ms, 16 at half of the peak. The exact
    figures are 27e12 FLOPs, 8.6 and 17 ms.
    """
    flops = 240 * 2 * transformer.parts(LLAMA)["mlp"].params
    assert flops == pytest.approx(27.06e12, abs=0.005e12)
    seconds = [serving.prefill_s(flops, v5e, 8, mfu=mfu, matmul_dtype="int8") for mfu in (1, 0.5)]
    assert seconds == pytest.approx([8.6 * ms, 17.2 * ms], abs=0.05 * ms)
    assert 26e12 / flops * seconds[0] == pytest.approx(8.25 * ms, abs=0.005 * ms)


def test_book_part_8_servers():
    """2026: 0.91 s of prefill and 512 new tokens at 19 ms a step of 32 sequences give P = 3G."""
    step = Step(32, 16, 0.019, 0.0, 0.0, 0.0, 0.0)
    assert serving.prefill_servers(0.91, step, 512) == pytest.approx(3, abs=0.01)


def test_book_part_8_plateau():
    """ "at 2k context the throughput effectively plateaus at around 1 token / ms / chip when it hits the BS 120"."""
    load = dense(70e9, weight_bytes=1, cache_bytes=160 * 1024 * 2048)
    throughput = {batch: decode(load, v5e, 16, batch).tokens_per_s_per_chip * ms for batch in (60, 121, 242)}
    assert throughput[121] == pytest.approx(throughput[242], rel=1e-12)
    assert throughput[242] == pytest.approx(0.893, abs=0.0005)
    assert throughput[60] < 0.7


def test_book_part_8_caches_against_flops():
    """2026: "at all sequence lengths greater than 2048, we spend more time on KV cache loading than we do on FLOPs".

    That holds from 3556 tokens on. (2025 says it about batch sizes.)
    """
    step_of = lambda context: decode(dense(70e9, weight_bytes=1, cache_bytes=160 * 1024 * context), v5e, 16, 120)
    assert step_of(2048).cache_s < step_of(2048).flops_s
    assert step_of(3556).cache_s < step_of(3556).flops_s and step_of(3557).cache_s > step_of(3557).flops_s


def test_book_part_8_lowest_latency():
    """The figure's "5.5ms with low batch size": 5.3 ms for int8 weights on 4x4, and one cache."""
    load = dense(70e9, weight_bytes=1, cache_bytes=160 * 1024 * 8192)
    assert serving.floor_s(load, v5e, 16) == pytest.approx(5.34 * ms, abs=0.005 * ms)
    assert decode(load, v5e, 16, 2).step_s == pytest.approx(5.5 * ms, abs=0.05 * ms)


# -- by hand and by brute force


@pytest.mark.parametrize("E, X, tokens", [(4, 1, 3), (4, 2, 2), (5, 3, 2), (3, 3, 2), (6, 2, 3)])
def test_distinct_experts_by_enumeration(E, X, tokens):
    choices = list(itertools.combinations(range(E), X))
    batches = list(itertools.product(choices, repeat=tokens))
    mean = sum(len(set().union(*batch)) for batch in batches) / len(batches)
    assert serving.distinct_experts(E, X, tokens) == pytest.approx(mean, rel=1e-12)


def test_an_uneven_router_uses_fewer_experts():
    choices, weight = range(4), [0.4, 0.3, 0.2, 0.1]
    mean = sum(math.prod(weight[e] for e in batch) * len({*batch}) for batch in itertools.product(choices, repeat=3))
    assert mean < serving.distinct_experts(4, 1, 3) - 0.1


@pytest.mark.parametrize("preset", PRESETS)
def test_a_load_is_that_of_the_transformer(preset):
    config = from_preset(preset)
    load = load_of(config, 4096, weight_dtype="fp8", cache_dtype="bf16")
    assert load.weight_bytes == transformer.num_params(config)
    assert load.cache_bytes == transformer.kv_cache_bytes(config, 4096)
    assert load.flops_per_token == 2 * transformer.matmul_params(config)
    assert load.loaded_bytes(1) == pytest.approx(transformer.active_params(config, embedding=False), rel=1e-12)
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.model_dim
    embedding += config.vocab_size * config.num_layers * config.ple_dim
    assert load.loaded_bytes(10**6) == pytest.approx(transformer.num_params(config) - embedding, rel=1e-12)
    assert load.held_bytes(3) == load.weight_bytes + 3 * load.cache_bytes


def test_a_cache_that_layers_share_is_held_once_and_read_by_each():
    """Gemma 4 E2B has 12 local and 3 global layers with keys and values, and 16 and 4 that share those of the last."""
    config = from_preset("gemma4-e2b")
    load = load_of(config, 8192)
    local, everywhere = 2 * 512 * 2 * 256, 2 * 8192 * 2 * 512
    assert load.cache_bytes == 12 * local + 3 * everywhere
    assert load.cache_bytes * load.cache_reads == pytest.approx(28 * local + 7 * everywhere)
    step = decode(load, CHIPS["tpu7x"], 1, 1)
    assert step.cache_s == pytest.approx((28 * local + 7 * everywhere) / CHIPS["tpu7x"].hbm_bytes_per_s)
    assert load_of(from_preset("gemma4-31b"), 8192).cache_reads == 1


@pytest.mark.parametrize("preset", [name for name in PRESETS if not from_preset(name).window])
@pytest.mark.parametrize("dtype, size", [("bf16", 2), ("fp8", 1)])
def test_attention_has_the_intensity_of_the_transformer(preset, dtype, size):
    config = from_preset(preset)
    load = load_of(config, 10**7, cache_dtype=dtype)
    absorbed = bool(config.kv_lora_rank)
    expected = transformer.attention_intensity(config, 1, 10**7, element_bytes=size, absorbed=absorbed)
    assert load.attention_flops / load.cache_bytes == pytest.approx(expected, rel=1e-4)


def test_the_critical_batch_of_tpu7x():
    """313, as the top of serving.py says; half of that for FP8 weights multiplied in bfloat16, 313 for FP8 matmuls."""
    batch = lambda size, dtype: critical_batch(dense(1e9, weight_bytes=size), CHIPS["tpu7x"], matmul_dtype=dtype)
    assert [batch(2, "bf16"), batch(1, "bf16"), batch(1, "fp8")] == pytest.approx([312.6, 156.3, 312.6], abs=0.05)


def test_attention_of_latents_is_bound_by_flops():
    """It has 242 FLOPs a byte in bfloat16, under TPU7x's 313, and 484 in FP8: the head of predicted/serving.py."""
    for dtype, bound in (("bf16", False), ("fp8", True)):
        step = decode(load_of(from_preset("deepseek-v3"), 8192, cache_dtype=dtype), CHIPS["tpu7x"], 8, 1024)
        assert (step.attention_flops_s > step.cache_s) == bound
    assert step.attention_flops_s / step.cache_s == pytest.approx(2 * 128 * (2 * 512 + 64) / 576 / 312.6, rel=1e-3)


def test_windows_bound_the_attention_of_a_step():
    load = load_of(from_preset("gemma4-31b"), 100_000)
    assert load.attention_flops == 2 * 32 * 2 * (10 * 100_000 * 512 + 50 * 1024 * 256)


def test_a_step_by_hand():
    """12 bytes of weights, 4 of them looked up and 6 of 3 experts; 2 chips of 5 FLOP/s and 2 bytes/s."""
    chip = what_if("tpu7x", bf16_flops_per_s=5, hbm_bytes_per_s=2)
    load = Load(12, 8, 10, attention_flops=20, lookup_bytes=4, expert_bytes=6, num_experts=3, experts_per_token=1)
    assert [load.loaded_bytes(tokens) for tokens in (1, 2)] == pytest.approx([2 + 2, 2 + 6 * 5 / 9])
    step = decode(load, chip, 2, 2)
    assert (step.cache_s, step.attention_flops_s, step.flops_s) == (4, 4, 2)
    assert step.weights_s == pytest.approx((2 + 10 / 3) / 4)
    assert (step.step_s, step.tokens_per_s, step.tokens_per_s_per_chip) == (6, 2 / 6, 1 / 6)
    slow = decode(load, chip, 2, 2, messages_s=7)
    assert (slow.step_s, slow.sequential_s, slow.bound) == (7, 13, "messages")
    hidden = decode(load, chip, 2, 2, messages_s=5)  # longer than each part, not than their sum
    assert (hidden.step_s, hidden.sequential_s, hidden.bound) == (6, 11, "cache")
    assert serving.floor_s(load, chip, 2) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("bound", ["weights", "FLOPs", "cache", "attention", "messages"])
def test_the_bound_is_the_longest(bound):
    names = dict(cache="cache_s", attention="attention_flops_s", weights="weights_s", FLOPs="flops_s")
    seconds = {field: 1.0 for field in (*names.values(), "messages_s")}
    seconds[names.get(bound, "messages_s")] = 2.5
    assert Step(batch=1, num_chips=1, **seconds).bound == bound


def random_load(rng: random.Random) -> Load:
    weights = rng.randrange(10**6, 10**12)
    return Load(
        weights,
        rng.randrange(1, 10**9),
        rng.uniform(0.1, 1) * weights,
        attention_flops=rng.uniform(0, 1e11),
        lookup_bytes=weights * rng.uniform(0, 0.1),
        expert_bytes=weights * rng.uniform(0, 0.8),
        num_experts=rng.choice([0, 8, 256]),
        experts_per_token=rng.randrange(1, 8),
    )


def test_the_limit_is_the_largest_batch_that_fits():
    """Counting up from 0, every batch up to the limit fits and the next one does not."""
    rng = random.Random(0)
    limits = []
    for _ in range(200):
        chips, held = rng.randrange(1, 5), rng.randrange(1, 50)
        load = Load(rng.randrange(1, 10**6), rng.randrange(10**4, 10**6), 1)
        chip = what_if("tpu7x", hbm_bytes=(load.held_bytes(held) + rng.randrange(-2, 3)) / chips)
        batch = 0
        while load.held_bytes(batch + 1) <= chips * chip.hbm_bytes:
            batch += 1
        assert max_batch(load, chip, chips) == batch
        serving.check_fit(load, chip, chips, batch)
        with pytest.raises(ValueError, match="short by"):
            serving.check_fit(load, chip, chips, batch + 1)
        assert serving.least_chips(load, chip, batch) <= chips < serving.least_chips(load, chip, batch + 1)
        limits.append(batch - held)
    assert {*limits} == {-1, 0}


def test_the_error_says_how_many_bytes_are_missing():
    load = load_of(LLAMA, 8192)
    with pytest.raises(
        ValueError, match=r"weights are 141\.1 GB, the HBM of 4 v5e is 64 GB: short by 77\.11 GB; from 9 "
    ):
        max_batch(load, v5e, 4)
    with pytest.raises(ValueError, match=r"100 caches 268\.4 GB, .* short by 153\.5 GB; from 26 chips"):
        serving.check_fit(load, v5e, 16, 100)
    serving.check_fit(load, v5e, 26, 100)


def test_throughput_and_latency_grow_with_the_batch():
    """For random loads both grow with every batch, and throughput stays below its asymptote."""
    rng = random.Random(1)
    for _ in range(100):
        load, chip, n = random_load(rng), rng.choice([*CHIPS.values()]), rng.choice([1, 4, 64])
        steps = [decode(load, chip, n, batch) for batch in range(1, 400, 7)]
        for step, larger in itertools.pairwise(steps):
            assert larger.step_s >= step.step_s and larger.tokens_per_s >= step.tokens_per_s * (1 - 1e-12)
        C, W = n * chip.bf16_flops_per_s, n * chip.hbm_bytes_per_s
        a_token_s = max(load.cache_bytes / W, load.attention_flops / C) + load.flops_per_token / C
        assert steps[-1].tokens_per_s <= (1 + 1e-12) / a_token_s
        assert decode(load, chip, n, 10**9).tokens_per_s == pytest.approx(1 / a_token_s, rel=1e-2)
        assert all(step.step_s >= serving.floor_s(load, chip, n) for step in steps)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_critical_batch_is_where_the_bound_changes(preset):
    load, chip = load_of(from_preset(preset), 1024), CHIPS["tpu7x"]
    critical = critical_batch(load, chip)
    before, after = (decode(load, chip, 4, critical * by) for by in (1 - 1e-6, 1 + 1e-6))
    assert before.flops_s < before.weights_s and after.flops_s > after.weights_s


def test_messages_are_all_reduces_of_the_activations():
    """On a v5e 2x4, where no axis wraps around, each half of V goes along one axis first, then along the other."""
    config = from_preset("llama3.1-8b", num_layers=3)
    seconds = serving.messages_s(config, CHIPS["v5e"].axes((2, 4)), 10_000)
    V, W = 10_000 * 4096 * 2, 50e9
    first, second = max(1 / 2, 3 / 4), max(1 / 2 * 3 / 4, 1 / 4 * 1 / 2)
    assert seconds == pytest.approx(2 * 3 * 2 * (V / 2) * (first + second) / W, rel=1e-12)
    assert serving.messages_s(config, CHIPS["v5e"].axes((1, 1)), 10_000) == 0


@pytest.mark.parametrize("batch, size, width", [(8, 2, 28_672), (512, 2, 28_672), (64, 1, 65_536), (4096, 1, 57_344)])
@pytest.mark.parametrize("num_axes", [1, 2])
def test_messages_take_longest_beyond_the_most_shards(batch, size, width, num_axes):
    """Compared with the time of the all-gather, on axes so long that a ring's time is V / W_ici."""
    D, axes = 8192, rings(*[4096] * num_axes)
    axes = [dataclasses.replace(axis, hop_s=0) for axis in axes]
    shards = serving.max_shards((width, width), batch, v5e, axes, weight_bytes=size)
    load = dense(D * width, weight_bytes=size)
    message_s = collective_s("all_gather", 2 * batch * D, axes, spread=True)
    on_one_chip = decode(load, v5e, 1, batch)
    for factor, longest in ((0.99, False), (1.01, True)):
        assert (message_s > max(on_one_chip.weights_s, on_one_chip.flops_s) / (shards * factor)) == longest
    assert serving.max_shards((width, width), batch, v5e, rings(1)) == math.inf


def test_widths_of_an_mlp():
    assert serving.mlp_widths(LLAMA, 7) == (28_672, 28_672)
    loaded, used = serving.mlp_widths(from_preset("deepseek-v3"), 10**6)
    assert (loaded, used) == (pytest.approx(2048 * 257), 2048 * 9)
    assert serving.mlp_widths(from_preset("deepseek-v3"), 1)[0] == pytest.approx(2048 * 9)


def test_prefill_by_hand():
    """Logits of one token, half of attention's scores, and at least the time of loading the weights."""
    config = Config(num_layers=2, model_dim=8, ff_dim=16, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=10)
    matmuls = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)
    assert serving.prefill_flops(config, 6) == 6 * (2 * matmuls + 2 * 2 * 2 * (4 + 4) * 3) + 2 * 8 * 10
    chip = what_if("tpu7x", bf16_flops_per_s=100, hbm_bytes_per_s=10)
    assert serving.prefill_s(1000, chip, 4, mfu=0.5) == 1000 / 200
    assert serving.prefill_s(1000, chip, 4, mfu=0.5, loaded_bytes=400) == 10


def test_the_frontier_by_comparing_all_pairs():
    point = lambda step: (step.step_s, -step.tokens_per_s_per_chip)
    beats = lambda a, b: point(a) != point(b) and all(map(float.__le__, point(a), point(b)))
    rng = random.Random(2)
    for _ in range(100):
        steps = [
            Step(rng.randrange(1, 6), rng.randrange(1, 3), 0.0, 0.0, float(rng.randrange(1, 6)), 0.0, 0.0)
            for _ in range(8)
        ]
        best = {point(step) for step in steps if not any(beats(other, step) for other in steps)}
        frontier = serving.frontier(steps)
        assert {point(step) for step in frontier} == best and len(frontier) == len(best)


def test_batches_of_the_table():
    assert serving.batches_up_to(1) == [1]
    assert serving.batches_up_to(16) == [1, 2, 4, 8, 16]
    assert serving.batches_up_to(20) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: load_of(LLAMA, 0), "1 token or more, not 0"),
        (lambda: load_of(LLAMA, 8, weight_dtype="fp4"), "'fp4' is not one of bf16"),
        (lambda: load_of(LLAMA, 8, cache_dtype="f32"), "'f32' is not one of bf16"),
        (lambda: Load(-1, 1, 1), "weight_bytes=-1"),
        (lambda: Load(1, math.nan, 1), "cache_bytes=nan"),
        (lambda: decode(Load(1, 1, 1), v5e, 0, 1), "not 1 and 0"),
        (lambda: decode(Load(1, 1, 1), v5e, 1, 0), "not 0 and 1"),
        (lambda: decode(Load(1, 1, 1), CHIPS["tpu7x"], 1, 1, matmul_dtype="int8"), "tpu7x has no published speed"),
        (lambda: serving.prefill_s(1, v5e, 1, mfu=0), "mfu=0"),
        (lambda: serving.prefill_s(1, v5e, 1, mfu=1.01), "mfu=1.01"),
        (lambda: serving.prefill_servers(1, Step(1, 1, 1, 1, 1, 1, 0), 0), "not 0"),
        (lambda: max_batch(Load(1, 0, 1), v5e, 1), "without a cache"),
    ],
)
def test_wrong_input(call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        call()


# -- command line


def ran(capsys, command: str) -> str:
    parser = argparse.ArgumentParser(prog="roofline.py")
    serving.add_serve_command(parser.add_subparsers(required=True))
    args = parser.parse_args(command.split())
    args.run(args)
    return capsys.readouterr().out


def test_serve_command(capsys):
    out = ran(capsys, "serve --preset=llama3.1-70b --topology=v5e:4x4 --dtype=int8 --explain")
    for words in (
        "llama3.1-70b, 8,192 tokens in every cache, predicted",
        "weights in int8, caches in int8, multiplied in bf16",
        "weights 70.55 GB, a cache 1.342 GB: at most 152 sequences",
        "5.304 ms a step",
        "batch 120.3",
        "895.2 ms for 7,680 tokens, at an assumed 40% of the peak",
        "from 14.6 chips on",
        "B * cache / (n*W) = 152 * 1.342 GB / (16 * 819 GB/s) = 15.57 ms",
        "B * 2*P / (n*C) = 152 * 139 GFLOP / (16 * 197 TFLOP/s) = 6.703 ms",
        "2*L all-reduces of B*D*2 bytes = 2 * 80 of 2.49 MB over 4x4",
    ):
        assert words in out, out
    rows = [line.split() for line in out.splitlines() if line[:9].strip().isdigit()]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 152]
    assert float(rows[0][1]) == pytest.approx(5.406, abs=0.0005)
    assert max(map(len, out.splitlines())) <= 110
    out = ran(capsys, "serve --preset=deepseek-v3 --dtype=fp8 --batch=64 --explain")
    assert "E * (1 - (1 - X/E)^B) = 256 * (1 - (1 - 8/256)^64) = 222.4 of a layer's experts are read" in out
    assert "messages bind" in out and "messages bind" not in ran(capsys, "serve --topology=v5e:1x1 --batch=2")


def test_serve_json(capsys):
    report = json.loads(ran(capsys, "serve --preset=llama3.1-8b --topology=v5e:2x2,tpu7x:1x1x1 --batch=8 --json"))
    assert (report["kind"], report["preset"], report["prompt_tokens"]) == ("predicted", "llama3.1-8b", 7680)
    config = from_preset("llama3.1-8b")
    load = load_of(config, 8192)
    axes = CHIPS["v5e"].axes((2, 2))
    step = decode(load, CHIPS["v5e"], 4, 8, messages_s=serving.messages_s(config, axes, 8))
    small, large = report["slices"]
    (row,) = small["steps"]
    for name in ("step_s", "sequential_s", "cache_s", "messages_s", "tokens_per_s", "tokens_per_s_per_chip", "bound"):
        assert row[name] == getattr(step, name), name
    assert step.messages_s > 0
    assert (small["num_chips"], small["max_batch"]) == (4, max_batch(load, CHIPS["v5e"], 4))
    prefill = serving.prefill_s(serving.prefill_flops(config, 7680), CHIPS["v5e"], 4, mfu=0.4)
    assert small["prefill_s"] == prefill
    assert small["prefill_servers_per_decode_server"] == prefill * 8 / (step.step_s * 512)
    assert small["max_cut_chips"] == serving.max_shards((14_336, 14_336), 8, CHIPS["v5e"], axes)
    assert large["max_cut_chips"] is None
    assert [row["on_frontier"] for part in (small, large) for row in part["steps"]] == [False, True]


def test_serve_flags(capsys):
    """Flags of the model are Config's; --dtype and --batch are not those of training."""
    base = "serve --preset=llama3.1-8b --topology=tpu7x:1x1x1 --json "
    result = lambda flags: json.loads(ran(capsys, base + flags))
    assert result("--num_layers=16")["slices"][0]["weight_bytes"] < result("")["slices"][0]["weight_bytes"]
    fp8, fp8_cache = result("--dtype=fp8"), result("--dtype=fp8 --weight_dtype=bf16")
    assert 2 * fp8["slices"][0]["weight_bytes"] == fp8_cache["slices"][0]["weight_bytes"]
    assert fp8["slices"][0]["cache_bytes_per_sequence"] == fp8_cache["slices"][0]["cache_bytes_per_sequence"]
    assert result("--cache_dtype=int4")["slices"][0]["cache_bytes_per_sequence"] == 8192 * 2 * 8 * 128 * 32 / 2
    assert result("--batch=7")["slices"][0]["steps"][0]["batch"] == 7
    assert result("--mfu=0.8")["slices"][0]["prefill_s"] == pytest.approx(result("")["slices"][0]["prefill_s"] / 2)
    fp8 = result("--matmul_dtype=fp8 --batch=7")["slices"][0]["steps"][0]
    assert fp8["flops_s"] == result("--batch=7")["slices"][0]["steps"][0]["flops_s"] / 2
    mixture = json.loads(ran(capsys, "serve --preset=deepseek-v3 --dtype=fp8 --context=600 --batch=1 --json"))
    short = load_of(from_preset("deepseek-v3"), 600, weight_dtype="fp8").loaded_bytes(88)
    assert mixture["slices"][0]["prefill_s"] == short / (4 * 7380e9)  # loading the experts takes longest
    experts = ran(capsys, base + "--num_experts=8 --experts_per_token=2 --expert_dim=1024 --kv_lora_rank=0")
    assert json.loads(experts)["slices"][0]["critical_batch"] > result("")["slices"][0]["critical_batch"]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--preset=llama3.1-70b --topology=v5e:2x2", "short by 72.39 GB; from 9 chips"),
        ("--preset=llama3.1-70b --topology=v5e:4x4 --batch=80", "short by"),
        ("--preset=llama3.1-70b --topology=v5e:3x3 --context=100000", "1 caches 32.77 GB"),
        ("--topology=v9:2x2", "there is no chip 'v9'"),
        ("--batch=0", "not 0"),
        ("--batch=-1", "not -1"),
        ("--context=0", "not 0"),
        ("--context=512", "from 1 to 511"),
        ("--new_tokens=0", "from 1 to"),
        ("--dtype=f32", "'f32' is not one of"),
        ("--preset=llama", "did you mean"),
        ("--mfu=2", "mfu=2"),
        ("--matmul_dtype=int8", "tpu7x has no published speed"),
        ("--topology=v5e:1x1 --plot=/nowhere/a.png", "/nowhere"),
    ],
)
def test_wrong_serve_command(capsys, flags, words):
    with pytest.raises((ValueError, OSError)) as error:
        ran(capsys, f"serve {flags}")
    assert words in str(error.value)


def test_serve_plot(capsys, tmp_path, monkeypatch):
    out = ran(capsys, f"serve --preset=llama3.1-8b --topology=v5e:2x2,v5e:2x4 --plot={tmp_path}/a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "v5e:2x4, 8 chips" in out
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install"):
        ran(capsys, f"serve --topology=v5e:1x1 --plot={tmp_path}/b.png")


def test_needs_no_jax():
    code = "import sys; from predicted import serving; assert not {'jax', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(serving.__file__).parents[1], check=True)
