"""QK-clip: the largest scores that a step reports, against the reference, and the scores after the clip."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import MIXTURES, SMALL, first_state, init, laid_out, make_batch, on_mesh

import anatomy
import flash
import initialisation
import placement
import qk_clip
import reference
import rules
import sharding
import train
from attention import attention
from config import Config
from flash import Blocks
from masks import CAUSAL, Mask, Scores

BLOCKS = Blocks(128, 128, queries=128, keys=128, full_unroll=2, masked_unroll=2, ahead=1)
TINY = SMALL | dict(batch=8, seq_len=16, num_layers=2, model_dim=16, ff_dim=24, num_heads=4, num_kv_heads=4)
TINY |= dict(vocab_size=32, optimizer="muon", learning_rate=0.0)
LATENT = dict(kv_lora_rank=8, q_lora_rank=8, rope_head_dim=4)


def scores_of_the_first_layer(params, batch, config: Config) -> np.ndarray:
    """The largest score of each head in the first layer, by the reference's queries and keys: [N]."""
    stack = params.dense_layers if config.num_dense_layers else params.layers
    w = jax.tree.map(lambda a: a[0], stack)
    h = reference.norm(reference.embed(params, batch.tokens, config), w.norm_attention, config.norm_eps)
    project = reference.latent_projections if config.kv_lora_rank else reference.projections
    q, k, _ = project(w, h, batch.positions, config, False)
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, q.shape[2] // k.shape[2], 2)) / q.shape[-1] ** 0.5
    t = np.arange(q.shape[1])
    seen = (t[:, None] >= t) & (batch.segments[:, None, :, None] == batch.segments[:, None, None, :])
    return np.max(np.where(seen, scores, -np.inf), (0, 2, 3))


@pytest.mark.at_most(2)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data:2,fsdp:2,tensor:2", dict(qkv_bias=True, microbatches=2)),
        pytest.param("fsdp:4,tensor:2", dict(num_kv_heads=2), marks=pytest.mark.slow),
        pytest.param("fsdp:2,tensor:2", LATENT, marks=pytest.mark.slow),
        pytest.param("expert:2,tensor:2", MIXTURES["deepseek"] | dict(num_kv_heads=4), marks=pytest.mark.slow),
    ],
)
def test_a_step_clips_the_scores_of_the_first_layer(mesh, options):
    """With a learning rate of 0 only the clip changes weights. The same batch then has scores of at most the limit."""
    config = Config(**TINY | options, mesh=mesh)
    mesh, *_ = on_mesh(config, jax.devices()[: np.prod(list(placement.parse_mesh(mesh).values()))])
    params, batch = jax.device_get(init(config)), make_batch(config)
    before = scores_of_the_first_layer(params, batch, config)
    config = dataclasses.replace(config, qk_clip=float(np.median(before)))  # of four heads two are clipped
    placed = jax.device_put(laid_out(batch, config, mesh), NamedSharding(mesh, sharding.BATCH_SPEC))
    state, metrics = train.make_train_step(config, mesh)(first_state(config, mesh, params), placed)
    assert float(metrics["max_logit"]) >= before.max() * (1 - 1e-5)  # of all layers
    after = scores_of_the_first_layer(jax.device_get(state.params), batch, config)
    np.testing.assert_allclose(after, np.minimum(before, config.qk_clip), rtol=1e-5)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), jax.device_get(state.params.layers), params.layers)
    names = {field.name for field in dataclasses.fields(changed) if getattr(changed, field.name)}
    kept_keys = config.num_kv_heads != config.num_heads
    expected = {"w_q_up", "w_k_up"} if config.kv_lora_rank else {"w_q"} if kept_keys else {"w_q", "w_k"}
    assert names - {"selection_bias"} == expected | ({"bias_q", "bias_k"} if config.qkv_bias else set())


def test_the_kernel_reports_the_largest_score_of_each_query():
    """It counts the keys that the query sees, in its own document. The other results stay."""
    T, H = 256, 8
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, T, 2, H))
    segments = jnp.asarray(np.where(np.arange(T) < 100, 0, 1)[None])
    mask, options = Mask(segments=(segments, segments)), dict(blocks=BLOCKS, interpret=True)
    out, lse, largest = flash.flash_attention(q, k, v, mask, Scores(largest=True), **options)
    scores = np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    t, ids = np.arange(T), np.asarray(segments)
    seen = (t[:, None] >= t) & (ids[:, :, None] == ids[:, None])
    np.testing.assert_allclose(largest, np.max(np.where(seen, scores, -np.inf), -1), rtol=1e-5, atol=1e-6)
    plain = attention(q, k, v, mask, Scores(largest=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), (out, lse, largest), plain)


def test_reporting_changes_no_gradient():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    total = lambda x, scores: sum(jnp.sum(jnp.sin(each)) for each in attention(*x, CAUSAL, scores)[:2])
    plain, reporting = (jax.grad(total)((q, k, v), Scores(largest=on)) for on in (False, True))
    jax.tree.map(np.testing.assert_array_equal, plain, reporting)


def test_a_step_with_the_kernel_can_be_traced():
    """The forward and the backward pass, with the kernel's third result."""
    config = Config(**TINY, qk_clip=1.0, mesh="fsdp:2", attention="flash", remat="none")
    mesh = sharding.make_mesh(placement.parse_mesh("fsdp:2"), jax.devices()[:2])
    train.lower_step(config, mesh)


