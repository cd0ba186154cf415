"""Tests how far predictions are from measured steps, and the intervals that follow."""

import dataclasses
import json
import math
import statistics

import pytest

import recipes
from flags import from_preset
from hardware import parse_topology
from predicted import planner, residuals, workload
from predicted.step import predict
from predicted.workload import run_of


def predicted(topology: str = "tpu7x:4x4x4", num_slices: int = 1, **flags):
    return predict(run_of(from_preset(**flags), *parse_topology(topology), num_slices=num_slices))


def test_predictions_of_all_measured_runs():
    """Dense steps within 8%, mixtures within 15%, and eight of ten in an interval made without them."""
    of_kind = {
        kind: [math.exp(r) - 1 for k, r in residuals.residuals().values() if k == kind] for kind in residuals.KINDS
    }
    assert {kind: len(errors) for kind, errors in of_kind.items()} == {"dense": 13, "mixture": 17, "long": 2}
    assert max(map(abs, of_kind["dense"] + of_kind["long"])) < 0.08
    assert max(map(abs, of_kind["mixture"])) < 0.15
    assert statistics.median(abs(error) for errors in of_kind.values() for error in errors) < 0.03
    covered = [residuals.covered_without(name) for name in residuals.residuals()]
    assert 0.8 <= statistics.mean(covered) < 1  # an interval that holds all of them would be too wide


@pytest.mark.parametrize(
    "worse", [dict(elementwise=0.37), dict(fp8_matmul=1.0), dict(matmul=0.83), dict(overlapped_experts=True)]
)
def test_another_efficiency_predicts_worse(worse):
    """The root of the mean square of all residuals grows."""
    mean_square = lambda efficiency: statistics.mean(
        math.log(residuals.prediction_of(run, efficiency).step_s / run.measured_step_s) ** 2
        for run in residuals.measured_runs().values()
    )
    assert mean_square(dataclasses.replace(workload.MAXTEXT, **worse)) > 1.1 * mean_square(workload.MAXTEXT)


def test_an_interval_is_that_of_its_kind():
    """With n residuals of root mean square s, it has a half-width of 1.645 s (1 + 0.93/n) sqrt(1 + 1/n) in the log."""
    dense = predicted(preset="llama3.1-70b", mesh="fsdp:128", batch=128)
    values = [r for kind, r in residuals.residuals().values() if kind == "dense"]
    half = 1.645 * math.sqrt(sum(r * r for r in values) / 13) * (1 + (1.645**2 + 1) / 52) * math.sqrt(14 / 13)
    interval = residuals.interval(dense)
    assert math.log(interval.high_s / dense.step_s) == pytest.approx(half)
    assert math.log(dense.step_s / interval.low_s) == pytest.approx(half)
    assert interval.basis == "13 measured runs, dense"
    assert str(dataclasses.replace(interval, low_s=9.912, high_s=11.46)) == "9.9 to 11.5 s"
    mixture = predicted(preset="mixtral-8x7b", mesh="fsdp:128", batch=256)
    assert residuals.interval(mixture).high_s / mixture.step_s > interval.high_s / dense.step_s


@pytest.mark.parametrize(
    "words, flags",
    [
        ("long", dict(preset="llama3.1-8b", seq_len=131_072, mesh="fsdp:16,context:8", batch=16)),
        ("several slices", dict(preset="llama3.1-8b", num_slices=2, mesh="data:2,fsdp:128", batch=256)),
        ("a pipeline", dict(preset="llama3.1-8b", mesh="pipe:2,fsdp:64", batch=256, microbatches=4)),
        ("v5p", dict(preset="llama3.1-8b", topology="v5p:4x4x4", mesh="fsdp:64", batch=64)),
    ],
)
def test_what_was_never_measured_has_the_widest_interval_and_says_so(words, flags):
    prediction = predicted(**flags)
    assert residuals.interval(prediction).basis == f"all kinds: too few runs with {words}"
    widest = max(residuals.spread_of(kind)[0] for kind in residuals.KINDS)
    assert math.log(residuals.interval(prediction).high_s / prediction.step_s) == pytest.approx(widest, rel=0.15)


def test_a_higher_power_state_shortens_what_computes_and_nothing_else():
    flags = dict(preset="llama3.1-70b", mesh="fsdp:128", batch=256)
    third, seventh = (predicted(f"tpu7x+p_state={state}:4x4x4", **flags) for state in (3, 7))
    assert third.step_s == predicted(**flags).step_s
    for before, after in zip(third.parts, seventh.parts, strict=True):
        computes = before.name in ("matmul", "attention")
        if before.name != "loss":  # which also adds and reads
            assert after.seconds == pytest.approx(before.seconds * (1.9 / 2.2 if computes else 1)), before.name


def test_the_planner_says_which_families_it_cannot_separate(capsys):
    meshes = "fsdp:16", "context:2,fsdp:8", "tensor:8,fsdp:2"
    tried = [predicted("tpu7x:2x2x2", preset="llama3.1-8b", batch=32, mesh=mesh) for mesh in meshes]
    plan = planner.Plan(tried[0], tried, num_tried=3, num_fitting=3)
    within, alike = residuals.interval(plan.best), planner.inseparable(plan)
    assert [within.low_s < each.step_s < within.high_s for each in tried] == [True, True, False]
    assert alike == [planner.family(tried[1])]
    planner.print_as_text(plan, None, False)
    assert f"within the interval of the best, {within}: {', '.join(alike)}" in capsys.readouterr().out


def test_misses_are_sorted_and_complete(capsys):
    recipes.main(["--misses", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {row["run"] for row in rows} == set(residuals.measured_runs())
    errors = [abs(math.log(row["ratio"])) for row in rows]
    assert errors == sorted(errors, reverse=True)
    recipes.main(["--misses", "gpt-oss-120b-8k-bf16"])
    out = capsys.readouterr().out
    assert "mixture, 1 runs" in out and "- gpt-oss-120b-8k-bf16: it has tokamax's second grouped matmul" in out
    with pytest.raises(ValueError, match="gpt-oss-120b-8k"):
        recipes.main(["--misses", "gpt-oss-120b-8k"])
