"""The cost of matmuls on a chip and on a mesh, against the scaling book, by hand, and performed in numpy.

A test of the scaling book (https://jax-ml.github.io/scaling-book) is named by part and question. Where the book's
figures changed between 2025 and 2026, both are tested. Where it rounds or is wrong, the test says so.
"""

import dataclasses
import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from hardware import CHIPS, Axis, Chip
from predicted import matmul as matmul_lib
from predicted.interconnect import collective_s, permute
from predicted.matmul import Layout, Matmul, matmul_bounds, sharded_matmul

v4p = lambda *sizes: [Axis(size, 4.5e10) for size in sizes]  # a 4x4x4 wraps around on every axis


# -- matmuls on a chip: the scaling book, part 1


def what_if(chip: str, **figures) -> Chip:
    """A chip with the book's figures in place of the table's."""
    return dataclasses.replace(CHIPS[chip], **figures)


v5e_2025 = what_if("v5e", hbm_bytes_per_s=8.1e11, link_bytes_per_s=4.5e10)
v5e_2026 = what_if("v5e", hbm_bytes_per_s=8.2e11, link_bytes_per_s=4.5e10)
int8 = dict(lhs_dtype="int8", rhs_dtype="int8", out_dtype="int8")


def test_book_part_1_computation():
    """1e12 FLOPs take 1.1 ms on v6e (at the 9.1e14 of that page; the book's own table has 9.2e14)."""
    assert matmul_bounds(Matmul(1e4, 1e4, 5e3), CHIPS["v6e"]).compute_s == pytest.approx(1.1e-3, rel=0.02)


def test_book_part_1_dot_product():
    """Intensity 1/2. The book counts N - 1 additions, matmul.py N: the limit is the same."""
    N = 10**6
    assert Matmul(1, N, 1).intensity == pytest.approx((2 * N - 1) / (4 * N + 2), rel=1e-5)
    assert Matmul(1, N, 1).intensity == pytest.approx(1 / 2, rel=1e-5)


def test_book_part_1_intensity_of_a_matmul():
    """BDF / (BD + DF + BF), which is about B if B is small."""
    B, D, F = 256, 8192, 32768
    assert Matmul(B, D, F).intensity == pytest.approx(B * D * F / (B * D + D * F + B * F), rel=1e-12)
    assert Matmul(16, D, F).intensity == pytest.approx(16, rel=0.003)


@pytest.mark.parametrize("chip", [v5e_2025, v5e_2026, CHIPS["v5e"]], ids=["2025", "2026", "table"])
def test_book_part_1_critical_batch(chip):
    """240 tokens on v5e; the exact number for D = F = 8192 is slightly larger."""
    matmul = Matmul(1, 8192, 8192)
    assert matmul_lib.critical_batch_rule(matmul, chip) == pytest.approx(240, rel=0.015)
    exact = matmul_lib.critical_batch(matmul, chip)
    assert 240 < exact < 260
    bounds = [matmul_bounds(dataclasses.replace(matmul, m=exact * by), chip).bound for by in (0.999, 1.001)]
    assert bounds == ["memory", "compute"]


def test_book_part_1_lower_and_upper_bound():
    """The bounds are max(T_math, T_comms) and their sum, which is at most twice that."""
    bounds = matmul_bounds(Matmul(128, 4096, 4096), v5e_2026)
    assert bounds.lower_s == max(bounds.compute_s, bounds.memory_s)
    assert bounds.lower_s < bounds.upper_s == bounds.compute_s + bounds.memory_s <= 2 * bounds.lower_s


def test_book_part_1_tiles():
    """A footnote: matmul tiles of bm x bk and bk x bn are loaded at an intensity of bm * bn / (bm + bn)."""
    bm, bk, bn = 512, 1024, 256
    tile = Matmul(bm, bk, bn)
    loaded = tile.nbytes - 2 * bm * bn
    assert tile.flops / loaded == pytest.approx(bm * bn / (bm + bn), rel=1e-12)


@pytest.mark.parametrize("link_bytes_per_s, D", [(5e10, 7880), (4.5e10, 8756)], ids=["2025", "2026"])
def test_book_part_1_network_of_two_chips(link_bytes_per_s, D):
    """Partial products are copied to the other chip: compute-bound from D / 2 = C / W on, whatever B is."""
    chip = what_if("v5e", link_bytes_per_s=link_bytes_per_s)

    def bound(D, B):
        sizes = dict(B=B, D=D, F=8192)
        return sharded_matmul("X[B, D_T] . Y[D_T, F] -> Z[B, F]", sizes=sizes, mesh=dict(T=2), chip=chip).bound

    assert [bound(D + d, B) for B in (4096, 16384) for d in (-80, 80)] == ["communication", "computation"] * 2


@pytest.mark.parametrize("chip, batch", [(v5e_2025, 243), (v5e_2026, 240)], ids=["2025", "2026"])
def test_book_part_1_question_1(chip, batch):
    """int8: BD + DF + BF bytes, 2BDF OPs, an intensity of 2B, B > 243 (2026: 240)."""
    B, D, F = 64, 8192, 16384
    matmul = Matmul(B, D, F, **int8)
    assert (matmul.nbytes, matmul.flops) == (B * D + D * F + B * F, 2 * B * D * F)
    assert matmul.intensity == pytest.approx(2 * B, rel=0.02)
    assert matmul_lib.critical_batch_rule(matmul, chip) == pytest.approx(batch, rel=0.002)
    bounds = matmul_bounds(matmul, chip)
    assert bounds.compute_s == 2 * B * D * F / 3.94e14
    assert bounds.memory_s == (B * D + D * F + B * F) / chip.hbm_bytes_per_s


