"""Save and restore the training state with orbax: sharded, asynchronous, atomic. The [checkpoint] extra.

Every process writes the shards that its devices hold, on a thread, into a folder that gets its final name only when all
of it is there; so a run that is killed in the middle of a save finds the one before. An array is restored straight into
the shards that the new run asks for, whatever mesh it was saved from. What stands beside it is the configuration that
made it: the batches are a pure function of the step, so there is no iterator to save.

All processes must see the same `--checkpoint_dir`: a shared file system, or a bucket (gs://...).
"""

import contextlib
import dataclasses
import functools
import logging
import sys
from pathlib import Path

import jax

from config import Config

# What decides the shapes in a checkpoint. A run with another value cannot read it.
SHAPE_FIELDS = (
    "vocab_size num_layers model_dim ff_dim num_heads num_kv_heads head_dim "
    "qk_norm qkv_bias output_bias attention_sinks tied_embeddings "
    "num_experts expert_dim num_shared_experts num_dense_layers expert_bias selection_bias "
    "kv_lora_rank q_lora_rank rope_head_dim value_head_dim optimizer mu_dtype"
).split()
# What decides the values from here on. A run with another value goes on, otherwise than the first would have.
COURSE_FIELDS = (
    "seed batch seq_len steps corpus window global_every experts_per_token rope_theta rope_scaling rope_original_len "
    "max_logit logit_soft_cap z_loss norm_eps dtype learning_rate warmup_ratio final_lr_ratio beta1 beta2 weight_decay "
    "clip_norm swiglu_limit router_scores renormalise router_groups router_groups_kept router_scale load_balance_loss "
    "router_z_loss selection_bias_rate moe_impl buffer_factor moe_parts capacity_factor "
    "fp8 fp8_granularity fp8_block fp8_rounding fp8_gradients fp8_modules "
    "fp8_skip_layers fp8_scales"
).split()


def _orbax():
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ValueError(
            "--checkpoint_dir needs orbax-checkpoint, which is not installed: pip install -e '.[checkpoint]'"
        ) from None
    return ocp


@functools.cache  # once a process
def _let_one_error_speak() -> None:
    """Keeps the error that is raised when an array cannot be read or written from drowning in hundreds of lines.

    Orbax logs it with its traceback on every thread that it passes, and closes its event loop on the arrays that are
    still under way, of which asyncio and tensorstore then report each one.
    """

    def without_traceback(record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True

    logging.getLogger("absl").addFilter(without_traceback)
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    report = sys.unraisablehook
    sys.unraisablehook = lambda event: str(event.exc_value) == "Event loop is closed" or report(event)


def open_manager(config: Config):
    """The orbax CheckpointManager of `config.checkpoint_dir`, made where there is none.

    What a killed run left half written is removed, so only one run at a time may save there.

    Raises:
      ValueError: orbax is missing.
      OSError: the folder cannot be made.
    """
    ocp = _orbax()
    _let_one_error_speak()
    path = config.checkpoint_dir
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(config.keep_checkpoints), cleanup_tmp_directories=True
    )
    manager = ocp.CheckpointManager(path if "://" in path else Path(path).absolute(), options=options)
    if not manager.directory.is_dir():
        raise NotADirectoryError(f"--checkpoint_dir={path} is a file")
    # It would ask jax.distributed about termination with the step of a save that ends, on a thread; the answer depends
    # on every process asking with the step it is at, as the training loop does.
    manager.reached_preemption = lambda step: False
    return manager


def save(manager, step: int, state, config: Config, contents: dict[str, str] | None = None) -> None:
    """Starts to save the state reached after `step` steps; returns when it is copied from the devices.

    `contents` has an identity of the content of each file that the run reads, by its flag.

    Raises OSError where the save before this one could not be finished.
    """
    ocp = _orbax()
    made_by = dataclasses.asdict(config) | {"contents": contents or {}}
    parts = ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(made_by))
    with _writable(manager):
        manager.save(step, args=parts, force=True)


def restore(manager, shapes, shardings, config: Config, contents: dict[str, str] | None = None):
    """(state, note) of the newest checkpoint, of which there must be one, in the given shards.

    `note` names the fields that do not keep the state from loading and yet make the run go on otherwise.

    Raises:
      ValueError: the checkpoint is of another model (with the fields that differ), damaged, or not of this program; a
        file that the run reads had another content when it was saved.
    """
    ocp, step = _orbax(), manager.latest_step()
    with _readable(manager, step):
        saved = manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
    remembers = {"delayed", "calibrate"} & {config.fp8, saved.get("fp8")}  # in the state: calibration.py
    if differing := _differing(saved, config, SHAPE_FIELDS + ["fp8", "fp8_modules"] * bool(remembers)):
        raise ValueError(
            f"the checkpoint {manager.directory / str(step)} is of another model: {differing}; "
            "give these flags the values of the checkpoint, or another --checkpoint_dir"
        )
    same = _same_contents(saved, config, contents or {}, manager.directory / str(step))
    target = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    with _readable(manager, step):
        state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
    return state, _differing(saved, config, [name for name in COURSE_FIELDS if name not in same])


def _same_contents(saved: dict, config: Config, contents: dict[str, str], checkpoint) -> set[str]:
    """The flags whose files have the content that they had, under whatever name.

    Raises ValueError where a file of the same name has another: nothing else would tell.
    """
    before = saved.get("contents", {})  # a checkpoint from before there were any names none
    for flag in before.keys() & contents.keys():
        path = getattr(config, flag)
        if before[flag] != contents[flag] and saved[flag] == path:
            file = f"--{flag}={path}" if path else f"the default of --{flag}"
            raise ValueError(
                f"{file} has another content ({contents[flag]}) than when the checkpoint {checkpoint} was saved "
                f"({before[flag]}): put that one back, give the new one another name to go on with it, or give another "
                "--checkpoint_dir"
            )
    return {flag for flag in before.keys() & contents.keys() if before[flag] == contents[flag]}


def close(manager) -> None:
    """Waits until what was saved is there. Raises OSError where that could not be finished."""
    if manager:
        with _writable(manager):
            manager.close()


@contextlib.contextmanager
def _writable(manager):
    """Says in one line that a checkpoint could not be written."""
    try:
        yield
    except (ValueError, OSError) as error:  # tensorstore's errors are ValueErrors
        raise OSError(f"a checkpoint could not be written to {manager.directory}: {_short(error)}") from error


@contextlib.contextmanager
def _readable(manager, step: int):
    """Says which checkpoint could not be read, and the way out."""
    try:
        yield
    except (ValueError, LookupError, TypeError, OSError) as error:
        before = max((other for other in manager.all_steps() if other != step), default=0)
        raise ValueError(
            f"the checkpoint {manager.directory / str(step)} is damaged, or not of this program "
            f"({_short(error)}); "
            f"give another --checkpoint_dir, or remove it to go on from step {before}"
        ) from error


def _short(error: Exception) -> str:
    line = str(error).partition("\n")[0].partition(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {line if len(line) <= 200 else f'{line[:100]} ... {line[-100:]}'}"


def _differing(saved: dict, config: Config, fields) -> str:
    ours = dataclasses.asdict(config)
    saved = dataclasses.asdict(Config()) | saved  # a field that is younger than the checkpoint had its default
    return ", ".join(
        f"{name} is {saved[name]!r} there and {ours[name]!r} here" for name in fields if saved[name] != ours[name]
    )
