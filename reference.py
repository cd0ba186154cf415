"""Chapter 0: the model and its training on one device, without sharding, in the plainest code.

**Idea.** This file defines the values that the fast and sharded code must reproduce. Arrays are whole, and a Python
loop runs over the layers. The file imports no other file of the project. The tests compare the loss, its gradients and
the parameter updates of the other code with those of this file, on many meshes. They must agree up to rounding
(tests/test_parallel.py, tests/test_train.py).

**Formula.** The model is a decoder (Vaswani et al. 2017, arXiv:1706.03762) with RMSNorm before each block
(arXiv:1910.07467). For tokens x_0 = embed[tokens]:

    for each layer:    x = x + attention(norm(x)) @ w_o,    then    x = x + mlp(norm(x))
    logits = norm(x) @ unembed^T
    loss = mean over tokens of (logsumexp(logits) - logits[target]), in nats per token

`loss` also has the options of the project: weights of the tokens, z-loss, and the auxiliary losses of the router.

**Layout.** Einsums and docstrings use these letters for dims:

    b sequences   t query positions   s key positions   d model   V vocabulary
    n query heads   k key/value heads   h dims of a head's queries and keys   u dims of its values   c dims of a latent
    e experts   m hidden dims of an expert

`params` is a parameters.Params. Each array in `layers` stacks one weight of the layers along its first dim. If dense
layers precede those with experts, `dense_layers` holds them. If global layers have heads of their own, `global_layers`
holds them, and `layers` the others. If the last layers share keys and values, `kv_shared_layers` holds the local ones
of these, and `kv_shared_global_layers` the global ones. `w` has the weights of one layer.

`batch` is a data.Batch of arrays [b, t]: `tokens`, `targets`, `positions`, `segments` and `loss_weights`. A segment is
the number of a token's document, and attention stays within a document. `config` is a config.Config.

**Left out.** A lower precision than float32 for the computation, FP8, and experts that drop tokens. These change the
values, so this file does not have them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

# -- norm and attention


def norm(x, scale, eps):
    """Returns RMSNorm of x over its last dim, in float32 and the shape of x. `scale` has the size of that dim."""
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


def rotate(x, positions, config, is_global=False):
    """Returns x [b, t, heads, h] with rotary positions, RoPE (Su et al. 2021, arXiv:2104.09864).

    Dims i and i + h/2 of a head are a pair, which is rotated by the angle position * freq_i, in radians.

    For a longer context a frequency is divided by `rope_scaling`, stays, or is blended between the two. In Llama 3.1
    (arXiv:2407.21783) it is divided if its wavelength is longer than `rope_original_len` tokens, and stays if it is
    shorter than a quarter of that. In YaRN (arXiv:2309.00071) the number i of the pair decides. `pair_with(n)` is the
    one with n periods in the original context. YaRN also makes x longer; for DeepSeek `attend` does so.

    If `global_rope_theta` is not 0, it is the base of global layers. All of this is then for them alone, and the other
    layers rotate by theta^(-i / (h/2)). Only the first `rope_fraction` of the pairs rotate.
    """
    half, scaling, original = x.shape[-1] // 2, config.rope_scaling, config.rope_original_len
    theta, is_plain = config.rope_theta, config.global_rope_theta and not is_global
    if config.global_rope_theta and is_global:
        theta = config.global_rope_theta
    freq = jnp.array([theta ** (-i / half) for i in range(half)], jnp.float32)
    if is_plain:
        pass
    elif config.rope_type == "linear":
        freq = freq / scaling
    elif config.rope_type == "llama3":
        wavelength = 2 * jnp.pi / freq
        smooth = (original / wavelength - 1) / 3  # 0 at the long limit, 1 at the short one
        blended = (1 - smooth) * freq / scaling + smooth * freq
        freq = jnp.where(wavelength > original, freq / scaling, jnp.where(wavelength < original / 4, freq, blended))
    elif config.rope_type == "yarn":
        pair_with = lambda n: half * math.log(original / (n * 2 * math.pi)) / math.log(theta)
        low, high = pair_with(config.rope_beta_fast), pair_with(config.rope_beta_slow)
        low, high = (math.floor(low), math.ceil(high)) if config.rope_truncate else (low, high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        divided = np.array([min(max((i - low) / max(high - low, 0.001), 0), 1) for i in range(half)])
        freq = divided * freq / scaling + (1 - divided) * freq
        x = x * yarn_magnitude(config.rope_mscale, config) / yarn_magnitude(config.rope_mscale_all_dim, config)
    freq = freq if is_plain else jnp.where(jnp.arange(half) < int(config.rope_fraction * half), freq, 0)
    angle = positions[:, :, None, None] * freq
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def yarn_magnitude(mscale, config):
    """Returns the factor by which YaRN lengthens queries and keys; 1 for an `mscale` of 0."""
    return 0.1 * mscale * math.log(config.rope_scaling) + 1


def attend(q, k, v, segments, window, config, sinks=None):
    """Returns softmax(q k^T / sqrt(h)) v, causal and within documents, as [b, t, n, u].

    Args:
      q, k, v: queries [b, t, n, h], keys [b, s, k, h] and values [b, s, k, u], with s = t. Each key/value head serves
        n/k consecutive query heads.
      segments: [b, t], the document of each position. A query sees only keys of its own document, none later than
        itself.
      window: if it is not 0, a query sees at most the `window` positions that end with its own.
      sinks: [n] or None. A sink is one more key of each head, with a learned score and the value 0.

    In `config`, an `attention_scale` that is not 0 replaces 1 / sqrt(h). An `attention_soft_cap` c that is not 0 bounds
    the scores: they become c * tanh(scores / c).
    """
    repeat = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, repeat, 2), jnp.repeat(v, repeat, 2)  # now n heads each
    scale = config.attention_scale or 1 / jnp.sqrt(q.shape[-1])
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale * yarn_magnitude(config.rope_mscale_all_dim, config) ** 2
    if cap := config.attention_soft_cap:
        scores = cap * jnp.tanh(scores / cap)
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    seen = (j <= i) & ((i - j < window) if window else True)
    same_document = segments[:, None, :, None] == segments[:, None, None, :]
    scores = jnp.where(seen & same_document, scores, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, -1)
    else:
        sinks = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        # The last weight belongs to the sink. Its value is 0, so the weight is dropped after the softmax.
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)[..., :-1]
    return jnp.einsum("bnts,bsnu->btnu", weights, v)


def projections(w, h, positions, config, is_global):
    """Returns q [b, t, n, h], k [b, t, k, h] and v [b, t, k, u] of grouped-query attention, from h [b, t, d].

    k and v are None in a layer that shares those of another one.
    """
    project = lambda matrix: jnp.einsum("btd,dnh->btnh", h, matrix)
    if w.w_k is None:
        q = project(w.w_q) + (w.bias_q if config.qkv_bias else 0)
        q = norm(q, w.norm_q, config.norm_eps) if config.qk_norm else q
        return rotate(q, positions, config, is_global), None, None
    q, k = project(w.w_q), project(w.w_k)
    v, bias_v = (k, w.bias_k) if w.w_v is None else (project(w.w_v), w.bias_v)  # without w_v keys are values, too
    if config.qkv_bias:
        q, k, v = q + w.bias_q, k + w.bias_k, v + bias_v
    v = norm(v, 1, config.norm_eps) if config.value_norm else v
    if config.qk_norm:
        q, k = norm(q, w.norm_q, config.norm_eps), norm(k, w.norm_k, config.norm_eps)
    return rotate(q, positions, config, is_global), rotate(k, positions, config, is_global), v


def latent_projections(w, h, positions, config, is_global):
    """Returns q, k and v of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), from h [b, t, d].

    q and k are [b, t, n, head_dim + rope_head_dim], v is [b, t, n, u]. Keys and values are projected up from a latent
    [b, t, c]; queries have a latent of their own if `q_lora_rank` is not 0. RoPE rotates the last `rope_head_dim` dims
    of queries and keys. All heads share these dims of the key.
    """
    up = lambda latent, scale, matrix: jnp.einsum("btc,cnh->btnh", norm(latent, scale, config.norm_eps), matrix)
    if config.q_lora_rank:
        q = up(h @ w.w_q_down, w.norm_q_latent, w.w_q_up)
    else:
        q = jnp.einsum("btd,dnh->btnh", h, w.w_q)
    latent = h @ w.w_kv_down
    k, v = (up(latent, w.norm_kv_latent, matrix) for matrix in (w.w_k_up, w.w_v_up))
    plain, rotated = q[..., : config.head_dim], rotate(q[..., config.head_dim :], positions, config, is_global)
    shared_key = rotate((h @ w.w_k_rope)[:, :, None], positions, config, is_global)  # one head
    shared_key = jnp.repeat(shared_key, config.num_heads, 2)
    return jnp.concatenate([plain, rotated], -1), jnp.concatenate([k, shared_key], -1), v


# -- MLP and mixture of experts


def activate(gate, config):
    """Returns silu(gate), or with `mlp_activation` gelu the tanh approximation of GELU (arXiv:1606.08415)."""
    if config.mlp_activation == "gelu":
        return gate / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return gate / (1 + jnp.exp(-gate))


def gated_mlp(x, gate, up, down, config):
    """Returns (activate(x @ gate) * (x @ up)) @ down, in the shape of x (Shazeer 2020, arXiv:2002.05202)."""
    return (activate(x @ gate, config) * (x @ up)) @ down


def mixture(w, x, h, config):
    """Applies the mixture of experts of one layer to h [b, t, d], the normed residual stream x.

    Every expert computes every token. The result of a token is the sum over experts, weighted by the router. All but
    `experts_per_token` experts have the weight zero. In the einsums here t is the number of all tokens of the batch.
    With `expert_norms` the router and the routed experts have norms of x of their own in place of h.

    Returns:
      y, the result, in the shape of h.
      auxiliary, a scalar: the sum of the load-balance loss and the router's z-loss, each times its weight in `config`.
      loads [e], the number of tokens that chose each expert.
    """
    rank = lambda x: jnp.argsort(jnp.argsort(-x, stable=True), stable=True)  # in the last dim; 0 is the largest
    to_router = to_experts = h
    if config.expert_norms:
        to_router, to_experts = norm(x, w.norm_router, config.norm_eps), norm(x, w.norm_experts, config.norm_eps)
    x, h = to_experts.reshape(-1, config.model_dim), h.reshape(-1, config.model_dim)
    logits = to_router.reshape(-1, config.model_dim) @ w.w_router + (w.bias_router if config.expert_bias else 0)
    scores = jax.nn.softmax(logits, -1) if config.router_scores == "softmax" else 1 / (1 + jnp.exp(-logits))

    # Each token chooses the best experts of its best groups. The score of a group is the sum of its two best experts.
    # The selection bias changes which experts are chosen, but not their weights.
    choice = scores + (w.selection_bias if config.selection_bias else 0)
    groups = choice.reshape(len(x), config.router_groups, -1)
    group_scores = jnp.sort(groups, -1)[..., -2:].sum(-1)
    allowed = rank(group_scores) < config.router_groups_kept
    choice = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(choice.shape)
    chosen = rank(choice) < config.experts_per_token
    weights = jnp.where(chosen, scores, 0)
    weights = weights / weights.sum(-1, keepdims=True) if config.renormalise else weights
    weights = weights * w.expert_scale if config.expert_scale else weights

    # The matrices of all experts are stored as one, [e*d, m]. The down projection is stored transposed.
    by_expert = lambda matrix: matrix.reshape(config.num_experts, config.model_dim, -1)
    gate = jnp.einsum("td,edm->etm", x, by_expert(w.expert_gate))
    up = jnp.einsum("td,edm->etm", x, by_expert(w.expert_up))
    if config.expert_bias:
        gate, up = gate + w.bias_expert_gate[:, None], up + w.bias_expert_up[:, None]
    if limit := config.swiglu_limit:  # the SwiGLU of gpt-oss: clamped, gate * sigmoid(1.702 * gate) * (up + 1)
        gate = jnp.minimum(gate, limit)
        product = gate / (1 + jnp.exp(-1.702 * gate)) * (jnp.clip(up, -limit, limit) + 1)
    else:
        product = activate(gate, config) * up
    y = jnp.einsum("etm,edm->etd", product, by_expert(w.expert_down))
    y = y + (w.bias_expert_down[:, None] if config.expert_bias else 0)
    y = jnp.einsum("etd,te->td", y, weights * config.router_scale)
    y = norm(y, w.norm_experts_out, config.norm_eps) if config.expert_norms else y
    if config.num_shared_experts:
        shared = gated_mlp(h, w.shared_gate, w.shared_up, w.shared_down, config)
        y = y + (norm(shared, w.norm_shared_out, config.norm_eps) if config.expert_norms else shared)

    # Switch's load-balance loss (arXiv:2101.03961) and the router's z-loss (arXiv:2202.08906).
    token_share = chosen.sum(0) / chosen.sum()
    mean_score = (scores / scores.sum(-1, keepdims=True)).mean(0)
    auxiliary = config.load_balance_loss * config.num_experts * jnp.sum(token_share * mean_score)
    auxiliary += config.router_z_loss * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    return y.reshape(to_experts.shape), auxiliary, chosen.sum(0)


# -- the model


def embed(params, tokens, config):
    """Returns the embeddings of tokens [b, t], as [b, t, d]."""
    x = params.embed[tokens]
    return x * math.sqrt(config.model_dim) if config.embedding_scale else x


def layer(stack, row, x, i, batch, config, inputs=None, shared=None):
    """Runs layer i of the model, which is the given row of a stack of layers, on x [b, t, d].

    Args:
      inputs: of all layers, [b, t, L, p], those of `layer_inputs`.
      shared: {whether global: (keys, values)} of the last layers that have their own, to which this layer adds them.

    Returns its result [b, t, d], its auxiliary loss, and a list with the loads of its experts, if it has experts.
    """
    w = jax.tree.map(lambda a: a[row], stack)

    h = norm(x, w.norm_attention, config.norm_eps)
    is_global = config.global_every and (i + 1) % config.global_every == 0
    project = latent_projections if config.kv_lora_rank else projections
    q, k, v = project(w, h, batch.positions, config, is_global)
    if shared is not None:
        k, v = shared[is_global] = shared[is_global] if k is None else (k, v)
    context = attend(q, k, v, batch.segments, 0 if is_global else config.window, config, w.sinks)
    out = jnp.einsum("btnu,nud->btd", context, w.w_o) + (w.bias_o if config.output_bias else 0)
    x = x + (norm(out, w.norm_attention_out, config.norm_eps) if config.post_norms else out)

    h = norm(x, w.norm_mlp, config.norm_eps)
    auxiliary, loads = 0.0, []
    if w.w_router is None:
        out = gated_mlp(h, w.w_gate, w.w_up, w.w_down, config)
    else:
        out, auxiliary, loads_of_experts = mixture(w, x, h, config)
        loads = [loads_of_experts]
    x = x + (norm(out, w.norm_mlp_out, config.norm_eps) if config.post_norms else out)
    if config.ple_dim:
        gated = activate(x @ w.w_ple_gate, config) * inputs[:, :, i]
        x = x + norm(gated @ w.w_ple_out, w.norm_ple_out, config.norm_eps)
    return x * jax.lax.stop_gradient(w.layer_scale) if config.layer_scale else x, auxiliary, loads


def layer_inputs(params, tokens, x, config):
    """Returns what each layer has of each token beside x, the model's embeddings [b, t, d]: [b, t, L, p].

    These are the per-layer embeddings of Gemma 4 E2B; None without `ple_dim`.
    """
    if not config.ple_dim:
        return None
    rows = params.ple_embed[tokens].reshape(*tokens.shape, config.num_layers, config.ple_dim)
    context = jnp.einsum("btd,dyp->btyp", x, params.ple_project) / math.sqrt(config.model_dim)
    context = norm(context, params.norm_ple, config.norm_eps)
    return (rows * math.sqrt(config.ple_dim) + context) / math.sqrt(2)


def unembed(params, x, config):
    """Returns the logits [b, t, V] of normed results x [b, t, d]."""
    out = x @ (params.embed if config.tied_embeddings else params.unembed).T
    return config.logit_soft_cap * jnp.tanh(out / config.logit_soft_cap) if config.logit_soft_cap else out


def place(params, i, config):
    """Returns (the stack of layers that has layer i of the model, its row there)."""
    if params.global_layers is None:
        dense = config.num_dense_layers
        return (params.dense_layers, i) if i < dense else (params.layers, i - dense)
    stacks, first = (params.layers, params.global_layers), config.num_layers - config.num_kv_shared_layers
    if i >= first:  # the last layers share keys and values
        stacks, i = (params.kv_shared_layers, params.kv_shared_global_layers), i - first
    period, number = divmod(i, config.global_every)  # the last layer of a period is a global one
    is_global = number == config.global_every - 1
    return (stacks[1], period) if is_global else (stacks[0], i - period)


def hidden_states(params, batch, config):
    """Returns the normed result of the last layer [b, t, d], and the auxiliary losses and loads as in `forward`."""
    x, auxiliary, loads = embed(params, batch.tokens, config), 0.0, []
    inputs, shared = layer_inputs(params, batch.tokens, x, config), {}
    for i in range(config.num_layers):
        stack, row = place(params, i, config)
        x, more_auxiliary, more_loads = layer(stack, row, x, i, batch, config, inputs, shared)
        auxiliary, loads = auxiliary + more_auxiliary, loads + more_loads
    return norm(x, params.norm, config.norm_eps), auxiliary, loads


def multi_token_prediction(params, x, batch, config):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): a layer predicts the token after the next.

    It starts from the model's result x [b, t, d] for a token and the embedding of the next one.

    Returns its logits [b, t, V], and its auxiliary loss and loads as `layer` does.
    """
    hidden = norm(x, params.norm_mtp_hidden, config.norm_eps) @ params.w_mtp_hidden
    following = norm(embed(params, batch.targets, config), params.norm_mtp_embed, config.norm_eps) @ params.w_mtp_embed
    x, auxiliary, loads = layer(params.mtp_layers, 0, hidden + following, config.num_layers, batch, config)
    return unembed(params, norm(x, params.norm_mtp, config.norm_eps), config), auxiliary, loads


