"""What one device of a run does, predicted: its share of the model, of the batch, of the machine. No jax here.

step.py adds it up to a step. A mesh of X/Y axis sizes, M microbatches, P pipeline stages:

    b = batch * T / (data * fsdp * expert * context * M)     tokens of a microbatch, which `tensor` devices share

**Time of a layer**, each the arithmetic divided by what programs reach of the chip's figures (`Efficiency`):

    matmul        (3 * forward + recomputed) FLOPs / C       dims padded to the matrix unit; rows of experts to tiles;
                                                             or its bytes / W_hbm, if that takes longer
    attention     scores * (forward * (1 or 2) + backward)   of a fused kernel, which computes whole blocks of scores
    elementwise   4 * bytes / W_hbm                          norms, rotations, SwiGLU, tokens sorted by expert and back

The 3 are one forward and two backward, a fourth what is recomputed: elementwise work always, as it fuses with what
reads it (with remat=none the program reads what it saved instead, and is no faster).

**Memory of a device**: weights in float32 with the optimizer's moments, with `shard_update` a part of both; gradients;
what the layers save for as many microbatches as are under way (memory comes in tiles of 128 columns, so that a head of
64 takes the room of one of 128). And the larger of what a layer needs in its backward pass, those of its activations
that are not saved, or come from the host, gradients half as large as all of them (as large in turns of two), two whole
layers of weights and a whole gradient, and of what the loss needs: the unembedding, whole, and its gradient in float32,
the logits of `loss_chunk` positions of each sequence and their gradient. Attention over `context` and stages hold more
(`memory_of`).

Where `tensor` cuts the stream, the gradient of a column-parallel weight needs its operand whole: it is gathered again,
or, with remat=none, it was saved.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
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

    "Measured": https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood. "Compiled": what libtpu makes
    of attention kernels for TPU7x, heads of 128 in blocks of 1024 x 1024 scores, counted in cycles (bundles.py) of
    1.76 GHz, 0.8 of the clock that the peak takes. At that clock the two matmuls of a block forward would be 1024
    cycles, the five backward 2560.
    """

    matmul: float = 0.83  # of the peak; measured: 956 of 1153.5 TFLOP/s, bf16, 32768^3
    # Of the router's matmuls over bf16's: three where activations in bf16 meet float32 in three parts of 8 bits, six
    # where both are float32. Compiled: 119k, 122k, 220k cycles forward and backward (8,192 tokens, D 4096, E 128).
    passes_of_f32: int = 4
    expert_tile: int = 512  # rows; the ends of a group fill a tile more. Compiled: 1.44 of the work, at 1024 rows
    attention_forward: float = KERNEL_CLOCK * 1024 / 1897  # of the peak; compiled: flash.py, 68.3k cycles for 36 blocks
    attention_backward: float = (
        KERNEL_CLOCK * 2560 / 4405
    )  # of the peak; compiled: flash_backward.py, 158.6k for 36 blocks
    attention_block: int = 1024  # scores; a block that the mask cuts is computed whole
    # Positions; whole tiles of a sequence are computed. Compiled: of 1,025 tokens forward 2.01, backward 1.93 times the
    # cycles of 1,024, where this makes 1.87.
    attention_tile: int = 512
    # A block of heads of 64 or 192 takes as long as of 128: the softmax does not see it, and 128 half fills the matrix
    # unit. Of 256 it takes so many times as long; compiled: 86.0k / 69.5k for 8192 forward, 201.5k / 166.3k backward.
    attention_of_256: float = 1.22
    hbm: float = HBM_REACHED  # of the peak
    # Of HBM's peak. Chosen: what the measured steps of Llama 3.1 70B in bf16 and fp8 and of Qwen3 235B take beyond the
    # other parts, over the bytes that are counted here. A program moves more: transposes, float32, what is not fused.
    elementwise: float = 0.37
    gated_experts: bool = True  # the experts' kernel computes their SwiGLU, too: gmm.py
    links: float = LINKS_REACHED  # of a link
    usable_hbm: float = 94.74 / 96  # compiled: the limit that XLA names for a TPU7x device
    host_bytes_per_s: float = HOST_BYTES_PER_S  # of a device one way, where a chip has no figure
    # What of a layer hides the way of its activations to the host. Compiled, without flags: the kernel (remat.py).
    hides_offload: tuple[str, ...] = ("attention",)
    # A layer's gradients are summed behind what its backward pass has left when those of its MLP or experts are there.
    # Compiled: of 128 ms a layer of DeepSeek-V3 in 8 bits on fsdp:512, 66 are waited for.
    late_sums: bool = True
    # What is gathered ahead is copied for the next turn of the loop; what comes in parts of other than whole tiles of
    # rows is, and its gradient before it goes, but for experts. Compiled: 0.2 s of Llama 3.1 70B, 0.7 of Gemma 31B.
    copies_weights: bool = True


