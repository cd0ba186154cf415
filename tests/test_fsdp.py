"""Tests what fully sharded data parallelism moves and stores, in jaxprs and in programs compiled for TPU7x."""

import dataclasses
import functools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import MIXTURES, SMALL, TPU, collectives, compiled_step, equations, num_carried, on_mesh, trace

import collectives as messages
import fsdp
import parameters
import placement
import sharding
import train
from anatomy import expert_rows
from config import Config, changed
from predicted import transformer


def gathers_of(shape, eqns) -> int:
    return sum(eqn.primitive.name == "all_gather" and eqn.outvars[0].aval.shape == shape for eqn in eqns)


def layer_loops_of(config: Config):
    """Yields the loops over the layers, as (scan equation, body)."""
    for eqn in equations(trace(config)):
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            if any(weights_gathered(body)):
                yield eqn, body


def loops_of_length(length: int, config: Config) -> list:
    """Returns the bodies of the loops that have so many iterations."""
    loops = (eqn for eqn in equations(trace(config)) if eqn.primitive.name == "scan" and eqn.params["length"] == length)
    return [eqn.params["jaxpr"].jaxpr for eqn in loops]


def barriers_of(body) -> list:
    return [eqn for eqn in equations(body) if eqn.primitive.name == "optimization_barrier"]


def weights_gathered(body):
    """Returns the variables that a loop's body gathers over fsdp."""
    gathers = (eqn for eqn in body.eqns if eqn.primitive.name == "all_gather")
    return {eqn.outvars[0] for eqn in gathers if "fsdp" in eqn.params["axis_name"]}


def sums(body):
    """Returns {variable: its shape} of the gradients that a loop's body sums over fsdp."""
    summed = (eqn.outvars[0] for eqn in body.eqns if eqn.primitive.name == "reduce_scatter")
    return {var: var.aval.shape for var in summed}


# The shard of a matrix of the 8 experts of MIXTURES["mixtral"] on fsdp:8, [E*d, M].
EXPERT_SHARD = (64, 16)
REST = [("none", False, False), ("none", True, True), ("full", False, False), ("full", True, False)]


@pytest.mark.parametrize(
    "remat, prefetch, double_buffer",
    [
        ("none", True, False),
        ("full", True, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in REST),
    ],
)
def test_at_most_two_layers_are_gathered(remat, prefetch, double_buffer):
    """Each loop gathers each layer once and carries at most one; none is stacked for the backward pass."""
    config = Config(
        **SMALL | dict(num_layers=4), mesh="fsdp:8", prefetch=prefetch, remat=remat, double_buffer=double_buffer
    )
    size = 2 if double_buffer else 1  # layers in an iteration
    gathered = (config.model_dim, config.ff_dim)  # w_gate and w_up
    loops = list(layer_loops_of(config))
    assert len(loops) == 2  # forward and backward
    for loop, body in loops:
        assert loop.params["length"] == 4 / size
        assert gathers_of(gathered, list(equations(body))) == 2 * size  # w_gate, w_up
        after, in_body = [[var.aval.shape for var in jaxpr.outvars] for jaxpr in (loop, body)]
        carried = [shape for shape, inner in zip(after, in_body, strict=True) if shape == inner]
        assert carried.count(gathered) == (2 if prefetch else 0)
        assert (loop.params["length"], *gathered) not in after


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        {},
        pytest.param(dict(expert_bias=True), marks=pytest.mark.slow),
        dict(moe_impl="capacity", buffer_factor=2.0),
        dict(moe_impl="capacity", buffer_factor=2.0, fp8="dynamic", fp8_modules="moe"),
        dict(fp8="dynamic", fp8_modules="moe"),
    ],
)
def test_no_gathered_expert_matrices_are_saved_on_a_tpu(option, monkeypatch):
    """Nor are transposed copies, which would be residuals of their own: `fsdp.scan_layers` drops only its weights."""
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    config = Config(**SMALL | MIXTURES["mixtral"] | option, mesh="fsdp:8", remat="none", attention="reference")
    matrices = sorted((config.num_layers, config.num_experts, config.expert_dim, config.model_dim))
    loops = list(layer_loops_of(config))
    assert len(loops) == 2
    assert matrices not in [sorted(var.aval.shape) for loop, _ in loops for var in loop.outvars]


