"""The bounds of parallelism, against the scaling book, MaxText's guides, and the collectives' times.

Each test of the scaling book (https://jax-ml.github.io/scaling-book), part 5 "training" and part 6 "applied-training",
names the answer that it checks. Where the editions of 2025 and 2026 differ, both are checked. Where the book is wrong,
the test says so. Its links have nine tenths of the maker's speed.
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

from flags import from_preset
from hardware import CHIPS, Axis
from placement import parse_mesh
from predicted import bounds, interconnect
from predicted.bounds import Work, along, dcn, die_to_die, ici
from predicted.interconnect import collective_s, permute

about = pytest.approx
book = dataclasses.replace(CHIPS["v5p"], link_bytes_per_s=9e10)  # 4.59e14 FLOP/s, 1.8e11 bytes/s an axis
tpu7x = CHIPS["tpu7x"]
maxtext = {name: dataclasses.replace(CHIPS[name], link_bytes_per_s=9e10) for name in ("v5p", "v6e", "tpu7x")}


# -- the scaling book, part 5


def test_book_intensity_of_an_axis():
    """ "Data parallelism": C / W_ici = 4.59e14 / 1.8e11 = 2550 FLOPs a byte."""
    assert ici(book).alpha == about(2550, rel=1e-12)


@pytest.mark.parametrize("bound", [bounds.data_parallel, bounds.fsdp])
def test_book_tokens_a_chip(bound):
    """Takeaway of "FSDP": both need 2550 / M_X tokens a chip, so 2550 on one axis and 850 on three."""
    needs = [bound(ici(book, axes), 1e6, 64).critical for axes in (1, 2, 3)]
    assert needs == about([2550, 1275, 850], rel=1e-12)
    # The edition of 2025 has FSDP "compute bound when B / X < C / W": the sign is wrong, there is no such limit.
    assert [bound(ici(book), 64 * tokens, 64).holds for tokens in (2549, 2551)] == [False, True]


def test_book_tokens_of_a_pod():
    """ "Data parallelism": 7.6M tokens a batch for a pod of 8960 chips (9660 in the edition of 2025: a slip)."""
    assert bounds.data_parallel(ici(book, 3), 1e6, 64).critical * 8960 == about(7.6e6, rel=0.005)
    assert math.prod(book.pods[0]) == 8960


def test_book_deepseek_v2():
    """ "FSDP": 40M tokens go to 47,000 chips."""
    assert bounds.fsdp(ici(book, 3), 40e6, 64).max_degree == about(47_000, rel=0.002)


def test_book_llama_3_70b():
    """ "FSDP": 16M tokens over 16e6 / (2550 / 3) chips; the book truncates 18,823.5."""
    assert int(bounds.fsdp(ici(book, 3), 16e6, 64).max_degree) == 18_823


def test_book_tensor_parallelism_of_llama_3_70b():
    """ "Tensor parallelism": F = 30,000 is enough for 8 ways and not for 16; 8 ways need F of 20k."""
    holds = {ways: bounds.tensor(ici(book), 30_000, ways).holds for ways in (8, 16)}
    assert holds == {8: True, 16: False}
    assert bounds.tensor(ici(book), 30_000, 8).critical == about(20_400, rel=1e-12)


def test_book_tensor_parallelism_of_gemma_7b():
    """The same: F = 50k is bound by messages "with 19-way": from 20, as 50,000 / 2550 is 19.6. 16 ways are fine."""
    assert bounds.tensor(ici(book), 50_000, 1).max_degree == about(19.6, rel=0.001)
    assert [bounds.tensor(ici(book), 50_000, ways).holds for ways in (16, 19, 20)] == [True, True, False]


def test_book_tensor_parallelism_of_several_axes():
    """The same: Y < M_Y * F / 2550."""
    most = [bounds.tensor(ici(book, axes), 30_000, 8).max_degree for axes in (1, 2, 3)]
    assert most == about([axes * 30_000 / 2550 for axes in (1, 2, 3)], rel=1e-12)


def test_book_tensor_parallelism_does_not_depend_on_the_precision():
    """The same: int8 needs 5100 FLOPs a byte, and has half of the bytes."""
    assert ici(book, dtype="int8").alpha == about(5100, rel=1e-12)
    in_int8 = bounds.tensor(ici(book, dtype="int8"), 30_000, 8, wire_bytes=1)
    assert in_int8.critical == about(bounds.tensor(ici(book), 30_000, 8).critical, rel=1e-12)


def mixed_s(batch: float, chips: float, width: float, ways: float, axes: tuple[int, int] = (2, 1)) -> tuple:
    """Returns T_math, T_fsdp, T_tensor by the book's formulas, without their common factor 2 * 2 * D."""
    C, W, (x, y) = 4.59e14, 1.8e11, axes
    return batch * width / (chips * C), width * ways / (chips * W * x), batch / (ways * W * y)


def mixed(batch: float, chips: float, width: float, **options) -> bounds.Bound:
    return bounds.mixed(ici(book, 2), ici(book, 1), batch, chips, width, **options)


def test_book_best_split():
    """ "Combining", 2026: X = 13.9 of 64 chips for B = 48,000, F = 32,768 (13.7 in fact), so 16 and 4."""
    X = bounds.best_split(ici(book, 2), ici(book, 1), 48_000, 64, 32_768)
    assert X == about(13.9, rel=0.02)
    assert 2 ** round(math.log2(X)) == 16
    assert f"X = {X:.4g}" in mixed(48_000, 64, 32_768).working


def test_book_best_split_of_2025():
    """ "Mixed", 2025: X = 31.7, Y = 2.01 for the same run. That is the largest compute-bound X, not the best one.

    The book solves T_fsdp + T_tensor = T_math and takes the larger root. The sum is least at X = 13.7, too.
    """
    math_s, *comms_s = mixed_s(48_000, 64, 32_768, 31.74)
    assert sum(comms_s) == about(math_s, rel=1e-3)
    assert 64 / 31.74 == about(2.01, abs=0.01)
    assert sum(mixed_s(48_000, 64, 32_768, 13.69)[1:]) < 0.73 * math_s


@pytest.mark.parametrize(
    "overlap, width, tokens",
    [(True, 32_768, 99), (False, 32_768, 396), (True, 30_000, 108), (False, 30_000, 432), (False, 28_672, 453)],
    ids=["2026", "2025", "2026 between pods", "2025 between pods", "part 6"],
)
def test_book_tokens_a_chip_of_both(overlap, width, tokens):
    """ "Combining" and "Scaling across pods": alpha^2 / 2F tokens a chip in 2026, 2 * alpha^2 / F in 2025."""
    assert mixed(1e6, 64, width, overlap=overlap).critical == about(tokens, rel=0.005)


def test_book_batch_of_4096_chips():
    """Captions: 4096 * 2550^2 / (2 * 8192 * 4) = 4e5; in 2025 2 * 2550^2 * 4096 / 32768, printed 1.6e10 for 1.6e6."""
    assert 4096 * mixed(1e6, 4096, 32_768).critical == about(4e5, rel=0.02)
    assert 4096 * mixed(1e6, 4096, 32_768, overlap=False).critical == about(1.6e6, rel=0.02)


