"""Tests checkpoints: a resumed run equals the uninterrupted one bit for bit, whatever interrupted it."""

import contextlib
import dataclasses
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from support import ROOT, assert_same_bits, load, read_metrics, run_values, start, steps_in

import checkpoint
import corpora
import data
import evaluation
import lock
import placement
import prepare
import processes
import sharding
import train
from benchmarks import trials
from config import Config, changed


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    yield from run_values(tmp_path_factory.mktemp("values"))


def stop_after(monkeypatch, step: int) -> None:
    """Lets every run from here on see the notice of its termination at this step."""
    notice = lambda now: signal.SIGTERM if now == step else 0
    monkeypatch.setattr(processes, "notice_of_termination", lambda: contextlib.nullcontext(notice))


# -- resume


def train_in(config: Config, directory: Path, **more) -> Config:
    """Runs a Config with its checkpoints and metrics in the directory; returns the Config with these paths."""
    config = dataclasses.replace(
        config, checkpoint_dir=str(directory / "checkpoints"), metrics_file=str(directory / "metrics.jsonl"), **more
    )
    train.run(config)
    return config


@pytest.fixture(scope="module")
def saved(values, tmp_path_factory) -> Config:
    """Returns the Config of 20 uninterrupted steps."""
    return train_in(Config(**values, steps=20), tmp_path_factory.mktemp("saved"), save_every=5)


@pytest.fixture
def copy(saved, tmp_path) -> Config:
    """Returns `saved` with a copy of its folder, which a test may damage."""
    shutil.copytree(saved.checkpoint_dir, tmp_path / "copy")
    return dataclasses.replace(saved, checkpoint_dir=str(tmp_path / "copy"), metrics_file="")


