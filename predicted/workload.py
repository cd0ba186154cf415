"""Predicts what one device of a run computes and stores: its shares of the model and the batch. No JAX.

predicted/step.py adds this up to a step. With T positions in a sequence, M microbatches, and the sizes of mesh axes:

    b = batch * T / (data * fsdp * expert * context * M)     tokens of a microbatch, shared by the devices of `tensor`

fsdp includes fsdp_transpose.

**Formula.** Each part of a layer's time is its arithmetic divided by a rate that programs achieve (`Efficiency`). C is
the achieved FLOP/s of a device, W_hbm the achieved bytes/s of its memory (HBM):

    matmul        (3 * forward + recomputed) FLOPs / C       dims padded to the matrix unit, rows of experts to tiles;
                                                             or its bytes / W_hbm, if that takes longer
    attention     scores * (forward * (1 or 2) + backward)   of a fused kernel, which computes full blocks of scores;
                                                             2 if the backward pass runs it forward again
    elementwise   4 * bytes / W_hbm                          norms, RoPE, SwiGLU, tokens sorted by expert and back

The factor 3 is one forward and two backward matmuls. The factor 4 is one forward pass, two backward, and one repeated
in the backward pass. Elementwise work is always repeated there, since it is fused with the operations that read its
result. (With remat=none this project's program reads saved results instead, and is no faster; MaxText's is.)

**Memory of a device** (`memory_of`) is the sum of three terms. The first is the state: weights and optimizer moments
in float32, which `shard_update` shards further, and gradients. The second is the activations that layers save, for all
microbatches in flight. Arrays are stored in tiles of 128 columns, so a head of 64 takes the space of a head of 128. The
third is the larger of two peaks:

    a layer's backward pass     the activations that are not saved, or come from the host; their gradients, half as
                                large as all activations, or as large with several layers in an iteration; the
                                gathered weights of two layers, and the gathered gradients of one; the float32
                                gradient of a tied embedding
    the loss                    the gathered unembedding, its gradient in float32; the logits of `loss_chunk` positions
                                of each sequence, and their gradient

Attention over `context` and pipeline stages add to this. If `tensor` shards the residual stream, the gradient of a
column-parallel weight needs the gathered operand. The backward pass gathers it again. With remat=none it was saved.

**Figures.** "Compiled" marks a figure from a program that libtpu compiled for TPU7x. "Measured" marks a
published measurement. "Chosen" marks a value that makes predictions agree with measured steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import anatomy
import compiler_flags
from config import Config
from hardware import HBM_REACHED, HOST_BYTES_PER_S, KERNEL_CLOCK, LINKS_REACHED, MATMUL_REACHED, Axis, Chip
from placement import BATCH_AXES, WEIGHT_AXES, fill_mesh, parse_mesh
from predicted import transformer
from predicted.bounds import in_flight, matmul_dtype
from predicted.interconnect import collective_s, links_of
from predicted.matmul import DTYPE_BYTES
from rules import ring_size, settled

# -- what programs reach


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of a chip's peak rates that programs achieve. All models use the same values.

    Compiled values are cycles of the project's attention kernels, compiled for TPU7x and counted by
    compiled/bundles.py. Heads have 128 dims, blocks 1024 x 1024 scores. At peak rate, the two forward matmuls of such a
    block would take 1024 cycles, the five backward ones 2560.
    """

    # Shares of the peak at the running clock (Chip.running_hz).
    matmul: float = MATMUL_REACHED
    # The share of that which XLA's matmuls reach with so many MiB of scoped VMEM, which allow larger tiles; linear
    # between these. Compiled: the matmuls of a step of Llama 3.1 8B take 1.82, 0.92, 0.78 and 0.76 s. Measured runs
    # have 60 MiB or more. Assumed for other chips.
    matmul_by_vmem: tuple[tuple[float, float], ...] = ((16, 0.42), (32, 0.83), (48, 0.97), (60, 1.0))
    # Chosen: matmuls in FP8 achieve this share of the share above. No figure of theirs is published.
    fp8_matmul: float = 0.88
    attention_forward: float = KERNEL_CLOCK * 1024 / 1897  # compiled: flash.py, 68.3k cycles for 36 blocks
    attention_backward: float = KERNEL_CLOCK * 2560 / 4405  # compiled: flash_backward.py, 158.6k for 36 blocks
    # Shares of the published bandwidths.
    hbm: float = HBM_REACHED
    links: float = LINKS_REACHED  # of a link's bandwidth, one way
    # Chosen: the time of elementwise work is what the other parts leave of all measured steps (published.py). The share
    # is low because a program moves more bytes than are counted here. Examples are transposes, float32 values, and
    # operations that are not fused.
    elementwise: float = 0.5  # of HBM's peak
    copies: float = 0.37  # of HBM's peak, fitted to copies in compiled programs (predicted/step.py, "Copies")

    # The router's matmuls are in float32. The matrix unit takes this many bf16 passes for one, on average. It splits a
    # float32 operand in three bf16 parts: three passes if the other operand is bf16, six if both are float32.
    # Compiled, forward and backward: 119k, 122k, 220k cycles (8,192 tokens, D 4096, E 128).
    passes_of_f32: int = 4
    # Rows of a tile. Tiles at the ends of an expert's rows are partly empty: each expert computes one tile more than it
    # has rows for. Compiled: 1.44 times the work, at 1024 rows.
    expert_tile: int = 512
    gated_experts: bool = True  # the experts' kernel also computes their SwiGLU (gmm.py)
    # Whether the experts' kernel reads a tile while it multiplies another one (gmm.py). If not, the times of both add
    # up, without empty rows of tiles, and rows whose width 128 does not divide are copied before and after.
    overlapped_experts: bool = True
    # Whether the router's weights multiply rows before the experts' last matmul (moe.py), so that the backward pass
    # does not read its results. If not, they multiply the results.
    weighted_before: bool = True
    attention_block: int = 1024  # scores along an edge; a block that the mask crosses is computed in full
    # The extra time of a block that the mask crosses, over the time of a full block: (forward, backward). The compiled
    # values above are means that include it.
    attention_crossed: tuple[float, float] = (0.0, 0.0)
    # Positions of a tile. The kernel computes whole tiles of a sequence. Compiled: 1,025 tokens take 2.01 times the
    # cycles of 1,024 forward and 1.93 times backward. This value predicts 1.87.
    attention_tile: int = 512
    # The time of a block with heads of 256, over the time with heads of 128. Heads of 64 or 192 take as long as heads
    # of 128. The softmax takes the same time for all of them, and a dim of 128 fills only half of the matrix unit.
    # Compiled, for 8192 tokens: 86.0k / 69.5k cycles forward, 201.5k / 166.3k backward.
    attention_of_256: float = 1.22

    usable_hbm: float = 94.74 / 96  # compiled: the limit that XLA reports for a TPU7x device, in GiB
    host_bytes_per_s: float = HOST_BYTES_PER_S  # of a device one way, for chips without a published figure
    # The parts of a layer's compute that hide the transfer of its activations. Compiled, without compiler flags: only
    # attention's kernel (remat.py).
    hides_offload: tuple[str, ...] = ("attention",)
    # Whether a reduce-scatter of gradients hides only behind the layer's backward pass after its MLP or experts.
    # Compiled, DeepSeek-V3 in FP8 on fsdp:512: of the 128 ms that a layer's sums take, the device waits for 66.
    late_sums: bool = True
    # Whether weights that are gathered ahead are copied at the end of an iteration of the layer loop. Other copies
    # align weights whose shards are not whole tiles of rows, and their gradients before these are sent. Those of
    # experts need no such copy. Compiled: 0.2 s of a step of Llama 3.1 70B, 0.7 s of Gemma 31B.
    copies_weights: bool = True
    # Whether a table of per-layer embeddings is looked up in the devices' columns (model.py), not gathered.
    looks_up_columns: bool = True
    # Bytes that the loss reads and writes for a logit: in float32, with its gradient, four times.
    logit_bytes: int = 16
    # Whether elementwise work is repeated in the backward pass with remat=none, too.
    always_repeated: bool = True


