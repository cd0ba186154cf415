"""Repeats on this machine the measurements and compiles of the README and of docs/, and writes the results there.

    python benchmarks/readme.py [BLOCK ...]

Runs `python train.py` and the other benchmarks from a cold start, each in a process of its own, and replaces the text
between the marks of the pages.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command


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


FIRST_STEP = r"step +1/"


@functools.cache
def default_runs() -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """The lines of `python train.py`, and those of a second start, up to its first step."""
    with tempfile.TemporaryDirectory() as cache:
        run = timed_lines("train.py", f"--compilation_cache={cache}")
        return run, timed_lines("train.py", f"--compilation_cache={cache}", until=FIRST_STEP)


def default_run() -> str:
    """A few lines of it, for the README."""
    shown = ("mesh", "model", "step   1/", "step 300/", "held-out", "in all")
    return "```\n" + "\n".join(line for _, line in default_runs()[0] if line.startswith(shown)) + "\n```"


def default_run_in_full() -> str:
    run, again = default_runs()
    first_s, again_s = (next(s for s, line in lines if re.match(FIRST_STEP, line)) for lines in (run, again))
    compiled = [line for lines in (run, again) for _, line in lines if line.startswith("compiled")]
    compile_s = [float(re.search(r"in ([\d.]+) s", line)[1]) for line in compiled]
    shown = [line for _, line in run if not re.match(r"step +\d*[1-9]0/", line)]
    return (
        f"On {machine()}, measured: the first step is shown {first_s:.0f} s after the command, the run takes "
        f"{run[-1][0]:.0f} s.\nA second start finds its programs compiled: {compile_s[1]:.1f} s instead of "
        f"{compile_s[0]:.1f} s for the step, which is shown after {again_s:.0f} s.\nIt prints (here only every "
        "hundredth step):\n\n```\n" + "\n".join(shown) + "\n```"
    )


def one_device() -> str:
    ratios = []
    for flags in ([], ["--no-prefetch"], ["--mesh=data:8"], ["--mesh=data:2,fsdp:2,tensor:2"], ["--mesh=tensor:8"]):
        line = next(line for _, line in timed_lines("benchmarks/one_device.py", *flags) if "x the time" in line)
        median, low, high = re.search(r"([\d.]+) x the time of one device \(([\d.]+) to ([\d.]+)\)", line).groups()
        ratios.append(f"| `{' '.join(flags) or '(default)'}` | {median} | {low} to {high} |")

    return (
        "The time of a step on 8 simulated devices, over that of a plain `jax.jit` of the same model and batch on "
        f"one.\nMeasured, alternating, on {machine()}\n(`python benchmarks/one_device.py`). It is the cost of the "
        "simulation, and says nothing about a TPU.\n\n| mesh and flags | median ratio | middle half |\n|---|---|---|\n"
        + "\n".join(ratios)
    )


def collectives() -> str:
    lines = [line for _, line in timed_lines("benchmarks/collectives.py", "--topology=tpu7x:4x4x4")]
    return (
        f"`python benchmarks/collectives.py`, libtpu {metadata.version('libtpu')}, a ring of 4 devices along an axis "
        "of the torus, bfloat16. The MLP is that of\na tensor-parallel block (D = 4096, F = 14336, 8192 tokens). Times "
        "are predicted from the compiled schedule: the\ncompiler's cycles at 2.2 GHz, links at 89 GB/s one way.\n\n"
        + "\n".join(line for line in lines if line.startswith("|"))
    )


def kernels() -> str:
    lines = [line for _, line in timed_lines("benchmarks/kernels.py")]
    return (
        f"`python benchmarks/kernels.py`: {lines[0]}. Cycles of a TensorCore in the program of each\nkernel, counted "
        "by `compiled/bundles.py` in one run. A head is causal, with 8192 queries and keys of 128, in bfloat16.\n"
        "`reach` is the goal. The head of the file has the tiles of jax's and tokamax's kernels, and what is not "
        "counted.\n\n" + "\n".join(line for line in lines if line.startswith("|"))
    )


def kernel_timings() -> str:
    lines = [line for _, line in timed_lines("benchmarks/kernel_timings.py")]
    rows = lines.index("", 2) + 3  # of the second table
    return "\n".join(lines[: rows + 10])


def tuned_sizes() -> str:
    os.environ["IRONWOOD_TUNED"] = os.devnull  # the project's own sizes, not this machine's
    return "\n".join(line for _, line in timed_lines("kernels.py"))


def fp8_quality() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/fp8_quality.py", "plot"))


def endurance() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/endurance.py", "plot"))


def bits_a_byte() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/bits_a_byte.py"))


def muon() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/muon.py"))


def checked_step() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/corruption.py"))


def operations() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/operations.py"))


def planted_errors() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/mutants.py", "--by=kind"))


def faults() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/faults.py", "--table"))


def bad_command_lines() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/bad_input.py", "--table"))


def preparation() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/prepare.py", "table"))


def parity() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/parity.py"))


def parity_of_exports() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/parity.py", "export"))


def memory_of_70b() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/memory.py", "70b"))


def cliffs() -> str:
    return "\n".join(line for _, line in timed_lines("benchmarks/cliffs.py"))


def recipes() -> str:
    return "\n".join(line for _, line in timed_lines("recipes.py", "--plot=docs/figures/recipes.png"))


def better_recipes() -> str:
    shown, better = [], False
    for _, line in timed_lines("recipes.py", "--better"):
        better = ": better: " in line or (better and line.startswith(" "))  # indented lines belong to the recipe above
        shown += [line] * better
    return "```\n" + "\n".join(shown) + "\n```"


def what_if() -> str:
    return "\n".join(line for _, line in timed_lines("recipes.py", "--what_if"))


def misses() -> str:
    return "\n".join(line for _, line in timed_lines("recipes.py", "--misses"))


BLOCKS = {
    "default run": default_run,
    "default run in full": default_run_in_full,
    "one device": one_device,
    "collectives": collectives,
    "kernels": kernels,
    "kernel timings": kernel_timings,
    "tuned sizes": tuned_sizes,
    "fp8 quality": fp8_quality,
    "endurance": endurance,
    "bits a byte": bits_a_byte,
    "muon": muon,
    "checked step": checked_step,
    "operations": operations,
    "planted errors": planted_errors,
    "faults": faults,
    "bad command lines": bad_command_lines,
    "preparation": preparation,
    "parity": parity,
    "parity of exports": parity_of_exports,
    "memory of 70B": memory_of_70b,
    "cliffs": cliffs,
    "recipes": recipes,
    "better recipes": better_recipes,
    "what if": what_if,
    "misses": misses,
}


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("blocks", nargs="*", metavar="BLOCK", help=f"default: all: {', '.join(BLOCKS)}")
    args = command.arguments(parser)
    command.check_names(args.blocks, BLOCKS)
    texts = {path: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    for name in args.blocks or BLOCKS:
        pattern = rf"(: {name} -->\n).*?(<!-- end -->)"
        places = [path for path, text in texts.items() for _ in re.findall(pattern, text, re.DOTALL)]
        if len(places) != 1:
            sys.exit(f"the pages have the marks of {name!r} {len(places)} times; they belong there once")
        (path,) = places
        written = BLOCKS[name]() + "\n"
        replaced = lambda marks, written=written: f"{marks[1]}{written}{marks[2]}"
        texts[path] = re.sub(pattern, replaced, texts[path], flags=re.DOTALL)
        path.write_text(texts[path])


if __name__ == "__main__":
    command.run(main)
