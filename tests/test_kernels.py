"""The search for block sizes: what is tried, how it is ranked and kept, and that kernels take what was found."""

import collections
import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from support import equations

import command
import flash
import fp8
import groups
import kernels
import mixture
import parameters
import sharding
import tuned
from compiled import bundles
from config import Config
from masks import Mask
from placement import MESH_AXES

ATTENTION = dict(T=8192, S=8192, H=128, V=128, dtype="bfloat16", causal=True, window=0, packed=True)
SHAPES = {
    "flash_forward": ATTENTION | dict(max_logit=False),
    "flash_backward": ATTENTION,
    "gmm": dict(M=8192, K=4096, N=1536, E=8, dtype="bfloat16"),
    "tgmm": dict(M=8192, K=4096, N=1536, E=8, dtype="bfloat16"),
}
LESS = dict(T=1024, S=1024, packed=False, M=2048, K=1024, N=512, E=4)  # for the time that compiling takes


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "OWN", tmp_path / "own.json")
    monkeypatch.setattr(tuned, "CHECKED_IN", tmp_path / "checked_in.json")
    return tuned.OWN


@pytest.fixture
def invented(monkeypatch):
    """A compiler that refuses every fifth, and likes the rest the better the more VMEM it takes."""

    def measure_many(jobs, workers):
        return [bundles.Report(*job, "too large" if i % 5 == 4 else "", (), 0.0) for i, job in enumerate(jobs)]

    monkeypatch.setattr(bundles, "measure_many", measure_many)
    for name, of in kernels.TUNABLES.items():
        cycles = lambda report, shape, blocks, of=of: 1e9 / of.vmem_bytes(shape, blocks)
        monkeypatch.setitem(kernels.TUNABLES, name, dataclasses.replace(of, cycles=cycles, products=lambda s: 0))


@pytest.mark.parametrize("kernel", SHAPES)
def test_candidates_are_distinct_fit_and_begin_with_the_rule(kernel):
    of, shape = kernels.TUNABLES[kernel], SHAPES[kernel]
    found = kernels.candidates(kernel, shape)
    assert found[0] == of.rule(shape) and len(found) >= 8
    assert len({json.dumps(tuned.fields_of(blocks)) for blocks in found}) == len(found)
    assert all(of.vmem_bytes(shape, blocks) <= 60 * 2**20 for blocks in found)
    fewer = kernels.candidates(kernel, shape, vmem_kib=30 * 1024)
    assert len(fewer) < len(found) and all(of.vmem_bytes(shape, blocks) <= 30 * 2**20 for blocks in fewer[1:])


@pytest.mark.parametrize("kernel", SHAPES)
def test_what_is_compiled_has_the_shape_that_is_asked_for(kernel):
    """Whatever the blocks: those of 2,048 keys are of as many keys as those of 1,024."""
    s = SHAPES[kernel] | dict(T=2048, S=4096, H=192)
    asked = dict(
        gmm=[(8192, 4096), (8, 4096, 1536)],
        tgmm=[(8192, 4096), (8192, 1536)],
    ).get(kernel, [(1, 2, 2048, 192), (1, 2, 4096, 192), (1, 2, 4096, 128)])
    for blocks in kernels.candidates(kernel, s):
        _, arguments = bundles.build(*kernels.TUNABLES[kernel].job(s, blocks))
        assert [a.shape for a in jax.tree.leaves(arguments)][: len(asked)] == asked
    if kernel == "gmm":
        transposed = s | dict(transpose_rhs=True)
        _, (_, rhs, *_) = bundles.build(
            *kernels.TUNABLES["gmm"].job(transposed, kernels.TUNABLES["gmm"].rule(transposed))
        )
        assert rhs.shape == (8, 1536, 4096)


