"""Every choice of a run in one flat record, checked as far as it can be without a mesh (rules.py has the rest).

A field of `Config` is a flag of the same name. Its declaration is all that the project says of it: the comment above is
the flag's `--help` (flags.py), and `flag(...)` gives the default, what the flag decides, when it has an effect, and
which values are legal. Whoever treats flags by kind asks `deciding`: checkpoint.py, compiled/results.py,
calibration.py, predicted/planner.py and agreement.py.
"""

import argparse
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import inputs

# Policies for what is saved for the backward pass, with MaxText's names and meanings; anatomy.py has their tensors.
# `routing`, which those of a mixture save too, is this project's.
REMAT_POLICIES = tuple(
    "none full save_out_proj save_qkv_proj save_dot_except_mlp save_dot_with_context_except_mlp minimal "
    "minimal_with_context qkv_proj_offloaded minimal_offloaded custom".split()
)
# A layer's activations that a policy may name, in the order in which they are computed (anatomy.py has their sizes).
ACTIVATIONS = (
    "decoder_layer_input norm_attention query_latent query_latent_norm kv_latent kv_latent_norm query_before_norm "
    "key_before_norm value_before_norm query_proj key_proj value_proj log_sum_exp scores context out_proj "
    "mlp_input norm_mlp mlp_gate mlp_up mlp_product mlp_down norm_router router_logits routing expert_input "
    "expert_gate expert_up expert_product expert_down expert_sum shared_gate shared_up shared_product shared_down "
    "mixture_out ple_gate ple_product ple_out"
).split()
INPUT_ON_DEVICE = "decoder_layer_input_on_device"  # of a layer's input, what stays if a share is offloaded
FLOATS = "float32 bfloat16"


@dataclass(frozen=True)
class Need:
    """A condition without which a flag has no effect.

    met: of the Config; of a Config and {mesh axis: size} where `kind` is "mesh".
    kind: "refused": a value other than the default, or off, is an error. "noted": the run says so and goes on. "mesh":
      it says so and takes the default, so that a sweep over meshes runs.
    """

    met: Callable
    why: str
    instead: str  # flags with which it is met
    kind: str = "refused"


@dataclass(frozen=True)
class Flag:
    """A declared flag, without its name, its default and its help.

    decides: a subset of
      "shapes"   the arrays of a checkpoint, which a run with another value cannot read
      "values"   the training from here on: a resumed run with another value goes on, but otherwise
      "program"  the compiled step, and so its time and its memory
      "scales"   the maxima that --fp8=calibrate writes
      "plan"     what `roofline.py plan` finds, so that it is no input of it
      "process"  what one process is and writes: the others may have other values
    least, below: bounds of a number, `least` included.
    path: the URL schemes that a path may have; None: it is no path.
    """

    decides: frozenset[str] = frozenset()
    needs: tuple[Need, ...] = ()
    choices: tuple[str, ...] = ()
    least: float | None = None
    below: float = float("inf")
    path: tuple[str, ...] | None = None


def flag(default, *decides_or_needs: "str | Need", choices: str | tuple[str, ...] = (), **rest):
    """A field of Config: its default, words of `Flag.decides`, `Flag.needs`, and by name the rest of a Flag."""
    words = " ".join(each for each in decides_or_needs if isinstance(each, str)).split()
    needs = tuple(each for each in decides_or_needs if isinstance(each, Need))
    choices = tuple(choices.split()) if isinstance(choices, str) else choices
    return dataclasses.field(default=default, metadata={"flag": Flag(frozenset(words), needs, choices, **rest)})


# -- when a flag has an effect

