"""The arithmetic of a transformer: against the model's own parameters, against what JAX and XLA count in programs that
compute it, against the published sizes of models, and against the scaling book's worked answers."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name as named
from support import equations, matmul_flops

import anatomy
import config as config_lib
import parameters
import reference
import train
from config import ACTIVATIONS, REMAT_POLICIES, Config
from data import Batch
from flags import PRESETS, from_preset
from predicted import transformer

# The outputs of the big matmuls, and the layer's input, from which all else is recomputed.
MATMUL_OUTPUTS = frozenset(
    "decoder_layer_input query_latent kv_latent query_proj key_proj value_proj out_proj mlp_gate mlp_up mlp_down "
    "router_logits expert_gate expert_up expert_down shared_gate shared_up shared_down ple_gate ple_out".split()
)
SMALL = Config(
    batch=2, seq_len=16, num_layers=2, model_dim=32, ff_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64
)
LATENT_EXPERTS = dataclasses.replace(
    SMALL,
    num_layers=3,
    num_kv_heads=4,
    num_experts=6,
    experts_per_token=2,
    expert_dim=20,
    num_shared_experts=2,
    num_dense_layers=1,
    kv_lora_rank=12,
    q_lora_rank=10,
    rope_head_dim=6,
    value_head_dim=10,
)


# -- against the model


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_those_of_the_model(preset):
    """Names, shapes, totals, and which of them are matrices."""
    config = from_preset(preset)
    shapes, matrices = {}, {"embed"}
    is_matrix = jax.tree.leaves_with_path(parameters.is_matrix(config))
    for (path, leaf), (_, multiplies) in zip(
        jax.tree.leaves_with_path(parameters.param_shapes(config)), is_matrix, strict=True
    ):
        *stack, name = (key.name for key in path)
        name = f"{stack[0]}.{name}" if stack and stack != ["layers"] and anatomy.two_kinds(config) else name
        matrices |= {name} if multiplies else set()
        before = shapes.get(name, (0,))[0] if stack else 0  # layers of the other stack
        shapes[name] = (before + leaf.shape[0], *leaf.shape[1:])
    weights = transformer.weights(config)
    assert {name: weight.shape for name, weight in weights.items()} == shapes
    assert transformer.num_params(config) == sum(map(math.prod, shapes.values()))
    assert transformer.active_params(config) == transformer.num_params(config) or config.num_experts
    assert {name for name, w in weights.items() if w.makes} == matrices - {"embed", "ple_embed"}


def test_training_flops_by_hand():
    """2 layers, D=3, F=5, N=4, K=2, H=2, V=7, T=6: each matmul of a token forward, and twice that backward."""
    q, k, v, o = 2 * 3 * (4 * 2), 2 * 3 * (2 * 2), 2 * 3 * (2 * 2), 2 * (4 * 2) * 3
    gate, up, down = 2 * 3 * 5, 2 * 3 * 5, 2 * 5 * 3
    keys = 6 / 2  # on average, under the causal mask
    scores, mix = 2 * 4 * 2 * keys, 2 * 4 * 2 * keys
    unembed = 2 * 3 * 7
    forward = 2 * (q + k + v + o + gate + up + down + scores + mix) + unembed
    shape = dict(num_layers=2, model_dim=3, ff_dim=5, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=7, seq_len=6)
    assert transformer.train_flops_per_token(Config(**shape)) == 3 * forward


@pytest.mark.parametrize("preset", PRESETS)
def test_six_flops_a_matmul_parameter_and_a_dim_of_keys_and_values(preset):
    shared = dict(num_kv_shared_layers=0, double_wide_mlp=False)  # they would need global layers
    config = from_preset(preset, window=0, global_every=0, **shared)
    shapes, is_matrix = parameters.param_shapes(config), parameters.is_matrix(config)
    pairs = zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(is_matrix), strict=True)
    share = lambda path: (config.experts_per_token, config.num_experts) if "expert_" in str(path[-1]) else (1, 1)
    active = lambda path, leaf: math.prod(leaf.shape) // share(path)[1] * share(path)[0]
    in_matmuls = sum(active(path, leaf) for (path, leaf), matrix in pairs if matrix)
    in_matmuls -= 0 if config.tied_embeddings else math.prod(shapes.embed.shape)  # looked up, not multiplied
    in_matmuls -= math.prod(shapes.ple_embed.shape) if config.ple_dim else 0
    dims = anatomy.key_dim(config) + anatomy.value_dim(config)
    attention = 6 * config.num_layers * config.num_heads * dims * config.seq_len / 2
    assert transformer.train_flops_per_token(config) == 6 * in_matmuls + attention


@pytest.mark.parametrize("seq_len, window", [(8, 0), (8, 1), (8, 3), (8, 8), (8, 100), (100, 7), (1000, 999)])
def test_keys_per_query(seq_len, window):
    """The mask's cells, with those on its diagonal counted at half: (T+1)/2 becomes the published figures' T/2."""
    full_diagonal = [min(i + 1, window or seq_len) for i in range(seq_len)]
    half_diagonal = [min(i + 0.5, window or seq_len) for i in range(seq_len)]
    keys = transformer.mean_keys(seq_len, window)
    assert keys == pytest.approx(sum(half_diagonal) / seq_len, rel=1e-12)
    assert 0 < sum(full_diagonal) / seq_len - keys <= 0.5


def test_a_window_counts_in_the_local_layers_only():
    """With global_every=3, layers 3, 6 and 9 of 10 attend to everything."""
    tiny = lambda **window: transformer.train_flops_per_token(Config(num_layers=10, seq_len=64, **window))
    a_key = 12 * 8 * 24  # N = 8, H = 24
    everywhere, local = 32, 16 - 16 * 16 / (2 * 64)
    without_attention = tiny() - 10 * a_key * everywhere
    assert tiny(window=16) == without_attention + 10 * a_key * local
    assert tiny(window=16, global_every=3) == without_attention + a_key * (3 * everywhere + 7 * local)
    assert tiny(window=16, global_every=1) == tiny()
    assert tiny(window=16, global_every=11) == tiny(window=16)
    assert tiny(window=64) == tiny(window=1000) == tiny()


def test_two_kinds_of_layers_by_hand():
    """4 local layers with 2 key/value heads of 2, 2 global ones with a head of 6 for both. D=3, F=5, N=4."""
    config = Config(
        **dict(num_layers=6, model_dim=3, ff_dim=5, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=7, seq_len=8),
        **dict(window=2, global_every=3, global_head_dim=6, global_kv_heads=1, keys_as_values=True),
    )
    local, everywhere, mlp = 3 * 8 + 2 * 3 * 4 + 8 * 3, 3 * 24 + 3 * 6 + 24 * 3, 3 * 3 * 5
    attention = 4 * local + 2 * everywhere
    assert transformer.num_params(config) == attention + 6 * (mlp + 2 * 3) + 3 + 2 * 7 * 3
    local_keys, global_keys = 2 - 2 * 2 / 16, 8 / 2
    scores = 4 * 2 * 4 * 2 * local_keys + 2 * 2 * 4 * 6 * global_keys
    forward = {"attention": 2 * attention, "mlp": 2 * 6 * mlp, "unembedding": 2 * 21, "scores": scores, "mix": scores}
    assert transformer.forward_flops_per_token(config) == forward
    assert transformer.train_flops_per_token(config) == 3 * sum(forward.values())
    assert transformer.kv_cache_bytes(config, 8) == 2 * (4 * 2 * 2 * 2 * 2 + 2 * 8 * 2 * 1 * 6)
    assert transformer.kv_cache_bytes_per_token(config) == 2 * (4 * 2 * 2 * 2 + 2 * 2 * 1 * 6)
    kinds = anatomy.kinds(config)
    a_layer = [transformer.saved_bytes_per_layer(kind, {"key_proj", "context"}) for kind in kinds]
    assert a_layer == [4 * (2 * 2 + 4 * 2), 4 * (1 * 6 + 4 * 6)]
    saved = transformer.saved_bytes_per_token(config, {"key_proj", "context"})
    assert saved == 4 * a_layer[0] + 2 * a_layer[1]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(seq_len=3000),
        dict(window=700),
        dict(window=1000, global_every=3, num_layers=12, num_kv_shared_layers=0),
    ],
)
@pytest.mark.parametrize("preset", PRESETS)
def test_training_takes_three_times_the_forward(preset, overrides):
    config = from_preset(preset, **overrides)
    forward = sum(transformer.forward_flops_per_token(config).values())
    assert transformer.train_flops_per_token(config) == pytest.approx(3 * forward, rel=1e-12)


@pytest.mark.parametrize(
    ("preset", "seq_len", "flops"),
    [("llama3.1-70b", 8192, 449_222_541_312), ("qwen3-235b-a22b", 4096, 148_330_512_384)],
)
def test_training_flops_as_published(preset, seq_len, flops):
    """MaxText's count, behind the TFLOP/s of the published TPU7x recipes (AI-Hypercomputer/tpu-recipes,
    training/ironwood). The TFLOP/s over tokens/s that the recipes print agree within 1e-5.
    """
    assert transformer.train_flops_per_token(from_preset(preset, seq_len=seq_len)) == flops


# -- against published sizes


# {preset: (parameters, what is published in billions, and its decimals)}
SIZES = {
    # Without another source: the tensors of the release, as its page on Hugging Face counts them.
    "llama2-70b": (68_976_648_192, 69.0, 1),
    "llama3.1-8b": (8_030_261_248, 8.03, 2),
    "llama3.1-70b": (70_553_706_496, 70.6, 1),
    "llama3.1-405b": (405_853_388_800, 406, 0),
    "llama3.2-1b": (1_235_814_400, 1.24, 2),
    "mistral-7b": (7_241_732_096, 7.24, 2),
    "qwen2.5-7b": (7_615_616_512, 7.62, 2),
    "qwen3-0.6b": (596_049_920, 0.6, 1),  # model card
    "qwen3-8b": (8_190_735_360, 8.2, 1),  # model card
    # Reports of Gemma 2 and 3, table 1: without the embedding 2,024M and 8,324M; 698M, 3,209M and 10,759M.
    "gemma2-2b": (2_614_341_888, 2.024 + 256_000 * 2304e-9, 3),
    "gemma2-9b": (9_241_705_984, 8.324 + 256_000 * 3584e-9, 3),
    "gemma3-1b": (999_885_952, 0.698 + 262_144 * 1152e-9, 3),
    "gemma3-4b": (3_880_263_168, 3.209 + 262_208 * 2560e-9, 3),
    "gemma3-12b": (11_766_034_176, 10.759 + 262_208 * 3840e-9, 3),
    "gemma4-31b": (30_697_345_340, 30.7, 1),  # model cards
    # 5.1B and 8B with the towers for images and sound, which are not counted here.
    "gemma4-e2b": (4_628_569_379, 5.1 - 0.47, 1),
    "gemma4-e4b": (7_463_013_418, 8 - 0.54, 1),
    "gemma4-26b-a4b": (25_233_141_790, 25.2, 1),
    # Mixtral of Experts, arXiv:2401.04088: 47B; the release has 46.7B.
    "mixtral-8x7b": (46_702_792_704, 46.7, 1),
    # Qwen3 Technical Report, arXiv:2505.09388, and the model cards: 30.5B, 235B.
    "qwen3-30b-a3b": (30_532_122_624, 30.5, 1),
    "qwen3-235b-a22b": (235_093_634_560, 235, 0),
    "deepseek-v2-lite": (15_706_484_224, 15.7, 1),  # DeepSeek-V2, arXiv:2405.04434, appendix B
    # DeepSeek-V3, arXiv:2412.19437: 671B, without the multi-token prediction module, and with the selection bias,
    # 256 numbers for each of 58 layers.
    "deepseek-v3": (671_026_419_200, 671, 0),
    # gpt-oss model card, arXiv:2508.10925, table 1: 20.91B and 116.83B.
    "gpt-oss-20b": (20_914_757_184, 20.91, 2),
    "gpt-oss-120b": (116_829_156_672, 116.83, 2),
}


@pytest.mark.parametrize("preset", [name for name in PRESETS if "tiny" not in name])
def test_models_have_the_published_size(preset):
    total, in_billions, decimals = SIZES[preset]
    params = transformer.num_params(from_preset(preset))
    assert params == total and round(params / 1e9, decimals) == round(in_billions, decimals)


@pytest.mark.parametrize(
    ("preset", "in_billions", "decimals", "embedding"),
    [
        ("mixtral-8x7b", 12.9, 1, True),  # https://mistral.ai/news/mixtral-of-experts: 12.9B
        ("qwen3-30b-a3b", 3.35, 2, True),  # model card: 3.3B, truncated, not rounded, from 3.353
        ("qwen3-235b-a22b", 22, 0, True),
        ("deepseek-v3", 37, 0, False),  # with the embedding it would be 37.55, which is not 37 rounded
        ("gemma4-26b-a4b", 3.8, 1, True),  # model card: 3.8B of 25.2B
        ("gpt-oss-120b", 5.13, 2, False),  # model card, table 1: unembedding counted, embedding not
    ],
)
def test_mixtures_have_the_published_active_size(preset, in_billions, decimals, embedding):
    params = transformer.active_params(from_preset(preset), embedding=embedding)
    assert round(params / 1e9, decimals) == in_billions


def test_gpt_oss_by_part():
    """Table 1 of the model card: MLP 114.71B with its biases, attention 0.96B, embedding and unembedding 1.16B."""
    weights = transformer.weights(from_preset("gpt-oss-120b"))
    count = lambda *words: sum(w.params for name, w in weights.items() if any(word in name for word in words))
    assert round(count("expert", "router") / 1e9, 2) == 114.71
    assert round(count("w_q", "w_k", "w_v", "w_o", "bias_q", "bias_k", "bias_v", "bias_o", "sinks") / 1e9, 2) == 0.96
    assert round(count("embed") / 1e9, 2) == 1.16


# -- by hand, for small shapes


def test_experts_by_hand():
    """2 layers, the first dense; D=3, F=5, N=4, K=2, H=2, V=7, T=6; 4 experts of 3, 2 a token, 1 shared; all biases."""
    config = Config(
        **dict(num_layers=2, model_dim=3, ff_dim=5, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=7, seq_len=6),
        **dict(num_experts=4, experts_per_token=2, expert_dim=3, num_shared_experts=1, num_dense_layers=1),
        **dict(expert_bias=True, attention_sinks=True, output_bias=True, qkv_bias=True),
    )
    attention = 3 * 8 + 3 * 4 + 3 * 4 + 8 * 3
    attention_biases = 8 + 4 + 4 + 3 + 4  # q, k, v, o, sinks
    mlp, expert, router = 3 * (3 * 5), 3 * (3 * 3), 3 * 4
    expert_biases, router_bias = 3 + 3 + 3, 4
    norms = 2 * (3 + 3) + 3
    total = 2 * (attention + attention_biases) + mlp + 5 * expert + router + 4 * expert_biases + router_bias + norms
    active = 2 * (attention + attention_biases) + mlp + 3 * expert + router + 2 * expert_biases + router_bias + norms
    assert transformer.num_params(config) == total + 2 * 7 * 3
    assert transformer.active_params(config) == active + 2 * 7 * 3
    assert transformer.active_params(config, embedding=False) == active + 7 * 3
    forward = {"attention": 4 * attention, "mlp": 2 * mlp, "experts": 4 * expert, "router": 2 * router}
    forward |= {"shared experts": 2 * expert, "unembedding": 2 * 21, "scores": 2 * 2 * 8 * 3, "mix": 2 * 2 * 8 * 3}
    assert transformer.forward_flops_per_token(config) == forward
    assert transformer.train_flops_per_token(config) == 3 * sum(forward.values())


def test_latent_attention_by_hand():
    """DeepSeek-V3, section 4.2 of its report: 128 heads of 128, with 64 rotary dims; latents of 512 and 1536."""
    config = from_preset("deepseek-v3")
    queries = 7168 * 1536 + 1536 * 128 * (128 + 64)
    keys_values = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    assert transformer.parts(config)["attention"].params == 61 * (queries + keys_values + 128 * 128 * 7168)
    forward = transformer.forward_flops_per_token(config)
    assert forward["scores"] == 61 * 2 * 128 * 192 * 2048 and forward["mix"] == 61 * 2 * 128 * 128 * 2048
    assert transformer.kv_elements_per_layer(config) == 576
    direct = transformer.parts(dataclasses.replace(config, q_lora_rank=0))["attention"].params
    assert direct == 61 * (7168 * 128 * 192 + keys_values + 128 * 128 * 7168)


# -- against what JAX and XLA count


def matmul_flops_per_token(f, *args) -> float:
    """FLOPs of all matmuls in the jaxpr of f, over the tokens of the batch, which is the last argument."""
    return matmul_flops(jax.make_jaxpr(f)(*args).jaxpr) / math.prod(args[-1].tokens.shape)


def batch_shapes(config: Config) -> Batch:
    shape = (config.batch, config.seq_len)
    dtype = lambda name: jnp.float32 if name == "loss_weights" else jnp.int32
    return Batch(**{name: jax.ShapeDtypeStruct(shape, dtype(name)) for name in Batch._fields})


def masked_half(config: Config) -> float:
    """Forward FLOPs a token of the scores and mix that the mask removes; a plain implementation computes them, too."""
    forward = transformer.forward_flops_per_token(config)
    return forward["scores"] + forward["mix"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [{}, dict(num_kv_heads=4, seq_len=24), dict(tied_embeddings=True, qkv_bias=True), dict(mtp=True)]
)
def test_the_matmuls_of_the_reference_are_counted_exactly(overrides):
    config = dataclasses.replace(SMALL, **overrides)
    params, batch = parameters.param_shapes(config), batch_shapes(config)
    loss = partial(reference.loss, config=config)
    forward, full_square = transformer.forward_flops_per_token(config), masked_half(config)
    assert matmul_flops_per_token(loss, params, batch) == sum(forward.values()) + full_square
    train_flops = transformer.train_flops_per_token(config) + 3 * full_square
    assert matmul_flops_per_token(jax.grad(loss), params, batch) == train_flops


def test_xla_counts_the_same_and_some_elementwise_work():
    """XLA's cost analysis includes elementwise work: a few FLOPs a number, less than 5% at these widths."""
    shape = dict(
        num_layers=1, model_dim=128, ff_dim=512, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=256, seq_len=64
    )
    config = dataclasses.replace(SMALL, **shape)
    loss = partial(reference.loss, config=config)
    compiled = jax.jit(jax.grad(loss)).lower(parameters.param_shapes(config), batch_shapes(config)).compile()
    counted = compiled.cost_analysis()["flops"] / (config.batch * config.seq_len)
    formula = transformer.train_flops_per_token(config) + 3 * masked_half(config)
    assert formula < counted < 1.05 * formula


