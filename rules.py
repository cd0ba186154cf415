"""Which flags go with which mesh: what is refused before anything is compiled, each with a sentence. No jax here.

    python benchmarks/refused.py      writes docs/REFUSED.md, an example of every refusal

A run is refused for one of three reasons:

    a flag without effect    it is neither at its default nor off, and this model has no use for it (config.Need)
    no code                  two choices that have no common implementation
    what does not divide     a dim of the model, a sequence or a batch that the mesh cannot split into equal parts

A flag of a mesh axis of size 1 is no reason: it takes its default, with a note, so that a sweep over meshes runs
(`config.Need` of kind "mesh"). What needs no mesh is checked by config.py, before jax is imported. train.py and aot.py
call `check` before they compile, predicted/step.py and predicted/planner.py before they predict: what is proposed can
be run.

**Layout.** The mesh axes that shard each dim (anatomy.py has the layouts, and tests compare them with this table):

    L  pipe * pipeline_rounds       D  fsdp * tensor       Q, C latents  fsdp       with shard_update also by data
    N, K, F, M, V  tensor           E  expert              T  context, twice in zigzag
    batch  data * fsdp * expert * microbatches             E*D  expert * fsdp, if E and D are
    D, F and M are the stored ones, which `dim_multiple` pads
    fsdp_transpose  the batch; beside tensor N, F, M, V; alone the dims of a head of keys and values, or Q and C

**FP8 in blocks** (fp8.py). A device multiplies whole blocks, forward and backward. So all dims of a product are
multiples of the block on each device: the contracted dim, of x and of a weight's shard; the columns, of the weight and
of dy; and the rows, b*t of a microbatch, which the gradient of the weight contracts.
"""

import dataclasses
import itertools
import math
import re

import anatomy
import config as config_lib
import placement
from config import Config
from placement import BATCH_AXES, check_batch, check_multiple


def settled(config: Config, sizes: dict[str, int]) -> Config:
    """`config` without what has no effect on a mesh of these sizes: such flags at their defaults."""
    idle = config_lib.idle(config, "mesh", sizes)
    return dataclasses.replace(config, **{name: getattr(Config, name) for name in idle}) if idle else config


def notes(config: Config, sizes: dict[str, int]) -> list[str]:
    """Sentences on what has no effect in a run, and is no reason to refuse it."""
    return [
        *config_lib.without_effect(config, "noted"),
        *config_lib.without_effect(config, "mesh", sizes),
    ]


def check(config: Config, sizes: dict[str, int]) -> None:
    """Raises ValueError, a sentence with the numbers and the way out, for what cannot run on a mesh, or not as said.

    Args:
      sizes: of all mesh axes.
    """
    config = settled(config, sizes)
    _check_schedule(config, sizes)
    if sizes["expert"] > 1 and not config.num_experts:
        raise ValueError(
            f"mesh axis expert:{sizes['expert']} is for mixtures of experts, and num_experts is 0: use fsdp"
        )
    if sizes["pipe"] > 1:
        _check_stages(config, sizes)
    for name, size, axes in cuts(config, sizes):
        check_multiple(name, size, axes, *_instead(name, axes, config, sizes))
    check_batch(config.batch, sizes, config.microbatches)
    if config.moe_parts > 1:
        ways = math.prod(sizes[axis] for axis in BATCH_AXES) * config.microbatches * sizes["context"]
        tokens = config.batch * config.seq_len // ways
        check_multiple("tokens of a device", tokens, {"moe_parts": config.moe_parts})
    if sizes["context"] > 1:
        _check_context(config, sizes)
    if config.qk_clip:
        _check_qk_clip(config)
    _check_fp8(config, sizes)