def test_book_ratio_of_both():
    """ "Combining": T_math / T_comms = sqrt(B*F) * sqrt(Mx*My) / (alpha * sqrt(N)).

    The book's text has it proportional to the square of the batch, its formula to the root.
    """
    bound = mixed(2e6, 4096, 30_000)
    assert math.sqrt(bound.headroom) == about(math.sqrt(2e6 * 30_000 * 2 / 4096) / 2550, rel=1e-12)
    X = bounds.best_split(ici(book, 2), ici(book, 1), 2e6, 4096, 30_000)
    math_s, fsdp_s, tensor_s = mixed_s(2e6, 4096, 30_000, X)
    assert math_s / fsdp_s == about(math.sqrt(bound.headroom)) and fsdp_s == about(tensor_s)


def test_book_llama_3_70b_with_2m_tokens():
    """ "Scaling across pods", B = 2M: 11 * M_Y ways, 2400 chips with FSDP on three axes, 18k chips with both."""
    assert int(bounds.tensor(ici(book), 30_000, 8).max_degree) == 11
    assert bounds.fsdp(ici(book, 3), 2e6, 64).max_degree == about(2400, rel=0.02)
    assert mixed(2e6, 64, 30_000).max_degree == about(18_000, rel=0.03)
    # The edition of 2025 has 9k chips at 432 tokens each, which is 4M tokens and not 2M.
    assert mixed(2e6, 64, 30_000, overlap=False).max_degree == about(4600, rel=0.01)
    assert mixed(4e6, 64, 30_000, overlap=False).max_degree == about(9000, rel=0.03)


def test_book_llama_3_70b_with_1m_tokens():
    """The same: "BS=1M, using roughly X = 1024 and Y = 8" is compute-bound on 8192 chips only at another split.

    At the book's split, FSDP takes 1.3 times as long as the FLOPs.
    """
    assert mixed(1e6, 8192, 30_000).holds
    math_s, fsdp_s, tensor_s = mixed_s(1e6, 8192, 30_000, 1024)
    assert fsdp_s / math_s == about(1.31, rel=0.01) and tensor_s < math_s
    X = bounds.best_split(ici(book, 2), ici(book, 1), 1e6, 8192, 30_000)
    assert max(mixed_s(1e6, 8192, 30_000, X)[1:]) < math_s and X == about(739, rel=0.01)


def test_book_across_pods():
    """The same: C / W_dcn tokens a pod. 71,360 in 2026, from C = 4.46e14, a slip; 2025: 3.8e18 / 5e13 = 76,000.

    With the book's own 4.59e14 and 6.25e9 it is 73,440, for any size of pod.
    """
    assert bounds.data_parallel(dcn(book), 2e6, 2).critical == about(73_440, rel=1e-12)
    assert bounds.data_parallel(dcn(book), 2e6, 2).critical == about(71_360, rel=0.03)
    assert bounds.data_parallel(dcn(book), 2e6, 2).critical == about(76_000, rel=0.04)
    assert bounds.data_parallel(dcn(book), 2e6, 2).holds  # "with 2 pods we'd have a per-pod BS of 1M"


def test_book_chips_of_two_pods():
    """The same: 2M tokens on two pods are 111 a chip, over 108."""
    bound = mixed(2e6 / 2, 8960, 30_000)
    assert bound.value == about(111, rel=0.01) and bound.holds


def test_book_question_3_fsdp():
    """Question 3.2, LLaMA-2 13B on 16x16x16: FSDP needs 850 * 4096 = 3.48M tokens, the batch has 3M."""
    bound = bounds.fsdp(ici(book, 3), 3e6, 4096)
    assert bound.critical * 4096 == about(3.48e6, rel=0.001) and not bound.holds


def test_book_question_3_both():
    """Question 3.3: 235 tokens a chip are enough. X = 1333 (the book's formula, not its number, inverts F / B), so
    1024 and 4.
    """
    bound = mixed(3e6, 4096, 13_824)
    assert bound.critical == about(235, rel=0.001) and bound.value == about(732, rel=0.001) and bound.holds
    assert bounds.best_split(ici(book, 2), ici(book, 1), 3e6, 4096, 13_824) == about(1333, rel=0.001)
    math_s, *comms_s = mixed_s(3e6, 4096, 13_824, 1024)
    assert max(comms_s) < math_s


def test_book_question_3_both_in_2025():
    """Question 3.3: 940 tokens a chip, "actually slightly worse than pure FSDP"."""
    bound = mixed(3e6, 4096, 13_824, overlap=False)
    assert bound.critical == about(940, rel=0.001) and not bound.holds
    assert bound.critical > bounds.fsdp(ici(book, 3), 3e6, 4096).critical


def llama2_13b(batch: float) -> Work:
    return Work(batch, 6 * 13e9, 13e9, 2 * 40 * 5120)


def test_book_question_3_step_time():
    """Question 3.3: 6 * 3e6 * 13e9 / (4096 * 4.6e14 * 0.4) = 300 ms (310 in fact) at 40% MFU."""
    assert bounds.step_seconds(llama2_13b(3e6), book, 4096, 4) / 0.4 == about(310e-3, rel=0.005)


def test_book_question_4():
    """Question 4 of 2025, unanswered there: 10M tokens are enough for FSDP alone, 1M just enough for both."""
    assert bounds.fsdp(ici(book, 3), 10e6, 4096).holds and not bounds.fsdp(ici(book, 3), 1e6, 4096).holds
    assert mixed(1e6, 4096, 13_824).holds and mixed(1e6, 4096, 13_824).headroom < 1.05


# -- the scaling book, part 6: LLaMA 3-70B, 4M tokens, 8960 chips

B_4M, POD, F_70B = 4 * 2**20, 8960, 28_672


def test_book_part_6_fsdp():
    """FSDP needs 850 tokens a chip and has 468."""
    bound = bounds.fsdp(ici(book, 3), B_4M, POD)
    assert int(bound.value) == 468 and bound.critical == about(850) and not bound.holds


def test_book_part_6_both():
    """The formula of 2025 needs 453 tokens a chip, "slightly above"; that of 2026 needs 113."""
    assert mixed(B_4M, POD, F_70B, overlap=False).critical == about(453, rel=0.002)
    assert mixed(B_4M, POD, F_70B, overlap=False).holds
    assert mixed(B_4M, POD, F_70B).critical == about(113.4, rel=0.001)


def test_book_part_6_split():
    """X = 1643 + 284 = 1927 is the edge again. 2048 and 4 ways are compute-bound, messages added. Best is 1618."""
    root = math.sqrt((4.19e6 * F_70B) ** 2 - 2 * 2550**2 * F_70B * 4.19e6 * POD) / (2550 * F_70B)
    assert [4.19e6 / 2550, root] == about([1643, 284], rel=0.01)
    math_s, *comms_s = mixed_s(4.19e6, POD, F_70B, 4.19e6 / 2550 + root)
    assert sum(comms_s) == about(math_s, rel=1e-9)
    math_s, *comms_s = mixed_s(B_4M, 8192, F_70B, 2048)
    assert sum(comms_s) < math_s
    assert bounds.best_split(ici(book, 2), ici(book, 1), 4.19e6, POD, F_70B) == about(1618, rel=0.001)


def test_book_part_6_tensor():
    """Tensor parallelism alone is bound by messages from Y = F / 2550 = 11 on; 4 ways are well below."""
    bound = bounds.tensor(ici(book), F_70B, 4)
    assert int(bound.max_degree) == 11 and bound.holds


# -- MaxText, docs/guides/optimization/custom_model.md, rounded to two digits


