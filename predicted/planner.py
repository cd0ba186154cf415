"""The planner: the best mesh, microbatches and recomputation for a model on a slice, and why it is the best.

    python roofline.py plan --preset=llama3.1-70b --chips=64 --batch=256
    python roofline.py plan --preset=llama3.1-70b --topology=tpu7x:4x8x8 --seq_len=131072 --batch=64 --explain

**Idea.** Predict the step of every run that the rules allow (predicted/step.py), and take the fastest that fits.

**Search.** The meshes are all sizes of the axes that make up the devices. A model whose D a power of two of the devices
does not divide is tried with padding, too (`dim_multiple`). Each mesh is tried with 1, 2, 4, ... 32 microbatches, and
each of these with two recomputation policies. One is the policy that recomputes least and fits: with any other the step
is longer or does not fit. The other is the best of those that use the host, among them one that recomputes all and has
the layers' inputs there. Of a mixture of experts, both are tried without prefetch, too, where one gathered layer takes
memory and not two. A run fits if it fills at most 92% of a device's memory and of its share of its host's.

The 32 fastest of all are then varied. Each gets a custom policy, the set of activations (`SAVABLE`) that leaves least
to recompute and fits; double buffering of the weights; fewer of the layers' inputs on the host, if they are there; and
another axis on the dies of a chip.

The shortest step wins, with one exception. A prediction may be wrong by 5%. So of the runs within 5% of the fastest the
planner takes the one with the fewest mesh axes; of these, one with the default axis on the dies; of these, one with
prefetch; of these, the fastest.

**The guide** (Google Cloud, "TPU7x performance optimizations") has a table, against which the plan is compared:

    dense, short sequences      FSDP
    dense, long sequences       FSDP, and context parallelism
    experts, short sequences    FSDP, and expert parallelism
    experts, very large         FSDP, expert and pipeline parallelism

Three of its figures, compared with ours:

  - Activations grow "quadratically" with the sequence. With a fused kernel they grow in proportion to it: Llama 3.1 8B
    on 64 devices, all recomputed, a sequence a device, takes 7.8, 17.2 and 59.6 GiB at 8k, 32k and 128k.
  - To recompute all of a layer costs "25-30%". Of the FLOPs of a step of 70B it is 24.5% at 8k and 29.1% at 128k.
  - FP8 is "1.3x" as fast. The five published pairs of runs have from 1.12 (Qwen3 235B) to 1.54 (Llama 3.1 70B at 8k).

The guide is based on an older text
(https://discuss.google.dev/t/optimizing-frontier-model-training-on-tpu-v7x-ironwood/336983). That text gains 12% of a
step by fused attention with tuned tiles over plain attention, and 4% by a constant max logit. The latter saves 3% of
our kernel's cycles, and so less of a step.

The guide's reviewers asked three more questions. Is tensor parallelism worth it at 128k? The table of families has the
best mesh of each combination of axes. Can two axes of size 2 both be on the two dies of a chip? Only one can, and the
planner tries each. How does the MFU of the step depend on the attention kernel? Where attention is most of the FLOPs,
the kernel's MFU is the step's.

**Left out.** `tensor` over 16 devices or over the number of key heads; `expert` over 64 and `pipe` over 16; parts of a
sequence under 1024 tokens; a pipeline where something else fits, unless there are several slices for its stages; other
custom policies that use the host; `collective_matmul`. `fsdp` has only the largest size that the model's dim allows, a
quarter of it, and the largest that leaves whole tiles of rows, with `data` for the rest. A size between these can be
faster, by smaller rings and at the price of memory, but not by much. `fsdp_transpose` only takes what the largest
`fsdp` leaves.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anatomy
import command
import config as config_lib
import flags as flags_lib
import rules
from config import REMAT_POLICIES, Config
from hardware import Chip, by, chip_of, parse_topology, si
from placement import BATCH_AXES, MESH_AXES
from predicted import residuals, transformer
from predicted.interconnect import links_of, squarest
from predicted.presentation import add_program_flag, as_json, describe, plot
from predicted.step import GiB, Prediction, describe_shortfall, predict
from predicted.workload import (
    PROGRAMS,
    ROWS_OF_A_TILE,
    TODAY,
    Efficiency,
    Run,
    host_bytes_of,
    layers_of,
    memory_of,
    shortfall_of,
)

PLANNED_FLAGS = config_lib.deciding("plan")
WITHIN = 1.05  # a step that takes at most so many times as long as the shortest counts as equally fast
# The share of the memory that a plan may fill. Predictions near it are within 6% of compiled programs, and near the
# limit XLA gives up overlap (compiled: Llama 3.1 8B at 93 of 94.7 GiB, and Gemma at 92, leave nearly all messages
# exposed).
MEMORY_SHARE = 0.92
SHORTEST_PART = 1024  # tokens of a sequence on a device


@dataclass(frozen=True)
class Plan:
    """The best prediction, and what it was chosen from."""

    best: Prediction
    families: list[Prediction]  # the best of each combination of mesh axes, the fastest first
    num_tried: int
    num_fitting: int


def family(prediction: Prediction) -> str:
    """The mesh axes in use: fsdp + tensor."""
    return " + ".join(axis for axis, size in prediction.run.sizes.items() if size > 1) or "one device"


def plan(
    config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1, efficiency: Efficiency = TODAY
) -> Plan:
    """Returns the best way to train what `config` describes, whatever its PLANNED_FLAGS are.

    But a custom remat of `config` is tried among the others.

    Raises:
      ValueError: nothing divides, or nothing fits; with what is short, and by how much.
    """
    dropped = Counter()  # how often a mesh was dropped, by the reason
    closest = None  # the run nearest to fitting, and the bytes that it is short of
    fitting: list[Prediction] = []
    num_tried = 0  # meshes and microbatches
    if num_slices < 1:
        raise ValueError(f"num_slices={num_slices} must be 1 or more")
    num_devices = chip.devices * math.prod(topology) * num_slices
    candidates = [(model, _configs(model)) for model in _widths(config, num_devices)]

    def fits_torus(sizes: dict[str, int]) -> bool:
        try:
            links_of(sizes, chip, topology, num_slices=num_slices)
        except ValueError as error:
            dropped[str(error)] += 1
            return False
        return True

    for with_pipeline in (False, True) if num_slices == 1 else (True,):
        if with_pipeline and fitting:
            break
        on_meshes = lambda model, pipe=with_pipeline: meshes(model, num_devices, num_slices, pipe, fits_torus)
        for configs, sizes in ((configs, sizes) for model, configs in candidates for sizes in on_meshes(model)):
            links = links_of(sizes, chip, topology, num_slices=num_slices)
            for microbatches, by_policy in configs.items():
                if microbatches < sizes["pipe"]:
                    continue
                num_tried += 1
                by_policy = [rules.settled(candidate, sizes) for candidate in by_policy]
                by_policy = [candidate for candidate in by_policy if not rules.offloaded_by_a_stage(candidate, sizes)]
                run = Run(by_policy[0], chip, tuple(topology), num_slices, sizes, links, efficiency)
                try:
                    rules.check(run.config, sizes)
                except ValueError as error:
                    dropped[str(error)] += 1
                    continue
                predictions, nearest = _least_recomputation(run, by_policy)
                fitting += predictions
                if closest is None or math.fsum(nearest[1].values()) < math.fsum(closest[1].values()):
                    closest = nearest
    if not fitting:
        raise ValueError(_why_no_plan(config, num_devices, dropped, closest))
    num_fitting = len({(tuple(fit.run.sizes.values()), fit.run.microbatches) for fit in fitting})
    return _ranked(_with_variants(fitting), num_tried, num_fitting)


def _ranked(fitting: list[Prediction], num_tried: int, num_fitting: int) -> Plan:
    """The plan, from all predictions that fit."""
    families = {}
    for prediction in sorted(fitting, key=lambda prediction: prediction.step_s):
        families.setdefault(family(prediction), prediction)
    shortest = min(prediction.step_s for prediction in fitting)
    best = min((fit for fit in fitting if fit.step_s <= WITHIN * shortest), key=complexity)
    return Plan(best, list(families.values()), num_tried, num_fitting)


def _least_recomputation(run: Run, by_policy: list[Config]) -> tuple[list[Prediction], tuple[Run, dict[str, float]]]:
    """Predicts a run with the first policy that fits, and with the best of those that use the host.

    More recomputation takes longer, so policies after the first that fits are skipped. The host may be slower than
    recomputation or faster, so both are tried; of the policies that use it, the fastest.

    Returns:
      The predictions, at most two with prefetch and two without; the run that is short of the fewest bytes, and these
      bytes by memory.
    """
    predictions, nearest = {}, None
    for config in by_policy:
        place = "host" if anatomy.offloaded_names(config) else "device", config.prefetch
        if place[0] == "device" and place in predictions:
            continue
        candidate = dataclasses.replace(run, config=config)
        shortfall = _shortfall(candidate)
        if not shortfall:
            prediction = predict(candidate)
            if place not in predictions or prediction.step_s < predictions[place].step_s:
                predictions[place] = prediction
        if nearest is None or math.fsum(shortfall.values()) < math.fsum(nearest[1].values()):
            nearest = candidate, shortfall
    return list(predictions.values()), nearest


def _shortfall(run: Run) -> dict[str, float]:
    """{memory: bytes that a run needs beyond MEMORY_SHARE of it}; empty if it fits."""
    memory, offloaded = memory_of(run, layers_of(run))
    return shortfall_of(run, math.fsum(memory.values()), host_bytes_of(run, offloaded), MEMORY_SHARE)


def complexity(prediction: Prediction) -> tuple:
    """A sort key: the simpler run first; of equally simple ones the faster."""
    run = prediction.run
    num_axes = sum(size > 1 for size in run.sizes.values())
    return num_axes, bool(run.config.core_axis), not run.config.prefetch, prediction.step_s


def meshes(
    config: Config, num_devices: int, num_slices: int, with_pipeline: bool, fits_torus: Callable[[dict[str, int]], bool]
) -> Iterator[dict[str, int]]:
    """Yields the sizes of mesh axes to try: they make up the devices, and `fsdp` and `data` have what the others leave.

    Args:
      with_pipeline: whether `pipe` is used on a single slice.
      fits_torus: whether sizes can be laid out on the slices.
    """
    powers = lambda limit: [2**i for i in range(limit.bit_length()) if 2**i <= limit]
    divisors = lambda number: [size for size in range(1, number + 1) if number % size == 0]
    experts = [size for size in divisors(config.num_experts or 1) if size <= 64]
    D, stages = anatomy.sizes(config)["D"], divisors(config.num_layers)
    pipes = [size for size in stages if 1 < size <= 16] if with_pipeline else [1]
    if num_slices > 1:
        pipes = [1, *(size for size in stages if size % num_slices == 0 and size <= 16)]
    for pipe in pipes:
        # The outermost axis crosses the slices: stages do, or replicas.
        replicas = 1 if pipe > 1 and pipe % num_slices == 0 else num_slices
        for tensor in (ways for ways in powers(_widest(config)) if D % ways == 0):
            for context in powers(config.seq_len // SHORTEST_PART or 1):
                for expert in experts:
                    inner = pipe * tensor * context * expert * replicas
                    if num_devices % inner:
                        continue
                    left = num_devices // inner
                    axes = dict(pipe=pipe, fsdp_transpose=1, expert=expert, context=context, tensor=tensor)
                    axes_at = lambda fsdp, rest=replicas * left, axes=axes: axes | dict(fsdp=fsdp, data=rest // fsdp)
                    # The largest fsdp that divides the model's dim and fits the torus, a quarter of it, and the largest
                    # that leaves each device whole tiles of a weight's rows.
                    dividing = [size for size in divisors(left) if D % (size * tensor) == 0]
                    largest = next((size for size in reversed(dividing) if fits_torus(axes_at(size))), 0)
                    in_tiles = (size for size in dividing if D // size % ROWS_OF_A_TILE == 0)
                    tiled = max(in_tiles, default=0)
                    tried = [axes_at(size) for size in reversed(dividing) if size in (largest, largest / 4, tiled)]
                    if 0 < largest < left:  # the other dim of each matrix may divide over what the model's dim leaves
                        tried.append(axes_at(largest) | dict(fsdp_transpose=left // largest, data=replicas))
                    for sizes in ({axis: sizes[axis] for axis in MESH_AXES} for sizes in tried):
                        batch_divides = config.batch % math.prod(sizes[axis] for axis in BATCH_AXES) == 0
                        if batch_divides and fits_torus(sizes):
                            yield sizes


def _widest(config: Config) -> int:
    """The largest `tensor` to try."""
    heads = min(kind.num_kv_heads for kind in anatomy.kinds(config))
    return min(16, config.num_heads if config.kv_lora_rank else heads)


def _widths(config: Config, num_devices: int) -> list[Config]:
    """The model, and the model padded to the largest power of two that divides the devices and adds at most 5%."""
    plain = dataclasses.replace(config, dim_multiple=1)
    model, multiple = anatomy.sizes(plain), num_devices & -num_devices
    while multiple > 1:
        padded = dataclasses.replace(config, dim_multiple=multiple)
        size = anatomy.sizes(padded)
        if all(size[dim] <= 1.05 * model[dim] for dim in anatomy.PADDED_DIMS):
            return [plain, padded] if size["D"] > model["D"] else [plain]
        multiple //= 2
    return [plain]


def _configs(config: Config) -> dict[int, list[Config]]:
    """{microbatches: a config for each policy, from the least recomputation to the most}."""
    plain = dataclasses.replace(config, mesh="", microbatches=1, core_axis="", collective_matmul=False)
    plain = dataclasses.replace(plain, double_buffer=False)
    policies = [policy for policy in REMAT_POLICIES if policy != "custom"]
    by_policy = [dataclasses.replace(plain, remat=policy, remat_tensors="") for policy in policies]
    by_policy += [dataclasses.replace(plain, remat="custom", remat_tensors=INPUTS_ON_HOST)]
    by_policy += [plain] if config.remat == "custom" else []
    if config.num_experts and config.prefetch:  # a dense model's layers are small, and gain nothing
        by_policy += [dataclasses.replace(candidate, prefetch=False) for candidate in by_policy]
    # Policies that recompute alike are sorted by what they offload, the least first.
    by_policy.sort(key=lambda candidate: (_recomputed_flops(candidate), len(anatomy.offloaded_names(candidate))))
    return {2**i: [dataclasses.replace(candidate, microbatches=2**i) for candidate in by_policy] for i in range(6)}


def _recomputed_flops(config: Config) -> float:
    """The FLOPs a token that are computed again."""
    return sum(transformer.recomputed_flops_per_token(config).values())


# Layers' inputs are all that the policy `full` saves. This one has them on the host.
INPUTS_ON_HOST = "decoder_layer_input:offload"
# The share of a step that double buffering has to save: it takes half as long again to compile.
WORTH_A_LONGER_COMPILE = 0.01


def _with_variants(fitting: list[Prediction]) -> list[Prediction]:
    """Adds the fastest with custom policies, double buffering, and other axes on a chip's dies."""
    # Double buffering needs more memory, and may leave space for another policy: so policies are tried twice.
    every = _with_own_policy, _double_buffered, _with_own_policy, _with_fewer_inputs_on_host, _with_other_core_axes
    for variants in every:
        fastest = sorted(fitting, key=lambda prediction: prediction.step_s)[:32]
        added = (variant for prediction in fastest for variant in variants(prediction))
        fitting = fitting + [variant for variant in added if not variant.shortfall(MEMORY_SHARE)]
    return fitting


