"""Tiny models of the published families, as transformers computes them: benchmarks/parity.py compares with them.

FAMILIES has a `config.json` for each family, with the keys that the published models' files have and small sizes. The
values make every feature matter: the window is shorter than the sequences, the contexts before RoPE scaling are short,
and the limit of gpt-oss's SwiGLU is within what the random weights reach. `make` writes a folder for a family:

    config.json            the family's configuration
    model.safetensors      random weights, under the published names, in bfloat16 as most models are published
    outputs.npz            tokens [B, T]; the logits [B, T, V] and the loss of transformers; the noise of each
    gradients/             a folder of the same kind, with the gradient of the loss by each weight in its place

transformers computes in float32, with its eager attention and without dropout. The weights are wide enough that each
attention has strong preferences. Norms are not one, and biases not zero.

**Surprises** of transformers 5.24, by reading and by running it:

- The norms of DeepSeek's latents have an epsilon of 1e-6, whatever `rms_norm_eps` is. The published models have 1e-6.
- It computes mixtures of experts with merged matrices, and saves them under the published names, an expert each.
  gpt-oss is the exception: its matrices are published merged, gate and up in alternate columns.
- The embedding of the padding token gets no gradient from where it is looked up. Its token, Gemma's 0, does not occur
  among those of `make`.
- DeepSeek-V3's selection bias and the scale of Gemma 4's layers are buffers, without a gradient. The files of gradients
  have zeros there.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

BATCH, LENGTH = 4, 32
_COMMON = dict(vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu")
_COMMON |= dict(torch_dtype="bfloat16", initializer_range=0.02, attention_dropout=0.0, bos_token_id=1, eos_token_id=2)
_COMMON |= dict(max_position_embeddings=4096, use_cache=True, tie_word_embeddings=False)
_DENSE = dict(_COMMON, num_hidden_layers=2, intermediate_size=48)
_LLAMA = dict(_DENSE, architectures=["LlamaForCausalLM"], model_type="llama", rms_norm_eps=1e-3, attention_bias=False)
_LLAMA |= dict(mlp_bias=False, pretraining_tp=1)
_LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_QWEN3 = dict(attention_bias=False, head_dim=16, rms_norm_eps=1e-3, rope_theta=1_000_000.0, rope_scaling=None)
_QWEN3 |= dict(sliding_window=None, use_sliding_window=False)
_DEEPSEEK = dict(_COMMON, num_hidden_layers=3, intermediate_size=48, num_key_value_heads=4, rms_norm_eps=1e-6)
_DEEPSEEK |= dict(attention_bias=False, first_k_dense_replace=1, moe_layer_freq=1, kv_lora_rank=24, v_head_dim=12)
_DEEPSEEK |= dict(qk_nope_head_dim=8, qk_rope_head_dim=16, n_routed_experts=8, moe_intermediate_size=8)
_DEEPSEEK |= dict(rope_theta=10_000.0, num_experts_per_tok=3, ep_size=1, pretraining_tp=1)
_YARN = dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, original_max_position_embeddings=1024)
_GEMMA = dict(_COMMON, attention_bias=False, head_dim=16, hidden_activation="gelu_pytorch_tanh", pad_token_id=0)
_GEMMA |= dict(hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, rms_norm_eps=1e-3, num_hidden_layers=4)
_GEMMA |= dict(intermediate_size=32, cache_implementation="hybrid", query_pre_attn_scalar=9, sliding_window=8)
_GEMMA4 = {key: value for key, value in _GEMMA.items() if key not in ("query_pre_attn_scalar", "cache_implementation")}
_GEMMA4 |= dict(architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", final_logit_softcapping=3.0)
_GEMMA4 |= dict(layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=32, attention_k_eq_v=True)
_GEMMA4 |= dict(num_global_key_value_heads=2, num_key_value_heads=4, hidden_size_per_layer_input=0)
_GEMMA4 |= dict(num_kv_shared_layers=0, use_double_wide_mlp=False, use_bidirectional_attention=None, head_dim=8)
_GEMMA4["rope_parameters"] = dict(
    sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0),
)
FAMILIES = {
    "llama2": dict(_LLAMA, rope_scaling=None),
    "llama3.1": dict(_LLAMA, rope_theta=500_000.0, rope_scaling=dict(_LLAMA3, factor=8.0)),
    "llama3.2": dict(
        _LLAMA, rope_theta=500_000.0, rope_scaling=dict(_LLAMA3, factor=32.0), head_dim=16, tie_word_embeddings=True
    ),
    "mistral": dict(
        _DENSE,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        rms_norm_eps=1e-3,
        rope_theta=10_000.0,
        sliding_window=8,
    ),
    "gemma2": dict(
        _GEMMA,
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        rope_theta=10_000.0,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": dict(
        _GEMMA,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000,
        rope_scaling=dict(rope_type="linear", factor=8.0),
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window_pattern=3,
    ),
    "gemma4": dict(_GEMMA4, enable_moe_block=False),
    "gemma4-moe": dict(
        _GEMMA4,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=8,
    ),
    "gemma4-e2b": dict(
        _GEMMA4,
        enable_moe_block=False,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        attention_k_eq_v=False,
        num_key_value_heads=2,
        num_global_key_value_heads=None,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
    ),
    "qwen2.5": dict(
        _DENSE,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        rms_norm_eps=1e-3,
        rope_theta=1_000_000.0,
        sliding_window=8,  # unused, as in the published models
        use_sliding_window=False,
        max_window_layers=2,
    ),
    "qwen3": dict(_DENSE, **_QWEN3, architectures=["Qwen3ForCausalLM"], model_type="qwen3", max_window_layers=2),
    "qwen3-moe": dict(
        _COMMON,
        **_QWEN3,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_hidden_layers=2,
        intermediate_size=96,  # unused, as in the published models
        max_window_layers=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=8,
        norm_topk_prob=True,
        num_experts=8,
        num_experts_per_tok=3,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
    ),
    "mixtral": dict(
        _COMMON,
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_hidden_layers=2,
        intermediate_size=16,
        rms_norm_eps=1e-3,
        rope_theta=1_000_000.0,
        sliding_window=None,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
    ),
    "deepseek-v2-lite": dict(
        _DEEPSEEK,
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        q_lora_rank=None,
        rope_scaling=dict(_YARN, mscale=0.707, mscale_all_dim=0.707),
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        aux_loss_alpha=0.001,
        seq_aux=True,
    ),
    "deepseek-v3": dict(
        _DEEPSEEK,
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        q_lora_rank=16,
        rope_scaling=dict(_YARN, mscale=1.0, mscale_all_dim=1.0),
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,  # the prediction module itself is not in the folder
    ),
    "gpt-oss": dict(
        _COMMON,
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        head_dim=16,
        intermediate_size=8,
        attention_bias=True,
        rms_norm_eps=1e-3,
        rope_theta=150_000.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=512,
            truncate=False,
        ),
        initial_context_length=512,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_per_token=2,
        output_router_logits=False,
        router_aux_loss_coef=0.9,
        swiglu_limit=1.0,
    ),
}


def transformers():
    """Returns (torch, transformers). Raises ValueError where they are not installed."""
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(f'this needs {error.name}: pip install -e ".[parity]"') from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return torch, transformers


def load(folder):
    """Returns the model of a folder, in float32, with eager attention."""
    _, lib = transformers()
    return lib.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()


def evaluate(model, tokens_BT):
    """Runs the model on tokens.

    Returns:
      logits [B, T, V], a float32 array.
      loss, the mean cross entropy of the next tokens.
      gradients, {name of a parameter: its gradient}, in transformers' own layout.
    """
    torch, _ = transformers()
    model.zero_grad()
    tokens_BT = torch.tensor(tokens_BT, dtype=torch.long)
    out = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False)
    out.loss.backward()
    gradients = {name: w.grad.numpy().copy() for name, w in model.named_parameters()}
    return out.logits.detach().numpy(), out.loss.item(), gradients


def draw(model, seed: int) -> None:
    """Draws all weights: matrices of variance 2/fan-in, norms around one, biases and sinks around zero.

    They are rounded to bfloat16. The weight of a norm of Gemma 2 and 3 is what it has above one.
    """
    torch, _ = transformers()
    norm = 0 if model.config.model_type in ("gemma2", "gemma3_text") else 1
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | untrained(model)
    for name, w in tensors.items():
        noise = torch.randn(w.shape, generator=generator)
        if name.endswith(("scale", "scalar")):
            values = 1 + 0.3 * noise
        elif "norm" in name:
            values = norm + 0.3 * noise
        elif "correction_bias" in name:
            values = 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            values = 0.5 * noise
        elif name.endswith("sinks"):
            values = noise
        elif "bias" in name:
            values = 0.3 * noise
        else:
            values = noise * (2 / w.shape[-1]) ** 0.5
        w.data.copy_(values.bfloat16())


def untrained(model) -> dict:
    """The buffers of a model that its file has beside the parameters: they have no gradient."""
    return {name: w for name, w in model.named_buffers() if name.endswith(("correction_bias", "layer_scalar"))}


def moved(model, seed: int) -> None:
    """Moves the weights by half a unit in the last place of float32, on average: every second one to a neighbour."""
    torch, _ = transformers()
    generator = torch.Generator().manual_seed(seed)
    for w in [*model.parameters(), *untrained(model).values()]:
        choice = torch.randint(0, 4, w.shape, generator=generator)
        up, down = (torch.nextafter(w.data, torch.full_like(w, limit)) for limit in (torch.inf, -torch.inf))
        w.data.copy_(torch.where(choice == 0, up, torch.where(choice == 1, down, w.data)))


def save_weights(model, path: Path) -> None:
    """Writes the parameters and persistent buffers of a model to one file, under their published names."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        shutil.copyfile(Path(scratch) / "model.safetensors", path)


