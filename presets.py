"""The models, for `--preset=NAME`: published shapes, and small ones that learn on a CPU.

**Dense models.** Sources are the models' reports (Llama 2, arXiv:2307.09288; Llama 3, arXiv:2407.21783; Mistral 7B,
arXiv:2310.06825; Qwen 2.5, arXiv:2412.15115; Qwen 3, arXiv:2505.09388; Gemma 2, arXiv:2408.00118; Gemma 3,
arXiv:2503.19786) with their released configuration files, and Gemma 4's model cards. Gemma 3 of 4B and 12B, and Gemma
4, are the text models, without images. The shapes of Gemma 4 E2B and E4B are also in MaxText (gemma4-e2b.yml and
gemma4-e4b.yml in configs/models).

**Mixtures of experts.** Mixtral, arXiv:2401.04088 (mistralai/Mixtral-8x7B-v0.1); Qwen 3 (Qwen/Qwen3-30B-A3B and
Qwen/Qwen3-235B-A22B of April 2025; no layer uses the ff_dim of their configurations); DeepSeek-V2-Lite,
arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437, without its multi-token prediction module, which `--mtp` adds; gpt-oss,
arXiv:2508.10925; Gemma 4 26B. The latter has a dense MLP of 2,112 beside its experts of 704, here as three shared
experts.

Routers follow the reports and configurations. All but that of DeepSeek-V2-Lite renormalise; for gpt-oss that is its
softmax over the selected experts. DeepSeek-V3's router has sigmoids, 8 groups of which 4 are selected, and a scale of
2.5. It is balanced by a bias with a rate of 0.001 (sections 2.1.2 and 4.2), here without the loss of 1e-4 within a
sequence. DeepSeek-V2-Lite's weight of the load-balance loss is in its configuration file. The others' are not
published; 0.01 is Switch's.
"""

