"""Adam's second moment in bfloat16: optax's update, and rounding whose mean is exact."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import moments
import placement
import sharding
from flags import from_recipe
from hardware import parse_topology
from predicted.step import GiB, predict
from predicted.workload import run_of
from published import RECIPES

KEY = jax.random.key(0)


@pytest.mark.parametrize("mu_dtype", ["float32", "bfloat16"])
def test_in_float32_it_is_the_update_of_optax(mu_dtype):
    ours = moments.scale_by_adam(0.9, 0.95, mu_dtype, "float32", seed=0)
    theirs = optax.scale_by_adam(0.9, 0.95, mu_dtype=jnp.dtype(mu_dtype))
    params = {"a": jnp.zeros((5, 3)), "b": {"c": jnp.zeros(7)}, "none": None}
    state, expected_state, rng = ours.init(params), theirs.init(params), np.random.default_rng(0)
    for _ in range(4):
        grads = jax.tree.map(lambda w: jnp.float32(rng.standard_normal(w.shape)), params)
        updates, state = ours.update(grads, state)
        expected, expected_state = theirs.update(grads, expected_state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
        assert jax.tree.structure(state) == jax.tree.structure(expected_state)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-6), state, expected_state
        )


@pytest.mark.parametrize("x", [1.0 + 2**-8, 1.3, 1.9999, 1.99999988, 3.0e-20, 0.7071, 1e30])
def test_the_mean_of_what_is_rounded_is_exact(x):
    """Within four standard errors of 2^18 draws, which are the two neighbours of x and nothing else."""
    x, draws = np.float32(x), 2**18
    rounded = np.float64(jax.jit(moments.to_bfloat16)(jnp.full(draws, x), KEY))
    below = np.uint32(x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    above = np.uint32((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    assert set(rounded.tolist()) == {float(below), float(above)}
    share = (float(x) - float(below)) / (float(above) - float(below))
    standard_error = (float(above) - float(below)) * np.sqrt(share * (1 - share) / draws)
    assert abs(np.mean(rounded) - float(x)) < 4 * standard_error


def test_numbers_of_bfloat16_stay_and_no_number_becomes_infinite():
    exact = jnp.float32([0.0, 1.0, -2.5, 2.0**-126, 65280.0, np.inf, -np.inf])
    assert moments.to_bfloat16(exact, KEY).tolist() == exact.tolist()
    largest = np.finfo(np.float32).max
    assert moments.to_bfloat16(jnp.full(1000, largest), KEY).max() == jnp.finfo(jnp.bfloat16).max
    assert jnp.isnan(moments.to_bfloat16(jnp.float32([np.nan]), KEY)).all()


def second_moments(grads: np.ndarray, beta2: float, count: int) -> np.ndarray:
    """The second moments of `count` parameters after these gradients, which all of them have."""
    rule = moments.scale_by_adam(0.9, beta2, "bfloat16", "bfloat16", seed=3)

    def step(state, grad):
        return rule.update({"w": jnp.full(count, grad)}, state)[1], None

    first = rule.init({"w": jnp.zeros(count)})
    return np.float64(jax.jit(lambda grads: jax.lax.scan(step, first, grads)[0])(jnp.float32(grads)).nu["w"])


def test_the_moment_follows_where_rounding_to_nearest_is_stuck():
    """After 400 steps the mean over 4,096 parameters is the exact moment, within four standard errors."""
    beta2, grads = 0.999, np.concatenate([np.full(100, 1.0), np.full(300, 1.2)])
    exact, nearest = 0.0, np.float32(0)
    for grad in grads:
        exact = beta2 * exact + (1 - beta2) * float(np.float32(grad)) ** 2
        nearest = np.float32(jnp.bfloat16(np.float32(beta2) * nearest + np.float32((1 - beta2) * grad**2)))
    stored = second_moments(grads, beta2, 4096)
    standard_error = np.std(stored) / np.sqrt(stored.size)
    assert abs(np.mean(stored) - exact) < 4 * standard_error and standard_error < 0.001 * exact
    assert abs(nearest - exact) > max(0.04 * exact, 20 * standard_error)  # so this bound can fail


def test_the_memory_in_the_head_is_the_predicted_one():
    row = r"^    (\S+-bf16) +(\d+) devices +([\d.]+) of ([\d.]+) +([\d.]+) of ([\d.]+)$"
    rows = re.findall(row, moments.__doc__, re.MULTILINE)
    assert [name for name, *_ in rows] == ["llama3.1-70b-8k-bf16", "deepseek-v3-4k-bf16"]
    for name, devices, *figures in rows:
        predicted = []
        for dtype in ("float32", "bfloat16"):
            config = from_recipe(name, **{flag: dtype for flag in ("mu_dtype", "nu_dtype", "grad_dtype")})
            prediction = predict(run_of(config, *parse_topology(RECIPES[name].topology)))
            state = sum(prediction.memory[part] for part in ("weights", "gradients", "optimizer"))
            predicted += [f"{nbytes / GiB:.1f}" for nbytes in (state, prediction.hbm_bytes)]
        assert predicted == figures and math.prod(prediction.run.sizes.values()) == int(devices)


def test_random_bits_differ_by_parameter_update_and_seed_not_by_mesh():
    def stored(seed=0, count=0, name="a", spec=None):
        rule = moments.scale_by_adam(0.9, 0.95, "float32", "bfloat16", seed)
        w = jnp.zeros(64)
        if spec is not None:
            mesh = sharding.make_mesh(placement.parse_mesh("fsdp:8"))
            w = jax.device_put(w, NamedSharding(mesh, spec))
        state = rule.init({name: w})._replace(count=jnp.int32(count))
        return np.float32(jax.jit(rule.update)({name: w + 0.3}, state)[1].nu[name]).tolist()

    assert stored() == stored(spec=PartitionSpec("fsdp"))
    assert len({tuple(each) for each in (stored(), stored(seed=1), stored(count=1), stored(name="b"))}) == 4
