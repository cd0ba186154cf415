"""Checkpoints: a resumed run is the run that was not interrupted, bit for bit, whatever interrupted it."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import checkpoint
import data
import sharding
import train
from config import Config

ROOT = Path(__file__).parents[1]
TINY = dict(num_layers=2, model_dim=32, ff_dim=64, num_heads=8, num_kv_heads=8, head_dim=4, seq_len=32, batch=8) | dict(
    warmup_steps=2, sample=0, eval_batches=0, log_every=1
)
MESH = "fsdp:8"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """A small token file, so that a start is quick."""
    path = tmp_path_factory.mktemp("corpus")
    (path / "squares.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(5000)))
    data.prepare([str(path / "squares.txt")], str(path / "squares.bin"))
    return str(path / "squares.bin")


@pytest.fixture(scope="module")
def flags(corpus, tmp_path_factory) -> list[str]:
    """Of a run in a process of its own, with a cache of compiled programs that all of them share."""
    cache = tmp_path_factory.mktemp("cache")
    values = TINY | dict(corpus=corpus, compilation_cache=cache, mesh=MESH)
    return [f"--{name}={value}" for name, value in values.items()]


def start(flags, out: Path, *more, err=None) -> subprocess.Popen:
    """`python train.py` as from a terminal, without what conftest.py sets; it writes to `out`."""
    ours = ("JAX_", "TPU_", "TF_", "ALLOW_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    with out.open("w") as stdout, (err or out.with_suffix(".err")).open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "train.py", *flags, *more], cwd=ROOT, stdout=stdout, stderr=stderr, env=env
        )


def wait_until(condition, process: subprocess.Popen, timeout_s: float = 120):
    """What `condition` gives as soon as it is true; fails where the process ends before, or time runs out."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.001)
    return value


