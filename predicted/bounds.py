"""Parallelism bounds: how far a model can be split until its messages take longer than its FLOPs. Arithmetic, no jax.

    python roofline.py bounds --preset=llama3.1-70b --topology=tpu7x:4x8x8 --mesh=fsdp:128,tensor:4 --explain
    python roofline.py bounds --preset=deepseek-v3 --topology=tpu7x:8x8x8 --mesh=fsdp:64,expert:16 --batch=4096

**Idea** (the scaling book: Austin et al. 2025, part 5, https://jax-ml.github.io/scaling-book/training). More chips
divide the FLOPs. They divide the bytes that each chip sends less, or not at all. If both overlap, a step takes
max(FLOPs/C, bytes/W), and it is compute-bound while

    FLOPs / bytes  >  alpha = C / W        C: FLOP/s of a chip; W: bytes/s at which its links gather an array

**Formula.** A batch has B tokens. A layer's MLP is [D, F] and [F, D]. All is in bf16, 2 bytes an element; b bytes
change alpha by b/2.

    FSDP, X ways         a weight [D, F] is gathered and multiplied by B/X tokens: 2*(B/X)*D*F FLOPs for 2*D*F bytes

                             B/X > alpha

                         In the backward pass two matmuls hide a gather and a reduce-scatter; in data parallelism
                         they hide an all-reduce, which takes twice as long as a gather. The ratio is the same. B/X are
                         the tokens of one gathered copy of the weights: of one chip, or of the Y chips that share it
                         by tensor parallelism.
    experts              the weight of an expert multiplies k/E of the tokens:  B/X > alpha * E/k
    tensor, Y ways       [B, D] is gathered and reduce-scattered, 4*B*D bytes, for 4*B*D*F/Y FLOPs; B cancels

                             F > Y * alpha

                         Y = 4 on one axis of TPU7x needs F = 46k. A gate adds half of the FLOPs and no bytes. Attention
                         adds as many bytes and few FLOPs. A full layer counts like F = (its parameters) / 4D: for
                         Llama 3.1 70B 26,112 instead of 28,672.
    both, N = X*Y        FSDP gathers 1/Y of the weights, tensor parallelism moves 1/X of the tokens:

                             T_math ~ B*F/N,  T_fsdp ~ alpha_x*F/Y,  T_tensor ~ alpha_y*B/X

                         T_fsdp rises with X, T_tensor falls. The larger of the two is least where they are equal:

                             X = sqrt(B*N/F * alpha_y/alpha_x)  and compute-bound for  B/N > alpha_x * alpha_y / F

                         With alpha/M on M axes these are the book's sqrt(B/F * Mx/My * N) and alpha^2/(Mx*My*F). Its
                         edition of 2025 adds the two times, as if they did not overlap: 4 times that, at the same X.
    expert, Z ways       each token goes to k experts and back, by two all-to-alls of D*k*b bytes a token each. On a
                         ring of Z they are relayed, (Z+2)/4 of them over W (predicted/interconnect.py). An expert
                         has n matmuls, 3 with a gate, of 2*D*M*k FLOPs a token; k and B cancel

                             M > alpha * (Z+2) / (2*n)

                         MaxText (docs/guides/optimization/custom_model.md) has 4*M/Z > alpha: long rings and n = 2.
    context, Z ways      ring attention (arXiv:2310.01889): the keys and values of K heads, 4*K*H bytes a token, go once
                         around. The chip's T/Z queries of N heads attend to them: 4*N*H FLOPs a pair, half of the
                         pairs masked

                             T/Z > alpha * 2*K/N                    without a mask alpha * K/N; backward has more FLOPs

    pipeline, P stages   a stage of l layers sends [B, D] one way, to its neighbour, over one link

                             3 * l * k * F > C / W_link             W_link = W/2 of a ring: 3/2 * l*k*F > alpha

                         k = 1 if dense. The cost is the bubble, the share of the step in which a stage is idle:
                         (P-1) / (v*M + P-1) with M microbatches and v rounds (circular: a stage has every P-th block
                         of layers).
    across slices        the chips of a slice do data parallelism together, each for its share of the gradients:

                             tokens of a slice > C / W_dcn * (S-1)/S          S slices

**FP8.** FP8 matmuls double C and so alpha. Weights gathered in FP8 halve the bytes of a gather, but not those of the
gradients: the backward pass binds, at alpha * 3/4. With activations in FP8, tensor parallelism has the bound of bf16.

**Strong scaling**: more chips for the same global batch. Ideally the step time falls as 1/N. FSDP stops scaling at
N = B/alpha: from there the step takes as long as its gathers, whatever N. Mixed with tensor parallelism it scales to
N = B*F/(alpha_x*alpha_y), and from there falls as 1/sqrt(N).

**On TPU7x**, in bf16, alpha is

      1,922  for the link between the dies (2 x 600 GB/s); a die has C/2 and so 961
      3,845  for three axes of the torus, rings
     11,535  for one axis, a ring: both links of a chip, 2 x 100 GB/s (12,817 at nine tenths of it)
     23,070  for one axis that does not wrap around: its second direction gains nothing
    184,560  for the network between slices, 12.5 GB/s a chip

A mesh axis may use links of several speeds (placement.py): between dies, on the torus, between slices. Each kind has a
bound of its own, which counts the devices of the inner kinds as one. So tensor:4 on the dies and two chips needs
F > 4 * 961 on the dies, and F > 2 * alpha = 23k on the torus. On four chips of one axis, or on four devices that leave
the dies to another axis, it needs 46k. Llama 3.1 70B's 28,672 and Qwen 2.5 7B's 18,944 are too narrow for that: at most
2.49 and 1.64 ways. With `data` or `context` on the dies, both dies gather the same weights through the same links, so
they need twice the tokens.

**Left out**: latency; memory; mesh axes that compete for the links of one torus axis; weights that `expert` does not
shard; windows, under which a query has fewer keys to hide the ring behind. Of the bounds only `context` counts
attention's FLOPs, which would hide more; strong scaling counts them, but not the messages of keys and values. All links
of an axis are taken to be used at once. XLA's reduce-scatter may use fewer (predicted/workload.py), so
predicted/step.py may report messages as exposed that are hidden by the bounds here.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

import command
import flags as flags_lib
from anatomy import BYTES, fp8_weights, key_dim, kinds, value_dim
from anatomy import sizes as sizes_of
from config import Config
from hardware import Axis, Chip, by, parse_topology, si
from placement import BATCH_AXES, WEIGHT_AXES, check_multiple, fill_mesh, parse_mesh
from predicted.interconnect import all_to_all, links_of, ring_hops
from predicted.transformer import kv_elements_per_layer, num_params, train_flops_per_token

# -- links


@dataclass(frozen=True)
class Wires:
    """Links and the FLOP/s of their sender: a chip, or a device, which has a share of the chip's links."""

    name: str
    flops_per_s: float
    bytes_per_s: float  # W
    link_bytes_per_s: float  # of one link, one way
    wrap: bool  # around on every axis

    @property
    def alpha(self) -> float:
        return self.flops_per_s / self.bytes_per_s

    def __str__(self):
        C, W = si(self.flops_per_s, "FLOP/s"), si(self.bytes_per_s, "B/s")
        return f"alpha = C/W = {C} / {W} = {self.alpha:,.4g}"


