"""The step and its memory: against measured runs, against the counts of transformer.py, and part by part by hand."""

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
from predicted import step, transformer, workload
from predicted.interconnect import all_gather
from predicted.step import predict
from predicted.workload import Efficiency, run_of
from published import RECIPES

TPU7X = CHIPS["tpu7x"]
GiB = 2**30
EXACT = Efficiency(
    matmul=1,
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
    chip, chips = parse_topology(topology)
    return predict(run_of(from_preset(**flags), chip, chips, num_slices=num_slices, efficiency=efficiency))


def seconds(found: step.Prediction, name: str, exposed: bool = True) -> float:
    return sum(part.exposed_s if exposed else part.seconds for part in found.parts if part.name == name)


def test_both_passes_of_the_layers_are_all_that_they_compute():
    """Backward takes twice as long, and what is recomputed besides."""
    config = dict(preset="llama3.1-70b", mesh="fsdp:128", batch=256)
    ratios = []
    for remat in ("minimal_with_context", "full"):
        found = predict(run_of(from_preset(**config, remat=remat), CHIPS["tpu7x"], (4, 4, 4)))
        parts = sum(seconds(found, name) for name in ("matmul", "attention", "elementwise"))
        assert sum(found.passes.values()) == pytest.approx(parts)
        ratios.append(found.passes["backward"] / found.passes["forward"])
    # Recomputed is less than the forward pass: no gradient needs what the MLP's last matmul gives.
    assert 2 < ratios[0] < 2.3 and 0.6 < ratios[1] - ratios[0] < 0.75


# -- against measured runs


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.measured_step_s])
def test_measured_runs(name):
    """Within 15% for dense models and 30% for experts; FLOPs within 0.5%. One set of efficiencies, the same for all."""
    recipe, found = RECIPES[name], recipes.predicted(name, workload.PUBLISHED)
    tolerance = 0.30 if found.run.config.num_experts else 0.15
    assert found.step_s == pytest.approx(recipe.measured_step_s, rel=tolerance)
    assert found.mfu == pytest.approx(
        found.flops_per_step / found.step_s / found.run.num_chips / found.run.chip.bf16_flops_per_s
    )
    if recipe.measured_tflops and recipe.preset != "gemma-31b-like":  # which is like Gemma 4 31B, and not it
        flops = recipe.measured_tflops * 1e12 * found.run.num_chips * recipe.measured_step_s
        assert found.flops_per_step == pytest.approx(flops, rel=0.005)


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


def test_the_runs_that_chose_an_efficiency_stay_explained():
    for name in ("llama3.1-70b-8k-bf16", "llama3.1-70b-8k-fp8", "qwen3-235b-a22b-4k-bf16"):
        step_s = recipes.predicted(name, workload.PUBLISHED).step_s
        assert step_s == pytest.approx(RECIPES[name].measured_step_s, rel=0.02)


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


def test_at_the_chips_figures_it_is_flops_over_peak():
    """With all efficiencies 1 and nothing to move: the step is the FLOPs of transformer.py over the chips' peak."""
    # The kernel's backward pass has five matmuls where four are counted; scores are counted at half, exactly.
    found = predicted(
        "tpu7x:4x4x4", efficiency=EXACT, mesh="data:128", batch=128, **{k: v for k, v in SMALL.items() if k != "batch"}
    )
    config, tokens = found.run.config, 128 * 1024
    flops = transformer.forward_flops_per_token(config)
    matmuls = sum(flops[name] for name in ("attention", "mlp"))
    assert seconds(found, "matmul") == pytest.approx(3 * matmuls * tokens / 64 / 2307e12)
    half = 2 * 4 * 4 * 128 * (1024 / 2 + 1 / 2) * 4 / 4  # 2 matmuls * 4 heads * 128 * keys, 4 layers, forward
    assert seconds(found, "attention") == pytest.approx((1 + 5 / 2) * 4 * half / 2 * tokens / 64 / 2307e12, rel=1e-6)
    assert seconds(found, "loss") == pytest.approx(3 * flops["unembedding"] * tokens / 64 / 2307e12)


# Cycles of a causal head of 128, forward and backward, compiled: benchmarks/cliffs.py has the sizes.
HEAD_CYCLES = {1024: 4110 + 5212, 1025: 8270 + 10_066, 2048: 8936 + 14_212, 2049: 14_598 + 20_630}
HEAD_CYCLES |= {4096: 21_394 + 44_890, 4097: 31_562 + 54_866}


def cliffs_of(preset: str = "llama3.1-8b", **flags) -> list[str]:
    chip, chips = parse_topology("tpu7x:2x2x1")
    return step.cliffs(run_of(from_preset(preset, **dict(mesh="fsdp:8", batch=8, remat="none") | flags), chip, chips))


@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_a_length_whose_last_tiles_are_almost_empty_is_named(length):
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
def test_a_length_that_fills_its_tiles_is_not_named(seq_len):
    assert cliffs_of(seq_len=seq_len) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(expert_dim=14_335), "expert_dim=14,335: the experts' kernels are refused, .*; the nearest is 14,336$"),
        (dict(expert_dim=28_670, mesh="fsdp:4,tensor:2"), "expert_dim=28,670: .*refused.*; the nearest is 28,672$"),
        (dict(model_dim=4000), "model_dim=4,000: .*refused.*; the nearest is 4,096$"),
        (dict(model_dim=4000, expert_dim=14_335), "model_dim=4,000 and expert_dim=14,335: .* 4,096 and 14,336$"),
        (dict(expert_dim=14_464), ""),
        (dict(expert_dim=14_335, moe_impl="capacity"), ""),
        (dict(expert_dim=1000), ""),  # whole in VMEM
        (dict(), ""),
    ],
)
def test_experts_that_no_tiles_fit_are_named(flags, words):
    found = cliffs_of("mixtral-8x7b", **flags)
    assert len(found) == bool(words) and all(re.match(words, sentence) for sentence in found), found


