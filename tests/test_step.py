"""The step and its memory: against measured runs, against the counts of transformer.py, and each part by hand."""

import dataclasses
import json
import math
import re

import pytest

import anatomy
import compiler_flags
import recipes
import roofline
from config import Config
from flags import PRESETS, from_preset
from hardware import CHIPS, Axis, parse_topology
from predicted import presentation, step, transformer, workload
from predicted.interconnect import all_gather
from predicted.step import predict
from predicted.workload import Efficiency, run_of
from published import RECIPES

TPU7X = CHIPS["tpu7x"]
GiB = 2**30
EXACT = Efficiency(
    matmul=1,
    matmul_by_vmem=((0, 1.0), (64, 1.0)),
    expert_tile=0,
    attention_forward=1,
    attention_backward=1,
    attention_block=1,
    attention_tile=1,
    hbm=math.inf,
    elementwise=math.inf,
    links=1,
    usable_hbm=1,
)


def predicted(topology: str = "tpu7x:4x4x4", *, num_slices=1, efficiency=workload.TODAY, **flags) -> step.Prediction:
    """With EXACT, at the clock of the published peak."""
    if efficiency.matmul == 1:
        topology = topology.replace("tpu7x:", "tpu7x+p_state=7:")
    chip, chips = parse_topology(topology)
    return predict(run_of(from_preset(**flags), chip, chips, num_slices=num_slices, efficiency=efficiency))


def seconds(prediction: step.Prediction, name: str, exposed: bool = True) -> float:
    return sum(part.exposed_s if exposed else part.seconds for part in prediction.parts if part.name == name)


def test_the_passes_of_the_layers_add_up_to_their_parts():
    """Backward takes twice as long, and what is recomputed besides."""
    config = dict(preset="llama3.1-70b", mesh="fsdp:128", batch=256)
    ratios = []
    for remat in ("minimal_with_context", "full"):
        prediction = predict(run_of(from_preset(**config, remat=remat), CHIPS["tpu7x"], (4, 4, 4)))
        parts = sum(seconds(prediction, name) for name in ("matmul", "attention", "elementwise"))
        assert sum(prediction.passes.values()) == pytest.approx(parts)
        ratios.append(prediction.passes["backward"] / prediction.passes["forward"])
    # Recomputation is less than the forward pass: no gradient needs the result of the MLP's last matmul.
    assert 2 < ratios[0] < 2.3 and 0.6 < ratios[1] - ratios[0] < 0.75


# -- against measured runs


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.measured_step_s])
def test_measured_runs(name):
    """Within 15% for dense models and 30% for mixtures, with one set of efficiencies; FLOPs within 0.5%."""
    recipe, prediction = RECIPES[name], recipes.predicted(name, workload.MAXTEXT)
    tolerance = 0.30 if prediction.run.config.num_experts else 0.15
    assert prediction.step_s == pytest.approx(recipe.measured_step_s, rel=tolerance)
    assert prediction.mfu == pytest.approx(
        prediction.flops_per_step / prediction.step_s / prediction.run.num_chips / prediction.run.chip.bf16_flops_per_s
    )
    if recipe.measured_tflops:
        flops = recipe.measured_tflops * 1e12 * prediction.run.num_chips * recipe.measured_step_s
        assert prediction.flops_per_step == pytest.approx(flops, rel=0.005)


@pytest.mark.parametrize(
    "run, gib",
    [
        (dict(preset="llama3.1-70b", **RECIPES["llama3.1-70b-8k-bf16"].flags), 84.8),
        (dict(preset="llama3.1-70b", **RECIPES["llama3.1-70b-8k-fp8"].flags), 83.4),
        (dict(preset="llama3.1-8b", mesh="fsdp:8", batch=8, remat="full"), 21.9),
        (
            dict(
                preset="llama3.1-8b",
                mesh="fsdp:8",
                batch=8,
                remat="custom",
                remat_tensors="context:device,qkv_proj:device",
            ),
            25.0,
        ),
    ],
)
def test_memory_is_that_of_compiled_programs(run, gib):
    """GiB a device, compiled for TPU7x by libtpu 0.0.50 from MaxText's programs of the same models. Within 6%."""
    topology = "tpu7x:2x2x1" if run["mesh"] == "fsdp:8" else "tpu7x:4x4x4"
    assert predicted(topology, **run).hbm_bytes / GiB == pytest.approx(gib, rel=0.06)


# -- part by part


SMALL = dict(
    preset="tiny",
    vocab_size=1024,
    num_layers=4,
    model_dim=512,
    ff_dim=1024,
    num_heads=4,
    num_kv_heads=4,
    head_dim=128,
    seq_len=1024,
    dtype="bfloat16",
    batch=256,
)


def test_with_efficiencies_of_1_a_step_is_flops_over_peak():
    """And nothing to move: the FLOPs are those of transformer.py, the peak is that of the chips."""
    # The kernel's backward pass has five matmuls where four are counted; scores are counted at half, exactly.
    prediction = predicted(
        "tpu7x:4x4x4", efficiency=EXACT, mesh="data:128", batch=128, **{k: v for k, v in SMALL.items() if k != "batch"}
    )
    config, tokens = prediction.run.config, 128 * 1024
    flops = transformer.forward_flops_per_token(config)
    matmuls = sum(flops[name] for name in ("attention", "mlp"))
    assert seconds(prediction, "matmul") == pytest.approx(3 * matmuls * tokens / 64 / 2307e12)
    half = 2 * 4 * 4 * 128 * (1024 / 2 + 1 / 2) * 4 / 4  # 2 matmuls * 4 heads * 128 * keys, 4 layers, forward
    assert seconds(prediction, "attention") == pytest.approx(
        (1 + 5 / 2) * 4 * half / 2 * tokens / 64 / 2307e12, rel=1e-6
    )
    assert seconds(prediction, "loss") == pytest.approx(3 * flops["unembedding"] * tokens / 64 / 2307e12)


# Cycles of a causal head of 128, forward and backward, compiled: benchmarks/cliffs.py has the sizes.
HEAD_CYCLES = {1024: 4110 + 5212, 1025: 8270 + 10_066, 2048: 8936 + 14_212, 2049: 14_598 + 20_630}
HEAD_CYCLES |= {4096: 21_394 + 44_890, 4097: 31_562 + 54_866}


def cliffs_of(preset: str = "llama3.1-8b", **flags) -> list[str]:
    chip, chips = parse_topology("tpu7x:2x2x1")
    return step.cliffs(run_of(from_preset(preset, **dict(mesh="fsdp:8", batch=8, remat="none") | flags), chip, chips))


@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_a_length_whose_last_tiles_are_almost_empty_is_reported(length):
    (sentence,) = cliffs_of(seq_len=length + 1)
    words = rf"^seq_len={length + 1:,}: attention takes (\S+) times as long a FLOP as with {length:,}: .* {length:,}$"
    factor = float(re.search(words, sentence)[1])
    assert factor == pytest.approx(HEAD_CYCLES[length + 1] / HEAD_CYCLES[length], rel=0.1)


def test_the_nearest_length_fills_the_tiles_of_each_device():
    assert cliffs_of(seq_len=1025, attention="reference") == []
    assert cliffs_of(seq_len=400)[0].endswith("is 512")
    assert cliffs_of(seq_len=1540)[0].endswith("is 1,536")
    assert "seq_len=8,200" in cliffs_of(seq_len=8200, mesh="context:8")[0]  # 1,025 on each device


