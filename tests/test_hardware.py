"""The table of chips against other published figures: pods, matrix units times clock, devices."""

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import command
import hardware
from hardware import CHIPS, Chip, parse_topology
from predicted.interconnect import bisection_bytes_per_s

EVERY_CHIP = pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)


def test_the_chips():
    assert [*CHIPS] == ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"]
    assert all(chip.name == name for name, chip in CHIPS.items())


@EVERY_CHIP
def test_every_field_has_a_figure(chip):
    """None marks figures that are not published or do not apply; all others are positive."""
    may_be_none = {"fp8_flops_per_s", "int8_flops_per_s", "pcie_bytes_per_s", "host_memory_bytes"}
    may_be_0 = {"cube", "ring", "die_to_die_bytes_per_s", "clocks", "p_state"}
    for field in dataclasses.fields(Chip):
        value = getattr(chip, field.name)
        if isinstance(value, tuple):
            assert value or field.name in may_be_0
        elif not isinstance(value, str):
            assert (value is None and field.name in may_be_none) or value or field.name in may_be_0, field.name
            assert not value or value > 0
    assert bool(chip.cube) != bool(chip.ring)
    assert all(len(shape) == chip.torus_axes for shape in (*chip.pods, chip.host))


def test_frozen_and_without_other_modules():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CHIPS["v4"].hbm_bytes = 0
    code = "import sys, hardware; assert not {'jax', 'numpy', 'roofline', 'config'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(hardware.__file__).parent, check=True)


# -- one figure against another


@EVERY_CHIP
def test_peak_is_matrix_units_times_clock(chip):
    """Each cell does one multiply-add for each row that enters in a cycle."""
    macs = chip.cores * chip.mxus_per_core * chip.mxu_size**2 * chip.mxu_rows_per_cycle
    assert 2 * macs * chip.clock_hz == pytest.approx(chip.bf16_flops_per_s, rel=0.003)


def test_matrix_units_as_the_book_counts():
    """The scaling book, part 2: bf16[8, 128] @ bf16[128, 128] every 8 cycles, "about 5e13" a unit at 1.5 GHz on v5e."""
    v5e = CHIPS["v5e"]
    unit = 2 * 8 * 128 * 128 / 8 * v5e.clock_hz
    assert unit == pytest.approx(5e13, rel=0.02)
    assert v5e.mxus_per_core * unit == pytest.approx(2e14, rel=0.02)


@pytest.mark.parametrize(
    "name, chips, published",  # FLOP/s of a pod on its Cloud TPU page, unless noted
    [
        ("v2", 256, 11.5e15),  # Google's announcement of the pod, at 45 TFLOP/s a chip
        ("v3", 1024, 126e15),
        ("v4", 4096, 1.1e18),
        ("v5e", 256, 50.63e15),
        ("v5p", 8960, 4.1e18),  # the scaling book, part 2, question 2
        ("v6e", 256, 234.9e15),
    ],
)
def test_pod_flops(name, chips, published):
    chip = CHIPS[name]
    assert math.prod(chip.pods[0]) == chips
    assert chips * chip.bf16_flops_per_s == pytest.approx(published, rel=0.025)


def test_tpu7x_pod():
    """42.5 exaFLOP/s in fp8, 1.77 PB: Google's announcement, which multiplies 9216 by 192 GB, not GiB."""
    chip = CHIPS["tpu7x"]
    (pod,) = chip.pods
    assert math.prod(pod) == 9216
    assert 9216 * chip.fp8_flops_per_s == pytest.approx(42.5e18, rel=1e-3)
    assert 9216 * chip.hbm_bytes / 2**30 * 1e9 == pytest.approx(1.77e15, rel=1e-3)
    assert 9216 * chip.hbm_bytes == pytest.approx(1.9e15, rel=1e-3)


@pytest.mark.parametrize(
    "name, both_ways",  # bytes/s of all links of a chip, on its Cloud TPU page
    [("v5e", 400e9), ("v5p", 1200e9), ("v6e", 800e9), ("tpu7x", 1200e9)],
)
def test_links_of_a_chip(name, both_ways):
    chip = CHIPS[name]
    assert 2 * (2 * chip.torus_axes) * chip.link_bytes_per_s == both_ways


