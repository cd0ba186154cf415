"""Any legal combination of flags trains as the plain model does: configurations by which every pair of settings occurs.

They are found by a greedy search over random draws: each next one has the most pairs that none before it has. What is
not legal is refused, by the flags or by the mesh, with a sentence; the pairs that never occur are listed here.
"""

import functools
import itertools
import math
import random

import pytest
from test_parallel import SMALL, check_steps

import parameters
import placement
from config import Config

DENSE = dict(qk_norm=True, z_loss=0.01)
WINDOW = dict(window=5, attention_sinks=True, output_bias=True, qkv_bias=True, tied_embeddings=True, num_kv_heads=4)
LATENT = dict(kv_lora_rank=8, rope_head_dim=2, value_head_dim=6, q_lora_rank=16, num_kv_heads=16)
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_dim=16, buffer_factor=4.0, capacity_factor=4.0)
MODELS = {
    "dense": DENSE,
    "window": WINDOW | dict(global_every=2),
    "latent": LATENT,
    "experts": EXPERTS | dict(router_z_loss=0.01, num_shared_experts=1),
    "latent experts": LATENT | EXPERTS | dict(router_scores="sigmoid", router_scale=2.5),
}
AXES = placement.MESH_AXES
SETTINGS = {axis: (1, 2) for axis in AXES} | {
    "model": tuple(MODELS),
    "remat": ("none", "full", "minimal", "custom"),
    "collectives": ("xla", "ring", "ring_bidirectional"),
    "collective_matmul": (False, True),
    "prefetch": (True, False),
    "shard_update": (False, True),
    "offload_optimizer": (False, True),
    "optimizer": ("adamw", "sgd"),
    "microbatches": (1, 2, 4),
    "pipeline_schedule": ("1f1b", "gpipe", "circular"),
    "context_impl": ("ring", "all_gather", "all_to_all"),
    "context_balance": (True, False),
    "moe_impl": ("dropless", "capacity", "reference"),
}
DEFAULTS = {name: values[0] for name, values in SETTINGS.items()}


def settled(draw: dict) -> dict:
    """A draw without what means nothing in it: the schedule of no stages, the dispatch of no experts."""
    has = lambda axis: draw[axis] > 1
    experts = "experts" in draw["model"]
    idle = {
        "pipeline_schedule": not has("pipe"),
        "context_impl": not has("context"),
        "context_balance": not has("context"),
        "collective_matmul": not has("tensor"),
        "shard_update": not has("data"),
        "moe_impl": not experts,
        "expert": not experts,
    }
    return draw | {name: DEFAULTS[name] for name, nothing in idle.items() if nothing}


def config_of(settings: dict) -> Config:
    """Of a run on 8 devices. Raises ValueError for a combination that is refused."""
    flags = {name: value for name, value in settings.items() if name not in (*AXES, "model")}
    flags |= dict(remat_tensors="context:device,out_proj:device") if settings["remat"] == "custom" else {}
    flags |= dict(pipeline_rounds=2) if settings["pipeline_schedule"] == "circular" else {}
    flags |= dict(learning_rate=0.1) if settings["optimizer"] == "sgd" else {}
    sizes = {axis: settings[axis] for axis in AXES}
    sizes["fsdp"] *= 8 // math.prod(sizes.values())
    mesh = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    config = Config(**SMALL | dict(num_layers=4) | MODELS[settings["model"]] | flags, mesh=mesh)
    parameters.check_divides(config, placement.fill_mesh(placement.parse_mesh(mesh), 8))
    return config


def is_legal(settings: dict) -> bool:
    try:
        config_of(settings)
    except ValueError:
        return False
    return True


def pairs(settings: dict) -> set:
    return set(itertools.combinations(settings.items(), 2))


@functools.cache
def covering(draws: int = 4_000, seed: int = 0) -> list[dict]:
    """Settings of which every pair that occurs in a legal draw occurs in one."""
    generator = random.Random(seed)
    legal = []
    for _ in range(draws):
        axes = generator.sample(AXES, 3)  # of size 2
        draw = {name: generator.choice(values) for name, values in SETTINGS.items()}
        draw = settled(draw | {axis: 1 + (axis in axes) for axis in AXES})
        if draw not in legal[-50:] and is_legal(draw):
            legal.append(draw)
    of = [pairs(draw) for draw in legal]
    left, chosen = set().union(*of), []
    while left:
        best = max(range(len(legal)), key=lambda i: len(of[i] & left))
        chosen.append(legal[best])
        left -= of[best]
    return chosen


def name_of(settings: dict) -> str:
    return "-".join(f"{name}={value}" for name, value in settings.items() if value != DEFAULTS[name])


# Of them the first, which have most of the pairs; every one takes half a minute.
CASES = covering()[:8]


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES, ids=name_of)
def test_three_steps_equal_the_reference(settings):
    check_steps(config_of(settings), steps=3)


def test_most_pairs_are_run():
    every, run = (set().union(*map(pairs, cases)) for cases in (covering(), CASES))
    assert len(run) > 0.7 * len(every)


def test_what_would_hang_is_refused():
    """Stages that differ in which of their layers are global, where global layers and others move different things."""
    settings = DEFAULTS | {"pipe": 2, "context": 2, "model": "window", "pipeline_schedule": "circular"}
    with pytest.raises(ValueError, match="all stages must have their global layers at the same places"):
        config_of(settings | {"microbatches": 4})
    config_of(settings | {"pipeline_schedule": "1f1b"})
