"""Tests corpora on disk and in memory, packing, order, and the prefetch thread."""

import collections
import itertools
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from support import DOCUMENTS, SEPARATOR, corpus_of

import corpora
import data

ROOT = Path(data.__file__).parent


def numbered_corpus(num_sequences: int, seq_len: int) -> corpora.Corpus:
    """Returns a corpus in which token i is i, so that a row shows which sequence it is."""
    tokens = np.arange(num_sequences * seq_len + 1, dtype=np.uint32)
    return corpora.Corpus("numbers", tokens, tokens, len(tokens), 0)


def naive_row(stream, number, seq_len, separator):
    """Returns (tokens, targets, segments, positions) of a sequence, computed one token at a time."""
    tokens, targets, segments, positions = [], [], [], []
    segment, position = 0, -1
    for i in range(number * seq_len, (number + 1) * seq_len):
        position += 1
        if stream[i] == separator or not tokens:
            segment, position = segment + 1, 0
        tokens.append(stream[i])
        targets.append(stream[i + 1])
        segments.append(segment)
        positions.append(position)
    return tokens, targets, segments, positions


# -- packing


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 8])
def test_packing_equals_a_loop(seq_len):
    corpus = corpus_of(DOCUMENTS)
    size = (len(corpus.train) - 1) // seq_len
    assert data.num_sequences(corpus.train, seq_len) == size
    batch = data.train_batch(corpus, 0, batch=size, seq_len=seq_len, seed=3)
    stream = corpus.train.tolist()
    expected = sorted(naive_row(stream, number, seq_len, SEPARATOR) for number in range(size))
    arrays = (batch.tokens, batch.targets, batch.segments, batch.positions)
    assert sorted(tuple(a[row].tolist() for a in arrays) for row in range(size)) == expected
    assert (batch.loss_weights == 1).all()


def test_packing_by_hand():
    """A separator belongs to its document; a document that was split continues as a new one from position 0."""
    corpus = corpus_of([], held_out=[[1, 2], [], [3, 4, 5]])  # the stream: 9 1 2 9 9 3 4 5
    batch = data.eval_batch(corpus, 0, batch=1, seq_len=7)
    assert batch.tokens.tolist() == [[9, 1, 2, 9, 9, 3, 4]]
    assert batch.targets.tolist() == [[1, 2, 9, 9, 3, 4, 5]]
    assert batch.segments.tolist() == [[1, 1, 1, 2, 3, 3, 3]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1, 2]]
    assert batch.next_targets.tolist() == [[2, 9, -1, -1, 4, 5, -1]]  # none in the next document
    batch = data.eval_batch(corpus, 0, batch=3, seq_len=2)
    assert batch.tokens.tolist() == [[9, 1], [2, 9], [9, 3]]
    assert batch.segments.tolist() == [[1, 1], [1, 2], [1, 1]]
    assert batch.positions.tolist() == [[0, 1], [0, 0], [0, 1]]


def test_dtypes_and_shapes():
    batch = data.train_batch(corpus_of(DOCUMENTS), 5, batch=4, seq_len=6, seed=0)
    assert [a.shape for a in batch] == [(4, 6)] * 6
    assert [a.dtype for a in batch] == [np.int32] * 4 + [np.float32, np.int32]


# -- order


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 65, 100, 1000])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_permute_is_a_permutation_in_each_epoch(size, seed):
    for epoch in (0, 1, 2, 7):
        numbers = epoch * size + np.arange(size)
        permuted = data._permute(numbers, size, seed)
        assert sorted(permuted.tolist()) == list(range(size))
        one_by_one = [data._permute(numbers[i : i + 1], size, seed)[0] for i in range(min(size, 20))]
        assert permuted[:20].tolist() == one_by_one


@pytest.mark.parametrize("size", [17, 64, 100, 1000])
def test_orders_differ_between_epochs_and_seeds(size):
    order = lambda epoch, seed: tuple(data._permute(epoch * size + np.arange(size), size, seed).tolist())
    assert len({order(epoch, seed) for epoch in range(5) for seed in range(5)}) == 25
    assert order(3, 4) == order(3, 4)


def test_orders_are_unlike_each_other():
    """No order correlates with that on disk, nor with a neighbouring epoch's or seed's: 5 sigma is 0.16."""
    size = 1000
    orders = [data._permute(e * size + np.arange(size), size, s) for e in range(3) for s in range(3)]
    correlations = np.corrcoef([np.arange(size), *orders]) - np.eye(10)
    assert np.abs(correlations).max() < 0.16


