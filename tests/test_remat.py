"""The tensors that a policy saves, the FLOPs it repeats and its cost, read from jaxprs and compiled programs."""

import dataclasses
import math
import re
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import pytest
from support import (
    MIXTURES,
    ON_TENSOR_CORES,
    SMALL,
    assert_close,
    equations,
    init,
    make_batch,
    matmul_flops,
    on_mesh,
    trace,
)

import anatomy
import aot
import hardware
import remat
import sharding
import tuned
from config import REMAT_POLICIES, Config
from flags import from_preset
from predicted import step, transformer, workload
from predicted.workload import run_of

ROOT = Path(remat.__file__).parent
MESH = "data:2,fsdp:2,tensor:2"
CUSTOM = (
    "mlp_up:device",
    "qkv_proj:device,norm_attention:device,mlp_product:device",
    "mlp_input:device,out_proj:device,norm_mlp:offload,context:remat",
    "decoder_layer_input:offload,context:offload,mlp_gate:offload,mlp_down:device",
    "decoder_layer_input:offload:0.25,context:device",
)
POLICIES = [dict(remat=name) for name in REMAT_POLICIES if name not in ("none", "custom")]
POLICIES += [dict(remat="custom", remat_tensors=tensors) for tensors in CUSTOM]
named = lambda flags: flags.get("remat_tensors") or flags["remat"]
MODELS = {  # with grouped queries
    "plain": dict(),
    "qk_norm": dict(qk_norm=True, num_kv_heads=4),
    "post_norms": dict(post_norms=True),
}


# -- the program


def cases():
    """Every policy with the plain model, and some with the other."""
    quick, some = ("minimal_offloaded", CUSTOM[2]), ("full", "save_dot_with_context_except_mlp", CUSTOM[1])
    for policy in POLICIES:
        yield pytest.param(policy, id=f"plain-{named(policy)}", marks=pytest.mark.slow)
        if (name := named(policy)) in quick + some:
            marks = [] if name in quick else [pytest.mark.slow]
            yield pytest.param(MODELS["qk_norm"] | policy, id=f"qk_norm-{name}", marks=marks)


@pytest.fixture(scope="module")
def cache():
    """The results without recomputation, by config."""
    return {}


@pytest.mark.at_most(8)
@pytest.mark.slow
@pytest.mark.parametrize("flags", list(cases()))
def test_loss_and_gradients_are_those_without_recomputation(flags, cache):
    config = Config(**SMALL | dict(num_layers=2) | flags, mesh=MESH)
    once = dataclasses.replace(config, remat="none", remat_tensors="")
    params, batch = init(config), make_batch(config)

    def gradients(config):
        _, per_device, place = on_mesh(config)
        loss, _, grads = per_device(place(params), batch)
        return jax.device_get((loss, grads))

    if once not in cache:
        cache[once] = gradients(once)
    (loss, grads), (want_loss, want_grads) = gradients(config), cache[once]
    assert abs(loss - want_loss) <= 1e-6 * abs(want_loss)
    assert_close(grads, want_grads, 1e-6)


