"""The anatomy of a model: every weight, activation and recomputation policy, written down once, without JAX.

**Idea.** WEIGHTS is the model as a table: the dims of each weight by letter, its layout on the mesh, its initial
values, and the models that have it. parameters.py makes arrays from it, and the predictions count parameters, FLOPs and
bytes with it. `activations` is the same for the tensors that a layer computes. POLICIES has those that each
recomputation policy saves.

**Layout.** The letters are those of sharding.py. A layout has for each dim the mesh axes that shard it, outermost
first. L, the stack of layers, is sharded over pipe; heads and hidden dims over tensor; one large dim over fsdp.

**Experts.** The matrices of a layer's experts are stored one below the other, [E*D, M], and fsdp shards the rows of all
of them as those of one matrix (moe.py). Down's are stored transposed, so that all three have the same shape.
"""

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

from config import INPUT_ON_DEVICE, Config, changed

BYTES = {"float32": 4, "bfloat16": 2}
ONES, ZEROS = "ones", "zeros"
PADDED_DIMS = "DFMJ"  # those that `dim_multiple` pads, and Z, which has D


# -- weights


@dataclass(frozen=True)
class Weight:
    """A weight of a model: one row of WEIGHTS.

    Attributes:
      part: the part of the model under which it is counted, one of PARTS.
      dims: a letter for each dim. The weights of layers begin with L.
      layout: for each dim the mesh axes that shard it: a name, several, or None.
      start: ONES, ZEROS, or the dims of the fan-in of a normal distribution. An L multiplies the fan-in by
        2 * num_layers, for a matrix that adds to the residual stream.
      makes: the activation that its matmul computes; empty if no matmul multiplies it.
      present: (config, whether the layer has experts) -> whether the layer has this weight.
      by_expert: whether it consists of num_experts equal pieces, experts_per_token of which a token uses.
    """

    part: str
    dims: str
    layout: tuple[str | tuple[str, ...] | None, ...]
    start: str
    makes: str = ""
    present: Callable[[Config, bool], object] = lambda config, experts: True
    by_expert: bool = False


_untied = lambda c, experts: not c.tied_embeddings
_mtp = lambda c, experts: c.mtp
_query = lambda c, experts: not c.q_lora_rank
_query_latent = lambda c, experts: c.q_lora_rank
_key_value = lambda c, experts: not (c.kv_lora_rank or c.shares_kv)
_value = lambda c, experts: not (c.kv_lora_rank or c.keys_as_values or c.shares_kv)
_key_value_latent = lambda c, experts: c.kv_lora_rank
_post_norms = lambda c, experts: c.post_norms
_qk_norm = lambda c, experts: c.qk_norm
_key_norm = lambda c, experts: c.qk_norm and not c.shares_kv
_qkv_bias = lambda c, experts: c.qkv_bias
_key_bias = lambda c, experts: c.qkv_bias and not c.shares_kv
_value_bias = lambda c, experts: c.qkv_bias and not (c.keys_as_values or c.shares_kv)
_output_bias = lambda c, experts: c.output_bias
_sinks = lambda c, experts: c.attention_sinks
_dense = lambda c, experts: not experts
_experts = lambda c, experts: experts
_expert_bias = lambda c, experts: experts and c.expert_bias
_selection_bias = lambda c, experts: experts and c.selection_bias
_layer_scale = lambda c, experts: c.layer_scale
_expert_norms = lambda c, experts: experts and c.expert_norms
_expert_scale = lambda c, experts: experts and c.expert_scale
_shared_norm = lambda c, experts: experts and c.expert_norms and c.num_shared_experts
_shared = lambda c, experts: experts and c.num_shared_experts
_ple = lambda c, experts: c.ple_dim

