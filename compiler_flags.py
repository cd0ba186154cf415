"""A table of the compiler flags that Google's TPU7x training runs set and that a source explains.

    python compiler_flags.py
    python compiler_flags.py --workload=moe --json

**Idea.** XLA compiles for TPU with more than 1300 flags. Published runs set 4 to 43 of them; the table below has those
whose purpose a source states. The groups:

**Scoped VMEM.** The share of a core's 64 MiB of VMEM that the running operation may use, 32 MiB by default. A larger
share allows larger tiles; the remainder prefetches the operands of later operations.

**SparseCore offload.** The SparseCores run all-gather, reduce-scatter and all-reduce while the TensorCore computes. On
TPU7x this is the default, which the three flags restate: the compiled program is the same with and without them, and
only `false` changes it (compiled: tests/test_compiler_flags.py).

**Continuation fusion.** The other form of overlap, recommended on v5p and v6e: the TensorCore itself moves the message
between steps of a matmul. A collective can use only one of the two forms, so the recipes switch this one off.

**Latency hiding.** A scheduler that starts each collective early and waits for it late, so that other work runs in
between. It needs the SparseCores' collective aggregator; without it the compiler refuses the flag.

**Host offload.** A group that MaxText recommends if activations are offloaded to the host's memory. For most of its
flags no source says more. `memory_pressure_tracking` restates a default.

**Barriers.** `xla_tpu_aggressive_opt_barrier_removal` removes the barriers that order messages (`collectives.after`;
compiled). Runs of mixtures and with host offload set it. Here no workload has it.

**Reduce-scatter over three axes.** If a shard can be divided in three, XLA runs a reduce-scatter over all three axes of
a torus at once. Otherwise it uses one ring through all devices, which takes two of the six links of a chip, as for
DeepSeek-V3's matrices of 7168 x 2048. The flag pads shards to a multiple of three. No published run sets it; our
recipes of DeepSeek-V3 do. It needs three full axes: over part of an axis XLA uses a ring regardless.

**Clock.** The chip's frequency state. The compiler also accepts this flag with a compilation, but nothing shows that
the clock then changes. So it is passed as all sources pass it, at the start.

**Silent data corruption.** XLA:TPU has a checker of its own, `xla_tpu_enable_sdc_checker=true`: parts of a program run
again on the same operands, `xla_tpu_sdc_check_repeat_count` times (5 in MaxText), and with
`xla_tpu_sdc_check_halt_on_detection=true` a difference stops the chip. A step is then repeat_count + 1 times as long,
by MaxText, which has it off; no published run on TPU7x sets it, so it is not in the table. The compiler accepts these
options with a compilation (libtpu 0.0.42). corruption.py repeats whole steps, from time to time, with any backend.

**Workloads** (WORKLOADS) are what the sets of recipes train. No source explains why their flags differ: 70B at 8192
tokens has four, two of them explained, and 405B at 8192 has fifteen or more. `workload_of` depends on experts and
sequence length alone; use --xla_flags=dense_long for 405B. No recipe trains a mixture of experts on long sequences.

**Passing flags.** Flags of a program are passed with each compilation and may differ between programs of one process:

    jax.jit(step).lower(*args).compile(compiler_options=compiler_options(flags))

Flags of the chip are in an environment variable that libtpu reads once, so they are set before jax is imported:

    LIBTPU_INIT_ARGS="--xla_tpu_dvfs_p_state=7" python train.py

The recipes pass all of their flags in this way (`init_args(flags, everything=True)`). libtpu exits on a flag that it
does not know and silently ignores one without dashes (tried: 0.0.42 and 0.0.50).

**Left out**: flags of which only the name is known (UNEXPLAINED), among them `xla_tpu_bf16_emission_mode`, in 19 of the
recipes; `xla_tpu_enable_multi_compute_overlap_in_layer_scheduler`, false for DeepSeek-V3, true for gpt-oss;
`xla_tpu_data_parallel_opt_different_sized_ops`, in one recipe and already the default; flags of the video model Wan;
and `xla_sc_enable_instruction_fusion` and `xla_sc_disjoint_spmem`, which MaxText has in its SparseCore group and no
recipe for TPU7x sets (the second is not a compiler option). TPU_MEGACORE=MEGACORE_DENSE is for chips whose two cores
are one device, v4 and v5p; on TPU7x they are two. Any flag can be given as name=value. docs/CASES.md has the effect of
some flags on the compiled schedule; none was measured here.

**Source**: the flags are from the 24 recipes in https://github.com/AI-Hypercomputer/tpu-recipes, training/ironwood;
their meanings from MaxText (https://github.com/AI-Hypercomputer/maxtext) and from messages of libtpu.
"""

