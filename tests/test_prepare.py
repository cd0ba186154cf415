"""Tests the preparation of texts: which documents, which of them are held out, and what is refused."""

import contextlib
import dataclasses
import gzip
import json
import os
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import tokenizers
import zstandard

import corpora
import data
import documents
import lock
import prepare
import tokenization
from benchmarks import prepare as benchmark

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
@pytest.mark.parametrize(
    "text",
    ["Grüße 世界\n" * 40 + "end", "\n" * 99, "🙂" * 99, "x" * 999],
    ids=["lines", "ends", "emoji", "a line"],
)
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
        ("a.jsonl", b'{"text": "x"} {"text": "y"}', "a.jsonl line 1 is no JSON: more follows after character 13"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9], "a.jsonl.gz cannot be read after line"),
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


# -- the pipeline


def write_inputs(folder: Path) -> Path:
    """A folder of all kinds of text, of 30 kB."""
    folder.mkdir()
    write_json_lines(folder / "a.jsonl", [f"{text} {n}" for n in range(8) for text in TEXTS])
    write_json_lines(folder / "b.jsonl.gz", [f"{text}: {n}" for n in range(4) for text in TEXTS])
    write_parquet(folder / "c.parquet", [f"{text}, {n}" for n in range(4) for text in TEXTS])
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"a text, {number}\n" * 10 * (number + 1))
    (folder / "binary.png").write_bytes(b"\x89PNG")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path):
    source = write_inputs(tmp_path / "texts")
    for workers in (1, 2, 3):
        options = prepare.Options(shard_bytes=2000, workers=workers)
        corpus, report = prepare.prepare([str(source)], str(tmp_path / str(workers)), options)
        assert report.skipped == [str(source / "binary.png")] and report.num_documents > 500
    assert len(list((tmp_path / "1").glob("*.bin"))) > 15 and not (tmp_path / "1" / prepare.JOURNAL).exists()
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")


