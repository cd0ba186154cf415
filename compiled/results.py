"""Compiled: what the TPU7x compiler said of whole steps, kept, so that nobody waits hours for a table.

    python aot.py results [REGEX] [--json]       what is kept of steps whose flags match, beside today's prediction
    python aot.py --keep --preset=... --mesh=... compiles a step, and keeps what it finds

To compile a step takes minutes, for a large mixture most of an hour. The results are in the file beside this module, by
the flags that make the program: whether it fits, how long a step takes by its schedule, what it needs of the device's
memory and of the host's, and which compiler said so. An entry describes the program, and the count of schedule.py, as
they were then; `--keep` again replaces it. The prediction beside it is today's: if roofline.py departs from the
compiler, that shows here, and in tests/test_compiled.py.
"""

import argparse
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import command
import flags as flags_lib
import tuned
from hardware import parse_topology
from predicted import planner
from predicted.step import GiB, Prediction, predict
from predicted.workload import run_of

FILE = Path(__file__).with_name("results_tpu7x.json")
KEPT = "fits step_s mfu exposed_comm_s peak_hbm_bytes host_bytes compile_s xla_flags memory used_bytes".split()
# Flags on which neither the time nor the memory of a step depends.
_OF_THE_RUN = "steps seed learning_rate warmup_ratio final_lr_ratio weight_decay beta1 beta2 corpus eval_every "
_OF_THE_RUN += "eval_batches log_every metrics_file sample profile_dir profile_steps checkpoint_dir save_every "
_OF_THE_RUN += "keep_checkpoints skip_damaged_checkpoints num_processes process_id coordinator peer_timeout "
_OF_THE_RUN += "compilation_cache max_skipped"


def key_of(prediction: Prediction) -> str:
    """The flags of aot.py that make the program of a predicted step, as a shell takes them, slice and preset first."""
    ignored = set(_OF_THE_RUN.split())
    name = lambda flag: flag.removeprefix("--no-").lstrip("-").partition("=")[0]
    return shlex.join(flag for flag in planner.flags_of(prediction) if name(flag) not in ignored)


def prediction_of(key: str) -> Prediction:
    """What is predicted today of the step that a key names. Raises ValueError: a flag is not what it was."""
    parser = _parser()
    try:
        args = command.arguments(parser, shlex.split(key))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    config = flags_lib.from_args(args)
    topology, num_slices = flags_lib.slice_of(args)
    return predict(run_of(config, *parse_topology(topology), num_slices=num_slices))


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags_lib.add_run_flags(parser, "tpu7x:2x2x1")
    return parser


def read(file: Path | None = None) -> dict[str, dict]:
    """{key: what was compiled} of a file, default: `FILE`. Raises ValueError: it is there and cannot be read."""
    file = file or FILE
    result = tuned.read(file)
    if not result and file.exists():
        raise ValueError(f"{file} cannot be read as version {tuned.VERSION}: restore it, or move it away")
    return result


def find(prediction: Prediction, file: Path | None = None) -> dict | None:
    """What is kept of the step that is predicted: `fits`, and with it `step_s`, `peak_hbm_bytes` and all of `KEPT`."""
    return read(file).get(key_of(prediction))


def keep(prediction: Prediction, result: dict, file: Path | None = None) -> None:
    """Keeps what aot.py found, of a refusal too. Raises OSError, ValueError: the file cannot be written, or read."""
    read(file)  # hours of compiles are not replaced by one
    versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
    tuned.keep(key_of(prediction), {name: result[name] for name in KEPT if name in result} | versions, file or FILE)


def ask(prediction: Prediction) -> dict:
    """What is kept of a step; else what aot.py finds, after minutes, and keeps. Ends the program with its words."""
    if not (result := find(prediction)):
        line = [sys.executable, str(command.ROOT / "aot.py"), *shlex.split(key_of(prediction)), "--keep"]
        others = {name: value for name, value in os.environ.items() if name != "LIBTPU_INIT_ARGS"}
        project = others | {"IRONWOOD_TUNED": os.devnull}  # without what is this machine's own
        done = subprocess.run([*line, "--compile_anyway"], capture_output=True, text=True, env=project)
        if not (result := find(prediction)):
            sys.exit(f"{shlex.join(line)}: {done.stderr[-500:]}")
    return result


def rows(pattern: str = "", file: Path | None = None) -> list[dict]:
    """Of each kept step: its flags, what was compiled, what is predicted, in seconds and bytes."""
    result, wanted = [], re.compile(pattern)
    for key, its in read(file).items():
        if wanted.search(key):
            try:
                expected = prediction_of(key)
                predicted = dict(step_s=expected.step_s, mfu=expected.mfu, hbm_bytes=expected.hbm_bytes)
            except ValueError as error:
                predicted = dict(error=str(error))
            result.append(dict(flags=key, compiled=its, predicted=predicted))
    return result


def of_step(result: dict | None, text: str = "{step_s:.2f} s") -> str:
    """For a table's cell: the step, refused, or nothing where it was not compiled."""
    return "" if result is None else text.format(**result) if result["fits"] else "refused"


def memory_of(result: dict) -> float | None:
    """Bytes of HBM that a device needs, of a refused step too; None where the compiler ran short of another memory."""
    return result["peak_hbm_bytes"] if result["fits"] else result["used_bytes"] if result["memory"] == "hbm" else None


def table(result: list[dict]) -> str:
    """One line a step; `waits` is the share of it that messages take and nothing hides."""
    heads = f"{'compiled':>9}{'predicted':>11}{'MFU':>8}{'waits':>8}{'GiB, compiled':>15}{'predicted':>11}"
    lines = [f"{heads}   flags of aot.py"]
    for row in result:
        its, expected = row["compiled"], row["predicted"]
        mfu, waits = (f"{its['mfu']:.1%}", f"{its['exposed_comm_s'] / its['step_s']:.1%}") if its["fits"] else ("", "")
        needed, why = memory_of(its), expected.get("error")
        predicted_s, nbytes = (
            ("-", "-") if why else (f"{expected['step_s']:.3f} s", f"{expected['hbm_bytes'] / GiB:.1f}")
        )
        lines.append(
            f"{of_step(its, '{step_s:.3f} s'):>9}{predicted_s:>11}{mfu:>8}{waits:>8}"
            f"{f'{needed / GiB:.1f}' if needed else '':>15}{nbytes:>11}   {row['flags']}{f': {why}' if why else ''}"
        )
    compilers = sorted({row["compiled"]["libtpu"] for row in result})
    by = f", compiled by libtpu {', '.join(compilers)}" if compilers else ""
    return "\n".join([*lines, "", f"{len(result)} of {len(read())} in {FILE.name}{by}"])


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__file__, prog="aot.py results")
    parser.add_argument(
        "pattern", nargs="?", type=command.regex, default="", metavar="REGEX", help="steps whose flags match it [all]"
    )
    parser.add_argument("--json", action="store_true", help="a list of JSON objects, in seconds and bytes")
    args = command.arguments(parser, argv)
    result = rows(args.pattern)
    print(json.dumps(result) if args.json else table(result))
