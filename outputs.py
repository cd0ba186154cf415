"""Output files: written completely or not at all, and never through a link that somebody else put there.

A file is written under a temporary name and renamed when it is complete, so a kill or a full disk leaves the old file.
The temporary name ends in `.unfinished`, has a random part that nobody can predict, and is opened exclusively (O_EXCL):
if anything has that name already, even a link, nothing is opened. A temporary file that a kill leaves may be removed.

Before the work begins, `check_writable` makes the folder and tries to write there, and `check_apart` refuses an output
that is also an input and would be lost.
"""

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Yields a new file, opened with `mode` ("w" or "wb"), that becomes `path` at the end of the block.

    An error in the block leaves `path` as it was, and no other file. A link at `path` is replaced, not followed.

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


def check_writable(name: str, path: str | os.PathLike) -> None:
    """Makes the folder of an output. Raises ValueError, with the output's name, where it could not be written."""
    _check_kind(name, path)
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error}") from None


def _check_kind(name: str, path: str | os.PathLike) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{name} exists, and is no file: name another")


def check_apart(written: dict[str, str], read: dict[str, str]) -> None:
    """Raises ValueError where an output is also an input, by any of its paths, or is inside a folder of inputs.

    Two outputs must differ, too. Both arguments are {name in messages: path}; an empty path is ignored.
    """
    written, read = ({name: path for name, path in files.items() if path} for files in (written, read))
    for number, (name, path) in enumerate(written.items()):
        for other_name, other in (read | dict(list(written.items())[:number])).items():
            if _same(path, other):
                raise ValueError(f"{name}={path} is {other_name}, too: it would be lost; name another file")
            if os.path.isdir(other) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(other)):
                raise ValueError(f"{name}={path} is inside {other_name}, which is read: name a file elsewhere")


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return os.path.realpath(path) == os.path.realpath(other)


def json_lines(text: str) -> list[tuple[str, object]]:
    """(line, its value) of a file of JSON objects, one a line, without half a line at its end, as a kill leaves.

    Raises ValueError or RecursionError for another line that is no JSON.
    """
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        try:
            json.loads(lines[-1])
        except (ValueError, RecursionError):
            lines.pop()
    return [(line, json.loads(line)) for line in lines if line.endswith("}")]
