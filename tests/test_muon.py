"""Muon: the update against optax's, on one device and on meshes, and what is predicted of it."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from optax import contrib
from support import EXPERTS, MIXTURES, SMALL, assert_close, equations, init, matmul_flops, relative_error

import muon
import parameters
import placement
import sharding
import train
from benchmarks import muon as benchmark
from config import Config
from flags import from_preset
from hardware import parse_topology
from predicted import matrices, step
from predicted.workload import run_of

TINY = SMALL | dict(model_dim=16, ff_dim=24, num_heads=4, num_kv_heads=2, vocab_size=32, optimizer="muon")
DEEPSEEK = MIXTURES["deepseek"] | dict(num_kv_heads=4, expert_dim=8)
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

    return jax.tree.map(numbers, muon.weights_of(config))


def of_optax(config: Config) -> optax.GradientTransformation:
    """optax's Muon for matrices and its AdamW for the rest, with the decay that Config describes."""
    rate, decay = train.make_optimizer(config)[1], config.weight_decay
    others = optax.adamw(rate, config.beta1, config.beta2, weight_decay=decay, mask=parameters.is_matrix(config))
    options = dict(consistent_rms=0.2, weight_decay=decay, muon_weight_dimension_numbers=dimension_numbers(config))
    matrices = contrib.muon(rate, **options)  # and AdamW without decay for the rest, whose results are not used
    both, weights = (matrices, others), muon.weights_of(config)

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


def test_gradients_in_bfloat16_are_not_rounded_again(monkeypatch):
    monkeypatch.setattr(muon, "orthogonalise_tree", lambda tree, *_: tree)
    config = Config(**TINY)
    params = draw(parameters.param_shapes(config), 0)
    transform, _ = train.make_optimizer(config)
    grads = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), draw(params, 1))
    plain = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    results = (transform.update(g, transform.init(params), params) for g in (grads, plain))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_singular_values_become_one():
    """The vectors stay: X^T Y is symmetric, as V S S' V^T is. Tall and wide matrices, each a large and a tiny one."""
    for rows, columns in ((6, 40), (40, 6)):
        x = np.random.default_rng(0).standard_normal((2, rows, columns)) * np.array([1e3, 1e-3])[:, None, None]
        x = np.float32(x)
        y = np.asarray(muon.newton_schulz(jnp.asarray(x)))
        assert np.all(np.abs(np.linalg.svd(y, compute_uv=False) - 0.95) < 0.3)
        for product in np.swapaxes(x, 1, 2) @ y:
            assert relative_error(product, product.T) < 1e-4
        elements = np.asarray(muon.orthogonalise(jnp.asarray(x)))
        assert np.sqrt(np.mean(elements**2)) == pytest.approx(0.2, rel=0.2)


def test_a_stack_is_orthogonalised_some_matrices_at_a_time(monkeypatch):
    stack = jnp.asarray(np.random.default_rng(0).standard_normal((5, 4, 8)), jnp.float32)
    expected = muon.orthogonalise(stack)
    monkeypatch.setattr(muon, "ELEMENTS", 64)
    assert relative_error(muon.orthogonalise(stack), expected) < 1e-6


def test_the_matrices_of_a_projection_to_all_layers_are_those_of_each():
    """[D, Y, P] has a matrix [D, P] for each of the Y layers, and comes back as it was."""
    weight = muon.weights_of(Config(ple_dim=4, post_norms=True)).ple_project
    w_DYP = jax.random.normal(jax.random.key(0), (6, 3, 4))
    stack = muon.to_matrices(w_DYP, weight, 6)
    assert stack.shape == (3, 6, 4) and all((stack[y] == w_DYP[:, y]).all() for y in range(3))
    assert (muon.from_matrices(stack, weight, w_DYP.shape) == w_DYP).all()


@pytest.mark.parametrize("dim_multiple", [1, 16])
def test_a_wide_mlp_is_scaled_as_its_own_matrix(dim_multiple):
    """Layers that share keys and values have an MLP of 2F: its updates are as large as those of any matrix."""
    shared = dict(num_layers=4, window=8, global_every=2, global_head_dim=8, num_kv_shared_layers=2)
    config = Config(**TINY | shared | dict(double_wide_mlp=True, ff_dim=40, dim_multiple=dim_multiple))
    weights = muon.weights_of(config)
    tree = jax.tree.map(lambda w, each: w if each else None, init(config), weights)
    update = muon.orthogonalise_tree(tree, weights, config)
    for stack, width in (("layers", 40), ("kv_shared_layers", 80)):
        matrix = getattr(tree, stack).w_gate[0][: config.model_dim, :width]
        expected = muon.orthogonalise(jnp.asarray(matrix, config.dtype)[None])[0]
        actual = getattr(update, stack).w_gate[0][: config.model_dim, :width]
        assert relative_error(actual, expected) < 1e-5


# -- on a mesh

PART_OF_AN_EXPERT = DEEPSEEK | dict(num_experts=2, router_groups=1, router_groups_kept=1, shard_update=True)
FOUR_EXPERTS = DEEPSEEK | dict(num_experts=4, router_groups=2, router_groups_kept=1)
PARTS_OF_TWO_EXPERTS = EXPERTS | dict(expert_dim=24, num_experts=3)
slow = partial(pytest.param, marks=pytest.mark.slow)
MESHES = [
    ("fsdp:8", dict(num_layers=1)),
    ("data:2,fsdp:2,tensor:2", dict(shard_update=True)),
    slow("data:2,context:2,tensor:2", dict()),
    slow("pipe:3,fsdp:2", dict(microbatches=2)),
    slow("fsdp:2,expert:2,tensor:2", DEEPSEEK),  # a device has two of the eight experts
    slow("data:2,fsdp:4", PART_OF_AN_EXPERT),
    slow("fsdp:4,tensor:2", PARTS_OF_TWO_EXPERTS),
    slow("fsdp:2,fsdp_transpose:2,tensor:2", dict()),
    slow("fsdp:2,fsdp_transpose:2,expert:2", DEEPSEEK),
    slow("fsdp:4,expert:2", FOUR_EXPERTS),  # a device has half of one of the two along its axis
    slow("fsdp:2,tensor:2", dict(ple_dim=12, post_norms=True)),
    slow("fsdp:2,fsdp_transpose:2,tensor:2", dict(ple_dim=12, post_norms=True, shard_update=True)),
]


