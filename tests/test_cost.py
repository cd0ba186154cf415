"""The cost of a training run, against the scaling book, by hand, and against runs with random failures.

The tests of the scaling book (https://jax-ml.github.io/scaling-book) are of part 6, "Training LLaMA 3 on TPUs". Where
the book's figures changed between 2025 and 2026, both are tested. Where it rounds or is wrong, the test says so.
"""

import argparse
import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

import roofline
from flags import PRESETS, from_preset
from hardware import CHIPS, si
from predicted import cost, transformer
from predicted.cost import best_interval_s, chips_needed, goodput, training_run

V5P = dataclasses.replace(CHIPS["v5p"], hbm_bytes=96e9)  # the book's 96 GB
LLAMA = from_preset("llama3.1-70b")
YEAR_S = 365 * 86_400


# -- the scaling book, part 6


def test_book_parameters():
    """56.3e9 + 2.1e9 + 12e9 = 70.4e9 is a sum of rounded numbers; the exact one is 70.55e9."""
    parts = transformer.parts(LLAMA)
    assert parts["mlp"].params == pytest.approx(56.37e9, abs=0.005e9)  # truncated to 56.3
    assert parts["embedding"].params + parts["unembedding"].params == pytest.approx(2.1e9, abs=0.05e9)
    assert parts["attention"].params == pytest.approx(12e9, abs=0.5e9)
    assert transformer.num_params(LLAMA) == pytest.approx(70.55e9, abs=0.005e9)


def test_book_flops_a_token():
    """6 * 70e9 = 4.2e11, "about half a TFLOP", and about 1 ms of a v5p. With attention at 8192 it is 4.5e11."""
    run = training_run(6 * 70e9, V5P, 1, mfu=1)
    assert run.flops == 4.2e11
    assert run.busy_s == pytest.approx(1e-3, abs=0.5e-3)
    assert run.busy_s == pytest.approx(0.915e-3, abs=0.0005e-3)
    matmuls = 6 * (transformer.num_params(LLAMA) - 128_256 * 8192)
    attention = 6 * 64 * 2 * 128 * 80 * 8192 / 2
    assert transformer.train_flops_per_token(LLAMA) == pytest.approx(matmuls + attention, rel=1e-4)  # without norms


def test_book_flops_of_the_run():
    """15e12 tokens take 6.3e24 FLOPs."""
    assert cost.train_flops(6 * 70e9, 15e12) == pytest.approx(6.3e24, rel=1e-12)


def test_book_years_of_one_chip():
    """One chip takes 435 years."""
    assert training_run(6.3e24, V5P, 1, mfu=1).seconds / YEAR_S == pytest.approx(435, abs=0.5)


def test_book_days_of_a_pod():
    """8960 chips at 40%: 3.8e6 s, 44 days."""
    run = training_run(6.3e24, V5P, 8960, mfu=0.4)
    assert run.seconds == pytest.approx(3.8e6, abs=0.05e6)
    assert round(run.days) == 44 and run.days == pytest.approx(44.3, abs=0.05)


@pytest.mark.parametrize(
    "checkpoints, exact_tb, total, chips, days",
    [(3, 16.43, 16.5e12, 171, 2305), (2, 11.19, 11.2e12, 117, 3369)],
    ids=["2025", "2026"],
)
def test_book_least_chips(checkpoints, exact_tb, total, chips, days):
    """2025: 16.5 TB, 171 chips, 2305 days; 2026: 11.2 TB, 117 chips, 3369 days.

    16.5 is a sum of rounded numbers; the exact one is 16.43. 171 is 171.9, truncated: it takes 172. The days are
    computed from 44 days of a pod, which are 44.3.
    """
    exact = 2 * 70e9 + 8 * 70e9 + 2 * 8192 * 4e6 * checkpoints * 80
    assert exact == pytest.approx(exact_tb * 1e12, abs=0.005e12)
    least = cost.least_chips(total, V5P)
    assert least == cost.least_chips(exact, V5P) == math.ceil(total / 96e9) and chips == {172: 171, 117: 117}[least]
    cost.check_fit(total, V5P, least)
    with pytest.raises(ValueError, match="short by"):
        cost.check_fit(total, V5P, least - 1)
    run, pod = training_run(6.3e24, V5P, chips, mfu=0.4), training_run(6.3e24, V5P, 8960, mfu=0.4)
    assert run.days * 44 / pod.days == pytest.approx(days, abs=1)


