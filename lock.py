"""One run at a time in a folder: a lock file says which process saves there, and its heartbeat that it still does.

The file is created where there is none, which only one of two runs can do at the same time, and removed at the end. A
process that is killed leaves it behind, so a lock is stale

    on this machine    where that process is gone: there is none of its number, or one that began at another time
    on another         where the heartbeat stops: nothing was written for 35 s, of which one beat is due every 10 s

The second is found out by watching the file, since the clocks of two machines need not agree. Machine means one boot of
a system and one space of process numbers: two containers are two.

A run that lost its lock, suspended for long or cut off from the storage, sees it before its next save and ends.
**Left out**: a bucket creates no file exclusively; there two runs that start in the same two seconds may both go on to
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

    def __init__(self, file, ours: dict):
        self.file, self.ours, self.beats, self.taken_by = file, ours, 0, None
        self.writing, self.ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._beat_until_ended, name="lock", daemon=True).start()

    def check(self) -> None:
        """Raises OSError where another run has taken the folder over meanwhile."""
        self.beat()
        if self.taken_by:
            raise OSError(
                f"{self.file.parent} was taken over by {_named(self.taken_by)}, while this process stood still for "
                f"{SILENCE_S} s or longer: this run ends without another save"
            )

    def beat(self) -> None:
        """Writes the file anew, unless it is another run's by now."""
        with self.writing, contextlib.suppress(OSError):  # a beat that is lost is no reason to end
            theirs = _parsed(_read(self.file))
            if theirs and theirs["run"] != self.ours["run"]:
                self.taken_by = theirs
            elif not self.ended.is_set():
                self.beats += 1
                _replace(self.file, json.dumps(self.ours | {"beats": self.beats}))

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
    """The lock of the folder that `file` is in, which may be a pathlib.Path, or an etils.epath.Path of a bucket.

    Raises:
      HeldError: another run holds it.
      OSError: the file cannot be written.
    """
    ours = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        "machine": _machine(),
        "born": _born(os.getpid()),
        "run": uuid.uuid4().hex,
        "beats": 0,
    }
    while not _create(file, json.dumps(ours)):
        text = _read(file)
        if _is_held(text, file):
            raise HeldError(
                f"{file.parent} is in use by {_named(_parsed(text))}: end that run, or give this one another folder"
            )
        with contextlib.suppress(FileNotFoundError):
            if _read(file) == text:
                file.unlink()
    return Lock(file, ours)


def _is_held(text: str, file) -> bool:
    """Whether the run that wrote `text` is still there."""
    theirs = _parsed(text)
    if theirs and theirs["machine"] == _machine():
        born = _born(theirs["process"])
        if born is None or 0 not in (born, theirs["born"]):
            return born == theirs["born"]
    if not text and not file.exists():
        return False
    print(f"{file.parent} is locked by {_named(theirs)}: watching for {SILENCE_S} s", file=sys.stderr, flush=True)
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        time.sleep(min(1, SILENCE_S / 10))
        if (now := _read(file)) != text:
            return bool(now) or file.exists()
    return False


def _create(file, text: str) -> bool:
    """Writes a file that is not there yet; whether it was not."""
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
    """Writes a file; a reader finds all of the old or all of the new text, as he always does in a bucket."""
    if isinstance(file, pathlib.Path):
        with outputs.replacing(file) as unfinished:
            unfinished.write(text)
    else:
        file.write_text(text)


def _read(file) -> str:
    """Its text; empty where there is no such file."""
    try:
        return file.read_text(errors="replace") if isinstance(file, pathlib.Path) else file.read_text()
    except FileNotFoundError:
        return ""


def _parsed(text: str) -> dict | None:
    """Reads what `acquire` wrote; None where it is damaged."""
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
    """Names the machine or container in which process numbers are unique."""
    try:
        return (
            f"{pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:  # not Linux
        return socket.gethostname()


def _born(process: int) -> int | None:
    """When a process of this machine began, in ticks since boot, or 0 where that is hidden; None where it is gone."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # it is another user's
        pass
    try:
        state, *fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux, or not for us to see
        return 0
    return None if state in "ZX" else int(fields[18])  # a zombie has ended