@pytest.mark.slow
def test_two_of_a_hundred_layers_are_gathered_at_once(full_effort):
    """Compiled for TPU7x 2x2x1: beside shards and stream, a stack of matmuls needs memory for two layers."""
    layers, D, tokens = 100, 4096, 1024
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    gather = lambda w_dD: fsdp.gather(w_dD, P("fsdp"), "fsdp")
    layer = lambda w_DD, x_bD, aux, i, arriving: x_bD @ w_DD
    per_device = lambda w_LdD, x_bD: fsdp.scan_layers(layer, gather, w_LdD, x_bD, None, prefetch=True)
    shape = lambda dims, spec: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    args = shape((layers, D, D), P(None, "fsdp")), shape((8 * tokens, D), P("fsdp"))
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P("fsdp"))
    memory = jax.jit(sharded).lower(*args).compile().memory_analysis()
    layer_bytes = 2 * D * D
    assert memory.argument_size_in_bytes == pytest.approx(layers * layer_bytes / 8 + 2 * tokens * D, rel=0.01)
    assert 2 * layer_bytes <= memory.temp_size_in_bytes < 3 * layer_bytes


def test_in_two_dims_all_bytes_go_over_the_second_axis_and_a_share_over_the_first():
    config = Config(**SMALL | dict(num_layers=2), mesh="fsdp:4,fsdp_transpose:2", prefetch=False)
    (_, body), _ = layer_loops_of(config)
    moved = {}
    for eqn in body.eqns:
        if eqn.primitive.name == "all_gather":
            (axis,) = eqn.params["axis_name"]
            moved[axis] = moved.get(axis, 0) + eqn.outvars[0].aval.size
    D, F, of_heads = config.model_dim, config.ff_dim, 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    matrices = 3 * D * F + D * of_heads
    assert moved == {"fsdp": matrices // 2, "fsdp_transpose": matrices}


def test_prefetch_gathers_what_this_layer_does_not_need():
    """No matmul of a loop's body uses what the body gathers: that goes into the carry, for the next layer.

    Without prefetch it uses the matrices of the MLP, and attention's go into the carry.
    """
    for prefetch in (True, False):
        config = Config(**SMALL, mesh="fsdp:8", prefetch=prefetch)
        for _, body in layer_loops_of(config):
            used = {var for eqn in body.eqns for var in eqn.invars if not hasattr(var, "val")}
            gathered = weights_gathered(body)
            assert len(gathered) == 7
            of_mlp = sorted([config.model_dim * config.ff_dim] * 3)
            assert sorted(var.aval.size for var in gathered & used) == ([] if prefetch else of_mlp)


def test_weights_that_are_not_gathered_are_not_carried():
    """On one device for each copy of the weights; a carried matrix would be copied for each layer."""

    def carried(mesh, prefetch):
        config = Config(**SMALL, mesh=mesh, prefetch=prefetch)
        loops = [eqn for eqn in equations(trace(config)) if eqn.primitive.name == "scan"]
        loops = [eqn for eqn in loops if eqn.params["length"] == config.num_layers]
        return max(num_carried(eqn) for eqn in loops)

    assert carried("data:8", False) < carried("fsdp:8", False) < carried("fsdp:8", True)
    assert carried("data:8", True) == carried("fsdp:8", True)


MOVED = ("reshape", "linear_call")  # what a variable passes as it is


def passed(body, var) -> list:
    """Returns the variable and those that it was before, up to the one that is computed."""
    made_by, way = {out: eqn for eqn in body.eqns for out in eqn.outvars}, [var]
    while (eqn := made_by.get(way[-1])) and eqn.primitive.name in MOVED and len(eqn.invars) == len(eqn.outvars):
        way.append(eqn.invars[eqn.outvars.index(way[-1])])
    return way


def origins(body, eqns) -> set:
    """Returns the variables from which the operands of these equations come."""
    return {passed(body, var)[-1] for eqn in eqns for var in eqn.invars if not hasattr(var, "val")}


@pytest.mark.parametrize("mesh, prefetch", [("fsdp:8", True), ("fsdp:8", False), ("data:8", True)])
def test_a_mixtures_messages_are_ordered(mesh, prefetch):
    """If nothing is gathered nothing waits, nor in a dense layer.

    Forward the router waits for what is gathered ahead, and for its own experts without prefetch, but never for the
    experts' last matrix. Backward it waits for its own other matrices, each gradient's sum for what is gathered ahead,
    and one matrix of the experts is summed after the other.
    If the result of w_o is saved, recomputation would not need attention before the router. So both ways the router
    waits for attention, and so does the gradient of the mixture's result.
    """
    attention_and_router, experts = 5, 3  # matrices
    for mixture, remat in ((True, "full"), (True, "save_out_proj"), (False, "full")):
        flags = (MIXTURES["mixtral"] if mixture else {}) | dict(num_layers=5)  # no other loop has that length
        config = Config(**SMALL | flags, mesh=mesh, prefetch=prefetch, remat=remat)
        loops = loops_of_length(5, config)
        assert len(loops) == 2
        in_fp8 = loops_of_length(5, changed(config, fp8="dynamic"))
        for backward, (body, fp8_body) in enumerate(zip(loops, in_fp8, strict=True)):
            barriers = barriers_of(body)
            assert bool(barriers) == (mixture and mesh == "fsdp:8") and len(barriers_of(fp8_body)) == len(barriers)
            if not barriers:
                continue
            tokens = config.batch // 8, config.seq_len, config.model_dim
            shapes = [[var.aval.shape for var in eqn.invars if hasattr(var.aval, "shape")] for eqn in barriers]
            context = (*tokens[:2], config.num_heads, config.head_dim)
            late = remat == "save_out_proj"
            assert sum(context in each for each in shapes) == late * (1 + backward)
            assert ([tokens, context] in shapes) == (late and bool(backward))
            (arriving,) = (each for each in shapes if each[0] == tokens and each != [tokens, context])
            of_experts = (config.model_dim, config.expert_dim)
            assert sum(sorted(shape[1:]) == sorted(of_experts) for shape in arriving) == experts - 1
            made_by = {var: eqn for eqn in body.eqns for var in eqn.outvars}
            gathered = weights_gathered(body)
            summed = sums(body)
            assert len(summed) == (attention_and_router + experts if backward else 0)
            waits, before = [], {}
            for var in summed:
                way = passed(body, made_by[var].invars[0])
                waits.append(len(gathered & origins(body, [made_by[way[-1]]])))
                barriers = [made_by[each] for each in way if made_by[each].primitive.name == "linear_call"]
                assert all("optimization_barrier" in str(eqn.params["callee"]) for eqn in barriers)
                before[var] = summed.keys() & {each for eqn in barriers for each in eqn.invars}
            ahead = attention_and_router + (experts if prefetch else 0)
            assert set(waits) == ({ahead} if backward else set())
            if backward:  # the loop returns the gradients in the order of a layer's weights
                returned = [passed(body, var)[-1] for var in body.outvars]
                gate, up, down = [var for var in returned if summed.get(var) == EXPERT_SHARD]
                with_these = {var: {gate} if prefetch else set() for var in summed}
                assert before == with_these | {down: set(), up: {down}, gate: {up}}
            used = origins(body, [eqn for eqn in body.eqns if eqn.primitive.name not in MOVED])
            late = prefetch and not backward  # the last matrix of the next layer's experts
            assert len(gathered & used) == attention_and_router + experts - late


@pytest.mark.parametrize("buffer_factor", [2.0, 0.25])
def test_experts_over_devices_wait_for_what_travels_meanwhile(buffer_factor):
    """On two devices of experts: the order of the rows is known before the gathered tokens are used, in each round.

    The experts' last matmul waits for all weights that are gathered ahead, their last matrix included.
    """
    flags = SMALL | MIXTURES["mixtral"] | dict(remat="full", buffer_factor=buffer_factor)
    config = Config(**flags, mesh="data:2,fsdp:2,expert:2")
    tokens = config.batch * config.seq_len // 4  # of two devices
    rows = expert_rows(config, tokens // 2, 2)
    assert (rows == tokens * config.experts_per_token) == (buffer_factor == 2)
    matrices = [config.num_experts // 2, config.model_dim, config.expert_dim]
    for _, body in layer_loops_of(config):
        barriers = [eqn for eqn in equations(body) if eqn.primitive.name == "optimization_barrier"]
        shapes = [[var.aval.shape for var in eqn.invars] for eqn in barriers]
        of_tokens = [others for first, *others in shapes if first == (tokens, config.model_dim)]
        of_products = [others for first, *others in shapes if first == (rows, config.expert_dim)]
        assert len(of_tokens) == len(of_products) == (1 if buffer_factor == 2 else 2)
        assert all(set(others) == {(rows,)} for others in of_tokens)
        assert all(sum(shape == tuple(matrices) for shape in others) == 3 for others in of_products)


@pytest.mark.slow
def test_gathers_end_before_what_waits_for_them_and_start_early(full_effort):
    """Compiled for TPU7x 2x2x1: a layer with a matmul, a sort, a row look-up and a larger matmul, as a mixture has.

    With the barrier the next layer's gather is under way beside the first matmul, without it after that.
    """
    layers, D, tokens = 6, 4096, 8192
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def order_of(waits: bool) -> list[str]:
        def layer(w_DF, x_bD, aux, i, arriving):
            y_bD = jax.nn.gelu(x_bD @ aux)
            y_bD = messages.after(y_bD, arriving)
            rows = jnp.argsort(jnp.argmax(y_bD, -1))
            return jax.nn.gelu(jnp.take(y_bD, rows, axis=0, mode="clip") @ w_DF)[:, :D]

        gather = lambda w_dF: fsdp.gather(w_dF, P("fsdp"), "fsdp")
        per_device = lambda w, x, aux: fsdp.scan_layers(layer, gather, w, x, aux, prefetch=True, ordered=waits)
        specs = P(None, "fsdp"), P("fsdp"), P()
        sharded = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=P("fsdp"))
        shapes = (layers, D, 4 * D), (8 * tokens, D), (D, D)
        shape = lambda dims, spec: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        text = jax.jit(sharded).lower(*map(shape, shapes, specs)).compile().as_text()
        body = next(part for part in text.split("\n\n") if part.count("call-start(") and "kind=kOutput" in part)
        named = re.findall(r"all-gather\S* = .*call-start\(|kind=kOutput", body)
        return ["gather" if "call-start" in each else "matmul" for each in named]

    assert order_of(waits=True)[0] == "gather" and order_of(waits=False)[0] == "matmul"


@pytest.mark.parametrize("flags", [dict(), MIXTURES["mixtral"]], ids=["dense", "mixture"])
def test_with_double_buffering_a_gather_comes_after_the_one_before(flags):
    """Both gathers of an iteration could otherwise be one message, which begins after a layer that needs none of it."""
    config = Config(**SMALL | dict(num_layers=4) | flags, mesh="fsdp:8", double_buffer=True, remat="full")
    loops = list(layer_loops_of(config))
    assert len(loops) == 2  # forward and backward
    for _, body in loops:
        gathered = [eqn.outvars[0] for eqn in body.eqns if eqn.outvars[0] in weights_gathered(body)]
        of_layer = len(gathered) // 2
        assert of_layer > 1
        for one, other in zip(gathered[:of_layer], gathered[of_layer:], strict=True):
            needed = {other}  # what `other` is computed from
            for eqn in reversed(body.eqns):
                if needed & {*eqn.outvars}:
                    needed |= {var for var in eqn.invars if not hasattr(var, "val")}  # no literals
            assert one in needed


@pytest.mark.slow
def test_with_double_buffering_no_weights_are_copied():
    """Compiled for TPU7x 2x2x1, a stack of matmuls; without double buffering each of the two loops has one copy."""
    layers, D, tokens = 16, 4096, 16_384
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    gather = lambda w_dD: fsdp.gather(w_dD, P("fsdp"), "fsdp")
    layer = jax.checkpoint(lambda w_DD, x_bD, aux, i, arriving: jax.nn.gelu(x_bD @ w_DD))
    specs = P(None, "fsdp"), P("fsdp")

    def loss(w_LdD, x_bD):
        x_bD = fsdp.scan_layers(layer, gather, w_LdD, x_bD, None, prefetch=True, double_buffer=True)
        return lax.psum(jnp.sum(x_bD.astype(jnp.float32)), "fsdp")

    shape = lambda dims, spec: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    args = shape((layers, D, D), specs[0]), shape((8 * tokens, D), specs[1])
    gradient = jax.jit(jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())))
    text = gradient.lower(*args).compile().as_text()
    copies = re.findall(rf"^  %\S+ = bf16\[{D},{D}\]\S* copy\(", text, re.MULTILINE)
    assert f"bf16[{D},{D}]" in text and not copies


