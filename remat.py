"""Rematerialisation: what the backward pass finds saved, what it computes again, and what waits in the host's memory.

    python remat.py --preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --seq_len=8192            every policy, predicted
    python remat.py --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --remat=auto

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
--xla_flags=xla_tpu_pipeline_memory_host_transfers=false. `python compiled.py offloaded` has steps with it and without.

**Whether it fits** and what it takes is step.py's prediction; `best` looks at every policy, and takes the shortest step
of those whose memory, and share of the host's (120 GB for each TPU7x device), is within planner.py's room. Nothing in
the program falls back on another policy: a step that does not fit is refused (aot.py), and a backend without host
memory is, too (`check_host_memory`).

**Left out.** Segments of several layers: fewer inputs to save, but a larger segment to hold, and the inputs are the
small part. Policies that differ between layers. Offload of weights (that of the optimizer
state is offload.py's).
"""

import dataclasses
import json
import math
from collections.abc import Sequence

import command
import config as config_lib
import placement
import rules
import transformer
from anatomy import offloaded_names, saved_names
from config import REMAT_POLICIES, Config
from hardware import Chip, by, parse_topology, si
from planner import ROOM
from step import GiB, Prediction, plot, predict, short_of
from workload import TODAY, Efficiency, run_of

# jax is imported where it is used: the predictions answer without it.


# -- what runs


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


# -- what is predicted


def candidates(config: Config) -> list[Config]:
    """`config` with each policy; `custom` among them if it is its own."""
    own = [config] if config.remat == "custom" else []
    names = [name for name in REMAT_POLICIES if name != "custom"]
    named = [dataclasses.replace(config, remat=name, remat_tensors="") for name in names]
    sizes = placement.parse_mesh(config.mesh)
    return [one for one in named if not rules.offloaded_by_a_stage(one, sizes)] + own


def predictions(
    config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1, efficiency: Efficiency = TODAY
) -> dict[str, Prediction]:
    """The step by policy; `config.remat` is not looked at, unless it is custom."""
    run = lambda one: run_of(one, chip, topology, num_slices=num_slices, efficiency=efficiency)
    return {one.remat: predict(run(one)) for one in candidates(config)}


def recomputed_share(found: Prediction) -> float:
    """FLOPs that the backward pass repeats, over the training FLOPs."""
    config = found.of.config
    again = math.fsum(transformer.recomputed_flops_per_token(config).values())
    return again / transformer.train_flops_per_token(config)


def fits(found: Prediction) -> bool:
    """In the memory that planner.py lets a prediction have."""
    return not found.lacks(ROOM)


def best(found: dict[str, Prediction]) -> str:
    """The policy of the shortest step of those that fit; of equal ones, what recomputes least, then what saves least.

    Raises:
      ValueError: none fits, with the one that is nearest to it and what it lacks.
    """
    fitting = {name: one for name, one in found.items() if fits(one)}
    if not fitting:
        name, one = min(found.items(), key=lambda item: math.fsum(item[1].lacks(ROOM).values()))
        lacks = one.lacks(ROOM)
        raise ValueError(
            f"no policy fits: remat={name} lacks least, it needs {one.hbm_bytes / GiB:.1f} GiB of "
            f"{ROOM * one.of.hbm_limit / GiB:.1f} ({ROOM:.0%} of what there is), {short_of(lacks)}; "
            f"more devices{'' if 'host' in lacks else ', or --microbatches'}"
        )
    cost = lambda name: (found[name].step_s, recomputed_share(found[name]), found[name].hbm_bytes)
    return min(fitting, key=cost)


def auto(config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1) -> str:
    """The policy that remat=auto stands for: the `best` of those with a name. Raises ValueError if none fits."""
    named_only = dataclasses.replace(config, remat="auto", remat_tensors="")
    return best(predictions(named_only, chip, topology, num_slices=num_slices))


def resolve(config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1) -> Config:
    """`config` with the policy that its remat=auto stands for; any other config as it is. Raises as `auto` does."""
    if config.remat != "auto":
        return config
    return dataclasses.replace(config, remat=auto(config, chip, topology, num_slices=num_slices))


