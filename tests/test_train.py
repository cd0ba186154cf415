"""The run: it learns, shows what it does, skips what is not finite, and profiles what it is asked to."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from support import SMALL, assert_close, first_state, init, make_batch

import corpora
import data
import data_mixtures
import evaluation
import parameters
import placement
import reference
import sharding
import spikes
import train
from config import Config
from flags import from_preset
from hardware import CHIPS, parse_topology
from predicted.step import predict
from predicted.workload import run_of

ROOT = Path(__file__).parents[1]
TINY = dict(
    num_layers=2, model_dim=64, ff_dim=128, num_heads=8, num_kv_heads=8, head_dim=8, seq_len=64, batch=16
) | dict(warmup_ratio=0.125, learning_rate=1e-2, compilation_cache="", sample=0, eval_batches=2)


def read(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_run_learns_and_says_what_it_did(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    config = Config(
        **TINY | dict(sample=8, num_layers=1, seq_len=32),
        steps=16,
        mesh="data:2,fsdp:2,tensor:2",
        eval_every=8,
        sample_every=8,
        metrics_file=str(file),
    )
    figures = train.run(config)
    steps = [line for line in read(file) if "loss" in line]
    evaluations = {line["step"]: line["eval_loss"] for line in read(file) if "eval_loss" in line}
    assert [line["step"] for line in steps] == list(range(1, 17))
    names = {"step", "loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "tflops_per_s_per_device", "mfu"}
    assert names <= set(steps[0]) and steps[0]["mfu"] is None  # no made-up peak of a CPU
    assert list(evaluations) == [8, 16] and evaluations[16] < evaluations[8] < math.log(256)
    assert figures["eval_loss"] == evaluations[16]
    assert 1 <= figures["bits_a_byte"] / (figures["eval_loss"] / np.log(2)) < 1.02  # a token is a byte, or a separator
    assert steps[1]["learning_rate"] == pytest.approx(config.learning_rate)
    assert steps[-1]["learning_rate"] == pytest.approx(config.learning_rate * config.final_lr_ratio)
    out = capsys.readouterr().out
    assert "8 x cpu: data 2, fsdp 2, tensor 2" in out and "a bigram model's" in out
    samples = [line for line in read(file) if line.get("event") == "sample"]
    assert [line["step"] for line in samples] == [8, 16]
    assert all(f"after >>>:\n{line['prompt']}>>>{line['text']}" in out for line in samples)


# -- the optimizer, against the papers' equations (reference.py)

MATRICES_AND_OTHERS = dict(steps=8, vocab_size=160, num_layers=2, model_dim=128, ff_dim=144, num_heads=4) | dict(
    num_kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True, output_bias=True, attention_sinks=True, warmup_ratio=0.4
)


@pytest.mark.parametrize(
    "options",
    [
        dict(weight_decay=0.3, beta1=0.8, beta2=0.9, tied_embeddings=True),
        pytest.param(
            dict(num_experts=2, experts_per_token=1, expert_dim=136, num_shared_experts=1, num_dense_layers=1)
            | dict(expert_bias=True, selection_bias=True, weight_decay=1.0, mu_dtype="bfloat16")
            | dict(nu_dtype="bfloat16"),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(clip_norm=0.0, warmup_ratio=0.0, final_lr_ratio=0.3), marks=pytest.mark.slow),
        dict(optimizer="sgd", beta1=0.5, learning_rate=0.1, schedule="wsd", decay_ratio=0.5, decay_shape="1-sqrt"),
        dict(optimizer="adafactor", weight_decay=0.3),
        pytest.param(
            dict(optimizer="muon", mu_dtype="bfloat16", num_experts=2, experts_per_token=1, expert_dim=6)
            | dict(model_dim=8, ff_dim=6, vocab_size=20),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items())[:60],
)
def test_updates_are_those_of_the_papers(options):
    """From the warm-up to beyond the last step, with gradients of 3, a half and 30 times the norm that is clipped."""
    config = Config(**MATRICES_AND_OTHERS | options)
    optimizer, learning_rate = train.make_optimizer(config)
    draw = np.random.default_rng(0).standard_normal
    first = jax.tree.map(lambda w: np.float32(0.05 * draw(w.shape)), parameters.param_shapes(config))
    state, update = optimizer.init(first), jax.jit(optimizer.update)
    params, plain, plain_state = first, first, None
    # Relative to the sum of all updates. Moments in bfloat16 are rounded by 2^-9, the first one twice a step.
    tolerance = 2**-7 if config.mu_dtype == "bfloat16" else 1e-5
    for count in range(10):
        grads = jax.tree.map(lambda w: np.float32(draw(w.shape)), params)
        norm = math.sqrt(sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g, f=(3, 0.5, 30)[count % 3] / norm: np.float32(g * f), grads)
        updates, state = update(grads, state, params)
        params = jax.tree.map(np.add, params, jax.device_get(updates))
        plain, plain_state = reference.update(plain, grads, plain_state, config)
        assert learning_rate(count) == pytest.approx(reference.learning_rate(count, config), rel=1e-5)
        assert_close(jax.tree.map(np.subtract, params, first), jax.tree.map(np.subtract, plain, first), tolerance)


@pytest.mark.slow
def test_a_run_does_not_depend_on_its_mesh(tmp_path):
    """Weights, batches and so losses are those of the seed, whatever the mesh."""
    losses = {}
    for mesh in ("fsdp:8", "data:2,tensor:4"):
        file = tmp_path / mesh
        train.run(Config(**TINY, steps=6, mesh=mesh, eval_every=0, metrics_file=str(file)))
        losses[mesh] = [line["loss"] for line in read(file) if "loss" in line]
    np.testing.assert_allclose(*losses.values(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_metrics_of_the_model_are_summed(microbatches, monkeypatch):
    """Over microbatches and devices, those of `tensor` once, as the loss is."""
    config = Config(**SMALL, mesh="data:2,fsdp:2,tensor:2", microbatches=microbatches)

    def loss_fn(params, batch, config, scaling):
        loss, metrics = model_loss_fn(params, batch, config, scaling)
        return loss, metrics | {"tokens": jnp.where(jnp.isfinite(loss), batch.tokens.size, 0)}

    model_loss_fn = train.model.loss_fn
    monkeypatch.setattr(train.model, "loss_fn", loss_fn)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
    shapes = train.state_shardings(config, mesh)
    state = jax.jit(partial(train.init_state, config=config), out_shardings=shapes)(jax.random.key(0))
    batch = jax.device_put(make_batch(config), NamedSharding(mesh, sharding.BATCH_SPEC))
    _, metrics = train.make_train_step(config, mesh)(state, batch)
    assert metrics["tokens"] == config.batch * config.seq_len


def loads_of_layers(params, batch, config):
    """The loads of the experts in each layer of the plain model, that of multi-token prediction last."""
    x, _, loads = reference.hidden_states(params, batch, config)
    return loads + (reference.multi_token_prediction(params, x, batch, config)[2] if config.mtp else [])


@pytest.mark.slow
@pytest.mark.parametrize("mtp", [False, True])
def test_selection_biases_follow_the_loads(mtp):
    """Outside the gradient, by the loads of the whole batch; the metrics are those of the plain model."""
    mixture = dict(num_experts=8, experts_per_token=2, expert_dim=16, num_dense_layers=1, selection_bias=True, mtp=mtp)
    config = Config(**SMALL, **mixture, mesh="fsdp:2,expert:2,tensor:2", microbatches=2, buffer_factor=4.0)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
    shardings = train.state_shardings(config, mesh)
    state = jax.jit(partial(train.init_state, config=config), out_shardings=shardings)(jax.random.key(0))
    params, batch = jax.device_get(state.params), make_batch(config)
    loads = np.array(jax.jit(partial(loads_of_layers, config=config))(params, batch))
    placed = jax.device_put(batch, NamedSharding(mesh, sharding.BATCH_SPEC))
    state, metrics = train.make_train_step(config, mesh)(state, placed)
    assert metrics["load_imbalance"] == pytest.approx(np.mean(loads.max(1) / loads.mean(1)))
    np.testing.assert_array_equal(metrics["expert_loads"], loads)
    assert metrics["dropped_fraction"] == 0 and 0 < metrics["router_entropy"] < math.log(8)
    want = 0.001 * np.sign(loads.mean(1, keepdims=True) - loads)
    stacks = [state.params.layers, *([state.params.mtp_layers] if mtp else [])]
    np.testing.assert_allclose(np.concatenate([stack.selection_bias for stack in stacks]), want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:2,fsdp:2,tensor:2", "tensor:8"])
def test_initial_values_do_not_depend_on_the_mesh(mesh):
    """And no device computes more than its shards: the output of the jitted initialisation is laid out as the state."""
    states = []
    for text in (mesh, "fsdp:8"):
        config = Config(**SMALL | dict(qk_norm=True, qkv_bias=True), mesh=text)
        shardings = train.state_shardings(config, sharding.make_mesh(placement.parse_mesh(text)))
        states.append(jax.jit(partial(train.init_state, config=config), out_shardings=shardings)(jax.random.key(5)))
    # The random bits are the same; the polynomial that makes them normal may round otherwise in a shard of other shape.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *states)
    layers = states[0].params.layers
    assert not np.array_equal(layers.w_k, layers.w_v)  # drawn from their names, not from their shapes
    w_q = layers.w_q
    assert w_q.addressable_shards[0].data.size * 8 == w_q.size * (2 if mesh.startswith("data") else 1)
    assert float(jnp.std(w_q)) == pytest.approx(config.model_dim**-0.5, rel=0.05)


@pytest.mark.slow
def test_steps_with_gradients_that_are_not_finite_change_nothing_but_the_counts():
    config = Config(**SMALL, mesh="fsdp:8", skip_spikes=6.0)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
    shardings = train.state_shardings(config, mesh)
    state = jax.jit(partial(train.init_state, config=config), out_shardings=shardings)(jax.random.key(0))
    step = train.make_train_step(config, mesh)
    good = make_batch(config)
    bad = good._replace(
        loss_weights=np.where(np.arange(config.seq_len) == 3, np.nan, good.loss_weights).astype(np.float32)
    )
    place = lambda batch: jax.device_put(batch, NamedSharding(mesh, sharding.BATCH_SPEC))

    state, first = step(state, place(good))
    before = jax.device_get((state.params, state.opt_state))  # with the history of spikes
    for count in (1, 2):
        state, metrics = step(state, place(bad))
        assert not np.isfinite(metrics["grad_norm"])
        assert int(metrics["skipped"]) == int(metrics["skipped_in_a_row"]) == count
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.params, state.opt_state)))
    state, metrics = step(state, place(good))
    assert (int(state.step), int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (4, 2, 0)
    assert float(metrics["learning_rate"]) > float(first["learning_rate"])
    assert float(metrics["loss"]) < float(first["loss"])
    for array in state.opt_state.history:  # by which all devices decide alike
        assert len({np.asarray(shard.data).tobytes() for shard in array.addressable_shards}) == 1
    assert int(state.opt_state.history.taken) == 2


def steps_of(config: Config, monkeypatch, given: list) -> list:
    """(state, metrics) after each step; `given` has each step's (loss, gradient, metrics), in place of the model.

    All elements of all gradients are the given one; selection biases have none.
    """

    def loss_and_grads(params, batch, scaling, *, config):
        number = lax.pmax(jnp.max(batch.tokens), sharding.axes_of(sharding.BATCH_SPEC))
        loss, gradient, metrics = jax.tree.map(lambda *values: jnp.stack(values)[number], *given)
        metrics |= {"noise": jax.random.key_data(scaling.key)}
        grads = jax.tree.map(lambda w: jnp.full_like(w, gradient), params)
        if config.selection_bias:  # as the model has it
            layers = dataclasses.replace(grads.layers, selection_bias=0 * params.layers.selection_bias)
            grads = dataclasses.replace(grads, layers=layers)
        return loss, metrics, grads

    monkeypatch.setattr(train, "loss_and_grads", loss_and_grads)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), jax.devices()[:2])
    step, state, results = train.make_train_step(config, mesh), first_state(config, mesh, init(config)), []
    results.append((jax.device_get(state), {}))
    for number in range(len(given)):
        batch = jax.tree.map(lambda a, n=number: np.full_like(a, n), make_batch(config))
        batch = jax.device_put(batch, NamedSharding(mesh, sharding.BATCH_SPEC))
        state, metrics = step(state, data.Batch(*batch))
        results.append(jax.device_get((state, metrics)))
    return results


GOOD, BAD = (2.0, 0.5), [(np.nan, 0.5), (np.inf, 0.5), (2.0, np.nan), (2.0, -np.inf)]
ONE_LAYER = SMALL | dict(num_layers=1, mesh="fsdp:2")
REMEMBERED = {
    "amax": dict(fp8="delayed", fp8_modules="out"),
    "selection_bias": dict(num_experts=4, experts_per_token=1, expert_dim=8, selection_bias=True),
}


@pytest.mark.parametrize("what", REMEMBERED)
def test_a_loss_or_gradients_alone_that_are_not_finite_change_nothing_but_the_counts(what, monkeypatch):
    """Neither what the optimizer has, nor what is remembered beside it: largest elements, biases that follow loads."""
    config = Config(**ONE_LAYER, **REMEMBERED[what])
    amax_of = lambda number: {"w_o": {"x": np.float32([100 + number]), "dy": np.float32([number])}}
    metrics_of = lambda n: {
        "amax": {"amax": amax_of(n)},
        "selection_bias": {"expert_loads": np.float32([[5, 3, n, 6]]), "dropped": np.float32(0)},
    }[what]
    losses = [BAD[0], GOOD, *BAD, GOOD]
    given = [(*map(np.float32, one), metrics_of(n)) for n, one in enumerate(losses)]
    states, metrics = zip(*steps_of(config, monkeypatch, given), strict=True)
    state_of = lambda state: jax.tree.leaves((state.params, state.opt_state, state.amax))
    for number, one in enumerate(losses):
        same = [
            np.array_equal(*pair) for pair in zip(state_of(states[number]), state_of(states[number + 1]), strict=True)
        ]
        assert not all(same) if one is GOOD else all(same), (number, one)
    counts = [(int(m["step"]), int(m["skipped"]), int(m["skipped_in_a_row"])) for m in metrics[1:]]
    assert counts == [(1, 1, 1), (2, 1, 0), (3, 2, 1), (4, 3, 2), (5, 4, 3), (6, 5, 4), (7, 5, 0)]
    if what == "amax":  # of the two good steps, the newest first; the guess for a first step is gone with that one
        history = states[-1].amax["w_o"]
        assert history["x"][:3, 0].tolist() == [106, 101, 0] and history["dy"][:3, 0].tolist() == [6, 1, 0]
    else:  # loads of 5, 3, 1, 6, and of 5, 3, 6, 6
        moved = (states[-1].params.layers.selection_bias - states[0].params.layers.selection_bias) / 0.001
        np.testing.assert_allclose(moved, [[-1 + 0, 1 + 1, 1 - 1, -1 - 1]], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("what", ["amax", pytest.param("selection_bias", marks=pytest.mark.slow)])
def test_a_planted_spike_moves_nothing(what, monkeypatch):
    """Neither parameters, moments, amax history nor routing bias; it is counted, and steps go on."""
    config = Config(**ONE_LAYER, **REMEMBERED[what], skip_spikes=6.0)
    amax_of = lambda number: {"w_o": {"x": np.float32([100 + number]), "dy": np.float32([number])}}
    metrics_of = lambda n: {
        "amax": {"amax": amax_of(n)},
        "selection_bias": {"expert_loads": np.float32([[5, 3, n, 6]]), "dropped": np.float32(0)},
    }[what]
    monkeypatch.setattr(spikes, "ENOUGH", 3)
    losses = [(2.0, 0.5), (2.1, 0.5), (1.9, 0.51), (2.0, 0.5), (9.0, 0.5), (2.0, 5.0), (np.nan, 0.5), (2.0, 0.5)]
    given = [(*map(np.float32, one), metrics_of(n)) for n, one in enumerate(losses)]
    states, metrics = zip(*steps_of(config, monkeypatch, given), strict=True)
    moved = lambda state: jax.tree.leaves((state.params, state.opt_state.optimizer, state.amax))
    for number in range(len(losses)):
        same = [np.array_equal(*pair) for pair in zip(*map(moved, states[number : number + 2]), strict=True)]
        assert all(same) if number in (4, 5, 6) else not all(same), number
    counts = [(int(m["skipped"]), int(m["skipped_in_a_row"]), int(m["spikes"])) for m in metrics[1:]]
    assert counts == [(0, 0, 0)] * 4 + [(1, 1, 1), (2, 2, 2), (3, 3, 2), (3, 0, 2)]


def test_the_rate_that_is_told_is_the_one_that_was_used(monkeypatch):
    """Also behind steps that were skipped: they are no updates."""
    options = dict(optimizer="sgd", beta1=0.0, clip_norm=0.0, learning_rate=0.5, warmup_ratio=0.3)
    config, is_good = Config(**ONE_LAYER | options), [1, 0, 1, 1, 0, 0, 1, 1]
    given = [(np.float32(1 if good else np.nan), np.float32(1), {}) for good in is_good]
    results = steps_of(config, monkeypatch, given)
    for number, good in enumerate(is_good):
        (before, _), (after, metrics) = results[number : number + 2]
        expected = reference.learning_rate(sum(is_good[:number]), config)
        assert metrics["learning_rate"] == pytest.approx(expected, rel=1e-5)
        moved = before.params.layers.norm_mlp - after.params.layers.norm_mlp
        np.testing.assert_allclose(moved, expected * good, rtol=1e-5)


def test_every_step_has_its_own_noise(monkeypatch):
    """And every seed; also behind a step that was skipped, so that it is not tried again with the same."""
    given = [(np.float32(loss), np.float32(1), {}) for loss in (1, np.nan, 1)]
    keys = set()
    for seed in (0, 1):
        keys |= {m["noise"].tobytes() for _, m in steps_of(Config(**ONE_LAYER, seed=seed), monkeypatch, given)[1:]}
    assert len(keys) == 6


@pytest.mark.slow
def test_a_run_that_only_skips_ends_with_an_error(tmp_path):
    """Weights blown up by an absurd rate give gradients that are not finite, step after step."""
    file = tmp_path / "metrics.jsonl"
    config = Config(
        **TINY | dict(learning_rate=1e30, warmup_ratio=0.0),
        steps=30,
        clip_norm=0.0,
        max_skipped=3,
        metrics_file=str(file),
    )
    with pytest.raises(FloatingPointError, match=r"max_skipped=3.*lower --learning_rate"):
        train.run(config)
    *_, last, failed = read(file)
    assert last["skipped_in_a_row"] == 3 and (failed["step"], failed["event"]) == (last["step"], "failed")


def held_out_rows(stream: np.ndarray, seq_len: int) -> data.Batch:
    """Every whole sequence of a stream whose documents start with token 0, one after another."""
    rows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len].astype(np.int32)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    segments, positions = np.ones_like(tokens), np.zeros_like(tokens)
    for row, column in np.ndindex(tokens.shape):
        if column:
            starts = tokens[row, column] == 0
            segments[row, column] = segments[row, column - 1] + starts
            positions[row, column] = 0 if starts else positions[row, column - 1] + 1
    return data.Batch(tokens, targets, segments, positions, np.ones(tokens.shape, np.float32))


@pytest.mark.parametrize(
    "mesh",
    ["fsdp:8", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fsdp:2,context:4", "pipe:2,data:4", "expert:8"))],
)
def test_an_evaluation_is_the_plain_mean_whatever_rows_its_last_batch_has(mesh):
    """None, one, fewer than devices, all; and of a limited number of batches the rows that it has.

    Padding is sent to no expert: on expert:8 its rows would fill the buffer.
    """
    options = dict(batch=16, num_layers=2, seq_len=16, loss_chunk=8, z_loss=0.1, mesh=mesh)
    if mesh == "expert:8":
        options |= dict(num_experts=8, experts_per_token=2, expert_dim=16)
    config = Config(**SMALL | options, microbatches=1 if mesh in ("fsdp:8", "expert:8") else 2)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
    params = init(config)
    placed = jax.device_put(params, train.state_shardings(config, mesh).params)
    eval_step = evaluation.make_eval_step(config, mesh)
    plain = jax.jit(partial(reference.loss, config=dataclasses.replace(config, z_loss=0.0)))
    stream = np.random.default_rng(0).integers(1, config.vocab_size, 40 * config.seq_len + 1)
    stream[::7] = 0
    every = held_out_rows(stream, config.seq_len)
    each = np.array([plain(params, jax.tree.map(lambda a, n=n: a[n : n + 1], every)) for n in range(40)])
    place_of = {tuple(row): n for n, row in enumerate(every.tokens)}
    for sequences, batches, rows in ((33, 9, 33), (21, 9, 21), (32, 9, 32), (5, 9, 5), (40, 2, 32), (40, 3, 40)):
        held_out = stream[: sequences * config.seq_len + 1]
        corpus = corpora.Corpus("random tokens", stream, held_out, config.vocab_size, 0)
        its = dataclasses.replace(config, eval_batches=batches)
        batch_of = partial(data.eval_batch, corpus, batch=config.batch, seq_len=config.seq_len)
        chosen = np.concatenate([batch_of(index).tokens for index in range(-(-rows // config.batch))])[:rows]
        chosen = {place_of[tuple(row)] for row in chosen}
        assert len(chosen) == rows == evaluation.num_evaluated(corpus, its)
        loss = evaluation.evaluate(eval_step, placed, corpus, its, mesh)
        assert loss == pytest.approx(each[sorted(chosen)].mean(), rel=1e-5), (sequences, batches)


def test_sources_of_a_mixture_share_the_batches_of_an_evaluation():
    """Equally, as far as they have held-out sequences; the loss is the mean over all sequences that are evaluated."""
    config = Config(**TINY | dict(batch=8))
    corpus = lambda name, size: corpora.Corpus(name, None, range(size * config.seq_len + 1), 256, 255)
    mixture = data_mixtures.Mixture("m", (corpus("a", 100), corpus("b", 11), corpus("c", 3)), ())
    given = lambda batches: [
        (source.name, its.eval_batches, evaluation.num_evaluated(source, its))
        for source, its in evaluation.by_source(mixture, dataclasses.replace(config, eval_batches=batches))
    ]
    assert given(2) == [("a", 1, 8), ("b", 1, 8)] and given(0) == []
    assert given(4) == [("a", 2, 16), ("b", 1, 8), ("c", 1, 3)]
    assert given(9) == [("a", 6, 48), ("b", 2, 11), ("c", 1, 3)]
    assert given(99) == [("a", 13, 100), ("b", 2, 11), ("c", 1, 3)]
    evaluated = evaluation.by_source(mixture, dataclasses.replace(config, eval_batches=4))
    assert evaluation.mean_over({"a": 1.0, "b": 2.0, "c": 6.0}, evaluated) == (16 + 16 + 18) / 27
    single = evaluation.by_source(data_mixtures.as_mixture(corpus("a", 100)), config)
    assert evaluation.mean_over({"a": 0.1}, single) == 0.1


def test_a_schedule_is_shown_with_its_steps():
    mixture = data_mixtures.Mixture(
        "m", (None, None), tuple(data_mixtures.Stage(n, (n / 8, 1 - n / 8)) for n in range(5))
    )
    assert train.shares_of(mixture, 1) == "; 100.0%, 87.5% from step 1 on, 75.0% from step 2 on ..."
    single = corpora.Corpus("one", None, None, 256, 255)
    assert train.shares_of(data_mixtures.as_mixture(single), 0) == ""


def test_an_evaluation_has_two_batches_in_flight_at_most():
    """With 128 of them simulated devices wait for each other for ever."""
    asked, fetched = [], []

    class Sum(float):
        def __array__(self, *_, **__):
            fetched.append(self)
            return np.array(self)

    def eval_step(params, batch, amax):
        assert len(asked) - len(fetched) // 2 < 2
        asked.append(batch)
        return Sum(3 * len(asked)), Sum(1)

    config = Config(**TINY | dict(eval_batches=5, batch=8))
    corpus = corpora.Corpus("a corpus", *(np.arange(5000) % 250,) * 2, vocab_size=256, separator=255)
    mesh = sharding.make_mesh(placement.parse_mesh("fsdp:8"))
    assert evaluation.evaluate(eval_step, None, corpus, config, mesh) == 3 * (1 + 2 + 3 + 4 + 5) / 5
    assert len(asked) == 5 and len(fetched) == 10


def test_what_is_about_to_run_names_its_cliffs():
    flags = dict(preset="llama3.1-8b", mesh="fsdp:8", batch=8, seq_len=1025)
    prediction = predict(run_of(from_preset(**flags), *parse_topology("tpu7x:2x2x1")))
    corpus = corpora.Corpus("a corpus", *(np.arange(5000) % 250,) * 2, vocab_size=256, separator=255)
    lines = []
    log = SimpleNamespace(say=lines.append, flops_per_token=1e9)
    mesh = sharding.make_mesh(placement.parse_mesh("fsdp:8"))
    train.introduce(log, prediction.run.config, mesh, data_mixtures.as_mixture(corpus), None, prediction)
    assert [line for line in lines if line.startswith("cliff      seq_len=1,025: attention takes")]


@pytest.mark.slow
def test_an_evaluation_of_more_batches_than_devices_queue_ends():
    flags = ["--num_layers=2", "--model_dim=384", "--ff_dim=1024", "--seq_len=32", "--batch=8", "--sample=0"]
    done = command(*flags, "--steps=1", "--eval_batches=140")
    assert done.returncode == 0 and "(1,120 of " in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
def test_profile_opens_in_xprof(tmp_path):
    from xprof.convert import raw_to_tool_data

    train.run(Config(**TINY, steps=6, eval_every=0, profile_dir=str(tmp_path), profile_steps="3:5"))
    traces = [str(path) for path in tmp_path.rglob("*.xplane.pb")]
    assert len(traces) == 1
    trace, _ = raw_to_tool_data.xspace_to_tool_data(traces, "trace_viewer", {})
    text = trace if isinstance(trace, str) else trace.decode(errors="replace")
    assert "train_step" in text


def command(*flags, **env):
    return subprocess.run(
        [sys.executable, "train.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=300, env=env or None
    )


SHORT = ["--num_layers=1", "--model_dim=32", "--ff_dim=64", "--head_dim=4", "--seq_len=32", "--batch=8", "--sample=0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--mesh=fsdp:8", "--batch=12"],
            r"batch=12 must be a multiple of data*fsdp*fsdp_transpose*expert*microbatches=8; nearest are 8 and 16",
        ),
        (["--mesh=fsdp:3"], r"model_dim=32 must be a multiple of tensor*fsdp=3; nearest are 30 and 33"),
        (["--mesh=tensor:16"], r"num_heads=8 must be a multiple of tensor=16"),
        (["--mesh=fsdp:999999"], r"model_dim=32 must be a multiple of tensor*fsdp=999999"),
        (["--mesh=data:999999", "--batch=999999"], r"on 999999 simulated devices needs "),
        (["--vocab_size=2000000000"], r"on 8 simulated devices needs "),
        (
            ["--xla_flags=recommended"],
            r"xla_flags='recommended' are for a TPU's compiler, and here is 'cpu': --xla_flags=none",
        ),
        (["--xla_flags=recomended"], r"--xla_flags: there is no 'recomended'; did you mean recommended?"),
        (["--remat=auto"], r"remat=auto chooses by the memory of a chip, and hardware.py has no 'cpu'"),
        (["--attention=flash", "--remat=full"], r"attention=flash is simulated on 'cpu', where jax.checkpoint cannot"),
        (
            ["--mesh=context:8", "--seq_len=40"],
            r"seq_len=40 must be a multiple of context*2 (context_balance)=16",
        ),
        (
            ["--mesh=pipe:2,fsdp:4", "--num_layers=3"],
            r"num_layers=3 must be a multiple of pipe * pipeline_rounds = 2 * 1",
        ),
        (["--mesh=fdsp:8"], r"there is no axis 'fdsp'; did you mean fsdp?"),
        (["--corpus=nowhere.bin"], r"No such file or directory: 'nowhere.bin'"),
        (["--vocab_size=64"], r"has a vocabulary of 256 and the model one of 64"),
        (["--core_axis=fsdp,tensor"], r"only one axis can use it"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_flags_end_with_one_line(flags, message):
    done = command(*SHORT, *flags)
    assert done.returncode and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.strip().count("\n") == 0


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "gpu"])
def test_a_platform_that_is_not_here_ends_with_one_line(platform):
    done = command(*SHORT, **os.environ | {"JAX_PLATFORMS": platform})
    assert done.returncode and f"JAX_PLATFORMS={platform} gives no device here" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.strip().count("\n") == 0


@pytest.mark.slow
def test_flash_attention_trains_as_the_reference_does(tmp_path):
    """With a constant in the place of the softmax's maximum; test_parallel.py has kernels without it, too."""
    losses = {}
    for attention in ("flash --max_logit=10", "reference"):
        file = tmp_path / attention
        flags = ["--steps=2", "--mesh=fsdp:2", "--batch=2", "--num_heads=2", "--num_kv_heads=1", "--eval_batches=0"]
        flags += f"--attention={attention}".split()
        done = command(*SHORT, *flags, f"--metrics_file={file}", "--compilation_cache=")
        assert not done.returncode, done.stderr
        losses[attention] = [line["loss"] for line in read(file) if "loss" in line]
    assert len(losses["reference"]) == 2
    np.testing.assert_allclose(*losses.values(), rtol=1e-5)


