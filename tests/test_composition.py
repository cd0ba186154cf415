"""Pairs of settings against the reference: the first configurations of the cover in benchmarks/composition.py."""

import functools

import pytest

from benchmarks.composition import DEFAULTS, ROOT, SETTINGS, check, config_of, covering, name_of, pairs


@functools.cache  # and not while tests are collected: it takes seconds
def cases() -> list[dict]:
    """The first ones have most new pairs; the last one is in FP8."""
    return [*covering()[:3], next(settings for settings in covering()[3:] if settings["fp8"] != "none")]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_three_steps_equal_the_reference(number):
    print(name_of(cases()[number]))
    check(cases()[number])


@pytest.mark.slow
def test_the_cover_is_complete_and_the_cases_have_a_third_of_its_pairs():
    all_pairs, tested = (set().union(*map(pairs, chosen)) for chosen in (covering(), cases()))
    assert len(covering()) >= 60
    assert (
        f"({len(covering())} configurations, of which pytest runs {len(cases())})"
        in (ROOT / "docs/COMMANDS.md").read_text()
    )
    assert len(tested) > len(all_pairs) / 3
    values = {name: {settings[name] for settings in covering()} for name in SETTINGS}
    assert values == {name: {*choices} for name, choices in SETTINGS.items()}


def test_stages_that_would_deadlock_are_refused():
    """Stages with global layers at different places would run different collectives at the same time."""
    settings = DEFAULTS | {"pipe": 2, "context": 2, "model": "window", "pipeline_schedule": "circular"}
    with pytest.raises(ValueError, match="all stages must have their global layers at the same places"):
        config_of(settings | {"microbatches": 4})
    config_of(settings | {"pipeline_schedule": "1f1b"})
