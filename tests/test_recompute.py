"""Predictions of recomputation policies: what each saves, recomputes and costs, and which is the best."""

import dataclasses
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import anatomy
import command
import hardware
import roofline
from config import REMAT_POLICIES, Config
from flags import from_preset
from predicted import planner, presentation, recompute, step, transformer, workload
from predicted.workload import run_of

ROOT = Path(roofline.__file__).parent
TPU7X, CHIPS = hardware.parse_topology("tpu7x:2x2x1")
LLAMA = partial(from_preset, "llama3.1-8b", mesh="fsdp:8", batch=8, seq_len=8192)


def predictions(config: Config, gib: float = 96, **changes) -> dict:
    """The step by policy, on a chip whose devices have `gib` GiB."""
    chip = dataclasses.replace(TPU7X, hbm_bytes=2 * gib * 2**30, **changes)
    return recompute.predictions(config, chip, CHIPS)


def test_a_policy_is_predicted_among_others_as_alone():
    predicted = predictions(LLAMA(remat="custom", remat_tensors="mlp_up:offload"))
    assert [*predicted] == [*REMAT_POLICIES]
    for name, prediction in predicted.items():
        tensors = "mlp_up:offload" if name == "custom" else ""
        alone = step.predict(run_of(LLAMA(remat=name, remat_tensors=tensors), TPU7X, CHIPS))
        assert (prediction.step_s, prediction.hbm_bytes) == (alone.step_s, alone.hbm_bytes)
    assert [*predictions(LLAMA(remat="full"))] == [name for name in REMAT_POLICIES if name != "custom"]


def test_a_row_by_hand():
    """Llama 3.1 8B, 8192 tokens a device: D = NH = 4096, KH = 1024, F = 14336, 32 layers, 16 GB/s to the host."""
    predicted = predictions(LLAMA())
    full, offloaded = recompute.row(predicted["full"]), recompute.row(predicted["minimal_offloaded"])
    assert full["saved_bytes"] == offloaded["saved_bytes"] == 2 * 4096 * 8192
    assert offloaded["offloaded_bytes"] == 2 * 8192 * (4096 + 2 * 1024 + 4096 + 2 * 14_336)
    assert offloaded["host_bytes"] == 32 * offloaded["offloaded_bytes"]
    assert offloaded["host_s"] == pytest.approx(2 * offloaded["host_bytes"] / 16e9)
    assert 0 < offloaded["host_exposed_s"] < offloaded["host_s"] and full["host_s"] == 0
    # Recomputed are the layer's forward matmuls except w_down's, and attention. A token's training FLOPs are 6 a
    # parameter, and attention's.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    attention = 2 * 2 * 4096 * 8192 / 2
    again = 2 * (layer - 4096 * 14_336) + attention
    training = 3 * (2 * layer + attention) + 6 * 4096 * 128_256 / 32
    assert full["recomputed_share"] == pytest.approx(again / training, rel=1e-9)
    assert recompute.row(predicted["minimal_with_context"])["recomputed_share"] == 0


def test_the_best_policy_is_the_shortest_step_that_fits():
    for gib in (96, 50, 44, 35, 28, 24, 23):
        predicted = predictions(LLAMA(), gib)
        limit = planner.MEMORY_SHARE * 94.74 / 96 * gib * 2**30
        fitting = {name: prediction.step_s for name, prediction in predicted.items() if prediction.hbm_bytes <= limit}
        chosen = recompute.best(predicted)
        assert chosen in fitting and fitting[chosen] == min(fitting.values())
    assert len({recompute.best(predictions(LLAMA(), gib)) for gib in (96, 44, 28, 24)}) == 4


def test_of_equally_short_steps_the_one_that_recomputes_least_is_best():
    """With a link so fast that nothing waits, offloaded and saved take as long, and offloading needs less memory."""
    predicted = predictions(LLAMA(), pcie_bytes_per_s=1e15)
    pair = {name: predicted[name] for name in ("minimal", "minimal_offloaded")}
    assert pair["minimal"].step_s == pair["minimal_offloaded"].step_s
    assert recompute.best(pair) == "minimal_offloaded"
    # Two policies with the same step, one of which recomputes more: a copy of one with the config of the other.
    run = dataclasses.replace(predicted["minimal"].run, config=predicted["full"].run.config)
    recomputing = dataclasses.replace(predicted["minimal"], run=run, memory={"all": 1.0})
    assert recompute.best({"full": recomputing, "minimal": predicted["minimal"]}) == "minimal"


def test_nothing_fits():
    words = r"no policy fits: nearest to it is remat=full, which needs 20.9 GiB of 9.1 \(92% .*short"
    with pytest.raises(ValueError, match=words):
        recompute.best(predictions(LLAMA(), 10))