@pytest.mark.slow
def test_the_way_to_the_first_step_is_timed(tmp_path):
    """Import, devices, and the state: restored, or drawn while the step is compiled."""
    flags = [*SHORT, "--steps=2", "--save_every=1", f"--checkpoint_dir={tmp_path}", "--eval_batches=0"]
    number = r"(\d+\.\d)"
    for steps, drawn in (("--steps=1", rf", the state drawn in {number} s meanwhile"), ("--steps=2", "()")):
        (line,) = re.findall("^compiled .*$", command(*flags, steps).stdout, re.MULTILINE)
        said = rf"compiled   in {number} s{drawn}; {number} s since the start, "
        said += rf"of which import {number}, devices {number}, restore {number}"
        compiled, drawing, since, *before = (float(n or 0) for n in re.fullmatch(said, line).groups())
        assert since >= max(compiled, drawing) + sum(before) - 0.3 and before[0] > 0.2


@pytest.mark.slow
def test_second_start_reads_the_cache_of_compiled_programs(tmp_path):
    # The cache takes programs that compile for half a second. On a fast machine those of small dense models do not.
    flags = ["--preset=tiny-moe", "--seq_len=32", "--batch=8", "--sample=0", "--steps=2", "--eval_batches=1"]
    flags += [f"--compilation_cache={tmp_path}"]
    said = [command(*flags, **os.environ, JAX_DEBUG_LOG_MODULES="jax._src.compiler").stderr for _ in range(2)]
    read = ["Persistent compilation cache hit for 'jit_train_step'" in each for each in said]
    assert read == [False, True]