@pytest.mark.parametrize(
    "name, all_reduce, share",  # "All-reduce bandwidth per Pod" on the page: all links, one way
    [("v5e", 51.2e12, 1), ("v6e", 102.4e12, 1), ("v4", 1.1e15, 0.9), ("v3", 340e12, 0.83)],
)
def test_all_reduce_bandwidth_of_a_pod(name, all_reduce, share):
    """v4's is for links of 45 GB/s, v3's for 83; the table says why it has other figures."""
    chip = CHIPS[name]
    links = math.prod(chip.pods[0]) * 2 * chip.torus_axes
    assert links * chip.link_bytes_per_s * share == pytest.approx(all_reduce, rel=0.01)


@pytest.mark.parametrize("name, bisection", [("v3", 6.4e12), ("v5e", 1.6e12), ("v6e", 3.2e12)])
def test_bisection_of_a_pod(name, bisection):
    """The page's figure: 2n links join the halves of an n x n torus."""
    chip = CHIPS[name]
    assert 2 * chip.pods[0][0] * chip.link_bytes_per_s == bisection
    assert bisection_bytes_per_s(chip.axes(chip.pods[0])) == bisection


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_the_links_of_the_book_are_nine_tenths(name):
    book = {"v4": 4.5e10, "v5e": 4.5e10, "v5p": 9e10, "v6e": 9e10, "tpu7x": 9e10}
    assert CHIPS[name].link_bytes_per_s * 0.9 == pytest.approx(book[name], rel=1e-12)


@pytest.mark.parametrize(
    "name, gbit_per_s",  # of a chip: 6.4 Tbps and 25.6 Tbps a pod of 256; 50 and 100 a chip
    [("v5e", 6400 / 256), ("v6e", 25600 / 256), ("v5p", 50), ("tpu7x", 100)],
)
def test_dcn_of_a_chip(name, gbit_per_s):
    assert CHIPS[name].dcn_bytes_per_s * 8 == gbit_per_s * 1e9


def test_units_of_hbm_bandwidth():
    """The page of v5p has had 2765 GBps and 2575 GiBps, which are the same."""
    assert CHIPS["v5p"].hbm_bytes_per_s / 2**30 == pytest.approx(2575, rel=1e-3)


def test_die_to_die():
    """The page of TPU7x has six times a link."""
    chip = CHIPS["tpu7x"]
    assert chip.die_to_die_bytes_per_s == 6 * chip.link_bytes_per_s
    assert [name for name, chip in CHIPS.items() if chip.die_to_die_bytes_per_s] == ["tpu7x"]


# -- a chip and its devices


@EVERY_CHIP
def test_devices(chip):
    """JAX shows the cores of a chip as devices, but those of v4 and v5p as one."""
    assert chip.devices == (1 if chip.name in ("v4", "v5p") else chip.cores)
    assert chip.vmem_bytes == chip.cores * chip.vmem_bytes_per_core


def test_a_device_of_tpu7x():
    chip = CHIPS["tpu7x"]
    assert chip.bf16_flops_per_s / chip.devices == 1153.5e12
    assert chip.hbm_bytes / chip.devices == 96 * 2**30
    assert 94.74 * 2**30 < chip.hbm_bytes / chip.devices  # a device reports this: some is reserved
    assert chip.vmem_bytes == 128 * 2**20


def test_the_trap_of_chips_and_devices():
    """The ridge is the same for both, 312.6 FLOPs a byte; a chip's FLOPs over a device's bytes are twice that."""
    chip = CHIPS["tpu7x"]
    ridge = chip.bf16_flops_per_s / chip.hbm_bytes_per_s
    assert ridge == pytest.approx(312.6, abs=0.05)
    assert chip.bf16_flops_per_s / (chip.hbm_bytes_per_s / chip.devices) == pytest.approx(625.2, abs=0.1)
    assert chip.fp8_flops_per_s / chip.hbm_bytes_per_s == pytest.approx(625.2, abs=0.1)  # FP8's ridge


def test_device_kinds_are_those_of_jax():
    """Each kind names one chip, and the kinds are those of JAX's own table of chips."""
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(set(kinds)) == len(kinds)
    jax_kinds = "TPU v2, TPU v3, TPU v4, TPU v5e, TPU v5 lite, TPU v5, TPU v5p, TPU v6e, TPU v6 lite, TPU7x"
    assert {*kinds} == {*jax_kinds.split(", ")}


@pytest.mark.parametrize(
    "name, dtype, flops_per_s",
    [
        ("tpu7x", "bf16", 2307e12),
        ("tpu7x", "f32", 2307e12),  # one pass of bf16
        ("tpu7x", "fp8", 4614e12),
        ("v6e", "fp8", 918e12),  # no faster than bf16
        ("v5p", "int8", 918e12),
    ],
)
def test_flops_of_a_dtype(name, dtype, flops_per_s):
    assert CHIPS[name].flops_per_s(dtype) == flops_per_s


