"""Convolution over tiles against XLA's convolution of the image: values, gradients, a small network, communication."""

import dataclasses
import functools
import itertools
import math
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import assert_close, equations, relative_error

import spatial

TILED = P(None, "y", "x")  # images, not sharded over data


def partitioned(mesh, per_device=spatial.conv, **kwargs):
    return jax.shard_map(partial(per_device, **kwargs), mesh=mesh, in_specs=(TILED, P()), out_specs=TILED)


def unpartitioned(x_BHWC, w_ijCO, *, stride):
    strides, names = (stride, stride), ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x_BHWC, w_ijCO, strides, "SAME", dimension_numbers=names)


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def errors_of_conv(mesh, image, window, stride):
    """The relative errors of the value and of the gradients of input and weights."""
    x_BHWC, w_ijCO = random(0, 2, *image, 3), random(1, *window, 3, 4)
    dy_BHWO = random(2, 2, image[0] // stride, image[1] // stride, 4)

    def value_and_gradients(f):
        y_BHWO, pull = jax.vjp(f, x_BHWC, w_ijCO)
        return y_BHWO, *jax.jit(pull)(dy_BHWO)

    expected = value_and_gradients(jax.jit(partial(unpartitioned, stride=stride)))
    tiled = value_and_gradients(jax.jit(partitioned(mesh, stride=stride)))
    return [relative_error(a, b) for a, b in zip(tiled, expected, strict=True)]


MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (1, 8)]
WINDOWS = [1, 2, 3, 4, 5, 7]
STRIDES = [1, 2, 3]
QUICK = {((2, 2), window, 1 + window % 2) for window in WINDOWS} | {((1, 1), 4, 1), ((4, 2), 7, 2), ((1, 8), 5, 3)}
EACH_PAIR = {  # of a mesh and a window, a mesh and a stride, a window and a stride
    (mesh, window, STRIDES[(i + j) % 3]) for i, mesh in enumerate(MESHES) for j, window in enumerate(WINDOWS)
}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in itertools.product(MESHES, WINDOWS, STRIDES)
    if case in QUICK | EACH_PAIR
]


@pytest.mark.parametrize(("shards", "window", "stride"), CASES)
def test_conv_equals_the_unpartitioned(shards, window, stride):
    tile = (6, 12)  # multiples of all strides
    image = (shards[0] * tile[0], shards[1] * tile[1])
    assert max(errors_of_conv(spatial.make_mesh(1, *shards), image, (window, window), stride)) < 1e-5


@pytest.mark.parametrize(("window", "stride"), [((3, 4), 1), ((1, 7), 2), ((5, 2), 3)])
def test_conv_with_a_window_that_is_not_square(window, stride):
    assert max(errors_of_conv(spatial.make_mesh(1, 2, 2), (12, 24), window, stride)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "image", "window", "stride"),
    [
        ((2, 2), (6, 6), 7, 1),  # halo 3, 3 and a tile of 3
        ((4, 2), (8, 4), 4, 1),  # halo 1, 2 and a tile of 2
        ((1, 8), (4, 16), 5, 2),  # halo 1, 2 and a tile of 2
        ((4, 2), (4, 2), 3, 1),  # halo 1, 1 and a tile of one pixel
    ],
)
def test_conv_with_a_halo_as_wide_as_the_tile(shards, image, window, stride):
    assert max(spatial.halo(window, stride)) == min(image[0] // shards[0], image[1] // shards[1])
    assert max(errors_of_conv(spatial.make_mesh(1, *shards), image, (window, window), stride)) < 1e-5


def test_the_comparison_can_fail(monkeypatch):
    """It does with the two sides of the halo swapped, in the middle of an image and at its edge."""
    halo = spatial.halo
    monkeypatch.setattr(spatial, "halo", lambda window, stride: halo(window, stride)[::-1])
    for shards in ((1, 1), (2, 2)):
        assert min(errors_of_conv(spatial.make_mesh(1, *shards), (12, 24), (4, 4), 1)) > 0.1


def test_halo():
    """The halo is as in the docstring, and just enough: as many windows fit as the tile has strides."""
    documented = {(3, 1): (1, 1), (3, 2): (0, 1), (7, 2): (2, 3), (2, 1): (0, 1), (1, 1): (0, 0), (1, 3): (0, 0)}
    assert {case: spatial.halo(*case) for case in documented} == documented
    for window, stride in itertools.product(WINDOWS, STRIDES):
        total, tile = sum(spatial.halo(window, stride)), 4 * stride
        assert (tile + total - window) // stride + 1 == 4
        assert total == 0 or (tile + total - 1 - window) // stride + 1 == 3


# -- errors


def trace_conv(shards, image, window, stride):
    conv = partitioned(spatial.make_mesh(1, *shards), stride=stride)
    return jax.eval_shape(conv, jnp.zeros((1, *image, 3)), jnp.zeros((*window, 3, 4)))


@pytest.mark.parametrize(
    ("shards", "image", "window", "stride", "message"),
    [
        ((2, 1), (4, 8), (7, 3), 1, "halo of 3 before and 3 after .* shard of 2 along dim 1"),
        ((1, 4), (8, 8), (3, 6), 1, "halo of 2 before and 3 after .* shard of 2 along dim 2"),
        ((2, 2), (6, 8), (3, 3), 2, "3 rows .* stride 2: .* 6 rows in fewer than the 2 shards of 'y'.* multiple of 4"),
        ((1, 8), (3, 16), (1, 1), 3, "2 columns .* stride 3: .* 16 columns in fewer than the 8 shards of 'x'.* of 24"),
    ],
)
def test_errors_of_conv(shards, image, window, stride, message):
    with pytest.raises(ValueError, match=message):
        trace_conv(shards, image, window, stride)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 64, 64, 3), "images=3 must be a multiple of data=2; nearest are 2 and 4"),
        ((2, 40, 64, 3), r"rows=40 must be a multiple of y\*total stride=16; nearest are 32 and 48"),
        ((2, 64, 36, 3), r"columns=36 must be a multiple of x\*total stride=16; nearest are 32 and 48"),
    ],
)
def test_errors_of_the_network(shape, message):
    with pytest.raises(ValueError, match=message):
        spatial.loss_and_grads(make_params(), jnp.zeros(shape), None, spatial.make_mesh(2, 2, 2))


