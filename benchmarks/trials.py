"""The parts of a drill (faults.py): runs that stop at a moment, checks of how they end, and comparisons of checkpoints.

**A moment** is a call of a function, or a change of the file system after it. The run stops itself there (SIGSTOP). The
trial then kills it, or takes the disk away or overwrites the corpus and lets it go on. So the moments are the same each
time, and a seed names them. Each trial starts new processes: importing jax starts a thread, so a fork after it would
not be safe.
"""

import contextlib
import hashlib
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The smallest model that trains: a start takes 3 s once its programs are compiled, a step milliseconds.
FLAGS = dict(num_layers=1, model_dim=16, ff_dim=32, num_heads=2, num_kv_heads=2, head_dim=8, seq_len=32, batch=4)
FLAGS |= dict(mesh="fsdp:2", steps=12, save_every=3, keep_checkpoints=100, log_every=1)
FLAGS |= dict(eval_every=0, eval_batches=2, sample=0)
UNSAVED = dict(checkpoint_dir=None, save_every=None, keep_checkpoints=None)
SAVED = (3, 6, 9, 12)  # steps
LIMIT_S = 400  # for a run to end; it takes 3 s on a quiet machine, and over 100 on two cores with a load of 20
REFUSED_S = 160  # for a run to end that is refused before it begins
FAILED = (1, 2)  # statuses of runs that failed or were refused, with a sentence (command.py)
CHANGES = "os.mkdir os.rename os.remove os.rmdir os.link shutil.rmtree".split()  # of the file system: sys.audit's names


class BrokenError(Exception):
    """A trial found a violation of what must hold."""


class ImpossibleError(Exception):
    """The machine does not allow the trial."""


@dataclass(frozen=True)
class Recipe:
    """How the runs of a trial train: flags beside FLAGS, and --corpus, in which {own} is the trial's corpus."""

    flags: tuple[tuple[str, object], ...] = ()
    corpora: str = "{own}"


PLAIN = Recipe()


@dataclass
class Scene:
    """The setting of a trial: its own folder, a folder that all share, and its random numbers."""

    folder: Path
    shared: Path
    random: random.Random
    recipe: Recipe = PLAIN
    runs: list = field(default_factory=list)
    mounts: list = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def shard(self) -> Path:
        """The only token file of the corpus."""
        return self.corpus / SHARD


# -- runs


