"""The compiler's flags that Google's own TPU7x training runs set, and that somebody explains: in one table.

    python compiler_flags.py
    python compiler_flags.py --workload=moe --json

XLA compiles for TPU with more than 1300 flags. Published runs set 4 to 43 of them; the table below has those of which a
source says what they are for. Its flags come from the 24 recipes in https://github.com/AI-Hypercomputer/tpu-recipes,
training/ironwood, and their meanings from MaxText (https://github.com/AI-Hypercomputer/maxtext) and from what libtpu
itself says. The groups:

**Scoped VMEM.** Of the 64 MiB of VMEM of a core, what the operation that now runs may use, 32 MiB by default. More of
it is larger tiles; the rest prefetches the operands of operations to come.

**SparseCore offload.** All-gather, reduce-scatter and all-reduce are run by the SparseCores while the TensorCore goes
on computing. On TPU7x this is the default. The three flags that say so restate it: the compiled program is the same
with and without them, and a `false` is what changes it (compiled: tests/test_compiler_flags.py).

**Continuation fusion.** The other way to overlap, recommended on v5p and v6e: the TensorCore itself moves the message
in between steps of a matmul. A collective is overlapped by one of the two, so the recipes switch this one off.

**Latency hiding.** The scheduler that puts each collective early and its end late, so that work lies between. It
needs the SparseCores' collective aggregator, and the compiler refuses it without.

**Host offload.** What MaxText recommends as a group where activations go to the host's memory; of most of its members
no source says more. `memory_pressure_tracking` restates a default.

**Sums over three axes.** A reduce-scatter whose parts XLA can cut in thirds goes over all three axes of a torus at
once; any other goes round one ring of all the devices, which takes two of a chip's six ways. DeepSeek-V3's
matrices of 7168 x 2048 are of the others. No published run sets the flag that adds the rows which are short of a third;
our recipes of DeepSeek-V3 do. It needs three whole axes: over part of one there is a ring all the same.

**Clock.** The state of the chip's frequency. The compiler takes this flag with a compilation, too; whether the clock
then changes is not shown, so it goes the way that all sources pass it.

**A workload** is what one set of recipes trains (WORKLOADS). Why their flags differ is not said: 70B at 8192 tokens has
four, of which two are explained, and 405B at as many has fifteen or more. `workload_of` goes by experts and length
only; take 405B's with --xla_flags=dense_long. No recipe trains a mixture of experts on long sequences.

**How they get there.** Those of a program go with each compilation, and differ between programs of one process:

    jax.jit(step).lower(*args).compile(compiler_options=compiler_options(flags))

Those of the chip go where libtpu reads them once, before jax is imported:

    LIBTPU_INIT_ARGS="--xla_tpu_dvfs_p_state=7" python train.py

The recipes pass all of theirs that way, `init_args(flags, everything=True)` here. libtpu ends the process over a flag
that it does not know, and passes over one without dashes in silence (tried: 0.0.42 and 0.0.50).

**Left out** are the flags that only have a name (UNEXPLAINED), among them `xla_tpu_bf16_emission_mode`, in 19 of the
recipes; `xla_tpu_enable_multi_compute_overlap_in_layer_scheduler`, false for DeepSeek-V3, true for gpt-oss;
`xla_tpu_data_parallel_opt_different_sized_ops`, in one recipe and already the default; those of the video model Wan;
and `xla_sc_enable_instruction_fusion` and `xla_sc_disjoint_spmem`, which MaxText has in its SparseCore group and no
recipe for TPU7x sets (the second is no compiler option at all). TPU_MEGACORE=MEGACORE_DENSE is for chips whose two
cores are one device, v4 and v5p: those of TPU7x are two. All flags can be given as name=value. What
some are worth by the compiled schedule is in CASES.md; none was measured here.
"""

import dataclasses
import difflib
import json
import os
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
    "dense_short": "dense models on short sequences, as Llama 3.1 70B at 8192",
    "dense_long": "dense models on long sequences, as Llama 3.1 70B at 131,072; also 405B at 8192",
    "moe": "mixtures of experts, as DeepSeek-V3 and gpt-oss 120B",
    "host_offload": "activations in the host's memory, as Qwen3 235B",
}

# Of the recipes: values are theirs, and no source that we know says what they do.
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

# What libtpu has to hear to describe and compile for TPU7x where there is no TPU, before jax is imported.
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # it looks for no TPU
    "TPU_ACCELERATOR_TYPE": "tpu7x-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes at once
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


@dataclass(frozen=True)
class Flag:
    name: str  # without dashes
    value: str
    default: str  # libtpu's own; "auto" depends on the chip and the program, "-1" is unset
    workloads: tuple[str, ...]  # of WORKLOADS, or "all"; none, where it depends on more than that
    group: str
    meaning: str
    source: str  # who sets it; MEANT_BY says who explains its group
    passed: str = "compile"  # with each compilation; or only at the "start", in LIBTPU_INIT_ARGS

    def is_for(self, workload: str) -> bool:
        return workload in self.workloads or "all" in self.workloads


