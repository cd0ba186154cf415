"""Tests ranges of bytes from a bucket, by fsspec's file system in memory: failures, truncation, missing plugins."""

import re
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import corpora
import data
import storage
import tokenization

CONTENT = bytes(range(256)) * 10
PATH = "memory://bucket/file.bin"


@pytest.fixture
def bucket(monkeypatch):
    """Returns fsspec's file system in memory, empty, with the file PATH. No retry waits."""
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(storage, "_reported", set())
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pipe_file(PATH, CONTENT)
    yield files
    files.store.clear()


def failing(monkeypatch, name: str, times: int, error: Exception) -> list:
    """Lets the first calls of a method of the bucket fail; returns the list of the calls' arguments."""
    method, calls = getattr(MemoryFileSystem, name), []

    def call(self, *args, **options):
        calls.append((args, options))
        if len(calls) <= times:
            raise error
        return method(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, name, call)
    return calls


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize("offset, num_bytes", [(0, 0), (0, 5), (7, 300), (2550, 100), (2560, 9), (9999, 1)])
def test_ranges_are_those_of_the_content(kind, offset, num_bytes, bucket, tmp_path):
    (tmp_path / "file.bin").write_bytes(CONTENT)
    file = storage.opened(PATH if kind == "remote" else str(tmp_path / "file.bin"))
    assert file.size == len(CONTENT) and file.is_remote == (kind == "remote")
    assert file.read(offset, num_bytes) == CONTENT[offset : offset + num_bytes]


def test_folders_and_paths(bucket, tmp_path):
    assert storage.is_folder("memory://bucket") and not storage.is_folder(PATH) and storage.is_folder(str(tmp_path))
    assert not storage.is_folder(str(tmp_path / "none")) and not storage.is_folder("memory://none")
    assert storage.join("memory://bucket/", "file.bin") == PATH and storage.read_file(PATH) == CONTENT
    assert storage.join(str(tmp_path), "a") == str(tmp_path / "a")


@pytest.mark.parametrize("error", [OSError("503"), TimeoutError("slow"), RuntimeError("ClientPayloadError")])
def test_a_read_that_fails_is_tried_again_and_reported_once(error, bucket, monkeypatch, capsys):
    file = storage.opened(PATH)
    calls = failing(monkeypatch, "cat_file", 3, error)
    assert file.read(100, 50) == CONTENT[100:150] and len(calls) == 4
    expected = f"{PATH} cannot be read at byte 100: {type(error).__name__}: {error}; trying again\n"
    assert capsys.readouterr().err == expected


def test_a_read_that_fails_always_ends_with_the_byte_and_the_number_of_attempts(bucket, monkeypatch):
    waits = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    file = storage.opened(PATH)
    calls = failing(monkeypatch, "cat_file", 100, OSError("503 backend error"))
    with pytest.raises(OSError, match=f"^{PATH} cannot be read at byte 7, 6 times: OSError: 503 backend error$"):
        file.read(7, 5)
    assert len(calls) == 6 and waits == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError("403")])
def test_what_stays_is_not_tried_again(error, bucket, monkeypatch):
    file = storage.opened(PATH)
    calls = failing(monkeypatch, "cat_file", 100, error)
    with pytest.raises(type(error)):
        file.read(0, 5)
    assert len(calls) == 1


def test_missing_files_folders_and_plugins_are_named(bucket, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"^memory://bucket/none cannot be opened: there is no such file$"):
        storage.opened("memory://bucket/none")
    with pytest.raises(IsADirectoryError, match=r"^memory://bucket is a folder, not a file$"):
        storage.opened("memory://bucket")
    with pytest.raises(ValueError, match=r"^memo://b/c: .*memo; give a local path, or one with gs://"):
        storage.opened("memo://b/c")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"^s3://b/c: fsspec has no plugin for s3:// here: Install s3fs to access S3$"):
        storage.opened("s3://b/c")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=re.escape(f"{PATH} needs fsspec, which is not installed: pip install")):
        storage.opened(PATH)


# -- a corpus in a bucket