WINDOW = Need(lambda c: c.window, "window=0 lets every layer see all", "--window=64")
NO_WINDOW = Need(lambda c: not c.window, "window={window} needs positions in order, as they are", "--window=0")
GLOBAL_LAYERS = Need(lambda c: c.global_every or not c.window, "windows need only a halo", "--global_every=2")
GLOBAL = Need(lambda c: c.global_every, "global_every=0 has no global layers", "--window=64 --global_every=2")
POST_NORMS = Need(lambda c: c.post_norms, "what is added from such an embedding is normed", "--post_norms")
TWO_STACKS = Need(
    lambda c: c.global_head_dim or c.global_kv_heads,
    "local and global layers have weights of the same shapes",
    "--num_layers=4 --window=64 --global_every=2 --global_head_dim=32",
)
SHARED_KV = Need(
    lambda c: c.num_kv_shared_layers, "no layers share keys", f"{TWO_STACKS.instead} --num_kv_shared_layers=2"
)
PREFETCH = Need(lambda c: c.prefetch, "prefetch=False gathers large weights within their layer", "--prefetch")
ROPE_TYPE = Need(lambda c: c.rope_type != "default", "rope_type=default scales no frequency", "--rope_type=llama3")
ORIGINAL_LEN = Need(
    lambda c: c.rope_type in ("llama3", "yarn") and c.rope_scaling != 1,
    "rope_type={rope_type} with rope_scaling={rope_scaling} treats all frequencies alike",
    "--rope_type=llama3 --rope_scaling=8",
)
YARN = Need(lambda c: c.rope_type == "yarn", "rope_type={rope_type} has no use for it", "--rope_type=yarn")
MTP = Need(lambda c: c.mtp, "no token after the next is predicted", "--mtp")
EXPERTS = Need(
    lambda c: c.num_experts, "num_experts=0 is a dense model", "--num_experts=8 --experts_per_token=2 --expert_dim=512"
)
SILU = Need(lambda c: c.mlp_activation == "silu", "{mlp_activation} has no limit", "--mlp_activation=silu")
SELECTION_BIAS = Need(lambda c: c.selection_bias, "there is no bias that it would change", "--selection_bias")
DROPLESS = Need(lambda c: c.moe_impl == "dropless", "moe_impl={moe_impl} has no use for it", "--moe_impl=dropless")
CAPACITY = Need(lambda c: c.moe_impl == "capacity", "moe_impl={moe_impl} has no use for it", "--moe_impl=capacity")
LATENT = Need(lambda c: c.kv_lora_rank, "kv_lora_rank=0 is no latent attention", "--kv_lora_rank=64 --rope_head_dim=16")
SPLIT_SEQUENCES = Need(lambda c: c.context_impl != "all_to_all", "all_to_all keeps the order", "--context_impl=ring")
CUSTOM_REMAT = Need(lambda c: c.remat == "custom", "remat={remat} has no use for it", "--remat=custom")
FP8 = Need(lambda c: c.fp8 != "none", "fp8=none multiplies nothing in FP8", "--fp8=dynamic")
BLOCKS = Need(lambda c: c.fp8_granularity == "block", "{fp8_granularity} has no blocks", "--fp8_granularity=block")
PROFILE = Need(lambda c: c.fp8 in ("static", "calibrate"), "fp8={fp8} finds its scales without a file", "--fp8=static")
FIRST_MOMENT = Need(lambda c: c.optimizer != "adafactor", "adafactor has no first moment", "--optimizer=adamw")
ADAMW_OR_MUON = Need(lambda c: c.optimizer in ("adamw", "muon"), "{optimizer} has no use for it", "--optimizer=adamw")
ADAMW = Need(lambda c: c.optimizer == "adamw", "{optimizer} has no use for it", "--optimizer=adamw")
DECAY = Need(lambda c: c.optimizer != "sgd", "optimizer=sgd decays no weights", "--optimizer=adamw")
WSD = Need(lambda c: c.schedule == "wsd", "schedule={schedule} has no decay of its own", "--schedule=wsd")
FALLS = Need(lambda c: c.schedule != "constant", "schedule=constant has no decay", "--schedule=wsd")
SAMPLE = Need(lambda c: c.sample, "sample=0 shows no text", "--sample=200")
EVALUATION = Need(lambda c: c.eval_batches, "eval_batches=0 evaluates nothing", "--eval_batches=16")

PROFILE_DIR = Need(lambda c: c.profile_dir, "no trace is written", "--profile_dir=runs/trace", "noted")
CHECKPOINT_DIR = Need(lambda c: c.checkpoint_dir, "nothing is saved", "--checkpoint_dir=runs/1", "noted")

DEVICES = Need(lambda c, sizes: math.prod(sizes.values()) > 1, "on one device nothing moves", "a larger --mesh", "mesh")
DATA, PIPE, FSDP, EXPERT, CONTEXT, TENSOR = (
    Need(lambda c, sizes, a=axis: sizes[a] > 1, f"the mesh axis {axis} has size 1", f"--mesh={axis}:2", "mesh")
    for axis in ("data", "pipe", "fsdp", "expert", "context", "tensor")
)
FSDP = dataclasses.replace(FSDP, met=lambda c, sizes: sizes["fsdp"] * sizes["fsdp_transpose"] > 1)
RING_OF_GROUPS = Need(
    lambda c, sizes: sizes["context"] != c.context_heads,
    "context_heads={context_heads} brings whole sequences together, in order",
    "a smaller --context_heads",
    "mesh",
)


