"""Trained models: from a checkpoint or published weights, and the programs that use them."""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import first_state, init

import checkpoint
import corpora
import data
import evaluation
import parameters
import placement
import processes
import reference
import sampling
import sharding
import tokenization
import trained
import weights
from config import Config

TINY = dict(num_layers=2, model_dim=32, ff_dim=32, num_heads=8, num_kv_heads=4, head_dim=4, seq_len=16, batch=8)
KINDS = Path(__file__).parent / "tokenizer_kinds"
NONE = dict(checkpoint_dir=None, weights=None, dtype=None, mesh="fsdp:4,tensor:2", seq_len=None)


def arguments(**values) -> argparse.Namespace:
    return argparse.Namespace(**NONE | values)


@pytest.fixture(autouse=True)
def no_start(monkeypatch):
    monkeypatch.setattr(processes, "start", lambda config: jax.devices())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Config, parameters.Params]:
    """The configuration and the parameters of a run that has saved a checkpoint, trained on a small corpus."""
    directory = tmp_path_factory.mktemp("run")
    documents = [np.frombuffer(f"{i} squared is {i * i}.\n".encode(), np.uint8) for i in range(300)]
    corpus = str(directory / "corpus.bin")
    corpora.write_corpus(corpus, documents[:200], documents[200:], vocab_size=256, separator=255)
    config = Config(
        **TINY, mesh="data:2,fsdp:4", microbatches=2, corpus=corpus, checkpoint_dir=str(directory / "saved")
    )
    params = init(config)
    with checkpoint.opened(config) as checkpoints:
        mesh = sharding.make_mesh(placement.parse_mesh(config.mesh))
        checkpoint.save(checkpoints, 7, first_state(config, mesh, params), config)
    return config, params


def main(program, monkeypatch, capsys, *flags: str) -> dict:
    """Returns the JSON object that a program prints."""
    monkeypatch.setattr(sys, "argv", ["x", "--mesh=fsdp:4,tensor:2", "--json", *flags])
    program.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_checkpoint_gives_config_and_parameters_on_another_mesh(run):
    config, params = run
    model = trained.opened(arguments(checkpoint_dir=config.checkpoint_dir, seq_len=12))
    assert model.name.endswith("/7") and model.corpus == config.corpus
    assert (model.config.seq_len, model.config.num_kv_heads, model.config.microbatches) == (12, 4, 1)
    assert model.config.checkpoint_dir == "" and model.config.mesh == "fsdp:4,tensor:2"
    read = model.read(model.config, model.mesh)
    assert read.layers.w_q.sharding.spec == parameters.param_specs(model.config).layers.w_q
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.slow
def test_a_damaged_parameter_is_found_by_its_checksum(run, monkeypatch):
    config, _ = run
    model = trained.opened(arguments(checkpoint_dir=config.checkpoint_dir))
    monkeypatch.setattr(checkpoint.checksums, "checksums", lambda tree: {"params.embed": 1})
    with pytest.raises(OSError, match=r"/7 is damaged: params\.embed and \d+ more is not what was saved"):
        model.read(model.config, model.mesh)


@pytest.mark.parametrize(
    "values, kind, words",
    [
        (dict(), ValueError, "give one model: --checkpoint_dir=DIR of a run of train.py, or --weights=DIR"),
        (dict(checkpoint_dir="a", weights="b"), ValueError, "give one model"),
        (dict(checkpoint_dir="/nowhere"), OSError, "there is no checkpoint in /nowhere"),
        (dict(weights="/nowhere"), OSError, "/nowhere has no config.json"),
        (dict(weights="x", mesh="pipe:2"), ValueError, "mesh=pipe:2: .* no use for the axis pipe; take tensor"),
    ],
)
def test_a_model_that_is_not_there_is_refused(values, kind, words):
    with pytest.raises(kind, match=words):
        trained.opened(arguments(**values), {"pipe": "take tensor"})


def test_a_file_in_place_of_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "5").mkdir()
    with pytest.raises(OSError, match=r"/5 is damaged, or not of this program"):
        trained.opened(arguments(checkpoint_dir=str(tmp_path)))