@pytest.mark.parametrize("kernel", SHAPES)
def test_fewer_cycles_than_the_matmuls_take_are_a_defect(kernel, monkeypatch):
    s = SHAPES[kernel]
    if "flash" in kernel:
        matmuls, scores = (5 if kernel == "flash_backward" else 2), 8192 * 8192 / 2
        at_least = matmuls * scores * 128 / (4 * 256 * 256)  # two MXUs, two rows of 256 a cycle
        assert at_least * 0.98 < kernels.least_cycles(kernel, s) < at_least
        assert kernels.least_cycles(kernel, s | dict(window=1024)) < 0.25 * at_least
    else:
        at_least = kernels.least_cycles(kernel, s)
        assert at_least == pytest.approx(s["M"] * s["K"] * s["N"] / (4 * 256 * 256), rel=1e-3)
        assert kernels.least_cycles(kernel, s | dict(dtype="float8_e4m3fn")) == at_least / 2
    counted = dataclasses.replace(kernels.TUNABLES[kernel], cycles=lambda report, shape, blocks: 0.9 * at_least)
    monkeypatch.setitem(kernels.TUNABLES, kernel, counted)
    report = lambda job: bundles.Report(*job, "", (), 0.0)
    monkeypatch.setattr(bundles, "measure_many", lambda jobs, workers: [report(job) for job in jobs])
    with pytest.raises(ValueError, match=f"{kernel}.*cycles counted, and its matmuls take"):
        kernels.tune(kernel, s, most=2)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SHAPES)
def test_the_kernels_own_checks_pass_what_is_tried(kernel):
    """And building it traces: nothing is compiled."""
    for blocks in kernels.candidates(kernel, SHAPES[kernel])[:: 5 if "flash" in kernel else 3]:
        builder, options = kernels.TUNABLES[kernel].job(SHAPES[kernel], blocks)
        function, shapes = bundles.build(builder, options)
        jax.eval_shape(function, *shapes)


def test_ranked_by_cycles_the_refused_ones_last(own, invented):
    ranked, entry = kernels.tune("gmm", SHAPES["gmm"])
    cycles = [each.cycles for each in ranked]
    assert cycles == sorted(cycles) and math.isinf(cycles[-1]) and ranked[-1].error == "too large"
    assert entry["blocks"] == ranked[0].blocks._asdict() and entry["cycles"] == round(cycles[0])
    assert entry["rule_cycles"] >= entry["cycles"]
    assert len(kernels.tune("gmm", SHAPES["gmm"], most=4)[0]) <= 4
    assert not own.exists()


def test_a_rule_that_does_not_compile_is_an_error(monkeypatch):
    refused = lambda jobs, workers: [bundles.Report(*job, "no", (), 0.0) for job in jobs]
    monkeypatch.setattr(bundles, "measure_many", refused)
    with pytest.raises(ValueError, match=r"the rule's Tiles.* do not compile: no"):
        kernels.tune("gmm", SHAPES["gmm"], most=2)


