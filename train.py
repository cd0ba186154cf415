"""Train a language model on a mesh of TPU7x chips, or of simulated devices.

    python train.py                                              a small model on real text, 8 simulated devices
    python train.py --mesh=data:2,fsdp:2,tensor:2 --steps=50     another mesh
    python train.py --preset=llama3.1-8b --corpus=corpus --checkpoint_dir=gs://...    a TPU slice

Top to bottom: the state, the step, and the run that repeats it. Their parts have files of their own: config.py (every
flag), data.py (batches), schedules.py (learning rates), parameters.py and model.py (the weights, and the loss of one
device), fsdp.py and sharding.py (which device stores what, and when it moves), evaluation.py, sampling.py,
processes.py, checkpoint.py and log.py.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported is no traceback

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import command
import compiler_flags
import flags as flags_lib
from config import Config

if __name__ == "__main__":  # before jax is imported: a wrong flag and --help answer at once
    BEGUN = time.perf_counter()
    command.end_at_once_when_interrupted()
    CONFIG = command.run(flags_lib.parse_flags, __file__)
    command.run(lambda: compiler_flags.set_init_args(compiler_flags.for_run(CONFIG)))

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import agreement
import calibration
import checkpoint
import corpora
import corruption
import data
import data_mixtures
import evaluation
import fsdp
import hardware
import initialisation
import machine
import mixture
import model
import moments
import muon
import offload
import parameters
import placement
import processes
import qk_clip
import rules
import sampling
import schedules
import sharding
import spikes
import weights
from log import Log, Profile, check_outputs
from predicted import recompute, transformer
from predicted.step import GiB, Prediction, cliffs, describe_shortfall, predict
from predicted.workload import run_of
from sharding import BATCH_SPEC

SHOWN_STAGES = 3  # of a mixture's schedule, in the log


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a step changes."""

    step: jax.Array  # int32: steps done, and so the number of the next batch
    params: parameters.Params
    opt_state: optax.OptState
    amax: dict  # the largest elements of FP8 operands, where the recipe remembers them: calibration.py
    skipped: jax.Array  # int32: steps whose gradients were not finite, or that were spikes
    skipped_in_a_row: jax.Array  # int32: of them, those since the last good one


# -- the step