def test_what_is_printed_of_a_step_names_its_cliffs():
    shown = step.describe(predicted("tpu7x:2x2x1", preset="llama3.1-8b", mesh="fsdp:8", batch=8, seq_len=1025))
    assert "  cliff    seq_len=1,025: " in shown


@pytest.mark.parametrize("remat", ["none", "full", "save_qkv_proj", "minimal", "save_out_proj"])
def test_recomputed_matmuls_are_those_of_transformer(remat):
    found = predicted(efficiency=EXACT, **SMALL | dict(batch=128), mesh="data:128", remat=remat)
    config = found.run.config
    flops, again = transformer.forward_flops_per_token(config), transformer.recomputed_flops_per_token(config)
    matmuls = sum(3 * flops[name] + again.get(name, 0) for name in ("attention", "mlp"))
    assert seconds(found, "matmul") == pytest.approx(matmuls * 1024 / 1153.5e12)
    assert ("scores" in again) == (
        seconds(found, "attention")
        > seconds(predicted(efficiency=EXACT, **SMALL | dict(batch=128), mesh="data:128"), "attention")
    )


def test_experts_are_counted_as_they_are_visited():
    experts = dict(num_experts=8, experts_per_token=2, expert_dim=256)
    found = predicted(efficiency=EXACT, **SMALL | dict(batch=128), **experts, mesh="data:128")
    flops = transformer.forward_flops_per_token(found.run.config)
    # The router's 8 columns are padded to the matrix unit's 256, and multiplied in float32, in as long as 4 of bf16.
    padded = flops["attention"] + flops["experts"] + 4 * flops["router"] * 256 / 8
    assert seconds(found, "matmul") == pytest.approx(3 * padded * 1024 / 1153.5e12)
    tiles = predicted(
        efficiency=dataclasses.replace(EXACT, expert_tile=512), **SMALL | dict(batch=128), **experts, mesh="data:128"
    )
    # 1024 tokens * 2 / 8 = 256 rows an expert, and 512 more for the ends of its tiles.
    more = flops["experts"] * 512 / 256
    assert seconds(tiles, "matmul") == pytest.approx(3 * (padded + more) * 1024 / 1153.5e12)


def test_head_dims_that_do_not_fill_the_matrix_unit():
    """Attention takes as long for heads of 64 as of 128 and 192, and a little longer for 256; other dims are padded."""
    times = [seconds(predicted(**SMALL | dict(head_dim=dim)), "attention") for dim in (64, 128, 192, 256, 512)]
    assert times[0] == times[1] == times[2] == pytest.approx(times[3] / 1.22) == pytest.approx(times[4] / 2.44)
    narrow, wide = (seconds(predicted(**SMALL | dict(ff_dim=dim)), "matmul") for dim in (1025, 1280))
    assert narrow == wide


@pytest.mark.parametrize("seq_len", [8192, 131_072])
def test_a_length_without_divisors_takes_what_its_neighbours_take(seq_len):
    """8,191 and 131,071 are prime; 8,193 positions are 9 chunks of 911, of which 6 are filled up."""
    flags = dict(preset="llama3.1-8b", mesh="data:8", batch=8)
    times = [seconds(predicted("tpu7x:2x2x1", **flags, seq_len=n), "loss") for n in (seq_len - 1, seq_len, seq_len + 1)]
    assert max(times) < 1.05 * min(times)


def test_chunks_that_are_small_wait_for_the_sum_of_gradients():
    """A chunk reads and writes 8 bytes of each of dw's D V elements, and reads the unembedding twice, 2 bytes each.

    Beside that it multiplies 8 rows, of which dw's matmul is hidden behind nothing, and reads 16 bytes of each logit.
    """
    flags = dict(preset="llama3.1-8b", mesh="data:8", batch=8)
    small, large = (predicted("tpu7x:2x2x1", **flags, loss_chunk=chunk) for chunk in (8, 8192))
    reached = 0.87 * 7380e9 / 2
    least = 8192 / 8 * 128_256 * 4096 * ((8 + 2 + 2) / reached)
    multiplied = 8192 * 128_256 * (2 * 4096 / (0.83 * 1153.5e12) + 16 / (0.37 * 7380e9 / 2))
    assert seconds(small, "loss") == pytest.approx(least + multiplied, rel=1e-3) and seconds(
        small, "loss"
    ) > 50 * seconds(large, "loss")


def test_8_bits_halve_the_layers_matmuls_and_what_travels():
    once = dict(preset="llama3.1-70b", mesh="fsdp:128", batch=128)
    bf16, fp8 = predicted(**once), predicted(**once, fp8="dynamic")
    assert seconds(fp8, "matmul") == pytest.approx(seconds(bf16, "matmul") / 2)
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


@pytest.mark.parametrize("scales, nbytes", [("dynamic", 5), ("fixed", 3)])
def test_rows_of_experts_are_scaled_in_passes_of_their_own(scales, nbytes):
    """Read for the maximum, read again, written in 8 bits: what goes into both matmuls of an expert, four times."""
    flags = dict(preset="mixtral-8x7b", mesh="fsdp:128", batch=1024, seq_len=4096, remat="full")
    with_8_bits = predicted(**flags, fp8=scales)
    more = seconds(with_8_bits, "elementwise") - seconds(predicted(**flags), "elementwise")
    rows = 2 * 1024 * 4096 / 128 * 32  # of all layers, two experts a token
    speed = TPU7X.hbm_bytes_per_s / 2 * workload.TODAY.elementwise
    assert more == pytest.approx(4 * rows * (4096 + 14_336) * nbytes / speed, rel=1e-6)
    of_others = predicted(**flags, fp8=scales, fp8_modules="qkv,out")
    assert seconds(of_others, "elementwise") == seconds(predicted(**flags), "elementwise")


