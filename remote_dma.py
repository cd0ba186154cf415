"""Remote DMA: collectives as Pallas kernels that drive the links between chips themselves.

**Idea** (after "Distributed computing in Pallas for TPUs", docs.jax.dev). A TPU's DMA engines copy memory while its
core computes, and they reach the memory of other chips: a *remote DMA* writes a buffer of this device into a buffer of
another device, which does not take part. When it is done, it raises two counters, called semaphores. One is on this
device: the source was read and may change. One is on the other device: the data has arrived and may be used.
Collectives consist of such copies and of waits. Here, N devices form a ring, and each writes to its two neighbours
only:

    all-gather       each device passes on the blocks that it receives; a block is written to its place in the result
    reduce-scatter   the reverse: a sum starts far from its owner and takes up one device's part at each hop

Both use **both directions** of the ring at once, as a link carries bytes in both. A block makes at most N//2 hops
upwards and (N-1)//2 downwards, so there are N//2 steps instead of N-1.

**Synchronization.** All devices run the same program, but not at the same time. Four errors must be excluded:

    barrier       An early device would write into memory that its neighbour, still in the previous operation, uses for
                  something else. So each device signals both neighbours that it is ready, and waits for both.
    arrival       A device would pass on a block before it arrived. So it waits for each block.
    two buffers   If a device received all of a block, then added to it, then sent it, the links would idle during the
                  sum. So it adds to half of a block while the other half is under way. Blocks arrive in two slots,
                  alternating, so that one slot receives while the other is worked on.
    credits       A fast device would write into a slot whose sum its slow neighbour has not sent yet. The result would
                  be wrong, now and then. So no slot is written again before its owner has signalled that it is free.

The all-gather needs no credits, as it writes no place twice. The race detector of Pallas' simulator finds missing waits
for an arrival, and missing credits (tests/test_remote_dma.py). It does not find a missing barrier.

**Cost** for blocks of B bytes, a link of W bytes/s in each direction, and t seconds until the first byte of a hop
arrives:

    steps          N//2
    bytes a link   N//2 * B in each direction; no algorithm needs less than (N-1)/2 * B over two links
    time           N//2 * (t + B/W), which is at most twice the larger of N//2 * t and N//2 * B/W

The sums (of two half blocks, one for each direction: 3*B bytes of memory traffic) hide behind the transfer of a half
(B/2) if memory has more than 6*W bytes/s. On TPU7x that is 3.7e12 a device (published) and W about 90e9 (assumed, see
fsdp.py). All of this is predicted: the kernels compile for TPU7x and are correct in the simulator, but have not run on
a TPU.

**Left out.** A ring uses one axis of the torus, where XLA's collectives use up to six directions at once and run on the
SparseCores while the TensorCore computes. So this module explains the mechanism and is not faster. The mesh determines
whether neighbours on a mesh axis have a link between them. Forward-mode derivatives.
"""

import contextlib
import io
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, PartitionSpec

UP, DOWN = 0, 1  # the two directions round the ring
DIRECTIONS = {UP: +1, DOWN: -1}  # the offset of the next device in each
TILE = (256, 1024)  # rows and columns of a sum: eight tiles are in VMEM at once, 8 MiB in float32


def ring_all_gather(x: jax.Array, axis: str, *, interpret: bool | pltpu.InterpretParams = False) -> jax.Array:
    """Gathers the blocks of all N devices of a mesh axis, in order: [rows, ...] -> [N*rows, ...]. Code of one device.

    Equal to `lax.all_gather(x, axis, tiled=True)` in every bit, for any dtype. The gradient is `ring_reduce_scatter`.

    Args:
      x: this device's block, of the same shape on each.
      axis: the mesh axis that is the ring. Its index in the mesh is the kernel's collective id, which no other kernel
        of the program may have.
      interpret: True or `pltpu.InterpretParams(...)` simulates it on CPU, in a `jax.shard_map(..., check_vma=False)`.

    Raises:
      ValueError: the mesh has no such axis, or x has no elements or no dim 0.
    """
    return _all_gather(_checked(x, axis), axis, interpret)


