"""The model: a Llama-3-style decoder, written as the code that one device runs.

    x = embed[tokens]
    for each layer:   x += attention(norm(x));   x += swiglu(norm(x))
    loss = cross_entropy(unembed(norm(x)), next tokens)

RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021, arXiv:2104.09864), grouped-query
attention, SwiGLU (Shazeer 2020, arXiv:2002.05202). Master weights are float32, the computation is in `config.dtype`.

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

**Vocabulary parallelism.** Embedding and unembedding are cut over `tensor` by vocabulary. A look-up finds the tokens of
this device's part and leaves a partial sum. The loss needs of the logits only their log-sum-exp and the label's entry,
both sums over the vocabulary, so the full logits_BTV exist nowhere: a device holds those of its part of the vocabulary,
for `loss_chunk` positions of its sequences at once.
"""

import math
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Annotated, get_type_hints

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

import fsdp
import placement
import remat
import sharding
from attention import attention
from collectives import all_gather, all_gather_matmul, matmul_reduce_scatter, reduce_scatter
from config import Config
from data import Batch
from flash import flash_attention

ONES, ZEROS = "ones", "zeros"  # how a parameter starts; any other string names the dims of its fan-in


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers:
    """The weights of all layers, stacked: each with its shape, its layout and how it starts.

    Inside the layer loop the dim L is gone and the weights are whole over fsdp: w_q is w_q_DnH there.
    """

    norm_attention: Annotated[jax.Array, "LD", P(None, ("tensor", "fsdp")), ONES]
    w_q: Annotated[jax.Array, "LDNH", P(None, "fsdp", "tensor", None), "D"]
    w_k: Annotated[jax.Array, "LDKH", P(None, "fsdp", "tensor", None), "D"]
    w_v: Annotated[jax.Array, "LDKH", P(None, "fsdp", "tensor", None), "D"]
    w_o: Annotated[jax.Array, "LNHD", P(None, "tensor", None, "fsdp"), "NHL"]
    norm_mlp: Annotated[jax.Array, "LD", P(None, ("tensor", "fsdp")), ONES]
    w_gate: Annotated[jax.Array, "LDF", P(None, "fsdp", "tensor"), "D"]
    w_up: Annotated[jax.Array, "LDF", P(None, "fsdp", "tensor"), "D"]
    w_down: Annotated[jax.Array, "LFD", P(None, "tensor", "fsdp"), "FL"]
    # Of some models only; None in the others.
    norm_q: Annotated[jax.Array | None, "LH", P(None, None), ONES] = None
    norm_k: Annotated[jax.Array | None, "LH", P(None, None), ONES] = None
    bias_q: Annotated[jax.Array | None, "LNH", P(None, "tensor", None), ZEROS] = None
    bias_k: Annotated[jax.Array | None, "LKH", P(None, "tensor", None), ZEROS] = None
    bias_v: Annotated[jax.Array | None, "LKH", P(None, "tensor", None), ZEROS] = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """All parameters, in float32."""

    embed: Annotated[jax.Array, "VD", P("tensor", "fsdp"), ""]
    layers: Layers
    norm: Annotated[jax.Array, "D", P(("tensor", "fsdp")), ONES]
    unembed: Annotated[jax.Array | None, "VD", P("tensor", "fsdp"), "D"] = None  # None: tied to embed


# -- shapes, layouts, start values


def _dims(config: Config) -> dict[str, int]:
    return {
        "L": config.num_layers,
        "D": config.model_dim,
        "F": config.ff_dim,
        "V": config.vocab_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
    }


def _tree(config: Config, leaf, cls=Params):
    """A Params with leaf(name, shape letters, spec, init) in every place that this model has."""
    absent = set() if config.qk_norm else {"norm_q", "norm_k"}
    absent |= set() if config.qkv_bias else {"bias_q", "bias_k", "bias_v"}
    absent |= {"unembed"} if config.tied_embeddings else set()
    values = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if hint is Layers:
            values[name] = _tree(config, leaf, Layers)
        elif name not in absent:
            letters, spec, init = hint.__metadata__
            spec = sharding.add_axis(spec, "data", beside="fsdp") if config.shard_update else spec
            values[name] = leaf(name, letters, spec, init)
    return cls(**values)


