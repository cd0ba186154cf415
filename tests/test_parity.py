"""Models of published families compute what transformers computed for tests/parity: logits, loss and gradients.

benchmarks/parity.py records these folders with transformers; no test needs it.
"""

import dataclasses
import functools
import json
import sys

import numpy as np
import pytest

import reference
import tensor_files
import weights
from benchmarks import parity, parity_models

FAMILIES = [*parity_models.FAMILIES]
QUICK = ("llama3.1", "mistral", "gemma3", "deepseek-v3")  # what all share, and what the most intricate ones add
recorded = functools.cache(parity.recorded)
# Settings that cannot show: the models' epsilon is far below the mean squares of their activations.
WITHOUT_EFFECT = {"deepseek-v2-lite": {"norm_eps=1e-06"}, "deepseek-v3": {"norm_eps=1e-06"}}


def check(ours: parity.Differences, noise: parity.Differences) -> None:
    """Asserts that differences are at most twice the noise."""
    for name in ("logits", "loss", "gradient"):
        assert getattr(ours, name) <= 2 * getattr(noise, name), (name, ours, noise)


@pytest.mark.at_most(8)
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_logits_and_loss_are_those_of_transformers(family):
    record = recorded(family)
    logits = np.asarray(reference.logits(record.params, record.batch, record.config))
    loss = float(reference.loss(record.params, record.batch, record.config))
    ours = parity.Values(logits, loss, record.values.gradients)
    check(parity.differences(ours, record.values), record.noise)
    assert np.std(record.values.logits) > 1e4 * record.noise.logits


@pytest.mark.at_most(5)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family):
    record = recorded(family)
    ours = parity.on_one_device(record.params, record.batch, record.config)
    check(parity.differences(ours, record.values), record.noise)


CASES = [(family, mesh) for family in FAMILIES for mesh in parity.MESHES]


@pytest.mark.at_most(6)
@pytest.mark.slow
@pytest.mark.parametrize("family, mesh", CASES)
def test_they_are_the_same_on_a_mesh(family, mesh):
    record = recorded(family)
    if "expert" in mesh and not record.config.num_experts:
        return
    ours = parity.on_mesh(record.params, record.batch, dataclasses.replace(record.config, mesh=mesh))
    check(parity.differences(ours, record.values), record.noise)


@pytest.mark.at_most(6)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_of_a_family_matters(family):
    """Without one, logits move by at least a hundred times the noise, so that no setting can be missing unseen."""
    record = recorded(family)
    moved = parity.effects(record)
    unseen = {setting for setting, distance in moved.items() if not distance > 100 * record.noise.logits}
    assert unseen == WITHOUT_EFFECT.get(family, set()), moved


def test_settings_are_found_in_a_configuration():
    """A list that lost its entries would pass the test above."""
    settings = {setting for family in FAMILIES for setting, _ in parity.without_a_setting(recorded(family).config)}
    assert {"window=8", "qkv_bias=True", "qk_norm=True", "attention_sinks=True", "router_scale=2.5"} <= settings
    assert {"selection_bias=True", "rope_type=yarn", "renormalise=False", "router_groups=4"} <= settings
    assert {"expert_bias=True", "swiglu_limit=1.0", "rope_scaling=32.0", "norm_eps=0.001"} <= settings


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_tensors_that_were_read(family, tmp_path):
    """Bit for bit, under the same names, and a config.json that gives the same model."""
    record, directory = recorded(family), str(tmp_path / "exported")
    weights.export(record.params, record.config, directory, "bfloat16")
    assert weights.settings(directory) == weights.settings(str(parity.FOLDER / family))
    with tensor_files.Folder(directory) as ours, tensor_files.Folder(str(parity.FOLDER / family)) as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in theirs.tensors.items():
            assert (ours.tensors[name].dtype, ours.tensors[name].shape) == (tensor.dtype, tensor.shape), name
            axes = [[(size, 0, size)] for size in tensor.shape]
            assert ours.read(name, axes).tobytes() == theirs.read(name, axes).tobytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folders_are_of_the_families_as_they_are_written(family):
    assert json.loads((parity.FOLDER / family / "config.json").read_text()) == parity_models.FAMILIES[family]


def test_a_difference_is_found():
    """One weight of the last norm, moved by a thousandth, moves the logits and the loss by more than the noise."""
    record = recorded("llama2")
    norm = record.params.norm.copy()
    norm[3] *= 1.001
    params = dataclasses.replace(record.params, norm=norm)
    logits, loss = (each(params, record.batch, record.config) for each in (reference.logits, reference.loss))
    ours = parity.differences(parity.Values(np.asarray(logits), float(loss), params), record.values)
    with pytest.raises(AssertionError):
        check(ours._replace(loss=0.0, gradient=0.0), record.noise)
    with pytest.raises(AssertionError):
        check(ours._replace(logits=0.0, gradient=0.0), record.noise)


def test_a_wrong_gradient_is_found():
    """One element of a gradient, moved by a ten-thousandth of the largest, is above the noise; its weight is named."""
    record = recorded("llama2")
    gradients = record.values.gradients
    w_up = gradients.layers.w_up.copy()
    w_up[1, 2, 3] += 1e-4 * np.abs(w_up[1]).max()
    other = dataclasses.replace(gradients, layers=dataclasses.replace(gradients.layers, w_up=w_up))
    ours = parity.differences(record.values._replace(gradients=other), record.values)
    assert ours.weight == "w_up" and ours.gradient == pytest.approx(1e-4, rel=0.01)
    with pytest.raises(AssertionError):
        check(ours, record.noise)


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r'^this needs torch: pip install -e "\.\[parity\]"$'):
        parity_models.transformers()
