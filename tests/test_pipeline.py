"""Schedules held to what they promise, the loops over ticks to a network on one device, the model to its reference."""

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
import sampling
import sharding
from config import Config
from pipeline import Schedule, schedule_of
from predicted import bounds

# name, stages, microbatches, rounds
SCHEDULES = [
    *[("gpipe", 2, 5, 1), ("gpipe", 4, 4, 1), ("gpipe", 8, 16, 1), ("gpipe", 1, 3, 1)],
    *[("1f1b", 2, 8, 1), ("1f1b", 4, 3, 1), ("1f1b", 4, 16, 1), ("1f1b", 8, 11, 1), ("1f1b", 1, 2, 1)],
    *[("circular", 2, 8, 2), ("circular", 2, 2, 3), ("circular", 4, 12, 2), ("circular", 4, 4, 5)],
    *[("circular", 8, 32, 2), ("circular", 8, 8, 4)],
]
every_schedule = pytest.mark.parametrize("of", [schedule_of(*args) for args in SCHEDULES], ids=repr)


def passes(of: Schedule, at) -> dict[tuple[int, int], int]:
    """{(microbatch, chunk): tick} of `of.forward_at` or `of.backward_at`; chunk c is on stage c % P."""
    ticks = {}
    for tick in range(of.num_ticks):
        for stage in range(of.stages):
            _, m, turn, busy = at(tick, stage)
            if busy:
                assert (m, turn * of.stages + stage) not in ticks
                ticks[m, turn * of.stages + stage] = tick
    return ticks


# -- the schedule


@every_schedule
def test_every_pass_follows_the_one_it_waits_for_by_a_tick(of):
    forward, backward = passes(of, of.forward_at), passes(of, of.backward_at)
    chunks = of.rounds * of.stages
    assert set(forward) == set(backward) == {(m, c) for m in range(of.microbatches) for c in range(chunks)}
    for m, c in forward:
        if c > 0:
            assert forward[m, c] == forward[m, c - 1] + 1
            assert backward[m, c - 1] == backward[m, c] + 1
    for m in range(of.microbatches):
        waits = backward[m, chunks - 1] - forward[m, chunks - 1]
        assert waits > 0 if of.name == "gpipe" else waits == 0  # the loss in between is in the forward pass's tick


@every_schedule
def test_the_loops_hold_all_passes(of):
    for at, does in ((of.forward_at, "forwards"), (of.backward_at, "backwards")):
        for tick in range(of.num_ticks):
            assert of.does(tick)[does] or not any(at(tick, stage)[-1] for stage in range(of.stages))
    changes = {t for t in range(1, of.num_ticks) if of.does(t) != of.does(t - 1)}
    assert changes <= {of.first_loss, of.end_forward}


@every_schedule
@pytest.mark.parametrize("times", [(1.0, 2.0), (1.0, 3.0), (5.0, 1.0)])
def test_the_counted_bubble_is_the_predicted_one(of, times):
    assert pipeline.idle_share(of, *times) == pytest.approx(bounds.bubble(of.stages, of.microbatches, of.rounds))


def live(of: Schedule, stage: int) -> int:
    """Most passes that a stage has begun and not ended backward, counted tick by tick."""
    under_way, most = set(), 0
    for tick in range(of.num_ticks):
        number, _, _, busy = of.forward_at(tick, stage)
        under_way |= {number} if busy else set()
        most = max(most, len(under_way))
        number, _, _, busy = of.backward_at(tick, stage)
        if busy:
            under_way.remove(number)
    assert not under_way
    return most


@every_schedule
def test_residuals_of_as_many_passes_wait_as_promised(of):
    promised = (of.rounds + 1) * of.stages - 1 if of.name != "gpipe" else of.passes
    assert of.live == live(of, 0) == min(promised, of.passes)
    if of.name == "1f1b" and of.microbatches >= 2 * of.stages:
        assert [live(of, p) for p in range(of.stages)] == [2 * (of.stages - 1 - p) + 1 for p in range(of.stages)]


@every_schedule
def test_no_slot_is_taken_before_it_is_read(of):
    slots = of.slots()
    for stage in range(of.stages):
        held = {}
        for tick in range(of.num_ticks):
            number, _, _, busy = of.forward_at(tick, stage)
            if busy:
                assert slots[number] not in held
                held[slots[number]] = number
            number, _, _, busy = of.backward_at(tick, stage)
            if busy:
                assert held.pop(slots[number]) == number
            elif of.does(tick)["backwards"]:  # what an idle stage reads was written before
                assert of.forward_at(number + stage, stage)[0] == number and number + stage <= tick