def ici(chip: Chip, axes: int = 1, *, wrap: bool = True, dtype: str = "bf16") -> Wires:
    """The links of a chip on long axes of its torus: two on each axis, one if it does not wrap around."""
    if axes not in range(1, chip.torus_axes + 1):
        raise ValueError(
            f"{chip.name} has {chip.torus_axes} axes of links: 1 to {chip.torus_axes} can be used, not {axes}"
        )
    links = axes * (2 if wrap else 1)
    name = f"{axes} {'ring' if wrap else 'line'}{'s' if axes > 1 else ''}"
    return Wires(name, chip.flops_per_s(dtype), links * chip.link_bytes_per_s, chip.link_bytes_per_s, wrap)


def die_to_die(chip: Chip, *, dtype: str = "bf16") -> Wires:
    """The link between the two dies of a chip, with a die's half of the FLOP/s."""
    if not chip.die_to_die_bytes_per_s:
        raise ValueError(f"{chip.name} has no link between dies, or none is published: die_to_die_bytes_per_s is 0")
    return along(chip, [Axis(2, chip.die_to_die_bytes_per_s, wrap=False, name="die to die")], dtype=dtype)


def dcn(chip: Chip, *, dtype: str = "bf16") -> Wires:
    """A chip's share of the network between many slices."""
    speed = chip.dcn_bytes_per_s
    return Wires("slices", chip.flops_per_s(dtype), speed, speed, False)


