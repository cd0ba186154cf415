"""benchmarks/reading.py: what it counts, of a project of two modules."""

import ast
from pathlib import Path

import pytest

from benchmarks import reading

MAIN = '''"""A head."""

import part


def entered(a, *b, c=1):
    return part.other()


def not_entered():
    return 1
'''
PART = "def other():\n    return 2\n"


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "train.py").write_text(f"{MAIN}\n\nif __name__ == '__main__':\n    entered(1)\n")
    (tmp_path / "part.py").write_text(PART)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_part.py").write_text("import part\n")
    return tmp_path


def test_lines_to_read_are_those_of_what_is_entered_and_of_heads(project):
    """Two functions of two lines, the five lines above the first, and no line twice."""
    entered = reading.traced(project)
    assert {(path.name, line) for path, line in entered} >= {("train.py", 6), ("part.py", 1)}
    assert reading.to_read(project, entered) == (2, 5 + 2 + 2)


def test_what_an_import_brings(project):
    assert {path.name for path in reading.imported(project, "train")} == {"train.py", "part.py"}
    assert {path.name for path in reading.imported(project, "part")} == {"part.py"}


def test_tests_are_no_sources(project):
    assert [path.name for path in reading.sources(project)] == ["part.py", "train.py"]


def test_parameters_and_words():
    function = ast.parse(MAIN).body[2]
    assert reading.num_parameters(function) == 3
    assert reading.words_before_reading("one two\n\nthree\n## Read it\nfour\n") == 3
    with pytest.raises(ValueError, match="no heading"):
        reading.words_before_reading("one two")
