"""Routing and dispatch against a plain one-device mixture, token by token; and what travels, counted."""

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

import fsdp
import moe
import sharding
from compiled import hlo

ROOT = Path(__file__).parents[1]
AXES = ("fsdp", "expert")
E, X, D, M, TOKENS = 8, 2, 16, 12, 64


# -- the router


def route_one(logits, choices, scores="softmax", renormalise=True, bias=None, groups=1, groups_kept=1, scale=1.0):
    """(experts, weights) of one token, in float64, with sorts."""
    logits = logits.astype(np.float64)
    s = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    s = s if scores == "softmax" else 1 / (1 + np.exp(-logits))
    wanted = s if bias is None else s + bias
    size = len(s) // groups
    of_group = [np.sort(wanted[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: -of_group[g])[:groups_kept]
    allowed = [e for e in range(len(s)) if e // size in kept]
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
    found = jax.jit(partial(moe.route, choices=3, bias_E=None if bias is None else jnp.asarray(bias), **options))(
        logits
    )
    for token, row in enumerate(logits):
        experts, weights = route_one(row, 3, bias=bias, **options)
        assert found.experts_tX[token].tolist() == experts
        np.testing.assert_allclose(found.weights_tX[token], weights, rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(found.scores_tE, -1), 1, rtol=1e-5)


def test_of_equal_scores_the_first_are_chosen():
    assert moe.route(jnp.zeros((2, E)), 3).experts_tX.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("k", [1, 2, 7, 12])
def test_the_largest_are_those_that_jax_finds(k):
    """Equals and NaN included; as many as there are."""
    numbers = np.random.default_rng(0).integers(-3, 4, (50, 12)).astype(np.float32)
    numbers[::7, 3], numbers[::5, 1:9], numbers[1, 4] = np.inf, 0.0, np.nan
    for x in (jnp.asarray(numbers), jnp.asarray(numbers).reshape(5, 10, 12)):
        found, wanted = moe.top_k(x, k), jax.lax.top_k(x, k)
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])
        assert found[1].dtype == jnp.int32


def test_the_bias_chooses_and_does_not_weigh():
    logits_tE = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    found = moe.route(logits_tE, 2, bias_E=jnp.array([0, -1.0, 0, 1.0]), renormalise=False)
    assert found.experts_tX.tolist() == [[3, 0]]
    np.testing.assert_allclose(found.weights_tX, [[0.1, 0.4]], rtol=1e-6)


def test_the_bias_follows_the_loads():
    bias = moe.updated_bias(jnp.zeros((2, 3)), jnp.array([[9, 0, 3], [1, 1, 1]]), 0.5)
    assert bias.tolist() == [[-0.5, 0.5, 0.5], [0, 0, 0]]  # the mean is 4; and 1


def test_auxiliary_losses():
    """Of a router that has not decided, 1 and log(E)^2; of one that sends all to one expert, E."""
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
def memory_as_it_is_found(monkeypatch):
    """On a CPU it would be zeros; what is read of it by mistake is to be seen."""
    monkeypatch.setattr(moe, "unwritten", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


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
        is_of = (rows[:, None] == np.arange(4)).astype(np.float32)  # a row behind the last group is of none
        ours_alone = lambda a, rows=rows: np.where((rows < 4)[:, None], a, np.nan)
        masked = dy * (rows < 4)[:, None]
        want = np.einsum("re,rd,edm->rm", is_of, x, w) + is_of @ bias, np.einsum("rm,re,edm->rd", masked, is_of, w)
        want += np.einsum("rd,re,rm->edm", x, is_of, masked), is_of.T @ dy
        for a, b in zip(ours(ours_alone(x), w, ours_alone(dy), bias, jnp.array(sizes)), want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=str(sizes))


def test_swiglu_with_a_limit():
    """By hand: gate 10 is taken as 7, up -9 as -7; sigmoid(1.702 * 7) is 0.9999933, and up counts from -1."""
    assert float(moe.swiglu(jnp.float32(10), jnp.float32(-9), 7.0)) == pytest.approx(7 * 0.9999933 * -6, rel=1e-6)
    assert float(moe.swiglu(jnp.float32(1), jnp.float32(0.5), 7.0)) == pytest.approx(
        1.5 / (1 + np.exp(-1.702)), rel=1e-6
    )
    assert float(moe.swiglu(jnp.float32(1), jnp.float32(0.5))) == pytest.approx(0.5 / (1 + np.exp(-1)), rel=1e-6)


# -- dispatch


@functools.cache
def layer() -> tuple:
    """x_TD, router, gate, up, down."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(TOKENS, D), (D, E), (E, D, M), (E, D, M), (E, M, D)]
    return tuple(jax.random.normal(k, s) / s[-2] ** 0.5 for k, s in zip(keys, shapes, strict=True))


def routings() -> dict[str, np.ndarray]:
    """What is added to the router's logits."""
    zeros = np.zeros((TOKENS, E), np.float32)
    to_one, some_empty, tied = zeros.copy(), zeros.copy(), zeros.copy()
    to_one[:, 5] = 50
    some_empty[:, [0, 3, 6, 7]] = -50
    even = np.roll(np.eye(E, dtype=np.float32) * 50, 1, 0)[np.arange(TOKENS) % E]
    return {"random": zeros, "even": even, "to one": to_one, "some empty": some_empty, "tied": tied}


def mixture(x, router, gate, up, down, extra, tied, kept=None):
    """The plain layer: every expert, then a weighted sum of those that are chosen and, `kept` [t, E], not dropped."""
    logits = jnp.where(tied, 0.0, x @ router) + extra
    top, experts = jax.lax.top_k(logits, X)
    weights = jax.nn.softmax(top)
    gates = jnp.sum(jax.nn.one_hot(experts, E) * weights[..., None], 1)
    gates = gates if kept is None else gates * kept
    product = jax.nn.silu(jnp.einsum("td,edm->tem", x, gate)) * jnp.einsum("td,edm->tem", x, up)
    y = jnp.einsum("tem,emd,te->td", product, down, gates)
    return jnp.sum(jnp.sin(y) + y**2), y


def on_mesh(n: int, impl: str, *, room: float = E, capacity: int = TOKENS, platform_mesh=None):
    """shard_map of (layer, extra, tied) -> (loss, gradients of the layer, y_TD, dropped); `room` by the mean."""
    mesh = platform_mesh or jax.make_mesh((8 // n, n), AXES, axis_types=(AxisType.Auto,) * 2)
    specs = (P(AXES), P(), P("expert"), P("expert"), P("expert"))

    def loss(weights, extra_tE, tied):
        x_td, router, gate, up, down = weights
        routing = moe.route(jnp.where(tied, 0.0, x_td @ router) + extra_tE, X)

        def experts(x, sizes):
            return moe.grouped_matmul(moe.gated_matmul(x, gate, up, sizes), down, sizes)

        dropped = jnp.sum(0 * routing.experts_tX)
        if impl in ("dropless", "in parts"):
            parts = 2 if impl == "in parts" else 1
            rows = int(room * x_td.shape[0] * X) // parts
            dropless = lambda x_td, routing: moe.dropless(x_td, routing, experts, "expert", rows)
            y_td, dropped = moe.in_parts(dropless, x_td, routing, parts)
        elif impl == "capacity":
            y_td, dropped = moe.with_capacity(x_td, routing, experts, "expert", capacity)
        else:
            y_td = moe.reference(x_td, routing, experts, "expert")
        return jnp.sum(jnp.sin(y_td) + y_td**2), (y_td, dropped)

    def per_device(weights, extra_tE, tied):
        uncut = [tuple(axis for axis in AXES if axis not in sharding.axes_of(spec)) for spec in specs]
        vary = lambda w, axes: jax.lax.pcast(w, axes, to="varying") if axes else w
        weights = tuple(vary(w, axes) for w, axes in zip(weights, uncut, strict=True))
        (share, (y_td, dropped)), grads = jax.value_and_grad(loss, has_aux=True)(weights, extra_tE, tied)
        grads = tuple(jax.lax.psum(dw, axes) if axes else dw for dw, axes in zip(grads, uncut, strict=True))
        return jax.lax.psum(share, AXES), grads, y_td, jax.lax.psum(dropped, AXES)

    in_specs, out_specs = (specs, P(AXES), P()), (P(), specs, P(AXES), P())
    return jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@functools.cache
def expected(name: str):
    grad = jax.jit(jax.value_and_grad(lambda w, *rest: mixture(*w, *rest), has_aux=True))
    return grad(layer(), routings()[name], name == "tied")


QUICK = {(2, "capacity")}


@pytest.mark.parametrize(
    ("n", "impl"),
    [
        pytest.param(n, impl, marks=[] if (n, impl) in QUICK else [pytest.mark.slow])
        for n in (1, 2, 4, 8)
        for impl in ("dropless", "in parts", "capacity", "reference")
    ],
)
def test_dispatch_equals_the_plain_mixture(n, impl):
    """Loss, gradients and results, however the tokens are routed; nothing is dropped where there is room for all."""
    sharded = jax.jit(on_mesh(n, impl, room=n))
    for name, extra in routings().items():
        loss, grads, y, dropped = sharded(layer(), extra, name == "tied")
        (want_loss, want_y), want_grads = expected(name)
        assert abs(loss - want_loss) < 1e-5 * want_loss, name
        assert relative_error(y, want_y) < 1e-5 and dropped == 0, name
        for a, b in zip(grads, want_grads, strict=True):
            assert relative_error(a, b) < 1e-5 or np.linalg.norm(b) < 1e-6 > np.linalg.norm(a), name


@pytest.mark.slow
def test_what_a_tpu_calls_is_what_the_cpu_computes(monkeypatch):
    """gmm.py's functions, here by their references: values and gradients."""
    _, _, gate, up, down = layer()
    x, sizes = jax.random.normal(jax.random.key(0), (40, gate.shape[1])), jnp.array([0, 9, 1, 0, 20, 3, 0, 4])[:E]

    def experts(x, gate, up, down):
        product = moe.gated_matmul(x, gate, up, sizes, 7.0)
        return moe.grouped_matmul(product, down.swapaxes(1, 2), sizes, transpose=True)

    found = []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(sharding, "platform", lambda platform=platform: platform)
        y, pull = jax.vjp(experts, x, gate, up, down)
        found.append((y, *pull(jnp.cos(y))))
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("sources", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_zeros_are_put_where_rows_may_be_missing_alone(sources, copies):
    """Elsewhere XLA:TPU is spared a pass over all rows."""
    x, order = jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0, 1])
    copy = lambda x: moe.copy_rows(x, order, jnp.argsort(order), moe.Missing(sources, copies))
    run = lambda x, dy: (copy(x), *jax.vjp(copy, x)[1](dy))
    modes = re.findall(r"GatherScatterMode\.(\w+)", str(jax.make_jaxpr(run)(x, x)))
    assert {"FILL_OR_DROP" if filled else "CLIP" for filled in (sources, copies)} == set(modes)
    y, dx = run(x, x)
    np.testing.assert_array_equal(y, x[order])
    np.testing.assert_array_equal(dx[order], x)


def kept_of(experts, order, rooms) -> np.ndarray:
    """[TOKENS, E]: pairs that find room, taken in `order`, of (token, choice); `rooms(token, expert)` names the room
    that a pair takes, and how large that is."""
    kept, taken = np.ones((TOKENS, E)), {}
    for token, choice in order:
        expert = experts[token, choice]
        room, size = rooms(token, expert)
        taken[room] = taken.get(room, 0) + 1
        kept[token, expert] = taken[room] <= size
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["dropless", "capacity"])
def test_what_finds_no_room_is_dropped_and_counted(impl):
    """And all else is as it should be, gradients too."""
    n, t = 4, TOKENS // 8
    devices = np.arange(TOKENS) // t
    sharded = jax.jit(on_mesh(n, impl, room=0.75, capacity=2))
    grad = jax.jit(jax.value_and_grad(lambda w, *rest: mixture(*w, *rest), has_aux=True))
    for name in ("to one", "some empty", "random"):
        extra = routings()[name]
        kept = kept_of(*who_comes_when(impl, extra, n, t, devices))
        (want_loss, want_y), want_grads = grad(layer(), extra, False, kept)
        loss, grads, y, dropped = sharded(layer(), extra, False)
        assert int(dropped) == np.sum(kept == 0) > 0
        assert abs(loss - want_loss) < 1e-5 * want_loss and relative_error(y, want_y) < 1e-5
        for a, b in zip(grads, want_grads, strict=True):
            assert relative_error(a, b) < 1e-5, name


def who_comes_when(impl, extra, n, t, devices):
    """Arguments of `kept_of`."""
    x, router, *_ = layer()
    experts = np.asarray(jax.lax.top_k(x @ router + extra, X)[1])
    order = [(token, choice) for choice in range(X) for token in range(TOKENS)]
    if impl == "capacity":  # of every device for each expert, first choices first
        return experts, order, lambda token, expert: ((devices[token], expert), 2)
    # Into one buffer a device, sorted by its experts, then by sender and choice.
    order.sort(key=lambda pair: (experts[pair], devices[pair[0]]))
    return experts, order, lambda token, expert: ((devices[token] // n, expert // (E // n)), int(0.75 * t * X))


# -- what travels


def moved(function, *args) -> list[tuple[str, tuple, str]]:
    """(primitive, shape of the operand, dtype) of what a jaxpr moves over `expert`."""
    found = []
    for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr):
        axes = eqn.params.get("axis_name", ())
        is_over_experts = "expert" in ([axes] if isinstance(axes, str) else axes)
        if is_over_experts and eqn.primitive.name not in ("pvary", "axis_index", "psum", "psum_invariant"):
            found.append((eqn.primitive.name, eqn.invars[0].aval.shape, str(eqn.invars[0].aval.dtype)))
    return found


@pytest.mark.parametrize("impl", ["dropless", "capacity", "reference"])
def test_without_an_expert_axis_nothing_is_sent(impl):
    assert moved(on_mesh(1, impl), layer(), routings()["random"], False) == []


def tpu_mesh(n: int) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    return Mesh(np.array(devices).reshape(8 // n, n), AXES, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.slow
def test_on_a_tpu_rows_travel_as_they_are():
    """The collective takes the t*X pairs that there are, and the result has the room that was given, both ways and both
    ways back; beside them only the counts travel: N*E integers, once."""
    n, t = 4, TOKENS // 8
    sharded = on_mesh(n, "dropless", room=1.5, platform_mesh=tpu_mesh(n))
    found = moved(sharded, layer(), routings()["random"], False)
    pairs, buffer = ((rows, D) for rows in (t * X, t * X * 3 // 2))
    assert found == [
        ("all_gather", (E,), "int32"),
        *[("ragged_all_to_all", shape, "float32") for shape in (pairs, buffer, pairs, buffer)],
    ]


@pytest.mark.slow
def test_rows_of_whole_registers(monkeypatch):
    """They travel as [d / 128, 128]: results and gradients are the reference's, or, short of room, those of [d]."""
    d, t = 256, TOKENS // 8
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = (TOKENS, d), (E, d, d), (TOKENS, E)
    arguments = [jax.random.normal(k, s) / d**0.5 for k, s in zip(keys, shapes, strict=True)]
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)

    def mixed(impl):
        def per_device(x_td, w_edd, logits_tE):
            experts = lambda x, sizes: moe.grouped_matmul(x, w_edd, sizes)
            routing = moe.route(logits_tE, X)
            if impl == "reference":
                return moe.reference(x_td, routing, experts, "expert")
            return moe.dropless(x_td, routing, experts, "expert", impl)[0]

        sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(P(AXES), P("expert"), P(AXES)), out_specs=P(AXES))
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(3 * sharded(*a))), (0, 1, 2)))(*arguments)

    assert_near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(assert_near, mixed(4 * t * X), mixed("reference"))
    short_of_room = mixed(t * X // 2)
    monkeypatch.setattr(moe, "in_rows", lambda x_rd: x_rd)
    jax.tree.map(assert_near, short_of_room, mixed(t * X // 2))


def test_every_row_is_sent_once_to_where_its_expert_is():
    """What the slices say: each device sends its pairs, no others, into places that none else writes."""
    n, t = 4, TOKENS // 8
    x, router, *_ = layer()
    mesh = jax.make_mesh((8 // n, n), AXES, axis_types=(AxisType.Auto,) * 2)

    def per_device(logits_tE):
        pairs = moe.sort_pairs(moe.route(logits_tE, X).experts_tX, E)
        return jax.tree.map(lambda a: a[None], (pairs.loads_E, *moe.exchange_plan(pairs.loads_E, "expert", n * t * X)))

    plan = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES)))
    for name, extra in routings().items():
        check_slices(n, t, *jax.device_get(plan(x @ router * (name != "tied") + extra)))


def check_slices(n, t, loads, there, back, sizes, dropped):
    np.testing.assert_array_equal(there.size.sum(1), t * X)  # all pairs, and only these
    assert not np.any(dropped)
    for group in range(8 // n):
        devices = [group * n + i for i in range(n)]
        for receiver, device in enumerate(devices):
            writes = []
            for sender, other in enumerate(devices):
                for e in range(E // n):
                    of_sender, of_receiver = receiver * (E // n) + e, sender * (E // n) + e
                    start, size, target = (int(a[other, of_sender]) for a in there[:3])
                    assert size == loads[other, of_sender] == there.arriving[device, of_receiver]
                    assert start == np.sum(loads[other, :of_sender])
                    assert (target, size, start) == tuple(int(a[device, of_receiver]) for a in back[:3])
                    assert np.sum(sizes[device, :e]) <= target and target + size <= np.sum(sizes[device, : e + 1])
                    writes += range(target, target + size)
            assert sorted(writes) == list(range(np.sum(sizes[device])))


def compiled(parts: int) -> str:
    """The schedule of a layer with 4 experts a device."""
    n, t, d = 8, 1024, 512
    mesh = tpu_mesh(n)

    def per_device(x_td, w_edd, logits_tE):
        experts = lambda x, sizes: moe.grouped_matmul(x, w_edd, sizes)
        dropless = lambda x_td, routing: moe.dropless(x_td, routing, experts, "expert", 2 * t * X // parts)
        return moe.in_parts(dropless, x_td, moe.route(logits_tE, X), parts)[0]

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=jax.NamedSharding(mesh, P("expert")))
    arguments = (shape(n * t, d), shape(4 * n, d, d), shape(n * t, 4 * n))
    return jax.jit(sharded).lower(*arguments).compile().as_text()


@pytest.mark.slow
def test_compiled_for_tpu7x_the_sparse_cores_send_the_rows():
    """Asynchronously: started, and waited for later."""
    program = compiled(parts=1)
    starts = [line for line in program.splitlines() if "ragged-all-to-all" in line and "call-start(" in line]
    assert len(starts) == 2 and all('async_execution_thread="sparsecore"' in line for line in starts)
    assert program.count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.slow
def test_compiled_for_tpu7x_parts_compute_while_others_are_on_their_way():
    """One part's rows come while another's are multiplied, and go while the next one's are; of a single part none."""

    def kernels_beside(parts: int) -> list[int]:
        """Of each exchange, in the order of their ends: between its beginning and its end."""
        program = hlo.parse(compiled(parts))
        order = list(program.computations[program.entry].values())
        place = {instruction.name: number for number, instruction in enumerate(order)}
        ends = [i for i in order if i.opcode.endswith("-done") and "ragged-all-to-all" in i.name]
        between = [order[place[end.operands[0]] : place[end.name]] for end in ends]
        return [sum("tpu_custom_call" in i.attributes.get("custom_call_target", "") for i in its) for its in between]

    assert kernels_beside(1) == [0, 0]
    assert kernels_beside(2) == [0, 1, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "spec", "copied"), [((4, 224, 512), P(None, "expert"), True), ((4 * 224, 512), P("expert"), False)]
)
def test_compiled_for_tpu7x_rows_of_all_matrices_are_gathered_without_copies(shape, spec, copied):
    """Half of an expert each, not 28 rows of all four, which lie across registers."""
    n, rows, e, d, m = 8, 1024, 4, 8 * 28, 512
    mesh = tpu_mesh(n)

    def gradients(x_rd, w, sizes_e):
        apart = lambda w: fsdp.gather(w, spec, "expert").reshape(e, d, m)
        y_rm, backward = jax.vjp(lambda x_rd, w: moe.grouped_matmul(x_rd, apart(w), sizes_e), x_rd, w)
        return backward(y_rm)

    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, its))
        for shape, dtype, its in (
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
def test_the_largest_are_found_without_a_sort():
    """Compiled for TPU7x: `jax.lax.top_k` is one."""
    scores = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=jax.NamedSharding(tpu_mesh(8), P("expert")))
    sorts = lambda f: " sort(" in jax.jit(partial(f, k=8)).lower(scores).compile().as_text()
    assert sorts(jax.lax.top_k) and not sorts(moe.top_k)


@pytest.mark.slow
def test_demonstration():
    done = subprocess.run([sys.executable, "moe.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "skewed router" in done.stdout and done.stdout.count("dropped   0.0%") >= 2
