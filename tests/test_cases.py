"""The pages of case studies: their tables are today's predictions and stored results."""

import re

import pytest

import command
from benchmarks import cases
from compiled import results
from published import RECIPES
from recipes import row

PAGES = "".join(page.read_text() for page in cases.PAGES)


def test_every_case_is_on_a_page_once():
    assert sorted(re.findall(r"<!-- case: (.+) -->", PAGES)) == sorted(cases.CASES)


@pytest.mark.parametrize("name", cases.CASES)
def test_its_table_is_the_one_of_today(name):
    block = re.search(rf"<!-- case: {name} -->\n(.*?)\n<!-- end -->", PAGES, re.DOTALL)[1]
    assert block == cases.table(name)


def test_predictions_are_for_what_is_predicted_alone(monkeypatch):
    """A row whose flag changes no prediction has no predicted step, and a run that does not fit has only its memory."""
    stored = dict(fits=True, step_s=2.0, mfu=0.5, exposed_comm_s=0.5, peak_hbm_bytes=2**31)
    monkeypatch.setattr(results, "load", lambda _: stored)
    rows = cases.table("vmem").splitlines()[4:]
    assert all(row.endswith("| 2.000 s | 50.0% | 25.0% | 2.0 |") for row in rows)
    assert [row.count("|  |  |  |  |") for row in rows] == [0, 0, 0, 0]
    assert [row.count("|  |  |  |  |") for row in cases.table("max logit").splitlines()[4:]] == [0, 1]
    on_tensor_cores = [row for row in cases.table("offload").splitlines() if "on the TensorCores" in row]
    assert len(on_tensor_cores) == 2 and all("|  |  |  |  |" in row for row in on_tensor_cores)
    assert re.search(r"\| 128k, .* \| does not fit \|  \|  \| 367.2 \|", cases.table("length"))


def test_what_is_missing_is_asked_for_if_told(monkeypatch):
    asked = []
    monkeypatch.setattr(results, "load_or_compile", lambda prediction: asked.append(prediction) or dict(fits=False))
    assert cases.table("cores", compile_missing=True).endswith("| refused |  |  |  |")
    assert [prediction.run.config.core_axis for prediction in asked] == ["", "fsdp", ""]


def test_a_case_that_is_none(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.run(cases.main, ["speed"])
    assert "there is no 'speed'; there are offload" in capsys.readouterr().err


def test_the_gains_of_8_bits_are_those_of_the_recipes():
    steps = {name: row(name) for name in RECIPES if "v6e" not in name and "1m" not in name}
    predicted, compiled_ones = {}, {}
    for name, bf16 in steps.items():
        if name.endswith("-bf16"):
            fp8, model = steps[name.replace("bf16", "fp8")], RECIPES[name].preset
            kind = "128k" if "128k" in name else "dense" if model.startswith(("llama", "gemma")) else "experts"
            predicted.setdefault(kind, []).append(bf16["step_s"] / fp8["step_s"])
            if bf16["compiled"] and fp8["compiled"]:
                compiled_ones.setdefault(kind, []).append(bf16["compiled"]["step_s"] / fp8["compiled"]["step_s"])
    ranges = lambda gains: {
        kind: " to ".join(f"{x:.2f}" for x in sorted({min(xs), max(xs)})) for kind, xs in gains.items()
    }
    text = "| {dense} dense at 8k, {128k} at 128k, {experts} experts, predicted; "
    text += "{0[dense]}, {0[128k]} and {0[experts]} compiled |"
    assert sum(map(len, compiled_ones.values())) >= len(predicted) * 2
    assert text.format(ranges(compiled_ones), **ranges(predicted)) in PAGES
