"""Tests runs of two processes, four simulated devices each: they equal one process, and end with a message."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support import ROOT, assert_same_bits, load, read_metrics, run_values, start, start_two, steps_in, wait_until

import processes
import train
from benchmarks import trials
from config import Config
from processes import LOST_PEER, check_port, is_lost_peer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    yield from run_values(tmp_path_factory.mktemp("values"))


SAMPLES = dict(sample=6, sample_every=10)


@pytest.fixture(scope="module")
def one(values, tmp_path_factory) -> Config:
    """Returns the Config of a run in one process."""
    directory = tmp_path_factory.mktemp("one")
    values = values | dict(checkpoint_dir=str(directory / "checkpoints"), metrics_file=str(directory / "metrics.jsonl"))
    assert start(values | dict(steps=20) | SAMPLES, directory / "out").wait() == 0
    return Config(**values, steps=20)


def end_with(statuses: list[int], processes: list[subprocess.Popen], directory: Path, timeout_s: float = 300) -> None:
    """Waits for both processes; a failure shows what each has printed."""
    ended = [process.wait(timeout_s) for process in processes]
    printed = [f"{name}: {(directory / name).read_text()[-5000:]}" for name in ("0.out", "0.err", "1.out", "1.err")]
    assert ended == statuses, "\n".join(printed)


def wait_for_signal(process: subprocess.Popen, other: subprocess.Popen) -> None:
    """Waits until a process is killed, or stopped, by the signal that it sends itself."""
    changed = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    wait_until(lambda: os.waitid(os.P_PID, process.pid, changed), other)


RECORD_ROWS = """
import json, pathlib, sys
import data, flags, train

rows_read = []

def record(function):
    def recorded(*args, rows, **keywords):
        rows_read.append((rows.start, rows.stop))
        return function(*args, rows=rows, **keywords)
    return recorded

data.train_batch, data.eval_batch = record(data.train_batch), record(data.eval_batch)
run = flags.parse_flags(flags.__file__, sys.argv[1:])
train.run(run)
pathlib.Path(run.metrics_file).with_name(f"rows{run.process_id}.json").write_text(json.dumps(sorted(set(rows_read))))
"""


@pytest.fixture(scope="module")
def two(values, tmp_path_factory) -> Path:
    """Returns the directory of an undisturbed run in two processes."""
    directory = tmp_path_factory.mktemp("two")
    processes = start_two(
        values | dict(eval_batches=2, save_every=10) | SAMPLES, directory, program=("-c", RECORD_ROWS)
    )
    end_with([0, 0], processes, directory)
    return directory


def test_two_processes_equal_one(one, two):
    """In losses, samples and the checkpoint, which both write; each reads its share of a batch, and only one prints."""
    metrics, expected = read_metrics(two / "metrics.jsonl"), read_metrics(one.metrics_file)
    assert len(metrics) == 20
    np.testing.assert_allclose(metrics, expected, rtol=1e-6)
    lines = [map(json.loads, Path(file).read_text().splitlines()) for file in (two / "metrics.jsonl", one.metrics_file)]
    samples, expected = ([(row["step"], row["text"]) for row in each if row.get("event") == "sample"] for each in lines)
    assert samples == expected and [step for step, _ in samples] == [10, 20]

    rows = [json.loads((two / f"rows{i}.json").read_text()) for i in (0, 1)]
    assert rows == [[[i, i + 1] for i in range(4)], [[i, i + 1] for i in range(4, 8)]]

    checkpoints = two / "checkpoints"
    assert steps_in(checkpoints) == [10, 20]
    for i in (0, 1):  # both write about the same bytes: only small arrays, which all hold, are written by one
        assert sum(f.stat().st_size for f in (checkpoints / "20/state" / f"ocdbt.process_{i}").rglob("*")) > 100_000
    (state, note), (expected, _) = load(dataclasses.replace(one, checkpoint_dir=str(checkpoints))), load(one)
    assert note == ""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state, expected)

    assert (two / "0.out").read_text().startswith("mesh       8 x cpu: fsdp 8; 2 processes\n")
    assert [(two / name).read_text() for name in ("1.out", "0.err", "1.err")] == ["", "", ""]


def test_the_first_step_waits_for_the_slowest_compile(values, tmp_path):
    """Longer than the 30 s that gloo, which connects CPU processes, would wait for it."""
    compiling = trials.signalled("model.loss_fn", 1)
    processes = start_two(values | dict(compilation_cache=""), tmp_path, own={1: compiling})
    wait_for_signal(processes[1], processes[0])
    time.sleep(35)
    processes[1].send_signal(signal.SIGCONT)
    end_with([0, 0], processes, tmp_path)


def test_a_port_that_is_taken_is_refused_at_once(values, tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        first = dict(coordinator=f"localhost:{port}", num_processes=2, process_id=0)
        assert start(values | first, tmp_path / "0.out").wait(180) == 1
    message = f"train.py: error: process 0 cannot listen at localhost:{port} ("
    assert (tmp_path / "0.err").read_text().startswith(message)


def test_a_port_that_is_taken_at_one_address_of_a_name_is_refused(monkeypatch):
    """The others may reach process 0 at either address, so both must be free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        with pytest.raises(OSError, match=rf"^process 0 cannot listen at localhost:{port} \("):
            check_port(f"localhost:{port}")


