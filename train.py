"""Train a language model on a mesh of TPU7x chips, or of simulated devices.

    python train.py                                              a small model on real text, 8 simulated devices
    python train.py --mesh=data:2,fsdp:2,tensor:2 --steps=50     another mesh
    python train.py --preset=llama3.1-8b --corpus=corpus.bin --checkpoint_dir=gs://...    a TPU slice

Top to bottom: the state, the step, and the run that repeats it. The parts stand in files of their own: config.py
(every flag), data.py (batches), model.py (the loss of one device), fsdp.py and sharding.py (who holds what, and when it
moves), processes.py, checkpoint.py and log.py.
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import compiler_flags
import config as config_lib
from config import Config

if __name__ == "__main__":  # before jax is imported: a wrong flag and --help answer at once
    CONFIG = config_lib.parse_flags(sys.argv[1:], prog="train.py", description=__doc__)
    try:
        compiler_flags.set_init_args(compiler_flags.of(CONFIG))
    except ValueError as error:
        sys.exit(f"train.py: error: {error}")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint
import data
import fsdp
import model
import placement
import processes
import remat
import sharding
from log import Log, Profile
from sharding import BATCH_SPEC, LOSS_AXES
from step import GiB, Prediction, predict
from workload import run_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a step changes."""

    step: jax.Array  # int32: steps done, and so the number of the next batch
    params: model.Params
    opt_state: optax.OptState
    skipped: jax.Array  # int32: steps whose gradients were not finite
    skipped_in_a_row: jax.Array  # int32: of them, those since the last good one


# -- the step


def make_optimizer(config: Config) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optax chain, and the learning rate by the number of updates done."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=int(config.warmup_ratio * config.steps),
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_lr_ratio,
    )
    learning_rate = lambda count: schedule(count + 1)  # so that the first update is not lost to a rate of 0
    decay, matrices = config.weight_decay, model.is_matrix(config)
    if config.optimizer == "adamw":
        beta1, beta2, mu_dtype = config.beta1, config.beta2, config.mu_dtype
        update = optax.adamw(learning_rate, beta1, beta2, weight_decay=decay, mask=matrices, mu_dtype=mu_dtype)
    elif config.optimizer == "adafactor":
        # Its decay is not multiplied by the learning rate as adamw's is, so it is here.
        decay_now = (lambda count: decay * learning_rate(count)) if decay else None
        update = optax.adafactor(learning_rate, weight_decay_rate=decay_now, weight_decay_mask=matrices)
    else:
        update = optax.sgd(learning_rate, momentum=config.beta1)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, update), learning_rate


def init_state(key: jax.Array, config: Config) -> State:
    params = model.init_params(config, key)
    zero = jnp.int32(0)
    return State(zero, params, make_optimizer(config)[0].init(params), zero, zero)


def state_shardings(config: Config, mesh: Mesh) -> State:
    """The layout of the state. An optimizer slot lies as the parameter whose shape it has; all else is replicated.

    All else is counts, and the sums over rows and columns that adafactor keeps in place of second moments.
    """
    shapes = jax.eval_shape(partial(init_state, config=config), jax.random.key(0))
    spec_of = {}  # by the end of a slot's path in the tree: ".layers.w_q"
    for (path, shape), spec in zip(
        jax.tree.leaves_with_path(shapes.params), jax.tree.leaves(model.param_specs(config)), strict=True
    ):
        spec_of[jax.tree_util.keystr(path)] = (shape.shape, spec)

    def layout(path, leaf):
        name = jax.tree_util.keystr(path)
        found = (spec for end, (shape, spec) in spec_of.items() if name.endswith(end) and leaf.shape == shape)
        return NamedSharding(mesh, next(found, P()))

    return jax.tree.map_with_path(layout, shapes)


