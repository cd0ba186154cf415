"""Tests config.json of published models: those that were released, what is refused, and the way back."""

import json
from pathlib import Path

import pytest

import families
import flags
from config import Config

HF = dict(
    bos_token_id=1, eos_token_id=2, use_cache=True, torch_dtype="bfloat16", transformers_version="4.43.0", vocab_size=64
) | dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, rms_norm_eps=1e-6)
LLAMA = HF | dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu")
QWEN3 = HF | dict(model_type="qwen3", num_key_value_heads=2, head_dim=16, sliding_window=8)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
DEEPSEEK = HF | dict(
    model_type="deepseek_v3",
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
YARN = dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1)


def settings(tmp_path: Path, values) -> dict:
    (tmp_path / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return families.settings(str(tmp_path))


# {preset: what the released config.json has where it differs from a preset's own export}.
RELEASED = {
    "llama3.1-8b": dict(
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128001,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=131072,
        mlp_bias=False,
        model_type="llama",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=LLAMA3,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.43.0.dev0",
        use_cache=True,
        vocab_size=128256,
    ),
    "qwen2.5-7b": dict(
        architectures=["Qwen2ForCausalLM"],
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151643,
        hidden_act="silu",
        hidden_size=3584,
        initializer_range=0.02,
        intermediate_size=18944,
        max_position_embeddings=131072,
        max_window_layers=28,
        model_type="qwen2",
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=131072,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.40.1",
        use_cache=True,
        use_mrope=False,
        use_sliding_window=False,
        vocab_size=152064,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        decoder_sparse_step=1,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=6144,
        max_position_embeddings=40960,
        max_window_layers=48,
        mlp_only_layers=[],
        model_type="qwen3_moe",
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        output_router_logits=False,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.51.0",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "mixtral-8x7b": dict(
        architectures=["MixtralForCausalLM"],
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=32768,
        model_type="mixtral",
        num_attention_heads=32,
        num_experts_per_tok=2,
        num_hidden_layers=32,
        num_key_value_heads=8,
        num_local_experts=8,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.36.0.dev0",
        use_cache=True,
        vocab_size=32000,
    ),
    "deepseek-v3": dict(
        architectures=["DeepseekV3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        bos_token_id=0,
        eos_token_id=1,
        ep_size=1,
        first_k_dense_replace=3,
        hidden_act="silu",
        hidden_size=7168,
        initializer_range=0.02,
        intermediate_size=18432,
        kv_lora_rank=512,
        max_position_embeddings=163840,
        model_type="deepseek_v3",
        moe_intermediate_size=2048,
        moe_layer_freq=1,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_attention_heads=128,
        num_experts_per_tok=8,
        num_hidden_layers=61,
        num_key_value_heads=128,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        quantization_config={"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        rms_norm_eps=1e-06,
        rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
        rope_theta=10000,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        tie_word_embeddings=False,
        topk_group=4,
        topk_method="noaux_tc",
        torch_dtype="bfloat16",
        transformers_version="4.33.1",
        use_cache=True,
        v_head_dim=128,
        vocab_size=129280,
    ),
    "gemma2-2b": dict(
        architectures=["Gemma2ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        attn_logit_softcapping=50.0,
        bos_token_id=2,
        cache_implementation="hybrid",
        eos_token_id=1,
        final_logit_softcapping=30.0,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=2304,
        initializer_range=0.02,
        intermediate_size=9216,
        max_position_embeddings=8192,
        model_type="gemma2",
        num_attention_heads=8,
        num_hidden_layers=26,
        num_key_value_heads=4,
        pad_token_id=0,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        sliding_window=4096,
        torch_dtype="float32",
        transformers_version="4.42.4",
        use_cache=True,
        vocab_size=256000,
    ),
    "gemma3-1b": dict(
        architectures=["Gemma3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        attn_logit_softcapping=None,
        bos_token_id=2,
        cache_implementation="hybrid",
        eos_token_id=1,
        final_logit_softcapping=None,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=1152,
        initializer_range=0.02,
        intermediate_size=6912,
        max_position_embeddings=32768,
        model_type="gemma3_text",
        num_attention_heads=4,
        num_hidden_layers=26,
        num_key_value_heads=1,
        pad_token_id=0,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-06,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
        torch_dtype="bfloat16",
        transformers_version="4.50.0.dev0",
        use_cache=True,
        vocab_size=262144,
    ),
    "gpt-oss-120b": dict(
        architectures=["GptOssForCausalLM"],
        attention_bias=True,
        attention_dropout=0.0,
        eos_token_id=200002,
        experts_per_token=4,
        head_dim=64,
        hidden_act="silu",
        hidden_size=2880,
        initial_context_length=4096,
        initializer_range=0.02,
        intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 18,
        max_position_embeddings=131072,
        model_type="gpt_oss",
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_hidden_layers=36,
        num_key_value_heads=8,
        num_local_experts=128,
        output_router_logits=False,
        pad_token_id=199999,
        quantization_config={"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        rms_norm_eps=1e-05,
        rope_scaling=dict(YARN, factor=32.0, truncate=False),
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
        transformers_version="4.55.0.dev0",
        use_cache=True,
        vocab_size=201088,
    ),
}


@pytest.mark.parametrize("preset", RELEASED)
def test_released_files_are_those_of_the_presets(preset, tmp_path):
    config, fields = flags.from_preset(preset), settings(tmp_path, RELEASED[preset])
    rope = {name for name in fields if name.startswith("rope_")}  # the presets may leave YaRN out
    assert {name: getattr(config, name) for name in fields if name not in rope} == {
        name: value for name, value in fields.items() if name not in rope
    }
    others = [name for name in families.model_fields() if name not in fields and not name.startswith("rope_")]
    assert {name: getattr(config, name) for name in others} == {name: getattr(Config, name) for name in others}


@pytest.mark.parametrize("preset", RELEASED)
def test_a_released_model_comes_back_from_its_own_file(preset, tmp_path):
    fields = settings(tmp_path, RELEASED[preset])
    written = families.config_json(Config(**fields))
    assert written["model_type"] == RELEASED[preset]["model_type"]
    assert settings(tmp_path, written) == fields
    harmless = families.HARMLESS | {"rope_scaling", "rope_theta", "initializer_range"}
    for name in (RELEASED[preset].keys() & written.keys()) - harmless - {"max_window_layers", "sliding_window"}:
        assert written[name] == RELEASED[preset][name], name


def test_fields_of_yarn_are_read(tmp_path):
    fields = settings(tmp_path, RELEASED["deepseek-v3"])
    assert (fields["rope_type"], fields["rope_scaling"], fields["rope_original_len"]) == ("yarn", 40.0, 4096)
    assert (fields["rope_mscale"], fields["rope_mscale_all_dim"], fields["rope_truncate"]) == (1.0, 1.0, True)
    fields = settings(tmp_path, RELEASED["gpt-oss-120b"])
    assert (fields["rope_mscale"], fields["rope_mscale_all_dim"], fields["rope_truncate"]) == (1.0, 0.0, False)
    fields = settings(tmp_path, LLAMA | dict(rope_scaling=YARN | dict(attention_factor=1.0)))
    assert fields["rope_mscale"] == 0


def test_newer_files_have_rope_parameters(tmp_path):
    old = settings(tmp_path, LLAMA | dict(rope_theta=5e5, rope_scaling=LLAMA3))
    assert old == settings(tmp_path, LLAMA | dict(rope_parameters=LLAMA3 | dict(rope_theta=5e5)))
    assert old["rope_scaling"] == 8.0 and old["rope_theta"] == 5e5


def test_gemma_3_has_rope_parameters_for_each_kind_of_layer(tmp_path):
    old = RELEASED["gemma3-1b"] | dict(rope_scaling=dict(rope_type="linear", factor=8.0))
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    full = dict(rope_type="linear", factor=8.0, rope_theta=1e6)
    local = dict(rope_type="default", rope_theta=1e4)
    fields = settings(tmp_path, new | dict(rope_parameters=dict(full_attention=full, sliding_attention=local)))
    assert fields == settings(tmp_path, old)
    assert (fields["rope_theta"], fields["global_rope_theta"], fields["rope_scaling"]) == (1e4, 1e6, 8.0)
    with pytest.raises(ValueError, match="this program scales global layers only"):
        settings(tmp_path, new | dict(rope_parameters=dict(full_attention=full, sliding_attention=full)))


GEMMA4 = dict(
    model_type="gemma4_text",
    attention_bias=False,
    attention_k_eq_v=True,
    enable_moe_block=False,
    final_logit_softcapping=30.0,
    global_head_dim=16,
    head_dim=8,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size_per_layer_input=0,
    moe_intermediate_size=None,
    num_global_key_value_heads=1,
    num_key_value_heads=2,
    num_kv_shared_layers=0,
    sliding_window=8,
    tie_word_embeddings=True,
    use_bidirectional_attention=None,
    vocab_size_per_layer_input=64,
    layer_types=["sliding_attention", "full_attention"] * 2,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
)


def test_gemma_4_has_other_heads_in_global_layers(tmp_path):
    """Older files have them in two keys, newer ones in per_layer_config."""
    fields = settings(tmp_path, HF | GEMMA4)
    assert (fields["global_head_dim"], fields["global_kv_heads"], fields["keys_as_values"]) == (16, 1, True)
    assert (fields["rope_fraction"], fields["global_rope_theta"], fields["global_every"]) == (0.25, 1e6, 2)
    old = {key: value for key, value in GEMMA4.items() if "global" not in key}
    heads = dict(head_dim=16, num_key_value_heads=1)
    assert settings(tmp_path, HF | old | dict(per_layer_config={"1": heads, "3": heads})) == fields
    with pytest.raises(ValueError, match="all full_attention layers must be alike"):
        settings(tmp_path, HF | old | dict(per_layer_config={"1": heads, "3": dict(head_dim=32)}))
    with pytest.raises(ValueError, match="vocab_size_per_layer_input=65: this program has only"):
        settings(tmp_path, HF | GEMMA4 | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=65))
    assert settings(tmp_path, families.config_json(Config(**fields))) == fields


def test_the_mlp_beside_the_experts_of_gemma_4_is_that_of_shared_experts(tmp_path):
    mixture = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16)
    fields = settings(tmp_path, HF | GEMMA4 | mixture)
    assert (fields["num_shared_experts"], fields["expert_dim"], fields["expert_norms"]) == (3, 16, True)
    assert families.config_json(Config(**fields))["intermediate_size"] == 48
    with pytest.raises(ValueError, match="intermediate_size=48, which must be a multiple of moe_intermediate_size=20"):
        settings(tmp_path, HF | GEMMA4 | mixture | dict(moe_intermediate_size=20))


def test_caps_of_gemma_2_are_on_unless_they_are_null(tmp_path):
    without = {key: value for key, value in RELEASED["gemma2-2b"].items() if "softcapping" not in key}
    fields = settings(tmp_path, without | dict(attn_logit_softcapping=None))
    assert (fields["attention_soft_cap"], fields["logit_soft_cap"]) == (0.0, 30.0)


def test_what_a_file_leaves_out_has_the_default_of_its_family(tmp_path):
    fields = settings(tmp_path, LLAMA)
    assert (fields["num_kv_heads"], fields["head_dim"], fields["rope_theta"]) == (4, 8, 10_000.0)
    assert not fields["tied_embeddings"] and "rope_scaling" not in fields


@pytest.mark.parametrize(
    "values, window, every",
    [
        (dict(), 0, 0),
        (dict(use_sliding_window=True, max_window_layers=0), 8, 0),
        (dict(use_sliding_window=True, max_window_layers=4), 0, 0),
        (dict(use_sliding_window=True, layer_types=["sliding_attention", "full_attention"] * 2), 8, 2),
        (dict(use_sliding_window=True, layer_types=["sliding_attention"] * 3 + ["full_attention"]), 8, 4),
    ],
)
def test_windows_of_qwen(values, window, every, tmp_path):
    fields = settings(tmp_path, QWEN3 | values)
    assert (fields["window"], fields["global_every"]) == (window, every)


REFUSED = [
    ("[1]", "config.json must be a JSON object, and is a list"),
    ("{", "config.json is no JSON: Expecting property name"),
    ("", "config.json is no JSON"),
    (LLAMA | dict(model_type="lama"), "model_type='lama', which this program cannot read; did you mean llama?"),
    (HF, "model_type=None, which this program cannot read"),
    (LLAMA | dict(architectures=["LlamaForSequenceClassification"]), "architectures=.'LlamaForSequenceC"),
    (LLAMA | dict(hidden_act="gelu"), "hidden_act='gelu': this program has only hidden_act='silu'"),
    (LLAMA | dict(hidden_size="32"), "hidden_size='32': it must be a whole number of at least 1"),
    (LLAMA | dict(hidden_size=0), "hidden_size=0: it must be a whole number of at least 1"),
    (LLAMA | dict(num_hidden_layers=True), "num_hidden_layers=True: it must be a whole number"),
    (LLAMA | dict(tie_word_embeddings=1), "tie_word_embeddings=1: it must be true or false"),
    ({key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}, "has no rms_norm_eps: it must be a number"),
    (LLAMA | dict(mlp_bias=True), "mlp_bias=True: this program has only mlp_bias=False"),
    (LLAMA | dict(attention_dropout=0.1), "attention_dropout=0.1: this program has only"),
    (LLAMA | dict(some_new_key=3), "some_new_key=3, which this program does not know"),
    (LLAMA | dict(rope_scaling=dict(rope_type="dynamic", factor=2)), "rope_type='dynamic': this program has default"),
    (LLAMA | dict(rope_scaling=LLAMA3 | dict(low_freq_factor=2.0)), "low_freq_factor=2.0: this program has only"),
    (LLAMA | dict(rope_scaling=LLAMA3 | dict(other=1)), "rope_scaling has other=1, which this program does not know"),
    (LLAMA | dict(rope_scaling=dict(type="linear")), "rope_scaling has no factor"),
    (LLAMA | dict(rope_scaling=[8]), r"rope_scaling=\[8\]: it must be an object"),
    (LLAMA | dict(rope_scaling=YARN | dict(mscale=1, mscale_all_dim=1)), "the second goes with the first, and with la"),
    (LLAMA | dict(rope_scaling=YARN | dict(attention_factor=1.2)), "attention_factor=1.2: this program has only"),
    (QWEN3 | dict(use_sliding_window=True, max_window_layers=2), "a global layer every so many only"),
    (QWEN3 | dict(layer_types=["chunked_attention"] * 4), "layer_types=.'chunked_attention'"),
    (QWEN3 | dict(layer_types=["full_attention"]), "layer_types=.'full_attention'.: there must be"),
    (DEEPSEEK | dict(rms_norm_eps=1e-5), "rms_norm_eps=1e-05: the norms of the latents have 1e-6"),
    (DEEPSEEK | dict(rope_interleave=False), "rope_interleave=False: this program has only rope_interleave=True"),
    (DEEPSEEK | dict(topk_method="greedy"), "topk_method='greedy': this program has only topk_method='noaux_tc'"),
    (DEEPSEEK | dict(model_type="deepseek_v2", norm_topk_prob=False), "n_group=2: this program has only n_group=1"),
    (DEEPSEEK | dict(model_type="deepseek_v2", topk_method="group_limited_greedy"), "group_limited_greedy"),
    (HF | dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2), "rope_scaling has no factor"),
    (HF | dict(model_type="qwen3_moe", mlp_only_layers=[1]), r"mlp_only_layers=\[1\]: this program has dense layers"),
]


@pytest.mark.parametrize("values, message", REFUSED, ids=[message for _, message in REFUSED])
def test_what_this_program_cannot_represent_is_refused_by_name(values, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        settings(tmp_path, values)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_folder_without_config_json_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: it must be a folder of published weights"):
        families.settings(str(tmp_path))


@pytest.mark.parametrize(
    "flag, value", [("logit_soft_cap", 5.0), ("attention_soft_cap", 5.0), ("norm_eps", 0.0), ("mlp_activation", "gelu")]
)
def test_a_model_of_no_family_is_not_exported(flag, value):
    config = Config(num_heads=8, **{flag: value})
    if flag == "norm_eps":  # any family has any epsilon
        assert families.config_json(config)["rms_norm_eps"] == 0
        return
    with pytest.raises(ValueError, match=f"no published family has this model; the nearest is llama has {flag}="):
        families.config_json(config)


def test_model_fields_are_those_of_the_model():
    """A new flag of the model is compared at an export unless families.py says that it is of the training."""
    names = families.model_fields()
    assert {"vocab_size", "qk_norm", "router_scale", "value_head_dim", "rope_theta"} <= {*names}
    assert not {"mesh", "batch", "z_loss", "dtype", "moe_impl", "load_balance_loss", "seq_len"} & {*names}
