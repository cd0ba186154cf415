"""Shared helpers of the tests: small models, comparisons with the reference, jaxpr walkers, compiled programs, runs.

Test files import from here and never from each other.
"""

import dataclasses
import functools
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anatomy
import aot
import calibration
import checkpoint
import compiler_flags
import corpora
import data
import initialisation
import parameters
import placement
import prepare
import reference
import rules
import sharding
import spikes
import train
from benchmarks import trials
from config import Config

ROOT = Path(__file__).parents[1]


# -- a corpus by hand

SEPARATOR = 9
DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8, 1, 2, 3, 4, 5, 6], [7, 7], [8, 1, 2, 3], [3, 2, 1]]


def corpus_of(documents, held_out=((1, 2), (3,), (4, 5, 6, 7, 8)), vocab_size=10) -> corpora.Corpus:
    join = lambda documents: np.array([t for document in documents for t in (SEPARATOR, *document)], np.uint16)
    return corpora.Corpus("the hand-made corpus", join(documents), join(held_out), vocab_size, SEPARATOR)


# -- a small model on 8 simulated devices

SMALL = dict(
    batch=16,
    seq_len=24,
    loss_chunk=8,
    steps=10,
    warmup_ratio=0.2,
    vocab_size=256,
    num_layers=3,
    model_dim=64,
    ff_dim=32,
) | dict(num_heads=16, num_kv_heads=8, head_dim=4, eval_batches=1, sample=0)
EXPERTS = dict(num_experts=8, experts_per_token=2, expert_dim=16, load_balance_loss=0.1, buffer_factor=8.0)
MIXTURES = {
    "mixtral": EXPERTS,
    "not renormalised, of all tokens' losses": EXPERTS
    | dict(renormalise=False, router_z_loss=0.01, mlp_activation="gelu"),
    "deepseek": EXPERTS
    | dict(num_shared_experts=2, num_dense_layers=1, router_scores="sigmoid", router_groups=4, router_groups_kept=2)
    | dict(router_scale=2.5, selection_bias=True, load_balance_loss=0.0, kv_lora_rank=16, q_lora_rank=8)
    | dict(rope_head_dim=4, num_kv_heads=16, rope_theta=50.0),
    "gpt-oss": EXPERTS
    | dict(post_norms=True)
    | dict(expert_bias=True, swiglu_limit=0.5, window=5, global_every=2, attention_sinks=True, output_bias=True)
    | dict(num_dense_layers=1, experts_per_token=3),
    "gemma": EXPERTS
    | dict(num_shared_experts=2, expert_norms=True, expert_scale=True, post_norms=True, value_norm=True)
    | dict(qk_norm=True, keys_as_values=True, mlp_activation="gelu", layer_scale=True),
}


def make_batch(config: Config, step: int = 0) -> data.Batch:
    """Packed sequences of random tokens with documents of a few tokens, and some padding."""
    rng = np.random.default_rng(step)
    stream = rng.integers(0, config.vocab_size - 1, 4000)
    stream[rng.random(4000) < 0.08] = config.vocab_size - 1
    corpus = corpora.Corpus("random tokens", stream, stream[:100], config.vocab_size, config.vocab_size - 1)
    batch = data.train_batch(corpus, step, batch=config.batch, seq_len=config.seq_len, seed=0)
    batch.loss_weights[1, -5:] = 0
    return batch


def make_batches(config: Config, steps: int) -> list[data.Batch]:
    """A batch for each of these steps. The last one is the first again, so that its loss has to be lower."""
    return [make_batch(config, number % (steps - 1)) for number in range(steps)]


def init(config: Config, seed: int = 1) -> parameters.Params:
    """Initial parameters plus noise, so that no error hides behind norms of one and biases of zero.

    They are arrays of numpy, as with jax each shape would be a program to compile. With padding the values are those of
    the model without it.
    """
    if config.dim_multiple > 1:
        return padded(init(dataclasses.replace(config, dim_multiple=1), seed), config)
    rng = np.random.default_rng(seed)

    def draw(name, shape, weight):
        mean, deviation = initialisation.initial(name, shape, weight, config)
        return (mean + np.hypot(deviation, 0.1) * rng.standard_normal(shape)).astype(np.float32)

    return parameters.tree(config, draw)


def padded(params: parameters.Params, config: Config) -> parameters.Params:
    """The parameters of a model, with the zeros that `config.dim_multiple` adds."""

    def pad(values, elements, stored):
        array = np.zeros(stored.shape, values.dtype)
        array[elements.index] = values
        return array

    return jax.tree.map(pad, params, _elements(config), parameters.param_shapes(config))


