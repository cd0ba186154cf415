"""The processes of a run: how they find each other, agree on when to stop, and end when one of them is lost.

On a TPU slice each host runs the program once, on its own chips; the same holds for processes with simulated devices.
`jax.distributed` connects them: process 0 listens, and the others report to it. A process that is silent for
`peer_timeout` seconds counts as lost; at the start, one that has not connected within five times as long (six where
process 0 is missing). The others cannot continue without its shards, so they end with a message, and all are started
again from the newest checkpoint.
"""

import contextlib
import ctypes
import errno
import glob
import itertools
import math
import os
import re
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
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
START_TIMEOUTS = 5  # of `peer_timeout`, within which process 0 must have all others; they wait one more
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


def start(config: Config) -> list[jax.Device]:
    """Chooses the platform, joins the other processes of the run, and sets up the cache of compiled programs.

    Returns the devices of the run. To simulate flash attention, JAX makes twice as many: the simulator of jax 0.10
    takes a device's thread for copies, and without a spare one it waits forever.

    Raises:
      ValueError: the others cannot be found, JAX_PLATFORMS names no device of this machine, or this is Windows.
      OSError: process 0 cannot listen.
    """
    if sys.platform == "win32":
        raise ValueError("this runs on Linux, on macOS, and on Windows in WSL: https://learn.microsoft.com/windows/wsl")
    on_tpu = compiler_flags.has_tpu()
    if not on_tpu:
        if "JAX_PLATFORMS" not in os.environ:
            jax.config.update("jax_platforms", "cpu")  # an installed libtpu would look for a TPU, slowly and loudly
        own = num_simulated(config.mesh) // max(config.num_processes, 1)
        jax.config.update("jax_num_cpu_devices", own * (2 if config.attention == "flash" else 1))
        keep_freed_memory()
    coordinator = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    if (coordinator or on_tpu) and not jax.distributed.is_initialized():
        join(config, coordinator, on_tpu)
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        warnings.showwarning = partial(_show_or_remove, warnings.showwarning, config.compilation_cache)
    devices = _devices()
    if on_tpu or config.attention != "flash":
        return devices
    of_process = lambda index: [device for device in devices if device.process_index == index]
    return [device for index in range(jax.process_count()) for device in of_process(index)[:own]]


def _show_or_remove(show: Callable, cache: str, message: Warning, *rest, **more) -> None:
    """Shows a warning as `show` does; of a damaged entry of the cache, removes the entry instead.

    JAX writes an entry in place. Another run that reads it meanwhile, or any after its writer was killed, finds a part
    of it and compiles the program. It replaces no entry, so without this every start would compile it and warn again.
    """
    damaged = re.match("Error reading persistent compilation cache entry for '(.+?)'", str(message))
    if not damaged:
        return show(message, *rest, **more)
    for entry in Path(cache).glob(f"{glob.escape(damaged[1])}-*"):  # that program's, as JAX names entries
        entry.unlink(missing_ok=True)


def join(config: Config, coordinator: str, on_tpu: bool) -> None:
    """Joins the other processes of the run, which JAX finds at `coordinator` or, on a TPU, by itself.

    Raises:
      ValueError: the others cannot be found.
      OSError: process 0 cannot listen.
    """
    # Without a bind address, process 0 of jax.distributed listens on every interface of its host.
    bound_to = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
    if config.coordinator and config.process_id == 0:
        check_port(bound_to)
    if not on_tpu:  # gloo, which connects CPU processes, prints a line for every connection: keep it off our stdout
        sys.stdout = command.output(os.dup(1))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    ctypes.CDLL(None).signal(signal.SIGABRT, _last_words)
    _reasons.append(partial(not_all_connected, config, coordinator, time.monotonic()))
    try:
        patience = START_TIMEOUTS if config.process_id == 0 else START_TIMEOUTS + 1  # so that process 0 counts all
        jax.distributed.initialize(
            coordinator or None,
            config.num_processes or None,
            config.process_id if config.process_id >= 0 else None,
            coordinator_bind_address=bound_to or None,
            initialization_timeout=patience * config.peer_timeout,
            heartbeat_timeout_seconds=config.peer_timeout,
            shutdown_timeout_seconds=config.peer_timeout,
        )
    except (ValueError, IndexError) as error:
        named = "" if config.coordinator or not coordinator else f"JAX_COORDINATOR_ADDRESS={coordinator} is not all: "
        raise ValueError(
            f"{named}the processes of this run cannot find each other ({error}): give each a "
            "--coordinator=HOST:PORT, --num_processes=N and --process_id=I, or leave the environment without it"
        ) from None
    finally:
        _reasons.pop()
    if jax.process_count() == 1:  # a slice of one host: no other process can be lost
        ctypes.CDLL(None).signal(signal.SIGABRT, None)


