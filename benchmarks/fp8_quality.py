"""Whether FP8 trains as well as bfloat16: the held-out loss after 400 steps, by recipe and seed.

    python benchmarks/fp8_quality.py                  the table of stored runs; runs nothing
    python benchmarks/fp8_quality.py run --models=tiny --recipes=bfloat16,per_tensor --seeds=0,1
    python benchmarks/fp8_quality.py plot quality.png                   the curves; [plot] extra

Each run is a file in --folder, written at its end. A run that has a file is not repeated, so a long series can be
interrupted and resumed. `wide` is `tiny` with 4 times the width, half the learning rate and a quarter of the batch. All
recipes compute in bfloat16 outside their matmuls, and have the same weights and batches for a seed. `static` takes its
scales from a profile of 20 steps. The text is the standard library of the Python that runs. Each file says which, and
runs are compared on the same text.

Measured. Losses depend on the numbers alone, so a TPU would have those of simulated devices, but for the order of sums.

**Cost.** A step of `wide` in FP8 takes half a second to a second on 2 cores of an AMD EPYC (Zen 5, jax 0.12). On an
Intel Xeon at 2.0 GHz it takes 2.7 s, or 1.9 s with --xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT in
XLA_FLAGS.
"""

import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import command
import compiler_flags

compiler_flags.without_tpu()

import corpora
import flags as flags_lib
import outputs
import train

MODELS = {
    "tiny": dict(mesh="fsdp:8"),
    "wide": dict(mesh="fsdp:1", batch=4, model_dim=768, ff_dim=2048, head_dim=96, learning_rate=1.5e-3),
}
RECIPES = {
    "bfloat16": {},
    "per_tensor": dict(fp8="dynamic"),
    "per_axis": dict(fp8="dynamic", fp8_granularity="per_axis"),
    "block": dict(fp8="dynamic", fp8_granularity="block", fp8_block=8),
    "delayed": dict(fp8="delayed"),
    "static": dict(fp8="static"),
    "fixed": dict(fp8="fixed"),
    "stochastic": dict(fp8="dynamic", fp8_rounding="stochastic"),
    "e4m3 gradients": dict(fp8="dynamic", fp8_gradients="e4m3"),
    "ends in bfloat16": dict(fp8="dynamic", fp8_skip_layers=1),
}


def run(model: str, recipe: str, seed: int, steps: int, folder: Path, corpus: corpora.Corpus) -> None:
    path = folder / f"{model}-{recipe.replace(' ', '_')}-{seed}-{steps}-{corpus.train.size}.json"
    if path.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        metrics, scales = Path(scratch) / "metrics", Path(scratch) / "scales.json"
        options = MODELS[model] | dict(dtype="bfloat16", seed=seed, sample=0, log_every=50, eval_every=0)
        flags = options | RECIPES[recipe]
        if recipe == "static":
            flags |= dict(fp8_scales=str(scales))
            train.run(flags_lib.from_preset("tiny", **flags | dict(fp8="calibrate", steps=20)))
        result = train.run(flags_lib.from_preset("tiny", **flags, steps=steps, metrics_file=str(metrics)))
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [round(line["loss"], 4) for line in lines if "loss" in line]
    learnt = f"{corpus.name}, {corpus.train.size:,} tokens"
    record = dict(model=model, recipe=recipe, seed=seed, steps=steps, corpus=learnt)
    record |= dict(eval_loss=float(result["eval_loss"]), losses=losses)
    with outputs.replacing(path) as file:
        json.dump(record, file)


def stored_runs(folder: Path, steps: int) -> dict[tuple[str, str], dict[tuple[str, int], dict]]:
    """{(model, recipe): {(corpus, seed): run}} of the runs that are stored in a folder."""
    runs = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        if run["steps"] == steps:
            runs.setdefault((run["model"], run["recipe"]), {})[run["corpus"], run["seed"]] = run
    return runs