def test_what_stays_in_16_bits_costs_what_it_did():
    """A layer of Mixtral has 33 times as many weights in its experts as elsewhere, of which a token meets 8.4 times."""
    once = dict(preset="mixtral-8x7b", batch=512, mesh="fsdp:128", remat="none")
    bf16, fp8 = predicted(**once), predicted(**once, fp8="dynamic")
    experts, others = (predicted(**once, fp8="dynamic", fp8_modules=modules) for modules in ("moe", "qkv,out,mlp"))
    for name, all_of in (("matmul", True), ("fsdp communication", False)):
        both, of_experts, of_others = (
            seconds(bf16, name, all_of) - seconds(found, name, all_of) for found in (fp8, experts, others)
        )
        assert both == pytest.approx(of_experts + of_others)
        assert of_experts > 8 * of_others > 0


def test_fsdp_hides_behind_compute():
    """Two gathers a layer, over the dies first, then three axes at once; a reduce-scatter round a ring of all devices.

    A gather hides behind a layer, the sum behind attention's backward pass, which is what a layer has left then.
    """
    # D = 128 * 64, so that a layer's weights are large.
    flags = SMALL | dict(model_dim=8192, ff_dim=16384, num_layers=8, tied_embeddings=True, mesh="fsdp:128")
    of_attention, of_mlp = 4 * 8192 * 4 * 128, 3 * 8192 * 16384
    nbytes = 2 * (of_attention + of_mlp + 2 * 8192)
    die, wire = 600e9, 100e9 / 2
    gather = nbytes / 2 / die + 21 / 32 * nbytes / 2 / 3 / wire
    scatter = nbytes / 2 / (2 * wire)  # which passes a chip's links for both of its devices
    table = 2 * 1024 * 8192
    ends = table / 2 / die + 21 / 32 * table / 2 / 3 / wire + table / 2 / (2 * wire)
    moved = 2 * gather + scatter

    def of(batch, seq_len, efficiency=EXACT, **more):
        """The prediction; what of a layer's messages hides; both passes of a layer, and attention's backward."""
        found = predicted(efficiency=efficiency, **flags | dict(batch=batch, seq_len=seq_len) | more)
        matmul, kernel = (seconds(found, name) / 8 for name in ("matmul", "attention"))
        assert seconds(found, "fsdp communication", False) == pytest.approx(8 * moved + ends, rel=1e-3)
        hidden = (8 * moved + ends - seconds(found, "fsdp communication")) / 7  # nothing of one layer does
        attention = 2 / 3 * matmul * of_attention / (of_attention + of_mlp) + 5 / 7 * kernel
        return found, hidden, (matmul / 3 + 2 / 7 * kernel, 2 / 3 * matmul + 5 / 7 * kernel), attention

    found, hidden, _, attention = of(5120, 4096)
    assert found.bound == "compute" and attention > scatter and hidden == pytest.approx(moved, rel=1e-3)
    found, hidden, _, attention = of(1280, 1024)
    assert found.bound == "compute" and moved > hidden == pytest.approx(2 * gather + attention, rel=1e-3)
    _, hidden, *_ = of(1280, 1024, dataclasses.replace(EXACT, late_sums=False))
    assert hidden == pytest.approx(moved, rel=1e-3)
    found, hidden, (forward, backward), _ = of(128, 128)
    assert found.bound == "communication" and backward < gather
    assert hidden == pytest.approx(forward + backward, rel=1e-2)
    assert of(5120, 4096, prefetch=False)[1] == pytest.approx(0, abs=1e-6)


def test_sums_go_over_three_axes_in_thirds_or_round_a_ring():
    run = lambda **flags: predicted(**dict(preset="llama3.1-8b", mesh="fsdp:128", batch=512) | flags).run
    in_thirds = lambda of: workload.layers_of(of)[0].gathered_params_by_3(of)
    plain, wide, padded = run(), run(ff_dim=3 * 4096), run(xla_flags=f"{compiler_flags.PADS_SUMS}=true")
    assert (in_thirds(plain), in_thirds(wide)) == (0, 3 * 4096 * 3 * 4096)
    seconds_of = lambda of, kind, **how: of.collective_s(kind, 1e9, "fsdp", **how)
    link = TPU7X.link_bytes_per_s * workload.TODAY.links
    assert seconds_of(plain, "reduce_scatter") == pytest.approx(1e9 / (2 * link))
    at_once = seconds_of(plain, "all_gather")
    assert seconds_of(padded, "reduce_scatter") == seconds_of(plain, "reduce_scatter", divisible_by_3=True) == at_once
    assert at_once < 0.7 * 1e9 / (2 * link)
    # With `tensor` on the dies, two rings share the links; half an axis is no way of its own, for gathers neither.
    assert seconds_of(run(mesh="fsdp:64,tensor:2"), "reduce_scatter") == pytest.approx(1e9 / link)
    said = lambda of: next(part.formula for part in predict(of).parts if part.name == "fsdp communication")
    assert "100% of it round one ring" in said(plain) and "ring" not in said(padded)
    assert "22% of it round one ring" in said(wide)  # attention's matrices
    half = run(mesh="data:2,fsdp:64")
    assert seconds_of(half, "all_gather") == seconds_of(half, "reduce_scatter", divisible_by_3=True) == 1e9 / (2 * link)