def make_optimizer(config: Config, mesh: Mesh | None = None) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optax chain, and the learning rate by the number of updates done. `mesh`: see muon.muon."""
    learning_rate = schedules.learning_rate(config)
    decay, matrices = config.weight_decay, parameters.is_matrix(config)
    # offload.py updates some of the parameters at a time, with None in place of the others.
    mask = lambda tree: jax.tree.map(lambda matrix, w: None if w is None else matrix, matrices, tree)
    if config.optimizer == "adamw":
        beta1, beta2, mu_dtype = config.beta1, config.beta2, config.mu_dtype
        update = optax.adamw(learning_rate, beta1, beta2, weight_decay=decay, mask=mask, mu_dtype=mu_dtype)
        if config.nu_dtype != "float32":
            rule = moments.scale_by_adam(beta1, beta2, mu_dtype, config.nu_dtype, config.seed)
            decayed, scaled = optax.add_decayed_weights(decay, mask), optax.scale_by_learning_rate(learning_rate)
            update = optax.chain(rule, decayed, scaled)
    elif config.optimizer == "adafactor":
        # Its decay is not multiplied by the learning rate as adamw's is, so it is here.
        decay_now = (lambda count: decay * learning_rate(count)) if decay else None
        update = optax.adafactor(learning_rate, weight_decay_rate=decay_now, weight_decay_mask=matrices)
    elif config.optimizer == "muon":
        update = muon.muon(learning_rate, config, mesh)
    else:
        update = optax.sgd(learning_rate, momentum=config.beta1)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, update), learning_rate


def init_state(key: jax.Array, config: Config) -> State:
    return _first_state(initialisation.init_params(config, key), config)


def _first_state(params: parameters.Params, config: Config) -> State:
    """The state before the first step, with these weights."""
    zero = jnp.int32(0)
    opt_state = spikes.guarded(make_optimizer(config)[0].init(params), config)
    return State(zero, params, opt_state, calibration.initial(config), zero, zero)


def state_shardings(config: Config, mesh: Mesh) -> State:
    """The layout of the state. An optimizer slot is laid out as the parameter of its shape; all else is replicated.

    All else is counts, and the sums over rows and columns that adafactor keeps in place of second moments. Slots are in
    the memory of the host with `offload_optimizer`.
    """
    shapes = jax.eval_shape(partial(init_state, config=config), jax.random.key(0))
    spec_of = {}  # by the end of a slot's path in the tree: ".layers.w_q"
    for (path, shape), spec in zip(
        jax.tree.leaves_with_path(shapes.params), jax.tree.leaves(parameters.param_specs(config)), strict=True
    ):
        spec_of[jax.tree_util.keystr(path)] = (shape.shape, spec)

    def layout(path, leaf):
        name = jax.tree_util.keystr(path)
        specs = (spec for end, (shape, spec) in spec_of.items() if name.endswith(end) and leaf.shape == shape)
        spec = next(specs, None)
        on_host = config.offload_optimizer and spec is not None and name.startswith(".opt_state")
        return NamedSharding(mesh, spec or P(), memory_kind=offload.MEMORY if on_host else "device")

    return jax.tree.map_with_path(layout, shapes)


def loss_and_grads(params: parameters.Params, batch: data.Batch, scaling=parameters.NO_SCALING, *, config: Config):
    """Loss, metrics, and the loss's gradients, laid out as the parameters. Per-device code, in the step's shard_map.

    Where `scaling` has expected maxima (FP8), the measured ones are among the metrics, as `amax`.
    """
    specs = parameters.param_specs(config)
    num_targets = lax.psum(jnp.sum(batch.loss_weights), sharding.axes_of(BATCH_SPEC))
    batch = batch._replace(loss_weights=batch.loss_weights / num_targets)  # so that sums of losses are their mean
    weights = fsdp.gather_over_data(params, specs, parameters.compute_dtypes(config), config.collectives)

    def loss_fn(trained, batch, key):
        weights, amax = trained
        scaling = parameters.Scaling(amax, key)
        return model.loss_fn(weights, batch, config, scaling, **qk_clip.options(config))

    def add(total, more):  # the "gradients" of expected maxima are the measured ones: calibration.py
        grads = jax.tree.map(lambda a, b: (a + b).astype(a.dtype), total[0], more[0])
        return grads, jax.tree.map(jnp.maximum, total[1], more[1])

    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    trained = weights, lax.pcast(scaling.amax, placement.MESH_AXES, to="varying")
    if lax.axis_size("pipe") > 1:
        shares, grads = model.pipelined_loss_and_grads(weights, batch, config, **qk_clip.options(config))
        amax = {}
    elif config.microbatches == 1:
        shares, (grads, amax) = value_and_grad(trained, batch, scaling.key)
    else:

        def accumulate(total, of_microbatch):
            shares, grads = value_and_grad(trained, *of_microbatch)
            # Without the barrier XLA:TPU tries to move reduce-scatters out of the loop, and fails (an internal check).
            return add(total, lax.optimization_barrier(grads)), shares

        dtypes = config.grad_dtype, jnp.float32  # of gradients, and of maxima
        zeros = tuple(
            jax.tree.map(lambda w, d=dtype: jnp.zeros_like(w, d), tree)
            for tree, dtype in zip(trained, dtypes, strict=True)
        )
        keys = None if scaling.key is None else jax.random.split(scaling.key, config.microbatches)
        (grads, amax), shares = lax.scan(accumulate, zeros, (model.split(batch, config.microbatches), keys))
        shares = qk_clip.summed(shares)
    loss, metrics = qk_clip.over_devices(shares)
    metrics |= {"amax": lax.pmax(amax, placement.MESH_AXES)} if amax else {}
    return loss, metrics, fsdp.sum_gradients(grads, specs, config.collectives, config.grad_dtype)


def train_step(state: State, batch: data.Batch, *, config: Config, mesh: Mesh) -> tuple[State, dict[str, jax.Array]]:
    """One step: gradients in per-device code, then the update."""
    specs = parameters.param_specs(config)
    per_device = partial(loss_and_grads, config=config)
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(specs, BATCH_SPEC, P()), out_specs=(P(), P(), specs))
    noise = jax.random.fold_in(jax.random.key(config.seed), state.step)
    scaling = parameters.Scaling(calibration.expected(state.amax, config), noise)
    loss, metrics, grads = sharded(state.params, batch, scaling)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)  # element by element, as norm and update read them
    amax = calibration.updated(state.amax, metrics.pop("amax", {}), state.step - state.skipped, config)
    grad_norm = optax.tree.norm(grads)
    opt_state, history = spikes.split(state.opt_state, config)
    if history is None:
        accept = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    else:
        accept, history = spikes.judged(history, loss, grad_norm, config.skip_spikes)
        metrics["spikes"] = history.spikes
    unguarded = dataclasses.replace(state, opt_state=opt_state)
    params, opt_state = update(unguarded, grads, accept, config=config, mesh=mesh)
    params = mixture.update_selection_biases(params, metrics, accept, config)
    if config.qk_clip:
        max_logits = metrics.pop("max_logits")
        params, metrics["max_logit"] = qk_clip.clip(params, max_logits, accept, config), jnp.max(max_logits)
    new_state = State(
        step=state.step + 1,
        params=params,
        opt_state=spikes.joined(opt_state, history),
        amax=jax.tree.map(lambda new, old: jnp.where(accept, new, old), amax, state.amax),
        skipped=state.skipped + ~accept,
        skipped_in_a_row=jnp.where(accept, 0, state.skipped_in_a_row + 1),
    )
    # The sum is minimised. The cross-entropy is reported, as for held-out sequences, and the auxiliary losses apart.
    metrics = mixture.reported_metrics(metrics) | {
        "step": new_state.step,
        "loss": loss - metrics.get("auxiliary_loss", 0),
        "grad_norm": grad_norm,
        "learning_rate": make_optimizer(config)[1](state.step - state.skipped),
        "skipped": new_state.skipped,
        "skipped_in_a_row": new_state.skipped_in_a_row,
    }
    return new_state, metrics


def update(state: State, grads: parameters.Params, accept: jax.Array, *, config: Config, mesh: Mesh):
    """(params, opt_state) after the optimizer's step, or as they were where not `accept`.

    XLA's partitioner distributes it: but for norms, and the matrices of Muon, it is elementwise. With the state of
    another optimizer on the host it is per-device code.
    """
    optimizer, _ = make_optimizer(config, mesh)
    if not config.offload_optimizer or config.optimizer == "muon":
        old_state = offload.to_device(state.opt_state) if config.offload_optimizer else state.opt_state
        updates, opt_state = optimizer.update(grads, old_state, state.params)
        new = optax.apply_updates(state.params, updates), opt_state
        return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, (state.params, old_state))
    if config.clip_norm:  # by the norm of all layers' gradients, so before any is updated
        grads, _ = optax.clip_by_global_norm(config.clip_norm).update(grads, optax.EmptyState())
    elementwise, _ = make_optimizer(dataclasses.replace(config, clip_norm=0.0))
    layouts = state_shardings(config, mesh)
    opt_layouts, _ = spikes.split(layouts.opt_state, config)
    specs, slots = (jax.tree.map(lambda layout: layout.spec, tree) for tree in (layouts.params, opt_layouts))
    per_device = partial(offload.update, elementwise)
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(specs, slots, specs, P()), out_specs=(specs, slots))
    return sharded(grads, state.opt_state, state.params, accept)


def make_train_step(config: Config, mesh: Mesh):
    """The step, jitted: donates the state and returns it in the same layout."""
    shardings = state_shardings(config, mesh)
    step = partial(train_step, config=config, mesh=mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))


def lower_step(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """The step lowered for the devices of a mesh; nothing is compiled or allocated."""
    shaped = lambda array, layout: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)
    key = jax.eval_shape(lambda: jax.random.key(config.seed))
    state = jax.eval_shape(partial(init_state, config=config), key)
    state = jax.tree.map(shaped, state, state_shardings(config, mesh))
    dtypes = data.Batch(jnp.int32, jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.int32)
    array = partial(jax.ShapeDtypeStruct, (config.batch, config.seq_len), sharding=NamedSharding(mesh, BATCH_SPEC))
    return make_train_step(config, mesh).lower(state, data.Batch(*map(array, dtypes)))


def compile_steps(
    configs: list[Config], mesh: Mesh, compiler_options: dict[str, str]
) -> tuple[dict[int, jax.stages.Compiled], float]:
    """{sequences in a batch: the compiled step}, and the seconds of their compilation."""
    begun = time.perf_counter()
    programs = {config.batch: lower_step(config, mesh).compile(compiler_options or None) for config in configs}
    return programs, time.perf_counter() - begun


# -- the run


@dataclass(frozen=True)
class Setup:
    """A run whose flags, devices and files are checked, before it has a state."""

    config: Config  # without what has no effect on this mesh; remat is a policy
    mesh: Mesh
    corpus: data_mixtures.Mixture
    contents: checkpoint.Contents  # identities of the files and folders that flags name
    batches: data_mixtures.Batches  # sequences in a batch, of the run before, too, if this one resumes it
    compiler_options: dict[str, str]
    notes: list[str]
    tokenizer: object  # tokenization.Tokenizer or ByteTokenizer of the corpus; None if there is none to show text with
    seconds: dict[str, float]  # spent since the start of the program, by what for
    begun: float  # by time.perf_counter


def run(config: Config, begun: float | None = None) -> dict[str, float]:
    """The whole run: devices, state, compilation, the loop, the summary. Returns the figures of the summary.

    Args:
      begun: when the program was, before its imports, by `time.perf_counter`.

    Raises:
      ValueError: the flags, the corpus, the checkpoint and the devices do not go together.
      FloatingPointError: `max_skipped` steps in a row were skipped, or a device computes or holds wrong bits.
      OSError: a file cannot be read or written.
      SystemExit: SIGTERM or Ctrl-C came; the state is saved.
    """
    setup = set_up(config, begun)
    config, mesh, corpus = setup.config, setup.mesh, setup.corpus
    # All that is opened here is closed in any case: `stack` waits for the last save, the log has the sample after it.
    with contextlib.ExitStack() as logs, contextlib.ExitStack() as stack:
        restore_begun = time.perf_counter()
        checkpoints = stack.enter_context(checkpoint.opened(config))
        state, resumed, batches, _ = restored_state(config, mesh, checkpoints, setup.contents)
        first_step = 0 if state is None else int(state.step)
        setup = dataclasses.replace(setup, batches=data_mixtures.continued(batches, first_step, setup.batches))
        if checkpoints:
            setup.seconds["restore"] = time.perf_counter() - restore_begun
        other_tokenizer = checkpoint.save_tokenizer(checkpoints, setup.tokenizer)
        epochs = partial(data.epochs, corpus, batches=setup.batches, seq_len=config.seq_len)
        log = logs.enter_context(Log(config, first_step, mesh, epochs, setup.batches))
        prediction = predict_step(config, mesh)
        introduce(log, config, mesh, corpus, resumed, prediction)
        for note in filter(None, [*setup.notes, other_tokenizer]):
            log.say(f"note       {note}")
        eval_step = evaluation.make_eval_step(config, mesh)

        def evaluate(state: State) -> float:
            scaling = calibration.expected(state.amax, config)
            loss_on = lambda source, its: evaluation.evaluate(eval_step, state.params, source, its, mesh, scaling)
            evaluated = evaluation.by_source(corpus, config)
            losses = {source.name: loss_on(source, its) for source, its in evaluated}
            loss = evaluation.mean_over(losses, evaluated)
            log.evaluation(int(state.step), loss, losses)
            return loss

        if first_step >= config.steps:
            log.say(f"done       before: all of --steps={config.steps}")
            if config.eval_batches and first_step == config.steps:  # the run before may have ended in its evaluation
                evaluate(state)
            return {}
        state, programs = compile_and_draw(setup, log, state)
        terminated = stack.enter_context(processes.notice_of_termination())  # until the last save is complete
        state, eval_loss, stopped = training_loop(setup, log, checkpoints, state, programs, evaluate, terminated)
        if config.fp8 == "calibrate":
            calibration.save(state.amax, config)
            log.say(f"calibrated {config.fp8_scales}: the largest elements of {int(state.step)} steps")
        stack.close()
        if stopped:
            log.event(int(state.step), "terminated", why=signal.Signals(stopped).name)
            saved = f"saved in {config.checkpoint_dir}: the same command resumes"
            where = saved if checkpoints else "not saved: no --checkpoint_dir"
            log.say(f"terminated after step {int(state.step)}, {where}")
            raise SystemExit(128 + stopped)
        return summarise(log, state, setup, eval_loss, prediction)


def set_up(config: Config, begun: float | None) -> Setup:
    """Starts the devices and checks everything, up to the corpus. All processes agree when it returns.

    Raises as `run`.
    """
    called = time.perf_counter()
    begun = begun or called
    with agreement.reached(config) as facts:
        if sizes := processes.simulated_sizes(config):  # judged before any is made
            rules.check(config, sizes)
            machine.check(config, sizes)
        devices = processes.start(config)
        mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), devices, config.core_axis)
        seconds = {"import": called - begun, "devices": time.perf_counter() - called}
        config = resolve_remat(config, mesh)
        notes = rules.notes(config, dict(mesh.shape))
        config = rules.settled(config, dict(mesh.shape))
        rules.check(config, dict(mesh.shape))
        calibration.check(config)
        check_outputs(config)
        machine.check_host_memory(config, mesh)
        compiler_options = compiler_flags.compiler_options(compiler_flags.for_run(config))
        check_backend(config, mesh.devices.flat[0].platform)
        corpus = data_mixtures.open_mixture(config.corpus)
        corpus.check(config.seq_len, config.vocab_size)
        tokenizer, problem = corpora.readable_tokenizer(corpus.sources[0])
        notes += [*filter(None, [problem]), *corpora.notes(corpus.sources[0], config.vocab_size, config.weights)]
        contents = {"corpus": corpus.identity_before}
        if config.fp8 == "static":
            contents["fp8_scales"] = calibration.identity(config)
        facts |= corpus.facts()
        if config.weights:
            identity, skipped = weights.examined(config.weights, config)
            notes += skipped
            contents["weights"] = facts["the folder of weights"] = identity
    batches = rules.rampup(config.batch_rampup, config.batch)
    return Setup(config, mesh, corpus, contents, batches, compiler_options, notes, tokenizer, seconds, begun)


def compile_and_draw(setup: Setup, log: Log, state: State | None) -> tuple[State, dict[int, jax.stages.Compiled]]:
    """The state, and {sequences in a batch: the step}, of each batch size to come; steps are compiled meanwhile.

    Without a state one is made, from --weights or the seed.
    """
    compiler = ThreadPoolExecutor(1)
    stages = [dataclasses.replace(setup.config, batch=size, batch_rampup="") for size in batches_to_come(setup, log)]
    try:
        compiling, meanwhile = compiler.submit(compile_steps, stages, setup.mesh, setup.compiler_options), ""
        if state is None:
            draw_begun = time.perf_counter()
            made = read_state if setup.config.weights else drawn_state
            state = made(stages[0], setup.mesh)
            how = "read" if setup.config.weights else "drawn"
            meanwhile = f", the state {how} in {time.perf_counter() - draw_begun:.1f} s meanwhile"
        programs, compile_s = compiling.result()
    finally:
        compiler.shutdown(wait=False)  # an error of the drawing is said at once; Python waits when it exits
    processes.wait_for_all()
    since_s, before = time.perf_counter() - setup.begun, ", ".join(f"{k} {s:.1f}" for k, s in setup.seconds.items())
    several = f"{len(programs)} batch sizes " if len(programs) > 1 else ""
    log.say(f"compiled   {several}in {compile_s:.1f} s{meanwhile}; {since_s:.1f} s since the start, of which {before}")
    return state, programs


def batches_to_come(setup: Setup, log: Log) -> list[int]:
    """The batch sizes of the steps from the log's first one on, each once."""
    first, last = log.first_step, setup.config.steps
    sizes = [size for from_step, size in setup.batches if first < from_step < last]
    return [*dict.fromkeys([data_mixtures.batch_of(first, setup.batches), *sizes])]


