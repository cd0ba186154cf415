"""Schedules: the learning rate of every update, and which change of it a resumed run may make."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import numpy as np
import optax
import pytest

import data_mixtures
import placement
import reference
import rules
import schedules
import train
from config import Config

WSD = dict(schedule="wsd", warmup_ratio=0.25, decay_ratio=0.3, final_lr_ratio=0.2, steps=40, learning_rate=0.02)
N, W, BEGIN, PEAK, FINAL = 40, 10, 28, 0.02, 0.004  # of WSD
UPDATES = np.arange(1, N + 6)  # and some past the last step


def rates(config: Config) -> np.ndarray:
    """The learning rates of the first updates, one after the other."""
    return np.array([schedules.learning_rate(config)(count) for count in range(len(UPDATES))])


def test_the_default_is_the_cosine_of_optax_bit_for_bit():
    config = Config()
    theirs = optax.warmup_cosine_decay_schedule(0.0, 3e-3, int(0.075 * 300), 300, 3e-3 * 0.1)
    ours = schedules.learning_rate(config)
    assert [float(ours(count)) for count in (0, 20, 21, 22, 150, 299, 310)] == [
        float(theirs(count + 1)) for count in (0, 20, 21, 22, 150, 299, 310)
    ]


@pytest.mark.parametrize(
    "flags, expected",
    [
        (dict(), np.interp(UPDATES, [0, W, BEGIN, N], [0, PEAK, PEAK, FINAL])),
        (dict(warmup_ratio=0.0), np.interp(UPDATES, [BEGIN, N], [PEAK, FINAL])),
        (dict(warmup_ratio=0.7, final_lr_ratio=0.0), np.interp(UPDATES, [0, BEGIN, N], [0, PEAK, 0])),
        (
            dict(decay_shape="1-sqrt", warmup_ratio=0.0),
            PEAK * (1 - 0.8 * np.sqrt(np.clip((UPDATES - BEGIN) / (N - BEGIN), 0, 1))),
        ),
    ],
    ids=str,
)
def test_warm_up_stable_decay_is_its_formula(flags, expected):
    config = Config(**WSD | flags)
    np.testing.assert_allclose(rates(config), expected, rtol=2e-6, atol=1e-9)
    plain = [reference.learning_rate(count, config) for count in range(len(UPDATES))]
    np.testing.assert_allclose(plain, expected, rtol=1e-12, atol=1e-15)


def test_constant_stays_after_the_warm_up():
    config = Config(schedule="constant", warmup_ratio=0.25, steps=40, learning_rate=0.02)
    expected = np.interp(UPDATES, [0, W], [0, PEAK])
    np.testing.assert_allclose(rates(config), expected, rtol=1e-6)
    np.testing.assert_allclose([reference.learning_rate(n - 1, config) for n in UPDATES], expected, rtol=1e-12)


SAVED = dataclasses.asdict(Config(**WSD))


@pytest.mark.parametrize(
    "flags, updates, note",
    [
        (dict(), 20, ""),
        (dict(learning_rate=0.5), 30, ""),  # the peak is no number of the schedule
        (dict(steps=80), 20, "at 100.0% of its peak, and decays (linear) from update 56 on, to 20.0% at update 80"),
        (dict(steps=30), 20, "at 100.0% of its peak, and decays (linear) from update 21 on, to 20.0% at update 30"),
        (dict(decay_ratio=0.5, decay_shape="1-sqrt"), 19, "decays (1-sqrt) from update 20 on, to 20.0% at update 40"),
        (dict(schedule="constant"), 27, "at 100.0% of its peak, and stays there"),
        (dict(decay_ratio=0.5), 2, "at 30.0% of its peak, and rises until update 10"),
        (dict(final_lr_ratio=0.0), 27, "to 0.0% at update 40"),
    ],
    ids=str,
)
def test_a_stable_phase_is_extended_or_decayed(flags, updates, note):
    wanted = WSD | flags
    if wanted["schedule"] == "constant":
        wanted = {name: value for name, value in wanted.items() if name not in ("decay_ratio", "final_lr_ratio")}
    said = schedules.continuation(SAVED, Config(**wanted), updates)
    assert note in said and bool(said) == bool(note)


@pytest.mark.parametrize(
    "flags, updates, why",
    [
        (
            dict(steps=80),
            33,
            r"update 34, from 60.0% .* 100.0%: .* decays \(linear\) from update 28.* --steps=40,",
        ),
        (dict(steps=80), 40, "from 20.0% of its peak"),
        (dict(steps=80), 4, r"from 50.0% of its peak to 25.0%: the checkpoint's rises until update 10;"),
        (dict(final_lr_ratio=0.0), 30, r"resume with --final_lr_ratio=0.2, or"),
        (dict(decay_shape="1-sqrt"), 30, r"--decay_shape=linear"),
    ],
    ids=str,
)
def test_a_rate_that_would_jump_is_refused(flags, updates, why):
    with pytest.raises(ValueError, match=f"the learning rate would jump at {'' if why[0] == 'u' else '.*'}{why}"):
        schedules.continuation(SAVED, Config(**WSD | flags), updates)


def test_a_cosine_cannot_become_stable_but_may_be_extended():
    before = dict(steps=40, warmup_ratio=0.25)  # an older checkpoint, without a schedule
    assert schedules.continuation(before, Config(steps=80, warmup_ratio=0.25), 30) == ""
    with pytest.raises(ValueError, match=r"from 16.0% of its peak to 100.0%.* by a cosine .*=cosine --steps=40"):
        schedules.continuation(before, Config(**WSD | dict(steps=80)), 34)


# -- batches that grow


def test_the_order_of_the_data_is_unbroken_over_stages_and_a_resume():
    """Every sequence comes once and in order, whatever the batch of its step, and wherever the run was stopped."""
    straight = rules.rampup("0:4,3:8,5:12", 12)
    assert straight == ((0, 4), (3, 8), (5, 12)) and rules.rampup("", 12) == ((0, 12),)
    sizes = [data_mixtures.batch_of(step, straight) for step in range(8)]
    assert sizes == [4, 4, 4, 8, 8, 12, 12, 12]
    assert [data_mixtures.first_sequence(step, straight) for step in range(9)] == [0, *itertools.accumulate(sizes)]
    for stop in range(9):
        assert data_mixtures.continued(straight, stop, straight) == straight
    other = rules.rampup("0:4,7:16", 16)  # from step 4 on with other stages
    assert data_mixtures.continued(straight, 4, other) == ((0, 4), (3, 8), (4, 4), (7, 16))
    assert data_mixtures.continued(straight, 4, 8) == ((0, 4), (3, 8))


def test_only_the_steps_that_come_are_compiled():
    sizes = lambda first, steps: train.batches_to_come(
        SimpleNamespace(config=SimpleNamespace(steps=steps), batches=((0, 4), (3, 8), (5, 12))),
        SimpleNamespace(first_step=first),
    )
    assert sizes(0, 20) == [4, 8, 12] and sizes(0, 5) == [4, 8] and sizes(2, 6) == [4, 8, 12]
    assert sizes(3, 20) == [8, 12] and sizes(5, 20) == [12] and sizes(9, 20) == [12]


@pytest.mark.parametrize(
    "stages, why",
    [
        ("4", "must be STEP:BATCH,... as in"),
        ("0:4,", "must be STEP:BATCH"),
        ("1:4,3:16", "must begin at step 0"),
        ("0:0,3:16", "with a batch of 1 or more"),
        ("0:4,3:16,3:16", "both steps and batches must grow"),
        ("0:16,3:4", "both steps and batches must grow"),
        ("0:4,3:8", "ends with 8 sequences, not with batch=16: --batch=8"),
    ],
)
def test_stages_that_no_run_can_have_are_refused(stages, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        rules.check(Config(batch_rampup=stages), placement.parse_mesh(""))


def test_every_stage_must_divide_over_the_mesh():
    config = Config(batch_rampup="0:4,3:16")
    rules.check(config, placement.parse_mesh("fsdp:4"))
    with pytest.raises(ValueError, match=r"batch of 4, which is no multiple of .*=8"):
        rules.check(config, placement.parse_mesh("fsdp:8"))
