"""Attention: each query takes the mean of the values, weighted by how well their keys match it.

    out = softmax(mask(scale * q k^T)) v                       Vaswani et al. 2017, arXiv:1706.03762

**Grouped queries** (Ainslie et al. 2023, arXiv:2305.13245). G = N/K query heads share one key/value head, so keys and
values take K/N of the memory and of the traffic.

**Masks** (masks.py). Causal, with a prefix that all queries see; a sliding window; packed documents. All must hold.

**Sinks** (Xiao et al. 2023, arXiv:2309.17453; learned in gpt-oss). Each head has one more logit, which is part of the
softmax and has no value. A query that matches no key can put its weight there.

**Cost** of a layer with B sequences: 4*B*T*S*N*H FLOPs forward and twice that backward. Under a causal mask half of the
scores are empty; `causal_attention` skips 3/4 of that half. `attention` holds all scores, 4*B*N*T*S bytes, which a
kernel that never writes them to memory saves (flash.py). It also returns the log-sum-exp of the scores: with it,
attention over parts of the keys can be merged into attention over all.

**Left out.** Dropout, biases, and absolute masks given as arrays.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from masks import CAUSAL, SCORES, TRUSTED, UNSEEN, Mask, Scores, visible_in_batch

WORTH_SPLITTING = 256  # queries: with fewer, four times the operations take longer to compile than the run saves


def attention(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskV: jax.Array,
    mask: Mask = CAUSAL,
    scores: Scores = SCORES,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Masked attention by its definition: all scores at once, softmax in float32.

    Args:
      q_btnH, k_bskH, v_bskV: queries, keys and values; n is a multiple of k.
      mask: which keys a query sees; it has one window.
      scores: if `max_logit` is too far from a row's largest score, the row's output is NaN, its log-sum-exp is inf (too
        low) or -inf (too high), and it sends no gradient back.
      sinks: sinks_n, a logit in the denominator of each head's softmax.

    Returns:
      out_btnV in the dtype of the values, and lse_bnt, the log-sum-exp of the scores in float32. A query that sees no
      key gets zeros and `masks.UNSEEN` (with sinks, its sink). With `scores.largest` also the largest score, like lse.
    """
    b, t, n, H = q_btnH.shape
    s, k, V = v_bskV.shape[1:]
    # The G*t queries of a kv head are rows r, so that gradients sum over one dim (see tensor.matmul).
    q_bkrH = q_btnH.reshape(b, t, k, n // k, H).transpose(0, 2, 3, 1, 4).reshape(b, k, -1, H)
    scores_bkrs = jnp.einsum("bkrH,bskH->bkrs", q_bkrH, k_bskH, preferred_element_type=jnp.float32)
    scores_bkGts = (scores_bkrs * scores.scale_for(H)).reshape(b, k, n // k, t, s)
    if scores.soft_cap:
        scores_bkGts = scores.soft_cap * jnp.tanh(scores_bkGts / scores.soft_cap)
    seen_bkGts = visible_in_batch(t, s, mask)[:, None, None]
    sinks_kG1 = None if sinks is None else sinks.reshape(k, n // k, 1).astype(jnp.float32)
    p_bkGts, lse_bkGt, off_bkGt = _softmax(scores_bkGts, seen_bkGts, scores.max_logit, sinks_kG1)
    out_bkrV = jnp.einsum("bkrs,bskV->bkrV", p_bkGts.astype(v_bskV.dtype).reshape(b, k, -1, s), v_bskV)
    out_btkGV = out_bkrV.reshape(b, k, n // k, t, V).transpose(0, 3, 1, 2, 4)
    if off_bkGt is not None:
        out_btkGV = jnp.where(jnp.moveaxis(off_bkGt, 3, 1)[..., None], jnp.nan, out_btkGV)
    results = out_btkGV.reshape(b, t, n, V).astype(v_bskV.dtype), lse_bkGt.reshape(b, n, t)
    if not scores.largest:
        return results
    largest_bkGt = lax.stop_gradient(jnp.max(scores_bkGts, -1, initial=UNSEEN, where=seen_bkGts))
    return *results, largest_bkGt.reshape(b, n, t)


def _softmax(scores_bkGts, seen_bkGts, max_logit, sinks_kG1):
    """(probabilities, log-sum-exp, rows for which max_logit is too far off, or None), from the scores of seen keys."""
    off_bkGt = None
    scores_bkGts = jnp.where(seen_bkGts, scores_bkGts, UNSEEN)
    if max_logit is None:
        max_bkGt = lax.stop_gradient(jnp.max(scores_bkGts, -1))
    else:
        known_bkGt = lax.stop_gradient(_log_sum_exp(scores_bkGts, seen_bkGts, max_logit))
        off_bkGt = jnp.isinf(known_bkGt)
        max_bkGt = jnp.where(off_bkGt, jnp.inf, known_bkGt)  # exp(score - inf) = 0: such rows send back no gradient
    if sinks_kG1 is not None:
        max_bkGt = jnp.maximum(max_bkGt, lax.stop_gradient(sinks_kG1))
    p_bkGts = jnp.where(seen_bkGts, jnp.exp(scores_bkGts - max_bkGt[..., None]), 0.0)
    sum_bkGt = jnp.sum(p_bkGts, -1)
    if sinks_kG1 is not None:
        sum_bkGt += jnp.exp(sinks_kG1 - max_bkGt)
    any_bkGt = sum_bkGt > 0  # false for a query that sees no key
    safe_bkGt = jnp.where(any_bkGt, sum_bkGt, 1.0)
    lse_bkGt = jnp.where(any_bkGt, max_bkGt + jnp.log(safe_bkGt), UNSEEN)
    if off_bkGt is not None:
        lse_bkGt = jnp.where(off_bkGt, known_bkGt, lse_bkGt)
    return p_bkGts / safe_bkGt[..., None], lse_bkGt, off_bkGt


def _log_sum_exp(scores_bkGts, seen_bkGts, max_logit):
    """The log-sum-exp of each row, from the sum of exp(score - max_logit): +-inf where that sum cannot be trusted.

    The softmax above takes its exponentials relative to this, as flash_backward.py does: in the derivative of a sum of
    2^90 its square would overflow.
    """
    sum_bkGt = jnp.sum(jnp.exp(scores_bkGts - max_logit), -1)  # an unseen key adds 0
    lse_bkGt = max_logit + jnp.log(sum_bkGt)
    lse_bkGt = jnp.where(sum_bkGt > TRUSTED, jnp.inf, jnp.where(sum_bkGt < 1 / TRUSTED, -jnp.inf, lse_bkGt))
    return jnp.where(seen_bkGts.any(-1), lse_bkGt, UNSEEN)


def causal_attention(
    q_btnH: jax.Array,
    k_btkH: jax.Array,
    v_btkV: jax.Array,
    mask: Mask = CAUSAL,
    scores: Scores = SCORES,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Causal `attention` among the same positions: each quarter of the queries attends to the quarters that it may see.

    This leaves out 3/8 of the scores, and more with a window. Fewer queries than `WORTH_SPLITTING`, or a number that 4
    does not divide, attend all at once. Keys are split once and joined for each quarter, so that their gradients are
    sums of slices. With a slice for each quarter they would be sums of arrays that are mostly zeros.

    Args: as of `attention`. The mask is causal, without a prefix and without an offset.
    """
    t, window, segments = q_btnH.shape[1], mask.window, mask.segments
    if t < WORTH_SPLITTING or t % 4:
        return attention(q_btnH, k_btkH, v_btkV, mask, scores, sinks)
    # Without this barrier RoPE, which produces the keys, is fused into each quarter and recomputed there.
    q_btnH, k_btkH, v_btkV = lax.optimization_barrier((q_btnH, k_btkH, v_btkV))
    q_parts, k_parts, v_parts = [jnp.split(x, 4, 1) for x in (q_btnH, k_btkH, v_btkV)]
    size, results = t // 4, []
    for i in range(4):
        first = max(0, i * size - window + 1) // size if window else 0  # the first quarter that a query may see
        k_bskH, v_bskV = [jnp.concatenate(x[first : i + 1], 1) for x in (k_parts, v_parts)]
        queries, keys = slice(i * size, (i + 1) * size), slice(first * size, (i + 1) * size)
        ids = None if segments is None else (segments[0][:, queries], segments[1][:, keys])
        some = replace(mask, segments=ids, q_offset=queries.start - keys.start)
        results.append(attention(q_parts[i], k_bskH, v_bskV, some, scores, sinks))
    return tuple(jnp.concatenate(parts, 1 if parts[0].ndim == 4 else 2) for parts in zip(*results, strict=True))


def attention_in_chunks(
    q_btnH: jax.Array, k_bskH: jax.Array, v_bskV: jax.Array, mask: Mask = CAUSAL, scores: Scores = SCORES, *, chunk: int
) -> tuple[jax.Array, ...]:
    """`attention` for a chunk of queries at a time, t's largest divisor <= chunk, so that few scores exist at once.

    `jax.grad` of this function would save the scores of all chunks; `attention_gradients` does not.
    """

    def one_chunk(x):
        start, q_bcnH, ids_bc = x
        segments = None if ids_bc is None else (ids_bc, mask.segments[1])
        some = replace(mask, segments=segments, q_offset=mask.q_offset + start)
        return attention(q_bcnH, k_bskH, v_bskV, some, scores)

    chunks = _chunks(chunk, q_btnH, None if mask.segments is None else mask.segments[0])
    out_cbtnV, *of_rows = lax.map(one_chunk, chunks)
    return _join(out_cbtnV, 1), *(_join(x, 2) for x in of_rows)


def attention_gradients(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskV: jax.Array,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
    mask: Mask = CAUSAL,
    scores: Scores = SCORES,
    *,
    chunk: int,
) -> list[jax.Array]:
    """[dq_btnH, dk_bskH, dv_bskV] in float32, from the log-sum-exp, by the formulas of flash_backward.py.

    Args:
      q_btnH, k_bskH, v_bskV, mask, scores: as for `attention`.
      results, cotangents: (out_btnV, lse_bnt) of `attention`, and the gradients of both. If the results are those of
        attention over more keys, these keys' share of the gradients is returned.
      chunk: as for `attention_in_chunks`.
    """
    (out_btnV, lse_bnt), (dout_btnV, dlse_bnt) = results, cotangents
    n, s, k, soft_cap = q_btnH.shape[2], *k_bskH.shape[1:3], scores.soft_cap
    scale = scores.scale_for(q_btnH.shape[3])
    k_bskH, v_bskV = k_bskH.astype(jnp.float32), v_bskV.astype(jnp.float32)
    grouped = lambda x: x.reshape(*x.shape[:2], k, n // k, *x.shape[3:]).astype(jnp.float32)
    q_btkGH, out_btkGV, dout_btkGV = grouped(q_btnH), grouped(out_btnV), grouped(dout_btnV)
    lse_btkG, dlse_btkG = [grouped(x.swapaxes(1, 2)) for x in (lse_bnt, dlse_bnt)]
    di_btkG = jnp.sum(out_btkGV * dout_btkGV, -1) - dlse_btkG
    di_btkG = jnp.where(lse_btkG == jnp.inf, 0.0, di_btkG)  # this row is NaN, and exp(score - inf) = 0: no gradient

    def one_chunk(dkv, x):
        start, q_bckGH, dout_bckGV, lse_bckG, di_bckG, ids_bc = x
        scores_bckGs = jnp.einsum("bckGH,bskH->bckGs", q_bckGH, k_bskH) * scale
        slope = scale
        if soft_cap:
            tanh_bckGs = jnp.tanh(scores_bckGs / soft_cap)
            scores_bckGs, slope = soft_cap * tanh_bckGs, scale * (1 - tanh_bckGs**2)
        some = mask if ids_bc is None else replace(mask, segments=(ids_bc, mask.segments[1]))
        seen_bcs = visible_in_batch(q_bckGH.shape[1], s, some, start)
        p_bckGs = jnp.where(seen_bcs[:, :, None, None], jnp.exp(scores_bckGs - lse_bckG[..., None]), 0.0)
        dp_bckGs = jnp.einsum("bckGV,bskV->bckGs", dout_bckGV, v_bskV)
        ds_bckGs = p_bckGs * (dp_bckGs - di_bckG[..., None]) * slope
        dq_bckGH = jnp.einsum("bckGs,bskH->bckGH", ds_bckGs, k_bskH)
        dk_bskH = dkv[0] + jnp.einsum("bckGs,bckGH->bskH", ds_bckGs, q_bckGH)
        dv_bskV = dkv[1] + jnp.einsum("bckGs,bckGV->bskV", p_bckGs, dout_bckGV)
        return (dk_bskH, dv_bskV), dq_bckGH

    zeros = jnp.zeros_like(k_bskH), jnp.zeros_like(v_bskV)
    chunks = _chunks(chunk, q_btkGH, dout_btkGV, lse_btkG, di_btkG, None if mask.segments is None else mask.segments[0])
    dkv, dq_bckGH = lax.scan(one_chunk, zeros, chunks)
    return [_join(dq_bckGH, 1).reshape(q_btnH.shape), *dkv]


def _chunks(most, *arrays):
    """The start of each chunk, and the chunks of each array [b, t, ...] or None, stacked."""
    t = arrays[0].shape[1]
    size = max(size for size in range(1, min(most, t) + 1) if t % size == 0)
    split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)
    return jnp.arange(0, t, size), *(None if x is None else split(x) for x in arrays)


def _join(chunks, dim):
    """Joins stacked chunks into one array along `dim`."""
    x = jnp.moveaxis(chunks, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