_SPREAD = ("tensor", "fsdp")  # both for one dim: every device of `tensor` needs all of it, and gathers it
_ROWS = ("expert", "fsdp")  # for the rows of all experts' matrices
_COLUMNS = ("tensor", "fsdp_transpose")  # for the other dim of a matrix, and the vocabulary
WEIGHTS = {
    "embed": Weight("embedding", "VD", (_COLUMNS, "fsdp"), ""),
    # per-layer embeddings: a table with those of all layers side by side, and their part from the model's embedding
    "ple_embed": Weight("layer embedding", "VA", ("tensor", ("fsdp", "fsdp_transpose")), "P", "", _ple),
    "ple_project": Weight("layer inputs", "DYP", ("fsdp", None, _COLUMNS), "D", "ple_context", _ple),
    "norm_ple": Weight("norms", "P", ("tensor",), ONES, "", _ple),
    # all layers
    "norm_attention": Weight("norms", "LD", ("pipe", _SPREAD), ONES),
    "w_o": Weight("attention", "LNUD", ("pipe", _COLUMNS, None, "fsdp"), "NUL", "out_proj"),
    "norm_mlp": Weight("norms", "LD", ("pipe", _SPREAD), ONES),
    "norm_attention_out": Weight("norms", "LD", ("pipe", _SPREAD), ONES, "", _post_norms),
    "norm_mlp_out": Weight("norms", "LD", ("pipe", _SPREAD), ONES, "", _post_norms),
    "layer_scale": Weight("norms", "L", ("pipe",), ONES, "", _layer_scale),  # has no gradient
    # queries, keys and values from the residual stream
    "w_q": Weight("attention", "LDNH", ("pipe", "fsdp", _COLUMNS, None), "D", "query_proj", _query),
    "w_k": Weight("attention", "LDKH", ("pipe", "fsdp", "tensor", "fsdp_transpose"), "D", "key_proj", _key_value),
    "w_v": Weight("attention", "LDKU", ("pipe", "fsdp", "tensor", "fsdp_transpose"), "D", "value_proj", _value),
    # queries, keys and values from latents instead
    "w_q_down": Weight("attention", "LDQ", ("pipe", _SPREAD, "fsdp_transpose"), "D", "query_latent", _query_latent),
    "norm_q_latent": Weight("norms", "LQ", ("pipe", "fsdp"), ONES, "", _query_latent),
    "w_q_up": Weight("attention", "LQNH", ("pipe", "fsdp", _COLUMNS, None), "Q", "query_proj", _query_latent),
    "w_kv_down": Weight("attention", "LDC", ("pipe", _SPREAD, "fsdp_transpose"), "D", "kv_latent", _key_value_latent),
    "w_k_rope": Weight("attention", "LDR", ("pipe", _SPREAD, None), "D", "key_proj", _key_value_latent),
    "norm_kv_latent": Weight("norms", "LC", ("pipe", "fsdp"), ONES, "", _key_value_latent),
    "w_k_up": Weight("attention", "LCNI", ("pipe", "fsdp", _COLUMNS, None), "C", "key_proj", _key_value_latent),
    "w_v_up": Weight("attention", "LCNU", ("pipe", "fsdp", _COLUMNS, None), "C", "value_proj", _key_value_latent),
    # additions to attention in some models
    "norm_q": Weight("norms", "LH", ("pipe", None), ONES, "", _qk_norm),
    "norm_k": Weight("norms", "LH", ("pipe", None), ONES, "", _key_norm),
    "bias_q": Weight("biases", "LNH", ("pipe", "tensor", None), ZEROS, "", _qkv_bias),
    "bias_k": Weight("biases", "LKH", ("pipe", "tensor", None), ZEROS, "", _key_bias),
    "bias_v": Weight("biases", "LKU", ("pipe", "tensor", None), ZEROS, "", _value_bias),
    "bias_o": Weight("biases", "LD", ("pipe", _SPREAD), ZEROS, "", _output_bias),
    "sinks": Weight("biases", "LN", ("pipe", "tensor"), ZEROS, "", _sinks),
    # a dense MLP
    "w_gate": Weight("mlp", "LDF", ("pipe", "fsdp", _COLUMNS), "D", "mlp_gate", _dense),
    "w_up": Weight("mlp", "LDF", ("pipe", "fsdp", _COLUMNS), "D", "mlp_up", _dense),
    "w_down": Weight("mlp", "LFD", ("pipe", _COLUMNS, "fsdp"), "FL", "mlp_down", _dense),
    # a mixture of experts instead, with its router and shared experts
    "w_router": Weight("router", "LDE", ("pipe", _SPREAD, None), "D", "router_logits", _experts),
    "expert_gate": Weight("experts", "LZM", ("pipe", _ROWS, _COLUMNS), "D", "expert_gate", _experts, True),
    "expert_up": Weight("experts", "LZM", ("pipe", _ROWS, _COLUMNS), "D", "expert_up", _experts, True),
    "expert_down": Weight("experts", "LZM", ("pipe", _ROWS, _COLUMNS), "ML", "expert_down", _experts, True),
    "bias_router": Weight("biases", "LE", ("pipe", None), ZEROS, "", _expert_bias),
    "bias_expert_gate": Weight("biases", "LEM", ("pipe", "expert", "tensor"), ZEROS, "", _expert_bias, True),
    "bias_expert_up": Weight("biases", "LEM", ("pipe", "expert", "tensor"), ZEROS, "", _expert_bias, True),
    "bias_expert_down": Weight("biases", "LED", ("pipe", "expert", None), ZEROS, "", _expert_bias, True),
    "selection_bias": Weight("biases", "LE", ("pipe", None), ZEROS, "", _selection_bias),  # has no gradient
    "norm_router": Weight("norms", "LD", ("pipe", _SPREAD), ONES, "", _expert_norms),
    "norm_experts": Weight("norms", "LD", ("pipe", _SPREAD), ONES, "", _expert_norms),
    "norm_experts_out": Weight("norms", "LD", ("pipe", _SPREAD), ONES, "", _expert_norms),
    "norm_shared_out": Weight("norms", "LD", ("pipe", _SPREAD), ONES, "", _shared_norm),
    "expert_scale": Weight("router", "LE", ("pipe", None), ONES, "", _expert_scale),
    "shared_gate": Weight("shared experts", "LDJ", ("pipe", "fsdp", _COLUMNS), "D", "shared_gate", _shared),
    "shared_up": Weight("shared experts", "LDJ", ("pipe", "fsdp", _COLUMNS), "D", "shared_up", _shared),
    "shared_down": Weight("shared experts", "LJD", ("pipe", _COLUMNS, "fsdp"), "JL", "shared_down", _shared),
    # what a layer makes of its own embedding of a token
    "w_ple_gate": Weight("layer inputs", "LDP", ("pipe", "fsdp", _COLUMNS), "D", "ple_gate", _ple),
    "w_ple_out": Weight("layer inputs", "LPD", ("pipe", _COLUMNS, "fsdp"), "PL", "ple_out", _ple),
    "norm_ple_out": Weight("norms", "LD", ("pipe", _SPREAD), ONES, "", _ple),
    # after the layers
    "norm": Weight("norms", "D", (_SPREAD,), ONES),
    # multi-token prediction: what its layer starts from, and its last norm
    "norm_mtp_embed": Weight("norms", "D", (_SPREAD,), ONES, "", _mtp),
    "norm_mtp_hidden": Weight("norms", "D", (_SPREAD,), ONES, "", _mtp),
    "w_mtp_embed": Weight("mtp", "DD", (_COLUMNS, "fsdp"), "D", "mtp", _mtp),
    "w_mtp_hidden": Weight("mtp", "DD", (_COLUMNS, "fsdp"), "D", "mtp", _mtp),
    "norm_mtp": Weight("norms", "D", (_SPREAD,), ONES, "", _mtp),
    "unembed": Weight("unembedding", "VD", (_COLUMNS, "fsdp"), "D", "logits", _untied),
}
PARTS = (
    "embedding,layer embedding,layer inputs,attention,mlp,experts,router,shared experts,norms,biases,unembedding,mtp"
).split(",")
MUON_PARTS = frozenset("layer inputs,attention,mlp,experts,shared experts,mtp".split(","))  # orthogonalised by Muon
# The router's weights are not rounded to the dtype of the computation: rounded logits would choose other experts, and
# the selection bias changes by steps too small for bfloat16.
FLOAT32_WEIGHTS = frozenset({"w_router", "bias_router", "selection_bias", "expert_scale"})