@pytest.mark.slow
@pytest.mark.parametrize("prefetch, double_buffer", [(True, False), (False, False), (True, True)])
def test_layers_add_up_a_loss_beside_the_stream(prefetch, double_buffer):
    """The carry is a tree of the stream and of sums; gradients flow through the sums to weights and stream."""
    w_LDD = jax.random.normal(jax.random.key(0), (3, 4, 4)) / 2
    x_BD = jax.random.normal(jax.random.key(1), (2, 4))

    def layer(w_DD, carry, aux, i, arriving=()):
        x_BD, sums = carry
        y_BD = jnp.tanh(x_BD @ w_DD) + lax.stop_gradient(aux)
        sums = {"loss": sums["loss"] + jnp.sum(y_BD**2), "by_layer": sums["by_layer"].at[i].add(jnp.sum(x_BD))}
        return x_BD + y_BD, sums

    def loss(scan, w_LDD, x_BD):
        x_BD, sums = scan(w_LDD, (x_BD, {"loss": jnp.float32(0), "by_layer": jnp.zeros(3)}))
        return jnp.sum(x_BD) + sums["loss"] + jnp.sum(sums["by_layer"] ** 3), sums

    def plain(w_LDD, carry):
        for i in range(3):
            carry = layer(w_LDD[i], carry, 0.5, i)
        return carry

    options = dict(prefetch=prefetch, double_buffer=double_buffer)
    scanned = lambda w, carry: fsdp.scan_layers(layer, lambda w: w, w, carry, jnp.float32(0.5), **options)
    ours, expected = (
        jax.jit(jax.value_and_grad(partial(loss, scan), argnums=(0, 1), has_aux=True))(w_LDD, x_BD)
        for scan in (scanned, plain)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_collective_matmuls_save_no_gathered_weights(remat):
    """They save the activations that they gathered; of the weights, only the shards."""
    config = Config(**SMALL, mesh="fsdp:4,tensor:2", collective_matmul=True, remat=remat)
    gathered = (config.num_layers, config.model_dim, config.ff_dim // 2)
    loops = list(layer_loops_of(config))
    assert len(loops) == 2
    for loop, _ in loops:
        assert gathered not in [var.aval.shape for var in loop.outvars]


@pytest.mark.slow
@pytest.mark.parametrize("collectives", ["ring", "ring_bidirectional"])
@pytest.mark.parametrize("option", [dict(shard_update=True), dict(shard_update=True, collective_matmul=True), dict()])
def test_rings_move_all_but_sums_of_rows(collectives, option):
    """XLA's own collectives are left for scalars, one number a token, and to type an all-reduce's result invariant."""
    config = Config(**SMALL, mesh="data:2,fsdp:2,tensor:2", collectives=collectives, **option)
    largest = {}  # {primitive: size of the largest operand that it moves}
    for eqn in equations(trace(config)):
        axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        if {"data", "fsdp", "tensor"} & set([axes] if isinstance(axes, str) else axes):
            size = max((math.prod(var.aval.shape) for var in eqn.invars), default=0)
            largest[eqn.primitive.name] = max(size, largest.get(eqn.primitive.name, 0))
    assert largest["ppermute"] >= config.model_dim * config.ff_dim // 8
    tokens = config.batch * config.seq_len // 4
    assert all(size <= tokens for name, size in largest.items() if name.startswith(("psum", "pmax", "all_reduce")))
    assert not {"all_gather", "reduce_scatter", "all_to_all"} & set(largest)
    assert ("all_gather_invariant" in largest) == (not option)


def test_gradients_are_reduce_scattered_once():
    config = Config(**SMALL, mesh="fsdp:8")
    shapes = jax.tree.leaves(parameters.param_shapes(config))
    moved = collectives(config, "fsdp")
    scattered = [shape for name, _, shape in moved if name == "reduce_scatter"]
    assert len(scattered) == len(shapes)
    assert sum(math.prod(shape) for shape in scattered if len(shape) > 1) > 0
    reduced = [shape for name, _, shape in moved if name.startswith("psum")]
    assert all(math.prod(shape) == 1 for shape in reduced), reduced  # the loss and the number of targets


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_sharded_update_is_one_scatter_and_one_gather_in_place_of_the_all_reduce(microbatches):
    config = Config(**SMALL, mesh="data:8", dtype="bfloat16", microbatches=microbatches)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(parameters.param_shapes(config)))
    tensors = lambda moved, name: sorted(shape for n, _, shape in moved if n.startswith(name) and shape)

    plain = collectives(config, "data")
    assert tensors(plain, "psum") == shapes
    assert not tensors(plain, "reduce_scatter") and not tensors(plain, "all_gather")

    sharded = collectives(dataclasses.replace(config, shard_update=True), "data")
    assert tensors(sharded, "reduce_scatter") == shapes
    assert len(tensors(sharded, "all_gather")) == len(shapes)
    assert not tensors(sharded, "psum")
    assert {dtype for name, dtype, _ in sharded if name == "all_gather"} == {"bfloat16"}
    assert {dtype for name, dtype, _ in sharded if name == "reduce_scatter"} == {"float32"}


def test_sharded_update_divides_the_optimizer_state_by_the_axis():
    def bytes_per_device(shard_update):
        config = Config(**SMALL, mesh="data:4,fsdp:2", shard_update=shard_update)
        mesh, _, _ = on_mesh(config)
        shapes = jax.eval_shape(partial(train.init_state, config=config), jax.random.key(0))
        layout = train.state_shardings(config, mesh)
        on_device = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * a.dtype.itemsize, shapes, layout)
        return sum(size for size in jax.tree.leaves(on_device.opt_state) if size > 4)

    assert bytes_per_device(True) * 4 == bytes_per_device(False)


