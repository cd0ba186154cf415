"""The parameters, FLOPs and bytes of a transformer, by arithmetic. No jax here; config.py describes the model.

    python roofline.py model --preset=deepseek-v3 --seq_len=4096
    python roofline.py model --preset=llama3.1-70b --remat=full --json

**Idea** (the scaling book: Austin et al. 2025, part 4, "All the Transformer Math You Need to Know",
https://jax-ml.github.io/scaling-book/transformers/). A transformer is a list of matmuls, whose shapes give its
parameters, its FLOPs and the bytes that it saves. The letters are the book's: B sequences of T tokens, whose queries
attend to S keys; L layers of model dim D; an MLP of F; a vocabulary of V; N query heads of H dims on K key/value heads,
G = N/K. There may be E experts of width M, of which a token visits X.

**Parameters.** There is a matrix for each matmul, and little else:

    attention        2*D*N*H + 2*D*K*H       q and o, k and v
    MLP              3*D*F                   SwiGLU: gate, up, down
    experts          E*3*D*M, router D*E     and 3*D*M for each shared expert, which is a dense MLP
    embedding        V*D                     once more for the unembedding, unless they are tied

**Active parameters** are those that a token uses: X of E experts, and all of the rest. A token reads one row of the
embedding; publishers differ in whether they count that table, so here it is an option.

**FLOPs.** A matmul parameter takes 2 FLOPs a token forward (multiply, add). Backward it takes 4: one matmul for the
gradient of the weight, one for that of the input. Training takes 6. Attention multiplies activations by activations, so
it has no parameters. With `keys`, the number of keys that a query attends to,

    forward          2*N*Hk*keys + 2*N*Hv*keys        scores q k^T, and their mix of the values; training: 3x

Hk and Hv are the dims of a head's keys and values. Both are H, except in latent attention. Under a causal mask,
keys = T/2 (exactly (T+1)/2; the published TPU7x figures use T/2). With a window W, keys = W - W*W/2T. The FLOPs of
attention exceed those of all matmuls of the layer from

    2*N*(Hk+Hv)*keys = 2*P    <=>   T = 2*P / (N*(Hk+Hv))          P: active matmul parameters of the layer; keys = T/2

With F = 4D and D = NH = KH that is T = 16*D. The book ignores the mask, keys = T, and has T = 8*D.

**Latent attention** (DeepSeek-V2, arXiv:2405.04434; V3, arXiv:2412.19437) makes the keys and values of all heads from C
numbers a token, the latent. It adds R dims with rotary position embedding, whose key all heads share: Hk = H + R.

    D*(C+R) + C*N*(H+Hv)    keys and values;  D*Q + Q*N*Hk  queries, from a latent of their own;  N*Hv*D  o

The cache stores C + R numbers a token, in place of 2*K*H. When it is read, w_k_up can be applied to the queries and
w_v_up to the outputs ("absorbed"). All heads then attend to the one latent, as if K = 1, Hk = C + R and Hv = C.

**Experts** (Shazeer et al. 2017, arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066). Parameters grow with
E, FLOPs with X. FLOPs are counted for exactly what the router selects: no padding, nothing dropped.

**What the backward pass reads** is saved in the forward pass or computed again. `activations` names each tensor of a
layer with its size, by MaxText's names where it has them. A policy (POLICIES, which are MaxText's too) is a set of
these names; some of them may be offloaded to the host's memory. At F = 4D, saving all of them (`none`) is the book's
20*D. Saving the layer's input alone (`full`) is D. Then the layer's forward pass is done again, except for its last
matmul: the backward pass reads that one's operands, not its result. So the book's 8 FLOPs a parameter in place of 6 is
too much: for the layers of Llama 3.1 70B it is 7.5. The last matmul of an expert is done again, as the gradient of its
router weight reads the result. Recomputed FLOPs never count as training FLOPs, which are MFU's numerator.

**Left out**: FLOPs of elementwise work, softmax, norms and rotary embedding; what is saved outside the layers; copies
that a compiler adds, and those that it saves by fusing.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import anatomy
import config as config_lib
import flags as flags_lib
from anatomy import (
    BYTES,
    FOUR_BYTE_ACTIVATIONS,
    PARTS,
    POLICIES,
    activations,
    key_dim,
    num_expert_layers,
    read_names,
    saved_names,
    value_dim,
)
from config import REMAT_POLICIES, Config

# -- parameters


@dataclass(frozen=True)
class Weight:
    """A parameter, counted over all layers that have it, dense layers and layers with experts together."""

    part: str  # of the model, one of anatomy.PARTS
    shape: tuple[int, ...]
    makes: str = ""  # the activation that its matmul makes; none for what no matmul multiplies
    share: tuple[int, int] = (1, 1)  # (X, E): a token uses X of E equal pieces

    @property
    def params(self) -> int:
        return math.prod(self.shape)

    @property
    def active_params(self) -> int:
        used, pieces = self.share
        return self.params // pieces * used


@cache
def weights(config: Config) -> Mapping[str, Weight]:
    """Returns every parameter of the model by name, counted over all layers.

    If global layers are a stack of their own, the weights of all stacks but `layers` have its name as well, as in
    global_layers.w_q.
    """
    if anatomy.two_kinds(config):
        outside, result = anatomy.other_weights(config), {}
        for stack, (num_layers, _) in anatomy.layer_stacks(config).items():
            prefix = "" if stack == "layers" else f"{stack}."
            for name, weight in weights(anatomy.stack_config(config, stack)).items():
                shape = weight.shape if name in outside else (num_layers, *weight.shape[1:])
                result[name if name in outside else prefix + name] = dataclasses.replace(weight, shape=shape)
        return result
    result = {}
    for name in sorted(anatomy.weight_names(config), key=list(anatomy.WEIGHTS).index):
        weight, stacks = anatomy.WEIGHTS[name], anatomy.layer_stacks(config).values()
        layers = sum(layers for layers, experts in stacks if weight.present(config, experts))
        size = anatomy.sizes(config) | {"L": layers}
        share = (config.experts_per_token, config.num_experts) if weight.by_expert else (1, 1)
        result[name] = Weight(weight.part, tuple(size[dim] for dim in weight.dims), weight.makes, share)
    return result


@dataclass(frozen=True)
class Part:
    """The parameters of one part of the model, in total and as a token uses them."""

    params: int
    active_params: int  # those that a token uses; all rows of the embedding
    matmul_params: int  # the active ones that multiply each token: no norms, no biases, no embedding look-up


@cache
def parts(config: Config) -> Mapping[str, Part]:
    """Returns the parameters of each part that the model has.

    A tied unembedding has no parameters of its own, but it has a matmul. Multi-token prediction has it again.
    """
    result = {}
    for part in PARTS:
        members = [weight for weight in weights(config).values() if weight.part == part]
        matmul = sum(weight.active_params for weight in members if weight.makes)
        if part == "unembedding" and config.tied_embeddings:
            matmul = config.vocab_size * anatomy.sizes(config)["D"]
        if part == "unembedding" and anatomy.runs_mtp(config):
            matmul *= 2
        if members or matmul:
            active = sum(weight.active_params for weight in members)
            result[part] = Part(sum(weight.params for weight in members), active, matmul)
    return result


def without_padding(config: Config) -> Config:
    """The model without the zeros that `dim_multiple` adds, which are no parameters and whose products are no FLOPs."""
    return dataclasses.replace(config, dim_multiple=1)


def num_params(config: Config) -> int:
    return sum(part.params for part in parts(config).values())


def active_params(config: Config, *, embedding: bool = True) -> int:
    """Returns the parameters that a token uses.

    Args:
      embedding: count the embedding tables. A tied one counts in any case: it is the unembedding as well.
    """
    by_part = parts(config)
    excluded = [] if embedding else ["layer embedding"] if config.tied_embeddings else ["embedding", "layer embedding"]
    return sum(part.active_params for name, part in by_part.items() if name not in excluded)


def matmul_params(config: Config) -> int:
    return sum(part.matmul_params for part in parts(config).values())


# -- FLOPs of a token


def mean_keys(seq_len: int, window: int = 0) -> float:
    """The keys that a query attends to, on average under a causal mask: T/2, with a window W: W - W*W/2T."""
    if not window or window >= seq_len:
        return seq_len / 2
    return window - window * window / (2 * seq_len)  # the first `window` queries have fewer


def num_global_layers(config: Config) -> int:
    """The number of layers whose attention has no window."""
    num_layers = anatomy.num_run_layers(config)
    if not config.window:
        return num_layers
    return num_layers // config.global_every if config.global_every else 0


def layers_by_window(config: Config) -> list[tuple[Config, int, int]]:
    """[(the model as these layers have it, their number, their window)] of the local layers and of the global ones.

    If the last layers share keys and values, these follow, in the same order.
    """
    if anatomy.two_kinds(config):
        window = lambda stack: 0 if "global" in stack else config.window
        stacks = anatomy.layer_stacks(config).items()
        return [(anatomy.stack_config(config, stack), number, window(stack)) for stack, (number, _) in stacks]
    num_global = num_global_layers(config)
    local, everywhere = anatomy.kinds(config)[0], anatomy.kinds(config)[-1]
    return [(local, anatomy.num_run_layers(config) - num_global, config.window), (everywhere, num_global, 0)]


def keys_of_all_layers(config: Config) -> float:
    """The keys that a token's query attends to, on average over the sequence, summed over the layers."""
    return sum(number * mean_keys(config.seq_len, window) for _, number, window in layers_by_window(config))