import dataclasses
import difflib
import json
import os
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from glob import glob
from itertools import groupby

import command
import inputs
from config import Config

LONG = 32_768  # tokens from which a sequence is long: the recipes' lengths are 4096, 8192 and 131,072

WORKLOADS = {
    "dense_short": "dense models on short sequences, such as Llama 3.1 70B at 8192",
    "dense_long": "dense models on long sequences, such as Llama 3.1 70B at 131,072; also 405B at 8192",
    "moe": "mixtures of experts, such as DeepSeek-V3 and gpt-oss 120B",
    "host_offload": "activations in the host's memory, as for Qwen3 235B",
}

# Flags that recipes set and that no source known to us explains.
UNEXPLAINED = (
    "xla_enable_transpose_trace xla_max_concurrent_async_all_gathers xla_max_concurrent_async_reduce_scatters "
    "xla_tpu_accumulate_into_mrb xla_tpu_async_copy_bandwidth_scaling_factor xla_tpu_bf16_emission_mode "
    "xla_tpu_dot_dot_fusion_duplicated xla_tpu_enable_3d_reduce_scatter_decomposer "
    "xla_tpu_enable_all_gather_offload_tracing xla_tpu_enable_async_all_to_all xla_tpu_enable_collective_pipeliner "
    "xla_tpu_enable_concurrent_sparse_core_offloading xla_tpu_enable_ici_ar_pipelining "
    "xla_tpu_enable_ici_rs_pipelining xla_tpu_enable_offloading_gather_to_sparsecore "
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather "
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather "
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter "
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs xla_tpu_enable_sparse_core_reduce_scatter_v2 "
    "xla_tpu_enable_sublane_major_scaling_bitcast_fusion xla_tpu_enable_tpu_custom_call_scoped_vmem_adjustments "
    "xla_tpu_enable_tree_use_collective_pipeliner xla_tpu_ici_rs_pipelining_threshold_kib "
    "xla_tpu_impure_enable_packed_bf16_math_ops xla_tpu_impure_use_lmr_on_gxc xla_tpu_mosaic_fusion "
    "xla_tpu_order_dot_after_layout xla_tpu_pcie_bandwidth_multiplier xla_tpu_prefer_async_allgather_to_allreduce "
    "xla_tpu_prefetch_interval_picker_size_override xla_tpu_rwb_fusion "
    "xla_tpu_sparse_core_all_gather_latency_multiplier xla_tpu_sparse_core_all_reduce_offload_min_size_in_bytes "
    "xla_tpu_sparse_core_reduce_scatter_latency_multiplier xla_tpu_use_single_sparse_core_for_all_gather_offload"
).split()

# The environment in which libtpu describes TPU7x and compiles for it without a TPU; set before jax is imported.
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not look for a TPU
    "TPU_ACCELERATOR_TYPE": "tpu7x-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may load libtpu at once
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


@dataclass(frozen=True)
class Flag:
    name: str  # without dashes
    value: str
    default: str  # libtpu's default; "auto" depends on the chip and the program, "-1" is unset
    workloads: tuple[str, ...]  # of WORKLOADS, or "all"; empty if the flag depends on more than the workload
    group: str
    meaning: str
    source: str  # the runs that set it; EXPLAINED_BY has the source that explains its group
    passed: str = "compile"  # with each compilation, or only at the "start", in LIBTPU_INIT_ARGS

    def is_for(self, workload: str) -> bool:
        return workload in self.workloads or "all" in self.workloads


EXPLAINED_BY = {
    "scoped VMEM": "Google Cloud's guide; MaxText's benchmarks/xla_flags_library.py",
    "SparseCore offload": "MaxText's benchmarks/xla_flags_library.py, ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR",
    "continuation fusion": "MaxText's benchmarks/xla_flags_library.py, CF_FOR_ALL_GATHER",
    "latency hiding": "libtpu's message without the aggregator; MaxText's benchmark_and_performance.md",
    "host offload": "MaxText's benchmarks/xla_flags_library.py, HOST_OFFLOAD_FLAGS",
    "reduce-scatter over three axes": "the programs that are compiled in tests/test_aot.py",
    "clock": "third-party logs of TPU7x runs; MaxText's benchmark_and_performance.md sets it",
}