def forward(params, batch, config):
    """Runs the model on a batch.

    Returns:
      logits [b, t, V].
      auxiliary, a scalar: the sum of the auxiliary losses of all layers.
      loads, a list: for each layer with experts, the number of tokens that chose each expert, [e].
    """
    x, auxiliary, loads = hidden_states(params, batch, config)
    return unembed(params, x, config), auxiliary, loads


def logits(params, batch, config):
    """Returns the logits of each position's next token, [b, t, V]."""
    return forward(params, batch, config)[0]


def loss(params, batch, config):
    """Returns the loss in nats per token, a scalar.

    It is the mean over tokens of cross entropy and z-loss, weighted by `batch.loss_weights`. The auxiliary losses are
    added to it, and with `mtp` also `mtp_loss` times the cross entropy of the tokens after the next.
    """
    x, auxiliary, _ = hidden_states(params, batch, config)
    weights = batch.loss_weights / jnp.sum(batch.loss_weights)
    total = mean_loss(unembed(params, x, config), batch.targets, weights, config.z_loss) + auxiliary
    if config.mtp and config.mtp_loss:
        out, auxiliary, _ = multi_token_prediction(params, x, batch, config)
        weights = jnp.where(batch.next_targets < 0, 0, weights)
        total += config.mtp_loss * mean_loss(out, batch.next_targets, weights, 0) + auxiliary
    return total


