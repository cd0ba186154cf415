"""Published model families as tables: what config.json and the names of the weights are in this project.

**Idea.** A family is what `model_type` in config.json names. Two things describe it: how its keys of config.json become
fields of Config, and a table with a row for each weight. `settings` reads a config.json. Every key is used, or known to
be harmless, or must have a given value; anything else is refused by name. `config_json` is the way back. It reads its
own result again, and refuses a model that would come back as another one.

**Layout.** A row gives the dims of a published tensor in the letters of anatomy.py: its axes from major to minor,
separated by commas. An axis is one letter or a product of several, the major one first:

    "N H, D"      a matrix [N * H, D]: all dims of head 0, then those of head 1
    "N I+U, C"    each head has first its I dims, then its U dims; the row's own weight has one of the two letters
    "E, D, M 2:0" the columns of two matrices alternate: gate is 2:0, and up 2:1
    "d, 2:0 D"    of the two dims D of a weight, the second one is d
    "N H~, D"     the dims with RoPE, the last ones of H, are pairs (0, 1), (2, 3), ... and here halves (decoder.rope)

L and E are numbers in the name, {i} and {e}, if they are not in the dims.

**Left out.** Vision and audio towers: of a model that has them, the text model is read. Families whose layers this
model cannot have.

**Source.** The released config.json and safetensors headers of each family; the modules of transformers 5.24, whose
defaults apply where a config.json leaves a key out.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import command
import config as config_lib
import inputs
from config import Config

# Keys of config.json that say nothing about what the model computes from its tokens in training.
HARMLESS = frozenset(
    "_name_or_path auto_map bos_token_id dtype eos_token_id ep_size initial_context_length initializer_range "
    "max_position_embeddings model_type num_nextn_predict_layers num_mtp_layers output_router_logits pad_token_id "
    "pretraining_tp quantization_config router_aux_loss_coef aux_loss_alpha seq_aux torch_dtype transformers_version "
    "use_cache".split()
)
# Those that an export has in common with the model that the training began from.
_TAKEN_OVER = HARMLESS & frozenset(
    "bos_token_id eos_token_id pad_token_id initializer_range max_position_embeddings router_aux_loss_coef".split()
)
# Fields of Config that a training run chooses: a published model has none of them.
_OF_TRAINING = frozenset(
    "mtp mtp_loss z_loss dtype load_balance_loss router_z_loss selection_bias_rate moe_impl buffer_factor moe_parts "
    "capacity_factor".split()
)


def model_fields() -> list[str]:
    """Returns the fields of Config that decide what a model computes from its weights."""
    names = [each.name for each in dataclasses.fields(Config)]
    described = names[names.index("vocab_size") : names.index("mesh")]
    return [name for name in described if name not in _OF_TRAINING]


# -- a family


@dataclass(frozen=True)
class Row:
    """A published tensor, and the weight of anatomy.WEIGHTS of which it holds all or a part.

    published: its name, with {i} for the number of the layer, {e} for that of the expert, and {L} for that of layers.
    ours: the name of the weight.
    dims: the axes of the published tensor, see the head of this file.
    plus: what is added to its values: 1 where a norm multiplies by 1 + w.
    over_root: a letter: its values are divided by the square root of the size of this dim.
    """

    published: str
    ours: str
    dims: str
    plus: float = 0.0
    over_root: str = ""


@dataclass(frozen=True)
class Family:
    """A family of published models.

    architecture: the class of transformers that loads it.
    read: (Keys) -> fields of Config.
    write: (Config) -> keys of config.json, without those that all families have.
    rows: the table of its weights.
    copies: tensors that are written a second time, where the model has multi-token prediction.
    skipped: {regular expression of names: why these tensors are not read}; {L} is the number of layers.
      skipped_without_mtp: the same, if the model has no multi-token prediction.
    """

    architecture: str
    read: Callable[["Keys"], dict]
    write: Callable[[Config], dict]
    rows: tuple[Row, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    skipped_without_mtp: dict[str, str] = field(default_factory=dict)
    copies: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Wrapper:
    """A model of images and text, whose config.json has that of a text model as text_config.

    architecture: the class of transformers that loads it.
    text: the family of the text model.
    defaults: values of text_config's keys, where they are missing.
    """

    architecture: str
    text: str
    defaults: dict


_MISSING = object()


class Keys:
    """The keys of a config.json, and which of them have been read."""

    def __init__(self, values: dict, file: str):
        self.values, self.file, self.unread = values, file, set(values)

    def take(self, key: str, kind: type, default=_MISSING, at_least: float = 0):
        """Returns the value of a key. Where it is missing or null: `default`.

        Raises ValueError for a value of another type or under `at_least`, and for a missing one without a default.
        """
        self.unread.discard(key)
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"{self.file} has no {key}: it must be {_article(kind)}")
            return default
        is_kind = type(value) in ((int, float) if kind is float else (kind,))
        if not is_kind or (kind in (int, float) and not at_least <= value < float("inf")):
            least = f" of at least {at_least}" if kind in (int, float) else ""
            raise ValueError(f"{self.file} has {key}={value!r}: it must be {_article(kind)}{least}")
        return kind(value)

    def fix(self, *values, **keys) -> None:
        """Raises ValueError where one of `keys` is there with another value than the given one, or than null."""
        for key, value in keys.items():
            self.unread.discard(key)
            if (actual := self.values.get(key)) is not None and actual != value:
                raise ValueError(f"{self.file} has {key}={actual!r}: this program has only {key}={value!r}")

    def end(self) -> None:
        """Raises ValueError for a key that nothing has read, unless it is harmless."""
        if left := sorted(self.unread - HARMLESS):
            raise ValueError(
                f"{self.file} has {left[0]}={self.values[left[0]]!r}, which this program does not know: "
                "a model that needs it cannot be read"
            )


def _article(kind: type) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}
    return names.get(kind, "text")


# -- what families share


def _shapes(keys: Keys, activation: str = "silu", tied: bool = False) -> dict:
    """Fields of the shapes that all families have under the same names; `tied` is what a missing key says."""
    keys.fix(hidden_act=activation, attention_dropout=0, mlp_bias=False, clip_qkv=False)
    return dict(
        vocab_size=keys.take("vocab_size", int, at_least=1),
        num_layers=keys.take("num_hidden_layers", int, at_least=1),
        model_dim=keys.take("hidden_size", int, at_least=1),
        ff_dim=keys.take("intermediate_size", int, at_least=1),
        num_heads=(num_heads := keys.take("num_attention_heads", int, at_least=1)),
        num_kv_heads=keys.take("num_key_value_heads", int, num_heads, at_least=1),
        norm_eps=keys.take("rms_norm_eps", float),
        tied_embeddings=keys.take("tie_word_embeddings", bool, tied),
    )


def _head_dim(keys: Keys, fields: dict, default: int = 0) -> dict:
    """The dims of a head: head_dim, or where it is missing `default`, or the model's dims over its heads."""
    return dict(head_dim=keys.take("head_dim", int, default or fields["model_dim"] // fields["num_heads"], at_least=1))


def _attention_bias(keys: Keys, default: bool = False) -> dict:
    """attention_bias adds one to all four projections."""
    bias = keys.take("attention_bias", bool, default)
    return dict(qkv_bias=bias, output_bias=bias)


def _rope(keys: Keys, theta: float = 10_000.0, scaling: str = "default") -> dict:
    """Fields of RoPE, from rope_theta and rope_scaling, or from rope_parameters, which newer files have instead.

    Args:
      theta, scaling: the family's rope_theta and rope_type where the file has none.
    """
    theta = keys.take("rope_theta", float, theta, at_least=1)
    old, new = keys.take("rope_scaling", dict, {}), keys.take("rope_parameters", dict, {})
    values = new or old or dict(rope_type=scaling)
    scaling = Keys(values, f"{keys.file}: {'rope_parameters' if new else 'rope_scaling'}")
    theta = scaling.take("rope_theta", float, theta, at_least=1)
    kind = scaling.take("rope_type", str, scaling.take("type", str, "default"))
    scaling.fix(partial_rotary_factor=1.0)
    fields = dict(rope_theta=theta)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"{scaling.file} has rope_type={kind!r}: this program has default, linear, llama3 and yarn")
    if kind != "default":
        fields |= dict(rope_type=kind, rope_scaling=scaling.take("factor", float, at_least=1))
    if kind in ("llama3", "yarn"):
        longest = keys.values.get("max_position_embeddings", _MISSING)
        fields["rope_original_len"] = scaling.take("original_max_position_embeddings", int, longest, at_least=1)
    if kind == "llama3":
        scaling.fix(low_freq_factor=1.0, high_freq_factor=4.0)
    if kind == "yarn":
        fields |= _yarn(scaling, keys.take("kv_lora_rank", int, 0) > 0)
    scaling.end()
    return dict(rope_theta=theta) if fields.get("rope_scaling") == 1 else fields


def _yarn(scaling: Keys, latent: bool) -> dict:
    """Fields of YaRN. The factor of the rotated dims is attention_factor, or else comes from mscale."""
    mscale, all_dims = scaling.take("mscale", float, 0.0), scaling.take("mscale_all_dim", float, 0.0)
    if all_dims and not (mscale and latent):
        raise ValueError(
            f"{scaling.file} has mscale={mscale} and mscale_all_dim={all_dims}: the second goes with the first, and "
            "with latent attention"
        )
    scaling.fix(attention_factor=1.0)
    without = scaling.values.get("attention_factor") is not None
    return dict(
        rope_beta_fast=scaling.take("beta_fast", float, 0.0) or 32.0,
        rope_beta_slow=scaling.take("beta_slow", float, 0.0) or 1.0,
        rope_truncate=scaling.take("truncate", bool, True),
        rope_mscale=0.0 if without else mscale if all_dims else 1.0,
        rope_mscale_all_dim=all_dims,
    )


def _written_rope(config: Config) -> dict:
    scaling = dict(rope_type=config.rope_type)
    if config.rope_type != "default":
        scaling["factor"] = config.rope_scaling
    if config.rope_type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = config.rope_original_len
    if config.rope_type == "llama3":
        scaling |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    if config.rope_type == "yarn":
        scaling |= dict(beta_fast=config.rope_beta_fast, beta_slow=config.rope_beta_slow, truncate=config.rope_truncate)
        if config.rope_mscale_all_dim:
            scaling |= dict(mscale=config.rope_mscale, mscale_all_dim=config.rope_mscale_all_dim)
        elif config.rope_mscale != 1:
            scaling["attention_factor"] = 1 + 0.1 * config.rope_mscale * math.log(config.rope_scaling)
    return dict(rope_theta=config.rope_theta, rope_scaling=scaling)


def _longest(config: Config) -> int:
    """The longest sequence for which a model is made: that of its training, or of its scaled RoPE."""
    if config.rope_type not in ("llama3", "yarn"):
        return config.seq_len
    return max(config.seq_len, round(config.rope_original_len * config.rope_scaling))


def _window(keys: Keys, num_layers: int, window: int, types: list[str]) -> dict:
    """The fields window and global_every, from the types of the layers: all full, all sliding, or every n-th full."""
    if given := keys.take("layer_types", list, []):
        types = given
    if len(types) != num_layers or {*types} - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{keys.file} has layer_types={types!r}: there must be full_attention or sliding_attention for each of "
            f"{num_layers} layers"
        )
    sliding = [kind == "sliding_attention" for kind in types]
    if not any(sliding):
        return dict(window=0, global_every=0)
    if not window:
        raise ValueError(f"{keys.file} has layers of sliding_attention, and no sliding_window")
    every = 0 if all(sliding) else sliding.index(False) + 1
    if sliding != [not every or (i + 1) % every != 0 for i in range(num_layers)]:
        raise ValueError(f"{keys.file} has layer_types={types!r}: this program has a global layer every so many only")
    return dict(window=window, global_every=every)


