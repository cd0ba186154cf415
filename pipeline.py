"""Pipeline parallelism: the layers are split into stages on different devices, and microbatches pass through them.

**Idea** (Huang et al. 2019, GPipe, arXiv:1811.06965). P stages hold L/P layers each. A stage takes a microbatch's
activations from the stage before, computes and passes them on. It sends one message of [b, t, D] a microbatch, less
than any other parallelism: `pipe` is the axis for a slow network. The price is the bubble. The last stage gets the
first of M microbatches P-1 ticks late, and ends its backward passes P-1 ticks before the first stage:

    idle share   (P-1) / (M + P-1)          circular, v rounds:   (P-1) / (v*M + P-1)

**Circular** (Narayanan et al. 2021, Megatron-LM, arXiv:2104.04473, section 2.2: interleaved stages). The layers are
split into v*P chunks, and stage p has chunks p, P+p, 2P+p, ...: a microbatch goes round the stages v times. The wait at
either end is P-1 ticks of a chunk, 1/v of a stage. A stage sends v times as much, and M must be a multiple of P.

**Ticks.** All stages run the same program (SPMD) in lockstep: a `lax.scan` over ticks. In a tick a stage does one
forward pass of a chunk, or one backward pass, or both. `lax.ppermute` sends the results to its neighbours, which use
them in the next tick. Tick and stage determine the microbatch and the round (`Schedule`); the program and the timeline
that `python pipeline.py` prints come from the same few lines of arithmetic. The ticks are three loops:

    forward passes only      forward and backward passes      backward passes only

so that nobody waits for work that no stage does in that tick. 1F1B and circular have v*P - 1, v*(M-P) + P and v*P - 1
such ticks, GPipe v*M + P-1, none and v*M + P-1: with F and B the times of a chunk both take (v*M + P-1) * (F + B).

**Memory.** A forward pass leaves residuals for its backward pass: what `jax.vjp` saves, less the weights. They wait in
slots of one buffer, as many as forward passes are in flight at once on the first stage, where they wait longest:

    GPipe       M                     differentiating the loop would give the same
    1F1B        min(M, 2P - 1)        (Narayanan et al. 2019, PipeDream, SOSP; 2020, arXiv:2006.09503)
    circular    min(vM, (v+1)P - 1)   chunks, of 1/v of a stage: less than 1F1B, the more rounds

1F1B on devices that run independently of each other needs P slots. Here they run in lockstep: a message takes a tick,
and the way from stage p to the loss and back 2(P-1-p) ticks, so 2(P-1-p) + 1 microbatches are in flight. (That is
"eager 1F1B", Zhuang et al. 2023, arXiv:2211.05322, where it gives each message the time of a pass to arrive. So it does
here: what a stage sends after its forward pass travels during its backward pass, and the reverse.) Recomputation is up
to the stage function: wrapped in `jax.checkpoint`, it saves its input alone.

**The ends.** All devices run the same program, so all embed tokens and all compute a loss, but only the first stage's
embeddings and the last stage's loss are used. The other results are discarded, and their gradients are zeros. That
costs energy, and no time, since the other stages would wait for the last one anyway. With several rounds the ends run
only in ticks in which a microbatch begins or ends. That depends on the tick alone, so a `lax.cond` on it may contain
collectives. An idle stage computes, too, on zeros or on an earlier microbatch, and its results are discarded. Every
stage has the weights of both ends.

**Cost.** A stage of l layers with F FLOPs a token hides its messages where F / C > D * 2 / W_link: see
predicted/bounds.py. FSDP on the same P devices gathers 2 * params bytes a microbatch and pass, where a pipeline sends
2*b*t*D: the message is smaller where b*t*D < params of a stage. Between slices it always is.

**Left out.** Schedules that split the backward pass in two (zero bubble, arXiv:2401.10241); vocabulary parallelism over
the stages (arXiv:2411.05288), which would share the ends; stages of unequal numbers of layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

SCHEDULES = ("gpipe", "1f1b", "circular")


# -- the schedule


class Pass(NamedTuple):
    """A stage's pass in a tick, forward or backward: numbers, or traced arrays."""

    number: int  # of the forward pass, in the stage's order
    microbatch: int
    round: int
    busy: bool  # False: the stage has no pass in this tick, and the other fields are those of number 0


