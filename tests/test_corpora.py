"""Tests token files: their format, what is verified on each read, and what is refused."""

import errno
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from support import DOCUMENTS, corpus_of

import corpora
import data
import tokenization

ROOT = Path(data.__file__).parent


def run_cli(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "data.py", *args], capture_output=True, text=True, timeout=60)


# -- the tokenizer

KINDS = ROOT / "tests/tokenizer_kinds"


def folder_of(tmp_path, identity: str = "", model: str = "gpt2") -> str:
    """Writes a small corpus with the tokenizer of a model, which it says has this identity; returns its path."""
    tokenizer = tokenization.open_tokenizer(str(KINDS / model))
    tokenizer.save(tmp_path)
    tokens, vocabulary = tokenizer.encode(["a b", "c"]), dict(vocab_size=tokenizer.vocab_size, separator=0)
    shard = corpora.write_corpus(str(tmp_path / "0.bin"), tokens, tokens, **vocabulary)
    listed = dict(file="0.bin", train=len(shard.train), held_out=len(shard.held_out), identity=shard.identity)
    known = dict(identity=identity or tokenizer.identity, special_tokens=tokenizer.special_tokens)
    corpora.write_index(str(tmp_path), [listed], **vocabulary, tokenizer=known)
    return str(tmp_path)


def test_a_corpus_brings_its_tokenizer(tmp_path, monkeypatch):
    path = folder_of(tmp_path)
    corpus = corpora.open_corpus(path)
    tokenizer, problem = corpora.readable_tokenizer(corpus)
    assert tokenizer.decode(corpus.train[:]) == "\n----\na b\n----\nc" and not problem
    assert corpora.readable_tokenizer(corpus_of(DOCUMENTS)) == (None, "")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer, problem = corpora.readable_tokenizer(corpora.open_corpus(path))
    assert tokenizer is None and re.search(r"pip install -e '\.\[data\]'; without it samples are numbers", problem)


def test_another_tokenizer_in_the_folder_of_a_corpus_is_refused(tmp_path):
    corpus = corpora.open_corpus(folder_of(tmp_path, identity="0" * 16))
    with pytest.raises(ValueError, match=r"tokenizer.json has identity \w{16}, and the corpus was made with 0{16}"):
        corpora.readable_tokenizer(corpus)


def test_notes_say_what_does_not_go_together(tmp_path):
    """Vocabularies that are padded by up to a ninth are ordinary, and so is the same tokenizer on both sides."""
    corpus = corpora.open_corpus(folder_of(tmp_path))
    size = corpus.vocab_size
    assert corpora.notes(corpus, size * 10 // 9, "") == corpora.notes(corpus, size, str(KINDS / "gpt2")) == []
    (note,) = corpora.notes(corpus, 128_256, "")
    assert re.search(rf"vocabulary of {size} and the model one of 128,256: 99.6% .* use --vocab_size={size}, or ", note)
    small, other = corpora.notes(corpus, 128_256, str(KINDS / "t5"))
    assert small.endswith("never occur; prepare the corpus with --tokenizer")
    assert re.search(r"has the tokenizer \w{16}, and .*t5 has \w{16}: the ids mean other text", other)
    assert corpora.notes(corpus, size, str(tmp_path.parent)) == []  # no tokenizer is there
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs")
    (note,) = corpora.notes(corpus, size, str(tmp_path))
    assert re.search(r"has an unknown one \(.* is no tokenizer.json", note)


# -- token files


@pytest.mark.parametrize("vocab_size, itemsize", [(300, 2), (1 << 16, 2), ((1 << 16) + 1, 4), (200_000, 4)])
def test_round_trip(tmp_path, vocab_size, itemsize):
    path = str(tmp_path / "corpus.bin")
    train, held_out = [[1, 2, vocab_size - 1], [], [3]], [[vocab_size - 2, 5]]
    written = corpora.write_corpus(
        path, map(np.array, train), map(np.array, held_out), vocab_size=vocab_size, separator=7
    )
    opened = corpora.open_corpus(path)
    for corpus in (written, opened):
        assert corpus.train[:].tolist() == [7, 1, 2, vocab_size - 1, 7, 7, 3]
        assert corpus.held_out[:].tolist() == [7, vocab_size - 2, 5]
        assert (corpus.name, corpus.vocab_size, corpus.separator) == (path, vocab_size, 7)
        assert corpus.train.dtype == corpus.held_out.dtype == np.dtype(f"<u{itemsize}")
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.bin"]


def test_the_file_has_the_documented_format(tmp_path):
    path = str(tmp_path / "corpus.bin")
    corpora.write_corpus(path, [np.array([1, 2])], [np.array([3])], vocab_size=300, separator=299)
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
    corpora.write_corpus(str(path), [np.arange(50)], [np.arange(20)], vocab_size=100, separator=99)
    return path


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none.bin"))):
        corpora.open_corpus(str(tmp_path / "none.bin"))


@pytest.mark.parametrize("size", [0, 1, 63])
def test_file_with_a_truncated_header(tmp_path, size):
    path = tmp_path / "short.bin"
    path.write_bytes(small_file(tmp_path).read_bytes()[:size])
    with pytest.raises(ValueError, match=re.escape(f"{path} has {size} bytes: too short for the 64-byte header")):
        corpora.open_corpus(str(path))


@pytest.mark.parametrize("change", [-100, -2, -1, 1, 2])
def test_file_of_the_wrong_length(tmp_path, change):
    path = small_file(tmp_path)
    content = path.read_bytes()
    length = 64 + 2 * (51 + 21) + 4
    assert len(content) == length
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    message = f"{path} has {length + change} bytes and its header promises {length}"
    with pytest.raises(ValueError, match=re.escape(message)):
        corpora.open_corpus(str(path))


def test_another_kind_of_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time " * 10)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} starts with b'Once upo': not a token file"):
        corpora.open_corpus(str(path))


