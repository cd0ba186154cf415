"""What one device of a run computes and stores, predicted: its share of the model, the batch and the machine. No JAX.

predicted/step.py adds this up to a step. With the axis sizes of the mesh, M microbatches and P pipeline stages:

    b = batch * T / (data * fsdp * expert * context * M)     tokens of a microbatch, which `tensor` devices share

**Formula.** Each part of a layer's time is the arithmetic divided by what programs reach of the chip's figures
(`Efficiency`):

    matmul        (3 * forward + recomputed) FLOPs / C       dims padded to the matrix unit, rows of experts to tiles;
                                                             or its bytes / W_hbm, if that takes longer
    attention     scores * (forward * (1 or 2) + backward)   of a fused kernel, which computes full blocks of scores
    elementwise   4 * bytes / W_hbm                          norms, RoPE, SwiGLU, tokens sorted by expert and back

The 3 are one forward and two backward; a fourth is what is recomputed. Elementwise work is always recomputed, since it
fuses with what reads it. (With remat=none the program reads what it saved instead, and is no faster.)

**Memory of a device** (`memory_of`). The state: weights in float32 with the optimizer's moments, sharded by
`shard_update`, and gradients. What the layers save, for all microbatches in flight. Memory comes in tiles of 128
columns, so a head of 64 takes the space of one of 128. And the larger of two peaks:

    a layer's backward pass     the activations that are not saved, or come from the host; gradients half as large as
                                all activations, or as large with `double_buffer`; two gathered layers of weights, and
                                one gathered gradient
    the loss                    the gathered unembedding, its gradient in float32; the logits of `loss_chunk` positions
                                of each sequence, and their gradient

Attention over `context`, and pipeline stages, hold more. Where `tensor` shards the stream, the gradient of a
column-parallel weight needs the gathered operand. It is gathered again, or with remat=none it was saved.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import anatomy
import compiler_flags
from config import Config
from hardware import HBM_REACHED, HOST_BYTES_PER_S, KERNEL_CLOCK, LINKS_REACHED, Axis, Chip
from placement import BATCH_AXES, fill_mesh, parse_mesh
from predicted import transformer
from predicted.bounds import in_flight, matmul_dtype
from predicted.interconnect import collective_s, links_of
from predicted.matmul import DTYPE_BYTES
from rules import ring_size, settled

# -- what programs reach


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What programs reach of a chip's figures: one set for every model.

    "Measured" is https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood. "Compiled" is what libtpu
    makes of attention kernels for TPU7x, with heads of 128 in blocks of 1024 x 1024 scores, counted in cycles by
    compiled/bundles.py. A cycle is one of 1.76 GHz, 0.8 of the clock that the peak takes. At the peak's rate the two
    forward matmuls of a block would take 1024 cycles, the five backward ones 2560.
    """

    # Shares of the peak.
    matmul: float = 0.83  # measured: 956 of 1153.5 TFLOP/s, bf16, 32768^3
    attention_forward: float = KERNEL_CLOCK * 1024 / 1897  # compiled: flash.py, 68.3k cycles for 36 blocks
    attention_backward: float = KERNEL_CLOCK * 2560 / 4405  # compiled: flash_backward.py, 158.6k for 36 blocks
    hbm: float = HBM_REACHED
    links: float = LINKS_REACHED  # of one link
    # Chosen: what the measured steps of Llama 3.1 70B in bf16 and FP8 and of Qwen3 235B take beyond the other parts,
    # over the bytes that are counted here. A program moves more bytes: transposes, float32, what is not fused.
    elementwise: float = 0.37  # of HBM's peak

    # The router's matmuls take so many passes of a bf16 matmul. A float32 operand is split in three parts of 8 bits: so
    # three passes with activations in bf16, six where both operands are float32. Compiled: 119k, 122k, 220k cycles
    # forward and backward (8,192 tokens, D 4096, E 128).
    passes_of_f32: int = 4
    # Rows. The ends of an expert's rows fill one tile more. Compiled: 1.44 times the work, at 1024 rows.
    expert_tile: int = 512
    gated_experts: bool = True  # the experts' kernel computes their SwiGLU, too: gmm.py
    attention_block: int = 1024  # scores along an edge; a block that the mask crosses is computed in full
    # Positions. The kernel computes whole tiles of a sequence. Compiled: 1,025 tokens take 2.01 times the cycles of
    # 1,024 forward and 1.93 times backward, where this gives 1.87.
    attention_tile: int = 512
    # A block of heads of 64 or 192 takes as long as one of 128: the softmax does not depend on it, and 128 half fills
    # the matrix unit. A block of heads of 256 takes so many times as long. Compiled, for 8192 tokens: 86.0k / 69.5k
    # cycles forward, 201.5k / 166.3k backward.
    attention_of_256: float = 1.22

    usable_hbm: float = 94.74 / 96  # compiled: the limit that XLA names for a TPU7x device
    host_bytes_per_s: float = HOST_BYTES_PER_S  # of a device one way, where a chip has no figure
    # The parts of a layer that hide the transfer of its activations. Compiled, without flags: the kernel (remat.py).
    hides_offload: tuple[str, ...] = ("attention",)
    # Only what the backward pass has left after its MLP or experts hides the sums of a layer's gradients. Compiled: of
    # 128 ms a layer of DeepSeek-V3 in FP8 on fsdp:512, 66 are waited for.
    late_sums: bool = True
    # Weights that are gathered ahead are copied for the next iteration of the loop. Weights that come in parts other
    # than whole tiles of rows are copied, too, and so are their gradients before they are sent; those of experts are
    # not. Compiled: 0.2 s of Llama 3.1 70B, 0.7 of Gemma 31B.
    copies_weights: bool = True


