"""Tests the memory that simulated devices need at least against the memory of the machine."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import machine
import placement
import processes
import sharding
import train
from config import Config
from flags import from_preset

SIZES = dict(num_layers=4, model_dim=64, ff_dim=128, num_heads=8, num_kv_heads=4, head_dim=8, seq_len=64, batch=16)


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("data:2,fsdp:2,tensor:2", {}),
        ("data:2,fsdp:4", dict(shard_update=True)),
        ("pipe:2,fsdp:2,context:2", dict(microbatches=2, optimizer="sgd", weight_decay=0.1)),
        ("fsdp:2,expert:4", dict(num_experts=8, experts_per_token=2, expert_dim=32, mu_dtype="bfloat16")),
    ],
)
def test_the_counted_state_equals_the_shards(mesh, more):
    """Weights, optimizer slots and gradients of all devices are counted as the state of a run is sharded."""
    config = Config(**SIZES | more, mesh=mesh)
    mesh = sharding.make_mesh(placement.parse_mesh(mesh))
    state = jax.eval_shape(partial(train.init_state, config=config), jax.random.key(0))
    layouts = train.state_shardings(config, mesh)
    nbytes = lambda array, layout: 8 * math.prod(layout.shard_shape(array.shape)) * array.dtype.itemsize
    bytes_of = lambda field: sum(jax.tree.leaves(jax.tree.map(nbytes, getattr(state, field), getattr(layouts, field))))
    tokens = config.batch * config.seq_len
    inputs = 4 * config.num_layers * config.model_dim * tokens / config.microbatches
    expected = 2 * bytes_of("params") + bytes_of("opt_state") + inputs + 20 * tokens
    assert machine.needed_bytes(config, dict(mesh.shape)) == pytest.approx(expected, rel=0.02)


def test_a_run_that_fits_is_accepted_and_one_byte_more_refused(monkeypatch):
    config = Config(**SIZES)
    sizes = processes.simulated_sizes(config)
    needed = machine.needed_bytes(config, sizes)
    monkeypatch.setattr(machine, "available_bytes", lambda: needed)
    machine.check(config, sizes)
    monkeypatch.setattr(machine, "available_bytes", lambda: needed - 1)
    with pytest.raises(ValueError, match=r"on 8 simulated devices needs 0.0 GiB at least"):
        machine.check(config, sizes)


def test_a_model_that_is_too_large_is_refused_before_devices_are_made(monkeypatch):
    monkeypatch.setattr(processes, "start", lambda config: pytest.fail("devices were asked for"))
    monkeypatch.setattr(machine, "available_bytes", lambda: 64 * 2**30)
    with pytest.raises(ValueError, match=r"preset=llama3.1-8b .* needs 375.7 GiB at least, and this machine has 64.0"):
        train.run(from_preset("llama3.1-8b"))
    with pytest.raises(ValueError, match=r"model_dim=192 must be a multiple of tensor.fsdp=999999"):
        train.run(Config(mesh="fsdp:999999"))


def test_a_star_takes_about_eight_simulated_devices():
    numbers = {mesh: processes.num_simulated(mesh) for mesh in ("fsdp:*", "data:3,fsdp:*", "data:16,fsdp:*", "fsdp:2")}
    assert [*numbers.values()] == [8, 6, 16, 2]


def test_memory_is_the_available_and_not_the_total(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable: 8 kB\nSwapTotal: 32 kB\nSwapFree: 2 kB\n")
    monkeypatch.setattr(machine, "Path", {"/proc/meminfo": meminfo}.get)
    assert machine._free_bytes() == (8 + 2) * 1024


def test_memory_is_limited_by_the_system_or_its_container(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_CGROUPS", (str(tmp_path / "memory.max"),))
    everything = machine.available_bytes()
    assert 2**26 < everything < 2**50
    monkeypatch.setattr(machine, "_free_bytes", lambda: 0)  # as on macOS
    assert machine.available_bytes() >= 2**26
    for text, expected in (("max\n", machine.available_bytes()), ("12345678\n", 12345678)):
        Path(tmp_path / "memory.max").write_text(text)
        assert machine.available_bytes() == expected


def test_offload_is_refused_without_host_memory():
    memory = lambda kind: SimpleNamespace(kind=kind)
    device = SimpleNamespace(device_kind="an old TPU", addressable_memories=lambda: [memory("device")])
    mesh = SimpleNamespace(local_devices=[device])
    with pytest.raises(ValueError, match=r"query_proj, value_proj to pinned_host, and an old TPU has .* device only"):
        machine.check_host_memory(Config(remat="qkv_proj_offloaded"), mesh)
    custom = Config(remat="custom", remat_tensors="mlp_up:offload")
    with pytest.raises(ValueError, match="remat=custom offloads mlp_up to"):
        machine.check_host_memory(custom, mesh)
    with pytest.raises(ValueError, match="offload_optimizer puts the optimizer state to pinned_host"):
        machine.check_host_memory(Config(offload_optimizer=True), mesh)
    machine.check_host_memory(Config(remat="minimal"), mesh)  # needs none
    machine.check_host_memory(custom, sharding.make_mesh(placement.parse_mesh("fsdp:8")))
