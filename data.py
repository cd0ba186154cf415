"""Data: from text on disk to the batch of a step, a pure function of the corpus, the seed and the step.

    python data.py prepare PATH... --out corpus.bin     make a token file from text files and folders
    python data.py show [corpus.bin]                    print its size, and one packed sequence

**Corpus.** Without a file, the text is the source of Python's standard library, which every machine that runs this has:
its bytes are the tokens. Byte 255, which no UTF-8 text contains, precedes every document. One document in twenty,
chosen by a hash of its name, is held out for evaluation. If these are not about a twentieth of the text, because there
are few files or one outweighs the others, the last twentieth of every document is held out instead.

**Packing.** The documents follow each other in a stream. A sequence is T tokens of it, and its targets are the same
tokens shifted by one. Each document in a sequence has its own segment id (attention does not cross it), and its
positions start at 0. A document that reaches beyond its sequence continues in another one, without the earlier context.

**Order.** Sequence number n of the run (step * batch + row) is sequence perm(n mod size) of the corpus, with a
different permutation each epoch. The permutation is a Feistel network (Luby & Rackoff 1988), so nothing is shuffled in
memory, and the batch of any step can be computed directly. It depends neither on the mesh nor on the number of
processes, and a resumed run needs only its step.

**Token file.** A 64-byte header, the tokens (training part, then held-out part), and a table with the CRC-32 of every
64 KiB of them, a uint32 each. All numbers are little-endian.

    offset  0   8 bytes   b"ironwood"
            8   uint32    format version, 2
           12   uint32    bytes a token: 2, or 4 for a vocabulary above 65,536
           16   uint64    vocabulary size
           24   uint64    separator token: starts every document
           32   uint64    training tokens
           40   uint64    held-out tokens
           48   uint32    CRC-32 of the table
           52   8 bytes   zero
           60   uint32    CRC-32 of bytes 0 to 59

**Checks.** Header and table are read when the file is opened. Their hash is the identity that a checkpoint records,
without a pass over the tokens. A block is verified each time it is read, so a file that is overwritten or truncated
during a run ends the run with a message. Blocks are read, not mapped: a mapped file that is truncated kills the
process. The price is a read of full blocks, and a CRC at 3 GB/s.
"""

import hashlib
import os
import queue
import struct
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import command
import outputs

BYTE_SEPARATOR = 255  # starts a document in a corpus of bytes: no UTF-8 text has this byte
HELD_OUT_ONE_IN = 20
_HEADER = struct.Struct("<8sIIQQQQI8xI")
_HEADER_BYTES = 64
_VERSION = 2
_BLOCK_BYTES = 1 << 16  # each block has its own CRC
_MAX_VOCAB_SIZE = 1 << 31  # tokens of a batch are int32


class Batch(NamedTuple):
    """Packed sequences, all arrays [B, T]."""

    tokens: Any  # int32
    targets: Any  # int32: the token that follows each
    segments: Any  # int32: number of the document in the sequence, from 1; 0 is padding
    positions: Any  # int32: position in the document
    loss_weights: Any  # float32: weight of the target in the loss; 0 is padding
    next_targets: Any = None  # int32: the token that follows the target in the same document; -1 is none


