"""How long a training step takes, and whether it fits, predicted: every part of the step with its formula.

    python roofline.py step --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --explain
    python roofline.py step --preset=qwen3-235b-a22b --topology=tpu7x:4x8x8 --batch=2048 --json

**Idea.** A roofline says what a step must take at least. This predicts what it takes: the same arithmetic, with each
part divided by what programs reach of the chip's figures. predicted/workload.py has these efficiencies, the time that a
layer computes, and the memory. Here the layers of a stage and all M microbatches are added up, with what no layer has:

    loss          3 * 2*D*V FLOPs a token / C + V * 16 B / W_hbm     unembedding and softmax
    update        28 bytes a parameter / W_hbm                       adamw: read weights, gradients, moments; write them

**Communication.** It makes the step longer only by its exposed part, which nothing hides:

    fsdp          A layer is gathered forward and backward. This hides behind the compute of another layer, as far as
                  that lasts. Its gradient is reduce-scattered. This hides behind what its backward pass has left when
                  the gradients of the MLP or the experts are computed. Both are exposed for the first layer and the
                  last, and without `prefetch`.
    tensor        The stream is gathered and reduce-scattered twice a layer, forward and backward, and gathered twice
                  more if it was not saved gathered. It is exposed, as matmuls wait for it. With `collective_matmul`
                  what the matmuls do not cover is exposed, and one message.
    context       Keys and values go round a ring while attention computes. Each hop takes as long as the slowest of its
                  links; backward they have their gradients in float32 with them. Gathered, or exchanged for heads by
                  all or by `context_heads` neighbours, they are exposed; so is the halo of a layer with a window.
    merging       The result of each hop of a ring is added to the sum so far, in float32: results, and backward
                  gradients.
    expert        All-to-all to dispatch and to combine, forward and backward. It is exposed, also where chunks of the
                  tokens could hide each other's messages (--moe_parts). Compiled, 7% of those of two chunks are hidden,
                  and no more with barriers between them.
    pipe          (P - 1) of vM + P - 1 ticks are idle, with v rounds of M microbatches. Each tick has a message each
                  way. It is hidden unless only forward or only backward passes run: in GPipe in all ticks, else in the
                  first and the last v*P - 1.
    data          The gradients are all-reduced after the backward pass, exposed. They are all-reduced over `context`,
                  too, which shards no weight, and over `expert`, except for those of the experts.
    host          What is offloaded moves to the host during the forward pass and back during the backward pass, behind
                  attention (Efficiency.hides_offload). A batch moves to the device during the step before.

Every microbatch gathers and reduce-scatters anew.

**Copies.** In the forward pass, weights that are gathered ahead are copied within HBM for the next iteration, except
with `double_buffer` (fsdp.py). If a shard of a weight is not whole tiles of rows, gathered weights and gradients of the
backward pass are copied, too. So are the rows that are sent over `expert`, before and after, if their width is no
multiple of 128.

**MFU** is `flops_per_step` (no recomputation, causal attention at half) over what the chips' bf16 peak would compute in
the same time, whatever the dtype of the matmuls. For an FP8 run it is up to twice `own_precision_mfu`.

**Cliffs.** A kernel may take over CLIFF times as long with one size as with its neighbour. Such sizes are reported here
and when train.py starts: a sequence whose last tiles of attention are almost empty, experts whose dims no tiles fit.

**Left out.** Reading the input, checkpoints, stragglers, the first step's compilation. That transfers slow each other
and the compute down. Attention is assumed to be a fused kernel. Nothing here imports JAX.
"""

import argparse
import json
import math
from dataclasses import dataclass, replace

import anatomy
import command
import flags as flags_lib
import rules
from compiler_flags import PADS_SUMS
from hardware import Axis, by, parse_topology, si
from predicted import transformer
from predicted.bounds import bubble
from predicted.interconnect import collective_s
from predicted.workload import (
    COLUMNS_OF_A_TILE,
    ROWS_OF_A_TILE,
    Layer,
    Run,
    after_mlp_s,
    compute_s,
    host_bytes_of,
    layers_of,
    local_shape,
    loss_chunk,
    memory_of,
    moved_bytes,
    params_of_device,
    run_of,
    shortfall_of,
    slots_of_device,
    tables_of_device,
)

GiB = 2**30
# A size is reported if a kernel takes so many times as long with it as with its neighbour. It is less than the 1.3 of
# compiled programs, as predictions are too low: 4,097 tokens have 1.30 compiled, 1.24 predicted.
CLIFF = 1.2


@dataclass(frozen=True)
class Part:
    """A part of the step, on the busiest device."""

    name: str
    resource: str  # what the step waits for: compute, attention, memory, communication, host, idle
    seconds: float  # hidden or not
    exposed_s: float  # the seconds by which it makes the step longer
    formula: str  # with the numbers in it


