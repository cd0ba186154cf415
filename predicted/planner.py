"""Which mesh, which microbatches, what to recompute: every legal way to run a model, predicted, ranked, explained.

    python roofline.py plan --preset=llama3.1-70b --chips=64 --batch=256
    python roofline.py plan --preset=llama3.1-70b --topology=tpu7x:4x8x8 --seq_len=131072 --batch=64 --explain

**What is tried.** Sizes of the mesh axes that make up the devices; 1, 2, 4, ... 32 microbatches; of the policies of
recomputation the one that recomputes least and fits (with any other the step is longer or does not fit), and the best
that uses the host. Dropped is what does not divide, and what does not fit in 92% of the memory, or of a device's share
of its host's. The 32 fastest of all then get a policy of their own, the set of activations (`KEPT`) that leaves least
to be computed again and fits; double buffering of the weights; and the dies of a chip another axis. The shortest step
wins, but for this: of those within 5% of it, that with the fewest mesh axes, as a prediction is not better than that,
and of these the fastest with the default axis on the dies.

**What is left out**: `tensor` over 16 devices or over the key heads, `expert` and `pipe` over 64 and 16; parts of a
sequence under 1024 tokens; a pipeline where all else fits, unless there are several slices for its stages; policies of
its own that use the host; `collective_matmul`; turns of three layers or more. And between `fsdp` as large as the
model's dim allows and a quarter of it, with `data` for the rest, nothing: smaller rings can be faster, at the price of
memory, but not by much.

**The guide** (Google Cloud, "TPU7x performance optimizations") has a table, which the answer is held against:

    dense, short sequences      FSDP
    dense, long sequences       FSDP, and context parallelism
    experts, short sequences    FSDP, and expert parallelism
    experts, very large         FSDP, expert and pipeline parallelism

Three of its figures, held against ours. Activations grow "quadratically" with the sequence: with a fused kernel they
grow as it does, and Llama 3.1 8B on 64 devices, all recomputed, a sequence a device, takes 7.8, 17.2 and 59.6 GiB at
8k, 32k and 128k. Recomputing all of a layer costs "25-30%": of the FLOPs of a step of 70B 24.5% at 8k, 29.1% at 128k. 8
bits are "1.3x" as fast: of the five published pairs of runs from 1.12 (Qwen3 235B) to 1.54 (Llama 3.1 70B at 8k). The
guide is made of an older text
(https://discuss.google.dev/t/optimizing-frontier-model-training-on-tpu-v7x-ironwood/336983). That has 12% of a step for
fused attention with tuned tiles over plain attention, and 4% for a constant max logit, which takes 3% of our kernel's
cycles away, and so less of a step.

Its reviewers asked more. Is tensor parallelism worth it at 128k? The table of families has each combination of axes
with its best mesh. Can two axes of size 2 both lie on the two dies of a chip? One can, and each is tried. How does the
MFU of the whole step depend on the attention kernel? Where attention is most of the FLOPs, the kernel's is the step's.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anatomy
import command
import flags as flags_lib
import rules
from config import REMAT_POLICIES, Config
from hardware import Chip, by, chip_of, parse_topology, si
from placement import BATCH_AXES, MESH_AXES
from predicted import transformer
from predicted.interconnect import links_of, squarest
from predicted.step import GiB, Prediction, as_json, describe, plot, predict, short_of
from predicted.workload import ROWS_OF_A_TILE, TODAY, Efficiency, Run, lacking, layers_of, memory_of, on_host

TO_FIND = "mesh microbatches remat remat_tensors core_axis collective_matmul double_buffer".split()
WITHIN = 1.05  # of the best: as good as it
# Of the memory that there is: predictions that come near it are within 6% of compiled programs, and near the limit XLA
# gives up overlap (compiled: Llama 3.1 8B at 93 of 94.7 GiB, and Gemma at 92, leave nearly all messages exposed).
ROOM = 0.92
LONG = 32_768  # tokens from which a sequence is long here; the guide's are 8k and 128k
SHORTEST_PART = 1024  # tokens of a sequence on a device


@dataclass(frozen=True)
class Plan:
    best: Prediction
    families: list[Prediction]  # the best of each combination of mesh axes, the fastest first
    num_tried: int
    num_fitting: int


def family(found: Prediction) -> str:
    """The mesh axes in use: fsdp + tensor."""
    return " + ".join(axis for axis, size in found.run.sizes.items() if size > 1) or "one device"


def plan(
    config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1, efficiency: Efficiency = TODAY
) -> Plan:
    """The best way to train what `config` describes, of which TO_FIND is not looked at.

    But a remat of `custom` is tried among the others.

    Raises:
      ValueError: nothing divides, or nothing fits, with what is short and by how much.
    """
    dropped: dict[str, int] = {}  # how often, by why
    closest = None  # what is nearest to fitting
    fitting: list[Prediction] = []
    num_tried = 0  # meshes and microbatches
    configs = _configs(config)
    if num_slices < 1:
        raise ValueError(f"num_slices={num_slices} must be 1 or more")
    num_devices = chip.devices * math.prod(topology) * num_slices

    def lies(sizes: dict[str, int]) -> bool:
        try:
            links_of(sizes, chip, topology, num_slices=num_slices)
        except ValueError as error:
            dropped[str(error)] = dropped.get(str(error), 0) + 1
            return False
        return True

    for with_pipeline in (False, True) if num_slices == 1 else (True,):
        if with_pipeline and fitting:
            break
        for sizes in meshes(config, num_devices, num_slices, with_pipeline, lies):
            links = links_of(sizes, chip, topology, num_slices=num_slices)
            for microbatches, by_remat in configs.items():
                if microbatches < sizes["pipe"]:
                    continue
                num_tried += 1
                by_remat = [rules.settled(one, sizes) for one in by_remat]
                by_remat = [one for one in by_remat if not rules.offloaded_by_a_stage(one, sizes)]
                run = Run(by_remat[0], chip, tuple(topology), num_slices, sizes, links, efficiency)
                try:
                    rules.check(run.config, sizes)
                except ValueError as error:
                    dropped[str(error)] = dropped.get(str(error), 0) + 1
                    continue
                found, least = _least_recomputation(run, by_remat)
                fitting += found
                if closest is None or math.fsum(least[1].values()) < math.fsum(closest[1].values()):
                    closest = least
    if not fitting:
        raise ValueError(_why_nothing(config, num_devices, dropped, closest))
    num_fitting = len({(tuple(found.run.sizes.values()), found.run.microbatches) for found in fitting})
    fitting = _varied(fitting)
    families = {}
    for found in sorted(fitting, key=lambda found: found.step_s):
        families.setdefault(family(found), found)
    shortest = min(found.step_s for found in fitting)
    best = min((found for found in fitting if found.step_s <= WITHIN * shortest), key=complexity)
    return Plan(best, list(families.values()), num_tried, num_fitting)


def _least_recomputation(run: Run, by_remat: list[Config]) -> tuple[list[Prediction], tuple[Run, dict[str, float]]]:
    """With the first policy that fits, and the best of those that use the host; and the run that lacks least memory.

    More recomputation takes longer, and so it need not be looked at. The host may be slower than recomputation: both
    are tried, and of the policies that use it the fastest.
    """
    found, least = {}, None
    for config in by_remat:
        offloads = bool(anatomy.offloaded_names(config))
        if offloads in found and not offloads:
            continue
        one = dataclasses.replace(run, config=config)
        memory, offloaded = memory_of(one, layers_of(one))
        lacks = lacking(one, math.fsum(memory.values()), on_host(one, offloaded), ROOM)
        if not lacks:
            candidate = predict(one)
            if offloads not in found or candidate.step_s < found[offloads].step_s:
                found[offloads] = candidate
        if least is None or math.fsum(lacks.values()) < math.fsum(least[1].values()):
            least = one, lacks
    return list(found.values()), least


def complexity(found: Prediction) -> tuple:
    """What is simpler comes first; of the equally simple, what is faster."""
    run = found.run
    return sum(size > 1 for size in run.sizes.values()), bool(run.config.core_axis), found.step_s


def meshes(
    config: Config, num_devices: int, num_slices: int, with_pipeline: bool, lies: Callable[[dict[str, int]], bool]
) -> Iterator[dict[str, int]]:
    """Sizes of mesh axes worth a try, that make up the devices and lie on them; `fsdp` has what the others leave."""
    powers = lambda limit: [2**i for i in range(limit.bit_length()) if 2**i <= limit]
    divisors = lambda number: [size for size in range(1, number + 1) if number % size == 0]
    experts = [size for size in divisors(config.num_experts or 1) if size <= 64]
    stages = divisors(config.num_layers)
    pipes = [size for size in stages if 1 < size <= 16] if with_pipeline else [1]
    if num_slices > 1:
        pipes = [1, *(size for size in stages if size % num_slices == 0 and size <= 16)]
    for pipe in pipes:
        # The outermost axes cross slices: so do stages, or replicas.
        least = 1 if pipe > 1 and pipe % num_slices == 0 else num_slices
        for tensor in (ways for ways in powers(_widest(config)) if config.model_dim % ways == 0):
            for context in powers(config.seq_len // SHORTEST_PART or 1):
                for expert in experts:
                    inner = pipe * tensor * context * expert * least
                    if num_devices % inner:
                        continue
                    left = num_devices // inner
                    axes = dict(pipe=pipe, expert=expert, context=context, tensor=tensor)
                    axes_at = lambda fsdp, rest=least * left, axes=axes: axes | dict(fsdp=fsdp, data=rest // fsdp)
                    # The largest fsdp that cuts the model's dim and lies on the slice, a quarter of it, and the largest
                    # that leaves each device whole tiles of a weight's rows.
                    whole = [size for size in divisors(left) if config.model_dim % (size * tensor) == 0]
                    largest = next((size for size in reversed(whole) if lies(axes_at(size))), 0)
                    tiled = max((size for size in whole if config.model_dim // size % ROWS_OF_A_TILE == 0), default=0)
                    for fsdp in (size for size in reversed(whole) if size in (largest, largest / 4, tiled)):
                        sizes = {axis: axes_at(fsdp)[axis] for axis in MESH_AXES}
                        batch_divides = config.batch % math.prod(sizes[axis] for axis in BATCH_AXES) == 0
                        if batch_divides and (fsdp == largest or lies(sizes)):
                            yield sizes


def _widest(config: Config) -> int:
    """The largest `tensor` to try."""
    return min(16, config.num_heads if config.kv_lora_rank else config.num_kv_heads)


def _configs(config: Config) -> dict[int, list[Config]]:
    """{microbatches: one for each policy, from the least recomputation to the most}."""
    once = dataclasses.replace(config, mesh="", microbatches=1, core_axis="", collective_matmul=False)
    once = dataclasses.replace(once, double_buffer=False)
    policies = [policy for policy in REMAT_POLICIES if policy != "custom"]
    found = [dataclasses.replace(once, remat=policy, remat_tensors="") for policy in policies]
    found += [once] if config.remat == "custom" else []
    # Of those that recompute alike, what stays on the device comes first.
    found.sort(key=lambda one: (_again(one), len(anatomy.offloaded_names(one))))
    return {2**i: [dataclasses.replace(one, microbatches=2**i) for one in found] for i in range(6)}


def _again(config: Config) -> float:
    """FLOPs a token that are computed again."""
    return sum(transformer.recomputed_flops_per_token(config).values())


# Turns of two layers take half as long again to compile: for so much of a step.
WORTH_A_LONGER_COMPILE = 0.01


def _varied(fitting: list[Prediction]) -> list[Prediction]:
    """And the best with a policy of their own, turns of two layers, other axes on a chip's dies."""
    ways = _with_own_policy, _double_buffered, _with_own_policy, _with_other_core_axes
    for variants in ways:  # turns of two need more memory, and may then save something else
        fastest = sorted(fitting, key=lambda one: one.step_s)[:32]
        fitting = fitting + [variant for one in fastest for variant in variants(one) if not variant.lacks(ROOM)]
    return fitting


