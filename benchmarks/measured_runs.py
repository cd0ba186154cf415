"""Published measured runs on TPUs, and what step.py predicts of them: with one set of efficiencies for all.

    python benchmarks/measured_runs.py [--json]

MaxText's runs, with the meshes, policies and batches given here, from https://github.com/AI-Hypercomputer/tpu-recipes:
training/ironwood/README.md at c8cfe2f and its recipes; training/trillium/Llama3.1-8B-MaxText/v6e-64/README.md. The
FLOPs of a token are the quotient of the published TFLOP/s and tokens/s of a chip; the run on v6e counts attention's
whole square, and is left out there. One of the efficiencies, that of elementwise work, was chosen by the first three;
that of attention is the kernel's that these runs have.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from config import from_preset
from hardware import parse_topology
from step import Prediction, predict
from workload import PUBLISHED, run_of


@dataclass(frozen=True)
class MeasuredRun:
    topology: str
    flags: dict
    step_s: float
    flops_per_token: float | None
    tolerance: float  # that a prediction is allowed: 15% of a dense model, 30% of one with experts


SAVED = "context:device,qkv_proj:device"
ON_HOST = ",".join(f"{name}:offload" for name in ("decoder_layer_input", "out_proj", "qkv_proj"))
LLAMA_70B = dict(
    preset="llama3.1-70b", mesh="fsdp:128", batch=256, remat="custom", remat_tensors=SAVED, mu_dtype="bfloat16"
)
QWEN3_235B = dict(
    preset="qwen3-235b-a22b",
    mesh="fsdp:512",
    batch=8192,
    remat="custom",
    remat_tensors="decoder_layer_input:offload",
)
LLAMA_8B = dict(preset="llama3.1-8b", mesh="fsdp:64", batch=320, remat="custom", remat_tensors=ON_HOST)
RUNS = [
    MeasuredRun("tpu7x:4x4x4", LLAMA_70B, 12.2, 1207.05e12 / 2686.98, 0.15),
    MeasuredRun("tpu7x:4x4x4", LLAMA_70B | dict(fp8="static"), 7.93, 1854.19e12 / 4127.56, 0.15),
    MeasuredRun("tpu7x:4x8x8", QWEN3_235B, 30.87, 629.79e12 / 4245.89, 0.30),
    MeasuredRun("v6e:8x8", LLAMA_8B, 5.652, None, 0.15),
]


def prediction_of(run: MeasuredRun) -> Prediction:
    chip, topology = parse_topology(run.topology)
    return predict(run_of(from_preset(**run.flags), chip, topology, efficiency=PUBLISHED))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a list of objects, in seconds")
    args = parser.parse_args()
    rows = []
    for run in RUNS:
        found = prediction_of(run)
        config = found.of.config
        rows.append(
            dict(
                model=config.preset,
                precision="bf16" if config.fp8 == "none" else "fp8",
                topology=run.topology,
                mesh=config.mesh,
                batch=config.batch,
                seq_len=config.seq_len,
                measured_s=run.step_s,
                predicted_s=found.step_s,
                mfu=found.mfu,
                bound=found.bound,
            )
        )
    if args.json:
        return print(json.dumps(rows))
    print("| model | multiplied in | on | mesh | batch | measured | predicted | off by | predicted MFU |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['precision']} | {row['topology']} | {row['mesh']} | {row['batch']:,} x "
            f"{row['seq_len']:,} | {row['measured_s']:g} s | {row['predicted_s']:.2f} s | "
            f"{row['predicted_s'] / row['measured_s'] - 1:+.1%} | {row['mfu']:.1%} |"
        )


if __name__ == "__main__":
    main()