@dataclass(frozen=True)
class Prediction:
    """The step of a run, as it is predicted."""

    run: Run
    parts: list[Part]
    memory: dict[str, float]  # bytes of a device, by what they hold
    host_bytes: float  # of a device on its host: activations and optimizer state
    passes: dict[str, float]  # seconds that the layers compute, forward and backward, with what the latter recomputes

    @property
    def flops_per_step(self) -> float:
        config = self.run.config
        return transformer.train_flops_per_token(config) * config.batch * config.seq_len

    @property
    def step_s(self) -> float:
        return math.fsum(part.exposed_s for part in self.parts)

    @property
    def hbm_bytes(self) -> float:
        return math.fsum(self.memory.values())

    def shortfall(self, share: float = 1.0) -> dict[str, float]:
        """{memory, hbm or host: the bytes missing on a device}, if it may fill `share` of each; empty if it fits."""
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
        return self.flops_per_step / self.step_s / self.run.num_chips / self.run.chip.bf16_flops_per_s

    @property
    def own_precision_mfu(self) -> float:
        return self.mfu * self.run.chip.bf16_flops_per_s / self.run.chip.flops_per_s(self.run.dtype)

    @property
    def by_resource(self) -> dict[str, float]:
        """The seconds of the step by the resource that it waits for, the longest first."""
        seconds = {}
        for part in self.parts:
            seconds[part.resource] = seconds.get(part.resource, 0) + part.exposed_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    @property
    def bound(self) -> str:
        return next(iter(self.by_resource))


# -- the step


def predict(run: Run) -> Prediction:
    """Predicts the step of a run. Raises ValueError for a run that rules.py refuses."""
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
    rest = [_gradient_sum(run), _update(run), _activation_offload(run, kinds, host_bytes), _optimizer_offload(run)]
    parts = [*layer_parts, *_pipe(run, math.fsum(part.exposed_s for part in layer_parts)), *rest]
    parts.append(_input(run, math.fsum(part.exposed_s for part in parts)))
    passes = {name: math.fsum(getattr(kind, name) * kind.times for kind in kinds) for name in ("forward", "backward")}
    return Prediction(run, [part for part in parts if part.seconds], memory, host_bytes_of(run, host_bytes), passes)


class Kind:
    """The layers of one kind, and the seconds that one of them computes for a microbatch.

    Attributes:
      layer: the costs of one layer.
      times: how often a stage runs such a layer in a step.
      by_part: the seconds of a layer and a microbatch by part, each (forward, backward).
      forward: the sum of the parts, forward.
      backward: the sum of the parts, backward.
    """

    def __init__(self, layer: Layer, run: Run):
        self.layer = layer
        self.times = layer.num_layers / run.pipe * run.microbatches
        self.by_part = compute_s(run, layer)
        if run.config.remat_stage:  # the stage runs forward once more, for the inputs of its layers
            self.by_part = {name: (forward, forward + back) for name, (forward, back) in self.by_part.items()}
        self.forward, self.backward = map(math.fsum, zip(*self.by_part.values(), strict=True))


# -- compute


def _compute(run: Run, kinds: list[Kind]) -> list[Part]:
    config, e = run.config, run.efficiency
    seconds = {
        name: math.fsum(sum(kind.by_part[name]) * kind.times for kind in kinds)
        for name in ("matmul", "attention", "elementwise")
    }
    flops = {"matmul": 0.0, "attention": 0.0}  # a token
    again = transformer.recomputed_flops_per_token(config)
    for name, forward in transformer.forward_flops_per_token(config).items():
        if name != "unembedding":
            flops["attention" if name in ("scores", "mix") else "matmul"] += 3 * forward + again.get(name, 0)
    tokens = f"{config.batch * config.seq_len / math.prod(run.sizes.values()):,.0f} tokens"  # a device's share
    moved = math.fsum(sum(kind.layer.elementwise) * kind.layer.num_layers for kind in kinds) * run.element
    peak = run.chip.bf16_flops_per_s / run.chip.devices
    speed = run.chip.flops_per_s(run.dtype) / run.chip.devices
    slower = "" if run.dtype == "bf16" else f", {si(peak, 'FLOP/s')} for what stays in bfloat16"
    formulas = {
        "matmul": f"{tokens} * {si(flops['matmul'], 'FLOP')} with what is recomputed / ({si(speed, 'FLOP/s')} * "
        f"{e.matmul}{slower}); dims are padded to {run.chip.mxu_size}, rows of an expert to {e.expert_tile}",
        "attention": f"{tokens} * {si(flops['attention'], 'FLOP')} of half the square / ({si(peak, 'FLOP/s')} * "
        f"{e.attention_forward:.3f} forward, {e.attention_backward:.3f} backward, for heads of 128); blocks on the "
        f"diagonal are full, the sequence is padded to tiles of {e.attention_tile}, backward has one more matmul",
        "elementwise": f"{tokens} * 4 * {si(moved, 'B')} of all layers / "
        f"({si(run.hbm_bytes_per_s, 'B/s')} * {e.elementwise})",
    }
    resources = {"matmul": "compute", "attention": "attention", "elementwise": "memory"}
    return [Part(name, resources[name], s, s, formulas[name]) for name, s in seconds.items()]


