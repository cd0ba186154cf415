"""Mesh axes: sizes from flags, the cores of a chip, and the links of an axis, against the devices themselves."""

import functools
import re

import numpy as np
import pytest
from jax.experimental import topologies

import placement
import sharding
from hardware import CHIPS
from placement import MESH_AXES
from predicted import interconnect

TPU7X = CHIPS["tpu7x"]


def sizes_of(text: str = "") -> dict[str, int]:
    return placement.parse_mesh(text)


# -- sizes from flags


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", {}),
        ("fsdp:*", {"fsdp": 0}),
        ("data:2,fsdp:4,tensor:2", {"data": 2, "fsdp": 4, "tensor": 2}),
        ("tensor:2, fsdp:*,", {"fsdp": 0, "tensor": 2}),
        ("pipe:3,expert:16,context:1", {"pipe": 3, "expert": 16}),
    ],
)
def test_parse_mesh(text, expected):
    sizes = sizes_of(text)
    assert list(sizes) == list(MESH_AXES)
    assert sizes == dict.fromkeys(MESH_AXES, 1) | expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("fsdq:2", "there is no axis 'fsdq'; did you mean fsdp?"),
        ("data:2,tensors:2", "there is no axis 'tensors'; did you mean tensor?"),
        ("model:2", "there is no axis 'model'; there are data, pipe, fsdp, fsdp_transpose, expert, context, tensor"),
        (":2", "there is no axis ''; there are data, pipe, fsdp, fsdp_transpose, expert, context, tensor"),
        ("data:2,fsdp:2,data:2", "axis 'data' is named twice"),
        ("data:1,data:2", "axis 'data' is named twice"),
        ("fsdp", "the size of 'fsdp' must be a positive number or *, not ''"),
        ("fsdp:", "the size of 'fsdp' must be a positive number or *, not ''"),
        ("fsdp:0", "the size of 'fsdp' must be a positive number or *, not '0'"),
        ("fsdp:-2", "the size of 'fsdp' must be a positive number or *, not '-2'"),
        ("fsdp:2.0", "the size of 'fsdp' must be a positive number or *, not '2.0'"),
        ("fsdp:**", "the size of 'fsdp' must be a positive number or *, not '**'"),
        ("fsdp:2:2", "the size of 'fsdp' must be a positive number or *, not '2:2'"),
        ("fsdp=2", "there is no axis 'fsdp=2'; did you mean fsdp?"),
        ("data:*,fsdp:*", "only one axis can be *"),
    ],
)
def test_parse_mesh_errors(text, message):
    with pytest.raises(ValueError, match="^" + re.escape(f"mesh={text!r}: {message}") + "$"):
        sizes_of(text)