def test_every_flipped_bit_of_the_header_is_noticed(tmp_path):
    path = small_file(tmp_path)
    content = path.read_bytes()
    for bit in range(64 * 8):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        message = "not a token file" if bit < 64 else "format version" if bit < 96 else "damaged header"
        with pytest.raises(ValueError, match=message) as error:
            corpora.open_corpus(str(path))
        assert str(path) in str(error.value)


def test_an_older_format_is_refused_with_the_remedy(tmp_path):
    path = small_file(tmp_path)
    patched(path, header={1: 1})
    with pytest.raises(ValueError, match=r"format version 1, .* reads version 2, .*make it again with `python data.py"):
        corpora.open_corpus(str(path))


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
        corpora.open_corpus(str(path))


@pytest.mark.parametrize("header", [{5: 0, 6: 72}, {5: 72, 6: 0}])
def test_a_file_without_training_or_held_out_tokens_is_refused(tmp_path, header):
    path = small_file(tmp_path)
    patched(path, header=header)
    with pytest.raises(ValueError, match=r"0 (training|held-out) .*use a longer text"):
        corpora.open_corpus(str(path)).check(seq_len=4, vocab_size=100)


# -- a file that changes


BLOCK_TOKENS = 1 << 15  # a block has 64 KiB, at two bytes a token


def large_file(tmp_path) -> Path:
    """Writes a file of five full blocks and a short one; the held-out part begins within the fourth."""
    path = tmp_path / "large.bin"
    train, held_out = np.arange(int(3.5 * BLOCK_TOKENS)) % 251, np.arange(2 * BLOCK_TOKENS) % 241
    corpora.write_corpus(str(path), [train], [held_out], vocab_size=256, separator=255)
    return path


