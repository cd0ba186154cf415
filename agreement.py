"""Agreement: before the first step, the processes of a run compare everything that decides it.

**Idea.** Every process draws its own weights, reads its own rows and compiles its own program. If one host has another
learning rate, seed or corpus, nothing fails: the collectives match, and the run trains another model. If it has another
number of steps, one process hangs in a collective that the other never enters. So each process collects what decides
its run:

    every flag        but those that differ by nature (`MAY_DIFFER`)
    versions          of Python and of the packages that compute
    code              a checksum of each of the project's modules that it has loaded, and of the tuned blocks
    environment       flags of XLA and JAX
    corpus, weights   their identities (data.py, tensor_files.py), since the same path may lead to other content
    checkpoints       the newest step that it sees, and whether it sees a file that process 0 has just written there

The processes gather digests of these, and the texts themselves only if digests differ. One device of each process takes
part, so processes with different meshes can still report to each other. An error that keeps one process from starting
(no file at `--corpus`) is reported in the same way: every process ends with status 1 and the same message.

**Left out.** A process whose command line cannot be read ends before it could report. The others wait for it to
connect, five times `--peer_timeout`, and process 0 then reports how many have connected.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import command
import config as config_lib
import outputs
import processes
import tuned
from config import Config

MAY_DIFFER = config_lib.deciding("process")  # its number, the address of process 0, files that it alone writes
PACKAGES = ("jax", "jaxlib", "numpy", "optax")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL")
SHOWN = 4  # differences shown in a message
_MARK, _NEWEST = "the file that process 0 writes to --checkpoint_dir", "the newest checkpoint"
_MARK_FILE = ".seen_by_all"


@contextlib.contextmanager
def reached(config: Config) -> Iterator[dict]:
    """Wraps what a process does alone, up to its corpus; at its end waits until all processes agree.

    Yields a dict, for further facts that must be the same on all. With one process it does nothing.

    Raises OSError, on all processes, with the first differences, or with the error that keeps one from starting.
    """
    more, problem = {}, None
    try:
        yield more
    except (ValueError, OSError) as error:
        if config.num_processes > 1 and not jax.distributed.is_initialized():  # to report it, with one device each
            processes.start(dataclasses.replace(config, mesh=f"data:{config.num_processes}", attention="reference"))
        if not jax.distributed.is_initialized() or jax.process_count() == 1:
            raise
        problem = error
    if jax.process_count() == 1:
        return
    facts = decided_by(config) | more
    marked = config.checkpoint_dir and "://" not in config.checkpoint_dir  # a bucket is the same for all hosts
    folder = Path(config.checkpoint_dir)
    try:
        if marked and jax.process_index() == 0 and not problem:
            folder.mkdir(parents=True, exist_ok=True)
            with outputs.replacing(folder / _MARK_FILE) as file:
                file.write(uuid.uuid4().hex)
    except OSError as error:
        problem = error
    processes.wait_for_all()
    if marked and not problem:
        facts |= seen_in(folder)
    everyone = [json.loads(text) for text in exchanged(json.dumps([facts, str(problem or "")]))]
    if marked and jax.process_index() == 0:
        (folder / _MARK_FILE).unlink(missing_ok=True)
    if differing := differences([facts for facts, _ in everyone]):
        more = f", and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise OSError(
            f"the processes of this run disagree: {'; '.join(differing[:SHOWN])}{more}: start all of them with the "
            "same command, code and files"
        )
    if problem:
        raise problem
    for index, (_, problem) in enumerate(everyone):
        if problem:
            raise OSError(f"process {index} cannot start: {problem}")


def decided_by(config: Config) -> dict[str, str]:
    """Returns {name: value} of everything that decides this process's run, but its files and its checkpoints."""
    facts = {f"--{name}": repr(value) for name, value in vars(config).items() if name not in MAY_DIFFER}
    facts["Python"] = platform.python_version()
    packages = [*PACKAGES, *["libtpu"] * (jax.default_backend() == "tpu")]
    for name in (*packages, *["orbax-checkpoint"] * bool(config.checkpoint_dir)):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "missing"
    facts |= {name: repr(os.environ.get(name, "")) for name in VARIABLES}
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    modules = {Path(file) for file in files} & {*command.modules()}
    tables = [tuned.CHECKED_IN, tuned.OWN, *([Path(config.fp8_scales)] if config.fp8 == "static" else [])]
    for path in (*sorted(modules), *tables):
        facts[f"the checksum of {path.name}"] = f"{zlib.crc32(path.read_bytes()):08x}" if path.is_file() else "missing"
    return facts


def seen_in(folder: Path) -> dict[str, str]:
    """Returns what this process sees in the checkpoint folder: the mark of process 0, and the newest step."""
    try:
        mark = (folder / _MARK_FILE).read_text()
        steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    except OSError:
        mark, steps = "missing", []
    return {_MARK: mark, _NEWEST: str(max(steps, default="none"))}


def exchanged(text: str) -> list[str]:
    """Returns the texts of all processes, in their order; if all are the same, only digests are sent."""
    content = np.frombuffer(text.encode(), np.uint8)
    digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
    length = np.array([content.size], np.int64).view(np.uint8)
    gathered = _gathered(np.concatenate([digest, length]))
    if (gathered == gathered[0]).all():
        return [text] * len(gathered)
    lengths = gathered[:, digest.size :].copy().view(np.int64)[:, 0]
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: content.size] = content
    return [bytes(row[:length]).decode() for row, length in zip(_gathered(padded), lengths, strict=True)]


def _gathered(row: np.ndarray) -> np.ndarray:
    """Gathers the rows of all processes, [process, byte], over one device of each: they may have different numbers."""
    devices = [next(d for d in jax.devices() if d.process_index == index) for index in range(jax.process_count())]
    mesh = Mesh(np.array(devices), ("process",))
    local = jax.device_put(row[None], devices[jax.process_index()])
    shape, sharded = (len(devices), row.size), NamedSharding(mesh, PartitionSpec("process"))
    rows = jax.make_array_from_single_device_arrays(shape, sharded, [local])
    replicate = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return np.asarray(replicate(rows).addressable_data(0))


def differences(facts: Sequence[dict[str, str]]) -> list[str]:
    """Returns a text such as `--seed is 0 on process 0 and 1 on process 1` for each fact that differs."""
    mark = facts[0].get(_MARK)
    seen = lambda fact: {_MARK: "present" if fact[_MARK] == mark else "missing"} if _MARK in fact else {}
    facts = [fact | seen(fact) for fact in facts]
    if len({fact["--checkpoint_dir"] for fact in facts}) > 1:  # different folders differ in these anyway
        facts = [{name: value for name, value in fact.items() if name not in (_MARK, _NEWEST)} for fact in facts]
    texts = []
    for name in facts[0]:
        if not all(name in fact for fact in facts):  # a process that cannot start lacks some
            continue
        holders: dict[str, list[int]] = {}
        for index, fact in enumerate(facts):
            holders.setdefault(fact[name], []).append(index)
        if len(holders) > 1:
            texts.append(f"{name} is {' and '.join(f'{value} on {_names(who)}' for value, who in holders.items())}")
    return texts


def _names(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"processes {', '.join(map(str, numbers[:3]))}{more}"
