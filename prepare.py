"""Preparation: text or tokens in many files to a corpus, in parallel, in bounded memory, and resumable.

    python data.py prepare PATH... --tokenizer=tokenizer.json --out=DIR [--text_key=text] [--workers=8]

**Idea.** The inputs, in order, are divided into parts of at most `shard_bytes`: small files together, large ones in
pieces (documents.py). The plan depends on the inputs and the settings alone. A worker encodes a part and writes its
shards; who does so, and when, changes no byte. A finished part is noted in a journal, so that the same command goes on
after a kill. The index is written last. A lock (lock.py) keeps a second preparation out of the folder.

**Held out.** In each shard, documents are put in the order of the CRC-32 of their content. The first are held out until
`held_out` of the shard's tokens is reached. The document that would exceed it is cut: its end is held out, and its
beginning trained on. So the share is exact for few documents, too, and copies of a document in a shard are on one side.

**Long documents.** A text of more than a million characters is encoded in windows that overlap. Two windows are joined
where both have the same tokens at the same characters, `_AGREE` of them to the left and to the right. So the tokens are
those of the text at once, if a tokenizer decides by less than the overlap. Where windows never agree, the text is cut
there, and the number of such cuts is reported. A document that exceeds a shard is another document in the next one.

**Cost.** A core prepares 1.5 MB/s of source code with a BPE of 4,096 (measured, AMD EPYC, `benchmarks/prepare.py`): the
tokenizer alone takes 96% of that time, and 89% where documents have 37 bytes. A worker holds the tokens of a shard, 2
or 4 bytes each, and a million characters in the library's form.

**Left out.** Filters and deduplication; an order of the shards at random, since data.py permutes sequences.
"""

import argparse
import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import command
import corpora
import documents
import lock
import outputs
import tokenization

PLAN = "plan.json"  # in the folder of the corpus
JOURNAL, LOCK = "journal.jsonl", "lock"  # until it is complete
_BATCH_CHARS, _BATCH_TEXTS = 1 << 20, 1 << 16  # encoded at once
_OVERLAPS = (1 << 14, 1 << 17, 1 << 20)  # characters that two windows share, the next if they do not agree
_AGREE = 16  # tokens on each side of a joint
_OVERFULL = 1.25  # a part ends a shard when it has so much more text than asked, so that none is tiny
_LINES_EVERY_S = 10  # progress where stdout is no terminal


@dataclass(frozen=True)
class Options:
    """How a corpus is prepared; data.py has the flags of these names."""

    tokenizer: str = ""  # a tokenizer.json, or its folder; empty: bytes
    separator: str = ""  # the token that starts a document; empty: the tokenizer's end-of-text token
    text_key: str = "text"
    held_out: float = 0.05
    shard_bytes: int = 64 << 20
    workers: int = 1
    token_dtype: str = ""  # of .bin files of tokens
    vocab_size: int = 0  # of files of tokens without a tokenizer


class Report(NamedTuple):
    """A summary of a preparation."""

    skipped: list[str]  # paths below folders that are no text, in order
    num_documents: int
    text_bytes: int
    num_mended: int  # documents with lone surrogates, which became U+FFFD
    num_cuts: int  # places where the windows of a long text did not agree


class _Settings(NamedTuple):
    """The settings that decide the shards of a part; they go to the workers."""

    out: str
    tokenizer: str
    separator_text: str | None
    vocab_size: int
    separator: int
    held_out: float
    shard_bytes: int
    kinds: documents.Kinds

    def opened_tokenizer(self) -> Any:
        if not self.tokenizer:
            return tokenization.BYTES
        return tokenization.open_tokenizer(self.tokenizer, self.separator_text)


