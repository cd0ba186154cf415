"""A compiled program as text, read: computations, instructions, what they call and how large their results are. No jax.

`compiled.as_text()` is XLA's HLO: computations, of which one is the ENTRY, each with its instructions,

    %name = shape opcode(operands), attribute=..., metadata={...}, backend_config={...}

in the order of execution where the first line says is_scheduled=true. A shape has its layout behind it, and in it the
memory: f32[8,128]{1,0:T(8,128)S(1)} lies in VMEM. An instruction may go over several lines. What cannot be read here is
an error that names the line. schedule.py makes a timeline of it.

What a program computes of a few integers, the number of a layer for one, can be known without running it: `evaluate`.
"""

import json
import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    dtype: str
    dims: tuple[int, ...]
    space: int  # 0 HBM, 1 VMEM, 5 the host's memory; others are scalars' and semaphores'

    @property
    def nbytes(self) -> float:
        bits = {"pred": 8, "token": 0, "opaque": 0}.get(self.dtype)
        return math.prod(self.dims) * (int(re.search(r"\d+", self.dtype)[0]) if bits is None else bits) / 8


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # those of a tuple, nested or not, one after another
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses: a constant's value, a parameter's number
    called: dict[str, tuple[str, ...]]  # computations, by attribute: calls, body, condition, ...
    attributes: dict[str, str]  # all others, as they stand there
    config: dict  # backend_config
    op_name: str
    source: str  # file:line
    groups: tuple[tuple[int, ...], ...]  # replica_groups
    pairs: tuple[tuple[int, ...], ...]  # source_target_pairs
    channel: int | None
    thread: str  # async_execution_thread
    after: tuple[str, ...]  # control-predecessors
    line: int

    @property
    def cycles(self) -> int | None:
        """XLA's estimate; 2**63 - 1 stands for none."""
        cycles = int(self.config.get("window_config", {}).get("estimated_cycles", -1))
        return cycles if 0 <= cycles < 2**62 else None


@dataclass(frozen=True)
class Program:
    entry: str
    computations: dict[str, dict[str, Instruction]]  # in the order of the schedule
    roots: dict[str, str]

    def root(self, computation: str) -> Instruction:
        return self.computations[computation][self.roots[computation]]


TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]', re.DOTALL)
SHAPE = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
CALLED = ("calls", "body", "condition", "to_apply", "branch_computations", "true_computation", "false_computation")
CALLED += ("called_computations",)
START = re.compile(r"\s+(ROOT )?%(\S+) = ")


def brackets(text: str, begin: int = 0) -> Iterator[tuple[re.Match, int]]:
    """The brackets and commas that stand in no string, and how many brackets are open behind each."""
    depth = 0
    for token in TOKEN.finditer(text, begin):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        yield token, depth


def closing(text: str, begin: int) -> int:
    """Where the bracket that opens at `begin` is closed, and one further."""
    for token, depth in brackets(text, begin):
        if not depth:
            return token.end()
    raise ValueError("a bracket stays open")


def split(text: str) -> list[str]:
    """At the commas that stand in no bracket and in no string."""
    begin, depth, parts = 0, 0, []
    for token, depth in brackets(text):
        if token[0] == "," and not depth:
            parts.append(text[begin : token.start()].strip())
            begin = token.end()
    if depth:
        raise ValueError("a bracket stays open, or is closed twice")
    return [part for part in (*parts, text[begin:].strip()) if part]


