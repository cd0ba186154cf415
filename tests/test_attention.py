"""Attention against one query at a time in float64; its gradients against jax.nn.softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import WORTH_SPLITTING, attention, causal_attention
from flash import out_of_range
from masks import UNSEEN, Mask, mask_and_scores


def inputs(b, t, s, n, k, H, V=None, seed=0):
    random = np.random.default_rng(seed)
    shapes = (b, t, n, H), (b, s, k, H), (b, s, k, V or H)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def one_query_at_a_time(
    q, k, v, *, causal=True, window=0, prefix=0, segments=None, soft_cap=0.0, sinks=None, q_offset=0, scale=None
):
    """(out, lse) in float64, with Python loops."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    b, t, n, H = q.shape
    out, lse = np.zeros((b, t, n, v.shape[-1])), np.full((b, n, t), UNSEEN)
    for row, i, head in np.ndindex(b, t, n):
        kv_head = head // (n // k.shape[2])
        scores, values = ([], []) if sinks is None else ([sinks[head]], [np.zeros(v.shape[-1])])
        for j in range(k.shape[1]):
            hidden = causal and j > i + q_offset and j >= np.broadcast_to(prefix, b)[row]
            hidden = hidden or (window and abs(i + q_offset - j) >= window)
            hidden = hidden or (segments and segments[0][row, i] != segments[1][row, j])
            if not hidden:
                score = q[row, i, head] @ k[row, j, kv_head] * (scale or H**-0.5)
                scores.append(soft_cap * np.tanh(score / soft_cap) if soft_cap else score)
                values.append(v[row, j, kv_head])
        if scores:
            lse[row, head, i] = np.logaddexp.reduce(scores)
            out[row, i, head] = np.exp(np.array(scores) - lse[row, head, i]) @ np.array(values)
    return out, lse


def attend(q, k, v, attend=attention, sinks=None, **options):
    """`attention`, or another function like it, with the fields of Mask and Scores as keywords."""
    return attend(q, k, v, *mask_and_scores(**options), sinks)


SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 3], [1, 2, 2, 2, 2, 2, 0]])
IDS = (SEGMENTS, SEGMENTS)
SINKS = np.array([0.0, 1.0, -1.0, 3.0, -40.0, 0.5], np.float32)
MHA, GQA, MQA = dict(n=4, k=4), dict(n=6, k=3), dict(n=4, k=1)
SQUARE = dict(b=2, t=7, s=7, H=4)

CASES = {
    "mha": (SQUARE | MHA, {}),
    "gqa": (SQUARE | GQA, {}),
    "mqa": (SQUARE | MQA, {}),
    "one position": (dict(b=1, t=1, s=1, H=2) | MHA, {}),
    "all keys": (SQUARE | GQA, dict(causal=False)),
    "fewer queries, at the end": (dict(b=2, t=3, s=8, H=4) | GQA, dict(q_offset=5)),
    "fewer queries, in the middle": (dict(b=2, t=3, s=8, H=4) | GQA, dict(q_offset=2)),
    "one query": (dict(b=2, t=1, s=8, H=4) | GQA, dict(q_offset=7)),
    "more queries": (dict(b=1, t=8, s=3, H=4) | GQA, {}),
    "queries before the keys": (dict(b=1, t=6, s=4, H=4) | GQA, dict(q_offset=-3)),
    "keys of others only": (dict(b=2, t=3, s=5, H=4) | GQA, dict(causal=False)),
    "window 1": (SQUARE | GQA, dict(window=1)),
    "window 3": (SQUARE | GQA, dict(window=3)),
    "window of everything": (SQUARE | GQA, dict(window=7)),
    "window behind the keys": (dict(b=1, t=5, s=4, H=4) | GQA, dict(window=2, q_offset=2)),
    "symmetric window": (SQUARE | GQA, dict(window=3, causal=False)),
    "symmetric window 1": (SQUARE | GQA, dict(window=1, causal=False)),
    "segments": (SQUARE | GQA, dict(segments=IDS)),
    "segments, all keys": (SQUARE | GQA, dict(segments=IDS, causal=False)),
    "foreign segments": (SQUARE | MHA, dict(segments=(SEGMENTS + 1, SEGMENTS))),
    "segments and window": (SQUARE | GQA, dict(segments=IDS, window=2)),
    "segments of some keys": (
        dict(b=2, t=2, s=7, H=4) | GQA,
        dict(segments=(SEGMENTS[:, 3:5], SEGMENTS), q_offset=3, window=2),
    ),
    "soft cap": (SQUARE | GQA, dict(soft_cap=0.7)),
    "prefix": (SQUARE | GQA, dict(prefix=3)),
    "prefix of each sequence": (SQUARE | GQA, dict(prefix=np.array([5, 2]))),
    "prefix and window": (SQUARE | GQA, dict(prefix=5, window=3)),
    "prefix and segments": (SQUARE | GQA, dict(prefix=4, segments=IDS)),
    "sinks": (SQUARE | GQA, dict(sinks=SINKS)),
    "sinks of queries that see nothing": (dict(b=1, t=6, s=4, H=4) | GQA, dict(q_offset=-3, sinks=SINKS)),
    "narrow values": (SQUARE | GQA | dict(V=2), dict(scale=0.3)),
    "everything": (SQUARE | GQA, dict(segments=IDS, window=3, soft_cap=1.5, causal=False)),
}


