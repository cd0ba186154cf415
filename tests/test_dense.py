"""The dense kernel: equal to the product for every shape and dtype, and as near the MXU limit as its docstring says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dense
from compiled import bundles

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def operands(M, K, N, lhs=jnp.bfloat16, rhs=None):
    draw = np.random.default_rng(M + K + N).standard_normal
    return jnp.asarray(draw((M, K)), lhs), jnp.asarray(draw((K, N)), rhs or lhs)


def exact(lhs_MK, rhs_KN):
    return np.asarray(lhs_MK, np.float64) @ np.asarray(rhs_KN, np.float64)


SHAPES = [
    ((200, 300, 250), (128, 128, 128)),  # edges everywhere
    ((33, 257, 130), (32, 128, 128)),  # the last block has one row, one element of K, two columns
    ((40, 300, 70), (256, 256, 256)),  # tiles larger than the arrays
    ((1, 1, 1), None),
    ((100, 300, 50), None),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, tiles, lhs, rhs",
    [(*case, jnp.bfloat16, jnp.bfloat16) for case in SHAPES]
    + [(*case, E4M3, E5M2) for case in SHAPES[:2]]
    + [(*SHAPES[2], *pair) for pair in [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)]],
)
def test_equals_the_product(shape, tiles, lhs, rhs):
    lhs_MK, rhs_KN = operands(*shape, lhs, rhs)
    out_MN = dense.matmul(lhs_MK, rhs_KN, tiles=tiles, dtype=jnp.float32, interpret=True)
    size = exact(np.abs(np.asarray(lhs_MK, np.float64)), np.abs(np.asarray(rhs_KN, np.float64)))
    # products of bf16 and fp8 are exact in float32, so that only the sum is rounded
    assert (np.abs(out_MN - exact(lhs_MK, rhs_KN)) <= shape[1] * 2**-24 * size).all()


def test_the_result_is_rounded_once():
    lhs_MK, rhs_KN = operands(96, 640, 128)
    out_MN = dense.matmul(lhs_MK, rhs_KN, tiles=(32, 128, 128), interpret=True)
    assert out_MN.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out_MN, np.float64), exact(lhs_MK, rhs_KN), rtol=2**-8, atol=1e-5)


@pytest.mark.slow
def test_elements_beyond_an_edge_are_not_summed(monkeypatch):
    """The simulator fills blocks beyond the edge with NaN, which reaches the sum if it is not masked."""
    lhs_MK, rhs_KN = operands(64, 200, 128)
    product = lambda: dense.matmul(lhs_MK, rhs_KN, tiles=(64, 128, 128), dtype=jnp.float32, interpret=True)
    assert np.isfinite(product()).all()
    monkeypatch.setattr(dense, "_masked", lambda block, left, axis: block)
    jax.clear_caches()
    assert np.isnan(product()).all()


@pytest.mark.parametrize(
    "shape, dtype, tiles, message",
    [
        ((8, 16, 8), jnp.float32, None, "both bfloat16, or both of float8_e4m3fn, float8_e5m2, not float32"),
        ((512, 512, 512), jnp.bfloat16, (100, 128, 128), "tile m=100 of a dim of 512: not a multiple of 16"),
        ((512, 512, 512), E4M3, (16, 128, 128), "tile m=16 of a dim of 512: not a multiple of 32"),
        ((512, 512, 512), jnp.bfloat16, (128, 64, 128), "tile n=64 of a dim of 512: not a multiple of 128"),
        ((512, 512, 512), jnp.bfloat16, (128, 128, 0), "tile k=0"),
        ((0, 512, 512), jnp.bfloat16, None, "no dim 0"),
        ((8192,) * 3, jnp.bfloat16, (1024, 1024, 8192), "take 71,303,168 bytes of VMEM, of 62,914,560"),
    ],
)
def test_errors_come_before_compiling(shape, dtype, tiles, message):
    M, K, N = shape
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda lhs_MK, rhs_KN: dense.matmul(lhs_MK, rhs_KN, tiles=tiles),
            jax.ShapeDtypeStruct((M, K), dtype),
            jax.ShapeDtypeStruct((K, N), dtype),
        )


def test_operands_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"\(4, 8\) @ \(9, 4\): K must be the same"):
        dense.matmul(jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((9, 4), jnp.bfloat16))
    with pytest.raises(ValueError, match="not bfloat16 and float8_e4m3fn"):
        dense.matmul(jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((8, 4), E4M3))


@pytest.mark.parametrize("K, k", [(8192, 8192), (28672, 7168), (8193, 4224), (70, 70), (16384, 8192)])
def test_k_is_split_in_equal_parts(K, k):
    lhs_MK, rhs_KN = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(4096, K), (K, 4096)])
    assert dense._checked(lhs_MK, rhs_KN, None, jnp.bfloat16)[3] == k


def test_the_limit():
    """The 256 rows of a 256^3 tile pass through two MXUs, two rows a cycle in each."""
    assert (dense.mxu_cycles(256, 256, 256, "bfloat16"), dense.mxu_cycles(256, 256, 256, "float8_e5m2")) == (64, 32)


def test_without_libtpu_it_prints_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(dense.importlib.util, "find_spec", lambda name: None)
    assert dense.main([]) == 0
    printed = capsys.readouterr().out
    assert 'pip install -e ".[tpu]"' in printed
    assert float(re.search(r"differs from float64 by (\S+)", printed)[1]) < 1e-4


@pytest.mark.slow
def test_demonstration_of_a_small_matmul(capsys):
    """It has edges, which the compiler must accept, too."""
    assert dense.main(["--size=300,520,200", "--tiles=128,128,256"]) == 0
    shares = [float(share) for share in re.findall(r"([\d.]+)% of the MXU limit", capsys.readouterr().out)]
    assert len(shares) == 2 and all(0.5 < share < 60 for share in shares)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, share", [("bfloat16", 0.96), ("float8_e4m3fn", 0.96)])
def test_it_is_as_near_the_limit_as_its_docstring_says(dtype, share):
    size = 8192, 8192, 8192
    report = bundles.measure("dense:build", lhs=dtype)
    call = dense.cycles(report, dense.TILES[jnp.dtype(dtype).itemsize], *size)
    assert call.hbm < call.compute / 2
    assert share < dense.mxu_cycles(*size, dtype) / call.total < share + 0.02
    # VMEM holds two buffers of each block, as counted, and no spilled register
    assert report.kernel().vmem_bytes == pytest.approx(
        {2: 50 * 2**20, 1: 36 * 2**20}[jnp.dtype(dtype).itemsize], rel=0.02
    )
