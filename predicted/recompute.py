"""The recomputation policies, predicted: what each saves and recomputes, how long its step takes, whether it fits.

    python roofline.py remat --preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --seq_len=8192       every policy
    python roofline.py remat --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --remat=auto

The policies are in anatomy.py, their idea is in remat.py, and predicted/step.py predicts a step. `best` takes the
shortest step of the policies that fit in a device's memory and in its share of the host's (120 GB for each TPU7x
device), both with the margin of predicted/planner.py.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence

import anatomy
import command
import flags as flags_lib
import placement
import rules
from config import REMAT_POLICIES, Config
from hardware import Chip, by, parse_topology, si
from predicted import transformer
from predicted.planner import MEMORY_SHARE
from predicted.presentation import plot
from predicted.step import GiB, Prediction, describe_shortfall, predict
from predicted.workload import TODAY, Efficiency, run_of


def candidates(config: Config) -> list[Config]:
    """Returns `config` with each policy; with `custom` too, if that is its policy."""
    own = [config] if config.remat == "custom" else []
    names = [name for name in REMAT_POLICIES if name != "custom"]
    named = [dataclasses.replace(config, remat=name, remat_tensors="") for name in names]
    sizes = placement.parse_mesh(config.mesh)
    return [candidate for candidate in named if not rules.offloaded_by_a_stage(candidate, sizes)] + own


def predictions(
    config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1, efficiency: Efficiency = TODAY
) -> dict[str, Prediction]:
    """Predicts the step with each policy, by its name; `config.remat` is not read, unless it is custom."""
    run = lambda candidate: run_of(candidate, chip, topology, num_slices=num_slices, efficiency=efficiency)
    return {candidate.remat: predict(run(candidate)) for candidate in candidates(config)}


def recomputed_share(prediction: Prediction) -> float:
    """The FLOPs that the backward pass computes again, over the training FLOPs."""
    config = prediction.run.config
    recomputed = math.fsum(transformer.recomputed_flops_per_token(config).values())
    return recomputed / transformer.train_flops_per_token(config)


def fits(prediction: Prediction) -> bool:
    """Whether the step fits in the share of the memory that a plan may fill."""
    return not prediction.shortfall(MEMORY_SHARE)


def best(predicted: dict[str, Prediction]) -> str:
    """Returns the policy of the shortest step that fits.

    Of equally short steps it is the one that recomputes least, then the one that saves least.

    Raises:
      ValueError: no policy fits; with the one that is nearest to it, and what it is short of.
    """
    fitting = [name for name, prediction in predicted.items() if fits(prediction)]
    if not fitting:
        missing = lambda name: math.fsum(predicted[name].shortfall(MEMORY_SHARE).values())
        nearest = min(predicted, key=missing)
        run, shortfall = predicted[nearest].run, predicted[nearest].shortfall(MEMORY_SHARE)
        raise ValueError(
            f"no policy fits: nearest to it is remat={nearest}, which needs {predicted[nearest].hbm_bytes / GiB:.1f} "
            f"GiB of {MEMORY_SHARE * run.hbm_limit / GiB:.1f} ({MEMORY_SHARE:.0%} of the memory), "
            f"{describe_shortfall(shortfall)}; more devices{'' if 'host' in shortfall else ', or --microbatches'}"
        )
    cost = lambda name: (predicted[name].step_s, recomputed_share(predicted[name]), predicted[name].hbm_bytes)
    return min(fitting, key=cost)


def auto(config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1) -> str:
    """Returns the policy that remat=auto means: the `best` of the named ones. Raises ValueError if none fits."""
    named_only = dataclasses.replace(config, remat="auto", remat_tensors="")
    return best(predictions(named_only, chip, topology, num_slices=num_slices))


def resolve(config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1) -> Config:
    """Returns `config` with the policy that remat=auto means; any other config as it is. Raises as `auto` does."""
    if config.remat != "auto":
        return config
    return dataclasses.replace(config, remat=auto(config, chip, topology, num_slices=num_slices))


# -- command line


def row(prediction: Prediction) -> dict:
    """The numbers of a policy. `saved_bytes` and `offloaded_bytes` are of an average layer and one microbatch."""
    run = prediction.run
    layers = anatomy.num_run_layers(run.config) / run.pipe * run.in_flight  # of all microbatches in flight on a device
    offload = [part for part in prediction.parts if part.name == "host offload"]
    return {
        "saved_bytes": prediction.memory["saved activations"] / layers,
        "offloaded_bytes": prediction.host_bytes / layers,
        "recomputed_share": recomputed_share(prediction),
        "host_bytes": prediction.host_bytes,
        "host_s": math.fsum(part.seconds for part in offload),
        "host_exposed_s": math.fsum(part.exposed_s for part in offload),
        "hbm_bytes": prediction.hbm_bytes,
        "step_s": prediction.step_s,
        "fits": fits(prediction),
    }


def describe(predicted: dict[str, Prediction], chosen: str) -> str:
    """The table of the policies, one a line, with the `chosen` one marked."""
    run = next(iter(predicted.values())).run
    config = run.config
    mesh = ", ".join(f"{axis} {size}" for axis, size in run.sizes.items() if size > 1)
    lines = [
        f"{config.preset} on {run.chip.name}:{by(run.topology)}, {run.num_chips:,} chips, mesh {mesh or 'one device'}, "
        f"batch {config.batch:,} of {config.seq_len:,} tokens; of a device, predicted",
        "",
        f"{'':34}{'a layer saves':>26}{'recomputed':>12}{'host link':>12}{'waited for':>12}{'HBM':>12}{'step':>11}",
        f"{'':34}{'in HBM':>13}{'on the host':>13}{'of training':>12}",
    ]
    for name, prediction in predicted.items():
        numbers = row(prediction)
        offloaded = seconds = waited = "-"
        if numbers["host_s"]:
            offloaded = si(numbers["offloaded_bytes"], "B")
            seconds, waited = si(numbers["host_s"], "s"), si(numbers["host_exposed_s"], "s")
        shortfall = describe_shortfall(prediction.shortfall(MEMORY_SHARE))
        lines.append(
            f"{'* ' if name == chosen else '  '}{name:32}{si(numbers['saved_bytes'], 'B'):>13}{offloaded:>13}"
            f"{numbers['recomputed_share']:12.1%}{seconds:>12}{waited:>12}{numbers['hbm_bytes'] / GiB:8.2f} GiB"
            f"{si(numbers['step_s'], 's'):>11}{f'  does not fit, {shortfall}' if shortfall else ''}"
        )
    limit = f"{MEMORY_SHARE * run.hbm_limit / GiB:.1f} GiB, {MEMORY_SHARE:.0%} of the memory"
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
    """Prints all policies, or the one of --remat; with --remat=auto the best."""
    wanted = getattr(args, "remat", "")
    config = flags_lib.from_args(args)
    topology, num_slices = flags_lib.slice_of(args)
    predicted = predictions(config, *parse_topology(topology), num_slices=num_slices)
    chosen = best(predicted) if wanted == "auto" or any(map(fits, predicted.values())) else ""
    only = chosen if wanted == "auto" else wanted
    shown = {only: predicted[only]} if only else predicted
    if args.plot:
        plot(shown, args.plot)
    if args.json:
        policies = {name: row(prediction) for name, prediction in shown.items()}
        print(json.dumps({"kind": "predicted", "auto": chosen, "policies": policies}))
    else:
        print(describe(shown, chosen))
