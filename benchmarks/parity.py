"""Whether this project's models compute what the published ones do: logits, loss and gradients, beside transformers.

    python benchmarks/parity.py                    the tables, from what is recorded in tests/parity (minutes)
    python benchmarks/parity.py --families=llama3.2,gpt-oss
    python benchmarks/parity.py record             records again, with transformers: needs the [parity] extra
    python benchmarks/parity.py export             transformers computes what was exported: needs the [parity] extra

**Idea.** parity_models.py makes a tiny random model for each family, and transformers computes logits, loss and
gradients for a few tokens. Here the same folder is read by weights.py, and computed by reference.py on one device and
by the training code on simulated meshes.

**Noise** is how much transformers differs from itself in float32 if the weights move by half a unit in the last place,
the largest of 16 tries (parity_models.py). The loss has at least one unit in its last place. The claim is that no
difference is above twice the noise. Gradients are compared weight by weight and layer by layer. A difference is
relative to the largest element of the gradient there.

**Power.** A comparison shows only what would fail. So each setting that a family's config.json gives is set to the
default of config.py, or the other way where it has the default, and the logits must move by far more than the noise.

**Export.** transformers reads the folder that `weights.export` writes, and must compute the logits that this project
computes: for the weights as read, after steps of training on a mesh, and after steps with FP8 matmuls.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import compiler_flags

compiler_flags.without_tpu()

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anatomy
import calibration
import command
import config as config_lib
import data
import families
import fsdp
import model
import parameters
import placement
import reference
import rules
import sharding
import train
import weights
from benchmarks import parity_models
from collectives import all_gather
from config import Config

FOLDER = ROOT / "tests/parity"
MESHES = ("fsdp:2,tensor:2,context:2", "fsdp:2,expert:2,tensor:2")  # the second is for experts
# These settings have no other value that fits the weights, or are not the model's.
NOT_SWITCHED = set(
    "preset recipe steps batch seq_len seed vocab_size num_layers model_dim ff_dim num_heads num_kv_heads head_dim "
    "tied_embeddings num_experts experts_per_token expert_dim num_shared_experts num_dense_layers buffer_factor "
    "kv_lora_rank q_lora_rank rope_head_dim value_head_dim global_head_dim global_kv_heads keys_as_values "
    "num_kv_shared_layers double_wide_mlp".split()
)


class Values(NamedTuple):
    """The results of a model for the tokens of a family."""

    logits: np.ndarray  # [B, T, V]
    loss: float
    gradients: parameters.Params


class Differences(NamedTuple):
    """Largest differences of two Values, or the noise of each."""

    logits: float
    loss: float
    gradient: float  # relative to the largest element of the gradient of the same weight and layer
    weight: str = ""  # the one with that gradient


class Recorded(NamedTuple):
    """A folder of tests/parity: what transformers computed for a family."""

    config: Config
    batch: data.Batch
    params: parameters.Params
    values: Values
    noise: Differences


# -- the recorded folders


def recorded(family: str, folder: Path = FOLDER) -> Recorded:
    """Reads the folder of a family."""
    directory, outputs = folder / family, np.load(folder / family / "outputs.npz")
    tokens_BT = outputs["tokens"]
    settings = weights.settings(str(directory)) | dict(zip(("batch", "seq_len"), tokens_BT.shape, strict=True))
    if settings.get("num_experts"):
        settings["buffer_factor"] = 8.0  # no token is dropped
    config = Config(**settings)
    one = sharding.make_mesh(placement.parse_mesh("fsdp:1"), jax.devices()[:1])
    params = jax.device_get(weights.load(str(directory), config, one))
    gradients = jax.device_get(read_gradients(directory / "gradients", config, one))
    noise = Differences(*(float(outputs[f"noise of {name}"]) for name in ("logits", "loss", "gradients")))
    values = Values(outputs["logits"], float(outputs["loss"]), gradients)
    return Recorded(config, next_tokens(tokens_BT), params, values, noise)


def read_gradients(directory: Path, config: Config, mesh: Mesh) -> parameters.Params:
    """Reads gradients as weights are read, but by the chain rule where a weight is not the published number.

    The one that is added to the norms of Gemma 2 and 3 has no gradient. A weight that is the published one over a root
    has a gradient that is the published one times that root.
    """
    kind = families.read_json(directory / "config.json")["model_type"]
    family, sizes = families.FAMILIES[kind], anatomy.sizes(config)
    roots = {row.ours: sizes[row.over_root] ** 0.5 for row in family.rows if row.over_root}
    rows = tuple(dataclasses.replace(row, plus=0.0, over_root="") for row in family.rows)
    with mock.patch.dict(families.FAMILIES, {kind: dataclasses.replace(family, rows=rows)}):
        gradients = weights.load(str(directory), config, mesh)
    return jax.tree.map_with_path(lambda path, gradient: gradient * roots.get(path[-1].name, 1), gradients)


def next_tokens(tokens_BT: np.ndarray) -> data.Batch:
    """The batch in which each token but the last of a sequence predicts the next one."""
    T, ones = tokens_BT.shape[1], np.ones_like(tokens_BT)
    positions = ones * np.arange(T, dtype=np.int32)
    return data.Batch(tokens_BT, np.roll(tokens_BT, -1, 1), ones, positions, np.float32(positions < T - 1))


# -- the values of this project


def on_one_device(params: parameters.Params, batch: data.Batch, config: Config) -> Values:
    """Logits, loss and gradients by reference.py."""
    value_and_grad = jax.value_and_grad(partial(reference.loss, config=config))
    compute = jax.jit(lambda params: (reference.logits(params, batch, config), *value_and_grad(params, batch)))
    return Values(*jax.device_get(compute(params)))


def on_mesh(params: parameters.Params, batch: data.Batch, config: Config) -> Values:
    """Logits, loss and gradients by the code of a train step, on the mesh of the configuration."""
    mesh, config = settled_on_mesh(config)
    specs = parameters.param_specs(config)

    def per_device(params, batch):
        loss, _, gradients = train.loss_and_grads(params, batch, config=config)
        gathered = fsdp.gather_over_data(params, specs, parameters.compute_dtypes(config), config.collectives)
        return logits_btv(gathered, batch, config), loss, gradients

    out = P(placement.BATCH_AXES, "context", "tensor"), P(), specs
    sharded = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=(specs, sharding.BATCH_SPEC), out_specs=out))
    params = jax.tree.map(lambda w, spec: jax.device_put(w, NamedSharding(mesh, spec)), params, specs)
    order = parameters.position_order(config, config.seq_len, mesh.shape["context"])
    logits, loss, gradients = jax.device_get(sharded(params, in_order(batch, order)))
    return Values(logits[:, np.argsort(order)], loss, gradients)


def settled_on_mesh(config: Config) -> tuple[Mesh, Config]:
    """The mesh of a configuration, and the configuration as a run on it has it."""
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
    config = rules.settled(config, dict(mesh.shape))
    rules.check(config, dict(mesh.shape))
    return mesh, config


def in_order(batch: data.Batch, order: np.ndarray) -> data.Batch:
    """The batch with its positions in another order."""
    return jax.tree.map(lambda field: field[:, order], batch)


def logits_btv(params: parameters.Params, batch: data.Batch, config: Config) -> jax.Array:
    """This device's logits, in per-device code, from parameters as `fsdp.gather_over_data` makes them."""
    x = model.embed_tokens(params, batch.tokens, config)
    x_btd, _ = model.run_all_layers(params, x, batch.tokens, model.constants(batch, config), config)
    x_btd = model.final_norm(params, x_btd, config)
    x_btD = all_gather(x_btd, "tensor", dim=2, algorithm=config.collectives)
    logits = jnp.einsum("btD,vD->btv", x_btD, model.unembedding(params, config))
    if cap := config.logit_soft_cap:
        logits = cap * jnp.tanh(logits / cap)
    return lax.pmax(logits, "pipe")  # which has size 1


