"""Measures the preparation of corpora: memory, rate, and the overhead over Hugging Face's datasets.

    python benchmarks/prepare.py run --datasets=VENV/bin/python     all rows of the table (an hour of 2 cores)
    python benchmarks/prepare.py run odd bytes                      some of them
    python benchmarks/prepare.py table                              the stored results, without running anything

The text is Python's standard library, repeated until it has the size, as JSON lines of one file each. In each copy the
underscores of names are followed by its number, so that words differ. The tokenizer is a byte-level BPE of 4,096 that
is trained on the library. `datasets` has the same library call (encode_batch_fast), tokenizer, and number of
processes, and the beginning of the same text; it writes ids without packing, checksums or an index. Memory is the sum
of the resident sets of all processes of a program, shared pages counted in each, every 50 ms. The rate a core is per
second of processor time, which depends less on what else runs than the time on the clock.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command
import tokenization
from benchmarks.faults import machine

RECORDED = ROOT / "benchmarks/prepare.json"
DATASETS = """
import sys, os
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
import datasets, tokenizers
text, tokenizer, folder, workers = sys.argv[1:]
library = tokenizers.Tokenizer.from_file(tokenizer)
encode = lambda rows: {"ids": [e.ids for e in library.encode_batch_fast(rows["text"], add_special_tokens=False)]}
rows = datasets.load_dataset("json", data_files=text, split="train", cache_dir=folder)
ids = rows.map(encode, batched=True, num_proc=int(workers), remove_columns=["text"])
print(len(ids))
"""


def library_texts() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not {"site-packages", "test"} & set(path.parts)]
    texts = []
    for path in files:
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(path.read_text("utf-8"))
    return texts


def write_text(path: Path, num_bytes: int) -> int:
    """Writes JSON lines with about this number of bytes of text. Returns that number."""
    texts, written = [text for text in library_texts() if text], 0
    with path.open("w") as file:
        for number in range(10**9):
            for text in texts:
                text = text.replace("_", f"_{number}") if number else text
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= num_bytes:
                    return written


def resident(process: int) -> int:
    """Bytes of the resident sets of a process and its descendants."""
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        total = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(map(resident, map(int, (task / "children").read_text().split())))
    return total


def measured(*words) -> dict:
    """Runs a program. Returns its seconds, processor seconds and largest resident memory."""
    spent = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    before, begun, load, peak = spent(), time.perf_counter(), os.getloadavg()[0], 0
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        ended = threading.Event()
        threading.Thread(target=lambda: (process.wait(), ended.set()), daemon=True).start()
        while not ended.wait(0.05):
            peak = max(peak, resident(process.pid))
        if process.returncode:
            errors.seek(0)
            raise OSError(f"{words[:4]} ended with status {process.returncode}: {errors.read()[-2000:].decode()}")
    return dict(
        seconds=time.perf_counter() - begun, cpu_seconds=spent() - before, peak_bytes=peak,
        load=[round(load, 1), round(os.getloadavg()[0], 1)],
    )  # fmt: skip


def prepared(text: Path, folder: Path, workers: int, *flags: str) -> dict:
    """Runs `python data.py prepare`. Returns what was measured, and the bytes of text and the tokens."""
    figures = measured(sys.executable, "data.py", "prepare", text, f"--out={folder}", f"--workers={workers}", *flags)
    index = json.loads((folder / "corpus.json").read_bytes())
    tokens = sum(shard["train"] + shard["held_out"] for shard in index["shards"])
    return figures | dict(text_bytes=index["text_bytes"], tokens=tokens, documents=index["documents"], workers=workers)


# -- the rows of the table


class Bench:
    """The state that the rows share: the folder in which they write, and the results."""

    def __init__(self, args, folder: Path):
        self.args, self.folder, self.workers = args, folder, args.workers
        self.tokenizer = folder / "tokenizer.json"
        self.rows = json.loads(args.results.read_text())["rows"] if args.results.exists() else {}

    def record(self, title: str, figures: dict) -> None:
        self.rows[title] = figures
        print(title, json.dumps(figures), flush=True)
        self.args.results.write_text(json.dumps(dict(machine=machine(), rows=self.rows), indent=1) + "\n")

    def text(self, megabytes: int) -> Path:
        write_text(self.folder / "text.jsonl", int(megabytes * 1e6))
        return self.folder / "text.jsonl"

    def prepare(self, title: str, path: Path, *flags: str) -> None:
        self.record(title, prepared(path, self.folder / "corpus", self.workers, *flags))
        shutil.rmtree(self.folder / "corpus")
        path.unlink()


def compared(bench: Bench) -> None:
    """The same text by both programs."""
    text, flag = bench.text(bench.args.compared), f"--tokenizer={bench.tokenizer}"
    ours = prepared(text, bench.folder / "corpus", bench.workers, flag)
    bench.record(f"data.py prepare, {bench.args.compared} MB by BPE", ours)
    if bench.args.datasets:
        words = [bench.args.datasets, "-c", DATASETS, text, bench.tokenizer, bench.folder / "cache", bench.workers]
        both = {key: ours[key] for key in ("text_bytes", "tokens", "workers")}
        bench.record(f"datasets, {bench.args.compared} MB by BPE", measured(*words) | both)
    shutil.rmtree(bench.folder / "corpus")


def bpe(bench: Bench) -> None:
    """A long text by the BPE."""
    title = f"data.py prepare, {bench.args.megabytes} MB by BPE"
    bench.prepare(title, bench.text(bench.args.megabytes), f"--tokenizer={bench.tokenizer}")


def as_bytes(bench: Bench) -> None:
    """2 GB as bytes, whose tokens take more memory than those of a BPE."""
    bench.prepare("data.py prepare, 2 GB as bytes", bench.text(2000))


def odd(bench: Bench) -> None:
    """A document of 1 GB in one line, and many short ones."""
    path = bench.folder / "one.txt"
    with path.open("w") as file:
        file.writelines(("x" * 99 + " ") * 1000 for _ in range(10_000))
    bench.prepare("data.py prepare, a document of 1 GB in one line, as bytes", path)
    path = bench.folder / "many.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"text": "document {number:>11}"}}\n' for number in range(10_000_000))
    bench.prepare("data.py prepare, 10 million documents of 20 bytes, as bytes", path)


ROWS = {"compared": compared, "odd": odd, "bytes": as_bytes, "bpe": bpe}


def run(args) -> None:
    command.check_names(args.rows, ROWS)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        bench = Bench(args, Path(name))
        tokenization.train_tokenizer(library_texts(), 4096, str(bench.tokenizer))
        for row in args.rows or ROWS:
            ROWS[row](bench)


def table(recorded: dict) -> str:
    lines = [f"On {recorded['machine']}, measured:", ""]
    lines += ["| program and input | MB | processes | MB/s a core | MB/s | peak memory, MB | load of the machine |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for title, row in recorded["rows"].items():
        megabytes = row["text_bytes"] / 1e6
        cells = [f"{megabytes:,.0f}", str(row["workers"]), f"{megabytes / row['cpu_seconds']:.2f}"]
        cells += [f"{megabytes / row['seconds']:.2f}", f"{row['peak_bytes'] / 1e6:,.0f}"]
        lines.append(f"| {title} | {' | '.join(cells)} | {row['load'][0]:.0f} to {row['load'][1]:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = command.parser(__file__)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="measure, and store the results")
    run_parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all: {', '.join(ROWS)}")
    about = "python of an environment with Hugging Face's datasets; without it that row is left out"
    run_parser.add_argument("--datasets", type=command.path, default="", metavar="PYTHON", help=about)
    run_parser.add_argument(
        "--megabytes", type=command.at_least(1), default=2000, help="text of the row bpe [%(default)s]"
    )
    run_parser.add_argument(
        "--compared", type=command.at_least(1), default=130, help="text that both programs read, MB [%(default)s]"
    )
    run_parser.add_argument("--workers", type=command.at_least(1), default=2, help="processes [%(default)s]")
    about = "where text and corpora are written, and removed"
    run_parser.add_argument("--folder", type=command.path, default=tempfile.gettempdir(), help=about)
    run_parser.add_argument("--results", type=Path, default=RECORDED, help="file of the results [%(default)s]")
    commands.add_parser("table", help="show the stored results")
    args = command.arguments(parser)
    if args.command == "table":
        print(table(json.loads(RECORDED.read_text())))
    else:
        run(args)


if __name__ == "__main__":
    command.run(main)