def _loss(run: Run) -> Part:
    """The loss, in chunks, forward and backward: logits and dx read the unembedding, dw is summed in float32.

    Compiled: 8 chunks of 1,024 rows of Llama 3.1 8B take 10.6 ms for their logits, and 21.9 for dw with its sum.
    """
    D, V = run.config.model_dim, run.config.vocab_size / run.tensor
    sequences, chunk = loss_chunk(run)
    chunks = math.ceil(run.config.seq_len / run.sizes["context"] / chunk)
    rows, in_fp8 = sequences * chunk, "unembed" in anatomy.fp8_weights(run.config)
    speed, bandwidth = run.flops_per_s("fp8" if in_fp8 else "bf16"), run.hbm_bytes_per_s * run.efficiency.hbm
    elementwise = run.hbm_bytes_per_s * run.efficiency.elementwise
    matmul, element = 2 * rows * D * V / speed, 1 if in_fp8 else run.element
    read, added = element * D * V / bandwidth, 8 * D * V / bandwidth
    number, once = chunks * run.microbatches, 2 * max(matmul, read) + matmul + added + rows * V * 16 / elementwise
    seconds = number * once
    formula = f"{number} chunks * ({rows:,.0f} positions * 3 * 2 * {D} * {V:,.0f} / {si(speed, 'FLOP/s')} + "
    formula += (
        f"{rows:,.0f} * {V:,.0f} * 16 B / {si(elementwise, 'B/s')} + 8 B * {D} * {V:,.0f} / {si(bandwidth, 'B/s')})"
    )
    return Part("loss", "compute", seconds, seconds, formula)


def _update(run: Run) -> Part:
    config = run.config
    params = sum(params_of_device(run)) / (run.sizes["data"] if config.shard_update else 1)
    slots = {"adamw": anatomy.BYTES[config.mu_dtype] + 4, "sgd": 4, "adafactor": 0}[config.optimizer]
    each = 4 + 4 + 4 + 2 * slots  # read the gradient; read and write the weight and the slots
    bandwidth = run.hbm_bytes_per_s * run.efficiency.hbm
    seconds = params * each / bandwidth
    return Part("update", "memory", seconds, seconds, f"{params:,.0f} parameters * {each} B / {si(bandwidth, 'B/s')}")


# -- communication


def _fsdp(run: Run, kinds: list[Kind]) -> Part:
    if run.sizes["fsdp"] == 1:
        return _communication("fsdp", 0, 0)
    config = run.config
    gathers = 3 if config.remat_stage else 2
    seconds = exposed = ends = 0.0
    for kind in kinds:
        gather = run.collective_s("all_gather", kind.layer.gathered_bytes(run), "fsdp")
        scatter = _scatter_s(run, kind.layer)
        moved = gathers * gather + scatter
        # A sum waits for its gradient, and XLA does not let it run on into the next layer.
        behind = after_mlp_s(run, kind.layer) if run.efficiency.late_sums else kind.backward
        hidden = 0.0
        if config.prefetch:
            hidden = min(gather, kind.forward)
            hidden += min((gathers - 1) * gather + min(scatter, behind), kind.backward)
        seconds += kind.times * moved
        exposed += kind.times * (moved - hidden)
        ends = max(ends, hidden)  # nothing hides the messages of the first layer and the last
    formula = _fsdp_formula(run, kinds[-1].layer, gathers, gather, scatter, behind)
    tables_s = run.microbatches * _tables_s(run)
    return _communication("fsdp", seconds + tables_s, exposed + tables_s + run.microbatches * ends, formula)


def _scatter_s(run: Run, layer: Layer) -> float:
    """Seconds to reduce-scatter a layer's gradients over `fsdp`."""
    by_3 = run.element * layer.gathered_params_by_3(run)
    sizes = (by_3, True), (layer.gradient_bytes(run) - by_3, False)
    return sum(run.collective_s("reduce_scatter", n, "fsdp", divisible_by_3=divisible) for n, divisible in sizes if n)


def _tables_s(run: Run) -> float:
    """Seconds to gather embedding and unembedding over `fsdp`, and to reduce-scatter their gradients."""
    config = run.config
    table = config.vocab_size * config.model_dim / run.tensor
    tables = run.element * table * (1 if config.tied_embeddings else 2)
    gathered = tables
    if "unembed" in anatomy.fp8_weights(config):
        # A tied table that is multiplied in FP8 is gathered in FP8 beside the one that the embedding reads.
        gathered += table if config.tied_embeddings else -(run.element - 1) * table
    gather = run.collective_s("all_gather", gathered, "fsdp")
    return gather + run.collective_s("reduce_scatter", tables, "fsdp", divisible_by_3=table % 3 == 0)


def _fsdp_formula(run: Run, layer: Layer, gathers: int, gather: float, scatter: float, behind: float) -> str:
    """The formula of `_fsdp` with the numbers of one layer; `gather`, `scatter` and `behind` are seconds."""
    formula = f"gather {si(layer.gathered_bytes(run), 'B')} of a layer {gathers} times, {si(gather, 's')} each, "
    formula += f"reduce-scatter its gradient, {si(scatter, 's')}, over {_links_text(run, 'fsdp')}"
    at_once = run.collective_s("reduce_scatter", layer.gradient_bytes(run), "fsdp", divisible_by_3=True)
    if scatter > 1.1 * at_once:
        share = 1 - layer.gathered_params_by_3(run) / layer.gathered_params(run)
        formula += f", {share:.0%} of it round one ring (not with --xla_flags={PADS_SUMS}=true)"
    if not run.config.prefetch:
        return f"{formula}, not hidden (--no-prefetch)"
    return f"{formula}, behind a layer's compute, the sum behind {si(behind, 's')} of its backward pass"