def plain_layer(x, w, batch, config: Config):
    """A dense layer of `reference`'s functions, with its activations named."""
    x = named(x, "decoder_layer_input")
    h = named(reference.norm(x, w.norm_attention, config.norm_eps), "norm_attention")
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, m) for m in (w.w_q, w.w_k, w.w_v))
    q, k = reference.rotate(q, batch.positions, config), reference.rotate(k, batch.positions, config)
    q, k, v = named(q, "query_proj"), named(k, "key_proj"), named(v, "value_proj")
    out = named(reference.attend(q, k, v, batch.segments, 0, config), "context")
    x = named(x + named(jnp.einsum("btnh,nhd->btd", out, w.w_o), "out_proj"), "mlp_input")
    h = named(reference.norm(x, w.norm_mlp, config.norm_eps), "norm_mlp")
    gate, up = named(h @ w.w_gate, "mlp_gate"), named(h @ w.w_up, "mlp_up")
    return x + named(named(jax.nn.silu(gate) * up, "mlp_product") @ w.w_down, "mlp_down")


def plain_loss(params, batch, config: Config, layer):
    x = params.embed[batch.tokens]
    for i in range(config.num_layers):
        x = layer(x, jax.tree.map(lambda a, i=i: a[i], params.layers), batch)
    return jnp.sum((x * params.norm @ params.unembed.T) ** 2)


