"""Attention: each query takes the mean of the values, weighted by how well their keys match it.

    out = softmax(mask(scale * q k^T)) v                       Vaswani et al. 2017, arXiv:1706.03762

**Grouped queries** (Ainslie et al. 2023, arXiv:2305.13245): G = N/K query heads share one key/value head, so keys and
values take K/N of the memory and of the traffic. **Masks**: a query sees the keys at or before its own position
(causal), of its own document (segment ids: documents packed into one sequence do not see each other), and the last
`window` of them (sliding window). The masks are combined with *and*.

**Cost**, a layer of B sequences: 4*B*T*S*N*H FLOPs forward (half of it under a causal mask, if the empty half is
skipped; not here), twice that backward. The reference below holds the scores, 4*B*N*T*S bytes, which is what a kernel
that never writes them to memory saves. It returns the log-sum-exp of the scores as well: with it, attention over parts
of the keys can be merged into attention over all.

**Left out**: dropout, bias terms, and absolute masks given as arrays.
"""

import jax
import jax.numpy as jnp


def attention(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    *,
    causal: bool = True,
    window: int = 0,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    soft_cap: float = 0.0,
    q_offset: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Masked attention, the plain way: all scores at once, softmax in float32.

    Args:
      q_btnH, k_bskH, v_bskH: queries, keys and values; n a multiple of k.
      causal: a query sees no key after its own position.
      window: a query sees at most this many keys back, itself included (and, when not causal, as many ahead); 0 is all.
      segment_ids: (q_ids_bt, kv_ids_bs); a query sees only keys of its own segment.
      soft_cap: scores become cap * tanh(scores / cap); 0 is off.
      q_offset: position of the first query among the keys.

    Returns:
      out_btnH in the dtype of the values, and the log-sum-exp of the scores, lse_bnt in float32. A query that sees no
      key gets zeros, and -inf.
    """
    b, t, n, H = q_btnH.shape
    s, k = k_bskH.shape[1:3]
    q_btkGH = q_btnH.reshape(b, t, k, n // k, H)
    scores_bkGts = jnp.einsum("btkGH,bskH->bkGts", q_btkGH, k_bskH, preferred_element_type=jnp.float32) * H**-0.5
    if soft_cap:
        scores_bkGts = soft_cap * jnp.tanh(scores_bkGts / soft_cap)
    distance_ts = (jnp.arange(t) + q_offset)[:, None] - jnp.arange(s)[None, :]
    seen_ts = jnp.ones((t, s), bool)
    if causal:
        seen_ts &= distance_ts >= 0
    if window:
        seen_ts &= jnp.abs(distance_ts) < window
    seen_bkGts = seen_ts[None, None, None]
    if segment_ids is not None:
        q_ids_bt, kv_ids_bs = segment_ids
        seen_bkGts &= (q_ids_bt[:, :, None] == kv_ids_bs[:, None, :])[:, None, None]
    scores_bkGts = jnp.where(seen_bkGts, scores_bkGts, -jnp.inf)
    max_bkGt = jnp.max(scores_bkGts, -1)
    max_bkGt = jax.lax.stop_gradient(jnp.where(jnp.isfinite(max_bkGt), max_bkGt, 0.0))
    p_bkGts = jnp.exp(scores_bkGts - max_bkGt[..., None])
    sum_bkGt = jnp.sum(p_bkGts, -1)
    any_bkGt = sum_bkGt > 0  # false for a query that sees nothing
    safe_bkGt = jnp.where(any_bkGt, sum_bkGt, 1.0)
    p_bkGts = (p_bkGts / safe_bkGt[..., None]).astype(v_bskH.dtype)
    out_btkGH = jnp.einsum("bkGts,bskH->btkGH", p_bkGts, v_bskH)
    lse_bkGt = jnp.where(any_bkGt, max_bkGt + jnp.log(safe_bkGt), -jnp.inf)
    return out_btkGH.reshape(b, t, n, H).astype(v_bskH.dtype), lse_bkGt.reshape(b, n, t)
