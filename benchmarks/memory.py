"""Peak memory of a step on TPU7x under each recomputation policy: predicted by roofline.py, compiled by aot.py.

    python benchmarks/memory.py [8b] [70b] [--predicted]

The table has sequences of 8,192 and of 131,072 tokens, side by side. For a policy that does not fit it says what the
program would have needed, if the compiler says so. A compile takes one to ten minutes. A program that is in
results_tpu7x.json is not compiled again, so a long series can be interrupted and resumed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command
from compiled import results
from config import REMAT_POLICIES
from flags import from_preset
from hardware import parse_topology
from predicted.step import GiB, Prediction, predict
from predicted.workload import run_of

CASES = {
    "8b": ("tpu7x:2x2x1", "llama3.1-8b", dict(mesh="fsdp:8", batch=16), dict(mesh="fsdp:2,context:4", batch=2)),
    "70b": (
        "tpu7x:4x4x4",
        "llama3.1-70b",
        dict(mesh="fsdp:128", batch=128),
        dict(mesh="fsdp:16,tensor:2,context:4", batch=16),
    ),
}
LENGTHS = {"8k": 8192, "128k": 131_072}
POLICIES = [policy for policy in REMAT_POLICIES if policy not in ("custom", "auto")]
HEADS = ("GiB, compiled", "predicted", "GiB of host", "step, predicted")


def cells_of(expected: Prediction, with_compiler: bool) -> list[str]:
    hbm, step_s = f"{expected.hbm_bytes / GiB:.1f}", f"{expected.step_s:.2f} s"
    if not with_compiler:
        return [hbm, step_s]
    result = results.load_or_compile(expected)
    needed = results.memory_of(result)
    on_host = result["host_bytes"] if result["fits"] else result["used_bytes"] if result["memory"] == "host" else 0
    needs = f"{needed / GiB:.1f}" if needed else ""  # where another memory is too small, the compiler does not say
    needs = needs if result["fits"] else f"{needs} refused".strip()
    return [needs, hbm, f"{on_host / GiB:.1f}" if on_host else "", step_s]


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__file__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all: {', '.join(CASES)}")
    parser.add_argument("--predicted", action="store_true", help="by roofline.py alone: nothing is compiled")
    args = command.arguments(parser, argv)
    command.check_names(args.models, CASES)
    wanted = args.models or list(CASES)
    names = ("GiB, predicted", HEADS[-1]) if args.predicted else HEADS
    heads = [f"{length}: {name}" if name == names[0] else name for length in LENGTHS for name in names]
    for name in wanted:
        topology, preset, *flags = CASES[name]
        if name != wanted[0]:
            print()
        print(f"| {preset}, {topology} | {' | '.join(heads)} |\n|{'---|' * (1 + len(heads))}")
        for policy in POLICIES:
            cells = []
            for seq_len, own in zip(LENGTHS.values(), flags, strict=True):
                config = from_preset(preset, **own, seq_len=seq_len, remat=policy)
                cells += cells_of(predict(run_of(config, *parse_topology(topology))), not args.predicted)
            print(f"| `{policy}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    command.run(main)
