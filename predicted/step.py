"""Predicts how long a training step takes, part by part, and whether the run fits in memory.

    python roofline.py step --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --explain

**Idea.** A roofline gives the least time that a step can take. This file predicts the time that it does take. The
arithmetic is the same, but is divided by the rates that programs achieve, not by the chip's peaks.
predicted/workload.py has the achieved rates, the compute time of a layer, and the memory. This file adds up the layers
of a pipeline stage over all M microbatches. It then adds the parts of a step that belong to no layer:

    loss          3 * 2*D*V FLOPs a token / C + V * 16 B / W_hbm     unembedding and softmax; MaxText 8 B
    update        28 bytes a parameter / W_hbm                       adamw: read weights, gradients, moments; write them
    repeated      (a step + 5 states / W_hbm) / check_every          copied, compared, checksummed (corruption.py)
    muon          5 (4 n + 2 n^2/m) FLOPs a parameter / C            five iterations on matrices of n x m (muon.py)

D is the width of the model and V the size of the vocabulary. C is the achieved FLOP/s of a device, W_hbm the achieved
bytes/s of its memory (HBM). "Compiled" marks a figure from a program that was compiled for TPU7x.

**Communication.** A message is hidden while the device computes, and exposed while the device waits for it. Only the
exposed time makes the step longer. By mesh axis:

    fsdp          The weights of a layer are gathered in the forward and in the backward pass. A gather hides behind the
                  compute of a neighbouring layer, and what takes longer is exposed. The gradients of a layer are
                  reduce-scattered. XLA starts this when the gradients of the MLP or the experts are computed, so it
                  hides only behind the rest of the layer's backward pass. The messages of the first and the last layer
                  are exposed. With --no-prefetch the gathers of the MLP or the experts hide behind attention of the
                  same layer, and the sums of their gradients behind its backward pass. With `fsdp_transpose` there
                  are two gathers, of a share and of all, and the sums in the reverse order; their times are added.
    tensor        Each layer gathers and reduce-scatters the residual stream twice in the forward pass and twice in the
                  backward pass. The backward pass gathers twice more, unless the gathered stream was saved. All of this
                  is exposed, because matmuls wait for it. With `collective_matmul`, messages hide behind the matmuls:
                  exposed is what takes longer than they do, and at least one of the blocks that are sent.
    context       With a ring, keys and values pass from device to device while attention computes. A hop takes as long
                  as the slowest of its links. In the backward pass their float32 gradients travel with them. Two other
                  methods are exposed: gathering the keys and values, and exchanging heads for positions (between all
                  devices of the axis, or groups of `context_heads`). So is the halo of a layer with a window.
    merging       After each hop of a ring, attention's partial result is added to a float32 sum. In the backward pass
                  the partial gradients are.
    expert        Tokens are gathered over up to experts_per_token devices, and the sums of their results are
                  reduce-scattered, in both passes. Over more devices an all-to-all dispatches tokens and another
                  combines results. All are exposed. This holds also with chunks of tokens (--moe_parts), which could
                  hide each other's messages. Compiled, two chunks hide 7% of their all-to-alls, and barriers between
                  the chunks do not raise that.
    pipe          P - 1 of v*M + P - 1 ticks are idle, with M microbatches and v rounds (pipeline.py defines both). Each
                  tick sends a message in each direction. Messages hide in ticks with forward and backward passes. They
                  are exposed in ticks with only one kind: all ticks of GPipe, the first and the last v*P - 1 of others.
    data          The gradients are all-reduced after the backward pass, which is exposed. They are all-reduced over
                  `context` too, which shards no weight. Gradients outside the experts also are over `expert`.
    host          Offloaded activations move to the host during the forward pass and back during the backward pass. They
                  hide behind attention (Efficiency.hides_offload). A batch moves to the device during the step before.

Every microbatch gathers the weights and reduce-scatters the gradients again.

**Copies** within HBM have three causes. In the forward pass, weights that are gathered ahead are copied at the end of
each iteration of the layer loop, except with `double_buffer` (fsdp.py). Gathered weights and gradients of the backward
pass are copied if a shard does not consist of whole tiles of 8 rows. Rows that are sent over `expert` are copied before
and after, if their width is not a multiple of 128.

**MFU** is `flops_per_step` over the FLOPs that the bf16 peak of all chips allows in the time of the step. It counts no
recomputation, and half of the square of causal attention. An FP8 run is measured by the bf16 peak, too, so its MFU is
up to twice its `own_precision_mfu`, which is measured by the FP8 peak.

**Cliffs.** A cliff is a size at which a kernel takes over `CLIFF` times as long per FLOP as at a neighbouring size.
Cliffs are reported here and when train.py starts. There are two kinds: a sequence whose last tiles of attention are
almost empty, and experts with dims that no tiles fit.

**Left out.** Reading the input, checkpoints, stragglers, and the compilation before the first step are not counted. Nor
is the slowdown of compute and transfers that run at the same time. Attention is assumed to be a fused kernel. Nothing
here imports JAX.
"""

import math
from dataclasses import dataclass, replace

import anatomy
import rules
from compiler_flags import PADS_SUMS
from hardware import Axis, si
from placement import MESH_AXES, WEIGHT_AXES
from predicted import matrices, transformer
from predicted.bounds import bubble
from predicted.interconnect import collective_s
from predicted.workload import (
    COLUMNS_OF_A_TILE,
    ROWS_OF_A_TILE,
    Layer,
    Run,
    after_mlp_s,
    compute_s,
    elementwise_passes,
    elementwise_s,
    host_bytes_of,
    layers_of,
    loss_chunk,
    matmul_s,
    memory_of,
    params_of_device,
    shortfall_of,
    slots_of_device,
    tables_of_device,
)

GiB = 2**30
# A size is reported if its time per FLOP is over this factor times that of a neighbouring size. Compiled programs use
# 1.3 as the limit. This one is lower because predicted factors are too low: for 4,097 tokens 1.24, compiled 1.30.
CLIFF = 1.2
# Stochastic rounding of a second moment takes as long as so many bytes of HBM traffic a parameter. Compiled: the update
# of 134 million parameters takes 2.73 million cycles for 20 bytes, and 2.15 million for 24 bytes in float32.
ROUNDING_BYTES = 10.5


