"""Named runs, for `--recipe=NAME`: a model and its flags, a slice, who published them, what was measured.

The figures of TPU7x are from https://github.com/AI-Hypercomputer/tpu-recipes, training/ironwood/README.md at 0797d9c.
OTHER_RUNS are measured runs on other slices, or of other batches, which no recipe names; predictions are held against
them, too (predicted/residuals.py).
The flags are from the `run_recipe.sh` in the folder that `source` names: MaxText's, in this project's words. A run that
nobody published is a target. Its mesh, microbatches and recomputation were chosen by predicted/planner.py (for Llama
among named policies, without double buffering), or are those of the run in bfloat16, "the same in FP8".

**What differs in all of them.** Kernels and their blocks are not MaxText's. MaxText has a constant in place of the
softmax's maximum in some runs (`use_max_logit_estimate`), which is left out here. `--max_logit=30` sets it, and gives
NaN if the logits of a row are far from it. The compiler flags are those that compiler_flags.py explains, in the group
nearest to MaxText's. DeepSeek-V3's runs have one more, which no published run sets. `differs` has what else differs. No
flag was chosen by the measured times. Some efficiencies were, as predicted/workload.py says.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run by name: its preset and flags, its slice, who published it, what was measured."""

    preset: str
    topology: str  # of a slice
    num_slices: int = 1
    flags: dict = field(default_factory=dict)  # fields of Config, over the preset's
    source: str
    differs: str = ""  # how it differs from what was published
    measured_step_s: float | None = None
    measured_tflops: float | None = None  # TFLOP/s a chip, without recomputation
    miss: str = ""  # why the prediction of the measured step is off, where that is known


_OF = "tpu-recipes, training/ironwood/"
_LONG_8B = f"{_OF}Llama3.1-8B-LongContext-Maxtext, its table's row of 1M; no figures"
_WIDE_HEADS = "16 heads of 256, and 4 for keys, as published, where Llama 3.1 8B has 32 of 128, and 8"
_TARGET = "a target, after predicted/planner.py"
_IN_FP8 = "a target: the same in FP8"

_ATTENTION_SAVED = "context:device,qkv_proj:device"
_INPUT_ON_HOST = dict(remat="custom", remat_tensors="decoder_layer_input:offload")
_FIXED = dict(fp8="fixed")  # quantization=fp8_full with scales of fixed,-224,224
_8B = dict(batch=512, mesh="fsdp:128", microbatches=2, remat="minimal_with_context", xla_flags="recommended")
_8B_1M = dict(seq_len=1_048_576, batch=8, mesh="fsdp:8,context:16", num_heads=16, num_kv_heads=4, head_dim=256)
_8B_1M |= dict(remat="custom", remat_tensors="context:device", xla_flags="recommended")
_70B = dict(batch=256, mesh="fsdp:128", remat="custom", remat_tensors=_ATTENTION_SAVED, mu_dtype="bfloat16")
_70B |= dict(xla_flags="recommended")
_70B_128K = dict(seq_len=131_072, batch=64, mesh="fsdp:64,context:8", context_impl="all_gather")
_70B_128K |= dict(remat="custom", remat_tensors=f"{_ATTENTION_SAVED},mlp_down:device", xla_flags="recommended")
_405B = dict(_INPUT_ON_HOST, batch=1536, mesh="fsdp:512", mu_dtype="bfloat16", xla_flags="dense_long")
_405B_SAVED = "decoder_layer_input:offload,mlp_down:offload,key_proj:device,value_proj:device"
_QWEN3 = dict(_INPUT_ON_HOST, batch=8192, mesh="fsdp:512", xla_flags="host_offload")
_SUMS_OVER_THREE_AXES = "xla_tpu_enable_sparse_core_reduce_scatter_padding=true"
_DEEPSEEK = dict(_INPUT_ON_HOST, batch=4096, mesh="fsdp:256,fsdp_transpose:2")
_DEEPSEEK |= dict(prefetch=False)  # two gathered layers do not fit
# By their names: the scheduler's estimate of the host's bandwidth, as in the published runs, and gathers under way.
_EARLIER = "xla_tpu_pcie_bandwidth_multiplier=0.03,xla_max_concurrent_async_all_gathers=4"
_DEEPSEEK |= dict(xla_flags=f"recommended,{_SUMS_OVER_THREE_AXES},{_EARLIER}")
_GPT_OSS = dict(_INPUT_ON_HOST, batch=1280, mesh="data:2,fsdp:64", xla_flags="recommended")
_MIXTRAL = dict(batch=1024, double_buffer=True, remat="custom", xla_flags="recommended")
_GEMMA = dict(batch=512, mesh="fsdp:16,fsdp_transpose:8", xla_flags="recommended")
_GEMMA |= dict(remat="custom", remat_tensors="out_proj:device,mlp_down:device")

