"""Rematerialisation: which activations are saved for the backward pass, recomputed in it, or offloaded to the host.

    python roofline.py remat --preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --seq_len=8192       every policy, predicted

**Idea.** The backward pass of a matmul y = x w needs x again. So either the activations of all layers are in memory
when the backward pass begins, or they are recomputed from something that is. Chen et al. 2016 (arXiv:1604.06174,
section 4) save the inputs of segments, and recompute each segment when the backward pass reaches it. The memory is that
of all inputs and one segment. The layers of a decoder are such segments. With D numbers a token saved of each, the
memory is L inputs and one full layer; the price is another forward pass, at most a third of the training FLOPs.

**Selective** recomputation (Korthikanti et al. 2022, arXiv:2205.05198, section 5): activations differ in the FLOPs that
a saved byte avoids. Attention's scores are the most bytes for the fewest FLOPs, and a fused kernel recomputes them
anyway, from the log-sum-exp that it saves. For the rest, a policy is a set of names. `named` tags a tensor of the
layer, and `policy` says to `jax.checkpoint` which names to save. The tables are in anatomy.py: `activations` has the
elements a token of each name, `POLICIES` the sets. For D = NH, elements a token and layer, with MaxText's names:

    full                                D                     recomputed: all matmuls but the one that ends a layer
    save_qkv_proj                       D + (N+2K)H           ... but q, k, v
    save_dot_except_mlp                 2D + (N+2K)H          ... and o
    save_dot_with_context_except_mlp    2D + (2N+2K)H + N     ... and attention itself
    minimal_with_context                the same + 2F         nothing

What the router of a mixture chose, and the order of the rows, has the name `routing`: 20 bytes a (token, choice) pair
with dropless experts on one device. Every policy saves it (without: --remat=custom --remat_tensors=routing:remat). To
choose and sort again is 1% of the work of a step of Qwen3 235B.

A name takes memory only if the backward pass reads the tensor. It does not read the results that end a sub-layer, only
their sum with the residual stream. Elementwise results (norms, rotations, SwiGLU) have names too, but only the policy
`custom` saves them: fused with what reads them, they are recomputed almost for free. `none` is plain differentiation,
which saves those as well: twice the bytes of all names, for no gain in time (`workload.PLAIN`).

**Cost** of a byte. A matmul that contracts D computes its result at D FLOPs a byte in bfloat16 (2*D FLOPs, 2 bytes).
With C FLOP/s reached by a device, W_hbm bytes/s of its memory and W_host of the link to its host:

    recompute            D / C
    save in HBM          2 / W_hbm       written once, read once; faster from D = 2 * C / W_hbm on
    offload to the host  2 / W_host      out and in; faster from D = 2 * C / W_host on, unless it hides

On a TPU7x device (C = 956e12 with `--xla_flags=recommended`, W_hbm = 3.2e12, of what programs reach; W_host = 16e9,
assumed: the figure of other chips) that is D = 600 and D = 120,000. So the results of matmuls are saved in HBM as far
as they fit, and are never worth a transfer that something waits for.

**Offload** moves a tensor to the host during the forward pass and back during the backward pass. In the programs of
libtpu about as much of it hides as attention's kernel takes. So it hides, each way, if attention takes as long. With n
elements a token of a layer in bfloat16, T causal tokens, and attention at C_a = 498e12 FLOP/s forward:

    2*n / W_host  <  2*T*D / C_a        <=>    T * D / n  >  C_a / W_host = 31,000

A layer's input, n = D, hides in sequences of 31,000 tokens; query, key and value of Llama 3.1 70B in those of 39,000.
For all that `minimal_offloaded` moves of that model, MLP included, the step waits up to sequences of 288,000. Of a
layer's input a share may go to the host, as much as hides or as the device lacks: decoder_layer_input:offload:0.5.

**On TPU7x** (compiled, 70B). At 8k attention's kernel takes 0.9 s. Of 12.4 s of transfers of `minimal_offloaded` the
step waits for 10.9; of 1.7 s of q, k, v for 0.9. At 128k the kernel takes 24 s, and of 3.4 s the step waits for 0.3. To
overlap a layer's transfers with the next layer, libtpu peels an iteration off each loop. If a device has one sequence,
that iteration may need the stack of the layers' inputs in another layout: a second stack of 10 GiB for 70B at 8k on 128
devices (predicted/workload.py predicts where). --xla_flags=xla_tpu_pipeline_memory_host_transfers=false disables both.
`python aot.py results offloaded` has steps of both kinds.

**Memory.** Whether a step fits and how long it takes is a prediction (`python roofline.py remat`). The program never
falls back on another policy: a step that does not fit is refused (aot.py), and so is a backend without host memory.

**Left out.** Segments of several layers: fewer inputs to save, but a larger segment in memory, and the inputs are the
smaller part. Policies that differ between layers. Offload of weights (offload.py does that of the optimizer state).
"""

from anatomy import offloaded_names, saved_names
from config import INPUT_ON_DEVICE, Config

# jax is imported where it is used, so that rules.py and the predictions run without it.


def named(x, name: str):
    """`x`, tagged with a name of config.ACTIVATIONS for the policy."""
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(x, name)


def named_input(x_btd, config: Config):
    """A layer's input, tagged. With a share for the host, what stays on the device has a name of its own."""
    from jax import lax

    if (on_host := max(1, round(config.share_on_host * x_btd.shape[1]))) == x_btd.shape[1]:
        return named(x_btd, "decoder_layer_input")
    parts = named(x_btd[:, :on_host], "decoder_layer_input"), named(x_btd[:, on_host:], INPUT_ON_DEVICE)
    return lax.concatenate(parts, 1)


def policy(config: Config):
    """The policy for `jax.checkpoint`: which named activations of a layer are saved, on the device or on the host."""
    import jax

    import offload

    offloaded = offloaded_names(config)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(saved_names(config) - offloaded),
        names_which_can_be_offloaded=sorted(offloaded),
        offload_src="device",
        offload_dst=offload.MEMORY,
    )


def attention_is_late(config: Config) -> bool:
    """Whether what follows attention is recomputed without it: a later result is saved, that of attention is not."""
    saved = saved_names(config)
    return "context" not in saved and bool(saved & {"out_proj", "mlp_input", "norm_mlp"})