def without_padding(params: parameters.Params, config: Config) -> parameters.Params:
    """The reverse of `padded`. Asserts that what is left out is exactly zero."""

    def strip(path, array, elements):
        array = np.asarray(array)
        inside = array[elements.index]
        assert np.count_nonzero(array) == np.count_nonzero(inside), f"{jax.tree_util.keystr(path)} has padding"
        return inside

    return jax.tree.map_with_path(strip, params, _elements(config))


@dataclasses.dataclass(frozen=True)
class _Elements:
    """An index of the elements of a stored array that are the model's: a leaf of a tree."""

    index: tuple


def _elements(config: Config) -> parameters.Params:
    def places(name, shape, weight):
        kind = anatomy.config_of(config, name)
        stored, model = anatomy.sizes(kind), anatomy.sizes(kind, padded=False)
        dims = zip(shape, weight.dims.replace("Z", "D"), strict=True)
        inside = lambda size, dim: (
            np.arange(size) % stored[dim] < model[dim] if dim in anatomy.PADDED_DIMS else np.full(size, True)
        )
        return _Elements(np.ix_(*(inside(size, dim) for size, dim in dims)))

    return parameters.tree(config, places)


def on_mesh(config: Config, devices: list | None = None) -> tuple[Mesh, Callable, Callable]:
    """The mesh, train.loss_and_grads jitted on it, and a function that places parameters on it."""
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), devices)
    rules.check(rules.settled(config, dict(mesh.shape)), dict(mesh.shape))
    specs = parameters.param_specs(config)
    per_device = jax.shard_map(
        partial(train.loss_and_grads, config=config),
        mesh=mesh,
        in_specs=(specs, sharding.BATCH_SPEC),
        out_specs=(P(), P(), specs),
    )
    place = lambda tree, spec: jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, spec)
    return mesh, jax.jit(per_device), lambda params: place(params, specs)


def on_tensor_mesh(function: Callable, in_specs, out_specs, tensor: int = 4) -> Callable:
    """The function, mapped over the mesh axis `tensor` alone and jitted."""
    mesh = sharding.make_mesh(placement.parse_mesh(f"tensor:{tensor}"), jax.devices()[:tensor])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def laid_out(batch: data.Batch, config: Config, mesh: Mesh) -> data.Batch:
    """The batch with its positions in the order in which the mesh axis `context` holds them."""
    order = parameters.position_order(config, config.seq_len, mesh.shape["context"])
    return jax.tree.map(lambda field: np.asarray(field)[:, order], batch)


def first_state(config: Config, mesh: Mesh, params: parameters.Params) -> train.State:
    """The state before the first step, as train.init_state makes it, without a compiled program."""
    zero = np.int32(0)
    slots = spikes.guarded(train.make_optimizer(config)[0].init(params), config)
    state = train.State(zero, params, slots, calibration.initial(config), zero, zero)
    return jax.device_put(state, train.state_shardings(config, mesh))


# -- comparisons