def key_dim(config: Config) -> int:
    """Hk, the dims of a query and a key."""
    return config.head_dim + config.rope_head_dim


def value_dim(config: Config) -> int:
    """Hv, the dims of a value."""
    return config.value_head_dim or config.head_dim


def runs_mtp(config: Config) -> bool:
    """Whether a step runs the layer of multi-token prediction."""
    return config.mtp and config.mtp_loss > 0


def num_run_layers(config: Config) -> int:
    """The number of layers that a step runs: those of the model, and that of multi-token prediction."""
    return config.num_layers + runs_mtp(config)


def num_expert_layers(config: Config) -> int:
    """The number of layers with experts that a step runs."""
    return num_run_layers(config) - config.num_dense_layers if config.num_experts else 0


def sizes(config: Config, *, padded: bool = True) -> dict[str, int]:
    """The size of each dim, by its letter: as it is stored, or without the zeros that `dim_multiple` adds."""
    stored = lambda size: size + -size % config.dim_multiple if padded else size
    return {
        "L": config.num_layers,
        "D": stored(config.model_dim),
        "F": stored(config.ff_dim),
        "V": config.vocab_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": key_dim(config),
        "U": value_dim(config),
        "Q": config.q_lora_rank,
        "C": config.kv_lora_rank,
        "R": config.rope_head_dim,
        "I": config.head_dim,
        "E": config.num_experts,
        "M": stored(config.expert_dim),
        "Z": config.num_experts * stored(config.model_dim),
        "J": stored(config.num_shared_experts * config.expert_dim),
        "P": config.ple_dim,
        "Y": config.num_layers,
        "A": config.num_layers * config.ple_dim,
    }


