"""The memory and the time of reading published weights onto 8 simulated devices, and of writing them again.

    python benchmarks/import_weights.py [--preset=llama3.2-1b] [--fp8] [--mesh=fsdp:8] [--devices=8] [--json]

The weights of the preset, one of the Llama family, are random, in bfloat16, or in FP8 with blocks. They are made in a
temporary folder, and read by a process of its own. The peak of its resident memory (VmHWM) is compared with what it
must hold: its shards in float32 and one more tensor in full, the largest. With fewer --devices than the mesh has, the
process makes only the shards of those, as one host of several does; they hold no array together, so nothing is exported
then.
"""

import json
import math
import operator
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command

PRESETS = ("llama3.2-1b", "llama3.1-8b")
ON_CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def make(folder: str, config, fp8: bool) -> int:
    """Writes a folder of random weights, one tensor at a time. Returns the bytes of its values."""
    import ml_dtypes
    import numpy as np

    import anatomy
    import families
    import tensor_files
    import weights

    values, sizes, tensors = families.config_json(config), anatomy.sizes(config), []
    for entry in weights.entries(config, families.FAMILIES["llama"]):
        shape = weights._shape(entry.row, sizes)
        if fp8 and "_proj" in entry.name:
            tensors.append(tensor_files.New(entry.name, "F8_E4M3", shape))
            scales = tuple(-(-size // 128) for size in shape)
            tensors.append(tensor_files.New(f"{entry.name}_scale_inv", "F32", scales))
        else:
            tensors.append(tensor_files.New(entry.name, "BF16", shape))
    if fp8:
        values["quantization_config"] = dict(quant_method="fp8", weight_block_size=[128, 128])
    bits = np.random.default_rng(0).standard_normal(2**20, np.float32).astype(ml_dtypes.bfloat16)
    value_of = lambda tensor: np.resize(bits, math.prod(tensor.shape)).reshape(tensor.shape)
    tensor_files.write(Path(folder), tensors, value_of, weights.SHARD_BYTES)
    Path(folder, "config.json").write_text(json.dumps(values))
    return sum(tensor.num_bytes for tensor in tensors)


def measure(folder: str, mesh: str, num_devices: int, export: bool) -> dict:
    """Reads the folder in this process. Returns the figures."""
    import jax

    import families
    import parameters
    import placement
    import sharding
    import tensor_files
    import weights
    from config import Config

    # Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    peak = lambda: 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    config = Config(**families.settings(folder), mesh=mesh)
    full = sharding.make_mesh(placement.parse_mesh(mesh))
    before, begun, used = peak(), time.perf_counter(), time.process_time()
    with tensor_files.Folder(folder) as opened:
        weights.check(opened, config)
        if num_devices == full.size:
            held = weights.read(opened, config, full)
        else:
            held = shards_of(opened, config, full, full.devices.flatten()[:num_devices])
        jax.block_until_ready(held)
        read_s, cpu_s, num_bytes = time.perf_counter() - begun, time.process_time() - used, opened.bytes_read
    shards = sum(shard.data.nbytes for array in jax.tree.leaves(held) for shard in array.addressable_shards)
    largest = max(4 * math.prod(shape.shape[1:]) for shape in jax.tree.leaves(parameters.param_shapes(config).layers))
    largest = max(largest, 4 * config.vocab_size * config.model_dim)
    figures = dict(bytes_read=num_bytes, read_s=read_s, cpu_s=cpu_s, shard_bytes=shards, largest_bytes=largest)
    figures |= dict(start_bytes=before, peak_bytes=peak())
    if export and num_devices == full.size:
        begun = time.perf_counter()
        weights.export(held, config, os.path.join(folder, "exported"))
        figures |= dict(export_s=time.perf_counter() - begun, export_peak_bytes=peak())
    return figures


def shards_of(folder, config, mesh, devices) -> list:
    """The shards of some devices of a mesh, each as an array of its own: what one host of several makes."""
    import jax

    import families
    import parameters
    import weights

    rows = {row.ours: row for row in families.FAMILIES["llama"].rows}
    shapes, specs = parameters.param_shapes(config), parameters.param_specs(config)
    held = []
    for path, ours, layers in weights._stacks(config):
        shape, spec = map(operator.attrgetter(path), (shapes, specs))
        places = jax.sharding.NamedSharding(mesh, spec).devices_indices_map(shape.shape)
        ranges = [tuple(i.indices(n)[:2] for i, n in zip(places[d], shape.shape, strict=True)) for d in devices]
        blocks = weights._blocks(folder, rows[ours], path, layers, sorted({*ranges}), config)
        held += [jax.device_put(blocks[each], device) for each, device in zip(ranges, devices, strict=True)]
    return held


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("--preset", choices=PRESETS, default=PRESETS[0], help="the model [%(default)s]")
    parser.add_argument("--fp8", action="store_true", help="the layers' matrices in FP8, with 128 x 128 blocks")
    parser.add_argument("--mesh", default="fsdp:8", help="mesh of 8 devices [%(default)s]")
    parser.add_argument(
        "--devices", type=command.at_least(1), default=8, help="those whose shards it makes [%(default)s]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--measure", type=command.path, default="", metavar="FOLDER", help="of the second process")
    args = command.arguments(parser)
    if args.devices > 8:
        raise ValueError(f"--devices={args.devices} must be at most 8")
    if args.measure:
        print(json.dumps(measure(args.measure, args.mesh, args.devices, export=True)))
        return
    import flags

    with tempfile.TemporaryDirectory() as folder:
        num_bytes = make(folder, flags.from_preset(args.preset), args.fp8)
        again = [sys.executable, __file__, f"--measure={folder}", f"--mesh={args.mesh}", f"--devices={args.devices}"]
        done = subprocess.run(again, env=os.environ | ON_CPU, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the measurement ended with status {done.returncode}: {done.stderr.splitlines()[-1]}")
    figures = json.loads(done.stdout.splitlines()[-1]) | dict(stored_bytes=num_bytes)
    print(json.dumps(figures) if args.json else report(figures))


def report(figures: dict) -> str:
    """The figures in words."""
    GB, bytes_read = 1e9, figures["bytes_read"]
    least = figures["shard_bytes"] + figures["largest_bytes"]
    lines = [
        f"stored     {figures['stored_bytes'] / GB:.2f} GB, of which {bytes_read / GB:.2f} GB were read",
        f"time       {figures['read_s']:.1f} s, {figures['read_s'] * GB / bytes_read:.2f} s a GB, "
        f"{figures['cpu_s'] * GB / bytes_read:.2f} CPU-seconds a GB",
        f"memory     {figures['peak_bytes'] / GB:.2f} GB at the peak, {figures['peak_bytes'] / least:.2f} times the "
        f"{figures['shard_bytes'] / GB:.2f} GB of shards and {figures['largest_bytes'] / GB:.2f} GB of the largest "
        f"tensor; {figures['start_bytes'] / GB:.2f} GB before it began",
    ]
    if "export_s" in figures:
        peak = figures["export_peak_bytes"] / GB
        lines.append(f"export     {figures['export_s']:.1f} s in bfloat16, {peak:.2f} GB at the peak")
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main)
