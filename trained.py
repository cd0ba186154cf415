"""A trained model, for the programs that use one: from a checkpoint of train.py, or from published weights.

**Idea.** A checkpoint stores the flags of its run, and published weights have a config.json. So a program needs the
folder alone, and a mesh: its own, whatever mesh the model was trained on. Of a checkpoint only the parameters are read,
straight into the shards of the mesh. The folder is not locked, so a run that still trains may go on saving there.

**Left out.** Several processes, except on the hosts of one TPU slice. FP8: the model computes in `--dtype`.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding

import checkpoint
import command
import compiler_flags
import config as config_lib
import families
import parameters
import placement
import processes
import rules
import sharding
import tokenization
import weights
from config import Config

MAX_SEQ_LEN = 8192  # of published weights whose config.json has no max_position_embeddings


@dataclass(frozen=True)
class Trained:
    """A trained model and the devices for it. `read(config, mesh)` returns its parameters, in float32."""

    name: str
    config: Config
    mesh: Mesh
    read: Callable[[Config, Mesh], parameters.Params]
    corpus: str  # that it was trained on, if the checkpoint says so
    open_tokenizer: Callable[[], tokenization.Tokenizer | None]  # of its folder

    @functools.cached_property
    def tokenizer(self) -> tokenization.Tokenizer | tokenization.ByteTokenizer | None:
        """The tokenizer in the model's folder; without one bytes, for a vocabulary of 256, or None.

        Raises ValueError where it cannot be read: the file is damaged, or the library `tokenizers` is missing.
        """
        in_bytes = self.config.vocab_size == tokenization.BYTES.vocab_size
        return self.open_tokenizer() or (tokenization.BYTES if in_bytes else None)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the flags of `opened`."""
    group = parser.add_argument_group("model")
    group.add_argument("--checkpoint_dir", metavar="DIR", help="the newest checkpoint that train.py has saved in here")
    group.add_argument("--weights", type=command.path, metavar="DIR", help="a folder of published weights (weights.py)")
    group.add_argument("--dtype", choices=config_lib.FLOATS.split(), help="of the computation [the run's; bfloat16]")
    group.add_argument("--mesh", help="sizes of the mesh axes, as of train.py [fsdp:* on TPUs, else one device]")
    group.add_argument("--seq_len", type=command.size, metavar="INT", help="tokens of a sequence, at most [the run's]")


def opened(args: argparse.Namespace, unused_axes: dict[str, str] | None = None) -> Trained:
    """Starts the devices, and reads what the model is. Its config has no FP8 and no microbatches.

    Args:
      unused_axes: {mesh axis that the program cannot use: what to use instead}.

    Raises:
      ValueError: neither or both of --checkpoint_dir and --weights are given; the mesh, or the model on it, cannot be.
      OSError: the folder has no model, or it cannot be read.
    """
    if bool(args.checkpoint_dir) == bool(args.weights):
        raise ValueError("give one model: --checkpoint_dir=DIR of a run of train.py, or --weights=DIR")
    text = args.mesh if args.mesh is not None else "fsdp:*" if compiler_flags.has_tpu() else ""
    for axis, instead in (unused_axes or {}).items():
        if placement.parse_mesh(text)[axis] != 1:
            raise ValueError(f"mesh={text}: {command.program()} has no use for the axis {axis}; {instead}")
    devices = processes.start(Config(mesh=text))
    mesh = sharding.make_mesh(placement.parse_mesh(text), devices)
    values = dict(
        fp8="none", remat="none", attention="auto", mesh=text, core_axis="", xla_flags="none", weights="", corpus=""
    )
    if args.checkpoint_dir:
        path, saved = checkpoint.newest(args.checkpoint_dir)
        config, name = _config_of(saved), str(path)
        read, open_tokenizer = partial(_restored, path), partial(checkpoint.open_tokenizer, args.checkpoint_dir)
    else:
        config, saved, name = _published(args.weights), {}, args.weights
        read, open_tokenizer = partial(weights.load, args.weights), partial(_published_tokenizer, args.weights)
    values |= {flag: value for flag in ("seq_len", "dtype") if (value := getattr(args, flag))}
    if mesh.shape["pipe"] == 1:
        values |= dict(microbatches=1, pipeline_schedule="1f1b", pipeline_rounds=1, remat_stage=False)
    config = rules.settled(config_lib.changed(config, **values), dict(mesh.shape))
    return Trained(name, config, mesh, read, saved.get("corpus", ""), open_tokenizer)


def _config_of(saved: dict) -> Config:
    """The Config of a checkpoint, without what concerns only the run that saved it."""
    names = {name for what in ("shapes", "values", "program") for name in config_lib.deciding(what)} & saved.keys()
    return Config(**{name: saved[name] for name in names})


def _published(directory: str) -> Config:
    """The Config of published weights."""
    values = families.read_model(directory)
    seq_len = values.get("max_position_embeddings", MAX_SEQ_LEN)
    return Config(**weights.settings(directory), seq_len=seq_len, dtype="bfloat16")


def _published_tokenizer(directory: str) -> tokenization.Tokenizer | None:
    """The tokenizer of published weights; None where their folder has none."""
    has_one = families.Path(directory, "tokenizer.json").exists()
    return tokenization.open_tokenizer(directory, tokenization.NO_NEED) if has_one else None


def _restored(path, config: Config, mesh: Mesh) -> parameters.Params:
    shardings = jax.tree.map(partial(NamedSharding, mesh), parameters.param_specs(config))
    return checkpoint.restore_params(path, parameters.param_shapes(config), shardings)
