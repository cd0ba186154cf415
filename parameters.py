"""The parameters: their shapes, their layouts on the mesh, how they start, and which are multiplied in 8 bits.

Each is one annotated field: dims by letter (sharding.py), the mesh axes that cut them, the start. Master weights are
float32, the computation is in `config.dtype`.
"""

import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import Annotated, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import fp8
import placement
import sharding
import transformer
from config import Config
from context import order, ring_size
from rules import in_zigzag

ONES, ZEROS = "ones", "zeros"  # how a parameter starts; any other string names the dims of its fan-in


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers:
    """The weights of all layers, stacked: each with its shape, its layout and how it starts.

    Inside the layer loop the dim L is gone and the weights are whole over fsdp: w_q is w_q_DnH there.
    """

    norm_attention: Annotated[jax.Array, "LD", P("pipe", ("tensor", "fsdp")), ONES]
    w_o: Annotated[jax.Array, "LNUD", P("pipe", "tensor", None, "fsdp"), "NUL"]
    norm_mlp: Annotated[jax.Array, "LD", P("pipe", ("tensor", "fsdp")), ONES]
    # Of some models only; None in the others. Queries, keys and values from the stream:
    w_q: Annotated[jax.Array | None, "LDNH", P("pipe", "fsdp", "tensor", None), "D"] = None
    w_k: Annotated[jax.Array | None, "LDKH", P("pipe", "fsdp", "tensor", None), "D"] = None
    w_v: Annotated[jax.Array | None, "LDKU", P("pipe", "fsdp", "tensor", None), "D"] = None
    # from latents:
    w_q_down: Annotated[jax.Array | None, "LDQ", P("pipe", ("tensor", "fsdp"), None), "D"] = None
    norm_q_latent: Annotated[jax.Array | None, "LQ", P("pipe", "fsdp"), ONES] = None
    w_q_up: Annotated[jax.Array | None, "LQNH", P("pipe", "fsdp", "tensor", None), "Q"] = None
    w_kv_down: Annotated[jax.Array | None, "LDC", P("pipe", ("tensor", "fsdp"), None), "D"] = None
    w_k_rope: Annotated[jax.Array | None, "LDR", P("pipe", ("tensor", "fsdp"), None), "D"] = None
    norm_kv_latent: Annotated[jax.Array | None, "LC", P("pipe", "fsdp"), ONES] = None
    w_k_up: Annotated[jax.Array | None, "LCNI", P("pipe", "fsdp", "tensor", None), "C"] = None
    w_v_up: Annotated[jax.Array | None, "LCNU", P("pipe", "fsdp", "tensor", None), "C"] = None
    # more on them:
    norm_q: Annotated[jax.Array | None, "LH", P("pipe", None), ONES] = None
    norm_k: Annotated[jax.Array | None, "LH", P("pipe", None), ONES] = None
    bias_q: Annotated[jax.Array | None, "LNH", P("pipe", "tensor", None), ZEROS] = None
    bias_k: Annotated[jax.Array | None, "LKH", P("pipe", "tensor", None), ZEROS] = None
    bias_v: Annotated[jax.Array | None, "LKU", P("pipe", "tensor", None), ZEROS] = None
    bias_o: Annotated[jax.Array | None, "LD", P("pipe", ("tensor", "fsdp")), ZEROS] = None
    sinks: Annotated[jax.Array | None, "LN", P("pipe", "tensor"), ZEROS] = None
    # A dense MLP:
    w_gate: Annotated[jax.Array | None, "LDF", P("pipe", "fsdp", "tensor"), "D"] = None
    w_up: Annotated[jax.Array | None, "LDF", P("pipe", "fsdp", "tensor"), "D"] = None
    w_down: Annotated[jax.Array | None, "LFD", P("pipe", "tensor", "fsdp"), "FL"] = None
    # or a mixture of experts, their matrices one below the other (down's transposed: `of_experts`), with their router,
    # and what all tokens share:
    w_router: Annotated[jax.Array | None, "LDE", P("pipe", ("tensor", "fsdp"), None), "D"] = None
    expert_gate: Annotated[jax.Array | None, "LZM", P("pipe", ("expert", "fsdp"), "tensor"), "D"] = None
    expert_up: Annotated[jax.Array | None, "LZM", P("pipe", ("expert", "fsdp"), "tensor"), "D"] = None
    expert_down: Annotated[jax.Array | None, "LZM", P("pipe", ("expert", "fsdp"), "tensor"), "ML"] = None
    bias_router: Annotated[jax.Array | None, "LE", P("pipe", None), ZEROS] = None
    bias_expert_gate: Annotated[jax.Array | None, "LEM", P("pipe", "expert", "tensor"), ZEROS] = None
    bias_expert_up: Annotated[jax.Array | None, "LEM", P("pipe", "expert", "tensor"), ZEROS] = None
    bias_expert_down: Annotated[jax.Array | None, "LED", P("pipe", "expert", None), ZEROS] = None
    selection_bias: Annotated[jax.Array | None, "LE", P("pipe", None), ZEROS] = None  # no gradient: see `balance`
    shared_gate: Annotated[jax.Array | None, "LDJ", P("pipe", "fsdp", "tensor"), "D"] = None
    shared_up: Annotated[jax.Array | None, "LDJ", P("pipe", "fsdp", "tensor"), "D"] = None
    shared_down: Annotated[jax.Array | None, "LJD", P("pipe", "tensor", "fsdp"), "JL"] = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """All parameters, in float32."""

    embed: Annotated[jax.Array, "VD", P("tensor", "fsdp"), ""]
    layers: Layers  # all that are alike; of a mixture those with experts
    norm: Annotated[jax.Array, "D", P(("tensor", "fsdp")), ONES]
    unembed: Annotated[jax.Array | None, "VD", P("tensor", "fsdp"), "D"] = None  # None: tied to embed
    dense_layers: Layers | None = None  # of a mixture: leading layers with a dense MLP