# The activations that a custom policy may save on the device, without those of shared experts.
SAVABLE = ("context", "qkv_proj", "out_proj", "mlp_gate expert_gate", "mlp_up expert_up")


def _with_own_policy(prediction: Prediction) -> Iterator[Prediction]:
    """Yields the run with the results of matmuls and attention saved that leave least to recompute and fit."""
    config = prediction.run.config
    kinds = {False, config.num_experts > 0}
    layers = itertools.product(anatomy.kinds(config), kinds)
    computed = {"qkv_proj"}.union(*(anatomy.activations(kind, experts=experts) for kind, experts in layers))
    sets = {}
    for chosen in itertools.product((True, False), repeat=len(SAVABLE)):
        names = [name for names in itertools.compress(SAVABLE, chosen) for name in names.split() if name in computed]
        sets[",".join(f"{name}:device" for name in names)] = None
    policies = (dataclasses.replace(config, remat="custom", remat_tensors=names) for names in sets)
    for own in sorted(policies, key=_recomputed_flops):
        if _recomputed_flops(own) >= _recomputed_flops(config):
            return
        run = dataclasses.replace(prediction.run, config=own)
        if not _shortfall(run):
            yield predict(run)
            return


def _with_fewer_inputs_on_host(prediction: Prediction) -> Iterator[Prediction]:
    """Yields the run with the smallest share of the layers' inputs on the host, in eighths, that fits.

    If other activations are saved, too, yields another one without them, where a smaller share may fit.
    """
    config = prediction.run.config
    if "decoder_layer_input" not in anatomy.offloaded_names(config):
        return
    others = [entry for entry in config.remat_tensors.split(",") if not entry.startswith("decoder_layer_input")]
    for saved in (others, []) if others else ([],):
        tensors = (",".join([f"{INPUTS_ON_HOST}:{eighths / 8}", *saved]) for eighths in range(1, 8))
        configs = (dataclasses.replace(config, remat_tensors=names) for names in tensors)
        runs = (dataclasses.replace(prediction.run, config=each) for each in configs)
        if run := next((run for run in runs if not _shortfall(run)), None):
            yield predict(run)


