"""Tests corpora on disk and in memory, packing, order, and the prefetch thread."""

import collections
import errno
import itertools
import json
import math
import os
import re
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

import data

ROOT = Path(data.__file__).parent
SEPARATOR = 9
DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8, 1, 2, 3, 4, 5, 6], [7, 7], [8, 1, 2, 3], [3, 2, 1]]


def corpus_of(documents, held_out=((1, 2), (3,), (4, 5, 6, 7, 8)), vocab_size=10) -> data.Corpus:
    join = lambda documents: np.array([t for document in documents for t in (SEPARATOR, *document)], np.uint16)
    return data.Corpus("the hand-made corpus", join(documents), join(held_out), vocab_size, SEPARATOR)


def numbered_corpus(num_sequences: int, seq_len: int) -> data.Corpus:
    """Returns a corpus in which token i is i, so that a row shows which sequence it is."""
    tokens = np.arange(num_sequences * seq_len + 1, dtype=np.uint32)
    return data.Corpus("numbers", tokens, tokens, len(tokens), 0)


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


def run_cli(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "data.py", *args], capture_output=True, text=True, timeout=60)


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


# -- token files


@pytest.mark.parametrize("vocab_size, itemsize", [(300, 2), (1 << 16, 2), ((1 << 16) + 1, 4), (200_000, 4)])
def test_round_trip(tmp_path, vocab_size, itemsize):
    path = str(tmp_path / "corpus.bin")
    train, held_out = [[1, 2, vocab_size - 1], [], [3]], [[vocab_size - 2, 5]]
    written = data.write_corpus(path, map(np.array, train), map(np.array, held_out), vocab_size=vocab_size, separator=7)
    opened = data.open_corpus(path)
    for corpus in (written, opened):
        assert corpus.train[:].tolist() == [7, 1, 2, vocab_size - 1, 7, 7, 3]
        assert corpus.held_out[:].tolist() == [7, vocab_size - 2, 5]
        assert (corpus.name, corpus.vocab_size, corpus.separator) == (path, vocab_size, 7)
        assert corpus.train.dtype == corpus.held_out.dtype == np.dtype(f"<u{itemsize}")
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.bin"]


def test_the_file_has_the_documented_format(tmp_path):
    path = str(tmp_path / "corpus.bin")
    data.write_corpus(path, [np.array([1, 2])], [np.array([3])], vocab_size=300, separator=299)
    tokens = struct.pack("<5H", 299, 1, 2, 299, 3)
    assert Path(path).read_bytes() == token_file(b"ironwood", 2, 2, 300, 299, 3, 2, tokens)


def token_file(*header, block_bytes=1 << 16) -> bytes:
    """Returns a token file as documented, from the first seven numbers of its header and the bytes of its tokens."""
    *numbers, tokens = header
    blocks = [tokens[at : at + block_bytes] for at in range(0, len(tokens), block_bytes)]
    table = struct.pack(f"<{len(blocks)}I", *map(zlib.crc32, blocks))
    head = struct.pack("<8sIIQQQQI8x", *numbers, zlib.crc32(table))
    return head + struct.pack("<I", zlib.crc32(head)) + tokens + table


def patched(path: Path, *, header: dict[int, int] | None = None, token: tuple[int, int] | None = None) -> None:
    """Rewrites a token file with other numbers in its header or another token at an index, with correct CRCs."""
    content = path.read_bytes()
    numbers = list(struct.unpack_from("<8sIIQQQQ", content))
    for at, number in (header or {}).items():
        numbers[at] = number
    itemsize, size = struct.unpack_from("<I", content, 12)[0], sum(struct.unpack_from("<QQ", content, 32))
    tokens = bytearray(content[64 : 64 + itemsize * size])
    if token:
        struct.pack_into("<H" if itemsize == 2 else "<I", tokens, itemsize * token[0], token[1])
    path.write_bytes(token_file(*numbers, bytes(tokens)))


def small_file(tmp_path) -> Path:
    path = tmp_path / "corpus.bin"
    data.write_corpus(str(path), [np.arange(50)], [np.arange(20)], vocab_size=100, separator=99)
    return path


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none.bin"))):
        data.open_corpus(str(tmp_path / "none.bin"))