def along(chip: Chip, pieces: Sequence[Axis], *, dtype: str = "bf16") -> Wires:
    """A device's share of the links of several axes, all of them used at once.

    An axis takes h hops of V/N bytes, so its W is link * N/h: in a ring, twice the link.
    """
    speed = sum(axis.link_bytes_per_s * axis.size / ring_hops(axis.size, wrap=axis.wrap) for axis in pieces)
    slowest = min(axis.link_bytes_per_s for axis in pieces)
    name, wrap = ", ".join(axis.name for axis in pieces), all(axis.wrap for axis in pieces)
    return Wires(name, chip.flops_per_s(dtype) / chip.devices, speed, slowest, wrap)


# -- bounds


@dataclass(frozen=True)
class Bound:
    """A bound: compute-bound if `value` is over `critical`.

    Their ratio is T_math / T_comms; for `mixed` it is the square of that.
    """

    name: str
    rule: str
    wires: str
    value: float  # what the run has, in `unit`
    critical: float  # what it needs
    unit: str
    degree: float  # ways that the run is split
    max_degree: float  # most ways that are compute-bound, with all else as it is
    working: str  # the rule with its numbers

    @property
    def holds(self) -> bool:
        return self.value >= self.critical

    @property
    def headroom(self) -> float:
        return self.value / self.critical


def data_parallel(wires: Wires, batch: float, ways: float, *, sparsity: float = 1, gradient_bytes: float = 2) -> Bound:
    """The bound of data parallelism, which all-reduces gradients during the backward pass.

    Args:
      batch: B, the tokens whose gradients one all-reduce sums.
      ways: X, the copies of the weights, each with its part of the batch; across slices, the number of slices.
      sparsity: E/k, as a token visits k of E experts.
    """
    return _batch_bound("data", wires, batch, ways, sparsity, gradient_bytes / 2)


def fsdp(
    wires: Wires, batch: float, ways: float, *, sparsity: float = 1, weight_bytes: float = 2, gradient_bytes: float = 2
) -> Bound:
    """The bound of FSDP, which gathers weights in both passes and reduce-scatters gradients in the backward pass.

    The worse pass binds: forward has 2 FLOPs a parameter and token for a gather, backward 4 for both messages. The
    arguments are those of `data_parallel`.
    """
    factor = max(weight_bytes / 2, (weight_bytes + gradient_bytes) / 4)
    return _batch_bound("fsdp", wires, batch, ways, sparsity, factor)


def _batch_bound(name: str, wires: Wires, batch: float, ways: float, sparsity: float, bytes_factor: float) -> Bound:
    _check(batch=batch, ways=ways, sparsity=sparsity, bytes=bytes_factor)
    critical = wires.alpha * sparsity * bytes_factor
    working = f"B/X = {batch:,.0f} / {ways:g} = {batch / ways:,.0f}; {wires}{_times(E_over_k=sparsity, b=bytes_factor)}"
    rule = "B/X > alpha" + (" * E/k" if sparsity > 1 else "")
    return Bound(name, rule, wires.name, batch / ways, critical, "tokens", ways, batch / critical, working)


def tensor(wires: Wires, width: float, ways: float, *, wire_bytes: float = 2) -> Bound:
    """The bound of tensor parallelism, which gathers activations before an MLP of `width` F and scatters them after."""
    _check(width=width, ways=ways, bytes=wire_bytes)
    critical = ways * wires.alpha * wire_bytes / 2
    working = f"Y = {ways:g}; {wires}{_times(b=wire_bytes / 2)}"
    max_degree = width / critical * ways
    return Bound("tensor", "F > Y * alpha", wires.name, width, critical, "width", ways, max_degree, working)


