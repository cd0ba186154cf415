"""Pipeline parallelism: the layers in stages, each on its own devices, and microbatches that pass through them.

**Idea** (Huang et al. 2019, GPipe, arXiv:1811.06965). P stages hold L/P layers each. A stage takes a microbatch's
activations from the stage before, computes and passes them on; what travels is one message of [b, t, D] a microbatch,
which no other parallelism undercuts: `pipe` is the axis for a slow network. The price is the bubble. Of M microbatches
the last stage sees the first one P-1 turns late, and with the backward pass all others end as much earlier:

    idle share   (P-1) / (M + P-1)          circular, v rounds:   (P-1) / (v*M + P-1)

**Circular** (Narayanan et al. 2021, Megatron-LM, arXiv:2104.04473, section 2.2: interleaved stages). The layers are
v*P chunks and stage p has chunks p, P+p, 2P+p, ...: a microbatch goes round v times, and what a stage waits for at
either end are P-1 turns of a chunk, 1/v of a stage. It sends v times as much, and M must be a multiple of P.

**Ticks.** Stages run the same program (SPMD) in step: `lax.scan` over ticks. In a tick a stage does one forward pass
of a chunk, or one backward pass, or both, and `lax.ppermute` hands the results to its neighbours, who use them in the
next tick. Which microbatch and which round that is follows from the tick and the stage (`Schedule`); the program and
the timeline that `python pipeline.py` prints come from the same few lines of arithmetic. The ticks are three loops:

    forward passes only      forward and backward passes      backward passes only

so that nobody waits for what no stage does in that tick. 1F1B and circular have v*P - 1, v*(M-P) + P and v*P - 1 such
ticks, GPipe v*M + P-1, none and v*M + P-1: with F and B the times of a chunk both take (v*M + P-1) * (F + B).

**Memory.** A forward pass leaves residuals for its backward pass: what `jax.vjp` keeps, less the weights. They wait in
slots of one buffer, as many as forward passes are under way at once, counted at the first stage, which waits longest:

    GPipe       M                     differentiating the loop would give the same
    1F1B        min(M, 2P - 1)        (Narayanan et al. 2019, PipeDream, SOSP; 2020, arXiv:2006.09503)
    circular    min(vM, (v+1)P - 1)   chunks, of 1/v of a stage: less than 1F1B, the more rounds

1F1B on devices that run independently of each other keeps P. Here they run in step: a message takes a tick, and from
stage p to the loss and back it is 2(P-1-p) ticks, so 2(P-1-p) + 1 microbatches are kept. (That is "eager 1F1B", Zhuang
et al. 2023, arXiv:2211.05322, where it pays for messages that have a whole pass to arrive. So it does here: what a
stage sends after its forward pass travels while it does its backward pass, and the other way round.) Recomputation is
the stage function's own: wrapped in `jax.checkpoint` it leaves its input alone.

**The ends.** All devices trace all of the program, so all embed tokens and all compute a loss, the first and the last
stage with effect: the others' results are put aside, and the gradients of what is put aside are zeros. It takes
energy, and no time, since the other stages would wait for the last one anyway. With several rounds it is done only in
the ticks in which a microbatch begins or ends; that depends on the tick alone, so a `lax.cond` on it may hold
collectives. An idle stage computes too, on zeros or on a microbatch that it has had: numbers, which are put aside.
The weights of the ends are on every stage.

**When it wins.** A stage of l layers with F FLOPs a token hides its messages where F / C > D * 2 / W_link: see
bounds.py. Against FSDP on the same P devices, which gathers 2 * params bytes a microbatch and pass where a pipeline
sends 2*b*t*D: the message is smaller from b*t*D < params of a stage on. Between slices it is always.

**Left out.** Schedules that split the backward pass in two (zero bubble, arXiv:2401.10241); vocabulary parallelism over
the stages (arXiv:2411.05288), which would share the ends; stages of unequal numbers of layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

SCHEDULES = ("gpipe", "1f1b", "circular")


# -- who does what when


@dataclass(frozen=True)
class Schedule:
    """What each stage does in each tick. Ticks and stages may be ints or traced arrays.

    A stage makes rounds * microbatches forward passes in an order of its own, number k of them `stage` ticks after the
    first stage: groups of P microbatches go round together, so that who comes back to the first stage is next there.
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
        return self.end_forward if self.name == "gpipe" else self.first_loss

    @property
    def num_ticks(self) -> int:
        return self.first_backward + self.passes + self.stages - 1

    def forward_at(self, tick, stage):
        """(number of the pass, microbatch, round, whether there is one at all); of none, the first one's numbers."""
        return self._pass(tick - stage)

    def backward_at(self, tick, stage):
        """As `forward_at`; the number is that of the forward pass whose residuals are wanted."""
        number, microbatch, turn, busy = self._pass(tick - self.first_backward - (self.stages - 1 - stage))
        last_first = self.rounds - 1 - turn
        return number + (last_first - turn) * self.stages, microbatch, last_first, busy

    def _pass(self, number):
        busy = (number >= 0) & (number < self.passes)
        number = number * busy
        group, turn = divmod(number, self.rounds * self.stages)
        return number, group * self.stages + turn % self.stages, turn // self.stages, busy

    def does(self, tick: int) -> dict[str, bool]:
        """What any stage does in a tick; it changes at `first_loss` and at `end_forward`."""
        forwards = tick < self.end_forward
        losses = forwards and tick >= self.first_loss
        return dict(forwards=forwards, losses=losses, backwards=tick >= self.first_backward)

    def slots(self) -> list[int]:
        """Where in the buffer each forward pass leaves its residuals: the first place that is free at that time.

        As the first stage has it. All others keep theirs for a part of that time.
        """
        places, free = [0] * self.passes, []
        for tick in range(self.num_ticks):
            number, _, _, busy = self.forward_at(tick, 0)
            if busy:
                places[number] = free.pop() if free else max(places[:number], default=-1) + 1
            number, _, _, busy = self.backward_at(tick, 0)
            if busy and tick >= self.first_backward:
                free.append(places[number])
        return places

    @property
    def live(self) -> int:
        """Forward passes that have residuals in memory at once: the slots of the buffer."""
        return max(self.slots()) + 1