def pass_on_no_ignored_signals() -> None:
    """Lets the programs that this one starts receive SIGHUP and SIGINT, also under nohup or a shell's &.

    An ignored signal is inherited, a handler is not. libtpu, once loaded, ignores SIGHUP unseen by Python, so the
    handler that Python has is set again.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        handler = signal.getsignal(number)
        signal.signal(number, (lambda *_: None) if handler == signal.SIG_IGN else handler)


def signalled(
    target: str, call: int, change: int = 0, number: int = signal.SIGSTOP, then_s: int = 0
) -> tuple[str, str]:
    """The arguments with which Python runs train.py so that it sends itself a signal at a moment."""
    moment = f"{target!r}, {call}, {change}, {int(number)}, {then_s}"
    return "-c", f"from benchmarks import trials; trials.signal_at({moment})"


def signal_at(target: str, call: int, change: int, number: int, then_s: int) -> None:
    """Runs train.py on sys.argv, and sends itself a signal in the call-th call of a function, counted from 1.

    Args:
      target: "module.function" or "module.Class.method".
      change: 0 is before the call; n is before the n-th change of the file system after the call began.
      number: the signal; SIGSTOP suspends the run.
      then_s: seconds that each later call sleeps, where the reaction to the signal may take long.
    """
    module, *owners, name = target.split(".")
    owner = __import__(module)
    for part in owners:
        owner = getattr(owner, part)
    real, calls, changes = getattr(owner, name), [], []

    def signalling(*args, **kwargs):
        calls.append(name)
        if len(calls) == call and not change:
            os.kill(os.getpid(), number)
        if len(calls) > call:
            time.sleep(then_s)
        return real(*args, **kwargs)

    def watch(event, args):
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if len(calls) >= call and (writes or event in CHANGES):
            changes.append(event)
            if len(changes) == change:
                os.kill(os.getpid(), number)

    setattr(owner, name, signalling)
    if change:
        sys.addaudithook(watch)
    runpy.run_path("train.py", run_name="__main__")


def start(
    scene: Scene, *, program=("train.py",), code=ROOT, at=None, shell="", env=None, flags=(), **values
) -> subprocess.Popen:
    """Starts train.py with FLAGS and `values`, where None leaves a flag out; or another program with `flags` alone.

    Args:
      code: the folder of the programs.
      at: the arguments of `signalled`.
      shell: a shell script that runs "$@", the command.
    """
    if program == ("train.py",):
        corpus = scene.recipe.corpora.format(own=scene.corpus, shared=scene.shared)
        own = dict(corpus=corpus, checkpoint_dir=scene.checkpoints, compilation_cache=scene.shared / "cache")
        all_values = FLAGS | own | dict(scene.recipe.flags) | values
        flags = [f"--{name}={value}" for name, value in all_values.items() if value is not None] + list(flags)
    if at:
        program = signalled(*at)
    command = [sys.executable, *program, *map(str, flags)]
    command = ["sh", "-c", shell, "sh", *command] if shell else command
    ours = ("JAX_", "TPU_", "TF_", "ALLOW_", "XLA_", "PYTHON")  # set by a test that runs the drills
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | (env or {})
    process = subprocess.Popen(
        command, cwd=code, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.begun = time.monotonic()
    scene.runs.append(process)
    return process


def wait_for_stop(run: subprocess.Popen) -> None:
    """Returns when a run is suspended at its moment. Raises BrokenError where it ends before that."""
    while time.monotonic() < run.begun + LIMIT_S:
        status = os.waitid(os.P_PID, run.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if status and status.si_code == os.CLD_STOPPED:
            return
        if status:
            said, complained = run.communicate()
            raise BrokenError(f"ended with {run.returncode} before its moment: {complained[-300:] or said[-300:]}")
        time.sleep(0.005)
    raise BrokenError(f"its moment did not come within {LIMIT_S} s")


def go_on(run: subprocess.Popen) -> None:
    run.send_signal(signal.SIGCONT)


@dataclass
class End:
    """The end of a run: its status, its stdout (`said`) and stderr (`complained`), and the seconds that it took."""

    status: int
    said: str
    complained: str
    took_s: float


def end(run: subprocess.Popen, within_s: float = LIMIT_S) -> End:
    """Waits for the end of a run. Raises BrokenError where it does not end in time, or ends with a traceback."""
    try:
        said, complained = run.communicate(timeout=max(run.begun + within_s - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        run.kill()
        said, complained = run.communicate()
        raise BrokenError(f"did not end within {within_s} s; last said: {(said + complained)[-200:]!r}") from None
    ended = End(run.returncode, said or "", complained or "", time.monotonic() - run.begun)
    check_no_traceback(ended)
    return ended


def check_no_traceback(ended: End) -> None:
    if "Traceback (most recent call last)" in ended.said + ended.complained:
        last = [line for line in ended.complained.splitlines() if line.strip()][-1:]
        raise BrokenError(f"a traceback of {len(ended.complained.splitlines())} lines, status {ended.status}: {last}")


SENTENCE = re.compile(r"\w+\.py( \w+)?: error: ")


def expect(ended: End, status, says: str = "", runtime_speaks: bool = False) -> End:
    """Raises BrokenError unless a run ended with this status, or one of several, and printed what belongs to it.

    A status of FAILED needs one sentence on stderr, `PROGRAM.py: error: ...`, that matches `says`. Any other status
    needs a stderr without an error.

    Args:
      runtime_speaks: whether jax's C++ runtime may log at length, beside the one sentence.
    """
    statuses = status if isinstance(status, tuple) else (status,)
    left_out = re.compile(r"usage: |\s|[IWEF]\d{4} |WARNING: All log messages")  # and what the runtime always logs
    lines = [line for line in ended.complained.splitlines() if line and not left_out.match(line)]
    if runtime_speaks:
        lines = [line for line in lines if SENTENCE.match(line)]
    if ended.status not in statuses:
        raise BrokenError(f"ended with {ended.status}, not {status}: {lines[-1:] or ended.said[-200:]}")
    if ended.status in FAILED:
        if len(lines) != 1 or not SENTENCE.match(lines[0]):
            raise BrokenError(f"{len(lines)} lines on stderr in place of one sentence: {' | '.join(lines)[:400]}")
        if not re.search(says, lines[0]):
            raise BrokenError(f"the sentence does not say {says!r}: {lines[0][:300]}")
    elif any("error:" in line for line in lines):
        raise BrokenError(f"status {ended.status}, and yet: {lines[-1][:300]}")
    return ended


def again(scene: Scene, **values) -> End:
    """Gives the same command again, undisturbed, and checks that it ends well with the right checkpoints."""
    ended = expect(end(start(scene, **values)), 0)
    check_same(scene, **values)
    return ended


# -- comparisons


_READING = threading.Lock()


def digests(step: Path) -> dict[str, str]:
    """{array: dtype, shape and hash of its bytes} of a saved step, read by orbax without code of this project."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    with _READING:
        reader, path = ocp.PyTreeCheckpointer(), step / "state"
        shapes = reader.metadata(path).item_metadata.tree
        as_numpy = lambda _: ocp.RestoreArgs(restore_type=np.ndarray)
        wanted = jax.tree.map(as_numpy, shapes, is_leaf=lambda leaf: hasattr(leaf, "shape"))
        arrays = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=wanted))
        return {
            jax.tree_util.keystr(where): digest_of(np.asarray(array))
            for where, array in jax.tree.leaves_with_path(arrays)
        }


