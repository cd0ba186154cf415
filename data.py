"""Data: the batch of a step, a pure function of the corpora, the seed and the step.

    python data.py prepare PATH... --out=corpus     make a corpus of files and folders (prepare.py)
    python data.py tokenizer PATH... --out=FILE     train a tokenizer (tokenization.py)
    python data.py show [corpus]                    print its size, and one packed sequence
    python data.py check corpus                     read all of it, and compare it with its checksums

**Idea.** The documents of a corpus follow each other in a stream. A sequence is T tokens of it, and its targets are the
same tokens shifted by one. Each document in a sequence has its own segment id (attention does not cross it), and its
positions start at 0. A document that reaches beyond its sequence continues in another one, without the earlier context.

**Formula.** A step takes the next `batch` sequences of the run: with a batch that has not changed, row r of step s is
sequence n = s * batch + r. Of several corpora, data_mixtures.py says which one has it, and n is its number there.
Sequence n of a corpus is its sequence perm(n mod size), with a different permutation each epoch. The permutation is a
Feistel network (Luby & Rackoff 1988), so nothing is shuffled in memory, and the batch of any step can be computed
directly. It depends neither on the mesh nor on the number of processes. A resumed run needs its step, and the batch
sizes before.
"""

import argparse
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

import command
import corpora
import data_mixtures
import prepare
import storage
import tokenization


class Batch(NamedTuple):
    """Packed sequences, all arrays [B, T]."""

    tokens: Any  # int32
    targets: Any  # int32: the token that follows each
    segments: Any  # int32: number of the document in the sequence, from 1; 0 is padding
    positions: Any  # int32: position in the document
    loss_weights: Any  # float32: weight of the target in the loss; 0 is padding
    next_targets: Any = None  # int32: the token that follows the target in the same document; -1 is none


# -- batches


def num_sequences(tokens: np.ndarray | corpora.Stream, seq_len: int) -> int:
    return (len(tokens) - 1) // seq_len


def train_batch(
    corpus: corpora.Corpus | data_mixtures.Mixture,
    step: int,
    *,
    batch: int | data_mixtures.Batches,
    seq_len: int,
    seed: int,
    rows: slice = slice(None),
) -> Batch:
    """Rows `rows` of the global batch of a step, as numpy arrays. Reads only those rows.

    Args:
      batch: sequences in a batch; those of each part of the run where it has changed, as data_mixtures.Batches.
    """
    batches = ((0, batch),) if isinstance(batch, int) else batch
    first = data_mixtures.first_sequence(step, batches)
    numbers = np.arange(first, data_mixtures.first_sequence(step + 1, batches))[rows]
    mixture = data_mixtures.as_mixture(corpus)
    sources, numbers = _sources(mixture, numbers, batches)
    window = np.empty((len(numbers), seq_len + 1), np.int32)
    for source in np.unique(sources):
        here, part = sources == source, mixture.sources[source]
        size = num_sequences(part.train, seq_len)
        window[here] = _tokens(part, part.train, _permute(numbers[here], size, seed), seq_len)
    return _pack(window, np.ones(len(window), bool), mixture.separator)


def _sources(
    mixture: data_mixtures.Mixture, numbers: np.ndarray, batches: data_mixtures.Batches
) -> tuple[np.ndarray, np.ndarray]:
    """(source, number in it) of sequences of the run."""
    if len(mixture.sources) == 1:
        return np.zeros(len(numbers), int), numbers
    shares = data_mixtures.shares(mixture.stages, batches)
    pairs = np.array([shares.at(n) for n in numbers.tolist()]).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def epochs(
    mixture: data_mixtures.Mixture, step: int, *, batches: data_mixtures.Batches, seq_len: int
) -> dict[str, float]:
    """{name of a source: how often it was trained on} in the steps before `step`."""
    counts = data_mixtures.shares(mixture.stages, batches).counts(data_mixtures.first_sequence(step, batches))
    return {
        source.name: count / num_sequences(source.train, seq_len)
        for source, count in zip(mixture.sources, counts, strict=True)
    }


def eval_batch(corpus: corpora.Corpus, index: int, *, batch: int, seq_len: int, rows: slice = slice(None)) -> Batch:
    """Rows of the index-th batch of held-out sequences; rows past the last sequence are padding."""
    numbers = index * batch + np.arange(batch)[rows]
    size = num_sequences(corpus.held_out, seq_len)
    is_real = numbers < size
    window = _tokens(corpus, corpus.held_out, np.where(is_real, _eval_order(numbers, size), 0), seq_len)
    return _pack(window, is_real, corpus.separator)


def _eval_order(numbers: np.ndarray, size: int) -> np.ndarray:
    """A fixed order that mixes all documents, so that the first few sequences represent the held-out part."""
    return _permute(numbers, size, seed=0)


def _tokens(
    corpus: corpora.Corpus, stream: np.ndarray | corpora.Stream, sequences: np.ndarray, seq_len: int
) -> np.ndarray:
    """[sequence, seq_len + 1], int32: the numbered sequences of a stream, each with its last target."""
    starts = sequences * seq_len
    window = _windows(stream, starts, seq_len + 1)
    if window.max() >= corpus.vocab_size:
        row, column = np.unravel_index(window.argmax(), window.shape)
        part = "training" if stream is corpus.train else "held-out"
        raise ValueError(
            f"{corpus.name} has token {window[row, column]} at {part} token {starts[row] + column}, "
            f"outside its vocabulary of {corpus.vocab_size}"
        )
    return window.astype(np.int32)