def _layer_types(config: Config) -> list[str]:
    is_full = lambda i: not config.window or (config.global_every and (i + 1) % config.global_every == 0)
    return ["full_attention" if is_full(i) else "sliding_attention" for i in range(config.num_layers)]


def _written_shapes(config: Config) -> dict:
    return dict(
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_layers,
        hidden_size=config.model_dim,
        intermediate_size=config.ff_dim,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_act="silu",
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied_embeddings,
        attention_dropout=0.0,
        max_position_embeddings=_longest(config),
        **_written_rope(config),
    )


_OUTSIDE = (
    Row("model.embed_tokens.weight", "embed", "V, D"),
    Row("model.norm.weight", "norm", "D"),
    Row("lm_head.weight", "unembed", "V, D"),
)
_NORMS = (
    Row("model.layers.{i}.input_layernorm.weight", "norm_attention", "D"),
    Row("model.layers.{i}.post_attention_layernorm.weight", "norm_mlp", "D"),
)
_ATTENTION = (
    Row("model.layers.{i}.self_attn.q_proj.weight", "w_q", "N H, D"),
    Row("model.layers.{i}.self_attn.k_proj.weight", "w_k", "K H, D"),
    Row("model.layers.{i}.self_attn.v_proj.weight", "w_v", "K U, D"),
    Row("model.layers.{i}.self_attn.o_proj.weight", "w_o", "D, N U"),
    Row("model.layers.{i}.self_attn.q_proj.bias", "bias_q", "N H"),
    Row("model.layers.{i}.self_attn.k_proj.bias", "bias_k", "K H"),
    Row("model.layers.{i}.self_attn.v_proj.bias", "bias_v", "K U"),
    Row("model.layers.{i}.self_attn.o_proj.bias", "bias_o", "D"),
    Row("model.layers.{i}.self_attn.q_norm.weight", "norm_q", "H"),
    Row("model.layers.{i}.self_attn.k_norm.weight", "norm_k", "H"),
)
_MLP = (
    Row("model.layers.{i}.mlp.gate_proj.weight", "w_gate", "F, D"),
    Row("model.layers.{i}.mlp.up_proj.weight", "w_up", "F, D"),
    Row("model.layers.{i}.mlp.down_proj.weight", "w_down", "D, F"),
)
_EXPERTS = (
    Row("model.layers.{i}.mlp.gate.weight", "w_router", "E, D"),
    Row("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "expert_gate", "M, D"),
    Row("model.layers.{i}.mlp.experts.{e}.up_proj.weight", "expert_up", "M, D"),
    Row("model.layers.{i}.mlp.experts.{e}.down_proj.weight", "expert_down", "D, M"),
)
_DENSE_ROWS = (*_OUTSIDE, *_NORMS, *_ATTENTION, *_MLP)
# Old files have the frequencies of RoPE among the weights.
_SKIPPED = {r".*\.rotary_emb\.inv_freq": "the frequencies of RoPE are computed"}
_TOWERS = r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*"
_TEXT_ALONE = _SKIPPED | {_TOWERS: "only the text model is read"}


# -- the families


def _read_llama(keys: Keys) -> dict:
    fields = _shapes(keys)
    return fields | _head_dim(keys, fields) | _attention_bias(keys) | _rope(keys)


def _write_llama(config: Config) -> dict:
    return _written_shapes(config) | dict(attention_bias=config.qkv_bias, mlp_bias=False)


def _read_mistral(keys: Keys) -> dict:
    fields = _shapes(keys)
    return fields | _head_dim(keys, fields) | _rope(keys) | dict(window=keys.take("sliding_window", int, 0))


def _write_mistral(config: Config) -> dict:
    return _written_shapes(config) | dict(sliding_window=config.window or None)


def _read_windows_of_qwen(keys: Keys, num_layers: int) -> dict:
    """The windows of Qwen 2.5 and 3: with use_sliding_window, the layers from max_window_layers on have one."""
    keys.fix(use_mrope=False)
    uses, window = keys.take("use_sliding_window", bool, False), keys.take("sliding_window", int, 0)
    first = keys.take("max_window_layers", int, 0)
    types = ["sliding_attention" if uses and i >= first else "full_attention" for i in range(num_layers)]
    return _window(keys, num_layers, window if uses else 0, types)


def _written_windows_of_qwen(config: Config) -> dict:
    values = dict(use_sliding_window=bool(config.window), sliding_window=config.window or None)
    return values | dict(max_window_layers=0 if config.window else config.num_layers, layer_types=_layer_types(config))


def _read_qwen2(keys: Keys) -> dict:
    fields = _shapes(keys)
    fields |= _head_dim(keys, fields) | _rope(keys) | dict(qkv_bias=True)
    return fields | _read_windows_of_qwen(keys, fields["num_layers"])


def _write_qwen2(config: Config) -> dict:
    return _written_shapes(config) | _written_windows_of_qwen(config)


def _read_qwen3(keys: Keys) -> dict:
    fields = _shapes(keys)
    fields |= _head_dim(keys, fields, 128) | _attention_bias(keys) | _rope(keys) | dict(qk_norm=True)
    return fields | _read_windows_of_qwen(keys, fields["num_layers"])


def _write_qwen3(config: Config) -> dict:
    return _written_shapes(config) | _written_windows_of_qwen(config) | dict(attention_bias=config.qkv_bias)


def _read_qwen3_moe(keys: Keys) -> dict:
    fields = _shapes(keys)
    fields |= _head_dim(keys, fields) | _attention_bias(keys) | _rope(keys) | dict(qk_norm=True)
    keys.fix(decoder_sparse_step=1)
    dense = keys.take("mlp_only_layers", list, [])
    if dense != list(range(len(dense))):
        raise ValueError(
            f"{keys.file} has mlp_only_layers={dense!r}: this program has dense layers before all others only"
        )
    fields |= dict(
        num_experts=keys.take("num_experts", int, keys.take("num_local_experts", int, 0), at_least=1),
        experts_per_token=keys.take("num_experts_per_tok", int, at_least=1),
        expert_dim=keys.take("moe_intermediate_size", int, at_least=1),
        renormalise=keys.take("norm_topk_prob", bool, False),
        num_dense_layers=len(dense),
    )
    return fields | _read_windows_of_qwen(keys, fields["num_layers"])


def _write_qwen3_moe(config: Config) -> dict:
    return _write_qwen3(config) | dict(
        decoder_sparse_step=1,
        mlp_only_layers=list(range(config.num_dense_layers)),
        num_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        moe_intermediate_size=config.expert_dim,
        norm_topk_prob=config.renormalise,
    )


def _read_mixtral(keys: Keys) -> dict:
    fields = _shapes(keys)
    keys.fix(router_jitter_noise=0)
    return (
        fields
        | _head_dim(keys, fields)
        | _rope(keys, 1_000_000.0)
        | dict(
            window=keys.take("sliding_window", int, 0),
            num_experts=keys.take("num_local_experts", int, at_least=1),
            experts_per_token=keys.take("num_experts_per_tok", int, at_least=1),
            expert_dim=fields["ff_dim"],
        )
    )


def _write_mixtral(config: Config) -> dict:
    return _write_mistral(config) | dict(
        intermediate_size=config.expert_dim,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        router_jitter_noise=0.0,
    )


def _read_deepseek(keys: Keys) -> dict:
    """Fields of latent attention and of the experts, which DeepSeek V2 and V3 have in common."""
    fields = _shapes(keys)
    if fields["norm_eps"] != 1e-6:
        raise ValueError(
            f"{keys.file} has rms_norm_eps={fields['norm_eps']}: the norms of the latents have 1e-6 in these models, "
            "and this program has one epsilon"
        )
    keys.fix(attention_bias=False, moe_layer_freq=1)
    latent = dict(
        kv_lora_rank=keys.take("kv_lora_rank", int, at_least=1),
        q_lora_rank=keys.take("q_lora_rank", int, 0),
        head_dim=keys.take("qk_nope_head_dim", int, at_least=1),
        rope_head_dim=(rotary := keys.take("qk_rope_head_dim", int, at_least=1)),
        value_head_dim=keys.take("v_head_dim", int, at_least=1),
    )
    keys.fix(head_dim=rotary, qk_head_dim=latent["head_dim"] + rotary)
    experts = dict(
        num_experts=keys.take("n_routed_experts", int, at_least=1),
        experts_per_token=keys.take("num_experts_per_tok", int, at_least=1),
        expert_dim=keys.take("moe_intermediate_size", int, at_least=1),
        num_shared_experts=keys.take("n_shared_experts", int, at_least=1),
        num_dense_layers=keys.take("first_k_dense_replace", int, 0),
        router_scale=keys.take("routed_scaling_factor", float, 1.0),
        router_groups=keys.take("n_group", int, 1, at_least=1),
        router_groups_kept=keys.take("topk_group", int, 1, at_least=1),
    )
    return fields | latent | experts | _rope(keys)


def _written_deepseek(config: Config) -> dict:
    values = _written_shapes(config) | dict(attention_bias=False, moe_layer_freq=1)
    values |= dict(
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank or None,
        head_dim=config.rope_head_dim,
        qk_nope_head_dim=config.head_dim,
        qk_rope_head_dim=config.rope_head_dim,
        v_head_dim=config.value_head_dim or config.head_dim,
    )
    return values | dict(
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        moe_intermediate_size=config.expert_dim,
        n_shared_experts=config.num_shared_experts,
        first_k_dense_replace=config.num_dense_layers,
        routed_scaling_factor=config.router_scale,
        n_group=config.router_groups,
        topk_group=config.router_groups_kept,
        norm_topk_prob=config.renormalise,
    )


def _read_deepseek_v2(keys: Keys) -> dict:
    fields = _read_deepseek(keys)
    # The groups of V2 are scored by their best expert, here by their two best; and it scales only what it leaves as is.
    keys.fix(scoring_func="softmax", topk_method="greedy", norm_topk_prob=False)
    if fields["router_groups"] > 1:
        raise ValueError(f"{keys.file} has n_group={fields['router_groups']}: this program has only n_group=1 for V2")
    return fields | dict(renormalise=False)


def _write_deepseek_v2(config: Config) -> dict:
    return _written_deepseek(config) | dict(scoring_func="softmax", topk_method="greedy")


def _read_deepseek_v3(keys: Keys) -> dict:
    fields = _read_deepseek(keys)
    keys.fix(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    renormalise = keys.take("norm_topk_prob", bool, True)
    return fields | dict(router_scores="sigmoid", selection_bias=True, renormalise=renormalise)


def _write_deepseek_v3(config: Config) -> dict:
    values = dict(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    values["num_nextn_predict_layers"] = int(config.mtp)
    return _written_deepseek(config) | values


def _read_gpt_oss(keys: Keys) -> dict:
    fields = _shapes(keys)
    fields |= _head_dim(keys, fields, 64) | _attention_bias(keys, True) | _rope(keys, 150_000.0, "yarn")
    keys.fix(swiglu_alpha=1.702)
    per_token = keys.take("num_experts_per_tok", int, at_least=1)
    keys.fix(experts_per_token=per_token)
    fields |= dict(
        attention_sinks=True,
        num_experts=keys.take("num_local_experts", int, at_least=1),
        experts_per_token=per_token,
        expert_dim=fields["ff_dim"],
        expert_bias=True,
        swiglu_limit=keys.take("swiglu_limit", float, 7.0),
    )
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])]
    return fields | _window(keys, fields["num_layers"], keys.take("sliding_window", int, 0), alternating)