TODAY = Efficiency()
# What published runs have: tokamax's splash attention, 120k cycles forward, 5780 a block backward; the times that it
# publishes are these cycles at 1.76 GHz. And offloads that all of a layer hides: chosen, for 8B on v6e, which takes no
# longer than that; what makes it so there is not known. Likewise sums that all of a backward pass hides, for
# DeepSeek-V3, and no copies of weights: most cut them in two dims, and carry none on.
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
    """A run on its machine, and what is a device's share of it."""

    config: Config
    chip: Chip
    topology: tuple[int, ...]
    num_slices: int
    sizes: dict[str, int]  # of the mesh axes; config.mesh is not looked at
    links: dict[str, list[Axis]]  # that each of them lies on
    efficiency: Efficiency = TODAY

    @property
    def num_chips(self) -> int:
        return math.prod(self.topology) * self.num_slices

    @property
    def hbm_limit(self) -> float:
        """Bytes that a program gets of a device's memory."""
        return self.chip.hbm_bytes / self.chip.devices * self.efficiency.usable_hbm

    @property
    def host_limit(self) -> float:
        """Bytes of a device's share of its host's memory; infinite where it is not published."""
        return (self.chip.host_memory_bytes or math.inf) / math.prod(self.chip.host) / self.chip.devices

    @property
    def pipe(self) -> int:
        return self.sizes["pipe"]

    @property
    def in_flight(self) -> float:
        """Microbatches whose activations a device keeps at once."""
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
        """b: of a microbatch, which the devices along `tensor` have together."""
        groups = math.prod(self.sizes[axis] for axis in (*BATCH_AXES, "context"))
        return self.config.batch * self.config.seq_len / groups / self.microbatches

    @property
    def expert_room(self) -> float:
        """Rows that a device's experts have room for, over those that the router makes of its tokens: a ratio."""
        if not self.config.num_experts:
            return 1.0
        tokens = max(1, round(self.tokens / self.config.moe_parts))
        rows = anatomy.expert_rows(self.config, tokens, self.sizes["expert"])
        return rows / (tokens * self.config.experts_per_token)

    @property
    def expert_work(self) -> float:
        """Rows that a device's experts multiply over the same: dropless, those that are filled."""
        return min(1.0, self.expert_room) if self.config.moe_impl == "dropless" else self.expert_room

    @property
    def experts_filled(self) -> float:
        """The share of the rows of a device's experts that they multiply."""
        return self.expert_work / self.expert_room

    @property
    def element(self) -> int:
        """Bytes of an activation's element."""
        return anatomy.BYTES[self.config.dtype]

    @property
    def dtype(self) -> str:
        """What the layers' weights are multiplied in."""
        return matmul_dtype(self.config)

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.chip.hbm_bytes_per_s / self.chip.devices

    @property
    def host_bytes_per_s(self) -> float:
        return (self.chip.pcie_bytes_per_s or self.chip.devices * self.efficiency.host_bytes_per_s) / self.chip.devices

    def flops_per_s(self, dtype: str = "bf16") -> float:
        """Returns the FLOP/s of a device's matmuls; f32 takes `passes_of_f32` passes, for all its bits."""
        passes = self.efficiency.passes_of_f32 if dtype == "f32" else 1
        return self.chip.flops_per_s(dtype) / self.chip.devices / passes * self.efficiency.matmul

    def reached(self, axis: str) -> list[Axis]:
        """The links of a mesh axis, at the speed that programs reach."""
        share = self.efficiency.links
        return [dataclasses.replace(link, link_bytes_per_s=link.link_bytes_per_s * share) for link in self.links[axis]]

    @property
    def pads_sums(self) -> bool:
        """Whether XLA may add rows to what a reduce-scatter sums."""
        return compiler_flags.for_run(self.config).get(compiler_flags.PADS_SUMS) == "true"

    def collective_s(self, kind: str, nbytes: float, *axes: str, thirds: bool = False) -> float:
        """Over mesh axes, the inner one first, by all links at once.

        But as XLA has them, compiled for TPU7x, all-gathers and reduce-scatters over part of an axis, and over both
        devices of a chip, go round one ring of all the devices; and so does a reduce-scatter over three axes, if its
        parts are not cut in thirds, one for each.

        Args:
          thirds: what is summed has a factor of 3; if not, it may be padded (`pads_sums`).
        """
        links = [link for axis in axes for link in self.reached(axis)]
        slices = [link for link in links if link.name.endswith("slices")]
        dies = [link for link in links if link.name.endswith("die to die")]
        wires = [link for link in links if link not in dies + slices]
        sums = kind == "reduce_scatter"
        in_parts = dies and len(wires) > 1 and any(" of " in link.name for link in wires)
        if (in_parts and (sums or kind == "all_gather")) or (
            sums and len(wires) > 2 and not (thirds or self.pads_sums)
        ):
            both = math.prod(link.size for link in dies)  # devices of a chip: for these a ring passes its links once
            slowest = min(wires, key=lambda link: link.link_bytes_per_s)
            size, speed = both * math.prod(link.size for link in wires), both * slowest.link_bytes_per_s
            ring = dataclasses.replace(slowest, size=size, link_bytes_per_s=speed, wrap=True)
            links = [ring, *slices]
        return collective_s(kind, nbytes, links, spread=not sums or len(wires) > 1)


