"""The anatomy of a model: every weight, activation and recomputation policy, written down once, without JAX.

**Idea.** WEIGHTS is the model as a table: the dims of each weight by letter, its layout on the mesh, how it starts, and
the models that have it. parameters.py makes arrays of it, and the predictions count parameters, FLOPs and bytes by it.
`activations` is the same for what a layer computes, and POLICIES names what each recomputation policy saves of that.

**Layout.** The letters are those of sharding.py. In a layout each dim has the mesh axes that shard it, outermost first:
L, the stack of layers, is sharded over pipe; heads and hidden dims over tensor; one large dim over fsdp.

**On TPU7x.** The matrices of a layer's experts are stored one below the other, [E*D, M], and fsdp shards the rows of
them all as those of one matrix (moe.py). Down's are stored transposed, so that all three have the same shape.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from config import Config

BYTES = {"float32": 4, "bfloat16": 2}
ONES, ZEROS = "ones", "zeros"


# -- weights


@dataclass(frozen=True)
class Weight:
    """A weight of a model: one row of WEIGHTS.

    Attributes:
      part: the part of the model under which it is counted, one of PARTS.
      dims: a letter for each dim. A weight of a layer begins with L.
      layout: for each dim the mesh axes that shard it: a name, several, or None.
      start: ONES, ZEROS, or the dims of the fan-in of a normal distribution. L there: 2 * num_layers times the fan-in,
        for a matrix that adds to the residual stream.
      makes: the activation that its matmul makes; none for what no matmul multiplies.
      present: whether a layer has it, by the config and by whether the layer is one with experts.
      by_expert: it consists of num_experts equal pieces, of which a token meets experts_per_token.
    """

    part: str
    dims: str
    layout: tuple[str | tuple[str, ...] | None, ...]
    start: str
    makes: str = ""
    present: Callable[[Config, bool], object] = lambda config, experts: True
    by_expert: bool = False


_untied = lambda c, experts: not c.tied_embeddings
_query = lambda c, experts: not c.q_lora_rank
_query_latent = lambda c, experts: c.q_lora_rank
_key_value = lambda c, experts: not c.kv_lora_rank
_key_value_latent = lambda c, experts: c.kv_lora_rank
_qk_norm = lambda c, experts: c.qk_norm
_qkv_bias = lambda c, experts: c.qkv_bias
_output_bias = lambda c, experts: c.output_bias
_sinks = lambda c, experts: c.attention_sinks
_dense = lambda c, experts: not experts
_experts = lambda c, experts: experts
_expert_bias = lambda c, experts: experts and c.expert_bias
_selection_bias = lambda c, experts: experts and c.selection_bias
_shared = lambda c, experts: experts and c.num_shared_experts

_SPREAD = ("tensor", "fsdp")  # of one dim: for what every device of `tensor` needs whole, and gathers
_ROWS = ("expert", "fsdp")  # the rows of all experts' matrices
WEIGHTS = {
    "embed": Weight("embedding", "VD", ("tensor", "fsdp"), ""),
    # every layer
    "norm_attention": Weight("norms", "LD", ("pipe", _SPREAD), ONES),
    "w_o": Weight("attention", "LNUD", ("pipe", "tensor", None, "fsdp"), "NUL", "out_proj"),
    "norm_mlp": Weight("norms", "LD", ("pipe", _SPREAD), ONES),
    # queries, keys and values from the residual stream
    "w_q": Weight("attention", "LDNH", ("pipe", "fsdp", "tensor", None), "D", "query_proj", _query),
    "w_k": Weight("attention", "LDKH", ("pipe", "fsdp", "tensor", None), "D", "key_proj", _key_value),
    "w_v": Weight("attention", "LDKU", ("pipe", "fsdp", "tensor", None), "D", "value_proj", _key_value),
    # or from latents
    "w_q_down": Weight("attention", "LDQ", ("pipe", _SPREAD, None), "D", "query_latent", _query_latent),
    "norm_q_latent": Weight("norms", "LQ", ("pipe", "fsdp"), ONES, "", _query_latent),
    "w_q_up": Weight("attention", "LQNH", ("pipe", "fsdp", "tensor", None), "Q", "query_proj", _query_latent),
    "w_kv_down": Weight("attention", "LDC", ("pipe", _SPREAD, None), "D", "kv_latent", _key_value_latent),
    "w_k_rope": Weight("attention", "LDR", ("pipe", _SPREAD, None), "D", "key_proj", _key_value_latent),
    "norm_kv_latent": Weight("norms", "LC", ("pipe", "fsdp"), ONES, "", _key_value_latent),
    "w_k_up": Weight("attention", "LCNI", ("pipe", "fsdp", "tensor", None), "C", "key_proj", _key_value_latent),
    "w_v_up": Weight("attention", "LCNU", ("pipe", "fsdp", "tensor", None), "C", "value_proj", _key_value_latent),
    # additions of some models to attention
    "norm_q": Weight("norms", "LH", ("pipe", None), ONES, "", _qk_norm),
    "norm_k": Weight("norms", "LH", ("pipe", None), ONES, "", _qk_norm),
    "bias_q": Weight("biases", "LNH", ("pipe", "tensor", None), ZEROS, "", _qkv_bias),
    "bias_k": Weight("biases", "LKH", ("pipe", "tensor", None), ZEROS, "", _qkv_bias),
    "bias_v": Weight("biases", "LKU", ("pipe", "tensor", None), ZEROS, "", _qkv_bias),
    "bias_o": Weight("biases", "LD", ("pipe", _SPREAD), ZEROS, "", _output_bias),
    "sinks": Weight("biases", "LN", ("pipe", "tensor"), ZEROS, "", _sinks),
    # a dense MLP
    "w_gate": Weight("mlp", "LDF", ("pipe", "fsdp", "tensor"), "D", "mlp_gate", _dense),
    "w_up": Weight("mlp", "LDF", ("pipe", "fsdp", "tensor"), "D", "mlp_up", _dense),
    "w_down": Weight("mlp", "LFD", ("pipe", "tensor", "fsdp"), "FL", "mlp_down", _dense),
    # or a mixture of experts with its router, and what all tokens share
    "w_router": Weight("router", "LDE", ("pipe", _SPREAD, None), "D", "router_logits", _experts),
    "expert_gate": Weight("experts", "LZM", ("pipe", _ROWS, "tensor"), "D", "expert_gate", _experts, True),
    "expert_up": Weight("experts", "LZM", ("pipe", _ROWS, "tensor"), "D", "expert_up", _experts, True),
    "expert_down": Weight("experts", "LZM", ("pipe", _ROWS, "tensor"), "ML", "expert_down", _experts, True),
    "bias_router": Weight("biases", "LE", ("pipe", None), ZEROS, "", _expert_bias),
    "bias_expert_gate": Weight("biases", "LEM", ("pipe", "expert", "tensor"), ZEROS, "", _expert_bias, True),
    "bias_expert_up": Weight("biases", "LEM", ("pipe", "expert", "tensor"), ZEROS, "", _expert_bias, True),
    "bias_expert_down": Weight("biases", "LED", ("pipe", "expert", None), ZEROS, "", _expert_bias, True),
    "selection_bias": Weight("biases", "LE", ("pipe", None), ZEROS, "", _selection_bias),  # has no gradient
    "shared_gate": Weight("shared experts", "LDJ", ("pipe", "fsdp", "tensor"), "D", "shared_gate", _shared),
    "shared_up": Weight("shared experts", "LDJ", ("pipe", "fsdp", "tensor"), "D", "shared_up", _shared),
    "shared_down": Weight("shared experts", "LJD", ("pipe", "tensor", "fsdp"), "JL", "shared_down", _shared),
    # behind the layers
    "norm": Weight("norms", "D", (_SPREAD,), ONES),
    "unembed": Weight("unembedding", "VD", ("tensor", "fsdp"), "D", "logits", _untied),
}
PARTS = ("embedding", "attention", "mlp", "experts", "router", "shared experts", "norms", "biases", "unembedding")
# The router's weights are not rounded to the computation's dtype: rounded logits choose other experts, and a bias that
# only chooses grows by steps too small for bfloat16.
FLOAT32_WEIGHTS = frozenset({"w_router", "bias_router", "selection_bias"})


def key_dim(config: Config) -> int:
    """Hk: dims of a head's query and key."""
    return config.head_dim + config.rope_head_dim