def on_mesh(mesh: str, options: dict):
    """(config, mesh, the function that orthogonalises, random momentum of the matrices on the mesh)."""
    config, sizes = Config(**TINY | options, mesh=mesh), placement.parse_mesh(mesh)
    mesh = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    weights, params = muon.weights_of(config), draw(parameters.param_shapes(config), 0)
    place = lambda w, spec: jax.device_put(w, NamedSharding(mesh, spec))
    momentum = jax.tree.map(place, params, parameters.param_specs(config))
    momentum = jax.tree.map(lambda w, weight: w if weight else None, momentum, weights)
    return config, mesh, lambda tree, mesh: muon.orthogonalise_tree(tree, weights, config, mesh), momentum


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_matrices_are_those_of_one_device_on_every_mesh(mesh, options):
    _, mesh, orthogonalise, momentum = on_mesh(mesh, options)
    result = jax.jit(partial(orthogonalise, mesh=mesh))(momentum)
    expected = jax.jit(partial(orthogonalise, mesh=None))(jax.device_get(momentum))
    assert_close(result, expected, 2e-5)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(momentum), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


# -- predicted


@pytest.mark.parametrize(("mesh", "options"), [case.values if hasattr(case, "values") else case for case in MESHES])
def test_the_counted_matrices_are_those_of_the_program(mesh, options):
    """The FLOPs of a device, the elements that it sends, and those that it gathers from copies."""
    config, mesh, orthogonalise, momentum = on_mesh(mesh, options)
    stacks = matrices.stacks(config, dict(mesh.shape))
    jaxpr = jax.make_jaxpr(partial(orthogonalise, mesh=mesh))(momentum).jaxpr
    assert matmul_flops(jaxpr) == sum(stack.flops for stack in stacks)
    sizes = {"all_to_all": 0, "all_gather": 0}
    for equation in equations(jaxpr):
        name = equation.primitive.name.removesuffix("_invariant")
        if name in sizes:
            sizes[name] += equation.invars[0].aval.size
    sent = {"all_to_all": 2 * sum(stack.elements for stack in stacks if stack.holders)}
    assert sizes == sent | {"all_gather": sum(stack.elements for stack in stacks if stack.copies)}


def test_nothing_is_counted_for_other_optimizers():
    config = Config(**TINY | dict(optimizer="adamw"), mesh="fsdp:8")
    assert matrices.stacks(config, placement.fill_mesh({"fsdp": 8}, 8)) == []


def test_the_update_of_70b_is_under_three_percent_of_a_step():
    """The share of a step of 64 chips that is exposed: five iterations, and the all-to-alls."""
    chip, chips = parse_topology("tpu7x:4x4x4")
    flags = dict(preset="llama3.1-70b", mesh="fsdp:128", batch=256, remat="full")
    steps = {
        name: step.predict(run_of(from_preset(**flags, optimizer=name), chip, chips)) for name in ("adamw", "muon")
    }
    parts = {part.name: part for part in steps["muon"].parts}
    exposed = parts["muon"].exposed_s + parts["muon communication"].exposed_s
    assert 0.01 < exposed / steps["muon"].step_s < 0.03
    # The state has 4 bytes a parameter less, but for the embedding, the unembedding and the norms.
    state = {name: prediction.memory["optimizer"] for name, prediction in steps.items()}
    assert state["muon"] / state["adamw"] == pytest.approx(0.5 + 0.5 * 2 * 128256 / 70.55e9 * 8192, rel=1e-3)
    # 5 * (4 n + 2 n^2 / m) FLOPs for each of the parameters, with 16 zero matrices for 240 of n = 8192, m = 28,672.
    (mlp,) = [s for s in matrices.stacks(steps["muon"].run.config, steps["muon"].run.sizes) if s.columns == 28672]
    assert mlp.per_device * 128 == 256 and mlp.arrays == 240
    assert mlp.flops == pytest.approx(2 * 5 * (4 * 8192 + 2 * 8192**2 / 28672) * 8192 * 28672)


# -- measured


def test_the_stored_runs_are_on_the_page():
    """The best rates are no ends of the search."""
    runs = benchmark.known()
    assert {len(run["loss"]) for run in runs.values()} == {benchmark.FLAGS["steps"]}
    assert benchmark.table(runs) in (benchmark.ROOT / "docs/RESULTS.md").read_text()
    for preset, (optimizer, rates) in itertools.product(benchmark.PRESETS, benchmark.RATES.items()):
        assert rates[0] < benchmark.best_rate(preset, optimizer, runs) < rates[-1]


def test_the_picture_is_drawn(tmp_path):
    benchmark.plot(benchmark.known(), str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_steps_to_a_loss_are_those_of_the_mean_of_ten():
    losses = [float(100 - n) for n in range(30)]  # the mean of 100..91 is 95.5
    assert [benchmark.steps_to(loss, losses) for loss in (200.0, 95.5, 95.4, 75.5, 75.0)] == [10, 10, 11, 30, None]
    assert benchmark.end(losses) == 75.5