@dataclass(frozen=True)
class Schedule:
    """A schedule: the passes of each stage in each tick. Ticks and stages may be ints or traced arrays.

    A stage makes rounds * microbatches forward passes, number k of them `stage` ticks after the first stage does.
    Groups of P microbatches go round together: a microbatch that returns to the first stage is the next one there.
    Backward passes go the other way, number k of them P-1-stage ticks after the last stage, rounds last to first.
    """

    name: str
    stages: int
    microbatches: int
    rounds: int = 1

    @property
    def passes(self) -> int:
        """Forward passes of a stage, each of one chunk."""
        return self.rounds * self.microbatches

    @property
    def first_loss(self) -> int:
        """The tick in which the last stage ends the first microbatch."""
        return self.rounds * self.stages - 1

    @property
    def end_forward(self) -> int:
        """The tick after the last forward pass."""
        return self.passes + self.stages - 1

    @property
    def first_backward(self) -> int:
        """The tick of the first backward pass, on the last stage."""
        return self.end_forward if self.name == "gpipe" else self.first_loss

    @property
    def num_ticks(self) -> int:
        return self.first_backward + self.passes + self.stages - 1

    def forward_at(self, tick, stage) -> Pass:
        return self._pass(tick - stage)

    def backward_at(self, tick, stage) -> Pass:
        """The backward pass, with the number of the forward pass whose residuals it needs."""
        number, microbatch, from_last, busy = self._pass(tick - self.first_backward - (self.stages - 1 - stage))
        r = self.rounds - 1 - from_last
        return Pass(number + (r - from_last) * self.stages, microbatch, r, busy)

    def _pass(self, number) -> Pass:
        busy = (number >= 0) & (number < self.passes)
        number = number * busy
        group, in_group = divmod(number, self.rounds * self.stages)
        return Pass(number, group * self.stages + in_group % self.stages, in_group // self.stages, busy)

    def work_at(self, tick: int) -> dict[str, bool]:
        """The kinds of work that any stage does in a tick; they change only at `first_loss` and at `end_forward`."""
        forwards = tick < self.end_forward
        losses = forwards and tick >= self.first_loss
        return dict(forwards=forwards, losses=losses, backwards=tick >= self.first_backward)

    def slots(self) -> list[int]:
        """The slot of the buffer in which each forward pass leaves its residuals: the first that is free at that time.

        Counted on the first stage. The others need theirs for a part of that time.
        """
        slots, free = [0] * self.passes, []
        for tick in range(self.num_ticks):
            number, _, _, busy = self.forward_at(tick, 0)
            if busy:
                slots[number] = free.pop() if free else max(slots[:number], default=-1) + 1
            number, _, _, busy = self.backward_at(tick, 0)
            if busy and tick >= self.first_backward:
                free.append(slots[number])
        return slots

    @property
    def live(self) -> int:
        """Slots of the buffer: forward passes that have residuals in memory at once."""
        return max(self.slots()) + 1

    @property
    def live_losses(self) -> int:
        """Microbatches whose loss gradients wait for their backward passes at once."""
        return self.microbatches if self.first_backward > self.first_loss else 1


def make_schedule(name: str, stages: int, microbatches: int, rounds: int = 1) -> Schedule:
    """The schedule of this name. Raises ValueError, with the numbers, for one that does not exist."""
    if name not in SCHEDULES:
        raise ValueError(f"pipeline_schedule={name!r} is not one of {', '.join(SCHEDULES)}")
    if (rounds > 1) != (name == "circular"):
        raise ValueError(f"pipeline_rounds={rounds}: circular has two or more, the others one; it is {name!r}")
    if rounds > 1 and microbatches % stages:
        raise ValueError(
            f"microbatches={microbatches} must be a multiple of pipe={stages}: a circular pipeline takes groups of them"
        )
    return Schedule(name, stages, microbatches, rounds)


# -- the loops over ticks


@dataclass(frozen=True)
class Pipeline:
    """Per-device functions, pure, and their schedule. Stages pass on x, an array or a tree.

    `inputs` of a microbatch are any tree, the same on all stages; no gradient flows to it: the functions stop it.
    """

    first: Callable  # (ends, inputs) -> x
    stage: Callable  # (layers, x, inputs, round) -> x
    last: Callable  # (ends, x, inputs) -> (loss, metrics), or in `forward` any tree
    schedule: Schedule
    maxima: tuple[str, ...] = ()  # metrics that are maxima (of 0, too) over the microbatches, not sums
    axis: str = "pipe"


def forward(pipeline: Pipeline, layers_R, ends, inputs: Callable):
    """`last` of every microbatch, stacked: right on the last stage, meaningless on the others.

    Per-device code, for evaluation and sampling. Arguments as of `loss_and_grads`.
    """
    schedule = pipeline.schedule
    device = _Device(pipeline, layers_R, ends, inputs, lax.axis_index(pipeline.axis))

    def tick(carry, t, *, with_last):
        message, results_M = carry
        _, m, r, _ = schedule.forward_at(t, device.stage)
        y = pipeline.stage(_index(layers_R, r), device.input_of(message, t), inputs(m), r)
        if with_last:
            result = _when(_last_stage_ends(schedule, t), lambda: pipeline.last(ends, y, inputs(m)))
            results_M = _write(results_M, m, result, device.ends_microbatch(t))
        return (_send(pipeline, y, +1), results_M), None

    message = _zeros(device.message_shape())
    result = jax.eval_shape(lambda x: pipeline.last(ends, x, inputs(0)), message)
    results_M = jax.tree.map(partial(_buffer, device.stage, schedule.microbatches), result)
    carry = lax.scan(partial(tick, with_last=False), (message, results_M), jnp.arange(schedule.first_loss))[0]
    ticks = jnp.arange(schedule.first_loss, schedule.end_forward)
    return lax.scan(partial(tick, with_last=True), carry, ticks)[0][1]


def loss_and_grads(pipeline: Pipeline, layers_R, ends, inputs: Callable):
    """Shares of the loss and metrics, and the loss's gradients, summed over the microbatches (see `Pipeline.maxima`).

    Per-device code under `jax.shard_map`, with check_vma=True. Each stage returns a share of the loss, the metrics and
    the gradients of the ends: sum these over the axis. The gradients of the layers are complete.

    Args:
      layers_R: this stage's layers, a tree of arrays with a leading dim of rounds: see `to_rounds`. As `ends`, they
        vary over the axis.
      ends: tree of weights of `first` and `last`.
      inputs: number of a microbatch -> its inputs.

    Returns: (loss, metrics), gradients of layers_R, gradients of ends, in float32.
    """
    schedule = pipeline.schedule
    device = _Device(pipeline, layers_R, ends, inputs, lax.axis_index(pipeline.axis))
    slots = jnp.array(schedule.slots())
    carry, vjp_tree = _first_carry(device)

    def tick(carry, t, *, forwards, losses, backwards):
        message, dx, residuals, dys, (shares, dlayers_R, dends) = carry
        fwd, bwd = schedule.forward_at(t, device.stage), schedule.backward_at(t, device.stage)
        if backwards:
            dmessage = _send(pipeline, dx, -1)  # travels during the forward pass
        if forwards:
            y, vjp = device.forward_pass(message, t)
            message = _send(pipeline, y, +1)  # travels during the backward pass
            residuals = _write(residuals, slots[fwd.number], jax.tree.leaves(vjp), fwd.busy)
        if losses:
            more, dends_last, dy = device.loss_pass(y, t)
            shares, dends = _total(shares, more, pipeline.maxima), _add(dends, dends_last)
            dys = _write(dys, fwd.microbatch % schedule.live_losses, dy, True)
        if backwards:
            at_loss = (device.stage == schedule.stages - 1) & (bwd.round == schedule.rounds - 1)
            dy = _index(dys, bwd.microbatch % schedule.live_losses)
            dy = jax.tree.map(partial(jnp.where, at_loss), dy, dmessage)
            vjp = jax.tree.unflatten(vjp_tree, _index(residuals, slots[bwd.number]))
            dlayers, dends_first, dx = device.backward_pass(vjp, dy, t)
            dlayers = _add(_index(dlayers_R, bwd.round), dlayers)
            dlayers_R, dends = _write(dlayers_R, bwd.round, dlayers, True), _add(dends, dends_first)
        return (message, dx, residuals, dys, (shares, dlayers_R, dends)), None

    first_loss, end_forward = schedule.first_loss, schedule.end_forward
    for begin, end in [(0, first_loss), (first_loss, end_forward), (end_forward, schedule.num_ticks)]:
        carry = lax.scan(partial(tick, **schedule.work_at(begin)), carry, jnp.arange(begin, end))[0]
    return carry[-1]


def _first_carry(device: "_Device"):
    """The carry before the first tick, all zeros, and the tree structure of a VJP: with a jaxpr in it, no carry."""
    schedule = device.pipeline.schedule
    message = _zeros(device.message_shape())
    _, vjp = jax.eval_shape(device.forward_pass, message, 0)
    shares, _, dy = jax.eval_shape(device.loss_pass, message, 0)
    dx = jax.eval_shape(lambda dy: device.backward_pass(_zeros(vjp), dy, 0)[2], message)
    residuals, vjp_tree = jax.tree.flatten(vjp)
    buffers = lambda size, shapes: jax.tree.map(partial(_buffer, device.stage, size), shapes)
    in_float32 = lambda tree: jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), tree)
    totals = (_zeros(shares), in_float32(device.layers_R), in_float32(device.ends))
    return (message, _zeros(dx), buffers(schedule.live, residuals), buffers(schedule.live_losses, dy), totals), vjp_tree


