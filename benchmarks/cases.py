"""The case studies of Google Cloud's guide on TPU7x, as runs of this program: predicted and compiled. Text: CASES.md.

    python benchmarks/cases.py                       the tables; runs nothing
    python benchmarks/cases.py offload vmem          some of them
    python benchmarks/cases.py --compile offload     what compiled_tpu7x.json lacks is compiled, minutes each, and kept
    python benchmarks/cases.py --write               the tables into CASES.md

Of a step: what it takes, its MFU, how much of it waits for messages, and the memory of a device. Compiled are bytes,
and seconds of the compiled schedule. roofline.py does not know of the compiler's flags, nor of a constant in place of
the softmax's maximum: there its column is empty.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import compiled
from config import from_preset
from hardware import parse_topology
from step import GiB, Prediction, predict
from workload import run_of

PAGE = ROOT / "CASES.md"
OFFLOADED = ("all_gather", "reduce_scatter", "all_reduce")
ON_TENSORCORES = ",".join(f"xla_tpu_enable_sparse_core_collective_offload_{name}=false" for name in OFFLOADED)
UNPREDICTED = {"xla_flags", "max_logit"}


@dataclass(frozen=True)
class Case:
    topology: str
    preset: str
    common: Mapping  # flags of all rows
    rows: Mapping[str, Mapping]  # what a row is about: its own flags
    is_compiled: bool = True


def _vmem(kib: int) -> dict:
    return dict(xla_flags=f"xla_tpu_scoped_vmem_limit_kib={kib}")


SHORT = dict(mesh="fsdp:8", batch=16, remat="minimal_with_context")
LITTLE = dict(batch=8, seq_len=2048, remat="full")
DOTS = "save_dot_with_context_except_mlp"
CASES = {
    "offload": Case(
        "tpu7x:2x2x1",
        "llama3.1-8b",
        SHORT,
        {
            "16 sequences of 8k, collectives on the SparseCores (default)": {},
            "on the TensorCores": dict(xla_flags=ON_TENSORCORES),
            "8 sequences of 2k, on the SparseCores": LITTLE,
            "on the TensorCores, 2k": LITTLE | dict(xla_flags=ON_TENSORCORES),
        },
    ),
    "length": Case(
        "tpu7x:2x2x1",
        "llama3.1-8b",
        dict(mesh="fsdp:8", batch=8),
        {
            f"{length // 1024}k, {what} saved": dict(seq_len=length, remat=remat)
            for length in (8192, 32_768, 131_072)
            for what, remat in (("all matmuls'", "minimal"), ("layers' inputs", "full"))
        },
        is_compiled=False,
    ),
    "tensor": Case(
        "tpu7x:4x4x4",
        "llama3.1-70b",
        dict(batch=128, remat="full"),
        {
            "no `tensor`": dict(mesh="fsdp:128"),
            "2 ways, on the cores of a chip": dict(mesh="fsdp:64,tensor:2"),
            "4 ways": dict(mesh="fsdp:32,tensor:4"),
            "8 ways": dict(mesh="fsdp:16,tensor:8"),
        },
    ),
    "cores": Case(
        "tpu7x:2x2x1",
        "llama3.1-8b",
        SHORT | dict(mesh="fsdp:4,tensor:2"),
        {
            "`tensor` on the two cores of a chip (default)": {},
            "`fsdp` on them, `tensor` over links": dict(core_axis="fsdp"),
            "no `tensor`": dict(mesh="fsdp:8"),
        },
    ),
    "vmem": Case(
        "tpu7x:2x2x1",
        "llama3.1-8b",
        SHORT,
        {"16 MiB": _vmem(16_384), "32 MiB (default)": {}, "48 MiB": _vmem(49_152), "60 MiB": _vmem(61_440)},
    ),
    "max logit": Case(
        "tpu7x:2x2x1",
        "llama3.1-8b",
        SHORT,
        {"the running maximum": {}, "a constant": dict(attention="flash", max_logit=30.0)},
    ),
    "experts": Case(
        "tpu7x:4x4x4",
        "gpt-oss-120b",
        dict(batch=1280, microbatches=2, remat=DOTS),
        {
            "FSDP, two replicas": dict(mesh="data:2,fsdp:64"),
            "experts 2 ways, on the cores of a chip": dict(mesh="fsdp:64,expert:2"),
            "4 ways": dict(mesh="fsdp:32,expert:4"),
            "8 ways": dict(mesh="fsdp:16,expert:8"),
        },
        is_compiled=False,
    ),
}


def expected_of(case: Case, row: Mapping) -> Prediction:
    return predict(run_of(from_preset(case.preset, **case.common | row), *parse_topology(case.topology)))


def _cells(step_s: float, mfu: float, waits_s: float, nbytes: float) -> list[str]:
    return [f"{step_s:.3f} s", f"{mfu:.1%}", f"{waits_s / step_s:.1%}", f"{nbytes / GiB:.1f}"]


def table(name: str, compile_missing: bool = False) -> str:
    """As Markdown: a row each, what is predicted and, where it was compiled, what that says.

    Of what does not fit: the memory that it would take, by prediction.
    """
    case = CASES[name]
    kinds = ["predicted", "compiled"] if case.is_compiled else ["predicted"]
    common = " ".join(f"--{flag}={value}" for flag, value in case.common.items())
    lines = [f"`--topology={case.topology} --preset={case.preset} {common}`"]
    lines += ["", f"| | with | {' | '.join(f'step, {kind} | MFU | waits | GiB' for kind in kinds)} |"]
    lines += [f"|{'---|' * (2 + 4 * len(kinds))}"]
    for about, row in case.rows.items():
        expected, cells = expected_of(case, row), [""] * 4
        if not UNPREDICTED & row.keys():
            cells = _cells(expected.step_s, expected.mfu, expected.exposed_comm_s, expected.hbm_bytes)
        if not expected.fits:
            cells[:3] = ["does not fit", "", ""]
        if case.is_compiled:
            its = compiled.ask(expected) if compile_missing else compiled.find(expected)
            if its and its["fits"]:
                cells += _cells(its["step_s"], its["mfu"], its["exposed_comm_s"], its["peak_hbm_bytes"])
            else:
                cells += ["refused" if its else "not compiled", "", "", ""]
        own = " ".join(f"--{flag}={value}" for flag, value in row.items()).replace(ON_TENSORCORES, "OFF")
        own = f"`{own}`" if own else ""
        lines.append(f"| {about} | {own} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="cases.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all: {', '.join(CASES)}")
    parser.add_argument("--compile", action="store_true", help="compile what is missing, minutes each")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.name}")
    args = parser.parse_args(argv)
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(CASES)}")
    for name in args.cases or CASES:
        text = table(name, args.compile)
        print(f"{name}\n\n{text}\n", flush=True)
        if args.write:
            pattern, page = rf"(<!-- case: {name} -->\n).*?(<!-- end -->)", PAGE.read_text()
            page, found = re.subn(pattern, lambda m, text=text: m[1] + text + "\n" + m[2], page, flags=re.DOTALL)
            assert found == 1, name
            PAGE.write_text(page)


if __name__ == "__main__":
    main()