def save_gradients(model, path: Path) -> None:
    """Writes the gradients of a model to a file, as `save_weights` would write weights; those of buffers are zero."""
    for w in model.parameters():
        w.data.copy_(w.grad)
    for w in untrained(model).values():
        w.data.zero_()
    save_weights(model, path)


def noise(folder: Path, tokens_BT, tries: int = 16) -> dict[str, float]:
    """How much logits, loss and gradients move with the weights (see `moved`), at most.

    Each time the loss is summed in another order. A gradient's distance is relative to the largest element of the
    gradient by the same parameter.
    """
    torch, _ = transformers()
    logits, loss, gradients = evaluate(load(folder), tokens_BT)
    next_tokens = torch.tensor(tokens_BT[:, 1:].reshape(-1), dtype=torch.long)
    most = {"logits": 0.0, "loss": 0.0, "gradients": 0.0}
    for seed in range(tries):
        model = load(folder)
        moved(model, seed)
        other_logits, _, other_gradients = evaluate(model, tokens_BT)
        flat = torch.tensor(other_logits[:, :-1].reshape(-1, other_logits.shape[-1]))
        losses = torch.nn.functional.cross_entropy(flat, next_tokens, reduction="none").numpy()
        in_order = np.random.default_rng(seed).permutation(losses)
        other_loss = np.add.accumulate(in_order)[-1] / np.float32(losses.size)
        relative = lambda a, b: np.max(np.abs(a - b)) / np.max(np.abs(b))
        distances = [float(relative(other_gradients[name], gradient)) for name, gradient in gradients.items()]
        tried = dict(
            logits=float(np.max(np.abs(other_logits - logits))), loss=float(abs(other_loss - np.float32(loss)))
        )
        tried |= dict(gradients=max(distances))
        most = {name: max(value, tried[name]) for name, value in most.items()}
    return most


