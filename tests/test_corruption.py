"""Silent data corruption: a flipped bit of one device is found and named, wherever it is, and nothing else is."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import run_values, steps_in

import checksums
import corruption
import placement
import sharding
import train
from benchmarks import corruption as benchmark
from config import Config
from flags import from_preset
from hardware import parse_topology
from predicted.step import predict
from predicted.workload import run_of

SPECS = {"w": P("fsdp"), "scale": P(), "count": P(), "ok": P(), "table": P(("data", "fsdp"))}


def make_state() -> dict:
    """Arrays on four devices: `w` has two replicas, `table` one, all else four."""
    mesh = sharding.make_mesh(placement.parse_mesh("data:2,fsdp:2"), jax.devices()[:4])
    rng = np.random.default_rng(0)
    arrays = dict(
        w=np.float32(rng.standard_normal((8, 6))), scale=jnp.bfloat16(rng.standard_normal(5)), count=np.int32(7)
    ) | dict(ok=np.array([True, False]), table=np.float32([np.nan, -0.0, 0.0, np.inf]))
    return {name: jax.device_put(a, NamedSharding(mesh, SPECS[name])) for name, a in arrays.items()}


def flipped(array: jax.Array, device: int, element: int = 0, bit: int = 0) -> jax.Array:
    """The array with one bit changed in the shard of one device."""
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    content = shards[device].reshape(-1).view(np.uint8)
    content[element * array.dtype.itemsize + bit // 8] ^= 1 << bit % 8
    placed = [jax.device_put(data, shard.device) for data, shard in zip(shards, array.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def step_fn(state, batch):
    """A step that moves every floating-point array, and donates nothing."""
    moved = {name: a + batch if jnp.issubdtype(a.dtype, jnp.floating) else a for name, a in state.items()}
    return moved, {"loss": jnp.sum(state["w"])}


def test_checksums_of_devices_are_equal_where_the_bits_are():
    state = make_state()
    sums = checksums.of_devices(state)
    assert list(sums) == sorted(SPECS) and all(each.shape == (4,) for each in sums.values())
    assert [len(set(sums[name].tolist())) for name in ("scale", "count", "ok", "w", "table")] == [1, 1, 1, 2, 4]
    assert sums["w"].tolist()[:2] == sums["w"].tolist()[2:]
    total = checksums.checksums(state)
    assert sum(sums["w"][:2].tolist()) % 2**32 == total["w"] and sums["count"][0] == total["count"]
    corruption.check_replicas(state, 1)


@pytest.mark.parametrize(
    "name, device, element, bit, where",
    [
        ("scale", 2, 4, 15, "scale on device 2 of process 0"),
        ("scale", 0, 0, 0, "scale on device 0 of process 0"),
        ("count", 3, 0, 31, "count on device 3 of process 0"),
        ("ok", 1, 1, 0, "ok on device 1 of process 0"),
        ("w", 3, 23, 7, "w on device 1 of process 0 and device 3 of process 0"),  # two replicas: one of them
    ],
)
def test_a_flipped_bit_of_a_replica_is_named(name, device, element, bit, where):
    state = make_state()
    state[name] = flipped(state[name], device, element, bit)
    said = f"after step 5 devices that should hold the same bits do not: {where}; this is silent data corruption, and"
    with pytest.raises(corruption.CorruptionError, match=re.escape(said)):
        corruption.check_replicas(state, 5)


def test_what_has_no_replica_is_not_judged():
    state = make_state()
    corruption.check_replicas(state | {"table": flipped(state["table"], 2, 0, 3)}, 1)


def test_a_step_with_the_same_bits_twice_is_the_step():
    """NaN and both zeros are equal to themselves."""
    state, batch = make_state(), jnp.float32(0.5)
    (again, metrics), (expected, _) = corruption.checked_step(step_fn, state, batch, 1), step_fn(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), again, expected)
    assert float(metrics["loss"]) == float(jnp.sum(state["w"]))
    assert not any(counts.any() for counts in corruption.differing(state, make_state()).values())
    zeros = jax.device_put(np.float32([np.nan, 0.0, 0.0, np.inf]), state["table"].sharding)
    assert corruption.differing(state["table"], zeros)[""].tolist() == [0, 1, 0, 0]  # 0 is not -0


@pytest.mark.parametrize("call", [0, 1])
def test_a_device_that_computes_otherwise_once_is_named(call):
    """In the first or the second run of the step, also where no other device holds the same part."""
    calls = []

    def unsound(state, batch):
        state, metrics = step_fn(state, batch)
        calls.append(0)
        if len(calls) == call + 1:
            state = state | {"table": flipped(state["table"], 2, 0, 20)}
        return state, metrics

    said = "step 8 was run twice .* and gave other bits: 1 elements of 0.table on device 2 of process 0; this is silent"
    with pytest.raises(corruption.CorruptionError, match=said):
        corruption.checked_step(unsound, make_state(), jnp.float32(0.5), 8)


def test_many_arrays_and_devices_are_counted():
    state = make_state()
    other = state | {name: flipped(state[name], 1) for name in ("w", "scale")}
    counts = corruption.differing({"state": state}, {"state": other})
    text = corruption._described(counts, corruption._mesh_of(state), "elements")
    assert text == "1 elements of state.scale on device 1 of process 0, and 1 more arrays"
    everywhere = {"a": np.array([2, 3, 0, 4]), "b": np.array([1, 1, 1, 1])}
    text = corruption._described(everywhere, corruption._mesh_of(state), "elements")
    assert text.startswith("9 elements of a on device 0 of process 0 and device 1 of process 0 and device 3 ")


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    yield from run_values(tmp_path_factory.mktemp("values"))


@pytest.mark.slow
def test_a_run_stops_before_it_saves(values, tmp_path, monkeypatch):
    """Before the save of a step that is not checked, too. Those that are checked are in benchmarks/drills.py."""
    make, calls = train.compile_steps, []

    def unsound_steps(configs, mesh, options):
        programs, seconds = make(configs, mesh, options)

        def run(state, batch):
            calls.append(int(state.step))
            state, metrics = programs[8](state, batch)
            if calls[-1] == 3 and calls.count(3) == 1:
                norm = flipped(state.params.norm, 5)
                state = dataclasses.replace(state, params=dataclasses.replace(state.params, norm=norm))
            return state, metrics

        return {8: run}, seconds

    monkeypatch.setattr(train, "compile_steps", unsound_steps)
    flags = dict(num_layers=1, mesh="data:8", steps=6, save_every=4, check_every=50, checkpoint_dir=str(tmp_path))
    with pytest.raises(corruption.CorruptionError, match=r"after step 4 .*params.norm on device 5 of process 0"):
        train.run(Config(**values | flags))
    assert steps_in(tmp_path) == [] and calls[-1] == 3


def test_the_roofline_has_the_copy_and_the_repeated_step():
    plain, checked = (
        predict(run_of(Config(mesh="fsdp:8", check_every=every), *parse_topology("tpu7x:2x2x1"))) for every in (0, 10)
    )
    assert checked.memory["copy of the state"] == plain.memory["weights"] + plain.memory["optimizer"]
    assert 1.1 * plain.step_s < checked.step_s < 1.2 * plain.step_s and "copy of the state" not in plain.memory


@pytest.mark.slow
def test_what_a_check_adds_is_compiled_without_more_memory_than_two_states(full_effort):
    wide = dict(model_dim=1024, ff_dim=4096, vocab_size=32_768, num_layers=1)
    config = from_preset("tiny", mesh="data:2,fsdp:4", compilation_cache="", **wide)
    (_, _, _, state_bytes), *programs = benchmark.rows(config, "tpu7x:2x2x1")
    for (_, predicted_s, compiled_s, peak), states in zip(programs, (2, 2, 1), strict=True):
        assert 0.8 * predicted_s < compiled_s < 10 * predicted_s  # part of so small a state is in VMEM
        assert states * state_bytes < peak < 1.05 * states * state_bytes