TODAY = Efficiency()  # of this project's programs
# The efficiencies of MaxText's programs, whose steps were measured. Their attention kernel is tokamax's splash
# attention, their experts' kernel tokamax's grouped matmul. Both were measured on TPU7x (tokamax/data/autotuning of
# github.com/openxla/tokamax at 783ea95). Of heads of 128, a block takes 2,500 cycles of 1.76 GHz forward and 5,425
# backward without a mask (8k and 16k tokens), and 4,600 and 7,000 more if a causal mask crosses it: so forward passes
# of 4k, 8k and 16k come to 1.00, 0.98 and 1.05 of the measured time, backward ones to 0.98, 1.00 and 0.95. Of 57 times
# of the experts' kernel, the sum of matmul and memory comes to 0.98 in the median; its worst is 0.5, without the copies
# of rows. All parts of a layer hide its offload, and the full backward pass of a layer hides the sums of its gradients.
# No weights are copied: most of these runs shard weights in two dims, and their loops carry none between iterations.
# Logits are in bfloat16: base.yml has logits_dot_in_fp32 off. It casts them to float32 for the loss
# (cast_logits_to_fp32); assumed: XLA fuses the cast, so that no float32 logits are written. With remat=none no
# elementwise work is repeated: of Gemma 4 E2B and E4B there are runs with and without recomputation.
MAXTEXT = replace(
    TODAY,
    attention_forward=KERNEL_CLOCK * 1024 / 2500,
    attention_backward=KERNEL_CLOCK * 2560 / 5425,
    attention_crossed=(4600 / 2500, 7000 / 5425),
    hides_offload=("matmul", "attention", "elementwise"),
    gated_experts=False,
    overlapped_experts=False,
    weighted_before=False,
    late_sums=False,
    copies_weights=False,
    looks_up_columns=False,
    logit_bytes=8,
    always_repeated=False,
)
PROGRAMS = {"this": TODAY, "maxtext": MAXTEXT}


# -- a run


