"""Storage: ranges of bytes of a file on this machine, or in a bucket (gs://, s3://, https://).

**Idea.** A run reads a few blocks of a corpus at a time, from anywhere in it. `opened(path)` gives a file of either
kind a size and `read(offset, num_bytes)`. A local file is read with pread, so that a mounted bucket or a shared file
system works as a folder does. A path with a scheme goes through fsspec (extra `[data]`), which finds the library for
the scheme: gcsfs for gs://, s3fs for s3://.

**Retries.** A read from a bucket that fails, or returns fewer bytes than the file has there, is tried again after 1, 2,
4, 8 and 16 seconds. The first failure of a file is reported on stderr. A missing file or a missing permission is an
error at once.

**Cost.** One request a read, and two more where a file is opened. There is no cache: data.prefetch makes two batches
ahead of the step, and data.py reads the rows of a batch from a bucket on `READERS` threads. So 3 batches of the
process's rows are read or wait, each of ceil(bytes of a sequence / 64 KiB) blocks, and one more where it straddles two.

**Left out.** Writing. `python data.py prepare` writes to a folder of this machine; the bucket's own tools copy it.
"""

import contextlib
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import inputs

READERS = 16  # requests of a process to a bucket that are under way at once
_DELAYS_S = (1, 2, 4, 8, 16)  # before the attempts after the first
_FINAL = (PermissionError, IsADirectoryError, NotImplementedError)  # a second attempt would fail, too


class File(Protocol):
    """An open file. `read` returns fewer bytes where the file ends, and raises OSError where it cannot be read."""

    path: str
    size: int  # bytes, when it was opened
    is_remote: bool

    def read(self, offset: int, num_bytes: int) -> bytes: ...

    def change(self) -> str:
        """Returns how the file has changed since it was opened, for a message."""


def is_remote(path: str) -> bool:
    """Whether a path has a scheme, as gs://bucket/folder has."""
    return "://" in path


def expanded(path: str) -> str:
    """A path with ~ as the home folder; one with a scheme as it is. Raises ValueError for an unknown user's home."""
    return path if is_remote(path) else inputs.expanded(path)


def opened(path: str) -> File:
    """Opens a file.

    Raises:
      ValueError: the path's scheme needs a library that is missing.
      OSError: there is no such file, or it cannot be read.
    """
    return _RemoteFile(path) if is_remote(path) else _LocalFile(path)


def read_file(path: str) -> bytes:
    """The content of a small file. Raises as `opened`, and OSError where it cannot be read."""
    file = opened(path)
    return file.read(0, file.size)


def is_folder(path: str) -> bool:
    """Whether a path is a folder, of this machine or of a bucket. Raises as `opened`."""
    if not is_remote(path):
        return os.path.isdir(path)
    filesystem, name = _filesystem(path)
    return _retried(path, f"{path} cannot be read", lambda: filesystem.isdir(name))


def join(folder: str, name: str) -> str:
    """The path of a file in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(folder, name)


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Yields the path of a small file on this machine: the file itself, or a copy of one in a bucket, for the block."""
    if not is_remote(path):
        yield path
        return
    content = read_file(path)
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, path.rpartition("/")[2])
        with open(copy, "wb") as file:
            file.write(content)
        yield copy


class _LocalFile:
    is_remote = False

    def __init__(self, path: str):
        raw = open(path, "rb", buffering=0)
        weakref.finalize(self, raw.close)
        self.path, self._descriptor, self._opened = path, raw.fileno(), os.fstat(raw.fileno())
        self.size = self._opened.st_size

    def read(self, offset: int, num_bytes: int) -> bytes:
        pieces = []
        try:
            while num_bytes > 0 and (piece := os.pread(self._descriptor, min(num_bytes, 1 << 30), offset)):
                pieces.append(piece)
                offset, num_bytes = offset + len(piece), num_bytes - len(piece)
        except OSError as error:
            raise OSError(f"{self.path} cannot be read at byte {offset}: {error}") from error
        return b"".join(pieces)

    def change(self) -> str:
        now = os.fstat(self._descriptor)
        if now.st_size != self.size:
            return f"it has {now.st_size} bytes and had {self.size} when it was opened"
        if now.st_mtime_ns != self._opened.st_mtime_ns:
            return f"it was written to at {time.strftime('%F %T', time.localtime(now.st_mtime))}, after it was opened"
        return "by their checksum; nothing wrote to it since it was opened"


class _RemoteFile:
    is_remote = True

    def __init__(self, path: str):
        self.path, (self._filesystem, self._name) = path, _filesystem(path)
        self.size, self._version = self._now()

    def read(self, offset: int, num_bytes: int) -> bytes:
        end = min(offset + num_bytes, self.size)

        def attempt() -> bytes:
            content = self._filesystem.cat_file(self._name, start=offset, end=end)
            if len(content) < end - offset:
                raise OSError(f"{len(content)} bytes came of {end - offset}")
            return content

        return _retried(self.path, f"{self.path} cannot be read at byte {offset}", attempt) if end > offset else b""

    def change(self) -> str:
        try:
            size, version = self._now()
        except OSError as error:
            return str(error)
        if size != self.size:
            return f"it has {size} bytes and had {self.size} when it was opened"
        if version != self._version:
            return "another file has its name since it was opened"
        return "by their checksum; the bucket reports no change since it was opened"

    def _now(self) -> tuple[int, str]:
        """(size, a text that differs for another version of the file), as the bucket reports them now."""

        def attempt():
            self._filesystem.invalidate_cache(self._name)
            info = self._filesystem.info(self._name)
            if info["type"] != "file":
                raise IsADirectoryError(f"{self.path} is a folder, not a file")
            return int(info["size"]), self._filesystem.ukey(self._name)

        return _retried(self.path, f"{self.path} cannot be opened", attempt)


def _filesystem(path: str) -> tuple[Any, str]:
    """(fsspec's file system for a path with a scheme, the path within it)."""
    try:
        import fsspec.core
    except ImportError:
        raise ValueError(f"{path} needs fsspec, which is not installed: pip install -e '.[data]'") from None
    try:
        return fsspec.core.url_to_fs(path)
    except ImportError as error:  # fsspec names the package to install
        raise ValueError(f"{path}: fsspec has no plugin for {path.partition('://')[0]}:// here: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}; give a local path, or one with gs://, s3:// or https://") from None


_reported: set[str] = set()  # paths whose first failure was reported


def _retried(path: str, failure: str, attempt: Callable[[], Any]) -> Any:
    """attempt(), again after each delay if it fails. Raises OSError, which begins with `failure`, after the last."""
    for delay_s in (*_DELAYS_S, None):
        try:
            return attempt()
        except FileNotFoundError:  # each library has its own message, often none
            raise FileNotFoundError(f"{failure}: there is no such file") from None
        except _FINAL:
            raise
        except Exception as error:  # each library has its own exceptions
            if delay_s is None:
                raise OSError(f"{failure}, {len(_DELAYS_S) + 1} times: {type(error).__name__}: {error}") from error
            if path not in _reported:
                _reported.add(path)
                print(f"{failure}: {type(error).__name__}: {error}; trying again", file=sys.stderr, flush=True)
            time.sleep(delay_s)