TODAY = Efficiency()
# The efficiencies of published runs. Their kernel is tokamax's splash attention: 120k cycles forward, 5780 a block
# backward. The times that tokamax publishes are these cycles at 1.76 GHz. All of a layer hides its offload: chosen, for
# 8B on v6e, whose step takes no longer than that; why is not known. All of a backward pass hides the sums, likewise
# chosen, for DeepSeek-V3. No weights are copied: most of these runs shard them in two dims, and carry none between
# iterations.
PUBLISHED = replace(
    TODAY,
    attention_forward=KERNEL_CLOCK * 1024 / 3333,
    attention_backward=KERNEL_CLOCK * 2560 / 5780,
    hides_offload=("matmul", "attention", "elementwise"),
    gated_experts=False,
    late_sums=False,
    copies_weights=False,
)


# -- a run


@dataclass(frozen=True)
class Run:
    """A run on its machine, with a device's share of both."""

    config: Config
    chip: Chip
    topology: tuple[int, ...]
    num_slices: int
    sizes: dict[str, int]  # of all mesh axes; config.mesh is not read
    links: dict[str, list[Axis]]  # the links on which each of them is laid out
    efficiency: Efficiency = TODAY

    @property
    def num_chips(self) -> int:
        return math.prod(self.topology) * self.num_slices

    @property
    def hbm_limit(self) -> float:
        """The bytes of a device's memory that a program can use."""
        return self.chip.hbm_bytes / self.chip.devices * self.efficiency.usable_hbm

    @property
    def host_limit(self) -> float:
        """The bytes of a device's share of its host's memory; infinite where it is not published."""
        return (self.chip.host_memory_bytes or math.inf) / math.prod(self.chip.host) / self.chip.devices

    @property
    def pipe(self) -> int:
        return self.sizes["pipe"]

    @property
    def in_flight(self) -> float:
        """The microbatches whose activations a device has saved at once."""
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
        """b: the tokens of a microbatch, which the devices along `tensor` share."""
        groups = math.prod(self.sizes[axis] for axis in (*BATCH_AXES, "context"))
        return self.config.batch * self.config.seq_len / groups / self.microbatches

    @property
    def expert_buffer_ratio(self) -> float:
        """The rows in the buffers of a device's experts, over those that the router makes of its tokens."""
        if not self.config.num_experts:
            return 1.0
        tokens = max(1, round(self.tokens / self.config.moe_parts))
        rows = anatomy.expert_rows(self.config, tokens, self.sizes["expert"])
        return rows / (tokens * self.config.experts_per_token)

    @property
    def expert_work(self) -> float:
        """The rows that a device's experts multiply, over the same: dropless, those that are filled."""
        ratio = self.expert_buffer_ratio
        return min(1.0, ratio) if self.config.moe_impl == "dropless" else ratio

    @property
    def experts_filled(self) -> float:
        """The share of the rows in their buffers that a device's experts multiply."""
        return self.expert_work / self.expert_buffer_ratio

    @property
    def element(self) -> int:
        """The bytes of an element of an activation."""
        return anatomy.BYTES[self.config.dtype]

    @property
    def dtype(self) -> str:
        """The dtype in which the layers' weights are multiplied."""
        return matmul_dtype(self.config)

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.chip.hbm_bytes_per_s / self.chip.devices

    @property
    def host_bytes_per_s(self) -> float:
        return (self.chip.pcie_bytes_per_s or self.chip.devices * self.efficiency.host_bytes_per_s) / self.chip.devices

    def flops_per_s(self, dtype: str = "bf16") -> float:
        """The FLOP/s that a device's matmuls reach; f32 takes `passes_of_f32` passes, for all its bits."""
        passes = self.efficiency.passes_of_f32 if dtype == "f32" else 1
        return self.chip.flops_per_s(dtype) / self.chip.devices / passes * self.efficiency.matmul

    def effective_links(self, axis: str) -> list[Axis]:
        """The links of a mesh axis, with the bandwidth that programs reach."""
        share = self.efficiency.links
        return [dataclasses.replace(link, link_bytes_per_s=link.link_bytes_per_s * share) for link in self.links[axis]]

    @property
    def pads_sums(self) -> bool:
        """Whether XLA may pad what a reduce-scatter sums."""
        return compiler_flags.for_run(self.config).get(compiler_flags.PADS_SUMS) == "true"

    def collective_s(self, kind: str, nbytes: float, *axes: str, divisible_by_3: bool = False) -> float:
        """Seconds of a collective over mesh axes, the inner one first, by all links at once.

        With exceptions, as XLA compiles it for TPU7x. An all-gather or reduce-scatter over part of a torus axis and
        both devices of a chip goes round one ring of all the devices. So does a reduce-scatter over three torus axes,
        unless its operand splits into three equal parts, one for each axis.

        Args:
          nbytes: as for interconnect.rounds_of.
          divisible_by_3: the number of elements that are summed is a multiple of 3. If not, XLA may pad the operand
            (`pads_sums`).
        """
        links = [link for axis in axes for link in self.effective_links(axis)]
        slices = [link for link in links if link.name.endswith("slices")]
        dies = [link for link in links if link.name.endswith("die to die")]
        wires = [link for link in links if link not in dies + slices]
        sums = kind == "reduce_scatter"
        on_part_of_an_axis = dies and len(wires) > 1 and any(" of " in link.name for link in wires)
        one_ring = on_part_of_an_axis and kind in ("all_gather", "reduce_scatter")
        if one_ring or (sums and len(wires) > 2 and not (divisible_by_3 or self.pads_sums)):
            both = math.prod(link.size for link in dies)  # devices of a chip: a ring passes its links once for both
            slowest = min(wires, key=lambda link: link.link_bytes_per_s)
            size, speed = both * math.prod(link.size for link in wires), both * slowest.link_bytes_per_s
            ring = dataclasses.replace(slowest, size=size, link_bytes_per_s=speed, wrap=True)
            links = [ring, *slices]
        return collective_s(kind, nbytes, links, spread=not sums or len(wires) > 1)