def training_loop(
    setup: Setup, log: Log, checkpoints, state: State, programs, evaluate, terminated
) -> tuple[State, float | None, int]:
    """Runs the steps. Returns (the last state, the last held-out loss or None, the signal that ended them or 0).

    Args:
      checkpoints: of checkpoint.opened; None saves nothing.
      programs: {sequences in a batch: the compiled (state, batch) -> (state, metrics)}.
      evaluate: state -> held-out loss, which it also logs.
      terminated: of processes.notice_of_termination: step -> signal or 0.
    """
    config, step, eval_loss = setup.config, log.first_step, None
    save = partial(checkpoint.save, checkpoints, config=config, contents=setup.contents, batches=setup.batches)
    profile = Profile(config, log, programs)
    with contextlib.closing(prefetched(setup, step)) as batches:
        log.start_clock()
        try:
            for batch in log.time_waits(batches):
                step += 1
                profile.before(step, state)
                run_step = programs[len(batch.tokens)]
                if _is_due(step, config.check_every):
                    log.finish_step()  # so that the time of the check is not that of the step before
                    run_step = partial(corruption.checked_step, run_step, step=step)
                state, metrics = run_step(state, batch)
                log.step(metrics)  # shows the step before, while this one runs
                stopped = terminated(step)
                at_end = bool(stopped) or step == config.steps
                profile.after(step, at_end, state)
                evaluates = config.eval_batches and not stopped and (at_end or _is_due(step, config.eval_every))
                saves = checkpoints and (at_end or _is_due(step, config.save_every))
                samples = not at_end and _is_due(step, config.sample_every)  # the last one is that of the end
                if evaluates or saves or samples or at_end:
                    log.finish_step()
                checkpoint.check(checkpoints)
                if saves and config.check_every:
                    corruption.check_replicas(state, step)
                if saves:  # before the evaluation, which may fail
                    save(step, state)
                    log.event(step, "saved")
                if evaluates:
                    eval_loss = evaluate(state)
                if samples:
                    show_sample(setup, log, state)
                if evaluates or saves or samples:
                    log.start_clock()
                if stopped:
                    break
        except corpora.DamagedError:
            # Not with several processes: the others do not know of the error, and wait for the next step.
            if checkpoints and jax.process_count() == 1:
                log.finish_step()
                if step > log.first_step and checkpoints.manager.latest_step() != step:
                    save(step, state)
                    log.say(f"saved      after step {step}, as the corpus cannot be read: mended, it goes on")
            raise
    return state, eval_loss, stopped


