"""A store of the best block sizes that a search found, by kernel, shape, dtype, mask and chip.

**Idea.** A kernel has a rule for its block sizes, which works for any shape and is best for few. `python kernels.py
tune` compiles other choices, ranks them, and stores the best one here, where the kernel looks first:

    {"version": 1, "entries": {"flash_forward T=8192 S=8192 H=128 ... chip=tpu7x": {"blocks": {"queries": 256, ...},
                                                                     "cycles": 69600, "rule_cycles": 70100, ...}}}

There are two such files: the user's own (`OWN`, or IRONWOOD_TUNED in the environment), which takes precedence, and the
one next to this module, for the shapes of the presets. An entry applies to its exact shape; for any other the rule
does. A file that cannot be parsed, or an entry whose blocks the kernel lacks, is ignored; a search overwrites it.
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

VMEM_BYTES = 60 * 2**20  # of a core's 64 MiB, for the buffers of a kernel; the rest is for spilled registers
VERSION = 1
CHECKED_IN = Path(__file__).with_name("tuned_tpu7x.json")
OWN = Path(os.environ.get("IRONWOOD_TUNED", "~/.cache/ironwood/tuned_tpu7x.json")).expanduser()

Blocks = TypeVar("Blocks")


def key_of(kernel: str, **shape) -> str:
    """A text with everything that the best blocks depend on: numbers, names, and True for the mask's used options."""
    fields = [f"{name}={value}" for name, value in shape.items() if value is not False]
    return " ".join([kernel, *fields, f"chip={_chip()}"])


def _chip() -> str:
    """The chip that kernels are compiled for: JAX's name of this machine's TPU; TPU7x if it has none."""
    import jax  # not at the top: reading a file does not need it

    kind = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else "TPU7x"
    return kind.lower().replace(" ", "")


def shape_of(key: str) -> tuple[str, dict]:
    """The kernel and the shape of a key; fields that the key does not name are False."""
    kernel, *fields = key.split()
    values = dict(field.split("=") for field in fields)
    parse = lambda value: int(value) if value.isdecimal() else {"True": True}.get(value, value)
    return kernel, defaultdict(bool, {name: parse(value) for name, value in values.items() if name != "chip"})


def metadata(key: str, blocks, calls: int) -> dict[str, str]:
    """Metadata that a kernel writes into the compiled program, for `kernels.cycles_of`.

    Args:
      calls: how often a call of the kernel does what the key describes, for attention the number of heads.
    """
    as_text = " ".join(f"{name}={value}" for name, value in fields_of(blocks).items())
    return {"tuned_key": key, "blocks": as_text, "calls": str(calls)}


def fields_of(blocks) -> dict:
    """{field: value} of blocks, a dataclass or a named tuple."""
    return blocks._asdict() if isinstance(blocks, tuple) else dataclasses.asdict(blocks)


def best(key: str, make: Callable[..., Blocks]) -> Blocks | None:
    """`make(**blocks)` with the stored blocks for `key`; None if there are none, with one warning on a TPU."""
    for file in (OWN, CHECKED_IN):
        try:
            return make(**read(file)[key]["blocks"])
        except (KeyError, TypeError, ValueError):  # missing, or of an older version of the kernel
            continue
    _warn_of_a_miss(key)
    return None


@functools.cache
def _warn_of_a_miss(key: str) -> None:
    """Warns once per key, and only on a TPU, where it costs time."""
    import jax  # not at the top: reading a file does not need it

    if jax.default_backend() == "tpu":
        logging.getLogger(__name__).warning(
            f"kernel     no block sizes are stored for {key}: its rule's are used (python kernels.py tune --help)"
        )


def read(file: Path) -> dict[str, dict]:
    """{key: entry} of a file; empty if the file is missing or has another format."""
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


def save(key: str, entry: dict, file: Path = OWN) -> None:
    """Adds an entry to a file, atomically. Raises OSError if the file cannot be written."""
    import outputs  # not at the top: the kernels only read

    entries = dict(sorted((read(file) | {key: entry}).items()))
    file.parent.mkdir(parents=True, exist_ok=True)
    with outputs.replacing(file) as unfinished:
        unfinished.write(json.dumps({"version": VERSION, "entries": entries}, indent=1) + "\n")