def mean_loss(out, targets, weights, z_loss):
    """Returns the cross entropy and z-loss of logits [b, t, V], added up with the weights [b, t]."""
    lse = jax.nn.logsumexp(out, -1)
    target = jnp.take_along_axis(out, targets[..., None], -1)[..., 0]
    return jnp.sum(weights * (lse - target + z_loss * lse**2))


# -- training


def learning_rate(count, config):
    """Returns the learning rate of update count + 1: a linear warm-up, then one of three schedules.

    cosine falls by half a cosine (arXiv:1608.03983). wsd is stable and decays at the end, linearly or by 1 - sqrt
    (arXiv:2404.06395, arXiv:2405.18392). constant stays.
    """
    warmup = int(config.warmup_ratio * config.steps)
    n = min(count + 1, config.steps)
    if n < warmup:
        return config.learning_rate * n / warmup
    left = 1.0
    if config.schedule == "cosine":
        left = (1 + math.cos(math.pi * (n - warmup) / (config.steps - warmup))) / 2
    if config.schedule == "wsd":
        decay = int(config.decay_ratio * config.steps)
        progress = max(0, n - (config.steps - decay)) / decay
        left = 1 - (math.sqrt(progress) if config.decay_shape == "1-sqrt" else progress)
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left)


def decays(name):
    """Returns whether weight decay applies to a parameter of this name: not to norms, biases, sinks and scales."""
    return not name.startswith(("norm", "bias", "sinks", "selection_bias", "layer_scale", "expert_scale"))


