"""The presets' numbers, against what the released models' config.json says of them."""

import pytest

import flags as flags_lib
from config import Config
from flags import PRESETS, from_preset

# Keys of config.json, and the field that each is.
FIELDS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "model_dim",
    "intermediate_size": "ff_dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling.rope_type": "rope_type",
    "rope_scaling.factor": "rope_scaling",
    "rope_scaling.truncate": "rope_truncate",
    "rope_scaling.beta_fast": "rope_beta_fast",
    "rope_scaling.beta_slow": "rope_beta_slow",
    "rope_scaling.mscale": "rope_mscale",
    "rope_scaling.mscale_all_dim": "rope_mscale_all_dim",
    "rope_scaling.original_max_position_embeddings": "rope_original_len",
    "tie_word_embeddings": "tied_embeddings",
    "sliding_window": "window",
    "sliding_window_pattern": "global_every",
    "rope_parameters.sliding_attention.rope_theta": "rope_theta",
    "rope_parameters.full_attention.rope_theta": "global_rope_theta",
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logit_soft_cap",
    "rope_parameters.full_attention.partial_rotary_factor": "rope_fraction",
    "global_head_dim": "global_head_dim",
    "num_global_key_value_heads": "global_kv_heads",
    "attention_k_eq_v": "keys_as_values",
    "num_kv_shared_layers": "num_kv_shared_layers",
    "use_double_wide_mlp": "double_wide_mlp",
    "hidden_size_per_layer_input": "ple_dim",
    "top_k_experts": "experts_per_token",
    "swiglu_limit": "swiglu_limit",
    "num_local_experts": "num_experts",
    "num_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_dim",
    "first_k_dense_replace": "num_dense_layers",
    "norm_topk_prob": "renormalise",
    "scoring_func": "router_scores",
    "n_group": "router_groups",
    "topk_group": "router_groups_kept",
    "routed_scaling_factor": "router_scale",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_nope_head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "value_head_dim",
}
SIZES = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size".split()


def sized(*sizes: int, **others) -> dict:
    return dict(zip(SIZES, sizes, strict=True)) | others


def rope(kind: str, factor: float, original_len: int, **others) -> dict:
    numbers = dict(rope_type=kind, factor=factor, original_max_position_embeddings=original_len) | others
    return {f"rope_scaling.{name}": value for name, value in numbers.items()}


