"""The figures of TPU chips, v2 to TPU7x, by which predictions divide. No imports but the standard library.

    python hardware.py
    python hardware.py v5p tpu7x --json

**The figures** are those of a chip, in SI units, dense, at peak. No program reaches them all. On TPU7x a large bf16
matmul was measured at 83% of its peak, a copy at 87% of HBM's, an all-gather at 89% of the links'
(https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood).

**A chip and a device.** JAX shows a chip as one device, or as two that have half of everything each. v2, v3 and TPU7x
have two cores with a memory of their own (TPU7x: two dies). v4 and v5p run their two cores as one ("megacore"). The
links between chips belong to the chip: both devices of a TPU7x send through the same six.

**Traps**, all of them found in print:

    2307e12 / 3.69e12 = 625     TPU7x's ridge? No: FLOPs of a chip over bytes of a device. It is 2307 / 7.38 = 313
    GB for GiB                  192 GiB are 206 GB: 7% of a memory
    200 GB/s an axis            one link, both directions, or what a chip sends on both its links of that axis. One
                                way over one link it is 100, and that is `link_bytes_per_s`
    1200 GB/s a chip            6 links, both directions. One way 600, on three axes at once
    1.2 Tbps, 1200 Gbps         said of these 1200 GB/s: bits for bytes. (4800 Gbps of a v5p are 600 GB/s, one way)
    64 MB of VMEM               of a core; a TPU7x chip has it twice
    tpu7x-128, v5p-128          count devices and cores: both are 64 chips, 4x4x4

**What if.** A chip that does not exist is written as one that does, followed by other figures of fields of `Chip`:

    python roofline.py step --recipe=mixtral-8x7b-4k-bf16 --topology=tpu7x+link_bytes_per_s=2x+hbm_bytes=4e11:4x4x4

**Clock.** A TPU7x has power states (`--xla_tpu_dvfs_p_state` of libtpu): 3 by default, 7 with the highest clock.
tpu7x+p_state=7:4x4x4 is a slice in that state. Its matmuls and kernels take 0.86 of the time, transfers the same time.

Every prediction accepts it like a chip of CHIPS. (`python recipes.py --what_if` shows what each recipe would gain.)

**Left out**: SparseCores, the vector unit, prices; twisted tori (v4, v5p), which shorten the paths across a slice like
4x4x8; the CMEM of v4, 128 MiB beside VMEM.

**Source.** Every figure has its source beside it, and where sources disagree, what the others have. The order of
preference: the maker's page on the chip; the designers' papers; the scaling book (Austin et al. 2025,
https://jax-ml.github.io/scaling-book, part 2); JAX's own table (jax/_src/pallas/mosaic/tpu_info.py). "Page" is
https://docs.cloud.google.com/tpu/docs/ and the chip's name.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import le

import command


def by(sizes: Sequence[int]) -> str:
    """Formats sizes as 4x4x8."""
    return "x".join(map(str, sizes))


def si(value: float, unit: str) -> str:
    """Formats a quantity with its SI prefix, as in 7.38 TB/s."""
    scales = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1: "", 1e-3: "m", 1e-6: "u"}
    scale = next((scale for scale in scales if value >= scale), 1 if value == 0 else 1e-6)
    return f"{value / scale:.4g} {scales[scale]}{unit}" if value < math.inf else f"inf {unit}"


# -- links


def check_size(size: float) -> None:
    if size < 1 or size != int(size):
        raise ValueError(f"an axis has a whole number of devices, 1 or more, not {size}")


@dataclass(frozen=True)
class Axis:
    """An axis of chips, a line or a ring (wrap), and the links between neighbours."""

    size: int
    link_bytes_per_s: float  # one way
    hop_s: float = 1e-6  # "typically around 1us": the scaling book, part 3, "A note on ICI latency"
    wrap: bool = True
    name: str = ""  # for output

    def __post_init__(self):
        check_size(self.size)
        if not (self.link_bytes_per_s > 0 and self.hop_s >= 0):
            raise ValueError(f"an axis needs link_bytes_per_s over 0 and hop_s of 0 or more, unlike {self}")


# -- chips


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip in figures: peaks in SI units, of the chip unless the name says otherwise."""

    name: str
    device_kinds: tuple[str, ...]  # values of jax.Device.device_kind, over releases and runtimes
    devices: int  # as JAX shows a chip
    cores: int  # TensorCores

    # Matrix units: cores * mxus_per_core * mxu_size**2 * mxu_rows_per_cycle * 2 * clock_hz = bf16_flops_per_s
    mxus_per_core: int
    mxu_size: int  # operands are padded to multiples of it
    mxu_rows_per_cycle: int
    clock_hz: float  # at which the published peak is reached
    # Power states whose clock is known, as (state, Hz), and the state that the chip is in; none: it has one clock.
    clocks: tuple[tuple[int, float], ...] = ()
    p_state: int = 0

    # The peak of matmuls with operands of this type; None: there is no such unit, or no published figure.
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None
    int8_flops_per_s: float | None

    hbm_bytes: float
    hbm_bytes_per_s: float
    vmem_bytes_per_core: float
    # "around 22x" in the book, for no particular chip. Three registers of 4 KiB a cycle (its appendix A, on v5p) are
    # 22.5 times HBM on v5e, but 16 on v5p and 7 on TPU7x, if it still has three; there, 22 is an upper bound.
    vmem_over_hbm: float = 22.0

    torus_axes: int
    link_bytes_per_s: float  # ICI: one link, one way
    die_to_die_bytes_per_s: float = 0.0  # one way, where a chip is two dies
    dcn_bytes_per_s: float  # a chip's share of the network between slices, one way
    pcie_bytes_per_s: float | None  # a chip's share of the way to its host, one way; None: not published

    pods: tuple[tuple[int, ...], ...]  # the machines that were built, in chips along each axis
    cube: int = 0  # optical switches: every axis of a slice wraps around if all are multiples of this, otherwise none
    ring: int = 0  # fixed wires: an axis of this length wraps around, others do not
    host: tuple[int, ...]  # chips of a host along each axis
    host_memory_bytes: float | None = None  # of a host, for all its chips; a virtual machine may have less

    hop_s: float = 1e-6  # of a link, as in Axis
    dcn_hop_s: float = 10e-6  # assumed, for want of a published figure

    @property
    def vmem_bytes(self) -> float:
        return self.cores * self.vmem_bytes_per_core

    @property
    def vmem_bytes_per_s(self) -> float:
        return self.vmem_over_hbm * self.hbm_bytes_per_s

    def flops_per_s(self, dtype: str) -> float:
        """The peak for matmuls of a type: bf16, fp8, int8, or f32, which JAX by default rounds to bf16, in one pass."""
        speeds = {
            "f32": self.bf16_flops_per_s,
            "bf16": self.bf16_flops_per_s,
            "fp8": self.fp8_flops_per_s,
            "int8": self.int8_flops_per_s,
        }
        if not speeds.get(dtype):
            published = ", ".join(name for name, speed in speeds.items() if speed)
            raise ValueError(f"{self.name} has no published speed of a matmul in {dtype!r}; it has {published}")
        return speeds[dtype]

    @property
    def running_hz(self) -> float:
        """The clock in the chip's power state; between two known states it is interpolated."""
        for (below, low), (above, high) in pairwise(self.clocks):
            if below <= self.p_state <= above:
                return low + (high - low) * (self.p_state - below) / (above - below)
        return self.clock_hz

    def axes(self, topology: Sequence[int]) -> list[Axis]:
        """Returns the axes of a slice."""
        if len(topology) != self.torus_axes:
            raise ValueError(
                f"{by(topology)} has {len(topology)} axes, {self.name} has {self.torus_axes}, some of which may be 1"
            )
        cubes = self.cube > 0 and all(size % self.cube == 0 for size in topology)
        link = (self.link_bytes_per_s, self.hop_s)
        return [Axis(size, *link, wrap=cubes or size == self.ring, name=str(i)) for i, size in enumerate(topology)]

    def across(self, num_slices: int) -> Axis:
        """The network between slices as the outermost axis, with a link for every chip.

        A chip has one way out and one way in, which the two directions of a ring would share: no gain, as on a line.
        The network does not relay an all-to-all, which costs less than along an axis.
        """
        return Axis(num_slices, self.dcn_bytes_per_s, self.dcn_hop_s, wrap=False, name="slices")