@dataclass(frozen=True)
class Run:
    """A run on a slice or several, and quantities of one device. Seconds, bytes and FLOP/s are those of a device."""

    config: Config
    chip: Chip
    topology: tuple[int, ...]
    num_slices: int
    sizes: dict[str, int]  # {mesh axis: size}, for all axes; used in place of config.mesh
    links: dict[str, list[Axis]]  # {mesh axis: the links that it is laid out on}
    efficiency: Efficiency = TODAY

    @property
    def gathers_ahead(self) -> bool:
        """Whether a layer's gathers hide behind the layer before. MaxText's do, and it has no flag for it."""
        return self.config.prefetch or not self.efficiency.copies_weights

    @property
    def program(self) -> str:
        """The name of the program in PROGRAMS that has these efficiencies; "another" if none has."""
        return next((name for name, efficiency in PROGRAMS.items() if efficiency == self.efficiency), "another")

    @property
    def num_chips(self) -> int:
        return math.prod(self.topology) * self.num_slices

    @property
    def hbm_limit(self) -> float:
        """The bytes of a device's HBM that a program can use."""
        return self.chip.hbm_bytes / self.chip.devices * self.efficiency.usable_hbm

    @property
    def host_limit(self) -> float:
        """The bytes of a device's share of its host's memory; infinite for a chip without a published figure."""
        return (self.chip.host_memory_bytes or math.inf) / math.prod(self.chip.host) / self.chip.devices

    @property
    def pipe(self) -> int:
        return self.sizes["pipe"]

    @property
    def in_flight(self) -> float:
        """The number of microbatches whose saved activations a device holds at once; a fraction with several rounds."""
        config = self.config
        gpipe = config.pipeline_schedule == "gpipe"
        return in_flight(self.pipe, self.microbatches, config.pipeline_rounds, gpipe=gpipe) if self.pipe > 1 else 1

    @property
    def tensor(self) -> int:
        return self.sizes["tensor"]

    @property
    def microbatches(self) -> int:
        return self.config.microbatches

    @property
    def tokens(self) -> float:
        """b: the number of tokens of a microbatch that the devices along `tensor` share."""
        groups = math.prod(self.sizes[axis] for axis in (*BATCH_AXES, "context"))
        return self.config.batch * self.config.seq_len / groups / self.microbatches

    @property
    def gathered_over(self) -> int:
        """The devices along `expert` whose tokens each of them has: 1 without this axis, 0 if rows are sent."""
        devices = self.sizes["expert"]
        gathers = self.efficiency.weighted_before and anatomy.gathers_tokens(self.config, devices)
        return devices if gathers or devices == 1 else 0

    @property
    def expert_buffer_ratio(self) -> float:
        """The rows in the buffers of a device's experts, over the device's (token, choice) pairs."""
        if not self.config.num_experts:
            return 1.0
        tokens = max(1, round(self.tokens / self.config.moe_parts))
        rows = anatomy.expert_rows(self.config, tokens, self.sizes["expert"])
        return rows / (tokens * self.config.experts_per_token)

    @property
    def expert_work(self) -> float:
        """The rows that a device's experts multiply, over the device's (token, choice) pairs.

        `dropless` multiplies only the rows that are filled, the other methods all rows of the buffers.
        """
        ratio = self.expert_buffer_ratio
        return min(1.0, ratio) if self.config.moe_impl == "dropless" else ratio

    @property
    def experts_filled(self) -> float:
        """The rows that a device's experts multiply, over the rows in their buffers."""
        return self.expert_work / self.expert_buffer_ratio

    @property
    def element(self) -> int:
        """The bytes of one element of an activation."""
        return anatomy.BYTES[self.config.dtype]

    @property
    def dtype(self) -> str:
        """The dtype in which the layers' weights are multiplied."""
        return matmul_dtype(self.config)

    @property
    def hbm_bytes_per_s(self) -> float:
        """The peak of a device's HBM."""
        return self.chip.hbm_bytes_per_s / self.chip.devices

    @property
    def host_bytes_per_s(self) -> float:
        """The rate of a device's transfers to or from its host, one way."""
        return (self.chip.pcie_bytes_per_s or self.chip.devices * self.efficiency.host_bytes_per_s) / self.chip.devices

    @property
    def vmem_share(self) -> float:
        """The share of their full rate that XLA's matmuls reach with the run's limit of scoped VMEM."""
        points = self.efficiency.matmul_by_vmem
        mib = compiler_flags.scoped_vmem_kib(compiler_flags.for_run(self.config)) / 1024
        mib = min(max(mib, points[0][0]), points[-1][0])
        (low, start), (high, end) = next(pair for pair in itertools.pairwise(points) if mib <= pair[1][0])
        return start + (end - start) * (mib - low) / (high - low)

    def flops_per_s(self, dtype: str = "bf16", *, kernel: bool = False) -> float:
        """The FLOP/s that a device's matmuls achieve. An f32 matmul takes `passes_of_f32` passes of a bf16 matmul.

        With `kernel` they are of a Pallas kernel, which chooses its own tiles.
        """
        e = self.efficiency
        share = e.matmul * (e.fp8_matmul if dtype == "fp8" else 1) * (1 if kernel else self.vmem_share)
        return self.peak_flops_per_s(dtype) * share

    def peak_flops_per_s(self, dtype: str = "bf16") -> float:
        """The peak of a device's matrix units at the running clock, in passes of bf16 for f32."""
        passes = self.efficiency.passes_of_f32 if dtype == "f32" else 1
        return self.chip.flops_per_s(dtype) / self.chip.devices * self.chip.running_hz / self.chip.clock_hz / passes

    def effective_links(self, axis: str) -> list[Axis]:
        """The links of a mesh axis, with the bandwidth that programs achieve."""
        share = self.efficiency.links
        return [dataclasses.replace(link, link_bytes_per_s=link.link_bytes_per_s * share) for link in self.links[axis]]

    @property
    def shards(self) -> int:
        """The number of shards that the axes over which weights are gathered make of a matrix."""
        return math.prod(self.sizes[axis] for axis in WEIGHT_AXES)

    def weights_s(self, kind: str, nbytes: float, *, divisible_by_3: bool = False) -> float:
        """Returns the seconds to gather weights, or to reduce-scatter their gradients, over one axis after the other.

        Arguments: those of `collective_s`.
        """
        seconds = 0.0
        for axis in (axis for axis in reversed(WEIGHT_AXES) if self.sizes[axis] > 1):
            seconds += self.collective_s(kind, nbytes, axis, divisible_by_3=divisible_by_3)
            nbytes /= self.sizes[axis]  # the axis that is gathered before, or summed after
        return seconds

    @property
    def pads_sums(self) -> bool:
        """Whether XLA may pad the operand of a reduce-scatter, so that it splits into three equal parts."""
        return compiler_flags.for_run(self.config).get(compiler_flags.PADS_SUMS) == "true"

    def collective_s(self, kind: str, nbytes: float, *axes: str, divisible_by_3: bool = False) -> float:
        """Returns the seconds of a collective over mesh axes, the inner one first.

        It uses the links of all torus axes at once, with two exceptions, which follow what XLA compiles for TPU7x. The
        collective then goes round one ring of all the devices. This holds for an all-gather or reduce-scatter over a
        part of a torus axis and both devices of a chip. It also holds for a reduce-scatter over three torus axes,
        unless its operand splits into three equal parts, one for each axis.

        Args:
          kind: a collective of predicted/interconnect.py, such as "all_gather".
          nbytes: the bytes of the gathered array; for an all_to_all, the bytes that each device holds.
          divisible_by_3: whether the number of elements that are summed is a multiple of 3. If not, XLA may pad the
            operand (`pads_sums`).
        """
        links = [link for axis in axes for link in self.effective_links(axis)]
        slices = [link for link in links if link.name.endswith("slices")]
        dies = [link for link in links if link.name.endswith("die to die")]
        wires = [link for link in links if link not in dies + slices]
        sums = kind == "reduce_scatter"
        on_part_of_an_axis = dies and len(wires) > 1 and any(" of " in link.name for link in wires)
        one_ring = on_part_of_an_axis and kind in ("all_gather", "reduce_scatter")
        if one_ring or (sums and len(wires) > 2 and not (divisible_by_3 or self.pads_sums)):
            # Devices of a chip in the ring. Only one of them sends over the chip's links, with their full bandwidth.
            per_chip = math.prod(link.size for link in dies)
            slowest = min(wires, key=lambda link: link.link_bytes_per_s)
            size, speed = per_chip * math.prod(link.size for link in wires), per_chip * slowest.link_bytes_per_s
            ring = dataclasses.replace(slowest, size=size, link_bytes_per_s=speed, wrap=True)
            links = [ring, *slices]
        return collective_s(kind, nbytes, links, spread=not sums or len(wires) > 1)


def run_of(
    config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1, efficiency: Efficiency = TODAY
) -> Run:
    """Returns the run that `config` describes, on `num_slices` slices of `chip` with this topology.

    Raises:
      ValueError: the mesh sizes do not multiply to the number of devices, the mesh cannot be laid out on the torus, or
        remat=auto is not resolved.
    """
    if config.remat == "auto":
        raise ValueError(
            "remat=auto is a choice still to be made: roofline.py remat --remat=auto with these flags makes it"
        )
    sizes = fill_mesh(parse_mesh(config.mesh), chip.devices * math.prod(topology) * max(num_slices, 1))
    links = links_of(sizes, chip, topology, num_slices=num_slices, core_axis=config.core_axis)
    return Run(settled(config, sizes), chip, tuple(topology), num_slices, sizes, links, efficiency)


# -- a layer


# XLA stores matrices in tiles of 8 x 128 elements.
ROWS_OF_A_TILE, COLUMNS_OF_A_TILE = 8, 128
# The weights whose contracted dim `tensor` shards. It shards the other dim of all other weights.
ROW_PARALLEL = {"w_o", "w_down", "expert_down", "shared_down", "w_ple_out"}