@pytest.mark.parametrize(
    "chip, axes, wrap, alpha",
    [
        *[("v5p", 1, True, 2550), ("v6e", 1, True, 5100), ("v6e", 2, False, 5100), ("v6e", 2, True, 2550)],
        ("tpu7x", 1, True, 12_800),
    ],
)
def test_maxtext_intensity(chip, axes, wrap, alpha):
    """Two links are one axis that wraps around, or two that do not."""
    assert ici(maxtext[chip], axes, wrap=wrap).alpha == about(alpha, rel=0.002)


@pytest.mark.parametrize("chip, axes, tokens", [("v5p", 1, 40e3), ("v6e", 2, 40e3), ("tpu7x", 1, 205e3)])
def test_maxtext_fsdp(chip, axes, tokens):
    """Sparsity 16. The page compares the *global* batch, which could be 205k tokens on any number of chips. MaxText's
    guide to sharding and the book compare the batch of a device.
    """
    bound = bounds.fsdp(ici(maxtext[chip], axes), 1e6, 64, sparsity=16)
    assert bound.critical == about(tokens, rel=0.025)
    assert bound.value == 1e6 / 64


@pytest.mark.parametrize("chip, tokens", [("v5p", 5e3), ("v6e", 10e3), ("tpu7x", 26e3)])
def test_maxtext_fsdp_and_experts(chip, tokens):
    """FSDP 16 ways, experts 16 ways, sparsity 32: pdb * 16 / 32 > alpha."""
    per_device = bounds.fsdp(ici(maxtext[chip]), 256 * 30e3, 16, sparsity=32).critical / 16
    assert per_device == about(tokens, rel=0.025)


@pytest.mark.parametrize("chip, width", [("v5p", 2.5e3), ("v6e", 5e3), ("tpu7x", 13e3)])
def test_maxtext_experts(chip, width):
    """4*M/Z > alpha holds for two matmuls and long rings. The exact bound is (Z+2)/Z times that, 1.5 times at Z = 4.

    The third matmul, which the page leaves out, makes it 2/3 of this: at Z = 4 the two factors cancel.
    """
    exact = bounds.expert(ici(maxtext[chip]), 4096, 4, matmuls=2).critical
    assert exact * 4 / (4 + 2) == about(width, rel=0.025)
    assert bounds.expert(ici(maxtext[chip]), 4096, 4).critical == about(width, rel=0.025)
    assert bounds.expert(ici(maxtext[chip]), 4096, 16, matmuls=2).critical * 16 / 18 == about(4 * width, rel=0.025)
    assert bounds.expert(ici(maxtext[chip]), 4096, 1024, matmuls=2).critical == about(256 * width, rel=0.025)


@pytest.mark.parametrize(
    "chip, ways, width",
    [("v5p", 4, 10e3), ("v6e", 4, 20e3), ("tpu7x", 4, 51e3), ("v5p", 16, 41e3), ("v6e", 16, 82e3)],
)
def test_maxtext_tensor(chip, ways, width):
    assert bounds.tensor(ici(maxtext[chip]), 4096, ways).critical == about(width, rel=0.025)


@pytest.mark.parametrize("chip, width", [("v5p", 210), ("v6e", 420), ("tpu7x", 1100)])
def test_maxtext_pipeline(chip, width):
    """3/2 * layers * M * k > alpha for 16 stages of one layer, k = 8. The page has two messages over both links of an
    axis, bounds.py one message over one link, which takes as long.
    """
    bound = bounds.pipeline(ici(maxtext[chip]), 4096, 16, 16, k=8)
    assert bound.critical == about(width, rel=0.035)


def test_maxtext_pipeline_across_slices():
    """6k on v5p, from 73,000 FLOPs a byte and two messages; one message, as in bounds.py, needs half."""
    assert 2 * bounds.pipeline(dcn(CHIPS["v5p"]), 4096, 16, 16, k=8).critical == about(6e3, rel=0.025)


def test_maxtext_bubble():
    """docs/guides/optimization/sharding.md: (PP - 1) / (microbatches + PP - 1), and with several rounds."""
    assert bounds.bubble(4, 8) == about(3 / 11) and bounds.bubble(4, 8, 2) == about(3 / 19)
    assert bounds.bubble(1, 8) == 0


@pytest.mark.parametrize("stages, microbatches, rounds", [(2, 1, 1), (4, 8, 1), (4, 8, 2), (3, 5, 4)])
def test_bubble_of_a_schedule(stages, microbatches, rounds):
    """Stage p works on microbatch m of round r at tick r*M + m + p, so it never has two; the idle ticks are counted."""
    busy = {
        (stage, round * microbatches + microbatch + stage)
        for stage in range(stages)
        for round in range(rounds)
        for microbatch in range(microbatches)
    }
    last = max(tick for _, tick in busy)
    assert len(busy) == stages * rounds * microbatches
    assert bounds.bubble(stages, microbatches, rounds) == about(1 - len(busy) / (stages * (last + 1)))


# -- TPU7x, at its published speeds


def test_tpu7x_intensities():
    """The 11.5k FLOPs a byte of Google's guide to Ironwood, and the table at the top of bounds.py."""
    assert ici(tpu7x).alpha == about(11_535) and ici(tpu7x, 3).alpha == about(3845)
    assert ici(tpu7x, wrap=False).alpha == about(23_070) and dcn(tpu7x).alpha == about(184_560)
    assert die_to_die(tpu7x).alpha == about(1153.5 / 1.2) and ici(maxtext["tpu7x"]).alpha == about(12_817, rel=1e-4)
    for alpha in ("1,922", "3,845", "11,535", "12,817", "23,070", "184,560"):
        assert alpha in bounds.__doc__


@pytest.mark.parametrize("preset, width, most", [("llama3.1-70b", 28_672, 2.49), ("qwen2.5-7b", 18_944, 1.64)])
def test_tpu7x_tensor_parallelism(preset, width, most):
    """The guide: TP 4 needs a width of 46k, which neither has. TP 2 on the two dies needs 1,923."""
    assert from_preset(preset).ff_dim == width
    bound = bounds.tensor(ici(tpu7x), width, 4)
    assert bound.critical == about(46_140) and not bound.holds and bound.max_degree == about(most, abs=0.005)
    assert bounds.tensor(die_to_die(tpu7x), width, 2).critical == about(1922.5)
    assert bounds.tensor(die_to_die(tpu7x), width, 2).holds


def test_tpu7x_mixed():
    """Llama 3.1 70B on two axes and one needs 2,320 tokens a chip, 9,281 if the two do not overlap."""
    wires = ici(tpu7x, 2), ici(tpu7x)
    assert bounds.mixed(*wires, 1e6, 64, 28_672).critical == about(2320, rel=0.001)
    assert bounds.mixed(*wires, 1e6, 64, 28_672, overlap=False).critical == about(9281, rel=0.001)


def test_tpu7x_fp8():
    """Twice the FLOPs need twice the tokens. Weights gathered in FP8 need 3/4 of that, for the backward pass."""
    fp8 = ici(tpu7x, dtype="fp8")
    assert bounds.fsdp(fp8, 1e6, 8).critical == about(23_070)
    assert bounds.fsdp(fp8, 1e6, 8, weight_bytes=1).critical == about(23_070 * 3 / 4)
    assert bounds.fsdp(fp8, 1e6, 8, weight_bytes=1, gradient_bytes=1).critical == about(23_070 / 2)