# -- what programs reach of the figures

# Measured on TPU7x: https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood. Other chips are assumed
# to reach the same shares of their figures.
HBM_REACHED = 0.87  # of HBM's bandwidth: a copy, 6421 of 7380 GB/s
LINKS_REACHED = 0.89  # of a link: an all-gather, 178.8 of 200 GB/s
HOST_BYTES_PER_S = 16e9  # of a device one way, assumed where a chip has no figure: the book's of other chips
MATMUL_REACHED = 0.96  # of the peak at the running clock: a bf16 matmul, 956 of 1153.5 TFLOP/s at 1.9 of 2.2 GHz
# Attention kernels take their compiled cycles at 1.76 GHz, where the chip runs at 1.9 GHz.
KERNEL_CLOCK = 1.76 / 1.9

# -- the chips

GiB, MiB = 2**30, 2**20

CHIPS = {
    # The page refers to Jouppi et al. 2020, "A domain-specific supercomputer for training deep neural networks",
    # CACM 63(7), the source of all figures without another one. Wrap-around: its pod is a torus.
    "v2": Chip(
        name="v2",
        device_kinds=("TPU v2",),
        devices=2,
        cores=2,
        mxus_per_core=1,
        mxu_size=128,
        mxu_rows_per_cycle=1,
        clock_hz=0.7e9,
        bf16_flops_per_s=46e12,  # also JAX; the page, while it had a figure: 45
        fp8_flops_per_s=None,
        int8_flops_per_s=None,
        hbm_bytes=16 * GiB,  # JAX: 16e9
        hbm_bytes_per_s=700e9,  # JAX: 716e9
        vmem_bytes_per_core=16 * MiB,  # JAX
        torus_axes=2,
        link_bytes_per_s=62e9,  # 496 Gbit/s a link, each way
        dcn_bytes_per_s=6.25e9,  # the book's typical figure, as it has none for v2
        pcie_bytes_per_s=None,
        pods=((16, 16),),  # 256 chips. The page's "512 chips" are cores: its largest type is v2-512
        ring=16,
        host=(2, 2),  # v2-8
    ),
    "v3": Chip(
        name="v3",
        device_kinds=("TPU v3",),
        devices=2,
        cores=2,
        mxus_per_core=2,  # page
        mxu_size=128,
        mxu_rows_per_cycle=1,
        clock_hz=0.94e9,  # Jouppi et al. 2020
        bf16_flops_per_s=123e12,  # page, and what the clock gives. Book and JAX: 140; Hot Chips 2020: 420 / 4 = 105
        fp8_flops_per_s=None,
        int8_flops_per_s=None,  # JAX; the book has bf16's figure in its int8 column
        hbm_bytes=32 * GiB,  # page, JAX; book: 32 GB
        hbm_bytes_per_s=900e9,  # page, book; JAX: 825e9
        vmem_bytes_per_core=16 * MiB,  # JAX
        torus_axes=2,
        # Book: 100, which agrees with the page's 6.4 TB/s between the halves of a pod, 2 x 32 links. Its 340 TB/s of
        # all-reduce over 4 x 1024 links would be 83, and Jouppi et al. 2020 have 656 Gbit/s, 82.
        link_bytes_per_s=100e9,
        dcn_bytes_per_s=6.25e9,  # as v2
        pcie_bytes_per_s=None,
        # Kumar & Chen, Hot Chips 2020: "32x32 torus topology", and four of them in a row, "128x32 mesh topology", whose
        # axis of 32 is assumed to wrap around as in one of them.
        pods=((32, 32), (128, 32)),
        ring=32,
        host=(2, 2),  # v3-8; the book has 4x2
    ),
    "v4": Chip(
        name="v4",
        device_kinds=("TPU v4",),
        devices=1,
        cores=2,
        mxus_per_core=4,  # page
        mxu_size=128,
        mxu_rows_per_cycle=1,
        clock_hz=1.05e9,  # Jouppi et al. 2023, arXiv:2304.01433
        bf16_flops_per_s=275e12,  # page, book, JAX
        fp8_flops_per_s=None,
        int8_flops_per_s=275e12,  # page: "275 teraflops (bf16 or int8)"; JAX: not available (in Pallas)
        hbm_bytes=32 * GiB,  # page, JAX; book: 32 GB
        hbm_bytes_per_s=1200e9,  # page, book; JAX, and the book in its question 1: 1230e9
        vmem_bytes_per_core=16 * MiB,  # JAX
        torus_axes=3,
        # "400G in each direction": Zu et al. 2024, "Resiliency at scale", NSDI; Jouppi et al. 2023. Book: 45, which
        # gives the page's 1.1 PB/s of all-reduce over 6 x 4096 links.
        link_bytes_per_s=50e9,
        dcn_bytes_per_s=6.25e9,  # book
        pcie_bytes_per_s=16e9,  # book: "16GB / second each way"
        pods=((16, 16, 16),),  # page: 4096
        cube=4,  # book; MaxText's accelerator_to_spec_map.py
        host=(2, 2, 1),
    ),
    "v5e": Chip(
        name="v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        devices=1,
        cores=1,
        mxus_per_core=4,  # page
        mxu_size=128,
        mxu_rows_per_cycle=1,
        clock_hz=1.5e9,  # book
        bf16_flops_per_s=197e12,  # page, book, JAX
        fp8_flops_per_s=None,
        int8_flops_per_s=394e12,  # book, JAX: twice bf16; page: 393
        hbm_bytes=16 * GiB,  # JAX, and the size of HBM stacks; page: 16 GB
        hbm_bytes_per_s=819e9,  # page until 2025, and now 800 (once GBps, once GiBps); book: 810, then 820; JAX: 820
        vmem_bytes_per_core=128 * MiB,  # book, JAX; 64 in MaxText's table of VMEM limits
        torus_axes=2,
        link_bytes_per_s=50e9,  # page: 400 GBps a chip, 4 links, both ways; 51.2 TB/s of all-reduce. Book: 45
        dcn_bytes_per_s=3.125e9,  # page: 6.4 Tbps a pod; book
        pcie_bytes_per_s=16e9,  # book, typical
        pods=((16, 16),),
        ring=16,  # book; MaxText's accelerator_to_spec_map.py
        host=(4, 2),  # page, book; a virtual machine has 1, 4 or 8 of the chips
        host_memory_bytes=512 * GiB,  # page
    ),
    "v5p": Chip(
        name="v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        devices=1,
        cores=2,
        mxus_per_core=4,  # page
        mxu_size=128,
        mxu_rows_per_cycle=1,
        clock_hz=1.75e9,  # book
        bf16_flops_per_s=459e12,  # page, book, JAX
        fp8_flops_per_s=459e12,  # page
        int8_flops_per_s=918e12,  # book, JAX
        hbm_bytes=95 * GiB,  # page, as available to a program; JAX, and the book in GB: 96
        hbm_bytes_per_s=2765e9,  # page (2575 where it says GiBps). Book: 2800, in older text 2500; JAX: 2460
        vmem_bytes_per_core=64 * MiB,  # JAX
        torus_axes=3,
        link_bytes_per_s=100e9,  # page: 1200 GBps a chip, 6 links, both ways. Book: 90
        dcn_bytes_per_s=6.25e9,  # page: 50 Gbps a chip; book
        pcie_bytes_per_s=16e9,  # book, typical
        pods=((16, 20, 28),),  # page: 8960; a slice has at most 16x16x24
        cube=4,
        host=(2, 2, 1),
        host_memory_bytes=448e9,  # page, of the virtual machine
    ),
    "v6e": Chip(
        name="v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        devices=1,
        cores=1,
        mxus_per_core=2,  # page, JAX; 4 on an older page
        mxu_size=256,  # book, JAX
        mxu_rows_per_cycle=2,  # follows from the peak, with two units
        clock_hz=1.75e9,  # as v5p; follows from the peak
        bf16_flops_per_s=918e12,  # page; book: 920, in its part 1 910; JAX: 920
        fp8_flops_per_s=918e12,  # page
        int8_flops_per_s=1836e12,  # page; book, JAX: 1840
        hbm_bytes=32 * GiB,  # the page of TPU7x, JAX; its own page: 32 GB
        hbm_bytes_per_s=1638e9,  # the page of TPU7x; its own: 1600, once 1640; book: 1600; JAX: 1640
        vmem_bytes_per_core=128 * MiB,  # JAX
        torus_axes=2,
        link_bytes_per_s=100e9,  # page: 800 GBps a chip, 4 links, both ways; once 3584 Gbps, which is 112. Book: 90
        dcn_bytes_per_s=12.5e9,  # page: 25.6 Tbps a pod; book
        pcie_bytes_per_s=32e9,  # book
        pods=((16, 16),),
        ring=16,
        host=(4, 2),  # page, book; as with v5e
        host_memory_bytes=1536 * GiB,  # page
    ),
    "tpu7x": Chip(
        name="tpu7x",
        device_kinds=("TPU7x",),
        devices=2,
        cores=2,
        mxus_per_core=2,  # JAX
        mxu_size=256,  # JAX; 128 in a tutorial
        mxu_rows_per_cycle=2,  # compiled: XLA issues 16 rows every 8 cycles
        clock_hz=2.2e9,  # follows from the peak
        # XLA plans with 1.9 GHz. The same share of the peak in both states fits the matmuls measured in them: 82.9%
        # (tpu-recipes) and 96.5% (github.com/yangwhale/gpu-tpu-pedia at 3fa9ce1, tpu/v7_perf). A step of Hunyuan3 295B
        # was measured there in states 3, 5 and 7: 23.54, 22.44 and 21.67 s. Matmuls and kernels would be 57% of it.
        clocks=((3, 1.9e9), (7, 2.2e9)),
        p_state=3,  # the default of --xla_tpu_dvfs_p_state
        bf16_flops_per_s=2307e12,  # page; JAX: 2310; book: 2300
        fp8_flops_per_s=4614e12,  # page; JAX: 4600
        int8_flops_per_s=None,  # JAX: not available. The 4610 in the book's int8 column is fp8's
        # The page's table. Its text, and the press: 192 GB, 7% less. A device reports 94.74 GiB, which agrees with half
        # of 192 GiB, some of it reserved.
        hbm_bytes=192 * GiB,
        hbm_bytes_per_s=7380e9,  # the page's table; its text: 7370; JAX, book: 7400; Hot Chips 2025: 7200
        vmem_bytes_per_core=64 * MiB,  # JAX and most guides; Google's guide to Ironwood has "64 MB" a chip
        torus_axes=3,
        # Page: "bi-directional bandwidth of 200 GBps per axis", 1200 a chip: 6 links, both ways. Book: 90, as in
        # MaxText's guide to custom models, whose 12,800 FLOPs a byte are 2307e12 / 180e9. As with v4, v5e, v5p and v6e
        # that is nine tenths, about what an all-gather reaches (89%, see above): an efficiency, not the link.
        link_bytes_per_s=100e9,
        die_to_die_bytes_per_s=600e9,  # page: "six times faster" than a link; no number is published
        dcn_bytes_per_s=12.5e9,  # page: 100 Gb/s a chip; book
        pcie_bytes_per_s=None,
        pods=((16, 24, 24),),  # page: 9216; the shape: MaxText's accelerator_to_spec_map.py; 4x4x576 in the book
        # Page: slices of more than 64 chips "are made up of one or more 4x4x4 cubes". MaxText's
        # accelerator_to_spec_map.py: one cube wraps around, smaller slices do not.
        cube=4,
        host=(2, 2, 1),
        # Page, of the virtual machine; Compute Engine's page has 960 GiB. The compiler allows a device 128 GiB.
        host_memory_bytes=960e9,
    ),
}


