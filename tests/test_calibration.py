"""The largest elements of FP8 operands: the history of a delayed run, the profile of a static one."""

import dataclasses
import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import SMALL, equations, first_state, make_batch, on_mesh, trace

import calibration
import initialisation
import sharding
import train
from config import Config

BOTH, GRADIENT = {"x", "dy"}, {"dy"}
OPERANDS = {"w_q": BOTH, "w_k": GRADIENT, "w_v": GRADIENT, "w_o": BOTH}
OPERANDS |= {"w_gate": BOTH, "w_up": GRADIENT, "w_down": BOTH}


def steps(config, number):
    """(the states after 0, 1, ... steps, the losses)."""
    mesh, _, _ = on_mesh(config, jax.devices()[:1] if config.mesh == "fsdp:1" else None)
    state = first_state(config, mesh, initialisation.init_params(config, jax.random.key(0)))
    step, states, losses = train.make_train_step(config, mesh), [jax.device_get(state)], []
    for n in range(number):
        batch = jax.device_put(make_batch(config, n), NamedSharding(mesh, sharding.BATCH_SPEC))
        state, metrics = step(state, batch)
        states.append(jax.device_get(state))
        losses.append(float(metrics["loss"]))
        assert int(metrics["skipped"]) == 0 and "amax" not in metrics
    return states, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [dict(mesh="data:2,fsdp:2,tensor:2", remat="full"), dict(mesh="fsdp:8", microbatches=2)]
)
def test_observed_maxima_are_those_of_one_device(options):
    """After the first step, for each operand, over all devices and all microbatches."""
    one, _ = steps(Config(**SMALL, fp8="calibrate", mesh="fsdp:1"), 1)
    eight, _ = steps(Config(**SMALL, fp8="calibrate", **options), 1)
    observed = eight[1].amax
    assert {name: {*kinds} for name, kinds in observed.items()} == OPERANDS
    for a in jax.tree.leaves(observed):
        assert a.shape == (1, SMALL["num_layers"]) and (a > 0).all()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), observed, one[1].amax)


@pytest.mark.slow
def test_delayed_scales_follow_the_operands():
    """The first step has a guess, the second the maxima of the first. Losses are within 1% of dynamic scaling's."""
    config = Config(**SMALL, fp8="delayed", mesh="fsdp:8")
    states, losses = steps(config, 3)
    first, second, third, _ = (state.amax["w_gate"] for state in states)
    assert first["x"].shape == (calibration.HISTORY, SMALL["num_layers"])
    assert (first["x"][0] == 448).all() and not first["x"][1:].any() and (first["dy"][0] == 8 / 16 / 24).all()
    assert (second["x"][0] > 0).all() and not second["x"][1:].any()
    np.testing.assert_array_equal(third["x"][1], second["x"][0])
    _, dynamic = steps(Config(**SMALL, fp8="dynamic", mesh="fsdp:8"), 3)
    np.testing.assert_allclose(losses, dynamic, rtol=0.01)


def test_a_history_drops_its_guess_and_then_has_the_last_steps():
    config = Config(**SMALL, fp8="delayed")
    history, layers = calibration.initial(config), np.ones(SMALL["num_layers"], np.float32)
    assert (history["w_q"]["dy"][0] == 8 / (16 * 24)).all()  # tokens
    for step, largest in enumerate((3.0, 1.0, 2.0)):
        observed = jax.tree.map(lambda _, largest=largest: largest * jnp.asarray(layers), history)
        history = calibration.updated(history, observed, jnp.int32(step), config)
    for amax_SL in jax.tree.leaves(history):
        np.testing.assert_array_equal(amax_SL, np.outer([2, 1, 3] + [0] * (calibration.HISTORY - 3), layers))
    jax.tree.map(
        lambda amax_L: np.testing.assert_array_equal(amax_L, 3 * layers), calibration.expected(history, config)
    )


def test_a_profile_has_the_largest_of_all_steps_and_a_static_scale_twice_that(tmp_path):
    config = Config(**SMALL, fp8="calibrate", fp8_scales=str(tmp_path / "scales.json"))
    history, layers = calibration.initial(config), np.ones(SMALL["num_layers"], np.float32)
    for step, largest in enumerate((3.0, 1.0)):
        observed = jax.tree.map(lambda _, largest=largest: largest * jnp.asarray(layers), history)
        history = calibration.updated(history, observed, jnp.int32(step), config)
    calibration.save(history, config)
    expected = calibration.expected({}, dataclasses.replace(config, fp8="static"))
    assert {name: {*kinds} for name, kinds in expected.items()} == OPERANDS
    jax.tree.map(lambda amax_L: np.testing.assert_array_equal(amax_L, 6 * layers), expected)