def prepare(paths: list[str], out: str, options: Options | None = None) -> tuple[corpora.Corpus, Report]:
    """Writes the documents of files, and of those below folders, as a corpus in the folder `out`.

    If `out` has an unfinished corpus of the same inputs and options, its finished parts are not made again.

    Raises:
      ValueError: a path in `paths` is not UTF-8 text (with the offset) or not an ordinary file; there is no text; a
        tokenizer has no separator; or `out` has something else.
      OSError: a file or folder cannot be read or written, an input changed meanwhile, or another preparation writes to
        `out`.
    """
    options = options or Options()
    outputs.check_apart({"--out": out}, {f"the text {path}": path for path in paths})
    _check_folder(out)
    tokenizer, settings = _settings(out, options)
    inputs, skipped = documents.inputs_of(paths, settings.kinds)
    for file in inputs if options.vocab_size and not options.tokenizer else ():
        if file.kind != "tokens":
            raise ValueError(f"{file.path} has text, and --vocab_size is for files of tokens: give --tokenizer instead")
    if os.path.isdir(out):  # an input may be in it, by a link
        outputs.check_apart({"--out": out}, {f"the text {file.path}": file.path for file in inputs})
    plan = _plan(inputs, tokenizer, settings)
    if not _is_complete(out, plan):
        with _locked(out):
            if not _is_complete(out, plan):  # another preparation may have written it meanwhile
                results = _encode(inputs, plan, settings, options.workers)
                return _finish(out, results, skipped, tokenizer, settings, paths)
    index = corpora.read_index(out)
    return corpora.open_corpus(out), Report(skipped, index["documents"], index["text_bytes"], 0, 0)


@contextlib.contextmanager
def _locked(out: str) -> Iterator[None]:
    """Makes the folder, and holds its lock for the block. Raises OSError where another preparation writes there."""
    Path(out).mkdir(exist_ok=True)
    held = lock.acquire(Path(out, LOCK))
    try:
        yield
    finally:
        held.release()