@pytest.mark.parametrize("size, batch", [(7, 3), (12, 4), (5, 8), (1, 2), (64, 16)])
def test_an_epoch_has_every_sequence_once(size, batch):
    corpus, seq_len, epochs = numbered_corpus(size, 3), 3, 3
    seen = []
    for step in range(-(-epochs * size // batch)):
        seen += (data.train_batch(corpus, step, batch=batch, seq_len=seq_len, seed=1).tokens[:, 0] // 3).tolist()
    for epoch in range(epochs):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_order_does_not_depend_on_the_batch_size():
    corpus = numbered_corpus(37, 4)
    rows = lambda batch: [
        row
        for step in range(48 // batch)
        for row in data.train_batch(corpus, step, batch=batch, seq_len=4, seed=2).tokens.tolist()
    ]
    assert rows(2) == rows(6) == rows(48)


ROWS = [slice(0, 1), slice(0, 4), slice(4, 8), slice(3, 7), slice(7, 8), slice(None)]


@pytest.mark.parametrize("rows", ROWS)
def test_some_rows_are_those_rows_of_the_batch(rows):
    corpus = corpus_of(DOCUMENTS)
    train = lambda **options: data.train_batch(corpus, 2, batch=8, seq_len=3, seed=5, **options)
    held_out = lambda **options: data.eval_batch(corpus, 0, batch=8, seq_len=3, **options)
    for make in (train, held_out):
        for full, some in zip(make(), make(rows=rows), strict=True):
            np.testing.assert_array_equal(full[rows], some)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_evaluation_covers_the_held_out_part_once(batch):
    """The order does not depend on the batch size."""
    size, seq_len = 5, 4
    corpus = numbered_corpus(size, seq_len)
    tokens, targets = [], []
    for index in range(-(-size // batch) + 1):  # and one past the end
        rows = data.eval_batch(corpus, index, batch=batch, seq_len=seq_len)
        real = index * batch + np.arange(batch) < size
        np.testing.assert_array_equal(rows.loss_weights, np.repeat(real[:, None], seq_len, 1))
        assert (rows.segments[~real] == 0).all() and (rows.segments[real] > 0).all()
        tokens += rows.tokens[real].tolist()
        targets += rows.targets[real].tolist()
    in_order = data.eval_batch(corpus, 0, batch=size, seq_len=seq_len)
    assert tokens == in_order.tokens.tolist() and targets == in_order.targets.tolist()
    assert sorted(tokens) == corpus.held_out[:-1].reshape(size, seq_len).tolist()
    assert sorted(targets) == corpus.held_out[1:].reshape(size, seq_len).tolist()


# -- the prefetch thread


def batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_yields_in_order_and_ends_its_thread(depth):
    assert list(data.prefetch(lambda step: step * step, range(3, 40), depth)) == [n * n for n in range(3, 40)]
    assert not batch_threads()


def test_prefetch_works_before_a_batch_is_taken():
    computed = {step: threading.Event() for step in range(100)}

    def make(step):
        computed[step].set()
        return step

    batches = data.prefetch(make, range(100), depth=3)
    assert next(batches) == 0
    assert all(computed[step].wait(10) for step in (1, 2, 3))
    assert not computed[10].is_set()
    batches.close()
    assert not computed[10].is_set()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_prefetch_ends_its_thread_when_closed(taken):
    batches = data.prefetch(lambda step: step, iter(range(10**9)))
    assert [next(batches) for _ in range(taken)] == list(range(taken))
    assert len(batch_threads()) == (taken > 0)
    batches.close()
    assert not batch_threads()


def test_prefetch_does_not_end_at_a_stray_stop_iteration():
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(data.prefetch(lambda step: next(iter([])), range(3)))


@pytest.mark.parametrize("error", [ValueError("bad batch"), OSError("disk"), KeyError("k"), SystemExit(3)])
def test_prefetch_raises_the_error_of_its_thread(error):
    def make(step):
        if step == 4:
            raise error
        return step

    batches = data.prefetch(make, range(10))
    assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert caught.value is error
    assert not batch_threads()


# -- the baseline


@pytest.mark.parametrize("num_eval_sequences, max_train_tokens", [(1, 100), (3, 100), (50, 100), (3, 12)])
def test_bigram_loss_equals_counting(num_eval_sequences, max_train_tokens):
    corpus, seq_len = corpus_of(DOCUMENTS, held_out=[[1, 2, 3], [8, 8], [4, 4, 5, 6]]), 3
    train = corpus.train.tolist()[:max_train_tokens]
    pairs, singles = collections.Counter(itertools.pairwise(train)), collections.Counter(train)
    contexts = collections.Counter(train[:-1])
    evaluated = data.eval_batch(corpus, 0, batch=num_eval_sequences, seq_len=seq_len)
    losses = []
    for a, b, weight in zip(
        *(array.ravel().tolist() for array in (evaluated[0], evaluated[1], evaluated[4])), strict=True
    ):
        if not weight:
            continue
        p_b = (singles[b] + 1) / (len(train) + corpus.vocab_size)
        losses.append(-math.log((pairs[a, b] + p_b) / (contexts[a] + 1)))
    assert len(losses) == min(num_eval_sequences, (len(corpus.held_out) - 1) // seq_len) * seq_len > 0
    loss = data.bigram_loss(
        corpus, seq_len=seq_len, num_eval_sequences=num_eval_sequences, max_train_tokens=max_train_tokens
    )
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-12)
