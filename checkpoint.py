"""Checkpoints of the training state, with orbax: sharded, asynchronous, atomic. They need the [checkpoint] extra.

Every process writes the shards of its devices, on a thread, into a folder that gets its final name only when it is
complete. So a run that is killed during a save finds the checkpoint before. An array is restored straight into the
shards of the new run, whatever mesh it was saved from. The configuration is saved with the state, and no data iterator:
the batches are a pure function of the step, and of the batch sizes so far, which are saved, too.

A step folder holds the state, the configuration, and the checksums of both (checksums.py), against which a restored
state is verified. If it differs, or cannot be read, the step is damaged: the run ends, and names the newest intact one.
With `--skip_damaged_checkpoints` it resumes from that, and renames the damaged folder to STEP.damaged.

All processes must see the same `--checkpoint_dir`: a shared file system, or a bucket (gs://...). One run at a time may
save there (lock.py).
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

import agreement
import checksums
import config as config_lib
import data_mixtures
import lock
import outputs
import processes
import tokenization
from config import Config

SHAPES, VALUES = config_lib.deciding("shapes"), config_lib.deciding("values")
# {flag: identity of the content of its file}, or a function of the step: the identity of what decides the steps before.
Contents = Mapping[str, str | Callable[[int], str]]
ORDER = ["corpus", "seq_len", "seed"]  # flags that decide which sequence has which number


def _orbax():
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ValueError(
            "--checkpoint_dir needs orbax-checkpoint, which is not installed: pip install -e '.[checkpoint]'"
        ) from None
    return ocp


@functools.cache  # once a process
def _quiet_orbax() -> None:
    """Drops what orbax reports beside the error that it raises when an array cannot be read or written.

    Orbax logs that error with its traceback on every thread that it passes. It then closes its event loop on unfinished
    arrays, each of which asyncio, tensorstore and the interpreter report, some only when the interpreter exits.
    """
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR and not record.exc_info)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report, packages = sys.unraisablehook, tuple(os.path.dirname(package.__file__) for package in (_orbax(), asyncio))

    def report_others(event) -> None:  # uses no global name: at the end of the interpreter they are gone
        files = [code.co_filename] if (code := getattr(event.object, "cr_code", None)) else []
        trace = event.exc_traceback
        while trace:
            files.append(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        if not any(file.startswith(packages) for file in files):
            report(event)

    sys.unraisablehook = report_others


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, from `opened`."""

    manager: object  # orbax's CheckpointManager
    folder: object  # pathlib.Path, or etils.epath.Path of a bucket
    lock: lock.Lock | None  # of process 0


@contextlib.contextmanager
def opened(config: Config) -> Iterator[Checkpoints | None]:
    """Yields the checkpoints in `config.checkpoint_dir`, locked to this run until the end; None without that flag.

    Removes the unfinished save of a killed run. At the end it waits until the last save is complete.

    Raises, the same on all processes:
      ValueError: orbax is missing.
      OSError: another run saves there, or the folder cannot be made or written; at the end: the last save failed.
    """
    if not config.checkpoint_dir:
        yield None
        return
    ocp = _orbax()
    _quiet_orbax()
    with contextlib.ExitStack() as stack:
        folder, held, error = _folder(config.checkpoint_dir), None, None
        try:
            held = _claimed(folder, config.checkpoint_dir)
        except OSError as caught:
            error = caught
        if held:
            stack.callback(held.release)
        _raise_together(error)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(config.keep_checkpoints),
            cleanup_tmp_directories=True,
            # `save` reports a folder that cannot be made. With a thread the other processes would wait 300 s for it.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            lightweight_initialize=True,  # damaged metadata of a step is noticed when the step is restored
        )
        manager = ocp.CheckpointManager(folder, options=options)
        # It would ask jax.distributed about termination, on a thread, with the step of a save. The answer is right only
        # if every process asks with its current step, as the training loop does.
        manager.reached_preemption = lambda step: False
        stack.callback(_close, manager)
        yield Checkpoints(manager, folder, held)


def _folder(path: str):
    if "://" not in path:
        return Path(path).absolute()
    from etils import epath  # comes with orbax

    return epath.Path(path)