# Dense bf16 peak of one JAX device, in FLOP/s, by jax.Device.device_kind. A TPU7x chip (2307e12) is two devices.
PEAK_BF16_FLOPS_PER_DEVICE = {
    kind: chip.bf16_flops_per_s / chip.devices for chip in CHIPS.values() for kind in chip.device_kinds
}


def chip_of(text: str) -> Chip:
    """Returns a chip of CHIPS, as in tpu7x, or one with changed figures: tpu7x+link_bytes_per_s=2x+hbm_bytes=4e11.

    Raises:
      ValueError: there is no such chip or figure (it names those that exist), or the figure is not finite and above 0.
    """
    name, *changes = text.split("+")
    if name not in CHIPS:
        raise ValueError(f"there is no chip {name!r}; there are {', '.join(CHIPS)}")
    chip, changed = CHIPS[name], {}
    figures = {field.name: getattr(chip, field.name) for field in dataclasses.fields(chip) if field.type is not int}
    del figures["clock_hz"]  # the FLOP/s have it
    figures = {field: value for field, value in figures.items() if isinstance(value, int | float) and value}
    for change in changes:
        field, _, value = change.partition("=")
        if field == "p_state" and chip.clocks:
            changed[field] = _state_of(chip, text, value)
            continue
        if field not in figures:
            raise ValueError(f"{text!r}: {name} has no figure {field!r} to change; it has {', '.join(figures)}")
        number = re.fullmatch(r"(\d+(?:\.\d*)?(?:e-?\d+)?)(x?)", value)
        changed[field] = float(number[1]) * (figures[field] if number[2] else 1) if number else 0.0
        if not 0 < changed[field] < math.inf:
            current = f"{figures[field]:g}".replace("e+", "e")
            raise ValueError(
                f"{text!r}: {field} is {current}; give another value, as in =4e11 or =2x, finite and above 0, without "
                "a +, which separates changes"
            )
    return dataclasses.replace(chip, name=text, **changed)