@dataclass(frozen=True)
class Config:
    """A run. Raises ValueError for a value, or for two of them together, that no run can have."""

    # Whether this is the model as those of its layers have it that share keys and values (anatomy.of_kind).
    shares_kv: ClassVar[bool] = False

    # -- run
    # model to start from: shape, dtype, remat, batch, steps, learning rate; flags override them
    preset: str = flag("tiny")
    # named run to start from, model, mesh and all (published.py); every other flag overrides it
    recipe: str = flag("")
    # folder of published weights to start from, shape and all (weights.py); needs the [weights] extra
    weights: str = flag("", "values", path=())
    # optimizer steps in all (a resumed run counts the steps before it)
    steps: int = flag(300, "values", least=1)
    # global batch in sequences
    batch: int = flag(16, "values program scales", least=1)
    # batches that grow to `batch`, by the step from which on: 0:4,100:8,300:16; empty: `batch` from the first step on
    batch_rampup: str = flag("", "values")
    # T: tokens in a sequence
    seq_len: int = flag(128, "values program scales", least=1)
    # seed of the weights, of the order of the data, and of the sample
    seed: int = flag(0, "values", least=0)

    # -- model
    # V: tokens of the vocabulary
    vocab_size: int = flag(256, "shapes program scales", least=1)
    # L: layers
    num_layers: int = flag(3, "shapes program scales", least=1)
    # D: width of the residual stream
    model_dim: int = flag(192, "shapes program scales", least=1)
    # F: width of the gated MLP
    ff_dim: int = flag(512, "shapes program scales", least=1)
    # N: query heads
    num_heads: int = flag(8, "shapes program scales", least=1)
    # K: key/value heads, each shared by N/K query heads
    num_kv_heads: int = flag(8, "shapes program scales", least=1)
    # H: dims of a head's queries and keys
    head_dim: int = flag(24, "shapes program scales", least=1)
    # base of the rotary frequencies
    rope_theta: float = flag(10_000.0, "values program", least=1)
    # frequencies for a longer context than the original one: default (none), linear, llama3 or yarn
    rope_type: str = flag("default", "values program", choices="default linear llama3 yarn")
    # how many times longer; low frequencies are divided by it; 1 is off
    rope_scaling: float = flag(1.0, "values program", ROPE_TYPE, least=1)
    # length of the original context
    rope_original_len: int = flag(8192, "values program", ORIGINAL_LEN, least=1)
    # yarn: frequencies with more periods than this in the original context stay as they are
    rope_beta_fast: float = flag(32.0, "values program", YARN, least=0)
    # yarn: frequencies with fewer periods than this are divided by rope_scaling
    rope_beta_slow: float = flag(1.0, "values program", YARN, least=0)
    # yarn: the bounds between those two are rounded to whole pairs of dims (not in gpt-oss)
    rope_truncate: bool = flag(True, "values program", YARN)
    # yarn: m in the factor 0.1 * m * log(rope_scaling) + 1 of rotated queries and keys
    rope_mscale: float = flag(1.0, "values program", YARN, least=0)
    # yarn: m of a factor that all dims get in place of the rotated ones (DeepSeek); 0 is off
    rope_mscale_all_dim: float = flag(0.0, "values program", YARN, LATENT, least=0)
    # activation of an MLP's gate, and of an expert's: silu (SwiGLU), or gelu in its tanh approximation (GeGLU)
    mlp_activation: str = flag("silu", "values program", choices="silu gelu")
    # share of a head's pairs of dims that rotate, those of the highest frequencies (Gemma 4)
    rope_fraction: float = flag(1.0, "values program", least=0)
    # rope_theta of global layers, and the other layers have rope_type=default and rope_fraction=1 (Gemma 3); 0 is off
    global_rope_theta: float = flag(0.0, "values program", GLOBAL, least=0)
    # head_dim of global layers, which are then a stack of their own; 0 is head_dim (Gemma 4)
    global_head_dim: int = flag(0, "shapes program scales", GLOBAL, least=0)
    # num_kv_heads of global layers, which are then a stack of their own; 0 is num_kv_heads (Gemma 4)
    global_kv_heads: int = flag(0, "shapes program scales", GLOBAL, least=0)
    # number of last layers that attend to the keys and values of the last layer of their kind before (Gemma 4 E2B)
    num_kv_shared_layers: int = flag(0, "shapes program scales", TWO_STACKS, least=0)
    # the MLP of these layers is twice as wide as ff_dim
    double_wide_mlp: bool = flag(False, "shapes program scales", SHARED_KV)
    # P: dims of the embedding that each token has for each layer, beside that of the model (Gemma 4 E2B); 0 is off
    ple_dim: int = flag(0, "shapes program scales", POST_NORMS, least=0)
    # RMSNorm of the result of attention and of the MLP or mixture, before it is added to the residual stream (Gemma)
    post_norms: bool = flag(False, "shapes program")
    # RMSNorm on each head's queries and keys
    qk_norm: bool = flag(False, "shapes program")
    # RMSNorm without weights on each head's values (Gemma 4)
    value_norm: bool = flag(False, "values program")
    # the values are the keys, before their norm and rotation; in global layers alone if these are a stack of their own
    keys_as_values: bool = flag(False, "shapes program")
    # a layer multiplies the residual stream by a number of its own at the end, which is not trained (Gemma 4)
    layer_scale: bool = flag(False, "shapes program")
    # bias on the query, key and value projections (Qwen 2.5)
    qkv_bias: bool = flag(False, "shapes program")
    # bias on attention's output projection (gpt-oss)
    output_bias: bool = flag(False, "shapes program")
    # a learned logit a head in each softmax, without a value (gpt-oss)
    attention_sinks: bool = flag(False, "shapes program")
    # the unembedding is the embedding
    tied_embeddings: bool = flag(False, "shapes program")
    # the embedding is multiplied by sqrt(model_dim), rounded to dtype (Gemma)
    embedding_scale: bool = flag(False, "values program")
    # sliding-window attention: a query sees this many keys, itself included; 0 is no window
    window: int = flag(0, "values program", least=0)
    # with a window: every so many-th layer attends without it; 0 is never
    global_every: int = flag(0, "values program", WINDOW, least=0)
    # factor of the scores q k^T of attention; 0 is 1/sqrt(dims of a query)
    attention_scale: float = flag(0.0, "values program", least=0)
    # attention's scores become cap * tanh(scores / cap); 0 is off (Gemma 2)
    attention_soft_cap: float = flag(0.0, "values program", least=0)
    # logits become cap * tanh(logits / cap); 0 is off
    logit_soft_cap: float = flag(0.0, "values program", least=0)
    # weight of log(Z)^2 in the loss, Z the softmax's denominator; 0 is off
    z_loss: float = flag(0.0, "values program", least=0)
    # multi-token prediction (DeepSeek-V3): one more layer predicts the token after the next
    mtp: bool = flag(False, "shapes program")
    # weight of its loss
    mtp_loss: float = flag(0.3, "values program", MTP, least=0)
    # epsilon of every RMSNorm
    norm_eps: float = flag(1e-5, "values program", least=0)
    # dtype of the computation: float32 or bfloat16; the master weights are float32
    dtype: str = flag("float32", "values program", choices=FLOATS)

    # -- mixture of experts
    # E: routed experts of a layer; 0 is a dense MLP in every layer
    num_experts: int = flag(0, "shapes program", least=0)
    # X: experts that the router sends a token to
    experts_per_token: int = flag(0, "values program", EXPERTS, least=0)
    # M: width of an expert's MLP
    expert_dim: int = flag(0, "shapes program", EXPERTS, least=0)
    # experts of the same width that see every token, beside the routed ones
    num_shared_experts: int = flag(0, "shapes program", EXPERTS, least=0)
    # leading layers that have a dense MLP of ff_dim in place of experts
    num_dense_layers: int = flag(0, "shapes program", EXPERTS, least=0)
    # biases on the router and on the experts' projections (gpt-oss)
    expert_bias: bool = flag(False, "shapes program", EXPERTS)
    # experts' SwiGLU is gpt-oss's, clamped to this; 0 is the plain one
    swiglu_limit: float = flag(0.0, "values program", EXPERTS, SILU, least=0)
    # router and routed experts have input norms of their own; routed and shared results are normed (Gemma 4)
    expert_norms: bool = flag(False, "shapes program", EXPERTS)
    # a learned factor of each expert's weights (Gemma 4)
    expert_scale: bool = flag(False, "shapes program", EXPERTS)
    # what the router makes of its logits: softmax, or sigmoid (DeepSeek-V3)
    router_scores: str = flag("softmax", "values program", EXPERTS, choices="softmax sigmoid")
    # the weights of a token's experts are divided by their sum
    renormalise: bool = flag(True, "values program", EXPERTS)
    # groups into which the experts are split
    router_groups: int = flag(1, "values program", EXPERTS, least=1)
    # the best groups for a token, from which its experts are chosen
    router_groups_kept: int = flag(1, "values program", EXPERTS, least=1)
    # the weights of a token's experts are multiplied by this, after all else
    router_scale: float = flag(1.0, "values program", EXPERTS, least=0)
    # weight of Switch's load-balance loss, which is 1 where all experts get as many tokens; 0 is off
    load_balance_loss: float = flag(0.0, "values program", EXPERTS, least=0)
    # weight of log(Z)^2 of the router's softmax; 0 is off
    router_z_loss: float = flag(0.0, "values program", EXPERTS, least=0)
    # balance without a loss: a bias that takes part in the choice of experts, not in their weights
    selection_bias: bool = flag(False, "shapes program", EXPERTS)
    # step by which the selection bias is raised or lowered after each step
    selection_bias_rate: float = flag(0.001, "values program", EXPERTS, SELECTION_BIAS, least=0)
    # dispatch: dropless, capacity (pads and drops), or reference (every token everywhere)
    moe_impl: str = flag("dropless", "values program", EXPERTS, choices="dropless capacity reference")
    # dropless over an expert axis: rows that a device takes at once, over the mean; more take another round
    buffer_factor: float = flag(2.0, "values program", EXPERTS, DROPLESS, EXPERT, least=0)
    # dropless over an expert axis: chunks of the tokens, each with its own messages
    moe_parts: int = flag(1, "values program", EXPERTS, DROPLESS, EXPERT, least=1)
    # capacity: an expert takes at most this many times the mean number of tokens
    capacity_factor: float = flag(1.25, "values program", EXPERTS, CAPACITY, least=0)

    # -- multi-head latent attention
    # C: size of the latent of a token from which the keys and values of all heads are made; 0 is off
    kv_lora_rank: int = flag(0, "shapes program", least=0)
    # Q: size of the latent of a token from which queries are made; 0: one matmul from the model dim
    q_lora_rank: int = flag(0, "shapes program", LATENT, least=0)
    # R: dims of a head, beside head_dim, that are rotated by position (RoPE); all heads share their key
    rope_head_dim: int = flag(0, "shapes program", LATENT, least=0)
    # dims of a head's value; 0 is head_dim
    value_head_dim: int = flag(0, "shapes program", LATENT, least=0)

    # -- parallelism
    # sizes of the axes data, pipe, fsdp, fsdp_transpose, expert, context, tensor, as in data:2,tensor:2; * is the rest
    mesh: str = flag("fsdp:*", "program plan")
    # model_dim, ff_dim, expert_dim and the width of shared experts are stored as multiples of this, padded with zeros
    dim_multiple: int = flag(1, "shapes program plan", least=1)
    # mesh axis that is laid over the two cores of a TPU7x chip; default: the last one of even size
    core_axis: str = flag("", "program plan")
    # collectives for weights, gradients, activations: xla, or our own ring or ring_bidirectional
    collectives: str = flag("xla", "program", DEVICES, choices="xla ring ring_bidirectional")
    # tensor parallelism multiplies each block while our ring sends the next one
    collective_matmul: bool = flag(False, "program plan", TENSOR)
    # gather the weights of layer i+1 while layer i computes; without, those of the MLP or experts in their own layer
    prefetch: bool = flag(True, "program", FSDP)
    # two layers per iteration of the layer loop: gathered weights are not copied in between
    double_buffer: bool = flag(False, "program plan", PREFETCH, FSDP)
    # shard the optimizer state and the update over the data axis as well (ZeRO-1)
    shard_update: bool = flag(False, "program", DATA)
    # attention over the mesh axis context: ring, all_gather, all_to_all; a window: halo
    context_impl: str = flag("ring", "program", GLOBAL_LAYERS, CONTEXT, choices="ring all_gather all_to_all")
    # with a ring: this many neighbours exchange heads by all-to-all, and the ring connects these groups
    context_heads: int = flag(1, "program", GLOBAL_LAYERS, CONTEXT, least=1)
    # zigzag order over context: all devices do the same work; without a window only
    context_balance: bool = flag(True, "program", NO_WINDOW, SPLIT_SEQUENCES, CONTEXT, RING_OF_GROUPS)
    # accumulate gradients over this many parts of the batch, which pass through the stages of pipe
    microbatches: int = flag(1, "program scales plan", least=1)
    # order of the stages' work on pipe: gpipe, 1f1b (fewer microbatches in memory), circular
    pipeline_schedule: str = flag("1f1b", "program", PIPE, choices="gpipe 1f1b circular")
    # circular: rounds of a microbatch through all stages, each of which holds that many chunks of layers
    pipeline_rounds: int = flag(1, "program", PIPE, least=1)
    # of a microbatch in flight save the stage's input alone, and recompute the stage
    remat_stage: bool = flag(False, "program", PIPE)
    # activations of a layer that are saved for the backward pass; the others are recomputed
    remat: str = flag("none", "program plan", choices=(*REMAT_POLICIES, "auto"))
    # with remat=custom, by name: device, offload or remat, as in mlp_up:device,context:offload; also a share of the
    # layer's input, decoder_layer_input:offload:0.5
    remat_tensors: str = flag("", "program plan", CUSTOM_REMAT)
    # matmuls in FP8, by how their scales are found
    fp8: str = flag("none", "values program", choices="none dynamic static fixed delayed calibrate")
    # FP8: the elements that share a scale: per_tensor, per_axis or block
    fp8_granularity: str = flag("per_tensor", "values program", FP8, choices="per_tensor per_axis block")
    # FP8: elements of a block along each dim
    fp8_block: int = flag(128, "values program", FP8, BLOCKS, least=1)
    # FP8: how gradients are rounded: nearest or stochastic
    fp8_rounding: str = flag("nearest", "values program", FP8, choices="nearest stochastic")
    # FP8: format of gradients: e5m2 or e4m3
    fp8_gradients: str = flag("e5m2", "values program", FP8, choices="e5m2 e4m3")
    # FP8: matmuls that use it: qkv, out, mlp (and shared experts), moe (routed experts), unembed
    fp8_modules: str = flag("qkv,out,mlp,moe", "values program scales", FP8)
    # FP8: this many layers at each end stay in the compute dtype
    fp8_skip_layers: int = flag(0, "values program", FP8, least=0)
    # file of the largest elements: calibrate writes it, static reads it (calibration.py)
    fp8_scales: str = flag("", "values program", FP8, PROFILE, path=())
    # kernel: flash (flash.py), reference (attention.py), auto: flash on a TPU, else reference
    attention: str = flag("auto", "program", choices="auto flash reference")
    # attention's softmax subtracts this instead of the largest score of a row; 0 is off
    max_logit: float = flag(0.0, "values program", least=0)
    # positions of a sequence whose logits exist at once, at most; 0: as many as make 256 MiB
    loss_chunk: int = flag(0, "program", least=0)

    # -- optimizer
    # optimizer: adamw, adafactor, sgd, or muon, with adamw for embeddings, router, norms and biases (muon.py)
    optimizer: str = flag("adamw", "shapes program", choices="adamw adafactor sgd muon")
    # peak of the learning rate, after the warm-up
    learning_rate: float = flag(3e-3, "values", least=0)
    # learning rate after the warm-up: cosine, wsd (stable, then a decay), or constant (schedules.py)
    schedule: str = flag("cosine", "values", choices="cosine wsd constant")
    # share of the steps in which the learning rate rises to its peak
    warmup_ratio: float = flag(0.075, "values", least=0, below=1)
    # wsd: share of the steps, the last ones, in which it decays
    decay_ratio: float = flag(0.1, "values", WSD, least=0, below=1)
    # wsd: how it decays: linear or 1-sqrt
    decay_shape: str = flag("linear", "values", WSD, choices="linear 1-sqrt")
    # cosine and wsd: the decay ends at this share of the peak, at the last step
    final_lr_ratio: float = flag(0.1, "values", FALLS, least=0)
    # adamw and muon: decay of adamw's first moment; sgd: momentum
    beta1: float = flag(0.9, "values", FIRST_MOMENT, least=0, below=1)
    # adamw and muon: decay of adamw's second moment
    beta2: float = flag(0.95, "values", ADAMW_OR_MUON, least=0, below=1)
    # adamw, adafactor and muon: decoupled decay, of matrices only
    weight_decay: float = flag(0.1, "values", DECAY, least=0)
    # gradients are scaled down to this global norm; 0 is off
    clip_norm: float = flag(1.0, "values program", least=0)
    # heads whose largest attention score exceeds this get smaller query and key weights (qk_clip.py); 0 is off
    qk_clip: float = flag(0.0, "values program", least=0)
    # dtype in which gradients are added up over microbatches and replicas, and stored: float32 or bfloat16
    grad_dtype: str = flag("float32", "values program", choices=FLOATS)
    # dtype in which the first moment of adamw and muon is stored: float32 or bfloat16
    mu_dtype: str = flag("float32", "shapes program", ADAMW_OR_MUON, choices=FLOATS)
    # dtype in which adamw's second moment is stored: float32, or bfloat16, rounded stochastically (moments.py)
    nu_dtype: str = flag("float32", "shapes program", ADAMW, choices=FLOATS)
    # store the optimizer state on the host, and fetch it for the update: layer by layer, Muon's at once (offload.py)
    offload_optimizer: bool = flag(False, "program")
    # skip a step whose loss or gradient norm is this many standard deviations above the last ones (spikes.py); 0 is off
    skip_spikes: float = flag(0.0, "values program", least=0)
    # steps between steps that are run twice, to find silent data corruption (corruption.py); 0 is off
    check_every: int = flag(0, least=0)
    # end the run after this many steps in a row that were skipped: gradients that are not finite, and spikes
    max_skipped: int = flag(10, least=1)

    # -- data
    # made by `python data.py prepare`, or several as a:0.7,b:0.3 (data_mixtures.py); default: Python's standard library
    corpus: str = flag("", "values")
    # steps between evaluations on the held-out documents; 0 is only at the end
    eval_every: int = flag(100, EVALUATION, least=0)
    # batches in an evaluation, at most
    eval_batches: int = flag(16, least=0)

    # -- output
    # steps between printed lines
    log_every: int = flag(10, least=1)
    # one JSON object a step is written here
    metrics_file: str = flag("", "process", path=())
    # scalars for TensorBoard are written here; needs the [tensorboard] extra
    tensorboard_dir: str = flag("", "process", path=())
    # tokens of text to generate at the end; 0 is none
    sample: int = flag(200, least=0)
    # a sample after each so many steps, too, from a copy of the weights in `dtype`; 0 is only at the end
    sample_every: int = flag(0, SAMPLE, least=0)
    # a trace for xprof is written here
    profile_dir: str = flag("", "process", path=())
    # first and last step of the trace
    profile_steps: str = flag("3:5", PROFILE_DIR)

    # -- checkpoints
    # save here, and resume from the newest checkpoint in here; needs the [checkpoint] extra
    checkpoint_dir: str = flag("", path=("gs",))
    # steps between checkpoints
    save_every: int = flag(100, CHECKPOINT_DIR, least=1)
    # newest checkpoints to keep
    keep_checkpoints: int = flag(2, CHECKPOINT_DIR, least=1)
    # resume from the newest intact one; damaged ones are renamed STEP.damaged
    skip_damaged_checkpoints: bool = flag(False, CHECKPOINT_DIR)

    # -- machines
    # processes of the run; 0 asks the environment
    num_processes: int = flag(0, least=0)
    # number of this process, from 0; -1 asks the environment
    process_id: int = flag(-1, "process", least=-1)
    # host:port of process 0
    coordinator: str = flag("", "process")
    # seconds without a sign of life from a process after which the others end too
    peer_timeout: int = flag(60, least=1)
    # flags of the TPU compiler: recommended, none, or name=value,... (compiler_flags.py)
    xla_flags: str = flag("none", "program")
    # folder of compiled programs; empty is off
    compilation_cache: str = flag(inputs.expanded("~/.cache/ironwood"), "process", path=("gs",))

    def __post_init__(self):
        for name, each in FLAGS.items():
            self._check_value(name, each)
        self._check_shapes()
        self._check_parallelism()
        self._check_profile()
        for sentence in without_effect(self, "refused"):
            raise ValueError(sentence)
        self._check_global_layers()
        self._check_experts()
        self._check_latent_attention()
        self._check_fp8()
        self._check_processes()

    def _check_value(self, name: str, each: Flag):
        """A value by itself. A path gets its home folder for ~."""
        value = getattr(self, name)
        if each.path is not None:
            try:
                object.__setattr__(self, name, inputs.expanded(value, each.path))
            except ValueError as error:
                raise ValueError(f"{name}={error}") from None
        if each.choices and value not in each.choices:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(each.choices)}")
        if each.least is not None and not each.least <= value < float("inf"):  # NaN is not, either
            raise ValueError(f"{name}={value} must be at least {each.least}, and finite")
        if each.least is not None and value >= each.below:
            raise ValueError(f"{name}={value} must be under {each.below}")
        bits = 32 if name == "seed" else 31
        if type(value) is int and value >= 2**bits:  # no dim, count or time of a run is larger
            raise ValueError(f"{name}={value} must be under 2^{bits}")

    def _check_shapes(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.rope_type == "yarn" and not (self.rope_theta > 1 and self.rope_beta_fast > self.rope_beta_slow > 0):
            raise ValueError(
                f"rope_type=yarn needs rope_theta={self.rope_theta:g} above 1, and rope_beta_fast="
                f"{self.rope_beta_fast:g} above rope_beta_slow={self.rope_beta_slow:g} above 0"
            )
        if self.rope_fraction > 1:
            raise ValueError(f"rope_fraction={self.rope_fraction} must be at most 1: a head has no more dims to rotate")
        if 0 < self.global_rope_theta < 1:
            raise ValueError(f"global_rope_theta={self.global_rope_theta} must be at least 1; 0 takes rope_theta")
        if self.remat_places["decoder_layer_input"] == "remat":
            raise ValueError("remat_tensors: decoder_layer_input cannot be recomputed, all else is from it")

    def _check_parallelism(self):
        if self.offload_optimizer and self.optimizer == "adafactor":
            raise ValueError(
                "offload_optimizer is for adamw, sgd and muon: --optimizer=adamw or --no-offload_optimizer"
            )
        if self.context_heads > 1 and (self.context_impl != "ring" or self.collectives != "xla"):
            raise ValueError(
                f"context_heads={self.context_heads} goes with context_impl=ring and collectives=xla, "
                f"not {self.context_impl} and {self.collectives}: --context_impl=ring --collectives=xla"
            )
        if (self.pipeline_rounds > 1) != (self.pipeline_schedule == "circular"):
            raise ValueError(
                f"pipeline_rounds={self.pipeline_rounds} with pipeline_schedule={self.pipeline_schedule}: circular has "
                "two rounds or more, the others one: --pipeline_rounds=2 --pipeline_schedule=circular, or "
                "--pipeline_rounds=1 --pipeline_schedule=1f1b"
            )

        if self.ple_dim and self.mtp:
            raise ValueError(
                f"ple_dim={self.ple_dim} has an embedding for each of num_layers={self.num_layers}, and mtp one more "
                "layer: --ple_dim=0 or --no-mtp"
            )

    def _check_profile(self):
        if not re.fullmatch(r"\d+:\d+", self.profile_steps) or not 1 <= self.profile_range[0] <= self.profile_range[1]:
            raise ValueError(f"profile_steps={self.profile_steps!r} must be FIRST:LAST, 1 <= FIRST <= LAST, as in 3:5")
        if self.profile_dir and self.profile_range[0] > self.steps:
            raise ValueError(f"profile_steps={self.profile_steps!r} is past the end: --profile_steps=1:{self.steps}")

    def _check_processes(self):
        if (self.num_processes > 1 or self.process_id >= 0) and not self.coordinator:
            raise ValueError(
                "num_processes and process_id need the address where process 0 listens, as in --num_processes=2 "
                "--process_id=0 --coordinator=localhost:9911"
            )
        port = re.fullmatch(r".+:(\d+)", self.coordinator)
        if self.coordinator and not (port and 0 < int(port[1]) < 2**16):
            raise ValueError(
                f"coordinator={self.coordinator!r} has no port: it must be HOST:PORT, as in localhost:9911, "
                "with a PORT from 1 to 65535"
            )
        if self.coordinator and not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id={self.process_id} must be from 0 to under num_processes={self.num_processes} with a "
                "coordinator, as in --num_processes=2 --process_id=0"
            )

    def _check_global_layers(self):
        if not (self.global_head_dim or self.global_kv_heads):
            return
        stack = f"global_head_dim={self.global_head_dim} and global_kv_heads={self.global_kv_heads}"
        if self.global_head_dim % 2:
            raise ValueError(f"global_head_dim={self.global_head_dim} must be even: RoPE rotates pairs")
        if self.global_kv_heads and self.num_heads % self.global_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of global_kv_heads={self.global_kv_heads}")
        if self.global_every < 2 or self.num_layers % self.global_every:
            raise ValueError(
                f"num_layers={self.num_layers} must be a multiple of global_every={self.global_every}, which is 2 or "
                f"more, with {stack}: a period has one global layer, its last"
            )
        others = dict(num_dense_layers=0, kv_lora_rank=0, mtp=False, selection_bias=False, fp8_skip_layers=0)
        for name, off in others.items():
            if getattr(self, name) != off:
                raise ValueError(f"{name}={getattr(self, name)} goes with a single stack of layers, not with {stack}")
        if self.fp8 not in ("none", "dynamic", "fixed"):
            raise ValueError(f"fp8={self.fp8} goes with a single stack of layers, not with {stack}: --fp8=dynamic")

        if self.num_kv_shared_layers % self.global_every or self.num_kv_shared_layers >= self.num_layers:
            raise ValueError(
                f"num_kv_shared_layers={self.num_kv_shared_layers} must be a multiple of global_every="
                f"{self.global_every} and under num_layers={self.num_layers}: the period before has their keys"
            )
        if self.num_kv_shared_layers and self.num_experts:
            raise ValueError(
                f"num_kv_shared_layers={self.num_kv_shared_layers} goes with a dense model, num_experts=0, not with "
                f"num_experts={self.num_experts}: --num_kv_shared_layers=0"
            )

        if self.num_kv_shared_layers and self.qk_clip:
            raise ValueError(
                f"qk_clip={self.qk_clip:g} scales a layer's keys by its own scores, and with num_kv_shared_layers="
                f"{self.num_kv_shared_layers} layers share them: --qk_clip=0 or --num_kv_shared_layers=0"
            )

    def _check_experts(self):
        if not self.num_experts:
            return
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be from 1 to num_experts={self.num_experts}"
            )
        if not self.expert_dim:
            raise ValueError(f"expert_dim=0 must be at least 1 with num_experts={self.num_experts}")
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} must be under num_layers={self.num_layers}: "
                f"no layer is left for num_experts={self.num_experts}"
            )
        if self.num_experts % self.router_groups or self.router_groups_kept > self.router_groups:
            raise ValueError(
                f"router_groups={self.router_groups} must divide num_experts={self.num_experts}, and "
                f"router_groups_kept={self.router_groups_kept} be no more"
            )
        if self.router_groups_kept * self.num_experts < self.experts_per_token * self.router_groups:
            raise ValueError(
                f"router_groups_kept={self.router_groups_kept} of {self.router_groups} groups have fewer than "
                f"experts_per_token={self.experts_per_token} experts"
            )
        if not self.capacity_factor:
            raise ValueError("capacity_factor=0 admits no token: at least 1, if none is to be dropped")
        if not self.buffer_factor:
            raise ValueError("buffer_factor=0 admits no row: 2 is enough for most steps in one round")

    def _check_latent_attention(self):
        if not self.kv_lora_rank:
            return
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise ValueError(
                f"rope_head_dim={self.rope_head_dim} must be even and at least 2 with "
                f"kv_lora_rank={self.kv_lora_rank}: RoPE rotates pairs"
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads} with "
                f"kv_lora_rank={self.kv_lora_rank}: every head makes its own keys and values; "
                f"--num_kv_heads={self.num_heads}"
            )
        for name in ("qk_norm", "qkv_bias", "value_norm", "keys_as_values"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} goes with kv_lora_rank=0 only: latent attention norms its latents; --no-{name}"
                )

    def _check_fp8(self):
        for name in self.fp8_modules.split(","):
            if name not in ("qkv", "out", "mlp", "moe", "unembed"):
                raise ValueError(
                    f"fp8_modules={self.fp8_modules!r}: {name!r} is not one of qkv, out, mlp, moe, unembed"
                )
        if self.fp8 == "none":
            return
        modules = self.fp8_modules.split(",")
        if self.mtp and (self.fp8 in ("static", "delayed", "calibrate") or self.fp8_skip_layers):
            raise ValueError(
                f"fp8={self.fp8} and fp8_skip_layers={self.fp8_skip_layers}: with mtp fp8 is dynamic or fixed, and "
                "skips no layers: --fp8=dynamic --fp8_skip_layers=0"
            )
        if self.fp8 not in ("dynamic", "calibrate") and self.fp8_granularity != "per_tensor":
            raise ValueError(
                f"fp8_granularity={self.fp8_granularity}: fp8={self.fp8} has one scale a tensor; use --fp8=dynamic"
            )
        if self.num_experts and (self.fp8 in ("static", "delayed", "calibrate") or self.fp8_skip_layers):
            raise ValueError(
                f"fp8={self.fp8} and fp8_skip_layers={self.fp8_skip_layers}: with num_experts={self.num_experts} fp8 "
                "is dynamic or fixed, and skips no layers: --fp8=dynamic --fp8_skip_layers=0"
            )
        if self.num_experts and "moe" in modules and self.fp8_granularity != "per_tensor":
            raise ValueError(
                f"fp8_granularity={self.fp8_granularity}: routed experts have one scale a tensor; "
                "--fp8_modules=qkv,out,mlp leaves them as they are"
            )
        if self.kv_lora_rank and "qkv" in modules:
            raise ValueError(
                f"fp8_modules={self.fp8_modules}: qkv are no matmuls of latent attention, kv_lora_rank="
                f"{self.kv_lora_rank}; --fp8_modules=out,mlp,moe"
            )
        if 2 * self.fp8_skip_layers >= self.num_layers:
            raise ValueError(f"fp8_skip_layers={self.fp8_skip_layers} at each end leaves none of {self.num_layers}")
        if self.collective_matmul:
            raise ValueError(
                f"fp8={self.fp8} goes with --no-collective_matmul only: its ring adds up products unscaled"
            )

    @property
    def remat_places(self) -> dict[str, str]:
        """{activation: device, remat or offload} of remat=custom; those that are not in it are recomputed.

        The layer's input and a mixture's `routing` are on the device unless they are moved; qkv_proj is three of them,
        and log_sum_exp goes where context goes, both as in MaxText. Of an input with a share for the host, the rest is
        INPUT_ON_DEVICE.
        """
        places = {"decoder_layer_input": "device"} | ({"routing": "device"} if self.num_experts else {})
        for entry in filter(None, self.remat_tensors.split(",")):
            name, _, place = entry.strip().partition(":")
            place, has_share, _ = place.partition(":")
            if name not in (*ACTIVATIONS, "qkv_proj"):
                near = inputs.did_you_mean(name, ACTIVATIONS)
                raise ValueError(f"remat_tensors: there is no activation {name!r}{near}")
            if place not in ("device", "remat", "offload"):
                raise ValueError(f"remat_tensors: {name}:{place!r} is not one of device, remat, offload")
            if has_share and not re.fullmatch(r"decoder_layer_input:offload:0?\.\d*[1-9]\d*", entry.strip()):
                raise ValueError(f"remat_tensors: {entry}: only decoder_layer_input:offload:0.5 takes a share, below 1")
            places |= {INPUT_ON_DEVICE: "device"} if has_share else {}
            for one in ("query_proj", "key_proj", "value_proj") if name == "qkv_proj" else (name,):
                places[one] = place
        if "context" in places:  # without it, the kernel would have to run again
            places.setdefault("log_sum_exp", places["context"])
        return places

    @property
    def share_on_host(self) -> float:
        """The share of the positions of an offloaded layer's input that goes to the host."""
        shares = re.findall(r"decoder_layer_input:\w+:?([\d.]*)", self.remat_tensors)  # the last one counts
        return float(shares[-1]) if shares and shares[-1] else 1

    @property
    def profile_range(self) -> tuple[int, int]:
        """First and last profiled step."""
        first, last = self.profile_steps.split(":")
        return int(first), int(last)


