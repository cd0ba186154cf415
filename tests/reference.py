"""The same model the plain way: one device, whole arrays, a Python loop, all logits at once, no project code."""

import jax
import jax.numpy as jnp


def norm(x, scale, eps):
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


def rotate(x, positions, config):
    half = config.head_dim // 2
    freq = jnp.array([config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)], jnp.float32)
    if config.rope_scaling != 1:
        wavelength = 2 * jnp.pi / freq
        smooth = (config.rope_original_len / wavelength - 1) / 3
        blended = (1 - smooth) * freq / config.rope_scaling + smooth * freq
        low, high = config.rope_original_len, config.rope_original_len / 4
        freq = jnp.where(wavelength > low, freq / config.rope_scaling, jnp.where(wavelength < high, freq, blended))
    angle = positions[:, :, None, None] * freq
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def attend(q, k, v, segments, window):
    """All heads, one key/value head a query head."""
    repeat = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, repeat, 2), jnp.repeat(v, repeat, 2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    mask = (
        (j <= i) & ((i - j < window) if window else True) & (segments[:, None, :, None] == segments[:, None, None, :])
    )
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1), v)


def logits(params, batch, config):
    x = params.embed[batch.tokens]
    for i in range(config.num_layers):
        w = jax.tree.map(lambda a, i=i: a[i], params.layers)
        h = norm(x, w.norm_attention, config.norm_eps)
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, m) for m in (w.w_q, w.w_k, w.w_v))
        if config.qkv_bias:
            q, k, v = q + w.bias_q, k + w.bias_k, v + w.bias_v
        if config.qk_norm:
            q, k = norm(q, w.norm_q, config.norm_eps), norm(k, w.norm_k, config.norm_eps)
        q, k = rotate(q, batch.positions, config), rotate(k, batch.positions, config)
        is_global = config.global_every and (i + 1) % config.global_every == 0
        out = attend(q, k, v, batch.segments, 0 if is_global else config.window)
        x = x + jnp.einsum("btnh,nhd->btd", out, w.w_o)
        h = norm(x, w.norm_mlp, config.norm_eps)
        gate = h @ w.w_gate
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ w.w_up)) @ w.w_down
    x = norm(x, params.norm, config.norm_eps)
    out = x @ (params.embed if config.tied_embeddings else params.unembed).T
    return config.logit_soft_cap * jnp.tanh(out / config.logit_soft_cap) if config.logit_soft_cap else out


def loss(params, batch, config):
    out = logits(params, batch, config)
    lse = jax.nn.logsumexp(out, -1)
    label = jnp.take_along_axis(out, batch.targets[..., None], -1)[..., 0]
    return jnp.sum(batch.loss_weights * (lse - label + config.z_loss * lse**2)) / jnp.sum(batch.loss_weights)