def param_shapes(config: Config) -> Params:
    """The parameters as jax.ShapeDtypeStruct, float32."""
    dims = _dims(config)
    shape = lambda letters: tuple(dims[letter] for letter in letters)
    return _tree(config, lambda name, letters, spec, init: jax.ShapeDtypeStruct(shape(letters), jnp.float32))


def param_specs(config: Config) -> Params:
    """The layout of the parameters; with `shard_update` they (and so the optimizer state) are cut over `data` too."""
    return _tree(config, lambda name, letters, spec, init: spec)


def is_matrix(config: Config) -> Params:
    """True for what weight decay applies to; False for norms and biases."""
    return _tree(config, lambda name, letters, spec, init: init not in (ONES, ZEROS))


def num_params(config: Config) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(config)))


def check_divides(config: Config, mesh_sizes: dict[str, int]) -> None:
    """Raises ValueError, with the numbers, where the model or the batch cannot be cut as the mesh asks.

    And where the model has parts that there is no code for yet, only arithmetic (transformer.py).
    """
    for axis in ("pipe", "expert", "context"):
        if mesh_sizes[axis] > 1:
            raise ValueError(f"mesh axis {axis}:{mesh_sizes[axis]} is not there yet: its size must be 1")
    not_there_yet = dict(
        num_experts="mixtures of experts",
        kv_lora_rank="multi-head latent attention",
        attention_sinks="attention sinks",
        output_bias="a bias on attention's output projection",
    )
    for name, what in not_there_yet.items():
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)}: no code for {what} yet, only its predictions")
    if config.fp8 != "none":
        raise ValueError(f"fp8={config.fp8}: only predicted yet; what runs is none")
    if config.collective_matmul and mesh_sizes["tensor"] == 1:
        raise ValueError(
            "collective_matmul is for the matmuls of the mesh axis tensor; its size is 1: --mesh=tensor:2,..."
        )
    fields = dict(
        L="num_layers", D="model_dim", F="ff_dim", V="vocab_size", N="num_heads", K="num_kv_heads", H="head_dim"
    )

    def check(name, letters, spec, init):
        for letter, entry in zip(letters, spec, strict=True):
            axes = {axis: mesh_sizes[axis] for axis in sharding.axes_of(P(entry))}
            placement.check_multiple(fields[letter], getattr(config, fields[letter]), axes)

    _tree(config, check)
    batch_axes = {axis: mesh_sizes[axis] for axis in placement.BATCH_AXES}
    placement.check_multiple("batch", config.batch, batch_axes | {"microbatches": config.microbatches})


def init_params(config: Config, key: jax.Array) -> Params:
    """Normal with variance 1/fan-in, and 2L times less for the 2L outputs that add to the residual stream.

    The stream then starts with variance 1, a row of the embedding (fan-in 1: a look-up; D where it is also the
    unembedding), and its sub-layers together add about as much.

    Call it under jit with the parameters' shardings as output: each device then draws its own shards only. The values
    come from the seed and the parameter's name alone, whatever the mesh.
    """
    dims = _dims(config)

    def draw(name, letters, spec, init):
        shape = tuple(dims[letter] for letter in letters)
        if init in (ONES, ZEROS):
            return jnp.full(shape, float(init == ONES), jnp.float32)
        init = "D" if name == "embed" and config.tied_embeddings else init
        fan_in = math.prod(2 * dims[letter] if letter == "L" else dims[letter] for letter in init)
        key_of_name = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return jax.random.normal(key_of_name, shape, jnp.float32) * fan_in**-0.5

    return _tree(config, draw)


