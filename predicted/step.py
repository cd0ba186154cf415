"""How long a training step takes and whether it fits, predicted: every part with its formula. No jax here,
but for the tiles of experts whose dims are no multiples of 128.

    python roofline.py step --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --explain
    python roofline.py step --preset=qwen3-235b-a22b --topology=tpu7x:4x8x8 --batch=2048 --json

A roofline says what a step must take. This says what it will: the same arithmetic, each part divided by what programs
reach of the chip's figures. workload.py has these efficiencies, the time that a layer computes, and the memory. Here
they are added up, over a stage's layers and all M microbatches, with what no layer has,

    loss          3 * 2*D*V FLOPs a token / C + V * 16 B / W_hbm     unembedding and softmax
    update        28 bytes a parameter / W_hbm                       adamw: read weights, gradients, moments; write them

and with communication, of which only what nothing hides (the exposed part) makes the step longer:

    fsdp          gather a layer forward and backward: hidden behind the compute of another layer, as far as that lasts.
                  Reduce-scatter its gradient: behind what its backward pass has left when the MLP's or experts'
                  gradients are there. Exposed for the first layer and the last, and without `prefetch`
    tensor        gather and reduce-scatter the stream twice a layer, forward and backward, and gather twice more what
                  is not saved whole. Exposed, as matmuls wait for it; with `collective_matmul` what the matmuls do not
                  cover, and a message
    context       keys and values go round a ring while attention computes, a hop at a time over the slowest of its
                  links; backward with their gradients in float32. Gathered or exchanged for heads, by all or by
                  `context_heads` neighbours: exposed, as is the halo of a layer with a window
    merging       what each hop of a ring gives is added to what there is, in float32: results, and backward gradients
    expert        all-to-all there and back, forward and backward. Exposed, also where parts of the tokens could hide
                  each other's (--moe_parts): compiled, of two parts 7% are hidden, with barriers between them no more
    pipe          (P - 1) of vM + P - 1 ticks idle, v rounds of M microbatches; a message a tick and way, hidden but
                  where forward or backward passes are alone: in GPipe all, else the first and last v*P - 1 ticks
    data          all-reduce of gradients after the backward pass. Exposed. The same over `context`, which cuts no
                  weight, and over `expert` for all that is not an expert
    host          what is offloaded goes out during the forward pass and comes back during the backward pass, behind
                  attention (Efficiency.hides_offload); a batch comes in while the step before computes

Every microbatch gathers and reduce-scatters anew. Forward, what is gathered ahead is copied within HBM for the next
iteration, unless with `double_buffer` (fsdp.py). With parts of a weight that are no whole tiles of rows, what is
gathered backward is copied, too, and its gradient. So are the rows that go over `expert`, before and after, if they are
no multiple of 128 wide.

**MFU** is `flops_per_step` (no recomputation, causal attention at half) over what the chips' bf16 peak would do in the
time, whatever is multiplied. Of an fp8 run it is up to twice `own_precision_mfu`.

**Cliffs.** A size with which a kernel takes over CLIFF times as long as with its neighbour is named, here and where
train.py starts: a sequence whose last tiles of attention are almost empty, experts whose dims no tiles fit.

**Left out**: reading the input, checkpoints, stragglers, the first step's compilation; that transfers slow each other
and the compute down. Attention is taken to be a fused kernel.
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
# Times as long as a kernel takes with the neighbour of a size: above, the size is named. Below 1.3 by what is predicted
# too low: of 4,097 tokens compiled 1.30, predicted 1.24.
CLIFF = 1.2


@dataclass(frozen=True)
class Part:
    """A part of the step, on the busiest device."""

    name: str
    resource: str  # what it waits for: compute, attention, memory, communication, host, idle
    seconds: float  # in all, hidden or not
    exposed_s: float  # that the step takes longer for it
    formula: str  # with the numbers in it


@dataclass(frozen=True)
class Prediction:
    run: Run
    parts: list[Part]
    memory: dict[str, float]  # bytes of a device, by what they hold
    host_bytes: float  # of a device's activations, and optimizer state, on its host
    passes: dict[str, float]  # seconds that the layers compute, forward and backward, with what is recomputed there

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
        """{memory, hbm or host: bytes that a device lacks of it}, where it may fill `room` of it; empty if it fits."""
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
        """Seconds of the step by what it waits for, the longest first."""
        seconds = {}
        for part in self.parts:
            seconds[part.resource] = seconds.get(part.resource, 0) + part.exposed_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    @property
    def bound(self) -> str:
        return next(iter(self.by_resource))


# -- the step


def predict(run: Run) -> Prediction:
    """The step of a run. Raises ValueError for what rules.py refuses."""
    rules.check(run.config, run.sizes)
    kinds = [Kind(layer, run) for layer in layers_of(run)]
    memory, host_bytes = memory_of(run, [kind.layer for kind in kinds])
    of_layers = [
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
    rest = [_gradient_sum(run), _update(run), _host(run, kinds, host_bytes), _slots(run)]
    parts = [*of_layers, *_pipe(run, math.fsum(part.exposed_s for part in of_layers)), *rest]
    parts.append(_input(run, math.fsum(part.exposed_s for part in parts)))
    passes = {name: math.fsum(getattr(kind, name) * kind.times for kind in kinds) for name in ("forward", "backward")}
    return Prediction(run, [part for part in parts if part.seconds], memory, host_bytes_of(run, host_bytes), passes)


class Kind:
    """The layers of a kind, and the seconds that one computes on a microbatch."""

    def __init__(self, layer: Layer, run: Run):
        self.layer = layer
        self.times = layer.num_layers / run.pipe * run.microbatches  # that a stage runs one, in a step
        self.by_part = compute_s(run, layer)  # forward, backward
        if run.config.remat_stage:  # the whole stage once more, for its layers' inputs
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
    slower = "" if run.dtype == "bf16" else f", of what stays in 16 bits {si(peak, 'FLOP/s')}"
    formulas = {
        "matmul": f"{tokens} * {si(flops['matmul'], 'FLOP')} with what is recomputed / ({si(speed, 'FLOP/s')} * "
        f"{e.matmul}{slower}); dims are padded to {run.chip.mxu_size}, rows of an expert to {e.expert_tile}",
        "attention": f"{tokens} * {si(flops['attention'], 'FLOP')} of half the square / ({si(peak, 'FLOP/s')} * "
        f"{e.attention_forward:.3f} forward, {e.attention_backward:.3f} backward, of a head of 128); blocks on the "
        f"diagonal are whole, of a sequence filled up to tiles of {e.attention_tile}, backward has one more matmul",
        "elementwise": f"{tokens} * 4 * {si(moved, 'B')} of all layers / "
        f"({si(run.hbm_bytes_per_s, 'B/s')} * {e.elementwise})",
    }
    resources = {"matmul": "compute", "attention": "attention", "elementwise": "memory"}
    return [Part(name, resources[name], s, s, formulas[name]) for name, s in seconds.items()]


def _loss(run: Run) -> Part:
    """Counts the chunks, forward and backward: logits and dx read the unembedding, dw is added up in float32.

    Compiled: 8 chunks of 1,024 rows of Llama 3.1 8B take 10.6 ms for their logits, and for dw, with its sum, 21.9.
    """
    D, V = run.config.model_dim, run.config.vocab_size / run.tensor
    sequences, chunk = loss_chunk(run)
    chunks = math.ceil(run.config.seq_len / run.sizes["context"] / chunk)
    rows, in_8_bits = sequences * chunk, "unembed" in anatomy.fp8_weights(run.config)
    speed, bandwidth = run.flops_per_s("fp8" if in_8_bits else "bf16"), run.hbm_bytes_per_s * run.efficiency.hbm
    elementwise = run.hbm_bytes_per_s * run.efficiency.elementwise
    matmul, element = 2 * rows * D * V / speed, 1 if in_8_bits else run.element
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
    each = 4 + 4 + 4 + 2 * slots  # the gradient in; weight and slots in and out
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
        # A sum waits for its gradient, and XLA does not carry it on into the next layer.
        behind = after_mlp_s(run, kind.layer) if run.efficiency.late_sums else kind.backward
        hidden = 0.0
        if config.prefetch:
            hidden = min(gather, kind.forward)
            hidden += min((gathers - 1) * gather + min(scatter, behind), kind.backward)
        seconds += kind.times * moved
        exposed += kind.times * (moved - hidden)
        ends = max(ends, hidden)  # of the first layer and the last, which nothing hides
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
        # A tied table that is multiplied in FP8 is gathered as such beside the one that rows are taken from.
        gathered += table if config.tied_embeddings else -(run.element - 1) * table
    gather = run.collective_s("all_gather", gathered, "fsdp")
    return gather + run.collective_s("reduce_scatter", tables, "fsdp", divisible_by_3=table % 3 == 0)


def _fsdp_formula(run: Run, layer: Layer, gathers: int, gather: float, scatter: float, behind: float) -> str:
    """What `_fsdp` computes, with the numbers of one layer; `gather`, `scatter` and `behind` are seconds."""
    formula = f"gather {si(layer.gathered_bytes(run), 'B')} of a layer {gathers} times, {si(gather, 's')} each, "
    formula += f"reduce-scatter its gradient, {si(scatter, 's')}, over {_wires(run, 'fsdp')}"
    at_once = run.collective_s("reduce_scatter", layer.gradient_bytes(run), "fsdp", divisible_by_3=True)
    if scatter > 1.1 * at_once:
        share = 1 - layer.gathered_params_by_3(run) / layer.gathered_params(run)
        formula += f", {share:.0%} of it round one ring (not with --xla_flags={PADS_SUMS}=true)"
    if not run.config.prefetch:
        return f"{formula}, not hidden (--no-prefetch)"
    return f"{formula}, behind a layer's compute, the sum behind {si(behind, 's')} of its backward pass"


def _copies(run: Run, kinds: list[Kind]) -> Part:
    """Copies of gathered weights: for the next iteration of the loop; into whole tiles, if they come in other parts."""
    config, e = run.config, run.efficiency
    if run.sizes["fsdp"] == 1 or not e.copies_weights:
        return Part("copies of weights", "memory", 0, 0, "")
    rows = config.model_dim / run.sizes["fsdp"]
    carried, tiled = config.prefetch and not config.double_buffer, bool(rows % ROWS_OF_A_TILE)
    forwards = 2 if config.remat_stage else 1
    nbytes = 0.0
    for kind in kinds:
        layer, of_rows, gradients = kind.layer, 0.0, 0.0
        if tiled:  # all but the experts, whose rows are sharded as those of one matrix (moe.py)
            of_rows = layer.gathered_bytes(run, with_experts=False)
            gradients = layer.gradient_bytes(run, with_experts=False)
        forward = max(layer.gathered_bytes(run) if carried else 0, of_rows)
        nbytes += kind.times * 2 * (forwards * forward + of_rows + gradients)
    seconds = nbytes / (run.hbm_bytes_per_s * e.elementwise)
    why = ["forward, to be carried on"] if carried else []
    why += [f"weights and gradients: {rows:g} rows are no multiple of {ROWS_OF_A_TILE}"] if tiled else []
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
        for (overlapping, alone), matmul_s in zip(
            _stream_messages(run, kind.layer), kind.by_part["matmul"], strict=True
        ):
            covered = matmul_s if config.collective_matmul else 0
            seconds += kind.times * (overlapping + alone) * once
            exposed += kind.times * (max(overlapping * once - covered, overlapping * once / run.tensor) + alone * once)
    ends = 4 * run.microbatches * once  # the embedding's result scattered, the loss's operand gathered; and backward
    seconds, exposed = seconds + ends, exposed + ends
    formula = f"{si(stream, 'B')} gathered or reduce-scattered {seconds / once:,.0f} times, {si(once, 's')} each, over "
    formula += f"{_wires(run, 'tensor')}: twice a sub-layer and way, again what is not saved"
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
    """What context.py moves: round a ring behind attention, or at once and exposed; a halo where there is a window."""
    ways, config = run.sizes["context"], run.config
    if ways == 1:
        return _communication("context", 0, 0)
    dims = (anatomy.key_dim(config) + anatomy.value_dim(config)) / run.tensor * run.element
    # Of `exchanging` neighbours each gets a part of the heads, and the ring, if there is one, goes across such groups.
    ring = rules.ring_size(config, run.sizes)
    exchanging = ways // ring
    inner, outer = split(run.effective_links("context"), exchanging)
    copied = run.tensor * math.lcm(config.num_kv_heads // run.tensor, exchanging)  # heads: one that several need, twice
    local = run.tokens * copied * dims
    exchange = collective_s("all_to_all", run.tokens * (config.num_heads + copied) * dims, inner) if inner else 0.0
    round_ring = (ring - 1) * hop(run, outer, local) if ring > 1 else 0.0
    without_window = transformer.num_global_layers(config) / config.num_layers
    before = min((config.window - 1) * ways / config.seq_len, ways - 1)  # of a halo, in shards
    own = run.tokens * config.num_kv_heads * dims
    halo = hop(run, run.effective_links("context"), own * before) if without_window < 1 else 0.0
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
            others = without_window * runs * exchanged + (1 - without_window) * runs * halo
            seconds += kind.times * (without_window * passed + others)
            exposed += kind.times * (max(0.0, without_window * passed - behind) + others)
    how = {
        "ring": f"go round a ring of {ring}, behind attention",
        "all_gather": "are gathered",
        "all_to_all": "are exchanged for positions",
    }
    formula = (
        f"{si(local, 'B')} of keys and values {how[config.context_impl]}, over {_wires(run, 'context')}; backward "
    )
    formula += (
        "with queries, values and their gradients"
        if config.context_impl == "all_to_all"
        else "with their gradients in float32"
    )
    return _communication("context", seconds, exposed, formula)


def _attention_forwards(run: Run, kind: Kind) -> int:
    """How often a step computes a layer's attention forward: again if its result, or a stage's, is not saved."""
    return 1 + sum((kind.layer.attention_recomputed, run.config.remat_stage))


def _merging(run: Run, kinds: list[Kind]) -> Part:
    """What context.py adds up after each hop of a ring: the sum so far and a part are read, the sum is written."""
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


def split(links: list[Axis], ways: int) -> tuple[list[Axis], list[Axis]]:
    """The links of the innermost `ways` devices of a mesh axis, and those from such a group to the next.

    A message to the next group jumps over the devices of its own where both lie on one line: as many share its links.
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