@pytest.mark.parametrize("size", [0, 1, 63])
def test_file_with_a_truncated_header(tmp_path, size):
    path = tmp_path / "short.bin"
    path.write_bytes(small_file(tmp_path).read_bytes()[:size])
    with pytest.raises(ValueError, match=re.escape(f"{path} has {size} bytes: too short for the 64-byte header")):
        data.open_corpus(str(path))


@pytest.mark.parametrize("change", [-100, -2, -1, 1, 2])
def test_file_of_the_wrong_length(tmp_path, change):
    path = small_file(tmp_path)
    content = path.read_bytes()
    length = 64 + 2 * (51 + 21) + 4
    assert len(content) == length
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    message = f"{path} has {length + change} bytes and its header promises {length}"
    with pytest.raises(ValueError, match=re.escape(message)):
        data.open_corpus(str(path))


def test_another_kind_of_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time " * 10)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} starts with b'Once upo': not a token file"):
        data.open_corpus(str(path))


def test_every_flipped_bit_of_the_header_is_noticed(tmp_path):
    path = small_file(tmp_path)
    content = path.read_bytes()
    for bit in range(64 * 8):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        message = "not a token file" if bit < 64 else "format version" if bit < 96 else "damaged header"
        with pytest.raises(ValueError, match=message) as error:
            data.open_corpus(str(path))
        assert str(path) in str(error.value)


def test_an_older_format_is_refused_with_the_remedy(tmp_path):
    path = small_file(tmp_path)
    patched(path, header={1: 1})
    with pytest.raises(ValueError, match=r"format version 1, .* reads version 2, .*make it again with `python data.py"):
        data.open_corpus(str(path))