def _write_gpt_oss(config: Config) -> dict:
    return _written_shapes(config) | dict(
        intermediate_size=config.expert_dim,
        attention_bias=config.qkv_bias,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        swiglu_limit=config.swiglu_limit,
        sliding_window=config.window or None,
        layer_types=_layer_types(config),
    )


def _every_gemma(keys: Keys) -> dict:
    """Fields that Gemma 2, 3 and 4 share."""
    # "vision": among the tokens of an image, which a text does not have
    in_images = keys.values.get("use_bidirectional_attention") == "vision"
    keys.fix(use_bidirectional_attention="vision" if in_images else False)
    keys.fix(attention_bias=False, cache_implementation="hybrid")
    keys.fix(hidden_activation="gelu_pytorch_tanh")
    fields = _shapes(keys, "gelu_pytorch_tanh", tied=True)
    return fields | _head_dim(keys, fields, 256) | dict(mlp_activation="gelu", post_norms=True, embedding_scale=True)


def _gemma_shapes(keys: Keys) -> dict:
    """Fields that Gemma 2 and 3 share."""
    fields = _every_gemma(keys)
    scalar = keys.take("query_pre_attn_scalar", float, 256.0, at_least=1)
    return fields | dict(attention_scale=0.0 if scalar == fields["head_dim"] else scalar**-0.5)


