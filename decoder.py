"""A layer of the decoder, as the code that one device runs: attention, and an MLP or a mixture of experts.

    x += attention(norm(x));   x += swiglu(norm(x))

RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021, arXiv:2104.09864), grouped-query
or latent attention, SwiGLU (Shazeer 2020, arXiv:2002.05202).

**Tensor parallelism** (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053). A sub-layer is two matmuls, the first cut
by columns and the second by rows, so that nothing is communicated between them. Between sub-layers the residual
stream is cut over `tensor` as well, so that norms, residual adds and what is saved for the backward pass are 1/tensor:

    h_btd = norm(x_btd)                            its mean over D: an all-reduce of b*t numbers
    h_btD = all_gather(h_btd, "tensor")            in
    h_btf = h_btD @ w_Df                           columns: no communication
    y_btD = h_btf @ w_fD                           rows: contracting a lower-case letter leaves a partial sum {U_tensor}
    x_btd = x_btd + reduce_scatter(y_btD, "tensor")   out

The norm could instead wait for the gather and be computed whole on each device: no all-reduce, and tensor times the
vector work. The MLP, forward: gather and scatter move 2 * 2*b*t*D bytes beside 6*b*t*D*F/tensor FLOPs, so at C FLOP/s
and W bytes/s they can hide when F > 2/3 * tensor * C/W. For a TPU7x chip and both directions of one torus axis, C/W is
2307e12/200e9 = 11.5k: at tensor=4, F > 31k, and Llama 3.1 70B (28,672) misses it. (With two matmuls in the MLP instead
of three it is tensor * C/W, 46k.) On the die-to-die link of a chip, six times as fast, tensor=2 hides from F > 2.6k.

They *can*: but the matmul waits for its gathered operand, and the scatter for the matmul. `collective_matmul` cuts both
into blocks, of which one is multiplied while the next one travels (collectives.py).

**Experts** (`num_experts`): a mixture stands in place of the MLP. Routing and dispatch are moe.py's.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

import fp8
import moe
import remat
import sharding
from anatomy import expert_capacity, expert_rows, swiglu_in_kernel
from attention import attention, causal_attention
from collectives import all_gather, all_gather_matmul, all_reduce, matmul_reduce_scatter, reduce_scatter
from config import Config
from context import context_attention
from flash import flash_attention
from parameters import Layers, Params, fp8_recipe
from rules import in_zigzag


def rms_norm(x_btd: jax.Array, scale_d: jax.Array, eps: float, axis: str | None = "tensor") -> jax.Array:
    """x / rms(x) * scale, in float32; the mean is over the whole dim, of which this device holds 1/axis."""
    x_f32 = x_btd.astype(jnp.float32)
    mean_bt1 = jnp.mean(x_f32 * x_f32, -1, keepdims=True)
    if axis:
        mean_bt1 = lax.pmean(mean_bt1, axis)
    return (x_f32 * lax.rsqrt(mean_bt1 + eps) * scale_d).astype(x_btd.dtype)


def rope_tables(positions_bt: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * frequency, each [b, t, H/2] in float32.

    `rope_scaling` = s > 1 stretches the context as Llama 3.1 does (arXiv:2407.21783; the 1 and 4 below are those of its
    released configuration): wavelengths over the original length become s times longer, those under a quarter of it
    are kept, and the ones between are blended.
    """
    half = (config.rope_head_dim or config.head_dim) // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_scaling != 1:
        turns = config.rope_original_len * frequency / (2 * math.pi)  # in the original context
        keep = ((turns - 1) / (4 - 1)).clip(0, 1)
        frequency = frequency * (keep + (1 - keep) / config.rope_scaling)
    angles = positions_bt[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angles), jnp.sin(angles)


