"""The model: a Llama-3-style decoder and its loss, written as the code that one device runs.

    x = embed[tokens]
    for each layer:   x += attention(norm(x));   x += swiglu(norm(x))                     decoder.py
    loss = cross_entropy(unembed(norm(x)), next tokens)                                   vocabulary.py

The layers run in a loop (fsdp.py), in which their weights become whole just before use, or in stages (pipeline.py). Of
a mixture of experts the leading dense layers are a stack of their own.
"""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import anatomy
import decoder
import fp8
import fsdp
import pipeline
import remat
from collectives import all_gather, reduce_scatter
from config import Config, changed
from decoder import rms_norm, rope_tables
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

if TYPE_CHECKING:  # its name alone is used
    import data


def embedded(params: Params, batch: "data.Batch", config: Config) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What goes through the layers: the residual stream x_btd, and this device's shares of what they tell (`loss_fn`).

    `params`, here and below, vary over all axes and are whole over `data`.
    """
    x_btD = embed(_whole(params.embed, param_specs(config).embed, config), batch.tokens)  # {U_tensor}
    return reduce_scatter(x_btD, "tensor", dim=2, algorithm=config.collectives), no_metrics(config)


def constants(batch: "data.Batch", config: Config) -> tuple[jax.Array, ...]:
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
    if config.fp8_skip_layers:
        return run_layers_in_two_precisions(layers, x, constants, config, scaling)
    layers, gather = gathering(layers, config, stack)
    num_layers = jax.tree.leaves(layers)[0].shape[0]

    def layer(weights, x, aux, i):
        *constants, first_layer, key = lax.stop_gradient(aux)
        w = with_scales(*weights, None if key is None else jax.random.fold_in(key, first_layer + i), config)
        is_global = attends_globally(i, first_layer, num_layers, config)
        return decoder.layer(w, x, constants, first_layer + i - config.num_dense_layers, is_global, config)

    if config.remat != "none":
        layer = jax.checkpoint(layer, policy=remat.policy(config), prevent_cse=False)
    aux = (*constants, first_layer, _noise(scaling.key, config))
    shards = layers, scaling.amax
    return fsdp.scan_layers(layer, gather, shards, x, aux, prefetch=config.prefetch, double_buffer=config.double_buffer)


def run_layers_in_two_precisions(layers: Layers, x, constants, config: Config, scaling: Scaling):
    """x after all layers, of which the first and the last `fp8_skip_layers` are not in FP8."""
    skip, L = config.fp8_skip_layers, config.num_layers
    inner = dataclasses.replace(config, fp8_skip_layers=0)
    outer = changed(inner, fp8="none")
    for begin, end, its in ((0, skip, outer), (skip, L - skip, inner), (L - skip, L, outer)):
        part, amax = jax.tree.map(lambda a, begin=begin, end=end: a[begin:end], (layers, scaling.amax))
        x = run_layers(part, x, constants, its, begin, scaling=scaling._replace(amax=amax))
    return x


def gathering(layers: Layers, config: Config, stack: str):
    """(layers, gather): the stack with its norms and biases gathered, and what gathers the matrices of one layer.

    The norms and biases of all layers are gathered at once: in the loop each would take a message of a few kilobytes,
    which is all latency. `gather`: ((shards of a layer, amax)) -> (weights, amax).
    """
    specs, matrices = getattr(param_specs(config), stack), getattr(is_matrix(config), stack)
    contracted = getattr(fp8_contracted(config), stack)  # of those in FP8
    layers = jax.tree.map(lambda w, spec, matrix: w if matrix else _whole(w, spec, config), layers, specs, matrices)
    specs = jax.tree.map(lambda spec: P(*spec[1:]), specs)  # one layer's: the dim L is gone

    def gather_one(w, spec, matrix, contracted):
        if contracted:
            return fp8.gather_weight(w, spec, fp8_recipe(config), contracted, algorithm=config.collectives)
        return _whole(w, spec, config) if matrix else w

    def gather(shards):
        shards, amax = shards
        return of_experts(jax.tree.map(gather_one, shards, specs, matrices, contracted), config), amax

    return layers, gather


def attends_globally(i, first_layer, num_layers: int, config: Config):
    """Whether layer i of these attends without a window; None in a model whose layers are all alike.

    Where every stage has a multiple of `global_every` layers, their numbers in the stage tell it. It is then the same
    on all stages, so that collectives over `context` may stand in the branches.
    """
    if not config.global_every:
        return None
    same_on_all_stages = lax.axis_size("pipe") > 1 and num_layers % config.global_every == 0
    number = i if same_on_all_stages else first_layer + i
    return (number + 1) % config.global_every == 0


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


def loss_of(params: Params, x, batch: "data.Batch", config: Config, key=None) -> tuple[jax.Array, dict[str, jax.Array]]:
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
    params: Params, batch: "data.Batch", config: Config, scaling: Scaling = NOTHING_KNOWN
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


def pipelined(params: Params, batch: "data.Batch", last, microbatches: int, config: Config):
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


def pipelined_loss_and_grads(params: Params, batch: "data.Batch", config: Config):
    """`loss_fn` with stages, and its gradients. Of the weights outside the layers each stage has a share of these."""
    arguments = pipelined(params, batch, loss_of, config.microbatches, config)
    shares, dlayers_R, grads = pipeline.loss_and_grads(*arguments)
    return shares, dataclasses.replace(grads, layers=pipeline.in_order(dlayers_R, config.pipeline_rounds))


def split(batch: "data.Batch", microbatches: int) -> "data.Batch":
    """[b, t] -> [microbatches, b/microbatches, t]"""
    return jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)


def is_last_stage() -> jax.Array:
    return lax.axis_index("pipe") == lax.axis_size("pipe") - 1


# -- behind the last norm


def hidden_states(params: Params, batch: "data.Batch", config: Config, scaling: Scaling = NOTHING_KNOWN) -> jax.Array:
    """x_btd after the last norm; of several stages the last one has it, and the batch is a multiple of them."""
    if (stages := lax.axis_size("pipe")) > 1:
        last = lambda params, x, batch, config: last_norm(params, x[0], config)
        x_Mbtd = pipeline.forward(*pipelined(params, batch, last, stages, config))
        return x_Mbtd.reshape(-1, *x_Mbtd.shape[2:])
    x_btd, _ = run_all_layers(params, embedded(params, batch, config), constants(batch, config), config, scaling)
    return last_norm(params, x_btd, config)