def _claimed(folder, flag: str) -> lock.Lock | None:
    """Makes the folder and writes to it. Process 0 writes the lock, which is returned.

    Raises OSError where another run holds the lock, or it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            return lock.acquire(folder / "lock")
        if isinstance(folder, Path):
            tempfile.TemporaryFile(dir=folder).close()
    except lock.HeldError:
        raise
    except FileExistsError:
        raise NotADirectoryError(f"--checkpoint_dir={flag} is a file") from None
    except OSError as error:
        raise OSError(f"--checkpoint_dir={flag} cannot be written: {error}") from None
    return None


def _raise_together(error: Exception | None, kind: type[OSError] = OSError) -> None:
    """Raises this process's error, or else that of another process as a `kind`, so that all end together."""
    if jax.process_count() == 1:
        if error:
            raise error
        return
    processes.wait_for_all()
    texts = agreement.exchanged(str(error or ""))
    if error:
        raise error
    for number, text in enumerate(texts):
        if text:
            raise kind(f"process {number}: {text}")


def save(
    checkpoints: Checkpoints,
    step: int,
    state,
    config: Config,
    contents: Contents | None = None,
    batches: data_mixtures.Batches | None = None,
) -> None:
    """Starts to save the state after `step` steps; returns when it is copied from the devices.

    Args:
      contents: of the files that the run reads.
      batches: the batch sizes so far; None: always `config.batch`.

    Raises OSError where another run has taken the folder over, or this save, or the one before it, failed.
    """
    ocp, values = _orbax(), dataclasses.asdict(config)
    values |= {"contents": _at(step, contents or {}), "batches": batches or [(0, config.batch)]}
    if checkpoints.lock:
        checkpoints.lock.check()
    sums = {"step": step, "config": _checksum_of(values), "state": checksums.checksums(state)}
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(values), checksums=ocp.args.JsonSave(sums)
    )
    with _writable(checkpoints.manager):
        checkpoints.manager.save(step, args=items, force=True)


def save_tokenizer(checkpoints: Checkpoints | None, tokenizer) -> str:
    """Writes the corpus's tokenizer beside the checkpoints, so that sampling.py shows text wherever the corpus is.

    Args:
      tokenizer: a tokenization.Tokenizer; bytes or None removes what is there.

    Returns a note if the run before had another tokenizer, else "". Raises OSError where the files cannot be written.
    """
    if not checkpoints:
        return ""
    error, before, file = None, "", checkpoints.folder / "tokenizer.json"
    after = tokenizer.identity if isinstance(tokenizer, tokenization.Tokenizer) else ""
    try:
        before = tokenization.identity_of(file) if file.exists() else ""
    except ValueError:
        before = "damaged"
    except OSError as caught:
        error = OSError(f"the tokenizer in {checkpoints.folder} cannot be read: {caught}")
    _raise_together(error)  # all have read it before it is written
    try:
        if jax.process_index() == 0 and after != before:
            tokenizer.save(checkpoints.folder) if after else file.unlink()
    except OSError as caught:
        error = OSError(f"the tokenizer cannot be written to {checkpoints.folder}: {caught}")
    _raise_together(error)
    if before in ("", after):
        return ""
    return f"the tokenizer is {after or 'bytes, or unknown'}, and {before} in {checkpoints.folder}: ids mean other text"


def open_tokenizer(directory: str) -> tokenization.Tokenizer | None:
    """The tokenizer beside the checkpoints in a folder, or None. Raises as tokenization.open_tokenizer."""
    file = _folder(directory) / "tokenizer.json"
    return tokenization.open_tokenizer(file) if file.exists() else None


def separator(directory: str) -> int | None:
    """The id of the token that starts a document, of the tokenizer beside the checkpoints in a folder; None without."""
    return tokenization.saved_separator(_folder(directory))


def copy_tokenizer(directory: str, out_dir: str) -> bool:
    """Copies the tokenizer beside the checkpoints in a folder to another folder. Returns whether there is one.

    Raises OSError where it cannot be read or written.
    """
    for name in ("tokenizer_config.json", "tokenizer.json"):
        if not (file := _folder(directory) / name).exists():
            return False
        with outputs.replacing(Path(out_dir, name), "wb") as copy:
            copy.write(file.read_bytes())
    return True