def _devices() -> list[jax.Device]:
    """Raises ValueError where JAX_PLATFORMS names no device of this machine, which JAX itself hardly explains."""
    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as error:
        asked = os.environ.get("JAX_PLATFORMS")
        if not asked or jax.distributed.is_initialized():
            raise
        says = f" ({error})" if str(error) else ""
        raise ValueError(f"JAX_PLATFORMS={asked} gives no device here{says}: unset it, or set it to cpu") from None


def check_port(address: str) -> None:
    """Raises OSError where process 0 cannot listen: JAX would end it in C++, and the others would wait five minutes."""
    host, _, port = address.rpartition(":")
    refused, listened = None, False
    try:
        for family, _, _, _, place in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
            try:
                socket.create_server(place[:2], family=family).close()
                listened = True
            except OSError as error:  # a name may have an IPv6 address on a host without IPv6
                if error.errno == errno.EADDRINUSE:
                    raise
                refused = error
        if not listened:
            raise refused
    except OSError as error:
        raise OSError(
            f"process 0 cannot listen at {address} ({error}): if a run before this one is still there, end it, or name "
            "another port to all processes; if process 0 has another address than the one by which the others reach "
            "it, set JAX_COORDINATOR_BIND_ADDRESS"
        ) from None


def keep_freed_memory() -> None:
    """Keeps memory that an operation of a simulated device frees in the process, for the next operation.

    glibc would return large pieces to Linux, which clears each page again on first use: a tenth of a step's CPU time.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # macOS and musl have none
        for parameter, number_of_bytes in ((_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**26), (_MMAP_THRESHOLD, 2**30)):
            mallopt(parameter, number_of_bytes)


def wait_for_all() -> None:
    """Returns when all processes of the run have called it.

    Before it each compiles the step alone, which may take one far longer than another. The first collective would not
    wait so long: on CPUs gloo gives up after 30 s.
    """
    if jax.process_count() > 1:
        with multihost_utils.live_devices(jax.devices()):  # all enter or none; a lost process ends the others
            pass


def num_simulated(mesh: str) -> int:
    """Number of devices to simulate for a mesh: as many as it names, about 8 where one of its axes is *."""
    sizes = placement.parse_mesh(mesh)
    fixed = math.prod(size for size in sizes.values() if size)
    return fixed if 0 not in sizes.values() else max(8 // fixed, 1) * fixed


def simulated_sizes(config: Config) -> dict[str, int] | None:
    """Sizes of the mesh axes if all devices will be simulated, without making any; None where they may be real."""
    if compiler_flags.has_tpu() or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        return None
    return placement.fill_mesh(placement.parse_mesh(config.mesh), num_simulated(config.mesh))


_reasons = [lambda: LOST_PEER]  # the last one returns why jax.distributed ends this process


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _last_words(_signal):
    """Prints why jax.distributed ends the process: it calls abort() from C++, which runs no handler of Python's."""
    os.write(2, f"train.py: error: {_reasons[-1]()}\n".encode())
    os._exit(1)


def not_all_connected(config: Config, coordinator: str, begun: float) -> str:
    """The error message for processes that did not all connect, or that expect different numbers of processes."""
    connected, several = "", f"the {config.num_processes}" if config.num_processes else "the"
    if config.process_id == 0 and (number := num_connected(int(coordinator.rpartition(":")[2]))):
        connected = f" ({number} did)"
    return (
        f"{several} processes of this run did not all connect to {coordinator or 'each other'} within "
        f"{time.monotonic() - begun:.0f} s{connected}: start one for each --process_id from 0 on, all with the same "
        "--coordinator and --num_processes; one that has ended has printed why"
    )


def num_connected(port: int) -> int:
    """The number of processes connected to a port of this host, itself included; 0 where the kernel hides it."""
    tables = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)  # 01 is an open connection


@contextlib.contextmanager
def notice_of_termination() -> Iterator[Callable[[int], int]]:
    """Yields a function of the step that returns the signal for which to stop after it, or 0.

    All processes stop after the same step. The signals are SIGTERM, SIGHUP, and in a run of one process the first
    Ctrl-C; a second Ctrl-C interrupts the step.
    """
    notices, several = [], jax.process_count() > 1

    def notice(number, _frame):
        notices.append(number)
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        elif number == signal.SIGINT:
            signal.signal(number, before[number])
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    calls = itertools.count(1)  # not the step: of a notice before the first call all agree on number 1

    def agreed(_):  # jax.distributed catches SIGTERM of any process, and agrees with the others on a step
        return (notices or [signal.SIGTERM])[0] if multihost_utils.reached_preemption_sync_point(next(calls)) else 0

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # until here train.py let it end the program at once
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on open files are closed first
    numbers = [signal.SIGHUP] if several else [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in numbers}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # under nohup
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, notice)
    try:
        yield agreed if several else lambda step: notices[0] if notices else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_lost_peer(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether a collective failed because another process of the run is lost."""
    return any(word in str(error) for word in ("Gloo", "UNAVAILABLE", "Barrier"))
