"""Silent data corruption: the cost of a checked step beyond the second run, compiled for TPU7x without a TPU.

    python benchmarks/corruption.py                     Llama 3.1 8B on 4 chips (two minutes)
    python benchmarks/corruption.py --flag=value ...    another run, with flags of aot.py

Three programs of corruption.py are compiled: the copy of the state, the comparison of two states, and the checksums of
what each device holds. Each is predicted as the bytes that it reads and writes, over the bandwidth of the HBM.
"""

import math
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import jax

import aot
import checksums
import command
import compiler_flags
import corruption
import flags as flags_lib
import placement
import sharding
import train
from compiled import hlo, schedule
from config import Config
from hardware import parse_topology, si

EIGHT_BILLION = ("--preset=llama3.1-8b", "--mesh=data:2,fsdp:4", "--batch=8")


def shaped_state(config: Config, mesh):
    """The state of a run as shapes with their layouts on the mesh."""
    state = jax.eval_shape(partial(train.init_state, config=config), jax.random.key(0))
    shaped = lambda array, layout: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)
    return jax.tree.map(shaped, state, train.state_shardings(config, mesh))


def programs(state) -> dict[str, tuple[jax.stages.Lowered, int]]:
    """{what it does: (the lowered program, how often it reads or writes the state)}."""
    arrays = jax.tree.leaves(state)
    shardings = tuple(array.sharding for array in arrays)
    return {
        "copy of the state": (corruption._copies.lower(arrays, shardings), 2),
        "comparison": (corruption._differing.lower(arrays, arrays, shardings), 2),
        "checksums of replicas": (checksums._checksums.lower(arrays, shardings, of_devices=True), 1),
    }


def rows(config: Config, topology: str, num_slices: int = 1) -> list[tuple[str, float, float, int]]:
    """(program, predicted seconds, compiled seconds, bytes of HBM at the peak), and first the bytes of the state."""
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), aot.devices_of(topology, num_slices), config.core_axis)
    state, (chip, _) = shaped_state(config, mesh), parse_topology(topology)
    shard_bytes = lambda array: array.dtype.itemsize * math.prod(array.sharding.shard_shape(array.shape))
    nbytes = sum(map(shard_bytes, jax.tree.leaves(state)))
    result = [("state", 0.0, 0.0, nbytes)]
    for name, (lowered, passes) in programs(state).items():
        lowered = aot.Lowered(lowered, list(mesh.devices.flat))
        memory, text = aot.compile_step(lowered, compiler_flags.for_run(config), config.compilation_cache)
        breakdown = schedule.walk(hlo.parse(text), rates=schedule.rates_of(chip), chips=lowered.chips)
        predicted_s = passes * nbytes / (chip.hbm_bytes_per_s / chip.devices)
        result.append((name, predicted_s, breakdown.seconds, memory["peak_hbm_bytes"]))
    return result


def main() -> None:
    parser = command.parser(__file__)
    flags_lib.add_run_flags(parser, "tpu7x:2x2x1")
    args = command.arguments(parser, sys.argv[1:] or EIGHT_BILLION)
    config, (topology, num_slices) = flags_lib.from_args(args), flags_lib.slice_of(args)
    (_, _, _, state_bytes), *each = rows(config, topology, num_slices)
    print(f"{config.preset} on {topology}, {config.mesh}: {si(state_bytes, 'B')} of state on a device\n")
    print("| program | predicted | compiled | HBM |\n|---|---|---|---|")
    for name, predicted_s, compiled_s, nbytes in each:
        print(f"| {name} | {1e3 * predicted_s:.1f} ms | {1e3 * compiled_s:.1f} ms | {si(nbytes, 'B')} |")


if __name__ == "__main__":
    command.run(main)