@pytest.mark.parametrize(
    "start, stop", [(0, 0), (0, 1), (5, 5), (32767, 32769), (32768, 65536), (7, 114689), (9, 10**9)]
)
def test_slices_equal_those_of_an_array(tmp_path, start, stop):
    corpus = corpora.open_corpus(str(large_file(tmp_path)))
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
    corpus, intact = corpora.open_corpus(str(path)), path.read_bytes()
    num_tokens = len(corpus.train) + len(corpus.held_out)
    random = np.random.default_rng(0)
    for token in [0, BLOCK_TOKENS - 1, BLOCK_TOKENS, num_tokens - 1, *random.integers(0, num_tokens, 20).tolist()]:
        flip(path, (64 + 2 * token) * 8 + int(random.integers(16)))
        block = token // BLOCK_TOKENS
        first, last = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, num_tokens) - 1
        with pytest.raises(corpora.DamagedError, match=f"its tokens {first} to {last} are not those .* put it back"):
            corpus.train[:], corpus.held_out[:]
        for other in range(-(-num_tokens // BLOCK_TOKENS)):
            if other != block:
                corpus.train.runs[0].file.read(other * BLOCK_TOKENS, min((other + 1) * BLOCK_TOKENS, num_tokens))
        path.write_bytes(intact)
    for byte in range(64 + 2 * num_tokens, len(intact)):
        flip(path, byte * 8 + 3)
        with pytest.raises(ValueError, match="damaged table of checksums"):
            corpora.open_corpus(str(path))
        path.write_bytes(intact)
    corpus.train[:], corpus.held_out[:]  # restored, under the same open file


def test_a_file_truncated_while_it_is_open_is_an_error_and_no_signal(tmp_path):
    path = large_file(tmp_path)
    corpus, size = corpora.open_corpus(str(path)), path.stat().st_size
    os.truncate(path, 1000)
    with pytest.raises(corpora.DamagedError, match=f"it has 1000 bytes and had {size} when it was opened"):
        data.train_batch(corpus, 0, batch=4, seq_len=64, seed=0)


def test_a_file_overwritten_while_it_is_open_is_reported_with_the_time(tmp_path):
    path, other = large_file(tmp_path), tmp_path / "other.bin"
    corpus, size = corpora.open_corpus(str(path)), path.stat().st_size
    corpora.write_corpus(str(other), [np.arange(len(corpus.train) - 1) % 7], [np.arange(2 * BLOCK_TOKENS) % 7],
                      vocab_size=256, separator=255)  # fmt: skip
    assert other.stat().st_size == size
    overwrite(path, 0, other.read_bytes())
    os.utime(path, (1e9, 1e9))
    with pytest.raises(corpora.DamagedError, match=r"it was written to at 2001-09-\d\d [\d:]+, after it was opened"):
        data.train_batch(corpus, 0, batch=4, seq_len=64, seed=0)


def test_a_file_replaced_while_it_is_open_is_still_the_opened_one(tmp_path):
    path = large_file(tmp_path)
    corpus = corpora.open_corpus(str(path))
    before = data.train_batch(corpus, 3, batch=4, seq_len=64, seed=0)
    other = corpora.write_corpus(str(path), [np.arange(200)], [np.arange(200)], vocab_size=256, separator=255)
    for then, now in zip(before, data.train_batch(corpus, 3, batch=4, seq_len=64, seed=0), strict=True):
        np.testing.assert_array_equal(then, now)
    assert other.identity != corpus.identity


def test_a_disk_error_names_the_file_and_the_byte(tmp_path, monkeypatch):
    corpus = corpora.open_corpus(str(large_file(tmp_path)))

    def fails(descriptor, num_bytes, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(corpora.DamagedError, match=r"large.bin cannot be read at byte 65600: .*Input/output error"):
        corpus.train[BLOCK_TOKENS : BLOCK_TOKENS + 5]


def test_short_reads_are_continued(tmp_path, monkeypatch):
    corpus, pread = corpora.open_corpus(str(large_file(tmp_path))), os.pread
    expected = corpus.train[:]
    monkeypatch.setattr(
        os, "pread", lambda descriptor, num_bytes, offset: pread(descriptor, min(num_bytes, 999), offset)
    )
    np.testing.assert_array_equal(corpus.train[:], expected)


def test_a_corpus_that_is_no_ordinary_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is no ordinary file; make a token file with"):
            corpora.open_corpus(str(path))
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))} is no ordinary file, and no corpus: .* last$"):
        corpora.open_corpus(str(tmp_path))


def test_a_file_that_is_only_touched_stays_valid(tmp_path):
    path = large_file(tmp_path)
    corpus = corpora.open_corpus(str(path))
    os.utime(path, (1e9, 1e9))
    corpus.train[:]


# -- folders of token files