@dataclass(frozen=True)
class Part:
    """One part of the step's time, on the busiest device."""

    name: str
    resource: str  # what the step waits for: compute, attention, memory, communication, host, idle, repetition
    seconds: float  # in total, both hidden and exposed
    exposed_s: float  # the seconds that this part adds to the step
    formula: str  # how the seconds are computed, with numbers, for --explain


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of one training step."""

    run: Run
    parts: list[Part]
    memory: dict[str, float]  # {what is stored: its bytes in the HBM of a device}
    host_bytes: float  # that a device stores in host memory: activations and optimizer state
    passes: dict[str, float]  # compute seconds of a stage's layers, "forward" and "backward" (with recomputation)

    @property
    def flops_per_step(self) -> float:
        """The model FLOPs of a step on all chips, without recomputation."""
        config = self.run.config
        return transformer.train_flops_per_token(config) * config.batch * config.seq_len

    @property
    def step_s(self) -> float:
        return math.fsum(part.exposed_s for part in self.parts)

    @property
    def hbm_bytes(self) -> float:
        return math.fsum(self.memory.values())

    def shortfall(self, share: float = 1.0) -> dict[str, float]:
        """The bytes that a device lacks, under the keys "hbm" and "host" for the memories that are too small.

        Empty if the run fits. A device may use `share`, between 0 and 1, of each memory.
        """
        return shortfall_of(self.run, self.hbm_bytes, self.host_bytes, share)

    @property
    def fits(self) -> bool:
        return not self.shortfall()

    @property
    def exposed_comm_s(self) -> float:
        return math.fsum(part.exposed_s for part in self.parts if part.resource == "communication")

    @property
    def tokens_per_s_per_chip(self) -> float:
        return self.run.config.batch * self.run.config.seq_len / self.step_s / self.run.num_chips

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: achieved model FLOP/s over the bf16 peak, a fraction."""
        return self.flops_per_step / self.step_s / self.run.num_chips / self.run.chip.bf16_flops_per_s

    @property
    def own_precision_mfu(self) -> float:
        """The same over the peak of the dtype in which the layers' weights are multiplied."""
        return self.mfu * self.run.chip.bf16_flops_per_s / self.run.chip.flops_per_s(self.run.dtype)

    @property
    def by_resource(self) -> dict[str, float]:
        """{resource: exposed seconds of the step that wait for it}, the largest first."""
        seconds = {}
        for part in self.parts:
            seconds[part.resource] = seconds.get(part.resource, 0) + part.exposed_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    @property
    def bound(self) -> str:
        """The resource that the step waits for longest."""
        return next(iter(self.by_resource))


# -- the step


def predict(run: Run) -> Prediction:
    """Returns the prediction for a step of a run. Raises ValueError for a run that rules.py refuses."""
    rules.check(run.config, run.sizes)
    kinds = [Kind(layer, run) for layer in layers_of(run)]
    memory, host_bytes = memory_of(run, [kind.layer for kind in kinds])
    layer_parts = [
        *_compute(run, kinds),
        _loss(run),
        _fsdp(run, kinds),
        _copies(run, kinds),
        _tensor(run, kinds),
        _context(run, kinds),
        _merging(run, kinds),
        _expert(run, kinds),
        _copies_of_rows(run, kinds),
    ]
    rest = [_gradient_sum(run), _update(run), *_muon(run)]
    rest += [_activation_offload(run, kinds, host_bytes), _optimizer_offload(run)]
    parts = [*layer_parts, *_pipe(run, math.fsum(part.exposed_s for part in layer_parts)), *rest]
    parts.append(_input(run, math.fsum(part.exposed_s for part in parts)))
    parts.append(_repeated(run, memory, math.fsum(part.exposed_s for part in parts)))
    passes = {name: math.fsum(getattr(kind, name) * kind.times for kind in kinds) for name in ("forward", "backward")}
    return Prediction(run, [part for part in parts if part.seconds], memory, host_bytes_of(run, host_bytes), passes)


class Kind:
    """The layers of one kind (dense, or with experts), and the compute time of one of them for one microbatch.

    Attributes:
      layer: the costs of one layer.
      times: (layer, microbatch) pairs of this kind that a pipeline stage runs in a step, the mean over the stages.
      by_part: {"matmul", "attention" or "elementwise": (forward, backward)}, in seconds for one such pair.
      forward: the sum of the parts' forward seconds.
      backward: the sum of the parts' backward seconds, with recomputation.
    """

    def __init__(self, layer: Layer, run: Run):
        self.layer = layer
        self.times = layer.num_layers / run.pipe * run.microbatches
        self.by_part = compute_s(run, layer)
        if run.config.remat_stage:  # the backward pass first repeats the stage's forward pass, for the layers' inputs
            self.by_part = {name: (forward, forward + backward) for name, (forward, backward) in self.by_part.items()}
        self.forward, self.backward = map(math.fsum, zip(*self.by_part.values(), strict=True))


# -- compute


def _compute(run: Run, kinds: list[Kind]) -> list[Part]:
    """The parts in which the layers compute: matmuls, attention, and elementwise work."""
    config, e = run.config, run.efficiency
    seconds = {
        name: math.fsum(sum(kind.by_part[name]) * kind.times for kind in kinds)
        for name in ("matmul", "attention", "elementwise")
    }
    flops = {"matmul": 0.0, "attention": 0.0}  # for one token, forward and backward
    recomputed = transformer.recomputed_flops_per_token(config)
    for name, forward in transformer.forward_flops_per_token(config).items():
        if name != "unembedding":
            flops["attention" if name in ("scores", "mix") else "matmul"] += 3 * forward + recomputed.get(name, 0)
    tokens = f"{config.batch * config.seq_len / math.prod(run.sizes.values()):,.0f} tokens"  # those of one device
    nbytes = math.fsum(sum(kind.layer.elementwise) * kind.layer.num_layers for kind in kinds) * run.element
    peak, speed = run.peak_flops_per_s(), run.peak_flops_per_s(run.dtype)
    reached = f"{run.flops_per_s(run.dtype) / speed:.3g}"
    tiles = f", rows of an expert to {e.expert_tile}" if config.num_experts and e.overlapped_experts else ""
    in_kernel = run.flops_per_s(run.dtype, kernel=True) / speed
    kernels = f", experts {in_kernel:.3g}" if config.num_experts and config.moe_impl == "dropless" else ""
    slower = "" if run.dtype == "bf16" else f", {si(peak, 'FLOP/s')} for what stays in bfloat16"
    formulas = {
        "matmul": f"{tokens} * {si(flops['matmul'], 'FLOP')} with what is recomputed / ({si(speed, 'FLOP/s')} * "
        f"{reached}{kernels}{slower}); dims are padded to {run.chip.mxu_size}{tiles}",
        "attention": f"{tokens} * {si(flops['attention'], 'FLOP')} of half the square / ({si(peak, 'FLOP/s')} * "
        f"{e.attention_forward:.3f} forward, {e.attention_backward:.3f} backward, for heads of 128); blocks on the "
        f"diagonal are full, the sequence is padded to tiles of {e.attention_tile}, backward has one more matmul",
        "elementwise": f"{tokens} * {elementwise_passes(run)} * {si(nbytes, 'B')} of all layers / "
        f"({si(run.hbm_bytes_per_s, 'B/s')} * {e.elementwise})",
    }
    resources = {"matmul": "compute", "attention": "attention", "elementwise": "memory"}
    return [Part(name, resources[name], s, s, formulas[name]) for name, s in seconds.items()]


