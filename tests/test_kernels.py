"""Tests of kernels.py: the candidates of a search, their ranking and storage, and that kernels use the result."""

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
from compiled import builders, bundles, grid
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
SMALLER = dict(T=512, S=512, packed=False, M=512, K=512, N=256, E=4)  # to compile faster


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "OWN", tmp_path / "own.json")
    monkeypatch.setattr(tuned, "CHECKED_IN", tmp_path / "checked_in.json")
    return tuned.OWN


@pytest.fixture
def compiled_once(monkeypatch):
    """A kernel with the same options is compiled once in a test; another option compiles it again."""
    reports, measure = {}, bundles.measure

    def measure_once(builder, *, timeout_s=600, **options):
        key = json.dumps([builder, options], sort_keys=True)
        if key not in reports:
            reports[key] = measure(builder, timeout_s=timeout_s, **options)
        return reports[key]

    monkeypatch.setattr(bundles, "measure", measure_once)
    return reports


@pytest.fixture
def fake_compiler(monkeypatch):
    """A compiler that refuses every fifth candidate; the others take fewer cycles the more VMEM they use."""

    def measure_many(jobs, workers):
        return [bundles.Report(*job, "too large" if i % 5 == 4 else "", (), 0.0) for i, job in enumerate(jobs)]

    monkeypatch.setattr(bundles, "measure_many", measure_many)
    for name, tunable in kernels.TUNABLES.items():
        cycles = lambda report, shape, blocks, tunable=tunable: 1e9 / tunable.vmem_bytes(shape, blocks)
        replaced = dataclasses.replace(tunable, cycles=cycles, products=lambda s: 0)
        monkeypatch.setitem(kernels.TUNABLES, name, replaced)


@pytest.mark.parametrize("kernel", SHAPES)
def test_candidates_are_distinct_fit_and_begin_with_the_rule(kernel):
    tunable, shape = kernels.TUNABLES[kernel], SHAPES[kernel]
    candidates = kernels.candidates(kernel, shape)
    assert candidates[0] == tunable.rule(shape) and len(candidates) >= 8
    assert len({json.dumps(tuned.fields_of(blocks)) for blocks in candidates}) == len(candidates)
    assert all(tunable.vmem_bytes(shape, blocks) <= 60 * 2**20 for blocks in candidates)
    fewer = kernels.candidates(kernel, shape, vmem_kib=30 * 1024)
    assert len(fewer) < len(candidates)
    assert all(tunable.vmem_bytes(shape, blocks) <= 30 * 2**20 for blocks in fewer[1:])


@pytest.mark.parametrize("kernel", SHAPES)
def test_candidates_are_compiled_for_the_requested_shape(kernel):
    """The shapes of the arguments do not depend on the blocks."""
    s = SHAPES[kernel] | dict(T=2048, S=4096, H=192)
    expected = dict(
        gmm=[(8192, 4096), (8, 4096, 1536)],
        tgmm=[(8192, 4096), (8192, 1536)],
    ).get(kernel, [(1, 2, 2048, 192), (1, 2, 4096, 192), (1, 2, 4096, 128)])
    for blocks in kernels.candidates(kernel, s):
        _, arguments = bundles.build(*kernels.TUNABLES[kernel].job(s, blocks))
        assert [a.shape for a in jax.tree.leaves(arguments)][: len(expected)] == expected
    if kernel == "gmm":
        transposed = s | dict(transpose_rhs=True)
        _, (_, rhs, *_) = bundles.build(
            *kernels.TUNABLES["gmm"].job(transposed, kernels.TUNABLES["gmm"].rule(transposed))
        )
        assert rhs.shape == (8, 1536, 4096)


