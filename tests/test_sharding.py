"""Tests the mesh: the order of its devices, and the arithmetic of layouts."""

import functools
import itertools
import random
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hardware
import placement
import roofline
import sharding
from hardware import CHIPS
from placement import BATCH_AXES, MESH_AXES


def sizes_of(text: str = "") -> dict[str, int]:
    return placement.parse_mesh(text)


# -- the order of the devices


@functools.cache
def tpu7x(**options) -> list:
    """Returns 16 devices a slice: 2x2x2 chips of two cores."""
    return topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x2", **options).devices


def shuffled(devices) -> list:
    return random.Random(0).sample(list(devices), len(devices))


def places_of_chips(mesh) -> list:
    """Returns for each chip the positions of its cores 0 and 1 in the mesh."""
    places = {}
    for place, device in np.ndenumerate(mesh.devices):
        chip = getattr(device, "slice_index", 0), *device.coords
        places.setdefault(chip, {})[device.core_on_chip] = np.array(place)
    assert all(sorted(cores) == [0, 1] for cores in places.values())
    return [(cores[0], cores[1]) for cores in places.values()]


def test_default_devices_in_the_order_of_their_ids():
    mesh = sharding.make_mesh(sizes_of("data:2,fsdp:*,tensor:2"))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == sizes_of("data:2,fsdp:2,tensor:2")
    assert [device.id for device in mesh.devices.flat] == list(range(8))