# -- at the critical value, messages take as long as FLOPs

D, F = 2048, 5632
C, LINK = tpu7x.bf16_flops_per_s, tpu7x.link_bytes_per_s
no_latency = lambda size, wrap=True, link=LINK: Axis(size, link, hop_s=0, wrap=wrap)
on = lambda axis: dataclasses.replace(along(tpu7x, [axis]), flops_per_s=C)  # as if one device had all of the chip
AXES = [
    no_latency(16),
    no_latency(7),
    no_latency(2),
    no_latency(4, wrap=False),
    no_latency(3, wrap=False),
    no_latency(64, link=3e9),
]
ids = [f"{'ring' if axis.wrap else 'line'} of {axis.size}" for axis in AXES]


@pytest.mark.parametrize("axis", AXES, ids=ids)
def test_messages_of_fsdp_take_as_long_as_flops(axis):
    tokens = bounds.fsdp(on(axis), 1e6, 8).critical
    gather_s = collective_s("all_gather", 2 * D * F, [axis])
    assert gather_s == about(2 * tokens * D * F / C)
    assert gather_s + collective_s("reduce_scatter", 2 * D * F, [axis]) == about(4 * tokens * D * F / C)


@pytest.mark.parametrize("weight_bytes, gradient_bytes", [(2, 4), (1, 2), (4, 2), (1, 1)])
def test_messages_of_fsdp_in_other_types_take_as_long_as_flops(weight_bytes, gradient_bytes):
    """The worse pass takes as long for messages as for FLOPs."""
    axis = no_latency(16)
    tokens = bounds.fsdp(on(axis), 1e6, 8, weight_bytes=weight_bytes, gradient_bytes=gradient_bytes).critical
    gather_s = collective_s("all_gather", weight_bytes * D * F, [axis])
    scatter_s = collective_s("reduce_scatter", gradient_bytes * D * F, [axis])
    compute_s = 2 * tokens * D * F / C
    assert max(gather_s / compute_s, (gather_s + scatter_s) / (2 * compute_s)) == about(1)


@pytest.mark.parametrize("axis", AXES, ids=ids)
def test_messages_of_data_parallelism_take_as_long_as_flops(axis):
    """Each of E experts gets k/E of the tokens, and the gradients of all experts are summed."""
    E, k = 64, 4
    tokens = bounds.data_parallel(on(axis), 1e6, 8, sparsity=E / k).critical
    assert collective_s("all_reduce", 2 * E * D * F, [axis]) == about(4 * tokens * k * D * F / C)


@pytest.mark.parametrize("num_slices", [2, 3, 64])
def test_messages_of_slices_take_as_long_as_flops(num_slices):
    """Each of 256 chips sums 1/256 of the gradients, and the tokens of the slice are those of all its chips."""
    axis = dataclasses.replace(tpu7x.across(num_slices), hop_s=0)
    tokens = bounds.data_parallel(on(axis), 1e9, num_slices).critical
    assert collective_s("all_reduce", 2 * D * F / 256, [axis]) == about(4 * tokens / 256 * D * F / C)
    assert tokens == about(184_560 * (num_slices - 1) / num_slices)


@pytest.mark.parametrize("axis", AXES, ids=ids)
def test_messages_of_tensor_parallelism_take_as_long_as_flops(axis):
    tokens, width = 4096, bounds.tensor(on(axis), F, axis.size).critical
    activations = 2 * tokens * D
    both_s = sum(collective_s(kind, activations, [axis]) for kind in ("all_gather", "reduce_scatter"))
    assert both_s == about(4 * tokens * D * width / axis.size / C)


@pytest.mark.parametrize("matmuls", [2, 3])
@pytest.mark.parametrize("axis", AXES, ids=ids)
def test_messages_of_experts_take_as_long_as_flops(axis, matmuls):
    tokens, k = 512, 8
    width = bounds.expert(on(axis), F, axis.size, matmuls=matmuls).critical
    both_s = 2 * collective_s("all_to_all", 2 * tokens * k * D, [axis])
    assert both_s == about(matmuls * 2 * tokens * k * D * width / C)
    if axis.wrap and axis.size % 2 == 0:  # the rule at the top of bounds.py
        assert width == about(on(axis).alpha * (axis.size + 2) / (2 * matmuls))


def test_most_ways_of_experts():
    """They are the ways for which the width is critical."""
    most = bounds.expert(ici(tpu7x), 100_000, 4).max_degree
    assert bounds.expert(ici(tpu7x), 100_000, 48).holds and not bounds.expert(ici(tpu7x), 100_000, 52).holds
    assert most == about(6 * 100_000 / 11_535 - 2)
    assert bounds.expert(ici(tpu7x), 10, 4).max_degree == 1
    line = bounds.expert(ici(tpu7x, wrap=False), 100_000, 8)
    assert line.max_degree == about(6 * 100_000 / 23_070) and line.max_degree == about(8 * line.headroom)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("axis", AXES, ids=ids)
def test_messages_of_context_take_as_long_as_flops(axis, causal):
    """Pairs of query and key, counted one by one for a short sequence, have 4*N*H FLOPs each."""
    N, K, H = 32, 4, 128
    tokens = bounds.context(on(axis), 1e6, axis.size, group=N / K, causal=causal).critical
    T = tokens * axis.size
    short = 1000
    pairs = sum(query + 0.5 if causal else short for query in range(short)) / short**2 * T**2
    assert collective_s("all_gather", 2 * 2 * K * H * T, [axis]) == about(4 * N * H * pairs / axis.size / C)


def test_messages_of_pipeline_take_as_long_as_flops():
    """Three layers a stage, each with gate, up and down."""
    width = bounds.pipeline(ici(tpu7x), F, 24, 4, rounds=2, k=2).critical
    assert permute(2 * 512 * D).seconds(no_latency(4)) == about(3 * 2 * 6 * 512 * D * width / C)


# -- what --explain shows

ONE = "alpha = C/W = 2.307 PFLOP/s / 200 GB/s = 1.154e+04"


