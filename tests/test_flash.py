"""Flash attention, forward: simulated against float64, and compiled for TPU7x."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support import equations

import flags as flags_lib
import flash
from compiled import builders, bundles
from compiled.hlo import parse
from flash import Blocks, default_blocks, out_of_range, vmem_bytes
from masks import UNSEEN, Mask, Scores, block_ranges, mask_and_scores, visible
from tuned import VMEM_BYTES

SMALL = Blocks(256, 256, 128, 128, full_unroll=2, masked_unroll=2, ahead=1)  # two superblocks from 257 on


def forward(*qkv, blocks=None, interpret=False, **options):
    """`flash.forward` with the fields of Mask and Scores as keywords, as one program."""
    static = dict(blocks=blocks, interpret=interpret)
    return jax.jit(lambda *qkv: flash.forward(*qkv, *mask_and_scores(**options), **static))(*qkv)


def flash_attention(*qkv, sinks=None, blocks=None, interpret=False, **options):
    """`flash.flash_attention` with the fields of Mask and Scores as keywords, as one program."""
    static = dict(blocks=blocks, interpret=interpret)
    return jax.jit(lambda *qkv: flash.flash_attention(*qkv, *mask_and_scores(**options), sinks, **static))(*qkv)


def inputs(T, S, N=1, K=1, H=64, V=64, B=1, dtype=jnp.float32, seed=0):
    """Scores have standard deviation 1. So dozens of keys count in each mean, and a wrong one is visible."""
    rng = np.random.default_rng(seed)
    shapes = [(B, N, T, H), (B, K, S, H), (B, K, S, V)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def documents(B, T, num=3, seed=0):
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, num, (B, T)), 1), jnp.int32)


def mask_of(shape, causal=True, window=0, prefix=None, segments=None, q_offset=0):
    """The mask as bools [B, 1, T, S]."""
    B, T, S = shape
    if prefix is not None:
        prefix = np.broadcast_to(np.asarray(prefix), (B,))[:, None, None, None]
    if segments is not None:
        segments = segments[0][:, None, :, None], segments[1][:, None, None, :]
    positions = np.arange(T)[:, None] + np.asarray(q_offset), np.arange(S)[None]
    mask = visible(*positions, Mask(causal=causal, window=window, prefix=prefix, segments=segments))
    return np.broadcast_to(np.asarray(mask), (B, 1, T, S))


def reference(q, k, v, soft_cap=0.0, scale=None, sinks=None, **mask):
    """(out, lse) in float64, from all scores at once."""
    q, k, v = [np.asarray(x, np.float64) for x in (q, k, v)]
    G = q.shape[1] // k.shape[1]
    scores = np.einsum("bnth,bnsh->bnts", q, np.repeat(k, G, 1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    seen = mask_of((q.shape[0], q.shape[2], k.shape[2]), **mask)
    top = np.where(seen, scores, UNSEEN).max(-1, keepdims=True)
    p = np.where(seen, np.exp(np.minimum(scores - top, 0)), 0)
    total, some = p.sum(-1, keepdims=True), seen.any(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.where(some, np.asarray(sinks, np.float64)[:, None, None] - top, 0))
    out = np.einsum("bnts,bnsv->bntv", p, np.repeat(v, G, 1)) / np.where(some, total, 1)
    return out, np.where(some, top + np.log(np.where(some, total, 1)), UNSEEN)[..., 0]


def check(args, error=3e-6, blocks=SMALL, max_logit=None, **options):
    out, lse = forward(*args, blocks=blocks, interpret=True, max_logit=max_logit, **options)
    assert out.dtype == args[2].dtype and lse.dtype == jnp.float32
    expected_out, expected_lse = reference(*args, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=error)
    np.testing.assert_allclose(lse, expected_lse, atol=error, rtol=1e-6)
    return out, lse


# -- equal to the definition


def test_a_window_that_begins_in_one_tile_and_ends_in_another():
    check(inputs(20, 300), window=150, q_offset=285)  # the last queries are behind the last key


@pytest.mark.slow
def test_all_masks_at_once_in_grouped_heads_of_ragged_lengths():
    B, T, S = 2, 100, 300
    ids = documents(B, S, num=4)
    mask = dict(window=60, prefix=jnp.array([270, 0]), segments=(ids[:, 200:], ids))
    check(inputs(T, S, N=2, K=1, B=B), soft_cap=1.5, q_offset=jnp.int32(200), **mask)


@pytest.mark.slow
def test_the_demonstration(capsys):
    flash.main()
    printed = capsys.readouterr().out
    assert float(re.search(r"largest error (\S+)", printed)[1]) < 0.02 and "32,268,288 bytes of VMEM" in printed


@pytest.mark.slow
def test_several_heads_of_keys():
    check(inputs(150, 300, N=4, K=2, B=2), q_offset=150)


MASKS = {
    "causal": dict(),
    "full": dict(causal=False),
    "window": dict(window=70),
    "window both ways": dict(causal=False, window=70),
    "prefix": dict(prefix=150),
    "prefix of each": dict(prefix=jnp.array([0, 300])),
    "documents": dict(segments=(documents(2, 330), documents(2, 330))),
    "documents both ways": dict(causal=False, segments=(documents(2, 330), documents(2, 330))),
    "documents in no order": dict(segments=(documents(2, 330)[:, ::-1] ^ 1, documents(2, 330)[:, ::-1] ^ 1)),
    "all": dict(window=90, prefix=200, segments=(documents(2, 330), documents(2, 330)), soft_cap=3.0, scale=0.3),
}
HEADS = {"64": (1, 1, 64, 64), "128, G=2": (2, 1, 128, 128), "192/128": (2, 2, 192, 128), "256, MQA": (3, 1, 256, 256)}


@pytest.mark.at_most(6)
@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask):
    check(inputs(330, 330, N=2, B=2), **MASKS[mask])


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_every_kind_of_head(heads):
    check(inputs(200, 330, *HEADS[heads]), q_offset=130)


@pytest.mark.slow
@pytest.mark.parametrize("T, S, q_offset", [(1, 1, 0), (1, 257, 256), (129, 40, 0), (40, 129, 500), (257, 300, -100)])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_lengths_and_offsets(T, S, q_offset, causal):
    check(inputs(T, S, N=2), causal=causal, q_offset=q_offset)


@pytest.mark.slow
def test_a_query_that_sees_nothing_gets_zeros_and_a_finite_lse():
    ids = jnp.full((1, 140), 5), jnp.where(jnp.arange(140) < 20, 7, 5)[None]
    out, lse = check(
        inputs(140, 140), q_offset=-70, segments=ids
    )  # the first queries see no key, the next ones no document
    assert (lse[:, :, :90] == UNSEEN).all() and (out[:, :, :90] == 0).all()
    assert (lse[:, :, 90:] > -10).all()


@pytest.mark.slow
@pytest.mark.parametrize("max_logit", [None, 5.0])
def test_nan_in_one_query_stays_in_its_row(max_logit):
    q, k, v = inputs(130, 130)
    out, lse = forward(q.at[0, 0, 7, 3].set(jnp.nan), k, v, blocks=SMALL, interpret=True, max_logit=max_logit)
    expected = reference(q, k, v)
    rest = np.delete(np.arange(130), 7)
    assert jnp.isnan(out[:, :, 7]).all() and jnp.isnan(lse[:, :, 7]).all()
    np.testing.assert_allclose(out[:, :, rest], expected[0][:, :, rest], atol=3e-6)
    np.testing.assert_allclose(lse[:, :, rest], expected[1][:, :, rest], atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-4), (jnp.bfloat16, 0.02)])
@pytest.mark.parametrize("kind", ["large", "equal", "growing", "falling"])
def test_adversarial_scores(kind, dtype, error):
    q, k, v = inputs(256, 512, dtype=jnp.float32)
    ramp = jnp.linspace(-1, 1, 512)[None, None, :, None]
    if kind == "large":  # one key dominates, and scores reach several hundred
        q, k = 10 * q, 10 * k
    elif kind == "equal":
        q, k = jnp.ones_like(q), jnp.ones_like(k)
    else:  # every block of keys has the largest scores so far, or only the first has
        q, k = jnp.abs(q), jnp.broadcast_to(30 * (ramp if kind == "growing" else -ramp), k.shape)
    args = [jnp.asarray(x.astype(jnp.bfloat16), dtype) for x in (q, k, v)]
    # The scale is a power of two, so that only log2(e) rounds the kernel's q in bf16. This moves large scores by 2**-9
    # of their size, so that for them bf16 is only required to be finite.
    out, lse = forward(*args, blocks=dataclasses.replace(SMALL, q_rows=128), interpret=True, q_offset=256)
    assert jnp.isfinite(out.astype(jnp.float32)).all() and jnp.isfinite(lse).all()
    if kind == "equal" or dtype == jnp.float32:
        expected_out, expected_lse = reference(*args, q_offset=256)
        np.testing.assert_allclose(lse, expected_lse, rtol=3e-6 if dtype == jnp.float32 else 4e-3)
        np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=error)


@pytest.mark.slow
def test_streamed_superblocks_give_the_result_of_resident_ones():
    args = inputs(300, 700, N=2, dtype=jnp.bfloat16)
    results = {}
    for k_rows in (256, 768):
        blocks = dataclasses.replace(SMALL, q_rows=128 if k_rows == 256 else 384, k_rows=k_rows)
        results[k_rows] = forward(*args, blocks=blocks, interpret=True, q_offset=300, window=350)
    for streamed, resident in zip(results[256], results[768], strict=True):
        # The order of the tiles differs, and so do the last bits.
        np.testing.assert_allclose(*[np.asarray(x, np.float32) for x in (streamed, resident)], atol=4e-3)


@pytest.mark.slow
def test_bf16_errors_are_no_larger_than_those_of_jax_splash_attention():
    """Its caller also scales q in bf16. Its P is float32, which a TPU's MXU rounds and the simulator does not.

    So the error of that rounding is added to its errors here.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    T, H = 512, 128
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))])
    splash = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, interpret=True)
    square = {"flash": 0, "splash": 0, "P": 0}
    for seed in range(2):
        q, k, v = inputs(T, T, H=H, V=H, dtype=jnp.bfloat16, seed=seed)
        expected = reference(q, k, v)[0][0, 0]
        ours = forward(q, k, v, blocks=Blocks(512, 512, full_unroll=8), interpret=True)[0][0, 0]
        theirs = splash((q[0].astype(jnp.float32) * H**-0.5).astype(jnp.bfloat16), k[0], v[0])[0]
        square["flash"] += np.mean((np.asarray(ours, np.float64) - expected) ** 2)
        square["splash"] += np.mean((np.asarray(theirs, np.float64) - expected) ** 2)
        scores = np.asarray(q[0, 0], np.float64) @ np.asarray(k[0, 0], np.float64).T * H**-0.5
        p = np.where(np.tri(T), np.exp(scores - scores.max(-1, keepdims=True)), 0)
        rounding = np.asarray(jnp.asarray(p, jnp.float32).astype(jnp.bfloat16), np.float64) - p
        square["P"] += np.mean((rounding @ np.asarray(v[0, 0], np.float64) / p.sum(-1, keepdims=True)) ** 2)
    assert 1e-8 < square["flash"] < square["splash"] + square["P"]