def best_split(
    fsdp_wires: Wires, tensor_wires: Wires, batch: float, chips: float, width: float, *, sparsity: float = 1
) -> float:
    """The X of N = X*Y chips at which the messages of FSDP take as long as those of tensor parallelism."""
    _check(batch=batch, chips=chips, width=width, sparsity=sparsity)
    return math.sqrt(batch * chips / width * tensor_wires.alpha / (fsdp_wires.alpha * sparsity))


def mixed(
    fsdp_wires: Wires,
    tensor_wires: Wires,
    batch: float,
    chips: float,
    width: float,
    *,
    sparsity: float = 1,
    wire_bytes: float = 2,
    overlap: bool = True,
) -> Bound:
    """The bound of FSDP and tensor parallelism on N chips, at the best split.

    Args:
      overlap: the messages of the two also overlap with each other.
    """
    _check(batch=batch, chips=chips, width=width, sparsity=sparsity, bytes=wire_bytes)
    X = best_split(fsdp_wires, tensor_wires, batch, chips, width, sparsity=sparsity)
    factor = (1 if overlap else 4) * sparsity * (wire_bytes / 2) ** 2
    critical = factor * fsdp_wires.alpha * tensor_wires.alpha / width
    rule = f"B/N > {'' if overlap else '4 * '}alpha_x * alpha_y / F{' * E/k' if sparsity > 1 else ''}"
    product = f"{fsdp_wires.alpha:,.4g} * {tensor_wires.alpha:,.4g} / {width:g}"
    working = f"{'' if factor == 1 else f'{factor:g} * '}{product}; best at X = {X:,.4g}, Y = {chips / X:,.3g}"
    wires = f"{fsdp_wires.name}; {tensor_wires.name}"
    return Bound("fsdp and tensor", rule, wires, batch / chips, critical, "tokens", chips, batch / critical, working)


def expert(wires: Wires, width: float, ways: int, *, matmuls: int = 3, wire_bytes: float = 2) -> Bound:
    """The bound of expert parallelism, whose tokens go to experts of width M and back along one axis, relayed by links.

    Args:
      matmuls: n, the matmuls of an expert: 3 with a gate.
    """
    _check(width=width, ways=ways, matmuls=matmuls, bytes=wire_bytes)
    # Bytes over the busiest link per byte that a chip holds, as if that link had W instead of W_link.
    relayed = all_to_all(1, ways, wrap=wires.wrap).link_bytes * wires.bytes_per_s / wires.link_bytes_per_s
    alpha = wires.alpha * wire_bytes / 2
    critical = alpha * relayed * 2 / matmuls
    max_degree = 2 * matmuls * width / alpha - 2 if wires.wrap else width / critical * ways
    working = f"Z = {ways:g}, relayed {relayed:.3g} times, n = {matmuls}; {wires}{_times(b=wire_bytes / 2)}"
    rule = "M > alpha * 2/n * relayed"
    return Bound("expert", rule, wires.name, width, critical, "width", ways, max(1, max_degree), working)


def context(
    wires: Wires, seq_len: float, ways: float, *, group: float = 1, causal: bool = True, wire_bytes: float = 2
) -> Bound:
    """The bound of ring attention: keys and values go around while a device's queries attend to them.

    Args:
      group: N/K, the query heads that share a key head.
    """
    _check(seq_len=seq_len, ways=ways, group=group, bytes=wire_bytes)
    critical = wires.alpha * (2 if causal else 1) / group * wire_bytes / 2
    rule = f"T/Z > alpha * {'2' if causal else '1'}*K/N"
    working = f"T/Z = {seq_len:,.0f} / {ways:g}, N/K = {group:.4g}; {wires}{_times(b=wire_bytes / 2)}"
    return Bound("context", rule, wires.name, seq_len / ways, critical, "tokens", ways, seq_len / critical, working)


def pipeline(
    wires: Wires, width: float, num_layers: float, stages: float, *, rounds: int = 1, k: int = 1, wire_bytes: float = 2
) -> Bound:
    """The bound of a pipeline, whose stages send activations to their neighbours.

    Args:
      rounds: of a circular pipeline, in which a stage has as many blocks of layers.
      k: the experts that a token visits.
    """
    _check(width=width, num_layers=num_layers, stages=stages, rounds=rounds, k=k, bytes=wire_bytes)
    layers = num_layers / (stages * rounds)
    alpha = wires.flops_per_s / wires.link_bytes_per_s
    critical = alpha * wire_bytes / 2 / (3 * layers * k)
    working = f"l = {layers:.4g}, k = {k}; C/W_link = {alpha:,.4g}{_times(b=wire_bytes / 2)}"
    max_degree = width / critical * stages
    return Bound("pipe", "3*l*k*F > C/W_link", wires.name, width, critical, "width", stages, max_degree, working)