@dataclass(frozen=True)
class Product:
    """A layer's matmul with a weight on all devices: [tokens * copies, k] @ [k, n]."""

    weight: str
    part: str
    k: int
    n: int
    copies: int  # rows of a token: the number of its experts, else 1
    recomputed: bool  # whether the backward pass repeats the forward matmul
    dtype: str  # bf16, fp8 or f32


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a layer: those of its experts, and the others."""

    experts: int
    others: int


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The costs of one layer of a kind (dense, or with experts). "A token" means for each token of the batch."""

    config: Config  # the model as these layers have it
    num_layers: int
    products: list[Product]
    params: Counts
    fp8_params: Counts  # of weights that are gathered in FP8
    float32_params: Counts  # of weights that are gathered in float32, in which their gradients are, too
    params_by_3: Counts  # of weights with a multiple of 3 elements; their shards are assumed to have one, too
    attention_recomputed: bool  # whether the backward pass runs attention's forward kernel again
    keys: float  # scores that the kernel computes for a query, the mean over the layers
    global_keys: float  # the summand of `keys` from layers without a window
    elementwise: tuple[float, float]  # elements a token, forward: (of attention, of the rest), see elementwise_elements
    saved_bytes: float  # a token, of activations saved on the device
    offloaded_bytes: float  # a token, of activations saved on the host
    activation_bytes: float  # a token, of all activations that the backward pass reads
    norm_bytes: float  # a token, of the normed operands of column-parallel matmuls; 0 if they are not saved

    def gathered_params(self, run: Run, with_experts: bool = True) -> float:
        """The number of a layer's parameters on a device after they are gathered over `fsdp`."""
        return _gathered(run, self.params, with_experts)

    def gathered_params_by_3(self, run: Run) -> float:
        """The number of gathered parameters whose gradients split into three equal parts (see Run.collective_s)."""
        return _gathered(run, self.params_by_3)

    def gathered_bytes(self, run: Run, with_experts: bool = True) -> float:
        """The bytes of a layer's gathered parameters on a device, in the dtypes in which they are gathered."""
        fp8 = _gathered(run, self.fp8_params, with_experts)
        return self.gradient_bytes(run, with_experts) - (run.element - DTYPE_BYTES["fp8"]) * fp8

    def gradient_bytes(self, run: Run, with_experts: bool = True) -> float:
        """The bytes of the gradients of a layer's gathered parameters, before they are reduce-scattered."""
        float32 = _gathered(run, self.float32_params, with_experts)
        return run.element * self.gathered_params(run, with_experts) + (4 - run.element) * float32


def _gathered(run: Run, params: Counts, with_experts: bool = True) -> float:
    """The number of these parameters on a device after they are gathered over `fsdp`."""
    experts = params.experts / run.sizes["expert"] if with_experts else 0
    return (experts + params.others) / run.tensor


def layers_of(run: Run) -> list[Layer]:
    """Returns the kinds of layers that the model has: dense, with experts, or both; or local and global ones."""
    row_copies = run.tensor if run.gathered_over else 1
    return _layers(run.config, kernel_keys(run), run.expert_buffer_ratio, row_copies, run.gathered_over, run.efficiency)


def kernel_keys(run: Run) -> tuple[float, float]:
    """Returns (scores, global scores) that attention's kernel computes for a query, the means over all layers.

    The second number is the summand of the first that comes from layers without a window.
    """
    config, block = run.config, run.efficiency.attention_block
    shard = config.seq_len / ring_size(config, run.sizes)
    padding = filled(shard, run.efficiency.attention_tile) / shard  # computed positions over positions of the sequence
    T = padding * config.seq_len
    causal = padding * (T if T <= block else T / 2 + block / 2)  # blocks on the diagonal are computed in full
    windowed = min(causal, padding * (config.window + block)) if config.window else causal
    num_layers, num_global = anatomy.num_run_layers(config), transformer.num_global_layers(config)
    keys = (num_global * causal + (num_layers - num_global) * windowed) / num_layers
    return keys, num_global * causal / num_layers


@cache
def _layers(
    config: Config,
    keys: tuple[float, float],
    expert_buffer_ratio: float,
    row_copies: int,
    gathered_over: int,
    efficiency: Efficiency,
) -> list[Layer]:
    """The costs of a model's dense layers and of its layers with experts; a model has one kind or both.

    Args:
      keys: the result of `kernel_keys`.
      expert_buffer_ratio: rows in the experts' buffers, over (token, choice) pairs.
      row_copies: the number of devices along `tensor` that each hold full rows of experts.
      gathered_over: that of Run.
    """
    num_experts = anatomy.num_expert_layers(config)
    kinds = (False, anatomy.num_run_layers(config) - num_experts), (True, num_experts)
    rows = dict(expert_buffer_ratio=expert_buffer_ratio, row_copies=row_copies)
    if anatomy.two_kinds(config):
        num_global = transformer.num_global_layers(config)
        of_local = (keys[0] - keys[1]) * config.num_layers / (config.num_layers - num_global)
        of_global = keys[1] * config.num_layers / num_global
        keys_of = lambda window: (of_local, 0.0) if window else (of_global, of_global)
        layers = transformer.layers_by_window(config)
        kinds_of_keys = [(kind, num_experts > 0, number, keys_of(window)) for kind, number, window in layers]
    else:
        kinds_of_keys = [(config, experts, number, keys) for experts, number in kinds if number]
    return [_layer(*kind, rows, gathered_over, efficiency) for kind in kinds_of_keys]


