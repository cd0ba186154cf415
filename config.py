"""Every choice of a run in one flat record, checked as far as it can be without a mesh (rules.py has the rest).

A field of `Config` is a flag of the same name, and the comment behind it is the flag's `--help` (flags.py). So a flag,
its default and its documentation have one source.
"""

import argparse
import dataclasses
import re
from dataclasses import dataclass

import command

# What the backward pass finds saved, with MaxText's names and meanings; anatomy.py has the tensors of each.
REMAT_POLICIES = (
    "none",
    "full",
    "save_out_proj",
    "save_qkv_proj",
    "save_dot_except_mlp",
    "save_dot_with_context_except_mlp",
    "minimal",
    "minimal_with_context",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "custom",
)
# What a policy may name, of a layer, in the order in which they are made (anatomy.activations has the sizes).
ACTIVATIONS = (
    "decoder_layer_input norm_attention query_latent query_latent_norm kv_latent kv_latent_norm query_before_norm "
    "key_before_norm query_proj key_proj value_proj log_sum_exp scores context out_proj mlp_input norm_mlp "
    "mlp_gate mlp_up mlp_product mlp_down router_logits expert_input expert_gate expert_up expert_product expert_down "
    "shared_gate shared_up shared_product shared_down"
).split()

# Fields that are paths, their ~ the home folder, and the URLs that each may be: jax and orbax know those of gs.
PATHS = {"checkpoint_dir": ("gs",), "compilation_cache": ("gs",)}
PATHS |= dict.fromkeys(("fp8_scales", "corpus", "metrics_file", "profile_dir"), ())

_OF_EXPERTS = (
    "experts_per_token expert_dim num_shared_experts num_dense_layers expert_bias swiglu_limit router_scores "
    "renormalise router_groups router_groups_kept router_scale load_balance_loss router_z_loss selection_bias "
    "selection_bias_rate moe_impl buffer_factor moe_parts capacity_factor"
)
# Flags that say something in some runs only: which, whether they do in a run, and if not, why, and what to use. There
# any value is refused but the default, and what switches off: 0, False and "" say what happens anyway. Those for which
# the mesh decides are in rules.py.
NEEDS = (
    ("global_every", lambda c: c.window, "window=0 lets every layer see all", "--window=64"),
    ("double_buffer", lambda c: c.prefetch, "prefetch=False carries no weights from layer to layer", "--prefetch"),
    ("rope_original_len", lambda c: c.rope_scaling != 1, "rope_scaling=1 changes no frequency", "--rope_scaling=8"),
    (
        _OF_EXPERTS,
        lambda c: c.num_experts,
        "num_experts=0 is a dense model",
        "--num_experts=8 --experts_per_token=2 --expert_dim=512",
    ),
    ("selection_bias_rate", lambda c: c.selection_bias, "no bias goes up or down by it", "--selection_bias"),
    (
        "buffer_factor moe_parts",
        lambda c: c.moe_impl == "dropless",
        "moe_impl={moe_impl} has no use for it",
        "--moe_impl=dropless",
    ),
    (
        "capacity_factor",
        lambda c: c.moe_impl == "capacity",
        "moe_impl={moe_impl} has no use for it",
        "--moe_impl=capacity",
    ),
    (
        "q_lora_rank rope_head_dim value_head_dim",
        lambda c: c.kv_lora_rank,
        "kv_lora_rank=0 is no latent attention",
        "--kv_lora_rank=64 --rope_head_dim=16",
    ),
    (
        "context_impl context_heads",
        lambda c: c.global_every or not c.window,
        "window={window} in every layer needs only a halo of keys",
        "--global_every=2 or --window=0",
    ),
    ("context_balance", lambda c: not c.window, "window={window} needs positions in order, as they are", "--window=0"),
    (
        "context_balance",
        lambda c: c.context_impl != "all_to_all",
        "context_impl=all_to_all has whole sequences, in order",
        "--context_impl=ring",
    ),
    ("remat_tensors", lambda c: c.remat == "custom", "remat={remat} has no use for it", "--remat=custom"),
    (
        "fp8_granularity fp8_block fp8_rounding fp8_gradients fp8_modules fp8_skip_layers fp8_scales",
        lambda c: c.fp8 != "none",
        "fp8=none multiplies nothing in 8 bits",
        "--fp8=dynamic",
    ),
    (
        "fp8_block",
        lambda c: c.fp8_granularity == "block",
        "fp8_granularity={fp8_granularity} has no blocks",
        "--fp8_granularity=block",
    ),
    (
        "fp8_scales",
        lambda c: c.fp8 in ("static", "calibrate"),
        "fp8={fp8} finds its scales without a file",
        "--fp8=static or --fp8=calibrate",
    ),
    (
        "beta1",
        lambda c: c.optimizer != "adafactor",
        "optimizer=adafactor has no first moment",
        "--optimizer=adamw or --optimizer=sgd",
    ),
    (
        "beta2 mu_dtype",
        lambda c: c.optimizer == "adamw",
        "optimizer={optimizer} has no use for it",
        "--optimizer=adamw",
    ),
    (
        "weight_decay",
        lambda c: c.optimizer != "sgd",
        "optimizer=sgd decays no weights",
        "--optimizer=adamw or --optimizer=adafactor",
    ),
    ("eval_every", lambda c: c.eval_batches, "eval_batches=0 evaluates nothing", "--eval_batches=16"),
)
# As NEEDS, of what a run would write: it runs as well without, and says so (train.introduce).
NOTED = (
    ("profile_steps", lambda c: c.profile_dir, "no trace is written", "--profile_dir=runs/trace"),
    (
        "save_every keep_checkpoints skip_damaged_checkpoints",
        lambda c: c.checkpoint_dir,
        "nothing is saved",
        "--checkpoint_dir=runs/1",
    ),
)