def _state_of(chip: Chip, text: str, value: str) -> int:
    (lowest, _), *_, (highest, _) = chip.clocks
    if not value.isdecimal() or not lowest <= int(value) <= highest:
        raise ValueError(f"{text!r}: the clocks of {chip.name} are known from p_state={lowest} to p_state={highest}")
    return int(value)


def slice_of(devices: Iterable) -> tuple[Chip, tuple[int, ...], int] | None:
    """Returns (chip, chips along each axis of a slice, slices) of jax devices; None for a chip that is not in CHIPS."""
    devices = list(devices)
    chip = next((chip for chip in CHIPS.values() if devices[0].device_kind in chip.device_kinds), None)
    if chip is None:
        return None
    along = zip(*(device.coords[: chip.torus_axes] for device in devices), strict=True)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    return chip, tuple(max(axis) - min(axis) + 1 for axis in along), num_slices


def parse_topology(text: str) -> tuple[Chip, tuple[int, ...]]:
    """Returns the chip (see `chip_of`) and the number of chips along each axis that a text like tpu7x:4x4x8 names."""
    name, _, sizes = text.partition(":")
    try:
        chip = chip_of(name)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}, as in tpu7x:4x4x4" if "+" not in name else error) from None
    pod = max(chip.pods, key=math.prod)
    if not re.fullmatch(r"\d+(x\d+)*", sizes):
        raise ValueError(f"{text!r}: write the chips along each axis after {name}:, as in {name}:{by(pod)}")
    topology = tuple(map(int, sizes.split("x")))
    if 0 in topology:
        raise ValueError(f"{text!r}: an axis has 1 chip or more")
    if math.prod(topology) > math.prod(pod):
        raise ValueError(
            f"{text!r} is {math.prod(topology):,} chips; the largest pod of {name} is {by(pod)}, {math.prod(pod):,}"
        )
    if not chip.cube and len(topology) == len(pod):  # fixed wires; optical switches can make other shapes of a pod
        if not any(all(map(le, sorted(topology), sorted(pod))) for pod in chip.pods):
            raise ValueError(f"{text!r}: {name}'s wires are fixed, and its pods are {' and '.join(map(by, chip.pods))}")
    return chip, topology