@pytest.mark.parametrize("seq_len", [64, 256, 512, 1000, 1024, 2000, 2048, 3072, 4095, 4096, 5000, 8193, 131_072])
def test_a_length_that_fills_its_tiles_is_not_reported(seq_len):
    assert cliffs_of(seq_len=seq_len) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(expert_dim=14_335), "expert_dim=14,335: the experts' kernels are refused, .*; the nearest is 14,336$"),
        (dict(expert_dim=28_670, mesh="fsdp:4,tensor:2"), "expert_dim=28,670: .*refused.*; the nearest is 28,672$"),
        (dict(model_dim=4000), "model_dim=4,000: .*take 5.34 times .*; the nearest is 4,096$"),
        (dict(model_dim=4000, expert_dim=14_335), "model_dim=4,000 and expert_dim=14,335: .* 4,096 and 14,336$"),
        (dict(expert_dim=14_464), ""),
        (dict(expert_dim=14_335, moe_impl="capacity"), ""),
        (dict(expert_dim=1000), ""),  # untiled in VMEM
        (dict(), ""),
    ],
)
def test_experts_that_no_tiles_fit_are_reported(flags, words):
    sentences = cliffs_of("mixtral-8x7b", **flags)
    assert len(sentences) == bool(words) and all(re.match(words, sentence) for sentence in sentences), sentences


def test_a_printed_step_reports_its_cliffs():
    shown = presentation.describe(predicted("tpu7x:2x2x1", preset="llama3.1-8b", mesh="fsdp:8", batch=8, seq_len=1025))
    assert "  cliff    seq_len=1,025: " in shown


@pytest.mark.parametrize("remat", ["none", "full", "save_qkv_proj", "minimal", "save_out_proj"])
def test_recomputed_matmuls_are_those_of_transformer(remat):
    prediction = predicted(efficiency=EXACT, **SMALL | dict(batch=128), mesh="data:128", remat=remat)
    config = prediction.run.config
    flops, again = transformer.forward_flops_per_token(config), transformer.recomputed_flops_per_token(config)
    matmuls = sum(3 * flops[name] + again.get(name, 0) for name in ("attention", "mlp"))
    assert seconds(prediction, "matmul") == pytest.approx(matmuls * 1024 / 1153.5e12)
    assert ("scores" in again) == (
        seconds(prediction, "attention")
        > seconds(predicted(efficiency=EXACT, **SMALL | dict(batch=128), mesh="data:128"), "attention")
    )


def test_an_experts_rows_are_those_routed_to_it_and_the_ends_of_its_tiles():
    experts = dict(num_experts=8, experts_per_token=2, expert_dim=256)
    prediction = predicted(efficiency=EXACT, **SMALL | dict(batch=128), **experts, mesh="data:128")
    flops = transformer.forward_flops_per_token(prediction.run.config)
    # The router's 8 columns are padded to the matrix unit's 256. In float32 they take as long as 4 matmuls in bf16.
    padded = flops["attention"] + flops["experts"] + 4 * flops["router"] * 256 / 8
    assert seconds(prediction, "matmul") == pytest.approx(3 * padded * 1024 / 1153.5e12)
    tiles = predicted(
        efficiency=dataclasses.replace(EXACT, expert_tile=512), **SMALL | dict(batch=128), **experts, mesh="data:128"
    )
    # 1024 tokens * 2 / 8 = 256 rows an expert, and 512 more for the ends of its tiles.
    more = flops["experts"] * 512 / 256
    assert seconds(tiles, "matmul") == pytest.approx(3 * (padded + more) * 1024 / 1153.5e12)


@pytest.mark.parametrize(("mib", "share"), [(8, 0.42), (16, 0.42), (32, 0.83), (40, 0.9), (60, 1.0), (64, 1.0)])
def test_matmuls_gain_by_the_memory_that_flags_give_them(mib, share):
    """XLA's matmuls do; the experts' kernels choose their own tiles. Without a flag it is 32 MiB."""
    flags = dict(preset="mixtral-8x7b", batch=512, mesh="fsdp:128")
    run = predicted(**flags, xla_flags=f"xla_tpu_scoped_vmem_limit_kib={1024 * mib}").run
    assert run.flops_per_s() == pytest.approx(share * run.flops_per_s(kernel=True))
    assert run.flops_per_s(kernel=True) == pytest.approx(0.96 * 1153.5e12 * 1.9 / 2.2)
    default, with_flags = (predicted(**flags, xla_flags=flag).run for flag in ("none", "recommended"))
    assert default.vmem_share == 0.83 and with_flags.vmem_share == 1.0
    (layer,) = workload.layers_of(default)
    experts = [product for product in layer.products if product.part == "experts"]
    assert workload.matmul_s(default, experts) == workload.matmul_s(with_flags, experts) > (0, 0)
    dense = [
        predicted(preset="llama3.1-8b", batch=512, mesh="fsdp:128", xla_flags=flag) for flag in ("none", "recommended")
    ]
    assert seconds(dense[0], "matmul") == pytest.approx(seconds(dense[1], "matmul") / 0.83)


def test_a_mask_takes_as_long_for_heads_of_any_size():
    """With heads of 256 scores take 1.22 times as long as with 128, and what a mask adds to a block as long."""
    without = dataclasses.replace(workload.MAXTEXT, attention_crossed=(0.0, 0.0))

    def seconds(head_dim: int, efficiency: Efficiency) -> float:
        run = predicted(preset="llama3.1-8b", mesh="fsdp:128", batch=128, head_dim=head_dim, efficiency=efficiency).run
        (layer,) = workload.layers_of(run)
        return sum(workload.compute_s(run, layer)["attention"])

    of_scores = [seconds(head_dim, without) for head_dim in (128, 256)]
    of_masks = [
        seconds(head_dim, workload.MAXTEXT) - each for head_dim, each in zip((128, 256), of_scores, strict=True)
    ]
    assert of_scores[1] == pytest.approx(1.22 * of_scores[0])
    assert of_masks[1] == pytest.approx(of_masks[0]) and of_masks[0] > 0


def test_only_maxtext_saves_elementwise_work_with_what_it_recomputes():
    def elementwise(remat: str, efficiency: Efficiency) -> step.Part:
        flags = dict(preset="llama3.2-1b", mesh="fsdp:128", batch=128, remat=remat)
        (part,) = (each for each in predicted(**flags, efficiency=efficiency).parts if each.name == "elementwise")
        return part

    today, full = elementwise("none", workload.TODAY), elementwise("full", workload.MAXTEXT)
    assert today.seconds == elementwise("full", workload.TODAY).seconds == full.seconds
    none = elementwise("none", workload.MAXTEXT)
    assert none.seconds == pytest.approx(3 / 4 * full.seconds)
    assert " tokens * 3 * " in none.formula and " tokens * 4 * " in full.formula


def test_attention_takes_as_long_for_small_heads_as_for_heads_of_128():
    """And for heads of 192; 1.22 times as long for heads of 256. Other dims are padded to the matrix unit."""
    times = [seconds(predicted(**SMALL | dict(head_dim=dim)), "attention") for dim in (64, 128, 192, 256, 512)]
    assert times[0] == times[1] == times[2] == pytest.approx(times[3] / 1.22) == pytest.approx(times[4] / 2.44)
    narrow, wide = (seconds(predicted(**SMALL | dict(ff_dim=dim)), "matmul") for dim in (1025, 1280))
    assert narrow == wide


@pytest.mark.parametrize("seq_len", [8192, 131_072])
def test_the_loss_of_a_prime_length_takes_as_long_as_that_of_its_neighbours(seq_len):
    """8,191 and 131,071 are prime. 8,193 positions are 9 chunks of 911, with 6 positions of padding."""
    flags = dict(preset="llama3.1-8b", mesh="data:8", batch=8)
    times = [seconds(predicted("tpu7x:2x2x1", **flags, seq_len=n), "loss") for n in (seq_len - 1, seq_len, seq_len + 1)]
    assert max(times) < 1.05 * min(times)