# -- constant max logit, sinks


@pytest.mark.slow
def test_max_logit_that_bounds_the_scores_changes_nothing_and_other_rows_are_counted():
    q, k, v = inputs(100, 130)
    q = q.at[:, :, 5].multiply(100.0)  # scores of some hundreds in one row
    masked = dict(q_offset=30, segments=(jnp.ones((1, 100)).at[:, :3].set(2), jnp.ones((1, 130))))
    good = np.delete(np.arange(100), [0, 1, 2, 5])
    out, lse = forward(q, k, v, blocks=SMALL, interpret=True, max_logit=4.0, **masked)
    expected_out, expected_lse = reference(q, k, v, **masked)
    np.testing.assert_allclose(out[:, :, good], expected_out[:, :, good], atol=3e-6)
    np.testing.assert_allclose(lse[:, :, good], expected_lse[:, :, good], atol=3e-6)
    assert lse[0, 0, 5] == jnp.inf and jnp.isnan(out[0, 0, 5]).all() and out_of_range(lse) == 1
    assert (lse[:, :, :3] == UNSEEN).all()  # a row that sees nothing is no error

    def others(max_logit, *args):
        options = dict(q_offset=30, segments=masked["segments"], blocks=SMALL, interpret=True)
        return flash_attention(*args, max_logit=max_logit, **options)[0].at[:, 5].set(0).sum()

    args = [x.swapaxes(1, 2) for x in (q, k, v)]
    for a, b in zip(*(jax.grad(partial(others, at), (0, 1, 2))(*args) for at in (4.0, None)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # the row that is out of range sends nothing back


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(causal=False), dict(q_offset=128)])
def test_a_max_logit_that_is_too_high_is_seen_in_tiles_with_a_mask_and_without(options):
    args = inputs(128, 256)
    out, lse = forward(*args, blocks=SMALL, interpret=True, max_logit=200.0, **options)
    assert out_of_range(lse) == 128 and (lse == -jnp.inf).all() and jnp.isnan(out).all()
    check(args, max_logit=60.0, error=1e-5, **options)


