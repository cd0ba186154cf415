"""A mixture of experts against the dense model with as many active parameters: balanced by a loss, a bias, or not.

    python benchmarks/experts.py [--steps=300] [--seeds=0,1,2] [--json] [--plot=experts.png]

`tiny` has a dense MLP of 512. `tiny-moe` has 8 experts of 256 in its place, of which each token visits 2: the same
FLOPs a token, but for the router. Seeds, batches and learning rate are the same. There are two simulated devices, with
the experts sharded over both. A seed draws the weights and the order of the data; two seeds differ by more than two
ways of balancing do.

It prints the mean of the held-out loss, without auxiliary losses, and how far the seeds are from it. Beside these is
the largest load of an expert over the mean load, as a mean over all layers and the last 20 steps; 1 is perfect balance.
Measured; it says nothing about speed.
"""

import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import command
import compiler_flags

compiler_flags.without_tpu()

import jax

import train
from flags import from_preset
from predicted import transformer

NO_BALANCE = dict(load_balance_loss=0.0)
# A bias moves by at most its rate times the steps; DeepSeek-V3's rate of 0.001 is for hundreds of thousands of them.
BIAS = dict(selection_bias=True, selection_bias_rate=0.01, **NO_BALANCE)
RUNS = {
    "dense": dict(preset="tiny", mesh="fsdp:2"),
    "experts, balanced by a loss": dict(preset="tiny-moe", mesh="expert:2"),
    "experts, balanced by a bias": dict(preset="tiny-moe", mesh="expert:2", **BIAS),
    "experts, not balanced": dict(preset="tiny-moe", mesh="expert:2", **NO_BALANCE),
}


def run(config: dict) -> dict:
    """Trains, and returns the loss of every step, held-out losses, load imbalance and the share of dropped rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        with contextlib.redirect_stdout(io.StringIO()):
            train.run(from_preset(**config, metrics_file=str(file)))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    mean = lambda name, some: statistics.mean(line.get(name, 0.0) for line in some)
    return {
        "eval_loss": {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line},
        "loss": [line["loss"] for line in steps],
        "load_imbalance": mean("load_imbalance", steps[-20:]),
        "dropped": mean("dropped_fraction", steps),
    }


def describe(name: str, runs: list[dict]) -> str:
    """A line for one kind of model, with the means over its seeds."""
    shape = from_preset(**RUNS[name])
    held_out = [[*run["eval_loss"].values()][-1] for run in runs]
    loss = statistics.mean(held_out)
    line = (
        f"{name:30} {transformer.num_params(shape):>10,} parameters, {transformer.active_params(shape):>9,} active   "
    )
    line += f"held-out loss {loss:.4f}"
    line += f" +- {max(abs(seed_loss - loss) for seed_loss in held_out):.4f}" if len(runs) > 1 else ""
    if name == "dense":
        return line
    load, dropped = (statistics.mean(run[name] for run in runs) for name in ("load_imbalance", "dropped"))
    return f"{line}   max/mean {load:.2f}, dropped {dropped:.2%}"


def plot(results: dict[str, list[dict]], path: str) -> None:
    """Draws the training loss by step and its distance to the dense model's, as means of 20 steps and of the seeds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, distance = figure.subplots(1, 2)
    smooth = lambda loss: [statistics.mean(loss[i : i + 20]) for i in range(0, len(loss) - 19, 5)]
    curves = {
        name: smooth([*map(statistics.mean, zip(*(run["loss"] for run in runs), strict=True))])
        for name, runs in results.items()
    }
    for name, loss in curves.items():
        steps = [5 * i + 10 for i in range(len(loss))]
        losses.plot(steps, loss, label=name)
        distance.plot(steps, [a - b for a, b in zip(loss, curves["dense"], strict=True)], label=name)
    losses.set(xlabel="step", ylabel="cross-entropy, nats a byte", title="8 experts of which 2, measured")
    distance.set(xlabel="step", title="less the dense model's")
    for axes in (losses, distance):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("--steps", type=command.at_least(1), default=300, help="length of each run [%(default)s]")
    parser.add_argument(
        "--seeds",
        type=command.whole_numbers,
        default="0",
        metavar="A,B",
        help="each model is trained once with each [%(default)s]",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object: losses and loads of each run")
    parser.add_argument("--plot", type=command.path, metavar="FILE.png", help="draw the curves; [plot] extra")
    args = command.arguments(parser)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    common = dict(steps=args.steps, sample=0, eval_every=100)
    results = {}
    for name, flags in RUNS.items():
        results[name] = [run(flags | common | dict(seed=seed)) for seed in args.seeds]
        if not args.json:
            print(describe(name, results[name]), flush=True)
    if args.plot:
        plot(results, args.plot)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    command.run(main)
