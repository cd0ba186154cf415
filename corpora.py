"""Corpora: documents as tokens on disk, verified wherever they are read.

**Idea.** A corpus is two streams of tokens, one to train on and one held out. In both, the separator precedes every
document. Without a file, the text is the source of Python's standard library, which every machine that runs this has:
its bytes are the tokens, and the separator is byte 255, which no UTF-8 text contains.

**Layout.** A token file has a 64-byte header, the tokens (training part, then held-out part), and a table with the
CRC-32 of every 64 KiB of them, a uint32 each. All numbers are little-endian.

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

Header and table are read when the file is opened. Their hash is the identity that a checkpoint records, without a pass
over the tokens. A block is verified each time it is read, so a file that is overwritten or truncated during a run ends
the run with a message. Blocks are read, not mapped: a mapped file that is truncated kills the process.

A large corpus is a folder of token files, its shards, with an index, `corpus.json`, that is written last:

    vocab_size, separator    the same in all shards
    tokenizer                null, or the identity of the tokenizer, and its special tokens {text: token}
    shards                   {file, train, held_out, identity}: name, tokens, hash of header and table; in their order
    identity                 hash of the four above: the identity of the corpus
    documents, text_bytes    what was read

`tokenizer.json` is the tokenizer itself. The stream of a folder is that of its shards, one after the other. All headers
and tables are compared with the index when the folder is opened, so a shard that is missing, truncated, swapped or
written again is found at once. So is a changed token of a corpus of at most 256 MiB, whose blocks are all verified.

**Cost.** A read of full blocks, and a CRC at 3 GB/s. Opening a folder reads 4 bytes for every 64 KiB of tokens.
"""

import functools
import hashlib
import json
import os
import resource
import struct
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import documents
import outputs
import storage
import tokenization
from tokenization import BYTE_SEPARATOR

BYTES = "bytes"  # the identity of the tokenizer whose tokens are bytes
_HEADER = struct.Struct("<8sIIQQQQI8xI")
_HEADER_BYTES = 64
_VERSION = 2
_BLOCK_BYTES = 1 << 16  # each block has its own CRC
# Corpora with a smaller share of the model's vocabulary get a note. Published models exceed their tokenizer by 2% at
# most, and a vocabulary of 1,280 or more that is padded to a multiple of 128 by less than 10%.
_LEAST_SHARE = 0.9
_MAX_VOCAB_SIZE = 1 << 31  # tokens of a batch are int32
INDEX, TOKENIZER = "corpus.json", "tokenizer.json"  # files in the folder of a corpus
_VERIFIED_AT_ONCE = 1 << 20  # tokens
_OTHER_FILES = 500  # that a run has open besides its shards
_SMALL_BYTES = 1 << 28  # a corpus in a local folder that is verified when it is opened
_OPENED_AT_ONCE = 16  # shards: a remote file takes a tenth of a second


@dataclass(frozen=True)
class Corpus:
    """Tokens of the training and of the held-out documents; each document starts with the separator."""

    name: str  # what error messages call it
    train: "np.ndarray | Stream"
    held_out: "np.ndarray | Stream"
    vocab_size: int
    separator: int
    identity: str = ""  # a hash of the content, whatever the path
    folder: str = ""  # where its shards and its tokenizer are; empty for a single file
    tokenizer_identity: str = ""  # "bytes" for bytes; empty if nothing is known
    special_tokens: dict[str, int] | None = None  # the tokenizer's special tokens

    @functools.cached_property
    def tokenizer(self) -> tokenization.Tokenizer | tokenization.ByteTokenizer | None:
        """The tokenizer that made the tokens, or None if nobody knows. Read where first used.

        Raises ValueError if the folder's tokenizer.json is not the one with which the corpus was made.
        """
        if not self.tokenizer_identity:
            return None
        if self.tokenizer_identity == BYTES:
            return tokenization.BYTES
        names = {token: text for text, token in (self.special_tokens or {}).items()}
        path = storage.join(self.folder, TOKENIZER)
        with storage.local_copy(path) as file:
            made = tokenization.open_tokenizer(file, names.get(self.separator), path)
        if made.identity != self.tokenizer_identity:
            raise ValueError(
                f"{path} has identity {made.identity}, and the corpus was made with "
                f"{self.tokenizer_identity}: put the file back as it was"
            )
        return made

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


