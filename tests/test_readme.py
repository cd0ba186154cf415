"""The README and the pages in docs/: their commands run, and what they point to exists."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import ON_TENSOR_CORES

import command
import config as config_lib
import flags as flags_lib
import train

ROOT = Path(__file__).parents[1]
README, COMMANDS_PAGE, FILES, RESULTS, CASES = (
    (ROOT / name).read_text()
    for name in ("README.md", "docs/COMMANDS.md", "docs/FILES.md", "docs/RESULTS.md", "docs/CASES.md")
)
COMMANDS = [
    line.split("  #")[0].strip(" &")
    for block in re.findall(r"```sh\n(.*?)```", README + COMMANDS_PAGE, re.DOTALL)
    for line in block.splitlines()
]
TRAIN = [shlex.split(command) for command in COMMANDS if command.startswith("python train.py")]


def test_the_two_commands_of_a_newcomer_are_there():
    assert COMMANDS[0] == "pip install -e . && python train.py"
    assert COMMANDS[1] == 'pip install -e ".[test]" && pytest'


@pytest.mark.parametrize("command", TRAIN, ids=" ".join)
def test_flags_exist_and_go_together(command):
    flags_lib.parse_flags("train.py", command[2:])


def test_flags_on_the_page_about_clouds_exist():
    """Flags of gcloud and of its node pools are the only others."""
    flags = set(re.findall(r"--([a-z_]+)", (ROOT / "docs/RUNNING.md").read_text()))
    ours = {field.name for field in dataclasses.fields(config_lib.Config)} | {"topology", "num_slices", "json"}
    of_gcloud = {"recurse", "worker", "zone", "command", "region", "cluster", "type", "accelerator", "tpu", "placement"}
    assert flags - ours == of_gcloud | {"node", "machine", "num", "predicted", "trace", "out", "tokenizer"}


LOCAL = [c for c in TRAIN if not re.search(r"--coordinator|--preset=(?!tiny)|--recipe", " ".join(c))]


@pytest.mark.at_most(8)
@pytest.mark.slow
@pytest.mark.parametrize("command", LOCAL, ids=" ".join)
def test_commands_run(command, tmp_path, capfd):
    """In small, in this process: 6 steps of one narrow layer, or one a stage. The later of two equal flags counts."""
    less = [
        "--model_dim=64",
        "--head_dim=8",
        "--seq_len=64",
        "--steps=6",
        f"--num_layers={2 if any('pipe:2' in flag for flag in command) else 1}",
        "--eval_batches=1",
        "--sample=0",
        "--compilation_cache=",
    ]
    written = [f"{flag.split('=')[0]}={tmp_path}" for flag in command if "_dir=" in flag]
    train.run(flags_lib.parse_flags("train.py", [*command[2:], *less, *written]))
    printed = capfd.readouterr()
    assert "step 6/6  held-out loss" in printed.out and printed.err == ""


ON_A_RUN = [c for c in COMMANDS if re.match(r"python (sampling|evaluation|report)\.py", c)]


@pytest.mark.slow
def test_commands_that_read_a_run(tmp_path):
    """It has one narrow layer, a checkpoint, and metrics."""
    saved, cache = f"--checkpoint_dir={tmp_path / 'saved'}", f"--compilation_cache={tmp_path / 'cache'}"
    run = [*TRAIN[0], "--num_layers=1", "--model_dim=32", "--ff_dim=32", "--head_dim=4", "--steps=2", "--seq_len=64"]
    run += ["--mesh=", "--eval_batches=0", "--sample=0", saved, cache, f"--metrics_file={tmp_path}/metrics.jsonl"]
    own = {"--checkpoint_dir=runs/a": saved, "metrics.jsonl": f"{tmp_path}/metrics.jsonl"}
    own["--report=pages/run"] = f"--report={tmp_path}/page"
    for words in [run, *map(shlex.split, ON_A_RUN)]:
        words = [own.get(word, word) for word in words[1:]]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout and done.stderr == "", done.stderr


# The tests of these files run them, and read what they print.
ELSEWHERE = ("python gmm.py", "python moe.py", "python remote_dma.py", "python spatial.py")
COMPILED = [c for c in COMMANDS if c.startswith("python aot.py --")]
DEMONSTRATIONS = [
    c
    for c in COMMANDS
    if re.match(r"python (?!train|data|sampling|evaluation|report)\w+\.py", c) and c not in (*ELSEWHERE, *COMPILED)
]
FEW_TILES = ['sizes={"full_unroll": 2, "masked_unroll": 2, "ahead": 1}']  # of an iteration, in place of 24


@pytest.mark.parametrize("command", [pytest.param(c, marks=[pytest.mark.slow]) for c in DEMONSTRATIONS])
def test_demonstrations_run(command):
    """A kernel that is compiled is a smaller one. The later of two equal flags counts."""
    less = FEW_TILES if command.startswith("python aot.py bundles compiled.builders:flash") else []
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], *less], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3 and done.stderr == ""


# A step of a narrow model compiles in half the time with its collectives on the TensorCores. tests/test_aot.py has what
# is reported of one that is compiled for the SparseCores.
NARROW = (
    "--topology=tpu7x:2x2x1 --mesh=fsdp:8 --batch=8 --microbatches=1 --num_layers=4 --model_dim=512 --ff_dim=1024 "
    "--num_heads=4 --num_kv_heads=2 --vocab_size=2048 --seq_len=512 --attention=reference"
).split()
NARROW += ["--xla_flags=" + ",".join(f"{name}={value}" for name, value in ON_TENSOR_CORES.items())]


@pytest.mark.slow
def test_commands_that_compile_a_step_run(tmp_path):
    """Each compiles a narrow one, without kernels. The second, of the first one's model, reads it from the cache."""
    assert len(COMPILED) == 5
    own = {"--trace=step.json": f"--trace={tmp_path}/step.json", "--report=pages/8b": f"--report={tmp_path}/page"}
    for compiled in COMPILED:
        words = [own.get(word, word) for word in shlex.split(compiled)[1:]]
        words += [*NARROW, f"--compilation_cache={tmp_path}/cache"]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) >= 3 and done.stderr == ""
    assert (tmp_path / "step.json").stat().st_size and list((tmp_path / "page").glob("*.html"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_default_run_learns_more_than_a_bigram_model(tmp_path):
    """After less than half of its steps."""
    command = [sys.executable, "train.py", "--steps=130", f"--compilation_cache={tmp_path}"]
    optimized = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=optimized)
    loss, bigram = re.search(r"held-out   loss ([\d.]+) .* model's ([\d.]+) ", done.stdout).groups()
    assert float(loss) < float(bigram) - 0.3


def test_what_it_points_to_is_there():
    pages = [(page.read_text(), page.parent) for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    for text, folder in pages:
        for path in re.findall(r"\]\(((?:\.\./)?\w[\w./]*)[)#]", text):
            assert (folder / path).exists(), path
        for path in re.findall(r"\b((?:tests|benchmarks)/\w+\.py)", text):
            assert (ROOT / path).exists(), path
    headings = re.findall(r"^## (.*)", RESULTS, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert re.findall(r"^\| \[(.+?)\]\(#([\w-]+)\)", RESULTS, re.MULTILINE) == [*zip(headings, anchors, strict=True)]
    assert {*re.findall(r"\(docs/RESULTS.md#([\w-]+)\)", README)} <= {*anchors}
    sections = re.findall(r'RESULTS\.md,\s"([^"]+)"', CASES)
    assert len(sections) >= 6 and {" ".join(name.split()) for name in sections} <= {*headings}
    for module in command.modules():
        path = module.relative_to(ROOT).as_posix()
        link, tests = f"[{path}](../{path})", f"tests/test_{module.name}"
        row = next((line for line in FILES.splitlines() if line.startswith("| [") and link in line), "")
        assert row, f"{module.name} is not in docs/FILES.md"
        assert (f"[test](../{tests})" in row) == (ROOT / tests).exists(), f"{tests} is not in the row of {path}"


def test_figures_are_there():
    """benchmarks/readme.py writes the measured text between these marks."""
    for text, name in ((README, "default run"), (COMMANDS_PAGE, "default run in full"), (RESULTS, "one device")):
        assert len(re.search(rf"<!-- measured: {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)[1]) > 200


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len(README.partition("## Read it")[0].split()) <= 250
