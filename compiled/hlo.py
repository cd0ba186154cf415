"""A parser for scheduled HLO: the computations and instructions of a compiled program, from its text. No jax.

`compiled.as_text()` is XLA's HLO: computations, one of which is the ENTRY, each a list of instructions,

    %name = shape opcode(operands), attribute=..., metadata={...}, backend_config={...}

They are in the order of execution if the first line says is_scheduled=true. A shape is followed by its layout, which
names the memory: f32[8,128]{1,0:T(8,128)S(1)} is in VMEM. An instruction may span several lines. Text that this cannot
parse is an error that names the line. compiled/schedule.py walks the result with a clock.

`evaluate` computes the integers of a program, such as the index of a layer, without running it. `matmul_flops` counts
the FLOPs of its matmuls.
"""

import json
import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The type of an array, and the memory in which it is."""

    dtype: str
    dims: tuple[int, ...]
    space: int  # 0 HBM, 1 VMEM, 5 the host's memory; others hold scalars and semaphores

    @property
    def nbytes(self) -> float:
        bits = {"pred": 8, "token": 0, "opaque": 0}.get(self.dtype)
        return math.prod(self.dims) * (int(re.search(r"\d+", self.dtype)[0]) if bits is None else bits) / 8


@dataclass(frozen=True)
class Instruction:
    """An instruction and the attributes that this project uses."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of its result; those of a tuple, nested or not, are flattened
    operands: tuple[str, ...]
    literal: str  # the text between the parentheses: a constant's value, a parameter's number
    called: dict[str, tuple[str, ...]]  # computations, by attribute: calls, body, condition, ...
    attributes: dict[str, str]  # all others, as text
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
        """XLA's estimate, or None: XLA writes 2**63 - 1 where it has none."""
        cycles = int(self.config.get("window_config", {}).get("estimated_cycles", -1))
        return cycles if 0 <= cycles < 2**62 else None


@dataclass(frozen=True)
class Program:
    """The computations of a program, by name; the root of each is its result."""

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
    """Yields the brackets and commas outside of strings, each with the number of brackets open after it."""
    depth = 0
    for token in TOKEN.finditer(text, begin):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        yield token, depth


def closing(text: str, begin: int) -> int:
    """The position after the bracket that closes the one at `begin`."""
    for token, depth in brackets(text, begin):
        if not depth:
            return token.end()
    raise ValueError("a bracket stays open")


def is_open(text: str) -> bool:
    """Whether a bracket of the text is not closed in it."""
    *_, depth = 0, *(depth for _, depth in brackets(text))
    return depth > 0


def split(text: str) -> list[str]:
    """The text between the commas that are outside of brackets and strings."""
    begin, depth, parts = 0, 0, []
    for token, depth in brackets(text):
        if token[0] == "," and not depth:
            parts.append(text[begin : token.start()].strip())
            begin = token.end()
    if depth:
        raise ValueError("a bracket stays open, or is closed twice")
    return [part for part in (*parts, text[begin:].strip()) if part]


