"""FLOPs against published figures, against counting by hand, and against the parameters of the model."""

import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import model
import roofline
from config import PRESETS, from_preset

SHAPE = "num_layers model_dim ff_dim num_heads num_kv_heads head_dim vocab_size seq_len window global_every".split()


def flops(preset: str, **overrides) -> float:
    config = from_preset(preset, **overrides)
    return roofline.train_flops_per_token(**{name: getattr(config, name) for name in SHAPE})


def test_llama_70b_as_published():
    """The FLOPs behind the TFLOP/s of the published TPU7x recipe: MaxText's formula, half of the attention's square."""
    assert flops("llama3.1-70b", seq_len=8192) == 449_222_541_312


def test_by_hand():
    """2 layers, D=3, F=5, N=4, K=2, H=2, V=7, T=6: each matmul of a token, forward; twice that backward."""
    q, k, v, o = 2 * 3 * (4 * 2), 2 * 3 * (2 * 2), 2 * 3 * (2 * 2), 2 * (4 * 2) * 3
    gate, up, down = 2 * 3 * 5, 2 * 3 * 5, 2 * 5 * 3
    keys = 6 / 2  # on average, under the causal mask
    scores, mix = 2 * 4 * 2 * keys, 2 * 4 * 2 * keys
    unembed = 2 * 3 * 7
    forward = 2 * (q + k + v + o + gate + up + down + scores + mix) + unembed
    found = roofline.train_flops_per_token(
        num_layers=2, model_dim=3, ff_dim=5, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=7, seq_len=6
    )
    assert found == 3 * forward


@pytest.mark.parametrize("preset", PRESETS)
def test_six_flops_a_matmul_parameter_and_twelve_a_key(preset):
    config = from_preset(preset, window=0, global_every=0)
    shapes, is_matrix = model.param_shapes(config), model.is_matrix(config)
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(is_matrix), strict=True)
    in_matmuls = sum(math.prod(leaf.shape) for leaf, matrix in pairs if matrix)
    in_matmuls -= 0 if config.tied_embeddings else math.prod(shapes.embed.shape)  # looked up, not multiplied
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * config.seq_len / 2
    assert flops(preset, window=0, global_every=0) == 6 * in_matmuls + attention


# -- windows


@pytest.mark.parametrize("seq_len, window", [(8, 0), (8, 1), (8, 3), (8, 8), (8, 100), (100, 7), (1000, 999)])
def test_keys_per_query(seq_len, window):
    """The mask's cells, each on the diagonal by half (which makes (T+1)/2 the T/2 of the published figures)."""
    whole = [min(i + 1, window or seq_len) for i in range(seq_len)]
    halved = [min(i + 0.5, window or seq_len) for i in range(seq_len)]
    found = roofline.mean_keys_per_query(seq_len, window)
    assert found == pytest.approx(sum(halved) / seq_len, rel=1e-12)
    assert 0 < sum(whole) / seq_len - found <= 0.5


def test_a_window_counts_in_the_local_layers_only():
    """Of 10 layers with global_every=3 the layers 3, 6 and 9 attend to everything."""
    tiny = lambda **window: flops("tiny", num_layers=10, seq_len=64, **window)
    a_key = 12 * 8 * 24  # N = 8, H = 24
    everywhere, local = 32, 16 - 16 * 16 / (2 * 64)
    without_attention = tiny() - 10 * a_key * everywhere
    assert tiny(window=16) == without_attention + 10 * a_key * local
    assert tiny(window=16, global_every=3) == without_attention + a_key * (3 * everywhere + 7 * local)
    assert tiny(window=16, global_every=1) == tiny()
    assert tiny(window=16, global_every=11) == tiny(window=16)
    assert tiny(window=64) == tiny(window=1000) == tiny()


# -- peaks


def test_peaks():
    """A TPU7x chip has 2307 TFLOP/s and shows as two devices; all are published figures of one device."""
    peaks = roofline.PEAK_BF16_FLOPS_PER_DEVICE
    assert peaks["TPU7x"] == 1153.5e12
    published = {"TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU7x": 1153.5}
    assert {kind: flops_per_s / 1e12 for kind, flops_per_s in peaks.items()} == published
    assert "cpu" not in peaks


def test_needs_no_jax():
    code = "import sys, roofline; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(roofline.__file__).parent, check=True)