@pytest.mark.parametrize(
    "call, words",
    [
        (partial(schedule_of, "zigzag", 2, 2), "'zigzag' is not one of gpipe, 1f1b, circular"),
        (partial(schedule_of, "1f1b", 2, 2, 2), "pipeline_rounds=2: circular has two or more"),
        (partial(schedule_of, "circular", 2, 2, 1), "pipeline_rounds=1: circular has two or more"),
        (partial(schedule_of, "circular", 4, 6, 2), "microbatches=6 must be a multiple of pipe=4"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# -- a network of which the pipeline knows nothing: L layers of tanh between two matrices


L, D, ROWS = 16, 8, 3


def first(ends, inputs):
    return inputs @ ends["in"], jnp.zeros_like(inputs[0, 0])


def stage(layers, x, inputs, turn):
    """What passes is a tree. On zeros, which idle stages have, it is not a number."""

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
    """Sum of the losses with its gradients, and the losses, on one device."""

    def losses(layers, ends):
        one = lambda inputs: last(ends, stage(layers, first(ends, inputs), inputs, 0), inputs)
        losses_M, metrics_M = jax.vmap(one)(inputs_M)
        return jnp.sum(losses_M), (losses_M, jnp.sum(metrics_M["norms"]))

    return jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)(layers, ends)


def piped(of: Schedule, stage=stage):
    def per_device(layers, ends, inputs_M):
        ends, inputs_M = lax.pcast((ends, inputs_M), "pipe", to="varying")
        inputs = lambda m: lax.stop_gradient(inputs_M[m])
        layers_R = pipeline.rounds_of(layers, of.rounds)
        whole = pipeline.Pipeline(first, stage, last, of)
        (loss, metrics), dlayers_R, dends = pipeline.loss_and_grads(whole, layers_R, ends, inputs)
        losses, _ = pipeline.forward(whole, layers_R, ends, inputs)
        losses = jnp.where(lax.axis_index("pipe") == of.stages - 1, losses, 0)
        summed = lax.psum((loss, losses, metrics["norms"], dends), "pipe")
        return *summed, pipeline.in_order(dlayers_R, of.rounds)

    mesh = jax.make_mesh((of.stages,), ("pipe",), axis_types=(AxisType.Auto,))
    out_specs = (P(), P(), P(), P(), P("pipe"))
    return jax.shard_map(per_device, mesh=mesh, in_specs=(P("pipe"), P(), P()), out_specs=out_specs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [("gpipe", 4, 5, 1), ("1f1b", 8, 9, 1), ("1f1b", 4, 2, 1), ("circular", 4, 8, 2), ("circular", 2, 4, 4)],
    ids=repr,
)
def test_losses_and_gradients_are_those_of_one_device(args):
    of = schedule_of(*args)
    arguments = network(of.microbatches)
    loss, losses, norms, dends, dlayers = jax.jit(piped(of))(*arguments)
    (want_loss, (want_losses, want_norms)), (want_dlayers, want_dends) = plain(*arguments)
    found, wanted = (
        (loss, losses, norms, dends, dlayers),
        (want_loss, want_losses, want_norms, want_dends, want_dlayers),
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def carried(of: Schedule, stage=stage) -> list[tuple[int, ...]]:
    """Shapes of all that the loops over ticks carry, and of what they stack up."""
    shapes = []
    for eqn in equations(jax.make_jaxpr(piped(of, stage))(*network(of.microbatches)).jaxpr):
        if eqn.primitive.name == "scan" and any(e.primitive.name == "ppermute" for e in eqn.params["jaxpr"].jaxpr.eqns):
            shapes += [var.aval.shape for var in eqn.outvars]
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("args", [("gpipe", 4, 13, 1), ("1f1b", 4, 13, 1), ("circular", 4, 12, 2)], ids=repr)
def test_the_buffer_has_as_many_slots_as_the_schedule_promises(args):
    """Inputs of all layers of a chunk wait in it, and no weights; nothing else there is for each microbatch."""
    of = schedule_of(*args)
    shapes = carried(of)
    layers = L // of.stages // of.rounds
    assert (of.live, layers, ROWS, D) in shapes
    assert not [shape for shape in shapes if shape[-2:] == (D, D) and shape[:-2] not in [(), (of.rounds, layers)]]
    waiting = {shape[0] for shape in shapes if len(shape) >= 3 and shape[-2:] == (ROWS, D)}
    assert waiting <= {of.live, 1}


@pytest.mark.slow
def test_a_recomputed_stage_leaves_its_input_alone():
    of = schedule_of("1f1b", 4, 13)
    recomputed = jax.checkpoint(stage)
    shapes = carried(of, recomputed)
    assert (of.live, ROWS, D) in shapes and (of.live, L // 4, ROWS, D) not in shapes
    arguments = network(of.microbatches)
    for a, b in zip(*(jax.tree.leaves(jax.jit(piped(of, f))(*arguments)) for f in (recomputed, stage)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 6, 8])
def test_layers_go_to_the_stages_that_run_them_and_back(stages, rounds):
    mesh = jax.make_mesh((stages,), ("pipe",), axis_types=(AxisType.Auto,))
    layers = jnp.arange(2 * stages * rounds)

    def per_device(layers):
        layers_R = pipeline.rounds_of(layers, rounds)
        return layers_R, pipeline.in_order(layers_R, rounds)

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=P("pipe"), out_specs=(P(None, "pipe"), P("pipe")))
    layers_R, back = jax.jit(sharded)(layers)
    np.testing.assert_array_equal(layers_R, layers.reshape(rounds, 2 * stages))
    np.testing.assert_array_equal(back, layers)


# -- the model in stages


EIGHT = (
    SMALL
    | dict(num_layers=8, model_dim=32, num_heads=4, num_kv_heads=4, head_dim=8, batch=16, seq_len=8)
    | dict(loss_chunk=4)
)
CIRCULAR = dict(pipeline_schedule="circular", pipeline_rounds=2)
GPIPE = dict(pipeline_schedule="gpipe")


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
@pytest.mark.parametrize("options", [dict(mesh="pipe:2,expert:2,tensor:2", remat="full"), dict(mesh="pipe:4,expert:2")])
def test_stages_of_experts_equal_the_reference(options):
    """Without the balance's loss, which is of each microbatch and so another one than the whole batch's."""
    check_gradients(Config(**EIGHT | EXPERTS | dict(load_balance_loss=0.0), microbatches=4, **options))


FOUR = EIGHT | dict(num_layers=4, model_dim=64)  # a layer for each of two stages and two rounds


@pytest.mark.slow
def test_layers_know_their_numbers_in_all_rounds():
    """A window in all layers but every third; norms and biases; a look-up table that is also the unembedding."""
    variant = dict(window=3, global_every=3, qk_norm=True, qkv_bias=True, tied_embeddings=True)
    check_gradients(Config(**FOUR, **variant, mesh="pipe:2,fsdp:2,tensor:2", microbatches=4, **CIRCULAR))


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(mesh="pipe:4,fsdp:2"), dict(mesh="data:2,pipe:2,fsdp:2", **CIRCULAR)])
def test_parameters_after_three_steps_equal_the_reference(options):
    check_steps(Config(**FOUR, **options, microbatches=2, shard_update=True), steps=3)


@pytest.mark.slow
def test_only_what_all_stages_have_is_summed_over_them():
    """The ends' gradients and a few scalars; else the stages exchange messages alone."""
    config = Config(**EIGHT, mesh="pipe:2,fsdp:2,tensor:2", microbatches=4)
    shapes = parameters.param_shapes(config)
    cut = lambda shape: (shape[0] // 2, shape[1] // 2) if len(shape) > 1 else (shape[0] // 4,)
    ends = sorted(cut(leaf.shape) for leaf in (shapes.embed, shapes.norm, shapes.unembed))
    moved = collectives(config, "pipe")
    summed = sorted(shape for name, _, shape in moved if name.startswith("psum") and math.prod(shape) > 1)
    assert summed == ends
    b, t, d = config.batch // 2 // config.microbatches, config.seq_len, config.model_dim // 2
    messages = [shape for name, _, shape in moved if name == "ppermute"]
    assert messages == [(b, t, d)] * 4  # forward and backward; the loops have two of them each


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [GPIPE, dict()], ids=lambda schedule: schedule.get("pipeline_schedule", "1f1b"))
def test_layer_inputs_of_the_promised_microbatches_wait(schedule):
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
    """The parameters and a batch, and the mesh."""
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), jax.devices()[: 1 if config.mesh == "" else 8])
    place = lambda tree, specs: jax.tree.map(
        lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec)), tree, specs
    )
    params, batch = place(init(config), parameters.param_specs(config)), make_batch(config)
    return mesh, params, jax.tree.map(lambda a: place(a, sharding.BATCH_SPEC), batch)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [dict(), CIRCULAR], ids=["1f1b", "circular"])
