"""Sampling: text that a trained model writes after a prompt.

    python sampling.py --checkpoint_dir=runs/a --prompt="def main(" --tokens=100
    python sampling.py --weights=DIR --prompt_tokens=1,2,3 --temperature=0 --mesh=tensor:8 --json

**Formula.** Tokens are drawn from p = softmax(logits / temperature); 0 takes the largest logit. With top-p (Holtzman et
al. 2020, arXiv:1904.09751) only the nucleus is drawn from: the most probable tokens, as few as have `top_p` of the
probability. A draw inverts the cumulative sum: for u uniform in [0, 1) it is the first token, in order of probability,
at which the sum exceeds u times that of the nucleus. generation.py computes the logits, with a key-value cache.

**Context.** The model sees at most as many tokens as it was trained with. When so many are in the cache, the later half
of them becomes the prompt of a new cache.

**Text.** A model's folder has its tokenizer (tokenization.py), or its tokens are bytes. Without either, the program
takes the numbers of tokens, and prints these. A prompt gets the special tokens that its tokenizer.json adds, such as
one at the beginning.

**Left out.** Tokens that end a text, and what generation.py leaves out.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

import command
import corpora
import generation
import placement
import tokenization
import trained
from config import Config


def draw(logits_bV: jax.Array, u_b: jax.Array, temperature: float, top_p: float, num_tokens: int) -> jax.Array:
    """tokens_b, drawn from the logits with one random number u in [0, 1) each.

    Args:
      temperature: 0 takes the largest logit, whatever u.
      top_p: the probability of the nucleus; 1 draws from all tokens.
      num_tokens: only tokens below it are drawn: a corpus may use only a part of the vocabulary.
    """
    logits_bV = jnp.where(jnp.arange(logits_bV.shape[1]) < num_tokens, logits_bV, -jnp.inf)
    if temperature == 0:
        return jnp.argmax(logits_bV, -1)
    p_bV = jax.nn.softmax(logits_bV / temperature)
    if top_p == 1:
        return _inverted(p_bV, u_b)
    order_bV = jnp.argsort(-p_bV, -1)
    p_bV = jnp.take_along_axis(p_bV, order_bV, 1)
    p_bV = jnp.where(jnp.cumsum(p_bV, -1) - p_bV < top_p, p_bV, 0)
    return jnp.take_along_axis(order_bV, _inverted(p_bV, u_b)[:, None], 1)[:, 0]


def _inverted(p_bV, u_b):
    """The first index of each row at which the cumulative sum of p exceeds u times the sum of all."""
    sum_bV = jnp.cumsum(p_bV, -1)
    return jnp.argmax(sum_bV > u_b[:, None] * sum_bV[:, -1:], -1)


def generate(
    params,
    prompts: list[np.ndarray],
    config: Config,
    mesh: Mesh,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    vocab_size: int | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (tokens, their log-probabilities), each [prompts, c], as they are generated: `num_tokens` of them in all.

    A token depends on its prompt, the seed, and the number of the prompt, and not on the mesh.

    Args:
      params, config, mesh: of `generation.placed` and `generation.for_generation`.
      prompts: the tokens of each, at least one, fewer than `config.seq_len`.
      vocab_size: of the tokens to draw; None is that of the model.
    """
    context = max(config.seq_len, 2)
    width, num_prompts = max(map(len, prompts)), len(prompts)
    ways = math.prod(mesh.shape[axis] for axis in placement.BATCH_AXES)
    texts = [list(prompt) for prompt in prompts] + [list(prompts[0])] * (-num_prompts % ways)
    capacity = min(width + num_tokens, context)
    prefill, extend = _programs(config, mesh, capacity, temperature, top_p, vocab_size or config.vocab_size)
    key, done = jax.random.key(seed), 0
    while done < num_tokens:
        state = prefill(params, *_padded(texts, width, mesh))
        while done < num_tokens and width < capacity:
            count = min(generation.CHUNK, num_tokens - done, capacity - width)
            state, *results = extend(params, state, key, jnp.int32(done), jnp.int32(count))
            tokens, log_p = (multihost_utils.process_allgather(a, tiled=True)[:, :count] for a in results)
            for text, more in zip(texts, tokens, strict=True):
                text.extend(more)
            done, width = done + count, width + count
            yield tokens[:num_prompts], log_p[:num_prompts]
        width = max(capacity // 2, 1)


@functools.cache  # a run that samples again does not compile again
def _programs(config: Config, mesh: Mesh, capacity: int, temperature: float, top_p: float, num_tokens: int):
    """The prefill and the extend of `generate`, jitted."""
    choose = partial(draw, temperature=temperature, top_p=top_p, num_tokens=num_tokens)
    return generation.make_prefill(config, mesh, capacity), generation.make_extend(config, mesh, choose)


def _padded(texts: list[list[int]], width: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """(the last `width` tokens of each text, padded on the left; how many they are), laid out on the mesh."""
    rows = [text[-width:] for text in texts]
    tokens = np.array([[0] * (width - len(row)) + row for row in rows], np.int32)
    layout = NamedSharding(mesh, generation.ROWS)
    place = lambda array: jax.make_array_from_callback(array.shape, layout, lambda index: array[index])
    return place(tokens), place(np.array([len(row) for row in rows], np.int32))


def sample(params, corpus: corpora.Corpus, tokenizer, config: Config, mesh: Mesh) -> tuple[str, str]:
    """Returns (prompt, continuation) as text, in a training run or after it; as numbers if the tokenizer is None.

    They are the beginning of a held-out document, and `config.sample` tokens.
    """
    prompt = np.asarray(corpus.held_out[: min(64, max(config.seq_len // 4, 1))])
    config, mesh = generation.for_generation(config, mesh)
    params = generation.placed(params, config, mesh)
    options = dict(seed=config.seed, vocab_size=corpus.vocab_size)
    chunks = generate(params, [prompt], config, mesh, config.sample, **options)
    tokens = np.concatenate([tokens[0] for tokens, _ in chunks])
    return shown(prompt, tokenizer), shown(tokens, tokenizer)


def shown(tokens: np.ndarray, tokenizer) -> str:
    """Tokens as text, or as numbers without a tokenizer."""
    return tokenizer.decode(tokens) if tokenizer else " ".join(map(str, tokens))


# -- the program


def prompts_of(args: argparse.Namespace, config: Config, tokenizer) -> list[np.ndarray]:
    """The tokens of the prompts on the command line. Raises ValueError for a prompt that the model cannot have."""
    if args.prompt and tokenizer is None:
        raise ValueError(
            f"the model has a vocabulary of {config.vocab_size:,} and no tokenizer.json beside it: give the prompt as "
            "tokens, as in --prompt_tokens=1,2,3"
        )
    prompts = tokenizer.encode(args.prompt, add_special_tokens=True) if args.prompt else []
    prompts += [np.array(tokens) for tokens in args.prompt_tokens or []]
    if not prompts:
        raise ValueError("there is no prompt: --prompt=TEXT, or --prompt_tokens=1,2,3")
    for prompt in prompts:
        if not len(prompt):
            raise ValueError("the prompt is empty: the model needs a token to continue")
        if len(prompt) >= config.seq_len:
            raise ValueError(
                f"the prompt has {len(prompt):,} tokens, and the model sees {config.seq_len:,} with those that follow: "
                f"a prompt of {config.seq_len - 1:,} tokens at most, or a larger --seq_len"
            )
        if max(prompt) >= config.vocab_size:
            raise ValueError(f"the prompt has token {max(prompt)}, outside the vocabulary of {config.vocab_size}")
    return prompts


def main() -> None:
    parser = command.parser(__file__, usage="%(prog)s --checkpoint_dir=DIR --prompt=TEXT [--flag=value ...]")
    trained.add_flags(parser)
    group = parser.add_argument_group("text")
    add = group.add_argument
    add("--prompt", action="append", metavar="TEXT", help="text to continue; given again: another text, in one batch")
    add("--prompt_tokens", type=command.whole_numbers, action="append", metavar="1,2,3", help="the same, as tokens")
    add("--tokens", type=command.size, default=200, metavar="INT", help="tokens to generate [%(default)s]")
    number = command.at_least(0, float)
    add("--temperature", type=number, default=1.0, help="of the draws; 0 takes the most probable token [%(default)s]")
    add("--top_p", type=number, default=1.0, help="draw from the tokens that have this probability [%(default)s: all]")
    add("--seed", type=command.at_least(0), default=0, metavar="INT", help="of the draws [%(default)s]")
    add("--json", action="store_true", help="print one JSON object: tokens, log-probabilities, text, seconds")
    args = command.arguments(parser)
    if not 0 < args.top_p <= 1:
        raise ValueError(f"top_p={args.top_p:g} must be above 0, and at most 1, which draws from all tokens")
    if args.seed >= 2**32:
        raise ValueError(f"seed={args.seed} must be under 2^32")
    instead = {"pipe": "fsdp or tensor shards the layers", "context": "tensor shards the heads and their cache"}
    model = trained.opened(args, instead)
    tokenizer = tokenizer_of(model, bool(args.prompt))
    prompts = prompts_of(args, model.config, tokenizer)
    config, mesh = generation.for_generation(model.config, model.mesh)
    params = jax.block_until_ready(generation.placed(model.read(config, mesh), config, mesh))
    options = dict(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    options["vocab_size"] = min(config.vocab_size, tokenizer.vocab_size if tokenizer else config.vocab_size)
    show(model.name, prompts, generate(params, prompts, config, mesh, args.tokens, **options), tokenizer, args)


def tokenizer_of(model: trained.Trained, is_needed: bool) -> tokenization.Tokenizer | tokenization.ByteTokenizer | None:
    """The model's tokenizer. If it is not needed and cannot be read, a line on stderr says so."""
    try:
        return model.tokenizer
    except ValueError as error:
        if is_needed:
            raise
        print(f"note       tokens are shown as numbers: {error}", file=sys.stderr)
        return None


def show(name: str, prompts: list[np.ndarray], chunks: Iterator, tokenizer, args: argparse.Namespace) -> None:
    """Prints the texts: a single one while it is generated, several when they are done, or all as JSON."""
    streams = len(prompts) == 1 and not args.json and jax.process_index() == 0
    incremental = tokenization.Incremental(tokenizer, prompts[0]) if tokenizer else None
    as_text = incremental or (lambda tokens, at_end=False: " ".join([*map(str, tokens), ""]))
    begun, results, seconds = time.perf_counter(), [], []
    if streams:
        command.say(f"{shown(prompts[0], tokenizer)}>>>", end="")
    for tokens, log_p in chunks:
        results.append((tokens, log_p))
        seconds.append(time.perf_counter() - begun)
        if streams:
            command.say(as_text(tokens[0]), end="")
    if streams:
        command.say(as_text([], at_end=True), end="")
    tokens, log_p = (np.concatenate(each, 1) for each in zip(*results, strict=True))
    rates = [len(prompts) * t.shape[1] / s for (t, _), s in zip(results[1:], np.diff(seconds), strict=True)]
    rate = float(np.median(rates)) if rates else None  # without the first chunk, which waits for the compiler
    if jax.process_index():
        return
    if args.json:
        texts = [
            {"prompt_tokens": prompt.tolist(), "tokens": row.tolist(), "log_probabilities": p.tolist()}
            | ({"prompt": shown(prompt, tokenizer), "text": shown(row, tokenizer)} if tokenizer else {})
            for prompt, row, p in zip(prompts, tokens, log_p, strict=True)
        ]
        print(json.dumps({"model": name, "seconds": seconds[-1], "tokens_per_s": rate, "texts": texts}))
        return
    if not streams:
        for prompt, row in zip(prompts, tokens, strict=True):
            command.say(f"{shown(prompt, tokenizer)}>>>{shown(row, tokenizer)}\n")
    speed = f", {rate:,.0f} tokens/s once compiled" if rate else ""
    command.say(f"\nsampled    {tokens.size:,} tokens in {seconds[-1]:.1f} s{speed}, by {name}")


if __name__ == "__main__":
    command.run(main)