def test_book_part_1_question_2():
    """int8 weights, bf16 activations and arithmetic: B > 120."""
    matmul = Matmul(120, 8192, 8192, rhs_dtype="int8")
    assert matmul.dtype == "bf16"
    assert matmul_lib.critical_batch_rule(matmul, v5e_2026) == pytest.approx(120, rel=0.002)
    assert 120 < matmul_lib.critical_batch(matmul, v5e_2026) < 128


def test_book_part_1_question_4():
    """With one int8 matrix for each batch element there are B matmuls of one row: an intensity of 2 for any B."""
    assert Matmul(1, 4096, 4096, **int8).intensity == pytest.approx(2, rel=1e-3)
    assert matmul_bounds(Matmul(1, 4096, 4096, **int8), v5e_2026).bound == "memory"


# -- matmuls on a chip: the scaling book, part 2


def test_book_part_2_question_1():
    """400 GB of weights over 32 v4: 12.5 GB of HBM each, about 10 ms."""
    assert 200e9 * 2 / 32 / CHIPS["v4"].hbm_bytes_per_s == pytest.approx(10e-3, rel=0.05)


@pytest.mark.parametrize("pcie, batch", [(1.5e10, 61_000), (1.6e10, 57_500)], ids=["2025", "2026"])
def test_book_part_2_question_3(pcie, batch):
    """Operands in the host's memory, v6e: B > 61,000 (2026: 57,500).

    The book assumes B << D, so D in the hundreds of thousands. For the D of any model no batch is enough: rows of
    2D + 8D bytes over PCIe take longer than their FLOPs unless D > 5/4 * C/W.
    """
    chip = what_if("v6e", pcie_bytes_per_s=pcie)
    mlp = lambda D: Matmul(1, D, 4 * D)
    assert matmul_lib.critical_batch_rule(mlp(8192), chip, memory="pcie") == pytest.approx(batch, rel=0.005)
    assert matmul_lib.critical_batch(mlp(10**9), chip, memory="pcie") == pytest.approx(batch, rel=0.005)
    assert matmul_lib.critical_batch(mlp(8192), chip, memory="pcie") == math.inf
    least_D = 5 / 4 * chip.bf16_flops_per_s / pcie
    assert matmul_lib.critical_batch(mlp(0.99 * least_D), chip, memory="pcie") == math.inf
    assert matmul_lib.critical_batch(mlp(1.01 * least_D), chip, memory="pcie") > 100 * least_D / 2


@pytest.mark.parametrize("chip, batch, exact", [(v5e_2025, 271, 263), (v5e_2026, 267, 259)], ids=["2025", "2026"])
def test_book_part_2_question_4_1(chip, batch, exact):
    """int8[B, 4096] by int8[4096, 16384] on v5e: B > 271 (2026: 267), as the book rounds 1.34e8 to 1.3e8."""
    matmul = Matmul(1, 4096, 16384, **int8)
    assert matmul_lib.critical_batch(matmul, chip) == pytest.approx(exact, abs=0.5)
    rounded = 6.7e7 / (1.3e8 * chip.hbm_bytes_per_s / 3.94e14 - 2e4)
    assert rounded == pytest.approx(batch, abs=0.5)


@pytest.mark.parametrize("chip", [v5e_2025, v5e_2026], ids=["2025", "2026"])
def test_book_part_2_question_4_2(chip):
    """The same from VMEM, 22 times as fast: B > 11."""
    matmul = Matmul(1, 4096, 16384, **int8)
    assert matmul_lib.critical_batch(matmul, chip, memory="vmem") == pytest.approx(11, abs=0.15)


def test_book_part_2_vmem():
    """ "an arithmetic intensity of only 10-20", from VMEM."""
    ridge = lambda dtype: v5e_2026.flops_per_s(dtype) / matmul_lib.memory_bytes_per_s(v5e_2026, "vmem")
    assert ridge("bf16") == pytest.approx(10.9, abs=0.1) and ridge("int8") == pytest.approx(21.8, abs=0.1)


def test_book_part_2_question_5():
    """bf16[8, 128, 8192] from one corner of a v5e 4x4 to the other, half through each port: 6 us, and 188 us.

    The exact time is 186 us, as the book rounds 16.8 MB to 17. Its edition of 2026 adds the two; here the longer one
    counts.
    """
    axis, half = Axis(4, 4.5e10, wrap=False), 2 * 8 * 128 * 8192 / 2
    assert permute(half).seconds(axis) == pytest.approx(186.4e-6, abs=0.1e-6)
    assert permute(half).seconds(axis) == pytest.approx(188e-6, rel=0.01)
    assert 6 * axis.hop_s == pytest.approx(6e-6)


def test_book_part_2_question_6():
    """int8[128k, 128k] by bf16[8, 128k], v5e: 66 ms over 16 PCIe links, then 19 ms of HBM and 1.3 ms of FLOPs.

    The exact times are 21.2 and 1.40 ms: the array has 16 GiB, 17.2 GB, and the book truncates 1.395.
    """
    edge = 128 * 1024
    bounds = matmul_bounds(Matmul(8, edge, edge, rhs_dtype="int8"), v5e_2025)
    assert bounds.memory_s == pytest.approx(21.2e-3, rel=0.002) == pytest.approx(19.75e-3 * 2**34 / 16e9, rel=0.002)
    assert bounds.compute_s == pytest.approx(1.395e-3, rel=0.001)
    assert bounds.bound == "memory"
    chip = what_if("v5e", pcie_bytes_per_s=1.5e10)
    assert 16e9 / 16 / matmul_lib.memory_bytes_per_s(chip, "pcie") == pytest.approx(66e-3, rel=0.02)


# -- matmuls on a chip, by hand


