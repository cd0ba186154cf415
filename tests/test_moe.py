"""Routing and dispatch against a plain one-device mixture, token by token; and the rows that are sent."""

import functools
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support import equations, relative_error

import collectives
import fsdp
import moe
import sharding
from compiled import hlo
from gmm import Activated

ROOT = Path(__file__).parents[1]
AXES = ("fsdp", "expert")
E, X, D, M, TOKENS = 8, 2, 16, 12, 64


# -- the router


def route_one(logits, choices, scores="softmax", renormalise=True, bias=None, groups=1, groups_kept=1, scale=1.0):
    """(experts, weights) of one token, in float64, by sorting."""
    logits = logits.astype(np.float64)
    s = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    s = s if scores == "softmax" else 1 / (1 + np.exp(-logits))
    wanted = s if bias is None else s + bias
    size = len(s) // groups
    group_scores = [np.sort(wanted[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -group_scores[g])[:groups_kept]
    allowed = [e for e in range(len(s)) if e // size in best]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[:choices]
    weights = s[chosen] / s[chosen].sum() if renormalise else s[chosen]
    return chosen, weights * scale


ROUTERS = {
    "softmax": dict(),
    "not renormalised": dict(renormalise=False),
    "sigmoid": dict(scores="sigmoid"),
    "deepseek": dict(scores="sigmoid", groups=4, groups_kept=2, scale=2.5, bias=0.3 * np.arange(8.0)[::-1] % 0.7),
    "groups of one": dict(groups=8, groups_kept=3),
}


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_routing_equals_one_token_at_a_time(options):
    logits = np.random.default_rng(0).normal(size=(200, E)).astype(np.float32)
    options, bias = dict(options), options.get("bias")
    options.pop("bias", None)
    bias_E = None if bias is None else jnp.asarray(bias)
    routing = jax.jit(partial(moe.route, choices=3, bias_E=bias_E, **options))(logits)
    for token, row in enumerate(logits):
        experts, weights = route_one(row, 3, bias=bias, **options)
        assert routing.experts_tX[token].tolist() == experts
        np.testing.assert_allclose(routing.weights_tX[token], weights, rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(routing.scores_tE, -1), 1, rtol=1e-5)


def test_ties_go_to_the_first_experts():
    assert moe.route(jnp.zeros((2, E)), 3).experts_tX.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("k", [1, 2, 7, 12])
def test_top_k_equals_lax_top_k(k):
    """Also with ties, infinities and NaN, and with k the length of a row."""
    numbers = np.random.default_rng(0).integers(-3, 4, (50, 12)).astype(np.float32)
    numbers[::7, 3], numbers[::5, 1:9], numbers[1, 4] = np.inf, 0.0, np.nan
    for x in (jnp.asarray(numbers), jnp.asarray(numbers).reshape(5, 10, 12)):
        ours, wanted = moe.top_k(x, k), jax.lax.top_k(x, k)
        np.testing.assert_array_equal(ours[0], wanted[0])
        np.testing.assert_array_equal(ours[1], wanted[1])
        assert ours[1].dtype == jnp.int32


def test_the_selection_bias_changes_the_choice_but_not_the_weights():
    logits_tE = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    routing = moe.route(logits_tE, 2, bias_E=jnp.array([0, -1.0, 0, 1.0]), renormalise=False)
    assert routing.experts_tX.tolist() == [[3, 0]]
    np.testing.assert_allclose(routing.weights_tX, [[0.1, 0.4]], rtol=1e-6)


def test_the_bias_follows_the_loads():
    bias = moe.updated_bias(jnp.zeros((2, 3)), jnp.array([[9, 0, 3], [1, 1, 1]]), 0.5)
    assert bias.tolist() == [[-0.5, 0.5, 0.5], [0, 0, 0]]  # the mean loads are 4 and 1


def test_auxiliary_losses():
    """A router with equal scores has losses of 1 and log(E)^2; one that sends all tokens to one expert has E."""
    zeros_tE = jnp.zeros((6, E))
    even = moe.route(zeros_tE, X).scores_tE
    assert moe.load_balance_loss(even, jnp.full(E, 5), 6) == pytest.approx(1)
    assert moe.z_loss(zeros_tE, 6) == pytest.approx(np.log(E) ** 2)
    assert moe.entropy(even, 6) == pytest.approx(np.log(E))
    sure = moe.route(zeros_tE.at[:, 3].set(100.0), 1)
    loads_E = moe.loads(sure.experts_tX, E)
    assert loads_E.tolist() == [0, 0, 0, 6, 0, 0, 0, 0]
    assert moe.load_balance_loss(sure.scores_tE, loads_E, 6) == pytest.approx(E)
    assert moe.entropy(sure.scores_tE, 6) == pytest.approx(0, abs=1e-6)
    assert moe.load_balance_loss(even[:3], loads_E, 6) == pytest.approx(0.5)  # half of the tokens: a share


# -- the experts


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(monkeypatch):
    """On a CPU it would be zeros, and reading it by mistake would not be noticed."""
    monkeypatch.setattr(moe, "uninitialised", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


def test_grouped_matmul_equals_one_expert_at_a_time():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(128, D), (4, D, M), (128, M), (4, M)]
    x, w, dy, bias = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,))

    def per_device(x, w, dy, bias, sizes):
        mixed = lambda x, w, bias: moe.add_bias(moe.grouped_matmul(x, w, sizes), bias, sizes)
        out, vjp = jax.vjp(mixed, x, w, bias)
        return out, *vjp(dy)

    ours = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P(), out_specs=P()))
    for sizes in ([30, 1, 0, 70], [0, 0, 0, 128], [0, 0, 0, 0], [64, 64, 0, 0]):
        rows = np.repeat([0, 1, 2, 3, 4], [*sizes, 128 - sum(sizes)])
        member = (rows[:, None] == np.arange(4)).astype(np.float32)  # rows after the last group are in none
        nan_after_last = lambda a, rows=rows: np.where((rows < 4)[:, None], a, np.nan)
        masked = dy * (rows < 4)[:, None]
        want = (
            np.einsum("re,rd,edm->rm", member, x, w) + member @ bias,
            np.einsum("rm,re,edm->rd", masked, member, w),
        )
        want += np.einsum("rd,re,rm->edm", x, member, masked), member.T @ dy
        for a, b in zip(ours(nan_after_last(x), w, nan_after_last(dy), bias, jnp.array(sizes)), want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=str(sizes))


