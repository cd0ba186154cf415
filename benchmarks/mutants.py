"""Mutation testing: plants errors in every module, one at a time, and runs the tests that should fail.

    python benchmarks/mutants.py --by=kind                          the table of results; runs nothing
    python benchmarks/mutants.py run --part=1/8                     an eighth of them: minutes to an hour
    python benchmarks/mutants.py run --module=fp8 --quick           one module's, by the quick selection of its tests

A mutant is a row of mutants.toml: a module, a text that occurs there exactly once, its replacement, the kind of harm
that this would do, and the tests that must fail. Each mutant is applied to a copy of the working tree, never to the
tree itself, and its tests run there with a time limit. First the same tests run on the unchanged copy: if they fail
without the mutant, they say nothing about it.

A mutant is found by the quick selection if one of its tests that are not marked slow fails. It is found if any of its
tests fails or hangs. Only the tests that the row names run. Others may fail, too, so the shares are lower bounds.

Results are stored in mutants_found.json by the row's text: a row with a result is not run again, and a row that was
changed is new. A change of the modules or the tests is not noticed; `run --again` repeats rows that have a result. The
exit status is 1 where rows have no result or fewer were found than the thresholds below.
"""

import ast
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import command
import outputs

ROWS = ROOT / "benchmarks" / "mutants.toml"
FOUND = ROOT / "benchmarks" / "mutants_found.json"
KINDS = ("numbers", "collective", "scale", "resume", "prediction", "message")  # of harm, the worst first
LEAST = {"quick": 0.75, "all": 0.95}  # shares of mutants that must be found
SLOW = "pytest.mark.slow"
LIMIT_S = 600  # time for the tests of a mutant, quick or slow
PYTEST = "-m pytest -x -q -n 0 --no-header -p no:cacheprovider".split()
# Exit statuses of pytest, and of a run that was stopped. 4: a file does not import, as all tests were found before.
FELL, NONE_SELECTED, HUNG = (1, 2, 3, 4), 5, 124