def run_of(
    config: Config, chip: Chip, topology: Sequence[int], *, num_slices: int = 1, efficiency: Efficiency = TODAY
) -> Run:
    """The run that `config` describes, on slices of a chip.

    Raises:
      ValueError: the mesh does not make up the devices, or cannot be laid on the torus; remat=auto, still to be chosen.
    """
    if config.remat == "auto":
        raise ValueError(
            "remat=auto is a choice still to be made: roofline.py remat --remat=auto with these flags makes it"
        )
    sizes = fill_mesh(parse_mesh(config.mesh), chip.devices * math.prod(topology) * max(num_slices, 1))
    links = links_of(sizes, chip, topology, num_slices=num_slices, core_axis=config.core_axis)
    return Run(settled(config, sizes), chip, tuple(topology), num_slices, sizes, links, efficiency)


# -- a layer


ROWS_OF_A_TILE, COLUMNS_OF_A_TILE = 8, 128  # of memory, as XLA lays out matrices; a head of 64 takes that of 128
ROW_PARALLEL = {"w_o", "w_down", "expert_down", "shared_down"}  # `tensor` cuts what they sum over


@dataclass(frozen=True)
class Product:
    """A layer's matmul with a weight: [tokens * copies, k] . [k, n]."""

    weight: str
    part: str
    k: int
    n: int
    copies: int  # experts of a token
    recomputed: bool
    dtype: str  # bf16, fp8, or f32 in full