def _double_buffered(prediction: Prediction) -> Iterator[Prediction]:
    """Yields the run with two layers an iteration, if that is faster by enough."""
    run = prediction.run
    with contextlib.suppress(ValueError):  # without prefetch
        variant = predict(dataclasses.replace(run, config=dataclasses.replace(run.config, double_buffer=True)))
        if variant.step_s < (1 - WORTH_A_LONGER_COMPILE) * prediction.step_s:
            yield variant


def _with_other_core_axes(prediction: Prediction) -> Iterator[Prediction]:
    """Yields the run with each other axis of even size on the two dies of a chip."""
    run = prediction.run
    even = [axis for axis in MESH_AXES if run.sizes[axis] % 2 == 0] if run.chip.devices == 2 else []
    for axis in even[:-1]:
        with contextlib.suppress(ValueError):  # it does not fit the torus
            links = links_of(run.sizes, run.chip, run.topology, num_slices=run.num_slices, core_axis=axis)
            config = dataclasses.replace(run.config, core_axis=axis)
            yield predict(dataclasses.replace(run, config=config, links=links))


def _why_no_plan(config: Config, num_devices: int, dropped: Counter[str], closest: tuple[Run, dict] | None) -> str:
    """Why nothing divides or nothing fits, with the numbers and the way out."""
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
    run, shortfall = closest
    memory, _ = memory_of(run, layers_of(run))
    state = sum(transformer.state_bytes(config).values())
    least = math.ceil(state / (run.hbm_limit * run.chip.devices))
    largest = sorted(memory.items(), key=lambda item: -item[1])[:3]
    text = ", ".join(f"{name} {nbytes / GiB:.1f}" for name, nbytes in largest)
    ways = "" if "host" in shortfall else ", or fewer tokens in a batch"
    return (
        f"nothing fits: {config.preset} on {run.num_chips:,} chips of {run.chip.name}. Nearest to it is mesh "
        f"{_mesh_text(run)}, {run.microbatches} microbatches, remat {run.config.remat}, which needs "
        f"{math.fsum(memory.values()) / GiB:.1f} GiB a device of {MEMORY_SHARE * run.hbm_limit / GiB:.1f} "
        f"({MEMORY_SHARE:.0%} of the memory): {describe_shortfall(shortfall)}. The largest parts: {text} GiB. "
        f"{least:,} chips hold the state alone; more chips{ways}"
    )