@pytest.mark.slow
def test_sinks_are_one_more_logit_without_a_value():
    q, k, v = inputs(20, 30, N=2, B=2)
    sinks = jnp.array([0.7, -1.3])
    out, lse = reference(q, k, v, q_offset=-3)
    expected = reference(q, k, v, q_offset=-3, sinks=sinks)
    with_sinks = partial(flash.with_sinks, jnp.asarray(out, jnp.float32).swapaxes(1, 2), jnp.asarray(lse, jnp.float32))
    got_out, got_lse = with_sinks(sinks)
    np.testing.assert_allclose(got_out.swapaxes(1, 2), expected[0], atol=1e-6)
    np.testing.assert_allclose(got_lse[:, :, 3:], expected[1][:, :, 3:], atol=1e-6)
    np.testing.assert_allclose(got_lse[:, :, :3], np.broadcast_to(sinks[:, None], (2, 2, 3)))  # these see only the sink

    marked = jnp.asarray(lse, jnp.float32).at[0, 0, 9].set(jnp.inf).at[0, 0, 10].set(-jnp.inf)
    total = lambda lse, sinks: sum(x.sum() for x in flash.with_sinks(jnp.ones((2, 20, 2, 4)), lse, sinks))
    gradients = jax.grad(lambda lse, sinks: jnp.where(jnp.isinf(t := total(lse, sinks)), 0, t), (0, 1))(marked, sinks)
    assert all(jnp.isfinite(x).all() for x in gradients)
    assert out_of_range(flash.with_sinks(jnp.ones((2, 20, 2, 4)), marked, sinks)[1]) == 2