def forward_flops_per_token(config: Config) -> dict[str, float]:
    """Returns FLOPs by part: 2 for each active matmul parameter, and 2*N*Hk*keys and 2*N*Hv*keys for attention."""
    flops = {name: 2 * part.matmul_params for name, part in parts(config).items() if part.matmul_params}
    flops |= dict(scores=0, mix=0)
    for kind, number, window in layers_by_window(config):
        keys = number * mean_keys(config.seq_len, window)
        flops["scores"] += 2 * kind.num_heads * key_dim(kind) * keys
        flops["mix"] += 2 * kind.num_heads * value_dim(kind) * keys
    return flops


def train_flops_per_token(config: Config) -> float:
    """6 * active matmul parameters + 6 * N * (Hk + Hv) * keys: three times the forward pass, nothing recomputed.

    What `dim_multiple` adds does not count.
    """
    attention = 0.0
    for kind, number, window in layers_by_window(config):
        heads = kind.num_heads * (key_dim(kind) + value_dim(kind))
        attention += 6 * heads * number * mean_keys(config.seq_len, window)
    return 6 * matmul_params(without_padding(config)) + attention


def overtaking_seq_len(config: Config, over: str = "layer", *, causal: bool = True) -> float:
    """The T at which a layer's attention (without a window) has the FLOPs of its matmuls: T = 2P / (N*(Hk+Hv)).

    Args:
      over: P counts the full "layer", its "mlp" (experts, router and all), or the "projections" of attention.
      causal: count half of the scores, as the mask leaves them. The book counts all of them and has half this T.
    """
    config = anatomy.kinds(config)[-1]
    num_layers = anatomy.num_run_layers(config)
    layers_with = {"attention": num_layers, "mlp": num_layers - num_expert_layers(config)}
    by_part = parts(config)
    # The last layer is counted: if the model has experts, that layer has them.
    mlp_parts = ("experts", "router", "shared experts") if config.num_experts else ("mlp",)
    count = lambda part: by_part[part].matmul_params // layers_with.get(part, num_expert_layers(config))
    projections, mlp = count("attention"), sum(count(part) for part in mlp_parts if part in by_part)
    params = {"layer": projections + mlp, "mlp": mlp, "projections": projections}[over]
    return (2 if causal else 1) * params / (config.num_heads * (key_dim(config) + value_dim(config)))


