"""Chapter 0: the model and its training, plainly: one device, whole arrays, a Python loop over layers.

**Idea.** This is what all other files compute, with nothing that makes it fast or spreads it over devices. It imports
no other file of the project, so tests hold the fast paths against it: the loss, its gradients and the update are the
same up to rounding, on every mesh (tests/test_parallel.py, tests/test_train.py).

**Formula.** A decoder (Vaswani et al. 2017, arXiv:1706.03762; RMSNorm before each block, arXiv:1910.07467), for tokens
x_0 = embed[tokens]:

    x = x + attention(norm(x)) @ w_o           x = x + mlp(norm(x))             once a layer
    logits = norm(x) @ unembed^T               loss = mean of logsumexp(logits) - logits[target]

**Layout.** Dims in einsums: b sequences, t queries and s keys (positions), d model, n heads, h dims of a head
(u of its value), e experts, m dims of an expert. `params` has the arrays of parameters.py: `embed`, `norm`, `unembed`,
and `layers`, whose arrays have one row a layer (and `dense_layers`, those before the first mixture). `batch` has
`tokens`, `targets`, `positions`, `segments` (the document of a token: attention stays inside it) and `loss_weights`,
all [b, t].

**Left out.** The computation dtype (all is float32 or more), FP8 and dropped tokens: these change values.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

# -- attention


def norm(x, scale, eps):
    """RMSNorm over the last dim."""
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


def rotate(x, positions, config):
    """RoPE (Su et al. 2021, arXiv:2104.09864): rotates each pair (i, i + H/2) of a head by position * frequency_i.

    With `rope_scaling` low frequencies are divided by it, and those between are blended (Llama 3.1, arXiv:2407.21783).
    """
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
    """softmax(q k^T / sqrt(H)) v for all heads; N/K query heads share a key/value head.

    A query sees the keys of its own document up to itself, with a window the last `window` of them. A sink is one more
    key that every query sees, with a learned score and the value 0.
    """
    repeat = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, repeat, 2), jnp.repeat(v, repeat, 2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    seen = (j <= i) & ((i - j < window) if window else True)
    same_document = segments[:, None, :, None] == segments[:, None, None, :]
    scores = jnp.where(seen & same_document, scores, -jnp.inf)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        return jnp.einsum("bnts,bsnu->btnu", jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)[..., :-1], v)
    return jnp.einsum("bnts,bsnu->btnu", jax.nn.softmax(scores, -1), v)


def projections(w, h, positions, config):
    """Queries, keys and values of plain (grouped-query) attention."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, m) for m in (w.w_q, w.w_k, w.w_v))
    if config.qkv_bias:
        q, k, v = q + w.bias_q, k + w.bias_k, v + w.bias_v
    if config.qk_norm:
        q, k = norm(q, w.norm_q, config.norm_eps), norm(k, w.norm_k, config.norm_eps)
    return rotate(q, positions, config), rotate(k, positions, config), v


def latent_projections(w, h, positions, config):
    """Queries, keys and values of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    They are made from small latents. The last dims of a head are rotated, and all heads share these dims of the key.
    """
    up = lambda latent, scale, m: jnp.einsum("btc,cnh->btnh", norm(latent, scale, config.norm_eps), m)
    if config.q_lora_rank:
        q = up(h @ w.w_q_down, w.norm_q_latent, w.w_q_up)
    else:
        q = jnp.einsum("btd,dnh->btnh", h, w.w_q)
    latent = h @ w.w_kv_down
    k, v = (up(latent, w.norm_kv_latent, m) for m in (w.w_k_up, w.w_v_up))
    plain, rotated = q[..., : config.head_dim], rotate(q[..., config.head_dim :], positions, config)
    shared_key = jnp.repeat(rotate((h @ w.w_k_rope)[:, :, None], positions, config), config.num_heads, 2)
    return jnp.concatenate([plain, rotated], -1), jnp.concatenate([k, shared_key], -1), v


# -- MLP and mixture of experts


def swiglu(x, gate, up, down):
    """(silu(x @ gate) * (x @ up)) @ down (Shazeer 2020, arXiv:2002.05202)."""
    gate = x @ gate
    return (gate / (1 + jnp.exp(-gate)) * (x @ up)) @ down


def mixture(w, h, config):
    """A layer's mixture of experts: (y, auxiliary losses, tokens by expert).

    Every expert computes every token; the router's weights, zero for all but `experts_per_token` experts, choose.
    """
    x = h.reshape(-1, config.model_dim)
    logits = x @ w.w_router + (w.bias_router if config.expert_bias else 0)
    scores = jax.nn.softmax(logits, -1) if config.router_scores == "softmax" else 1 / (1 + jnp.exp(-logits))

    # The choice: the best experts of the best groups. A group is as good as the sum of its two best experts.
    choice = scores + (w.selection_bias if config.selection_bias else 0)
    groups = choice.reshape(len(x), config.router_groups, -1)
    group_scores = jnp.sort(groups, -1)[..., -2:].sum(-1)
    allowed = jnp.argsort(jnp.argsort(-group_scores, stable=True), stable=True) < config.router_groups_kept
    choice = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(choice.shape)
    rank = jnp.argsort(jnp.argsort(-choice, stable=True), stable=True)
    chosen = rank < config.experts_per_token
    weights = jnp.where(chosen, scores, 0)
    weights = weights / weights.sum(-1, keepdims=True) if config.renormalise else weights

    each = lambda all_experts: all_experts.reshape(config.num_experts, config.model_dim, -1)
    gate = jnp.einsum("td,edm->etm", x, each(w.expert_gate))
    up = jnp.einsum("td,edm->etm", x, each(w.expert_up))
    if config.expert_bias:
        gate, up = gate + w.bias_expert_gate[:, None], up + w.bias_expert_up[:, None]
    if limit := config.swiglu_limit:  # gpt-oss
        gate = jnp.minimum(gate, limit)
        product = gate / (1 + jnp.exp(-1.702 * gate)) * (jnp.clip(up, -limit, limit) + 1)
    else:
        product = gate / (1 + jnp.exp(-gate)) * up
    y = jnp.einsum("etm,edm->etd", product, each(w.expert_down))
    y = y + (w.bias_expert_down[:, None] if config.expert_bias else 0)
    y = jnp.einsum("etd,te->td", y, weights * config.router_scale)
    if config.num_shared_experts:
        y = y + swiglu(x, w.shared_gate, w.shared_up, w.shared_down)

    # Switch's load-balance loss (arXiv:2101.03961) and the router's z-loss (arXiv:2202.08906).
    share, mean = chosen.sum(0) / chosen.sum(), (scores / scores.sum(-1, keepdims=True)).mean(0)
    auxiliary = config.load_balance_loss * config.num_experts * jnp.sum(share * mean)
    auxiliary += config.router_z_loss * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    return y.reshape(h.shape), auxiliary, chosen.sum(0)


