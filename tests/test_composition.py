"""Configurations of the pairwise cover train as the reference does: the first few of benchmarks/composition.py."""

import pytest

from benchmarks.composition import DEFAULTS, ROOT, SETTINGS, check, config_of, covering, name_of, pairs

CASES = covering()[:8]  # the first, which have most of the pairs
CASES += [next(settings for settings in covering()[8:] if settings["fp8"] != "none")]


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES, ids=name_of)
def test_three_steps_equal_the_reference(settings):
    check(settings)


def test_the_cover_is_complete_and_these_have_most_of_its_pairs():
    every, run = (set().union(*map(pairs, cases)) for cases in (covering(), CASES))
    assert len(covering()) >= 60
    assert f"({len(covering())} configurations, of which pytest runs {len(CASES)})" in (ROOT / "README.md").read_text()
    assert len(run) > 0.6 * len(every)
    values = {name: {settings[name] for settings in covering()} for name in SETTINGS}
    assert values == {name: {*known} for name, known in SETTINGS.items()}


def test_what_would_hang_is_refused():
    """Stages that differ in which of their layers are global, where global layers and others move different things."""
    settings = DEFAULTS | {"pipe": 2, "context": 2, "model": "window", "pipeline_schedule": "circular"}
    with pytest.raises(ValueError, match="all stages must have their global layers at the same places"):
        config_of(settings | {"microbatches": 4})
    config_of(settings | {"pipeline_schedule": "1f1b"})