def test_small_chunks_of_the_loss_are_bound_by_the_sum_of_gradients():
    """A chunk moves 8 bytes for each of dw's D V elements, and reads the unembedding twice, 2 bytes an element.

    In addition it multiplies 8 rows, where nothing hides dw's matmul, and moves 16 bytes for each logit.
    """
    flags = dict(preset="llama3.1-8b", mesh="data:8", batch=8, xla_flags="recommended")
    small, large = (predicted("tpu7x:2x2x1", **flags, loss_chunk=chunk) for chunk in (8, 8192))
    reached = 0.87 * 7380e9 / 2
    least = 8192 / 8 * 128_256 * 4096 * ((8 + 2 + 2) / reached)
    multiplied = 8192 * 128_256 * (2 * 4096 / (0.96 * 1153.5e12 * 1.9 / 2.2) + 16 / (0.5 * 7380e9 / 2))
    assert seconds(small, "loss") == pytest.approx(least + multiplied, rel=1e-3) and seconds(
        small, "loss"
    ) > 50 * seconds(large, "loss")


def test_fp8_halves_the_layers_matmuls_and_gathers_fewer_bytes():
    once = dict(preset="llama3.1-70b", mesh="fsdp:128", batch=128)
    bf16, fp8 = predicted(**once), predicted(**once, fp8="dynamic")
    assert seconds(fp8, "matmul") == pytest.approx(seconds(bf16, "matmul") / 2 / workload.TODAY.fp8_matmul)
    for name in ("attention", "elementwise", "loss", "update"):
        assert seconds(fp8, name) == seconds(bf16, name)
    assert seconds(fp8, "fsdp communication", False) < seconds(bf16, "fsdp communication", False)
    assert fp8.mfu == pytest.approx(2 * fp8.own_precision_mfu) and bf16.mfu == bf16.own_precision_mfu
    once |= dict(loss_chunk=8192)  # the sum of the unembedding's gradients stays in float32
    fp8, logits = predicted(**once, fp8="dynamic"), predicted(**once, fp8="dynamic", fp8_modules="qkv,out,mlp,unembed")
    assert seconds(logits, "matmul") == seconds(fp8, "matmul") and seconds(logits, "loss") < 0.65 * seconds(fp8, "loss")
    assert seconds(logits, "fsdp communication", False) < seconds(fp8, "fsdp communication", False)
    with pytest.raises(ValueError, match="v4 has no published speed of a matmul in 'fp8'"):
        predicted("v4:4x4x4", preset="llama3.1-8b", batch=64, fp8="dynamic")


@pytest.mark.parametrize("scales", ["dynamic", "fixed"])
def test_rows_of_experts_are_scaled_in_passes_of_their_own(scales):
    """The operands of both matmuls of an expert are read and written in FP8: four times.

    The kernels find the largest of those of width 14,336. Those of width 4096 are looked up in FP8, or one of the four,
    a gradient, is scaled where rows are sent; it is read for its maximum first.
    """
    flags = dict(preset="mixtral-8x7b", mesh="fsdp:128", batch=1024, seq_len=4096, remat="full")
    in_fp8 = predicted(**flags, fp8=scales)
    more = seconds(in_fp8, "elementwise") - seconds(predicted(**flags), "elementwise")
    rows = 2 * 1024 * 4096 / 128 * 32  # of all layers, two experts a token
    speed = TPU7X.hbm_bytes_per_s / 2 * workload.TODAY.elementwise
    assert more == pytest.approx(rows * 4 * 14_336 * 3 / speed, rel=1e-6)
    elements = lambda where: workload.elementwise_elements(
        in_fp8.run.config, True, workload.TODAY, gathered_over=where
    )[1]
    assert elements(0) - elements(1) == 2 * 4096 * 5 / 4 / 2
    without_experts = predicted(**flags, fp8=scales, fp8_modules="qkv,out")
    assert seconds(without_experts, "elementwise") == seconds(predicted(**flags), "elementwise")


def test_weights_that_stay_in_bfloat16_cost_as_much_as_before():
    """A layer of Mixtral has 33 times as many weights in its experts as elsewhere, of which a token uses 8.4 times."""
    once = dict(preset="mixtral-8x7b", batch=512, mesh="fsdp:128", remat="none", xla_flags="recommended")
    bf16, fp8 = predicted(**once), predicted(**once, fp8="dynamic")
    experts, others = (predicted(**once, fp8="dynamic", fp8_modules=modules) for modules in ("moe", "qkv,out,mlp"))
    for name, exposed in (("matmul", True), ("fsdp communication", False)):
        both, of_experts, of_others = (
            seconds(bf16, name, exposed) - seconds(prediction, name, exposed) for prediction in (fp8, experts, others)
        )
        assert both == pytest.approx(of_experts + of_others)
        assert of_experts > 8 * of_others > 0


def test_fsdp_hides_behind_compute():
    """Two gathers a layer, over the dies first, then three axes at once; a reduce-scatter round a ring of all devices.

    A gather hides behind a layer. The sum hides behind attention's backward pass: all that a layer then has left.
    """
    # D = 128 * 64, so that a layer's weights are large.
    flags = SMALL | dict(model_dim=8192, ff_dim=16384, num_layers=8, tied_embeddings=True, mesh="fsdp:128")
    of_attention, of_mlp = 4 * 8192 * 4 * 128, 3 * 8192 * 16384
    nbytes = 2 * (of_attention + of_mlp + 2 * 8192)
    die, wire = 600e9, 100e9 / 2
    gather = nbytes / 2 / die + 21 / 32 * nbytes / 2 / 3 / wire
    scatter = nbytes / 2 / (2 * wire)  # a ring passes a chip's links once for both of its devices
    table = 2 * 1024 * 8192
    ends = table / 2 / die + 21 / 32 * table / 2 / 3 / wire + table / 2 / (2 * wire)
    moved = 2 * gather + scatter

    def hidden_of(batch, seq_len, efficiency=EXACT, **more):
        """The prediction, the hidden seconds of a layer's messages, both passes of a layer, attention's backward."""
        prediction = predicted(efficiency=efficiency, **flags | dict(batch=batch, seq_len=seq_len) | more)
        matmul, kernel = (seconds(prediction, name) / 8 for name in ("matmul", "attention"))
        assert seconds(prediction, "fsdp communication", False) == pytest.approx(8 * moved + ends, rel=1e-3)
        hidden = (8 * moved + ends - seconds(prediction, "fsdp communication")) / 7  # those of one layer are exposed
        attention = 2 / 3 * matmul * of_attention / (of_attention + of_mlp) + 5 / 7 * kernel
        return prediction, hidden, (matmul / 3 + 2 / 7 * kernel, 2 / 3 * matmul + 5 / 7 * kernel), attention

    prediction, hidden, _, attention = hidden_of(5120, 4096)
    assert prediction.bound == "compute" and attention > scatter and hidden == pytest.approx(moved, rel=1e-3)
    prediction, hidden, _, attention = hidden_of(1280, 1024)
    assert prediction.bound == "compute" and moved > hidden == pytest.approx(2 * gather + attention, rel=1e-3)
    _, hidden, *_ = hidden_of(1280, 1024, dataclasses.replace(EXACT, late_sums=False))
    assert hidden == pytest.approx(moved, rel=1e-3)
    prediction, hidden, (forward, backward), _ = hidden_of(128, 128)
    assert prediction.bound == "communication" and backward < gather
    assert hidden == pytest.approx(forward + backward, rel=1e-2)
    of_maxtext = [predicted(efficiency=workload.MAXTEXT, **flags, prefetch=ahead) for ahead in (True, False)]
    assert of_maxtext[0].parts == of_maxtext[1].parts and of_maxtext[0].memory == of_maxtext[1].memory

    def hidden_in_a_layer(batch, seq_len, remat="none"):
        """Without prefetch: hidden seconds of a layer's messages; those of attention, the MLP, attention's backward."""
        settings = flags | dict(batch=batch, seq_len=seq_len, prefetch=False, remat=remat)
        prediction = predicted(efficiency=EXACT, **settings)
        matmul, kernel = (seconds(prediction, name) / 8 for name in ("matmul", "attention"))
        hidden = (8 * moved + ends - seconds(prediction, "fsdp communication")) / 8
        backward = 2 / 3 * matmul * (1 - mlp) + 5 / 7 * kernel
        return hidden, matmul * (1 - mlp) / 3 + 2 / 7 * kernel, matmul * mlp / 3, backward

    mlp = of_mlp / (of_attention + of_mlp)
    hidden, attention, _, backward = hidden_in_a_layer(5120, 4096)
    assert attention > mlp * gather and backward > mlp * scatter  # and nothing hides the gather of the backward pass
    ahead = 2 * (1 - mlp) * gather
    assert hidden == pytest.approx(mlp * (gather + scatter) + ahead, rel=1e-3)
    assert hidden_in_a_layer(5120, 4096, "full")[0] == pytest.approx(mlp * moved + ahead, rel=1e-3)
    hidden, attention, matmuls, backward = hidden_in_a_layer(128, 128)
    assert attention + matmuls < mlp * gather / 3 and backward < mlp * scatter and matmuls / 3 < ahead / 2
    assert hidden == pytest.approx(attention + (2 + 2) / 3 * matmuls + backward, rel=1e-2)


