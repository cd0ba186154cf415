"""Chooses which tests run: the quick selection, pytest -m "not slow", and the cases that `pytest` leaves out.

    python benchmarks/quick.py measure        runs the quick selection in one process, and stores what each test takes
    python benchmarks/quick.py choose         writes tests/slow_cases.txt from that
    python benchmarks/quick.py                the times of the quick selection by file, from the stored ones

A test is slow if it has the mark, or is a line of tests/slow_cases.txt. Such a line is a test that takes `LIMIT_S` or
longer and is not the first quick one to find a planted error (benchmarks/mutants_found.json), or one that takes
`ERROR_S` or longer for each error that it is the first to find. Its claim is held by the full suite. `choose` forgets
the results in which a test that is now slow was the first: `mutants.py run` evaluates these errors again. Tests in
`ALWAYS` stay quick: they hold what every command promises, or are the only ones of their kind that run with the newest
JAX.

Of the slow cases of a test, `pytest` runs as many as it takes to have each value of each parameter once, and those that
are the first to find a planted error. The others combine the same values in other ways, and are marked `exhaustive`:
`pytest -m exhaustive` runs them alone, and `pytest -m ""` runs all tests. The mark `at_most` bounds the cases of a test
that takes long and whose values other tests have, too.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pytest

import command
from benchmarks import mutants

LIMIT_S, ERROR_S = 0.25, 1.3
TIMES, SLOW = ROOT / "benchmarks/quick.json", ROOT / "tests/slow_cases.txt"
ALWAYS = (
    "test_parity.py::test_logits_and_loss_are_those_of_transformers[llama3.1]",
    "test_train.py::test_a_run_learns_and_says_what_it_did",
    "test_style.py::test_the_model_brings_no_instruments",
    "test_recompute.py::test_the_examples_run_without_jax",
    "test_recipes.py::test_needs_no_jax_and_is_quick",
    "test_aot.py::test_help_does_not_import_jax",
    "test_schedules.py::test_the_default_is_the_cosine_of_optax_bit_for_bit",
    "test_muon.py::test_matrices_are_those_of_one_device_on_every_mesh[fsdp:8-options0]",
)
MESH = re.compile(r"\w+:\d+(,\w+:\d+)*")


def mark(items: list[pytest.Item]) -> None:
    """Marks the tests of tests/slow_cases.txt as slow, and the cases that `pytest` leaves out as exhaustive."""
    slow = {*SLOW.read_text().splitlines()}
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _name(item) in slow:
            item.add_marker(pytest.mark.slow)
        functions.setdefault(_name(item).partition("[")[0], []).append(item)
    needed = {row.get("all") for row in mutants.known().values()}
    for cases in functions.values():
        always = [_name(item) in needed or not item.get_closest_marker("slow") for item in cases]
        values = [{*values_of(item.callspec.params)} if hasattr(item, "callspec") else {item} for item in cases]
        bound = cases[0].get_closest_marker("at_most")
        for index in {*range(len(cases))} - covering(values, always, bound.args[0] if bound else len(cases)):
            cases[index].add_marker(pytest.mark.exhaustive)


def values_of(value, *path) -> Iterator[tuple]:
    """The values in a test's parameters: each item of a dictionary, and each axis of a mesh, counts for itself."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from values_of(inner, *path, key)
    elif isinstance(value, str) and MESH.fullmatch(value):
        yield from ((*path, axis) for axis in value.split(","))
    else:
        yield *path, repr(value)


def covering(cases: list[set], always: list[bool], at_most: int) -> set[int]:
    """Indices of those that are `always` taken, and of `at_most` in all until all values occur, the richest first."""
    taken = {index for index, needed in enumerate(always) if needed}
    missing = set().union(*cases) - set().union(*(cases[index] for index in taken))
    while missing and len(taken) < at_most:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & missing))
        taken.add(best)
        missing -= cases[best]
    return taken


def _name(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/")


class Timer:
    """A plugin of pytest: {test: seconds of processor time, with its child processes}."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        begun = sum(os.times()[:4])
        result = yield
        self.seconds[_name(item)] = sum(os.times()[:4]) - begun
        return result


def measure() -> None:
    """Runs the quick selection and stores the tests that take LIMIT_S or longer, and the sum of each file."""
    timer = Timer()
    pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", str(ROOT / "tests")], plugins=[timer])
    store(timer.seconds)


def store(seconds: dict[str, float]) -> None:
    files = Counter()
    for test, taken in seconds.items():
        files[test.partition("::")[0]] += taken
    rounded = lambda times: {name: round(taken, 2) for name, taken in sorted(times.items(), key=lambda item: -item[1])}
    long = {test: taken for test, taken in seconds.items() if taken >= LIMIT_S}
    TIMES.write_text(json.dumps(dict(tests=rounded(long), files=rounded(files)), indent=1) + "\n")


def chosen(times: dict[str, float], results: dict[str, dict], before: list[str]) -> list[str]:
    """The lines of tests/slow_cases.txt: those of `before` that still find nothing first, and those to add."""
    errors = Counter(row["quick"] for row in results.values() if row.get("quick"))
    finders = {test for test, number in errors.items() if times.get(test, 0) < ERROR_S * number}
    candidates = {*before, *(test for test, taken in times.items() if taken >= LIMIT_S)}
    return sorted(candidates - finders - {*ALWAYS})


def collected() -> set[str]:
    """All tests of the suite."""
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "", "-n0", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return {line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line}


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("command", nargs="?", choices=("measure", "choose"), help="default: show the stored times")
    args = command.arguments(parser)
    if args.command == "measure":
        measure()
    times = json.loads(TIMES.read_text())
    if args.command == "choose":
        results = mutants.known()
        lines = chosen(times["tests"], results, SLOW.read_text().splitlines())
        existing = collected()
        SLOW.write_text("".join(f"{line}\n" for line in lines if line in existing))
        mutants.write({name: row for name, row in results.items() if row.get("quick") not in lines})
    for file, taken in times["files"].items():
        print(f"{taken:8.1f} s  {file}")
    print(f"{sum(times['files'].values()):8.1f} s  in all, of processor time")


if __name__ == "__main__":
    command.run(main)