_GPT_OSS_MISS = (
    "it has tokamax's second grouped matmul, with tiles of its own; it is predicted with the times of the first, with "
    "which it took 17.10 s"
)
_QWEN3_64 = dict(_INPUT_ON_HOST, mesh="fsdp:128", mu_dtype="bfloat16", xla_flags="host_offload")
_GEMMA4_26B = dict(_INPUT_ON_HOST, seq_len=4096, xla_flags="recommended")
_GEMMA4_SMALL = dict(batch=256, mesh="data:4,fsdp:32", remat="full", xla_flags="recommended")
# The recipe has remat_policy=full. MaxText at df1b359, which ran it for the table, did not apply that to these layers
# (_apply_gemma4_small_layers in decoders.py); that of August 2026, which ran the pull requests, does.
_MORE_MATMULS = "its loss computes logits twice, and it looks up the model's embedding by a matmul"
_NOTHING_RECOMPUTED = f"remat_policy=full, without effect in the MaxText of that run; {_MORE_MATMULS}"
# Two sequences a device are 256. The 131,072 tokens of a step in pull request 310 are those of a host of eight devices,
# and the tokens a second in pull request 312 those of a device: 12,823.9 times 1.2777 s are 16,385.
_RECOMPUTED = f"256 sequences, as in the recipe; {_MORE_MATMULS}"