def rms(x):
    """Returns the root mean square of all elements, a scalar."""
    return np.sqrt(np.mean(x**2))


def adamw(w, g, m, v, n, config):
    """Computes update n of AdamW for one parameter; the first has n = 1 (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Args:
      w, g, m, v: the parameter, its gradient after clipping, and its first and second moment, all of one shape.

    Returns:
      The step, before the learning rate and weight decay are applied; the new m, in `mu_dtype`; the new v.
    """
    m = config.beta1 * m.astype(np.float64) + (1 - config.beta1) * g
    v = config.beta2 * v + (1 - config.beta2) * g**2
    step = m / (1 - config.beta1**n) / (np.sqrt(v / (1 - config.beta2**n)) + 1e-8)
    return step, m.astype(jnp.dtype(config.mu_dtype)), v


def adafactor(w, g, m, v, n, config):
    """Computes update n of Adafactor (Shazeer & Stern 2018, arXiv:1804.04235). Arguments and results: see `adamw`.

    It has no first moment: m is returned unchanged. If the two largest dims of w are both 128 or more, the second
    moment is estimated from its means over each of them. An efficient version stores only these means. Here v is stored
    in full. Its means are the same, because a moving average is linear.
    """
    beta = 1 - n**-0.8
    v = beta * v + (1 - beta) * (g**2 + 1e-30)
    estimate = v
    largest = sorted(range(w.ndim), key=lambda dim: w.shape[dim])[-2:]
    if len(largest) == 2 and min(w.shape[dim] for dim in largest) >= 128:
        row, column = largest
        mean = lambda *dims: np.mean(v, dims, keepdims=True)
        estimate = mean(column) * mean(row) / mean(row, column)
    step = g / np.sqrt(estimate)
    return step / np.maximum(1, rms(step)) * np.maximum(1e-3, rms(w)), m, v