@dataclass(frozen=True)
class Layer:
    """What one layer costs: of those that have experts, or of the others."""

    num_layers: int
    products: list[Product]
    params: dict[bool, int]  # of the experts, and of all else
    params_in_8_bits: dict[bool, int]  # of these, those that travel so
    params_in_float32: dict[bool, int]  # and those that do in float32, as their gradients
    params_in_thirds: dict[bool, int]  # of matrices with a factor of 3, which their parts are taken to have as well
    attention_lost: bool  # the backward pass needs the kernel's forward again
    keys: float  # keys that the kernel computes for a query, on average over the layers
    global_keys: float  # of them, those of layers without a window
    elementwise: tuple[float, float]  # elements a token, forward: of attention, and of all else
    saved: float  # bytes a token, on the device
    offloaded: float  # on the host
    every: float  # bytes a token of all activations that the backward pass reads
    norms: float  # bytes a token of what the column-parallel matmuls take, if it is saved

    def whole_params(self, run: Run, experts: bool = True) -> float:
        """Its weights on a device, once gathered over `fsdp`; with the experts, or without."""
        return _on_device(run, self.params, experts)

    def in_thirds(self, run: Run) -> float:
        """Of them, those whose gradients can be cut in thirds, to be summed over three axes of the torus at once."""
        return _on_device(run, self.params_in_thirds, True)

    def whole_bytes(self, run: Run, experts: bool = True) -> float:
        """Theirs, as they multiply, and so as they travel."""
        in_8_bits = _on_device(run, self.params_in_8_bits, experts)
        return self.gradient_bytes(run, experts) - (run.element - DTYPE_BYTES["fp8"]) * in_8_bits

    def gradient_bytes(self, run: Run, experts: bool = True) -> float:
        """Returns the bytes of their gradients, before these are summed."""
        in_float32 = _on_device(run, self.params_in_float32, experts)
        return run.element * self.whole_params(run, experts) + (4 - run.element) * in_float32


def _on_device(run: Run, params: dict[bool, int], experts: bool) -> float:
    return (experts * params[True] / run.sizes["expert"] + params[False]) / run.tensor


def layers_of(run: Run) -> list[Layer]:
    """The kinds of layers that the model has."""
    uncut = run.tensor if run.sizes["expert"] == 1 else 1
    gated = run.efficiency.gated_experts and anatomy.swiglu_in_kernel(run.config)
    part = run.config.seq_len / ring_size(run.config, run.sizes)
    added = filled(part, run.efficiency.attention_tile) / part
    return _layers(run.config, run.efficiency.attention_block, added, run.expert_room, uncut, gated)


@cache
def _layers(config: Config, block: int, added: float, expert_room: float, uncut: int, gated: bool) -> list[Layer]:
    """`block`: scores along an edge of the attention kernel's block; `added`: positions that it computes over those of
    the sequence; `gated`: as for elementwise_elements; else as for anatomy.activations."""
    saved = anatomy.read_names(anatomy.saved_names(config))
    offloaded = saved & anatomy.offloaded_names(config)
    every = anatomy.saved_names(dataclasses.replace(config, remat="none", remat_tensors=""))
    num_experts = anatomy.num_expert_layers(config)
    in_8_bits = anatomy.fp8_weights(config)
    T = added * config.seq_len
    whole = added * (T if T <= block else T / 2 + block / 2)  # blocks on the diagonal are computed whole
    local = min(whole, added * (config.window + block)) if config.window else whole
    num_global = transformer.num_global_layers(config)
    keys = (num_global * whole + (config.num_layers - num_global) * local) / config.num_layers

    found = []
    for experts, num_layers in ((False, config.num_layers - num_experts), (True, num_experts)):
        if not num_layers:
            continue
        absent = ("embedding", "unembedding", *(("mlp",) if experts else ("experts", "router", "shared experts")))
        products, counts = [], [{True: 0, False: 0} for _ in range(4)]
        params, params_in_8_bits, params_in_float32, params_in_thirds = counts
        for name, weight in transformer.weights(config).items():
            if (
                weight.part in absent
                or name == "norm"
                or (not experts and name.startswith(("bias_e", "bias_r", "selection_bias")))
            ):
                continue
            dims = weight.shape[1:]
            params[weight.part == "experts"] += math.prod(dims)
            params_in_8_bits[weight.part == "experts"] += math.prod(dims) * (name in in_8_bits)
            params_in_float32[weight.part == "experts"] += math.prod(dims) * (name in anatomy.FLOAT32_WEIGHTS)
            params_in_thirds[weight.part == "experts"] += math.prod(dims) * (math.prod(dims) % 3 == 0)
            if weight.makes:
                copies = 1
                if weight.part == "experts":
                    copies, dims = config.experts_per_token, (config.model_dim, config.expert_dim)
                    dims = dims[::-1] if name == "expert_down" else dims
                k, n = (math.prod(dims[:-1]), dims[-1]) if name == "w_o" else (dims[0], math.prod(dims[1:]))
                again = transformer.multiplied_again(weight, saved)
                dtype = "fp8" if name in in_8_bits else "f32" if name in anatomy.FLOAT32_WEIGHTS else "bf16"
                products.append(Product(name, weight.part, k, n, copies, again, dtype))
        of_layer = dict(experts=experts, expert_room=expert_room, uncut=uncut)
        saved_bytes = partial(transformer.saved_bytes_per_layer, config, columns=COLUMNS_OF_A_TILE, **of_layer)
        # Experts' rows, the largest of all, wait as they were multiplied for their weights' gradients. Compiled: Qwen3.
        narrow = experts and "expert_up" in in_8_bits and "expert_input" not in saved
        narrow *= (1 - 1 / anatomy.BYTES[config.dtype]) * saved_bytes({"expert_input"})
        found.append(
            Layer(
                num_layers,
                products,
                params,
                params_in_8_bits,
                params_in_float32,
                params_in_thirds,
                "context" not in saved or "log_sum_exp" not in saved,
                keys,
                num_global * whole / config.num_layers,
                elementwise_elements(config, experts, expert_room, uncut, gated),
                saved_bytes(saved - offloaded),
                saved_bytes(offloaded),
                saved_bytes(every) - narrow,
                saved_bytes(saved & {"norm_attention", "norm_mlp"}),
            )
        )
    return found