def prefetched(setup: Setup, first_step: int):
    """The batches from step `first_step` on, laid out on the mesh, made ahead of time on a thread."""
    config, mesh, corpus = setup.config, setup.mesh, setup.corpus
    order = parameters.position_order(config, config.seq_len, mesh.shape["context"])

    def make_batch(step):
        rows = partial(data.train_batch, corpus, step, batch=setup.batches, seq_len=config.seq_len, seed=config.seed)
        return sharding.place(data.Batch, rows, data_mixtures.batch_of(step, setup.batches), order, mesh)

    return data.prefetch(make_batch, range(first_step, config.steps))


def check_backend(config: Config, backend: str) -> None:
    """Raises ValueError for what only a TPU does."""
    if backend == "tpu":
        return
    if compiler_flags.for_run(config):
        raise ValueError(
            f"xla_flags={config.xla_flags!r} are for a TPU's compiler, and here is {backend!r}: --xla_flags=none"
        )
    if config.attention == "flash" and (config.remat != "none" or config.remat_stage):
        raise ValueError(
            f"attention=flash is simulated on {backend!r}, where jax.checkpoint cannot run it again for "
            f"remat={config.remat}, remat_stage={config.remat_stage}: --remat=none --no-remat_stage, or "
            "--attention=reference"
        )


