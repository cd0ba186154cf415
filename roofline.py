"""What a step must cost, by arithmetic alone: FLOPs and the peak that divides them. No jax in here.

Model FLOPs per token (the numerator of MFU, "model FLOPs utilisation", Chowdhery et al. 2022, PaLM, appendix B):

    6 x matmul parameters      2 for the forward multiply-add, 4 for the two backward matmuls; the unembedding counts,
                               the embedding look-up does not (it multiplies nothing)
    12 x N x H x keys          for each layer: QK^T and PV are 4*N*H*keys forward, twice that backward; `keys` is the
                               mean number of keys that a query sees: (T+1)/2 under a causal mask, written T/2 as the
                               published TPU7x figures do

Recomputation is not counted: a step that recomputes does more work than this, at the same MFU numerator.
"""

# Dense bf16 peak of one JAX device, in FLOP/s, by jax.Device.device_kind. A TPU7x chip (2307e12) shows as two devices.
# Source: the Google Cloud TPU pages of each generation, read November 2026.
PEAK_BF16_FLOPS_PER_DEVICE = {
    "TPU7x": 2307e12 / 2,
    "TPU v6 lite": 918e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v4": 275e12,
}


def mean_keys_per_query(seq_len: int, window: int = 0) -> float:
    """Keys that a query attends to on average under a causal mask, with an optional sliding window (0: none)."""
    if not window or window >= seq_len:
        return seq_len / 2
    return window - window * window / (2 * seq_len)  # the first `window` queries see fewer


def train_flops_per_token(
    *,
    num_layers: int,
    model_dim: int,
    ff_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    seq_len: int,
    window: int = 0,
    global_every: int = 0,
) -> float:
    """Model FLOPs of one training step, forward and backward, divided by its tokens. Dense transformer."""
    attention_params = model_dim * head_dim * (2 * num_heads + 2 * num_kv_heads)
    mlp_params = 3 * model_dim * ff_dim
    matmul_params = num_layers * (attention_params + mlp_params) + model_dim * vocab_size
    num_global = num_layers // global_every if global_every else (0 if window else num_layers)
    keys = num_global * mean_keys_per_query(seq_len)
    keys += (num_layers - num_global) * mean_keys_per_query(seq_len, window)
    return 6 * matmul_params + 12 * num_heads * head_dim * keys