RECIPES: dict[str, Recipe] = {
    "llama3.1-8b-8k-bf16": Recipe(preset="llama3.1-8b", topology="tpu7x:4x4x4", flags=_8B, source=_TARGET),
    "llama3.1-8b-8k-fp8": Recipe(
        preset="llama3.1-8b", topology="tpu7x:4x4x4", flags=_8B | dict(fp8="dynamic"), source=_IN_FP8
    ),
    "llama3.1-8b-8k-bf16-v6e": Recipe(
        preset="llama3.1-8b",
        topology="v6e:8x8",
        flags=dict(
            batch=320,
            mesh="fsdp:64",
            remat="custom",
            remat_tensors="decoder_layer_input:offload,out_proj:offload,qkv_proj:offload",
            xla_flags="xla_tpu_scoped_vmem_limit_kib=98304",  # DENSE_VMEM_LIMIT_FLAG of its script
        ),
        source="tpu-recipes, training/trillium/Llama3.1-8B-MaxText/v6e-64",
        measured_step_s=5.652,  # its TFLOP/s count attention without a mask
    ),
    "llama3.1-8b-1m-bf16": Recipe(
        preset="llama3.1-8b", topology="tpu7x:4x4x4", flags=_8B_1M, source=_LONG_8B, differs=_WIDE_HEADS
    ),
    "llama3.1-8b-1m-fp8": Recipe(
        preset="llama3.1-8b",
        topology="tpu7x:4x4x4",
        flags=_8B_1M | dict(fp8="dynamic"),
        source=_IN_FP8,
        differs=_WIDE_HEADS,
    ),
    "llama3.1-70b-8k-bf16": Recipe(
        preset="llama3.1-70b",
        topology="tpu7x:4x4x4",
        flags=_70B,
        source=f"{_OF}llama3.1-70b/8k-bf16-tpu7x-4x4x4",
        measured_step_s=12.20,
        measured_tflops=1207.05,
    ),
    "llama3.1-70b-8k-fp8": Recipe(
        preset="llama3.1-70b",
        topology="tpu7x:4x4x4",
        flags=_70B | _FIXED,
        source=f"{_OF}llama3.1-70b/8k-fp8-tpu7x-4x4x4",
        measured_step_s=7.93,
        measured_tflops=1854.19,
    ),
    "llama3.1-70b-128k-bf16": Recipe(
        preset="llama3.1-70b",
        topology="tpu7x:4x8x8",
        flags=_70B_128K,
        source=f"{_OF}llama3.1-70b/128k-bf16-tpu7x-4x8x8",
        differs="adamw for adam_pax",
        measured_step_s=34.02,
        measured_tflops=897.94,
    ),
    "llama3.1-70b-128k-fp8": Recipe(
        preset="llama3.1-70b",
        topology="tpu7x:4x8x8",
        flags=_70B_128K | dict(fp8="dynamic"),
        source=f"{_OF}llama3.1-70b/128k-fp8-tpu7x-4x8x8",
        differs="adamw for adam_pax",
        measured_step_s=30.11,
        measured_tflops=1014.45,
    ),
    "llama3.1-405b-8k-bf16": Recipe(
        preset="llama3.1-405b",
        topology="tpu7x:4x8x8",
        flags=_405B | dict(remat_tensors=_405B_SAVED),
        source=f"{_OF}llama3.1-405b/8k-bf16-tpu7x-4x8x8",
        measured_step_s=98.34,
        measured_tflops=1261.40,
    ),
    "llama3.1-405b-8k-fp8": Recipe(
        preset="llama3.1-405b",
        topology="tpu7x:4x8x8",
        flags=_405B | _FIXED,
        source=f"{_OF}llama3.1-405b/8k-fp8-tpu7x-4x8x8",
        measured_step_s=64.37,
        measured_tflops=1927.15,
    ),
    "qwen3-235b-a22b-4k-bf16": Recipe(
        preset="qwen3-235b-a22b",
        topology="tpu7x:4x8x8",
        flags=_QWEN3,
        source=f"{_OF}qwen3-235b-a22b/4k-bf16-tpu7x-4x8x8",
        differs="measured with random routing",
        measured_step_s=30.87,
        measured_tflops=629.79,
    ),
    "qwen3-235b-a22b-4k-fp8": Recipe(
        preset="qwen3-235b-a22b",
        topology="tpu7x:4x8x8",
        flags=_QWEN3 | _FIXED,
        source=f"{_OF}qwen3-235b-a22b/4k-fp8-tpu7x-4x8x8",
        differs="measured with random routing",
        measured_step_s=27.67,
        measured_tflops=702.60,
    ),
    "deepseek-v3-4k-bf16": Recipe(
        preset="deepseek-v3",
        topology="tpu7x:4x8x8",
        flags=_DEEPSEEK | dict(mu_dtype="bfloat16"),
        source=f"{_OF}deepseek3-671b/4k-bf16-tpu7x-4x8x8",
        differs="two compiler flags for its messages; measured with random routing, and gradients in bfloat16",
        measured_step_s=26.79,
        measured_tflops=612.66,
    ),
    "deepseek-v3-4k-fp8": Recipe(
        preset="deepseek-v3",
        topology="tpu7x:4x8x8",
        flags=_DEEPSEEK | _FIXED | dict(fp8_modules="out,mlp,moe"),
        source=f"{_OF}deepseek3-671b/4k-fp8-tpu7x-4x8x8",
        differs="two compiler flags for its messages; latent attention's projections in bfloat16; attention's "
        "scores without a cap (15)",
        measured_step_s=22.08,
        measured_tflops=743.46,
    ),
    "gpt-oss-120b-8k-bf16": Recipe(
        preset="gpt-oss-120b",
        topology="tpu7x:4x4x4",
        flags=_GPT_OSS,
        source=f"{_OF}gpt-oss-120b/8k-bf16-tpu7x-4x4x4",
        differs="mlpwo:offload left out: here it is the result of a dense MLP, which this model does not have",
        measured_step_s=14.93,
        measured_tflops=378.90,
        miss=_GPT_OSS_MISS,
    ),
    "gpt-oss-120b-8k-fp8": Recipe(
        preset="gpt-oss-120b", topology="tpu7x:4x4x4", flags=_GPT_OSS | dict(fp8="dynamic"), source=_IN_FP8
    ),
    "mixtral-8x7b-4k-bf16": Recipe(
        preset="mixtral-8x7b",
        topology="tpu7x:4x4x4",
        flags=_MIXTRAL | dict(mesh="fsdp:128", remat_tensors=f"{_ATTENTION_SAVED},out_proj:device,expert_down:device"),
        source=_TARGET,
    ),
    "mixtral-8x7b-4k-fp8": Recipe(
        preset="mixtral-8x7b",
        topology="tpu7x:4x4x4",
        flags=_MIXTRAL
        | dict(mesh="data:4,fsdp:32", remat_tensors=f"{_ATTENTION_SAVED},expert_down:device", fp8="dynamic"),
        source=_TARGET,
    ),
    "gemma4-31b-8k-bf16": Recipe(
        preset="gemma4-31b",
        topology="tpu7x:4x4x4",
        flags=_GEMMA,
        source=f"{_OF}gemma4-31b/8k-bf16-tpu7x-4x4x4",
        measured_step_s=12.20,
        measured_tflops=1057.76,
    ),
    "gemma4-31b-8k-fp8": Recipe(
        preset="gemma4-31b", topology="tpu7x:4x4x4", flags=_GEMMA | dict(fp8="dynamic"), source=_IN_FP8
    ),
}