def check(checkpoints: Checkpoints | None) -> None:
    """Raises OSError where a save has failed. Does not wait for a save in progress."""
    if checkpoints and not checkpoints.manager.is_saving_in_progress():
        with _writable(checkpoints.manager):
            checkpoints.manager.wait_until_finished()


def newest(directory: str) -> tuple[Path, dict]:
    """Returns the folder of the newest checkpoint in `directory`, and its configuration, {flag: value}; locks nothing.

    Raises OSError where there is none, or it cannot be read.
    """
    ocp, folder = _orbax(), _folder(directory)
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    if not steps:
        raise FileNotFoundError(
            f"there is no checkpoint in {directory}: train.py --checkpoint_dir={directory} saves one"
        )
    path = folder / str(max(steps))
    with _readable(path):
        saved = ocp.JsonCheckpointHandler().restore(path / "config", args=ocp.args.JsonRestore())
        _check_values(saved)
    return path, saved


def restore_params(path, shapes, shardings):
    """Returns the parameters of a checkpoint, in the given shards, and nothing else of its state.

    Args:
      path: of `newest`.
      shapes, shardings: trees like the parameters.

    Raises OSError where they cannot be read, or are not what was saved, by their checksums.
    """
    ocp = _orbax()
    _quiet_orbax()
    target = {
        "params": jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    }
    args = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(target, restore_args=args, partial_restore=True)
    with _readable(path):
        restored = ocp.PyTreeCheckpointHandler().restore(path / "state", args=args)
        if not (path / "checksums").exists():
            return restored["params"]
        sums = ocp.JsonCheckpointHandler().restore(path / "checksums", args=ocp.args.JsonRestore())["state"]
    _check_arrays(restored, {name: value for name, value in sums.items() if name.startswith("params.")}, path)
    return restored["params"]


def has_any(checkpoints: Checkpoints | None) -> bool:
    return bool(checkpoints and checkpoints.manager.all_steps())


class Restored(NamedTuple):
    """A checkpoint, in the shards of a run."""

    state: Any
    note: str | None  # what could not be verified, and the flags with which the run goes on differently
    batches: data_mixtures.Batches  # the batch sizes of the run until then
    values: Mapping[str, Any] = MappingProxyType({})  # its configuration


def restore(checkpoints: Checkpoints, layout: Callable, config: Config, contents: Contents | None = None) -> Restored:
    """Returns the newest checkpoint, which must exist, in the given shards.

    Args:
      layout: {flag: value} of the run that saved it -> (shapes, shardings), trees like the state that it saved.

    With `config.skip_damaged_checkpoints` it takes the newest intact one, and moves newer ones aside, which the note
    names.

    Raises, the same on all processes:
      ValueError: the checkpoint is of another model (with the fields that differ), or a file that the run reads has
        another content than when it was saved.
      OSError: the checkpoint is damaged, or not of this program; a damaged one cannot be moved aside.
    """
    steps, damaged = sorted(checkpoints.manager.all_steps(), reverse=True), {}
    for step in steps:
        try:
            path = checkpoints.folder / str(step)
            state, notes, batches, values = _restored(path, step, layout, config, contents or {})
            break
        except _DamagedError as error:
            if not config.skip_damaged_checkpoints:
                raise OSError(f"{error}; {_remedy(steps)}") from error
            damaged[step] = error
    else:
        raise OSError(
            f"none of the checkpoints {', '.join(map(str, steps))} in {checkpoints.folder} is intact: "
            f"{damaged[steps[0]]}; give another --checkpoint_dir to begin anew"
        )
    moved = _move_aside(checkpoints, damaged)
    return Restored(state, ", ".join([*notes, *moved]), batches, values)