def test_matmul_by_hand():
    """f32[2, 3] . bf16[3, 5] -> int8[2, 5]; 60 FLOPs, 24 + 30 + 10 bytes."""
    matmul = Matmul(2, 3, 5, "f32", "bf16", "int8")
    assert (matmul.flops, matmul.nbytes, matmul.intensity, matmul.dtype) == (60, 64, 60 / 64, "f32")
    chip = what_if("tpu7x", bf16_flops_per_s=30, hbm_bytes_per_s=16)
    bounds = matmul_bounds(matmul, chip)
    assert (bounds.compute_s, bounds.memory_s, bounds.bound) == (2, 4, "memory")
    a_device = matmul_bounds(matmul, chip, per="device")
    assert (a_device.compute_s, a_device.memory_s) == (4, 8)
    assert matmul_bounds(matmul, chip, memory="vmem").memory_s == 4 / 22


@pytest.mark.parametrize(
    ("lhs", "rhs", "multiplied", "nbytes"),
    [
        ("bf16", "f32", "f32", 2 * 6 + 4 * 15 + 4 * 10),
        ("f32", "bf16", "f32", 4 * 6 + 2 * 15 + 4 * 10),
        ("int8", "bf16", "bf16", 1 * 6 + 2 * 15 + 4 * 10),
        ("bf16", "int8", "bf16", 2 * 6 + 1 * 15 + 4 * 10),
        ("int4", "int8", "int8", 0.5 * 6 + 1 * 15 + 4 * 10),
        ("fp8", "fp8", "fp8", 1 * 6 + 1 * 15 + 4 * 10),
    ],
)
def test_operands_are_multiplied_in_the_wider_dtype(lhs, rhs, multiplied, nbytes):
    """It may be on either side. The dtype of the result, here f32, matters for its bytes alone."""
    matmul = Matmul(2, 3, 5, lhs, rhs, "f32")
    assert (matmul.dtype, matmul.nbytes) == (multiplied, nbytes)
    chip = CHIPS["tpu7x"] if multiplied in ("f32", "bf16", "fp8") else CHIPS["v5e"]
    assert matmul_bounds(matmul, chip).compute_s == 60 / chip.flops_per_s(multiplied)


def test_tpu7x_ridge():
    """313 FLOPs a byte for bf16 and twice that for fp8, which has half of the bytes: the batch is about the same."""
    chip, fp8 = CHIPS["tpu7x"], dict(lhs_dtype="fp8", rhs_dtype="fp8", out_dtype="bf16")
    assert matmul_lib.critical_batch_rule(Matmul(1, 8192, 8192), chip) == pytest.approx(312.6, abs=0.1)
    assert matmul_lib.critical_batch_rule(Matmul(1, 8192, 8192, **fp8), chip) == pytest.approx(312.6, abs=0.1)
    for per in ("chip", "device"):
        bounds = [matmul_bounds(Matmul(m, 8192, 8192), chip, per=per).bound for m in (300, 340)]
        assert bounds == ["memory", "compute"]


@pytest.mark.parametrize("dtypes", [*itertools.product(["f32", "bf16", "int8"], repeat=3)])
@pytest.mark.parametrize("k, n", [(512, 2048), (8192, 1024), (64, 64)])
def test_critical_batch_is_where_the_bound_changes(dtypes, k, n):
    critical = matmul_lib.critical_batch(Matmul(1, k, n, *dtypes), CHIPS["v5e"])
    bound = lambda m: matmul_bounds(Matmul(m, k, n, *dtypes), CHIPS["v5e"]).bound
    if critical == math.inf:
        assert bound(1e12) == "memory"
    else:
        assert (bound(0.999 * critical), bound(1.001 * critical)) == ("memory", "compute")
        assert critical > matmul_lib.critical_batch_rule(Matmul(1, k, n, *dtypes), CHIPS["v5e"])


# -- sharded matmuls: the scaling book, part 3


def steps_of(notation: str, mesh: dict | None = None, chip=CHIPS["v4"], **sizes) -> matmul_lib.ShardedMatmul:
    mesh = mesh or dict(X=4, Y=4, Z=4)
    dims = {dim for array in matmul_lib.parse_matmul(notation) for dim in array.sharding}
    return sharded_matmul(notation, sizes={dim: 4096 for dim in dims} | sizes, mesh=mesh, chip=chip)


def shown(prediction: matmul_lib.ShardedMatmul) -> list[str]:
    return [f"{step.kind} {''.join(step.axes)} {step.after}".replace("  ", " ") for step in prediction.steps]


def test_book_part_3_pop_quiz_1():
    """int8[128, 2048] as A[I_XY, J] on 2 x 8 x 2: int8[8, 2048], 16,384 bytes a device, 512 KiB in all."""
    mesh = {name: Axis(size, 1e9) for name, size in dict(X=2, Y=8, Z=2).items()}
    local = Layout("A", dict(I=("X", "Y"), J=())).local(dict(I=128, J=2048), mesh)
    assert local == dict(I=8, J=2048)
    assert math.prod(local.values()) * 32 == 512 * 2**10


def test_book_part_3_question_1():
    """A[I_X, J, K] on 4 x 8 x 2 takes 16 times the bytes of one copy."""
    mesh = {name: Axis(size, 1e9) for name, size in dict(X=4, Y=8, Z=2).items()}
    sizes = dict(I=64, J=3, K=5)
    local = Layout("A", dict(I=("X",), J=(), K=())).local(sizes, mesh)
    assert math.prod(local.values()) * 4 * 8 * 2 / math.prod(sizes.values()) == 16