def test_command_keeps_what_the_kernel_then_takes(own, invented, capsys):
    kernels.main(["tune", "gmm", "--M=512", "--K=256", "--N=512", "--E=4", f"--out={own}", "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["key"].split()[0] for one in found] == ["gmm", "gmm", "gmm", "tgmm", "gmm"]
    assert found[2]["key"] == tuned.key_of("gmm", M=512, K=512, N=256, E=4, dtype="bfloat16", transpose_rhs=True)
    key = tuned.key_of("gmm", M=512, K=256, N=512, E=4, dtype="bfloat16")
    assert found[0]["key"] == key and tuned.read(own)[key] == found[0]["entry"]
    kernels.main([])
    assert key.removesuffix(" chip=tpu7x") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (
            "gmm --M=512 --K=256 --N=512 --E=4 --dtype=float8_e4m3fn",
            [
                "gmm M=512 K=256 N=512 E=4 dtype=float8_e4m3fn chip=tpu7x",
                "gmm M=512 K=256 N=512 E=4 dtype=float8_e4m3fn gated=True chip=tpu7x",
                "gmm M=512 K=512 N=256 E=4 dtype=float8_e5m2 transpose_rhs=True chip=tpu7x",
                "tgmm M=512 K=256 N=512 E=4 dtype=float8_e4m3fn chip=tpu7x",
                "gmm M=512 K=512 N=256 E=4 dtype=float8_e5m2 transpose_rhs=True summed=True chip=tpu7x",
                "gmm M=512 K=512 N=256 E=4 dtype=float8_e4m3fn transpose_rhs=True chip=tpu7x",
                "gmm M=512 K=256 N=512 E=4 dtype=float8_e5m2 chip=tpu7x",
                "tgmm M=512 K=256 N=512 E=4 dtype=float8_e5m2 chip=tpu7x",
            ],
        ),
        (
            "attention --T=1024 --S=2048 --head_dim=192 --value_dim=128 --window=256",
            [
                f"{name} T=1024 S=2048 H=192 V=128 dtype=bfloat16 causal=True window=256 packed=True chip=tpu7x"
                for name in ("flash_forward", "flash_backward")
            ],
        ),
    ],
)
def test_command_searches_for_what_training_asks_for(flags, keys, own, invented, capsys):
    """The gradients' formats with those of the forward pass, and more keys than queries."""
    kernels.main(["tune", *flags.split(), "--most=2", f"--out={own}", "--json"])
    assert [json.loads(line)["key"] for line in capsys.readouterr().out.splitlines()] == keys


def asked_for(config: Config, M: int, monkeypatch) -> list[str]:
    """The keys that the kernels of a layer's experts ask sizes for, forward and for the gradients, traced for a TPU."""
    D, F, E, keys = config.model_dim, config.expert_dim, config.num_experts, []
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    monkeypatch.setattr(tuned, "best", lambda key, make: keys.append(key))

    def layer(x, matrices, bias_EF, sizes):
        if config.fp8 != "none":
            options = dict(recipe=parameters.fp8_recipe(config), contracted=(1,), axes=(), is_weight=True)
            quantized = lambda w: fp8.Weight(fp8.quantize(w, **options))
            matrices = {name: quantized(w) for name, w in matrices.items()}
        w = SimpleNamespace(**matrices, bias_expert_gate=bias_EF, bias_expert_up=bias_EF)
        product = mixture.gated(w, x, sizes, config)
        (y,) = mixture.grouped(product, (w.expert_down,), sizes, config, transpose=True)
        return y.astype(jnp.float32).sum()

    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    matrices = dict.fromkeys(("expert_gate", "expert_up", "expert_down"), bf16(E, D, F))
    mesh = jax.make_mesh((1,) * len(MESH_AXES), MESH_AXES, devices=jax.devices()[:1])
    gradients = jax.shard_map(jax.grad(layer, (0, 1)), mesh=mesh, in_specs=P(), out_specs=P())
    jax.eval_shape(gradients, bf16(M, D), matrices, bf16(E, F), jax.ShapeDtypeStruct((E,), jnp.int32))
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("D, F", [(4096, 1536), (4096, 14_336)], ids=["Qwen3 235B", "Mixtral"])
def test_search_is_for_what_is_asked_for_and_nothing_else(D, F, dtype, monkeypatch):
    """By experts without biases, whose gate and up are one kernel, and by those with: theirs are two."""
    sizes = dict(num_experts=8, experts_per_token=2, expert_dim=F, model_dim=D)
    sizes |= dict(fp8="none" if dtype == "bfloat16" else "dynamic", dtype="bfloat16")
    asked = [asked_for(Config(**sizes, expert_bias=bias), 65_536, monkeypatch) for bias in (False, True)]
    flags = f"--M=65536 --K={D} --N={F} --E=8 --dtype={dtype}"
    searched = []
    monkeypatch.setattr(kernels, "print_search", lambda args: searched.extend(kernels.shapes_of(args)))
    kernels.main(["tune", "gmm", *flags.split()])
    keys = [tuned.key_of(kernel, **shape) for kernel, shape in searched]
    assert len({*keys}) == len(keys) and {*keys} == {*asked[0], *asked[1]}
    assert any("summed" in key for key in keys) == ((F, dtype) != (14_336, "bfloat16"))


