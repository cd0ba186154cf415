"""The mixture of experts of a layer: router, dispatch to the experts (moe.py), their MLPs, and the metrics.

**Idea** (Shazeer et al. 2017, arXiv:1701.06538). In place of one MLP there are many, and a router chooses a few of them
for each token. moe.py has the algorithms, on arrays alone. This file connects them to config, mesh axes and FP8.

**On TPU7x.** The shared experts do not depend on the rows that travel, and could be computed meanwhile. XLA:TPU does
not do so (compiled, DeepSeek-V3).
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import fp8
import moe
import remat
import sharding
from anatomy import (
    WEIGHTS,
    expert_capacity,
    expert_rows,
    fp8_weights,
    gathers_tokens,
    glu_in_kernel,
    num_expert_layers,
    runs_mtp,
)
from collectives import after, all_gather, reduce_scatter
from config import Config
from gmm import Activated
from parameters import Layers, Params, fp8_recipe


def mixture(w: Layers, h_btd, router_btd, segments_bt, metrics, i, config: Config, arriving=()):
    """(y_btd, metrics): the mixture of h_btd in the i-th layer with experts, and the metrics with this layer's added.

    The router chooses by router_btd. If the experts are on several devices, padding (segment 0) goes to none of them.
    If all tokens are gathered there at once, the last matmul waits for the weights `arriving` on the results' links.

    Rows that are sent to their experts one by one (`rows_travel`) are sharded over `tensor`, and gathered where they
    are multiplied. Otherwise a token is gathered once for all experts of a device, and their sum is reduce-scattered.
    """
    h_td = h_btd.reshape(-1, h_btd.shape[-1])
    logits_tE, routing = router(w, router_btd.reshape(h_td.shape), config)

    def experts(w, x, sizes, factors, copies=None, arriving=()):
        """The MLPs of this device's experts, on sorted rows [r, d] or on [e, c, d] (`moe.Experts`)."""
        x = jax.tree.map(lambda a: remat.named(a, "expert_input"), x)
        if rows_travel(config):
            x = all_gather(x, "tensor", dim=x.ndim - 1, algorithm=config.collectives)
        rows, through = expert_products(w, x, sizes, factors, config)
        rows = after(rows, arriving) if arriving else rows
        into_rows = dict(transpose=True, copies=copies, through=through)
        (y,) = expert_matmuls(rows, (w.expert_down,), sizes, config, **into_rows)  # {U_tensor}
        if config.expert_bias and copies is None:
            y = moe.add_bias(y, as_partial_sum(w.bias_expert_down), sizes, factors)
        if rows_travel(config):
            y = reduce_scatter(y, "tensor", dim=y.ndim - 1, algorithm=config.collectives)
        return remat.named(y, "expert_down")

    sent_tX = routing.experts_tX
    if lax.axis_size("expert") > 1:
        sent_tX = jnp.where((segments_bt == 0).reshape(-1, 1), config.num_experts, sent_tX)
    y_td, counts = apply_experts(w, h_td, routing._replace(experts_tX=sent_tX), experts, config, arriving)
    return y_td.reshape(h_btd.shape), add_metrics(metrics, i, logits_tE, routing, counts, config)


def rows_travel(config: Config) -> bool:
    """Whether the rows of experts are sent one by one, over a mesh axis `expert`. Otherwise tokens are gathered."""
    devices = lax.axis_size("expert")
    return devices > 1 and not gathers_tokens(config, devices)


def expert_products(w: Layers, x, sizes, factors, config: Config):
    """The rows that down multiplies, `factors` * `moe.glu`(gate, up), and an `Activated` that takes their gradient.

    Gate and up are x @ expert_gate and x @ expert_up with their biases. The second result is None if XLA computes the
    activation: then JAX differentiates the rows.
    """
    weights, names = (w.expert_gate, w.expert_up), ("expert_gate", "expert_up")
    biases = (w.bias_expert_gate, w.bias_expert_up) if config.expert_bias else None
    activation = partial(moe.glu, activation=config.mlp_activation, limit=config.swiglu_limit)
    rows = largest = None
    if not glu_in_kernel(config):
        products = expert_matmuls(x, weights, sizes, config)
        if biases:
            products = [moe.add_bias(y, bias, sizes) for y, bias in zip(products, biases, strict=True)]
    elif isinstance(w.expert_gate, fp8.Weight):
        recipe = fp8_recipe(config)
        *products, rows, largest = fp8.gated_dot(x, *weights, sizes, recipe, activation, factors, biases)
    else:
        *products, rows = moe.gated_matmul(x, *weights, sizes, activation, factors, biases)
    products = tuple(map(remat.named, products, names))
    if rows is None:
        return moe.times_factors(remat.named(activation(*products), "expert_product"), factors), None
    rows = jax.tree.map(lambda a: remat.named(a, "expert_product"), rows)
    return lax.stop_gradient(rows), Activated(activation, products, factors, largest)


