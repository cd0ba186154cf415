"""A step of `tiny` with one sequence of 65,536 tokens on 8 simulated devices, context:8: minutes, and its memory.

    python benchmarks/long_context.py

All scores of a head would take 17 GB at once; context.py's attention without a kernel takes some queries at a time.
`python benchmarks/cases.py 128k lengths` has long sequences on TPU7x, predicted and compiled.
"""

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command

FLAGS = "--mesh=context:8 --seq_len=65536 --batch=1 --steps=1 --remat=full --eval_batches=0 --sample=0 --log_every=1"


def main() -> None:
    command.arguments(command.parser(__file__))
    subprocess.run([sys.executable, "train.py", *FLAGS.split(), "--compilation_cache="], cwd=ROOT, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"at most {peak / 2**30:.1f} GiB of memory, measured")


if __name__ == "__main__":
    command.run(main)