def test_what_is_recomputed_hides_no_sum():
    """It is ahead of the MLP's gradients; and what is behind them is a quarter with a quarter of the tokens."""
    run = lambda **flags: predicted(preset="llama3.1-70b", mesh="fsdp:128", batch=512, **flags).run
    behind = lambda of: workload.after_mlp_s(of, *workload.layers_of(of))
    kept, again, parts = run(remat="none"), run(remat="full"), run(remat="full", microbatches=4)
    assert behind(kept) == pytest.approx(behind(again)) == pytest.approx(4 * behind(parts))
    by_part = workload.compute_s(kept, *workload.layers_of(kept))
    assert by_part["attention"][1] < behind(kept) < sum(backward for _, backward in by_part.values()) / 2


def test_copies_of_weights():
    """Those gathered ahead are copied for the next turn, forward; all, and gradients, if they are cut within a tile."""
    flags = dict(preset="llama3.1-8b", batch=256, remat="full")
    speed = TPU7X.hbm_bytes_per_s / 2 * workload.TODAY.elementwise
    of_layers = 2 * 2 * (transformer.num_params(from_preset("llama3.1-8b")) - 2 * 128_256 * 4096) / speed  # and back
    copies = lambda **more: seconds(predicted(**flags | more), "copies of weights")
    assert copies(mesh="fsdp:128") == pytest.approx(of_layers, rel=1e-4)
    assert copies(mesh="fsdp:128", microbatches=2) == pytest.approx(2 * of_layers, rel=1e-4)
    # A stage whose forward pass is run once more copies twice.
    stages = dict(mesh="pipe:2,fsdp:64", microbatches=4)
    assert copies(**stages, remat_stage=True) == pytest.approx(2 * copies(**stages))
    assert copies(mesh="data:128,fsdp:1") == copies(mesh="fsdp:128", double_buffer=True) == 0
    assert copies(mesh="fsdp:128", prefetch=False) == copies(mesh="fsdp:128", efficiency=workload.PUBLISHED) == 0
    # 5376 / 128 = 42 rows, whatever the loop: two gathers and a gradient.
    gemma = dict(preset="gemma-31b-like", mesh="fsdp:128")
    assert (
        copies(**gemma, double_buffer=True)
        == pytest.approx(copies(**gemma))
        == pytest.approx(3 * copies(**gemma | dict(mesh="data:4,fsdp:32")), rel=1e-4)
    )
    # Rows of all experts as one matrix are no parts of tiles: attention's weights alone are copied oftener.
    gpt = dict(preset="gpt-oss-120b", mesh="data:2,fsdp:64", double_buffer=True)
    assert 0 < copies(**gpt) < copies(**gpt, num_experts=0, experts_per_token=0, expert_dim=0, ff_dim=128 * 2880) / 100


def test_microbatches_gather_anew():
    flags = dict(preset="llama3.1-70b", mesh="fsdp:128", batch=512, remat="full")
    one, four = (predicted(**flags, microbatches=count) for count in (1, 4))
    assert seconds(four, "fsdp communication", False) == pytest.approx(4 * seconds(one, "fsdp communication", False))
    assert seconds(four, "matmul") == pytest.approx(seconds(one, "matmul"))
    assert four.memory["saved activations"] == one.memory["saved activations"] / 4


def test_tensor_parallelism_moves_the_stream():
    """2 gathers and 2 reduce-scatters a layer, forward and backward, here on the two dies of a chip."""
    flags = SMALL | dict(mesh="data:64,tensor:2", batch=64, seq_len=8192)
    found = predicted(efficiency=EXACT, **flags)
    stream = 8192 * 512 * 2
    message, ends = stream / 2 / 600e9, 4  # and of the embedding's result and the loss's operand, both ways
    assert seconds(found, "tensor communication") == pytest.approx((4 * 8 + ends) * message)
    # Plain differentiation keeps both gathered operands whole, in 4 layers.
    named = transformer.saved_bytes_per_token(found.run.config)
    assert found.memory["saved activations"] == pytest.approx(8192 / 2 * (workload.PLAIN * named + 4 * 2 * 2 * 512))
    # Both gathers again, and attention's scatter; without the latter where the stream behind attention can be had.
    again = predicted(efficiency=EXACT, **flags | dict(remat="full"))
    assert seconds(again, "tensor communication") == pytest.approx((4 * 11 + ends) * message)
    kept = predicted(efficiency=EXACT, **flags | dict(remat="minimal_with_context"))
    assert seconds(kept, "tensor communication") == pytest.approx((4 * 10 + ends) * message)
    # Norms that are saved by name are so before they are gathered: no fewer gathers, and a part of each in memory.
    norms = dict(remat="custom", remat_tensors="norm_attention:device,norm_mlp:device")
    named = predicted(efficiency=EXACT, **flags | norms)
    assert seconds(named, "tensor communication") == seconds(again, "tensor communication")
    more = named.memory["saved activations"] - again.memory["saved activations"]
    assert more == 8192 / 2 * 4 * 2 * 2 * 512
    hidden = predicted(efficiency=EXACT, **flags | dict(collective_matmul=True))
    assert seconds(hidden, "tensor communication", False) == seconds(found, "tensor communication")
    assert seconds(hidden, "tensor communication") == pytest.approx((4 * 8 / 2 + ends) * message)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("expert", [1, 2])