def transposed(dims: list[int], order: list[int]) -> list[int]:
    """The elements of an iota (0, 1, 2, ...) of shape `dims` after its axes are transposed to `order`, flattened."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    ids = [0]
    for i in order:
        ids = [n + k * strides[i] for n in ids for k in range(dims[i])]
    return ids


IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
MESH = rf"mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\({IOTA}\))? ?\{{((?:'\w+',?)*)\}}"


def read_groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that replica_groups names, in any of the forms that XLA writes.

    {{0,1},{2,3}}               the groups themselves; {} is one group of all devices
    [2,4]<=[4,2]T(1,0)          2 groups of 4 from a transposed iota of shape [4,2]
    mesh['x'=2,'y'=4] {'y'}     the groups along the axis y of a mesh
    mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}       the same, with the devices in another order
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
            ids = [devices[i] for i in ids]
    else:
        raise ValueError(f"replica_groups={text} has a form that is not known here")
    return tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))


def read_instruction(text: str, line: int, num_devices: int, sources: dict[str, str]) -> Instruction:
    """The instruction of a text, which begins on `line`; `sources` is that of `read_sources`. Raises ValueError."""
    start = START.match(text)
    rest = text[start.end() :]
    end = closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opening = re.compile(r"\s*([a-z][a-z0-9-]*)(?=\()").match(rest, end)
    if end < 0 or not opening:
        raise ValueError("no opcode after the type")
    last = closing(rest, opening.end())
    raw = rest[opening.end() + 1 : last - 1]
    attributes = {}
    for part in split(rest[last:]):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not an attribute")
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
        raise ValueError(f"{unknown[0] if unknown else rest[:end]} is not a type that is known here")
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
    """{stack frame: file:line} from the tables that precede the computations."""

    def table(title: str) -> dict[str, str]:
        section = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return dict(line.split(" ", 1) for line in section[1].splitlines()) if section else {}

    files, locations = table("FileNames"), {}
    for number, location in table("FileLocations").items():
        match = re.search(r"file_name_id=(\d+).* line=(\d+)", location)
        locations[number] = f"{files.get(match[1], '')[1:-1]}:{match[2]}" if match else ""
    frames = {number: re.search(r"file_location_id=(\d+)", frame) for number, frame in table("StackFrames").items()}
    return {number: locations.get(location[1], "") for number, location in frames.items() if location}


def parse(text: str) -> Program:
    """The program of a text. Raises ValueError, with the line's number, if it cannot be parsed or is not scheduled."""
    lines = re.sub(r"/\*index=\d+\*/", "", text).splitlines()
    header = lines[0] if lines else ""
    if "is_scheduled=true" not in header:
        raise ValueError("no schedule: is_scheduled=true is not in its first line; compiled.as_text() has it")
    num_devices = math.prod(map(int, re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)))
    sources = read_sources(text)
    computations, roots, entry = {}, {}, None
    for head, end, statements in _computations(lines):
        name = head[2]
        computations[name] = {}
        for line, statement in statements:
            try:
                instruction = read_instruction(statement, line, num_devices, sources)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"line {line}: {error}: {statement.strip()[:80]}") from None
            if instruction.name in computations[name]:
                raise ValueError(f"line {line}: {name} has %{instruction.name} twice")
            computations[name][instruction.name] = instruction
            if START.match(statement)[1]:
                roots[name] = instruction.name
        if name not in roots:
            raise ValueError(f"line {end}: {name} ends without a ROOT")
        entry = name if head[1] else entry
    if entry is None:
        raise ValueError(f"line {len(lines)}: the text ends without an ENTRY computation")
    _check_references(computations)
    return Program(entry, computations, roots)


def _computations(lines: Sequence[str]) -> Iterator[tuple[re.Match, int, list[tuple[int, str]]]]:
    """Yields (match of the first line, number of the last line, [(line number, instruction)]) per computation."""
    head, statements = None, []
    for number, line in enumerate(lines, 1):
        if head is None:
            head, statements = re.fullmatch(r"(ENTRY )?%(\S+) \(.*\{", line), []
            if not head and line.startswith((" ", "%", "ENTRY")):
                raise ValueError(f"line {number}: no computation begins here: {line.strip()[:80]}")
        elif START.match(line):
            statements.append((number, line))
        elif statements and is_open(statements[-1][1]):  # strings and JSON in an instruction may span lines
            begin, statement = statements[-1]
            statements[-1] = begin, f"{statement}\n{line}"
        elif re.fullmatch(r"\}(, execution_thread=\"\w+\")?", line):
            yield head, number, statements
            head = None
        elif line.strip():
            raise ValueError(f"line {number}: no instruction: {line.strip()[:80]}")
    if head:
        raise ValueError(f"line {len(lines)}: the text ends before its computation {head[2]} does")


def _check_references(computations: dict[str, dict[str, Instruction]]) -> None:
    """Raises ValueError if an instruction names an operand or a computation that the text does not have."""
    for name, instructions in computations.items():
        for instruction in instructions.values():
            for called in (n for names in instruction.called.values() for n in names):
                if called not in computations:
                    raise ValueError(f"line {instruction.line}: there is no computation {called}")
            for operand in instruction.operands:
                if operand not in instructions:
                    raise ValueError(f"line {instruction.line}: there is no %{operand} in {name}")


# -- integers

MAX_ELEMENTS = 4096  # values of larger arrays are not evaluated


@dataclass(frozen=True)
class Numbers:
    """The values of an array of integers or booleans (as 0 and 1)."""

    dims: tuple[int, ...]
    values: tuple[int, ...]  # row-major