def restored_state(
    config: Config, mesh: Mesh, checkpoints, contents: checkpoint.Contents | None = None
) -> checkpoint.Restored:
    """The newest checkpoint's state, with a note of what now differs; None twice where there is none.

    Raises as checkpoint.restore, and ValueError where the learning rate would jump (schedules.py).
    """
    if not checkpoint.has_any(checkpoints):
        return checkpoint.Restored(None, None, ())

    def as_saved(saved: Mapping):
        theirs = dataclasses.replace(config, skip_spikes=saved.get("skip_spikes", 0.0))
        shapes = jax.eval_shape(partial(init_state, config=theirs), jax.random.key(config.seed))
        return shapes, state_shardings(theirs, mesh)

    restored = checkpoint.restore(checkpoints, as_saved, config, contents)
    state = jax.block_until_ready(restored.state)
    if bool(restored.values.get("skip_spikes")) != bool(config.skip_spikes):  # the history begins, or is dropped
        opt_state = getattr(state.opt_state, "optimizer", state.opt_state)
        place = jax.jit(partial(spikes.guarded, config=config), out_shardings=state_shardings(config, mesh).opt_state)
        state = dataclasses.replace(state, opt_state=place(opt_state))
    goes_on = schedules.continuation(restored.values, config, int(state.step - state.skipped))
    return restored._replace(state=state, note=", ".join(filter(None, [restored.note, goes_on])))


