"""Small tokenizers of four published models, and the ids that transformers gives with them: tests/tokenizer_kinds.

    python benchmarks/tokenizer_kinds.py record     makes and stores them; needs transformers (extra [parity])
    python benchmarks/tokenizer_kinds.py            what is stored, and how many ids are those of transformers

transformers builds each tokenizer, as the class of that model does, from a vocabulary that is trained here on this
project's pages. It saves the tokenizer as a folder and encodes TEXTS, and tests/test_tokenization.py compares.

| model | kind |
|---|---|
| gpt2 | byte-level BPE, GPT-2's split into words |
| qwen2 | byte-level BPE, Llama 3's kind of split, NFC |
| gemma | BPE of characters that falls back to bytes |
| t5 | Unigram with Metaspace |
| bert | WordPiece, lowercase |
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import command
import tokenization

STORED = ROOT / "tests/tokenizer_kinds"
VOCAB_SIZE = 500
MODELS = ("gpt2", "qwen2", "gemma", "t5", "bert")
TEXTS = [
    "",
    "The step gathers each layer's weights, and reduces their gradients.",
    "def main() -> None:\n    for i in range(1024):\n\treturn i**2 + 0x7F  # 3.14159\n",
    "  two  spaces,\ttabs\t\t, lines\r\n\r\n\n and the end   ",
    "It's we'LL they've; A.B.C. (e.g. 12345678 or 1,234.5%) -- ok?!...",
    "Gr\u00fc\u00dfe, \u4e16\u754c! \U0001f600\U0001f469\u200d\U0001f4bb \u00e9 e\u0301 \ufb01 \u2581 \u05e9\u05dd",
    "\0 \x01\x7f \ufeff\u00a0\u2028 \ufffd",
    "a<|endoftext|>b </s> c [SEP] d<eos><bos>e [MASK] <unk> <extra_id_0> <0x41>",
    "x" * 300 + " " * 50 + "=" * 70,
]


def record() -> None:
    """Makes, stores and encodes. Raises ValueError where transformers is missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError:
        raise ValueError("transformers is not installed, which makes them: pip install -e '.[parity]'") from None
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    ids = {}
    for model in MODELS:
        made = _made(model, texts, transformers)
        with tempfile.TemporaryDirectory() as folder:
            made.save_pretrained(folder)
            made = transformers.AutoTokenizer.from_pretrained(folder)
            shutil.rmtree(STORED / model, ignore_errors=True)
            (STORED / model).mkdir(parents=True)
            values = json.loads(Path(folder, "tokenizer.json").read_text())
            (STORED / model / "tokenizer.json").write_text(json.dumps(values) + "\n")
            shutil.copy(Path(folder, "tokenizer_config.json"), STORED / model)
        ids[model] = [
            dict(
                plain=(plain := made(text, add_special_tokens=False)["input_ids"]),
                prompt=made(text)["input_ids"],
                text=made.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False),
            )
            for text in TEXTS
        ]
    recorded = dict(transformers=transformers.__version__, ids=ids)
    (STORED / "ids.json").write_text(json.dumps(recorded) + "\n")


def _made(model: str, texts: list[str], transformers):
    """The transformers tokenizer of a model, with a vocabulary trained on texts."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    if model in ("gpt2", "qwen2", "gemma"):
        library, special = tokenizers.Tokenizer(models.BPE()), {"gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]}
        special = special.get(model, ["<|endoftext|>"])
        options = dict(vocab_size=VOCAB_SIZE, show_progress=False, special_tokens=special)
        if model == "gemma":
            special += [f"<0x{byte:02X}>" for byte in range(256)]
            library.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        else:
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            options["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
        library.train_from_iterator(texts, trainers.BpeTrainer(**options))
        trained = json.loads(library.to_str())["model"]
        classes = dict(gpt2="GPT2Tokenizer", qwen2="Qwen2Tokenizer", gemma="GemmaTokenizer")
        merges = [tuple(pair) for pair in trained["merges"]]
        return getattr(transformers, classes[model])(vocab=trained["vocab"], merges=merges)
    if model == "t5":
        library = tokenizers.Tokenizer(models.Unigram())
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ["<pad>", "</s>", "<unk>"]
        options = dict(vocab_size=VOCAB_SIZE, show_progress=False, special_tokens=special, unk_token="<unk>")
        library.train_from_iterator(texts, trainers.UnigramTrainer(**options))
        vocabulary = [tuple(pair) for pair in json.loads(library.to_str())["model"]["vocab"]]
        return transformers.T5Tokenizer(vocab=[*vocabulary, ("<extra_id_0>", 0.0)], extra_ids=1)
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    options = dict(vocab_size=VOCAB_SIZE, show_progress=False, special_tokens=special)
    library.train_from_iterator(texts, trainers.WordPieceTrainer(**options))
    return transformers.BertTokenizer(vocab=library.get_vocab())


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("command", nargs="?", choices=("table", "record"), default="table", help="[%(default)s]")
    if command.arguments(parser).command == "record":
        record()
    recorded = json.loads((STORED / "ids.json").read_text())
    for model, texts in recorded["ids"].items():
        tokenizer = tokenization.open_tokenizer(str(STORED / model), "[SEP]" if model == "bert" else None)
        same = [tokens.tolist() == text["plain"] for tokens, text in zip(tokenizer.encode(TEXTS), texts, strict=True)]
        count = sum(len(text["plain"]) for text in texts)
        print(
            f"{model:6} {sum(same)} of {len(same)} texts, of {count:,} ids, are encoded as by transformers "
            f"{recorded['transformers']}; separator {tokenizer.separator}"
        )


if __name__ == "__main__":
    command.run(main)