def relative_error(a, b) -> float:
    """Norm of the difference over the norm of b, or over 1e-15, below which float32 values around 1 cancel to noise."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-15))


def assert_close(tree, expected, tolerance: float) -> None:
    """Asserts that the relative error of each leaf is below the tolerance."""
    for (path, a), b in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(expected), strict=True):
        error = relative_error(a, b)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


def assert_same_bits(ours, theirs) -> None:
    """Asserts that each leaf has the same dtype and the same bytes."""

    def compare(path, a, b):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)

    jax.tree.map_with_path(compare, ours, theirs)


# The reference depends on the model and the optimizer alone. Callers set every other field to one value before they
# ask, so that the cache serves all configurations of a model.


@functools.cache
def reference_gradients(config: Config):
    """Loss and gradients of the reference."""
    params, batch = init(config), make_batch(config)
    return jax.jit(jax.value_and_grad(partial(reference.loss, config=config)))(params, batch)


@functools.cache
def reference_after_steps(config: Config, steps: int):
    """Parameters of the reference after these steps of `make_batches`, and the loss of each step."""
    params, state, losses = init(config), None, []
    value_and_grad = jax.jit(jax.value_and_grad(partial(reference.loss, config=config)))
    for batch in make_batches(config, steps):
        loss, grads = value_and_grad(params, batch)
        params, state = reference.update(params, grads, state, config)
        losses.append(float(loss))
    return params, losses


def check_gradients(config: Config, tolerance: float = 1e-5, devices: list | None = None) -> None:
    """Asserts that loss and gradients on the configuration's mesh equal the reference's."""
    mesh, per_device, place = on_mesh(config, devices)
    loss, _, grads = per_device(place(init(config)), laid_out(make_batch(config), config, mesh))
    plain = dict(mesh="fsdp:*", prefetch=True, double_buffer=False, microbatches=1, shard_update=False, remat="none")
    plain |= dict(dtype="float32", loss_chunk=0)
    plain |= dict(collectives="xla", collective_matmul=False, attention="auto", max_logit=0.0)
    plain |= dict(moe_impl="dropless", moe_parts=1)
    plain |= dict(pipeline_schedule="1f1b", pipeline_rounds=1, remat_stage=False)
    plain |= dict(context_impl="ring", context_heads=1, context_balance=True)
    plain |= dict(buffer_factor=2.0, capacity_factor=1.25, dim_multiple=1)
    want_loss, want_grads = reference_gradients(dataclasses.replace(config, **plain))
    assert abs(float(loss) - float(want_loss)) < tolerance * float(want_loss)
    assert_close(without_padding(grads, config), want_grads, tolerance)


def check_steps(config: Config, steps: int, tolerance: float = 1e-5) -> None:
    """Asserts that losses and parameters of training on the configuration's mesh equal the reference's."""
    mesh, _, _ = on_mesh(config)
    state = first_state(config, mesh, init(config))
    step = train.make_train_step(config, mesh)
    losses = []
    for batch in make_batches(config, steps):
        placed = jax.device_put(laid_out(batch, config, mesh), NamedSharding(mesh, sharding.BATCH_SPEC))
        state, metrics = step(state, placed)
        losses.append(float(metrics["loss"] + metrics.get("auxiliary_loss", 0)))
    assert int(state.step) == steps and int(state.skipped) == 0
    plain = dict(mesh="fsdp:*", prefetch=True, microbatches=1, shard_update=False, collectives="xla")
    plain |= dict(pipeline_schedule="1f1b", pipeline_rounds=1)
    plain |= dict(context_impl="ring", context_balance=True, dim_multiple=1)
    params, want_losses = reference_after_steps(dataclasses.replace(config, **plain), steps)
    np.testing.assert_allclose(losses, want_losses, rtol=tolerance)
    assert losses[-1] < losses[0]
    assert_close(without_padding(state.params, config), params, tolerance)


# -- jaxprs


def executions(jaxpr, times: int = 1) -> Iterator[tuple]:
    """(equation, how often it runs) of a jaxpr and of all jaxprs inside it; a scan's body runs once an iteration."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from executions(getattr(inner, "jaxpr", inner), inside)


def equations(jaxpr) -> Iterator:
    """All equations of a jaxpr and of all jaxprs inside it, each once."""
    return (eqn for eqn, _ in executions(jaxpr))


def num_carried(scan) -> int:
    """The number of values that a scan's equation carries: its outputs that have no dim over its steps."""
    body = scan.params["jaxpr"].out_avals
    return sum(var.aval.shape == aval.shape for var, aval in zip(scan.outvars, body, strict=True))


def matmul_flops(jaxpr, without: tuple[int, int] | None = None) -> int:
    """Two for each multiply-add of every dot_general, but those whose second operand has the shape `without`."""
    flops = 0
    for eqn, times in executions(jaxpr):
        if eqn.primitive.name == "dot_general" and eqn.invars[1].aval.shape != without:
            (contracted, _), _ = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
            flops += times * 2 * summed * math.prod(eqn.outvars[0].aval.shape)
    return flops


def trace(config: Config):
    """The jaxpr of train.loss_and_grads on the configuration's mesh."""
    _, per_device, _ = on_mesh(config)
    return jax.make_jaxpr(per_device)(init(config), make_batch(config)).jaxpr


def collectives(config: Config, mesh_axis: str) -> list[tuple[str, str, tuple]]:
    """(primitive, dtype, shape of the operand) of what the step moves over one mesh axis."""
    moved = []
    for eqn in equations(trace(config)):
        axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        on_axis = mesh_axis in ([axes] if isinstance(axes, str) else axes)
        if on_axis and eqn.primitive.name not in ("pvary", "axis_index"):
            moved += [(eqn.primitive.name, str(var.aval.dtype), var.aval.shape) for var in eqn.invars]
    return moved


# -- compiled for TPU7x, by libtpu's compiler, which needs no TPU

TPU = dict(batch=8, seq_len=512, vocab_size=2048, num_layers=4, model_dim=512, ff_dim=1024, num_heads=4) | dict(
    num_kv_heads=2, head_dim=128, dtype="bfloat16", remat="full", mesh="fsdp:8"
)
# With collectives on the TensorCores a step compiles in a third of the time, where a test does not ask for the engine.
ON_TENSOR_CORES = {
    f"xla_tpu_enable_sparse_core_collective_offload_{name}": "false"
    for name in ("all_gather", "reduce_scatter", "all_reduce")
}
# For a child that compiles for TPU7x as users do; tests compile at the lowest effort (conftest.py).
FULL_EFFORT = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "0"}


def compiled_step(config: Config, programs: Path) -> str:
    """The train step for 2x2x1 chips, 8 devices, as text; `programs` is the fixture of conftest.py."""
    lowered = aot.lower_step(config, "tpu7x:2x2x1")
    return aot.compile_step(lowered, compiler_flags.for_run(config), str(programs))[1]


