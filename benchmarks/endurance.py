"""Runs of a thousand steps: plain, with everything on, that with faults, on one device, and with sharded experts.

    python benchmarks/endurance.py                    the table of stored runs; runs nothing
    python benchmarks/endurance.py run --models=tiny --ways=plain,everything,faults
    python benchmarks/endurance.py plot endurance.png        the curves; [plot] extra

**plain** is float32 and FSDP.

**everything** has the same weights and batches. It has bfloat16, FP8 in matmuls and gathered weights, every layer
recomputed, and two microbatches. Each sequence is sharded over two devices, and the matrices of `tiny` or the experts
of `tiny-moe` over two more.

**faults** is `everything` with four faults. The run is killed; it has a batch whose gradients are not finite, and one
of random tokens; and the disk is full for a checkpoint. After each end the same command is given again.

**one device** is `plain` on one device. **experts** is `plain` with the experts sharded over four devices and FSDP
over two. Routing decides there how many rows each device receives, and in how many rounds.

Each run is a file in --folder, written at its end; a run that has a file is not repeated. Measured on simulated
devices, so it says nothing about speed.
"""

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import command
import outputs

EVERYTHING = dict(dtype="bfloat16", fp8="dynamic", remat="full", microbatches=2)
MESHES = {  # {model: {way: mesh}}
    "tiny": {"plain": "fsdp:8"} | dict.fromkeys(("everything", "faults"), "fsdp:2,context:2,tensor:2"),
    "tiny-moe": {"plain": "fsdp:8"}
    | dict.fromkeys(("everything", "faults"), "fsdp:2,expert:2,context:2")
    | {"one device": "fsdp:1", "experts": "fsdp:2,expert:4"},
}
WAYS = ("plain", "everything", "faults", "one device", "experts")
PAIRS = {"faults": "everything", "experts": "one device"}  # {way: the one with the same arithmetic}
BAND = 0.01  # largest distance of any held-out loss to the plain run's, as a share; `experts` is once beyond it

# When, as shares of all steps: it is killed, has the batch that is not finite, has the random one, finds the disk full.
# Batches are made some steps ahead of their use, so it is killed, and the disk is full, some steps earlier.
FAULTS = 0.15, 0.3, 0.5, 0.7
WITH_FAULTS = """
import os, resource, runpy, signal, sys
import numpy as np
import data

killed, not_finite, garbage, no_room = map(int, sys.argv.pop(1).split(","))
read = data.train_batch

def train_batch(corpus, step, **options):
    if step == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == no_room:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))  # bytes of a file
    batch = read(corpus, step, **options)
    if step == not_finite:
        batch = batch._replace(loss_weights=batch.loss_weights * np.float32("nan"))
    if step == garbage:
        random = np.random.default_rng(0).integers(0, corpus.vocab_size, (2, *batch.tokens.shape), np.int32)
        batch = batch._replace(tokens=random[0], targets=random[1])
    return batch

data.train_batch = train_batch
runpy.run_path("train.py", run_name="__main__")
"""


