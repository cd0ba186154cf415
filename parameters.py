"""The parameters as arrays: shapes, layouts on the mesh and start values by anatomy.py's table, and their FP8 scales.

Master weights are float32; the computation is in `config.dtype`.
"""

import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import anatomy
import fp8
import placement
import sharding
from config import Config
from context import order, ring_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """All parameters, in float32."""

    embed: jax.Array
    layers: "Layers"  # the stack of all that are alike; in a mixture those with experts
    norm: jax.Array
    unembed: jax.Array | None = None  # None: tied to embed
    dense_layers: "Layers | None" = None  # in a mixture: leading layers with a dense MLP


# The weights of a stack of layers, by the names of anatomy.WEIGHTS; None where the model has no such weight. Inside the
# layer loop the dim L is gone and the weights are gathered over fsdp: w_q is w_q_DnH there.
Layers = dataclasses.make_dataclass(
    "Layers",
    [(name, "jax.Array | None", None) for name, weight in anatomy.WEIGHTS.items() if weight.dims[0] == "L"],
    frozen=True,
    namespace={"__module__": __name__},
)
jax.tree_util.register_dataclass(Layers)


# -- shapes, layouts, start values


def _tree(config: Config, leaf) -> Params:
    """A Params with leaf(name, shape, weight) for every weight that the model has."""
    size = anatomy.sizes(config)

    def leaves(weights: dict[str, anatomy.Weight], num_layers: int = 0, prefix: str = "") -> dict:
        shape_of = lambda weight: tuple((size | {"L": num_layers})[dim] for dim in weight.dims)
        return {name: leaf(prefix + name, shape_of(weight), weight) for name, weight in weights.items()}

    params = leaves(anatomy.other_weights(config))
    for stack, (num_layers, experts) in anatomy.layer_stacks(config).items():
        prefix = "" if stack == "layers" else f"{stack}."
        params[stack] = Layers(**leaves(anatomy.layer_weights(config, experts=experts), num_layers, prefix))
    return Params(**params)


def param_shapes(config: Config) -> Params:
    """The parameters as jax.ShapeDtypeStruct, float32."""
    return _tree(config, lambda name, shape, weight: jax.ShapeDtypeStruct(shape, jnp.float32))


def param_specs(config: Config) -> Params:
    """The layout of the parameters; with `shard_update` they and the optimizer state are sharded over `data`, too."""

    def spec(name, shape, weight):
        layout = P(*weight.layout)
        return sharding.add_axis(layout, "data", beside="fsdp") if config.shard_update else layout

    return _tree(config, spec)


def compute_dtypes(config: Config) -> Params:
    """The dtypes that the step computes in: float32 for the router's weights, `config.dtype` for the others."""
    dtype = lambda name: "float32" if name in anatomy.FLOAT32_WEIGHTS else config.dtype
    return _tree(config, lambda name, shape, weight: jnp.dtype(dtype(name)))


def is_matrix(config: Config) -> Params:
    """True for the parameters that weight decay applies to; False for norms and biases."""
    return _tree(config, lambda name, shape, weight: weight.start not in (anatomy.ONES, anatomy.ZEROS))


def init_params(config: Config, key: jax.Array) -> Params:
    """Normal with variance 1/fan-in, and 2L times less for the 2L outputs that add to the residual stream.

    The stream then starts with variance 1, a row of the embedding (fan-in 1: a look-up; D where it is also the
    unembedding), and its sub-layers together add about as much.

    Call it under jit with the parameters' shardings as output: each device then draws its own shards only. The values
    come from the seed and the parameter's name alone, whatever the mesh.
    """
    size = anatomy.sizes(config)

    def draw(name, shape, weight):
        if weight.start in (anatomy.ONES, anatomy.ZEROS):
            return jnp.full(shape, float(weight.start == anatomy.ONES), jnp.float32)
        start = "D" if name == "embed" and config.tied_embeddings else weight.start
        fan_in = math.prod(2 * size[dim] if dim == "L" else size[dim] for dim in start)
        key_of_name = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return jax.random.normal(key_of_name, shape, jnp.float32) * fan_in**-0.5

    return _tree(config, draw)


def of_experts(w: Layers, config: Config) -> Layers:
    """A layer's weights, whole over fsdp, with the matrices of its experts apart: each [z, m] as [e, D, m].

    fsdp cuts the rows of all of them as those of one matrix (moe.py); expert, the major of the two, leaves them whole.
    """

    def apart(w):  # an array, or what is left of it in 8 bits
        by_expert = lambda a: a.reshape(-1, config.model_dim, a.shape[-1]) if a.shape[0] > 1 else a[None]
        return jax.tree.map(by_expert, w)

    names = [name for name in ("expert_gate", "expert_up", "expert_down") if getattr(w, name) is not None]
    return dataclasses.replace(w, **{name: apart(getattr(w, name)) for name in names})


# -- 8 bits


class Scaling(NamedTuple):
    """What a step knows of its 8-bit operands before it has them (calibration.py)."""

    amax: dict  # {weight: {x or dy: float32 [L]}}, the largest elements to expect
    key: jax.Array | None = None  # for stochastic rounding


NOTHING_KNOWN = Scaling({})


def fp8_recipe(config: Config) -> fp8.Recipe:
    scaling = "dynamic" if config.fp8 == "calibrate" else config.fp8
    how = (scaling, config.fp8_granularity, config.fp8_rounding, config.fp8_gradients, config.fp8_block)
    return fp8.Recipe(*how, row_axes=(*placement.BATCH_AXES, "context"), feature_axes=("tensor",))


def unembedding_recipe(config: Config) -> fp8.Recipe | None:
    """Of the logits, if they are made in 8 bits. With the whole vocabulary to multiply, a maximum of today is cheap."""
    if "unembed" not in anatomy.fp8_weights(config):
        return None
    recipe = fp8_recipe(config)
    return dataclasses.replace(recipe, scaling="dynamic") if recipe.uses_amax else recipe


def fp8_contracted(config: Config) -> Params:
    """Of these weights, how many dims their matmul contracts; 0 of all others."""
    names = {name for group in anatomy.fp8_groups(config) for name in group}

    def contracted(name, shape, weight):
        return len(weight.start.replace("L", "")) if name.removeprefix("dense_layers.") in names else 0

    return _tree(config, contracted)


def with_scales(w: Layers, amax: dict, key: jax.Array | None, config: Config) -> Layers:
    """One layer's weights, of which those in 8 bits know the largest elements to expect and the key of their noise."""
    known = {}
    for name in (name for group in anatomy.fp8_groups(config) for name in group if getattr(w, name) is not None):
        own_key = None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
        of_name = amax.get(name, {})
        known[name] = fp8.Weight(getattr(w, name), of_name.get("x"), of_name.get("dy"), own_key)
    return dataclasses.replace(w, **known)


# -- the order of positions


def order_of(config: Config, length: int, ways: int) -> np.ndarray:
    """int [length]: the positions of a sequence in the order in which `ways` parts of `context` hold them."""
    return order(length, ring_size(ways, config.context_impl, config.context_heads), anatomy.in_zigzag(config))