def filled(length: float, tile: int) -> float:
    """Returns the positions that attention's kernel computes of a sequence: whole tiles, shorter in a short one."""
    tile = min(tile, 256 * math.ceil(length / 256))
    return tile * math.ceil(length / tile)


def elementwise_elements(
    config: Config, experts: bool, expert_room: float = 1.0, uncut: int = 1, gated: bool = False
) -> tuple[float, float]:
    """Elements a token that a layer's elementwise work reads and writes, forward; twice as many backward.

    Of attention: norm 2D; rotation of queries and keys, into the kernel's layout, 2(N+K)Hk; values into it, its result
    out of it; addition to the stream 3D. Of the rest: norm and addition again; SwiGLU 3F. Experts: sort X*D, read and
    write; SwiGLU 3*X*M, of all rows that there is room for; sort back; weigh and add, X*D + D; the router's E, a few
    times. What is sorted may be whole on each device along `tensor`, `uncut` of them. Where the SwiGLU is `gated`, a
    kernel's that hides it forward and in what is recomputed, half of it is left, for the gradient. In 8 bits a kernel's
    rows, X*D and X*M, are scaled in passes of their own (fp8.py); ahead of XLA's matmuls that is fused with other work.
    """
    D, N, K = config.model_dim, config.num_heads, config.num_kv_heads
    Hk, Hv = anatomy.key_dim(config), anatomy.value_dim(config)
    attention = 5 * D + 2 * (N + K) * Hk * (2 if config.qk_norm else 1) + 2 * (K + N) * Hv
    attention += 2 * (config.q_lora_rank + config.kv_lora_rank)
    if not experts:
        return attention, 5 * D + 3 * config.ff_dim
    X, M = config.experts_per_token, config.expert_dim
    shared = 3 * config.num_shared_experts * M
    of_experts = 3 * X * expert_room * M * (0.5 if gated else 1)
    if "expert_gate" in anatomy.fp8_weights(config):
        nbytes = 5 if config.fp8 == "dynamic" else 3
        of_experts += X * expert_room * (D + M) * nbytes / anatomy.BYTES[config.dtype]
    return attention, 5 * D + shared + 5 * X * D * uncut + D + of_experts + 4 * config.num_experts


def local_shape(run: Run, product: Product) -> tuple[float, float, float, float]:
    """(rows, k, n, matrices) of a device: its rows, in groups, one for each of so many matrices [k, n].

    An expert's matmul has as many matrices as the device has experts, and all tokens that `expert` brought to them.
    """
    k, n, tensor = product.k, product.n, run.tensor
    k, n = (k / tensor, n) if product.weight in ROW_PARALLEL else (k, n / tensor)
    matrices = run.config.num_experts / run.sizes["expert"] if product.part == "experts" else 1
    rows = run.tokens * product.copies * (run.expert_work if product.part == "experts" else 1)
    return rows, k, n, matrices