def schedule_of(name: str, stages: int, microbatches: int, rounds: int = 1) -> Schedule:
    """Raises ValueError, with the numbers, for a schedule that there is none of."""
    if name not in SCHEDULES:
        raise ValueError(f"pipeline_schedule={name!r} is not one of {', '.join(SCHEDULES)}")
    if (rounds > 1) != (name == "circular"):
        raise ValueError(f"pipeline_rounds={rounds}: circular has two or more, the others one; it is {name!r}")
    if rounds > 1 and microbatches % stages:
        raise ValueError(
            f"microbatches={microbatches} must be a multiple of pipe={stages}: a circular pipeline takes groups of them"
        )
    return Schedule(name, stages, microbatches, rounds)


# -- what runs


@dataclass(frozen=True)
class Pipeline:
    """Per-device functions, pure, and when they are called. What passes between stages is x, an array or a tree.

    `inputs` of a microbatch are any tree, the same on all stages; no gradient flows to it: the functions stop it.
    """

    first: Callable  # (ends, inputs) -> x
    stage: Callable  # (layers, x, inputs, round) -> x
    last: Callable  # (ends, x, inputs) -> (loss, metrics), or in `forward` any tree
    schedule: Schedule
    axis: str = "pipe"


def forward(pipeline: Pipeline, layers_R, ends, inputs: Callable):
    """`last` of every microbatch, stacked: right on the last stage, and to be put aside on the others.

    Per-device code, for evaluation and sampling. Arguments as of `loss_and_grads`.
    """
    of, me = pipeline.schedule, lax.axis_index(pipeline.axis)

    def tick(carry, t, *, finishes):
        message, results_M = carry
        _, m, turn, _ = of.forward_at(t, me)
        x = _enter(pipeline, ends, inputs, message, t)
        y = pipeline.stage(_index(layers_R, turn), x, inputs(m), turn)
        if finishes:
            result = _when(_finishes(of, t), lambda: pipeline.last(ends, y, inputs(m)))
            results_M = _write(results_M, m, result, _is_finished(of, t, me))
        return (_pass_on(pipeline, y, +1), results_M), None

    message = _zeros(_message_shape(pipeline, layers_R, ends, inputs))
    result = jax.eval_shape(lambda x: pipeline.last(ends, x, inputs(0)), message)
    results_M = jax.tree.map(partial(_buffer, me, of.microbatches), result)
    carry = lax.scan(partial(tick, finishes=False), (message, results_M), jnp.arange(of.first_loss))[0]
    ticks = jnp.arange(of.first_loss, of.end_forward)
    return lax.scan(partial(tick, finishes=True), carry, ticks)[0][1]


