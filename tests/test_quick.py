"""The choice of the quick selection."""

import pytest

from benchmarks import quick


def test_what_is_long_and_finds_no_planted_error_first_is_slow():
    times = {"long": quick.LIMIT_S, "short": quick.LIMIT_S - 0.1, quick.ALWAYS[0]: 9.0}
    times |= {"finds one": quick.ERROR_S, "finds two": 1.9 * quick.ERROR_S}
    firsts = ["finds one", "finds two", "finds two", "before", None]
    results = {f"row {number}": {"quick": first, "all": "x"} for number, first in enumerate(firsts)}
    assert quick.chosen(times, results, ["before", "still"]) == ["finds one", "long", "still"]


def test_lines_of_the_list_are_marked(request):
    """Every collected test that is a line has the mark; the lines are sorted, and leave ALWAYS out."""
    lines = quick.SLOW.read_text().splitlines()
    assert lines == sorted({*lines}) and not {*lines} & {*quick.ALWAYS}
    marked = {item.nodeid.removeprefix("tests/") for item in request.session.items if item.get_closest_marker("slow")}
    here = {item.nodeid.removeprefix("tests/") for item in request.session.items}
    assert marked >= here & {*lines}


def test_every_test_that_stays_quick_is_a_test():
    for test in quick.ALWAYS:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (quick.ROOT / "tests" / file).read_text()


def test_times_are_those_of_the_processor(monkeypatch):
    timer, ticks = quick.Timer(), iter([(1.0, 1.0, 1.0, 1.0, 0.0), (2.0, 1.5, 1.0, 1.25, 9.0)])
    monkeypatch.setattr(quick.os, "times", lambda: next(ticks))
    item = type("Item", (), {"nodeid": "tests/test_a.py::b"})()
    run = timer.pytest_runtest_protocol(item)
    next(run)
    with pytest.raises(StopIteration):
        run.send(True)
    assert timer.seconds == {"test_a.py::b": 1.75}