def run_of(
    config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1, efficiency: Efficiency = TODAY
) -> Run:
    """Returns the run that `config` describes, on slices of a chip.

    Raises:
      ValueError: the mesh does not make up the devices, or cannot be laid out on the torus; remat=auto is not resolved.
    """
    if config.remat == "auto":
        raise ValueError(
            "remat=auto is a choice still to be made: roofline.py remat --remat=auto with these flags makes it"
        )
    sizes = fill_mesh(parse_mesh(config.mesh), chip.devices * math.prod(topology) * max(num_slices, 1))
    links = links_of(sizes, chip, topology, num_slices=num_slices, core_axis=config.core_axis)
    return Run(settled(config, sizes), chip, tuple(topology), num_slices, sizes, links, efficiency)


# -- a layer


ROWS_OF_A_TILE, COLUMNS_OF_A_TILE = 8, 128  # of memory, as XLA lays out matrices; a head of 64 takes one of 128
ROW_PARALLEL = {"w_o", "w_down", "expert_down", "shared_down"}  # `tensor` shards the dim that they contract


@dataclass(frozen=True)
class Product:
    """A layer's matmul with a weight: [tokens * copies, k] . [k, n]."""

    weight: str
    part: str
    k: int
    n: int
    copies: int  # of a token: its experts, else 1
    recomputed: bool
    dtype: str  # bf16, fp8 or f32


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a layer: those of its experts, and all others."""

    experts: int
    others: int


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The costs of one layer of a kind: of those with experts, or of the dense ones."""

    num_layers: int
    products: list[Product]
    params: Counts
    fp8_params: Counts  # those that are gathered in FP8
    float32_params: Counts  # those that are gathered in float32, as their gradients are
    params_by_3: Counts  # those of matrices whose size is a multiple of 3; that of a shard is assumed to be one, too
    attention_recomputed: bool  # the backward pass needs the kernel's forward again
    keys: float  # keys that the kernel computes for a query, on average over the layers
    global_keys: float  # the part of `keys` that is of layers without a window
    elementwise: tuple[float, float]  # elements a token, forward: of attention, and of all else
    saved_bytes: float  # a token, on the device
    offloaded_bytes: float  # a token, on the host
    activation_bytes: float  # a token, of all activations that the backward pass reads
    norm_bytes: float  # a token, of what the column-parallel matmuls take, if it is saved

    def gathered_params(self, run: Run, with_experts: bool = True) -> float:
        """The parameters of a layer on a device, once they are gathered over `fsdp`."""
        return _gathered(run, self.params, with_experts)

    def gathered_params_by_3(self, run: Run) -> float:
        """Those of them whose gradients split into three equal parts, to be summed over three torus axes at once."""
        return _gathered(run, self.params_by_3)

    def gathered_bytes(self, run: Run, with_experts: bool = True) -> float:
        """The bytes of the gathered parameters, in the dtypes in which they are gathered and multiplied."""
        fp8 = _gathered(run, self.fp8_params, with_experts)
        return self.gradient_bytes(run, with_experts) - (run.element - DTYPE_BYTES["fp8"]) * fp8

    def gradient_bytes(self, run: Run, with_experts: bool = True) -> float:
        """The bytes of their gradients, before these are summed."""
        float32 = _gathered(run, self.float32_params, with_experts)
        return run.element * self.gathered_params(run, with_experts) + (4 - run.element) * float32