@pytest.mark.slow
def test_a_damaged_program_in_the_cache_is_compiled_and_replaced(tmp_path):
    """Two runs at once leave such entries for each other, and a killed one for all that follow."""
    flags = ["--preset=tiny-moe", "--seq_len=32", "--batch=8", "--sample=0", "--steps=2", "--eval_batches=1"]
    flags += [f"--compilation_cache={tmp_path}"]
    entries = lambda: {file.name: file.stat().st_size for file in tmp_path.glob("*-cache")}
    assert command(*flags).stderr == ""
    written = entries()
    assert any(name.startswith("jit_train_step-") for name in written)
    for name, size in written.items():
        os.truncate(tmp_path / name, size // 2)
    done = command(*flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert entries().keys() == written.keys() and all(size > written[name] // 2 for name, size in entries().items())


def test_the_prediction_is_that_of_the_slice():
    """For TPU devices it is that of `roofline.py step` for this mesh; for simulated devices there is none."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x2").devices
    config = from_preset("llama3.1-8b", mesh="fsdp:8,tensor:*", batch=8)
    prediction = train.predict_step(config, sharding.make_mesh(placement.parse_mesh(config.mesh), devices))
    filled = dataclasses.replace(config, mesh="fsdp:8,tensor:2")
    assert prediction.step_s == predict(run_of(filled, CHIPS["tpu7x"], (2, 2, 2))).step_s
    assert train.predict_step(config, sharding.make_mesh(placement.parse_mesh("fsdp:8"), jax.devices())) is None
    odd = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x3").devices
    assert train.predict_step(config, sharding.make_mesh(placement.parse_mesh("fsdp:8,tensor:3"), odd)) is None
