"""The command line of the predictions: its output and its errors. It is quick and needs no jax."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

import command
import roofline


def test_needs_no_jax():
    code = "import sys, roofline; assert not {'jax', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(roofline.__file__).parent, check=True)


@pytest.mark.slow
def test_sizes_of_experts_that_no_tile_divides_need_no_jax_either():
    code = "import sys, roofline; roofline.main(sys.argv[1:]); assert not {'jax', 'matplotlib'} & set(sys.modules)"
    flags = (
        "step --json --topology=tpu7x:4x4x4 --preset=gpt-oss-120b --mesh=fsdp:64,expert:2 --batch=128 --expert_dim=2881"
    )
    root = Path(roofline.__file__).parent
    said = subprocess.run([sys.executable, "-c", code, *flags.split()], cwd=root, check=True, capture_output=True)
    (cliff,) = json.loads(said.stdout)["cliffs"]
    assert cliff.startswith("model_dim=2,880 and expert_dim=2,881: the experts' kernels are refused, as they tile only")


# -- command line


def ran(capsys, command: str) -> str:
    roofline.main(command.split())
    return capsys.readouterr().out


def test_command_line(capsys):
    out = ran(capsys, "collective all_reduce --bytes=1e9 --topology=tpu7x:4x4x4")
    for words in ("predicted", "13.12 ms", "bandwidth", "12,", "1 GB over"):
        assert words in out, out
    out = ran(capsys, "collective all_reduce --bytes=1e9 --explain --spread --slices=2")
    for words in (
        "h * V/N = 2 * 333.3 MB / 4 = 166.7 MB",
        "max(2 * 1 us, 166.7 MB / 100 GB/s)",
        "3 at once, on different axes",
        "12.5 GB/s",
    ):
        assert words in out, out
    assert "latency" in ran(capsys, "collective all_gather --bytes=1e3")
    assert "bound    bandwidth" in ran(capsys, "collective all_gather --bytes=1e6")  # 5 us, then 2 and 2 us of latency
    assert "h(h+1)/2 * B/N = 10 * 1 kB / 8" in ran(
        capsys, "collective all_to_all --bytes=1e3 --topology=tpu7x:4x4x8 --axes=2 --explain"
    )
    assert "N*N//4 * B/N = 4 * 1 kB / 4" in ran(capsys, "collective all_to_all --bytes=1e3 --topology=v3:4x1 --explain")
    assert "max(before, after) = 2 MB" in ran(capsys, "collective halo --before_bytes=1e6 --after_bytes=2e6 --explain")
    assert "no other chip" in ran(capsys, "collective all_gather --bytes=1e3 --topology=tpu7x:1x1x1 --explain")


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("all_gather", dict(predicted_seconds=6.5625e-3, bound="bandwidth", steps=6, link_bytes=5e8)),
        ("all_gather --spread", dict(predicted_seconds=4.375e-3 / 2, steps=6, link_bytes=1e9 / 3 * 21 / 32)),
        (
            "reduce_scatter --one_way --axes=1",
            dict(predicted_seconds=7.5e-3, steps=3, link_bytes=7.5e8, busiest_axis="1"),
        ),
        ("all_reduce --axes=2,0", dict(predicted_seconds=12.5e-3, busiest_axis="2")),
        ("all_to_all --axes=0", dict(predicted_seconds=7.5e-3, link_bytes=7.5e8)),
        ("permute", dict(predicted_seconds=1e-2, steps=1, link_bytes=1e9)),
        ("all_gather --slices=3", dict(predicted_seconds=6.5625e-3 + 2 / 3 * 1e9 / 64 / 12.5e9, steps=8)),
        ("all_reduce --topology=v3:16x16", dict(predicted_seconds=2 * (15 / 16 * 1e-2) * (1 + 1 / 16))),
    ],
)
def test_json(capsys, flags, expected):
    result = json.loads(ran(capsys, f"collective {flags} --bytes=1e9 --json"))
    assert {name: result[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "COMMAND"),
        ("collective", "KIND"),
        ("collective all_reduce", "--bytes"),
        ("collective all_reduce --bytes=-1", "not -1"),
        ("collective all_reduce --bytes=many", "'many'"),
        ("collective all_to_all --bytes=inf", "not inf"),
        ("collective all_reduce --bytes=1 --topology=v9:4x4", "'v9'; there are v2, v3"),
        ("collective all_reduce --bytes=1 --topology=tpu7x:4x4", "4x4 has 2 axes, tpu7x has 3"),
        (
            "collective all_reduce --bytes=1 --topology=tpu7x:99x99x99",
            "970,299 chips; the largest pod of tpu7x is 16x24x24",
        ),
        ("collective all_reduce --bytes=1 --axes=0,3", "--axes=0,3: tpu7x:4x4x4 has the axes 0,1,2"),
        ("collective all_reduce --bytes=1 --axes=1,1", "once"),
        ("collective all_reduce --bytes=1 --slices=0", "not 0"),
        ("collective permute --bytes=1 --axes=0,1", "one axis, not 2"),
        ("collective permute --bytes=1 --spread", "--spread"),
        ("collective all_to_all --bytes=1 --slices=2", "--slices"),
        pytest.param("collective scaling --plot=/nowhere/scaling.png", "/nowhere", marks=pytest.mark.slow),
        ("collective scaling --chips=v3,v9", "'v9'; there are v2"),
    ],
)
def test_wrong_command_line(capsys, line, words):
    with pytest.raises(SystemExit) as end:
        command.run(roofline.main, line.split())
    assert end.value.code == (1 if "/nowhere" in line else 2)
    *usage, error = capsys.readouterr().err.splitlines()
    assert len(usage) <= 1 and words in error, error


@pytest.mark.slow
def test_matmul_command(capsys):
    out = ran(capsys, "matmul --m=8192 --k=8192 --n=28672 --explain")
    for words in (
        "predicted",
        "3.848 TFLOP, 1.074 GB",
        "3584 FLOPs/B; the chip has 312.6 = 2.307 PFLOP/s / 7.38 TB/s",
        "a chip     1.668 ms at least, 1.814 ms",
        "a device   3.336 ms",
        "bound      compute; compute-bound from m = 328.7 on",
        "do not fit in the 134.2 MB",
        "2 * m * k * n = 2 * 8192 * 8192 * 28672",
    ):
        assert words in out, out
    assert max(map(len, out.splitlines())) <= 110
    assert "bound      hbm" in ran(capsys, "matmul --m=64 --k=8192 --n=8192")
    assert "compute-bound at no m" in ran(capsys, "matmul --m=64 --k=8 --n=8192")
    assert "a device" not in ran(capsys, "matmul --m=64 --k=8192 --n=8192 --chip=v5p")
    out = ran(capsys, "matmul --m=64 --k=8192 --n=8192 --chip=v5e --rhs_dtype=int8 --memory=vmem")
    assert "bf16[64, 8192] . int8[8192, 8192] -> bf16[64, 8192] on v5e" in out and "through VMEM" in out


def test_matmul_json(capsys):
    result = json.loads(ran(capsys, "matmul --m=100 --k=8192 --n=28672 --dtype=fp8 --out_dtype=bf16 --json"))
    assert (result["kind"], result["chip"], result["bound"]) == ("predicted", "tpu7x", "hbm")
    assert result["flops"] == 2 * 100 * 8192 * 28672
    assert result["bytes"] == 100 * 8192 + 8192 * 28672 + 2 * 100 * 28672
    assert result["per_chip"]["predicted_seconds"] == result["per_chip"]["memory_s"] == result["bytes"] / 7.38e12
    assert result["per_device"]["predicted_seconds"] == 2 * result["per_chip"]["predicted_seconds"]
    assert result["critical_m_rule"] == pytest.approx(312.6, abs=0.1) and result["critical_m"] > 312
    assert json.loads(ran(capsys, "matmul --m=1 --k=1 --n=1 --json"))["critical_m"] is None


SHARDED = ["A[I_X, J] . B[J_X, K_Y] -> C[I_X, K_Y]", "--sizes=I:8192,J:8192,K:28672", "--mesh=X:4,Y:8"]


def test_sharded_matmul_command(capsys):
    roofline.main(["matmul", *SHARDED, "--explain"])
    out = capsys.readouterr().out
    for words in (
        "predicted",
        "X (ring of 4), Y (ring of 8)",
        "1. all_gather X        B[J_X, K_Y] -> B[J, K_Y]",
        "293.6 us, bound by bandwidth, 58.72 MB, case 2: J is not sharded alike",
        "h * V/N = 2 * 58.72 MB / 4",
        "2. matmul              A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]",
        "120.3 GFLOP / 2.307 PFLOP/s",
        "compute  52.13 us; communication 293.6 us: communication binds",
        "293.6 us if they overlap, 345.7 us if not",
    ):
        assert words in out, out
    assert "the work of one matmul" not in out
    assert max(map(len, out.splitlines())) <= 110
    roofline.main(["matmul", "A[I_X, J] . B[J, K] -> C[I_X, K]", *SHARDED[1:]])
    assert "8 times the work of one matmul" in capsys.readouterr().out
    roofline.main(["matmul", "A[I, J] . B[J, K] -> C[I_X, K_Y]", *SHARDED[1:]])
    assert "slice X" in capsys.readouterr().out
    roofline.main(["matmul", "A[I, J_X] . B[J, K] -> C[I, K]", SHARDED[1], "--mesh=X:1"])
    assert "bound by nothing" in capsys.readouterr().out


def test_sharded_matmul_json(capsys):
    roofline.main(["matmul", *SHARDED, "--json", "--chip=v5p", "--dtype=bf16"])
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["chip"], result["num_chips"], result["bound"]) == (
        "predicted",
        "v5p",
        32,
        "communication",
    )
    assert result["overlapped_s"] == result["communication_s"] == result["steps"][0]["seconds"]
    assert result["sequential_s"] == result["compute_s"] + result["communication_s"]
    gather, matmul = result["steps"]
    assert (gather["kind"], gather["axes"], gather["after"]) == ("all_gather", ["X"], "B[J, K_Y]")
    assert (gather["nbytes"], matmul["flops"]) == (2 * 8192 * 28672 / 8, 2 * 8192 * 8192 * 28672 / 32)
    roofline.main(["matmul", *SHARDED, "--json", "--one_way"])
    assert json.loads(capsys.readouterr().out)["communication_s"] == pytest.approx(3 / 2 * 293.6e-6, rel=1e-3)
    over_two = ["A[I, J_XY] . B[J, K] -> C[I, K]", *SHARDED[1:], "--json"]
    seconds = []
    for flags in ([], ["--spread"]):
        roofline.main(["matmul", *over_two, *flags])
        seconds.append(json.loads(capsys.readouterr().out)["communication_s"])
    assert seconds[0] / seconds[1] == pytest.approx(2, rel=1e-6)  # each axis idles for half of the time


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "--m, --k and --n"),
        (["--m=1", "--k=1"], "--m, --k and --n"),
        (["--m=1", "--k=1", "--n=0"], "must be a number of at least 1"),
        (["--m=1", "--k=1", "--n=1", "--mesh=X:4"], "or a notation with --sizes"),
        (["--m=1", "--k=1", "--n=1", "--chip=v9"], "'v9'; there are v2"),
        (["--m=1", "--k=1", "--n=1", "--dtype=fp4"], "'fp4' is not one of"),
        (["--m=1", "--k=1", "--n=1", "--dtype=int8"], "tpu7x has no published speed"),
        (["--m=1", "--k=1", "--n=1", "--memory=disk"], "'disk'"),
        ([*SHARDED, "--m=1"], "not with --m"),
        (SHARDED[:2], "--mesh=: names and sizes"),
        ([*SHARDED[:2], "--mesh=X:4,X:8"], "twice"),
        ([*SHARDED[:2], "--mesh=X4"], "as in X:4,Y:8"),
        (["A[I_X, J] . B[J, K_X] -> C[I_X, K_X]", *SHARDED[1:]], "C[I_X, K_X] uses X twice"),
        ([SHARDED[0], "--sizes=I:8192,J:8192,K:28673", SHARDED[2]], "K = 28673 does not divide into 8"),
        (["nonsense", *SHARDED[1:]], "'nonsense' is not of the form"),
        ([*SHARDED, "--dtype=float32"], "dtype 'float32' is not one of f32, bf16"),
    ],
)
def test_wrong_matmul_command(capsys, flags, words):
    with pytest.raises(SystemExit) as end:
        command.run(roofline.main, ["matmul", *flags])
    assert end.value.code == 2
    *usage, error = capsys.readouterr().err.splitlines()
    assert len(usage) <= 1 and words in error, error


def test_scaling(capsys):
    out = ran(capsys, "collective scaling")
    for words in ("predicted", "ms", "102.4 MB on v3", "1 GB on tpu7x", "16x24x24", "128x32", "latency"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100
    rows = json.loads(ran(capsys, "collective scaling --bytes=102.4e6 --json"))
    seconds = {(row["chip"], row["kind"], *row["shape"]): row["predicted_seconds"] for row in rows}
    assert {chip: {math.prod(shape) for c, _, *shape in seconds if c == chip} for chip, *_ in seconds} == {
        "v3": {16, 64, 256, 1024, 4096},
        "tpu7x": {16, 64, 256, 1024, 4096, 9216},
    }
    assert seconds["v3", "torus", 1024] == pytest.approx(1.024e-3)  # 2 * V / 2W, and also the hops, 2 * 512
    assert seconds["v3", "torus", 4096] == pytest.approx(4.096e-3)  # latency
    assert seconds["v3", "pod", 32, 32] == seconds["v3", "torus", 32, 32]
    assert seconds["v3", "torus", 64, 64] < seconds["v3", "pod", 128, 32]
    assert seconds["tpu7x", "torus", 16, 24, 24] < seconds["tpu7x", "torus", 96, 96] < seconds["tpu7x", "torus", 9216]


def test_scaling_of_other_chips(capsys):
    rows = json.loads(ran(capsys, "collective scaling --bytes=1e9 --chips=v4,v5e --json"))
    assert {row["chip"] for row in rows} == {"v4", "v5e"}
    (pod,) = (row for row in rows if row["chip"] == "v5e" and row["kind"] == "pod")
    assert pod["predicted_seconds"] == pytest.approx(2 * 1e9 / (2 * 2 * 50e9), rel=0.07)  # V / 2W on two axes


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--bytes=1e6", "--chips=v2,v6e,v5p"])
def test_scaling_plot(capsys, tmp_path, flags):
    ran(capsys, f"collective scaling --plot={tmp_path}/scaling.png {flags}")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_scaling_plot_without_matplotlib(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as end:
        command.run(roofline.main, ["collective", "scaling", f"--plot={tmp_path}/scaling.png"])
    assert end.value.code == 2 and 'pip install -e ".[plot]"' in capsys.readouterr().err


@pytest.mark.slow
def test_help_is_quick_and_helps():
    """The fastest of three runs takes less than 8 times as long as Python itself; 3 to 5 times were measured."""

    def fastest(*arguments):
        seconds = []
        for _ in range(3):
            start, command = time.perf_counter(), [sys.executable, *arguments]
            run = subprocess.run(
                command, cwd=Path(roofline.__file__).parent, capture_output=True, text=True, check=True
            )
            seconds.append(time.perf_counter() - start)
        return min(seconds), run

    bare, _ = fastest("-c", "import argparse, dataclasses, json, re, statistics")
    own, run = fastest(Path(roofline.__file__).name, "--help")
    assert own < 8 * bare
    assert "collective" in run.stdout and "python roofline.py collective all_reduce --bytes=1e9" in run.stdout
    assert "matmul" in run.stdout


def test_a_step_of_the_defaults(capsys):
    """The default model is for a host's 8 devices, not for the slice on which other models are predicted."""
    for name in ("step", "bounds"):
        with pytest.raises(SystemExit):
            ran(capsys, f"{name} --help")
        assert "tpu7x:2x2x1 without --preset, else tpu7x:4x4x4" in " ".join(capsys.readouterr().out.split())
    assert ran(capsys, "bounds").startswith("tiny, 2,048 tokens a step, on tpu7x:2x2x1, predicted")
    with pytest.raises(ValueError, match="''"):
        ran(capsys, "step --topology=")
    assert ran(capsys, "step").startswith("tiny on tpu7x:2x2x1, 4 chips, predicted")
    assert "128 chips" not in ran(capsys, "step --preset=llama3.1-8b --batch=128").splitlines()[0]