@dataclass(frozen=True)
class Corpus:
    """Tokens of the training and of the held-out documents; each document starts with the separator."""

    name: str  # what error messages call it
    train: "np.ndarray | Stream"
    held_out: "np.ndarray | Stream"
    vocab_size: int
    separator: int
    identity: str = ""  # a hash of the content, whatever the path

    def check(self, seq_len: int, vocab_size: int) -> None:
        """Raises ValueError where a model of this vocabulary and sequence length cannot train on it."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"{self.name} has a vocabulary of {self.vocab_size} and the model one of {vocab_size}; "
                f"use --vocab_size={self.vocab_size} or larger"
            )
        shortest = min(len(self.train), len(self.held_out))
        if shortest <= seq_len:
            way_out = f"--seq_len={shortest - 1} at most" if shortest > 1 else "a longer text"
            raise ValueError(
                f"{self.name} has {len(self.train)} training and {len(self.held_out)} held-out tokens, and a sequence "
                f"needs seq_len + 1 = {seq_len + 1}; use {way_out}"
            )


# -- corpora


class DamagedError(OSError):
    """A token file no longer has the content that it had when it was opened."""


class _TokenFile:
    """An open token file: its header, the CRCs of its blocks, and its tokens, each block verified when it is read."""

    def __init__(self, path: str):
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for its other end
            raise ValueError(f"{path} is no ordinary file; make a token file with `python data.py prepare`")
        raw = open(path, "rb", buffering=0)
        weakref.finalize(self, raw.close)
        self.path, self.descriptor, self.opened = path, raw.fileno(), os.fstat(raw.fileno())
        header, size = self._bytes(0, _HEADER_BYTES), self.opened.st_size
        if len(header) < _HEADER_BYTES:
            raise ValueError(f"{path} has {size} bytes: too short for the {_HEADER_BYTES}-byte header of a token file")
        magic, version, itemsize, *numbers, table_crc, crc = _HEADER.unpack(header)
        if magic != b"ironwood":
            raise ValueError(f"{path} starts with {magic!r}: not a token file; make one with `python data.py prepare`")
        if version != _VERSION:
            raise ValueError(
                f"{path} has format version {version}, and this program reads version {_VERSION}, which has checksums; "
                "make it again with `python data.py prepare`"
            )
        if crc != (actual := zlib.crc32(header[:-4])):
            raise ValueError(f"{path} has a damaged header: CRC {actual:#x} in place of {crc:#x}")
        self.vocab_size, self.separator, self.num_train, self.num_held_out = numbers
        _check_vocabulary(path, self.vocab_size, self.separator)
        if itemsize != (needed := _itemsize(self.vocab_size)):
            raise ValueError(f"{path} has {itemsize} bytes a token; a vocabulary of {self.vocab_size} has {needed}")
        self.dtype, self.num_bytes = np.dtype(f"<u{itemsize}"), itemsize * (self.num_train + self.num_held_out)
        num_blocks = -(-self.num_bytes // _BLOCK_BYTES)
        if size != (expected := _HEADER_BYTES + self.num_bytes + 4 * num_blocks):
            raise ValueError(f"{path} has {size} bytes and its header promises {expected}: truncated or damaged")
        table = self._bytes(_HEADER_BYTES + self.num_bytes, 4 * num_blocks)
        if zlib.crc32(table) != table_crc:
            raise ValueError(f"{path} has a damaged table of checksums, at its end: copy it again, or make it again")
        self.crcs, self.identity = np.frombuffer(table, "<u4"), _identity(header, table)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`. Raises DamagedError where the file has changed, or cannot be read."""
        start, stop = start * self.dtype.itemsize, stop * self.dtype.itemsize
        blocks = range(start // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES))
        begin, end = blocks.start * _BLOCK_BYTES, min(blocks.stop * _BLOCK_BYTES, self.num_bytes)
        content = memoryview(self._bytes(_HEADER_BYTES + begin, end - begin))
        for block in blocks:
            first = block * _BLOCK_BYTES
            if zlib.crc32(content[first - begin :][:_BLOCK_BYTES]) != self.crcs[block]:
                last = min(first + _BLOCK_BYTES, self.num_bytes) - 1
                raise DamagedError(
                    f"{self.path} is damaged: its tokens {first // self.dtype.itemsize} to "
                    f"{last // self.dtype.itemsize} are not those that were written ({self._change()}); "
                    "put it back as it was"
                )
        return np.frombuffer(content[start - begin : stop - begin], self.dtype)

    def _bytes(self, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` of the file from `offset` on; fewer where it ends before."""
        pieces = []
        try:
            while num_bytes > 0 and (piece := os.pread(self.descriptor, min(num_bytes, 1 << 30), offset)):
                pieces.append(piece)
                offset, num_bytes = offset + len(piece), num_bytes - len(piece)
        except OSError as error:
            raise DamagedError(f"{self.path} cannot be read at byte {offset}: {error}") from error
        return b"".join(pieces)

    def _change(self) -> str:
        """How the file has changed since it was opened, for the error message."""
        now = os.fstat(self.descriptor)
        if now.st_size != self.opened.st_size:
            return f"it has {now.st_size} bytes and had {self.opened.st_size} when it was opened"
        if now.st_mtime_ns != self.opened.st_mtime_ns:
            return f"it was written to at {time.strftime('%F %T', time.localtime(now.st_mtime))}, after it was opened"
        return "by their checksum; nothing wrote to it since it was opened"


@dataclass(frozen=True)
class Stream:
    """The training or held-out part of a token file, with a length and slices [start:stop], verified on each read."""

    file: _TokenFile
    first: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(self.length)
        return self.file.read(self.first + start, self.first + stop)

    @property
    def dtype(self) -> np.dtype:
        return self.file.dtype


def _itemsize(vocab_size: int) -> int:
    return 2 if vocab_size <= 1 << 16 else 4


def _check_vocabulary(path: str, vocab_size: int, separator: int) -> None:
    if not 0 < vocab_size <= _MAX_VOCAB_SIZE:
        raise ValueError(f"{path}: a vocabulary of {vocab_size} is not between 1 and {_MAX_VOCAB_SIZE}")
    if not 0 <= separator < vocab_size:
        raise ValueError(f"{path}: separator {separator} is outside the vocabulary of {vocab_size}")


def open_corpus(path: str) -> Corpus:
    """The token file at `path`; the standard library as bytes where `path` is empty.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is empty, truncated, damaged, or not a token file; the message has the numbers.
    """
    if not path:
        return standard_library()
    file = _TokenFile(path)
    train, held_out = Stream(file, 0, file.num_train), Stream(file, file.num_train, file.num_held_out)
    return Corpus(path, train, held_out, file.vocab_size, file.separator, file.identity)


def _identity(*parts) -> str:
    # Not a CRC: a CRC over CRCs is linear, and equal for some contents that differ in two places.
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def write_corpus(
    path: str, train: Iterable[np.ndarray], held_out: Iterable[np.ndarray], *, vocab_size: int, separator: int
) -> Corpus:
    """Writes documents (arrays of token ids, without separators) as a token file; a temporary one until it is complete.

    Raises ValueError for a token or separator outside the vocabulary, with its document and position.
    """
    _check_vocabulary(path, vocab_size, separator)
    itemsize = _itemsize(vocab_size)
    counts, crcs, waiting = [], [], bytearray()

    def write_blocks(at_least: int) -> None:
        while len(waiting) >= at_least:
            block = waiting[:_BLOCK_BYTES]
            del waiting[:_BLOCK_BYTES]
            file.write(block)
            crcs.append(zlib.crc32(block))

    with outputs.replacing(path, "wb") as file:
        file.write(bytes(_HEADER_BYTES))
        for part, documents in (("training", train), ("held-out", held_out)):
            count = 0
            for number, document in enumerate(documents):
                document = np.asarray(document)
                if bad := np.flatnonzero((document < 0) | (document >= vocab_size)).tolist():
                    raise ValueError(
                        f"{part} document {number} has token {document[bad[0]]} at position {bad[0]}, "
                        f"outside the vocabulary of {vocab_size}"
                    )
                waiting += np.concatenate([[separator], document]).astype(f"<u{itemsize}").tobytes()
                count += len(document) + 1
                write_blocks(_BLOCK_BYTES)
            counts.append(count)
        write_blocks(1)
        table = np.array(crcs, "<u4").tobytes()
        file.write(table)
        header = _HEADER.pack(b"ironwood", _VERSION, itemsize, vocab_size, separator, *counts, zlib.crc32(table), 0)
        file.seek(0)
        file.write(header[:-4] + struct.pack("<I", zlib.crc32(header[:-4])))
    return open_corpus(path)


def standard_library() -> Corpus:
    """The source files of the running Python's standard library, as bytes; without tests, which some builds lack."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    join = lambda documents: np.concatenate([np.append(np.uint8(BYTE_SEPARATOR), document) for document in documents])
    train, held_out = map(join, _split(_texts(files, root)[0]))
    name = f"the standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
    return Corpus(name, train, held_out, 256, BYTE_SEPARATOR, _identity(train, held_out))


def prepare(paths: list[str], out: str) -> tuple[Corpus, list[Path]]:
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
            if fault := _fault(path.read_bytes()):
                raise ValueError(f"{path} is no UTF-8 text: {fault}")
        files, root = (_files_below(path), path) if path.is_dir() else ([path], path.parent)
        for total, more in zip((texts, skipped), _texts(files, root), strict=True):
            total.extend(more)
    if not texts:
        raise ValueError(
            f"there is no UTF-8 text in {', '.join(map(str, paths))}; {len(skipped)} files of other content"
        )
    # A file that is named twice counts once: otherwise it could be both trained on and held out.
    texts = list({os.path.realpath(text.path): text for text in texts}.values())
    if os.path.exists(out):  # it may be a file below one of the folders, under another name
        outputs.check_apart({"--out": out}, {f"the text {text.path}": text.path for text in texts})
    return write_corpus(out, *_split(texts), vocab_size=256, separator=BYTE_SEPARATOR), skipped


def _files_below(folder: Path) -> list[Path]:
    """Every path below a folder that is not a folder itself. Raises OSError for a folder that cannot be read."""

    def refuse(error: OSError):
        raise error

    paths = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        paths += [Path(parent, name) for name in files]
        paths += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]
    return paths


class _Text(NamedTuple):
    path: Path
    num_bytes: int
    crc: int
    is_held_out: bool  # by the hash of its name


def _texts(files: list[Path], root: Path) -> tuple[list[_Text], list[Path]]:
    """Returns the files that are UTF-8 text, and the others; empty files are in neither."""
    texts, skipped = [], []
    for path in sorted(files):
        content = path.read_bytes() if path.is_file() else None
        if content is None or _fault(content):
            skipped.append(path)
        elif content:
            name = os.fsencode(path.relative_to(root).as_posix())  # not always UTF-8
            texts.append(_Text(path, len(content), zlib.crc32(content), zlib.crc32(name) % HELD_OUT_ONE_IN == 0))
    return texts, skipped


def _fault(content: bytes) -> str:
    """Why bytes are not UTF-8 text, and where; empty if they are."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} at byte {error.start}"
    return ""


def _document(text: _Text) -> np.ndarray:
    """Reads a text again. Raises OSError where its file has changed since it was checked."""
    content = text.path.read_bytes()
    if zlib.crc32(content) != text.crc:
        raise OSError(f"{text.path} has changed since the preparation began: start it again when nobody writes there")
    return np.frombuffer(content, np.uint8)


def _split(texts: list[_Text]) -> tuple[Iterator[np.ndarray], Iterator[np.ndarray]]:
    """Returns the documents to train on, and the held-out ones."""
    read = lambda texts: map(_document, texts)
    share = sum(text.num_bytes for text in texts if text.is_held_out) / sum(text.num_bytes for text in texts)
    if 0.5 <= share * HELD_OUT_ONE_IN <= 2:
        return read(text for text in texts if not text.is_held_out), read(text for text in texts if text.is_held_out)
    train_bytes = lambda document: len(document) - max(len(document) // HELD_OUT_ONE_IN, 1)
    return (document[: train_bytes(document)] for document in read(texts)), (
        document[train_bytes(document) :] for document in read(texts)
    )


# -- batches


def num_sequences(tokens: np.ndarray | Stream, seq_len: int) -> int:
    return (len(tokens) - 1) // seq_len


def train_batch(corpus: Corpus, step: int, *, batch: int, seq_len: int, seed: int, rows: slice = slice(None)) -> Batch:
    """Rows `rows` of the global batch of a step, as numpy arrays. Reads only those rows."""
    numbers = step * batch + np.arange(batch)[rows]
    size = num_sequences(corpus.train, seq_len)
    return _pack(corpus, corpus.train, _permute(numbers, size, seed), seq_len)


def eval_batch(corpus: Corpus, index: int, *, batch: int, seq_len: int, rows: slice = slice(None)) -> Batch:
    """Rows of the index-th batch of held-out sequences; rows past the last sequence are padding."""
    numbers = index * batch + np.arange(batch)[rows]
    size = num_sequences(corpus.held_out, seq_len)
    return _pack(corpus, corpus.held_out, np.where(numbers < size, _eval_order(numbers, size), -1), seq_len)


def _eval_order(numbers: np.ndarray, size: int) -> np.ndarray:
    """A fixed order that mixes all documents, so that the first few sequences represent the held-out part."""
    return _permute(numbers, size, seed=0)


def _pack(corpus: Corpus, stream: np.ndarray | Stream, sequences: np.ndarray, seq_len: int) -> Batch:
    """Returns the numbered sequences of a stream; a negative number is padding."""
    is_real = sequences >= 0
    starts = np.where(is_real, sequences, 0) * seq_len
    window = np.stack([stream[start : start + seq_len + 1] for start in starts])
    if window.max() >= corpus.vocab_size:
        row, column = np.unravel_index(window.argmax(), window.shape)
        part = "training" if stream is corpus.train else "held-out"
        raise ValueError(
            f"{corpus.name} has token {window[row, column]} at {part} token {starts[row] + column}, "
            f"outside its vocabulary of {corpus.vocab_size}"
        )
    window = window.astype(np.int32)
    tokens, targets = window[:, :-1], window[:, 1:]
    is_start = tokens == corpus.separator
    is_start[:, 0] = True
    index = np.arange(seq_len, dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
    segments = np.cumsum(is_start, axis=1, dtype=np.int32) * is_real[:, None]
    weights = np.broadcast_to(is_real[:, None], tokens.shape).astype(np.float32)
    next_targets = np.full_like(targets, -1)
    next_targets[:, :-1] = np.where(segments[:, 1:] == segments[:, :-1], targets[:, 1:], -1)
    return Batch(tokens, targets, segments.astype(np.int32), positions.astype(np.int32), weights, next_targets)


def _permute(numbers: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Returns numbers mod size, permuted differently in each epoch (= numbers // size) and for each seed.

    A Feistel network permutes 0 .. 4^half_bits - 1. Values at or above `size` go through it again until they are below,
    which makes it a permutation of 0 .. size - 1.
    """
    half_bits = np.uint64(max((int(size - 1).bit_length() + 1) // 2, 1))
    mask = np.uint64((1 << int(half_bits)) - 1)
    epoch = (numbers // size).astype(np.uint64)
    values = (numbers % size).astype(np.uint64)
    pending = np.ones(values.shape, bool)
    while pending.any():
        left, right = values[pending] >> half_bits, values[pending] & mask
        for feistel_round in range(4):
            key = _mix(epoch[pending] + _mix(np.uint64(seed * 4 + feistel_round) + np.uint64(1)))
            left, right = right, left ^ (_mix(right + key) & mask)
        values[pending] = left << half_bits | right
        pending = values >= size
    return values.astype(np.int64)


def _mix(x):
    """SplitMix64's finaliser (Steele, Lea & Flood 2014): 64 bits to 64 well-mixed bits."""
    with np.errstate(over="ignore"):
        x = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def prefetch(make: Callable[[int], Any], steps: Iterable[int], depth: int = 2) -> Iterator[Any]:
    """Yields make(step) for each step, in order, computed on a thread while up to `depth` wait; raises its errors."""
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stop, end = threading.Event(), object()

    def put(item) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def work():
        try:
            for step in steps:
                if not put((make(step), None)):
                    return
            put((end, None))
        except BaseException as error:  # raised where the batch is taken
            put((None, error))

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if item is end:
                return
            if error is not None:
                if isinstance(error, StopIteration):  # it would end this generator silently
                    raise RuntimeError("making a batch raised StopIteration") from error
                raise error
            yield item
    finally:
        stop.set()
        thread.join()


# -- a baseline


def bigram_loss(corpus: Corpus, *, seq_len: int, num_eval_sequences: int, max_train_tokens: int = 50_000_000) -> float:
    """Mean loss, in nats a token, of a bigram model on the held-out sequences; its counts are of the training part.

    p(b | a) = (count(a, b) + p(b)) / (count(a) + 1) backs off to the unigram p(b), which is smoothed by one count a
    token of the vocabulary.
    """
    train = corpus.train[:max_train_tokens].astype(np.int64)
    size = num_sequences(corpus.held_out, seq_len)
    starts = _eval_order(np.arange(min(num_eval_sequences, size)), size) * seq_len
    held_out = np.stack([corpus.held_out[start : start + seq_len + 1] for start in starts]).astype(np.int64)
    tokens, targets = held_out[:, :-1].ravel(), held_out[:, 1:].ravel()
    unigrams = np.bincount(train, minlength=corpus.vocab_size)
    contexts = np.bincount(train[:-1], minlength=corpus.vocab_size)
    pairs, counts = np.unique(train[:-1] * corpus.vocab_size + train[1:], return_counts=True)
    wanted = tokens * corpus.vocab_size + targets
    at = np.searchsorted(pairs, wanted).clip(0, len(pairs) - 1)
    pair_counts = np.where(pairs[at] == wanted, counts[at], 0)
    p_next = (unigrams[targets] + 1) / (len(train) + corpus.vocab_size)
    return float(-np.mean(np.log((pair_counts + p_next) / (contexts[tokens] + 1))))


def as_bytes(tokens: np.ndarray) -> bytes:
    """Byte tokens as bytes, with the separator as a line of its own."""
    return bytes(int(token) for token in tokens).replace(bytes([BYTE_SEPARATOR]), b"\n----\n")


def decode(tokens: np.ndarray) -> str:
    """The text of byte tokens, with the separator as a line of its own."""
    return as_bytes(tokens).decode(errors="replace")


def main() -> None:
    parser = command.parser(__file__)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_parser = commands.add_parser("prepare", help="make a token file of bytes from text files and folders")
    prepare_parser.add_argument(
        "paths", type=command.path, nargs="+", metavar="PATH", help="text file, or folder of them"
    )
    prepare_parser.add_argument("--out", type=command.path, required=True, metavar="FILE", help="the token file")
    show_parser = commands.add_parser("show", help="print the size of a token file, and one packed sequence")
    show_parser.add_argument(
        "path", type=command.path, nargs="?", default="", help="default: Python's standard library"
    )
    show_parser.add_argument(
        "--seq_len", type=command.at_least(1), default=256, help="tokens of the sequence shown [%(default)s]"
    )
    args = command.arguments(parser)
    batch = None
    if args.command == "prepare":
        corpus, skipped = prepare(args.paths, args.out)
        for path in skipped:
            print(f"left out, no UTF-8 text: {path}")
    else:
        corpus = open_corpus(args.path)
        corpus.check(args.seq_len, corpus.vocab_size)
        batch = train_batch(corpus, 0, batch=1, seq_len=args.seq_len, seed=0)
    print(f"{corpus.name}: {len(corpus.train):,} training and {len(corpus.held_out):,} held-out tokens")
    print(f"vocabulary {corpus.vocab_size}, separator {corpus.separator}, {corpus.train.dtype} tokens")
    if batch:
        print(f"first sequence: {batch.segments.max()} document(s); the last position is {batch.positions[0, -1]}")
        if corpus.vocab_size == 256:
            print(decode(batch.tokens[0]))


if __name__ == "__main__":
    command.run(main)