def drawn_state(config: Config, mesh: Mesh) -> State:
    """The initial state by `config.seed`; each device draws its own shards."""
    init = jax.jit(partial(init_state, config=config), out_shardings=state_shardings(config, mesh))
    return jax.block_until_ready(init(jax.random.key(config.seed)))


def read_state(config: Config, mesh: Mesh) -> State:
    """The initial state with the published weights of `config.weights`. Raises as weights.load."""
    params = weights.load(config.weights, config, mesh)
    make = partial(_first_state, config=config)
    return jax.block_until_ready(jax.jit(make, donate_argnums=0, out_shardings=state_shardings(config, mesh))(params))


def resolve_remat(config: Config, mesh: Mesh) -> Config:
    """`config` with a policy in place of remat=auto. Raises ValueError where none fits, or for an unknown chip."""
    if config.remat != "auto":
        return config
    tpu = hardware.slice_of(mesh.devices.flat)
    if tpu is None:
        raise ValueError(
            f"remat=auto chooses by the memory of a chip, and hardware.py has no {mesh.devices.flat[0].device_kind!r}: "
            "name a policy, as in --remat=full"
        )
    chip, topology, num_slices = tpu
    return recompute.resolve(_with_sizes(config, mesh), chip, topology, num_slices=num_slices)