# What a policy of its own keeps on the device, each or not; not what shared experts make.
KEPT = ("context", "qkv_proj", "out_proj", "mlp_gate expert_gate", "mlp_up expert_up", "expert_down")


def _with_own_policy(one: Prediction) -> Iterator[Prediction]:
    """With the set of what matmuls and attention make that leaves least to be computed again, of those that fit."""
    config = one.run.config
    layers = {False, config.num_experts > 0}
    made = {"qkv_proj"}.union(*(anatomy.activations(config, experts=experts) for experts in layers))
    sets = {}
    for kept in itertools.product((True, False), repeat=len(KEPT)):
        names = [name for names in itertools.compress(KEPT, kept) for name in names.split() if name in made]
        sets[",".join(f"{name}:device" for name in names)] = None
    for own in sorted((dataclasses.replace(config, remat="custom", remat_tensors=names) for names in sets), key=_again):
        if _again(own) >= _again(config):
            return
        run = dataclasses.replace(one.run, config=own)
        memory, offloaded = memory_of(run, layers_of(run))
        if not lacking(run, math.fsum(memory.values()), on_host(run, offloaded), ROOM):
            yield predict(run)
            return


def _double_buffered(one: Prediction) -> Iterator[Prediction]:
    with contextlib.suppress(ValueError):  # without prefetch
        found = predict(dataclasses.replace(one.run, config=dataclasses.replace(one.run.config, double_buffer=True)))
        if found.step_s < (1 - WORTH_A_LONGER_COMPILE) * one.step_s:
            yield found


