"""Spikes: which steps are too far from the last ones, by numpy, and what a skipped one leaves as it was."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spikes
from config import Config

ROOT = Path(__file__).parents[1]
N = 6.0


@functools.partial(jax.jit, static_argnames="deviations")
def accepted(losses, norms, deviations=N):
    """(whether each step is accepted, the history after the last) of a series of losses and gradient norms."""
    _, history = spikes.guarded(None, Config(skip_spikes=deviations))

    def step(history, values):
        accept, history = spikes.judged(history, *values, deviations)
        return history, accept

    history, accept = lax.scan(step, history, (jnp.float32(losses), jnp.float32(norms)))
    return accept, history


def plainly(losses, norms, deviations=N):
    """The same by numpy in float64, over growing lists."""
    taken, accept = ([], []), []
    for values in zip(losses, norms, strict=True):
        if not np.isfinite(values).all():
            accept.append(False)
            continue
        last = [np.float64(each[-128:]) for each in taken]
        limits = [np.mean(w) + deviations * np.std(w, ddof=1) if len(w) >= 64 else np.inf for w in last]
        accept.append(all(value <= limit for value, limit in zip(values, limits, strict=True)))
        for each, value, limit in zip(taken, values, limits, strict=True):
            each.append(min(value, limit))
    return accept, taken


def series(length=400, seed=0):
    """Losses that fall as those of a run do, and gradient norms, both with noise."""
    rng, steps = np.random.default_rng(seed), np.arange(length)
    return 2 + 3 * np.exp(-steps / 40) + 0.05 * rng.standard_normal(length), np.exp(0.2 * rng.standard_normal(length))


def test_the_limit_is_that_of_numpy():
    """With spikes of the loss, of the norm, of neither, and values that are not finite."""
    losses, norms = series()
    losses[[20, 100, 300]], norms[[150, 300]], losses[200], norms[201] = 9, 40, np.nan, np.inf
    losses[250] = 0.0  # far below is no spike
    accept, history = accepted(losses, norms)
    expected, taken = plainly(losses, norms)
    assert accept.tolist() == expected
    assert np.flatnonzero(~np.array(expected)).tolist() == [100, 150, 200, 201, 300]  # 20 is too early
    assert int(history.spikes) == 3 and int(history.taken) == len(taken[0]) == 398
    place = 398 % 128
    for ours, theirs in zip(history[:2], taken, strict=True):
        np.testing.assert_allclose(np.roll(ours, -place), theirs[-128:], rtol=1e-5)


def test_a_spike_does_not_blind_the_history():
    """The spike behind one a hundred times as high is seen, too: the first one has not raised the limit beyond it."""
    losses, norms = series()
    losses[200], losses[210] = 500, 5
    accept, history = accepted(losses, norms)
    assert np.flatnonzero(~accept).tolist() == [200, 210] and float(history.loss_w.max()) < 3


def test_a_lasting_change_of_level_is_accepted_after_a_few_steps():
    """A corpus whose losses are eight standard deviations higher, say, with the default of --max_skipped."""
    losses, norms = series()
    losses[300:] += 8 * np.std(losses[172:300])
    refused = np.flatnonzero(~accepted(losses, norms)[0]) - 300
    assert 0 < len(refused) and max(refused) < Config.max_skipped


@pytest.mark.parametrize("run", ["tiny-plain-1000", "tiny-moe-plain-1000"])
def test_plain_runs_have_no_false_alarms(run):
    """None of 1,000 recorded steps is a spike."""
    losses = np.array(json.loads((ROOT / f"benchmarks/endurance_runs/{run}.json").read_text())["losses"], float)
    accept, history = accepted(losses, np.ones(1000))
    assert accept.all() and int(history.spikes) == 0


def test_off_is_the_state_of_before():
    """A checkpoint has no history then, and an older one is restored."""
    assert spikes.guarded("state", Config()) == "state"
    assert spikes.joined(*spikes.split("state", Config())) == "state"
    on = spikes.guarded("state", Config(skip_spikes=N))
    assert spikes.joined(*spikes.split(on, Config(skip_spikes=N))) == on