def layer_stacks(config: Config) -> dict[str, tuple[int, bool]]:
    """The stacks of equal layers, {field of Params: (number of layers, whether they have experts)}."""
    num_dense = config.num_dense_layers
    stacks = {"layers": (config.num_layers - num_dense, bool(config.num_experts))}
    stacks |= {"dense_layers": (num_dense, False)} if num_dense else {}
    if two_kinds(config):
        stacks = {stack: (len(layer_numbers(config, stack)), bool(config.num_experts)) for stack in _stacks(config)}
    return stacks | ({"mtp_layers": (1, bool(config.num_experts))} if config.mtp else {})


def layer_numbers(config: Config, stack: str) -> range | list[int]:
    """The numbers of the layers of a stack, from 0; that of multi-token prediction has the number after the last."""
    num_layers, num_dense, every = config.num_layers, config.num_dense_layers, config.global_every
    if stack == "mtp_layers":
        return range(num_layers, num_layers + 1)
    if not two_kinds(config):
        return range(num_dense) if stack == "dense_layers" else range(num_dense, num_layers)
    first_shared = num_layers - config.num_kv_shared_layers
    of_stack = lambda i: _stacks(config)[((i + 1) % every == 0) + 2 * (i >= first_shared)] == stack
    return [i for i in range(num_layers) if of_stack(i)]


def _stacks(config: Config) -> tuple[str, ...]:
    """The stacks of local and global layers, and of those that share the keys and values of the last of each."""
    shared = ("kv_shared_layers", "kv_shared_global_layers") if config.num_kv_shared_layers else ()
    return ("layers", "global_layers", *shared)


def two_kinds(config: Config) -> bool:
    """Whether the weights of global layers have other shapes, so that these layers are a stack of their own."""
    return bool(config.global_head_dim or config.global_kv_heads)


def stack_config(config: Config, stack: str) -> Config:
    """The model as the layers of a stack have it: all are like these."""
    return of_kind(config, "global" in stack, "shared" in stack) if two_kinds(config) else config


def config_of(config: Config, path: str) -> Config:
    """The model as the layers have it to which a weight belongs, such as w_q or global_layers.w_q."""
    return stack_config(config, path.rpartition(".")[0] or "layers")


class _SharesKV(Config):
    """The model as layers have it that share the keys and values of another layer."""

    shares_kv = True


def layer_weights(config: Config, *, experts: bool) -> dict[str, Weight]:
    """The weights of a layer with experts, or of a dense layer."""
    return {name: w for name, w in WEIGHTS.items() if w.dims[0] == "L" and w.present(config, experts)}


def other_weights(config: Config) -> dict[str, Weight]:
    """The weights outside the layers: embeddings and what belongs to them, the last norm, an untied unembedding."""
    return {name: w for name, w in WEIGHTS.items() if w.dims[0] != "L" and w.present(config, False)}


