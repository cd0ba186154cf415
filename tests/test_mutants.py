"""benchmarks/mutants.py: its rows fit today's program, its verdicts are right, and its stored results hold."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.mutants import Mutant

ROWS = mutants.mutants()
ADDER = "def add(a, b):\n    return a + b\n"
TESTS = """
import adder
import pytest

def test_of_two():
    assert adder.add(1, 2) == 3

@pytest.mark.slow
def test_of_a_negative():
    assert adder.add(-1, 2) == 1
"""


def mutant(new: str, old: str = "a + b") -> Mutant:
    return Mutant("adder", "numbers", old, new, ("test_adder.py::test_of_two", "test_adder.py::test_of_a_negative"))


@pytest.fixture
def copy(tmp_path, monkeypatch) -> mutants.Copy:
    """The copy of a program of one module."""
    root = tmp_path / "root"
    (root / "tests").mkdir(parents=True)
    (root / "adder.py").write_text(ADDER)
    (root / "tests" / "test_adder.py").write_text(TESTS)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["slow"]\n')
    for command in ("init -q", "add ."):
        subprocess.run(["git", *command.split()], cwd=root, check=True)
    monkeypatch.setattr(mutants, "ROOT", root)
    return mutants.Copy(tmp_path / "copy")


def test_every_row_fits_the_program_and_names_its_tests():
    for row in ROWS:
        row.applied((mutants.ROOT / f"{row.module}.py").read_text())
        assert row.tests and all(isinstance(mutants.is_slow(test), bool) for test in row.tests)


def test_there_are_enough_of_every_kind():
    assert len(ROWS) >= 150 and {row.kind for row in ROWS} == {*mutants.KINDS}


@pytest.mark.parametrize(
    "new, by_quick, by_all",
    [
        pytest.param("b + a", None, None, marks=pytest.mark.slow),  # no error, so no test may fail
        ("a - b", "test_adder.py::test_of_two", "test_adder.py::test_of_two"),
        ("abs(a) + abs(b)", None, "test_adder.py::test_of_a_negative"),
        pytest.param("missing", *["test_adder.py::test_of_two"] * 2, marks=pytest.mark.slow),
    ],
)
def test_a_mutant_is_found_by_the_tests_that_fall(copy, new, by_quick, by_all):
    mutants.check([mutant(new)], copy, quick_only=False)
    assert mutants.evaluate(mutant(new), copy) == {"quick": by_quick, "all": by_all}
    assert (copy.folder / "adder.py").read_text() == (mutants.ROOT / "adder.py").read_text() == ADDER


@pytest.mark.slow
def test_tests_that_hang_have_found_it(copy, monkeypatch):
    monkeypatch.setattr(mutants, "LIMIT_S", 3)
    assert mutants.evaluate(mutant("__import__('time').sleep(60)"), copy) == {"quick": "hung", "all": "hung"}


def test_without_the_slow_tests_what_they_find_is_not_known(copy):
    assert mutants.evaluate(mutant("abs(a) + abs(b)"), copy, quick_only=True) == {"quick": None}


def test_tests_that_fall_without_a_mutant_say_nothing(copy):
    copy.write("adder", ADDER.replace("+", "-"))
    with pytest.raises(RuntimeError, match=r"without any mutant this falls: test_adder.py::test_of_two"):
        mutants.check([mutant("b + a")], copy, quick_only=True)


@pytest.mark.parametrize(
    "row, why",
    [
        (mutant("b", old="c"), "has this text 0 times, not once: c"),
        (mutant("c", old="a"), "has this text 3 times"),
        (mutant("(a + b)"), "is the same program"),
        (mutant("a +"), "is no program"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(copy, row, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        mutants.evaluate(row, copy)


def test_a_test_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"there is no tests/test_mutants.py::test_of_nothing"):
        mutants.is_slow("test_mutants.py::test_of_nothing[1]")


def test_what_is_found_is_counted_and_held_to_the_shares():
    rows = [mutant(str(number)) for number in range(20)]
    results = {row.name: {"quick": "a" if n < 15 else None, "all": "a"} for n, row in enumerate(rows)}
    assert mutants.table(rows, results).splitlines()[2:] == [
        "| adder | 20 | 15, 75% | 20, 100% |  |",
        "| all | 20 | 15, 75% | 20, 100% |  |",
    ]
    alive = {"quick": None, "all": None}
    by_kind = mutants.table(rows, results | {rows[-1].name: alive}, by="kind").splitlines()
    assert by_kind[2:4] == ["| numbers | 20 | 15, 75% | 19, 95% | 1 |", "| collective | 0 |  |  |  |"]
    assert by_kind[-2:] == ["", "- alive: adder.py, `19` in place of `a + b`"]
    assert mutants.holds(rows, results | {rows[-1].name: alive})
    assert not mutants.holds(rows, results | {rows[-1].name: alive, rows[-2].name: alive})  # 90% of all
    assert not mutants.holds(rows, results | {rows[0].name: {"quick": None, "all": "a"}})  # 70% by the quick ones
    assert not mutants.holds(rows, results | {rows[0].name: {"quick": None}})  # one is not run
    assert mutants.table(rows, {}).splitlines()[-1] == "| all | 20 | 0, 0% | 0, 0% |  (20 not run) |"


def test_parts_are_all_of_the_rows_once():
    parts = [mutants.part_of(ROWS, f"{number}/8") for number in range(1, 9)]
    assert sorted(row.name for part in parts for row in part) == sorted(row.name for row in ROWS)
    for wrong in ("0/8", "9/8", "1", "a/b", ""):
        with pytest.raises(ValueError, match="is not N/OF, as 3/8"):
            mutants.part_of(ROWS, wrong)


def test_what_is_kept_holds_and_is_what_is_shown():
    assert mutants.holds(ROWS, mutants.known())
    shown = (Path(mutants.__file__).parents[1] / "docs/RESULTS.md").read_text()
    written = re.search(r"<!-- measured: planted errors -->\n(.*?)\n<!-- end -->", shown, re.DOTALL)[1]
    assert written == mutants.table(ROWS, mutants.known(), by="kind")