@pytest.mark.slow
def test_kernels_take_what_was_found(own):
    """Seen in the grid, or in the metadata, of what they trace to."""
    sizes, shape = SHAPES["flash_forward"] | dict(T=512, S=512), (1, 512, 2, 128)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3

    def blocks():
        return str(jax.make_jaxpr(lambda q, k, v: kernels.flash_attention(q, k, v))(*args))

    before = blocks()
    rule = kernels.TUNABLES["flash_forward"].rule(sizes)
    other = dataclasses.replace(rule, queries=128, q_rows=512)
    key = tuned.key_of("flash_forward", **sizes | dict(packed=False))
    tuned.keep(key, {"blocks": tuned.fields_of(other)}, own)
    assert "queries=128" in blocks() and blocks() != before


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "kernel, kind, scales", [("gmm", "", 1), ("gmm", "gated", 2), ("gmm", "summed", 2), ("tgmm", "", 1)]
)
def test_what_is_compiled_has_scales_in_8_bits(kernel, kind, scales, dtype):
    """As the calls of fp8.py have, of the columns of each matrix."""
    shape = dict(M=512, K=256, N=384, E=4, dtype=dtype, transpose_rhs=kind == "summed") | ({kind: True} if kind else {})
    of = kernels.TUNABLES[kernel]
    function, arguments = bundles.build(*of.job(shape, of.rule(shape)))
    (call,) = (e for e in equations(jax.make_jaxpr(function)(*arguments)) if e.primitive.name == "pallas_call")
    found = [var.aval.shape for var in call.invars if var.aval.dtype == jnp.float32]
    assert found == [(4, 1, 384)] * scales * (dtype != "bfloat16")


@pytest.mark.parametrize("M, E", [(8192, 8), (1000, 7), (64, 64), (5, 8)])
def test_ragged_groups_are_all_rows(M, E):
    sizes = kernels.ragged(M, E)
    assert len(sizes) == E and sum(sizes) == M and min(sizes) >= 0
    assert M < 100 * E or len({*sizes}) > E / 2


def test_timing_runs_what_is_built():
    """Here on a CPU, where gmm is its reference: what it says is of no interest."""
    shape = dict(M=64, K=32, N=32, E=4, dtype="float32")
    cycles, error = kernels.time_on_tpu("gmm", shape, kernels.TUNABLES["gmm"].rule(shape))
    assert 0 < cycles < math.inf and not error


def test_timing_is_of_a_head_at_each_place_of_the_queries(monkeypatch):
    """Of a call with two heads that takes 2 s at the first place and 4 s at the last one."""
    at = []
    monkeypatch.setattr(bundles, "build", lambda builder, options: at.append(options["q_offset"]) or (lambda: 1, []))
    clock = iter(t for seconds in (2, 4) for _ in range(3) for t in (0, seconds))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(clock))
    shape = SHAPES["flash_backward"] | dict(T=1024, S=4096)
    blocks = kernels.TUNABLES["flash_backward"].rule(shape)
    seconds = kernels.time_on_tpu("flash_backward", shape, blocks, repeats=3)[0] / kernels.CLOCK_HZ
    assert sorted(at) == [0, 3072] and seconds == pytest.approx(1.5)