def digest_of(array) -> str:
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []


def compare(folder: Path, reference: Path, steps) -> None:
    """Raises BrokenError where a step is missing, or an array has other bits than in the undisturbed run."""
    if missing := sorted(set(steps) - set(steps_in(folder))):
        raise BrokenError(f"steps {missing} are not there: {steps_in(folder)}")
    for step in steps:
        try:
            ours, theirs = digests(folder / str(step)), digests(reference / str(step))
        except Exception as error:  # whatever orbax and tensorstore raise
            raise BrokenError(f"step {step} cannot be read: {str(error)[:200]}") from error
        different = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
        if different:
            raise BrokenError(
                f"step {step}: {len(different)} of {len(theirs)} arrays differ, as {sorted(different)[0]}"
            )


def check_same(scene: Scene, steps=SAVED, **values) -> None:
    """Raises BrokenError unless the last `keep_checkpoints` of these steps are there, all with the right bits."""
    wanted = steps[-values.get("keep_checkpoints", len(steps)) :]
    compare(scene.checkpoints, reference(scene.shared, scene.recipe), sorted({*wanted, *steps_in(scene.checkpoints)}))


SHARD = "00000-000.bin"  # of the corpora here
_PREPARING, _WRITING = threading.Lock(), threading.Lock()


def reference(shared: Path, recipe: Recipe = PLAIN) -> Path:
    """The checkpoints of an undisturbed run, one for each step."""
    name = hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]
    folder = shared / f"reference-{name}"
    with _PREPARING:
        if not folder.exists():
            scene = Scene(shared / f"undisturbed-{name}", shared, random.Random(0), recipe)
            scene.folder.mkdir()
            copy_corpus(corpora(shared) / "corpus", scene.corpus)
            expect(end(start(scene, save_every=1), 600), 0)  # compiles
            scene.checkpoints.rename(folder)
    return folder


def corpora(shared: Path) -> Path:
    """The folder, with three corpora: `corpus`, `same_size` with other tokens, and `other_size`."""
    import prepare

    texts = {"same_size": range(119_999, -1, -1), "other_size": range(0, 300_000, 3), "corpus": range(120_000)}
    with _WRITING:
        for name, numbers in texts.items() if not (shared / "corpus").exists() else ():
            (shared / f"{name}.txt").write_text("".join(f"{number:06d}\n" for number in numbers))
            prepare.prepare([str(shared / f"{name}.txt")], str(shared / name))
    return shared


def copy_corpus(corpus: Path, to: Path) -> None:
    """Copies a corpus in place of the one that is there."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(corpus, to)


def check_corpus(scene: Scene) -> None:
    files = (scene.shared / "corpus").iterdir()
    if any((scene.corpus / path.name).read_bytes() != path.read_bytes() for path in files):
        raise BrokenError("the corpus is not what it was")


# -- the machine


def mount(scene: Scene, folder: Path, options: str) -> None:
    """Mounts a file system in memory until the trial ends. Raises ImpossibleError where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        raise ImpossibleError(f"mount: {made.stderr.strip()}")
    scene.mounts.append(folder)


def fill(folder: Path) -> Path:
    """Writes a file that fills a file system."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    return ballast


def read_only(scene: Scene, folder: Path) -> None:
    mount(scene, folder, "ro")


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def at_a_step(scene: Scene) -> tuple:
    return "log.Log.step", scene.random.randint(2, 11)


def in_a_save(scene: Scene, changes: int = 20) -> tuple:
    """A moment between the call and the end of a save; most of these are while the next steps run."""
    return "checkpoint.save", scene.random.randint(1, 4), scene.random.randint(1, changes)


def in_an_evaluation(scene: Scene) -> tuple:
    return "data.eval_batch", scene.random.randint(1, 2)


def clean_up(scene: Scene) -> None:
    """Kills the processes that a trial left, suspended ones too, and unmounts its file systems."""
    for run in scene.runs:
        if run.poll() is None:
            run.kill()
            run.communicate()
    for folder in scene.mounts:
        subprocess.run(["umount", "-l", folder], check=False)