def hop(run: Run, links: list[Axis], nbytes: float) -> float:
    """Seconds until all devices of a ring over these links have passed `nbytes` on.

    Over both dies of each chip only one of them sends to the next chip, and has the link for itself.
    """
    share = run.chip.devices if links[0].name == "die to die" else 1
    speeds = [link.link_bytes_per_s * (1 if link.name == "die to die" else share) for link in links]
    return max(link.hop_s + nbytes / speed for link, speed in zip(links, speeds, strict=True))


def _expert(run: Run, kinds: list[Kind]) -> Part:
    if run.sizes["expert"] == 1:
        return _communication("expert", 0, 0)
    sent = run.tokens * run.config.model_dim / run.tensor * run.element
    if run.config.moe_impl == "reference":  # all tokens of all devices, gathered, and their sums scattered
        sent *= run.sizes["expert"]
        once = run.collective_s("all_gather", sent, "expert")
    else:
        sent *= run.config.experts_per_token * run.expert_work
        once = run.collective_s("all_to_all", sent, "expert")
    number = _exchanges(run)
    seconds = number * once * _mixtures(kinds)
    formula = (
        f"{number} times {si(sent, 'B')} of a layer's tokens to their experts or back, {si(once, 's')} each, over "
    )
    formula += _wires(run, "expert")
    return _communication("expert", seconds, seconds, formula)