def _loss(run: Run) -> Part:
    """The loss, forward and backward, for one chunk of positions after another.

    A chunk has three matmuls. The logits and the gradient of the operand (dx) each read the unembedding. The gradient
    of the unembedding (dw) is added to a float32 sum over the chunks.

    Compiled: 8 chunks of 1,024 rows of Llama 3.1 8B take 10.6 ms for the logits, and 21.9 ms for dw and its sum.
    """
    D, V = anatomy.sizes(run.config)["D"], run.config.vocab_size / run.tensor
    sequences, chunk = loss_chunk(run)
    chunks = math.ceil(run.config.seq_len / run.sizes["context"] / chunk)
    rows, in_fp8 = sequences * chunk, "unembed" in anatomy.fp8_weights(run.config)
    speed, bandwidth = run.flops_per_s("fp8" if in_fp8 else "bf16"), run.hbm_bytes_per_s * run.efficiency.hbm
    elementwise = run.hbm_bytes_per_s * run.efficiency.elementwise
    matmul, element = 2 * rows * D * V / speed, 1 if in_fp8 else run.element
    # Seconds to read the unembedding, and to read and write the float32 sum of dw.
    read, added = element * D * V / bandwidth, 8 * D * V / bandwidth
    num_chunks = chunks * run.microbatches * (1 + anatomy.runs_mtp(run.config))  # one loss more
    seconds_per_chunk = 2 * max(matmul, read) + matmul + added + rows * V * run.efficiency.logit_bytes / elementwise
    seconds = num_chunks * seconds_per_chunk
    bytes_per_logit = run.efficiency.logit_bytes
    formula = f"{num_chunks} chunks * ({rows:,.0f} positions * 3 * 2 * {D} * {V:,.0f} / {si(speed, 'FLOP/s')} + "
    formula += f"{rows:,.0f} * {V:,.0f} * {bytes_per_logit} B / {si(elementwise, 'B/s')} + "
    formula += f"8 B * {D} * {V:,.0f} / {si(bandwidth, 'B/s')})"
    return Part("loss", "compute", seconds, seconds, formula)


def _update(run: Run) -> Part:
    """The optimizer's update of a device's shard of the weights, bound by HBM."""
    config = run.config
    params = sum(params_of_device(run)) / (run.sizes["data"] if config.shard_update else 1)
    state = transformer.state_bytes(config)
    slot_bytes = 0 if config.optimizer == "adafactor" else 4 * state["optimizer"] / state["weights"]
    # Bytes a parameter: read the gradient, read and write the weight, read and write the optimizer's slots (moments).
    bytes_per_param = anatomy.BYTES[config.grad_dtype] + 4 + 4 + 2 * slot_bytes
    if config.nu_dtype == "bfloat16":
        bytes_per_param += ROUNDING_BYTES
    if config.optimizer == "muon":  # the matrices to orthogonalise are written, and the result is read
        bytes_per_param += 2 * run.element * transformer.muon_params(config) / transformer.num_params(config)
    bandwidth = run.hbm_bytes_per_s * run.efficiency.hbm
    seconds = params * bytes_per_param / bandwidth
    formula = f"{params:,.0f} parameters * {bytes_per_param:.4g} B / {si(bandwidth, 'B/s')}"
    return Part("update", "memory", seconds, seconds, formula)


def _muon(run: Run) -> list[Part]:
    """Orthogonalising the matrices of the update, and moving their shards; neither hides the other.

    A message among some devices of an axis, which share an expert, is counted as one among all of them.
    """
    config, e, seconds, moved, flops, elements = run.config, run.efficiency, 0.0, 0.0, 0.0, 0
    bandwidth, speed = run.hbm_bytes_per_s * e.hbm, run.flops_per_s("f32" if config.dtype == "float32" else "bf16")
    padded = lambda dim: math.ceil(dim / run.chip.mxu_size) * run.chip.mxu_size
    for stack in matrices.stacks(config, run.sizes):
        for a, b, c in stack.products():
            compute = 2 * padded(a) * padded(b) * padded(c) / speed
            read_and_written = run.element * (a * b + b * c + 2 * a * c) / bandwidth
            seconds += stack.per_device * matrices.ITERATIONS * max(compute, read_and_written)
        flops, elements, nbytes = flops + stack.flops, elements + stack.elements, run.element * stack.elements
        inner_first = sorted(stack.holders, key=MESH_AXES.index, reverse=True)
        if stack.holders:  # one message before and one after; and in HBM, blocks become matrices and then blocks
            moved += 2 * run.collective_s("all_to_all", nbytes, *inner_first)
            seconds += 4 * nbytes / bandwidth
        if stack.copies:
            inner_first = sorted(stack.copies, key=MESH_AXES.index, reverse=True)
            copies = math.prod(run.sizes[axis] for axis in stack.copies)
            moved += run.collective_s("all_gather", copies * nbytes, *inner_first)
    formula = f"{si(flops, 'FLOP')} / {si(speed, 'FLOP/s')}, where the {si(elements * run.element, 'B')} of matrices "
    formula += f"that a device orthogonalises, read and written in {matrices.ITERATIONS} iterations, do not take longer"
    text = f"{si(elements * run.element, 'B')} of matrices gathered, and returned"
    return [Part("muon", "compute", seconds, seconds, formula), _communication("muon", moved, moved, text)]