def test_book_part_3_question_2_over_idle_axes():
    """The 2026 edition's "fun fact": over Z as well it takes 11.5 us in place of 23, and 31 in place of 46.

    V / (W_ICI * n_axes) is for long axes; rings of 4 take 1 + 1/4 (+ 1/16) times that.
    """
    gathered = 2 * 1024 * 4096
    over = lambda V, *sizes: collective_s("all_gather", V, v4p(*sizes), spread=True)
    assert over(gathered / 4, 4, 4) == pytest.approx(11.65e-6 * (1 + 1 / 4), rel=0.002)
    assert over(gathered, 4, 4, 4) == pytest.approx(31.07e-6 * (1 + 1 / 4 + 1 / 16), rel=0.002)


@pytest.mark.parametrize("rows, columns", [("I", "K"), ("I_X", "K"), ("I", "K_Y"), ("I_X", "K_Y")])
def test_book_part_3_case_1(rows, columns):
    prediction = steps_of(f"A[{rows}, J] . B[J, {columns}] -> C[{rows}, {columns}]")
    assert shown(prediction) == [f"matmul C[{rows}, {columns}]"]
    assert prediction.communication_s == 0 and prediction.bound == "computation"
    assert prediction.steps[0].flops == 2 * 4096**3 / (4 ** (prediction.steps[0].after.count("_")))


def test_book_part_3_case_2():
    assert shown(steps_of("A[I, J_X] . B[J, K] -> C[I, K]")) == ["all_gather X A[I, J]", "matmul C[I, K]"]
    assert shown(steps_of("A[I, J] . B[J_X, K] -> C[I, K]")) == ["all_gather X B[J, K]", "matmul C[I, K]"]
    # "or the contracting dimensions are sharded along different axes": both inputs are gathered, not one
    both = steps_of("A[I, J_X] . B[J_Y, K] -> C[I, K]")
    assert shown(both) == ["all_gather X A[I, J]", "all_gather Y B[J, K]", "matmul C[I, K]"]
    part = steps_of("A[I, J_XY] . B[J_Y, K] -> C[I, K]")  # no common prefix: B's shards have other rows
    assert shown(part) == ["all_gather XY A[I, J]", "all_gather Y B[J, K]", "matmul C[I, K]"]


def test_book_part_3_case_2_several_axes():
    assert shown(steps_of("A[I, J_XY] . B[J, K] -> C[I, K]"))[0] == "all_gather XY A[I, J]"
    assert shown(steps_of("A[I_XY, J] . B[J, K] -> C[I_X, K]")) == ["matmul C[I_XY, K]", "all_gather Y C[I_X, K]"]


def test_book_part_3_is_wrong_on_the_outer_axis():
    """A[I_XY, J] -> A[I_Y, J] "is also an AllGather", over X: that leaves blocks y, Y + y, ..., not those of I_Y.

    "The order of the multiple mesh-axis subscripts matters", as the book says elsewhere.
    """
    prediction = steps_of("A[I_XY, J] . B[J, K] -> C[I_Y, K]")
    assert shown(prediction) == ["matmul C[I_XY, K]", "all_gather XY C[I, K]", "slice Y C[I_Y, K]"]
    blocks = np.arange(16).reshape(4, 4)  # of I, by x and y
    assert not np.array_equal(blocks[:, 1], np.split(np.arange(16), 4)[1])


def test_book_part_3_case_2_before_or_after():
    """A[I_X, J] . B[J, K] -> C[I, K] could gather A before the matmul. It gathers C after a quarter of the FLOPs."""
    prediction = steps_of("A[I_X, J] . B[J, K] -> C[I, K]")
    assert shown(prediction) == ["matmul C[I_X, K]", "all_gather X C[I, K]"]
    assert prediction.steps[0].flops == 2 * 4096**3 / 4


def test_book_part_3_case_3():
    """The output decides: an all-reduce, a reduce-scatter along either dim, or neither."""
    local = "matmul C[I, K]{U_X}"
    assert shown(steps_of("A[I, J_X] . B[J_X, K] -> C[I, K]")) == [local, "all_reduce X C[I, K]"]
    assert shown(steps_of("A[I, J_X] . B[J_X, K] -> C[I, K_X]")) == [local, "reduce_scatter X C[I, K_X]"]
    assert shown(steps_of("A[I, J_X] . B[J_X, K] -> C[I_X, K]")) == [local, "reduce_scatter X C[I_X, K]"]
    assert shown(steps_of("A[I, J_X] . B[J_X, K] -> C[I, K]{U_X}")) == [local]
    seconds = [steps_of(f"A[I, J_X] . B[J_X, K] -> C[I, {K}]").communication_s for K in ("K", "K_X")]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=1e-12)


def test_book_part_3_case_4():
    """It is illegal; of the two operands, the output decides which is gathered."""
    with pytest.raises(ValueError, match=r"C\[I_X, K_X\] uses X twice.*block \(i, i\)"):
        steps_of("A[I_X, J] . B[J, K_X] -> C[I_X, K_X]")
    assert shown(steps_of("A[I_X, J] . B[J, K_X] -> C[I, K_X]")) == ["all_gather X A[I, J]", "matmul C[I, K_X]"]
    assert shown(steps_of("A[I_X, J] . B[J, K_X] -> C[I_X, K]")) == ["all_gather X B[J, K]", "matmul C[I_X, K]"]
    # The output does not decide: the smaller operand is gathered.
    for sizes, gathered in ((dict(I=64), "A[I, J]"), (dict(K=64), "B[J, K]")):
        assert shown(steps_of("A[I_X, J] . B[J, K_X] -> C[I, K]", **sizes))[0] == f"all_gather X {gathered}"