def test_gradients_are_summed_over_three_axes_at_once_or_round_a_ring():
    run_with = lambda **flags: predicted(**dict(preset="llama3.1-8b", mesh="fsdp:128", batch=512) | flags).run
    by_3 = lambda run: workload.layers_of(run)[0].gathered_params_by_3(run)
    plain, wide = run_with(), run_with(ff_dim=3 * 4096)
    padded = run_with(xla_flags=f"{compiler_flags.PADS_SUMS}=true")
    assert (by_3(plain), by_3(wide)) == (0, 3 * 4096 * 3 * 4096)
    seconds_of = lambda run, kind, **how: run.collective_s(kind, 1e9, "fsdp", **how)
    link = TPU7X.link_bytes_per_s * workload.TODAY.links
    assert seconds_of(plain, "reduce_scatter") == pytest.approx(1e9 / (2 * link))
    at_once = seconds_of(plain, "all_gather")
    assert seconds_of(padded, "reduce_scatter") == seconds_of(plain, "reduce_scatter", divisible_by_3=True) == at_once
    assert at_once < 0.7 * 1e9 / (2 * link)
    # With `tensor` on the dies, two rings share the links.
    assert seconds_of(run_with(mesh="fsdp:64,tensor:2"), "reduce_scatter") == pytest.approx(1e9 / link)
    formula = lambda run: next(part.formula for part in predict(run).parts if part.name == "fsdp communication")
    assert "100% of it round one ring" in formula(plain) and "ring" not in formula(padded)
    assert "22% of it round one ring" in formula(wide)  # attention's matrices
    # Half a torus axis does not make a ring of its own, nor does it for gathers.
    half = run_with(mesh="data:2,fsdp:64")
    assert seconds_of(half, "all_gather") == seconds_of(half, "reduce_scatter", divisible_by_3=True) == 1e9 / (2 * link)


def test_recomputation_hides_no_gradient_sum():
    """It comes before the MLP's gradients. With a quarter of the tokens, what comes after them takes a quarter."""
    run_with = lambda **flags: predicted(preset="llama3.1-70b", mesh="fsdp:128", batch=512, **flags).run
    after = lambda run: workload.after_mlp_s(run, *workload.layers_of(run))
    saved, recomputed, quarter = run_with(remat="none"), run_with(remat="full"), run_with(remat="full", microbatches=4)
    assert after(saved) == pytest.approx(after(recomputed)) == pytest.approx(4 * after(quarter))
    by_part = workload.compute_s(saved, *workload.layers_of(saved))
    assert by_part["attention"][1] < after(saved) < sum(backward for _, backward in by_part.values()) / 2


def test_copies_of_weights():
    """Weights gathered ahead are copied forward; all weights and gradients are, if a shard is not whole tiles."""
    flags = dict(preset="llama3.1-8b", batch=256, remat="full")
    speed = TPU7X.hbm_bytes_per_s / 2 * workload.TODAY.copies
    of_layers = 2 * 2 * (transformer.num_params(from_preset("llama3.1-8b")) - 2 * 128_256 * 4096) / speed  # and back
    copies = lambda **more: seconds(predicted(**flags | more), "copies of weights")
    assert copies(mesh="fsdp:128") == pytest.approx(of_layers, rel=1e-4)
    assert copies(mesh="fsdp:128", microbatches=2) == pytest.approx(2 * of_layers, rel=1e-4)
    # A stage that runs forward once more copies twice.
    stages = dict(mesh="pipe:2,fsdp:64", microbatches=4)
    assert copies(**stages, remat_stage=True) == pytest.approx(2 * copies(**stages))
    assert copies(mesh="data:128,fsdp:1") == copies(mesh="fsdp:128", double_buffer=True) == 0
    assert copies(mesh="fsdp:128", prefetch=False) == copies(mesh="fsdp:128", efficiency=workload.MAXTEXT) == 0
    # 5376 / 128 = 42 rows, not whole tiles: two gathers and a gradient are copied, with double buffering, too.
    gemma = dict(preset="gemma4-31b", mesh="fsdp:128")
    assert (
        copies(**gemma, double_buffer=True)
        == pytest.approx(copies(**gemma))
        == pytest.approx(3 * copies(**gemma | dict(mesh="data:4,fsdp:32")), rel=1e-4)
    )
    # The rows of all experts, as one matrix, are whole tiles: only attention's weights are copied.
    gpt = dict(preset="gpt-oss-120b", mesh="data:2,fsdp:64", double_buffer=True)
    assert 0 < copies(**gpt) < copies(**gpt, num_experts=0, experts_per_token=0, expert_dim=0, ff_dim=128 * 2880) / 100
    # In two dims what the first gather made is copied before the second one, unless its columns are whole tiles.
    two = gpt | dict(mesh="fsdp:64,fsdp_transpose:2")
    assert copies(**two, expert_dim=3072) < copies(**two) / 10


def test_microbatches_gather_anew():
    flags = dict(preset="llama3.1-70b", mesh="fsdp:128", batch=512, remat="full")
    one, four = (predicted(**flags, microbatches=count) for count in (1, 4))
    assert seconds(four, "fsdp communication", False) == pytest.approx(4 * seconds(one, "fsdp communication", False))
    assert seconds(four, "matmul") == pytest.approx(seconds(one, "matmul"))
    assert four.memory["saved activations"] == one.memory["saved activations"] / 4


