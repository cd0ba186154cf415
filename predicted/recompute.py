"""The recomputation policies, predicted: what each saves, what it computes again, how long the step takes, what fits.

    python roofline.py remat --preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --seq_len=8192       every policy
    python roofline.py remat --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --remat=auto

The policies are anatomy.py's, their idea is in remat.py, and the prediction of a step is step.py's. `best` takes the
shortest step of those that fit: in a device's memory and in its share of the host's (120 GB for each TPU7x device),
both with planner.py's margin.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence

import command
import flags as flags_lib
import placement
import rules
from config import REMAT_POLICIES, Config
from hardware import Chip, by, parse_topology, si
from predicted import transformer
from predicted.planner import ROOM
from predicted.step import GiB, Prediction, plot, predict, short_of
from predicted.workload import TODAY, Efficiency, run_of


def candidates(config: Config) -> list[Config]:
    """`config` with each policy; `custom` among them if it is its own."""
    own = [config] if config.remat == "custom" else []
    names = [name for name in REMAT_POLICIES if name != "custom"]
    named = [dataclasses.replace(config, remat=name, remat_tensors="") for name in names]
    sizes = placement.parse_mesh(config.mesh)
    return [one for one in named if not rules.offloaded_by_a_stage(one, sizes)] + own


def predictions(
    config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1, efficiency: Efficiency = TODAY
) -> dict[str, Prediction]:
    """The step by policy; `config.remat` is not looked at, unless it is custom."""
    on_machine = lambda one: run_of(one, chip, topology, num_slices=num_slices, efficiency=efficiency)
    return {one.remat: predict(on_machine(one)) for one in candidates(config)}


def recomputed_share(found: Prediction) -> float:
    """FLOPs that the backward pass repeats, over the training FLOPs."""
    config = found.run.config
    again = math.fsum(transformer.recomputed_flops_per_token(config).values())
    return again / transformer.train_flops_per_token(config)


def fits(found: Prediction) -> bool:
    """In the memory that planner.py lets a prediction have."""
    return not found.lacks(ROOM)


def best(found: dict[str, Prediction]) -> str:
    """The policy of the shortest step of those that fit; of equal ones, what recomputes least, then what saves least.

    Raises:
      ValueError: none fits, with the one that is nearest to it and what it lacks.
    """
    fitting = {name: one for name, one in found.items() if fits(one)}
    if not fitting:
        name, one = min(found.items(), key=lambda item: math.fsum(item[1].lacks(ROOM).values()))
        lacks = one.lacks(ROOM)
        raise ValueError(
            f"no policy fits: remat={name} lacks least, it needs {one.hbm_bytes / GiB:.1f} GiB of "
            f"{ROOM * one.run.hbm_limit / GiB:.1f} ({ROOM:.0%} of what there is), {short_of(lacks)}; "
            f"more devices{'' if 'host' in lacks else ', or --microbatches'}"
        )
    cost = lambda name: (found[name].step_s, recomputed_share(found[name]), found[name].hbm_bytes)
    return min(fitting, key=cost)


def auto(config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1) -> str:
    """The policy that remat=auto stands for: the `best` of those with a name. Raises ValueError if none fits."""
    named_only = dataclasses.replace(config, remat="auto", remat_tensors="")
    return best(predictions(named_only, chip, topology, num_slices=num_slices))


def resolve(config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1) -> Config:
    """`config` with the policy that its remat=auto stands for; any other config as it is. Raises as `auto` does."""
    if config.remat != "auto":
        return config
    return dataclasses.replace(config, remat=auto(config, chip, topology, num_slices=num_slices))


# -- command line


def row(found: Prediction) -> dict:
    """A policy's numbers. `saved_bytes` and `offloaded_bytes` are one layer's, on average, of a microbatch."""
    run = found.run
    layers = run.config.num_layers / run.pipe * run.in_flight  # that a device has under way
    link = [part for part in found.parts if part.name == "host offload"]
    return {
        "saved_bytes": found.memory["saved activations"] / layers,
        "offloaded_bytes": found.host_bytes / layers,
        "recomputed_share": recomputed_share(found),
        "host_bytes": found.host_bytes,
        "host_s": math.fsum(part.seconds for part in link),
        "host_exposed_s": math.fsum(part.exposed_s for part in link),
        "hbm_bytes": found.hbm_bytes,
        "step_s": found.step_s,
        "fits": fits(found),
    }


def describe(found: dict[str, Prediction], chosen: str) -> str:
    """The table: a line a policy."""
    run = next(iter(found.values())).run
    config = run.config
    mesh = ", ".join(f"{axis} {size}" for axis, size in run.sizes.items() if size > 1)
    lines = [
        f"{config.preset} on {run.chip.name}:{by(run.topology)}, {run.num_chips:,} chips, mesh {mesh or 'one device'}, "
        f"batch {config.batch:,} of {config.seq_len:,} tokens; of a device, predicted",
        "",
        f"{'':34}{'a layer saves':>26}{'recomputed':>12}{'host link':>12}{'waited for':>12}{'HBM':>12}{'step':>11}",
        f"{'':34}{'in HBM':>13}{'on the host':>13}{'of training':>12}",
    ]
    for name, one in found.items():
        its = row(one)
        link = [(si(its[key], unit)) for key, unit in (("host_s", "s"), ("host_exposed_s", "s"))]
        on_host, seconds, waited = (si(its["offloaded_bytes"], "B"), *link) if its["host_s"] else ("-", "-", "-")
        lines.append(
            f"{'* ' if name == chosen else '  '}{name:32}{si(its['saved_bytes'], 'B'):>13}{on_host:>13}"
            f"{its['recomputed_share']:12.1%}{seconds:>12}{waited:>12}{its['hbm_bytes'] / GiB:8.2f} GiB"
            f"{si(its['step_s'], 's'):>11}{'' if its['fits'] else f'  does not fit, {short_of(one.lacks(ROOM))}'}"
        )
    limit = f"{ROOM * run.hbm_limit / GiB:.1f} GiB, {ROOM:.0%} of what there is"
    why = f"the shortest step of those that fit in {limit}" if chosen else f"none fits in {limit}"
    return "\n".join([*lines, "", f"--remat=auto: {f'{chosen}, ' if chosen else ''}{why}"])


def add_remat_command(commands) -> None:
    about = "what each recomputation policy saves, recomputes and takes; the best with --remat=auto"
    style = dict(allow_abbrev=False, usage="%(prog)s [--flag=value ...]")
    parser = commands.add_parser("remat", help=about, description=about, **style)
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds and bytes")
    parser.add_argument(
        "--plot", type=command.path, metavar="FILE.png", help="draw the parts of each step; needs matplotlib"
    )
    flags_lib.add_run_flags(parser, "tpu7x:2x2x1")
    parser.set_defaults(run=print_policies, parser=parser)


def print_policies(args: argparse.Namespace) -> None:
    """All policies; the one of --remat, or with --remat=auto the best."""
    asked = getattr(args, "remat", "")
    config = flags_lib.from_args(args)
    topology, num_slices = flags_lib.slice_of(args)
    found = predictions(config, *parse_topology(topology), num_slices=num_slices)
    chosen = best(found) if asked == "auto" or any(map(fits, found.values())) else ""
    shown = {"": found, "auto": {chosen: found.get(chosen)}}.get(asked) or {asked: found[asked]}
    if args.plot:
        plot(shown, args.plot)
    if args.json:
        print(json.dumps({"kind": "predicted", "auto": chosen, "policies": {n: row(one) for n, one in shown.items()}}))
    else:
        print(describe(shown, chosen))