def bubble(stages: int, microbatches: int, rounds: int = 1) -> float:
    """The share of the step in which a stage is idle: P-1 ticks, before its first microbatch or after its last one."""
    _check(stages=stages, microbatches=microbatches, rounds=rounds)
    return (stages - 1) / (rounds * microbatches + stages - 1)


def in_flight(stages: int, microbatches: int, rounds: int = 1, *, gpipe: bool = False) -> float:
    """The microbatches whose activations a stage saves at once: all with GPipe, otherwise at most 2P - 1."""
    _check(stages=stages, microbatches=microbatches, rounds=rounds)
    return microbatches if gpipe else min(microbatches, ((rounds + 1) * stages - 1) / rounds)


def _times(**factors: float) -> str:
    names = {"E_over_k": "E/k", "b": "b/2"}
    return "".join(f" * {value:.3g} ({names[name]})" for name, value in factors.items() if value != 1)


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        least = 1 if name in ("ways", "stages", "chips", "sparsity", "group") else 0
        if not (value >= least and 0 < value < math.inf):  # NaN is not, either
            raise ValueError(f"{name} must be {'1 or more' if least else 'over 0'}, not {value}")


# -- a model on a mesh


def bounds_of(config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1) -> list[Bound]:
    """Returns the bounds of each mesh axis, one for each kind of links that it uses, the innermost first.

    B is the tokens of a microbatch, as weights are gathered for each of them.
    """
    sizes = fill_mesh(parse_mesh(config.mesh), chip.devices * math.prod(topology) * num_slices)
    parts = {axis: sizes[axis] for axis in BATCH_AXES} | {"microbatches": config.microbatches}
    check_multiple("batch", config.batch, parts)
    check_multiple("seq_len", config.seq_len, {"context": sizes["context"]})
    if sizes["expert"] > 1 and not config.num_experts:
        raise ValueError(f"mesh={config.mesh!r}: expert:{sizes['expert']} is for experts, and num_experts is 0")
    dtype = matmul_dtype(config)
    wire_bytes = BYTES[config.dtype]
    gathered = 1 if dtype == "fp8" else wire_bytes  # weights travel in the dtype of the matmul
    batch = config.batch * config.seq_len / config.microbatches
    k = config.experts_per_token or 1
    sparsity = config.num_experts / k or 1
    width = sizes_of(config)["M"] or sizes_of(config)["F"]
    kind = kinds(config)[-1]  # keys and values that a ring passes on are those of layers without a window
    group = kind.num_heads * (key_dim(kind) + value_dim(kind)) / kv_elements_per_layer(kind)
    links = links_of(sizes, chip, topology, num_slices=num_slices, core_axis=config.core_axis)
    data, replicas = sizes["data"], sizes["data"] * sizes["context"]
    on_torus = {}
    result = []
    for axis, pieces in links.items():
        inner = 1  # the devices on inner links, which count as one
        for level, same_level in groupby(pieces, _level):
            same_level = list(same_level)
            wires = along(chip, same_level, dtype=dtype)
            ways = sizes[axis] / inner
            weights = dict(sparsity=sparsity, gradient_bytes=wire_bytes)
            if axis == "data":
                result += [data_parallel(wires, batch, data / inner, **weights)]
            elif axis in WEIGHT_AXES:
                # fsdp_transpose gathers what fsdp has gathered.
                shards = ways * (sizes["fsdp"] if axis == "fsdp_transpose" else 1)
                bound = fsdp(wires, batch, replicas * shards, weight_bytes=gathered, **weights)
                result += [replace(bound, name=axis)]
            elif axis == "context":
                result += [context(wires, config.seq_len, ways, group=group, wire_bytes=wire_bytes)]
                result += [data_parallel(wires, batch, replicas / inner, **weights)]
            elif axis == "tensor":
                result += [tensor(wires, width, ways, wire_bytes=wire_bytes)]
            elif axis == "expert":
                longest = max(same_level, key=lambda piece: piece.size)
                ring = along(chip, [longest], dtype=dtype)
                result += [expert(ring, width, longest.size, wire_bytes=wire_bytes)]
            elif axis == "pipe":
                result += [pipeline(wires, width, config.num_layers, ways, k=k, wire_bytes=wire_bytes)]
            if level == "torus":
                on_torus[axis] = wires, ways
            inner *= math.prod(piece.size for piece in same_level)
    if {"fsdp", "tensor"} <= {*on_torus}:
        (fsdp_wires, X), (tensor_wires, Y) = on_torus["fsdp"], on_torus["tensor"]
        options = dict(sparsity=sparsity, wire_bytes=wire_bytes)
        result += [mixed(fsdp_wires, tensor_wires, batch, replicas * X * Y, width, **options)]
    return result


