"""Every configuration of the pairwise cover of tests/test_composition.py, run: does it train as the plain model does?

    python benchmarks/composition.py [FIRST LAST]

Three steps of each on 8 simulated devices, a row for each: what it is, whether it equals the reference, and seconds.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: F401, it makes the 8 devices
from test_composition import check, covering, name_of

import command


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument(
        "first", nargs="?", type=command.at_least(1), default=1, metavar="FIRST", help="the first one [%(default)s]"
    )
    parser.add_argument("last", nargs="?", type=command.at_least(1), metavar="LAST", help="the last one [of all]")
    args = command.arguments(parser)
    chosen, wrong = covering()[args.first - 1 : args.last], 0
    if not chosen:
        raise ValueError(f"there are {len(covering())} configurations, and none from {args.first} to {args.last}")
    print("| | configuration | equals the reference | s |\n|---|---|---|---|")
    for number, settings in enumerate(chosen, args.first):
        begun = time.perf_counter()
        try:
            check(settings)
            verdict = "yes"
        except Exception as error:  # whatever it is, the others are still to be run
            verdict, wrong = f"no: {(str(error).splitlines() or [type(error).__name__])[0]}", wrong + 1
        print(f"| {number} | {name_of(settings)} | {verdict} | {time.perf_counter() - begun:.0f} |", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    command.run(main)