def test_tensor_parallelism_moves_the_stream():
    """2 gathers and 2 reduce-scatters a layer, forward and backward, on the two dies of a chip."""
    flags = SMALL | dict(mesh="data:64,tensor:2", batch=64, seq_len=8192)
    prediction = predicted(efficiency=EXACT, **flags)
    stream = 8192 * 512 * 2
    message, ends = stream / 2 / 600e9, 4  # the embedding's result and the loss's operand, forward and backward
    assert seconds(prediction, "tensor communication") == pytest.approx((4 * 8 + ends) * message)
    # Plain differentiation saves both gathered operands of 4 layers.
    named = transformer.saved_bytes_per_token(prediction.run.config)
    assert prediction.memory["saved activations"] == pytest.approx(
        8192 / 2 * (workload.PLAIN * named + 4 * 2 * 2 * 512)
    )
    # Both gathers run again, and attention's scatter; not the latter where the stream behind attention is saved.
    again = predicted(efficiency=EXACT, **flags | dict(remat="full"))
    assert seconds(again, "tensor communication") == pytest.approx((4 * 11 + ends) * message)
    saved = predicted(efficiency=EXACT, **flags | dict(remat="minimal_with_context"))
    assert seconds(saved, "tensor communication") == pytest.approx((4 * 10 + ends) * message)
    # Norms that are saved by name are saved before they are gathered: no fewer gathers, and a shard of each in memory.
    norms = dict(remat="custom", remat_tensors="norm_attention:device,norm_mlp:device")
    named = predicted(efficiency=EXACT, **flags | norms)
    assert seconds(named, "tensor communication") == seconds(again, "tensor communication")
    more = named.memory["saved activations"] - again.memory["saved activations"]
    assert more == 8192 / 2 * 4 * 2 * 2 * 512
    hidden = predicted(efficiency=EXACT, **flags | dict(collective_matmul=True))
    assert seconds(hidden, "tensor communication", False) == seconds(prediction, "tensor communication")
    assert seconds(hidden, "tensor communication") == pytest.approx((4 * 8 / 2 + ends) * message)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("expert", [1, 2])
def test_no_matmul_hides_the_messages_of_experts_over_tensor(expert, shared):
    """Matmuls hide those of attention and of a shared expert. The rows that are sent are all those of the buffers."""
    mixture = dict(num_experts=8, experts_per_token=2, expert_dim=256, num_shared_experts=shared)
    flags = SMALL | mixture | dict(mesh=f"data:{64 // expert},expert:{expert},tensor:2", batch=64, seq_len=8192)
    prediction = predicted(efficiency=EXACT, **flags)
    message, ends = 8192 * 512 * 2 / 2 / 600e9, 4
    rows = {1: 1, 2: 2 * 2.0}[
        expert
    ]  # over those of the stream: a token once, or for 2 experts, in buffers twice as large
    dense, bare = 4 * 4 * (1 + shared), 4 * 4 * rows  # 4 layers; 2 messages a sub-layer and pass
    assert seconds(prediction, "tensor communication") == pytest.approx((dense + bare + ends) * message)
    hidden = predicted(efficiency=EXACT, **flags | dict(collective_matmul=True))
    assert seconds(hidden, "tensor communication") == pytest.approx((dense / 2 + bare + ends) * message)
    (part,) = (part for part in prediction.parts if part.name == "tensor communication")
    assert f"gathered or reduce-scattered {dense + bare + ends:.0f} times" in part.formula


def test_context_parallelism_passes_keys_and_values_on():
    flags = SMALL | dict(mesh="data:16,context:8", seq_len=8192, batch=16, num_kv_heads=2)
    prediction = predicted(efficiency=EXACT, **flags)
    kv = 1024 * 2 * (128 + 128) * 2  # bytes of a device
    die, wire = 600e9, 50e9
    once = kv * 8 / 2 / die + all_gather(kv * 8 / 2, 4).link_bytes / wire
    hop = kv / (2 * wire)  # every second device sends to the next chip
    ring = seconds(prediction, "context communication", False)
    assert ring == pytest.approx(4 * 7 * (1 + 1 + 2) * hop, rel=0.1)  # and the latency
    gathered = predicted(efficiency=EXACT, **flags | dict(context_impl="all_gather"))
    assert seconds(gathered, "context communication", False) > 4 * 2 * once
    assert seconds(gathered, "context communication") == seconds(gathered, "context communication", False)
    exchanged = predicted(efficiency=EXACT, **flags | dict(context_impl="all_to_all", num_heads=8))
    assert seconds(exchanged, "context communication") == seconds(exchanged, "context communication", False) > 0
    # With the sequence in order the last device has the rows that see most keys; with a window none has.
    uneven = predicted(efficiency=EXACT, **flags | dict(context_balance=False))
    assert seconds(uneven, "attention") == pytest.approx(seconds(prediction, "attention") * (2 - 1 / 8))
    near = predicted(efficiency=EXACT, **flags | dict(window=256))
    assert seconds(near, "context communication", False) == pytest.approx(4 * 2 * (hop * 255 / 1024 + 1e-6))
    assert seconds(prediction, "context communication") < seconds(prediction, "context communication", False)
    # Every device has an eighth of the work of the sequence.
    alone = predicted(efficiency=EXACT, **flags | dict(mesh="data:128", batch=128))
    assert seconds(prediction, "attention") == pytest.approx(seconds(alone, "attention") / 8)


def test_groups_that_exchange_heads_share_the_links_between_them():
    """Groups of 4 exchange over the dies and half an axis of 4 chips; the ring of 2 skips a chip, two on a link."""
    flags = SMALL | dict(mesh="data:16,context:8", seq_len=8192, batch=16, num_kv_heads=2, num_heads=8)
    prediction = predicted(efficiency=EXACT, **flags, context_heads=4)
    a_head = 1024 * (128 + 128) * 2  # bytes of a device's tokens; four devices need the two heads of keys
    ring = 2e-6 + 4 * a_head / (50e9 / 2)
    exchange = (8 + 4) * a_head / 2 * (1 / 600e9 + 1 / 50e9)
    expected = 4 * ((1 + 1 + 2) * ring + 2 * exchange)
    assert seconds(prediction, "context communication", False) == pytest.approx(expected)
    # Half of a ring is a line; across such halves it is still a ring.
    (inner,), (outer,) = step.split_axis([Axis(8, 50e9, 1e-6, wrap=True)], 4)
    assert inner == Axis(4, 50e9, 1e-6, wrap=False) and outer == Axis(2, 12.5e9, 4e-6, wrap=True)


def test_neighbours_exchange_heads_and_the_ring_goes_across_them():
    """Two dies exchange over their own link; in a ring of 4 each device has half of a wire."""
    flags = SMALL | dict(mesh="data:16,context:8", seq_len=8192, batch=16, num_kv_heads=2, num_heads=8)
    prediction = predicted(efficiency=EXACT, **flags, context_heads=2)
    a_head = 1024 * (128 + 128) * 2  # bytes of a device's tokens
    die, wire = 600e9, 50e9
    ring, exchange = 3 * 2 * a_head / wire, (8 + 2) * a_head / 2 / die
    expected = 4 * ((1 + 1 + 2) * ring + 2 * exchange)
    assert seconds(prediction, "context communication", False) == pytest.approx(expected, rel=0.1)
    assert seconds(prediction, "context communication") >= 4 * 2 * exchange
    # An exchange over the entire axis is the all-to-all.
    entire, exchanged = (
        predicted(efficiency=EXACT, **flags, **how) for how in (dict(context_heads=8), dict(context_impl="all_to_all"))
    )
    assert [part.seconds for part in entire.parts] == [part.seconds for part in exchanged.parts]
    assert entire.memory == exchanged.memory


def test_expert_parallelism_dispatches_and_combines_tokens():
    experts = dict(num_experts=8, experts_per_token=2, expert_dim=256, num_dense_layers=1)
    flags = SMALL | experts | dict(mesh="data:32,expert:4", batch=128)
    sent = 1024 * 512 * 2 * 2
    # Half is sent to the other die. Half of a ring of 4 chips is a line of 2: half is sent to the other chip, at a
    # device's share of the link.
    once = sent / 2 / 600e9 + sent / 2 / 50e9
    assert seconds(predicted(efficiency=EXACT, **flags), "expert communication") == pytest.approx(3 * 4 * once)
    again = predicted(efficiency=EXACT, **flags | dict(remat="full"))
    assert seconds(again, "expert communication") == pytest.approx(3 * 5 * once)  # the rows are sent again
    weighted_after = dataclasses.replace(EXACT, weighted_before=False)
    again = predicted(efficiency=weighted_after, **flags | dict(remat="full"))
    assert seconds(again, "expert communication") == pytest.approx(3 * 6 * once)
    saved = predicted(efficiency=weighted_after, **flags | dict(remat="minimal"))
    assert seconds(saved, "expert communication") == pytest.approx(3 * 5 * once)
    # The reference gathers the tokens of 4 devices, 2 of them on a chip, and scatters their sums.
    plain = predicted(efficiency=EXACT, **flags | dict(moe_impl="reference"))
    gathered = plain.run.collective_s("all_gather", 4 * 1024 * 512 * 2, "expert")
    assert seconds(plain, "expert communication") == pytest.approx(3 * 4 * gathered)