# -- the model


def forward(params, batch, config):
    """(logits [b, t, V], auxiliary losses, [tokens by expert] of the layers with experts)."""
    x, auxiliary, loads = params.embed[batch.tokens], 0.0, []
    for i in range(config.num_layers):
        is_dense = i < config.num_dense_layers
        stack, row = (params.dense_layers, i) if is_dense else (params.layers, i - config.num_dense_layers)
        w = jax.tree.map(lambda a, row=row: a[row], stack)

        h = norm(x, w.norm_attention, config.norm_eps)
        q, k, v = (latent_projections if config.kv_lora_rank else projections)(w, h, batch.positions, config)
        is_global = config.global_every and (i + 1) % config.global_every == 0
        out = attend(q, k, v, batch.segments, 0 if is_global else config.window, w.sinks)
        x = x + jnp.einsum("btnu,nud->btd", out, w.w_o) + (w.bias_o if config.output_bias else 0)

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
    """[b, t, V]."""
    return forward(params, batch, config)[0]


def loss(params, batch, config):
    """The mean over tokens, weighted by `batch.loss_weights`, of cross entropy and z-loss; and auxiliary losses."""
    out, auxiliary, _ = forward(params, batch, config)
    lse = jax.nn.logsumexp(out, -1)
    target = jnp.take_along_axis(out, batch.targets[..., None], -1)[..., 0]
    mean = jnp.sum(batch.loss_weights * (lse - target + config.z_loss * lse**2)) / jnp.sum(batch.loss_weights)
    return mean + auxiliary


# -- training


def learning_rate(count, config):
    """The rate of the update after `count` others: a linear warm-up, then half a cosine (arXiv:1608.03983)."""
    warmup, n = int(config.warmup_ratio * config.steps), min(count + 1, config.steps)
    if n < warmup:
        return config.learning_rate * n / warmup
    cosine = (1 + math.cos(math.pi * (n - warmup) / (config.steps - warmup))) / 2
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine)


def decays(name):
    """Whether weight decay applies to a parameter of this name: to matrices, not to norms, biases and sinks."""
    return not name.startswith(("norm", "bias", "sinks", "selection_bias"))


def rms(x):
    """The root of the mean square."""
    return np.sqrt(np.mean(x**2))


def adamw(w, g, m, v, n, config):
    """(step, first moment, second moment) of update n, from 1 (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    m = config.beta1 * m.astype(np.float64) + (1 - config.beta1) * g
    v = config.beta2 * v + (1 - config.beta2) * g**2
    step = m / (1 - config.beta1**n) / (np.sqrt(v / (1 - config.beta2**n)) + 1e-8)
    return step, m.astype(jnp.dtype(config.mu_dtype)), v


def adafactor(w, g, m, v, n, config):
    """As adamw, without a first moment (Shazeer & Stern 2018, arXiv:1804.04235).

    Of a matrix whose dims are 128 or more the second moment is estimated from its row means and its column means.
    """
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
    """As adamw: gradient descent with momentum."""
    m = config.beta1 * m + g
    return m, m, v


def update(params, grads, state, config):
    """(params, state) after an update. `state`: the number of updates, both moments of each parameter; None at first.

    Gradients are scaled to a global norm of `clip_norm` at most (Pascanu et al. 2013, arXiv:1211.5063). Weight decay is
    decoupled from them.
    """
    paths, treedef = jax.tree.flatten_with_path(params)
    grads = [np.float64(g) for g in jax.tree.leaves(grads)]
    count, ms, vs = state or (0, [0 * g for g in grads], [0 * g for g in grads])
    rate, optimizer = learning_rate(count, config), {"adamw": adamw, "adafactor": adafactor, "sgd": sgd}
    norm = np.sqrt(sum(np.sum(g**2) for g in grads))
    scale = min(1, config.clip_norm / norm) if config.clip_norm else 1
    new = []
    for (path, w), g, m, v in zip(paths, grads, ms, vs, strict=True):
        w = np.float64(w)
        step, m, v = optimizer[config.optimizer](w, g * scale, m, v, count + 1, config)
        decay = config.weight_decay if config.optimizer != "sgd" and decays(path[-1].name) else 0
        new.append((np.float32(w - rate * (step + decay * w)), m, v))
    params, ms, vs = zip(*new, strict=True)
    return treedef.unflatten(params), (count + 1, ms, vs)