def test_swiglu_with_a_limit():
    """By hand: gate 10 is clamped to 7, up -9 to -7; sigmoid(1.702 * 7) is 0.9999933, and up is increased by 1."""
    assert float(moe.glu(jnp.float32(10), jnp.float32(-9), limit=7.0)) == pytest.approx(7 * 0.9999933 * -6, rel=1e-6)
    assert float(moe.glu(jnp.float32(1), jnp.float32(0.5), limit=7.0)) == pytest.approx(
        1.5 / (1 + np.exp(-1.702)), rel=1e-6
    )
    assert float(moe.glu(jnp.float32(1), jnp.float32(0.5))) == pytest.approx(0.5 / (1 + np.exp(-1)), rel=1e-6)


def test_the_gradient_of_swiglu_with_a_limit():
    """By hand; at a limit the derivative of the clamp is 1, as in PyTorch, beyond it 0."""
    gate, up = (a.ravel() for a in np.meshgrid([-9.0, -2.0, 0.5, 2.0, 9.0], [-9.0, -2.0, 0.5, 2.0, 9.0]))
    _, pull = jax.vjp(partial(moe.glu, limit=2.0), jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    a, b = np.minimum(gate, 2), np.clip(up, -2, 2)
    sigmoid = 1 / (1 + np.exp(-1.702 * a))
    dgate = (b + 1) * sigmoid * (1 + 1.702 * a * (1 - sigmoid)) * (gate <= 2)
    np.testing.assert_allclose(pull(jnp.ones(25)), (dgate, a * sigmoid * (np.abs(up) <= 2)), rtol=1e-5, atol=1e-6)


def test_geglu_is_the_tanh_approximation():
    """By hand, at 1: sqrt(2/pi) * 1.044715 is 0.8335620. The exact GELU of 1 is 0.8413447."""
    geglu = float(moe.glu(jnp.float32(1), jnp.float32(0.5), "gelu"))
    assert geglu == pytest.approx(0.25 * (1 + math.tanh(0.8335620)), rel=1e-6)
    assert geglu != pytest.approx(0.5 * 0.8413447, rel=1e-4)


# -- dispatch


@functools.cache
def layer() -> tuple:
    """x_TD, router, gate, up, down."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(TOKENS, D), (D, E), (E, D, M), (E, D, M), (E, M, D)]
    return tuple(jax.random.normal(k, s) / s[-2] ** 0.5 for k, s in zip(keys, shapes, strict=True))


def routings() -> dict[str, np.ndarray]:
    """Arrays to add to the router's logits."""
    zeros = np.zeros((TOKENS, E), np.float32)
    to_one, some_empty, tied = zeros.copy(), zeros.copy(), zeros.copy()
    to_one[:, 5] = 50
    some_empty[:, [0, 3, 6, 7]] = -50
    even = np.roll(np.eye(E, dtype=np.float32) * 50, 1, 0)[np.arange(TOKENS) % E]
    return {"random": zeros, "even": even, "to one": to_one, "some empty": some_empty, "tied": tied}


def mixture(x, router, gate, up, down, extra, tied, accepted=None):
    """The plain layer: every expert, then a weighted sum of the chosen ones, without those not `accepted` [t, E]."""
    logits = jnp.where(tied, 0.0, x @ router) + extra
    top, experts = jax.lax.top_k(logits, X)
    weights = jax.nn.softmax(top)
    gates = jnp.sum(jax.nn.one_hot(experts, E) * weights[..., None], 1)
    gates = gates if accepted is None else gates * accepted
    product = jax.nn.silu(jnp.einsum("td,edm->tem", x, gate)) * jnp.einsum("td,edm->tem", x, up)
    y = jnp.einsum("tem,emd,te->td", product, down, gates)
    return jnp.sum(jnp.sin(y) + y**2), y


def on_mesh(n: int, impl: str, *, buffer_factor: float = E, capacity: int = TOKENS, platform_mesh=None):
    """shard_map of (layer, extra, tied) -> (loss, gradients of the layer, y_TD, the pairs dropped or the rounds).

    `buffer_factor`: the size of a receiver's buffer, in multiples of the mean number of rows.
    """
    mesh = platform_mesh or jax.make_mesh((8 // n, n), AXES, axis_types=(AxisType.Auto,) * 2)
    specs = (P(AXES), P(), P("expert"), P("expert"), P("expert"))

    def loss(weights, extra_tE, tied):
        x_td, router, gate, up, down = weights
        routing = moe.route(jnp.where(tied, 0.0, x_td @ router) + extra_tE, X)

        def experts(w, x, sizes, factors, copies=None, arriving=()):
            gate, up, down = w
            products = [moe.grouped_matmul(x, w, sizes) for w in (gate, up)]
            y = moe.grouped_matmul(moe.times_factors(moe.glu(*products), factors), down, sizes)
            return y if copies is None else moe.add_copies(y, copies)

        def local(x_td, routing):
            x_td = collectives.all_gather(x_td, "expert", algorithm="xla")
            own = moe.own_choices(routing, "expert")
            y_td, rounds = moe.local_experts((gate, up, down), x_td, own, experts, E // n, rows)
            return collectives.reduce_scatter(y_td, "expert", algorithm="xla"), rounds

        operands, count = ((gate, up, down), x_td, routing, experts, "expert"), 0
        if impl in ("dropless", "in chunks"):
            num_chunks = 2 if impl == "in chunks" else 1
            rows = int(buffer_factor * x_td.shape[0] * X) // num_chunks
            dropless = lambda x_td, routing: moe.dropless(operands[0], x_td, routing, *operands[3:], rows)
            y_td, count = moe.in_chunks(local if n == 1 else dropless, x_td, routing, num_chunks)
        elif impl == "gathered":
            rows = int(buffer_factor * x_td.shape[0] * X)
            y_td, count = local(x_td, routing)
        elif impl == "capacity":
            y_td, dropped = moe.with_capacity(*operands, capacity)
            count = jax.lax.psum(dropped, AXES)
        else:
            y_td = moe.reference(*operands)
        return jnp.sum(jnp.sin(y_td) + y_td**2), (y_td, count)

    def per_device(weights, extra_tE, tied):
        replicated_axes = [tuple(axis for axis in AXES if axis not in sharding.axes_of(spec)) for spec in specs]
        vary = lambda w, axes: jax.lax.pcast(w, axes, to="varying") if axes else w
        weights = tuple(vary(w, axes) for w, axes in zip(weights, replicated_axes, strict=True))
        (share, (y_td, count)), grads = jax.value_and_grad(loss, has_aux=True)(weights, extra_tE, tied)
        grads = tuple(jax.lax.psum(dw, axes) if axes else dw for dw, axes in zip(grads, replicated_axes, strict=True))
        return jax.lax.psum(share, AXES), grads, y_td, count

    in_specs, out_specs = (specs, P(AXES), P()), (P(), specs, P(AXES), P())
    return jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@functools.cache
def expected(name: str):
    grad = jax.jit(jax.value_and_grad(lambda w, *rest: mixture(*w, *rest), has_aux=True))
    return grad(layer(), routings()[name], name == "tied")


QUICK = {(2, "capacity", 2), (4, "dropless", 0.5), (4, "gathered", 0.5)}


@pytest.mark.parametrize(
    ("n", "impl", "buffer_factor"),
    [
        pytest.param(n, impl, factor, marks=[] if (n, impl, factor) in QUICK else [pytest.mark.slow])
        for n in (1, 2, 4, 8)
        for impl, *factors in (
            ("dropless", n, 0.5),
            ("gathered", n, 0.5),
            ("in chunks", n),
            ("capacity", n),
            ("reference", n),
        )
        for factor in factors
    ],
)
def test_dispatch_equals_the_plain_mixture(n, impl, buffer_factor):
    """Loss, gradients and results, however the tokens are routed and however small the buffers are."""
    sharded = jax.jit(on_mesh(n, impl, buffer_factor=buffer_factor))
    for name, extra in routings().items():
        loss, grads, y, count = sharded(layer(), extra, name == "tied")
        (want_loss, want_y), want_grads = expected(name)
        assert abs(loss - want_loss) < 1e-5 * want_loss, name
        assert relative_error(y, want_y) < 1e-5, name
        dropless = impl in ("dropless", "gathered")
        rounds = expected_rounds(name, n, buffer_factor) if dropless else int(impl == "in chunks")
        assert count == rounds, name
        for a, b in zip(grads, want_grads, strict=True):
            assert relative_error(a, b) < 1e-5 or np.linalg.norm(b) < 1e-6 > np.linalg.norm(a), name


def expected_rounds(name: str, n: int, buffer_factor: float) -> int:
    """ceil(the most rows that a device receives / those of its buffer), by counting choices."""
    if n == 1:
        return 1
    x, router, *_ = layer()
    experts = np.asarray(jax.lax.top_k(np.asarray(x @ router) * (name != "tied") + routings()[name], X)[1])
    by_group = experts.reshape(8 // n, -1) // (E // n)
    most = max(np.bincount(group).max() for group in by_group)
    return -(-most // int(buffer_factor * TOKENS // 8 * X))


def test_what_is_after_the_last_row_of_an_expert_reaches_no_gradient():
    """There an exchange leaves memory as it was: results and factors of NaN."""
    sizes, rows = jnp.array([2, 0, 1]), jnp.arange(6)[:, None] < 3
    y, factors = jnp.where(rows, 1.0, jnp.nan) * jnp.ones((6, 4)), jnp.where(rows[:, 0], 0.5, jnp.nan)

    def total(y, bias, factors):
        return jnp.sum(jnp.where(rows, moe.add_bias(y, bias, sizes, factors), 0))

    gradients = jax.grad(total, (0, 1, 2))(y, jnp.ones((3, 4)), factors)
    assert gradients[1][:, 0].tolist() == [1.0, 0.0, 0.5]
    assert gradients[2][:3].tolist() == [4.0, 4.0, 4.0]


def test_tokens_without_experts_are_sent_nowhere():
    """Padding: its results are zeros, its experts count no row, and the rest of the result is as without it."""
    n, t = 4, TOKENS // 8
    x, router, gate, up, down = layer()
    padding = np.arange(TOKENS) % 3 == 0
    mesh = jax.make_mesh((8 // n, n), AXES, axis_types=(AxisType.Auto,) * 2)

    def per_device(x_td, padding_t, gate, up, down):
        routing = moe.route(x_td @ router + routings()["to one"][0], X)
        routing = routing._replace(experts_tX=jnp.where(padding_t[:, None], E, routing.experts_tX))

        def experts(w, x, sizes, factors, copies=None, arriving=()):
            gate, up, down = w
            products = [moe.grouped_matmul(x, w, sizes) for w in (gate, up)]
            y = moe.grouped_matmul(moe.times_factors(moe.glu(*products), factors), down, sizes)
            return y if copies is None else moe.add_copies(y, copies)

        return moe.dropless((gate, up, down), x_td, routing, experts, "expert", t * X)

    specs = (P(AXES), P(AXES), *[P("expert")] * 3)
    sharded = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=(P(AXES), P())))
    y, rounds = sharded(x, padding, gate, up, down)
    (_, want), _ = expected("to one")
    assert not np.any(y[padding]) and relative_error(y[~padding], want[~padding]) < 1e-5
    _, rounds_of_all = sharded(x, np.zeros(TOKENS, bool), gate, up, down)
    assert rounds < rounds_of_all


@pytest.mark.slow
def test_the_functions_for_tpus_equal_those_for_cpus(monkeypatch):
    """gmm.py's functions run on the CPU as their references: values and gradients."""
    _, _, gate, up, down = layer()
    x, sizes = jax.random.normal(jax.random.key(0), (40, gate.shape[1])), jnp.array([0, 9, 1, 0, 20, 3, 0, 4])[:E]
    factors = jax.random.uniform(jax.random.key(3), (40,))
    biases = tuple(jax.random.normal(jax.random.key(i), gate[:, 0].shape) for i in (1, 2))

    activation = partial(moe.glu, limit=1.0)

    def experts(x, gate, up, down, biases, factors):
        *products, rows = moe.gated_matmul(x, gate, up, sizes, activation, factors, biases)
        through = None if rows is None else Activated(activation, tuple(products), factors)
        rows = moe.times_factors(activation(*products), factors) if rows is None else rows
        return moe.grouped_matmul(rows, down.swapaxes(1, 2), sizes, transpose=True, through=through)

    results = []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(sharding, "platform", lambda platform=platform: platform)
        y, pull = jax.vjp(experts, x, gate, up, down, biases, factors)
        results.append(jax.tree.leaves((y, *pull(jnp.cos(y)))))
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("sources", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_missing_rows_are_filled_only_where_they_may_occur(sources, copies):
    """It spares XLA:TPU a pass over all rows where none is missing."""
    x, order = jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0, 1])
    copy = lambda x: moe.copy_rows(x, moe.Copies(3, order, jnp.argsort(order), moe.Missing(sources, copies)))
    run = lambda x, dy: (copy(x), *jax.vjp(copy, x)[1](dy))
    modes = re.findall(r"GatherScatterMode\.(\w+)", str(jax.make_jaxpr(run)(x, x)))
    assert {"FILL_OR_DROP" if filled else "CLIP" for filled in (sources, copies)} == set(modes)
    y, dx = run(x, x)
    np.testing.assert_array_equal(y, x[order])
    np.testing.assert_array_equal(dx[order], x)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_sorted_copies_are_added_up_in_blocks_of_rows(platform, monkeypatch):
    """Any number of copies of a row, from none to most of them; copies of no row are NaN, and so is their gradient."""
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    n, r, d = 300, 500, 16
    source = np.random.default_rng(0).integers(0, n, r)
    source[:200], source[400:] = 7, n
    keys = jax.random.split(jax.random.key(0), 3)
    x, y, dx = (jax.random.normal(key, (rows, d)) for key, rows in zip(keys, (n, r, n), strict=True))
    y = jnp.where(source[:, None] < n, y, jnp.nan)
    copies = moe.sorted_copies(n, jnp.asarray(source, jnp.int32))
    one_hot = np.eye(n, dtype=np.float32)[np.minimum(source, n - 1)] * (source < n)[:, None]
    sums, pull = jax.vjp(lambda y: moe.add_copies(y, copies), y)
    np.testing.assert_allclose(sums, one_hot.T @ np.nan_to_num(y), atol=1e-4)
    np.testing.assert_array_equal(pull(dx)[0][:400], np.asarray(dx)[source[:400]])
    copied, pull = jax.vjp(lambda x: moe.copy_rows(x, copies), x)
    np.testing.assert_array_equal(copied[:400], np.asarray(x)[source[:400]])
    np.testing.assert_allclose(pull(y)[0], sums, atol=1e-6)


@jax.custom_vjp
def with_nan_after(x, sizes):
    """x with rows of NaN after the last expert's, as a kernel leaves memory there; so is its gradient."""
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), x, jnp.nan)


with_nan_after.defvjp(
    lambda x, sizes: (with_nan_after(x, sizes), sizes), lambda sizes, dy: (with_nan_after(dy, sizes), None)
)


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_rounds_are_added_up(rounds):
    """Values and gradients are those of a plain sum."""
    w, x, weights = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 4), (5, 3), (5, 1)]))
    share = lambda w, x, weights, plan, number: jnp.sin(x @ w[0] * (number + plan)) * weights
    in_rounds = lambda *operands: moe.all_rounds(share, *operands, 2, jnp.int32(rounds))
    plain = lambda *operands: sum(share(*operands, 2, number) for number in range(rounds))
    operands = (w, jnp.arange(3)), x, weights  # integers have no gradient
    results = []
    for function in (in_rounds, plain):
        y, pull = jax.vjp(jax.jit(function), *operands)
        gradients = jax.tree.leaves(pull(jnp.cos(y)))
        results.append([y, *(a for a in gradients if a.dtype != jax.dtypes.float0)])
    assert len(results[0]) == 4
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_single_round_adds_no_gradient_and_writes_no_zeros(monkeypatch):
    """All that adds is in loops, one for each of three gradients, which run once or never."""
    monkeypatch.setattr(moe, "uninitialised", jax.lax.empty)
    share = lambda w, x, weights, plan, number: jnp.sin(x @ w) * weights
    loss = lambda *operands: jnp.sum(moe.all_rounds(share, *operands[:3], (), operands[3]))
    shapes = (3, 4), (5, 3), (5, 1)
    arguments = (*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), jnp.int32(1))
    eqns = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arguments).eqns
    outside = [(eqn.primitive.name, eqn.outvars[0].aval.shape) for eqn in eqns]
    assert not [name for name, shape in outside if shape in shapes and name in ("add", "add_any", "broadcast_in_dim")]
    loops = [eqn for eqn in eqns if eqn.primitive.name == "while"]
    carried = [[var.aval.shape for var in eqn.outvars if var.aval.shape] for eqn in loops]
    assert carried == [[(5, 4)], [*shapes], *([shape] for shape in shapes)]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_rows_of_no_expert_here_reach_no_result_and_no_gradient(platform, monkeypatch):
    """Half of the experts are elsewhere, and experts give back their rows: y is x times the sum of its weights here."""
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    x, *_ = layer()
    routing = moe.route(jax.random.normal(jax.random.key(1), (TOKENS, E)), X)
    own = routing._replace(experts_tX=jnp.minimum(routing.experts_tX, E // 2))

    def experts(w, x, sizes, factors, copies, arriving):
        y = with_nan_after(moe.times_factors(with_nan_after(x, sizes), factors), sizes)
        return moe.add_copies(y, copies)

    y, pull = jax.vjp(lambda x: moe.local_experts((), x, own, experts, E // 2, TOKENS * X)[0], x)
    weights = np.sum(np.where(own.experts_tX < E // 2, own.weights_tX, 0), 1)[:, None]
    np.testing.assert_allclose(y, weights * x, atol=1e-6)
    np.testing.assert_allclose(pull(jnp.cos(x))[0], weights * jnp.cos(x), atol=1e-6)


def accepted_pairs(experts, order, buffer_of) -> np.ndarray:
    """[TOKENS, E]: 1 for the (token, expert) pairs that fit into their buffers, 0 for those that are dropped.

    The (token, choice) pairs arrive in `order`. `buffer_of(token, expert)` is (the buffer of a pair, its size).
    """
    accepted, filled = np.ones((TOKENS, E)), {}
    for token, choice in order:
        expert = experts[token, choice]
        buffer, size = buffer_of(token, expert)
        filled[buffer] = filled.get(buffer, 0) + 1
        accepted[token, expert] = filled[buffer] <= size
    return accepted


@pytest.mark.slow
def test_pairs_without_a_slot_are_dropped_and_counted():
    """The results and gradients of the others are right. First choices come first."""
    devices, x, router = np.arange(TOKENS) // (TOKENS // 8), *layer()[:2]
    sharded = jax.jit(on_mesh(4, "capacity", capacity=2))
    grad = jax.jit(jax.value_and_grad(lambda w, *rest: mixture(*w, *rest), has_aux=True))
    order = [(token, choice) for choice in range(X) for token in range(TOKENS)]
    for name in ("to one", "some empty", "random"):
        extra = routings()[name]
        experts = np.asarray(jax.lax.top_k(x @ router + extra, X)[1])
        accepted = accepted_pairs(experts, order, lambda token, expert: ((devices[token], expert), 2))
        (want_loss, want_y), want_grads = grad(layer(), extra, False, accepted)
        loss, grads, y, dropped = sharded(layer(), extra, False)
        assert int(dropped) == np.sum(accepted == 0) > 0
        assert abs(loss - want_loss) < 1e-5 * want_loss and relative_error(y, want_y) < 1e-5
        for a, b in zip(grads, want_grads, strict=True):
            assert relative_error(a, b) < 1e-5, name


# -- communication


def moved(function, *args) -> list[tuple[str, tuple, str]]:
    """(primitive, shape of the operand, dtype) of each collective over `expert` in a jaxpr."""
    collectives = []
    for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr):
        axes = eqn.params.get("axis_name", ())
        is_over_experts = "expert" in ([axes] if isinstance(axes, str) else axes)
        if is_over_experts and eqn.primitive.name not in ("pvary", "axis_index", "psum", "psum_invariant"):
            collectives.append((eqn.primitive.name, eqn.invars[0].aval.shape, str(eqn.invars[0].aval.dtype)))
    return collectives


@pytest.mark.parametrize("impl", ["dropless", "capacity", "reference"])
def test_without_an_expert_axis_nothing_is_sent(impl):
    assert moved(on_mesh(1, impl), layer(), routings()["random"], False) == []


def by_one_matmul(w_edd, x, sizes, factors, copies=None):
    """Experts that are a matrix each."""
    y = moe.grouped_matmul(moe.times_factors(x, factors), w_edd, sizes)
    return y if copies is None else moe.add_copies(y, copies)


def tpu_mesh(n: int) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    return Mesh(np.array(devices).reshape(8 // n, n), AXES, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.slow
def test_on_a_tpu_rows_travel_without_padding():
    """The operand is the t*X pairs and the result is the buffer, for dispatch and combine, forward and backward.

    With the rows of a dispatch travel their factors, a number for each, and back with gradients those of the factors.
    Beside them only the counts travel, once: N*E integers. A buffer that may be too small has two loops of rounds: one
    forward, and one backward that computes each round again.
    """
    n, t = 4, TOKENS // 8
    for factor, exchanges in ((1.5, 5), (n, 2)):
        sharded = on_mesh(n, "dropless", buffer_factor=factor, platform_mesh=tpu_mesh(n))
        counts, *rows = moved(sharded, layer(), routings()["random"], False)
        assert counts == ("all_gather", (E,), "int32")
        pairs, buffer = ((rows, D) for rows in (t * X, int(t * X * factor)))
        factors = [row for row in rows if row[1][1:] == (1,)]
        sent = [("ragged_all_to_all", shape, "float32") for shape in (pairs, buffer) * exchanges]
        assert [row for row in rows if row not in factors] == sent
        assert sorted(factors) == sorted((kind, (rows, 1), dtype) for kind, (rows, _), dtype in sent[:exchanges])


@pytest.mark.slow
def test_contiguous_rows_give_the_same_results():
    """Rows sent as [d / 128, 128]: the reference's results and gradients, in one round or several."""
    d, t = 256, TOKENS // 8
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = (TOKENS, d), (E, d, d), (TOKENS, E)
    arguments = [jax.random.normal(k, s) / d**0.5 for k, s in zip(keys, shapes, strict=True)]
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)

    def mixed(impl):
        def per_device(x_td, w_edd, logits_tE):
            operands = (w_edd, x_td, moe.route(logits_tE, X), by_one_matmul, "expert")
            return moe.reference(*operands) if impl == "reference" else moe.dropless(*operands, impl)[0]

        sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(P(AXES), P("expert"), P(AXES)), out_specs=P(AXES))
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(3 * sharded(*a))), (0, 1, 2)))(*arguments)

    assert_near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    want = mixed("reference")
    jax.tree.map(assert_near, mixed(4 * t * X), want)
    jax.tree.map(assert_near, mixed(t * X // 2), want)


def test_every_row_is_sent_once_to_the_device_of_its_expert():
    """By the slices of the plans: each device sends exactly its pairs, into rows that no other device writes."""
    n, t = 4, TOKENS // 8
    x, router, *_ = layer()
    mesh = jax.make_mesh((8 // n, n), AXES, axis_types=(AxisType.Auto,) * 2)

    def per_device(logits_tE):
        pairs = moe.sort_pairs(moe.route(logits_tE, X).experts_tX, E)
        loads_NE = collectives.all_gather(pairs.loads_E, "expert", tiled=False, algorithm="xla")
        return jax.tree.map(lambda a: a[None], (pairs.loads_E, *moe.exchange_plan(loads_NE, "expert", 0, n * t * X)))

    plan = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES)))
    for name, extra in routings().items():
        check_slices(n, t, *jax.device_get(plan(x @ router * (name != "tied") + extra)))


def check_slices(n, t, loads, dispatch, combine, sizes):
    np.testing.assert_array_equal(dispatch.send_sizes.sum(1), t * X)  # exactly the pairs
    for group in range(8 // n):
        devices = [group * n + i for i in range(n)]
        for receiver, device in enumerate(devices):
            writes = []
            for sender, other in enumerate(devices):
                for e in range(E // n):
                    sent, received = receiver * (E // n) + e, sender * (E // n) + e  # indices in the two plans
                    start, size, target = (int(a[other, sent]) for a in dispatch[:3])
                    assert size == loads[other, sent] == dispatch.recv_sizes[device, received]
                    assert start == np.sum(loads[other, :sent])
                    assert (target, size, start) == tuple(int(a[device, received]) for a in combine[:3])
                    assert np.sum(sizes[device, :e]) <= target and target + size <= np.sum(sizes[device, : e + 1])
                    writes += range(target, target + size)
            assert sorted(writes) == list(range(np.sum(sizes[device])))


def compiled(num_chunks: int) -> str:
    """The scheduled program of a layer with 4 experts a device."""
    n, t, d = 8, 1024, 512
    mesh = tpu_mesh(n)

    def per_device(x_td, w_edd, logits_tE):
        rows = 2 * t * X // num_chunks
        dropless = lambda x_td, routing: moe.dropless(w_edd, x_td, routing, by_one_matmul, "expert", rows)
        return moe.in_chunks(dropless, x_td, moe.route(logits_tE, X), num_chunks)[0]

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=jax.NamedSharding(mesh, P("expert")))
    arguments = (shape(n * t, d), shape(4 * n, d, d), shape(n * t, 4 * n))
    return jax.jit(sharded).lower(*arguments).compile().as_text()


@pytest.mark.slow
def test_compiled_for_tpu7x_the_sparse_cores_send_the_rows():
    """They do so asynchronously: one instruction starts it, a later one waits."""
    program = compiled(num_chunks=1)
    starts = [line for line in program.splitlines() if "ragged-all-to-all" in line and "call-start(" in line]
    assert len(starts) == 6 and all('async_execution_thread="sparsecore"' in line for line in starts)
    assert program.count('custom_call_target="tpu_custom_call"') == 2  # one of the first round, one of all others


@pytest.mark.slow
def test_compiled_for_tpu7x_one_chunk_is_computed_while_another_travels(full_effort):
    """One exchange of a dispatch and one combine are beside the matmul of the other chunk; of a single chunk, none.

    Of the dispatch it is that of the factors.
    """

    def kernels_beside(num_chunks: int) -> list[int]:
        """The number of kernels between start and end of each exchange, by the order of the ends."""
        program = hlo.parse(compiled(num_chunks))
        order = list(program.computations[program.entry].values())
        place = {instruction.name: number for number, instruction in enumerate(order)}
        ends = [i for i in order if i.opcode.endswith("-done") and "ragged-all-to-all" in i.name]
        between = [order[place[end.operands[0]] : place[end.name]] for end in ends]
        return [sum("tpu_custom_call" in i.attributes.get("custom_call_target", "") for i in span) for span in between]

    assert kernels_beside(1) == [0, 0, 0]
    assert kernels_beside(2) == [0, 0, 0, 1, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "spec", "copied"), [((4, 224, 512), P(None, "expert"), True), ((4 * 224, 512), P("expert"), False)]
)
def test_compiled_for_tpu7x_experts_sharded_as_one_matrix_are_gathered_without_copies(shape, spec, copied):
    """Each device has half of an expert. With 28 rows of all four instead, shards do not end at registers' edges."""
    n, rows, e, d, m = 8, 1024, 4, 8 * 28, 512
    mesh = tpu_mesh(n)

    def gradients(x_rd, w, sizes_e):
        unstack = lambda w: fsdp.gather(w, spec, "expert").reshape(e, d, m)
        y_rm, backward = jax.vjp(lambda x_rd, w: moe.grouped_matmul(x_rd, unstack(w), sizes_e), x_rd, w)
        return backward(y_rm)

    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, layout))
        for shape, dtype, layout in (
            ((n * rows, d), jnp.bfloat16, P("expert")),
            (shape, jnp.bfloat16, spec),
            ((e,), jnp.int32, P()),
        )
    ]
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(P("expert"), spec, P()), out_specs=(P("expert"), spec))
    program = jax.jit(sharded).lower(*arguments).compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"bf16\[([\d,]+)\]\S* copy\(", program)]
    assert (e * d * m in sizes) == copied


@pytest.mark.slow
def test_compiled_for_tpu7x_top_k_does_not_sort():
    """`jax.lax.top_k` does."""
    scores = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=jax.NamedSharding(tpu_mesh(8), P("expert")))
    sorts = lambda f: " sort(" in jax.jit(partial(f, k=8)).lower(scores).compile().as_text()
    assert sorts(jax.lax.top_k) and not sorts(moe.top_k)


@pytest.mark.slow
def test_demonstration():
    done = subprocess.run([sys.executable, "moe.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "skewed router" in done.stdout and done.stdout.count("dropped   0.0%") == 4 and done.stderr == ""