@pytest.mark.parametrize("total, gb", [(16.5e12, 1.8), (11.2e12, 1.3)], ids=["2025", "2026"])
def test_book_bytes_of_a_chip(total, gb):
    """1.8 and 1.3 GB a chip: 8960 chips of that memory hold the state exactly."""
    small = dataclasses.replace(V5P, hbm_bytes=total / 8960)
    assert cost.least_chips(total, small) == 8960
    assert small.hbm_bytes == pytest.approx(gb * 1e9, abs=0.05e9)


@pytest.mark.parametrize("chip, price, flops", [("v5p", 4.2, 3.93e17), ("v5e", 1.2, 5.91e17)])
def test_book_flops_for_a_dollar(chip, price, flops):
    """Part 8, prices of February 2025: v5p 3.9e17 and v5e 5.8e17 (2026), which should be 5.9e17.

    In 2025 the table had 1.09e14 and 1.64e14 "FLOPs / $", which were FLOP/s for a dollar an hour.
    """
    run = training_run(1e24, CHIPS[chip], 1, mfu=1, price_per_chip_hour=price)
    assert run.flops / run.cost == pytest.approx(flops, abs=0.005e17)
    assert run.flops / run.cost / 3600 == pytest.approx({"v5p": 1.09e14, "v5e": 1.64e14}[chip], abs=0.005e14)


def test_chinchilla():
    """Hoffmann et al. 2022: 1.4e12 tokens for 70e9 parameters; in table 3, 205.1e9 for 10e9 and 21.2e12 for 1e12."""
    assert cost.chinchilla_tokens(70e9) == 1.4e12
    assert cost.chinchilla_tokens(10e9) == pytest.approx(205.1e9, rel=0.03)
    assert cost.chinchilla_tokens(1e12) == pytest.approx(21.2e12, rel=0.06)
    assert cost.chinchilla_tokens(3, 7) == 21


# -- by hand


def test_a_run_by_hand():
    """7200 FLOPs on 2 chips of 1 FLOP/s at an MFU of 1/2, a goodput of 4/5 and a price of 3 a chip-hour."""
    chip = dataclasses.replace(V5P, bf16_flops_per_s=1)
    run = training_run(7200, chip, 2, mfu=0.5, goodput=0.8, price_per_chip_hour=3)
    assert (run.busy_s, run.seconds, run.days, run.chip_hours, run.cost) == (7200, 9000, 9000 / 86_400, 5, 15)
    given = training_run(7200, chip, 2, busy_s=7200, goodput=0.8)
    assert (given.mfu, given.seconds, given.cost) == (0.5, 9000, None)
    assert training_run(7200, chip, 2, busy_s=3600).mfu == 1
    assert training_run(7200, dataclasses.replace(chip, fp8_flops_per_s=4), 2, mfu=0.5, dtype="fp8").busy_s == 1800


def test_more_chips_take_less_time_and_cost_as_much():
    runs = [training_run(1e24, V5P, chips, mfu=0.4, price_per_chip_hour=2) for chips in (1, 10, 1000)]
    assert [run.days / runs[0].days for run in runs] == pytest.approx([1, 0.1, 0.001], rel=1e-12)
    assert [run.cost / runs[0].cost for run in runs] == pytest.approx([1, 1, 1], rel=1e-12)


def test_chips_needed_are_the_fewest():
    rng = random.Random(0)
    for _ in range(200):
        flops, days = 10 ** rng.uniform(20, 25), rng.uniform(1, 100)
        options = dict(mfu=rng.uniform(0.1, 0.7), goodput=rng.uniform(0.5, 1))
        chips = chips_needed(flops, V5P, days, **options)
        assert training_run(flops, V5P, chips, **options).days <= days
        assert chips == 1 or training_run(flops, V5P, chips - 1, **options).days > days
    assert chips_needed(6.3e24, V5P, 44.3, mfu=0.4) == pytest.approx(8960, abs=10)


