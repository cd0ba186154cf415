"""Tokenization: text to tokens and back, by the tokenizer.json of a published model, one trained here, or as bytes.

    python data.py tokenizer PATH... --vocab_size=32000 --out=tokenizer.json        train one

**Idea.** A tokenizer.json says which pieces of text are tokens, and in which order they are merged. The library
`tokenizers` reads that file and gives the ids that transformers gives. A tokenizer here has one thing more: the
separator, which is the token that starts every document of a corpus. Bytes are a tokenizer, too, with 256 tokens. Their
separator is the byte 255, which no UTF-8 text contains.

**Separator.** The files of a model may declare an end-of-text token, and chat models declare the end of a message. So a
declared token is taken if it is among the well-known names below, else a well-known name that the tokenizer has, else
the declared one (end before beginning). If there is none, the error lists the special tokens: --separator=TOKEN.

**Identity.** A hash of what decides the ids: the JSON without padding, truncation and the template of special tokens,
none of which are applied here. Two files that differ only in layout have the same identity.

**Training.** Byte-level BPE (Sennrich et al. 2016; GPT-2's bytes and split into words): the most frequent pair of
neighbouring tokens becomes a token, again and again, until the vocabulary has its size.

**Cost.** A core encodes 1.2 to 1.4 MB/s of Python source with a BPE of 4,096 (measured, AMD EPYC). Training counts the
distinct words, so its memory grows with these and not with the text: 103 MiB at the peak for 12 MB of source, 109 MiB
for six times that, with the same words (measured).

**Left out.** A beginning-of-text and an end-of-text token around each document: one separator is for both. Files of
sentencepiece and tiktoken without a tokenizer.json.

**Source.** The format and the algorithms: github.com/huggingface/tokenizers.
"""

import argparse
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

import command
import documents
import outputs

BYTE_SEPARATOR = 255  # starts a document in a corpus of bytes: no UTF-8 text has this byte
NO_NEED = ""  # as a separator: the end-of-text token, if there is one
END_OF_TEXT = "<|endoftext|>"  # the separator of tokenizers that are trained here
# The end of a document in GPT-2 and Qwen, Llama 3, Llama 2 and T5, Gemma, DeepSeek, and others.
WELL_KNOWN = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
WELL_KNOWN += ("<|eos|>", "[EOS]", "<EOS>")
_PIECE = 1 << 16  # characters that the training of a tokenizer takes at a time; the library collects 256 of them
_PIECE_BYTES = 64 << 20  # of a file that is read at a time, in chunks
_SHOWN = 20  # candidates in a message


class NotInstalledError(ValueError):
    """The library that reads a tokenizer.json is missing."""


