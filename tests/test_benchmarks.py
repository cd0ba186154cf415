"""The compiled figures of benchmarks/collectives.py: what TPU7x's compiler makes of the rings, and how it is read."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collectives as rings
from benchmarks import collectives as benchmark
from collectives import ALGORITHMS

RINGS = ALGORITHMS[1:]
PERMUTES, SPARSECORES = "collective-permute on the TensorCore's DMA", " on the SparseCores"


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "tpu7x:4x4x4"])
@pytest.mark.parametrize("case", ["all-gather", "reduce-scatter"])
def test_rings_are_permutes_and_xla_runs_on_the_sparsecores(case, topology):
    found = {name: benchmark.walk(benchmark.compiled(case, name, topology)) for name in ALGORITHMS}
    assert found["xla"]["messages"] == {f"{case}{SPARSECORES}": 1}
    for name in RINGS:
        assert found[name]["messages"] == {PERMUTES: 3}
    shard_s = 8192 * 4096 * 2 / 4 / benchmark.LINK_BYTES_PER_S
    assert found["ring"]["exposed_s"] == pytest.approx(3 * shard_s)  # nothing there to hide behind
    assert found["ring_bidirectional"]["exposed_s"] == pytest.approx(2 * shard_s)
    assert found["xla"]["exposed_s"] == pytest.approx(1.5 * shard_s)  # two rings, each with half


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "tpu7x:4x4x4"])
def test_collective_matmuls_multiply_while_their_messages_travel(topology):
    """Forward and backward are two gathers and two scatters; half of the bytes of the rings and more are hidden."""
    found = {}
    for name in ALGORITHMS:
        program = benchmark.compiled("MLP forward and backward", name, topology)
        found[name] = benchmark.walk(program)
    assert set(found["xla"]["messages"]) == {f"all-gather{SPARSECORES}", f"reduce-scatter{SPARSECORES}"}
    block_s = 8192 * 1024 * 2 / benchmark.LINK_BYTES_PER_S
    for name, hops in zip(RINGS, (3, 2), strict=True):
        assert found[name]["messages"] == {PERMUTES: 12}
        assert found[name]["exposed"] < 12
        assert found[name]["exposed_s"] < 0.5 * 4 * hops * block_s
    assert found["ring_bidirectional"]["exposed_s"] < 0.75 * found["xla"]["exposed_s"]


@pytest.mark.slow
def test_across_slices_goes_only_what_must():
    """Compiled for two slices of 8 devices: the slow network last for a sum, first for a gather, costs an eighth."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1", num_slices=2)
    devices = sorted(topology.devices, key=lambda device: (device.slice_index, device.id))
    mesh = Mesh(np.array(devices).reshape(2, 8), ("slice", "x"), axis_types=(AxisType.Auto,) * 2)
    both = P(("slice", "x"))
    x = jax.ShapeDtypeStruct((16 * 1024, 1024), jnp.float32, sharding=NamedSharding(mesh, both))

    def sent(function) -> tuple[int, int]:
        """(rows sent to the other slice, messages inside) by a device."""
        text = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=both, out_specs=both)).lower(x).compile().as_text()
        assert not re.search(r" (all-gather|all-reduce|reduce-scatter)(-start)?\(", text)
        sends = re.findall(r"= \(f32\[([\d,]+),1024\]\S* .*? send\(", text)
        return sum(math.prod(map(int, rows.split(","))) for rows in sends), text.count(" collective-permute-start(")

    assert sent(lambda x: rings.all_reduce(x, ("x", "slice"))) == (2 * 1024 // 16, 14)
    assert sent(lambda x: rings.all_reduce(x, ("slice", "x"))) == (2 * 1024 // 2, 14)
    assert sent(lambda x: rings.hierarchical_all_gather(x, "x", "slice")) == (1024, 7)
    assert sent(lambda x: rings.all_gather(x, ("slice", "x"))) == (8 * 1024, 7)


# -- reading a schedule


def program(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule m, is_scheduled=true

%called (p: bf16[2,45]) -> bf16[8,45] {{
  ROOT %all-gather.1 = bf16[8,45]{{1,0}} all-gather(%p), backend_config={{"phase_rings":[1],"phase_rings":[2]}}
}}

ENTRY %main (p: bf16[2,45]) -> bf16[2,45] {{
{body}
}}
"""


def permute(number: int, pairs: str = "{0,1},{1,0}") -> str:
    """Of 45 GB: half a second at 90 GB/s."""
    shape = "bf16[225,100000000]{1,0}"
    return (
        f"%collective-permute-start.{number} = ({shape}, {shape}) collective-permute-start(%p), "
        f"source_target_pairs={{{pairs}}}"
    )


def done(number: int) -> str:
    return f"%done.{number} = bf16[2,45]{{1,0}} collective-permute-done(%collective-permute-start.{number})"


def work(seconds: float) -> str:
    cycles = round(seconds * benchmark.CLOCK_HZ)
    return f'%fusion = f32[1]{{0}} fusion(%p), kind=kLoop, backend_config={{"estimated_cycles":"{cycles}"}}'


@pytest.mark.parametrize(
    "lines, exposed, exposed_s, total_s",
    [
        ([permute(1), done(1)], 1, 0.5, 0.5),
        ([permute(1), work(0.2), done(1)], 1, 0.3, 0.5),
        ([permute(1), work(0.7), done(1)], 0, 0.0, 0.7),
        ([work(0.7), permute(1), done(1)], 1, 0.5, 1.2),
        ([permute(1), permute(2), done(1), done(2)], 2, 1.0, 1.0),  # one behind the other on the same link
        ([permute(1), permute(2, "{1,0},{0,1}"), done(1), done(2)], 1, 0.5, 0.5),  # at once, each its own way
        ([permute(1), work(0.4), permute(2), work(0.2), done(1), work(0.1), done(2)], 1, 0.3, 1.0),
    ],
)
def test_a_schedule_is_walked_on_a_clock(lines, exposed, exposed_s, total_s):
    found = benchmark.walk(program(*lines))
    assert found["exposed"] == exposed
    assert (found["exposed_s"], found["total_s"]) == pytest.approx((exposed_s, total_s))


def test_a_collective_on_the_sparsecores_takes_its_rings_at_once():
    call = "%ag = (bf16[2,45], bf16[8,45]) call-start(%p), to_apply=%called"
    on_sparsecores = call + ', async_execution_thread="sparsecore"'
    found = benchmark.walk(program(on_sparsecores, "%agd = bf16[8,45] call-done(%ag)"))
    assert found["messages"] == {f"all-gather{SPARSECORES}": 1}
    assert found["exposed_s"] == pytest.approx(8 * 45 * 2 * 3 / 4 / 2 / benchmark.LINK_BYTES_PER_S)
    with pytest.raises(ValueError, match="does not run on the SparseCores"):
        benchmark.walk(program(call))


@pytest.mark.parametrize("line", ["%w = (s32[]) while(%t), body=%b", "%r = bf16[8,45]{1,0} all-reduce(%p)"])
def test_what_is_not_understood_is_an_error(line):
    with pytest.raises(ValueError, match="not understood"):
        benchmark.walk(program(line))
