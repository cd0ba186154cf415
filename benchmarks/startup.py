"""The time from the command to the first step, and the CPU time of a step: train.py beside MaxText.

    python benchmarks/startup.py [--times=3] [--json]
    python benchmarks/startup.py --maxtext=VENV/bin/python    where `pip install "maxtext[tpu]"` has put it: in one run

The model has 4 layers, model dim 256, vocabulary 256, and 8 sequences of 512 a step, in float32, with FSDP over 8
simulated devices. It recomputes what is no matmul (`minimal_with_context`). The cache is a new folder, so programs are
compiled. CPU-seconds are those of all threads of the process, in a run of 21 steps less those in a run of 1, divided by
20. Without --maxtext, MaxText's figures are those of an earlier run (MAXTEXT_RESULT).
"""

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command

MODEL = "--num_layers=4 --model_dim=256 --ff_dim=1024 --num_heads=4 --num_kv_heads=4 --head_dim=64 --vocab_size=256"
RUN = "--remat=minimal_with_context --batch=8 --seq_len=512 --mesh=fsdp:8 --eval_batches=0 --sample=0 --log_every=1"
# MaxText 0.2.5 with jax 0.12 and Python 3.12: medians of three, on 2 cores of an AMD EPYC (Zen 4).
MAXTEXT_RESULT = {"first_step_s": 14.6, "cpu_s_a_step": 3.17}
MAXTEXT = """
base_num_decoder_layers=4 base_emb_dim=256 base_mlp_dim=1024 base_num_query_heads=4 base_num_kv_heads=4 head_dim=64
vocab_size=256 per_device_batch_size=1 max_target_length=512 ici_fsdp_parallelism=8 dtype=float32 hardware=cpu
remat_policy=minimal_with_context attention=dot_product dataset_type=synthetic enable_checkpointing=false
enable_tensorboard=false skip_jax_distributed_system=true run_name=startup
"""
ON_CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "HF_HUB_OFFLINE": "1"}


def ours(steps: int, folder: str) -> list[str]:
    flags = [*MODEL.split(), *RUN.split(), f"--steps={steps}", f"--compilation_cache={folder}"]
    return [sys.executable, "train.py", *flags]


def maxtext(python: str, steps: int, folder: str) -> list[str]:
    where = "import importlib.util; print(importlib.util.find_spec('maxtext').submodule_search_locations[0])"
    package = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    settings = [*MAXTEXT.split(), f"steps={steps}", f"base_output_directory={folder}", f"jax_cache_dir={folder}/cache"]
    return [python, "-m", "maxtext.trainers.pre_train.train", f"{package}/configs/base.yml", *settings]


def run(command: Sequence[str], first: str, environment: dict[str, str]) -> tuple[float, float]:
    """Runs a command: seconds until it prints a line that matches `first`, and its CPU-seconds in all."""
    begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment, **pipes)
    first_step_s, said = None, []
    for line in process.stdout:
        said.append(line)
        if first_step_s is None and re.search(first, line):
            first_step_s = time.perf_counter() - begun
    if process.wait() or first_step_s is None:
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}: {''.join(said[-5:])}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return first_step_s, usage.ru_utime + usage.ru_stime - used.ru_utime - used.ru_stime


def measure(command, first: str, environment: dict[str, str]) -> dict[str, float]:
    """Seconds to the first step, and CPU-seconds a step, of the program that `command(steps, folder)` names."""
    with tempfile.TemporaryDirectory() as short, tempfile.TemporaryDirectory() as long:
        first_step_s, cpu_short = run(command(1, short), first, environment)
        _, cpu_long = run(command(21, long), first, environment)
    return {"first_step_s": first_step_s, "cpu_s_a_step": (cpu_long - cpu_short) / 20}


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument(
        "--maxtext",
        type=command.path,
        metavar="PYTHON",
        help="the Python that MaxText is installed for; measures it as well",
    )
    parser.add_argument(
        "--times", type=command.at_least(1), default=1, help="number of measurements, alternating; prints medians"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds")
    args = command.arguments(parser)
    if args.maxtext and not shutil.which(args.maxtext):
        raise ValueError(f"--maxtext={args.maxtext} is not a Python that can be run")
    our_runs, maxtext_runs = [], []
    for _ in range(args.times):
        our_runs.append(measure(ours, r"^\s*step .*loss", {}))
        if args.maxtext:
            theirs = lambda steps, folder: maxtext(args.maxtext, steps, folder)
            maxtext_runs.append(measure(theirs, r"completed step: 0,", ON_CPU))
    median = lambda runs: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ours_s, theirs_s = median(our_runs), median(maxtext_runs or [MAXTEXT_RESULT])
    if args.json:
        print(json.dumps(ours_s | {"maxtext": theirs_s}))
        return
    print(f"{'measured':32}{'here':>10}{'MaxText':>10}{'ratio':>8}")
    for name, words in (("first_step_s", "first step done after, s"), ("cpu_s_a_step", "CPU-seconds a step")):
        print(f"{words:32}{ours_s[name]:10.2f}{theirs_s[name]:10.2f}{theirs_s[name] / ours_s[name]:8.2f}")


if __name__ == "__main__":
    command.run(main)
