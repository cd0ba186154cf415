"""The model: a Llama-3-style decoder and its loss, written as the code that one device runs.

    x = embed[tokens]
    for each layer:   x += attention(norm(x));   x += swiglu(norm(x))                     decoder.py
    loss = cross_entropy(unembed(norm(x)), next tokens)                                   vocabulary.py

The layers run in a loop (fsdp.py), in which their weights become whole just before use, or in stages (pipeline.py). Of
a mixture of experts the leading dense layers are a stack of their own.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

import anatomy
import fp8
import fsdp
import pipeline
import remat
from collectives import all_gather, reduce_scatter
from config import Config, changed
from data import Batch
from decoder import attention_block, mlp_block, moe_block, rms_norm, rope_tables
from mixture import no_metrics
from parameters import (
    NOTHING_KNOWN,
    Layers,
    Params,
    Scaling,
    fp8_contracted,
    fp8_recipe,
    is_matrix,
    of_experts,
    param_specs,
    unembedding_recipe,
    with_scales,
)
from vocabulary import cross_entropy, embed


def embedded(params: Params, batch: Batch, config: Config) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What goes through the layers: the residual stream x_btd, and this device's shares of what they tell (`loss_fn`).

    `params`, here and below, vary over all axes and are whole over `data`.
    """
    x_btD = embed(_whole(params.embed, param_specs(config).embed, config), batch.tokens)  # {U_tensor}
    return reduce_scatter(x_btD, "tensor", dim=2, algorithm=config.collectives), no_metrics(config)


def constants(batch: Batch, config: Config) -> tuple[jax.Array, ...]:
    """What all layers see."""
    return (batch.segments, *rope_tables(batch.positions, config))


def run_all_layers(params: Params, x, constants, config: Config, scaling: Scaling = NOTHING_KNOWN):
    """x after all layers; of a mixture the leading dense ones first."""
    if num_dense := config.num_dense_layers:
        x = run_layers(params.dense_layers, x, constants, config, stack="dense_layers", scaling=scaling)
    return run_layers(params.layers, x, constants, config, num_dense, scaling=scaling)


def run_layers(
    layers: Layers, x, constants, config: Config, first_layer=0, stack: str = "layers", scaling: Scaling = NOTHING_KNOWN
):
    """x after these layers, all of a stack or those of a stage; `first_layer` is the number of the first of them."""
    if skip := config.fp8_skip_layers:
        inner = dataclasses.replace(config, fp8_skip_layers=0)
        outer = changed(inner, fp8="none")
        L = config.num_layers
        for begin, end, its in ((0, skip, outer), (skip, L - skip, inner), (L - skip, L, outer)):
            part, amax = jax.tree.map(lambda a, begin=begin, end=end: a[begin:end], (layers, scaling.amax))
            x = run_layers(part, x, constants, its, begin, scaling=scaling._replace(amax=amax))
        return x
    specs, in_loop = getattr(param_specs(config), stack), getattr(is_matrix(config), stack)
    specs_layer = jax.tree.map(lambda spec: P(*spec[1:]), specs)  # one layer's: the dim L is gone

    # The norms and biases of all layers at once: in the loop each would be a gather of a few kilobytes, all latency.
    layers = jax.tree.map(lambda w, spec, matrix: w if matrix else _whole(w, spec, config), layers, specs, in_loop)

    def gather_layer(shards):
        def one(w, spec, matrix, contracted):
            if contracted:
                return fp8.gather_weight(w, spec, fp8_recipe(config), contracted, algorithm=config.collectives)
            return _whole(w, spec, config) if matrix else w

        shards, amax = shards
        whole = jax.tree.map(one, shards, specs_layer, in_loop, getattr(fp8_contracted(config), stack))
        return of_experts(whole, config), amax

    num_layers = jax.tree.leaves(layers)[0].shape[0]
    global_in_step = config.global_every and lax.axis_size("pipe") > 1 and num_layers % config.global_every == 0

    def layer(weights: tuple[Layers, dict], x, aux, i):
        x_btd, metrics = x
        segments_bt, cos, sin, first_layer, key = lax.stop_gradient(aux)
        w = with_scales(*weights, None if key is None else jax.random.fold_in(key, first_layer + i), config)
        # Alike on all stages, if their layers are multiples: then collectives over context may stand in the branches.
        number = i if global_in_step else first_layer + i
        is_global = (number + 1) % config.global_every == 0 if config.global_every else None
        x_btd = remat.named(x_btd, "decoder_layer_input")
        x_btd = remat.named(attention_block(w, x_btd, segments_bt, cos, sin, is_global, config), "mlp_input")
        if config.num_experts and stack == "layers":
            number = first_layer + i - config.num_dense_layers
            x_btd, metrics = moe_block(w, x_btd, metrics, number, config)
        else:
            x_btd = mlp_block(w, x_btd, config)
        # Left to choose, XLA:TPU lays the residual stream out with T fastest and transposes it on the SparseCores,
        # where the gathers of the next layer then wait for the end of this one.
        return with_layout_constraint(x_btd, Layout(major_to_minor=(0, 1, 2))), metrics

    if config.remat != "none":
        layer = jax.checkpoint(layer, policy=remat.policy(config), prevent_cse=False)
    aux = (*constants, first_layer, _noise(scaling.key, config))
    shards = layers, scaling.amax
    return fsdp.scan_layers(layer, gather_layer, shards, x, aux, prefetch=config.prefetch, unroll=config.unroll)


def _noise(key: jax.Array | None, config: Config) -> jax.Array | None:
    """The key of this device's stochastic rounding; without a key there is no gradient to round, and any will do."""
    if config.fp8 == "none" or config.fp8_rounding == "nearest":
        return None
    axes = fp8_recipe(config).axes
    return jax.random.fold_in(jax.random.key(0) if key is None else key, lax.axis_index(axes))


