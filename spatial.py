"""Spatially partitioned convolution: several cores share one image and exchange the edges of their tiles.

**Idea** (Kumar & Chen, "Exploring Limits of ML Training on Google TPUs", Hot Chips 2020). Data parallelism ends at one
image per core. Beyond that ("batch < 1 per core") a replica is several cores, and each holds a tile of the image and of
every activation. Weights and labels are replicated within a replica. The talk's configuration, and the same one here:

    iterations_per_loop=100, num_shards=2, num_cores_per_replica=4, input_partition_dims=[[1, 2, 2, 1], None]
    mesh  data:2, y:2, x:2      images  P("data", "y", "x")      labels  P("data")      weights  P()

A window at the edge of a tile reaches into the neighbour's tile. So before a convolution each core gets the rows and
columns that its windows reach, the halo. It gets rows first, and then columns of the extended tile, so that the corners
come along without messages of their own. Outside the image there are zeros, as in SAME padding:

        x:0       x:1
      a a a a | b b b b                          0 0 0 0 0 0
      a a a a | b b b b                          0 a a a a b
      a a a a | b b b b                          0 a a a a b
      a a a a | b b b b   y:0       core a       0 a a a a b      4 x 4 windows of 3 x 3 fit in here (VALID):
      --------+--------             convolves    0 a a a a b      core a's tile of the result, and no more
      c c c c | d d d d   y:1                    0 c c c c d
      c c c c | d d d d
      c c c c | d d d d
      c c c c | d d d d

**Formula** of the halo of a window of k at a stride of s. Windows start s apart, and a tile that is a multiple of s has
as many windows as strides. The last window reaches k - s beyond them. The halo divides this as XLA's SAME padding does,
with an odd row at the end:

    total = max(k - s, 0)      before = total // 2      after = total - before

    3 at stride 1: 1, 1      3 at 2: 0, 1      7 at 2: 2, 3      2 at 1: 0, 1      1 at any: none

The tile must be a multiple of s, so that windows start at the same place in each tile. It must be at least as long as
the halo, so that only neighbours have to send.

**Backward.** The transpose of the exchange sends the gradient of the halo back to its owner, which adds it to the
gradient of its tile. A weight is the same on all cores. Under `jax.shard_map` with the varying-axes check, its gradient
is summed over all mesh axes, as the transpose of its implicit broadcast to them.

**Layout.** B images, H rows and W columns of an image, C input channels, O output channels (of the last layer: the
classes), i and j the rows and columns of a window. Lower case b, h, w: this core's images, and its tile of them.

**Cost** of a convolution of b images, for one core with a tile of h x w, in bfloat16:

    FLOPs      2 * b*h*w * k*k * C * O / (s*s)
    rows       b * (before + after) * w * C * 2 bytes are received, from the two sides in opposite directions:
               b * max(before, after) * w * C * 2 bytes pass a link in one direction; columns likewise
    exchange   max(hop, bytes / bandwidth) for each sharded dim, for any number of cores; a hop is about 1e-6 s

`python spatial.py` prints a table of this, and shows that the four cores of a replica compute the same as one core.

**On TPU7x.** Put x on the two cores of a chip, whose link is fast. Then the rows dominate the cost: the link between
two chips (100e9 bytes/s one way) carries the rows of both cores. With k odd at stride 1, their exchange is shorter than
the computation if both hold:

    h * O * k*k / (k-1)      >  1153.5e12 / 100e9 = 11535       k = 3:  h * O > 2563 rows * channels
    2 * h*w * k*k * C * O    >  1153.5e12 * 1e-6  = 1.2e9       and with h = w, C = O:  h * O > 8005

Then it could hide behind the computation, and even unhidden two chips are faster than one. The first does not depend on
the length of a row, which lengthens both sides. The second, the FLOPs of a core in one hop, decides for square tiles.
Both need large images, at any stage of a ResNet, as each stage halves the image and doubles the channels.

With plain `jax.jit`, given the sharding of an image, XLA's partitioner writes the same four permutes for a SAME
convolution on 2 x 2 cores (compiled for TPU7x, see the tests; Xu et al. 2021, GSPMD, arXiv:2105.04663). Here they are
explicit, and cannot become an all-gather of the image unnoticed.

**Left out.** Convolving the inside of a tile while the halo is on its way. Batch normalisation: its statistics would
take a psum of two sums per channel over y and x, and over data if they are to cover the batch. VALID padding and
periodic images. Dilation.
"""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collectives import halo_exchange
from hardware import CHIPS, PEAK_BF16_FLOPS_PER_DEVICE
from placement import check_multiple