def transposed(dims: list[int], order: list[int]) -> list[int]:
    """0, 1, 2, ... in an array of `dims`, as they stand when its axes are put in this order."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    ids = [0]
    for i in order:
        ids = [n + k * strides[i] for n in ids for k in range(dims[i])]
    return ids


IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
MESH = rf"mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\({IOTA}\))? ?\{{((?:'\w+',?)*)\}}"


def read_groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """{{0,1},{2,3}}; {}: all in one; [2,4]<=[4,2]T(1,0): of an iota, transposed; mesh['x'=2,'y'=4] {'y'}: along y.

    A mesh may have its devices in another order: mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}.
    """
    if text.startswith("{"):
        groups = tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text))
        return groups or (tuple(range(num_devices)),)

    def iota(dims: str, order: str | None) -> list[int]:
        sizes = [int(n) for n in dims.split(",")]
        return transposed(sizes, [int(n) for n in order.split(",")] if order else list(range(len(sizes))))

    if match := re.fullmatch(rf"\[([\d,]+)\]<={IOTA}", text):
        ids, size = iota(match[2], match[3]), int(match[1].split(",")[-1])
    elif match := re.fullmatch(MESH, text):
        axes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])]
        along, names, dims = re.findall(r"'(\w+)'", match[4]), [name for name, _ in axes], [size for _, size in axes]
        order = [i for i, name in enumerate(names) if name not in along] + [names.index(name) for name in along]
        ids, size = transposed(dims, order), math.prod(dict(axes)[name] for name in along)
        if match[2]:
            devices = iota(match[2], match[3])
            ids = [devices[place] for place in ids]
    else:
        raise ValueError(f"replica_groups={text} is of a form that is not known here")
    return tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))


def read_instruction(text: str, line: int, num_devices: int, sources: dict[str, str]) -> Instruction:
    start = START.match(text)
    rest = text[start.end() :]
    end = closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opening = re.compile(r"\s*([a-z][a-z0-9-]*)(?=\()").match(rest, end)
    if end < 0 or not opening:
        raise ValueError("no opcode behind the type")
    last = closing(rest, opening.end())
    raw = rest[opening.end() + 1 : last - 1]
    attributes = {}
    for part in split(rest[last:]):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is no attribute")
        attributes[key] = value
    config = attributes.pop("backend_config", "{}")
    config = json.loads(json.loads(config) if config.startswith('"') else config)
    metadata = attributes.pop("metadata", "")
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', metadata)
    frame = re.search(r"stack_frame_id=(\d+)", metadata)
    source = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', metadata)
    shapes = tuple(
        Shape(dtype, tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n), int(space[1]) if space else 0)
        for dtype, dims, layout in SHAPE.findall(rest[:end])
        for space in [re.search(r"S\((\d+)\)", layout)]
    )
    unknown = [s.dtype for s in shapes if not re.fullmatch(r"pred|token|opaque|(bf|[sufc])\d+\w*", s.dtype)]
    if unknown or len(shapes) != len(re.findall(r"\w\[", rest[:end])):
        raise ValueError(f"{unknown[0] if unknown else rest[:end]} is no type that is known here")
    groups = attributes.pop("replica_groups", None)
    if groups and "device_ids" in attributes:
        groups += f", device_ids={attributes.pop('device_ids')}"
    pairs = re.findall(r"\{(\d+),(\d+)\}", attributes.pop("source_target_pairs", ""))
    channel = attributes.pop("channel_id", None)
    names = lambda text: tuple(re.findall(r"%([^\s,(){}]+)", text))
    return Instruction(
        name=start[2],
        opcode=opening[1],
        shapes=shapes,
        operands=names(raw),
        literal=raw,
        called={key: names(attributes.pop(key)) for key in CALLED if key in attributes},
        attributes=attributes,
        config=config,
        op_name=op_name[1] if op_name else "",
        source=f"{source[1]}:{source[2]}" if source else sources.get(frame[1], "") if frame else "",
        groups=read_groups(groups, num_devices) if groups is not None else (),
        pairs=tuple((int(a), int(b)) for a, b in pairs),
        channel=int(channel) if channel else None,
        thread=attributes.pop("async_execution_thread", '"main"').strip('"'),
        after=names(attributes.pop("control-predecessors", "")),
        line=line,
    )


def read_sources(text: str) -> dict[str, str]:
    """{stack frame: file:line} from the tables in front of the computations."""

    def table(title: str) -> dict[str, str]:
        section = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return dict(line.split(" ", 1) for line in section[1].splitlines()) if section else {}

    files, places = table("FileNames"), {}
    for number, location in table("FileLocations").items():
        found = re.search(r"file_name_id=(\d+).* line=(\d+)", location)
        places[number] = f"{files.get(found[1], '')[1:-1]}:{found[2]}" if found else ""
    frames = {number: re.search(r"file_location_id=(\d+)", frame) for number, frame in table("StackFrames").items()}
    return {number: places.get(location[1], "") for number, location in frames.items() if location}


def parse(text: str) -> Program:
    """Raises ValueError for a text that is no schedule, or a line that cannot be read, with its number."""
    lines = re.sub(r"/\*index=\d+\*/", "", text).splitlines()
    header = lines[0] if lines else ""
    if "is_scheduled=true" not in header:
        raise ValueError("no schedule: is_scheduled=true is not in its first line; compiled.as_text() has it")
    num_devices = math.prod(map(int, re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)))
    sources = read_sources(text)
    computations, roots, current, entry = {}, {}, None, None
    pending: list[str] = []  # the lines of an instruction: strings and JSON in it may have several

    def is_open() -> bool:
        *_, depth = 0, *(depth for _, depth in brackets("\n".join(pending)))
        return depth > 0

    def flush(number: int) -> None:
        if not pending:
            return
        line, whole = number - len(pending), "\n".join(pending)
        try:
            read = read_instruction(whole, line, num_devices, sources)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {line}: {error}: {whole.strip()[:80]}") from None
        if read.name in computations[current]:
            raise ValueError(f"line {line}: %{read.name} is there twice")
        computations[current][read.name] = read
        if START.match(whole)[1]:
            roots[current] = read.name
        pending.clear()

    for number, line in enumerate(lines, 1):
        if current is None:
            if found := re.fullmatch(r"(ENTRY )?%(\S+) \(.*\{", line):
                current = found[2]
                computations[current] = {}
                entry = current if found[1] else entry
            elif line.startswith((" ", "%", "ENTRY")):
                raise ValueError(f"line {number}: no computation begins here: {line.strip()[:80]}")
        elif START.match(line):
            flush(number)
            pending.append(line)
        elif re.fullmatch(r"\}(, execution_thread=\"\w+\")?", line) and not is_open():
            flush(number)
            if current not in roots:
                raise ValueError(f"line {number}: {current} ends without a ROOT")
            current = None
        elif is_open():
            pending.append(line)
        elif line.strip():
            raise ValueError(f"line {number}: no instruction: {line.strip()[:80]}")
    if current is not None or entry is None:
        raise ValueError(f"line {len(lines)}: the text ends before its ENTRY computation does")
    for name, instructions in computations.items():
        for instruction in instructions.values():
            for called in (n for names in instruction.called.values() for n in names):
                if called not in computations:
                    raise ValueError(f"line {instruction.line}: there is no computation {called}")
            for operand in instruction.operands:
                if operand not in instructions:
                    raise ValueError(f"line {instruction.line}: there is no %{operand} in {name}")
    return Program(entry, computations, roots)


# -- integers

MOST = 4096  # elements of an array whose values are followed


@dataclass(frozen=True)
class Numbers:
    """Values of an array of integers or, as 0 and 1, of truth values."""

    dims: tuple[int, ...]
    values: tuple[int, ...]  # in the order of rows


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # rounded towards zero


ELEMENTWISE = {
    "abs": abs,
    "add": operator.add,
    "and": operator.and_,
    "clamp": lambda low, a, high: min(max(a, low), high),
    "divide": _divide,
    "maximum": max,
    "minimum": min,
    "multiply": operator.mul,
    "negate": operator.neg,
    "not": operator.invert,
    "or": operator.or_,
    "remainder": lambda a, b: a - _divide(a, b) * b,
    "select": lambda which, a, b: a if which else b,
    "subtract": operator.sub,
    "xor": operator.xor,
}
COMPARE = {"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt}
COMPARE["GE"] = operator.ge
SAME = {"copy", "bitcast", "convert", "reshape", "optimization-barrier", "opt-barrier"}


def _in_range(n: int, dtype: str) -> int:
    """As many bits of it as the type has."""
    bits = 1 if dtype == "pred" else int(dtype[1:])
    n %= 2**bits
    return n - 2**bits if dtype[0] == "s" and n >= 2 ** (bits - 1) else n


def evaluate(program: Program, instruction: Instruction, operands: Sequence) -> Numbers | tuple | None:
    """The integers or truth values that an instruction has as its result, if they follow from those of its operands.

    Args:
      operands: of each its numbers, a tuple of such values, or None, which is not known.

    Returns:
      None for what is not known: floats, more than MOST elements, what is divided by 0, operations that do not stand
      here, as slices of more than one dim.
    """
    opcode, attributes, shapes = instruction.opcode, instruction.attributes, instruction.shapes
    followed = [re.fullmatch(r"pred|[su]\d+", s.dtype) and math.prod(s.dims) <= MOST for s in shapes]
    if opcode == "fusion" and any(followed):
        (called,) = instruction.called["calls"]
        values = {}
        for name, within in program.computations[called].items():
            if within.opcode == "parameter":
                values[name] = operands[int(within.literal)]
            else:
                values[name] = evaluate(program, within, [values[n] for n in within.operands])
        return values[program.roots[called]]
    if opcode == "tuple":
        return tuple(operands)
    if opcode == "get-tuple-element":
        return operands[0][int(attributes["index"])] if isinstance(operands[0], tuple) else None
    if len(shapes) != 1 or not followed[0]:
        return None
    (shape,) = shapes
    size = math.prod(shape.dims)
    result = lambda values: Numbers(shape.dims, tuple(_in_range(n, shape.dtype) for n in values))
    if opcode == "constant":
        words = re.findall(r"-?\d+|true|false", instruction.literal)
        values = [{"true": 1, "false": 0}.get(word) if word.isalpha() else int(word) for word in words]
        return result(values) if len(values) == size else None
    if opcode == "iota" and len(shape.dims) == 1:
        return result(range(size))
    if not operands or not all(isinstance(operand, Numbers) for operand in operands):
        return None
    first = operands[0]
    if opcode in ELEMENTWISE or opcode == "compare":
        of_each = COMPARE[attributes["direction"]] if opcode == "compare" else ELEMENTWISE[opcode]
        each = [x.values if x.dims else x.values * size for x in operands]  # of clamp and select some may be scalars
        try:
            return result([of_each(*numbers) for numbers in zip(*each, strict=True)])
        except ZeroDivisionError:
            return None
    if opcode in SAME and len(first.values) == size and sum(n > 1 for n in first.dims) <= 1:  # more may be transposed
        to_pred = opcode == "convert" and shape.dtype == "pred"
        return result([n != 0 for n in first.values] if to_pred else first.values)
    if opcode == "broadcast" and len(first.values) == 1:
        return result(first.values * size)
    if opcode == "dynamic-slice" and len(first.dims) == 1:
        (start,) = operands[1].values
        start = min(max(start, 0), len(first.values) - size)
        return result(first.values[start : start + size])
    return None


# -- matmuls


def matmul_flops(program: Program, computation: dict[str, Instruction], instruction: Instruction) -> dict[int, float]:
    """{bits of an element: FLOPs} of its matmuls and of those that it fuses: 2 for a product and its sum.

    XLA:TPU writes matmuls as convolutions. Several dims of one operand become a window, which slides over padding too:
    only the products that are not with padding count.
    """
    flops: dict[int, float] = {}
    for name in instruction.called.get("calls", ()):
        for within in program.computations[name].values():
            for bits, more in matmul_flops(program, program.computations[name], within).items():
                flops[bits] = flops.get(bits, 0.0) + more
    if instruction.opcode not in ("dot", "convolution"):
        return flops
    lhs, rhs = (computation[name].shapes[0] for name in instruction.operands[:2])
    if instruction.opcode == "dot":
        dims = map(int, re.findall(r"\d+", instruction.attributes.get("lhs_contracting_dims", "")))
        products = math.prod(instruction.shapes[0].dims) * math.prod(lhs.dims[dim] for dim in dims)
    else:
        products = _products(instruction, lhs, rhs)
    bits = max(int(re.search(r"\d+|$", shape.dtype)[0] or 8) for shape in (lhs, rhs))  # a pred, as of a mask, is a byte
    return flops | {bits: flops.get(bits, 0.0) + 2.0 * products}


def _products(convolution: Instruction, lhs: Shape, rhs: Shape) -> int:
    """Those of a convolution that are not with padding."""
    if "batch_group_count" in convolution.attributes:
        raise ValueError(f"line {convolution.line}: products of a convolution with batch_group_count are not counted")
    of_lhs, of_rhs, of_result = re.split("_|->", convolution.attributes["dim_labels"])
    result = convolution.shapes[0].dims
    products = result[of_result.index("b")] * result[of_result.index("f")] * rhs.dims[of_rhs.index("i")]
    window = dict(re.findall(r"(\w+)=([\w-]+)", convolution.attributes.get("window", "")))
    for dim in range(len(of_lhs) - 2):
        one = {name: values.split("x")[dim] for name, values in window.items()}
        stride, lhs_dilate, rhs_dilate = (int(one.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        low, length = int(one.get("pad", "0_0").split("_")[0]), lhs.dims[of_lhs.index(str(dim))]
        starts = range(-low, result[of_result.index(str(dim))] * stride - low, stride)
        elements = range(0, (length - 1) * lhs_dilate + 1, lhs_dilate)  # all else is padding, or between by dilation
        taps = range(0, int(one["size"]) * rhs_dilate, rhs_dilate)
        products *= sum(start + tap in elements for start in starts for tap in taps)
    return products