def _copies(run: Run, kinds: list[Kind]) -> Part:
    """Copies of gathered weights: for the next iteration of the loop, and to align shards that are not whole tiles."""
    config, e = run.config, run.efficiency
    if run.sizes["fsdp"] == 1 or not e.copies_weights:
        return Part("copies of weights", "memory", 0, 0, "")
    rows = config.model_dim / run.sizes["fsdp"]
    carried, untiled = config.prefetch and not config.double_buffer, rows % ROWS_OF_A_TILE > 0
    forwards = 2 if config.remat_stage else 1
    nbytes = 0.0
    for kind in kinds:
        layer, of_rows, gradients = kind.layer, 0.0, 0.0
        if untiled:  # except for the experts, whose rows are sharded as those of one matrix (moe.py)
            of_rows = layer.gathered_bytes(run, with_experts=False)
            gradients = layer.gradient_bytes(run, with_experts=False)
        forward = max(layer.gathered_bytes(run) if carried else 0, of_rows)
        nbytes += kind.times * 2 * (forwards * forward + of_rows + gradients)
    seconds = nbytes / (run.hbm_bytes_per_s * e.elementwise)
    why = ["forward, for the next iteration"] if carried else []
    why += [f"weights and gradients: {rows:g} rows are no multiple of {ROWS_OF_A_TILE}"] if untiled else []
    formula = f"{si(nbytes, 'B')} read and written / ({si(run.hbm_bytes_per_s, 'B/s')} * {e.elementwise})"
    return Part("copies of weights", "memory", seconds, seconds, f"{formula}, {'; '.join(why)}")


def _tensor(run: Run, kinds: list[Kind]) -> Part:
    if run.tensor == 1:
        return _communication("tensor", 0, 0)
    config = run.config
    stream = run.tokens * config.model_dim * run.element
    once = run.collective_s("all_gather", stream, "tensor")
    seconds = exposed = 0.0
    for kind in kinds:
        passes = zip(_stream_messages(run, kind.layer), kind.by_part["matmul"], strict=True)
        for (overlapping, alone), matmul_s in passes:
            covered = matmul_s if config.collective_matmul else 0
            seconds += kind.times * (overlapping + alone) * once
            exposed += kind.times * (max(overlapping * once - covered, overlapping * once / run.tensor) + alone * once)
    ends = 4 * run.microbatches * once  # scatter the embedding's result, gather the loss's operand; both backward, too
    seconds, exposed = seconds + ends, exposed + ends
    formula = f"{si(stream, 'B')} gathered or reduce-scattered {seconds / once:,.0f} times, {si(once, 's')} each, over "
    formula += f"{_links_text(run, 'tensor')}: twice a sub-layer and pass, and again what is not saved"
    formula += ", behind the matmuls" if config.collective_matmul else ""
    return _communication("tensor", seconds, exposed, formula)