@dataclass(frozen=True)
class _Device:
    """One device's stage and the arguments of `loss_and_grads`; the methods are its passes in tick t."""

    pipeline: Pipeline
    layers_R: Any
    ends: Any
    inputs: Callable
    stage: jax.Array  # its number: the device's index along the axis

    def forward_pass(self, message, t):
        """Returns the output of this tick's forward pass, and its VJP without layers and inputs."""
        at = self.pipeline.schedule.forward_at(t, self.stage)
        run = lambda layers, x, inputs: self.pipeline.stage(layers, x, inputs, at.round)
        y, vjp = jax.vjp(run, _index(self.layers_R, at.round), self.input_of(message, t), self.inputs(at.microbatch))
        # The backward pass has the layers and the inputs; as residuals they would fill a slot each. For removing
        # residuals from a vjp see JAX's "First-class VJPs", https://docs.jax.dev/en/latest/301/vjp-objects.html
        vjp.args_res[0] = vjp.args_res[2] = None
        return y, vjp

    def loss_pass(self, y, t):
        """Returns (loss, metrics), gradients of the ends, gradient of y: zeros but where a microbatch ends."""
        schedule, counts = self.pipeline.schedule, self.ends_microbatch(t)
        m = schedule.forward_at(t, self.stage).microbatch

        def with_gradients():
            last = lambda ends, x: self.pipeline.last(ends, x, self.inputs(m))
            loss, vjp, metrics = jax.vjp(last, self.ends, y, has_aux=True)
            dends, dy = vjp(jnp.where(counts, jnp.ones_like(loss), 0))
            return jax.tree.map(lambda a: jnp.where(counts, a, 0), (loss, metrics)), dends, dy

        return _when(_last_stage_ends(schedule, t), with_gradients)

    def backward_pass(self, vjp, dy, t):
        """Returns the gradients of the round's layers, of the ends as the first stage uses them, and of the input."""
        schedule, first = self.pipeline.schedule, self.pipeline.first
        _, m, r, busy = schedule.backward_at(t, self.stage)
        dy = jax.tree.map(lambda a: jnp.where(busy, a, 0), dy)
        vjp.args_res[0], vjp.args_res[2] = _index(self.layers_R, r), self.inputs(m)
        dlayers, dx, _ = vjp(dy)
        embedded = (self.stage == 0) & (r == 0)
        dembedded = jax.tree.map(lambda a: jnp.where(embedded, a, 0), dx)
        begins = schedule.rounds == 1 or schedule.backward_at(t, 0).round == 0
        dends = _when(begins, lambda: jax.vjp(lambda ends: first(ends, self.inputs(m)), self.ends)[1](dembedded)[0])
        return dlayers, dends, dx

    def input_of(self, message, t):
        """The input of a forward pass: what the stage before sent; in the first stage's first round, the embeddings."""
        schedule = self.pipeline.schedule
        at = schedule.forward_at(t, self.stage)
        begins = schedule.rounds == 1 or schedule.forward_at(t, 0).round == 0
        embedded = _when(begins, lambda: self.pipeline.first(self.ends, self.inputs(at.microbatch)))
        return jax.tree.map(partial(jnp.where, (self.stage == 0) & (at.round == 0)), embedded, message)

    def ends_microbatch(self, t):
        """Whether this tick's forward pass is the last one of a microbatch."""
        schedule = self.pipeline.schedule
        at = schedule.forward_at(t, self.stage)
        return at.busy & (self.stage == schedule.stages - 1) & (at.round == schedule.rounds - 1)

    def message_shape(self):
        stage, first, inputs = self.pipeline.stage, self.pipeline.first, self.inputs(0)
        output = lambda: stage(_index(self.layers_R, 0), first(self.ends, inputs), inputs, 0)
        return jax.eval_shape(lambda: _send(self.pipeline, output(), +1))