def listened_at(port: int) -> set[str]:
    """The addresses of this machine at whose `port` a program listens, as the kernel writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}


def test_process_0_listens_at_the_address_that_is_named(values, tmp_path):
    """At every address of its host, all who reach it could join the run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    values = values | dict(coordinator=f"localhost:{port}", num_processes=2, process_id=0)
    process = start(values, tmp_path / "0.out")
    try:
        addresses = wait_until(lambda: listened_at(port), process)
    finally:
        process.kill()
        process.wait()
    loopback = "0100007F"  # 127.0.0.1; below also as an IPv6 address, and IPv6's own loopback
    assert addresses <= {loopback, f"{'0' * 16}FFFF0000{loopback}", f"{'0' * 24}01000000"}


def test_an_address_that_is_not_here_is_refused_at_once(values, tmp_path):
    first = dict(coordinator="192.0.2.1:9911", num_processes=2, process_id=0)  # reserved by RFC 5737
    assert start(values | first, tmp_path / "0.out").wait(180) == 1
    message = (tmp_path / "0.err").read_text()
    assert message.startswith("train.py: error: process 0 cannot listen at 192.0.2.1:9911 (")
    assert message.endswith("set JAX_COORDINATOR_BIND_ADDRESS\n") and message.count("\n") == 1


NOT_ALL = "processes of this run did not all connect to localhost"


@pytest.mark.parametrize("expected", [(3, 2), (2, 3)], ids=["process 0 expects 3", "process 0 expects 2"])
def test_processes_that_expect_different_numbers_end_soon_with_a_message(expected, values, tmp_path):
    """Process 0 of 3 waits for a third one; process 0 of 2 accepts one that expects 3, and flags are compared."""
    mesh = dict(mesh="fsdp:6", batch=6, peer_timeout=5)
    both = start_two(values | mesh | dict(num_processes=expected[0]), tmp_path, second=dict(num_processes=expected[1]))
    end_with([1, 1], both, tmp_path, timeout_s=180)
    for i, expects in enumerate(expected):
        last = (tmp_path / f"{i}.err").read_text().splitlines()[-1]
        if expected[0] == 3:
            assert last.startswith(f"train.py: error: the {expects} {NOT_ALL}")
            assert ("(2 did): start one for each --process_id" in last) == (i == 0)
        else:
            assert "disagree: --num_processes is 2 on process 0 and 3 on process 1" in last


def test_a_process_waits_for_one_that_could_not_start_no_longer_than_peer_timeout_allows(values, tmp_path):
    both = start_two(values | dict(peer_timeout=2), tmp_path, second=dict(batch="x"))
    end_with([1, 2], both, tmp_path, timeout_s=180)
    last = (tmp_path / "0.err").read_text().splitlines()[-1]
    assert last.startswith(f"train.py: error: the 2 {NOT_ALL}") and re.search(r"within \d+ s \(1 did\): ", last)
    assert "--batch" in (tmp_path / "1.err").read_text().splitlines()[-1]


@pytest.mark.parametrize("address", ["localhost:9911", "nonsense"])
def test_an_address_in_the_environment_alone_is_refused(address, values, tmp_path, monkeypatch):
    program = f"import os, runpy; os.environ['JAX_COORDINATOR_ADDRESS'] = '{address}'; "
    program += "runpy.run_path('train.py', run_name='__main__')"
    assert start(values, tmp_path / "0.out", program=("-c", program)).wait(180) == 2
    message = (tmp_path / "0.err").read_text()
    assert message.startswith(f"train.py: error: JAX_COORDINATOR_ADDRESS={address} is not all: ")
    assert "--coordinator=HOST:PORT, --num_processes=N and --process_id=I" in message and message.count("\n") == 1


def test_windows_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match=r"^this runs on Linux, on macOS, and on Windows in WSL"):
        train.run(Config())


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [  # as jaxlib's C++ writes them
        ("UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:40000", True),
        ("UNAVAILABLE: failed to connect to all addresses", True),
        ("DEADLINE_EXCEEDED: Barrier timed out. Id: step", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes", False),
    ],
)
def test_errors_of_a_lost_process_are_recognized(error, is_lost):
    assert is_lost_peer(jax.errors.JaxRuntimeError(error)) == is_lost


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("kind", "lost"), [(signal.SIGSTOP, 1), (signal.SIGSTOP, 0)], ids=lambda value: getattr(value, "name", value)
)
def test_a_lost_process_ends_the_other(kind, lost, values, one, tmp_path):
    """A process that hangs is noticed after a silence of peer_timeout.

    In test_a_run_survives_a_killed_process the connection to process 0 breaks, which is noticed at once.
    """
    in_a_step = {lost: trials.signalled("log.Log.step", 6, number=kind)}
    processes = start_two(values | dict(save_every=2, peer_timeout=10), tmp_path, own=in_a_step)
    wait_for_signal(processes[lost], processes[1 - lost])
    try:
        assert processes[1 - lost].wait(180) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
    last = (tmp_path / f"{1 - lost}.err").read_text().splitlines()[-1]
    assert last == f"train.py: error: {LOST_PEER}"
    state, _ = load(dataclasses.replace(one, checkpoint_dir=str(tmp_path / "checkpoints")))
    assert int(state.step) in (2, 4, 6)