@dataclasses.dataclass(frozen=True)
class Stored:
    """The newest checkpoint in a folder, of which blocks of arrays can be read without a mesh."""

    path: object  # of its step folder
    step: int
    values: dict  # the configuration with which it was saved
    sums: dict[str, int]  # {name of an array: checksum}; empty in older checkpoints

    def read(self, name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        """Returns a block of an array, whose name is as in params.layers.w_q. Raises OSError where it is damaged."""
        import tensorstore  # comes with orbax

        base = str(self.path / "state")
        store = {"driver": "ocdbt", "base": f"{base if '://' in base else f'file://{base}'}/", "path": f"{name}/"}
        with _readable(self.path):
            array = tensorstore.open({"driver": "auto", "kvstore": store}, open=True, read=True).result()
            block = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
            return array[block].read().result()


def stored(directory: str) -> Stored:
    """Returns the newest checkpoint in a folder. Takes no lock: a run that saves there may remove it meanwhile.

    Raises:
      ValueError: orbax is missing.
      OSError: there is no checkpoint, or it is damaged.
    """
    _orbax()
    _quiet_orbax()
    folder = _folder(directory)
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    if not steps:
        raise FileNotFoundError(f"{directory} has no checkpoint: it must be the --checkpoint_dir of a run")
    path = folder / str(max(steps))
    with _readable(path):
        values, sums = _saved_values(path, max(steps))
    return Stored(path, max(steps), values, sums["state"] if sums else {})


def _saved_values(path, step: int) -> tuple[dict, dict | None]:
    """The configuration of a step folder, and its checksums, None in older ones. Raises where they are not intact."""
    ocp = _orbax()
    read_json = lambda name: ocp.JsonCheckpointHandler().restore(path / name, args=ocp.args.JsonRestore())
    saved = read_json("config")
    _check_values(saved)
    sums = read_json("checksums") if (path / "checksums").exists() else None
    if sums is not None:
        _check_sums(sums, step, saved)
    return saved, sums


class _DamagedError(OSError):
    """A checkpoint cannot be read, or is not what was saved."""


def _remedy(steps: list[int]) -> str:
    if len(steps) == 1:
        return "there is none before it: give another --checkpoint_dir to begin anew"
    return f"--skip_damaged_checkpoints moves it aside and goes on from step {steps[1]}"


def _restored(path, step: int, layout: Callable, config: Config, contents: Contents):
    """Returns (state, notes, batch sizes, configuration) of one step folder.

    Raises ValueError for another model or corpus, and _DamagedError.
    """
    ocp = _orbax()
    # The manager's own restore would not do: where one process fails in it, the others wait for that one.
    with _readable(path):
        saved, sums = _saved_values(path, step)
    has_amax = {"delayed", "calibrate"} & {config.fp8, saved.get("fp8")}  # in the state: calibration.py
    if differing := _differing(saved, config, SHAPES + ["fp8", "fp8_modules"] * bool(has_amax)):
        raise ValueError(
            f"the checkpoint {path} is of another model: {differing}; "
            "give these flags the values of the checkpoint, or another --checkpoint_dir"
        )
    same = _same_contents(saved, config, _at(step, contents), path)
    target = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), *layout(saved))
    with _readable(path):
        state = ocp.StandardCheckpointHandler().restore(path / "state", args=ocp.args.StandardRestore(target))
    differing = _differing(saved, config, [name for name in VALUES if name not in same])
    notes = [differing] if differing else []
    if other := [name for name in ORDER if name not in same and _differing(saved, config, [name])]:
        notes.append(f"with another {' and '.join(other)} some sequences may come again, or not at all")
    always = [(0, saved.get("batch", config.batch))]  # in older checkpoints
    batches = tuple(map(tuple, saved.get("batches", always)))
    if sums is None:
        return state, ["it has no checksums, so nothing could be verified", *notes], batches, saved
    _check_arrays(state, sums["state"], path)
    return state, notes, batches, saved


def _check_arrays(state, sums: dict[str, int], path) -> None:
    """Raises a _DamagedError where the checksums of a tree are not `sums`."""
    actual = checksums.checksums(state)
    if wrong := sorted(name for name in sums.keys() | actual if sums.get(name) != actual.get(name)):
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        raise _DamagedError(
            f"the checkpoint {path} is damaged: {wrong[0]}{more} is not what was saved, by its checksum"
        )


def _at(step: int, contents: Contents) -> dict[str, str]:
    return {flag: identity(step) if callable(identity) else identity for flag, identity in contents.items()}


