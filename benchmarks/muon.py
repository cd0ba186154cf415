"""Muon against AdamW: the losses of `tiny` and of `tiny-moe` with either, for the same tokens.

    python benchmarks/muon.py                  the table of stored runs; runs nothing
    python benchmarks/muon.py run              runs those that are not stored (40 minutes on 2 idle cores)
    python benchmarks/muon.py plot muon.png    the training losses at the best rates; [plot] extra
    python benchmarks/muon.py update           compiles the update of Llama 3.1 70B alone for TPU7x (10 minutes)

Seed 0 trains with each of RATES. The best rate of each optimizer, by the held-out loss, is then used with two more
seeds. A seed draws the weights and the order of the data, the same for both optimizers. All other flags are the
defaults, but for a batch of 4 sequences, 150 steps and one device. The text is the source of Python's standard library.

`steps to AdamW's loss` is the first step of Muon whose mean training loss of the last 10 steps is at most that of the
end of AdamW's run with this seed. The schedule is the same for both, so at that step Muon's rate is not yet at its end.
Measured on one device of a CPU; the losses do not depend on its speed.
"""

import contextlib
import io
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import command
import compiler_flags
import outputs

compiler_flags.without_tpu()

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import aot
import placement
import sharding
import train
from compiled import hlo, schedule
from flags import from_preset
from hardware import parse_topology

RECORDED = ROOT / "benchmarks/muon.json"
PRESETS = ("tiny", "tiny-moe")
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (3e-3, 1e-2, 3e-2)}
NAMES = {"adamw": "AdamW", "muon": "Muon"}
SEEDS = (0, 1, 2)
FLAGS = dict(mesh="data:1", batch=4, steps=150, sample=0, eval_every=0)
SMOOTHED = 10  # steps
UPDATE = dict(preset="llama3.1-70b", mesh="fsdp:128", optimizer="muon")
TOPOLOGY = "tpu7x:4x4x4"


