"""Grouped matmuls: simulated kernels and references against float64, gradients, meshes, cycles on TPU7x."""

import functools
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support import relative_error

import gmm as module
import groups
import moe
from compiled import builders, bundles, grid
from flags import PRESETS, from_preset
from gmm import Activated, activated_gmm, gated_gmm, gated_gradients, gmm, summed_gmm, tgmm
from groups import TgmmTiles, Tiles, Variant
from hardware import CHIPS

BF16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
SMALL = Tiles(rows=64, cols=128, step=32)
SMALL_TGMM = TgmmTiles(rows=512, k=128, n=128)
SIMULATED = pltpu.InterpretParams()
BACKENDS = {"kernel": SIMULATED, "reference": False}
SLOW_KERNEL = [pytest.param("kernel", marks=pytest.mark.slow), "reference"]
RAGGED = [1000, 1100, 900, 1024, 700, 1300, 1068, 1100]  # the cycles of these are in gmm.py

SIZES = {
    "zeros at the ends and between": [0, 50, 0, 0, 61, 17, 0],
    "all in one": [0, 128, 0],
    "less than there are rows": [30, 20],
    "single rows": [1, 1, 1, 0, 1, 124],
    "at registers and tiles": [16, 48, 64],
    "across tiles": [63, 65],
    "none": [0, 0],
}


def case(sizes, M, K, N, lhs_dtype=F32, rhs_dtype=None, experts=None, seed=0):
    """lhs, rhs, dout, sizes. Rows without a group are NaN."""
    rng = np.random.default_rng(seed)
    lhs, dout = rng.standard_normal((M, K)), rng.standard_normal((M, N))
    lhs[sum(sizes) :] = dout[sum(sizes) :] = np.nan
    rhs = rng.standard_normal((experts or len(sizes), K, N))
    rhs_dtype = rhs_dtype or lhs_dtype
    return jnp.asarray(lhs, lhs_dtype), jnp.asarray(rhs, rhs_dtype), jnp.asarray(dout, rhs_dtype), jnp.asarray(sizes)


def rows_of(sizes):
    ends = np.cumsum(np.asarray(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def expected_gmm(lhs, rhs, sizes, offset=0):
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for e, rows in enumerate(rows_of(sizes)[offset : offset + rhs.shape[0]]):
        out[rows] = lhs[rows] @ rhs[e]
    return out


def expected_tgmm(lhs, dout, sizes):
    lhs, dout = np.asarray(lhs, np.float64), np.asarray(dout, np.float64)
    return np.stack([lhs[rows].T @ dout[rows] for rows in rows_of(sizes)])


def check(actual, expected, summands):
    """The error is one rounding to the result's type, and float32 sums'. Entries are at most 6 sqrt(summands)."""
    eps = float(jnp.finfo(actual.dtype).eps)
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=eps / 2 + 1e-6, atol=6 * summands * 2**-24)


@functools.cache
def compiled(function, **options):
    """One program for all group sizes."""
    return jax.jit(partial(function, **options))


def seven(sizes):
    return [*sizes, *[0] * (7 - len(sizes))]


# -- values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_gmm_of_any_sizes(name, backend):
    lhs, rhs, _, sizes = case(seven(SIZES[name]), 128, 128, 256)
    out = compiled(gmm, tiles=SMALL, interpret=BACKENDS[backend])(lhs, rhs, sizes)
    check(out, expected_gmm(lhs, rhs, sizes), 128)
    assert not np.asarray(out[sum(SIZES[name]) :]).any()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_tgmm_of_any_sizes(name, backend):
    sizes = [7 * size for size in seven(SIZES[name])]  # larger than a tile
    lhs, _, dout, sizes = case(sizes, 896, 256, 128)
    out = compiled(tgmm, tiles=SMALL_TGMM, interpret=BACKENDS[backend])(lhs, dout, sizes)
    check(out, expected_tgmm(lhs, dout, sizes), 896)


@pytest.mark.slow
@pytest.mark.parametrize(("outs", "buffers"), [(1, 2), (2, 2), (1, 3), (2, 4)])
def test_tgmm_with_several_buffers_for_results_and_for_tiles(outs, buffers):
    lhs, _, dout, sizes = case([300, 0, 100, 20, 280], 700, 128, 256)
    out = tgmm(lhs, dout, sizes, tiles=TgmmTiles(256, 128, 128, outs, buffers), interpret=SIMULATED)
    check(out, expected_tgmm(lhs, dout, sizes), 300)


@pytest.mark.slow
@pytest.mark.parametrize(("M", "K", "N"), [(101, 100, 90), (128, 130, 128), (97, 128, 200)])
def test_ragged_shapes(M, K, N):
    lhs, rhs, dout, sizes = case([40, 0, 50], M, K, N, BF16)
    check(gmm(lhs, rhs, sizes, interpret=SIMULATED), expected_gmm(lhs, rhs, sizes), K)
    check(tgmm(lhs, dout, sizes, interpret=SIMULATED), expected_tgmm(lhs, dout, sizes), M)


@pytest.mark.at_most(1)
@pytest.mark.slow
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_parts_that_overlap_change_no_value_and_no_gradient(monkeypatch, transpose_rhs):
    """896 columns are split into two parts of 512."""
    monkeypatch.setattr(groups, "VMEM_BYTES", 8 * 2**20)
    lhs, rhs, dout, sizes = case([0, 50, 7, 0, 60, 30], 160, 896, 896)
    assert groups.default_tiles(160, 896, 896, 6, F32).cols == 512
    assert groups.default_tgmm_tiles(160, 896, 896, 6, F32)[1:3] == (512, 512)
    weights = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    run = partial(gmm, group_sizes_E=sizes, transpose_rhs=transpose_rhs, interpret=SIMULATED)
    value_and_gradients = lambda x, w, dy: (run(x, w), jax.vjp(run, x, w)[1](dy))
    out, (dlhs, drhs) = jax.jit(value_and_gradients)(lhs, weights, dout)
    check(out, expected_gmm(lhs, rhs, sizes), 896)
    check(dlhs, expected_gmm(dout, rhs.swapaxes(1, 2), sizes), 896)
    check(drhs.swapaxes(1, 2) if transpose_rhs else drhs, expected_tgmm(lhs, dout, sizes), 160)


@pytest.mark.slow
def test_parts_that_overlap_of_gate_and_up_and_of_both_dims():
    lhs, gate, dout, sizes = case([100, 0, 60], 160, 896, 896)
    _, up, _, _ = case([100, 0, 60], 160, 896, 896, seed=1)
    options = dict(tiles=Tiles(64, 512), interpret=SIMULATED)
    products = gated_gmm(lhs, (gate, up), sizes, jnp.multiply, jnp.ones(160), **options)
    expected = expected_gmm(lhs, gate, sizes), expected_gmm(lhs, up, sizes)
    jax.tree.map(lambda actual, product: check(actual, product, 896), products[:2], expected)
    for outs in (1, 2):
        out = tgmm(lhs, dout, sizes, tiles=TgmmTiles(256, 512, 512, outs), interpret=SIMULATED)
        check(out, expected_tgmm(lhs, dout, sizes), 160)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[40, 0, 50, 3], [0, 0, 64, 0]], ids=str)