# -- command line


def _mesh_text(run: Run) -> str:
    return ",".join(f"{axis}:{size}" for axis, size in run.sizes.items() if size > 1) or "one device"


def guide_row(config: Config, num_slices: int) -> tuple[str, set[str]]:
    """The row of the guide's table for such a run: its name, and the axes that it advises."""
    length = "long" if config.seq_len >= residuals.LONG else "short"
    if config.num_experts and num_slices > 1:
        return "experts, very large", {"fsdp", "expert", "pipe"}
    if config.num_experts:
        return f"experts, {length} sequences", {"fsdp", "expert"} | ({"context"} if length == "long" else set())
    return f"dense, {length} sequences", {"fsdp"} | ({"context"} if length == "long" else set())


def reasons(plan: Plan) -> list[str]:
    """Why this is the plan, in sentences with their numbers."""
    return [
        *_against_the_guide(plan),
        *_against_other_families(plan),
        *_what_hides(plan.best),
        *_axis_on_the_dies(plan.best.run),
        _share_of_attention(plan.best),
        _use_of_memory(plan.best),
    ]


def _against_the_guide(plan: Plan) -> Iterator[str]:
    best = plan.best
    name, advised = guide_row(best.run.config, best.run.num_slices)
    axes = " + ".join(sorted(advised, key=MESH_AXES.index))
    yield f"For {name}, the guide has {axes}. Here it is {family(best)}."
    fastest = plan.families[0]
    if fastest.step_s < best.step_s:
        yield (
            f"{_mesh_text(fastest.run)} with {fastest.run.microbatches} microbatches takes {fastest.step_s:.3f} s, "
            f"{1 - fastest.step_s / best.step_s:.1%} less; within {WITHIN - 1:.0%} the simpler one is preferred."
        )


