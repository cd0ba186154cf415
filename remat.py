"""Rematerialisation: what the backward pass finds saved, what it computes again, and what waits in the host's memory.

    python roofline.py remat --preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --seq_len=8192       every policy, predicted

The backward pass of a matmul y = x w needs x again, so what the forward pass made has to be there, in all layers, when
the backward pass begins; or else it is computed once more, from something earlier that is there. Chen et al. 2016
(arXiv:1604.06174, section 4) save the inputs of segments and recompute a segment when its turn comes: the memory of one
segment, and the inputs of all. A decoder's layers are such segments: with D numbers a token saved of each, the memory
is that of L inputs and one whole layer; the price is another forward pass, a third of the training FLOPs at most.

**Selective** (Korthikanti et al. 2022, arXiv:2205.05198, section 5): activations differ in what a byte of them costs.
Attention's scores are the most bytes for the fewest FLOPs, and a fused kernel recomputes them anyway, from the
log-sum-exp that it keeps. Of the rest, a policy is a set of names. `named` tags a tensor of the layer, `policy` tells
`jax.checkpoint` which of the names to keep. The tables are in anatomy.py: `activations` has the elements a token of
each name, `POLICIES` the sets. For D = NH, elements a token and layer, with MaxText's names:

    full                                D                     multiplied again: all, but what ends a layer
    save_qkv_proj                       D + (N+2K)H           ... but q, k, v
    save_dot_except_mlp                 2D + (N+2K)H          ... and o
    save_dot_with_context_except_mlp    2D + (2N+2K)H + N     ... and attention itself
    minimal_with_context                the same + 2F         nothing

A name is only an offer: what the backward pass does not read is not kept, even if the policy names it (such as the
outputs that end a sub-layer: their sum with the stream is read, not they). What is elementwise (norms, rotations,
SwiGLU) has names too, and no policy but custom saves it: fused with what reads it, it is repeated almost for nothing.
`none` is plain differentiation, which keeps that as well: twice the bytes of all names, and no time is won
(workload.PLAIN).

**The choice, a byte at a time.** A matmul that contracts D makes its result at D FLOPs a byte in bfloat16 (2*D FLOPs,
2 bytes). With C FLOP/s reached of a device, W_hbm bytes/s of its memory and W_host of the link to its host:

    recompute           D / C
    keep in HBM         2 / W_hbm       written once, read once; faster from D = 2 * C / W_hbm on
    keep on the host    2 / W_host      out and back; faster from D = 2 * C / W_host on, unless it hides

On a TPU7x device (C = 957e12, W_hbm = 3.2e12, of what programs reach; W_host = 16e9, assumed: the figure of other
chips) that is D = 600 and D = 120,000. So what a matmul gives is kept in HBM where it fits, and is never worth a
transfer that anything waits for.

**Offload** moves a tensor out during the forward pass and back during the backward pass. In the programs that libtpu
makes, about as much of it hides as attention's kernel takes (compiled, 70B: at 8k the kernel takes 0.9 s; of
12.4 s of transfers of `minimal_offloaded` the step waits for 10.9, of 1.7 s of q, k, v for 0.9; at 128k the kernel
takes 24 s, and of 3.4 s the step waits for 0.3). So it hides, each way, if attention takes as long: n elements a token
of a layer, in bfloat16, T causal tokens, attention at C_a = 498e12 FLOP/s forward,

    2*n / W_host  <  2*T*D / C_a        <=>    T * D / n  >  C_a / W_host = 31,000

A layer's input, n = D, hides in sequences of 31,000 tokens, query, key and value of Llama 3.1 70B in those of 39,000.
For what `minimal_offloaded` moves of it, MLP and all, the step waits up to 288,000.

To have a layer's tensors travel beside its neighbour, libtpu peels an iteration off each loop, and where a device has
one sequence that iteration may want the stack of the layers' inputs in another layout: a second stack (compiled: 10 GiB
for 70B at 8k on 128 devices; workload.py predicts where). Without the first there is no second:
--xla_flags=xla_tpu_pipeline_memory_host_transfers=false. `python aot.py results offloaded` has steps of both kinds.

**Whether it fits** and what it takes is a prediction (`python roofline.py remat`). Nothing in the program falls back on
another policy: a step that does not fit is refused (aot.py), and so is a backend without host memory.

**Left out.** Segments of several layers: fewer inputs to save, but a larger segment to hold, and the inputs are the
small part. Policies that differ between layers. Offload of weights (that of the optimizer
state is offload.py's).
"""

from anatomy import offloaded_names, saved_names
from config import Config

# jax is imported where it is used: rules.py and the predictions answer without it.


def named(x, name: str):
    """`x`, tagged with one of config.ACTIVATIONS for the policy to see."""
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(x, name)


def policy(config: Config):
    """For `jax.checkpoint`: which of the named activations of a layer are kept, and where."""
    import jax

    import offload

    offloaded = offloaded_names(config)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(saved_names(config) - offloaded),
        names_which_can_be_offloaded=sorted(offloaded),
        offload_src="device",
        offload_dst=offload.MEMORY,
    )


def check_host_memory(config: Config, mesh) -> None:
    """Raises ValueError where something is to wait on the host, and a device of the mesh cannot address its memory."""
    import offload

    waits = {
        f"remat={config.remat} offloads {', '.join(sorted(offloaded_names(config)))}": offloaded_names(config),
        "offload_optimizer puts the optimizer state": config.offload_optimizer,
    }
    for what in (what for what, asked in waits.items() if asked):
        for device in mesh.local_devices:
            kinds = [memory.kind for memory in device.addressable_memories()]
            if offload.MEMORY not in kinds:
                raise ValueError(
                    f"{what} to {offload.MEMORY}, and {device.device_kind} has the memories {', '.join(kinds)} only; "
                    "without: --remat=full --no-offload_optimizer"
                )