def _gathered(run: Run, params: Counts, with_experts: bool = True) -> float:
    """How many of these parameters a device has, once they are gathered over `fsdp`."""
    experts = params.experts / run.sizes["expert"] if with_experts else 0
    return (experts + params.others) / run.tensor


def layers_of(run: Run) -> list[Layer]:
    """The kinds of layers that the model has."""
    row_copies = run.tensor if run.sizes["expert"] == 1 else 1
    gated = run.efficiency.gated_experts and anatomy.swiglu_in_kernel(run.config)
    return _layers(run.config, kernel_keys(run), run.expert_buffer_ratio, row_copies, gated)


def kernel_keys(run: Run) -> tuple[float, float]:
    """The keys that attention's kernel computes for a query, on average over the layers.

    The second number is the part of them that is of layers without a window.
    """
    config, block = run.config, run.efficiency.attention_block
    shard = config.seq_len / ring_size(config, run.sizes)
    padding = filled(shard, run.efficiency.attention_tile) / shard  # computed positions over those of the sequence
    T = padding * config.seq_len
    causal = padding * (T if T <= block else T / 2 + block / 2)  # blocks on the diagonal are computed in full
    windowed = min(causal, padding * (config.window + block)) if config.window else causal
    num_layers, num_global = config.num_layers, transformer.num_global_layers(config)
    keys = (num_global * causal + (num_layers - num_global) * windowed) / num_layers
    return keys, num_global * causal / num_layers


@cache
def _layers(
    config: Config, keys: tuple[float, float], expert_buffer_ratio: float, row_copies: int, gated: bool
) -> list[Layer]:
    """The dense layers and those with experts, of which a model has one kind or both.

    Args:
      keys: as `kernel_keys` returns them.
      expert_buffer_ratio: as for anatomy.activations.
      row_copies: as for anatomy.activations.
      gated: as for `elementwise_elements`.
    """
    num_experts = anatomy.num_expert_layers(config)
    kinds = (False, config.num_layers - num_experts), (True, num_experts)
    rows = dict(expert_buffer_ratio=expert_buffer_ratio, row_copies=row_copies)
    return [_layer(config, experts, number, keys, rows, gated) for experts, number in kinds if number]


def _layer(
    config: Config, experts: bool, num_layers: int, keys: tuple[float, float], rows: dict[str, float], gated: bool
) -> Layer:
    """One kind of layer, with experts or without; `rows` has the sizes of the experts' buffers, the rest as above."""
    names = anatomy.layer_weights(config, experts=experts)
    weights = {name: weight for name, weight in transformer.weights(config).items() if name in names}
    by_3 = {name for name, weight in weights.items() if math.prod(weight.shape[1:]) % 3 == 0}
    fp8 = anatomy.fp8_weights(config)
    saved = anatomy.read_names(anatomy.saved_names(config))
    offloaded = saved & anatomy.offloaded_names(config)
    read = anatomy.saved_names(dataclasses.replace(config, remat="none", remat_tensors=""))
    nbytes = partial(transformer.saved_bytes_per_layer, config, columns=COLUMNS_OF_A_TILE, experts=experts, **rows)
    activation_bytes = nbytes(read)
    if experts and "expert_up" in fp8 and "expert_input" not in saved:
        # Experts' rows, the largest of all, wait for their weights' gradients in FP8. Compiled: Qwen3.
        activation_bytes -= (1 - 1 / anatomy.BYTES[config.dtype]) * nbytes({"expert_input"})
    return Layer(
        num_layers=num_layers,
        products=_products(config, weights, saved),
        params=_count(weights, weights),
        fp8_params=_count(weights, fp8),
        float32_params=_count(weights, anatomy.FLOAT32_WEIGHTS),
        params_by_3=_count(weights, by_3),
        attention_recomputed=not saved >= {"context", "log_sum_exp"},
        keys=keys[0],
        global_keys=keys[1],
        elementwise=elementwise_elements(config, experts, **rows, gated=gated),
        saved_bytes=nbytes(saved - offloaded),
        offloaded_bytes=nbytes(offloaded),
        activation_bytes=activation_bytes,
        norm_bytes=nbytes(saved & {"norm_attention", "norm_mlp"}),
    )