def test_book_part_3_all_to_all():
    """A subscript moves to another dim for a quarter of an all-gather; on a ring of 4, 3 blocks in place of 2 * 4."""
    prediction = steps_of("A[I_X, J] . B[J, K] -> C[I, K_X]")
    assert shown(prediction) == ["matmul C[I_X, K]", "all_to_all X C[I, K_X]"]
    gathered = steps_of("A[I_X, J] . B[J, K] -> C[I, K]").communication_s
    assert prediction.communication_s == pytest.approx(gathered * 3 / 8, rel=1e-12)


def test_book_part_3_slice():
    """A dim that only the output shards is sliced before the matmul: no communication, an eighth of the work."""
    prediction = steps_of("A[I, J] . B[J, K] -> C[I_X, K_Y]", mesh=dict(X=4, Y=2))
    assert shown(prediction) == ["slice X A[I_X, J]", "slice Y B[J, K_Y]", "matmul C[I_X, K_Y]"]
    assert (prediction.communication_s, prediction.steps[-1].flops) == (0, 2 * 4096**3 / 8)


@pytest.mark.parametrize(
    "notation, steps",
    [
        ("A[I_XY, J] . B[J, K] -> C[I, K_Y]", ["C[I_XY, K]", "all_to_all Y C[I_X, K_Y]", "all_gather X C[I, K_Y]"]),
        ("A[I_X, J] . B[J, K] -> C[I_YZ, K]", ["C[I_X, K]", "all_gather X C[I, K]", "slice YZ C[I_YZ, K]"]),
        (  # gathered first, there would be four times as many bytes to reduce
            "A[I_Y, J_X] . B[J_X, K] -> C[I_X, K]",
            ["C[I_Y, K]{U_X}", "all_reduce X C[I_Y, K]", "all_gather Y C[I, K]", "slice X C[I_X, K]"],
        ),
        (
            "A[I_Y, J_XZ] . B[J_XZ, K] -> C[I_YX, K]",
            ["C[I_Y, K]{U_XZ}", "reduce_scatter X C[I_YX, K]{U_Z}", "all_reduce Z C[I_YX, K]"],
        ),
        ("A[I_X, J_Y] . B[J_Y, K] -> C[I, K_XY]", ["C[I_X, K]{U_Y}", "all_to_all X C[I, K_X]{U_Y}"]),
    ],
)
def test_order_of_collectives(notation, steps):
    """The step with the fewest bytes comes first; an all-to-all may come before the reduce-scatter that it allows."""
    matmul, *others = steps
    prediction = shown(steps_of(notation))
    assert prediction[: len(steps)] == [f"matmul {matmul}", *others]
    assert len(prediction) == len(steps) or prediction[len(steps) :] == ["reduce_scatter Y C[I, K_XY]"]


v5p_2025 = what_if("v5p", link_bytes_per_s=9e10)


def test_book_part_3_question_4_costs():
    """Gathering B[D_X, F] takes 2DF bytes, 2BDF FLOPs; all-reducing local products 4BF bytes, 2BDF / X FLOPs."""
    B, D, F, X = 1024, 8192, 32768, 4
    sizes = dict(B=B, D=D, F=F)
    first = steps_of("P[B, D] . Q[D_X, F] -> R[B, F]", chip=v5p_2025, **sizes)
    second = steps_of("P[B, D_X] . Q[D_X, F] -> R[B, F]", chip=v5p_2025, **sizes)
    assert (first.steps[0].nbytes, first.steps[1].flops) == (2 * D * F, 2 * B * D * F)
    assert (second.steps[1].nbytes, second.steps[0].flops) == (2 * B * F, 2 * B * D * F / X)
    W, C = 1.8e11, 459e12
    assert first.communication_s == pytest.approx(2 * D * F / W) and first.compute_s == 2 * B * D * F / C
    assert second.communication_s == pytest.approx(4 * B * F / W) and second.compute_s == 2 * B * D * F / X / C


def test_book_part_3_question_4_when():
    """The first is compute-bound from B = 2550 on, the second below X = D / 5100. For large B the second is faster
    from D = 5100 on.

    The edition of 2025 had 2BD bytes for the first, and F in place of B in its bound: it gathered the wrong operand.
    """
    first = lambda B, D: steps_of("P[B, D] . Q[D_X, F] -> R[B, F]", chip=v5p_2025, B=B, D=D, F=16384)
    second = lambda B, D: steps_of("P[B, D_X] . Q[D_X, F] -> R[B, F]", chip=v5p_2025, B=B, D=D, F=16384)
    assert [first(B, 8192).bound for B in (2528, 2576)] == ["communication", "computation"]
    assert [second(8192, D).bound for D in (4 * 5080, 4 * 5120)] == ["communication", "computation"]
    for D, faster in ((5080, True), (5120, False)):
        assert (first(8192, D).overlapped_s < second(8192, D).overlapped_s) == faster
    for B, faster in ((1000, False), (1048, True)):  # both bound by communication: the second is faster if D > 2B
        assert (first(B, 2048).overlapped_s < second(B, 2048).overlapped_s) == faster


def test_book_part_3_question_4_by_an_unreduced_output():
    """An unreduced output selects the second strategy, too: P is sliced along D."""
    prediction = steps_of("P[B, D] . Q[D_X, F] -> R[B, F]{U_X}")
    assert shown(prediction) == ["slice X P[B, D_X]", "matmul R[B, F]{U_X}"]