_LARGE = dict(dtype="bfloat16", remat="full", learning_rate=3e-4, warmup_ratio=0.02, steps=100_000, batch=128)
_LARGE |= dict(loss_chunk=1024)
_LLAMA31 = dict(_LARGE, vocab_size=128_256, rope_theta=500_000.0, seq_len=8192, num_kv_heads=8)
_LLAMA31 |= dict(rope_type="llama3", rope_scaling=8.0)
_QWEN3 = dict(_LARGE, vocab_size=151_936, rope_theta=1_000_000.0, qk_norm=True, norm_eps=1e-6, seq_len=4096)
_QWEN3_MOE = dict(_QWEN3, num_experts=128, experts_per_token=8, load_balance_loss=0.01)
_DEEPSEEK = dict(_LARGE, seq_len=4096, head_dim=128, norm_eps=1e-6, kv_lora_rank=512, rope_head_dim=64)
_DEEPSEEK |= dict(value_head_dim=128, rope_type="yarn", rope_scaling=40.0, rope_original_len=4096)
_GPT_OSS = dict(_LARGE, vocab_size=201_088, seq_len=8192, model_dim=2880, ff_dim=2880, num_heads=64, num_kv_heads=8)
_GPT_OSS |= dict(head_dim=64, rope_theta=150_000.0, rope_type="yarn", rope_scaling=32.0, rope_original_len=4096)
_GPT_OSS |= dict(rope_truncate=False, qkv_bias=True, output_bias=True, attention_sinks=True, window=128, global_every=2)
_GPT_OSS |= dict(experts_per_token=4, expert_dim=2880, expert_bias=True, swiglu_limit=7.0, load_balance_loss=0.01)
_GEMMA = dict(_LARGE, seq_len=8192, norm_eps=1e-6, tied_embeddings=True, embedding_scale=True, post_norms=True)
_GEMMA |= dict(mlp_activation="gelu", head_dim=256)
_GEMMA2 = _GEMMA | dict(vocab_size=256_000, window=4096, global_every=2, attention_soft_cap=50.0, logit_soft_cap=30.0)
_GEMMA3 = _GEMMA | dict(qk_norm=True, global_every=6, global_rope_theta=1_000_000.0)
_GEMMA3_LONG = _GEMMA3 | dict(vocab_size=262_208, window=1024, rope_type="linear", rope_scaling=8.0)
_GEMMA4 = _GEMMA3 | dict(vocab_size=262_144, window=1024, attention_scale=1.0, value_norm=True, keys_as_values=True)
_GEMMA4 |= dict(rope_fraction=0.25, global_head_dim=512, layer_scale=True, logit_soft_cap=30.0)
_GEMMA4_SMALL = _GEMMA4 | dict(window=512, num_heads=8, keys_as_values=False, ple_dim=256)
PRESETS: dict[str, dict] = {
    "tiny": {},
    "tiny-moe": dict(num_experts=8, experts_per_token=2, expert_dim=256, load_balance_loss=0.01),
    "tiny-mla": dict(kv_lora_rank=48, q_lora_rank=64, head_dim=16, rope_head_dim=8, value_head_dim=24),
    "llama2-70b": dict(
        _LARGE,
        vocab_size=32_000,
        seq_len=4096,
        num_layers=80,
        model_dim=8192,
        ff_dim=28_672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
    ),
    "llama3.1-8b": dict(_LLAMA31, num_layers=32, model_dim=4096, ff_dim=14_336, num_heads=32, head_dim=128),
    "llama3.1-70b": dict(_LLAMA31, num_layers=80, model_dim=8192, ff_dim=28_672, num_heads=64, head_dim=128),
    "llama3.1-405b": dict(_LLAMA31, num_layers=126, model_dim=16_384, ff_dim=53_248, num_heads=128, head_dim=128),
    "llama3.2-1b": dict(
        _LLAMA31,
        num_layers=16,
        model_dim=2048,
        ff_dim=8192,
        num_heads=32,
        head_dim=64,
        rope_scaling=32.0,
        tied_embeddings=True,
    ),
    "mistral-7b": dict(
        _LARGE,
        vocab_size=32_000,
        seq_len=8192,
        num_layers=32,
        model_dim=4096,
        ff_dim=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        window=4096,
    ),
    "qwen2.5-7b": dict(
        _LARGE,
        vocab_size=152_064,
        seq_len=8192,
        num_layers=28,
        model_dim=3584,
        ff_dim=18_944,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rope_theta=1_000_000.0,
        qkv_bias=True,
        norm_eps=1e-6,
    ),
    "gemma2-2b": dict(_GEMMA2, num_layers=26, model_dim=2304, ff_dim=9216, num_heads=8, num_kv_heads=4),
    "gemma2-9b": dict(_GEMMA2, num_layers=42, model_dim=3584, ff_dim=14_336, num_heads=16, num_kv_heads=8),
    "gemma3-1b": dict(
        _GEMMA3,
        vocab_size=262_144,
        window=512,
        num_layers=26,
        model_dim=1152,
        ff_dim=6912,
        num_heads=4,
        num_kv_heads=1,
    ),
    "gemma3-4b": dict(_GEMMA3_LONG, num_layers=34, model_dim=2560, ff_dim=10_240, num_heads=8, num_kv_heads=4),
    "gemma3-12b": dict(_GEMMA3_LONG, num_layers=48, model_dim=3840, ff_dim=15_360, num_heads=16, num_kv_heads=8),
    "gemma4-31b": dict(
        _GEMMA4,
        num_layers=60,
        model_dim=5376,
        ff_dim=21_504,
        num_heads=32,
        num_kv_heads=16,
        global_kv_heads=4,
    ),
    "gemma4-e2b": dict(
        _GEMMA4_SMALL,
        num_layers=35,
        global_every=5,
        num_kv_shared_layers=20,
        double_wide_mlp=True,
        model_dim=1536,
        ff_dim=6144,
        num_kv_heads=1,
    ),
    "gemma4-e4b": dict(
        _GEMMA4_SMALL, num_layers=42, num_kv_shared_layers=18, model_dim=2560, ff_dim=10_240, num_kv_heads=2
    ),
    "gemma4-26b-a4b": dict(
        _GEMMA4,
        num_layers=30,
        model_dim=2816,
        ff_dim=2112,
        num_heads=16,
        num_kv_heads=8,
        global_kv_heads=2,
        num_experts=128,
        experts_per_token=8,
        expert_dim=704,
        num_shared_experts=3,
        expert_norms=True,
        expert_scale=True,
        load_balance_loss=0.01,
    ),
    "mixtral-8x7b": dict(
        _LARGE,
        vocab_size=32_000,
        seq_len=4096,
        num_layers=32,
        model_dim=4096,
        ff_dim=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        num_experts=8,
        experts_per_token=2,
        expert_dim=14_336,
        load_balance_loss=0.01,
    ),
    "qwen3-0.6b": dict(
        _QWEN3,
        num_layers=28,
        model_dim=1024,
        ff_dim=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        tied_embeddings=True,
    ),
    "qwen3-8b": dict(_QWEN3, num_layers=36, model_dim=4096, ff_dim=12_288, num_heads=32, num_kv_heads=8, head_dim=128),
    "qwen3-30b-a3b": dict(
        _QWEN3_MOE,
        num_layers=48,
        model_dim=2048,
        ff_dim=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        expert_dim=768,
    ),
    "qwen3-235b-a22b": dict(
        _QWEN3_MOE,
        num_layers=94,
        model_dim=4096,
        ff_dim=12_288,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        expert_dim=1536,
    ),
    "deepseek-v2-lite": dict(
        _DEEPSEEK,
        vocab_size=102_400,
        num_layers=27,
        model_dim=2048,
        ff_dim=10_944,
        num_heads=16,
        num_kv_heads=16,
        num_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        num_shared_experts=2,
        num_dense_layers=1,
        renormalise=False,
        load_balance_loss=0.001,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
    ),
    "deepseek-v3": dict(
        _DEEPSEEK,
        vocab_size=129_280,
        num_layers=61,
        model_dim=7168,
        ff_dim=18_432,
        num_heads=128,
        num_kv_heads=128,
        num_experts=256,
        experts_per_token=8,
        expert_dim=2048,
        num_shared_experts=1,
        num_dense_layers=3,
        router_scores="sigmoid",
        router_groups=8,
        router_groups_kept=4,
        router_scale=2.5,
        selection_bias=True,
        q_lora_rank=1536,
        rope_mscale_all_dim=1.0,
    ),
    "gpt-oss-20b": dict(_GPT_OSS, num_layers=24, num_experts=32),
    "gpt-oss-120b": dict(_GPT_OSS, num_layers=36, num_experts=128),
}
