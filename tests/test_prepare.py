"""Tests the preparation of texts: which documents, which of them are held out, and what is refused."""

import gzip
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import zstandard

import corpora
import data
import documents
import prepare

ROOT = Path(data.__file__).parent


def run_cli(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "data.py", *args], capture_output=True, text=True, timeout=60)


# -- pieces of files


TEXTS = ["Grüße\n", "", "x" * 700, "世界\r\n" * 50, "\0\0", " \n ", *(f"number {n}" for n in range(40)), "{}", "🙂" * 9]


def write_json_lines(path: Path, texts=TEXTS, key="text") -> Path:
    content = "".join(json.dumps({"id": n, key: text}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(texts))
    content = content.encode("utf-8", "surrogatepass")
    opener = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(opener(content))
    return path


def write_parquet(path: Path, texts=TEXTS, key="text") -> Path:
    table = pyarrow.table({"id": list(range(len(texts))), key: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return path


TOKENS = np.array([9, 1, 2, 9, 9, 3, *[4, 5] * 40, 9, 6, 7, 8, 9, 9], np.uint16)


def write_tokens(path: Path) -> Path:
    np.save(path, TOKENS) if path.suffix == ".npy" else path.write_bytes(TOKENS.tobytes())
    return path


def write_megatron(path: Path) -> Path:
    """Documents of one or two sequences, as Megatron-LM writes them: sizes and pointers, then where documents start."""
    sequences = [np.arange(n % 5 + 1) + n for n in range(30)]
    sizes = np.array(list(map(len, sequences)), "<i4")
    path.write_bytes(np.concatenate(sequences).astype("<i4").tobytes())
    pointers, starts = (np.cumsum(sizes) - sizes) * 4, np.array([0, *range(1, 30, 2), 30], "<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(sizes), len(starts))
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + pointers.astype("<i8").tobytes() + starts.tobytes())
    return path


def read_documents(path: Path, piece_bytes: int, kinds: documents.Kinds) -> list:
    """The documents of all pieces of a file that are not empty, each piece read for itself."""
    (file,), _ = documents.inputs_of([str(path)], kinds)
    texts, read = [], []
    for piece in documents.pieces_of(file, kinds, piece_bytes):
        chunks = []
        for chunk in documents.read(piece, kinds, read.append):
            chunks.append(chunk.content)
            if chunk.ends:
                texts.append("".join(chunks) if isinstance(chunks[0], str) else np.concatenate(chunks).tolist())
                chunks = []
        assert not chunks
    assert sum(read) == sum(piece.num_bytes for piece in documents.pieces_of(file, kinds, piece_bytes))
    return [text for text in texts if text]


@pytest.mark.parametrize("chunk", [1 << 20, 7])
@pytest.mark.parametrize("piece_bytes", [1 << 20, 400, 30, 5])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.zst", "a.parquet", "a.npy", "a.bin", "m.bin"])
def test_pieces_have_every_document_once(tmp_path, monkeypatch, name, piece_bytes, chunk):
    monkeypatch.setattr(documents, "CHUNK_CHARS", chunk)
    write = {"m": write_megatron}.get(name[0], {"npy": write_tokens, "bin": write_tokens, "parquet": write_parquet}.get(
        name.split(".")[1], write_json_lines))  # fmt: skip
    path, kinds = write(tmp_path / name), documents.Kinds(vocab_size=50, separator=9, token_dtype="uint16")
    expected = [text for text in TEXTS if text]
    if name[0] == "m":
        sequences = [[token for token in range(n, n + n % 5 + 1) if token != 9] for n in range(30)]
        expected = [sequences[0], *(sequences[n] + sequences[n + 1] for n in range(1, 29, 2)), sequences[29]]
    elif write is write_tokens:
        expected = [[1, 2], [3, *[4, 5] * 40], [6, 7, 8]]
    assert read_documents(path, piece_bytes, kinds) == [document for document in expected if document]


@pytest.mark.parametrize("chunk", [1 << 20, 7])
@pytest.mark.parametrize("piece_bytes", [1 << 20, 100, 30])
@pytest.mark.parametrize("text", ["Grüße 世界\n" * 40 + "end", "\n" * 99, "🙂" * 99, "x" * 999], ids=repr)
def test_pieces_of_a_text_are_the_text(tmp_path, monkeypatch, text, piece_bytes, chunk):
    monkeypatch.setattr(documents, "CHUNK_CHARS", chunk)
    monkeypatch.setattr(documents, "_LINE_BYTES", 25)
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = read_documents(tmp_path / "a.txt", piece_bytes, documents.Kinds())
    assert "".join(pieces) == text
    assert len(pieces) == 1 or max(len(piece.encode()) for piece in pieces) <= piece_bytes + 25
    if "\n" in text:
        assert all(piece.endswith("\n") for piece in pieces[:-1])


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 1}\n', "a.jsonl line 2 has int under 'text', not text"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y", "id": 1}\n', "line 2 has no 'text': its keys are body, id; name"),
        ("a.jsonl", b'{"text": "x"}\n[]\n', "line 2 has no 'text': it is no object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "y\n', "a.jsonl line 2 is no JSON: "),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl line 1 is no JSON: .*invalid start byte"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl line 1 is no JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9)[:-9], "a.jsonl.gz cannot be read after line"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read after line 0: Not a gzipped file"),
        (
            "a.jsonl.zst",
            zstandard.compress(b'{"text": "x"}\n' * 9)[:-9],
            "cannot be read after line .*: truncated",
        ),
        ("a.jsonl.zst", b"no frame", "a.jsonl.zst cannot be read after line 0"),
        ("a.parquet", b"PAR1", "a.parquet is no Parquet file"),
        ("a.npy", b"no array", "a.npy is no .npy file"),
        ("a.bin", b"123", "a.bin has 3 bytes, no multiple of the 2 of a token"),
        ("a.bin", b"\1\0\xff\0", "a.bin has token 255 at position 1, outside the vocabulary of 50"),
    ],
)
def test_a_file_that_is_not_of_its_kind_is_refused_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    kinds = documents.Kinds(vocab_size=50, separator=9, token_dtype="uint16")
    with pytest.raises((ValueError, OSError), match=message):
        read_documents(tmp_path / name, 1 << 20, kinds)