def _against_other_families(plan: Plan) -> Iterator[str]:
    best, config, num_slices = plan.best, plan.best.run.config, plan.best.run.num_slices
    uses = lambda prediction, axis: prediction.run.sizes[axis] > 1
    for axis in ("tensor", "context", "expert"):
        others = (other for other in plan.families if uses(other, axis) != uses(best, axis))
        other = next(others, best)
        if other is not best:
            yield (
                f"{'Without' if uses(best, axis) else 'With'} {axis} parallelism the best is {_mesh_text(other.run)}, "
                f"{other.step_s:.3f} s ({other.step_s / best.step_s - 1:+.1%}){_what_costs_more(other, best)}."
            )
    if num_slices > 1 and not any(uses(prediction, "pipe") for prediction in plan.families):
        why = f"{config.num_layers} layers in a multiple of {num_slices} stages do not fit"
        if config.num_dense_layers:
            why = f"the first {config.num_dense_layers} layers are dense, and stages have to be alike"
        if config.mtp:
            why = "the layer of multi-token prediction would be on the last stage alone"
        if anatomy.two_kinds(config):
            why = "global layers are a stack of their own, and stages have to be alike"
        elif config.ple_dim:
            why = "stages receive no tokens to look up their layers' embeddings"
        yield f"No mesh has stages: {why}."


