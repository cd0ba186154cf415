"""Named runs: each legal, each fits, the same for every program; and what is printed of them."""

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
SHOWN = (ROOT / "README.md").read_text() + (ROOT / "docs/RESULTS.md").read_text()
EVERY = pytest.mark.parametrize("name", RECIPES)
BF16, FP8 = "llama3.1-70b-8k-bf16", "llama3.1-70b-8k-fp8"


def parsed(*argv: str) -> Config:
    return flags_lib.parse_flags(config_lib.__file__, argv)


def block(name: str) -> str:
    """What benchmarks/readme.py put between the markers of README.md and RESULTS.md."""
    return re.search(rf"<!-- predicted: {name} -->\n(.*?)\n<!-- end -->", SHOWN, re.DOTALL)[1]


# -- each of them


@EVERY
def test_is_legal_and_fits(name):
    """The model, mesh and batch divide, and there is code for all of it: else it would not be predicted."""
    found = recipes.predicted(name)
    config = found.run.config
    assert found.fits
    assert config.recipe == name and config.preset == RECIPES[name].preset
    assert compiler_flags.for_run(config) or found.run.chip.name != "tpu7x"


@EVERY
def test_says_what_it_is(name):
    """By name: model, length, precision. And each has a source; a folder of tpu-recipes has the slice's name, too."""
    recipe, config = RECIPES[name], from_recipe(name)
    length = {4096: "4k", 8192: "8k", 131_072: "128k", 1_048_576: "1m"}[config.seq_len]
    precision = "bf16" if config.fp8 == "none" else "fp8"
    assert name.removesuffix("-v6e") == f"{recipe.preset}-{length}-{precision}"
    assert recipe.source
    if slice_of_source := re.search(r"tpu7x-(\w+)$", recipe.source):
        assert recipe.topology == f"tpu7x:{slice_of_source[1]}" and recipe.measured_step_s
        assert f"/{length}-{precision}-" in recipe.source
    if recipe.measured_tflops:  # of itself: MFU under 1 of what the chip can do
        chip, _ = parse_topology(recipe.topology)
        assert 0.1 < recipe.measured_tflops * 1e12 / chip.flops_per_s(precision) < 0.6


def test_every_model_is_there_in_both_precisions():
    both = {name.rpartition("-")[0] for name in RECIPES if name.endswith("-fp8")}
    assert both == {name.removesuffix("-bf16") for name in RECIPES if name.endswith("-bf16")}
    lengths = ("llama3.1-8b-8k llama3.1-70b-8k llama3.1-405b-8k llama3.1-70b-128k llama3.1-8b-1m qwen3-235b-a22b-4k "
               "deepseek-v3-4k gpt-oss-120b-8k mixtral-8x7b-4k gemma-31b-like-8k")  # fmt: skip
    assert both == set(lengths.split())


def test_why_deepseeks_mesh_is_not_the_published_one():
    """Two whole layers of experts: what the recipe says that it differs for."""
    recipe = RECIPES["deepseek-v3-4k-bf16"]
    published = from_recipe("deepseek-v3-4k-bf16", mesh="fsdp:512")
    found = predict(run_of(published, *parse_topology(recipe.topology)))
    assert not found.fits and found.memory["gathered weights"] > 60 * GiB
    assert "fsdp_transpose:2" in recipe.differs
    once = predict(run_of(dataclasses.replace(published, prefetch=False), *parse_topology(recipe.topology)))
    assert once.fits and once.step_s > 1.3 * recipes.predicted("deepseek-v3-4k-bf16").step_s


# -- the same for every program