@pytest.mark.parametrize("shape, options", CASES.values(), ids=CASES)
def test_equals_one_query_at_a_time(shape, options):
    q, k, v = inputs(**shape)
    expected_out, expected_lse = one_query_at_a_time(q, k, v, **options)
    out, lse = jax.jit(lambda q, k, v: attend(q, k, v, **options))(q, k, v)
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)
    blind = (expected_lse == UNSEEN).swapaxes(1, 2)
    assert (np.asarray(out)[blind] == 0).all()


def test_the_cases_have_queries_that_see_nothing():
    """They also have queries that see keys, so that what the test above asserts of both is not empty."""
    blind = lambda name: one_query_at_a_time(*inputs(**CASES[name][0]), **CASES[name][1])[1] == UNSEEN
    for name in ("queries before the keys", "window behind the keys", "foreign segments"):
        assert 0 < blind(name).mean() < 1
    assert not blind("segments").any()


def test_large_scores_do_not_overflow():
    q, k, v = inputs(**SQUARE, **GQA)
    expected_out, expected_lse = one_query_at_a_time(100 * q, 10 * k, v)
    assert expected_lse.max() > 1000  # exp(89) overflows float32
    out, lse = jax.jit(attention)(100 * q, 10 * k, v)
    np.testing.assert_allclose(out, expected_out, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_bfloat16():
    """The output has the dtype of the values. The softmax is in float32, so that only roundings of 2^-9 are left."""
    q, k, v = (a.astype(jnp.bfloat16) for a in inputs(**SQUARE, **GQA))
    expected_out, expected_lse = one_query_at_a_time(q, k, v)
    out, lse = jax.jit(attention)(q, k, v)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), expected_out, atol=2**-7 * np.abs(v.astype(np.float32)).max()
    )
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)


# -- constant max logit


