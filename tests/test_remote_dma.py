"""The ring collectives: simulated with a race detector, broken to test the detector, and compiled for TPU7x."""

import functools
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, PartitionSpec
from support import compiled_on_ring, equations, ring_of, tpu7x_ring

import remote_dma
from remote_dma import ring_all_gather, ring_reduce_scatter

ROOT = Path(remote_dma.__file__).parent
RING = PartitionSpec("ring")
MODES = ("eager", "on_wait")  # a copy happens when it is started, or when it is waited for
SMALL_TILE = (32, 128)

# The simulator of jax 0.10 hangs if an array is larger than 100 KB and all devices are busy. So arrays are small on
# rings of all 8 devices, and have any size on smaller rings.


def run(f, x, n, mesh=None, spec=RING):
    # check_vma=False: jax's simulator fails the check ("Primitive add requires varying manual axes to match").
    mapped = jax.shard_map(f, mesh=mesh or ring_of(n), in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(x))


def simulated(mode="eager"):
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)


@pytest.fixture(autouse=True)
def nothing_is_printed(capsys):
    """jax 0.10 prints races, and semaphores that are not zero at the end; later versions raise an error for races."""
    yield
    assert capsys.readouterr().out == ""


def values(shape, dtype):
    return jnp.asarray(10 * np.random.default_rng(0).standard_normal(shape), dtype)


def check_both(n, block, dtype, mode):
    """Compares both collectives with XLA's on n devices, each of which has or gets one block."""
    rows, *rest = block
    x = values((n * rows, *rest), dtype)
    gathered = run(lambda x: ring_all_gather(x, "ring", interpret=simulated(mode)), x, n)
    np.testing.assert_array_equal(gathered, run(lambda x: lax.all_gather(x, "ring", tiled=True), x, n))
    x = values((n * n * rows, *rest), dtype)
    scattered = run(lambda x: ring_reduce_scatter(x, "ring", interpret=simulated(mode)), x, n)
    expected = run(lambda x: lax.psum_scatter(x, "ring", tiled=True), x, n)
    if jnp.issubdtype(dtype, jnp.integer):
        np.testing.assert_array_equal(scattered, expected)
    else:  # at most n roundings of sums of at most 10 * n * 4
        error = np.abs(scattered.astype(np.float32) - expected.astype(np.float32)).max()
        assert error <= n * 40 * n * jnp.finfo(dtype).eps / 2


# -- equal to XLA's


@pytest.mark.at_most(4)
@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 5, 8))])
def test_equal_to_xla_on_every_ring(n, mode):
    check_both(n, (16, 128), jnp.float32, mode)


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "n, dtype", [(2, "float32"), (2, "int8"), (3, "bfloat16"), (4, "int8"), (5, "float32"), (8, "bfloat16")]
)
def test_equal_to_xla_for_every_shape(n, dtype, monkeypatch):
    """The shapes are one element, blocks smaller than a register, and several tiles of which the last is smaller."""
    monkeypatch.setattr(remote_dma, "TILE", SMALL_TILE)
    shapes = {(1,): "eager", (3, 5, 7): "on_wait", (80, 100): "eager"}
    for block, mode in shapes.items():
        if n < 8 or math.prod(block) < 1000:
            check_both(n, block, dtype, mode)