def attention_intensity(
    config: Config, num_queries: int, num_keys: int, *, element_bytes: int = 2, absorbed: bool = False
) -> float:
    """The FLOPs a byte of attention itself: T queries on S keys, each array read or written once, no mask.

        2*T*S*N*(Hk+Hv)  /  bytes * (T*N*Hk + S*K*Hk + S*K*Hv + T*N*Hv)         queries, keys, values, outputs

    In bfloat16 with T = S that is T*G/(G+1), so training is bound by FLOPs from a few hundred tokens on. With one query
    on many keys it is G, so decoding is bound by bandwidth, whatever the batch: each sequence has its own cache.

    Args:
      absorbed: latent attention on its cache, where N heads share one latent that contains the values: about 2*N.
    """
    config = anatomy.kinds(config)[-1]  # of a layer without a window
    T, S, N, K = num_queries, num_keys, config.num_heads, config.num_kv_heads
    Hk, Hv = key_dim(config), value_dim(config)
    keys_and_values = S * K * (Hk + Hv)
    if absorbed:
        if not config.kv_lora_rank:
            raise ValueError("absorbed is for latent attention: kv_lora_rank is 0")
        Hk, Hv = config.kv_lora_rank + config.rope_head_dim, config.kv_lora_rank
        keys_and_values = S * Hk
    return 2 * T * S * N * (Hk + Hv) / (element_bytes * (T * N * (Hk + Hv) + keys_and_values))