@dataclass(frozen=True)
class Mutant:
    """A row of mutants.toml. `tests` are pytest's node ids, relative to tests/."""

    module: str
    kind: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name that depends on the text of the row: a changed row has another name."""
        return f"{self.module}-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"

    def applied(self, source: str) -> str:
        """The source with `old` replaced. Raises ValueError where `old` does not occur exactly once."""
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.module}.py has this text {times} times, not once: {self.old}")
        return source.replace(self.old, self.new)


def mutants(path: Path = ROWS) -> list[Mutant]:
    """All rows. Raises ValueError for an unknown kind, and for a row that occurs twice."""
    rows = []
    for module, module_rows in tomllib.loads(path.read_text()).items():
        for row in module_rows:
            rows.append(Mutant(module, row["kind"], row["old"], row["new"], tuple(row["tests"])))
            if row["kind"] not in KINDS:
                raise ValueError(f"{row['kind']!r} is not one of {', '.join(KINDS)}: {row['old']}")
    names = [mutant.name for mutant in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"rows occur twice: {', '.join(sorted(twice))}")
    return rows


class Copy:
    """A copy of the working tree: the files that git tracks, as they are now, in another folder."""

    def __init__(self, folder: Path):
        self.folder, self.changes = folder, 0
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)

    def write(self, module: str, source: str) -> None:
        """Writes a module with a new time stamp: Python compares time and size with those of its compiled file."""
        path = self.folder / f"{module}.py"
        path.write_text(source)
        self.changes += 1
        os.utime(path, (self.changes, self.changes))

    def pytest(self, tests: Sequence[str], *options: str) -> tuple[int, str]:
        """(exit status, the first test that failed) of tests on the copy; HUNG if they take longer than LIMIT_S."""
        line = [sys.executable, *PYTEST, *options, *(f"tests/{test}" for test in tests)]
        with subprocess.Popen(
            line,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said = process.communicate(timeout=LIMIT_S)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return HUNG, "hung"
        fell = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", said, re.MULTILINE)
        return process.returncode, fell[1] if fell else said[-300:]


def evaluate(mutant: Mutant, copy: Copy, quick_only: bool = False) -> dict[str, str | None]:
    """{quick: the test that failed, all: the same}, None where none did. With quick_only, `all` may be absent.

    Raises ValueError where the mutant does not fit the module, is no program, or is the same program.
    """
    source = (ROOT / f"{mutant.module}.py").read_text()
    mutated = mutant.applied(source)
    try:
        if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
            raise ValueError(f"{mutant.module}.py is the same program with {mutant.new!r} for {mutant.old!r}")
    except SyntaxError as error:
        raise ValueError(f"{mutant.module}.py is no program with {mutant.new!r}: {error}") from None
    copy.write(mutant.module, mutated)
    try:
        by_quick = _fell(copy, [test for test in mutant.tests if not is_slow(test)], "-m not slow")
        if quick_only and not by_quick:
            return {"quick": None}
        return {"quick": by_quick, "all": by_quick or _fell(copy, mutant.tests, "-m slow and not exhaustive")}
    finally:
        copy.write(mutant.module, source)


def is_slow(test: str) -> bool:
    """Whether all cases of a test are marked slow. Raises ValueError where there is no such test."""
    file, _, name = test.partition("[")[0].partition("::")
    tests = tests_of(ROOT / "tests" / file)
    if name not in tests:
        raise ValueError(f"there is no tests/{file}::{name}")
    return tests[name]


@functools.cache
def tests_of(path: Path) -> dict[str, bool]:
    """{test: whether all its cases are marked slow} of a file."""
    body = ast.parse(path.read_text()).body if path.exists() else []
    all_slow = any(isinstance(node, ast.Assign) and ast.unparse(node) == f"pytestmark = {SLOW}" for node in body)
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {node.name: all_slow or SLOW in map(ast.unparse, node.decorator_list) for node in functions}


def _fell(copy: Copy, tests: Sequence[str], selection: str) -> str | None:
    """The first test that failed, None where none did. Raises RuntimeError where pytest itself failed."""
    if not tests:
        return None
    status, which = copy.pytest(tests, selection)
    if status in (0, NONE_SELECTED):
        return None
    if status in FELL or status == HUNG:
        return which
    raise RuntimeError(f"pytest ended with status {status} for {' '.join(tests)}: {which}")


def check(rows: list[Mutant], copy: Copy, quick_only: bool) -> None:
    """Raises RuntimeError where a test of these rows fails without any mutant."""
    tests = tuple(sorted({test for mutant in rows for test in mutant.tests}))
    status, which = copy.pytest(tests, *(["-m not slow"] if quick_only else []))
    if status not in (0, NONE_SELECTED):
        raise RuntimeError(f"without any mutant this falls: {which} (status {status})")


def known() -> dict[str, dict[str, str | None]]:
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def store(name: str, results: dict[str, str | None]) -> None:
    """Stores a result beside those that other parts have stored meanwhile, without those of rows that are gone."""
    names = {mutant.name for mutant in mutants()}
    write({each: result for each, result in known().items() if each in names} | {name: results})


def write(everything: dict[str, dict[str, str | None]]) -> None:
    """Stores these results in place of all others."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(everything.items()))
    with outputs.replacing(FOUND) as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