@pytest.mark.parametrize(
    "text, num_devices, expected",
    [
        ("fsdp:*", 8, {"fsdp": 8}),
        ("data:2,fsdp:*,tensor:2", 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("data:8,fsdp:*", 8, {"data": 8}),
        ("data:2,tensor:4", 8, {"data": 2, "tensor": 4}),
        ("", 1, {}),
    ],
)
def test_fill_mesh(text, num_devices, expected):
    assert placement.fill_mesh(sizes_of(text), num_devices) == dict.fromkeys(MESH_AXES, 1) | expected


@pytest.mark.parametrize(
    "text, num_devices, message",
    [
        ("data:3,fsdp:*", 8, "mesh data:3,fsdp:*: 8 devices are not a multiple of 3; nearest are 6 and 9"),
        ("data:16,fsdp:*", 8, "mesh data:16,fsdp:*: 8 devices are not a multiple of 16; nearest is 16"),
        ("data:2,tensor:2", 8, "mesh data:2,tensor:2 is for 4 devices and there are 8; let one axis be *"),
        ("fsdp:16", 8, "mesh fsdp:16 is for 16 devices and there are 8; let one axis be *"),
        ("", 8, "mesh (all axes 1) is for 1 devices and there are 8; let one axis be *"),
    ],
)
def test_fill_mesh_errors(text, num_devices, message):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        placement.fill_mesh(sizes_of(text), num_devices)


@pytest.mark.parametrize(
    "size, axes, message",
    [
        (6, {"data": 2, "fsdp": 2}, "batch=6 must be a multiple of data*fsdp=4; nearest are 4 and 8"),
        (
            9,
            {"data": 4, "fsdp": 1, "expert": 2},
            "batch=9 must be a multiple of data*fsdp*expert=8; nearest are 8 and 16",
        ),
        (3, {"tensor": 8}, "batch=3 must be a multiple of tensor=8; nearest is 8"),
    ],
)
def test_check_multiple_names_the_nearest(size, axes, message):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        placement.check_multiple("batch", size, axes)


@pytest.mark.parametrize("size, axes", [(8, {"data": 2, "fsdp": 4}), (7, {}), (7, {"data": 1}), (12, {"tensor": 3})])
def test_check_multiple_passes(size, axes):
    placement.check_multiple("batch", size, axes)


# -- the axis on the two cores of a chip


@pytest.mark.parametrize(
    "text, chosen, expected",
    [
        ("data:2,fsdp:4", "", "fsdp"),
        ("data:2,fsdp:4,tensor:2", "", "tensor"),
        ("data:2,fsdp:4,tensor:2", "data", "data"),
        ("data:2,fsdp:6", "fsdp", "fsdp"),
        ("", "", "tensor"),
    ],
)
def test_core_axis(text, chosen, expected):
    assert placement.core_axis_of(sizes_of(text), chosen) == expected


@pytest.mark.parametrize(
    "text, chosen, message",
    [
        (
            "data:2,fsdp:2",
            "data,fsdp",
            "core_axis='data,fsdp': a chip has two cores and one link between them, so only",
        ),
        ("data:2,fsdp:2", "cores", "core_axis='cores' is no mesh axis; there are data, pipe"),
        ("data:2,fsdp:3", "fsdp", "core_axis='fsdp' has size 3; on the two cores of a chip it must be even"),
        ("data:2", "tensor", "core_axis='tensor' has size 1; on the two cores of a chip it must be even"),
    ],
)
def test_core_axis_errors(text, chosen, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        placement.core_axis_of(sizes_of(text), chosen)


# -- links


def links(text: str, topology, chip="tpu7x", **options) -> dict[str, list[tuple]]:
    """{mesh axis: [(name, size, GB/s, hop in us, wraps)]}, for the axes that have links."""
    every = interconnect.links_of(sizes_of(text), CHIPS[chip], topology, **options)
    short = lambda axis: (axis.name, axis.size, axis.link_bytes_per_s / 1e9, axis.hop_s * 1e6, axis.wrap)
    return {mesh_axis: [short(axis) for axis in axes] for mesh_axis, axes in every.items() if axes}


CORES = ("die to die", 2, 600, 1, False)


@pytest.mark.parametrize(
    "text, topology, options, expected",
    [
        ("", (1, 1, 1), dict(chip="v5p"), {}),
        ("fsdp:2", (1, 1, 1), {}, {"fsdp": [CORES]}),
        ("fsdp:8", (2, 2, 1), {}, {"fsdp": [CORES, ("x", 2, 50, 1, False), ("y", 2, 50, 1, False)]}),
        (
            "fsdp:64,tensor:2",
            (4, 4, 4),
            {},
            {"fsdp": [(dim, 4, 50, 1, True) for dim in "xyz"], "tensor": [CORES]},
        ),
        (  # tensor has a line of two neighbours on x; fsdp jumps over them, and wraps around
            "fsdp:32,tensor:4",
            (4, 4, 4),
            {},
            {
                "fsdp": [("2 of x", 2, 25, 2, True), ("y", 4, 50, 1, True), ("z", 4, 50, 1, True)],
                "tensor": [CORES, ("2 of x", 2, 50, 1, False)],
            },
        ),
        (
            "fsdp:16,context:2,tensor:2",
            (2, 2, 8),
            {"core_axis": "context"},
            {
                "fsdp": [("y", 2, 50, 1, False), ("z", 8, 50, 1, False)],
                "context": [CORES],
                "tensor": [("x", 2, 50, 1, False)],
            },
        ),
        (  # full cubes
            "data:2,fsdp:32,tensor:4",
            (4, 4, 8),
            {},
            {
                "data": [("2 of z", 2, 12.5, 4, True)],
                "fsdp": [("2 of x", 2, 25, 2, True), ("y", 4, 50, 1, True), ("4 of z", 4, 50, 1, False)],
                "tensor": [CORES, ("2 of x", 2, 50, 1, False)],
            },
        ),
        (  # less than a cube: no rings, although two axes have 4
            "fsdp:32,tensor:2",
            (2, 4, 4),
            {},
            {"fsdp": [("x", 2, 50, 1, False), *((dim, 4, 50, 1, False) for dim in "yz")], "tensor": [CORES]},
        ),
        (
            "data:2,fsdp:128",
            (4, 4, 4),
            {"num_slices": 2},
            {"data": [("slices", 2, 6.25, 10, False)], "fsdp": [CORES, *((dim, 4, 50, 1, True) for dim in "xyz")]},
        ),
        ("fsdp:64", (8, 8), dict(chip="v6e"), {"fsdp": [("x", 8, 100, 1, False), ("y", 8, 100, 1, False)]}),
        ("fsdp:256", (16, 16), dict(chip="v5e"), {"fsdp": [("x", 16, 50, 1, True), ("y", 16, 50, 1, True)]}),
    ],
)
def test_links_of(text, topology, options, expected):
    assert links(text, topology, **options) == expected


@pytest.mark.parametrize(
    "text, topology, message",
    [
        ("fsdp:64", (4, 4, 4), "mesh fsdp:64 is for 64 devices and there are 128; let one axis be *"),
        ("data:2,fsdp:3,tensor:2", (3, 2, 1), None),
        ("fsdp:4,tensor:3", (2, 3, 1), "mesh axis tensor:3 does not fit tpu7x:2x3x1: 3 of its devices remain for 2 of"),
    ],
)
def test_links_of_errors(text, topology, message):
    if message is None:
        assert links(text, topology)["fsdp"] == [("x", 3, 50, 1, False)]
        return
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        links(text, topology)


@functools.cache
def devices_of(topology: str, num_slices: int = 1) -> list:
    options = dict(num_slices=num_slices) if num_slices > 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=f"tpu7x:{topology}", **options).devices


@pytest.mark.parametrize(
    "text, topology, core_axis",
    [
        ("fsdp:128", "4x4x4", ""),
        ("fsdp:64,tensor:2", "4x4x4", ""),
        ("fsdp:32,tensor:4", "4x4x4", ""),
        ("data:4,fsdp:16,tensor:2", "4x4x4", "fsdp"),
        ("data:2,fsdp:8,context:4,tensor:2", "4x4x4", ""),
        ("pipe:2,fsdp:16,expert:4", "4x4x4", "expert"),
        ("fsdp:2,tensor:8", "2x2x2", "fsdp"),
        ("fsdp:8,tensor:4", "2x2x4", ""),
        ("data:2,fsdp:32,tensor:4", "4x4x8", ""),
        ("fsdp:16,expert:16", "4x4x8", "fsdp"),
    ],
)
def test_links_are_those_between_the_devices_of_the_mesh(text, topology, core_axis):
    """Along each mesh axis, exactly the coordinates of its links change, by one hop of theirs at a time."""
    chips = tuple(map(int, topology.split("x")))
    sizes = sizes_of(text)
    devices = sharding.make_mesh(sizes, devices_of(topology), core_axis).devices
    every = interconnect.links_of(sizes, TPU7X, chips, core_axis=core_axis)
    coordinates = lambda device: np.array([device.core_on_chip, *device.coords])
    dims = {"die to die": 0, "x": 1, "y": 2, "z": 3}
    for number, axis in enumerate(MESH_AXES):
        groups = np.moveaxis(devices, number, -1).reshape(-1, sizes[axis])
        for group in groups:
            points = np.array([coordinates(device) for device in group])
            distinct = {dim: sorted({*points[:, dim].tolist()}) for dim in range(4)}
            steps = {dim: (len(at), at[1] - at[0]) for dim, at in distinct.items() if len(at) > 1}
            assert steps == {dims[a.name.split(" of ")[-1]]: (a.size, round(a.hop_s * 1e6)) for a in every[axis]}
