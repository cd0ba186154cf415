"""A store of results of the TPU7x compiler for training steps, so that tables do not take hours of compilation.

    python aot.py results [REGEX] [--json]       stored results of steps whose flags match, beside today's prediction
    python aot.py --keep --preset=... --mesh=... compiles a step and stores the result

**Idea.** To compile a step takes minutes, for a large mixture of experts most of an hour. So results are stored in the
file next to this module, under the flags that determine the program: whether the step fits, its time by the compiled
schedule, the memory that it needs on the device and on the host, and the version of the compiler. An entry describes
the program, and the time by compiled/schedule.py, as of then; `--keep` again replaces it. Predictions are computed
anew: if roofline.py departs from the compiler, this shows in the table and in tests/test_compiled.py. An entry whose
program has since changed has the field `efficiency`, what was then other than in `workload.TODAY`. Tables mark it
"older", and it is held against a prediction of that program.
"""

import argparse
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import command
import config as config_lib
import flags as flags_lib
import tuned
from hardware import parse_topology
from predicted import planner
from predicted.step import GiB, Prediction, predict
from predicted.workload import TODAY, run_of

FILE = Path(__file__).with_name("results_tpu7x.json")
STORED = "fits step_s mfu exposed_comm_s peak_hbm_bytes host_bytes compile_s xla_flags memory used_bytes".split()


def key_of(prediction: Prediction) -> str:
    """The flags of aot.py that determine the program of a step, quoted for a shell; slice and preset come first."""
    in_key = {"topology", "num_slices", "preset", *config_lib.deciding("program")}
    name = lambda flag: flag.removeprefix("--no-").lstrip("-").partition("=")[0]
    return shlex.join(flag for flag in planner.flags_of(prediction) if name(flag) in in_key)


def prediction_of(key: str, result: dict | None = None) -> Prediction:
    """Today's prediction for the step that a key names, or for the older program of a result.

    Raises ValueError if a flag of the key is no longer valid.
    """
    parser = _parser()
    try:
        args = command.arguments(parser, shlex.split(key))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    config = flags_lib.from_args(args)
    topology, num_slices = flags_lib.slice_of(args)
    efficiency = replace(TODAY, **(result or {}).get("efficiency", {}))
    return predict(run_of(config, *parse_topology(topology), num_slices=num_slices, efficiency=efficiency))


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags_lib.add_run_flags(parser, "tpu7x:2x2x1")
    return parser


def read(file: Path | None = None) -> dict[str, dict]:
    """{key: result} of a file, by default `FILE`. Raises ValueError if the file exists and cannot be parsed."""
    file = file or FILE
    stored = tuned.read(file)
    if not stored and file.exists():
        raise ValueError(f"{file} cannot be read as version {tuned.VERSION}: restore it, or move it away")
    return stored


def load(prediction: Prediction, file: Path | None = None) -> dict | None:
    """The stored result for a predicted step: the fields `STORED` and the compiler's version; None if there is none."""
    return read(file).get(key_of(prediction))


def save(prediction: Prediction, result: dict, file: Path | None = None) -> None:
    """Stores a result or a refusal of aot.py. Raises OSError or ValueError if the file cannot be written or parsed."""
    read(file)  # raises: do not overwrite hours of compilation with one result
    versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
    tuned.save(key_of(prediction), {name: result[name] for name in STORED if name in result} | versions, file or FILE)


def load_or_compile(prediction: Prediction) -> dict:
    """The stored result for a step; else compiles it, which takes minutes. Exits with the error if that fails."""
    if not (result := load(prediction)):
        line = [sys.executable, str(command.ROOT / "aot.py"), *shlex.split(key_of(prediction)), "--keep"]
        others = {name: value for name, value in os.environ.items() if name != "LIBTPU_INIT_ARGS"}
        environment = others | {"IRONWOOD_TUNED": os.devnull}  # without flags and block sizes of this machine
        done = subprocess.run([*line, "--compile_anyway"], capture_output=True, text=True, env=environment)
        if not (result := load(prediction)):
            sys.exit(f"{shlex.join(line)}: {done.stderr[-500:]}")
    return result


def list_rows(pattern: str = "", file: Path | None = None) -> list[dict]:
    """The stored steps whose flags match: their flags, result and today's prediction, in seconds and bytes."""
    rows, regex = [], re.compile(pattern)
    for key, result in read(file).items():
        if regex.search(key):
            try:
                prediction = prediction_of(key, result)
                predicted = dict(step_s=prediction.step_s, mfu=prediction.mfu, hbm_bytes=prediction.hbm_bytes)
            except ValueError as error:
                predicted = dict(error=str(error))
            rows.append(dict(flags=key, compiled=result, predicted=predicted))
    return rows


def step_text(result: dict | None, text: str = "{step_s:.2f} s") -> str:
    """A table's cell for a result: the time of the step, "refused", or nothing if it was not compiled."""
    if result is None:
        return ""
    return (text.format(**result) if result["fits"] else "refused") + (" (older)" if "efficiency" in result else "")


def memory_of(result: dict) -> float | None:
    """Bytes of HBM that a step needs on a device, also if refused; None if another memory was the reason."""
    return result["peak_hbm_bytes"] if result["fits"] else result["used_bytes"] if result["memory"] == "hbm" else None


def table(rows: list[dict]) -> str:
    """A table with a line for each row; `exposed` is the share of the step in which a device waits for messages."""
    heads = f"{'compiled':>17}{'predicted':>11}{'MFU':>8}{'exposed':>9}{'GiB, compiled':>15}{'predicted':>11}"
    lines = [f"{heads}   flags of aot.py"]
    for row in rows:
        result, predicted = row["compiled"], row["predicted"]
        fits, needed, error = result["fits"], memory_of(result), predicted.get("error")
        mfu = f"{result['mfu']:.1%}" if fits else ""
        exposed = f"{result['exposed_comm_s'] / result['step_s']:.1%}" if fits else ""
        predicted_s, nbytes = (
            ("-", "-") if error else (f"{predicted['step_s']:.3f} s", f"{predicted['hbm_bytes'] / GiB:.1f}")
        )
        lines.append(
            f"{step_text(result, '{step_s:.3f} s'):>17}{predicted_s:>11}{mfu:>8}{exposed:>9}"
            f"{f'{needed / GiB:.1f}' if needed else '':>15}{nbytes:>11}   {row['flags']}{f': {error}' if error else ''}"
        )
    compilers = sorted({row["compiled"]["libtpu"] for row in rows})
    by = f", compiled by libtpu {', '.join(compilers)}" if compilers else ""
    return "\n".join([*lines, "", f"{len(rows)} of {len(read())} in {FILE.name}{by}"])


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__file__, prog="aot.py results")
    parser.add_argument(
        "pattern", nargs="?", type=command.regex, default="", metavar="REGEX", help="only steps whose flags match [all]"
    )
    parser.add_argument("--json", action="store_true", help="a list of JSON objects, in seconds and bytes")
    args = command.arguments(parser, argv)
    rows = list_rows(args.pattern)
    print(json.dumps(rows) if args.json else table(rows))