DAMAGED_FOR_THE_SECOND = """
import sys
import command, corpora, data, flags, train

def damaged(*args, read=data.train_batch, **options):
    if args[1] == 12 and "--process_id=1" in sys.argv:
        raise corpora.DamagedError("squares.bin is damaged")
    return read(*args, **options)

data.train_batch = damaged
train.CONFIG, train.BEGUN = flags.parse_flags(flags.__file__, sys.argv[1:]), None
command.run(train.main)
"""


def test_a_corpus_that_one_process_cannot_read_ends_both_with_a_message(values, tmp_path):
    """Neither waits for the other."""
    processes = start_two(
        values | dict(save_every=5, peer_timeout=300), tmp_path, program=("-c", DAMAGED_FOR_THE_SECOND)
    )
    end_with([1, 1], processes, tmp_path)
    assert (tmp_path / "1.err").read_text() == "train.py: error: squares.bin is damaged\n"
    assert (tmp_path / "0.err").read_text().splitlines()[-1] == f"train.py: error: {LOST_PEER}"
    assert max(steps_in(tmp_path / "checkpoints")) == 10


def test_a_termination_before_the_first_step_of_a_resumed_run_stops_it(monkeypatch):
    """Then jax.distributed agrees on number 1, and compares for equality: so it is not given the number of the step."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, "reached_preemption_sync_point", lambda number: number == 1)
    with processes.notice_of_termination() as terminated:
        assert [terminated(step) for step in (9, 10)] == [signal.SIGTERM, 0]


def test_termination_of_one_process_ends_both_after_the_same_step(values, one, tmp_path):
    """By SIGHUP, which the other process does not see. The statuses are those of the signals."""
    number = signal.SIGHUP
    in_a_step = {1: trials.signalled("log.Log.step", 5, number=number, then_s=1)}  # jax.distributed polls every second
    verbose = dict(TF_CPP_MIN_LOG_LEVEL="0")  # it logs when it sees the signal, and on which step all agree
    processes = start_two(values, tmp_path, own=in_a_step, variables=verbose)
    end_with([128 + signal.SIGTERM, 128 + number], processes, tmp_path)
    (step,) = steps_in(tmp_path / "checkpoints")
    assert 4 < step < 20
    assert f"terminated after step {step}, saved in" in (tmp_path / "0.out").read_text()
    end_with([0, 0], start_two(values, tmp_path), tmp_path)
    assert f"resumed    from step {step} in " in (tmp_path / "0.out").read_text()
    np.testing.assert_allclose(read_metrics(tmp_path / "metrics.jsonl"), read_metrics(one.metrics_file), rtol=1e-6)


def test_a_run_survives_a_killed_process(values, one, two, tmp_path):
    """Process 0 is killed within a step, the other ends, and both are started again: the result is bit-equal.

    With `pytest -s` it prints how long the other took to end.
    """
    values = values | dict(eval_batches=2, save_every=2)
    in_a_step = {0: trials.signalled("log.Log.step", 6, number=signal.SIGKILL)}
    processes = start_two(values | dict(peer_timeout=60), tmp_path, own=in_a_step)
    wait_for_signal(*processes)
    begun = time.monotonic()
    try:
        assert processes[1].wait(100) == 1
        seconds = time.monotonic() - begun
        print(f"the other ended {seconds:.1f} s later")
        assert seconds < 30  # a killed process breaks its connections: nobody waits for peer_timeout
        assert (tmp_path / "1.err").read_text().splitlines()[-1] == f"train.py: error: {LOST_PEER}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    reached = max(steps_in(tmp_path / "checkpoints"))
    assert 0 < reached < 6
    end_with([0, 0], start_two(values, tmp_path), tmp_path)
    assert f"resumed    from step {reached} in " in (tmp_path / "0.out").read_text()
    state, expected = (
        load(dataclasses.replace(one, checkpoint_dir=str(run / "checkpoints")))[0] for run in (tmp_path, two)
    )
    assert_same_bits(state, expected)
    assert read_metrics(tmp_path / "metrics.jsonl") == read_metrics(two / "metrics.jsonl")


def test_freed_memory_stays_for_the_next_operation():
    """A second array of the same size touches no page that Linux must clear; otherwise it touches 512, 2 MiB."""
    program = """
import resource, sys
import numpy as np
import processes
if sys.argv[1] == "keep":
    processes.keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2**21, np.uint8)
before = faults()
np.ones(2**21, np.uint8)
print(faults() - before)
"""
    run = lambda how: int(subprocess.check_output([sys.executable, "-c", program, how], cwd=ROOT))
    assert run("keep") < 50 < 300 < run("do not")
