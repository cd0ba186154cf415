"""Tests safetensors files: blocks, quantised values by plain formulas, and folders that are damaged."""

import json
import shutil
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tensor_files
from tensor_files import INDEX, SINGLE, Folder, New

CONFIG = dict(model_type="llama")
RNG = np.random.default_rng(0)


def folder(path: Path, tensors: dict[str, np.ndarray], **values) -> Path:
    """A folder with one file, written by the safetensors package, but for FP8, which it cannot write from numpy."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | values))
    names = {np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3"}
    if not any(tensor.dtype in names for tensor in tensors.values()):
        save_file(tensors, path / SINGLE)
        return path
    header, content = {}, b""
    for name, tensor in tensors.items():
        dtype = names.get(tensor.dtype) or {"float32": "F32", "bfloat16": "BF16"}[tensor.dtype.name]
        end = len(content) + tensor.nbytes
        header[name] = dict(dtype=dtype, shape=tensor.shape, data_offsets=[len(content), end])
        content += tensor.tobytes()
    text = json.dumps(header).encode()
    (path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


# -- blocks


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "axes",
    [
        [[(12, 0, 12)], [(10, 0, 10)]],
        [[(12, 3, 7)], [(10, 0, 10)]],
        [[(12, 0, 12)], [(10, 2, 5)]],
        [[(12, 11, 12)], [(10, 9, 10)]],
        [[(3, 1, 3), (4, 1, 2)], [(10, 4, 8)]],
        [[(3, 0, 3), (4, 2, 4)], [(5, 1, 4), (2, 1, 2)]],
        [[(12, 4, 4)], [(10, 0, 10)]],
    ],
)
def test_a_block_has_the_values_of_the_array_and_only_its_bytes_are_read(axes, dtype, tmp_path):
    array = RNG.standard_normal((12, 10)).astype(dtype)
    terms = [term for axis in axes for term in axis]
    wanted = array.reshape([size for size, _, _ in terms])[tuple(slice(start, stop) for _, start, stop in terms)]
    with Folder(folder(tmp_path, {"before": array[0], "w": array})) as opened:
        block = opened.read("w", axes)
        assert opened.bytes_read == wanted.size * array.itemsize
    assert block.dtype == np.float32 and np.array_equal(block, wanted.astype(np.float32))


# -- quantised values

BLOCKS = [
    [[(300, 0, 300)], [(200, 0, 200)]],
    [[(300, 120, 260)], [(200, 127, 129)]],
    [[(6, 1, 5), (50, 30, 50)], [(200, 0, 200)]],
    [[(300, 7, 8)], [(2, 0, 2), (100, 20, 40)]],
]


@pytest.mark.parametrize("axes", BLOCKS)
@pytest.mark.parametrize("size", [128, 64])
def test_fp8_values_are_multiplied_by_the_scale_of_their_block(axes, size, tmp_path):
    values = RNG.standard_normal((300, 200)).astype(ml_dtypes.float8_e4m3fn)
    scales = RNG.random((-(-300 // size), -(-200 // size)), np.float32)
    wanted = np.empty((300, 200), np.float32)
    for i in range(300):
        for j in range(200):
            wanted[i, j] = np.float32(values[i, j]) * scales[i // size, j // size]
    terms = [term for axis in axes for term in axis]
    wanted = wanted.reshape([size for size, _, _ in terms])[tuple(slice(start, stop) for _, start, stop in terms)]
    quantised = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[size, size])
    path = folder(tmp_path, {"w": values, "w_scale_inv": scales}, quantization_config=quantised)
    with Folder(path) as opened:
        assert opened.parts("w", (300, 200)).keys() == {"w", "w_scale_inv"}
        block = opened.read("w", axes)
        assert opened.bytes_read == wanted.size + scales.nbytes
    assert np.array_equal(block, wanted)


@pytest.mark.parametrize(
    "axes",
    [
        [[(3, 0, 3)], [(96, 0, 96)], [(10, 0, 10)]],
        [[(3, 1, 2)], [(96, 5, 6)], [(10, 2, 9)]],
        [[(3, 1, 2)], [(96, 31, 65)], [(5, 1, 4), (2, 1, 2)]],
    ],
)
def test_mxfp4_values_are_powers_of_two_times_one_of_sixteen(axes, tmp_path):
    """The published tensor is [3, 96, 10], and its files have [3, 10, 96]: 3 groups of 32 in a row."""
    blocks = RNG.integers(0, 256, (3, 10, 3, 16)).astype(np.uint8)
    scales = RNG.integers(100, 140, (3, 10, 3)).astype(np.uint8)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    wanted = np.empty((3, 96, 10), np.float32)
    for e, k, j in np.ndindex(3, 96, 10):
        byte = int(blocks[e, j, k // 32, k % 32 // 2])
        nibble = byte >> 4 if k % 2 else byte & 15
        wanted[e, k, j] = magnitudes[nibble & 7] * (-1.0) ** (nibble >> 3) * 2.0 ** (int(scales[e, j, k // 32]) - 127)
    terms = [term for axis in axes for term in axis]
    wanted = wanted.reshape([size for size, _, _ in terms])[tuple(slice(start, stop) for _, start, stop in terms)]
    quantised = dict(quant_method="mxfp4", modules_to_not_convert=[])
    path = folder(tmp_path, {"w_blocks": blocks, "w_scales": scales}, quantization_config=quantised)
    with Folder(path) as opened:
        parts = opened.parts("w", (3, 96, 10))
        assert {name: shape for name, (shape, _) in parts.items()} == dict(w_blocks=blocks.shape, w_scales=scales.shape)
        block = opened.read("w", axes)
        assert opened.bytes_read <= blocks.nbytes + scales.nbytes
    assert np.array_equal(block, wanted)


# -- damaged folders


@pytest.fixture
def good(tmp_path) -> Path:
    """A folder of two files, with an index."""
    path = tmp_path / "good"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    tensors = [New(name, "F32", (4, 4)) for name in "abcd"]
    tensor_files.write(path, tensors, lambda tensor: np.full((4, 4), ord(tensor.name), np.float32), 128)
    return path


def change_index(path: Path, **changes) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= changes
    (path / INDEX).write_text(json.dumps(index))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def truncate(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def header_length(path: Path, length: int) -> None:
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])


def change_header(path: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new) and old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def pickled(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x02")


def in_two_files(path: Path) -> None:
    shutil.copy(path / FIRST, path / "other.safetensors")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["e"] = "other.safetensors"
    (path / INDEX).write_text(json.dumps(index))


DAMAGES = {
    "truncated values": (lambda p: truncate(p / SECOND, 1), f"{SECOND} is damaged, or no safetensors file"),
    "too many values": (lambda p: (p / FIRST).write_bytes((p / FIRST).read_bytes() + b"x"), f"{FIRST} is damaged"),
    "an empty file": (lambda p: (p / FIRST).write_bytes(b""), f"{FIRST} is damaged, or no safetensors file"),
    "a truncated header": (lambda p: (p / FIRST).write_bytes((p / FIRST).read_bytes()[:20]), f"{FIRST} is damaged"),
    "a huge header": (lambda p: header_length(p / FIRST, 1 << 60), f"{FIRST} is damaged"),
    "a header that is no JSON": (lambda p: change_header(p / FIRST, b'{"__', b"xx__"), f"{FIRST} is damaged"),
    "offsets that overlap": (lambda p: change_header(p / FIRST, b"[64,128]", b"[60,128]"), f"{FIRST} is damaged"),
    "a shape of other bytes": (lambda p: change_header(p / FIRST, b"[4,4]", b"[4,5]"), f"{FIRST} is damaged"),
    "an unknown dtype": (lambda p: change_header(p / FIRST, b'"F32"', b'"F99"'), f"{FIRST} is damaged"),
    "an absent file": (lambda p: (p / SECOND).unlink(), f"names {SECOND}, which is missing: copy the folder again"),
    "a folder as a file": (lambda p: ((p / SECOND).unlink(), (p / SECOND).mkdir()), f"{SECOND} is no ordinary file"),
    "an index that is no JSON": (lambda p: (p / INDEX).write_text("{"), f"{INDEX} is no JSON"),
    "an index without a map": (lambda p: (p / INDEX).write_text("{}"), f"{INDEX} has no weight_map with the file"),
    "an empty map": (lambda p: (p / INDEX).write_text('{"weight_map": {}}'), f"{INDEX} has no weight_map"),
    "a map of numbers": (lambda p: change_index(p, a=3), f"{INDEX} has no weight_map with the file of each tensor"),
    "a file elsewhere": (lambda p: change_index(p, a=f"../{FIRST}"), "which is no safetensors file of that folder"),
    "a pickle in the index": (lambda p: change_index(p, a="a.bin"), "a is in 'a.bin', which is no safetensors file"),
    "a tensor that is not there": (lambda p: change_index(p, e=FIRST), f"says that e is in {FIRST}, where it is not"),
    "a tensor in another file": (lambda p: change_index(p, a=SECOND), f"has a, which {INDEX} does not place there"),
    "a tensor in two files": (in_two_files, "a is in two files, model-00001-of-00002.safetensors and other.safetens"),
    "pickles only": (
        pickled,
        "has only pytorch_model.bin, a pickle, which can run code: save the model as safetensors",
    ),
    "no weights": (lambda p: [file.unlink() for file in p.glob("model*")], f"has neither {SINGLE} nor {INDEX}"),
    "no config.json": (lambda p: (p / "config.json").unlink(), "has no config.json: it must be a folder of published"),
    "an unknown quantisation": (
        lambda p: (p / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'),
        "quant_method='gptq': this program reads fp8 in blocks, mxfp4, and weights that are not quantised",
    ),
    "a quantisation without blocks": (
        lambda p: (p / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}'),
        r"weight_block_size=None: it must be two whole numbers, as in \[128, 128\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_a_sentence(damage, good):
    with Folder(good) as opened:
        assert opened.tensors.keys() == {*"abcd"}
    change, message = DAMAGES[damage]
    change(good)
    with pytest.raises((ValueError, OSError), match=message) as error:
        Folder(good)
    assert "\n" not in str(error.value)


def test_a_file_that_is_truncated_after_it_was_opened_is_an_error(good):
    with Folder(good) as opened:
        truncate(good / SECOND, 4)
        assert np.array_equal(opened.read("a", [[(4, 0, 4)], [(4, 0, 4)]]), np.full((4, 4), ord("a")))
        with pytest.raises(OSError, match=f"{SECOND} ends at byte .*: it was longer when it was opened"):
            opened.read("d", [[(4, 0, 4)], [(4, 0, 4)]])


def test_without_the_package_the_extra_is_named(good, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"safetensors is not installed, .*: pip install -e '\.\[weights\]'$"):
        Folder(good)


def test_the_identity_is_that_of_the_content(good, tmp_path):
    identity = lambda path: Folder(path).identity
    shutil.copytree(good, tmp_path / "same")
    assert identity(tmp_path / "same") == identity(good)
    for change in (
        lambda p: (p / "config.json").write_text('{"model_type": "qwen3"}'),
        lambda p: change_header(p / FIRST, b'"a"', b'"z"'),
        lambda p: (p / FIRST).write_bytes((p / FIRST).read_bytes()[:-1] + b"\1"),
    ):
        shutil.copytree(good, tmp_path / "other")
        change(tmp_path / "other")
        (tmp_path / "other" / INDEX).write_text((good / INDEX).read_text().replace('"a"', '"a"'))
        try:
            assert identity(tmp_path / "other") != identity(good)
        except ValueError as error:  # another name is not in the index
            assert "does not place there" in str(error)
        shutil.rmtree(tmp_path / "other")


def test_written_files_are_read_by_the_package_and_complete_or_absent(tmp_path):
    tensors = [New("odd", "BF16", (3,)), New("w", "F32", (2, 5)), New("empty", "F32", (0, 4))]
    value_of = lambda tensor: np.arange(np.prod(tensor.shape), dtype=np.float32).reshape(tensor.shape)
    tensor_files.write(tmp_path, tensors, value_of, 10**9)
    read = load_file(tmp_path / SINGLE)
    assert {name: (array.dtype.name, array.shape) for name, array in read.items()} == dict(
        odd=("bfloat16", (3,)), w=("float32", (2, 5)), empty=("float32", (0, 4))
    )
    assert all(np.array_equal(read[tensor.name], value_of(tensor)) for tensor in tensors)

    def fail(tensor):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        tensor_files.write(tmp_path, tensors, fail, 10**9)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE] and load_file(tmp_path / SINGLE).keys() == read.keys()