def known() -> dict[str, dict]:
    """The stored runs, {"preset optimizer rate seed": {"loss": of each step, "eval_loss"}}."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def trained(preset: str, optimizer: str, rate: float, seed: int) -> dict:
    """A run: the stored one, or one that is made and stored."""
    runs, name = known(), f"{preset} {optimizer} {rate:g} {seed}"
    if name not in runs:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "metrics.jsonl"
            own = dict(optimizer=optimizer, learning_rate=rate, seed=seed, metrics_file=str(file))
            with contextlib.redirect_stdout(io.StringIO()):
                figures = train.run(from_preset(preset, **FLAGS, **own))
            lines = [json.loads(line) for line in file.read_text().splitlines()]
        losses = [round(line["loss"], 4) for line in lines if "loss" in line]
        runs[name] = dict(loss=losses, eval_loss=round(figures["eval_loss"], 4))
        print(name, runs[name]["eval_loss"], flush=True)
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(run)}" for key, run in sorted(runs.items()))
        with outputs.replacing(RECORDED) as out:
            out.write(f"{{\n{rows}\n}}\n")
    return runs[name]


def best_rate(preset: str, optimizer: str, runs: dict[str, dict]) -> float:
    """The rate with the lowest held-out loss of seed 0."""
    return min(RATES[optimizer], key=lambda rate: runs[f"{preset} {optimizer} {rate:g} 0"]["eval_loss"])


def at_best_rate(preset: str, optimizer: str, runs: dict[str, dict]) -> list[dict]:
    """The runs of an optimizer at its best rate, of every seed."""
    rate = best_rate(preset, optimizer, runs)
    return [runs[f"{preset} {optimizer} {rate:g} {seed}"] for seed in SEEDS]


def end(losses: list[float], step: int | None = None) -> float:
    """The mean training loss of the SMOOTHED steps up to `step`, or of the last ones."""
    return statistics.mean(losses[:step][-SMOOTHED:])


def steps_to(loss: float, losses: list[float]) -> int | None:
    """The first step whose smoothed loss is at most `loss`."""
    return next((n for n in range(SMOOTHED, len(losses) + 1) if end(losses, n) <= loss), None)


def table(runs: dict[str, dict]) -> str:
    """The tables of RESULTS.md: held-out losses by rate, and the seeds at the best rates."""
    lines = ["| optimizer | learning rate | " + " | ".join(f"held-out loss, `{preset}`" for preset in PRESETS) + " |"]
    lines += ["|---|---|" + "---|" * len(PRESETS)]
    for optimizer, rates in RATES.items():
        for rate in rates:
            losses = [runs[f"{preset} {optimizer} {rate:g} 0"]["eval_loss"] for preset in PRESETS]
            lines.append(f"| {NAMES[optimizer]} | {rate:g} | " + " | ".join(f"{loss:.4f}" for loss in losses) + " |")
    lines += ["", "| model | seed | AdamW | Muon | steps to AdamW's loss | of its steps |", "|---|---|---|---|---|---|"]
    for preset in PRESETS:
        pairs = zip(*(at_best_rate(preset, optimizer, runs) for optimizer in NAMES), strict=True)
        for seed, (adamw, muon) in zip(SEEDS, pairs, strict=True):
            steps, all_steps = steps_to(end(adamw["loss"]), muon["loss"]), len(adamw["loss"])
            reached = f"{steps} | {steps / all_steps:.0%}" if steps else "not reached | "
            lines.append(f"| {preset} | {seed} | {adamw['eval_loss']:.4f} | {muon['eval_loss']:.4f} | {reached} |")
    return "\n".join(lines)


def plot(runs: dict[str, dict], path: str) -> None:
    """Draws the training losses of all seeds at the best rates, as means of SMOOTHED steps."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError('plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for preset, axes in zip(PRESETS, figure.subplots(1, len(PRESETS)), strict=True):
        for color, (optimizer, name) in zip(("C0", "C1"), NAMES.items(), strict=True):
            for seed, run in zip(SEEDS, at_best_rate(preset, optimizer, runs), strict=True):
                steps = range(SMOOTHED, len(run["loss"]) + 1)
                label = f"{name}, {best_rate(preset, optimizer, runs):g}" if seed == SEEDS[0] else None
                axes.plot(steps, [end(run["loss"], step) for step in steps], color, alpha=0.7, label=label)
        axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{preset}, measured; a line is a seed")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def compile_update() -> None:
    """Compiles train.update alone for TPU7x, without forward and backward pass, and prints its schedule."""
    config, (chip, _) = from_preset(**UPDATE), parse_topology(TOPOLOGY)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), aot.devices_of(TOPOLOGY))
    shardings = train.state_shardings(config, mesh)
    state = jax.eval_shape(partial(train.init_state, config=config), jax.random.key(0))
    shaped = lambda array, layout: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)
    state = jax.tree.map(shaped, state, shardings)
    accept = jax.ShapeDtypeStruct((), bool, sharding=NamedSharding(mesh, P()))
    out_shardings = shardings.params, shardings.opt_state
    update = partial(train.update, config=config, mesh=mesh)
    lowered = jax.jit(update, donate_argnums=0, out_shardings=out_shardings).lower(state, state.params, accept)
    lowered = aot.Lowered(lowered, list(mesh.devices.flat))
    _, program = aot.compile_step(lowered, compiler_flags.for_run(config), config.compilation_cache)
    options = dict(rates=schedule.rates_of(chip), chips=lowered.chips)
    schedule.print_breakdown(schedule.walk(hlo.parse(program), **options), 12)


def main() -> None:
    parser = command.parser(__file__)
    commands = ("table", "run", "plot", "update")
    parser.add_argument("command", nargs="?", choices=commands, default="table", help="what to do [%(default)s]")
    picture = "docs/figures/muon.png"
    parser.add_argument("path", type=command.path, nargs="?", default=picture, help="file of the picture [%(default)s]")
    args = command.arguments(parser)
    if args.command == "update":
        compile_update()
        return
    if args.command == "run":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        for preset in PRESETS:
            for optimizer, rates in RATES.items():
                for rate in rates:
                    trained(preset, optimizer, rate, 0)
            for optimizer in RATES:
                for seed in SEEDS[1:]:
                    trained(preset, optimizer, best_rate(preset, optimizer, known()), seed)
    if args.command == "plot":
        plot(known(), args.path)
    print(table(known()))


if __name__ == "__main__":
    command.run(main)