def write_folder(path: Path, shards, **index) -> Path:
    """Writes a corpus of shards, each a pair of its training and its held-out documents."""
    path.mkdir()
    listed = []
    for number, (train, held_out) in enumerate(shards):
        written = corpora.write_corpus(str(path / f"{number}.bin"), map(np.array, train), map(np.array, held_out),
                                       vocab_size=100, separator=99)  # fmt: skip
        listed.append(dict(file=f"{number}.bin", train=len(written.train), held_out=len(written.held_out),
                           identity=written.identity))  # fmt: skip
    corpora.write_index(str(path), listed, **dict(vocab_size=100, separator=99, tokenizer=None) | index)
    return path


SHARDS = [([[1, 2], [3]], [[4]]), ([], [[5, 6]]), ([[7] * 40000], []), ([[8]], [[9]])]


def test_a_folder_is_its_shards_one_after_the_other(tmp_path):
    corpus = corpora.open_corpus(str(write_folder(tmp_path / "c", SHARDS)))
    train = [99, 1, 2, 99, 3, 99, *[7] * 40000, 99, 8]
    assert corpus.train[:].tolist() == train and corpus.held_out[:].tolist() == [99, 4, 99, 5, 6, 99, 9]
    assert (len(corpus.train), len(corpus.held_out), corpus.train.dtype) == (len(train), 7, np.uint16)
    assert (corpus.vocab_size, corpus.separator, corpus.tokenizer) == (100, 99, None)
    for start, stop in ((0, 0), (3, 6), (4, 7), (32770, 32775), (40005, 40008), (40007, 10**6), (5, 5), (9, 3)):
        assert corpus.train[start:stop].tolist() == train[start:stop]
    assert [corpus.held_out[at : at + 3].tolist() for at in range(5)] == [
        [99, 4, 99], [4, 99, 5], [99, 5, 6], [5, 6, 99], [6, 99, 9]
    ]  # fmt: skip


def swap(folder: Path) -> None:
    (folder / "0.bin").rename(folder / "x")
    (folder / "3.bin").rename(folder / "0.bin")
    (folder / "x").rename(folder / "3.bin")