def corpus_in(bucket, folder: Path) -> corpora.Corpus:
    path = folder / "corpus.bin"
    documents = [np.arange(100_000) % 251], [np.arange(1000) % 251]
    corpora.write_corpus(str(path), *documents, vocab_size=256, separator=255)
    bucket.pipe_file("memory://bucket/corpus.bin", path.read_bytes())
    return corpora.open_corpus("memory://bucket/corpus.bin")


def test_a_corpus_in_a_bucket_equals_the_local_one(bucket, tmp_path, monkeypatch):
    """A process reads only the blocks of its own rows."""
    remote, local = corpus_in(bucket, tmp_path), corpora.open_corpus(str(tmp_path / "corpus.bin"))
    assert remote.identity == local.identity
    calls = failing(monkeypatch, "cat_file", 0, OSError())
    options = dict(batch=8, seq_len=100, seed=1, rows=slice(3, 5))
    for ours, theirs in zip(data.train_batch(remote, 2, **options), data.train_batch(local, 2, **options), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(calls) == 2 and all(ranges["end"] - ranges["start"] <= 2 << 16 for _, ranges in calls)


@pytest.mark.parametrize("change", ["truncated", "altered", "replaced", "removed"])
def test_a_corpus_that_changes_in_the_bucket_is_found_when_it_is_read(change, bucket, tmp_path):
    corpus, content = corpus_in(bucket, tmp_path), bytearray((tmp_path / "corpus.bin").read_bytes())
    content[64 + 5] ^= 1
    path = "memory://bucket/corpus.bin"
    bucket.rm(path) if change == "removed" else None
    if change == "truncated":
        bucket.pipe_file(path, bytes(content[:1000]))
    elif change == "replaced":
        bucket.pipe_file(path, bytes(content))
    elif change == "altered":
        bucket.store["/bucket/corpus.bin"].getbuffer()[64 + 5] ^= 1
    message = {
        "truncated": "cannot be read at byte 64, 6 times: OSError: 936 bytes came of 65536",
        "altered": "damaged: its tokens 0 to 32767 .*the bucket reports no change",
        "replaced": "damaged: its tokens 0 to 32767 .*another file has its name since it was opened",
        "removed": "cannot be read at byte 64: there is no such file",
    }[change]
    with pytest.raises(corpora.DamagedError, match=message):
        corpus.train[0:100]


def test_a_folder_in_a_bucket_equals_the_local_one(bucket, tmp_path):
    """A shard that is altered, or missing, is found when the folder is opened."""
    shards = []
    for number in range(3):
        name, tokens = f"{number:05}.bin", np.arange(50 + number) % 90
        made = corpora.write_corpus(str(tmp_path / name), [tokens], [tokens[:9]], vocab_size=100, separator=99)
        shards.append(dict(file=name, train=len(made.train), held_out=len(made.held_out), identity=made.identity))
    made = tokenization.train_tokenizer(["text " * 9], 260, str(tmp_path / "tokenizer.json"))
    known = dict(identity=made.identity, special_tokens={"<|endoftext|>": 99})
    corpora.write_index(str(tmp_path), shards, vocab_size=100, separator=99, tokenizer=known)
    for path in tmp_path.iterdir():
        bucket.pipe_file(f"memory://many/{path.name}", path.read_bytes())
    local, remote = corpora.open_corpus(str(tmp_path)), corpora.open_corpus("memory://many")
    assert remote.identity == local.identity and remote.train[:].tolist() == local.train[:].tolist()
    assert remote.tokenizer.identity == made.identity
    bucket.pipe_file("memory://many/tokenizer.json", b"{}")
    with pytest.raises(ValueError, match=r"^memory://many/tokenizer.json is no tokenizer.json"):
        _ = corpora.open_corpus("memory://many").tokenizer
    bucket.pipe_file("memory://many/00001.bin", (tmp_path / "00000.bin").read_bytes())
    with pytest.raises(ValueError, match=r"^memory://many/00001.bin is not the shard that corpus.json lists"):
        corpora.open_corpus("memory://many")
    bucket.rm("memory://many/00001.bin")
    with pytest.raises(FileNotFoundError, match=r"^memory://many/00001.bin is missing, and corpus.json"):
        corpora.open_corpus("memory://many")
