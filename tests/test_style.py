"""Rules of the code: names are shapes, only public JAX is used, and modules import from lower floors alone."""

import ast
from pathlib import Path

import pytest

import anatomy
import command
import decoder
from benchmarks import reading

ROOT = Path(decoder.__file__).parent
MODULES = command.modules()
SOURCES = MODULES + sorted(ROOT.glob("tests/*.py")) + sorted(ROOT.glob("benchmarks/*.py"))
name_of = lambda path: path.relative_to(ROOT).as_posix()

# A module imports only from the floors below its own. A leaf never sees the Config, so that it can be lifted out.
FLOORS = [
    {"reference", "presets", "published", "outputs", "inputs"},
    {"command", "storage", "documents"},
    {"tokenization"},
    {"config", "placement", "corpora", "hardware", "hlo", "collectives", "masks", "tuned", "vocabulary", "offload"}
    | {"pipeline", "checksums", "lock"},
    {"families", "prepare", "data_mixtures"},
    {"anatomy", "flags", "tensor_files", "data"},
    {"attention", "flash_backward", "groups", "remote_dma", "interconnect", "transformer", "matrices"}
    | {"compiler_flags", "schedule", "liveness", "schedules", "spikes", "moments"},
    {"bundles", "flash", "gmm", "rules", "sharding", "matmul", "bounds", "serving", "processes", "spatial"}
    | {"trace", "grid"},
    {"moe"},
    {"report", "timeline", "dense", "fp8", "fsdp", "workload", "context", "agreement", "operations"} | {"builders"},
    {"kernels", "log", "corruption", "step", "parameters", "checkpoint", "remat"},
    {"residuals", "cost", "calibration", "machine", "weights", "muon", "initialisation"},
    {"presentation"},
    {"planner"},
    {"recompute", "results", "page"},
    {"mixture", "tensor", "roofline", "recipes"},
    {"decoder"},
    {"model"},
    {"generation", "trained", "qk_clip"},
    {"evaluation", "sampling"},
    {"train"},
    {"aot"},
]
LEAVES = {"sharding", "data", "hardware", "collectives", "masks", "attention", "fsdp", "flash", "flash_backward", "gmm"}
LEAVES |= {
    "builders",
    "dense",
    "kernels",
    "remote_dma",
    "interconnect",
    "matmul",
    "placement",
    "spatial",
    "hlo",
    "schedule",
    "grid",
}
LEAVES |= {"groups", "timeline", "liveness", "tuned", "vocabulary", "offload", "pipeline", "context", "fp8"}
LEAVES |= {"grid", "checksums", "lock", "documents", "corpora", "prepare", "tokenization"}


# -- names that are shapes


def dims_of_weights() -> dict[str, str]:
    """{weight: its dims} by the table of weights: w_q: DNH, as the dim L of a stack is gone in use."""
    return {name: weight.dims.removeprefix("L") for name, weight in anatomy.WEIGHTS.items()}


def dims_of(node: ast.expr, parameters: dict[str, str]) -> str | None:
    """The dims that an operand names: btD for x_btD, the annotation's for w.w_q, None for other expressions."""
    if isinstance(node, ast.Attribute) and node.attr in parameters:
        return parameters[node.attr]
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    stem, _, suffix = name.rpartition("_")
    return suffix if stem and suffix.isalpha() else None


def dotted(node: ast.expr) -> str:
    """The name a.b.c of a chain of attributes, or "" of another expression: ast.unparse for a fraction of its time."""
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return start and f"{start}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def einsum_calls(tree: ast.AST):
    """(call, what it is assigned to) for each einsum."""
    target_of = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target_of[node.value] = node.targets[0]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            target_of[node.value] = node.target
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "einsum":
            yield node, target_of.get(node)


def shape_errors(source: str, parameters: dict[str, str]) -> tuple[list[str], int]:
    """(what is wrong in the einsums of a source, number of names that were looked at)."""
    errors, looked_at = [], 0
    for call, target in einsum_calls(ast.parse(source)) if "einsum" in source else ():
        spec, *operands = call.args
        text = spec.value if isinstance(spec, ast.Constant) else ""
        inputs, arrow, output = text.replace(" ", "").partition("->")
        parts = inputs.split(",")
        if not arrow or len(parts) != len(operands):
            errors.append(
                f"line {call.lineno}: {ast.unparse(spec)} does not name {len(operands)} operands and a result"
            )
            continue
        pairs = list(zip(operands, parts, strict=True))
        pairs += [(target, output)] if isinstance(target, ast.Name) else []
        for node, part in pairs:
            dims = dims_of(node, parameters)
            if dims is None:
                continue
            looked_at += 1
            annotated = isinstance(node, ast.Attribute) and node.attr in parameters
            if (dims.lower(), dims)[not annotated] != (part.lower(), part)[not annotated]:
                errors.append(f"line {call.lineno}: {ast.unparse(node)} is {part!r} in {text!r}")
    return errors, looked_at