@pytest.mark.parametrize("K, N", [(2880, 2880), (7168, 2048), (4096, 14_336)])
@pytest.mark.parametrize("kernel", ["gmm", "tgmm"])
def test_in_8_bits_what_is_tried_fits_with_results_in_bfloat16(kernel, K, N):
    s = dict(M=65_536, K=K, N=N, E=8, dtype="float8_e4m3fn")
    check = {"gmm": groups.check_tiles, "tgmm": groups.check_tgmm_tiles}[kernel]
    for tiles in kernels.candidates(kernel, s):
        check(tiles, K, N, jnp.float8_e4m3fn, jnp.bfloat16)
    builder, options = kernels.TUNABLES[kernel].job(s, kernels.TUNABLES[kernel].rule(s))
    function, arguments = bundles.build(builder, options)
    assert jax.eval_shape(function, *arguments).dtype == jnp.bfloat16


def test_fewer_keys_than_queries_are_refused(capsys):
    with pytest.raises(SystemExit):
        command.run(kernels.main, "tune attention --T=8192 --S=4096".split())
    assert "--S=4096 keys are fewer than --T=8192 queries" in capsys.readouterr().err


def test_help_says_what_there_is(capsys):
    with pytest.raises(SystemExit):
        command.run(kernels.main, ["tune", "--help"])
    said = capsys.readouterr().out
    assert "--scoped_vmem_kib" in said and "{attention,gmm}" in said
    assert "a mixture of experts (grouped matmuls)" in " ".join(said.split())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SHAPES)
def test_compiled_search(kernel, own):
    shape = {name: LESS.get(name, value) for name, value in SHAPES[kernel].items()}
    ranked, entry = kernels.tune(kernel, shape, most=2)
    assert len(ranked) == 2 and not ranked[0].error
    assert entry["cycles"] <= entry["rule_cycles"] < math.inf
    said = tuned.metadata(tuned.key_of(kernel, **shape), ranked[0].blocks, calls=5)
    assert kernels.cycles_of(said) == pytest.approx(5 * ranked[0].cycles)  # what a compiled program says is enough


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gmm", "tgmm"])
def test_cycles_are_of_the_rows_that_come(kernel):
    """Of a buffer half full as of one half as large, but for the zeros that gmm writes where no row is."""
    shape = dict(M=8192, K=1024, N=512, E=4, dtype="bfloat16")
    blocks = kernels.TUNABLES[kernel].rule(collections.defaultdict(bool, shape))
    said = lambda M: tuned.metadata(tuned.key_of(kernel, **shape | dict(M=M)), blocks, calls=1)
    whole, half_full = (kernels.cycles_of(said(8192), filled) for filled in (1, 0.5))
    half = kernels.cycles_of(said(4096))
    assert half <= half_full < half + 0.1 * whole and half < 0.65 * whole


@pytest.mark.parametrize(
    ("mask", "places"),
    [
        (dict(causal=True, window=0), [0, 1536]),  # anywhere among the keys: gathered, of a device's chunk
        (dict(causal=True, window=257), [1536]),  # behind a halo
        (dict(causal=False, window=0), [0]),  # a hop of a ring
    ],
)
def test_queries_are_where_context_parallelism_has_them(mask, places, monkeypatch):
    """Of a call with more keys than queries: the cycles of the places that it can be at, and their mean."""
    asked = []
    cycles = lambda report, shape, blocks: asked.append(shape["offset"]) or 1e6 + shape["offset"]
    of = dataclasses.replace(kernels.TUNABLES["flash_forward"], cycles=cycles)
    monkeypatch.setitem(kernels.TUNABLES, "flash_forward", of)
    built = []
    monkeypatch.setattr(kernels.bundles, "measure", lambda builder, **options: built.append(options))
    shape = dict(T=512, S=2048, H=128, V=128, dtype="bfloat16", **mask)
    blocks = kernels.TUNABLES["flash_forward"].rule(collections.defaultdict(bool, shape))
    said = tuned.metadata(tuned.key_of("flash_forward", **shape), blocks, calls=3)
    assert kernels.cycles_of(said) == 3 * (1e6 + sum(places) / len(places))
    assert sorted(asked) == places and (built[0]["seq"], built[0]["keys"]) == (512, 2048)


