"""The drills of faults.py: each is a function whose first line says what it does to a run.

A drill returns where everything holds. BrokenError says what does not hold, ImpossibleError that the machine does not
allow the drill. DRILLS has the arguments of each.
"""

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
import zlib
from pathlib import Path

import command
import outputs
from benchmarks.trials import (
    FAILED,
    FLAGS,
    REFUSED_S,
    ROOT,
    SHARD,
    UNSAVED,
    BrokenError,
    End,
    Recipe,
    Scene,
    again,
    at_a_step,
    check_corpus,
    check_same,
    compare,
    copy_corpus,
    digests,
    end,
    expect,
    fill,
    free_port,
    go_on,
    in_a_save,
    in_an_evaluation,
    mount,
    read_only,
    reference,
    start,
    steps_in,
    wait_for_stop,
)


def killed_in_a_step(scene: Scene) -> None:
    """Killed in a step; started again."""
    killed(scene, at_a_step(scene))


def killed_in_a_save(scene: Scene, keep: int) -> None:
    """Killed in a save, between two changes of the file system, with --keep_checkpoints=`keep`; started again."""
    killed(scene, in_a_save(scene, 20 if keep > 1 else 40), keep_checkpoints=keep)


def killed_elsewhere(scene: Scene, target: str) -> None:
    """Killed as a function is called, in the second start where only that calls it; started again."""
    if target == "checkpoint.restore":
        killed(scene, at_a_step(scene), last=False)
    killed(scene, (target, 1))


def killed(scene: Scene, moment: tuple, last: bool = True, **values) -> None:
    run = start(scene, at=moment, **values)
    wait_for_stop(run)
    saved = steps_in(scene.checkpoints)[-values.get("keep_checkpoints", 100) :]  # an older one may be half removed
    run.kill()
    expect(end(run), -signal.SIGKILL)
    compare(scene.checkpoints, reference(scene.shared, scene.recipe), saved)
    if last:
        ended = again(scene, **values)
        if saved and f"from step {saved[-1]} " not in ended.said:
            raise BrokenError(f"steps {saved} were saved, and it did not go on from the last: {ended.said[:300]}")


def killed_again_and_again(scene: Scene) -> None:
    """Killed three times, each after a random time since the start; started again."""
    for _ in range(3):
        run = start(scene)
        time.sleep(scene.random.uniform(0.2, 4))
        run.kill()
        if end(run).status not in (-signal.SIGKILL, 0):
            raise BrokenError(f"killed, it ended with {run.returncode}")
    again(scene)


def suspended(scene: Scene, where: str) -> None:
    """Suspended for two seconds in a step, a save or an evaluation."""
    moment = {"step": at_a_step, "save": in_a_save, "evaluation": in_an_evaluation}[where](scene)
    run = start(scene, at=moment)
    wait_for_stop(run)
    time.sleep(2)
    go_on(run)
    expect(end(run), 0)
    check_same(scene)


def full_disk(scene: Scene, where: str) -> None:
    """The disk of the checkpoints is full (before a step, or in a save); space is freed, and it is started again."""
    mount(scene, scene.checkpoints, "size=16m")
    moment = ("log.Log.step", scene.random.randint(4, 11)) if where == "step" else in_a_save(scene, 8)
    run = start(scene, at=moment)
    wait_for_stop(run)
    saved = steps_in(scene.checkpoints)
    ballast = fill(scene.checkpoints)
    go_on(run)
    ended = end(run)
    ballast.unlink()
    expect(ended, FAILED, "checkpoint.*(No space|not be written|RESOURCE_EXHAUSTED)")
    compare(scene.checkpoints, reference(scene.shared, scene.recipe), saved)
    again(scene)


def file_too_large(scene: Scene) -> None:
    """From a step on no file may be longer than 1 KiB (a quota); started again without the quota."""
    run = start(scene, at=("log.Log.step", scene.random.randint(4, 11)))
    wait_for_stop(run)
    saved = steps_in(scene.checkpoints)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    go_on(run)
    expect(end(run), FAILED, "checkpoint.*(too large|not be written)")
    compare(scene.checkpoints, reference(scene.shared, scene.recipe), saved)
    again(scene)


def full_disk_of_metrics(scene: Scene) -> None:
    """From a step on the disk of the metrics is full: the run goes on, and says so."""
    disk = scene.folder / "disk"
    mount(scene, disk, "size=1m")
    run = start(scene, **UNSAVED, at=at_a_step(scene), metrics_file=disk / "m.jsonl", steps=60)  # of more than a page
    wait_for_stop(run)
    fill(disk)
    go_on(run)
    ended = expect(end(run), 0)
    if "no more are written" not in ended.said + ended.complained:
        raise BrokenError("the metrics ended without a word")