def test_chunks_of_tokens_hide_nothing():
    """The step waits for all messages of the experts, in one chunk or in four, as compiled programs do."""
    experts = dict(num_experts=8, experts_per_token=2, expert_dim=256)
    flags = SMALL | experts | dict(mesh="data:32,expert:4", batch=128)
    for moe_parts in (1, 4):
        part = next(p for p in predicted(**flags, moe_parts=moe_parts).parts if p.name == "expert communication")
        assert part.exposed_s == part.seconds > 0


def test_no_part_is_exposed_for_longer_than_it_takes():
    for flags in (
        dict(preset="llama3.1-70b", num_layers=1, batch=128, seq_len=128),
        dict(preset="llama3.1-70b", batch=256, mesh="pipe:4,fsdp:16,tensor:2", microbatches=4),
        dict(preset="llama3.1-8b", batch=16, mesh="data:2,fsdp:8,context:8", remat="minimal_offloaded"),
        dict(preset="deepseek-v3", batch=512, mesh="fsdp:32,expert:4"),
    ):
        for part in predicted(**flags).parts:
            assert 0 <= part.exposed_s <= part.seconds * (1 + 1e-9), part


def test_a_pipeline_is_idle_at_both_ends():
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", batch=256)
    for microbatches in (1, 2, 8):
        prediction = predicted(**flags, microbatches=microbatches)
        idle = seconds(prediction, "pipeline bubble")
        names = ("matmul", "attention", "elementwise", "loss", "fsdp communication", "copies of weights")
        working = sum(seconds(prediction, name) for name in names)
        assert idle / (idle + working) == pytest.approx(3 / (microbatches + 3))
    # Every stage has embedding and unembedding.
    table, params = 1024 * 512, transformer.num_params(prediction.run.config)
    assert prediction.memory["weights"] == pytest.approx(4 * ((params - 2 * table) / 4 + 2 * table) / 32)


@pytest.mark.parametrize(
    "flags, ticks, alone",
    [
        (dict(), 8 + 3, 3),  # before the first backward pass: P - 1 ticks, all ticks, or two rounds less one tick
        (dict(pipeline_schedule="gpipe"), 8 + 3, 8 + 3),
        (dict(pipeline_schedule="circular", pipeline_rounds=2, num_layers=8), 16 + 3, 7),
    ],
    ids=["1f1b", "gpipe", "circular"],
)
def test_messages_of_ticks_with_passes_of_one_kind_are_exposed(flags, ticks, alone):
    """In other ticks a pass takes longer than its two messages of 1 MiB, over a link of 50 GB/s."""
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", microbatches=8, ff_dim=32_768) | flags
    prediction = predicted(efficiency=EXACT, **flags)
    message = 1e-6 + 1024 * 512 * 2 / 50e9
    assert seconds(prediction, "pipe communication", False) == pytest.approx(2 * ticks * message)
    assert seconds(prediction, "pipe communication") == pytest.approx(2 * alone * message)


def test_more_rounds_are_less_idle_and_send_more():
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", batch=256, microbatches=8, num_layers=16)
    plain, two = predicted(**flags), predicted(**flags, pipeline_schedule="circular", pipeline_rounds=2)
    assert seconds(plain, "pipeline bubble") == pytest.approx(2 * seconds(two, "pipeline bubble"))
    sent = [seconds(prediction, "pipe communication", False) for prediction in (plain, two)]
    assert sent[1] / sent[0] == pytest.approx((2 * 8 + 3) / (8 + 3))


def test_memory_of_the_microbatches_in_flight():
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", batch=1024, microbatches=16, num_layers=16, remat="full")
    saved = lambda **more: predicted(**flags | more).memory["saved activations"]
    once = saved(microbatches=1, batch=64) / 2  # saved, and copied for the backward pass
    assert saved() == pytest.approx((7 + 1) * once)
    assert saved(pipeline_schedule="gpipe") == pytest.approx((16 + 1) * once)
    assert saved(pipeline_schedule="circular", pipeline_rounds=2) == pytest.approx(((3 * 4 - 1) / 2 + 1) * once)
    assert saved(remat_stage=True) == pytest.approx(once + 7 * once / 4)  # four layers a stage, and the input of one


def test_a_stage_that_is_computed_again_takes_a_forward_pass_more():
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", batch=256, microbatches=8)
    plain, again = predicted(**flags), predicted(**flags, remat_stage=True)
    assert seconds(again, "matmul") == pytest.approx(4 / 3 * seconds(plain, "matmul"))
    assert seconds(again, "fsdp communication", False) > seconds(plain, "fsdp communication", False)


def test_a_pipeline_offloads_as_much_as_fsdp():
    flags = dict(preset="llama3.1-70b", batch=1024, microbatches=8, remat="custom")
    flags |= dict(remat_tensors="decoder_layer_input:offload")
    offload_s = lambda mesh, **more: seconds(predicted(**flags | more, mesh=mesh), "host offload", False)
    times = [offload_s("fsdp:128"), offload_s("pipe:4,fsdp:32", remat_stage=True)]
    assert times[0] == times[1] == pytest.approx(2 * 80 * 8192 * 2 * 1024 * 8192 / 128 / 16e9)


def test_gradients_of_replicas_are_summed_across_slices():
    flags = dict(preset="llama3.1-70b", batch=512, mesh="data:2,fsdp:128", remat="full")
    prediction = predicted(num_slices=2, **flags)
    nbytes = 4 * transformer.num_params(prediction.run.config) / 128
    assert seconds(prediction, "gradient sum") == pytest.approx(2 * nbytes / 2 / (6.25e9 * 0.89), rel=1e-3)
    sharded = predicted(num_slices=2, **flags, shard_update=True)
    assert seconds(sharded, "gradient sum") == pytest.approx(3 / 4 * nbytes / (6.25e9 * 0.89), rel=1e-3)
    assert sharded.memory["optimizer"] == prediction.memory["optimizer"] / 2
    assert seconds(sharded, "update") == seconds(prediction, "update") / 2


def test_what_is_offloaded_waits_for_the_host():
    flags = dict(preset="llama3.1-8b", mesh="fsdp:128", batch=128)
    on_device, offloaded = predicted(**flags, remat="minimal"), predicted(**flags, remat="minimal_offloaded")
    moved = (
        transformer.saved_bytes_per_token(on_device.run.config, anatomy.offloaded_names(offloaded.run.config)) * 8192
    )
    assert offloaded.host_bytes == pytest.approx(moved)
    assert on_device.hbm_bytes - offloaded.hbm_bytes == pytest.approx(moved)
    assert seconds(offloaded, "host offload", False) == pytest.approx(2 * moved / 16e9)
    assert offloaded.bound == "host" and offloaded.step_s > 2 * on_device.step_s
    slow, fast = CHIPS["v6e"], dataclasses.replace(CHIPS["v6e"], pcie_bytes_per_s=64e9)
    config = from_preset(**flags | dict(mesh="fsdp:64"), remat="minimal_offloaded")
    times = [seconds(predict(run_of(config, chip, (8, 8))), "host offload", False) for chip in (slow, fast)]
    assert times[0] == pytest.approx(2 * times[1])