def _what_costs_more(other: Prediction, best: Prediction) -> str:
    """The part of the step for which the other run takes longest beyond the best one."""
    if other.step_s <= best.step_s:
        return "; a prediction is not exact to so little"
    exposed = Counter({part.name: part.exposed_s for part in best.parts})
    more = {part.name: part.exposed_s - exposed[part.name] for part in other.parts}
    worst = max(more, key=more.get)
    return f"; {worst} takes {more[worst]:.3f} s more" if more[worst] > 0 else ""


def _what_hides(best: Prediction) -> Iterator[str]:
    for part in best.parts:
        hidden = part.seconds - part.exposed_s
        if part.resource == "communication" and hidden > 1e-3 * best.step_s:
            yield f"{si(hidden, 's')} of {part.name} hide behind compute."


def _axis_on_the_dies(run: Run) -> Iterator[str]:
    if run.chip.devices == 2:
        on_dies = (axis for axis, links in run.links.items() if any(link.name == "die to die" for link in links))
        on_dies = next(on_dies, None)
        rivals = [axis for axis, size in run.sizes.items() if size == 2 and axis != on_dies]
        cannot = f"; {' and '.join(rivals)}, of size 2, cannot be there as well" if rivals else ""
        yield f"The mesh axis on the two dies of a chip is {on_dies}{cannot}."


