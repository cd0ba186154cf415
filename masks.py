"""Masks: which keys a query sees, element by element and block by block.

**Formula.** A query at position q sees a key at position k of the same sequence if all of these hold:

    causal     k <= q, or k is in the prefix (k < prefix): a prefix is read in both directions (Raffel et al. 2019,
               arXiv:1910.10683, section 3.2.1)
    window     |q - k| < window: with `causal`, the query itself and the window-1 keys before it (Beltagy et al. 2020,
               arXiv:2004.05150)
    segments   both belong to one document, of those packed into the sequence

`visible` evaluates this for positions; a reference implementation needs no more.

**Blocks.** A kernel works on blocks of queries and keys, and must not compute blocks in which no query sees a key. For
each block of queries, `block_ranges` gives the blocks of keys to visit, and those that need no mask because every query
sees every key:

    keys        0         first     full_first        full_end      end        S
                |  unseen   |  masked   |      full       |   masked  |  unseen |

It also gives the blocks of queries that see each block of keys. Each mask alone gives such an interval, and so do
documents in the order of their ids. For ids in any other order the interval is wider than necessary: the result is
still correct, only slower.

**Cost.** Of n x n blocks a causal mask leaves n(n+1)/2, of which n are masked. A window of w keys leaves about
(w + block)/block blocks in a row, packed documents of d keys about d/block.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

UNSEEN = -1e30  # the score of an unseen key, and the log-sum-exp of a query that sees none; finite, so no NaN
TRUSTED = 2.0**96  # with max_logit: sums of exponentials in 1/TRUSTED..TRUSTED lose nothing in float32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("which", "prefix", "segments", "q_offset"),
    meta_fields=("causal", "window"),
)
@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. `causal` and `window` are static; the other fields may be traced.

    For flash.py `window` may be a tuple: a kernel is compiled for each, and `which` is the index of the one to run.
    """

    causal: bool = True  # only keys up to the query's own position, and those of the prefix
    window: int | tuple[int, ...] = 0  # only keys less than this far away; 0 is no window
    which: jax.Array | None = None
    prefix: jax.Array | int | None = None  # number of leading keys that all queries see, one or prefix_B
    segments: tuple[jax.Array, jax.Array] | None = None  # document ids of queries and of keys, (ids_BT, ids_BS)
    q_offset: jax.Array | int = 0  # position of the first query among the keys


class Scores(NamedTuple):
    """How the score of a query and a key is computed: s = scale * q . k, then soft_cap * tanh(s / soft_cap)."""

    scale: float | None = None  # None is H**-0.5
    soft_cap: float = 0.0  # 0 is off
    max_logit: float | None = None  # used in place of each row's largest score, after the cap
    largest: bool = False  # attention also returns the largest score of each row, which has no gradient

    def scale_for(self, H: int) -> float:
        return H**-0.5 if self.scale is None else self.scale


CAUSAL, SCORES = Mask(), Scores()  # the defaults


def mask_and_scores(**options) -> tuple[Mask, Scores]:
    """Returns the Mask and the Scores with these fields, for options of a command line."""
    scores = {name: options.pop(name) for name in Scores._fields if name in options}
    return Mask(**options), Scores(**scores)


def visible(q_positions: jax.Array, k_positions: jax.Array, mask: Mask) -> jax.Array:
    """Whether each query sees each key: bool, of the shape that positions, prefix and segments broadcast to.

    Args:
      q_positions, k_positions: in the sequence of the keys, from 0; of shapes that broadcast, as [T, 1] and [1, S].
      mask: `prefix` and `segments` have shapes that broadcast as the positions do; `q_offset` is not read.
    """
    causal, window, prefix, segments = mask.causal, mask.window, mask.prefix, mask.segments
    distance = q_positions - k_positions
    seen = distance == distance
    if causal:
        seen = distance >= 0 if prefix is None else (distance >= 0) | (k_positions < prefix)
    if window:
        seen = seen & (distance < window) & (distance > -window)
    if segments is not None:
        seen = seen & (segments[0] == segments[1])
    return seen


def visible_in_batch(T: int, S: int, mask: Mask, first: jax.Array | int = 0) -> jax.Array:
    """`visible` for T queries, the first of which is query `first`, and all S keys: bool [B, T, S] or [1, T, S]."""
    prefix, segments = mask.prefix, mask.segments
    mask = replace(
        mask,
        prefix=None if prefix is None else jnp.reshape(prefix, (-1, 1, 1)),
        segments=None if segments is None else (segments[0][:, :, None], segments[1][:, None, :]),
    )
    return visible(jnp.arange(T)[None, :, None] + (first + mask.q_offset), jnp.arange(S)[None, None, :], mask)