def loss_and_grads(pipeline: Pipeline, layers_R, ends, inputs: Callable):
    """Shares of loss and metrics, and the loss's gradients, summed over the microbatches.

    Per-device code under `jax.shard_map`, with check_vma=True. Of the loss, the metrics and the gradients of the ends
    each stage has a share: their sums over the axis are these. The gradients of the layers are whole.

    Args:
      layers_R: this stage's layers, a tree of arrays with a leading dim of rounds: see `rounds_of`. As `ends`, they
        vary over the axis.
      ends: tree of weights of `first` and `last`.
      inputs: number of a microbatch -> its inputs.

    Returns: (loss, metrics), gradients of layers_R, gradients of ends, in float32.
    """
    of, me = pipeline.schedule, lax.axis_index(pipeline.axis)
    slots = jnp.array(of.slots())
    num_dys = of.microbatches if of.first_backward > of.first_loss else 1  # gradients of the loss that wait

    def forward_pass(message, t):
        _, m, turn, _ = of.forward_at(t, me)
        x = _enter(pipeline, ends, inputs, message, t)
        run = lambda layers, x, inputs: pipeline.stage(layers, x, inputs, turn)
        y, backward = jax.vjp(run, _index(layers_R, turn), x, inputs(m))
        # Layers and inputs are there when the backward pass comes, and would fill a slot each. How to take residuals
        # out of a vjp: JAX's "First-class VJPs", https://docs.jax.dev/en/latest/301/vjp-objects.html
        backward.args_res[0] = backward.args_res[2] = None
        return y, backward

    def loss_of(y, t):
        _, m, _, _ = of.forward_at(t, me)
        counts = _is_finished(of, t, me)

        def with_gradients():
            loss, backward, metrics = jax.vjp(lambda w, x: pipeline.last(w, x, inputs(m)), ends, y, has_aux=True)
            dends, dy = backward(jnp.where(counts, jnp.ones_like(loss), 0))
            return jax.tree.map(lambda a: jnp.where(counts, a, 0), (loss, metrics)), dends, dy

        return _when(_finishes(of, t), with_gradients)

    def backward_pass(backward, dy, t):
        _, m, turn, busy = of.backward_at(t, me)
        dy = jax.tree.map(lambda a: jnp.where(busy, a, 0), dy)
        backward.args_res[0], backward.args_res[2] = _index(layers_R, turn), inputs(m)
        dlayers, dx, _ = backward(dy)
        embedded = (me == 0) & (turn == 0)
        dembedded = jax.tree.map(lambda a: jnp.where(embedded, a, 0), dx)
        begins = of.rounds == 1 or of.backward_at(t, 0)[2] == 0
        dends = _when(begins, lambda: jax.vjp(lambda w: pipeline.first(w, inputs(m)), ends)[1](dembedded)[0])
        return dlayers, dends, dx

    def tick(carry, t, *, forwards, losses, backwards):
        message, dx, buffers, dys, (shares, dlayers_R, dends) = carry
        if backwards:
            dmessage = _pass_on(pipeline, dx, -1)  # while the forward pass runs
        if forwards:
            y, backward = forward_pass(message, t)
            message = _pass_on(pipeline, y, +1)  # while the backward pass runs
            number, m, _, busy = of.forward_at(t, me)
            buffers = _write(buffers, slots[number], jax.tree.leaves(backward), busy)
        if losses:
            more, dends_last, dy = loss_of(y, t)
            shares, dends = _add(shares, more), _add(dends, dends_last)
            dys = _write(dys, m % num_dys, dy, True)
        if backwards:
            number, m, turn, _ = of.backward_at(t, me)
            ended = (me == of.stages - 1) & (turn == of.rounds - 1)
            dy = jax.tree.map(partial(jnp.where, ended), _index(dys, m % num_dys), dmessage)
            residuals = jax.tree.unflatten(kept, _index(buffers, slots[number]))
            dlayers, dends_first, dx = backward_pass(residuals, dy, t)
            dlayers_R = _write(dlayers_R, turn, _add(_index(dlayers_R, turn), dlayers), True)
            dends = _add(dends, dends_first)
        return (message, dx, buffers, dys, (shares, dlayers_R, dends)), None

    message = _zeros(_message_shape(pipeline, layers_R, ends, inputs))
    y, backward = jax.eval_shape(forward_pass, message, 0)
    residuals, kept = jax.tree.flatten(backward)
    shares, _, dy = jax.eval_shape(loss_of, message, 0)
    dx = jax.eval_shape(lambda dy: backward_pass(_zeros(backward), dy, 0)[2], message)
    in_float32 = lambda tree: jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), tree)
    totals = (_zeros(shares), in_float32(layers_R), in_float32(ends))
    buffers = [_buffer(me, of.live, leaf) for leaf in residuals]
    carry = (message, _zeros(dx), buffers, jax.tree.map(partial(_buffer, me, num_dys), dy), totals)
    for begin, end in [(0, of.first_loss), (of.first_loss, of.end_forward), (of.end_forward, of.num_ticks)]:
        what = of.does(begin)
        carry = lax.scan(partial(tick, **what), carry, jnp.arange(begin, end))[0]
    return carry[-1]