def loss_and_grads(params: model.Params, batch: data.Batch, config: Config):
    """Loss, and its gradients laid out as the parameters. Per-device code, under the one shard_map of the step."""
    specs = model.param_specs(config)
    num_targets = lax.psum(jnp.sum(batch.loss_weights), sharding.axes_of(BATCH_SPEC))
    batch = batch._replace(loss_weights=batch.loss_weights / num_targets)  # so that sums of losses are their mean
    weights = fsdp.whole_over_data(params, specs, config.dtype, config.collectives)
    value_and_grad = jax.value_and_grad(partial(model.loss_fn, config=config))
    if config.microbatches == 1:
        loss, grads = value_and_grad(weights, batch)
    else:

        def accumulate(total, microbatch):
            loss, grads = value_and_grad(weights, microbatch)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), weights)
        grads, losses = lax.scan(accumulate, zeros, split(batch, config.microbatches))
        loss = jnp.sum(losses)
    return lax.psum(loss, LOSS_AXES), fsdp.sum_gradients(grads, specs, config.collectives)


def split(batch: data.Batch, microbatches: int) -> data.Batch:
    """[b, t] -> [microbatches, b/microbatches, t]"""
    return jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)


def train_step(state: State, batch: data.Batch, *, config: Config, mesh: Mesh) -> tuple[State, dict[str, jax.Array]]:
    """One step: gradients in per-device code, then the update, left to the partitioner: but for norms, elementwise."""
    optimizer, learning_rate = make_optimizer(config)
    specs = model.param_specs(config)
    per_device = partial(loss_and_grads, config=config)
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=(P(), specs))
    loss, grads = sharded(state.params, batch)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    keep_old = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    new_state = State(
        step=state.step + 1,
        params=keep_old(params, state.params),
        opt_state=keep_old(opt_state, state.opt_state),
        skipped=state.skipped + ~finite,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
    )
    metrics = {
        "step": new_state.step,
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate(state.step - state.skipped),
        "skipped": new_state.skipped,
        "skipped_in_a_row": new_state.skipped_in_a_row,
    }
    return new_state, metrics


def make_train_step(config: Config, mesh: Mesh):
    """The step, jitted: donates the state and returns it in the same layout."""
    shardings = state_shardings(config, mesh)
    step = partial(train_step, config=config, mesh=mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))


def make_eval_step(config: Config, mesh: Mesh):
    """jitted (params, batch) -> (sum of the cross-entropies of all targets, number of targets)."""
    specs = model.param_specs(config)
    config = dataclasses.replace(config, z_loss=0.0)

    def per_device(params, batch):
        weights = fsdp.whole_over_data(params, specs, config.dtype, config.collectives)
        one = lambda _, microbatch: (None, model.loss_fn(weights, microbatch, config))
        loss = jnp.sum(lax.scan(one, None, split(batch, config.microbatches))[1])
        return lax.psum(loss, LOSS_AXES), lax.psum(jnp.sum(batch.loss_weights), sharding.axes_of(BATCH_SPEC))

    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=(P(), P())))


def make_sampler(config: Config, mesh: Mesh, vocab_size: int):
    """jitted (params, prompt_BT, length, key) -> [B, config.sample] drawn by the model after the first `length` tokens.

    Only tokens under `vocab_size`, the corpus's, are drawn. No cache of keys and values: each token is a forward pass
    over the whole sequence, whose beginning drops out when it is full. It is there to look at.
    """
    specs = model.param_specs(config)

    def per_device(params, prompt_bt, length, key):
        weights = fsdp.whole_over_data(params, specs, config.dtype, config.collectives)
        t = prompt_bt.shape[1]
        ones_bt = jnp.ones_like(prompt_bt)
        positions_bt = jnp.cumsum(ones_bt, axis=1) - 1

        def extend(carry, number):
            tokens_bt, length = carry
            batch = data.Batch(tokens_bt, tokens_bt, ones_bt, positions_bt, None)
            next_b = model.sample_next(weights, batch, length - 1, jax.random.fold_in(key, number), config, vocab_size)
            tokens_bt = jnp.where(length == t, jnp.roll(tokens_bt, -1, axis=1), tokens_bt)
            length = jnp.minimum(length + 1, t)
            return (lax.dynamic_update_index_in_dim(tokens_bt, next_b, length - 1, 1), length), next_b

        return lax.scan(extend, (prompt_bt, length), jnp.arange(config.sample))[1].T

    in_specs = (specs, P(placement.BATCH_AXES), P(), P())
    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=P(placement.BATCH_AXES)))


