"""Bytes or a BPE as tokens: the bits a byte that `tiny` reaches with either, for the same FLOPs.

    python benchmarks/bits_a_byte.py                 the table of stored runs; runs nothing
    python benchmarks/bits_a_byte.py run             trains the tokenizer and both models (5 minutes on 2 idle cores)

The text is the source of Python's standard library. A byte-level BPE of 4,096 tokens is trained on its training part,
and both parts are encoded with it, so both models are trained and evaluated on the same documents. Batch, sequence
length in tokens, learning rate and seed are the defaults. A token of the BPE takes more FLOPs, because the loss is over
more tokens. So its run has fewer steps: both have the FLOPs of --steps steps of the byte model, as predicted. All
held-out text is evaluated. Measured on one device of a CPU; the losses do not depend on its speed.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import command
import corpora
import outputs
import tokenization
from config import Config
from predicted.transformer import train_flops_per_token

RECORDED = ROOT / "benchmarks/bits_a_byte.json"
VOCAB_SIZE = 4096
STEPS = 300
ALL = 10**6  # batches of an evaluation: more than there are


def encode(library: corpora.Corpus, folder: Path) -> corpora.Corpus:
    """Writes the documents of a corpus of bytes with the tokens of a BPE trained on those to train on."""
    parts = [bytes(part[:]).split(bytes([library.separator]))[1:] for part in (library.train, library.held_out)]
    train, held_out = ([document.decode() for document in part] for part in parts)
    tokenizer = tokenization.train_tokenizer(train, VOCAB_SIZE, str(folder / corpora.TOKENIZER))
    vocabulary = dict(vocab_size=tokenizer.vocab_size, separator=tokenizer.separator)
    shard = corpora.write_corpus(str(folder / "00000.bin"), *map(tokenizer.encode, (train, held_out)), **vocabulary)
    listed = dict(file="00000.bin", train=len(shard.train), held_out=len(shard.held_out), identity=shard.identity)
    special = dict(identity=tokenizer.identity, special_tokens=tokenizer.special_tokens)
    corpora.write_index(str(folder), [listed], **vocabulary, tokenizer=special)
    return corpora.open_corpus(str(folder))


def trained(tokens: str, corpus: str, vocab_size: int, steps: int) -> dict:
    """The figures of a run of train.py, whose lines are shown meanwhile."""
    flags = [f"--corpus={corpus}", f"--vocab_size={vocab_size}", f"--steps={steps}", "--mesh=data:1"]
    flags += ["--eval_every=0", f"--eval_batches={ALL}"]
    lines = []
    with subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise OSError(f"train.py ended with status {process.returncode}")
    text = "".join(lines)
    loss, bits, size = (
        float(re.search(pattern, text)[1])
        for pattern in (r"held-out   loss ([\d.]+)", r"text       ([\d.]+) bits", r"([\d.]+) bytes a token")
    )
    config = Config(vocab_size=vocab_size)
    return dict(
        tokens=tokens,
        parameters=int(re.search(r"([\d,]+) parameters", text)[1].replace(",", "")),
        flops=train_flops_per_token(config) * steps * config.batch * config.seq_len,
        steps=steps,
        trained_bytes=size * steps * config.batch * config.seq_len,
        loss=loss,
        bits_a_byte=bits,
        bytes_a_token=size,
        sample=re.search(r"after >>>:\n(.*)\nin all ", text, re.DOTALL)[1],
    )


def run(steps: int) -> None:
    library = corpora.standard_library()
    flops = {size: train_flops_per_token(Config(vocab_size=size)) for size in (library.vocab_size, VOCAB_SIZE)}
    with tempfile.TemporaryDirectory() as folder:
        corpus = encode(library, Path(folder))
        both = [
            trained("bytes", "", library.vocab_size, steps),
            trained(f"BPE of {VOCAB_SIZE:,}", corpus.name, VOCAB_SIZE, round(steps * flops[256] / flops[VOCAB_SIZE])),
        ]
    with outputs.replacing(RECORDED) as file:
        json.dump(dict(text=library.name, runs=both), file, indent=1)
        file.write("\n")


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("command", nargs="?", choices=("table", "run"), default="table", help="[%(default)s]")
    about = f"of the byte model, of a run [{STEPS}]"
    parser.add_argument("--steps", type=command.size, metavar="INT", help=about)
    args = command.arguments(parser)
    if args.command == "run":
        run(args.steps or STEPS)
    elif args.steps:
        raise ValueError(f"--steps={args.steps} is of a run: python benchmarks/bits_a_byte.py run --steps={args.steps}")
    with open(RECORDED, encoding="utf-8") as file:
        recorded = json.load(file)
    print("| tokens | parameters | TFLOP | steps | MB of text seen | nats a token | bytes a token | bits a byte |")
    print("|---|---|---|---|---|---|---|---|")
    for figures in recorded["runs"]:
        print(
            f"| {figures['tokens']} | {figures['parameters']:,} | {figures['flops'] / 1e12:.2f} | {figures['steps']} | "
            f"{figures['trained_bytes'] / 1e6:.2f} | {figures['loss']:.4f} | {figures['bytes_a_token']:.3f} | "
            f"{figures['bits_a_byte']:.4f} |"
        )
    print(f"\nThe sample of the model of the BPE, after `>>>`, on {recorded['text']}:\n")
    print(f"```\n{recorded['runs'][-1]['sample'].strip()}\n```")


if __name__ == "__main__":
    command.run(main)