def test_a_column_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", key="content")
    with pytest.raises(ValueError, match="has no column 'text': its columns are id, content; name the column"):
        read_documents(path, 1 << 20, documents.Kinds())
    assert read_documents(path, 1 << 20, documents.Kinds("content")) == [text for text in TEXTS if text]


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
    out = tmp_path / "corpus"
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
    (cut,) = {text.encode() for text in [*texts, "on its own"]} - {*train, *held_out}
    parts = [(a, b) for a in train for b in held_out if a + b == cut]
    assert len(parts) == 1  # its beginning is trained on, its end held out
    by_path = [path.read_bytes() for path in sorted(folder.rglob("*.txt"))] + [b"on its own"]
    number = {text: at for at, text in enumerate(by_path)} | {part: by_path.index(cut) for part in parts[0]}
    in_order = lambda stream: [number[text] for text in stream]
    assert in_order(train) == sorted(in_order(train)) and in_order(held_out) == sorted(in_order(held_out))
    assert {*train, *held_out, cut} == {*by_path, *parts[0]} - {b"", "Gr\xfc\xdfe".encode("latin-1")}
    total = len(corpus.train) + len(corpus.held_out)
    assert len(corpus.held_out) == round(0.05 * (total - 1))  # without the separator that the cut adds
    assert (corpus.vocab_size, corpus.separator) == (256, 255)


@pytest.mark.parametrize(
    "sizes",
    [[200], [200, 200], [300] * 4, [200] * 30, [4000, *[50] * 19], [50, 4000], [3, 7, 1], [90_000] * 4, [1, 1]],
)
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_share_that_is_held_out_is_exact_for_few_documents_too(tmp_path, sizes, share):
    texts = [(f"{number:_>9} ".encode() * size)[:size] for number, size in enumerate(sizes)]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:02}.txt").write_bytes(text)
    corpus, _ = prepare.prepare([str(tmp_path / "texts")], str(tmp_path / "c"), prepare.Options(held_out=share))
    asked = max(round(share * (sum(sizes) + len(sizes))), 2)
    assert asked - 1 <= len(corpus.held_out) <= asked
    joined = lambda tokens: tokens[:].astype(np.uint8).tobytes().replace(b"\xff", b"")
    assert sorted(joined(corpus.train) + joined(corpus.held_out)) == sorted(b"".join(texts))