# -- the run


def place(make_rows, batch: int, seq_len: int, mesh: Mesh) -> data.Batch:
    """A global batch on the devices; make_rows(rows=slice) is asked only for rows that this process's devices hold."""
    made = {}

    def part(field, index):
        rows, columns = index
        if (rows.start, rows.stop) not in made:
            made[rows.start, rows.stop] = make_rows(rows=rows)
        return made[rows.start, rows.stop][field][:, columns]

    layout = NamedSharding(mesh, BATCH_SPEC)
    arrays = [jax.make_array_from_callback((batch, seq_len), layout, partial(part, i)) for i in range(5)]
    return data.Batch(*arrays)


def evaluate(eval_step, params, corpus: data.Corpus, config: Config, mesh: Mesh) -> float:
    """Mean cross-entropy over the held-out sequences, `eval_batches` batches of them at most."""

    def make_batch(index):
        rows = partial(data.eval_batch, corpus, index, batch=config.batch, seq_len=config.seq_len)
        return place(rows, config.batch, config.seq_len, mesh)

    num_batches = -(-num_evaluated(corpus, config) // config.batch)
    sums = [eval_step(params, batch) for batch in data.ahead(make_batch, range(num_batches))]
    total, count = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
    return total / count


def num_evaluated(corpus: data.Corpus, config: Config) -> int:
    """Held-out sequences in an evaluation."""
    return min(config.eval_batches * config.batch, data.num_sequences(corpus.held_out, config.seq_len))


def sample(params, corpus: data.Corpus, config: Config, mesh: Mesh) -> tuple[str, str]:
    """(prompt, continuation): the beginning of a held-out document, and `config.sample` tokens of the model's own."""
    length = min(64, max(config.seq_len // 4, 1))
    rows = math.prod(mesh.shape[axis] for axis in placement.BATCH_AXES)  # all the same; the first is shown
    prompt_BT = np.zeros((rows, min(config.seq_len, length + config.sample)), np.int32)
    prompt_BT[:, :length] = corpus.held_out[:length]
    layout = NamedSharding(mesh, P(placement.BATCH_AXES))
    prompt_BT = jax.make_array_from_callback(prompt_BT.shape, layout, lambda index: prompt_BT[index])
    sampler = make_sampler(config, mesh, corpus.vocab_size)
    sampled_BT = sampler(params, prompt_BT, jnp.int32(length), jax.random.key(config.seed))
    text = multihost_utils.process_allgather(sampled_BT, tiled=True)[0]
    show = data.decode if corpus.vocab_size == 256 else lambda tokens: " ".join(map(str, tokens))
    return show(corpus.held_out[:length]), show(text)


def run(config: Config) -> dict[str, float]:
    """The whole run: devices, state, compilation, the loop, the summary. Returns the figures of the summary.

    Raises:
      ValueError: the flags, the corpus, the checkpoint and the devices do not go together.
      FloatingPointError: `max_skipped` steps in a row had gradients that are not finite.
      OSError: a file cannot be read or written.
      SystemExit: SIGTERM came; the state is saved.
    """
    begun = time.perf_counter()
    devices = processes.start(config)
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh), devices, config.core_axis)
    model.check_divides(config, dict(mesh.shape))
    remat.check_host_memory(config, mesh)
    compiler_options = compiler_flags.compiler_options(compiler_flags.of(config))
    backend = mesh.devices.flat[0].platform
    if compiler_options and backend != "tpu":
        raise ValueError(f"xla_flags={config.xla_flags!r} are the TPU compiler's, and these devices are of {backend!r}")
    if config.attention == "flash" and config.remat != "none" and backend != "tpu":
        raise ValueError(
            f"attention=flash is simulated on {backend!r}, where jax.checkpoint cannot run it again for "
            f"remat={config.remat}: --remat=none or --attention=reference"
        )
    corpus = data.open_corpus(config.corpus)
    corpus.check(config.seq_len, config.vocab_size)

    def make_batch(step):
        rows = partial(data.train_batch, corpus, step, batch=config.batch, seq_len=config.seq_len, seed=config.seed)
        return place(rows, config.batch, config.seq_len, mesh)

    with contextlib.ExitStack() as stack:  # what is opened here is closed in any case, the last save waited for
        manager = checkpoint.open_manager(config) if config.checkpoint_dir else None
        stack.callback(checkpoint.close, manager)
        state, resumed = first_state(config, mesh, manager)
        last_step = first_step = int(state.step)
        log = stack.enter_context(contextlib.closing(Log(config, first_step, mesh)))
        prediction = predict_step(config, mesh)
        introduce(log, config, mesh, corpus, resumed, prediction)
        if first_step >= config.steps:
            log.say(f"done       before: all of --steps={config.steps}")
            return {}

        compile_begun = time.perf_counter()
        step_fn = make_train_step(config, mesh).lower(state, make_batch(first_step)).compile(compiler_options or None)
        eval_step, eval_loss = make_eval_step(config, mesh), None
        now = time.perf_counter()
        log.say(f"compiled   in {now - compile_begun:.1f} s; {now - begun:.1f} s since the start of the run")

        profile, stopped = Profile(config, log), False
        terminated = stack.enter_context(processes.notice_of_termination())
        batches = stack.enter_context(contextlib.closing(data.ahead(make_batch, range(first_step, config.steps))))
        log.start_clock()
        for batch in log.waiting_for(batches):
            last_step += 1
            profile.before(last_step)
            state, metrics = step_fn(state, batch)
            log.step(metrics)  # shows the step before, while this one runs
            stopped = terminated(last_step)
            at_end = stopped or last_step == config.steps
            profile.after(last_step, at_end)
            evaluates = config.eval_batches and not stopped and (at_end or _is_due(last_step, config.eval_every))
            saves = manager and (at_end or _is_due(last_step, config.save_every))
            if evaluates or saves or at_end:
                log.finish_step()
            if evaluates:
                eval_loss = evaluate(eval_step, state.params, corpus, config, mesh)
                log.evaluation(last_step, eval_loss)
            if saves:
                checkpoint.save(manager, last_step, state, config)
            if evaluates or saves:
                log.start_clock()
            if stopped:
                break
    if stopped:
        saved = (
            f"saved in {config.checkpoint_dir}: the same command resumes"
            if manager
            else "not saved: no --checkpoint_dir"
        )
        log.say(f"terminated after step {last_step}, {saved}")
        raise SystemExit(128 + signal.SIGTERM)
    return summarise(log, state, corpus, config, mesh, eval_loss, prediction, begun)


def first_state(config: Config, mesh: Mesh, manager) -> tuple[State, str | None]:
    """The newest checkpoint's state, with a note of what now differs; else the seed's, drawn in shards."""
    shardings = state_shardings(config, mesh)
    init = jax.jit(partial(init_state, config=config), out_shardings=shardings)
    key = jax.random.key(config.seed)
    restored, differs = checkpoint.restore(manager, jax.eval_shape(init, key), shardings, config)
    return (init(key), None) if restored is None else (restored, differs)


def predict_step(config: Config, mesh: Mesh) -> Prediction | None:
    """What roofline.py predicts of the step on these devices; None for chips, or a mesh, that it cannot tell of."""
    found = sharding.slice_of(mesh.devices)
    if found is None:
        return None
    chip, topology, num_slices = found
    filled = ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items())
    try:
        return predict(run_of(dataclasses.replace(config, mesh=filled), chip, topology, num_slices=num_slices))
    except ValueError:  # a mesh that runs, laid over the torus in a way that has no name in placement.py
        return None


