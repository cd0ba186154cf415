"""A sample of the bad command lines; all of them: python benchmarks/bad_input.py."""

import subprocess
import sys

import pytest

from benchmarks import bad_input


@pytest.mark.slow
def test_a_sample_is_refused_in_a_sentence():
    program = [sys.executable, "benchmarks/bad_input.py", "flags.py", "hardware.py", "recipes.py", "--sample=30"]
    done = subprocess.run(program, cwd=bad_input.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(" command lines, 0 faults\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "line, verdict",
    [("flags.py --steps=0", "refused"), ("flags.py --steps=1", "accepted"), ("no_such_program.py", "traceback")],
)
def test_faults_are_found(line, verdict):
    code = f"from benchmarks import bad_input; print(bad_input.outcome({line!r})[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=bad_input.ROOT, capture_output=True, text=True)
    assert done.stdout == f"{verdict}\n"
