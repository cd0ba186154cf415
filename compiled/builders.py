"""Builders for compiled/bundles.py: a call of each kernel of gmm.py, flash.py and flash_backward.py, by itself.

    python aot.py bundles compiled.builders:flash_forward seq=8192 heads=8
    bundles.measure("compiled.builders:tgmm", M=8192, K=4096, N=1536)

**Idea.** The cycles of a kernel depend on its own program alone. So it is compiled without the model around it. A
builder takes the sizes of a call, as numbers and names that a command line can give. It returns the function to compile
and the shapes of its arguments, a list of trees of `jax.ShapeDtypeStruct`. Block sizes that are not given are those of
the kernel's rule, not a search's result (tuned.py). dense.py has a builder of its own.

**Executions.** How often a part of attention's kernels is executed depends on the mask. `forward_executions` and
`backward_executions` count this for a compiled kernel, in the order in which its `cycles` takes them. Those of grouped
matmuls depend on the groups' sizes (compiled/grid.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

import flash
import flash_backward as gradients
import gmm as grouped
import moe
from groups import Variant, cdiv, default_tgmm_tiles, default_tiles, result_dtype
from masks import Mask, Scores, block_ranges, mask_and_scores

Call = tuple[Callable, list]  # (function, shapes of its arguments)

# -- grouped matmuls


def gmm(M=8192, K=4096, N=1536, groups=8, dtype="bfloat16", out_dtype=None, **options) -> Call:
    """`gmm.gmm` or `gmm.summed_gmm`. Options: fields of Variant and Tiles."""
    variant = Variant(**{name: options.pop(name) for name in Variant._fields if name in options})
    default = default_tiles(M, K, N, groups, dtype, out_dtype, variant)
    options = dict(out_dtype=out_dtype, tiles=default._replace(**options))
    shape = jax.ShapeDtypeStruct
    lhs, rhs = shape((M, K), dtype), shape((groups, N, K) if variant.transpose_rhs else (groups, K, N), dtype)
    scales = dict(lhs_scale=shape((M,), jnp.float32)) if variant.lhs_scale else {}
    scales |= dict(rhs_scale=shape((groups, N), jnp.float32)) if variant.rhs_scale else {}
    call = partial(grouped.gmm, transpose_rhs=variant.transpose_rhs)
    if variant.summed:  # with transpose_rhs
        call, (lhs, rhs, scales) = grouped.summed_gmm, jax.tree.map(lambda a: (a, a), (lhs, rhs, scales))
    run = lambda lhs, rhs, sizes, scales: call(lhs, rhs, sizes, **scales, **options)
    return run, [lhs, rhs, shape((groups,), jnp.int32), scales]


def gated_gmm(M=8192, K=4096, N=1536, groups=8, dtype="bfloat16", rhs_scale=False, bias=False, **tiles) -> Call:
    """`gmm.gated_gmm`. Options: fields of Tiles."""
    default = default_tiles(M, K, N, groups, dtype, variant=Variant(gated=True, rhs_scale=rhs_scale, bias=bias))
    shape = jax.ShapeDtypeStruct
    weights, sizes = shape((groups, K, N), dtype), shape((groups,), jnp.int32)
    scales = (shape((groups, N), jnp.float32),) * 2 if rhs_scale else None
    biases = (shape((groups, N), dtype),) * 2 if bias else None
    options = dict(tiles=default._replace(**tiles))

    def run(x, rhs, factors, sizes, scales, biases):
        return grouped.gated_gmm(x, rhs, sizes, moe.glu, factors, rhs_scale=scales, biases=biases, **options)

    return run, [shape((M, K), dtype), (weights, weights), shape((M,), jnp.float32), sizes, scales, biases]


def gated_gradients(
    M=8192, K=4096, N=1536, groups=8, dtype="bfloat16", transpose_rhs=False, rhs_scale=False, limit=0.0, **tiles
) -> Call:
    """`gmm.gated_gradients` of `moe.glu` with this limit. Options: fields of Tiles."""
    variant = Variant(transpose_rhs=transpose_rhs, rhs_scale=rhs_scale, gradient=True)
    default = default_tiles(M, K, N, groups, dtype, variant=variant)
    shape = jax.ShapeDtypeStruct
    weights = shape((groups, N, K) if transpose_rhs else (groups, K, N), dtype)
    products, factors = (shape((M, N), result_dtype(dtype)),) * 2, shape((M,), jnp.float32)
    scale = shape((groups, N), jnp.float32) if rhs_scale else None
    options = dict(transpose_rhs=transpose_rhs, tiles=default._replace(**tiles))

    def run(dout, rhs, products, factors, sizes, scale):
        through = grouped.Activated(partial(moe.glu, limit=limit), products, factors)
        return grouped.gated_gradients(dout, rhs, sizes, through, rhs_scale=scale, **options)

    return run, [shape((M, K), dtype), weights, products, factors, shape((groups,), jnp.int32), scale]


def tgmm(M=8192, K=4096, N=1536, groups=8, dtype="bfloat16", out_dtype=None, scale=False, **tiles) -> Call:
    """`gmm.tgmm`. Options: fields of TgmmTiles."""
    default = default_tgmm_tiles(M, K, N, groups, dtype, out_dtype, scale=scale)
    options = dict(out_dtype=out_dtype, tiles=default._replace(**tiles))
    shape = jax.ShapeDtypeStruct
    scales = dict(scale=shape((groups, N), jnp.float32)) if scale else {}
    run = lambda x, dy, sizes, scales: grouped.tgmm(x, dy, sizes, **scales, **options)
    return run, [shape((M, K), dtype), shape((M, N), dtype), shape((groups,), jnp.int32), scales]


# -- attention


def flash_forward(heads: int = 1, sizes: dict | None = None, **options) -> Call:
    """`flash.forward`. `sizes`: fields of `flash.Blocks` that replace the default's. Options: those of `_attention`."""
    (q, k, v), ids, mask, scores = _attention(heads, **options)
    (T, H), (S, V) = q.shape[2:], v.shape[2:]
    blocks = replace(flash.default_blocks(T, S, H, V, q.dtype, mask.window), **(sizes or {}))
    run = lambda qkv, ids: flash.forward(*qkv, replace(mask, segments=ids), scores, blocks=blocks)
    return run, [(q, k, v), ids]