def test_the_transfer_to_the_host_hides_behind_the_forward_pass_alone():
    """In long sequences the kernel's backward pass takes longer than the transfer back; the rest hides nothing."""
    prediction = predicted(preset="llama3.1-8b", mesh="fsdp:128", batch=128, seq_len=98_304, remat="minimal_offloaded")
    (kind,) = (step.Kind(layer, prediction.run) for layer in workload.layers_of(prediction.run))
    forward_s, backward_s = (kind.times * s for s in kind.by_part["attention"])
    one_way_s = prediction.host_bytes / 16e9
    assert forward_s < one_way_s < backward_s
    assert seconds(prediction, "host offload") == pytest.approx(one_way_s - forward_s)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_next_batch_is_transferred_during_the_step(microbatches):
    prediction = predicted(preset="llama3.1-8b", mesh="fsdp:64,tensor:2", batch=128, microbatches=microbatches)
    assert (
        seconds(prediction, "input", False) == pytest.approx(2 * 8192 * 20 / 16e9) and seconds(prediction, "input") == 0
    )


def test_rows_that_do_not_fill_registers_are_copied_for_their_exchange():
    """Six exchanges were 4 s of a step of gpt-oss-120b, compiled (docs/RESULTS.md); there are five now.

    None is needed for rows of 4096 and 7168.
    """
    saved = dict(remat="custom", remat_tensors="context:device,out_proj:device")
    flags = dict(preset="gpt-oss-120b", batch=1280, double_buffer=True, microbatches=2, **saved)
    copies = lambda **more: seconds(predicted(**flags | more), "copies of rows")
    assert copies(mesh="fsdp:16,expert:8") == pytest.approx(4 * 5 / 6, rel=0.1)
    assert copies(mesh="fsdp:64,expert:2") == 0  # tokens are gathered
    assert copies(mesh="data:2,fsdp:64") == 0  # they are not sent
    assert copies(mesh="fsdp:64,expert:2", moe_impl="capacity") == 0  # they are in dense arrays
    more = copies(mesh="fsdp:16,expert:8", remat_tensors="out_proj:device,expert_input:device")
    assert more == pytest.approx(copies(mesh="fsdp:16,expert:8") * 4 / 5)  # none is sent again
    for preset, batch in (("qwen3-235b-a22b", 512), ("deepseek-v3", 512)):
        assert copies(preset=preset, batch=batch, mesh="fsdp:8,expert:16", remat="full", remat_tensors="") == 0


def test_fsdp_in_two_dims_gathers_a_share_over_the_first_axis_and_all_over_the_second():
    run_with = lambda mesh: predicted(preset="llama3.1-8b", mesh=mesh, batch=512).run
    run = run_with("fsdp:16,fsdp_transpose:8")
    for kind in ("all_gather", "reduce_scatter"):
        share, all_ = run.collective_s(kind, 1e9 / 8, "fsdp"), run.collective_s(kind, 1e9, "fsdp_transpose")
        assert run.weights_s(kind, 1e9) == share + all_ > all_ > 0
    # On the dies the second gather is what a single one over all devices does last.
    dies, single = run_with("fsdp:64,fsdp_transpose:2"), run_with("fsdp:128")
    assert dies.weights_s("all_gather", 1e9) == pytest.approx(single.weights_s("all_gather", 1e9), rel=1e-3)
    (formula,) = [part.formula for part in predict(run).parts if part.name == "fsdp communication"]
    assert "over fsdp:16 on y" in formula and "then fsdp_transpose:8 on die to die" in formula


# -- memory


def test_the_state_is_sharded_by_the_mesh():
    flags = dict(preset="llama3.1-70b", batch=128)
    params = transformer.num_params(from_preset(**flags))
    for mesh in ("fsdp:128", "fsdp:32,tensor:4", "fsdp:16,tensor:8", "fsdp:16,fsdp_transpose:8"):
        prediction = predicted(**flags, mesh=mesh)
        assert prediction.memory["weights"] == prediction.memory["gradients"] == pytest.approx(4 * params / 128)
        assert prediction.memory["optimizer"] == pytest.approx(8 * params / 128)
    assert predicted(**flags, mesh="data:2,fsdp:64").memory["weights"] == pytest.approx(4 * params / 64)
    halved = predicted(**flags, mesh="fsdp:128", mu_dtype="bfloat16")
    assert halved.memory["optimizer"] == pytest.approx(6 * params / 128)
    cheap = predicted(**flags, mesh="fsdp:128", mu_dtype="bfloat16", nu_dtype="bfloat16", grad_dtype="bfloat16")
    assert cheap.memory["optimizer"] == pytest.approx(4 * params / 128)
    assert cheap.memory["gradients"] == pytest.approx(2 * params / 128)
    moe = dict(preset="qwen3-235b-a22b", batch=512)
    all_experts = transformer.parts(from_preset(**moe))["experts"].params
    prediction = predicted("tpu7x:4x8x8", **moe, mesh="fsdp:64,expert:8")
    others = transformer.num_params(prediction.run.config) - all_experts
    assert prediction.memory["weights"] == pytest.approx(4 * (all_experts / 512 + others / 64))


def test_the_gradient_of_a_tied_embedding_waits_for_the_layers():
    """In float32, 4*V*D bytes; with a table of each, its gradient is sent before the layers' backward pass."""
    flags = dict(preset="gemma4-31b", mesh="fsdp:128", batch=512)
    tied, apart = (predicted(**flags, tied_embeddings=tied).memory for tied in (True, False))
    assert tied["gradient of the embedding"] == 4 * 262_144 * 5376 and "gradient of the embedding" not in apart
    assert tied["a layer's activations"] == apart["a layer's activations"]
    assert "gradient of the embedding" not in predicted("tpu7x:1x1x1", **flags | dict(mesh="data:2", batch=2)).memory


@pytest.mark.parametrize("preset", PRESETS)
def test_saved_activations_are_those_of_transformer(preset):
    for remat in ("none", "full", "minimal"):
        config = from_preset(preset, remat=remat, batch=8, mesh="data:8", fp8="none")
        run = run_of(config, TPU7X, (2, 2, 1))
        kinds = workload.layers_of(run)
        memory, _ = workload.memory_of(run, kinds)
        factor = workload.PLAIN if remat == "none" else 1  # for what has no name
        saved = transformer.saved_bytes_per_token(config, columns=workload.COLUMNS_OF_A_TILE)
        assert memory["saved activations"] == factor * saved * config.seq_len
        assert sum(layer.num_layers for layer in kinds) == config.num_layers
        counted = sum(layer.num_layers * (layer.params.experts + layer.params.others) for layer in kinds)
        parts = transformer.parts(config)
        tables = ("embedding", "layer embedding", "unembedding")
        outside = sum(parts[name].params for name in tables if name in parts) + config.model_dim
        if config.ple_dim:  # the projection and the norm before the layers
            outside += config.model_dim * config.num_layers * config.ple_dim + config.ple_dim
        assert counted == transformer.num_params(config) - outside


def test_operands_of_fp8_matmuls_are_saved_in_fp8():
    """Without recomputation, a layer's norms, attention's result and the MLP's product take a byte less an element."""
    flags = dict(preset="llama3.1-8b", mesh="fsdp:128", batch=128, remat="none")
    saved = [predicted(**flags, fp8=fp8).memory["saved activations"] for fp8 in ("none", "dynamic")]
    assert saved[0] - saved[1] == pytest.approx(32 * 8192 * (3 * 4096 + 14_336))


