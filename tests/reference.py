"""The same model the plain way: one device, whole arrays, a Python loop, all logits at once, no project code.

And its training: schedule, clipping and optimizers as the papers write them, without optax.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def norm(x, scale, eps):
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


def rotate(x, positions, config):
    half = x.shape[-1] // 2
    freq = jnp.array([config.rope_theta ** (-i / half) for i in range(half)], jnp.float32)
    if config.rope_scaling != 1:
        wavelength = 2 * jnp.pi / freq
        smooth = (config.rope_original_len / wavelength - 1) / 3
        blended = (1 - smooth) * freq / config.rope_scaling + smooth * freq
        low, high = config.rope_original_len, config.rope_original_len / 4
        freq = jnp.where(wavelength > low, freq / config.rope_scaling, jnp.where(wavelength < high, freq, blended))
    angle = positions[:, :, None, None] * freq
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def attend(q, k, v, segments, window, sinks=None):
    """All heads, one key/value head a query head; a sink is one more key that every query sees, of value 0."""
    repeat = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, repeat, 2), jnp.repeat(v, repeat, 2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    mask = (
        (j <= i) & ((i - j < window) if window else True) & (segments[:, None, :, None] == segments[:, None, None, :])
    )
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)[..., :-1], v)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v)


def latent_projections(w, h, positions, config):
    """Queries, keys and values of latent attention: the last dims of a head turn, and all heads share that key."""
    up = lambda latent, scale, m: jnp.einsum("btc,cnh->btnh", norm(latent, scale, config.norm_eps), m)
    if config.q_lora_rank:
        q = up(h @ w.w_q_down, w.norm_q_latent, w.w_q_up)
    else:
        q = jnp.einsum("btd,dnh->btnh", h, w.w_q)
    latent = h @ w.w_kv_down
    k, v = (up(latent, w.norm_kv_latent, m) for m in (w.w_k_up, w.w_v_up))
    turn = lambda x: rotate(x, positions, config)
    still, turning = q[..., : config.head_dim], q[..., config.head_dim :]
    shared = jnp.repeat(turn((h @ w.w_k_rope)[:, :, None]), config.num_heads, 2)
    return jnp.concatenate([still, turn(turning)], -1), jnp.concatenate([k, shared], -1), v


def projections(w, h, positions, config):
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, m) for m in (w.w_q, w.w_k, w.w_v))
    if config.qkv_bias:
        q, k, v = q + w.bias_q, k + w.bias_k, v + w.bias_v
    if config.qk_norm:
        q, k = norm(q, w.norm_q, config.norm_eps), norm(k, w.norm_k, config.norm_eps)
    return rotate(q, positions, config), rotate(k, positions, config), v


def swiglu(x, gate, up, down):
    gate = x @ gate
    return (gate / (1 + jnp.exp(-gate)) * (x @ up)) @ down


def mixture(w, h, config):
    """(result, auxiliary losses, tokens by expert): all experts of all tokens, and weights, zero for most of them."""
    x = h.reshape(-1, config.model_dim)
    out = x @ w.w_router + (w.bias_router if config.expert_bias else 0)
    scores = jax.nn.softmax(out, -1) if config.router_scores == "softmax" else 1 / (1 + jnp.exp(-out))
    choice = scores + (w.selection_bias if config.selection_bias else 0)
    groups = choice.reshape(len(x), config.router_groups, -1)
    of_group = jnp.sort(groups, -1)[..., -2:].sum(-1)
    allowed = jnp.argsort(jnp.argsort(-of_group, stable=True), stable=True) < config.router_groups_kept
    choice = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(choice.shape)
    rank = jnp.argsort(jnp.argsort(-choice, stable=True), stable=True)
    chosen = rank < config.experts_per_token
    weights = jnp.where(chosen, scores, 0)
    weights = weights / weights.sum(-1, keepdims=True) if config.renormalise else weights
    each = lambda of_all: of_all.reshape(config.num_experts, config.model_dim, -1)
    gate = jnp.einsum("td,edm->etm", x, each(w.expert_gate))
    up = jnp.einsum("td,edm->etm", x, each(w.expert_up))
    if config.expert_bias:
        gate, up = gate + w.bias_expert_gate[:, None], up + w.bias_expert_up[:, None]
    if limit := config.swiglu_limit:
        gate = jnp.minimum(gate, limit)
        product = gate / (1 + jnp.exp(-1.702 * gate)) * (jnp.clip(up, -limit, limit) + 1)
    else:
        product = gate / (1 + jnp.exp(-gate)) * up
    y = jnp.einsum("etm,edm->etd", product, each(w.expert_down))
    y = y + (w.bias_expert_down[:, None] if config.expert_bias else 0)
    y = jnp.einsum("etd,te->td", y, weights * config.router_scale)
    if config.num_shared_experts:
        y = y + swiglu(x, w.shared_gate, w.shared_up, w.shared_down)
    share, mean = chosen.sum(0) / chosen.sum(), (scores / scores.sum(-1, keepdims=True)).mean(0)
    auxiliary = config.load_balance_loss * config.num_experts * jnp.sum(share * mean)
    auxiliary += config.router_z_loss * jnp.mean(jax.nn.logsumexp(out, -1) ** 2)
    return y.reshape(h.shape), auxiliary, chosen.sum(0)


def forward(params, batch, config):
    """(logits, auxiliary losses, [tokens by expert] of the layers that have them)."""
    x, auxiliary, loads = params.embed[batch.tokens], 0.0, []
    for i in range(config.num_layers):
        is_dense = i < config.num_dense_layers
        stack, row = (params.dense_layers, i) if is_dense else (params.layers, i - config.num_dense_layers)
        w = jax.tree.map(lambda a, row=row: a[row], stack)
        h = norm(x, w.norm_attention, config.norm_eps)
        q, k, v = (latent_projections if config.kv_lora_rank else projections)(w, h, batch.positions, config)
        is_global = config.global_every and (i + 1) % config.global_every == 0
        out = attend(q, k, v, batch.segments, 0 if is_global else config.window, w.sinks)
        x = x + jnp.einsum("btnh,nhd->btd", out, w.w_o) + (w.bias_o if config.output_bias else 0)
        h = norm(x, w.norm_mlp, config.norm_eps)
        if is_dense or not config.num_experts:
            x = x + swiglu(h, w.w_gate, w.w_up, w.w_down)
        else:
            y, losses, tokens = mixture(w, h, config)
            x, auxiliary, loads = x + y, auxiliary + losses, [*loads, tokens]
    x = norm(x, params.norm, config.norm_eps)
    out = x @ (params.embed if config.tied_embeddings else params.unembed).T
    out = config.logit_soft_cap * jnp.tanh(out / config.logit_soft_cap) if config.logit_soft_cap else out
    return out, auxiliary, loads


def logits(params, batch, config):
    return forward(params, batch, config)[0]


def loss(params, batch, config):
    out, auxiliary, _ = forward(params, batch, config)
    lse = jax.nn.logsumexp(out, -1)
    label = jnp.take_along_axis(out, batch.targets[..., None], -1)[..., 0]
    mean = jnp.sum(batch.loss_weights * (lse - label + config.z_loss * lse**2)) / jnp.sum(batch.loss_weights)
    return mean + auxiliary


# -- training


def learning_rate(count, config):
    """The rate of an update behind `count` others: a linear warm-up, then half a cosine (arXiv:1608.03983)."""
    warmup, n = int(config.warmup_ratio * config.steps), min(count + 1, config.steps)
    if n < warmup:
        return config.learning_rate * n / warmup
    cosine = (1 + math.cos(math.pi * (n - warmup) / (config.steps - warmup))) / 2
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine)


def decays(name):
    """Whether weight decay applies to a parameter of this name: to matrices, not to norms, biases and sinks."""
    return not name.startswith(("norm", "bias", "sinks", "selection_bias"))


def rms(x):
    return np.sqrt(np.mean(x**2))


def adamw(w, g, m, v, n, config):
    """(step, first moment, second moment) of update n, from 1 (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    m = config.beta1 * m.astype(np.float64) + (1 - config.beta1) * g
    v = config.beta2 * v + (1 - config.beta2) * g**2
    step = m / (1 - config.beta1**n) / (np.sqrt(v / (1 - config.beta2**n)) + 1e-8)
    return step, m.astype(jnp.dtype(config.mu_dtype)), v


def adafactor(w, g, m, v, n, config):
    """As adamw; from dims of 128 on v is known by its row and column means alone (Shazeer & Stern 2018)."""
    beta = 1 - n**-0.8
    v = beta * v + (1 - beta) * (g**2 + 1e-30)
    estimate, largest = v, sorted(range(w.ndim), key=lambda dim: w.shape[dim])[-2:]
    if len(largest) == 2 and min(w.shape[dim] for dim in largest) >= 128:
        row, column = largest
        mean = lambda *dims: np.mean(v, dims, keepdims=True)
        estimate = mean(column) * mean(row) / mean(row, column)
    step = g / np.sqrt(estimate)
    return step / np.maximum(1, rms(step)) * np.maximum(1e-3, rms(w)), m, v


def sgd(w, g, m, v, n, config):
    m = config.beta1 * m + g
    return m, m, v


def update(params, grads, state, config):
    """(params, state) after an update. State: the number of updates, two moments of each parameter; None is the start.

    Gradients are scaled to a global norm of `clip_norm` at most (Pascanu et al. 2013), and decay is decoupled.
    """
    paths, treedef = jax.tree.flatten_with_path(params)
    grads = [np.float64(g) for g in jax.tree.leaves(grads)]
    count, ms, vs = state or (0, [0 * g for g in grads], [0 * g for g in grads])
    rate, step_of = learning_rate(count, config), {"adamw": adamw, "adafactor": adafactor, "sgd": sgd}
    norm = np.sqrt(sum(np.sum(g**2) for g in grads))
    scale = min(1, config.clip_norm / norm) if config.clip_norm else 1
    new = []
    for (path, w), g, m, v in zip(paths, grads, ms, vs, strict=True):
        w = np.float64(w)
        step, m, v = step_of[config.optimizer](w, g * scale, m, v, count + 1, config)
        decay = config.weight_decay if config.optimizer != "sgd" and decays(path[-1].name) else 0
        new.append((np.float32(w - rate * (step + decay * w)), m, v))
    params, ms, vs = zip(*new, strict=True)
    return treedef.unflatten(params), (count + 1, ms, vs)