class Tokenizer:
    """A tokenizer.json and the separator of documents.

    Attributes:
      name: what messages call it.
      identity: a hash of what decides the ids.
      vocab_size: the largest id, plus one.
      separator: id of the token that starts each document of a corpus; -1 if there is none, and none is needed.
      special_tokens: {text: id} of the tokens that are no text.
    """

    def __init__(self, name: str, content: bytes, declared: list[str | int], separator: str | None):
        self.name, self.content = name, content
        self._decided = _decided(name, content)
        self.identity = _hash(self._decided)
        self._library = _loaded(name, content)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = self._library.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in sorted(added.items()) if token.special}
        self.separator = self._separator(vocabulary, declared, separator)

    @property
    def separator_text(self) -> str:
        return self._library.id_to_token(self.separator)

    def _separator(self, vocabulary: dict[str, int], declared: list[str | int], asked: str | None) -> int:
        text_of = {number: text for text, number in vocabulary.items()}
        candidates = ", ".join(list(self.special_tokens)[:_SHOWN]) or "none"
        if asked:
            if asked not in vocabulary:
                raise ValueError(
                    f"{self.name} has no token {asked!r} to separate documents; its special tokens are {candidates}"
                )
            return vocabulary[asked]
        texts = [text_of.get(token) if isinstance(token, int) else token for token in declared]
        texts = [text for text in texts if text in vocabulary]
        known = [text for text in WELL_KNOWN if text in vocabulary]
        if not (chosen := [text for text in texts if text in WELL_KNOWN] + known + texts):
            if asked == NO_NEED:
                return -1
            raise ValueError(
                f"{self.name} has no end-of-text token, which starts every document of a corpus; name one with "
                f"--separator=TOKEN: its special tokens are {candidates}"
            )
        return vocabulary[chosen[0]]

    def encode(self, texts: list[str], add_special_tokens: bool = False) -> list[np.ndarray]:
        """The ids of each text, uint32 [tokens], as transformers gives them.

        A special token that is spelled in a text becomes that token. Lone surrogates are encoded as U+FFFD.

        Args:
          add_special_tokens: adds those that the file's template puts around a prompt, such as one at the beginning.
        """
        texts = [without_surrogates(text) for text in texts]
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids [tokens], offsets [tokens, 2]): the characters of the text, from and to, that each id is of."""
        encoding = self._library.encode(without_surrogates(text), add_special_tokens=False)
        return np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def save(self, folder) -> None:
        """Writes tokenizer.json, and the separator in tokenizer_config.json, to a folder (Path, or epath of a bucket).

        Raises OSError where they cannot be written.
        """
        text = self.separator_text
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": text, "separator": text}
        settings = json.dumps(settings, indent=1).encode()
        for name, content in (("tokenizer_config.json", settings), ("tokenizer.json", self.content)):
            if isinstance(folder, Path):
                with outputs.replacing(folder / name, "wb") as file:
                    file.write(content)
            else:
                (folder / name).write_bytes(content)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, with the separator as a line of its own. An id outside the vocabulary is left out."""
        pieces, documents = [], [[]]
        for token in map(int, tokens):
            if token == self.separator:
                documents.append([])
            else:
                documents[-1].append(token)
        for document in documents:
            pieces.append(self._library.decode(document, skip_special_tokens=False) if document else "")
        return "\n----\n".join(pieces)

    def num_bytes(self, tokens: np.ndarray) -> int | None:
        """Bytes of UTF-8 that the tokens have; special tokens have none. None where a token has no fixed text."""
        return None if self._token_bytes is None else int(self._token_bytes[np.asarray(tokens).astype(np.int64)].sum())

    @functools.cached_property
    def _token_bytes(self) -> np.ndarray | None:
        """Bytes of each token, int64 [vocab_size]: of byte-level tokens, or of pieces that fall back to bytes."""
        decoders = self._decided.get("decoder") or {}
        kinds = {each.get("type") for each in (decoders, *decoders.get("decoders", ()))}
        if not kinds & {"ByteLevel", "ByteFallback"}:
            return None
        sizes, added = np.zeros(self.vocab_size, np.int64), self._library.get_added_tokens_decoder()
        for text, number in self._library.get_vocab(with_added_tokens=False).items():
            if "ByteLevel" in kinds:  # a character for each byte
                sizes[number] = len(text)
            else:
                is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
                sizes[number] = 1 if is_byte else len(text.replace("\u2581", " ").encode())
        for number, token in added.items():
            sizes[number] = 0 if token.special else len(token.content.encode())
        sizes[self.separator] = 0 if self.separator >= 0 else sizes[-1]
        return sizes