def test_no_matmul_hides_what_goes_into_experts_over_tensor(expert, shared):
    """Of a mixture's layer attention's messages, and a shared expert's; rows that travel are as many as have room."""
    mixture = dict(num_experts=8, experts_per_token=2, expert_dim=256, num_shared_experts=shared)
    flags = SMALL | mixture | dict(mesh=f"data:{64 // expert},expert:{expert},tensor:2", batch=64, seq_len=8192)
    found = predicted(efficiency=EXACT, **flags)
    message, ends = 8192 * 512 * 2 / 2 / 600e9, 4
    rows = {1: 1, 2: 2 * 2.0}[expert]  # over those of the stream: a token once, or each of its experts, with room
    dense, bare = 4 * 4 * (1 + shared), 4 * 4 * rows  # 4 layers; 2 messages a sub-layer, both ways
    assert seconds(found, "tensor communication") == pytest.approx((dense + bare + ends) * message)
    hidden = predicted(efficiency=EXACT, **flags | dict(collective_matmul=True))
    assert seconds(hidden, "tensor communication") == pytest.approx((dense / 2 + bare + ends) * message)
    (part,) = (part for part in found.parts if part.name == "tensor communication")
    assert f"gathered or reduce-scattered {dense + bare + ends:.0f} times" in part.formula


def test_context_parallelism_passes_keys_and_values_on():
    flags = SMALL | dict(mesh="data:16,context:8", seq_len=8192, batch=16, num_kv_heads=2)
    found = predicted(efficiency=EXACT, **flags)
    kv = 1024 * 2 * (128 + 128) * 2  # of a device
    die, wire = 600e9, 50e9
    once = kv * 8 / 2 / die + all_gather(kv * 8 / 2, 4).link_bytes / wire
    hop = kv / (2 * wire)  # of every second device, to the next chip
    ring = seconds(found, "context communication", False)
    assert ring == pytest.approx(4 * 7 * (1 + 1 + 2) * hop, rel=0.1)  # and the time to arrive
    gathered = predicted(efficiency=EXACT, **flags | dict(context_impl="all_gather"))
    assert seconds(gathered, "context communication", False) > 4 * 2 * once
    assert seconds(gathered, "context communication") == seconds(gathered, "context communication", False)
    exchanged = predicted(efficiency=EXACT, **flags | dict(context_impl="all_to_all", num_heads=8))
    assert seconds(exchanged, "context communication") == seconds(exchanged, "context communication", False) > 0
    # In order, the last device has the rows that see most; with a window nobody has.
    uneven = predicted(efficiency=EXACT, **flags | dict(context_balance=False))
    assert seconds(uneven, "attention") == pytest.approx(seconds(found, "attention") * (2 - 1 / 8))
    near = predicted(efficiency=EXACT, **flags | dict(window=256))
    assert seconds(near, "context communication", False) == pytest.approx(4 * 2 * (hop * 255 / 1024 + 1e-6))
    assert seconds(found, "context communication") < seconds(found, "context communication", False)
    # Every device has an eighth of the work, of the whole sequence's keys.
    alone = predicted(efficiency=EXACT, **flags | dict(mesh="data:128", batch=128))
    assert seconds(found, "attention") == pytest.approx(seconds(alone, "attention") / 8)


def test_groups_that_exchange_heads_share_the_links_between_them():
    """Four of 8 exchange over a die and half an axis of 4 chips; the ring of 2 jumps over a chip, two to a link."""
    flags = SMALL | dict(mesh="data:16,context:8", seq_len=8192, batch=16, num_kv_heads=2, num_heads=8)
    found = predicted(efficiency=EXACT, **flags, context_heads=4)
    a_head = 1024 * (128 + 128) * 2  # bytes of a device's tokens; two heads of keys go to four devices
    ring = 2e-6 + 4 * a_head / (50e9 / 2)
    exchange = (8 + 4) * a_head / 2 * (1 / 600e9 + 1 / 50e9)
    expected = 4 * ((1 + 1 + 2) * ring + 2 * exchange)
    assert seconds(found, "context communication", False) == pytest.approx(expected)
    # Half of a ring is a line; across such halves it is still one.
    (inner,), (outer,) = step.split_axis([Axis(8, 50e9, 1e-6, wrap=True)], 4)
    assert inner == Axis(4, 50e9, 1e-6, wrap=False) and outer == Axis(2, 12.5e9, 4e-6, wrap=True)


def test_neighbours_exchange_heads_and_the_ring_goes_across_them():
    """Two dies exchange over their own link; in a ring of 4 each device has half of a wire."""
    flags = SMALL | dict(mesh="data:16,context:8", seq_len=8192, batch=16, num_kv_heads=2, num_heads=8)
    found = predicted(efficiency=EXACT, **flags, context_heads=2)
    a_head = 1024 * (128 + 128) * 2  # bytes of a device's tokens
    die, wire = 600e9, 50e9
    ring, exchange = 3 * 2 * a_head / wire, (8 + 2) * a_head / 2 / die
    expected = 4 * ((1 + 1 + 2) * ring + 2 * exchange)
    assert seconds(found, "context communication", False) == pytest.approx(expected, rel=0.1)
    assert seconds(found, "context communication") >= 4 * 2 * exchange
    # All of the axis exchanging is the all-to-all.
    whole, exchanged = (
        predicted(efficiency=EXACT, **flags, **how) for how in (dict(context_heads=8), dict(context_impl="all_to_all"))
    )
    assert [part.seconds for part in whole.parts] == [part.seconds for part in exchanged.parts]
    assert whole.memory == exchanged.memory