def value_dim(config: Config) -> int:
    """Hv: dims of a head's value."""
    return config.value_head_dim or config.head_dim


def num_expert_layers(config: Config) -> int:
    return config.num_layers - config.num_dense_layers if config.num_experts else 0


def sizes(config: Config) -> dict[str, int]:
    """The size of each dim, by its letter."""
    return {
        "L": config.num_layers,
        "D": config.model_dim,
        "F": config.ff_dim,
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
        "M": config.expert_dim,
        "Z": config.num_experts * config.model_dim,
        "J": config.num_shared_experts * config.expert_dim,
    }


def layer_stacks(config: Config) -> dict[str, tuple[int, bool]]:
    """The stacks of layers that are alike: (how many, whether with experts), by the name of the stack in Params."""
    num_dense = config.num_dense_layers
    stacks = {"layers": (config.num_layers - num_dense, bool(config.num_experts))}
    return stacks | ({"dense_layers": (num_dense, False)} if num_dense else {})


def layer_weights(config: Config, *, experts: bool) -> dict[str, Weight]:
    """The weights of a layer with experts, or of a dense one."""
    return {name: w for name, w in WEIGHTS.items() if w.dims[0] == "L" and w.present(config, experts)}


def other_weights(config: Config) -> dict[str, Weight]:
    """The weights outside the layers: the embedding, the last norm, and the unembedding unless it is tied."""
    return {name: w for name, w in WEIGHTS.items() if w.dims[0] != "L" and w.present(config, False)}