def stop_and_resume(straight: Config, directory: Path, monkeypatch, capsys) -> None:
    """Stops after 10 steps and starts again; asserts that all is as in the uninterrupted run `straight`."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_status:
        stop_after(patch, 10)
        train_in(straight, directory)
    assert exit_status.value.code == 128 + signal.SIGTERM
    saved = f"terminated after step 10, saved in {directory / 'checkpoints'}: the same command resumes\n"
    assert saved in capsys.readouterr().out
    assert max(steps_in(directory / "checkpoints")) == len(read_metrics(directory / "metrics.jsonl")) == 10

    resumed = train_in(straight, directory)
    assert f"resumed    from step 10 in {resumed.checkpoint_dir}\n" in capsys.readouterr().out
    metrics = read_metrics(resumed.metrics_file)
    assert [step for step, *_ in metrics] == list(range(1, 21))
    assert metrics == read_metrics(straight.metrics_file)
    (state, _), (expected, _) = load(resumed), load(straight)
    assert int(state.step) == 20
    assert_same_bits(state, expected)


@pytest.mark.slow
def test_resume_is_bit_exact(saved, tmp_path, monkeypatch, capsys):
    """20 steps equal 10 steps, a new start and 10 steps, in every parameter, optimizer slot and loss."""
    stop_and_resume(saved, tmp_path, monkeypatch, capsys)


RAMP_AND_DECAY = dict(schedule="wsd", decay_ratio=0.6, decay_shape="1-sqrt", skip_spikes=6.0, mu_dtype="bfloat16")
RAMP_AND_DECAY |= dict(batch_rampup="0:8,5:16,14:24", batch=24)


@pytest.mark.at_most(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        RAMP_AND_DECAY
        | dict(mesh="data:2,fsdp:2,tensor:2", shard_update=True, microbatches=2, check_every=9)
        | dict(nu_dtype="bfloat16", grad_dtype="bfloat16"),
        RAMP_AND_DECAY
        | dict(mesh="fsdp:2,fsdp_transpose:2,context:2", optimizer="muon", qk_clip=0.5, fp8="delayed", check_every=9),
        dict(mesh="data:2,tensor:4", optimizer="adafactor", dtype="bfloat16"),
        dict(mesh="fsdp:2,tensor:4", optimizer="muon", qk_clip=0.5, offload_optimizer=True),
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)
def test_resume_is_bit_exact_whatever_the_state(changes, values, tmp_path, monkeypatch, capsys):
    """The first two are in the middle of a ramp of the batch, of a decay, and of a mixture."""
    if "batch_rampup" in changes:
        (tmp_path / "cubes.txt").write_text("".join(f"{i} cubed is {i**3}.\n" for i in range(3000)))
        prepare.prepare([str(tmp_path / "cubes.txt")], str(tmp_path / "cubes"))
        changes = changes | dict(corpus=f"{values['corpus']}:0.7,{tmp_path / 'cubes'}:0.3")
    straight = train_in(Config(**values | changes, steps=20), tmp_path / "straight")
    stop_and_resume(straight, tmp_path / "halves", monkeypatch, capsys)


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(mesh="fsdp:2,fsdp_transpose:2,tensor:2"),
        dict(mesh="data:2,fsdp:2,tensor:2", shard_update=True),
        dict(mesh="data:8", shard_update=True),
        dict(mesh="tensor:8"),
        dict(mesh="pipe:2,fsdp:4", microbatches=2),
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)
def test_restores_onto_another_mesh(changes, saved):
    config = dataclasses.replace(saved, **changes)
    (state, note), (expected, _) = load(config), load(saved)
    assert note == ""
    assert_same_bits(state, expected)
    layout = train.state_shardings(config, sharding.make_mesh(placement.parse_mesh(config.mesh)))
    jax.tree.map(lambda array, sharding: array.sharding.is_equivalent_to(sharding, array.ndim) or 1 / 0, state, layout)
    assert state.params.layers.w_q.sharding != expected.params.layers.w_q.sharding


@pytest.mark.slow
def test_a_run_continues_on_another_mesh(saved, copy, tmp_path):
    shutil.rmtree(Path(copy.checkpoint_dir) / "20")
    file = tmp_path / "metrics.jsonl"
    shutil.copy(saved.metrics_file, file)
    train.run(dataclasses.replace(copy, mesh="data:2,fsdp:2,tensor:2", shard_update=True, metrics_file=str(file)))
    metrics, expected = read_metrics(file), read_metrics(saved.metrics_file)
    assert len(metrics) == 20 and metrics[:15] == expected[:15] and metrics[15:] != expected[15:]
    np.testing.assert_allclose(metrics, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_reports_the_flags_that_differ(copy):
    note = load(dataclasses.replace(copy, steps=25, learning_rate=0.5, log_every=3))[1]
    assert note == f"steps is 20 there and 25 here, learning_rate is {copy.learning_rate} there and 0.5 here"


@pytest.mark.slow
def test_the_history_of_spikes_begins_and_ends_with_its_flag(copy):
    """A run that spikes can be started again with --skip_spikes, from a checkpoint of before."""
    mesh = sharding.make_mesh(placement.parse_mesh(copy.mesh))
    on = dataclasses.replace(copy, skip_spikes=6.0)
    with checkpoint.opened(copy) as checkpoints:
        before = train.restored_state(copy, mesh, checkpoints).state
        begun = train.restored_state(on, mesh, checkpoints)
        assert begun.note == "skip_spikes is 0.0 there and 6.0 here" and int(begun.state.opt_state.history.taken) == 0
        assert_same_bits(begun.state.opt_state.optimizer, before.opt_state)
        shardings = jax.tree.map(lambda array: array.sharding, begun.state)
        assert shardings == train.state_shardings(on, mesh)
        checkpoint.save(checkpoints, 21, begun.state, on)
        checkpoints.manager.wait_until_finished()
        assert_same_bits(train.restored_state(on, mesh, checkpoints).state, begun.state)
        assert_same_bits(train.restored_state(copy, mesh, checkpoints).state, before)


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept(saved):
    assert saved.keep_checkpoints == 2 and steps_in(saved.checkpoint_dir) == [15, 20]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, 3])
def test_a_run_that_is_done_reports_it(steps, copy, capsys):
    assert train.run(dataclasses.replace(copy, steps=steps)) == {}
    out = capsys.readouterr().out
    assert "resumed    from step 20" in out and f"done       before: all of --steps={steps}\n" in out
    assert steps_in(copy.checkpoint_dir) == [15, 20] and "held-out loss" not in out


@pytest.mark.slow
def test_a_run_that_died_in_its_last_evaluation_evaluates_when_it_is_resumed(copy, tmp_path, monkeypatch, capsys):
    """A second run, after one that did not die, evaluates again, but the metrics have its loss once."""
    run = dataclasses.replace(copy, eval_batches=2, steps=22, metrics_file=str(tmp_path / "metrics.jsonl"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="dies"):
        patch.setattr(train.evaluation, "evaluate", Mock(side_effect=RuntimeError("dies")))
        train.run(run)
    assert max(steps_in(copy.checkpoint_dir)) == 22
    for _ in range(2):
        assert train.run(run) == {}
        (loss,) = re.findall(r"^step 22/22  held-out loss ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
        rows = [json.loads(line) for line in Path(run.metrics_file).read_text().splitlines()]
        assert [row["step"] for row in rows if "event" not in row] == [
            21,
            22,
            22,
        ] and f"{rows[-1]['eval_loss']:.4f}" == loss


# -- interruptions


def half_written(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if "tmp" in path.name]


@pytest.mark.slow
def test_a_kill_during_a_save_loses_no_earlier_checkpoint(values, saved, tmp_path):
    killed, metrics = tmp_path / "killed", tmp_path / "metrics.jsonl"
    values = values | dict(steps=20, save_every=1, keep_checkpoints=1, checkpoint_dir=killed, metrics_file=metrics)
    complete = 0
    for kill, call in enumerate((13, 16)):  # a save renames the folders of its three items, then its own
        out = tmp_path / f"{kill}.out"
        program = trials.signalled("os.rename", call, number=signal.SIGKILL)
        assert start(values, out, program=program).wait(120) == -signal.SIGKILL
        assert kill == 0 or f"resumed    from step {complete} in {killed}\n" in out.read_text()
        assert half_written(killed)
        complete = max(steps_in(killed))
        assert complete == 3 * (kill + 1)
    assert start(values, tmp_path / "last.out").wait() == 0
    assert f"resumed    from step {complete} in {killed}\n" in (tmp_path / "last.out").read_text()
    assert read_metrics(metrics) == read_metrics(saved.metrics_file)
    assert [path.name for path in killed.iterdir()] == ["20"]  # unfinished saves are removed
    assert_same_bits(load(dataclasses.replace(saved, checkpoint_dir=str(killed)))[0], load(saved)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive)]
)
def test_termination_saves_the_step_that_it_reached(number, values, tmp_path):
    """Before and after, nothing but the run's own lines is printed."""
    directory = tmp_path / "checkpoints"
    values = values | dict(steps=60, checkpoint_dir=directory)
    out = tmp_path / "first.out"
    process = start(values, out, program=trials.signalled("log.Log.step", 4, number=number))
    assert process.wait(120) == 128 + number
    (step,) = steps_in(directory)
    assert step == 4
    assert out.read_text().endswith(f"terminated after step {step}, saved in {directory}: the same command resumes\n")
    assert start(values, tmp_path / "second.out").wait() == 0
    second = (tmp_path / "second.out").read_text()
    assert f"resumed    from step {step} in {directory}\n" in second and f"\nstep {step + 1:>2}/60" in second
    assert steps_in(directory) == [step, 60]
    words = ("mesh", "model", "data", "resumed", "compiled", "step", "measured", "page", "terminated", "in all")
    for name in ("first", "second"):
        lines = (tmp_path / f"{name}.out").read_text().splitlines()
        assert [line for line in lines if not line.startswith(words)] == []
        hint = "\nstopping after this step; Ctrl-C again stops at once\n" * (
            number == signal.SIGINT and name == "first"
        )
        assert (tmp_path / f"{name}.err").read_text() == hint


