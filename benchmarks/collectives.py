"""What TPU7x would make of collectives.py: engines, overlap and time, read from programs compiled for it, without one.

    python benchmarks/collectives.py [--topology=tpu7x:4x4x4] [--json]

Two things on a ring of 4 devices along one axis of the torus, by XLA's own collectives and by our rings: an all-gather
and a reduce-scatter of 64 MiB alone, and the MLP of a tensor-parallel block (Llama 3.1 8B: D = 4096, F = 14336, 8192
tokens, bfloat16), forward, and forward with backward, where matmuls can hide the messages.

The compiled program is a schedule: its order is the order of execution. TensorCore time is the compiler's own estimate
of cycles at 2.2 GHz. A message occupies its link for its bytes at 90e9 bytes/s (of 100e9 one way; Google Cloud's
microbenchmarks measure 89% of the peak), a collective on the SparseCores as many links as the rings that its strategy
lists. A message is exposed if the TensorCore has to wait where it is needed. So this is compiled, and its times are
predicted from what is compiled; no TPU has run it.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import aot

aot.without_tpu()

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collectives

CLOCK_HZ = 2.2e9  # 2.2e9 * 524,288 FLOP a cycle is the published peak of a core
LINK_BYTES_PER_S = 90e9
ITEM_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4}
B, T, D, F = 1, 8192, 4096, 14336
MESSAGES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def make_mesh(topology: str, size: int = 4) -> Mesh:
    """("rest", "x"): x along an axis of the torus on 4x4x4, on 2x2x1 over two chips and their cores."""
    wrap = {"wrap": (True, True, True)} if topology.endswith("4x4x4") else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **wrap).devices
    devices = np.array(sorted(devices, key=lambda device: device.id))
    if topology.endswith("4x4x4"):  # ids count the cores first: make the axis after them the last one
        devices = devices.reshape(-1, 4, 2).swapaxes(1, 2)
    return Mesh(devices.reshape(-1, size), ("rest", "x"), axis_types=(AxisType.Auto,) * 2)


def mlp(x_btd, w_Df, u_Df, w_fD, algorithm):
    """column-parallel, then row-parallel: with "xla" gather, multiply, scatter; with a ring a block at a time."""
    gate_btf, up_btf = collectives.all_gather_matmul(x_btd, (w_Df, u_Df), "x", dim=2, algorithm=algorithm)
    return collectives.matmul_reduce_scatter(jax.nn.silu(gate_btf) * up_btf, w_fD, "x", dim=2, algorithm=algorithm)


def mlp_and_gradients(x_btd, w_Df, u_Df, w_fD, algorithm):
    y_btd, backward = jax.vjp(partial(mlp, algorithm=algorithm), x_btd, w_Df, u_Df, w_fD)
    return backward(y_btd)


MLP = {(B, T, D): P(None, None, "x"), (D, F): P(None, "x"), (F, D): P("x", None)}
CASES = {  # name: (per-device code, shapes of the whole arrays)
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


def walk(program: str) -> dict:
    """The entry computation in its order, on a clock.

    Raises:
      ValueError: a collective, or a loop, that this does not understand.
    """
    computations = {}
    for line in program.splitlines():
        if start := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            current = computations.setdefault("ENTRY" if line.startswith("ENTRY") else start[1], [])
        elif line.startswith(" "):
            current.append(line)
    now_s = tensorcore_s = exposed_s = 0.0
    free_at, pending, found, exposed = Counter(), {}, Counter(), 0
    for line in computations["ENTRY"]:
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        name = name.removeprefix("%")
        operation = re.search(r"(?:^|[\s)}])([a-z][a-z0-9-]*)\(", rest)[1]
        if operation == "while" or operation in MESSAGES:
            raise ValueError(f"{name}: a {operation} that is not asynchronous, or a loop, is not understood here")
        if operation == "collective-permute-start":
            pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", rest)
            link, seconds = f"links {pairs[1]} to {pairs[2]}", _bytes(rest) / LINK_BYTES_PER_S
            found["collective-permute on the TensorCore's DMA"] += 1
        elif operation == "call-start" and (inner := _collective(computations, rest)):
            kind, seconds = inner
            if 'async_execution_thread="sparsecore"' not in rest:
                raise ValueError(f"{name}: a {kind} that does not run on the SparseCores is not understood here")
            link = "sparsecore"
            found[f"{kind} on the SparseCores"] += 1
        elif operation in ("collective-permute-done", "call-done"):
            done_s = pending.pop(re.search(r"\(.*?%([\w.-]+)\)", rest)[1], now_s)
            exposed += done_s > now_s
            exposed_s += max(done_s - now_s, 0.0)
            now_s = max(done_s, now_s)
            continue
        else:
            cycles = re.search(r'"estimated_cycles":"(\d+)"', rest)
            spent_s = int(cycles[1]) / CLOCK_HZ if cycles else 0.0
            tensorcore_s, now_s = tensorcore_s + spent_s, now_s + spent_s
            continue
        free_at[link] = pending[name] = max(now_s, free_at[link]) + seconds
    return {
        "messages": dict(found),
        "exposed": exposed,
        "tensorcore_s": tensorcore_s,
        "exposed_s": exposed_s,
        "total_s": now_s,
    }


def _bytes(rest: str) -> int:
    """Bytes of the first array in an instruction's type."""
    dtype, dims = re.search(r"(\w+)\[([\d,]*)\]", rest).groups()
    return ITEM_BYTES[dtype] * math.prod(int(dim) for dim in dims.split(",") if dim)


def _collective(computations: dict[str, list[str]], rest: str) -> tuple[str, float] | None:
    """(kind, seconds) of the collective that an asynchronous call makes, None if it makes none."""
    called = re.search(r"(?:to_apply|calls)=%([\w.-]+)", rest)
    for line in computations.get(called[1], []) if called else []:
        if kind := re.search(rf" ({'|'.join(MESSAGES)})\(", line):
            result = line.partition(" = ")[2]
            rings = max(line.count('"phase_rings"'), 1)
            moved = _bytes(result) * (4 - 1) / (1 if kind[1] == "reduce-scatter" else 4)
            moved *= 2 if kind[1] == "all-reduce" else 1
            return kind[1], moved / (rings * LINK_BYTES_PER_S)
        if inner := _collective(computations, line):
            return inner
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=["tpu7x:2x2x1", "tpu7x:4x4x4"], help="default: both")
    parser.add_argument("--json", action="store_true", help="one object for each line of the table")
    arguments = parser.parse_args()
    rows = []
    if not arguments.json:
        print("| topology | case | by | messages | exposed | TensorCore ms | exposed ms | total ms |")
        print("|---|---|---|---|---|---|---|---|")
    for topology in [arguments.topology] if arguments.topology else ["tpu7x:2x2x1", "tpu7x:4x4x4"]:
        for case in CASES:
            for algorithm in collectives.ALGORITHMS:
                row = walk(compiled(case, algorithm, topology))
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
    main()