def rope(x_btnH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x[i], x[i + H/2]) of every head by their angles: x * cos + (-x2, x1) * sin.

    The halves change places in a matmul: exact, as each sum has one term, 1% of the projection before it. Sliced and
    joined again, they are passes through HBM of their own: 2% of a step of Llama 3.1 70B on TPU7x (compiled).
    """
    half = jnp.eye(cos.shape[-1], dtype=x_btnH.dtype)
    swap_HH = jnp.block([[0 * half, half], [-half, 0 * half]])
    cos, sin = (jnp.concatenate([table, table], -1)[:, :, None] for table in (cos, sin))
    swapped_btnH = jnp.dot(x_btnH, swap_HH, precision="highest", preferred_element_type=jnp.float32)
    return (x_btnH * cos + swapped_btnH * sin).astype(x_btnH.dtype)


def column_parallel(x_btd: jax.Array, weights: tuple[jax.Array | fp8.Weight, ...], config: Config) -> list[jax.Array]:
    """x_btD @ w for each weight [D, ...], of which this device has its columns; for it x is gathered over `tensor`."""
    if isinstance(weights[0], fp8.Weight):
        recipe = fp8_recipe(config)
        x_btd = fp8.quantize(x_btd, recipe, (2,), amax=weights[0].amax_x)
        x_btD = fp8.gather(x_btd, recipe, (2,), "tensor", 2, algorithm=config.collectives)
        return [fp8.dot(x_btD, w, recipe) for w in weights]
    if config.collective_matmul:
        return all_gather_matmul(x_btd, weights, "tensor", dim=2, algorithm=_ring(config))
    x_btD = all_gather(x_btd, "tensor", dim=2, algorithm=config.collectives)
    return matmul(x_btD, *weights)


def row_parallel(x_btf: jax.Array, w_fD: jax.Array, config: Config) -> jax.Array:
    """x_btf @ w_fD, of which this device has its rows: the partial sums are scattered over `tensor` -> y_btd.

    The dim f may be several: all of w's but the last.
    """
    if isinstance(w_fD, fp8.Weight):
        contracted = w_fD.quantized.values.ndim - 1
        y_btD = fp8.dot(x_btf, w_fD, fp8_recipe(config), contracted=contracted)  # {U_tensor}
        return reduce_scatter(y_btD, "tensor", dim=2, algorithm=config.collectives)
    if config.collective_matmul:
        return matmul_reduce_scatter(x_btf, w_fD, "tensor", dim=2, algorithm=_ring(config))
    (y_btD,) = matmul(x_btf, w_fD, dims=w_fD.ndim - 1)  # {U_tensor}
    return reduce_scatter(y_btD, "tensor", dim=2, algorithm=config.collectives)


def matmul(x_bt: jax.Array, *weights: jax.Array, dims: int = 1) -> list[jax.Array]:
    """x @ w for each weight, summed over the last `dims` of x and the first of w, with b and t as one dim.

    So the gradient of w sums over one dim. Over two, XLA for CPUs has what it multiplies made in another layout, the
    derivative of SiLU for one, in the loop that computes it, which is several times as slow for that (RESULTS.md).
    """
    rows = x_bt.reshape(-1, *x_bt.shape[2:])  # once: without recomputation this is what is kept for the gradients
    return [jnp.tensordot(rows, w, dims).reshape(*x_bt.shape[:2], *w.shape[dims:]) for w in weights]


def _ring(config: Config) -> str:
    """The ring of the collective matmuls: the one of all collectives, both directions where those are XLA's."""
    return "ring_bidirectional" if config.collectives == "xla" else config.collectives


def attention_block(w: Layers, x_btd, segments_bt, cos, sin, is_global, config: Config):
    """x + attention(norm(x)). `w` is one layer's weights (its dim L is gone), whole over fsdp."""
    h_btd = remat.named(rms_norm(x_btd, w.norm_attention, config.norm_eps), "norm_attention")
    project_heads = project_from_latents if config.kv_lora_rank else project
    q_btnH, k_btkH, v_btkU = project_heads(w, h_btd, cos, sin, config)
    q_btnH, k_btkH = remat.named(q_btnH, "query_proj"), remat.named(k_btkH, "key_proj")
    v_btkU = remat.named(v_btkU, "value_proj")

    kernel, interpret = attends_by_kernel(config), sharding.platform() != "tpu"
    in_parts = lax.axis_size("context") > 1

    def attend(window):
        options = dict(window=window, sinks=w.sinks, max_logit=config.max_logit or None)
        ids = segments_bt, segments_bt
        if in_parts:
            options |= dict(kernel=kernel, interpret=interpret, algorithm=config.collectives)
            options |= dict(impl=config.context_impl, head_ways=config.context_heads, balanced=in_zigzag(config))
            return context_attention(q_btnH, k_btkH, v_btkU, segment_ids=segments_bt, **options)[0]
        if kernel:
            options |= dict(which=is_global, interpret=interpret)
            return flash_attention(q_btnH, k_btkH, v_btkU, segment_ids=ids, **options)[0]
        # On a TPU whole, there it is to be compared with: the compiler of jax 0.10 crashes over the quarters.
        plain = attention if sharding.platform() == "tpu" else causal_attention
        return remat.named(plain(q_btnH, k_btkH, v_btkU, segment_ids=ids, **options)[0], "context")

    if not config.global_every:
        out_btnU = attend(config.window)
    elif kernel and not in_parts:  # the branches are round its kernel alone: flash.py
        out_btnU = attend((config.window, 0))
    else:
        out_btnU = lax.cond(is_global, partial(attend, 0), partial(attend, config.window))
    out_btd = row_parallel(out_btnU, w.w_o, config)
    if config.output_bias:
        out_btd += w.bias_o
    return x_btd + remat.named(out_btd, "out_proj")