def test_alternating_stacks_have_their_own_rows():
    """The third and the sixth layer are global, and their heads share keys; the heads of the others do not."""
    config = Config(**TINY | dict(num_layers=6, global_every=3, window=4, global_kv_heads=2), qk_clip=1.0)
    params = initialisation.init_params(config, jax.random.key(0))
    max_logits = jnp.arange(1.0, 25.0).reshape(6, 4)
    clipped = qk_clip.clip(params, max_logits, jnp.bool_(True), config)
    gain = {"layers": 1 / max_logits[np.array([0, 1, 3, 4])], "global_layers": 1 / max_logits[np.array([2, 5])]}
    for stack, of_query, of_key in (("layers", 0.5, 0.5), ("global_layers", 1, 0)):
        for name, power in (("w_q", of_query), ("w_k", of_key)):
            before, after = (getattr(getattr(p, stack), name) for p in (params, clipped))
            factor = gain[stack][:, None, :, None] ** power if power else 1
            np.testing.assert_allclose(after, before * factor, rtol=1e-6)
    assert qk_clip.clip(params, max_logits, jnp.bool_(False), config).layers.w_q.tolist() == params.layers.w_q.tolist()


def after_a_step(config: Config):
    """(the parameters after a step whose learning rate is 0, and its largest score)."""
    mesh, *_ = on_mesh(config, jax.devices()[: np.prod(list(placement.parse_mesh(config.mesh).values()))])
    placed = laid_out(make_batch(config), config, mesh)
    placed = jax.device_put(placed, NamedSharding(mesh, sharding.BATCH_SPEC))
    state = first_state(config, mesh, jax.device_get(init(config)))
    state, metrics = train.make_train_step(config, mesh)(state, placed)
    return jax.device_get(state.params), float(metrics["max_logit"])


@pytest.mark.slow
def test_a_layer_that_does_not_run_is_not_clipped():
    options = MIXTURES["deepseek"] | dict(num_kv_heads=4, mtp=True, mtp_loss=0.0, selection_bias=False)
    config = Config(**TINY | options, mesh="fsdp:1", qk_clip=0.05)
    params, start = after_a_step(config)[0], jax.device_get(init(config))
    assert not np.equal(params.layers.w_k_up, start.layers.w_k_up).all()
    np.testing.assert_array_equal(params.mtp_layers.w_k_up, start.mtp_layers.w_k_up)


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "of_mesh"),
    [
        ("context:2,tensor:2", {}, {}),
        ("context:4", dict(attention_sinks=True), dict(context_balance=False)),
        ("context:4", {}, dict(context_heads=2)),
        ("context:2", LATENT, dict(context_impl="all_to_all")),
        ("context:2,fsdp:2", dict(num_kv_heads=2), dict(context_impl="all_gather")),
        ("context:2", dict(window=5), {}),
        ("pipe:2,fsdp:2", dict(qkv_bias=True), dict(microbatches=4)),
        ("pipe:2,tensor:2", dict(num_layers=4), dict(microbatches=2, pipeline_schedule="circular", pipeline_rounds=2)),
        ("fsdp:2", MIXTURES["deepseek"] | dict(num_kv_heads=4, mtp=True, selection_bias=False), {}),
    ],
    ids=str,
)
def test_every_mesh_clips_as_one_device(mesh, options, of_mesh):
    """The heads of all layers are clipped by the largest scores that any stage, chunk of positions or hop has seen."""
    config = Config(**TINY | options, mesh="fsdp:1", qk_clip=0.05)
    (expected, most), start = after_a_step(config), jax.device_get(init(config))
    params, largest = after_a_step(dataclasses.replace(config, mesh=mesh, **of_mesh))
    assert largest == pytest.approx(most, rel=1e-5) and largest > 0.05
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), params, expected)
    stacks = (getattr(tree, stack) for stack in anatomy.layer_stacks(config) for tree in (params, start))
    for after, before in zip(stacks, stacks, strict=True):
        name = "w_q_up" if after.w_q is None else "w_q"
        same = np.equal(getattr(after, name), getattr(before, name))
        assert not same.all((1, 2, 3)).any()  # every layer has heads that are clipped


@pytest.mark.slow
def test_layers_in_two_precisions_report_all_their_scores():
    config = Config(**TINY | dict(num_layers=4, dtype="bfloat16"), mesh="fsdp:1", fp8="dynamic", fp8_skip_layers=1)
    params, _ = after_a_step(dataclasses.replace(config, qk_clip=0.05))
    same = np.equal(params.layers.w_q, jax.device_get(init(config)).layers.w_q)
    assert not same.all((1, 2, 3)).any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(qk_norm=True), "qk_clip=1 has no use where qk_norm bounds"),
        (dict(attention_soft_cap=20.0), "attention_soft_cap=20 bounds the scores: --qk_clip=0"),
        (dict(max_logit=30.0), "attention with max_logit=30 does not have: --max_logit=0"),
    ],
)
def test_what_has_no_maxima_is_refused(options, said):
    config = Config(**TINY | dict(mesh="fsdp:2") | options, qk_clip=1.0)
    with pytest.raises(ValueError, match=said):
        rules.check(config, placement.fill_mesh(placement.parse_mesh(config.mesh), 2))