def expert_matmuls(
    x,
    weights: tuple[jax.Array | fp8.Weight, ...],
    sizes,
    config: Config,
    transpose: bool = False,
    copies: moe.Copies | None = None,
    through: Activated | None = None,
) -> tuple[jax.Array, ...]:
    """x @ w for each of `weights` and each expert's rows; with `copies`, `moe.add_copies` of these.

    The other arguments are those of `moe.grouped_matmul`.
    """
    if not isinstance(weights[0], fp8.Weight):
        products = (moe.grouped_matmul(x, w, sizes, transpose=transpose, through=through) for w in weights)
        return tuple(products if copies is None else (moe.add_copies(y, copies) for y in products))
    recipe = fp8_recipe(config)
    if sizes is not None:
        return fp8.grouped_dot(x, weights, sizes, recipe, transpose=transpose, copies=copies, through=through)
    x = fp8.quantize(x, recipe, (2,))
    return tuple(fp8.dot(x, w, recipe, batch=1, transpose=transpose) for w in weights)


def as_partial_sum(bias: jax.Array) -> jax.Array:
    """A bias that all devices of `tensor` hold, as a partial sum {U_tensor}: the first has it, the others zeros."""
    return jnp.where(lax.axis_index("tensor") == 0, bias, 0)


def router(w: Layers, h_td, config: Config) -> tuple[jax.Array, moe.Routing]:
    """(logits, routing), in float32, the same on all devices of `tensor`.

    By default a TPU rounds float32 to bfloat16 and multiplies once. Using all bits of the weights takes three passes:
    1.5 times the time forward, 1.8 with the backward pass (compiled; 8,192 tokens, D = 4096, E = 128). That is 0.3% of
    a layer of Qwen3 235B.
    """
    precision = lax.Precision.HIGHEST
    logits_tE = lax.dot(h_td, w.w_router, precision=precision, preferred_element_type=jnp.float32)  # {U_tensor}
    if config.expert_bias:
        logits_tE += as_partial_sum(w.bias_router)
    logits_tE = remat.named(lax.psum(logits_tE, "tensor"), "router_logits")
    bias_E = lax.psum(as_partial_sum(w.selection_bias), "tensor") if config.selection_bias else None
    scale_E = lax.psum(as_partial_sum(w.expert_scale), "tensor") if config.expert_scale else None
    options = dict(scores=config.router_scores, renormalise=config.renormalise, scale=config.router_scale)
    options |= dict(groups=config.router_groups, groups_kept=config.router_groups_kept)
    return logits_tE, moe.route(logits_tE, config.experts_per_token, bias_E=bias_E, scale_E=scale_E, **options)