# -- the blocks


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
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_scaling != 1:
        turns = config.rope_original_len * frequency / (2 * math.pi)  # in the original context
        keep = ((turns - 1) / (4 - 1)).clip(0, 1)
        frequency = frequency * (keep + (1 - keep) / config.rope_scaling)
    angles = positions_bt[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angles), jnp.sin(angles)


def rope(x_btnH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x[i], x[i + H/2]) of every head by their angles."""
    x1, x2 = jnp.split(x_btnH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x_btnH.dtype)


def column_parallel(x_btd: jax.Array, weights: tuple[jax.Array, ...], config: Config) -> list[jax.Array]:
    """x_btD @ w for each weight [D, ...], of which this device has its columns; for it x is gathered over `tensor`."""
    if config.collective_matmul:
        return all_gather_matmul(x_btd, weights, "tensor", dim=2, algorithm=_ring(config))
    x_btD = all_gather(x_btd, "tensor", dim=2, algorithm=config.collectives)
    return [jnp.tensordot(x_btD, w, 1) for w in weights]


def row_parallel(x_btf: jax.Array, w_fD: jax.Array, config: Config) -> jax.Array:
    """x_btf @ w_fD, of which this device has its rows: the partial sums are scattered over `tensor` -> y_btd.

    The dim f may be several: all of w's but the last.
    """
    if config.collective_matmul:
        return matmul_reduce_scatter(x_btf, w_fD, "tensor", dim=2, algorithm=_ring(config))
    y_btD = jnp.tensordot(x_btf, w_fD, w_fD.ndim - 1)  # {U_tensor}
    return reduce_scatter(y_btD, "tensor", dim=2, algorithm=config.collectives)


def _ring(config: Config) -> str:
    """The ring of the collective matmuls: the one of all collectives, both directions where those are XLA's."""
    return "ring_bidirectional" if config.collectives == "xla" else config.collectives


def attention_block(w: Layers, x_btd, segments_bt, cos, sin, is_global, config: Config):
    """x + attention(norm(x)). `w` is one layer's weights (its dim L is gone), whole over fsdp."""
    h_btd = remat.named(rms_norm(x_btd, w.norm_attention, config.norm_eps), "norm_attention")
    q_btnH, k_btkH, v_btkH = column_parallel(h_btd, (w.w_q, w.w_k, w.w_v), config)
    if config.qkv_bias:
        q_btnH, k_btkH, v_btkH = q_btnH + w.bias_q, k_btkH + w.bias_k, v_btkH + w.bias_v
    if config.qk_norm:
        q_btnH, k_btkH = remat.named(q_btnH, "query_before_norm"), remat.named(k_btkH, "key_before_norm")
        q_btnH = rms_norm(q_btnH, w.norm_q, config.norm_eps, axis=None)
        k_btkH = rms_norm(k_btkH, w.norm_k, config.norm_eps, axis=None)
    q_btnH = remat.named(rope(q_btnH, cos, sin), "query_proj")
    k_btkH = remat.named(rope(k_btkH, cos, sin), "key_proj")
    v_btkH = remat.named(v_btkH, "value_proj")

    def attend(window):
        options = dict(window=window, segment_ids=(segments_bt, segments_bt))
        if not attends_by_kernel(config):
            return remat.named(attention(q_btnH, k_btkH, v_btkH, **options)[0], "context")
        options |= dict(max_logit=config.max_logit or None, interpret=sharding.platform() != "tpu")
        out_btnH, lse_bnt = flash_attention(q_btnH, k_btkH, v_btkH, **options)
        if config.max_logit:  # which was too far off where lse is infinite: no number, so that the step is skipped
            out_btnH = jnp.where(jnp.isinf(lse_bnt).swapaxes(1, 2)[..., None], jnp.nan, out_btnH)
        return out_btnH

    if config.global_every:
        out_btnH = lax.cond(is_global, partial(attend, 0), partial(attend, config.window))
    else:
        out_btnH = attend(config.window)
    return x_btd + remat.named(row_parallel(out_btnH, w.w_o, config), "out_proj")