def _enter(pipeline, ends, inputs, message, t):
    """The input of a forward pass: what the stage before sent; on the first stage, in the first round, embedded."""
    of, me = pipeline.schedule, lax.axis_index(pipeline.axis)
    _, m, turn, _ = of.forward_at(t, me)
    begins = of.rounds == 1 or of.forward_at(t, 0)[2] == 0
    embedded = _when(begins, lambda: pipeline.first(ends, inputs(m)))
    return jax.tree.map(partial(jnp.where, (me == 0) & (turn == 0)), embedded, message)


def _message_shape(pipeline, layers_R, ends, inputs):
    def message():
        embedded = pipeline.first(ends, inputs(0))
        return _pass_on(pipeline, pipeline.stage(_index(layers_R, 0), embedded, inputs(0), 0), +1)

    return jax.eval_shape(message)


def _finishes(of: Schedule, t):
    """Whether the last stage ends a microbatch in a tick of the loop in which it computes losses."""
    return of.rounds == 1 or of.forward_at(t, of.stages - 1)[2] == of.rounds - 1


def _is_finished(of: Schedule, t, me):
    """Whether what this device has made is the end of a microbatch."""
    _, _, turn, busy = of.forward_at(t, me)
    return busy & (me == of.stages - 1) & (turn == of.rounds - 1)


def _when(condition, compute: Callable):
    """compute(), or zeros like it in the ticks in which nobody wants it; the condition is alike on all devices."""
    if condition is True:
        return compute()
    return lax.cond(condition, compute, lambda: _zeros(jax.eval_shape(compute)))