@pytest.mark.parametrize(
    "name, dtype", [("tpu7x", "int8"), ("v4", "fp8"), ("v2", "int8"), ("v6e", "int4"), ("v3", "x")]
)
def test_no_such_unit(name, dtype):
    with pytest.raises(ValueError, match=f"{name} has no published speed of a matmul in '{dtype}'; it has f32, bf16"):
        CHIPS[name].flops_per_s(dtype)


def test_vmem_bandwidth():
    """The book, part 2, has 22 times HBM's; its question 4 has 1.78e13 for a v5e of 8.1e11."""
    v5e = dataclasses.replace(CHIPS["v5e"], hbm_bytes_per_s=8.1e11)
    assert v5e.vmem_bytes_per_s == pytest.approx(1.78e13, rel=0.002)


def test_what_if():
    """A chip that does not exist takes one line, and works like any other."""
    chip = dataclasses.replace(CHIPS["tpu7x"], name="faster links", link_bytes_per_s=200e9)
    assert [axis.link_bytes_per_s for axis in chip.axes((4, 4, 4))] == [200e9] * 3
    assert chip.axes((4, 4, 4))[0].wrap and chip.hbm_bytes == CHIPS["tpu7x"].hbm_bytes
    assert CHIPS["tpu7x"].link_bytes_per_s == 100e9


# -- slices


@pytest.mark.parametrize(
    "topology, wraps",  # v4 and up: MaxText's accelerator_to_spec_map.py
    [
        ("v2:16x16", [True, True]),
        ("v2:4x8", [False, False]),
        ("v3:32x32", [True, True]),
        ("v3:128x32", [False, True]),
        ("v4:2x4x4", [False] * 3),
        ("v4:4x4x4", [True] * 3),
        ("v4:8x16x16", [True] * 3),
        ("v5e:4x4", [False, False]),
        ("v5e:8x16", [False, True]),
        ("v5e:16x16", [True, True]),
        ("v5p:2x2x4", [False] * 3),  # the book: optical switches are at the faces of a cube only
        ("v5p:4x4x8", [True] * 3),
        ("v5p:16x20x28", [True] * 3),
        ("v6e:8x16", [False, True]),
        ("v6e:8x8", [False, False]),
        ("tpu7x:2x2x1", [False] * 3),
        ("tpu7x:4x4x4", [True] * 3),
        ("tpu7x:16x24x24", [True] * 3),
        ("tpu7x:4x4x576", [True] * 3),  # as the book writes the pod
    ],
)
def test_wraparound(topology, wraps):
    chip, sizes = parse_topology(topology)
    assert [axis.wrap for axis in chip.axes(sizes)] == wraps


@pytest.mark.parametrize("name, hosts", [("v5e", 32), ("v6e", 32), ("v5p", 2240), ("tpu7x", 2304), ("v4", 1024)])
def test_hosts_of_a_pod(name, hosts):
    chip = CHIPS[name]
    assert math.prod(chip.pods[0]) / math.prod(chip.host) == hosts


@pytest.mark.parametrize("topology", ["v5e:1x256", "v6e:8x32", "v2:4x64", "v3:64x64"])
def test_fixed_wires(topology):
    with pytest.raises(ValueError, match="wires are fixed, and its pods are"):
        parse_topology(topology)


def test_a_chip_that_does_not_exist():
    topology = "tpu7x+link_bytes_per_s=2x+hbm_bytes=4e11+hop_s=1e-7:4x4x4"
    chip, sizes = parse_topology(topology)
    own = CHIPS["tpu7x"]
    assert (chip.link_bytes_per_s, chip.hbm_bytes, chip.hop_s) == (2 * own.link_bytes_per_s, 4e11, 1e-7)
    assert (
        dataclasses.replace(
            chip, name="tpu7x", link_bytes_per_s=own.link_bytes_per_s, hbm_bytes=own.hbm_bytes, hop_s=own.hop_s
        )
        == own
        == hardware.chip_of("tpu7x")
    )
    assert f"{chip.name}:{hardware.by(sizes)}" == topology  # predictions print it so, and accept it