def _repeated(run: Run, memory: dict[str, float], step_s: float) -> Part:
    """The share of a step that runs twice (corruption.py): the step, and five times the bytes of the state.

    The state is read and written for the copy, both results are read to compare, and one for its checksums.
    """
    every, copied = run.config.check_every, memory.get("copy of the state", 0)
    bandwidth = run.hbm_bytes_per_s * run.efficiency.elementwise
    seconds = (step_s + 5 * copied / bandwidth) / every if every else 0
    formula = f"({si(step_s, 's')} + 5 * {si(copied, 'B')} / {si(bandwidth, 'B/s')}) / {every} steps"
    return Part("repeated steps", "repetition", seconds, seconds, formula)


# -- communication


def _fsdp(run: Run, kinds: list[Kind]) -> Part:
    """Gathering weights and reduce-scattering their gradients over `fsdp`; both hide behind compute, with prefetch."""
    if run.shards == 1:
        return _communication("fsdp", 0, 0)
    config = run.config
    gathers = 3 if config.remat_stage else 2
    seconds = exposed = most_hidden = 0.0
    for kind in kinds:
        gather = run.weights_s("all_gather", kind.layer.gathered_bytes(run))
        scatter = _scatter_s(run, kind.layer)
        moved = gathers * gather + scatter
        # The reduce-scatter starts when a gradient is computed, and XLA makes it end before the next layer starts.
        compute_behind = after_mlp_s(run, kind.layer) if run.efficiency.late_sums else kind.backward
        if run.gathers_ahead:
            hidden = min(gather, kind.forward)
            hidden += min((gathers - 1) * gather + min(scatter, compute_behind), kind.backward)
        else:
            hidden = _hidden_in_a_layer(run, kind, gathers, gather, scatter)
        seconds += kind.times * moved
        exposed += kind.times * (moved - hidden)
        most_hidden = max(most_hidden, hidden)
    formula = _fsdp_formula(run, kinds[-1].layer, gathers, gather, scatter, compute_behind)
    tables_s = run.microbatches * _tables_s(run)
    exposed += tables_s
    if run.gathers_ahead:  # nothing hides the first layer's gather and the last layer's scatter, in each microbatch
        exposed += run.microbatches * most_hidden
    return _communication("fsdp", seconds + tables_s, exposed, formula)


def _hidden_in_a_layer(run: Run, kind: Kind, gathers: int, gather: float, scatter: float) -> float:
    """The seconds of a layer's messages that hide behind its own compute, without prefetch, for one microbatch.

    XLA starts a layer's gathers at the start of the layer. Attention is computed while those of the MLP or experts
    arrive. Two of their three matrices are needed at the start of the MLP, the third one after two thirds of it. Beside
    the last third, attention's weights are gathered for the next layer. In the backward pass the gathers hide behind
    what is recomputed, and the sum of the MLP's gradients behind the backward pass of attention.
    """
    layer = kind.layer
    attention, mlp = ([p for p in layer.products if (p.part == "attention") == own] for own in (True, False))
    size = lambda products: math.fsum(p.k * p.n for p in products if p.part != "experts")
    others = layer.gathered_bytes(run, with_experts=False) / layer.gathered_bytes(run)
    of_mlp = 1 - others * size(attention) / size(layer.products)

    def hidden(attention_s: float, mlp_s: float) -> float:
        late = max(0, 2 / 3 * of_mlp * gather - attention_s)
        return of_mlp * gather - late - max(0, of_mlp * gather - attention_s - late - 2 / 3 * mlp_s)

    matmuls = lambda products: matmul_s(run, products)[0]
    recomputed = lambda products: matmuls([p for p in products if p.recomputed])
    kernel, elementwise = kind.by_part["attention"][0], [elementwise_s(run, n) for n in layer.elementwise]
    forward = hidden(matmuls(attention) + kernel + elementwise[0], matmuls(mlp) + elementwise[1])
    again = hidden(recomputed(attention) + kernel * layer.attention_recomputed, recomputed(mlp))
    ahead = gathers * min((1 - of_mlp) * gather, matmuls(mlp) / 3)
    return forward + (gathers - 1) * again + ahead + min(of_mlp * scatter, after_mlp_s(run, layer))


def _scatter_s(run: Run, layer: Layer) -> float:
    """The seconds to reduce-scatter a layer's gradients over `fsdp`.

    Gradients whose size is a multiple of 3 may take three torus axes at once (Run.collective_s), so they are apart.
    """
    by_3 = run.element * layer.gathered_params_by_3(run)
    sizes = (by_3, True), (layer.gradient_bytes(run) - by_3, False)
    return sum(run.weights_s("reduce_scatter", n, divisible_by_3=divisible) for n, divisible in sizes if n)


def _tables_s(run: Run) -> float:
    """The seconds to gather embedding and unembedding over `fsdp`, and to reduce-scatter their gradients."""
    config = run.config
    table = config.vocab_size * anatomy.sizes(config)["D"] / run.tensor
    tables = run.element * table * (1 if config.tied_embeddings else 2)
    columns, exchanged = anatomy.sizes(config)["A"] / run.tensor * run.element, 0.0  # of per-layer embeddings
    if run.efficiency.looks_up_columns:
        exchanged = 2 * run.weights_s("all_to_all", columns * run.tokens * run.tensor) if columns else 0.0
    else:
        tables += config.vocab_size * columns
    gathered = tables
    if "unembed" in anatomy.fp8_weights(config):
        # The unembedding is gathered in FP8. A tied table is gathered once more for the embedding, not in FP8.
        gathered += table if config.tied_embeddings else -(run.element - 1) * table
    gather = run.weights_s("all_gather", gathered)
    return gather + exchanged + run.weights_s("reduce_scatter", tables, divisible_by_3=table % 3 == 0)


