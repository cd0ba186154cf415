"""Draws by temperature and top-p, texts longer than the context, and the program `python sampling.py`."""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import init

import corpora
import data
import parameters
import placement
import reference
import sampling
import sharding
import tokenization
from config import Config

TINY = dict(vocab_size=64, num_layers=1, model_dim=32, ff_dim=32, num_heads=8, num_kv_heads=8, head_dim=4, seq_len=8)


def plain_draw(logits, u, temperature, top_p):
    """A draw in plain numpy: the nucleus one token at a time, then the token where the sum passes u times its mass."""
    p = np.exp(np.float64(logits) / temperature)
    p /= p.sum()
    nucleus, mass = [], 0.0
    for token in np.argsort(-p, kind="stable") if top_p < 1 else range(len(p)):
        nucleus.append(token)
        mass += p[token]
        if mass >= top_p and top_p < 1:
            break
    passed = 0.0
    for token in nucleus:
        passed += p[token]
        if passed > u * mass:
            return token
    raise AssertionError


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8), (1.8, 0.3), (0.5, 0.05)])
def test_draws_are_those_of_the_plain_formula_for_the_same_random_numbers(temperature, top_p):
    rng = np.random.default_rng(0)
    logits, u = rng.normal(0, 2, (400, 50)).astype(np.float32), rng.random(400).astype(np.float32)
    drawn = np.asarray(sampling.draw(logits, u, temperature, top_p, 50))
    assert drawn.tolist() == [plain_draw(*row, temperature, top_p) for row in zip(logits, u, strict=True)]
    assert len(set(drawn.tolist())) > 20


def test_draws_follow_the_distribution_and_leave_out_tokens_that_the_corpus_lacks():
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.03, 0.02, 0.0125, 0.5])  # the last is no token of the corpus
    u = jax.random.uniform(jax.random.key(0), 20_000)
    drawn = sampling.draw(jnp.broadcast_to(jnp.log(p), (20_000, 8)), u, 1.0, 1.0, 7)
    counts = np.bincount(drawn, minlength=8) / 20_000
    assert np.abs(counts - p)[:7].max() < 4 * np.sqrt(0.25 / 20_000) and counts[7] == 0
    nucleus = sampling.draw(jnp.broadcast_to(jnp.log(p), (20_000, 8)), u, 1.0, 0.7, 7)
    assert set(np.asarray(nucleus).tolist()) == {0, 1}  # which have 0.75


def test_temperature_0_takes_the_largest_logit():
    logits = jnp.array([[1.0, 3.0, 2.0, 9.0], [4.0, 3.0, 2.0, 9.0]])
    assert sampling.draw(logits, jnp.array([0.99, 0.99]), 0, 1.0, 3).tolist() == [1, 0]


def sure(config: Config) -> parameters.Params:
    """Parameters of a model so sure of itself that draws are its largest logits."""
    params = init(config)
    return dataclasses.replace(params, unembed=params.unembed * 1e4)


def on_mesh(config: Config, params: parameters.Params):
    mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
    place = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))
    return mesh, jax.tree.map(place, params, parameters.param_specs(config))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:2,fsdp:2,tensor:2", "fsdp:2,context:4", "pipe:2,tensor:4"])
def test_the_sample_of_a_run_continues_its_prompt_also_past_the_context(mesh):
    """When the context of 8 tokens is full, its later half is the context."""
    config = Config(**TINY | dict(num_layers=2, sample=19), mesh=mesh)
    mesh, params = on_mesh(config, sure(config))
    stream = np.arange(5, 60) * 7 % 64
    corpus = corpora.Corpus("numbers", stream, stream, 64, 0)
    prompt, text = sampling.sample(params, corpus, None, config, mesh)
    tokens = [int(word) for word in prompt.split()]
    assert tokens == stream[:2].tolist() and len(text.split()) == 19
    first = 0
    for token in map(int, text.split()):
        if len(tokens) - first == 8:
            first += 4
        seen = np.zeros((1, 8), int)  # of one shape; a token does not see those after it
        seen[0, : len(tokens) - first] = tokens[first:]
        ones, columns = np.ones_like(seen), np.arange(8)[None]
        logits = reference.logits(sure(config), data.Batch(seen, seen, ones, columns, ones), config)
        assert token == np.argmax(logits[0, len(tokens) - first - 1])
        tokens.append(token)


# -- the program


def arguments(**values) -> argparse.Namespace:
    return argparse.Namespace(**dict(prompt=None, prompt_tokens=None) | values)


def test_prompts_are_utf8_or_tokens():
    config = Config(**TINY | dict(vocab_size=256, seq_len=9))
    args = arguments(prompt=["né", "x"], prompt_tokens=[[1, 255]])
    prompts = sampling.prompts_of(args, config, tokenization.BYTES)
    assert [prompt.tolist() for prompt in prompts] == [[110, 195, 169], [120], [1, 255]]


@pytest.mark.parametrize(
    "values, vocab_size, words",
    [
        (dict(), 256, "there is no prompt"),
        (dict(prompt=[""]), 256, "the prompt is empty"),
        (dict(prompt=["123456789"]), 256, r"has 9 tokens, and the model sees 8 .* a prompt of 7 tokens at most"),
        (dict(prompt=["a"]), 300, r"vocabulary of 300 and no tokenizer.json .* --prompt_tokens=1,2,3"),
        (dict(prompt_tokens=[[3, 300]]), 300, "token 300, outside the vocabulary of 300"),
    ],
)
def test_prompts_that_the_model_cannot_have_are_refused(values, vocab_size, words):
    tokenizer = tokenization.BYTES if vocab_size == 256 else None
    with pytest.raises(ValueError, match=words):
        sampling.prompts_of(arguments(**values), Config(**TINY | dict(vocab_size=vocab_size)), tokenizer)


@pytest.mark.parametrize("model", ["gpt2", "t5", "bytes", ""])
def test_text_is_shown_while_it_is_generated(model, capsys):
    """It is that of all tokens at once; a character of several tokens is not shown in parts."""
    kinds = Path(__file__).parent / "tokenizer_kinds"
    tokenizer = tokenization.BYTES if model == "bytes" else model and tokenization.open_tokenizer(str(kinds / model))
    text = "The step gathers each layer's Gr\u00fc\u00dfe" if model != "t5" else "The step gathers each layer's weights"
    tokens = np.arange(9) if not tokenizer else tokenizer.encode([text])[0]
    prompt, rest = tokens[:4], tokens[4:]
    chunks = [(np.array([[token]]), np.zeros((1, 1))) for token in rest]
    sampling.show("m", [prompt], iter(chunks), tokenizer or None, argparse.Namespace(json=False))
    said = capsys.readouterr().out.partition("\nsampled ")[0]
    assert said.replace(">>>", "").strip() == (text if tokenizer else "0 1 2 34 5 6 7 8")