def sgd(w, g, m, v, n, config):
    """Computes update n of gradient descent with momentum. Arguments and results: see `adamw`; v stays."""
    m = config.beta1 * m + g
    return m, m, v


def has_matrices(name):
    """Returns whether Muon updates a parameter of this name; the others, and the router, have AdamW."""
    return decays(name) and name not in ("embed", "unembed", "w_router")


def muon(name, g, m, config):
    """Computes an update of Muon for one parameter (Liu et al. 2025, arXiv:2502.16982).

    The momentum of each matrix is replaced by a matrix with the same singular vectors, and singular values of about 1.
    A layer has a matrix of each parameter. Each expert is a matrix, and each head of queries, keys and values.

    Args:
      name: the name of the parameter.
      g, m: its gradient after clipping, and its momentum, of one shape.

    Returns:
      The step, before the learning rate and weight decay are applied; the new m, in `mu_dtype`.
    """
    m = 0.95 * m.astype(np.float64) + 0.05 * g
    x = 0.95 * m + 0.05 * g
    has_heads = name in ("w_q", "w_k", "w_v", "w_q_up", "w_k_up", "w_v_up")
    if has_heads:
        x = np.moveaxis(x, 2, 1)
    elif name == "w_o":
        x = x.reshape(len(x), -1, x.shape[-1])
    elif name.startswith("expert"):
        x = x.reshape(-1, config.model_dim, x.shape[-1])
    x = x / (np.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    for _ in range(5):
        xx = x @ np.swapaxes(x, -2, -1)
        x = 3.4445 * x + (-4.7750 * xx + 2.0315 * xx @ xx) @ x
    x = 0.2 * math.sqrt(max(x.shape[-2:])) * x
    return (np.moveaxis(x, 1, 2) if has_heads else x).reshape(g.shape), m.astype(jnp.dtype(config.mu_dtype))


def update(params, grads, state, config):
    """Applies one update of the optimizer to all parameters, and returns the new (params, state).

    `state` is (the number of updates done, first moments, second moments), or None before the first update. The moments
    are sequences with an array for each parameter. Gradients are scaled so that their global norm is `clip_norm` at
    most (Pascanu et al. 2013, arXiv:1211.5063). Weight decay is decoupled: it is not part of the gradients.
    """
    paths, treedef = jax.tree.flatten_with_path(params)
    grads = [np.float64(g) for g in jax.tree.leaves(grads)]
    count, ms, vs = state or (0, [0 * g for g in grads], [0 * g for g in grads])
    rate, optimizers = learning_rate(count, config), dict(adamw=adamw, adafactor=adafactor, sgd=sgd, muon=adamw)
    grad_norm = np.sqrt(sum(np.sum(g**2) for g in grads))
    scale = min(1, config.clip_norm / grad_norm) if config.clip_norm else 1
    updated = []
    for (path, w), g, m, v in zip(paths, grads, ms, vs, strict=True):
        w = np.float64(w)
        if config.optimizer == "muon" and has_matrices(path[-1].name):
            step, m = muon(path[-1].name, g * scale, m, config)
        else:
            step, m, v = optimizers[config.optimizer](w, g * scale, m, v, count + 1, config)
        decay = config.weight_decay if config.optimizer != "sgd" and decays(path[-1].name) else 0
        updated.append((np.float32(w - rate * (step + decay * w)), m, v))
    params, ms, vs = zip(*updated, strict=True)
    return treedef.unflatten(params), (count + 1, ms, vs)