def _with_other_core_axes(one: Prediction) -> Iterator[Prediction]:
    """With each other axis of even size on the two dies of a chip."""
    run = one.run
    even = [axis for axis in MESH_AXES if run.sizes[axis] % 2 == 0] if run.chip.devices == 2 else []
    for axis in even[:-1]:
        with contextlib.suppress(ValueError):  # it cannot lie there
            links = links_of(run.sizes, run.chip, run.topology, num_slices=run.num_slices, core_axis=axis)
            config = dataclasses.replace(run.config, core_axis=axis)
            yield predict(dataclasses.replace(run, config=config, links=links))


def _why_nothing(config: Config, num_devices: int, dropped: dict[str, int], closest: tuple[Run, dict] | None) -> str:
    if closest is None:
        ways = dict(batch=config.batch, context=max(1, config.seq_len // SHORTEST_PART), tensor=_widest(config))
        fed = math.prod(ways.values())
        if fed < num_devices:
            return (
                f"no mesh divides: {config.batch} sequences, parts of {SHORTEST_PART:,} tokens of them (context:"
                f"{ways['context']}) and tensor:{ways['tensor']} feed {fed:,} of {num_devices:,} devices, "
                f"{num_devices - fed:,} too few; a larger batch, or fewer chips"
            )
        no_mesh = f"the batch of {config.batch} and the model's dims have no common divisors with {num_devices} devices"
        return f"no mesh divides; most often: {max(dropped, key=dropped.get) if dropped else no_mesh}"
    run, lacks = closest
    memory, _ = memory_of(run, layers_of(run))
    state = sum(transformer.state_bytes(config).values())
    least = math.ceil(state / (run.hbm_limit * run.chip.devices))
    largest = sorted(memory.items(), key=lambda item: -item[1])[:3]
    text = ", ".join(f"{name} {nbytes / GiB:.1f}" for name, nbytes in largest)
    ways = "" if "host" in lacks else ", or fewer tokens in a batch"
    return (
        f"nothing fits: {config.preset} on {run.num_chips:,} chips of {run.chip.name} lacks least as mesh "
        f"{_mesh_text(run)}, {run.microbatches} microbatches, remat {run.config.remat}. It needs "
        f"{math.fsum(memory.values()) / GiB:.1f} GiB a device of {ROOM * run.hbm_limit / GiB:.1f} ({ROOM:.0%} of what "
        f"there is): {short_of(lacks)}. Of it: {text} GiB. {least:,} chips hold the state alone; more chips{ways}"
    )


# -- command line


def _mesh_text(run: Run) -> str:
    return ",".join(f"{axis}:{size}" for axis, size in run.sizes.items() if size > 1) or "one device"


def guide_row(config: Config, num_slices: int) -> tuple[str, set[str]]:
    """The guide's words for such a run, and the axes that it advises."""
    length = "long" if config.seq_len >= LONG else "short"
    if config.num_experts and num_slices > 1:
        return "experts, very large", {"fsdp", "expert", "pipe"}
    if config.num_experts:
        return f"experts, {length} sequences", {"fsdp", "expert"} | ({"context"} if length == "long" else set())
    return f"dense, {length} sequences", {"fsdp"} | ({"context"} if length == "long" else set())


def reasons(found: Plan) -> list[str]:
    """Why this plan, in sentences with their numbers."""
    best, run, config = found.best, found.best.run, found.best.run.config
    words, advised = guide_row(config, run.num_slices)
    used = {axis for axis, size in run.sizes.items() if size > 1}
    lines = [
        f"The guide has, for {words}: {' + '.join(sorted(advised, key=MESH_AXES.index))}. Here it is {family(best)}."
    ]
    fastest = found.families[0]
    if fastest.step_s < best.step_s:
        lines.append(
            f"{_mesh_text(fastest.run)} with {fastest.run.microbatches} microbatches takes {fastest.step_s:.3f} s, "
            f"{1 - fastest.step_s / best.step_s:.1%} less; within {WITHIN - 1:.0%} the simpler one is preferred."
        )
    for axis in ("tensor", "context", "expert"):
        others = [one for one in found.families if (one.run.sizes[axis] > 1) != (axis in used)]
        if others and others[0] is not best:
            other = others[0]
            more = {
                part.name: part.exposed_s - math.fsum(p.exposed_s for p in best.parts if p.name == part.name)
                for part in other.parts
            }
            worst = max(more, key=more.get)
            word = "Without" if axis in used else "With"
            if other.step_s > best.step_s:
                why = f"; {worst} takes {more[worst]:.3f} s more" if more[worst] > 0 else ""
            else:
                why = "; a prediction is not better than that"
            lines.append(
                f"{word} {axis} parallelism the best is {_mesh_text(other.run)}, {other.step_s:.3f} s "
                f"({other.step_s / best.step_s - 1:+.1%}){why}."
            )
    if run.num_slices > 1 and not any(one.run.sizes["pipe"] > 1 for one in found.families):
        why = f"no cut of {config.num_layers} layers into a multiple of {run.num_slices} stages fits"
        if config.num_dense_layers:
            why = f"the first {config.num_dense_layers} layers are dense, and stages have to be alike"
        lines.append(f"No mesh has stages: {why}.")
    hidden = {part.name: part.seconds - part.exposed_s for part in best.parts if part.resource == "communication"}
    for name, seconds in hidden.items():
        if seconds > 1e-3 * best.step_s:
            lines.append(f"Of {name}, {si(seconds, 's')} hide behind compute.")
    if run.chip.devices == 2:
        on_dies = next(
            (axis for axis, links in run.links.items() if any(link.name == "die to die" for link in links)), None
        )
        rivals = [axis for axis in used if run.sizes[axis] == 2 and axis != on_dies]
        cannot = f"; {' and '.join(rivals)}, of size 2, cannot as well" if rivals else ""
        lines.append(f"The link between the two dies of a chip has {on_dies}{cannot}.")
    flops = transformer.forward_flops_per_token(config)
    share = (flops["scores"] + flops["mix"]) / math.fsum(flops.values())
    kernel = math.fsum(part.exposed_s for part in best.parts if part.name == "attention")
    kernel_mfu = share * best.flops_per_step / kernel / run.num_chips / run.chip.bf16_flops_per_s
    lines.append(
        f"Attention is {share:.0%} of the FLOPs and {kernel / best.step_s:.0%} of the time, at an MFU of "
        f"{kernel_mfu:.0%} (the step's: {best.mfu:.0%})"
        + ("; the kernel decides." if kernel > best.step_s / 2 else ".")
    )
    state = best.memory["weights"] + best.memory["optimizer"] + best.memory["gradients"]
    spare = run.hbm_limit - best.hbm_bytes
    how = f"{config.remat} {config.remat_tensors}".strip()
    lines.append(
        f"Memory: {best.hbm_bytes / GiB:.1f} of {run.hbm_limit / GiB:.1f} GiB, {state / GiB:.1f} of it the state; "
        f"with remat {how} {spare / GiB:.1f} GiB are left."
    )
    return lines


def print_plan(args: argparse.Namespace) -> None:
    config = flags_lib.from_args(args)
    topology, num_slices = flags_lib.slice_of(args)
    if args.chips is not None:
        if args.chips < 1:
            raise ValueError(f"--chips={args.chips} must be 1 or more")
        chip = chip_of(topology.partition(":")[0])
        shape = sorted(squarest(args.chips, chip.torus_axes), key=lambda size: (size == 1, size))
        topology = f"{chip.name}:{by(shape)}"
    chip, topology = parse_topology(topology)
    given = [name for name in TO_FIND if name in args]
    if given:
        raise ValueError(f"--{given[0]} is what plan finds; for one that is given: roofline.py step")
    found = plan(config, chip, topology, num_slices=num_slices)
    in_fp8 = None
    if config.fp8 == "none" and chip.fp8_flops_per_s and chip.fp8_flops_per_s > chip.bf16_flops_per_s:
        modules = "out,mlp,moe" if config.kv_lora_rank else config.fp8_modules
        wanted = dataclasses.replace(config, fp8="dynamic", fp8_modules=modules)
        in_fp8 = plan(wanted, chip, topology, num_slices=num_slices)
    if args.plot:
        plot({_mesh_text(one.run): one for one in found.families[:8]}, args.plot)
    if args.json:
        result = {
            "best": as_json(found.best),
            "families": {family(one): as_json(one) for one in found.families},
            "reasons": reasons(found),
            "num_tried": found.num_tried,
            "num_fitting": found.num_fitting,
            "fp8": as_json(in_fp8.best) if in_fp8 else None,
        }
        return print(json.dumps(result))
    print(describe(found.best, explain=args.explain))
    print(f"\nwhy, of {found.num_tried:,} ways to run it, of which {found.num_fitting:,} fit")
    for line in reasons(found):
        print(f"  - {line}")
    print("\nthe best of each family")
    print(f"  {'mesh':42}{'microbatches':>13}{'step':>10}{'MFU':>7}{'GiB':>6}  {'waits most for':15} how")
    for one in found.families[:12]:
        print(
            f"  {_mesh_text(one.run):42}{one.run.microbatches:13}{si(one.step_s, 's'):>10}{one.mfu:7.1%}"
            f"{one.hbm_bytes / GiB:6.1f}  {one.bound:15} {_how_text(one.run.config)}"
        )
    if in_fp8:
        gain = found.best.step_s / in_fp8.best.step_s
        print(f"\nin fp8: {si(in_fp8.best.step_s, 's')}, {gain:.2f}x, with {_mesh_text(in_fp8.best.run)}")
    print(f"\nroofline.py step {' '.join(flags_of(found.best))}")


def _how_text(config: Config) -> str:
    """What is saved, and what else the planner has changed."""
    said = [f"{config.remat} {config.remat_tensors.replace(':device', '')}".strip()]
    said += ["double_buffer"] * config.double_buffer
    said += [f"core_axis {config.core_axis}"] * bool(config.core_axis)
    return "; ".join(said)


def _flag(name: str, value) -> str:
    return f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"


def changed_flags(config: Config, sizes: dict[str, int], found: Prediction) -> list[str]:
    """The flags in which a prediction's run differs, those among them that would have no effect any more."""
    mesh = ",".join(f"{axis}:{size}" for axis, size in found.run.sizes.items() if size > 1)
    flags = [f"--mesh={mesh}"] if found.run.sizes != sizes else []
    for name, value in dataclasses.asdict(found.run.config).items():
        if name != "mesh" and value != getattr(config, name):
            flags.append(_flag(name, value))
    return flags


def flags_of(found: Prediction) -> list[str]:
    """The flags that give this very prediction by `roofline.py step`."""
    run = found.run
    config = dataclasses.replace(run.config, mesh=",".join(f"{axis}:{n}" for axis, n in run.sizes.items() if n > 1))
    preset = dataclasses.asdict(flags_lib.from_preset(config.preset))
    flags = [f"--topology={run.chip.name}:{by(run.topology)}", f"--preset={config.preset}"]
    flags += [f"--num_slices={run.num_slices}"] if run.num_slices > 1 else []
    for name, value in dataclasses.asdict(config).items():
        if name not in ("preset", "recipe") and value != preset[name]:
            flags.append(_flag(name, value))
    return flags


def add_plan_command(commands) -> None:
    about = "the best mesh, microbatches and recomputation for a model on so many chips"
    parser = commands.add_parser(
        "plan", help=about, description=about, allow_abbrev=False, usage="%(prog)s [--flag=value ...]"
    )
    parser.add_argument("--chips", type=int, help="so many, in the shape nearest to a cube, in place of --topology's")
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, bytes and FLOPs")
    parser.add_argument(
        "--plot", type=command.path, metavar="FILE.png", help="draw the parts of the families' steps; needs matplotlib"
    )
    flags_lib.add_run_flags(parser, "tpu7x:4x4x4")
    parser.set_defaults(run=print_plan, parser=parser)