def make(family: str, folder: Path, seed: int = 0) -> None:
    """Writes the folder of a family: its configuration, weights, outputs and gradients, as the head says."""
    torch, lib = transformers()
    (folder / "gradients").mkdir(parents=True, exist_ok=True)
    for directory in (folder, folder / "gradients"):
        (directory / "config.json").write_text(json.dumps(FAMILIES[family], indent=2, sort_keys=True) + "\n")
    config = lib.AutoConfig.from_pretrained(folder)
    model = lib.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw(model, seed)
    for w in [*model.parameters(), *(w for name, w in untrained(model).items() if name.endswith("layer_scalar"))]:
        w.data = w.data.bfloat16()
    save_weights(model, folder / "model.safetensors")

    model = load(folder)
    first = 0 if config.pad_token_id is None else config.pad_token_id + 1
    tokens_BT = np.random.default_rng(seed).integers(first, config.vocab_size, (BATCH, LENGTH), np.int32)
    logits, loss, _ = evaluate(model, tokens_BT)
    save_gradients(model, folder / "gradients" / "model.safetensors")
    most = {f"noise of {name}": np.float32(value) for name, value in noise(folder, tokens_BT).items()}
    np.savez(folder / "outputs.npz", tokens=tokens_BT, logits=logits, loss=np.float32(loss), **most)