@dataclass(frozen=True)
class Config:
    # run
    preset: str = "tiny"  # model to start from: shape, dtype, remat, batch, steps, learning rate; flags override them
    recipe: str = ""  # named run to start from, model, mesh and all (published.py); every other flag overrides it
    steps: int = 300  # optimizer steps in all (a resumed run counts the steps before it)
    batch: int = 16  # global batch in sequences
    seq_len: int = 128  # T: tokens in a sequence
    seed: int = 0  # seed of the weights, of the order of the data, and of the sample

    # model
    vocab_size: int = 256  # V: tokens of the vocabulary
    num_layers: int = 3  # L: layers
    model_dim: int = 192  # D: width of the residual stream
    ff_dim: int = 512  # F: width of the SwiGLU MLP
    num_heads: int = 8  # N: query heads
    num_kv_heads: int = 8  # K: key/value heads, each shared by N/K query heads
    head_dim: int = 24  # H: dims of a head's queries and keys
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    rope_scaling: float = 1.0  # Llama 3.1's frequency scaling: its factor (8 in Llama 3.1); 1 is off
    rope_original_len: int = 8192  # context length before rope_scaling
    qk_norm: bool = False  # RMSNorm on each head's queries and keys
    qkv_bias: bool = False  # bias on the query, key and value projections (Qwen 2.5)
    output_bias: bool = False  # bias on attention's output projection (gpt-oss)
    attention_sinks: bool = False  # a learned logit a head in each softmax, without a value (gpt-oss)
    tied_embeddings: bool = False  # the unembedding is the embedding
    window: int = 0  # sliding-window attention: a query sees this many keys, itself included; 0 is no window
    global_every: int = 0  # with a window: every so many-th layer attends without it; 0 is never
    logit_soft_cap: float = 0.0  # logits become cap * tanh(logits / cap); 0 is off
    z_loss: float = 0.0  # weight of log(Z)^2 in the loss, Z the softmax's denominator; 0 is off
    norm_eps: float = 1e-5  # epsilon of every RMSNorm
    dtype: str = "float32"  # what is computed with: float32 or bfloat16; the master weights are float32

    # mixture of experts
    num_experts: int = 0  # E: routed experts of a layer; 0 is a dense MLP in every layer
    experts_per_token: int = 0  # X: experts that the router sends a token to
    expert_dim: int = 0  # M: width of an expert's SwiGLU
    num_shared_experts: int = 0  # experts of the same width that see every token, beside the routed ones
    num_dense_layers: int = 0  # leading layers that have a dense MLP of ff_dim in place of experts
    expert_bias: bool = False  # biases on the router and on the experts' projections (gpt-oss)
    swiglu_limit: float = 0.0  # experts' SwiGLU is gpt-oss's, clamped to this; 0 is the plain one
    router_scores: str = "softmax"  # what the router makes of its logits: softmax, or sigmoid (DeepSeek-V3)
    renormalise: bool = True  # the weights of a token's experts are divided by their sum
    router_groups: int = 1  # groups that the experts are cut into
    router_groups_kept: int = 1  # groups, the best for a token, from which its experts are chosen
    router_scale: float = 1.0  # the weights of a token's experts are multiplied by this, after all else
    load_balance_loss: float = 0.0  # weight of Switch's loss, which is 1 where all experts have as much to do; 0 is off
    router_z_loss: float = 0.0  # weight of log(Z)^2 of the router's softmax; 0 is off
    selection_bias: bool = False  # balance without a loss: a bias that chooses experts and does not weigh them
    selection_bias_rate: float = 0.001  # what the selection bias goes up or down by after each step
    moe_impl: str = "dropless"  # dispatch: dropless, capacity (pads and drops), or reference (every token everywhere)
    buffer_factor: float = 2.0  # dropless over an expert axis: a device has room for so many times the mean of rows
    moe_parts: int = 1  # dropless over an expert axis: parts of the tokens, each with its own messages; a few % faster
    capacity_factor: float = 1.25  # capacity: an expert has room for so many times the mean of tokens

    # multi-head latent attention
    kv_lora_rank: int = 0  # C: keys and values of all heads are made from this many numbers a token; 0 is off
    q_lora_rank: int = 0  # Q: queries are made from this many numbers a token; 0: from the model dim, in one matmul
    rope_head_dim: int = 0  # R: dims of a head, beside head_dim, that turn with the position; all heads share their key
    value_head_dim: int = 0  # dims of a head's value; 0 is head_dim

    # parallelism
    mesh: str = "fsdp:*"  # sizes of the axes data, pipe, fsdp, expert, context, tensor, as in data:2,tensor:2; * fills
    core_axis: str = ""  # mesh axis that lies on the two cores of a TPU7x chip; default: the last one of even size
    collectives: str = "xla"  # who moves weights, gradients, activations: xla, or our own ring or ring_bidirectional
    collective_matmul: bool = False  # tensor parallelism multiplies each block while the next one travels, on our rings
    prefetch: bool = True  # gather the weights of layer i+1 while layer i computes
    double_buffer: bool = False  # two layers in an iteration of their loop: gathered weights are not copied in between
    shard_update: bool = False  # shard the optimizer state and the update over the data axis as well (ZeRO-1)
    context_impl: str = "ring"  # attention over the mesh axis context: ring, all_gather, all_to_all; a window: halo
    context_heads: int = 1  # with a ring: so many neighbours exchange heads, and the ring goes across these groups
    context_balance: bool = True  # zigzag order over context: all devices have as much to do; without a window only
    microbatches: int = 1  # accumulate gradients over this many parts of the batch, which go through the stages of pipe
    pipeline_schedule: str = "1f1b"  # turns of the stages of pipe: gpipe, 1f1b (fewer microbatches in memory), circular
    pipeline_rounds: int = 1  # circular: how often a microbatch goes round, through that many parts of each stage
    remat_stage: bool = False  # of a microbatch that is under way keep the stage's input, and compute the stage again
    remat: str = "none"  # what of a layer the backward pass finds saved, and does not compute again
    remat_tensors: str = ""  # with remat=custom, by name: device, offload or remat, as in mlp_up:device,context:offload
    fp8: str = "none"  # matmuls in 8 bits, by what finds their scales
    fp8_granularity: str = "per_tensor"  # in 8 bits, who shares a scale: per_tensor, per_axis or block
    fp8_block: int = 128  # in 8 bits, elements of a block along each dim
    fp8_rounding: str = "nearest"  # in 8 bits, how gradients are rounded: nearest or stochastic
    fp8_gradients: str = "e5m2"  # in 8 bits, format of gradients: e5m2 or e4m3
    fp8_modules: str = "qkv,out,mlp,moe"  # in 8 bits go qkv, out, mlp (and shared experts), moe (routed ones), unembed
    fp8_skip_layers: int = 0  # so many layers at each end stay out of 8 bits
    fp8_scales: str = ""  # file of the largest elements: calibrate writes it, static reads it (calibration.py)
    attention: str = "auto"  # kernel: flash (flash.py), reference (attention.py), auto: flash on a TPU, else reference
    max_logit: float = 0.0  # attention's softmax subtracts this instead of the largest score of a row; 0 is off
    loss_chunk: int = 0  # positions of a sequence whose logits exist at once, at most; 0: as many as make 256 MiB

    # optimizer
    optimizer: str = "adamw"  # optimizer of the weights: adamw, adafactor or sgd
    learning_rate: float = 3e-3  # peak of the learning rate, after the warm-up
    warmup_ratio: float = 0.075  # share of the steps in which the learning rate rises to its peak
    final_lr_ratio: float = 0.1  # cosine decay ends at this share of the peak, at the last step
    beta1: float = 0.9  # adamw: decay of the first moment; sgd: momentum
    beta2: float = 0.95  # adamw: decay of the second moment
    weight_decay: float = 0.1  # adamw and adafactor: decoupled decay, of matrices only
    clip_norm: float = 1.0  # gradients are scaled down to this global norm; 0 is off
    mu_dtype: str = "float32"  # what adamw's first moment is kept in: float32 or bfloat16
    offload_optimizer: bool = False  # the optimizer state waits on the host, and comes layer by layer (offload.py)
    max_skipped: int = 10  # end the run after this many steps in a row with gradients that are not finite

    # data
    corpus: str = ""  # token file made by `python data.py prepare`; default: Python's standard library, as bytes
    eval_every: int = 100  # steps between evaluations on the held-out documents; 0 is only at the end
    eval_batches: int = 16  # batches in an evaluation, at most

    # output
    log_every: int = 10  # steps between printed lines
    metrics_file: str = ""  # one JSON object a step is written here
    sample: int = 200  # tokens of text to generate at the end; 0 is none
    profile_dir: str = ""  # a trace for xprof is written here
    profile_steps: str = "3:5"  # first and last step of the trace

    # checkpoints
    checkpoint_dir: str = ""  # save here, and resume from the newest checkpoint in here; needs the [checkpoint] extra
    save_every: int = 100  # steps between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    skip_damaged_checkpoints: bool = False  # resume from the newest intact one; damaged ones are renamed STEP.damaged

    # machines
    num_processes: int = 0  # processes of the run, where the environment does not tell; 0 is to ask the environment
    process_id: int = -1  # number of this process, from 0
    coordinator: str = ""  # host:port of process 0
    peer_timeout: int = 60  # seconds without a sign of life from a process after which the others end too
    xla_flags: str = "none"  # flags of the TPU compiler: recommended, none, or name=value,... (compiler_flags.py)
    compilation_cache: str = command.expanded("~/.cache/ironwood")  # folder of compiled programs; empty is off

    def __post_init__(self):
        for name, schemes in PATHS.items():
            try:
                object.__setattr__(self, name, command.expanded(getattr(self, name), schemes))
            except ValueError as error:
                raise ValueError(f"{name}={error}") from None
        choices = {
            "dtype": ("float32", "bfloat16"),
            "mu_dtype": ("float32", "bfloat16"),
            "remat": (*REMAT_POLICIES, "auto"),
            "fp8": ("none", "dynamic", "static", "fixed", "delayed", "calibrate"),
            "fp8_granularity": ("per_tensor", "per_axis", "block"),
            "fp8_rounding": ("nearest", "stochastic"),
            "fp8_gradients": ("e5m2", "e4m3"),
            "attention": ("auto", "flash", "reference"),
            "pipeline_schedule": ("gpipe", "1f1b", "circular"),
            "context_impl": ("ring", "all_gather", "all_to_all"),
            "collectives": ("xla", "ring", "ring_bidirectional"),
            "optimizer": ("adamw", "adafactor", "sgd"),
            "router_scores": ("softmax", "sigmoid"),
            "moe_impl": ("dropless", "capacity", "reference"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        smallest = {
            1: "steps batch seq_len vocab_size num_layers model_dim ff_dim num_heads num_kv_heads head_dim "
            "microbatches pipeline_rounds context_heads fp8_block log_every max_skipped save_every "
            "keep_checkpoints peer_timeout rope_theta rope_scaling router_groups router_groups_kept "
            "moe_parts",
            0: "seed window global_every warmup_ratio eval_every eval_batches sample num_processes learning_rate "
            "loss_chunk beta1 beta2 weight_decay clip_norm final_lr_ratio max_logit logit_soft_cap z_loss norm_eps "
            "num_experts fp8_skip_layers "
            "experts_per_token expert_dim num_shared_experts num_dense_layers kv_lora_rank q_lora_rank rope_head_dim "
            "value_head_dim swiglu_limit router_scale load_balance_loss router_z_loss selection_bias_rate "
            "buffer_factor capacity_factor",
        }
        for low, names in smallest.items():
            for name in names.split():
                if not low <= getattr(self, name) < float("inf"):  # NaN is not, either
                    raise ValueError(f"{name}={getattr(self, name)} must be at least {low}, and finite")
        if self.process_id < -1:
            raise ValueError(f"process_id={self.process_id} must be at least 0; -1 is to ask the environment")
        for field in dataclasses.fields(self):  # no dim, count or time of a run is larger
            value, bits = getattr(self, field.name), 32 if field.name == "seed" else 31
            if field.type is int and value >= 2**bits:
                raise ValueError(f"{field.name}={value} must be under 2^{bits}")
        for name in ("beta1", "beta2", "warmup_ratio"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be under 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        if self.offload_optimizer and self.optimizer == "adafactor":
            raise ValueError(
                "offload_optimizer is for adamw and sgd; optimizer=adafactor cannot be updated layer by layer: "
                "--optimizer=adamw or --no-offload_optimizer"
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
        for name in self.fp8_modules.split(","):
            if name not in ("qkv", "out", "mlp", "moe", "unembed"):
                raise ValueError(
                    f"fp8_modules={self.fp8_modules!r}: {name!r} is not one of qkv, out, mlp, moe, unembed"
                )
        if self.remat_places["decoder_layer_input"] == "remat":
            raise ValueError("remat_tensors: decoder_layer_input cannot be recomputed, all else is from it")
        if not re.fullmatch(r"\d+:\d+", self.profile_steps) or not 1 <= self.profile_range[0] <= self.profile_range[1]:
            raise ValueError(
                f"profile_steps={self.profile_steps!r} must be FIRST:LAST with 1 <= FIRST <= LAST, as in 3:5"
            )
        for sentence in without_effect(self, NEEDS):
            raise ValueError(sentence)
        self._check_experts()
        self._check_latent_attention()
        self._check_fp8()
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
        if self.profile_dir and self.profile_range[0] > self.steps:
            raise ValueError(
                f"profile_steps={self.profile_steps!r} is past the last step: --profile_steps=1:{self.steps}"
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
        for name in ("buffer_factor", "capacity_factor"):
            if not getattr(self, name):
                raise ValueError(f"{name}=0 has room for no token: at least 1, if none is to be dropped")

    def _check_latent_attention(self):
        if not self.kv_lora_rank:
            return
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise ValueError(
                f"rope_head_dim={self.rope_head_dim} must be even and at least 2 with "
                f"kv_lora_rank={self.kv_lora_rank}: rotary embeddings turn pairs"
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads} with "
                f"kv_lora_rank={self.kv_lora_rank}: every head makes its own keys and values; "
                f"--num_kv_heads={self.num_heads}"
            )
        for name in ("qk_norm", "qkv_bias"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} goes with kv_lora_rank=0 only: latent attention norms its latents; --no-{name}"
                )

    def _check_fp8(self):
        if self.fp8 == "none":
            return
        modules = self.fp8_modules.split(",")
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

        The layer's input is on the device unless it is moved; qkv_proj is three of them, and log_sum_exp goes where
        context goes, both as in MaxText.
        """
        places = {"decoder_layer_input": "device"}
        for entry in filter(None, self.remat_tensors.split(",")):
            name, _, place = entry.strip().partition(":")
            if name not in (*ACTIVATIONS, "qkv_proj"):
                near = command.did_you_mean(name, ACTIVATIONS)
                raise ValueError(f"remat_tensors: there is no activation {name!r}{near}")
            if place not in ("device", "remat", "offload"):
                raise ValueError(f"remat_tensors: {name}:{place!r} is not one of device, remat, offload")
            for one in ("query_proj", "key_proj", "value_proj") if name == "qkv_proj" else (name,):
                places[one] = place
        if "context" in places:  # without it, the kernel would have to run again
            places.setdefault("log_sum_exp", places["context"])
        return places

    @property
    def profile_range(self) -> tuple[int, int]:
        """First and last profiled step."""
        first, last = self.profile_steps.split(":")
        return int(first), int(last)


def idle(config: Config, needs, *of) -> dict[str, str]:
    """{flag: why, and what to use} of those that are not at their defaults and say nothing in this run.

    Args:
      needs: as NEEDS.
      of: what else its functions ask.
    """
    found = {}
    for names, says, why, way in needs:
        moved = [name for name in names.split() if getattr(config, name) != getattr(Config, name)]
        if moved and not says(config, *of):
            text = f"{why.format_map(vars(config))}. Use {way}"
            found = dict.fromkeys(moved, text) | found  # of several reasons the first
    return found


def changed(config: Config, **values) -> Config:
    """`config` with other values; what has no effect beside them is left at its default."""
    wanted = argparse.Namespace(**{**vars(config), **values})
    return dataclasses.replace(config, **{name: getattr(Config, name) for name in idle(wanted, NEEDS)} | values)


def without_effect(config: Config, needs, *of) -> list[str]:
    """A sentence for each flag that is `idle`, but for those that say that something is off."""
    return [
        f"{name}={value} has no effect: {why}, or leave {name} at its default, {getattr(Config, name)!r}"
        for name, why in idle(config, needs, *of).items()
        if (value := getattr(config, name))
    ]
