"""Generation: the model continues prompts token by token, with a key-value cache, on the mesh that it is trained on.

**Idea.** The keys and values of a position do not depend on later tokens. So one pass over the prompt, the prefill,
computes them for all its positions and stores them in a cache. After that a pass has one position: it appends its key
and value, and its query attends to the cache. Without the cache each token would take a pass over all tokens before it.

**Layout.** A batch of prompts is sharded over `data`, `fsdp` and `expert`, heads and cache over `tensor`, weights as in
training. Each layer's weights are gathered over `fsdp` again for each token, so a mesh of `tensor` alone is fastest.
Prompts end at the same column: shorter ones have padding on their left. Then all rows write to the same column of the
cache. Padding is segment 0, text is segment 1, and positions count from the first token of the text.

    keys_LbskH, values_LbskU      of grouped-query attention, S = prompt and generated tokens
    latents_LbsC, keys_Lbs1R      of latent attention: the same on all devices of `tensor`

Layers that share the keys and values of another layer have no cache, and L counts the others.

**Latent attention** (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). The cache holds latents, and no keys or values are
made of them. The up projection moves to the other side of the score, and that of the values behind the sum:

    (w_k_up c_s) . q  =  c_s . (w_k_up^T q)              sum_s p_s (w_v_up c_s)  =  w_v_up (sum_s p_s c_s)

This is grouped-query attention whose only key is (latent, rotated key), of C + R dims, and whose value is the latent.

**Cost** of a token of each of b sequences on one device, in bytes of HBM: the weights, once for all sequences, and
b * S * L * 2 * K * H elements of cache, or b * S * L * (C + R) with latents. `roofline.py serve` predicts the time.

**On TPU7x** XLA transposes [b, 1, D] before and after each collective. So after the prefill the layers take the b texts
as the positions of one sequence, [1, b, D]. A token of Llama 3.1 8B on tensor:8, with 8 texts and a cache of 2,048
columns, takes 2.5 ms instead of 3.3 (compiled). `roofline.py serve` predicts 0.6 ms.

**Left out.** FP8, and the mesh axes `pipe` and `context`: `for_generation` folds them into `fsdp` or `data`. Rows for
which experts have no buffer: buffers hold all rows, so that a text does not depend on the other prompts. A layer with a
window keeps the keys before its window. New requests that join a running batch, and pages of cache.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anatomy
import data
import decoder
import fsdp
import model
import parameters
import placement
import rules
from attention import attention
from collectives import all_gather
from config import Config, changed
from masks import Mask

ROWS = P(placement.BATCH_AXES)  # layout of a batch of prompts
CHUNK = 16  # tokens that `make_extend` generates in a call, at most


class State(NamedTuple):
    """The state that a token changes. Each device has its own, with S columns for its b texts."""

    # keys_LbskH and values_LbskU, or latents_Lbs1C and keys_Lbs1R; two for a stack with any
    cache: tuple[jax.Array, ...]
    logits_bV: jax.Array  # float32: of the next token
    padding_b: jax.Array  # int32: columns before the first token of each text
    length: jax.Array  # int32: columns that are in the cache


_STATE = State(P(None, placement.MESH_AXES), P(placement.MESH_AXES), P(placement.MESH_AXES), P())


def for_generation(config: Config, mesh: Mesh) -> tuple[Config, Mesh]:
    """Returns a trained model's config without FP8, losses and pipeline, and its mesh without `pipe` and `context`.

    These axes become a part of `fsdp` if that can then still shard all weights, else of `data`.
    """
    sizes = dict(mesh.shape)
    values = dict(fp8="none", remat="none", shard_update=False, microbatches=1, double_buffer=False)
    values |= dict(context_impl="ring", context_heads=1, pipeline_schedule="1f1b", pipeline_rounds=1)
    if config.num_experts:  # one round: the rows are few
        values |= dict(moe_impl="dropless", moe_parts=1, buffer_factor=float(sizes["expert"]))
        values |= dict(load_balance_loss=0.0, router_z_loss=0.0)
    if config.mtp:
        values["mtp_loss"] = 0.0
    config = changed(config, **values)
    if (more := sizes["pipe"] * sizes["context"]) > 1:
        sizes |= dict(pipe=1, context=1)
        wide = sizes | dict(fsdp=sizes["fsdp"] * more)
        fits = all(size % math.prod(axes.values()) == 0 for _, size, axes in rules.cuts(config, wide))
        sizes = wide if fits else sizes | dict(data=sizes["data"] * more)
    config = changed(config, prefetch=config.prefetch and math.prod(sizes[axis] for axis in placement.WEIGHT_AXES) > 1)
    devices = mesh.devices.reshape(*sizes.values())
    return config, Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def placed(params: parameters.Params, config: Config, mesh: Mesh) -> parameters.Params:
    """The parameters in the compute dtype, laid out on the mesh of `for_generation`."""
    layouts = jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameters.param_specs(config))
    cast = lambda w, dtype, layout: jax.device_put(w.astype(dtype), layout)
    return jax.tree.map(cast, params, parameters.compute_dtypes(config), layouts)


# -- logits of given texts


def make_logits(config: Config, mesh: Mesh):
    """Returns jitted (params, tokens_BT, lengths_B) -> logits_BTV in float32, each of the next token.

    Texts are padded on their right, up to T tokens: `lengths_B` counts their own. Logits of padding mean nothing.
    B must be a multiple of the mesh axes data * fsdp * expert. Arguments: as of `for_generation`, `placed`.
    """

    def per_device(params, tokens_bt, lengths_b):
        weights = _weights(params, config)
        columns_bt = jnp.broadcast_to(jnp.arange(tokens_bt.shape[1]), tokens_bt.shape)
        batch = data.Batch(tokens_bt, None, (columns_bt < lengths_b[:, None]).astype(jnp.int32), columns_bt, None)
        x, constants = model.embed_tokens(weights, tokens_bt, config), model.constants(batch, config)
        return _invarying(_logits(weights, model.run_all_layers(weights, x, tokens_bt, constants, config)[0], config))

    in_specs = (parameters.param_specs(config), ROWS, ROWS)
    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=ROWS))


def _weights(params, config: Config):
    specs = parameters.param_specs(config)
    return fsdp.gather_over_data(params, specs, parameters.compute_dtypes(config), config.collectives)


def _invarying(x):
    """x, typed as the same on all devices that share rows. It must be."""
    return lax.pmax(x, tuple(axis for axis in placement.MESH_AXES if axis not in placement.BATCH_AXES))


def _logits(weights: parameters.Params, x_btd, config: Config) -> jax.Array:
    """logits_btV in float32, from the result of the last layer."""
    x_btD = all_gather(model.final_norm(weights, x_btd, config), "tensor", dim=2, algorithm=config.collectives)
    w_vD = model.unembedding(weights, config)
    logits_btv = jnp.einsum("btD,vD->btv", x_btD, w_vD, preferred_element_type=jnp.float32)
    if config.logit_soft_cap:
        logits_btv = config.logit_soft_cap * jnp.tanh(logits_btv / config.logit_soft_cap)
    return all_gather(logits_btv, "tensor", dim=2, algorithm=config.collectives)


# -- with a cache


def make_prefill(config: Config, mesh: Mesh, capacity: int):
    """Returns jitted (params, tokens_BT, lengths_B) -> State with a cache of `capacity` >= T columns.

    Prompts are padded on their left, up to T tokens: `lengths_B` counts their own. B must be a multiple of the mesh
    axes data * fsdp * expert. Arguments: as of `for_generation`, `placed`.
    """

    def per_device(params, tokens_bT, lengths_b):
        b, T = tokens_bT.shape
        cache = [jnp.zeros(shape, config.dtype) for shape in cache_shapes(config, b, capacity)]
        cache = tuple(lax.pcast(a, placement.MESH_AXES, to="varying") for a in cache)
        return _advance(_weights(params, config), tokens_bT, State(cache, None, T - lengths_b, jnp.int32(0)), config)

    in_specs = (parameters.param_specs(config), ROWS, ROWS)
    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=_STATE))


def make_extend(config: Config, mesh: Mesh, choose: Callable):
    """Returns jitted (params, state, key, first, count) -> (state, tokens_BC, log_probabilities_BC), C = CHUNK columns.

    It generates `count` <= CHUNK tokens, the first of which has the number `first`. The state is donated. A token's
    log-probability is that of the model, whatever `choose` makes of it.

    Args:
      choose: (logits_bV, u_b) -> tokens_b, with u uniform in [0, 1). u depends on the key, the number of the token and
        the row of the batch, and not on the mesh.
    """

    def per_device(params, state, key, first, count):
        weights = _weights(params, config)
        b = state.logits_bV.shape[0]
        row_b = lax.axis_index(placement.BATCH_AXES) * b + jnp.arange(b)

        def one(n, carry):
            state, tokens_bC, log_p_bC = carry
            draw = lambda row: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, first + n), row))
            token_b1 = choose(state.logits_bV, jax.vmap(draw)(row_b)).astype(jnp.int32)[:, None]
            log_p_b1 = jnp.take_along_axis(jax.nn.log_softmax(state.logits_bV), token_b1, 1)
            put = lambda a_bC, a_b1: lax.dynamic_update_slice_in_dim(a_bC, a_b1, n, 1)
            return _advance(weights, token_b1, state, config), put(tokens_bC, token_b1), put(log_p_bC, log_p_b1)

        zeros = [jnp.zeros((b, CHUNK), dtype) for dtype in (jnp.int32, jnp.float32)]
        zeros = lax.pcast(zeros, placement.MESH_AXES, to="varying")
        state, tokens_bC, log_p_bC = lax.fori_loop(0, count, one, (state, *zeros))
        return state, _invarying(tokens_bC), _invarying(log_p_bC)

    in_specs = (parameters.param_specs(config), _STATE, P(), P(), P())
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=(_STATE, ROWS, ROWS))
    return jax.jit(sharded, donate_argnums=1)


def cache_shapes(config: Config, sequences: int, columns: int) -> list[tuple[int, ...]]:
    """Shapes of a device's cache: two arrays, or if global layers are a stack of their own, two more for these.

    Layers that share keys and values have none of their own. Per-device code: heads are sharded over `tensor`.
    """
    if config.kv_lora_rank:
        shape = (config.num_layers, sequences, columns, 1)
        return [(*shape, config.kv_lora_rank), (*shape, config.rope_head_dim)]
    shapes = []
    for stack in ("layers", "global_layers") if anatomy.two_kinds(config) else ("layers",):
        kind, (num_layers, _) = anatomy.stack_config(config, stack), anatomy.layer_stacks(config)[stack]
        num_layers += config.num_dense_layers
        shape = (num_layers, sequences, columns, kind.num_kv_heads // lax.axis_size("tensor"))
        shapes += [(*shape, anatomy.key_dim(kind)), (*shape, anatomy.value_dim(kind))]
    return shapes


def _advance(weights: parameters.Params, tokens_bt, state: State, config: Config) -> State:
    """The state after t more tokens of each text. Without logits in the state it is the prefill."""
    column_1t = state.length + jnp.arange(tokens_bt.shape[1])[None]
    position_bt = column_1t - state.padding_b[:, None]
    batch = data.Batch(tokens_bt, None, (position_bt >= 0).astype(jnp.int32), position_bt.clip(0), None)
    is_prefill = state.logits_bV is None
    batch = batch if is_prefill else jax.tree.map(jnp.transpose, batch)
    x = *model.embed_tokens(weights, batch.tokens, config), (state.cache, state.padding_b, state.length)
    attend = _prefill_attention if is_prefill else _cached_attention
    constants = model.constants(batch, config)
    x = model.run_all_layers(weights, x, batch.tokens, constants, config, attend_with=attend)
    x_btd, _, (cache, *_) = x
    logits_bV = _logits(weights, x_btd[:, -1:], config)[:, 0] if is_prefill else _logits(weights, x_btd, config)[0]
    return State(cache, logits_bV, state.padding_b, state.length + tokens_bt.shape[1])


def _prefill_attention(layer, w, h_btd, constants, is_global, config: Config, carried):
    """`decoder.self_attention` that also fills columns 0 to t of the cache."""
    segments_bt, cos, sin = constants
    cache, padding_b, length = carried
    q_btnH, *entries = _project(w, h_btd, cos, sin, config)
    if entries:
        cache = _written(cache, entries, layer, length, is_global, config)
    else:
        entries = [a[:, : h_btd.shape[1]] for a in _entries(cache, layer, is_global, config)]
    k_btkH, v_btkU = decoder.expand_latents(w, entries[0][:, :, 0], entries[1]) if config.kv_lora_rank else entries
    return decoder.attend(q_btnH, k_btkH, v_btkU, segments_bt, w.sinks, is_global, config), (cache, padding_b, length)


def _cached_attention(layer, w, h_1bd, constants, is_global, config: Config, carried):
    """Attention of one position of each text to all columns of the cache, to which it is added."""
    segments_1b, cos, sin = constants
    cache, padding_b, length = carried
    q_b1nH, *entries = (a.swapaxes(0, 1) for a in _project(w, h_1bd, cos, sin, config))
    if entries:
        cache = _written(cache, entries, layer, length, is_global, config)
    k_bskH, v_bskU = _entries(cache, layer, is_global, config)
    segments_bs = (jnp.arange(k_bskH.shape[1]) >= padding_b[:, None]).astype(jnp.int32)
    scores = decoder.score_options(config)
    if config.kv_lora_rank:
        q_b1nI, q_b1nR = jnp.split(q_b1nH, [config.head_dim], -1)
        q_b1nC = jnp.einsum("btnI,CnI->btnC", q_b1nI, w.w_k_up)
        q_b1nH = jnp.concatenate([q_b1nC, q_b1nR], -1)
        k_bskH, v_bskU = jnp.concatenate([k_bskH, v_bskU], -1), k_bskH

    def windowed(window):
        mask = Mask(window=window, segments=(segments_1b.T, segments_bs), q_offset=length)
        return attention(q_b1nH, k_bskH, v_bskU, mask, scores, w.sinks)[0]

    if is_global is None:
        context_b1nU = windowed(config.window)
    else:
        context_b1nU = lax.cond(is_global, partial(windowed, 0), partial(windowed, config.window))
    if config.kv_lora_rank:
        context_b1nC = context_b1nU
        context_b1nU = jnp.einsum("btnC,CnU->btnU", context_b1nC, w.w_v_up)
    return context_b1nU.swapaxes(0, 1), (cache, padding_b, length)


def _project(w, h_btd, cos, sin, config: Config):
    """(q_btnH, and the two entries of the cache for these positions: k_btkH and v_btkU, or kv_bt1C and k_rope_bt1R).

    A layer that shares another one's keys and values has no entries.
    """
    if config.shares_kv:
        return (decoder.project_query(w, h_btd, cos, sin, config),)
    if not config.kv_lora_rank:
        return decoder.project_qkv(w, h_btd, cos, sin, config)
    q_btnH, kv_btC, k_rope_bt1R = decoder.latent_projections(w, h_btd, cos, sin, config)
    return q_btnH, kv_btC[:, :, None], k_rope_bt1R


def _place(cache, layer, is_global, config: Config):
    """(where the two arrays of a layer's stack are in the cache, its row in them)."""
    if config.shares_kv:
        stack = slice(2, 4) if is_global else slice(0, 2)
        return stack, cache[stack.start].shape[0] - 1  # the last layer that has keys and values
    if len(cache) == 2:
        return slice(0, 2), layer
    num_global = layer // config.global_every  # before this layer
    return (slice(2, 4), num_global) if is_global else (slice(0, 2), layer - num_global)


def _entries(cache, layer, is_global, config: Config):
    """The two arrays of the cache that a layer attends to, [b, s, ...]."""
    stack, row = _place(cache, layer, is_global, config)
    return [lax.dynamic_index_in_dim(a, row, keepdims=False) for a in cache[stack]]


def _written(cache, entries, layer, column, is_global, config: Config):
    """The cache with entries [b, t, ...] in a layer, from a column on."""
    stack, row = _place(cache, layer, is_global, config)
    put = lambda a, entry: lax.dynamic_update_slice(a, entry[None].astype(a.dtype), (row, 0, column, 0, 0))
    return (*cache[: stack.start], *map(put, cache[stack], entries), *cache[stack.stop :])