def saved_residuals(config: Config) -> tuple[Counter, Counter]:
    """({(name, memory space): elements a layer}, {shape: count} of arrays without a name), on a device.

    They are the arrays that the forward loop over layers saves for the backward pass. Scalars are left out.
    """
    by_name, nameless = Counter(), Counter()
    for eqn in equations(trace(config)):
        if eqn.primitive.name != "scan" or eqn.params["length"] != config.num_layers or eqn.params["reverse"]:
            continue
        body = eqn.params["jaxpr"].jaxpr
        makes = {var: inner for inner in body.eqns for var in inner.outvars}
        if not any(inner.primitive.name == "name" for inner in equations(body)):
            continue  # the loop over the chunks of the loss
        for var, out in zip(body.outvars, eqn.outvars, strict=True):
            if out.aval.shape == var.aval.shape or out.aval.size == config.num_layers:
                continue  # part of the carry, or the number of the layer
            maker = makes.get(var)
            while maker is not None and maker.primitive.name in ("reduce_precision", "device_put"):
                maker = makes.get(maker.invars[0])
            if maker is not None and maker.primitive.name == "name":
                by_name[maker.params["name"], out.aval.memory_space.name] += math.prod(var.aval.shape)
            else:
                nameless[var.aval.shape] += 1
    return by_name, nameless


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [{}, dict(fp8="dynamic", fp8_modules="moe")], ids=["", "fp8"])
@pytest.mark.parametrize(
    ("flags", "kernels"),
    [
        (dict(remat="none"), 1),
        (dict(remat="full", expert_bias=True, swiglu_limit=0.5), 2),
        (dict(remat="minimal"), 0),
        (dict(remat="minimal_with_context"), 0),
        (dict(remat="custom", remat_tensors="expert_gate:device,expert_up:device,expert_product:device"), 1),
        (dict(remat="custom", remat_tensors="expert_up:device,expert_product:device"), 0),
    ],
)
def test_a_tpu_multiplies_by_gate_and_up_as_often_as_predicted(flags, kernels, fp8, monkeypatch):
    """The kernel that also computes their SwiGLU runs as often as predicted, too."""
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    config = Config(**SMALL | MIXTURES["mixtral"] | flags | fp8, mesh="data:8", attention="reference")
    calls = [eqn.params["metadata"] or {} for eqn in equations(trace(config)) if eqn.primitive.name == "pallas_call"]
    keys = [tuned.shape_of(call["tuned_key"]) for call in calls]
    shape = config.model_dim, config.expert_dim
    shapes = [s for name, s in keys if name == "gmm" and (s["K"], s["N"]) == shape and "transpose_rhs" not in s]
    gated = ["gated" in s for s in shapes]
    assert gated.count(True) == kernels
    weights, saved = transformer.weights(config), anatomy.saved_names(config)
    again = sum(transformer.multiplied_again(weights[name], saved, config) for name in ("expert_gate", "expert_up"))
    down = 1  # the gradient through down, whose transposed matrices have the shape of gate's and up's
    assert 2 * gated.count(True) + gated.count(False) - down == 2 + again
    (layer,) = workload.layers_of(run_of(config, TPU7X, CHIPS))
    efficiency = dataclasses.replace(workload.TODAY, gated_experts=kernels > 0)
    assert layer.elementwise == workload.elementwise_elements(config, True, efficiency)


@pytest.mark.slow
@pytest.mark.parametrize("flags", POLICIES, ids=named)
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_saves_the_names_of_its_policy_and_no_more(model, flags):
    config = Config(**SMALL | MODELS[model] | flags, mesh=MESH)
    by_name, nameless = saved_residuals(config)
    offloaded = anatomy.offloaded_names(config)
    sizes = anatomy.activations(config, fused=False)
    tokens = config.batch * config.seq_len // 4  # of a device; tensor:2 shards every tensor with a name
    assert by_name == {
        (name, "Host" if name in offloaded else "Device"): sizes[name] * tokens // 2
        for name in anatomy.read_names(anatomy.saved_names(config), config)
        if name in sizes
    }
    assert not nameless  # neither segments nor the rotary tables, which are the same for all layers
    # So the bytes are the predicted ones, except for the log-sum-exp, which only a kernel has.
    nbytes = transformer.saved_bytes_per_layer(config, anatomy.saved_names(config) - {"log_sum_exp"})
    assert 4 * sum(by_name.values()) == nbytes * tokens / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ratio"),
    [
        (dict(mesh="fsdp:2,expert:2,tensor:2"), 2),  # buffer_factor
        (dict(mesh="fsdp:2,expert:2,tensor:2", buffer_factor=1.25), 4 / 3),  # 120 rows, rounded up to whole registers
        (dict(mesh="fsdp:2,expert:2,tensor:2", buffer_factor=0.5), 0.5),  # all rows are filled
        (dict(mesh="expert:8", experts_per_token=1, buffer_factor=9.0), 8),  # the most that can arrive
        (dict(mesh="fsdp:2,expert:2,tensor:2", moe_impl="capacity", capacity_factor=1.5), 1.5),
        (dict(mesh="fsdp:4,tensor:2"), 1),
    ],
)
def test_experts_save_all_rows_of_their_buffer(flags, ratio):
    config = Config(
        **SMALL
        | dict(num_experts=8, experts_per_token=2, expert_dim=32, head_dim=128, remat="custom")
        | dict(remat_tensors="routing:remat,expert_input:device,expert_gate:device,expert_up:device,expert_down:device")
        | flags
    )
    run = run_of(config, TPU7X, CHIPS)
    assert run.expert_buffer_ratio == ratio
    assert run.experts_filled == (1 if config.moe_impl == "capacity" else min(1, 1 / ratio))
    by_name, _ = saved_residuals(config)
    expert_sizes = {name: size for (name, _), size in by_name.items() if name.startswith("expert_")}
    rows_are_sent = "expert:" in config.mesh and not run.gathered_over  # sharded over tensor
    row_copies = 1 if rows_are_sent else 2
    sizes = anatomy.activations(config, experts=True, expert_buffer_ratio=ratio, row_copies=row_copies)
    assert expert_sizes.keys() == {"expert_input", "expert_gate", "expert_up"}  # nobody reads the results
    assert expert_sizes == {name: sizes[name] * run.tokens / run.tensor for name in expert_sizes}
    saved = workload.memory_of(run, workload.layers_of(run))[0]["saved activations"]
    assert saved == pytest.approx(4 * sum(by_name.values()) * config.num_layers)


