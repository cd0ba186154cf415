"""Peak memory of a step on TPU7x under each recomputation policy: predicted by roofline.py, compiled by aot.py.

    python benchmarks/memory.py [8b-8k] [8b-128k] [70b-8k] [70b-128k] [--predicted]

Of a policy that does not fit it says what the compiler would have needed, if the compiler does. A compile takes one to
ten minutes; what is in compiled_tpu7x.json is not compiled again, so that a long series can be broken off and taken up.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import compiled
from config import REMAT_POLICIES, from_preset
from hardware import parse_topology
from step import GiB, predict
from workload import run_of

CASES = {
    "8b-8k": ("tpu7x:2x2x1", "llama3.1-8b", dict(mesh="fsdp:8", seq_len=8192, batch=16)),
    "8b-128k": ("tpu7x:2x2x1", "llama3.1-8b", dict(mesh="fsdp:2,context:4", seq_len=131_072, batch=2)),
    "70b-8k": ("tpu7x:4x4x4", "llama3.1-70b", dict(mesh="fsdp:128", seq_len=8192, batch=128)),
    "70b-128k": ("tpu7x:4x4x4", "llama3.1-70b", dict(mesh="fsdp:16,tensor:2,context:4", seq_len=131_072, batch=16)),
}
POLICIES = [policy for policy in REMAT_POLICIES if policy not in ("custom", "auto")]


def main(argv: list[str]) -> None:
    wanted = [name for name in argv if name != "--predicted"] or list(CASES)
    if unknown := set(wanted) - set(CASES):
        sys.exit(f"there is no {', '.join(unknown)}; there are {', '.join(CASES)} and --predicted")
    columns = ["case", "policy", "GiB a device, predicted", "step, predicted"]
    columns += [] if "--predicted" in argv else ["GiB a device, compiled", "predicted over compiled", "GiB of host"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in wanted:
        topology, preset, flags = CASES[name]
        for policy in POLICIES:
            expected = predict(run_of(from_preset(preset, **flags, remat=policy), *parse_topology(topology)))
            cells = [name, policy, f"{expected.hbm_bytes / GiB:.1f}", f"{expected.step_s:.2f} s"]
            if "--predicted" not in argv:
                found = compiled.ask(expected)
                needed, host = compiled.memory_of(found), "refused"
                if found["fits"]:
                    host = f"{found['host_bytes'] / GiB:.1f}"
                elif found["memory"] == "host":
                    host = f"{found['used_bytes'] / GiB:.1f}, refused"
                cells += [f"{needed / GiB:.1f}", f"{expected.hbm_bytes / needed:.2f}"] if needed else ["", ""]
                cells += [host]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