# -- goodput


def test_goodput_by_hand():
    """100 s of steps and 10 of saving leave 10/11. A failure every 1000 s loses 25 + 55 s: 0.92 of the time is left."""
    assert goodput(interval_s=100) == 1
    assert goodput(interval_s=100, save_s=10) == 100 / 110
    assert goodput(interval_s=100, save_s=10, failure_s=1000, restart_s=25) == pytest.approx(0.92 / 1.1, rel=1e-12)


@pytest.mark.parametrize("interval_s, save_s, failure_s, restart_s", [(600, 30, 20_000, 300), (300, 60, 5_000, 0)])
def test_goodput_of_runs_with_random_failures(interval_s, save_s, failure_s, restart_s):
    """Failures come at exponential intervals; each returns the run to its last finished checkpoint."""
    rng = random.Random(0)
    wall_s = useful_s = 0.0
    while useful_s < 4000 * failure_s:
        until_s = rng.expovariate(1 / failure_s)
        useful_s += until_s // (interval_s + save_s) * interval_s
        wall_s += until_s + restart_s
    options = dict(interval_s=interval_s, save_s=save_s, failure_s=failure_s, restart_s=restart_s)
    # The formula is of first order in I/F and R/F: the error is their square. Sampling: 1 / sqrt(4000) of the loss.
    lost = (restart_s + interval_s + save_s) / failure_s
    assert useful_s / wall_s == pytest.approx(goodput(**options), abs=lost**2)
    assert goodput(interval_s=interval_s, save_s=save_s) - goodput(**options) > 3 * lost**2


def test_the_best_interval_by_search():
    for save_s, failure_s in ((10, 10_000), (30, 100_000)):
        share = lambda interval_s, S=save_s, F=failure_s: goodput(interval_s=interval_s, save_s=S, failure_s=F)
        best = max(range(1, failure_s // 4), key=share)
        assert best_interval_s(save_s, failure_s) == pytest.approx(best, rel=0.03)
        assert share(best) - share(best_interval_s(save_s, failure_s)) < 1e-4


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: training_run(1e20, V5P, 1), "either an MFU"),
        (lambda: training_run(1e20, V5P, 1, mfu=0.4, busy_s=1), "either an MFU"),
        (lambda: training_run(1e20, V5P, 0, mfu=0.4), "num_chips=0"),
        (lambda: training_run(-1, V5P, 1, mfu=0.4), "flops=-1"),
        (lambda: training_run(math.nan, V5P, 1, mfu=0.4), "flops=nan"),
        (lambda: training_run(1e20, V5P, 1, mfu=0), "mfu=0"),
        (lambda: training_run(1e20, V5P, 1, mfu=1.1), "mfu=1.1"),
        (lambda: training_run(1e20, V5P, 1, mfu=0.4, goodput=0), "goodput=0"),
        (lambda: training_run(1e20, V5P, 1, mfu=0.4, price_per_chip_hour=-1), "price_per_chip_hour=-1"),
        (lambda: training_run(4.59e16, V5P, 1, busy_s=60), "take 1 v5p 100 s at their peak, .* too short by 40 s"),
        (lambda: training_run(1e20, V5P, 1, busy_s=0), "busy_s=0"),
        (lambda: training_run(1e20, CHIPS["v4"], 1, mfu=0.4, dtype="fp8"), "v4 has no published speed"),
        (lambda: chips_needed(1e20, V5P, 0, mfu=0.4), "days=0"),
        (lambda: cost.train_flops(1, 0), "tokens=0"),
        (lambda: cost.chinchilla_tokens(-1), "params=-1"),
        (lambda: cost.check_fit(200e9, V5P, 2), "192 GB: short by 8 GB; 3 chips hold it"),
        (lambda: goodput(interval_s=0), "interval_s=0"),
        (lambda: goodput(interval_s=1, save_s=-1), "save_s=-1"),
        (lambda: goodput(interval_s=1, failure_s=0), "failure_s=0"),
        (lambda: goodput(interval_s=100, failure_s=60, restart_s=20), "loses 70 s, .* every 60 s: 10 s too soon"),
        (lambda: best_interval_s(0, 1), "save_s=0"),
    ],
)
def test_wrong_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# -- command line


