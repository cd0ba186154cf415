"""Attention over a sharded sequence against attention on one device: values, gradients, communication, balance."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import executions

import context
import placement
from attention import attention, attention_gradients, attention_in_chunks
from masks import UNSEEN, Mask, block_ranges, mask_and_scores

SINKS = np.array([0.0, 1.0, -1.0, 3.0, -40.0, 0.5, 2.0, 0.0], np.float32)
SHARDED, LSE_SHARDED = P(None, "context"), P(None, None, "context")


def inputs(b=2, T=48, n=8, k=2, H=4, V=6, dtype=np.float32, packed=True):
    """q, k, v, segment ids, and the weights of the two results in a loss."""
    random = np.random.default_rng(0)
    shapes = (b, T, n, H), (b, T, k, H), (b, T, k, V), (b, T, n, V), (b, n, T)
    q, keys, values, *weights = [random.standard_normal(shape).astype(dtype) for shape in shapes]
    ids = np.sort(random.integers(1, 4, (b, T)), 1).astype(np.int32) if packed else np.zeros((b, T), np.int32)
    return (q, keys, values), ids, weights


def mesh_of(c):
    return jax.make_mesh((c,), ("context",), devices=jax.devices()[:c], axis_types=(AxisType.Auto,))


def places_of(c, T, impl="ring", head_ways=1, balanced=False, **_):
    return context.order(T, placement.ring_size(c, impl, head_ways), balanced)


def with_gradients(attend, qkv, weights, sinks):
    """The gradients of a weighted sum of out and lse in q, k, v and the sinks, and all results."""

    def loss(q, k, v, sinks):
        out, lse, *largest = attend(q, k, v, sinks)
        return jnp.sum(out * weights[0]) + jnp.sum(jnp.maximum(lse, -100.0) * weights[1]), (out, lse, *largest)

    return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*qkv, sinks)


def context_attention(q, k, v, sinks=None, *, segments=None, kernel=False, interpret=False, **options):
    """`context.context_attention` with the fields of Mask, Scores and Method as keywords."""
    method = context.Method(**{name: options.pop(name) for name in context.Method._fields if name in options})
    mask, scores = mask_and_scores(segments=segments, **options)
    return context.context_attention(q, k, v, mask, scores, sinks, method=method, kernel=kernel, interpret=interpret)


def sharded_function(c, qkv, ids, *, sinks=False, packed=True, **options):
    """The function under shard_map, of arrays in the order of the devices."""

    def per_device(qkv, ids, weights, sinks_n):
        attend = lambda q, k, v, sinks_n: context_attention(
            q, k, v, sinks_n if sinks else None, segments=(ids, ids) if packed else None, **options
        )
        sinks_n = jax.lax.pcast(sinks_n, "context", to="varying")
        (dq, dk, dv, dsinks), results = with_gradients(attend, qkv, weights, sinks_n)
        return (dq, dk, dv, jax.lax.psum(dsinks, "context")), results

    return jax.shard_map(
        per_device,
        mesh=mesh_of(c),
        in_specs=(SHARDED, SHARDED, (SHARDED, LSE_SHARDED), P()),
        out_specs=((SHARDED, SHARDED, SHARDED, P()), (SHARDED, *[LSE_SHARDED] * (1 + options.get("largest", False)))),
    )


def check(c, tolerance=2e-6, shape=None, **options):
    qkv, ids, weights = inputs(**shape or {}, packed=options.get("packed", True))
    places = places_of(c, ids.shape[1], **options)
    at = lambda x, dim: np.take(np.asarray(x), places, dim)
    sharded = jax.jit(sharded_function(c, qkv, ids, **options))
    got = sharded([at(x, 1) for x in qkv], at(ids, 1), (at(weights[0], 1), at(weights[1], 2)), SINKS)

    plain = {name: options[name] for name in ("window", "soft_cap", "scale", "largest") if name in options}
    plain = mask_and_scores(segments=(ids, ids), **plain)
    attend = lambda q, k, v, sinks: attention(q, k, v, *plain, sinks if options.get("sinks") else None)
    want = jax.jit(partial(with_gradients, attend))(qkv, weights, SINKS)
    dims = 1, 1, 1, None, 1, *[2] * (len(got[1]) - 1)
    for (path, a), b, dim in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), dims, strict=True):
        b = b if dim is None else at(b, dim)
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


# -- values and gradients

RING, ZIGZAG = dict(impl="ring"), dict(impl="ring", balanced=True)
GATHER, GATHER_ZIGZAG = dict(impl="all_gather"), dict(impl="all_gather", balanced=True)
EXCHANGE = dict(impl="all_to_all")
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "c, options, shape",
    [
        (4, ZIGZAG | dict(sinks=True), dict(k=8)),
        (2, GATHER_ZIGZAG | dict(soft_cap=2.0), dict(k=1)),
        (4, EXCHANGE | dict(sinks=True), dict(k=1)),
        (4, dict(window=32, sinks=True), {}),
        (2, GATHER_ZIGZAG | dict(max_logit=9.0, sinks=True), {}),
        slow(4, EXCHANGE | dict(max_logit=9.0), dict(k=4)),
        slow(4, RING | dict(max_logit=9.0, head_ways=4), {}),
        slow(4, dict(window=32, max_logit=9.0), {}),
        slow(2, ZIGZAG, {}),
        slow(8, ZIGZAG | dict(soft_cap=2.0), dict(k=1)),
        slow(8, RING, {}),
        slow(4, GATHER_ZIGZAG | dict(sinks=True), {}),
        slow(8, ZIGZAG | dict(head_ways=4), dict(k=2)),
        slow(8, dict(window=3), {}),  # a device has 6 positions
        slow(3, ZIGZAG, {}),
        slow(2, RING | dict(packed=False), {}),
        slow(4, RING | dict(scale=0.3), dict(k=4)),
        slow(8, GATHER, dict(k=8)),
        slow(2, GATHER | dict(algorithm="ring"), {}),
        slow(8, EXCHANGE, dict(k=4)),
        slow(2, EXCHANGE | dict(algorithm="ring_bidirectional"), dict(k=8)),
        slow(8, RING | dict(head_ways=2), dict(k=8)),
        slow(8, dict(window=7), {}),  # the halo is from one device
        slow(8, dict(window=8, packed=False), {}),  # from two
        slow(8, EXCHANGE | dict(window=48), {}),  # from all
        slow(4, dict(window=1), {}),
        slow(4, dict(window=100), {}),
        slow(4, ZIGZAG | dict(largest=True), {}),
        slow(4, RING | dict(largest=True, sinks=True, head_ways=2), {}),
        slow(2, GATHER_ZIGZAG | dict(largest=True), {}),
        slow(2, EXCHANGE | dict(largest=True), dict(k=1)),
        slow(4, dict(window=32, largest=True), {}),
    ],
    ids=str,
)
def test_values_and_gradients_equal_attention_on_one_device(c, options, shape):
    check(c, shape=shape, **options)


@pytest.mark.slow
def test_on_one_device_it_is_attention():
    check(1, balanced=True)
    check(1, window=5)


@pytest.mark.at_most(2)
@pytest.mark.parametrize(
    "options",
    [ZIGZAG | dict(largest=True), GATHER_ZIGZAG, EXCHANGE | dict(max_logit=4.0), dict(window=20, max_logit=4.0)],
    ids=str,
)
@pytest.mark.slow
def test_the_kernel_computes_the_same(options):
    """The simulator needs spare devices. No length is a multiple of a block's.

    A ring in sequence order is left out: its devices skip hops, and the simulator waits for all at every kernel.
    """
    check(2, shape=dict(b=1, n=8, k=1), tolerance=1e-5, kernel=True, interpret=True, **options)


@pytest.mark.slow
def test_the_size_of_a_chunk_of_queries_changes_nothing():
    (q, k, v), ids, (w_out, w_lse) = inputs()
    mask = mask_and_scores(window=9, segments=(ids[:, 12:36], ids), q_offset=12, soft_cap=3.0)
    q, w_out, w_lse = q[:, 12:36], w_out[:, 12:36], w_lse[:, :, 12:36]
    (out, lse), backward = jax.vjp(jax.jit(lambda *qkv: attention(*qkv, *mask)), q, k, v)
    dq_dk_dv = jax.jit(backward)((w_out, w_lse))
    for chunk in (1, 7, 24):
        got = jax.jit(lambda q, k, v, chunk=chunk: attention_in_chunks(q, k, v, *mask, chunk=chunk))(q, k, v)
        np.testing.assert_allclose(got[0], out, atol=1e-6)
        np.testing.assert_allclose(got[1], lse, atol=1e-6)
        call = lambda *arrays, chunk=chunk: attention_gradients(*arrays, *mask, chunk=chunk)
        gradients = jax.jit(call)(q, k, v, (out, lse), (w_out, w_lse))
        for a, b in zip(gradients, dq_dk_dv, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "max_logit, expected_lse", [(-200.0, np.inf), pytest.param(200.0, -np.inf, marks=pytest.mark.slow)]
)
def test_rows_for_which_max_logit_is_too_far_off_are_nan_and_send_nothing_back(max_logit, expected_lse):
    qkv, ids, weights = inputs()
    gradients, (out, lse) = jax.jit(sharded_function(2, qkv, ids, max_logit=max_logit, **GATHER_ZIGZAG))(
        list(qkv), ids, tuple(weights), SINKS
    )
    assert jnp.isnan(out).all() and (lse == expected_lse).all()
    assert all((x == 0).all() for x in gradients)


# -- merging


def test_parts_of_the_keys_merge_into_all():
    (q, k, v), _, _ = inputs(T=20)
    attend = jax.jit(partial(attention, mask=Mask(causal=False)))
    parts = [attend(q, k[:, at], v[:, at]) for at in (slice(0, 3), slice(3, 4), slice(4, 20))]
    parts = [(out.swapaxes(1, 2), lse) for out, lse in parts]
    out, lse = attend(q, k, v)
    for order in ([0, 1, 2], [2, 0, 1]):
        merged = functools.reduce(jax.jit(context.merge), [parts[i] for i in order])
        np.testing.assert_allclose(merged[0].swapaxes(1, 2), out, atol=1e-6)
        np.testing.assert_allclose(merged[1], lse, rtol=1e-6, atol=1e-6)


def test_a_part_that_sees_nothing_adds_nothing():
    some = jnp.full((1, 1, 2, 3), 5.0), jnp.array([[[-80.0, 90.0]]])
    nothing = jnp.zeros((1, 1, 2, 3)), jnp.full((1, 1, 2), UNSEEN)
    for merged in (context.merge(some, nothing), context.merge(nothing, some)):
        np.testing.assert_array_equal(merged[0], some[0])
        np.testing.assert_array_equal(merged[1], some[1])
    neither = context.merge(nothing, nothing)
    np.testing.assert_array_equal(neither[0], 0)
    np.testing.assert_array_equal(neither[1], np.float32(UNSEEN))


@pytest.mark.slow
def test_rows_that_see_no_key_have_no_gradient():
    """Such rows do not occur at the start of a causal sequence; here the ids make them."""
    (q, k, v), _, weights = inputs(b=1, T=8)
    ids = np.arange(8)[None] + np.int32([[0]])
    mask = Mask(segments=(ids + 100, ids))
    out, lse = attention_in_chunks(q, k, v, mask, chunk=4)
    gradients = attention_gradients(q, k, v, (out, lse), weights, mask, chunk=4)
    assert (out == 0).all() and (lse == np.float32(UNSEEN)).all()
    assert all((np.asarray(dx) == 0).all() for dx in gradients)


# -- order and balance


def test_zigzag_order():
    assert context.order(16, 2, True).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, *range(4, 12)]
    assert context.order(6, 3, False).tolist() == list(range(6))
    for ring in (1, 2, 5, 8):
        places = context.order(80, ring, True)
        assert sorted(places) == list(range(80))
        assert np.ptp((places + 1).reshape(ring, -1).sum(1)) == 0  # keys seen by the queries of each device


def tiles(q_positions, blocks, T):
    """The number of tiles that a kernel visits for runs (first position, number) of queries, against all keys."""
    return sum(
        int(np.sum(ranges[0, :, 3] - ranges[0, :, 0]))
        for first, size in q_positions
        for ranges in [block_ranges((size, T), blocks, Mask(q_offset=first))[0]]
    )


@pytest.mark.slow
@pytest.mark.parametrize("c", [2, 4, 8, 32])
def test_with_gathered_keys_the_devices_visit_equally_many_tiles(c):
    """They do within 2%, in tiles of 256 x 512 as in flash.py. In order, the last device has nearly twice the mean."""
    T, half = 131_072, 131_072 // (2 * c)
    zigzag = [tiles([(i * half, half), ((2 * c - 1 - i) * half, half)], (256, 512), T) for i in range(c)]
    in_order = [tiles([(2 * i * half, 2 * half)], (256, 512), T) for i in range(c)]
    assert max(zigzag) < 1.02 * np.mean(zigzag)
    assert max(in_order) > (1.9 - 1 / c) * np.mean(in_order)


def test_in_a_balanced_ring_only_the_choice_of_chunks_depends_on_the_device():
    """The program has no branch: at each hop all compute two full pairs of chunks. In order, hops are skipped."""
    (q, *_), ids, weights = (qkv, ids, _) = inputs()
    args = list(qkv), ids, tuple(weights), SINKS
    count = lambda options: counted(jax.make_jaxpr(sharded_function(4, qkv, ids, **options))(*args).jaxpr, "cond")
    assert count(ZIGZAG) == 0
    assert count(RING) == 2 * 3  # a hop that may be skipped, forward and backward


# -- communication


def counted(jaxpr, name):
    return sum(times for eqn, times in executions(jaxpr) if eqn.primitive.name == name)


def bytes_received(jaxpr, c):
    """{collective: bytes that a device receives from others}, without ids, which are the only integers."""
    total = {}
    for eqn, times in executions(jaxpr):
        name = eqn.primitive.name
        if name not in ("ppermute", "all_gather", "all_to_all", "reduce_scatter", "psum_scatter"):
            continue
        aval = (eqn.outvars if name == "all_gather" else eqn.invars)[0].aval
        if jnp.issubdtype(aval.dtype, jnp.integer):
            continue
        groups = eqn.params.get("axis_index_groups")
        size = len(groups[0]) if groups else c
        share = 1 if name == "ppermute" else (size - 1) / size
        total[name] = total.get(name, 0) + times * aval.size * aval.dtype.itemsize * share
    return total


def moved(c, dtype=jnp.bfloat16, gradients=True, **options):
    """The bytes that the function moves, and the bytes of the keys and values of the sequence."""
    (q, k, v), ids, weights = inputs(V=4)
    qkv = [jnp.asarray(x, dtype) for x in (q, k, v)]
    if gradients:
        function, args = sharded_function(c, qkv, ids, **options), (qkv, ids, tuple(weights), SINKS)
    else:
        attend = lambda q, k, v, ids: context_attention(q, k, v, segments=(ids, ids), **options)[0]
        function = jax.shard_map(attend, mesh=mesh_of(c), in_specs=SHARDED, out_specs=SHARDED)
        args = (*qkv, ids)
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return bytes_received(jaxpr, c), qkv[1].nbytes + qkv[2].nbytes


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("c", [2, 4, 8])
def test_a_ring_moves_the_bytes_in_its_docstring_and_gathers_nothing(c, balanced):
    for gradients, expected in ((False, 1), (True, 1 + 1 + 2)):  # twice the bytes in float32
        received, kv_bytes = moved(c, gradients=gradients, impl="ring", balanced=balanced)
        assert received == {"ppermute": expected * (c - 1) / c * kv_bytes}


def test_the_other_methods_move_the_bytes_in_the_docstring():
    c, G = 4, 4
    received, kv_bytes = moved(c, impl="all_gather", balanced=True)
    assert received.pop("all_gather") == 2 * (c - 1) / c * kv_bytes
    assert sum(received.values()) == 2 * (c - 1) / c * kv_bytes
    received, kv_bytes = moved(2, gradients=False, **EXCHANGE)
    lse_bytes = 2 * 8 * 48 * 4
    assert received == {"all_to_all": 1 / 2 * ((1 + G) * kv_bytes + lse_bytes) / 2}
    received, kv_bytes = moved(c, gradients=False, window=6)
    assert received == {"ppermute": 5 / 48 * kv_bytes}
    received, kv_bytes = moved(c, gradients=False, window=20)
    assert received == {"ppermute": 19 / 48 * kv_bytes}


def test_in_a_ring_no_array_has_the_length_of_the_sequence():
    """No shape of the program, forward or backward, has the length of the sequence."""
    shape = dict(b=1, T=8 * 17 * 2, n=2, k=1, H=4, V=4)
    qkv, ids, weights = inputs(**shape)
    sizes = set()
    for impl, expected in (("ring", False), ("all_gather", True)):
        function = sharded_function(8, qkv, ids, impl=impl, balanced=True)
        inner = next(e for e, _ in executions(jax.make_jaxpr(function)(list(qkv), ids, tuple(weights), SINKS).jaxpr))
        body = getattr(inner.params["jaxpr"], "jaxpr", inner.params["jaxpr"])
        sizes = {size for eqn, _ in executions(body) for var in eqn.outvars for size in getattr(var.aval, "shape", ())}
        assert (shape["T"] in sizes) == expected


# -- errors


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(impl="rings"), "impl='rings' is not one of ring, all_gather, all_to_all"),
        (dict(balanced=True, window=5), "no window: 5"),
        (dict(head_ways=3), "head_ways=3 must divide the 4 devices"),
        (EXCHANGE | dict(head_ways=2), "head_ways=2 must divide the 4 devices of a ring; impl='all_to_all'"),
        (dict(max_logit=3.0), "max_logit=3.0 needs whole rows"),
        (dict(causal=False), "attention over 'context' is causal, without a prefix, not mask.causal=False"),
        (dict(prefix=3), "without a prefix, not mask.causal=True, mask.prefix=3"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused(options, match):
    qkv, ids, weights = inputs()
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(sharded_function(4, qkv, ids, **options), list(qkv), ids, tuple(weights), SINKS)


def test_heads_that_cannot_be_exchanged_are_refused():
    qkv, ids, weights = inputs(n=6, k=2)
    with pytest.raises(ValueError, match="6 heads on each device cannot be exchanged among 4"):
        jax.eval_shape(sharded_function(4, qkv, ids, **EXCHANGE), list(qkv), ids, tuple(weights), SINKS[:6])


def test_positions_that_zigzag_cannot_split_are_refused():
    with pytest.raises(ValueError, match=r"T=20 must be a multiple of 2\*4"):
        context.order(20, 4, True)


@pytest.mark.slow
def test_the_demonstration_shows_all_methods(capsys):
    context.main(T=256)
    lines = capsys.readouterr().out.splitlines()
    assert all(float(line.split()[-1]) < 1e-5 for line in lines[1:7])
    assert len(set(lines[-1].split()[1:])) == 1 and len(set(lines[-2].split()[2:])) == 8