def _layer(
    config: Config,
    experts: bool,
    num_layers: int,
    keys: tuple[float, float],
    rows: dict[str, float],
    gathered_over: int,
    efficiency: Efficiency,
) -> Layer:
    """The costs of one kind of layer, with experts or without.

    `rows` has expert_buffer_ratio and row_copies. These, `keys` and `gathered_over` are those of `_layers`.
    """
    names = anatomy.layer_weights(config, experts=experts)
    weights = {name: weight for name, weight in transformer.weights(config).items() if name in names}
    by_3 = {name for name, weight in weights.items() if math.prod(weight.shape[1:]) % 3 == 0}
    fp8 = anatomy.fp8_weights(config)
    results = frozenset() if efficiency.weighted_before else frozenset({"expert_down"})
    saved = anatomy.read_names(anatomy.saved_names(config), config) | (anatomy.saved_names(config) & results)
    offloaded = saved & anatomy.offloaded_names(config)
    read = anatomy.saved_names(dataclasses.replace(config, remat="none", remat_tensors=""))
    nbytes = partial(transformer.saved_bytes_per_layer, config, columns=COLUMNS_OF_A_TILE, experts=experts, **rows)
    of_results = anatomy.activations(config, experts=experts, **rows).get("expert_down", 0)
    of_results *= anatomy.BYTES[config.dtype]
    activation_bytes = nbytes(read) + of_results  # of the experts' results, or of their gradients
    if experts and "expert_up" in fp8 and "expert_input" not in saved:
        # The operands of the experts are the largest activations. They are held in FP8 until the gradients of the
        # experts' weights are computed. Compiled: Qwen3.
        activation_bytes -= (1 - 1 / anatomy.BYTES[config.dtype]) * nbytes({"expert_input"})
    return Layer(
        config=config,
        num_layers=num_layers,
        products=_products(config, weights, saved, results) + _input_products(config),
        params=_count(weights, weights),
        fp8_params=_count(weights, fp8),
        float32_params=_count(weights, anatomy.FLOAT32_WEIGHTS),
        params_by_3=_count(weights, by_3),
        attention_recomputed=not saved >= {"context", "log_sum_exp"},
        keys=keys[0],
        global_keys=keys[1],
        elementwise=elementwise_elements(config, experts, efficiency, gathered_over, **rows),
        saved_bytes=nbytes(saved - offloaded) + of_results * ("expert_down" in saved - offloaded),
        offloaded_bytes=nbytes(offloaded) + of_results * ("expert_down" in offloaded),
        activation_bytes=activation_bytes,
        norm_bytes=nbytes(saved & {"norm_attention", "norm_mlp"}),
    )


def _count(weights: Mapping[str, transformer.Weight], names: Collection[str]) -> Counts:
    """The numbers of parameters in the weights of a layer that are among `names`."""
    size = lambda of_experts: sum(
        math.prod(weight.shape[1:])
        for name, weight in weights.items()
        if name in names and (weight.part == "experts") == of_experts
    )
    return Counts(experts=size(True), others=size(False))


def _products(
    config: Config, weights: Mapping[str, transformer.Weight], saved: Collection[str], read: Collection[str]
) -> list[Product]:
    """The matmuls of a layer with these weights. Matmuls whose results are `saved` are not repeated.

    `read`: results that the backward pass reads in addition to those of `anatomy.read_names`.
    """
    size, fp8, products = anatomy.sizes(config), anatomy.fp8_weights(config), []
    for name, weight in weights.items():
        if not weight.makes:  # not the weight of a matmul
            continue
        dims, copies = weight.shape[1:], 1
        if weight.part == "experts":
            dims, copies = (size["D"], size["M"]), config.experts_per_token
        if name == "expert_down":
            dims = dims[::-1]
        k, n = (math.prod(dims[:-1]), dims[-1]) if name == "w_o" else (dims[0], math.prod(dims[1:]))
        recomputed = transformer.multiplied_again(weight, saved, config) or weight.makes in set(read) - set(saved)
        dtype = "fp8" if name in fp8 else "f32" if name in anatomy.FLOAT32_WEIGHTS else "bf16"
        products.append(Product(name, weight.part, k, n, copies, recomputed, dtype))
    return products


def _input_products(config: Config) -> list[Product]:
    """A layer's part of the matmul before the layers that makes per-layer embeddings of the model's."""
    size = anatomy.sizes(config)
    return [Product("ple_project", "layer inputs", size["D"], size["P"], 1, False, "bf16")] if config.ple_dim else []


def filled(length: float, tile: int) -> float:
    """The positions that attention's kernel computes for a sequence of `length`: a multiple of the tile.

    The tile is at most the length, rounded up to a multiple of 256.
    """
    tile = min(tile, 256 * math.ceil(length / 256))
    return tile * math.ceil(length / tile)


def elementwise_elements(
    config: Config,
    experts: bool,
    efficiency: Efficiency,
    gathered_over: int = 1,
    expert_buffer_ratio: float = 1.0,
    row_copies: int = 1,
) -> tuple[float, float]:
    """Returns the elements a token that a layer's elementwise work reads and writes in the forward pass.

    The first number is that of attention:

        norm                                                          2D
        rotation of queries and keys, written in the kernel's layout  2(N+K)Hk, twice with qk_norm
        values to the kernel's layout, the result from it             2(K+N)Hv
        residual addition                                             3D
        norm of the result, with post_norms                           2D
        norm of the values, with value_norm                           2K*Hv
        norms of latent queries, keys and values                      2(q_lora_rank + kv_lora_rank)

    The second number is that of the rest of the layer:

        norm and residual addition                                    5D
        norm of the result, with post_norms                           2D
        SwiGLU of a dense MLP, or of shared experts                   3F or 3M for each
        per-layer embeddings: looked up, normed, added, gated         12P, and norm and residual addition 5D
        rows sorted by expert, and back                               3X*D, plus D for the sum (below)
        rows of the experts' buffers                                  see `_buffer_elements`
        router                                                        4E
        norms of their own, with expert_norms                         6D, and 2D for shared experts

    The backward pass has twice as many, and recomputation as many again. Rows are copied to their expert (2X*D), back
    (2X*D) and added up (X*D). The backward pass repeats the first copy, and copies and adds up gradients (5X*D). That
    is 12X*D in all, four times 3X*D. Weights that multiply the results of experts (not `efficiency.weighted_before`)
    have gradients for which these are copied again and read, 20X*D.

    If N devices gather the tokens of all, rows of the buffers are copied, filled or not, and the sums are those of N
    devices' tokens: N/2*D in place of D.

    Args:
      gathered_over: N, that of Run.
      expert_buffer_ratio: rows in the experts' buffers, over (token, choice) pairs.
      row_copies: the number of devices along `tensor` that each hold full rows of experts, and so all sort them.
    """
    size = anatomy.sizes(config)
    D, N, K, Hk, Hv = (size[dim] for dim in "DNKHU")
    norms = 5 * D + (2 * D if config.post_norms else 0)
    attention = norms + 2 * (N + K) * Hk * (2 if config.qk_norm else 1) + 2 * (K + N) * Hv
    attention += 2 * (config.q_lora_rank + config.kv_lora_rank) + (2 * K * Hv if config.value_norm else 0)
    norms += 5 * D + 12 * size["P"] if config.ple_dim else 0
    if not experts:
        return attention, norms + 3 * size["F"]
    X, shared = config.experts_per_token, 3 * size["J"]
    norms += (8 if config.num_shared_experts else 6) * D if config.expert_norms else 0
    copied = (3 if efficiency.weighted_before else 5) * X * D * row_copies
    copied = copied * expert_buffer_ratio + D * gathered_over / 2 * row_copies if gathered_over > 1 else copied + D
    of_buffers = _buffer_elements(config, efficiency, X * expert_buffer_ratio, sent=gathered_over == 0)
    return attention, norms + shared + copied + of_buffers + 4 * config.num_experts