def full_disk_of_programs(scene: Scene) -> None:
    """The disk of the compiled programs is full: the run goes on without caching them."""
    disk = scene.folder / "disk"
    mount(scene, disk, "size=1m")
    fill(disk)
    again(scene, compilation_cache=disk / "cache")


def full_disk_of_a_corpus(scene: Scene) -> None:
    """`data.py prepare` writes onto a full disk; what is there stays, and with space the same command goes on."""
    disk = scene.folder / "disk"
    mount(scene, disk, "size=2m")
    copy_corpus(scene.shared / "corpus", disk / "older")
    ballast = fill(disk)
    flags = ("prepare", scene.shared / "other_size.txt", "--out", disk / "out")
    expect(end(start(scene, program=("data.py",), flags=flags), REFUSED_S), FAILED, "No space|space left")
    shutil.rmtree(disk / "older")
    ballast.unlink()
    expect(end(start(scene, program=("data.py",), flags=flags), REFUSED_S), 0)
    if (disk / "out" / SHARD).read_bytes() != (scene.shared / "other_size" / SHARD).read_bytes():
        raise BrokenError("it is another corpus")


def damaged(scene: Scene, files: str, how: str) -> None:
    """The newest step has a damaged file; started again and, where that is refused, again without this step."""
    copy_reference(scene, (3, 6, 9))
    newest = scene.checkpoints / "9"
    damage(scene, newest, files, how)
    ended = end(start(scene))
    expect(ended, (0, *FAILED), r"checkpoints/9\b.*damaged|damaged.*checkpoints/9\b")
    compare(scene.checkpoints, reference(scene.shared, scene.recipe), (3, 6))
    if ended.status:
        shutil.rmtree(newest)
        again(scene)
    else:
        compare(scene.checkpoints, reference(scene.shared, scene.recipe), (12,))
        if "from step 9 " not in ended.said and not re.search(r"checkpoints/9\b", ended.said + ended.complained):
            raise BrokenError(f"went on from another step without a word on 9: {ended.said[:300]}")


def damaged_and_skipped(scene: Scene, files: str, how: str, *steps: int) -> None:
    """The newest steps have a damaged file: the flag that the refusal names restores the one before, and loses none."""
    copy_reference(scene, (3, 6, 9))
    for step in steps:
        damage(scene, scene.checkpoints / str(step), files, how)
    expect(end(start(scene)), FAILED, r"checkpoints/9 .*--skip_damaged_checkpoints .*from step 6")
    ended = again(scene, flags=("--skip_damaged_checkpoints",))
    if f"from step {min(steps) - 3} " not in ended.said:
        raise BrokenError(f"went on from another step: {ended.said[:300]}")
    aside = sorted(path.name for path in scene.checkpoints.iterdir() if not path.name.isdecimal())
    if aside != [f"{step}.damaged" for step in steps]:
        raise BrokenError(f"beside the steps there are {aside}")


def copy_reference(scene: Scene, steps) -> None:
    for step in steps:
        shutil.copytree(reference(scene.shared, scene.recipe) / str(step), scene.checkpoints / str(step))


