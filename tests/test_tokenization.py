"""Tests tokenizers: ids as transformers gives them, text that comes back, separators, and what is refused."""

import json
import math
import sys
from pathlib import Path

import pytest

import data
import documents
import tokenization
from benchmarks import bits_a_byte, tokenizer_kinds

KINDS = Path(__file__).parent / "tokenizer_kinds"
RECORDED = json.loads((KINDS / "ids.json").read_text())["ids"]

TEXT = "def main():\n    return 'Gr\u00fc\u00dfe, \u4e16\u754c \U0001f600'\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tokenization.Tokenizer:
    out = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    return tokenization.train_tokenizer([TEXT * 3, "main return " * 9], 280, str(out))


def test_a_trained_tokenizer_returns_every_text(trained):
    assert (trained.vocab_size, trained.special_tokens) == (280, {"<|endoftext|>": trained.separator})
    for text in (TEXT, "", "\0", " \r\n\t", "\u00e9\u0301", "\ud800x"):
        tokens = trained.encode([text])[0]
        assert trained.decode(tokens) == text.replace("\ud800", "\ufffd")
        assert trained.num_bytes(tokens) == len(trained.decode(tokens).encode())
    assert len(trained.encode([TEXT])[0]) < len(TEXT.encode())


def test_bytes_return_every_text():
    tokens = tokenization.BYTES.encode([TEXT + "\ud800"])[0]
    assert tokenization.BYTES.decode(tokens) == TEXT + "\ufffd"
    assert tokenization.BYTES.num_bytes([255, *tokens]) == len((TEXT + "\ufffd").encode())


def test_a_separator_is_shown_as_a_line_and_a_broken_character_as_a_mark(trained):
    assert tokenization.BYTES.decode([255, *"Gr\u00fc\u00dfe".encode(), 255, 66]) == "\n----\nGr\u00fc\u00dfe\n----\nB"
    assert tokenization.BYTES.decode([0xC3, 66]) == "\ufffdB"
    main = trained.encode(["main"])[0]
    assert trained.decode([trained.separator, *main, trained.separator]) == "\n----\nmain\n----\n"


@pytest.mark.parametrize("kind", ["trained", "bytes"])
def test_text_that_comes_in_chunks_is_the_text(kind, trained):
    tokenizer = trained if kind == "trained" else tokenization.BYTES
    tokens = tokenizer.encode([TEXT * 3])[0]
    for size in (1, 3, 40):
        incremental = tokenization.Incremental(tokenizer)
        chunks = [incremental(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        assert "".join(chunks) + incremental([], at_end=True) == TEXT * 3


# -- tokenizers of published models


def of_kind(model: str) -> tokenization.Tokenizer:
    return tokenization.open_tokenizer(str(KINDS / model), "[SEP]" if model == "bert" else None)


@pytest.mark.parametrize("model", tokenizer_kinds.MODELS)
def test_ids_and_text_are_those_of_transformers(model):
    tokenizer = of_kind(model)
    for kind, special in (("plain", False), ("prompt", True)):
        ids = [tokens.tolist() for tokens in tokenizer.encode(tokenizer_kinds.TEXTS, add_special_tokens=special)]
        assert ids == [text[kind] for text in RECORDED[model]]
    for text in RECORDED[model]:
        if tokenizer.separator not in text["plain"]:
            assert tokenizer.decode(text["plain"]) == text["text"]
    sizes = [tokenizer.num_bytes(text["plain"]) for text in RECORDED[model][:7]]
    lengths = [len(text["text"].encode()) for text in RECORDED[model][:7]]
    assert sizes == (lengths if model in ("gpt2", "qwen2", "gemma") else [None] * 7)


def test_offsets_are_those_of_the_text():
    text = tokenizer_kinds.TEXTS[1]
    tokens, offsets = of_kind("gpt2").encode_with_offsets(text)
    assert tokens.tolist() == RECORDED["gpt2"][1]["plain"] and len(tokens) == len(offsets)
    assert "".join(text[start:stop] for start, stop in offsets) == text


@pytest.mark.parametrize("model", tokenizer_kinds.MODELS)
def test_chunks_of_every_kind_are_the_text(model):
    tokenizer, text = of_kind(model), RECORDED[model][2]
    incremental = tokenization.Incremental(tokenizer, text["plain"][:5])
    more = [incremental([token]) for token in text["plain"][5:]]
    assert tokenizer.decode(text["plain"][:5]) + "".join(more) + incremental([], at_end=True) == text["text"]


# -- the separator


def copy(model: str, folder: Path, settings: dict | None = None, change=lambda values: None) -> str:
    """Writes a tokenizer.json, changed, and a tokenizer_config.json to a folder, whose path it returns."""
    values = json.loads((KINDS / model / "tokenizer.json").read_text())
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values, indent=1))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    "model, settings, separator, chosen",
    [
        ("gpt2", {}, None, "<|endoftext|>"),
        ("gemma", {"eos_token": {"content": "<mask>"}}, None, "<eos>"),  # as a chat model: the end of its messages
        ("bert", {"eos_token": "[SEP]"}, None, "[SEP]"),
        ("bert", {"eos_token": None, "bos_token": "[CLS]"}, None, "[CLS]"),
        ("bert", {"eos_token_id": [2, 3]}, None, "[CLS]"),
        ("bert", {"eos_token": "[SEP]"}, "[MASK]", "[MASK]"),
        ("gemma", {"eos_token": "<eos>", "separator": "<bos>"}, None, "<bos>"),
    ],
)
def test_the_separator_is_an_end_of_text_token(tmp_path, model, settings, separator, chosen):
    tokenizer = tokenization.open_tokenizer(copy(model, tmp_path, settings), separator)
    assert tokenizer.separator == tokenizer.special_tokens[chosen]