def weight_names(config: Config) -> frozenset[str]:
    """The names of all weights of the model."""
    in_layers = (layer_weights(config, experts=experts) for _, experts in layer_stacks(config).values())
    return frozenset(other_weights(config)).union(*in_layers)


# -- the sequence


def in_zigzag(config: Config) -> bool:
    """Whether a sequence over `context` is laid out in zigzag order. A window needs the positions in order."""
    return config.context_balance and not config.window


# -- FP8


# The weights of a layer whose matmuls --fp8_modules names. A group multiplies the same x.
FP8_MODULES = {
    "qkv": (("w_q", "w_k", "w_v"),),
    "out": (("w_o",),),
    "mlp": (("w_gate", "w_up"), ("w_down",), ("shared_gate", "shared_up"), ("shared_down",)),
    "moe": (("expert_gate", "expert_up"), ("expert_down",)),
}


def fp8_groups(config: Config) -> list[tuple[str, ...]]:
    """The weights of a layer whose matmuls are in FP8, in the groups that multiply the same x."""
    modules = [] if config.fp8 == "none" else config.fp8_modules.split(",")
    of_modules = [group for module in modules for group in FP8_MODULES.get(module, ())]
    return [group for group in of_modules if weight_names(config) >= {*group}]


def fp8_weights(config: Config) -> frozenset[str]:
    """The weights that are multiplied and gathered in FP8. Those of `fp8_skip_layers` are among them."""
    logits = config.fp8 != "none" and "unembed" in config.fp8_modules.split(",")
    return frozenset(name for group in fp8_groups(config) for name in group) | ({"unembed"} if logits else set())


# -- logits


LOGITS_BYTES = 2**28  # bytes of logits that a device has at once, unless --loss_chunk says how many positions