@pytest.mark.slow
def test_termination_without_a_folder_reports_that_nothing_is_saved(saved, monkeypatch, capsys):
    stop_after(monkeypatch, 2)
    with pytest.raises(SystemExit):
        train.run(changed(saved, checkpoint_dir="", metrics_file=""))
    assert "terminated after step 2, not saved: no --checkpoint_dir\n" in capsys.readouterr().out


ON_A_FULL_DISK = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))  # bytes of a file
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_earlier_checkpoints(values, copy, tmp_path):
    """The run ends at once, not at its next save."""
    shutil.rmtree(Path(copy.checkpoint_dir) / "20")
    before, _ = load(copy)
    values = values | dict(steps=2000, save_every=100, checkpoint_dir=copy.checkpoint_dir, learning_rate=0.001)
    assert start(values, tmp_path / "out", program=("-c", ON_A_FULL_DISK)).wait() == 1
    lines = (tmp_path / "out.err").read_text().splitlines()
    errors = [line for line in lines if line.startswith("train.py: error: a checkpoint could not be written to ")]
    assert len(errors) == 1 and "File too large" in errors[0] and len(errors[0]) < 500
    assert len(lines) < 5
    assert "\nstep  100/2000" in (out := (tmp_path / "out").read_text()) and "\nstep  200/2000" not in out
    assert steps_in(copy.checkpoint_dir) == [15]
    assert_same_bits(load(copy)[0], before)