MEANT_BY = {
    "scoped VMEM": "Google Cloud's guide; MaxText's benchmarks/xla_flags_library.py",
    "SparseCore offload": "MaxText's benchmarks/xla_flags_library.py, ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR",
    "continuation fusion": "MaxText's benchmarks/xla_flags_library.py, CF_FOR_ALL_GATHER",
    "latency hiding": "libtpu's message without the aggregator; MaxText's benchmark_and_performance.md",
    "host offload": "MaxText's benchmarks/xla_flags_library.py, HOST_OFFLOAD_FLAGS",
    "sums over three axes": "the programs that are compiled in tests/test_aot.py",
    "clock": "third-party logs of TPU7x runs; MaxText's benchmark_and_performance.md sets it",
}

# Recipes are folders of tpu-recipes/training/ironwood.
_70B = "llama3.1-70b/8k-bf16-tpu7x-4x4x4"
_70B_LONG = "llama3.1-70b/128k-bf16-tpu7x-4x8x8"
_LONG_MOE = f"{_70B_LONG}, deepseek3-671b/4k-bf16-tpu7x-4x8x8"
_MOE = "deepseek3-671b/4k-bf16-tpu7x-4x8x8, gpt-oss-120b/8k-bf16-tpu7x-4x4x4"
_QWEN = "qwen3-235b-a22b/4k-bf16-tpu7x-4x8x8"
_ONE_OF_GROUP = "One of the group that MaxText recommends with host offload; nothing more is said of it."


def _offload(name: str, value: str, default: str, meaning: str = _ONE_OF_GROUP) -> Flag:
    return Flag(name, value, default, ("host_offload",), "host offload", meaning, _QWEN)


def _on_sparse_cores(collective: str, workloads: tuple[str, ...], source: str) -> Flag:
    name, hyphened = f"xla_tpu_enable_sparse_core_collective_offload_{collective}", collective.replace("_", "-")
    meaning = f"The SparseCores run {hyphened}s while the TensorCore computes; the default on TPU7x."
    return Flag(name, "true", "auto", workloads, "SparseCore offload", meaning, source)