@pytest.mark.slow
def test_more_keys_take_more_cycles_and_the_later_the_queries_the_more():
    """What is counted of them: tiles, and blocks."""
    kernel = SimpleNamespace(unknown=lambda: [None] * 6)
    T, S = 4096, 32_768
    blocks = flash.default_blocks(T, S, 128, 128)
    count = lambda place: sum(flash.executions(kernel, T, S, 1, blocks, Mask(q_offset=place)))
    counts = [count(place) for place in (0, 12_288, 28_672)]
    assert counts[0] < counts[1] < counts[2]


def _found(of_each) -> list[str]:
    """The keys of what is kept, the first of each `of_each(kernel, shape)`."""
    keys = {of_each(*tuned.shape_of(key)): key for key in reversed(tuned.read(tuned.CHECKED_IN))}
    return list(reversed(keys.values()))


def test_what_is_kept_fits():
    """Or a kernel would take its rule's sizes, and the table would be of others."""
    for key, entry in tuned.read(tuned.CHECKED_IN).items():
        name, shape = tuned.shape_of(key)
        of = kernels.TUNABLES[name]
        blocks = type(of.rule(shape))(**entry["blocks"])
        assert of.vmem_bytes(shape, blocks) <= kernels.VMEM_KIB * 1024, key


def _planned_s(estimate) -> float:
    """As XLA has it, at the head of kernels.py."""
    return max(estimate.flops / 996e12, estimate.bytes_accessed / 3.7e12, estimate.transcendentals / 1.9e12)


@pytest.mark.slow
@pytest.mark.parametrize("key", _found(lambda name, s: (name, s["H"], s["window"], s["K"], s["dtype"], s["summed"])))
def test_xla_is_told_how_long_a_kernel_takes(key):
    """Its matmuls at the peak: of the compiled cycles nearly all, or three fifths where much of a block is masked."""
    name, shape = tuned.shape_of(key)
    of, entry = kernels.TUNABLES[name], tuned.read(tuned.CHECKED_IN)[key]
    run, shapes = bundles.build(*of.job(shape, type(of.rule(shape))(**entry["blocks"])))
    calls = [e for e in equations(jax.make_jaxpr(run)(*shapes).jaxpr) if e.primitive.name == "pallas_call"]
    parts = -(-shape["S"] // entry["blocks"]["resident"]) if name == "flash_backward" else 1
    counted_s = entry["cycles"] * (kernels.HEADS if "flash" in name else 1) / parts / kernels.CLOCK_HZ
    assert calls
    for call in calls:
        assert 0.58 < _planned_s(call.params["cost_estimate"]) / counted_s < 1.1


@pytest.mark.parametrize(
    "said",
    [
        dict(flops=10**12, bytes_accessed=10**6, transcendentals=10**6),
        dict(flops=10**9, bytes_accessed=4 * 10**9, transcendentals=10**6),
        dict(flops=10**9, bytes_accessed=10**6, transcendentals=2 * 10**9),
    ],
    ids=lambda said: max(said, key=said.get),
)
def test_what_xla_makes_of_an_estimate(said):
    """Of a kernel that copies a megabyte, told to be something else."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[0]
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=SingleDeviceSharding(device))

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    estimate = pl.CostEstimate(**said)
    run = pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=estimate)
    planned_s = jax.jit(run).lower(x).compile().cost_analysis()["optimal_seconds"]
    assert planned_s == pytest.approx(_planned_s(estimate), rel=0.05)


def test_the_table_that_is_shown_is_the_one_of_today():
    results = (Path(kernels.__file__).parent / "docs/RESULTS.md").read_text()
    shown = re.search(r"<!-- compiled: tuned sizes -->\n(.*?)\n<!-- end -->", results, re.DOTALL)[1]
    assert shown == kernels.table(tuned.read(tuned.CHECKED_IN))