FLAGS: dict[str, Flag] = {field.name: field.metadata["flag"] for field in dataclasses.fields(Config)}


def deciding(what: str) -> list[str]:
    """Names of the flags that decide something: a word of `Flag.decides`."""
    return [name for name, each in FLAGS.items() if what in each.decides]


@functools.cache
def flags_by_need(kind: str) -> dict[Need, list[str]]:
    """{need of a kind: names of the flags that have no effect without it}, in the order of the flags."""
    flags: dict[Need, list[str]] = {}
    for name, each in FLAGS.items():
        for need in each.needs:
            if need.kind == kind:
                flags.setdefault(need, []).append(name)
    return flags


def idle(config: Config, kind: str, *sizes: dict[str, int]) -> dict[str, str]:
    """{flag: why, and what to use} of flags that are not at their defaults and have no effect in this run.

    Args:
      kind: of the needs to look at.
      sizes: those of the mesh, if `kind` is "mesh".
    """
    reasons: dict[str, str] = {}
    for need, names in flags_by_need(kind).items():
        moved = [name for name in names if getattr(config, name) != getattr(Config, name)]
        if moved and not need.met(config, *sizes):
            reason = f"{need.why.format_map(vars(config))}. Use {need.instead}"
            reasons |= {name: reason for name in moved if name not in reasons}  # of several reasons the first
    return reasons


def changed(config: Config, **values) -> Config:
    """`config` with other values; flags that have no effect beside them are left at their defaults."""
    wanted = argparse.Namespace(**{**vars(config), **values})
    return dataclasses.replace(config, **{name: getattr(Config, name) for name in idle(wanted, "refused")} | values)


def without_effect(config: Config, kind: str, *sizes: dict[str, int]) -> Iterator[str]:
    """A sentence for each flag that is `idle`, except those that are off: that is what happens anyway."""
    for name, reason in idle(config, kind, *sizes).items():
        if value := getattr(config, name):
            default = getattr(Config, name)
            yield f"{name}={value} has no effect: {reason}, or leave {name} at its default, {default!r}"