LLAMA31 = rope("llama3", 8.0, 8192)
LLAMA31 |= dict(head_dim=128, rms_norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=False)
QWEN3 = dict(head_dim=128, rms_norm_eps=1e-6, rope_theta=1_000_000.0, tie_word_embeddings=False)
QWEN3_MOE = QWEN3 | dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
DEEPSEEK = dict(rms_norm_eps=1e-6, rope_theta=10_000.0, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
DEEPSEEK |= dict(kv_lora_rank=512)
GPT_OSS = dict(head_dim=64, rms_norm_eps=1e-5, rope_theta=150_000.0, sliding_window=128, swiglu_limit=7.0)
GPT_OSS |= rope("yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False) | dict(num_experts_per_tok=4)
GEMMA = dict(head_dim=256, rms_norm_eps=1e-6, tie_word_embeddings=True)
GEMMA2 = GEMMA | dict(rope_theta=10_000.0, sliding_window=4096)
GEMMA2 |= dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
GEMMA3 = GEMMA | {f"rope_parameters.{kind}_attention.rope_theta": t for kind, t in (("sliding", 1e4), ("full", 1e6))}
GEMMA3 |= dict(sliding_window_pattern=6)
GEMMA3_LONG = GEMMA3 | {"sliding_window": 1024, "rope_scaling.rope_type": "linear", "rope_scaling.factor": 8.0}
GEMMA4 = GEMMA3 | {"rope_parameters.full_attention.partial_rotary_factor": 0.25, "sliding_window": 1024}
GEMMA4 |= dict(global_head_dim=512, attention_k_eq_v=True, final_logit_softcapping=30.0)
GEMMA4_SMALL = GEMMA4 | dict(attention_k_eq_v=False, sliding_window=512, hidden_size_per_layer_input=256)
CONFIG_JSON = {
    "llama2-70b": sized(80, 8192, 28_672, 64, 8, 32_000, rms_norm_eps=1e-5, rope_theta=10_000.0),
    "llama3.1-8b": sized(32, 4096, 14_336, 32, 8, 128_256) | LLAMA31,
    "llama3.1-70b": sized(80, 8192, 28_672, 64, 8, 128_256) | LLAMA31,
    "llama3.1-405b": sized(126, 16_384, 53_248, 128, 8, 128_256) | LLAMA31,
    "llama3.2-1b": sized(16, 2048, 8192, 32, 8, 128_256)
    | LLAMA31
    | dict(head_dim=64, tie_word_embeddings=True)
    | rope("llama3", 32.0, 8192),
    "mistral-7b": sized(32, 4096, 14_336, 32, 8, 32_000, rms_norm_eps=1e-5, rope_theta=10_000.0, sliding_window=4096),
    "qwen2.5-7b": sized(28, 3584, 18_944, 28, 4, 152_064, rms_norm_eps=1e-6, rope_theta=1_000_000.0),
    "mixtral-8x7b": sized(32, 4096, 14_336, 32, 8, 32_000, rms_norm_eps=1e-5, rope_theta=1_000_000.0)
    | dict(num_local_experts=8, num_experts_per_tok=2),
    "qwen3-0.6b": sized(28, 1024, 3072, 16, 8, 151_936) | QWEN3 | dict(tie_word_embeddings=True),
    "qwen3-8b": sized(36, 4096, 12_288, 32, 8, 151_936) | QWEN3,
    "qwen3-30b-a3b": sized(48, 2048, 6144, 32, 4, 151_936, moe_intermediate_size=768) | QWEN3_MOE,
    "qwen3-235b-a22b": sized(94, 4096, 12_288, 64, 4, 151_936, moe_intermediate_size=1536) | QWEN3_MOE,
    "deepseek-v2-lite": sized(27, 2048, 10_944, 16, 16, 102_400)
    | DEEPSEEK
    | dict(n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2)
    | dict(first_k_dense_replace=1, scoring_func="softmax", norm_topk_prob=False, n_group=1, topk_group=1)
    | dict(routed_scaling_factor=1.0)
    | rope("yarn", 40.0, 4096, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707),
    "deepseek-v3": sized(61, 7168, 18_432, 128, 128, 129_280)
    | DEEPSEEK
    | dict(n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1)
    | dict(first_k_dense_replace=3, scoring_func="sigmoid", norm_topk_prob=True, n_group=8, topk_group=4)
    | dict(routed_scaling_factor=2.5, q_lora_rank=1536)
    | rope("yarn", 40.0, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    "gpt-oss-20b": sized(24, 2880, 2880, 64, 8, 201_088, num_local_experts=32) | GPT_OSS,
    "gpt-oss-120b": sized(36, 2880, 2880, 64, 8, 201_088, num_local_experts=128) | GPT_OSS,
    "gemma2-2b": sized(26, 2304, 9216, 8, 4, 256_000) | GEMMA2,
    "gemma2-9b": sized(42, 3584, 14_336, 16, 8, 256_000) | GEMMA2,
    "gemma3-1b": sized(26, 1152, 6912, 4, 1, 262_144, sliding_window=512) | GEMMA3,
    "gemma3-4b": sized(34, 2560, 10_240, 8, 4, 262_208) | GEMMA3_LONG,
    "gemma3-12b": sized(48, 3840, 15_360, 16, 8, 262_208) | GEMMA3_LONG,
    "gemma4-31b": sized(60, 5376, 21_504, 32, 16, 262_144, num_global_key_value_heads=4) | GEMMA4,
    "gemma4-e2b": sized(35, 1536, 6144, 8, 1, 262_144)
    | GEMMA4_SMALL
    | dict(sliding_window_pattern=5, num_kv_shared_layers=20, use_double_wide_mlp=True),
    "gemma4-e4b": sized(42, 2560, 10_240, 8, 2, 262_144) | GEMMA4_SMALL | dict(num_kv_shared_layers=18),
    "gemma4-26b-a4b": sized(30, 2816, 2112, 16, 8, 262_144, num_global_key_value_heads=2)
    | GEMMA4
    | dict(num_experts=128, top_k_experts=8, moe_intermediate_size=704),
}
# Numbers of the models' code that config.json lacks; and the weight of a loss, which presets.py chooses.
OF_THE_CODE = {
    "llama2-70b": dict(head_dim=8192 // 64),
    "mistral-7b": dict(head_dim=4096 // 32),
    "qwen2.5-7b": dict(head_dim=3584 // 28, qkv_bias=True),
    "mixtral-8x7b": dict(head_dim=4096 // 32, expert_dim=14_336, load_balance_loss=0.01),
    "qwen3-0.6b": dict(qk_norm=True),
    "qwen3-8b": dict(qk_norm=True),
    "qwen3-30b-a3b": dict(qk_norm=True, load_balance_loss=0.01),
    "qwen3-235b-a22b": dict(qk_norm=True, load_balance_loss=0.01),
    "deepseek-v2-lite": dict(load_balance_loss=0.001),  # aux_loss_alpha
    "deepseek-v3": dict(selection_bias=True),  # topk_method noaux_tc; its rate is 0.001, the default
}
OF_THE_CODE |= dict.fromkeys(
    ("gpt-oss-20b", "gpt-oss-120b"),
    dict(qkv_bias=True, output_bias=True, attention_sinks=True, expert_bias=True, global_every=2)
    | dict(expert_dim=2880, load_balance_loss=0.01),
)
# Their scale of attention, query_pre_attn_scalar^-0.5, is that of head_dim=256.
GEMMA_CODE = dict(mlp_activation="gelu", post_norms=True, embedding_scale=True)
OF_THE_CODE |= {f"gemma2-{size}": GEMMA_CODE | dict(global_every=2) for size in ("2b", "9b")}
GEMMA4_CODE = GEMMA_CODE | dict(qk_norm=True, value_norm=True, layer_scale=True, attention_scale=1.0)
OF_THE_CODE |= dict.fromkeys(("gemma4-31b", "gemma4-e2b", "gemma4-e4b"), GEMMA4_CODE)
# Its dense MLP of 2112 is beside the experts, as wide as three of them.
OF_THE_CODE["gemma4-26b-a4b"] = GEMMA4_CODE | dict(num_shared_experts=2112 // 704, expert_norms=True, expert_scale=True)
OF_THE_CODE["gemma4-26b-a4b"] |= dict(load_balance_loss=0.01)
OF_THE_CODE |= {f"gemma3-{size}": GEMMA_CODE | dict(qk_norm=True) for size in ("1b", "4b", "12b")}


@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("tiny")])
def test_every_number_of_a_model_is_the_published_one(preset):
    """No field of the model is left out: those in no table here are off, as in the default."""
    published = {FIELDS[key]: value for key, value in CONFIG_JSON[preset].items()} | OF_THE_CODE.get(preset, {})
    groups = flags_lib._documentation()
    of_the_model = [*groups["model"], *groups["mixture of experts"], *groups["multi-head latent attention"]]
    config = from_preset(preset)
    for name in of_the_model:
        if name != "dtype":
            assert getattr(config, name) == published.get(name, getattr(Config, name)), name
    assert not published.keys() - {*of_the_model}
    assert config.dtype == "bfloat16"


def test_the_defaults_that_the_tables_lean_on():
    """A model without these numbers in its config.json has these."""
    config = Config()
    assert (config.norm_eps, config.rope_theta, config.rope_scaling, config.rope_original_len) == (1e-5, 1e4, 1, 8192)
    assert (config.selection_bias_rate, config.router_scale, config.renormalise) == (0.001, 1, True)