# Recipes are folders of tpu-recipes/training/ironwood.
_70B = "llama3.1-70b/8k-bf16-tpu7x-4x4x4"
_70B_LONG = "llama3.1-70b/128k-bf16-tpu7x-4x8x8"
_LONG_MOE = f"{_70B_LONG}, deepseek3-671b/4k-bf16-tpu7x-4x8x8"
_MOE = "deepseek3-671b/4k-bf16-tpu7x-4x8x8, gpt-oss-120b/8k-bf16-tpu7x-4x4x4"
_QWEN = "qwen3-235b-a22b/4k-bf16-tpu7x-4x8x8"
_ONE_OF_GROUP = "One of the group that MaxText recommends with host offload; no source says more."


def _offload(name: str, value: str, default: str, meaning: str = _ONE_OF_GROUP) -> Flag:
    return Flag(name, value, default, ("host_offload",), "host offload", meaning, _QWEN)


def _on_sparse_cores(collective: str, workloads: tuple[str, ...], source: str) -> Flag:
    name, hyphened = f"xla_tpu_enable_sparse_core_collective_offload_{collective}", collective.replace("_", "-")
    meaning = f"The SparseCores run {hyphened}s while the TensorCore computes; the default on TPU7x."
    return Flag(name, "true", "auto", workloads, "SparseCore offload", meaning, source)


# The compiler's limit for one operation, if no flag sets it.
SCOPED_VMEM, DEFAULT_VMEM_KIB = "xla_tpu_scoped_vmem_limit_kib", 32_768
PADS_SUMS = "xla_tpu_enable_sparse_core_reduce_scatter_padding"
TABLE = (
    Flag(
        SCOPED_VMEM,
        "61440",
        "-1",
        ("dense_short", "host_offload"),
        "scoped VMEM",
        "KiB of VMEM for the running operation (default 32 MiB); 60 MiB leave 4 to prefetch for the next.",
        f"{_70B}, {_QWEN}",
    ),
    Flag(
        SCOPED_VMEM,
        "65536",
        "-1",
        ("dense_long", "moe"),
        "scoped VMEM",
        "The same, all 64 MiB of a core.",
        _LONG_MOE,
    ),
    _on_sparse_cores("all_gather", ("dense_long", "moe", "host_offload"), f"{_LONG_MOE}, {_QWEN}"),
    _on_sparse_cores("reduce_scatter", ("dense_long", "moe"), _LONG_MOE),
    _on_sparse_cores("all_reduce", ("all",), "all 24 recipes"),
    Flag(
        "xla_tpu_use_tc_device_shape_on_sc",
        "true",
        "false",
        ("dense_long", "moe"),
        "SparseCore offload",
        "One of the base flags that MaxText sets with every SparseCore offload; no source says more.",
        _LONG_MOE,
    ),
    Flag(
        "xla_sc_disable_megacore_partitioning",
        "true",
        "false",
        ("dense_long", "moe"),
        "SparseCore offload",
        "One of the base flags that MaxText sets with every SparseCore offload; no source says more.",
        _LONG_MOE,
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "false",
        "auto",
        ("dense_long", "moe"),
        "continuation fusion",
        "No continuation fusion of all-gathers: the SparseCores run them, and a collective uses one of the two.",
        _LONG_MOE,
    ),
    Flag(
        "xla_enable_async_all_gather",
        "true",
        "auto",
        ("dense_long", "moe"),
        "continuation fusion",
        "An all-gather is asynchronous: other work runs between its start and its end.",
        _LONG_MOE,
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_aggregator",
        "true",
        "auto",
        ("moe",),
        "latency hiding",
        "Required by the layer scheduler: without it the compiler ends with an error that says so.",
        _MOE,
    ),
    Flag(
        "xla_tpu_enable_latency_hiding_layer_scheduler",
        "true",
        "auto",
        ("moe",),
        "latency hiding",
        "Schedules the collectives of a layer so that they overlap with computation.",
        _MOE,
    ),
    Flag(
        "xla_tpu_enable_layer_scheduler_for_dependent_collectives",
        "true",
        "auto",
        ("moe",),
        "latency hiding",
        "Set with the layer scheduler in all recipes that set that; no source says more.",
        _MOE,
    ),
    Flag(
        "xla_tpu_scheduler_percent_shared_memory_limit",
        "150",
        "95",
        ("moe",),
        "latency hiding",
        "Set with the layer scheduler in all recipes that set that; no source says more.",
        _MOE,
    ),
    _offload("xla_tpu_scheduler_percent_shared_memory_limit", "100", "95"),
    Flag(
        "xla_tpu_aggressive_opt_barrier_removal",
        "true",
        "false",
        (),
        "host offload",
        f"{_ONE_OF_GROUP} It removes the barriers that order messages.",
        f"{_MOE}, {_QWEN}",
    ),
    _offload("xla_tpu_enable_all_experimental_scheduler_features", "true", "false"),
    _offload(
        "xla_tpu_enable_scheduler_memory_pressure_tracking",
        "true",
        "true",
        "One of the same group; already the default.",
    ),
    _offload("xla_tpu_host_transfer_overlap_limit", "24", "32"),
    _offload("xla_tpu_enable_ag_backward_pipelining", "true", "false"),
    _offload("xla_lhs_prioritize_async_depth_over_stall", "ENABLED", "false"),
    _offload("xla_should_allow_loop_variant_parameter_in_chain", "ENABLED", "false"),
    _offload("xla_should_add_loop_invariant_op_in_chain", "ENABLED", "false"),
    _offload("xla_max_concurrent_host_send_recv", "100", "-1"),
    _offload("xla_latency_hiding_scheduler_rerun", "2", "1"),
    Flag(
        PADS_SUMS,
        "true",
        "auto",
        (),
        "reduce-scatter over three axes",
        "Pads shards, so that a reduce-scatter over three full axes uses all six links of a chip at once.",
        "no published run, and in our recipes of DeepSeek-V3",
    ),
    Flag(
        "xla_tpu_dvfs_p_state",
        "7",
        "-1",
        ("dense_short", "dense_long", "moe"),
        "clock",
        "Holds the chip at its highest clock; runs without it are at state 3. TPU7x only.",
        "Llama3.1-8B-LongContext-Maxtext; MaxText's OLMo 3 script, and its guide for DeepSeek-V3",
        passed="start",
    ),
)