def _buffer_elements(config: Config, efficiency: Efficiency, rows: float, sent: bool) -> float:
    """The part of `elementwise_elements` that passes over the experts' buffers take, which have `rows` rows a token.

        SwiGLU of the experts                                         3M a row
        their product with the router's weights                       2M, in FP8 with the scaling

    With `efficiency.gated_experts` the experts' kernels compute their SwiGLU, add biases before it, multiply by the
    router's weights, and take gradients back through all of it. The gradient is half of a SwiGLU's elementwise work, of
    which 0.2 is left: for 131,072 rows of 1,536, passes through memory would take 1.5 ms, and that kernel takes 0.3 ms
    more than the matmul alone (compiled, in FP8). Passes for biases are not counted: that of the results of down, and
    one over the gradients of gate and up for the sums of their biases.

    In FP8, rows for the experts' kernels, of D and of M, are scaled in separate passes (fp8.py), four times. Those of M
    are read once, if the kernels find their largest elements. With `efficiency.weighted_before` the program is this
    project's. It scales tokens before it copies them, so that no rows of D are scaled, unless rows are `sent`: then one
    of the four is counted. The scaling for XLA's matmuls is fused with other work.
    """
    size = anatomy.sizes(config)
    D, M = size["D"], size["M"]
    gated = efficiency.gated_experts and anatomy.glu_in_kernel(config)
    swiglu = 3 * rows * M * (0.2 * 0.5 if gated else 1)
    if "expert_gate" in anatomy.fp8_weights(config):
        nbytes = 5 if config.fp8 == "dynamic" else 3
        of_M = 3 if gated else nbytes
        of_rows = D * ((5 / 4 if sent else 0) if efficiency.weighted_before else nbytes) + M * of_M
        return swiglu + rows * of_rows / anatomy.BYTES[config.dtype]
    return swiglu + (2 * rows * M if efficiency.weighted_before and not gated else 0)


def local_shape(run: Run, product: Product) -> tuple[float, float, float, float]:
    """Returns (rows, k, n, matrices) of a device's share of a matmul, [rows, k] @ [k, n], for one microbatch.

    The matmul of experts is grouped. Its rows are the tokens dispatched to all experts of the device. Each expert
    multiplies its group of rows by its own matrix [k, n]. All other matmuls have one matrix.
    """
    k, n, tensor = product.k, product.n, run.tensor
    k, n = (k / tensor, n) if product.weight in ROW_PARALLEL else (k, n / tensor)
    matrices = run.config.num_experts / run.sizes["expert"] if product.part == "experts" else 1
    rows = run.tokens * product.copies * (run.expert_work if product.part == "experts" else 1)
    return rows, k, n, matrices


def moved_bytes(run: Run, product: Product) -> float:
    """The bytes that a device moves between HBM and its matrix units for a forward matmul of one microbatch.

    The operands have the dtype in which they are multiplied, the result has the activations' dtype.
    """
    rows, k, n, matrices = local_shape(run, product)
    operand = DTYPE_BYTES["fp8"] if product.dtype == "fp8" else run.element
    nbytes = (matrices * k * n + rows * k) * operand + rows * n * run.element
    if product.dtype == "f32":  # both the weight and the result are in float32
        nbytes += (4 - run.element) * (k * n + rows * n)
    return nbytes


def matmul_s(run: Run, products: Iterable[Product]) -> tuple[float, float]:
    """Returns (forward, backward) seconds of these matmuls for one microbatch, the latter with what is recomputed."""
    forward = backward = 0.0
    mxu = run.chip.mxu_size
    padded = lambda dim: math.ceil(dim / mxu) * mxu
    e = run.efficiency
    for product in products:
        rows, k, n, matrices = local_shape(run, product)
        in_tiles = product.part == "experts" and e.overlapped_experts
        padded_rows = rows + (matrices * e.expert_tile if in_tiles else 0)
        in_kernel = product.part == "experts" and run.config.moe_impl == "dropless"
        speed = run.flops_per_s(product.dtype, kernel=in_kernel)
        multiplied = 2 * padded_rows * padded(k) * padded(n) / speed
        moved = moved_bytes(run, product) / (run.hbm_bytes_per_s * e.hbm)
        once = max(multiplied, moved)
        if product.part == "experts" and not e.overlapped_experts:
            once = multiplied + moved
            if anatomy.sizes(run.config)["D"] % COLUMNS_OF_A_TILE:
                once += 2 * moved_bytes(run, product) / (run.hbm_bytes_per_s * e.copies)
        forward += once
        backward += (3 if product.recomputed else 2) * once
    return forward, backward


def compute_s(run: Run, layer: Layer) -> dict[str, tuple[float, float]]:
    """Returns {"matmul", "attention", "elementwise": (forward, backward)}, in seconds for a layer and a microbatch."""
    config, e, b, tensor = layer.config, run.efficiency, run.tokens, run.tensor
    keys = layer.keys
    if not anatomy.in_zigzag(config):  # in sequence order, the last shard attends to most keys, 2 - 1/ring of the mean
        keys += (1 - 1 / ring_size(config, run.sizes)) * layer.global_keys
    # Blocks that the mask crosses, in each row of blocks: on the diagonal, and at the far end of a window.
    crossed = (2 if config.window and not layer.global_keys else 1) * min(e.attention_block, config.seq_len)
    scores, extra = (b * n * config.num_heads / tensor for n in (keys, crossed))
    dim = max(anatomy.key_dim(config), anatomy.value_dim(config))
    # The number of heads with 128 dims that take as long as one of these heads.
    heads_of_128 = math.ceil(dim / 256) * (e.attention_of_256 if dim > 192 else 1)
    peak = run.peak_flops_per_s()
    # A mask takes as long for heads of any size.
    forward_scores, backward_scores = (scores * heads_of_128 + share * extra for share in e.attention_crossed)
    attention = forward_scores * 2 * 2 * 128 / (peak * e.attention_forward)
    attention_backward = backward_scores * 5 * 2 * 128 / (peak * e.attention_backward)
    if layer.attention_recomputed:
        attention_backward += attention
    elementwise = elementwise_s(run, sum(layer.elementwise))
    return {
        "matmul": matmul_s(run, layer.products),
        "attention": (attention, attention_backward),
        "elementwise": (elementwise, (elementwise_passes(run) - 1) * elementwise),
    }


def elementwise_passes(run: Run) -> int:
    """The times that a step does a layer's elementwise work: forward, twice backward, and where it is repeated."""
    return 4 if run.config.remat != "none" or run.efficiency.always_repeated else 3


def elementwise_s(run: Run, elements: float) -> float:
    """The seconds of elementwise work for one microbatch that reads and writes `elements` a token."""
    return elements * run.element * run.tokens / run.tensor / (run.hbm_bytes_per_s * run.efficiency.elementwise)