def apply_experts(w: Layers, h_td, routing: moe.Routing, experts, config: Config, arriving) -> tuple[jax.Array, dict]:
    """(y_td, {metric: this device's count}), by the method `config.moe_impl`, with the experts' weights alone."""
    w = Layers(**{name: getattr(w, name) for name, weight in WEIGHTS.items() if weight.by_expert})
    if config.moe_impl != "dropless":
        return on_gathered_tokens(partial(dense_experts, w, experts, config), h_td, routing, config)
    t, devices, num_chunks = len(h_td), lax.axis_size("expert"), config.moe_parts
    rows = expert_rows(config, t // num_chunks, devices)
    if rows_travel(config):
        apply = lambda h_td, routing: moe.dropless(w, h_td, routing, experts, "expert", rows)
    else:
        local = partial(local_experts, w, experts, rows, config, arriving if devices > 1 and num_chunks == 1 else ())
        apply = lambda h_td, routing: on_gathered_tokens(local, h_td, routing, config)
    y_td, rounds = apply(h_td, routing) if num_chunks == 1 else moe.in_chunks(apply, h_td, routing, num_chunks)
    return y_td, {"extra_rounds": (rounds - 1) / lax.axis_size(sharding.LOSS_AXES)}  # all devices have as many


def on_gathered_tokens(apply, h_td, routing: moe.Routing, config: Config) -> tuple[jax.Array, Any]:
    """(y_td, count), where (y, count) = apply(x, routing of x).

    x are the tokens of all devices along `expert`, with all of their columns, and y the sums of these devices' results.
    If rows travel, x and y are this device's.
    """
    if rows_travel(config):
        return apply(h_td, routing)
    x, algorithm = h_td, config.collectives
    gather = partial(all_gather, algorithm=algorithm)
    if config.moe_impl == "dropless" and "expert_gate" in fp8_weights(config):
        recipe = fp8_recipe(config)
        x = fp8.quantize(x, recipe, (1,))  # before there are several copies of each row
        gather = lambda x, axis, dim: fp8.gather(x, recipe, (1,), axis, dim, algorithm=algorithm)
    for axis, dim in (("expert", 0), ("tensor", 1)):
        x = gather(x, axis, dim=dim)
    y, count = apply(x, moe.own_choices(routing, "expert", algorithm))
    for axis, dim in (("tensor", 1), ("expert", 0)):
        y = reduce_scatter(y, axis, dim=dim, algorithm=algorithm)
    return y, count


def dense_experts(w: Layers, experts, config: Config, x_td, routing: moe.Routing) -> tuple[jax.Array, dict]:
    """(y_td, {metric: this device's count}), by a method other than `dropless`."""
    if config.moe_impl == "reference":
        return moe.reference(w, x_td, routing, experts, "expert"), {}
    slots = expert_capacity(config, len(x_td))
    y_td, dropped = moe.with_capacity(w, x_td, routing, experts, "expert", slots, config.collectives)
    return y_td, {"dropped": dropped}


def local_experts(
    w: Layers, experts, rows: int, config: Config, arriving, x_td, routing: moe.Routing
) -> tuple[jax.Array, jax.Array]:
    """`moe.local_experts` and, with `expert_bias`, the sum of the biases of the results: once a token."""
    num_experts = config.num_experts // lax.axis_size("expert")
    y_td, rounds = moe.local_experts(w, x_td, routing, experts, num_experts, rows, arriving)
    if config.expert_bias:
        gates_te = moe.gates(routing, num_experts).astype(y_td.dtype)
        y_td += jnp.dot(gates_te, as_partial_sum(w.bias_expert_down))
    return y_td, rounds


def zero_metrics(config: Config) -> dict[str, jax.Array]:
    """The metrics before the first layer: zeros, to which each device adds its share; none in a dense model."""
    if not config.num_experts:
        return {}
    loads_LE = jnp.zeros((num_expert_layers(config), config.num_experts))
    scalars = ("auxiliary_loss", "dropped", "extra_rounds", "router_entropy")
    zeros = dict.fromkeys(scalars, jnp.float32(0)) | {"expert_loads": loads_LE}
    return jax.tree.map(lambda a: lax.pcast(a, sharding.LOSS_AXES, to="varying"), zeros)


def add_metrics(metrics, i, logits_tE, routing: moe.Routing, counts: dict, config: Config) -> dict[str, jax.Array]:
    """The metrics with this device's shares of layer i: `counts`, expert loads, entropy, auxiliary losses."""
    num_tokens = float(config.batch * config.seq_len)  # a float: times the layers it exceeds an int32
    loads_E = moe.loads(routing.experts_tX, config.num_experts).astype(jnp.float32)
    loss = 0.0
    if config.load_balance_loss:
        total_E = lax.psum(loads_E, sharding.axes_of(sharding.BATCH_SPEC))
        loss += config.load_balance_loss * moe.load_balance_loss(routing.scores_tE, total_E, num_tokens)
    if config.router_z_loss:
        loss += config.router_z_loss * moe.z_loss(logits_tE, num_tokens)
    entropy = moe.entropy(lax.stop_gradient(routing.scores_tE), num_tokens * metrics["expert_loads"].shape[0])
    shares = {"auxiliary_loss": loss, "router_entropy": entropy, **counts}
    added = {name: metrics[name] + share for name, share in shares.items()}
    return metrics | added | {"expert_loads": metrics["expert_loads"].at[i].add(loads_E)}


def reported_metrics(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The metrics to report, from sums over all devices: loads [L, E], their max / mean by layer, and its mean."""
    if "expert_loads" not in metrics:
        return metrics
    loads_LE = metrics["expert_loads"]
    reported = {name: value for name, value in metrics.items() if name != "dropped"}
    reported["load_imbalance_by_layer"] = imbalance_L = jnp.max(loads_LE, 1) / jnp.mean(loads_LE, 1)
    reported["load_imbalance"] = jnp.mean(imbalance_L)
    return reported | {"dropped_fraction": metrics["dropped"] / jnp.sum(loads_LE)}


def update_selection_biases(params: Params, metrics: dict[str, jax.Array], accept: jax.Array, config: Config) -> Params:
    """The parameters with selection biases moved by the expert loads of a step; unchanged if not `accept`."""
    if not config.selection_bias:
        return params
    first, updated = 0, {}
    for stack in ("layers", "mtp_layers") if runs_mtp(config) else ("layers",):
        layers = getattr(params, stack)
        old_LE = layers.selection_bias
        loads_LE = metrics["expert_loads"][first : first + len(old_LE)]
        bias_LE = jnp.where(accept, moe.updated_bias(old_LE, loads_LE, config.selection_bias_rate), old_LE)
        updated[stack] = dataclasses.replace(layers, selection_bias=bias_LE)
        first += len(old_LE)
    return dataclasses.replace(params, **updated)
