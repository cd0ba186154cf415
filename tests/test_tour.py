"""The tour: its page has today's numbers, and its pictures can be drawn."""

import re

import pytest

from benchmarks import tour


@pytest.fixture(scope="module")
def chapters():
    return {name: chapter() for name, chapter in tour.CHAPTERS.items()}


@pytest.mark.slow
def test_the_page_has_todays_numbers(chapters):
    """After a change: python benchmarks/tour.py."""
    assert tour.PAGE.read_text() == tour.page(chapters)
    for name, chapter in chapters.items():
        assert (tour.FIGURES / f"{name}.png").exists() and (tour.ROOT / chapter.file).exists()


@pytest.mark.slow
def test_every_chapter_draws(chapters, tmp_path):
    for name, chapter in chapters.items():
        tour.draw(chapter, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_numbers_that_follow_from_the_concepts(chapters):
    """7 hops around a ring of 8, 4 in both directions; (P-1)/(M+P-1) idle; half of e4m3's step in the error."""
    text = {name: chapter.text for name, chapter in chapters.items()}
    assert "takes 7 hops" in text["ring"] and "takes 4 hops" in text["ring"]
    assert f"GPipe is idle for {3 / 11:.0%}" in text["ticks"] and f"circular) {3 / 19:.0%} are idle" in text["ticks"]
    assert "have 12.5% to within 0.0%" in text["zigzag"] and f"{15 / 8:.2f} times its share"[:3] in text["zigzag"]
    assert f"causal {(16 + 1) / 32:.0%}, of which {15 / 17:.0%} need no mask" in text["blocks"]
    assert f"at most {1 / 17:.1%} and {1 / 9:.1%}" in text["fp8"]


@pytest.mark.slow
def test_the_kernels_numbers_are_those_of_the_compiler():
    """After a change: python benchmarks/tour.py --compile. Another compiler may differ by a few percent."""
    stored = int(re.search(r"takes ([\d,]+) cycles", tour.kernel().text)[1].replace(",", ""))
    assert tour.kernel_numbers()["cycles"] == pytest.approx(stored, rel=0.05)