def after_mlp_s(run: Run, layer: Layer) -> float:
    """The seconds of a layer's backward pass after the backward pass of its MLP or experts, for one microbatch.

    This is the backward pass of attention and its matmuls. Recomputation comes before it and is not counted.
    """
    matmuls = matmul_s(run, [replace(p, recomputed=False) for p in layer.products if p.part == "attention"])
    forward, attention = compute_s(run, layer)["attention"]
    seconds = matmuls[1] + attention
    if layer.attention_recomputed:
        seconds -= forward
    return seconds + 2 * elementwise_s(run, layer.elementwise[0])


def params_of_device(run: Run) -> tuple[float, float]:
    """Returns (parameters of experts, other parameters) in a device's shards, numbers of elements.

    Every pipeline stage has shards of the embedding and the unembedding.
    """
    config, sizes = run.config, run.sizes
    experts = transformer.parts(config)["experts"].params if config.num_experts else 0
    shards = run.shards * run.tensor
    tables = tables_of_device(run)
    layers = (transformer.num_params(config) - experts) / shards - tables
    return experts / run.pipe / shards / sizes["expert"], layers / run.pipe + tables


def tables_of_device(run: Run) -> float:
    """The number of elements in a device's shards of the embeddings and the unembedding, which may be one table."""
    size, tables = anatomy.sizes(run.config), 1 if run.config.tied_embeddings else 2
    return run.config.vocab_size * (tables * size["D"] + size["A"]) / run.shards / run.tensor


# -- memory

# The bytes that remat=none saves, over the bytes of the named activations (anatomy.activations). Without
# jax.checkpoint, JAX also saves intermediate results that have no name, some of them in float32. Compiled: 4.57 GiB for
# 2.31 GiB (D = 1024, F = 4D, T = 4096, 8 layers, bfloat16).
PLAIN = 2.0


def slots_of_device(run: Run) -> float:
    """The bytes of a device's shard of the optimizer state (its slots), stored on the device or on its host."""
    config = run.config
    bytes_per_param = transformer.state_bytes(config)["optimizer"] / transformer.num_params(config)
    return bytes_per_param * sum(params_of_device(run)) / (run.sizes["data"] if config.shard_update else 1)


def attention_over_context(run: Run) -> float:
    """The bytes a token that the backward pass of context.py adds to a device's peak, in addition to the activations.

    With a ring, a device holds the float32 gradients dq, dk and dv twice, before and after a block is added to them. It
    also holds copies of queries, results and their gradients. In the copies, the positions that attend to a block are
    contiguous. With all_gather, a device holds the keys and values of the full sequence. It also holds their float32
    gradients until they are reduce-scattered.

    Half of this is counted. Most activations of the MLP are freed before attention's backward pass, so the peak of a
    layer may be in either of the two. Compiled, the peak grew by anything from none to all of these bytes (Llama 3.1 8B
    at 128k to 1M, `context` of 2 to 32, and a small model).
    """
    config, c = run.config, run.sizes["context"]
    only_windows = config.window and not config.global_every  # these layers need only a halo
    if only_windows or ring_size(config, run.sizes) == 1:
        return 0
    config = anatomy.kinds(config)[-1]  # of layers without a window
    Hk, Hv = anatomy.key_dim(config), anatomy.value_dim(config)
    keys = config.num_kv_heads * (Hk + Hv)
    if config.context_impl == "all_gather":
        return c * keys * (run.element + 4) / 2
    copies = config.num_heads * (Hk + 2 * Hv) * run.element
    return (2 * 4 * (config.num_heads * Hk + keys) + copies) / 2


def memory_of(run: Run, layers: list[Layer]) -> tuple[dict[str, float], float]:
    """Returns ({what is stored: bytes of a device's HBM}, the bytes that a microbatch of a device offloads)."""
    config, params = run.config, sum(params_of_device(run))
    memory = {
        "weights": 4 * params / (run.sizes["data"] if config.shard_update else 1),
        "optimizer": 0 if config.offload_optimizer else slots_of_device(run),
        "gradients": _gradient_bytes(run, params),
        "saved activations": _saved_bytes(run, layers),
    }
    if config.check_every:  # corruption.py
        memory["copy of the state"] = memory["weights"] + memory["optimizer"]
    if config.ple_dim:  # and their gradients
        memory["layer inputs"] = 2 * anatomy.sizes(config)["A"] * run.element * run.tokens / run.tensor
    peak = max(_layer_peak(run, layers), _loss_peak(run), key=lambda nbytes: math.fsum(nbytes.values()))
    if config.offload_optimizer and config.optimizer == "muon":
        # All of it is moved at once, into the memory of the activations, which are freed before the update.
        freed = memory["saved activations"] + math.fsum(peak.values())
        memory["optimizer"] = max(0.0, slots_of_device(run) - freed)
    memory |= peak
    return memory, _of_microbatch(run, layers, lambda layer: layer.offloaded_bytes)


def _of_microbatch(run: Run, layers: list[Layer], nbytes: Callable[[Layer], float]) -> float:
    """The bytes of a microbatch on a device, where `nbytes` returns the bytes a token of a layer."""
    of_model = math.fsum(nbytes(layer) * layer.num_layers for layer in layers)
    return of_model / run.pipe * run.tokens / run.tensor


def _saved_bytes(run: Run, layers: list[Layer]) -> float:
    """The bytes of the activations that a device saves for the backward pass, for all microbatches in flight."""
    config = run.config
    bytes_of = partial(_of_microbatch, run, layers)
    saved = bytes_of(lambda layer: layer.saved_bytes)
    if config.remat == "none":
        # A policy saves a device's shard of the norms. Without jax.checkpoint, the gathered norms are saved, and the
        # operands of FP8 matmuls are saved in FP8.
        fp8 = lambda layer: (run.element - 1) * fp8_operands(run, layer)
        saved = bytes_of(lambda layer: PLAIN * layer.saved_bytes + (run.tensor - 1) * layer.norm_bytes - fp8(layer))
    waiting = saved * run.in_flight
    if config.remat_stage:
        # The stage saves its input for each microbatch, or with several rounds the input of each chunk of layers. It
        # holds all activations of the one chunk that it is recomputing.
        rounds = config.pipeline_rounds
        waiting = (
            saved / rounds + run.in_flight * rounds * anatomy.sizes(config)["D"] * run.element * run.tokens / run.tensor
        )
    elif run.pipe > 1:
        waiting += saved  # the backward pass reads a copy of one microbatch's activations
    if inputs_in_two_layouts(run):
        waiting += bytes_of(lambda layer: anatomy.sizes(config)["D"] * run.element)
    if context_in_two_layouts(run):
        waiting += bytes_of(lambda layer: config.num_heads * anatomy.value_dim(layer.config) * run.element)
    return waiting