def _with_sizes(config: Config, mesh: Mesh) -> Config:
    """`config`, its mesh written out: no size is left to be filled."""
    return dataclasses.replace(config, mesh=",".join(f"{axis}:{size}" for axis, size in mesh.shape.items()))


def predict_step(config: Config, mesh: Mesh) -> Prediction | None:
    """The prediction of roofline.py for the step on these devices; None for chips, or a mesh, that it does not know."""
    tpu = hardware.slice_of(mesh.devices.flat)
    if tpu is None:
        return None
    chip, topology, num_slices = tpu
    try:
        return predict(run_of(_with_sizes(config, mesh), chip, topology, num_slices=num_slices))
    except ValueError:  # a mesh that runs, laid over the torus in a way that has no name in placement.py
        return None


def introduce(
    log: Log,
    config: Config,
    mesh: Mesh,
    corpus: data_mixtures.Mixture,
    resumed: str | None,
    prediction: Prediction | None,
) -> None:
    """Prints what is about to run: mesh, model, data, prediction, and the checkpoint that it resumes from."""
    num_processes = f"; {jax.process_count()} processes" if jax.process_count() > 1 else ""
    log.say(f"mesh       {sharding.describe_mesh(mesh, config.core_axis)}{num_processes}")
    num_params = transformer.num_params(transformer.without_padding(config))
    log.say(
        f"model      {config.weights or config.preset}: {num_params:,} parameters, {config.dtype}, "
        f"{log.flops_per_token / 1e6:,.1f} MFLOP a token (predicted)"
    )
    for number, source in enumerate(corpus.sources):
        tokens = f"{len(source.train):,} training and {len(source.held_out):,} held-out tokens"
        log.say(f"data       {source.name}: {tokens}{shares_of(corpus, number)}")
    if prediction:
        shortfall = prediction.shortfall()
        log.say(
            f"predicted  {prediction.step_s:.3f} s a step, MFU {prediction.mfu:.1%}, bound by {prediction.bound}; "
            f"{prediction.hbm_bytes / GiB:.1f} of {prediction.run.hbm_limit / GiB:.1f} GiB a device"
            + (f", {describe_shortfall(shortfall)}; roofline.py plan finds what fits" if shortfall else "")
        )
        for sentence in cliffs(prediction.run):
            log.say(f"cliff      {sentence}")
    if resumed is not None:
        log.say(
            f"resumed    from step {log.first_step} in {config.checkpoint_dir}" + (f"; {resumed}" if resumed else "")
        )