def test_expert_parallelism_sends_tokens_there_and_back():
    experts = dict(num_experts=8, experts_per_token=2, expert_dim=256, num_dense_layers=1)
    flags = SMALL | experts | dict(mesh="data:32,expert:4", batch=128)
    sent = 1024 * 512 * 2 * 2
    # Half of it to the other die; half of a ring of 4 chips: a line of 2, half of it to the other, at a device's share.
    once = sent / 2 / 600e9 + sent / 2 / 50e9
    assert seconds(predicted(efficiency=EXACT, **flags), "expert communication") == pytest.approx(3 * 4 * once)
    again = predicted(efficiency=EXACT, **flags | dict(remat="full"))
    assert seconds(again, "expert communication") == pytest.approx(3 * 6 * once)
    kept = predicted(efficiency=EXACT, **flags | dict(remat="minimal"))
    assert seconds(kept, "expert communication") == pytest.approx(3 * 5 * once)
    # The plain way gathers the tokens themselves, of 4 devices, 2 of them on a chip, and scatters their sums.
    plain = predicted(efficiency=EXACT, **flags | dict(moe_impl="reference"))
    gathered = plain.run.collective_s("all_gather", 4 * 1024 * 512 * 2, "expert")
    assert seconds(plain, "expert communication") == pytest.approx(3 * 4 * gathered)


def test_parts_of_the_tokens_hide_nothing():
    """As compiled: all messages of the experts are waited for, of one part or four."""
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
        found = predicted(**flags, microbatches=microbatches)
        idle = seconds(found, "pipeline bubble")
        names = ("matmul", "attention", "elementwise", "loss", "fsdp communication", "copies of weights")
        working = sum(seconds(found, name) for name in names)
        assert idle / (idle + working) == pytest.approx(3 / (microbatches + 3))
    # Every stage has embedding and unembedding.
    table, params = 1024 * 512, transformer.num_params(found.run.config)
    assert found.memory["weights"] == pytest.approx(4 * ((params - 2 * table) / 4 + 2 * table) / 32)


@pytest.mark.parametrize(
    "flags, ticks, alone",
    [
        (dict(), 8 + 3, 3),  # before the first backward pass, all of them, or those of two rounds but one
        (dict(pipeline_schedule="gpipe"), 8 + 3, 8 + 3),
        (dict(pipeline_schedule="circular", pipeline_rounds=2, num_layers=8), 16 + 3, 7),
    ],
    ids=["1f1b", "gpipe", "circular"],
)
def test_messages_of_ticks_with_passes_of_one_kind_are_exposed(flags, ticks, alone):
    """In the others passes compute for longer than two messages take: 1 MiB each, over a wire of 50 GB/s."""
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", microbatches=8, ff_dim=32_768) | flags
    found = predicted(efficiency=EXACT, **flags)
    message = 1e-6 + 1024 * 512 * 2 / 50e9
    assert seconds(found, "pipe communication", False) == pytest.approx(2 * ticks * message)
    assert seconds(found, "pipe communication") == pytest.approx(2 * alone * message)


def test_more_rounds_are_less_idle_and_send_more():
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", batch=256, microbatches=8, num_layers=16)
    plain, two = predicted(**flags), predicted(**flags, pipeline_schedule="circular", pipeline_rounds=2)
    assert seconds(plain, "pipeline bubble") == pytest.approx(2 * seconds(two, "pipeline bubble"))
    sent = [seconds(found, "pipe communication", False) for found in (plain, two)]
    assert sent[1] / sent[0] == pytest.approx((2 * 8 + 3) / (8 + 3))


def test_memory_of_the_microbatches_under_way():
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", batch=1024, microbatches=16, num_layers=16, remat="full")
    saved = lambda **more: predicted(**flags | more).memory["saved activations"]
    once = saved(microbatches=1, batch=64) / 2  # waiting, and taken out for the backward pass
    assert saved() == pytest.approx((7 + 1) * once)
    assert saved(pipeline_schedule="gpipe") == pytest.approx((16 + 1) * once)
    assert saved(pipeline_schedule="circular", pipeline_rounds=2) == pytest.approx(((3 * 4 - 1) / 2 + 1) * once)
    assert saved(remat_stage=True) == pytest.approx(once + 7 * once / 4)  # four layers a stage, and the input of one


def test_a_stage_that_is_computed_again_takes_a_forward_pass_more():
    flags = SMALL | dict(mesh="pipe:4,fsdp:32", batch=256, microbatches=8)
    plain, again = predicted(**flags), predicted(**flags, remat_stage=True)
    assert seconds(again, "matmul") == pytest.approx(4 / 3 * seconds(plain, "matmul"))
    assert seconds(again, "fsdp communication", False) > seconds(plain, "fsdp communication", False)


def test_a_pipeline_offloads_no_more():
    flags = dict(preset="llama3.1-70b", batch=1024, microbatches=8, remat="custom")
    flags |= dict(remat_tensors="decoder_layer_input:offload")
    of = lambda mesh, **more: seconds(predicted(**flags | more, mesh=mesh), "host offload", False)
    times = [of("fsdp:128"), of("pipe:4,fsdp:32", remat_stage=True)]
    assert times[0] == times[1] == pytest.approx(2 * 80 * 8192 * 2 * 1024 * 8192 / 128 / 16e9)


def test_gradients_of_replicas_are_summed_across_slices():
    flags = dict(preset="llama3.1-70b", batch=512, mesh="data:2,fsdp:128", remat="full")
    found = predicted(num_slices=2, **flags)
    nbytes = 4 * transformer.num_params(found.run.config) / 128
    assert seconds(found, "gradient sum") == pytest.approx(2 * nbytes / 2 / (6.25e9 * 0.89), rel=1e-3)
    sharded = predicted(num_slices=2, **flags, shard_update=True)
    assert seconds(sharded, "gradient sum") == pytest.approx(3 / 4 * nbytes / (6.25e9 * 0.89), rel=1e-3)
    assert sharded.memory["optimizer"] == found.memory["optimizer"] / 2
    assert seconds(sharded, "update") == seconds(found, "update") / 2