def introduce(
    log: Log, config: Config, mesh: Mesh, corpus: data.Corpus, resumed: str | None, prediction: Prediction | None
) -> None:
    """Says what is about to run."""
    num_processes = f"; {jax.process_count()} processes" if jax.process_count() > 1 else ""
    log.say(f"mesh       {sharding.describe_mesh(mesh, config.core_axis)}{num_processes}")
    log.say(
        f"model      {config.preset}: {model.num_params(config):,} parameters, {config.dtype}, "
        f"{log.flops_per_token / 1e6:,.1f} MFLOP a token (predicted)"
    )
    log.say(f"data       {corpus.name}: {len(corpus.train):,} training and {len(corpus.held_out):,} held-out tokens")
    if prediction:
        log.say(
            f"predicted  {prediction.step_s:.3f} s a step, MFU {prediction.mfu:.1%}, bound by {prediction.bound}; "
            f"{prediction.hbm_bytes / GiB:.1f} of {prediction.of.hbm_limit / GiB:.1f} GiB a device"
            + ("" if prediction.fits else ": it will hardly fit; roofline.py plan finds what does")
        )
    if resumed is not None:
        log.say(
            f"resumed    from step {log.first_step} in {config.checkpoint_dir}" + (f"; {resumed}" if resumed else "")
        )


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def summarise(
    log: Log, state: State, corpus: data.Corpus, config: Config, mesh: Mesh, eval_loss, prediction, begun
) -> dict:
    """Prints what came out of the run, and returns it as numbers."""
    figures = log.summary()
    if prediction:
        figures["predicted_step_s"] = prediction.step_s
        log.say(f"predicted  {prediction.step_s:.3f} s: measured is {figures['step_s'] / prediction.step_s:.2f} of it")
    if eval_loss is not None:
        sequences = num_evaluated(corpus, config)
        bigram = data.bigram_loss(corpus, seq_len=config.seq_len, num_eval_sequences=sequences)
        figures |= {"eval_loss": eval_loss, "bigram_loss": bigram}
        log.say(
            f"held-out   loss {eval_loss:.4f} nats a token; a bigram model's {bigram:.4f} "
            f"({sequences:,} of {data.num_sequences(corpus.held_out, config.seq_len):,} held-out sequences)"
        )
    if config.sample:
        prompt, text = sample(state.params, corpus, config, mesh)
        log.say(
            f"sample     of the model after a held-out prompt:\n{prompt}\033[1m{text}\033[0m"
            if log.terminal
            else f"sample     of the model after a held-out prompt, after >>>:\n{prompt}>>>{text}"
        )
    log.say(f"in all     {time.perf_counter() - begun:.1f} s")
    return figures


def _is_for_the_user(error: Exception) -> bool:
    """Whether this project raised it, to be read; any other error is a defect, and its traceback is wanted."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(frame.filename).resolve().parent == Path(__file__).resolve().parent and frame.line.startswith("raise")
    return ours or isinstance(error, OSError)


if __name__ == "__main__":
    try:
        run(CONFIG)
    except (ValueError, FloatingPointError, OSError) as error:
        if not _is_for_the_user(error):
            raise
        sys.exit(f"train.py: error: {error}")
    except jax.errors.JaxRuntimeError as error:
        if not processes.is_lost_peer(error):
            raise
        print(error, f"train.py: error: {processes.LOST_PEER}", sep="\n", file=sys.stderr, flush=True)
        os._exit(1)  # jax.distributed would wait for the lost one before an ordinary exit