def _count(weights: Mapping[str, transformer.Weight], names: Collection[str]) -> Counts:
    """The parameters that a layer has in those of its weights that are among `names`."""
    size = lambda of_experts: sum(
        math.prod(weight.shape[1:])
        for name, weight in weights.items()
        if name in names and (weight.part == "experts") == of_experts
    )
    return Counts(experts=size(True), others=size(False))


def _products(config: Config, weights: Mapping[str, transformer.Weight], saved: Collection[str]) -> list[Product]:
    """The matmuls of a layer with these weights, of which the `saved` results are not computed again."""
    fp8, products = anatomy.fp8_weights(config), []
    for name, weight in weights.items():
        if not weight.makes:
            continue
        dims, copies = weight.shape[1:], 1
        if weight.part == "experts":
            dims, copies = (config.model_dim, config.expert_dim), config.experts_per_token
        if name == "expert_down":
            dims = dims[::-1]
        k, n = (math.prod(dims[:-1]), dims[-1]) if name == "w_o" else (dims[0], math.prod(dims[1:]))
        again = transformer.multiplied_again(weight, saved)
        dtype = "fp8" if name in fp8 else "f32" if name in anatomy.FLOAT32_WEIGHTS else "bf16"
        products.append(Product(name, weight.part, k, n, copies, again, dtype))
    return products


def filled(length: float, tile: int) -> float:
    """The positions that attention's kernel computes: whole tiles, no longer than the sequence padded to 256."""
    tile = min(tile, 256 * math.ceil(length / 256))
    return tile * math.ceil(length / tile)


def elementwise_elements(
    config: Config, experts: bool, expert_buffer_ratio: float = 1.0, row_copies: int = 1, gated: bool = False
) -> tuple[float, float]:
    """Elements a token that a layer's elementwise work reads and writes, forward; the backward pass has twice as many.

    The first number is attention's: norm 2D; rotation of queries and keys, into the kernel's layout, 2(N+K)Hk; values
    into that layout and the result out of it, 2(K+N)Hv; addition to the stream 3D. The second is that of the rest: norm
    and addition again, and the SwiGLU, 3F. With experts: their tokens sorted, X*D, read and written; SwiGLU 3*X*M, of
    all rows of the buffers; sorted back; weighted and added, X*D + D; the router's E, a few times.

    In FP8 a kernel's rows, X*D and X*M, are scaled in passes of their own (fp8.py). Ahead of XLA's matmuls the scaling
    is fused with other work.

    Args:
      expert_buffer_ratio: as for anatomy.activations.
      row_copies: as for anatomy.activations; each of these devices sorts all the rows.
      gated: the experts' kernel computes their SwiGLU, hidden, forward and in what is recomputed. Half of it is left,
        for the gradient.
    """
    D, N, K = config.model_dim, config.num_heads, config.num_kv_heads
    Hk, Hv = anatomy.key_dim(config), anatomy.value_dim(config)
    attention = 5 * D + 2 * (N + K) * Hk * (2 if config.qk_norm else 1) + 2 * (K + N) * Hv
    attention += 2 * (config.q_lora_rank + config.kv_lora_rank)
    if not experts:
        return attention, 5 * D + 3 * config.ff_dim
    X, M = config.experts_per_token, config.expert_dim
    shared = 3 * config.num_shared_experts * M
    of_experts = 3 * X * expert_buffer_ratio * M * (0.5 if gated else 1)
    if "expert_gate" in anatomy.fp8_weights(config):
        nbytes = 5 if config.fp8 == "dynamic" else 3
        of_experts += X * expert_buffer_ratio * (D + M) * nbytes / anatomy.BYTES[config.dtype]
    return attention, 5 * D + shared + 5 * X * D * row_copies + D + of_experts + 4 * config.num_experts


def local_shape(run: Run, product: Product) -> tuple[float, float, float, float]:
    """(rows, k, n, matrices) of a device's part of a matmul: rows in groups, one for each of the matrices [k, n].

    An expert's matmul has as many matrices as the device has experts, and all tokens that were dispatched to them.
    """
    k, n, tensor = product.k, product.n, run.tensor
    k, n = (k / tensor, n) if product.weight in ROW_PARALLEL else (k, n / tensor)
    matrices = run.config.num_experts / run.sizes["expert"] if product.part == "experts" else 1
    rows = run.tokens * product.copies * (run.expert_work if product.part == "experts" else 1)
    return rows, k, n, matrices


