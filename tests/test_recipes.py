"""Named runs: each is legal and fits, is the same for every program, and is printed as published."""

import dataclasses
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes

import aot
import command
import compiler_flags
import config as config_lib
import flags as flags_lib
import recipes
import roofline
import rules
import tuned
from config import Config
from flags import from_preset, from_recipe
from hardware import by, parse_topology
from predicted import planner
from predicted.step import GiB, predict
from predicted.workload import run_of
from published import RECIPES

ROOT = Path(recipes.__file__).parent
SHOWN = (ROOT / "docs/RESULTS.md").read_text()
EVERY = pytest.mark.parametrize("name", RECIPES)
BF16, FP8 = "llama3.1-70b-8k-bf16", "llama3.1-70b-8k-fp8"


def parsed(*argv: str) -> Config:
    return flags_lib.parse_flags(config_lib.__file__, argv)


def block(name: str) -> str:
    """The text between the markers that benchmarks/readme.py fills in docs/RESULTS.md."""
    return re.search(rf"<!-- predicted: {name} -->\n(.*?)\n<!-- end -->", SHOWN, re.DOTALL)[1]


# -- each recipe


@EVERY
def test_is_legal_and_fits(name):
    """The model, mesh and batch divide, and there is code for all of it; otherwise there is no prediction."""
    prediction = recipes.predicted(name)
    config = prediction.run.config
    assert prediction.fits
    assert config.recipe == name and config.preset == RECIPES[name].preset
    assert compiler_flags.for_run(config) or prediction.run.chip.name != "tpu7x"


@EVERY
def test_the_name_has_model_length_and_precision(name):
    """Each recipe has a source; if that is a folder of tpu-recipes, it has the name of the slice."""
    recipe, config = RECIPES[name], from_recipe(name)
    length = {4096: "4k", 8192: "8k", 131_072: "128k", 1_048_576: "1m"}[config.seq_len]
    precision = "bf16" if config.fp8 == "none" else "fp8"
    assert name.removesuffix("-v6e") == f"{recipe.preset}-{length}-{precision}"
    assert recipe.source
    if slice_of_source := re.search(r"tpu7x-(\w+)$", recipe.source):
        assert recipe.topology == f"tpu7x:{slice_of_source[1]}" and recipe.measured_step_s
        assert f"/{length}-{precision}-" in recipe.source
    if recipe.measured_tflops:  # an MFU that is possible
        chip, _ = parse_topology(recipe.topology)
        assert 0.1 < recipe.measured_tflops * 1e12 / chip.flops_per_s(precision) < 0.6


def test_every_model_has_both_precisions():
    both = {name.rpartition("-")[0] for name in RECIPES if name.endswith("-fp8")}
    assert both == {name.removesuffix("-bf16") for name in RECIPES if name.endswith("-bf16")}
    lengths = ("llama3.1-8b-8k llama3.1-70b-8k llama3.1-405b-8k llama3.1-70b-128k llama3.1-8b-1m qwen3-235b-a22b-4k "
               "deepseek-v3-4k gpt-oss-120b-8k mixtral-8x7b-4k gemma4-31b-8k")  # fmt: skip
    assert both == set(lengths.split())


def test_why_deepseeks_weights_are_not_gathered_ahead():
    """Two gathered layers of experts do not fit; compiled they need 106.6 GiB."""
    assert recipes.predicted("deepseek-v3-4k-bf16").fits
    ahead = from_recipe("deepseek-v3-4k-bf16", prefetch=True)
    prediction = predict(run_of(ahead, *parse_topology(RECIPES["deepseek-v3-4k-bf16"].topology)))
    assert not prediction.fits and prediction.memory["gathered weights"] > 60 * GiB
    assert sum(prediction.memory.values()) == pytest.approx(106.6 * GiB, rel=0.05)


# -- every program