def _exchanges(run: Run) -> int:
    """Of rows over the expert axis, in a layer: there and back, both ways, and once more what is recomputed."""
    return 4 + len({"expert_input", "expert_down"} - anatomy.saved_names(run.config))


def _mixtures(kinds: list[Kind]) -> float:
    """How many layers with experts a step computes."""
    return sum(kind.times for kind in kinds if kind.layer.params.experts)


def _copies_of_rows(run: Run, kinds: list[Kind]) -> Part:
    """Rows of whole registers travel in one piece (moe.contiguous_rows); others are copied into that form.

    Compiled, with room for 327,680 rows of 2880 (gpt-oss-120b on fsdp:64,expert:2), twice what is sent: each of six
    exchanges pads both to 3072 columns, reshapes them, and cuts the result; 32 copies a layer and microbatch, 4.0 s of
    a step of 15.4. Fitted to that: what is sent once, the room three times, at the speed of elementwise work.
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
    """The idle ticks of a pipeline whose stages work `working_s` in a step, and its messages."""
    if run.pipe == 1:
        return []
    rounds = run.config.pipeline_rounds
    passes = rounds * run.microbatches
    tick, ticks = working_s / passes, passes + run.pipe - 1
    # Ticks with passes of one kind, and nothing beside them.
    alone = ticks if run.config.pipeline_schedule == "gpipe" else rounds * run.pipe - 1
    stream = run.tokens * run.config.model_dim * run.element / run.tensor
    message = max(link.hop_s + stream / link.link_bytes_per_s for link in run.effective_links("pipe"))
    exposed = 2 * alone * message + (ticks - alone) * max(0.0, 2 * message - tick)
    vM = f"{rounds}*M" if rounds > 1 else "M"
    share = bubble(run.pipe, run.microbatches, rounds)
    return [
        Part(
            "pipeline bubble",
            "idle",
            (run.pipe - 1) * tick,
            (run.pipe - 1) * tick,
            f"P - 1 = {run.pipe - 1} ticks of {si(tick, 's')}: (P-1)/({vM}+P-1) = {share:.1%}",
        ),
        _communication(
            "pipe",
            2 * ticks * message,
            exposed,
            f"{si(stream, 'B')} from stage to stage and back, {si(message, 's')} each, over {_wires(run, 'pipe')}",
        ),
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
    replicas = " and ".join(_wires(run, axis) for axis in ("context", "expert", "data") if sizes[axis] > 1)
    how = "reduce-scatter, then all-gather the weights of" if run.config.shard_update else "all-reduce"
    formula = f"{how} {si(4 * (experts + others), 'B')} over {replicas}, after the backward pass"
    if run.pipe > 1:
        formula += f"; of embedding and unembedding over {_wires(run, 'pipe')} too"
    return Part("gradient sum", "communication", seconds, seconds, formula)


def _input(run: Run, step_s: float) -> Part:
    nbytes = run.tokens * run.microbatches * 5 * 4
    seconds = nbytes / run.host_bytes_per_s
    formula = f"{si(nbytes, 'B')} of tokens, targets, documents, positions, weights of the loss / "
    formula += f"{si(run.host_bytes_per_s, 'B/s')}, while the step before computes"
    return Part("input", "host", seconds, max(0.0, seconds - step_s), formula)


def _host(run: Run, kinds: list[Kind], nbytes: float) -> Part:
    speed = run.host_bytes_per_s
    one_way = nbytes * run.microbatches / speed
    hiding = [(*kind.by_part[name], kind.times) for kind in kinds for name in run.efficiency.hides_offload]
    forward = math.fsum(seconds * times for seconds, _, times in hiding)
    backward = math.fsum(seconds * times for _, seconds, times in hiding)
    exposed = max(0.0, one_way - forward) + max(0.0, one_way - backward)
    formula = f"{si(nbytes * run.microbatches, 'B')} / {si(speed, 'B/s')}, out behind {si(forward, 's')} of "
    formula += f"{', '.join(run.efficiency.hides_offload)}, back behind {si(backward, 's')}"
    return Part("host offload", "host", 2 * one_way, exposed, formula)


def _slots(run: Run) -> Part:
    """The optimizer state, a layer after the other: to the device, and back."""
    nbytes = slots_of_device(run) if run.config.offload_optimizer else 0.0
    seconds = 2 * nbytes / run.host_bytes_per_s
    formula = f"2 * {si(nbytes, 'B')} / {si(run.host_bytes_per_s, 'B/s')}, there and back in turn"
    return Part("optimizer offload", "host", seconds, seconds, formula)


def _communication(axis: str, seconds: float, exposed: float, formula: str = "") -> Part:
    return Part(f"{axis} communication", "communication", seconds, exposed, formula)


def _wires(run: Run, axis: str) -> str:
    """fsdp:128 on x (4 of 44.5 GB/s), ...: a device's links, one way, at the speed that programs reach."""
    links = (f"{link.name} ({link.size} of {si(link.link_bytes_per_s, 'B/s')})" for link in run.effective_links(axis))
    return f"{axis}:{run.sizes[axis]} on {', '.join(links)}"


