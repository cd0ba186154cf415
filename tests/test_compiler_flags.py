"""Tests of compiler_flags.py: the table, the command line, and that the TPU7x compiler accepts the flags."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import command
import compiler_flags
from compiler_flags import TABLE, UNEXPLAINED, WORKLOADS, compiler_options, init_args, parse, recommended, unknown
from flags import PRESETS, from_preset

VMEM = "xla_tpu_scoped_vmem_limit_kib"
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
CLOCK = "xla_tpu_dvfs_p_state"
SCHEDULER = "xla_tpu_enable_latency_hiding_layer_scheduler"

# -- the table


def test_every_flag_is_explained():
    for_none = compiler_flags.PADS_SUMS, "xla_tpu_aggressive_opt_barrier_removal"
    for flag in TABLE:
        assert re.fullmatch(r"xla_[a-z0-9_]+", flag.name)
        assert flag.value and flag.default and flag.source and flag.passed in ("compile", "start")
        assert flag.meaning.endswith(".") and flag.meaning.rstrip(".").count(". ") <= 1
        assert {*flag.workloads} <= {"all", *WORKLOADS} and (flag.workloads or flag.name in for_none)
    assert {flag.group for flag in TABLE} == set(compiler_flags.EXPLAINED_BY)


def test_no_flag_has_two_values_for_a_workload():
    for workload in WORKLOADS:
        names = [flag.name for flag in TABLE if flag.is_for(workload)]
        assert len(names) == len(set(names)) and names
    assert len({(flag.name, flag.value) for flag in TABLE}) == len(TABLE)
    assert len(set(UNEXPLAINED)) == len(UNEXPLAINED)
    assert not {flag.name for flag in TABLE} & set(UNEXPLAINED)


def test_recommended_flags_of_a_workload():
    assert recommended("dense_short") == {VMEM: "61440", OFFLOAD + "all_reduce": "true", CLOCK: "7"}
    assert recommended("moe")[VMEM] == "65536" and SCHEDULER in recommended("moe")
    assert recommended("host_offload")["xla_tpu_host_transfer_overlap_limit"] == "24"
    assert list(map(len, map(recommended, WORKLOADS))) == [3, 9, 13, 13]
    with pytest.raises(ValueError, match="there is no workload 'dense_shrt'; did you mean dense_short"):
        recommended("dense_shrt")


def test_the_workload_of_a_run():
    mixtures = "tiny-moe mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b deepseek-v2-lite deepseek-v3 gpt-oss-20b"
    expected = dict.fromkeys([*mixtures.split(), "gpt-oss-120b", "gemma4-26b-a4b"], "moe")
    for preset in PRESETS:
        assert compiler_flags.workload_of(from_preset(preset)) == expected.get(preset, "dense_short")
    for seq_len, workload in {32_767: "dense_short", 32_768: "dense_long", 131_072: "dense_long"}.items():
        assert compiler_flags.workload_of(from_preset("llama3.1-70b", seq_len=seq_len)) == workload
    assert compiler_flags.workload_of(from_preset("deepseek-v3", seq_len=131_072)) == "moe"


# -- the command line


@pytest.mark.parametrize(
    "text, flags",
    [
        ("", {}),
        ("none", {}),
        ("recommended", recommended("moe")),
        ("host_offload", recommended("host_offload")),
        ("dense_short,recommended", recommended("dense_short") | recommended("moe")),
        (f"{VMEM}=32768", {VMEM: "32768"}),
        (f"--{VMEM}=32768, --{SCHEDULER}=false", {VMEM: "32768", SCHEDULER: "false"}),
        (f"recommended,{VMEM}=98304", recommended("moe") | {VMEM: "98304"}),
        (f"{VMEM}=98304,recommended", recommended("moe")),
        (f"{VMEM}=1,{VMEM}=2", {VMEM: "2"}),
        ("xla_tpu_bf16_emission_mode=NATIVE_EMISSION", {"xla_tpu_bf16_emission_mode": "NATIVE_EMISSION"}),
        ("xla_tpu_enable_sdc_checker=true", {"xla_tpu_enable_sdc_checker": "true"}),
    ],
)
def test_the_value_of_xla_flags_is_parsed(text, flags):
    assert parse(text, "moe") == flags


@pytest.mark.parametrize(
    "text, way_out",
    [
        ("recomended", "there is no 'recomended'; did you mean recommended?"),
        ("dense_lng", "did you mean dense_long?"),
        ("yes", "there is no 'yes'; there are recommended, none, dense_short, .*, name=value"),
        ("recommended,none", "none must be the only entry"),
        (f"{VMEM}=64MiB", f"{VMEM} must be a number of KiB, or -1 for the default; got '64MiB'"),
        ("recommended,", "there is no ''"),
        (VMEM, f"{VMEM} needs a value, as in {VMEM}=true"),
        (f"{VMEM}=", f"{VMEM} needs a value"),
        ("xla_something_new", "xla_something_new needs a value"),
        ("xla_tpu_scoped_vmem_limit_kb=1", f"no flag 'xla_tpu_scoped_vmem_limit_kb'; did you mean {VMEM}?"),
        ("--xla_tpu_scoped_vmen_limit_kib=1", f"did you mean {VMEM}?"),
        ("xla_tpu_dvfs_pstate=7", f"did you mean {CLOCK}?"),
        ("tpu_scoped_vmem_limit_kib=1", f"must begin with xla_; did you mean {VMEM}?"),
        ("colour=blue", "'colour' must begin with xla_; there are recommended, .*"),
        ("=1", "'' must begin with xla_"),
    ],
)
def test_an_error_names_the_way_out(text, way_out):
    with pytest.raises(ValueError, match=way_out):
        parse(text, "dense_short")


def test_every_name_that_recipes_use_is_accepted():
    for name in [*UNEXPLAINED, *(flag.name for flag in TABLE)]:
        assert parse(f"{name}=1", "moe") == {name: "1"}


def test_unknown_lists_the_names_outside_the_table():
    assert unknown(parse("recommended,xla_tpu_enable_sdc_checker=true,xla_tpu_rwb_fusion=false", "dense_short")) == [
        "xla_tpu_enable_sdc_checker",
        "xla_tpu_rwb_fusion",
    ]
    assert unknown(recommended("moe")) == []


def test_every_flag_is_passed_in_one_way():
    flags = recommended("dense_short") | {"xla_tpu_enable_sdc_checker": "true"}
    assert init_args(flags) == f"--{CLOCK}=7"
    assert compiler_options(flags) == {name: value for name, value in flags.items() if name != CLOCK}
    assert init_args(flags, everything=True) == " ".join(f"--{name}={value}" for name, value in flags.items())
    assert init_args({}) == "" and compiler_options({}) == {}


# -- what is printed


@pytest.mark.parametrize("workload", ["all", *WORKLOADS])
def test_the_table_is_printed(workload, capsys):
    compiler_flags.main([f"--workload={workload}"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    compiler_flags.main([f"--workload={workload}", "--json"])
    flags = json.loads(capsys.readouterr().out)
    assert all(f"{flag['name']}={flag['value']} " in text and flag["default"] in text for flag in flags)
    assert len(flags) == (len(TABLE) if workload == "all" else len(recommended(workload)))


def test_a_workload_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.run(compiler_flags.main, ["--workload=mo"])
    assert "there is no 'mo'; did you mean moe?" in capsys.readouterr().err


# -- the TPU7x compiler


@cache
def lowered(operation: str):
    """A sum, or one collective, lowered for eight devices of TPU7x."""
    mesh = Mesh(topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices, ("x",))
    function = {
        "sum": jnp.sum,
        "all_gather": lambda x: jnp.sin(lax.all_gather(x, "x", tiled=True)),
        "reduce_scatter": lambda x: lax.psum_scatter(jnp.sin(x), "x", tiled=True),
        "all_reduce": lambda x: lax.psum(jnp.sin(x), "x"),
    }[operation]
    if operation != "sum":
        function = jax.shard_map(
            function, mesh=mesh, in_specs=P("x"), out_specs=P() if operation == "all_reduce" else P("x")
        )
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    return jax.jit(function).trace(x).lower(lowering_platforms=("tpu",))


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_compiler_accepts_the_flags_of_a_workload(workload):
    flags = recommended(workload)
    lowered("sum").compile(compiler_options=compiler_options(flags))
    lowered("sum").compile(compiler_options=flags)  # with the flags for the start


def test_the_compiler_refuses_an_unknown_flag():
    """Otherwise it would mean nothing that it accepts the others."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_sc_disjoint_spmem'"):
        lowered("sum").compile(compiler_options={"xla_sc_disjoint_spmem": "false"})
    with pytest.raises(jax.errors.JaxRuntimeError):
        lowered("sum").compile(compiler_options={VMEM: "much"})