def _elsewhere(recipe: str, topology: str, step_s: float, tflops: float | None, folder: str, **flags) -> Recipe:
    """A recipe's run on another slice."""
    own = RECIPES[recipe]
    return replace(
        own,
        topology=topology,
        flags=own.flags | flags,
        source=f"{_OF}{folder}",
        measured_step_s=step_s,
        measured_tflops=tflops,
    )


def _qwen3_on_64(batch: int, step_s: float, tflops: float, **flags) -> Recipe:
    return Recipe(
        preset="qwen3-235b-a22b",
        topology="tpu7x+p_state=7:4x4x4",
        flags=_QWEN3_64 | dict(batch=batch) | flags,
        source="github.com/yangwhale/gpu-tpu-pedia at 3fa9ce1, tpu/Qwen3-235B-Pretraining/TUNING-v7.md, section 3",
        differs="attention with a constant maximum of 30; gradients in bfloat16",
        measured_step_s=step_s,
        measured_tflops=tflops,
    )


def _gemma4_26b(batch: int, topology: str, mesh: str, step_s: float, tflops: float) -> Recipe:
    return Recipe(
        preset="gemma4-26b-a4b",
        topology=topology,
        flags=_GEMMA4_26B | dict(batch=batch, mesh=mesh),
        source=f"{_OF}gemma4-26b/4k-bf16-{topology.replace(':', '-')}",
        measured_step_s=step_s,
        measured_tflops=tflops,
        miss="its experts' kernel is jax's, of which no times are published; it is predicted as tokamax's",
    )


def _gemma4_small(preset: str, step_s: float, tflops: float | None, *, pull_request: int = 0, **flags) -> Recipe:
    """A run of Gemma 4 E2B or E4B: of the table of tpu-recipes, or of a pull request."""
    folder = f"{_OF}{preset.replace('e2b', '2b').replace('e4b', '4b')}/8k-bf16-tpu7x-4x4x4"
    return Recipe(
        preset=preset,
        topology="tpu7x:4x4x4",
        flags=_GEMMA4_SMALL | flags,
        source=f"{folder}{f', pull request {pull_request}' if pull_request else ''}",
        differs=_RECOMPUTED if pull_request else _NOTHING_RECOMPUTED,
        measured_step_s=step_s,
        measured_tflops=tflops,
    )


