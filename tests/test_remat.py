"""What a policy keeps, repeats and costs: read off the jaxpr, and off the program that TPU7x would run."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from test_aot import ON_TENSOR_CORES
from test_fsdp import equations, trace
from test_parallel import MIXTURES, SMALL, assert_close, init, make_batch, on_mesh

import anatomy
import aot
import command
import hardware
import placement
import remat
import roofline
import sharding
import tuned
from config import REMAT_POLICIES, Config
from flags import from_preset
from predicted import planner, recompute, step, transformer, workload
from predicted.workload import run_of

ROOT = Path(remat.__file__).parent
MESH = "data:2,fsdp:2,tensor:2"
CUSTOM = (
    "mlp_up:device",
    "qkv_proj:device,norm_attention:device,mlp_product:device",
    "mlp_input:device,out_proj:device,norm_mlp:offload,context:remat",
    "decoder_layer_input:offload,context:offload,mlp_gate:offload,mlp_down:device",
)
POLICIES = [dict(remat=name) for name in REMAT_POLICIES if name not in ("none", "custom")]
POLICIES += [dict(remat="custom", remat_tensors=tensors) for tensors in CUSTOM]
named = lambda flags: flags.get("remat_tensors") or flags["remat"]
MODELS = {"plain": dict(), "qk_norm": dict(qk_norm=True, num_kv_heads=4)}  # grouped queries, both


# -- what runs


def cases():
    """Every policy with the plain model, some with the other one, of which the quick selection has two."""
    quick, some = ("minimal_offloaded", CUSTOM[2]), ("full", "save_dot_with_context_except_mlp", CUSTOM[1])
    for policy in POLICIES:
        yield pytest.param(policy, id=f"plain-{named(policy)}", marks=pytest.mark.slow)
        if (name := named(policy)) in quick + some:
            marks = [] if name in quick else [pytest.mark.slow]
            yield pytest.param(MODELS["qk_norm"] | policy, id=f"qk_norm-{name}", marks=marks)


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("flags", list(cases()))
def test_loss_and_gradients_are_those_without_recomputation(flags, kept):
    config = Config(**SMALL | dict(num_layers=2) | flags, mesh=MESH)
    once = dataclasses.replace(config, remat="none", remat_tensors="")
    params, batch = init(config), make_batch(config)

    def gradients(config):
        _, per_device, place = on_mesh(config)
        loss, _, grads = per_device(place(params), batch)
        return jax.device_get((loss, grads))

    if once not in kept:
        kept[once] = gradients(once)
    (loss, grads), (want_loss, want_grads) = gradients(config), kept[once]
    assert abs(loss - want_loss) <= 1e-6 * abs(want_loss)
    assert_close(grads, want_grads, 1e-6)


def stacked(config: Config) -> tuple[Counter, Counter]:
    """What the forward loop over the layers hands to the backward pass, a device: {(name, space): elements a layer}.

    And {shape: count} of all that has no name, but for numbers of which a layer has one.
    """
    found, nameless = Counter(), Counter()
    for eqn in equations(trace(config)):
        if eqn.primitive.name != "scan" or eqn.params["length"] != config.num_layers or eqn.params["reverse"]:
            continue
        body = eqn.params["jaxpr"].jaxpr
        makes = {var: inner for inner in body.eqns for var in inner.outvars}
        if not any(inner.primitive.name == "name" for inner in equations(body)):
            continue  # the loop over the chunks of the loss
        for var, out in zip(body.outvars, eqn.outvars, strict=True):
            if out.aval.shape == var.aval.shape or out.aval.size == config.num_layers:
                continue  # carried, not stacked; or the number of the layer
            maker = makes.get(var)
            while maker is not None and maker.primitive.name in ("reduce_precision", "device_put"):
                maker = makes.get(maker.invars[0])
            if maker is not None and maker.primitive.name == "name":
                found[maker.params["name"], out.aval.memory_space.name] += math.prod(var.aval.shape)
            else:
                nameless[var.aval.shape] += 1
    return found, nameless


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [{}, dict(fp8="dynamic", fp8_modules="moe")], ids=["", "fp8"])
@pytest.mark.parametrize(
    ("flags", "kernels"),
    [
        (dict(remat="none"), 1),
        (dict(remat="full"), 2),
        (dict(remat="minimal"), 0),
        (dict(remat="minimal_with_context"), 0),
        (dict(remat="custom", remat_tensors="expert_gate:device,expert_up:device,expert_product:device"), 1),
        (dict(remat="custom", remat_tensors="expert_up:device,expert_product:device"), 0),
    ],
)
def test_a_tpu_multiplies_by_gate_and_up_as_often_as_is_predicted(flags, kernels, fp8, monkeypatch):
    """And the kernel that computes their SwiGLU, too, stands where the roofline has it."""
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    config = Config(**SMALL | MIXTURES["mixtral"] | flags | fp8, mesh="data:8", attention="reference")
    calls = [eqn.params["metadata"] or {} for eqn in equations(trace(config)) if eqn.primitive.name == "pallas_call"]
    keys = [tuned.shape_of(call["tuned_key"]) for call in calls]
    shape = config.model_dim, config.expert_dim
    of_weights = [s for name, s in keys if name == "gmm" and (s["K"], s["N"]) == shape and "transpose_rhs" not in s]
    gated = ["gated" in s for s in of_weights]
    assert gated.count(True) == kernels
    weights, saved = transformer.weights(config), anatomy.saved_names(config)
    again = sum(transformer.multiplied_again(weights[name], saved) for name in ("expert_gate", "expert_up"))
    of_down = 1  # its gradient on the way back, by matrices that lie as those of gate and up do
    assert 2 * gated.count(True) + gated.count(False) - of_down == 2 + again
    (layer,) = workload.layers_of(run_of(config, TPU7X, CHIPS))
    assert layer.elementwise == workload.elementwise_elements(config, True, gated=kernels > 0)


@pytest.mark.slow
@pytest.mark.parametrize("flags", POLICIES, ids=named)
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_saves_what_its_policy_promises_and_no_more(model, flags):
    config = Config(**SMALL | MODELS[model] | flags, mesh=MESH)
    found, nameless = stacked(config)
    offloaded = anatomy.offloaded_names(config)
    sizes = anatomy.activations(config, fused=False)
    tokens = config.batch * config.seq_len // 4  # of a device; tensor:2 cuts everything that has a name
    assert found == {
        (name, "Host" if name in offloaded else "Device"): sizes[name] * tokens // 2
        for name in anatomy.read_names(anatomy.saved_names(config))
        if name in sizes
    }
    assert not nameless  # neither segments nor the rotary tables, which are the same for all layers
    # And so the bytes are those that are predicted, but for the log-sum-exp that only a kernel has.
    nbytes = transformer.saved_bytes_per_layer(config, anatomy.saved_names(config) - {"log_sum_exp"})
    assert 4 * sum(found.values()) == nbytes * tokens / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "room"),
    [
        (dict(mesh="fsdp:2,expert:2,tensor:2"), 2),  # buffer_factor
        (dict(mesh="fsdp:2,expert:2,tensor:2", buffer_factor=1.25), 4 / 3),  # of 120 rows whole registers
        (dict(mesh="fsdp:2,expert:2,tensor:2", buffer_factor=0.5), 0.5),  # all of it filled
        (dict(mesh="expert:8", experts_per_token=1, buffer_factor=9.0), 8),  # more cannot come
        (dict(mesh="fsdp:2,expert:2,tensor:2", moe_impl="capacity", capacity_factor=1.5), 1.5),
        (dict(mesh="fsdp:4,tensor:2"), 1),
    ],
)
def test_experts_save_the_rows_that_they_have_room_for(flags, room):
    config = Config(
        **SMALL | dict(num_experts=8, experts_per_token=2, expert_dim=32, head_dim=128, remat="minimal") | flags
    )
    run = run_of(config, TPU7X, CHIPS)
    assert run.expert_room == room
    assert run.experts_filled == (1 if config.moe_impl == "capacity" else min(1, 1 / room))
    found, _ = stacked(config)
    of_experts = {name: size for (name, _), size in found.items() if name.startswith("expert_")}
    uncut = 1 if "expert:" in config.mesh else 2
    sizes = anatomy.activations(config, experts=True, expert_room=room, uncut=uncut)
    assert {"expert_gate", "expert_up"} < of_experts.keys()
    assert of_experts == {name: sizes[name] * run.tokens / run.tensor for name in of_experts}
    saved = workload.memory_of(run, workload.layers_of(run))[0]["saved activations"]
    assert saved == pytest.approx(4 * sum(found.values()) * config.num_layers)


def test_every_activation_of_a_dense_layer_has_its_name():
    """With the sizes of transformer.py: a name that the model lacked would be promised and not kept."""
    config = Config(**SMALL, mesh=MESH, qk_norm=True)
    names = {}
    for eqn in equations(trace(config)):
        if eqn.primitive.name == "name":
            names[eqn.params["name"]] = math.prod(eqn.outvars[0].aval.shape)
    sizes = anatomy.activations(config, fused=False)
    del sizes["scores"]  # plain attention's are never kept; a kernel has none
    assert names == {name: size * config.batch * config.seq_len // 8 for name, size in sizes.items()}


def matmul_flops(jaxpr) -> int:
    """Two for each multiply-add of every dot_general, as often as its loop runs; not of those that turn heads."""
    flops, turns = 0, (SMALL["head_dim"], SMALL["head_dim"])
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and eqn.invars[1].aval.shape != turns:
            (contracted, _), _ = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
            flops += 2 * summed * math.prod(eqn.outvars[0].aval.shape)
        inner = jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"))
        bodies = [getattr(p, "jaxpr", p) for p in inner if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
        flops += eqn.params.get("length", 1) * sum(map(matmul_flops, bodies))
    return flops


@pytest.mark.slow
@pytest.mark.parametrize("flags", POLICIES, ids=named)
@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:4,tensor:2"])
def test_the_backward_pass_repeats_the_matmuls_that_are_predicted(mesh, flags):
    config = Config(**SMALL | flags, mesh=mesh)
    once = dataclasses.replace(config, remat="none", remat_tensors="")
    found = 8 * (matmul_flops(trace(config)) - matmul_flops(trace(once)))
    saved = anatomy.saved_names(config)
    # Plain attention needs its scores again even where its result is there; as a kernel that has their log-sum-exp.
    again = transformer.recomputed_flops_per_token(config, saved, kernel_scores={"context", "log_sum_exp"} <= saved)
    whole_square = again.get("scores", 0) + again.get("mix", 0)
    assert found == (sum(again.values()) + whole_square) * config.batch * config.seq_len


# -- the host's memory


def test_offload_is_refused_where_there_is_no_host_memory():
    memory = lambda kind: SimpleNamespace(kind=kind)
    device = SimpleNamespace(device_kind="TPU of old", addressable_memories=lambda: [memory("device")])
    mesh = SimpleNamespace(local_devices=[device])
    with pytest.raises(ValueError, match=r"query_proj, value_proj to pinned_host, and TPU of old has .* device only"):
        remat.check_host_memory(Config(remat="qkv_proj_offloaded"), mesh)
    custom = Config(remat="custom", remat_tensors="mlp_up:offload")
    with pytest.raises(ValueError, match="remat=custom offloads mlp_up to"):
        remat.check_host_memory(custom, mesh)
    with pytest.raises(ValueError, match="offload_optimizer puts the optimizer state to pinned_host"):
        remat.check_host_memory(Config(offload_optimizer=True), mesh)
    remat.check_host_memory(Config(remat="minimal"), mesh)  # which needs none
    remat.check_host_memory(custom, sharding.make_mesh(placement.parse_mesh("fsdp:8")))


# -- what is predicted


TPU7X, CHIPS = hardware.parse_topology("tpu7x:2x2x1")
LLAMA = partial(from_preset, "llama3.1-8b", mesh="fsdp:8", batch=8, seq_len=8192)


def predictions(config: Config, gib: float = 96, **changes) -> dict:
    """The step by policy, on a chip whose devices have so much memory."""
    chip = dataclasses.replace(TPU7X, hbm_bytes=2 * gib * 2**30, **changes)
    return recompute.predictions(config, chip, CHIPS)


def test_every_policy_is_predicted_as_by_itself():
    found = predictions(LLAMA(remat="custom", remat_tensors="mlp_up:offload"))
    assert [*found] == [*REMAT_POLICIES]
    for name, one in found.items():
        tensors = "mlp_up:offload" if name == "custom" else ""
        alone = step.predict(run_of(LLAMA(remat=name, remat_tensors=tensors), TPU7X, CHIPS))
        assert (one.step_s, one.hbm_bytes) == (alone.step_s, alone.hbm_bytes)
    assert [*predictions(LLAMA(remat="full"))] == [name for name in REMAT_POLICIES if name != "custom"]


def test_a_row_by_hand():
    """Llama 3.1 8B, 8192 tokens a device: D = NH = 4096, KH = 1024, F = 14336, 32 layers, 16 GB/s to the host."""
    found = predictions(LLAMA())
    full, offloaded = recompute.row(found["full"]), recompute.row(found["minimal_offloaded"])
    assert full["saved_bytes"] == offloaded["saved_bytes"] == 2 * 4096 * 8192
    assert offloaded["offloaded_bytes"] == 2 * 8192 * (4096 + 2 * 1024 + 4096 + 2 * 14_336)
    assert offloaded["host_bytes"] == 32 * offloaded["offloaded_bytes"]
    assert offloaded["host_s"] == pytest.approx(2 * offloaded["host_bytes"] / 16e9)
    assert 0 < offloaded["host_exposed_s"] < offloaded["host_s"] and full["host_s"] == 0
    # The layer's forward but for w_down, and attention; a token's training FLOPs are 6 a parameter and attention.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    attention = 2 * 2 * 4096 * 8192 / 2
    again = 2 * (layer - 4096 * 14_336) + attention
    training = 3 * (2 * layer + attention) + 6 * 4096 * 128_256 / 32
    assert full["recomputed_share"] == pytest.approx(again / training, rel=1e-9)
    assert recompute.row(found["minimal_with_context"])["recomputed_share"] == 0


def test_the_best_policy_is_the_shortest_step_that_fits():
    for gib in (96, 50, 44, 35, 28, 24, 23):
        found = predictions(LLAMA(), gib)
        room = planner.ROOM * 94.74 / 96 * gib * 2**30
        fitting = {name: one.step_s for name, one in found.items() if one.hbm_bytes <= room}
        chosen = recompute.best(found)
        assert chosen in fitting and fitting[chosen] == min(fitting.values())
    assert len({recompute.best(predictions(LLAMA(), gib)) for gib in (96, 44, 28, 24)}) == 4


def test_of_equal_steps_the_one_that_recomputes_least():
    """A link so fast that nothing waits: offloaded and kept take as long, and offloading needs less memory."""
    found = predictions(LLAMA(), pcie_bytes_per_s=1e15)
    pair = {name: found[name] for name in ("minimal", "minimal_offloaded")}
    assert pair["minimal"].step_s == pair["minimal_offloaded"].step_s
    assert recompute.best(pair) == "minimal_offloaded"
    # Two policies that take as long, whose recomputation differs: a copy of one with another's config.
    run = dataclasses.replace(found["minimal"].run, config=found["full"].run.config)
    slow = dataclasses.replace(found["minimal"], run=run, memory={"all": 1.0})
    assert recompute.best({"full": slow, "minimal": found["minimal"]}) == "minimal"


def test_nothing_fits():
    words = r"no policy fits: remat=full lacks least, it needs 20.9 GiB of 9.1 \(92% .*short"
    with pytest.raises(ValueError, match=words):
        recompute.best(predictions(LLAMA(), 10))


def test_a_host_whose_memory_is_not_published_has_no_end():
    config = from_preset("llama3.1-8b", mesh="fsdp:4", batch=4, remat="minimal_offloaded")
    found = step.predict(run_of(config, hardware.CHIPS["v4"], (2, 2, 1)))
    assert found.host_bytes > 0 and found.run.host_limit == math.inf and "host" not in found.lacks()
    assert json.loads(json.dumps(step.as_json(found), allow_nan=False))["host_limit_bytes"] is None
    assert "inf" not in step.describe(found)


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
    names = {one.remat for one in recompute.candidates(from_preset("llama3.1-8b", **flags))}
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
def test_inputs_in_two_layouts_are_there_twice(flags, twice):
    found = step.predict(run_of(LLAMA(**dict(remat="qkv_proj_offloaded") | flags), TPU7X, CHIPS))
    config, saved = found.run.config, found.memory["saved activations"]
    stack = 2 * config.num_layers * config.model_dim * found.run.tokens / found.run.tensor
    policy_alone = transformer.saved_bytes_per_layer(
        config, anatomy.saved_names(config) - anatomy.offloaded_names(config)
    )
    once = policy_alone * config.num_layers * found.run.tokens / found.run.tensor
    assert workload.inputs_in_two_layouts(found.run) == twice
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
def test_wide_heads_round_a_ring_are_there_twice(flags, twice):
    once = dict(num_heads=16, num_kv_heads=4, head_dim=256, remat="custom", remat_tensors="context:device")
    found = step.predict(run_of(LLAMA(**once | dict(mesh="fsdp:2,context:4") | flags), TPU7X, CHIPS))
    config, saved = found.run.config, found.memory["saved activations"]
    stack = 2 * config.num_layers * config.num_heads * config.head_dim * found.run.tokens
    assert workload.context_in_two_layouts(found.run) == twice
    names = transformer.saved_bytes_per_layer(config) * config.num_layers * found.run.tokens
    assert saved == pytest.approx(names + twice * stack)


def test_a_host_has_an_end_too():
    """960 GB of 4 chips, 8 devices. With a link so fast that nothing else speaks against it."""
    flags = dict(mesh="fsdp:16,tensor:2,context:4", batch=16, seq_len=131_072)
    config = from_preset("llama3.1-70b", **flags)
    chip = dataclasses.replace(hardware.CHIPS["tpu7x"], pcie_bytes_per_s=1e15)
    found = recompute.predictions(config, chip, (4, 4, 4))
    offloaded = found["minimal_offloaded"]
    assert offloaded.run.host_limit == 120e9 < offloaded.host_bytes and offloaded.hbm_bytes < offloaded.run.hbm_limit
    assert offloaded.lacks() == {"host": offloaded.host_bytes - 120e9} and not offloaded.fits
    assert recompute.best(found) == "qkv_proj_offloaded" and found["qkv_proj_offloaded"].step_s > offloaded.step_s
    assert step.short_of(offloaded.lacks()) == "73.24 GiB of the host's memory short"


@pytest.mark.parametrize(
    ("preset", "chips", "batch", "seq_len"),
    [
        ("llama3.1-8b", (2, 2, 1), 8, 8192),
        ("llama3.1-8b", (2, 2, 1), 32, 2048),
        ("llama3.1-70b", (4, 4, 4), 128, 8192),
        ("llama3.1-70b", (4, 4, 4), 256, 8192),
        ("llama3.1-405b", (4, 8, 8), 512, 8192),
        ("gemma-31b-like", (4, 4, 4), 128, 8192),
        ("qwen2.5-7b", (2, 2, 1), 8, 32_768),
    ],
)
def test_auto_is_the_shortest_predicted_step_of_all_that_fit(preset, chips, batch, seq_len):
    config = from_preset(preset, mesh="fsdp:*", batch=batch, seq_len=seq_len, remat="auto")
    chosen = recompute.resolve(config, TPU7X, chips)
    assert chosen.remat != "auto" and dataclasses.replace(chosen, remat="auto") == config
    run = lambda name: run_of(dataclasses.replace(config, remat=name), TPU7X, chips)
    found = {name: step.predict(run(name)) for name in REMAT_POLICIES if name != "custom"}
    fitting = [one.step_s for one in found.values() if not one.lacks(planner.ROOM)]
    assert found[chosen.remat].step_s == min(fitting)
    assert recompute.resolve(chosen, TPU7X, chips) is chosen  # nothing is left to choose


def test_auto_is_a_choice_to_be_made_first():
    with pytest.raises(ValueError, match="remat=auto is a choice still to be made"):
        run_of(LLAMA(remat="auto"), TPU7X, CHIPS)


def test_auto_does_not_look_at_the_policy_of_the_config():
    for flags in (dict(remat="full"), dict(remat="custom", remat_tensors="mlp_up:offload")):
        assert recompute.auto(LLAMA(**flags), TPU7X, CHIPS) == recompute.best(predictions(LLAMA()))


def test_the_numbers_of_the_docstring():
    """What a byte costs by recomputation, in HBM, over the host's link; and which offloads hide."""
    of = predictions(LLAMA())["full"].run
    speed, host = of.flops_per_s(), of.host_bytes_per_s
    hbm = of.hbm_bytes_per_s * of.efficiency.hbm
    assert (round(speed / 1e12), round(hbm / 1e11), host) == (957, 32, 16e9)
    assert 2 * speed / hbm == pytest.approx(600, rel=0.01) and 2 * speed / host == pytest.approx(120_000, rel=0.01)
    of_attention = of.efficiency.attention_forward * of.chip.bf16_flops_per_s / of.chip.devices
    assert round(of_attention / 1e12) == 498 and of_attention / host == pytest.approx(31_000, rel=0.01)
    for policy, tensors, words in (
        ("custom", "decoder_layer_input:offload", "31,000"),
        ("qkv_proj_offloaded", "", "39,000"),
        ("minimal_offloaded", "", "288,000"),
    ):
        config = from_preset("llama3.1-70b", remat=policy, remat_tensors=tensors)
        elements = transformer.saved_bytes_per_layer(config, anatomy.offloaded_names(config)) / 2
        tokens = of_attention / host * elements / config.model_dim
        assert tokens == pytest.approx(float(words.replace(",", "")), rel=0.01)
        assert words in remat.__doc__
        for seq_len, hides in ((0.9 * tokens, False), (1.1 * tokens, True)):
            flags = dict(mesh="fsdp:16,context:8", batch=16, seq_len=round(seq_len / 8192) * 8192)
            found = step.predict(run_of(dataclasses.replace(config, **flags), TPU7X, (4, 4, 4)))
            (part,) = (part for part in found.parts if part.name == "host offload")
            assert (part.exposed_s < 0.01 * part.seconds) == hides, (policy, seq_len)


