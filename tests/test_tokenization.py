"""Tests tokenizers: ids as transformers gives them, text that comes back, separators, and what is refused."""

import pytest

import tokenization

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