def ring_reduce_scatter(x: jax.Array, axis: str, *, interpret: bool | pltpu.InterpretParams = False) -> jax.Array:
    """Sums over all N devices; each device gets its own block: [N*rows, ...] -> [rows, ...]. Code of one device.

    Except for rounding it is equal to `lax.psum_scatter(x, axis, tiled=True)`. With x_i the part of device i modulo N,
    device d gets, each bracket summed from the left,

        ((x_{d-N//2} + ... + x_{d-1}) + (x_{d+(N-1)//2} + ... + x_{d+1})) + x_d

    Sums travel in the dtype of x. They are added in float32 (integers in int32) and rounded at every device on the way,
    at the owner once. The gradient is `ring_all_gather`.

    It takes memory for 4 blocks beside x and the result, and at most 8 MiB of VMEM for any size. Blocks that do not
    consist of whole registers (8 rows in float32, 16 in bfloat16, 32 in int8; 128 columns) are padded, which copies x.

    Args:
      x: this device's part of the sum, of the same shape on each.
      axis, interpret: as for `ring_all_gather`.

    Raises:
      ValueError: as for `ring_all_gather`, or dim 0 is not a multiple of N.
    """
    x = _checked(x, axis)
    if left := x.shape[0] % (n := lax.axis_size(axis)):
        raise ValueError(
            f"dim 0 of {x.shape} is not a multiple of the {n} devices of {axis!r}: pad it to {x.shape[0] + n - left}"
        )
    return _reduce_scatter(x, axis, interpret)


