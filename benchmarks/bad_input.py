"""Bad command lines for every program: each must end within 10 s with a sentence and a status, before any work begins.

    python benchmarks/bad_input.py                  all (5 minutes), and records the counts in benchmarks/bad_input.json
    python benchmarks/bad_input.py train.py data    those whose command has one of these words
    python benchmarks/bad_input.py --table          the recorded counts, without running anything

Most lines are generated from the flags of each program's parser: wrong types, empty, negative and huge values, nan,
URLs, values for switches, typos. Flags that contradict each other are from refused.py; some lines are written by hand.
Each line runs in a fork of this process, which has imported everything once. A compile or the start of another program
ends the fork: the line was accepted. That is a fault, as are a traceback and silence, but for the lines of RIGHT.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import random
import re
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import command
from benchmarks import faults

RECORDED = ROOT / "benchmarks/bad_input.json"
LIMIT_S = 10  # of CPU time, so that a busy machine makes nothing hang; six times as long by the clock
BEGAN = 99  # status of a fork that was about to begin its work
OF_EACH_PROGRAM = 24  # generated lines, at most; train.py has all
PROGRAMS = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")])
    if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8") and path.name != Path(__file__).name
]
WRONG = {
    "int": ["", "x", "1.5", "nan", "1e3", "-7", "0x10", "9" * 40],
    "float": ["", "x", "nan", "inf", "-inf", "1e999", "1,5", "-7.5"],
    "path": ["s3://bucket/x", "file:///x", "~nobody-here/x"],
    "str": ["no such value"],
    "switch": ["1", "true", ""],
    "choice": ["", "no_such_choice"],
}
# Lines that are accepted because they are right: a pattern, and why.
RIGHT = {
    r"^aot.py bundles (flash:no_such|no_such_module:f)": "its child process reports the error, in the compiler's words",
    r"^kernels.py tune gmm --K=1$": "a sum of one",
    r"^data.py show --seq_len=9{11}$": "",
    r"^benchmarks/faults.py --jobs=9": "",
    r"^train.py --mesh=$": "all axes of size 1: one device",
    r"^train.py --mesh=fsdp:4$": "as many devices are simulated",
}
BY_HAND = """
kernels.py tune attention --T=0
kernels.py tune attention --dtype=int3
kernels.py tune attention --head_dim=0
kernels.py tune gmm --E=0
kernels.py tune gmm --K=1
kernels.py tune
kernels.py tune conv
roofline.py
roofline.py stp
roofline.py matmul --m=1.5 --k=8 --n=8
roofline.py matmul --m=1e300 --k=8 --n=8
roofline.py matmul --m=0 --k=8 --n=8
roofline.py collective all_reduce --bytes=nan
roofline.py collective all_reduce --bytes=1e999
roofline.py collective
roofline.py step --topology=tpu7x:0x0x0
roofline.py step --topology=tpu7x
roofline.py step --topology=
roofline.py step --num_slices=0
roofline.py plan --chips=0
roofline.py plan --chips=-4
roofline.py cost --goodput=0
data.py
data.py prepare
data.py prepare /nowhere --out=/tmp/bad_input.bin
data.py prepare /dev/null --out=/tmp/bad_input.bin
data.py prepare README.md --out=/dev/null/x.bin
data.py prepare README.md --out=/dev/null
data.py prepare README.md --out=/
data.py prepare README.md --out=README.md
data.py prepare README.md --out=/tmp/bad_input.bin --held_out=1
data.py prepare README.md --out=/tmp/bad_input.bin --held_out=nan
data.py prepare README.md --out=/tmp/bad_input.bin --tokenizer=/nowhere
data.py prepare README.md --out=/tmp/bad_input.bin --tokenizer=README.md
data.py prepare README.md --out=/tmp/bad_input.bin --separator=x
data.py prepare README.md --out=/tmp/bad_input.bin --token_dtype=uint16
data.py prepare README.md --out=/tmp/bad_input.bin --vocab_size=9
data.py prepare README.md --out=/tmp/bad_input.bin --vocab_size=9 --separator=9
data.py tokenizer
data.py tokenizer README.md
data.py tokenizer /nowhere --out=/tmp/bad_input.json
data.py tokenizer /dev/null --out=/tmp/bad_input.json
data.py tokenizer README.md --out=README.md
data.py tokenizer README.md --out=/
data.py tokenizer README.md --out=/dev/null/x.json
data.py tokenizer README.md --out=/tmp/bad_input.json --vocab_size=256
data.py tokenizer README.md --out=/tmp/bad_input.json --vocab_size=99999
data.py tokenizer README.md --out=/tmp/bad_input.json --most_bytes=0
data.py check /nowhere
data.py check README.md
data.py show /nowhere
data.py show README.md
data.py show /
data.py show /dev/null
data.py show --seq_len=0
data.py show --seq_len=99999999999
hardware.py v9
hardware.py tpu7
recipes.py no-such-recipe
recipes.py --better --what_if
aot.py results (
compiler_flags.py --workload=
aot.py schedule
aot.py schedule /nowhere
aot.py schedule /dev/null
aot.py schedule README.md
aot.py timeline
aot.py timeline /nowhere
aot.py timeline /dev/null
aot.py bundles
aot.py bundles flash
aot.py bundles flash:no_such
aot.py bundles no_such_module:f
aot.py bundles compiled.builders:flash_forward x
dense.py --size=1,2
dense.py --size=0,0,0
dense.py --tiles=x
aot.py --topology=v2:4x4
aot.py --kernel=x
aot.py --compare=all
aot.py --trace=/
aot.py --trace=/dev/null/x
log.py
log.py plot
log.py plot /nowhere
log.py plot README.md
log.py plot compiled/results_tpu7x.json
log.py plot README.md --out=README.md
log.py plot README.md --out=x.jpg
log.py plot README.md --out=/dev/null/x.png
report.py
report.py /nowhere
report.py README.md
report.py compiled/results_tpu7x.json
report.py /nowhere --report=README.md
aot.py --report=README.md
aot.py --report=/dev/null
aot.py --report=x --compare=vmem
roofline.py step --report=README.md
roofline.py step --report=/dev/null
aot.py --trace=x.json --compare=vmem
aot.py timeline /nowhere --trace=/
aot.py --topology=tpu7x:1x1x1 --mesh=fsdp:7
roofline.py remat --remat=most
roofline.py remat --topology=tpu9:2x2x1
train.py --corpus=/nowhere
train.py --corpus=/
train.py --corpus=/dev/null
train.py --corpus=README.md
train.py --metrics_file=/
train.py --metrics_file=/dev/null/x
train.py --profile_dir=/dev/null
train.py --profile_dir=README.md
train.py --checkpoint_dir=README.md
train.py --checkpoint_dir=/dev/null/x
train.py --mesh=
train.py --mesh=fsdp
train.py --mesh=fsdp:0
train.py --mesh=fsdp:-8
train.py --mesh=fsdp:8,fsdp:8
train.py --mesh=fsdp:3
train.py --mesh=pipe:8
train.py --mesh=banana:8
train.py --preset=
train.py --preset=gpt-5
train.py --recipe=x
train.py --vocab_size=2
train.py --seq_len=1000000000000
train.py --batch=7
train.py --num_heads=7
train.py --model_dim=7
train.py --dtype=float16
train.py --remat=auto
train.py --remat=custom --remat_tensors=x
train.py --fp8=static
train.py --fp8=static --fp8_scales=/nowhere
train.py --coordinator=x
train.py --coordinator=localhost:0
train.py --num_processes=2
train.py --xla_flags=nonsense
train.py --xla_flags=xla_no_such=1
train.py --profile_steps=5:3
train.py --steps
train.py steps=5
train.py -steps=5
train.py --steps 5 6
train.py \u2014\u2014steps=5
benchmarks/cases.py no-such
benchmarks/memory.py no-such
benchmarks/readme.py no-such
benchmarks/collectives.py --topology=x
benchmarks/composition.py 0
benchmarks/composition.py 9999
benchmarks/composition.py 5 4
benchmarks/endurance.py --models=
benchmarks/endurance.py --models=x
benchmarks/endurance.py --ways=x
benchmarks/endurance.py --steps=3
benchmarks/endurance.py --folder=/nowhere
benchmarks/experts.py --seeds=
benchmarks/experts.py --seeds=a
benchmarks/experts.py --seeds=-1
benchmarks/experts.py --steps=0
benchmarks/fp8_quality.py --models=
benchmarks/fp8_quality.py --recipes=x
benchmarks/fp8_quality.py --steps=3
benchmarks/fp8_quality.py --folder=/nowhere
benchmarks/fp8_quality.py run --seeds=x
benchmarks/kernels.py --only=(
benchmarks/kernels.py --only=nothing_of_the_kind
benchmarks/scaling.py --models=
benchmarks/scaling.py --models=x
benchmarks/scaling.py --slices=x
benchmarks/startup.py --times=0
benchmarks/startup.py --maxtext=/nowhere/python
benchmarks/faults.py no-such
""".strip().splitlines()

# Files that not even root can read: a folder, a path through a file, a name that is too long. {odd} is a folder with
# two more: a link to nothing, and a pipe that nobody writes to.
ODD = ["/", "README.md/x", "/tmp/" + "x" * 300, "{odd}/dangling", "{odd}/pipe"]
READ = ["train.py --corpus=", "train.py --fp8=static --fp8_scales=", "data.py show "]
READ += ["aot.py schedule ", "aot.py timeline ", "report.py ", "log.py plot "]
BY_HAND += [line + file for line in READ for file in ODD]
BY_HAND += [f"data.py prepare {file} --out=/tmp/bad_input.bin" for file in ODD[:4]]
WRITTEN = [f"train.py --{name}=" for name in ("metrics_file", "checkpoint_dir", "profile_dir", "tensorboard_dir")]
BY_HAND += [line + file for line in WRITTEN for file in ODD[1:3]]
TAKE_A_RUN = ["train.py", "flags.py", "aot.py", "roofline.py remat", "roofline.py step", "roofline.py bounds"]


class _FoundError(Exception):
    pass


def parsers() -> dict[str, argparse.ArgumentParser]:
    """{command: its parser} of every program and of its subcommands."""
    by_command = {}

    def add(line: str, parser: argparse.ArgumentParser) -> None:
        by_command[line] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, subparser in action.choices.items():
                    add(f"{line} {name}", subparser)

    def keep(parser, argv=None):
        raise _FoundError(parser)

    arguments, argv = command.arguments, sys.argv
    command.arguments = keep
    try:
        for program in PROGRAMS:
            sys.argv = [program]
            try:
                runpy.run_path(str(ROOT / program), run_name="__main__")
            except _FoundError as error:
                add(program, error.args[0])
    finally:
        command.arguments, sys.argv = arguments, argv
    return by_command


def kind_of(action: argparse.Action) -> str:
    if action.choices:
        return "choice"
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    if action.type is command.path:
        return "path"
    number = action.type if action.type in (int, float) else type(action.default)
    return number.__name__ if number in (int, float) else "str"


def generated(line: str, parser: argparse.ArgumentParser) -> list[str]:
    """Bad command lines for the flags of a parser."""
    flags = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    lines = [f"{line} --no_such_flag_at_all", f"{line} --zzz=3"]
    for action in flags:
        name = action.option_strings[-1] if "--no-" not in action.option_strings[-1] else action.option_strings[0]
        lines += [f"{line} {name}={value}" for value in WRONG[kind_of(action)]]
        lines.append(f"{line} {name}x=1")
        if kind_of(action) != "switch":
            lines.append(f"{line} {name}")
    if line != "train.py" and len(lines) > OF_EACH_PROGRAM:
        lines = lines[:2] + random.Random(line).sample(lines[2:], OF_EACH_PROGRAM - 2)
    return lines


def contradicting() -> list[str]:
    """Flags without effect for all programs that take a run's flags; refusals by mesh or device for train.py alone."""
    from benchmarks import refused

    without_effect, *others = refused.EXAMPLES.values()
    lines = [f"{program} {flags}" for program in TAKE_A_RUN for flags in without_effect if "--mesh" not in flags]
    return lines + [f"train.py {flags}" for group in [without_effect, *others] for flags in group]


def lines(words: list[str], sample: int = 0) -> list[str]:
    """All command lines whose command has one of the words; or `sample` of them, evenly chosen."""
    chosen = BY_HAND + contradicting() + [bad for line, parser in parsers().items() for bad in generated(line, parser)]
    chosen = [line for line in dict.fromkeys(chosen) if not words or any(word in line.split("--")[0] for word in words)]
    return chosen[:: max(1, math.ceil(len(chosen) / sample))] if sample else chosen


def outcome(line: str) -> tuple[str, str]:
    """(verdict, last line of stderr) of a command line in a fork: refused, accepted, silent, traceback or hung."""
    program, *rest = line.split(" ", 1)
    given = re.split(r" (?=-)| (?![^-]*such value)", rest[0]) if rest else []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            _child(program, given, out.fileno(), err.fileno())
        status, ends = None, time.monotonic() + 6 * LIMIT_S
        while status is None and time.monotonic() < ends and cpu_seconds(child) < LIMIT_S:
            pid, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if pid else time.sleep(0.01)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        err.seek(0)
        said = err.read().decode(errors="replace")
    last = (said.strip().splitlines() or [""])[-1]
    if status is None:
        return "hung", last
    if "Traceback (most recent" in said or status < 0:
        return "traceback", last
    if status in (0, BEGAN):
        return "accepted", last
    return "refused" if re.search(r"\w: \S", last) else "silent", last


def cpu_seconds(process: int) -> float:
    """CPU time of all threads of a process. A process that has ended must not have been waited for yet."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child(program: str, given: list[str], out: int, err: int) -> None:
    def began(*_, **__):
        os._exit(BEGAN)

    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False, errors="backslashreplace") for number in (1, 2))
    sys.argv = [str(ROOT / program), *(word.replace("{odd}", os.environ.get("ODD", "")) for word in given)]
    import subprocess

    import jax

    subprocess.Popen.__init__ = jax.stages.Lowered.compile = began
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def reason(line: str) -> str | None:
    """The reason why a line is right, None where it is not."""
    return next((why for pattern, why in RIGHT.items() if re.search(pattern, line)), None)


def prepared() -> None:
    """Imports all modules, on simulated devices, once for all forks."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for path in command.modules():
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@contextlib.contextmanager
def odd_files():
    """Makes the folder that {odd} names, and puts its path into the environment."""
    with tempfile.TemporaryDirectory() as folder:
        os.symlink("nowhere", f"{folder}/dangling")
        os.mkfifo(f"{folder}/pipe")
        os.environ["ODD"] = folder
        yield


def counted(verdicts: dict[str, str]) -> dict[str, dict[str, int]]:
    """{program: {verdict: command lines}} of {command line: verdict}."""
    counts = {}
    for line, verdict in verdicts.items():
        counts.setdefault(line.split()[0], Counter())[verdict] += 1
    return counts


def table(recorded: dict) -> str:
    """Markdown with command lines by program and verdict. Benchmarks share a row, programs with few lines another."""
    rows = {}
    for program, counts in sorted(recorded["counts"].items(), key=lambda row: -sum(row[1].values())):
        few = sum(counts.values()) < 30
        name = "benchmarks/*.py" if program.startswith("benchmarks/") else "others" if few else program
        rows[name] = rows.get(name, Counter()) + Counter(counts)
    rows["others"] = rows.pop("others", Counter())
    rows["in all"] = sum(rows.values(), Counter())
    lines = [f"On {recorded['machine']}, measured:", ""]
    lines += ["| program | command lines | refused | right | faults |", "|---|---|---|---|---|"]
    for name, counts in rows.items():
        cells = counts.total(), counts["refused"], counts["right"], sum(counts[fault] for fault in FAULTS)
        lines.append(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join(lines)


FAULTS = ("accepted", "silent", "traceback", "hung")  # all verdicts but refused and right


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="words in the commands to try; default: all")
    parser.add_argument("--sample", type=command.at_least(0), default=0, help="lines to try, evenly chosen; 0 is all")
    parser.add_argument("--table", action="store_true", help="show the recorded counts, and run nothing")
    args = command.arguments(parser)
    if args.table:
        return print(table(json.loads(RECORDED.read_text())))
    code = faults.code(*sorted(ROOT.glob("benchmarks/*.py")))  # before they run
    prepared()
    chosen, verdicts = lines(args.words, args.sample), {}
    if not chosen:
        raise ValueError(f"no program has {' or '.join(args.words)} in its command")
    with odd_files():
        for line in chosen:
            verdict, last = outcome(line)
            if verdict == "accepted" and reason(line) is not None:
                verdict = "right"
            verdicts[line] = verdict
            if verdict in FAULTS:
                print(f"{verdict:10} {line}\n           {last[:200]}", flush=True)
    counts = dict(code=code, machine=faults.machine(), counts=counted(verdicts))
    if not args.words and not args.sample:
        faults.store(RECORDED, counts)
    bad = sum(verdict in FAULTS for verdict in verdicts.values())
    print(f"{table(counts)}\n\n{len(chosen)} command lines, {bad} faults")
    sys.exit(bool(bad))


if __name__ == "__main__":
    command.run(main)
