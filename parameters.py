"""The parameters as arrays: shapes and layouts from the table in anatomy.py, and their FP8 recipes.

Master weights are float32. The computation is in `config.dtype`, and in FP8 if the config says so.
"""

import dataclasses
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
from context import order


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """All parameters, in float32."""

    embed: jax.Array
    layers: "Layers"  # all layers that are in no other stack
    norm: jax.Array
    unembed: jax.Array | None = None  # None if tied to embed
    global_layers: "Layers | None" = None  # those without a window, if their weights have other shapes
    kv_shared_layers: "Layers | None" = None  # the last local layers, and
    kv_shared_global_layers: "Layers | None" = None  # the last global ones, if they share keys and values
    ple_embed: jax.Array | None = None  # per-layer embeddings
    ple_project: jax.Array | None = None
    norm_ple: jax.Array | None = None
    dense_layers: "Layers | None" = None  # in a mixture the leading layers, which have a dense MLP
    mtp_layers: "Layers | None" = None  # the layer of multi-token prediction, and what goes with it
    norm_mtp_embed: jax.Array | None = None
    norm_mtp_hidden: jax.Array | None = None
    w_mtp_embed: jax.Array | None = None
    w_mtp_hidden: jax.Array | None = None
    norm_mtp: jax.Array | None = None


# The weights of a stack of layers, under the names of anatomy.WEIGHTS; None for a weight that the model does not have.
# Inside the layer loop the weights have no dim L and are gathered over fsdp: w_q is w_q_DnH there.
Layers = dataclasses.make_dataclass(
    "Layers",
    [(name, "jax.Array | None", None) for name, weight in anatomy.WEIGHTS.items() if weight.dims[0] == "L"],
    frozen=True,
    namespace={"__module__": __name__},
)
jax.tree_util.register_dataclass(Layers)


# -- shapes and layouts


def tree(config: Config, leaf) -> Params:
    """Params with leaf(name, shape, weight) in place of every weight that the model has."""

    def leaves(weights: dict[str, anatomy.Weight], size: dict[str, int], prefix: str = "") -> dict:
        shape_of = lambda weight: tuple(size[dim] for dim in weight.dims)
        return {name: leaf(prefix + name, shape_of(weight), weight) for name, weight in weights.items()}

    params = leaves(anatomy.other_weights(config), anatomy.sizes(config))
    for stack, (num_layers, experts) in anatomy.layer_stacks(config).items():
        kind, prefix = anatomy.stack_config(config, stack), "" if stack == "layers" else f"{stack}."
        weights, size = anatomy.layer_weights(kind, experts=experts), anatomy.sizes(kind) | {"L": num_layers}
        params[stack] = Layers(**leaves(weights, size, prefix))
    return Params(**params)


def param_shapes(config: Config) -> Params:
    """The shapes of the parameters, as jax.ShapeDtypeStruct in float32."""
    return tree(config, lambda name, shape, weight: jax.ShapeDtypeStruct(shape, jnp.float32))


def param_specs(config: Config) -> Params:
    """The layout of the parameters. With `shard_update` they and the optimizer state are sharded over `data`, too."""

    def spec(name, shape, weight):
        layout = P(*weight.layout)
        return sharding.add_axis(layout, "data", beside="fsdp") if config.shard_update else layout

    return tree(config, spec)


def compute_dtypes(config: Config) -> Params:
    """The dtype in which the step uses each weight: float32 for the router's, `config.dtype` for the others."""
    dtype = lambda name: "float32" if name in anatomy.FLOAT32_WEIGHTS else config.dtype
    return tree(config, lambda name, shape, weight: jnp.dtype(dtype(name)))


def is_matrix(config: Config) -> Params:
    """True for the parameters that weight decay applies to; False for norms and biases."""
    return tree(config, lambda name, shape, weight: weight.start not in (anatomy.ONES, anatomy.ZEROS))


def unstack_experts(w: Layers, config: Config) -> Layers:
    """A layer's gathered weights, with the matrices of its experts as [e, D, m] in place of [z, m].

    They are stored one below the other and sharded by rows (moe.py). `expert` is the major axis of that dim, so each of
    its devices has entire matrices once the rows are gathered over fsdp.
    """

    def unstack(w):  # an array, or the leaves of its quantised form
        by_expert = lambda a: a.reshape(-1, anatomy.sizes(config)["D"], a.shape[-1]) if a.shape[0] > 1 else a[None]
        return jax.tree.map(by_expert, w)

    names = [name for name in ("expert_gate", "expert_up", "expert_down") if getattr(w, name) is not None]
    return dataclasses.replace(w, **{name: unstack(getattr(w, name)) for name in names})


# -- FP8


class Scaling(NamedTuple):
    """The state of FP8 scaling that a step starts from (calibration.py)."""

    amax: dict  # {weight: {x or dy: float32 [L]}}: the largest |element| to expect of each operand
    key: jax.Array | None = None  # for stochastic rounding


NO_SCALING = Scaling({})


def fp8_recipe(config: Config) -> fp8.Recipe:
    """How the operands of the layers' matmuls are quantised."""
    scaling = "dynamic" if config.fp8 == "calibrate" else config.fp8
    options = (scaling, config.fp8_granularity, config.fp8_rounding, config.fp8_gradients, config.fp8_block)
    return fp8.Recipe(*options, row_axes=(*placement.BATCH_AXES, "context"), feature_axes=("tensor",))


def unembedding_recipe(config: Config) -> fp8.Recipe | None:
    """How the operands of the logits' matmul are quantised; None if it is not in FP8.

    Its scaling is dynamic in place of delayed or static: next to a matmul with the vocabulary, a maximum is cheap.
    """
    if "unembed" not in anatomy.fp8_weights(config):
        return None
    recipe = fp8_recipe(config)
    return dataclasses.replace(recipe, scaling="dynamic") if recipe.uses_amax else recipe


def fp8_contracted(config: Config) -> Params:
    """How many dims of each weight its FP8 matmul contracts; 0 for weights that are not in FP8."""
    names = {name for kind in anatomy.kinds(config) for group in anatomy.fp8_groups(kind) for name in group}

    def contracted(name, shape, weight):
        return len(weight.start.replace("L", "")) if name.rpartition(".")[2] in names else 0

    return tree(config, contracted)


def with_scales(w: Layers, amax: dict, key: jax.Array | None, config: Config) -> Layers:
    """One layer's weights; those in FP8 as fp8.Weight, with the largest elements to expect and a rounding key."""
    weights = {}
    for name in (name for group in anatomy.fp8_groups(config) for name in group if getattr(w, name) is not None):
        weight_key = None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
        operands = amax.get(name, {})
        weights[name] = fp8.Weight(getattr(w, name), operands.get("x"), operands.get("dy"), weight_key)
    return dataclasses.replace(w, **weights)


# -- the order of positions


def position_order(config: Config, length: int, ways: int) -> np.ndarray:
    """int [length]: the positions of a sequence, in the order in which `ways` devices of `context` hold them."""
    ring = placement.ring_size(ways, config.context_impl, config.context_heads)
    return order(length, ring, anatomy.in_zigzag(config))
