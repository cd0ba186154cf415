"""Safetensors files: their headers, blocks of their values, plain or quantised, and new ones.

**Idea.** A folder of published weights is opened by its headers alone. `Folder.read` then returns any block of a
tensor, and reads no other bytes. `write` makes new files, one tensor at a time.

**Formula.** Quantised values are read as

    FP8      w[i, j] = e4m3[i, j] * weight_scale_inv[i // 128, j // 128]                               DeepSeek-V3
    MXFP4    w[..., 32 g + j] = e2m1[nibble j of blocks[..., g, :]] * 2^(scales[..., g] - 127)         gpt-oss

Nibbles 2k and 2k + 1 are the lower and the upper half of byte k. e2m1 is +-(0, 0.5, 1, 1.5, 2, 3, 4, 6), and its upper
bit is the sign.

**Layout.** A file is 8 bytes with the length of the header, the header in JSON ({name: dtype, shape, offsets}), and the
values, row-major and little-endian. With several files, model.safetensors.index.json names the file of each tensor.
Values are read with pread: a file that is truncated meanwhile is an error, where a mapped one would end the process.

**Cost.** A block costs a system call for each of its contiguous runs, and for FP8 the scales of its tensor.

**Left out.** Pickled files (pytorch_model.bin), which can run code, and other quantised formats.

**Source.** github.com/huggingface/safetensors; OCP Microscaling Formats (MX) 1.0; DeepSeek-V3, arXiv:2412.19437, 3.3.
"""

import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

import families
import outputs

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
PLAIN = ("F32", "F16", "BF16")  # dtypes of values that are not quantised
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MX_BLOCK = 32  # values that share a scale in MXFP4, in 16 bytes
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# For each axis of a published tensor, from major to minor, the terms of which it is the product, and of each term
# (size, start, stop): its size, and the part of it that is read.
Axes = list[list[tuple[int, int, int]]]


@dataclass(frozen=True)
class Tensor:
    """A tensor in a safetensors file."""

    path: Path
    dtype: str  # a key of DTYPES, or another one of the format
    shape: tuple[int, ...]
    begin: int  # its first byte in the file