def _stream_messages(run: Run, layer: Layer) -> tuple[tuple[int, float], tuple[int, float]]:
    """How often a layer gathers or reduce-scatters the stream over `tensor`, forward and backward.

    Each as (messages that a collective matmul overlaps, messages that none does). The first are those of attention and
    of a dense or shared MLP. The others are those of experts: the stream or, where rows travel to the experts, as many
    rows as their buffers have. Backward, the operands of column-parallel matmuls are gathered again for the gradients
    of their weights, unless remat=none saved them; attention's result is scattered again, if the stream behind it was
    not saved.
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
    """What context.py moves: round a ring behind attention, or at once and exposed; a halo for layers with a window."""
    ways, config = run.sizes["context"], run.config
    if ways == 1:
        return _communication("context", 0, 0)
    dims = (anatomy.key_dim(config) + anatomy.value_dim(config)) / run.tensor * run.element
    # Groups of `exchanging` neighbours exchange positions for heads; a ring, if there is one, goes across the groups.
    ring = rules.ring_size(config, run.sizes)
    exchanging = ways // ring
    inner, outer = split_axis(run.effective_links("context"), exchanging)
    copied = run.tensor * math.lcm(config.num_kv_heads // run.tensor, exchanging)  # heads, with copies
    local = run.tokens * copied * dims
    exchange = collective_s("all_to_all", run.tokens * (config.num_heads + copied) * dims, inner) if inner else 0.0
    round_ring = (ring - 1) * ring_hop_s(run, outer, local) if ring > 1 else 0.0
    global_share = transformer.num_global_layers(config) / config.num_layers
    halo_shards = min((config.window - 1) * ways / config.seq_len, ways - 1)
    shard = run.tokens * config.num_kv_heads * dims
    halo = ring_hop_s(run, run.effective_links("context"), shard * halo_shards) if global_share < 1 else 0.0
    in_float32 = 4 / run.element
    moved = {
        "ring": (round_ring, in_float32 * round_ring, exchange),
        "all_gather": (
            run.collective_s("all_gather", local * ways, "context"),
            run.collective_s("reduce_scatter", local * ways * in_float32, "context"),
            0.0,
        ),
        "all_to_all": (0.0, 0.0, exchange),
    }
    once, gradients, exchanged = moved[config.context_impl]
    seconds = exposed = 0.0
    for kind in kinds:
        forward, backward = kind.by_part["attention"]
        again = _attention_forwards(run, kind)
        for runs, passed, attention in ((1, once, forward), (again, again * once + gradients, backward)):
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
    """How often attention runs forward: again if its result is not saved, and again if its stage runs forward again."""
    return 1 + [kind.layer.attention_recomputed, run.config.remat_stage].count(True)


def _merging(run: Run, kinds: list[Kind]) -> Part:
    """The sums of context.py after each hop of a ring: it reads the sum so far and a summand, and writes the sum."""
    config, hops = run.config, rules.ring_size(run.config, run.sizes) - 1
    if config.context_impl != "ring":
        return Part("merging", "memory", 0, 0, "")
    Hk, Hv = anatomy.key_dim(config), anatomy.value_dim(config)
    # Bytes a token. The kernel's results have the activations' dtype.
    results = (4 + run.element + 4) * config.num_heads * Hv
    gradients = (4 + 4 + 4) * config.num_heads * Hk + (4 + run.element + 4) * config.num_kv_heads * (Hk + Hv)
    share = transformer.num_global_layers(config) / config.num_layers
    times = hops * share * run.tokens / run.tensor
    nbytes = math.fsum(kind.times * times * (_attention_forwards(run, kind) * results + gradients) for kind in kinds)
    bandwidth = run.hbm_bytes_per_s * run.efficiency.elementwise
    formula = f"{si(nbytes, 'B')} of results and gradients, {hops} times a layer / {si(bandwidth, 'B/s')}"
    return Part("merging", "memory", nbytes / bandwidth, nbytes / bandwidth, formula)


def split_axis(links: list[Axis], ways: int) -> tuple[list[Axis], list[Axis]]:
    """The links within groups of the innermost `ways` devices of a mesh axis, and the links between such groups.

    Where both are on one torus axis, a message to the next group passes the devices of its own group. So as many
    messages share a link.
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

    In a ring over both dies of each chip only one of them sends to the next chip, so it has the link to itself.
    """
    share = run.chip.devices if links[0].name == "die to die" else 1
    speeds = [link.link_bytes_per_s * (1 if link.name == "die to die" else share) for link in links]
    return max(link.hop_s + nbytes / speed for link, speed in zip(links, speeds, strict=True))


def _expert(run: Run, kinds: list[Kind]) -> Part:
    if run.sizes["expert"] == 1:
        return _communication("expert", 0, 0)
    sent = run.tokens * run.config.model_dim / run.tensor * run.element
    if run.config.moe_impl == "reference":  # the tokens of all devices are gathered, and their sums scattered
        sent *= run.sizes["expert"]
        once = run.collective_s("all_gather", sent, "expert")
    else:
        sent *= run.config.experts_per_token * run.expert_work
        once = run.collective_s("all_to_all", sent, "expert")
    number = _exchanges(run)
    seconds = number * once * _mixtures(kinds)
    formula = f"{number} times {si(sent, 'B')} of a layer's tokens dispatched or combined, {si(once, 's')} each, over "
    formula += _links_text(run, "expert")
    return _communication("expert", seconds, seconds, formula)


def _exchanges(run: Run) -> int:
    """How often a layer sends rows over `expert`: dispatch and combine in both passes, and what is recomputed."""
    return 4 + len({"expert_input", "expert_down"} - anatomy.saved_names(run.config))


def _mixtures(kinds: list[Kind]) -> float:
    """How often a stage runs a layer with experts in a step."""
    return sum(kind.times for kind in kinds if kind.layer.params.experts)


def _copies_of_rows(run: Run, kinds: list[Kind]) -> Part:
    """Copies that make rows contiguous for an exchange, if they do not fill registers (moe.contiguous_rows).

    Compiled, with a buffer of 327,680 rows of 2880, twice the rows that are sent (gpt-oss-120b on fsdp:64,expert:2):
    each of six exchanges pads both to 3072 columns, reshapes them, and slices the result. That is 32 copies a layer and
    microbatch, 4.0 s of a step of 15.4. Fitted to that: one copy of the rows that are sent and three of the buffer, at
    the speed of elementwise work.
    """
    config, width = run.config, run.config.model_dim // run.tensor
    if run.sizes["expert"] == 1 or config.moe_impl != "dropless" or width % COLUMNS_OF_A_TILE == 0:
        return Part("copies of rows", "memory", 0, 0, "")
    rows = run.tokens * config.experts_per_token * (1 + 3 * run.expert_buffer_ratio)
    nbytes = 2 * _exchanges(run) * _mixtures(kinds) * rows * width * run.element
    seconds = nbytes / (run.hbm_bytes_per_s * run.efficiency.elementwise)
    formula = f"{si(nbytes, 'B')} read and written / ({si(run.hbm_bytes_per_s, 'B/s')} * {run.efficiency.elementwise})"
    return Part(
        "copies of rows", "memory", seconds, seconds, f"{formula}: {width} is no multiple of {COLUMNS_OF_A_TILE}"
    )


def _pipe(run: Run, working_s: float) -> list[Part]:
    """The idle ticks of a pipeline, and its messages; a stage works for `working_s` of a step."""
    if run.pipe == 1:
        return []
    rounds = run.config.pipeline_rounds
    passes = rounds * run.microbatches
    tick, ticks = working_s / passes, passes + run.pipe - 1
    # Ticks in which only forward or only backward passes run, which hide no message.
    alone = ticks if run.config.pipeline_schedule == "gpipe" else rounds * run.pipe - 1
    stream = run.tokens * run.config.model_dim * run.element / run.tensor
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
    sizes = run.sizes
    experts, others = params_of_device(run)
    seconds = 0.0
    for params, axes in ((experts, ("context", "data")), (others, ("context", "expert", "data"))):
        if run.config.shard_update:
            seconds += run.collective_s("reduce_scatter", 4 * params, *axes)
            seconds += run.collective_s("all_gather", run.element * params, *axes)
        else:
            seconds += run.collective_s("all_reduce", 4 * params, *axes)
    if run.pipe > 1:
        seconds += run.collective_s("all_reduce", 4 * tables_of_device(run), "pipe")
    replicas = " and ".join(_links_text(run, axis) for axis in ("context", "expert", "data") if sizes[axis] > 1)
    how = "reduce-scatter, then all-gather the weights of" if run.config.shard_update else "all-reduce"
    formula = f"{how} {si(4 * (experts + others), 'B')} over {replicas}, after the backward pass"
    if run.pipe > 1:
        formula += f"; of embedding and unembedding over {_links_text(run, 'pipe')} too"
    return Part("gradient sum", "communication", seconds, seconds, formula)


def _input(run: Run, step_s: float) -> Part:
    nbytes = run.tokens * run.microbatches * 5 * 4
    seconds = nbytes / run.host_bytes_per_s
    formula = f"{si(nbytes, 'B')} of tokens, targets, documents, positions, weights of the loss / "
    formula += f"{si(run.host_bytes_per_s, 'B/s')}, while the step before computes"
    return Part("input", "host", seconds, max(0.0, seconds - step_s), formula)


def _activation_offload(run: Run, kinds: list[Kind], nbytes: float) -> Part:
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
    """The transfers of an offloaded optimizer state, one layer after the other: to the device, and back."""
    nbytes = slots_of_device(run) if run.config.offload_optimizer else 0.0
    seconds = 2 * nbytes / run.host_bytes_per_s
    formula = f"2 * {si(nbytes, 'B')} / {si(run.host_bytes_per_s, 'B/s')}, to the device and back"
    return Part("optimizer offload", "host", seconds, seconds, formula)


def _communication(axis: str, seconds: float, exposed: float, formula: str = "") -> Part:
    return Part(f"{axis} communication", "communication", seconds, exposed, formula)


def _links_text(run: Run, axis: str) -> str:
    """fsdp:128 on x (4 of 44.5 GB/s), ...: a device's links, one way, at the speed that programs reach."""
    links = (f"{link.name} ({link.size} of {si(link.link_bytes_per_s, 'B/s')})" for link in run.effective_links(axis))
    return f"{axis}:{run.sizes[axis]} on {', '.join(links)}"