@EVERY
def test_every_program_has_the_same_config(name, monkeypatch, capsys):
    """train.py parses what aot.py compiles and roofline.py predicts; the last two use the same slice."""
    seen = []
    flag = f"--recipe={name}"
    recipe = RECIPES[name]
    config = parsed(flag)
    assert config == from_recipe(name) == dataclasses.replace(
        from_preset(recipe.preset, **recipe.flags), recipe=name
    )  # fmt: skip
    monkeypatch.setattr(aot, "report", lambda config, args, *_: seen.append((config, args)) or {})
    monkeypatch.setattr(compiler_flags, "set_init_args", lambda flags: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(compiler_flags, "without_tpu", lambda: None)
    assert aot.main([flag, "--json"]) == 0
    ((compiled, args),) = seen
    assert compiled == config and (args.topology, args.num_slices) == (recipe.topology, recipe.num_slices)
    capsys.readouterr()
    roofline.main(["step", flag, "--json"])
    result, expected = json.loads(capsys.readouterr().out), recipes.predicted(name)
    assert result["step_s"] == expected.step_s and result["hbm_bytes"] == expected.hbm_bytes
    assert result["topology"] == recipe.topology and expected.run.config == config


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * name.endswith("bf16")) for name in RECIPES]
)
def test_the_step_lowers(name):
    """All layers lower for the slice, which leaves only the compiler's part. The kernels' block sizes were tuned.

    Those of Gemma 4's heads of 512, of gpt-oss's gate and up in one kernel, of DeepSeek-V3's experts in bfloat16, and
    of gradients through the experts' activation were not.
    """
    recipe = RECIPES[name]
    lowered = aot.lower_step(from_recipe(name), recipe.topology, recipe.num_slices)
    devices = math.prod(recipes.predicted(name).run.sizes.values())
    assert re.search(r"mhlo.num_partitions = (\d+)", lowered.program.as_text())[1] == str(devices)
    keys = {kernel["tuned_key"] for kernel in aot.kernels_of(lowered)}
    untuned = re.compile(r"H=512|K=2880 N=2880 .*(gated|summed)=True|M=262144 .*E=256 dtype=bfloat16|gradient=True")
    without = {key for key in keys - tuned.read(tuned.CHECKED_IN).keys() if not untuned.search(key)}
    assert keys and (not without or not recipe.topology.startswith("tpu7x"))


@pytest.mark.slow
def test_other_programs_use_its_slice(capsys):
    output = lambda main, *argv: (main(list(argv)), capsys.readouterr().out)[1]
    flag, topology = "--recipe=llama3.1-405b-8k-fp8", "tpu7x:4x8x8"
    assert json.loads(output(roofline.main, "bounds", flag, "--json"))["topology"] == topology
    assert json.loads(output(roofline.main, "plan", flag, "--json"))["best"]["topology"] == topology
    cost = json.loads(output(roofline.main, "cost", flag, "--json", "--tokens=15e12"))
    assert cost["num_chips"] == 256
    policies = json.loads(output(roofline.main, "remat", flag, "--json"))["policies"]
    assert policies["custom"]["step_s"] == recipes.predicted("llama3.1-405b-8k-fp8").step_s
    assert json.loads(output(roofline.main, "model", flag, "--json"))["preset"] == "llama3.1-405b"