# -- checkpoints that cannot be resumed


@pytest.mark.slow
def test_another_model_is_refused(copy, values, tmp_path):
    other = dict(num_layers=3, ff_dim=128, qk_norm=True)
    message = "is of another model: num_layers is 2 there and 3 here, ff_dim is 64 there and 128 here, qk_norm is False"
    with pytest.raises(ValueError, match=message):
        train.run(dataclasses.replace(copy, **other))
    other = values | dict(num_layers=3, ff_dim=128, checkpoint_dir=copy.checkpoint_dir)
    assert start(other, tmp_path / "out", "--qk_norm").wait() == 2
    error = (tmp_path / "out.err").read_text()
    assert error.startswith("train.py: error: the checkpoint ") and message in error and error.count("\n") == 1
    assert steps_in(copy.checkpoint_dir) == [15, 20]


@pytest.mark.slow
def test_a_recipe_with_state_is_part_of_the_model(copy):
    """Its largest elements are in the state; a checkpoint without them is of another model, not a damaged one."""
    with pytest.raises(ValueError, match=r"is of another model: fp8 is 'none' there and 'delayed' here"):
        train.run(dataclasses.replace(copy, fp8="delayed"))


def config_of(step: Path) -> Path:
    return step / "config" / "metadata"


def remove_config(step: Path):
    shutil.rmtree(step / "config")


def truncate_config(step: Path):
    config_of(step).write_text("{")


def config_of_no_object(step: Path):
    config_of(step).write_text("[1, 2]")


def config_of_nesting(step: Path):
    config_of(step).write_text("[" * 100_000)


def config_of_strings(step: Path):
    values = json.loads(config_of(step).read_text())
    config_of(step).write_text(json.dumps({name: str(value) for name, value in values.items()}))


def config_of_another_run(step: Path):
    config_of(step).write_text(config_of(step).read_text().replace('"seed": 0', '"seed": 1'))


def remove_state(step: Path):
    shutil.rmtree(step / "state")


def remove_arrays(step: Path):
    for file in step.glob("state/*/d/*"):
        file.unlink()


def truncate_arrays(step: Path):
    for file in [*step.glob("state/d/*"), *step.glob("state/*/d/*")]:
        os.truncate(file, 30)