def attends_by_kernel(config: Config) -> bool:
    """Whether attention is the kernel of flash.py, on these devices: simulated where they are no TPUs."""
    return config.attention == "flash" or (config.attention == "auto" and sharding.platform() == "tpu")


def mlp_block(w: Layers, x_btd, config: Config):
    """x + swiglu(norm(x))."""
    h_btd = remat.named(rms_norm(x_btd, w.norm_mlp, config.norm_eps), "norm_mlp")
    gate_btf, up_btf = column_parallel(h_btd, (w.w_gate, w.w_up), config)
    gate_btf, up_btf = remat.named(gate_btf, "mlp_gate"), remat.named(up_btf, "mlp_up")
    product_btf = remat.named(jax.nn.silu(gate_btf) * up_btf, "mlp_product")
    return x_btd + remat.named(row_parallel(product_btf, w.w_down, config), "mlp_down")


# -- vocabulary-parallel embedding and loss


@jax.custom_vjp
def embed(w_vD: jax.Array, tokens_bt: jax.Array) -> jax.Array:
    """Rows of this device's part of the vocabulary, zeros for the others' tokens: a partial sum {U_tensor} of x_btD.

    The gradient is added up in float32, whatever the dtype: a frequent token is one row with thousands of summands.
    """
    index_bt, mine_bt = _my_part(tokens_bt, w_vD.shape[0])
    return jnp.where(mine_bt[..., None], w_vD[index_bt], 0)


def _my_part(tokens_bt, num_rows):
    """Row of each token in this device's part of the vocabulary, and whether it is in there."""
    index_bt = tokens_bt - lax.axis_index("tensor") * num_rows
    mine_bt = (index_bt >= 0) & (index_bt < num_rows)
    return jnp.where(mine_bt, index_bt, 0), mine_bt


def _embed_backward(residuals, dx_btD):
    tokens_bt, w_vD = residuals  # of w_vD only the shape and the dtype are used
    index_bt, mine_bt = _my_part(tokens_bt, w_vD.shape[0])
    dx_btD = jnp.where(mine_bt[..., None], dx_btD, 0).astype(jnp.float32)
    dw_vD = jnp.zeros_like(w_vD, jnp.float32).at[index_bt].add(dx_btD)
    return dw_vD.astype(w_vD.dtype), None


