"""Sampling: the model continues a text, token by token, on the mesh that it is trained on.

**Formula.** Gumbel-max: the token with the largest logit plus Gumbel noise is a draw from the softmax of the logits.
Each device of `tensor` searches its shard of the vocabulary, and two reductions of one number a sequence find the
largest of all.

**Left out.** A cache of keys and values: each token takes a forward pass over the entire sequence. This is for looking
at samples; `roofline.py serve` predicts the cost of serving.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import config as config_lib
import data
import fsdp
import model
import parameters
import pipeline
import placement
from collectives import all_gather
from config import Config


def hidden_states(params, batch: data.Batch, config: Config, scaling) -> jax.Array:
    """x_btd after the final norm. In a pipeline only the last stage has it, and b is a multiple of the stages."""
    if (stages := lax.axis_size("pipe")) > 1:
        last = lambda params, x, batch, config: model.final_norm(params, x[0], config)
        x_Mbtd = pipeline.forward(*model.pipelined(params, batch, last, stages, config))
        return x_Mbtd.reshape(-1, *x_Mbtd.shape[2:])
    x, constants = model.embed_tokens(params, batch.tokens, config), model.constants(batch, config)
    return model.final_norm(params, model.run_all_layers(params, x, constants, config, scaling=scaling)[0], config)


def sample_next(params, batch: data.Batch, at, key, config: Config, num_tokens: int, scaling=parameters.NO_SCALING):
    """Draws a token for each sequence, one of the first `num_tokens`, from the logits of position `at`.

    Per-device code. Returns: int32 tokens_b, the same on all devices that share the sequence.
    """
    x_btd = hidden_states(params, batch, config, scaling)
    here_bt = batch.positions == at  # on one of the devices of `context`
    x_bd = lax.psum(jnp.sum(jnp.where(here_bt[..., None], x_btd, 0), 1), "context")
    x_bD = all_gather(x_bd, "tensor", dim=1, algorithm=config.collectives)
    logits_bv = jnp.einsum("bD,vD->bv", x_bD, model.unembedding(params, config), preferred_element_type=jnp.float32)
    if config.logit_soft_cap:
        logits_bv = config.logit_soft_cap * jnp.tanh(logits_bv / config.logit_soft_cap)
    device = lax.axis_index((*placement.BATCH_AXES, "tensor"))
    logits_bv += jax.random.gumbel(jax.random.fold_in(key, device), logits_bv.shape)
    v = logits_bv.shape[1]
    token_bv = lax.broadcasted_iota(jnp.int32, logits_bv.shape, 1) + lax.axis_index("tensor") * v
    # A corpus may use only a part of the vocabulary, and only the last stage has the right logits.
    logits_bv = jnp.where((token_bv < num_tokens) & model.is_last_stage(), logits_bv, -jnp.inf)
    axes = tuple(axis for axis in placement.MESH_AXES if axis not in placement.BATCH_AXES)
    best_b1 = lax.pmax(jnp.max(logits_bv, -1, keepdims=True), axes)
    return lax.pmin(jnp.min(jnp.where(logits_bv == best_b1, token_bv, config.vocab_size), -1), axes)


def make_sampler(config: Config, mesh: Mesh, vocab_size: int):
    """Returns jitted (params, prompt_BT, length, key, amax) -> [B, config.sample] drawn after `length` tokens.

    Only tokens below `vocab_size`, the corpus's, are drawn. A full sequence drops its first tokens.
    """
    config = config_lib.changed(config, moe_parts=1)  # the tokens need not divide into chunks
    specs, ways = parameters.param_specs(config), mesh.shape["context"]

    def per_device(params, prompt_bT, length, key, amax):
        weights = fsdp.gather_over_data(params, specs, parameters.compute_dtypes(config), config.collectives)
        scaling = parameters.Scaling(lax.pcast(amax, placement.MESH_AXES, to="varying"))
        T = prompt_bT.shape[1]
        order = jnp.asarray(parameters.position_order(config, T, ways))
        own_t = order.reshape(ways, -1)[lax.axis_index("context")]

        def extend(carry, number):
            tokens_bT, length = carry
            tokens_bt = tokens_bT[:, own_t]
            positions_bt = jnp.broadcast_to(own_t, tokens_bt.shape)
            batch = data.Batch(tokens_bt, tokens_bt, jnp.ones_like(tokens_bt), positions_bt, None)
            own_key = jax.random.fold_in(key, number)
            next_b = sample_next(weights, batch, length - 1, own_key, config, vocab_size, scaling)
            tokens_bT = jnp.where(length == T, jnp.roll(tokens_bT, -1, axis=1), tokens_bT)
            length = jnp.minimum(length + 1, T)
            return (lax.dynamic_update_index_in_dim(tokens_bT, next_b, length - 1, 1), length), next_b

        return lax.scan(extend, (prompt_bT, length), jnp.arange(config.sample))[1].T

    rows = P(placement.BATCH_AXES)
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(specs, rows, P(), P(), P()), out_specs=rows)
    return jax.jit(
        lambda params, prompt_BT, length, key, amax=None: sharded(params, prompt_BT, length, key, amax or {})
    )


def sample(params, corpus: data.Corpus, config: Config, mesh: Mesh, amax: dict | None = None) -> tuple[str, str]:
    """Returns (prompt, continuation): the beginning of a held-out document, and `config.sample` sampled tokens."""
    length = min(64, max(config.seq_len // 4, 1))
    rows = math.prod(mesh.shape[axis] for axis in (*placement.BATCH_AXES, "pipe"))  # all the same; the first is shown
    multiple = 2 * mesh.shape["context"]  # of positions, to shard them zigzag
    prompt_BT = np.zeros((rows, min(config.seq_len, -(-(length + config.sample) // multiple) * multiple)), np.int32)
    prompt_BT[:, :length] = corpus.held_out[:length]
    layout = NamedSharding(mesh, P(placement.BATCH_AXES))
    prompt_BT = jax.make_array_from_callback(prompt_BT.shape, layout, lambda index: prompt_BT[index])
    sampler = make_sampler(config, mesh, corpus.vocab_size)
    sampled_BT = sampler(params, prompt_BT, jnp.int32(length), jax.random.key(config.seed), amax)
    text = multihost_utils.process_allgather(sampled_BT, tiled=True)[0]
    show = data.decode if corpus.vocab_size == 256 else lambda tokens: " ".join(map(str, tokens))
    return show(corpus.held_out[:length]), show(text)
