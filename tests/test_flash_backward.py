"""The backward kernel: simulated gradients against float64, and the kernel compiled for TPU7x."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flags as flags_lib
import flash_backward
from compiled import builders, bundles
from flash_backward import Blocks, backward, default_blocks, vmem_bytes
from masks import CAUSAL, UNSEEN, Mask, Scores, mask_and_scores, visible

SMALL = Blocks(queries=128, keys=256, chunk=128, resident=2048)
SCOPED_BYTES = re.compile(r'used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')
NO_MASK = dict(causal=False, window=0, prefix=None, segments=None, soft_cap=0.0, q_offset=0)


def attend(q, k, v, *, scale, causal, window, prefix, segments, soft_cap, q_offset):
    """(out, lse, P, dS/d(scale * q k)) of attention in float64. k and v have a head for each of q."""
    T, S = q.shape[2], k.shape[2]
    seen = visible(
        jnp.arange(T)[:, None] + q_offset,
        jnp.arange(S)[None],
        Mask(
            causal=causal,
            window=window,
            prefix=None if prefix is None else jnp.reshape(prefix, (-1, 1, 1)),
            segments=None if segments is None else (segments[0][:, :, None], segments[1][:, None]),
        ),
    )
    seen = np.asarray(seen).reshape(-1, 1, T, S)
    raw = scale * np.einsum("bnth,bnsh->bnts", q, k)
    capped = np.tanh(raw / soft_cap) if soft_cap else 0 * raw
    scores = np.where(seen, soft_cap * capped if soft_cap else raw, -np.inf)
    highest = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = exponentials.sum(-1, keepdims=True)
    p = exponentials / np.where(total > 0, total, 1)
    lse = np.where(total > 0, highest + np.log(np.where(total > 0, total, 1)), UNSEEN)[..., 0]
    return np.einsum("bnts,bnsv->bntv", p, v), lse, p, 1 - capped**2


def expected(q, k, v, dout, dlse, *, scale, **mask):
    """(out, lse, (dq, dk, dv)) in float64."""
    q, k, v, dout, dlse = [np.asarray(x, np.float64) for x in (q, k, v, dout, dlse)]
    B, K, S = k.shape[:3]
    G = q.shape[1] // K
    k, v = np.repeat(k, G, 1), np.repeat(v, G, 1)
    out, lse, p, slope = attend(q, k, v, scale=scale, **mask)
    dp = np.einsum("bntv,bnsv->bnts", dout, v)
    ds = scale * slope * p * (dp - (out * dout).sum(-1, keepdims=True) + dlse[..., None])
    sum_groups = lambda x: x.reshape(B, K, G, S, -1).sum(2)
    dk, dv = np.einsum("bnts,bnth->bnsh", ds, q), np.einsum("bnts,bntv->bnsv", p, dout)
    return out, lse, (np.einsum("bnts,bnsh->bnth", ds, k), sum_groups(dk), sum_groups(dv))


def inputs(T, S=0, N=2, K=1, H=64, V=0, B=1, dtype=jnp.float32, seed=0):
    random = np.random.default_rng(seed)
    S, V = S or T, V or H
    normal = lambda *shape, dtype=dtype: jnp.asarray(random.normal(size=shape), dtype)
    q, k, v, dout = normal(B, N, T, H), normal(B, K, S, H), normal(B, K, S, V), normal(B, N, T, V)
    return q, k, v, dout, normal(B, N, T, dtype=jnp.float32)


def errors(arrays, blocks=SMALL, **mask):
    """The largest error of each gradient, relative to its largest element."""
    mask = NO_MASK | dict(scale=arrays[0].shape[-1] ** -0.5) | mask
    out, lse, want = expected(*arrays, **mask)
    got = gradients(arrays, jnp.asarray(out, arrays[2].dtype), jnp.asarray(lse, jnp.float32), blocks, **mask)
    for array, result in zip(arrays, got, strict=False):
        assert result.shape == array.shape and result.dtype == array.dtype
    return [abs(np.asarray(g, np.float64) - w).max() / abs(w).max() for g, w in zip(got, want, strict=True)]


def gradients(arrays, out, lse, blocks=SMALL, *, prefix, segments, q_offset, **static):
    """The gradients, with prefix, segments and offset traced as in a train step."""
    q, k, v, dout, dlse = arrays

    def call(prefix, segments, q_offset):
        mask = mask_and_scores(prefix=prefix, segments=segments, q_offset=q_offset, **static)
        return backward(q, k, v, (out, lse), (dout, dlse), *mask, blocks=blocks, interpret=True)

    return jax.jit(call)(prefix, segments, jnp.asarray(q_offset))


def documents(B, T, count=4, seed=1):
    return jnp.sort(jnp.asarray(np.random.default_rng(seed).integers(0, count, (B, T)), jnp.int32), 1)


# -- gradients


@pytest.mark.slow
def test_gradients():
    """A causal mask with grouped queries, then all options at once; lengths are not multiples of blocks."""
    assert max(errors(inputs(300, N=4, K=2), causal=True)) < 2e-6
    ids = documents(2, 500)
    mask = dict(causal=True, window=190, segments=(ids[:, 77:377], ids), soft_cap=2.0, q_offset=77)
    assert max(errors(inputs(300, 500, B=2), **mask)) < 2e-6


def test_queries_without_keys_have_no_gradient():
    """With q_offset < 0 the first queries see no key. lse = inf is an overflow; out and its gradient may be NaN."""
    q, k, v, dout, dlse = inputs(160, N=4, K=2, H=16)
    mask = NO_MASK | dict(scale=0.25, causal=True, q_offset=-60, soft_cap=2.0)
    out, lse, want = expected(q, k, v, dout.at[:, :, 130].set(0), dlse.at[:, :, 130].set(0), **mask)
    out[:, :, 130], lse[:, :, 130] = np.nan, np.inf
    assert (lse[:, :, :60] == UNSEEN).all()
    out, lse = jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32)
    dq, dk, dv = gradients((q, k, v, dout, dlse), out, lse, **mask)
    assert not np.asarray(dq[:, :, :60]).any() and not np.asarray(dq[:, :, 130]).any()
    for got, exact in zip((dq, dk, dv), want, strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-5)
    assert not np.asarray(dk[:, :, 100:]).any() and np.asarray(dk[:, :, :100]).any()  # no query sees the last keys


MASKS = {
    "none": dict(),
    "wide window": dict(causal=True, window=256),
    "both sides": dict(window=50, soft_cap=2.0),
    "prefix": dict(causal=True, prefix=np.array([30, 260])),
    "prefix and window": dict(causal=True, prefix=40, window=200),
    "documents": dict(causal=True, segments=(documents(2, 300), documents(2, 300))),
    "documents in no order": dict(segments=(documents(2, 300)[:, ::-1] % 3, documents(2, 300) % 3)),
}


@pytest.mark.at_most(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    assert max(errors(inputs(300, B=2, H=16), **MASKS[name])) < 3e-6


HALF_LAST = Blocks(queries=256, keys=256, resident=512, chunk=128)  # of 300 queries, 128 in the last block


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*MASKS, "causal"])
def test_in_the_last_block_only_pieces_with_queries_are_computed(name):
    mask = MASKS.get(name, dict(causal=True))
    assert max(errors(inputs(300, B=2, H=16), HALF_LAST, **mask)) < 3e-6


@pytest.mark.at_most(1)
@pytest.mark.slow
@pytest.mark.parametrize(("T", "q_offset"), [(300, 300), (70, 530), (130, 470)])
def test_the_last_block_of_queries_with_keys_in_parts(T, q_offset):
    blocks = replace(HALF_LAST, resident=256)
    assert max(errors(inputs(T, 600, H=16), blocks, causal=True, q_offset=q_offset)) < 3e-6


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [dict(T=256, H=128, N=4, K=4), dict(T=130, S=600, H=192, V=128), dict(T=300, H=256, N=3, K=1), dict(T=70, S=5)],
    ids=str,
)
def test_shapes(shape):
    offset = shape.get("S", shape["T"]) - shape["T"]
    assert max(errors(inputs(**shape), causal=True, q_offset=offset, blocks=None)) < 4e-6


@pytest.mark.slow
@pytest.mark.parametrize("mask", [dict(causal=True, window=100), dict(causal=True, prefix=300)], ids=str)
def test_keys_in_parts_give_the_gradients_of_all_at_once(mask):
    """700 keys are two parts of 256, which some blocks of queries do not see, and 188 more. Documents are split."""
    arrays, ids = inputs(700, H=16), documents(1, 700, 6)
    some = Blocks(queries=128, keys=256, chunk=128, resident=256, buffers=1)
    assert max(errors(arrays, blocks=some, segments=(ids, ids), **mask)) < 3e-6


def test_parts_of_the_keys_visit_only_queries_that_see_them():
    visited = lambda *flags: [int(n) for n in flash_backward._visited(jnp.array(flags))]
    assert visited(False, True, False, True, False) == [1, 3]
    assert visited(False, False) == [0, 1]
    assert visited(True, True) == [0, 2]


@pytest.mark.slow
def test_large_logits():
    """Scores of thousands, where one key has all of a query's weight, and scores that are all equal.

    A score has 24 bits, and its absolute error is a relative error of P.
    """
    q0, k0, v, dout, dlse = inputs(256)
    for q, k in [(30 * q0, 30 * k0), (100 * jnp.ones_like(q0), jnp.ones_like(k0))]:
        highest = float(abs(jnp.einsum("bnth,bksh->bnts", q, k)).max()) / 8
        assert 700 < highest
        assert max(errors((q, k, v, dout, dlse), causal=True)) < 4 * 2**-23 * highest


@pytest.mark.slow
def test_bfloat16_errors_are_no_larger_than_those_of_splash_attention():
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, N, H = 512, 2, 128
    q, k, v, dout, dlse = inputs(T, N=N, K=N, H=H, dtype=jnp.bfloat16)
    scale, dlse = H**-0.5, 0 * dlse
    sizes = {name: 256 for name in ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")}
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((T, T))] * N),
        block_sizes=splash.BlockSizes(**sizes, block_kv_compute=256, use_fused_bwd_kernel=True),
        interpret=True,
    )
    loss = lambda q, k, v: jnp.sum(kernel((q * scale).astype(q.dtype), k, v).astype(jnp.float32) * dout[0])
    theirs = jax.jit(jax.grad(loss, (0, 1, 2)))(q[0], k[0], v[0])
    *_, want = expected(q, k, v, dout, dlse, **NO_MASK | dict(causal=True, scale=scale))
    folded = (q.astype(jnp.float32) * (scale * flash_backward.LOG2_E)).astype(q.dtype)  # as the forward pass rounds it
    out, lse, _ = expected(folded, k, v, dout, dlse, **NO_MASK | dict(causal=True, scale=1 / flash_backward.LOG2_E))
    blocks = Blocks(queries=256, keys=256, resident=512)
    out, lse = jnp.asarray(out, jnp.bfloat16), jnp.asarray(lse, jnp.float32)
    ours = gradients((q, k, v, dout, dlse), out, lse, blocks, **NO_MASK | dict(causal=True, scale=scale))
    error = lambda got, want: np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2) / np.mean(want**2))
    for name, our, their, exact in zip("qkv", ours, theirs, want, strict=True):
        print(f"d{name} {error(our[0], exact[0]):.5f} splash attention {error(their, exact[0]):.5f}")
        assert error(our[0], exact[0]) <= error(their, exact[0])


# -- blocks


def test_tiles():
    """For every mask, whether a tile is seen in part or in full agrees with its elements."""
    q, k = np.arange(4)[:, None], np.arange(6)[None]
    for causal in (True, False):
        for window in (0, 1, 3, 8):
            for distance in range(-20, 20):
                seen = np.asarray(visible(q + distance, k, Mask(causal, window)))
                tile = flash_backward._tile(distance, 4, 6, Mask(causal, window))
                assert tile == (seen.any(), seen.all()), (causal, window, distance)


def test_edges():
    edges = flash_backward.edge_distances
    assert edges(1024, 1024, CAUSAL) == [0]
    assert edges(1024, 1024, Mask(window=1024)) == [0, 1024]
    assert edges(1024, 1024, Mask(window=4096)) == [0, 4096]
    assert edges(512, 1024, CAUSAL) == [0, 512]
    assert edges(1024, 1024, Mask(causal=False)) == []


def test_errors():
    arrays = inputs(256)
    for match, change in [
        ("must be a multiple of 128", dict(blocks=Blocks(queries=100, keys=256, resident=256))),
        ("must be a multiple of 256", dict(blocks=Blocks(queries=128, keys=384, resident=768))),
        ("bytes of VMEM", dict(blocks=Blocks(queries=8192, keys=8192, resident=8192, chunk=2048))),
        ("a multiple of K", dict(arrays=inputs(256, N=3, K=2))),
        ("one dtype", dict(arrays=(arrays[0].astype(jnp.bfloat16), *arrays[1:]))),
    ]:
        q, k, v, dout, dlse = change.get("arrays", arrays)
        with pytest.raises(ValueError, match=match):
            both = (dout, dlse), (dout, dlse)
            backward(q, k, v, *both, Mask(causal=False), Scores(), blocks=change.get("blocks"), interpret=True)


# -- compiled for TPU7x


def attention_shapes():
    """{(H, V): (T, window, G)} of the presets: the longest sequence with these head dims, and its smallest window."""
    shapes = {}
    for name in flags_lib.PRESETS:
        c = flags_lib.from_preset(name)
        H, V = (c.head_dim + c.rope_head_dim, c.value_head_dim) if c.kv_lora_rank else (c.head_dim, c.head_dim)
        if H >= 64:
            shapes.setdefault((H, V), []).append((c.seq_len, c.window, c.num_heads // c.num_kv_heads))
    return {dims: min(runs, key=lambda run: (-run[0], run[1] or run[0])) for dims, runs in shapes.items()}


@pytest.mark.slow
def test_compiles_for_tpu7x_and_takes_no_more_vmem_than_predicted():
    """Runs in a shard_map with check_vma, with all keys of a context axis, documents, and an offset from the axis.

    Only 4k of 192 and 128 has the default blocks, of 1,024 x 1,024. Those of 256 x 256 compile in a tenth of the time.
    """
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[:2]
    mesh = Mesh(np.array(devices), ("context",), axis_types=(AxisType.Auto,))
    split, gathered = P(None, None, "context"), P()
    shapes = [(T, H, V, window, G) for (H, V), (T, window, G) in attention_shapes().items()]
    assert any(window for *_, window, _ in shapes) and not all(window for *_, window, _ in shapes)
    for T, H, V, window, G in [*shapes, (2 * 32768, 128, 128, 0, 1)]:  # the last with keys in parts
        few = {} if T == 4096 else dict(queries=256, keys=256, chunk=128)
        blocks = replace(default_blocks(T // 2, T, H, V), **few)

        def per_device(q, k, v, out, lse, ids, T=T, window=window, blocks=blocks):
            ids_here = jax.lax.dynamic_slice_in_dim(ids, jax.lax.axis_index("context") * (T // 2), T // 2, 1)
            offset = jax.lax.axis_index("context") * (T // 2)
            mask = Mask(window=window, segments=(ids_here, ids), q_offset=offset)
            return backward(q, k, v, (out, lse), (out, lse), mask, Scores(), blocks=blocks)

        function = jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(split, gathered, gathered, split, split, gathered),
            out_specs=split,
            check_vma=True,
        )
        array = lambda spec, dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))
        kv = partial(array, gathered, jnp.bfloat16, 1, 2, T)
        query = partial(array, split, jnp.bfloat16, 1, 2 * G, T)
        lse, ids = array(split, jnp.float32, 1, 2 * G, T), array(gathered, jnp.int32, 1, T)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(function).lower(query(H), kv(H), kv(V), query(V), lse, ids)
            program = lowered.compile().as_text()
        kernels = program.split('custom_call_target="tpu_custom_call"')[1:]  # the text after each
        sizes = [int(SCOPED_BYTES.search(kernel)[1]) for kernel in kernels]
        taken, predicted = max(sizes), vmem_bytes(blocks, H, V)
        assert taken <= predicted <= taken + 10 * 2**20, (T, H, V, window, taken, predicted)


@pytest.mark.slow
def test_cycles():
    """A causal head of 8k has 28 full blocks and 8 on the diagonal. A full one keeps the MXUs busy for 3584 cycles."""
    report = bundles.measure("compiled.builders:flash_backward", seq=8192)
    full, edge = report.region("full block").cycles, report.region("edge block").cycles
    assert 3584 < full <= 4400
    assert edge <= 0.7 * full  # 10 of its 16 tiles
    blocks, kernel = default_blocks(8192, 8192, 128, 128), report.kernel()
    counts = builders.backward_executions(kernel, 8192, 8192, 8, 8, blocks, CAUSAL)
    by_name = {region.label: count for region, count in zip(kernel.unknown(), counts, strict=True)}
    assert (by_name["full block"], by_name["edge block"], by_name["masked block"]) == (8 * 28, 8 * 8, 0)
    head = kernel.cycles(counts, moved_bytes=0).compute / 8
    assert 28 * full + 8 * edge < head < 165_000


@pytest.mark.slow
def test_one_query_more_than_a_block_takes_a_quarter_of_a_block():
    """513 queries in blocks of 512, which compile in a sixth of the time of 1,024.

    The last block computes 128 queries: so few wait for each other, and take 914 cycles where 512 take 1,533.
    """
    sizes = dict(queries=512, keys=512, chunk=128, resident=1024)
    kernel = bundles.measure("compiled.builders:flash_backward", seq=513, heads=2, sizes=sizes).kernel()
    counts = builders.backward_executions(
        kernel, 513, 513, 2, 2, replace(default_blocks(513, 513, 128, 128), **sizes), CAUSAL
    )
    by_name = {region.label: count for region, count in zip(kernel.unknown(), counts, strict=True)}
    assert (by_name["full block"], by_name["edge block"]) == (0, 2)
    assert (by_name["last full block"], by_name["last edge block"], by_name["last masked block"]) == (2, 2, 0)
    cycles = {region.label: region.cycles for region in kernel.unknown()}
    assert cycles["last full block"] < 0.62 * cycles["full block"]