def truncate_the_index(step: Path):
    """Truncates the index, and not the largest file, which has data that OCDBT has since rewritten and never reads."""
    for file in step.glob("state/d/*"):
        os.truncate(file, file.stat().st_size // 2)


def truncate_metadata(step: Path):
    os.truncate(step / "state" / "_METADATA", 100)


def truncate_checksums(step: Path):
    (step / "checksums" / "metadata").write_text('{"step": 20}')


def of_another_step(step: Path):
    shutil.rmtree(step)
    shutil.copytree(step.parent / "15", step)


def of_another_program(step: Path):
    shutil.rmtree(step)
    step.mkdir()
    (step / "model.pt").write_bytes(b"PK")


QUICK = [config_of_strings, truncate_arrays, truncate_checksums]
SLOW = [remove_config, truncate_config, config_of_no_object, config_of_nesting, config_of_another_run, remove_state]
SLOW += [remove_arrays, truncate_the_index, truncate_metadata, of_another_step, of_another_program]
# When one of orbax's parallel reads fails, others may be left that were never begun, or whose error nobody retrieves.
leaves_reads = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@leaves_reads
@pytest.mark.at_most(7)
@pytest.mark.parametrize("damage", [*QUICK, *(pytest.param(damage, marks=pytest.mark.slow) for damage in SLOW)])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken_on_request(damage, copy):
    folder = Path(copy.checkpoint_dir)
    damage(folder / "20")
    message = (
        r"^the checkpoint .*/copy/20 is damaged.*; --skip_damaged_checkpoints moves it aside and goes on from step 15$"
    )
    with pytest.raises(OSError, match=message) as e:
        load(copy)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600
    assert steps_in(folder) == [15, 20]
    state, note = load(dataclasses.replace(copy, skip_damaged_checkpoints=True))
    assert int(state.step) == 15 and "/copy/20 is damaged" in note and note.endswith(", and is now 20.damaged")
    assert sorted(path.name for path in folder.iterdir()) == ["15", "20.damaged"]
    gc.collect()  # reports reads that were left


@leaves_reads
def test_if_no_checkpoint_is_intact_none_is_moved(copy):
    for step in ("15", "20"):
        truncate_config(Path(copy.checkpoint_dir) / step)
    with pytest.raises(OSError, match=r"^none of the checkpoints 20, 15 in .*/copy is intact: .*; give another"):
        load(dataclasses.replace(copy, skip_damaged_checkpoints=True))
    assert steps_in(copy.checkpoint_dir) == [15, 20]
    shutil.rmtree(Path(copy.checkpoint_dir) / "15")
    with pytest.raises(OSError, match=r"/copy/20 is damaged.*; there is none before it: give another"):
        load(copy)


def flip_bits(folder: Path, copy: Config, saved: Config, num_flips: int) -> list[str]:
    """Flips bits of the newest step one at a time, restores the checkpoint, and returns the outcome of each flip.

    Every other flip is in a random file, however small; for the others, files are chosen by their sizes.
    """
    rng, (expected, _) = random.Random(0), load(saved)
    files = sorted(file for file in (folder / "20").rglob("*") if file.is_file())
    outcomes = []
    for number in range(num_flips):
        (file,) = rng.choices(files, [file.stat().st_size if number % 2 else 1 for file in files])
        intact = file.read_bytes()
        bit = rng.randrange(8 * len(intact))
        flipped = bytearray(intact)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            state, note = load(copy)
            assert_same_bits(state, expected)
            outcomes.append("restored bit by bit" if note == "" else note)
        except OSError as error:
            outcomes.append("found" if "/copy/20 is damaged" in str(error) else str(error))
        except AssertionError:
            outcomes.append(f"restored otherwise: bit {bit} of {file}")
        file.write_bytes(intact)
    return outcomes


@pytest.mark.slow
@leaves_reads
def test_a_flipped_bit_is_found_or_changes_nothing(saved, copy):
    """With `pytest -s` it prints how often each happened.

    Orbax writes some values twice, under names that differ from save to save, so a third of the flips or more hit what
    is read.
    """
    outcomes = flip_bits(Path(copy.checkpoint_dir), copy, saved, num_flips=30)
    print({outcome: outcomes.count(outcome) for outcome in set(outcomes)})
    assert set(outcomes) == {"found", "restored bit by bit"} and outcomes.count("found") > 5
    gc.collect()


@pytest.mark.slow
def test_a_run_resumes_from_the_intact_checkpoint_and_saves_the_damaged_step_again(saved, copy, values, tmp_path):
    """It prints one line where orbax would print hundreds."""
    truncate_arrays(Path(copy.checkpoint_dir) / "20")
    files = dict(checkpoint_dir=copy.checkpoint_dir, steps=20)
    assert start(values | files, tmp_path / "first.out").wait() == 1
    error = (tmp_path / "first.err").read_text()
    assert error.startswith("train.py: error: the checkpoint ") and error.count("\n") == 1
    assert start(values | files, tmp_path / "second.out", "--skip_damaged_checkpoints").wait() == 0
    assert "resumed    from step 15 in " in (tmp_path / "second.out").read_text()
    assert (tmp_path / "second.err").read_text() == ""
    assert steps_in(copy.checkpoint_dir) == [15, 20] and (Path(copy.checkpoint_dir) / "20.damaged").is_dir()
    assert_same_bits(load(copy)[0], load(saved)[0])


NOISE = """
import asyncio, logging, sys
import orbax.checkpoint
import checkpoint

checkpoint._quiet_orbax()
source = '''
async def read(future):
    try:
        await future
    except BaseException:
        raise Exception("details") from None
'''
exec(compile(source, orbax.checkpoint.__file__, "exec"))
loop = asyncio.new_event_loop()
begun = read(loop.create_future())
begun.send(None)
del begun  # closed, it raises
read(None)  # never begun
loop.create_task(read(loop.create_future()))
loop.run_until_complete(asyncio.sleep(0))
loop.create_future().set_exception(ValueError("never retrieved"))
at_the_end = read(loop.create_future())
at_the_end.send(None)
try:
    raise ValueError("of tensorstore")
except ValueError:
    logging.getLogger("absl").exception("a thread failed")
logging.getLogger("absl").error("a file cannot be read")
sys.stderr.write("held back\\n")

class Ours:
    def __del__(self):
        raise ValueError("a defect")

Ours()
print("train.py: error: a sentence", file=sys.stderr)
"""


@pytest.mark.slow
def test_orbax_reports_nothing_beside_the_error_that_it_raises():
    """Neither do closed or never begun coroutines, tasks, futures and loggers, even when the interpreter exits."""
    ended = subprocess.run([sys.executable, "-c", NOISE], cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith(("Traceback", " "))]
    assert lines[0] == "held back" and lines[-2:] == ["ValueError: a defect", "train.py: error: a sentence"]
    assert len(lines) == 4 and "Ours.__del__" in lines[1]


def test_a_checkpoint_of_an_earlier_program_is_restored(saved, tmp_path):
    """It has no checksums, and lacks newer fields; the note says that nothing could be verified."""
    import orbax.checkpoint as ocp

    state, _ = load(saved)
    values = dataclasses.asdict(saved)
    for newer in ("skip_damaged_checkpoints", "moe_parts", "context_heads", "swiglu_limit"):
        del values[newer]
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(values))
        manager.save(20, args=args, force=True)
    old = dataclasses.replace(saved, checkpoint_dir=str(tmp_path / "old"))
    restored, note = load(old)
    assert note == "it has no checksums, so nothing could be verified"
    assert_same_bits(restored, state)
    with checkpoint.opened(old) as checkpoints:  # its batch size is taken to have been the same from the start
        mesh = sharding.make_mesh(placement.parse_mesh(old.mesh))
        assert train.restored_state(old, mesh, checkpoints).batches == ((0, 8),)
    for damage in (config_of_strings, config_of_no_object):  # seen without a checksum, too
        damage(tmp_path / "old" / "20")
        with pytest.raises(OSError, match=r"is damaged, or not of this program \(TypeError: its configuration"):
            load(old)