def _fsdp_formula(run: Run, layer: Layer, gathers: int, gather: float, scatter: float, compute: float) -> str:
    """The formula of `_fsdp` with the numbers of one layer.

    `gather` and `scatter` are the seconds of a message, `compute` those of the compute that the scatter hides behind.
    """
    formula = f"gather {si(layer.gathered_bytes(run), 'B')} of a layer {gathers} times, {si(gather, 's')} each, "
    formula += f"reduce-scatter its gradient, {si(scatter, 's')}, over "
    formula += ", then ".join(_links_text(run, axis) for axis in WEIGHT_AXES if run.sizes[axis] > 1)
    at_once = run.weights_s("reduce_scatter", layer.gradient_bytes(run), divisible_by_3=True)
    if scatter > 1.1 * at_once:
        share = 1 - layer.gathered_params_by_3(run) / layer.gathered_params(run)
        formula += f", {share:.0%} of it round one ring (not with --xla_flags={PADS_SUMS}=true)"
    if not run.gathers_ahead:
        return f"{formula}; those of the MLP behind attention (--no-prefetch)"
    return f"{formula}, behind a layer's compute, the sum behind {si(compute, 's')} of its backward pass"


def _copies(run: Run, kinds: list[Kind]) -> Part:
    """Copies of gathered weights: to the buffer of the next layer's weights, and to align shards that split a tile."""
    config, e = run.config, run.efficiency
    if run.shards == 1 or not e.copies_weights:
        return Part("copies of weights", "memory", 0, 0, "")
    size, second = anatomy.sizes(config), run.sizes["fsdp_transpose"]
    rows, columns = size["D"] / run.sizes["fsdp"], (size["M"] or size["F"]) / run.tensor / second
    split_columns = second > 1 and columns % COLUMNS_OF_A_TILE > 0
    carried, untiled = run.gathers_ahead and not config.double_buffer, rows % ROWS_OF_A_TILE > 0
    forwards = 2 if config.remat_stage else 1
    nbytes = 0.0
    for kind in kinds:
        layer, aligned, gradients = kind.layer, 0.0, 0.0
        if untiled:  # not for the experts: fsdp shards the rows of all their matrices as if of one matrix (moe.py)
            aligned = layer.gathered_bytes(run, with_experts=False)
            gradients = layer.gradient_bytes(run, with_experts=False)
        if split_columns:  # between the two gathers, what the first one gathered
            aligned = max(aligned, layer.gathered_bytes(run) / second)
        forward = max(layer.gathered_bytes(run) if carried else 0, aligned)
        nbytes += kind.times * 2 * (forwards * forward + aligned + gradients)  # each is read and written
    seconds = nbytes / (run.hbm_bytes_per_s * e.copies)
    why = ["forward, for the next iteration"] if carried else []
    why += [f"weights and gradients: {rows:g} rows are no multiple of {ROWS_OF_A_TILE}"] if untiled else []
    why += [f"between two gathers: {columns:g} columns are no multiple of {COLUMNS_OF_A_TILE}"] if split_columns else []
    formula = f"{si(nbytes, 'B')} read and written / ({si(run.hbm_bytes_per_s, 'B/s')} * {e.copies})"
    return Part("copies of weights", "memory", seconds, seconds, f"{formula}, {'; '.join(why)}")


def _tensor(run: Run, kinds: list[Kind]) -> Part:
    """Gathering and reduce-scattering the residual stream over `tensor`."""
    if run.tensor == 1:
        return _communication("tensor", 0, 0)
    config = run.config
    stream = run.tokens * anatomy.sizes(config)["D"] * run.element
    once = run.collective_s("all_gather", stream, "tensor")
    seconds = exposed = 0.0
    for kind in kinds:
        passes = zip(_stream_messages(run, kind.layer), kind.by_part["matmul"], strict=True)
        for (overlapping, alone), matmuls in passes:
            covered = matmuls if config.collective_matmul else 0
            seconds += kind.times * (overlapping + alone) * once
            exposed += kind.times * (max(overlapping * once - covered, overlapping * once / run.tensor) + alone * once)
    # The embedding's result is scattered and the loss's operand gathered, and the reverse in the backward pass.
    outside_layers = 4 * run.microbatches * once
    seconds, exposed = seconds + outside_layers, exposed + outside_layers
    formula = f"{si(stream, 'B')} gathered or reduce-scattered {seconds / once:,.0f} times, {si(once, 's')} each, over "
    formula += f"{_links_text(run, 'tensor')}: twice a sub-layer and pass, and again what is not saved"
    formula += ", behind the matmuls" if config.collective_matmul else ""
    return _communication("tensor", seconds, exposed, formula)


def _stream_messages(run: Run, layer: Layer) -> tuple[tuple[int, float], tuple[int, float]]:
    """How often a layer gathers or reduce-scatters the stream over `tensor`, for the forward and the backward pass.

    Returns a pair for each pass. Its first number counts messages that `collective_matmul` overlaps with matmuls: those
    of attention and of a dense or shared MLP. Its second number is the messages of experts, which it does not overlap,
    as a multiple of the stream's size. If tokens are sent to experts on other devices, it is the rows of the buffers.

    The backward pass repeats two kinds of messages. It gathers the operands of column-parallel matmuls again for the
    gradients of their weights, unless remat=none saved them. It reduce-scatters attention's output projection again, if
    the stream after attention was not saved.
    """
    config = run.config
    rows, mlps = 0.0, 1
    if layer.params.experts:
        rows = config.experts_per_token * run.expert_buffer_ratio if run.sizes["expert"] > 1 else 1.0
        mlps = 1 if config.num_shared_experts else 0
    gathered_again = 0 if config.remat == "none" else 1
    scattered_again = sum(product.recomputed for product in layer.products if product.weight == "w_o")
    overlapping = 2 * (1 + mlps)
    backward = overlapping + scattered_again + (1 + mlps) * gathered_again
    return (overlapping, 2 * rows), (backward, (2 + gathered_again) * rows)