def moved_bytes(run: Run, product: Product) -> float:
    """Between HBM and the matrix units, forward: operands in what they are multiplied in, the result as computed in."""
    rows, k, n, matrices = local_shape(run, product)
    operand = DTYPE_BYTES["fp8"] if product.dtype == "fp8" else run.element
    more = (4 - run.element) * (k * n + rows * n) * (product.dtype == "f32")  # the weight, and the result
    return (matrices * k * n + rows * k) * operand + rows * n * run.element + more


def matmul_s(run: Run, products: Iterable[Product]) -> tuple[float, float]:
    """Seconds of a microbatch's matmuls, forward and backward."""
    forward = backward = 0.0
    mxu = run.chip.mxu_size
    padded = lambda dim: math.ceil(dim / mxu) * mxu
    for product in products:
        rows, k, n, matrices = local_shape(run, product)
        padded_rows = rows + matrices * run.efficiency.expert_tile * (product.part == "experts")
        once = max(
            2 * padded_rows * padded(k) * padded(n) / run.flops_per_s(product.dtype),
            moved_bytes(run, product) / (run.hbm_bytes_per_s * run.efficiency.hbm),
        )
        forward += once
        backward += (2 + product.recomputed) * once
    return forward, backward


def compute_s(run: Run, layer: Layer) -> dict[str, tuple[float, float]]:
    """Seconds of a layer and a microbatch, forward and backward, by part."""
    config, e, b, tensor = run.config, run.efficiency, run.tokens, run.tensor
    # The last part of a sequence in its own order has more to do than the mean.
    keys = layer.keys + (1 - 1 / ring_size(config, run.sizes)) * layer.global_keys * (not anatomy.in_zigzag(config))
    scores = b * keys * config.num_heads / tensor
    dim = max(anatomy.key_dim(config), anatomy.value_dim(config))
    of_128 = math.ceil(dim / 256) * (e.attention_of_256 if dim > 192 else 1)  # heads of 128 that take as long
    peak = run.chip.bf16_flops_per_s / run.chip.devices
    attention = scores * 2 * 2 * 128 * of_128 / (peak * e.attention_forward)
    attention_backward = scores * 5 * 2 * 128 * of_128 / (peak * e.attention_backward)
    attention_backward += layer.attention_lost * attention
    elementwise = elementwise_s(run, sum(layer.elementwise))
    return {
        "matmul": matmul_s(run, layer.products),
        "attention": (attention, attention_backward),
        "elementwise": (elementwise, 3 * elementwise),
    }


def elementwise_s(run: Run, elements: float) -> float:
    """Seconds of a microbatch's elementwise work on so many elements a token."""
    return elements * run.element * run.tokens / run.tensor / (run.hbm_bytes_per_s * run.efficiency.elementwise)


def behind_mlp_s(run: Run, layer: Layer) -> float:
    """Seconds of a layer's backward pass behind that of its MLP or experts: of attention, and of its matmuls.

    What is recomputed is ahead of both.
    """
    matmuls = matmul_s(run, [replace(p, recomputed=False) for p in layer.products if p.part == "attention"])
    forward, attention = compute_s(run, layer)["attention"]
    return matmuls[1] + attention - layer.attention_lost * forward + 2 * elementwise_s(run, layer.elementwise[0])


def params_of_device(run: Run) -> tuple[float, float]:
    """Elements of a device's shards: of the experts, and of all else. All stages have embedding and unembedding."""
    config, sizes = run.config, run.sizes
    experts = transformer.parts(config)["experts"].params if config.num_experts else 0
    shards = sizes["fsdp"] * run.tensor
    tables = tables_of_device(run)
    layers = (transformer.num_params(config) - experts) / shards - tables
    return experts / run.pipe / shards / sizes["expert"], layers / run.pipe + tables


def tables_of_device(run: Run) -> float:
    """Elements of a device's shards of embedding and unembedding."""
    tables = 1 if run.config.tied_embeddings else 2
    return tables * run.config.vocab_size * run.config.model_dim / run.sizes["fsdp"] / run.tensor


# -- memory

# Bytes that remat=none keeps, over those of anatomy.activations: it is plain differentiation, which keeps what has
# no name too, in float32 where it is. Compiled: 4.57 for 2.31 GiB (D = 1024, F = 4D, T = 4096, 8 layers, bfloat16).
PLAIN = 2.0