def latent_experts_layer(x, w, batch, config: Config):
    """A layer of DeepSeek-V3, or of a mixture without latent attention, written plainly: no rotary embedding, no mask.

    It gathers the weights of a token's experts for each token.
    """
    norm = lambda x: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + config.norm_eps)
    x = named(x, "decoder_layer_input")
    h = named(norm(x) * w["norm_attention"], "norm_attention")
    if config.q_lora_rank:
        latent = named(h @ w["w_q_down"], "query_latent")
        latent = named(norm(latent) * w["norm_q_latent"], "query_latent_norm")
        q = jnp.einsum("btq,qnh->btnh", latent, w["w_q_up"])
    else:
        q = jnp.einsum("btd,dnh->btnh", h, w["w_q"])
    if "w_kv_down" in w:
        latent, shared_key = named(h @ w["w_kv_down"], "kv_latent"), h @ w["w_k_rope"]
        latent = named(norm(latent) * w["norm_kv_latent"], "kv_latent_norm")
        k, v = (jnp.einsum("btc,cnh->btnh", latent, w[n]) for n in ("w_k_up", "w_v_up"))
        shared_key = jnp.broadcast_to(shared_key[:, :, None], (*q.shape[:3], config.rope_head_dim))
        k = jnp.concatenate([k, shared_key], -1)
    else:
        each = [jnp.einsum("btd,dkh->btkh", h, w[n]) for n in ("w_k", "w_v") if n in w]
        k, v = (jnp.repeat(x, config.num_heads // config.num_kv_heads, 2) for x in (each[0], each[-1]))
    q, k, v = named(q, "query_proj"), named(k, "key_proj"), named(v, "value_proj")
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), -1), v)
    projection = jnp.einsum("btnh,nhd->btd", named(out, "context"), w["w_o"])
    x = named(x + named(projection, "out_proj"), "mlp_input")
    h = named(norm(x) * w["norm_mlp"], "norm_mlp")

    def swiglu(prefix, gate, up, down):
        gate, up = named(h @ gate, f"{prefix}gate"), named(h @ up, f"{prefix}up")
        return named(named(jax.nn.silu(gate) * up, f"{prefix}product") @ down, f"{prefix}down")

    if "w_gate" in w:
        return x + swiglu("mlp_", w["w_gate"], w["w_up"], w["w_down"])
    logits = named(h @ w["w_router"], "router_logits")
    probability, expert = jax.lax.top_k(jax.nn.sigmoid(logits), config.experts_per_token)
    by_expert = lambda stacked: stacked.reshape(config.num_experts, config.model_dim, -1)
    gate, up, down = (by_expert(w[kind])[expert] for kind in ("expert_gate", "expert_up", "expert_down"))
    sent = named(jnp.repeat(h[:, :, None], config.experts_per_token, 2), "expert_input")
    gate, up = jnp.einsum("btxd,btxdm->btxm", sent, gate), jnp.einsum("btxd,btxdm->btxm", sent, up)
    product = named(jax.nn.silu(named(gate, "expert_gate")) * named(up, "expert_up"), "expert_product")
    out = named(jnp.einsum("btxm,btxdm->btxd", product * probability[..., None], down), "expert_down")
    x = x + jnp.sum(out, 2)
    return x + swiglu("shared_", w["shared_gate"], w["shared_up"], w["shared_down"]) if "shared_gate" in w else x