def table(runs: dict) -> str:
    """Markdown with held-out losses, and mean and standard error against bfloat16 on the same corpus and seed."""
    keys = {key for by_seed in runs.values() for key in by_seed}
    corpora, seeds = sorted({corpus for corpus, _ in keys}), sorted({seed for _, seed in keys})
    heads = [f"{corpus}: seed {', '.join(map(str, seeds))}" for corpus in corpora]
    lines = ["| model | recipe | " + " | ".join([*heads, "against bfloat16"]) + " |"]
    lines.append("|---" * (3 + len(heads)) + "|")
    for (model, recipe), by_seed in sorted(runs.items(), key=lambda item: (item[0][0], [*RECIPES].index(item[0][1]))):
        plain = runs.get((model, "bfloat16"), {})
        losses = {key: f"{run['eval_loss']:.4f}" for key, run in by_seed.items()}
        cells = [", ".join(losses.get((corpus, seed), "-") for seed in seeds) for corpus in corpora]
        shares = [run["eval_loss"] / plain[key]["eval_loss"] - 1 for key, run in by_seed.items() if key in plain]
        difference = f"{statistics.mean(shares):+.2%}" if shares and recipe != "bfloat16" else ""
        if difference and len(shares) > 1:
            difference += f" ± {statistics.stdev(shares) / math.sqrt(len(shares)):.2%}"
        lines.append(f"| {model} | {recipe} | {' | '.join([*cells, difference])} |")
    return "\n".join(lines)


def plot(runs: dict, path: str) -> None:
    """Draws training losses, as means over runs and 20 steps, and their distance to bfloat16's on the same pairs."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError('plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    losses, distance = figure.subplots(1, 2)

    def curve(by_seed):
        mean = [statistics.mean(values) for values in zip(*(run["losses"] for run in by_seed.values()), strict=True)]
        return [statistics.mean(mean[i : i + 20]) for i in range(0, len(mean) - 19, 20)]

    for (model, recipe), by_seed in runs.items():
        mean, plain = curve(by_seed), runs.get((model, "bfloat16"), {})
        steps = [20 * i + 10 for i in range(len(mean))]
        style = dict(color=f"C{[*RECIPES].index(recipe)}", linestyle="-" if model == "tiny" else "--")
        losses.plot(steps, mean, label=f"{model}, {recipe}, {len(by_seed)} run{'s' * (len(by_seed) > 1)}", **style)
        if recipe != "bfloat16" and by_seed.keys() <= plain.keys():
            same = curve({key: plain[key] for key in by_seed})
            distance.plot(steps, [a / b - 1 for a, b in zip(mean, same, strict=True)], **style)
    losses.set(xlabel="step", ylabel="training loss, nats a token", title="means over all runs of a recipe, measured")
    distance.set(xlabel="step", title="loss over bfloat16's of the same corpora and seeds, less 1")
    distance.yaxis.set_major_formatter(lambda share, _: f"{share:+.2%}")
    figure.legend(loc="outside right upper")
    for axes in (losses, distance):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = command.parser(__file__)
    about = "what to do [%(default)s]"
    parser.add_argument("command", nargs="?", choices=("table", "run", "plot"), default="table", help=about)
    parser.add_argument(
        "path",
        type=command.path,
        nargs="?",
        default="docs/figures/fp8_quality.png",
        help="file of the picture [%(default)s]",
    )
    parser.add_argument(
        "--folder", type=command.path, default="benchmarks/fp8_quality_runs", help="folder of the runs [%(default)s]"
    )
    parser.add_argument("--models", default=",".join(MODELS), metavar="A,B", help="models to run [%(default)s]")
    about = "recipes to run each in [%(default)s]"
    parser.add_argument("--recipes", default=",".join(RECIPES), metavar="A,B", help=about)
    parser.add_argument(
        "--seeds",
        type=command.whole_numbers,
        default="0,1,2",
        metavar="A,B",
        help="seeds to run each with [%(default)s]",
    )
    parser.add_argument(
        "--steps", type=command.at_least(1), default=400, help="length of a run; others are not shown [%(default)s]"
    )
    args = command.arguments(parser)
    folder = Path(args.folder)
    models, recipes = args.models.split(","), args.recipes.split(",")
    command.check_names(models, MODELS)
    command.check_names(recipes, RECIPES)
    if args.command == "run":
        folder.mkdir(parents=True, exist_ok=True)
        corpus = corpora.standard_library()
        for seed in args.seeds:  # seed by seed: a series that is interrupted has complete pairs
            for model in models:
                for recipe in recipes:
                    run(model, recipe, seed, args.steps, folder, corpus)
    runs = stored_runs(folder, args.steps)
    if not runs:
        raise ValueError(f"{folder} has no run of {args.steps} steps: python benchmarks/fp8_quality.py run")
    if args.command == "plot":
        plot(runs, args.path)
    print(table(runs))


if __name__ == "__main__":
    command.run(main)
