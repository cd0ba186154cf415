"""Muon: the update against optax's, on one device and on meshes, and what is predicted of it."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from optax import contrib
from support import MIXTURES, SMALL, assert_close, relative_error

import muon
import parameters
import placement
import sharding
import train
from config import Config

TINY = SMALL | dict(model_dim=16, ff_dim=24, num_heads=4, num_kv_heads=2, vocab_size=32, optimizer="muon")
DEEPSEEK = MIXTURES["deepseek"] | dict(num_kv_heads=4)
TINY |= dict(clip_norm=0.0, warmup_ratio=0.0)
LATENT = dict(kv_lora_rank=16, q_lora_rank=8, rope_head_dim=4, num_kv_heads=4)


def draw(tree, seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: np.float32(rng.standard_normal(w.shape)), tree)


# -- one device


def dimension_numbers(config: Config):
    """optax's description of the matrices: which dims are their rows and columns; the others number the matrices."""

    def numbers(weight):
        if weight is None:
            return None
        first = weight.dims[0] == "L"
        rows = len(weight.start.replace("L", ""))
        return contrib.MuonDimensionNumbers(tuple(range(first, first + rows)), len(weight.dims) - 1)

    return jax.tree.map(numbers, parameters.muon_weights(config))


def of_optax(config: Config) -> optax.GradientTransformation:
    """optax's Muon for matrices and its AdamW for the rest, with the decay that Config describes."""
    rate, decay = train.make_optimizer(config)[1], config.weight_decay
    others = optax.adamw(rate, config.beta1, config.beta2, weight_decay=decay, mask=parameters.is_matrix(config))
    options = dict(consistent_rms=0.2, weight_decay=decay, muon_weight_dimension_numbers=dimension_numbers(config))
    matrices = contrib.muon(rate, **options)  # and AdamW without decay for the rest, whose results are not used
    both, weights = (matrices, others), parameters.muon_weights(config)

    def init(params):
        """With the count of matrices at a million: optax divides by 1 - 0.95^count, which published code does not."""
        is_moments = lambda x: isinstance(x, contrib.MuonState)
        late = lambda x: x._replace(count=x.count + 10**6) if is_moments(x) else x
        return jax.tree.map(late, matrices.init(params), is_leaf=is_moments), others.init(params)

    def update(grads, state, params):
        (updates, state), (rest, rest_state) = (f.update(grads, s, params) for f, s in zip(both, state, strict=True))
        return jax.tree.map(lambda a, b, weight: a if weight else b, updates, rest, weights), (state, rest_state)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "options",
    [dict(), pytest.param(LATENT | dict(num_layers=1, mtp=True, weight_decay=0.3), marks=pytest.mark.slow)],
    ids=["heads", "latents"],
)
def test_updates_equal_those_of_optax(options):
    config = Config(**TINY | options)
    params = draw(parameters.param_shapes(config), 0)
    (ours, _), theirs = train.make_optimizer(config), of_optax(config)
    state, expected = ours.init(params), theirs.init(params)
    ours, theirs = jax.jit(ours.update), jax.jit(theirs.update)
    for count in range(3):
        grads = draw(params, 1 + count)
        (updates, state), (want, expected) = ours(grads, state, params), theirs(grads, expected, params)
        assert_close(updates, want, 2e-5)
        params = optax.apply_updates(params, updates)


def test_singular_values_become_one():
    """The vectors stay: X^T Y is symmetric, as V S S' V^T is. Tall and wide matrices, large and tiny ones."""
    for rows, columns, size in ((6, 40, 1e3), (40, 6, 1e-3)):
        x = np.float32(size * np.random.default_rng(0).standard_normal((2, rows, columns)))
        y = np.asarray(muon.newton_schulz(jnp.asarray(x)))
        assert np.all(np.abs(np.linalg.svd(y, compute_uv=False) - 0.95) < 0.3)
        product = np.swapaxes(x, 1, 2) @ y
        assert relative_error(product, np.swapaxes(product, 1, 2)) < 1e-4
        elements = np.asarray(muon.orthogonalise(jnp.asarray(x)))
        assert np.sqrt(np.mean(elements**2)) == pytest.approx(0.2, rel=0.2)


def test_a_stack_is_orthogonalised_some_matrices_at_a_time(monkeypatch):
    stack = jnp.asarray(np.random.default_rng(0).standard_normal((5, 4, 8)), jnp.float32)
    expected = muon.orthogonalise(stack)
    monkeypatch.setattr(muon, "ELEMENTS", 64)
    assert relative_error(muon.orthogonalise(stack), expected) < 1e-6


# -- on a mesh

PART_OF_AN_EXPERT = DEEPSEEK | dict(num_experts=2, router_groups=1, router_groups_kept=1, shard_update=True)
slow = partial(pytest.param, marks=pytest.mark.slow)
MESHES = [
    ("fsdp:8", dict()),
    ("data:2,fsdp:2,tensor:2", dict(shard_update=True)),
    ("data:2,context:2,tensor:2", dict()),
    ("pipe:3,fsdp:2", dict(microbatches=2)),
    slow("fsdp:2,expert:2,tensor:2", DEEPSEEK),  # a device has two experts of four
    (
        "data:2,fsdp:4",
        DEEPSEEK | dict(num_experts=2, router_groups=1, router_groups_kept=1, shard_update=True),
    ),  # a part of one
]


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_matrices_are_those_of_one_device_on_every_mesh(mesh, options):
    config = Config(**TINY | options, mesh=mesh)
    weights, specs = parameters.muon_weights(config), parameters.param_specs(config)
    sizes = placement.parse_mesh(mesh)
    mesh = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    params = draw(parameters.param_shapes(config), 0)
    placed = jax.tree.map(lambda w, spec: jax.device_put(w, NamedSharding(mesh, spec)), params, specs)
    momentum = lambda params: jax.tree.map(lambda w, weight: w if weight else None, params, weights)
    orthogonalised = lambda mesh, params: muon.orthogonalise_tree(momentum(params), weights, config, mesh)
    result, expected = (jax.jit(partial(orthogonalised, m))(p) for m, p in ((mesh, placed), (None, params)))
    assert_close(result, expected, 1e-5)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(momentum(placed)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