def run(rows: list[Mutant], quick_only: bool) -> None:
    """Evaluates the rows, module by module, and stores each result at once."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for module in dict.fromkeys(mutant.module for mutant in rows):
            module_rows = [mutant for mutant in rows if mutant.module == module]
            check(module_rows, copy, quick_only)
            for mutant in module_rows:
                results = evaluate(mutant, copy, quick_only)
                store(mutant.name, results)
                by = results["quick"] or results.get("all")
                print(f"{mutant.name:24}{f'found by {by}' if by else 'alive'}: {_line(mutant.new)}", flush=True)


def _line(text: str) -> str:
    return " ".join(text.split())[:100]


def counts(rows: list[Mutant], results: dict, by: str = "module") -> Iterator[tuple[str, int, int, int, int]]:
    """Yields (module or kind, planted, found by the quick selection, found, without a result), and the sums."""
    names = [kind for kind in KINDS if by == "kind"] or sorted({mutant.module for mutant in rows})
    for name in [*names, "all"]:
        group = [mutant for mutant in rows if name in ("all", getattr(mutant, by))]
        group_results = [results.get(mutant.name, {}) for mutant in group]
        by_quick, by_all = (sum(bool(result.get(key)) for result in group_results) for key in ("quick", "all"))
        yield name, len(group), by_quick, by_all, sum("all" not in result for result in group_results)


def table(rows: list[Mutant], results: dict, by: str = "module") -> str:
    """Markdown with the numbers of mutants found, by module or kind, and a list of those alive."""
    lines = [f"| {by} | planted | found by the quick selection | found | alive |", "|---|---|---|---|---|"]
    for name, planted, by_quick, by_all, unknown in counts(rows, results, by):
        shares = " | ".join(f"{number}, {number / planted:.0%}" if planted else "" for number in (by_quick, by_all))
        alive = f"{planted - by_all - unknown or ''}{f' ({unknown} not run)' if unknown else ''}"
        lines.append(f"| {name} | {planted} | {shares} | {alive} |")
    alive = [mutant for mutant in rows if results.get(mutant.name, {}).get("all", "not run") is None]
    lines += [""] * bool(alive)
    lines += [f"- alive: {m.module}.py, `{_line(m.new)}` in place of `{_line(m.old)}`" for m in alive]
    return "\n".join(lines)


def holds(rows: list[Mutant], results: dict) -> bool:
    """Whether all rows have a result, and at least the shares LEAST of them were found."""
    *_, (_, planted, by_quick, by_all, unknown) = counts(rows, results)
    return not unknown and by_quick >= LEAST["quick"] * planted and by_all >= LEAST["all"] * planted


def part_of(rows: list[Mutant], part: str) -> list[Mutant]:
    """Every n-th of the rows. Raises ValueError where `part` is not of the form 3/8."""
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise ValueError(f"--part={part} is not N/OF, as 3/8: one of so many parts")
    return rows[int(number) - 1 :: int(parts)]


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument(
        "command", nargs="?", choices=("table", "run"), default="table", help="what to do [%(default)s]"
    )
    parser.add_argument("--part", default="1/1", help="every n-th mutant, as 3/8 [%(default)s]")
    parser.add_argument("--module", default="", help="one module's mutants, as fp8 [all]")
    parser.add_argument("--quick", action="store_true", help="run only tests that are not slow")
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    parser.add_argument("--by", choices=("module", "kind"), default="module", help="rows of the table [%(default)s]")
    parser.add_argument("--json", action="store_true", help="the results as a JSON object")
    args = command.arguments(parser)
    rows = mutants()
    if args.module:
        command.check_names([args.module], {mutant.module for mutant in rows})
    rows = part_of([mutant for mutant in rows if args.module in ("", mutant.module)], args.part)
    if args.command == "run":
        result = "quick" if args.quick else "all"
        has_one = lambda mutant: bool({"all", result} & known().get(mutant.name, {}).keys())
        try:
            run([mutant for mutant in rows if args.again or not has_one(mutant)], args.quick)
        except RuntimeError as error:
            sys.exit(f"mutants.py: {error}")
    results = known()
    if args.json:
        results_by_name = {
            m.name: {"module": m.module, "kind": m.kind, "new": m.new} | results.get(m.name, {}) for m in rows
        }
        print(json.dumps(results_by_name))
    else:
        print(table(rows, results, args.by))
    sys.exit(0 if holds(rows, results) else 1)


if __name__ == "__main__":
    command.run(main)
