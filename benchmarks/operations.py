"""Steps timed by cycles counted in bundles, against XLA's estimates of cycles and the roofline's prediction.

    python benchmarks/operations.py                    the table of stored steps; compiles nothing
    python benchmarks/operations.py run [NAME ...]     compiles those that are not stored (10 minutes to an hour each)

Each step is compiled once by `aot.py --bundles` (compiled/operations.py). The compiled program is timed twice, with the
counted cycles and with XLA's estimates; memory, messages and kernels are the same in both.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import command
import outputs

RECORDED = ROOT / "benchmarks/operations.json"
QWEN3 = "--topology=tpu7x:4x8x8 --preset=qwen3-235b-a22b --batch=8192 --mesh=fsdp:512 --xla_flags=recommended"
GPT_OSS = (
    "--topology=tpu7x:4x4x4 --preset=gpt-oss-120b --batch=1280 --mesh=fsdp:128 --dim_multiple=128 --no-prefetch "
    "--remat=custom --remat_tensors=context:device "
    "--xla_flags=recommended,xla_tpu_enable_sparse_core_reduce_scatter_padding=true"
)
STEPS = {
    "llama3.1-8b on 4 chips": "--topology=tpu7x:2x2x1 --preset=llama3.1-8b --batch=16 --mesh=fsdp:8 "
    "--remat=minimal_with_context",
    "mixtral-8x7b on 64 chips": "--topology=tpu7x:4x4x4 --preset=mixtral-8x7b --batch=1024 --mesh=fsdp:128 "
    "--double_buffer --remat=custom "
    "--remat_tensors=context:device,qkv_proj:device,out_proj:device,expert_down:device --xla_flags=recommended",
    "mixtral-8x7b on 64 chips, FP8": "--topology=tpu7x:4x4x4 --preset=mixtral-8x7b --batch=1024 --mesh=fsdp:128 "
    "--double_buffer --remat=save_dot_with_context_except_mlp --fp8=dynamic "
    "--xla_flags=recommended,xla_tpu_enable_sparse_core_reduce_scatter_padding=true",
    "llama3.1-70b on 64 chips": "--recipe=llama3.1-70b-8k-bf16",
    "llama3.1-70b on 64 chips, FP8": "--recipe=llama3.1-70b-8k-fp8",
    "qwen3-235b on 256 chips": f"{QWEN3} --no-prefetch --microbatches=2 --remat=save_out_proj",
    "qwen3-235b on 256 chips, FP8": f"{QWEN3} --double_buffer --microbatches=4 --remat=custom "
    "--remat_tensors=context:device,out_proj:device --fp8=fixed",
    "deepseek-v3 on 256 chips": "--recipe=deepseek-v3-4k-bf16 --mesh=fsdp:256,expert:2",
    "deepseek-v3 on 256 chips, 512 sequences": "--topology=tpu7x:4x8x8 --preset=deepseek-v3 --batch=512 "
    "--mesh=fsdp:64,expert:8 --xla_flags=recommended",
    "gpt-oss-120b on 64 chips": GPT_OSS,
    "gpt-oss-120b on 64 chips, FP8": f"{GPT_OSS} --fp8=dynamic",
}
KINDS = ("matmul", "elementwise", "copies and layouts")  # of operations whose cycles XLA estimates
STORED = ("step_s", "counted", "by_category_s", "estimated_step_s", "estimated_by_category_s", "roofline")


def known() -> dict[str, dict]:
    """{step: what aot.py reports of it, as far as `STORED`}."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def compiled(name: str, cache: str) -> dict:
    """Compiles a step with the flags and block sizes of the project alone, and stores its report."""
    flags = [*shlex.split(STEPS[name]), "--bundles", "--compile_anyway", "--json", f"--compilation_cache={cache}"]
    line = [sys.executable, str(ROOT / "aot.py"), *flags]
    environment = {name: value for name, value in os.environ.items() if name != "LIBTPU_INIT_ARGS"}
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=environment | {"IRONWOOD_TUNED": os.devnull})
    if done.returncode:
        raise ValueError(f"{name}: {shlex.join(line)} ended with status {done.returncode}")
    report = json.loads(done.stdout)
    steps = known() | {name: {field: report[field] for field in STORED}}
    with outputs.replacing(RECORDED) as file:
        json.dump(steps, file, indent=1)
        file.write("\n")
    return steps[name]


def table(steps: dict[str, dict]) -> str:
    heads = ["step", "predicted", "by estimates", "counted", *KINDS]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name in (name for name in STEPS if name in steps):
        step = steps[name]
        cells = [f"{step['roofline']['step_s']:.2f} s", f"{step['estimated_step_s']:.2f} s", f"{step['step_s']:.2f} s"]
        for kind in KINDS:
            fields = ("estimated_by_category_s", "by_category_s")
            estimated_s, counted_s = (step[field].get(kind, 0.0) for field in fields)
            cells.append(f"{estimated_s:.2f} → {counted_s:.2f} s")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__file__)
    parser.add_argument("command", nargs="?", choices=("table", "run"), default="table", help="[%(default)s]")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all: {', '.join(STEPS)}")
    about = "a folder of compiled programs, which are read from there: a change of the walk needs no compilation"
    parser.add_argument("--compilation_cache", type=command.path, default="", metavar="DIR", help=about)
    args = command.arguments(parser, argv)
    command.check_names(args.names, STEPS)
    if args.command == "run":
        for name in args.names or [name for name in STEPS if name not in known()]:
            print(f"{name}: {compiled(name, args.compilation_cache)['step_s']:.3f} s", file=sys.stderr, flush=True)
    print(table(known()))


if __name__ == "__main__":
    command.run(main)
