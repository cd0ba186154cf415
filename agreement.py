"""Agreement: the processes of a run compare all that decides it, before any of them takes a step.

Every process draws its own weights, reads its own rows and compiles its own program. With another learning rate, seed
or corpus on one host nothing fails: the collectives fit, and another model comes out. With another number of steps the
one hangs in a collective that the other never enters. So each process puts together what decides its run:

    every flag        but those that differ by nature (`MAY_DIFFER`)
    versions          of Python and of the packages that compute
    code              a checksum of each of the project's modules that it has loaded, and of the tuned blocks
    environment       flags of XLA and JAX
    corpus            its identity (data.py), for the same path may lead to other tokens
    checkpoints       the newest step that it sees, and whether it sees a file that process 0 has just written there

Digests of these go over all processes, the texts themselves only where digests differ. One device of each process
takes part, so that processes with unlike meshes can still tell each other. What keeps one process from starting
(`--corpus` is not there) is told to all in the same way: every process ends with status 1 and the same difference.

Left out: a process whose command line cannot be read ends before it could tell; the others wait for it to connect,
five times `--peer_timeout`, and process 0 then says how many came.
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

MAY_DIFFER = config_lib.deciding("process")  # who a process is, where it finds process 0, its own outputs
PACKAGES = ("jax", "jaxlib", "numpy", "optax")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL")
SHOWN = 4  # differences in a message
_MARK, _NEWEST = "what process 0 writes to --checkpoint_dir", "the newest checkpoint"
_MARK_FILE = ".seen_by_all"


@contextlib.contextmanager
def reached(config: Config) -> Iterator[dict]:
    """Around what a process does alone, up to its corpus. Gives a dict, for more that is to be the same on all.

    Leaves when all processes have done it and agree. With one process it does nothing.

    Raises OSError, on all processes, with the first differences, or with what keeps one of them from starting.
    """
    more, problem = {}, None
    try:
        yield more
    except (ValueError, OSError) as error:
        if config.num_processes > 1 and not jax.distributed.is_initialized():  # to tell the others, with a device each
            processes.start(dataclasses.replace(config, mesh=f"data:{config.num_processes}", attention="reference"))
        if not jax.distributed.is_initialized() or jax.process_count() == 1:
            raise
        problem = error
    if jax.process_count() == 1:
        return
    facts = decided_by(config) | more
    marked = config.checkpoint_dir and "://" not in config.checkpoint_dir  # a bucket's name is one for all hosts
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
    """Returns {name: value} of all that decides this process's run, but its corpus and its checkpoints."""
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
    ours = {Path(file) for file in files} & {*command.modules()}
    own = [tuned.OWN, *([Path(config.fp8_scales)] if config.fp8 == "static" else [])]
    for path in (*sorted(ours), tuned.CHECKED_IN, *own):
        facts[f"the checksum of {path.name}"] = f"{zlib.crc32(path.read_bytes()):08x}" if path.is_file() else "missing"
    return facts


def seen_in(folder: Path) -> dict[str, str]:
    """Returns what this process sees in the folder of the checkpoints: the mark of process 0, the newest step."""
    try:
        mark = (folder / _MARK_FILE).read_text()
        steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    except OSError:
        mark, steps = "missing", []
    return {_MARK: mark, _NEWEST: str(max(steps, default="none"))}


def exchanged(text: str) -> list[str]:
    """The texts of all processes, in their order; where all have the same, its digest is all that travels."""
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
    """The rows of all processes, [process, byte], by the first device of each: they may have unlike numbers of them."""
    devices = [next(d for d in jax.devices() if d.process_index == index) for index in range(jax.process_count())]
    mesh = Mesh(np.array(devices), ("process",))
    mine = jax.device_put(row[None], devices[jax.process_index()])
    shape, cut = (len(devices), row.size), NamedSharding(mesh, PartitionSpec("process"))
    rows = jax.make_array_from_single_device_arrays(shape, cut, [mine])
    everywhere = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return np.asarray(everywhere(rows).addressable_data(0))


def differences(facts: Sequence[dict[str, str]]) -> list[str]:
    """`--seed is 0 on process 0 and 1 on process 1`, of each fact that is not the same on all."""
    mark = facts[0].get(_MARK)
    facts = [fact | ({_MARK: "there" if fact[_MARK] == mark else "missing"} if _MARK in fact else {}) for fact in facts]
    if len({fact["--checkpoint_dir"] for fact in facts}) > 1:  # of other folders that is no news
        facts = [{name: value for name, value in fact.items() if name not in (_MARK, _NEWEST)} for fact in facts]
    found = []
    for name in facts[0]:
        if not all(name in fact for fact in facts):  # one that cannot start has not found out
            continue
        holders: dict[str, list[int]] = {}
        for index, fact in enumerate(facts):
            holders.setdefault(fact[name], []).append(index)
        if len(holders) > 1:
            found.append(f"{name} is {' and '.join(f'{value} on {_those(who)}' for value, who in holders.items())}")
    return found


def _those(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"processes {', '.join(map(str, numbers[:3]))}{more}"
