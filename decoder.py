"""A layer of the decoder, in per-device code: attention, then an MLP or a mixture of experts.

**Formula.**

    x = x + attention(norm(x)) @ w_o,    then    x = x + mlp(norm(x))

If `num_experts` is not 0, a mixture of experts takes the place of the MLP (mixture.py), except in the first
`num_dense_layers` layers. With `ple_dim` a third term is added, `with_input`. tensor.py has the matmuls.

**Layout.** The suffix of a name is the shape of the array. A capital is a full dim, a lower-case letter this device's
shard of it (sharding.py has all letters):

    b sequences   t positions   d model   f hidden dims of the MLP
    n query heads   k key/value heads   H dims of a head's queries and keys   U dims of its values
    p dims of a token's embedding for this layer
    latent attention: Q, C the latents of queries and of keys and values   R, I dims of a head with RoPE and without

`named` gives an activation the name by which a recomputation policy can save it (remat.py).

**Source.** RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021, arXiv:2104.09864),
grouped-query or latent attention, SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202).
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

import moe
import sharding
from anatomy import in_zigzag, key_dim, kinds, sizes, value_dim
from attention import attention, causal_attention
from collectives import after, all_reduce, gradient_after
from config import Config
from context import Method, context_attention
from flash import flash_attention
from masks import Mask, Scores
from mixture import mixture
from parameters import Layers
from placement import MESH_AXES
from remat import attention_is_late, named, named_input
from tensor import column_parallel, matmul, row_parallel


def layer(w: Layers, x, constants, i, is_global, config: Config, attend_with=None, arriving=(), input_btp=None):
    """Runs one layer: attention, then an MLP or a mixture of experts.

    Args:
      w: the weights of this layer, gathered over fsdp: those of `Layers` without the leading dim of layers.
      x: (x_btd, metrics), the residual stream and the metrics of the layers before (`mixture.zero_metrics`); with
        `attend_with` also what this function carries from layer to layer.
      constants: (segments_bt, cos, sin), the same for all layers: the documents and `rope_tables`. If global layers
        have other tables, their cos and sin follow.
      i: the number of this layer among the layers with experts, from 0.
      is_global: whether this layer attends without a window: a bool, or traced. None if all layers do the same.
      attend_with: takes the place of `self_attention`: `attention_with_shared_kv`, with a cache (generation.py), or for
        qk_clip.py.
      arriving: weights that are gathered meanwhile. A mixture's router waits for those that are `needed_early`, and for
        attention where that is recomputed late (remat.py). For the others see `mixture`.
      input_btp: with `ple_dim` what this layer has of each token beside the residual stream (`model.layer_inputs`).

    Returns:
      x after the layer. A dense layer leaves the metrics as they are.
    """
    x_btd, metrics, *carried = x
    x_btd = named_input(x_btd, config)
    if len(constants) > 3:
        segments_bt, *local_tables, cos, sin = constants
        if not isinstance(is_global, bool):  # both tables have the same shape
            cos, sin = (jnp.where(is_global, *tables) for tables in zip((cos, sin), local_tables, strict=True))
        constants = (segments_bt, *local_tables) if is_global is False else (segments_bt, cos, sin)
    out_btd, context_btnU, *carried = attention_block(w, x_btd, constants, is_global, config, attend_with, *carried)
    x_btd = named(x_btd + out_btd, "mlp_input")
    h_btd = named(rms_norm(x_btd, w.norm_mlp, config), "norm_mlp")
    if w.w_router is None:
        out_btd = gated_mlp(h_btd, (w.w_gate, w.w_up, w.w_down), "mlp", config)
    else:
        context_btnU = lax.stop_gradient(context_btnU) if attention_is_late(config) else None
        h_btd = after(h_btd, (needed_early(arriving), context_btnU)) if arriving else h_btd
        out_btd, metrics = mixture_block(w, x_btd, h_btd, constants[0], metrics, i, config, arriving)
        if arriving and context_btnU is not None:
            out_btd = gradient_after(out_btd, context_btnU)
    x_btd += rms_norm(out_btd, w.norm_mlp_out, config) if config.post_norms else out_btd
    if config.ple_dim:
        x_btd += with_input(w, x_btd, input_btp, config)
    if config.layer_scale:
        x_btd *= lax.stop_gradient(w.layer_scale)
    # Without this constraint XLA:TPU chooses a layout in which t is the minor-most dim, and transposes x on the
    # SparseCores. The gathers of the next layer run there too, so they would wait for the end of this layer.
    return with_layout_constraint(x_btd, Layout(major_to_minor=(0, 1, 2))), metrics, *carried


def with_input(w: Layers, x_btd, input_btp, config: Config):
    """Returns norm((activation(x @ w_ple_gate) * input) @ w_ple_out) as y_btd: how a layer uses its own embedding."""
    (gate_btp,) = column_parallel(x_btd, (w.w_ple_gate,), config)
    product_btp = named(moe.glu(named(gate_btp, "ple_gate"), input_btp, config.mlp_activation), "ple_product")
    return rms_norm(named(row_parallel(product_btp, w.w_ple_out, config), "ple_out"), w.norm_ple_out, config)


def needed_early(arriving):
    """`arriving` without the experts' last matrix, which may arrive beside their first matmuls (docs/RESULTS.md)."""
    without_down = lambda tree: dataclasses.replace(tree, expert_down=None) if isinstance(tree, Layers) else tree
    return jax.tree.map(without_down, arriving, is_leaf=lambda tree: isinstance(tree, Layers))