def test_what_is_offloaded_waits_for_the_host():
    flags = dict(preset="llama3.1-8b", mesh="fsdp:128", batch=128)
    kept, offloaded = predicted(**flags, remat="minimal"), predicted(**flags, remat="minimal_offloaded")
    moved = transformer.saved_bytes_per_token(kept.run.config, anatomy.offloaded_names(offloaded.run.config)) * 8192
    assert offloaded.host_bytes == pytest.approx(moved)
    assert kept.hbm_bytes - offloaded.hbm_bytes == pytest.approx(moved)
    assert seconds(offloaded, "host offload", False) == pytest.approx(2 * moved / 16e9)
    assert offloaded.bound == "host" and offloaded.step_s > 2 * kept.step_s
    slow, fast = CHIPS["v6e"], dataclasses.replace(CHIPS["v6e"], pcie_bytes_per_s=64e9)
    config = from_preset(**flags | dict(mesh="fsdp:64"), remat="minimal_offloaded")
    times = [seconds(predict(run_of(config, chip, (8, 8))), "host offload", False) for chip in (slow, fast)]
    assert times[0] == pytest.approx(2 * times[1])


def test_the_way_out_hides_behind_the_forward_pass_alone():
    """In long sequences the kernel's backward pass is longer than the way back: what it has to spare hides nothing."""
    found = predicted(preset="llama3.1-8b", mesh="fsdp:128", batch=128, seq_len=98_304, remat="minimal_offloaded")
    (kind,) = (step.Kind(layer, found.run) for layer in workload.layers_of(found.run))
    forward_s, backward_s = (kind.times * s for s in kind.by_part["attention"])
    one_way_s = found.host_bytes / 16e9
    assert forward_s < one_way_s < backward_s
    assert seconds(found, "host offload") == pytest.approx(one_way_s - forward_s)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_next_batch_comes_in_meanwhile(microbatches):
    found = predicted(preset="llama3.1-8b", mesh="fsdp:64,tensor:2", batch=128, microbatches=microbatches)
    assert seconds(found, "input", False) == pytest.approx(2 * 8192 * 20 / 16e9) and seconds(found, "input") == 0


def test_rows_that_are_no_whole_registers_are_copied_for_their_exchange():
    """Some 4 s of a step of gpt-oss-120b, compiled (RESULTS.md, "Faster recipes"). Rows of 4096 and 7168 are not."""
    saved = dict(remat="custom", remat_tensors="context:device,out_proj:device")
    flags = dict(preset="gpt-oss-120b", batch=1280, double_buffer=True, microbatches=2, **saved)
    copies = lambda **more: seconds(predicted(**flags | more), "copies of rows")
    assert copies(mesh="fsdp:64,expert:2") == pytest.approx(4, rel=0.1)
    assert copies(mesh="data:2,fsdp:64") == 0  # they do not travel
    assert copies(mesh="fsdp:64,expert:2", moe_impl="capacity") == 0  # in dense arrays
    more = copies(mesh="fsdp:64,expert:2", remat_tensors="out_proj:device,expert_input:device,expert_down:device")
    assert more == pytest.approx(copies(mesh="fsdp:64,expert:2") * 4 / 6)  # nor again
    for preset, batch in (("qwen3-235b-a22b", 512), ("deepseek-v3", 512)):
        assert copies(preset=preset, batch=batch, mesh="fsdp:64,expert:2", remat="full", remat_tensors="") == 0


# -- memory


def test_the_state_is_cut_as_the_mesh_says():
    flags = dict(preset="llama3.1-70b", batch=128)
    params = transformer.num_params(from_preset(**flags))
    for mesh in ("fsdp:128", "fsdp:32,tensor:4", "fsdp:16,tensor:8"):
        found = predicted(**flags, mesh=mesh)
        assert found.memory["weights"] == found.memory["gradients"] == pytest.approx(4 * params / 128)
        assert found.memory["optimizer"] == pytest.approx(8 * params / 128)
    assert predicted(**flags, mesh="data:2,fsdp:64").memory["weights"] == pytest.approx(4 * params / 64)
    halved = predicted(**flags, mesh="fsdp:128", mu_dtype="bfloat16")
    assert halved.memory["optimizer"] == pytest.approx(6 * params / 128)
    moe = dict(preset="qwen3-235b-a22b", batch=512)
    all_experts = transformer.parts(from_preset(**moe))["experts"].params
    found = predicted("tpu7x:4x8x8", **moe, mesh="fsdp:64,expert:8")
    others = transformer.num_params(found.run.config) - all_experts
    assert found.memory["weights"] == pytest.approx(4 * (all_experts / 512 + others / 64))


@pytest.mark.parametrize("preset", PRESETS)
def test_saved_activations_are_those_of_transformer(preset):
    for remat in ("none", "full", "minimal"):
        config = from_preset(preset, remat=remat, batch=8, mesh="data:8", fp8="none")
        run = run_of(config, TPU7X, (2, 2, 1))
        kinds = workload.layers_of(run)
        memory, _ = workload.memory_of(run, kinds)
        more = workload.PLAIN if remat == "none" else 1  # what has no name
        saved = transformer.saved_bytes_per_token(config, columns=workload.COLUMNS_OF_A_TILE)
        assert memory["saved activations"] == more * saved * config.seq_len
        assert sum(layer.num_layers for layer in kinds) == config.num_layers
        counted = sum(layer.num_layers * (layer.params.experts + layer.params.others) for layer in kinds)
        parts = transformer.parts(config)
        outside = sum(parts[name].params for name in ("embedding", "unembedding") if name in parts) + config.model_dim
        assert counted == transformer.num_params(config) - outside


def test_what_matmuls_in_8_bits_read_is_saved_in_8_bits():
    """Without recomputation, a byte less of each: a layer's norms, attention's result and the MLP's product."""
    flags = dict(preset="llama3.1-8b", mesh="fsdp:128", batch=128, remat="none")
    saved = [predicted(**flags, fp8=fp8).memory["saved activations"] for fp8 in ("none", "dynamic")]
    assert saved[0] - saved[1] == pytest.approx(32 * 8192 * (3 * 4096 + 14_336))