def test_the_layer_scheduler_needs_the_aggregator():
    with pytest.raises(jax.errors.JaxRuntimeError, match="requires sparse core collective aggregator"):
        lowered("sum").compile(compiler_options={SCHEDULER: "true"})


def test_defaults_are_the_compilers(tmp_path):
    lowered("sum").compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (dumped,) = tmp_path.glob("*.flagfile")
    defaults = dict(line.removeprefix("--").partition("=")[::2] for line in dumped.read_text().splitlines())
    assert len(defaults) > 1300
    for flag in TABLE:
        assert flag.default == defaults[flag.name].strip("'")
    assert defaults["xla_tpu_data_parallel_opt_different_sized_ops"] == "true"


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_sparse_cores_run_collectives_by_default(collective):
    """The flag does not change the program; its opposite does."""
    compiled = lambda **flags: lowered(collective).compile(compiler_options=flags).as_text()
    by_default = compiled()
    assert 'execution_thread="sparsecore"' in by_default
    assert compiled(**{OFFLOAD + collective: "true"}) == by_default
    assert 'execution_thread="sparsecore"' not in compiled(**{OFFLOAD + collective: "false"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "args, error",
    [
        (init_args({flag.name: flag.value for flag in TABLE}), None),
        *((init_args(recommended(workload), everything=True), None) for workload in ("moe", "host_offload")),
        ("--xla_tpu_no_such_flag=true", "Unknown command line flag 'xla_tpu_no_such_flag'"),
        (f"--{CLOCK}=fast", "Illegal value 'fast'"),
        ("xla_tpu_no_such_flag=true", None),  # without dashes: silently ignored
    ],
    ids=["start", "all of moe", "all of host_offload", "unknown", "wrong value", "no dashes"],
)
def test_libtpu_starts_with_the_flags(args, error):
    source = (
        "from jax.experimental import topologies\n"
        "print(len(topologies.get_topology_desc(platform='tpu', topology_name='tpu7x:2x2x1').devices))"
    )
    env = {**os.environ, "LIBTPU_INIT_ARGS": args}
    folder = Path(compiler_flags.__file__).parent
    done = subprocess.run([sys.executable, "-c", source], env=env, cwd=folder, capture_output=True, text=True)
    if error is None:
        assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
    else:
        assert done.returncode != 0 and error in done.stderr


def test_without_tpu_keeps_variables_that_are_set(monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-8")
    monkeypatch.setattr("os.environ", {**os.environ})
    del os.environ["TPU_SKIP_MDS_QUERY"]
    compiler_flags.without_tpu()
    assert os.environ["TPU_ACCELERATOR_TYPE"] == "v6e-8" and os.environ["TPU_SKIP_MDS_QUERY"] == "1"


def test_init_args_are_added_to_those_that_are_set(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_use_a=1")
    compiler_flags.set_init_args({})
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_tpu_use_a=1"
    flags = compiler_flags.for_run(from_preset("llama3.1-8b", xla_flags="recommended,xla_tpu_dvfs_p_state=7"))
    assert flags == compiler_flags.recommended("dense_short") | {"xla_tpu_dvfs_p_state": "7"}
    compiler_flags.set_init_args(flags)
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_tpu_use_a=1 --xla_tpu_dvfs_p_state=7"