_AT_START = {flag.name for flag in TABLE if flag.passed == "start"}


def recommended(workload: str) -> dict[str, str]:
    """{name: value} of the table's flags for a workload. Raises ValueError if it is not one of WORKLOADS."""
    if workload not in WORKLOADS:
        raise ValueError(f"there is no workload {workload!r}{inputs.did_you_mean(workload, WORKLOADS)}")
    return {flag.name: flag.value for flag in TABLE if flag.is_for(workload)}


def workload_of(config: Config) -> str:
    """The workload of a run, by its experts and its sequence length; host offload must be requested by name."""
    if config.num_experts:
        return "moe"
    return "dense_long" if config.seq_len >= LONG else "dense_short"


def parse(text: str, workload: str) -> dict[str, str]:
    """{name: value} for the text after --xla_flags=, in a run of this workload.

    "none" or an empty text gives no flags. Otherwise the text is a list separated by commas, in which later entries
    override earlier ones. An entry is "recommended", the name of a workload, or name=value with or without leading
    dashes. A name outside the table is accepted if it begins with xla_ and is not a likely typo of one in the table;
    `unknown` lists these.

    Raises:
      ValueError: an entry is none of these; the message names the closest one.
    """
    if text.strip() in ("", "none"):
        return {}
    flags = {}
    for entry in text.split(","):
        name, equals, value = entry.strip().lstrip("-").partition("=")
        name, value = name.strip(), value.strip()
        if equals:
            _check_name(name)
            if not value:
                raise ValueError(f"--xla_flags: {name} needs a value, as in {name}=true")
            if name == SCOPED_VMEM and not re.fullmatch(r"-1|[1-9]\d*", value):
                raise ValueError(f"--xla_flags: {name} must be a number of KiB, or -1 for the default; got {value!r}")
            flags[name] = value
        elif name == "recommended" or name in WORKLOADS:
            flags |= recommended(workload if name == "recommended" else name)
        elif name == "none":
            raise ValueError("--xla_flags: none must be the only entry")
        else:
            known = ["recommended", "none", *WORKLOADS, *_known()]
            if name in known or name.startswith("xla_"):
                raise ValueError(f"--xla_flags: {name} needs a value, as in {name}=true")
            near = inputs.did_you_mean(name, known, otherwise=_ENTRIES)
            raise ValueError(f"--xla_flags: there is no {name!r}{near}")
    return flags