def attention_block(w: Layers, x_btd, constants, is_global, config: Config, attend_with=None, *carried):
    """Returns (attention(norm(x)) @ w_o as out_btd, to be added to the residual stream; context_btnU; what is carried).

    context_btnU is the result of attention. With `post_norms` out_btd is normed, too.

    Each device computes attention for its own heads. The output projection sums over the heads of all devices.
    """
    h_btd = named(rms_norm(x_btd, w.norm_attention, config), "norm_attention")
    context_btnU, *carried = (attend_with or self_attention)(w, h_btd, constants, is_global, config, *carried)
    out_btd = row_parallel(context_btnU, w.w_o, config)
    if config.output_bias:
        out_btd += w.bias_o
    out_btd = named(out_btd, "out_proj")
    if config.post_norms:
        out_btd = rms_norm(out_btd, w.norm_attention_out, config)
    return out_btd, context_btnU, *carried


def mixture_block(w: Layers, x_btd, h_btd, segments_bt, metrics, i, config: Config, arriving=()):
    """Returns (out_btd, metrics): the sum of routed and shared experts for h_btd, the normed residual stream x_btd.

    With `expert_norms` router and routed experts have norms of x_btd of their own. For i and arriving see `layer`.
    """
    norm = partial(rms_norm, config=config)
    routed_btd = router_btd = h_btd
    if config.expert_norms:
        routed_btd, router_btd = norm(x_btd, w.norm_experts), named(norm(x_btd, w.norm_router), "norm_router")
    out_btd, metrics = mixture(w, routed_btd, router_btd, segments_bt, metrics, i, config, arriving)
    if config.expert_norms:
        out_btd = norm(named(out_btd, "expert_sum"), w.norm_experts_out)
    if config.num_shared_experts:
        shared_btd = gated_mlp(h_btd, (w.shared_gate, w.shared_up, w.shared_down), "shared", config)
        out_btd += norm(shared_btd, w.norm_shared_out) if config.expert_norms else shared_btd
    return named(out_btd, "mixture_out"), metrics


def self_attention(w: Layers, h_btd, constants, is_global, config: Config, largest=False):
    """Returns (context_btnU,): attention of h_btd's positions to those before them; with `largest` also largest_bnt."""
    segments_bt, cos, sin = constants
    project = project_latents if config.kv_lora_rank else project_qkv
    q_btnH, k_btkH, v_btkU = project(w, h_btd, cos, sin, config)
    q_btnH, k_btkH, v_btkU = named(q_btnH, "query_proj"), named(k_btkH, "key_proj"), named(v_btkU, "value_proj")
    results = attend(q_btnH, k_btkH, v_btkU, segments_bt, w.sinks, is_global, config, largest)
    return results if largest else (results,)