@pytest.mark.parametrize("kernel", SHAPES)
def test_fewer_cycles_than_the_matmuls_take_are_an_error(kernel, monkeypatch):
    s = SHAPES[kernel]
    if "flash" in kernel:
        matmuls, scores = (5 if kernel == "flash_backward" else 2), 8192 * 8192 / 2
        at_least = matmuls * scores * 128 / (4 * 256 * 256)  # two MXUs, two rows of 256 a cycle
        assert at_least * 0.98 < kernels.min_cycles(kernel, s) < at_least
        assert kernels.min_cycles(kernel, s | dict(window=1024)) < 0.25 * at_least
    else:
        at_least = kernels.min_cycles(kernel, s)
        assert at_least == pytest.approx(s["M"] * s["K"] * s["N"] / (4 * 256 * 256), rel=1e-3)
        assert kernels.min_cycles(kernel, s | dict(dtype="float8_e4m3fn")) == at_least / 2
    counted = dataclasses.replace(kernels.TUNABLES[kernel], cycles=lambda report, shape, blocks: 0.9 * at_least)
    monkeypatch.setitem(kernels.TUNABLES, kernel, counted)
    report = lambda job: bundles.Report(*job, "", (), 0.0)
    monkeypatch.setattr(bundles, "measure_many", lambda jobs, workers: [report(job) for job in jobs])
    with pytest.raises(ValueError, match=f"{kernel}.*cycles counted, and its matmuls take"):
        kernels.tune(kernel, s, most=2)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SHAPES)
def test_candidates_pass_the_kernels_own_checks(kernel):
    """Each is traced, not compiled."""
    for blocks in kernels.candidates(kernel, SHAPES[kernel])[:: 5 if "flash" in kernel else 3]:
        builder, options = kernels.TUNABLES[kernel].job(SHAPES[kernel], blocks)
        function, shapes = bundles.build(builder, options)
        jax.eval_shape(function, *shapes)


def test_candidates_are_ranked_by_cycles_and_refused_ones_come_last(own, fake_compiler):
    ranked, entry = kernels.tune("gmm", SHAPES["gmm"])
    cycles = [candidate.cycles for candidate in ranked]
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


def test_the_command_stores_the_best_under_the_kernels_key(own, fake_compiler, capsys):
    kernels.main(["tune", "gmm", "--M=512", "--K=256", "--N=512", "--E=4", f"--out={own}", "--json"])
    searches = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [search["key"].split()[0] for search in searches] == ["gmm", "gmm", "gmm", "tgmm", "gmm", "gmm"]
    assert searches[2]["key"] == tuned.key_of("gmm", M=512, K=512, N=256, E=4, dtype="bfloat16", transpose_rhs=True)
    key = tuned.key_of("gmm", M=512, K=256, N=512, E=4, dtype="bfloat16")
    assert searches[0]["key"] == key and tuned.read(own)[key] == searches[0]["entry"]
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
                "gmm M=512 K=256 N=512 E=4 dtype=float8_e5m2 gradient=True chip=tpu7x",
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
def test_the_command_searches_for_all_calls_of_training(flags, keys, own, fake_compiler, capsys):
    """The formats of the gradients besides that of the forward pass, and more keys than queries."""
    kernels.main(["tune", *flags.split(), "--most=2", f"--out={own}", "--json"])
    assert [json.loads(line)["key"] for line in capsys.readouterr().out.splitlines()] == keys


def keys_of_experts(config: Config, M: int, monkeypatch) -> list[str]:
    """The keys that the kernels of a layer's experts look up, forward and for the gradients, traced for a TPU."""
    D, F, E, keys = config.model_dim, config.expert_dim, config.num_experts, []
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    monkeypatch.setattr(tuned, "best", lambda key, make: keys.append(key))

    def layer(x, matrices, bias_EF, sizes):
        if config.fp8 != "none":
            options = dict(recipe=parameters.fp8_recipe(config), contracted=(1,), axes=(), is_weight=True)
            quantized = lambda w: fp8.Weight(fp8.quantize(w, **options))
            matrices = {name: quantized(w) for name, w in matrices.items()}
        w = SimpleNamespace(**matrices, bias_expert_gate=bias_EF, bias_expert_up=bias_EF)
        product, through = mixture.expert_products(w, x, sizes, jnp.ones(len(x)), config)
        (y,) = mixture.expert_matmuls(product, (w.expert_down,), sizes, config, transpose=True, through=through)
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
def test_the_search_covers_exactly_the_keys_that_training_looks_up(D, F, dtype, monkeypatch):
    """Gate and up run in one kernel, or in two if a policy saves only one of their results."""
    sizes = dict(num_experts=8, experts_per_token=2, expert_dim=F, model_dim=D)
    sizes |= dict(fp8="none" if dtype == "bfloat16" else "dynamic", dtype="bfloat16")
    flags = dict(expert_bias=True), dict(remat="minimal")
    used = [keys_of_experts(Config(**sizes, **each), 65_536, monkeypatch) for each in flags]
    flags = f"--M=65536 --K={D} --N={F} --E=8 --dtype={dtype}"
    searched = []
    monkeypatch.setattr(kernels, "print_search", lambda args: searched.extend(kernels.shapes_of(args)))
    kernels.main(["tune", "gmm", *flags.split()])
    keys = [tuned.key_of(kernel, **shape) for kernel, shape in searched]
    assert len({*keys}) == len(keys) and {*keys} == {*used[0], *used[1]}
    assert any("summed" in key for key in keys) == ((F, dtype) != (14_336, "bfloat16"))


