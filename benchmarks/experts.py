"""A mixture of experts against the dense model of its active size, on the same tokens; balanced by a loss, by a bias.

    python benchmarks/experts.py [--steps=300] [--json] [--plot=experts.png]

`tiny` has a dense MLP of 512; `tiny-moe` 8 experts of 256 in its place, of which a token visits 2: the same FLOPs a
token, but for the router. Same seed, same batches, same learning rate, two simulated devices, experts on both of them.
Printed are the held-out loss, which has no auxiliary losses in it, and how the experts' loads compare at the end: the
largest over the mean, the mean of all layers and of the last 20 steps, of which 1 is perfect. Measured; it says
nothing of speed.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import compiler_flags

compiler_flags.without_tpu()

import jax

import train
import transformer
from config import from_preset

NO_BALANCE = dict(load_balance_loss=0.0)
# A bias can go as far as its rate times the steps; DeepSeek-V3's 0.001 is for hundreds of thousands of them.
BIAS = dict(selection_bias=True, selection_bias_rate=0.01, **NO_BALANCE)
RUNS = {
    "dense": dict(preset="tiny", mesh="fsdp:2"),
    "experts, balanced by a loss": dict(preset="tiny-moe", mesh="expert:2"),
    "experts, balanced by a bias": dict(preset="tiny-moe", mesh="expert:2", **BIAS),
    "experts, not balanced": dict(preset="tiny-moe", mesh="expert:2", **NO_BALANCE),
}


def run(config: dict) -> dict:
    """Figures of a run: parameters, the loss of every step, held-out losses, load imbalance and what was dropped."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        with contextlib.redirect_stdout(io.StringIO()):
            train.run(from_preset(**config, metrics_file=str(file)))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    mean = lambda name: sum(line.get(name, 0.0) for line in steps[-20:]) / len(steps[-20:])
    shape = from_preset(**config)
    return {
        "params": transformer.num_params(shape),
        "active_params": transformer.active_params(shape),
        "eval_loss": {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line},
        "loss": [line["loss"] - line.get("auxiliary_loss", 0.0) for line in steps],
        "load_imbalance": mean("load_imbalance"),
        "dropped": sum(line.get("dropped_fraction", 0.0) for line in steps) / len(steps),
    }


def plot(found: dict[str, dict], path: str) -> None:
    """Training loss by step, and its distance to the dense model's; means of 20 steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, distance = figure.subplots(1, 2)
    smooth = lambda loss: [sum(loss[i : i + 20]) / 20 for i in range(0, len(loss) - 19, 5)]
    dense = smooth(found["dense"]["loss"])
    for name, its in found.items():
        loss = smooth(its["loss"])
        steps = [5 * i + 10 for i in range(len(loss))]
        losses.plot(steps, loss, label=name)
        distance.plot(steps, [a - b for a, b in zip(loss, dense, strict=True)], label=name)
    losses.set(xlabel="step", ylabel="cross-entropy, nats a byte", title="8 experts of which 2, measured")
    distance.set(xlabel="step", title="less the dense model's", ylim=(-0.06, 0.02))
    for axes in (losses, distance):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="length of each run [%(default)s]")
    parser.add_argument("--json", action="store_true", help="a JSON object: losses and loads of each run")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves; [plot] extra")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    common = dict(steps=args.steps, sample=0, eval_every=100)
    found = {}
    for name, flags in RUNS.items():
        found[name] = its = run(flags | common)
        if not args.json:
            held_out = list(its["eval_loss"].values())[-1]
            balance = f"max/mean {its['load_imbalance']:.2f}, dropped {its['dropped']:.2%}" if name != "dense" else ""
            print(
                f"{name:30} {its['params']:>10,} parameters, {its['active_params']:>9,} active   "
                f"held-out loss {held_out:.4f}   {balance}",
                flush=True,
            )
    if args.plot:
        plot(found, args.plot)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