def _pack(window: np.ndarray, is_real: np.ndarray, separator: int) -> Batch:
    """The batch of these sequences, [B, T + 1]; those that are not real are padding, [B]."""
    tokens, targets = window[:, :-1], window[:, 1:]
    seq_len = tokens.shape[1]
    is_start = tokens == separator
    is_start[:, 0] = True
    index = np.arange(seq_len, dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
    segments = np.cumsum(is_start, axis=1, dtype=np.int32) * is_real[:, None]
    weights = np.broadcast_to(is_real[:, None], tokens.shape).astype(np.float32)
    next_targets = np.full_like(targets, -1)
    next_targets[:, :-1] = np.where(segments[:, 1:] == segments[:, :-1], targets[:, 1:], -1)
    return Batch(tokens, targets, segments.astype(np.int32), positions.astype(np.int32), weights, next_targets)


def _windows(stream: np.ndarray | corpora.Stream, starts: np.ndarray, length: int) -> np.ndarray:
    """[window, token]: `length` tokens of a stream from each start on. Those in a bucket are read at once."""
    read = lambda start: stream[start : start + length]
    if not getattr(stream, "is_remote", False) or len(starts) == 1:
        return np.stack([read(start) for start in starts])
    with ThreadPoolExecutor(min(storage.READERS, len(starts))) as readers:
        return np.stack(list(readers.map(read, starts)))


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


def eval_windows(corpus: corpora.Corpus, *, seq_len: int, num_eval_sequences: int) -> Iterator[np.ndarray]:
    """Yields the tokens [seq_len + 1] of each of the first sequences of an evaluation, in its order, on any process."""
    size = num_sequences(corpus.held_out, seq_len)
    for start in _eval_order(np.arange(min(num_eval_sequences, size)), size) * seq_len:
        yield corpus.held_out[start : start + seq_len + 1]


def bigram_loss(
    corpus: corpora.Corpus, *, seq_len: int, num_eval_sequences: int, max_train_tokens: int = 50_000_000
) -> float:
    """Mean loss, in nats a token, of a bigram model on the held-out sequences; its counts are of the training part.

    p(b | a) = (count(a, b) + p(b)) / (count(a) + 1) backs off to the unigram p(b), which is smoothed by one count a
    token of the vocabulary.
    """
    train = corpus.train[:max_train_tokens].astype(np.int64)
    windows = eval_windows(corpus, seq_len=seq_len, num_eval_sequences=num_eval_sequences)
    held_out = np.stack([*windows]).astype(np.int64)
    tokens, targets = held_out[:, :-1].ravel(), held_out[:, 1:].ravel()
    unigrams = np.bincount(train, minlength=corpus.vocab_size)
    contexts = np.bincount(train[:-1], minlength=corpus.vocab_size)
    pairs, counts = np.unique(train[:-1] * corpus.vocab_size + train[1:], return_counts=True)
    wanted = tokens * corpus.vocab_size + targets
    at = np.searchsorted(pairs, wanted).clip(0, len(pairs) - 1)
    pair_counts = np.where(pairs[at] == wanted, counts[at], 0)
    p_next = (unigrams[targets] + 1) / (len(train) + corpus.vocab_size)
    return float(-np.mean(np.log((pair_counts + p_next) / (contexts[tokens] + 1))))


def parser() -> argparse.ArgumentParser:
    parser = command.parser(__file__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_prepare = commands.add_parser("prepare", help="make a corpus of files and folders of text, or of tokens")
    prepare.add_arguments(of_prepare)
    of_tokenizer = commands.add_parser("tokenizer", help="train a tokenizer on files and folders of text")
    tokenization.add_arguments(of_tokenizer)
    of_show = commands.add_parser("show", help="print the size of a corpus, and one packed sequence")
    of_show.add_argument(
        "path", type=command.path_or_url, nargs="?", default="", help="default: Python's standard library"
    )
    of_show.add_argument(
        "--seq_len", type=command.at_least(1), default=256, help="tokens of the sequence shown [%(default)s]"
    )
    of_check = commands.add_parser("check", help="read all of a corpus, and compare it with its checksums")
    of_check.add_argument("path", type=command.path_or_url, help="the corpus")
    return parser


def main() -> None:
    args = command.arguments(parser())
    if args.command == "tokenizer":
        tokenization.run(args)
        return
    batch = None
    if args.command == "prepare":
        corpus = prepare.run(args)
    else:
        corpus = corpora.open_corpus(args.path)
    if args.command == "show":
        corpus.check(args.seq_len, corpus.vocab_size)
        batch = train_batch(corpus, 0, batch=1, seq_len=args.seq_len, seed=0)
    if args.command == "check":
        corpora.verify(corpus)
    print(f"{corpus.name}: {len(corpus.train):,} training and {len(corpus.held_out):,} held-out tokens")
    print(f"vocabulary {corpus.vocab_size}, separator {corpus.separator}, {corpus.train.dtype} tokens")
    print(f"tokenizer {corpus.tokenizer_identity or 'not known'}")
    if args.command == "check":
        print("every block has its checksum, and every token is in the vocabulary")
    if batch:
        print(f"first sequence: {batch.segments.max()} document(s); the last position is {batch.positions[0, -1]}")
        tokenizer, problem = corpora.readable_tokenizer(corpus)
        print(tokenizer.decode(batch.tokens[0]) if tokenizer else problem or "its tokenizer is not known")


if __name__ == "__main__":
    command.run(main)