@pytest.mark.parametrize("chip", ["v4", "v5p"])
def test_book_part_3_question_5(chip):
    """A replicated result on 4x4x4 at the least latency: the first two of four strategies are equally good."""
    predict = lambda notation: steps_of(notation, chip=CHIPS[chip], I=8192, J=8192, K=8192)
    rows = predict("A[I_XYZ, J] . B[J, K] -> C[I, K]")
    columns = predict("A[I, J] . B[J, K_XYZ] -> C[I, K]")
    summands = predict("A[I, J_XYZ] . B[J_XYZ, K] -> C[I, K]")
    alone = predict("A[I, J] . B[J, K] -> C[I, K]")
    assert rows.overlapped_s == columns.overlapped_s and rows.compute_s == columns.compute_s
    assert summands.communication_s == pytest.approx(2 * rows.communication_s, rel=1e-12)
    assert {strategy.steps[0].flops for strategy in (rows, columns, summands)} == {2 * 8192**3 / 64}
    assert (alone.communication_s, alone.steps[0].flops, alone.useful_share) == (0, 2 * 8192**3, 1 / 64)
    assert min(rows.overlapped_s, summands.overlapped_s, alone.overlapped_s) == rows.overlapped_s


@pytest.mark.parametrize(
    "notation, kinds, seconds",  # the book gives no answer; V * 3/4 / W on a line of 4
    [
        ("A[I_X, J_Y] . B[J_Y, K] -> C[I_X, K]", ["matmul", "all_reduce"], 2 * 3 / 4 * (2 * 4096 * 4096 / 4) / 4.5e10),
        ("A[I_X, J] . B[J_X, K_Y] -> C[I_X, K_Y]", ["all_gather", "matmul"], 3 / 4 * (2 * 4096 * 4096 / 4) / 4.5e10),
        ("A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]", ["matmul"], 0),
    ],
)
def test_book_part_3_question_6(notation, kinds, seconds):
    """v5e 4x4: an all-reduce; in training an all-gather of weights; in inference nothing."""
    prediction = steps_of(notation, mesh=dict(X=4, Y=4), chip=v5e_2026)
    assert [step.kind for step in prediction.steps] == kinds
    assert prediction.communication_s == pytest.approx(seconds)
    assert prediction.steps[kinds.index("matmul")].flops == 2 * 4096**3 / 16


def test_book_part_3_question_7():
    """Two layers of 536 MB of weights, v5e 2x2: In is gathered and Out reduce-scattered, not the weights gathered."""
    predict = lambda notation: steps_of(notation, mesh=dict(X=2, Y=2), chip=v5e_2026, B=128, D=8192, F=32768)
    fsdp = predict("In[B_X, D] . W[D_XY, F] -> H[B_X, F]")
    first = predict("In[B, D_XY] . W[D, F_XY] -> H[B, F_XY]")
    second = predict("H[B, F_XY] . W[F_XY, D] -> Out[B, D_XY]")
    assert shown(fsdp) == ["all_gather XY W[D, F]", "matmul H[B_X, F]"]
    assert fsdp.steps[0].nbytes == 2 * 8192 * 32768 == pytest.approx(536e6, rel=0.002)
    assert shown(first) == ["all_gather XY In[B, D]", "matmul H[B, F_XY]"]
    assert shown(second) == ["matmul Out[B, D]{U_XY}", "reduce_scatter XY Out[B, D_XY]"]
    assert first.steps[0].nbytes == second.steps[1].nbytes == 2 * 128 * 8192 == pytest.approx(2e6, rel=0.05)
    assert first.communication_s == second.communication_s < fsdp.communication_s / 200


def test_book_part_3_question_9():
    """[N, M] is gathered, or [N, K] reduce-scattered, in a ratio of M/K."""
    gather = steps_of("A[N, M_X] . B[M, K] -> C[N, K_X]", N=512, M=4096, K=1024)
    scatter = steps_of("A[N, M_X] . B[M_X, K] -> C[N, K_X]", N=512, M=4096, K=1024)
    assert [gather.steps[i].kind for i in (0, 1, 2)] == ["all_gather", "slice", "matmul"]
    assert scatter.steps[1].kind == "reduce_scatter"
    assert gather.communication_s / scatter.communication_s == pytest.approx(4096 / 1024, rel=1e-12)


# -- sharded matmuls on TPU7x


def test_tpu7x_tokens_that_hide_a_gather_of_weights():
    """2307e12 / 200e9 = 11,535 tokens a chip on one axis. Google's guide has 11.5k; MaxText has 12,800 at 180e9."""
    bounds = []
    for tokens, link in ((11_500, 100e9), (11_600, 100e9), (12_700, 90e9), (12_900, 90e9)):
        chip, sizes = what_if("tpu7x", link_bytes_per_s=link), dict(B=8 * tokens, D=8192, F=28672)
        bounds.append(steps_of("In[B_X, D] . W[D_X, F] -> Out[B_X, F]", dict(X=8), chip, **sizes).bound)
    assert bounds == ["communication", "computation"] * 2


def test_tpu7x_width_that_hides_tensor_parallelism():
    """4 ways on an axis of the torus need an MLP of 46,000, says the guide; the gathered activations cancel."""

    def bound(F):
        sizes = dict(B=16384, D=8192, F=F)
        return steps_of("In[B, D_X] . W[D, F_X] -> H[B, F_X]", dict(X=4), CHIPS["tpu7x"], **sizes).bound

    assert [bound(F) for F in (46_000, 46_400)] == ["communication", "computation"]


def test_the_link_between_dies():
    """Two dies, linked by 600 GB/s one way, need a width of 1,923. A die has half of the chip's FLOP/s."""
    chip = what_if("tpu7x", bf16_flops_per_s=2307e12 / 2)
    mesh = dict(X=Axis(2, 600e9, wrap=False))
    bounds = [
        steps_of("In[B, D_X] . W[D, F_X] -> H[B, F_X]", mesh, chip, B=16384, D=8192, F=F).bound for F in (1900, 1950)
    ]
    assert bounds == ["communication", "computation"]


