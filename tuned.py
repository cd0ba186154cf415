"""Tuned: the block sizes that a search found for a kernel, kept by kernel, shape, dtype, mask and chip.

A kernel has a rule for its block sizes, which is right for any shape and best for few. `python kernels.py tune`
compiles other choices, ranks them, and keeps the winner here, where the kernel looks first:

    {"version": 1, "entries": {"flash_forward T=8192 S=8192 H=128 ... chip=tpu7x": {"blocks": {"queries": 256, ...},
                                                                     "cycles": 69600, "rule_cycles": 70100, ...}}}

Two files of this form: one's own (`OWN`, or IRONWOOD_TUNED in the environment), which counts first, and the one beside
this module, for the shapes of the presets. An entry says nothing of a shape that differs in anything; the rule does. A
file that cannot be read, and an entry whose blocks are not those that the kernel has today, count as not there; the
next search writes them anew.
"""

import dataclasses
import functools
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

VMEM_BYTES = 60 * 2**20  # of a core's 64 MiB, for the buffers of a kernel; the rest is for registers that are spilled
VERSION = 1
CHECKED_IN = Path(__file__).with_name("tuned_tpu7x.json")
OWN = Path(os.environ.get("IRONWOOD_TUNED", "~/.cache/ironwood/tuned_tpu7x.json")).expanduser()

Blocks = TypeVar("Blocks")


def key_of(kernel: str, **shape) -> str:
    """One text for what the best blocks depend on: numbers, names, and True for the parts of a mask that are used."""
    parts = [f"{name}={value}" for name, value in shape.items() if value is not False]
    return " ".join([kernel, *parts, f"chip={_chip()}"])


def _chip() -> str:
    """That kernels are compiled for: the TPU that there is, as JAX names it; where there is none, TPU7x."""
    import jax  # here, for what reads such a file needs none

    kind = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else "TPU7x"
    return kind.lower().replace(" ", "")


def shape_of(key: str) -> tuple[str, dict]:
    """The kernel and the shape of a key; what the key does not name is False."""
    kernel, *parts = key.split()
    values = dict(part.split("=") for part in parts)
    read = lambda value: int(value) if value.isdecimal() else {"True": True}.get(value, value)
    return kernel, defaultdict(bool, {name: read(value) for name, value in values.items() if name != "chip"})


def metadata(key: str, blocks, calls: int) -> dict[str, str]:
    """What a kernel says of itself in a compiled program, for `kernels.cycles_of`.

    Args:
      calls: of what the key describes, in a call of the kernel: heads of attention.
    """
    as_text = " ".join(f"{name}={value}" for name, value in fields_of(blocks).items())
    return {"tuned_key": key, "blocks": as_text, "calls": str(calls)}


def fields_of(blocks) -> dict:
    """Of a dataclass or a named tuple."""
    return blocks._asdict() if isinstance(blocks, tuple) else dataclasses.asdict(blocks)


def best(key: str, make: Callable[..., Blocks]) -> Blocks | None:
    """`make(**blocks)` of what was found for `key`, or None, of which a TPU's user is told once."""
    for file in (OWN, CHECKED_IN):
        try:
            return make(**read(file)[key]["blocks"])
        except (KeyError, TypeError, ValueError):  # not there, or of an older kernel
            continue
    _tell_of_a_miss(key)
    return None


@functools.cache
def _tell_of_a_miss(key: str) -> None:
    """Once, and where it costs time: on a TPU."""
    import jax  # here, for what reads such a file needs none

    if jax.default_backend() == "tpu":
        found = "were found: its rule's are taken (python kernels.py tune --help)"
        logging.getLogger(__name__).warning(f"kernel     no block sizes of {key} {found}")


def read(file: Path) -> dict[str, dict]:
    """{key: entry} of a file; empty if it is not there, or is not one of ours."""
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        return {}
    return _read(file, changed)


@functools.cache
def _read(file: Path, changed: int) -> dict[str, dict]:
    try:
        content = json.loads(file.read_text())
        entries = content["entries"] if content["version"] == VERSION else {}
        return entries if isinstance(entries, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def keep(key: str, entry: dict, file: Path = OWN) -> None:
    """Adds an entry to a file, whole or not at all. Raises OSError: it cannot be written."""
    import outputs  # here: the kernels only read

    entries = dict(sorted((read(file) | {key: entry}).items()))
    file.parent.mkdir(parents=True, exist_ok=True)
    with outputs.replacing(file) as unfinished:
        unfinished.write(json.dumps({"version": VERSION, "entries": entries}, indent=1) + "\n")
