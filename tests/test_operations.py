"""Tests of compiled/operations.py: cycles of XLA's operations, held against the compiler's own simulation of them."""

import fcntl
import json
import os
import subprocess
import sys

import pytest
from support import BRANCH, FULL_EFFORT, listing

import command
import compiler_flags
import hardware
from compiled import bundles, operations
from compiled.hlo import parse

# -- a dump by hand

HLO = """HloModule m, is_scheduled=true

%fused (q: f32[8]) -> f32[8] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %n = f32[8]{{0}} negate(%q)
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %a = f32[8]{{0}} fusion(%p), calls=%fused, backend_config={{"window_config":{{"estimated_cycles":"{a}"}}}}
  ROOT %b = f32[8]{{0}} fusion(%a), calls=%fused, backend_config={{"window_config":{{"estimated_cycles":"{a}"}}}}
}}
"""
LOOPS = """$region0: #{a}
  loop: start=0, step=1, limit=5
  $region3: #{a} parent=1 // loop_body
"""


def dump(folder, name: str, *program: str, loops: str = LOOPS) -> None:
    for label, text in ((bundles.PASSES["schedule"], listing(*program)), (bundles.PASSES["loops"], loops)):
        (folder / f"17-{name}-59-{label}.txt").write_text(text)


LOOP = [""] * 20  # the loop is bundles 2 to 18
LOOP[2], LOOP[12] = "/* Start region 3 */", BRANCH.format(2)


@pytest.mark.parametrize("estimate, counted", [(1000, 3 + 5 * 17), (50, 50)])
def test_a_loop_counts_once_an_iteration_and_the_estimate_is_the_limit(tmp_path, estimate, counted):
    dump(tmp_path, "a", *LOOP)
    (tmp_path / "17-a-60-another-pass.txt").write_text("")
    cycles = operations.count(tmp_path, parse(HLO.format(a=estimate)))
    assert cycles == {"a": counted, "b": counted}  # b has no dump, as it equals a
    assert not [*tmp_path.iterdir()]


def test_a_loop_of_unknown_trips_and_an_operation_without_a_dump_are_not_counted(tmp_path):
    dump(tmp_path, "a", *LOOP, loops="")
    assert operations.count(tmp_path, parse(HLO.format(a=1000))) == {}
    assert operations.count(tmp_path, parse(HLO.format(a=1000))) == {}


def test_the_flags_of_a_dump_are_added_and_removed(monkeypatch):
    for before in (None, "--xla_tpu_use_a=1"):
        monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
        if before:
            monkeypatch.setenv("LIBTPU_INIT_ARGS", before)
        with operations.dumped() as folder:
            flags = os.environ["LIBTPU_INIT_ARGS"]
            assert flags.startswith(before or "--xla_jf_dump_to=") and f"--xla_jf_dump_to={folder} " in flags
        assert os.environ.get("LIBTPU_INIT_ARGS") == before and not folder.exists()


# -- compiled

# Compiles operations, and prints for each: counted cycles, XLA's estimate, and cycles of 1.9 GHz that its bytes take.
CHILD = """
import json
from compiled import hlo, operations
from compiled.schedule import TPU7X, Walk

with operations.dumped() as folder:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    device = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[0]
    array = lambda *dims, dtype="bfloat16": jax.ShapeDtypeStruct(dims, dtype, sharding=SingleDeviceSharding(device))
    x = array(8192, 4096)
    swiglu = lambda a, b: (jax.nn.silu(a.astype("float32")) * b).astype("bfloat16")
    functions = {
        "negate": (lambda a: -a, x),
        "swiglu": (swiglu, x, x),
        "exp_sin": (lambda a: jnp.exp(jnp.sin(a)), array(8192, 4096, dtype="float32")),
        "matmul": (jnp.matmul, x, array(4096, 8192)),
        "large_matmul": (jnp.matmul, array(16384, 8192), array(8192, 8192)),
        "twice": (lambda a, b: (-a, -b), x, x),
    }
    found = {}
    vmem = {"large_matmul": {"xla_tpu_scoped_vmem_limit_kib": "61440"}}
    for name, (function, *arrays) in functions.items():
        compiled = jax.jit(function).lower(*arrays).compile(compiler_options=vmem.get(name))
        program = hlo.parse(compiled.as_text())
        cycles = operations.count(folder, program)
        walk, found[name] = Walk(program, TPU7X, {}, {}, ()), []
        for operation in program.computations[program.entry].values():
            if operation.cycles:
                nbytes = walk.hbm_bytes(operation, walk.operand_shapes(program.entry, operation))
                in_hbm = nbytes / TPU7X.hbm_bytes_per_s * TPU7X.clock_hz
                found[name].append([cycles.get(operation.name), operation.cycles, in_hbm])
        assert not list(folder.iterdir())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(shared_folder):
    """{function: [(counted, estimate, cycles of its bytes) for each operation]} of the child, which runs once."""
    with open(shared_folder / "operations.json", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not os.path.getsize(file.name):
            line = [sys.executable, "-c", CHILD]
            environment = os.environ | compiler_flags.WITHOUT_TPU | {"PYTHONPATH": str(command.ROOT)} | FULL_EFFORT
            done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=600)
            assert done.returncode == 0, done.stderr[-2000:]
            file.write(done.stdout.splitlines()[-1])
        file.seek(0)
        return json.load(file)


# By libtpu 0.0.50.1, with --xla_jf_dump_static_llo_profile_to; the simulation of 0.0.42.1 crashes.
SIMULATED = {"negate": 26_334, "swiglu": 86_649, "exp_sin": 849_509, "matmul": 1_102_973}


@pytest.mark.slow
def test_counted_cycles_are_those_of_the_compilers_simulation(compiled):
    """That skips branches which are counted, and waits for memory in some operations."""
    for name, cycles in SIMULATED.items():
        ((counted, _, in_hbm),) = compiled[name]
        assert 0.93 * counted < cycles < 1.05 * max(counted, in_hbm), name


@pytest.mark.slow
def test_estimates_are_right_for_matmuls_and_too_high_for_all_else(compiled):
    ((counted, estimate, _),) = compiled["matmul"]
    peak = 8192 * 4096 * 8192 * 2 / 524288  # cycles of both matrix units
    assert peak < 0.9 * estimate < counted <= estimate
    for name in ("negate", "swiglu", "exp_sin"):
        ((counted, estimate, in_hbm),) = compiled[name]
        assert max(counted, in_hbm) < 0.8 * estimate


# TFLOP/s of a device, measured: tpu-recipes, and github.com/yangwhale/gpu-tpu-pedia at 3fa9ce1, tpu/v7_perf.
@pytest.mark.slow
@pytest.mark.parametrize("p_state, measured", [(3, 0.829 * 1153.5), (7, 0.965 * 1153.5)])
def test_a_large_matmul_takes_the_time_that_hardware_takes(compiled, p_state, measured):
    ((counted, *_),) = compiled["large_matmul"]
    hertz = hardware.chip_of(f"tpu7x+p_state={p_state}").running_hz
    assert 2 * 16384 * 8192 * 8192 / counted * hertz / 1e12 == pytest.approx(measured, rel=0.02)


@pytest.mark.slow
def test_equal_operations_have_the_cycles_of_the_one_that_is_dumped(compiled):
    first, second = compiled["twice"]
    assert first[0] == second[0] == compiled["negate"][0][0]