# -- command line


def rows_of(chip: Chip) -> dict[str, str]:
    """Returns a chip's column of the table, {quantity and unit: figure}."""

    def number(value: float | None, unit: float) -> str:
        return "-" if not value else f"{value / unit:,.0f}" if value >= 1000 * unit else f"{value / unit:.4g}"

    return {
        "devices, as JAX shows them": str(chip.devices),
        "TensorCores": str(chip.cores),
        "MXUs of a core": f"{chip.mxus_per_core} x {chip.mxu_size}^2",
        "clock, GHz": number(chip.clock_hz, 1e9),
        "bf16, TFLOP/s": number(chip.bf16_flops_per_s, 1e12),
        "fp8, TFLOP/s": number(chip.fp8_flops_per_s, 1e12),
        "int8, TOP/s": number(chip.int8_flops_per_s, 1e12),
        "HBM, GiB": number(chip.hbm_bytes, GiB),
        "HBM, GB/s": number(chip.hbm_bytes_per_s, 1e9),
        "VMEM of a core, MiB": number(chip.vmem_bytes_per_core, MiB),
        "ICI axes": str(chip.torus_axes),
        "ICI link one way, GB/s": number(chip.link_bytes_per_s, 1e9),
        "die to die one way, GB/s": number(chip.die_to_die_bytes_per_s, 1e9),
        "DCN one way, GB/s": number(chip.dcn_bytes_per_s, 1e9),
        "PCIe one way, GB/s": number(chip.pcie_bytes_per_s, 1e9),
        "largest pod, chips": by(max(chip.pods, key=math.prod)),
        "wrap around: cubes of": by([chip.cube] * chip.torus_axes) if chip.cube else "-",
        "wrap around: axes of": str(chip.ring) if chip.ring else "-",
        "host, chips": by(chip.host),
        "host, GiB of memory": number(chip.host_memory_bytes, GiB),
        "device: bf16, TFLOP/s": number(chip.bf16_flops_per_s / chip.devices, 1e12),
        "device: HBM, GiB": number(chip.hbm_bytes / chip.devices, GiB),
        "bf16 FLOPs / byte of HBM": number(chip.bf16_flops_per_s / chip.hbm_bytes_per_s, 1),
        "  / byte of an ICI axis": number(chip.bf16_flops_per_s / (2 * chip.link_bytes_per_s), 1),
        "  / byte of the DCN": number(chip.bf16_flops_per_s / chip.dcn_bytes_per_s, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__, usage="%(prog)s [CHIP ...] [--json]")
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=f"one of {', '.join(CHIPS)}; default: all")
    parser.add_argument("--json", action="store_true", help="all fields, in FLOP/s, bytes, bytes/s, Hz and seconds")
    args = command.arguments(parser, argv)
    command.check_names(args.chips, CHIPS)
    chips = [CHIPS[name] for name in dict.fromkeys(args.chips or CHIPS)]
    if args.json:
        return print(json.dumps({chip.name: dataclasses.asdict(chip) for chip in chips}))
    print("TPU chips as published, at peak, by chip unless by core or device. -: none, or not published.\n")
    table = {"": [chip.name for chip in chips]}
    table |= {label: [rows_of(chip)[label] for chip in chips] for label in rows_of(chips[0])}
    for label, cells in table.items():
        print(f"{label:26}" + "".join(f"{cell:>11}" for cell in cells))
    print(
        "\nAn ICI axis counts both links of a chip along it, as an all-gather around a ring uses them. hardware.py has"
    )
    print("the source of each figure, and where sources disagree.")


if __name__ == "__main__":
    command.run(main)
