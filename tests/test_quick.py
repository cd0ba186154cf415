"""The choice of the tests that run."""

from types import SimpleNamespace

import pytest

from benchmarks import mutants, quick


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


def test_cases_that_run_have_every_value():
    cases = [{"a", "x"}, {"a", "y"}, {"b", "x"}, {"b", "y"}, {"b", "z"}]
    assert quick.covering(cases, [False] * 5, 5) == {0, 3, 4}
    assert quick.covering(cases, [True, True, False, False, False], 5) == {0, 1, 4}
    assert quick.covering([{"a"}, {"a"}], [True, True], 1) == {0, 1}
    assert quick.covering(cases, [False] * 5, 2) == {0, 3}
    assert quick.covering([{"a", "b"}, {"a"}, {"c", "d", "e"}, {"b", "c"}], [False] * 4, 4) == {0, 2}


def test_items_of_a_dictionary_and_axes_of_a_mesh_are_values():
    values = quick.values_of(dict(mesh="fsdp:4,tensor:2", option=dict(remat="full", sizes=(3, 4)), name="a: b"))
    assert {*values} == {
        ("mesh", "fsdp:4"),
        ("mesh", "tensor:2"),
        ("option", "remat", "'full'"),
        ("option", "sizes", "(3, 4)"),
        ("name", "'a: b'"),
    }


def test_cases_are_marked_by_the_values_of_their_test():
    """A quick case, and one that is the first to find a planted error, runs whatever its values are."""
    needed = next(row["all"] for row in mutants.known().values() if (row["all"] or "").endswith("]"))
    quick_one = Item("test_a.py::test_b[1-1]", marks=set())
    items = [quick_one, *(Item(f"test_a.py::test_b[{case}]") for case in ("1-2", "2-1", "2-2", "3-1")), Item(needed)]
    quick.mark(items)
    assert [item.nodeid for item in items if "exhaustive" in item.marks] == [
        "tests/test_a.py::test_b[1-2]",
        "tests/test_a.py::test_b[2-1]",
    ]


class Item:
    """A case of a test, for `quick.mark`: its parameters are the parts of its id."""

    def __init__(self, name: str, marks: frozenset[str] = frozenset({"slow"})):
        self.nodeid, self.marks = f"tests/{name}", {*marks}
        self.callspec = SimpleNamespace(params=dict(enumerate(name.rstrip("]").partition("[")[2].split("-"))))

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return getattr(pytest.mark, name) if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


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