def slots_of_device(run: Run) -> float:
    """Bytes of a device's part of the optimizer state, on the device or on its host."""
    config = run.config
    a_parameter = transformer.state_bytes(config)["optimizer"] / transformer.num_params(config)
    return a_parameter * sum(params_of_device(run)) / (run.sizes["data"] if config.shard_update else 1)


def attention_over_context(run: Run) -> float:
    """Bytes a token of the device's, that the backward pass of context.py holds beside the activations at the peak.

    A ring has dq in float32 twice, before and after a block is added to it, and dk and dv likewise; of queries, results
    and their gradients a copy, in which those that see a block stand together. Gathered are all keys and values of the
    sequence, and their gradients, in float32 before they are scattered. Half of it is taken: most of the activations
    of the MLP are gone by then, and XLA orders the two as it likes. Compiled, between none of it and all adds to the
    peak (Llama 3.1 8B at 128k to 1M, `context` of 2 to 32, and a small model).
    """
    config, c = run.config, run.sizes["context"]
    only_windows = config.window and not config.global_every  # for which a halo is enough
    if only_windows or ring_size(config, run.sizes) == 1:
        return 0
    Hk, Hv = anatomy.key_dim(config), anatomy.value_dim(config)
    keys = config.num_kv_heads * (Hk + Hv)
    if config.context_impl == "all_gather":
        return c * keys * (run.element + 4) / 2
    copies = config.num_heads * (Hk + 2 * Hv) * run.element
    return (2 * 4 * (config.num_heads * Hk + keys) + copies) / 2


def memory_of(run: Run, layers: list[Layer]) -> tuple[dict[str, float], float]:
    """Bytes of a device by what they hold, and those that a microbatch puts on its host."""
    config, sizes, b = run.config, run.sizes, run.tokens
    experts, others = params_of_device(run)
    params = experts + others
    held = lambda nbytes: math.fsum(nbytes(layer) * layer.num_layers for layer in layers) / run.pipe * b / run.tensor
    # Saved with a name is this device's part of the norms; plain differentiation keeps them as they were gathered, and
    # what matmuls in 8 bits read as these read it.
    in_8_bits = lambda layer: (run.element - 1) * read_in_8_bits(run, layer)
    plain = lambda layer: PLAIN * layer.saved + (run.tensor - 1) * layer.norms - in_8_bits(layer)
    saved = plain if config.remat == "none" else lambda layer: layer.saved
    waiting = held(saved) * run.in_flight
    if config.remat_stage:
        # Of each the input of the stage, or of its part in a round; and all of the one that is computed again.
        rounds = config.pipeline_rounds
        waiting = held(saved) / rounds + run.in_flight * rounds * config.model_dim * run.element * b / run.tensor
    elif run.pipe > 1:
        waiting += held(saved)  # those that the backward pass reads are taken out of the others
    if inputs_in_two_layouts(run):
        waiting += held(lambda layer: config.model_dim * run.element)
    if context_in_two_layouts(run):
        waiting += held(lambda layer: config.num_heads * anatomy.value_dim(config) * run.element)
    largest = max(layers, key=lambda layer: layer.every)
    gathered = max(layer.whole_bytes(run) for layer in layers)
    grads = max(layer.gradient_bytes(run) for layer in layers)
    whole = sizes["fsdp"] > 1
    table = config.vocab_size * config.model_dim / run.tensor
    # In bfloat16 the gradients of all layers and the weights that are multiplied. Stages have these weights twice, and
    # the float32 sums of their microbatches as well: compiled, 808B parameters on two slices of 4x4x4.
    stages = (run.element + 4) * (run.pipe > 1) * params
    replicas = sizes["data"]
    cut = replicas if config.shard_update else 1
    if cut > 1:
        # Whole over `data` are the weights that are multiplied and their gradients; then these in float32, beside the
        # sums that this device keeps.
        gradients = max(2 * run.element, 4 + 4 / cut) * params + stages
    else:
        # With replicas the tables' sums are not in place: compiled, data:8 on 2x2x1.
        gradients = 4 * params + 4 * tables_of_device(run) * (replicas > 1) + stages
    memory = {
        "weights": 4 * params / cut,
        # With an offload it comes when the activations are gone.
        "optimizer": 0 if config.offload_optimizer else slots_of_device(run),
        "gradients": gradients,
        "saved activations": waiting,
    }
    # In turns of two, half of another: compiled, 3.1 and 1.6 GiB more of 70B in one microbatch and in two.
    of_layer = largest.every * (2 if config.double_buffer else 1.5)
    in_layer = {
        # On the device once more is what comes from the host ahead of its layer.
        "a layer's activations": (of_layer - largest.saved + largest.offloaded) * b / run.tensor,
        "gathered weights": (1 + config.prefetch) * gathered + grads if whole else 0,
    }
    if over_context := attention_over_context(run):
        in_layer["attention over context"] = over_context * b / run.tensor
    in_loss = {
        "unembedding": ((1 if "unembed" in anatomy.fp8_weights(config) else run.element) + 4) * table if whole else 0,
        "logits": 2 * 4 * math.prod(loss_chunk(run)) * config.vocab_size / run.tensor,
    }
    memory |= max(in_layer, in_loss, key=lambda held: math.fsum(held.values()))
    return memory, held(lambda layer: layer.offloaded)