def moved_bytes(run: Run, product: Product) -> float:
    """The bytes that a forward matmul moves between HBM and the matrix units.

    The operands have the dtype in which they are multiplied, the result that of the computation.
    """
    rows, k, n, matrices = local_shape(run, product)
    operand = DTYPE_BYTES["fp8"] if product.dtype == "fp8" else run.element
    nbytes = (matrices * k * n + rows * k) * operand + rows * n * run.element
    if product.dtype == "f32":  # both the weight and the result are in float32
        nbytes += (4 - run.element) * (k * n + rows * n)
    return nbytes


def matmul_s(run: Run, products: Iterable[Product]) -> tuple[float, float]:
    """The seconds of a microbatch's matmuls, forward and backward."""
    forward = backward = 0.0
    mxu = run.chip.mxu_size
    padded = lambda dim: math.ceil(dim / mxu) * mxu
    for product in products:
        rows, k, n, matrices = local_shape(run, product)
        padded_rows = rows + (matrices * run.efficiency.expert_tile if product.part == "experts" else 0)
        once = max(
            2 * padded_rows * padded(k) * padded(n) / run.flops_per_s(product.dtype),
            moved_bytes(run, product) / (run.hbm_bytes_per_s * run.efficiency.hbm),
        )
        forward += once
        backward += (3 if product.recomputed else 2) * once
    return forward, backward


def compute_s(run: Run, layer: Layer) -> dict[str, tuple[float, float]]:
    """The seconds of a layer and a microbatch by part, each (forward, backward)."""
    config, e, b, tensor = run.config, run.efficiency, run.tokens, run.tensor
    keys = layer.keys
    if not anatomy.in_zigzag(config):  # the last shard of a sequence in order has more to do than the mean
        keys += (1 - 1 / ring_size(config, run.sizes)) * layer.global_keys
    scores = b * keys * config.num_heads / tensor
    dim = max(anatomy.key_dim(config), anatomy.value_dim(config))
    of_128 = math.ceil(dim / 256) * (e.attention_of_256 if dim > 192 else 1)  # heads of 128 with the same time
    peak = run.chip.bf16_flops_per_s / run.chip.devices
    attention = scores * 2 * 2 * 128 * of_128 / (peak * e.attention_forward)
    attention_backward = scores * 5 * 2 * 128 * of_128 / (peak * e.attention_backward)
    if layer.attention_recomputed:
        attention_backward += attention
    elementwise = elementwise_s(run, sum(layer.elementwise))
    return {
        "matmul": matmul_s(run, layer.products),
        "attention": (attention, attention_backward),
        "elementwise": (elementwise, 3 * elementwise),
    }


def elementwise_s(run: Run, elements: float) -> float:
    """The seconds of a microbatch's elementwise work on so many elements a token."""
    return elements * run.element * run.tokens / run.tensor / (run.hbm_bytes_per_s * run.efficiency.elementwise)


def after_mlp_s(run: Run, layer: Layer) -> float:
    """The seconds of a layer's backward pass after that of its MLP or experts: attention, and its matmuls.

    What is recomputed comes before both, so it is not counted.
    """
    matmuls = matmul_s(run, [replace(p, recomputed=False) for p in layer.products if p.part == "attention"])
    forward, attention = compute_s(run, layer)["attention"]
    seconds = matmuls[1] + attention
    if layer.attention_recomputed:
        seconds -= forward
    return seconds + 2 * elementwise_s(run, layer.elementwise[0])


def params_of_device(run: Run) -> tuple[float, float]:
    """The elements of a device's shards: of the experts, and of all else. All stages have embedding and unembedding."""
    config, sizes = run.config, run.sizes
    experts = transformer.parts(config)["experts"].params if config.num_experts else 0
    shards = sizes["fsdp"] * run.tensor
    tables = tables_of_device(run)
    layers = (transformer.num_params(config) - experts) / shards - tables
    return experts / run.pipe / shards / sizes["expert"], layers / run.pipe + tables


def tables_of_device(run: Run) -> float:
    """The elements of a device's shards of embedding and unembedding."""
    tables = 1 if run.config.tied_embeddings else 2
    return tables * run.config.vocab_size * run.config.model_dim / run.sizes["fsdp"] / run.tensor


# -- memory

# The bytes that remat=none saves, over those of anatomy.activations. It is plain differentiation, which also saves what
# has no name, some of it in float32. Compiled: 4.57 for 2.31 GiB (D = 1024, F = 4D, T = 4096, 8 layers, bfloat16).
PLAIN = 2.0