def project(w: Layers, h_btd, cos, sin, config: Config):
    """Queries, keys and values of this device's heads, rotated."""
    q_btnH, k_btkH, v_btkU = column_parallel(h_btd, (w.w_q, w.w_k, w.w_v), config)
    if config.qkv_bias:
        q_btnH, k_btkH, v_btkU = q_btnH + w.bias_q, k_btkH + w.bias_k, v_btkU + w.bias_v
    if config.qk_norm:
        q_btnH, k_btkH = remat.named(q_btnH, "query_before_norm"), remat.named(k_btkH, "key_before_norm")
        q_btnH = rms_norm(q_btnH, w.norm_q, config.norm_eps, axis=None)
        k_btkH = rms_norm(k_btkH, w.norm_k, config.norm_eps, axis=None)
    return rope(q_btnH, cos, sin), rope(k_btkH, cos, sin), v_btkU


def project_from_latents(w: Layers, h_btd, cos, sin, config: Config):
    """The same of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): through low-rank latents.

    Keys and values of all heads are made from C numbers a token, queries from Q; position turns R dims of each query,
    and one key of R dims, which all heads share. The latents are rows times columns of this device's d, so what stays
    to be done is one all-reduce of b*t*(Q + C + R) numbers, in place of a gather of b*t*D (2,112 against 7,168 in
    DeepSeek-V3); and an all-reduce as large of their gradients, of which each device has its heads' share.
    """
    R, eps = config.rope_head_dim, config.norm_eps
    downs = (w.w_kv_down, w.w_k_rope, w.w_q_down) if config.q_lora_rank else (w.w_kv_down, w.w_k_rope)
    latents = matmul(h_btd, *downs)  # {U_tensor}
    latents = [all_reduce(x, "tensor", algorithm=config.collectives) for x in latents]
    kv_btC, k_rope_btR = remat.named(latents[0], "kv_latent"), latents[1]
    if config.q_lora_rank:
        q_btQ = remat.named(latents[2], "query_latent")
        q_btQ = remat.named(rms_norm(q_btQ, w.norm_q_latent, eps, axis=None), "query_latent_norm")
        (q_btnH,) = matmul(q_btQ, w.w_q_up)
    else:
        (q_btnH,) = column_parallel(h_btd, (w.w_q,), config)
    kv_btC = remat.named(rms_norm(kv_btC, w.norm_kv_latent, eps, axis=None), "kv_latent_norm")
    k_btnI, v_btnU = matmul(kv_btC, w.w_k_up, w.w_v_up)
    q_btnH = jnp.concatenate([q_btnH[..., :-R], rope(q_btnH[..., -R:], cos, sin)], -1)
    k_rope_btnR = jnp.broadcast_to(rope(k_rope_btR[:, :, None], cos, sin), (*k_btnI.shape[:3], R))
    return q_btnH, jnp.concatenate([k_btnI, k_rope_btnR], -1), v_btnU


def attends_by_kernel(config: Config) -> bool:
    """Whether attention is the kernel of flash.py, on these devices: simulated where they are no TPUs."""
    return config.attention == "flash" or (config.attention == "auto" and sharding.platform() == "tpu")


def mlp_block(w: Layers, x_btd, config: Config):
    """x + swiglu(norm(x))."""
    h_btd = remat.named(rms_norm(x_btd, w.norm_mlp, config.norm_eps), "norm_mlp")
    return x_btd + swiglu_mlp(h_btd, (w.w_gate, w.w_up, w.w_down), "mlp", config)


def swiglu_mlp(h_btd, weights: tuple[jax.Array, jax.Array, jax.Array], name: str, config: Config):
    """An MLP that all tokens see; `name` of its activations."""
    w_Df, v_Df, w_fD = weights
    gate_btf, up_btf = column_parallel(h_btd, (w_Df, v_Df), config)
    gate_btf, up_btf = remat.named(gate_btf, f"{name}_gate"), remat.named(up_btf, f"{name}_up")
    product_btf = remat.named(jax.nn.silu(gate_btf) * up_btf, f"{name}_product")
    return remat.named(row_parallel(product_btf, w_fD, config), f"{name}_down")