@pytest.mark.slow
def test_kernels_use_stored_blocks(own):
    """The metadata of a traced call has the blocks."""
    sizes, shape = SHAPES["flash_forward"] | dict(T=512, S=512), (1, 512, 2, 128)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3

    def blocks():
        return str(jax.make_jaxpr(lambda q, k, v: kernels.flash_attention(q, k, v))(*args))

    before = blocks()
    rule = kernels.TUNABLES["flash_forward"].rule(sizes)
    other = dataclasses.replace(rule, queries=128, q_rows=512)
    key = tuned.key_of("flash_forward", **sizes | dict(packed=False))
    tuned.save(key, {"blocks": tuned.fields_of(other)}, own)
    assert "queries=128" in blocks() and blocks() != before


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "kernel, kind, scales", [("gmm", "", 1), ("gmm", "gated", 2), ("gmm", "summed", 2), ("tgmm", "", 1)]
)
def test_candidates_in_fp8_are_compiled_with_scales(kernel, kind, scales, dtype):
    """Like the calls of fp8.py: a scale for each column of each matrix; of gated_gmm a factor for each row, too."""
    shape = dict(M=512, K=256, N=384, E=4, dtype=dtype, transpose_rhs=kind == "summed") | ({kind: True} if kind else {})
    tunable = kernels.TUNABLES[kernel]
    function, arguments = bundles.build(*tunable.job(shape, tunable.rule(shape)))
    (call,) = (e for e in equations(jax.make_jaxpr(function)(*arguments)) if e.primitive.name == "pallas_call")
    shapes = [var.aval.shape for var in call.invars if var.aval.dtype == jnp.float32]
    assert shapes == [(4, 1, 384)] * scales * (dtype != "bfloat16") + [(512, 1)] * (kind == "gated")


@pytest.mark.parametrize("M, E", [(8192, 8), (1000, 7), (64, 64), (5, 8)])
def test_ragged_groups_are_all_rows(M, E):
    sizes = kernels.ragged(M, E)
    assert len(sizes) == E and sum(sizes) == M and min(sizes) >= 0
    assert M < 100 * E or len({*sizes}) > E / 2


@pytest.mark.parametrize("variant", [dict(), dict(gated=True), dict(gradient=True), dict(summed=True)])
def test_timing_runs_the_kernel(variant):
    """On a CPU, where gmm runs its reference: the time itself means nothing."""
    shape = collections.defaultdict(bool, M=64, K=32, N=32, E=4, dtype="bfloat16", **variant)
    cycles, error = kernels.time_on_tpu("gmm", shape, kernels.TUNABLES["gmm"].rule(shape))
    assert 0 < cycles < math.inf and not error


