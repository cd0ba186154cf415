"""The cost of collectives, against the scaling book, and counted by hand on every link.

A test of the scaling book (https://jax-ml.github.io/scaling-book) is named by part and question. Where the book's
figures changed between 2025 and 2026, both are tested. Where it rounds or is wrong, the test says so.
"""

import math
from collections import Counter

import pytest

from hardware import CHIPS, Axis
from predicted import interconnect
from predicted.interconnect import Traffic, collective_s

# -- collectives: the scaling book, https://jax-ml.github.io/scaling-book. Its numbers are rounded.


def v5e(*sizes: int, wrap: bool) -> list[Axis]:
    """Part 2, "TPU specs": 4.5e10 bytes/s one way. A v5e axis wraps around only if it has 16 chips."""
    return [Axis(size, 4.5e10, wrap=wrap) for size in sizes]


v4p = lambda *sizes: [Axis(size, 4.5e10) for size in sizes]  # the same speed; a 4x4x4 wraps around on every axis


@pytest.mark.parametrize("size", [2, 4, 16, 64])
def test_book_all_gather_does_not_depend_on_the_number_of_devices(size):
    """Part 3, "How long does this take?": V / W_ICI, with W_ICI both ways."""
    assert collective_s("all_gather", 1e9, v4p(size)) == pytest.approx(1e9 / 9e10, rel=1e-12)


def test_book_all_gather_without_wraparound():
    """Part 3, pop quiz 2: bf16[2048, 8192] over the 4 of an 8x4 v5e: 377 us in a ring, 560 us on a line."""
    nbytes = 2 * 2048 * 8192
    assert collective_s("all_gather", nbytes, v5e(4, wrap=True)) == pytest.approx(377e-6, rel=0.02)
    assert collective_s("all_gather", nbytes, v5e(4, wrap=False)) == pytest.approx(560e-6, rel=0.02)
    assert collective_s("all_gather", nbytes, v5e(4, wrap=False)) == pytest.approx(3 * (nbytes / 4) / 4.5e10, rel=1e-12)


def test_book_all_gather_of_little():
    """The same quiz, part 2: bf16[256, 256] is latency-bound, 3 hops and 3 us."""
    (axis,) = v5e(4, wrap=False)
    traffic = interconnect.all_gather(2 * 256 * 256, 4, wrap=False)
    assert (traffic.steps, traffic.seconds(axis), traffic.bound(axis)) == (3, pytest.approx(3e-6), "latency")


def test_book_latency_bound():
    """Part 3, "A note on ICI latency": on v5e a buffer under 4.5e10 * 1e-6 = 45 kB is latency-bound."""
    (axis,) = v5e(16, wrap=True)
    bounds = [interconnect.all_gather(16 * block, 16).bound(axis) for block in (44_999, 45_001)]
    assert bounds == ["latency", "bandwidth"]


def test_book_question_2():
    """Part 3, question 2, v4p 4x4x4, bf16[1024, 4096]: all-gathers of 23 (X) and 46 us (XY), all-reduce of 11.6 us."""
    nbytes = 2 * 1024 * 4096
    assert collective_s("all_gather", nbytes / 4, v4p(4)) == pytest.approx(23e-6, rel=0.02)
    # The book has V / (2 * W_ICI), which holds for long axes; axes of 4 take (1 + 1/4) of it, see the next test.
    assert collective_s("all_gather", nbytes, v4p(4, 4), spread=True) == pytest.approx(46e-6 * 5 / 4, rel=0.02)
    assert collective_s("all_reduce", nbytes / 16, v4p(4)) == pytest.approx(11.6e-6, rel=0.02)


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_book_several_axes(num_axes):
    """Part 3, "What happens when we AllGather over multiple axes?": V / (W_ICI * n_axes)."""
    seconds = collective_s("all_gather", 1e12, v4p(*[256] * num_axes), spread=True)
    assert seconds == pytest.approx(1e12 / (9e10 * num_axes), rel=0.005)


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (8, 4), (4, 4, 4)])
def test_book_latency_of_several_axes(sizes):
    """The same section: T_min * sum |X_i| / 2."""
    assert collective_s("all_gather", 64, v4p(*sizes)) == pytest.approx(1e-6 * sum(sizes) / 2)


def test_book_question_3():
    """Part 3, question 3: 256 bytes over an axis of 4 that wraps around: 2 hops, 2 us."""
    assert collective_s("all_gather", 256, v4p(4)) == pytest.approx(2e-6, rel=1e-12)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_book_all_reduce(bidirectional):
    """Part 3, "How expensive is an AllReduce?": twice an all-gather."""
    seconds = [collective_s(kind, 1e9, v4p(8), bidirectional=bidirectional) for kind in ("all_reduce", "all_gather")]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=1e-12)