def _share_of_attention(best: Prediction) -> str:
    run, flops = best.run, transformer.forward_flops_per_token(transformer.without_padding(best.run.config))
    share = (flops["scores"] + flops["mix"]) / math.fsum(flops.values())
    kernel = math.fsum(part.exposed_s for part in best.parts if part.name == "attention")
    kernel_mfu = share * best.flops_per_step / kernel / run.num_chips / run.chip.bf16_flops_per_s
    decides = "; the kernel decides." if kernel > best.step_s / 2 else "."
    return (
        f"Attention is {share:.0%} of the FLOPs and {kernel / best.step_s:.0%} of the time, at an MFU of "
        f"{kernel_mfu:.0%} (the step's: {best.mfu:.0%}){decides}"
    )


def _use_of_memory(best: Prediction) -> str:
    run, config = best.run, best.run.config
    state = best.memory["weights"] + best.memory["optimizer"] + best.memory["gradients"]
    spare = run.hbm_limit - best.hbm_bytes
    return (
        f"Memory: {best.hbm_bytes / GiB:.1f} of {run.hbm_limit / GiB:.1f} GiB, {state / GiB:.1f} of it the state. "
        f"{spare / GiB:.1f} GiB are left with remat {f'{config.remat} {config.remat_tensors}'.strip()}."
    )


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
    given = [name for name in PLANNED_FLAGS if name in args]
    if given:
        raise ValueError(f"--{given[0]} is what plan finds; for one that is given: roofline.py step")
    how = dict(num_slices=num_slices, efficiency=PROGRAMS[args.program])
    planned, planned_in_fp8 = plan(config, chip, topology, **how), None
    if config.fp8 == "none" and chip.fp8_flops_per_s and chip.fp8_flops_per_s > chip.bf16_flops_per_s:
        modules = "out,mlp,moe" if config.kv_lora_rank else config.fp8_modules
        in_fp8 = dataclasses.replace(config, fp8="dynamic", fp8_modules=modules)
        planned_in_fp8 = plan(in_fp8, chip, topology, **how)
    if args.plot:
        plot({_mesh_text(prediction.run): prediction for prediction in planned.families[:8]}, args.plot)
    if args.json:
        print(json.dumps(as_json_of_plan(planned, planned_in_fp8)))
    else:
        print_as_text(planned, planned_in_fp8, args.explain)


def as_json_of_plan(plan: Plan, in_fp8: Plan | None) -> dict:
    """The object that --json prints."""
    return {
        "best": as_json(plan.best),
        "families": {family(prediction): as_json(prediction) for prediction in plan.families},
        "inseparable": inseparable(plan),
        "reasons": reasons(plan),
        "num_tried": plan.num_tried,
        "num_fitting": plan.num_fitting,
        "fp8": as_json(in_fp8.best) if in_fp8 else None,
    }


