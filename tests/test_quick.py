"""The choice of the quick selection."""

import pytest

from benchmarks import quick


def test_what_is_long_and_finds_no_planted_error_first_is_slow():
    times = {"test_a.py::long": 0.7, "test_a.py::short": 0.6, "test_a.py::finds": 9.0, quick.ALWAYS[0]: 9.0}
    results = {"row": {"quick": "test_a.py::finds", "all": "x"}, "another": {"quick": "test_a.py::before", "all": "x"}}
    before = ["test_a.py::before", "test_a.py::still"]
    assert quick.chosen(times, results, before) == ["test_a.py::long", "test_a.py::still"]


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