# -- shapes, layouts, start values


def _dims(config: Config) -> dict[str, int]:
    return {
        "L": config.num_layers,
        "D": config.model_dim,
        "F": config.ff_dim,
        "V": config.vocab_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": transformer.key_dim(config),
        "U": transformer.value_dim(config),
        "Q": config.q_lora_rank,
        "C": config.kv_lora_rank,
        "R": config.rope_head_dim,
        "I": config.head_dim,
        "E": config.num_experts,
        "M": config.expert_dim,
        "Z": config.num_experts * config.model_dim,
        "J": config.num_shared_experts * config.expert_dim,
    }


def _tree(config: Config, leaf):
    """A Params with leaf(name, shape, letters, spec, init) in every place that this model has."""
    num_dense = config.num_dense_layers
    params = _leaves(config, leaf, Params, {"unembed"} if config.tied_embeddings else set())
    stack = lambda *args: Layers(**_leaves(config, leaf, Layers, *args))
    params["layers"] = stack(_absent(config, bool(config.num_experts)), config.num_layers - num_dense)
    if num_dense:
        params["dense_layers"] = stack(_absent(config, False), num_dense, "dense_layers.")
    return Params(**params)


def _leaves(config: Config, leaf, cls, absent: set[str], num_layers: int = 0, prefix: str = "") -> dict:
    """{name: leaf(...)} of the arrays of a Params, or of a stack of so many layers."""
    dims, found = _dims(config) | {"L": num_layers}, {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if name in absent or not hasattr(hint, "__metadata__"):
            continue
        letters, spec, init = hint.__metadata__
        spec = sharding.add_axis(spec, "data", beside="fsdp") if config.shard_update else spec
        found[name] = leaf(prefix + name, tuple(dims[letter] for letter in letters), letters, spec, init)
    return found


def _absent(config: Config, experts: bool) -> set[str]:
    """The weights that a layer does not have: one with experts, or a dense one."""
    query_latent = bool(config.q_lora_rank)
    of_some_models = {
        "w_q": not query_latent,
        "w_q_down norm_q_latent w_q_up": query_latent,
        "w_k w_v": not config.kv_lora_rank,
        "w_kv_down w_k_rope norm_kv_latent w_k_up w_v_up": config.kv_lora_rank,
        "norm_q norm_k": config.qk_norm,
        "bias_q bias_k bias_v": config.qkv_bias,
        "bias_o": config.output_bias,
        "sinks": config.attention_sinks,
        "w_gate w_up w_down": not experts,
        "w_router expert_gate expert_up expert_down": experts,
        "bias_router bias_expert_gate bias_expert_up bias_expert_down": experts and config.expert_bias,
        "selection_bias": experts and config.selection_bias,
        "shared_gate shared_up shared_down": experts and config.num_shared_experts,
    }
    return {name for names, there in of_some_models.items() if not there for name in names.split()}


def param_shapes(config: Config) -> Params:
    """The parameters as jax.ShapeDtypeStruct, float32."""
    return _tree(config, lambda name, shape, letters, spec, init: jax.ShapeDtypeStruct(shape, jnp.float32))


def param_specs(config: Config) -> Params:
    """The layout of the parameters; with `shard_update` they (and so the optimizer state) are cut over `data` too."""
    return _tree(config, lambda name, shape, letters, spec, init: spec)


def compute_dtypes(config: Config) -> Params:
    """In what the step computes with them: the router's stay in float32."""
    kept = lambda name: "float32" if name in transformer.FLOAT32_WEIGHTS else config.dtype
    return _tree(config, lambda name, shape, letters, spec, init: jnp.dtype(kept(name)))


def is_matrix(config: Config) -> Params:
    """True for what weight decay applies to; False for norms and biases."""
    return _tree(config, lambda name, shape, letters, spec, init: init not in (ONES, ZEROS))


def num_params(config: Config) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(config)))