embed.defvjp(lambda w_vD, tokens_bt: (embed(w_vD, tokens_bt), (tokens_bt, w_vD)), _embed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy(x_btD, w_vD, targets_bt, weights_bt, chunk: int, soft_cap: float, z_loss: float):
    """Sum of weight * (-log softmax(x w^T)[target] + z_loss * logsumexp^2), with the vocabulary cut over `tensor`.

    Exact, `chunk` positions of each sequence at a time. When it is differentiated, each chunk's gradient is taken while
    its logits are there: 3 matmuls, where recomputing the logits in a backward pass would make them 4.

    Returns: float32 scalar, the same on all devices of `tensor`.
    """
    chunk_loss = lambda _, xs: (None, _chunk_loss(w_vD, xs, soft_cap, z_loss)[0])
    return jnp.sum(lax.scan(chunk_loss, None, _chunks((x_btD, targets_bt, weights_bt), chunk))[1])


def _chunks(arrays, chunk):
    """[b, t, ...] -> [t/chunk, b, chunk, ...]"""
    return jax.tree.map(lambda a: a.reshape(a.shape[0], -1, chunk, *a.shape[2:]).swapaxes(0, 1), arrays)


def _chunk_loss(w_vD, xs, soft_cap, z_loss):
    """Loss of a chunk, and its gradient in the logits."""
    x_bcD, targets_bc, weights_bc = xs
    logits_bcv = jnp.einsum("bcD,vD->bcv", x_bcD, w_vD, preferred_element_type=jnp.float32)
    slope_bcv = 1.0
    if soft_cap:
        tanh_bcv = jnp.tanh(logits_bcv / soft_cap)
        logits_bcv, slope_bcv = soft_cap * tanh_bcv, 1 - tanh_bcv**2
    index_bc, mine_bc = _my_part(targets_bc, w_vD.shape[0])
    label_bc = jnp.take_along_axis(logits_bcv, index_bc[..., None], -1)[..., 0]
    max_bc = lax.pmax(jnp.max(logits_bcv, -1), "tensor")
    p_bcv = jnp.exp(logits_bcv - max_bc[..., None])
    sum_bc, label_bc = lax.psum((jnp.sum(p_bcv, -1), jnp.where(mine_bc, label_bc, 0.0)), "tensor")
    lse_bc = max_bc + jnp.log(sum_bc)
    loss = jnp.sum(weights_bc * (lse_bc - label_bc + z_loss * lse_bc**2))

    is_label_bcv = (jnp.arange(w_vD.shape[0]) == index_bc[..., None]) & mine_bc[..., None]
    dlogits_bcv = p_bcv * ((1 + 2 * z_loss * lse_bc) / sum_bc)[..., None] - is_label_bcv
    return loss, dlogits_bcv * slope_bcv * weights_bc[..., None]


def _cross_entropy_forward(x_btD, w_vD, targets_bt, weights_bt, chunk, soft_cap, z_loss):
    def step(dw_vD, xs):
        loss, dlogits_bcv = _chunk_loss(w_vD, xs, soft_cap, z_loss)
        dlogits_bcv = dlogits_bcv.astype(x_btD.dtype)
        dx_bcD = jnp.einsum("bcv,vD->bcD", dlogits_bcv, w_vD)  # {U_tensor}
        dw_vD += jnp.einsum("bcv,bcD->vD", dlogits_bcv, xs[0], preferred_element_type=jnp.float32)
        return dw_vD, (loss, dx_bcD)

    zeros_vD = jnp.zeros_like(w_vD, jnp.float32)
    dw_vD, (losses, dx_bcD) = lax.scan(step, zeros_vD, _chunks((x_btD, targets_bt, weights_bt), chunk))
    return jnp.sum(losses), (dx_bcD.swapaxes(0, 1).reshape(x_btD.shape), dw_vD.astype(w_vD.dtype))


def _cross_entropy_backward(chunk, soft_cap, z_loss, residuals, dloss):
    dx_btD, dw_vD = residuals
    return (dx_btD * dloss).astype(dx_btD.dtype), (dw_vD * dloss).astype(dw_vD.dtype), None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


# -- the whole


def hidden_states(params: Params, batch: Batch, config: Config) -> jax.Array:
    """x_btd after the last norm, sharded over `tensor`. `params` vary over all axes and are whole over `data`."""
    specs = param_specs(config)
    dtype = jnp.dtype(config.dtype)
    specs_layer = jax.tree.map(lambda spec: P(*spec[1:]), specs.layers)  # one layer's: the dim L is gone
    in_loop = is_matrix(config).layers

    gather = lambda w, spec: fsdp.gather(w.astype(dtype), spec, "fsdp", config.collectives)
    # The norms and biases of all layers at once: in the loop each would be a gather of a few kilobytes, all latency.
    layers = jax.tree.map(
        lambda w, spec, matrix: w if matrix else gather(w, spec), params.layers, specs.layers, in_loop
    )

    def gather_layer(shards: Layers) -> Layers:
        return jax.tree.map(lambda w, spec, matrix: gather(w, spec) if matrix else w, shards, specs_layer, in_loop)

    def layer(w: Layers, x_btd, aux, i):
        segments_bt, cos, sin = lax.stop_gradient(aux)
        is_global = (i + 1) % config.global_every == 0 if config.global_every else None
        x_btd = remat.named(x_btd, "decoder_layer_input")
        x_btd = attention_block(w, x_btd, segments_bt, cos, sin, is_global, config)
        x_btd = mlp_block(w, remat.named(x_btd, "mlp_input"), config)
        # Left to choose, XLA:TPU lays the residual stream out with T fastest and transposes it on the SparseCores,
        # where the gathers of the next layer then wait for the end of this one.
        return with_layout_constraint(x_btd, Layout(major_to_minor=(0, 1, 2)))

    if config.remat != "none":
        layer = jax.checkpoint(layer, policy=remat.policy(config), prevent_cse=False)

    x_btD = embed(gather(params.embed, specs.embed), batch.tokens)  # {U_tensor}
    x_btd = reduce_scatter(x_btD, "tensor", dim=2, algorithm=config.collectives)
    aux = (batch.segments, *rope_tables(batch.positions, config))
    x_btd = fsdp.scan_layers(layer, gather_layer, layers, x_btd, aux, prefetch=config.prefetch)
    return rms_norm(x_btd, gather(params.norm, specs.norm), config.norm_eps)


def unembedding(params: Params, config: Config) -> jax.Array:
    """w_vD of the output layer, whole over fsdp."""
    w_vd = params.embed if config.tied_embeddings else params.unembed
    return fsdp.gather(w_vd.astype(config.dtype), param_specs(config).embed, "fsdp", config.collectives)


def loss_fn(params: Params, batch: Batch, config: Config) -> jax.Array:
    """This device's share of the loss: the sum over all mesh axes but `tensor` is the loss.

    Per-device code: call it under `jax.shard_map` with check_vma=True. `params` as `fsdp.whole_over_data` gives them.
    """
    x_btd = hidden_states(params, batch, config)
    x_btD = all_gather(x_btd, "tensor", dim=2, algorithm=config.collectives)
    w_vD = unembedding(params, config)
    t = batch.tokens.shape[1]
    chunk = max(size for size in range(1, min(config.loss_chunk, t) + 1) if t % size == 0)
    return cross_entropy(x_btD, w_vD, batch.targets, batch.loss_weights, chunk, config.logit_soft_cap, config.z_loss)


def sample_next(params: Params, batch: Batch, at: jax.Array, key: jax.Array, config: Config, num_tokens: int):
    """A token for each sequence, one of the first `num_tokens`, drawn from what the model expects after position `at`.

    Gumbel-max: the largest of logits plus noise. Each device of `tensor` looks at its part of the vocabulary, and the
    largest of all is found by two reductions of one number a sequence.

    Per-device code. Returns: int32 tokens_b, the same on all devices that share the sequence.
    """
    x_btd = hidden_states(params, batch, config)
    x_bd = lax.dynamic_index_in_dim(x_btd, at, 1, keepdims=False)
    x_bD = all_gather(x_bd, "tensor", dim=1, algorithm=config.collectives)
    logits_bv = jnp.einsum("bD,vD->bv", x_bD, unembedding(params, config), preferred_element_type=jnp.float32)
    if config.logit_soft_cap:
        logits_bv = config.logit_soft_cap * jnp.tanh(logits_bv / config.logit_soft_cap)
    device = lax.axis_index((*placement.BATCH_AXES, "tensor"))
    logits_bv += jax.random.gumbel(jax.random.fold_in(key, device), logits_bv.shape)
    v = logits_bv.shape[1]
    token_bv = lax.broadcasted_iota(jnp.int32, logits_bv.shape, 1) + lax.axis_index("tensor") * v
    logits_bv = jnp.where(token_bv < num_tokens, logits_bv, -jnp.inf)  # a corpus may use less than the vocabulary
    axes = tuple(axis for axis in placement.MESH_AXES if axis not in placement.BATCH_AXES)
    best_b1 = lax.pmax(jnp.max(logits_bv, -1, keepdims=True), axes)
    return lax.pmin(jnp.min(jnp.where(logits_bv == best_b1, token_bv, config.vocab_size), -1), axes)