def weight_names(config: Config) -> frozenset[str]:
    """The names of all weights of the model."""
    stacks = layer_stacks(config).items()
    in_layers = (layer_weights(stack_config(config, stack), experts=experts) for stack, (_, experts) in stacks)
    return frozenset(other_weights(config)).union(*in_layers)


@cache
def of_kind(config: Config, is_global: bool, is_shared: bool = False) -> Config:
    """The model as its global layers have it, or as the other layers have it, if these differ in more than the window.

    With `is_shared` the layers are those that share keys and values. The result has no flag of another kind of layer,
    but the window of the model.
    """
    values = {}
    if is_global:
        values = dict(rope_theta=config.global_rope_theta or config.rope_theta)
        values |= dict(head_dim=config.global_head_dim or config.head_dim)
        values |= dict(num_kv_heads=config.global_kv_heads or config.num_kv_heads)
    elif config.global_rope_theta:
        values = dict(rope_type="default", rope_fraction=1.0)
    if two_kinds(config) and not is_global:
        values |= dict(keys_as_values=False)
    if config.num_kv_shared_layers:
        values |= dict(num_kv_shared_layers=0, double_wide_mlp=False)
        values |= dict(ff_dim=config.ff_dim * (2 if is_shared and config.double_wide_mlp else 1))
    kind = changed(config, **values, global_rope_theta=0.0, global_head_dim=0, global_kv_heads=0)
    return _SharesKV(**vars(kind)) if is_shared else kind


def kinds(config: Config) -> tuple[Config, ...]:
    """The model as each kind of its layers has it: the local and the global ones if their weights differ, else one.

    `stack_config` returns the config of layers that share keys and values.
    """
    return (of_kind(config, False), of_kind(config, True)) if two_kinds(config) else (config,)


# -- the sequence


def in_zigzag(config: Config) -> bool:
    """Whether a sequence is sharded over `context` in zigzag order. A window needs positions in order."""
    return config.context_balance and not config.window


# -- FP8


# The weights of a layer by the names of --fp8_modules. Those of a group multiply the same x.
FP8_MODULES = {
    "qkv": (("w_q", "w_k", "w_v"),),
    "out": (("w_o",),),
    "mlp": (("w_gate", "w_up"), ("w_down",), ("shared_gate", "shared_up"), ("shared_down",)),
    "moe": (("expert_gate", "expert_up"), ("expert_down",)),
}


def fp8_groups(config: Config) -> list[tuple[str, ...]]:
    """The weights of a layer whose matmuls are in FP8, in groups that multiply the same x."""
    modules = [] if config.fp8 == "none" else config.fp8_modules.split(",")
    groups = [group for module in modules for group in FP8_MODULES.get(module, ())]
    names = weight_names(config) if groups else frozenset()
    absent = {"w_k", "w_v"} - names  # where values are keys, or both are of another layer
    groups = [tuple(name for name in group if name not in absent) for group in groups]
    return [group for group in groups if names >= {*group}]


def fp8_weights(config: Config) -> frozenset[str]:
    """The names of weights that are multiplied and gathered in FP8, in layers other than `fp8_skip_layers`."""
    logits = config.fp8 != "none" and "unembed" in config.fp8_modules.split(",")
    groups = (group for kind in kinds(config) for group in fp8_groups(kind))
    return frozenset(name for group in groups for name in group) | ({"unembed"} if logits else set())


# -- logits


LOGITS_BYTES = 2**28  # at most so many bytes of logits exist on a device at a time, without --loss_chunk


