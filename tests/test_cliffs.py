"""benchmarks/cliffs.py: every size that costs much more than its neighbours has a reason."""

import re

import pytest

import anatomy
from benchmarks import cliffs


@pytest.mark.parametrize("sweep", cliffs.SWEEPS, ids=lambda sweep: f"{sweep.name} {sweep.sizes[1]}")
def test_a_size_above_its_neighbours_says_why(sweep):
    """A sweep without a cliff has no reason."""
    costs = cliffs.ratios(sweep)
    above = any(ratio is None or ratio > 1.3 for ratio in costs.values())
    assert above == bool(sweep.why), costs


def test_a_length_whose_chunks_must_divide_it_would_be_seen(monkeypatch):
    """8,191 is a prime: with chunks of one position, the unembedding's gradients are summed 8,191 times."""
    dividing = lambda config, sequences, positions, vocabulary: max(c for c in range(1, 1025) if positions % c == 0)
    monkeypatch.setattr(anatomy, "loss_chunk", dividing)
    (sweep,) = (sweep for sweep in cliffs.SWEEPS if sweep.name == "seq_len" and sweep.sizes[1] == 8192)
    assert cliffs.ratios(sweep)[8191] > 50


def test_the_table_is_the_one_of_today():
    written = re.search(
        r"<!-- predicted: cliffs -->\n(.*?)\n<!-- end -->", (cliffs.ROOT / "docs/RESULTS.md").read_text(), re.DOTALL
    )
    assert written[1] == cliffs.table()