def test_the_policies_of_the_docstring():
    """The elements a token and layer that its table has, with the dims of Llama 3.1 8B, whose D is NH."""
    config = LLAMA()
    D, N, K, H, F = 4096, 32, 8, 128, 14_336
    with_context = 2 * D + (2 * N + 2 * K) * H
    for policy, formula, elements, of_kernel in (
        ("full", "D", D, 0),
        ("save_qkv_proj", "D + (N+2K)H", D + (N + 2 * K) * H, 0),
        ("save_dot_except_mlp", "2D + (N+2K)H", 2 * D + (N + 2 * K) * H, 0),
        ("save_dot_with_context_except_mlp", "2D + (2N+2K)H + N", with_context, N),
        ("minimal_with_context", "the same + 2F", with_context + 2 * F, N),
    ):
        assert re.search(rf"^    {policy} +{re.escape(formula)}   ", remat.__doc__, re.MULTILINE), policy
        nbytes = transformer.saved_bytes_per_layer(dataclasses.replace(config, remat=policy))
        assert nbytes == 2 * elements + 4 * of_kernel, policy


# -- compiled for TPU7x

# Small, and yet the layers are most of the memory: 8 of them, and hardly a vocabulary.
COMPILED = dict(
    preset="tiny", dtype="bfloat16", num_layers=8, model_dim=1024, ff_dim=4096, num_heads=8, num_kv_heads=2
) | dict(head_dim=128, vocab_size=2048, loss_chunk=256, seq_len=4096, batch=16, mesh="fsdp:8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("full", dict(mesh="fsdp:2,context:4", seq_len=16_384, batch=4)),
        ("minimal_offloaded", dict()),
        ("save_dot_except_mlp", dict()),
    ],
)
def test_memory_is_that_of_the_compiled_program(policy, options):
    """The device's within 10%; the host's to the byte, for it has nothing else."""
    config = Config(**COMPILED | options, remat=policy)
    memory, program = aot.compile_step(aot.lower_step(config, "tpu7x:2x2x1"), ON_TENSOR_CORES, "")
    predicted = step.predict(run_of(config, TPU7X, CHIPS))
    assert 0.9 < predicted.hbm_bytes / memory["peak_hbm_bytes"] < 1.1
    assert memory["host_bytes"] == predicted.host_bytes
    on_host = "S(5)" in program  # the memory space of the host
    assert on_host == (predicted.host_bytes > 0) == (policy == "minimal_offloaded")


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
    found = json.loads(ran(capsys, "--remat=auto", "--json"))
    assert found["auto"] == chosen and [*found["policies"]] == [chosen] and found["kind"] == "predicted"


def test_json_has_the_numbers_of_the_rows(capsys):
    found = json.loads(ran(capsys, "--json"))
    assert found["policies"] == {name: recompute.row(one) for name, one in predictions(LLAMA()).items()}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--remat=atuo"], "remat='atuo' is not one of none, full"),
        (["--rematt=auto"], "did you mean --remat"),
        (["--preset=llama3.1-70b", "--remat=auto"], "no policy fits: remat="),
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
        assert not {"jax", "numpy", "matplotlib"} & {one.split("|")[-1].strip() for one in done.stderr.splitlines()}