def test_texts_that_are_no_ordinary_files_are_named_at_once(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "fox.txt").write_text("The quick brown fox. " * 20)
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("nowhere")
    (folder / "again").symlink_to(folder / "deep")
    _, report = prepare.prepare([str(folder)], str(tmp_path / "corpus"))
    assert report.skipped == [str(folder / name) for name in ("again", "broken", "pipe")]
    for path in (folder / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is no ordinary file: save its text to one$"):
            prepare.prepare([str(path)], str(tmp_path / "corpus"))


def test_a_text_that_is_named_twice_counts_once(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(40):
        (folder / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(f"text {i}" * 10)
    once, _ = prepare.prepare([str(folder)], str(tmp_path / "once"))
    paths = [str(folder), str(folder / "deep"), f"{folder}/deep/../2.txt"]
    twice, _ = prepare.prepare(paths, str(tmp_path / "twice"))
    num_bytes = lambda corpus: sum(map(len, documents_of(corpus.train) + documents_of(corpus.held_out)))
    assert num_bytes(twice) == num_bytes(once) == sum(len(f"text {i}" * 10) for i in range(40))


def test_a_text_that_changes_during_preparation_is_named(tmp_path, monkeypatch):
    text = tmp_path / "fox.txt"
    text.write_text("The quick brown fox. " * 20)

    def pieces_of(*args):
        text.write_bytes(text.read_bytes() + b"!")
        return [documents.Piece(args[0], 0, args[0].size, args[0].size)]

    monkeypatch.setattr(documents, "pieces_of", pieces_of)
    with pytest.raises(OSError, match=r"fox.txt has changed since the preparation began"):
        prepare.prepare([str(text)], str(tmp_path / "corpus"))
    assert not (tmp_path / "corpus" / corpora.INDEX).exists()


def test_names_need_not_be_utf_8(tmp_path):
    name = os.fsdecode(b"Gr\xfc\xdfe.txt")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_text("The quick brown fox. " * 20)
    (tmp_path / "texts" / f"{name}.gz").write_bytes(b"\xff")
    out = tmp_path / f"{name}.corpus"
    done = subprocess.run(
        [sys.executable, ROOT / "data.py", "prepare", tmp_path / "texts", "--out", out],
        capture_output=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "utf-8:surrogateescape"},
    )  # fmt: skip
    assert done.returncode == 0 and b"left out, no UTF-8 text: " in done.stdout, done.stderr
    assert len(corpora.open_corpus(str(out)).train) == 401


def test_an_output_that_is_an_input_is_refused_and_nothing_is_lost(tmp_path):
    (tmp_path / "texts").mkdir()
    text = tmp_path / "texts" / "fox.txt"
    text.write_text("The quick brown fox. " * 20)
    os.link(text, tmp_path / "linked.bin")
    for paths, out, message in (
        ([text], text, "is the text .*fox.txt, too: it would be lost"),
        ([text], tmp_path / "linked.bin", "is the text .*fox.txt, too: it would be lost"),
        ([tmp_path / "texts"], tmp_path / "linked.bin", "linked.bin exists, and is no folder: name another"),
        ([text], tmp_path / "texts", "texts has other files than those of a preparation: name another folder"),
        ([tmp_path / "texts"], tmp_path / "texts" / "corpus", "is inside the text .*texts, which is read"),
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
    corpus, report = prepare.prepare([str(tmp_path / "fox.txt")], str(tmp_path / "corpus"))
    (train,), (held_out,) = documents_of(corpus.train), documents_of(corpus.held_out)
    assert train + held_out == text and not report.skipped
    assert len(held_out) + 1 == max(round(0.05 * (size + 1)), 2)


def test_prepare_and_show_a_single_small_file(tmp_path):
    (tmp_path / "fox.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    done = run_cli("prepare", tmp_path / "fox.txt", "--out", tmp_path / "corpus")
    assert done.returncode == 0, done.stderr
    assert "857 training and 45 held-out tokens\nvocabulary 256, separator 255, uint16 tokens" in done.stdout
    shown = run_cli("show", tmp_path / "corpus", "--seq_len=40")
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
    prepare.prepare([str(tmp_path / "fox.txt")], str(tmp_path / "corpus"))
    out = ("--out", tmp_path / "out")
    for args, message in (
        (("prepare", bad, *out), f"{bad} is no UTF-8 text: invalid start byte at byte 3"),
        (("prepare", tmp_path / "none", *out), f"No such file or directory: '{tmp_path / 'none'}'"),
        (("prepare", tmp_path / "folder", *out), f"no UTF-8 text in {tmp_path / 'folder'}; 1 files"),
        (("show", "--seq_len=0"), "'0' must be a whole number of at least 1"),
        (("show", bad), f"{bad} has 4 bytes: too short"),
        (("show", tmp_path / "corpus"), "use --seq_len="),
    ):
        done = run_cli(*args)
        assert done.returncode == (1 if "No such file" in message else 2) and message in done.stderr
        assert len(done.stderr.splitlines()) <= 3 and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


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