@pytest.mark.slow
def test_equal_to_xla_with_tiles_as_on_a_tpu():
    """A block is two halves of six tiles, of which the last are smaller in both dims."""
    tile_rows, tile_cols = remote_dma.TILE
    check_both(2, (4 * tile_rows + 16, tile_cols + 128), jnp.float32, "eager")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_sums_in_the_order_of_the_docstring(dtype):
    """Equal in every bit: farthest first, from behind, from ahead, then the own part; the last two sums round once."""
    n, wide = 5, np.float32
    x = values((n, n, 8, 128), dtype)
    parts = np.asarray(x)

    def travelling(owner, hops, to):
        total = parts[(owner - to * hops) % n, owner]
        for left in reversed(range(1, hops)):
            total = (total.astype(wide) + parts[(owner - to * left) % n, owner].astype(wide)).astype(total.dtype)
        return total.astype(wide)

    expected = [
        (travelling(d, n // 2, +1) + travelling(d, (n - 1) // 2, -1) + parts[d, d].astype(wide)).astype(parts.dtype)
        for d in range(n)
    ]
    scatter = lambda x: ring_reduce_scatter(x, "ring", interpret=simulated())
    np.testing.assert_array_equal(run(scatter, x.reshape(n * n * 8, 128), n), np.concatenate(expected))


def test_rings_of_a_mesh_with_two_axes():
    """Gathers over one axis, then over the other: a device writes only to its neighbours on that axis.

    In the ring of four, blocks are passed on.
    """
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = values((8 * 4, 128), jnp.float32)

    def gather(collective):
        return lambda x: collective(collective(x, "b"), "a")

    spec = PartitionSpec(("a", "b"))
    ours = run(gather(functools.partial(ring_all_gather, interpret=simulated())), x, 8, mesh, spec)
    np.testing.assert_array_equal(ours, run(gather(functools.partial(lax.all_gather, tiled=True)), x, 8, mesh, spec))


# -- gradients, types, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours, theirs",
    [(ring_all_gather, lax.all_gather), (ring_reduce_scatter, lax.psum_scatter)],
)
def test_each_is_the_transpose_of_the_other(ours, theirs):
    n = 3
    x = values((n * n * 8, 128), jnp.float32)
    pull_back = lambda f, x: jax.vjp(f, x)[1](jnp.cos(f(x)))[0]
    got = run(lambda x: pull_back(lambda x: ours(x, "ring", interpret=simulated()), x), x, n)
    expected = run(lambda x: pull_back(lambda x: theirs(x, "ring", tiled=True), x), x, n)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("collective", [ring_all_gather, ring_reduce_scatter])
@pytest.mark.parametrize("given", [RING, PartitionSpec()])
def test_types_vary_over_the_ring(collective, given):
    """With the varying-axes check, results vary over the ring, and a gradient varies as its argument does."""

    def loss(x):
        y = collective(x, "ring")
        assert jax.typeof(y).mat.varying == {"ring"}
        return lax.psum((y * y).sum(), "ring")

    mesh = ring_of(4)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    gradient = jax.eval_shape(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=given, out_specs=given), x)
    assert gradient.shape == x.shape


def test_errors():
    def shapes(f, shape, n=4):
        spec = RING if shape else PartitionSpec()
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.eval_shape(jax.shard_map(f, mesh=ring_of(n), in_specs=spec, out_specs=RING), x)

    assert shapes(lambda x: ring_reduce_scatter(x, "ring"), (32, 3)).shape == (8, 3)
    with pytest.raises(ValueError, match=r"dim 0 of \(10, 3\) is not a multiple of the 4 devices .* pad it to 12"):
        shapes(lambda x: ring_reduce_scatter(x, "ring"), (40, 3))
    for collective in (ring_all_gather, ring_reduce_scatter):
        with pytest.raises(ValueError, match=r"there is no axis 'rings' here: the jax.shard_map has ring"):
            shapes(lambda x, f=collective: f(x, "rings"), (32, 3))
        with pytest.raises(ValueError, match=r"no axis 'ring' here: .* missing"):
            collective(jnp.ones((8, 128)), "ring")
        for empty in ((), (32, 0)):
            with pytest.raises(ValueError, match=r"nothing to move in an array of shape \("):
                shapes(lambda x, f=collective: f(x, "ring"), empty)


# -- operations of the kernels, in the jaxpr