# -- compiled for TPU7x


def layer_loops(program: str) -> list[str]:
    """The schedule of each loop that gathers weights: G starts a gather, g ends it; R, r scatters; M a matmul."""
    computations = {}
    for line in program.splitlines():
        if start := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            current = computations.setdefault(start[1], [])
        elif line.startswith(" "):
            current.append(line)

    @functools.cache
    def multiplies(name):
        lines = computations.get(name, [])
        inner = [m for line in lines for m in re.findall(r"calls=%([\w.\-]+)", line)]
        return any(" convolution(" in line for line in lines) or any(map(multiplies, inner))

    schedules = []
    for name in re.findall(r"body=%([\w.\-]+)", program):
        schedule = ""
        for line in computations[name]:
            target = re.match(r"\s+(?:ROOT )?%(\S+) = ", line)
            if asynchronous := target and re.match(r"(all-gather|reduce-scatter).*call-(start|done)", target[1]):
                letter = {"all-gather": "g", "reduce-scatter": "r"}[asynchronous[1]]
                schedule += letter.upper() if asynchronous[2] == "start" else letter
                assert asynchronous[2] == "done" or 'async_execution_thread="sparsecore"' in line
            elif (called := re.search(r"calls=%([\w.\-]+)", line)) and multiplies(called[1]):
                schedule += "M"
            assert not re.search(r" (all-gather|reduce-scatter)\(", line), f"not asynchronous: {line}"
        schedules += [schedule] if "G" in schedule else []
    return schedules