def cuts(config: Config, sizes: dict[str, int]) -> list[tuple[str, int, dict[str, int]]]:
    """(flag, size, {mesh axis that shards it: its size}) of the model's dims."""
    size, sizes_of = anatomy.sizes(config), lambda *axes: {axis: sizes[axis] for axis in axes}
    replicas = ("data",) if config.shard_update else ()
    other = ("fsdp_transpose",) if sizes["fsdp_transpose"] > 1 else ()
    columns = sizes_of("tensor", *other)
    dims = [
        ("model_dim", size["D"], sizes_of("tensor", "fsdp", *replicas)),
        ("vocab_size", config.vocab_size, columns),
        ("num_heads", config.num_heads, columns),
    ]
    if config.kv_lora_rank:
        dims.append(("kv_lora_rank", config.kv_lora_rank, sizes_of("fsdp", *replicas)))
        dims.append(("q_lora_rank", config.q_lora_rank, sizes_of("fsdp", *replicas)))
        dims += [(name, getattr(config, name), sizes_of(*other)) for name in ("kv_lora_rank", "q_lora_rank") if other]
    else:
        dims.append(("num_kv_heads", config.num_kv_heads, sizes_of("tensor")))
        dims += [("global_kv_heads", kind.num_kv_heads, sizes_of("tensor")) for kind in anatomy.kinds(config)[1:]]
        for number, kind in enumerate(anatomy.kinds(config) if other else ()):
            dims.append(("global_" * number + "head_dim", kind.head_dim, sizes_of(*other)))
    if config.num_experts:
        dims.append(("num_experts", config.num_experts, sizes_of("expert")))
        dims.append(("expert_dim", size["M"], columns))
        dims.append(("num_shared_experts*expert_dim", size["J"], columns))
    if config.num_dense_layers or not config.num_experts:
        dims.append(("ff_dim", size["F"], columns))
    if config.mtp and other:
        dims.append(("model_dim", size["D"], columns))
    if config.ple_dim:
        dims.append(("ple_dim", size["P"], columns))
        dims.append(("num_layers*ple_dim", size["A"], sizes_of("fsdp", *other, *replicas)))
    return dims


def _instead(name: str, axes: dict[str, int], config: Config, sizes: dict[str, int]) -> list[str]:
    """Names ways to shard a dim that these axes do not divide: a mesh in two dims, padding."""
    multiple = math.lcm(config.dim_multiple, math.prod(axes.values()))
    is_padded = name.rpartition("*")[2] in ("model_dim", "ff_dim", "expert_dim") and config.optimizer != "adafactor"
    padding = [f"--dim_multiple={multiple}, which adds zeros"] if is_padded else []
    return ([in_two_dims(config, sizes)] if name == "model_dim" else []) + padding


