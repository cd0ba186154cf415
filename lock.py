"""One run at a time in a folder: a lock file names the process that saves there, and has its heartbeat.

**Idea.** The file is created exclusively, which only one of two runs can do, and removed at the end. A process that is
killed leaves it behind, so a lock is stale

    on this machine     if its process is gone: none has its number, or one that began at another time
    on another one      if its heartbeat stops: nothing was written for 35 s, where a beat is due every 10 s

A heartbeat is checked by watching the file, since the clocks of two machines need not agree. A machine here is one boot
of a system and one space of process numbers: two containers are two machines.

A run that lost its lock, because it was suspended or could not reach the storage, notices before its next save and
ends.

**Left out.** A bucket creates no file exclusively. There two runs that start within two seconds may both continue to
the first heartbeat or save, where one of them ends.
"""

import contextlib
import datetime
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid

import outputs

BEAT_S, SILENCE_S, SETTLES_S = 10, 35, 2


class HeldError(OSError):
    """Another run holds the lock."""


class Lock:
    """A lock that this process holds, from `acquire`."""

    def __init__(self, file, record: dict):
        self.file, self.record, self.beats, self.taken_by = file, record, 0, None
        self.writing, self.ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._beat_until_ended, name="lock", daemon=True).start()

    def check(self) -> None:
        """Raises OSError where another run has taken over the folder."""
        self.beat()
        if self.taken_by:
            raise OSError(
                f"{self.file.parent} was taken over by {_named(self.taken_by)}, while this process was suspended for "
                f"{SILENCE_S} s or longer: this run ends without another save"
            )

    def beat(self) -> None:
        """Writes the file again, unless another run has taken it."""
        with self.writing, contextlib.suppress(OSError):  # a lost beat is no reason to end
            written = _parsed(_read(self.file))
            if written and written["run"] != self.record["run"]:
                self.taken_by = written
            elif not self.ended.is_set():
                self.beats += 1
                _replace(self.file, json.dumps(self.record | {"beats": self.beats}))

    def release(self) -> None:
        """Removes the file. Raises nothing: a lock that is left behind is stale."""
        self.beat()
        self.ended.set()
        with self.writing, contextlib.suppress(OSError):
            if not self.taken_by:
                self.file.unlink()

    def _beat_until_ended(self) -> None:
        while not self.ended.wait(BEAT_S):
            self.beat()


def acquire(file) -> Lock:
    """Returns the lock of the folder that contains `file`, a pathlib.Path, or an etils.epath.Path of a bucket.

    Raises:
      HeldError: another run holds it.
      OSError: the file cannot be written.
    """
    record = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        "machine": _machine(),
        "born": _born(os.getpid()),
        "run": uuid.uuid4().hex,
        "beats": 0,
    }
    while not _create(file, json.dumps(record)):
        text = _read(file)
        if _is_held(text, file):
            raise HeldError(
                f"{file.parent} is in use by {_named(_parsed(text))}: end that run, or give this one another folder"
            )
        with contextlib.suppress(FileNotFoundError):
            if _read(file) == text:
                file.unlink()
    return Lock(file, record)


def _is_held(text: str, file) -> bool:
    """Whether the run that wrote `text` still exists."""
    holder = _parsed(text)
    if holder and holder["machine"] == _machine():
        born = _born(holder["process"])
        if born is None or 0 not in (born, holder["born"]):
            return born == holder["born"]
    if not text and not file.exists():
        return False
    print(f"{file.parent} is locked by {_named(holder)}: watching for {SILENCE_S} s", file=sys.stderr, flush=True)
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        time.sleep(min(1, SILENCE_S / 10))
        if (now := _read(file)) != text:
            return bool(now) or file.exists()
    return False


def _create(file, text: str) -> bool:
    """Creates a file. Returns whether it did not exist before."""
    if isinstance(file, pathlib.Path):
        try:
            with file.open("x") as opened:
                opened.write(text)
        except FileExistsError:
            return False
        return True
    if file.exists():
        return False
    file.write_text(text)
    time.sleep(SETTLES_S)  # another run may have written it after us
    return _read(file) == text


def _replace(file, text: str) -> None:
    """Writes a file so that a reader gets all of the old or all of the new text, as in a bucket anyway."""
    if isinstance(file, pathlib.Path):
        with outputs.replacing(file) as unfinished:
            unfinished.write(text)
    else:
        file.write_text(text)


def _read(file) -> str:
    """The text of a file; empty where it does not exist."""
    try:
        return file.read_text(errors="replace") if isinstance(file, pathlib.Path) else file.read_text()
    except FileNotFoundError:
        return ""


def _parsed(text: str) -> dict | None:
    """The record that `acquire` wrote; None where it is damaged."""
    with contextlib.suppress(ValueError):
        parsed = json.loads(text)
        kinds = dict(host=str, process=int, started=str, machine=str, born=int, run=str)
        if isinstance(parsed, dict) and all(type(parsed.get(name)) is kind for name, kind in kinds.items()):
            return parsed
    return None


def _named(record: dict | None) -> str:
    if not record:
        return "a run that its damaged lock does not name"
    return f"process {record['process']} on {record['host']}, which started {record['started']}"


def _machine() -> str:
    """A name of the machine or container in which process numbers are unique."""
    try:
        return (
            f"{pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:  # not Linux
        return socket.gethostname()


def _born(process: int) -> int | None:
    """When a process of this machine began, in ticks since boot; 0 where that is hidden, None where it is gone."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # another user's process
        pass
    try:
        state, *fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux, or not visible to us
        return 0
    return None if state in "ZX" else int(fields[18])  # a zombie has ended
