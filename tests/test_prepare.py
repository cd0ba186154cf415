"""Tests the preparation of texts: which documents, which of them are held out, and what is refused."""

import itertools
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import corpora
import data
import documents
import prepare

ROOT = Path(data.__file__).parent


def run_cli(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "data.py", *args], capture_output=True, text=True, timeout=60)


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
    corpus = corpora.open_corpus(str(out))
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
    rest, _ = prepare.prepare([str(folder), str(single)], str(out))
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
    corpus, _ = prepare.prepare([str(tmp_path / "texts")], str(tmp_path / "corpus.bin"))
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
    corpus, _ = prepare.prepare([str(tmp_path / "texts")], str(tmp_path / "corpus.bin"))
    assert sorted(documents_of(corpus.held_out)) == sorted(name.encode() * 10 for name in held_out)
    assert sorted(documents_of(corpus.train)) == sorted(name.encode() * 10 for name in others)


def test_texts_that_are_no_ordinary_files_are_named_at_once(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "fox.txt").write_text("The quick brown fox. " * 20)
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("nowhere")
    (folder / "again").symlink_to(folder / "deep")
    _, skipped = prepare.prepare([str(folder)], str(tmp_path / "corpus.bin"))
    assert sorted(skipped) == [folder / "again", folder / "broken", folder / "pipe"]
    for path in (folder / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is no ordinary file: save its text to one$"):
            prepare.prepare([str(path)], str(tmp_path / "corpus.bin"))


def test_a_text_that_is_named_twice_counts_once(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(40):
        (folder / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(f"text {i}" * 10)
    once, _ = prepare.prepare([str(folder)], str(tmp_path / "once.bin"))
    paths = [str(folder), str(folder / "deep"), f"{folder}/deep/../2.txt"]
    twice, _ = prepare.prepare(paths, str(tmp_path / "twice.bin"))
    num_bytes = lambda corpus: sum(map(len, documents_of(corpus.train) + documents_of(corpus.held_out)))
    assert num_bytes(twice) == num_bytes(once) == sum(len(f"text {i}" * 10) for i in range(40))


def test_a_text_that_changes_during_preparation_is_named(tmp_path, monkeypatch):
    text, split = tmp_path / "fox.txt", documents.split
    text.write_text("The quick brown fox. " * 20)

    def changed(texts):
        text.write_bytes(text.read_bytes().replace(b"fox", b"f\xffx"))
        return split(texts)

    monkeypatch.setattr(documents, "split", changed)
    with pytest.raises(OSError, match=r"fox.txt has changed since the preparation began"):
        prepare.prepare([str(text)], str(tmp_path / "corpus.bin"))
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
    assert len(corpora.open_corpus(str(out)).train) == 400


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
            prepare.prepare(list(map(str, paths)), str(out))
        assert text.read_text() == before and sorted(os.listdir(tmp_path)) == ["linked.bin", "texts"]


@pytest.mark.parametrize("size", [2, 5, 19, 20, 21, 400, 1000])
def test_prepare_a_single_small_file(tmp_path, size):
    """The end of the only document is held out."""
    text = ("The quick brown fox. " * 50)[:size].encode()
    (tmp_path / "fox.txt").write_bytes(text)
    corpus, skipped = prepare.prepare([str(tmp_path / "fox.txt")], str(tmp_path / "corpus.bin"))
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
    prepare.prepare([str(tmp_path / "fox.txt")], str(tmp_path / "corpus.bin"))
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
    corpus = corpora.open_corpus("")
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
    again = corpora.standard_library()
    assert corpus.identity == again.identity != ""
    np.testing.assert_array_equal(corpus.train, again.train)
    np.testing.assert_array_equal(corpus.held_out, again.held_out)
    corpus.check(seq_len=1024, vocab_size=256)