def loss_chunk(config: Config, sequences: float, positions: int, vocabulary: float) -> int:
    """Positions of each sequence whose logits a device has at once: at most `config.loss_chunk`, in about equal chunks.

    With loss_chunk=0 the chunk has at most LOGITS_BYTES of logits in float32. Block-scaled FP8 takes whole blocks.

    Args:
      sequences: the sequences of a microbatch on a device.
      positions: the positions of each of them on a device.
      vocabulary: a device's share of the vocabulary.
    """
    most = config.loss_chunk or max(1, int(LOGITS_BYTES / (4 * sequences * vocabulary)))
    chunks = math.ceil(positions / most)
    chunk = math.ceil(positions / chunks)
    if "unembed" in fp8_weights(config) and config.fp8_granularity == "block":
        chunk += -chunk % (config.fp8_block // math.gcd(config.fp8_block, round(sequences)))
    return chunk


# -- activations


# These stay in float32 whatever the dtype of the computation.
FLOAT32_ACTIVATIONS = {"log_sum_exp", "scores", "router_logits"}
# These end a sub-layer and are added to the residual stream: the backward pass reads the sum, not the summand.
UNREAD_ACTIVATIONS = {"out_proj", "mlp_down", "shared_down"}


def expert_capacity(config: Config, tokens: int) -> int:
    """Rows of an expert's buffer for a device's tokens, with --moe_impl=capacity."""
    return min(tokens, math.ceil(config.capacity_factor * tokens * config.experts_per_token / config.num_experts))


def expert_rows(config: Config, tokens: int, devices: int) -> int:
    """Rows of the buffer of a device's experts, where each of `devices` along `expert` has `tokens` tokens (moe.py).

    Without drops on one device the buffer has the rows that the router makes of its tokens. On several it has more,
    since none knows beforehand what it receives. With a capacity every expert has as many rows, and in the reference
    every expert has all tokens. The experts' activations have all these rows, filled or not.
    """
    E, X = config.num_experts, config.experts_per_token
    if config.moe_impl != "dropless":
        return E * (tokens if config.moe_impl == "reference" else expert_capacity(config, tokens))
    most = devices * tokens * min(X, E // devices)  # all tokens send all that they can
    wanted = -int(-config.buffer_factor * tokens * X // 32) * 32  # whole registers, of any type
    return tokens * X if devices == 1 else min(most, wanted)


def activations(
    config: Config, *, experts: bool = False, fused: bool = True, expert_buffer_ratio: float = 1, row_copies: int = 1
) -> dict[str, float]:
    """Elements a token of every tensor of one layer that a policy may save, in the order in which they are made.

    Args:
      experts: the layer is one with experts, not a dense one.
      fused: attention is a kernel, which saves its result and the log-sum-exp of the scores, not all scores.
      expert_buffer_ratio: the ratio of `expert_rows` to the rows that the router makes of the tokens.
      row_copies: devices along `tensor` that each hold the rows of experts unsharded (mixture.py), else 1.
    """
    D, N, K = config.model_dim, config.num_heads, config.num_kv_heads
    X, M = config.experts_per_token, config.expert_dim
    Hk, Hv = key_dim(config), value_dim(config)
    found = {"decoder_layer_input": D, "norm_attention": D}
    if config.kv_lora_rank:
        # Before their norms; the normed ones are the operands of the matmuls that follow.
        if config.q_lora_rank:
            found |= {"query_latent": config.q_lora_rank, "query_latent_norm": config.q_lora_rank}
        found |= {"kv_latent": config.kv_lora_rank, "kv_latent_norm": config.kv_lora_rank}
    if config.qk_norm:
        found |= {"query_before_norm": N * Hk, "key_before_norm": K * Hk}
    found |= {
        "query_proj": N * Hk,
        "key_proj": K * Hk,
        "value_proj": K * Hv,
    }  # with their rotation, which needs nothing saved
    found |= {"log_sum_exp": N} if fused else {"scores": N * config.seq_len}
    found |= {"context": N * Hv, "out_proj": D, "mlp_input": D, "norm_mlp": D}
    if not experts:
        F = config.ff_dim
        return found | {"mlp_gate": F, "mlp_up": F, "mlp_product": F, "mlp_down": D}
    rows = X * expert_buffer_ratio
    found |= {"router_logits": config.num_experts, "expert_input": rows * D * row_copies}
    found |= {"expert_gate": rows * M, "expert_up": rows * M, "expert_product": rows * M}
    found |= {"expert_down": rows * D * row_copies}
    if config.num_shared_experts:
        shared = config.num_shared_experts * M
        found |= {"shared_gate": shared, "shared_up": shared, "shared_product": shared, "shared_down": D}
    return found


_QKV = frozenset({"query_proj", "key_proj", "value_proj"})
_DOTS = _QKV | {"out_proj"}
_MLP = frozenset(f"{part}_{name}" for part in ("mlp", "expert", "shared") for name in ("gate", "up", "down"))
_KERNEL = frozenset({"context", "log_sum_exp"})
# What each of config.REMAT_POLICIES saves beside the layer's input: on the device, and on the host.
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

    The policy `none`, which recomputes nothing, saves all that the backward pass reads.
    """
    if config.remat == "none":
        every = set().union(*(activations(config, experts=e, fused=f) for e in (False, True) for f in (False, True)))
        return frozenset(every - UNREAD_ACTIVATIONS)
    if config.remat == "custom":
        return frozenset(name for name, place in config.remat_places.items() if place != "remat")
    on_device, on_host = POLICIES[config.remat]
    return frozenset({"decoder_layer_input"}) | on_device | on_host


def offloaded_names(config: Config) -> frozenset[str]:
    """The saved activations that are offloaded to the host."""
    if config.remat == "custom":
        return frozenset(name for name, place in config.remat_places.items() if place == "offload")
    return POLICIES[config.remat][1] if config.remat in POLICIES else frozenset()


def swiglu_in_kernel(config: Config) -> bool:
    """Whether the kernel that multiplies experts' rows by gate and up computes their SwiGLU, too (gmm.gated_gmm).

    Rematerialisation repeats a kernel as a whole. A policy may save gate or up but not the product, which down's
    gradient reads. The kernel would then repeat matmuls whose results are saved. So two matmuls and XLA's SwiGLU take
    its place, and the SwiGLU alone is repeated.
    """
    saved, products = saved_names(config), {"expert_gate", "expert_up"}
    saves_a_part = bool(saved & products) and not saved >= products | {"expert_product"}
    return config.moe_impl == "dropless" and not config.expert_bias and not saves_a_part


def read_names(saved: Collection[str]) -> frozenset[str]:
    """The `saved` activations that the backward pass reads; no other takes memory, whatever the policy says.

    It does not read what is only added to the residual stream: a layer's result, and attention's projection where the
    sum is saved.
    """
    return frozenset(saved) - {"mlp_down", "shared_down"} - ({"out_proj"} if "mlp_input" in saved else set())