@pytest.mark.slow
def test_flags_override_a_recipe(capsys):
    config = parsed("--batch=512", f"--recipe={BF16}", "--mu_dtype=float32", "--no-prefetch")
    assert config == dataclasses.replace(from_recipe(BF16), batch=512, mu_dtype="float32", prefetch=False)
    assert parsed(f"--recipe={BF16}", "--preset=llama3.1-8b").num_layers == 32
    assert parsed("--recipe=", "--batch=3") == from_preset("tiny", batch=3)
    # The tensors of the recipe's policy do not apply to another policy.
    assert parsed(f"--recipe={BF16}", "--remat=full") == dataclasses.replace(
        from_recipe(BF16), remat="full", remat_tensors=""
    )
    step = lambda *flags: (roofline.main(["step", *flags, "--json"]), json.loads(capsys.readouterr().out))[1]
    for flags in (
        ["--topology=tpu7x:4x8x8", f"--recipe={BF16}"],  # in any order, also if it is the program's default slice
        [f"--recipe={BF16}", "--topology=tpu7x:4x8x8"],
    ):
        assert step(*flags, "--mesh=fsdp:512", "--batch=1024")["topology"] == "tpu7x:4x8x8"
    assert step("--recipe=llama3.1-405b-8k-bf16", "--topology=tpu7x:4x4x4", "--mesh=fsdp:128")["num_chips"] == 64
    two = step(f"--recipe={BF16}", "--num_slices=2", "--mesh=data:2,fsdp:128", "--batch=512")
    assert two["num_slices"] == 2 and two["num_chips"] == 128
    assert step("--preset=llama3.1-8b")["topology"] == "tpu7x:4x4x4"
    # With --chips the run is not the recipe's.
    roofline.main(["cost", f"--recipe={BF16}", "--chips=512", "--mfu=0.4", "--json"])
    assert json.loads(capsys.readouterr().out)["num_chips"] == 512


def test_the_number_of_slices_is_the_recipes(monkeypatch):
    two = dataclasses.replace(RECIPES[BF16], num_slices=2)
    monkeypatch.setitem(RECIPES, BF16, two)
    args = lambda **given: config_lib.argparse.Namespace(
        **dict(recipe=BF16, topology=None, num_slices=None, default_topology="tpu7x:2x2x1") | given
    )
    assert flags_lib.slice_of(args()) == ("tpu7x:4x4x4", 2)
    assert flags_lib.slice_of(args(num_slices=1)) == ("tpu7x:4x4x4", 1)
    assert flags_lib.slice_of(args(topology="v6e:4x4")) == ("v6e:4x4", 2)
    assert flags_lib.slice_of(args(recipe="")) == ("tpu7x:2x2x1", 1)


@pytest.mark.slow
@pytest.mark.parametrize("wrong, words", [("lama3.1-70b-8k-fp8", f"did you mean {FP8}, "), ("zzz", "there are ")])
def test_a_recipe_that_does_not_exist(wrong, words, capsys):
    for main in (
        lambda: parsed(f"--recipe={wrong}"),
        lambda: aot.main([f"--recipe={wrong}"]),
        lambda: roofline.main(["step", f"--recipe={wrong}"]),
        lambda: roofline.main(["plan", f"--recipe={wrong}"]),
        lambda: recipes.main([wrong]),
    ):
        with pytest.raises(SystemExit) as ended:
            command.run(main)
        assert ended.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"recipe={wrong!r} does not exist; " in error and words in error


def test_help_names_every_recipe(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in RECIPES)