def test_timing_is_per_head_and_averages_the_offsets_of_the_queries(monkeypatch):
    """A call with two heads takes 2 s at the first offset and 4 s at the last."""
    offsets = []
    build = lambda builder, options: offsets.append(options["q_offset"]) or (lambda: 1, [])
    monkeypatch.setattr(bundles, "build", build)
    clock = iter(t for seconds in (2, 4) for _ in range(3) for t in (0, seconds))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(clock))
    shape = SHAPES["flash_backward"] | dict(T=1024, S=4096)
    blocks = kernels.TUNABLES["flash_backward"].rule(shape)
    seconds = kernels.time_on_tpu("flash_backward", shape, blocks, repeats=3)[0] / kernels.CLOCK_HZ
    assert sorted(offsets) == [0, 3072] and seconds == pytest.approx(1.5)


@pytest.mark.slow
@pytest.mark.parametrize("K, N", [(2880, 2880), (7168, 2048), (4096, 14_336)])
@pytest.mark.parametrize("kernel", ["gmm", "tgmm"])
def test_candidates_in_fp8_fit_with_results_in_bfloat16(kernel, K, N):
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


def test_help_lists_the_searches(capsys):
    with pytest.raises(SystemExit):
        command.run(kernels.main, ["tune", "--help"])
    out = capsys.readouterr().out
    assert "--scoped_vmem_kib" in out and "{attention,gmm}" in out
    assert "a mixture of experts (grouped matmuls)" in " ".join(out.split())


@pytest.mark.at_most(1)
@pytest.mark.slow
@pytest.mark.parametrize("kernel", SHAPES)
def test_compiled_search(kernel, own, compiled_once, monkeypatch):
    """The entry's metadata describes the candidate that was compiled: `cycles_of` compiles no other."""
    shape = {name: SMALLER.get(name, value) for name, value in SHAPES[kernel].items()}
    if kernel == "flash_forward":  # few tiles in an iteration, which compile in a tenth of the time
        tunable = kernels.TUNABLES[kernel]
        blocks = dataclasses.replace(tunable.rule(shape), full_unroll=2, masked_unroll=2, ahead=1)
        other = dataclasses.replace(blocks, keys=256)
        few = dataclasses.replace(tunable, rule=lambda s: blocks, choices=lambda s: iter([blocks, other]))
        monkeypatch.setitem(kernels.TUNABLES, kernel, few)
    ranked, entry = kernels.tune(kernel, shape, most=2)
    assert len(ranked) == 2 and not ranked[0].error
    assert entry["cycles"] <= entry["rule_cycles"] < math.inf
    metadata = tuned.metadata(tuned.key_of(kernel, **shape), ranked[0].blocks, calls=5)
    assert kernels.cycles_of(metadata) == pytest.approx(5 * ranked[0].cycles)
    assert len(compiled_once) == 2


@pytest.mark.at_most(1)
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gmm", "tgmm"])
def test_cycles_count_the_rows_that_arrive(kernel, compiled_once):
    """A half-full buffer takes the cycles of one half as large, plus those of the zeros that gmm writes."""
    shape = dict(M=8192, K=1024, N=512, E=4, dtype="bfloat16")
    blocks = kernels.TUNABLES[kernel].rule(collections.defaultdict(bool, shape))
    metadata = lambda M: tuned.metadata(tuned.key_of(kernel, **shape | dict(M=M)), blocks, calls=1)
    full, half_full = (kernels.cycles_of(metadata(8192), filled) for filled in (1, 0.5))
    half_size = kernels.cycles_of(metadata(4096))
    assert half_size <= half_full < half_size + 0.1 * full and half_size < 0.65 * full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "offsets"),
    [
        (dict(causal=True, window=0), [0, 1536]),  # anywhere among gathered keys
        (dict(causal=True, window=257), [1536]),  # after a halo
        (dict(causal=False, window=0), [0]),  # a hop of a ring
    ],
)
def test_cycles_average_the_offsets_that_context_parallelism_has(mask, offsets, monkeypatch):
    """For a call with more keys than queries."""
    counted = []
    cycles = lambda report, shape, blocks: counted.append(shape["offset"]) or 1e6 + shape["offset"]
    tunable = dataclasses.replace(kernels.TUNABLES["flash_forward"], cycles=cycles)
    monkeypatch.setitem(kernels.TUNABLES, "flash_forward", tunable)
    built = []
    monkeypatch.setattr(kernels.bundles, "measure", lambda builder, **options: built.append(options))
    shape = dict(T=512, S=2048, H=128, V=128, dtype="bfloat16", **mask)
    blocks = kernels.TUNABLES["flash_forward"].rule(collections.defaultdict(bool, shape))
    metadata = tuned.metadata(tuned.key_of("flash_forward", **shape), blocks, calls=3)
    assert kernels.cycles_of(metadata) == 3 * (1e6 + sum(offsets) / len(offsets))
    assert sorted(counted) == offsets and (built[0]["seq"], built[0]["keys"]) == (512, 2048)