def matmul_dtype(config: Config) -> str:
    """The dtype of most FLOPs: those of the MLP, or of the routed experts."""
    return "fp8" if fp8_weights(config) & {"expert_up" if config.num_experts else "w_up"} else "bf16"


def _level(piece: Axis) -> str:
    kinds = {"die to die": "dies", "slices": "slices"}
    return next((kind for end, kind in kinds.items() if piece.name.endswith(end)), "torus")


# -- strong scaling


@dataclass(frozen=True)
class Work:
    """The work of a training step, which does not depend on the number of chips."""

    batch: float  # B, in tokens: of the full step, and fixed
    flops_per_token: float
    params: float
    activations: float  # elements a token that a forward pass gathers and scatters under tensor parallelism
    wire_bytes: float = 2  # of an element, of weights and activations


def work_of(config: Config) -> Work:
    """The work of a config: tensor parallelism moves [B, D] twice for an attention and twice for an MLP."""
    batch, activations = config.batch * config.seq_len, 4 * config.num_layers * sizes_of(config)["D"]
    return Work(batch, train_flops_per_token(config), num_params(config), activations, BYTES[config.dtype])


def split_wires(chip: Chip, *, dtype: str = "bf16") -> tuple[Wires, Wires, Wires]:
    """Returns all axes of the torus for FSDP alone; all but one, and that one, for FSDP with tensor parallelism."""
    return tuple(ici(chip, axes, dtype=dtype) for axes in (chip.torus_axes, chip.torus_axes - 1, 1))


def step_seconds(work: Work, chip: Chip, chips: float, tensor_ways: float = 1, *, dtype: str = "bf16") -> float:
    """The time of a step with FSDP over all axes, or with tensor parallelism on one of them.

    Each pass takes max(FLOPs, messages of weights, messages of activations). A third of the FLOPs is forward. Forward
    gathers the weights once; backward gathers and reduce-scatters them. Forward moves the activations twice; backward
    three times, as it gathers the sharded ones again for the gradients of the weights.
    """
    _check(chips=chips, ways=tensor_ways)
    all_axes, *split_axes = split_wires(chip, dtype=dtype)
    fsdp_wires, tensor_wires = split_axes if tensor_ways > 1 else (all_axes, all_axes)
    math_s = work.batch * work.flops_per_token / chips / all_axes.flops_per_s
    weights_s = work.wire_bytes * work.params / tensor_ways / fsdp_wires.bytes_per_s
    tokens = work.batch * tensor_ways / chips
    activations_s = work.wire_bytes * work.activations * tokens / tensor_wires.bytes_per_s * (tensor_ways > 1)
    return max(math_s / 3, weights_s, activations_s) + max(math_s * 2 / 3, 2 * weights_s, 1.5 * activations_s)