# -- command line


def row(found: Prediction) -> dict:
    """A policy's numbers. `saved_bytes` and `offloaded_bytes` are one layer's, on average, of a microbatch."""
    of = found.of
    layers = of.config.num_layers / of.pipe * of.in_flight  # that a device has under way
    link = [part for part in found.parts if part.name == "host offload"]
    return {
        "saved_bytes": found.memory["saved activations"] / layers,
        "offloaded_bytes": found.host_bytes / layers,
        "recomputed_share": recomputed_share(found),
        "host_bytes": found.host_bytes,
        "host_s": math.fsum(part.seconds for part in link),
        "host_exposed_s": math.fsum(part.exposed_s for part in link),
        "hbm_bytes": found.hbm_bytes,
        "step_s": found.step_s,
        "fits": fits(found),
    }


def describe(found: dict[str, Prediction], chosen: str) -> str:
    """The table: a line a policy."""
    of = next(iter(found.values())).of
    config = of.config
    mesh = ", ".join(f"{axis} {size}" for axis, size in of.sizes.items() if size > 1)
    lines = [
        f"{config.preset} on {of.chip.name}:{by(of.topology)}, {of.num_chips:,} chips, mesh {mesh or 'one device'}, "
        f"batch {config.batch:,} of {config.seq_len:,} tokens; of a device, predicted",
        "",
        f"{'':34}{'a layer saves':>26}{'recomputed':>12}{'host link':>12}{'waited for':>12}{'HBM':>12}{'step':>11}",
        f"{'':34}{'in HBM':>13}{'on the host':>13}{'of training':>12}",
    ]
    for name, one in found.items():
        its = row(one)
        link = [(si(its[key], unit)) for key, unit in (("host_s", "s"), ("host_exposed_s", "s"))]
        on_host, seconds, waited = (si(its["offloaded_bytes"], "B"), *link) if its["host_s"] else ("-", "-", "-")
        lines.append(
            f"{'* ' if name == chosen else '  '}{name:32}{si(its['saved_bytes'], 'B'):>13}{on_host:>13}"
            f"{its['recomputed_share']:12.1%}{seconds:>12}{waited:>12}{its['hbm_bytes'] / GiB:8.2f} GiB"
            f"{si(its['step_s'], 's'):>11}{'' if its['fits'] else f'  does not fit, {short_of(one.lacks(ROOM))}'}"
        )
    limit = f"{ROOM * of.hbm_limit / GiB:.1f} GiB, {ROOM:.0%} of what there is"
    why = f"the shortest step of those that fit in {limit}" if chosen else f"none fits in {limit}"
    return "\n".join([*lines, "", f"--remat=auto: {f'{chosen}, ' if chosen else ''}{why}"])


def main(argv: Sequence[str] | None = None) -> None:
    """All policies; the one of --remat, or with --remat=auto the best."""
    parser = command.parser(__file__, usage="%(prog)s [--flag=value ...]")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds and bytes")
    parser.add_argument(
        "--plot", type=command.path, metavar="FILE.png", help="draw the parts of each step; needs matplotlib"
    )
    config_lib.add_run_flags(parser, "tpu7x:2x2x1")
    args = command.arguments(parser, argv)
    asked = getattr(args, "remat", "")
    config = config_lib.from_args(args)
    topology, num_slices = config_lib.slice_of(args)
    found = predictions(config, *parse_topology(topology), num_slices=num_slices)
    chosen = best(found) if asked == "auto" or any(map(fits, found.values())) else ""
    shown = {"": found, "auto": {chosen: found.get(chosen)}}.get(asked) or {asked: found[asked]}
    if args.plot:
        plot(shown, args.plot)
    if args.json:
        print(json.dumps({"kind": "predicted", "auto": chosen, "policies": {n: row(one) for n, one in shown.items()}}))
    else:
        print(describe(shown, chosen))


if __name__ == "__main__":
    command.run(main)