def slots_of_device(run: Run) -> float:
    """The bytes of a device's shard of the optimizer state, on the device or on its host."""
    config = run.config
    a_parameter = transformer.state_bytes(config)["optimizer"] / transformer.num_params(config)
    return a_parameter * sum(params_of_device(run)) / (run.sizes["data"] if config.shard_update else 1)


def attention_over_context(run: Run) -> float:
    """The bytes a token that the backward pass of context.py adds to a device's peak, beside the activations.

    A ring has dq in float32 twice, before and after a block is added to it, and likewise dk and dv. It also has a copy
    of queries, results and their gradients, in which those that see a block are contiguous. With all_gather, a device
    has all keys and values of the sequence, and their gradients in float32 before they are scattered.

    Half of this is counted. Most activations of the MLP are gone by then, and XLA chooses the order of the two.
    Compiled, between none of it and all adds to the peak (Llama 3.1 8B at 128k to 1M, `context` of 2 to 32, and a small
    model).
    """
    config, c = run.config, run.sizes["context"]
    only_windows = config.window and not config.global_every  # a halo is enough for these
    if only_windows or ring_size(config, run.sizes) == 1:
        return 0
    Hk, Hv = anatomy.key_dim(config), anatomy.value_dim(config)
    keys = config.num_kv_heads * (Hk + Hv)
    if config.context_impl == "all_gather":
        return c * keys * (run.element + 4) / 2
    copies = config.num_heads * (Hk + 2 * Hv) * run.element
    return (2 * 4 * (config.num_heads * Hk + keys) + copies) / 2


def memory_of(run: Run, layers: list[Layer]) -> tuple[dict[str, float], float]:
    """The bytes of a device by what they hold, and the bytes that a microbatch offloads to its host."""
    config, params = run.config, sum(params_of_device(run))
    memory = {
        "weights": 4 * params / (run.sizes["data"] if config.shard_update else 1),
        # An offloaded state comes to the device when the activations are gone.
        "optimizer": 0 if config.offload_optimizer else slots_of_device(run),
        "gradients": _gradient_bytes(run, params),
        "saved activations": _saved_bytes(run, layers),
    }
    memory |= max(_layer_peak(run, layers), _loss_peak(run), key=lambda nbytes: math.fsum(nbytes.values()))
    return memory, _of_microbatch(run, layers, lambda layer: layer.offloaded_bytes)


def _of_microbatch(run: Run, layers: list[Layer], nbytes: Callable[[Layer], float]) -> float:
    """The bytes of a microbatch on a device, from those that a layer has a token."""
    of_model = math.fsum(nbytes(layer) * layer.num_layers for layer in layers)
    return of_model / run.pipe * run.tokens / run.tensor


def _saved_bytes(run: Run, layers: list[Layer]) -> float:
    """The bytes of the activations that wait for the backward pass, of all microbatches in flight."""
    config = run.config
    bytes_of = partial(_of_microbatch, run, layers)
    saved = bytes_of(lambda layer: layer.saved_bytes)
    if config.remat == "none":
        # A name saves a device's shard of the norms. Plain differentiation saves them gathered, and in FP8 what matmuls
        # read in FP8.
        fp8 = lambda layer: (run.element - 1) * fp8_operands(run, layer)
        saved = bytes_of(lambda layer: PLAIN * layer.saved_bytes + (run.tensor - 1) * layer.norm_bytes - fp8(layer))
    waiting = saved * run.in_flight
    if config.remat_stage:
        # The input of the stage, or of its chunk of a round, of each microbatch; all activations of the one that is
        # computed again.
        rounds = config.pipeline_rounds
        waiting = saved / rounds + run.in_flight * rounds * config.model_dim * run.element * run.tokens / run.tensor
    elif run.pipe > 1:
        waiting += saved  # a copy of those that the backward pass reads
    if inputs_in_two_layouts(run):
        waiting += bytes_of(lambda layer: config.model_dim * run.element)
    if context_in_two_layouts(run):
        waiting += bytes_of(lambda layer: config.num_heads * anatomy.value_dim(config) * run.element)
    return waiting


def _gradient_bytes(run: Run, params: float) -> float:
    """The bytes of the gradients of a device's `params` at their peak, with the weights that are multiplied."""
    # Stages have the gradients of all layers and the weights that are multiplied, in bfloat16; these weights twice, and
    # the float32 sums of their microbatches as well: compiled, 808B parameters on two slices of 4x4x4.
    stages = (run.element + 4) * params if run.pipe > 1 else 0
    replicas = run.sizes["data"]
    if run.config.shard_update and replicas > 1:
        # Gathered over `data` are the weights that are multiplied and their gradients; then these in float32, beside
        # the sums of this device's shard.
        return max(2 * run.element, 4 + 4 / replicas) * params + stages
    # With replicas the tables' sums are not in place: compiled, data:8 on 2x2x1.
    tables = 4 * tables_of_device(run) if replicas > 1 else 0
    return 4 * params + tables + stages