def shares_of(mixture: data_mixtures.Mixture, source: int) -> str:
    """The shares of a source of several, for the log: `; 70.0%, 20.0% from step 900 on`."""
    if len(mixture.sources) == 1:
        return ""
    stages = [f"{float(share[source]):.1%}" + f" from step {step} on" * bool(step) for step, share in mixture.stages]
    return f"; {', '.join(stages[:SHOWN_STAGES])}" + " ..." * (len(stages) > SHOWN_STAGES)


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def show_sample(setup: Setup, log: Log, state: State) -> None:
    prompt, text = sampling.sample(state.params, setup.corpus.sources[0], setup.tokenizer, setup.config, setup.mesh)
    log.sample(int(state.step), prompt, text)


def summarise(log: Log, state: State, setup: Setup, eval_loss: float | None, prediction: Prediction | None) -> dict:
    """Prints the results of the run, and returns them as numbers."""
    config, corpus, figures = setup.config, setup.corpus, log.summary()
    if prediction:
        figures["predicted_step_s"] = prediction.step_s
        log.say(f"predicted  {prediction.step_s:.3f} s: measured is {figures['step_s'] / prediction.step_s:.2f} of it")
    if eval_loss is not None:
        evaluated = evaluation.by_source(corpus, config)
        counts = {source.name: evaluation.num_evaluated(source, its) for source, its in evaluated}
        bigram_loss = partial(data.bigram_loss, seq_len=config.seq_len)
        bigrams = {part.name: bigram_loss(part, num_eval_sequences=counts[part.name]) for part, _ in evaluated}
        bigram = evaluation.mean_over(bigrams, evaluated)
        figures |= {"eval_loss": eval_loss, "bigram_loss": bigram}
        sequences = sum(data.num_sequences(source.held_out, config.seq_len) for source in corpus.sources)
        log.say(
            f"held-out   loss {eval_loss:.4f} nats a token; a bigram model's {bigram:.4f} "
            f"({sum(counts.values()):,} of {sequences:,} held-out sequences)"
        )
        sizes = [evaluation.num_bytes(source, setup.tokenizer, its) for source, its in evaluated]
        if None not in sizes and (num_bytes := sum(sizes)):
            num_tokens = sum(counts.values()) * config.seq_len
            bits = evaluation.bits_a_byte(eval_loss * num_tokens, num_bytes)
            figures["bits_a_byte"] = bits
            log.say(f"text       {bits:.4f} bits a byte, {num_bytes / num_tokens:.3f} bytes a token")
    if config.sample:
        show_sample(setup, log, state)
    log.say(f"in all     {time.perf_counter() - setup.begun:.1f} s")
    return figures


def main() -> None:
    try:
        run(CONFIG, BEGUN)
    except jax.errors.JaxRuntimeError as error:
        if not processes.is_lost_peer(error):
            raise
        print(error, f"train.py: error: {processes.LOST_PEER}", sep="\n", file=sys.stderr, flush=True)
        os._exit(1)  # jax.distributed would wait for the lost one before an ordinary exit
    except (
        corpora.DamagedError
    ) as error:  # only this process may see it, and an ordinary exit would wait for the others
        if jax.process_count() == 1:
            raise
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    command.run(main)