def test_a_host_of_unpublished_memory_has_no_limit():
    config = from_preset("llama3.1-8b", mesh="fsdp:4", batch=4, remat="minimal_offloaded")
    prediction = step.predict(run_of(config, hardware.CHIPS["v4"], (2, 2, 1)))
    assert prediction.host_bytes > 0 and prediction.run.host_limit == math.inf and "host" not in prediction.shortfall()
    assert json.loads(json.dumps(presentation.as_json(prediction), allow_nan=False))["host_limit_bytes"] is None
    assert "inf" not in presentation.describe(prediction)


def test_a_stage_offloads_only_if_it_is_computed_again_and_one_microbatch_at_a_time():
    flags = dict(mesh="fsdp:2,pipe:4", batch=32, microbatches=16, remat="minimal_offloaded")
    predicted = lambda **more: step.predict(
        run_of(from_preset("llama3.1-8b", **flags | more), hardware.CHIPS["tpu7x"], (2, 2, 1))
    )
    again, unstaged = predicted(remat_stage=True), predicted(mesh="fsdp:2,data:4", batch=128)
    assert again.run.in_flight > 1
    assert again.host_bytes == pytest.approx(unstaged.host_bytes / 4)  # a quarter of the layers, as many tokens
    with pytest.raises(ValueError, match="--remat_stage"):
        predicted()
    names = {candidate.remat for candidate in recompute.candidates(from_preset("llama3.1-8b", **flags))}
    assert names and not any(name.endswith("offloaded") for name in names)


@pytest.mark.parametrize(
    ("flags", "twice"),
    [
        (dict(), True),
        (dict(remat="save_qkv_proj"), False),
        (dict(remat="minimal_offloaded"), False),
        (dict(batch=16), False),
        (dict(mesh="fsdp:4,tensor:2", batch=4), False),
        (dict(xla_flags="xla_tpu_pipeline_memory_host_transfers=false"), False),
    ],
)
def test_inputs_in_two_layouts_are_stored_twice(flags, twice):
    prediction = step.predict(run_of(LLAMA(**dict(remat="qkv_proj_offloaded") | flags), TPU7X, CHIPS))
    run, config, saved = prediction.run, prediction.run.config, prediction.memory["saved activations"]
    stack = 2 * config.num_layers * config.model_dim * run.tokens / run.tensor
    policy_alone = transformer.saved_bytes_per_layer(
        config, anatomy.saved_names(config) - anatomy.offloaded_names(config)
    )
    once = policy_alone * config.num_layers * run.tokens / run.tensor
    assert workload.inputs_in_two_layouts(run) == twice
    assert saved == pytest.approx(once + twice * stack)


@pytest.mark.parametrize(
    ("flags", "twice"),
    [
        (dict(), True),
        (dict(head_dim=128), False),
        (dict(context_impl="all_gather"), False),
        (dict(mesh="fsdp:8", batch=8), False),
        (dict(remat="full", remat_tensors=""), False),
    ],
)
def test_wide_heads_round_a_ring_are_stored_twice(flags, twice):
    once = dict(num_heads=16, num_kv_heads=4, head_dim=256, remat="custom", remat_tensors="context:device")
    prediction = step.predict(run_of(LLAMA(**once | dict(mesh="fsdp:2,context:4") | flags), TPU7X, CHIPS))
    run, config, saved = prediction.run, prediction.run.config, prediction.memory["saved activations"]
    stack = 2 * config.num_layers * config.num_heads * config.head_dim * run.tokens
    assert workload.context_in_two_layouts(run) == twice
    names = transformer.saved_bytes_per_layer(config) * config.num_layers * run.tokens
    assert saved == pytest.approx(names + twice * stack)


def test_a_host_has_a_limit_too():
    """960 GB for 4 chips, 8 devices. The link is so fast that only the limit prevents the offload."""
    flags = dict(mesh="fsdp:16,tensor:2,context:4", batch=16, seq_len=131_072)
    config = from_preset("llama3.1-70b", **flags)
    chip = dataclasses.replace(hardware.CHIPS["tpu7x"], pcie_bytes_per_s=1e15)
    predicted = recompute.predictions(config, chip, (4, 4, 4))
    offloaded = predicted["minimal_offloaded"]
    assert offloaded.run.host_limit == 120e9 < offloaded.host_bytes and offloaded.hbm_bytes < offloaded.run.hbm_limit
    assert offloaded.shortfall() == {"host": offloaded.host_bytes - 120e9} and not offloaded.fits
    chosen = recompute.best(predicted)
    assert chosen == "qkv_proj_offloaded" and predicted[chosen].step_s > offloaded.step_s
    assert step.describe_shortfall(offloaded.shortfall()) == "73.24 GiB of the host's memory short"