def ran(capsys, command: str) -> str:
    parser = argparse.ArgumentParser(prog="roofline.py")
    cost.add_cost_command(parser.add_subparsers(required=True))
    args = parser.parse_args(command.split())
    args.run(args)
    return capsys.readouterr().out


BOOK = "cost --preset=llama3.1-70b --tokens=15e12 --chips=8960 --chip=v5p --mfu=0.4"


def test_cost_command(capsys):
    """The book's run takes 7% longer with attention and without the look-up of the embedding."""
    out = ran(capsys, f"{BOOK} --explain")
    for words in (
        "llama3.1-70b, 15,000,000,000,000 tokens (given) on 8,960 v5p, predicted",
        "6.738e+24 FLOPs, 4.492e+11 a token; 6 * parameters * tokens = 6.35e+24",
        "40.0% of 459 TFLOP/s a chip, given; goodput 100.0%, given",
        "47.41 days, 4.096e+06 s",
        "10,194,774 chip-hours; pods of 16x20x28: 1",
        "FLOPs / (n*C*MFU) = 6.738e+24 / (8,960 * 459 TFLOP/s * 0.4) = 4.096e+06 s",
        "busy / goodput = 4.096e+06 s / 1",
        "n * seconds / 3600 = 8,960 * 4.096e+06 / 3600",
    ):
        assert words in out, out
    assert "cost  " not in out and "in the currency" not in out
    assert max(map(len, out.splitlines())) <= 110
    out = ran(capsys, f"{BOOK} --price=2 --days=20")
    assert "20,389,549, in the currency of the price, 2 a chip-hour" in out
    assert "in 20 days 21,240 chips" in out


def test_cost_json(capsys):
    result = json.loads(ran(capsys, f"{BOOK} --price=2 --days=20 --goodput=0.8 --json"))
    flops = 15e12 * transformer.train_flops_per_token(LLAMA)
    run = training_run(flops, CHIPS["v5p"], 8960, mfu=0.4, goodput=0.8, price_per_chip_hour=2)
    expected = dict(
        dataclasses.asdict(run),
        kind="predicted",
        chip="v5p",
        tokens=15e12,
        days=run.days,
        chip_hours=run.chip_hours,
        cost_in_the_currency_of_the_price=run.cost,
        chips_for_days=chips_needed(flops, CHIPS["v5p"], 20, mfu=0.4, goodput=0.8),
        pods=1,
        state_bytes=sum(transformer.state_bytes(LLAMA).values()),
    )
    assert {name: result[name] for name in expected} == expected
    assert json.loads(ran(capsys, f"{BOOK} --json"))["cost_in_the_currency_of_the_price"] is None


def test_tokens_of_a_run(capsys):
    """They are given, those of the steps, or 20 a parameter."""
    result = lambda flags: json.loads(ran(capsys, f"cost --preset=llama3.1-8b --chips=64 --mfu=0.4 --json {flags}"))
    assert result("--steps=10 --batch=4 --seq_len=1024")["tokens"] == 10 * 4 * 1024
    assert result("--chinchilla")["tokens"] == 20 * transformer.num_params(from_preset("llama3.1-8b"))
    assert result("--tokens=1e9")["tokens"] == 1e9
    short, long = result("--tokens=1e9 --seq_len=1024"), result("--tokens=1e9 --seq_len=65536")
    assert long["flops"] > 1.5 * short["flops"]