class ByteTokenizer:
    """Bytes as tokens, with the interface of Tokenizer."""

    name, identity, vocab_size, separator = "bytes", "bytes", 256, BYTE_SEPARATOR
    special_tokens: dict[str, int] = {}  # noqa: RUF012

    def encode(self, texts: list[str], add_special_tokens: bool = False) -> list[np.ndarray]:
        return [np.frombuffer(without_surrogates(text).encode(), np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        content = bytes(int(token) for token in tokens)
        return content.replace(bytes([BYTE_SEPARATOR]), b"\n----\n").decode(errors="replace")

    def num_bytes(self, tokens: np.ndarray) -> int:
        return int(np.count_nonzero(np.asarray(tokens) != BYTE_SEPARATOR))


BYTES = ByteTokenizer()


class Incremental:
    """Decodes tokens that come one chunk after the other: the texts of the calls, joined, are the text of all tokens.

    A character whose bytes are not complete waits for the next call. Only the last few tokens are decoded again.
    """

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer, context: Iterable[int] = ()):
        """`context` precedes the tokens and is not returned: a word's first token may decode without its space."""
        self._decode, self._tokens = tokenizer.decode, [int(token) for token in context][-16:]
        self._shown = self._decode(self._tokens)

    def __call__(self, tokens: Iterable[int], at_end: bool = False) -> str:
        new = [int(token) for token in tokens]
        self._tokens += new
        text = self._decode(self._tokens)
        if text.endswith("\ufffd") and not at_end:
            return ""
        more = text[len(self._shown) :]
        if new:
            self._tokens = self._tokens[-max(len(new), 16) :]
            self._shown = self._decode(self._tokens)
        return more


def without_surrogates(text: str) -> str:
    """A text that UTF-8 can encode: pairs of surrogates become their character, and lone ones U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


# -- files


def open_tokenizer(path, separator: str | None = None, name: str = "") -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of the folder that has one; a path, or an epath of a bucket.

    Args:
      separator: the token that starts each document; None takes that of `Tokenizer.save`, or the end-of-text token;
        NO_NEED does, too, but a tokenizer without any is opened, to show text.
      name: what messages call it, instead of its path.

    Raises:
      ValueError: it is no tokenizer, has no end-of-text token, or the library `tokenizers` is missing.
      OSError: it cannot be read.
    """
    file = file_of(path)
    saved = _settings(file.parent, "tokenizer_config.json").get("separator")
    separator = saved if not separator and isinstance(saved, str) else separator
    return Tokenizer(name or str(path), file.read_bytes(), _declared(file.parent), separator)


def file_of(path) -> Path:
    """The tokenizer.json that a path names or has. Raises ValueError where it is not there, or no ordinary file."""
    path = Path(path) if isinstance(path, str) else path
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ValueError(
            f"{path} has no tokenizer.json; transformers writes one: AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(DIR)"
        )
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no ordinary file: name a tokenizer.json")
    return file


def identity_of(path: str) -> str:
    """The identity of a tokenizer.json without loading it. Raises as open_tokenizer."""
    return _hash(_decided(path, file_of(path).read_bytes()))


def saved_separator(folder) -> int | None:
    """The id of the separator that `Tokenizer.save` wrote to a folder, without loading it; None where there is none."""
    text, added = _settings(folder, "tokenizer_config.json").get("separator"), _settings(folder, "tokenizer.json")
    tokens = added.get("added_tokens") or []
    return next((token["id"] for token in tokens if token["content"] == text), None)


def _decided(name: str, content: bytes) -> dict:
    """Returns the parts of a tokenizer.json that decide the ids. Raises ValueError for any other content."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no tokenizer.json: {error}") from None
    if not isinstance(values, dict) or not isinstance(model := values.get("model"), dict):
        raise ValueError(f"{name} is no tokenizer.json: it has no object 'model'")
    unused = {"version", "truncation", "padding", "post_processor"}
    decided = {key: value for key, value in values.items() if key not in unused}
    if isinstance(merges := model.get("merges"), list):  # "a b" in older files
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
        decided["model"] = model | {"merges": pairs}
    return decided


def _hash(values: dict) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def _library():
    try:
        import tokenizers
    except ImportError:
        raise NotInstalledError(
            "tokenizers is not installed, which reads a tokenizer.json: pip install -e '.[data]'"
        ) from None
    return tokenizers


def _loaded(name: str, content: bytes):
    """The library's tokenizer. Raises ValueError with the library's reason."""
    library = _library()
    try:
        loaded = library.Tokenizer.from_str(content.decode())
        loaded.no_truncation()
        loaded.no_padding()
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{name} is no tokenizer.json: {' '.join(str(error).split())}") from None
    return loaded


def _settings(folder: Path, name: str) -> dict:
    """The object in a JSON file beside a tokenizer.json; empty where there is none."""
    try:
        values = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _declared(folder: Path) -> list[str | int]:
    """The end-of-text tokens that the files beside a tokenizer.json name, then those of the beginning: text or id."""
    declared = {"eos": [], "bos": []}
    for file in ("tokenizer_config.json", "config.json", "generation_config.json"):
        values = _settings(folder, file)
        for kind, tokens in declared.items():
            for value in (values.get(f"{kind}_token"), values.get(f"{kind}_token_id")):
                value = value.get("content") if isinstance(value, dict) else value
                tokens += [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    return [token for token in declared["eos"] + declared["bos"] if isinstance(token, str | int)]


# -- training


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out: str, report: Callable[[int, str], None] = lambda n, stage: None
) -> Tokenizer:
    """Trains a byte-level BPE on documents, and writes it as a tokenizer.json; the same documents give the same file.

    Args:
      texts: the documents, read once.
      vocab_size: with the 256 bytes and the end-of-text token.
      report: called with (bytes of text read, what is being done) as it goes on.

    Raises:
      ValueError: the vocabulary is too small, the text has too few pairs for it, or there is no text.
      OSError: a text cannot be read, or `out` not written.
    """
    library = _library()
    if vocab_size < 257:
        raise ValueError(f"vocab_size={vocab_size} has no place for the 256 bytes and {END_OF_TEXT}: at least 257")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
    )
    counted = _Counted(texts, report)
    tokenizer.train_from_iterator(iter(counted), trainer=trainer)
    if counted.error:
        raise counted.error
    if not counted.num_bytes:
        raise ValueError("there is no text to train a tokenizer on")
    if (size := tokenizer.get_vocab_size()) < vocab_size:
        raise ValueError(
            f"{counted.num_bytes:,} bytes of text give a vocabulary of {size:,}, and not of {vocab_size:,}: "
            f"--vocab_size={size} at most, or more text"
        )
    with outputs.replacing(out) as file:
        file.write(tokenizer.to_str(pretty=True) + "\n")
    return open_tokenizer(out)


class _Counted:
    """The pieces of documents, counted; an error ends them and is saved, since the library would replace it."""

    def __init__(self, texts: Iterable[str], report: Callable[[int, str], None]):
        self.texts, self.report, self.num_bytes = texts, report, 0
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        said = time.perf_counter()
        try:
            for text in self.texts:
                start = 0
                while start < len(text):
                    stop = start + _PIECE  # or after the last line before it, so that no word is cut
                    stop = (stop < len(text) and text.rfind("\n", start, stop) + 1) or stop
                    piece = without_surrogates(text[start:stop])
                    start = stop
                    self.num_bytes += len(piece.encode())
                    yield piece
                    if time.perf_counter() - said > 1:
                        said = time.perf_counter()
                        self.report(self.num_bytes, "reading")
        except Exception as error:
            self.error = error
        self.report(self.num_bytes, "merging")


def texts_of(
    inputs: list[documents.Input], kinds: documents.Kinds, most_bytes: int, report: Callable[[int], None]
) -> Iterator[str]:
    """Yields the documents of files, long ones in chunks; if the files exceed `most_bytes`, some of them, evenly.

    Args:
      report: called with the bytes of the files that were read since.

    Raises as documents.read.
    """
    share = min(most_bytes / max(sum(file.size for file in inputs), 1), 1.0)
    seen = taken = 0
    for file in inputs:
        try:
            for piece in documents.pieces_of(file, kinds, _PIECE_BYTES):
                for chunk in documents.read(piece, kinds, report):
                    seen += len(chunk.content)
                    if taken < share * seen:
                        taken += len(chunk.content)
                        yield chunk.content
        except documents.NoTextError:
            if file.is_named:
                raise


class _Progress:
    """Shows how much of the files is read, the speed and the time left: on a terminal in one line, else every 10 s."""

    def __init__(self, total: int):
        self.total, self.read, self.begun = total, 0, time.perf_counter()
        self.shown, self.terminal = self.begun, sys.stdout.isatty()

    def add(self, num_bytes: int) -> None:
        self.read += num_bytes
        if (now := time.perf_counter()) - self.shown > (0.5 if self.terminal else 10):
            self.shown, rate = now, self.read / (now - self.begun)
            left = (self.total - self.read) / rate
            self.say(
                f"read {self.read / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s, {left:,.0f} s left"
            )

    def say(self, text: str, end: str = "") -> None:
        command.say(f"\r\033[K{text}" if self.terminal else text, end=end if self.terminal else "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python data.py tokenizer`."""
    add = parser.add_argument
    about = "text, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, or a folder of them"
    add("paths", type=command.path, nargs="+", metavar="PATH", help=about)
    add("--out", type=command.path, required=True, metavar="FILE", help="the tokenizer.json")
    about = f"tokens, with the 256 bytes and {END_OF_TEXT} [%(default)s]"
    add("--vocab_size", type=command.size, default=32_000, metavar="INT", help=about)
    add("--text_key", default="text", help="key or column of the text in JSON or Parquet [%(default)s]")
    about = "of more than these bytes, train on this part, of all files evenly [%(default)s]"
    add("--most_bytes", type=command.size, default=10**9, metavar="INT", help=about)


def run(args: argparse.Namespace) -> None:
    """Runs `python data.py tokenizer`. Raises as train_tokenizer and documents.read, and where --out is an input."""
    outputs.check_apart({"--out": args.out}, {f"the text {path}": path for path in args.paths})
    outputs.check_writable(f"--out={args.out}", args.out)
    kinds = documents.Kinds(args.text_key)
    inputs, skipped = documents.inputs_of(args.paths, kinds)
    for path in skipped:
        print(f"left out, no UTF-8 text: {path}")
    progress = _Progress(sum(file.size for file in inputs))
    command.end_at_once_when_interrupted()  # the library would merge on

    def report(num_bytes: int, stage: str) -> None:
        if stage == "merging":
            progress.say(f"merging    the most frequent pairs of {num_bytes / 1e6:,.1f} MB of text")

    texts = texts_of(inputs, kinds, args.most_bytes, progress.add)
    tokenizer = train_tokenizer(texts, args.vocab_size, args.out, report)
    progress.say(f"tokenizer  {args.out}: {tokenizer.vocab_size:,} tokens, identity {tokenizer.identity}", end="\n")
    print(f"separator  {END_OF_TEXT}; next: python data.py prepare PATH... --tokenizer={args.out} --out=DIR")
