"""Documents: text files as the documents of a corpus, those to train on and those held out.

**Idea.** A file of UTF-8 text is a document. One document in twenty, chosen by a hash of its name, is held out for
evaluation. If these are not about a twentieth of the text, because there are few files or one outweighs the others, the
last twentieth of every document is held out instead.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT_ONE_IN = 20


def files_below(folder: Path) -> list[Path]:
    """Every path below a folder that is not a folder itself. Raises OSError for a folder that cannot be read."""

    def refuse(error: OSError):
        raise error

    paths = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        paths += [Path(parent, name) for name in files]
        paths += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]
    return paths


class Text(NamedTuple):
    path: Path
    num_bytes: int
    crc: int
    is_held_out: bool  # by the hash of its name


def texts_among(files: list[Path], root: Path) -> tuple[list[Text], list[Path]]:
    """Returns the files that are UTF-8 text, and the others; empty files are in neither."""
    texts, skipped = [], []
    for path in sorted(files):
        content = path.read_bytes() if path.is_file() else None
        if content is None or fault(content):
            skipped.append(path)
        elif content:
            name = os.fsencode(path.relative_to(root).as_posix())  # not always UTF-8
            texts.append(Text(path, len(content), zlib.crc32(content), zlib.crc32(name) % HELD_OUT_ONE_IN == 0))
    return texts, skipped


def fault(content: bytes) -> str:
    """Why bytes are not UTF-8 text, and where; empty if they are."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} at byte {error.start}"
    return ""


def _document(text: Text) -> np.ndarray:
    """Reads a text again. Raises OSError where its file has changed since it was checked."""
    content = text.path.read_bytes()
    if zlib.crc32(content) != text.crc:
        raise OSError(f"{text.path} has changed since the preparation began: start it again when nobody writes there")
    return np.frombuffer(content, np.uint8)


def split(texts: list[Text]) -> tuple[Iterator[np.ndarray], Iterator[np.ndarray]]:
    """Returns the documents to train on, and the held-out ones."""
    read = lambda texts: map(_document, texts)
    share = sum(text.num_bytes for text in texts if text.is_held_out) / sum(text.num_bytes for text in texts)
    if 0.5 <= share * HELD_OUT_ONE_IN <= 2:
        return read(text for text in texts if not text.is_held_out), read(text for text in texts if text.is_held_out)
    train_bytes = lambda document: len(document) - max(len(document) // HELD_OUT_ONE_IN, 1)
    return (document[: train_bytes(document)] for document in read(texts)), (
        document[train_bytes(document) :] for document in read(texts)
    )