# -- command line


def as_json(found: Prediction) -> dict:
    """What --json gives: seconds, bytes, FLOPs."""
    run, config = found.run, found.run.config
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
        "step_s": found.step_s,
        "mfu": found.mfu,
        "own_precision_mfu": found.own_precision_mfu,
        "flops_per_step": found.flops_per_step,
        "tokens_per_s_per_chip": found.tokens_per_s_per_chip,
        "exposed_comm_s": found.exposed_comm_s,
        "bound": found.bound,
        "hbm_bytes": found.hbm_bytes,
        "hbm_limit_bytes": run.hbm_limit,
        "host_bytes": found.host_bytes,
        "host_limit_bytes": run.host_limit if math.isfinite(run.host_limit) else None,
        "fits": found.fits,
        "passes": found.passes,
        "parts": {part.name: {"seconds": part.seconds, "exposed_s": part.exposed_s} for part in found.parts},
        "memory_bytes": found.memory,
    }


def cliffs(run: Run) -> list[str]:
    """Returns a sentence for each size with which a kernel takes over CLIFF times as long as with its neighbour."""
    return [*_cliff_of_attention(run), *_cliff_of_experts(run)]


def _cliff_of_attention(run: Run) -> list[str]:
    """Attention's kernel computes whole tiles: the last ones of a sequence may be almost empty."""
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
    """The experts' kernels cut dims that are multiples of 128. Others have to fit VMEM whole, or they are refused."""
    config, tensor = run.config, run.tensor
    dims = {"model_dim": (config.model_dim, 1), "expert_dim": (config.expert_dim, tensor)}
    odd = {name: -(-size // (128 * n)) * 128 * n for name, (size, n) in dims.items() if size % (128 * n)}
    if not config.num_experts or config.moe_impl != "dropless" or not odd:
        return []
    import groups  # here, for it needs numpy, and what has no such dim needs none

    rows, experts = round(run.tokens * config.experts_per_token), config.num_experts // run.sizes["expert"]
    dtype = "float8_e4m3fn" if "expert_up" in anatomy.fp8_weights(config) else config.dtype
    is_gated = anatomy.swiglu_in_kernel(config)

    def slowdown(model_dim: int = config.model_dim, expert_dim: int = config.expert_dim) -> float:
        """Returns how many times as long as the matrix units a kernel takes at most; infinite: one is refused."""
        D, M = model_dim, expert_dim // tensor
        gated, plain, transposed = (groups.Variant(gated=is_gated), groups.PLAIN, groups.Variant(transpose_rhs=True))
        matmuls = (D, M, gated), (M, D, plain), (M, D, transposed), (D, M, transposed)
        try:
            found = [(groups.default_tiles(rows, K, N, experts, dtype, variant=v), K, N) for K, N, v in matmuls]
            found += [(groups.default_tgmm_tiles(rows, K, N, experts, dtype), K, N) for K, N in ((D, M), (M, D))]
        except ValueError:
            return math.inf
        return max(groups.slowdown(*each) for each in found)

    factor, least = slowdown(), slowdown(**odd)
    if factor <= CLIFF * least and factor < math.inf:
        return []
    sizes = " and ".join(f"{name}={dims[name][0]:,}" for name in odd)
    nearest = " and ".join(f"{size:,}" for size in odd.values())
    takes = (
        "are refused, which" if factor == math.inf else f"take {factor / least:.2f} times as long as with {nearest}:"
    )
    return [f"{sizes}: the experts' kernels {takes} cut only multiples of 128; the nearest is {nearest}"]


def describe(found: Prediction, *, explain: bool = False) -> str:
    """The prediction as a person reads it."""
    run, config, chip = found.run, found.run.config, found.run.chip
    mesh = ", ".join(
        f"{axis} {size} ({', '.join(link.name for link in run.links[axis])})"
        for axis, size in run.sizes.items()
        if size > 1
    )
    slices = f"{run.num_slices} slices of " if run.num_slices > 1 else ""
    tokens = config.batch * config.seq_len
    lines = [
        f"{config.preset} on {slices}{chip.name}:{by(run.topology)}, {run.num_chips:,} chips, predicted",
        f"  mesh     {mesh or 'one device'}",
        f"  batch    {config.batch:,} sequences of {config.seq_len:,}: {tokens:,} tokens"
        + (f", in {config.microbatches} microbatches" if config.microbatches > 1 else ""),
        f"  how      {'bf16' if config.fp8 == 'none' else f'fp8 ({config.fp8})'}, remat {config.remat}"
        + (f" {config.remat_tensors}" if config.remat_tensors else ""),
        "",
        f"{'':26}{'in all':>12}{'exposed':>12}{'of the step':>13}   waits for",
    ]
    for part in found.parts:
        share = part.exposed_s / found.step_s
        times = f"{si(part.seconds, 's'):>12}{si(part.exposed_s, 's'):>12}"
        lines.append(f"  {part.name:24}{times}{share:13.1%}   {part.resource}")
        if explain:
            lines.append(f"      = {part.formula}")
    own = f" of bf16's peak, {found.own_precision_mfu:.1%} of fp8's" if config.fp8 != "none" else ""
    lines += [
        f"  {'step':36}{si(found.step_s, 's'):>12}{'100.0%':>13}   bound by {found.bound}",
        "",
        f"  layers   compute {si(found.passes['forward'], 's')} forward, {si(found.passes['backward'], 's')} backward",
        f"  MFU      {found.mfu:.1%}{own}; {found.tokens_per_s_per_chip:,.0f} tokens/s a chip; "
        f"{si(found.flops_per_step, 'FLOP')} a step",
        f"  memory   {found.hbm_bytes / GiB:.1f} of {run.hbm_limit / GiB:.1f} GiB a device"
        + ("" if found.fits else f": DOES NOT FIT, {describe_shortfall(found.shortfall())}"),
    ]
    held = {name: nbytes for name, nbytes in found.memory.items() if nbytes}
    held |= {"on the host": found.host_bytes} if found.host_bytes else {}
    width = max(map(len, held))
    lines += [f"           {name:{width}} {nbytes / GiB:8.2f} GiB" for name, nbytes in held.items()]
    if found.host_bytes and math.isfinite(run.host_limit):
        lines[-1] += f" of {run.host_limit / GiB:.1f}"
    lines += [f"  cliff    {sentence}" for sentence in cliffs(run)]
    if explain:
        peaks = f"{run.num_chips} * {si(chip.bf16_flops_per_s, 'FLOP/s')}"
        lines.append(f"  MFU      = {si(found.flops_per_step, 'FLOP')} / ({found.step_s:.4g} s * {peaks})")
    return "\n".join(lines)


def describe_shortfall(shortfall: dict[str, float]) -> str:
    """What `Prediction.lacks`, in words."""
    names = {"hbm": "", "host": " of the host's memory"}
    return " and ".join(f"{nbytes / GiB:.2f} GiB{names[memory]} short" for memory, nbytes in shortfall.items())


def matmuls(found: Prediction) -> list[tuple[str, float, float, float]]:
    """(weight, FLOPs, bytes, FLOP/s at most) of a layer's forward matmuls on a device, by the roofline."""
    run, rows = found.run, []
    for layer in layers_of(run):
        for product in layer.products:
            m, k, n, _ = local_shape(run, product)
            flops, nbytes = 2 * m * k * n, moved_bytes(run, product)
            peak = run.flops_per_s(product.dtype) / run.efficiency.matmul
            rows.append((product.weight, flops, nbytes, min(peak, flops / nbytes * run.hbm_bytes_per_s)))
    return list(dict.fromkeys(rows))


def describe_matmuls(found: Prediction) -> str:
    """A layer's matmuls against the roofline of a device, as a table."""
    run = found.run
    ridge = run.chip.flops_per_s(run.dtype) / run.chip.hbm_bytes_per_s
    lines = [f"matmuls of a layer, forward, on a device; its ridge is at {ridge:.1f} FLOPs a byte of HBM"]
    lines.append(f"  {'weight':16}{'FLOPs':>14}{'bytes':>14}{'FLOPs a byte':>14}{'FLOP/s at most':>18}   bound by")
    for name, flops, nbytes, speed in matmuls(found):
        bound = "memory" if speed == flops / nbytes * run.hbm_bytes_per_s else "compute"
        intensity = f"{flops / nbytes:,.1f}"
        lines.append(
            f"  {name:16}{si(flops, ''):>14}{si(nbytes, 'B'):>14}{intensity:>14}{si(speed, 'FLOP/s'):>18}   {bound}"
        )
    return "\n".join(lines)


def plot(predictions: dict[str, Prediction], path: str) -> None:
    """The time of each step by part; for the first of them, a layer's matmuls on the roofline of a device."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(15, 4 + 0.3 * len(predictions)), layout="constrained")
    bars, roof = figure.subplots(1, 2)
    names = dict.fromkeys(part.name for found in predictions.values() for part in found.parts)
    left = dict.fromkeys(predictions, 0.0)
    for number, name in enumerate(names):
        exposed = lambda found, name=name: math.fsum(part.exposed_s for part in found.parts if part.name == name)
        seconds = [exposed(found) for found in predictions.values()]
        bars.barh(list(predictions), seconds, left=list(left.values()), color=f"C{number}", label=name)
        left = {label: left[label] + s for label, s in zip(left, seconds, strict=True)}
    bars.invert_yaxis()
    bars.set(xlabel="seconds", title="Time of a step by part, predicted")
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)

    label, found = next(iter(predictions.items()))
    run = found.run
    peak = run.chip.flops_per_s(run.dtype) / run.chip.devices
    ridge = peak / run.hbm_bytes_per_s
    points = [(name, flops / nbytes, speed) for name, flops, nbytes, speed in matmuls(found)]
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
    found = predict(run_of(config, *parse_topology(topology), num_slices=num_slices))
    if args.plot:
        plot({config.preset: found}, args.plot)
    if args.json:
        return print(json.dumps(as_json(found) | {"cliffs": cliffs(found.run)}))
    print(describe(found, explain=args.explain))
    if args.explain:
        print(f"\n{describe_matmuls(found)}")


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
