"""Block ranges against the masks, element by element."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masks

ORDERED = np.array([[0] * 5 + [1] * 9 + [2] * 2 + [3] * 8, [4] * 24])
SHUFFLED = np.random.default_rng(0).integers(0, 4, (2, 24))

MASKS = {
    "all": dict(causal=False),
    "causal": dict(causal=True),
    "window": dict(causal=True, window=5),
    "window 1": dict(causal=True, window=1),
    "symmetric window": dict(causal=False, window=4),
    "prefix": dict(causal=True, prefix=7),
    "prefix of each": dict(causal=True, prefix=np.array([3, 20])),
    "prefix and window": dict(causal=True, prefix=9, window=6),
    "documents": dict(causal=True, segments=ORDERED),
    "documents, both ways": dict(causal=False, segments=ORDERED),
    "documents and window": dict(causal=True, window=3, segments=ORDERED),
    "documents in no order": dict(causal=True, segments=SHUFFLED),
}


def elementwise(t, s, q_offset, causal, window=0, prefix=None, segments=None):
    """The mask, bool [2, t, s], from comparisons in Python."""
    seen = np.zeros((2, t, s), bool)
    for b, q, k in np.ndindex(2, t, s):
        position, length = q + q_offset, 0 if prefix is None else np.broadcast_to(prefix, 2)[b]
        ok = not causal or k <= position or k < length
        ok = ok and (not window or abs(position - k) < window)
        seen[b, q, k] = ok and (segments is None or segments[b, q] == segments[b, k])
    return seen


SHAPES = [(24, 24, -7), (10, 24, 3), (24, 10, 5)]  # T, S, q_offset


def in_batch(mask, t, s):
    ids = mask.get("segments")
    return mask if ids is None else mask | dict(segments=(jnp.array(ids[:, :t]), jnp.array(ids[:, :s])))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_visible_equals_the_mask(mask):
    t, s, q_offset = 10, 24, 3
    segments = in_batch(mask, t, s).get("segments")
    keywords = mask | ({} if segments is None else dict(segments=(segments[0][:, :, None], segments[1][:, None])))
    keywords |= {} if "prefix" not in mask else dict(prefix=np.reshape(mask["prefix"], (-1, 1, 1)))
    seen = masks.visible(np.arange(t)[None, :, None] + q_offset, np.arange(s)[None, None], masks.Mask(**keywords))
    expected = elementwise(t, s, q_offset, **mask)
    np.testing.assert_array_equal(np.broadcast_to(seen, expected.shape), expected)
    assert expected.any() and (not expected.all() or mask == MASKS["all"])


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("blocks", [(8, 8), (7, 5)])
def test_ranges_cover_what_is_seen_and_full_ones_need_no_mask(mask, blocks):
    """Where the mask gives intervals, the ranges are no wider than the blocks with a seen element."""
    for t, s, q_offset in SHAPES:
        seen = elementwise(t, s, q_offset, **mask)
        batch_mask = masks.Mask(q_offset=q_offset, **in_batch(mask, t, s))
        ranges = jax.jit(partial(masks.block_ranges, (t, s), blocks, batch_mask))()
        both_ways = (seen, blocks, (t, s)), (seen.swapaxes(1, 2), blocks[::-1], (s, t))
        for (matrix, (block, other), lengths), block_range in zip(both_ways, ranges, strict=True):
            block_range = np.broadcast_to(block_range, (2, *block_range.shape[1:]))
            assert block_range.shape == (2, -(-lengths[0] // block), 4)
            for b, i in np.ndindex(block_range.shape[:2]):
                first, full_first, full_end, end = block_range[b, i]
                rows = matrix[b, i * block : (i + 1) * block]
                tiles = [rows[:, j : j + other] for j in range(0, lengths[1], other)]
                full = [tile.all() and tile.shape == (block, other) for tile in tiles]
                assert 0 <= first <= full_first <= full_end <= end <= len(tiles)
                assert all(full[full_first:full_end])
                assert not any(tile.any() for tile in tiles[:first] + tiles[end:])
                if mask.get("segments") is not SHUFFLED and "window" not in mask:
                    assert full_end - full_first == sum(full)
                exact = mask.get("segments") is None and "prefix" not in mask
                if exact and end > first:
                    assert tiles[first].any() and tiles[end - 1].any()
                if exact and not any(tile.any() for tile in tiles):
                    assert first == end


@pytest.mark.slow
def test_a_mask_that_all_sequences_share_has_one_set_of_ranges():
    by_query, by_key = masks.block_ranges((24, 16), (4, 8), masks.Mask())
    assert by_query.shape == (1, 6, 4) and by_key.shape == (1, 2, 4)
    assert by_query.dtype == by_key.dtype == jnp.int32


@pytest.mark.slow
def test_the_offset_may_be_traced():
    """The position of a device's first query depends on the device."""
    f = lambda q_offset: masks.block_ranges((8, 32), (4, 4), masks.Mask(window=6, q_offset=q_offset))
    for q_offset in (0, 5, 24):
        for traced, known in zip(jax.jit(f)(q_offset), f(q_offset), strict=True):
            np.testing.assert_array_equal(traced, known)


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, 32])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_blocks_visited(n, window):
    """A causal mask leaves n(n+1)/2 blocks, n of them masked; a window of w blocks leaves w+1 from the w-th row on."""
    visited = lambda r: (int((r[..., 3] - r[..., 0]).sum()), int((r[..., 2] - r[..., 1]).sum()))
    length, block = 16 * n, 16
    by_query, by_key = masks.block_ranges((length, length), (block, block), masks.Mask())
    assert visited(by_query) == visited(by_key) == (n * (n + 1) // 2, n * (n - 1) // 2)
    by_query, _ = masks.block_ranges((length, length), (block, block), masks.Mask(window=window * block))
    assert visited(by_query)[0] == sum(min(i, window) + 1 for i in range(n))


@pytest.mark.slow
def test_the_demonstration(capsys):
    masks.main()
    printed = capsys.readouterr().out
    assert "causal      36 of 64 blocks visited, 28 of them without a mask" in printed
    assert printed.splitlines()[8].startswith("#######+")