# -- the token file


class DamagedError(OSError):
    """A token file no longer has the content that it had when it was opened."""


class _TokenFile:
    """An open token file: its header, the CRCs of its blocks, and its tokens, each block verified when it is read."""

    def __init__(self, path: str):
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for its other end
            raise ValueError(f"{path} is no ordinary file; make a token file with `python data.py prepare`")
        self.path, self.storage = path, storage.opened(path)
        header, size = self._bytes(0, _HEADER_BYTES), self.storage.size
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
        if itemsize != (needed := dtype_of(self.vocab_size).itemsize):
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
                    f"{last // self.dtype.itemsize} are not those that were written ({self.storage.change()}); "
                    "put it back as it was"
                )
        return np.frombuffer(content[start - begin : stop - begin], self.dtype)

    def _bytes(self, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` of the file from `offset` on; fewer where it ends before."""
        try:
            return self.storage.read(offset, num_bytes)
        except OSError as error:
            raise DamagedError(str(error)) from error


class _Run(NamedTuple):
    """Consecutive tokens of a file."""

    file: _TokenFile
    first: int
    length: int


class Stream:
    """The training or held-out parts of token files, one after the other, verified on each read.

    It has a length, and slices [start:stop] as arrays.
    """

    def __init__(self, runs: Iterable[_Run]):
        self.runs = list(runs)
        self.dtype = self.runs[0].file.dtype
        self._ends = np.cumsum([run.length for run in self.runs])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        number, pieces = int(np.searchsorted(self._ends, start, side="right")), []
        while start < stop:
            run, end = self.runs[number], int(self._ends[number])
            first, last = run.first + run.length - (end - start), run.first + run.length - max(end - stop, 0)
            pieces.append(run.file.read(first, last))
            number, start = number + 1, end
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])

    @property
    def is_remote(self) -> bool:
        """Whether a read waits for a bucket, so that several should be under way at once."""
        return self.runs[0].file.storage.is_remote


def dtype_of(vocab_size: int) -> np.dtype:
    """The type of a token in a file."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _check_vocabulary(path: str, vocab_size: int, separator: int) -> None:
    if not 0 < vocab_size <= _MAX_VOCAB_SIZE:
        raise ValueError(f"{path}: a vocabulary of {vocab_size} is not between 1 and {_MAX_VOCAB_SIZE}")
    if not 0 <= separator < vocab_size:
        raise ValueError(f"{path}: separator {separator} is outside the vocabulary of {vocab_size}")


def open_corpus(path: str) -> Corpus:
    """The token file or the folder of them at `path`; the standard library as bytes where `path` is empty.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is empty, truncated, damaged, or not a token file; the message has the numbers. A folder has no
        complete corpus, or a shard that is not the one of its index.
    """
    if not path:
        return standard_library()
    if storage.is_folder(path):
        return _open_folder(path)
    file = _TokenFile(path)
    made_of_bytes = (file.vocab_size, file.separator) == (256, BYTE_SEPARATOR)
    return Corpus(
        path, *_streams([file]), file.vocab_size, file.separator, file.identity,
        tokenizer_identity=BYTES if made_of_bytes else "",
    )  # fmt: skip


def _streams(files: list[_TokenFile]) -> tuple[Stream, Stream]:
    return (
        Stream(_Run(file, 0, file.num_train) for file in files),
        Stream(_Run(file, file.num_train, file.num_held_out) for file in files),
    )


def _open_folder(folder: str) -> Corpus:
    index = read_index(folder)

    def opened(shard: dict) -> _TokenFile:
        path = storage.join(folder, shard["file"])
        try:
            file = _TokenFile(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing, and {INDEX} beside it lists it: put it back") from None
        counts = dict(train=file.num_train, held_out=file.num_held_out, identity=file.identity)
        if counts != {key: shard[key] for key in counts} or (file.vocab_size, file.separator) != vocabulary:
            raise ValueError(
                f"{path} is not the shard that {INDEX} lists: it has {file.num_train} + {file.num_held_out} tokens and "
                f"identity {file.identity}, in place of {shard['train']} + {shard['held_out']} and "
                f"{shard['identity']}; put it back as it was"
            )
        return file

    vocabulary = index["vocab_size"], index["separator"]
    if not storage.is_remote(folder):
        _allow_open_files(folder, len(index["shards"]))
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as threads:
        files = list(threads.map(opened, index["shards"]))
    tokenizer = index["tokenizer"] or dict(identity="", special_tokens={})
    corpus = Corpus(
        folder, *_streams(files), *vocabulary, index["identity"], folder, tokenizer["identity"],
        tokenizer["special_tokens"],
    )  # fmt: skip
    if not storage.is_remote(folder) and sum(file.num_bytes for file in files) <= _SMALL_BYTES:
        verify(corpus)
    return corpus


def _allow_open_files(folder: str, number: int) -> None:
    """Raises the limit of open files for as many shards. Raises ValueError if the system does not allow it."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + _OTHER_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        if most != resource.RLIM_INFINITY and most < needed:
            raise ValueError(
                f"{folder} has {number} shards, which are open at once, and this system allows {most} open files: "
                "raise the limit (ulimit -Hn), or prepare the corpus with larger --shard_bytes"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def read_index(folder: str) -> dict:
    """The index of a corpus in a folder.

    Raises ValueError where there is none, because the preparation has not ended, or where it was altered.
    """
    path = storage.join(folder, INDEX)
    try:
        content = storage.read_file(path)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} is no ordinary file, and no corpus: it has no {INDEX}, "
            "which `python data.py prepare` writes last"
        ) from None
    try:
        index = json.loads(content)
        right = index["identity"] == _identity_of(index)
        right &= bool(index["shards"]) and all(Path(shard["file"]).name == shard["file"] for shard in index["shards"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        right = False
    if not right:
        raise ValueError(f"{path} is damaged, or was altered: put it back as it was, or prepare the corpus again")
    _check_vocabulary(path, index["vocab_size"], index["separator"])
    return index


def write_index(
    folder: str, shards: list[dict], *, vocab_size: int, separator: int, tokenizer: dict | None, **counts: int
) -> None:
    """Writes the index of the shards in a folder, which makes them a corpus; its keys are listed at the top.

    Args:
      tokenizer: {"identity", "special_tokens"}, or None.
      counts: what else to record: documents, text_bytes.
    """
    index = dict(vocab_size=vocab_size, separator=separator, tokenizer=tokenizer, shards=shards)
    index |= dict(identity=_identity_of(index), **counts)
    with outputs.replacing(os.path.join(folder, INDEX)) as file:
        json.dump(index, file, indent=1)


def _identity_of(index: dict) -> str:
    named = {key: index[key] for key in ("vocab_size", "separator", "tokenizer", "shards")}
    return _identity(json.dumps(named, sort_keys=True).encode())


def notes(corpus: Corpus, vocab_size: int, model: str) -> list[str]:
    """Returns what is likely wrong between a corpus, a model of this vocabulary, and the folder of its weights ("")."""
    notes = []
    if corpus.vocab_size < _LEAST_SHARE * vocab_size:
        notes.append(
            f"{corpus.name} has a vocabulary of {corpus.vocab_size:,} and the model one of {vocab_size:,}: "
            f"{1 - corpus.vocab_size / vocab_size:.1%} of the model's tokens never occur; "
            f"{'' if model else f'use --vocab_size={corpus.vocab_size}, or '}prepare the corpus with --tokenizer"
        )
    if model and corpus.tokenizer_identity and os.path.exists(os.path.join(model, TOKENIZER)):
        try:
            other = tokenization.identity_of(model)
        except (ValueError, OSError) as error:
            other = f"an unknown one ({error})"
        if other != corpus.tokenizer_identity:
            notes.append(
                f"{corpus.name} has the tokenizer {corpus.tokenizer_identity}, and {model} has {other}: "
                f"the ids mean other text; prepare the corpus with --tokenizer={model}"
            )
    return notes


def readable_tokenizer(corpus: Corpus) -> tuple[tokenization.Tokenizer | tokenization.ByteTokenizer | None, str]:
    """(the tokenizer of a corpus, why text cannot be shown): None where nobody knows it, or the library is missing.

    Raises ValueError where the tokenizer is not the one with which the corpus was made.
    """
    try:
        return corpus.tokenizer, ""
    except tokenization.NotInstalledError as error:
        return None, f"{error}; without it samples are numbers, and there are no bits a byte"


def verify(corpus: Corpus) -> None:
    """Reads all tokens. Raises DamagedError where a block is not what was written, ValueError for a token too large."""
    for part, stream in (("training", corpus.train), ("held-out", corpus.held_out)):
        for start in range(0, len(stream), _VERIFIED_AT_ONCE):
            tokens = stream[start : start + _VERIFIED_AT_ONCE]
            if tokens.max() >= corpus.vocab_size:
                raise ValueError(
                    f"{corpus.name} has token {tokens.max()} at {part} token {start + int(tokens.argmax())}, "
                    f"outside its vocabulary of {corpus.vocab_size}"
                )


def _identity(*parts) -> str:
    # Not a CRC: a CRC over CRCs is linear, and equal for some contents that differ in two places.
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def write_corpus(
    path: str, train: Iterable[np.ndarray], held_out: Iterable[np.ndarray], *, vocab_size: int, separator: int
) -> Corpus:
    """Writes documents (arrays of token ids, without separators) as a token file; a temporary one until it is complete.

    Raises ValueError for a token or separator outside the vocabulary, with its document and position.
    """

    def with_separators(part: str, documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for number, document in enumerate(documents):
            document = np.asarray(document)
            if bad := np.flatnonzero((document < 0) | (document >= vocab_size)).tolist():
                raise ValueError(
                    f"{part} document {number} has token {document[bad[0]]} at position {bad[0]}, "
                    f"outside the vocabulary of {vocab_size}"
                )
            yield np.concatenate([[separator], document])

    streams = with_separators("training", train), with_separators("held-out", held_out)
    return write_tokens(path, *streams, vocab_size=vocab_size, separator=separator)


def write_tokens(
    path: str, train: Iterable[np.ndarray], held_out: Iterable[np.ndarray], *, vocab_size: int, separator: int
) -> Corpus:
    """Does what write_corpus does, unchecked, with arrays of any lengths in which the documents have separators."""
    _check_vocabulary(path, vocab_size, separator)
    dtype = dtype_of(vocab_size)
    counts, crcs, waiting = [], [], bytearray()

    def write_blocks(at_least: int) -> None:
        while len(waiting) >= at_least:
            block = waiting[:_BLOCK_BYTES]
            del waiting[:_BLOCK_BYTES]
            file.write(block)
            crcs.append(zlib.crc32(block))

    with outputs.replacing(path, "wb") as file:
        file.write(bytes(_HEADER_BYTES))
        for stream in (train, held_out):
            count = 0
            for tokens in stream:
                count += len(tokens)
                for start in range(0, len(tokens), _BLOCK_BYTES):
                    waiting += tokens[start : start + _BLOCK_BYTES].astype(dtype).tobytes()
                    write_blocks(_BLOCK_BYTES)
            counts.append(count)
        write_blocks(1)
        table = np.array(crcs, "<u4").tobytes()
        file.write(table)
        header = _HEADER.pack(
            b"ironwood", _VERSION, dtype.itemsize, vocab_size, separator, *counts, zlib.crc32(table), 0
        )
        file.seek(0)
        file.write(header[:-4] + struct.pack("<I", zlib.crc32(header[:-4])))
    return open_corpus(path)


def standard_library() -> Corpus:
    """The source files of the running Python's standard library, as bytes; without tests, which some builds lack.

    One file in 20 is held out, by a hash of its name.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    parts = [[], []]
    for path in sorted(files):
        content = path.read_bytes()
        if content and not documents.fault(content):
            name = path.relative_to(root).as_posix().encode()
            parts[zlib.crc32(name) % 20 == 0] += (np.uint8([BYTE_SEPARATOR]), np.frombuffer(content, np.uint8))
    train, held_out = map(np.concatenate, parts)
    name = f"the standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
    return Corpus(name, train, held_out, 256, BYTE_SEPARATOR, _identity(train, held_out), tokenizer_identity=BYTES)