def _context(run: Run, kinds: list[Kind]) -> Part:
    """The messages of context.py. Those of a ring hide behind attention.

    A gather, an exchange of heads for positions, and the halo of a layer with a window are exposed.
    """
    ways, config = run.sizes["context"], run.config
    if ways == 1:
        return _communication("context", 0, 0)
    # Bytes of a token in one head of keys and one of values, for each of the devices along `tensor`.
    bytes_of_head = lambda kind: (anatomy.key_dim(kind) + anatomy.value_dim(kind)) / run.tensor * run.element
    windowed, everywhere = anatomy.kinds(config)[0], anatomy.kinds(config)[-1]
    head_bytes = bytes_of_head(everywhere)
    # The devices are in groups of `exchanging` neighbours. Within a group, heads are exchanged for positions. A ring,
    # if there is one, connects the groups.
    ring = rules.ring_size(config, run.sizes)
    exchanging = ways // ring
    inner, outer = split_axis(run.effective_links("context"), exchanging)
    # Key/value heads, with copies if there are fewer of them than devices in a group.
    copied = run.tensor * math.lcm(everywhere.num_kv_heads // run.tensor, exchanging)
    local = run.tokens * copied * head_bytes
    all_heads = run.tokens * (config.num_heads + copied) * head_bytes
    exchange = collective_s("all_to_all", all_heads, inner) if inner else 0.0
    round_ring = (ring - 1) * ring_hop_s(run, outer, local) if ring > 1 else 0.0
    global_share = transformer.num_global_layers(config) / anatomy.num_run_layers(config)
    halo_shards = min((config.window - 1) * ways / config.seq_len, ways - 1)
    shard = run.tokens * windowed.num_kv_heads * bytes_of_head(windowed)
    halo = ring_hop_s(run, run.effective_links("context"), shard * halo_shards) if global_share < 1 else 0.0
    in_float32 = 4 / run.element
    # {method: seconds of keys and values, of their gradients, and of exchanges for heads}
    seconds_of = {
        "ring": (round_ring, in_float32 * round_ring, exchange),
        "all_gather": (
            run.collective_s("all_gather", local * ways, "context"),
            run.collective_s("reduce_scatter", local * ways * in_float32, "context"),
            0.0,
        ),
        "all_to_all": (0.0, 0.0, exchange),
    }
    once, gradients, exchanged = seconds_of[config.context_impl]
    seconds = exposed = 0.0
    for kind in kinds:
        forward, backward = kind.by_part["attention"]
        # The backward pass moves keys and values once itself, and once for each forward run that it repeats. That is as
        # often as attention runs forward in both passes.
        runs_backward = _attention_forwards(run, kind)
        passes = (1, once, forward), (runs_backward, runs_backward * once + gradients, backward)
        for runs, passed, attention in passes:
            behind = attention * (1 - 1 / ring) if config.context_impl == "ring" else 0
            others = global_share * runs * exchanged + (1 - global_share) * runs * halo
            seconds += kind.times * (global_share * passed + others)
            exposed += kind.times * (max(0.0, global_share * passed - behind) + others)
    return _communication("context", seconds, exposed, _context_formula(run, ring, local))


def _context_formula(run: Run, ring: int, nbytes: float) -> str:
    how, backward = {
        "ring": (f"go round a ring of {ring}, behind attention", "with their gradients in float32"),
        "all_gather": ("are gathered", "with their gradients in float32"),
        "all_to_all": ("are exchanged for positions", "with queries, values and their gradients"),
    }[run.config.context_impl]
    return f"{si(nbytes, 'B')} of keys and values {how}, over {_links_text(run, 'context')}; backward {backward}"


def _attention_forwards(run: Run, kind: Kind) -> int:
    """How often attention's forward kernel runs for one layer and microbatch.

    It runs once in the forward pass, once more if its result is not saved, and once more if the stage is recomputed.
    """
    return 1 + [kind.layer.attention_recomputed, run.config.remat_stage].count(True)


def _merging(run: Run, kinds: list[Kind]) -> Part:
    """Adding up partial results and gradients after each hop of a ring (context.py), bound by HBM."""
    config, hops = run.config, rules.ring_size(run.config, run.sizes) - 1
    if config.context_impl != "ring":
        return Part("merging", "memory", 0, 0, "")
    config = anatomy.kinds(config)[-1]  # of layers without a window
    Hk, Hv = anatomy.key_dim(config), anatomy.value_dim(config)
    # Bytes a token: a float32 sum is read, a summand read, the float32 sum written. The kernel's results, and its
    # gradients of keys and values, have the activations' dtype.
    results = (4 + run.element + 4) * config.num_heads * Hv
    gradients = (4 + 4 + 4) * config.num_heads * Hk + (4 + run.element + 4) * config.num_kv_heads * (Hk + Hv)
    share = transformer.num_global_layers(config) / anatomy.num_run_layers(config)
    times = hops * share * run.tokens / run.tensor
    nbytes = math.fsum(kind.times * times * (_attention_forwards(run, kind) * results + gradients) for kind in kinds)
    bandwidth = run.hbm_bytes_per_s * run.efficiency.elementwise
    formula = f"{si(nbytes, 'B')} of results and gradients, {hops} times a layer / {si(bandwidth, 'B/s')}"
    return Part("merging", "memory", nbytes / bandwidth, nbytes / bandwidth, formula)


def split_axis(links: list[Axis], ways: int) -> tuple[list[Axis], list[Axis]]:
    """(links within groups of the innermost `ways` devices of a mesh axis, links between such groups).

    If a group takes a part of a torus axis, a message to the next group passes the other devices of its own group. Each
    link then carries as many messages as the group has devices on that axis.
    """
    inner, outer = [], []
    for link in links:
        size = math.gcd(ways, link.size)
        ways //= size
        if size > 1:
            inner.append(replace(link, size=size, wrap=link.wrap and size == link.size))
        if size < link.size:
            speed = link.link_bytes_per_s / size
            outer.append(replace(link, size=link.size // size, link_bytes_per_s=speed, hop_s=link.hop_s * size))
    return inner, outer


def ring_hop_s(run: Run, links: list[Axis], nbytes: float) -> float:
    """The seconds until every device of a ring over these links has sent `nbytes` to the next.

    If the ring goes over both devices of each chip, only one of the two sends to the next chip. That device has the
    full bandwidth of the chip's link, not half of it.
    """
    share = run.chip.devices if links[0].name == "die to die" else 1
    speeds = [link.link_bytes_per_s * (1 if link.name == "die to die" else share) for link in links]
    return max(link.hop_s + nbytes / speed for link, speed in zip(links, speeds, strict=True))


def _expert(run: Run, kinds: list[Kind]) -> Part:
    """Sending tokens to their experts over `expert`, and the results back."""
    if run.sizes["expert"] == 1:
        return _communication("expert", 0, 0)
    sent = run.tokens * anatomy.sizes(run.config)["D"] / run.tensor * run.element
    times = _exchanges(run)
    in_fp8 = 0.0  # of the times
    if run.gathered_over or run.config.moe_impl == "reference":  # tokens are gathered, and results reduce-scattered
        sent *= run.sizes["expert"]
        once = run.collective_s("all_gather", sent, "expert")
        if run.gathered_over and "expert_gate" in anatomy.fp8_weights(run.config):  # the gathers of tokens
            in_fp8 = times - 3
    else:
        sent *= run.config.experts_per_token * run.expert_work
        once = run.collective_s("all_to_all", sent, "expert")
    seconds = (times - in_fp8 / 2) * once * _mixtures(kinds)
    formula = f"{times} times {si(sent, 'B')} of a layer's tokens dispatched or combined, {si(once, 's')} each, over "
    formula += _links_text(run, "expert")
    return _communication("expert", seconds, seconds, formula)


def _exchanges(run: Run) -> int:
    """How often a layer sends rows over `expert` for a microbatch.

    Dispatch and combine are sent in both passes. The backward pass repeats those whose result it reads, if it is not
    saved: the rows of the dispatch, and those of the combine if the router's weights multiply them.
    """
    read = {"expert_input"} if run.efficiency.weighted_before else {"expert_input", "expert_down"}
    return 4 + len(read - anatomy.saved_names(run.config))


def _mixtures(kinds: list[Kind]) -> float:
    """The (layer, microbatch) pairs that a stage runs in a step, of layers with experts."""
    return sum(kind.times for kind in kinds if kind.layer.params.experts)


def _copies_of_rows(run: Run, kinds: list[Kind]) -> Part:
    """Copies that make rows contiguous for an exchange, if 128 does not divide their width (moe.contiguous_rows).

    Compiled for gpt-oss-120b on fsdp:64,expert:2, with rows of 2880: the buffer has 327,680 of them, twice as many as
    are sent. Each of six exchanges pads its operand and its result to 3072 columns, reshapes them, and slices the
    result. That is 32 copies a layer and microbatch, 4.0 s of a step of 15.4 s. This formula is fitted to that: one
    copy of the rows that are sent and three of the buffer, at the speed of elementwise work.
    """
    config, width = run.config, anatomy.sizes(run.config)["D"] // run.tensor
    if run.gathered_over or config.moe_impl != "dropless" or width % COLUMNS_OF_A_TILE == 0:
        return Part("copies of rows", "memory", 0, 0, "")
    rows = run.tokens * config.experts_per_token * (1 + 3 * run.expert_buffer_ratio)
    nbytes = 2 * _exchanges(run) * _mixtures(kinds) * rows * width * run.element
    seconds = nbytes / (run.hbm_bytes_per_s * run.efficiency.copies)
    formula = f"{si(nbytes, 'B')} read and written / ({si(run.hbm_bytes_per_s, 'B/s')} * {run.efficiency.copies})"
    return Part(
        "copies of rows", "memory", seconds, seconds, f"{formula}: {width} is no multiple of {COLUMNS_OF_A_TILE}"
    )


def _pipe(run: Run, working_s: float) -> list[Part]:
    """The idle ticks of a pipeline, and its messages. `working_s` is the seconds of a step in which a stage works."""
    if run.pipe == 1:
        return []
    rounds = run.config.pipeline_rounds
    passes = rounds * run.microbatches
    tick, ticks = working_s / passes, passes + run.pipe - 1
    # The ticks that have only forward or only backward passes: they hide no message.
    alone = ticks if run.config.pipeline_schedule == "gpipe" else rounds * run.pipe - 1
    stream = run.tokens * anatomy.sizes(run.config)["D"] * run.element / run.tensor
    message = max(link.hop_s + stream / link.link_bytes_per_s for link in run.effective_links("pipe"))
    exposed = 2 * alone * message + (ticks - alone) * max(0.0, 2 * message - tick)
    vM = f"{rounds}*M" if rounds > 1 else "M"
    share = bubble(run.pipe, run.microbatches, rounds)
    idle, links = (run.pipe - 1) * tick, _links_text(run, "pipe")
    bubble_formula = f"P - 1 = {run.pipe - 1} ticks of {si(tick, 's')}: (P-1)/({vM}+P-1) = {share:.1%}"
    formula = f"{si(stream, 'B')} to the next stage or the previous, {si(message, 's')} each, over {links}"
    return [
        Part("pipeline bubble", "idle", idle, idle, bubble_formula),
        _communication("pipe", 2 * ticks * message, exposed, formula),
    ]


def _gradient_sum(run: Run) -> Part:
    """Adding up the gradients of devices that hold the same weights, after the backward pass."""
    sizes, g = run.sizes, anatomy.BYTES[run.config.grad_dtype]
    experts, others = params_of_device(run)
    seconds = 0.0
    for params, axes in ((experts, ("context", "data")), (others, ("context", "expert", "data"))):
        if run.config.shard_update:
            seconds += run.collective_s("reduce_scatter", g * params, *axes)
            seconds += run.collective_s("all_gather", run.element * params, *axes)
        else:
            seconds += run.collective_s("all_reduce", g * params, *axes)
    if run.pipe > 1:
        seconds += run.collective_s("all_reduce", 4 * tables_of_device(run), "pipe")
    replicas = " and ".join(_links_text(run, axis) for axis in ("context", "expert", "data") if sizes[axis] > 1)
    how = "reduce-scatter, then all-gather the weights of" if run.config.shard_update else "all-reduce"
    formula = f"{how} {si(g * (experts + others), 'B')} over {replicas}, after the backward pass"
    if run.pipe > 1:
        formula += f"; of embedding and unembedding over {_links_text(run, 'pipe')} too"
    return Part("gradient sum", "communication", seconds, seconds, formula)


def _input(run: Run, step_s: float) -> Part:
    """Moving a device's share of the next batch from the host: five arrays of 4 bytes a token."""
    nbytes = run.tokens * run.microbatches * 5 * 4
    seconds = nbytes / run.host_bytes_per_s
    formula = f"{si(nbytes, 'B')} of tokens, targets, documents, positions, weights of the loss / "
    formula += f"{si(run.host_bytes_per_s, 'B/s')}, while the step before computes"
    return Part("input", "host", seconds, max(0.0, seconds - step_s), formula)


def _activation_offload(run: Run, kinds: list[Kind], nbytes: float) -> Part:
    """Moving offloaded activations to the host and back; `nbytes` is those of a microbatch on a device."""
    speed = run.host_bytes_per_s
    one_way = nbytes * run.microbatches / speed
    hiding = [(*kind.by_part[name], kind.times) for kind in kinds for name in run.efficiency.hides_offload]
    forward = math.fsum(seconds * times for seconds, _, times in hiding)
    backward = math.fsum(seconds * times for _, seconds, times in hiding)
    exposed = max(0.0, one_way - forward) + max(0.0, one_way - backward)
    formula = f"{si(nbytes * run.microbatches, 'B')} / {si(speed, 'B/s')}, out behind {si(forward, 's')} of "
    formula += f"{', '.join(run.efficiency.hides_offload)}, back behind {si(backward, 's')}"
    return Part("host offload", "host", 2 * one_way, exposed, formula)


def _optimizer_offload(run: Run) -> Part:
    """Moving an offloaded optimizer state to the device and back, layer by layer or at once; nothing hides it."""
    nbytes = slots_of_device(run) if run.config.offload_optimizer else 0.0
    seconds = 2 * nbytes / run.host_bytes_per_s
    formula = f"2 * {si(nbytes, 'B')} / {si(run.host_bytes_per_s, 'B/s')}, to the device and back"
    return Part("optimizer offload", "host", seconds, seconds, formula)


def _communication(axis: str, seconds: float, exposed: float, formula: str = "") -> Part:
    """The part of the messages over a mesh axis, with its seconds in total and exposed."""
    return Part(f"{axis} communication", "communication", seconds, exposed, formula)


def _links_text(run: Run, axis: str) -> str:
    """A mesh axis and its links, as in "fsdp:128 on x (4 of 44.5 GB/s)".

    The 4 are the devices along x; the rate is what programs achieve one way, a device's share of the link.
    """
    links = (f"{link.name} ({link.size} of {si(link.link_bytes_per_s, 'B/s')})" for link in run.effective_links(axis))
    return f"{axis}:{run.sizes[axis]} on {', '.join(links)}"


# -- cliffs, and what does not fit


def cliffs(run: Run) -> list[str]:
    """Returns a sentence for each size at which a kernel takes over CLIFF times as long as at a neighbouring size."""
    return [*_cliff_of_attention(run), *_cliff_of_experts(run)]


def _cliff_of_attention(run: Run) -> list[str]:
    """A sentence if the last tiles of a sequence are almost empty, as attention's kernel computes whole tiles."""
    config, T, ring = run.config, run.config.seq_len, rules.ring_size(run.config, run.sizes)
    # Positions of the sequence for one tile on each device of a ring. The tiles of shorter sequences have 256.
    unit = lambda size: ring * (size if T >= ring * size else 256)
    block, tile = unit(run.efficiency.attention_block), unit(run.efficiency.attention_tile)
    full_blocks = T // block * block
    if config.attention == "reference" or not full_blocks:
        return []

    def seconds_per_flop(seq_len: int) -> float:
        """The seconds that attention takes for one of its model FLOPs, in sequences of `seq_len`."""
        resized = replace(run, config=replace(config, seq_len=seq_len))
        flops = transformer.forward_flops_per_token(resized.config)
        seconds = sum(layer.num_layers * sum(compute_s(resized, layer)["attention"]) for layer in layers_of(resized))
        return seconds / resized.tokens / (flops["scores"] + flops["mix"])

    factor, nearest = seconds_per_flop(T) / seconds_per_flop(full_blocks), round(T / tile) * tile
    why = f"as with {full_blocks:,}: its last tiles are almost empty; the nearest size that fills them is {nearest:,}"
    return [f"seq_len={T:,}: attention takes {factor:.2f} times as long a FLOP {why}"] if factor > CLIFF else []


def _cliff_of_experts(run: Run) -> list[str]:
    """A sentence if a dim of the experts' matrices is not a multiple of 128 on each device.

    The experts' kernels split only such multiples into tiles. Any other dim is one tile, and a kernel that then does
    not fit in VMEM is refused.
    """
    config, tensor, stored = run.config, run.tensor, anatomy.sizes(run.config)
    # (size, number of devices that share it)
    dims = {"model_dim": (stored["D"], 1), "expert_dim": (stored["M"], tensor)}
    # The dims that are no such multiple, and the next size that is one.
    rounded_up = {name: -(-size // (128 * n)) * 128 * n for name, (size, n) in dims.items() if size % (128 * n)}
    if not config.num_experts or config.moe_impl != "dropless" or not rounded_up:
        return []
    import groups  # here: it needs numpy, which other predictions do not

    rows, experts = round(run.tokens * config.experts_per_token), config.num_experts // run.sizes["expert"]
    dtype = "float8_e4m3fn" if "expert_up" in anatomy.fp8_weights(config) else config.dtype
    is_gated = anatomy.glu_in_kernel(config)

    def slowdown(model_dim: int = stored["D"], expert_dim: int = stored["M"]) -> float:
        """The slowest kernel's time over the least that the matrix units need; infinite if a kernel is refused."""
        D, M = model_dim, expert_dim // tensor
        down = M, D, groups.Variant(transpose_rhs=True)
        matmuls = (D, M, groups.Variant(gated=is_gated)), down, (D, M, groups.Variant(gradient=is_gated))
        try:
            tiles = [(groups.default_tiles(rows, K, N, experts, dtype, variant=v), K, N) for K, N, v in matmuls]
            tiles += [(groups.default_tgmm_tiles(rows, K, N, experts, dtype), K, N) for K, N in ((D, M), (M, D))]
        except ValueError:
            return math.inf
        return max(groups.slowdown(*each) for each in tiles)

    factor, least = slowdown(), slowdown(**rounded_up)
    if factor <= CLIFF * least and factor < math.inf:
        return []
    sizes = " and ".join(f"{name}={dims[name][0]:,}" for name in rounded_up)
    nearest = " and ".join(f"{size:,}" for size in rounded_up.values())
    effect = "are refused" if factor == math.inf else f"take {factor / least:.2f} times as long as with {nearest}"
    return [f"{sizes}: the experts' kernels {effect}, as they tile only multiples of 128; the nearest is {nearest}"]


def describe_shortfall(shortfall: dict[str, float]) -> str:
    """The result of `Prediction.shortfall` in words; an empty string if the run fits."""
    names = {"hbm": "", "host": " of the host's memory"}
    return " and ".join(f"{nbytes / GiB:.2f} GiB{names[memory]} short" for memory, nbytes in shortfall.items())