def replace_in_index(folder: Path, old: str, new: str) -> None:
    text = (folder / corpora.INDEX).read_text()
    assert old in text
    (folder / corpora.INDEX).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "change, message",
    [
        (swap, r"0.bin is not the shard that corpus.json lists: it has 2 \+ 2 tokens and .* in place of 5 \+ 2 and"),
        (lambda c: write_folder(c.parent / "d", SHARDS[::-1][:3]) and (c.parent / "d/1.bin").replace(c / "1.bin"),
         r"1.bin is not the shard that corpus.json lists: it has 40001 \+ 0 tokens"),
        (lambda c: write_folder(c.parent / "d", [([[8]], [[8]])]) and (c.parent / "d/0.bin").replace(c / "3.bin"),
         r"3.bin is not the shard that corpus.json lists: it has 2 \+ 2 tokens and .* in place of 2 \+ 2 and"),
        (lambda c: os.truncate(c / "2.bin", 50000), "2.bin has 50000 bytes and its header promises 80074: truncated"),
        (lambda c: (c / "3.bin").unlink(), "3.bin is missing, and corpus.json beside it lists it: put it back"),
        (lambda c: replace_in_index(c, "40001", "40000"), "corpus.json is damaged, or was altered"),
        (lambda c: replace_in_index(c, '"separator": 99', '"separator": 98'), "corpus.json is damaged, or was altered"),
        (lambda c: (c / "corpus.json").write_text("[" * 100_000), "corpus.json is damaged, or was altered"),
        (lambda c: (c / "corpus.json").write_text("[1]"), "corpus.json is damaged, or was altered"),
        (lambda c: (c / "corpus.json").unlink(), "has no corpus.json, which `python data.py prepare` writes last"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_what_was_written_is_not_opened(tmp_path, change, message):
    folder = write_folder(tmp_path / "c", SHARDS)
    before = corpora.open_corpus(str(folder)).identity
    change(folder)
    with pytest.raises((ValueError, OSError), match=message):
        corpora.open_corpus(str(folder))
    assert before != write_and_open(tmp_path / "other", [*SHARDS[:3], ([[8]], [[8]])]).identity
    assert before == write_and_open(tmp_path / "same", SHARDS).identity


def test_the_limit_of_open_files_is_raised_for_many_shards(tmp_path, monkeypatch):
    folder, limits = write_folder(tmp_path / "c", SHARDS), [(503, 504)]
    monkeypatch.setattr(corpora.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(corpora.resource, "setrlimit", lambda kind, pair: limits.append(pair))
    corpora.open_corpus(str(folder))
    assert limits[1:] == [(504, 504)]
    limits[-1] = (503, 503)
    with pytest.raises(ValueError, match=r"has 4 shards, .* allows 503 open files: raise the limit .* --shard_bytes"):
        corpora.open_corpus(str(folder))


def write_and_open(*args, **index) -> corpora.Corpus:
    return corpora.open_corpus(str(write_folder(*args, **index)))


def test_identity_depends_on_the_content_and_not_on_the_path(tmp_path):
    write = lambda name, documents, **kind: corpora.write_corpus(
        str(tmp_path / name), [np.array(documents)], [np.arange(9)], **dict(vocab_size=50, separator=49) | kind
    )
    first = write("a.bin", [1, 2, 3]).identity
    assert write("b.bin", [1, 2, 3]).identity == corpora.open_corpus(str(tmp_path / "a.bin")).identity == first
    others = [write("c.bin", [1, 2, 4]), write("d.bin", [1, 2, 3], vocab_size=51)]
    others += [write("e.bin", [1, 2, 3], separator=48), write("f.bin", [1, 2, 3, 0])]
    assert len({first, *(other.identity for other in others)}) == 5


@pytest.mark.parametrize("vocab_size", [100, 70_000])
@pytest.mark.parametrize("part, offset", [("training", 0), ("training", 13), ("training", 50), ("held-out", 7)])
def test_a_token_outside_the_vocabulary_in_the_file(tmp_path, vocab_size, part, offset):
    path, token, seq_len = str(tmp_path / "corpus.bin"), vocab_size + 3, 5
    corpora.write_corpus(path, [np.arange(50)], [np.arange(20)], vocab_size=vocab_size, separator=99)
    patched(Path(path), token=(offset + 51 * (part == "held-out"), token))
    corpus = corpora.open_corpus(path)
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
    corpora.write_corpus(path, [np.arange(50)], [np.arange(20)], vocab_size=70_000, separator=99)
    patched(Path(path), token=(13, 2**32 - 1))
    with pytest.raises(ValueError, match=f"has token {2**32 - 1} at training token 13"):
        data.train_batch(corpora.open_corpus(path), 0, batch=10, seq_len=5, seed=0)


@pytest.mark.parametrize("separator", [-1, 100, 65543])
def test_a_separator_outside_the_vocabulary_is_refused(tmp_path, separator):
    with pytest.raises(ValueError, match=f"separator {separator} is outside the vocabulary of 100"):
        corpora.write_corpus(str(tmp_path / "c.bin"), [np.arange(9)], [], vocab_size=100, separator=separator)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("token", [-1, 100, 65536])
def test_a_token_outside_the_vocabulary_is_not_written(tmp_path, token):
    with pytest.raises(ValueError, match=f"document 1 has token {token} at position 2, outside the vocabulary of 100"):
        documents = [np.array([1]), np.array([1, 2, token, 3])]
        corpora.write_corpus(str(tmp_path / "corpus.bin"), documents, [], vocab_size=100, separator=99)
    assert not (tmp_path / "corpus.bin").exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, error):
    path = small_file(tmp_path)
    before = path.read_bytes()

    def documents():
        yield np.arange(60)
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        corpora.write_corpus(str(path), [np.arange(5)], documents(), vocab_size=100, separator=99)
    assert path.read_bytes() == before
    corpora.write_corpus(str(path), [np.arange(5)], [np.arange(3)], vocab_size=100, separator=99)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert corpora.open_corpus(str(path)).train[:].tolist() == [99, 0, 1, 2, 3, 4]


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


def test_a_token_outside_the_vocabulary_is_reported_in_one_line(tmp_path):
    path = small_file(tmp_path)
    for token in range(51):
        patched(path, token=(token, 100))
    done = run_cli("show", path, "--seq_len=4")
    assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr
    assert re.search(r"has token 100 at training token \d+, outside its vocabulary of 100\n$", done.stderr)