# -- comparisons


def differences(ours: Values, theirs: Values) -> Differences:
    """The largest differences between two models."""
    worst, weight = 0.0, ""
    pairs = zip(jax.tree.leaves_with_path(ours.gradients), jax.tree.leaves(theirs.gradients), strict=True)
    for (path, a), b in pairs:
        a, b, name = np.asarray(a), np.asarray(b), path[-1].name
        if name in ("selection_bias", "layer_scale"):  # have no gradient
            continue
        dims = tuple(range(1 if len(path) > 1 else 0, b.ndim))  # the weights of layers are stacked
        relative = float(np.max(np.max(np.abs(a - b), dims) / np.max(np.abs(b), dims)))
        if not relative <= worst:
            worst, weight = relative, name
    return Differences(largest(ours.logits - theirs.logits), float(abs(ours.loss - theirs.loss)), worst, weight)


def largest(array: np.ndarray) -> float:
    """The largest magnitude of an array."""
    return float(np.max(np.abs(array)))


# -- power


def without_a_setting(config: Config) -> Iterator[tuple[str, Config]]:
    """(a setting as it is written on the command line, the configuration without it) for all that a family has."""
    fields = dataclasses.fields(Config)
    for field in fields[: [field.name for field in fields].index("mesh")]:
        name, value = field.name, getattr(config, field.name)
        other = {
            "renormalise": {"renormalise": not value},
            "router_groups": {"router_groups": 1, "router_groups_kept": 1},
            "router_groups_kept": {"router_groups_kept": config.router_groups},
            "rope_type": {"rope_type": "default", "rope_scaling": 1.0},
            "global_every": {"global_every": 0, "global_rope_theta": 0.0},
            "window": {"window": config.seq_len},  # a window of all positions; 0 would leave no global layers
        }.get(name, {name: field.default})
        if name == "rope_theta" and value == field.default:
            other = {name: field.default / 10}
        is_given = value != field.default or name == "rope_theta" or (name == "renormalise" and config.num_experts)
        in_stacks = name == "global_every" and anatomy.two_kinds(config)  # then it says which weights a layer has
        if is_given and not in_stacks and name not in NOT_SWITCHED:
            yield f"{name}={value}", config_lib.changed(config, **other)