def _pass_on(pipeline: Pipeline, x, direction: int):
    """To the next stage (+1) or the previous one (-1); round the ring where there are rounds."""
    n = pipeline.schedule.stages
    pairs = [(i, (i + direction) % n) for i in range(n) if pipeline.schedule.rounds > 1 or 0 <= i + direction < n]
    return lax.ppermute(x, pipeline.axis, pairs)


def _zeros(shapes):
    return jax.tree.map(jnp.zeros_like, shapes)


def _buffer(me, size: int, shape) -> jax.Array:
    zeros = jnp.zeros_like(shape)
    zeros = jnp.where(me == 0, zeros, zeros)  # a type only: each stage has its own
    return jnp.broadcast_to(zeros, (size, *zeros.shape))


def _index(tree, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def _write(tree, i, values, valid):
    """values into place i of each array, where valid."""

    def write(a, value):
        value = value if valid is True else jnp.where(valid, value, _index(a, i))
        return lax.dynamic_update_index_in_dim(a, value, i, 0)

    return jax.tree.map(write, tree, values)


def _add(total, more):
    # XLA:TPU tries to move a reduce-scatter whose results are added up out of the loop, and fails (an internal check).
    return jax.tree.map(jnp.add, total, lax.optimization_barrier(more))


# -- which layers a stage runs


def rounds_of(layers, rounds: int, axis: str = "pipe"):
    """The layers that this stage runs, by round: [rounds, layers of a chunk, ...].

    Per-device code. Arrays with a leading dim of layers are cut over the axis in order, whatever the schedule: stage p
    has the p-th of P parts. That is what one round wants. For several, each stage sends all but one or two of its
    chunks to their stages, once a step: 1/M of what FSDP gathers, and less by the ways in which that cuts a layer.

    Args:
      layers: tree of this stage's part of the arrays.
    """
    chunks = jax.tree.map(lambda a: a.reshape(rounds, -1, *a.shape[1:]), layers)
    return chunks if rounds == 1 else _exchange(chunks, _moves(lax.axis_size(axis), rounds), axis)


def in_order(layers_R, rounds: int, axis: str = "pipe"):
    """The way back of `rounds_of`, for the gradients."""
    if rounds > 1:
        back = [[(there, here) for here, there in turn] for turn in _moves(lax.axis_size(axis), rounds)]
        layers_R = _exchange(layers_R, back, axis)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), layers_R)