def stops_at(work: Work, chip: Chip, *, dtype: str = "bf16") -> dict[str, float]:
    """Returns the chips from which messages take longer than FLOPs, with FSDP alone and with the best mix.

    Forward takes m/N for FLOPs, a/Y for gathers and c*Y/N for activations. FSDP alone stops scaling at N = m/a. With
    the best Y = sqrt(a*N/c) both messages take sqrt(a*c/N), which gives N = m*m / (a*c). FSDP alone may be the best.
    """
    all_axes, fsdp_wires, tensor_wires = split_wires(chip, dtype=dtype)
    math_s = work.batch * work.flops_per_token / 3 / all_axes.flops_per_s
    weight_bytes, activation_bytes = work.wire_bytes * work.params, work.wire_bytes * work.activations * work.batch
    product = weight_bytes / fsdp_wires.bytes_per_s * activation_bytes / tensor_wires.bytes_per_s
    fsdp_alone = math_s * all_axes.bytes_per_s / weight_bytes
    return {"fsdp": fsdp_alone, "mixed": max(fsdp_alone, math_s**2 / product)}


def strong_scaling(work: Work, chip: Chip, *, dtype: str = "bf16") -> list[dict]:
    """Returns step times of the same batch on 16 chips up to the largest pod, as if every axis wrapped around.

    Efficiency is the time of the FLOPs over that of the step.
    """
    largest = max(map(math.prod, chip.pods))
    rows = []
    for chips in sorted({2**i for i in range(4, 20) if 2**i < largest} | {largest}):
        compute_s = work.batch * work.flops_per_token / chips / chip.flops_per_s(dtype)
        times = {ways: step_seconds(work, chip, chips, ways, dtype=dtype) for ways in (1, 2, 4, 8, 16, 32, 64)}
        ways = min((ways for ways in times if chips % ways == 0), key=times.get)
        row = dict(chips=chips, tokens_per_chip=work.batch / chips, compute_s=compute_s, tensor_ways=ways)
        for name, seconds in dict(fsdp=times[1], mixed=times[ways]).items():
            row |= {f"{name}_s": seconds, f"{name}_efficiency": compute_s / seconds}
        rows.append(row)
    return rows


def batch_sweep(work: Work, chip: Chip, chips: int, *, dtype: str = "bf16") -> list[dict]:
    """Returns step times of the same chips, FSDP over all axes, for an eighth of the batch to eight times it.

    FLOPs grow with the batch; the messages of the weights do not, and end up hidden.
    """
    rows = []
    for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8):
        scaled = replace(work, batch=work.batch * factor)
        compute_s = scaled.batch * scaled.flops_per_token / chips / chip.flops_per_s(dtype)
        step_s = step_seconds(scaled, chip, chips, dtype=dtype)
        row = dict(batch=scaled.batch, tokens_per_chip=scaled.batch / chips, compute_s=compute_s, step_s=step_s)
        exposed_s = 0.0 if math.isclose(step_s, compute_s) else step_s - compute_s
        rows.append(row | dict(exposed_s=exposed_s, efficiency=compute_s / step_s))
    return rows


# -- command line


