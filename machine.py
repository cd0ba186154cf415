"""This machine: its memory, and what the devices that are simulated on it need of that.

Simulated devices share the memory of one machine, which does not refuse a model that is too large: it fills its memory
and swaps, or the system ends whatever runs. So what all of them need is held against it before one is made. Needed in
any case, of every replica:

    weights, optimizer state, gradients    16 bytes a parameter with adamw in float32, each as it is cut (workload.py)
    inputs of the layers                   L * D elements a token of a microbatch, which every policy of remat.py saves
    the batch                              20 bytes a token

**Left out**: all else, as other activations and what a program copies. A run that is refused cannot be; one that is not
may still be too large.
"""

import math
import os
from pathlib import Path

from config import Config
from hardware import CHIPS, GiB
from predicted.workload import Run, params_of_device, slots_of_device

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container: v2, v1


def check(config: Config, sizes: dict[str, int]) -> None:
    """Raises ValueError where simulated devices cannot be, for want of memory.

    Args:
      sizes: of all mesh axes.
    """
    needed, available = needed_bytes(config, sizes) / max(config.num_processes, 1), available_bytes()
    if needed > available:
        devices = math.prod(sizes.values())
        raise ValueError(
            f"preset={config.preset} with batch={config.batch} on {devices} simulated devices needs "
            f"{needed / GiB:,.1f} GiB at least, and this machine has {available / GiB:,.1f} GiB of memory left: a "
            "smaller --preset, --batch or --mesh; aot.py and roofline.py step answer without the memory"
        )


def needed_bytes(config: Config, sizes: dict[str, int]) -> float:
    """Returns the bytes that all devices of the mesh need at least."""
    devices = math.prod(sizes.values())
    run = Run(config, CHIPS["tpu7x"], (devices,), 1, sizes, links={})  # of the chip nothing is asked
    cut = sizes["data"] if config.shard_update else 1
    state = 8 * sum(params_of_device(run)) / cut + slots_of_device(run)
    tokens = config.batch * config.seq_len
    inputs = config.num_layers * config.model_dim * run.element * tokens / config.microbatches
    return state * devices + inputs + 20 * tokens


def available_bytes() -> float:
    """Returns the free bytes of the machine, swap included, or of its container; all bytes where none are told free."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _of_meminfo() or pages
    limits = [Path(path).read_text().strip() for path in _CGROUPS if os.path.exists(path)]
    return min([available, *(int(limit) for limit in limits if limit.isdecimal())])


def _of_meminfo() -> int:
    """Linux's own count, 0 on macOS."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return 0
    return sum(int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024