def _moves(stages: int, rounds: int) -> list[list[tuple[tuple[int, int], tuple[int, int]]]]:
    """((stage, place) now, (stage, round) then) of every chunk, in turns: in each, a stage sends and receives one.

    Chunk c lies on stage c // rounds and runs on stage c % stages. A stage's chunks are `rounds` in a row, so they take
    all turns. Those that it receives are `stages` apart and repeat modulo `rounds` after `lcm`: then the turn shifts.
    """
    lcm = math.lcm(stages, rounds)
    turns = [[] for _ in range(rounds)]
    for c in range(stages * rounds):
        turns[(c + c // lcm) % rounds].append((divmod(c, rounds), divmod(c, stages)[::-1]))
    return turns


def _exchange(chunks, turns, axis: str):
    me, received = lax.axis_index(axis), chunks
    for turn in turns:
        sent_from = jnp.array([place for (_, place), _ in sorted(turn)])[me]
        goes_to = jnp.array([place for _, (_, place) in sorted(turn, key=lambda move: move[1])])[me]
        piece = lax.ppermute(_index(chunks, sent_from), axis, [(here, there) for (here, _), (there, _) in turn])
        received = _write(received, goes_to, piece, True)
    return received


# -- what it looks like


def idle_share(of: Schedule, forward_s: float = 1.0, backward_s: float = 2.0) -> float:
    """Share of the time in which a stage has nothing to do: counted, a tick being as long as what any stage does in it.

    Raises ValueError if stages do not all do the same work.
    """
    total, working = 0.0, [0.0] * of.stages
    for tick in range(of.num_ticks):
        does = of.does(tick)
        total += forward_s * does["forwards"] + backward_s * does["backwards"]
        for stage in range(of.stages):
            working[stage] += forward_s * of.forward_at(tick, stage)[-1] + backward_s * of.backward_at(tick, stage)[-1]
    if len(set(working)) > 1:
        raise ValueError(f"stages do not all do the same work: {working} s")
    return 1 - working[0] / total


def timeline(of: Schedule, width: int = 2) -> str:
    """A line a stage; a forward pass is the microbatch's digit `width` times, a backward pass its letter twice that."""
    lines = []
    for stage in range(of.stages):
        line = ""
        for tick in range(of.num_ticks):
            does = of.does(tick)
            _, m, _, busy = of.forward_at(tick, stage)
            line += ("0123456789"[m % 10] if busy else ".") * width * does["forwards"]
            _, m, _, busy = of.backward_at(tick, stage)
            line += ("abcdefghij"[m % 10] if busy else ".") * width * 2 * does["backwards"]
        lines.append(f"stage {stage}  {line}")
    return "\n".join(lines)


def main() -> None:
    """Timelines, and a small network whose gradients are compared with those of one device."""
    L, D, stages, microbatches = 8, 32, 4, 8
    keys = jax.random.split(jax.random.key(0), 3)
    layers_LDD = 0.2 * jax.random.normal(keys[0], (L, D, D))
    ends = {"in": jax.random.normal(keys[1], (D, D)) / D**0.5, "out": jnp.ones(D)}
    x_MbD = jax.random.normal(keys[2], (microbatches, 4, D))
    mesh = jax.make_mesh((stages,), ("pipe",), axis_types=(AxisType.Auto,))

    first = lambda ends, inputs: inputs @ ends["in"]
    run = lambda layers, x, inputs, turn: lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0]
    last = lambda ends, x, inputs: (jnp.mean((x @ ends["out"] - jnp.sum(inputs, -1)) ** 2), {})

    def plain(layers, ends):
        return jnp.sum(jax.vmap(lambda x_bD: last(ends, run(layers, first(ends, x_bD), x_bD, 0), x_bD)[0])(x_MbD))

    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(layers_LDD, ends)
    print(
        "forward passes are digits, backward passes letters, twice as long; a character is the same time everywhere\n"
    )
    for name, rounds in (("gpipe", 1), ("1f1b", 1), ("circular", 2)):
        of = schedule_of(name, stages, microbatches, rounds)

        def per_device(layers, ends, x_MbD, of=of):
            ends, x_MbD = lax.pcast((ends, x_MbD), "pipe", to="varying")
            layers_R = rounds_of(layers, of.rounds)
            pipeline = Pipeline(first, run, last, of)
            _, dlayers_R, dends = loss_and_grads(pipeline, layers_R, ends, lambda m: lax.stop_gradient(x_MbD[m]))
            return in_order(dlayers_R, of.rounds), lax.psum(dends, "pipe")

        sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(P("pipe"), P(), P()), out_specs=(P("pipe"), P()))
        grads = jax.jit(sharded)(layers_LDD, ends, x_MbD)
        off = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), grads, expected)
        print(f"{name}, {stages} stages, {microbatches} microbatches, rounds: {rounds}")
        print(timeline(of, 2 // rounds))
        print(
            f"idle {idle_share(of):.1%}, counted; (P-1)/(vM+P-1) = {(stages - 1) / (of.passes + stages - 1):.1%}. "
            f"Residuals of {of.live} passes at once, each 1/{rounds} of a stage\n"
            f"gradients differ from one device's by {max(jax.tree.leaves(off)):.0e}, relative, measured\n"
        )


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__, devices=8)
