"""Files that a program writes: whole or not at all, and never by way of a link that somebody else put there.

A file is written under another name and takes its own when all of it is there, so a kill or a full disk leaves the one
before. The other name ends in `.unfinished`, has a random part that nobody can know beforehand, and is opened
exclusively (O_EXCL): where anything has that name already, a link too, nothing is opened. What a kill leaves behind
is in nobody's way and may be removed.

Before the work begins, `check_writable` makes the folder and tries to write there, and `check_apart` finds an output
that is an input and would replace what it is made from.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Yields a new file, opened with `mode` ("w" or "wb"), that becomes `path` at the end of the block.

    An error in the block leaves what was at `path`, and nothing else. A link at `path` is replaced, not followed.

    Raises:
      ValueError: `path` is a folder, a device or a pipe.
      OSError: the file cannot be written.
    """
    _check_kind(os.fspath(path), path)
    unfinished = f"{os.fspath(path)}.{secrets.token_hex(4)}.unfinished"
    file = open(unfinished, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8")
    try:
        with file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def check_writable(called: str, path: str | os.PathLike) -> None:
    """Makes the folder of a file that will be written. Raises ValueError where the file could not be."""
    _check_kind(called, path)
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{called} cannot be written: {error}") from None


def _check_kind(called: str, path: str | os.PathLike) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{called} is there, and is no file: name another")


def check_apart(written: dict[str, str], read: dict[str, str]) -> None:
    """Raises ValueError where a file to be written is one to be read, by any of its names, or lies in a folder of them.

    The same of two files to be written. All are {what it is called: its path}; without a path it is none.
    """
    written, read = ({called: path for called, path in files.items() if path} for files in (written, read))
    for number, (called, path) in enumerate(written.items()):
        for other, its in (read | dict(list(written.items())[:number])).items():
            if _same(path, its):
                raise ValueError(f"{called}={path} is {other}, too: it would be lost; name another file")
            if os.path.isdir(its) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(its)):
                raise ValueError(f"{called}={path} lies in {other}, which is read: name a file elsewhere")


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is not there
        return os.path.realpath(path) == os.path.realpath(other)