def _last_stage_ends(schedule: Schedule, t):
    """Whether the last stage ends a microbatch in a tick of the loop in which it computes losses."""
    return schedule.rounds == 1 or schedule.forward_at(t, schedule.stages - 1).round == schedule.rounds - 1


def _when(condition, compute: Callable):
    """compute(), or zeros like it where the condition is false; the condition must be the same on all devices."""
    if condition is True:
        return compute()
    return lax.cond(condition, compute, lambda: _zeros(jax.eval_shape(compute)))


def _send(pipeline: Pipeline, x, direction: int):
    """Sends x to the next stage (+1) or the previous one (-1), around the ring if there are several rounds."""
    n = pipeline.schedule.stages
    pairs = [(i, (i + direction) % n) for i in range(n) if pipeline.schedule.rounds > 1 or 0 <= i + direction < n]
    return lax.ppermute(x, pipeline.axis, pairs)


def _zeros(shapes):
    return jax.tree.map(jnp.zeros_like, shapes)


def _buffer(stage, size: int, shape) -> jax.Array:
    zeros = jnp.zeros_like(shape)
    zeros = jnp.where(stage == 0, zeros, zeros)  # makes the type vary: each stage has its own values
    return jnp.broadcast_to(zeros, (size, *zeros.shape))


def _index(tree, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def _write(tree, i, values, valid):
    """Writes values to index i of each array, where valid."""
    values = values if valid is True else jax.tree.map(partial(jnp.where, valid), values, _index(tree, i))
    return jax.tree.map(lambda a, value: lax.dynamic_update_index_in_dim(a, value, i, 0), tree, values)


def _add(total, more):
    # XLA:TPU tries to move a reduce-scatter whose results are accumulated out of the loop, and fails an internal check.
    return jax.tree.map(jnp.add, total, lax.optimization_barrier(more))


def _total(shares, more, maxima):
    """The (loss, metrics) of two microbatches as one."""
    larger = {name: jnp.maximum(shares[1][name], more[1][name]) for name in maxima if name in more[1]}
    sums = lambda x: (x[0], {name: a for name, a in x[1].items() if name not in larger})
    loss, metrics = _add(sums(shares), sums(more))
    return loss, metrics | larger


# -- which layers a stage runs


def to_rounds(layers, rounds: int, axis: str = "pipe"):
    """The layers that this stage runs, by round: [rounds, layers of a chunk, ...].

    Per-device code. Arrays with a leading dim of layers are sharded over the axis in order, whatever the schedule:
    stage p stores the p-th of P shards. One round runs these. For several, each stage sends all but one or two of its
    chunks to the stages that run them, once a step: 1/M of what FSDP gathers, and of that one shard.

    Args:
      layers: tree of this stage's shards of the arrays.
    """
    chunks = jax.tree.map(lambda a: a.reshape(rounds, -1, *a.shape[1:]), layers)
    return chunks if rounds == 1 else _exchange(chunks, _exchanges(lax.axis_size(axis), rounds), axis)


def from_rounds(layers_R, rounds: int, axis: str = "pipe"):
    """The inverse of `to_rounds`, for the gradients."""
    if rounds > 1:
        exchanges = _exchanges(lax.axis_size(axis), rounds)
        inverse = [[(target, source) for source, target in moves] for moves in exchanges]
        layers_R = _exchange(layers_R, inverse, axis)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), layers_R)