def for_run(config: Config) -> dict[str, str]:
    """The flags of a run. Raises ValueError, as `parse`."""
    return parse(config.xla_flags, workload_of(config))


def scoped_vmem_kib(flags: Mapping[str, str]) -> int:
    """The KiB of VMEM that one operation may use with these flags. -1 leaves it to the compiler, as does no flag."""
    kib = int(flags.get(SCOPED_VMEM, -1))
    return DEFAULT_VMEM_KIB if kib == -1 else kib


def set_init_args(flags: Mapping[str, str]) -> None:
    """Adds the flags that libtpu reads at its start to LIBTPU_INIT_ARGS. To be called before jax is imported."""
    if at_start := init_args(flags):
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {at_start}".strip()


def has_tpu() -> bool:
    """Whether this machine has a TPU that JAX may use."""
    return "tpu" in os.environ.get("JAX_PLATFORMS", "tpu") and bool(glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"))


def without_tpu() -> None:
    """Lets libtpu describe TPU7x and compile for it without a TPU. To be called before jax is imported."""
    for name, value in WITHOUT_TPU.items():
        os.environ.setdefault(name, value)


def unknown(flags: Mapping[str, str]) -> list[str]:
    """The names that are not in the table, which the compiler accepts or refuses."""
    return [name for name in flags if name not in {flag.name for flag in TABLE}]


def compiler_options(flags: Mapping[str, str]) -> dict[str, str]:
    """The flags that are passed with a compilation: jit(...).lower(...).compile(compiler_options=...)."""
    return {name: value for name, value in flags.items() if name not in _AT_START}


def init_args(flags: Mapping[str, str], *, everything: bool = False) -> str:
    """LIBTPU_INIT_ARGS with the flags that libtpu reads at its start or, as the recipes have it, with all flags."""
    return " ".join(f"--{name}={value}" for name, value in flags.items() if everything or name in _AT_START)


def _known() -> list[str]:
    return [*dict.fromkeys(flag.name for flag in TABLE), *UNEXPLAINED]


def _check_name(name: str) -> None:
    """Raises ValueError if a name cannot be a flag's, or differs from one in the table by a letter or two."""
    known = _known()
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not name.startswith("xla_"):
        meant = inputs.did_you_mean(name, known, otherwise=_ENTRIES)
        raise ValueError(f"--xla_flags: {name!r} must begin with xla_{meant}")
    if near:
        length = len(name) + len(near[0])
        differing = length * (1 - difflib.SequenceMatcher(None, name, near[0], autojunk=False).ratio())
        if differing < 2.5:  # letters in only one of the two names; a wrong letter counts twice
            raise ValueError(f"--xla_flags: there is no flag {name!r}; did you mean {near[0]}?")


_ENTRIES = f"recommended, none, {', '.join(WORKLOADS)}, name=value"


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__file__)
    parser.add_argument("--workload", default="all", help=f"all, or one of {', '.join(WORKLOADS)} [%(default)s]")
    parser.add_argument("--json", action="store_true", help="a list of JSON objects")
    args = command.arguments(parser, argv)
    command.check_names([args.workload], ["all", *WORKLOADS])
    flags = [flag for flag in TABLE if args.workload == "all" or flag.is_for(args.workload)]
    if args.json:
        return print(json.dumps([dataclasses.asdict(flag) for flag in flags], indent=2))
    for name, about in WORKLOADS.items():
        if args.workload in ("all", name):
            print(f"{name:14}{about}")
    for group in dict.fromkeys(flag.group for flag in flags):
        print(f"\n{group}, explained by {EXPLAINED_BY[group]}")
        members = [flag for flag in flags if flag.group == group]
        for paragraphs, same in groupby(
            members, lambda f: (f.meaning, f"For {', '.join(f.workloads) or 'no workload as such'}. Set in {f.source}.")
        ):
            print()
            for flag in same:
                passed = "LIBTPU_INIT_ARGS" if flag.passed == "start" else "compiler_options"
                print(f"  {f'{flag.name}={flag.value}':74} default {flag.default:6}  {passed}")
            for line in paragraphs:
                print(textwrap.fill(line, 120, initial_indent=" " * 6, subsequent_indent=" " * 6))


if __name__ == "__main__":
    command.run(main)