def weights_of(params: parameters.Params, config: Config) -> parameters.Params:
    """The parameters that the model of a configuration has, without the others."""

    def present(part, shapes):
        return dataclasses.replace(part, **{name: None for name, shape in vars(shapes).items() if shape is None})

    shapes = parameters.param_shapes(config)
    stacks = {stack: present(getattr(params, stack), getattr(shapes, stack)) for stack in anatomy.layer_stacks(config)}
    return dataclasses.replace(present(params, shapes), **stacks)


def effects(record: Recorded) -> dict[str, float]:
    """{setting: how far the logits move without it, at most}."""
    moved = {}
    for setting, config in without_a_setting(record.config):
        logits = jax.jit(partial(reference.logits, config=config))(weights_of(record.params, config), record.batch)
        moved[setting] = largest(np.asarray(logits) - record.values.logits)
    return moved


# -- the tables


def compared(record: Recorded) -> Iterator[tuple[str, Differences]]:
    """(where it is computed, how far this project is from transformers) for one device and the meshes."""
    config = record.config
    yield "one device", differences(on_one_device(record.params, record.batch, config), record.values)
    for mesh in MESHES if config.num_experts else MESHES[:1]:
        ours = on_mesh(record.params, record.batch, dataclasses.replace(config, mesh=mesh))
        yield f"`{mesh}`", differences(ours, record.values)