# -- mixture of experts (moe.py)


def moe_block(w: Layers, x_btd, metrics, i, config: Config):
    """x + mixture(norm(x)), and the metrics with what this layer, the i-th that has experts, adds to them.

    With experts on several devices their rows travel cut over `tensor`, and are gathered where they are multiplied;
    else a token is gathered once for all of its experts, and their sum scattered. What the shared experts compute
    does not depend on the rows that travel, and could be computed meanwhile; XLA:TPU does not (compiled, DeepSeek-V3).
    """
    h_btd = remat.named(rms_norm(x_btd, w.norm_mlp, config.norm_eps), "norm_mlp")
    h_td = h_btd.reshape(-1, h_btd.shape[-1])
    logits_tE, routing = router(w, h_td, config)
    experts_travel = lax.axis_size("expert") > 1
    gather = partial(all_gather, axis="tensor", algorithm=config.collectives)
    scatter = partial(reduce_scatter, axis="tensor", algorithm=config.collectives)

    def experts(x, sizes):
        """Of sorted rows [r, D], or of [e, c, D]: {U_tensor}."""
        x = remat.named(x, "expert_input")
        x = gather(x, dim=x.ndim - 1) if experts_travel else x
        product = remat.named(gated(w, x, sizes, config), "expert_product")
        (y,) = grouped(product, (w.expert_down,), sizes, config, transpose=True)
        if config.expert_bias:
            y = moe.add_bias(y, in_partial_sum(w.bias_expert_down), sizes)
        return remat.named(scatter(y, dim=y.ndim - 1) if experts_travel else y, "expert_down")

    x_td = h_td if experts_travel else gather(h_td, dim=1)
    y_td, dropped = dispatch(x_td, routing, experts, config)
    y_td = y_td if experts_travel else scatter(y_td, dim=1)
    x_btd += y_td.reshape(x_btd.shape)
    if config.num_shared_experts:
        x_btd += swiglu_mlp(h_btd, (w.shared_gate, w.shared_up, w.shared_down), "shared", config)
    return x_btd, add_metrics(metrics, i, logits_tE, routing, dropped, config)


def gated(w: Layers, x, sizes, config: Config):
    """The experts' activation: `moe.swiglu` of x @ expert_gate and x @ expert_up."""
    weights, names = (w.expert_gate, w.expert_up), ("expert_gate", "expert_up")
    if swiglu_in_kernel(config):
        if isinstance(w.expert_gate, fp8.Weight):
            activation = partial(moe.swiglu, limit=config.swiglu_limit)
            return fp8.gated_dot(x, *weights, sizes, fp8_recipe(config), activation, names)
        return moe.gated_matmul(x, *weights, sizes, config.swiglu_limit, names)
    products = grouped(x, weights, sizes, config)
    if config.expert_bias:
        biases = (w.bias_expert_gate, w.bias_expert_up)
        products = [moe.add_bias(y, bias, sizes) for y, bias in zip(products, biases, strict=True)]
    return moe.swiglu(*map(remat.named, products, names), config.swiglu_limit)


def grouped(
    x, weights: tuple[jax.Array | fp8.Weight, ...], sizes, config: Config, transpose: bool = False
) -> tuple[jax.Array, ...]:
    """x @ w of each expert, for each of `weights`; x and `transpose` as in `moe.grouped_matmul`."""
    if not isinstance(weights[0], fp8.Weight):
        return tuple(moe.grouped_matmul(x, w, sizes, transpose=transpose) for w in weights)
    recipe = fp8_recipe(config)
    if sizes is not None:
        return fp8.grouped_dot(x, weights, sizes, recipe, transpose=transpose)
    x = fp8.quantize(x, recipe, (2,))
    return tuple(fp8.dot(x, w, recipe, batch=1, transpose=transpose) for w in weights)


def in_partial_sum(bias: jax.Array) -> jax.Array:
    """A bias that all devices of `tensor` have whole, to be added to a {U_tensor}: one summand has it."""
    return jnp.where(lax.axis_index("tensor") == 0, bias, 0)


