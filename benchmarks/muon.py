"""Muon against AdamW: the losses of `tiny` with either, for the same tokens.

    python benchmarks/muon.py                  the table of stored runs; runs nothing
    python benchmarks/muon.py run              runs those that are not stored (20 minutes on 2 idle cores)
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
from jax.experimental import topologies
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
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (3e-3, 1e-2, 3e-2)}
SEEDS = (0, 1, 2)
FLAGS = dict(preset="tiny", mesh="data:1", batch=4, steps=150, sample=0, eval_every=0)
SMOOTHED = 10  # steps
UPDATE = dict(preset="llama3.1-70b", mesh="fsdp:128", optimizer="muon")
TOPOLOGY = "tpu7x:4x4x4"


def known() -> dict[str, dict]:
    """The stored runs, {"optimizer rate seed": {"loss": of each step, "eval_loss"}}."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def trained(optimizer: str, rate: float, seed: int) -> dict:
    """A run: the stored one, or one that is made and stored."""
    runs, name = known(), f"{optimizer} {rate:g} {seed}"
    if name not in runs:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "metrics.jsonl"
            own = dict(optimizer=optimizer, learning_rate=rate, seed=seed, metrics_file=str(file))
            with contextlib.redirect_stdout(io.StringIO()):
                figures = train.run(from_preset(**FLAGS, **own))
            lines = [json.loads(line) for line in file.read_text().splitlines()]
        losses = [round(line["loss"], 4) for line in lines if "loss" in line]
        runs[name] = dict(loss=losses, eval_loss=round(figures["eval_loss"], 4))
        print(name, runs[name]["eval_loss"], flush=True)
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(run)}" for key, run in sorted(runs.items()))
        with outputs.replacing(RECORDED) as out:
            out.write(f"{{\n{rows}\n}}\n")
    return runs[name]


def best_rate(optimizer: str, runs: dict[str, dict]) -> float:
    """The rate with the lowest held-out loss of seed 0."""
    return min(RATES[optimizer], key=lambda rate: runs[f"{optimizer} {rate:g} 0"]["eval_loss"])


def end(losses: list[float], step: int | None = None) -> float:
    """The mean training loss of the SMOOTHED steps up to `step`, or of the last ones."""
    return statistics.mean(losses[:step][-SMOOTHED:])


def steps_to(loss: float, losses: list[float]) -> int | None:
    """The first step whose smoothed loss is at most `loss`."""
    return next((n for n in range(SMOOTHED, len(losses) + 1) if end(losses, n) <= loss), None)


def table(runs: dict[str, dict]) -> str:
    """The tables of RESULTS.md: held-out losses by rate, and the seeds at the best rates."""
    lines = ["| optimizer | learning rate | held-out loss, seed 0 |", "|---|---|---|"]
    for optimizer, rates in RATES.items():
        lines += [f"| {optimizer} | {rate:g} | {runs[f'{optimizer} {rate:g} 0']['eval_loss']:.4f} |" for rate in rates]
    best = {optimizer: best_rate(optimizer, runs) for optimizer in RATES}
    lines += ["", "| seed | AdamW | Muon | steps to AdamW's loss | of its steps |", "|---|---|---|---|---|"]
    for seed in SEEDS:
        adamw, muon = (runs[f"{optimizer} {best[optimizer]:g} {seed}"] for optimizer in ("adamw", "muon"))
        steps, all_steps = steps_to(end(adamw["loss"]), muon["loss"]), len(adamw["loss"])
        reached = f"{steps} | {steps / all_steps:.0%}" if steps else "not reached | "
        lines.append(f"| {seed} | {adamw['eval_loss']:.4f} | {muon['eval_loss']:.4f} | {reached} |")
    return "\n".join(lines)


def compile_update() -> None:
    """Compiles train.update alone for TPU7x, without forward and backward pass, and prints its schedule."""
    config, (chip, chips) = from_preset(**UPDATE), parse_topology(TOPOLOGY)
    wrap = tuple(axis.wrap for axis in chip.axes(chips))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY, wrap=wrap).devices
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), devices)
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
    parser.add_argument("command", nargs="?", choices=("table", "run", "update"), default="table", help="[%(default)s]")
    args = command.arguments(parser)
    if args.command == "update":
        compile_update()
        return
    if args.command == "run":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        for optimizer, rates in RATES.items():
            for rate in rates:
                trained(optimizer, rate, 0)
        for optimizer in RATES:
            for seed in SEEDS[1:]:
                trained(optimizer, best_rate(optimizer, known()), seed)
    print(table(known()))


if __name__ == "__main__":
    command.run(main)