def _divide(a: int, b: int) -> int:
    """The quotient rounded towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


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
    "select": lambda condition, a, b: a if condition else b,
    "subtract": operator.sub,
    "xor": operator.xor,
}
COMPARE = {"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt}
COMPARE["GE"] = operator.ge
PASS_THROUGH = {"copy", "bitcast", "convert", "reshape", "optimization-barrier", "opt-barrier"}  # the operand's values


def _in_range(n: int, dtype: str) -> int:
    """The integer wrapped to the bits of the type."""
    bits = 1 if dtype == "pred" else int(dtype[1:])
    n %= 2**bits
    return n - 2**bits if dtype[0] == "s" and n >= 2 ** (bits - 1) else n


def evaluate(program: Program, instruction: Instruction, operands: Sequence) -> Numbers | tuple | None:
    """The integers or booleans that are an instruction's result, as far as they follow from those of its operands.

    Args:
      operands: for each operand its numbers, a tuple of such values, or None if they are unknown.

    Returns:
      None if the result is unknown: floats, more than MAX_ELEMENTS elements, a division by 0, or an operation that is
      not implemented here, such as a slice of several dims.
    """
    opcode, attributes, shapes = instruction.opcode, instruction.attributes, instruction.shapes
    evaluated = [re.fullmatch(r"pred|[su]\d+", s.dtype) and math.prod(s.dims) <= MAX_ELEMENTS for s in shapes]
    if opcode == "fusion" and any(evaluated):
        (called,) = instruction.called["calls"]
        values = {}
        for name, inner in program.computations[called].items():
            if inner.opcode == "parameter":
                values[name] = operands[int(inner.literal)]
            else:
                values[name] = evaluate(program, inner, [values[n] for n in inner.operands])
        return values[program.roots[called]]
    if opcode == "tuple":
        return tuple(operands)
    if opcode == "get-tuple-element":
        return operands[0][int(attributes["index"])] if isinstance(operands[0], tuple) else None
    if len(shapes) != 1 or not evaluated[0]:
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
        function = COMPARE[attributes["direction"]] if opcode == "compare" else ELEMENTWISE[opcode]
        columns = [x.values if x.dims else x.values * size for x in operands]  # clamp and select also take scalars
        try:
            return result([function(*numbers) for numbers in zip(*columns, strict=True)])
        except ZeroDivisionError:
            return None
    # With several dims above 1 the elements may be transposed.
    if opcode in PASS_THROUGH and len(first.values) == size and sum(n > 1 for n in first.dims) <= 1:
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
    """{bits of an element: FLOPs} of an instruction's matmuls, fused ones included: 2 for a product and its sum.

    XLA:TPU writes matmuls as convolutions. If an operand has several dims, all but one become a window that also slides
    over padding. Products with padding are not counted.
    """
    flops: dict[int, float] = {}
    for name in instruction.called.get("calls", ()):
        for inner in program.computations[name].values():
            for bits, more in matmul_flops(program, program.computations[name], inner).items():
                flops[bits] = flops.get(bits, 0.0) + more
    if instruction.opcode not in ("dot", "convolution"):
        return flops
    lhs, rhs = (computation[name].shapes[0] for name in instruction.operands[:2])
    if instruction.opcode == "dot":
        dims = map(int, re.findall(r"\d+", instruction.attributes.get("lhs_contracting_dims", "")))
        products = math.prod(instruction.shapes[0].dims) * math.prod(lhs.dims[dim] for dim in dims)
    else:
        products = _products(instruction, lhs, rhs)
    bits = max(int(re.search(r"\d+|$", shape.dtype)[0] or 8) for shape in (lhs, rhs))  # a pred, as in a mask, is a byte
    return flops | {bits: flops.get(bits, 0.0) + 2.0 * products}


def _products(convolution: Instruction, lhs: Shape, rhs: Shape) -> int:
    """The number of products in a convolution that are not with padding."""
    if "batch_group_count" in convolution.attributes:
        raise ValueError(f"line {convolution.line}: products of a convolution with batch_group_count are not counted")
    lhs_labels, rhs_labels, result_labels = re.split("_|->", convolution.attributes["dim_labels"])
    result = convolution.shapes[0].dims
    products = result[result_labels.index("b")] * result[result_labels.index("f")] * rhs.dims[rhs_labels.index("i")]
    window = dict(re.findall(r"(\w+)=([\w-]+)", convolution.attributes.get("window", "")))
    for dim in range(len(lhs_labels) - 2):
        sizes = {name: values.split("x")[dim] for name, values in window.items()}
        stride, lhs_dilate, rhs_dilate = (int(sizes.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        low, length = int(sizes.get("pad", "0_0").split("_")[0]), lhs.dims[lhs_labels.index(str(dim))]
        starts = range(-low, result[result_labels.index(str(dim))] * stride - low, stride)
        elements = range(0, (length - 1) * lhs_dilate + 1, lhs_dilate)  # all else is padding, or zeros from dilation
        taps = range(0, int(sizes["size"]) * rhs_dilate, rhs_dilate)
        # A window may slide over all tokens of a device, so starts and taps are not both walked.
        products *= sum(_in_both(range(starts.start + tap, starts.stop + tap, stride), elements) for tap in taps)
    return products


def _in_both(a: range, b: range) -> int:
    """The number of integers that are in both ranges, whose steps are positive."""
    common = math.gcd(a.step, b.step)
    apart, remainder = divmod(b.start - a.start, common)
    if remainder:
        return 0
    steps = apart * pow(a.step // common, -1, b.step // common) % (b.step // common)
    shared, step = a.start + steps * a.step, a.step * b.step // common  # `shared` may be before the start of b
    first = shared + max(0, -(-(b.start - shared) // step)) * step
    return len(range(first, min(a.stop, b.stop), step))