class Folder:
    """An open folder of published weights, for a `with` statement: its headers are read, its values are not.

    Attributes:
      values: config.json, of the text model.
      tensors: {name: Tensor} of all files, by their names in the text model.
      identity: a hash of config.json, of all headers, and of 16 blocks of 4 KiB of each file.
      bytes_read: of values, so far.
    """

    def __init__(self, directory: str):
        """Opens a folder.

        Raises:
          ValueError: safetensors is missing, a file is damaged, or files and index do not agree.
          OSError: a file is missing, or cannot be read.
        """
        self.directory, self.bytes_read = Path(directory), 0
        self.values = families.read_model(self.directory)
        self.block = _block_of_fp8(self.values, self.directory / "config.json")
        self.tensors: dict[str, Tensor] = {}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()  # several threads may read
        digest = hashlib.blake2b(json.dumps(self.values, sort_keys=True).encode(), digest_size=8)
        for path, names in _files(self.directory).items():
            header, tensors = _header(path)
            self._add(path, tensors, names)
            digest.update(header + _samples(path))
        self.identity = digest.hexdigest()

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _add(self, path: Path, tensors: dict[str, Tensor], names: set[str] | None) -> None:
        """Adds the tensors of a file. Raises ValueError where they are not those that the index names."""
        for name in sorted(tensors):
            if name in self.tensors:
                raise ValueError(f"{name} is in two files, {self.tensors[name].path.name} and {path.name}: remove one")
            if names is not None and name not in names:
                raise ValueError(f"{path} has {name}, which {INDEX} does not place there: they are of two models")
        for name in sorted((names or set()) - tensors.keys()):
            raise ValueError(f"{self.directory / INDEX} says that {name} is in {path.name}, where it is not")
        self.tensors |= {families.text_name(name): tensor for name, tensor in tensors.items()}

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Collection[str]]]:
        """Returns {name of a stored tensor: (its shape, its dtypes)} of which a published one of `shape` is made.

        It is empty where the tensor is not in the folder. Raises ValueError for a shape that cannot be quantised so.
        """
        if name in self.tensors:
            if self.tensors[name].dtype != "F8_E4M3":
                return {name: (shape, PLAIN)}
            if not self.block:
                raise ValueError(f"{self.directory} has {name} in F8_E4M3, and its config.json has no quant_method=fp8")
            if len(shape) != 2:
                raise ValueError(f"{self.directory} has {name} {list(shape)} in F8_E4M3: only matrices may be")
            scales = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
            return {name: (shape, ("F8_E4M3",)), f"{name}_scale_inv": (scales, PLAIN)}
        if f"{name}_blocks" not in self.tensors:
            return {}
        *outer, summed, other = shape  # in these files the dim that a matmul sums over is the last one
        if summed % MX_BLOCK:
            raise ValueError(f"{self.directory} has {name}_blocks, and {summed} is no multiple of {MX_BLOCK}")
        groups = (*outer, other, summed // MX_BLOCK)
        return {f"{name}_blocks": ((*groups, MX_BLOCK // 2), ("U8",)), f"{name}_scales": (groups, ("U8",))}

    def read(self, name: str, axes: Axes) -> np.ndarray:
        """Returns a block of a published tensor in float32, with a dim for each term of its axes.

        Args:
          name: of the tensor, without the suffixes of a quantised one.

        Raises OSError where the file ends too early, or cannot be read.
        """
        if name not in self.tensors:
            return self._read_mxfp4(name, axes)
        tensor, terms = self.tensors[name], [term for axis in axes for term in axis]
        block = self._pread(tensor, terms).astype(np.float32)
        if tensor.dtype != "F8_E4M3":
            return block
        scale = self.tensors[f"{name}_scale_inv"]
        scales = self._pread(scale, [(size, 0, size) for size in scale.shape]).astype(np.float32)
        places = [_places(axis) // size for axis, size in zip(axes, self.block, strict=True)]
        return block * scales[np.ix_(*places)].reshape(block.shape)

    def _read_mxfp4(self, name: str, axes: Axes) -> np.ndarray:
        """Returns what `read` does. In the file the last two axes are exchanged, and the last one is packed."""
        *front, [summed], other = axes
        size, start, stop = summed
        first, last = start // MX_BLOCK, -(-stop // MX_BLOCK)  # the groups in which the block is
        outer = [term for axis in (*front, other) for term in axis]
        groups = [*outer, (size // MX_BLOCK, first, last)]
        scales = self._pread(self.tensors[f"{name}_scales"], groups).astype(np.int32)
        packed = self._pread(self.tensors[f"{name}_blocks"], [*groups, (MX_BLOCK // 2, 0, MX_BLOCK // 2)])
        nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*scales.shape, MX_BLOCK)
        block = np.ldexp(_E2M1[nibbles], scales[..., None] - 127)
        block = block.reshape(*scales.shape[:-1], -1)[..., start - first * MX_BLOCK :][..., : stop - start]
        return np.moveaxis(block, -1, -1 - len(other))

    def _pread(self, tensor: Tensor, terms: list[tuple[int, int, int]]) -> np.ndarray:
        """Returns a block of a tensor, seen as an array with a dim for each term."""
        dtype, sizes = DTYPES[tensor.dtype], [stop - start for _, start, stop in terms]
        strides = [math.prod(size for size, _, _ in terms[dim + 1 :]) for dim in range(len(terms))]
        inner = len(
            terms
        )  # the dims from here on are read in full, so that they and a part of the one before are a run
        while inner and sizes[inner - 1] == terms[inner - 1][0]:
            inner -= 1
        outer = max(inner - 1, 0)
        starts = np.full(1, sum(start * stride for (_, start, _), stride in zip(terms, strides, strict=True)))
        for size, stride in zip(sizes[:outer], strides[:outer], strict=True):
            starts = (starts[:, None] + np.arange(size) * stride).ravel()
        block = np.empty((len(starts), math.prod(sizes[outer:])), dtype)
        run = block.shape[1] * dtype.itemsize
        content = memoryview(block.view(np.uint8).reshape(-1))
        for number, start in enumerate(starts.tolist()):
            self._fill(content[number * run :][:run], tensor, tensor.begin + start * dtype.itemsize)
        return block.reshape(sizes)

    def _fill(self, content: memoryview, tensor: Tensor, offset: int) -> None:
        """Reads bytes of a file from `offset` on."""
        with self._lock:
            if tensor.path not in self._descriptors:
                self._descriptors[tensor.path] = os.open(tensor.path, os.O_RDONLY)
            self.bytes_read += len(content)
        while len(content):
            count = os.preadv(self._descriptors[tensor.path], [content[: 1 << 30]], offset)
            if not count:
                raise OSError(f"{tensor.path} ends at byte {offset}: it was longer when it was opened")
            content, offset = content[count:], offset + count


def _places(axis: list[tuple[int, int, int]]) -> np.ndarray:
    """The places along an axis of the elements that are read."""
    places = np.zeros(1, np.int64)
    for size, start, stop in axis:
        places = (places[:, None] * size + np.arange(start, stop)).ravel()
    return places


def _block_of_fp8(values: dict, file: Path) -> tuple[int, ...]:
    """The block of FP8 values that share a scale, by config.json; () without FP8. Raises ValueError for other kinds."""
    given = values.get("quantization_config") or {}
    method = given.get("quant_method") if isinstance(given, dict) else given
    if given and method not in ("fp8", "mxfp4"):
        raise ValueError(
            f"{file} has quantization_config with quant_method={method!r}: this program reads fp8 in blocks, mxfp4, "
            "and weights that are not quantised"
        )
    if method != "fp8":
        return ()
    block = given.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ValueError(f"{file} has weight_block_size={block!r}: it must be two whole numbers, as in [128, 128]")
    return tuple(block)


def _files(directory: Path) -> dict[Path, set[str] | None]:
    """{safetensors file: the tensors that the index places there}. Raises as `Folder`."""
    index, single = directory / INDEX, directory / SINGLE
    if not index.exists():
        if single.exists():
            return {single: None}
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        instead = f"only {pickled[0]}, a pickle, which can run code" if pickled else f"neither {SINGLE} nor {INDEX}"
        raise ValueError(f"{directory} has {instead}: save the model as safetensors")
    placed = families.read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise ValueError(f"{index} has no weight_map with the file of each tensor")
    files: dict[Path, set[str]] = {}
    for name, file in placed.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{index} says that {name} is in {file!r}, which is no safetensors file of that folder")
        files.setdefault(directory / file, set()).add(name)
    for path in files:
        if not path.exists():
            raise FileNotFoundError(f"{index} names {path.name}, which is missing: copy the folder again")
    return dict(sorted(files.items()))


def _header(path: Path) -> tuple[bytes, dict[str, Tensor]]:
    """The header of a safetensors file, and its tensors. Raises ValueError where it is not one, or is truncated."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(
            "safetensors is not installed, with which weights are read: pip install -e '.[weights]'"
        ) from None
    if not path.is_file():
        raise ValueError(f"{path} is no ordinary file")
    try:
        with safe_open(path, "numpy"):  # it judges the header, its offsets and the length of the file
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {str(error).partition(chr(10))[0]}") from None
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    begin = 8 + length
    return header, {
        name: Tensor(path, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def _samples(path: Path, number: int = 16, size: int = 4096) -> bytes:
    """Some blocks of a file, evenly spaced: other weights of the same shapes differ in nearly all of them."""
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        return b"".join(os.pread(file.fileno(), size, length * i // number) for i in range(number))


# -- new files


@dataclass(frozen=True)
class New:
    """A tensor that is to be written."""

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write(directory: Path, tensors: list[New], value_of: Callable[[New], np.ndarray], shard_bytes: int) -> None:
    """Writes tensors as safetensors files of at most `shard_bytes`, unless one tensor is larger, with an index.

    Args:
      value_of: called for one tensor at a time, in the order of the files. Its result is cast, to the nearest value.

    Raises OSError where a file cannot be written.
    """
    shards: list[list[New]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(each.num_bytes for each in shards[-1]) + tensor.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        shard = sorted(shard, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)  # so that all are aligned
        header, begin = {"__metadata__": {"format": "pt"}}, 0
        for tensor in shard:
            offsets = [begin, begin := begin + tensor.num_bytes]
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with outputs.replacing(directory / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in shard:
                value = np.ascontiguousarray(value_of(tensor).astype(DTYPES[tensor.dtype]))
                file.write(value.reshape(-1).view(np.uint8).data)
    if len(shards) > 1:
        placed = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.num_bytes for tensor in tensors)
        with outputs.replacing(directory / INDEX) as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": placed}, file, indent=2)