IMAGE_AXES = ("y", "x")  # the mesh axes that shard rows and columns
IMAGES_SPEC = P("data", *IMAGE_AXES)  # for images [B, H, W, C]

CHIP = CHIPS["tpu7x"]


# -- windows over tiles


def halo(window: int, stride: int) -> tuple[int, int]:
    """(before, after): how far the windows of a tile reach into its neighbours, with SAME padding."""
    total = max(window - stride, 0)
    return total // 2, total - total // 2


def with_halo(x_bhwC: jax.Array, window: tuple[int, int], stride: int, axes: tuple[str, str] = IMAGE_AXES) -> jax.Array:
    """The tile, extended by its halo, with zeros outside the image. Per-device code.

    Raises:
      ValueError: the tile is not a multiple of the stride, or is smaller than the halo.
    """
    for dim, axis in enumerate(axes, start=1):
        size, shards, name = x_bhwC.shape[dim], lax.axis_size(axis), ("rows", "columns")[dim - 1]
        if size % stride:
            raise ValueError(
                f"a tile of {size} {name} is no multiple of the stride {stride}: split the {size * shards} {name} in "
                f"fewer than the {shards} shards of {axis!r}, or pad them to a multiple of {shards * stride}"
            )
        before, after = halo(window[dim - 1], stride)
        x_bhwC = halo_exchange(x_bhwC, axis, dim=dim, before=before, after=after)
    return x_bhwC


def conv(x_bhwC: jax.Array, w_ijCO: jax.Array, stride: int = 1, *, axes: tuple[str, str] = IMAGE_AXES) -> jax.Array:
    """This core's tile of `lax.conv_general_dilated(image, w, (stride, stride), "SAME")`. Raises as `with_halo`."""
    x_bhwC = with_halo(x_bhwC, w_ijCO.shape[:2], stride, axes)
    return lax.conv_general_dilated(
        x_bhwC, w_ijCO, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def max_pool(x_bhwC: jax.Array, window: int, stride: int, *, axes: tuple[str, str] = IMAGE_AXES) -> jax.Array:
    """This core's tile of the maximum over each window. x >= 0, as after a ReLU, since zeros surround the image."""
    x_bhwC = with_halo(x_bhwC, (window, window), stride, axes)
    return lax.reduce_window(x_bhwC, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), "VALID")


# -- a small residual network (He et al. 2015, arXiv:1512.03385), without its normalisation


def init_params(key: jax.Array, channels: tuple[int, ...] = (16, 16, 32), num_classes: int = 10) -> dict:
    """Parameters of a stem with channels[0] outputs, and of a block for each further number.

    A block has stride 2 and a projection where the number of channels changes.
    """
    keys = (jax.random.fold_in(key, number) for number in itertools.count())
    normal = lambda *shape: (2 / math.prod(shape[:-1])) ** 0.5 * jax.random.normal(next(keys), shape)
    blocks = []
    for below, above in itertools.pairwise(channels):
        block = {"first": normal(3, 3, below, above), "second": normal(3, 3, above, above)}
        blocks.append(block if below == above else block | {"project": normal(1, 1, below, above)})
    return {"stem": normal(7, 7, 3, channels[0]), "blocks": blocks, "dense": normal(channels[-1], num_classes)}


def loss_fn(params: dict, images_bhwC: jax.Array, labels_b: jax.Array) -> jax.Array:
    """The cross-entropy, averaged over all images. Per-device code."""
    x_bhwC = max_pool(jax.nn.relu(conv(images_bhwC, params["stem"], 2)), 3, 2)
    for block in params["blocks"]:
        stride = 2 if "project" in block else 1
        y_bhwC = conv(jax.nn.relu(conv(x_bhwC, block["first"], stride)), block["second"])
        skip_bhwC = conv(x_bhwC, block["project"], stride) if "project" in block else x_bhwC
        x_bhwC = jax.nn.relu(y_bhwC + skip_bhwC)
    pooled_bC = lax.pmean(jnp.mean(x_bhwC, (1, 2)), IMAGE_AXES)
    logits_bO = jnp.einsum("bC,CO->bO", pooled_bC, params["dense"])
    log_p_b = jnp.take_along_axis(jax.nn.log_softmax(logits_bO), labels_b[:, None], 1)[:, 0]
    return lax.pmean(-jnp.mean(log_p_b), "data")


