"""Tests of compiled/grid.py: schedules of grids worked out by hand."""

import pytest

from compiled import grid
from compiled.grid import Memory, Operand

# A cycle is 1 s, and a byte takes 1 s.
SLOW = Memory(clock_hz=1.0, hbm_bytes_per_s=1.0, latency_s=0.0)


def time_of(cycles, *operands, memory=SLOW):
    return grid.walk(cycles, operands, memory)


def test_steps_that_compute_longer_than_their_blocks_take_wait_for_the_first_and_the_last_only():
    lhs, out = Operand("lhs", range(4), 3), Operand("out", range(4), 2, output=True)
    time = time_of([10] * 4, lhs, out)
    assert time.seconds == 3 + 4 * 10 + 2
    assert time.waits_s == {"lhs": 3, "out": 2} and time.compute_s == 40 and time.hbm_s == 4 * 3 + 4 * 2


def test_blocks_that_take_longer_than_steps_determine_the_time():
    time = time_of([1] * 4, Operand("lhs", range(4), 5))
    assert time.seconds == 4 * 5 + 1  # the second block is requested with the first, and each later one as soon


def test_a_block_that_stays_is_read_once():
    time = time_of([10] * 4, Operand("lhs", range(4), 1), Operand("rhs", [0] * 4, 7))
    assert time.seconds == 1 + 7 + 4 * 10  # the blocks of the first step before the second of lhs
    assert time.hbm_s == 4 + 7


def test_a_group_whose_matrix_arrives_within_one_step_waits_for_it():
    """Two steps each for matrices of 25 s, requested one step of 10 s ahead; or as soon as a buffer is free."""
    matrices = Operand("rhs", [0, 0, 1, 1], 25)
    assert time_of([10] * 4, matrices).seconds == 25 + 4 * 10 + (25 - 10)
    ahead = Operand("rhs", [0, 0, 1, 1], 25, lookahead=True)
    assert time_of([10] * 4, ahead).seconds == 25 + 25 + 2 * 10  # the second is requested with the first
    third = Operand("rhs", [0, 0, 1, 1, 2, 2], 25, lookahead=True)  # its buffer is free after the first
    assert time_of([10] * 6, third).seconds == 3 * 25 + 2 * 10


def test_more_buffers_request_further_ahead():
    sizes = [1, 1, 1, 30]
    assert time_of([10] * 4, Operand("lhs", range(4), sizes)).seconds == 1 + 3 * 10 + (30 - 10) + 10
    assert time_of([10] * 4, Operand("lhs", range(4), sizes, buffers=4)).seconds == 1 + 1 + 1 + 30 + 10


def test_one_buffer_hides_nothing():
    assert time_of([10] * 4, Operand("lhs", range(4), 3, buffers=1)).seconds == 4 * (3 + 10)


def test_a_write_is_awaited_by_the_end_of_the_next_step():
    time = time_of([10, 10, 10], Operand("out", range(3), 15, output=True))
    assert time.seconds == 10 + 15 + 15 + 15  # each write waits for the one before it
    assert time_of([10, 10, 10], Operand("out", [0, 0, 0], 15, output=True)).seconds == 3 * 10 + 15
    assert time_of([10] * 4, Operand("out", range(4), [30, 1, 1, 1], output=True)).seconds == 10 + 30 + 2 * 10 + 1
    three = Operand("out", range(3), 15, buffers=3, output=True)
    assert time_of([10, 10, 10], three).waits_s["out"] == 55 - 30


def test_reads_and_writes_share_a_queue():
    lhs, out = Operand("lhs", range(3), 8), Operand("out", range(3), 8, output=True)
    time = time_of([1] * 3, lhs, out)
    assert time.seconds == pytest.approx(6 * 8 + 1, abs=1)


def test_latency_delays_each_block_but_not_the_queue():
    late = Memory(clock_hz=1.0, hbm_bytes_per_s=1.0, latency_s=4.0)
    assert time_of([10] * 3, Operand("lhs", range(3), 3), memory=late).seconds == 3 + 4 + 3 * 10
    assert time_of([5] * 3, Operand("lhs", range(3), 3), memory=late).seconds == 3 + 4 + 5 + 5 + (3 + 4 - 5) + 5


def test_partial_blocks_have_bytes_of_their_own_and_empty_ones_are_not_moved():
    time = time_of([1] * 3, Operand("lhs", range(3), [4, 0, 6]))
    assert time.hbm_s == 10 and time.seconds == 4 + 1 + 6 + 1


def test_the_clock_divides_cycles_alone():
    fast = Memory(clock_hz=2.0, hbm_bytes_per_s=1.0, latency_s=0.0)
    assert time_of([10] * 2, Operand("lhs", range(2), 1), memory=fast).seconds == 1 + 2 * 5


@pytest.mark.parametrize("operand", [Operand("lhs", [0], 1, buffers=0), Operand("out", [0], 1, buffers=1, output=True)])
def test_too_few_buffers_are_an_error(operand):
    with pytest.raises(ValueError, match=rf"{operand.name}: {operand.buffers} buffers"):
        time_of([1], operand)


def test_no_steps_take_no_time():
    assert time_of([], Operand("lhs", [], 1)).seconds == 0