@pytest.mark.parametrize(
    "chip, mesh, wraps",
    [
        ("tpu7x", dict(X=4, Y=8), [True, True]),
        ("tpu7x", dict(X=4, Y=2), [False, False]),
        ("tpu7x", dict(X=1, Y=4), [False, True]),  # an axis of one chip does not count
        ("tpu7x", dict(X=16), [True]),
        ("v5e", dict(X=4, Y=4), [False, False]),
        ("v5e", dict(X=8, Y=16), [False, True]),
        ("tpu7x", dict(X=Axis(2, 6e11, wrap=False), Y=4), [False, True]),
    ],
)
def test_mesh_axes(chip, mesh, wraps):
    assert [axis.wrap for axis in matmul_lib.mesh_axes(CHIPS[chip], mesh).values()] == wraps


# -- sharded matmuls, performed


def block_of(array: np.ndarray, layout: Layout, at: dict[str, int], mesh: dict[str, int]) -> np.ndarray:
    """The shard of an array on the chip at a coordinate of the mesh."""
    slices = []
    for axes, size in zip(layout.sharding.values(), array.shape, strict=True):
        index, shards = 0, 1
        for axis in axes:
            index, shards = index * mesh[axis] + at[axis], shards * mesh[axis]
        slices.append(slice(index * size // shards, (index + 1) * size // shards))
    return array[tuple(slices)]


def coordinates(mesh: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(mesh, at, strict=True)) for at in itertools.product(*map(range, mesh.values()))]


def perform(
    steps: list[matmul_lib.Step], layouts: list[Layout], arrays: list[np.ndarray], mesh: dict[str, int]
) -> dict:
    """Returns {coordinate: shard of the product} after performing the steps, and checks their bytes and FLOPs."""
    key = lambda at: tuple(at[axis] for axis in mesh)
    dims = {layout.name: [*layout.sharding] for layout in layouts}
    lhs, rhs, out = (layout.name for layout in layouts)
    has = {
        layout.name: {key(at): block_of(array, layout, at, mesh) for at in coordinates(mesh)}
        for layout, array in zip(layouts, arrays, strict=False)
    }
    for step in steps:
        name = step.before.partition("[")[0]
        if step.kind == "matmul":
            subscripts = ",".join("".join(dims[array]) for array in (lhs, rhs)) + "->" + "".join(dims[out])
            has[out] = {at: np.einsum(subscripts, has[lhs][at], has[rhs][at]) for at in has[lhs]}
            shared = [
                has[lhs][key(coordinates(mesh)[0])].shape[dims[lhs].index(dim)] for dim in dims[lhs] if dim in dims[rhs]
            ]
            product = has[out][key(coordinates(mesh)[0])].size
            assert step.flops == 2 * product * math.prod(shared)
            continue
        dim = dims[name].index(step.dim) if step.dim else None
        after = {}
        for at in coordinates(mesh):
            along = [at | other for other in coordinates({axis: mesh[axis] for axis in step.axes})]
            blocks, own = [has[name][key(other)] for other in along], along.index(at)
            match step.kind:
                case "all_gather":
                    after[key(at)] = np.concatenate(blocks, dim)
                case "slice":
                    after[key(at)] = np.split(blocks[own], len(blocks), dim)[own]
                case "all_reduce":
                    after[key(at)] = sum(blocks)
                case "reduce_scatter":
                    after[key(at)] = np.split(sum(blocks), len(blocks), dim)[own]
                case "all_to_all":
                    to_dim = dims[name].index(step.to_dim)
                    received = [np.split(block, len(blocks), to_dim)[own] for block in blocks]
                    after[key(at)] = np.concatenate(received, dim)
        larger = after if step.kind == "all_gather" else has[name]
        assert step.nbytes == (0 if step.kind == "slice" else 2 * larger[key(coordinates(mesh)[0])].size)
        has[name] = after
    return has[out]


def random_notation(rng: random.Random, mesh: dict[str, int], free: tuple[str, str], summed: str) -> str:
    """Returns any legal notation: axes on any dims, in any order, often the same along the contracted dims."""

    def shard(dims: str, axes: list[str], share: float) -> dict[str, str]:
        sharding = dict.fromkeys(dims, "")
        for axis in rng.sample(axes, len(axes)):
            sharding[rng.choice(dims)] += axis if rng.random() < share else ""
        return sharding

    axes = [*mesh]
    alike = shard(summed, axes, 0.5) if rng.random() < 0.5 else {}
    left = [axis for axis in axes if axis not in "".join(alike.values())]
    lhs, rhs = (shard(dims + ("" if alike else summed), left, 0.6) | alike for dims in free)
    out = shard("".join(free), axes, 0.6)
    summands = {axis for operand in (lhs, rhs) for dim in summed for axis in operand[dim]} - {*"".join(out.values())}
    unreduced = "".join(axis for axis in sorted(summands) if rng.random() < 0.3)
    dims = lambda sharding: ", ".join(f"{dim}_{axes}" if axes else dim for dim, axes in sharding.items())
    text = lambda name, sharding: f"{name}[{dims(sharding)}]"
    return f"{text('A', lhs)} . {text('B', rhs)} -> {text('C', out)}" + (f"{{U_{unreduced}}}" if unreduced else "")


@pytest.mark.parametrize("seed", range(40))
def test_steps_give_the_product(seed):
    """Twelve random matmuls on random meshes, performed on each chip, give its shard of the product."""
    rng = random.Random(seed)
    seen = Counter()
    for _ in range(12):
        mesh = {axis: rng.choice([1, 2, 2, 3, 4]) for axis in "XYZ"[: rng.randint(1, 3)]}
        free, summed = rng.choice([("I", "K"), ("BT", "K"), ("I", "NH")]), rng.choice(["J", "J", "JL"])
        notation = random_notation(rng, mesh, free, summed)
        layouts = matmul_lib.parse_matmul(notation)
        sizes = dict.fromkeys("".join(free) + summed, math.prod(mesh.values()))
        axes = {name: Axis(size, 1e9, name=name) for name, size in mesh.items()}
        prediction = sharded_matmul(notation, sizes=sizes, mesh=axes)
        numbers = np.random.default_rng(seed)
        arrays = [numbers.integers(-9, 9, [sizes[dim] for dim in array.sharding]) for array in layouts[:2]]
        has = perform(prediction.steps, layouts, arrays, mesh)
        subscripts = ",".join("".join(array.sharding) for array in layouts[:2]) + "->" + "".join(layouts[2].sharding)
        product, out = np.einsum(subscripts, *arrays), layouts[2]
        for at in coordinates(mesh):
            others = [at | other for other in coordinates({axis: mesh[axis] for axis in out.unreduced})]
            shard = sum(has[tuple(other.values())] for other in others)  # the sum of an unreduced output's summands
            np.testing.assert_array_equal(shard, block_of(product, out, at, mesh), err_msg=notation)
        seen.update(step.kind for step in prediction.steps)
        assert 0 < prediction.useful_share <= 1
        assert prediction.overlapped_s <= prediction.sequential_s
        assert prediction.sequential_s == prediction.compute_s + prediction.communication_s
    assert seen["matmul"] == 12


@pytest.mark.parametrize("seed", range(20))
def test_an_axis_used_twice_is_refused(seed):
    """Any of the three arrays may use it twice: in one dim or two, or sharded and unreduced at once."""
    rng = random.Random(seed)
    dims = [["I", "J"], ["J", "K"], ["I", "K"]]
    array, dim, other = rng.randrange(3), rng.randrange(2), rng.randrange(2)
    dims[array][dim] += "_X"
    unreduced = "{U_X}" if array == 2 and rng.random() < 0.3 else ""
    if not unreduced:
        dims[array][other] += "X" if other == dim else "_X"
    lhs, rhs, out = (", ".join(names) for names in dims)
    with pytest.raises(ValueError, match=rf"^{'ABC'[array]}\[.* uses X twice: chip i along X"):
        steps_of(f"A[{lhs}] . B[{rhs}] -> C[{out}]{unreduced}")


@pytest.mark.parametrize(
    "notation",
    [
        "A[I_X,J].B[J,K_Y]->C[I_X,K_Y]",
        "A[I_{X}, J] · B[J, K_{Y}] → C[I_X, K_Y]",
        "A [ I_X , J ] @ B[J,K_Y] -> C[I_X, K_Y]",
        "A[I_X, J] * B[J, K_Y] -> C[K_Y, I_X]",
    ],
)
def test_the_notation_may_be_written_otherwise(notation):
    assert [step.kind for step in steps_of(notation).steps] == ["matmul"]


def test_unreduced_is_read_and_shown():
    *_, out = matmul_lib.parse_matmul("A[I, J_XY] . B[J_XY, K] -> C[I, K] { U_{XY} }")
    assert out.unreduced == ("X", "Y") and str(out) == "C[I, K]{U_XY}"


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: steps_of("A[I, J] B[J, K] -> C[I, K]"), "is not of the form"),
        (lambda: steps_of("A[I, J] . B[J, K]"), "is not of the form"),
        (lambda: steps_of("A[I, J] . A[J, K] -> C[I, K]"), "is not of the form"),
        (lambda: steps_of("A[I, I] . B[I, K] -> C[K]"), "needs its own name"),
        (lambda: steps_of("A[I, 7] . B[I, K] -> C[K]"), "needs its own name"),
        (lambda: steps_of("A[I, J] . B[L, K] -> C[I, K]"), r"summed over \(none\)"),
        (lambda: steps_of("A[I, J] . B[J, K] -> C[I, J]"), "C has all the others, not I, J"),
        (lambda: steps_of("A[I, J] . B[I, J, K] -> C[I, K]"), r"summed over \(I, J\)"),
        (lambda: steps_of("A[I, J]{U_X} . B[J, K] -> C[I, K]"), "only the result may be left unreduced"),
        (lambda: steps_of("A[I_X, J] . B[J, K] -> C[I, K]{U_X}"), "X shards a contracted dim of neither A nor B"),
        (lambda: steps_of("A[I_W, J] . B[J, K] -> C[I, K]"), "no axis W in the mesh of X, Y, Z"),
        (lambda: steps_of("A[I_X, J] . B[J, K] -> C[I, K]", I=6), "I = 6 does not divide into 4 over X"),
        (lambda: steps_of("A[I, J] . B[J, K] -> C[I, K]", I=0.5), "I needs a size"),
        (lambda: steps_of("A[I, J] . B[J, K] -> C[I, K]", mesh=dict(X=2, Y=2, Z=2, W=2)), "4 axes, .* v4 has 3"),
        (lambda: steps_of("A[I, J] . B[J, K] -> C[I, K]", mesh=dict(X=0)), "not 0"),
        (lambda: steps_of("A[I, J] . B[J, K] -> C[I, K]", mesh=dict(data=2)), "'data': axes have one letter"),
        (lambda: Matmul(0, 1, 1), "over 0"),
        (lambda: Matmul(1, math.inf, 1), "over 0"),
        (lambda: Matmul(1, 1, 1, "fp4"), "'fp4' is not one of f32, bf16, fp8, int8, int4"),
        (lambda: Matmul(1, 1, 1, "fp8", "int8").dtype, "fp8 and int8"),
        (lambda: matmul_bounds(Matmul(1, 1, 1, "int8", "int8"), CHIPS["tpu7x"]), "'int8'; it has f32, bf16, fp8"),
        (lambda: matmul_bounds(Matmul(1, 1, 1), CHIPS["tpu7x"], memory="pcie"), "'pcie'"),
    ],
)
def test_matmul_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