@pytest.mark.parametrize(
    "batches", [[], [[1, 8]], [[0, 8], [0, 4]], [[0, 8], [5]], [[0, 0]], [["0", 8]], "8", [[0, 8, 1]], 3]
)
def test_batch_sizes_that_no_run_has_are_damage(batches):
    values = dataclasses.asdict(Config())
    checkpoint._check_values(values | {"batches": [[0, 8], [5, 16]]})
    with pytest.raises(TypeError, match="its configuration has the batch sizes"):
        checkpoint._check_values(values | {"batches": batches})


# -- files with another content


@pytest.fixture
def own_corpus(saved, copy, tmp_path) -> Config:
    """Yields 15 steps of `copy`, whose corpus, under the name that it was saved with, a test may damage."""
    shutil.rmtree(Path(copy.checkpoint_dir) / "20")
    shutil.copytree(saved.corpus, tmp_path / "original")
    yield copy
    shutil.rmtree(saved.corpus)
    shutil.copytree(tmp_path / "original", saved.corpus)


@pytest.mark.slow
def test_a_changed_corpus_is_refused_under_its_name_and_accepted_under_another(own_corpus, tmp_path, capsys):
    (tmp_path / "cubes.txt").write_text("".join(f"{i} cubed is {i**3}.\n" for i in range(5000)))
    shutil.move(own_corpus.corpus, tmp_path / "the-same")
    prepare.prepare([str(tmp_path / "cubes.txt")], own_corpus.corpus)
    name = re.escape(f"--corpus={own_corpus.corpus}")
    with pytest.raises(ValueError, match=f"{name} has another content .*give the new one another name"):
        train.run(own_corpus)
    assert steps_in(own_corpus.checkpoint_dir) == [15]
    shutil.copytree(own_corpus.checkpoint_dir, tmp_path / "second")
    shutil.copytree(own_corpus.corpus, tmp_path / "cubes")  # the way out that it names
    train.run(dataclasses.replace(own_corpus, corpus=str(tmp_path / "cubes"), steps=16))
    assert f"corpus is '{own_corpus.corpus}' there and '{tmp_path}/cubes' here" in capsys.readouterr().out
    second = dict(corpus=str(tmp_path / "the-same"), checkpoint_dir=str(tmp_path / "second"))
    train.run(dataclasses.replace(own_corpus, **second))
    assert f"resumed    from step 15 in {tmp_path / 'second'}\n" in capsys.readouterr().out  # and no note