def _cap(keys: Keys, key: str, default: float) -> float:
    """A soft cap; null means that there is none."""
    is_off = keys.values.get(key, default) is None
    return keys.take(key, float, 0.0 if is_off else default)


def _written_gemma(config: Config) -> dict:
    scalar = round(config.attention_scale**-2, 6) if config.attention_scale else config.head_dim
    return _written_shapes(config) | dict(
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        query_pre_attn_scalar=int(scalar) if scalar == int(scalar) else scalar,
        attn_logit_softcapping=config.attention_soft_cap or None,
        final_logit_softcapping=config.logit_soft_cap or None,
        sliding_window=config.window or None,
        layer_types=_layer_types(config),
    )


def _read_gemma2(keys: Keys) -> dict:
    fields = _gemma_shapes(keys) | _rope(keys)
    fields |= dict(attention_soft_cap=_cap(keys, "attn_logit_softcapping", 50.0))
    fields |= dict(logit_soft_cap=_cap(keys, "final_logit_softcapping", 30.0))
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])]
    return fields | _window(keys, fields["num_layers"], keys.take("sliding_window", int, 4096), alternating)


def _read_gemma3(keys: Keys) -> dict:
    fields = _gemma_shapes(keys) | dict(qk_norm=True)
    fields |= dict(attention_soft_cap=_cap(keys, "attn_logit_softcapping", 0.0))
    fields |= dict(logit_soft_cap=_cap(keys, "final_logit_softcapping", 0.0))
    if kinds := keys.take("rope_parameters", dict, {}):  # new files have those of each kind of layer
        of_kind = Keys(kinds, f"{keys.file}: rope_parameters")
        full, local = (of_kind.take(f"{kind}_attention", dict, {}) for kind in ("full", "sliding"))
        of_kind.end()
        rope = _rope(Keys(dict(rope_parameters=full), keys.file), 1_000_000.0)
        local_rope = _rope(Keys(dict(rope_parameters=local), keys.file))
        if local_rope.keys() > {"rope_theta"}:
            raise ValueError(f"{keys.file} has {local} for sliding_attention: this program scales global layers only")
        local_theta = local_rope["rope_theta"]
    else:
        rope, local_theta = _rope(keys, 1_000_000.0), keys.take("rope_local_base_freq", float, 10_000.0, at_least=1)
    fields |= rope | dict(rope_theta=local_theta, global_rope_theta=rope["rope_theta"])
    every = keys.take("sliding_window_pattern", int, keys.take("_sliding_window_pattern", int, 6), at_least=1)
    types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(fields["num_layers"])]
    return fields | _window(keys, fields["num_layers"], keys.take("sliding_window", int, 4096), types)


