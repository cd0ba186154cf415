"""Documents: what is read from text, JSON lines, Parquet and token files, a piece of a file at a time.

**Idea.** The kind of a file decides what a document is in it.

| file | document |
|---|---|
| .jsonl, .jsonl.gz, .jsonl.zst (also .json.gz, .json.zst) | a line: the value of `text_key` in its object |
| .parquet | a row: its column `text_key` |
| .npy, .bin, if the vocabulary is given | the tokens between two separators, or of a document by Megatron's .idx |
| any other | the file, if it is UTF-8 text |

A file of more than `piece_bytes` is read in pieces, in any order and by any process. A piece of JSON lines or tokens
has the documents that begin in its range of bytes; one of Parquet has row groups. A text file is cut after a line: each
piece is a document of its own. A compressed file is one piece.

**Cost.** A reader holds a chunk of a text, a line, or a few pages of a column, whatever the size of the file.

**Left out.** JSON lines and Parquet values in parts: a document there is in memory at once.
"""

import bisect
import codecs
import gzip
import io
import itertools
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

CHUNK_CHARS = 1 << 20  # a longer text is read in chunks
_SNIFFED_BYTES = 1 << 20  # of a file below a folder, to see if it is text
_LINE_BYTES = 1 << 16  # a text file is cut after a line that ends at most so far behind the limit of a piece
_JSON_LINES = re.compile(r"\.(jsonl|json\.gz|json\.zst|jsonl\.gz|jsonl\.zst)$", re.IGNORECASE)


class Kinds(NamedTuple):
    """How files are read."""

    text_key: str = "text"  # of a JSON object, or the column of a Parquet file
    vocab_size: int = 0  # of files of tokens; 0: .npy and .bin are not read as such
    separator: int = 0  # of files of tokens
    token_dtype: str = ""  # of .bin without a header


class Input(NamedTuple):
    """A file that is read."""

    path: str
    kind: str  # text, json lines, parquet, tokens
    size: int
    mtime_ns: int
    is_named: bool  # by the user; otherwise it is below a folder


class Piece(NamedTuple):
    """A part of a file: a range of bytes, of row groups, or of tokens."""

    input: Input
    start: int
    stop: int
    num_bytes: int  # of the file


class Chunk(NamedTuple):
    """A part of a document, in order; a short document is one chunk."""

    content: Any  # str, or an array of tokens
    ends: bool  # the document


# -- files


def files_below(folder: Path) -> list[Path]:
    """Every path below a folder that is not a folder itself. Raises OSError for a folder that cannot be read."""

    def refuse(error: OSError):
        raise error

    paths = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        paths += [Path(parent, name) for name in files]
        paths += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]
    return paths


def inputs_of(paths: list[str], kinds: Kinds) -> tuple[list[Input], list[str]]:
    """Returns the files that have documents, in order, and the paths below folders that are no files or no text.

    A file that is named twice counts once. Small files below folders are checked where they are read.

    Raises:
      ValueError: a path in `paths` is not an ordinary file, or no UTF-8 text.
      OSError: a file or folder cannot be read.
    """
    inputs, skipped = {}, []
    for path in paths:
        is_named = not os.path.isdir(path)
        for file in [path] if is_named else map(str, sorted(files_below(Path(path)))):
            status = os.stat(file) if is_named or os.path.exists(file) else None
            if status is None or not stat.S_ISREG(status.st_mode):
                if is_named:
                    raise ValueError(f"{file} is no ordinary file: save its text to one")
                skipped.append(file)
                continue
            this = Input(file, _kind(file, kinds), status.st_size, status.st_mtime_ns, is_named)
            if this.kind == "text" and (is_named or status.st_size > _SNIFFED_BYTES):
                with open(file, "rb") as raw:
                    wrong = fault(raw.read(_SNIFFED_BYTES), at_end=status.st_size <= _SNIFFED_BYTES)
                if wrong and is_named:
                    raise ValueError(f"{file} is no UTF-8 text: {wrong}")
                if wrong:
                    skipped.append(file)
                    continue
            if status.st_size:
                inputs.setdefault(os.path.realpath(file), this)
    return list(inputs.values()), skipped


def _kind(path: str, kinds: Kinds) -> str:
    if _JSON_LINES.search(path):
        return "json lines"
    if path.endswith(".parquet"):
        return "parquet"
    return "tokens" if kinds.vocab_size and path.endswith((".npy", ".bin")) else "text"