def layer_of(params, i: int, config: Config):
    """The weights of layer i, from stacks over all layers, over the leading dense ones and over those with experts."""
    firsts = {"router": config.num_dense_layers, "experts": config.num_dense_layers}
    firsts["shared experts"] = config.num_dense_layers
    layer = {}
    for kind, weight in transformer.weights(config).items():
        row = i - firsts.get(weight.part, 0)
        if kind not in ("embed", "norm", "unembed") and 0 <= row < weight.shape[0]:
            layer[kind] = params[kind][row]
    return layer


def latent_experts_loss(params, batch, config: Config, layer):
    x = params["embed"][batch.tokens]
    for i in range(config.num_layers):
        x = layer(x, layer_of(params, i, config), batch)
    return jnp.sum((x * params["norm"] @ params.get("unembed", params["embed"]).T) ** 2)


def model_of(config: Config):
    """Returns (layer, loss(parameters, batch, layer), parameters) of the plain model that the config describes."""
    if not config.num_experts:
        return partial(plain_layer, config=config), partial(plain_loss, config=config), parameters.param_shapes(config)
    shapes = {n: jax.ShapeDtypeStruct(w.shape, jnp.float32) for n, w in transformer.weights(config).items()}
    return partial(latent_experts_layer, config=config), partial(latent_experts_loss, config=config), shapes