def test_a_model_brings_its_tokenizer(run, tmp_path, monkeypatch):
    """It is beside its checkpoints, or in the folder of its weights."""
    config, _ = run
    assert trained.opened(arguments(checkpoint_dir=config.checkpoint_dir)).tokenizer is tokenization.BYTES
    tokenizer = tokenization.open_tokenizer(str(KINDS / "bert"), "[MASK]")
    with checkpoint.opened(config) as checkpoints:
        assert checkpoint.save_tokenizer(checkpoints, tokenizer) == checkpoint.save_tokenizer(None, tokenizer) == ""
        model = trained.opened(arguments(checkpoint_dir=config.checkpoint_dir))
        assert (model.tokenizer.identity, model.tokenizer.separator) == (tokenizer.identity, tokenizer.separator)
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        model = trained.opened(arguments(checkpoint_dir=config.checkpoint_dir))
        with pytest.raises(ValueError, match="tokenizers is not installed"):
            sampling.tokenizer_of(model, is_needed=True)
        assert sampling.tokenizer_of(model, is_needed=False) is None
        out = tmp_path / "exported"
        weights.export_checkpoint(config.checkpoint_dir, str(out), "float32")
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == tokenizer.separator
        assert (out / "tokenizer.json").read_bytes() == tokenizer.content
        note = checkpoint.save_tokenizer(checkpoints, tokenization.BYTES)
        assert re.search(rf"the tokenizer is bytes, or unknown, and {tokenizer.identity} in .*saved", note)
    assert checkpoint.open_tokenizer(config.checkpoint_dir) is None
    monkeypatch.undo()
    monkeypatch.setattr(processes, "start", lambda config: jax.devices())
    shutil.copy(KINDS / "gpt2/tokenizer.json", out)
    (out / "tokenizer_config.json").unlink()
    prompts = sampling.prompts_of(argparse.Namespace(prompt=["The step"], prompt_tokens=None), config, tokenizer)
    model = trained.opened(arguments(weights=str(out)))
    assert model.tokenizer.special_tokens == {"<|endoftext|>": 0}
    assert tokenizer.decode(prompts[0]) == "[CLS] the step [SEP]"


# -- the programs


def greedy(params, config: Config, prompt: list[int], num_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(num_tokens):
        seen = np.zeros((1, len(prompt) + num_tokens), np.int32)
        seen[0, : len(text)] = text
        ones, columns = np.ones_like(seen), np.arange(seen.shape[1])[None]
        logits = reference.logits(params, data.Batch(seen, seen, ones, columns, ones), config)
        text.append(int(np.argmax(logits[0, len(text) - 1])))
    return text[len(prompt) :]


@pytest.mark.slow
def test_sampling_continues_prompts_of_a_checkpoint_and_of_published_weights(run, monkeypatch, capsys, tmp_path):
    config, params = run
    weights.export(params, config, str(tmp_path), dtype="float32")
    flags = ["--prompt=1 squ", "--prompt=22", "--tokens=6", "--temperature=0", "--seq_len=16", "--dtype=float32"]
    for model in (f"--checkpoint_dir={config.checkpoint_dir}", f"--weights={tmp_path}"):
        said = main(sampling, monkeypatch, capsys, model, *flags)
        assert [text["prompt"] for text in said["texts"]] == ["1 squ", "22"]
        for text in said["texts"]:
            assert text["tokens"] == greedy(params, config, text["prompt_tokens"], 6)
            assert len(text["log_probabilities"]) == 6 and max(text["log_probabilities"]) < 0


@pytest.mark.slow
@pytest.mark.parametrize("documents", ["held_out", "all"])
def test_evaluation_is_the_mean_over_the_documents(run, documents, monkeypatch, capsys, tmp_path):
    config, params = run
    corpus = corpora.open_corpus(config.corpus)
    losses, streams = [], [corpus.train[:], corpus.held_out[:]][documents == "held_out" :]
    for stream in streams:
        size = data.num_sequences(stream, 16)
        one = corpora.Corpus("", stream, stream, 256, 255)
        rows = data.eval_batch(one, 0, batch=size, seq_len=16)
        logits = jax.nn.log_softmax(reference.logits(params, rows, config))
        losses.append(-np.take_along_axis(np.asarray(logits), rows.targets[..., None], -1).ravel())
    losses = np.concatenate(losses)
    flags = [f"--checkpoint_dir={config.checkpoint_dir}", f"--documents={documents}"]
    said = main(evaluation, monkeypatch, capsys, *flags)
    assert said["tokens"] == losses.size == 16 * said["sequences"]
    assert said["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert said["perplexity"] == pytest.approx(np.exp(losses.mean()), rel=1e-4)
    num_bytes = sum(np.count_nonzero(stream[1 : len(stream) // 16 * 16 + 1] != 255) for stream in streams)
    assert said["bits_a_byte"] == pytest.approx(losses.sum() / np.log(2) / num_bytes, rel=1e-5)
    said = main(evaluation, monkeypatch, capsys, *flags, "--eval_batches=1")
    assert said["sequences"] == 8 * (1 + (documents == "all"))
    if documents == "held_out":
        other = str(tmp_path / "other")
        corpora.write_corpus(other, [np.arange(50)], [np.arange(100, 140)], vocab_size=256, separator=255)
        both = main(
            evaluation, monkeypatch, capsys, *flags, "--eval_batches=1", f"--corpus={config.corpus}:1,{other}:2"
        )
        assert both["sequences"] == 8 + 2 and both["loss_by_source"][config.corpus] == said["loss"]
        mean = (8 * said["loss"] + 2 * both["loss_by_source"][other]) / 10
        assert both["loss"] == pytest.approx(mean, rel=1e-6)
