"""Any legal combination of flags trains as the reference does: a set of runs that covers every pair of settings.

    python benchmarks/composition.py [FIRST LAST]

Runs three steps of each configuration on 8 simulated devices and prints one row for each: its settings, whether losses
and parameters equal those of the reference in float32, and seconds. With FP8, only the losses are compared, within 1%.

**Idea.** A greedy search over random draws: the next configuration is the draw with the most pairs of settings that no
earlier one has. Illegal draws are discarded; config.py or rules.py refuses them. tests/test_composition.py runs the
first few.

**Left out.** The attention kernel, which takes minutes a step in the simulator (test_parallel.py runs it on two
devices); remat policies that use the host; FP8 recipes whose scales depend on earlier steps.
"""

import collections
import functools
import itertools
import math
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: F401, it makes the 8 devices
import jax
import numpy as np
from jax.sharding import NamedSharding
from support import (
    SMALL,
    assert_close,
    first_state,
    init,
    laid_out,
    make_batches,
    padded,
    reference_after_steps,
    without_padding,
)

import command
import placement
import rules
import sharding
import train
from config import REMAT_POLICIES, Config

DENSE = dict(qk_norm=True, z_loss=0.01)
WINDOW = dict(window=5, attention_sinks=True, output_bias=True, qkv_bias=True, tied_embeddings=True, num_kv_heads=4)
LATENT = dict(kv_lora_rank=8, rope_head_dim=2, value_head_dim=6, q_lora_rank=16, num_kv_heads=16)
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_dim=16)
MODELS = {
    "dense": DENSE,
    "local": dict(window=5, logit_soft_cap=2.0),
    "window": WINDOW | dict(global_every=2),
    "latent": LATENT,
    "experts": EXPERTS | dict(router_z_loss=0.01, num_shared_experts=1),
    "dense and experts": EXPERTS | dict(num_dense_layers=2, expert_bias=True, swiglu_limit=0.5),
    "latent experts": LATENT | EXPERTS | dict(router_scores="sigmoid", router_scale=2.5),
}
AXES = placement.MESH_AXES
SETTINGS = {axis: (1, 2) for axis in AXES} | {
    "model": tuple(MODELS),
    "remat": tuple(name for name in REMAT_POLICIES if not name.endswith("_offloaded")),
    "collectives": ("xla", "ring", "ring_bidirectional"),
    "collective_matmul": (False, True),
    "prefetch": (True, False),
    "double_buffer": (False, True),
    "shard_update": (False, True),
    "offload_optimizer": (False, True),
    "optimizer": ("adamw", "sgd"),
    "microbatches": (1, 2, 4),
    "pipeline_schedule": ("1f1b", "gpipe", "circular"),
    "context_impl": ("ring", "all_gather", "all_to_all"),
    "context_balance": (True, False),
    "moe_impl": ("dropless", "capacity", "reference"),
    "fp8": ("none", "dynamic", "fixed"),
    "fp8_granularity": ("per_tensor", "per_axis"),
    "dim_multiple": (1, 24),
}
DEFAULTS = {name: values[0] for name, values in SETTINGS.items()}


def settled(draw: dict) -> dict:
    """The draw with every setting at its default that has no effect in it, as the schedule without stages."""
    has = lambda axis: draw[axis] > 1
    experts = "experts" in draw["model"]
    model = MODELS[draw["model"]]
    idle = {
        "pipeline_schedule": not has("pipe"),
        "context_impl": not has("context") or draw["model"] == "local",
        "context_balance": not has("context") or draw["context_impl"] == "all_to_all" or "window" in model,
        "collective_matmul": not has("tensor"),
        "prefetch": not (has("fsdp") or has("fsdp_transpose")),
        "double_buffer": not (has("fsdp") or has("fsdp_transpose")) or not draw["prefetch"],
        "shard_update": not has("data"),
        "moe_impl": not experts,
        "expert": not experts,
        "fp8_granularity": draw["fp8"] != "dynamic",
    }
    return draw | {name: DEFAULTS[name] for name, nothing in idle.items() if nothing}


def config_of(settings: dict) -> Config:
    """The configuration of a run on 8 devices. Raises ValueError for a combination that is refused."""
    flags = {name: value for name, value in settings.items() if name not in (*AXES, "model")}
    flags |= dict(remat_tensors="context:device,out_proj:device") if settings["remat"] == "custom" else {}
    flags |= dict(pipeline_rounds=2) if settings["pipeline_schedule"] == "circular" else {}
    flags |= learning_rate(settings)
    # Space for all rows: a model that drops some is another model.
    flags |= dict(capacity_factor=4.0) if settings["moe_impl"] == "capacity" else {}
    flags |= dict(buffer_factor=4.0) if settings["moe_impl"] == "dropless" and settings["expert"] > 1 else {}
    if settings["fp8"] != "none":
        left_out = {"qkv"} if "latent" in settings["model"] else set()
        left_out |= {"moe"} if "experts" in settings["model"] and settings["fp8_granularity"] == "per_axis" else set()
        modules = [name for name in ("qkv", "out", "mlp", "moe") if name not in left_out]
        flags |= dict(fp8_modules=",".join(modules))
    sizes = {axis: settings[axis] for axis in AXES}
    sizes["fsdp"] *= 8 // math.prod(sizes.values())
    mesh = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    config = Config(**SMALL | dict(num_layers=4) | MODELS[settings["model"]] | flags, mesh=mesh)
    rules.check(config, placement.fill_mesh(placement.parse_mesh(mesh), 8))
    return config