def _exchanges(stages: int, rounds: int) -> list[list[tuple[tuple[int, int], tuple[int, int]]]]:
    """Exchanges of chunks, in each of which a stage sends one and receives one.

    An exchange is a list of moves: (stage, place) where a chunk is stored, (stage, round) where it runs. A stage stores
    `rounds` consecutive chunks, so modulo `rounds` each is in another exchange. It runs every `stages`-th chunk; these
    repeat modulo `rounds` after `lcm` chunks, from where on the exchange is shifted by one.
    """
    lcm = math.lcm(stages, rounds)
    exchanges = [[] for _ in range(rounds)]
    for c in range(stages * rounds):
        exchanges[(c + c // lcm) % rounds].append((divmod(c, rounds), divmod(c, stages)[::-1]))
    return exchanges


def _exchange(chunks, exchanges, axis: str):
    stage, received = lax.axis_index(axis), chunks
    for moves in exchanges:
        sent_from = jnp.array([place for (_, place), _ in sorted(moves)])[stage]
        goes_to = jnp.array([place for _, (_, place) in sorted(moves, key=lambda move: move[1])])[stage]
        pairs = [(source, target) for (source, _), (target, _) in moves]
        received = _write(received, goes_to, lax.ppermute(_index(chunks, sent_from), axis, pairs), True)
    return received


# -- a demonstration


def idle_share(schedule: Schedule, forward_s: float = 1.0, backward_s: float = 2.0) -> float:
    """Share of the time in which a stage is idle, counted; a tick lasts as long as all that any stage does in it.

    Raises ValueError if stages do not all do the same work.
    """
    total, working = 0.0, [0.0] * schedule.stages
    for tick in range(schedule.num_ticks):
        work = schedule.work_at(tick)
        total += forward_s * work["forwards"] + backward_s * work["backwards"]
        for p in range(schedule.stages):
            working[p] += forward_s * schedule.forward_at(tick, p).busy
            working[p] += backward_s * schedule.backward_at(tick, p).busy
    if len(set(working)) > 1:
        raise ValueError(f"stages do not all do the same work: {working} s")
    return 1 - working[0] / total


def timeline(schedule: Schedule, width: int = 2) -> str:
    """A line per stage: a forward pass is its microbatch's digit `width` times, a backward pass a letter twice that."""
    lines = []
    for stage in range(schedule.stages):
        line = ""
        for tick in range(schedule.num_ticks):
            work = schedule.work_at(tick)
            _, m, _, busy = schedule.forward_at(tick, stage)
            line += ("0123456789"[m % 10] if busy else ".") * width * work["forwards"]
            _, m, _, busy = schedule.backward_at(tick, stage)
            line += ("abcdefghij"[m % 10] if busy else ".") * width * 2 * work["backwards"]
        lines.append(f"stage {stage}  {line}")
    return "\n".join(lines)


def main() -> None:
    """Prints timelines, and compares the gradients of a small network with those of one device."""
    L, D, stages, microbatches = 8, 32, 4, 8
    keys = jax.random.split(jax.random.key(0), 3)
    layers_LDD = 0.2 * jax.random.normal(keys[0], (L, D, D))
    ends = {"in": jax.random.normal(keys[1], (D, D)) / D**0.5, "out": jnp.ones(D)}
    x_MbD = jax.random.normal(keys[2], (microbatches, 4, D))
    mesh = jax.make_mesh((stages,), ("pipe",), axis_types=(AxisType.Auto,))

    first = lambda ends, inputs: inputs @ ends["in"]
    run = lambda layers, x, inputs, r: lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0]
    last = lambda ends, x, inputs: (jnp.mean((x @ ends["out"] - jnp.sum(inputs, -1)) ** 2), {})

    def plain(layers, ends):
        return jnp.sum(jax.vmap(lambda x_bD: last(ends, run(layers, first(ends, x_bD), x_bD, 0), x_bD)[0])(x_MbD))

    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(layers_LDD, ends)
    print("forward passes are digits, backward passes letters, twice as long; a character is the same time in each\n")
    for name, rounds in (("gpipe", 1), ("1f1b", 1), ("circular", 2)):
        schedule = make_schedule(name, stages, microbatches, rounds)

        def per_device(layers, ends, x_MbD, schedule=schedule):
            ends, x_MbD = lax.pcast((ends, x_MbD), "pipe", to="varying")
            layers_R = to_rounds(layers, schedule.rounds)
            pipeline = Pipeline(first, run, last, schedule)
            _, dlayers_R, dends = loss_and_grads(pipeline, layers_R, ends, lambda m: lax.stop_gradient(x_MbD[m]))
            return from_rounds(dlayers_R, schedule.rounds), lax.psum(dends, "pipe")

        sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(P("pipe"), P(), P()), out_specs=(P("pipe"), P()))
        grads = jax.jit(sharded)(layers_LDD, ends, x_MbD)
        off = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), grads, expected)
        print(f"{name}, {stages} stages, {microbatches} microbatches, rounds: {rounds}")
        print(timeline(schedule, 2 // rounds))
        predicted = (stages - 1) / (schedule.passes + stages - 1)
        print(
            f"idle {idle_share(schedule):.1%}, counted; (P-1)/(vM+P-1) = {predicted:.1%}. "
            f"Residuals of {schedule.live} passes at once, each 1/{rounds} of a stage\n"
            f"gradients differ from one device's by {max(jax.tree.leaves(off)):.0e}, relative, measured\n"
        )


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
