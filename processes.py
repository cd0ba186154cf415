"""One run, several processes: how they find each other, agree on when to stop, and end when one of them is lost.

On a TPU slice each host runs the program once, on its own chips; the same holds for processes with simulated devices.
`jax.distributed` connects them: process 0 listens, the others report to it, and one that is silent for `peer_timeout`
seconds is taken for lost (at the start, one that has not come within five minutes). The others cannot go on without its
shards, so they end, with a message, and are started again from the newest checkpoint.
"""

import contextlib
import ctypes
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

import command
import compiler_flags
import placement
from config import Config

LOST_PEER = (
    "another process of this run is lost; when all are started again, the same command resumes from the newest "
    "checkpoint"
)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


def start(config: Config) -> list[jax.Device]:
    """Chooses the platform, joins the other processes of the run, sets up the cache of compiled programs.

    Returns the devices of the run. Where flash attention is simulated there are twice as many: the simulator of jax
    0.10 takes a thread of a device for copies, and with none to spare waits for ever.

    Raises ValueError where process 0 cannot listen, or JAX_PLATFORMS names no device that is here.
    """
    on_tpu = compiler_flags.has_tpu()
    if not on_tpu:
        if "JAX_PLATFORMS" not in os.environ:
            jax.config.update("jax_platforms", "cpu")  # an installed libtpu would look for a TPU, at length and aloud
        own = _simulated_devices(config.mesh) // max(config.num_processes, 1)
        jax.config.update("jax_num_cpu_devices", own * (2 if config.attention == "flash" else 1))
        keep_freed_memory()
    joins = config.coordinator or on_tpu or "JAX_COORDINATOR_ADDRESS" in os.environ
    if joins and not jax.distributed.is_initialized():
        if config.coordinator and config.process_id == 0:
            check_port(config.coordinator)
        if not on_tpu:  # gloo, the interconnect of CPU processes, prints a line for every connection: not on our stdout
            sys.stdout = command.output(os.dup(1))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        ctypes.CDLL(None).signal(signal.SIGABRT, _last_words)
        jax.distributed.initialize(
            config.coordinator or None,
            config.num_processes or None,
            config.process_id if config.process_id >= 0 else None,
            heartbeat_timeout_seconds=config.peer_timeout,
            shutdown_timeout_seconds=config.peer_timeout,
        )
        if jax.process_count() == 1:  # a slice of one host: there is nobody to lose
            ctypes.CDLL(None).signal(signal.SIGABRT, None)
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    devices = _devices()
    if on_tpu or config.attention != "flash":
        return devices
    of_process = lambda index: [device for device in devices if device.process_index == index]
    return [device for index in range(jax.process_count()) for device in of_process(index)[:own]]


def _devices() -> list[jax.Device]:
    """Raises ValueError where JAX_PLATFORMS names none that is here, of which JAX itself says little or nothing."""
    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as error:
        asked = os.environ.get("JAX_PLATFORMS")
        if not asked or jax.distributed.is_initialized():
            raise
        says = f" ({error})" if str(error) else ""
        raise ValueError(f"JAX_PLATFORMS={asked} gives no device here{says}: unset it, or set it to cpu") from None


def check_port(coordinator: str) -> None:
    """Raises ValueError where another program listens there: jax would end in C++, and the others wait five minutes."""
    port = int(coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ValueError(
            f"--coordinator={coordinator}: process 0 cannot listen at port {port} ({error}): if a run before this "
            "one is still there, end it, or name another port to all processes"
        ) from None


def keep_freed_memory() -> None:
    """Memory that one operation of a simulated device frees stays with the process, for the next.

    glibc hands large pieces back to Linux, which clears each page anew as it is touched: a tenth of a step's CPU time.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # macOS and musl have none
        for parameter, number_of_bytes in ((_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**26), (_MMAP_THRESHOLD, 2**30)):
            mallopt(parameter, number_of_bytes)


def wait_for_all() -> None:
    """Returns when all processes of the run are here.

    What each does alone before it, to compile the step, may take one far longer than another. Left to the first
    collective that wait would be short: on CPUs gloo gives up after 30 s.
    """
    if jax.process_count() > 1:
        with multihost_utils.live_devices(jax.devices()):  # entered by all or none; a lost one ends the others, too
            pass


def _simulated_devices(mesh: str) -> int:
    """As many as the mesh names; about 8 where one of its axes is *."""
    sizes = placement.parse_mesh(mesh)
    fixed = math.prod(size for size in sizes.values() if size)
    return fixed if 0 not in sizes.values() else max(8 // fixed, 1) * fixed


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _last_words(_signal):
    """jax.distributed ends a process that lost another from C++, by abort(): there no signal handler of Python runs."""
    os.write(2, f"train.py: error: {LOST_PEER}\n".encode())
    os._exit(1)


@contextlib.contextmanager
def notice_of_termination() -> Iterator[Callable[[int], int]]:
    """Gives a function of the step: the signal for which to stop after it, or 0; alike on all processes.

    That is SIGTERM, and where one process is the run also Ctrl-C, the first; the second one interrupts it.
    """
    if jax.process_count() > 1:  # jax.distributed takes the signal of any process and agrees with the others on a step
        yield lambda step: signal.SIGTERM * multihost_utils.reached_preemption_sync_point(step)
        return
    notices, before = [], {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def notice(number, _frame):
        notices.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[number])
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    for number in before:
        signal.signal(number, notice)
    try:
        yield lambda step: notices[0] if notices else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_lost_peer(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether a collective failed because the process at its other end is gone."""
    return any(word in str(error) for word in ("Gloo", "UNAVAILABLE", "Barrier"))
