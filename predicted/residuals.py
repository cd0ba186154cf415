"""How far predictions have been from measured steps, and the interval that follows for a new prediction.

    python roofline.py step --recipe=llama3.1-70b-8k-bf16     a step, and between which seconds nine of ten would be
    python recipes.py --misses                                all measured runs, the worst first

**Idea.** Each measured run (published.py) is predicted as MaxText's program, which it was (workload.MAXTEXT). Its
residual is the logarithm of predicted over measured seconds. A new prediction is taken to be as far off as those of
runs of its kind were.

**Formula.** With the residuals r of the n runs of a kind:

    s = sqrt(mean(r^2))                                 it has the bias, too: predictions are not corrected by it
    interval = step * exp(-t s), step * exp(t s)        t = 1.645 (1 + 0.93/n) sqrt(1 + 1/n): nine of ten, if residuals
                                                        are normal; the second factor is that of Student's t

**Kinds.** `long` has sequences of 32,768 tokens or more, `mixture` has experts, `dense` is the rest. There are fewer
than `FEWEST` runs of some kinds, and no run was measured that has several slices, a pipeline, or another chip than
TPU7x and v6e. For these, s is the largest of all kinds, and the interval's basis says so.

**Left out.** The steps of this project's program: nobody measured one. Their predictions differ from MaxText's by
compiled figures (kernels, copies), and have the same interval. Two efficiencies were chosen to fit all of these runs
(workload.py). `covered_without` leaves a run out of s, but not out of that choice.
"""

import functools
import math
from dataclasses import dataclass

import flags as flags_lib
from hardware import parse_topology
from predicted.step import Prediction, predict
from predicted.workload import MAXTEXT, Efficiency, run_of
from published import OTHER_RUNS, RECIPES, Recipe

LONG = 32_768  # tokens from which a sequence is long; those of Google Cloud's guide have 8k and 128k
FEWEST = 4  # runs of a kind from which its own spread is taken
KINDS = "dense", "mixture", "long"
_Z = 1.645


@dataclass(frozen=True)
class Interval:
    """The seconds between which a step is expected, nine times of ten, and the runs on which that is based."""

    low_s: float
    high_s: float
    basis: str

    def __str__(self) -> str:
        digits = max(0, 2 - math.floor(math.log10(self.high_s)))
        return f"{self.low_s:.{digits}f} to {self.high_s:.{digits}f} s"


def kind_of(prediction: Prediction) -> str:
    """One of `KINDS`."""
    config = prediction.run.config
    return "long" if config.seq_len >= LONG else "mixture" if config.num_experts else "dense"


def prediction_of(run: Recipe, efficiency: Efficiency = MAXTEXT, *, recipe: str = "") -> Prediction:
    """The prediction of a run of published.py, by default as MaxText's program; `recipe` is its name among RECIPES."""
    config = flags_lib.from_recipe(recipe) if recipe else flags_lib.from_preset(run.preset, **run.flags)
    return predict(run_of(config, *parse_topology(run.topology), num_slices=run.num_slices, efficiency=efficiency))


def measured_runs() -> dict[str, Recipe]:
    """{name: run} of all that were measured."""
    return {name: run for name, run in (RECIPES | OTHER_RUNS).items() if run.measured_step_s}


@functools.cache
def residuals() -> dict[str, tuple[str, float]]:
    """{name of a measured run: (kind, log of predicted over measured seconds)}."""
    predictions = {name: prediction_of(run) for name, run in measured_runs().items()}
    return {
        name: (kind_of(prediction), math.log(prediction.step_s / measured_runs()[name].measured_step_s))
        for name, prediction in predictions.items()
    }


def spread_of(kind: str, without: str = "") -> tuple[float, int]:
    """Returns (t * s for a new run of a kind, n); of a kind with too few runs (1.645 times the largest s, 0).

    Args:
      without: the name of a run that is left out.
    """
    by_kind: dict[str, list[float]] = {name: [] for name in KINDS}
    for name, (kind_of_run, residual) in residuals().items():
        if name != without:
            by_kind[kind_of_run].append(residual)
    mean_square = lambda values: sum(value * value for value in values) / len(values)
    spreads = {name: math.sqrt(mean_square(rs)) for name, rs in by_kind.items() if len(rs) >= FEWEST}
    if kind in spreads:
        n = len(by_kind[kind])
        return _Z * (1 + (_Z**2 + 1) / (4 * n)) * math.sqrt(1 + 1 / n) * spreads[kind], n
    return _Z * max(spreads.values()), 0


def interval(prediction: Prediction) -> Interval:
    """Returns the interval of a predicted step. Its basis names what was never measured."""
    run, kind = prediction.run, kind_of(prediction)
    chip = run.chip.name.partition("+")[0]
    unmeasured = ["several slices"] if run.num_slices > 1 else []
    unmeasured += ["a pipeline"] if run.pipe > 1 else []
    unmeasured += [chip] if chip not in ("tpu7x", "v6e") else []
    spread, n = spread_of("" if unmeasured else kind)
    basis = f"{n} measured runs, {kind}" if n else f"all kinds: too few runs with {' and '.join(unmeasured) or kind}"
    return Interval(prediction.step_s * math.exp(-spread), prediction.step_s * math.exp(spread), basis)


def covered_without(name: str) -> bool:
    """Whether a measured step is in the interval of its prediction, from the residuals of all other runs."""
    kind, residual = residuals()[name]
    return abs(residual) <= spread_of(kind, without=name)[0]
