"""Tests the lock of a folder: one of two runs gets it, and the lock of a dead run is taken over."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

import lock


class Bucket:
    """A path of a bucket: it reads and writes complete objects, and creates none exclusively."""

    def __init__(self, path):
        self.path, self.parent = path, path.parent

    def exists(self):
        return self.path.exists()

    def read_text(self):
        return self.path.read_text()

    def write_text(self, text):
        complete = self.path.with_name("complete")
        complete.write_text(text)
        os.replace(complete, self.path)

    def unlink(self):
        self.path.unlink()


@pytest.fixture(params=["folder", "bucket"])
def file(request, tmp_path, monkeypatch):
    for name, seconds in (("BEAT_S", 60), ("SILENCE_S", 0.3), ("SETTLES_S", 0)):
        monkeypatch.setattr(lock, name, seconds)
    path = tmp_path / "lock"
    return path if request.param == "folder" else Bucket(path)


def written(file, **changes) -> str:
    """Writes the lock that another process, which is gone, left behind, with some changes; returns its text."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    record = dict(host="h", process=gone.pid, started="then", machine=lock._machine(), born=1, run="theirs", beats=3)
    file.write_text(json.dumps(record | changes))
    return file.read_text()


def test_a_second_run_is_refused_with_the_holder_of_the_lock(file):
    held = lock.acquire(file)
    holder = f"process {os.getpid()} on {socket.gethostname()}, which started 20"
    with pytest.raises(lock.HeldError, match=f"{file.parent} is in use by {holder}.*: end that run, or give"):
        lock.acquire(file)
    held.check()
    held.release()
    assert not file.exists()
    lock.acquire(file).release()


def test_a_lock_beats(file, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    held = lock.acquire(file)
    seen, deadline = set(), time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < deadline:
        seen.add(json.loads(file.read_text())["beats"])
    held.release()
    assert len(seen) == 3


def test_the_lock_of_a_process_that_is_gone_is_taken(file):
    written(file)
    lock.acquire(file).release()


def test_the_lock_of_a_process_whose_number_is_reused_is_taken(file):
    written(file, process=os.getpid())
    lock.acquire(file).release()


def test_the_lock_of_a_zombie_is_taken(file):
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    born = lock._born(zombie.pid)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    written(file, process=zombie.pid, born=born)
    lock.acquire(file).release()
    zombie.wait()


def test_a_suspended_process_keeps_its_lock(file):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    process = subprocess.Popen([sys.executable, "-c", program])
    os.waitpid(process.pid, os.WUNTRACED)
    written(file, process=process.pid, born=lock._born(process.pid))
    with pytest.raises(lock.HeldError, match=f"process {process.pid} on h"):
        lock.acquire(file)
    process.kill()
    process.wait()


def test_on_another_machine_the_heartbeat_decides(file, capsys):
    record = json.loads(written(file, machine="another boot"))
    lock.acquire(file).release()
    message = f"locked by process {record['process']} on h, which started then: watching for 0.3 s"
    assert message in capsys.readouterr().err

    ended = threading.Event()

    def beat():
        beats = 0
        while not ended.wait(0.02):
            beats += 1
            lock._replace(file, json.dumps(record | {"beats": beats}))

    written(file, machine="another boot")
    other = threading.Thread(target=beat)
    other.start()
    with pytest.raises(lock.HeldError, match=r"is in use by process .* on h, which started then"):
        lock.acquire(file)
    ended.set()
    other.join()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 3}'])
def test_a_damaged_lock_is_watched_and_taken(text, file):
    file.write_text(text)
    lock.acquire(file).release()


@pytest.mark.parametrize("changes", [{}, dict(process=os.getpid(), machine="another")], ids=["here", "elsewhere"])
def test_a_run_that_lost_its_lock_ends_before_it_saves_and_leaves_the_lock(changes, file):
    """It leaves it to any other run, even one of the same process number, which may be on another machine."""
    held = lock.acquire(file)
    text = written(file, **changes)
    with pytest.raises(OSError, match=r"taken over by process .* on h, which started then, .* without another save"):
        held.check()
    held.release()
    assert file.read_text() == text


def test_a_lock_that_was_removed_is_written_again(file):
    held = lock.acquire(file)
    file.unlink()
    held.check()
    assert json.loads(file.read_text())["run"] == held.record["run"]
    held.release()


def test_one_of_many_runs_at_the_same_time_gets_the_lock(tmp_path):
    file, locks, begin = tmp_path / "lock", [], threading.Barrier(8)
    written(file)

    def run():
        begin.wait()
        try:
            locks.append(lock.acquire(file))
        except lock.HeldError:
            locks.append(None)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holders = [held for held in locks if held]
    for held in holders:
        held.beat()
    assert len(locks) == 8 and sum(held.taken_by is None for held in holders) == 1
    for held in holders:
        held.release()
