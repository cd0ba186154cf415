"""Fault drills: 120 trials of what goes wrong around a run, and 60 flipped bits, each with what must hold afterwards.

    python benchmarks/faults.py                          all that benchmarks/faults.json does not have yet (15 minutes)
    python benchmarks/faults.py killed_in_a_save 17      all trials of a kind, and number 17
    python benchmarks/faults.py --list                   every trial, and what is done in it
    python benchmarks/faults.py --table                  the stored results, without running anything

**A trial** starts `python train.py` (or another program) as a user does, does something to it, mends what cannot mend
itself, and gives the same command again. Three things must hold. (1) The run ends within a time limit, with a status
that a scheduler can read. An error is exactly one sentence on stderr that names the cause, never a traceback. (2)
Nothing is lost: every step that was saved before is there afterwards. (3) Each array of each saved step has the bits of
an undisturbed run's, read by orbax alone.

A trial that the machine does not allow (mounts need root) counts as not possible here, never as held. A result is
stored with a hash of the code, and the trial is run again when that changes. Linux only. trials.py has the parts,
drills.py the drills.
"""

import collections
import contextlib
import hashlib
import inspect
import io
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import command
import outputs
from benchmarks.drills import DRILLS
from benchmarks.trials import (
    FLAGS,
    BrokenError,
    ImpossibleError,
    Scene,
    clean_up,
    copy_corpus,
    corpora,
    digest_of,
    digests,
    pass_on_no_ignored_signals,
    reference,
)


@dataclass(frozen=True)
class Trial:
    number: int  # from 1
    drill: Callable
    arguments: tuple
    seed: int

    @property
    def kind(self) -> str:
        return self.drill.__name__

    @property
    def title(self) -> str:
        return self.kind + (f"({', '.join(map(str, self.arguments))})" if self.arguments else "")


def trials_of(seed: int) -> list[Trial]:
    each = [(drill, arguments) for drill, several in DRILLS for arguments in several]
    return [Trial(number, *one, seed=1000 * seed + number) for number, one in enumerate(each, 1)]


def run_trial(trial: Trial, shared: Path) -> dict:
    """Runs a trial and returns its verdict: held, broken or impossible, and why."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=shared, prefix=f"{trial.number}-") as folder:
        scene = Scene(Path(folder), shared, random.Random(trial.seed))
        outcome, why = "held", ""
        try:
            copy_corpus(corpora(shared) / "corpus", scene.corpus)
            trial.drill(scene, *trial.arguments)
        except BrokenError as error:
            outcome, why = "broken", str(error)
        except ImpossibleError as error:
            outcome, why = "impossible", str(error)
        except Exception as error:  # an error of the drill itself: the others go on
            outcome, why = "broken", f"the drill itself failed: {error!r:.300}"
        finally:
            clean_up(scene)
    verdict = dict(number=trial.number, kind=trial.kind, title=trial.title, seed=trial.seed, outcome=outcome, why=why)
    return verdict | dict(starts=len(scene.runs), seconds=round(time.monotonic() - begun, 1))


# -- flipped bits


FLIPS = 60


def flip(shared: Path, seed: int) -> dict:
    """Flips a random bit in a random file of the newest step (a long file is hit more often), and restores it here.

    The outcome is `named` where the damage is named (and the step before is restored, or none), `harmless` where every
    array has the bits that were saved, and `silent` otherwise.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        for step in (6, 9):
            shutil.copytree(reference(shared) / str(step), Path(folder) / str(step))
        files = sorted(path for path in (Path(folder) / "9").rglob("*") if path.is_file())
        (path,) = chance.choices(files, [path.stat().st_size for path in files])
        content = bytearray(path.read_bytes())
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        outcome, says = restored(Path(folder), reference(shared) / "9")
    where = re.sub(r"[0-9a-f]{32}", "*", str(path.relative_to(Path(folder) / "9")))
    return dict(seed=seed, file=where, bit=bit, outcome=outcome, says=re.sub(rf"{shared}\S*/", "", says)[:300])


def restored(folder: Path, saved: Path) -> tuple[str, str]:
    """(outcome, sentence) of restoring the newest step of a folder, whose undamaged original is `saved`."""
    import jax
    import numpy as np

    import checkpoint
    import command
    import placement
    import sharding
    import train
    from config import Config

    config = Config(**FLAGS, checkpoint_dir=str(folder))
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), jax.devices()[:2])
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            with checkpoint.opened(config) as checkpoints:
                state, note, *_ = train.restored_state(config, mesh, checkpoints)
    except Exception as error:
        if not command.is_for_the_user(error):
            return "traceback", f"{type(error).__name__}: {error}"
        return "named", str(error)
    said = f"{note or ''} {said.getvalue()}"
    if int(state.step) != int(saved.name):
        return ("named" if re.search(rf"/{saved.name}\b", said) else "silent"), f"step {int(state.step)}: {said}"
    ours = sorted(digest_of(np.asarray(leaf)) for leaf in jax.tree.leaves(state))
    return ("harmless" if ours == sorted(digests(saved).values()) else "silent"), said


# -- stored results


