"""Evaluation: the mean cross-entropy of held-out sequences, with the training step's forward pass on its mesh.

    python evaluation.py --checkpoint_dir=runs/a
    python evaluation.py --weights=DIR --corpus=corpus --documents=all --mesh=fsdp:8 --batch=8 --seq_len=4096

**Formula.** loss = mean over targets of -log p(target | tokens before it), in nats a token; perplexity = exp(loss). A
sequence sees only its own tokens, so its first targets have little context: a larger `--seq_len` lowers the loss.
Tokenizers are compared by bits a byte: the sum of the losses / ln 2 / bytes of the targets' text, in UTF-8. Separators
and other special tokens have a loss and no bytes.

**Left out.** FP8: the program computes in `--dtype`, while train.py evaluates as it trains. Windows that overlap.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import command
import corpora
import data
import data_mixtures
import fsdp
import model
import parameters
import placement
import rules
import sharding
import trained
from config import Config
from sharding import BATCH_SPEC, LOSS_AXES


def make_eval_step(config: Config, mesh: Mesh):
    """Returns jitted (params, batch, amax) -> (sum of the cross-entropies of all targets, number of targets)."""
    specs = parameters.param_specs(config)
    config = dataclasses.replace(config, z_loss=0.0, load_balance_loss=0.0, router_z_loss=0.0, mtp_loss=0.0)

    def per_device(params, batch, amax):
        weights = fsdp.gather_over_data(params, specs, parameters.compute_dtypes(config), config.collectives)
        scaling = parameters.Scaling(lax.pcast(amax, placement.MESH_AXES, to="varying"))
        microbatches = config.microbatches if lax.axis_size("pipe") == 1 else 1  # a pipeline splits the batch itself
        loss_of = lambda _, microbatch: (None, model.loss_fn(weights, microbatch, config, scaling)[0])
        loss = jnp.sum(lax.scan(loss_of, None, model.split(batch, microbatches))[1])
        return lax.psum(loss, LOSS_AXES), lax.psum(jnp.sum(batch.loss_weights), sharding.axes_of(BATCH_SPEC))

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(specs, BATCH_SPEC, P()), out_specs=(P(), P()))
    return jax.jit(lambda params, batch, amax=None: sharded(params, batch, amax or {}))


def evaluate(eval_step, params, corpus: corpora.Corpus, config: Config, mesh: Mesh, amax: dict | None = None) -> float:
    """Mean cross-entropy over the held-out sequences, at most `eval_batches` batches of them."""
    total, count = totals(eval_step, params, corpus, config, mesh, amax)
    return total / count


def totals(
    eval_step, params, corpus: corpora.Corpus, config: Config, mesh: Mesh, amax: dict | None = None, report=lambda n: 0
) -> np.ndarray:
    """[sum of the cross-entropies, number of targets] of `evaluate`. Calls report(n) when n batches have begun."""
    order = parameters.position_order(config, config.seq_len, mesh.shape["context"])

    def make_batch(index):
        rows = partial(data.eval_batch, corpus, index, batch=config.batch, seq_len=config.seq_len)
        return sharding.place(data.Batch, rows, config.batch, order, mesh)

    num_batches = -(-num_evaluated(corpus, config) // config.batch)
    sums, previous = np.zeros(2), (0.0, 0.0)  # of (cross-entropies, targets)
    for number, batch in enumerate(data.prefetch(make_batch, range(num_batches)), 1):
        running = eval_step(params, batch, amax)
        report(number)
        sums += jax.device_get(previous)  # at most two batches are in flight: simulated devices deadlock at 128
        previous = running
    return sums + jax.device_get(previous)


def num_evaluated(corpus: corpora.Corpus, config: Config) -> int:
    """Number of held-out sequences in an evaluation."""
    return min(config.eval_batches * config.batch, data.num_sequences(corpus.held_out, config.seq_len))


def num_bytes(corpus: corpora.Corpus, tokenizer, config: Config) -> int | None:
    """Bytes of the text of all targets of an evaluation; None where the tokenizer (or None) does not know them.

    Reads all evaluated sequences again, whatever the process.
    """
    if tokenizer is None or tokenizer.num_bytes(np.zeros(0, np.int32)) is None:
        return None
    count = num_evaluated(corpus, config)
    windows = data.eval_windows(corpus, seq_len=config.seq_len, num_eval_sequences=count)
    return sum(tokenizer.num_bytes(window[1:]) for window in windows)


def bits_a_byte(total_loss: float, num_bytes: int | None) -> float | None:
    """Bits a byte of text, of a sum of losses in nats; None without bytes."""
    return total_loss / math.log(2) / num_bytes if num_bytes else None


def by_source(mixture: data_mixtures.Mixture, config: Config) -> list[tuple[corpora.Corpus, Config]]:
    """The sources to evaluate on, with the batches of each: equally many, as far as they have so many."""
    left = [-(-data.num_sequences(source.held_out, config.seq_len) // config.batch) for source in mixture.sources]
    given = [0] * len(left)
    for _ in range(min(config.eval_batches, sum(left))):
        source = min((i for i in range(len(left)) if given[i] < left[i]), key=given.__getitem__)
        given[source] += 1
    configs = [dataclasses.replace(config, eval_batches=batches) for batches in given]
    return [(source, its) for source, its in zip(mixture.sources, configs, strict=True) if its.eval_batches]


def mean_over(values: dict[str, float], evaluated: list[tuple[corpora.Corpus, Config]]) -> float:
    """The mean over all evaluated sequences of a value that each source has: {name: value}."""
    if len(evaluated) == 1:
        return values[evaluated[0][0].name]
    counts = {corpus.name: num_evaluated(corpus, config) for corpus, config in evaluated}
    return sum(values[name] * count for name, count in counts.items()) / sum(counts.values())


# -- the program


def streams_of(corpus: corpora.Corpus, documents: str) -> list[corpora.Corpus]:
    """Corpora whose held-out parts are the documents to evaluate on: held_out, train or all."""
    training = dataclasses.replace(corpus, held_out=corpus.train)
    return {"held_out": [corpus], "train": [training], "all": [training, corpus]}[documents]


def losses_by_name(parts: list[corpora.Corpus], results: list[np.ndarray]) -> dict[str, float]:
    """{name of a corpus: its mean loss}, of the `totals` of parts, of which several may be of one corpus."""
    sums: dict[str, np.ndarray] = {}
    for part, result in zip(parts, results, strict=True):
        sums[part.name] = sums.get(part.name, 0) + result
    return {name: float(total / count) for name, (total, count) in sums.items()}


def reporter(num_batches: int, every_s: float = 10.0) -> Callable[[int], None]:
    """Returns a function of the number of batches done, which prints it every so many seconds."""
    said = time.perf_counter()

    def report(number: int) -> None:
        nonlocal said
        if time.perf_counter() - said > every_s and jax.process_index() == 0:
            said = time.perf_counter()
            print(f"evaluation: batch {number:,} of {num_batches:,}", file=sys.stderr, flush=True)

    return report


def main() -> None:
    parser = command.parser(__file__, usage="%(prog)s --checkpoint_dir=DIR [--flag=value ...]")
    trained.add_flags(parser)
    add = parser.add_argument_group("text").add_argument
    add("--corpus", metavar="CORPUS", help="as of train.py [the run's, else the standard library]")
    add("--documents", choices=("held_out", "train", "all"), default="held_out", help="of the corpus [%(default)s]")
    add("--batch", type=command.size, metavar="INT", help="sequences in a batch [the run's; 16]")
    add(
        "--eval_batches",
        type=command.at_least(0),
        default=0,
        metavar="INT",
        help="of a corpus, at most; 0 is all [%(default)s]",
    )
    add("--json", action="store_true", help="print one JSON object")
    args = command.arguments(parser)
    model = trained.opened(args)
    config = dataclasses.replace(model.config, batch=args.batch or model.config.batch, batch_rampup="")
    rules.check(config, dict(model.mesh.shape))
    corpus = data_mixtures.open_mixture(model.corpus if args.corpus is None else args.corpus)
    parts = [part for source in corpus.sources for part in streams_of(source, args.documents)]
    for each in parts:
        each.check(config.seq_len, config.vocab_size)
    sequences = [data.num_sequences(each.held_out, config.seq_len) for each in parts]
    most = args.eval_batches or -(-max(sequences) // config.batch)
    config = dataclasses.replace(config, eval_batches=most)
    counts = [num_evaluated(each, config) for each in parts]
    report = reporter(sum(-(-count // config.batch) for count in counts))
    params = model.read(config, model.mesh)
    tokenizer, problem = corpora.readable_tokenizer(corpus.sources[0])
    notes = corpora.notes(corpus.sources[0], config.vocab_size, args.weights or args.checkpoint_dir)
    for note in filter(None, [problem, *notes] if jax.process_index() == 0 else []):
        print(f"note       {note}", file=sys.stderr)
    eval_step, begun = make_eval_step(config, model.mesh), time.perf_counter()
    evaluated = partial(totals, eval_step, params, config=config, mesh=model.mesh, report=report)
    results = list(map(evaluated, parts))
    total, count = sum(results)
    loss = total / count
    if jax.process_index():
        return
    figures = {"model": model.name, "corpus": corpus.name, "loss": loss, "perplexity": math.exp(loss)}
    figures |= {"tokens": int(count), "sequences": sum(counts), "seconds": time.perf_counter() - begun}
    sizes = [num_bytes(each, tokenizer, config) for each in parts]
    figures["bits_a_byte"] = bits = None if None in sizes else bits_a_byte(total, sum(sizes))
    figures["loss_by_source"] = by_name = losses_by_name(parts, results)
    if args.json:
        print(json.dumps(figures))
        return
    print(f"model      {model.name}, {config.dtype}")
    print(f"data       {corpus.name}, {args.documents}: {sum(counts):,} of {sum(sequences):,} sequences")
    print(f"loss       {loss:.4f} nats a token, perplexity {figures['perplexity']:.3f}, over {int(count):,} tokens")
    for name, loss in by_name.items() if len(by_name) > 1 else ():
        print(f"           {loss:.4f} of {name}")
    if bits is not None:
        print(f"text       {bits:.4f} bits a byte, {sum(sizes) / count:.3f} bytes a token")


if __name__ == "__main__":
    command.run(main)
