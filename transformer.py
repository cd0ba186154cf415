"""What a transformer is made of, by arithmetic: parameters, FLOPs, bytes. No jax here; config.py describes the model.

    python roofline.py model --preset=deepseek-v3 --seq_len=4096
    python roofline.py model --preset=llama3.1-70b --remat=full --json

The letters, with the scaling book (Austin et al. 2025, part 4, "All the Transformer Math You Need to Know",
https://jax-ml.github.io/scaling-book/transformers/): B sequences of T tokens, whose queries meet S keys; L layers of
model dim D; an MLP of F; a vocabulary of V; N query heads of H dims on K key/value heads, G = N/K. And E experts of
width M, of which a token visits X.

**Parameters.** A matrix for each matmul, and little else:

    attention        2*D*N*H + 2*D*K*H       q and o, k and v
    MLP              3*D*F                   SwiGLU: gate, up, down
    experts          E*3*D*M, router D*E     and 3*D*M for each shared expert, which is a dense MLP
    embedding        V*D                     once more for the unembedding, unless they are tied

**Active parameters** are those that a token meets: X of E experts, all else whole. Publishers differ in whether the
embedding, of which a token reads one row, is among them; here it is asked for or not.

**FLOPs.** A matmul parameter takes 2 FLOPs a token forward (multiply, add) and 4 backward (a product for the gradient
of the weight, one for that of the input): 6 in training. Attention multiplies activations with each other, so it has no
parameters; `keys` being those that a query sees,

    forward          2*N*Hk*keys + 2*N*Hv*keys        scores q k^T, and their mix of the values; three times in training

Hk and Hv are the dims of a head's keys and values, both H but in latent attention. Under a causal mask, keys = T/2
(exactly (T+1)/2; the published TPU7x figures have T/2); with a window W, W - W*W/2T. Attention's square overtakes
all matmuls of the layer when

    2*N*(Hk+Hv)*keys = 2*P    <=>   T = 2*P / (N*(Hk+Hv))          P: active matmul parameters of the layer; keys = T/2

With F = 4D and D = NH = KH that is T = 16*D. The book counts the square whole, keys = T, and has T = 8*D.

**Latent attention** (DeepSeek-V2, arXiv:2405.04434; V3, arXiv:2412.19437) makes keys and values of all heads from C
numbers a token, the latent, and adds R dims that turn with the position, whose key all heads share: Hk = H + R.

    D*(C+R) + C*N*(H+Hv)    keys and values;  D*Q + Q*N*Hk  queries, from a latent of their own;  N*Hv*D  o

The cache keeps C + R numbers a token, in place of 2*K*H. When it is read, w_k_up and w_v_up can be moved to the queries
and the outputs ("absorbed"): all heads then attend to the one latent, as if K = 1, Hk = C + R and Hv = C.

**Experts** (Shazeer et al. 2017, arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066). Parameters grow with
E, FLOPs with X. Counted is what routing asks for: no padding, nothing dropped.

**What the backward pass reads** has been saved in the forward pass or is computed again. `activations` names each
tensor of a layer with its size, by MaxText's names where it has them; a policy (POLICIES, and MaxText's too) is a set
of these names, of which some may wait in the host's memory. Saving all (`none`) is, at F = 4D, the book's 20*D;
saving the layer's input alone (`full`) is D, and the layer's forward is done again, except for the matmul that ends it:
the backward pass reads its operands, not its result. So the book's 8 FLOPs a parameter in place of 6 is too much: for
the layers of Llama 3.1 70B it is 7.5. An expert's result is read, by the gradient of the router's weight on it.
Recomputed FLOPs are never among the training FLOPs, which are MFU's numerator.

**Left out**: elementwise work, softmax, norms and rotations (FLOPs); what is saved outside the layers; copies that a
compiler makes, or spares by fusing.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import config as config_lib
from config import REMAT_POLICIES, Config

BYTES = {"float32": 4, "bfloat16": 2}


# -- parameters


@dataclass(frozen=True)
class Weight:
    """A parameter, of all layers that have it: those of dense layers and of layers with experts as one."""

    part: str  # a row of the table
    shape: tuple[int, ...]
    makes: tuple[str, ...] = ()  # matrices: the activations that its matmul gives
    share: tuple[int, int] = (1, 1)  # (X, E): of E equal pieces a token meets X

    @property
    def params(self) -> int:
        return math.prod(self.shape)

    @property
    def active_params(self) -> int:
        met, pieces = self.share
        return self.params // pieces * met


def key_dim(config: Config) -> int:
    """Hk: dims of a head's query and key."""
    return config.head_dim + config.rope_head_dim