def test_a_tokenizer_is_saved_with_its_separator(tmp_path):
    tokenization.open_tokenizer(str(KINDS / "bert"), "[MASK]").save(tmp_path)
    again = tokenization.open_tokenizer(str(tmp_path))
    assert again.separator == again.special_tokens["[MASK]"] and again.identity == of_kind("bert").identity


def test_without_an_end_of_text_the_candidates_are_listed(tmp_path):
    folder = copy("bert", tmp_path)
    with pytest.raises(ValueError, match=r"no end-of-text token.*--separator=TOKEN: .* \[PAD\], .*\[SEP\], \[MASK\]$"):
        tokenization.open_tokenizer(folder)
    with pytest.raises(ValueError, match=r"has no token '\[END\]' .*; its special tokens are \[PAD\]"):
        tokenization.open_tokenizer(folder, "[END]")


def test_a_tokenizer_without_a_separator_shows_text(tmp_path):
    tokenizer = tokenization.open_tokenizer(copy("bert", tmp_path), tokenization.NO_NEED)
    assert tokenizer.separator == -1
    assert tokenizer.decode(tokenizer.encode(["the step"], add_special_tokens=True)[0]) == "[CLS] the step [SEP]"


# -- identity


def test_the_identity_is_of_what_decides_the_ids(tmp_path, trained):
    def as_text(values):
        values["model"]["merges"] = [" ".join(pair) for pair in values["model"]["merges"]]
        values["padding"] = dict(strategy={"Fixed": 8}, direction="Right", pad_to_multiple_of=None, pad_id=0)
        values["padding"] |= dict(pad_type_id=0, pad_token="x")

    tokenizer = of_kind("gpt2")
    same = tokenization.open_tokenizer(copy("gpt2", tmp_path, change=as_text))
    assert same.identity == tokenizer.identity == tokenization.identity_of(str(tmp_path / "tokenizer.json"))
    assert same.encode(["a b"])[0].tolist() == tokenizer.encode(["a b"])[0].tolist()  # not padded to 8
    copy("gpt2", tmp_path, change=lambda values: values["model"]["merges"].pop())
    assert len({tokenization.identity_of(str(tmp_path)), tokenizer.identity, trained.identity}) == 3


# -- what is refused


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is no tokenizer.json: Expecting value"),
        (b"\xff\xfe", "is no tokenizer.json: "),
        (b"[" * 100_000, "is no tokenizer.json: "),
        (b"[1]", "is no tokenizer.json: it has no object 'model'"),
        (b'{"model": {"type": "BPE"}}', "is no tokenizer.json: "),
        (b'{"model": {"type": "Other", "vocab": {}}}', "is no tokenizer.json: "),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, content, words):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        tokenization.open_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


def test_paths_without_a_tokenizer_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has no tokenizer.json; transformers writes one"):
        tokenization.open_tokenizer(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        tokenization.open_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="/dev/null is no ordinary file"):
        tokenization.open_tokenizer("/dev/null")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(tokenization.NotInstalledError, match=r"pip install -e '\.\[data\]'"):
        of_kind("gpt2")