def zeros_over(path: Path):
    content = path.read_bytes()
    path.write_bytes(content[:64] + bytes(len(content) - 128) + content[-64:])  # but for the header and the table


@pytest.mark.slow
@pytest.mark.parametrize("damage", [zeros_over, lambda path: os.truncate(path, 100)], ids=["overwritten", "cut off"])
def test_a_corpus_damaged_in_a_run_ends_it_and_a_restored_one_resumes_it(damage, saved, tmp_path, monkeypatch, capsys):
    corpus, read = tmp_path / "corpus", data.train_batch
    shutil.copytree(saved.corpus, corpus)

    def damaged_at_7(*args, **options):
        if args[1] == 7:
            damage(next(corpus.glob("*.bin")))
        return read(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(corpora.DamagedError, match="put it back as it was"):
        patch.setattr(data, "train_batch", damaged_at_7)
        train_in(saved, tmp_path, corpus=str(corpus))
    assert "saved      after step 7, as the corpus cannot be read" in capsys.readouterr().out
    assert max(steps_in(tmp_path / "checkpoints")) == 7
    with pytest.raises((ValueError, OSError), match=r"is damaged|has 100 bytes"):
        train_in(saved, tmp_path, corpus=str(corpus))
    shutil.rmtree(corpus)
    shutil.copytree(saved.corpus, corpus)
    resumed = train_in(saved, tmp_path, corpus=str(corpus))
    assert read_metrics(resumed.metrics_file) == read_metrics(saved.metrics_file)
    assert_same_bits(load(resumed)[0], load(saved)[0])


@pytest.mark.parametrize("flag, path", [("corpus", "c.bin"), ("corpus", ""), ("fp8_scales", "scales.json")])
def test_contents_are_compared_if_both_are_known(flag, path):
    config, here = Config(**{flag: path}, fp8="static" if flag == "fp8_scales" else "none"), {flag: "0"}
    unchanged = lambda before, **changes: checkpoint._same_contents(
        dataclasses.asdict(config) | changes | {"contents": before}, config, here, "runs/5"
    )
    assert unchanged({}) == set()
    assert unchanged({flag: "0"}) == {flag} == unchanged({flag: "0"}, **{flag: "elsewhere"})
    assert unchanged({flag: "1"}, **{flag: "elsewhere"}) == set()  # the note has the names
    with pytest.raises(ValueError, match=rf"--{flag}.* another content \(0\) than .* runs/5 was saved \(1\)"):
        unchanged({flag: "1"})


# -- folders in which nothing can be saved


def test_a_second_run_is_refused_during_the_first_one(copy):
    with checkpoint.opened(copy), pytest.raises(OSError, match=rf"copy is in use by process {os.getpid()} on .*"):
        train.run(copy)
    assert int(load(copy)[0].step) == 20


def test_a_run_whose_folder_was_taken_over_does_not_save(copy):
    with checkpoint.opened(copy) as checkpoints:
        file = Path(copy.checkpoint_dir) / "lock"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"run": "another"}))
        with pytest.raises(OSError, match="was taken over by process"):
            checkpoint.save(checkpoints, 25, None, copy)
    assert steps_in(copy.checkpoint_dir) == [15, 20]