@pytest.mark.slow
def test_a_killed_preparation_goes_on_and_ends_in_the_same_bytes(tmp_path):
    lines = "".join(json.dumps({"text": f"text number {n} " * 20}) + "\n" for n in range(30_000))
    (tmp_path / "a.jsonl").write_text(lines)
    command = [sys.executable, ROOT / "data.py", "prepare", tmp_path / "a.jsonl", "--shard_bytes=20000"]
    killed = subprocess.Popen([*command, "--workers=2", "--out", tmp_path / "killed"], start_new_session=True)
    journal, deadline = tmp_path / "killed" / prepare.JOURNAL, time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b"\n") < 20:
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.01)
    killed.kill()  # the parent alone: its workers notice
    killed.wait()
    while any(f"\n{killed.pid}\n" in f"\n{parent}\n" for parent in sessions()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with journal.open("a") as file:
        file.write('{"part": 7, "sha')  # a line that the kill cut
    with pytest.raises(ValueError, match="killed is no ordinary file, and no corpus"):
        corpora.open_corpus(str(tmp_path / "killed"))
    done = subprocess.run([*command, "--workers=1", "--out", tmp_path / "killed"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 20 <= int(re.search(r"goes on: (\d+) of \d+ parts are there", done.stdout)[1]) < 500
    subprocess.run([*command, "--workers=2", "--out", tmp_path / "other"], check=True, capture_output=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "other")


def test_two_preparations_do_not_write_to_one_folder(tmp_path, monkeypatch):
    source, out, options = write_inputs(tmp_path / "texts"), tmp_path / "c", prepare.Options(workers=1)
    part, refused = prepare._Encoder.part, []

    def another_begins(self, number, pieces):
        with pytest.raises(lock.HeldError, match=rf"c is in use by process {os.getpid()} on .*: end that run, or give"):
            prepare.prepare([str(source)], str(out), options)
        refused.append(number)
        return part(self, number, pieces)

    monkeypatch.setattr(prepare._Encoder, "part", another_begins)
    prepare.prepare([str(source)], str(out), options)
    monkeypatch.undo()
    assert refused == [0] and not (out / prepare.LOCK).exists()
    assert contents(out) == contents(Path(prepare.prepare([str(source)], str(tmp_path / "d"), options)[0].name))


def sessions() -> list[int]:
    """The sessions of all processes."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            numbers.append(int(path.read_text().rpartition(")")[2].split()[3]))
    return numbers


def test_finished_parts_are_not_made_again_and_another_plan_is_refused(tmp_path, monkeypatch):
    source, out, options = write_inputs(tmp_path / "texts"), tmp_path / "c", prepare.Options(shard_bytes=2000)
    part, made = prepare._Encoder.part, []

    def counted(self, number, pieces):
        if len(made) == 4 and number == 4:
            made.append(-1)
            raise OSError("No space left on device")
        made.append(number)
        return part(self, number, pieces)

    monkeypatch.setattr(prepare._Encoder, "part", counted)
    with pytest.raises(OSError, match="No space"):
        prepare.prepare([str(source)], str(out), options)
    (out / "00002-000.bin").unlink()
    (out / "00003-000.bin.12345678.unfinished").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"another plan \(shard_bytes is 2000 there and 3000 here\): remove it, or name"
    ):
        prepare.prepare([str(source)], str(out), prepare.Options(shard_bytes=3000))
    corpus, _ = prepare.prepare([str(source)], str(out), options)
    assert made == [0, 1, 2, 3, -1, 2, *range(4, max(made) + 1)]
    assert contents(out) == contents(Path(prepare.prepare([str(source)], str(tmp_path / "d"), options)[0].name))
    number = len(made)
    again, report = prepare.prepare([str(source)], str(out), options)
    assert again.identity == corpus.identity and len(made) == number and report.num_documents > 500
    (source / "0.txt").write_text("another text")
    with pytest.raises(
        ValueError, match=r"another plan \(inputs is '24 files of \d+ bytes, hash \w+' there and '24 files"
    ):
        prepare.prepare([str(source)], str(out), options)
    (out / prepare.PLAN).write_text("{")
    with pytest.raises(ValueError, match=r"plan.json is damaged: remove .*, or name another folder"):
        prepare.prepare([str(source)], str(out), options)


def test_lone_surrogates_nuls_and_empty_texts(tmp_path):
    texts = ["a\ud800b", "\ud83d\ude00", "", "\0\0", *["x" * 50] * 2]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "\n\n")
    corpus, report = prepare.prepare([str(tmp_path / "a.jsonl")], str(tmp_path / "c"), prepare.Options(held_out=0.01))
    assert (report.num_documents, report.num_mended) == (5, 1)
    train, held_out = documents_of(corpus.train), documents_of(corpus.held_out)
    assert "a\ufffdb".encode() in train and b"\0\0" in train
    assert sorted(b"".join(train + held_out)) == sorted(("a\ufffdb\U0001f600\0\0" + "x" * 100).encode())


def test_many_short_documents(tmp_path):
    texts = [f"document {n:>11}" for n in range(30_000)]
    write_json_lines(tmp_path / "a.jsonl", texts)
    corpus, _ = prepare.prepare([str(tmp_path / "a.jsonl")], str(tmp_path / "c"), prepare.Options(shard_bytes=200_000))
    read = documents_of(corpus.train) + documents_of(corpus.held_out)
    assert len(corpus.train.runs) > 3 and len({*read} & {text.encode() for text in texts}) >= 30_000 - len(
        corpus.train.runs
    )
    assert sum(map(len, read)) == 30_000 * 20
    assert abs(len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) - 0.05) < 1e-4


def test_tokens_of_a_file_are_those_of_the_corpus(tmp_path):
    write_tokens(tmp_path / "a.bin")
    options = prepare.Options(vocab_size=50, separator="9", token_dtype="uint16", held_out=0.1)
    corpus, _ = prepare.prepare([str(tmp_path / "a.bin")], str(tmp_path / "c"), options)
    assert (corpus.vocab_size, corpus.separator, corpus.tokenizer) == (50, 9, None)
    documents = sorted(np.split(corpus.train[:], np.flatnonzero(corpus.train[:] == 9)[1:]), key=len)
    assert [document.tolist() for document in documents[:1]] == [[9, 1, 2]]
    assert len(corpus.train) + len(corpus.held_out) in (3 + 82 + 4, 3 + 82 + 4 + 1)
    for changes, message in (
        (
            dict(separator="x"),
            "need the token that separates documents: --separator=N, with N from 0 to 49, and not 'x'",
        ),
        (dict(separator="50"), "with N from 0 to 49, and not '50'"),
        (dict(vocab_size=0), "need --tokenizer, or the --vocab_size"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare.prepare([str(tmp_path / "a.bin")], str(tmp_path / "d"), dataclasses.replace(options, **changes))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a.txt has text, and --vocab_size is for files of tokens"):
        prepare.prepare([str(tmp_path / "a.txt")], str(tmp_path / "d"), options)


def test_the_memory_does_not_grow_with_the_input(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_BATCH_CHARS", 1 << 13)
    monkeypatch.setattr(documents, "CHUNK_CHARS", 1 << 13)
    monkeypatch.setattr(documents, "_SNIFFED_BYTES", 1 << 13)
    monkeypatch.setattr(corpora, "_VERIFIED_AT_ONCE", 1 << 13)
    peaks = {}
    for name, line in (("lines", "x" * 99 + "\n"), ("one line", "y")):
        for size in (1, 4):
            path = tmp_path / f"{name} {size}.txt"
            path.write_text(line * (size * 400_000 // len(line)))
            tracemalloc.start()
            prepare.prepare([str(path)], str(tmp_path / f"{name} {size}"), prepare.Options(shard_bytes=1 << 17))
            peaks[name, size] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peaks[name, 4] - peaks[name, 1] < 0.1 * 1_200_000  # for the index; of text there are 1.2 MB more


# -- tokenizers


UGLY = [
    "def f(x):\n    return x  # Grüße, 世界 👩‍👩‍👧‍👦\n\n\n\t\t" * 60,
    "".join(chr(0x20 + n * 7919 % 0x2FFF * (n % 50 > 0)) for n in range(4000)),  # letters and marks of many scripts
    "e\u0301 " * 500 + " " * 90 + "\r\n" * 60 + "ﬁ İ ß " * 200,
    "The quick brown fox; " * 150 + "\0" * 50 + "1234567890" * 90 + " 🙂" * 200,
    "ab " * 1500,
]


@pytest.fixture(scope="module", params=["byte-level BPE", "Unigram", "WordPiece"])
def trained(request, tmp_path_factory) -> tokenization.Tokenizer:
    """A small tokenizer of each kind, with the pieces around the model that published ones have."""
    models, trainers, split, normal = (
        tokenizers.models,
        tokenizers.trainers,
        tokenizers.pre_tokenizers,
        tokenizers.normalizers,
    )
    made = {
        "byte-level BPE": lambda: tokenizers.Tokenizer(models.BPE()),
        "Unigram": lambda: tokenizers.Tokenizer(models.Unigram()),
        "WordPiece": lambda: tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]")),
    }[request.param]()
    common = dict(vocab_size=500, show_progress=False)
    if request.param == "byte-level BPE":
        made.pre_tokenizer, made.decoder = split.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
        alphabet = sorted(split.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, **common)
    elif request.param == "Unigram":
        made.normalizer, made.pre_tokenizer = normal.NFKC(), split.Metaspace()
        trainer = trainers.UnigramTrainer(special_tokens=["<unk>", "</s>"], unk_token="<unk>", **common)
    else:
        made.normalizer, made.pre_tokenizer = normal.BertNormalizer(), split.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[EOS]"], **common)
    made.train_from_iterator(UGLY[0:1] + UGLY[2:], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return tokenization.open_tokenizer(str(path))


@pytest.mark.parametrize("text", UGLY, ids=range(len(UGLY)))
def test_windows_of_a_text_have_the_tokens_of_the_text(trained, monkeypatch, text):
    monkeypatch.setattr(prepare, "_OVERLAPS", (150, 300, 600))
    for size in (700, 1111):
        windows = prepare._Windows(trained)
        tokens = [windows.add(text[start : start + size]) for start in range(0, len(text), size)]
        assert windows.num_cuts == 0
        assert np.concatenate([*tokens, windows.end()]).tolist() == trained.encode([text])[0].tolist()


@pytest.mark.parametrize("trained", ["byte-level BPE"], indirect=True)
def test_windows_that_never_agree_are_cut_and_counted(trained, monkeypatch):
    monkeypatch.setattr(prepare, "_OVERLAPS", (10, 20))  # fewer tokens than have to agree
    windows, text = prepare._Windows(trained), UGLY[3]
    tokens = [windows.add(text[start : start + 500]) for start in range(0, len(text), 500)]
    assert windows.num_cuts == len(tokens) - 1
    assert trained.decode(np.concatenate([*tokens, windows.end()])) == text


def test_a_corpus_of_a_tokenizer_has_its_text(trained, tmp_path):
    texts = [text[:400] for text in UGLY]
    write_json_lines(tmp_path / "a.jsonl", texts)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained.content)
    options = prepare.Options(tokenizer=str(path), held_out=0.001)
    corpus, _ = prepare.prepare([str(tmp_path / "a.jsonl")], str(tmp_path / "c"), options)
    expected = [trained.encode([text])[0].tolist() for text in texts]
    tokens = corpus.train[:].astype(int)
    read = [document.tolist()[1:] for document in np.split(tokens, np.flatnonzero(tokens == trained.separator)[1:])]
    assert (
        sum(document == wanted for document, wanted in zip(read, expected, strict=True)) == len(texts) - 1
    )  # one is cut
    assert corpus.tokenizer.identity == trained.identity and corpus.tokenizer.separator == corpus.separator
    assert corpora.open_corpus(str(tmp_path / "c")).tokenizer.decode(tokens) == trained.decode(tokens)
    content = json.loads(path.read_bytes())
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "c" / corpora.TOKENIZER).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer.json has identity \w+, and the corpus was made with \w+: put"):
        corpora.open_corpus(str(tmp_path / "c")).tokenizer  # noqa: B018


# -- what is reported


def test_the_line_of_progress():
    line = prepare.progress_line(10, 4_000_000_000, 1_000_000_000, 2_000_000_000, 500_000)
    assert line == "1,000 of 4,000 MB (25%)  50,000 tokens/s  200.0 MB/s  0:00:30 left"
    assert prepare.progress_line(3, 4_000_000, 100, 0, 0) == "0 of 4 MB (0%)  0 tokens/s  0.0 MB/s  ? left"


def test_the_benchmark_measures_all_processes(tmp_path):
    holds = "x = b'x' * 30_000_000; import time; time.sleep(1)"
    child = f'import subprocess, sys; subprocess.run([sys.executable, "-c", "{holds}"])'
    figures = benchmark.measured(sys.executable, "-c", child)
    assert 35e6 < figures["peak_bytes"] < 80e6 and 1 < figures["seconds"] < 30
    row = dict(seconds=10, cpu_seconds=20, peak_bytes=5e8, load=[1.2, 3.4], text_bytes=4e7, workers=2)
    lines = benchmark.table(dict(machine="a machine", rows={"a text": row})).splitlines()
    assert lines[-1] == "| a text | 40 | 2 | 2.00 | 4.00 | 500 | 1 to 3 |"
    assert 1e5 <= benchmark.write_text(tmp_path / "text.jsonl", 100_000) < 1e6


def test_check_reads_all_of_a_corpus(tmp_path, monkeypatch):
    (tmp_path / "fox.txt").write_text("The quick brown fox. " * 20_000)
    prepare.prepare([str(tmp_path / "fox.txt")], str(tmp_path / "c"))
    assert "every block has its checksum" in run_cli("check", tmp_path / "c").stdout
    shard = tmp_path / "c" / "00000-000.bin"
    content = bytearray(shard.read_bytes())
    content[500_000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(corpora.DamagedError, match=r"00000-000.bin is damaged: its tokens 229376 to 262143 are not"):
        corpora.open_corpus(str(tmp_path / "c"))
    monkeypatch.setattr(corpora, "_SMALL_BYTES", 1000)
    corpus = corpora.open_corpus(str(tmp_path / "c"))
    with pytest.raises(corpora.DamagedError, match=r"its tokens 229376 to 262143 are not those"):
        corpora.verify(corpus)


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