_DEEPSEEK_128 = dict(mesh="fsdp:256", batch=2048, mu_dtype="bfloat16")

OTHER_RUNS: dict[str, Recipe] = {
    "llama3.1-70b-8k-bf16-4x8x8": _elsewhere(
        "llama3.1-70b-8k-bf16",
        "tpu7x:4x8x8",
        12.27,
        1199.67,
        "llama3.1-70b/8k-bf16-tpu7x-4x8x8",
        batch=1024,
        mesh="fsdp:512",
    ),
    "llama3.1-70b-8k-fp8-4x8x8": _elsewhere(
        "llama3.1-70b-8k-fp8",
        "tpu7x:4x8x8",
        7.95,
        1851.25,
        "llama3.1-70b/8k-fp8-tpu7x-4x8x8",
        batch=1024,
        mesh="fsdp:512",
    ),
    "llama3.1-70b-8k-bf16-nightly": replace(
        RECIPES["llama3.1-70b-8k-bf16"],
        source="tpu-recipes, pull request 307: three runs of MaxText of September 2026, 12.384 to 12.395 s",
        measured_step_s=12.391,
        measured_tflops=1188.0,
    ),
    "deepseek-v3-4k-bf16-4x4x8": _elsewhere(
        "deepseek-v3-4k-bf16", "tpu7x:4x4x8", 27.02, 607.53, "deepseek3-671b/4k-bf16-tpu7x-4x4x8", **_DEEPSEEK_128
    ),
    "deepseek-v3-4k-fp8-4x4x8": _elsewhere(
        "deepseek-v3-4k-fp8", "tpu7x:4x4x8", 22.47, 730.60, "deepseek3-671b/4k-fp8-tpu7x-4x4x8", **_DEEPSEEK_128
    ),
    "gpt-oss-120b-8k-bf16-4x8x8": _elsewhere(
        "gpt-oss-120b-8k-bf16",
        "tpu7x:4x8x8",
        15.16,
        373.22,
        "gpt-oss-120b/8k-bf16-tpu7x-4x8x8",
        batch=5120,
        mesh="data:8,fsdp:64",
    ),
    "gemma4-26b-4k-bf16": _gemma4_26b(2048, "tpu7x:4x4x4", "fsdp:128", 5.53, 593.59),
    "gemma4-26b-4k-bf16-4x8x8": _gemma4_26b(8192, "tpu7x:4x8x8", "data:2,fsdp:256", 5.54, 592.41),
    "gemma4-e2b-8k-bf16": _gemma4_small("gemma4-e2b", 0.5665, 892.84, remat="none"),
    "gemma4-e2b-8k-bf16-recomputed": _gemma4_small("gemma4-e2b", 0.7715, None, pull_request=310),
    "gemma4-e4b-8k-bf16": _gemma4_small("gemma4-e4b", 0.9708, 1002.5, remat="none"),
    "gemma4-e4b-8k-bf16-recomputed": _gemma4_small("gemma4-e4b", 1.2777, 761.72, pull_request=312),
    "qwen3-235b-a22b-4k-bf16-8-a-device": _qwen3_on_64(1024, 15.86, 613.0),
    "qwen3-235b-a22b-4k-bf16-12-a-device": _qwen3_on_64(1536, 21.66, 673.0),
    "qwen3-235b-a22b-4k-bf16-13-a-device": _qwen3_on_64(1664, 23.11, 683.7),
    "qwen3-235b-a22b-4k-fp8-12-a-device": _qwen3_on_64(1536, 20.55, 709.4, fp8="dynamic"),
    "qwen3-235b-a22b-4k-fp8-13-a-device": _qwen3_on_64(1664, 21.99, 718.4, fp8="dynamic"),
    "qwen3-235b-a22b-4k-fp8-fixed-12-a-device": _qwen3_on_64(1536, 19.63, 742.9, **_FIXED),
    "qwen3-235b-a22b-4k-fp8-fixed-13-a-device": _qwen3_on_64(1664, 21.06, 750.0, **_FIXED),
}