def block_ranges(lengths: tuple[int, int], blocks: tuple[int, int], mask: Mask) -> tuple[jax.Array, jax.Array]:
    """The blocks that a kernel has to visit: (key blocks of each query block, query blocks of each key block).

    Args:
      lengths: (T, S), the numbers of queries and of keys.
      blocks: (queries, keys) in a block. The last block may be shorter, and is then never full.
      mask: has one window.

    Returns:
      Two arrays of int32, [b, number of query blocks, 4] and [b, number of key blocks, 4]; b = 1 if all sequences have
      the same mask. The 4 are first, full_first, full_end, end, in blocks, with first <= full_first <= full_end <=
      end. Blocks in [full_first, full_end) need no mask. A block with nothing to visit has first = end.
    """
    causal, window, prefix, segments = mask.causal, mask.window, mask.prefix, mask.segments
    q_first, q_last, q_full = _edges(lengths[0], blocks[0])
    k_first, k_last, k_full = _edges(lengths[1], blocks[1])
    q_first, q_last, q_full = [a[None, :, None] for a in (q_first + mask.q_offset, q_last + mask.q_offset, q_full)]
    k_first, k_last, k_full = [a[None, None, :] for a in (k_first, k_last, k_full)]

    any_seen = (q_last >= q_first) & (k_last >= k_first)  # for each pair of blocks, [b, query blocks, key blocks]
    all_seen = q_full & k_full
    if causal:
        in_prefix = (lambda k: False) if prefix is None else (lambda k: k < jnp.reshape(prefix, (-1, 1, 1)))
        any_seen &= (k_first <= q_last) | in_prefix(k_first)
        all_seen &= (k_last <= q_first) | in_prefix(k_last)
    if window:
        any_seen &= (q_first - k_last < window) & (k_first - q_last < window)
        all_seen &= (q_last - k_first < window) & (k_last - q_first < window)
    if segments is not None:
        (q_low, q_high), (k_low, k_high) = [_extremes(ids, block) for ids, block in zip(segments, blocks, strict=True)]
        q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None, :], k_high[:, None, :]
        any_seen &= (q_low <= k_high) & (k_low <= q_high)
        all_seen &= (q_low == k_high) & (k_low == q_high)
    any_seen, all_seen = jnp.broadcast_arrays(any_seen, any_seen & all_seen)
    return _ranges(any_seen, all_seen), _ranges(any_seen.swapaxes(1, 2), all_seen.swapaxes(1, 2))


def _edges(length, block):
    first = jnp.arange(0, length, block)
    return first, jnp.minimum(first + block, length) - 1, first + block <= length


def _extremes(ids_BT, block):
    """The lowest and the highest id of each block, both [B, number of blocks]."""
    padding = ((0, 0), (0, -ids_BT.shape[1] % block))
    blocks = jnp.pad(ids_BT, padding, mode="edge").reshape(ids_BT.shape[0], -1, block)
    return blocks.min(-1), blocks.max(-1)


def _ranges(seen, full):
    """[..., n], [..., n] -> [..., 4]: the hull of the seen blocks, and the first run of full ones."""
    n = seen.shape[-1]
    first, end = _first(seen), n - _first(seen[..., ::-1])
    full_first = _first(full)
    full_end = _first(~full & (jnp.arange(n) >= full_first[..., None]))
    nothing, no_full = ~seen.any(-1), ~full.any(-1)
    first, end = jnp.where(nothing, 0, first), jnp.where(nothing, 0, end)
    full_first, full_end = jnp.where(no_full, first, full_first), jnp.where(no_full, first, full_end)
    return jnp.stack([first, full_first, full_end, end], -1).astype(jnp.int32)


def _first(flags):
    """The index of the first true flag, or n if there is none."""
    return jnp.where(flags.any(-1), jnp.argmax(flags, -1), flags.shape[-1])


def picture(seen: jax.Array, blocks: tuple[int, int]) -> str:
    """A mask [T, S] of bools as text, one character for each block: full '#', masked '+', unseen '.'."""
    rows = []
    for q in range(0, seen.shape[0], blocks[0]):
        tiles = [seen[q : q + blocks[0], k : k + blocks[1]] for k in range(0, seen.shape[1], blocks[1])]
        rows.append("".join("#" if tile.all() else "+" if tile.any() else "." for tile in tiles))
    return "\n".join(rows)


def main(length: int = 32, block: int = 4):
    """Prints four masks of one sequence, as blocks."""
    ids = (jnp.arange(length) // (length // 3))[None]
    masks = {
        "causal": Mask(),
        "prefix": Mask(prefix=length // 3),
        "window": Mask(window=length // 4),
        "documents": Mask(segments=(ids, ids)),
    }
    pictures = []
    for mask in masks.values():
        seen = visible_in_batch(length, length, mask)[0]
        pictures.append(picture(seen, (block, block)).splitlines())
    print("  ".join(f"{name:{length // block + 2}}" for name in masks))
    for rows in zip(*pictures, strict=True):
        print("  ".join(f"{row:{length // block + 2}}" for row in rows))
    print("\n# every query sees every key   + masked   . not visited")
    for name, mask in masks.items():
        ranges, _ = block_ranges((length, length), (block, block), mask)
        visited, full = (ranges[0, :, 3] - ranges[0, :, 0]).sum(), (ranges[0, :, 2] - ranges[0, :, 1]).sum()
        print(f"{name:10} {visited:3} of {(length // block) ** 2} blocks visited, {full} of them without a mask")


if __name__ == "__main__":
    import command

    command.demonstrate(main, __file__)