def test_book_one_way():
    """Part 3, "What have we learned?": (Axis - 1) / Axis * V / bandwidth."""
    assert collective_s("all_gather", 1e9, v4p(8), bidirectional=False) == pytest.approx(
        7 / 8 * 1e9 / 4.5e10, rel=1e-12
    )


@pytest.mark.parametrize("D", [2, 4, 10, 100])
def test_book_question_10(D):
    """Part 3, question 10: one way around D devices, N^2 (1 - 1/D) and N^2/2 (1 - 1/D) of N^2 scalars cross a link."""
    scalars = 10_000
    gathered = interconnect.all_gather(scalars, D, bidirectional=False)
    exchanged = interconnect.all_to_all(scalars / D, D, bidirectional=False)
    assert gathered.link_bytes == pytest.approx(scalars * (1 - 1 / D), rel=1e-12)
    assert exchanged.link_bytes == pytest.approx(scalars / 2 * (1 - 1 / D), rel=1e-12)


def test_book_all_to_all():
    """Part 3, summary: a quarter of an all-gather, both ways around a large ring."""
    gathered, exchanged = interconnect.all_gather(1e9, 1000), interconnect.all_to_all(1e9 / 1000, 1000)
    assert exchanged.link_bytes / gathered.link_bytes == pytest.approx(1 / 4, rel=0.003)


def test_book_all_to_all_over_axes():
    """Part 3, the all-to-all: V * max(A, B, C) / (4 * N * W_ICI) on an AxBxC mesh."""
    seconds = collective_s("all_to_all", 1e12, v4p(64, 64, 128), spread=True)  # 1e12 a device: V / N
    assert seconds == pytest.approx(1e12 * 128 / (4 * 9e10), rel=0.02)


def test_book_gather_to_every_chip():
    """Part 2, question 6, v5e 4x4, where no axis wraps around: each chip receives 15 of 16 GB over 2 axes, 167 ms."""
    assert collective_s("all_gather", 16e9, v5e(4, 4, wrap=False), spread=True) == pytest.approx(167e-3, rel=0.003)


def test_book_across_pods():
    """Part 5, "Scaling across pods": gradients of V bytes over many pods of M chips, 2 * V / (M * W_dcn)."""
    V, pods, (x, y) = 1e12, 1000, v4p(16, 16)
    inside = collective_s("all_reduce", V, [x, y])
    across = collective_s("all_reduce", V, [x, y, Axis(pods, 6.25e9, wrap=False)]) - inside
    assert across == pytest.approx(2 * V / (16 * 16 * 6.25e9), rel=0.002)


# -- collectives by hand