def test_heads_fill_tiles_of_memory():
    """64 heads of 64 take the memory of 64 heads of 128, but for attention's result, in which they are side by side.

    Compiled, the last run here needs 77.4 GiB.
    """
    saved = dict(remat="custom", remat_tensors="context:device,qkv_proj:device")
    of_layer = lambda **more: transformer.saved_bytes_per_layer(from_preset("gpt-oss-120b", **saved), **more)
    heads = 2 * (64 * 64 + 8 * 64 + 8 * 64)
    assert of_layer(columns=128) == of_layer(columns=64) + heads == of_layer() + heads
    flags = dict(preset="gpt-oss-120b", batch=1280, mesh="fsdp:128", dim_multiple=128, prefetch=False, fp8="dynamic")
    memory = predicted(**flags, remat="custom", remat_tensors="context:device").hbm_bytes
    assert memory == pytest.approx(77.4 * GiB, rel=0.05)


# -- what cannot be


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(mesh="fsdp:64"), "mesh fsdp:64 is for 64 devices and there are 128"),
        (
            dict(batch=100),
            "batch=100 must be a multiple of data*fsdp*fsdp_transpose*expert*microbatches=128; nearest is 128",
        ),
        (dict(batch=64), "nearest is 128; or a context axis, so that 2 devices share a sequence"),
        (dict(batch=128, microbatches=3), "microbatches=384"),
        (dict(batch=128, mesh="fsdp:8,tensor:16"), "num_kv_heads=8 must be a multiple of tensor=16"),
        (
            dict(preset="gpt-oss-120b", batch=128),
            "nearest are 2816 and 2944; or fsdp:64,fsdp_transpose:2; or --dim_multiple=128, which adds zeros",
        ),
        (
            dict(preset="gpt-oss-120b", batch=128, mesh="fsdp:8,fsdp_transpose:16", head_dim=24),
            "head_dim=24 must be a multiple of fsdp_transpose=16; nearest are 16 and 32",
        ),
        (dict(batch=128, mesh="pipe:3,fsdp:*"), "128 devices are not a multiple of 3"),
        (dict(batch=128, mesh="pipe:128"), "num_layers=80 must be a multiple of pipe * pipeline_rounds = 128"),
        (dict(batch=128, mesh="fsdp:64,expert:2"), "mesh axis expert:2 is for mixtures of experts"),
        (
            dict(batch=128, seq_len=8190, mesh="fsdp:32,context:4"),
            "seq_len=8190 must be a multiple of context*2 (context_balance)=8",
        ),
    ],
)
def test_impossible_runs(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        predicted(**{"preset": "llama3.1-70b"} | flags)


def test_long_context_needs_a_context_axis():
    """8B at 128k on 64 devices: a sequence a device fits with `full`; `minimal` fits only with a context axis."""
    flags = dict(preset="llama3.1-8b", topology="tpu7x:2x4x4", seq_len=131_072)
    assert not predicted(**flags, batch=64, mesh="fsdp:64", remat="minimal").fits
    assert predicted(**flags, batch=64, mesh="fsdp:64", remat="full").fits
    assert predicted(**flags, batch=8, mesh="fsdp:8,context:8", remat="minimal").fits
    # Compiled for TPU7x by libtpu 0.0.50 from model.py, with 2 layers and a small vocabulary: 29.68 GiB. Most of it is
    # what a layer needs in its backward pass.
    short = flags | dict(topology="tpu7x:2x2x1", num_layers=2, vocab_size=2048)
    layer = predicted(**short, batch=8, mesh="fsdp:8", remat="full")
    assert layer.hbm_bytes / GiB == pytest.approx(29.68, rel=0.05)
    assert layer.memory["a layer's activations"] > 0.8 * layer.hbm_bytes


# -- command line


def ran(capsys, command: str) -> str:
    roofline.main(command.split())
    return capsys.readouterr().out


def test_step_command(capsys):
    command = "step --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --remat=save_qkv_proj "
    command += "--xla_flags=recommended"
    out = ran(capsys, command)
    for words in (
        "llama3.1-70b on tpu7x:4x4x4, 64 chips, predicted",
        "fsdp 128 (die to die, x, y, z)",
        "256 sequences of 8,192: 2,097,152 tokens",
        "bound by compute",
        "942.1 PFLOP a step",
        "of 94.7 GiB a device",
    ):
        assert words in out, out
    assert "996.2 TFLOP/s * 0.96" not in out
    explained = ran(capsys, f"{command} --explain")
    assert "996.2 TFLOP/s * 0.96" in explained and "551,200,832 parameters * 28 B / 3.21 TB/s" in explained
    result = json.loads(ran(capsys, f"{command} --json"))
    keys = "step_s mfu flops_per_step hbm_bytes tokens_per_s_per_chip exposed_comm_s bound fits parts memory_bytes"
    assert {*keys.split()} <= result.keys()
    assert result["step_s"] == pytest.approx(sum(part["exposed_s"] for part in result["parts"].values()))
    assert result["hbm_bytes"] == pytest.approx(sum(result["memory_bytes"].values()))
    assert f"{result['step_s']:.4g} s" in out and result["kind"] == "predicted"
    assert result["tokens_per_s_per_chip"] == pytest.approx(2_097_152 / result["step_s"] / 64)
    assert "DOES NOT FIT" in ran(capsys, "step --preset=llama3.1-70b --batch=1024 --remat=none")


def test_only_flags_that_change_the_step_change_its_prediction(capsys):
    """Flags of the run do not. The compiler's flag of remat.py, on offload, saves 10 GiB."""
    command = "step --preset=llama3.1-70b --mesh=fsdp:128 --batch=128 --remat=qkv_proj_offloaded --json"
    others = "--corpus=c.bin --checkpoint_dir=runs --save_every=9 --metrics_file=m --profile_dir=p --profile_steps=4:5 "
    others += "--seed=1 --eval_every=9 --log_every=1 --sample=0 --coordinator=h:1 --num_processes=2 --process_id=0"
    assert ran(capsys, f"{command} {others}") == ran(capsys, command)
    less = ran(capsys, f"{command} --xla_flags=xla_tpu_pipeline_memory_host_transfers=false")
    hbm_gib = lambda out: json.loads(out)["hbm_bytes"] / GiB
    assert hbm_gib(ran(capsys, command)) - hbm_gib(less) == pytest.approx(10, rel=0.1)


def test_matmuls_on_the_roofline(capsys):
    """w_q of Llama 3.1 8B, [8192, 4096] . [4096, 4096], is bound by compute; experts with few tokens by memory."""
    rows = {name: row for name, *row in presentation.matmuls(predicted(preset="llama3.1-8b", batch=128))}
    assert rows["w_q"] == [2 * 8192 * 4096 * 4096, 2 * (4096**2 + 2 * 8192 * 4096), 1153.5e12]
    assert set(rows) == {"w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down"}
    few = predicted(preset="qwen3-235b-a22b", batch=128, seq_len=1024, mesh="fsdp:128")
    flops, nbytes, speed = next(row for name, *row in presentation.matmuls(few) if name == "expert_gate")
    assert nbytes == 2 * (128 * 4096 * 1536 + 1024 * 8 * (4096 + 1536)) and flops == 2 * 1024 * 8 * 4096 * 1536
    assert speed == flops / nbytes * 3.69e12 < 1153.5e12 / 4
    out = ran(capsys, "step --preset=qwen3-235b-a22b --batch=128 --seq_len=1024 --explain")
    assert re.search(r"expert_gate .* memory$", out, re.MULTILINE) and "312.6 FLOPs a byte" in out


@pytest.mark.slow
def test_step_plot(capsys, tmp_path):
    path = tmp_path / "step.png"
    ran(capsys, f"step --preset=llama3.1-8b --batch=128 --plot={path}")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if not preset.startswith("tiny")])
def test_every_preset_has_a_step(preset, capsys):
    out = ran(capsys, f"step --preset={preset} --topology=tpu7x:8x8x8 --mesh=data:*,fsdp:64 --batch=1024 --explain")
    config = Config(**PRESETS[preset] | dict(preset=preset))
    assert f"{transformer.train_flops_per_token(config) * 1024 * config.seq_len / 1e15:.4g} PFLOP a step" in out