@pytest.mark.parametrize(
    "header, message",
    [
        ({3: 0}, "a vocabulary of 0 is not between 1 and 2147483648"),
        ({2: 4, 3: 2**31 + 1}, "a vocabulary of 2147483649 is not between 1 and 2147483648"),
        ({4: 100}, "separator 100 is outside the vocabulary of 100"),
        ({4: 2**64 - 1}, f"separator {2**64 - 1} is outside the vocabulary of 100"),
        ({2: 0}, "0 bytes a token; a vocabulary of 100 has 2"),
        ({2: 4}, "4 bytes a token; a vocabulary of 100 has 2"),
        ({3: 65_537}, "2 bytes a token; a vocabulary of 65537 has 4"),
        ({5: 2**64 - 51}, "has 212 bytes and its header promises"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header, message):
    path = small_file(tmp_path)
    patched(path, header=header)
    with pytest.raises(ValueError, match=re.escape(message)):
        data.open_corpus(str(path))


@pytest.mark.parametrize("header", [{5: 0, 6: 72}, {5: 72, 6: 0}])
def test_a_file_without_training_or_held_out_tokens_is_refused(tmp_path, header):
    path = small_file(tmp_path)
    patched(path, header=header)
    with pytest.raises(ValueError, match=r"0 (training|held-out) .*use a longer text"):
        data.open_corpus(str(path)).check(seq_len=4, vocab_size=100)


# -- a file that changes


BLOCK_TOKENS = 1 << 15  # a block has 64 KiB, at two bytes a token


def large_file(tmp_path) -> Path:
    """Writes a file of five full blocks and a short one; the held-out part begins within the fourth."""
    path = tmp_path / "large.bin"
    train, held_out = np.arange(int(3.5 * BLOCK_TOKENS)) % 251, np.arange(2 * BLOCK_TOKENS) % 241
    data.write_corpus(str(path), [train], [held_out], vocab_size=256, separator=255)
    return path


@pytest.mark.parametrize(
    "start, stop", [(0, 0), (0, 1), (5, 5), (32767, 32769), (32768, 65536), (7, 114689), (9, 10**9)]
)
def test_slices_equal_those_of_an_array(tmp_path, start, stop):
    corpus = data.open_corpus(str(large_file(tmp_path)))
    train = np.concatenate([[255], np.arange(int(3.5 * BLOCK_TOKENS)) % 251])
    held_out = np.concatenate([[255], np.arange(2 * BLOCK_TOKENS) % 241])
    assert (len(corpus.train), len(corpus.held_out)) == (len(train), len(held_out))
    np.testing.assert_array_equal(corpus.train[start:stop], train[start:stop])
    np.testing.assert_array_equal(corpus.held_out[start:stop], held_out[start:stop])


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def flip(path: Path, bit: int) -> None:
    overwrite(path, bit // 8, bytes([path.read_bytes()[bit // 8] ^ 1 << bit % 8]))


def test_a_flipped_bit_is_found_by_reading_its_block_alone(tmp_path):
    path = large_file(tmp_path)
    corpus, intact = data.open_corpus(str(path)), path.read_bytes()
    num_tokens = len(corpus.train) + len(corpus.held_out)
    random = np.random.default_rng(0)
    for token in [0, BLOCK_TOKENS - 1, BLOCK_TOKENS, num_tokens - 1, *random.integers(0, num_tokens, 20).tolist()]:
        flip(path, (64 + 2 * token) * 8 + int(random.integers(16)))
        block = token // BLOCK_TOKENS
        first, last = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, num_tokens) - 1
        with pytest.raises(data.DamagedError, match=f"its tokens {first} to {last} are not those .* put it back"):
            corpus.train[:], corpus.held_out[:]
        for other in range(-(-num_tokens // BLOCK_TOKENS)):
            if other != block:
                corpus.train.file.read(other * BLOCK_TOKENS, min((other + 1) * BLOCK_TOKENS, num_tokens))
        path.write_bytes(intact)
    for byte in range(64 + 2 * num_tokens, len(intact)):
        flip(path, byte * 8 + 3)
        with pytest.raises(ValueError, match="damaged table of checksums"):
            data.open_corpus(str(path))
        path.write_bytes(intact)
    corpus.train[:], corpus.held_out[:]  # restored, under the same open file


def test_a_file_truncated_while_it_is_open_is_an_error_and_no_signal(tmp_path):
    path = large_file(tmp_path)
    corpus, size = data.open_corpus(str(path)), path.stat().st_size
    os.truncate(path, 1000)
    with pytest.raises(data.DamagedError, match=f"it has 1000 bytes and had {size} when it was opened"):
        data.train_batch(corpus, 0, batch=4, seq_len=64, seed=0)


def test_a_file_overwritten_while_it_is_open_is_reported_with_the_time(tmp_path):
    path, other = large_file(tmp_path), tmp_path / "other.bin"
    corpus, size = data.open_corpus(str(path)), path.stat().st_size
    data.write_corpus(str(other), [np.arange(len(corpus.train) - 1) % 7], [np.arange(2 * BLOCK_TOKENS) % 7],
                      vocab_size=256, separator=255)  # fmt: skip
    assert other.stat().st_size == size
    overwrite(path, 0, other.read_bytes())
    os.utime(path, (1e9, 1e9))
    with pytest.raises(data.DamagedError, match=r"it was written to at 2001-09-\d\d [\d:]+, after it was opened"):
        data.train_batch(corpus, 0, batch=4, seq_len=64, seed=0)


def test_a_file_replaced_while_it_is_open_is_still_the_opened_one(tmp_path):
    path = large_file(tmp_path)
    corpus = data.open_corpus(str(path))
    before = data.train_batch(corpus, 3, batch=4, seq_len=64, seed=0)
    other = data.write_corpus(str(path), [np.arange(200)], [np.arange(200)], vocab_size=256, separator=255)
    for then, now in zip(before, data.train_batch(corpus, 3, batch=4, seq_len=64, seed=0), strict=True):
        np.testing.assert_array_equal(then, now)
    assert other.identity != corpus.identity


def test_a_disk_error_names_the_file_and_the_byte(tmp_path, monkeypatch):
    corpus = data.open_corpus(str(large_file(tmp_path)))

    def fails(descriptor, num_bytes, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(data.DamagedError, match=r"large.bin cannot be read at byte 65600: .*Input/output error"):
        corpus.train[BLOCK_TOKENS : BLOCK_TOKENS + 5]


def test_short_reads_are_continued(tmp_path, monkeypatch):
    corpus, pread = data.open_corpus(str(large_file(tmp_path))), os.pread
    expected = corpus.train[:]
    monkeypatch.setattr(
        os, "pread", lambda descriptor, num_bytes, offset: pread(descriptor, min(num_bytes, 999), offset)
    )
    np.testing.assert_array_equal(corpus.train[:], expected)


def test_a_corpus_that_is_no_ordinary_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is no ordinary file; make a token file with"):
            data.open_corpus(str(path))


def test_a_file_that_is_only_touched_stays_valid(tmp_path):
    path = large_file(tmp_path)
    corpus = data.open_corpus(str(path))
    os.utime(path, (1e9, 1e9))
    corpus.train[:]


def test_identity_depends_on_the_content_and_not_on_the_path(tmp_path):
    write = lambda name, documents, **kind: data.write_corpus(
        str(tmp_path / name), [np.array(documents)], [np.arange(9)], **dict(vocab_size=50, separator=49) | kind
    )
    first = write("a.bin", [1, 2, 3]).identity
    assert write("b.bin", [1, 2, 3]).identity == data.open_corpus(str(tmp_path / "a.bin")).identity == first
    others = [write("c.bin", [1, 2, 4]), write("d.bin", [1, 2, 3], vocab_size=51)]
    others += [write("e.bin", [1, 2, 3], separator=48), write("f.bin", [1, 2, 3, 0])]
    assert len({first, *(other.identity for other in others)}) == 5


@pytest.mark.parametrize("vocab_size", [100, 70_000])
@pytest.mark.parametrize("part, offset", [("training", 0), ("training", 13), ("training", 50), ("held-out", 7)])
def test_a_token_outside_the_vocabulary_in_the_file(tmp_path, vocab_size, part, offset):
    path, token, seq_len = str(tmp_path / "corpus.bin"), vocab_size + 3, 5
    data.write_corpus(path, [np.arange(50)], [np.arange(20)], vocab_size=vocab_size, separator=99)
    patched(Path(path), token=(offset + 51 * (part == "held-out"), token))
    corpus = data.open_corpus(path)
    train = lambda row: data.train_batch(corpus, 0, batch=10, seq_len=seq_len, seed=0, rows=slice(row, row + 1))
    held_out = lambda row: data.eval_batch(corpus, 0, batch=4, seq_len=seq_len, rows=slice(row, row + 1))
    messages = []
    for make, rows in ((train, 10), (held_out, 4)):
        for row in range(rows):
            try:
                make(row)
            except ValueError as error:
                messages.append(str(error))
    expected = f"{path} has token {token} at {part} token {offset}, outside its vocabulary of {vocab_size}"
    in_two = 0 < offset < 50 and offset % seq_len == 0  # the last target of one sequence, the first token of another
    assert messages == [expected] * (1 + in_two)


def test_a_token_beyond_the_positive_int32s_is_refused(tmp_path):
    path = str(tmp_path / "corpus.bin")
    data.write_corpus(path, [np.arange(50)], [np.arange(20)], vocab_size=70_000, separator=99)
    patched(Path(path), token=(13, 2**32 - 1))
    with pytest.raises(ValueError, match=f"has token {2**32 - 1} at training token 13"):
        data.train_batch(data.open_corpus(path), 0, batch=10, seq_len=5, seed=0)


@pytest.mark.parametrize("separator", [-1, 100, 65543])
def test_a_separator_outside_the_vocabulary_is_refused(tmp_path, separator):
    with pytest.raises(ValueError, match=f"separator {separator} is outside the vocabulary of 100"):
        data.write_corpus(str(tmp_path / "c.bin"), [np.arange(9)], [], vocab_size=100, separator=separator)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("token", [-1, 100, 65536])
def test_a_token_outside_the_vocabulary_is_not_written(tmp_path, token):
    with pytest.raises(ValueError, match=f"document 1 has token {token} at position 2, outside the vocabulary of 100"):
        documents = [np.array([1]), np.array([1, 2, token, 3])]
        data.write_corpus(str(tmp_path / "corpus.bin"), documents, [], vocab_size=100, separator=99)
    assert not (tmp_path / "corpus.bin").exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, error):
    path = small_file(tmp_path)
    before = path.read_bytes()

    def documents():
        yield np.arange(60)
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        data.write_corpus(str(path), [np.arange(5)], documents(), vocab_size=100, separator=99)
    assert path.read_bytes() == before
    data.write_corpus(str(path), [np.arange(5)], [np.arange(3)], vocab_size=100, separator=99)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert data.open_corpus(str(path)).train[:].tolist() == [99, 0, 1, 2, 3, 4]


def test_check_names_the_numbers_and_the_remedy():
    corpus = corpus_of(DOCUMENTS)  # 30 training and 11 held-out tokens
    assert (len(corpus.train), len(corpus.held_out)) == (30, 11)
    corpus.check(seq_len=10, vocab_size=10)
    with pytest.raises(ValueError, match=r"the hand-made corpus .* of 10 and the model one of 9; use --vocab_size=10"):
        corpus.check(seq_len=10, vocab_size=9)
    with pytest.raises(
        ValueError, match=r"30 training and 11 held-out tokens, .* seq_len \+ 1 = 12; use --seq_len=10 at most"
    ):
        corpus.check(seq_len=11, vocab_size=10)
    with pytest.raises(
        ValueError, match=r"30 training and 11 held-out tokens, .* seq_len \+ 1 = 31; use --seq_len=10 at most"
    ):
        corpus.check(seq_len=30, vocab_size=10)


# -- from text


def documents_of(tokens) -> list[bytes]:
    content = tokens[:].astype(np.uint8).tobytes()
    assert content[0] == 255
    return content[1:].split(b"\xff")


def test_prepare_a_folder(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep" / "er").mkdir(parents=True)
    texts = [f"text {i}: Grüße, 世界\n" * (i + 1) for i in range(60)]
    for i, text in enumerate(texts):
        (folder / ("deep/er" if i % 2 else ".") / f"{i}.txt").write_text(text, encoding="utf-8")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin-1.txt").write_bytes("Grüße".encode("latin-1"))
    (folder / "deep" / "binary.dat").write_bytes(bytes(range(256)))
    single = tmp_path / "single.md"
    single.write_text("on its own")
    out = tmp_path / "corpus.bin"
    done = run_cli("prepare", folder, single, "--out", out)
    assert done.returncode == 0, done.stderr
    left_out = [line for line in done.stdout.splitlines() if line.startswith("left out, no UTF-8 text: ")]
    assert {line.rpartition(": ")[2] for line in left_out} == {
        str(folder / "latin-1.txt"),
        str(folder / "deep" / "binary.dat"),
    }
    corpus = data.open_corpus(str(out))
    assert f"{len(corpus.train):,} training and {len(corpus.held_out):,} held-out tokens" in done.stdout
    train, held_out = documents_of(corpus.train), documents_of(corpus.held_out)
    assert sorted(train + held_out) == sorted(text.encode() for text in [*texts, "on its own"])
    assert 1 <= len(held_out) <= 10
    by_path = [path.read_bytes() for path in sorted(folder.rglob("*.txt"))] + [b"on its own"]
    assert train == [text for text in by_path if text in train]  # the same on every file system
    assert held_out == [text for text in by_path if text in held_out]
    assert (corpus.vocab_size, corpus.separator) == (256, 255)

    # Whether a document is held out does not depend on the other documents.
    for path in folder.rglob("1*.txt"):
        path.unlink()
    rest, _ = data.prepare([str(folder), str(single)], str(out))
    assert set(documents_of(rest.train)) <= set(train) and set(documents_of(rest.held_out)) <= set(held_out)


def file_names(held_out: bool, count: int) -> list[str]:
    """Returns names of files that the hash holds out, or does not."""
    names = (f"f{i}.txt" for i in itertools.count())
    return list(itertools.islice((n for n in names if (zlib.crc32(n.encode()) % 20 == 0) == held_out), count))


@pytest.mark.parametrize(
    "held_out_sizes, other_sizes",
    [
        ([200], []),
        ([], [200]),
        ([200], [200]),
        ([300] * 3, [300]),  # as docs/doc0 to doc3, three of which the hash would hold out
        ([], [200] * 30),
        ([4000], [50] * 19),
        ([50], [4000]),
        ([3], [7, 1]),
    ],
)
def test_about_a_twentieth_is_held_out_of_few_documents_too(tmp_path, held_out_sizes, other_sizes):
    names = file_names(True, len(held_out_sizes)) + file_names(False, len(other_sizes))
    sizes = held_out_sizes + other_sizes
    texts = [(f"{name[1:-4]:_>9} ".encode() * size)[:size] for name, size in zip(names, sizes, strict=True)]
    (tmp_path / "texts").mkdir()
    for name, text in zip(names, texts, strict=True):
        (tmp_path / "texts" / name).write_bytes(text)
    corpus, _ = data.prepare([str(tmp_path / "texts")], str(tmp_path / "corpus.bin"))
    train, held_out = documents_of(corpus.train), documents_of(corpus.held_out)
    num_bytes = sum(map(len, texts))
    assert num_bytes // 20 - len(texts) <= sum(map(len, held_out)) <= max(num_bytes // 20, len(texts))
    # The end of each document is held out, and the rest trained on.
    in_order = [text for _, text in sorted(zip(names, texts, strict=True))]
    assert [a + b for a, b in zip(train, held_out, strict=True)] == in_order


def test_the_hash_decides_if_it_holds_out_about_a_twentieth(tmp_path):
    held_out, others = file_names(True, 2), file_names(False, 40)
    (tmp_path / "texts").mkdir()
    for name in held_out + others:
        (tmp_path / "texts" / name).write_text(name * 10)
    corpus, _ = data.prepare([str(tmp_path / "texts")], str(tmp_path / "corpus.bin"))
    assert sorted(documents_of(corpus.held_out)) == sorted(name.encode() * 10 for name in held_out)
    assert sorted(documents_of(corpus.train)) == sorted(name.encode() * 10 for name in others)


def test_texts_that_are_no_ordinary_files_are_named_at_once(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "fox.txt").write_text("The quick brown fox. " * 20)
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("nowhere")
    (folder / "again").symlink_to(folder / "deep")
    _, skipped = data.prepare([str(folder)], str(tmp_path / "corpus.bin"))
    assert sorted(skipped) == [folder / "again", folder / "broken", folder / "pipe"]
    for path in (folder / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is no ordinary file: save its text to one$"):
            data.prepare([str(path)], str(tmp_path / "corpus.bin"))


def test_a_text_that_is_named_twice_counts_once(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(40):
        (folder / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(f"text {i}" * 10)
    once, _ = data.prepare([str(folder)], str(tmp_path / "once.bin"))
    paths = [str(folder), str(folder / "deep"), f"{folder}/deep/../2.txt"]
    twice, _ = data.prepare(paths, str(tmp_path / "twice.bin"))
    num_bytes = lambda corpus: sum(map(len, documents_of(corpus.train) + documents_of(corpus.held_out)))
    assert num_bytes(twice) == num_bytes(once) == sum(len(f"text {i}" * 10) for i in range(40))


def test_a_text_that_changes_during_preparation_is_named(tmp_path, monkeypatch):
    text, split = tmp_path / "fox.txt", data._split
    text.write_text("The quick brown fox. " * 20)

    def changed(texts):
        text.write_bytes(text.read_bytes().replace(b"fox", b"f\xffx"))
        return split(texts)

    monkeypatch.setattr(data, "_split", changed)
    with pytest.raises(OSError, match=r"fox.txt has changed since the preparation began"):
        data.prepare([str(text)], str(tmp_path / "corpus.bin"))
    assert os.listdir(tmp_path) == ["fox.txt"]


def test_names_need_not_be_utf_8(tmp_path):
    name = os.fsdecode(b"Gr\xfc\xdfe.txt")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_text("The quick brown fox. " * 20)
    (tmp_path / "texts" / f"{name}.gz").write_bytes(b"\xff")
    out = tmp_path / f"{name}.bin"
    done = subprocess.run(
        [sys.executable, ROOT / "data.py", "prepare", tmp_path / "texts", "--out", out],
        capture_output=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "utf-8:surrogateescape"},
    )  # fmt: skip
    assert done.returncode == 0 and b"left out, no UTF-8 text: " in done.stdout, done.stderr
    assert len(data.open_corpus(str(out)).train) == 400


def test_an_output_that_is_an_input_is_refused_and_nothing_is_lost(tmp_path):
    (tmp_path / "texts").mkdir()
    text = tmp_path / "texts" / "fox.txt"
    text.write_text("The quick brown fox. " * 20)
    os.link(text, tmp_path / "linked.bin")
    for paths, out, message in (
        ([text], text, "is the text .*fox.txt, too: it would be lost"),
        ([text], tmp_path / "linked.bin", "is the text .*fox.txt, too: it would be lost"),
        ([tmp_path / "texts"], tmp_path / "linked.bin", "is the text .*fox.txt, too: it would be lost"),
        ([tmp_path / "texts"], tmp_path / "texts" / "corpus.bin", "is inside the text .*texts, which is read"),
    ):
        before = text.read_text()
        with pytest.raises(ValueError, match=message):
            data.prepare(list(map(str, paths)), str(out))
        assert text.read_text() == before and sorted(os.listdir(tmp_path)) == ["linked.bin", "texts"]


def test_a_token_outside_the_vocabulary_is_reported_in_one_line(tmp_path):
    path = small_file(tmp_path)
    for token in range(51):
        patched(path, token=(token, 100))
    done = run_cli("show", path, "--seq_len=4")
    assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr
    assert re.search(r"has token 100 at training token \d+, outside its vocabulary of 100\n$", done.stderr)


@pytest.mark.parametrize("size", [2, 5, 19, 20, 21, 400, 1000])
def test_prepare_a_single_small_file(tmp_path, size):
    """The end of the only document is held out."""
    text = ("The quick brown fox. " * 50)[:size].encode()
    (tmp_path / "fox.txt").write_bytes(text)
    corpus, skipped = data.prepare([str(tmp_path / "fox.txt")], str(tmp_path / "corpus.bin"))
    (train,), (held_out,) = documents_of(corpus.train), documents_of(corpus.held_out)
    assert train + held_out == text and not skipped
    assert len(held_out) == max(size // 20, 1)


def test_prepare_and_show_a_single_small_file(tmp_path):
    (tmp_path / "fox.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    done = run_cli("prepare", tmp_path / "fox.txt", "--out", tmp_path / "corpus.bin")
    assert done.returncode == 0, done.stderr
    assert "856 training and 46 held-out tokens\nvocabulary 256, separator 255, uint16 tokens" in done.stdout
    shown = run_cli("show", tmp_path / "corpus.bin", "--seq_len=40")
    assert shown.returncode == 0, shown.stderr
    assert "first sequence: 1 document(s); the last position is 39" in shown.stdout
    assert re.search("quick|jumps|lazy", shown.stdout)


@pytest.mark.slow
def test_command_line_errors_are_one_line(tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "worse.txt").write_bytes(b"\xfe")
    (tmp_path / "fox.txt").write_text("The quick brown fox")
    data.prepare([str(tmp_path / "fox.txt")], str(tmp_path / "corpus.bin"))
    out = ("--out", tmp_path / "out.bin")
    for args, message in (
        (("prepare", bad, *out), f"{bad} is no UTF-8 text: invalid start byte at byte 3"),
        (("prepare", tmp_path / "none", *out), f"No such file or directory: '{tmp_path / 'none'}'"),
        (("prepare", tmp_path / "folder", *out), f"no UTF-8 text in {tmp_path / 'folder'}; 1 files"),
        (("show", "--seq_len=0"), "'0' must be a whole number of at least 1"),
        (("show", bad), f"{bad} has 4 bytes: too short"),
        (("show", tmp_path / "corpus.bin"), "use --seq_len="),
    ):
        done = run_cli(*args)
        assert done.returncode == (1 if "No such file" in message else 2) and message in done.stderr
        assert len(done.stderr.splitlines()) <= 3 and "Traceback" not in done.stderr
    assert not (tmp_path / "out.bin").exists()


@pytest.mark.slow
def test_standard_library():
    corpus = data.open_corpus("")
    train, held_out = documents_of(corpus.train), documents_of(corpus.held_out)
    for document in train + held_out:
        assert document
        document.decode()
    source = Path(json.decoder.__file__).read_bytes()
    assert (train + held_out).count(source) == 1
    assert not set(train) & set(held_out)
    assert len(train) > 300 and len(corpus.train) > 4_000_000
    assert 0.02 < len(held_out) / len(train) < 0.1 and 0.01 < len(corpus.held_out) / len(corpus.train) < 0.2
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in corpus.name
    again = data.standard_library()
    assert corpus.identity == again.identity != ""
    np.testing.assert_array_equal(corpus.train, again.train)
    np.testing.assert_array_equal(corpus.held_out, again.held_out)
    corpus.check(seq_len=1024, vocab_size=256)


def test_decode():
    assert data.decode(np.array([255, *"Grüße".encode(), 255, 66])) == "\n----\nGrüße\n----\nB"
    assert data.decode(np.array([0xC3, 66])) == "\N{REPLACEMENT CHARACTER}B"


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