def test_heads_fill_tiles_of_memory():
    """64 of 64 take what 64 of 128 do: as is saved last here, gpt-oss-120b needs 116.9 GiB, compiled."""
    saved = dict(remat="custom", remat_tensors="context:device,qkv_proj:device")
    of_layer = lambda **more: transformer.saved_bytes_per_layer(from_preset("gpt-oss-120b", **saved), **more)
    heads = 2 * (64 * 64 + 8 * 64 + 8 * 64 + 64 * 64)
    assert of_layer(columns=128) == of_layer(columns=64) + heads == of_layer() + heads
    flags = dict(preset="gpt-oss-120b", batch=1280, mesh="fsdp:64,expert:2", double_buffer=True, microbatches=2)
    assert predicted(**flags, remat="save_dot_with_context_except_mlp").hbm_bytes > 105 * GiB


# -- what cannot be


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(mesh="fsdp:64"), "mesh fsdp:64 is for 64 devices and there are 128"),
        (dict(batch=100), "batch=100 must be a multiple of data*fsdp*expert*microbatches=128; nearest is 128"),
        (dict(batch=64), "nearest is 128 (or a context axis, so that 2 devices share a sequence)"),
        (dict(batch=128, microbatches=3), "microbatches=384"),
        (dict(batch=128, mesh="fsdp:8,tensor:16"), "num_kv_heads=8 must be a multiple of tensor=16"),
        (dict(preset="gpt-oss-120b", batch=128), "model_dim=2880 must be a multiple of tensor*fsdp=128"),
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
    """8B at 128k on 64 devices: a device's sequence fits with `full`, not with `minimal`; that with a context axis."""
    flags = dict(preset="llama3.1-8b", topology="tpu7x:2x4x4", seq_len=131_072)
    assert not predicted(**flags, batch=64, mesh="fsdp:64", remat="minimal").fits
    assert predicted(**flags, batch=64, mesh="fsdp:64", remat="full").fits
    assert predicted(**flags, batch=8, mesh="fsdp:8,context:8", remat="minimal").fits
    # Compiled for TPU7x by libtpu 0.0.50 from model.py, of 2 layers and hardly a vocabulary: 29.68 GiB, most of it what
    # a layer needs in its backward pass.
    short = flags | dict(topology="tpu7x:2x2x1", num_layers=2, vocab_size=2048)
    layer = predicted(**short, batch=8, mesh="fsdp:8", remat="full")
    assert layer.hbm_bytes / GiB == pytest.approx(29.68, rel=0.05)
    assert layer.memory["a layer's activations"] > 0.8 * layer.hbm_bytes


# -- command line


def ran(capsys, command: str) -> str:
    roofline.main(command.split())
    return capsys.readouterr().out


def test_step_command(capsys):
    command = "step --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --remat=save_qkv_proj"
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
    assert "1.153 PFLOP/s * 0.83" not in out
    explained = ran(capsys, f"{command} --explain")
    assert "1.153 PFLOP/s * 0.83" in explained and "551,200,832 parameters * 28 B / 3.21 TB/s" in explained
    found = json.loads(ran(capsys, f"{command} --json"))
    keys = "step_s mfu flops_per_step hbm_bytes tokens_per_s_per_chip exposed_comm_s bound fits parts memory_bytes"
    assert {*keys.split()} <= found.keys()
    assert found["step_s"] == pytest.approx(sum(part["exposed_s"] for part in found["parts"].values()))
    assert found["hbm_bytes"] == pytest.approx(sum(found["memory_bytes"].values()))
    assert f"{found['step_s']:.4g} s" in out and found["kind"] == "predicted"
    assert found["tokens_per_s_per_chip"] == pytest.approx(2_097_152 / found["step_s"] / 64)
    assert "DOES NOT FIT" in ran(capsys, "step --preset=llama3.1-70b --batch=1024 --remat=none")


def test_of_the_flags_of_a_run_those_count_that_change_the_step(capsys):
    """The compiler's flag as remat.py has it, on offload: 10 GiB."""
    command = "step --preset=llama3.1-70b --mesh=fsdp:128 --batch=128 --remat=qkv_proj_offloaded --json"
    others = "--corpus=c.bin --checkpoint_dir=runs --save_every=9 --metrics_file=m --profile_dir=p --profile_steps=4:5 "
    others += "--seed=1 --eval_every=9 --log_every=1 --sample=0 --coordinator=h:1 --num_processes=2 --process_id=0"
    assert ran(capsys, f"{command} {others}") == ran(capsys, command)
    less = ran(capsys, f"{command} --xla_flags=xla_tpu_pipeline_memory_host_transfers=false")
    hbm_gib = lambda out: json.loads(out)["hbm_bytes"] / GiB
    assert hbm_gib(ran(capsys, command)) - hbm_gib(less) == pytest.approx(10, rel=0.1)


def test_matmuls_on_the_roofline(capsys):
    """w_q of Llama 3.1 8B, [8192, 4096] . [4096, 4096], is bound by compute; experts of few tokens are by memory."""
    found = {name: row for name, *row in step.matmuls(predicted(preset="llama3.1-8b", batch=128))}
    assert found["w_q"] == [2 * 8192 * 4096 * 4096, 2 * (4096**2 + 2 * 8192 * 4096), 1153.5e12]
    assert set(found) == {"w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down"}
    few = predicted(preset="qwen3-235b-a22b", batch=128, seq_len=1024, mesh="fsdp:128")
    flops, nbytes, speed = next(row for name, *row in step.matmuls(few) if name == "expert_gate")
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