def in_two_dims(config: Config, sizes: dict[str, int]) -> str:
    """The sizes of fsdp and fsdp_transpose that shard all weights over as many devices, as for --mesh; or ""."""
    for ways in (ways for ways in range(2, 65) if sizes["fsdp"] % ways == 0):
        split = dict(fsdp=sizes["fsdp"] // ways, fsdp_transpose=sizes["fsdp_transpose"] * ways)
        if all(size % math.prod(axes.values()) == 0 for _, size, axes in cuts(config, sizes | split)):
            return ",".join(f"{axis}:{size}" for axis, size in split.items())
    return ""


def _check_schedule(config: Config, sizes: dict[str, int]) -> None:
    if config.schedule == "wsd" and config.warmup_ratio + config.decay_ratio > 1:
        raise ValueError(
            f"warmup_ratio={config.warmup_ratio} and decay_ratio={config.decay_ratio} are more than all steps: "
            "together at most 1"
        )
    if config.schedule == "wsd" and not int(config.decay_ratio * config.steps):
        raise ValueError(
            f"decay_ratio={config.decay_ratio} of steps={config.steps} is not one step: --schedule=constant, or "
            f"--decay_ratio={1.1 / config.steps:.2g}"
        )
    if config.check_every and config.offload_optimizer:
        raise ValueError(
            f"check_every={config.check_every} keeps a copy of the state on the devices, and offload_optimizer has its "
            "optimizer state on the host: --check_every=0, or --no-offload_optimizer"
        )
    if config.optimizer == "adafactor" and anatomy.sizes(config) != anatomy.sizes(config, padded=False):
        raise ValueError(
            f"dim_multiple={config.dim_multiple} adds zeros to the weights, and optimizer=adafactor counts them in its "
            "means: --optimizer=adamw, or --dim_multiple=1"
        )
    if not config.batch_rampup:
        return
    ways = math.prod(sizes[axis] for axis in BATCH_AXES) * config.microbatches
    for _, batch in rampup(config.batch_rampup, config.batch)[:-1]:
        if batch % ways:
            raise ValueError(
                f"batch_rampup={config.batch_rampup!r} has a batch of {batch}, which is no multiple of "
                f"data*fsdp*fsdp_transpose*expert*microbatches={ways}"
            )
        check(dataclasses.replace(config, batch=batch, batch_rampup=""), sizes)


def rampup(text: str, batch: int) -> tuple[tuple[int, int], ...]:
    """The stages of --batch_rampup, (first step, batch) each; one where it is empty. Raises ValueError for others."""
    if not text:
        return ((0, batch),)
    if not re.fullmatch(r"\d{1,9}:\d{1,9}(,\d{1,9}:\d{1,9})*", text):
        raise ValueError(f"batch_rampup={text!r} must be STEP:BATCH,... as in 0:4,100:8,300:16")
    stages = tuple((int(step), int(size)) for step, _, size in (stage.partition(":") for stage in text.split(",")))
    grow = all(a < b and m < n for (a, m), (b, n) in itertools.pairwise(stages))
    if stages[0][0] or not stages[0][1] or not grow:
        raise ValueError(
            f"batch_rampup={text!r} must begin at step 0 with a batch of 1 or more, and both steps and batches must "
            "grow, as in 0:4,100:8,300:16"
        )
    if stages[-1][1] != batch:
        last = stages[-1][1]
        raise ValueError(f"batch_rampup={text!r} ends with {last} sequences, not with batch={batch}: --batch={last}")
    return stages


def _check_stages(config: Config, sizes: dict[str, int]) -> None:
    stages, rounds, layers = sizes["pipe"], config.pipeline_rounds, config.num_layers
    if config.grad_dtype != "float32":
        raise ValueError(
            f"grad_dtype={config.grad_dtype}: the stages of mesh axis pipe:{stages} add up gradients in float32: "
            "another axis than pipe, or --grad_dtype=float32"
        )
    if anatomy.two_kinds(config):
        raise ValueError(
            f"global_head_dim={config.global_head_dim} and global_kv_heads={config.global_kv_heads} make a stack of "
            f"the global layers, and a stage of mesh axis pipe:{stages} has a single stack: another axis than pipe"
        )
    if config.ple_dim:
        raise ValueError(
            f"ple_dim={config.ple_dim}: the stages of mesh axis pipe:{stages} receive no tokens that layers could look "
            "up: another axis than pipe, or --ple_dim=0"
        )
    if config.mtp:
        raise ValueError(
            f"mtp: the last stage of mesh axis pipe:{stages} would have one layer and one loss more than the others, "
            "which would wait for it: another axis than pipe, or --no-mtp"
        )
    if config.num_dense_layers:
        raise ValueError(
            f"num_dense_layers={config.num_dense_layers}: the stages of mesh axis pipe:{stages} run one "
            "program, so their layers must be alike: another axis than pipe, or --num_dense_layers=0"
        )
    if layers % (stages * rounds):
        near = ", ".join(str(ways) for ways in range(1, layers + 1) if layers % (ways * rounds) == 0)
        raise ValueError(
            f"num_layers={layers} must be a multiple of pipe * pipeline_rounds = {stages} * {rounds} = "
            f"{stages * rounds}: every stage has as many layers; with pipeline_rounds={rounds} "
            f"pipe can be {near or 'nothing'}"
        )
    if rounds > 1 and config.microbatches % stages:
        raise ValueError(
            f"microbatches={config.microbatches} must be a multiple of pipe={stages}: a circular pipeline takes groups "
            "of them"
        )
    if offloaded := offloaded_by_a_stage(config, sizes):
        raise ValueError(
            f"remat={config.remat} offloads {', '.join(sorted(offloaded))}, and a stage of pipe:{stages} keeps on its "
            "device what its backward passes want: --remat_stage, which keeps what goes into the stage, or a policy "
            "that offloads nothing"
        )
    of_chunk = layers // (stages * rounds)
    if config.global_every and sizes["context"] > 1 and of_chunk % config.global_every:
        raise ValueError(
            f"pipe * pipeline_rounds = {stages} * {rounds} leaves {of_chunk} layers a stage and "
            f"round, no multiple of global_every={config.global_every}: with context:{sizes['context']} all "
            "stages must have their global layers at the same places"
        )


def offloaded_by_a_stage(config: Config, sizes: dict[str, int]) -> frozenset[str]:
    """Activations that a policy offloads, where a pipeline can store them only on the device."""
    in_stages = sizes["pipe"] != 1 and not config.remat_stage
    return anatomy.offloaded_names(config) if in_stages else frozenset()


# -- a sequence over devices


def ring_size(config: Config, sizes: dict[str, int]) -> int:
    """Parts that a sequence is in when a device attends without a window, of those of the mesh axis `context`."""
    return placement.ring_size(sizes["context"], config.context_impl, config.context_heads)


def _check_context(config: Config, sizes: dict[str, int]) -> None:
    c, only_windows = sizes["context"], config.window and not config.global_every
    if c % config.context_heads:
        raise ValueError(f"context_heads={config.context_heads} must divide the mesh axis context:{c}")
    ring = ring_size(config, sizes)
    zigzag = ring > 1 and anatomy.in_zigzag(config) and math.lcm(c, 2 * ring) > c
    check_multiple("seq_len", config.seq_len, {"context": c} | ({"2 (context_balance)": 2} if zigzag else {}))
    if only_windows:
        return
    ways = c // ring if config.context_impl != "all_gather" else 1
    check_multiple("num_heads", config.num_heads, {"tensor": sizes["tensor"], f"{ways} (exchanged over context)": ways})
    if config.max_logit and ring > 1 and config.context_impl == "ring":
        raise ValueError(
            f"max_logit={config.max_logit} needs whole rows of scores, and a ring merges parts of them: "
            "--context_impl=all_gather or all_to_all"
        )


def _check_qk_clip(config: Config) -> None:
    if config.qk_norm or config.attention_soft_cap:
        bound = "qk_norm" if config.qk_norm else f"attention_soft_cap={config.attention_soft_cap:g}"
        raise ValueError(f"qk_clip={config.qk_clip:g} has no use where {bound} bounds the scores: --qk_clip=0")
    if config.max_logit:
        raise ValueError(
            f"qk_clip={config.qk_clip:g} needs the largest scores, which attention with max_logit={config.max_logit:g} "
            "does not have: --max_logit=0 or --qk_clip=0"
        )


# -- FP8


def _check_fp8(config: Config, sizes: dict[str, int]) -> None:
    if config.fp8 == "none":
        return
    if sizes["pipe"] > 1 and (
        config.fp8 not in ("dynamic", "fixed") or config.fp8_rounding == "stochastic" or config.fp8_skip_layers
    ):
        raise ValueError(
            f"with pipe:{sizes['pipe']} stages fp8 is dynamic or fixed, rounds to nearest, and skips no layers; it is "
            f"{config.fp8}, {config.fp8_rounding}, and skips {config.fp8_skip_layers}: --fp8=dynamic "
            "--fp8_rounding=nearest --fp8_skip_layers=0"
        )
    if not anatomy.fp8_weights(config):
        raise ValueError(f"fp8_modules={config.fp8_modules}: this model has no such matmuls; --fp8_modules=out,mlp")
    if config.fp8_granularity == "block":
        if sizes["fsdp_transpose"] > 1:
            raise ValueError(
                f"fp8_granularity=block has no code for fsdp_transpose:{sizes['fsdp_transpose']}, which shards dims of "
                "a head: fsdp in its place, or --fp8_granularity=per_axis"
            )
        for name, size, axes in blocks(config, sizes):
            axes = axes | {"fp8_block": config.fp8_block}
            check_multiple(name, size, axes, *_instead(name, axes, config, sizes)[-1:])


def blocks(config: Config, sizes: dict[str, int]) -> list[tuple[str, int, dict[str, int]]]:
    """(dim, size, {mesh axis that shards it: its size}) of the FP8 matmuls; a device's part must be whole blocks."""
    size, sizes_of = anatomy.sizes(config), lambda *axes: {axis: sizes[axis] for axis in axes}
    modules, tensor, fsdp = config.fp8_modules.split(","), sizes_of("tensor"), sizes_of("fsdp")
    rows = sizes_of(*BATCH_AXES, "context") | {"microbatches": config.microbatches}
    dims = [
        ("batch*seq_len", config.batch * config.seq_len, rows),
        ("model_dim", size["D"], fsdp),
    ]
    if "qkv" in modules or "mlp" in modules:  # what goes into these is cut over tensor before it is gathered
        dims.append(("model_dim", size["D"], tensor))
    for kind in anatomy.kinds(config):
        keys, values = anatomy.key_dim(kind), anatomy.value_dim(kind)
        if "qkv" in modules:
            dims.append(("num_heads*head_dim", kind.num_heads * keys, tensor))
            dims.append(("num_kv_heads*head_dim", kind.num_kv_heads * keys, tensor))
        if "out" in modules:
            dims.append(("num_heads*value_head_dim", kind.num_heads * values, tensor))
    if "mlp" in modules and anatomy.weight_names(config) >= {"w_gate"}:
        dims.append(("ff_dim", size["F"], tensor))
    if "unembed" in modules:
        dims.append(("vocab_size", config.vocab_size, tensor))
    if "mlp" in modules and config.num_shared_experts:
        dims.append(("num_shared_experts*expert_dim", size["J"], tensor))
    return dims
