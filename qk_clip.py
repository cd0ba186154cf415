"""QK-clip: query and key weights are scaled down for heads whose largest attention score exceeds a limit.

**Idea** (Kimi K2, arXiv:2507.20534, section 2.1). With Muon, attention scores of some heads grow without bound. A norm
of queries and keys would stop that, but latent attention never has its keys in full when it generates text. QK-clip
changes the weights instead, after the optimizer's update, and nothing in the forward pass.

**Formula.** For each head, from the scores s = scale * q . k that the forward pass of the step has seen:

    g = min(1, qk_clip / max s)
    w_q = sqrt(g) w_q, w_k = sqrt(g) w_k        a head with keys of its own
    w_q = g w_q                                 heads that share keys, or whose keys are the values
    latent attention: sqrt(g) for the dims of queries and keys without RoPE, and g for those of queries with RoPE, as
    their keys are shared by all heads

The same batch then has scores of at most `qk_clip` in the first layer whose scores exceeded it. Biases of queries and
keys are scaled as the weights.

**Layout.** A device has maxima of its own heads, largest_Ln. The largest of all devices' batches is an all-reduce of
L * N numbers.

**Cost.** The flash kernel has the running maximum of each query, and writes it beside the log-sum-exp: 4 bytes a query
and head. `attention.py` computes it from the scores.

**Left out.** Queries and keys with norms, and scores with a soft cap, need no clip. With `max_logit` the kernel has no
maximum.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import anatomy
import decoder
import placement
import sharding
from config import Config
from parameters import Layers, Params


def options(config: Config) -> dict:
    """The options of model.loss_fn with which it reports `max_logits`: zeros, and attention that fills them in."""
    if not config.qk_clip:
        return {}
    rows = config.num_layers + anatomy.runs_mtp(config)
    zeros_Ln = jnp.zeros((rows, config.num_heads // lax.axis_size("tensor")))
    return dict(attend_with=attend, carried=(lax.pcast(zeros_Ln, placement.MESH_AXES, to="varying"),))


def attend(number, w: Layers, h_btd, constants, is_global, config: Config, largest_Ln):
    """decoder.self_attention that also notes the largest score of each of this device's heads in row `number`."""
    context_btnU, largest_bnt = decoder.self_attention(w, h_btd, constants, is_global, config, largest=True)
    return context_btnU, largest_Ln.at[number].set(lax.stop_gradient(jnp.max(largest_bnt, (0, 2))))


def summed(shares_M):
    """A device's (loss, metrics) of several microbatches as one: sums, and for `max_logits` the maximum."""
    loss_M, metrics_M = shares_M
    reduce = lambda name, a: jnp.max(a, 0) if name == "max_logits" else jnp.sum(a, 0)
    return jnp.sum(loss_M), {name: reduce(name, a) for name, a in metrics_M.items()}


def over_devices(shares):
    """(loss, metrics) of all devices from those of each: sums, and `max_logits` as the maxima of all heads [L, N].

    Of a pipeline only the last stage has maxima, those of all layers; the others have zeros.
    """
    loss, metrics = shares
    largest = {name: metrics[name] for name in metrics if name == "max_logits"}
    rest = {name: a for name, a in metrics.items() if name not in largest}
    loss, metrics = lax.psum((loss, rest), sharding.LOSS_AXES)
    largest = jax.tree.map(lambda a: lax.pmax(a, sharding.LOSS_AXES), largest)
    gather = lambda a: lax.all_gather(a, "tensor", axis=1, tiled=True, to="invarying")
    return loss, metrics | jax.tree.map(gather, largest)


def clip(params: Params, max_logits: jax.Array, accept: jax.Array, config: Config) -> Params:
    """The parameters after QK-clip; unchanged if not `accept`. Global arrays.

    Args:
      max_logits: the largest score of each head of each layer that runs, [L, N]; the last is that of multi-token
        prediction, unless its loss has the weight 0.
    """
    gain_LN = jnp.where(accept & (max_logits > config.qk_clip), config.qk_clip / max_logits, 1.0)
    stacks = set(anatomy.layer_stacks(config)) - (set() if anatomy.runs_mtp(config) else {"mtp_layers"})
    gains = {stack: gain_LN[np.array(anatomy.layer_numbers(config, stack))] for stack in stacks}
    clipped = {
        stack: clip_layers(getattr(params, stack), gain, anatomy.stack_config(config, stack))
        for stack, gain in gains.items()
    }
    return dataclasses.replace(params, **clipped)


def clip_layers(layers: Layers, gain_LN: jax.Array, config: Config) -> Layers:
    """A stack of layers with the gain of each head's scores in its queries and keys."""
    gain, root = gain_LN[:, None, :, None], jnp.sqrt(gain_LN)[:, None, :, None]
    if config.kv_lora_rank:
        query = "w_q_up" if config.q_lora_rank else "w_q"
        of_dim_H = jnp.concatenate([jnp.repeat(root, config.head_dim, 3), jnp.repeat(gain, config.rope_head_dim, 3)], 3)
        factors = {query: of_dim_H, "w_k_up": root}
    elif config.num_heads != config.num_kv_heads or config.keys_as_values:
        factors = {"w_q": gain, "bias_q": gain[:, 0]}
    else:
        factors = {"w_q": root, "w_k": root, "bias_q": root[:, 0], "bias_k": root[:, 0]}
    weights = {name: getattr(layers, name) for name in factors}
    return dataclasses.replace(layers, **{name: w * factors[name] for name, w in weights.items() if w is not None})
