"""Tests schedules against their formulas, the loops over ticks against one device, the model against its reference."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import EXPERTS, SMALL, check_gradients, check_steps, collectives, equations, init, make_batch, trace

import evaluation
import parameters
import pipeline
import placement
import rules
import sharding
from config import Config
from pipeline import Schedule, make_schedule
from predicted import bounds

# name, stages, microbatches, rounds
SCHEDULES = [
    *[("gpipe", 2, 5, 1), ("gpipe", 4, 4, 1), ("gpipe", 8, 16, 1), ("gpipe", 1, 3, 1)],
    *[("1f1b", 2, 8, 1), ("1f1b", 4, 3, 1), ("1f1b", 4, 16, 1), ("1f1b", 8, 11, 1), ("1f1b", 1, 2, 1)],
    *[("circular", 2, 8, 2), ("circular", 2, 2, 3), ("circular", 4, 12, 2), ("circular", 4, 4, 5)],
    *[("circular", 8, 32, 2), ("circular", 8, 8, 4)],
]
every_schedule = pytest.mark.parametrize("schedule", [make_schedule(*args) for args in SCHEDULES], ids=repr)


def passes(schedule: Schedule, at) -> dict[tuple[int, int], int]:
    """{(microbatch, chunk): tick} by `schedule.forward_at` or `backward_at`; chunk c is on stage c % P."""
    ticks = {}
    for tick in range(schedule.num_ticks):
        for stage in range(schedule.stages):
            _, m, r, busy = at(tick, stage)
            if busy:
                assert (m, r * schedule.stages + stage) not in ticks
                ticks[m, r * schedule.stages + stage] = tick
    return ticks


# -- the schedule


@every_schedule
def test_every_pass_follows_the_one_it_waits_for_by_a_tick(schedule):
    forward, backward = passes(schedule, schedule.forward_at), passes(schedule, schedule.backward_at)
    chunks = schedule.rounds * schedule.stages
    assert set(forward) == set(backward) == {(m, c) for m in range(schedule.microbatches) for c in range(chunks)}
    for m, c in forward:
        if c > 0:
            assert forward[m, c] == forward[m, c - 1] + 1
            assert backward[m, c - 1] == backward[m, c] + 1
    for m in range(schedule.microbatches):
        waits = backward[m, chunks - 1] - forward[m, chunks - 1]
        # The loss between them is computed in the forward pass's tick.
        assert waits > 0 if schedule.name == "gpipe" else waits == 0


@every_schedule
def test_the_loops_hold_all_passes(schedule):
    for at, work in ((schedule.forward_at, "forwards"), (schedule.backward_at, "backwards")):
        for tick in range(schedule.num_ticks):
            assert schedule.work_at(tick)[work] or not any(at(tick, stage)[-1] for stage in range(schedule.stages))
    changes = {t for t in range(1, schedule.num_ticks) if schedule.work_at(t) != schedule.work_at(t - 1)}
    assert changes <= {schedule.first_loss, schedule.end_forward}


@every_schedule
@pytest.mark.parametrize("times", [(1.0, 2.0), (1.0, 3.0), (5.0, 1.0)])
def test_the_counted_bubble_equals_the_predicted_one(schedule, times):
    predicted = bounds.bubble(schedule.stages, schedule.microbatches, schedule.rounds)
    assert pipeline.idle_share(schedule, *times) == pytest.approx(predicted)


def live(schedule: Schedule, stage: int) -> int:
    """The most passes in flight at once on a stage: begun forward and not ended backward, counted tick by tick."""
    in_flight, most = set(), 0
    for tick in range(schedule.num_ticks):
        number, _, _, busy = schedule.forward_at(tick, stage)
        in_flight |= {number} if busy else set()
        most = max(most, len(in_flight))
        number, _, _, busy = schedule.backward_at(tick, stage)
        if busy:
            in_flight.remove(number)
    assert not in_flight
    return most


@every_schedule
def test_residuals_of_as_many_passes_wait_as_predicted(schedule):
    predicted = (schedule.rounds + 1) * schedule.stages - 1 if schedule.name != "gpipe" else schedule.passes
    assert schedule.live == live(schedule, 0) == min(predicted, schedule.passes)
    if schedule.name == "1f1b" and schedule.microbatches >= 2 * schedule.stages:
        for p in range(schedule.stages):
            assert live(schedule, p) == 2 * (schedule.stages - 1 - p) + 1


@every_schedule
def test_no_slot_is_overwritten_before_it_is_read(schedule):
    slots = schedule.slots()
    for stage in range(schedule.stages):
        held = {}
        for tick in range(schedule.num_ticks):
            number, _, _, busy = schedule.forward_at(tick, stage)
            if busy:
                assert slots[number] not in held
                held[slots[number]] = number
            number, _, _, busy = schedule.backward_at(tick, stage)
            if busy:
                assert held.pop(slots[number]) == number
            elif schedule.work_at(tick)["backwards"]:  # what an idle stage reads was written before
                assert schedule.forward_at(number + stage, stage)[0] == number and number + stage <= tick


@pytest.mark.parametrize(
    "call, words",
    [
        (partial(make_schedule, "zigzag", 2, 2), "'zigzag' is not one of gpipe, 1f1b, circular"),
        (partial(make_schedule, "1f1b", 2, 2, 2), "pipeline_rounds=2: circular has two or more"),
        (partial(make_schedule, "circular", 2, 2, 1), "pipeline_rounds=1: circular has two or more"),
        (partial(make_schedule, "circular", 4, 6, 2), "microbatches=6 must be a multiple of pipe=4"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# -- a network that is not the model's: L layers of tanh between two matrices


L, D, ROWS = 16, 8, 3


def first(ends, inputs):
    return inputs @ ends["in"], jnp.zeros_like(inputs[0, 0])


def stage(layers, x, inputs, r):
    """Passes on a tree, which is NaN where x is zeros, as on idle stages."""

    def layer(x, w):
        x, sum_of_norms = x
        norm = jnp.sqrt(jnp.sum(x * x))
        return (x / norm + jnp.tanh(x @ w), sum_of_norms + norm), None

    return lax.scan(layer, x, layers)[0]


def last(ends, x, inputs):
    x, sum_of_norms = x
    return jnp.mean((x @ ends["out"] - inputs) ** 2) + 0.01 * sum_of_norms, {"norms": sum_of_norms}


def network(microbatches: int):
    keys = jax.random.split(jax.random.key(0), 4)
    layers = 0.3 * jax.random.normal(keys[0], (L, D, D))
    ends = {"in": jax.random.normal(keys[1], (D, D)), "out": jax.random.normal(keys[2], (D, D))}
    return layers, ends, jax.random.normal(keys[3], (microbatches, ROWS, D))


@jax.jit
def plain(layers, ends, inputs_M):
    """Returns the sum of the losses with its gradients, and the losses, on one device."""

    def losses(layers, ends):
        loss_of = lambda inputs: last(ends, stage(layers, first(ends, inputs), inputs, 0), inputs)
        losses_M, metrics_M = jax.vmap(loss_of)(inputs_M)
        return jnp.sum(losses_M), (losses_M, jnp.sum(metrics_M["norms"]))

    return jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)(layers, ends)


def piped(schedule: Schedule, stage=stage):
    def per_device(layers, ends, inputs_M):
        ends, inputs_M = lax.pcast((ends, inputs_M), "pipe", to="varying")
        inputs = lambda m: lax.stop_gradient(inputs_M[m])
        layers_R = pipeline.to_rounds(layers, schedule.rounds)
        pipe = pipeline.Pipeline(first, stage, last, schedule)
        (loss, metrics), dlayers_R, dends = pipeline.loss_and_grads(pipe, layers_R, ends, inputs)
        losses, _ = pipeline.forward(pipe, layers_R, ends, inputs)
        losses = jnp.where(lax.axis_index("pipe") == schedule.stages - 1, losses, 0)
        summed = lax.psum((loss, losses, metrics["norms"], dends), "pipe")
        return *summed, pipeline.from_rounds(dlayers_R, schedule.rounds)

    mesh = jax.make_mesh((schedule.stages,), ("pipe",), axis_types=(AxisType.Auto,))
    out_specs = (P(), P(), P(), P(), P("pipe"))
    return jax.shard_map(per_device, mesh=mesh, in_specs=(P("pipe"), P(), P()), out_specs=out_specs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [("gpipe", 4, 5, 1), ("1f1b", 8, 9, 1), ("1f1b", 4, 2, 1), ("circular", 4, 8, 2), ("circular", 2, 4, 4)],
    ids=repr,
)
def test_losses_and_gradients_equal_those_of_one_device(args):
    schedule = make_schedule(*args)
    arguments = network(schedule.microbatches)
    results = jax.jit(piped(schedule))(*arguments)
    (loss, (losses, norms)), (dlayers, dends) = plain(*arguments)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves((loss, losses, norms, dends, dlayers)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def carried(schedule: Schedule, stage=stage) -> list[tuple[int, ...]]:
    """Returns the shapes of all that the loops over ticks carry or stack."""
    shapes = []
    for eqn in equations(jax.make_jaxpr(piped(schedule, stage))(*network(schedule.microbatches)).jaxpr):
        if eqn.primitive.name == "scan" and any(e.primitive.name == "ppermute" for e in eqn.params["jaxpr"].jaxpr.eqns):
            shapes += [var.aval.shape for var in eqn.outvars]
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("args", [("gpipe", 4, 13, 1), ("1f1b", 4, 13, 1), ("circular", 4, 12, 2)], ids=repr)
def test_the_buffer_has_as_many_slots_as_the_schedule_says(args):
    """The buffer holds the inputs of all layers of a chunk, and no weights; nothing else has a dim of microbatches."""
    schedule = make_schedule(*args)
    shapes = carried(schedule)
    layers = L // schedule.stages // schedule.rounds
    assert (schedule.live, layers, ROWS, D) in shapes
    assert not [shape for shape in shapes if shape[-2:] == (D, D) and shape[:-2] not in [(), (schedule.rounds, layers)]]
    waiting = {shape[0] for shape in shapes if len(shape) >= 3 and shape[-2:] == (ROWS, D)}
    assert waiting <= {schedule.live, 1}


@pytest.mark.slow
def test_a_recomputed_stage_saves_only_its_input():
    schedule = make_schedule("1f1b", 4, 13)
    recomputed = jax.checkpoint(stage)
    shapes = carried(schedule, recomputed)
    assert (schedule.live, ROWS, D) in shapes and (schedule.live, L // 4, ROWS, D) not in shapes
    arguments = network(schedule.microbatches)
    results = [jax.tree.leaves(jax.jit(piped(schedule, f))(*arguments)) for f in (recomputed, stage)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 6, 8])
def test_layers_go_to_the_stages_that_run_them_and_return(stages, rounds):
    mesh = jax.make_mesh((stages,), ("pipe",), axis_types=(AxisType.Auto,))
    layers = jnp.arange(2 * stages * rounds)

    def per_device(layers):
        layers_R = pipeline.to_rounds(layers, rounds)
        return layers_R, pipeline.from_rounds(layers_R, rounds)

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=P("pipe"), out_specs=(P(None, "pipe"), P("pipe")))
    layers_R, returned = jax.jit(sharded)(layers)
    np.testing.assert_array_equal(layers_R, layers.reshape(rounds, 2 * stages))
    np.testing.assert_array_equal(returned, layers)


# -- the model in stages


EIGHT = (
    SMALL
    | dict(num_layers=8, model_dim=32, num_heads=4, num_kv_heads=4, head_dim=8, batch=16, seq_len=8)
    | dict(loss_chunk=4)
)
CIRCULAR = dict(pipeline_schedule="circular", pipeline_rounds=2)
GPIPE = dict(pipeline_schedule="gpipe")


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(mesh="pipe:2,fsdp:2,tensor:2", microbatches=4, remat="full"),
        dict(mesh="data:2,pipe:2,fsdp:2", microbatches=4, shard_update=True, **CIRCULAR),
        dict(mesh="pipe:2,fsdp:4", microbatches=2, prefetch=False, collectives="ring", **GPIPE),
        dict(mesh="pipe:2,tensor:4", microbatches=8, remat="full", collective_matmul=True),
        dict(mesh="pipe:2,context:2,tensor:2", microbatches=4, remat="full", remat_stage=True),
        dict(mesh="pipe:2,fsdp:2,context:2", microbatches=4, **CIRCULAR),
        dict(mesh="pipe:4,fsdp:2", microbatches=8, remat="full", shard_update=True, **CIRCULAR),
        dict(mesh="pipe:4,tensor:2", microbatches=16, **GPIPE),
        dict(mesh="pipe:8", microbatches=16),
        dict(mesh="pipe:8", microbatches=8, remat="save_qkv_proj", **GPIPE),
        dict(mesh="pipe:2,fsdp:4", microbatches=4, pipeline_schedule="circular", pipeline_rounds=4),
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_loss_and_gradients_equal_the_reference(options):
    check_gradients(Config(**EIGHT | options))


@pytest.mark.slow
def test_stages_of_experts_equal_the_reference():
    """Without the load-balance loss, which depends on how the batch is split into microbatches."""
    options = dict(load_balance_loss=0.0, microbatches=4, mesh="pipe:2,expert:2,tensor:2", remat="full")
    check_gradients(Config(**EIGHT | EXPERTS | options))


FOUR = EIGHT | dict(num_layers=4, model_dim=64)  # a layer for each of two stages and two rounds


@pytest.mark.slow
def test_layers_know_their_numbers_in_all_rounds():
    """A window in two of three layers; norms and biases; tied embeddings."""
    variant = dict(window=3, global_every=3, qk_norm=True, qkv_bias=True, tied_embeddings=True)
    check_gradients(Config(**FOUR, **variant, mesh="pipe:2,fsdp:2,tensor:2", microbatches=4, **CIRCULAR))


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(mesh="pipe:4,fsdp:2"), dict(mesh="data:2,pipe:2,fsdp:2", **CIRCULAR)])
def test_parameters_after_three_steps_equal_the_reference(options):
    check_steps(Config(**FOUR, **options, microbatches=2, shard_update=True), steps=3)


@pytest.mark.slow
def test_stages_sum_only_the_ends_and_scalars():
    """Stages sum the ends' gradients and a few scalars, and else exchange messages alone."""
    config = Config(**EIGHT, mesh="pipe:2,fsdp:2,tensor:2", microbatches=4)
    shapes = parameters.param_shapes(config)
    shard = lambda shape: (shape[0] // 2, shape[1] // 2) if len(shape) > 1 else (shape[0] // 4,)
    ends = sorted(shard(leaf.shape) for leaf in (shapes.embed, shapes.norm, shapes.unembed))
    moved = collectives(config, "pipe")
    summed = sorted(shape for name, _, shape in moved if name.startswith("psum") and math.prod(shape) > 1)
    assert summed == ends
    b, t, d = config.batch // 2 // config.microbatches, config.seq_len, config.model_dim // 2
    messages = [shape for name, _, shape in moved if name == "ppermute"]
    assert messages == [(b, t, d)] * 4  # forward and backward; the loops have two of them each


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [GPIPE, dict()], ids=lambda schedule: schedule.get("pipeline_schedule", "1f1b"))
def test_layer_inputs_of_the_predicted_microbatches_wait(schedule):
    config = Config(**EIGHT, mesh="pipe:4,tensor:2", microbatches=8, remat="full", **schedule)
    carried = set()
    for eqn in equations(trace(config)):
        if eqn.primitive.name == "scan" and any(e.primitive.name == "ppermute" for e in eqn.params["jaxpr"].jaxpr.eqns):
            carried |= {var.aval.shape for var in eqn.outvars}
    slots = {shape[0] for shape in carried if shape[1:] == (2, 2, config.seq_len, config.model_dim // 2)}
    assert slots == {8 if schedule else 7}
    weights = [shape for shape in carried if config.ff_dim // 2 in shape and config.model_dim in shape]
    assert set(weights) == {(1, 2, config.model_dim, config.ff_dim // 2), (1, 2, config.ff_dim // 2, config.model_dim)}


def placed(config: Config):
    """Returns the mesh, and the parameters and a batch on it."""
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), jax.devices()[: 1 if config.mesh == "" else 8])
    place = lambda tree, specs: jax.tree.map(
        lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec)), tree, specs
    )
    params, batch = place(init(config), parameters.param_specs(config)), make_batch(config)
    return mesh, params, jax.tree.map(lambda a: place(a, sharding.BATCH_SPEC), batch)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [dict(), CIRCULAR], ids=["1f1b", "circular"])