def _layer_peak(run: Run, layers: list[Layer]) -> dict[str, float]:
    """What a device holds during the backward pass of a layer, beside the state and what is saved."""
    config = run.config
    largest = max(layers, key=lambda layer: layer.activation_bytes)
    # With two layers an iteration, half of another's: compiled, 3.1 and 1.6 GiB more of 70B in one microbatch and two.
    activations = largest.activation_bytes * (2 if config.double_buffer else 1.5)
    weights = 0
    if run.sizes["fsdp"] > 1:
        gathered = max(layer.gathered_bytes(run) for layer in layers)
        weights = (2 if config.prefetch else 1) * gathered + max(layer.gradient_bytes(run) for layer in layers)
    # What comes from the host, ahead of its layer, is on the device once more.
    activations = activations - largest.saved_bytes + largest.offloaded_bytes
    peak = {"a layer's activations": activations * run.tokens / run.tensor, "gathered weights": weights}
    if over_context := attention_over_context(run):
        peak["attention over context"] = over_context * run.tokens / run.tensor
    return peak


def _loss_peak(run: Run) -> dict[str, float]:
    """What a device holds while it computes the loss: the gathered unembedding, its gradient in float32, and logits."""
    config = run.config
    table = config.vocab_size * config.model_dim / run.tensor
    element = 1 if "unembed" in anatomy.fp8_weights(config) else run.element
    return {
        "unembedding": (element + 4) * table if run.sizes["fsdp"] > 1 else 0,
        "logits": 2 * 4 * math.prod(loss_chunk(run)) * config.vocab_size / run.tensor,
    }


def loss_chunk(run: Run) -> tuple[float, int]:
    """The sequences of a microbatch on a device, and the positions of each whose logits it has at once."""
    positions = run.config.seq_len / run.sizes["context"]
    sequences = run.tokens / positions
    chunk = anatomy.loss_chunk(run.config, sequences, math.ceil(positions), run.config.vocab_size / run.tensor)
    return sequences, chunk


def fp8_operands(run: Run, layer: Layer) -> float:
    """The elements a token that a layer's FP8 matmuls read. Matmuls of the same operand count it once."""
    read = {}
    for product in layer.products:
        if product.dtype == "fp8":
            name, ways = (product.weight, 1) if product.weight in ROW_PARALLEL else (product.part, run.tensor)
            read[name, product.k] = product.k * product.copies * ways
    return sum(read.values())


def inputs_in_two_layouts(run: Run) -> bool:
    """Whether libtpu stores the inputs of all layers twice (remat.py, on offload).

    Compiled: it does with only queries, keys and values on the host, one sequence a device and no `tensor` (70B at 8k,
    8B at 128k). It does not with two sequences, with `tensor`, or with the MLP on the host as well.
    """
    config = run.config
    alone = anatomy.offloaded_names(config) == anatomy.POLICIES["qkv_proj_offloaded"][1]
    pipelined = "xla_tpu_pipeline_memory_host_transfers=false" not in config.xla_flags
    return alone and pipelined and run.tensor == 1 and run.tokens * run.sizes["context"] == config.seq_len


def context_in_two_layouts(run: Run) -> bool:
    """Whether libtpu copies attention's saved results, of all layers, before the backward pass.

    Compiled: with a ring it does for 16 heads of 256 (8B at 1M, whether `context` is saved with heads or with positions
    first). It does not for heads of 128 (70B at 128k), nor without a ring.
    """
    saved = anatomy.saved_names(run.config) - anatomy.offloaded_names(run.config)
    ring = run.config.context_impl == "ring" and ring_size(run.config, run.sizes) > 1
    return ring and "context" in saved and anatomy.value_dim(run.config) > 128


def host_bytes_of(run: Run, offloaded: float) -> float:
    """The bytes of a device on its host: a microbatch's `offloaded` activations, and an offloaded optimizer state.

    A pipeline offloads only with remat_stage. Then only one of its rounds is on the host: the one computed again.
    """
    state = slots_of_device(run) if run.config.offload_optimizer else 0
    return offloaded / run.config.pipeline_rounds + state


def shortfall_of(run: Run, hbm_bytes: float, host_bytes: float, share: float = 1.0) -> dict[str, float]:
    """{memory, hbm or host: the bytes missing on a device}, if it may fill `share` of each; empty if it fits."""
    over = {"hbm": hbm_bytes - share * run.hbm_limit, "host": host_bytes - share * run.host_limit}
    return {memory: nbytes for memory, nbytes in over.items() if nbytes > 0}