def _write_gemma3(config: Config) -> dict:
    values = _written_gemma(config) | dict(rope_local_base_freq=config.rope_theta)
    values["rope_theta"] = config.global_rope_theta or config.rope_theta
    if config.rope_type == "default":
        values["rope_scaling"] = None
    return values


def _read_gemma4(keys: Keys) -> dict:
    fields = _every_gemma(keys) | dict(qk_norm=True, value_norm=True, layer_scale=True, attention_scale=1.0)
    fields |= dict(ple_dim=keys.take("hidden_size_per_layer_input", int, 256))
    if fields["ple_dim"]:
        keys.fix(vocab_size_per_layer_input=fields["vocab_size"])
    keys.take("vocab_size_per_layer_input", int, 0)
    fields |= dict(num_kv_shared_layers=keys.take("num_kv_shared_layers", int, 0))
    wide = keys.take("use_double_wide_mlp", bool, False)
    fields |= dict(double_wide_mlp=wide and fields["num_kv_shared_layers"] > 0)
    fields |= dict(logit_soft_cap=_cap(keys, "final_logit_softcapping", 0.0))
    num_layers = fields["num_layers"]
    types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)]
    fields |= _window(keys, num_layers, keys.take("sliding_window", int, 512), types)
    fields |= dict(keys_as_values=keys.take("attention_k_eq_v", bool, False))
    fields |= _global_heads_of_gemma4(keys, fields)
    kinds = Keys(keys.take("rope_parameters", dict, {}), f"{keys.file}: rope_parameters")
    local = Keys(kinds.take("sliding_attention", dict, {}), f"{kinds.file}: sliding_attention")
    local.fix(rope_type="default")
    full = Keys(kinds.take("full_attention", dict, {}), f"{kinds.file}: full_attention")
    full.fix(rope_type="proportional", factor=1.0)
    fields |= dict(
        rope_theta=local.take("rope_theta", float, 10_000.0, at_least=1),
        global_rope_theta=full.take("rope_theta", float, 1_000_000.0, at_least=1),
        rope_fraction=full.take("partial_rotary_factor", float, 0.25),
    )
    for part in (kinds, local, full):
        part.end()
    if keys.take("enable_moe_block", bool, False):
        return fields | _mixture_of_gemma4(keys, fields)
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        keys.take(key, int, 0)
    return fields