def loss_and_grads(params: dict, images_BHWC: jax.Array, labels_B: jax.Array, mesh: Mesh) -> tuple[jax.Array, dict]:
    """The loss of the whole batch and its gradients, sharded over `data`, `y` and `x`.

    Raises:
      ValueError: images, rows or columns cannot be sharded in this way.
    """
    total_stride = 4 * 2 ** sum("project" in block for block in params["blocks"])
    check_multiple("images", images_BHWC.shape[0], {"data": mesh.shape["data"]})
    for name, size, axis in zip(("rows", "columns"), images_BHWC.shape[1:3], IMAGE_AXES, strict=True):
        check_multiple(name, size, {axis: mesh.shape[axis], "total stride": total_stride})
    per_device = jax.shard_map(
        jax.value_and_grad(loss_fn), mesh=mesh, in_specs=(P(), IMAGES_SPEC, P("data")), out_specs=P()
    )
    return per_device(params, images_BHWC, labels_B)


def make_mesh(data: int, y: int, x: int, devices: list | None = None) -> Mesh:
    """A mesh over the first of `devices` (default: all). x is innermost: on TPU7x, the two cores of a chip."""
    devices = sorted(devices or jax.devices(), key=lambda device: device.id)[: data * y * x]
    return Mesh(np.array(devices).reshape(data, y, x), ("data", *IMAGE_AXES), axis_types=(AxisType.Auto,) * 3)


# -- the predicted gain


def predict(size: int, channels: int, shards: tuple[int, int]) -> tuple[float, float, float]:
    """(FLOPs of a core, bytes it receives, seconds of the exchange) of a 3x3 convolution of one image, in bfloat16.

    It has as many output as input channels. The image is sharded over y chips, and over x = 1 or 2 cores of each.
    """
    y, x = shards
    h, w = size / y, size / x
    row_bytes = 2 * w * channels * (y > 1)
    column_bytes = 2 * (h + 2) * channels * (x > 1)
    seconds = (y > 1) * max(CHIP.hop_s, x * row_bytes / CHIP.link_bytes_per_s)
    seconds += (x > 1) * max(CHIP.hop_s, column_bytes / CHIP.die_to_die_bytes_per_s)
    return 2 * h * w * 3 * 3 * channels**2, min(y - 1, 2) * row_bytes + min(x - 1, 2) * column_bytes, seconds


def print_predictions() -> None:
    print("\npredicted: a 3x3 convolution of one image on TPU7x, forward, bfloat16, at peak FLOP/s, no exchange hidden")
    print("(a stage of a ResNet: 64 channels at a quarter of the image's size, or 128 at an eighth, or ...)\n")
    print("  image   cores (y * x)  FLOPs/core   halo/core  FLOPs/byte   compute  exchange  time, 1 core = 1  speed-up")
    for size, (y, x) in itertools.product((512, 1024, 2048, 4096), ((1, 1), (1, 2), (2, 2), (4, 2))):
        flops, halo_bytes, exchange = predict(size // 4, 64, (y, x))
        compute = flops / PEAK_BF16_FLOPS_PER_DEVICE["TPU7x"]
        time = (compute + exchange) / (compute * y * x)
        share = f"{flops / halo_bytes:,.0f}" if halo_bytes else "no bytes"
        work = f"{flops / 1e9:12.2f} G {halo_bytes / 1e3:8.1f} kB {share:>11}"
        print(
            f"{size:5}^2   {y * x} ({y} * {x}) {work} {compute * 1e6:6.2f} us {exchange * 1e6:6.2f} us"
            f" {time:17.2f} {1 / time:9.2f}"
        )


def main() -> None:
    params = init_params(jax.random.key(0))
    images_BHWC = jax.random.normal(jax.random.key(1), (2, 64, 64, 3))
    labels_B = jnp.array([3, 7])
    results = {}
    for sizes in ((1, 1, 1), (2, 2, 2)):
        run = jax.jit(partial(loss_and_grads, mesh=make_mesh(*sizes)))
        results[sizes] = jax.device_get(run(params, images_BHWC, labels_B))
        layout = "data:{}, y:{}, x:{}".format(*sizes)
        print(f"{layout}   {2 / math.prod(sizes):.2g} images a core   loss {results[sizes][0]:.6f}")
    error = lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
    errors = jax.tree.leaves(jax.tree.map(error, results[2, 2, 2], results[1, 1, 1]))
    print(f"measured, float32: largest relative error of the loss and {len(errors) - 1} gradients {max(errors):.1e}")
    print_predictions()


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