def loss_chunk(run: Run) -> tuple[float, int]:
    """Sequences of a microbatch on a device, and the positions of each whose logits are there at once."""
    positions = run.config.seq_len / run.sizes["context"]
    sequences = run.tokens / positions
    chunk = anatomy.loss_chunk(run.config, sequences, math.ceil(positions), run.config.vocab_size / run.tensor)
    return sequences, chunk


def read_in_8_bits(run: Run, layer: Layer) -> float:
    """Elements a token that a layer's matmuls in 8 bits read, each once: those side by side read the same."""
    read = {}
    for product in layer.products:
        if product.dtype == "fp8":
            name, ways = (product.weight, 1) if product.weight in ROW_PARALLEL else (product.part, run.tensor)
            read[name, product.k] = product.k * product.copies * ways
    return sum(read.values())


def inputs_in_two_layouts(run: Run) -> bool:
    """Whether libtpu keeps the inputs of all layers twice, as remat.py has it, on offload.

    Compiled: with queries, keys and values alone on the host, one sequence a device and no `tensor`, it does, of 70B at
    8k and of 8B at 128k; with two sequences, with `tensor`, and with the MLP on the host as well, it does not.
    """
    config = run.config
    alone = anatomy.offloaded_names(config) == anatomy.POLICIES["qkv_proj_offloaded"][1]
    pipelined = "xla_tpu_pipeline_memory_host_transfers=false" not in config.xla_flags
    return alone and pipelined and run.tensor == 1 and run.tokens * run.sizes["context"] == config.seq_len


def context_in_two_layouts(run: Run) -> bool:
    """Whether libtpu copies what attention has saved, of all layers, before the backward pass.

    Compiled: with a ring it does for 16 heads of 256 (8B at 1M, whether `context` is saved with heads or with positions
    first), and does not for heads of 128 (70B at 128k); nor without a ring.
    """
    saved = anatomy.saved_names(run.config) - anatomy.offloaded_names(run.config)
    ring = run.config.context_impl == "ring" and ring_size(run.config, run.sizes) > 1
    return ring and "context" in saved and anatomy.value_dim(run.config) > 128


def on_host(run: Run, offloaded: float) -> float:
    """Bytes of a device on its host: what a microbatch has offloaded there, and the optimizer state.

    Of a pipeline, which offloads only with remat_stage, in one of its rounds: the one that is computed again.
    """
    return offloaded / run.config.pipeline_rounds + slots_of_device(run) * run.config.offload_optimizer


def lacking(run: Run, hbm_bytes: float, host_bytes: float, room: float = 1.0) -> dict[str, float]:
    """{memory: bytes that a device lacks of it}, if it may fill `room` of its own and its host's; empty if it fits."""
    over = {"hbm": hbm_bytes - room * run.hbm_limit, "host": host_bytes - room * run.host_limit}
    return {memory: nbytes for memory, nbytes in over.items() if nbytes > 0}