def saved_bytes_per_layer(config: Config, saved: Iterable[str] | None = None, *, columns: int = 1, **options) -> float:
    """The bytes a token that one layer saves for the backward pass.

    Args:
      saved: the names that are saved; by default those of `config.remat`.
      columns: of a tile of memory; the dim of a head is padded to a multiple of it, but for a saved attention result.
      options: those of `activations`.
    """
    names = read_names(saved_names(config) if saved is None else {*saved}, config)
    dims = dict.fromkeys(("value_before_norm", "value_proj"), value_dim(config))
    heads = config.num_heads if "context" in saved_names(config) else 1  # saved side by side (flash.py)
    dims["context"] = heads * value_dim(config)
    dims |= dict.fromkeys(("query_before_norm", "key_before_norm", "query_proj", "key_proj"), key_dim(config))
    padding = lambda dim: -(-dim // columns) * columns / dim
    size = lambda name: (4 if name in FOUR_BYTE_ACTIVATIONS else BYTES[config.dtype]) * padding(dims.get(name, columns))
    return sum(size(name) * elements for name, elements in activations(config, **options).items() if name in names)


def saved_bytes_per_token(
    config: Config, saved: Iterable[str] | None = None, *, fused: bool = True, columns: int = 1
) -> float:
    """`saved_bytes_per_layer` summed over all layers, with all experts on one device."""
    names = saved_names(config) if saved is None else {*saved}
    a_layer = partial(saved_bytes_per_layer, saved=names, columns=columns, fused=fused)
    if anatomy.two_kinds(config):
        experts = config.num_experts > 0
        return sum(number * a_layer(kind, experts=experts) for kind, number, _ in layers_by_window(config))
    num_experts = num_expert_layers(config)
    num_dense = anatomy.num_run_layers(config) - num_experts
    dense, with_experts = (a_layer(config, experts=experts) for experts in (False, num_experts > 0))
    return num_dense * dense + num_experts * with_experts


OUTSIDE = frozenset({"logits", "mtp", "ple_context"})  # the results of matmuls outside the layers


def multiplied_again(weight: Weight, saved: Collection[str], config: Config) -> bool:
    """Whether the backward pass repeats a weight's matmul: it reads the result, which is not among the `saved`.

    What is OUTSIDE the layers is never repeated. Of logits, vocabulary.cross_entropy takes the gradient while it has
    them.
    """
    return bool(weight.makes) and weight.makes in read_names({*saved, weight.makes}, config) - {*saved, *OUTSIDE}


def recomputed_flops_per_token(
    config: Config, saved: Iterable[str] | None = None, *, kernel_scores: bool = False
) -> dict[str, float]:
    """Returns by part the forward FLOPs that the backward pass repeats, as it reads their result, which is not saved.

    Args:
      saved: the names that are saved; by default those of `config.remat`.
      kernel_scores: add the 2*N*Hk*keys of the scores. A fused kernel saves only their log-sum-exp, so its backward
        pass computes them once more, whatever the policy.
    """
    names = saved_names(config) if saved is None else {*saved}
    again = dict.fromkeys(PARTS, 0.0)
    for weight in weights(config).values():
        if multiplied_again(weight, names, config):
            again[weight.part] += 2 * weight.active_params
    forward = forward_flops_per_token(config)
    repeated = "context" not in names or names.isdisjoint({"log_sum_exp", "scores"})
    again["scores"] = forward["scores"] * (repeated + kernel_scores)
    again["mix"] = forward["mix"] * repeated
    return {part: flops for part, flops in again.items() if flops}


# -- state and cache


def state_bytes(config: Config, *, gradient_dtype: str = "float32") -> dict[str, int]:
    """Returns the bytes of the training state and of the gradients, over all devices.

    weights     4*P      the master copy, in float32
    gradients   4*P      in float32; 2*P in bfloat16
    adamw       8*P      both moments; 6*P with mu_dtype=bfloat16, 4*P with nu_dtype=bfloat16, too
    sgd         4*P      the momentum
    muon                 4 bytes a parameter of matrices, 8 of the others; 2 and 6 with mu_dtype=bfloat16
    adafactor            for an array whose two largest dims are a and b, the means over a and over b in place of a*b
                         numbers (Shazeer & Stern 2018, arXiv:1804.04235), if both are at least 128, as optax does it.
                         A layer's experts are one matrix
    """
    params = num_params(config)
    optimizer = {
        "adamw": (BYTES[config.mu_dtype] + BYTES[config.nu_dtype]) * params,
        "sgd": 4 * params,
        "muon": BYTES[config.mu_dtype] * params + 4 * (params - muon_params(config)),
        "adafactor": 4 * sum(_adafactor_elements(weight.shape) for weight in weights(config).values()),
    }[config.optimizer]
    return {"weights": 4 * params, "gradients": BYTES[gradient_dtype] * params, "optimizer": optimizer}


def muon_params(config: Config) -> int:
    """Returns the number of parameters in the matrices that Muon orthogonalises (muon.py)."""
    return sum(part.params for name, part in parts(config).items() if name in anatomy.MUON_PARTS)


def _adafactor_elements(shape: tuple[int, ...]) -> int:
    """Elements for one parameter: two factors and a placeholder, or two placeholders and the full second moment."""
    *_, b, a = [0, 0, *sorted(shape)]
    size = math.prod(shape)
    return size // a + size // b + 1 if b >= 128 else size + 2


def kv_elements_per_layer(config: Config) -> int:
    """The numbers of a token to which a layer attends: 2*K*H; in latent attention C + R.

    `config` has one kind of layers (anatomy.stack_config).
    """
    if config.kv_lora_rank:
        return config.kv_lora_rank + config.rope_head_dim
    return config.num_kv_heads * (key_dim(config) + value_dim(config))


def kv_cache_bytes(config: Config, seq_len: int, *, element_bytes: int = 2, read: bool = False) -> int:
    """The bytes of the cache of one sequence; a layer with a window stores no more tokens than that.

    Layers that share keys and values store none. With `read` the bytes that all layers read for a token.
    """
    layers = attended_tokens(config, seq_len)
    counted = [(kind, tokens) for kind, tokens in layers if read or not kind.shares_kv]
    return element_bytes * sum(tokens * kv_elements_per_layer(kind) for kind, tokens in counted)


def attended_tokens(config: Config, seq_len: int) -> list[tuple[Config, int]]:
    """[(the model as these layers have it, the tokens to which all of them attend)] of each kind of layers."""
    tokens = lambda window: min(window, seq_len) if window else seq_len
    return [(kind, number * tokens(window)) for kind, number, window in layers_by_window(config)]


def kv_cache_bytes_per_token(config: Config, *, element_bytes: int = 2) -> int:
    """The bytes that one more token adds to the cache of all layers, while no window is full."""
    if anatomy.two_kinds(config):
        own = [(kind, number) for kind, number, _ in layers_by_window(config) if not kind.shares_kv]
        return element_bytes * sum(number * kv_elements_per_layer(kind) for kind, number in own)
    return config.num_layers * kv_elements_per_layer(config) * element_bytes


# -- command line


def summary(config: Config) -> dict:
    """Returns all of the above for one model: what is printed, and what --json gives.

    Parameters and FLOPs are the model's, bytes those of its weights as they are stored, with padding.
    """
    model = without_padding(config)
    forward = forward_flops_per_token(model)
    kinds = {"dense": False, "experts": True}
    suffixes = {"layers": "", "global_layers": ", global", "kv_shared_layers": ", shared keys and values"}
    suffixes["kv_shared_global_layers"] = ", global, shared keys and values"
    stacks = {stack: suffix for stack, suffix in suffixes.items() if stack in anatomy.layer_stacks(config)}
    num_experts = num_expert_layers(config)
    num_layers = {"dense": anatomy.num_run_layers(config) - num_experts, "experts": num_experts}
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
            "params": num_params(model),
            "active_params": active_params(model),
            "active_params_without_embedding": active_params(model, embedding=False),
            "parts": {name: dataclasses.asdict(part) for name, part in parts(model).items()},
        },
        "predicted": {
            "forward_flops_per_token": forward,
            "train_flops_per_token": train_flops_per_token(model),
            "recomputed_flops_per_token": sum(recomputed_flops_per_token(model).values()),
            "overtaking_seq_len": {over: overtaking_seq_len(model, over) for over in ("layer", "mlp", "projections")},
            "saved_bytes_per_token": {name: saved_bytes_per_token(config, names) for name, names in policies.items()},
            "recompute_by_policy": {
                name: sum(recomputed_flops_per_token(model, names).values()) for name, names in policies.items()
            },
            "activations_per_token": {
                kind + suffix: activations(anatomy.stack_config(config, stack), experts=experts)
                for stack, suffix in stacks.items()
                for kind, experts in kinds.items()
                if num_layers[kind]
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
    """Prints `summary` as tables."""
    result = summary(config)
    counted, predicted = result["counted"], result["predicted"]
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
    print(f"{'no embedding':16}{'':19}{counted['active_params_without_embedding']:19,}")
    print("\nscores and mix are attention's q k^T and its product with the values, at half for the causal mask.")
    lengths = {over: f"{length:,.0f}" for over, length in predicted["overtaking_seq_len"].items()}
    where = "In a layer without a window they" if config.window else "They"
    print(f"{where} exceed the MLP from T = {lengths['mlp']}, all of the layer's matmuls from {lengths['layer']}.")

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
    print(f"attention       {intensity['training']:19,.1f} FLOPs a byte over a full sequence")
    print(f"{'':16}{intensity['decoding']:19,.1f} FLOPs a byte for one new token")


def explain(config: Config) -> str:
    """Returns the formulas of parameters, FLOPs and cache with the model's numbers in them."""
    lines = ["parameters"]
    for name, weight in weights(config).items():
        used = f", of which a token uses {weight.share[0]}/{weight.share[1]}" if weight.share != (1, 1) else ""
        lines.append(f"  {name:20} {' * '.join(f'{size:,}' for size in weight.shape)} = {weight.params:,}{used}")
    P = matmul_params(config)
    lines += ["FLOPs a token", f"  matmuls   6 * active matmul parameters = 6 * {P:,} = {6 * P:,}"]
    cache = ["bytes of the cache a token"]
    layers = layers_by_window(config) if anatomy.two_kinds(config) else [(config, config.num_layers, None)]
    for kind, number, window in layers:
        N, Hk, Hv, per_layer = kind.num_heads, key_dim(kind), value_dim(kind), kv_elements_per_layer(kind)
        keys = keys_of_all_layers(config) if window is None else number * mean_keys(config.seq_len, window)
        which = "all layers" if window is None else f"layers with a window of {window}" if window else "global layers"
        which += " that share keys and values" if kind.shares_kv else ""
        lines.append(
            f"  attention 6 * N * (Hk + Hv) * keys of {which} = 6 * {N} * ({Hk} + {Hv}) * {keys:,.0f} = "
            f"{6 * N * (Hk + Hv) * keys:,.0f}"
        )
        if not kind.shares_kv:
            cache.append(f"  L * elements * 2 = {number} * {per_layer:,} * 2 = {2 * number * per_layer:,}")
    return "\n".join(lines + cache)


def add_model_command(commands) -> None:
    about = "parameters, FLOPs, activations, state and cache of a model"
    parser = commands.add_parser(
        "model", help=about, description=about, allow_abbrev=False, usage="%(prog)s [--flag=value ...]"
    )
    parser.set_defaults(run=print_model, parser=parser)
    flags_lib.add_flags(parser)
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in FLOPs and bytes")


def print_model(args: argparse.Namespace) -> None:
    config = flags_lib.from_args(args)
    if args.json:
        return print(json.dumps(summary(config)))
    print_summary(config)
    if args.explain:
        print(f"\n{explain(without_padding(config))}")
