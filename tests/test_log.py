"""Tests the log of a run: every step once, rates from its time, and a metrics file that survives a restart."""

import contextlib
import errno
import json
import math
import socket
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from matplotlib import image

import log as log_lib
import placement
import report
import rules
import sharding
from flags import from_preset
from log import Log

MESH = sharding.make_mesh(placement.parse_mesh("fsdp:*"))
KEYS = (
    "step loss grad_norm learning_rate skipped skipped_in_a_row "
    "step_s tokens_per_s tflops_per_s_per_device mfu input_wait_s"
).split()


def metrics(step, *, loss=2.5, skipped=0, skipped_in_a_row=0):
    """Returns metrics as from train_step."""
    return {
        "step": jnp.int32(step),
        "loss": jnp.float32(loss),
        "grad_norm": jnp.float32(0.5),
        "learning_rate": jnp.float32(0.25),
        "skipped": jnp.int32(skipped),
        "skipped_in_a_row": jnp.int32(skipped_in_a_row),
    }


@contextlib.contextmanager
def started(config, first_step=0, mesh=MESH):
    """Yields a Log whose clock runs, and closes it at the end."""
    with Log(config, first_step, mesh, batches=rules.rampup(config.batch_rampup, config.batch)) as log:
        log.start_clock()
        yield log


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_line_of_the_metrics_file_for_each_step(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    config = from_preset("tiny", metrics_file=str(path), steps=3, batch=24, batch_rampup="0:8,2:24")
    with started(config) as log:
        for step in (1, 2, 3):
            log.step(metrics(step, loss=step / 8))
            assert [line["step"] for line in lines_of(path)] == list(range(1, step))  # shown while the next one runs
        log.finish_step()
        log.finish_step()
    lines = lines_of(path)
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 0.125), (2, 0.25), (3, 0.375)]
    for line, batch in zip(lines, (8, 8, 24), strict=True):
        assert set(line) == set(KEYS)
        assert (line["grad_norm"], line["learning_rate"], line["skipped"]) == (0.5, 0.25, 0)
        assert line["step_s"] > 0
        assert line["tokens_per_s"] == pytest.approx(batch * config.seq_len / line["step_s"])
        flops_per_s = line["tokens_per_s"] * log.flops_per_token / 8
        assert line["tflops_per_s_per_device"] == pytest.approx(flops_per_s / 1e12)
        assert line["mfu"] is None  # the peak of a CPU is unknown