def fault(content: bytes, at_end: bool = True) -> str:
    """Why bytes are not UTF-8 text, and where; empty if they are. If not `at_end`, the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=at_end)
    except UnicodeDecodeError as error:
        return f"{error.reason} at byte {error.start}"
    return ""


def pieces_of(file: Input, kinds: Kinds, piece_bytes: int) -> list[Piece]:
    """The pieces of a file, in order, of about `piece_bytes` each. Raises ValueError where it is not of its kind."""
    if file.kind == "parquet":
        return _row_groups(file, kinds, piece_bytes)
    if file.kind == "tokens":
        tokens = _Tokens(file, kinds)
        per_piece = max(piece_bytes // tokens.dtype.itemsize, 1)
        ranges = _ranges(tokens.size, per_piece)
        return [Piece(file, a, b, (b - a) * tokens.dtype.itemsize) for a, b in ranges]
    if file.path.lower().endswith((".gz", ".zst")) and file.kind == "json lines":
        return [Piece(file, 0, file.size, file.size)]
    return [Piece(file, a, b, b - a) for a, b in _ranges(file.size, piece_bytes)]


def _ranges(size: int, most: int) -> list[tuple[int, int]]:
    """Equal ranges of at most `most` that make up `size`."""
    count = -(-size // most)
    return list(itertools.pairwise(size * number // count for number in range(count + 1)))


def read(piece: Piece, kinds: Kinds, report=lambda num_bytes: None) -> Iterator[Chunk]:
    """Yields the documents of a piece in chunks, and reports the bytes of the file that were read since.

    Raises:
      NoTextError: a text file is no UTF-8 text.
      ValueError: a line, a row or a token is wrong, with its file and position.
      OSError: the file cannot be read, or has changed since it was listed.
    """
    reader = {"text": _text, "json lines": _json_lines, "parquet": _parquet, "tokens": _tokens}[piece.input.kind]
    reported = 0

    def report_more(num_bytes: int) -> None:
        nonlocal reported
        num_bytes = max(min(num_bytes, piece.num_bytes - reported), 0)
        reported += num_bytes
        report(num_bytes)

    _check_unchanged(piece.input)
    yield from reader(piece, kinds, report_more)
    _check_unchanged(piece.input)
    report_more(piece.num_bytes - reported)


def _check_unchanged(file: Input) -> None:
    status = os.stat(file.path)
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise OSError(f"{file.path} has changed since the preparation began: start it again when nobody writes there")


class NoTextError(ValueError):
    """A file is no UTF-8 text."""


# -- text


def _text(piece: Piece, kinds: Kinds, report) -> Iterator[Chunk]:
    size = piece.input.size
    with open(piece.input.path, "rb") as file:
        start, stop = (_end_of_line(file, at, size) for at in (piece.start, piece.stop))
        if (start, stop) == (0, size) and size > CHUNK_CHARS:  # nothing of it counts if a part is no text
            for _ in _decoded(file, piece.input.path, start, stop):
                pass
        pending = ""
        for text, num_bytes in _decoded(file, piece.input.path, start, stop):
            if pending:
                yield Chunk(pending, False)
            pending = text
            report(num_bytes)
        if pending:
            yield Chunk(pending, True)


def _decoded(file: IO[bytes], path: str, at: int, stop: int) -> Iterator[tuple[str, int]]:
    """Yields (text, bytes) of a range of a file, a chunk at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    file.seek(at)
    while at < stop:
        content = file.read(min(CHUNK_CHARS, stop - at))
        try:
            text = decoder.decode(content, final=not content or at + len(content) == stop)
        except UnicodeDecodeError as error:
            wrong = f"{error.reason} at byte {at + error.start - (len(error.object) - len(content))}"
            raise NoTextError(f"{path} is no UTF-8 text: {wrong}") from None
        if not content:
            return  # it became shorter, which the caller reports
        at += len(content)
        yield text, len(content)


def _end_of_line(file: IO[bytes], at: int, size: int) -> int:
    """The first byte after the line that byte `at` is in; after a character if the line is long."""
    if at in (0, size):
        return at
    file.seek(at - 1)
    content = file.read(_LINE_BYTES)
    if (end := content.find(b"\n")) >= 0:
        return at + end
    first = next((i for i, byte in enumerate(content[1:]) if byte & 0xC0 != 0x80), len(content) - 1)
    return at + first


# -- JSON lines


def _json_lines(piece: Piece, kinds: Kinds, report) -> Iterator[Chunk]:
    path, key, stop, line_number = piece.input.path, kinds.text_key, piece.stop, 0
    with open(path, "rb") as raw, _decompressed(raw, path) as file:
        at = start = max(piece.start - 1, 0)
        is_compressed = file is not raw
        if piece.start:
            file.seek(start)
            at += len(file.readline())  # the line that begins before this piece
        reported = piece.start
        while is_compressed or at < stop:
            try:
                line = file.readline()
            except (EOFError, OSError, zlib.error) as error:
                raise OSError(f"{path} cannot be read after line {line_number}: {error}") from error
            if not line:
                break
            at, line_number = at + len(line), line_number + 1
            try:
                text = _value(line, key)
            except ValueError as error:
                place = f"{path} line {line_number}" + (f" after byte {start}" if piece.start else "")
                raise ValueError(f"{place} {error}") from None
            if 0 < len(text) <= CHUNK_CHARS:
                yield Chunk(text, True)
            else:
                yield from _chunks(text)
            position = raw.tell() if is_compressed else at
            if position - reported > CHUNK_CHARS:
                report(position - reported)
                reported = position