def print_as_text(plan: Plan, in_fp8: Plan | None, explain: bool) -> None:
    """Prints the best step, why it is the best, the families, and the flags of the step."""
    print(describe(plan.best, explain=explain))
    print(f"\nwhy: of {plan.num_tried:,} ways to run it {plan.num_fitting:,} fit")
    for line in reasons(plan):
        print(f"  - {line}")
    print("\nthe best of each family")
    print(f"  {'mesh':42}{'microbatches':>13}{'step':>10}{'MFU':>7}{'GiB':>6}  {'waits most for':15} how")
    for prediction in plan.families[:12]:
        run, step_s, nbytes = prediction.run, prediction.step_s, prediction.hbm_bytes
        print(
            f"  {_mesh_text(run):42}{run.microbatches:13}{si(step_s, 's'):>10}{prediction.mfu:7.1%}"
            f"{nbytes / GiB:6.1f}  {prediction.bound:15} {_how_text(run.config)}"
        )
    if alike := inseparable(plan):
        print(f"\nwithin the interval of the best, {residuals.interval(plan.best)}: {', '.join(alike)}")
        print("measured runs do not separate these; of the steps within 5% the best has the fewest axes")
    if in_fp8:
        gain = plan.best.step_s / in_fp8.best.step_s
        print(f"\nin fp8: {si(in_fp8.best.step_s, 's')}, {gain:.2f}x, with {_mesh_text(in_fp8.best.run)}")
    program = plan.best.run.program
    flags = [*flags_of(plan.best), *([f"--program={program}"] if program != "this" else [])]
    print(f"\nroofline.py step {' '.join(flags)}")


def inseparable(plan: Plan) -> list[str]:
    """The families, other than that of the best, whose step is in the interval of the best one."""
    within = residuals.interval(plan.best)
    others = (each for each in plan.families if family(each) != family(plan.best))
    return [family(each) for each in others if within.low_s <= each.step_s <= within.high_s]


def _how_text(config: Config) -> str:
    """The policy, and what else the planner has changed."""
    words = [f"{config.remat} {config.remat_tensors.replace(':device', '')}".strip()]
    words += [f"dim_multiple {config.dim_multiple}"] if config.dim_multiple > 1 else []
    words += ["double_buffer"] if config.double_buffer else []
    words += [] if config.prefetch else ["no prefetch"]
    words += [f"core_axis {config.core_axis}"] if config.core_axis else []
    return "; ".join(words)


def _flag(name: str, value) -> str:
    return f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"


def changed_flags(config: Config, sizes: dict[str, int], prediction: Prediction) -> list[str]:
    """The flags in which the run of a prediction differs from `config` on a mesh of these sizes.

    Among them are the flags that would have no effect any more.
    """
    mesh = ",".join(f"{axis}:{size}" for axis, size in prediction.run.sizes.items() if size > 1)
    flags = [f"--mesh={mesh}"] if prediction.run.sizes != sizes else []
    for name, value in dataclasses.asdict(prediction.run.config).items():
        if name != "mesh" and value != getattr(config, name):
            flags.append(_flag(name, value))
    return flags


def flags_of(prediction: Prediction) -> list[str]:
    """The flags with which `roofline.py step` gives this very prediction."""
    run = prediction.run
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
    parser.add_argument(
        "--chips", type=int, help="the number of chips, in the shape nearest to a cube, in place of --topology's"
    )
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, bytes and FLOPs")
    parser.add_argument(
        "--plot", type=command.path, metavar="FILE.png", help="draw the parts of the families' steps; needs matplotlib"
    )
    add_program_flag(parser)
    flags_lib.add_run_flags(parser, "tpu7x:4x4x4")
    parser.set_defaults(run=print_plan, parser=parser)
