"""This machine: its memory, the memory that simulated devices need at least, and which memory devices can address.

Simulated devices share the memory of one machine, which does not refuse a model that is too large: it fills its memory
and swaps, or the system ends any program. So the need of all devices is compared with the memory before one is made. At
least this is needed, on all devices together:

    weights, optimizer state, gradients  16 bytes a parameter with adamw in float32, as sharded (predicted/workload.py)
    inputs of the layers                 L * D elements a token of a microbatch, which every policy of remat.py saves
    the batch                            20 bytes a token

**Left out.** All else, such as other activations and a program's copies. A run that is refused cannot fit; another one
may still be too large.
"""

import math
import os
from pathlib import Path

import anatomy
from config import Config
from hardware import CHIPS, GiB
from predicted.workload import Run, params_of_device, slots_of_device

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container: v2, v1


def check(config: Config, sizes: dict[str, int]) -> None:
    """Raises ValueError where the memory is too small for the simulated devices.

    Args:
      sizes: the sizes of all mesh axes.
    """
    needed, available = needed_bytes(config, sizes) / max(config.num_processes, 1), available_bytes()
    if needed > available:
        devices = math.prod(sizes.values())
        raise ValueError(
            f"preset={config.preset} with batch={config.batch} on {devices} simulated devices needs "
            f"{needed / GiB:,.1f} GiB at least, and this machine has {available / GiB:,.1f} GiB of memory left: a "
            "smaller --preset, --batch or --mesh; aot.py and roofline.py step answer without the memory"
        )


def check_host_memory(config: Config, mesh) -> None:
    """Raises ValueError if the config offloads something and a device of the mesh cannot address host memory."""
    import offload

    activations = anatomy.offloaded_names(config)
    offloads = {
        f"remat={config.remat} offloads {', '.join(sorted(activations))}": activations,
        "offload_optimizer puts the optimizer state": config.offload_optimizer,
    }
    for action in (action for action, enabled in offloads.items() if enabled):
        for device in mesh.local_devices:
            kinds = [memory.kind for memory in device.addressable_memories()]
            if offload.MEMORY not in kinds:
                raise ValueError(
                    f"{action} to {offload.MEMORY}, and {device.device_kind} has the memories {', '.join(kinds)} only; "
                    "without: --remat=full --no-offload_optimizer"
                )


def needed_bytes(config: Config, sizes: dict[str, int]) -> float:
    """Returns the bytes that all devices of the mesh together need at least."""
    devices = math.prod(sizes.values())
    run = Run(config, CHIPS["tpu7x"], (devices,), 1, sizes, links={})  # any chip will do
    shards = sizes["data"] if config.shard_update else 1
    state = 8 * sum(params_of_device(run)) / shards + slots_of_device(run)
    tokens = config.batch * config.seq_len
    inputs = config.num_layers * anatomy.sizes(config)["D"] * run.element * tokens / config.microbatches
    return state * devices + inputs + 20 * tokens


def available_bytes() -> float:
    """Returns the free bytes of the machine with swap, or of its container; all bytes if the free ones are unknown."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _free_bytes() or total
    limits = [Path(path).read_text().strip() for path in _CGROUPS if os.path.exists(path)]
    return min([available, *(int(limit) for limit in limits if limit.isdecimal())])


def _free_bytes() -> int:
    """The free bytes with swap as Linux reports them; 0 on macOS."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return 0
    return sum(int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024
