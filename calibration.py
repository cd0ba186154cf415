"""Calibration: the largest elements that FP8 scales are made for, carried from step to step or stored as a profile.

    python train.py --fp8=calibrate --fp8_scales=scales.json --steps=20    train, and write a profile
    python train.py --fp8=static --fp8_scales=scales.json                  train with it

**Idea.** A scale comes from the largest element of a tensor, so the full tensor must be computed before its first
element can be rounded (fp8.py). Two recipes avoid that, with one number for each operand of each layer:

    delayed    the largest of the last 16 steps: a history in the training state, saved and restored with it
    static     the largest of a profile, times 2, because weights and activations grow in a run. Nothing is computed

**Operands.** `x` of each group of weights that multiply the same activation, and `dy`, the gradient of the product, of
each weight. Weights themselves have no entry: their maximum is that of a shard, 1/fsdp of the weight.

**Observed maxima** come out of a step as the gradients of the expected ones, of which no derivative is ever taken
(fp8.dot). So autodiff carries them out of the layer loop and of recomputation. Microbatches report their maximum.

**The first step** of a delayed run has no history. Activations after a norm, and products of two of them, are far from
448, so their scale is 1. A gradient is about 1/tokens. e5m2 spans 32 powers of two below its largest number, so
8/tokens is safe for any gradient, and the second step knows better.

**A profile** belongs to a model, its FP8 matmuls, and its tokens a step, since gradients are in proportion to 1/tokens.
"""

import functools
import hashlib
import json

import jax
import jax.numpy as jnp

import anatomy
import command
import config as config_lib
import outputs
from config import Config

HISTORY = 16  # steps
MARGIN = 2.0  # factor of static scales
PROFILE_FIELDS = config_lib.deciding("scales")  # recorded in a profile, and compared with the run that uses it


def check(config: Config) -> None:
    """Raises ValueError if the config needs a profile that is missing, or writes one without a file name."""
    if config.fp8 == "static":
        load(config)
    elif config.fp8 == "calibrate" and not config.fp8_scales:
        raise ValueError("fp8=calibrate needs --fp8_scales=FILE, to write its profile to")


def initial(config: Config) -> dict:
    """The history before the first step, {weight: {x or dy: float32 [steps, L]}}, newest first; {} if none is used."""
    if config.fp8 not in ("delayed", "calibrate"):
        return {}
    first = {"x": 448.0, "dy": 8.0 / (config.batch * config.seq_len)} if config.fp8 == "delayed" else {}
    zeros = jnp.zeros((HISTORY if config.fp8 == "delayed" else 1, config.num_layers))
    return {name: {kind: zeros.at[0].set(first.get(kind, 0.0)) for kind in kinds} for name, kinds in _operands(config)}


def _operands(config: Config):
    """(weight, its operands) for each weight in FP8. An x that several weights multiply belongs to the first."""
    for first, *others in anatomy.fp8_groups(config):
        yield first, ("x", "dy")
        yield from ((name, ("dy",)) for name in others)


def expected(history: dict, config: Config) -> dict:
    """The largest elements to expect in a step, {weight: {x or dy: float32 [L]}}."""
    if config.fp8 == "static":
        larger = lambda amax: MARGIN * jnp.array(amax, jnp.float32)
        return {name: {kind: larger(amax) for kind, amax in kinds.items()} for name, kinds in load(config).items()}
    return jax.tree.map(lambda amax_SL: jnp.max(amax_SL, 0), history)


def updated(history: dict, observed: dict, updates: jax.Array, config: Config) -> dict:
    """The history after a step with these observed maxima. The initial guess is dropped if `updates`, so far, is 0."""

    def shift(amax_SL, observed_L):
        if config.fp8 == "calibrate":
            return jnp.maximum(amax_SL, observed_L[None])
        shifted_SL = jnp.concatenate([observed_L[None], amax_SL[:-1]])
        return jnp.where(updates == 0, jnp.zeros_like(amax_SL).at[0].set(observed_L), shifted_SL)

    return jax.tree.map(shift, history, observed) if history else {}


def save(history: dict, config: Config) -> None:
    """Writes a profile to `config.fp8_scales`, in the first process only. Raises OSError if it cannot."""
    if jax.process_index():
        return
    amax = jax.tree.map(lambda amax_SL: jax.device_get(amax_SL)[0].tolist(), history)
    profile = {"of": {name: getattr(config, name) for name in PROFILE_FIELDS}, "largest": amax}
    with outputs.replacing(config.fp8_scales) as file:
        json.dump(profile, file, indent=1)


def identity(config: Config) -> str:
    """A hash of the profile's content. Raises as `load` does."""
    return hashlib.blake2b(json.dumps(load(config), sort_keys=True).encode(), digest_size=8).hexdigest()


@functools.cache
def load(config: Config) -> dict:
    """The profile `config.fp8_scales`, {weight: {x or dy: [L floats]}}.

    Raises:
      ValueError: the file does not exist, is no profile, or belongs to another model.
    """
    path = config.fp8_scales
    way_out = f"--fp8=calibrate --fp8_scales={path or 'FILE'} makes one"
    try:
        profile = json.loads(command.read_text(path)) if path else None
    except (OSError, ValueError) as error:
        raise ValueError(f"fp8_scales={path!r} cannot be read as a profile ({error}); {way_out}") from None
    if profile is None:
        raise ValueError(f"fp8=static needs a profile, --fp8_scales=FILE; {way_out}")
    shapes = {name: {kind: config.num_layers for kind in kinds} for name, kinds in _operands(config)}
    try:
        run = {name: profile["of"][name] for name in PROFILE_FIELDS}
        largest = profile["largest"]
        complete = {n: {kind: len(amax) for kind, amax in kinds.items()} for n, kinds in largest.items()} == shapes
        complete = complete and all(a >= 0 for kinds in largest.values() for amax in kinds.values() for a in amax)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"fp8_scales={path!r} is no profile ({type(error).__name__}: {error}); {way_out}") from None
    differing = [
        f"{name} is {run[name]!r} there and {getattr(config, name)!r} here"
        for name in PROFILE_FIELDS
        if run[name] != getattr(config, name)
    ]
    if differing:
        raise ValueError(f"fp8_scales={path!r} is of another run: {', '.join(differing)}; {way_out}")
    if not complete:
        raise ValueError(f"fp8_scales={path!r} does not have a number for each operand of each layer; {way_out}")
    return largest