@EVERY
def test_the_same_config_for_every_program(name, monkeypatch, capsys):
    """What train.py parses, aot.py compiles and roofline.py predicts; and the slice of the last two."""
    seen = []
    flag = f"--recipe={name}"
    recipe = RECIPES[name]
    config = parsed(flag)
    assert config == from_recipe(name) == dataclasses.replace(
        from_preset(recipe.preset, **recipe.flags), recipe=name
    )  # fmt: skip
    monkeypatch.setattr(aot, "report", lambda config, args, flags: seen.append((config, args)) or {})
    monkeypatch.setattr(compiler_flags, "set_init_args", lambda flags: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(compiler_flags, "without_tpu", lambda: None)
    assert aot.main([flag, "--json"]) == 0
    ((compiled, args),) = seen
    assert compiled == config and (args.topology, args.num_slices) == (recipe.topology, recipe.num_slices)
    capsys.readouterr()
    roofline.main(["step", flag, "--json"])
    found, expected = json.loads(capsys.readouterr().out), recipes.predicted(name)
    assert found["step_s"] == expected.step_s and found["hbm_bytes"] == expected.hbm_bytes
    assert found["topology"] == recipe.topology and expected.run.config == config


@pytest.mark.slow
@EVERY
def test_the_step_is_made_of_it(name):
    """All layers, lowered for the slice: what is left is the compiler's part. Its kernels' block sizes were tuned."""
    recipe = RECIPES[name]
    lowered = aot.lower_step(from_recipe(name), recipe.topology, recipe.num_slices)
    devices = math.prod(recipes.predicted(name).run.sizes.values())
    assert re.search(r"mhlo.num_partitions = (\d+)", lowered.program.as_text())[1] == str(devices)
    keys = {said["tuned_key"] for said in aot.kernels_of(lowered)}
    assert keys and (keys <= tuned.read(tuned.CHECKED_IN).keys() or not recipe.topology.startswith("tpu7x"))


@pytest.mark.slow
def test_other_programs_take_its_slice(capsys):
    said = lambda main, *argv: (main(list(argv)), capsys.readouterr().out)[1]
    flag, topology = "--recipe=llama3.1-405b-8k-fp8", "tpu7x:4x8x8"
    assert json.loads(said(roofline.main, "bounds", flag, "--json"))["topology"] == topology
    assert json.loads(said(roofline.main, "plan", flag, "--json"))["best"]["topology"] == topology
    cost = json.loads(said(roofline.main, "cost", flag, "--json", "--tokens=15e12"))
    assert cost["num_chips"] == 256
    policies = json.loads(said(roofline.main, "remat", flag, "--json"))["policies"]
    assert policies["custom"]["step_s"] == recipes.predicted("llama3.1-405b-8k-fp8").step_s
    assert json.loads(said(roofline.main, "model", flag, "--json"))["preset"] == "llama3.1-405b"


@pytest.mark.slow
def test_flags_beside_it_override_it(capsys):
    config = parsed("--batch=512", f"--recipe={BF16}", "--mu_dtype=float32", "--no-prefetch")
    assert config == dataclasses.replace(from_recipe(BF16), batch=512, mu_dtype="float32", prefetch=False)
    assert parsed(f"--recipe={BF16}", "--preset=llama3.1-8b").num_layers == 32
    assert parsed("--recipe=", "--batch=3") == from_preset("tiny", batch=3)
    # Of another policy, the tensors of the recipe's own are no part.
    assert parsed(f"--recipe={BF16}", "--remat=full") == dataclasses.replace(
        from_recipe(BF16), remat="full", remat_tensors=""
    )
    step = lambda *flags: (roofline.main(["step", *flags, "--json"]), json.loads(capsys.readouterr().out))[1]
    for flags in (
        ["--topology=tpu7x:4x8x8", f"--recipe={BF16}"],  # in any order, also if it is the program's own slice
        [f"--recipe={BF16}", "--topology=tpu7x:4x8x8"],
    ):
        assert step(*flags, "--mesh=fsdp:512", "--batch=1024")["topology"] == "tpu7x:4x8x8"
    assert step("--recipe=llama3.1-405b-8k-bf16", "--topology=tpu7x:4x4x4", "--mesh=fsdp:128")["num_chips"] == 64
    two = step(f"--recipe={BF16}", "--num_slices=2", "--mesh=data:2,fsdp:128", "--batch=512")
    assert two["num_slices"] == 2 and two["num_chips"] == 128
    assert step("--preset=llama3.1-8b")["topology"] == "tpu7x:4x4x4"
    # A run of given chips is not the recipe's.
    roofline.main(["cost", f"--recipe={BF16}", "--chips=512", "--mfu=0.4", "--json"])
    assert json.loads(capsys.readouterr().out)["num_chips"] == 512


def test_slices_of_a_recipe_are_taken(monkeypatch):
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
@pytest.mark.parametrize(
    "wrong, words", [("lama3.1-70b-8k-fp8", f"did you mean {FP8}, "), ("zzz", "--help has them all")]
)
def test_one_that_does_not_exist(wrong, words, capsys):
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


def test_help_names_them(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in RECIPES)


@pytest.mark.slow
def test_train_runs_what_a_recipe_says(tmp_path):
    """On less: the recipe's recomputation and first moment, of a small model; its compiler flags are a TPU's."""
    flags = [f"--recipe={BF16}", "--preset=tiny", "--mesh=fsdp:8", "--batch=16", "--seq_len=128", "--steps=2"]
    flags += ["--sample=0", "--eval_batches=1", f"--compilation_cache={tmp_path}"]
    run = lambda *more: subprocess.run(
        [sys.executable, "train.py", *flags, *more], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    done = run("--xla_flags=none")
    assert done.returncode == 0 and "step 2/2  held-out loss" in done.stdout and "fsdp 8" in done.stdout, done.stderr
    done = run()
    assert done.returncode and "xla_flags='recommended' are for a TPU's compiler" in done.stderr


# -- what is printed


def test_as_json(capsys):
    recipes.main(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [its["recipe"] for its in rows] == list(RECIPES)
    for its in rows:
        recipe = RECIPES[its["recipe"]]
        chip, chips = parse_topology(recipe.topology)
        assert its["topology"] == recipe.topology == f"{chip.name}:{by(chips)}"
        assert {"mesh", "batch", "seq_len", "step_s", "mfu", "hbm_bytes", "hbm_limit_bytes", "fits"} <= its.keys()
        assert its["fits"] and its["source"] == recipe.source and its["differs"] == recipe.differs
        assert its["measured_step_s"] == recipe.measured_step_s
        if recipe.measured_step_s:
            assert its["ratio"] == its["predicted_of_measured_s"] / recipe.measured_step_s
        else:
            assert its["ratio"] is its["predicted_of_measured_s"] is its["measured_mfu"] is None
    bf16 = next(its for its in rows if its["recipe"] == BF16)
    assert bf16["measured_mfu"] == pytest.approx(0.523, abs=5e-4)


def test_the_picture_has_every_figure_of_the_table(capsys, tmp_path, monkeypatch):
    points, scatter = [], Axes.scatter
    monkeypatch.setattr(Axes, "scatter", lambda *args, **its: points.append(len(args[1])) or scatter(*args, **its))
    recipes.main([f"--plot={tmp_path / 'recipes.png'}"])
    assert capsys.readouterr().out.strip() == block("recipes") and (tmp_path / "recipes.png").stat().st_size > 10_000
    rows = list(map(recipes.row, RECIPES))
    fitting = [its for its in rows if its["compiled"] and its["compiled"]["fits"]]
    assert points == [len(rows), len(fitting), *[sum(bool(its["measured_mfu"]) for its in rows)] * 2]


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


def test_the_readmes_table_is_the_one_of_today(capsys):
    recipes.main([])
    assert block("recipes") == capsys.readouterr().out.strip()


def test_without_jax_and_at_once():
    """For all: a second, here on two busy cores at most 20."""
    command = [sys.executable, "-X", "importtime", "recipes.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    imported = set(re.findall(r"\|\s*(\S+)$", done.stderr, re.MULTILINE))
    assert "predicted.planner" in imported and not {"jax", "numpy"} & imported
    assert done.stdout.count("GiB a device") == 1 and done.stdout.count(", fits |") == len(RECIPES)


# -- what is better


@pytest.mark.parametrize(
    "name",
    [
        BF16,
        pytest.param("llama3.1-405b-8k-fp8", marks=pytest.mark.slow),
        pytest.param("llama3.1-8b-8k-bf16-v6e", marks=pytest.mark.slow),
    ],
)
def test_better_is_what_the_planner_finds_and_can_be_asked_for(name, capsys, monkeypatch):
    """Its flags beside --recipe give the very step; and the parts' differences add up to the step's."""
    its = recipes.better(name)
    own_s, step_s = its["step_s"]
    assert its["gain"] == own_s / step_s - 1
    gain = its["gain"] if its["compiled_gain"] is None else its["compiled_gain"]
    assert gain > planner.WITHIN - 1 and (name != BF16 or its["compiled_gain"])
    assert sum(its["more_s"].values()) == pytest.approx(step_s - own_s)
    roofline.main(["step", f"--recipe={name}", *its["flags"], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == step_s and found["hbm_bytes"] == its["hbm_bytes"][1]
    assert found["hbm_bytes"] <= planner.MEMORY_SHARE * found["hbm_limit_bytes"]
    config = parsed(f"--recipe={name}", *its["flags"])
    of = run_of(config, *parse_topology(RECIPES[name].topology))
    rules.check(config, of.sizes)  # there is code for it
    monkeypatch.setattr(recipes, "better", lambda name: its)
    recipes.main([name, "--better"])
    said = capsys.readouterr().out
    assert f"{name}: better: {' '.join(its['flags'])}\n" in said and f"{its['gain']:+.1%} speed" in said


def test_compiled_steps_judge():
    """Whatever was predicted; and a plan that does not fit is none."""
    its = recipes.better("llama3.1-8b-8k-bf16") | dict(gain=0.10)
    one = lambda step_s: dict(fits=True, step_s=step_s, mfu=0.5, peak_hbm_bytes=2**36)
    for after, gain, words in ((one(9.0), 1 / 9, "better"), (one(10.0), 0.0, "as good"), (one(12.5), -0.2, "none is")):
        assert recipes._gain(one(10.0), after) == pytest.approx(gain)
        said = recipes.say_better(its | dict(compiled=(one(10.0), after), compiled_gain=gain))
        assert f": {words}" in said and f"{gain:+.1%} speed" in said.splitlines()[2]
    assert recipes._gain(one(10.0), dict(fits=False)) == -1 and recipes._gain(one(10.0), None) is None


@pytest.mark.slow
def test_where_nothing_is_better_it_says_so():
    its = recipes.better("llama3.1-8b-1m-bf16")
    assert its["flags"] == [] and recipes.say_better(its).endswith("s, and the planner finds the same")
    its = recipes.better("llama3.1-70b-128k-bf16")  # which fills 98% of the memory; the planner leaves 8%
    assert its["gain"] < 0 and "none is better, its answer: --" in recipes.say_better(its)


@pytest.mark.slow
def test_the_readmes_better_ones_are_those_of_today(capsys):
    recipes.main(["--better"])
    said = capsys.readouterr().out
    better = re.findall(r"^\S+: better: .*\n(?: .*\n)+", said, re.MULTILINE)
    assert better and block("better recipes").strip("`\n") + "\n" == "".join(better)


# -- another chip


def test_what_if_is_the_step_on_such_a_chip(capsys):
    """Asked of roofline.py; and that nothing is gained where nothing waits."""
    its = recipes.what_if(BF16)
    for case, figures in (
        ("matrix units", "bf16_flops_per_s=2x+fp8_flops_per_s=2x"),
        ("HBM's bandwidth", "hbm_bytes_per_s=2x"),
    ):
        roofline.main(["step", f"--recipe={BF16}", f"--topology=tpu7x+{figures}:4x4x4", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["topology"] == f"tpu7x+{figures}:4x4x4"
        assert its["gain"][case] == pytest.approx(its["step_s"] / found["step_s"] - 1)
    assert all(gain >= 0 for gain in its["gain"].values()) and its["gain"]["links"] < 0.01 < its["gain"]["HBM's bytes"]
    long = recipes.what_if("llama3.1-8b-1m-bf16")["gain"]
    assert long["matrix units"] > 0.9 and long["HBM's bandwidth"] < 0.03  # nearly all of it is attention


def test_the_readmes_other_chips_are_those_of_today(capsys):
    recipes.main(["--what_if"])
    assert block("what if") == capsys.readouterr().out.strip()


def test_no_compiler_for_a_chip_that_is_not_there(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.run(aot.main, ["--preset=tiny", "--topology=tpu7x+hbm_bytes=2x:2x2x1", "--mesh=fsdp:8"])
    assert "no compiler for a chip that is not there; roofline.py" in capsys.readouterr().err


def test_what_loses_its_effect_beside_a_flag_goes_with_it():
    """And only that: the tensors of a policy that is asked for again stay."""
    assert from_recipe("deepseek-v3-4k-fp8", fp8="none").fp8_modules == Config.fp8_modules
    assert from_recipe(BF16, optimizer="sgd").mu_dtype == Config.mu_dtype
    assert from_preset("gpt-oss-120b", window=0).global_every == 0
    own = RECIPES[BF16].flags["remat_tensors"]
    assert from_recipe(BF16, remat="custom").remat_tensors == own != from_recipe(BF16, remat="full").remat_tensors
    with pytest.raises(ValueError, match="mu_dtype=bfloat16 has no effect"):
        from_recipe(BF16, optimizer="sgd", mu_dtype="bfloat16")