def run(model: str, way: str, steps: int, folder: Path) -> None:
    """Runs a model in one way and stores the result. Raises RuntimeError for a start that ends unexpectedly."""
    path = folder / f"{model}-{way.replace(' ', '_')}-{steps}.json"
    if path.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        metrics = Path(scratch) / "metrics"
        options = dict(preset=model, mesh=MESHES[model][way], steps=steps, sample=0, log_every=100)
        options |= dict(eval_every=steps // 10, metrics_file=metrics)
        options |= EVERYTHING if way in ("everything", "faults") else {}
        done_again = 0
        if way == "faults":
            options |= dict(checkpoint_dir=Path(scratch) / "checkpoints", save_every=steps // 20)
            killed, not_finite, garbage, no_room = (int(share * steps) for share in FAULTS)
            for kill, full, ends in ((killed, no_room, -signal.SIGKILL), (-1, no_room, 1), (-1, -1, 0)):
                reached = len(_losses(metrics))
                said = _start(["-c", WITH_FAULTS, f"{kill},{not_finite},{garbage},{full}"], options, ends)
                resumed = re.search(r"resumed +from step (\d+)", said)
                done_again += reached - (int(resumed[1]) if resumed else 0)
                if full == no_room and ends == 1 and "File too large" not in said:
                    raise RuntimeError(f"the second start ended, but not because the disk was full: {said[-500:]}")
        else:
            _start(["train.py"], options, 0)
        losses = _losses(metrics)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    skipped = [line["skipped"] for line in lines if "loss" in line][-1]
    if len(losses) != steps or skipped != (way == "faults"):
        raise RuntimeError(f"{len(losses)} of {steps} steps were reported, and {skipped} skipped")
    held_out = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    record = dict(model=model, way=way, steps=steps, losses=losses, held_out=held_out)
    if routed := [line for line in lines if "dropped_fraction" in line]:
        record["dropped"] = max(line["dropped_fraction"] for line in routed)
        record["more_rounds"] = sum(line["extra_rounds"] > 0 for line in routed)
    with outputs.replacing(path) as file:
        json.dump(record | dict(skipped=skipped, done_again=done_again), file)


def _start(program: list[str], options: dict, ends: int) -> str:
    """Returns what the program printed, and shows it. Raises RuntimeError where it does not end with that status."""
    command = [sys.executable, *program, *(f"--{name}={value}" for name, value in options.items())]
    said = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
    if process.returncode != ends:
        raise RuntimeError(f"a start ended with {process.returncode}, not {ends}; see its output above")
    return "".join(said)


def _losses(metrics: Path) -> list[float | None]:
    """The loss of each step, None where it was not finite."""
    lines = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
    return [line["loss"] and round(line["loss"], 4) for line in lines if "loss" in line]


def stored_runs(folder: Path, steps: int) -> dict[tuple[str, str], dict]:
    """{(model, way): run} of the runs that are stored in a folder."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob(f"*-{steps}.json"))]
    return {(run["model"], run["way"]): run for run in sorted(runs, key=lambda run: WAYS.index(run["way"]))}


def distance(run: dict, other: dict) -> float:
    """The largest distance between the held-out losses of two runs, as a share."""
    return max(abs(loss / other["held_out"][step] - 1) for step, loss in run["held_out"].items())


def table(runs: dict) -> str:
    lines = [
        "| model | | held-out loss | farthest from plain | from the one with equal arithmetic | skipped | done again |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for (model, way), run in sorted(runs.items(), key=lambda item: item[0][0]):
        others = [runs.get((model, other)) if other != way else None for other in ("plain", PAIRS.get(way))]
        distances = " | ".join("" if other is None else f"{distance(run, other):.2%}" for other in others)
        counts = f"{run['skipped']} | {run['done_again']}"
        lines.append(f"| {model} | {way} | {run['held_out'][str(run['steps'])]:.4f} | {distances} | {counts} |")
    return "\n".join(lines)


def plot(runs: dict, path: str) -> None:
    """Draws training losses, as means of 20 steps, and held-out losses."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError('plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    models = sorted({model for model, _ in runs})
    for model, axes in zip(models, figure.subplots(1, len(models), squeeze=False)[0], strict=True):
        for (run_model, way), run in runs.items():
            if run_model == model:
                parts = [run["losses"][i : i + 20] for i in range(0, run["steps"], 20)]
                means = [statistics.mean(loss for loss in part if loss is not None) for part in parts]
                (line,) = axes.plot([20 * i + 10 for i in range(len(means))], means, alpha=0.6, label=way)
                axes.plot([*map(int, run["held_out"])], [*run["held_out"].values()], "o", color=line.get_color())
        axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{model}, measured; dots are held-out losses")
        axes.legend()
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
        default="docs/figures/endurance.png",
        help="file of the picture [%(default)s]",
    )
    parser.add_argument(
        "--folder", type=command.path, default="benchmarks/endurance_runs", help="folder of the runs [%(default)s]"
    )
    parser.add_argument("--models", default=",".join(MESHES), metavar="A,B", help="presets to run [%(default)s]")
    parser.add_argument(
        "--ways", default=",".join(WAYS), metavar="A,B", help="ways to run, where a model has them [%(default)s]"
    )
    parser.add_argument(
        "--steps", type=command.at_least(1), default=1000, help="length of a run; others are not shown [%(default)s]"
    )
    args = command.arguments(parser)
    folder, models, ways = Path(args.folder), args.models.split(","), args.ways.split(",")
    command.check_names(models, MESHES)
    command.check_names(ways, WAYS)
    if without := [model for model in models if not MESHES[model].keys() & {*ways}]:
        raise ValueError(
            f"{', '.join(without)} has none of the ways {args.ways}; it has {', '.join(MESHES[without[0]])}"
        )
    if args.command == "run":
        folder.mkdir(parents=True, exist_ok=True)
        for model in models:
            for way in filter(MESHES[model].get, ways):
                try:
                    run(model, way, args.steps, folder)
                except RuntimeError as error:
                    sys.exit(f"endurance.py: {model}, {way}: {error}")
    runs = stored_runs(folder, args.steps)
    if not runs:
        raise ValueError(f"{folder} has no run of {args.steps} steps: python benchmarks/endurance.py run")
    if args.command == "plot":
        plot(runs, args.path)
    print(table(runs))


if __name__ == "__main__":
    command.run(main)