def loss_chunk(config: Config, sequences: float, positions: int, vocabulary: float) -> int:
    """Positions of each sequence whose logits a device computes at a time: at most `loss_chunk`, in equal chunks.

    With loss_chunk=0 a chunk has at most LOGITS_BYTES of logits in float32. FP8 in blocks rounds up to whole blocks.

    Args:
      sequences: sequences of a microbatch on a device.
      positions: positions of each of them on a device.
      vocabulary: a device's share of the vocabulary.
    """
    most = config.loss_chunk or max(1, int(LOGITS_BYTES / (4 * sequences * vocabulary)))
    chunks = math.ceil(positions / most)
    chunk = math.ceil(positions / chunks)
    if "unembed" in fp8_weights(config) and config.fp8_granularity == "block":
        chunk += -chunk % (config.fp8_block // math.gcd(config.fp8_block, round(sequences)))
    return chunk


# -- activations


# Activations of 4 bytes an element, whatever the dtype of the computation: float32, and int32 in `routing`.
FOUR_BYTE_ACTIVATIONS = {"log_sum_exp", "scores", "router_logits", "routing"}


def expert_capacity(config: Config, tokens: int) -> int:
    """Rows of an expert's buffer for a device's tokens, with --moe_impl=capacity."""
    return min(tokens, math.ceil(config.capacity_factor * tokens * config.experts_per_token / config.num_experts))


def gathers_tokens(config: Config, devices: int) -> bool:
    """Whether each of `devices` along `expert` receives all of their tokens, not the rows of its experts (moe.py)."""
    return config.moe_impl == "dropless" and 1 < devices <= config.experts_per_token


def expert_rows(config: Config, tokens: int, devices: int) -> int:
    """Rows of the buffer of a device's experts, if each of `devices` along `expert` has `tokens` tokens (moe.py).

    `dropless` on one device needs the (token, choice) pairs of its tokens. On several it needs more, since no device
    knows beforehand how many rows it receives. With `capacity` every expert has equally many rows, in the `reference`
    every expert has all tokens. The experts' activations have all these rows, filled or not.
    """
    E, X = config.num_experts, config.experts_per_token
    if config.moe_impl != "dropless":
        return E * (tokens if config.moe_impl == "reference" else expert_capacity(config, tokens))
    largest = devices * tokens * min(X, E // devices)  # if all choices fall on the experts of one device
    wanted = -int(-config.buffer_factor * tokens * X // 32) * 32  # whole registers of any dtype
    return tokens * X if devices == 1 else min(largest, wanted)


def activations(
    config: Config, *, experts: bool = False, fused: bool = True, expert_buffer_ratio: float = 1, row_copies: int = 1
) -> dict[str, float]:
    """Elements a token of every tensor of a layer that a policy may save, in the order in which they are computed.

    Args:
      experts: whether the layer has experts.
      fused: whether attention is a kernel, which saves its result and the log-sum-exp of the scores, not the scores.
      expert_buffer_ratio: the ratio of `expert_rows` to the (token, choice) pairs.
      row_copies: the size of `tensor` if each of its devices holds full rows of experts (mixture.py), else 1.
    """
    size, X = sizes(config), config.experts_per_token
    D, N, K, F, M, J, Hk, Hv = (size[dim] for dim in "DNKFMJHU")
    share = config.share_on_host
    elements = {"decoder_layer_input": share * D} | ({INPUT_ON_DEVICE: (1 - share) * D} if share < 1 else {})
    if config.shares_kv:  # keys and values are carried from layer to layer: they are a part of the layer's input
        elements["decoder_layer_input"] += K * (Hk + Hv)
        K = 0
    elements["norm_attention"] = D
    if config.kv_lora_rank:
        # Before and after their norms. The latter are the operands of the next matmuls.
        if config.q_lora_rank:
            elements |= {"query_latent": config.q_lora_rank, "query_latent_norm": config.q_lora_rank}
        elements |= {"kv_latent": config.kv_lora_rank, "kv_latent_norm": config.kv_lora_rank}
    if config.qk_norm:
        elements |= {"query_before_norm": N * Hk, "key_before_norm": K * Hk}
    if config.value_norm and not (config.keys_as_values and config.qk_norm):  # else it is key_before_norm
        elements |= {"value_before_norm": K * Hv}
    # After rotary positions, whose backward pass reads nothing.
    elements |= {"query_proj": N * Hk, "key_proj": K * Hk, "value_proj": K * Hv}
    elements = {name: each for name, each in elements.items() if each}
    elements |= {"log_sum_exp": N} if fused else {"scores": N * config.seq_len}
    elements |= {"context": N * Hv, "out_proj": D, "mlp_input": D, "norm_mlp": D}
    of_layer = {"ple_gate": config.ple_dim, "ple_product": config.ple_dim, "ple_out": D} if config.ple_dim else {}
    if not experts:
        return elements | {"mlp_gate": F, "mlp_up": F, "mlp_product": F, "mlp_down": D} | of_layer
    rows = X * expert_buffer_ratio
    elements |= {"norm_router": D} if config.expert_norms else {}
    # A pair has its expert, weight and place in the order of all; a place has its pair and weight. Dropless experts on
    # several devices have up to 30 numbers a pair, other methods fewer.
    elements |= {"router_logits": config.num_experts, "routing": 5 * rows}
    elements |= {"expert_input": rows * D * row_copies}
    elements |= {"expert_gate": rows * M, "expert_up": rows * M, "expert_product": rows * M}
    elements |= {"expert_down": rows * D * row_copies}
    elements |= {"expert_sum": D} if config.expert_norms else {}
    if config.num_shared_experts:
        elements |= {"shared_gate": J, "shared_up": J, "shared_product": J, "shared_down": D}
    return elements | ({"mixture_out": D} if config.post_norms else {}) | of_layer


_QKV = frozenset({"query_proj", "key_proj", "value_proj"})
_DOTS = _QKV | {"out_proj"}
_MLP = frozenset(f"{part}_{name}" for part in ("mlp", "expert", "shared") for name in ("gate", "up", "down"))
_KERNEL = frozenset({"context", "log_sum_exp"})
# {policy of config.REMAT_POLICIES: (saved on the device, offloaded to the host)}, in addition to the layer's input and
# the `routing` of a mixture.
POLICIES = {
    "full": (frozenset(), frozenset()),
    "save_out_proj": (frozenset({"out_proj"}), frozenset()),
    "save_qkv_proj": (_QKV, frozenset()),
    "save_dot_except_mlp": (_DOTS, frozenset()),
    "save_dot_with_context_except_mlp": (_DOTS | _KERNEL, frozenset()),
    "minimal": (_DOTS | _MLP, frozenset()),
    "minimal_with_context": (_DOTS | _MLP | _KERNEL, frozenset()),
    "qkv_proj_offloaded": (frozenset(), _QKV),
    "minimal_offloaded": (frozenset(), _DOTS | _MLP),
}


def saved_names(config: Config) -> frozenset[str]:
    """The activations that `config.remat` saves, on the device or on the host.

    The policy `none` recomputes nothing, so it saves all that the backward pass reads. Every other one saves what the
    router chose, unless `custom` says otherwise.
    """
    if config.remat == "none":
        kinds_of_layers = itertools.product(kinds(config), (False, True), (False, True))
        every = set().union(*(activations(kind, experts=e, fused=f) for kind, e, f in kinds_of_layers))
        return read_names(every, config)
    if config.remat == "custom":
        return frozenset(name for name, place in config.remat_places.items() if place != "remat")
    on_device, on_host = POLICIES[config.remat]
    always = ("decoder_layer_input", "routing") if config.num_experts else ("decoder_layer_input",)
    return frozenset(always) | on_device | on_host


def offloaded_names(config: Config) -> frozenset[str]:
    """The saved activations that are offloaded to the host."""
    if config.remat == "custom":
        return frozenset(name for name, place in config.remat_places.items() if place == "offload")
    return POLICIES[config.remat][1] if config.remat in POLICIES else frozenset()


def glu_in_kernel(config: Config) -> bool:
    """Whether one kernel computes gate, up and activation(gate) * up for experts (gmm.gated_gmm).

    Recomputation repeats all of a kernel. A policy may save gate or up but not their product, which down's gradient
    reads. The kernel would then repeat matmuls whose results are saved. So two matmuls and XLA's activation take its
    place, and only the activation is repeated.
    """
    saved, products = saved_names(config), {"expert_gate", "expert_up"}
    saves_some = bool(saved & products) and not saved >= products | {"expert_product"}
    return config.moe_impl == "dropless" and not saves_some


def read_names(saved: Collection[str], config: Config) -> frozenset[str]:
    """The `saved` activations that the backward pass reads. The others take no memory, whatever the policy says.

    It does not read a layer's result, nor attention's output projection if its sum with the residual stream is saved.
    It does not read the results of experts: the router's weights multiply the rows before their last matmul (moe.py).
    The gradient of a norm reads what is normed.
    """
    unread = {"expert_down"}
    if not config.post_norms:
        unread |= {"mlp_down"} | ({"out_proj"} if "mlp_input" in saved else set())
    if not config.expert_norms and ("mixture_out" in saved or not config.post_norms):
        unread |= {"shared_down"}
    return frozenset(saved) - unread