# -- the network


def plain_loss(params, images_BHWC, labels_B):
    """The same function of unsharded images, on one device, without any code of spatial.py."""
    x = jax.nn.relu(unpartitioned(images_BHWC, params["stem"], stride=2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for block in params["blocks"]:
        stride = 2 if "project" in block else 1
        y = jax.nn.relu(unpartitioned(x, block["first"], stride=stride))
        y = unpartitioned(y, block["second"], stride=1)
        skip = unpartitioned(x, block["project"], stride=2) if "project" in block else x
        x = jax.nn.relu(y + skip)
    logits = x.mean((1, 2)) @ params["dense"]
    at_label = logits[jnp.arange(len(labels_B)), labels_B]
    return jnp.mean(jax.nn.logsumexp(logits, 1) - at_label)


def make_params():
    """Like `init_params`, but by numpy, which takes a few seconds less."""
    shapes = jax.eval_shape(lambda: spatial.init_params(jax.random.key(0), (8, 8, 16), 5))
    return jax.tree.map(lambda leaf: random(leaf.size, *leaf.shape) * math.sqrt(2 / math.prod(leaf.shape[:-1])), shapes)


@functools.cache
def network_case():
    case = make_params(), random(0, 2, 32, 64, 3), np.array([4, 1])
    return case, jax.jit(jax.value_and_grad(plain_loss))(*case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [(2, 2, 2), (1, 4, 2), (1, 1, 1), (2, 1, 4), (1, 1, 8)],
    ids=lambda sizes: "data:{},y:{},x:{}".format(*sizes),
)
def test_network_equals_the_plain_one(sizes):
    """The loss and all gradients are equal, for two images on up to eight cores."""
    arguments, want = network_case()
    got = jax.jit(partial(spatial.loss_and_grads, mesh=spatial.make_mesh(*sizes)))(*arguments)
    assert len(jax.tree.leaves(got)) == 8
    assert all(np.linalg.norm(leaf) > 1e-3 for leaf in jax.tree.leaves(want))
    assert_close(got, want, 1e-5)


@pytest.mark.slow
def test_demonstration():
    """`python spatial.py` runs the case of Hot Chips: a quarter of an image per core."""
    done = subprocess.run(
        [sys.executable, "-W", "error", spatial.__file__], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"data:2, y:2, x:2 +0.25 images a core", done.stdout)
    assert float(re.search(r"relative error of .* gradients (\S+)", done.stdout)[1]) < 1e-5
    table = [line.split() for line in done.stdout.partition("speed-up\n")[2].splitlines()]
    assert len(table) == 16 and all(float(row[-2]) * float(row[-1]) == pytest.approx(1, abs=0.03) for row in table)


# -- communication


@pytest.mark.parametrize("shards", [(1, 1), (1, 2), (2, 2), (4, 2)])
def test_predicted_bytes_and_flops(shards):
    """FLOPs equal those of the convolution in the jaxpr; bytes equal what the permutes send to the busiest core."""
    size, channels = 16, 8
    image = jax.ShapeDtypeStruct((1, size, size, channels), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((3, 3, channels, channels), jnp.bfloat16)
    received, flops = {}, []
    for eqn in equations(jax.make_jaxpr(partitioned(spatial.make_mesh(1, *shards)))(image, weights).jaxpr):
        if eqn.primitive.name == "ppermute":
            axis = eqn.params["axis_name"]
            for _, target in eqn.params["perm"]:
                key = axis[0] if isinstance(axis, tuple) else axis, target
                received[key] = received.get(key, 0) + eqn.invars[0].aval.size * 2
        elif eqn.primitive.name == "conv_general_dilated":
            flops += [2 * eqn.outvars[0].aval.size * 9 * channels]
    most = sum(max([received[key] for key in received if key[0] == axis], default=0) for axis in ("y", "x"))
    assert spatial.predict(size, channels, shards)[:2] == (*flops, most)


def test_predicted_seconds():
    """On 4 x 2 cores one link carries half a row for each core of a chip, another one a quarter of a column."""
    assert spatial.predict(64, 64, (4, 2))[2] == 2e-6  # two hops
    seconds = spatial.predict(2**15, 64, (4, 2))[2]
    assert seconds == pytest.approx(2 * 2**14 * 64 * 2 / 100e9 + (2**13 + 2) * 64 * 2 / 600e9)


@pytest.mark.parametrize(("hop_s", "size"), [(0, 2563 / 64), (1e-6, 8005 / 64)])
def test_where_the_exchange_of_rows_is_as_long_as_the_convolution(hop_s, size, monkeypatch):
    """The two inequalities of the docstring hold for square tiles and 64 channels; columns cost nothing here."""
    chip = dataclasses.replace(spatial.CHIP, hop_s=hop_s, die_to_die_bytes_per_s=math.inf)
    monkeypatch.setattr(spatial, "CHIP", chip)
    flops, _, seconds = spatial.predict(2 * size, 64, (2, 2))
    assert seconds - hop_s == pytest.approx(flops / 1153.5e12, rel=1e-3)


@pytest.mark.slow
def test_tpu7x_permutes_and_gathers_nothing():
    """Two replicas of 2 x 2 cores run a convolution forward and backward. Forward, the partitioner permutes alike."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1")
    mesh = spatial.make_mesh(2, 2, 2, topology.devices)
    assert all(one.coords == other.coords for one, other in mesh.devices.reshape(4, 2))  # x: the cores of a chip
    specs = spatial.IMAGES_SPEC, P()
    tiles, replicated = (NamedSharding(mesh, spec) for spec in specs)
    images = jax.ShapeDtypeStruct((2, 64, 64, 128), jnp.bfloat16, sharding=tiles)
    weights = jax.ShapeDtypeStruct((3, 3, 128, 128), jnp.bfloat16, sharding=replicated)
    program = lambda f: jax.jit(f).trace(images, weights).lower(lowering_platforms=("tpu",)).compile().as_text()
    permutes = lambda text: sorted(re.findall(r" = \(?(\w+\[[\d,]*\])[^=]* collective-permute(?:-start)?\(", text))

    def loss(x_bhwC, w_ijCO):
        return lax.psum(jnp.sum(spatial.conv(x_bhwC, w_ijCO).astype(jnp.float32) ** 2), mesh.axis_names)

    forward = program(jax.shard_map(spatial.conv, mesh=mesh, in_specs=specs, out_specs=specs[0]))
    backward = program(jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=specs, out_specs=specs))
    assert permutes(forward) == ["bf16[1,1,32,128]"] * 2 + ["bf16[1,34,1,128]"] * 2  # rows, and columns with corners
    assert len(permutes(backward)) == 8
    for text in (forward, backward):
        assert not re.search(r"all-gather|all-to-all|reduce-scatter", text)
    assert "all-reduce" in backward and "all-reduce" not in forward  # sums the gradient of the weights
    assert permutes(program(jax.jit(partial(unpartitioned, stride=1), out_shardings=tiles))) == permutes(forward)
