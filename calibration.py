"""Calibration: the largest elements that 8-bit scales are made for, remembered from step to step, or profiled and kept.

    python train.py --fp8=calibrate --fp8_scales=scales.json --steps=20    profile: train, and write what was largest
    python train.py --fp8=static --fp8_scales=scales.json                  use it

A scale comes from the largest element of a tensor, and to know that one, all of the tensor has to be there before the
first element can be rounded (fp8.py). Two recipes do without, each with one number for each operand of each layer:

    delayed    the largest of the last 16 steps, a history in the training state, saved and restored with it
    static     the largest of a profile, times 2: weights and activations grow in a run. Then nothing is computed at all

The operands: `x` of each group of weights that multiply the same activation, and of each weight `dy`, the gradient of
its product. Weights are no part of it: who quantises one has its shard in hand, 1/fsdp of it.

The numbers come out of a step as gradients of those that went in, which no derivative is ever taken of (fp8.dot): so
they come out of loops over layers and recomputation by themselves, and of microbatches the largest counts.

**The first step** of a delayed run has no past. Activations behind a norm, and products of two of them, are far from
448, so their scale is 1. A gradient is about 1/tokens: e5m2 reaches 32 powers of two down from its largest number, so
8/tokens for that serves whatever there is, and the second step knows better.

**A file** belongs to a model, its 8-bit matmuls, and its tokens a step, as gradients are in proportion to 1/tokens.
"""

import functools
import hashlib
import json

import jax
import jax.numpy as jnp

import anatomy
import command
import outputs
from config import Config

HISTORY = 16  # steps
MARGIN = 2.0  # of static scales
OF_A_FILE = (
    "vocab_size num_layers model_dim ff_dim num_heads num_kv_heads head_dim batch seq_len microbatches fp8_modules"
).split()


def check(config: Config) -> None:
    """Raises ValueError where a file of scales is wanted and cannot be."""
    if config.fp8 == "static":
        load(config)
    elif config.fp8 == "calibrate" and not config.fp8_scales:
        raise ValueError("fp8=calibrate needs --fp8_scales=FILE, to write its profile to")


def initial(config: Config) -> dict:
    """{weight: {x or dy: float32 [steps, L]}}, the newest step first; nothing where the recipe does without."""
    if config.fp8 not in ("delayed", "calibrate"):
        return {}
    first = {"x": 448.0, "dy": 8.0 / (config.batch * config.seq_len)} if config.fp8 == "delayed" else {}
    zeros = jnp.zeros((HISTORY if config.fp8 == "delayed" else 1, config.num_layers))
    return {name: {kind: zeros.at[0].set(first.get(kind, 0.0)) for kind in kinds} for name, kinds in _operands(config)}


def _operands(config: Config):
    """(weight, its operands to be known) for each weight; what several multiply is known by the first of them."""
    for first, *others in anatomy.fp8_groups(config):
        yield first, ("x", "dy")
        yield from ((name, ("dy",)) for name in others)


def expected(history: dict, config: Config) -> dict:
    """{weight: {x or dy: float32 [L]}}: the largest elements to expect in a step."""
    if config.fp8 == "static":
        larger = lambda amax: MARGIN * jnp.array(amax, jnp.float32)
        return {name: {kind: larger(amax) for kind, amax in kinds.items()} for name, kinds in load(config).items()}
    return jax.tree.map(lambda amax_SL: jnp.max(amax_SL, 0), history)


def updated(history: dict, found: dict, updates: jax.Array, config: Config) -> dict:
    """The history, with what a step found in it, behind so many updates. The guess is forgotten after the first."""

    def one(amax_SL, found_L):
        if config.fp8 == "calibrate":
            return jnp.maximum(amax_SL, found_L[None])
        moved_SL = jnp.concatenate([found_L[None], amax_SL[:-1]])
        return jnp.where(updates == 0, jnp.zeros_like(amax_SL).at[0].set(found_L), moved_SL)

    return jax.tree.map(one, history, found) if history else {}


def save(history: dict, config: Config) -> None:
    """Writes a profile to `config.fp8_scales`, the first process for all. Raises OSError where it cannot."""
    if jax.process_index():
        return
    amax = jax.tree.map(lambda amax_SL: jax.device_get(amax_SL)[0].tolist(), history)
    found = {"of": {name: getattr(config, name) for name in OF_A_FILE}, "largest": amax}
    with outputs.replacing(config.fp8_scales) as file:
        json.dump(found, file, indent=1)


def identity(config: Config) -> str:
    """Tells a profile from any of another content. Raises as `load` does."""
    return hashlib.blake2b(json.dumps(load(config), sort_keys=True).encode(), digest_size=8).hexdigest()


@functools.cache
def load(config: Config) -> dict:
    """{weight: {x or dy: [L floats]}}, of a profile.

    Raises:
      ValueError: there is no such file, it is of another model, or no profile at all.
    """
    path = config.fp8_scales
    way_out = f"--fp8=calibrate --fp8_scales={path or 'FILE'} makes one"
    try:
        found = json.loads(command.read_text(path)) if path else None
    except (OSError, ValueError) as error:
        raise ValueError(f"fp8_scales={path!r} cannot be read as a profile ({error}); {way_out}") from None
    if found is None:
        raise ValueError(f"fp8=static needs a profile, --fp8_scales=FILE; {way_out}")
    shapes = {name: {kind: config.num_layers for kind in kinds} for name, kinds in _operands(config)}
    try:
        of = {name: found["of"][name] for name in OF_A_FILE}
        right = {n: {kind: len(amax) for kind, amax in kinds.items()} for n, kinds in found["largest"].items()}
        right = right == shapes and all(a >= 0 for k in found["largest"].values() for v in k.values() for a in v)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"fp8_scales={path!r} is no profile ({type(error).__name__}: {error}); {way_out}") from None
    differing = [f"{name} is {of[name]!r} there and {getattr(config, name)!r} here" for name in OF_A_FILE]
    differing = [text for text, name in zip(differing, OF_A_FILE, strict=True) if of[name] != getattr(config, name)]
    if differing:
        raise ValueError(f"fp8_scales={path!r} is of another run: {', '.join(differing)}; {way_out}")
    if not right:
        raise ValueError(f"fp8_scales={path!r} does not have a number for each operand of each layer; {way_out}")
    return found["largest"]