def test_a_dim_that_128_does_not_divide_has_a_wider_last_part(sizes):
    """520 columns, and biases, are parts of 256 and 264; a pass has one tile or several."""
    assert groups.columns(520) == [520, 264]
    lhs, gate, _, sizes = case(sizes, 101, 64, 520)
    _, up, _, _ = case(sizes, 101, 64, 520, seed=1)
    options = dict(tiles=Tiles(64, 264), interpret=SIMULATED)
    biases = np.float32(np.random.default_rng(2).standard_normal((2, 4, 520)))
    given = dict(biases=tuple(map(jnp.asarray, biases)), **options)
    products = gated_gmm(lhs, (gate, up), sizes, jnp.multiply, jnp.ones(101), **given)
    transposed = gmm(lhs, up.swapaxes(1, 2), sizes, transpose_rhs=True, **options)
    for actual, weights, bias in ((products[0], gate, biases[0]), (products[1], up, biases[1]), (transposed, up, None)):
        expected = expected_gmm(lhs, weights, sizes)
        for e, rows in enumerate(rows_of(sizes)):
            expected[rows] += 0 if bias is None else bias[e]
        check(actual, expected, 64)
    np.testing.assert_array_equal(products[2], products[0] * products[1])


@pytest.mark.slow
@pytest.mark.parametrize("types", [(BF16, BF16), (E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_types(types):
    lhs, rhs, dout, sizes = case([33, 60, 0, 20], 128, 128, 128, *types)
    assert gmm(lhs, rhs, sizes).dtype == BF16
    for interpret in BACKENDS.values():
        out = gmm(lhs, rhs, sizes, out_dtype=F32, interpret=interpret)
        check(out, expected_gmm(lhs, rhs, sizes), 128)
        check(tgmm(lhs, dout, sizes, interpret=interpret), expected_tgmm(lhs, dout, sizes), 128)


@pytest.mark.parametrize("backend", SLOW_KERNEL)
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_shard_of_the_experts(offset, transpose_rhs, backend):
    lhs, rhs, dout, sizes = case([20, 30, 0, 37, 21], 128, 128, 256, experts=2)
    interpret = BACKENDS[backend]
    weights = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    run = jax.jit(partial(gmm, transpose_rhs=transpose_rhs, tiles=SMALL, interpret=interpret))
    check(run(lhs, weights, sizes, group_offset=offset), expected_gmm(lhs, rhs, sizes, offset), 128)
    tgmm_of_shard = partial(tgmm, group_offset=offset, num_groups=2, tiles=SMALL_TGMM, interpret=interpret)
    check(tgmm_of_shard(lhs, dout, sizes), expected_tgmm(lhs, dout, sizes)[offset : offset + 2], 128)


@pytest.mark.parametrize("backend", SLOW_KERNEL)
@pytest.mark.parametrize(("lhs_shape", "rhs_shape"), [((), ()), ((128,), (3,)), ((), (3, 256))])
def test_scales(lhs_shape, rhs_shape, backend):
    lhs, rhs, dout, sizes = case([50, 0, 61], 128, 128, 256, E4M3)
    rng = np.random.default_rng(1)
    lhs_scale, rhs_scale = (np.asarray(rng.uniform(1, 2, shape), np.float32) for shape in (lhs_shape, rhs_shape))
    if lhs_scale.ndim:
        lhs_scale[111:] = np.nan
    scaled = partial(gmm, lhs, rhs, sizes, out_dtype=F32, tiles=SMALL, interpret=BACKENDS[backend])
    columns = np.asarray(rhs_scale, np.float64).reshape(*rhs_scale.shape, *[1] * (2 - rhs_scale.ndim))[..., None, :]
    wide = np.asarray(rhs, np.float64) * (columns if rhs_scale.ndim else rhs_scale)
    rows = np.nan_to_num(np.asarray(lhs_scale, np.float64).reshape(-1, 1))
    check(scaled(lhs_scale=lhs_scale, rhs_scale=rhs_scale), expected_gmm(lhs, wide, sizes) * rows, 1024)
    check(scaled(lhs_scale=lhs_scale), expected_gmm(lhs, rhs, sizes) * rows, 512)
    out = tgmm(lhs, dout, sizes, scale=rhs_scale, tiles=SMALL_TGMM, out_dtype=F32, interpret=BACKENDS[backend])
    check(out, expected_tgmm(lhs, dout, sizes) * (columns if rhs_scale.ndim else rhs_scale), 512)


def silu(gate, up):
    return jax.nn.silu(gate) * up


def gated_case(sizes, M=128, K=128, N=256, dtype=F32, experts=None):
    """lhs, gate, up, dproduct, sizes. Products are about 1."""
    lhs, gate, dproduct, sizes = case(sizes, M, K, N, dtype, experts=experts)
    up = case(sizes, M, K, N, dtype, experts=experts, seed=1)[1]
    return lhs, gate / 8, up / 8, dproduct, sizes


def expected_gated(lhs, gate, up, dproduct, sizes, offset=0):
    """silu(lhs gate) * (lhs up), and its gradients in lhs, gate and up, in float64."""
    a, b = (expected_gmm(lhs, w, sizes, offset) for w in (gate, up))
    sigmoid = 1 / (1 + np.exp(-a))
    dproduct = np.nan_to_num(np.asarray(dproduct, np.float64))
    da, db = dproduct * b * sigmoid * (1 + a * (1 - sigmoid)), dproduct * a * sigmoid
    dlhs_of = lambda d, w: expected_gmm(d, np.asarray(w).swapaxes(1, 2), sizes, offset)
    own = slice(offset, offset + gate.shape[0])
    dgate, dup = (expected_tgmm(lhs, d, sizes)[own] for d in (da, db))
    return a * sigmoid * b, (dlhs_of(da, gate) + dlhs_of(db, up), dgate, dup)


@pytest.mark.parametrize("backend", SLOW_KERNEL)
@pytest.mark.parametrize("name", SIZES)
def test_gated_gmm_of_any_sizes(name, backend):
    """Factors are NaN in rows without a group."""
    lhs, gate, up, dproduct, sizes = gated_case(seven(SIZES[name]))
    factors = jax.random.uniform(jax.random.key(0), (128,)).at[sum(SIZES[name]) :].set(jnp.nan)
    run = compiled(gated_gmm, activation=silu, tiles=SMALL, interpret=BACKENDS[backend])
    expected, _ = expected_gated(lhs, gate, up, dproduct, sizes)
    *_, out, largest = run(lhs, (gate, up), sizes, factors_M=factors)
    np.testing.assert_allclose(out, expected * np.nan_to_num(factors)[:, None], rtol=1e-5, atol=1e-5)
    assert largest is None and not np.asarray(out[sum(SIZES[name]) :]).any()


@pytest.mark.parametrize("backend", SLOW_KERNEL)
def test_gated_gmm_is_the_activation_of_two_rounded_products(backend):
    lhs, gate, up, _, sizes = gated_case([40, 0, 50, 3], M=101, K=100, N=90, dtype=BF16)
    products = (gmm(lhs, w, sizes, interpret=BACKENDS[backend]).astype(F32) for w in (gate, up))
    *_, out, _ = gated_gmm(lhs, (gate, up), sizes, silu, jnp.full(101, 3.0), interpret=BACKENDS[backend])
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, (3 * silu(*products)).astype(BF16))


@pytest.mark.parametrize("backend", SLOW_KERNEL)
def test_gated_gmm_of_fp8_and_its_scales(backend):
    lhs, gate, up, _, sizes = gated_case([50, 0, 61], dtype=E4M3)
    options = dict(interpret=BACKENDS[backend], out_dtype=F32)
    gate_scale, up_scale = 0.25, jnp.asarray([2.0, 3.0, 0.5])
    run = partial(gated_gmm, lhs, (gate, up), sizes, silu, jnp.ones(128))
    actual = run(rhs_scale=(gate_scale, up_scale), **options)
    products = [gmm(lhs, w, sizes, rhs_scale=scale, **options) for w, scale in ((gate, gate_scale), (up, up_scale))]
    rows = silu(*products)
    for a, b in zip(actual, (*products, rows, jnp.abs(rows).max()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert [a.dtype for a in run(interpret=BACKENDS[backend])] == [BF16, BF16, BF16, F32]


@pytest.mark.slow
@pytest.mark.parametrize("row", [70, 0, 45, 110])
@pytest.mark.parametrize("cols", [128, 512])
def test_the_largest_row_of_an_activation_is_one_of_a_group(cols, row):
    """Rows 0 to 110 have a group. Those after them are larger still; the last parts of 512 columns overlap."""
    lhs, gate, up, _, sizes = gated_case([50, 0, 61], N=640, dtype=E4M3)
    lhs = lhs.astype(F32).at[row].mul(16).at[111:].set(400).astype(E4M3)
    factors = jax.random.uniform(jax.random.key(0), (128,))
    options = dict(tiles=Tiles(64, cols, 32), interpret=SIMULATED)
    *_, rows, largest = gated_gmm(lhs, (gate, up), sizes, silu, factors, **options)
    size = np.abs(np.asarray(rows, np.float32))
    assert largest == size.max() == size[row].max() > 0


def summed_case(sizes, M=128, K=128, N=256, dtype=F32, experts=None):
    """Two lhs [M, K], two rhs [E, N, K], sizes."""
    lhs, rhs, _, sizes = case(sizes, M, K, N, dtype, experts=experts)
    lhs_too, rhs_too, _, _ = case(sizes, M, K, N, dtype, experts=experts, seed=1)
    return (lhs, lhs_too), tuple(w.swapaxes(1, 2) for w in (rhs, rhs_too)), sizes


@pytest.mark.parametrize("backend", SLOW_KERNEL)
@pytest.mark.parametrize("name", SIZES)
def test_summed_gmm_of_any_sizes(name, backend):
    pair, weights, sizes = summed_case(seven(SIZES[name]))
    run = compiled(summed_gmm, tiles=SMALL, interpret=BACKENDS[backend])
    out = run(pair, weights, sizes)
    check(out, sum(expected_gmm(x, w.swapaxes(1, 2), sizes) for x, w in zip(pair, weights, strict=True)), 256)
    assert not np.asarray(out[sum(SIZES[name]) :]).any()


@pytest.mark.parametrize("backend", SLOW_KERNEL)
def test_summed_gmm_with_scales_is_rounded_once(backend):
    pair, weights, sizes = summed_case([40, 50, 3], M=101, K=100, N=90, dtype=BF16)
    options = dict(interpret=BACKENDS[backend])
    scales = 0.25, jnp.asarray([2.0, 3.0, 0.5])
    parts = [
        gmm(x, w, sizes, transpose_rhs=True, rhs_scale=s, out_dtype=F32, **options)
        for x, w, s in zip(pair, weights, scales, strict=True)
    ]
    out = summed_gmm(pair, weights, sizes, rhs_scale=scales, **options)
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, sum(parts).astype(BF16))
    with pytest.raises(ValueError, match="both lhs must have one shape and type"):
        summed_gmm((pair[0], pair[1][:, :50]), weights, sizes)


@pytest.mark.slow
def test_summed_gmm_with_scales_of_wide_experts_compiles():
    """Two products with scales of their own are added in VMEM: 640 rows of 7168 are 18 MB of the 64."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    struct = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    pair = [struct((8192, 1024), jnp.float8_e5m2)] * 2
    weights, scales = [struct((8, 7168, 1024), jnp.float8_e4m3fn)] * 2, [struct((8,), jnp.float32)] * 2
    run = lambda pair, weights, sizes, scales: summed_gmm(pair, weights, sizes, rhs_scale=scales, out_dtype=BF16)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(run).lower(pair, weights, struct((8,), jnp.int32), scales).compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.parametrize(
    ("K", "N", "E", "dtype", "calls"),
    [(1536, 4096, 128, BF16, 1), (2880, 2880, 128, E4M3, 1), (14336, 4096, 8, BF16, 2), (20000, 512, 8, BF16, 2)],
)
def test_summed_gmm_is_one_kernel_if_vmem_has_space(K, N, E, dtype, calls):
    """It is two for Mixtral's experts, whose rows are 28 KiB, and where no tiles of two pairs fit."""
    shape = jax.ShapeDtypeStruct
    lhs, rhs, sizes = shape((65536, K), dtype), shape((E, N, K), dtype), shape((E,), jnp.int32)
    traced = jax.make_jaxpr(summed_gmm)((lhs, lhs), (rhs, rhs), sizes)
    assert str(traced).count("pallas_call[") == calls


@pytest.mark.slow
def test_no_races():
    """No kernel uses a tile before it arrived or overwrites one before it was sent, also with transposed matrices.

    The simulator's state would survive a race, so this runs in a process of its own.
    """
    ran = subprocess.run([sys.executable, "gmm.py"], cwd=Path(module.__file__).parent, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert "RACE" not in ran.stdout.upper()
    lines = [line.split() for line in ran.stdout.splitlines() if "largest error" in line]
    assert [name for name, *_ in lines] == ["gmm", "gated_gmm", "gated_gradients", "summed_gmm", "tgmm"]
    assert max(float(error) for *_, error in lines) < 2e-4


# -- gradients


@pytest.mark.parametrize("backend", SLOW_KERNEL)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_gradients(transpose_rhs, backend):
    lhs, rhs, dout, sizes = case([0, 50, 7, 0, 60], 128, 128, 256)
    weights = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    run = partial(gmm, group_sizes_E=sizes, transpose_rhs=transpose_rhs, interpret=BACKENDS[backend])
    dlhs, drhs = jax.jit(lambda x, w, dy: jax.vjp(run, x, w)[1](dy))(lhs, weights, dout)
    check(dlhs, expected_gmm(dout, rhs.swapaxes(1, 2), sizes), 256)
    check(drhs.swapaxes(1, 2) if transpose_rhs else drhs, expected_tgmm(lhs, dout, sizes), 128)


def mlp(lhs, gate, up, down, factors, biases, sizes, activation, interpret=None):
    """(factors * activation(lhs . gate, lhs . up)) . down^T, in fused kernels; with interpret=None in parts."""
    if interpret is not None:
        options = dict(biases=biases, interpret=interpret)
        *products, rows, _ = gated_gmm(lhs, (gate, up), sizes, activation, factors, **options)
        through = Activated(activation, tuple(products), factors)
        return activated_gmm(rows, down, sizes, through, transpose_rhs=True, interpret=interpret)
    products = [gmm(lhs, w, sizes, out_dtype=F32) for w in (gate, up)]
    if biases:
        products = [moe.add_bias(y, bias.astype(F32), sizes) for y, bias in zip(products, biases, strict=True)]
    product = activation(*(y.astype(lhs.dtype).astype(F32) for y in products)).astype(lhs.dtype)
    return gmm(moe.times_factors(product, factors), down, sizes, transpose_rhs=True)


@pytest.mark.parametrize("backend", SLOW_KERNEL)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_mlp_in_kernels_equals_its_parts(dtype, biased, backend):
    """Values and all gradients of gpt-oss's SwiGLU, whose limit clamps many; rows without a group are NaN.

    In bfloat16 the products are rounded once, with their biases, and the activation once, with the factors.
    """
    lhs, gate, up, _, sizes = gated_case([0, 20, 7, 0, 30], M=64, K=32, N=128, dtype=dtype)
    down = up.swapaxes(1, 2)[:, ::-1].swapaxes(1, 2)
    biases = None if not biased else tuple(jax.random.normal(jax.random.key(i), (5, 128), dtype) for i in range(2))
    factors = jax.random.uniform(jax.random.key(2), (64,))
    dy = jax.random.normal(jax.random.key(3), (64, 32), dtype)

    def value_and_gradients(interpret, *arrays):
        run = partial(mlp, sizes=sizes, activation=partial(moe.glu, limit=1.0), interpret=interpret)
        y, pull = jax.vjp(run, *arrays)
        return y, *pull(dy)

    arrays = lhs, gate, up, down, factors, biases
    actual, expected = (jax.jit(partial(value_and_gradients, i))(*arrays) for i in (BACKENDS[backend], None))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and relative_error(a, b) < (1e-5 if dtype == F32 else 0.02)
    assert not np.asarray(actual[0][57:]).any() and not np.asarray(actual[5][57:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("M", "N", "cols", "dtype", "transpose_rhs"),
    [
        (128, 384, 128, F32, False),
        (128, 640, 512, F32, True),
        (128, 640, 512, E4M3, False),
        (128, 600, 344, E4M3, True),
        (140, 768, 768, BF16, False),  # rows that are no whole registers; three parts of 256 columns
    ],
)
def test_gradients_of_an_activation_in_the_kernel_of_a_matmul(M, N, cols, dtype, transpose_rhs, sizes):
    """Parts of the columns divide them, overlap, or have a wider last one; the largest elements are of own rows alone.

    The kernel's against the reference's, which the test above compares with JAX's; gate, up and dout are NaN in rows
    without a group.
    """
    dout, rhs, product, sizes = case(seven(SIZES[sizes]), M, 64, N, dtype, experts=5)
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    product = jnp.asarray(product, F32 if dtype == F32 else BF16)
    factors = jax.random.uniform(jax.random.key(0), (M,))
    through = Activated(partial(moe.glu, limit=1.0), (product, product / 2), factors)
    options = dict(rhs_scale=0.5, transpose_rhs=transpose_rhs)
    run = lambda **how: gated_gradients(dout, rhs, sizes, through, **options, **how)
    actual, expected = run(tiles=Tiles(64, cols, 32), interpret=SIMULATED), run()
    assert (actual[3] is None) == (dtype != E4M3) == (expected[3] is None)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and np.isfinite(np.asarray(a, np.float32)).all()
        rtol = 1e-5 if dtype == F32 else 1e-2
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rtol, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("row", [70, 0, 45, 110])
def test_the_largest_gradient_is_that_of_any_row_of_a_group(row):
    """Rows 0 to 110 have a group. Those after them are larger still, and foreign ones with the first group's matrix."""
    dout, rhs, product, sizes = case([50, 0, 61], 128, 64, 640, E4M3)
    dout, rhs = dout.astype(F32).at[row].mul(64).at[111:].set(400), rhs.astype(F32).at[0].mul(8)
    dout, rhs = dout.astype(E4M3), rhs.astype(E4M3)
    product = jnp.asarray(product, BF16).at[111:].set(100)
    through = Activated(silu, (product, product), jnp.ones(128))
    dgate, dup, _, largest = gated_gradients(dout, rhs, sizes, through, tiles=Tiles(64, 512, 32), interpret=SIMULATED)
    np.testing.assert_array_equal(largest, [np.abs(np.asarray(d, np.float32)).max() for d in (dgate, dup)])
    assert not np.asarray(dgate[111:], np.float32).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "calls"), [(("a", "b", "product"), 1), (("a", "b"), 2), (("a", "product"), 2), ((), 2)]
)
def test_the_kernel_runs_once_if_a_policy_saves_all_that_the_gradient_needs(saved, calls):
    """The gradient of the matmul after it needs both products, by their names, and the result."""
    lhs, gate, up, _, sizes = gated_case([60, 50])
    factors = jnp.ones(len(lhs))

    def run(lhs, gate, up, down):
        results = gated_gmm(lhs, (gate, up), sizes, silu, factors)[:3]
        *products, product = map(checkpoint_name, results, ("a", "b", "product"))
        return activated_gmm(product, down, sizes, Activated(silu, tuple(products), factors)).sum()

    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    gradients = jax.grad(jax.checkpoint(run, policy=policy), (0, 1, 2, 3))
    traced = str(jax.make_jaxpr(gradients)(lhs, gate, up, up.swapaxes(1, 2)))
    assert traced.count("gated=True") == calls


def test_gradients_of_a_shard():
    lhs, rhs, dout, sizes = case([20, 30, 37, 21], 128, 128, 256, BF16, experts=2)
    run = lambda x, w: gmm(x, w, sizes, group_offset=1)
    dlhs, drhs = jax.vjp(run, lhs, rhs)[1](dout)
    assert (dlhs.dtype, drhs.dtype) == (BF16, BF16)
    check(dlhs, expected_gmm(dout, rhs.swapaxes(1, 2), sizes, 1), 256)
    check(drhs, expected_tgmm(lhs, dout, sizes)[1:3], 128)


@pytest.mark.slow
def test_on_a_mesh_with_the_check_of_varying_axes():
    """Tokens are in 4 shards, experts in 2. A device computes its experts; shards of tokens have the same weights."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    lhs, rhs, dout, _ = case([512], 512, 32, 48, experts=4)
    sizes = jnp.asarray([[20, 30, 0, 70], [128, 0, 0, 0], [1, 2, 3, 4], [0, 0, 60, 68]])
    P = PartitionSpec

    def per_device(x, w, sizes):
        offset = 2 * jax.lax.axis_index("expert")
        return jax.lax.psum(gmm(x, w, sizes[0], group_offset=offset), "expert")

    specs = (P("data"), P("expert"), P("data"))
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=True)
    loss = lambda x, w: jnp.sum(jnp.asarray(dout) * sharded(x, w, sizes))
    out, (dlhs, drhs) = jax.jit(lambda x, w: (sharded(x, w, sizes), jax.grad(loss, (0, 1))(x, w)))(lhs, rhs)
    shards = [(slice(128 * i, 128 * (i + 1)), sizes[i]) for i in range(4)]
    check(out, np.concatenate([expected_gmm(lhs[s], rhs, own) for s, own in shards]), 32)
    check(dlhs, np.concatenate([expected_gmm(dout[s], rhs.swapaxes(1, 2), own) for s, own in shards]), 48)
    check(drhs, sum(expected_tgmm(lhs[s], dout[s], own) for s, own in shards), 512)


# -- errors


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (Tiles(64, 100), r"of 256 one of \[256, 128\]"),
        (Tiles(60, 128, 32), "rows must be a multiple of step"),
        (Tiles(64, 128, 4), "step of 8, the rows of a register"),
        (Tiles(64 * 1024, 128), "take 136,458,240 bytes of VMEM with K=128, more than the limit of 62,914,560"),
    ],
)
def test_tiles_that_do_not_fit(tiles, message):
    lhs, rhs, _, sizes = case([40, 60], 128, 128, 256)
    with pytest.raises(ValueError, match=message):
        gmm(lhs, rhs, sizes, tiles=tiles, interpret=SIMULATED)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (TgmmTiles(256, 100, 128), "k must be 128 or"),
        (TgmmTiles(100, 128, 128), "rows must be a multiple of 256"),
        (TgmmTiles(2**16, 128, 128), "more than the limit of 62,914,560"),
    ],
)
def test_tgmm_tiles_that_do_not_fit(tiles, message):
    lhs, _, dout, sizes = case([40, 60], 128, 128, 256)
    with pytest.raises(ValueError, match=message):
        tgmm(lhs, dout, sizes, tiles=tiles, interpret=SIMULATED)


def test_operands_that_do_not_fit():
    lhs, rhs, dout, sizes = case([40, 60], 128, 128, 256)
    gradients_of = lambda through: gated_gradients(lhs, rhs, sizes, through)
    with pytest.raises(ValueError, match=r"\[E, N, K\], as transpose_rhs is set, not \(128, 128\) and \(2, 128, 256\)"):
        gmm(lhs, rhs, sizes, transpose_rhs=True)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        gmm(lhs, rhs.astype(BF16), sizes)
    with pytest.raises(ValueError, match="2 experts, group_sizes only 1"):
        gmm(lhs, rhs, sizes[:1])
    with pytest.raises(ValueError, match="integers"):
        gmm(lhs, rhs, sizes.astype(F32))
    with pytest.raises(ValueError, match=r"lhs_scale has shape \(2,\)"):
        gmm(lhs, rhs, sizes, lhs_scale=jnp.ones(2))
    with pytest.raises(ValueError, match=r"rhs_scale has shape \(128,\)"):
        gmm(lhs, rhs, sizes, rhs_scale=jnp.ones(128))
    with pytest.raises(ValueError, match="tgmm takes"):
        tgmm(lhs, dout[:64], sizes)
    for wrong in (rhs.astype(BF16), rhs[:, :, :128]):
        with pytest.raises(ValueError, match="must have one type, gate and up one shape"):
            gated_gmm(lhs, (rhs, wrong), sizes, silu, jnp.ones(128))
    with pytest.raises(ValueError, match=r"a bias has shape \[256\]; it must be \[E, N\] = \[2, 256\]"):
        gated_gmm(lhs, (rhs, rhs), sizes, silu, jnp.ones(128), biases=(rhs[0, 0], rhs[0, 0]))
    of_pair = lambda x, w, **scale: gated_gmm(x, (w, w), sizes, silu, jnp.ones(128), **scale)[0].astype(F32).sum()
    for dtype, scale in ((E4M3, {}), (F32, dict(rhs_scale=(2.0, 2.0)))):
        with pytest.raises(ValueError, match="gated_gmm of fp8 or with scales has no gradient"):
            jax.grad(of_pair)(lhs.astype(dtype), rhs.astype(dtype), **scale)
    with pytest.raises(ValueError, match=r"factors has shape \(5,\); it must be \[M\] = \[128\]"):
        gated_gmm(lhs, (rhs, rhs), sizes, silu, jnp.ones(5))
    through = Activated(silu, (dout, dout), jnp.ones(128))
    with pytest.raises(ValueError, match="activated_gmm of fp8 has no gradient"):
        activated_gmm(lhs.astype(E4M3), rhs.astype(E4M3), sizes, through)
    for call in (lambda made_of: activated_gmm(dout, rhs, sizes, made_of, transpose_rhs=True), gradients_of):
        with pytest.raises(ValueError, match=r"gate and up must have one type and the shape \[M, N\] = \[128, 256\]"):
            call(through._replace(products=(dout, dout[:, :128])))
        for factors, shape in ((jnp.ones(5), r"\(5,\)"), (jnp.ones(()), r"\(\)")):
            with pytest.raises(ValueError, match=rf"factors has shape {shape}; it must be \[M\] = \[128\]"):
                call(through._replace(factors=factors))
    with pytest.raises(ValueError, match="has no gradient"):
        jax.grad(lambda x: gmm(x, rhs, sizes, lhs_scale=2.0).sum())(lhs)
    with pytest.raises(ValueError, match="has no gradient"):
        jax.grad(lambda x: gmm(x, rhs.astype(E4M3), sizes).sum().astype(F32))(lhs.astype(E4M3))


# -- on TPU7x


def ideal_cycles(M, K, N):
    return 2 * M * K * N / 524_288


@pytest.mark.slow
def test_cycles_of_gmm():
    """At most 1.18 times the cycles that the matrix units need for these rows, with all wasted work.

    For 4096 x 1536, which takes four minutes to compile, benchmarks/kernels.py prints 1.07. A narrow matrix has
    the same cost between tiles.
    """
    M, K, N = 8192, 4096, 512
    kernel, tiles = bundles.measure("compiled.builders:gmm", N=N).kernel("gmm"), groups.default_tiles(M, K, N, 8, BF16)
    assert kernel.vmem_bytes == groups.vmem_bytes(tiles, K, N, BF16, BF16) - groups.SPILL_BYTES  # spills nothing
    rng = np.random.default_rng(0)
    for sizes in (RAGGED, [1024] * 8, *rng.multinomial(M, rng.dirichlet(np.full(8, 20.0), 8))[:4]):
        counts = grid.executions(kernel, sizes, M, K, N, tiles, BF16)
        cycles = kernel.cycles(counts, moved_bytes=grid.moved_bytes(sizes, M, K, N, tiles, BF16))
        assert ideal_cycles(M, K, N) < cycles.compute < 1.18 * ideal_cycles(M, K, N)
        assert cycles.hbm < cycles.compute  # hidden


@pytest.mark.slow
def test_the_activation_costs_no_cycles_behind_the_matmuls():
    """Gate, up and silu(gate) * up in one kernel take no longer than two calls of `gmm` with the same tiles.

    Three heights of a tile are compiled. XLA's pass for silu(gate) * up would take 30,000 cycles, a third of these.
    """
    K, N = 2048, 512
    tiles = groups.default_tiles(8192, K, N, 8, BF16, variant=Variant(gated=True))
    tiles = tiles._replace(step=tiles.rows // 2)

    def cycles(builder):
        kernel = bundles.measure(f"compiled.builders:{builder}", K=K, N=N, **tiles._asdict()).kernel("gmm")
        counts = grid.executions(kernel, RAGGED, 8192, K, N, tiles, BF16)
        gated = builder == "gated_gmm"
        if gated:
            estimate = groups.vmem_bytes(tiles, K, N, BF16, BF16, Variant(gated=True))
            assert estimate - groups.SPILL_BYTES <= kernel.vmem_bytes <= estimate
        moved = grid.moved_bytes(RAGGED, 8192, K, N, tiles, BF16, variant=Variant(gated=gated))
        total = kernel.cycles(counts, moved_bytes=moved)
        assert total.hbm < total.compute  # hidden
        return total.compute

    assert cycles("gated_gmm") < 0.96 * 2 * cycles("gmm")  # 0.950: it starts half as many tiles, and has factors


@pytest.mark.slow
def test_a_sum_costs_no_cycles_behind_the_matmuls():
    """Two pairs in one kernel take no longer than two calls of `gmm` with the same tiles."""
    K, N = 1536, 512
    tiles = groups.default_tiles(8192, K, N, 8, BF16, variant=Variant(transpose_rhs=True, summed=True))
    tiles = tiles._replace(step=tiles.rows // 2)  # three heights are compiled

    def cycles(summed):
        options = dict(K=K, N=N, transpose_rhs=True, summed=summed)
        kernel = bundles.measure("compiled.builders:gmm", **options, **tiles._asdict()).kernel("gmm")
        counts = grid.executions(kernel, RAGGED, 8192, K, N, tiles, BF16)
        total = kernel.cycles(
            counts, moved_bytes=grid.moved_bytes(RAGGED, 8192, K, N, tiles, BF16, variant=Variant(summed=summed))
        )
        estimate = groups.vmem_bytes(tiles, K, N, BF16, BF16, Variant(transpose_rhs=True, summed=summed))
        assert kernel.vmem_bytes <= estimate and total.hbm < total.compute
        return total.compute

    assert cycles(True) < 0.9 * 2 * cycles(False)  # 0.881: it starts, and writes, half as many tiles


@pytest.mark.slow
def test_cycles_of_tgmm():
    """At most 1.4 times the passes of 256 rows that these sizes need. For 4096 x 1536 benchmarks/kernels.py: 1.08."""
    M, K, N = 8192, 1024, 512
    kernel = bundles.measure("compiled.builders:tgmm", K=K, N=N).kernel("tgmm")
    tiles = groups.default_tgmm_tiles(M, K, N, 8, BF16)
    estimate = groups.tgmm_vmem_bytes(tiles, K, N, BF16, BF16)
    assert estimate - groups.SPILL_BYTES <= kernel.vmem_bytes <= estimate
    for sizes in (RAGGED, [1024] * 8):
        starts = np.cumsum(sizes) - sizes
        passes = sum(-(-(start % 16 + size) // 256) for start, size in zip(starts, sizes, strict=True))
        counts = grid.executions(kernel, sizes, M, K, N, tiles, BF16)
        cycles = kernel.cycles(counts, moved_bytes=grid.moved_bytes(sizes, M, K, N, tiles, BF16))
        assert cycles.compute < 1.4 * ideal_cycles(256 * passes, K, N)
        assert cycles.hbm < cycles.compute  # hidden


def compile_for_tpu7x(f, shapes):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(f).lower(*shapes).compile().as_text()


def presets_of_experts() -> list[str]:
    """A preset for each size of experts, but for multiples of 256 that are no larger than another's."""
    configs = {name: from_preset(name) for name, preset in PRESETS.items() if preset.get("num_experts")}
    names = {(config.model_dim, config.expert_dim): name for name, config in configs.items()}
    larger = lambda D, F: any((D, F) != dims and D <= dims[0] and F <= dims[1] for dims in names)
    return [name for (D, F), name in names.items() if D % 256 or F % 256 or not larger(D, F)]


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize("preset", presets_of_experts())
def test_compiles_for_the_experts_of(preset):
    """At most 64 groups and one height are compiled: more would take the same VMEM and more time.

    `tgmm` is compiled for few, among them 704, which is no multiple of 128: its VMEM is that of test_cycles_of_tgmm.
    """
    config = from_preset(preset)
    D, F, E = config.model_dim, config.expert_dim, min(config.num_experts, 64)
    for build, K, N, transpose_rhs in ((builders.gmm, D, F, False), (builders.gmm, F, D, True)):
        rows = groups.default_tiles(8192, K, N, E, BF16, variant=Variant(transpose_rhs=transpose_rhs)).rows
        program = compile_for_tpu7x(*build(K=K, N=N, groups=E, transpose_rhs=transpose_rhs, step=rows))
        assert "tpu_custom_call" in program
    if D * F <= 2816 * 704:
        assert "tpu_custom_call" in compile_for_tpu7x(*builders.tgmm(K=D, N=F, groups=E, rows=256))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [E4M3, F32])
def test_compiles_for_other_types(dtype):
    options = dict(K=512, N=384, rows=256, dtype=jnp.dtype(dtype).name)
    assert "tpu_custom_call" in compile_for_tpu7x(*builders.gmm(**options, step=128, lhs_scale=True, rhs_scale=True))
    assert "tpu_custom_call" in compile_for_tpu7x(*builders.tgmm(**options))


@pytest.mark.slow
def test_compiles_on_a_mesh_with_gradients():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    P = PartitionSpec

    def per_device(x, w, sizes):
        out = gmm(x, w, sizes[0], group_offset=2 * jax.lax.axis_index("expert"))
        return jax.lax.psum(jnp.sum(out.astype(F32) ** 2), ("data", "expert"))

    specs = (P("data"), P("expert"), P("data"))
    shapes = [((1024, 256), BF16), ((4, 256, 128), BF16), ((4, 4), jnp.int32)]
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    ]
    loss = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 3  # forward, dlhs, drhs


@pytest.mark.parametrize("dtype, itemsize", [("bf16", 2), ("fp8", 1)])
def test_flops_a_byte_are_those_of_the_chip(dtype, itemsize):
    chip = CHIPS["tpu7x"]
    assert itemsize / 2 * chip.flops_per_s(dtype) / chip.hbm_bytes_per_s == pytest.approx(groups.FLOPS_A_BYTE, rel=1e-4)
