"""What every program answers to --help and to a flag that it lacks; and that what predicts a run takes its flags."""

import ast
import dataclasses
import re
import runpy
import sys
from pathlib import Path

import pytest

from config import Config

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")])
    if '\nif __name__ == "__main__":' in path.read_text()
]
COMMANDS = [*PROGRAMS, "data.py prepare", "data.py show", "kernels.py tune"]
COMMANDS += [f"roofline.py {name}" for name in "matmul collective bounds step plan cost serve model".split()]
PREDICTIONS = ["aot.py", "remat.py", "benchmarks/fp8.py"]
PREDICTIONS += [f"roofline.py {name}" for name in "bounds step plan cost model".split()]


@pytest.fixture
def ended(capsys, monkeypatch):
    """Runs a command in this process: its exit status, and what it prints to stdout and stderr."""

    def ended(command: str) -> tuple[int, str, str]:
        program, *arguments = command.split()
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    monkeypatch.setenv("COLUMNS", "80")
    return ended


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-h, )?--(\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_does_and_each_argument(command, ended):
    status, out, err = ended(f"{command} --help")
    assert status == 0 and not err and out.startswith(f"usage: {Path(command.split()[0]).name}")
    if command in PROGRAMS:
        assert ast.get_docstring(ast.parse((ROOT / command).read_text())).splitlines()[0] in out
    # An argument that is followed by nothing, nor by a line further in.
    without_text = re.findall(r"^  (\S+(?: [^ ]+)*)$(?!\n {4})", out, re.MULTILINE)
    assert not without_text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_that_is_none_is_an_error(command, ended):
    status, out, err = ended(f"{command} --no_such_flag")
    assert status == 2 and not out and ": error: " in err


@pytest.mark.parametrize("command", PREDICTIONS)
def test_what_predicts_a_run_takes_its_flags(command, ended):
    _, out, _ = ended(f"{command} --help")
    assert flags_in(out) >= {field.name for field in dataclasses.fields(Config)}
    assert "ignores those on which its answer does not depend" in " ".join(out.split())


NESTED = ["roofline.py collective all_reduce --bytes=1", "roofline.py collective scaling"]


@pytest.mark.parametrize("command", [*PREDICTIONS, "roofline.py serve", *NESTED])
def test_what_is_proposed_is_a_flag(command, ended):
    _, out, _ = ended(f"{command} --help")
    for wrong in ("model_flags", "default_topology", "comand"):  # as names of the parser's own are
        _, _, err = ended(f"{command} --{wrong}=3")
        proposed = re.search(r"did you mean --(\w+)\?", err)
        assert f"no flag '--{wrong}=3'" in err and (not proposed or proposed[1] in flags_in(out))
    _, _, err = ended(f"{command} --jsom")
    assert "did you mean --json?" in err