def last_norm(params: Params, x_btd: jax.Array, config: Config) -> jax.Array:
    return rms_norm(x_btd, _whole(params.norm, param_specs(config).norm, config), config.norm_eps)


def _whole(w: jax.Array, spec: P, config: Config) -> jax.Array:
    """A weight as it is used, whole over fsdp."""
    return fsdp.gather(w, spec, "fsdp", config.collectives)


def unembedding(params: Params, config: Config) -> jax.Array:
    """w_vD of the output layer, whole over fsdp."""
    w_vd = params.embed if config.tied_embeddings else params.unembed
    return _whole(w_vd, param_specs(config).embed, config)


def loss_of(params: Params, x, batch: Batch, config: Config, key=None) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and metrics of what comes out of the layers: `auxiliary_loss`, where there is any, is a part of the loss.

    `key`: of stochastic rounding.
    """
    x_btd, metrics = x
    x_btD = all_gather(last_norm(params, x_btd, config), "tensor", dim=2, algorithm=config.collectives)
    labels = batch.targets, batch.loss_weights
    chunk = anatomy.loss_chunk(config, *batch.tokens.shape, config.vocab_size // lax.axis_size("tensor"))
    options = (chunk, config.logit_soft_cap, config.z_loss)
    if recipe := unembedding_recipe(config):
        w_dv = (params.embed if config.tied_embeddings else params.unembed).T
        q = fp8.gather_weight(w_dv, P("fsdp", "tensor"), recipe, 1, algorithm=config.collectives)
        operand = (q.values, q.scale, _noise(key, config))
        loss, of_z = cross_entropy(x_btD, q.source.T, *labels, operand, *options, partial(fp8.logits, recipe=recipe))
    else:
        loss, of_z = cross_entropy(x_btD, unembedding(params, config), *labels, None, *options)
    loss += (of_layers := metrics.get("auxiliary_loss", 0))
    return loss, metrics | {"auxiliary_loss": of_layers + of_z} if config.z_loss else metrics


def loss_fn(
    params: Params, batch: Batch, config: Config, scaling: Scaling = NOTHING_KNOWN
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This device's shares of the loss and of the metrics: summed over all mesh axes but `tensor`, they are these.

    Per-device code: call it under `jax.shard_map` with check_vma=True. `params` as `fsdp.whole_over_data` gives them.
    A dense model has no metrics but, with z_loss, its `auxiliary_loss`; a mixture has `mixture.no_metrics`. With stages
    the batch goes through them in `config.microbatches`; the gradients are `pipelined_loss_and_grads`.
    """
    if lax.axis_size("pipe") > 1:
        shares_M = pipeline.forward(*pipelined(params, batch, loss_of, config.microbatches, config))
        return jax.tree.map(lambda a: jnp.sum(jnp.where(is_last_stage(), a, 0), 0), shares_M)
    x = run_all_layers(params, embedded(params, batch, config), constants(batch, config), config, scaling)
    return loss_of(params, x, batch, config, scaling.key)


# -- in stages


def pipelined(params: Params, batch: Batch, last, microbatches: int, config: Config):
    """The model as pipeline.py takes it: the functions, this stage's layers by round, the other weights, the inputs.

    `last`: (params, x, batch, config) -> what is made of the last layer's x.
    """
    stages, rounds = lax.axis_size("pipe"), config.pipeline_rounds
    batch_M = lax.pcast(split(batch, microbatches), "pipe", to="varying")

    def inputs(m):
        batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, m, keepdims=False), batch_M)
        return batch, constants(batch, config)

    def stage(layers: Layers, x, inputs, turn):
        num_layers = config.num_layers // (stages * rounds)
        return run_layers(layers, x, inputs[1], config, (turn * stages + lax.axis_index("pipe")) * num_layers)

    parts = pipeline.Pipeline(
        first=lambda params, inputs: embedded(params, inputs[0], config),
        stage=jax.checkpoint(stage, prevent_cse=False) if config.remat_stage else stage,
        last=lambda params, x, inputs: last(params, x, inputs[0], config),
        schedule=pipeline.schedule_of(config.pipeline_schedule, stages, microbatches, rounds),
    )
    return parts, pipeline.rounds_of(params.layers, rounds), dataclasses.replace(params, layers=None), inputs


def pipelined_loss_and_grads(params: Params, batch: Batch, config: Config):
    """`loss_fn` with stages, and its gradients. Of the weights outside the layers each stage has a share of these."""
    arguments = pipelined(params, batch, loss_of, config.microbatches, config)
    shares, dlayers_R, grads = pipeline.loss_and_grads(*arguments)
    return shares, dataclasses.replace(grads, layers=pipeline.in_order(dlayers_R, config.pipeline_rounds))


def split(batch: Batch, microbatches: int) -> Batch:
    """[b, t] -> [microbatches, b/microbatches, t]"""
    return jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)


def is_last_stage() -> jax.Array:
    return lax.axis_index("pipe") == lax.axis_size("pipe") - 1


# -- behind the last norm


def hidden_states(params: Params, batch: Batch, config: Config, scaling: Scaling = NOTHING_KNOWN) -> jax.Array:
    """x_btd after the last norm; of several stages the last one has it, and the batch is a multiple of them."""
    if (stages := lax.axis_size("pipe")) > 1:
        last = lambda params, x, batch, config: last_norm(params, x[0], config)
        x_Mbtd = pipeline.forward(*pipelined(params, batch, last, stages, config))
        return x_Mbtd.reshape(-1, *x_Mbtd.shape[2:])
    x_btd, _ = run_all_layers(params, embedded(params, batch, config), constants(batch, config), config, scaling)
    return last_norm(params, x_btd, config)