def _gradient_bytes(run: Run, params: float) -> float:
    """The peak bytes of the gradients of a device's `params`, with copies of the weights in the compute dtype."""
    # At its peak a pipeline stage holds four arrays for all its layers. They are gradients in bfloat16, weights in
    # bfloat16 twice, and float32 sums of gradients over microbatches. Compiled: 808B parameters on two slices of 4x4x4.
    stages = (run.element + 4) * params if run.pipe > 1 else 0
    replicas, g = run.sizes["data"], anatomy.BYTES[run.config.grad_dtype]
    if run.config.shard_update and replicas > 1:
        # First a device holds the weights gathered over `data` and their gradients, in the compute dtype. Later it
        # holds these gradients in grad_dtype, and the sums of its own shard.
        return max(2 * run.element, g + g / replicas) * params + stages
    # With several replicas, the all-reduce of the tables' gradients is not in place: compiled, data:8 on 2x2x1.
    tables = g * tables_of_device(run) if replicas > 1 else 0
    return g * params + tables + stages


def _layer_peak(run: Run, layers: list[Layer]) -> dict[str, float]:
    """{what is stored: bytes} of a device in the backward pass of a layer, beyond the state and saved activations."""
    config = run.config
    largest = max(layers, key=lambda layer: layer.activation_bytes)
    # Gradients take half as much as the activations. With several layers in an iteration of the loop, half of another
    # layer's activations are added. Compiled: 70B takes 3.1 GiB more in one microbatch, and 1.6 GiB more in two.
    several = config.double_buffer or anatomy.two_kinds(config)
    activations = largest.activation_bytes * (2 if several else 1.5)
    weights = 0
    if run.shards > 1:
        gathered = max(layer.gathered_bytes(run) for layer in layers)
        gradients = max(layer.gradient_bytes(run) for layer in layers)
        # Without prefetch a matrix is free when its gradient is computed: of one of three large ones there are both.
        # Compiled, DeepSeek-V3: 70.4 GiB, predicted 73.7; in FP8, where gradients are larger, 73.3 and 73.6.
        weights = 2 * gathered + gradients if run.gathers_ahead else max(gathered, gradients) + gradients / 3
    # Offloaded activations arrive from the host before their layer needs them, so they are on the device once more.
    activations = activations - largest.saved_bytes + largest.offloaded_bytes
    peak = {"a layer's activations": activations * run.tokens / run.tensor, "gathered weights": weights}
    if run.shards > 1 and config.tied_embeddings:
        # The gradient of the gathered table waits in float32 for that of its look-up. Compiled: Gemma 4 31B takes 87.2
        # GiB; 88.5 are predicted, 83.3 without this. E2B takes 14.3, and 11.3 are predicted: XLA holds the activations
        # of several layers of a period, which is not modelled.
        peak["gradient of the embedding"] = 4 * config.vocab_size * anatomy.sizes(config)["D"] / run.tensor
    if over_context := attention_over_context(run):
        peak["attention over context"] = over_context * run.tokens / run.tensor
    return peak


def _loss_peak(run: Run) -> dict[str, float]:
    """{what is stored: bytes} of a device while it computes the loss.

    It holds the gathered unembedding and its gradient in float32, and a chunk of logits and their gradient.
    """
    config = run.config
    table = config.vocab_size * anatomy.sizes(config)["D"] / run.tensor
    element = 1 if "unembed" in anatomy.fp8_weights(config) else run.element
    return {
        "unembedding": (element + 4) * table if run.shards > 1 else 0,
        "logits": 2 * 4 * math.prod(loss_chunk(run)) * config.vocab_size / run.tensor,
    }


def loss_chunk(run: Run) -> tuple[float, int]:
    """Returns (sequences of a microbatch on a device, positions of each whose logits are in memory at once)."""
    positions = run.config.seq_len / run.sizes["context"]
    sequences = run.tokens / positions
    chunk = anatomy.loss_chunk(run.config, sequences, math.ceil(positions), run.config.vocab_size / run.tensor)
    return sequences, chunk


def fp8_operands(run: Run, layer: Layer) -> float:
    """The elements a token of the operands of a layer's FP8 matmuls. An operand of several matmuls counts once."""
    read = {}
    for product in layer.products:
        if product.dtype == "fp8":
            name, ways = (product.weight, 1) if product.weight in ROW_PARALLEL else (product.part, run.tensor)
            read[name, product.k] = product.k * product.copies * ways
    return sum(read.values())


def inputs_in_two_layouts(run: Run) -> bool:
    """Whether libtpu stores the inputs of all layers twice, in two memory layouts (remat.py, "On TPU7x").

    Compiled: it does if only queries, keys and values are offloaded, a device has one sequence, and `tensor` is 1 (70B
    at 8k, 8B at 128k). It does not with two sequences, with `tensor`, or if the MLP is also offloaded.
    """
    config = run.config
    only_qkv = anatomy.offloaded_names(config) == anatomy.POLICIES["qkv_proj_offloaded"][1]
    pipelined = "xla_tpu_pipeline_memory_host_transfers=false" not in config.xla_flags
    return only_qkv and pipelined and run.tensor == 1 and run.tokens * run.sizes["context"] == config.seq_len


def context_in_two_layouts(run: Run) -> bool:
    """Whether libtpu copies the saved attention results of all layers before the backward pass.

    Compiled: with a ring it does for 16 heads of 256 (8B at 1M, whether heads or positions are the first dim of the
    saved array). It does not for heads of 128 (70B at 128k), nor without a ring.
    """
    saved = anatomy.saved_names(run.config) - anatomy.offloaded_names(run.config)
    ring = run.config.context_impl == "ring" and ring_size(run.config, run.sizes) > 1
    return ring and "context" in saved and anatomy.value_dim(run.config) > 128


def host_bytes_of(run: Run, offloaded: float) -> float:
    """The bytes that a device stores on its host: a microbatch's `offloaded` activations, and optimizer state.

    A pipeline offloads only with remat_stage. Then only the round that is being recomputed has activations on the host.
    """
    state = slots_of_device(run) if run.config.offload_optimizer else 0
    return offloaded / run.config.pipeline_rounds + state


def shortfall_of(run: Run, hbm_bytes: float, host_bytes: float, share: float = 1.0) -> dict[str, float]:
    """Returns the bytes that a device lacks, under the keys "hbm" and "host" for the memories that are too small.

    Empty if the run fits. A device may use `share`, between 0 and 1, of each memory.
    """
    over = {"hbm": hbm_bytes - share * run.hbm_limit, "host": host_bytes - share * run.host_limit}
    return {memory: nbytes for memory, nbytes in over.items() if nbytes > 0}
