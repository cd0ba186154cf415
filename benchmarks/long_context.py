"""Long sequences on TPU7x: predicted by roofline.py and compiled by aot.py, side by side.

    python benchmarks/long_context.py guide         under 20B at 128k: FSDP x TP x CP against FSDP x CP and a smaller CP
    python benchmarks/long_context.py lengths       sequence and context axis grow together: memory stays
    python benchmarks/long_context.py --predicted   both, in milliseconds: nothing is compiled
    python benchmarks/long_context.py cpu           a step of `tiny` with 65,536 tokens on 8 simulated devices: minutes

Llama 3.1 8B, whole, everything recomputed. A compile takes minutes and 3 GB; what is in compiled_tpu7x.json is not
compiled again. The guide is Google Cloud's "TPU7x performance optimizations": for a dense model under 20B at 128k it
has FSDP 16 x TP 2 x CP 2, 4% before CP 4. Of which model it does not say.
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import compiled
from config import from_preset
from hardware import parse_topology
from step import GiB, predict
from workload import run_of

# (topology, mesh, positions of a sequence, sequences)
ROWS = {
    "guide": [
        ("tpu7x:2x4x4", "fsdp:16,context:2,tensor:2", 131_072, 32),
        ("tpu7x:2x4x4", "fsdp:16,context:4", 131_072, 32),
        ("tpu7x:2x4x4", "fsdp:32,context:2", 131_072, 32),
    ],
    "lengths": [
        ("tpu7x:4x4x4", "data:8,fsdp:4,context:4", 131_072, 32),
        ("tpu7x:4x4x4", "data:2,fsdp:4,context:16", 524_288, 8),
        ("tpu7x:4x4x4", "fsdp:4,context:32", 1_048_576, 4),
    ],
}
PRESET, REMAT = "llama3.1-8b", "full"


def row(topology: str, mesh: str, seq_len: int, batch: int, is_compiled: bool) -> str:
    chip, chips = parse_topology(topology)
    flags = dict(mesh=mesh, seq_len=seq_len, batch=batch, remat=REMAT)
    expected = predict(run_of(from_preset(PRESET, **flags), chip, chips))
    share = lambda exposed, whole: f"{exposed / whole:.1%}"
    cells = [topology, f"`{mesh}`", f"{seq_len // 1024}k x {batch}"]
    cells += [f"{expected.step_s:.2f} s", share(expected.exposed_comm_s, expected.step_s)]
    cells += [f"{expected.mfu:.1%}", f"{expected.hbm_bytes / GiB:.1f}"]
    if is_compiled:
        found = compiled.ask(expected)
        if not found["fits"]:
            sys.exit(f"{flags}: does not fit, by the compiler")
        cells += [f"{found['step_s']:.2f} s", share(found["exposed_comm_s"], found["step_s"])]
        cells += [f"{found['mfu']:.1%}", f"{found['peak_hbm_bytes'] / GiB:.1f}"]
    return f"| {' | '.join(cells)} |"


def on_cpu() -> None:
    """The scores of a head would be 17 GB at once, if all were; context.py's reference takes some queries at a time."""
    flags = (
        "--mesh=context:8 --seq_len=65536 --batch=1 --steps=1 --remat=full --eval_batches=0 --sample=0 --log_every=1"
    )
    subprocess.run([sys.executable, "train.py", *flags.split(), "--compilation_cache="], cwd=ROOT, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"at most {peak / GiB:.1f} GiB of memory, measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(ROWS)}; default: both; or cpu, alone")
    parser.add_argument("--predicted", action="store_true", help="by roofline.py alone: nothing is compiled")
    args = parser.parse_args()
    if args.tables == ["cpu"]:
        return on_cpu()
    if unknown := set(args.tables) - set(ROWS):
        parser.error(f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(ROWS)}, and cpu alone")
    of = ["step", "waits for messages", "MFU", "GiB a device"]
    columns = ["slice", "mesh", "tokens"] + [f"{name}, predicted" for name in of]
    columns += [f"{name}, compiled" for name in of] if not args.predicted else []
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in args.tables or ROWS:
        for each in ROWS[name]:
            print(row(*each, not args.predicted), flush=True)


if __name__ == "__main__":
    main()