def tables(records: dict[str, Recorded]) -> Iterator[str]:
    """The lines of both tables. Raises ArithmeticError where the claim does not hold."""
    yield "| family | on | logits | noise | loss | noise | gradients | noise |"
    yield "|---|---|---|---|---|---|---|---|"
    for family, record in records.items():
        for place, ours in compared(record):
            pairs = list(zip(ours[:3], record.noise[:3], strict=True))
            yield f"| {family} | {place} | " + " | ".join(f"{a:.1e} | {b:.1e}" for a, b in pairs) + " |"
            if not all(a <= 2 * b for a, b in pairs):
                raise ArithmeticError(f"{family} on {place} differs by more than twice the noise: {ours}")
    yield ""
    yield "| family | largest logit | noise | without a setting, logits move by |"
    yield "|---|---|---|---|"
    for family, record in records.items():
        moved = ", ".join(f"{distance:.2g} (`{setting}`)" for setting, distance in effects(record).items())
        yield f"| {family} | {largest(record.values.logits):.2g} | {record.noise.logits:.1e} | {moved} |"


# -- export


def trained(record: Recorded, steps: int, **flags) -> parameters.Params:
    """The parameters after steps of training on a mesh, on the tokens of the family."""
    flags = dict(mesh=MESHES[0], steps=100, learning_rate=1e-3) | flags
    mesh, config = settled_on_mesh(config_lib.changed(record.config, **flags))
    zero = np.int32(0)
    slots = train.make_optimizer(config)[0].init(record.params)
    state = train.State(zero, record.params, slots, calibration.initial(config), zero, zero)
    state = jax.device_put(jax.device_get(state), train.state_shardings(config, mesh))
    order = parameters.position_order(config, config.seq_len, mesh.shape["context"])
    batch = jax.device_put(in_order(record.batch, order), NamedSharding(mesh, sharding.BATCH_SPEC))
    step = train.make_train_step(config, mesh)
    for _ in range(steps):
        state, _ = step(state, batch)
    return state.params


def exported(params: parameters.Params, record: Recorded) -> float:
    """How far transformers' logits for an exported folder are from this project's for the parameters, at most."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = str(Path(scratch) / "exported")
        weights.export(params, record.config, directory, "float32")
        theirs, _, _ = parity_models.evaluate(parity_models.load(directory), record.batch.tokens)
    ours = jax.jit(partial(reference.logits, config=record.config))(jax.device_get(params), record.batch)
    return largest(np.asarray(ours) - theirs)


def export_table(records: dict[str, Recorded]) -> Iterator[str]:
    """The lines of the table of exports. Raises ArithmeticError for a difference above four times the noise."""
    yield "| family | noise | as read | after 5 steps | after 5 steps in FP8 |"
    yield "|---|---|---|---|---|"
    for family, record in records.items():
        modules = "out,mlp,moe" if record.config.kv_lora_rank else "qkv,out,mlp,moe"
        stages = (record.params, trained(record, 5), trained(record, 5, fp8="dynamic", fp8_modules=modules))
        distances = [exported(params, record) for params in stages]
        noise = record.noise.logits
        yield f"| {family} | {noise:.1e} | " + " | ".join(f"{distance:.1e}" for distance in distances) + " |"
        if max(distances) > 4 * noise:
            raise ArithmeticError(f"{family} as exported differs by more than four times the noise: {distances}")


def main() -> None:
    parser = command.parser(__file__)
    about = "what to do [%(default)s]"
    parser.add_argument("command", nargs="?", choices=("table", "record", "export"), default="table", help=about)
    parser.add_argument("--families", default=",".join(parity_models.FAMILIES), metavar="A,B", help="[%(default)s]")
    args = command.arguments(parser)
    names = args.families.split(",")
    command.check_names(names, parity_models.FAMILIES)
    jax.config.update("jax_num_cpu_devices", 8)
    if args.command == "record":
        for family in names:
            parity_models.make(family, FOLDER / family)
            print(f"{family}: noise {recorded(family).noise}")
        return
    if args.command == "export":
        parity_models.transformers()
    records = {family: recorded(family) for family in names}
    for line in export_table(records) if args.command == "export" else tables(records):
        print(line, flush=True)


if __name__ == "__main__":
    command.run(main)
