"""Command lines: how every program reads its flags, and how it ends. This module does not import jax.

    python train.py --step=5                     2, train.py: error: there is no flag '--step=5'; did you mean --steps?
    python hardware.py > /dev/full               1, hardware.py: error: standard output: No space left on device
    python roofline.py model --explain | head    141, without a message: nobody reads its output any more

`parser` makes a parser from a file's docstring, `arguments` reads a command line with it, `run` calls a program's main.

| a program ends | status |
|---|---|
| normally | 0, or what its main returns |
| because something failed: OSError, FloatingPointError | 1, with a message |
| because of a wrong flag or input: ValueError | 2, with a message |
| by Ctrl-C | 130 |
| because nobody reads its output any more | 141, as from SIGPIPE |

Errors that the project or the operating system raises end with a message of one line. Any other error is a defect, and
ends with a traceback. Characters that the encoding of stdout lacks are escaped.
"""

import argparse
import contextlib
import errno
import io
import math
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from inputs import did_you_mean, expanded

ROOT = Path(__file__).resolve().parent
_lost: list[OSError] = []  # why stdout could not be written


def modules() -> list[Path]:
    """Returns the files of the project's modules, without tests and benchmarks."""
    return sorted([*ROOT.glob("*.py"), *ROOT.glob("predicted/*.py"), *ROOT.glob("compiled/*.py")])


# -- the command line


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps lines, but not at hyphens: names such as gpt-oss-20b are shown as they are typed."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def parser(file: str, **options) -> argparse.ArgumentParser:
    """Returns the parser of a program or demonstration, described by the docstring at the head of its file.

    The docstring is read from the source: `python -OO` removes docstrings from the modules.
    """
    description = Path(file).read_text(encoding="utf-8").split('"""')[1]
    return argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=_Help,
        **{"prog": Path(file).name, **options},
    )


def arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, by default the program's.

    Raises ValueError for an unknown flag, with the nearest known ones. A subcommand may name its own parser with
    `set_defaults(parser=...)`.
    """
    args, unknown = parser.parse_known_args(argv)
    check_known(unknown, getattr(args, "parser", parser))
    return args


def check_known(unknown: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raises ValueError for the first argument that a parser did not know, with the nearest known flags."""
    if not unknown:
        return
    word = unknown[0]
    if not word.startswith("-"):
        raise ValueError(f"{word!r} is one argument too many: flags begin with two dashes")
    flags = [flag.removeprefix("--") for flag in parser._option_string_actions if flag.startswith("--")]
    raise ValueError(f"there is no flag {word!r}{did_you_mean(word.lstrip('-').partition('=')[0], flags, '--')}")


def check_names(names: Collection[str], known: Collection[str]) -> None:
    """Raises ValueError for the first name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {name!r}{did_you_mean(name, known)}")


def path(text: str) -> str:
    """The type of a flag that is a local path: ~ is the home folder. Raises ArgumentTypeError for a URL."""
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def path_or_url(text: str) -> str:
    """The type of a flag that is a local path, as `path`, or one with a scheme, as storage.py reads them."""
    return text if "://" in text else path(text)


def read_text(path: str) -> str:
    """The text of a file that a user named.

    Raises:
      ValueError: it is a pipe or a device, which may never end, or is not UTF-8.
      OSError: it cannot be read.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ValueError(f"{path} is no ordinary file: save its text to one")
    with open(path, encoding="utf-8") as file:
        return file.read()


def at_least(low: int, number: type = int) -> Callable[[str], float]:
    """Returns the type of a flag whose values are numbers of at least `low`."""

    def read(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = math.nan
        if not low <= value < (2**63 if number is int else math.inf):
            kind = "a whole number" if number is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} must be {kind} of at least {low}")
        return value

    return read


def size(text: str) -> int:
    """The type of a flag that is a whole number of at least 1; it may be written as 1e6."""
    value = at_least(1, float)(text)
    if value != int(value) or value >= 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, and under 2^53")
    return int(value)


def whole_numbers(text: str) -> list[int]:
    """The type of a flag that lists numbers of at least 0, separated by commas."""
    return [at_least(0)(word) for word in text.split(",")]


def regex(text: str) -> re.Pattern:
    """The type of a flag that is a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


# -- the end


def run(main: Callable, *args):
    """Calls main(*args) and returns its result; if it raises, ends the program with the status of the table above."""
    _open_streams()
    status, result = None, None  # a status other than None ends the program
    try:
        result = main(*args)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            _say_error(end.code)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except (ValueError, FloatingPointError, OSError) as error:
        if not any(error is lost for lost in _lost):
            if not is_for_the_user(error):
                raise
            _say_error(f"{program()}: error: {error}")
            status = 2 if isinstance(error, ValueError) else 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if _lost:
        _discard_stdout()
        reader_left = _lost[0].errno == errno.EPIPE
        if not reader_left:
            _say_error(f"{program()}: error: standard output: {_lost[0].strerror}")
        status = status or (128 + signal.SIGPIPE if reader_left else 1)
    if status is not None:
        raise SystemExit(status)
    return result


def end_at_once_when_interrupted() -> None:
    """Makes Ctrl-C end the program with 130 and no message, until another handler is set.

    While jax is imported and traces, a KeyboardInterrupt is lost in its garbage collector's callback, or aborts C++.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # it is ignored in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))


def demonstrate(main: Callable, file: str, *, devices: int = 1) -> None:
    """Runs the demonstration of a file, which takes no flags, on this number of simulated devices."""

    def on_devices():
        arguments(parser(file))
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        main()

    run(on_devices)


def say(text: str, end: str = "\n") -> None:
    """Prints and flushes. If stdout fails, the program continues without it; its exit status shows that."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _discard_stdout()
        _say_error(f"{program()}: standard output is lost ({error.strerror}), the run goes on without")


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def program() -> str:
    """The program's name in messages."""
    return Path(sys.argv[0]).name


def is_for_the_user(error: Exception) -> bool:
    """Whether this project or the operating system raised an error; any other error is a defect."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(frame.filename).resolve()
    is_ours = file.is_relative_to(ROOT) and "site-packages" not in file.parts and frame.line.startswith("raise")
    return is_ours or isinstance(error, OSError)


def _open_streams() -> None:
    """Reopens closed standard streams, whose numbers the next opened file would get.

    A closed stdout then fails when it is written to, as a full one does.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # it gets the lowest free number
    if sys.stdout is sys.__stdout__:  # otherwise a test replaced it, or it is ours already
        sys.stdout = output(1)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)


class _Remembering(io.FileIO):
    """A file that records why it could not be written: argparse, for one, drops that error."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _lost.append(error)
            raise


def output(number: int) -> io.TextIOWrapper:
    """Returns a stdout that writes to a file descriptor, and escapes characters that its encoding lacks."""
    encoding = sys.stdout.encoding if sys.stdout else "utf-8"
    file = io.BufferedWriter(_Remembering(number, "w", closefd=False))
    return io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=os.isatty(number))


def _discard_stdout() -> None:
    """Discards everything that is printed from now on, and everything that is buffered."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _say_error(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
