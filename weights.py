"""Published weights: folders of safetensors files with the names of Hugging Face, to and from our parameters.

    python weights.py show DIR                             what a folder holds, and whether it can be read
    python train.py --weights=DIR --learning_rate=1e-5     train on from it
    python weights.py export CHECKPOINT_DIR OUT            write the result as such a folder

**Idea.** families.py says which published tensor holds which weight, and the order of its dims. `load` makes the shard
of each device from the bytes of that shard alone, so no host ever holds the model. `export` writes one tensor at a
time. All headers are checked before any value is read: each tensor must be there once, in the shape that config.json
implies.

**Cost.** A process reads the bytes of its shards once. It needs the memory of its shards in float32, and once more that
of its shards of one weight, with all layers, and of the tensors that its threads read (benchmarks/import_weights.py).
An export of a checkpoint reads blocks of at most 2 GiB. Where a shard was saved with all layers together, a larger
weight is read once for each of its blocks.

**Left out.** Quantised exports, and the export of arrays whose shards are on several processes.

**Source.** The formats: tensor_files.py. The names: families.py.
"""

import itertools
import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

import anatomy
import checkpoint
import checksums
import command
import families
import outputs
import parameters
import tensor_files
from config import Config
from families import FAMILIES, Family, Row, config_json, differing, family_of, settings, shape_fields
from tensor_files import Folder, New

__all__ = ["check", "export", "load", "settings"]

SHARD_BYTES = 4 * 10**9  # of an exported file, at most, unless one tensor is larger
BLOCK_BYTES = 2**31  # of a checkpoint's weight that is read at a time, at most, unless one tensor needs more
_STRIP = 16
_THREADS = min(8, os.cpu_count() or 1)  # tensors that are read at once
# These are exported in float32 whatever the dtype: the steps of the bias are too small for bfloat16.
_FLOAT32 = frozenset({"selection_bias"})


# -- the dims of a row


def _terms(row: Row) -> list[list[str]]:
    """The axes of a published tensor, each a list of its terms."""
    return [axis.split() for axis in row.dims.split(",")]


def _size(term: str, sizes: dict[str, int]) -> int:
    if ":" in term:
        return int(term.partition(":")[0])
    return sum(sizes[letter] for letter in term.rstrip("~").split("+"))


def _shape(row: Row, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(_size(term, sizes) for term in axis) for axis in _terms(row))


def _letter(term: str, letters: str) -> str:
    """The one of a weight's `letters` that a term has; empty for a numbered one."""
    return next((letter for letter in term.rstrip("~").split("+") if letter in letters), "")


def _interval(term: str, ranges: dict[str, tuple[int, int]], sizes: dict[str, int]) -> tuple[int, int, int]:
    """(size, start, stop): the size of a term, and the part of it that holds the `ranges` of a weight."""
    size, start = _size(term, sizes), 0
    if ":" in term:
        number = int(term.partition(":")[2])
        return size, number, number + 1
    for letter in term.rstrip("~").split("+"):
        if letter in ranges:
            return size, start + ranges[letter][0], start + ranges[letter][1]
        start += sizes[letter]
    raise KeyError(term)


def _halves(size: int, rotary: int) -> np.ndarray:
    """int [size]: the published place of each dim of a head, the last `rotary` of which are adjacent pairs there."""
    plain, pairs = np.split(np.arange(size), [size - rotary])
    return np.concatenate([plain, pairs[0::2], pairs[1::2]])


def _rotary_axis(row: Row, letters: str) -> int | None:
    """The dim of a weight whose pairs are adjacent in the published tensor, among the dims that both have."""
    terms = [term for axis in _terms(row) for term in axis]
    shared = [letter for letter in letters if any(letter == _letter(term, letters) for term in terms)]
    pairs = next((term[-2] for term in terms if term.endswith("~")), None)
    return shared.index(pairs) if pairs in shared else None


# -- our weights in pieces