def test_a_power_state_decides_the_clock():
    hertz = lambda text: hardware.chip_of(text).running_hz
    assert [hertz(f"tpu7x+p_state={state}") for state in (3, 5, 7)] == pytest.approx([1.9e9, 2.05e9, 2.2e9])
    assert hertz("tpu7x") == 1.9e9 and hertz("v6e") == CHIPS["v6e"].clock_hz
    with pytest.raises(ValueError, match="v6e has no figure 'p_state'"):
        hardware.chip_of("v6e+p_state=7")


@pytest.mark.parametrize(
    "changed, words",
    [
        ("bandwidth=2x", "tpu7x has no figure 'bandwidth' to change; it has bf16_flops_per_s, "),
        ("clock_hz=2x", "no figure 'clock_hz'"),  # the FLOP/s have it
        ("devices=2x", "no figure 'devices'"),
        ("int8_flops_per_s=1e15", "no figure 'int8_flops_per_s'"),  # the chip has no such unit
        ("link_bytes_per_s", "link_bytes_per_s is 1e11; give another value, as in =4e11 or =2x"),
        ("link_bytes_per_s=1e+11", "without a +, which separates changes"),
        ("hbm_bytes=2x+hbm_bytes=", "hbm_bytes is 2.06158e11; give another"),
        ("hbm_bytes=1e400", "finite and above 0"),
        ("hbm_bytes=1e300x", "finite and above 0"),
        ("hop_s=1e-400", "finite and above 0"),
        ("link_bytes_per_s=0", "give another value"),
        ("link_bytes_per_s=-1", "give another value"),
        ("link_bytes_per_s=x", "give another value"),
        ("link_bytes_per_s=nan", "give another value"),
        ("p_state=2", "the clocks of tpu7x are known from p_state=3 to p_state=7"),
        ("p_state=8", "p_state=7"),
        ("p_state=2x", "p_state=7"),
    ],
)
def test_impossible_figures_are_refused(changed, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_topology(f"tpu7x+{changed}:4x4x4")


# -- command line


@pytest.mark.parametrize("program, flags", re.findall(r"^    python (\w+)\.py ?(.*)$", hardware.__doc__, re.MULTILINE))
def test_commands_of_the_docstring(program, flags, capsys):
    importlib.import_module(program).main(flags.split())
    assert len(capsys.readouterr().out) > 1000


def ran(capsys, command: str) -> str:
    hardware.main(command.split())
    return capsys.readouterr().out


def test_table(capsys):
    out = ran(capsys, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 110
    (header,) = (line for line in lines if line.split() == [*CHIPS])
    row = lambda label: next(line for line in lines if line.startswith(label))[len(label) :].split()
    assert row("bf16, TFLOP/s") == ["46", "123", "275", "197", "459", "918", "2,307"]
    assert row("fp8, TFLOP/s") == ["-", "-", "-", "-", "459", "918", "4,614"]
    assert row("HBM, GB/s")[-1] == "7,380" and row("ICI link one way, GB/s")[-1] == "100"
    assert row("device: HBM, GiB")[-1] == "96"
    assert "published" in lines[0]
    for label in ("clock, GHz", "HBM, GiB", "VMEM of a core, MiB", "DCN one way, GB/s", "PCIe one way, GB/s"):
        assert len(row(label)) == len(CHIPS)
    assert ran(capsys, "v5p tpu7x").splitlines()[2].split() == ["v5p", "tpu7x"]


def test_json(capsys):
    result = json.loads(ran(capsys, "--json"))
    assert [*result] == [*CHIPS]
    for name, chip in CHIPS.items():
        assert result[name] == json.loads(json.dumps(dataclasses.asdict(chip)))
    assert [*json.loads(ran(capsys, "tpu7x --json"))] == ["tpu7x"]


def test_wrong_command_line(capsys):
    with pytest.raises(SystemExit) as end:
        command.run(hardware.main, ["v9"])
    assert end.value.code == 2 and "there is no 'v9'; there are v2, v3" in capsys.readouterr().err


def test_peaks():
    """The peaks are published figures of one device. A TPU7x chip has 2307 TFLOP/s and is two devices."""
    peaks = hardware.PEAK_BF16_FLOPS_PER_DEVICE
    assert peaks["TPU7x"] == 1153.5e12
    published = {"TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU7x": 1153.5}
    published |= {"TPU v5e": 197, "TPU v6e": 918, "TPU v2": 23, "TPU v3": 61.5}
    assert {kind: flops_per_s / 1e12 for kind, flops_per_s in peaks.items()} == published
    assert "cpu" not in peaks