def with_gradients(qkv, sinks, rows=7, **options):
    """The gradients in q, k, v and sinks of a weighted sum of both results' first rows, and (out, lse).

    The segment ids leave query 2 without keys.
    """
    ids = SEGMENTS.copy()
    ids[:, 2] = 77
    random = np.random.default_rng(1)
    d_out, d_lse = (random.standard_normal(shape, np.float32) for shape in (qkv[0].shape, (2, 6, 7)))

    def loss(q, k, v, sinks):
        out, lse = attend(q, k, v, segments=(ids, SEGMENTS), sinks=sinks, **options)
        total = jnp.sum((out * d_out)[:, :rows]) + jnp.sum((jnp.maximum(lse, -100.0) * d_lse)[..., :rows])
        return total, (out, lse)

    return jax.jit(jax.grad(loss, (0, 1, 2) if sinks is None else (0, 1, 2, 3), has_aux=True))(*qkv, sinks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("max_logit, sinks, soft_cap", [(5.0, None, 0.0), (-55.0, SINKS, 0.0), (55.0, SINKS, 2.0)])
def test_max_logit_that_bounds_the_scores_changes_nothing(max_logit, sinks, soft_cap, dtype, error):
    """Neither does one that is far off, within the limits of float32."""
    qkv = tuple(jnp.asarray(x, dtype) for x in inputs(**SQUARE, **GQA))
    results = [with_gradients(qkv, sinks, soft_cap=soft_cap, max_logit=at) for at in (max_logit, None)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=error, atol=error)


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_a_row_that_max_logit_is_too_low_for_is_nan_and_sends_nothing_back(sinks):
    q, k, v = (jnp.asarray(x) for x in inputs(**SQUARE, **GQA))
    qkv = q.at[:, 6].multiply(1000.0), k, v  # scores of some hundreds, either sign
    gradients, (out, lse) = with_gradients(qkv, sinks, rows=6, max_logit=4.0)
    expected, (expected_out, expected_lse) = with_gradients(qkv, sinks, rows=6)
    assert jnp.isinf(lse[..., 6]).all() and (lse[..., 6] > 0).any() and jnp.isnan(out[:, 6]).all()
    others = (gradients, out[:, :6], lse[..., :6]), (expected, expected_out[:, :6], expected_lse[..., :6])
    for a, b in zip(*map(jax.tree.leaves, others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize(
    "max_logit, expected_lse", [(-200.0, np.inf), (-70.0, np.inf), (70.0, -np.inf), (200.0, -np.inf)]
)
def test_a_max_logit_that_is_far_off_makes_nan_of_all_but_rows_that_see_nothing(max_logit, expected_lse, sinks):
    q, k, v = (jnp.asarray(x) for x in inputs(**SQUARE, **GQA))
    gradients, (out, lse) = with_gradients((0.01 * q, k, v), sinks, max_logit=max_logit)
    seeing = np.delete(np.arange(7), 2)
    assert (lse[..., seeing] == expected_lse).all() and jnp.isnan(out[:, seeing]).all() and (out[:, 2] == 0).all()
    assert out_of_range(lse) == 2 * 6 * 6
    np.testing.assert_allclose(lse[..., 2], np.broadcast_to(UNSEEN if sinks is None else sinks, (2, 6)), rtol=1e-6)
    assert all((x == 0).all() for x in gradients[:3])


# -- gradients


def plain(q, k, v, seen_bts, soft_cap):
    """(out, lse) by jax.nn.softmax, with a key/value head for each query head; every query sees a key."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    scores = soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores
    scores = jnp.where(seen_bts[:, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v), jax.nn.logsumexp(scores, -1)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [MHA, GQA, MQA], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("window, soft_cap, causal", [(0, 0.0, True), (3, 1.5, True), (2, 0.0, False)])
def test_gradients(heads, window, soft_cap, causal):
    q, k, v = inputs(**SQUARE, **heads)
    distance = np.arange(7)[:, None] - np.arange(7)
    seen_bts = SEGMENTS[:, :, None] == SEGMENTS[:, None]
    seen_bts = seen_bts & ((distance >= 0) | (not causal)) & ((np.abs(distance) < window) | (not window))
    options = dict(causal=causal, window=window, soft_cap=soft_cap, segments=IDS)
    random = np.random.default_rng(1)
    d_out, d_lse = (random.standard_normal(shape, np.float32) for shape in (q.shape, (2, q.shape[2], 7)))

    def gradients(f):
        weighted = lambda q, k, v: sum(jnp.sum(a * d) for a, d in zip(f(q, k, v), (d_out, d_lse), strict=True))
        return jax.jit(jax.grad(weighted, argnums=(0, 1, 2)))(q, k, v)

    actual = gradients(lambda q, k, v: attend(q, k, v, **options))
    expected = gradients(lambda q, k, v: plain(q, k, v, seen_bts, soft_cap))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert np.abs(b).max() > 0.1


def test_gradients_of_queries_that_see_nothing_are_zero():
    """So are those of keys that no query sees, and of their values."""
    q, k, v = (jnp.asarray(a) for a in inputs(**SQUARE, **GQA))
    q_ids, kv_ids = SEGMENTS.copy(), SEGMENTS.copy()
    q_ids[:, 2], kv_ids[:, 4] = 77, 88
    seen_bts = (q_ids[:, :, None] == kv_ids[:, None]) & np.tri(7, dtype=bool)
    blind, unseen = ~seen_bts.any(2), ~seen_bts.any(1)
    assert blind[:, 2].all() and unseen[:, 4].all() and not (blind.all() or unseen.all())

    f = lambda q, k, v: attend(q, k, v, segments=(q_ids, kv_ids))
    out, lse = jax.jit(f)(q, k, v)
    lse = np.asarray(lse).swapaxes(1, 2)
    assert (np.asarray(out)[blind] == 0).all()
    assert (lse[blind] == np.float32(UNSEEN)).all() and (np.abs(lse[~blind]) < 100).all()

    total = lambda q, k, v: sum(jnp.sum(a) for a in f(q, k, v))
    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v)
    for gradient, zero in zip(gradients, (blind, unseen, unseen), strict=True):
        largest = np.abs(gradient).max((-1, -2))
        assert np.isfinite(gradient).all()
        assert (largest[zero] == 0).all() and (largest[~zero] > 0).all()


def test_gradients_of_sinks():
    """They equal those with one more key, whose score is the sink and which has no value."""
    q, k, v = (jnp.asarray(a) for a in inputs(**SQUARE, **MHA))
    sinks = jnp.asarray(SINKS[:4])

    def with_one_more_key(q, k, v, sinks):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
        scores = jnp.where(np.tri(7, dtype=bool), scores, -jnp.inf)
        extra = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        p = jax.nn.softmax(jnp.concatenate([scores, extra], -1), -1)[..., :-1]
        return jnp.einsum("bnts,bsnh->btnh", p, v)

    gradients = lambda f: jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums=(0, 1, 2, 3)))
    actual = gradients(lambda q, k, v, sinks: attend(q, k, v, sinks=sinks)[0])(q, k, v, sinks)
    for a, b in zip(actual, gradients(with_one_more_key)(q, k, v, sinks), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert np.abs(b).max() > 0.1


# -- merging


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(window=3), dict(segments=IDS, soft_cap=2.0)])
@pytest.mark.parametrize("split", [1, 4])
def test_parts_of_the_keys_merge_into_all(options, split):
    """They merge by their log-sum-exp: out = sum of exp(lse_part - lse) * out_part."""

    def part(q, k, v, keys, q_offset):
        ids = {"segments": (SEGMENTS, SEGMENTS[:, keys])} if "segments" in options else {}
        return attend(q, k[:, keys], v[:, keys], **(options | ids), q_offset=q_offset)

    @jax.jit
    def both_ways(q, k, v):
        (out_1, lse_1), (out_2, lse_2) = part(q, k, v, slice(0, split), 0), part(q, k, v, slice(split, 7), -split)
        lse = jnp.logaddexp(lse_1, lse_2)
        share = lambda lse_part: jnp.exp(lse_part - lse).swapaxes(1, 2)[..., None]
        return (share(lse_1) * out_1 + share(lse_2) * out_2, lse), attend(q, k, v, **options)

    merged, at_once = both_ways(*inputs(**SQUARE, **GQA))
    for a, b in zip(merged, at_once, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# -- in quarters

T = 256
QUARTERED = {
    "causal": (T, {}),
    "window 1": (T, dict(window=1)),
    "window of a quarter": (T, dict(window=T // 4)),
    "window of a quarter and one": (T, dict(window=T // 4 + 1)),
    "window of a quarter and two": (T, dict(window=T // 4 + 2)),
    "segments": (T, dict(segments=True)),
    "everything": (T, dict(segments=True, window=100, soft_cap=1.5, sinks=SINKS)),
    "max logit": (T, dict(max_logit=5.0)),
    "not divisible by 4": (T + 2, dict(window=100)),
}
QUICK = ("window of a quarter and one", "not divisible by 4")


@pytest.mark.parametrize(
    "t, options",
    [pytest.param(*QUARTERED[name], marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in QUARTERED],
)
def test_quarters_equal_all_at_once(t, options):
    """Values and gradients are equal, with windows that begin at, before and after a boundary of the quarters."""
    q, k, v = inputs(b=2, t=t, s=t, n=6, k=3, H=4)
    options = dict(options)
    if options.pop("segments", False):
        ids = np.sort(np.random.default_rng(1).integers(0, 5, (2, t)), 1)
        options["segments"] = ids, ids

    def both(f):
        total = lambda *qkv: sum(jnp.sum(jnp.sin(a)) for a in f(*qkv))
        return *jax.jit(f)(q, k, v), *jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v)

    quarters = both(lambda q, k, v: attend(q, k, v, causal_attention, **options))
    for a, b in zip(quarters, both(lambda q, k, v: attend(q, k, v, **options)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert np.abs(b).max() > 0.1


@pytest.mark.parametrize("window, scores", [(0, 10 / 16), (T // 4, 7 / 16), (1, 4 / 16)])
def test_quarters_leave_scores_out(window, scores):
    """The scores are counted in the matmuls of the jaxpr."""
    q, k, v = inputs(b=1, t=T, s=T, n=2, k=1, H=4)
    assert T >= WORTH_SPLITTING

    def multiplied(f):
        equations = jax.make_jaxpr(lambda q, k, v: f(q, k, v, Mask(window=window)))(q, k, v).eqns
        dots = [e for e in equations if e.primitive.name == "dot_general"]
        assert dots
        return sum(e.invars[1].aval.size * np.prod(e.invars[0].aval.shape[2]) for e in dots)

    assert multiplied(causal_attention) == scores * multiplied(attention)