PADS_SUMS = "xla_tpu_enable_sparse_core_reduce_scatter_padding"
TABLE = (
    Flag(
        "xla_tpu_scoped_vmem_limit_kib",
        "61440",
        "-1",
        ("dense_short", "host_offload"),
        "scoped VMEM",
        "KiB of VMEM for the operation that runs (default 32 MiB); 60 MiB leave 4 for prefetching the next.",
        f"{_70B}, {_QWEN}",
    ),
    Flag(
        "xla_tpu_scoped_vmem_limit_kib",
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
        "One of the base flags that MaxText sets with every SparseCore offload; nothing more is said of it.",
        _LONG_MOE,
    ),
    Flag(
        "xla_sc_disable_megacore_partitioning",
        "true",
        "false",
        ("dense_long", "moe"),
        "SparseCore offload",
        "One of the base flags that MaxText sets with every SparseCore offload; nothing more is said of it.",
        _LONG_MOE,
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "false",
        "auto",
        ("dense_long", "moe"),
        "continuation fusion",
        "No continuation fusion of all-gathers: the SparseCores have them, and only one of the two can.",
        _LONG_MOE,
    ),
    Flag(
        "xla_enable_async_all_gather",
        "true",
        "auto",
        ("dense_long", "moe"),
        "continuation fusion",
        "An all-gather has a start and an end, with other work in between.",
        _LONG_MOE,
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_aggregator",
        "true",
        "auto",
        ("moe",),
        "latency hiding",
        "What the layer scheduler requires: without it the compiler ends with an error that says so.",
        _MOE,
    ),
    Flag(
        "xla_tpu_enable_latency_hiding_layer_scheduler",
        "true",
        "auto",
        ("moe",),
        "latency hiding",
        "Schedules collectives of a layer so that computation overlaps with them.",
        _MOE,
    ),
    Flag(
        "xla_tpu_enable_layer_scheduler_for_dependent_collectives",
        "true",
        "auto",
        ("moe",),
        "latency hiding",
        "Set with the layer scheduler wherever that is set; nothing more is said of it.",
        _MOE,
    ),
    Flag(
        "xla_tpu_scheduler_percent_shared_memory_limit",
        "150",
        "95",
        ("moe",),
        "latency hiding",
        "Set with the layer scheduler wherever that is set; nothing more is said of it.",
        _MOE,
    ),
    _offload("xla_tpu_scheduler_percent_shared_memory_limit", "100", "95"),
    Flag(
        "xla_tpu_aggressive_opt_barrier_removal",
        "true",
        "false",
        ("moe",),
        "host offload",
        _ONE_OF_GROUP,
        _MOE,
    ),
    _offload("xla_tpu_aggressive_opt_barrier_removal", "ENABLED", "false"),
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
        "sums over three axes",
        "A reduce-scatter over three whole axes takes all six ways at once, though its parts are not cut in thirds.",
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
    """{name: value} of the table's flags for a workload. Raises ValueError for one that is not of WORKLOADS."""
    if workload not in WORKLOADS:
        raise ValueError(f"there is no workload {workload!r}{inputs.did_you_mean(workload, WORKLOADS)}")
    return {flag.name: flag.value for flag in TABLE if flag.is_for(workload)}


def workload_of(config: Config) -> str:
    """Which of WORKLOADS a run is, by its experts and the length of its sequences. Host offload is to be asked for."""
    if config.num_experts:
        return "moe"
    return "dense_long" if config.seq_len >= LONG else "dense_short"


def parse(text: str, workload: str) -> dict[str, str]:
    """{name: value} of what stands behind --xla_flags=, for a run of this workload.

    "none" or nothing: no flags. Otherwise a list with commas, later entries over earlier ones, each of them
    "recommended", the name of another workload, or name=value with or without leading dashes. A name that is not in the
    table passes if it begins with xla_ and is not a slip of the pen for one that is; `unknown` tells which did.

    Raises:
      ValueError: an entry that is none of these, with the nearest that is.
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
            flags[name] = value
        elif name == "recommended" or name in WORKLOADS:
            flags |= recommended(workload if name == "recommended" else name)
        elif name == "none":
            raise ValueError("--xla_flags: none stands alone; leave it out, or all else")
        else:
            known = ["recommended", "none", *WORKLOADS, *_known()]
            if name in known or name.startswith("xla_"):
                raise ValueError(f"--xla_flags: {name} needs a value, as in {name}=true")
            near = inputs.did_you_mean(name, known, otherwise=_ENTRIES)
            raise ValueError(f"--xla_flags: there is no {name!r}{near}")
    return flags


def for_run(config: Config) -> dict[str, str]:
    """Those of a run. Raises ValueError, as `parse`."""
    return parse(config.xla_flags, workload_of(config))


def set_init_args(flags: Mapping[str, str]) -> None:
    """Adds what libtpu reads at its start to LIBTPU_INIT_ARGS. Before jax is imported."""
    if at_start := init_args(flags):
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {at_start}".strip()


def has_tpu() -> bool:
    """Whether this machine has one, and JAX may use it."""
    return "tpu" in os.environ.get("JAX_PLATFORMS", "tpu") and bool(glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"))


def without_tpu() -> None:
    """Has libtpu describe and compile for TPU7x where there is none. Before jax is imported."""
    for name, value in WITHOUT_TPU.items():
        os.environ.setdefault(name, value)


def unknown(flags: Mapping[str, str]) -> list[str]:
    """Names of which the table says nothing: given by hand, for the compiler to accept or to refuse."""
    return [name for name in flags if name not in {flag.name for flag in TABLE}]


def compiler_options(flags: Mapping[str, str]) -> dict[str, str]:
    """Those that go with a compilation: jit(...).lower(...).compile(compiler_options=...)."""
    return {name: value for name, value in flags.items() if name not in _AT_START}


def init_args(flags: Mapping[str, str], *, everything: bool = False) -> str:
    """LIBTPU_INIT_ARGS with those that must be there at the start, or with everything, as the recipes have it."""
    return " ".join(f"--{name}={value}" for name, value in flags.items() if everything or name in _AT_START)


def _known() -> list[str]:
    return [*dict.fromkeys(flag.name for flag in TABLE), *UNEXPLAINED]


def _check_name(name: str) -> None:
    """Raises ValueError for a name that no flag has, or that differs from one in the table by a letter or two."""
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
        if differing < 2.5:  # letters that are in one of the two only: a wrong one counts twice
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
        print(f"\n{group}, explained by {MEANT_BY[group]}")
        members = [flag for flag in flags if flag.group == group]
        for lines, alike in groupby(
            members, lambda f: (f.meaning, f"For {', '.join(f.workloads) or 'no workload as such'}. Set in {f.source}.")
        ):
            print()
            for flag in alike:
                where = "LIBTPU_INIT_ARGS" if flag.passed == "start" else "compiler_options"
                print(f"  {f'{flag.name}={flag.value}':74} default {flag.default:6}  {where}")
            for line in lines:
                print(textwrap.fill(line, 120, initial_indent=" " * 6, subsequent_indent=" " * 6))


if __name__ == "__main__":
    command.run(main)