MODELS = {
    "dense": SMALL,
    "latent attention and experts": LATENT_EXPERTS,
    "queries without a latent": dataclasses.replace(LATENT_EXPERTS, q_lora_rank=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_matmuls_of_a_plain_model_are_counted_exactly(config):
    layer, loss, params = model_of(config)
    loss = partial(loss, layer=layer)
    forward, full_square = transformer.forward_flops_per_token(config), masked_half(config)
    assert matmul_flops_per_token(loss, params, batch_shapes(config)) == sum(forward.values()) + full_square
    trained = matmul_flops_per_token(jax.grad(loss), params, batch_shapes(config))
    assert trained == transformer.train_flops_per_token(config) + 3 * full_square


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_the_matmuls_of_every_preset_are_counted_exactly(preset):
    """Forward and training FLOPs are exact at the real widths, on few tokens and layers, traced and not run."""
    layers = min(from_preset(preset).num_layers, 6)  # DeepSeek's first three are dense
    shared = dict(num_kv_shared_layers=0, double_wide_mlp=False)  # they would need global layers
    config = from_preset(preset, batch=1, seq_len=16, window=0, global_every=0, num_layers=layers, **shared)
    if config.num_experts:
        layer, loss, params = model_of(config)
        loss = partial(loss, layer=layer)
    else:
        loss, params = partial(reference.loss, config=config), parameters.param_shapes(config)
    forward, full_square = transformer.forward_flops_per_token(config), masked_half(config)
    assert matmul_flops_per_token(loss, params, batch_shapes(config)) == sum(forward.values()) + full_square
    trained = matmul_flops_per_token(jax.grad(loss), params, batch_shapes(config))
    assert trained == transformer.train_flops_per_token(config) + 3 * full_square


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved",
    [
        "decoder_layer_input",
        " ".join(sorted(MATMUL_OUTPUTS)),
        "decoder_layer_input context log_sum_exp query_proj",
        "decoder_layer_input mlp_input norm_mlp mlp_gate kv_latent key_proj expert_gate shared_up",
        "decoder_layer_input query_latent key_proj value_proj router_logits expert_up expert_down",
    ],
)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_recomputation_is_counted_exactly(config, saved):
    """For any set of names, the formula equals what jax.checkpoint repeats, counted in the gradient's jaxpr."""
    saved = set(saved.split())
    layer, loss, params = model_of(config)
    flops = lambda layer: matmul_flops_per_token(jax.grad(partial(loss, layer=layer)), params, batch_shapes(config))
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    # Plain attention needs its scores again even if its result is saved, like a kernel that saves their log-sum-exp.
    kernel_scores = {"context", "log_sum_exp"} <= saved
    again = transformer.recomputed_flops_per_token(config, saved, kernel_scores=kernel_scores)
    full_square = again.get("scores", 0) + again.get("mix", 0)
    repeated = flops(jax.checkpoint(layer, policy=policy)) - flops(layer)
    assert repeated == sum(again.values()) + full_square


def test_attention_is_recomputed_unless_all_its_residuals_are_saved():
    forward = transformer.forward_flops_per_token(SMALL)
    again = partial(transformer.recomputed_flops_per_token, SMALL)
    everything = anatomy.saved_names(SMALL)
    assert again(everything) == {}
    assert again(everything - {"context"}) == {kind: forward[kind] for kind in ("scores", "mix")}
    assert again(everything - {"log_sum_exp", "scores"}) == {kind: forward[kind] for kind in ("scores", "mix")}
    assert again(everything, kernel_scores=True) == {"scores": forward["scores"]}
    assert again(everything - {"context"}, kernel_scores=True)["scores"] == 2 * forward["scores"]


def test_full_recomputation_leaves_out_the_matmul_that_ends_a_layer():
    """Nor is the experts' last matmul repeated: the router's weights multiply its operand."""
    config = dataclasses.replace(LATENT_EXPERTS, remat="full")
    again, forward = transformer.recomputed_flops_per_token(config), transformer.forward_flops_per_token(config)
    assert again["attention"] == forward["attention"]
    for part in ("mlp", "experts", "shared experts"):
        assert 3 * again[part] == 2 * forward[part]
    assert "unembedding" not in again


# -- activations


def test_saved_bytes_of_a_layer_by_hand():
    """D=32, N=4, K=2, H=8, F=48, in float32: each tensor that the backward pass reads."""
    read = 32 + 32 + 32 + 16 + 16 + 4 + 32 + 32 + 32 + 3 * 48  # x, norm, q, k, v, lse, context, x, norm, MLP
    assert transformer.saved_bytes_per_layer(SMALL) == 4 * read
    assert transformer.saved_bytes_per_token(SMALL) == 2 * 4 * read
    half = dataclasses.replace(SMALL, dtype="bfloat16")
    assert transformer.saved_bytes_per_layer(half) == 2 * read + 2 * 4  # the log-sum-exp stays float32
    assert transformer.saved_bytes_per_layer(half, fused=False) == 2 * (read - 4) + 4 * 4 * 16
    assert transformer.saved_bytes_per_token(dataclasses.replace(half, remat="full")) == 2 * 2 * 32
    assert transformer.saved_bytes_per_layer(half, ["mlp_gate", "mlp_up"]) == 2 * 2 * 48


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_activations_have_the_sizes_of_a_plain_layers_tensors(config):
    """Every name in the table, except those that only a kernel makes, or the order of rows (tests/test_remat.py)."""
    layer, _, params = model_of(config)
    for i in range(config.num_layers):
        slice_of = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        w = (
            jax.tree.map(slice_of, params.layers)
            if config is SMALL
            else layer_of({kind: [slice_of(a)] * a.shape[0] for kind, a in params.items()}, i, config)
        )
        x = jax.ShapeDtypeStruct((config.batch, config.seq_len, config.model_dim), jnp.float32)
        made = {}
        for eqn in equations(jax.make_jaxpr(layer)(x, w, batch_shapes(config)).jaxpr):
            if eqn.primitive.name == "name":
                made[eqn.params["name"]] = math.prod(eqn.outvars[0].aval.shape) / (config.batch * config.seq_len)
        table = anatomy.activations(config, experts=i >= config.num_layers - anatomy.num_expert_layers(config))
        assert made == {kind: size for kind, size in table.items() if kind not in ("log_sum_exp", "routing")}


def test_remat_policies_are_maxtexts():
    """The names that each policy saves are those in MaxText's decoders.py, and the kernel's log-sum-exp."""
    qkv, dots = "query_proj key_proj value_proj", "query_proj key_proj value_proj out_proj"
    mlp, kernel = "mlp_gate mlp_up mlp_down", "context log_sum_exp"
    for remat, names in {
        "full": "",
        "save_out_proj": "out_proj",
        "save_qkv_proj": qkv,
        "save_dot_except_mlp": dots,
        "save_dot_with_context_except_mlp": f"{dots} {kernel}",
        "minimal": f"{dots} {mlp}",
        "minimal_with_context": f"{dots} {mlp} {kernel}",
        "qkv_proj_offloaded": qkv,
        "minimal_offloaded": f"{dots} {mlp}",
    }.items():
        config = dataclasses.replace(SMALL, remat=remat)
        saved = anatomy.saved_names(config) & anatomy.activations(SMALL).keys()
        assert saved == {"decoder_layer_input", *names.split()}, remat
        offloaded = anatomy.offloaded_names(config) & anatomy.activations(SMALL).keys()
        assert offloaded == ({*names.split()} if remat.endswith("_offloaded") else set()), remat
    policies = [remat for remat in REMAT_POLICIES if remat not in ("none", "custom")]
    assert list(anatomy.POLICIES) == policies
    assert anatomy.offloaded_names(SMALL) == set() and SMALL.remat == "none"
    custom = "context:offload,mlp_up:device,mlp_gate:remat,decoder_layer_input:offload"
    custom = dataclasses.replace(SMALL, remat="custom", remat_tensors=custom)
    assert anatomy.saved_names(custom) == {"context", "log_sum_exp", "mlp_up", "decoder_layer_input"}
    assert anatomy.offloaded_names(custom) == {"context", "log_sum_exp", "decoder_layer_input"}
    custom = dataclasses.replace(
        SMALL, remat="custom", remat_tensors="qkv_proj:device,context:device,log_sum_exp:remat"
    )
    assert anatomy.saved_names(custom) == {"decoder_layer_input", "context", *qkv.split()}


def test_a_flag_can_name_every_activation():
    dense = dataclasses.replace(SMALL, qk_norm=True, value_norm=True, post_norms=True, ple_dim=4)
    tables = [
        anatomy.activations(config, experts=experts, fused=fused)
        for config in (dense, dataclasses.replace(LATENT_EXPERTS, post_norms=True, expert_norms=True))
        for experts in (False, True)[: 1 + (config.num_experts > 0)]
        for fused in (False, True)
    ]
    assert set().union(*tables) == {*ACTIVATIONS}
    for table in tables:
        assert [name for name in ACTIVATIONS if name in table] == list(table)


def test_norms_of_results_read_them():
    """The gradient of a norm reads its operand; the shared experts' result is read only to repeat a sum that has it."""
    normed = dataclasses.replace(LATENT_EXPERTS, post_norms=True)
    results = {"out_proj", "mlp_input", "mlp_down", "shared_down", "mixture_out"}
    assert anatomy.read_names(results, LATENT_EXPERTS) == {"mlp_input", "mixture_out"}
    assert anatomy.read_names(results, normed) == results - {"shared_down"}
    assert anatomy.read_names(results - {"mixture_out"}, normed) == results - {"mixture_out"}
    of_experts = dataclasses.replace(LATENT_EXPERTS, expert_norms=True)
    assert anatomy.read_names(results, of_experts) == {"mlp_input", "mixture_out", "shared_down"}
    again = lambda config: transformer.recomputed_flops_per_token(dataclasses.replace(config, remat="full"))
    repeated = {part: flops - again(LATENT_EXPERTS).get(part, 0) for part, flops in again(normed).items()}
    result_of = lambda name: 2 * transformer.weights(normed)[name].params
    assert repeated["mlp"] == result_of("w_down") and repeated["shared experts"] == result_of("shared_down")


def test_activations_of_a_layer_with_experts():
    sizes = anatomy.activations(LATENT_EXPERTS, experts=True)
    assert (sizes["query_proj"], sizes["key_proj"]) == (4 * 14, 4 * 14)
    assert (sizes["value_proj"], sizes["context"]) == (4 * 10, 4 * 10)
    assert (sizes["query_latent"], sizes["kv_latent"], sizes["kv_latent_norm"]) == (10, 12, 12)
    assert (sizes["expert_input"], sizes["expert_gate"], sizes["expert_down"]) == (2 * 32, 2 * 20, 2 * 32)
    assert (sizes["router_logits"], sizes["shared_up"]) == (6, 2 * 20)
    assert all(type(elements) is int for elements in sizes.values())
    assert "mlp_gate" not in sizes and "expert_gate" not in anatomy.activations(LATENT_EXPERTS)
    dense, experts = (transformer.saved_bytes_per_layer(LATENT_EXPERTS, experts=e) for e in (False, True))
    assert transformer.saved_bytes_per_token(LATENT_EXPERTS) == dense + 2 * experts


def test_expert_buffer_rows():
    """96 tokens visit 2 of 8 experts each. Rows are a multiple of the mean, in registers of 32, up to the maximum."""
    mixture = dict(num_experts=8, experts_per_token=2, expert_dim=16)
    rows = lambda devices, **flags: anatomy.expert_rows(Config(**mixture | flags), 96, devices)
    assert [rows(4, buffer_factor=factor) for factor in (1.0, 2.0, 2.1, 8.0)] == [192, 384, 416, 4 * 96 * 2]
    assert rows(8, buffer_factor=8.0) == 8 * 96  # each device sends an expert every token at most
    assert rows(1) == 2 * 96 and rows(4, moe_impl="reference") == 8 * 96
    dense = [rows(4, moe_impl="capacity", capacity_factor=factor) for factor in (1.0, 1.26, 9.0)]
    assert dense == [8 * 24, 8 * 31, 8 * 96]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_result_of_every_matmul_can_be_saved(preset):
    config = from_preset(preset)
    made = {weight.makes for weight in transformer.weights(config).values()} - {"logits", "ple_context", ""}
    kinds = {weight.part for weight in transformer.weights(config).values()}
    names = anatomy.activations(config) if "mlp" in kinds else {}
    names = {**names, **(anatomy.activations(config, experts=True) if "experts" in kinds else {})}
    assert made <= names.keys() and made | {"decoder_layer_input"} <= MATMUL_OUTPUTS | made
    assert made <= MATMUL_OUTPUTS
    assert not transformer.recomputed_flops_per_token(dataclasses.replace(config, remat="none"))
    full = transformer.recomputed_flops_per_token(dataclasses.replace(config, remat="full"))
    assert 0.15 < sum(full.values()) / transformer.train_flops_per_token(config) < 1 / 3


def test_full_recomputation_of_llama_70b():
    """7.5 FLOPs a parameter, not the 8 in place of 6 of a full forward pass; 24.5% of all training FLOPs."""
    config = from_preset("llama3.1-70b", remat="full", seq_len=8192)
    again = transformer.recomputed_flops_per_token(config)
    parts = transformer.parts(config)
    in_layers = parts["attention"].params + parts["mlp"].params
    assert round(6 + (again["attention"] + again["mlp"]) / in_layers, 2) == 7.45
    assert round(sum(again.values()) / transformer.train_flops_per_token(config), 3) == 0.245


# -- state and cache


@pytest.mark.parametrize(
    "flags",
    [
        dict(),
        dict(mu_dtype="bfloat16"),
        dict(mu_dtype="bfloat16", nu_dtype="bfloat16"),
        dict(optimizer="adafactor"),
        dict(optimizer="sgd"),
        dict(optimizer="muon", mu_dtype="bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["tiny", "llama3.1-8b", "qwen2.5-7b", "gemma4-31b", "tiny-moe"])
def test_the_optimizer_state_has_the_bytes_that_optax_allocates(preset, flags):
    config = from_preset(preset, **flags)
    state = jax.eval_shape(train.make_optimizer(config)[0].init, parameters.param_shapes(config))
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]  # the rest are counts of steps
    nbytes = transformer.state_bytes(config)
    assert nbytes["optimizer"] == sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    assert nbytes["weights"] == nbytes["gradients"] == 4 * transformer.num_params(config)
    assert transformer.state_bytes(config, gradient_dtype="bfloat16")["gradients"] == 2 * transformer.num_params(config)


def test_kv_cache():
    """Llama 3.1 70B has 2 * 8 * 128 * 80 in bfloat16, DeepSeek 576 a layer. Gemma's local layers store one window."""
    assert transformer.kv_cache_bytes_per_token(from_preset("llama3.1-70b")) == 2 * 2 * 8 * 128 * 80
    gemma = from_preset("gemma4-31b")  # its global layers have 4 key heads of 512, and values without norm and RoPE
    assert transformer.kv_cache_bytes(gemma, 100_000) == 2 * 2 * (10 * 100_000 * 4 * 512 + 50 * 1024 * 16 * 256)
    assert transformer.kv_cache_bytes(gemma, 1000) == 1000 * transformer.kv_cache_bytes_per_token(gemma)
    assert transformer.kv_cache_bytes_per_token(from_preset("deepseek-v3"), element_bytes=1) == 61 * 576


def test_latent_attention_is_read_as_one_shared_head():
    """T = 1, S large: 2*N*(2C + R) FLOPs for C + R numbers of 2 bytes: 128 * (2*512 + 64) / 576, near 242."""
    intensity = transformer.attention_intensity(from_preset("deepseek-v3"), 1, 10**8, absorbed=True)
    assert intensity == pytest.approx(128 * (2 * 512 + 64) / 576, rel=1e-4)
    with pytest.raises(ValueError, match="kv_lora_rank is 0"):
        transformer.attention_intensity(SMALL, 1, 100, absorbed=True)


# -- the scaling book, part 4


def book(**overrides) -> Config:
    """A model of the book's shape: F = 4D, N*H = D, and a key head for each query head."""
    shape = dict(model_dim=4096, ff_dim=4 * 4096, num_heads=32, num_kv_heads=32, head_dim=128, vocab_size=32_000)
    return Config(**shape | dict(num_layers=64) | overrides)


def full_square(config: Config) -> float:
    """Training FLOPs a token and layer of attention itself, without a mask, as the book counts them."""
    return 3 * 2 * masked_half(config) / config.num_layers


def test_book_training_flops_of_a_layer():
    """MLP 18BTDF and 3DF; attention 24BTDNH and 4DNH, 12BT^2NH; "6 * num tokens * parameter count" where T is short."""
    config = book(seq_len=8192)
    parts, forward = transformer.parts(config), transformer.forward_flops_per_token(config)
    L, T, D, F, NH = 64, 8192, 4096, 16_384, 4096
    assert (parts["mlp"].params, 3 * forward["mlp"]) == (L * 3 * D * F, L * 18 * D * F)
    assert (parts["attention"].params, 3 * forward["attention"]) == (L * 4 * D * NH, L * 24 * D * NH)
    assert full_square(config) == 12 * T * NH
    short = book(seq_len=1, vocab_size=1)
    assert transformer.train_flops_per_token(short) == pytest.approx(6 * transformer.num_params(short), rel=1e-3)


def test_book_unembedding():
    """In "Other Operations": 6BTDV. The table of the takeaways has 12BTDV: it counts the look-up as a matmul."""
    config = book()
    assert 3 * transformer.forward_flops_per_token(config)["unembedding"] == 6 * 4096 * 32_000


def test_book_attention_overtakes_at_8d():
    """Its share is T/8D. "For D ~ 8k, this would be ~64K tokens"; for D=4608 "around 32k", which is 36,864."""
    assert transformer.overtaking_seq_len(book(), causal=False) == 8 * 4096
    assert transformer.overtaking_seq_len(book()) == 16 * 4096  # counted at half
    scaled = lambda D: book(model_dim=D, ff_dim=4 * D, num_heads=D // 128, num_kv_heads=D // 128)
    assert transformer.overtaking_seq_len(scaled(8192), causal=False) == 65_536
    assert transformer.overtaking_seq_len(scaled(4608), causal=False) == 36_864
    config = book(seq_len=4096)
    matmuls = transformer.train_flops_per_token(config) - full_square(config) * 64 / 2 - 6 * 4096 * 32_000
    assert full_square(config) * 64 / matmuls == 4096 / (8 * 4096)
    # The takeaways say that the MLP dominates until T > 8D. That holds for MLP and projections; the MLP alone: 6D.
    assert transformer.overtaking_seq_len(book(), "mlp", causal=False) == 6 * 4096


def test_book_question_1():
    """The book's 16B parameters round 4096 to 4e3 and drop terms under 1B; the exact count is 17.4B. Attention has a
    quarter of a layer's. The 512 kB of cache a token, in int8, are KiB.
    """
    config = book()
    parts = transformer.parts(config)
    assert (
        transformer.num_params(config) == 64 * (3 * 4096 * 16_384 + 4 * 4096**2 + 2 * 4096) + 4096 + 2 * 4096 * 32_000
    )
    assert round(transformer.num_params(config) / 1e9, 1) == 17.4
    with_4e3 = book(model_dim=4000, ff_dim=16_000, num_heads=40, num_kv_heads=40, head_dim=100)
    assert math.floor(transformer.num_params(with_4e3) / 1e9) == 16
    assert parts["attention"].params / (parts["attention"].params + parts["mlp"].params) == 1 / 4
    assert transformer.kv_cache_bytes_per_token(config, element_bytes=1) == 512 * 1024


def test_book_question_4():
    """TG/(G+1) over a full sequence; SG/(G+S), which tends to G, for one query.

    "Compute bound at S=240" holds for large G only: with one query head a key head, a chip of 240 FLOPs a byte
    needs 480.
    """
    for G in (1, 4, 32):
        config = book(num_kv_heads=32 // G)
        assert transformer.attention_intensity(config, 1000, 1000) == pytest.approx(1000 * G / (G + 1))
        assert transformer.attention_intensity(config, 1, 5000) == pytest.approx(5000 * G / (G + 5000))
    assert transformer.attention_intensity(book(), 480, 480) == 240
    assert transformer.attention_intensity(book(num_kv_heads=1), 248, 248) == pytest.approx(240, rel=0.01)


def test_book_question_5():
    """Attention's square equals the projections at T = 2D: 8192 for D = 4096."""
    assert transformer.overtaking_seq_len(book(), "projections", causal=False) == 8192


def test_book_question_6():
    """With the outputs of the 7 matmuls saved, attention itself is repeated: 4BT^2NH. (The book gives no answer.)"""
    config = book(seq_len=8192)
    again = transformer.recomputed_flops_per_token(config, MATMUL_OUTPUTS)
    assert again.keys() == {"scores", "mix"}
    assert 2 * sum(again.values()) == 64 * 4 * 8192 * 4096


def test_book_gradient_checkpointing():
    """B*T = 4M, L=64, D=8192 in bfloat16: "2 * 20 * B * T * D * L = 84TB", of which block remat leaves 4.2TB.

    The book's rough 20*D is the sum of the table of activations at F = 4D, without the log-sum-exp. Its "7 per layer"
    for the outputs of big matmuls counts tensors; in units of D, like the 20, they are 13.
    """
    config = book(model_dim=8192, ff_dim=4 * 8192, num_heads=64, num_kv_heads=64, dtype="bfloat16")
    names = anatomy.saved_names(config) - {"log_sum_exp"}
    assert transformer.saved_bytes_per_layer(config, names) == 2 * 20 * 8192
    assert round(4e6 * transformer.saved_bytes_per_token(config, names) / 1e12) == 84
    assert round(4e6 * transformer.saved_bytes_per_token(dataclasses.replace(config, remat="full")) / 1e12, 1) == 4.2
    outputs = MATMUL_OUTPUTS - {"decoder_layer_input"}
    assert sum(name in outputs for name in anatomy.activations(config)) == 7
    assert sum(size for name, size in anatomy.activations(config).items() if name in outputs) == 13 * 8192


def test_book_kv_cache():
    """For "8k context length, 64 layers, and NH = D = 8192", int8: 8 GiB."""
    config = book(model_dim=8192, num_heads=64, num_kv_heads=64)
    assert transformer.kv_cache_bytes(config, 8192, element_bytes=1) == 8 * 2**30


def test_book_a_mixture_is_e_mlps():
    """In the book's words, "an MoE is a dense model with E MLP blocks per layer", of which a token visits k."""
    experts = transformer.parts(book(num_experts=8, experts_per_token=2, expert_dim=16_384))["experts"]
    dense = transformer.parts(book())["mlp"]
    assert (experts.params, experts.active_params) == (8 * dense.params, 2 * dense.params)


# -- command line


def run(*flags: str) -> subprocess.CompletedProcess:
    path = config_lib.__file__.replace("config.py", "roofline.py")
    return subprocess.run([sys.executable, "-X", "importtime", path, "model", *flags], capture_output=True, text=True)


def test_the_table_is_labelled_and_needs_no_jax():
    done = run("--preset=deepseek-v3", "--seq_len=8192")
    assert done.returncode == 0
    assert re.search(r"^experts +653,908,770,816 +20,434,649,088 ", done.stdout, re.MULTILINE)
    assert done.stdout.count("predicted") == 4 and len(re.findall(r"counted\b(?! at)", done.stdout)) == 2
    imported = re.findall(r"\|\s*(\S+)$", done.stderr, re.MULTILINE)
    assert "argparse" in imported and not {"jax", "numpy", "matplotlib"} & set(imported)


def test_json_is_the_summary():
    done = run("--json", "--preset=gpt-oss-120b")
    assert json.loads(done.stdout) == json.loads(json.dumps(transformer.summary(from_preset("gpt-oss-120b"))))
    refused = run("--preset=gpt-oss")
    assert refused.returncode == 2 and "did you mean gpt-oss-20b or gpt-oss-120b?" in refused.stderr
    assert "--json" in run("--help").stdout


def test_formulas_with_their_numbers():
    shown = run("--preset=llama3.1-70b", "--explain").stdout
    assert re.search(r"^  w_q +80 \* 8,192 \* 64 \* 128 = 5,368,709,120$", shown, re.MULTILINE)
    assert "6 * 69,501,714,432 = 417,010,286,592" in shown  # the formula's parameters, unembedding included
    assert "6 * 64 * (128 + 128) * 327,680 = 32,212,254,720" in shown
    assert "80 * 2,048 * 2 = 327,680" in shown
    assert "of which a token uses 8/128" in run("--preset=qwen3-30b-a3b", "--explain").stdout


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_table(preset, capsys):
    transformer.print_summary(from_preset(preset))
    shown = capsys.readouterr().out
    assert f"{transformer.num_params(from_preset(preset)):,}" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_a_custom_policy_is_listed_after_the_others():
    config = from_preset("llama3.1-8b", remat="custom", remat_tensors="context:device")
    policies = transformer.summary(config)["predicted"]["recompute_by_policy"]
    others = transformer.summary(from_preset("llama3.1-8b"))["predicted"]["recompute_by_policy"]
    again = transformer.recomputed_flops_per_token(config)
    assert list(policies) == [*others, "custom"] and policies["full"] == others["full"]
    assert "scores" not in again and again["mlp"] > 0


@pytest.mark.parametrize(
    ("limit", "positions", "chunk"),
    [
        (1024, 8192, 1024),  # it divides
        (1024, 8191, 1024),  # a prime: 8 chunks, with one position of padding
        (1024, 8193, 911),  # 9 equal chunks, not 8 and one of a single position
        (1024, 1025, 513),
        (300, 1000, 250),
        (1024, 7, 7),
        (1, 13, 1),
    ],
)
def test_chunks_of_the_loss_are_about_equal(limit, positions, chunk):
    config = Config(loss_chunk=limit)
    assert anatomy.loss_chunk(config, 4, positions, 256) == chunk <= limit
    chunks = -(-positions // chunk)
    assert chunks == -(-positions // limit) and 0 <= chunks * chunk - positions < chunks


@pytest.mark.parametrize("positions", [1, 128, 8191, 131_071])
@pytest.mark.parametrize(
    ("sequences", "vocabulary"), [(1, 50_257), (4, 128_256), (2, 256), (4096, 201_088), (0.25, 256)]
)
def test_chunks_of_the_loss_follow_vocabulary_and_batch(positions, sequences, vocabulary):
    """By default a device has at most 256 MiB of float32 logits, and more than half of that if there are as many."""
    chunk = anatomy.loss_chunk(Config(), sequences, positions, vocabulary)
    logits = lambda positions: 4 * sequences * positions * vocabulary
    assert chunk == 1 or logits(chunk) <= 2**28
    assert chunk == positions or logits(chunk) > 2**27 or logits(chunk + 1) > 2**28


def test_chunks_of_the_loss_are_whole_fp8_blocks():
    """64 positions of 6 sequences are 3 blocks of 128 rows."""
    blocks = dict(fp8="dynamic", fp8_granularity="block", fp8_block=128, fp8_modules="unembed", loss_chunk=100)
    assert anatomy.loss_chunk(Config(**blocks), 6, 1000, 256) == 128
    assert anatomy.loss_chunk(Config(**blocks), 128, 1000, 256) == 100
    assert anatomy.loss_chunk(Config(**blocks | dict(fp8_modules="mlp")), 6, 1000, 256) == 100
