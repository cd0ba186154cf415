"""Preparation: text files and folders to a token file of bytes."""

import os
from pathlib import Path

import corpora
import documents
import outputs


def prepare(paths: list[str], out: str) -> tuple[corpora.Corpus, list[Path]]:
    """Writes the text of files, and of the UTF-8 files below folders, as a token file of bytes.

    Returns the corpus and the paths below folders that were skipped: files that are not UTF-8 text, pipes, devices, and
    links to folders, which are not followed.

    Raises:
      ValueError: a path in `paths` is not UTF-8 text (with the offset) or not an ordinary file, there is no text, or
        `out` is one of the files.
      OSError: a file or folder cannot be read.
    """
    outputs.check_apart({"--out": out}, {f"the text {path}": path for path in paths})
    outputs.check_writable(f"--out={out}", out)
    texts, skipped = [], []
    for path in map(Path, paths):
        if not path.is_dir():
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is no ordinary file: save its text to one")
            if fault := documents.fault(path.read_bytes()):
                raise ValueError(f"{path} is no UTF-8 text: {fault}")
        files, root = (documents.files_below(path), path) if path.is_dir() else ([path], path.parent)
        for total, more in zip((texts, skipped), documents.texts_among(files, root), strict=True):
            total.extend(more)
    if not texts:
        raise ValueError(
            f"there is no UTF-8 text in {', '.join(map(str, paths))}; {len(skipped)} files of other content"
        )
    # A file that is named twice counts once: otherwise it could be both trained on and held out.
    texts = list({os.path.realpath(text.path): text for text in texts}.values())
    if os.path.exists(out):  # it may be a file below one of the folders, under another name
        outputs.check_apart({"--out": out}, {f"the text {text.path}": text.path for text in texts})
    corpus = corpora.write_corpus(out, *documents.split(texts), vocab_size=256, separator=corpora.BYTE_SEPARATOR)
    return corpus, skipped
