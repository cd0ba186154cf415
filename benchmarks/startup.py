"""From nothing to the first step, and what a step costs a CPU: seconds of train.py, as a user starts it.

    python benchmarks/startup.py [--json]

A model of 4 layers, model dim 256, vocabulary 256, 8 sequences of 512 a step, float32, FSDP over 8 simulated devices.
MaxText took 19 s from the start of the process to the end of the first step and 3.0 CPU-seconds a step, on a machine
of this kind (2 cores, 24 GiB). Programs are compiled: the cache is a new folder. CPU-seconds are those of the process,
all threads, of a run of 21 steps less those of a run of 1, by 20.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = "--num_layers=4 --model_dim=256 --ff_dim=1024 --num_heads=4 --num_kv_heads=4 --head_dim=64 --vocab_size=256"
RUN = "--batch=8 --seq_len=512 --mesh=fsdp:8 --eval_batches=0 --sample=0 --log_every=1"
MAXTEXT = {"first_step_s": 19.0, "cpu_s_a_step": 3.0}


def run(steps: int) -> tuple[float, float]:
    """Seconds until the line of step 1 is there, and CPU-seconds in all."""
    with tempfile.TemporaryDirectory() as cache:
        flags = [*MODEL.split(), *RUN.split(), f"--steps={steps}", f"--compilation_cache={cache}"]
        begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(
            [sys.executable, "train.py", *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        first_step_s = None
        for line in process.stdout:
            if first_step_s is None and line.lstrip().startswith("step") and "loss" in line:
                first_step_s = time.perf_counter() - begun
        if process.wait() or first_step_s is None:
            sys.exit(f"train.py {' '.join(flags)} ended with status {process.returncode}")
        found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return first_step_s, found.ru_utime + found.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="startup.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    (first_step_s, cpu_one), (_, cpu_all) = run(1), run(21)
    found = {"first_step_s": first_step_s, "cpu_s_a_step": (cpu_all - cpu_one) / 20}
    if args.json:
        print(json.dumps(found | {"maxtext": MAXTEXT}))
        return
    print(f"{'measured':32}{'here':>10}{'MaxText':>10}{'ratio':>8}")
    for name, words in (("first_step_s", "first step done after, s"), ("cpu_s_a_step", "CPU-seconds a step")):
        print(f"{words:32}{found[name]:10.2f}{MAXTEXT[name]:10.1f}{MAXTEXT[name] / found[name]:8.2f}")


if __name__ == "__main__":
    main()