def tensor_parallel_errors(source: str, parameters: dict[str, str]) -> tuple[list[str], int]:
    """(what is wrong in the names of column_parallel and row_parallel calls, number of products looked at).

    column_parallel: x's last dim, gathered, is the first one of every weight, and their other dims are the result's.
    row_parallel: all dims of the weight but its last are the last ones of x.
    """
    errors, looked_at = [], 0
    tree = ast.parse(source if "_parallel(" in source else "")
    targets = {node.value: node.targets[0] for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = dotted(call.func)
        if function not in ("column_parallel", "row_parallel"):
            continue
        x = dims_of(call.args[0], parameters)
        weights = call.args[1].elts if isinstance(call.args[1], ast.Tuple) else [call.args[1]]
        results = getattr(targets.get(call), "elts", [None])
        for w, result in zip((dims_of(w, parameters) for w in weights), results, strict=True):
            looked_at += 1
            y = dims_of(result, parameters) if result is not None else None
            if function == "column_parallel":
                wrong = x[-1].upper() != w[0] or not x[-1].islower() or y.lower() != (x[:-1] + w[1:]).lower()
            else:
                wrong = x is not None and not x.lower().endswith(w[:-1].lower())
            if wrong:
                errors.append(f"line {call.lineno}: {x} and {w} make {y} in {ast.unparse(call)}")
    return errors, looked_at


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_tensor_parallel_matmuls_repeat_the_names(path):
    assert tensor_parallel_errors(path.read_text(), dims_of_weights())[0] == []


def test_there_are_tensor_parallel_matmuls_to_look_at():
    assert tensor_parallel_errors(Path(decoder.__file__).read_text(), dims_of_weights())[1] == 13


@pytest.mark.parametrize(
    "line, num_wrong",
    [
        ("q_btnH, k_btkH = column_parallel(h_btd, (w.w_q, w.w_k), config)", 0),
        ("q_btkH, k_btkH = column_parallel(h_btd, (w.w_q, w.w_k), config)", 1),
        ("q_bnH, k_bkH = column_parallel(h_btd, (w.w_q, w.w_k), config)", 2),
        ("q_btnH, k_btkH = column_parallel(h_btD, (w.w_q, w.w_k), config)", 2),
        ("q_btnH, k_btkH = column_parallel(h_btf, (w.w_q, w.w_k), config)", 2),
        ("x_btd + row_parallel(out_btnH, w.w_o, config)", 0),
        ("x_btd + row_parallel(out_btkH, w.w_o, config)", 1),
        ("x_btd + row_parallel(f(x), w.w_o, config)", 0),
    ],
)
def test_the_check_of_tensor_parallel_matmuls_can_fail(line, num_wrong):
    parameters = {"w_q": "DNH", "w_k": "DKH", "w_o": "NHD"}
    assert len(tensor_parallel_errors(line, parameters)[0]) == num_wrong


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_einsums_repeat_the_names(path):
    assert shape_errors(path.read_text(), dims_of_weights())[0] == []


def test_there_are_einsums_to_look_at():
    counts = {path.stem: shape_errors(path.read_text(), dims_of_weights())[1] for path in MODULES}
    assert counts["vocabulary"] >= 7 and counts["generation"] >= 3 and counts["attention"] >= 4


PARAMETERS = {"w_q": "DNH", "embed": "VD"}


@pytest.mark.parametrize(
    "line, wrong",
    [
        ('y_btD = jnp.einsum("btf,fD->btD", h_btf, w_fD)', ""),
        ('y_btD = jnp.einsum("btf, fD -> btD", h_btf, w_fD, preferred_element_type=jnp.float32)', ""),
        ('y_btD = jnp.einsum("btf,fd->btD", h_btf, w_fD)', "w_fD is 'fd'"),
        ('y_btD = jnp.einsum("bTf,fD->btD", h_btf, w_fD)', "h_btf is 'bTf'"),
        ('y_btD = jnp.einsum("btf,fD->btd", h_btf, w_fD)', "y_btD is 'btd'"),
        ('y_btd = jnp.einsum("btf,fD->btD", h_btf, w_fD)', "y_btd is 'btD'"),
        ('dw_fD += jnp.einsum("btf,btD->Df", h_btf, y_btD)', "dw_fD is 'Df'"),
        ('y_tD: jax.Array = einsum("btf,fD->btD", h_btf, w_fD)', "y_tD is 'btD'"),
        ('f(np.einsum("btf,Df->btD", h_btf, w_fD))', "w_fD is 'Df'"),
        ('q_btnH = jnp.einsum("btD,DnH->btnH", h_btD, w.w_q)', ""),
        ('q_btnH = jnp.einsum("btD,nDH->btnH", h_btD, w.w_q)', "w.w_q is 'nDH'"),
        ('logits_btv = jnp.einsum("btD,Dv->btv", x_btD, params.embed)', "params.embed is 'Dv'"),
        ('y_bt = jnp.einsum("btD->bt", batch.x_btH)', "batch.x_btH is 'btD'"),
        ('y_btD = jnp.einsum("btf,fD->btD", silu(gate_btf) * up_btf, w_fD)', ""),
        ('y_btD = jnp.einsum("btf,fD->btD", xs[0], w)', ""),
        ('y_btD = jnp.einsum("btf,fD", h_btf, w_fD)', "does not name 2 operands and a result"),
        ('y_btD = jnp.einsum("btf->btf", h_btf, w_fD)', "does not name 2 operands and a result"),
        ("y_btD = jnp.einsum(spec, h_btf, w_fD)", "does not name 2 operands and a result"),
    ],
)
def test_the_check_of_names_can_fail(line, wrong):
    errors, _ = shape_errors(line, PARAMETERS)
    assert len(errors) == bool(wrong) and all(wrong in error for error in errors)


def test_annotations_are_read():
    dims = dims_of_weights()
    assert (dims["w_q"], dims["w_o"], dims["embed"], dims["norm_mlp"], dims["norm"]) == ("DNH", "NUD", "VD", "D", "D")


# -- imports


def imported(source: str) -> set[str]:
    """Dotted names of all that is imported, anywhere in a source, or reached as an attribute of jax."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and dotted(node).startswith("jax."):
            names.add(dotted(node))
    return names


def private_jax(names: set[str]) -> list[str]:
    return sorted(name for name in names if f"{name}.".startswith(("jax._src.", "jaxlib.")))


def other_tests(names: set[str]) -> list[str]:
    """Test files among the imported names."""
    return sorted(name for name in names if name.startswith("test_"))


def wrong_floors(module: str, source: str) -> list[str]:
    """Imported modules that are not on a lower floor, and the Config in a leaf."""
    names = [name.removeprefix("predicted.").removeprefix("compiled.") for name in imported(source)]
    ours = {name.partition(".")[0] for name in names} & set().union(*FLOORS)
    floor = next(number for number, modules in enumerate(FLOORS) if module in modules)
    below = set().union(*FLOORS[:floor])
    return sorted((ours - below) | (ours & {"config"} if module in LEAVES else set()))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_are_of_public_jax_and_of_no_test_file(path):
    """Helpers that tests share are in tests/support.py and benchmarks/."""
    names = imported(path.read_text())
    assert private_jax(names) == [] and other_tests(names) == []


def test_the_check_of_test_files_can_fail():
    assert other_tests(imported("import test_fsdp\nfrom test_aot import ROOT")) == ["test_aot.ROOT", "test_fsdp"]
    assert not other_tests(imported("from support import ROOT\nimport tests"))


def test_every_module_has_a_floor():
    assert {path.stem for path in MODULES} == set().union(*FLOORS)
    assert sum(map(len, FLOORS)) == len(MODULES)


def test_the_model_brings_no_instruments():
    """A reader of `import model` meets few modules and lines, and none that predicts or compiles."""
    paths = reading.imported(ROOT)
    assert {"model", "decoder", "fsdp"} <= {path.stem for path in paths}
    assert len(paths) <= reading.MOST_MODULES
    assert sum(len(path.read_text().splitlines()) for path in paths) <= reading.MOST_LINES
    assert not {path.stem for path in paths} & {"workload", "step", "planner", "transformer", "schedule", "hlo"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_stand_on_lower_floors(path):
    assert wrong_floors(path.stem, path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import jax._src",
        "from jax import _src",
        "from jax._src import core",
        "from jax._src.lib import xla_client",
        "import jax._src.mesh as mesh_lib",
        "x = jax._src.core.Tracer",
        "def f():\n    from jaxlib.xla_client import Client",
    ],
)
def test_the_check_of_jax_can_fail(line):
    assert private_jax(imported(line))
    public = "import jax\nfrom jax import lax\nfrom jax.experimental import topologies\njax.lax.psum"
    assert not private_jax(imported(public))


@pytest.mark.parametrize(
    "module, line, wrong",
    [
        ("model", "import fsdp, sharding\nfrom config import Config\nimport jax", []),
        ("model", "import train", ["train"]),
        ("attention", "from parameters import Layers", ["parameters"]),
        ("data", "def main():\n    from train import run", ["train"]),
        ("attention", "from config import Config", ["config"]),
        ("sharding", "import config as config_lib", ["config"]),
        ("config", "from predicted import transformer", ["transformer"]),
        ("hlo", "from compiled.schedule import walk", ["schedule"]),
        ("aot", "from compiled import results\nfrom predicted.step import predict", []),
        ("fsdp", "import sharding\nimport model", ["model"]),
    ],
)
def test_the_check_of_floors_can_fail(module, line, wrong):
    assert wrong_floors(module, line) == wrong
