"""The mixture of experts of a layer: its metrics, and the precision of its router."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import MIXTURES, SMALL, assert_close, collectives, init, laid_out, make_batch, on_mesh

import fsdp
import initialisation
import mixture
import parameters
import placement
import sharding
from config import Config


def test_reported_metrics_are_load_imbalance_and_dropped_fraction():
    """Two layers with maxima of 3/2 and 1 times the mean load; 3 of 16 choices dropped."""
    sums = dict(expert_loads=jnp.array([[2.0, 6], [4, 4]]), dropped=jnp.float32(3))
    metrics = mixture.reported_metrics(sums | dict(router_entropy=jnp.float32(0.5), auxiliary_loss=jnp.float32(0.25)))
    assert metrics.pop("load_imbalance_by_layer").tolist() == [1.5, 1.0]
    assert metrics.pop("expert_loads").tolist() == [[2, 6], [4, 4]]
    assert metrics == dict(load_imbalance=1.25, dropped_fraction=3 / 16, router_entropy=0.5, auxiliary_loss=0.25)
    assert mixture.reported_metrics({}) == {}


def rerouted(config, params, h_TD, mesh="data:2,fsdp:2,tensor:2"):
    """The share of tokens that the router of layer 0 sends to other experts than it would in float64.

    `h_TD` is bfloat16. The weights are converted to the dtype of the computation and gathered, as in a step.
    """
    specs = parameters.param_specs(config)
    mesh = sharding.make_mesh(placement.parse_mesh(mesh), jax.devices()[:8])

    def per_device(params, h_td):
        gathered = fsdp.gather_over_data(params, specs, parameters.compute_dtypes(config))
        layer = jax.tree.map(lambda w: w[0], gathered.layers)
        w_router = fsdp.gather(layer.w_router, P(*specs.layers.w_router[1:]), "fsdp")
        routing = mixture.router(dataclasses.replace(layer, w_router=w_router), h_td, config)[1]
        others = tuple(axis for axis in placement.MESH_AXES if axis not in placement.BATCH_AXES)
        chosen_tX = jax.lax.pcast(routing.experts_tX, "tensor", to="varying")
        return jax.lax.pmax(chosen_tX, others)  # the same on all of them

    rows = P(placement.BATCH_AXES)
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(specs, P(placement.BATCH_AXES, "tensor")), out_specs=rows)
    chosen = np.sort(jax.jit(sharded)(params, h_TD), 1)
    logits = np.asarray(h_TD, np.float64) @ np.asarray(params.layers.w_router[0], np.float64)
    if config.expert_bias:
        logits += np.asarray(params.layers.bias_router[0], np.float64)
    want = np.sort(np.argsort(-logits, 1, kind="stable")[:, : config.experts_per_token], 1)
    return np.mean((chosen != want).any(1))


@pytest.mark.slow
@pytest.mark.parametrize("expert_bias", [False, True])
def test_router_of_a_bfloat16_model_routes_as_float64(expert_bias):
    """128 experts, 8 chosen. If the router's weights were rounded, 1.5% of the tokens would go to other experts."""
    many = dict(num_experts=128, experts_per_token=8, expert_dim=16, model_dim=256, num_layers=1)
    config = Config(**SMALL | many, dtype="bfloat16", expert_bias=expert_bias)
    params = initialisation.init_params(config, jax.random.key(1))
    if expert_bias:
        bias = jax.random.normal(jax.random.key(2), params.layers.bias_router.shape)
        params = dataclasses.replace(params, layers=dataclasses.replace(params.layers, bias_router=bias))
    h_TD = jax.random.normal(jax.random.key(3), (4096, 256), jnp.bfloat16)
    assert rerouted(config, params, h_TD) < 0.001
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    logits = np.asarray(h_TD, np.float64) @ np.asarray(params.layers.w_router[0], np.float64)
    rounded_logits = np.asarray(h_TD, np.float64) @ np.asarray(rounded.layers.w_router[0], np.float64)
    chosen = lambda logits: np.sort(np.argsort(-logits, 1)[:, :8], 1)
    assert np.mean((chosen(logits) != chosen(rounded_logits)).any(1)) > 0.01  # the test would notice


@pytest.mark.slow
@pytest.mark.parametrize("fp8, tolerance", [({}, 1e-5), (dict(fp8="dynamic", fp8_modules="moe"), 5e-3)], ids=str)
def test_rounds_of_gathered_tokens_give_the_gradients_of_one(fp8, tolerance):
    """In FP8 the gradients of a weight are rounded in each round."""
    results = []
    for buffer_factor in (8.0, 0.25):
        flags = SMALL | MIXTURES["mixtral"] | fp8 | dict(buffer_factor=buffer_factor, remat="full")
        config = Config(**flags, mesh="data:2,fsdp:2,expert:2")
        mesh, per_device, place = on_mesh(config)
        loss, metrics, grads = per_device(place(init(config)), laid_out(make_batch(config), config, mesh))
        assert (float(metrics["extra_rounds"]) > 0) == (buffer_factor == 0.25)
        results.append((loss, grads))
    (loss, grads), (want_loss, want_grads) = results
    assert float(loss) == pytest.approx(float(want_loss), rel=tolerance)
    assert_close(grads, want_grads, tolerance)


@pytest.mark.parametrize("fp8", [{}, dict(fp8="dynamic", fp8_modules="moe")])
def test_tokens_are_gathered_over_at_most_as_many_devices_as_a_token_has_experts(fp8):
    """Two experts a token. On two devices tokens move once, in FP8 if the experts are; on four their rows are sent.

    Gathered are the tokens, forward, and the gradients of the sums; these sums and the tokens' gradients are scattered.
    """
    config = Config(**SMALL | MIXTURES["mixtral"] | fp8, mesh="fsdp:4,expert:2")
    tokens = (config.batch * config.seq_len // 8, config.model_dim)
    moved = [row for row in collectives(config, "expert") if row[2][1:] == tokens[1:] and row[2][0] % tokens[0] == 0]
    both = (2 * tokens[0], tokens[1])
    dtype = "float8_e4m3fn" if fp8 else "float32"
    gathered, scattered = (
        [("all_gather", kind, tokens) for kind in (dtype, "float32")],
        ("reduce_scatter", "float32", both),
    )
    assert sorted(moved) == sorted([*gathered, scattered, scattered])
    config = dataclasses.replace(config, mesh="fsdp:2,expert:4")
    moved = [row for row in collectives(config, "expert") if row[2][1:] == tokens[1:]]
    assert {name for name, _, _ in moved} == {"all_to_all"} and len(moved) == 4