@pytest.mark.parametrize("fails", ["lock", "folder"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(fails, copy, monkeypatch, tmp_path):
    def refuse(*args, **keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(train, "compile_steps", None)
    if fails == "lock":
        monkeypatch.setattr(lock, "_create", refuse)
        path = copy.checkpoint_dir
    else:
        (tmp_path / "file").write_text("")
        path = str(tmp_path / "file" / "folder")
    with pytest.raises(OSError, match=rf"^--checkpoint_dir={path} cannot be written: "):
        train.run(dataclasses.replace(copy, checkpoint_dir=path))


@pytest.mark.slow
def test_a_folder_that_becomes_read_only_ends_the_run_at_once(values, tmp_path):
    """Orbax alone would wait for 300 s."""
    program = """
import os, runpy
import checkpoint
begin = checkpoint.save
def save(checkpoints, step, *rest, **keywords):
    if step == 4:
        def refuse(path, *args, **keywords):
            raise OSError(30, "Read-only file system", str(path))
        os.mkdir = refuse
    return begin(checkpoints, step, *rest, **keywords)
checkpoint.save = save
runpy.run_path("train.py", run_name="__main__")
"""
    values = values | dict(steps=20, save_every=2, checkpoint_dir=tmp_path / "checkpoints")
    begun = time.monotonic()
    assert start(values, tmp_path / "out", program=("-c", program)).wait() == 1
    assert time.monotonic() - begun < 120
    error = (tmp_path / "out.err").read_text()
    assert error.startswith("train.py: error: a checkpoint could not be written to ") and "Read-only" in error
    assert error.count("\n") == 1 and "\nstep  5/20" not in (tmp_path / "out").read_text()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


@pytest.mark.slow
def test_a_step_is_saved_before_it_is_evaluated(values, tmp_path, monkeypatch):
    def fail(*args):
        raise FloatingPointError("an evaluation that fails")

    monkeypatch.setattr(evaluation, "evaluate", fail)
    with pytest.raises(FloatingPointError, match="an evaluation that fails"):
        train_in(Config(**values | dict(eval_batches=1), steps=2), tmp_path)
    assert steps_in(tmp_path / "checkpoints") == [2]


def test_a_checkpoint_dir_that_is_a_file_is_refused(copy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"--checkpoint_dir=.*file is a file"):
        load(dataclasses.replace(copy, checkpoint_dir=str(tmp_path / "file")))


def test_without_orbax_the_extra_is_named(copy, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ValueError, match=r"--checkpoint_dir needs orbax-checkpoint.*pip install -e '\.\[checkpoint\]'"):
        train.run(copy)


def test_a_bucket_is_not_made_a_local_path():
    """gs://bucket/run is unchanged; ~ and relative paths are expanded."""
    paths = [Config(checkpoint_dir=path).checkpoint_dir for path in ("gs://bucket/run", "~/run", "run")]
    folders = list(map(checkpoint._folder, paths))
    assert list(map(str, folders)) == ["gs://bucket/run", str(Path.home() / "run"), str(Path.cwd() / "run")]
    assert not isinstance(folders[0], Path)  # lock.py tests that


# Fields that a resumed run may change and still be the same run, up to rounding. A new field must be added here, or be
# declared to decide shapes or values.
FREE_FIELDS = (
    "preset recipe mesh core_axis collectives collective_matmul prefetch double_buffer shard_update "
    "microbatches remat remat_tensors "
    "pipeline_schedule pipeline_rounds remat_stage attention loss_chunk max_skipped check_every eval_every "
    "eval_batches offload_optimizer "
    "context_impl context_heads context_balance "
    "log_every metrics_file tensorboard_dir sample sample_every profile_dir profile_steps "
    "checkpoint_dir save_every keep_checkpoints "
    "skip_damaged_checkpoints "
    "num_processes process_id coordinator peer_timeout xla_flags compilation_cache"
).split()


def test_every_field_is_classified_by_its_effect_on_a_resumed_run():
    fields = [field.name for field in dataclasses.fields(Config)]
    assert sorted(checkpoint.SHAPES + checkpoint.VALUES + FREE_FIELDS) == sorted(fields)