def backward_operations(config: Config) -> Counter:
    """{primitive: how often the backward pass of a layer has it}."""
    loops = (eqn for eqn in equations(trace(config)) if eqn.primitive.name == "scan" and eqn.params["reverse"])
    return Counter(eqn.primitive.name for loop in loops for eqn in equations(loop.params["jaxpr"].jaxpr))


@pytest.mark.parametrize(("mesh", "numbers"), [("fsdp:8", 5), ("fsdp:4,expert:2", 12)])
def test_the_backward_pass_does_not_choose_experts_again(mesh, numbers):
    """It sorts the gradient of the weights, and no more. Each policy saves a few numbers of each pair for that.

    The two devices of `expert` sort the pairs of both, and the rows of a round by token.
    """
    config = Config(**SMALL | MIXTURES["mixtral"], mesh=mesh, remat="full")
    by_name, _ = saved_residuals(config)
    pairs = config.batch * config.seq_len // 8 * config.experts_per_token
    assert by_name["routing", "Device"] == numbers * pairs
    assert anatomy.activations(config, experts=True)["routing"] == 5 * config.experts_per_token
    backward = backward_operations(config)
    assert (backward["sort"], backward["argmax"]) == (1, 0)
    again = dataclasses.replace(config, remat="custom", remat_tensors="routing:remat")
    backward = backward_operations(again)
    assert backward["sort"] >= 4 and backward["argmax"] == config.experts_per_token
    assert anatomy.saved_names(config) - anatomy.saved_names(again) == {"routing"}