@pytest.mark.parametrize(
    "bound, name, rule, working",
    [
        (bounds.data_parallel(ici(tpu7x), 4e6, 8), "data", "B/X > alpha", f"B/X = 4,000,000 / 8 = 500,000; {ONE}"),
        (
            bounds.fsdp(ici(tpu7x), 4e6, 8, sparsity=1.5, weight_bytes=4, gradient_bytes=4),
            "fsdp",
            "B/X > alpha * E/k",
            f"B/X = 4,000,000 / 8 = 500,000; {ONE} * 1.5 (E/k) * 2 (b/2)",
        ),
        (bounds.tensor(ici(tpu7x), F, 4, wire_bytes=4), "tensor", "F > Y * alpha", f"Y = 4; {ONE} * 2 (b/2)"),
        (
            bounds.mixed(ici(tpu7x, 2), ici(tpu7x), 4e6, 64, 4e6, wire_bytes=4, sparsity=1.5),
            "fsdp and tensor",
            "B/N > alpha_x * alpha_y / F * E/k",
            "6 * 5,768 * 1.154e+04 / 4e+06; best at X = 9.238, Y = 6.93",
        ),
        (
            bounds.mixed(ici(tpu7x, 2), ici(tpu7x), 4e6, 64, 4e6, overlap=False),
            "fsdp and tensor",
            "B/N > 4 * alpha_x * alpha_y / F",
            "4 * 5,768 * 1.154e+04 / 4e+06; best at X = 11.31, Y = 5.66",
        ),
        (
            bounds.mixed(ici(tpu7x, 2), ici(tpu7x), 4e6, 64, 4e6),
            "fsdp and tensor",
            "B/N > alpha_x * alpha_y / F",
            "5,768 * 1.154e+04 / 4e+06; best at X = 11.31, Y = 5.66",
        ),
        (
            bounds.expert(ici(tpu7x), F, 8, wire_bytes=1),
            "expert",
            "M > alpha * 2/n * relayed",
            f"Z = 8, relayed 2.5 times, n = 3; {ONE} * 0.5 (b/2)",
        ),
        (
            bounds.context(ici(tpu7x), 8192, 4, wire_bytes=4),
            "context",
            "T/Z > alpha * 2*K/N",
            f"T/Z = 8,192 / 4, N/K = 1; {ONE} * 2 (b/2)",
        ),
        (
            bounds.context(ici(tpu7x), 8192, 4, group=8, causal=False),
            "context",
            "T/Z > alpha * 1*K/N",
            f"T/Z = 8,192 / 4, N/K = 8; {ONE}",
        ),
        (
            bounds.pipeline(ici(tpu7x), F, 24, 4, wire_bytes=4),
            "pipe",
            "3*l*k*F > C/W_link",
            "l = 6, k = 1; C/W_link = 2.307e+04 * 2 (b/2)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "",
)
def test_working(bound, name, rule, working):
    assert (bound.name, bound.rule, bound.working) == (name, rule, working)


def test_other_types_on_the_wires():
    """Twice the bytes of an element need twice as much; for weights and activations together, four times as much."""
    wires = ici(tpu7x)
    for bound in (
        lambda b: bounds.tensor(wires, F, 4, wire_bytes=b),
        lambda b: bounds.expert(wires, F, 4, wire_bytes=b),
        lambda b: bounds.context(wires, 8192, 4, wire_bytes=b),
        lambda b: bounds.pipeline(wires, F, 24, 4, wire_bytes=b),
        lambda b: bounds.data_parallel(wires, 1e6, 4, gradient_bytes=b),
        lambda b: bounds.mixed(wires, wires, 1e6, 64, 4096, wire_bytes=math.sqrt(2 * b)),
    ):
        assert bound(4).critical == about(2 * bound(2).critical)


def test_names_of_wires():
    assert [ici(tpu7x, *args).name for args in ((1,), (2,))] == ["1 ring", "2 rings"]
    assert ici(tpu7x, 3, wrap=False).name == "3 lines" and die_to_die(tpu7x).name == "die to die"


def test_links_of_unequal_speed():
    """All links carry a gather; a message to a neighbour is as slow as the slowest link."""
    wires = along(tpu7x, [no_latency(4, link=1e9), no_latency(4, link=3e9, wrap=False)])
    assert wires.bytes_per_s == about(2 * 1e9 + 4 / 3 * 3e9) and not wires.wrap
    assert wires.link_bytes_per_s == 1e9 and wires.flops_per_s == C / 2


# -- properties


def test_more_axes_and_wrap_around_lower_every_bound():
    bound_of = {
        "data": lambda wires: bounds.data_parallel(wires, 1e6, 8),
        "fsdp": lambda wires: bounds.fsdp(wires, 1e6, 8),
        "tensor": lambda wires: bounds.tensor(wires, F, 4),
        "context": lambda wires: bounds.context(wires, 1e6, 4),
    }
    for bound in bound_of.values():
        one, two, three = (bound(ici(tpu7x, axes)) for axes in (1, 2, 3))
        assert one.critical == about(2 * two.critical) == about(3 * three.critical)
        assert bound(ici(tpu7x, wrap=False)).critical == about(2 * one.critical)
        assert three.headroom == about(3 * one.headroom) and three.max_degree == about(3 * one.max_degree)


def test_a_bound_holds_up_to_its_most_ways():
    for bound in (
        lambda ways: bounds.data_parallel(ici(tpu7x), 1e6, ways),
        lambda ways: bounds.fsdp(ici(tpu7x), 1e6, ways),
        lambda ways: bounds.tensor(ici(tpu7x), 1e6, ways),
        lambda ways: bounds.context(ici(tpu7x), 1e6, ways, group=4),
        lambda ways: bounds.pipeline(ici(tpu7x), 1e5, 64, ways),
        lambda ways: bounds.mixed(ici(tpu7x, 2), ici(tpu7x), 1e7, ways, F),
    ):
        most = bound(2).max_degree
        assert bound(0.999 * most).holds and not bound(1.001 * most).holds
        assert bound(most).headroom == about(1)
        assert dataclasses.replace(bound(most), value=1.0, critical=1.0).holds  # at the critical value it holds


@pytest.mark.parametrize("seed", range(5))
def test_best_split_by_search(seed):
    """Over all X, the slower message and the sum of both are least at best_split, and T_math at the critical batch."""
    rng = random.Random(seed)
    chips, width, sparsity = 2 ** rng.randint(6, 12), rng.randint(2000, 60_000), rng.choice([1, 8])
    wires = ici(tpu7x, rng.choice([1, 2])), ici(tpu7x, 1)
    for overlap, total in ((True, max), (False, lambda *seconds: sum(seconds))):
        bound = bounds.mixed(*wires, 1e6, chips, width, sparsity=sparsity, overlap=overlap)
        batch = bound.critical * chips

        def comms_s(X, batch=batch, total=total):
            weights_s = 4 * width * sparsity / (chips / X) / wires[0].bytes_per_s
            return total(weights_s, 4 * batch / X / wires[1].bytes_per_s)

        grid = [chips ** (i / 5000) / 4 for i in range(10_000)]
        X = bounds.best_split(*wires, batch, chips, width, sparsity=sparsity)
        assert X == about(min(grid, key=comms_s), rel=0.01)
        assert comms_s(X) == about(4 * batch * width / chips / C)


# -- a model on a mesh


def bounds_on(mesh: str, topology: tuple = (4, 4, 4), preset: str = "llama3.1-70b", num_slices: int = 1, **flags):
    config = from_preset(preset, mesh=mesh, **flags)
    """{(name, links): bound} of a preset on a mesh of TPU7x devices."""
    every = bounds.bounds_of(config, tpu7x, topology, num_slices=num_slices)
    return {(bound.name, bound.wires): bound for bound in every}


@pytest.mark.parametrize("axis", ["data", "fsdp", "context"])
def test_the_dies_of_a_chip_share_a_gather_or_repeat_it(axis):
    """With FSDP on the dies each gathers half. With data or context both gather all, over the same links."""
    alpha = 3845  # a chip's
    together = bounds_on("fsdp:128", batch=128)
    assert together["fsdp", "x, y, z"].critical == about(alpha)
    assert together["fsdp", "x, y, z"].value == 128 * 8192 / 64
    if axis != "fsdp":
        apart = bounds_on(f"fsdp:64,{axis}:2", batch=128, core_axis=axis)
        assert apart["fsdp", "x, y, z"].critical == about(alpha)
        assert apart["fsdp", "x, y, z"].value == 128 * 8192 / 128


def test_fsdp_in_two_dims_has_the_bounds_of_one_with_the_dies_inside():
    """Each die gathers half of the weights over the torus, and the other half from its neighbour."""
    one, two = bounds_on("fsdp:128", batch=128), bounds_on("fsdp:64,fsdp_transpose:2", batch=128)
    for wires, axis in (("x, y, z", "fsdp"), ("die to die", "fsdp_transpose")):
        assert dataclasses.replace(two[axis, wires], name="fsdp") == one["fsdp", wires]


def test_tensor_parallelism_over_dies_and_chips():
    """tensor:4 needs 3,845 on the dies and 23,070 on the torus; on four chips of an axis, as in the guide, 46,140."""
    on_mesh = bounds_on("fsdp:32,tensor:4", batch=128)
    assert on_mesh["tensor", "die to die"].critical == about(3845) and on_mesh["tensor", "2 of x"].critical == about(
        23_070
    )
    assert on_mesh["tensor", "2 of x"].holds
    on_mesh = bounds_on("fsdp:32,tensor:4", batch=128, core_axis="fsdp")
    assert on_mesh["tensor", "x"].critical == about(46_140) and not on_mesh["tensor", "x"].holds
    assert on_mesh["tensor", "x"].max_degree == about(2.49, abs=0.005)


def device_s(config, sizes: dict, inner: int, pieces: list, num_devices: int) -> dict:
    """Returns {axis: (seconds of FLOPs, seconds of messages)} on one device, for one [D, F] matrix or attention.

    Links have the device's share. Each of `inner` devices on inner links fetches its part of what they share.
    """
    D, F = config.model_dim, config.ff_dim
    tokens = config.batch * config.seq_len / config.microbatches
    own = tokens / (sizes["data"] * sizes["fsdp"] * sizes["context"])  # tokens of a device
    forward_s = 2 * own * D * F / sizes["tensor"] / (C / 2)
    weights = 2 * D * F / sizes["tensor"]
    flat = [dataclasses.replace(piece, hop_s=0) for piece in pieces]
    moved_s = lambda kind, nbytes: collective_s(kind, nbytes / inner, flat)
    heads = config.num_heads // sizes["tensor"], config.num_kv_heads // sizes["tensor"]
    T, own_sequences = config.seq_len, own * sizes["context"] / config.seq_len
    attention_s = 2 * own_sequences * heads[0] * config.head_dim * T * T / sizes["context"] / (C / 2)
    return {
        "data": (2 * forward_s, moved_s("all_reduce", weights / (sizes["fsdp"] * sizes["context"]))),
        "fsdp": (forward_s, moved_s("all_gather", weights)),
        "context": (attention_s, moved_s("all_gather", 2 * own_sequences * T * 2 * heads[1] * config.head_dim)),
        "tensor": (2 * forward_s, 2 * moved_s("all_gather", 2 * own * D)),
    }


@pytest.mark.parametrize(
    "mesh, topology, flags",
    [
        ("fsdp:128", (64, 1, 1), {}),
        ("data:4,fsdp:8,tensor:4", (4, 4, 4), {}),
        ("data:2,fsdp:8,context:4,tensor:2", (4, 4, 4), dict(microbatches=2)),
        ("data:4,fsdp:4,context:8", (4, 4, 4), dict(core_axis="context")),
        ("data:8,fsdp:4,tensor:4", (4, 4, 4), dict(core_axis="data")),
        ("fsdp:8,tensor:2", (4, 2, 1), dict(core_axis="fsdp")),
    ],
)
def test_bounds_of_a_mesh_by_device(mesh, topology, flags):
    """The headroom is a device's seconds of FLOPs over those of its messages, on each kind of link."""
    config = from_preset("llama3.1-70b", mesh=mesh, batch=128, **flags)
    sizes = parse_mesh(mesh)
    links = interconnect.links_of(sizes, tpu7x, topology, core_axis=config.core_axis)
    num_checked = 0
    for bound in bounds.bounds_of(config, tpu7x, topology):
        pieces = [piece for piece in links.get(bound.name, ()) if piece.name in bound.wires.split(", ")]
        if bound.name == "fsdp and tensor" or len({piece.link_bytes_per_s for piece in pieces}) > 1 or len(pieces) > 1:
            continue  # a collective over several axes takes longer, as it uses one after another
        if not pieces:
            continue  # the bound of the gradients over `context`
        dies = any(piece.name == "die to die" for piece in links[bound.name])
        inner = 2 if dies and pieces[0].name != "die to die" else 1
        math_s, comms_s = device_s(config, sizes, inner, pieces, 2 * math.prod(topology))[bound.name]
        assert bound.headroom == about(math_s / comms_s), bound
        num_checked += 1
    assert num_checked >= (1 if mesh == "fsdp:128" else 2)


def test_a_mesh_of_slices():
    """Many slices need 184,560 tokens each, two need half; `data` within a slice is another bound."""
    on_mesh = bounds_on("data:4,fsdp:64", num_slices=2, batch=256)
    assert on_mesh["data", "slices"].critical == about(184_560 / 2)
    assert on_mesh["data", "slices"].value == 256 * 8192 / 2


def test_a_mixture_on_a_mesh():
    """DeepSeek-V3 has sparsity 32. Its experts of width 2048 are wide enough for the dies, not for a ring of chips."""
    on_mesh = bounds_on("pipe:2,fsdp:32,expert:16", (8, 8, 8), "deepseek-v3", 1, batch=4096, microbatches=8)
    assert on_mesh["fsdp", "y, 4 of z"].rule == "B/X > alpha * E/k"
    assert on_mesh["fsdp", "y, 4 of z"].critical == about(32 * C / (2 * LINK + 4 / 3 * LINK))
    assert on_mesh["expert", "die to die"].holds and not on_mesh["expert", "x"].holds
    assert on_mesh["pipe", "2 of z"].critical == about(C / (LINK / 4) / (3 * 61 / 2 * 8))


def test_context_sums_gradients_too():
    """Gradients are summed over `data` and `context` together, on the dies as well."""
    on_mesh = bounds_on("data:2,fsdp:16,context:8", (8, 4, 4), batch=32, core_axis="context", preset="llama3.1-8b")
    assert on_mesh["data", "die to die"].degree == 2 * 8 and on_mesh["data", "4 of x"].degree == 2 * 8 / 2
    assert on_mesh["data", "4 of x"].value == 32 * 8192 / 8


def test_experts_along_the_longest_ring():
    on_mesh = bounds_on("fsdp:4,expert:128", (4, 8, 8), "qwen3-30b-a3b", batch=512)
    assert on_mesh["expert", "y"].critical == about(bounds.expert(ici(tpu7x), 768, 8).critical)


def test_both_on_a_mesh():
    """N counts chips, not devices."""
    bound = bounds_on("data:2,fsdp:8,tensor:8", batch=128)["fsdp and tensor", "y, 2 of z; x"]
    wires = along(tpu7x, interconnect.links_of(parse_mesh("data:2,fsdp:8,tensor:8"), tpu7x, (4, 4, 4))["fsdp"])
    assert bound.degree == 64 and bound.value == 128 * 8192 / 64
    assert bound.critical == about(wires.alpha * 11_535 / 28_672)
    assert not any(name == "fsdp and tensor" for name, _ in bounds_on("fsdp:64,tensor:2", batch=128))


def test_a_pipeline_on_a_mesh():
    """Llama 3.1 70B with 20 layers a stage; its MLP counts as one expert."""
    bound = bounds_on("pipe:4,fsdp:32", batch=128)["pipe", "z"]
    assert bound.degree == 4 and bound.critical == about(2 * 11_535 / (3 * 20))


def test_a_latent_is_less_than_keys_and_values():
    """DeepSeek-V3's ring sends 576 numbers a token for 128 heads of 192 + 128."""
    on_mesh = bounds_on("fsdp:32,context:4", preset="deepseek-v3", batch=64)
    assert on_mesh["context", "2 of x"].critical == about(2 * ici(tpu7x).alpha * 576 / (128 * (192 + 128)))


def test_a_full_layer_counts_as_less_width_than_its_mlp():
    """Parameters of a layer over 4*D, 26,112 for Llama 3.1 70B, as the top of bounds.py says."""
    config = from_preset("llama3.1-70b")
    D, H = config.model_dim, config.head_dim
    params = 3 * D * config.ff_dim + 2 * D * H * (config.num_heads + config.num_kv_heads)
    assert params / (4 * D) == 26_112 and "26,112" in bounds.__doc__
    tokens, Y = 4096, 4
    bytes_s = (
        2 * collective_s("all_gather", 2 * tokens * D, [no_latency(4)]) * 2
    )  # attention, MLP: gather and scatter each
    assert 2 * tokens * params / Y / C / bytes_s == about(params / (4 * D) / bounds.tensor(ici(tpu7x), 1, Y).critical)


# -- strong scaling


def simple(batch: float, width: float = F_70B, layers: int = 32) -> Work:
    """The work of the book's model: two matmuls a layer, whose activations are gathered and scattered once."""
    return Work(batch, 12 * layers * D * width, 2 * layers * D * width, 2 * layers * D)


@pytest.mark.parametrize("chip", [tpu7x, book, CHIPS["v5e"]], ids=lambda chip: chip.name)
def test_strong_scaling_stops_where_the_bounds_say(chip):
    batch = 3e6
    stops = bounds.stops_at(simple(batch), chip)
    axes = chip.torus_axes
    assert stops["fsdp"] == about(bounds.fsdp(ici(chip, axes), batch, 1).max_degree)
    assert stops["mixed"] == about(bounds.mixed(ici(chip, axes - 1), ici(chip), batch, 1, F_70B).max_degree)
    # A width that is too narrow for tensor parallelism.
    stops = bounds.stops_at(simple(batch, width=1000), chip)
    assert stops["mixed"] == stops["fsdp"]


def test_a_larger_batch_hides_the_messages_of_the_weights():
    """Up to FSDP's bound a step takes as long as its messages, which are constant; from there, as long as its FLOPs."""
    work, chips = simple(3e6), 1024
    critical = work.batch * chips / bounds.stops_at(work, tpu7x)["fsdp"]
    gathers_s = 3 * 2 * work.params / (6 * LINK)
    rows = bounds.batch_sweep(work, tpu7x, chips)
    assert [row["batch"] / work.batch for row in rows] == [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    assert rows[0]["batch"] < critical < rows[-1]["batch"]
    for row in rows:
        assert row["tokens_per_chip"] * chips == row["batch"]
        assert row["step_s"] == about(max(row["compute_s"], gathers_s))
        assert row["exposed_s"] == about(max(gathers_s - row["compute_s"], 0))
        assert (row["exposed_s"] == 0) == (row["batch"] >= critical) == (row["efficiency"] == about(1))


def test_strong_scaling_by_hand():
    """FSDP is ideal up to its bound; from there a step takes as long as its gathers, on any number of chips."""
    work = simple(3e6)
    stop = bounds.stops_at(work, tpu7x)["fsdp"]
    ideal_s = lambda chips: work.batch * work.flops_per_token / chips / C
    assert bounds.step_seconds(work, tpu7x, 0.99 * stop) == about(ideal_s(0.99 * stop))
    assert bounds.step_seconds(work, tpu7x, 4 * stop) == about(ideal_s(stop))
    gathers_s = 3 * 2 * work.params / (6 * LINK)
    assert bounds.step_seconds(work, tpu7x, 4 * stop) == about(gathers_s)


@pytest.mark.parametrize("ways", [2, 16])
def test_tensor_parallelism_by_hand(ways):
    """A step bound by activations has 2 messages forward and 3 backward on one axis; by weights, on the others."""
    work, chips = simple(3e8, width=512), 1024
    message_s = 2 * D * 32 * work.batch * ways / chips / (2 * LINK)
    assert bounds.step_seconds(work, tpu7x, chips, ways) == about(5 * message_s)
    work = simple(1e4)
    assert bounds.step_seconds(work, tpu7x, chips, ways) == about(3 * 2 * work.params / ways / (4 * LINK))


def test_tensor_ways_are_the_best_power_of_two():
    work = bounds.work_of(from_preset("llama3.1-70b"))
    for row in bounds.strong_scaling(work, tpu7x):
        times = {2**i: bounds.step_seconds(work, tpu7x, row["chips"], 2**i) for i in range(7)}
        assert row["mixed_s"] == min(times.values()) == times[row["tensor_ways"]]
    assert {row["tensor_ways"] for row in bounds.strong_scaling(work, tpu7x)} == {1, 2, 4, 8, 16}
    assert bounds.strong_scaling(work, CHIPS["v3"])[-1]["chips"] == 128 * 32


def test_mixed_falls_as_the_root_when_messages_bind():
    """With the best Y, not only powers of two."""
    work = simple(3e6)
    stop = bounds.stops_at(work, tpu7x)["mixed"]
    forward_only = lambda chips, ways: max(  # the backward pass has 3/4 of its activations
        work.batch * work.flops_per_token / 3 / chips / C,
        2 * work.params / ways / (4 * LINK),
        2 * work.activations * work.batch * ways / chips / (2 * LINK),
    )
    best = lambda chips: min(forward_only(chips, 1.01**i) for i in range(1, 700))
    assert best(0.98 * stop) == about(work.batch * work.flops_per_token / 3 / (0.98 * stop) / C)
    assert [best(4 * stop), best(16 * stop)] == about([best(stop) / 2, best(stop) / 4], rel=0.02)


@pytest.mark.parametrize("preset", ["llama3.1-8b", "llama3.1-70b", "deepseek-v3"])
def test_strong_scaling_of_a_model(preset):
    work = bounds.work_of(from_preset(preset, batch=512))
    rows, stops = bounds.strong_scaling(work, tpu7x), bounds.stops_at(work, tpu7x)
    assert rows[0]["chips"] == 16 and rows[-1]["chips"] == 9216
    rounding = 1 + 1e-9
    for row, after in itertools.pairwise(rows):
        assert after["fsdp_efficiency"] <= row["fsdp_efficiency"] * rounding
        assert after["fsdp_s"] <= row["fsdp_s"] * rounding
    for row in rows:
        assert row["compute_s"] <= row["mixed_s"] * rounding and row["mixed_s"] <= row["fsdp_s"]
        assert (row["fsdp_efficiency"] > 0.9999999) == (row["chips"] <= stops["fsdp"])
        # Powers of two are no better than the best mix.
        assert row["mixed_efficiency"] < 0.9999999 or row["chips"] <= stops["mixed"]
        assert row["tokens_per_chip"] * row["chips"] == about(work.batch)
    # 8B: its width of 14,336 is just over tensor parallelism's 11,535, which takes an axis from FSDP. No mix is better.
    assert (stops["fsdp"] < stops["mixed"]) == (preset != "llama3.1-8b")


# -- wrong input


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: ici(tpu7x, 4), "1 to 3 can be used, not 4"),
        (lambda: ici(CHIPS["v5e"], 0), "v5e has 2 axes of links: 1 to 2 can be used, not 0"),
        (lambda: ici(CHIPS["v4"], dtype="fp8"), "v4 has no published speed of a matmul in 'fp8'"),
        (lambda: die_to_die(book), "v5p has no link between dies"),
        (lambda: bounds.fsdp(ici(tpu7x), 1e6, 0), "ways must be 1 or more, not 0"),
        (lambda: bounds.fsdp(ici(tpu7x), math.nan, 8), "batch must be over 0, not nan"),
        (lambda: bounds.data_parallel(ici(tpu7x), 1e6, 8, sparsity=0.5), "sparsity must be 1 or more, not 0.5"),
        (lambda: bounds.tensor(ici(tpu7x), -1, 8), "width must be over 0, not -1"),
        (lambda: bounds.tensor(ici(tpu7x), 4096, 8, wire_bytes=0), "bytes must be over 0, not 0"),
        (lambda: bounds.best_split(ici(tpu7x), ici(tpu7x), 1e6, 0.5, F), "chips must be 1 or more, not 0.5"),
        (lambda: bounds.expert(ici(tpu7x), 4096, 2.5), "whole number of devices, 1 or more, not 2.5"),
        (lambda: bounds.context(ici(tpu7x), math.inf, 8), "seq_len must be over 0, not inf"),
        (lambda: bounds.pipeline(ici(tpu7x), 4096, 0, 8), "num_layers must be over 0, not 0"),
        (lambda: bounds.bubble(0, 8), "stages must be 1 or more, not 0"),
        (lambda: bounds.step_seconds(simple(1e6), tpu7x, -4), "chips must be 1 or more, not -4"),
        (lambda: bounds_on("fsdp:64"), "64 devices and there are 128|is for 64 devices and there are 128"),
        (lambda: bounds_on("fsdp:*", batch=100), "batch=100 must be a multiple of .*=128; nearest is 128"),
        (
            lambda: bounds_on("fsdp:64,context:2", batch=64, seq_len=8191),
            "seq_len=8191 must be a multiple of context=2",
        ),
        (lambda: bounds_on("fsdp:64,expert:2", batch=128), "expert:2 is for experts, and num_experts is 0"),
        (lambda: bounds_on("fsdp:32,expert:4", batch=128), "expert:4 is for experts, and num_experts is 0"),
    ],
)
def test_wrong_input_is_answered_with_numbers(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


# -- command line


def ran(capsys, flags: str) -> str:
    parser = argparse.ArgumentParser()
    bounds.add_bounds_command(parser.add_subparsers(required=True))
    args = parser.parse_args(["bounds", *flags.split()])
    args.run(args)
    return capsys.readouterr().out


LLAMA = "--preset=llama3.1-70b --topology=tpu7x:4x8x8 --mesh=fsdp:128,tensor:4"


def test_needs_no_jax():
    code = "import sys; from predicted import bounds; assert not {'jax', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(bounds.__file__).parents[1], check=True)


def test_command_line(capsys):
    out = ran(capsys, LLAMA)
    lines = {tuple(line.split()[:2]): line for line in out.splitlines() if line}
    assert "1,048,576 tokens a step" in out and "4,096 tokens a chip" in out and "predicted" in out
    assert "28,672     23,070 width" in lines["tensor", "2"] and lines["tensor", "2"].endswith("2.49")
    assert "!" not in lines["tensor", "2"] and "alpha" not in out
    assert "FSDP is bound by its messages from 289 chips on, the best mix from 478." in out
    assert lines["512", "2,048"].split()[2:] == ["398.8", "ms", "705.5", "ms", "57%", "529.2", "ms", "75%", "2"]


def test_command_line_marks_bounds_that_do_not_hold(capsys):
    out = ran(capsys, f"{LLAMA} --core_axis=fsdp --explain")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("! ") and ":" not in line] == ["tensor"]
    assert "F > Y * alpha:  Y = 4; alpha = C/W = 1.153 PFLOP/s / 100 GB/s = 1.154e+04" in out


