"""benchmarks/reading.py, on a project of a few lines whose counts can be checked by eye."""

import json

import pytest

from benchmarks import reading

FILES = {
    "train.py": '''"""A run."""
import sys
import threading

import model

STEPS = 2


@staticmethod
def step():
    inner = lambda: model.loss(3)

    def left_out():
        return 0

    return inner()


def main(argv):
    thread = threading.Thread(target=step)

    thread.start()
    thread.join()


def unused(a, b, /, c, *args, d, **rest):
    return a


main(sys.argv)
''',
    "model.py": "import predicted.cost\n\n\ndef loss(x):\n    return x\n",
    "planner.py": "A = 1\n" * 7,
    "predicted/cost.py": "def _ring_kernel(x):\n" + "    x += 1\n" * 30 + "    return x\n",
    "tests/test_model.py": "import model\n\n\ndef test_it():\n" + "    model.loss(1)\n" * 99,
    "README.md": "# Name\n\nFive words, and a `path/to.py`\n\n## Read it\n\nNot these.\n",
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_tests_are_no_modules_and_folders_are(root):
    (root / ".venv").mkdir()
    (root / ".venv" / "other.py").touch()
    names = [path.relative_to(root).as_posix() for path in reading.sources(root)]
    assert names == ["model.py", "planner.py", "predicted/cost.py", "train.py"]


def test_an_import_brings_what_it_imports(root):
    assert {path.name for path in reading.imported(root)} == {"model.py", "cost.py"}
    assert {path.name for path in reading.imported(root, "planner")} == {"planner.py"}


def test_a_run_is_read_by_the_functions_that_it_enters(root):
    """Functions that a thread enters count, too. A line counts once, whether its functions were entered or not.

    In train.py main has 5 lines, and step 8 with its decorator; in model.py loss has 2. Their heads have 9 and 3 lines.
    predicted/cost.py is imported and not read: its only function begins on line 1, as its body does.
    """
    assert reading.to_read(root, reading.traced(root)) == (3, 9 + 3, 5 + 8 + 2)


def test_a_run_that_fails_is_an_error(root):
    (root / "train.py").write_text("raise SystemExit(3)")
    with pytest.raises(reading.subprocess.CalledProcessError):
        reading.traced(root)


def test_the_rows(root):
    rows_by_name = {row.what: row for row in reading.rows(root, reading.traced(root))}
    modules, lines, run, longest, longest_of_all, parameters, instruments, words = rows_by_name.values()
    assert (modules.value, lines.value) == (2, 5 + 32)
    assert (run.value, run.where) == (27, "3 functions 15, heads 12")
    assert (longest.value, longest.where) == (8, "train.py: step")
    assert (longest_of_all.value, longest_of_all.where) == (32, "predicted/cost.py: _ring_kernel")
    assert (parameters.value, parameters.where) == (6, "train.py: unused")
    assert instruments.value == round(100 * 7 / (7 + 5 + 33)) and instruments.met is False
    assert words.value == 2 + 5 and words.met is True
    assert longest_of_all.met is None


@pytest.mark.slow
def test_the_project_meets_its_targets():
    """All but the lines to read for the default run, which the table names."""
    assert [row for row in reading.rows(reading.ROOT, set()) if row.met is False] == []


def test_a_page_without_the_heading_is_refused():
    with pytest.raises(ValueError, match=r'no heading "## Read it"'):
        reading.words_before_reading("# Name\n\n## Run it\n")


def test_the_table_and_json_say_the_same(root, monkeypatch, capsys):
    monkeypatch.setattr(reading, "ROOT", root)
    for flags in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["reading.py", *flags])
        reading.main()
    table, _, text = capsys.readouterr().out.partition("[\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    met = {True: "yes", False: "no", None: ""}
    said = [(row["what"], f"{row['value']:,}", met[row["met"]]) for row in json.loads("[\n" + text)]
    assert [(row[0], row[1], row[3]) for row in rows] == said and len(said) == 8