def flash_backward(heads: int = 8, sizes: dict | None = None, **options) -> Call:
    """`flash_backward.backward`. `sizes`: fields of its Blocks that replace the default's. Options: as above."""
    (q, k, v), ids, mask, scores = _attention(heads, **options)
    (T, H), (S, V) = q.shape[2:], v.shape[2:]
    blocks = replace(gradients.default_blocks(T, S, H, V, q.dtype), **(sizes or {}))
    results = jax.ShapeDtypeStruct((1, heads, T, V), q.dtype), jax.ShapeDtypeStruct((1, heads, T), jnp.float32)
    run = lambda arrays, ids: gradients.backward(*arrays, replace(mask, segments=ids), scores, blocks=blocks)
    return run, [(q, k, v, results, results), ids]


def _attention(
    heads: int,
    seq: int = 8192,
    keys: int = 0,
    kv_heads: int = 0,
    head_dim: int = 128,
    value_dim: int = 0,
    packed: bool = False,
    dtype: str = "bfloat16",
    **options,
) -> tuple[list, tuple | None, Mask, Scores]:
    """([queries, keys, values], segment ids or None, mask, scores) of a sequence; the arrays as shapes, heads first.

    Args:
      seq: number of queries.
      keys, kv_heads, value_dim: 0 means equal to seq, heads and head_dim.
      packed: with segment ids.
      options: fields of Mask and Scores.
    """
    keys, kv_heads = keys or seq, kv_heads or heads
    dims = (heads, seq, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, value_dim or head_dim)
    arrays = [jax.ShapeDtypeStruct((1, *each), dtype) for each in dims]
    ids = tuple(jax.ShapeDtypeStruct((1, length), jnp.int32) for length in (seq, keys)) if packed else None
    return arrays, ids, *mask_and_scores(**options)