@pytest.mark.slow
def test_tpu7x_gathers_the_next_layer_while_this_one_computes(programs, full_effort):
    """With prefetch every gather runs on the SparseCores during matmuls, and no matmul waits for one.

    test_aot.py (prefetch_hides) tests that less computation runs beside them without prefetch.
    """
    forward, backward = layer_loops(compiled_step(Config(**TPU), programs))
    assert re.fullmatch(r"G+M+g+", forward), forward
    assert backward.count("r") == 7 and backward.rindex("M") < backward.index("g"), backward
    assert backward.rindex("G") < backward.rindex("M")


@pytest.mark.slow
def test_tpu7x_hides_the_gathers_of_a_layer_like_llama_8b(programs, full_effort):
    """At 2048 tokens a device, too, all gathers start in the layer before, whose first matmuls wait for none of them.

    The layer has an eighth of Llama 3.1 8B's dims: the time of a gather by that of its matmul depends on the tokens.
    """
    dims = dict(seq_len=2048, model_dim=512, ff_dim=1792, num_heads=4, num_kv_heads=1)
    forward, backward = layer_loops(compiled_step(Config(**TPU | dims), programs))
    assert re.fullmatch(r"M?G[GM]*GMM[gM]*g", forward), forward
    assert backward.index("M") < backward.index("g") and backward.rindex("G") < backward.rindex("M"), backward


