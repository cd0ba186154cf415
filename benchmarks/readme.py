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


def timed_lines(*command: str, until: str = "") -> list[tuple[float, str]]:
    """The lines that a command prints, each with the seconds since its start; up to one that matches `until`."""
    begun = time.perf_counter()
    lines = []
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append((time.perf_counter() - begun, line.rstrip()))
            if until and re.match(until, line):
                process.kill()
                return lines
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}")
    return lines


def machine() -> str:
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    version = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores ({model[1] if model else 'unknown'}), {gib:.0f} GiB, Python {version}"


def main() -> None:
    first_step = r"step +1/"
    with tempfile.TemporaryDirectory() as cache:
        run = timed_lines("train.py", f"--compilation_cache={cache}")
        again = timed_lines("train.py", f"--compilation_cache={cache}", until=first_step)
    first_s, again_s = (next(s for s, line in lines if re.match(first_step, line)) for lines in (run, again))
    compiled = [line for lines in (run, again) for _, line in lines if line.startswith("compiled")]
    compile_s = [float(re.search(r"in ([\d.]+) s", line)[1]) for line in compiled]
    shown = [line for _, line in run if not re.match(r"step +\d*[1-9]0/", line)]
    ratios = []
    for flags in ([], ["--no-prefetch"], ["--mesh=data:8"], ["--mesh=data:2,fsdp:2,tensor:2"], ["--mesh=tensor:8"]):
        line = next(line for _, line in timed_lines("benchmarks/one_device.py", *flags) if "x the time" in line)
        median, low, high = re.search(r"([\d.]+) x the time of one device \(([\d.]+) to ([\d.]+)\)", line).groups()
        ratios.append(f"| `{' '.join(flags) or '(default)'}` | {median} | {low} to {high} |")

    blocks = {
        "default run": f"On {machine()}, measured: the first step is shown {first_s:.0f} s after the command, the run "
        f"takes {run[-1][0]:.0f} s.\nA second start finds its programs compiled: {compile_s[1]:.1f} s instead of "
        f"{compile_s[0]:.1f} s for the step, which is shown after {again_s:.0f} s.\nIt prints (here only every "
        "hundredth step):\n\n```\n" + "\n".join(shown) + "\n```",
        "one device": "Time of a step on 8 simulated devices over that of a plain `jax.jit` of the same model and "
        f"batch on one, in turns on\n{machine()} (`python benchmarks/one_device.py`): what the\nsimulation costs, "
        "measured. It says nothing about a TPU.\n\n| mesh and flags | median ratio | middle half |\n|---|---|---|\n"
        + "\n".join(ratios),
    }
    readme = (ROOT / "README.md").read_text()
    for name, text in blocks.items():
        pattern = rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)"
        readme, found = re.subn(pattern, lambda m, text=text: m[1] + text + "\n" + m[2], readme, flags=re.DOTALL)
        assert found == 1, name
    (ROOT / "README.md").write_text(readme)


if __name__ == "__main__":
    main()