def _decompressed(raw: IO[bytes], path: str) -> Any:
    """A binary file of lines."""
    if path.lower().endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), CHUNK_CHARS)
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_Zstandard(raw), CHUNK_CHARS)
    return raw


class _Zstandard(io.RawIOBase):
    """The content of a file of Zstandard frames. Raises OSError for one that ends within a frame."""

    def __init__(self, raw: IO[bytes]):
        self.raw, self.library = raw, _library("zstandard", "a .zst file")
        self.frame, self.pending = None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.pending:
            unused = self.frame.unused_data if self.frame and self.frame.eof else b""
            content = unused or self.raw.read(1 << 17)
            if not content:
                if self.frame and not self.frame.eof:
                    raise OSError("it ends within a Zstandard frame: truncated")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = self.library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                self.pending = memoryview(self.frame.decompress(content))
            except self.library.ZstdError as error:
                raise OSError(str(error)) from None
        count = min(len(buffer), len(self.pending))
        buffer[:count] = self.pending[:count]
        self.pending = self.pending[count:]
        return count


def _library(name: str, what: str):
    try:
        return __import__(name)
    except ImportError:
        raise ValueError(f"{name} is not installed, which reads {what}: pip install -e '.[data]'") from None


_parse = json.JSONDecoder().raw_decode  # json.loads takes twice as long for a short line