@pytest.mark.slow
def test_later_queries_take_more_cycles():
    """Counts tiles and blocks."""
    kernel = SimpleNamespace(unknown=lambda: [None] * 6)
    T, S = 4096, 32_768
    blocks = flash.default_blocks(T, S, 128, 128)
    count = lambda offset: sum(builders.forward_executions(kernel, T, S, 1, blocks, Mask(q_offset=offset)))
    counts = [count(offset) for offset in (0, 12_288, 28_672)]
    assert counts[0] < counts[1] < counts[2]


def _stored_keys(group) -> list[str]:
    """The stored keys, the first of each group, which is a function of (kernel, shape)."""
    keys = {group(*tuned.shape_of(key)): key for key in reversed(tuned.read(tuned.CHECKED_IN))}
    return list(reversed(keys.values()))


def test_stored_blocks_fit():
    """Otherwise a kernel would use its rule's sizes, and the table would show unused ones."""
    for key, entry in tuned.read(tuned.CHECKED_IN).items():
        name, shape = tuned.shape_of(key)
        tunable = kernels.TUNABLES[name]
        blocks = type(tunable.rule(shape))(**entry["blocks"])
        assert tunable.vmem_bytes(shape, blocks) <= kernels.VMEM_KIB * 1024, key


def _planned_s(estimate) -> float:
    """XLA's time for a cost estimate (head of kernels.py)."""
    return max(estimate.flops / 996e12, estimate.bytes_accessed / 3.7e12, estimate.transcendentals / 1.9e12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", _stored_keys(lambda name, s: (name, s["H"], s["window"], s["K"], s["dtype"], s["summed"]))
)
def test_cost_estimates_are_close_to_compiled_cycles(key):
    """The matmuls at their peak are nearly all of the cycles, or three fifths if much of a block is masked."""
    name, shape = tuned.shape_of(key)
    tunable, entry = kernels.TUNABLES[name], tuned.read(tuned.CHECKED_IN)[key]
    run, shapes = bundles.build(*tunable.job(shape, type(tunable.rule(shape))(**entry["blocks"])))
    calls = [e for e in equations(jax.make_jaxpr(run)(*shapes).jaxpr) if e.primitive.name == "pallas_call"]
    num_calls = -(-shape["S"] // entry["blocks"]["resident"]) if name == "flash_backward" else 1
    counted_s = entry["cycles"] * (kernels.HEADS if "flash" in name else 1) / num_calls / kernels.CLOCK_HZ
    assert calls
    for call in calls:
        assert 0.58 < _planned_s(call.params["cost_estimate"]) / counted_s < 1.1


@pytest.mark.parametrize(
    "estimate",
    [
        dict(flops=10**12, bytes_accessed=10**6, transcendentals=10**6),
        dict(flops=10**9, bytes_accessed=4 * 10**9, transcendentals=10**6),
        dict(flops=10**9, bytes_accessed=10**6, transcendentals=2 * 10**9),
    ],
    ids=lambda estimate: max(estimate, key=estimate.get),
)
def test_the_time_that_xla_derives_from_an_estimate(estimate):
    """For a kernel that copies a megabyte and states another cost."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[0]
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=SingleDeviceSharding(device))

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    estimate = pl.CostEstimate(**estimate)
    run = pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=estimate)
    planned_s = jax.jit(run).lower(x).compile().cost_analysis()["optimal_seconds"]
    assert planned_s == pytest.approx(_planned_s(estimate), rel=0.05)


def test_the_table_in_the_docs_is_current():
    results = (Path(kernels.__file__).parent / "docs/RESULTS.md").read_text()
    shown = re.search(r"<!-- compiled: tuned sizes -->\n(.*?)\n<!-- end -->", results, re.DOTALL)[1]
    assert shown == kernels.table(tuned.read(tuned.CHECKED_IN))


def region(kind, names=(), cycles=0, first=0, children=(), executions=None):
    return bundles.Region(kind, names, first, first, cycles, {}, executions, None, children)


def compiled_tgmm(tile_cycles=1000, rest=100):
    """A report of a kernel whose tiles take `tile_cycles`, of any height, and as many more as `rest` in all."""
    names = [("add",), *((f"finish {height}",) for height in groups.heights(groups.TgmmTiles(512, 128, 128)))]
    bodies = tuple(region("branch", name, tile_cycles, 10 + i) for i, name in enumerate(names))
    loop = region("loop", ("tile",), 0, 9, (*bodies, region("branch", ("last of group",), 0, 30)))
    loop = bundles.dataclasses.replace(loop, last=40)
    kernel = bundles.Kernel("tgmm", region("kernel", (), rest, 0, (loop,), 1), 0, 0, (), None, None)
    return bundles.Report("compiled.builders:tgmm", {}, "", (kernel,), 0.0)


SMALL_TGMM = dict(M=4096, K=256, N=128, E=4, dtype="bfloat16")


def test_the_time_of_a_grouped_matmul_is_its_cycles_and_its_waits():
    """Tiles of 512 rows of 256 + 128 columns arrive in 0.12 us and a latency of 1 us; 1000 cycles are 0.57 us."""
    tiles = groups.TgmmTiles(512, 128, 128)
    time = kernels.grouped_time("tgmm", compiled_tgmm(), SMALL_TGMM, tiles)
    without = kernels._grouped_cycles("tgmm", compiled_tgmm(), SMALL_TGMM | dict(waits=False), tiles)
    num_tiles = len(grid.listed(kernels.ragged(4096, 4), 4096, tiles, "bfloat16").tile_group)
    assert time.compute_s == pytest.approx((2 * num_tiles * 1000 + 100) / kernels.CLOCK_HZ)
    assert without < time.compute_s * kernels.CLOCK_HZ * 1.1
    assert 1.3 < time.seconds / time.compute_s < 2.5 and time.waits_s["lhs"] + time.waits_s["dout"] > 0.2 * time.seconds
    assert kernels._grouped_cycles("tgmm", compiled_tgmm(), SMALL_TGMM, tiles) == time.seconds * kernels.CLOCK_HZ


def test_tiles_that_compute_for_longer_do_not_wait():
    tiles = groups.TgmmTiles(512, 128, 128)
    time = kernels.grouped_time("tgmm", compiled_tgmm(5000), SMALL_TGMM, tiles)
    assert time.seconds / time.compute_s < 1.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("flags", [{}, dict(gated=True), dict(transpose_rhs=True, summed=True)], ids=str)
def test_the_walk_of_gmm_moves_the_bytes_of_a_call(dtype, flags):
    s = dict(M=4096, K=512, N=512, E=4, dtype=dtype) | flags
    sizes, tiles = kernels.ragged(4096, 4), groups.Tiles(640, 256, 32)
    operands = kernels._gmm_operands(grid.listed(sizes, 4096, tiles, dtype), s, tiles)
    assert bytes_of(operands) == grid.moved_bytes(sizes, 4096, 512, 512, tiles, dtype, variant=kernels._variant(s))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_walk_of_tgmm_moves_the_bytes_of_a_call(dtype):
    s, tiles = dict(M=4096, K=512, N=512, E=4, dtype=dtype), groups.TgmmTiles(512, 256, 512)
    sizes = kernels.ragged(4096, 4)
    operands = kernels._tgmm_operands(grid.listed(sizes, 4096, tiles, dtype), s, tiles)
    assert bytes_of(operands) == grid.moved_bytes(sizes, 4096, 512, 512, tiles, dtype)


def bytes_of(operands):
    cycles = [1] * len(operands[0].index)
    return sum(size for kind, _, size in grid.events(cycles, operands) if kind == grid.REQUEST)
