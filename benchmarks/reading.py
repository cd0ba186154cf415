"""Counts what a reader of the project must read: modules, lines, functions, words; with a target for each.

    python benchmarks/reading.py [--json]

Project modules are the files at the root and in its folders, without tests/ and benchmarks/. What `import model` brings
is read from sys.modules of a fresh process. The default run is `python train.py --steps=2`, traced by Python's profiler
while JAX traces the step. Lines to read are those of the functions that it enters, and of the heads of their modules:
all lines above the first function or class. A line counts once; comments and docstrings count. A Pallas kernel is a
function named `_kernel` or `_..._kernel`. A word is what is between blanks, in README.md above its heading "Read it".
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command

# Meters, not parts of the training program: the lines at the root that a reader of training skips.
INSTRUMENTS = "transformer step workload planner bounds matmul interconnect cost serving recompute".split()
INSTRUMENTS += "hlo schedule liveness timeline bundles compiled".split()
MOST_MODULES, MOST_LINES = 25, 10_300  # that `import model` brings
KERNEL = re.compile(r"_(\w+_)?kernel")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTED = "import json, sys, {module}; print(json.dumps([getattr(m, '__file__', None) for m in sys.modules.values()]))"
TRACED = """
import inspect, json, runpy, sys, threading
entered, (out, program, *flags) = set(), sys.argv[1:]
note = lambda frame, event, _: event == "call" and entered.add(frame.f_code)
sys.argv = [program, *flags]
threading.setprofile(note)
sys.setprofile(note)
try:
    runpy.run_path(program, run_name="__main__")
finally:
    sys.setprofile(None)
    with open(out, "w") as file:
        json.dump([(code.co_filename, code.co_firstlineno) for code in entered
                   if code.co_flags & inspect.CO_OPTIMIZED], file)  # no bodies of modules and classes
"""


@dataclass(frozen=True)
class Row:
    """A figure and the most that it should be, None without a target."""

    what: str
    value: float
    target: float | None = None
    where: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


def sources(root: Path) -> dict[Path, str]:
    """Returns {path: text} of the project's modules."""
    paths = sorted([*root.glob("*.py"), *root.glob("[!.]*/*.py")])
    return {path: path.read_text() for path in paths if path.parent.name not in ("tests", "benchmarks")}


def lines_of(text: str) -> int:
    return len(text.splitlines())


def first_line(node: ast.AST) -> int:
    """The line where a definition begins: that of its first decorator, as in its code object."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def head(text: str) -> set[int]:
    """Returns the numbers of the lines above the first function or class of a module."""
    definitions = [node for node in ast.parse(text).body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    return set(range(1, first_line(definitions[0]) if definitions else lines_of(text) + 1))


def num_parameters(function: ast.FunctionDef) -> int:
    a = function.args
    return len([*a.posonlyargs, *a.args, *a.kwonlyargs]) + bool(a.vararg) + bool(a.kwarg)


def imported(root: Path, module: str = "model") -> set[Path]:
    """Returns the files of the project that the import of a module brings, as a fresh process finds them."""
    line = [sys.executable, "-c", IMPORTED.format(module=module)]
    files = json.loads(subprocess.run(line, cwd=root, stdout=subprocess.PIPE, check=True).stdout)
    return {Path(file) for file in files if file} & sources(root).keys()


def traced(root: Path, *flags: str) -> set[tuple[Path, int]]:
    """Returns (file, first line) of the project's functions, nameless ones too, that `python train.py FLAGS` enters."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "entered.json"
        line = [sys.executable, "-c", TRACED, str(out), str(root / "train.py"), *flags]
        subprocess.run(line, cwd=root, stdout=subprocess.DEVNULL, check=True)
        ours = sources(root).keys()
        return {(Path(file), number) for file, number in json.loads(out.read_text()) if Path(file) in ours}


def to_read(root: Path, entered: set[tuple[Path, int]]) -> tuple[int, int, int]:
    """Returns (named functions that a run entered, lines of their modules' heads, lines of the functions below those).

    A module that was imported without entering one of its functions does not count.
    """
    texts, functions, above, below = sources(root), 0, 0, 0
    for path in {path for path, _ in entered}:
        here = [
            node
            for node in ast.walk(ast.parse(texts[path]))
            if isinstance(node, (*FUNCTIONS, ast.Lambda)) and (path, first_line(node)) in entered
        ]
        lines = {line for node in here for line in range(first_line(node), node.end_lineno + 1)}
        functions += sum(isinstance(node, FUNCTIONS) for node in here)
        above += len(head(texts[path])) if here else 0
        below += len(lines - head(texts[path]))
    return functions, above, below


def words_before_reading(readme: str) -> int:
    """Raises ValueError where the page has no heading "Read it"."""
    before, heading, _ = readme.partition("\n## Read it\n")
    if not heading:
        raise ValueError('README.md has no heading "## Read it", up to which its words are counted')
    return len(before.split())


def rows(root: Path, entered: set[tuple[Path, int]]) -> list[Row]:
    texts = sources(root)
    brought = imported(root)
    num_functions, above, below = to_read(root, entered)
    functions = [
        (node, f"{path.relative_to(root).as_posix()}: {node.name}")
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, FUNCTIONS)
    ]
    plain = [(node, where) for node, where in functions if not KERNEL.fullmatch(node.name)]
    length = lambda node: node.end_lineno + 1 - first_line(node)
    most = lambda size, among: max((size(node), where) for node, where in among)
    longest, widest, longest_of_all = most(length, plain), most(num_parameters, plain), most(length, functions)
    at_root = {path.stem: lines_of(text) for path, text in texts.items() if path.parent == root}
    instruments = sum(at_root.get(name, 0) for name in INSTRUMENTS)
    return [
        Row("modules that `import model` brings", len(brought), MOST_MODULES),
        Row("lines of these", sum(lines_of(texts[path]) for path in brought), MOST_LINES),
        Row(
            "lines to read for the default run",
            above + below,
            2_200,
            f"{num_functions} functions {below:,}, heads {above:,}",
        ),
        Row("lines of the longest function but Pallas kernels", longest[0], 60, longest[1]),
        Row("lines of the longest function", longest_of_all[0], None, longest_of_all[1]),
        Row("most parameters of a function but Pallas kernels", widest[0], 10, widest[1]),
        Row("% of the lines at the root that are instruments", round(100 * instruments / sum(at_root.values())), 0),
        Row('words of README.md before "Read it"', words_before_reading((root / "README.md").read_text()), 250),
    ]


def table(figures: list[Row]) -> str:
    lines = ["| what | today | at most | met | where |", "|---|---|---|---|---|"]
    for row in figures:
        target, met = ("", "") if row.target is None else (f"{row.target:,}", "yes" if row.met else "no")
        lines.append(f"| {row.what} | {row.value:,} | {target} | {met} | {row.where} |")
    return "\n".join(lines)


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    args = command.arguments(parser)
    with tempfile.TemporaryDirectory() as cache:
        figures = rows(ROOT, traced(ROOT, "--steps=2", f"--compilation_cache={cache}"))
    print(json.dumps([{**asdict(row), "met": row.met} for row in figures], indent=1) if args.json else table(figures))


if __name__ == "__main__":
    command.run(main)
