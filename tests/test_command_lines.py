"""Tests what every program answers to --help and to an unknown flag, and how it ends."""

import ast
import dataclasses
import errno
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import command
import inputs
from config import Config

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")])
    if '\nif __name__ == "__main__":' in path.read_text()
]
COMMANDS = [
    *PROGRAMS,
    "data.py prepare",
    "data.py show",
    "data.py tokenizer",
    "data.py check",
    "kernels.py tune",
    "log.py plot",
    "weights.py show",
    "weights.py export",
]
COMMANDS += [f"roofline.py {name}" for name in "matmul collective bounds step plan cost serve model".split()]
INSTRUMENTS = [path.relative_to(ROOT).as_posix() for path in command.modules() if path.parent != ROOT]
COMMANDS += [f"aot.py {name}" for name in "results schedule timeline bundles".split()]
PREDICTIONS = ["aot.py", "benchmarks/fp8.py"]
PREDICTIONS += [f"roofline.py {name}" for name in "bounds step plan cost model".split()]


@pytest.fixture
def ended(capsys, monkeypatch):
    """Returns a function that runs a command in this process and returns its exit status, stdout and stderr."""

    def ended(line: str) -> tuple[int, str, str]:
        program, *arguments = line.split()
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    monkeypatch.setenv("COLUMNS", "80")
    return ended


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-h, )?--(\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("line", COMMANDS)
def test_help_describes_the_program_and_each_argument(line, ended):
    status, out, err = ended(f"{line} --help")
    assert status == 0 and not err and out.startswith(f"usage: {Path(line.split()[0]).name}")
    if line in PROGRAMS:
        assert ast.get_docstring(ast.parse((ROOT / line).read_text())).splitlines()[0] in out
    # An argument with no text behind it and no indented line below.
    without_text = re.findall(r"^  (\S+(?: [^ ]+)*)$(?!\n {4})", out, re.MULTILINE)
    assert not without_text


@pytest.mark.parametrize("line", COMMANDS)
def test_an_unknown_flag_is_an_error(line, ended):
    status, out, err = ended(f"{line} --no_such_flag")
    assert status == 2 and not out and ": error: " in err


@pytest.mark.parametrize("line", PREDICTIONS)
def test_predictions_of_a_run_take_its_flags(line, ended):
    _, out, _ = ended(f"{line} --help")
    assert flags_in(out) >= {field.name for field in dataclasses.fields(Config)}
    assert "ignores those on which its answer does not depend" in " ".join(out.split())


NESTED = ["roofline.py collective all_reduce --bytes=1", "roofline.py collective scaling"]


@pytest.mark.parametrize("line", [*PREDICTIONS, "roofline.py serve", *NESTED])
def test_every_proposed_name_is_a_flag(line, ended):
    _, out, _ = ended(f"{line} --help")
    for wrong in ("model_flags", "default_topology", "comand"):  # like names of the parser's own
        _, _, err = ended(f"{line} --{wrong}=3")
        proposed = re.findall(r"--(?:no-)?(\w+)", err.partition("did you mean ")[2])
        assert f"no flag '--{wrong}=3'" in err and len(proposed) <= 3 and set(proposed) <= flags_in(out)
    _, _, err = ended(f"{line} --jsom")
    assert "did you mean --json?" in err


# -- how a program ends


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_ends_through_command_run(program):
    """Under `if __name__ == "__main__"` are only imports and calls of command.run, or of what it is run with."""
    blocks = [
        node
        for node in ast.parse((ROOT / program).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    *_, last = [node for node in blocks[-1].body if not isinstance(node, ast.Import)]
    calls = [node for node in ast.walk(last) if isinstance(node, ast.Call)]
    assert {"command.run", "command.demonstrate"} & {ast.unparse(call.func) for call in calls}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_ends_in_a_way_of_its_own(program):
    source = (ROOT / program).read_text()
    assert not re.search(r"parser\.error|parser\.exit|BrokenPipeError|KeyboardInterrupt|description=__doc__", source)


def fails(error: BaseException):
    raise error


@pytest.mark.parametrize(
    "error, status, words",
    [
        (ValueError("batch=3 is odd"), 2, "error: batch=3 is odd"),
        (FloatingPointError("steps 1 to 9"), 1, "error: steps 1 to 9"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 1, "error: [Errno 2] No such file: 'x'"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit("gone"), 1, "gone"),
        (SystemExit(7), 7, ""),
        (SystemExit(), 0, ""),
    ],
)
def test_each_way_to_end_has_its_status(error, status, words, capsys):
    with pytest.raises(SystemExit) as end:
        command.run(fails, error)
    assert end.value.code == status
    printed = capsys.readouterr().err
    assert printed.rstrip("\n").endswith(words) and printed.count("\n") == bool(words)


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ValueError, match="invalid literal"):
        command.run(int, "x")
    with pytest.raises(KeyError):
        command.run(fails, KeyError("x"))


def test_the_result_of_main_is_returned():
    assert command.run(lambda *args: args, 1, 2) == (1, 2)


PRINTS = "import command; command.run(print, 'x' * 100_000)"
SAYS = "import command, sys; command.run(lambda: (command.say('a' * 9000), command.say('b'), sys.stderr.write('end')))"
NOWHERE = {"full": ">/dev/full", "closed": ">&-", "left": "| head -c 5"}


def shell(code: str, redirection: str, **env) -> subprocess.CompletedProcess:
    line = f'{sys.executable} -c "$CODE" {redirection}; exit ${{PIPESTATUS[0]}}'
    environment = os.environ | {"CODE": code, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("stdout, status", [("full", 1), ("closed", 1), ("left", 141)])
def test_lost_output_is_reported_by_the_status(stdout, status):
    """A program that prints ends, without a message if the reader left; a run continues to its end."""
    done = shell(PRINTS, NOWHERE[stdout])
    assert done.returncode == status and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == ("error: standard output: " in done.stderr) == (stdout != "left")
    done = shell(SAYS if stdout != "left" else SAYS.replace("9000", "99_000"), NOWHERE[stdout])
    assert done.returncode == status and "the run goes on without" in done.stderr and "end" in done.stderr


def test_characters_that_the_encoding_lacks_are_escaped():
    done = shell(r"import command; command.run(print, 'caf\u00e9 \u4e16 \udcff')", "", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "caf\\xe9 \\u4e16 \\udcff\n")


def test_a_closed_stdout_is_not_the_next_file(tmp_path):
    code = f"import command, os, sys; command.run(lambda: print(os.open({str(tmp_path)!r}, 0), file=sys.stderr))"
    assert shell(code, ">&-").stderr == "3\n"


def test_an_interrupt_that_a_callback_would_swallow_ends_the_program():
    """Jax's callback of the garbage collector does that; Python prints `Exception ignored`."""
    loses = "import gc, os; gc.callbacks.append(lambda *_: os.kill(os.getpid(), 2)); gc.collect(); print('lost')"
    done = shell(f"import command; command.end_at_once_when_interrupted(); {loses}", "")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# -- python -OO, which removes docstrings and asserts


def reads_docstring(node: ast.AST) -> bool:
    """Whether this is __doc__ or __debug__, the attribute __doc__, or a call of inspect.getdoc or cleandoc."""
    if isinstance(node, ast.Call):
        return (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in ("getdoc", "cleandoc")
    if isinstance(node, ast.Attribute):
        return node.attr == "__doc__"
    return isinstance(node, ast.Name) and node.id in ("__doc__", "__debug__")


def without_fallback(source: str) -> list[str]:
    """Returns what changes in a source under `python -OO`: asserts, and reads of a docstring without an `or`."""
    nodes = [*ast.walk(ast.parse(source))]
    first = [node.values[0] for node in nodes if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)]
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in nodes
        if isinstance(node, ast.Assert) or (reads_docstring(node) and node not in first)
    ]


def test_reads_of_docstrings_are_found():
    lines = without_fallback("__doc__\nassert x\nf(a.b.__doc__)\ninspect.getdoc(f)\nx = y or f.__doc__\n__debug__")
    assert sorted(line.split(":")[0] for line in lines) == [f"line {number}" for number in range(1, 7)]
    assert not without_fallback("x = f.__doc__ or ''\ny = inspect.getdoc(f) or 'none'\ndoc = '__doc__'\n")


@pytest.mark.parametrize(
    "path", [*command.modules(), *sorted(ROOT.glob("benchmarks/*.py"))], ids=lambda path: path.stem
)
def test_nothing_depends_on_docstrings_and_asserts(path):
    assert not without_fallback(path.read_text(encoding="utf-8"))


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_help_is_complete_without_docstrings():
    runs = [run_python("-OO", "train.py", "--help"), run_python("train.py", "--help")]
    assert [run.returncode for run in runs] == [0, 0] and runs[0].stdout == runs[1].stdout


@pytest.mark.slow
def test_a_run_trains_without_docstrings_and_asserts():
    run = run_python(
        "-OO", "train.py", "--steps=2", "--sample=0", "--eval_batches=0", "--num_layers=1", "--mesh=fsdp:2"
    )
    assert run.returncode == 0 and "step 2/2  loss " in run.stdout, run.stderr


# -- values


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert inputs.expanded("~/m.jsonl") == "/home/me/m.jsonl"
    assert inputs.expanded("a/~/b") == "a/~/b" and inputs.expanded("") == ""
    assert inputs.expanded("gs://bucket/~", ("gs",)) == "gs://bucket/~"


@pytest.mark.parametrize("path", ["s3://bucket/x", "file:///tmp/x", "~nobody-here/x"])
def test_impossible_paths_are_refused(path):
    with pytest.raises(ValueError, match=r"must be a path of this machine, or of gs://|no user's home"):
        inputs.expanded(path, ("gs",))


@pytest.mark.parametrize("text", ["0", "x", "1.5", "nan", "inf", ""])
def test_too_small_numbers_and_other_text_are_refused(text):
    with pytest.raises(command.argparse.ArgumentTypeError, match=r"must be a whole number of at least 1$"):
        command.at_least(1)(text)
    assert command.at_least(1)("12") == 12 and command.at_least(0, float)("1.5") == 1.5


@pytest.mark.parametrize("program", [*PROGRAMS, *INSTRUMENTS])
def test_every_path_is_expanded(program):
    """Arguments that are named like files or folders have the type command.path; Config's fields declare it."""
    calls = [node for node in ast.walk(ast.parse((ROOT / program).read_text())) if isinstance(node, ast.Call)]
    for call in (call for call in calls if ast.unparse(call.func).endswith("add_argument")):
        options = {option.arg: ast.unparse(option.value) for option in call.keywords}
        words = f"{ast.unparse(call.args[0])} {options.get('metavar', '')}"
        if re.search(r"FILE|PATH|PYTHON|'(--)?(out|folder|path|file)s?'", words):
            assert options.get("type") in ("command.path", "command.path_or_url"), ast.unparse(call)


def test_a_pipe_is_refused_at_once(tmp_path):
    """A device, which never ends, is refused, too; a file is read."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=f"^{path} is no ordinary file: save its text to one$"):
            command.read_text(str(path))
    (tmp_path / "text").write_text("caf\u00e9", encoding="utf-8")
    assert command.read_text(str(tmp_path / "text")) == "caf\u00e9"
    with pytest.raises(OSError, match="Is a directory"):
        command.read_text(str(tmp_path))


@pytest.mark.slow
def test_programs_refuse_pipes_that_a_user_names(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for line in ("aot.py schedule {}", "train.py --fp8=static --fp8_scales={}"):
        program, *flags = line.format(tmp_path / "pipe").split()
        ended = subprocess.run([sys.executable, ROOT / program, *flags], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and "is no ordinary file" in ended.stderr.splitlines()[-1]