def init_params(config: Config, key: jax.Array) -> Params:
    """Normal with variance 1/fan-in, and 2L times less for the 2L outputs that add to the residual stream.

    The stream then starts with variance 1, a row of the embedding (fan-in 1: a look-up; D where it is also the
    unembedding), and its sub-layers together add about as much.

    Call it under jit with the parameters' shardings as output: each device then draws its own shards only. The values
    come from the seed and the parameter's name alone, whatever the mesh.
    """
    dims = _dims(config)

    def draw(name, shape, letters, spec, init):
        if init in (ONES, ZEROS):
            return jnp.full(shape, float(init == ONES), jnp.float32)
        init = "D" if name == "embed" and config.tied_embeddings else init
        fan_in = math.prod(2 * dims[letter] if letter == "L" else dims[letter] for letter in init)
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
    if "unembed" not in transformer.in_8_bits(config):
        return None
    recipe = fp8_recipe(config)
    return dataclasses.replace(recipe, scaling="dynamic") if recipe.uses_amax else recipe


def fp8_contracted(config: Config) -> Params:
    """Of these weights, how many dims their matmul contracts; 0 of all others."""
    names = {name for group in transformer.fp8_groups(config) for name in group}

    def contracted(name, shape, letters, spec, init):
        return len(init.replace("L", "")) if name.removeprefix("dense_layers.") in names else 0

    return _tree(config, contracted)


def with_scales(w: Layers, amax: dict, key: jax.Array | None, config: Config) -> Layers:
    """One layer's weights, of which those in 8 bits know the largest elements to expect and the key of their noise."""
    known = {}
    for name in (name for group in transformer.fp8_groups(config) for name in group if getattr(w, name) is not None):
        own_key = None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
        of_name = amax.get(name, {})
        known[name] = fp8.Weight(getattr(w, name), of_name.get("x"), of_name.get("dy"), own_key)
    return dataclasses.replace(w, **known)


# -- the order of positions


def order_of(config: Config, length: int, ways: int) -> np.ndarray:
    """int [length]: the positions of a sequence in the order in which `ways` parts of `context` hold them."""
    return order(length, ring_size(ways, config.context_impl, config.context_heads), in_zigzag(config))
