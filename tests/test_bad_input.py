"""A sample of the bad command lines; all of them: python benchmarks/bad_input.py."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import bad_input


@pytest.mark.slow
def test_a_sample_is_refused_in_a_sentence():
    program = [sys.executable, "benchmarks/bad_input.py", "flags.py", "hardware.py", "recipes.py", "--sample=30"]
    done = subprocess.run(program, cwd=bad_input.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(" command lines, 0 faults\n"), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, verdict",
    [("flags.py --steps=0", "refused"), ("flags.py --steps=1", "accepted"), ("no_such_program.py", "traceback")],
)
def test_faults_are_found(line, verdict):
    code = f"from benchmarks import bad_input; print(bad_input.outcome({line!r})[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=bad_input.ROOT, capture_output=True, text=True)
    assert done.stdout == f"{verdict}\n"


@pytest.mark.slow
def test_lines_by_hand_are_of_programs_and_commands_that_exist():
    """A program that was renamed would be refused for its name, or do nothing and count as accepted."""
    code = "from benchmarks import bad_input; print(*bad_input.parsers(), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=bad_input.ROOT, capture_output=True, text=True)
    commands = done.stdout.splitlines()
    assert set(bad_input.TAKE_A_RUN) <= set(commands), done.stderr
    assert (
        {line.split()[0] for line in bad_input.BY_HAND}
        <= set(bad_input.PROGRAMS)
        == {line.split()[0] for line in commands}
    )


def test_the_table_in_results_is_the_recorded_one():
    """python benchmarks/readme.py "bad command lines"."""
    recorded = json.loads(bad_input.RECORDED.read_text())
    page = (bad_input.ROOT / "docs/RESULTS.md").read_text()
    (written,) = re.findall(r"<!-- measured: bad command lines -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert written == bad_input.table(recorded)
    assert set(recorded["counts"]) <= set(bad_input.PROGRAMS)
    assert all(set(counts) <= {"refused", "right"} for counts in recorded["counts"].values())