def code(*more: Path) -> str:
    """A hash of the programs and of `more` files, by default those of the drills."""
    files = [*command.modules(), *(more or (ROOT / "benchmarks" / name for name in ("trials.py", "drills.py")))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def load(path: Path) -> dict:
    empty = dict(code=code(), machine=machine(), seed=0, trials=[], flips=[])
    return json.loads(path.read_text()) if path.exists() else empty


def store(path: Path, results: dict) -> None:
    with outputs.replacing(path) as file:
        file.write(json.dumps(results, indent=1) + "\n")


def machine() -> str:
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    version = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores ({model[1] if model else 'unknown'}), Python {version}"


def table(results: dict) -> str:
    """Markdown with the outcomes of trials by kind, and a line for the flips."""
    rows = [f"On {results['machine']}, seeds {1000 * results['seed']} and up, measured:", ""]
    rows += [
        "| drill | trials | held | broken | not possible here | starts | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys(drill.__name__ for drill, _ in DRILLS)
    for kind in [*kinds, "in all"]:
        group = [trial for trial in results["trials"] if kind in (trial["kind"], "in all")]
        if not group:
            continue
        count = collections.Counter(trial["outcome"] for trial in group)
        counts = f"{len(group)} | {count['held']} | {count['broken']} | {count['impossible']}"
        starts, seconds = (sum(trial[name] for trial in group) for name in ("starts", "seconds"))
        rows.append(f"| {kind.replace('_', ' ')} | {counts} | {starts} | {seconds:.0f} |")
    if results["flips"]:
        count = collections.Counter(flipped["outcome"] for flipped in results["flips"])
        each = ", ".join(f"{count[name]} {name}" for name in ("named", "harmless", "silent", "traceback"))
        rows.append(f"\nFlipped bits: {len(results['flips'])}, of them {each}.")
    return "\n".join(rows)


def show_list(chosen: list[Trial]) -> None:
    for trial in chosen:
        print(f"{trial.number:3} {trial.title}, seed {trial.seed}: {inspect.getdoc(trial.drill) or 'see drills.py'}")


def choose(names: list[str], every: list[Trial]) -> list[Trial]:
    """The trials of these kinds or numbers, or all. Raises ValueError for one that does not exist."""
    command.check_names(names, {*(trial.kind for trial in every), *(str(trial.number) for trial in every)})
    return [trial for trial in every if not names or {trial.kind, str(trial.number)} & set(names)]


def main() -> int:
    pass_on_no_ignored_signals()
    parser = command.parser(__file__)
    parser.add_argument("names", nargs="*", metavar="TRIAL", help="kinds or numbers of trials, or flips; default: all")
    parser.add_argument("--seed", type=command.at_least(0), default=0, help="seed of moments and damages [%(default)s]")
    parser.add_argument("--jobs", type=command.at_least(1), default=1, help="trials at a time [%(default)s]")
    about = "file of the results [%(default)s]"
    parser.add_argument("--results", type=command.path, default="benchmarks/faults.json", help=about)
    parser.add_argument("--json", action="store_true", help="print the results as JSON, not as a table")
    parser.add_argument("--list", action="store_true", help="say what is done in each trial, and end")
    parser.add_argument("--table", action="store_true", help="show the stored results, and run nothing")
    args = command.arguments(parser)
    path, with_flips = ROOT / args.results, not args.names or "flips" in args.names
    names = [name for name in args.names if name != "flips"]
    chosen = [] if args.names == ["flips"] else choose(names, trials_of(args.seed))
    if args.list:
        show_list(chosen)
        return 0
    results = load(path)
    if not args.table:
        if (results["code"], results["seed"]) != (code(), args.seed):
            results = dict(code=code(), machine=machine(), seed=args.seed, trials=[], flips=[])
        run_all(chosen, results, path, args.jobs, with_flips, anew=bool(args.names))
    print(json.dumps(results) if args.json else table(results))
    bad = [
        result
        for result in results["trials"] + results["flips"]
        if result["outcome"] in ("broken", "silent", "traceback")
    ]
    for result in bad:
        why = result.get("why") or result.get("says")
        print(f"{result.get('title', 'flip')}, seed {result['seed']}: {why}", file=sys.stderr)
    return int(bool(bad))


def run_all(chosen: list[Trial], results: dict, path: Path, jobs: int, with_flips: bool, anew: bool) -> None:
    """Runs trials without a stored result, or all of them (`anew`), and stores each result at once."""
    stored = set() if anew else {trial["number"] for trial in results["trials"]}
    to_run, storing = [trial for trial in chosen if trial.number not in stored], threading.Lock()

    def run_and_store(trial: Trial) -> None:
        result = run_trial(trial, Path(shared))
        with storing:
            others = [other for other in results["trials"] if other["number"] != trial.number]
            results["trials"] = sorted([*others, result], key=lambda trial: trial["number"])
            store(path, results)
            done.append(result)
            print(
                f"{len(done)}/{len(to_run)}  {result['outcome']:10} {result['seconds']:5.1f} s  {trial.number} "
                f"{trial.title}  {result['why']}",
                flush=True,
                file=sys.stderr,
            )

    done = []
    with tempfile.TemporaryDirectory(prefix="faults-") as shared, ThreadPoolExecutor(jobs) as pool:
        if to_run or with_flips:
            simulated_devices()
            reference(Path(shared))
        list(pool.map(run_and_store, to_run))
        if with_flips and (anew or len(results["flips"]) < FLIPS):
            results["flips"] = [flip(Path(shared), 1000 * results["seed"] + number) for number in range(FLIPS)]
            store(path, results)


def simulated_devices() -> None:
    """Makes two simulated devices in this process, which reads checkpoints, and silences orbax's log."""
    import compiler_flags

    compiler_flags.without_tpu()
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax
    import jax

    jax.config.update("jax_num_cpu_devices", 2)


if __name__ == "__main__":
    sys.exit(command.run(main))