def test_a_step_gives_the_mfu(capsys):
    """100 steps of 2 s on 64 chips take 200 s, whatever the tokens of a step."""
    flags = "cost --preset=llama3.1-8b --chips=64 --steps=100 --step_s=2"
    result = json.loads(ran(capsys, f"{flags} --json"))
    assert result["busy_s"] == pytest.approx(200, rel=1e-12)
    per_step = transformer.train_flops_per_token(from_preset("llama3.1-8b")) * 128 * 8192
    assert result["mfu"] == pytest.approx(per_step / (2 * 64 * 2307e12), rel=1e-12)
    assert "* 2 s = 200 s" in ran(capsys, f"{flags} --explain")


def ran_step(capsys, command: str) -> str:
    roofline.main(command.split())
    return capsys.readouterr().out


def test_the_step_is_predicted_for_a_slice_and_a_mesh(capsys):
    command = "--preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --remat=save_qkv_proj"
    step = json.loads(ran_step(capsys, f"step {command} --json"))
    result = json.loads(ran(capsys, f"cost {command} --tokens=15e12 --goodput=0.9 --json"))
    assert result["mfu"] == pytest.approx(step["mfu"]) and result["num_chips"] == 64
    assert result["seconds"] == pytest.approx(15e12 / (256 * 8192) * step["step_s"] / 0.9)
    assert f"of the predicted {si(step['step_s'], 's')} a step" in ran(capsys, f"cost {command} --tokens=15e12")
    with pytest.raises(ValueError, match="--topology predicts the step: use it without --chip"):
        ran(capsys, f"cost {command} --chips=64")
    two = json.loads(ran(capsys, f"cost {command} --tokens=15e12 --num_slices=2 --mesh=data:2,fsdp:128 --json"))
    assert two["num_chips"] == 128
    fast = json.loads(ran(capsys, f"cost {command} --tokens=15e12 --fp8=static --json"))
    assert fast["mfu"] == pytest.approx(
        json.loads(ran_step(capsys, f"step {command} --fp8=static --json"))["own_precision_mfu"]
    )
    with pytest.raises(ValueError, match=r"llama3.1-70b does not fit on tpu7x:2x2x1, .* short"):
        ran(capsys, "cost --preset=llama3.1-70b --topology=tpu7x:2x2x1 --batch=8")


def test_days_give_the_chips(capsys):
    result = json.loads(ran(capsys, "cost --preset=llama3.1-8b --tokens=1e12 --days=7 --mfu=0.4 --json"))
    assert result["num_chips"] == result["chips_for_days"] and 6 < result["days"] <= 7


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_cost(preset, capsys):
    out = ran(capsys, f"cost --preset={preset} --tokens=1e12 --chips=512 --mfu=0.4")
    assert f"{1e12 * transformer.train_flops_per_token(from_preset(preset)):.4g} FLOPs" in out


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--mfu=0.4", "cost needs --chips, or --days and --mfu"),
        ("--days=7 --step_s=1", "cost needs --chips, or --days and --mfu"),
        ("--chips=64", "either an MFU"),
        ("--chips=64 --mfu=0.4 --step_s=1", "either an MFU"),
        ("--chips=4 --mfu=0.4 --chip=v9", "'v9'"),
        ("--chips=4 --mfu=0.4 --preset=llama3.1-405b --chip=v5e", "short by 6.425 TB; 378 chips hold it"),
        ("--chips=0 --mfu=0.4", "--chips=0 must be 1 or more"),
        ("--chips=4 --mfu=0.4 --tokens=-1", "tokens=-1"),
        ("--chips=4 --mfu=0.4 --price=-1", "price_per_chip_hour=-1"),
        ("--chips=512 --mfu=0.4 --chinchilla --preset=deepseek-v3", "--chinchilla is for dense models"),
        ("--chips=4 --mfu=0.4 --preset=lama", "does not exist"),
        ("--chips=4 --mfu=0.4 --matmul_dtype=int8", "no published speed"),
    ],
)
def test_wrong_cost_command(capsys, flags, words):
    with pytest.raises(ValueError) as error:
        ran(capsys, f"cost {flags}")
    assert words in str(error.value)


def test_needs_no_jax():
    code = "import sys; from predicted import cost; assert not {'jax', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(cost.__file__).parents[1], check=True)