@pytest.mark.slow
def test_train_runs_a_recipe(tmp_path):
    """A small model with the recipe's recomputation and first moment runs; its compiler flags need a TPU."""
    flags = [f"--recipe={BF16}", "--preset=tiny", "--mesh=fsdp:8", "--batch=16", "--seq_len=128", "--steps=2"]
    flags += ["--sample=0", "--eval_batches=1", f"--compilation_cache={tmp_path}"]
    run = lambda *more: subprocess.run(
        [sys.executable, "train.py", *flags, *more], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    done = run("--xla_flags=none")
    assert done.returncode == 0 and "step 2/2  held-out loss" in done.stdout and "fsdp 8" in done.stdout, done.stderr
    done = run()
    assert done.returncode and "xla_flags='recommended' are for a TPU's compiler" in done.stderr


# -- output


def test_as_json(capsys):
    recipes.main(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    for row in rows:
        recipe = RECIPES[row["recipe"]]
        chip, chips = parse_topology(recipe.topology)
        assert row["topology"] == recipe.topology == f"{chip.name}:{by(chips)}"
        assert {"mesh", "batch", "seq_len", "step_s", "mfu", "hbm_bytes", "hbm_limit_bytes", "fits"} <= row.keys()
        assert row["fits"] and row["source"] == recipe.source and row["differs"] == recipe.differs
        assert row["measured_step_s"] == recipe.measured_step_s
        if recipe.measured_step_s:
            assert row["ratio"] == row["predicted_of_measured_s"] / recipe.measured_step_s
        else:
            assert row["ratio"] is row["predicted_of_measured_s"] is row["measured_mfu"] is None
    bf16 = next(row for row in rows if row["recipe"] == BF16)
    assert bf16["measured_mfu"] == pytest.approx(0.523, abs=5e-4)


@pytest.mark.slow
def test_the_picture_has_every_figure_of_the_table(capsys, tmp_path, monkeypatch):
    points, scatter = [], Axes.scatter
    counted = lambda axes, x, *args, **options: points.append(len(x)) or scatter(axes, x, *args, **options)
    monkeypatch.setattr(Axes, "scatter", counted)
    recipes.main([f"--plot={tmp_path / 'recipes.png'}"])
    assert capsys.readouterr().out.strip() == block("recipes") and (tmp_path / "recipes.png").stat().st_size > 10_000
    rows = list(map(recipes.row, RECIPES))
    fitting = [row for row in rows if row["compiled"] and row["compiled"]["fits"]]
    assert points == [len(rows), len(fitting), *[sum(bool(row["measured_mfu"]) for row in rows)] * 2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--better"], "one of --better"), (["--what_if"], "one of --better"), ([], "nowhere"), ([], "matplotlib")],
)
def test_pictures_that_cannot_be(flags, words, capsys, monkeypatch):
    if words == "matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="1" if words == "nowhere" else "2"):
        command.run(recipes.main, [BF16, "--plot=/nowhere/recipes.png", *flags])
    assert words in capsys.readouterr().err


def test_the_readmes_table_is_current(capsys):
    recipes.main([])
    assert block("recipes") == capsys.readouterr().out.strip()


def test_needs_no_jax_and_is_quick():
    """The table takes a second, and at most 20 on two busy cores."""
    command = [sys.executable, "-X", "importtime", "recipes.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    imported = set(re.findall(r"\|\s*(\S+)$", done.stderr, re.MULTILINE))
    assert "predicted.planner" in imported and not {"jax", "numpy"} & imported
    assert done.stdout.count("GiB a device") == 1 and done.stdout.count(", fits |") == len(RECIPES)


# -- better plans


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        BF16,
        "llama3.1-70b-8k-fp8",
        "llama3.1-8b-8k-bf16-v6e",
    ],
)
def test_the_flags_of_a_better_plan_give_its_step(name, capsys, monkeypatch):
    """With --recipe they give the planner's step, and the differences of the parts add up to that of the step.

    The plan is the one that docs/RESULTS.md shows.
    """
    plan = recipes.better(name)
    own_s, step_s = plan["step_s"]
    assert plan["gain"] == own_s / step_s - 1
    gain = plan["gain"] if plan["compiled_gain"] is None else plan["compiled_gain"]
    assert gain > planner.WITHIN - 1 and (name != BF16 or plan["compiled_gain"])
    assert sum(plan["more_s"].values()) == pytest.approx(step_s - own_s)
    roofline.main(["step", f"--recipe={name}", *plan["flags"], "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["step_s"] == step_s and result["hbm_bytes"] == plan["hbm_bytes"][1]
    assert result["hbm_bytes"] <= planner.MEMORY_SHARE * result["hbm_limit_bytes"]
    config = parsed(f"--recipe={name}", *plan["flags"])
    run = run_of(config, *parse_topology(RECIPES[name].topology))
    rules.check(config, run.sizes)  # there is code for it
    monkeypatch.setattr(recipes, "better", lambda name: plan)
    recipes.main([name, "--better"])
    said = capsys.readouterr().out
    assert f"{name}: better: {' '.join(plan['flags'])}\n" in said and f"{plan['gain']:+.1%} speed" in said
    (shown,) = re.findall(rf"^{name}: better: .*\n(?: .*\n)+", block("better recipes") + "\n", re.MULTILINE)
    assert shown in said


@pytest.mark.slow
def test_compiled_steps_decide():
    """They decide whatever was predicted. A plan that does not fit is worse."""
    plan = recipes.better("llama3.1-8b-8k-bf16") | dict(gain=0.10)
    compiled = lambda step_s: dict(fits=True, step_s=step_s, mfu=0.5, peak_hbm_bytes=2**36)
    for after, gain, words in ((9.0, 1 / 9, "better"), (10.0, 0.0, "as good"), (12.5, -0.2, "none is")):
        steps = (compiled(10.0), compiled(after))
        assert recipes._gain(*steps) == pytest.approx(gain)
        said = recipes.describe_better(plan | dict(compiled=steps, compiled_gain=gain))
        assert f": {words}" in said and f"{gain:+.1%} speed" in said.splitlines()[2]
    assert recipes._gain(compiled(10.0), dict(fits=False)) == -1 and recipes._gain(compiled(10.0), None) is None


@pytest.mark.slow
def test_it_says_if_no_plan_is_better():
    plan = recipes.better("llama3.1-8b-1m-bf16")
    assert plan["flags"] == [] and recipes.describe_better(plan).endswith("s, and the planner finds the same")
    plan = recipes.better("llama3.1-70b-128k-bf16")  # it fills 98% of the memory; the planner leaves 8% free
    assert plan["gain"] < 0 and "none is better, its answer: --" in recipes.describe_better(plan)


# -- another chip


def test_what_if_is_the_step_on_such_a_chip(capsys):
    """roofline.py predicts the same step. A part that no kernel waits for gains nothing."""
    own = recipes.what_if(BF16)
    for case, figures in (
        ("matrix units", "bf16_flops_per_s=2x+fp8_flops_per_s=2x"),
        ("HBM's bandwidth", "hbm_bytes_per_s=2x"),
    ):
        roofline.main(["step", f"--recipe={BF16}", f"--topology=tpu7x+{figures}:4x4x4", "--json"])
        result = json.loads(capsys.readouterr().out)
        assert result["topology"] == f"tpu7x+{figures}:4x4x4"
        assert own["gain"][case] == pytest.approx(own["step_s"] / result["step_s"] - 1)
    assert min(own["gain"].values()) >= 0 and own["gain"]["links"] < 0.01 < own["gain"]["HBM's bytes"]
    long = recipes.what_if("llama3.1-8b-1m-bf16")["gain"]
    assert long["matrix units"] > 0.9 and long["HBM's bandwidth"] < 0.03  # nearly all of it is attention


@pytest.mark.slow
def test_the_other_chips_in_the_results_are_current(capsys):
    recipes.main(["--what_if"])
    assert block("what if") == capsys.readouterr().out.strip()


def test_a_chip_that_does_not_exist_has_no_compiler(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.run(aot.main, ["--preset=tiny", "--topology=tpu7x+hbm_bytes=2x:2x2x1", "--mesh=fsdp:8"])
    assert "no compiler for a chip that is not there; roofline.py" in capsys.readouterr().err


def test_a_flag_resets_the_recipes_flags_that_lose_their_effect():
    """Only those: if the recipe's policy is named again, its tensors stay."""
    assert from_recipe("deepseek-v3-4k-fp8", fp8="none").fp8_modules == Config.fp8_modules
    assert from_recipe(BF16, optimizer="sgd").mu_dtype == Config.mu_dtype
    assert from_preset("gpt-oss-120b", window=0).global_every == 0
    own = RECIPES[BF16].flags["remat_tensors"]
    assert from_recipe(BF16, remat="custom").remat_tensors == own != from_recipe(BF16, remat="full").remat_tensors
    with pytest.raises(ValueError, match="mu_dtype=bfloat16 has no effect"):
        from_recipe(BF16, optimizer="sgd", mu_dtype="bfloat16")