def _value(line: bytes, key: str) -> str:
    """The text of a line; empty for an empty line, or for null. Raises ValueError with what the line has."""
    try:
        content = line.decode().strip()
        if not content:
            return ""
        value, end = _parse(content)
        if end < len(content):
            raise ValueError(f"more follows after character {end}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(value, dict) or key not in value:
        keys = f"its keys are {', '.join(list(value)[:10])}" if isinstance(value, dict) else "it is no object"
        raise ValueError(f"has no {key!r}: {keys}; name the key of the text with --text_key")
    return _checked(value[key], key)


def _checked(value: Any, key: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ValueError(f"has {kind} under {key!r}, not text: name another key with --text_key")
    return value


def _chunks(text: str) -> Iterator[Chunk]:
    for start in range(0, len(text), CHUNK_CHARS):
        yield Chunk(text[start : start + CHUNK_CHARS], start + CHUNK_CHARS >= len(text))


# -- Parquet


def _parquet_file(path: str):
    _library("pyarrow", "a .parquet file")
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from None


def _row_groups(file: Input, kinds: Kinds, piece_bytes: int) -> list[Piece]:
    with _parquet_file(file.path) as table:
        names, groups = table.schema_arrow.names, table.metadata
        if kinds.text_key not in names:
            raise ValueError(
                f"{file.path} has no column {kinds.text_key!r}: its columns are {', '.join(names[:10])}; name the "
                "column of the text with --text_key"
            )
        sizes = [groups.row_group(group).total_byte_size for group in range(groups.num_row_groups)]
    pieces, start, held, total = [], 0, 0, max(sum(sizes), 1)
    for stop, (size, after) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True), 1):
        held += size
        if stop == len(sizes) or held + after > piece_bytes:
            pieces.append(Piece(file, start, stop, file.size * held // total))
            start, held = stop, 0
    return pieces


def _parquet(piece: Piece, kinds: Kinds, report) -> Iterator[Chunk]:
    path, key = piece.input.path, kinds.text_key
    with _parquet_file(path) as table:
        groups = range(piece.start, piece.stop)
        sizes = [table.metadata.row_group(group) for group in groups]
        num_rows = sum(group.num_rows for group in sizes)
        bytes_a_row = max(sum(group.total_byte_size for group in sizes) // max(num_rows, 1), 1)
        rows = min(max(CHUNK_CHARS // bytes_a_row, 1), 1 << 16)
        row = reported = 0
        for batch in _batches(table, path, batch_size=rows, row_groups=list(groups), columns=[key], use_threads=False):
            for value in batch.column(0).to_pylist():
                try:
                    yield from _chunks(_checked(value, key))
                except ValueError as error:
                    raise ValueError(f"{path} row {row} from row group {piece.start} on {error}") from None
                row += 1
            done = piece.num_bytes * row // max(num_rows, 1)
            report(done - reported)
            reported = done


def _batches(table, path: str, **options) -> Iterator:
    import pyarrow

    try:
        yield from table.iter_batches(**options)
    except (pyarrow.ArrowException, OSError) as error:
        raise OSError(f"{path} cannot be read: {error}") from error


# -- tokens


class _Tokens:
    """A file of tokens: .npy, or .bin of one dtype, with the documents of Megatron's .idx beside it if there is one.

    Attributes:
      dtype: of a token.
      size: the number of tokens.
      starts: the first token of each document, or None if separators say.
    """

    def __init__(self, file: Input, kinds: Kinds):
        self.path, self.offset, self.starts = file.path, 0, None
        index = file.path.removesuffix(".bin") + ".idx"
        if file.path.endswith(".npy"):
            self._read_npy()
        elif os.path.isfile(index):
            self._read_index(index)
        elif kinds.token_dtype:
            self.dtype = np.dtype(kinds.token_dtype).newbyteorder("<")
        else:
            raise ValueError(f"{file.path} has no header and no .idx beside it: give its type with --token_dtype")
        if self.dtype.kind not in "ui":
            raise ValueError(f"{file.path} has {self.dtype} in place of whole numbers: these are no tokens")
        num_bytes = file.size - self.offset
        if num_bytes % self.dtype.itemsize:
            raise ValueError(f"{file.path} has {num_bytes} bytes, no multiple of the {self.dtype.itemsize} of a token")
        self.size = num_bytes // self.dtype.itemsize

    def _read_npy(self) -> None:
        with open(self.path, "rb") as file:
            try:
                version = np.lib.format.read_magic(file)
                read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
                shape, _, self.dtype = read(file)
            except (ValueError, KeyError) as error:
                raise ValueError(f"{self.path} is no .npy file: {error}") from None
            if len(shape) != 1:
                raise ValueError(f"{self.path} has an array of shape {shape}: one dimension of tokens is read")
            self.offset = file.tell()

    def _read_index(self, path: str) -> None:
        content = np.memmap(path, np.uint8, "r")
        codes = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
        if bytes(content[:9]) != b"MMIDIDX\0\0" or len(content) < 34 or int(content[17]) not in codes:
            raise ValueError(f"{path} is no index of Megatron, or of tokens that are no whole numbers")
        self.dtype = np.dtype(codes[int(content[17])])
        sequences, documents = (int(n) for n in np.frombuffer(content[18:34], "<u8"))
        if len(content) < 34 + 12 * sequences + 8 * documents:
            raise ValueError(f"{path} has {len(content)} bytes: too short for {sequences} sequences, truncated")
        pointers = np.frombuffer(content[34 + 4 * sequences :][: 8 * sequences], "<i8")
        firsts = np.frombuffer(content[34 + 12 * sequences :][: 8 * documents], "<i8")[:-1]
        self.starts = pointers[firsts] // self.dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.fromfile(self.path, self.dtype, stop - start, offset=self.offset + start * self.dtype.itemsize)


def _tokens(piece: Piece, kinds: Kinds, report) -> Iterator[Chunk]:
    """The documents that begin in a piece, without separators; a chunk of the array at a time."""
    tokens, at = _Tokens(piece.input, kinds), piece.start
    begun = at == 0 and tokens.starts is None  # the first document needs no separator
    while at < tokens.size and (begun or at < piece.stop):
        stop = min(at + CHUNK_CHARS, tokens.size)
        content = tokens.read(at, stop)
        if (bad := np.flatnonzero((content < 0) | (content >= kinds.vocab_size))).size:
            raise ValueError(
                f"{tokens.path} has token {content[bad[0]]} at position {at + bad[0]}, outside the vocabulary of "
                f"{kinds.vocab_size}"
            )
        ends = _ends(tokens.starts, content, at, kinds.separator)
        first = 0
        for end in ends:
            if begun:
                yield Chunk(_without(content[first:end], kinds.separator), True)
            if at + end >= piece.stop:
                return
            begun, first = True, end
        if begun:
            yield Chunk(_without(content[first:], kinds.separator), stop == tokens.size)
        report((stop - at) * tokens.dtype.itemsize)
        at = stop


def _ends(starts: np.ndarray | None, content: np.ndarray, at: int, separator: int) -> list[int]:
    """Positions in a chunk where a document begins, which end the one before."""
    if starts is None:
        return np.flatnonzero(content == separator).tolist()
    return [
        int(start) - at
        for start in starts[bisect.bisect_left(starts, at) : bisect.bisect_left(starts, at + len(content))]
    ]


def _without(content: np.ndarray, separator: int) -> np.ndarray:
    return content[content != separator]