@pytest.mark.slow
def test_tpu7x_scatters_the_gradients_of_the_vocabulary(programs):
    """The gradients of embedding and unembedding, unsharded on each device, are reduce-scattered."""
    program = compiled_step(Config(**TPU), programs)
    reduced = re.findall(r"= (\S+\[[\d,]*\])\S* all-reduce\(", program)
    sizes = [math.prod(map(int, filter(None, re.search(r"\[(.*)\]", shape)[1].split(",")))) for shape in reduced]
    assert max(sizes) <= TPU["model_dim"], reduced
    scattered = [set(map(int, m)) for m in re.findall(r"= \w+\[(\d+),(\d+)\]\S* reduce-scatter\(", program)]
    shard = {TPU["vocab_size"], TPU["model_dim"] // 8}  # the two ends of libtpu's range transpose it or do not
    assert scattered.count(shard) == 2, scattered


@pytest.mark.slow
def test_tpu7x_initialises_straight_into_the_shards():
    """The program that makes the state needs little memory beside its shards."""
    config = Config(**TPU | dict(num_layers=16, vocab_size=1024))
    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    shardings = train.state_shardings(config, sharding.make_mesh(placement.parse_mesh(config.mesh), devices))
    init = jax.jit(partial(train.init_state, config=config), out_shardings=shardings)
    lowered = init.trace(jax.eval_shape(lambda: jax.random.key(0))).lower(lowering_platforms=("tpu",))
    memory = lowered.compile().memory_analysis()
    state_bytes = 12 * transformer.num_params(config) / 8  # weights and two moments, in float32
    assert memory.output_size_in_bytes < 1.01 * state_bytes
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 1.25 * state_bytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_added_up_and_stored_in_their_dtype(dtype):
    """In the carry of the loop over microbatches, and in what the step sends over `data` and stores."""
    jaxpr = trace(Config(**SMALL, mesh="data:2,fsdp:2,tensor:2", microbatches=2, grad_dtype=dtype))
    grads = len(jax.tree.leaves(parameters.param_shapes(Config(**SMALL))))
    scans = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan" and num_carried(eqn) == grads]
    (carried,) = [scan.params["jaxpr"].out_avals[:grads] for scan in scans]
    assert {str(aval.dtype) for aval in carried} == {dtype}
    assert {str(var.aval.dtype) for var in jaxpr.eqns[-1].outvars[-grads:]} == {dtype}