def value_dim(config: Config) -> int:
    """Hv: dims of a head's value."""
    return config.value_head_dim or config.head_dim


def num_expert_layers(config: Config) -> int:
    return config.num_layers - config.num_dense_layers if config.num_experts else 0


@cache
def weights(config: Config) -> Mapping[str, Weight]:
    """Every parameter by its name: the whole model, and the one place where it is written down."""
    L, D, F, V = config.num_layers, config.model_dim, config.ff_dim, config.vocab_size
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    E, X, M = config.num_experts, config.experts_per_token, config.expert_dim
    C, Q, R = config.kv_lora_rank, config.q_lora_rank, config.rope_head_dim
    Hk, Hv = key_dim(config), value_dim(config)
    L_experts = num_expert_layers(config)
    L_dense = L - L_experts

    found = {"embed": Weight("embedding", (V, D)), "norm_attention": Weight("norms", (L, D))}
    if C and Q:
        found["w_q_down"] = Weight("attention", (L, D, Q), ("query_latent",))
        found["norm_q_latent"] = Weight("norms", (L, Q))
        found["w_q_up"] = Weight("attention", (L, Q, N, Hk), ("query_proj",))
    else:
        found["w_q"] = Weight("attention", (L, D, N, Hk), ("query_proj",))
    if C:
        found["w_kv_down"] = Weight("attention", (L, D, C), ("kv_latent",))
        found["w_k_rope"] = Weight("attention", (L, D, R), ("key_proj",))
        found["norm_kv_latent"] = Weight("norms", (L, C))
        found["w_k_up"] = Weight("attention", (L, C, N, H), ("key_proj",))
        found["w_v_up"] = Weight("attention", (L, C, N, Hv), ("value_proj",))
    else:
        found["w_k"] = Weight("attention", (L, D, K, H), ("key_proj",))
        found["w_v"] = Weight("attention", (L, D, K, H), ("value_proj",))
    found["w_o"] = Weight("attention", (L, N, Hv, D), ("out_proj",))
    if config.qk_norm:
        found |= {"norm_q": Weight("norms", (L, H)), "norm_k": Weight("norms", (L, H))}
    if config.qkv_bias:
        found["bias_q"] = Weight("biases", (L, N, H))
        found |= {"bias_k": Weight("biases", (L, K, H)), "bias_v": Weight("biases", (L, K, H))}
    if config.output_bias:
        found["bias_o"] = Weight("biases", (L, D))
    if config.attention_sinks:
        found["sinks"] = Weight("biases", (L, N))

    found["norm_mlp"] = Weight("norms", (L, D))
    if L_dense:
        found["w_gate"] = Weight("mlp", (L_dense, D, F), ("mlp_gate",))
        found["w_up"] = Weight("mlp", (L_dense, D, F), ("mlp_up",))
        found["w_down"] = Weight("mlp", (L_dense, F, D), ("mlp_down",))
    if L_experts:
        found["w_router"] = Weight("router", (L_experts, D, E), ("router_logits",))
        found["expert_gate"] = Weight("experts", (L_experts, E * D, M), ("expert_gate",), (X, E))
        found["expert_up"] = Weight("experts", (L_experts, E * D, M), ("expert_up",), (X, E))
        found["expert_down"] = Weight("experts", (L_experts, E * D, M), ("expert_down",), (X, E))
        if config.selection_bias:
            found["selection_bias"] = Weight("biases", (L_experts, E))  # no gradient, as large as any
        if config.expert_bias:
            found["bias_router"] = Weight("biases", (L_experts, E))
            found["bias_expert_gate"] = Weight("biases", (L_experts, E, M), share=(X, E))
            found["bias_expert_up"] = Weight("biases", (L_experts, E, M), share=(X, E))
            found["bias_expert_down"] = Weight("biases", (L_experts, E, D), share=(X, E))
    if config.num_shared_experts:
        shared = config.num_shared_experts * M  # side by side they are one MLP
        found["shared_gate"] = Weight("shared experts", (L_experts, D, shared), ("shared_gate",))
        found["shared_up"] = Weight("shared experts", (L_experts, D, shared), ("shared_up",))
        found["shared_down"] = Weight("shared experts", (L_experts, shared, D), ("shared_down",))
    found["norm"] = Weight("norms", (D,))
    if not config.tied_embeddings:
        found["unembed"] = Weight("unembedding", (V, D), ("logits",))
    return found


