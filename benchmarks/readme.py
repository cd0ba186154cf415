"""Measures what the README says was measured, on this machine, and writes it there.

    python benchmarks/readme.py

Runs `python train.py` and benchmarks/one_device.py from a cold start, each in a process of its own, and replaces the
text between the README's markers.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def timed_lines(*command: str) -> list[tuple[float, str]]:
    """The lines that a command prints, each with the seconds since its start."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [(time.perf_counter() - begun, line.rstrip()) for line in process.stdout]
    if process.wait():
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}")
    return lines


def machine() -> str:
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    version = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores ({model[1] if model else 'unknown'}), {gib:.0f} GiB, Python {version}"


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        run = timed_lines("train.py", f"--compilation_cache={cache}")
        first_s = next(seconds for seconds, line in run if re.match(r"step +1/", line))
        again = timed_lines("train.py", f"--compilation_cache={cache}", "--steps=2", "--eval_batches=0", "--sample=0")
        again_s = next(seconds for seconds, line in again if re.match(r"step +1/", line))
    compiled = [line for out in (run, again) for _, line in out if line.startswith("compiled")]
    compile_s = [float(re.search(r"in ([\d.]+) s", line)[1]) for line in compiled]
    shown = [line for _, line in run if not re.match(r"step +\d*[1-9]0/", line)]  # every hundredth step
    meshes = [[], ["--no-prefetch"], ["--mesh=data:2,fsdp:2,tensor:2"], ["--mesh=tensor:8"]]
    ratios = []
    for flags in meshes:
        line = next(line for _, line in timed_lines("benchmarks/one_device.py", *flags) if "x the time" in line)
        ratios.append(f"| `{' '.join(flags) or '(default)'}` | {re.search(r'([0-9.]+) x the time', line)[1]} |")

    blocks = {
        "default run": f"On {machine()}, measured: first step shown {first_s:.0f} s after the command, "
        f"{run[-1][0]:.0f} s in all. A second start finds its programs compiled "
        f"({compile_s[1]:.1f} s instead of {compile_s[0]:.1f} s) and shows its first step after {again_s:.0f} s.\n\n"
        "```\n" + "\n".join(shown) + "\n```",
        "one device": f"Time of a step on 8 simulated devices over that of a plain `jax.jit` of the same model and "
        f"batch on one, measured on the same {machine()} (`python benchmarks/one_device.py`). It says what the "
        "simulation costs, and nothing about a TPU.\n\n| mesh and flags | ratio |\n|---|---|\n" + "\n".join(ratios),
    }
    readme = (ROOT / "README.md").read_text()
    for name, text in blocks.items():
        pattern = rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)"
        readme, found = re.subn(pattern, lambda m, text=text: m[1] + text + "\n" + m[2], readme, flags=re.DOTALL)
        assert found == 1, name
    (ROOT / "README.md").write_text(readme)


if __name__ == "__main__":
    main()