def _global_heads_of_gemma4(keys: Keys, fields: dict) -> dict:
    """Heads of the global layers: per_layer_config has them layer by layer, older files have two keys."""
    heads = dict(global_head_dim=keys.take("global_head_dim", int, 512, at_least=1))
    kv_heads = keys.take("num_global_key_value_heads", int, 0)
    heads["global_kv_heads"] = kv_heads if fields["keys_as_values"] else 0
    if layers := keys.take("per_layer_config", dict, {}):
        every = fields["global_every"]
        first, numbers = layers.get(str(every - 1)), [str(i) for i in range(every - 1, fields["num_layers"], every)]
        if layers != dict.fromkeys(numbers, first) or not isinstance(first, dict):
            raise ValueError(f"{keys.file} has per_layer_config={layers!r}: all full_attention layers must be alike")
        of_layer = Keys(first, f"{keys.file}: per_layer_config")
        heads = dict(
            global_head_dim=of_layer.take("head_dim", int, fields["head_dim"], at_least=1),
            global_kv_heads=of_layer.take("num_key_value_heads", int, 0),
        )
        of_layer.end()
    return heads


def _mixture_of_gemma4(keys: Keys, fields: dict) -> dict:
    """Its dense MLP is beside the experts: shared experts that see every token."""
    width, expert_dim = fields["ff_dim"], keys.take("moe_intermediate_size", int, at_least=1)
    if width % expert_dim:
        raise ValueError(
            f"{keys.file} has intermediate_size={width}, which must be a multiple of moe_intermediate_size={expert_dim}"
        )
    return dict(
        num_experts=keys.take("num_experts", int, at_least=1),
        experts_per_token=keys.take("top_k_experts", int, at_least=1),
        expert_dim=expert_dim,
        num_shared_experts=width // expert_dim,
        expert_norms=True,
        expert_scale=True,
    )


def _write_gemma4(config: Config) -> dict:
    values = _written_gemma(config) | dict(
        head_dim=config.head_dim,
        global_head_dim=config.global_head_dim or config.head_dim,
        num_global_key_value_heads=config.global_kv_heads or None,
        attention_k_eq_v=config.keys_as_values,
        hidden_size_per_layer_input=config.ple_dim,
        vocab_size_per_layer_input=config.vocab_size,
        num_kv_shared_layers=config.num_kv_shared_layers,
        use_double_wide_mlp=config.double_wide_mlp,
        enable_moe_block=config.num_experts > 0,
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=config.rope_theta),
            full_attention=dict(
                rope_type="proportional",
                rope_theta=config.global_rope_theta,
                partial_rotary_factor=config.rope_fraction,
            ),
        ),
    )
    if config.num_experts:
        values |= dict(num_experts=config.num_experts, top_k_experts=config.experts_per_token)
        values |= dict(moe_intermediate_size=config.expert_dim)
        values |= dict(intermediate_size=config.num_shared_experts * config.expert_dim)
    absent = "rope_theta rope_scaling query_pre_attn_scalar attn_logit_softcapping hidden_act".split()
    return {key: value for key, value in values.items() if key not in absent}


