"""Engines, overlap and time of collectives.py on TPU7x, read from programs that are compiled for it without a TPU.

    python benchmarks/collectives.py [--topology=tpu7x:4x4x4] [--json]

It compares XLA's own collectives with our rings, on a ring of 4 devices along one axis of the torus. The cases are an
all-gather and a reduce-scatter of 64 MiB alone, and the MLP of a tensor-parallel block, forward, and forward with
backward. There matmuls can hide the messages. The MLP is Llama 3.1 8B's (D = 4096, F = 14336), with 8192 tokens in
bfloat16.

The compiled program is a schedule: its order is the order of execution. compiled/schedule.py walks it with its rates:
the compiler's own estimates of cycles at 2.2 GHz, links at 89 GB/s one way. A message is exposed if the TensorCore has
to wait for it. So the program is compiled, and its times are predicted from it; no TPU has run it.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import command
import compiler_flags

compiler_flags.without_tpu()

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collectives
from compiled import hlo, schedule

B, T, D, F = 1, 8192, 4096, 14336


def make_mesh(topology: str, size: int = 4) -> Mesh:
    """A mesh of axes ("rest", "x"). On 4x4x4 x is an axis of the torus, on 2x2x1 two chips and their cores."""
    wrap = {"wrap": (True, True, True)} if topology.endswith("4x4x4") else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **wrap).devices
    devices = np.array(sorted(devices, key=lambda device: device.id))
    if topology.endswith("4x4x4"):  # ids count the cores first: make the axis after them the last one
        devices = devices.reshape(-1, 4, 2).swapaxes(1, 2)
    return Mesh(devices.reshape(-1, size), ("rest", "x"), axis_types=(AxisType.Auto,) * 2)


def mlp(x_btd, w_Df, u_Df, w_fD, algorithm):
    """Column-parallel, then row-parallel matmuls: gathered and scattered at once ("xla") or by blocks (rings)."""
    gate_btf, up_btf = collectives.all_gather_matmul(x_btd, (w_Df, u_Df), "x", dim=2, algorithm=algorithm)
    return collectives.matmul_reduce_scatter(jax.nn.silu(gate_btf) * up_btf, w_fD, "x", dim=2, algorithm=algorithm)


def mlp_and_gradients(x_btd, w_Df, u_Df, w_fD, algorithm):
    y_btd, backward = jax.vjp(partial(mlp, algorithm=algorithm), x_btd, w_Df, u_Df, w_fD)
    return backward(y_btd)


MLP = {(B, T, D): P(None, None, "x"), (D, F): P(None, "x"), (F, D): P("x", None)}
CASES = {  # name: (per-device code, shapes of the global arrays)
    "all-gather": (partial(collectives.all_gather, axis="x"), [(T, D)]),
    "reduce-scatter": (partial(collectives.reduce_scatter, axis="x"), [(4 * T, D)]),
    "MLP forward": (mlp, [(B, T, D), (D, F), (D, F), (F, D)]),
    "MLP forward and backward": (mlp_and_gradients, [(B, T, D), (D, F), (D, F), (F, D)]),
}


def compiled(case: str, algorithm: str, topology: str) -> str:
    """The scheduled program of a case, as text."""
    function, shapes = CASES[case]
    mesh = make_mesh(topology)
    specs = tuple(MLP.get(shape, P("x")) for shape in shapes)
    args = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p))
        for s, p in zip(shapes, specs, strict=True)
    ]
    out_specs = specs if case == "MLP forward and backward" else specs[0]
    per_device = jax.shard_map(partial(function, algorithm=algorithm), mesh=mesh, in_specs=specs, out_specs=out_specs)
    return jax.jit(per_device).lower(*args).compile().as_text()


def places(topology: str) -> list[tuple[int, ...]]:
    """(slice, x, y, z) of the chip that each device of the mesh is on."""
    return [(0, *device.coords) for device in make_mesh(topology).devices.flat]


def read(program: str, chips: Sequence[tuple[int, ...]] = ()) -> dict:
    """The messages of the scheduled program, the engine of each, and how long the TensorCore waits for them."""
    breakdown = schedule.walk(hlo.parse(program), chips=chips)
    messages, engines = Counter(), {"SparseCore": "the SparseCores", "TensorCore": "the TensorCore's DMA"}
    for message in breakdown.collectives:
        where = "the TensorCore, which waits" if message.synchronous else engines[message.engine]
        messages[f"{message.kind} on {where}"] += message.count
    return {
        "messages": dict(messages),
        "exposed": sum(message.count for message in breakdown.collectives if message.exposed_s > 0),
        "tensorcore_s": math.fsum(op.seconds for op in breakdown.ops),
        "exposed_s": breakdown.exposed_s,
        "total_s": breakdown.seconds,
    }


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("--topology", choices=["tpu7x:2x2x1", "tpu7x:4x4x4"], help="default: both")
    parser.add_argument("--json", action="store_true", help="one object for each line of the table")
    arguments = command.arguments(parser)
    rows = []
    if not arguments.json:
        print("| topology | case | by | messages | exposed | TensorCore ms | exposed ms | total ms |")
        print("|---|---|---|---|---|---|---|---|")
    for topology in [arguments.topology] if arguments.topology else ["tpu7x:2x2x1", "tpu7x:4x4x4"]:
        for case in CASES:
            for algorithm in collectives.ALGORITHMS:
                row = read(compiled(case, algorithm, topology), places(topology))
                rows.append({"topology": topology, "case": case, "algorithm": algorithm} | row)
                messages = ", ".join(f"{count} {what}" for what, count in row["messages"].items())
                times = " | ".join(f"{1e3 * row[key]:.3f}" for key in ("tensorcore_s", "exposed_s", "total_s"))
                if not arguments.json:
                    print(
                        f"| {topology} | {case} | {algorithm} | {messages} | {row['exposed']} | {times} |", flush=True
                    )
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    command.run(main)