@pytest.mark.parametrize(
    ("preset", "chips", "batch", "seq_len"),
    [
        ("llama3.1-8b", (2, 2, 1), 8, 8192),
        ("llama3.1-8b", (2, 2, 1), 32, 2048),
        ("llama3.1-70b", (4, 4, 4), 128, 8192),
        ("llama3.1-70b", (4, 4, 4), 256, 8192),
        ("llama3.1-405b", (4, 8, 8), 512, 8192),
        ("gemma4-31b", (4, 4, 4), 128, 8192),
        ("qwen2.5-7b", (2, 2, 1), 8, 32_768),
    ],
)
def test_auto_is_the_shortest_predicted_step_of_all_that_fit(preset, chips, batch, seq_len):
    config = from_preset(preset, mesh="fsdp:*", batch=batch, seq_len=seq_len, remat="auto")
    chosen = recompute.resolve(config, TPU7X, chips)
    assert chosen.remat != "auto" and dataclasses.replace(chosen, remat="auto") == config
    run = lambda name: run_of(dataclasses.replace(config, remat=name), TPU7X, chips)
    predicted = {name: step.predict(run(name)) for name in REMAT_POLICIES if name != "custom"}
    fitting = [fit.step_s for fit in predicted.values() if not fit.shortfall(planner.MEMORY_SHARE)]
    assert predicted[chosen.remat].step_s == min(fitting)
    assert recompute.resolve(chosen, TPU7X, chips) is chosen  # nothing is left to choose


def test_auto_must_be_resolved_before_a_run_is_predicted():
    with pytest.raises(ValueError, match="remat=auto is a choice still to be made"):
        run_of(LLAMA(remat="auto"), TPU7X, CHIPS)


def test_auto_ignores_the_policy_of_the_config():
    for flags in (dict(remat="full"), dict(remat="custom", remat_tensors="mlp_up:offload")):
        assert recompute.auto(LLAMA(**flags), TPU7X, CHIPS) == recompute.best(predictions(LLAMA()))


# -- command line

COMMAND = "--preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --seq_len=8192".split()


def ran(capsys, *flags: str) -> str:
    roofline.main(["remat", *COMMAND, *flags])
    return capsys.readouterr().out


def test_the_table_is_labelled_and_has_every_policy(capsys):
    shown = ran(capsys)
    assert "predicted" in shown and all(f" {name} " in shown for name in REMAT_POLICIES if name != "custom")
    chosen = recompute.best(predictions(LLAMA()))
    assert f"* {chosen} " in shown and f"--remat=auto: {chosen}, the shortest step" in shown
    assert max(map(len, shown.splitlines())) <= 132


def test_one_policy_or_the_best(capsys):
    lines = lambda shown: [line for line in shown.splitlines() if "GiB  " in line]
    assert len(lines(ran(capsys, "--remat=minimal"))) == 1
    assert (
        " mlp_up" not in ran(capsys) and len(lines(ran(capsys, "--remat=custom", "--remat_tensors=mlp_up:device"))) == 1
    )
    chosen = recompute.best(predictions(LLAMA()))
    (line,) = lines(ran(capsys, "--remat=auto"))
    assert line.startswith(f"* {chosen} ")
    result = json.loads(ran(capsys, "--remat=auto", "--json"))
    assert result["auto"] == chosen and [*result["policies"]] == [chosen] and result["kind"] == "predicted"


def test_json_has_the_numbers_of_the_rows(capsys):
    policies = json.loads(ran(capsys, "--json"))["policies"]
    assert policies == {name: recompute.row(prediction) for name, prediction in predictions(LLAMA()).items()}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--remat=atuo"], "remat='atuo' is not one of none, full"),
        (["--rematt=auto"], "did you mean --remat"),
        (["--preset=llama3.1-70b", "--remat=auto"], "no policy fits: nearest to it is remat="),
        (["--mesh=fsdp:16"], "mesh fsdp:16 is for 16 devices and there are 8"),
    ],
)
def test_wrong_flags(capsys, flags, words):
    with pytest.raises(SystemExit) as end:
        command.run(roofline.main, ["remat", *COMMAND, *flags])
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_where_nothing_fits_the_table_says_so(capsys):
    shown = ran(capsys, "--preset=llama3.1-70b")
    assert shown.count("does not fit") == len(REMAT_POLICIES) - 1 and "--remat=auto: none fits in 87.2 GiB" in shown


@pytest.mark.slow
def test_a_plot(tmp_path, capsys):
    ran(capsys, f"--plot={tmp_path / 'policies.png'}")
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")


def test_the_examples_run_without_jax():
    for line in [
        line.strip() for line in recompute.__doc__.splitlines() if line.startswith("    python roofline.py remat")
    ]:
        command = line.split("   ")[0].split()[1:]
        done = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0 and "--remat=auto: " in done.stdout
        assert not {"jax", "numpy", "matplotlib"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