_GEMMA_ROWS = (
    *(row if row.ours != "norm" else dataclasses.replace(row, plus=1.0) for row in _OUTSIDE),
    Row("model.layers.{i}.input_layernorm.weight", "norm_attention", "D", 1.0),
    Row("model.layers.{i}.post_attention_layernorm.weight", "norm_attention_out", "D", 1.0),
    Row("model.layers.{i}.pre_feedforward_layernorm.weight", "norm_mlp", "D", 1.0),
    Row("model.layers.{i}.post_feedforward_layernorm.weight", "norm_mlp_out", "D", 1.0),
    *(row if row.dims != "H" else dataclasses.replace(row, plus=1.0) for row in _ATTENTION),
    *_MLP,
)
_GEMMA4_ROWS = (
    *(dataclasses.replace(row, plus=0.0) for row in _GEMMA_ROWS),
    Row("model.layers.{i}.layer_scalar", "layer_scale", ""),
    Row("model.embed_tokens_per_layer.weight", "ple_embed", "V, A"),
    Row("model.per_layer_model_projection.weight", "ple_project", "Y P, D"),
    Row("model.per_layer_projection_norm.weight", "norm_ple", "P"),
    Row("model.layers.{i}.per_layer_input_gate.weight", "w_ple_gate", "P, D"),
    Row("model.layers.{i}.per_layer_projection.weight", "w_ple_out", "D, P"),
    Row("model.layers.{i}.post_per_layer_input_norm.weight", "norm_ple_out", "D"),
    Row("model.layers.{i}.mlp.gate_proj.weight", "shared_gate", "J, D"),
    Row("model.layers.{i}.mlp.up_proj.weight", "shared_up", "J, D"),
    Row("model.layers.{i}.mlp.down_proj.weight", "shared_down", "D, J"),
    Row("model.layers.{i}.router.proj.weight", "w_router", "E, D", over_root="D"),
    Row("model.layers.{i}.router.scale", "norm_router", "D"),
    Row("model.layers.{i}.router.per_expert_scale", "expert_scale", "E"),
    Row("model.layers.{i}.pre_feedforward_layernorm_2.weight", "norm_experts", "D"),
    Row("model.layers.{i}.post_feedforward_layernorm_2.weight", "norm_experts_out", "D"),
    Row("model.layers.{i}.post_feedforward_layernorm_1.weight", "norm_shared_out", "D"),
    Row("model.layers.{i}.experts.gate_up_proj", "expert_gate", "E, 2:0 M, D"),
    Row("model.layers.{i}.experts.gate_up_proj", "expert_up", "E, 2:1 M, D"),
    Row("model.layers.{i}.experts.down_proj", "expert_down", "E, D, M"),
)
_MIXTRAL_ROWS = (
    Row("model.layers.{i}.block_sparse_moe.gate.weight", "w_router", "E, D"),
    Row("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", "expert_gate", "M, D"),
    Row("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", "expert_up", "M, D"),
    Row("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", "expert_down", "D, M"),
)
_DEEPSEEK_ROWS = (
    Row("model.layers.{i}.self_attn.q_proj.weight", "w_q", "N H~, D"),
    Row("model.layers.{i}.self_attn.q_a_proj.weight", "w_q_down", "Q, D"),
    Row("model.layers.{i}.self_attn.q_a_layernorm.weight", "norm_q_latent", "Q"),
    Row("model.layers.{i}.self_attn.q_b_proj.weight", "w_q_up", "N H~, Q"),
    Row("model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight", "w_kv_down", "C+R~, D"),
    Row("model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight", "w_k_rope", "C+R~, D"),
    Row("model.layers.{i}.self_attn.kv_a_layernorm.weight", "norm_kv_latent", "C"),
    Row("model.layers.{i}.self_attn.kv_b_proj.weight", "w_k_up", "N I+U, C"),
    Row("model.layers.{i}.self_attn.kv_b_proj.weight", "w_v_up", "N I+U, C"),
    Row("model.layers.{i}.self_attn.o_proj.weight", "w_o", "D, N U"),
    *_EXPERTS,
    Row("model.layers.{i}.mlp.gate.e_score_correction_bias", "selection_bias", "E"),
    Row("model.layers.{i}.mlp.shared_experts.gate_proj.weight", "shared_gate", "J, D"),
    Row("model.layers.{i}.mlp.shared_experts.up_proj.weight", "shared_up", "J, D"),
    Row("model.layers.{i}.mlp.shared_experts.down_proj.weight", "shared_down", "D, J"),
)
_GPT_OSS_ROWS = (
    Row("model.layers.{i}.self_attn.sinks", "sinks", "N"),
    Row("model.layers.{i}.mlp.router.weight", "w_router", "E, D"),
    Row("model.layers.{i}.mlp.router.bias", "bias_router", "E"),
    Row("model.layers.{i}.mlp.experts.gate_up_proj", "expert_gate", "E, D, M 2:0"),
    Row("model.layers.{i}.mlp.experts.gate_up_proj", "expert_up", "E, D, M 2:1"),
    Row("model.layers.{i}.mlp.experts.down_proj", "expert_down", "E, M, D"),
    Row("model.layers.{i}.mlp.experts.gate_up_proj_bias", "bias_expert_gate", "E, M 2:0"),
    Row("model.layers.{i}.mlp.experts.gate_up_proj_bias", "bias_expert_up", "E, M 2:1"),
    Row("model.layers.{i}.mlp.experts.down_proj_bias", "bias_expert_down", "E, D"),
)
# DeepSeek-V3 has its multi-token prediction module as one more layer. It is read with --mtp.
_MTP_ROWS = (
    Row("model.layers.{L}.enorm.weight", "norm_mtp_embed", "D"),
    Row("model.layers.{L}.hnorm.weight", "norm_mtp_hidden", "D"),
    Row("model.layers.{L}.eh_proj.weight", "w_mtp_embed", "d, 2:0 D"),
    Row("model.layers.{L}.eh_proj.weight", "w_mtp_hidden", "d, 2:1 D"),
    Row("model.layers.{L}.shared_head.norm.weight", "norm_mtp", "D"),
)
_MTP_COPIES = (
    Row("model.layers.{L}.embed_tokens.weight", "embed", "V, D"),
    Row("model.layers.{L}.shared_head.head.weight", "unembed", "V, D"),
)
_MTP_SKIPPED = dict.fromkeys(
    (re.escape(row.published).replace(r"\{L\}", "{L}") for row in _MTP_COPIES),
    "the multi-token prediction module has the same ones",
)
_WITHOUT_MTP = {r"model\.layers\.{L}\..*": "without --mtp the multi-token prediction module is not trained"}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", _read_llama, _write_llama, _DENSE_ROWS, _SKIPPED),
    "mistral": Family("MistralForCausalLM", _read_mistral, _write_mistral, _DENSE_ROWS, _SKIPPED),
    "qwen2": Family("Qwen2ForCausalLM", _read_qwen2, _write_qwen2, _DENSE_ROWS, _SKIPPED),
    "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _write_qwen3, _DENSE_ROWS, _SKIPPED),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe, (*_DENSE_ROWS, *_EXPERTS), _SKIPPED),
    "mixtral": Family(
        "MixtralForCausalLM",
        _read_mixtral,
        _write_mixtral,
        (*_OUTSIDE, *_NORMS, *_ATTENTION, *_MIXTRAL_ROWS),
        _SKIPPED,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _read_deepseek_v2,
        _write_deepseek_v2,
        (*_OUTSIDE, *_NORMS, *_DEEPSEEK_ROWS, *_MLP),
        _SKIPPED,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _read_deepseek_v3,
        _write_deepseek_v3,
        (*_OUTSIDE, *_NORMS, *_DEEPSEEK_ROWS, *_MLP, *_MTP_ROWS),
        _SKIPPED | _MTP_SKIPPED,
        _WITHOUT_MTP,
        _MTP_COPIES,
    ),
    "gemma2": Family("Gemma2ForCausalLM", _read_gemma2, _written_gemma, _GEMMA_ROWS, _SKIPPED),
    "gemma3_text": Family("Gemma3ForCausalLM", _read_gemma3, _write_gemma3, _GEMMA_ROWS, _TEXT_ALONE),
    "gemma4_text": Family("Gemma4ForCausalLM", _read_gemma4, _write_gemma4, _GEMMA4_ROWS, _TEXT_ALONE),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _read_gpt_oss,
        _write_gpt_oss,
        (*_OUTSIDE, *_NORMS, *_ATTENTION, *_GPT_OSS_ROWS),
        _SKIPPED,
    ),
}