# -- derivatives: the operands of the backward kernel (its results: tests/test_flash_backward.py)


@pytest.mark.parametrize("V, saved", [(64, (1, 128, 2 * 64)), (128, (1, 128, 2, 128))])
def test_heads_that_fill_no_row_of_a_tile_are_saved_side_by_side(V, saved):
    shapes = [jax.ShapeDtypeStruct((1, 128, heads, V), jnp.bfloat16) for heads in (2, 1, 1)]
    gradient = jax.grad(lambda *qkv: flash.flash_attention(*qkv)[0].astype(jnp.float32).sum())
    named = [eqn for eqn in equations(jax.make_jaxpr(gradient)(*shapes)) if eqn.primitive.name == "name"]
    assert {eqn.outvars[0].aval.shape for eqn in named if eqn.params["name"] == "context"} == {saved}


@pytest.mark.slow
def test_gradients_go_through_the_backward_kernel_with_both_cotangents(monkeypatch):
    def in_jnp(q_BNTH, k_BKSH, v_BKSV, causal, q_offset, scale, segments):
        k_BNSH, v_BNSV = [jnp.repeat(x, q_BNTH.shape[1] // x.shape[1], 1) for x in (k_BKSH, v_BKSV)]
        scores_BNTS = jnp.einsum("BNTH,BNSH->BNTS", q_BNTH, k_BNSH) * scale
        seen = mask_of((1, 100, 110), causal=causal, q_offset=int(q_offset), segments=segments)
        scores_BNTS = jnp.where(seen, scores_BNTS, UNSEEN)
        lse_BNT = jax.nn.logsumexp(scores_BNTS, -1)
        return jnp.exp(scores_BNTS - lse_BNT[..., None]) @ v_BNSV, lse_BNT

    def backward(q, k, v, given, cotangents, mask, scores, *, interpret):
        assert (mask.window, mask.which, mask.prefix, scores, interpret) == (0, None, None, Scores(scale=0.2), True)
        attend = lambda *qkv: in_jnp(*qkv, mask.causal, mask.q_offset, scores.scale, mask.segments)
        results, vjp = jax.vjp(attend, q, k, v)
        for a, b in zip(given, results, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        return vjp(cotangents)

    monkeypatch.setattr(flash.flash_backward, "backward", backward)
    q, k, v = [x.swapaxes(1, 2) for x in inputs(100, 110, N=2)]
    ids = jnp.zeros((1, 100), jnp.int32), jnp.zeros((1, 110), jnp.int32)
    dout = jnp.asarray(np.random.default_rng(1).standard_normal((1, 100, 2, 64)), jnp.float32)
    loss = lambda f, *qkv: (lambda out, lse: (out * dout).sum() + (lse**2).sum())(*f(*qkv))
    options = mask_and_scores(q_offset=10, scale=0.2, segments=ids)
    # Not as one program, as `backward` above reads values.
    ours = lambda *qkv: flash.flash_attention(*qkv, *options, None, blocks=SMALL, interpret=True)

    def plain(*qkv):
        out, lse = in_jnp(*(x.swapaxes(1, 2) for x in qkv), True, 10, 0.2, None)
        return out.swapaxes(1, 2), lse

    got, expected = [jax.grad(partial(loss, f), (0, 1, 2))(q, k, v) for f in (ours, plain)]
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.slow
def test_one_of_several_windows():
    """Values and gradients are those of that window alone, except for the order of sums that XLA chooses."""
    q, k, v = [x.swapaxes(1, 2) for x in inputs(300, 300, N=2, B=2)]
    ids, sinks = documents(2, 300), jnp.array([0.5, -1.0])

    def loss(q, k, v, sinks, **options):
        attend = partial(flash_attention, segments=(ids, ids), sinks=sinks, blocks=SMALL, interpret=True, **options)
        out, lse = attend(q, k, v)
        return (out**2).sum() + jnp.sin(lse).sum()

    windows = (70, 0)
    several = jax.jit(jax.value_and_grad(lambda which, *args: loss(*args, window=windows, which=which), (1, 2, 3, 4)))
    alone = [jax.jit(jax.value_and_grad(partial(loss, window=window), (0, 1, 2, 3))) for window in windows]
    expected = [of_window(q, k, v, sinks) for of_window in alone]
    for which in (0, 1):
        got = several(jnp.array(which), q, k, v, sinks)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), got, expected[which])
    assert abs(expected[0][0] - expected[1][0]) > 1  # documents are longer than the window


# -- the list of tiles


QUICK = ("causal", "documents")  # of the masks


@pytest.mark.parametrize(
    "mask", [mask if mask in QUICK else pytest.param(mask, marks=pytest.mark.slow) for mask in MASKS]
)
def test_the_list_has_every_tile_that_is_seen_once(mask):
    masks = {name: value for name, value in MASKS[mask].items() if name not in ("soft_cap", "scale")}
    B, T, S, num_q, num_k, chunks, places = 2, 330, 330, 3, 2, 4, 3
    blocks = Blocks(128, 192, queries=32, keys=64, full_unroll=2, masked_unroll=2, ahead=1)

    @jax.jit
    def lists(q_offset):
        ranges, _ = block_ranges((T, S), (32, 64), Mask(q_offset=q_offset, **masks))
        return flash.list_tiles(ranges, (num_q, num_k), blocks)

    for q_offset in (0, 150):
        tiles, groups, reach = [np.asarray(x) for x in lists(q_offset)]
        seen = mask_of((B, T, S), q_offset=q_offset, **masks)[: len(tiles) // 6, 0]
        for at in range(len(tiles)):
            b, i, j = at // 6, at // 2 % 3, at % 2
            # Beyond the end nothing is seen. part[c, k] is tile (c, k) of this pair of superblocks:
            part = np.pad(seen[b], ((0, 384 - T), (0, 384 - S)))[i * 128 :][:128, j * 192 :][:, :192]
            part = part.reshape(chunks, 32, places, 64).transpose(0, 2, 1, 3)
            num_full, num_masked = 2 * groups[2 * at], 2 * groups[2 * at + 1]
            listed = [((t >> 16) & 0xFFF, t & 0xFFFF) for t in tiles[at, 0, : num_full + num_masked]]
            assert all(part[tile].all() for tile in listed[:num_full])
            listed = [(c, k) for c, k in listed if c < chunks]
            wanted = {(c, k) for c in range(chunks) for k in range(places) if part[c, k].any()}
            assert len(listed) == len(set(listed)) and wanted <= set(listed)
            assert wanted == set(listed) or mask in ("all", "documents in no order")  # hulls and corners: see masks.py
            first, last = reach[2 * (b * num_q + i) :][:2]
            assert not wanted or first <= j <= last


# -- sizes and errors


@pytest.mark.parametrize("T, S", [(1, 1), (100, 8192), (20_000, 20_000), (4096, 2**20)])
@pytest.mark.parametrize("H, V", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_default_blocks_fit(T, S, H, V, dtype):
    blocks = default_blocks(T, S, H, V, dtype)
    assert vmem_bytes(blocks, H, V, dtype) <= VMEM_BYTES
    for length, rows, tile in ((T, blocks.q_rows, 256), (S, blocks.k_rows, 512)):
        superblocks = -(-length // rows)
        assert superblocks * rows - length < tile * superblocks


def test_vmem_holds_keys_and_values_twice_and_the_values_once_more():
    """Their buffers are double, with 8 rows of ids; the transposed values have one."""
    bytes_of_keys = lambda rows, H, V: vmem_bytes(Blocks(256, rows), H, V) - vmem_bytes(Blocks(256, 0), H, V)
    assert bytes_of_keys(512, 128, 128) == 512 * (2 * ((128 + 128) * 2 + 8 * 4) + 128 * 2)
    assert bytes_of_keys(512, 192, 64) == 512 * (2 * ((256 + 128) * 2 + 8 * 4) + 64 * 2)  # registers have 128 lanes


@pytest.mark.parametrize(
    "shapes, options, message",
    [
        ([(1, 3, 8, 64), (1, 2, 8, 64), (1, 2, 8, 64)], {}, "N a multiple of K"),
        ([(1, 2, 8, 64), (1, 2, 8, 32), (1, 2, 8, 64)], {}, r"keys \(1, 2, 8, 32\)"),
        ([(1, 2, 8, 64), (1, 2, 8, 64), (1, 2, 9, 64)], {}, r"values \(1, 2, 9, 64\)"),
        ([(1, 1, 8, 64)] * 3, dict(window=-1), "window=-1"),
        ([(1, 1, 8, 64)] * 3, dict(soft_cap=-2.0), "soft_cap=-2.0"),
        ([(1, 1, 8, 64)] * 3, dict(segments=(jnp.zeros((1, 8)), jnp.zeros((1, 7)))), r"\(1, 7\)"),
        ([(1, 1, 8, 64)] * 3, dict(blocks=Blocks(256, 512, queries=100)), "multiples of 128"),
        ([(1, 1, 8, 64)] * 3, dict(blocks=Blocks(256, 512, full_unroll=12)), r"2\*ahead"),
        ([(1, 1, 8, 64)] * 3, dict(blocks=Blocks(2**16, 512)), "bytes of VMEM, of 62,914,560"),
    ],
)
def test_errors_have_the_numbers(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        forward(*[jnp.zeros(shape) for shape in shapes], **options)


def test_dtypes_must_agree():
    q, k, v = inputs(8, 8)
    with pytest.raises(ValueError, match="float32 and bfloat16: cast them"):
        forward(q, k, v.astype(jnp.bfloat16))


# -- compiled for TPU7x


FEW_TILES = dict(full_unroll=4, masked_unroll=4, ahead=2)  # in an iteration: they compile in a fifth of the time


@pytest.mark.slow
def test_cycles_of_a_causal_head_of_8192():
    """With few tiles it takes 92,130. In test_benchmarks.py the default's 24 take fewer than 70,500."""
    blocks = dataclasses.replace(default_blocks(8192, 8192, 128, 128), **FEW_TILES)
    kernel = bundles.measure("compiled.builders:flash_forward", heads=2, sizes=FEW_TILES).kernel()
    counts = builders.forward_executions(kernel, 8192, 8192, 2, blocks, Mask())
    assert kernel.cycles(counts, moved_bytes=0).compute / 2 < 93_000
    tiles = max((region for region, _ in bundles.walk(kernel.root)), key=lambda region: region.cycles)
    assert tiles.kind == "loop" and tiles.cycles / blocks.masked_unroll * 8 < 2620  # cycles of 1024 x 1024 scores
    assert 0.9 < kernel.vmem_bytes / vmem_bytes(blocks, 128, 128) <= 1


@pytest.mark.slow
def test_long_sequences_stream():
    """32k in four and two superblocks, as large as those of 128k."""
    superblocks = default_blocks(2**15, 2**15, 128, 128)
    assert superblocks == default_blocks(2**17, 2**17, 128, 128) and superblocks.k_rows < 2**15
    report = bundles.measure("compiled.builders:flash_forward", seq=2**15, kv_heads=1, heads=2, sizes=FEW_TILES)
    assert report.kernel("flash_forward").vmem_bytes < 62 * 2**20


def heads_of_presets():
    """{(key dim, value dim)} of the models in presets.py."""
    heads = set()
    for name in flags_lib.PRESETS:
        c = flags_lib.from_preset(name)
        dims = c.head_dim + c.rope_head_dim, c.value_head_dim or c.head_dim
        heads.add(dims)
    return heads


def test_the_head_dims_of_the_presets_are_tested():
    large = {dims for dims in heads_of_presets() if dims[0] >= 64}
    assert large <= {(H, V) for _, _, H, V in HEADS.values()}


@pytest.mark.slow
def test_compiled_programs_hold_no_scores_in_memory(few_tiles):
    """Attention and its gradients take less temporary memory than the scores of a head in bfloat16."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    T, N, H = 16_384, 2, 128
    array = jax.ShapeDtypeStruct((1, T, N, H), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    loss = lambda q, k, v: flash_attention(q, k, v)[0].astype(jnp.float32).sum()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(array, array, array).compile().memory_analysis()
    assert 0 < memory.temp_size_in_bytes < T * T * 2 / 8


@pytest.mark.slow
def test_compiled_branches_of_windows_contain_only_the_kernels(few_tiles):
    """Forward and backward, with documents, heads of 64 and the operations around attention in a model."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    struct = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    qkv = [struct((4, 2048, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]

    def loss(qkv, bias, ids, which):
        out, _ = flash_attention(*(x + bias for x in qkv), segments=(ids, ids), window=(256, 0), which=which)
        return jnp.sin(out.astype(jnp.float32)).sum()

    others = struct((64,), jnp.bfloat16), struct((4, 2048), jnp.int32), struct((), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = parse(jax.jit(jax.grad(loss, (0, 1))).lower(qkv, *others).compile().as_text())
    conditionals = [i for c in program.computations.values() for i in c.values() if i.opcode == "conditional"]
    assert len(conditionals) == 2
    for conditional in conditionals:
        for branch in conditional.called["branch_computations"]:
            instructions = program.computations[branch].values()
            assert sum(i.opcode == "custom-call" for i in instructions) == 1
            assert {i.opcode for i in instructions} <= {
                *"parameter get-tuple-element tuple bitcast custom-call copy".split()
            }
            copied = sum(shape.nbytes for i in instructions if i.opcode == "copy" for shape in i.shapes)
            assert copied < 1e5  # the lists of tiles; one head has 1 MB


@pytest.mark.at_most(1)
@pytest.mark.slow
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (192, 128), (256, 256)])
def test_other_heads_compile_inside_a_checked_shard_map(head_dim, value_dim):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("batch", "context"), axis_types=(AxisType.Auto,) * 2)
    sequence = PartitionSpec("batch", "context")

    def of_device(q, k, v, ids, all_ids):
        offset = jax.lax.axis_index("context") * q.shape[1]
        sizes = dataclasses.replace(default_blocks(*q.shape[1:2], k.shape[1], head_dim, value_dim), full_unroll=8)
        return forward(
            *(x.swapaxes(1, 2) for x in (q, k, v)), segments=(ids, all_ids), q_offset=offset, window=999, blocks=sizes
        )

    shapes = [(2, 4000, 2, head_dim), (2, 4000, 1, head_dim), (2, 4000, 1, value_dim), (2, 4000), (2, 4000)]
    specs = [sequence, PartitionSpec("batch"), PartitionSpec("batch"), sequence, PartitionSpec("batch")]
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16 if len(shape) == 4 else jnp.int32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    out_specs = PartitionSpec("batch", None, "context"), PartitionSpec("batch", None, "context")
    step = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs))
    text = step.lower(*args).compile().as_text()
    assert re.search("%flash_forward.* custom-call", text)