# Of the router, which are not rounded to the dtype of the computation: rounded logits choose other experts, and a bias
# that only chooses grows by steps too small for bfloat16.
FLOAT32_WEIGHTS = frozenset({"w_router", "bias_router", "selection_bias"})
PARTS = ("embedding", "attention", "mlp", "experts", "router", "shared experts", "norms", "biases", "unembedding")


@dataclass(frozen=True)
class Part:
    params: int
    active_params: int  # that a token meets; the whole embedding
    matmul_params: int  # of these, those that multiply each token: no norms, no biases, no embedding look-up


@cache
def parts(config: Config) -> Mapping[str, Part]:
    """Parameters by part of the model; parts that it does not have are left out.

    A tied unembedding has no parameters of its own, and yet it multiplies.
    """
    found, every = {}, weights(config).values()
    for part in PARTS:
        mine = [weight for weight in every if weight.part == part]
        matmul = sum(weight.active_params for weight in mine if weight.makes)
        if part == "unembedding" and config.tied_embeddings:
            matmul = config.vocab_size * config.model_dim
        if mine or matmul:
            active = sum(weight.active_params for weight in mine)
            found[part] = Part(sum(weight.params for weight in mine), active, matmul)
    return found


# The matmuls of a layer that --fp8_modules names, by weight; those whose weights multiply the same x stand together.
FP8_MODULES = {
    "qkv": (("w_q", "w_k", "w_v"),),
    "out": (("w_o",),),
    "mlp": (("w_gate", "w_up"), ("w_down",), ("shared_gate", "shared_up"), ("shared_down",)),
    "moe": (("expert_gate", "expert_up"), ("expert_down",)),
}


def fp8_groups(config: Config) -> list[tuple[str, ...]]:
    """The weights of a layer that are multiplied in 8 bits; those of a group by the same x."""
    modules = [] if config.fp8 == "none" else config.fp8_modules.split(",")
    of_modules = [group for module in modules for group in FP8_MODULES.get(module, ())]
    return [group for group in of_modules if weights(config).keys() >= {*group}]


def in_8_bits(config: Config) -> frozenset[str]:
    """The weights that are multiplied, and travel, in 8 bits. (Those of `fp8_skip_layers` are counted as well.)"""
    logits = config.fp8 != "none" and "unembed" in config.fp8_modules.split(",")
    return frozenset(name for group in fp8_groups(config) for name in group) | ({"unembed"} if logits else set())


LOGITS_BYTES = 2**28  # of a chunk on a device, where the run does not say how many positions it has