BRANCH = "%9 = sbr.rel (%p1) target bundleno = {} (0x0), region = 7"


def listing(*instructions: str) -> str:
    """Bundles in the compiler's format, "address : > { instructions }"."""
    lines = [f"  {hex(i):>6}   : > {{ {text} }}" for i, text in enumerate(instructions)]
    return "= control target key start\nLH: loop header\n= control target key end\n\n" + "\n".join(lines) + "\n"


def ring_of(n: int, devices: list | None = None) -> Mesh:
    """A mesh of one axis `ring` over the first n devices."""
    return Mesh(np.array((devices or jax.devices())[:n]), ("ring",), axis_types=(AxisType.Auto,))


@functools.cache
def tpu7x_ring(topology: str) -> Mesh:
    """All devices of a topology as one ring."""
    wrap = {"wrap": (True, True, True)} if topology == "4x4x4" else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=f"tpu7x:{topology}", **wrap).devices
    return ring_of(len(devices), sorted(devices, key=lambda device: device.id))


def compiled_on_ring(function: Callable, shape: tuple[int, ...], dtype, topology: str = "2x2x1"):
    """The program of a function of one device's [rows, ...], with the varying-axes check on."""
    mesh, ring = tpu7x_ring(topology), P("ring")
    x = jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), dtype, sharding=NamedSharding(mesh, ring))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # so that Pallas knows what it compiles for
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=ring, out_specs=ring)).lower(x).compile()


# -- runs of train.py in processes of their own


def run_values(directory: Path) -> Iterator[dict]:
    """Flags of a tiny run, for a fixture: a small corpus, and one cache of compiled programs that all runs share."""
    (directory / "squares.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(5000)))
    prepare.prepare([str(directory / "squares.txt")], str(directory / "squares"))
    yield dict(
        num_layers=2,
        model_dim=32,
        ff_dim=64,
        num_heads=8,
        num_kv_heads=8,
        head_dim=4,
        seq_len=32,
        batch=8,
        warmup_ratio=0.1,
        sample=0,
        eval_batches=0,
        log_every=1,
        corpus=str(directory / "squares"),
        compilation_cache=str(directory / "cache"),
        mesh="fsdp:8",
    )
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def start(
    values: dict, out: Path, *more: str, program=("train.py",), variables: dict | None = None
) -> subprocess.Popen:
    """Starts `python train.py` as a terminal would: of the variables that conftest.py sets, it sees only XLA_FLAGS.

    It also sees `variables`. Its stdout goes to `out`, its stderr to the file of that name with the suffix .err.
    """
    trials.pass_on_no_ignored_signals()
    ours = ("JAX_", "TPU_", "TF_", "ALLOW_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | (variables or {})
    flags = [f"--{name}={value}" for name, value in values.items()]
    with out.open("w") as stdout, out.with_suffix(".err").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, *program, *flags, *more], cwd=ROOT, stdout=stdout, stderr=stderr, env=env
        )


def start_two(
    values: dict,
    directory: Path,
    program=("train.py",),
    second=(),
    own: dict[int, tuple] | None = None,
    variables: dict | None = None,
) -> list[subprocess.Popen]:
    """Starts both processes of one run; process i writes to `i.out` and `i.err` in the directory.

    `second` has flags of the second process alone; `own` has the program of a process that runs another one.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    files = dict(checkpoint_dir=directory / "checkpoints", metrics_file=directory / "metrics.jsonl")
    values = dict(num_processes=2) | values | files | dict(steps=20, coordinator=f"localhost:{port}")
    programs = {0: program, 1: program} | (own or {})
    both = values | dict(process_id=0), values | dict(process_id=1) | dict(second)
    return [
        start(each, directory / f"{i}.out", program=programs[i], variables=variables) for i, each in enumerate(both)
    ]


def wait_until(condition: Callable, process: subprocess.Popen, timeout_s: float = 120):
    """The value of `condition` once it is true; fails if the process ends before that, or time runs out."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.001)
    return value


def read_metrics(path) -> list[tuple]:
    """(step, loss, norm of the gradients, learning rate) of each step."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines if "loss" in line]


def steps_in(directory) -> list[int]:
    """The steps of all checkpoints in a directory."""
    return sorted(int(path.name) for path in Path(directory).iterdir() if path.name.isdecimal())


def load(config: Config):
    """(state, note) of the newest checkpoint, in the shards of the configuration."""
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
    shapes = jax.eval_shape(partial(train.init_state, config=config), jax.random.key(0))
    with checkpoint.opened(config) as checkpoints:
        layout = shapes, train.state_shardings(config, mesh)
        return checkpoint.restore(checkpoints, lambda saved: layout, config)[:2]
