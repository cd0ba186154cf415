"""benchmarks/faults.py: its checks can fail, its cheapest trials hold, and its stored results are in the table."""

import ctypes
import random
import shutil
import signal
import subprocess

import numpy as np
import orbax.checkpoint as ocp
import pytest

from benchmarks import faults, trials
from benchmarks.trials import BrokenError, End, Scene


@pytest.fixture
def scene(tmp_path):
    scene = Scene(tmp_path, tmp_path, random.Random(0))
    yield scene
    trials.clean_up(scene)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return trials.corpora(tmp_path_factory.mktemp("shared"))


def python(scene: Scene, program: str) -> End:
    return trials.end(trials.start(scene, program=("-c", program)), 5)


def test_a_traceback_a_hang_and_a_lost_status_are_seen(scene):
    with pytest.raises(BrokenError, match=r"a traceback of [34] lines, status 1: \['ValueError: x'\]"):
        python(scene, "raise ValueError('x')")
    with pytest.raises(BrokenError, match=r"did not end within 0\.5 s; last said: 'on'"):
        hanging = trials.start(scene, program=("-c", "import time; print('on', end='', flush=True); time.sleep(60)"))
        trials.end(hanging, 0.5)
    with pytest.raises(BrokenError, match=r"ended with 3, not 0"):
        trials.expect(python(scene, "import sys; sys.exit(3)"), 0)
    assert trials.expect(python(scene, "print('good')"), 0).said == "good\n"


@pytest.mark.parametrize(
    ("complained", "why"),
    [
        ("", "0 lines on stderr"),
        ("train.py: error: one\ntrain.py: error: two\n", "2 lines on stderr"),
        ("Killed\n", "1 lines on stderr"),
        ("train.py: error: something else\n", "does not say 'corpus'"),
    ],
)
def test_an_end_without_its_one_sentence_is_seen(complained, why):
    with pytest.raises(BrokenError, match=why):
        trials.expect(End(1, "", complained, 0.0), 1, "corpus")
    trials.expect(End(1, "", "usage: train.py\ntrain.py: error: the corpus is gone\n", 0.0), 1, "corpus")
    with pytest.raises(BrokenError, match="and yet"):
        trials.expect(End(0, "", "train.py: error: the corpus is gone\n", 0.0), 0)


@pytest.mark.parametrize("by_python", [True, False])
def test_programs_take_signals_that_are_ignored_here(by_python, scene):
    """Under nohup a drill of SIGHUP would otherwise find that nothing happens. libtpu ignores it unseen by Python."""
    before = signal.getsignal(signal.SIGHUP)
    ctypes.CDLL(None).signal(signal.SIGHUP, ctypes.c_void_p(1))
    try:
        if by_python:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        dies = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"
        assert python(scene, dies).status == 0
        trials.pass_on_no_ignored_signals()
        assert python(scene, dies).status == -signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_wrong_array_and_a_lost_step_are_seen(tmp_path):
    for name, last in (("ours", 1.0), ("same", 1.0), ("other", np.nextafter(np.float32(1), np.float32(2)))):
        state = {"params": {"w": np.array([0, 0, last], np.float32)}, "step": np.int32(3)}
        ocp.PyTreeCheckpointer().save(tmp_path / name / "3" / "state", state)
    trials.compare(tmp_path / "ours", tmp_path / "same", [3])
    with pytest.raises(BrokenError, match=r"step 3: 1 of 2 arrays differ, as \['params'\]\['w'\]"):
        trials.compare(tmp_path / "ours", tmp_path / "other", [3])
    with pytest.raises(BrokenError, match=r"steps \[6\] are not there: \[3\]"):
        trials.compare(tmp_path / "ours", tmp_path / "same", [3, 6])
    shutil.rmtree(tmp_path / "ours" / "3" / "state")
    with pytest.raises(BrokenError, match="step 3 cannot be read"):
        trials.compare(tmp_path / "ours", tmp_path / "same", [3])


def test_what_the_machine_does_not_allow_does_not_hold(shared, monkeypatch):
    def no_mounts(*args, **kwargs):
        return subprocess.CompletedProcess(args, 32, "", "mount: permission denied")

    monkeypatch.setattr(trials.subprocess, "run", no_mounts)
    trial = next(trial for trial in faults.trials_of(0) if trial.kind == "full_disk")
    verdict = faults.run_trial(trial, shared)
    assert (verdict["outcome"], verdict["why"]) == ("impossible", "mount: mount: permission denied")
    assert "| full disk | 1 | 0 | 0 | 1 | 0 | 0 |" in faults.table(dict(machine="", seed=0, trials=[verdict], flips=[]))


def test_there_are_120_trials_with_seeds_of_their_own():
    every = faults.trials_of(7)
    assert [trial.number for trial in every] == list(range(1, 121))
    assert [trial.seed for trial in every] == list(range(7001, 7121))
    assert faults.choose(["damaged", "1"], every)[0].number == 1
    with pytest.raises(ValueError, match="there is no 'damage'; did you mean damaged"):
        faults.choose(["damage"], every)


@pytest.mark.parametrize("kind", ["output_is_input", "planted_link", "cut_off"])
def test_the_cheapest_trials_hold(kind, shared):
    trial = next(trial for trial in faults.trials_of(0) if trial.kind == kind)
    verdict = faults.run_trial(trial, shared)
    assert verdict["outcome"] == "held", verdict["why"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["suspended", "damaged", "signalled", "interrupted_early"])
def test_trials_hold(kind, shared):
    trial = next(trial for trial in faults.trials_of(1) if trial.kind == kind)
    verdict = faults.run_trial(trial, shared)
    assert verdict["outcome"] == "held", verdict["why"]


@pytest.mark.slow
def test_flipped_bits_are_named_or_harmless(shared):
    outcomes = [faults.flip(shared, seed)["outcome"] for seed in range(9000, 9012)]
    assert "named" in outcomes
    assert set(outcomes) <= {"named", "harmless"}


def test_the_table_in_results_is_the_kept_one():
    """python benchmarks/readme.py faults."""
    results = faults.load(faults.ROOT / "benchmarks/faults.json")
    assert {one["number"] for one in results["trials"]} <= {trial.number for trial in faults.trials_of(0)}
    assert faults.table(results) in (faults.ROOT / "docs/RESULTS.md").read_text()