def test_metrics_of_the_model_are_shown_and_written(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with started(from_preset("tiny", metrics_file=str(path))) as log:
        log.step({"load_imbalance": jnp.float32(1.25), **metrics(1), "router_entropy": jnp.float32(0.5)})
        log.finish_step()
    assert "  load imbalance 1.25  router entropy 0.5  " in capsys.readouterr().out
    (line,) = lines_of(path)
    assert set(line) == {*KEYS, "load_imbalance", "router_entropy"} and line["load_imbalance"] == 1.25


def test_the_load_of_each_expert_is_written_with_the_lines_that_are_shown(tmp_path, capsys, monkeypatch):
    """In percent of the mean of its layer; layers at equal distances where all would be too many."""
    monkeypatch.setattr(log_lib, "MOST_LOADS", 6)
    loads = jnp.array([[4.0, 0], [3, 1], [2, 2], [1, 3], [0, 4]])  # L = 5, E = 2
    path, charts = tmp_path / "metrics.jsonl", tmp_path / "charts"
    with started(from_preset("tiny", metrics_file=str(path), log_every=2, tensorboard_dir=str(charts))) as log:
        for step in (1, 2, 3):
            log.step(metrics(step) | {"expert_loads": loads})
        log.finish_step()
    rows = [row.get("expert_loads") for row in lines_of(path)]
    assert rows == [None, {"0": [200, 0], "2": [100, 100], "4": [0, 200]}, None]
    assert "expert" not in capsys.readouterr().out
    assert not [tag for tag in shown_by_tensorboard(charts / "train") if "expert" in tag]


def test_flops_follow_the_config():
    """10 of 60 layers attend to all 8192 tokens with heads of 512, 50 to a window of 1024 with heads of 256."""
    local, full = 5376 * 256 * (2 * 32 + 2 * 16), 5376 * 512 * (2 * 32 + 4)
    matmuls = 50 * local + 10 * full + 60 * 3 * 5376 * 21_504 + 5376 * 262_144
    keys = 10 * 512 * 8192 / 2 + 50 * 256 * (1024 - 1024**2 / (2 * 8192))
    assert Log(from_preset("gemma4-31b"), 0, MESH).flops_per_token == 6 * matmuls + 12 * 32 * keys


def test_mfu_is_a_share_of_the_peak_of_tpu7x(tmp_path, capsys):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = sharding.make_mesh(placement.parse_mesh("fsdp:*"), devices)
    with started(from_preset("tiny", metrics_file=str(tmp_path / "m.jsonl")), mesh=mesh) as log:
        log.step(metrics(1))
        log.finish_step()
    (line,) = lines_of(tmp_path / "m.jsonl")
    flops = line["tokens_per_s"] * log.flops_per_token / 8  # a device's share
    assert line["tflops_per_s_per_device"] == pytest.approx(flops / 1e12)
    assert line["mfu"] == pytest.approx(line["tflops_per_s_per_device"] / 1153.5)
    assert "  MFU " in capsys.readouterr().out
    assert log.summary()["mfu"] == pytest.approx(line["mfu"])
    assert ", MFU " in capsys.readouterr().out


def test_no_mfu_on_a_cpu(capsys):
    with started(from_preset("tiny")) as log:
        log.step(metrics(1))
        log.finish_step()
    assert log.summary()["mfu"] is None
    shown = capsys.readouterr().out
    assert "page       none: with --metrics_file=run.jsonl, python report.py run.jsonl draws the run\n" in shown
    assert "TFLOP/s" in shown and "MFU" not in shown


class Clock:
    """A replacement of the module `time`."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_step_time_is_counted_from_step_to_step(monkeypatch):
    """From the end of the step before to its own, without the time before start_clock; the mean omits the first."""
    monkeypatch.setattr(log_lib, "time", clock := Clock())
    with started(from_preset("tiny")) as log:
        log.step(metrics(1))
        clock.now += 8
        log.step(metrics(2))
        clock.now += 2
        log.finish_step()
        clock.now += 50  # an evaluation
        log.start_clock()
        log.step(metrics(3))
        clock.now += 3
        log.finish_step()
    assert log.steps_s == [8, 2, 3]
    summary = log.summary()
    assert summary["step_s"] == log.mean_step_s == 2.5
    assert summary["tokens_per_s"] == 16 * 128 / 2.5


def test_the_wait_for_input_is_recorded_with_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(log_lib, "time", clock := Clock())

    def batches():
        for step, seconds in ((1, 4), (2, 0), (3, 2)):
            clock.now += seconds
            yield step

    with started(from_preset("tiny", metrics_file=str(tmp_path / "m.jsonl"))) as log:
        for step in log.time_waits(batches()):
            log.step(metrics(step))
            clock.now += 1
        log.finish_step()
    assert [line["input_wait_s"] for line in lines_of(tmp_path / "m.jsonl")] == [4, 0, 2]


def test_printed_lines(capsys):
    """The first step, every log_every-th, and each skipped one has a line."""
    with started(from_preset("tiny", steps=1200, log_every=5)) as log:
        for step in range(1, 13):
            log.step(metrics(step, skipped=step >= 8, skipped_in_a_row=step == 8))
        log.finish_step()
        log.evaluation(12, 1.23456)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/1200", "5/1200", "8/1200", "10/1200", "12/1200"]
    assert lines[0].startswith("step    1/1200  loss 2.5000  grad norm 0.500  lr 2.50e-01  ")
    assert "skipped" not in lines[0] + lines[1]
    assert lines[2].endswith("  skipped 1") and lines[3].endswith("  skipped 1")
    assert lines[4] == "step   12/1200  held-out loss 1.2346"


def test_a_terminal_shows_the_time_left_in_a_line_that_is_overwritten(monkeypatch, capsys):
    """Ten steps of 8 sequences, then ten of 24. A step takes 2 s, the first one 60, a save after the third one 5."""
    monkeypatch.setattr(log_lib, "time", clock := Clock())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    config = from_preset("tiny", steps=20, log_every=4, batch=24, batch_rampup="0:8,10:24")
    with started(config) as log:
        for step in (1, 2, 3, 4, 5):
            log.step(metrics(step))
            clock.now += 60 if step == 1 else 2
            log.finish_step()
            if step == 3:
                clock.now += 5
                log.start_clock()
    clear = "\r\033[K"
    _, first, *progress, fourth, fifth, end = capsys.readouterr().out.split(clear)
    assert first.startswith("step  1/20  loss 2.5000") and fourth.startswith("step  4/20") and fourth.endswith("\n")
    # 304 and 296 sequences are left after 8 and 16 that took 2 and 4 s, and 280 after 32 that took 13 s.
    assert progress == ["0:01:16 left  step  2/20  loss 2.5000  ", "0:01:14 left  step  3/20  loss 2.5000  "]
    assert fifth.startswith("0:01:54 left  step  5/20") and len(fifth) == 39 and end == ""
    assert log_lib.command.duration(3 * 3600 + 59.6) == "3:01:00"


def test_epochs_are_shown_of_several_corpora_or_once_one_is_repeated(tmp_path, capsys):
    config = from_preset("tiny", metrics_file=str(tmp_path / "m"), log_every=1)
    for epochs in (lambda step: {"a": step / 2}, lambda step: {"a": step / 4, "b": step / 8}):
        with Log(config, 0, MESH, epochs) as log:
            log.start_clock()
            for step in (1, 2, 3):
                log.step(metrics(step))
            log.finish_step()
            log.evaluation(3, 1.5, {"a": 2.0, "b": 1.0} if len(epochs(3)) > 1 else {"a": 1.5})
        assert [line["epochs"] for line in lines_of(tmp_path / "m")[:3]] == [epochs(step) for step in (1, 2, 3)]
        *lines, evaluation = capsys.readouterr().out.splitlines()[-4:]
        shown = [line.partition("  epochs ")[2].partition("  input")[0] for line in lines]
        several = len(epochs(3)) > 1
        assert shown == (["0.25, 0.125", "0.5, 0.25", "0.75, 0.375"] if several else ["", "", "1.5"])
        assert evaluation.endswith("held-out loss 1.5000" + " (a 2.0000, b 1.0000)" * several)
        written = {"step": 3, "eval_loss": 1.5} | ({"eval_loss_by_source": {"a": 2.0, "b": 1.0}} if several else {})
        assert lines_of(tmp_path / "m")[3] == written


def test_a_resumed_run_shows_its_first_step(capsys):
    with started(from_preset("tiny", steps=100, log_every=50), first_step=33) as log:
        for step in range(34, 52):
            log.step(metrics(step))
        log.finish_step()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["34/100", "50/100"]


def test_only_the_first_process_prints_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    files = dict(metrics_file=str(tmp_path / "m.jsonl"), tensorboard_dir=str(tmp_path / "t"))
    with started(from_preset("tiny", **files)) as log:
        log.step(metrics(1))
        log.finish_step()
        log.say("hello")
        log.evaluation(1, 2.0)
    assert log.summary()["step_s"] > 0
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    path = tmp_path / "m.jsonl"
    with started(from_preset("tiny", max_skipped=3, metrics_file=str(path))) as log:
        for step, in_a_row in enumerate([0, 1, 2, 0, 1, 2, 3], start=1):
            log.step(metrics(step, loss=math.nan, skipped=step, skipped_in_a_row=in_a_row))
        with pytest.raises(FloatingPointError, match=r"steps 5 to 7 were not finite \(max_skipped=3\).* after step 4"):
            log.finish_step()
    with started(from_preset("tiny", max_skipped=1, skip_spikes=6.0)) as log:
        log.step(metrics(1, skipped=1, skipped_in_a_row=1) | {"spikes": jnp.int32(1)})
        with pytest.raises(FloatingPointError, match=r"not finite, or beyond skip_spikes=6 standard deviations \(max_"):
            log.finish_step()
    assert len(lines_of(path)) == 7  # the file has the last one, too


# -- the metrics file


def test_no_run_overwrites_the_metrics_of_earlier_runs(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    Path(f"{path}.2").write_text("not ours\n")
    outs = []
    for content in ("first", "second", "third"):
        with started(from_preset("tiny", metrics_file=str(path))) as log:
            log.file.write(f"{content}\n")
        outs.append(capsys.readouterr().out)
    assert [file.read_text().strip() for file in sorted(tmp_path.iterdir())] == ["third", "first", "not ours", "second"]
    assert outs == ["", *(f"metrics    of the run before are in {path}.{number}\n" for number in (1, 3))]


def test_why_a_run_failed_stays_in_the_file_of_the_run_that_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(OSError), started(from_preset("tiny", metrics_file=str(path))) as log:
        for step in (1, 2):
            log.step(metrics(step))
        log.finish_step()
        log.sample(2, "3 cubed", " is 27")
        raise OSError("no space is left for a\udcff")  # a name that is no UTF-8
    *_, sample, failed = lines_of(path)
    assert sample == {"step": 2, "event": "sample", "prompt": "3 cubed", "text": " is 27"}
    assert failed == {"step": 2, "event": "failed", "why": "OSError: no space is left for a?"}
    with pytest.raises(SystemExit), started(from_preset("tiny", metrics_file=str(path)), first_step=1):
        raise SystemExit(143)  # not an error: train.py writes the signal
    assert [(row["step"], row.get("event")) for row in lines_of(path)] == [(1, None), (2, "failed"), (1, "resumed")]


def test_events_and_values_by_layer_are_written_and_not_shown(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 4, "loss": 1.0}\n')
    with started(from_preset("tiny", metrics_file=str(path), steps=5, log_every=1), first_step=4) as log:
        log.step(metrics(5) | {"load_imbalance_by_layer": jnp.array([1.25, 1 / 3, jnp.nan])})
        log.finish_step()
        log.event(5, "saved")
        log.summary()
    before, resumed, step, saved = lines_of(path)
    assert (resumed, saved) == ({"step": 4, "event": "resumed"}, {"step": 5, "event": "saved"})
    assert step["load_imbalance_by_layer"] == [1.25, 0.3333, None] and before["loss"] == 1.0
    shown = capsys.readouterr().out
    assert "imbalance" not in shown and f"page       python report.py {path} draws the run\n" in shown


@pytest.mark.parametrize("tail", ["", '{"step": 9, "lo', '{"step": 2, "x": {}', "{", '{"step": 5, "loss": 5.0}'])
@pytest.mark.parametrize("first_step", [1, 3, 4, 5, 8])
def test_a_resumed_run_appends_after_its_first_step(tmp_path, tail, first_step):
    """Lines of steps that will run again are removed, and so is the half line of a killed run."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 1.0}, {"step": 1, "eval_loss": 1.5}, {"step": 2, "loss": 2.0}]
    lines += [{"step": 3, "loss": 3.0}, {"step": 3, "eval_loss": 3.5}, {"step": 4, "loss": 4.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    lines += [json.loads(tail)] if tail.endswith("5.0}") else []  # this one lacks only its newline
    new = {"step": first_step + 1, "loss": 0.0}
    with log_lib.open_metrics(str(path), first_step)[0] as file:
        file.write(json.dumps(new) + "\n")
    assert lines_of(path) == [line for line in lines if line["step"] <= first_step] + [new]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_without_a_file_starts_one(tmp_path):
    with log_lib.open_metrics(str(tmp_path / "a" / "m.jsonl"), 7)[0] as file:
        file.write("x\n")
    assert (tmp_path / "a" / "m.jsonl").read_text() == "x\n"


@pytest.mark.parametrize(
    "damaged", ["{oops}", '{"loss": 2}', "[3, {}", '{"step": ""}', "[" * 99_999 + "}", "\udcff\udcfe}"]
)
def test_lines_that_no_run_wrote_are_refused_and_left(tmp_path, damaged):
    path = tmp_path / "m.jsonl"
    content = f'{{"step": 1}}\n{damaged}\n'.encode(errors="surrogateescape")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="lines that no run wrote"):
        log_lib.open_metrics(str(path), 3)
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    calibrates, file, new = dict(fp8="calibrate", dtype="bfloat16"), str(tmp_path / "file"), str(tmp_path / "new")
    for flags, words in (
        (dict(profile_dir=str(tmp_path / "file" / "trace"), steps=9), "--profile_dir=.*file/trace cannot be written"),
        (dict(tensorboard_dir=str(tmp_path / "file")), "--tensorboard_dir=.*file cannot be written"),
        (dict(metrics_file=str(tmp_path / "file" / "m")), "--metrics_file=.*file/m cannot be written"),
        (dict(metrics_file=str(tmp_path)), "--metrics_file=.* exists, and is no file"),
        (dict(fp8_scales=str(tmp_path / "file" / "s"), **calibrates), "--fp8_scales=.*file/s cannot be written"),
        (dict(metrics_file=file, corpus=file), "--metrics_file=.*/file is --corpus, too: it would be lost"),
        (dict(metrics_file=file, fp8_scales=file, fp8="static"), "--metrics_file=.*/file is --fp8_scales, too"),
        (dict(corpus=file, fp8_scales=file, **calibrates), "--fp8_scales=.*/file is --corpus, too"),
        (dict(metrics_file=new, fp8_scales=new, **calibrates), "--fp8_scales=.*/new is --metrics_file, too"),
    ):
        with pytest.raises(ValueError, match=words):
            log_lib.check_outputs(from_preset("tiny", **flags))
    log_lib.check_outputs(from_preset("tiny", metrics_file=str(tmp_path / "new" / "m")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


# -- TensorBoard


def shown_by_tensorboard(folder) -> dict[str, list[tuple[int, float]]]:
    """{tag: (step, value)}, as TensorBoard's own reader finds them in the files of one of its runs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def in_order(monkeypatch):
    """Files of TensorBoard are read in the order of their names: second, host, process. Here all are of one second."""
    names = (f"host{number}" for number in range(10))
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))


def test_tensorboard_shows_each_step_once_with_the_numbers_of_the_metrics_file(in_order, tmp_path, capsys):
    """A run killed after step 5 resumes from 3, and ends with 6; then only the evaluation comes again."""
    folder, path = tmp_path / "charts", tmp_path / "m.jsonl"
    config = from_preset("tiny", metrics_file=str(path), tensorboard_dir=str(folder), steps=6)
    for first_step, last, loss in ((0, 5, 9.0), (3, 6, 2.0), (6, 6, 2.0)):
        epochs = lambda step: {"a": step / 8, "b": 0.5}
        with contextlib.closing(Log(config, first_step, MESH, epochs)) as log:
            log.start_clock()
            for step in range(first_step + 1, last + 1):
                log.step(metrics(step, loss=math.nan if step == 2 else loss + step / 8))
                log.finish_step()
                if step in (3, 5):
                    log.evaluation(step, loss, {"a": loss - 1, "b": loss + 1})
            if last == 6:
                log.evaluation(6, loss, {"a": loss - 1, "b": loss + 1})
            if last > first_step:
                log.summary()
    train, held_out = (shown_by_tensorboard(folder / part) for part in ("train", "held_out"))
    rows = [row for row in lines_of(path) if "loss" in row]
    assert set(train) == {*KEYS, "epochs/a", "epochs/b"} - {"step", "mfu"}  # the peak of a CPU is unknown
    assert [step for step, _ in train["loss"]] == [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for tag in {*KEYS} & {*train}:
        written = [math.nan if row[tag] is None else row[tag] for row in rows]
        assert [value for _, value in train[tag]] == pytest.approx(written, nan_ok=True)
    assert train["epochs/a"][-1] == (6, 0.75)
    assert held_out["loss"] == [(3, 9.0), (5, 2.0), (6, 2.0)]
    assert held_out["loss_by_source/b"] == [(3, 10.0), (5, 3.0), (6, 3.0)]
    assert f"charts     tensorboard --logdir={folder}\n" in capsys.readouterr().out


def test_a_new_run_hides_what_an_earlier_one_left_for_tensorboard(in_order, tmp_path):
    for loss, steps in ((1.0, 3), (2.0, 2)):
        with started(from_preset("tiny", tensorboard_dir=str(tmp_path))) as log:
            for step in range(1, steps + 1):
                log.step(metrics(step, loss=loss))
            log.finish_step()
            log.event(steps, "saved")
            assert shown_by_tensorboard(tmp_path / "train")["loss"][-1] == (steps, loss)  # what a kill would leave
    assert shown_by_tensorboard(tmp_path / "train")["loss"] == [(1, 2.0), (2, 2.0)]


def test_without_tensorboard_its_folder_is_refused(tmp_path, monkeypatch):
    config = from_preset("tiny", tensorboard_dir=str(tmp_path / "charts"))
    log_lib.check_outputs(config)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r'--tensorboard_dir needs tensorboard: pip install -e "\.\[tensorboard\]"'):
        log_lib.check_outputs(config)


def test_a_full_disk_ends_the_scalars_and_not_the_run(tmp_path, capsys, monkeypatch):
    with started(from_preset("tiny", tensorboard_dir=str(tmp_path), steps=3)) as log:

        def full(event):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(log.scalars.writers["train"], "add_event", full)
        for step in (1, 2, 3):
            log.step(metrics(step))
        log.finish_step()
        log.evaluation(3, 1.0)
    assert capsys.readouterr().out.count(f"scalars    {tmp_path}: [Errno 28] No space left on device; no more") == 1


def test_a_full_disk_ends_the_metrics_and_not_the_run(tmp_path, capsys):
    with started(from_preset("tiny", metrics_file=str(tmp_path / "m"), steps=3)) as log:
        log.file.close()
        log.file = open("/dev/full", "w")
        for step in (1, 2, 3):
            log.step(metrics(step))
        log.finish_step()
    assert capsys.readouterr().out.count("No space left on device; no more are written") == 1


# -- pictures


def written_run(path: Path, loss: float) -> str:
    """The metrics file of a run of four steps, which resumed after the second one; the third one was skipped."""
    rows = [{"step": n, "loss": loss / n, "grad_norm": 0.5, "step_s": n / 4, "tokens_per_s": 4e3} for n in range(1, 5)]
    rows[2] |= {"loss": None, "grad_norm": None}
    rows[2:2] = [{"step": 2, "eval_loss": loss + 1}, {"step": 2, "event": "resumed"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_picture_has_the_rows_of_its_files_and_a_colour_for_each_run(tmp_path, capsys):
    files = [written_run(tmp_path / f"{name}.jsonl", loss) for name, loss in (("a", 8.0), ("b", 4.0))]
    figure = log_lib.draw({Path(file).stem: lines_of(file) for file in files})
    lines = [[line.get_xydata().tolist() for line in panel.lines] for panel in figure.axes]
    assert lines[0] == [[[1, 8], [2, 4], [4, 2]], [[2, 9]], [[1, 4], [2, 2], [4, 1]], [[2, 5]]]
    assert lines[1] == 2 * [[[1, 0.5], [2, 0.5], [4, 0.5]]]
    assert lines[2] == 2 * [[[2, 0.5], [4, 1.0]]]  # steps 1 and 3 are the first ones of their programs
    assert lines[3] == 2 * [[[2, 4e3], [4, 4e3]]]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours == [report.BLUE, report.BLUE, report.ORANGE, report.ORANGE]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "held-out loss"]

    log_lib.main(["plot", *files, f"--out={tmp_path / 'new' / 'run.png'}"])
    assert capsys.readouterr().out == f"written    {tmp_path / 'new' / 'run.png'}\n"
    height, width, _ = image.imread(tmp_path / "new" / "run.png").shape
    assert (width, height) == (1320, 840)


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    run = written_run(tmp_path / "run.png", 1.0)
    (tmp_path / "step").write_text('{"step_s": 1.0}')
    for file, out, words in (
        (run, "run.jpg", "--out=run.jpg must end in .png"),
        (run, run, "it would be lost"),
        (str(tmp_path / "step"), f"{tmp_path}/x.png", "is a step, not a run: python report.py draws it"),
        (str(Path(__file__)), f"{tmp_path}/x.png", "is neither a --metrics_file nor"),
    ):
        with pytest.raises(ValueError, match=words):
            log_lib.plot([file], out)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r'needs matplotlib: pip install -e "\.\[plot\]"'):
        log_lib.plot([run], f"{tmp_path}/x.png")
    assert not (tmp_path / "x.png").exists()
