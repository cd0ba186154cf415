"""Measures the time of checksums over the time of a save on this CPU, for shards as large as llama3.1-8b's.

    python benchmarks/checksums.py [--layers=2] [--mesh=fsdp:8] [--folder=/tmp]

The state is the weights of some layers and both of Adam's moments in float32, drawn at random: 2.6 GB a layer, on eight
simulated devices. A save ends when its last byte is written. Three saves and three computations of all checksums
alternate; the medians count.
"""

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import checksums
import command
import initialisation
import parameters
import placement
import sharding
from flags import from_preset


def seconds(function) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def main(argv: list[str] | None = None) -> float:
    """Prints the times, and returns the ratio."""
    parser = command.parser(__file__)
    parser.add_argument("--layers", type=command.at_least(1), default=2, help="layers of the model")
    parser.add_argument("--mesh", default="fsdp:8", help="mesh of eight devices")
    parser.add_argument("--preset", default="llama3.1-8b", help="the model")
    about = "where the state is saved, and removed"
    parser.add_argument("--folder", type=command.path, default=tempfile.gettempdir(), help=about)
    args = command.arguments(parser, argv)
    import orbax.checkpoint as ocp

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = sharding.make_mesh(placement.parse_mesh(args.mesh))
    config = from_preset(args.preset, mesh=args.mesh, num_layers=args.layers)
    shapes = jax.eval_shape(partial(initialisation.init_params, config), jax.random.key(0)).layers
    specs = parameters.param_specs(config).layers

    def drawn(key):
        """Random normal weights, which compress as little as trained ones."""
        draw = lambda shape, spec: jax.jit(
            lambda: jax.random.normal(key, shape.shape, jnp.float32), out_shardings=NamedSharding(mesh, spec)
        )()
        return jax.tree.map(draw, shapes, specs)

    state = {name: drawn(jax.random.key(i)) for i, name in enumerate(("params", "mu", "nu"))}
    arrays = jax.block_until_ready(jax.tree.leaves(state))
    state_bytes = sum(array.nbytes for array in arrays)
    shardings = tuple(array.sharding for array in arrays)
    extra = checksums._checksums.lower(arrays, shardings).compile().memory_analysis().temp_size_in_bytes
    checksums.checksums(state)  # compiles
    checksums_s, save_s = [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, ocp.StandardCheckpointer() as checkpointer:

        def save(number: int) -> None:
            checkpointer.save(Path(folder) / str(number % 2), state, force=True)
            checkpointer.wait_until_finished()

        for number in range(3):
            save_s.append(seconds(partial(save, number)))
            checksums_s.append(seconds(lambda: checksums.checksums(state)))
    checksum_s, saved_s = statistics.median(checksums_s), statistics.median(save_s)
    print(
        f"{args.preset}, {args.layers} layers with both moments: {len(arrays)} arrays, {state_bytes / 1e9:.2f} GB\n"
        f"save       {saved_s:.2f} s ({state_bytes / saved_s / 1e9:.2f} GB/s)\n"
        f"checksums  {checksum_s:.3f} s ({state_bytes / checksum_s / 1e9:.1f} GB/s), {extra / 2**20:.1f} MiB of "
        f"temporary memory a device\n"
        f"ratio      {checksum_s / saved_s:.2%} (measured, {jax.device_count()} simulated devices)",
        flush=True,
    )
    return checksum_s / saved_s


if __name__ == "__main__":
    command.run(main)