def test_evaluation_equals_that_without_a_pipeline(schedule):
    config = Config(**EIGHT, mesh="pipe:4,tensor:2", microbatches=4, **schedule)
    unpiped = dataclasses.replace(config, mesh="tensor:2,fsdp:4", pipeline_schedule="1f1b", pipeline_rounds=1)
    losses = []
    for case in (config, unpiped):
        mesh, params, batch = placed(case)
        losses.append(evaluation.make_eval_step(case, mesh)(params, batch))
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            dict(mesh="pipe:3"),
            "num_layers=8 must be a multiple of pipe \\* pipeline_rounds = 3 .* pipe can be 1, 2, 4, 8",
        ),
        (dict(mesh="pipe:2", microbatches=3, **CIRCULAR), "microbatches=3 must be a multiple of pipe=2"),
        (
            EXPERTS | dict(mesh="pipe:2,fsdp:2", num_dense_layers=2, buffer_factor=Config.buffer_factor),
            "num_dense_layers=2: the stages of mesh axis pipe:2",
        ),
    ],
)
def test_impossible_stages_are_refused(flags, words):
    config = Config(**EIGHT | dict(batch=6) | flags)
    with pytest.raises(ValueError, match=words):
        rules.check(config, placement.parse_mesh(config.mesh))


def test_rounds_without_the_circular_schedule_are_refused():
    with pytest.raises(ValueError, match="pipeline_rounds=2 with pipeline_schedule=1f1b: circular has two"):
        Config(pipeline_rounds=2)


@pytest.mark.slow
def test_the_demonstration_shows_timelines_and_equal_gradients(capsys):
    pipeline.main()
    shown = capsys.readouterr().out
    assert shown.count("stage 3") == 3
    assert "stage 3  ......00aaaa11bbbb22cccc33dddd44eeee55ffff66gggg77hhhh............\nidle 27.3%, counted" in shown
    assert "idle 15.8%, counted; (P-1)/(vM+P-1) = 15.8%" in shown
    for line in shown.splitlines():
        if line.startswith("gradients differ"):
            assert float(line.split("by ")[1].split(",")[0]) < 1e-6