def loss_chunk(config: Config, sequences: float, positions: int, vocabulary: float) -> int:
    """Positions of each sequence whose logits a device has at once: `loss_chunk` at most, of chunks about equal.

    With loss_chunk=0 as many as have LOGITS_BYTES of logits, in float32. Logits in blocks of 8 bits: whole blocks.

    Args:
      sequences: of a microbatch, on a device.
      positions: of each of them, on a device.
      vocabulary: a device's part of it.
    """
    most = config.loss_chunk or max(1, int(LOGITS_BYTES / (4 * sequences * vocabulary)))
    chunks = math.ceil(positions / most)
    chunk = math.ceil(positions / chunks)
    if "unembed" in in_8_bits(config) and config.fp8_granularity == "block":
        chunk += -chunk % (config.fp8_block // math.gcd(config.fp8_block, round(sequences)))
    return chunk


def num_params(config: Config) -> int:
    return sum(part.params for part in parts(config).values())


def active_params(config: Config, *, embedding: bool = True) -> int:
    """Parameters that a token meets; without `embedding`, not its table, unless that is the unembedding as well."""
    found = parts(config)
    spared = 0 if embedding or config.tied_embeddings else found["embedding"].params
    return sum(part.active_params for part in found.values()) - spared


def matmul_params(config: Config) -> int:
    return sum(part.matmul_params for part in parts(config).values())


# -- FLOPs of a token


def mean_keys(seq_len: int, window: int = 0) -> float:
    """Keys that a query sees on average under a causal mask: T/2, and with a window W: W - W*W/2T."""
    if not window or window >= seq_len:
        return seq_len / 2
    return window - window * window / (2 * seq_len)  # the first `window` queries see fewer


def num_global_layers(config: Config) -> int:
    """Layers whose attention has no window."""
    if not config.window:
        return config.num_layers
    return config.num_layers // config.global_every if config.global_every else 0


def keys_of_all_layers(config: Config) -> float:
    """Keys that a token's query sees, on average over the sequence, summed over the layers."""
    num_global = num_global_layers(config)
    keys = num_global * mean_keys(config.seq_len)
    return keys + (config.num_layers - num_global) * mean_keys(config.seq_len, config.window)


def forward_flops_per_token(config: Config) -> dict[str, float]:
    """By part: 2 for each active matmul parameter; attention's two matmuls 2*N*Hk*keys and 2*N*Hv*keys."""
    keys = keys_of_all_layers(config)
    flops = {name: 2 * part.matmul_params for name, part in parts(config).items() if part.matmul_params}
    flops["scores"] = 2 * config.num_heads * key_dim(config) * keys
    flops["mix"] = 2 * config.num_heads * value_dim(config) * keys
    return flops


def train_flops_per_token(config: Config) -> float:
    """6 x active matmul parameters + 6 * N * (Hk + Hv) * keys: three times the forward. No recomputation."""
    heads = config.num_heads * (key_dim(config) + value_dim(config))
    return 6 * matmul_params(config) + 6 * heads * keys_of_all_layers(config)


def overtaking_seq_len(config: Config, over: str = "layer", *, causal: bool = True) -> float:
    """T at which a layer's attention (without a window) takes the FLOPs of its matmuls: T = 2P / (N*(Hk+Hv)).

    Args:
      over: P is of the whole "layer", of its "mlp" (experts, router and all), or of attention's "projections".
      causal: counted at half; the book counts the whole square, and T is half of that.
    """
    layers_of = {"attention": config.num_layers, "mlp": config.num_layers - num_expert_layers(config)}
    found = parts(config)
    # Of the last layer: where there are experts, it has them.
    mlp_parts = ("experts", "router", "shared experts") if config.num_experts else ("mlp",)
    count = lambda part: found[part].matmul_params // layers_of.get(part, num_expert_layers(config))
    projections, mlp = count("attention"), sum(count(part) for part in mlp_parts if part in found)
    params = {"layer": projections + mlp, "mlp": mlp, "projections": projections}[over]
    return (2 if causal else 1) * params / (config.num_heads * (key_dim(config) + value_dim(config)))


def attention_intensity(
    config: Config, num_queries: int, num_keys: int, *, element_bytes: int = 2, absorbed: bool = False
) -> float:
    """FLOPs a byte of attention itself: T queries on S keys, each array read or written once, no mask.

        2*T*S*N*(Hk+Hv)  /  bytes * (T*N*Hk + S*K*Hk + S*K*Hv + T*N*Hv)         queries, keys, values, outputs

    In bfloat16, T = S: T*G/(G+1), so training is bound by FLOPs from a few hundred tokens on. One query on many keys:
    G, so a decoder is bound by bandwidth, whatever the batch: each sequence has its own cache. `absorbed`: latent
    attention on its cache, where N heads share one latent, of which the values are a part: about 2*N.
    """
    T, S, N, K = num_queries, num_keys, config.num_heads, config.num_kv_heads
    Hk, Hv = key_dim(config), value_dim(config)
    keys_and_values = S * K * (Hk + Hv)
    if absorbed:
        if not config.kv_lora_rank:
            raise ValueError("absorbed is for latent attention: kv_lora_rank is 0")
        Hk, Hv = config.kv_lora_rank + config.rope_head_dim, config.kv_lora_rank
        keys_and_values = S * Hk
    return 2 * T * S * N * (Hk + Hv) / (element_bytes * (T * N * (Hk + Hv) + keys_and_values))


# -- activations


# In float32 whatever the dtype of the computation.
FLOAT32_ACTIVATIONS = {"log_sum_exp", "scores", "router_logits"}
# They end a sub-layer and are added to the stream: the backward pass reads the sum, not the summand.
UNREAD_ACTIVATIONS = {"out_proj", "mlp_down", "shared_down"}


def expert_capacity(config: Config, tokens: int) -> int:
    """Rows that an expert has room for, of a device's tokens, with --moe_impl=capacity."""
    return min(tokens, math.ceil(config.capacity_factor * tokens * config.experts_per_token / config.num_experts))


def expert_rows(config: Config, tokens: int, devices: int) -> int:
    """Rows of the buffer of a device's experts, of whose `devices` along `expert` each has so many tokens (moe.py).

    Dropless, one device has as many as the router makes of its tokens; of several, each has room for more, as none
    knows before what comes. With a capacity each expert has as much; in the plain way it has all tokens. The experts'
    activations are of all these rows, whether they are filled or not.
    """
    E, X = config.num_experts, config.experts_per_token
    if config.moe_impl != "dropless":
        return E * (tokens if config.moe_impl == "reference" else expert_capacity(config, tokens))
    most = devices * tokens * min(X, E // devices)  # all tokens send all that they can
    wanted = -int(-config.buffer_factor * tokens * X // 32) * 32  # whole registers, of any type
    return tokens * X if devices == 1 else min(most, wanted)


def activations(
    config: Config, *, experts: bool = False, fused: bool = True, expert_room: float = 1, uncut: int = 1
) -> dict[str, float]:
    """Elements a token of every tensor of one layer that a policy may save, in the order in which they are made.

    Args:
      experts: of a layer with experts; else of one with a dense MLP.
      fused: attention by a kernel that keeps its result and the log-sum-exp of the scores; else it keeps all scores.
      expert_room: the ratio of `expert_rows` to the rows that the router makes of the tokens.
      uncut: devices along `tensor`, if they hold what goes into experts and comes out of them whole, each (decoder.py).
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
    rows = X * expert_room
    found |= {"router_logits": config.num_experts, "expert_input": rows * D * uncut}
    found |= {"expert_gate": rows * M, "expert_up": rows * M, "expert_product": rows * M}
    found |= {"expert_down": rows * D * uncut}
    if config.num_shared_experts:
        shared = config.num_shared_experts * M
        found |= {"shared_gate": shared, "shared_up": shared, "shared_product": shared, "shared_down": D}
    return found


_QKV = frozenset({"query_proj", "key_proj", "value_proj"})
_DOTS = _QKV | {"out_proj"}
_MLP = frozenset(f"{part}_{name}" for part in ("mlp", "expert", "shared") for name in ("gate", "up", "down"))
_KERNEL = frozenset({"context", "log_sum_exp"})
# What each policy of config.REMAT_POLICIES keeps beside the layer's input: on the device, and on the host.
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
    """What `config.remat` saves, wherever: none (is recomputed) all that the backward pass reads.

    The MLP's outputs are those of experts and shared experts as well.
    """
    if config.remat == "none":
        every = set().union(*(activations(config, experts=e, fused=f) for e in (False, True) for f in (False, True)))
        return frozenset(every - UNREAD_ACTIVATIONS)
    if config.remat == "custom":
        return frozenset(name for name, place in config.remat_places.items() if place != "remat")
    on_device, on_host = POLICIES[config.remat]
    return frozenset({"decoder_layer_input"}) | on_device | on_host


def offloaded_names(config: Config) -> frozenset[str]:
    """Those of `saved_names` that wait on the host."""
    if config.remat == "custom":
        return frozenset(name for name, place in config.remat_places.items() if place == "offload")
    return POLICIES[config.remat][1] if config.remat in POLICIES else frozenset()


def swiglu_in_kernel(config: Config) -> bool:
    """Whether the kernel that multiplies experts' rows by gate and up computes their SwiGLU, too (gmm.gated_gmm).

    Rematerialisation runs a kernel whole or not at all. Where a policy saves gate or up, but not all that the backward
    pass wants, the gradient of down the product, too, the kernel would multiply again what is there. So XLA's SwiGLU
    then follows two matmuls, and is repeated alone.
    """
    saved, products = saved_names(config), {"expert_gate", "expert_up"}
    saves_a_part = bool(saved & products) and not saved >= products | {"expert_product"}
    return config.moe_impl == "dropless" and not config.expert_bias and not saves_a_part


def read_names(saved: Collection[str]) -> frozenset[str]:
    """Those of the `saved` names that the backward pass reads: no other is kept, whatever the policy says.

    Not read is what is only added to the stream: a layer's result, and attention's projection where the sum is saved.
    """
    return frozenset(saved) - {"mlp_down", "shared_down"} - ({"out_proj"} if "mlp_input" in saved else set())


def saved_bytes_per_layer(config: Config, saved: Iterable[str] | None = None, *, columns: int = 1, **of_layer) -> float:
    """Bytes a token that one layer saves for the backward pass: of the `saved` names, by default `config.remat`'s.

    Args:
      columns: of a tile of memory, of which the dim of a head takes whole ones.
      of_layer: as for `activations`.
    """
    names = read_names(saved_names(config) if saved is None else {*saved})
    dims = dict.fromkeys(("value_proj", "context"), value_dim(config))
    dims |= dict.fromkeys(("query_before_norm", "key_before_norm", "query_proj", "key_proj"), key_dim(config))
    filled = lambda dim: -(-dim // columns) * columns / dim
    size = lambda name: (4 if name in FLOAT32_ACTIVATIONS else BYTES[config.dtype]) * filled(dims.get(name, columns))
    found = activations(config, **of_layer)
    return sum(size(name) * elements for name, elements in found.items() if name in names)


def saved_bytes_per_token(
    config: Config, saved: Iterable[str] | None = None, *, fused: bool = True, columns: int = 1
) -> float:
    """Bytes a token that all layers save for the backward pass, with the experts' on one device; `columns` as there."""
    names = saved_names(config) if saved is None else {*saved}
    num_experts = num_expert_layers(config)
    of_layer = lambda experts: saved_bytes_per_layer(config, names, columns=columns, experts=experts, fused=fused)
    return (config.num_layers - num_experts) * of_layer(False) + num_experts * (of_layer(True) if num_experts else 0)


def multiplied_again(weight: Weight, saved: Collection[str]) -> bool:
    """Whether the backward pass needs what the weight's matmul makes, and it is not among the `saved`.

    Nor again what it does not read (`read_names`), nor the logits: vocabulary.cross_entropy takes the gradient while
    it has them.
    """
    wanted = read_names({*saved, *weight.makes}) - {*saved, "logits"}
    return not wanted.isdisjoint(weight.makes)


def recomputed_flops_per_token(
    config: Config, saved: Iterable[str] | None = None, *, kernel_scores: bool = False
) -> dict[str, float]:
    """Forward FLOPs that the backward pass does again, by part, because their result is read and not saved.

    `kernel_scores`: add the 2*N*Hk*keys of the scores that a fused kernel computes once more in its backward
    pass whatever the policy, as it kept their log-sum-exp alone.
    """
    names = saved_names(config) if saved is None else {*saved}
    again = dict.fromkeys(PARTS, 0.0)
    for weight in weights(config).values():
        if multiplied_again(weight, names):
            again[weight.part] += 2 * weight.active_params
    forward = forward_flops_per_token(config)
    lost = "context" not in names or names.isdisjoint({"log_sum_exp", "scores"})
    again["scores"] = forward["scores"] * (lost + kernel_scores)
    again["mix"] = forward["mix"] * lost
    return {part: flops for part, flops in again.items() if flops}


# -- state and cache


def state_bytes(config: Config, *, gradient_dtype: str = "float32") -> dict[str, int]:
    """Bytes that the training state takes, over all devices, and the gradients beside it.

    weights     4*P      the master copy, in float32
    gradients   4*P      in float32, or 2*P
    adamw       8*P      both moments; 6*P with mu_dtype=bfloat16. The second one stays float32
    sgd         4*P      its momentum
    adafactor            of a matrix [.., a, b], its two largest dims, the means over a and over b, in place of a*b
                         (Shazeer & Stern 2018, arXiv:1804.04235); as optax does it, both dims at least 128. A layer's
                         experts are one matrix
    """
    params = num_params(config)
    optimizer = {
        "adamw": (BYTES[config.mu_dtype] + 4) * params,
        "sgd": 4 * params,
        "adafactor": 4 * sum(_adafactor_elements(weight.shape) for weight in weights(config).values()),
    }[config.optimizer]
    return {"weights": 4 * params, "gradients": BYTES[gradient_dtype] * params, "optimizer": optimizer}


def _adafactor_elements(shape: tuple[int, ...]) -> int:
    """Of one parameter: two factors and a placeholder, or two placeholders and the whole second moment."""
    *_, b, a = [0, 0, *sorted(shape)]
    size = math.prod(shape)
    return size // a + size // b + 1 if b >= 128 else size + 2


def kv_elements_per_layer(config: Config) -> int:
    """Numbers that a layer's cache keeps of a token: 2*K*H; C + R of latent attention."""
    if config.kv_lora_rank:
        return config.kv_lora_rank + config.rope_head_dim
    return config.num_kv_heads * (key_dim(config) + value_dim(config))


def kv_cache_bytes(config: Config, seq_len: int, *, element_bytes: int = 2) -> int:
    """Cache of one sequence of `seq_len` tokens; a layer with a window keeps no more tokens than that."""
    num_global = num_global_layers(config)
    tokens = num_global * seq_len + (config.num_layers - num_global) * min(config.window, seq_len)
    return tokens * kv_elements_per_layer(config) * element_bytes


def kv_cache_bytes_per_token(config: Config, *, element_bytes: int = 2) -> int:
    """What each further token adds to the cache while no window is full: all layers' share."""
    return config.num_layers * kv_elements_per_layer(config) * element_bytes


# -- command line


def summary(config: Config) -> dict:
    """All of the above for one model: what is printed, and what --json gives."""
    forward = forward_flops_per_token(config)
    kinds = {"dense": False, "experts": True}
    num_layers = {"dense": config.num_layers - num_expert_layers(config), "experts": num_expert_layers(config)}
    tensors = lambda remat: config.remat_tensors if remat == "custom" else ""
    policies = {
        remat: saved_names(config_lib.changed(config, remat=remat, remat_tensors=tensors(remat)))
        for remat in REMAT_POLICIES
        if remat in (config.remat, *POLICIES, "none") and not remat.endswith("_offloaded")
    }
    return {
        "preset": config.preset,
        "seq_len": config.seq_len,
        "counted": {
            "params": num_params(config),
            "active_params": active_params(config),
            "active_params_without_embedding": active_params(config, embedding=False),
            "parts": {name: dataclasses.asdict(part) for name, part in parts(config).items()},
        },
        "predicted": {
            "forward_flops_per_token": forward,
            "train_flops_per_token": train_flops_per_token(config),
            "recomputed_flops_per_token": sum(recomputed_flops_per_token(config).values()),
            "overtaking_seq_len": {over: overtaking_seq_len(config, over) for over in ("layer", "mlp", "projections")},
            "saved_bytes_per_token": {name: saved_bytes_per_token(config, names) for name, names in policies.items()},
            "recompute_by_policy": {
                name: sum(recomputed_flops_per_token(config, names).values()) for name, names in policies.items()
            },
            "activations_per_token": {
                kind: activations(config, experts=experts) for kind, experts in kinds.items() if num_layers[kind]
            },
            "state_bytes": state_bytes(config),
            "kv_cache_bytes_per_token": kv_cache_bytes_per_token(config),
            "kv_cache_bytes": kv_cache_bytes(config, config.seq_len),
            "attention_flops_per_byte": {
                "training": attention_intensity(config, config.seq_len, config.seq_len),
                "decoding": attention_intensity(config, 1, config.seq_len, absorbed=bool(config.kv_lora_rank)),
            },
        },
    }


def print_summary(config: Config) -> None:
    found = summary(config)
    counted, predicted = found["counted"], found["predicted"]
    total = predicted["train_flops_per_token"]
    print(f"{config.preset}, sequences of {config.seq_len:,} tokens\n")
    print(f"{'':16}{'parameters':>19}{'active a token':>19}{'training FLOPs a token':>25}{'share':>8}")
    print(f"{'':16}{'counted':>19}{'counted':>19}{'predicted':>25}")
    rows = {name: (part["params"], part["active_params"]) for name, part in counted["parts"].items()}
    rows |= {"scores": (0, 0), "mix": (0, 0)}
    for name, (params, active) in rows.items():
        flops = 3 * predicted["forward_flops_per_token"].get(name, 0)
        print(f"{name:16}{params:19,}{active:19,}{flops:25,.0f}{flops / total:8.1%}")
    print(f"{'total':16}{counted['params']:19,}{counted['active_params']:19,}{total:25,.0f}{1:8.0%}")
    print(f"{'but embedding':16}{'':19}{counted['active_params_without_embedding']:19,}")
    print("\nscores and mix are attention itself, q k^T and its product with the values; causal: counted at half.")
    lengths = {over: f"{length:,.0f}" for over, length in predicted["overtaking_seq_len"].items()}
    where = "In a layer without a window they" if config.window else "They"
    print(f"{where} overtake the MLP at T = {lengths['mlp']}, all of the layer's matmuls at {lengths['layer']}.")

    print(f"\nsaved for the backward pass, predicted ({config.dtype}, attention by a fused kernel)")
    print(f"{'':33}{'bytes a token':>16}{'recomputed FLOPs a token':>27}{'of training':>13}")
    for name, nbytes in predicted["saved_bytes_per_token"].items():
        again = predicted["recompute_by_policy"][name]
        print(f"{name:33}{nbytes:16,}{again:27,.0f}{again / total:13.1%}")

    print(f"\nstate, predicted ({config.optimizer})")
    for name, nbytes in predicted["state_bytes"].items():
        print(f"{name:16}{nbytes:19,} bytes{nbytes / counted['params']:8.3g} a parameter")

    intensity = predicted["attention_flops_per_byte"]
    print("\nserving, predicted (bfloat16)")
    print(f"KV cache        {predicted['kv_cache_bytes_per_token']:19,} bytes a token")
    print(f"{'':16}{predicted['kv_cache_bytes']:19,} bytes a sequence of {config.seq_len:,}")
    print(f"attention       {intensity['training']:19,.1f} FLOPs a byte over a whole sequence")
    print(f"{'':16}{intensity['decoding']:19,.1f} FLOPs a byte for one new token")


def explain(config: Config) -> str:
    """The formulas of parameters, FLOPs and cache, with the model's numbers in them."""
    lines = ["parameters"]
    for name, weight in weights(config).items():
        met = f", of which a token meets {weight.share[0]}/{weight.share[1]}" if weight.share != (1, 1) else ""
        lines.append(f"  {name:20} {' * '.join(f'{size:,}' for size in weight.shape)} = {weight.params:,}{met}")
    N, Hk, Hv, keys = config.num_heads, key_dim(config), value_dim(config), keys_of_all_layers(config)
    P, per_layer = matmul_params(config), kv_elements_per_layer(config)
    lines += [
        "FLOPs a token",
        f"  matmuls   6 * active matmul parameters = 6 * {P:,} = {6 * P:,}",
        f"  attention 6 * N * (Hk + Hv) * keys of all layers = 6 * {N} * ({Hk} + {Hv}) * {keys:,.0f} = "
        f"{6 * N * (Hk + Hv) * keys:,.0f}",
        "bytes of the cache a token",
        f"  L * elements * 2 = {config.num_layers} * {per_layer:,} * 2 = {kv_cache_bytes_per_token(config):,}",
    ]
    return "\n".join(lines)


def add_model_command(commands) -> None:
    about = "what a model is made of: parameters, FLOPs, activations, state, cache"
    parser = commands.add_parser(
        "model", help=about, description=about, allow_abbrev=False, usage="%(prog)s [--flag=value ...]"
    )
    parser.set_defaults(run=print_model, parser=parser)
    config_lib.add_flags(parser)
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in FLOPs and bytes")


def print_model(args: argparse.Namespace) -> None:
    config = config_lib.from_args(args)
    if args.json:
        return print(json.dumps(summary(config)))
    print_summary(config)
    if args.explain:
        print(f"\n{explain(config)}")