def _same_contents(saved: dict, config: Config, contents: dict[str, str], checkpoint) -> set[str]:
    """Returns the flags whose files have the same content as when the checkpoint was saved, whatever their names.

    Raises ValueError where a file of the same name has another content: nothing else would show that.
    """
    before = saved.get("contents", {})  # older checkpoints have none
    for flag in before.keys() & contents.keys():
        path = getattr(config, flag)
        if before[flag] != contents[flag] and saved[flag] == path:
            file = f"--{flag}={path}" if path else f"the default of --{flag}"
            raise ValueError(
                f"{file} has another content ({contents[flag]}) than when the checkpoint {checkpoint} was saved "
                f"({before[flag]}): put that one back, give the new one another name to go on with it, or give another "
                "--checkpoint_dir"
            )
    return {flag for flag in before.keys() & contents.keys() if before[flag] == contents[flag]}


def _move_aside(checkpoints: Checkpoints, damaged: dict[int, Exception]) -> list[str]:
    """Renames the folders of these steps, so that they can be saved again. Returns a note for each."""
    error, notes = None, []
    for step, reason in damaged.items():
        old = checkpoints.folder / str(step)
        names = (f"{step}.damaged{f'-{i}' if i else ''}" for i in range(1000))
        try:
            if jax.process_index() == 0:
                new = next(path for path in map(checkpoints.folder.joinpath, names) if not path.exists())
                old.rename(new)
                notes.append(f"{reason}, and is now {new.name}")
        except OSError as caught:
            error = OSError(f"the damaged checkpoint {old} cannot be moved aside: {caught}")
            break
    _raise_together(error)
    if damaged:
        checkpoints.manager.reload()
    return notes


def _checksum_of(values: dict) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _close(manager) -> None:
    with _writable(manager):
        manager.close()


@contextlib.contextmanager
def _writable(manager):
    """Raises one OSError of one line where a checkpoint could not be written."""
    try:
        yield
    except jax.errors.JaxRuntimeError:  # another process is lost
        raise
    except Exception as error:  # tensorstore raises ValueErrors, and orbax bare Exceptions, too
        raise OSError(f"a checkpoint could not be written to {manager.directory}: {_short(error)}") from error


@contextlib.contextmanager
def _readable(path):
    """Raises a _DamagedError that names the checkpoint, on all processes, where one of them could not read it."""
    error = None
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError):  # out of memory
        raise
    except Exception as caught:  # orbax raises bare Exceptions, too
        error = _DamagedError(f"the checkpoint {path} is damaged, or not of this program ({_short(caught)})")
        error.__cause__ = caught
    _raise_together(error, _DamagedError)


def _short(error: Exception) -> str:
    line = str(error).partition("\n")[0].partition(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {line if len(line) <= 200 else f'{line[:100]} ... {line[-100:]}'}"


def _check_values(saved) -> None:
    """Raises TypeError where the values read are not a configuration."""
    if not isinstance(saved, dict):
        raise TypeError(f"its configuration is no object, but a {type(saved).__name__}")
    for name, default in dataclasses.asdict(Config()).items():
        kind = type(default)
        if name in saved and not isinstance(saved[name], (int, float) if kind is float else kind):
            raise TypeError(f"its configuration has {name}={saved[name]!r}, which is no {kind.__name__}")
    if not isinstance(saved.get("contents", {}), dict) or not saved.keys() & set(SHAPES):
        raise TypeError("its configuration is not that of a run")
    batches = saved.get("batches", [[0, 1]])
    try:
        steps, sizes = zip(*batches, strict=True)
        right = steps[0] == 0 and all(a < b for a, b in itertools.pairwise(steps)) and min(sizes) >= 1
    except (TypeError, ValueError):
        right = False
    if not right:
        raise TypeError(f"its configuration has the batch sizes {batches!r}")


def _check_sums(sums, step: int, saved: dict) -> None:
    """Raises ValueError where the checksums are unreadable, or not those of the step and the configuration."""
    if not isinstance(sums, dict) or sums.keys() != {"step", "config", "state"} or not isinstance(sums["state"], dict):
        raise ValueError("its checksums are not readable")
    if sums["step"] != step:
        raise ValueError(f"it was saved as step {sums['step']}")
    if sums["config"] != _checksum_of(saved):
        raise ValueError("its configuration is not what was saved, by its checksum")


def _differing(saved: dict, config: Config, fields) -> str:
    values = dataclasses.asdict(config)
    saved = dataclasses.asdict(Config()) | saved  # a field that is newer than the checkpoint had its default
    return ", ".join(
        f"{name} is {saved[name]!r} there and {values[name]!r} here" for name in fields if saved[name] != values[name]
    )