def read_metrics(path) -> list[tuple]:
    """(step, loss, norm of the gradients, learning rate) of each step."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines if "loss" in line]


def steps_in(directory) -> list[int]:
    return sorted(int(path.name) for path in Path(directory).iterdir() if path.name.isdecimal())


def load(config: Config):
    """The state of the newest checkpoint, in the shards of the configuration."""
    mesh = sharding.make_mesh(sharding.parse_mesh(config.mesh))
    shapes = jax.eval_shape(partial(train.init_state, config=config), jax.random.key(0))
    manager = checkpoint.open_manager(config)
    state, note = checkpoint.restore(manager, shapes, train.state_shardings(config, mesh), config)
    checkpoint.close(manager)
    return state, note


def assert_same_bits(ours, theirs):
    def compare(path, a, b):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)

    jax.tree.map_with_path(compare, ours, theirs)


def stop_after(monkeypatch, step: int) -> None:
    """From here on a run sees the notice of its termination at this step."""
    monkeypatch.setattr(train, "_notice_of_termination", lambda: lambda now: now == step)


# -- resume


@pytest.mark.parametrize(
    "changes",
    [
        dict(mesh=MESH),
        pytest.param(
            dict(mesh="data:2,fsdp:2,tensor:2", shard_update=True, microbatches=2, mu_dtype="bfloat16"),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(mesh="data:2,tensor:4", optimizer="adafactor"), marks=pytest.mark.slow),
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)
def test_resume_is_bit_exact(changes, corpus, tmp_path, monkeypatch, capsys):
    """20 steps = 10 steps, a new start, 10 steps: in every parameter, every slot of the optimizer, every number told."""
    config = Config(**TINY | changes, compilation_cache="", corpus=corpus, steps=20, save_every=100)
    at = lambda name: dict(checkpoint_dir=str(tmp_path / name), metrics_file=str(tmp_path / f"{name}.jsonl"))
    straight, halves = (dataclasses.replace(config, **at(name)) for name in ("straight", "halves"))
    train.run(straight)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_status:
        stop_after(patch, 10)
        train.run(halves)
    assert exit_status.value.code == 128 + signal.SIGTERM
    assert f"terminated after step 10, saved in {halves.checkpoint_dir}: the same command" in capsys.readouterr().out
    assert steps_in(halves.checkpoint_dir) == [10] and len(read_metrics(halves.metrics_file)) == 10

    train.run(halves)
    assert f"resumed    from step 10 in {halves.checkpoint_dir}\n" in capsys.readouterr().out
    assert read_metrics(halves.metrics_file) == read_metrics(straight.metrics_file)
    assert [step for step, *_ in read_metrics(halves.metrics_file)] == list(range(1, 21))
    (ours, _), (theirs, _) = load(halves), load(straight)
    assert int(ours.step) == 20 and len(jax.tree.leaves(ours)) > 3 * 9
    assert_same_bits(ours, theirs)


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory) -> Config:
    """A run of 5 steps that saved each of them."""
    directory = tmp_path_factory.mktemp("saved")
    config = Config(**TINY, compilation_cache="", corpus=corpus, mesh=MESH, steps=5, save_every=1)
    config = dataclasses.replace(
        config, checkpoint_dir=str(directory / "checkpoints"), metrics_file=str(directory / "metrics.jsonl")
    )
    train.run(config)
    return config


@pytest.fixture
def copy(saved, tmp_path) -> Config:
    """The same, in a folder that can be spoilt."""
    shutil.copytree(saved.checkpoint_dir, tmp_path / "copy")
    return dataclasses.replace(saved, checkpoint_dir=str(tmp_path / "copy"), metrics_file="")


@pytest.mark.parametrize(
    "changes",
    [
        dict(mesh="data:2,fsdp:2,tensor:2"),
        dict(mesh="data:2,fsdp:2,tensor:2", shard_update=True),
        dict(mesh="data:8", shard_update=True),
        dict(mesh="tensor:8"),
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)
def test_restores_onto_another_mesh(changes, saved):
    config = dataclasses.replace(saved, **changes)
    (ours, note), (theirs, _) = load(config), load(saved)
    assert note == ""
    assert_same_bits(ours, theirs)
    layout = train.state_shardings(config, sharding.make_mesh(sharding.parse_mesh(config.mesh)))
    jax.tree.map(lambda array, sharding: array.sharding.is_equivalent_to(sharding, array.ndim) or 1 / 0, ours, layout)
    assert ours.params.layers.w_q.sharding != theirs.params.layers.w_q.sharding


def test_a_run_goes_on_on_another_mesh(saved, copy, tmp_path, capsys):
    """And says what is not as it was: here the schedule, which ends at --steps."""
    losses = []
    for mesh in (MESH, "data:2,fsdp:2,tensor:2"):
        directory = tmp_path / mesh.replace(",", "_")
        shutil.copytree(copy.checkpoint_dir, directory)
        file = f"{directory}.jsonl"
        shutil.copy(saved.metrics_file, file)
        train.run(dataclasses.replace(copy, mesh=mesh, steps=8, checkpoint_dir=str(directory), metrics_file=file))
        assert f"from step 5 in {directory}; steps is 5 there and 8 here\n" in capsys.readouterr().out
        losses.append([loss for _, loss, *_ in read_metrics(file)])
    assert len(losses[0]) == 8
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_keeps_the_newest(saved):
    assert saved.keep_checkpoints == 2 and steps_in(saved.checkpoint_dir) == [4, 5]


@pytest.mark.parametrize("steps", [5, 3])
def test_a_run_that_is_done_says_so(steps, copy, capsys):
    assert train.run(dataclasses.replace(copy, steps=steps)) == {}
    out = capsys.readouterr().out
    assert "resumed    from step 5" in out and f"done       before: all of --steps={steps}\n" in out
    assert steps_in(copy.checkpoint_dir) == [4, 5]


# -- interruptions


@pytest.mark.slow
def test_kill_in_the_middle_of_a_save_loses_nothing_before(flags, tmp_path):
    """Three times in one run, each time while the folder of a save has not got its final name."""
    flags = [*flags, "--steps=30", "--save_every=1", "--keep_checkpoints=1"]
    at = lambda name: [f"--checkpoint_dir={tmp_path / name}", f"--metrics_file={tmp_path / name}.jsonl"]
    assert start(flags, tmp_path / "straight.out", *at("straight")).wait() == 0
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    complete = 0
    for kill in range(3):
        out = tmp_path / f"{kill}.out"
        process = start(flags, out, *at("killed"))
        saved = lambda at_least=complete + 4: killed.is_dir() and max(steps_in(killed), default=0) >= at_least
        wait_until(saved, process)
        wait_until(lambda: any("tmp" in path.name for path in killed.iterdir()), process)
        process.kill()
        process.wait()
        left = [path.name for path in killed.iterdir() if not path.name.isdecimal()]
        assert left and all("tmp" in name for name in left)
        assert kill == 0 or f"resumed    from step {complete} in {killed}\n" in out.read_text()
        complete = max(steps_in(killed))
    assert start(flags, tmp_path / "last.out", *at("killed")).wait() == 0
    assert f"resumed    from step {complete} in {killed}\n" in (tmp_path / "last.out").read_text()
    assert read_metrics(f"{killed}.jsonl") == read_metrics(f"{straight}.jsonl")
    assert [path.name for path in killed.iterdir()] == ["30"]  # what was left half written is gone
    config = Config(**TINY, mesh=MESH, steps=30)
    states = [load(dataclasses.replace(config, checkpoint_dir=str(path)))[0] for path in (killed, straight)]
    assert_same_bits(*states)


@pytest.mark.slow
def test_termination_saves_the_step_that_it_reached(flags, tmp_path):
    """And nothing but the run's own lines is printed, on the way out as on the way on."""
    directory = tmp_path / "checkpoints"
    flags = [*flags, "--steps=60", f"--checkpoint_dir={directory}"]
    out = tmp_path / "first.out"
    process = start(flags, out)
    wait_until(lambda: "\nstep  4/60" in out.read_text(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    (step,) = steps_in(directory)
    assert 4 <= step < 60
    assert out.read_text().endswith(f"terminated after step {step}, saved in {directory}: the same command resumes\n")
    assert start(flags, tmp_path / "second.out").wait() == 0
    second = (tmp_path / "second.out").read_text()
    assert f"resumed    from step {step} in {directory}\n" in second and f"\nstep {step + 1:>2}/60" in second
    assert steps_in(directory) == [step, 60]
    words = ("mesh", "model", "data", "resumed", "compiled", "step", "measured", "terminated", "in all")
    for name in ("first", "second"):
        lines = (tmp_path / f"{name}.out").read_text().splitlines()
        assert [line for line in lines if not line.startswith(words)] == []
        assert (tmp_path / f"{name}.err").read_text() == ""


def test_termination_without_a_folder_says_that_nothing_is_saved(corpus, monkeypatch, capsys):
    stop_after(monkeypatch, 2)
    with pytest.raises(SystemExit):
        train.run(Config(**TINY, compilation_cache="", corpus=corpus, mesh=MESH, steps=5))
    assert "terminated after step 2, not saved: no --checkpoint_dir\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_an_error_and_leaves_what_was_saved(flags, saved, copy, tmp_path):
    """A limit on the size of a file stands in for the disk."""
    command = [sys.executable, "train.py", *flags, "--steps=20", "--save_every=2", "--compilation_cache="]
    limited = ["bash", "-c", 'ulimit -f 16; exec "$@"', "bash", *command, f"--checkpoint_dir={copy.checkpoint_dir}"]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "train.py: error: " in done.stderr.splitlines()[-1], done.stderr
    assert steps_in(copy.checkpoint_dir) == [4, 5]
    assert_same_bits(load(copy)[0], load(saved)[0])


# -- what cannot be resumed


def test_another_model_is_refused(copy, flags, tmp_path):
    other = dict(num_layers=3, ff_dim=128, qk_norm=True)
    message = "is of another model: num_layers is 2 there and 3 here, ff_dim is 64 there and 128 here, qk_norm is False"
    with pytest.raises(ValueError, match=message):
        train.run(dataclasses.replace(copy, **other))
    more = ["--num_layers=3", "--ff_dim=128", "--qk_norm", f"--checkpoint_dir={copy.checkpoint_dir}"]
    assert start(flags, tmp_path / "out", *more).wait() == 1
    error = (tmp_path / "out.err").read_text()
    assert error.startswith("train.py: error: the checkpoint ") and message in error and error.count("\n") == 1
    assert steps_in(copy.checkpoint_dir) == [4, 5]


def remove_config(step: Path):
    shutil.rmtree(step / "config")


def cut_config(step: Path):
    (step / "config" / "metadata").write_text("{")


def cut_arrays(step: Path):
    for file in [*step.glob("state/d/*"), *step.glob("state/*/d/*")]:
        os.truncate(file, 30)


def of_another_program(step: Path):
    shutil.rmtree(step)
    step.mkdir()
    (step / "model.pt").write_bytes(b"PK")


@pytest.mark.parametrize("damage", [remove_config, cut_config, cut_arrays, of_another_program])
def test_a_checkpoint_that_cannot_be_read_is_named(damage, copy):
    damage(Path(copy.checkpoint_dir) / "5")
    with pytest.raises(
        ValueError, match=r"checkpoint .*/copy/5 is damaged, or not of this program .* from step 4"
    ) as e:
        load(copy)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500
    shutil.rmtree(Path(copy.checkpoint_dir) / "5")  # the way out that it names
    assert int(load(copy)[0].step) == 4


def test_a_file_is_no_folder(copy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="--checkpoint_dir=.*file is a file"):
        load(dataclasses.replace(copy, checkpoint_dir=str(tmp_path / "file")))


def test_without_orbax_the_extra_is_named(copy, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ValueError, match=r"--checkpoint_dir needs orbax-checkpoint.*pip install -e '\.\[checkpoint\]'"):
        train.run(copy)


def test_a_bucket_is_no_path(monkeypatch):
    """gs://bucket/run is left as it is, ~ and relative paths are not."""
    import orbax.checkpoint

    asked = []

    def manager(directory, options):
        asked.append(str(directory))
        raise NotImplementedError

    monkeypatch.setattr(orbax.checkpoint, "CheckpointManager", manager)
    for path in ("gs://bucket/run", "~/run", "run"):
        with pytest.raises(NotImplementedError):
            checkpoint.open_manager(Config(checkpoint_dir=path))
    assert asked == ["gs://bucket/run", str(Path.home() / "run"), str(Path.cwd() / "run")]


# What a resumed run may change and yet be the same run, up to rounding. A new field must be put here or into one of the
# lists of checkpoint.py.
FREE_FIELDS = (
    "preset mesh core_axis prefetch shard_update microbatches remat loss_chunk max_skipped eval_every eval_batches "
    "log_every metrics_file sample profile_dir profile_steps checkpoint_dir save_every keep_checkpoints "
    "num_processes process_id coordinator peer_timeout compilation_cache"
).split()


def test_every_field_is_put_down_as_what_it_does_to_a_resumed_run():
    fields = [field.name for field in dataclasses.fields(Config)]
    assert sorted(checkpoint.SHAPE_FIELDS + checkpoint.COURSE_FIELDS + FREE_FIELDS) == sorted(fields)