@pytest.mark.slow
def test_a_static_run_uses_the_profile_that_was_written(tmp_path):
    path = str(tmp_path / "scales.json")
    profile = Config(**SMALL, fp8="calibrate", fp8_scales=path, mesh="fsdp:8")
    states, losses = steps(profile, 2)
    for earlier, later in zip(jax.tree.leaves(states[1].amax), jax.tree.leaves(states[2].amax), strict=True):
        assert (later >= earlier).all()
    calibration.save(states[2].amax, profile)
    static = dataclasses.replace(profile, fp8="static")
    calibration.check(static)
    assert [file.name for file in tmp_path.iterdir()] == ["scales.json"]
    expected = calibration.expected({}, static)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * b[0]), expected, states[2].amax)
    states, static_losses = steps(static, 2)
    assert states[2].amax == {}
    np.testing.assert_allclose(static_losses, losses, rtol=0.01)


def test_unusable_profiles_are_refused(tmp_path):
    path = tmp_path / "scales.json"
    config = Config(**SMALL, fp8="calibrate", fp8_scales=str(path))
    calibration.save(calibration.initial(config), config)
    good = path.read_text()

    def check(message, text=None, **options):
        path.write_text(good if text is None else text)
        calibration.load.cache_clear()
        with pytest.raises(ValueError, match=message):
            calibration.check(dataclasses.replace(config, **{"fp8": "static"} | options))

    check("static needs a profile, --fp8_scales=FILE; --fp8=calibrate --fp8_scales=FILE makes one", fp8_scales="")
    check("cannot be read as a profile", fp8_scales=str(tmp_path / "none.json"))
    check("cannot be read as a profile", text="{")
    check("is no profile", text="[]")
    check("is no profile", text='{"of": {}}')
    check("of another run: ff_dim is 32 there and 64 here; ", ff_dim=64)
    check("of another run: batch is 16 there and 32 here; ", batch=32)
    check("of another run: fp8_modules is 'qkv,out,mlp,moe' there and 'mlp' here", fp8_modules="mlp")
    less = json.loads(good)
    del less["largest"]["w_o"]
    check("a number for each operand of each layer", text=json.dumps(less))
    negative = json.loads(good)
    negative["largest"]["w_o"]["dy"][1] = -1.0
    check("a number for each operand of each layer", text=json.dumps(negative))
    check("fp8=calibrate needs --fp8_scales=FILE", fp8="calibrate", fp8_scales="")
    check("has no effect: fp8=dynamic finds its scales without a file", fp8="dynamic")


def test_identity_depends_on_the_content_and_not_on_the_path(tmp_path):
    configs = [Config(**SMALL, fp8="calibrate", fp8_scales=str(tmp_path / f"{name}.json")) for name in "abc"]
    for config, factor in zip(configs, (1.0, 1.0, 2.0), strict=True):
        calibration.save(jax.tree.map(lambda amax, by=factor: amax + by, calibration.initial(config)), config)
    a, b, c = (calibration.identity(dataclasses.replace(config, fp8="static")) for config in configs)
    assert a == b != c


@pytest.mark.slow
def test_the_first_and_last_layers_can_stay_unquantised():
    """The loss is then nearer to that of float32 than with all layers in FP8."""
    loss = lambda **options: steps(Config(**SMALL, mesh="fsdp:8", **options), 1)[1][0]
    exact, all_, middle = loss(), loss(fp8="dynamic"), loss(fp8="dynamic", fp8_skip_layers=1)
    assert 0 < abs(middle - exact) < abs(all_ - exact)
    is_fp8 = lambda eqn: eqn.primitive.name == "dot_general" and eqn.invars[0].aval.dtype.itemsize == 1
    all_layers = Config(**SMALL, mesh="fsdp:8", fp8="dynamic")
    counts = [sum(map(is_fp8, equations(trace(dataclasses.replace(all_layers, fp8_skip_layers=n))))) for n in (0, 1)]
    assert counts[0] == counts[1] > 0  # in the only loop, and in one of three
    with pytest.raises(ValueError, match="fp8_skip_layers=2 at each end leaves none of 3"):
        loss(fp8="dynamic", fp8_skip_layers=2)
    assert jnp.isfinite(loss(fp8="delayed", fp8_skip_layers=1, fp8_modules="qkv,out,mlp,unembed"))


@pytest.mark.slow
def test_one_run_profiles_and_another_uses_the_profile(tmp_path, capsys):
    common = SMALL | dict(mesh="fsdp:8", steps=4, eval_every=2, sample=4, log_every=1, compilation_cache="")
    common |= dict(fp8_scales=str(tmp_path / "scales.json"))
    profiled = train.run(Config(**common, fp8="calibrate"))
    assert "calibrated" in capsys.readouterr().out
    used = train.run(Config(**common, fp8="static"))
    assert used["eval_loss"] == pytest.approx(profiled["eval_loss"], rel=0.01)


@pytest.mark.slow
def test_a_delayed_run_resumes_bit_for_bit(tmp_path):
    common = SMALL | dict(mesh="fsdp:8", sample=0, eval_every=0, log_every=1, compilation_cache="", fp8="delayed")
    common |= dict(steps=4, save_every=2)
    config = Config(**common, checkpoint_dir=str(tmp_path))
    uninterrupted = train.run(config)
    shutil.rmtree(tmp_path / "4")
    assert train.run(config)["eval_loss"] == uninterrupted["eval_loss"]
    with pytest.raises(ValueError, match="fp8 is 'delayed' there and 'dynamic' here"):
        train.run(dataclasses.replace(config, fp8="dynamic"))