# -- command line


def as_json(prediction: Prediction) -> dict:
    """What --json prints, in seconds, bytes and FLOPs."""
    run, config = prediction.run, prediction.run.config
    return {
        "preset": config.preset,
        "topology": f"{run.chip.name}:{by(run.topology)}",
        "num_slices": run.num_slices,
        "num_chips": run.num_chips,
        "mesh": {axis: size for axis, size in run.sizes.items() if size > 1},
        "batch": config.batch,
        "seq_len": config.seq_len,
        "microbatches": config.microbatches,
        "remat": config.remat,
        "fp8": config.fp8,
        "kind": "predicted",
        "step_s": prediction.step_s,
        "mfu": prediction.mfu,
        "own_precision_mfu": prediction.own_precision_mfu,
        "flops_per_step": prediction.flops_per_step,
        "tokens_per_s_per_chip": prediction.tokens_per_s_per_chip,
        "exposed_comm_s": prediction.exposed_comm_s,
        "bound": prediction.bound,
        "hbm_bytes": prediction.hbm_bytes,
        "hbm_limit_bytes": run.hbm_limit,
        "host_bytes": prediction.host_bytes,
        "host_limit_bytes": run.host_limit if math.isfinite(run.host_limit) else None,
        "fits": prediction.fits,
        "passes": prediction.passes,
        "parts": {part.name: {"seconds": part.seconds, "exposed_s": part.exposed_s} for part in prediction.parts},
        "memory_bytes": prediction.memory,
    }


def cliffs(run: Run) -> list[str]:
    """Returns a sentence for each size with which a kernel takes over CLIFF times as long as with its neighbour."""
    return [*_cliff_of_attention(run), *_cliff_of_experts(run)]


def _cliff_of_attention(run: Run) -> list[str]:
    """Attention's kernel computes whole tiles, and the last ones of a sequence may be almost empty."""
    config, T, ring = run.config, run.config.seq_len, rules.ring_size(run.config, run.sizes)
    unit = lambda size: ring * (size if T >= ring * size else 256)
    block, tile = unit(run.efficiency.attention_block), unit(run.efficiency.attention_tile)
    less = T // block * block
    if config.attention == "reference" or not less:
        return []

    def seconds_per_flop(seq_len: int) -> float:
        shorter = replace(run, config=replace(config, seq_len=seq_len))
        flops = transformer.forward_flops_per_token(shorter.config)
        seconds = sum(layer.num_layers * sum(compute_s(shorter, layer)["attention"]) for layer in layers_of(shorter))
        return seconds / shorter.tokens / (flops["scores"] + flops["mix"])

    factor, nearest = seconds_per_flop(T) / seconds_per_flop(less), round(T / tile) * tile
    why = f"as with {less:,}: its last tiles are almost empty; the nearest size that fills them is {nearest:,}"
    return [f"seq_len={T:,}: attention takes {factor:.2f} times as long a FLOP {why}"] if factor > CLIFF else []