_WRAPPED = "num_attention_heads num_key_value_heads rms_norm_eps vocab_size".split()
WRAPPERS = {
    "gemma3": Wrapper(
        "Gemma3ForConditionalGeneration", "gemma3_text", dict(zip(_WRAPPED, (8, 4, 1e-6, 262_208), strict=True))
    ),
    "gemma4": Wrapper(
        "Gemma4ForConditionalGeneration", "gemma4_text", dict(zip(_WRAPPED, (8, 4, 1e-6, 262_144), strict=True))
    ),
}
# Keys beside text_config that say how images and sound are read.
_OF_IMAGES = re.compile(
    r"(vision|audio)_config|(boi|eoi|image|boa|eoa|audio|video)_token_(id|index)|mm_tokens_per_image"
)


# -- config.json


def read_json(file: Path) -> dict:
    """Returns the object in a JSON file. Raises ValueError where it holds none, and OSError where it cannot be read."""
    try:
        values = json.loads(command.read_text(str(file)))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file.parent} has no {file.name}: it must be a folder of published weights") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} must be a JSON object, and is {_article(type(values))}")
    return values


def read_model(directory: str | Path) -> dict:
    """Returns the config.json in a folder of published weights; that of the text model where there are images, too.

    Raises as `read_json`, and ValueError for a wrapped model with keys that this program does not know.
    """
    file = Path(directory, "config.json")
    values = read_json(file)
    if (wrapper := WRAPPERS.get(values.get("model_type"))) is None:
        return values
    keys = Keys(values, str(file))
    keys.fix(architectures=[wrapper.architecture])
    text = keys.take("text_config", dict)
    keys.unread = {key for key in keys.unread if not _OF_IMAGES.fullmatch(key)} - {"tie_word_embeddings"}
    keys.end()
    Keys(text, f"{file}: text_config").fix(model_type=wrapper.text)
    beside = {key: values[key] for key in ("quantization_config", "tie_word_embeddings") if key in values}
    return wrapper.defaults | dict(model_type=wrapper.text) | beside | text


def text_name(name: str) -> str:
    """Returns the name that a tensor of a wrapped text model has in the text model alone."""
    return re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name).removeprefix("language_model.")


def family_of(values: dict, file: str) -> str:
    """Returns the model_type of a config.json. Raises ValueError for one that is not in FAMILIES."""
    kind = values.get("model_type")
    if kind not in FAMILIES:
        near = inputs.did_you_mean(str(kind), [*FAMILIES, *WRAPPERS])
        raise ValueError(f"{file} has model_type={kind!r}, which this program cannot read{near}")
    return kind


def settings(directory: str) -> dict:
    """Returns the fields of Config that a published model's config.json gives, {name: value}.

    Raises:
      ValueError: the file is no config.json, or has a key or a value that this program cannot represent; the message
        names both.
      OSError: it cannot be read.
    """
    return _settings_of(read_model(directory), str(Path(directory, "config.json")))


def _settings_of(values: dict, file: str) -> dict:
    kind = family_of(values, file)
    keys, family = Keys(values, file), FAMILIES[kind]
    if (architectures := keys.take("architectures", list, [family.architecture])) != [family.architecture]:
        raise ValueError(f"{file} has architectures={architectures!r}: this program has only {family.architecture}")
    fields = family.read(keys)
    keys.end()
    return fields


def config_json(config: Config, like: dict | None = None) -> dict:
    """Returns the config.json with which `transformers` computes what `config` does, of the first family that can.

    Args:
      like: the config.json of the model from which this one was trained: its family is tried first, and keys that do
        not change the model are taken over, such as the ids of special tokens.

    Raises ValueError where no family can, with the field that the nearest one cannot have.
    """
    nearest: tuple[int, str] | None = None
    like = like or {}
    taken_over = {key: value for key, value in like.items() if key in _TAKEN_OVER}
    for kind, family in sorted(FAMILIES.items(), key=lambda item: item[0] != like.get("model_type")):
        values = dict(architectures=[family.architecture], model_type=kind, **family.write(config))
        try:
            wrong = differing(_settings_of(values, "config.json"), config)
        except ValueError as error:
            wrong = {"": str(error)}
        if not wrong:
            return values | taken_over
        if nearest is None or len(wrong) < nearest[0]:
            name, reason = next(iter(wrong.items()))
            nearest = len(wrong), f"{kind}: {reason}" if not name else f"{kind} has {reason}"
    raise ValueError(f"no published family has this model; the nearest is {nearest[1]}")


def complete(fields: dict) -> dict:
    """Returns all fields of the model: `fields` from `settings`, and the defaults of Config."""
    return {name: fields.get(name, getattr(Config, name)) for name in model_fields()}


def shape_fields() -> list[str]:
    """Returns the fields of the model that decide the shapes of its weights."""
    shapes = config_lib.deciding("shapes")
    return [name for name in model_fields() if name in shapes]


def differing(fields: dict, config: Config) -> dict[str, str]:
    """Returns {field: both values} of what `fields`, from `settings`, have in another way than `config`."""
    unused, wrong = {"ff_dim"} if config.num_experts and not config.num_dense_layers else set(), {}
    for name, theirs in complete(fields).items():
        ours = getattr(config, name)
        if theirs != ours and name not in unused:
            wrong[name] = f"{name}={theirs!r}, and this model {name}={ours!r}"
    return wrong