def _letters(name: str) -> str:
    """The dims of a weight in one layer, with E D in place of Z."""
    return _dims(name).replace("L", "").replace("Z", "ED")


def _dims(name: str) -> str:
    """The dims of a weight, a letter each: the second of two dims D is d."""
    return anatomy.WEIGHTS[name].dims.replace("DD", "Dd")


def _stacks(config: Config) -> Iterator[tuple[str, str, list[int]]]:
    """(path, name, numbers of the layers) of each of our weights; there are no numbers outside the layers."""
    for name in anatomy.other_weights(config):
        yield name, name, []
    for stack, (_, experts) in anatomy.layer_stacks(config).items():
        for name in anatomy.layer_weights(anatomy.stack_config(config, stack), experts=experts):
            yield f"{stack}.{name}", name, list(anatomy.layer_numbers(config, stack))


def _sizes(path: str, config: Config) -> dict[str, int]:
    """The size of each dim of one of our weights, without padding, by its letter in `_dims`."""
    return anatomy.sizes(anatomy.config_of(config, path), padded=False) | {"d": config.model_dim}


def _pieces(path: str, ranges, config: Config) -> Iterator[tuple]:
    """The pieces of a block of one of our weights that are in one published tensor each; padding is in none.

    The matrices of experts are one dim Z = E * D, so a piece has the rows of one expert.

    Args:
      path: of the weight, as in layers.w_q.
      ranges: (start, stop) for each dim of the weight.

    Yields (place in the block, layer, expert, {letter: (start, stop)}) with the dims of `_letters`.
    """
    dims, D, sizes = _dims(path.rpartition(".")[2]), anatomy.sizes(config)["D"], _sizes(path, config)
    in_layers = dims[0] == "L"
    inner = dict(zip(dims, ranges, strict=True))
    layers = range(*inner.pop("L")) if in_layers else range(1)
    first, last = inner.pop("Z", (0, 1))
    in_model = lambda dim, start, stop: (start, min(stop, sizes[dim]) if dim in "d" + anatomy.PADDED_DIMS else stop)
    for (number, layer), e in itertools.product(enumerate(layers), range(first // D, -(-last // D))):
        low, high = max(first, e * D), min(last, (e + 1) * D)
        piece = {"D": (low - e * D, high - e * D)} | inner if "Z" in dims else inner
        piece = {dim: in_model(dim, *each) for dim, each in piece.items()}
        offsets = [low - first if "Z" in dims else 0] + [0] * len(piece)
        slices = [slice(at, at + stop - start) for at, (start, stop) in zip(offsets, piece.values(), strict=False)]
        if all(start < stop for start, stop in piece.values()):
            of_expert = {"E": (e, e + 1)} | piece if "Z" in dims else piece
            yield (*([number] if in_layers else []), *slices), layer, e, of_expert


# -- what must be in a folder


@dataclass(frozen=True)
class Entry:
    """A published tensor, or a part of one, and the piece of our weights that it holds."""

    name: str  # of the published tensor
    row: Row
    path: str  # of our weight: embed, layers.w_q
    layer: int  # in the stack of our weight; 0 outside the layers
    expert: int | None  # None if the tensor holds all experts, or none


def entries(config: Config, family: Family) -> list[Entry]:
    """Returns the published tensors of a model, weight by weight. Raises ValueError for a weight of another family."""
    rows, listed = _rows(family), []
    for path, ours, layers in _stacks(config):
        if ours not in rows:
            raise ValueError(f"{family.architecture} has no weight {ours}, which this model has")
        row = rows[ours]
        experts = range(config.num_experts) if "{e}" in row.published else [None]
        for (place, i), e in itertools.product(enumerate(layers or [-1]), experts):
            listed.append(Entry(row.published.format(i=i, e=e, L=config.num_layers), row, path, place, e))
    return listed


def _copies(config: Config, family: Family) -> dict[str, Entry]:
    """{weight: the tensor that holds it a second time}, for the multi-token prediction module."""
    rows = family.copies if config.mtp else ()
    return {row.ours: Entry(row.published.format(L=config.num_layers), row, row.ours, 0, None) for row in rows}


def _rows(family: Family) -> dict[str, Row]:
    return {row.ours: row for row in family.rows}


def examined(directory: str, config: Config) -> tuple[str, list[str]]:
    """Returns (the identity of a folder, the notes of `check`), for a model. Raises as `load`; no value is read."""
    with Folder(directory) as folder:
        return folder.identity, check(folder, config)


def check(folder: Folder, config: Config) -> list[str]:
    """Checks all tensors of a folder against the model.

    Returns a note for each value of config.json that the model overrides, and for each kind of tensor that is skipped.

    Raises ValueError for another shape of the model than that of config.json, for a missing, an unknown or a wrongly
    shaped tensor, and for a dtype that is not read.
    """
    overridden = []
    for name, both in differing(settings(str(folder.directory)), config).items():
        if name in shape_fields():
            raise ValueError(f"{folder.directory} has by its config.json {both}")
        overridden.append(f"overrides config.json, which has {both}")
    family = FAMILIES[family_of(folder.values, str(folder.directory / "config.json"))]
    used, missing = set(), []
    for entry in entries(config, family):
        name, parts = entry.name, folder.parts(entry.name, _shape(entry.row, _sizes(entry.path, config)))
        missing += [] if parts else [name]
        for part, (wanted, dtypes) in parts.items():
            if part not in folder.tensors:
                raise ValueError(f"{folder.directory} has {name} quantised, but no {part}")
            tensor = folder.tensors[part]
            if tensor.shape != wanted:
                raise ValueError(
                    f"{tensor.path} has {part} {list(tensor.shape)}, and by config.json it must be {list(wanted)}"
                )
            if tensor.dtype not in dtypes:
                raise ValueError(f"{tensor.path} has {part} in {tensor.dtype}: this program reads {', '.join(dtypes)}")
            used.add(part)
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ValueError(f"{folder.directory} has no {missing[0]}{more}, which config.json promises")
    return overridden + _skipped(folder, family, config, used)


def _skipped(folder: Folder, family: Family, config: Config, used: set[str]) -> list[str]:
    """Notes on the tensors that are not used. Raises ValueError for one that nothing explains."""
    reasons = ({} if config.mtp else family.skipped_without_mtp) | family.skipped
    if config.tied_embeddings:
        reasons[r"lm_head\.weight"] = "the unembedding is the embedding"
    if config.num_kv_shared_layers:
        numbers = "|".join(map(str, range(config.num_layers)[-config.num_kv_shared_layers :]))
        unused = rf"model\.layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
        reasons[unused] = "their layers share the keys and values of another one"
    skipped: dict[str, list[str]] = {}
    for name in sorted(folder.tensors.keys() - used):
        matches = lambda pattern, name=name: re.fullmatch(pattern.replace("{L}", str(config.num_layers)), name)
        why = next((why for pattern, why in reasons.items() if matches(pattern)), None)
        if why is None:
            raise ValueError(
                f"{folder.tensors[name].path} has {name} {list(folder.tensors[name].shape)}, which "
                f"{family.architecture} does not have with this config.json"
            )
        skipped.setdefault(why, []).append(name)
    return [
        f"skipped, as {why}: {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}"
        for why, names in skipped.items()
    ]


# -- import


def load(directory: str, config: Config, mesh: Mesh) -> parameters.Params:
    """Returns the parameters in a folder of published weights, in float32 and laid out on the mesh.

    Each process reads the bytes of its own shards.

    Raises:
      ValueError: the folder is damaged, or not of this model; nothing is read then.
      OSError: a file is missing, or cannot be read.
    """
    with Folder(directory) as folder:
        check(folder, config)
        return read(folder, config, mesh)


def read(folder: Folder, config: Config, mesh: Mesh) -> parameters.Params:
    """Returns what `load` does, from a folder that is open and checked."""
    rows = _rows(FAMILIES[folder.values["model_type"]])
    layers = {path: numbers for path, _, numbers in _stacks(config)}

    def place(path, shape, spec):
        path = jax.tree_util.keystr(path, simple=True, separator=".")
        layout, row = NamedSharding(mesh, spec), rows[path.rpartition(".")[2]]
        ranges_of = lambda index: tuple(each.indices(size)[:2] for each, size in zip(index, shape.shape, strict=True))
        local = {ranges_of(index) for index in layout.addressable_devices_indices_map(shape.shape).values()}
        blocks = _blocks(folder, row, path, layers[path], sorted(local), config)
        return jax.make_array_from_callback(shape.shape, layout, lambda index: blocks[ranges_of(index)])

    return jax.tree.map_with_path(place, parameters.param_shapes(config), parameters.param_specs(config))


def _blocks(folder: Folder, row: Row, path: str, layers: list[int], blocks, config) -> dict[tuple, np.ndarray]:
    """Returns {ranges: block} of one of our weights, in float32. What several blocks need of a tensor is read at once.

    Args:
      path: of the weight.
      layers: the numbers of the layers of its stack.
      blocks: the ranges of each block, (start, stop) for each dim of the weight.
    """
    arrays = {ranges: np.zeros([stop - start for start, stop in ranges], np.float32) for ranges in blocks}
    parts: dict[tuple[int, int], list] = {}  # {(layer, expert): parts of our blocks that are in that tensor}
    for ranges, array in arrays.items():
        for place, layer, e, inner in _pieces(path, ranges, config):
            parts.setdefault((layer, e), []).append((array, place, inner))
    sizes = _sizes(path, config)
    volume = lambda ranges: math.prod(stop - start for start, stop in ranges.values())

    def read_tensor(numbers: tuple[int, int]) -> None:
        wanted, (layer, e) = parts[numbers], numbers
        name = row.published.format(i=layers[layer] if layers else 0, e=e, L=config.num_layers)
        ranges = [inner for _, _, inner in wanted]
        box = {dim: (min(r[dim][0] for r in ranges), max(r[dim][1] for r in ranges)) for dim in ranges[0]}
        if volume(box) == sum(map(volume, ranges)):  # the parts fill the box
            _copy(folder, name, row, box, wanted, sizes, config)
        else:
            for part in wanted:
                _copy(folder, name, row, part[2], [part], sizes, config)

    with ThreadPoolExecutor(_THREADS) as pool:  # reads and copies hold no lock of Python
        list(pool.map(read_tensor, parts))
    return arrays


def _copy(folder: Folder, name: str, row: Row, box: dict, parts: list, sizes: dict, config: Config) -> None:
    """Reads a box of a published tensor, and copies each part of it to its place in one of our blocks."""
    axes = [[_interval(term, box, sizes) for term in axis] for axis in _terms(row)]
    ours, shared = _to_ours(folder.read(name, axes), row, config)
    for array, place, inner in parts:
        start_of = lambda dim, inner=inner: inner[dim][0] - box[dim][0]
        part = ours[tuple(slice(start_of(dim), start_of(dim) + inner[dim][1] - inner[dim][0]) for dim in shared)]
        to = array[(*place, ...)]
        part = part.reshape(to.shape)
        if not part.ndim:
            to[...] = part
            continue
        # A transposed array is copied in strips, which stay in the cache.
        axis = max(range(part.ndim), key=lambda dim: part.strides[dim])
        to, part = np.moveaxis(to, axis, 0), np.moveaxis(part, axis, 0)
        for begin in range(0, len(part), _STRIP):
            to[begin : begin + _STRIP] = part[begin : begin + _STRIP]


def _to_ours(published: np.ndarray, row: Row, config: Config) -> tuple[np.ndarray, str]:
    """Returns a published block, which has a dim for each term, in the order of our dims, and those that it has."""
    letters = _letters(row.ours)
    has = [_letter(term, letters) for axis in _terms(row) for term in axis]
    block = published.reshape([size for size, letter in zip(published.shape, has, strict=True) if letter])
    has = [letter for letter in has if letter]
    shared = "".join(letter for letter in letters if letter in has)
    block = block.transpose([has.index(letter) for letter in shared])
    if (axis := _rotary_axis(row, letters)) is not None:
        block = block.take(_halves(block.shape[axis], config.rope_head_dim), axis)
    block = block / _divisor(row, config) if row.over_root else block
    return block + np.float32(row.plus) if row.plus else block, shared


def _divisor(row: Row, config: Config) -> np.float32:
    return np.float32(math.sqrt(anatomy.sizes(config, padded=False)[row.over_root]) if row.over_root else 1.0)


# -- export


def export(
    params: parameters.Params, config: Config, out_dir: str, dtype: str = "bfloat16", like: dict | None = None
) -> None:
    """Writes parameters as a folder of published weights: config.json, and safetensors files with an index.

    Args:
      params: numpy arrays, or JAX's, whose shards are all on this process.
      out_dir: a new folder, or an empty one.
      dtype: bfloat16 or float32.
      like: the config.json of the model that the training began from, see families.config_json.

    Raises:
      ValueError: no published family has this model, or the folder is not empty.
      OSError: it cannot be written.
    """

    def piece(path: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        array = operator.attrgetter(path)(params)
        if isinstance(array, np.ndarray):
            return array[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
        return np.asarray(_slice(array, starts, sizes))

    write(piece, config, out_dir, dtype, like)


@partial(jax.jit, static_argnums=2)
def _slice(array: jax.Array, starts, sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(array, starts, sizes)


def write(
    piece: Callable,
    config: Config,
    out_dir: str,
    dtype: str,
    like: dict | None = None,
    verify: Callable[[], None] = lambda: None,
) -> None:
    """Does what `export` does, with a function in place of the parameters.

    Args:
      piece: (path of a weight as in layers.w_q, starts, sizes) -> that block of the weight, as a numpy array.
      verify: called when all values are written; if it raises, the folder has no config.json.
    """
    values = config_json(config, like)
    family, folder = FAMILIES[values["model_type"]], Path(out_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{out_dir} is there already, and is not empty: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    sources = {}
    copies = _copies(config, family)
    for entry in entries(config, family):
        sources.setdefault(entry.name, []).append(entry)
        if entry.path in copies:  # directly behind, while its values are in memory
            sources[copies[entry.path].name] = [copies[entry.path]]

    def new(name: str, entry: Entry) -> New:
        stored = "F32" if entry.row.ours in _FLOAT32 or dtype == "float32" else "BF16"
        return New(name, stored, _shape(entry.row, _sizes(entry.path, config)))

    def value_of(tensor: New) -> np.ndarray:
        published = np.empty(tensor.shape, np.float32)
        for entry in sources[tensor.name]:
            _put(entry, piece, published, config)
        return published

    tensors = [new(name, each[0]) for name, each in sources.items()]
    tensor_files.write(folder, tensors, value_of, SHARD_BYTES)
    verify()
    values["torch_dtype"] = dtype
    with outputs.replacing(folder / "config.json") as file:  # last: without it the folder is refused
        json.dump(values, file, indent=2)


def _put(entry: Entry, piece: Callable, published: np.ndarray, config: Config) -> None:
    """Puts a piece of our weights into a published tensor: the inverse of `_to_ours`."""
    dims, sizes, D = _dims(entry.row.ours), _sizes(entry.path, config), anatomy.sizes(config)["D"]
    ranges = {letter: (0, sizes[letter]) for letter in dims}
    if dims[0] == "L":
        ranges["L"] = entry.layer, entry.layer + 1
    if "Z" in dims:
        first, last = (0, config.num_experts) if entry.expert is None else (entry.expert, entry.expert + 1)
        ranges["Z"] = first * D, last * D
    block = piece(entry.path, *zip(*((start, stop - start) for start, stop in ranges.values()), strict=True))
    if "Z" in dims:
        block = block.reshape(-1, D, block.shape[-1])[:, : sizes["D"]]
    letters = _letters(entry.row.ours)
    unsharded = {letter: (0, sizes[letter]) for letter in letters}
    slots = [[_interval(term, unsharded, sizes) for term in axis] for axis in _terms(entry.row)]
    slots = [slot for axis in slots for slot in axis]
    has = [_letter(term, letters) for axis in _terms(entry.row) for term in axis]
    shared = [letter for letter in letters if letter in has]
    block = (block - np.float32(entry.row.plus)) * _divisor(entry.row, config)
    block = block.reshape([sizes[letter] for letter in shared])
    if (axis := _rotary_axis(entry.row, letters)) is not None:
        block = block.take(np.argsort(_halves(block.shape[axis], config.rope_head_dim)), axis)
    block = block.transpose([shared.index(letter) for letter in has if letter])
    places = (slice(start, stop) for _, start, stop in slots)
    view = published.reshape([size for size, _, _ in slots])[(..., *places)]
    view[...] = block.reshape(view.shape)


class Blocks:
    """The weights in a checkpoint, read in blocks of at most BLOCK_BYTES, each element once, and verified.

    Attributes:
      config: the model of the checkpoint.
    """

    def __init__(self, stored: checkpoint.Stored):
        """Raises ValueError for a checkpoint whose model no Config can have."""
        names = [*families.model_fields(), "seq_len", "dim_multiple", "mtp"]
        self.config = Config(**{name: stored.values[name] for name in names if name in stored.values})
        self.shapes = parameters.param_shapes(self.config)
        self.stored, self.sums = stored, Counter()
        self.blocks: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}  # {path: (its first indices, the block)}

    def piece(self, path: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        """Returns a block of a weight, as `write` asks for it: one weight after the other, each in order."""
        begin, block = self.blocks.get(path, (starts, np.empty([0] * len(sizes))))
        inside = [start - first for start, first in zip(starts, begin, strict=True)]
        if any(start + size > have for start, size, have in zip(inside, sizes, block.shape, strict=True)):
            others = [(name, each) for name, each in self.blocks.items() if name != path]
            self.blocks = dict(others[-1:])  # a published tensor has at most two of our weights
            self.blocks[path] = starts, self._read(path, starts, sizes)
            inside, (_, block) = [0] * len(starts), self.blocks[path]
        return block[tuple(slice(start, start + size) for start, size in zip(inside, sizes, strict=True))]

    def _read(self, path: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        shape = operator.attrgetter(path)(self.shapes).shape
        row_bytes = [4 * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        dim = 0 if sizes[1:] == shape[1:] or row_bytes[0] <= BLOCK_BYTES else 1  # layers, or else rows of one layer
        pieces = max(BLOCK_BYTES // row_bytes[dim] // sizes[dim], 1)  # whole ones: no element is read twice
        size = min(pieces * sizes[dim], shape[dim] - starts[dim])
        sizes = (*sizes[:dim], size, *shape[dim + 1 :])
        block = self.stored.read(f"params.{path}", (*starts[: dim + 1], *[0] * (len(shape) - dim - 1)), sizes)
        first = sum(start * row // 4 for start, row in zip(starts[: dim + 1], row_bytes, strict=False))
        self.sums[path] = (self.sums[path] + checksums.checksum_of_block(block, first)) % 2**32
        return block

    def verify(self) -> None:
        """Raises OSError where a weight is not what was saved. All of them must have been read."""
        for path, total in self.sums.items():
            if (saved := self.stored.sums.get(f"params.{path}", total)) != total:
                raise OSError(
                    f"the checkpoint {self.stored.path} is damaged: params.{path} is not what was saved, by its "
                    f"checksum {total:#010x} in place of {saved:#010x}"
                )


def export_checkpoint(directory: str, out_dir: str, dtype: str, like: str = "") -> None:
    """Exports the newest checkpoint in a folder, in blocks of its weights. Raises as `export`, and for a damaged one.

    Args:
      like: the folder of published weights that the training began from, see `export`; by default the run's --weights,
        where it is still there.
    """
    stored = checkpoint.stored(directory)
    blocks, began_from = Blocks(stored), like or stored.values.get("weights", "")
    file = Path(began_from, "config.json")
    values = families.read_model(began_from) if began_from and (like or file.exists()) else None
    if values is None and (separator := checkpoint.separator(directory)) is not None:
        values = {"bos_token_id": separator, "eos_token_id": separator}
    family = FAMILIES[config_json(blocks.config, values)["model_type"]]
    without_mtp = blocks.config.mtp and "norm_mtp" not in _rows(family)
    config = replace(blocks.config, mtp=False) if without_mtp else blocks.config
    write(blocks.piece, config, out_dir, dtype, values, blocks.verify)
    notes = ", with the tokenizer of its corpus" if checkpoint.copy_tokenizer(directory, out_dir) else ""
    notes += f", without multi-token prediction, which {family.architecture} does not have" if without_mtp else ""
    print(f"exported   step {stored.step} of {directory} to {out_dir}, in {dtype}{notes}")


def show(directory: str) -> None:
    """Prints what is in a folder of published weights. Raises ValueError and OSError where `load` would refuse it."""
    with Folder(directory) as folder:
        kind = family_of(folder.values, str(folder.directory / "config.json"))
        files = {tensor.path for tensor in folder.tensors.values()}
        dtypes = Counter(tensor.dtype for tensor in folder.tensors.values())
        num_bytes = sum(path.stat().st_size for path in files)
        print(f"family     {kind}: {FAMILIES[kind].architecture}")
        print(f"files      {len(files)} of {num_bytes / 1e9:,.3g} GB, {len(folder.tensors):,} tensors: ", end="")
        print(", ".join(f"{number:,} in {dtype}" for dtype, number in dtypes.most_common()))
        fields = settings(directory)
        switch = {True: lambda name: f"--{name}", False: lambda name: f"--no-{name}"}
        as_flag = lambda name, value: switch[value](name) if isinstance(value, bool) else f"--{name}={value}"
        print(f"model      {' '.join(as_flag(name, value) for name, value in fields.items())}")
        config = Config(**fields)
        notes = check(folder, config)
        num_params = sum(math.prod(shape.shape) for shape in jax.tree.leaves(parameters.param_shapes(config)))
        print(f"parameters {num_params:,}")
        for note in notes:
            print(f"note       {note}")


def main() -> None:
    parser = command.parser(__file__)
    commands = parser.add_subparsers(dest="command", required=True)
    show_parser = commands.add_parser("show", help="print what a folder holds, and whether it can be read")
    show_parser.add_argument("directory", type=command.path, metavar="DIR", help="folder of published weights")
    export_parser = commands.add_parser("export", help="write the newest checkpoint of a run as published weights")
    export_parser.add_argument("checkpoint_dir", metavar="CHECKPOINT_DIR", help="the --checkpoint_dir of the run")
    export_parser.add_argument("out", type=command.path, metavar="OUT", help="a new folder")
    export_parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="[%(default)s]")
    like_help = "folder of published weights whose special tokens and longest sequence OUT gets [the run's --weights]"
    export_parser.add_argument("--like", type=command.path, default="", metavar="DIR", help=like_help)
    args = command.arguments(parser)
    if args.command == "show":
        show(args.directory)
    else:
        export_checkpoint(args.checkpoint_dir, args.out, args.dtype, args.like)


if __name__ == "__main__":
    command.run(main)