def router(w: Layers, h_td, config: Config) -> tuple[jax.Array, moe.Routing]:
    """Logits and choices, in float32, the same on all devices of `tensor`.

    By default a TPU rounds float32 to bfloat16 and multiplies once. To use all bits of the weights takes three passes:
    1.5 times the time forward, 1.8 with the backward pass (compiled; 8,192 tokens, D = 4096, E = 128). Of a layer of
    Qwen3 235B that is 0.3%.
    """
    precision = lax.Precision.HIGHEST
    logits_tE = lax.dot(h_td, w.w_router, precision=precision, preferred_element_type=jnp.float32)  # {U_tensor}
    if config.expert_bias:
        logits_tE += in_partial_sum(w.bias_router)
    logits_tE = remat.named(lax.psum(logits_tE, "tensor"), "router_logits")
    bias_E = lax.psum(in_partial_sum(w.selection_bias), "tensor") if config.selection_bias else None
    options = dict(scores=config.router_scores, renormalise=config.renormalise, scale=config.router_scale)
    options |= dict(groups=config.router_groups, groups_kept=config.router_groups_kept)
    return logits_tE, moe.route(logits_tE, config.experts_per_token, bias_E=bias_E, **options)


def dispatch(x_td, routing: moe.Routing, experts, config: Config) -> tuple[jax.Array, jax.Array]:
    """y_td and the number of dropped (token, choice) pairs, as `config.moe_impl` has it."""
    t = x_td.shape[0]
    if config.moe_impl == "reference":
        return moe.reference(x_td, routing, experts, "expert"), 0 * routing.experts_tX[0, 0]
    if config.moe_impl == "capacity":
        return moe.with_capacity(x_td, routing, experts, "expert", expert_capacity(config, t), config.collectives)
    parts = config.moe_parts
    room = expert_rows(config, t // parts, lax.axis_size("expert"))
    dropless = lambda x_td, routing: moe.dropless(x_td, routing, experts, "expert", room)
    return dropless(x_td, routing) if parts == 1 else moe.in_parts(dropless, x_td, routing, parts)


def no_metrics(config: Config) -> dict[str, jax.Array]:
    """What the layers of a mixture add to. Each device has its share."""
    if not config.num_experts:
        return {}
    loads_LE = jnp.zeros((config.num_layers - config.num_dense_layers, config.num_experts))
    zeros = dict.fromkeys(("auxiliary_loss", "dropped", "router_entropy"), jnp.float32(0)) | {"expert_loads": loads_LE}
    return jax.tree.map(lambda a: lax.pcast(a, sharding.LOSS_AXES, to="varying"), zeros)


def add_metrics(metrics, i, logits_tE, routing: moe.Routing, dropped, config: Config) -> dict[str, jax.Array]:
    """With the shares of layer i: loads of the experts, dropped pairs, entropy, and its auxiliary losses."""
    num_tokens = float(config.batch * config.seq_len)  # times the layers it is past what an int32 holds
    loads_E = moe.loads(routing.experts_tX, config.num_experts).astype(jnp.float32)
    loss = 0.0
    if config.load_balance_loss:
        everywhere_E = lax.psum(loads_E, sharding.axes_of(sharding.BATCH_SPEC))
        loss += config.load_balance_loss * moe.load_balance_loss(routing.scores_tE, everywhere_E, num_tokens)
    if config.router_z_loss:
        loss += config.router_z_loss * moe.z_loss(logits_tE, num_tokens)
    entropy = moe.entropy(lax.stop_gradient(routing.scores_tE), num_tokens * metrics["expert_loads"].shape[0])
    return {
        "auxiliary_loss": metrics["auxiliary_loss"] + loss,
        "dropped": metrics["dropped"] + dropped,
        "router_entropy": metrics["router_entropy"] + entropy,
        "expert_loads": metrics["expert_loads"].at[i].add(loads_E),
    }


def figures(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Of the summed metrics, what is shown. Load imbalance: the largest load over the mean one, mean of the layers."""
    if "expert_loads" not in metrics:
        return metrics
    loads_LE = metrics["expert_loads"]
    shown = {name: value for name, value in metrics.items() if name not in ("expert_loads", "dropped")}
    shown["load_imbalance"] = jnp.mean(jnp.max(loads_LE, 1) / jnp.mean(loads_LE, 1))
    return shown | {"dropped_fraction": metrics["dropped"] / jnp.sum(loads_LE)}


def balance(params: Params, metrics: dict[str, jax.Array], accept: jax.Array, config: Config) -> Params:
    """The parameters after an accepted step with these loads: outside the gradient, selection biases follow them."""
    if not config.selection_bias:
        return params
    old_LE = params.layers.selection_bias
    bias_LE = moe.updated_bias(old_LE, metrics["expert_loads"], config.selection_bias_rate)
    layers = dataclasses.replace(params.layers, selection_bias=jnp.where(accept, bias_LE, old_LE))
    return dataclasses.replace(params, layers=layers)