def test_command_line_of_a_pipeline_and_slices(capsys):
    flags = "--preset=deepseek-v3 --topology=tpu7x:8x8x8 --num_slices=2 --mesh=data:2,pipe:2,fsdp:32,expert:16"
    out = ran(capsys, f"{flags} --batch=8192 --microbatches=8")
    assert "2 slices of data 2" in out and "; 32,768 tokens a chip" in out
    assert "bubble of 2 stages and 8 microbatches: 11.1% of the step" in out
    assert "bubble" not in ran(capsys, LLAMA)


def test_command_line_takes_the_models_flags(capsys):
    """Flags of every group of fields that describe a model are accepted."""
    mixture = "--num_experts=8 --experts_per_token=2 --expert_dim=512 --seq_len=1024 --batch=256 --num_layers=4"
    on = "--topology=tpu7x:4x4x4"  # without a preset the default is one host's slice
    out = ran(capsys, f"{mixture} --dtype=bfloat16 --fp8=dynamic --mesh=fsdp:* {on}")
    assert "fsdp 128" in out and "23,070 tokens" in out  # 3,845 * 2 * 8/2 * 3/4
    latent = "--kv_lora_rank=64 --rope_head_dim=32 --mesh=fsdp:64,context:2 --batch=64 --dtype=float32 --core_axis=fsdp"
    assert "context" in ran(capsys, f"{latent} {on}")