def learning_rate(settings: dict) -> dict:
    return dict(learning_rate=0.1) if settings["optimizer"] == "sgd" else {}


def plain(settings: dict) -> Config:
    """The configuration of the reference: the same for all settings with this model and optimizer."""
    model = SMALL | dict(num_layers=4) | MODELS[settings["model"]]
    return Config(**model, optimizer=settings["optimizer"], **learning_rate(settings))


def is_legal(settings: dict) -> bool:
    try:
        config_of(settings)
    except ValueError:
        return False
    return True


def pairs(settings: dict) -> set:
    """The pairs of settings that a run tests. With FP8 less is compared, so only pairs with an FP8 setting count."""
    every = set(itertools.combinations(settings.items(), 2))
    if settings["fp8"] == "none":
        return every
    return {pair for pair in every if any("fp8" in name for name, _ in pair)}


@functools.cache
def covering(draws: int = 4_000, seed: int = 0) -> list[dict]:
    """Settings that cover every pair of settings that occurs in a legal draw."""
    generator = random.Random(seed)
    legal = []
    for _ in range(draws):
        axes = generator.sample(AXES, 3)  # of size 2
        draw = {name: generator.choice(values) for name, values in SETTINGS.items()}
        draw = settled(draw | {axis: 1 + (axis in axes) for axis in AXES})
        if draw not in legal[-50:] and is_legal(draw):
            legal.append(draw)
    # A bit for every pair: an intersection of integers is far cheaper than one of sets.
    bits = collections.defaultdict(lambda: 1 << len(bits))
    shown = [sum(bits[pair] for pair in pairs(draw)) for draw in legal]
    left, chosen = (1 << len(bits)) - 1, []
    while left:
        best = max(range(len(legal)), key=lambda i: (shown[i] & left).bit_count())
        chosen.append(legal[best])
        left &= ~shown[best]
    return chosen


def name_of(settings: dict) -> str:
    return "-".join(f"{name}={value}" for name, value in settings.items() if value != DEFAULTS[name])


@functools.cache
def first_params(config: Config):
    """Initial parameters of the reference, on the host."""
    return jax.device_get(init(config))


def trained(settings: dict, steps: int = 3) -> tuple[list[float], object]:
    """The losses of these steps, and the parameters after them. Asserts that no step was skipped."""
    config = config_of(settings)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
    state = first_state(config, mesh, padded(first_params(plain(settings)), config))
    step, losses = train.make_train_step(config, mesh), []
    for batch in make_batches(config, steps):
        placed = jax.device_put(laid_out(batch, config, mesh), NamedSharding(mesh, sharding.BATCH_SPEC))
        state, metrics = step(state, placed)
        losses.append(float(metrics["loss"] + metrics.get("auxiliary_loss", 0)))
    if int(state.step) != steps or int(state.skipped):
        raise AssertionError(f"{int(state.step)} of {steps} steps, {int(state.skipped)} of them skipped")
    return losses, state.params


def check(settings: dict, steps: int = 3, tolerance: float = 1e-5) -> None:
    """Asserts that losses and parameters equal those of the reference; with FP8 only losses, within 1%."""
    losses, params = trained(settings, steps)
    want_params, want_losses = reference_after_steps(plain(settings), steps)
    is_fp8 = settings["fp8"] != "none"
    np.testing.assert_allclose(losses, want_losses, rtol=0.01 if is_fp8 else tolerance)
    if is_fp8:
        if any(loss == want for loss, want in zip(losses, want_losses, strict=True)):
            raise AssertionError(f"losses in FP8 have the bits of the reference's: {losses}")
    else:
        assert_close(without_padding(params, config_of(settings)), want_params, tolerance)


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument(
        "first", nargs="?", type=command.at_least(1), default=1, metavar="FIRST", help="the first one [%(default)s]"
    )
    parser.add_argument("last", nargs="?", type=command.at_least(1), metavar="LAST", help="the last one [of all]")
    args = command.arguments(parser)
    chosen, wrong = covering()[args.first - 1 : args.last], 0
    if not chosen:
        raise ValueError(f"there are {len(covering())} configurations, and none from {args.first} to {args.last}")
    print("| | configuration | equals the reference | s |\n|---|---|---|---|")
    for number, settings in enumerate(chosen, args.first):
        begun = time.perf_counter()
        try:
            check(settings)
            verdict = "yes"
        except Exception as error:  # whatever it is, the others are still to be run
            verdict, wrong = f"no: {(str(error).splitlines() or [type(error).__name__])[0]}", wrong + 1
        print(f"| {number} | {name_of(settings)} | {verdict} | {time.perf_counter() - begun:.0f} |", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    command.run(main)