def print_bounds(args: argparse.Namespace) -> None:
    """Prints the bounds of a run, then its strong scaling and other batches."""
    config = flags_lib.from_args(args)
    args.topology, args.num_slices = flags_lib.slice_of(args)
    chip, topology = parse_topology(args.topology)
    bounds = bounds_of(config, chip, topology, num_slices=args.num_slices)
    work, dtype = work_of(config), matmul_dtype(config)
    chips = math.prod(topology) * args.num_slices
    sweep = batch_sweep(work, chip, chips, dtype=dtype) if chips > 1 else []
    rows, stops = strong_scaling(work, chip, dtype=dtype), stops_at(work, chip, dtype=dtype)
    sizes = fill_mesh(parse_mesh(config.mesh), chip.devices * math.prod(topology) * args.num_slices)
    idle = bubble(sizes["pipe"], config.microbatches, config.pipeline_rounds)
    title = f"{config.preset}, {work.batch:,} tokens a step, on {chip.name}"
    if args.plot:
        plot_strong_scaling(title, rows, stops, args.plot)
    if args.json:
        result = dict(kind="predicted", preset=config.preset, topology=args.topology, num_slices=args.num_slices)
        result |= dict(mesh={axis: size for axis, size in sizes.items() if size > 1}, bubble=idle)
        result["bounds"] = [asdict(bound) | dict(holds=bound.holds, headroom=bound.headroom) for bound in bounds]
        return print(json.dumps(result | dict(batch_sweep=sweep, strong_scaling=rows, stops_at=stops)))
    mesh = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
    slices = f"{args.num_slices} slices of " if args.num_slices > 1 else ""
    tokens = work.batch / (math.prod(topology) * args.num_slices)
    print(f"{title}:{by(topology)}, predicted\n  mesh  {slices}{mesh}; {tokens:,.0f} tokens a chip\n")
    print(f"  {'bound':17}{'links':22}{'has':>11}{'needs':>11}{'':9}{'ratio':>6}{'ways':>7}{'at most':>9}")
    for bound in bounds:
        cells = f"{bound.value:11,.0f}{bound.critical:11,.0f} {bound.unit:8}{bound.headroom:6.2f}{bound.degree:7,g}"
        most = f"{bound.max_degree:9,.{2 if bound.max_degree < 100 else 0}f}"
        print(f"{' ' if bound.holds else '!'} {bound.name:17}{bound.wires:22}{cells}{most}")
        if args.explain:
            print(f"      {bound.rule}:  {bound.working}")
    if not bounds:
        print("  none: no device sends anything")
    print("\n! messages take longer than FLOPs. ratio: has / needs; at most: the most ways that are compute-bound.")
    if idle:
        print(f"bubble of {sizes['pipe']} stages and {config.microbatches} microbatches: {idle:.1%} of the step")
    if sweep:
        print("\nOther batches on these chips, FSDP alone, every axis a ring, predicted")
        print(f"{'tokens':>13}{'a chip':>11}{'FLOPs':>11}{'exposed':>11}{'step':>11}")
    for row in sweep:
        tokens = f"{row['batch']:13,.0f}{row['tokens_per_chip']:11,.0f}"
        times = "".join(f"{si(row[name], 's'):>11}" for name in ("compute_s", "exposed_s", "step_s"))
        print(f"{tokens}{times}{row['efficiency']:7.0%}")
    print(f"\nStrong scaling, the same {work.batch:,} tokens on more chips, every axis a ring, predicted")
    print(f"{'chips':>7}{'tokens':>11}{'FLOPs':>11}{'FSDP':>11}{'':7}{'mixed':>11}{'':7} tensor")
    for row in rows:
        cells = (f"{si(row[f'{name}_s'], 's'):>11}{row[f'{name}_efficiency']:7.0%}" for name in ("fsdp", "mixed"))
        ideal = f"{row['tokens_per_chip']:11,.0f}{si(row['compute_s'], 's'):>11}"
        print(f"{row['chips']:7,}{ideal}{''.join(cells)}{row['tensor_ways']:7}")
    print(f"FSDP is bound by its messages from {stops['fsdp']:,.0f} chips on, the best mix from {stops['mixed']:,.0f}.")


def plot_strong_scaling(title: str, rows: list[dict], stops: dict[str, float], path: str) -> None:
    """Draws the step time of FSDP and of the best mix against chips, and where each becomes bound by messages."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    chips = [row["chips"] for row in rows]
    looks = {"compute": ("FLOPs alone", "k:"), "fsdp": ("FSDP", "C0.-"), "mixed": ("FSDP and tensor", "C1.-")}
    for name, (label, look) in looks.items():
        panel.loglog(chips, [row[f"{name}_s"] for row in rows], look, label=label)
    for name, color in dict(fsdp="C0", mixed="C1").items():
        if chips[0] < stops[name] < chips[-1]:
            panel.axvline(stops[name], color=color, ls="--", lw=0.8, label=f"{stops[name]:,.0f} chips")
    panel.set(title=f"{title}, predicted", xlabel="chips", ylabel="time of a step, s")
    panel.set_xticks(chips[::2], [f"{count:,}" for count in chips[::2]])
    panel.xaxis.set_minor_formatter("")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=120)


def add_bounds_command(commands) -> None:
    about = "which axes of a mesh are bound by messages; step time against chips"
    style = dict(allow_abbrev=False, usage="%(prog)s [--flag=value ...]")
    parser = commands.add_parser("bounds", help=about, description=about, **style)
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, tokens and chips")
    parser.add_argument(
        "--plot", type=command.path, metavar="FILE.png", help="draw the step time against chips; needs matplotlib"
    )
    flags_lib.add_run_flags(parser, "tpu7x:4x4x4", without_preset="tpu7x:2x2x1")  # tiny is for a host
    parser.set_defaults(run=print_bounds, parser=parser)
