"""Sizes of the published models, the meshes that can shard them, and their initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import initialisation
import parameters
import placement
import rules
from config import Config
from flags import PRESETS, from_preset
from predicted import transformer

# Numbers of parameters of the released checkpoints.
PUBLISHED = {
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    # Without the embedding, table 2 of arXiv:2408.00118 and table 1 of arXiv:2503.19786 have them.
    "gemma2-2b": 2_024_517_888 + 256_000 * 2304,
    "gemma2-9b": 8_324_201_984 + 256_000 * 3584,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    # The text models. 60 and 30 of these numbers are scales of layers, which are no parameters of transformers' models.
    "gemma4-31b": 30_697_345_280 + 60,
    "gemma4-26b-a4b": 25_233_141_760 + 30,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset):
    assert transformer.num_params(from_preset(preset)) == PUBLISHED[preset]


POD = placement.fill_mesh(placement.parse_mesh("fsdp:*,tensor:2"), 128)
EXPERT_POD = placement.fill_mesh(placement.parse_mesh("fsdp:*,expert:4"), 128)


@pytest.mark.parametrize("preset", [name for name in PRESETS if "tiny" not in name])
def test_presets_can_be_sharded_over_a_pod(preset):
    config = from_preset(preset)
    one_head = placement.fill_mesh(placement.parse_mesh("fsdp:*"), 128)
    rules.check(config, EXPERT_POD if config.num_experts else POD if config.num_kv_heads > 1 else one_head)


EXPERTS = dict(num_experts=8, experts_per_token=2, expert_dim=16)


@pytest.mark.parametrize(
    ("flags", "mesh", "message"),
    [
        (dict(), "expert:8", "mesh axis expert:8 is for mixtures of experts, and num_experts is 0: use fsdp"),
        (EXPERTS | dict(num_experts=4), "expert:8", r"num_experts=4 must be a multiple of expert=8"),
        (EXPERTS | dict(expert_dim=12), "tensor:8", r"expert_dim=12 must be a multiple of tensor=8"),
        (EXPERTS | dict(moe_parts=3), "fsdp:8", None),  # without an expert axis there are no chunks
        (EXPERTS | dict(moe_parts=3), "expert:8", "tokens of a device=256 must be a multiple of moe_parts=3"),
        (EXPERTS | dict(num_shared_experts=3, expert_dim=4), "fsdp:2,tensor:4", None),  # they are sharded as one MLP
    ],
)
def test_experts_that_cannot_be_sharded_are_refused(flags, mesh, message):
    check = lambda: rules.check(Config(**flags), placement.parse_mesh(mesh))
    if message is None:
        return check()
    with pytest.raises(ValueError, match=f"^{message}"):
        check()


def test_an_fp8_scale_is_shared_by_all_devices_with_a_shard():
    """All axes shard an activation except `pipe`, whose stages have activations of their own."""
    recipe = parameters.fp8_recipe(Config(fp8="dynamic"))
    assert {*recipe.axes} == {*placement.MESH_AXES} - {"pipe"} and recipe.feature_axes == ("tensor",)


def test_only_the_router_is_float32_in_a_step_in_bfloat16():
    config = Config(**EXPERTS, selection_bias=True, expert_bias=True, num_dense_layers=1, dtype="bfloat16")
    dtypes = jax.tree.leaves_with_path(parameters.compute_dtypes(config))
    in_float32 = {jax.tree_util.keystr(path) for path, dtype in dtypes if dtype == jnp.float32}
    assert in_float32 == {".layers.w_router", ".layers.bias_router", ".layers.selection_bias"}
    assert {dtype for _, dtype in dtypes} == {jnp.dtype("float32"), jnp.dtype("bfloat16")}


def test_flops_per_token_are_six_times_the_matmul_parameters_and_attention():
    config = from_preset("llama3.1-8b")
    flops = transformer.train_flops_per_token(config)
    norms = (2 * config.num_layers + 1) * config.model_dim
    look_up = config.vocab_size * config.model_dim
    attention = 6 * config.num_layers * config.seq_len * config.num_heads * config.head_dim
    assert flops == 6 * (transformer.num_params(config) - norms - look_up) + attention


# -- initial values

WIDTHS = dict(vocab_size=64, num_layers=4, model_dim=48, ff_dim=40, num_heads=4, num_kv_heads=2, head_dim=6)
DENSE = dict(embed=1, unembed=1 / 48, w_q=1 / 48, w_k=1 / 48, w_v=1 / 48, w_gate=1 / 48, w_up=1 / 48)
DENSE |= dict(w_o=1 / (4 * 6) / 8, w_down=1 / 40 / 8)  # they add to the residual stream: 2 * 4 layers times less
ONES = dict.fromkeys("norm norm_attention norm_mlp".split(), "ones")
MIXTURE = DENSE | dict(w_router=1 / 48, expert_gate=1 / 48, expert_up=1 / 48, expert_down=1 / 16 / 8)
STARTS = {  # model: (flags, the variance of each weight, or the value of all its elements)
    "dense": (
        dict(qk_norm=True, qkv_bias=True, output_bias=True, attention_sinks=True, post_norms=True),
        DENSE
        | ONES
        | dict.fromkeys("norm_q norm_k norm_attention_out norm_mlp_out".split(), "ones")
        | dict.fromkeys("bias_q bias_k bias_v bias_o sinks".split(), "zeros"),
    ),
    "scaled embedding": (dict(embedding_scale=True), DENSE | ONES | dict(embed=1 / 48)),
    "tied": (
        dict(tied_embeddings=True, kv_lora_rank=12, q_lora_rank=20, rope_head_dim=2, value_head_dim=10)
        | dict(num_kv_heads=4),
        {name: variance for name, variance in DENSE.items() if name not in ("unembed", "w_q", "w_k", "w_v")}
        | dict(embed=1 / 48, w_q_down=1 / 48, w_q_up=1 / 20, w_kv_down=1 / 48, w_k_rope=1 / 48, w_k_up=1 / 12)
        | dict(w_v_up=1 / 12, w_o=1 / (4 * 10) / 8)
        | ONES
        | dict.fromkeys("norm_q_latent norm_kv_latent".split(), "ones"),
    ),
    "mixture": (
        EXPERTS
        | dict(num_shared_experts=2, num_dense_layers=2, expert_bias=True, selection_bias=True)
        | dict(expert_norms=True, expert_scale=True, layer_scale=True),
        MIXTURE
        | dict.fromkeys("norm_router norm_experts norm_experts_out norm_shared_out".split(), "ones")
        | dict.fromkeys("expert_scale layer_scale".split(), "ones")
        | dict(shared_gate=1 / 48, shared_up=1 / 48, shared_down=1 / (2 * 16) / 8)
        | ONES
        | dict.fromkeys("bias_router bias_expert_gate bias_expert_up bias_expert_down selection_bias".split(), "zeros"),
    ),
}


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[pytest.mark.slow] if model == "mixture" else []) for model in STARTS]
)
def test_initial_values_are_those_of_the_table(model):
    """A normal distribution of mean 0 and the variance of the table, drawn independently for each layer and weight."""
    flags, starts = STARTS[model]
    config, seen, drawn = Config(**WIDTHS | flags), set(), []
    init = jax.jit(lambda seed: initialisation.init_params(config, jax.random.key(seed)))
    params, again, other = (jax.device_get(init(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    for (path, w), w_other in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(other), strict=True):
        name = path[-1].name
        seen.add(name)
        assert w.dtype == np.float32
        if starts[name] in ("ones", "zeros"):
            np.testing.assert_array_equal(w, 1 if starts[name] == "ones" else 0)
            continue
        z = w / starts[name] ** 0.5
        for power, mean, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):  # mean and variance of z^power
            assert abs(np.mean(z**power) - mean) < 5 * (variance / z.size) ** 0.5, (name, power)
        stack = z if len(path) > 1 else z[None]
        drawn += [layer.ravel()[:96] for layer in stack] + [(w_other / starts[name] ** 0.5).ravel()[:96]]
    assert seen == starts.keys()
    correlation = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(correlation).max() < 6 / 96**0.5
