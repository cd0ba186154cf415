"""Save and restore the training state with orbax: sharded, asynchronous, atomic. The [checkpoint] extra.

Every process writes the shards that its devices hold, on a thread, into a folder that gets its final name only when all
of it is there; so a run that is killed in the middle of a save finds the one before. An array is restored straight into
the shards that the new run asks for, whatever mesh it was saved from. What stands beside it is the configuration that
made it: the batches are a pure function of the step, so there is no iterator to save.
"""

import dataclasses
from pathlib import Path

import jax

from config import Config

# What decides the shapes in a checkpoint. A run with another value cannot read it.
SHAPE_FIELDS = (
    "vocab_size num_layers model_dim ff_dim num_heads num_kv_heads head_dim "
    "qk_norm qkv_bias tied_embeddings optimizer mu_dtype"
).split()
# What decides the values from here on. A run with another value goes on, otherwise than the first would have.
COURSE_FIELDS = (
    "seed batch seq_len steps corpus window global_every rope_theta rope_scaling rope_original_len "
    "logit_soft_cap z_loss norm_eps dtype learning_rate warmup_steps final_lr_ratio beta1 beta2 weight_decay clip_norm"
).split()


def _orbax():
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ValueError(
            "--checkpoint_dir needs orbax-checkpoint, which is not installed: pip install -e '.[checkpoint]'"
        ) from None
    return ocp


def open_manager(config: Config):
    """The orbax CheckpointManager of `config.checkpoint_dir`, made where there is none.

    Raises:
      ValueError: orbax is missing, or the newest checkpoint is of another model, with the fields that differ.
    """
    ocp = _orbax()
    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep_checkpoints, create=True)
    manager = ocp.CheckpointManager(Path(config.checkpoint_dir).expanduser().absolute(), options=options)
    if (step := manager.latest_step()) is not None:
        differing = _differing(_saved_config(manager, step), config, SHAPE_FIELDS)
        if differing:
            manager.close()
            raise ValueError(
                f"the checkpoint of step {step} in {config.checkpoint_dir} is of another model: {differing}; "
                "give these flags the values of the checkpoint, or another --checkpoint_dir"
            )
    return manager


def save(manager, step: int, state, config: Config) -> None:
    """Starts to save the state reached after `step` steps; returns when it is copied from the devices."""
    if manager.latest_step() == step:
        return
    ocp = _orbax()
    parts = ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(dataclasses.asdict(config)))
    manager.save(step, args=parts, force=True)


def restore(manager, shapes, shardings, config: Config):
    """(state, note) of the newest checkpoint in the given shards; (None, "") where there is none.

    `note` names the fields that do not keep the state from loading and yet make the run go on otherwise.
    """
    step = manager.latest_step() if manager else None
    if step is None:
        return None, ""
    ocp = _orbax()
    target = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
    return state, _differing(_saved_config(manager, step), config, COURSE_FIELDS)


def close(manager) -> None:
    """Waits until what was saved is there."""
    if manager:
        manager.wait_until_finished()
        manager.close()


def _saved_config(manager, step: int) -> dict:
    ocp = _orbax()
    return manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]


def _differing(saved: dict, config: Config, fields) -> str:
    ours = dataclasses.asdict(config)
    return ", ".join(
        f"{name} is {saved.get(name)!r} there and {ours[name]!r} here"
        for name in fields
        if saved.get(name) != ours[name]
    )