def kernel_of(collective, n, shape):
    mapped = jax.shard_map(lambda x: collective(x, "ring"), mesh=ring_of(n), in_specs=RING, out_specs=RING)
    jaxpr = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct(shape, jnp.float32)).jaxpr
    (call,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call")
    return call.params["jaxpr"]


def order_of(kernel) -> str:
    """The operations in program order: signal !, wait for one ?, start of a copy s, wait for either end of one w."""
    letters = {"semaphore_signal": "!", "semaphore_wait": "?", "dma_start": "s", "dma_wait": "w"}
    return "".join(letters.get(eqn.primitive.name, "") for eqn in equations(kernel))


def test_all_gather_sends_in_both_directions_at_once_after_a_barrier():
    """The own copy, the barrier, then N//2 steps. Both transfers start before the waits for both ends of each."""
    for n in (2, 3, 8):
        order = order_of(kernel_of(ring_all_gather, n, (n * 8, 128)))
        both, one = (n - 1) // 2, n // 2 - (n - 1) // 2
        assert order == "s" + "!!?" + "sswwww" * both + "sww" * one + "w"


def test_reduce_scatter_starts_in_both_directions_after_a_barrier():
    order = order_of(kernel_of(ring_reduce_scatter, 8, (8 * 8 * 64, 1024)))
    assert order.startswith("!!?" + "ssss")  # two halves, each in both directions


@pytest.mark.parametrize("rows, cols", [(8, 128), (8, 2**24), (2**24, 128), (2**16, 2**13)])
def test_vmem_is_bounded_for_any_size(rows, cols):
    kernel = kernel_of(ring_reduce_scatter, 4, (16 * rows, cols))
    in_vmem = [var.aval for var in kernel.invars if "vmem" in str(var.aval)]
    assert len(in_vmem) == 1
    assert 0 < math.prod(in_vmem[0].shape) * 4 <= 8 * 2**20
    assert math.prod(in_vmem[0].shape) * 4 >= min(8 * 2**20, 4 * 4 * rows * cols) / 2  # and it is used


# -- the detector finds planted errors


def simulate_broken(collective, without, n, mode):
    """Runs a collective with some functions of remote_dma.py doing nothing, in a process of its own.

    A race leaves the process in an undefined state.
    """
    for name in without:
        setattr(remote_dma, name, lambda *_: None)
    x = jnp.ones((n * n * 8, 128))
    run(lambda x: getattr(remote_dma, collective)(x, "ring", interpret=simulated(mode)), x, n)


CREDITS = ("_give_credit", "_take_credit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "collective, without, n, mode, has_race",
    [
        ("ring_all_gather", (), 4, "eager", False),
        ("ring_all_gather", ("_wait_for_arrival",), 4, "eager", True),
        ("ring_reduce_scatter", ("_wait_for_arrival",), 4, "eager", True),
        ("ring_reduce_scatter", (), 8, "eager", False),
        ("ring_reduce_scatter", CREDITS, 8, "eager", True),
        ("ring_reduce_scatter", CREDITS, 6, "on_wait", True),
    ],
)
def test_race_detector_finds_missing_waits_and_credits(collective, without, n, mode, has_race):
    call = f"test_remote_dma.simulate_broken({collective!r}, {without!r}, {n}, {mode!r})"
    paths = [str(ROOT), str(ROOT / "tests")]
    program = f"import sys; sys.path[:0] = {paths!r}; import conftest, test_remote_dma; {call}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    printed = done.stdout + done.stderr
    assert ("RACE DETECTED" in printed) == has_race, printed[-2000:]
    assert has_race or done.returncode == 0, printed[-2000:]


@pytest.mark.slow
def test_demonstration():
    command = [sys.executable, "-W", "error", "remote_dma.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    ring, gather, scatter, races = done.stdout.splitlines()
    assert "4 simulated devices, 2 steps" in ring and " equal to XLA's in every bit" in gather and "NOT" not in gather
    assert float(scatter.split()[-1]) < 1e-5 and races.endswith("none detected")


# -- compiled for TPU7x


def assert_only_kernels(program: str, number: int):
    assert program.count('custom_call_target="tpu_custom_call"') == number
    assert not re.search("all-gather|reduce-scatter|collective-permute|all-reduce|all-to-all", program)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["2x2x1", "4x4x4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_tpu7x_programs_are_the_kernels_alone(topology, dtype):
    """With blocks of 32 MiB nothing is moved to VMEM or changes layout, and memory is as in the docstring."""
    n, bytes_of_block = tpu7x_ring(topology).size, 2**25
    rows, cols = bytes_of_block // jnp.dtype(dtype).itemsize // 4096, 4096

    gather = compiled_on_ring(lambda x: ring_all_gather(x, "ring"), (rows, cols), dtype, topology)
    assert_only_kernels(gather.as_text(), 1)
    assert gather.as_text().count(" copy(") == 1  # by XLA: remote DMAs may not write to the results of a program

    scatter = compiled_on_ring(lambda x: ring_reduce_scatter(x, "ring"), (n * rows, cols), dtype, topology)
    assert_only_kernels(scatter.as_text(), 1)
    assert scatter.memory_analysis().temp_size_in_bytes < 5.01 * bytes_of_block  # 4, and the result before its copy


@pytest.mark.slow
def test_tpu7x_uses_the_gathered_array_without_a_copy():
    cols = 4096
    program = compiled_on_ring(
        lambda x: jnp.ones((8, 8 * cols), x.dtype) @ ring_all_gather(x, "ring"), (cols, cols), jnp.bfloat16
    ).as_text()
    assert_only_kernels(program, 1)
    entry = program[program.index("\nENTRY") :]  # the instructions it runs; fusions are defined above
    assert not re.search(r" copy(-start)?\(", entry)


@pytest.mark.slow
@pytest.mark.parametrize("collective, rows", [(ring_all_gather, 4096), (ring_reduce_scatter, 8 * 4096)])
def test_tpu7x_gradients_are_kernels_too(collective, rows):
    square = lambda x: (collective(x, "ring").astype(jnp.float32) ** 2).sum()
    program = compiled_on_ring(jax.grad(square), (rows, 4096), jnp.bfloat16).as_text()
    assert_only_kernels(program, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("block", [(16032, 4096), (601, 1100), (8, 2**20), (3, 5, 7), (4096,), (3,)])
def test_tpu7x_takes_any_shape(block, dtype):
    rows, *rest = block
    for f, x in ((ring_all_gather, block), (ring_reduce_scatter, (8 * rows, *rest))):
        program = compiled_on_ring(lambda x, f=f: f(x, "ring"), x, dtype).as_text()
        assert_only_kernels(program, 1)