def test_a_core_axis_has_neighbouring_ids():
    """The order in which the devices are given does not matter."""
    make = lambda text, **core: sharding.make_mesh(sizes_of(text), shuffled(jax.devices()), **core)
    ids = lambda mesh: np.vectorize(lambda device: device.id)(mesh.devices).squeeze().tolist()
    assert ids(make("data:2,fsdp:4")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids(make("data:2,fsdp:4", core_axis="data")) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ids(make("data:4,fsdp:2", core_axis="data")) == [[0, 2], [1, 3], [4, 6], [5, 7]]


MESHES = ["data:2,fsdp:4,tensor:2", "data:4,fsdp:2,tensor:2", "fsdp:*", "fsdp:2,context:2,tensor:4", "pipe:2,expert:8"]


@pytest.mark.parametrize(
    "text, core_axis",
    [(text, axis) for text in MESHES for axis in MESH_AXES if sizes_of(text)[axis] != 1],
)
def test_the_cores_of_a_chip_are_neighbours_along_the_core_axis(text, core_axis):
    mesh = sharding.make_mesh(sizes_of(text), shuffled(tpu7x()), core_axis)
    chips = places_of_chips(mesh)
    assert len(chips) == 8
    along = np.eye(len(MESH_AXES), dtype=int)[MESH_AXES.index(core_axis)]
    for first, second in chips:
        assert (second - first).tolist() == along.tolist()
        assert first[MESH_AXES.index(core_axis)] % 2 == 0


@pytest.mark.parametrize("text", MESHES)
def test_the_default_core_axis_is_the_last_one(text):
    last = next(axis for axis in reversed(MESH_AXES) if sizes_of(text)[axis] != 1)
    assert sharding.make_mesh(sizes_of(text), tpu7x()) == sharding.make_mesh(sizes_of(text), tpu7x(), last)


@pytest.mark.parametrize(
    "text, core_axis",
    [
        ("data:2,fsdp:8,tensor:2", ""),
        ("data:2,fsdp:8,tensor:2", "fsdp"),
        ("data:4,fsdp:4,tensor:2", "data"),
        ("data:8,fsdp:4", "fsdp"),
        ("pipe:2,fsdp:*", ""),
    ],
)
def test_slices_are_outermost(text, core_axis):
    """The first axis larger than 1 spans the slices: its lower half is one slice, its upper half the other."""
    mesh = sharding.make_mesh(sizes_of(text), shuffled(tpu7x(num_slices=2)), core_axis)
    outermost = next(axis for axis in MESH_AXES if mesh.shape[axis] > 1)
    for place, device in np.ndenumerate(mesh.devices):
        at = place[MESH_AXES.index(outermost)]
        assert device.slice_index == at // (mesh.shape[outermost] // 2)
    axis = MESH_AXES.index(placement.core_axis_of(dict(mesh.shape), core_axis))
    assert all((second - first)[axis] == 1 and sum(second - first) == 1 for first, second in places_of_chips(mesh))


def test_slices_are_ordered_by_their_numbers_and_not_by_ids(monkeypatch):
    """The second of two slices has the lower ids, and is still the second half of `data`."""
    devices = [SimpleNamespace(id=(number + 4) % 8, slice_index=number // 4) for number in range(8)]
    monkeypatch.setattr(sharding, "Mesh", lambda grid, *_, **__: grid)
    grid = sharding.make_mesh(sizes_of("data:2,fsdp:4"), shuffled(devices))
    assert [[device.id for device in half.flat] for half in grid] == [[4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("text", ["fsdp:*", "data:3,fsdp:*", "expert:2,fsdp:16"])
def test_only_replicas_and_stages_cross_slices(text):
    devices = tpu7x(num_slices=2)[: 24 if "3" in text else 32]
    with pytest.raises(ValueError, match=r"must be a multiple of the 2 slices, or part of .*fsdp:.* would cross them"):
        sharding.make_mesh(sizes_of(text), devices)


def test_predictions_refuse_a_mesh_with_the_same_error():
    with pytest.raises(ValueError) as refused:
        sharding.make_mesh(sizes_of("fsdp:32"), tpu7x(num_slices=2))
    for command in ("step", "bounds"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(refused.value))}$"):
            roofline.main([command, "--topology=tpu7x:2x2x2", "--num_slices=2", "--mesh=fsdp:32", "--batch=32"])


def test_axes_run_along_the_torus():
    """Inside a slice the last axis is on the cores, the one before it along x, then y, then z."""
    mesh = sharding.make_mesh(sizes_of("data:2,fsdp:2,context:2,tensor:2"), shuffled(tpu7x()))
    for place, device in np.ndenumerate(mesh.devices.squeeze()):
        assert place == (*reversed(device.coords), device.core_on_chip)


def test_odd_axes_keep_the_order_of_the_ids():
    mesh = sharding.make_mesh(sizes_of("tensor:3"), jax.devices()[2::-1])
    assert [device.id for device in mesh.devices.flat] == list(range(3))


def test_with_an_odd_last_axis_an_even_one_is_on_the_cores():
    mesh = sharding.make_mesh(sizes_of("fsdp:2,tensor:3"), shuffled(jax.devices()[:6]))
    assert [[device.id for device in row] for row in mesh.devices.reshape(2, 3)] == [[0, 2, 4], [1, 3, 5]]


def test_an_axis_over_the_slices_cannot_be_on_the_cores():
    with pytest.raises(ValueError, match="core_axis='data': its 2 places are the 2 slices"):
        sharding.make_mesh(sizes_of("data:2,fsdp:16"), tpu7x(num_slices=2), "data")


def test_make_mesh_refuses_a_mesh_that_does_not_fit():
    with pytest.raises(ValueError, match="mesh fsdp:16 is for 16 devices and there are 8"):
        sharding.make_mesh(sizes_of("fsdp:16"))


@pytest.mark.parametrize(
    "text, core_axis, expected",
    [
        ("fsdp:*", "", "16 x TPU7x: fsdp 16; fsdp is on the two cores of a chip"),
        (
            "data:2,fsdp:4,tensor:2",
            "",
            "16 x TPU7x: data 2, fsdp 4, tensor 2; tensor is on the two cores of a chip, not data",
        ),
        (
            "data:2,fsdp:2,context:2,tensor:2",
            "fsdp",
            "16 x TPU7x: data 2, fsdp 2, context 2, tensor 2; fsdp is on the two cores of a chip, "
            "not data or context or tensor",
        ),
    ],
)
def test_describe_mesh_on_tpu7x(text, core_axis, expected):
    assert sharding.describe_mesh(sharding.make_mesh(sizes_of(text), tpu7x(), core_axis), core_axis) == expected


def test_describe_mesh_elsewhere():
    assert sharding.describe_mesh(sharding.make_mesh(sizes_of("data:2,fsdp:4"))) == "8 x cpu: data 2, fsdp 4"
    assert sharding.describe_mesh(sharding.make_mesh(sizes_of(), jax.devices()[:1])) == "1 x cpu: one device"


# -- layouts


SPECS = [
    (P(), (), {}),
    (P(None, "fsdp", "tensor"), ("fsdp", "tensor"), {"fsdp": 1, "tensor": 2}),
    (P(("tensor", "fsdp"), None), ("tensor", "fsdp"), {"fsdp": 0, "tensor": 0}),
    (P(None, ("tensor", "fsdp", "data")), ("tensor", "fsdp", "data"), {"data": 1, "fsdp": 1, "tensor": 1}),
    (sharding.BATCH_SPEC, (*BATCH_AXES, "context"), dict.fromkeys(BATCH_AXES, 0) | {"context": 1}),
]


@pytest.mark.parametrize("spec, axes, dims", SPECS)
def test_axes_of_and_dim_of(spec, axes, dims):
    assert sharding.axes_of(spec) == axes
    assert {axis: sharding.dim_of(spec, axis) for axis in MESH_AXES} == dict.fromkeys(MESH_AXES) | dims


@pytest.mark.parametrize(
    "spec, expected",
    [
        (P(None, "fsdp", "tensor"), P(None, ("fsdp", "data"), "tensor")),
        (P(("tensor", "fsdp")), P(("tensor", "fsdp", "data"))),
        (P("tensor", None), P("tensor", None)),
        (P(), P()),
    ],
)
def test_add_axis(spec, expected):
    assert sharding.add_axis(spec, "data", beside="fsdp") == expected


def test_an_added_axis_is_the_minor_one():
    """A shard that is split further stays inside the shard that it was before."""
    mesh = sharding.make_mesh(sizes_of("data:2,fsdp:4"))
    spec = P("fsdp")
    rows = lambda spec: NamedSharding(mesh, spec).devices_indices_map((16,))
    before, after = rows(spec), rows(sharding.add_axis(spec, "data", beside="fsdp"))
    for device in mesh.devices.flat:
        (outer,), (inner,) = before[device], after[device]
        assert outer.stop - outer.start == 4 and inner.stop - inner.start == 2
        assert outer.start <= inner.start and inner.stop <= outer.stop
    starts = [index.start or 0 for (index,) in after.values()]
    assert sorted(starts) == list(range(0, 16, 2))


def test_constants():
    assert set(placement.BATCH_AXES) <= set(MESH_AXES)
    assert set(sharding.LOSS_AXES) == set(MESH_AXES) - {"tensor"}
    for first, second in itertools.pairwise(placement.BATCH_AXES):
        assert MESH_AXES.index(first) < MESH_AXES.index(second)


# -- the slice of a set of devices


@pytest.mark.parametrize("topology, num_slices", [("2x2x1", 1), ("2x2x4", 1), ("4x4x8", 1), ("2x2x4", 2)])
def test_slice_of(topology, num_slices):
    options = dict(num_slices=num_slices) if num_slices > 1 else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=f"tpu7x:{topology}", **options).devices
    mesh = sharding.make_mesh(placement.parse_mesh("data:*,tensor:2"), shuffled(devices))
    chips = tuple(map(int, topology.split("x")))
    assert hardware.slice_of(mesh.devices.flat) == (CHIPS["tpu7x"], chips, num_slices)
    assert hardware.slice_of(jax.devices()) is None
