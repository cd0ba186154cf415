"""The case studies of Google Cloud's guide to TPU7x, as runs of this program: predicted and compiled.

    python benchmarks/cases.py                       the tables; runs nothing
    python benchmarks/cases.py offload vmem          some of them
    python benchmarks/cases.py --compile offload     compiles what results_tpu7x.json lacks, minutes each, and stores it
    python benchmarks/cases.py --write               writes the tables into the pages of docs/

A row has the seconds of a step, its MFU, the share of it that waits for messages, and the memory of a device. Compiled
bytes are the compiler's, compiled seconds those of its schedule. roofline.py does not model the compiler's flags, nor a
constant in place of the softmax's maximum; its columns are empty there.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command
from compiled import results
from flags import from_preset
from hardware import parse_topology
from predicted.step import GiB, Prediction, predict
from predicted.workload import run_of

PAGES = (ROOT / "docs/CASES.md", ROOT / "docs/RESULTS.md")
OFFLOADED = ("all_gather", "reduce_scatter", "all_reduce")
ON_TENSORCORES = ",".join(f"xla_tpu_enable_sparse_core_collective_offload_{name}=false" for name in OFFLOADED)
UNPREDICTED = {"max_logit": 30.0, "xla_flags": ON_TENSORCORES}  # predictions do not depend on these values


@dataclass(frozen=True)
class Case:
    topology: str
    preset: str
    common: Mapping  # flags of all rows
    rows: Mapping[str, Mapping]  # {what the row is: its own flags}
    is_compiled: bool = True


def _vmem(kib: int) -> dict:
    return dict(xla_flags=f"xla_tpu_scoped_vmem_limit_kib={kib}")


SHORT = dict(mesh="fsdp:8", batch=16, remat="minimal_with_context")
LITTLE = dict(batch=8, seq_len=2048, remat="full")
HYBRID = dict(mesh="fsdp:16,context:2,tensor:2")
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
            for what, remat in (("results of matmuls", "minimal"), ("layers' inputs", "full"))
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
    "128k": Case(
        "tpu7x:2x4x4",
        "llama3.1-8b",
        dict(batch=32, seq_len=131_072, remat="full"),
        {
            "the guide's, TP on the cores of a chip": HYBRID,
            "the same, collectives on the TensorCores": HYBRID | dict(xla_flags=ON_TENSORCORES),
            "CP 4": dict(mesh="fsdp:16,context:4"),
            "CP 2, no TP": dict(mesh="fsdp:32,context:2"),
        },
    ),
    "lengths": Case(
        "tpu7x:4x4x4",
        "llama3.1-8b",
        dict(remat="full"),
        {
            "128k": dict(mesh="data:8,fsdp:4,context:4", batch=32, seq_len=131_072),
            "512k": dict(mesh="data:2,fsdp:4,context:16", batch=8, seq_len=524_288),
            "1M": dict(mesh="fsdp:4,context:32", batch=4, seq_len=1_048_576),
        },
    ),
    "updates": Case(
        "tpu7x:2x2x1",
        "llama3.1-8b",
        dict(num_layers=8, mesh="data:8", batch=8, seq_len=2048, remat="full"),
        {
            f"{optimizer}, {where}": dict(optimizer=optimizer, shard_update=sharded)
            for optimizer in ("adamw", "sgd")
            for where, sharded in (("state replicated", False), ("state sharded 8 ways", True))
        },
    ),
    "choices": Case(
        "tpu7x:2x2x1",
        "llama3.1-8b",
        SHORT,
        {
            "AdamW, cosine (default)": {},
            "stable rate and decay, spikes skipped": dict(schedule="wsd", skip_spikes=6.0),
            "both moments in bfloat16": dict(mu_dtype="bfloat16", nu_dtype="bfloat16"),
            "2 microbatches": dict(microbatches=2),
            "their gradients in bfloat16": dict(microbatches=2, grad_dtype="bfloat16"),
            "Muon": dict(optimizer="muon"),
            "MuonClip": dict(optimizer="muon", qk_clip=100.0),
            "Muon, its state on the host": dict(optimizer="muon", offload_optimizer=True),
            "FSDP in two dims": dict(mesh="fsdp:4,fsdp_transpose:2"),
        },
    ),
    "experts": Case(
        "tpu7x:4x4x4",
        "gpt-oss-120b",
        dict(batch=1280, microbatches=2, remat="save_out_proj"),
        {
            "FSDP, two replicas": dict(mesh="data:2,fsdp:64"),
            "FSDP in two dims": dict(mesh="fsdp:64,fsdp_transpose:2"),
            "experts 2 ways, on the cores of a chip": dict(mesh="fsdp:64,expert:2"),
            "4 ways": dict(mesh="fsdp:32,expert:4"),
            "8 ways": dict(mesh="fsdp:16,expert:8"),
        },
        is_compiled=False,
    ),
}


def predicted(case: Case, row: Mapping) -> Prediction:
    return predict(run_of(from_preset(case.preset, **case.common | row), *parse_topology(case.topology)))


def _flag(flag: tuple[str, object]) -> str:
    name, value = flag
    return f"--{name}" if value is True else f"--{name}={value}"


def _cells(step_s: float, mfu: float, waits_s: float, nbytes: float) -> list[str]:
    return [f"{step_s:.3f} s", f"{mfu:.1%}", f"{waits_s / step_s:.1%}", f"{nbytes / GiB:.1f}"]


def table(name: str, compile_missing: bool = False) -> str:
    """Markdown with one row for each run: predicted and, where it was compiled, compiled.

    A run that does not fit has only the memory that it would take, by prediction.
    """
    case = CASES[name]
    kinds = ["predicted", "compiled"] if case.is_compiled else ["predicted"]
    common = " ".join(map(_flag, case.common.items()))
    lines = [f"`--topology={case.topology} --preset={case.preset} {common}`"]
    lines += ["", f"| | with | {' | '.join(f'step, {kind} | MFU | waits | GiB' for kind in kinds)} |"]
    lines += [f"|{'---|' * (2 + 4 * len(kinds))}"]
    for about, row in case.rows.items():
        expected, cells = predicted(case, row), [""] * 4
        if not UNPREDICTED.items() & row.items():
            cells = _cells(expected.step_s, expected.mfu, expected.exposed_comm_s, expected.hbm_bytes)
        if not expected.fits:
            cells[:3] = ["does not fit", "", ""]
        if case.is_compiled:
            result = results.load_or_compile(expected) if compile_missing else results.load(expected)
            if result and result["fits"]:
                cells += _cells(result["step_s"], result["mfu"], result["exposed_comm_s"], result["peak_hbm_bytes"])
            else:
                cells += ["refused" if result else "not compiled", "", "", ""]
        own = " ".join(_flag(flag) for flag in row.items() if flag[1] is not False)
        own = own.replace(ON_TENSORCORES, "OFF")
        own = f"`{own}`" if own else ""
        lines.append(f"| {about} | {own} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(name: str, text: str) -> None:
    """Writes a table between the marks of its name, which are once on one of the pages."""
    pattern = rf"(<!-- case: {name} -->\n).*?(<!-- end -->)"
    (page,) = (page for page in PAGES for _ in re.findall(pattern, page.read_text(), re.DOTALL))
    page.write_text(re.sub(pattern, lambda m: m[1] + text + "\n" + m[2], page.read_text(), flags=re.DOTALL))


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__file__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all: {', '.join(CASES)}")
    parser.add_argument("--compile", action="store_true", help="compile what is missing, minutes each")
    parser.add_argument(
        "--write", action="store_true", help=f"write the tables into {' or '.join(page.name for page in PAGES)}"
    )
    args = command.arguments(parser, argv)
    command.check_names(args.cases, CASES)
    for name in args.cases or CASES:
        text = table(name, args.compile)
        print(f"{name}\n\n{text}\n", flush=True)
        if args.write:
            write(name, text)


if __name__ == "__main__":
    command.run(main)