def _cliff_of_experts(run: Run) -> list[str]:
    """The experts' kernels tile only dims that are multiples of 128. Another dim must fit in VMEM, or it is refused."""
    config, tensor = run.config, run.tensor
    dims = {"model_dim": (config.model_dim, 1), "expert_dim": (config.expert_dim, tensor)}
    odd = {name: -(-size // (128 * n)) * 128 * n for name, (size, n) in dims.items() if size % (128 * n)}
    if not config.num_experts or config.moe_impl != "dropless" or not odd:
        return []
    import groups  # here: it needs numpy, which other predictions do not

    rows, experts = round(run.tokens * config.experts_per_token), config.num_experts // run.sizes["expert"]
    dtype = "float8_e4m3fn" if "expert_up" in anatomy.fp8_weights(config) else config.dtype
    is_gated = anatomy.swiglu_in_kernel(config)

    def slowdown(model_dim: int = config.model_dim, expert_dim: int = config.expert_dim) -> float:
        """The time of the slowest kernel over that of its matmuls on the matrix units; infinite if one is refused."""
        D, M = model_dim, expert_dim // tensor
        gated, plain, transposed = (groups.Variant(gated=is_gated), groups.PLAIN, groups.Variant(transpose_rhs=True))
        matmuls = (D, M, gated), (M, D, plain), (M, D, transposed), (D, M, transposed)
        try:
            tiles = [(groups.default_tiles(rows, K, N, experts, dtype, variant=v), K, N) for K, N, v in matmuls]
            tiles += [(groups.default_tgmm_tiles(rows, K, N, experts, dtype), K, N) for K, N in ((D, M), (M, D))]
        except ValueError:
            return math.inf
        return max(groups.slowdown(*each) for each in tiles)

    factor, least = slowdown(), slowdown(**odd)
    if factor <= CLIFF * least and factor < math.inf:
        return []
    sizes = " and ".join(f"{name}={dims[name][0]:,}" for name in odd)
    nearest = " and ".join(f"{size:,}" for size in odd.values())
    effect = "are refused" if factor == math.inf else f"take {factor / least:.2f} times as long as with {nearest}"
    return [f"{sizes}: the experts' kernels {effect}, as they tile only multiples of 128; the nearest is {nearest}"]


def describe(prediction: Prediction, *, explain: bool = False) -> str:
    """The prediction as text: the run, the parts of the step, MFU and memory."""
    run, config, chip = prediction.run, prediction.run.config, prediction.run.chip
    mesh = ", ".join(
        f"{axis} {size} ({', '.join(link.name for link in run.links[axis])})"
        for axis, size in run.sizes.items()
        if size > 1
    )
    slices = f"{run.num_slices} slices of " if run.num_slices > 1 else ""
    tokens, passes = config.batch * config.seq_len, prediction.passes
    lines = [
        f"{config.preset} on {slices}{chip.name}:{by(run.topology)}, {run.num_chips:,} chips, predicted",
        f"  mesh     {mesh or 'one device'}",
        f"  batch    {config.batch:,} sequences of {config.seq_len:,}: {tokens:,} tokens"
        + (f", in {config.microbatches} microbatches" if config.microbatches > 1 else ""),
        f"  how      {'bf16' if config.fp8 == 'none' else f'fp8 ({config.fp8})'}, remat {config.remat}"
        + (f" {config.remat_tensors}" if config.remat_tensors else ""),
        "",
        f"{'':26}{'total':>12}{'exposed':>12}{'of the step':>13}   waits for",
    ]
    for part in prediction.parts:
        share = part.exposed_s / prediction.step_s
        times = f"{si(part.seconds, 's'):>12}{si(part.exposed_s, 's'):>12}"
        lines.append(f"  {part.name:24}{times}{share:13.1%}   {part.resource}")
        if explain:
            lines.append(f"      = {part.formula}")
    own = f" of bf16's peak, {prediction.own_precision_mfu:.1%} of fp8's" if config.fp8 != "none" else ""
    lines += [
        f"  {'step':36}{si(prediction.step_s, 's'):>12}{'100.0%':>13}   bound by {prediction.bound}",
        "",
        f"  layers   compute {si(passes['forward'], 's')} forward, {si(passes['backward'], 's')} backward",
        f"  MFU      {prediction.mfu:.1%}{own}; {prediction.tokens_per_s_per_chip:,.0f} tokens/s a chip; "
        f"{si(prediction.flops_per_step, 'FLOP')} a step",
        f"  memory   {prediction.hbm_bytes / GiB:.1f} of {run.hbm_limit / GiB:.1f} GiB a device"
        + ("" if prediction.fits else f": DOES NOT FIT, {describe_shortfall(prediction.shortfall())}"),
    ]
    shown = {name: nbytes for name, nbytes in prediction.memory.items() if nbytes}
    shown |= {"on the host": prediction.host_bytes} if prediction.host_bytes else {}
    width = max(map(len, shown))
    lines += [f"           {name:{width}} {nbytes / GiB:8.2f} GiB" for name, nbytes in shown.items()]
    if prediction.host_bytes and math.isfinite(run.host_limit):
        lines[-1] += f" of {run.host_limit / GiB:.1f}"
    lines += [f"  cliff    {sentence}" for sentence in cliffs(run)]
    if explain:
        peaks = f"{run.num_chips} * {si(chip.bf16_flops_per_s, 'FLOP/s')}"
        lines.append(f"  MFU      = {si(prediction.flops_per_step, 'FLOP')} / ({prediction.step_s:.4g} s * {peaks})")
    return "\n".join(lines)


def describe_shortfall(shortfall: dict[str, float]) -> str:
    """The bytes that `Prediction.shortfall` returns, in words; empty if it fits."""
    names = {"hbm": "", "host": " of the host's memory"}
    return " and ".join(f"{nbytes / GiB:.2f} GiB{names[memory]} short" for memory, nbytes in shortfall.items())


def matmuls(prediction: Prediction) -> list[tuple[str, float, float, float]]:
    """(weight, FLOPs, bytes, FLOP/s by the roofline) of each forward matmul of a layer on a device."""
    run, rows = prediction.run, []
    for layer in layers_of(run):
        for product in layer.products:
            m, k, n, _ = local_shape(run, product)
            flops, nbytes = 2 * m * k * n, moved_bytes(run, product)
            peak = run.flops_per_s(product.dtype) / run.efficiency.matmul
            rows.append((product.weight, flops, nbytes, min(peak, flops / nbytes * run.hbm_bytes_per_s)))
    return list(dict.fromkeys(rows))


def describe_matmuls(prediction: Prediction) -> str:
    """The matmuls of a layer on the roofline of a device, as a table."""
    run = prediction.run
    ridge = run.chip.flops_per_s(run.dtype) / run.chip.hbm_bytes_per_s
    lines = [f"matmuls of a layer, forward, on a device (ridge: {ridge:.1f} FLOPs a byte of HBM)"]
    lines.append(f"  {'weight':16}{'FLOPs':>14}{'bytes':>14}{'FLOPs a byte':>14}{'FLOP/s at most':>18}   bound by")
    for name, flops, nbytes, speed in matmuls(prediction):
        bound = "memory" if speed == flops / nbytes * run.hbm_bytes_per_s else "compute"
        intensity = f"{flops / nbytes:,.1f}"
        lines.append(
            f"  {name:16}{si(flops, ''):>14}{si(nbytes, 'B'):>14}{intensity:>14}{si(speed, 'FLOP/s'):>18}   {bound}"
        )
    return "\n".join(lines)


def plot(predictions: dict[str, Prediction], path: str) -> None:
    """Draws each step by its parts, and for the first one the matmuls of a layer on the roofline of a device."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(15, 4 + 0.3 * len(predictions)), layout="constrained")
    bars, roof = figure.subplots(1, 2)
    names = dict.fromkeys(part.name for prediction in predictions.values() for part in prediction.parts)
    left = dict.fromkeys(predictions, 0.0)
    for number, name in enumerate(names):
        exposed = lambda prediction, name=name: math.fsum(
            part.exposed_s for part in prediction.parts if part.name == name
        )
        seconds = [exposed(prediction) for prediction in predictions.values()]
        bars.barh(list(predictions), seconds, left=list(left.values()), color=f"C{number}", label=name)
        left = {label: left[label] + s for label, s in zip(left, seconds, strict=True)}
    bars.invert_yaxis()
    bars.set(xlabel="seconds", title="Time of a step by part, predicted")
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)

    label, prediction = next(iter(predictions.items()))
    run = prediction.run
    peak = run.chip.flops_per_s(run.dtype) / run.chip.devices
    ridge = peak / run.hbm_bytes_per_s
    points = [(name, flops / nbytes, speed) for name, flops, nbytes, speed in matmuls(prediction)]
    low, high = min(ridge / 4, *(x for _, x, _ in points)), max(ridge * 16, *(x for _, x, _ in points)) * 1.5
    roof.loglog([low, ridge, high], [low * run.hbm_bytes_per_s, peak, peak], color="k", label="roofline")
    for number, (name, intensity, speed) in enumerate(points):
        roof.plot(intensity, speed, marker="o", ls="", color=f"C{number}", label=name)
    roof.set(title=f"Matmuls of a layer on a device, {label}, predicted")
    roof.set(xlabel="FLOPs a byte of HBM", ylabel="FLOP/s at most")
    roof.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    roof.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def print_step(args: argparse.Namespace) -> None:
    config = flags_lib.from_args(args)
    topology, num_slices = flags_lib.slice_of(args)
    prediction = predict(run_of(config, *parse_topology(topology), num_slices=num_slices))
    if args.plot:
        plot({config.preset: prediction}, args.plot)
    if args.json:
        return print(json.dumps(as_json(prediction) | {"cliffs": cliffs(prediction.run)}))
    print(describe(prediction, explain=args.explain))
    if args.explain:
        print(f"\n{describe_matmuls(prediction)}")


def add_step_command(commands) -> None:
    about = "time of a training step by part, memory, MFU"
    parser = commands.add_parser(
        "step", help=about, description=about, allow_abbrev=False, usage="%(prog)s [--flag=value ...]"
    )
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, bytes and FLOPs")
    parser.add_argument(
        "--plot",
        type=command.path,
        metavar="FILE.png",
        help="draw the parts, and the matmuls on a roofline; needs matplotlib",
    )
    flags_lib.add_run_flags(parser, "tpu7x:4x4x4", without_preset="tpu7x:2x2x1")  # tiny is for a host
    parser.set_defaults(run=print_step, parser=parser)