def test_every_activation_of_a_dense_layer_has_its_name():
    """With the sizes of anatomy.py. A policy could not save a name that the model does not use."""
    config = Config(**SMALL, mesh=MESH, qk_norm=True)
    names = {}
    for eqn in equations(trace(config)):
        if eqn.primitive.name == "name":
            names[eqn.params["name"]] = math.prod(eqn.outvars[0].aval.shape)
    sizes = anatomy.activations(config, fused=False)
    del sizes["scores"]  # plain attention never saves them; a kernel has none
    assert names == {name: size * config.batch * config.seq_len // 8 for name, size in sizes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("flags", POLICIES, ids=named)
@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:4,tensor:2"])
def test_the_backward_pass_repeats_the_predicted_matmuls(mesh, flags):
    config = Config(**SMALL | flags, mesh=mesh)
    once = dataclasses.replace(config, remat="none", remat_tensors="")
    rotation = (config.head_dim, config.head_dim)  # the matmul of RoPE, which predictions leave out
    flops = lambda config: matmul_flops(trace(config), without=rotation)
    repeated = 8 * (flops(config) - flops(once))
    saved = anatomy.saved_names(config)
    # Plain attention recomputes its scores even if its result is saved, as a kernel does that saves their log-sum-exp.
    again = transformer.recomputed_flops_per_token(config, saved, kernel_scores={"context", "log_sum_exp"} <= saved)
    whole_square = again.get("scores", 0) + again.get("mix", 0)
    assert repeated == (sum(again.values()) + whole_square) * config.batch * config.seq_len


# -- the numbers of the module's docstring


TPU7X, CHIPS = hardware.parse_topology("tpu7x:2x2x1")
LLAMA = partial(from_preset, "llama3.1-8b", mesh="fsdp:8", batch=8, seq_len=8192)


def test_the_numbers_of_the_docstring():
    """The costs of a byte recomputed, saved in HBM and offloaded; and the lengths from which offloads hide."""
    run = run_of(LLAMA(remat="full", xla_flags="recommended"), TPU7X, CHIPS)
    speed, host = run.flops_per_s(), run.host_bytes_per_s
    hbm = run.hbm_bytes_per_s * run.efficiency.hbm
    assert (round(speed / 1e12), round(hbm / 1e11), host) == (956, 32, 16e9)
    assert 2 * speed / hbm == pytest.approx(600, rel=0.01) and 2 * speed / host == pytest.approx(120_000, rel=0.01)
    attention_speed = run.efficiency.attention_forward * run.peak_flops_per_s()
    assert round(attention_speed / 1e12) == 498 and attention_speed / host == pytest.approx(31_000, rel=0.01)
    for policy, tensors, words in (
        ("custom", "decoder_layer_input:offload", "31,000"),
        ("qkv_proj_offloaded", "", "39,000"),
        ("minimal_offloaded", "", "288,000"),
    ):
        config = from_preset("llama3.1-70b", remat=policy, remat_tensors=tensors)
        elements = transformer.saved_bytes_per_layer(config, anatomy.offloaded_names(config)) / 2
        tokens = attention_speed / host * elements / config.model_dim
        assert tokens == pytest.approx(float(words.replace(",", "")), rel=0.01)
        assert words in remat.__doc__
        for seq_len, hides in ((0.9 * tokens, False), (1.1 * tokens, True)):
            flags = dict(mesh="fsdp:16,context:8", batch=16, seq_len=round(seq_len / 8192) * 8192)
            prediction = step.predict(run_of(dataclasses.replace(config, **flags), TPU7X, (4, 4, 4)))
            (part,) = (part for part in prediction.parts if part.name == "host offload")
            assert (part.exposed_s < 0.01 * part.seconds) == hides, (policy, seq_len)


def test_the_policies_of_the_docstring():
    """The elements a token and layer of its table, with the dims of Llama 3.1 8B, where D = NH."""
    config = LLAMA()
    D, N, K, H, F = 4096, 32, 8, 128, 14_336
    with_context = 2 * D + (2 * N + 2 * K) * H
    for policy, formula, elements, log_sum_exp in (
        ("full", "D", D, 0),
        ("save_qkv_proj", "D + (N+2K)H", D + (N + 2 * K) * H, 0),
        ("save_dot_except_mlp", "2D + (N+2K)H", 2 * D + (N + 2 * K) * H, 0),
        ("save_dot_with_context_except_mlp", "2D + (2N+2K)H + N", with_context, N),
        ("minimal_with_context", "the same + 2F", with_context + 2 * F, N),
    ):
        assert re.search(rf"^    {policy} +{re.escape(formula)}   ", remat.__doc__, re.MULTILINE), policy
        nbytes = transformer.saved_bytes_per_layer(dataclasses.replace(config, remat=policy))
        assert nbytes == 2 * elements + 4 * log_sum_exp, policy


# -- compiled for TPU7x

# Small, with most of the memory in the layers: 32 of them, which compile as one, and a small vocabulary.
COMPILED = dict(
    preset="tiny", dtype="bfloat16", num_layers=32, model_dim=512, ff_dim=2048, num_heads=4, num_kv_heads=1
) | dict(head_dim=128, vocab_size=2048, loss_chunk=256, seq_len=512, batch=16, mesh="fsdp:8")


@pytest.mark.at_most(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("full", dict(mesh="fsdp:2,context:4", seq_len=2048, batch=4)),
        ("minimal_offloaded", dict()),
        ("custom", dict(remat_tensors="decoder_layer_input:offload:0.25")),
    ],
)
def test_memory_is_that_of_the_compiled_program(policy, options, programs, request):
    """Device memory within 5%, host memory to the byte. docs/RESULTS.md has every policy, of Llama 3.1 8B and 70B."""
    if policy == "minimal_offloaded":
        request.getfixturevalue("full_effort")  # at low effort its peak is another
    config = Config(**COMPILED | options, remat=policy)
    memory, program = aot.compile_step(aot.lower_step(config, "tpu7x:2x2x1"), ON_TENSOR_CORES, str(programs))
    predicted = step.predict(run_of(config, TPU7X, CHIPS))
    assert 0.95 < predicted.hbm_bytes / memory["peak_hbm_bytes"] < 1.05
    assert memory["host_bytes"] == predicted.host_bytes
    on_host = "S(5)" in program  # the memory space of the host
    assert on_host == (predicted.host_bytes > 0) == (policy != "full")