@pytest.mark.parametrize(
    "size, ring, line, one_way",  # (steps, blocks of an all-gather, blocks of an all-to-all)
    [
        (1, (0, 0, 0), (0, 0, 0), (0, 0, 0)),
        (2, (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        (3, (1, 1, 1), (2, 2, 2), (2, 2, 3)),
        (4, (2, 2, 3), (3, 3, 4), (3, 3, 6)),
        (8, (4, 4, 10), (7, 7, 16), (7, 7, 28)),
    ],
)
def test_blocks_by_hand(size, ring, line, one_way):
    V = 840  # a multiple of all sizes
    for options, (steps, gathered, exchanged) in [
        (dict(), ring),
        (dict(wrap=False), line),
        (dict(bidirectional=False), one_way),
        (dict(bidirectional=False, wrap=False), one_way),
    ]:
        assert interconnect.all_gather(V, size, **options) == Traffic(steps, gathered * V / size)
        assert interconnect.reduce_scatter(V, size, **options) == Traffic(steps, gathered * V / size)
        assert interconnect.all_reduce(V, size, **options) == Traffic(2 * steps, 2 * gathered * V / size)
        assert interconnect.all_to_all(V, size, **options) == Traffic(steps, exchanged * V / size)


def busiest_link(size: int, bidirectional: bool, wrap: bool, exchange: bool) -> int:
    """The blocks over the busiest link in its busier direction, counted hop by hop."""
    load = Counter()
    for source in range(size):
        for distance in range(1, size):
            backwards = bidirectional and distance > size // 2
            step, hops = (-1, size - distance) if backwards else (1, distance)
            # In an exchange every block takes all of its hops; a gathered block is passed on by the last that has it.
            for hop in range(hops) if exchange else [hops - 1]:
                a, b = (source + step * hop) % size, (source + step * (hop + 1)) % size
                direction = step if wrap or b == a + step else -step  # on a line, end to end goes the other way
                load.update((link, direction) for link in (range(a, b, direction) if not wrap else [a]))
    return max(load.values(), default=0)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("wrap", [True, False])
def test_blocks_on_every_link(size, bidirectional, wrap):
    options = dict(bidirectional=bidirectional, wrap=wrap)
    assert interconnect.all_gather(size, size, **options).link_bytes == busiest_link(size, **options, exchange=False)
    assert interconnect.all_to_all(size, size, **options).link_bytes == busiest_link(size, **options, exchange=True)


def test_neighbours_by_hand():
    assert interconnect.permute(7) == Traffic(1, 7)
    assert interconnect.halo(3, 5) == interconnect.halo(5, 3) == Traffic(1, 5)  # in opposite directions
    assert interconnect.permute(0).seconds(Axis(4, 1e11)) == 1e-6


def test_torus_by_hand():
    """4x8, 100 bytes/s, no latency: a reduce-scatter of 3200 bytes moves 1600 along the first axis, then 400 of 800."""
    axes = [Axis(4, 100, hop_s=0), Axis(8, 100, hop_s=0)]
    phases = [phase for (phase,) in interconnect.rounds_of("all_reduce", 3200, axes)]
    assert [(p.kind, p.axis.size, p.nbytes, p.traffic.link_bytes) for p in phases] == [
        ("reduce_scatter", 4, 3200, 1600),
        ("reduce_scatter", 8, 800, 400),
        ("all_gather", 8, 800, 400),
        ("all_gather", 4, 3200, 1600),
    ]
    assert collective_s("all_reduce", 3200, axes) == 2 * (16 + 4)
    assert collective_s("all_gather", 3200, axes) == collective_s("reduce_scatter", 3200, axes) == 16 + 4
    assert collective_s("all_to_all", 3200, axes) == 3 * 8 + 10 * 4  # (1+2) * B/4, (1+2+3+4) * B/8


def test_spread_by_hand():
    """The same torus, the array in two halves: 800 bytes along each axis at once, then 200 along 8 and 100 along 4."""
    axes = [Axis(4, 100, hop_s=0), Axis(8, 100, hop_s=0)]
    rounds = interconnect.rounds_of("reduce_scatter", 3200, axes, spread=True)
    assert [[(p.axis.size, p.nbytes, p.traffic.link_bytes) for p in phases] for phases in rounds] == [
        [(4, 1600, 800), (8, 1600, 800)],
        [(8, 400, 200), (4, 200, 100)],
    ]
    assert collective_s("reduce_scatter", 3200, axes, spread=True) == 8 + 2
    assert collective_s("all_reduce", 3200, axes, spread=True) == 2 * (8 + 2)


def test_spread_rotates_the_axes():
    """In round r, part p is on axis (p + r) mod k."""
    rounds = interconnect.rounds_of("all_gather", 1.0, [Axis(size, 100) for size in (2, 4, 8)], spread=True)
    assert [[phase.axis.size for phase in phases] for phases in rounds] == [[8, 2, 4], [4, 8, 2], [2, 4, 8]]


@pytest.mark.parametrize("sizes", [(4,), (3,), (7,), (8, 4), (3, 3), (7, 4), (4, 4, 8), (16, 2, 2), (3, 5, 6)])
@pytest.mark.parametrize("wrap", [True, False])
def test_no_all_to_all_is_faster_than_its_bisection(sizes, wrap):
    """The bytes that one half has for the other bound it from below; on a single line they are its time."""
    axes = [Axis(size, 100.0, 0.0, wrap) for size in sizes]
    chips, longest = math.prod(sizes), max(sizes)
    bisection = interconnect.bisection_bytes_per_s(axes)
    assert bisection == chips / longest * (1 + wrap) * 100
    least = interconnect.all_to_all_at_least_s(1600, axes)
    if longest % 2 == 0:
        assert least == pytest.approx(chips / 2 * 1600 / 2 / bisection)
    for spread in (False, True):
        rounds = interconnect.rounds_of("all_to_all", 1600, axes, spread=spread)
        seconds = sum(max(phase.seconds for phase in phases) for phases in rounds)
        assert seconds >= least * (1 - 1e-9)
    if len(sizes) == 1 and not wrap:
        assert seconds == pytest.approx(least)


def test_a_slower_axis_is_not_spread_over():
    """Slices exchange what the reduce-scatter within a slice leaves, however its axes share the work."""
    slices = Axis(2, 5, hop_s=0, wrap=False, name="slices")
    axes = [Axis(4, 100, hop_s=0), Axis(4, 100, hop_s=0), slices]
    for spread in (False, True):
        phases = [p for r in interconnect.rounds_of("all_reduce", 1600, axes, spread=spread) for p in r]
        assert [p.nbytes for p in phases if p.axis == slices] == [100, 100]
        inside = collective_s("all_reduce", 1600, axes[:2], spread=spread)
        assert collective_s("all_reduce", 1600, axes, spread=spread) == inside + 2 * 50 / 5


@pytest.mark.parametrize("sizes", [(3, 3), (5, 5), (9, 9, 9), (3, 3, 3), (101, 101)])
def test_spread_over_equal_axes(sizes):
    """V / (W_ICI * k) * (1 - 1/N) over N devices, exact for odd axes, whose two directions are equally busy."""
    axes, k, N = [Axis(size, 1e9, hop_s=0) for size in sizes], len(sizes), math.prod(sizes)
    for bidirectional, speed in ((True, 2e9), (False, 1e9)):
        seconds = collective_s("all_gather", 1e9, axes, bidirectional=bidirectional, spread=True)
        assert seconds == pytest.approx(1e9 / (speed * k) * (1 - 1 / N), rel=1e-12)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("sizes", [(3,), (5, 7), (3, 5, 7), (128,), (128, 256)])
@pytest.mark.parametrize("spread", [False, True])
def test_a_mesh_takes_twice_as_long_as_a_torus(kind, sizes, spread):
    """Exactly for odd axes, where a ring's directions are equally busy; for the all-to-all, if they are long."""
    torus, mesh = ([Axis(n, 1e9, hop_s=0, wrap=wrap) for n in sizes] for wrap in (True, False))
    ratio = collective_s(kind, 1e9, mesh, spread=spread) / collective_s(kind, 1e9, torus, spread=spread)
    assert ratio == pytest.approx(2, rel=1e-12 if sizes[0] % 2 else 0.02)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("spread", [False, True])
def test_costs_are_monotonic(kind, spread):
    """More bytes and slower links never take less time. In a latency-bound collective more devices take longer."""
    seconds = lambda nbytes, n=8, speed=1e11: collective_s(
        kind, nbytes, [Axis(n, speed), Axis(n, speed)], spread=spread
    )
    by_bytes = [seconds(10**exponent) for exponent in range(12)]
    assert by_bytes == sorted(by_bytes) and by_bytes[0] < by_bytes[-1]
    by_devices = [seconds(64, n) for n in (1, 2, 4, 8, 16, 64)]
    assert by_devices == sorted(set(by_devices)) and by_devices[0] == 0
    assert seconds(1e9, speed=1e10) > seconds(1e9)


def test_an_axis_of_one_device_costs_nothing():
    axes = [Axis(4, 1e11), Axis(8, 1e11)]
    with_ones = [Axis(1, 1e11), axes[0], Axis(1, 1e11), axes[1]]
    for kind in ("all_gather", "all_reduce", "all_to_all"):
        for spread in (False, True):
            assert collective_s(kind, 1e9, with_ones, spread=spread) == collective_s(kind, 1e9, axes, spread=spread)
    assert collective_s("all_reduce", 1e9, []) == 0


@pytest.mark.parametrize(
    "wrong, numbers",
    [
        (lambda: interconnect.all_gather(8, 0), "0"),
        (lambda: interconnect.all_to_all(8, 2.5), "2.5"),
        (lambda: interconnect.all_reduce(-8, 2), "-8"),
        (lambda: interconnect.all_to_all(math.inf, 2), "inf"),
        (lambda: interconnect.permute(math.nan), "nan"),
        (lambda: interconnect.halo(-8, 8), "-8"),
        (lambda: Axis(-1, 1e9), "-1"),
        (lambda: Axis(2, 0.0), "link_bytes_per_s=0.0"),
        (lambda: collective_s("permute", 8, [Axis(2, 1e9)]), "'permute'.*all_reduce, all_gather"),
        (lambda: CHIPS["v3"].axes((4, 4, 4)), "4x4x4 has 3 axes, v3 has 2"),
        (lambda: interconnect.parse_topology("v9:4x4"), "'v9'; there are v2, v3"),
        (lambda: interconnect.parse_topology("tpu7x"), "tpu7x:16x24x24"),
        (lambda: interconnect.parse_topology("tpu7x:4x-4x4"), "tpu7x:16x24x24"),
        (lambda: interconnect.parse_topology("v3:128x64"), "8,192.*128x32, 4,096"),
    ],
)
def test_refused(wrong, numbers):
    with pytest.raises(ValueError, match=numbers):
        wrong()


# -- communication scaling


@pytest.mark.parametrize(
    "number, shapes",
    [
        (1, [(1,), (1, 1), (1, 1, 1)]),
        (16, [(16,), (4, 4), (2, 2, 4)]),
        (64, [(64,), (8, 8), (4, 4, 4)]),
        (7, [(7,), (1, 7), (1, 1, 7)]),
        (1024, [(1024,), (32, 32), (8, 8, 16)]),
        (9216, [(9216,), (96, 96), (16, 24, 24)]),
    ],
)
def test_squarest(number, shapes):
    assert [interconnect.squarest(number, num_factors) for num_factors in (1, 2, 3)] == shapes
