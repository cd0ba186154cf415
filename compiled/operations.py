"""Counts the cycles of XLA's own operations in the bundles that the TPU7x compiler made of them.

**Idea.** XLA writes an estimate of its cycles into each operation, and its scheduler plans with it. For a matmul alone
the estimate is right. For anything else it counts the windows into which XLA cuts the operation, neither bundles nor
bytes. The compiler's dump has the bundles of every operation, as it has those of a Pallas kernel (compiled/bundles.py):
the same reader counts both.

**Formula.** An operation is a tree of loops over its windows:

    cycles = min(sum over regions of bundles * executions, XLA's estimate)
    time   = max(cycles / clock, bytes in HBM / W_hbm)          compiled/schedule.py

A branch is counted in each iteration of the loop around it, so the first term is too high if iterations skip it. That
is why the estimate is the limit.

**Cost.** The compiler writes a text for each operation, which makes a compilation slower. Operations that are equal
have one text, that of the first.

**On TPU7x** (libtpu 0.0.50.1), cycles of operations on [16384, 14336], in millions; HBM at 3.2 TB/s, in cycles of 1.9
GHz. Hardware copies an array at 3.2 TB/s (hardware.py), as the last two columns say and the first denies:

    operation                      XLA's estimate   counted    HBM
    negate, bfloat16                         1.48      0.16   0.56
    add 1, float32                           1.48      0.15   1.12
    SwiGLU, bfloat16                         1.73      0.58   0.84
    gradient of SwiGLU, bfloat16             2.21      1.06   1.39
    transpose, bfloat16                      3.78      0.37   0.56
    exp(sin), float32                        8.38      5.77   1.12

In a step of Llama 3.1 8B, matmuls that compute nothing else have 0.96 to 1.03 of their estimates, those with SwiGLU or
a sum fused into them 0.5 to 0.9, elementwise operations 0.05 to 0.5.

Where hardware was measured: a matmul of 16384 x 8192 x 8192 with 60 MiB of VMEM has 4.33 M cycles, which is 965 TFLOP/s
at 1.9 GHz and 1,118 at 2.2 GHz; 956 and 1,113 were measured in these power states (hardware.py). Three copies of arrays
with 2880 columns into another layout take 3.5 ms by this count, 21.9 ms by XLA's estimates, 7.2 ms measured
(benchmarks/kernel_timings.py): the one known miss.

**Left out**: as in compiled/bundles.py. Operations that no dump describes, or whose loops have bounds that only the
run knows, keep XLA's estimate.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compiled import bundles
from compiled.hlo import Instruction, Program

PASSES = ("schedule", "loops")  # of bundles.PASSES


@contextmanager
def dumped() -> Iterator[Path]:
    """Yields a folder into which libtpu, if this process starts it meanwhile, writes the bundles of operations."""
    labels = "|".join(bundles.PASSES[name] for name in PASSES)
    before = os.environ.get("LIBTPU_INIT_ARGS")
    with tempfile.TemporaryDirectory(prefix="operations_") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={labels}"
        os.environ["LIBTPU_INIT_ARGS"] = f"{before or ''} {flags}".strip()
        try:
            yield Path(folder)
        finally:
            os.environ.pop("LIBTPU_INIT_ARGS")
            os.environ.update({} if before is None else {"LIBTPU_INIT_ARGS": before})


def count(folder: Path, program: Program) -> dict[str, float]:
    """{operation: cycles of one execution} for the operations of a program that a dump describes.

    Args:
      folder: that of `dumped`, which is empty afterwards.
      program: the only one that was compiled since it was empty.
    """
    dumps = _read(folder)
    cycles, alike = {}, {}
    operations = {i.name: (i, _key(program, i)) for i in _operations(program)}
    for name, (operation, key) in operations.items():
        if name in dumps and (counted := _cycles(*dumps[name])) is not None:
            cycles[name] = min(counted, operation.cycles)
            alike[key] = max(cycles[name], alike.get(key, 0.0))
    others = {name: alike[key] for name, (_, key) in operations.items() if name not in cycles and key in alike}
    return cycles | others


def _operations(program: Program) -> Iterator[Instruction]:
    """Yields the instructions that have an estimate by XLA."""
    for computation in program.computations.values():
        yield from (instruction for instruction in computation.values() if instruction.cycles is not None)


def _read(folder: Path) -> dict[str, tuple[str, ...]]:
    """{operation: its texts of PASSES} of a dump. Removes the dump."""
    labels = {bundles.PASSES[name]: name for name in PASSES}
    pattern = re.compile(rf"\d+-(.+)-\d+-({'|'.join(map(re.escape, labels))})\.txt")
    texts: dict[str, dict[str, str]] = {}
    for path in sorted(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            texts.setdefault(match[1], {})[labels[match[2]]] = path.read_text()
        path.unlink()
    return {
        name: tuple(passes[each] for each in PASSES) for name, passes in texts.items() if len(passes) == len(PASSES)
    }


def _cycles(schedule: str, loops: str) -> float | None:
    """The cycles of an operation; None if the trips of one of its loops are unknown or its instructions are."""
    listing = bundles.read_bundles(schedule)

    def total(span: bundles.Span) -> int:
        cycles = bundles.simulate([listing[i] for i in span.own()])
        return cycles + sum(total(inner) * (inner.trips if inner.kind == "loop" else 1) for inner in span.inside)

    try:
        return float(total(bundles.spans_of(listing, bundles.read_trips(loops))))
    except (ValueError, TypeError):  # an instruction of another chip, or trips that are None
        return None


def _key(program: Program, operation: Instruction) -> str:
    """The same for operations of which the compiler makes the same bundles: what they compute, on what shapes."""
    shapes = [operation.shapes, operation.config.get("window_config")]
    inner = [
        (i.opcode, i.shapes, i.attributes if i.opcode != "parameter" else "")
        for name in operation.called.get("calls", ())
        for i in program.computations[name].values()
    ]
    return repr((operation.opcode, shapes, inner))