def test_json(capsys):
    result = json.loads(ran(capsys, f"{LLAMA} --json"))
    names = [(bound["name"], bound["wires"], bound["holds"]) for bound in result["bounds"]]
    assert names[:3] == [("fsdp", "2 of x, y, z", True), ("tensor", "die to die", True), ("tensor", "2 of x", True)]
    assert result["bounds"][2]["headroom"] == about(28_672 / 23_070) and result["kind"] == "predicted"
    assert result["mesh"] == {"fsdp": 128, "tensor": 4} and result["bubble"] == 0
    two = json.loads(ran(capsys, "--preset=llama3.1-70b --mesh=pipe:1,fsdp:64,tensor:2 --json"))
    assert two["mesh"] == {"fsdp": 64, "tensor": 2}
    assert result["strong_scaling"][-1]["chips"] == 9216 and result["stops_at"]["fsdp"] == about(289, abs=1)


def test_gradients_bind_in_fp8():
    """FLOPs are twice as fast, weights have one byte, gradients two: alpha doubles, times (1 + 2) / 4."""
    fsdp_of = lambda **flags: bounds.bounds_of(
        from_preset("llama3.1-70b", mesh="fsdp:128", batch=256, **flags), CHIPS["tpu7x"], (4, 4, 4)
    )[-1]
    assert fsdp_of(fp8="static").critical == about(fsdp_of().critical * 2 * 3 / 4)


@pytest.mark.slow
def test_plot(capsys, tmp_path):
    path = tmp_path / "scaling.png"
    ran(capsys, f"{LLAMA} --plot={path}")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"--plot needs matplotlib: pip install -e"):
        ran(capsys, f"{LLAMA} --plot=scaling.png")


def test_one_device(capsys):
    out = ran(capsys, "--preset=llama3.1-8b --topology=v5e:1x1 --mesh=fsdp:1")
    assert "one device" in out and "none: no device sends anything" in out