# -- training


def test_the_same_documents_give_the_same_tokenizer_in_pieces_too(tmp_path, trained, monkeypatch):
    stages = []
    monkeypatch.setattr(tokenization, "_PIECE", 1 << 10)
    text = (TEXT + "main return ") * 400
    again = [
        tokenization.train_tokenizer(
            iter([text, ""]), 290, str(tmp_path / name), lambda n, stage: stages.append((n, stage))
        )
        for name in "ab"
    ]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() and again[0].identity != trained.identity
    assert stages[-1] == (len(text.encode()), "merging")


@pytest.mark.parametrize(
    "texts, vocab_size, words",
    [
        (["a"], 256, "vocab_size=256 has no place for the 256 bytes .* at least 257"),
        ([], 300, "there is no text"),
        (["ab ab"], 300, r"5 bytes of text give a vocabulary of 2\d\d, and not of 300: --vocab_size=2\d\d at most"),
    ],
)
def test_a_vocabulary_that_the_text_has_not_is_refused(tmp_path, texts, vocab_size, words):
    with pytest.raises(ValueError, match=words):
        tokenization.train_tokenizer(texts, vocab_size, str(tmp_path / "tokenizer.json"))
    assert not [*tmp_path.iterdir()]


def test_an_error_of_a_document_is_raised_as_it_was(tmp_path):
    def texts():
        yield "a"
        raise OSError("it cannot be read")

    with pytest.raises(OSError, match="it cannot be read"):
        tokenization.train_tokenizer(texts(), 300, str(tmp_path / "tokenizer.json"))


def test_the_command_trains_on_files_evenly(tmp_path, capsys):
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"body": f"{TEXT}{i}"}) + "\n" for i in range(100)))
    (tmp_path / "noise.dat").write_bytes(b"\xff" * 9)
    flags = ["tokenizer", str(tmp_path), "--text_key=body", "--vocab_size=280", f"--out={tmp_path}-out/tokenizer.json"]
    tokenization.run(data.parser().parse_args(flags))
    said = capsys.readouterr().out
    assert "tokenizer.json: 280 tokens, identity" in said and "--tokenizer=" in said
    made = tokenization.open_tokenizer(f"{tmp_path}-out")
    assert made.decode(made.encode([TEXT])[0]) == TEXT and len(made.encode([TEXT])[0]) < len(TEXT.encode())
    kinds, read = documents.Kinds("body"), []
    inputs = documents.inputs_of([str(tmp_path)], kinds)[0]
    size = sum(file.size for file in inputs)
    some = [*tokenization.texts_of(inputs, kinds, size // 4, read.append)]
    numbers = [int(text.removeprefix(TEXT)) for text in some]
    assert numbers[0] == 0 and max(numbers) > 95 and 20 < len(numbers) < 30 and sum(read) >= size - 9


def test_a_named_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "noise.dat").write_bytes(b"a\xff" * 9)
    flags = ["tokenizer", str(tmp_path / "noise.dat"), f"--out={tmp_path}/tokenizer.json"]
    with pytest.raises(ValueError, match="is no UTF-8 text"):
        tokenization.run(data.parser().parse_args(flags))


@pytest.mark.parametrize("model", ["gpt2", "gemma"])
def test_special_tokens_have_no_bytes(model):
    tokenizer = of_kind(model)
    tokens = tokenizer.encode(["a", "Gr\u00fc\u00dfe \U0001f600"])
    special = [*tokenizer.special_tokens.values()]
    assert tokenizer.num_bytes([tokenizer.separator, *tokens[0], *special, *tokens[1]]) == len(
        "aGr\u00fc\u00dfe \U0001f600".encode()
    )


def test_the_stored_runs_of_bytes_and_of_a_bpe_compare():
    """They have the same FLOPs, but for a step, and bits a byte are those of the losses."""
    runs = json.loads(bits_a_byte.RECORDED.read_text())["runs"]
    by_bytes, by_bpe = runs
    assert abs(by_bytes["flops"] - by_bpe["flops"]) <= by_bpe["flops"] / by_bpe["steps"]
    for run in runs:
        bits = run["loss"] / math.log(2) / run["bytes_a_token"]
        assert run["bits_a_byte"] == pytest.approx(bits, rel=1e-3)
    assert by_bpe["bits_a_byte"] < by_bytes["bits_a_byte"]