def _encode(inputs: list[documents.Input], plan: dict, settings: _Settings, workers: int) -> list[dict]:
    """Writes the shards that are missing. Returns the results of all parts, in order."""
    results = _begin(settings.out, plan)
    parts = _parts(inputs, settings)
    missing = [number for number in range(len(parts)) if number not in results]
    progress = _Progress(parts, missing, results)
    with open(os.path.join(settings.out, JOURNAL), "a", encoding="ascii") as journal:
        workers = min(workers, len(missing))
        for result in (_in_processes if workers > 1 else _here)(settings, parts, missing, workers, progress):
            results[result["part"]] = result
            print(json.dumps(result), file=journal, flush=True)
    progress.end()
    return [results[number] for number in range(len(parts))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python data.py prepare`."""
    default = Options()
    add = parser.add_argument
    about = "text, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, tokens as .npy or .bin, or a folder of them"
    add("paths", type=command.path, nargs="+", metavar="PATH", help=about)
    add("--out", type=command.path, required=True, metavar="DIR", help="the folder of the corpus")
    about = "tokenizer.json, or its folder; default: the tokens are bytes"
    add("--tokenizer", type=command.path, default=default.tokenizer, metavar="PATH", help=about)
    about = "token that starts each document [the tokenizer's end-of-text token]; a number with --vocab_size"
    add("--separator", default=default.separator, metavar="TOKEN", help=about)
    add("--text_key", default=default.text_key, help="key or column of the text in JSON or Parquet [%(default)s]")
    add("--held_out", type=float, default=default.held_out, help="share of the tokens that is held out [%(default)s]")
    about = "bytes of text in a shard, and in a part of the work [%(default)s]"
    add("--shard_bytes", type=command.size, default=default.shard_bytes, help=about)
    add("--workers", type=command.at_least(1), default=_cores(), help="processes [%(default)s, all cores]")
    about = "read .npy and .bin as tokens of this type, of the tokenizer's or of --vocab_size"
    add("--token_dtype", default="", choices=("", "uint8", "uint16", "uint32", "int32", "int64"), help=about)
    add("--vocab_size", type=command.at_least(0), default=0, help="read .npy and .bin as tokens of a vocabulary")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(args: argparse.Namespace) -> corpora.Corpus:
    """Runs `python data.py prepare`, and prints what was left out, mended or cut."""
    options = Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})
    if not 0 < options.held_out < 1:
        raise ValueError(f"--held_out={options.held_out} must be between 0 and 1")
    corpus, report = prepare(args.paths, args.out, options)
    for path in report.skipped:
        print(f"left out, no UTF-8 text: {path}")
    if report.num_mended:
        print(f"{report.num_mended:,} documents have lone surrogates, which became U+FFFD")
    if report.num_cuts:
        print(f"{report.num_cuts:,} cuts in long documents, where the tokens may differ from those of the text at once")
    print(f"{report.num_documents:,} documents of {report.text_bytes / 1e6:,.1f} MB")
    return corpus


# -- the plan


def _check_folder(out: str) -> None:
    """Raises ValueError where no folder could be written at `out`, or where it has other files than a corpus."""
    if os.path.lexists(out) and not os.path.isdir(out):
        raise ValueError(f"--out={out} exists, and is no folder: name another")
    outputs.check_writable(f"--out={out}", os.path.join(out, PLAN) if os.path.isdir(out) else out)
    if os.path.isdir(out) and {*os.listdir(out)} - {LOCK} and not os.path.isfile(os.path.join(out, PLAN)):
        raise ValueError(f"--out={out} has other files than those of a preparation: name another folder")


def _settings(out: str, options: Options) -> tuple[Any, _Settings]:
    """The tokenizer, None for tokens without one, and what the workers need."""
    separator_text = options.separator or None
    if options.tokenizer:
        tokenizer = tokenization.open_tokenizer(options.tokenizer, separator_text)
        if options.vocab_size:
            raise ValueError("--vocab_size is the tokenizer's if there is one: leave one of the two flags out")
        vocab_size, separator = tokenizer.vocab_size, tokenizer.separator
        reads_tokens = bool(options.token_dtype)
    elif options.vocab_size:
        if not options.separator.isdecimal() or int(options.separator) >= options.vocab_size:
            raise ValueError(
                f"files of tokens need the token that separates documents: --separator=N, with N from 0 to "
                f"{options.vocab_size - 1}, and not {options.separator!r}"
            )
        tokenizer, vocab_size, separator, reads_tokens = None, options.vocab_size, int(options.separator), True
    else:
        if options.separator or options.token_dtype:
            raise ValueError("--separator and --token_dtype need --tokenizer, or the --vocab_size of files of tokens")
        tokenizer, vocab_size, separator, reads_tokens = tokenization.BYTES, 256, tokenization.BYTE_SEPARATOR, False
    kinds = documents.Kinds(options.text_key, vocab_size if reads_tokens else 0, separator, options.token_dtype)
    return tokenizer, _Settings(
        out, options.tokenizer, separator_text, vocab_size, separator, options.held_out, options.shard_bytes, kinds
    )


def _plan(inputs: list[documents.Input], tokenizer: Any, settings: _Settings) -> dict:
    """The inputs and settings that decide every byte of the corpus, to be compared with those of an unfinished one."""
    names = hashlib.blake2b(digest_size=8)
    for file in inputs:
        names.update(os.fsencode(f"{file.path}\0{file.kind}\0{file.size}\0{file.mtime_ns}\n"))
    return dict(
        format=1,
        tokenizer=tokenizer.identity if tokenizer else None,
        vocab_size=settings.vocab_size,
        separator=settings.separator,
        text_key=settings.kinds.text_key,
        token_dtype=settings.kinds.token_dtype,
        held_out=settings.held_out,
        shard_bytes=settings.shard_bytes,
        inputs=f"{len(inputs)} files of {sum(file.size for file in inputs)} bytes, hash {names.hexdigest()}",
    )


def _is_complete(out: str, plan: dict) -> bool:
    """Whether `out` has the corpus of this plan. Raises ValueError if it has that of another."""
    path = os.path.join(out, PLAN)
    if not os.path.exists(path):
        return False
    try:
        earlier = json.loads(Path(path).read_bytes())
        differ = [key for key in plan if earlier.get(key) != plan[key]]
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is damaged: remove {out}, or name another folder") from None
    if differ:
        differences = ", ".join(f"{key} is {earlier.get(key)!r} there and {plan[key]!r} here" for key in differ)
        raise ValueError(f"--out={out} has a corpus of another plan ({differences}): remove it, or name another folder")
    return os.path.exists(os.path.join(out, corpora.INDEX))


def _begin(out: str, plan: dict) -> dict[int, dict]:
    """Writes the plan. Returns the results of the parts that a run before this one finished."""
    results, journal = {}, Path(out, JOURNAL)
    for unfinished in Path(out).glob("*.unfinished"):
        unfinished.unlink()
    if not os.path.exists(os.path.join(out, PLAN)):
        with outputs.replacing(os.path.join(out, PLAN)) as file:
            json.dump(plan, file, indent=1)
    for line in journal.read_text("ascii", errors="replace").splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError):  # the last line may be cut
            result = json.loads(line)
            for shard in result["shards"]:
                if corpora.open_corpus(os.path.join(out, shard["file"])).identity != shard["identity"]:
                    raise ValueError
            results[result["part"]] = result
    with outputs.replacing(journal) as file:  # without what is not there
        file.writelines(json.dumps(result) + "\n" for result in results.values())
    return results


def _parts(inputs: list[documents.Input], settings: _Settings) -> list[list[documents.Piece]]:
    """The pieces of all inputs, in order, in parts of at most `shard_bytes` of input; a compressed file is one part."""
    parts, size = [], settings.shard_bytes
    for piece in itertools.chain.from_iterable(
        documents.pieces_of(file, settings.kinds, settings.shard_bytes) for file in inputs
    ):
        if size + piece.num_bytes > settings.shard_bytes or not parts:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += piece.num_bytes
    return parts


# -- workers


class _StoppedError(Exception):
    """Another part failed."""


class _Counters:
    """Bytes read, bytes of text, and tokens, of all workers, and whether to stop."""

    def __init__(self, values: Any, changed: Callable[[], None] = lambda: None):
        self.values, self.changed = values, changed
        self.lock = values.get_lock() if hasattr(values, "get_lock") else contextlib.nullcontext()

    def add(self, *, read: int = 0, text: int = 0, tokens: int = 0) -> None:
        with self.lock:
            for at, count in enumerate((read, text, tokens)):
                self.values[at] += count
        if self.values[3]:
            raise _StoppedError
        self.changed()


def _here(settings: _Settings, parts: list, missing: list[int], workers: int, progress: "_Progress") -> Iterator[dict]:
    encoder = _Encoder(settings, _Counters(progress.values, progress.show))
    for number in missing:
        yield encoder.part(number, parts[number])


def _in_processes(
    settings: _Settings, parts: list, missing: list[int], workers: int, progress: "_Progress"
) -> Iterator[dict]:
    """Yields the results of parts as processes end them."""
    context = multiprocessing.get_context("spawn")
    progress.values = values = context.Array("q", 4)
    with ProcessPoolExecutor(workers, context, _start_worker, (settings, values, os.getpid())) as pool:
        try:
            pending = {pool.submit(_work, number, parts[number]) for number in missing}
            while pending:
                done, pending = wait(pending, 0.2, FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    if isinstance(result, Exception):
                        error = type(result)(*result.args)
                        raise error
                    yield result
                progress.show()
        except BrokenProcessPool:
            raise OSError(
                "a worker was killed, perhaps for its memory: start the same command again with fewer --workers, and "
                "it goes on with the missing parts"
            ) from None
        finally:
            values[3] = 1
            pool.shutdown(cancel_futures=True)


_encoder: "_Encoder | None" = None  # of a worker process


def _start_worker(settings: _Settings, values: Any, parent: int) -> None:
    global _encoder
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    _encoder = _Encoder(settings, _Counters(values))

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(number: int, pieces: list[documents.Piece]) -> dict | Exception:
    """Returns errors for the user as they are: raised, they would have the traceback of the pool."""
    try:
        return _encoder.part(number, pieces)
    except (ValueError, OSError, _StoppedError) as error:
        if isinstance(error, _StoppedError) or command.is_for_the_user(error):
            return OSError(str(error)) if isinstance(error, OSError) else ValueError(str(error))
        raise


class _Encoder:
    """Encodes parts, one after the other, and writes their shards."""

    def __init__(self, settings: _Settings, counters: _Counters):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core's
        self.settings, self.counters = settings, counters
        self.tokenizer = settings.opened_tokenizer()
        self.dtype = corpora.dtype_of(settings.vocab_size)
        self.separator = np.array([settings.separator], self.dtype)

    def part(self, number: int, pieces: list[documents.Piece]) -> dict:
        """Returns {part, shards, documents, text_bytes, skipped, mended, cuts}."""
        self.result = dict(part=number, shards=[], documents=0, text_bytes=0, skipped=[], mended=0, cuts=0)
        self.shard, self.texts, self.num_chars, self.long = _Shard(), [], 0, None
        for piece in pieces:
            is_cut = (piece.start, piece.stop) != (0, piece.input.size)
            try:
                for chunk in documents.read(piece, self.settings.kinds, lambda count: self.counters.add(read=count)):
                    self._add(chunk)
            except documents.NoTextError as error:
                if piece.input.is_named or is_cut:
                    raise ValueError(f"{error}; mend it, or leave it out") from None
                self.result["skipped"].append(piece.input.path)
            if self.long:
                self._end_long()
        self._encode_texts()
        self._write_shard()
        return self.result

    def _add(self, chunk: documents.Chunk) -> None:
        """Takes a chunk of a document: short texts wait for each other."""
        is_text = isinstance(chunk.content, str)
        if is_text and chunk.ends and not self.long:
            self.texts.append(chunk.content)
            self.num_chars += len(chunk.content)
            if self.num_chars >= _BATCH_CHARS or len(self.texts) >= _BATCH_TEXTS:
                self._encode_texts()
            return
        if not self.long:
            self._encode_texts()
            self.long = _Windows(self.tokenizer) if is_text else _Arrays()
        content = self._content(chunk.content) if is_text else chunk.content.astype(self.dtype).tobytes()
        self._extend(self.long.add(content.decode() if is_text else chunk.content), content)
        if chunk.ends:
            self._end_long()

    def _extend(self, ids: np.ndarray, content: bytes = b"") -> None:
        """Adds tokens to the document that is open; a shard that is full ends it."""
        self.shard.extend(ids.astype(self.dtype), content, self.separator)
        self._count(content, len(ids))
        self._check_full()

    def _end_long(self) -> None:
        self._extend(self.long.end())
        self.shard.end()
        self.result["cuts"] += self.long.num_cuts
        self.result["documents"] += 1
        self.long = None

    def _content(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError:
            self.result["mended"] += 1
            return tokenization.without_surrogates(text).encode()

    def _encode_texts(self) -> None:
        """Encodes the texts that wait, each a document."""
        texts, self.texts, self.num_chars = self.texts, [], 0
        if not texts:
            return
        contents = list(map(self._content, texts))
        crcs = list(map(zlib.crc32, contents))
        text_bytes = sum(map(len, contents))
        del contents
        encoded = self.tokenizer.encode(texts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
        pieces = [piece for ids in encoded if len(ids) for piece in (self.separator, ids)]
        if pieces:
            tokens = np.concatenate(pieces).astype(self.dtype)
            has_tokens = lengths > 1
            self.shard.add(tokens, lengths[has_tokens], np.array(crcs, np.uint32)[has_tokens], text_bytes)
            self.result["documents"] += int(has_tokens.sum())
            self._count(text_bytes, len(tokens))
            self._check_full()

    def _count(self, text: bytes | int, tokens: int) -> None:
        num_bytes = text if isinstance(text, int) else len(text)
        self.result["text_bytes"] += num_bytes
        self.counters.add(text=num_bytes, tokens=tokens)

    def _check_full(self) -> None:
        if self.shard.text_bytes >= self.settings.shard_bytes * _OVERFULL:
            self._write_shard()

    def _write_shard(self) -> None:
        shard, self.shard = self.shard, _Shard()
        shard.end()
        if not shard.arrays:
            return
        name = f"{self.result['part']:05}-{len(self.result['shards']):03}.bin"
        train, held_out = shard.split(self.settings.held_out, self.separator)
        written = corpora.write_tokens(
            os.path.join(self.settings.out, name), train, held_out,
            vocab_size=self.settings.vocab_size, separator=self.settings.separator,
        )  # fmt: skip
        self.result["shards"].append(
            dict(file=name, train=len(written.train), held_out=len(written.held_out), identity=written.identity)
        )


# -- shards


class _Shard:
    """Documents that become a token file. A document is its separator and its tokens."""

    def __init__(self):
        self.arrays, self.text_bytes = [], 0  # the tokens of all documents, one after the other
        self.lengths, self.crcs = [], []  # arrays, of the documents of several of those
        self.open_length = self.open_crc = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray, crcs: np.ndarray, text_bytes: int) -> None:
        """Adds documents that are complete."""
        self.arrays.append(tokens)
        self.lengths.append(lengths)
        self.crcs.append(crcs)
        self.text_bytes += text_bytes

    def extend(self, tokens: np.ndarray, content: bytes, separator: np.ndarray) -> None:
        """Adds tokens to the open document, or begins one with them."""
        self.text_bytes += len(content)
        self.open_crc = zlib.crc32(content, self.open_crc)
        if len(tokens):
            if not self.open_length:
                self.arrays.append(separator)
                self.open_length = 1
            self.arrays.append(tokens)
            self.open_length += len(tokens)

    def end(self) -> None:
        """Ends the open document, if there is one."""
        if self.open_length:
            self.lengths.append(np.array([self.open_length]))
            self.crcs.append(np.array([self.open_crc], np.uint32))
        self.open_length = self.open_crc = 0

    def split(self, share: float, separator: np.ndarray) -> tuple[Iterator[np.ndarray], Iterator[np.ndarray]]:
        """Returns the tokens to train on and those held out, in slices."""
        lengths, crcs = np.concatenate(self.lengths), np.concatenate(self.crcs)
        chosen, cut, num_held_out = held_out_of(lengths, crcs, share)
        ends = np.cumsum(lengths)
        train, held_out, at = [], [], 0
        for document in sorted([*chosen, *([cut] if num_held_out else [])]):
            first = int(ends[document]) - (num_held_out if document == cut else int(lengths[document]))
            train.append((at, first))
            held_out.append((first, int(ends[document])))
            at = int(ends[document])
        train.append((at, int(ends[-1])))
        cut_at = int(ends[cut]) - num_held_out if num_held_out else -1
        return self._slices(train, -1, separator), self._slices(held_out, cut_at, separator)

    def _slices(self, runs: list[tuple[int, int]], cut_at: int, separator: np.ndarray) -> Iterator[np.ndarray]:
        """The tokens of runs of positions; a separator precedes the run that begins at `cut_at`."""
        ends = list(itertools.accumulate(map(len, self.arrays)))
        for start, stop in runs:
            if start == cut_at:
                yield separator
            number = bisect.bisect_right(ends, start)
            while start < stop:
                array, end = self.arrays[number], ends[number]
                yield array[len(array) - (end - start) : len(array) - max(end - stop, 0)]
                number, start = number + 1, end


def held_out_of(lengths: np.ndarray, crcs: np.ndarray, share: float) -> tuple[list[int], int, int]:
    """Which documents of a shard are held out: `share` of the tokens, and at least a token of text.

    Args:
      lengths: tokens of each document, with its separator.
      crcs: CRC-32 of each document; it decides the order in which they are held out.

    Returns:
      (documents, the document that is cut, tokens at its end that are held out without a separator, or 0).
    """
    order = np.lexsort((np.arange(len(crcs)), crcs))
    reached = np.cumsum(lengths[order])
    target = max(round(share * int(reached[-1])), 2)
    count = int(np.searchsorted(reached, target, side="right"))
    missing = target - (int(reached[count - 1]) if count else 0)
    if count == len(order) or missing < 2:
        return order[:count].tolist(), -1, 0
    return order[:count].tolist(), int(order[count]), missing - 1


# -- long documents


class _Arrays:
    """A long document of tokens."""

    num_cuts = 0

    def add(self, tokens: np.ndarray) -> np.ndarray:
        return tokens

    def end(self) -> np.ndarray:
        return np.empty(0, np.uint8)


class _Windows:
    """Encodes a long text in windows that overlap, as if it were encoded at once.

    Attributes:
      num_cuts: windows that did not agree with the one before, and were joined without an overlap.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.num_cuts = tokenizer, 0
        self.text, self.ids, self.starts, self.first = "", np.empty(0, np.uint32), np.empty(0, np.int64), 0

    def add(self, text: str) -> np.ndarray:
        """Takes the next characters. Returns the next tokens; the last ones wait for what follows."""
        if self.tokenizer.identity == corpora.BYTES:
            return self.tokenizer.encode([text])[0]
        for overlap in _OVERLAPS if self.text else ():
            begin = max(len(self.text) - overlap, 0)
            window = self.text[begin:] + text
            ids, offsets = self.tokenizer.encode_with_offsets(window)
            joint = joint_of((self.ids, self.starts - begin), (ids, offsets[:, 0]), len(self.text) - begin)
            if joint and joint[0] >= self.first:
                done = self.ids[self.first : joint[0]]
                self._take(window, ids, offsets[:, 0], joint[1])
                return done
            if not begin:
                break
        done = self.end()
        self.num_cuts += bool(self.text)
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        self._take(text, ids, offsets[:, 0], 0)
        return done

    def _take(self, text: str, ids: np.ndarray, starts: np.ndarray, first: int) -> None:
        """The window whose tokens from `first` on are to come."""
        self.text, self.ids, self.starts, self.first = text, ids, starts, first

    def end(self) -> np.ndarray:
        """The tokens that wait."""
        return self.ids[self.first :]


def joint_of(
    left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray], overlap: int
) -> tuple[int, int] | None:
    """Where two windows have the same tokens: (number in the left, in the right), nearest to the overlap's middle.

    Args:
      left, right: ids, and the character at which each begins, counted from the beginning of the right window.
      overlap: characters that both windows have.
    """
    (left_ids, left_starts), (right_ids, right_starts) = left, right
    left_places, left_numbers = np.unique(left_starts, return_index=True)  # a character may be several tokens
    right_places, right_numbers = np.unique(right_starts, return_index=True)
    places, at_left, at_right = np.intersect1d(left_places, right_places, True, return_indices=True)
    pairs = np.stack([left_numbers[at_left], right_numbers[at_right]], 1)
    is_inside = (pairs.min(1) >= _AGREE) & (pairs[:, 0] + _AGREE <= len(left_ids))
    is_inside &= pairs[:, 1] + _AGREE <= len(right_ids)
    places, pairs = places[is_inside], pairs[is_inside]
    for i, j in pairs[np.argsort(abs(places - overlap // 2), kind="stable")].tolist():
        a, b = slice(i - _AGREE, i + _AGREE), slice(j - _AGREE, j + _AGREE)
        if (left_ids[a] == right_ids[b]).all() and (left_starts[a] == right_starts[b]).all():
            return i, j
    return None


# -- the end


def _finish(
    out: str, results: list[dict], skipped: list[str], tokenizer: Any, settings: _Settings, paths: list[str]
) -> tuple[corpora.Corpus, Report]:
    """Writes the tokenizer and the index. Raises ValueError where no part has any text."""
    total = lambda key: sum(result[key] for result in results)
    skipped = skipped + [path for result in results for path in result["skipped"]]
    shards = [shard for result in results for shard in result["shards"]]
    if not shards:
        shutil.rmtree(out)
        raise ValueError(
            f"there is no UTF-8 text in {', '.join(map(str, paths))}; {len(skipped)} files of other content"
        )
    described = None
    if tokenizer:
        described = dict(identity=tokenizer.identity, special_tokens=dict(tokenizer.special_tokens))
    if settings.tokenizer:
        described["special_tokens"][tokenizer.separator_text] = settings.separator  # which may be an ordinary token
        with outputs.replacing(os.path.join(out, corpora.TOKENIZER), "wb") as file:
            file.write(tokenizer.content)
    corpora.write_index(
        out, shards, vocab_size=settings.vocab_size, separator=settings.separator, tokenizer=described,
        documents=total("documents"), text_bytes=total("text_bytes"),
    )  # fmt: skip
    os.unlink(os.path.join(out, JOURNAL))
    report = Report(skipped, total("documents"), total("text_bytes"), total("mended"), total("cuts"))
    return corpora.open_corpus(out), report


class _Progress:
    """A line that a terminal overwrites; elsewhere a line every 10 s."""

    def __init__(self, parts: list[list[documents.Piece]], missing: list[int], results: dict):
        size = lambda part: sum(piece.num_bytes for piece in part)
        self.total, self.values = sum(size(parts[number]) for number in missing), [0, 0, 0, 0]
        self.is_terminal, self.begun = sys.stdout.isatty(), time.perf_counter()
        self.said, self.width = self.begun, 0
        if results:
            command.say(f"goes on: {len(results)} of {len(parts)} parts are there")

    def show(self) -> None:
        now = time.perf_counter()
        if now - self.said < (0.5 if self.is_terminal else _LINES_EVERY_S):
            return
        self.said = now
        line = progress_line(now - self.begun, self.total, *self.values[:3])
        self.width = max(self.width, len(line))
        command.say("\r" + line.ljust(self.width) if self.is_terminal else line, end="" if self.is_terminal else "\n")

    def end(self) -> None:
        if self.width and self.is_terminal:
            command.say("\r" + " " * self.width + "\r", end="")


def progress_line(seconds: float, total: int, read: int, text_bytes: int, tokens: int) -> str:
    """The line of progress after `seconds`, of which `total` bytes of input were to be read."""
    left = command.duration(seconds * (total - read) / max(read, 1))
    left = left if tokens else "?"  # a million characters are read before any is encoded
    return (
        f"{read / 1e6:,.0f} of {total / 1e6:,.0f} MB ({read / max(total, 1):.0%})  {tokens / seconds:,.0f} tokens/s  "
        f"{text_bytes / seconds / 1e6:.1f} MB/s  {left} left"
    )
