"""Every mesh and option against the plain one-device model in float32: loss, gradients, and five steps of training."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from support import MIXTURES, SMALL, check_gradients, check_steps, first_state, init, laid_out, make_batch, on_mesh

import reference
import train
from config import Config

MESHES = [
    ",".join(f"{axis}:{size}" for axis, size in zip(("data", "fsdp", "tensor"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 4, 8), repeat=3)
    if np.prod(sizes) == 8
]
OPTIONS = [
    dict(norm_eps=0.1, rope_theta=50.0),  # unlike constants that the code might have in their place
    dict(prefetch=False),
    dict(microbatches=2),
    dict(shard_update=True),
    dict(remat="full"),
    dict(collectives="ring"),
    dict(collectives="ring_bidirectional", shard_update=True),
    dict(microbatches=2, prefetch=False, remat="full", shard_update=True),
]
QUICK = "data:2,fsdp:2,tensor:2"


def cases(options):
    """Each mesh with one option, and each option with a mesh; test_composition.py has pairs of all settings.

    Two meshes always have the first option, one of them in the quick selection.
    """
    params = []
    for (row, mesh), (column, option) in itertools.product(enumerate(MESHES), enumerate(options)):
        always = mesh in (QUICK, "data:1,fsdp:8,tensor:1") and option is options[0]
        if (row + column) % 8 != 4 and not always:
            continue
        name = "-".join([mesh] + [f"{key}={value}" for key, value in option.items()])
        params.append(pytest.param(mesh, option, id=name, marks=[] if always and mesh == QUICK else [pytest.mark.slow]))
    return params


@pytest.mark.parametrize(("mesh", "option"), cases(OPTIONS))
def test_loss_and_gradients_equal_the_reference(mesh, option):
    check_gradients(Config(**SMALL, mesh=mesh, **option))


@pytest.mark.slow
@pytest.mark.parametrize("option", [dict(double_buffer=True), dict(double_buffer=True, remat="full")])
def test_double_buffering_equals_the_reference(option):
    """With five layers, so that one is left over."""
    check_gradients(Config(**SMALL | dict(num_layers=5, microbatches=2), mesh="fsdp:4,tensor:2", **option))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp:2,tensor:4", "data:2,fsdp:2,tensor:2", "tensor:8"])
@pytest.mark.parametrize("collectives", ["xla", "ring", "ring_bidirectional"])
def test_collective_matmuls_equal_the_reference(mesh, collectives):
    option = dict(remat="full") if collectives == "ring" else dict()
    check_gradients(Config(**SMALL, mesh=mesh, collectives=collectives, collective_matmul=True, **option))


SIX = dict(model_dim=48, ff_dim=36, num_heads=12, num_kv_heads=6, vocab_size=252, batch=12, seq_len=36, loss_chunk=12)
THREES = [
    ("fsdp:3,tensor:2", dict(microbatches=2)),
    ("data:3,tensor:2", dict(collectives="ring_bidirectional", collective_matmul=True)),
    ("data:3,fsdp:2", dict(shard_update=True, remat="full")),
    ("fsdp:2,tensor:3", dict(collectives="ring", double_buffer=True)),
    ("fsdp:2,context:3", dict()),
    ("context:3,tensor:2", dict(context_impl="all_to_all")),
    ("context:6", dict(context_heads=3, window=5, global_every=2)),
    ("expert:3,tensor:2", dict(num_experts=6, experts_per_token=2, expert_dim=12, buffer_factor=6.0)),
    ("pipe:3,fsdp:2", dict(microbatches=2)),
]


@pytest.mark.at_most(6)
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "option"), THREES, ids=str)
def test_axes_of_three_equal_the_reference(mesh, option):
    """A size that is no power of two: nothing fits only because it fits 8 devices, and a device has two neighbours."""
    check_gradients(Config(**SMALL | SIX | option, mesh=mesh), devices=jax.devices()[:6])


TWO_DIMS = [
    ("fsdp:4,fsdp_transpose:2", dict(model_dim=36, double_buffer=True)),  # 8 does not divide 36
    ("data:2,fsdp:2,fsdp_transpose:2", dict(shard_update=True, collectives="ring", tied_embeddings=True)),
    ("pipe:2,fsdp_transpose:2,tensor:2", dict(num_layers=2, microbatches=2, qkv_bias=True, num_kv_heads=4)),
    ("fsdp_transpose:2,expert:2,context:2", MIXTURES["gpt-oss"] | dict(buffer_factor=8.0, remat="full")),
    ("fsdp:2,fsdp_transpose:2,expert:2", MIXTURES["deepseek"] | dict(mtp=True, buffer_factor=8.0, prefetch=False)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "option"), TWO_DIMS, ids=[mesh for mesh, _ in TWO_DIMS])
def test_fsdp_in_two_dims_equals_the_reference(mesh, option):
    check_gradients(Config(**SMALL | option, mesh=mesh))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(mesh="data:2,fsdp:2,tensor:2"),
        dict(mesh="data:2,fsdp:2,tensor:2", z_loss=0.1, microbatches=2),
        dict(mesh="fsdp:2,expert:2,tensor:2", z_loss=0.1, load_balance_loss=0.1, router_z_loss=0.1)
        | dict(num_experts=8, experts_per_token=2, expert_dim=16, buffer_factor=8.0),
        dict(mesh="pipe:2,fsdp:4", num_layers=2, microbatches=2, z_loss=0.1),
    ],
    ids=str,
)
def test_a_step_reports_the_cross_entropy_and_the_auxiliary_losses(options):
    """Its loss can be compared with the held-out loss. Without auxiliary losses it reports none."""
    config = Config(**SMALL | options)
    mesh, _, _ = on_mesh(config)
    params, batch = init(config), make_batch(config)
    state = first_state(config, mesh, params)
    _, metrics = train.make_train_step(config, mesh)(state, laid_out(batch, config, mesh))
    without = dict(z_loss=0.0, load_balance_loss=0.0, router_z_loss=0.0)
    cross_entropy = float(reference.loss(params, batch, dataclasses.replace(config, **without)))
    auxiliary = float(reference.loss(params, batch, config)) - cross_entropy
    assert float(metrics["loss"]) == pytest.approx(cross_entropy, rel=1e-5)
    assert ("auxiliary_loss" in metrics) == (auxiliary > 0.05) and (auxiliary > 0.05) == ("z_loss" in options)
    assert float(metrics.get("auxiliary_loss", 0)) == pytest.approx(auxiliary, rel=1e-3, abs=1e-6)


STEP_OPTIONS = [dict(), dict(microbatches=2, shard_update=True), dict(collectives="ring_bidirectional")]


@pytest.mark.at_most(4)
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "option"), list(zip(MESHES, itertools.cycle(STEP_OPTIONS))), ids=str)
def test_parameters_after_five_steps_equal_the_reference(mesh, option):
    check_steps(Config(**SMALL, mesh=mesh, **option), steps=5)


@pytest.mark.at_most(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        dict(optimizer="sgd", learning_rate=0.1, beta1=0.5),
        dict(optimizer="adafactor", learning_rate=1e-3),
        MIXTURES["deepseek"] | dict(optimizer="muon", selection_bias=False),
        dict(mu_dtype="bfloat16"),
        dict(mu_dtype="bfloat16", nu_dtype="bfloat16", grad_dtype="bfloat16", microbatches=2),
        dict(clip_norm=0.0, warmup_ratio=0.0),
    ],
    ids=lambda option: "-".join(f"{key}={value}" for key, value in option.items()),
)
def test_optimizers_equal_the_reference(optimizer):
    # Rounding the first moment to bfloat16 can make 2^-9 of an update from a last-bit difference of gradients.
    tolerance = 1e-3 if "grad_dtype" in optimizer else 1e-4 if "mu_dtype" in optimizer else 1e-5
    check_steps(Config(**SMALL | optimizer, mesh="data:2,fsdp:2,tensor:2", shard_update=True), 3, tolerance)


EVERYTHING = dict(qk_norm=True, z_loss=0.01, norm_eps=0.1, qkv_bias=True, tied_embeddings=True, output_bias=True)
EVERYTHING |= dict(window=5, global_every=2, attention_scale=2.0, attention_soft_cap=0.5, attention_sinks=True)
EVERYTHING |= dict(rope_type="llama3", rope_scaling=8.0, rope_original_len=64, logit_soft_cap=2.0, num_heads=8)
EVERYTHING |= dict(mlp_activation="gelu", post_norms=True, embedding_scale=True)
VARIANTS = [  # what is not in EVERYTHING
    dict(window=5),
    dict(window=5, global_every=2),
    dict(loss_chunk=24),
    dict(model_dim=40),  # shards are not whole registers, and travel as blocks
]
LATENT = dict(num_kv_heads=16, kv_lora_rank=8, rope_head_dim=2, value_head_dim=6, norm_eps=0.1)
YARN = dict(rope_type="yarn", rope_scaling=8.0, rope_original_len=64, rope_theta=50.0)
VARIANTS += [dict(value_norm=True, keys_as_values=True, qkv_bias=True, layer_scale=True)]
VARIANTS += [LATENT | dict(q_lora_rank=16, collectives="ring"), LATENT | dict(attention_sinks=True)]
VARIANTS += [
    dict(window=5, global_every=2, global_rope_theta=50.0, rope_type="linear", rope_scaling=8.0, rope_fraction=0.5),
]
VARIANTS += [dict(mtp=True, norm_eps=0.1), LATENT | dict(mtp=True, tied_embeddings=True, remat="full")]
VARIANTS += [YARN | dict(rope_truncate=False), LATENT | YARN | dict(rope_head_dim=8, rope_mscale_all_dim=0.7)]


@pytest.mark.at_most(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(mesh="data:2,fsdp:2,tensor:2", loss_chunk=5),  # 5 chunks of 5 for 24 positions
        dict(mesh="fsdp:2,context:2,tensor:2", seq_len=20, loss_chunk=4),  # 3 of 4
        dict(mesh="fsdp:8", seq_len=23, microbatches=2, loss_chunk=22),  # 2 of 12
        dict(mesh="pipe:2,fsdp:4", num_layers=2, microbatches=2, seq_len=17, loss_chunk=4, z_loss=0.01),
    ],
    ids=str,
)
def test_padded_chunks_of_the_loss_equal_the_reference(options):
    check_gradients(Config(**SMALL | options))


@pytest.mark.at_most(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "variant"),
    [
        pytest.param(mesh, variant, id="-".join([mesh, *variant]))
        for variant in [*VARIANTS, EVERYTHING]
        for mesh in (["data:2,fsdp:2,tensor:2"] if variant is not EVERYTHING else ["fsdp:4,tensor:2", "tensor:8"])
    ],
)
def test_model_variants_equal_the_reference(mesh, variant):
    check_gradients(Config(**SMALL | variant, mesh=mesh))


# Global layers are a stack of their own. Their heads have 8 dims, and two of them share keys that are also the values.
TWO_KINDS = SMALL | dict(num_layers=6, window=5, global_every=3, global_head_dim=8, global_kv_heads=4, norm_eps=0.1)
TWO_KINDS |= dict(keys_as_values=True, value_norm=True, global_rope_theta=50.0, rope_fraction=0.5)


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        dict(mesh="data:2,fsdp:2,tensor:2"),
        dict(mesh="fsdp:4,tensor:2", prefetch=False, remat="full", shard_update=False),
        dict(mesh="fsdp:8", double_buffer=True, remat="full"),
        dict(mesh="data:2,fsdp:2,context:2", microbatches=2, shard_update=True),
        MIXTURES["gemma"] | dict(mesh="fsdp:2,expert:4", norm_eps=0.1),
    ],
    ids=lambda option: option["mesh"],
)
def test_two_kinds_of_layers_equal_the_reference(option):
    check_gradients(Config(**TWO_KINDS | option))


# The last period shares the keys and values of the one before, in MLPs of twice the width. Layers have embeddings.
SHARED = SMALL | dict(num_layers=6, window=5, global_every=2, global_head_dim=8, num_kv_shared_layers=2, norm_eps=0.1)
SHARED |= dict(double_wide_mlp=True, ple_dim=8, qk_norm=True, value_norm=True, post_norms=True, layer_scale=True)
SHARED |= dict(embedding_scale=True, tied_embeddings=True, qkv_bias=True)


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        dict(mesh="data:2,fsdp:2,tensor:2"),
        dict(mesh="fsdp:4,tensor:2", prefetch=False, remat="full"),
        dict(mesh="fsdp:8", double_buffer=True, remat="minimal", num_kv_shared_layers=4),
        dict(mesh="data:2,fsdp:2,context:2", microbatches=2, shard_update=True, remat="full"),
        dict(mesh="fsdp:2,fsdp_transpose:2,tensor:2", remat="save_out_proj"),
        dict(mesh="fsdp:4,fsdp_transpose:2", collectives="ring", dim_multiple=24, ff_dim=40),
        dict(mesh="fsdp:2,tensor:4", remat="minimal_with_context"),
        dict(mesh="fsdp:2,tensor:4", collective_matmul=True, collectives="ring"),
    ],
    ids=lambda option: f"{option['mesh']}{'-collective_matmul' * ('collective_matmul' in option)}",
)
def test_layers_that_share_keys_and_values_equal_the_reference(option):
    check_gradients(Config(**SHARED | option))


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        dict(mesh="fsdp:4,tensor:2", window=5, global_every=3),
        MIXTURES["mixtral"] | dict(mesh="fsdp:2,expert:2,tensor:2", num_dense_layers=1, remat="full"),
    ],
    ids=lambda option: option["mesh"],
)
def test_per_layer_embeddings_of_a_single_stack_equal_the_reference(option):
    check_gradients(Config(**SMALL | dict(ple_dim=8, post_norms=True, norm_eps=0.1) | option))


EXPERT_MESHES = [  # every size of `expert`, with and without fsdp and tensor
    ("fsdp:8", dict()),
    ("expert:8", dict()),
    ("fsdp:2,expert:4", dict(prefetch=False)),
    ("expert:4,tensor:2", dict(shard_update=True, buffer_factor=0.5)),
    ("fsdp:4,tensor:2", dict(remat="full")),
    ("fsdp:2,expert:2,tensor:2", dict()),
    ("data:2,expert:2,tensor:2", dict(remat="full", shard_update=True)),
    ("fsdp:2,expert:2,tensor:2", dict(moe_impl="capacity", capacity_factor=4.0, buffer_factor=2.0)),
    ("fsdp:2,expert:2,tensor:2", dict(moe_impl="reference", buffer_factor=2.0)),
    ("expert:4,tensor:2", dict(collectives="ring", collective_matmul=True)),
    ("expert:2,context:2,tensor:2", dict()),
    ("fsdp:2,expert:2,context:2", dict(remat="full")),
    ("fsdp:2,expert:4", dict(moe_parts=2, remat="full", buffer_factor=0.5)),
    ("fsdp:8", dict(num_experts=4)),
    ("data:2,fsdp:2,expert:2", dict(shard_update=True, remat="full")),
    ("fsdp:4,expert:2", dict(collectives="ring_bidirectional", prefetch=False)),
    ("expert:2,context:2,tensor:2", dict(mtp=True, mtp_loss=0.5, remat="minimal")),
    ("fsdp:4,expert:2", dict(buffer_factor=0.25)),
    ("fsdp:2,expert:2,tensor:2", dict(buffer_factor=0.25, remat="full")),
    ("fsdp:2,expert:2,tensor:2", dict(buffer_factor=0.25, remat="full", moe_parts=2)),
]


@pytest.mark.at_most(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "option"),
    [
        pytest.param(
            name,
            mesh,
            option,
            id="-".join([name, mesh, *(f"{key}={value}" for key, value in option.items())]),
        )
        for index, name in enumerate(MIXTURES)
        for number, (mesh, option) in enumerate(EXPERT_MESHES)
        if number % len(MIXTURES) == index
        or (name == "deepseek" and number in (3, 13))  # alternating models, and two more
    ],
)
def test_mixtures_equal_the_reference(name, mesh, option):
    check_gradients(Config(**SMALL | MIXTURES[name] | option, mesh=mesh))


@pytest.mark.slow
def test_bfloat16_stays_near_the_reference():
    """Within 25 unit round-offs of 2^-9, through three layers and back (about 17 were observed)."""
    check_gradients(Config(**SMALL, dtype="bfloat16", mesh="data:2,fsdp:2,tensor:2"), tolerance=25 * 2**-9)


# Documents of a dozen tokens, on sequence shards of 3 to 16.
CONTEXT = [
    ("fsdp:2,context:2,tensor:2", dict()),
    ("context:8", dict(context_impl="all_gather", seq_len=48, num_kv_heads=16, max_logit=8.0)),
    ("fsdp:2,context:4", dict(context_impl="all_to_all", batch=2)),
    ("context:8", dict(context_balance=False, num_kv_heads=2)),
    ("context:4,tensor:2", dict(context_heads=2, num_kv_heads=4)),
    ("context:8", dict(window=5, attention_scale=2.0, attention_soft_cap=0.5)),
    ("context:4,tensor:2", dict(attention_scale=2.0, attention_soft_cap=0.5)),
    ("data:2,fsdp:2,context:2", dict(window=5, global_every=2, microbatches=2, shard_update=True)),
    ("context:2,tensor:4", dict(context_impl="all_to_all", attention_sinks=True, remat="full")),
    ("fsdp:2,context:4", dict(context_impl="all_gather", context_balance=False, collectives="ring", remat="full")),
    ("fsdp:2,context:4", dict(remat="minimal_with_context", attention_sinks=True, qk_norm=True)),
    ("fsdp:2,context:2,tensor:2", LATENT | dict(context_impl="all_to_all", collectives="ring")),
    ("context:4,tensor:2", dict(collective_matmul=True, prefetch=False, window=16)),
    ("pipe:2,fsdp:2,context:2", dict(num_layers=4, microbatches=4)),
]


@pytest.mark.at_most(5)
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "option"), CONTEXT, ids=str)
def test_sharded_sequences_equal_the_reference(mesh, option):
    check_gradients(Config(**SMALL | option, mesh=mesh))


@pytest.mark.slow
@pytest.mark.parametrize("option", [dict(), dict(context_impl="all_to_all", microbatches=2, shard_update=True)])
def test_parameters_after_steps_on_sharded_sequences_equal_the_reference(option):
    check_steps(Config(**SMALL | option, mesh="data:2,context:2,tensor:2"), steps=3)


FLASH = SMALL | dict(batch=2, num_layers=2, num_heads=4, num_kv_heads=2, attention="flash", mesh="fsdp:1,tensor:2")


@pytest.mark.at_most(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        dict(max_logit=8.0),
        dict(window=5, global_every=2, attention_sinks=True, attention_scale=2.0, attention_soft_cap=0.5),
    ],
    ids=["max logit", "alternating windows, sinks and a soft cap"],
)
def test_flash_attention_equals_the_reference(option):
    """By interpreted kernels, on two devices. Documents are packed, and blocks do not divide the length."""
    check_gradients(Config(**FLASH, **option), devices=jax.devices()[:2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 25 * 2**-9)])
def test_plain_attention_with_a_max_logit_equals_the_reference(dtype, tolerance):
    config = Config(**FLASH | dict(max_logit=30.0, attention="reference", dtype=dtype))
    check_gradients(config, tolerance, devices=jax.devices()[:2])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["reference", "flash"])
def test_a_max_logit_that_is_far_off_gives_nan(attention):
    """So the step is skipped and counted, and no gradient of a wrong softmax is used."""
    config = Config(**FLASH | dict(max_logit=1000.0, attention=attention))
    _, per_device, place = on_mesh(config, jax.devices()[:2])
    loss, *_ = per_device(place(init(config)), make_batch(config))
    assert np.isnan(loss)
