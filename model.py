"""The model: a Llama-3-style decoder and its loss, written as the code that one device runs.

    x = embed[tokens]
    for each layer:   x += attention(norm(x));   x += mlp(norm(x))                        decoder.py
    loss = cross_entropy(unembed(norm(x)), next tokens)                                   vocabulary.py

The layers run in a loop that gathers the weights of each just before use (fsdp.py), or in stages (pipeline.py). If some
layers have experts and the leading ones do not, those dense layers are a stack of their own. So are global layers, if
their heads differ from those of the other layers: an iteration of the loop is then a period of layers. Last layers that
share keys and values have a loop of their own.
"""

import dataclasses
import math
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
import vocabulary
from collectives import all_gather, all_to_all, reduce_scatter
from config import Config, changed
from decoder import rms_norm, rope_tables
from mixture import zero_metrics
from parameters import (
    NO_SCALING,
    Layers,
    Params,
    Scaling,
    fp8_contracted,
    fp8_recipe,
    is_matrix,
    param_specs,
    unembedding_recipe,
    unstack_experts,
    with_scales,
)
from placement import WEIGHT_AXES
from tensor import column_parallel, row_parallel
from vocabulary import cross_entropy, embed

if TYPE_CHECKING:  # only annotations name it
    import data


def loss_fn(
    params: Params, batch: "data.Batch", config: Config, scaling: Scaling = NO_SCALING, attend_with=None, carried=()
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This device's shares of the loss and of the metrics: their sums over all mesh axes but `tensor` are the values.

    Per-device code: call it under `jax.shard_map` with check_vma=True. `fsdp.gather_over_data` makes the `params`. A
    dense model has no metrics but `auxiliary_loss`, if z_loss is on; a mixture has those of `mixture.zero_metrics`.
    With `mtp` there are `mtp_loss`, and `auxiliary_loss`, of which it is a part. A pipeline runs the batch in
    `config.microbatches`; for its gradients use `pipelined_loss_and_grads`. With `attend_with` and
    `carried` of `qk_clip.options`, outside of pipelines, there are `max_logits` [L, n], whose maxima are the values.
    """
    if lax.axis_size("pipe") > 1:
        shares_M = pipeline.forward(*pipelined(params, batch, loss_and_metrics, config.microbatches, config))
        return jax.tree.map(lambda a: jnp.sum(jnp.where(is_last_stage(), a, 0), 0), shares_M)
    shared = constants(batch, config)
    x = *embed_tokens(params, batch.tokens, config), *carried
    x = run_all_layers(params, x, batch.tokens, shared, config, scaling=scaling, attend_with=attend_with)
    if anatomy.runs_mtp(config):
        x = x[0], *multi_token_prediction(params, x, batch, shared, config, scaling, attend_with)
    return loss_and_metrics(params, x, batch, config, scaling.key)


# -- the layers


def embed_tokens(params: Params, tokens_bt, config: Config) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The input of the layers: the residual stream x_btd, and the metrics to which the layers add (see `loss_fn`).

    Here and below, `params` are gathered over `data` and vary over all mesh axes.
    """
    x_btD = embed(_gather(params.embed, param_specs(config).embed, config), tokens_bt)  # {U_tensor}
    x_btd = reduce_scatter(x_btD, "tensor", dim=2, algorithm=config.collectives)
    if config.embedding_scale:
        x_btd *= jnp.asarray(math.sqrt(config.model_dim), x_btd.dtype)
    return x_btd, zero_metrics(config)


def constants(batch: "data.Batch", config: Config) -> tuple[jax.Array, ...]:
    """The inputs that all layers share: segments_bt, and the cos and sin of rotary positions.

    If global layers have other positions, their cos and sin follow.
    """
    differ = config.global_rope_theta > 0 or anatomy.two_kinds(config)
    kinds = [anatomy.of_kind(config, is_global) for is_global in ((False, True) if differ else (False,))]
    return (batch.segments, *(table for kind in kinds for table in rope_tables(batch.positions, kind)))


def layer_inputs(params: Params, tokens_bt, x_btd, config: Config) -> jax.Array | None:
    """inputs_Ybtp: for each of the Y layers what it has of a token beside the residual stream; None without `ple_dim`.

    These are per-layer embeddings (Gemma 4 E2B; released by Google, described in transformers' gemma4):

        ple_embed[token] * sqrt(P) + norm(x_btD @ ple_project / sqrt(D)),    over sqrt(2)

    with the model's embedding x. Every layer has its own P columns of both. Each device of `tensor` has a part of them.
    The table is not gathered. It is sharded by columns, and each device looks up its own columns for the tokens of all.
    An all-to-all then moves b*t*A numbers, where a gather would move V*A, and so does its transpose for the gradient.
    E2B on tpu7x:4x4x4, --mesh=data:4,fsdp:32 --batch=256 --remat=full --xla_flags=recommended: 0.567 s a step and 14.3
    GiB in place of 0.601 s and 21.6 GiB (compiled by libtpu 0.0.50.1, by its estimates).
    """
    if not config.ple_dim:
        return None
    cast, shape = lambda factor: jnp.asarray(factor, x_btd.dtype), (config.num_layers, config.ple_dim)
    tokens_Bt = all_gather(tokens_bt, WEIGHT_AXES, dim=0, algorithm=config.collectives)
    rows_Bta = embed(params.ple_embed, tokens_Bt)
    rows_btA = all_to_all(rows_Bta, WEIGHT_AXES, split_dim=0, concat_dim=2, algorithm=config.collectives)  # {U_tensor}
    rows_btYP = rows_btA.reshape(*tokens_bt.shape, *shape)
    rows_btYp = reduce_scatter(rows_btYP, "tensor", dim=3, algorithm=config.collectives)
    w_DYp = _gather(params.ple_project, param_specs(config).ple_project, config)
    (context_btYp,) = column_parallel(x_btd, (w_DYp,), config)
    context_btYp = rms_norm(context_btYp * cast(config.model_dim**-0.5), params.norm_ple, config, dim="P")
    inputs_btYp = (rows_btYp * cast(config.ple_dim**0.5) + context_btYp) * cast(2**-0.5)
    return jnp.moveaxis(inputs_btYp, 2, 0)


def run_all_layers(params: Params, x, tokens_bt, constants, config: Config, **options):
    """x after all layers: the leading dense ones of a mixture first, then the others. Options: of `run_layers`."""
    inputs = partial(inputs_of_stack, layer_inputs(params, tokens_bt, x[0], config), config=config)
    if anatomy.two_kinds(config):
        return run_kinds_of_layers(params, x, inputs, constants, config, **options)
    for stack in ("dense_layers", "layers") if config.num_dense_layers else ("layers",):
        layers, first_layer = getattr(params, stack), anatomy.layer_numbers(config, stack)[0]
        x = run_layers(layers, x, constants, config, first_layer, stack, inputs=inputs(stack), **options)
    return x


def inputs_of_stack(inputs_Ybtp, stack: str, config: Config):
    """The rows of `layer_inputs` for the layers of a stack, in their order; None of None."""
    if inputs_Ybtp is None:
        return None
    numbers = anatomy.layer_numbers(config, stack)
    first, last = numbers[0], numbers[-1]
    if not anatomy.two_kinds(config):
        return inputs_Ybtp[first : last + 1]
    # Slices of periods, not an index, whose gradient would be a scatter.
    periods = inputs_Ybtp.reshape(-1, config.global_every, *inputs_Ybtp.shape[1:])
    periods = periods[first // config.global_every : last // config.global_every + 1]
    return periods[:, -1] if "global" in stack else periods[:, :-1].reshape(-1, *inputs_Ybtp.shape[1:])


def run_layers(
    layers: Layers,
    x,
    constants,
    config: Config,
    first_layer=0,
    stack="layers",
    scaling=NO_SCALING,
    attend_with=None,
    inputs=None,
):
    """x after `layers`: a full stack, or the layers of a pipeline stage. The number of the first is `first_layer`.

    `attend_with` takes the place of attention (decoder.layer); its first argument is the number of the layer. `inputs`
    are those of `layer_inputs` for these layers.
    """
    if config.fp8_skip_layers:
        return run_layers_in_two_precisions(layers, x, constants, config, scaling, attend_with, inputs)
    layers, gather = layer_gather(layers, config, stack)
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    layer = layer_function(partial(is_global_layer, num_layers=num_layers, config=config), config, attend_with)
    aux = (*constants, first_layer, _rounding_key(scaling.key, config))
    shards = layers, scaling.amax, inputs
    return fsdp.scan_layers(layer, gather, shards, x, aux, **loop_options(config))


def run_kinds_of_layers(params: Params, x, inputs, constants, config: Config, scaling=NO_SCALING, attend_with=None):
    """`run_all_layers` where global layers are a stack of their own: loops over periods of `global_every` layers.

    If the last layers share keys and values, they have a loop of their own. Those that they share are carried from
    layer to layer: in the first loop each layer replaces those of its kind. `inputs`: stack -> its `layer_inputs`.
    """
    num_shared = config.num_kv_shared_layers
    handed_on = num_shared > 0 and attend_with is None
    if handed_on:
        attend_with, x = decoder.attention_with_shared_kv, (*x, decoder.no_keys_and_values(x[0], config))
    run = partial(_run_periods, params, inputs, constants, config, scaling, attend_with)
    x = run(("layers", "global_layers"), 0, x)
    if num_shared:
        x = run(("kv_shared_layers", "kv_shared_global_layers"), config.num_layers - num_shared, x)
    return x[:-1] if handed_on else x


def _run_periods(params: Params, inputs, constants, config: Config, scaling, attend_with, stacks, first_layer, x):
    """x after the layers of two stacks, local and global ones, the first of which has the number `first_layer`."""
    shards, gathers, layers = [], [], []
    for stack, is_global in zip(stacks, (False, True), strict=True):
        weights, gather = layer_gather(getattr(params, stack), config, stack)
        shards.append((weights, scaling.amax, inputs(stack)))
        gathers.append(gather)
        kind = anatomy.stack_config(config, stack)
        layers.append(layer_function(lambda i, first_layer, is_global=is_global: is_global, kind, attend_with))
    aux = (*constants, first_layer, _rounding_key(scaling.key, config))
    options = loop_options(config) | dict(pattern=(0,) * (config.global_every - 1) + (1,))
    return fsdp.scan_layers(tuple(layers), tuple(gathers), tuple(shards), x, aux, **options)


def loop_options(config: Config) -> dict:
    """Options of `fsdp.scan_layers`. Without prefetch it carries no weights if there is nothing to gather."""
    gathered = is_gathered()
    prefetch, ordered = config.prefetch or gathered, gathered and config.num_experts > 0
    return dict(prefetch=prefetch, double_buffer=config.double_buffer, ordered=ordered)


def is_gathered() -> bool:
    """Whether there are several devices over which weights are gathered."""
    return any(lax.axis_size(axis) > 1 for axis in WEIGHT_AXES)


def layer_function(is_global, config: Config, attend_with):
    """The function of a layer for `fsdp.scan_layers`, with recomputation. `is_global`: (i, first_layer) -> whether."""

    def layer(weights, *rest):
        (w, amax, input_btp), (*within, x, aux, i, arriving) = weights, rest
        for others in within:
            w = dataclasses.replace(w, **{name: each for name, each in vars(others).items() if each is not None})
        *constants, first_layer, key = lax.stop_gradient(aux)
        number = first_layer + i
        w = with_scales(w, amax, None if key is None else jax.random.fold_in(key, number), config)
        attend = attend_with and partial(attend_with, number)
        kind = is_global(i, first_layer)
        number -= config.num_dense_layers
        return decoder.layer(w, x, constants, number, kind, config, attend, arriving, input_btp)

    if config.remat == "none":
        return layer
    return jax.checkpoint(layer, policy=remat.policy(config), prevent_cse=False)


def run_layers_in_two_precisions(layers: Layers, x, constants, config: Config, scaling: Scaling, attend_with, inputs):
    """x after all layers, with the first and last `fp8_skip_layers` in `config.dtype` and those between in FP8."""
    skip, L = config.fp8_skip_layers, config.num_layers
    inner = dataclasses.replace(config, fp8_skip_layers=0)
    outer = changed(inner, fp8="none")
    for begin, end, precision in ((0, skip, outer), (skip, L - skip, inner), (L - skip, L, outer)):
        parts = jax.tree.map(lambda a, begin=begin, end=end: a[begin:end], (layers, scaling.amax, inputs))
        part, amax, of_part = parts
        part_scaling = scaling._replace(amax=amax)
        x = run_layers(part, x, constants, precision, begin, "layers", part_scaling, attend_with, of_part)
    return x


def layer_gather(layers: Layers, config: Config, stack: str):
    """(layers, gather): the stack with its norms and biases gathered, and what gathers a layer, for `fsdp.scan_layers`.

    The norms and biases of all layers are gathered at once. Inside the loop each would be a message of a few kilobytes,
    which is all latency. `gather`: (shards of a layer, amax, its `layer_inputs`) -> (weights, amax, its inputs).
    Without prefetch it is a pair, whose second function gathers the matrices of the MLP or of the experts.
    """
    specs, matrices = getattr(param_specs(config), stack), getattr(is_matrix(config), stack)
    contracted = getattr(fp8_contracted(config), stack)  # 0 for weights that are not in FP8
    layers = jax.tree.map(lambda w, spec, matrix: w if matrix else _gather(w, spec, config), layers, specs, matrices)
    specs = jax.tree.map(lambda spec: P(*spec[1:]), specs)  # of one layer, without the dim L

    def gather_weight(w, spec, matrix, contracted):
        if contracted:
            return fp8.gather_weight(w, spec, fp8_recipe(config), contracted, WEIGHT_AXES, config.collectives)
        return _gather(w, spec, config) if matrix else w

    def gather(shards, names):
        """The weights of these names. In the backward pass one matrix of the experts is summed before the next."""
        stored = {name: w for name in all_weights if name in names and (w := getattr(shards, name, None)) is not None}
        experts = [name for name in stored if all_weights[name].part == "experts"]
        w, summed_later = {}, []
        for group in ([name for name in stored if name not in experts], *([name] for name in experts)):
            these = {name: stored[name] for name in group}
            if summed_later:
                these, w = _summed_first(these, w, summed_later)
            w |= {name: gather_weight(these[name], *(getattr(tree, name) for tree in layout)) for name in these}
            summed_later = [name for name in these if getattr(matrices, name)] if is_gathered() else []
        left_out = {field.name: None for field in dataclasses.fields(Layers) if field.name not in w}
        return unstack_experts(dataclasses.replace(shards, **left_out, **w), config)

    all_weights = anatomy.WEIGHTS
    layout = specs, matrices, contracted
    large = {name for name, weight in all_weights.items() if weight.part in ("mlp", "experts")}
    if config.prefetch:
        return layers, lambda shards: (gather(shards[0], all_weights), *shards[1:])
    ahead = lambda shards: (gather(shards[0], all_weights.keys() - large), *shards[1:])
    return layers, (ahead, lambda shards: gather(shards[0], large))


def _summed_first(shards: dict, weights: dict, names: list[str]) -> tuple[dict, dict]:
    """`fsdp.summed_first` for those of the weights that have these names. One in FP8 has its gradient in its source."""
    sources = {name: w.source if isinstance(w := weights[name], fp8.Quantized) else w for name in names}
    shards, sources = fsdp.summed_first(shards, sources)
    renewed = lambda w, source: dataclasses.replace(w, source=source) if isinstance(w, fp8.Quantized) else source
    return shards, weights | {name: renewed(weights[name], source) for name, source in sources.items()}


def _gather(w: jax.Array, spec: P, config: Config) -> jax.Array:
    """A weight, gathered over fsdp and fsdp_transpose."""
    return fsdp.gather(w, spec, WEIGHT_AXES, config.collectives)


def is_global_layer(i, first_layer, num_layers: int, config: Config):
    """Whether the i-th of `num_layers` layers attends without a window; None if all layers of the model do the same.

    If every pipeline stage has a multiple of `global_every` layers, the number within the stage decides. The answer is
    then the same on all stages, so that collectives over `context` may run inside a `lax.cond` on it.
    """
    if not config.global_every:
        return None
    same_on_all_stages = lax.axis_size("pipe") > 1 and num_layers % config.global_every == 0
    number = i if same_on_all_stages else first_layer + i
    return (number + 1) % config.global_every == 0


def _rounding_key(key: jax.Array | None, config: Config) -> jax.Array | None:
    """This device's key for stochastic rounding; None if gradients are rounded to nearest.

    Without `key` no gradient is taken, so nothing is rounded stochastically and any key will do.
    """
    if config.fp8 == "none" or config.fp8_rounding == "nearest":
        return None
    axes = fp8_recipe(config).axes
    return jax.random.fold_in(jax.random.key(0) if key is None else key, lax.axis_index(axes))


# -- the output


def final_norm(params: Params, x_btd: jax.Array, config: Config, name: str = "norm") -> jax.Array:
    """The norm after the last layer, or another one outside the layers."""
    scale_d = _gather(getattr(params, name), getattr(param_specs(config), name), config)
    return rms_norm(x_btd, scale_d, config)


def unembedding(params: Params, config: Config) -> jax.Array:
    """w_vD of the output layer, gathered over fsdp and fsdp_transpose."""
    w_vd = params.embed if config.tied_embeddings else params.unembed
    return _gather(w_vd, param_specs(config).embed, config)


def output_layer(params: Params, key: jax.Array | None, config: Config):
    """(w_vD, operand, matmul) for `cross_entropy`, in FP8 if the config says so."""
    recipe = unembedding_recipe(config)
    if recipe is None:
        return unembedding(params, config), None, vocabulary.matmul
    w_dv = (params.embed if config.tied_embeddings else params.unembed).T
    spec = P("fsdp", ("tensor", "fsdp_transpose"))
    q = fp8.gather_weight(w_dv, spec, recipe, 1, WEIGHT_AXES, config.collectives)
    operand = (q.values, q.scale, _rounding_key(key, config))
    return q.source.T, operand, partial(fp8.logits, recipe=recipe)


def loss_and_metrics(
    params: Params, x, batch: "data.Batch", config: Config, key=None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and the metrics, from the result `x` of the last layer. The loss contains the auxiliary losses.

    What qk_clip.py carries in `x` is among the metrics, as `max_logits`. `key`: for stochastic rounding.
    """
    x_btd, metrics, *carried = x
    metrics = metrics | ({"max_logits": carried[0]} if carried else {})
    h_btd = final_norm(params, x_btd, config)
    loss, z_part = output_loss(params, h_btd, batch.targets, batch.loss_weights, config, config.z_loss, key)
    loss += (auxiliary_loss := metrics.get("auxiliary_loss", 0))
    return loss, metrics | {"auxiliary_loss": auxiliary_loss + z_part} if config.z_loss else metrics


def output_loss(params: Params, h_btd, targets_bt, weights_bt, config: Config, z_loss: float, key=None):
    """`cross_entropy` of the logits of h_btd, the normed result of a layer."""
    h_btD = all_gather(h_btd, "tensor", dim=2, algorithm=config.collectives)
    w_vD, operand, matmul = output_layer(params, key, config)
    chunk = anatomy.loss_chunk(config, *targets_bt.shape, config.vocab_size // lax.axis_size("tensor"))
    return cross_entropy(h_btD, w_vD, targets_bt, weights_bt, operand, chunk, config.logit_soft_cap, z_loss, matmul)


def multi_token_prediction(params: Params, x, batch: "data.Batch", shared, config: Config, scaling: Scaling, attend):
    """(metrics, what is carried), with the loss of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    One more layer predicts the token after the next, from the model's result for a token and the embedding of the next
    one. Embedding and unembedding are the model's. The paper leaves open whether that result is normed; here it is, as
    in vLLM, where the released weights then predict more tokens (vllm-project/vllm#47448).
    """
    x_btd, *carried = x
    specs = param_specs(config)
    hidden_btd = final_norm(params, final_norm(params, x_btd, config), config, "norm_mtp_hidden")
    next_btd = final_norm(params, embed_tokens(params, batch.targets, config)[0], config, "norm_mtp_embed")
    w_dD = _gather(params.w_mtp_embed, specs.w_mtp_embed, config)
    v_dD = _gather(params.w_mtp_hidden, specs.w_mtp_hidden, config)
    x_btd = row_parallel(next_btd, w_dD, config) + row_parallel(hidden_btd, v_dD, config)
    stack = params.mtp_layers, (x_btd, *carried), shared, config, config.num_layers, "mtp_layers"
    x_btd, metrics, *carried = run_layers(*stack, scaling, attend)
    weights_bt = jnp.where(batch.next_targets < 0, 0, batch.loss_weights)
    h_btd = final_norm(params, x_btd, config, "norm_mtp")
    key = None if scaling.key is None else jax.random.fold_in(scaling.key, config.num_layers)
    loss, _ = output_loss(params, h_btd, jnp.maximum(batch.next_targets, 0), weights_bt, config, 0.0, key)
    auxiliary_loss = metrics.get("auxiliary_loss", 0) + config.mtp_loss * loss
    return metrics | {"mtp_loss": loss, "auxiliary_loss": auxiliary_loss}, *carried


# -- in pipeline stages


def pipelined(params: Params, batch: "data.Batch", last, count: int, config: Config, attend_with=None, carried=()):
    """The arguments of pipeline.py: its functions, this stage's layers by round, the other weights, and the inputs.

    `last`: (params, x, batch, config) -> the pipeline's result, from the x of the last layer. `count`: microbatches.
    """
    stages, rounds = lax.axis_size("pipe"), config.pipeline_rounds
    batch_M = lax.pcast(split(batch, count), "pipe", to="varying")

    def inputs(m):
        batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, m, keepdims=False), batch_M)
        return batch, constants(batch, config)

    def stage(layers: Layers, x, inputs, round_):
        first_layer = (round_ * stages + lax.axis_index("pipe")) * (config.num_layers // (stages * rounds))
        return run_layers(layers, x, inputs[1], config, first_layer, attend_with=attend_with)

    functions = pipeline.Pipeline(
        first=lambda params, inputs: (*embed_tokens(params, inputs[0].tokens, config), *carried),
        stage=jax.checkpoint(stage, prevent_cse=False) if config.remat_stage else stage,
        last=lambda params, x, inputs: last(params, x, inputs[0], config),
        schedule=pipeline.make_schedule(config.pipeline_schedule, stages, count, rounds),
        maxima=("max_logits",),
    )
    return functions, pipeline.to_rounds(params.layers, rounds), dataclasses.replace(params, layers=None), inputs


def pipelined_loss_and_grads(params: Params, batch: "data.Batch", config: Config, **options):
    """(`loss_fn`, its gradients) of a pipeline. Gradients of weights outside the layers are this stage's shares."""
    arguments = pipelined(params, batch, loss_and_metrics, config.microbatches, config, **options)
    shares, dlayers_R, grads = pipeline.loss_and_grads(*arguments)
    return shares, dataclasses.replace(grads, layers=pipeline.from_rounds(dlayers_R, config.pipeline_rounds))


def split(batch: "data.Batch", microbatches: int) -> "data.Batch":
    """The batch in microbatches: [b, t] -> [microbatches, b/microbatches, t]."""
    return jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)


def is_last_stage() -> jax.Array:
    """Whether this device is in the last pipeline stage."""
    return lax.axis_index("pipe") == lax.axis_size("pipe") - 1