def no_keys_and_values(x_btd, config: Config):
    """Returns what `attention_with_shared_kv` carries from layer to layer, before the first one: zeros."""
    zeros = lambda kind, dim: jnp.zeros(
        (*x_btd.shape[:2], kind.num_kv_heads // lax.axis_size("tensor"), dim), x_btd.dtype
    )
    pair = lambda kind: (zeros(kind, key_dim(kind)), zeros(kind, value_dim(kind)))
    return lax.pcast(tuple(map(pair, kinds(config))), MESH_AXES, to="varying")


def attention_with_shared_kv(layer, w: Layers, h_btd, constants, is_global: bool, config: Config, carried):
    """`self_attention` where layers share keys and values: a layer hands on its own, or attends to those handed on.

    Args:
      layer: the number of the layer, for `attend_with`; not used.
      carried: (k_btkH, v_btkU) of the last local layer, and of the last global one.

    Returns (context_btnU, carried).
    """
    segments_bt, cos, sin = constants
    if config.shares_kv:
        q_btnH, (k_btkH, v_btkU) = project_query(w, h_btd, cos, sin, config), carried[is_global]
    else:
        q_btnH, k_btkH, v_btkU = project_qkv(w, h_btd, cos, sin, config)
        k_btkH, v_btkU = named(k_btkH, "key_proj"), named(v_btkU, "value_proj")
        carried = (carried[0], (k_btkH, v_btkU)) if is_global else ((k_btkH, v_btkU), carried[1])
    q_btnH = named(q_btnH, "query_proj")
    return attend(q_btnH, k_btkH, v_btkU, segments_bt, w.sinks, is_global, config), carried


def project_query(w: Layers, h_btd, cos, sin, config: Config):
    """Returns q_btnH of this device's heads, with rotary positions: `project_qkv` where keys are another layer's."""
    (q_btnH,) = column_parallel(h_btd, (w.w_q,), config)
    return positioned(q_btnH + w.bias_q if config.qkv_bias else q_btnH, "query", w.norm_q, cos, sin, config)


def positioned(x_btnH, name: str, scale_H, cos, sin, config: Config):
    """Returns queries or keys after their norm, if they have one, with rotary positions. `name` is query or key."""
    if config.qk_norm:
        x_btnH = rms_norm(named(x_btnH, f"{name}_before_norm"), scale_H, config, axis=None)
    return rope(x_btnH, cos, sin)


def project_qkv(w: Layers, h_btd, cos, sin, config: Config):
    """Returns q_btnH, k_btkH and v_btkU of this device's heads, the first two with rotary positions."""
    if config.keys_as_values:
        q_btnH, k_btkH = column_parallel(h_btd, (w.w_q, w.w_k), config)
        v_btkU, bias_v = k_btkH, w.bias_k
    else:
        q_btnH, k_btkH, v_btkU = column_parallel(h_btd, (w.w_q, w.w_k, w.w_v), config)
        bias_v = w.bias_v
    if config.qkv_bias:
        q_btnH, k_btkH, v_btkU = q_btnH + w.bias_q, k_btkH + w.bias_k, v_btkU + bias_v
    if config.value_norm:
        v_btkU = rms_norm(named(v_btkU, "value_before_norm"), 1.0, config, axis=None)
    q_btnH = positioned(q_btnH, "query", w.norm_q, cos, sin, config)
    return q_btnH, positioned(k_btkH, "key", w.norm_k, cos, sin, config), v_btkU


def gated_mlp(h_btd, weights: tuple[jax.Array, jax.Array, jax.Array], name: str, config: Config):
    """Returns (activation(h @ w) * (h @ v)) @ w_down as y_btd, for a dense MLP or the shared experts.

    `weights` are (gate, up, down), here w, v and w_down. The names of the activations are `name`_gate and so on.
    """
    w_Df, v_Df, w_fD = weights
    gate_btf, up_btf = column_parallel(h_btd, (w_Df, v_Df), config)
    gate_btf, up_btf = named(gate_btf, f"{name}_gate"), named(up_btf, f"{name}_up")
    product_btf = named(moe.glu(gate_btf, up_btf, config.mlp_activation), f"{name}_product")
    return named(row_parallel(product_btf, w_fD, config), f"{name}_down")


# -- norm and positions


def rms_norm(
    x_btd: jax.Array, scale_d: jax.Array | float, config: Config, axis: str | None = "tensor", dim: str = "D"
) -> jax.Array:
    """Returns x / rms(x) * scale in the shape and dtype of x, computed in float32.

    With `axis`, each device along it holds a shard of the dims that the letter `dim` means, and of their padding,
    zeros. The mean of squares is over the dims without padding. Without `axis`, x holds all dims of the mean.
    """
    x_f32 = x_btd.astype(jnp.float32)
    mean_bt1 = jnp.mean(x_f32 * x_f32, -1, keepdims=True)
    if axis:
        mean_bt1 = lax.pmean(mean_bt1, axis) * (sizes(config)[dim] / sizes(config, padded=False)[dim])
    return (x_f32 * lax.rsqrt(mean_bt1 + config.norm_eps) * scale_d).astype(x_btd.dtype)


def rope_tables(positions_bt: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns the cos and sin of position * frequency, each [b, t, H/2] in float32 (R/2 in latent attention).

    With YaRN both are multiplied by 0.1 * log(rope_scaling) + 1, so that longer contexts have sharper scores. DeepSeek
    multiplies all dims of the scores instead (`score_options`), and divides by that here.
    """
    angles = positions_bt[..., None].astype(jnp.float32) * rope_frequencies(config)
    if config.rope_type != "yarn":
        return jnp.cos(angles), jnp.sin(angles)
    magnitude = yarn_magnitude(config.rope_mscale, config) / yarn_magnitude(config.rope_mscale_all_dim, config)
    return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)


def rope_frequencies(config: Config) -> jax.Array:
    """Returns the angle per position of each rotated pair of dims, in radians, as float32 [H/2] (or [R/2]).

    Pair i has the frequency theta^(-2i/H). To extend a context of L = `rope_original_len` tokens by the factor s =
    `rope_scaling`, low frequencies are divided by s and high ones stay. A pair has L * frequency / (2 pi) periods in L.

        linear   all are divided (Chen et al. 2023, arXiv:2306.15595)
        llama3   those with less than 1 period are divided, those with more than 4 stay, and between the two s is
                 interpolated by the number of periods (arXiv:2407.21783; 1 and 4 are in the released configurations)
        yarn     the same with `rope_beta_slow` and `rope_beta_fast` periods, but interpolated by the number i of the
                 pair (Peng et al. 2023, arXiv:2309.00071, section 3.2)

    Only the first `rope_fraction` of the pairs rotate.
    """
    half = (config.rope_head_dim or config.head_dim) // 2
    i = jnp.arange(half, dtype=jnp.float32)
    frequency = config.rope_theta ** (-i / half)
    if config.rope_fraction != 1:
        frequency = jnp.where(i < int(config.rope_fraction * half), frequency, 0)
    if config.rope_type == "default":
        return frequency
    unscaled = 0.0  # 1 where the frequency stays
    if config.rope_type == "llama3":
        periods = config.rope_original_len * frequency / (2 * math.pi)
        unscaled = ((periods - 1) / (4 - 1)).clip(0, 1)
    elif config.rope_type == "yarn":
        length, log_theta = config.rope_original_len, math.log(config.rope_theta)
        pair = lambda periods: half * math.log(length / (2 * math.pi * periods)) / log_theta  # the i with these periods
        first, last = pair(config.rope_beta_fast), pair(config.rope_beta_slow)
        if config.rope_truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)  # the published bounds
        unscaled = 1 - ((i - first) / max(last - first, 0.001)).clip(0, 1)
    return frequency * (unscaled + (1 - unscaled) / config.rope_scaling)


def yarn_magnitude(mscale: float, config: Config) -> float:
    """Returns YaRN's factor for longer contexts, 0.1 * mscale * log(rope_scaling) + 1 (section 3.4 of the paper)."""
    return 0.1 * mscale * math.log(config.rope_scaling) + 1


def rope(x_btnH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns x with the pair (x[i], x[i + H/2]) of every head rotated by its angle, in the shape and dtype of x.

    With x1 and x2 the two halves of a head, the result is [x1, x2] * cos + [-x2, x1] * sin. A matmul makes [-x2, x1].
    It is exact, since only one term of each of its sums is not 0, and costs 1% of the projection before it. Slicing and
    concatenating would be separate passes through HBM: 2% of a step of Llama 3.1 70B on TPU7x (compiled).
    """
    half = jnp.eye(cos.shape[-1], dtype=x_btnH.dtype)
    swap_HH = jnp.block([[0 * half, half], [-half, 0 * half]])
    cos, sin = (jnp.concatenate([table, table], -1)[:, :, None] for table in (cos, sin))
    swapped_btnH = jnp.dot(x_btnH, swap_HH, precision="highest", preferred_element_type=jnp.float32)
    return (x_btnH * cos + swapped_btnH * sin).astype(x_btnH.dtype)


# -- attention


def attend(q_btnH, k_btkH, v_btkU, segments_bt, sinks, is_global, config: Config, largest=False):
    """Returns the result of causal attention, context_btnU, for this device's heads; with `largest` (it, largest_bnt).

    Attention has the window `config.window`, or no window in a global layer. Mesh, platform and config determine which
    implementation runs: context.py if `context` shards the sequences, else flash.py or attention.py.
    """
    kernel, interpret = uses_flash_kernel(config), sharding.platform() != "tpu"
    picked = lambda results: results[::2] if largest else results[0]
    over_context = lax.axis_size("context") > 1

    def windowed(window, which=None):  # with a tuple of windows, `which` is the index of the one that applies
        mask = Mask(window=window, which=which, segments=(segments_bt, segments_bt))
        operands = q_btnH, k_btkH, v_btkU, mask, score_options(config)._replace(largest=largest), sinks
        if over_context:
            method = Method("context", config.context_impl, config.context_heads, in_zigzag(config), config.collectives)
            return picked(context_attention(*operands, method=method, kernel=kernel, interpret=interpret))
        if kernel:
            return picked(flash_attention(*operands, interpret=interpret))
        # causal_attention splits the queries into quarters. The TPU compiler of jax 0.10 crashes on that.
        plain = attention if sharding.platform() == "tpu" else causal_attention
        out_btnU, *of_rows = plain(*operands)
        return picked((named(out_btnU, "context"), *of_rows))

    if not config.global_every or isinstance(is_global, bool):
        return windowed(0 if is_global else config.window)
    if kernel and not over_context:  # flash_attention takes both windows, and branches around its kernel only
        return windowed((config.window, 0), is_global)
    return lax.cond(is_global, partial(windowed, 0), partial(windowed, config.window))


def score_options(config: Config) -> Scores:
    """Returns how attention computes its scores. DeepSeek's YaRN multiplies them by the square of its magnitude."""
    scale = config.attention_scale or key_dim(config) ** -0.5
    scale *= yarn_magnitude(config.rope_mscale_all_dim, config) ** 2
    return Scores(scale, config.attention_soft_cap, config.max_logit or None)


def uses_flash_kernel(config: Config) -> bool:
    """Returns whether the Pallas kernel of flash.py computes attention. Only a TPU runs it compiled."""
    return config.attention == "flash" or (config.attention == "auto" and sharding.platform() == "tpu")


def project_latents(w: Layers, h_btd, cos, sin, config: Config):
    """Returns q_btnH, k_btnH and v_btnU of this device's heads, in multi-head latent attention."""
    q_btnH, *latents = latent_projections(w, h_btd, cos, sin, config)
    return q_btnH, *expand_latents(w, *latents)


def latent_projections(w: Layers, h_btd, cos, sin, config: Config):
    """Returns q_btnH of this device's heads, and kv_btC and k_rope_bt1R, of which all heads' keys and values are made.

    Latent attention is that of DeepSeek-V2 (arXiv:2405.04434, section 2.1). The keys and values of all heads are
    computed from a latent of C numbers per token. The queries are computed from a latent of Q numbers, or from h if
    `q_lora_rank` is 0. RoPE applies to the last R dims of each query. The last R dims of the keys are one rotated
    vector, which all heads share.

    Each device multiplies its d columns of h by its d rows of the down projections. This gives partial sums. An
    all-reduce of b*t*(Q + C + R) numbers completes them, where gathering h would move b*t*D numbers. In DeepSeek-V3
    these are 2,112 and 7,168 per token. The backward pass all-reduces as many numbers, because each device computes
    only its own heads' contribution to the gradients of the latents.
    """
    R = config.rope_head_dim
    downs = (w.w_kv_down, w.w_k_rope, w.w_q_down) if config.q_lora_rank else (w.w_kv_down, w.w_k_rope)
    latents = matmul(h_btd, *downs)  # {U_tensor}: partial sums, still to be added over `tensor`
    latents = [all_reduce(x, "tensor", algorithm=config.collectives) for x in latents]
    kv_btC, k_rope_btR = named(latents[0], "kv_latent"), latents[1]
    if config.q_lora_rank:
        q_btQ = named(latents[2], "query_latent")
        q_btQ = named(rms_norm(q_btQ, w.norm_q_latent, config, axis=None), "query_latent_norm")
        # The weights are split because XLA:TPU would copy slices of the queries, which are larger. The gradient of two
        # slices would be a sum of padded arrays. XLA may fuse it with a matmul: one such fusion took over 50 minutes.
        q_btnI, q_btnR = matmul(q_btQ, *jnp.split(w.w_q_up, (w.w_q_up.shape[-1] - R,), -1))
    else:
        (q_btnH,) = column_parallel(h_btd, (w.w_q,), config)
        q_btnI, q_btnR = jnp.split(q_btnH, (q_btnH.shape[-1] - R,), -1)
    kv_btC = named(rms_norm(kv_btC, w.norm_kv_latent, config, axis=None), "kv_latent_norm")
    q_btnH = jnp.concatenate([q_btnI, rope(q_btnR, cos, sin)], -1)
    return q_btnH, kv_btC, rope(k_rope_btR[:, :, None], cos, sin)


def expand_latents(w: Layers, kv_btC, k_rope_bt1R):
    """Returns k_btnH and v_btnU of this device's heads, from the latents of `latent_projections`."""
    k_btnI, v_btnU = matmul(kv_btC, w.w_k_up, w.w_v_up)
    k_rope_btnR = jnp.broadcast_to(k_rope_bt1R, (*k_btnI.shape[:3], k_rope_bt1R.shape[3]))
    return jnp.concatenate([k_btnI, k_rope_btnR], -1), v_btnU