def _checked(x, axis):
    if axis not in (axes := jax.sharding.get_abstract_mesh().manual_axes):
        raise ValueError(
            f"there is no axis {axis!r} here: the jax.shard_map has {', '.join(axes) or 'none, or is missing'}"
        )
    if not (x.ndim and x.size):
        raise ValueError(f"nothing to move in an array of shape {x.shape}: it needs a dim 0, and no dim of size 0")
    # A replicated array is a part of each device, too. The cast changes the type only; its transpose is a sum.
    return x if axis in jax.typeof(x).mat.varying else lax.pcast(x, axis, to="varying")


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(x, axis, interpret):
    if (n := lax.axis_size(axis)) == 1:
        return x
    block = (
        x if x.ndim > 1 else x[None]
    )  # the last two dims are stored in tiles; a dim before them can be sliced anywhere
    semaphores = [pltpu.SemaphoreType.DMA(shape) for shape in [(), (2,), (2, n // 2)]]
    (gathered,) = _call(_all_gather_kernel, block, [(n, *block.shape)], semaphores, axis, interpret)
    return gathered.reshape(n * x.shape[0], *x.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _reduce_scatter(x, axis, interpret):
    if (n := lax.axis_size(axis)) == 1:
        return x
    size, least = x.size // n, _register_rows(x.dtype)
    cols = x.shape[-1] if x.ndim > 1 else 128 if size % 128 == 0 else size
    rows = size // cols
    blocks = jnp.pad(x.reshape(n, rows, cols), ((0, 0), (0, -rows % least), (0, -cols % 128)))
    height, width = blocks.shape[1:]
    halves = 1 if height % (2 * least) else 2
    block = (halves, height // halves, width)

    tile_width = min(width, max(TILE[1], math.prod(TILE) // height // 128 * 128))  # wide if there are few rows
    tile_height = min(height // halves, math.prod(TILE) // tile_width // least * least)
    scratch = [
        pltpu.VMEM((2, 4, tile_height, tile_width), x.dtype),  # two buffers for each: up to three terms, and their sum
        *[pltpu.SemaphoreType.DMA(shape) for shape in [(2,), (2,), (2, halves), (2, 2, halves)]],
        pltpu.SemaphoreType.REGULAR((2, halves)),
    ]
    outputs = [block, (2, 2, *block)]  # the second is scratch: Pallas allocates HBM for outputs only
    total, _ = _call(_reduce_scatter_kernel, blocks.reshape(n, *block), outputs, scratch, axis, interpret)
    return total.reshape(height, width)[:rows, :cols].reshape(x.shape[0] // n, *x.shape[1:])


# Each is the transpose of the other: the gradient of a block copied to N places is the sum of theirs.
_all_gather.defvjp(
    lambda x, axis, interpret: (_all_gather(x, axis, interpret), None),
    lambda axis, interpret, _, dy: (_reduce_scatter(dy, axis, interpret),),
)
_reduce_scatter.defvjp(
    lambda x, axis, interpret: (_reduce_scatter(x, axis, interpret), None),
    lambda axis, interpret, _, dy: (_all_gather(dy, axis, interpret),),
)


def _call(kernel, x, out_shapes, scratch, axis, interpret):
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(kernel, axis=axis),
        out_shape=[jax.ShapeDtypeStruct(s, x.dtype, manual_axis_type=jax.typeof(x).mat) for s in out_shapes],
        in_specs=[anywhere],
        out_specs=[anywhere] * len(out_shapes),
        scratch_shapes=scratch,
        # Kernels with one id share a barrier, which is right if, and only if, they have the same neighbours.
        compiler_params=pltpu.CompilerParams(collective_id=jax.sharding.get_abstract_mesh().axis_names.index(axis)),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name=kernel.__name__.strip("_"),
    )(pltpu.with_memory_space_constraint(x, pltpu.HBM))  # otherwise XLA moves arrays that fit into VMEM first


def _register_rows(dtype) -> int:
    return 32 // jnp.dtype(dtype).itemsize


# -- inside the kernels, where x, gathered, total and slots are references to HBM: DMAs read and write them


def _ring(axis):
    """(N, this device's index, {direction: hops of a block}, {direction: next device})."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    return (
        n,
        me,
        {UP: n // 2, DOWN: (n - 1) // 2},
        {direction: {axis: (me + to) % n} for direction, to in DIRECTIONS.items()},
    )


def _barrier(neighbours):
    barrier = pltpu.get_barrier_semaphore()
    for neighbour in neighbours.values():
        pl.semaphore_signal(barrier, device_id=neighbour)
    pl.semaphore_wait(barrier, 2)


def _wait_for_arrival(transfer):  # the incoming transfer has the size and the semaphore of the outgoing one
    transfer.wait_recv()


def _give_credit(free, neighbour):
    pl.semaphore_signal(free, device_id=neighbour)


def _take_credit(free):
    pl.semaphore_wait(free)


def _all_gather_kernel(x, gathered, copied, sent, arrived, *, axis):
    """x [...], gathered [N, ...]."""
    n, me, hops, neighbours = _ring(axis)

    def transfer(direction, hop):
        """Passes on the block that made `hop` hops. Each hop has an arrival semaphore: neighbours may be hops ahead."""
        place = gathered.at[(me - DIRECTIONS[direction] * hop) % n]
        source = place if hop else x
        return pltpu.make_async_remote_copy(
            source, place, sent.at[direction], arrived.at[direction, hop], neighbours[direction]
        )

    own = pltpu.make_async_copy(x, gathered.at[me], copied)
    own.start()
    _barrier(neighbours)
    for hop in range(n // 2):
        transfers = [transfer(direction, hop) for direction in DIRECTIONS if hop < hops[direction]]
        for each in transfers:
            each.start()
        for each in transfers:
            _wait_for_arrival(each)
            each.wait_send()
    own.wait()


def _reduce_scatter_kernel(x, total, slots, tiles, read, written, sent, arrived, free, *, axis):
    """x [N, halves, rows, cols], total [halves, rows, cols], slots [directions, 2, halves, rows, cols].

    The sum for the device that is h hops on arrives in a slot, where this device adds its part, and is sent to the
    other slot of the next device. Meanwhile the other half of the block and the other direction are worked on.
    """
    n, me, hops, neighbours = _ring(axis)
    halves = range(x.shape[1])
    owner = lambda direction, step: (me + DIRECTIONS[direction] * (hops[direction] - step)) % n  # of the sum sent now
    part = lambda direction, step, half: x.at[owner(direction, step), half]
    slot = lambda direction, step, half: slots.at[direction, step % 2, half]

    def transfer(direction, step, half, source=None):
        source = slot(direction, step - 1, half) if source is None else source
        semaphores = sent.at[direction, half], arrived.at[direction, step % 2, half]
        return pltpu.make_async_remote_copy(source, slot(direction, step, half), *semaphores, neighbours[direction])

    def pass_on(direction, step, half):
        last = transfer(direction, step - 1, half)
        _wait_for_arrival(last)
        last.wait_send()  # the slot that it was sent from is free for the next block, long before that is ready
        pl.when(step > 1)(lambda: _give_credit(free.at[direction, half], neighbours[1 - direction]))
        so_far = slot(direction, step - 1, half)
        _add(so_far, [so_far, part(direction, step, half)], tiles, read, written)
        pl.when(step > 1)(lambda: _take_credit(free.at[direction, half]))
        transfer(direction, step, half).start()

    def one_step(step, _):
        for half in halves:
            for direction in DIRECTIONS:
                pl.when(step < hops[direction])(partial(pass_on, direction, step, half))

    _barrier(neighbours)
    directions = [direction for direction in DIRECTIONS if hops[direction]]
    for half in halves:
        for direction in directions:
            transfer(direction, 0, half, part(direction, 0, half)).start()
    lax.fori_loop(1, n // 2, one_step, None)
    for half in halves:
        for direction in directions:
            last = transfer(direction, hops[direction] - 1, half)
            _wait_for_arrival(last)
            last.wait_send()
        terms = [slot(direction, hops[direction] - 1, half) for direction in directions]
        _add(total.at[half], [*terms, x.at[me, half]], tiles, read, written)


def _add(out, terms, tiles, read, written):
    """out = sum(terms), all [rows, cols] in HBM, by tiles: one is read, one added, one written. May work in place."""
    (rows, cols), (tile_height, tile_width), least = out.shape, tiles.shape[2:], _register_rows(out.dtype)
    across = pl.cdiv(cols, tile_width)
    count = pl.cdiv(rows, tile_height) * across
    wide = jnp.int32 if jnp.issubdtype(out.dtype, jnp.integer) else jnp.float32

    def views(hbm, i, k):
        """Tile i in HBM, and its buffer in VMEM. The last tiles may be smaller, with fewer registers."""
        row, col = i // across * tile_height, i % across * tile_width
        height = pl.multiple_of(jnp.minimum(tile_height, rows - row), least)
        width = pl.multiple_of(jnp.minimum(tile_width, cols - col), 128)
        source = hbm.at[pl.ds(pl.multiple_of(row, least), height), pl.ds(pl.multiple_of(col, 128), width)]
        return source, tiles.at[i % 2, k, pl.ds(0, height), pl.ds(0, width)]

    def reads(i):
        return [pltpu.make_async_copy(*views(term, i, k), read.at[i % 2]) for k, term in enumerate(terms)]

    def write(i):
        target, buffer = views(out, i, len(terms))
        return pltpu.make_async_copy(buffer, target, written.at[i % 2])

    def start_reads(i):
        for copy in reads(i):
            copy.start()

    def one_tile(i, _):
        pl.when(i + 1 < count)(lambda: start_reads(i + 1))
        for copy in reads(i):
            copy.wait()
        pl.when(i > 1)(lambda: write(i - 2).wait())
        values = [tiles[i % 2, k].astype(wide) for k in range(len(terms))]
        tiles[i % 2, len(terms)] = sum(values[1:], values[0]).astype(out.dtype)
        write(i).start()

    start_reads(0)
    lax.fori_loop(0, count, one_tile, None)
    for i in range(max(count - 2, 0), count):
        write(i).wait()


def main(n: int):
    """Runs both on n simulated devices with the race detector, and compares them with XLA's collectives."""
    mesh = Mesh(np.array(jax.devices()[:n]), ("ring",), axis_types=(AxisType.Auto,))
    simulated = pltpu.InterpretParams(detect_races=True)
    x = jax.random.normal(jax.random.key(0), (n * n * 64, 512))

    def run(f, *args, **kwargs):
        spec = PartitionSpec("ring")
        per_device = lambda x: f(x, "ring", *args, **kwargs)
        # check_vma is off: jax's simulator itself does not pass it.
        result = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)
        return result.block_until_ready()  # one at a time: the process has one state of the simulator

    with contextlib.redirect_stdout(io.StringIO()) as printed:  # jax 0.10 prints races, later ones raise them
        gathered = run(ring_all_gather, interpret=simulated)
        scattered = run(ring_reduce_scatter, interpret=simulated)
    same = (gathered == run(lax.all_gather, tiled=True)).all()
    error = abs(scattered - run(lax.psum_scatter, tiled=True)).max()
    kib = lambda devices: f"{x.nbytes / devices / 2**10:.0f} KiB"
    print(f"ring            {n} simulated devices, {n // 2} steps")
    print(f"all-gather      {kib(n)} from each, {'' if same else 'NOT '}equal to XLA's in every bit")
    print(f"reduce-scatter  {kib(n * n)} to each, largest difference to XLA's {error:.1e}")
    print(f"races           {printed.getvalue() or 'none detected'}")


if __name__ == "__main__":
    import command

    # Twice the devices of the ring: jax 0.10 hangs if no thread is left for a copy.
    command.demonstrate(lambda: main(4), __file__, devices=8)