def test_evaluation_and_sampling_are_as_on_one_device(schedule):
    config = Config(**EIGHT | dict(sample=3), mesh="pipe:4,tensor:2", microbatches=4, **schedule)
    whole = dataclasses.replace(config, mesh="tensor:2,fsdp:4", pipeline_schedule="1f1b", pipeline_rounds=1)
    found = []
    for one in (config, whole):
        mesh, params, batch = placed(one)
        mesh_rows = 4 * 4 // mesh.shape["pipe"]  # of sequences: four on each device, whose noise is the same
        prompt_BT = jnp.tile(jnp.arange(6, dtype=jnp.int32), (mesh_rows, 1))
        sampler = sampling.make_sampler(one, mesh, one.vocab_size)
        sampled_BT = sampler(params, prompt_BT, jnp.int32(3), jax.random.key(0))
        found.append((evaluation.make_eval_step(one, mesh)(params, batch), sampled_BT[:4]))
    (ours, our_sample), (theirs, their_sample) = found
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_array_equal(our_sample, their_sample)


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
def test_stages_that_cannot_be_are_refused(flags, words):
    config = Config(**EIGHT | dict(batch=6) | flags)
    with pytest.raises(ValueError, match=words):
        rules.check(config, placement.parse_mesh(config.mesh))


def test_rounds_without_a_circle_are_refused():
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