def damage(scene: Scene, folder: Path, files: str, how: str) -> None:
    """Damages the largest file that matches a pattern, or a random one of all files; "each ..." all that match.

    Orbax writes some values twice, so that a single file of values may not be needed.
    """
    matching = sorted(path for path in folder.glob(files) if path.is_file())
    if not matching:
        raise BrokenError(f"a saved step has no {files}")
    if how.startswith("each "):
        for path in matching:
            damage(scene, folder, str(path.relative_to(folder)), how.removeprefix("each "))
        return
    path = scene.random.choice(matching) if files == "**/*" else max(matching, key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "all missing":
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        middle = len(content) // 2
        path.write_bytes(
            {
                "truncated": content[:middle],
                "empty": b"",
                "zeroed": bytes(len(content)),
                "garbled": content[:middle] + scene.random.randbytes(64) + content[middle + 64 :],
                "no object": b"[1, 2]",
                "all strings": json.dumps({key: "x" for key in _keys(content)}).encode(),
                "nested": b"[" * 100_000,
            }[how]
        )


def _keys(content: bytes) -> list[str]:
    try:
        names = json.loads(content)
    except ValueError:
        names = {}
    return list(names) if isinstance(names, dict) else []


def corpus_at_a_resume(scene: Scene, change: str) -> None:
    """Between two starts the corpus is replaced, damaged or gone; it is put back, and the run started again."""
    run = start(scene, at=("log.Log.step", 8))
    wait_for_stop(run)
    run.kill()
    header = bytearray(scene.shard.read_bytes()[:64])
    if change == "gone":
        shutil.rmtree(scene.corpus)
    elif change == "a separator outside the vocabulary":
        header[24:32] = (300).to_bytes(8, "little")
        header[48:52] = zlib.crc32(header[:48]).to_bytes(4, "little")
        with scene.shard.open("r+b") as file:
            file.write(header)
    elif change == "one token":
        with scene.shard.open("r+b") as file:
            file.seek(64 + 2 * scene.random.randrange(100_000))
            file.write(b"\x07\x00")
    else:
        copy_corpus(scene.shared / change, scene.corpus)
    saved = steps_in(scene.checkpoints)
    ended = end(start(scene))
    expect(ended, (0, *FAILED) if change == "one token" else FAILED, "corpus")  # it may be one that is never read
    if "step  7" in ended.said and change != "one token":
        raise BrokenError("it took steps before it ended")
    check_same(scene, steps=saved)
    copy_corpus(scene.shared / "corpus", scene.corpus)
    again(scene)


def corpus_during_a_run(scene: Scene, change: str) -> None:
    """In a step the corpus is overwritten, truncated, or removed (harmless); it is put back; started again."""
    run = start(scene, at=("log.Log.step", scene.random.randint(1, 5)))
    wait_for_stop(run)
    if change == "overwritten":
        other = (scene.shared / "same_size" / SHARD).read_bytes()
        with scene.shard.open("r+b") as file:
            file.write(other)
    elif change == "truncated":
        os.truncate(scene.shard, 4096)
    else:
        shutil.rmtree(scene.corpus)
    go_on(run)
    ended = end(run)
    expect(ended, (0, *FAILED) if change == "removed" else FAILED, SHARD)
    check_same(scene, steps=steps_in(scene.checkpoints))
    copy_corpus(scene.shared / "corpus", scene.corpus)
    again(scene)


def corpus_touched(scene: Scene) -> None:
    """Between two starts the corpus gets another path and another time: the tokens are the same, so the run goes on."""
    copy_reference(scene, (3, 6))
    moved = scene.folder / "moved"
    scene.corpus.rename(moved)
    os.utime(moved / SHARD, (1e9, 1e9))
    again(scene, corpus=moved)


def start_hosts(scene: Scene, one: dict, other: dict, **values) -> list[subprocess.Popen]:
    """Starts two processes of a run, each with its own values, of which one may be `at`."""
    port = free_port()
    together = dict(num_processes=2, coordinator=f"localhost:{port}") | values
    return [start(scene, **together, process_id=number, **own) for number, own in enumerate((one, other))]


def hosts_again(scene: Scene) -> None:
    for run in start_hosts(scene, {}, {}):
        expect(end(run), 0)
    check_same(scene)


def hosts_disagree(scene: Scene, flag: str, value: object) -> None:
    """Two processes of a run differ in a flag: both end before the first step, and each names it."""
    if flag in ("corpus", "checkpoint_dir"):
        value = scene.shared / value if flag == "corpus" else scene.folder / value
    check_disagreement(scene, {flag: value}, flag)


def hosts_with_other_code(scene: Scene) -> None:
    """One of two processes has another version of a module: both end before the first step, and each names it."""
    other = scene.folder / "code"
    for path in (*command.modules(), *ROOT.glob("*.json"), *ROOT.glob("compiled/*.json")):
        (other / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, other / path.relative_to(ROOT))
    with (other / "model.py").open("a") as file:
        file.write("# of another version\n")
    check_disagreement(scene, dict(code=other), "checksum of model.py")


def check_disagreement(scene: Scene, other: dict, says: str) -> None:
    """Starts two processes, the second with `other`. Raises BrokenError unless both end at once and name the reason."""
    ends = [end(run) for run in start_hosts(scene, {}, other)]
    if steps_in(scene.checkpoints) or any("step  1/" in ended.said for ended in ends):
        raise BrokenError(f"they trained: statuses {[ended.status for ended in ends]}")
    for ended in ends:
        expect(ended, FAILED, says)


def host_lost(scene: Scene, how: str) -> None:
    """One of two processes is killed, or silent for too long: the other ends; both are started again."""
    moment = in_a_save(scene, 2) if how == "killed in a save" else at_a_step(scene)  # process 0 makes the others
    runs = start_hosts(scene, {}, dict(at=moment), peer_timeout=10)
    wait_for_stop(runs[1])
    if how == "silent":
        time.sleep(25)
    runs[1].kill()
    expect(end(runs[1]), -signal.SIGKILL)
    expect(end(runs[0]), FAILED, "another process of this run is lost", runtime_speaks=True)
    hosts_again(scene)


def host_suspended(scene: Scene) -> None:
    """One of two processes is suspended, for less time than the other waits."""
    runs = start_hosts(scene, {}, dict(at=at_a_step(scene)))
    wait_for_stop(runs[1])
    time.sleep(5)
    go_on(runs[1])
    for run in runs:
        expect(end(run), 0)
    check_same(scene)


def host_terminated(scene: Scene) -> None:
    """One of two processes gets SIGTERM: both stop after the same step, and save it."""
    runs = start_hosts(scene, {}, dict(at=("log.Log.step", 2)), steps=4000, save_every=4000)
    wait_for_stop(runs[1])
    runs[1].send_signal(signal.SIGTERM)
    go_on(runs[1])
    first, _ = (expect(end(run), 128 + signal.SIGTERM) for run in runs)
    check_terminated(scene, first)


def two_runs(scene: Scene, when: str) -> None:
    """A second run in the checkpoint_dir of one that is at a step: refused, naming the first, which goes on."""
    run = start(scene, at=at_a_step(scene))
    wait_for_stop(run)
    second = end(start(scene, **(dict(steps=24) if when == "with other flags" else {})), REFUSED_S)
    go_on(run)
    first = end(run)
    expect(second, FAILED, str(run.pid))
    expect(first, 0)
    check_same(scene)


def two_at_once(scene: Scene) -> None:
    """Two runs want the lock of one checkpoint_dir at the same time: one goes to its end, the other is refused."""
    runs = [start(scene, at=("lock.acquire", 1)) for _ in range(2)]
    for run in runs:
        wait_for_stop(run)
    for run in runs:
        go_on(run)
    ends = [end(run) for run in runs]
    statuses = sorted(ended.status for ended in ends)
    if statuses[0] or not statuses[1]:
        raise BrokenError(f"they ended with {statuses}")
    for ended in ends:
        expect(ended, (0, *FAILED), "checkpoint_dir|checkpoints")
    check_same(scene)


def left_behind(scene: Scene) -> dict:
    """A run is killed at a step, and its lock stays."""
    run = start(scene, at=at_a_step(scene))
    wait_for_stop(run)
    run.kill()
    expect(end(run), -signal.SIGKILL)
    return json.loads((scene.checkpoints / "lock").read_text())


def stale_lock(scene: Scene, whose: str) -> None:
    """The lock of a process or machine that is gone, also where another process has its number by now: it is taken."""
    changes = {"a dead process": {}, "a number in use": dict(process=os.getpid()), "a machine": dict(machine="gone")}
    (scene.checkpoints / "lock").write_text(json.dumps(left_behind(scene) | changes[whose]))
    ended = again(scene)
    if ("watching for" in ended.complained) != (whose == "a machine"):
        raise BrokenError(f"it said {ended.complained[-300:]!r}")
    if (scene.checkpoints / "lock").exists():
        raise BrokenError("its lock is left behind")


def lock_of_another_machine(scene: Scene) -> None:
    """The lock of a run on another machine is renewed: refused, naming it; once removed, the command goes on."""
    theirs, path = left_behind(scene) | dict(machine="another", host="elsewhere"), scene.checkpoints / "lock"
    path.write_text(json.dumps(theirs))
    saved, run = steps_in(scene.checkpoints), start(scene)
    while run.poll() is None and time.monotonic() < run.begun + REFUSED_S:
        theirs["beats"] += 1
        with outputs.replacing(path) as file:
            file.write(json.dumps(theirs))
        time.sleep(1)
    ended = end(run, REFUSED_S)
    watched = ended.complained.partition("\n")
    if "watching for" not in watched[0]:
        raise BrokenError(f"it said {ended.complained[-300:]!r}")
    expect(dataclasses.replace(ended, complained=watched[2]), FAILED, f"process {theirs['process']} on elsewhere")
    if json.loads(path.read_text()) != theirs or steps_in(scene.checkpoints) != saved:
        raise BrokenError("it wrote into the folder of the other")
    path.unlink()
    again(scene)


def unwritable(scene: Scene, flag: str) -> None:
    """An output is on a read-only disk, or a file is in its way: refused before the first step."""
    if flag == "a file in the way":
        (scene.folder / "file").write_text("in the way")
        flag, values = "checkpoint_dir", dict(checkpoint_dir=scene.folder / "file" / "checkpoints")
    else:
        read_only(scene, scene.folder / "disk")
        values = {flag: scene.folder / "disk" / "it"}
        values |= dict(fp8="calibrate", dtype="bfloat16") if flag == "fp8_scales" else {}
        values |= dict(profile_steps="3:5") if flag == "profile_dir" else {}
    ended = end(start(scene, **values), REFUSED_S)
    if "step  1/" in ended.said:
        raise BrokenError("it took a step before it ended")
    expect(ended, FAILED, flag)


def evaluation(scene: Scene, batches: int) -> None:
    """An evaluation of many batches, on 8 devices."""
    expect(end(start(scene, **UNSAVED, eval_batches=batches, mesh="fsdp:8", batch=8, steps=2)), 0)


def signalled(scene: Scene, name: str, where: str) -> None:
    """SIGHUP, SIGTERM or SIGINT in a step, an evaluation or a save: saves, and ends with 128 + the number."""
    number = getattr(signal, name)
    if where == "step":
        moment, values = at_a_step(scene), {}
    elif where == "save":
        moment, values = ("checkpoint.save", scene.random.randint(1, 3), scene.random.randint(1, 10)), {}
    else:
        moment, values = ("data.eval_batch", 1), dict(eval_every=5)
    run = start(scene, at=moment, **values)
    wait_for_stop(run)
    run.send_signal(number)
    go_on(run)
    check_terminated(scene, expect(end(run), 128 + number))
    again(scene)


def check_terminated(scene: Scene, ended: End) -> None:
    """Raises BrokenError unless the run said after which step it stopped, and that step is saved."""
    stopped = re.search(r"terminated after step (\d+), saved", ended.said)
    if not stopped or steps_in(scene.checkpoints)[-1:] != [int(stopped[1])]:
        raise BrokenError(f"saved are {steps_in(scene.checkpoints)}, said was {ended.said[-200:]!r}")
    digests(scene.checkpoints / stopped[1])


def interrupted_twice(scene: Scene) -> None:
    """Ctrl-C twice in a step: ends at once, without a word; started again."""
    # The second comes when the first is answered, for two pending signals are one; the run is suspended meanwhile.
    run = start(scene, at=("log.Log.finish_step", scene.random.randint(2, 11), 0, signal.SIGSTOP, 20))
    wait_for_stop(run)
    saved = steps_in(scene.checkpoints)
    run.send_signal(signal.SIGINT)
    go_on(run)
    if not any("Ctrl-C again stops at once" in line for line in run.stderr):
        raise BrokenError(f"the first Ctrl-C had no answer, status {run.wait()}")
    run.send_signal(signal.SIGINT)
    ended = expect(end(run), 128 + signal.SIGINT)
    if "terminated after" in ended.said:
        raise BrokenError("the second Ctrl-C did not interrupt it")
    compare(scene.checkpoints, reference(scene.shared, scene.recipe), saved)
    again(scene)


def interrupted_early(scene: Scene) -> None:
    """Ctrl-C while jax is imported, or a little later: ends without a word; started again."""
    run = start(scene, at=("compiler_flags.set_init_args", 1))
    wait_for_stop(run)
    go_on(run)
    time.sleep(scene.random.uniform(0, 1))
    run.send_signal(signal.SIGINT)
    expect(end(run), 128 + signal.SIGINT)
    again(scene)


SHELLS = {
    "full": 'exec "$@" >/dev/full',
    "closed": 'exec "$@" >&-',
    "all closed": 'exec "$@" <&- >&- 2>&-',
    "lost reader": '{ "$@"; echo $? >&3; } 3>&2 | head -n 1',
    "no reader": '{ "$@"; echo $? >&3; } 3>&2 | true',
}


def lost_output(scene: Scene, how: str) -> None:
    """stdout of a run is full, closed, or has lost its reader: the run goes to its end, and its status says so."""
    ended = of_the_command(end(start(scene, shell=SHELLS[how], sample=4)), how)
    check_same(scene)
    check_corpus(scene)
    if ended.status != (128 + signal.SIGPIPE if how == "lost reader" else 1):
        raise BrokenError(f"ended with {ended.status}")
    lines = [line for line in ended.complained.splitlines() if line]
    if any("standard output" not in line for line in lines) or (how != "all closed" and not 1 <= len(lines) <= 2):
        raise BrokenError(f"it said {lines}")


def of_the_command(ended: End, how: str) -> End:
    """Where the reader is lost, the last line on stderr is the status of the command itself."""
    if not how.endswith("reader"):
        return ended
    *complained, status = ended.complained.splitlines() or ["none"]
    return End(int(status), ended.said, "\n".join(complained), ended.took_s)


def ascii_output(scene: Scene) -> None:
    """stdout can show ASCII only, and the sample is of a corpus with other letters."""
    (scene.folder / "letters.txt").write_text("äöü Привет 你好 — ∑\n" * 20_000)
    shutil.rmtree(scene.corpus)
    flags = ("prepare", scene.folder / "letters.txt", "--out", scene.corpus)
    expect(end(start(scene, program=("data.py",), flags=flags), REFUSED_S), 0)
    ended = expect(end(start(scene, sample=8, env=dict(PYTHONIOENCODING="ascii", LC_ALL="C"))), 0)
    if "in all " not in ended.said:
        raise BrokenError("it lost its last lines")
    show = start(scene, program=("data.py",), flags=("show", scene.corpus), env=dict(PYTHONIOENCODING="ascii"))
    expect(end(show, REFUSED_S), 0)


def cut_off(scene: Scene, *command: str) -> None:
    """A command whose reader goes away after a line ends at once, without a word."""
    flags = [str(scene.corpus) if flag == "CORPUS" else flag for flag in command[1:]]
    run = start(scene, program=command[:1], flags=flags, shell=SHELLS["no reader"])
    ended = of_the_command(end(run, REFUSED_S), "no reader")
    if ended.status not in (0, 1, 128 + signal.SIGPIPE) or ended.complained:
        raise BrokenError(f"ended with {ended.status} and said {ended.complained[-300:]!r}")


def metrics_of_three(scene: Scene) -> None:
    """Three runs, one after the other, into one metrics file: each run's rows are somewhere."""
    for number in range(3):
        ended = end(start(scene, **UNSAVED, metrics_file=scene.folder / "m.jsonl", steps=3 + number))
        if ended.status:  # to refuse is to lose nothing
            return expect(ended, FAILED, "metrics_file")
    steps = sorted(
        sum('"loss"' in line for line in path.read_text().splitlines()) for path in scene.folder.glob("m.jsonl*")
    )
    if steps != [3, 4, 5]:
        raise BrokenError(f"rows of steps that are left: {steps}, not [3, 4, 5]")


def metrics_spoilt(scene: Scene, how: str) -> None:
    """The metrics file of a resumed run ends in half a line, or is damaged: the run says so; started again."""
    path = scene.folder / "m.jsonl"
    run = start(scene, at=("log.Log.step", 8), metrics_file=path)
    wait_for_stop(run)
    run.kill()
    end(run)
    good = path.read_bytes()
    spoilt = {"half a line": b'{"step": 8, "lo', "binary": bytes(range(128, 256)) + b"}\n", "nested": b"[" * 100_000}
    path.write_bytes(good + spoilt[how] + (b"]" * 100_000 + b"}\n" if how == "nested" else b""))
    ended = end(start(scene, metrics_file=path))
    if how != "half a line" and ended.status:
        expect(ended, FAILED, "metrics_file")
        path.write_bytes(good)
        ended = end(start(scene, metrics_file=path))
    expect(ended, 0)
    check_same(scene)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if [row["step"] for row in rows if "loss" in row] != list(range(1, 13)):
        raise BrokenError(f"rows of steps {[row['step'] for row in rows if 'loss' in row]}")


def home(scene: Scene) -> None:
    """Outputs under ~ are in the home folder, and no folder is named ~."""
    flags = ("--checkpoint_dir=~/checkpoints", "--metrics_file=~/m.jsonl", "--profile_dir=~/trace")
    run = start(scene, flags=flags, checkpoint_dir=None, env=dict(HOME=str(scene.folder)))
    expect(end(run), 0)
    missing = [name for name in ("m.jsonl", "trace", "checkpoints") if not (scene.folder / name).exists()]
    if (ROOT / "~").exists():
        shutil.rmtree(ROOT / "~")
        raise BrokenError("there is a folder called ~")
    if missing:
        raise BrokenError(f"{missing} are not in the home folder")
    check_same(scene)


def output_is_input(scene: Scene, how: str) -> None:
    """An output that is also an input is refused, and the input is unchanged."""
    text = scene.folder / "text.txt"
    shutil.copy(scene.shared / "corpus.txt", text)
    if how == "prepare":
        run = start(scene, program=("data.py",), flags=("prepare", text, "--out", text))
    else:
        run = start(scene, metrics_file=scene.shard)
    ended = end(run, REFUSED_S)
    check_corpus(scene)
    if text.read_bytes() != (scene.shared / "corpus.txt").read_bytes():
        raise BrokenError(f"the text is overwritten, status {ended.status}")
    expect(ended, FAILED, "out|metrics_file")


GUESSED = (
    "import runpy, secrets, sys; secrets.token_hex = lambda size: '00' * size; sys.argv[0] = 'data.py'; "
    "runpy.run_path('data.py', run_name='__main__')"
)


def planted_link(scene: Scene, name: str) -> None:
    """A link to somebody else's file has the name of an output, or the guessed name of its unfinished file.

    That file is what it was; the link is refused.
    """
    victim, out = scene.folder / "victim", scene.folder / "out"
    victim.write_text("precious")
    (scene.folder / name).parent.mkdir(exist_ok=True)
    (scene.folder / name).symlink_to(victim)
    flags = ("prepare", scene.shared / "corpus.txt", "--out", out)
    ended = end(start(scene, program=("-c", GUESSED), flags=flags), REFUSED_S)
    if victim.read_bytes() != b"precious":
        raise BrokenError(f"the link was followed, status {ended.status}")
    expect(ended, FAILED, "is no folder|has other files")
    if (out / "corpus.json").exists():
        raise BrokenError(f"status {ended.status}, and there is a corpus")


def not_finite(scene: Scene) -> None:
    """A learning rate that destroys the weights: ends in a sentence, after the steps that it may skip."""
    expect(end(start(scene, learning_rate=1e38, max_skipped=3, clip_norm=0)), FAILED, "not finite")


# train.py, in which one bit of a counter on device 1 flips: in what it holds, or in the first result of a checked step.
FLIPS_A_BIT = """
import dataclasses, runpy, sys
import jax, numpy as np
import corruption
where, at = sys.argv.pop(1), 8
def flipped(state):
    shards = state.skipped.addressable_shards
    wrong = [jax.device_put(np.asarray(each.data) ^ np.int32(4 * i), each.device) for i, each in enumerate(shards)]
    array = jax.make_array_from_single_device_arrays((), state.skipped.sharding, wrong)
    return dataclasses.replace(state, skipped=array)
real, compare = corruption.checked_step, corruption.check_replicas
def checked_step(step_fn, state, batch, step):
    calls = []
    def unsound(state, batch):
        calls.append(step)
        state, metrics = step_fn(state, batch)
        return (flipped(state) if calls == [at] else state), metrics
    return real(unsound, state, batch, step)
if where == "step":
    corruption.checked_step = checked_step
else:
    corruption.check_replicas = lambda state, step: compare(flipped(state) if step == at else state, step)
runpy.run_path("train.py", run_name="__main__")
"""


def corrupted(scene: Scene, where: str) -> None:
    """A bit of one device flips, in a replica or in a step that is checked: ends before a save; started again."""
    own = dict(corpus=scene.corpus, checkpoint_dir=scene.checkpoints, compilation_cache=scene.shared / "cache")
    flags = [f"--{name}={value}" for name, value in (FLAGS | own | dict(check_every=4)).items()]
    ended = end(start(scene, program=("-c", FLIPS_A_BIT, where), flags=flags))
    expect(ended, FAILED, r"skipped on device .*1 of process 0.*silent data corruption")
    if steps_in(scene.checkpoints) != [3, 6]:
        raise BrokenError(f"it ended at step 8, and has saved {steps_in(scene.checkpoints)}")
    again(scene, check_every=4)


CHOICES = dict(optimizer="muon", qk_clip=0.5, mu_dtype="bfloat16", mesh="fsdp:2,fsdp_transpose:2", check_every=5)
CHOICES |= dict(schedule="wsd", decay_ratio=0.5, skip_spikes=6.0, batch_rampup="0:4,5:8", batch=8)


def with_all_choices(scene: Scene, drill: str, *arguments) -> None:
    """A drill in a run with Muon, QK-clip, spikes, a ramp of the batch, a decay, checked steps and two corpora."""
    scene.recipe = Recipe(tuple(CHOICES.items()), "{own}:0.7,{shared}/other_size:0.3")
    globals()[drill](scene, *arguments)


# Each drill, and what it is called with: 120 trials in all.
DRILLS = [
    (killed_in_a_step, [()] * 5),
    (killed_in_a_save, [(100,)] * 7 + [(1,)] * 3),
    (killed_elsewhere, [("checkpoint.restore",), ("data.eval_batch",), ("model.loss_fn",)]),
    (killed_again_and_again, [()] * 2),
    (suspended, [("step",), ("save",), ("evaluation",)]),
    (full_disk, [("step",), ("step",), ("save",)]),
    (file_too_large, [()]),
    (full_disk_of_metrics, [()]),
    (full_disk_of_programs, [()]),
    (full_disk_of_a_corpus, [()]),
    (
        damaged,
        [
            ("state/ocdbt.process_0/d/*", "truncated"),
            ("state/ocdbt.process_0/d/*", "missing"),
            ("state/ocdbt.process_0/d/*", "zeroed"),
            ("state/ocdbt.process_0/d/*", "garbled"),
            ("state/_METADATA", "all strings"),
            ("state/_METADATA", "missing"),
            ("config/metadata", "no object"),
            ("config/metadata", "all strings"),
            ("config/metadata", "nested"),
            ("config/metadata", "missing"),
            ("_CHECKPOINT_METADATA", "no object"),
            ("_CHECKPOINT_METADATA", "all strings"),
            ("**/*", "empty"),
            ("**/*", "all missing"),
        ],
    ),
    (
        damaged_and_skipped,
        [
            ("state/ocdbt.process_0/d/*", "each truncated", 9),
            ("config/metadata", "nested", 9),
            ("state/_METADATA", "missing", 6, 9),
        ],
    ),
    (
        corpus_at_a_resume,
        [("same_size",), ("other_size",), ("gone",), ("a separator outside the vocabulary",), ("one token",)],
    ),
    (corpus_during_a_run, [("overwritten",), ("truncated",), ("removed",)]),
    (corpus_touched, [()]),
    (
        hosts_disagree,
        [
            ("learning_rate", 0.01),
            ("seed", 1),
            ("corpus", "same_size"),
            ("save_every", 4),
            ("steps", 9),
            ("checkpoint_dir", "elsewhere"),
            ("eval_every", 5),
        ],
    ),
    (hosts_with_other_code, [()]),
    (host_lost, [("killed in a step",), ("killed in a save",), ("silent",)]),
    (host_suspended, [()]),
    (host_terminated, [()]),
    (two_runs, [("at a step",), ("with other flags",)]),
    (two_at_once, [()]),
    (stale_lock, [("a dead process",), ("a number in use",), ("a machine",)]),
    (lock_of_another_machine, [()]),
    (
        unwritable,
        [("checkpoint_dir",), ("metrics_file",), ("profile_dir",), ("fp8_scales",), ("a file in the way",)],
    ),
    (evaluation, [(128,), (264,)]),
    (
        signalled,
        [
            ("SIGHUP", "step"),
            ("SIGTERM", "step"),
            ("SIGINT", "step"),
            ("SIGHUP", "save"),
            ("SIGTERM", "evaluation"),
            ("SIGINT", "save"),
        ],
    ),
    (interrupted_twice, [()]),
    (interrupted_early, [()]),
    (lost_output, [("full",), ("closed",), ("all closed",), ("lost reader",)]),
    (ascii_output, [()]),
    (
        cut_off,
        [("data.py", "show", "CORPUS"), ("roofline.py", "model", "--preset=deepseek-v3"), ("flags.py",)],
    ),
    (metrics_of_three, [()]),
    (metrics_spoilt, [("half a line",), ("binary",), ("nested",)]),
    (home, [()]),
    (output_is_input, [("prepare",), ("metrics_file",)]),
    (planted_link, [("out",), ("out/plan.json.00000000.unfinished",)]),
    (not_finite, [()]),
    (corrupted, [("replica",), ("step",)]),
    (hosts_disagree, [("optimizer", "muon"), ("schedule", "constant")]),
    (
        with_all_choices,
        [
            ("killed_in_a_step",),
            ("killed_in_a_save", 100),
            ("killed_again_and_again",),
            ("suspended", "save"),
            ("signalled", "SIGTERM", "step"),
            ("corpus_at_a_resume", "same_size"),
            ("damaged_and_skipped", "state/_METADATA", "missing", 6, 9),
        ],
    ),
]
