"""Tests of tuned.py: stored entries are read; damaged files and entries of other versions or kernels are ignored."""

import json
from types import SimpleNamespace
from typing import NamedTuple

import jax
import pytest

import tuned


class Blocks(NamedTuple):
    rows: int
    cols: int = 128


@pytest.fixture
def own(tmp_path, monkeypatch):
    file = tmp_path / "of" / "mine.json"
    monkeypatch.setattr(tuned, "OWN", file)
    monkeypatch.setattr(tuned, "CHECKED_IN", tmp_path / "checked_in.json")
    return file


KEY = tuned.key_of("matmul", M=8, K=16, dtype="bfloat16", causal=True, packed=False)


def test_the_key_names_all_fields_of_the_shape():
    assert KEY == "matmul M=8 K=16 dtype=bfloat16 causal=True chip=tpu7x"
    assert tuned.key_of("flash", causal=False, window=0) == "flash window=0 chip=tpu7x"


def test_the_key_names_the_chip_of_this_machine(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="TPU v6 lite")])
    assert tuned.key_of("matmul", M=8) == "matmul M=8 chip=tpuv6lite"


def test_a_key_is_parsed():
    kernel, shape = tuned.shape_of(KEY)
    assert kernel == "matmul" and shape == {"M": 8, "K": 16, "dtype": "bfloat16", "causal": True}
    assert shape["packed"] is False
    metadata = tuned.metadata(KEY, Blocks(4), calls=3)
    assert metadata == {"tuned_key": KEY, "blocks": "rows=4 cols=128", "calls": "3"}


def test_a_saved_entry_is_used(own):
    assert tuned.best(KEY, Blocks) is None
    tuned.save("another", {"blocks": {"rows": 1}}, own)
    tuned.save(KEY, {"blocks": {"rows": 256}, "cycles": 7}, own)
    assert tuned.best(KEY, Blocks) == Blocks(256, 128)
    assert tuned.best(tuned.key_of("matmul", M=9), Blocks) is None
    tuned.save(KEY, {"blocks": {"rows": 512}}, own)
    assert tuned.best(KEY, Blocks).rows == 512 and tuned.best("another", Blocks).rows == 1
    assert [file.name for file in own.parent.iterdir()] == [own.name]


def test_on_a_tpu_a_miss_warns_once(own, monkeypatch, caplog):
    tuned.best("a kernel off a TPU", Blocks)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for _ in range(2):
        assert tuned.best("a kernel M=7", Blocks) is None
    tuned.save("a kernel M=8", {"blocks": {"rows": 1}}, own)
    tuned.best("a kernel M=8", Blocks)
    (message,) = caplog.messages
    assert "no block sizes are stored for a kernel M=7" in message and "kernels.py tune" in message


def test_the_users_own_file_takes_precedence(own):
    tuned.save(KEY, {"blocks": {"rows": 1}}, tuned.CHECKED_IN)
    assert tuned.best(KEY, Blocks).rows == 1
    tuned.save(KEY, {"blocks": {"rows": 2}}, own)
    assert tuned.best(KEY, Blocks).rows == 2


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1}',
        '{"version": 1, "entries": []}',
        json.dumps({"version": tuned.VERSION + 1, "entries": {KEY: {"blocks": {"rows": 7}}}}),
        b"\xff",
    ],
)
def test_a_damaged_file_is_ignored_and_overwritten(own, damaged):
    own.parent.mkdir()
    own.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    assert tuned.best(KEY, Blocks) is None
    tuned.save(KEY, {"blocks": {"rows": 3}}, own)
    assert tuned.best(KEY, Blocks).rows == 3
    assert json.loads(own.read_text())["version"] == tuned.VERSION


@pytest.mark.parametrize(
    "entry", [{}, {"blocks": {"rows": 1, "depth": 2}}, {"blocks": {}}, {"blocks": None}, {"block": 1}]
)
def test_an_entry_of_another_kernel_is_ignored(own, entry):
    tuned.save(KEY, {"blocks": {"rows": 1}}, tuned.CHECKED_IN)
    tuned.save(KEY, entry, own)
    assert tuned.best(KEY, Blocks) == Blocks(1)