# -- how often the parts of attention's kernels are executed


def forward_executions(kernel, T: int, S: int, heads: int, blocks: flash.Blocks, mask: Mask) -> list[int]:
    """How often each region of a compiled kernel that depends on data is executed, for its `cycles`.

    Every query head has keys of its own.
    """
    ranges_bn4, _ = block_ranges((T, S), (blocks.queries, blocks.keys), mask)
    num = cdiv(T, blocks.q_rows), cdiv(S, blocks.k_rows)
    groups = flash.list_tiles(ranges_bn4, num, blocks)[1].reshape(-1, 2)
    loops = []
    for loop in groups.T.tolist():  # the branch around each loop, the one around its start, its iterations
        begun = heads * sum(count > 0 for count in loop)
        loops += [begun, begun, heads * sum(loop)]
    transposes = heads * (num[0] * num[1] if num[1] > 1 else 1)  # of the values: for each pair of superblocks, or once
    before, after = {0: ([], []), 1: ([transposes], []), 3: ([heads * num[0], transposes], [heads * num[0]])}[
        len(kernel.unknown()) - len(loops)
    ]
    return [*before, *loops, *after]


def backward_executions(
    kernel, T: int, S: int, heads: int, kv_heads: int, blocks: gradients.Blocks, mask: Mask
) -> list[int]:
    """How often each region of a compiled kernel that depends on the mask is executed, for its `cycles`.

    With keys in parts it is the sum over all calls. Of the mask, `causal`, `window` and `q_offset` count.
    """
    num_q, num_k = cdiv(T, blocks.queries), cdiv(S, blocks.keys)
    of_q, _ = block_ranges((num_q * blocks.queries, S), (blocks.queries, blocks.keys), mask)
    own_code = gradients.last_queries(T, blocks) < blocks.queries  # for the last block of queries
    ranges_of = {"": of_q[0].tolist()[: num_q - own_code]} | (
        {"last ": of_q[0].tolist()[num_q - 1 :]} if own_code else {}
    )
    parts, counts, edges = cdiv(S, blocks.resident), {}, {}
    for scope, ranges in ranges_of.items():
        at_edge, elsewhere, full = dict.fromkeys(gradients.edge_distances(blocks.queries, blocks.keys, mask), 0), 0, 0
        for i, (first, full_first, full_end, end) in enumerate(ranges, num_q - 1 if scope else 0):
            full += full_end - full_first
            for j in [*range(first, full_first), *range(full_end, end)]:
                distance = i * blocks.queries + mask.q_offset - j * blocks.keys
                if distance in at_edge:
                    at_edge[distance] += 1
                else:
                    elsewhere += 1
        masked, edges[scope + "edge block"] = elsewhere + sum(at_edge.values()), iter(at_edge.values())
        counts[scope] = len(ranges) * parts, full, elsewhere, masked

    def inside(region):
        return {*region.names}.union(*(inside(child) for child in region.children))

    def count(region):
        for scope, (steps, full, elsewhere, masked) in counts.items():
            named = {scope + "full block": full, scope + "masked block": elsewhere}
            for name in region.names:
                if name in edges and name.startswith(scope + "edge"):
                    return heads * next(edges[name])
                if name in named:
                    return heads * named[name]
            if region.kind not in ("grid", "step") and scope + "full block" in inside(region):
                return heads * steps
            if scope + "masked block" in inside(region):
                return heads * (masked if region.kind == "loop" else steps)
        if region.kind in ("grid", "step"):
            return heads * num_q * parts
        return kv_heads * (num_k if region.kind == "loop" else parts)  # loading keys, storing their gradients

    return [count(region) for region in kernel.unknown()]
