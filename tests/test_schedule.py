"""Tests of compiled/hlo.py and compiled/schedule.py: schedules worked out by hand, and programs compiled for TPU7x."""

import dataclasses
import json
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import TPU, compiled_on_ring, compiled_step

import command
import hardware
from compiled import schedule
from compiled.hlo import ELEMENTWISE, Numbers, evaluate, matmul_flops, parse
from compiled.schedule import TPU7X, Rates, rates_of, walk
from config import Config
from hardware import CHIPS
from predicted.workload import TODAY
from remote_dma import ring_all_gather

# -- schedules by hand: a cycle takes a second, and so does a byte over a link

RATES = Rates(
    clock_hz=1.0,
    estimates_hz=1.0,
    kernel_clock_hz=1.0,
    link_bytes_per_s=1.0,
    die_to_die_bytes_per_s=4.0,
    hbm_bytes_per_s=2.0,
    host_bytes_per_s=0.5,
    network_bytes_per_s=0.25,
)
HEADER = "HloModule m, is_scheduled=true, num_partitions=8\n"


def computation(name: str, *lines: str, tail: str = "") -> str:
    *body, last = lines
    body = "".join(f"  {line}\n" for line in body)
    return f"%{name} (p: u8[8]) -> u8[8] {{\n{body}  ROOT {last}\n}}{tail}\n\n"


COMMON = computation("vector", "%p.v = u8[8]{0} parameter(0)", "%neg = u8[8]{0} negate(%p.v)")
COMMON += computation("matmul", "%p.m = u8[8]{0} parameter(0)", "%conv = u8[8]{0} convolution(%p.m, %p.m)")


def text(*lines: str, more: str = "") -> str:
    return HEADER + "\n" + COMMON + more + "ENTRY " + computation("main", "%p = u8[8]{0} parameter(0)", *lines)


def run(*lines: str, more: str = "", **options) -> schedule.Breakdown:
    return walk(parse(text(*lines, more=more)), rates=RATES, **options)


def work(name: str, cycles: float, calls: str = "vector") -> str:
    config = json.dumps({"window_config": {"estimated_cycles": str(cycles)}}, separators=(",", ":"))
    return (
        f"%{name} = u8[8]{{0}} fusion(%p), kind=kLoop, calls=%{calls}, "
        f'metadata={{op_name="op/{name}" source_file="a/model.py" source_line=7}}, backend_config={config}'
    )


def permute(name: str, nbytes: int, pairs: str = "{0,2},{2,0}") -> str:
    shape = f"u8[{nbytes}]{{0}}"
    start = f"({shape}, {shape}, u32[]{{:S(2)}}, u32[]{{:S(2)}})"
    return f"%{name} = {start} collective-permute-start(%p), source_target_pairs={{{pairs}}}"


def done(name: str, start: str, opcode: str = "collective-permute-done") -> str:
    return f"%{name} = u8[8]{{0}} {opcode}(%{start})"


END = "%end = u8[8]{0} bitcast(%p)"


def loop(name: str, trips: int, *body: str, carried: str = "p", init: str = "p", more: str = "", **compare) -> tuple:
    """(the computations of a loop that carries (an index, an array), the lines that call it)."""
    bounds = {"first": 0, "step": 1, "direction": "LT"} | compare
    state = "(s32[], u8[8]{0})"
    text = computation(
        f"{name}.body",
        f"%state = {state} parameter(0)",
        "%i = s32[] get-tuple-element(%state), index=0",
        "%p = u8[8]{0} get-tuple-element(%state), index=1",
        f"%one = s32[] constant({bounds['step']})",
        "%next = s32[] add(%i, %one)",
        *body,
        f"%out = {state} tuple(%next, %{carried})",
    )
    text += computation(
        f"{name}.condition",
        f"%s = {state} parameter(0)",
        "%i = s32[] get-tuple-element(%s), index=0",
        f"%n = s32[] constant({trips})",
        f"%less = pred[] compare(%i, %n), direction={bounds['direction']}",
    )
    call = f"{state} while(%{name}.in), condition=%{name}.condition, body=%{name}.body"
    lines = (
        f"%{name}.first = s32[] constant({bounds['first']})",
        f"%{name}.in = {state} tuple(%{name}.first, %{init})",
        f"%{name} = {call}",
    )
    return more + text, lines


def test_a_program_without_asynchronous_work_takes_the_sum_of_its_parts():
    breakdown = run(work("a", 3), work("b", 4, "matmul"), "%c = u8[8]{0} copy(%p)", END)
    assert breakdown.seconds == 3 + 4 + 16 / 2  # the copy has no estimate: 8 bytes read, 8 written
    assert breakdown.categories == {"copies and layouts": 8, "matmul": 4, "elementwise": 3}
    assert breakdown.by_bytes_s == 8
    longest, second, third = breakdown.ops
    assert (longest.name, longest.by, second.name, third.op_name) == ("c", "bytes", "b", "op/a")
    assert (third.source, third.count, third.by) == ("a/model.py:7", 1, "cycles")


def test_nested_loops_multiply_their_trips():
    inner, lines = loop("inner", 4, work("x", 5))
    more, lines = loop("outer", 3, work("y", 2), *lines, more=inner)
    breakdown = run(*lines, END, more=more)
    assert breakdown.seconds == 3 * (2 + 4 * 5)
    assert {op.name: (op.count, op.seconds) for op in breakdown.ops} == {"x": (12, 60), "y": (3, 6)}


@pytest.mark.parametrize(
    "first, step, direction, bound, trips",
    [
        (0, 1, "LT", 5, 5),
        (0, 2, "LT", 5, 3),
        (2, 1, "LT", 5, 3),
        (1, 1, "LE", 5, 5),
        (5, -1, "GT", 0, 5),
        (5, -2, "GE", 0, 3),
        (0, 1, "NE", 4, 4),
        (7, 1, "LT", 5, 0),
    ],
)
def test_trips_from_start_step_and_bound(first, step, direction, bound, trips):
    more, lines = loop("l", bound, work("x", 5), first=first, step=step, direction=direction)
    assert run(*lines, END, more=more).seconds == 5 * trips


def test_trips_that_the_text_names_or_leaves_unknown():
    more, (*lines, call) = loop("l", 5, work("x", 5))
    known = call + ', backend_config={"known_trip_count":{"n":"9"}}'
    assert run(*lines, known, END, more=more).seconds == 45
    more = more.replace("%n = s32[] constant(5)", "%n = s32[] get-tuple-element(%s), index=1")
    with pytest.raises(ValueError, match=r"trips of %l .*\n.*trips="):
        run(*lines, call, END, more=more)
    assert run(*lines, call, END, more=more, trips={"^l$": 7}).seconds == 35
    breakdown = run(*lines, call, END, more=more, uncounted=True)
    assert breakdown.seconds == 5 and "trips of %l" in breakdown.uncounted[0]


@pytest.mark.parametrize(
    "old, new",
    [
        ("compare(%i, %n), direction=LT", "compare(%n, %i), direction=GT"),
        (
            "%less = pred[] compare(%i, %n), direction=LT",
            "%less = pred[] fusion(%n, %i), kind=kLoop, calls=%fused.less",
        ),
        (
            "%i = s32[] get-tuple-element(%state), index=0",
            "%j = s32[] get-tuple-element(%state), index=0\n  %i = s32[] copy(%j)",
        ),
        ("constant(1)\n  %next = s32[] add(%i, %one)", "constant(-1)\n  %next = s32[] subtract(%i, %one)"),
        ("s32[] add(%i, %one)", "s32[] fusion(%one, %i), kind=kLoop, calls=%fused.add"),
    ],
)
def test_trips_of_loops_written_in_other_ways(old, new):
    pair = "%a = s32[] parameter(0)", "%b = s32[] parameter(1)"
    fused = computation("fused.less", *pair, "%less = pred[] compare(%a, %b), direction=GT")
    fused += computation("fused.add", *pair, "%sum = s32[] add(%b, %a)")
    more, lines = loop("l", 5, work("x", 5), more=fused)
    assert old in more
    assert run(*lines, END, more=more.replace(old, new)).seconds == 25


@pytest.mark.parametrize("copied", [False, True])
def test_numbers_that_loops_carry(copied):
    """An inner loop's bound that the outer loop passes through is known; a start that is the outer index is not."""
    inner, (first, state, call) = loop("inner", 4, work("x", 5))
    first += "\n  %other = s32[] copy(%inner.first)"
    start = "%other" if copied else "%inner.first"
    state = f"%inner.in = (s32[], u8[8]{{0}}) tuple({start}, %p)"
    inner = inner.replace("%n = s32[] constant(4)", "%n = s32[] get-tuple-element(%s), index=1")
    more, lines = loop("outer", 3, first, state, call, more=inner, init="four")
    four = "%four = s32[] constant(4)"
    assert run(four, *lines, END, more=more).seconds == 3 * 4 * 5
    with pytest.raises(ValueError, match="trips of %inner "):
        run(four, *lines, END, more=more.replace(f"tuple({start}, %p)", "tuple(%i, %p)"))


@pytest.mark.parametrize("step, direction", [(1, "GT"), (0, "LT"), (3, "NE")])
def test_the_trips_of_a_loop_that_would_not_end_are_unknown(step, direction):
    more, lines = loop("l", 5, work("x", 5), step=step, direction=direction)
    with pytest.raises(ValueError, match="trips of %l"):
        run(*lines, END, more=more)


def test_a_transfer_is_exposed_while_nothing_computes_beside_it():
    (message,) = run(permute("s", 5), work("a", 2), done("d", "s"), work("b", 1), END).collectives
    assert (message.seconds, message.exposed_s, message.hidden_s, message.computed_s) == (5, 3, 2, 2)
    assert (message.kind, message.nbytes, message.count, message.synchronous) == ("collective-permute", 5, 1, False)
    assert (message.after, message.before) == ("", "op/b")
    assert run(permute("s", 5), work("a", 7), done("d", "s"), END).seconds == 7
    assert run(work("a", 7), permute("s", 5), done("d", "s"), END).seconds == 12


def test_two_transfers_on_one_queue_run_one_after_the_other():
    lines = (permute("s", 5), permute("t", 3), work("a", 4), done("e", "t"), done("d", "s"), END)
    breakdown = run(*lines)
    assert breakdown.seconds == 8  # t is ready at 8, s was at 5
    assert breakdown.categories == {"elementwise": 4, "waits for collectives": 4}
    # A stall counts for the transfer that is on the link at that time.
    assert [(m.name, m.exposed_s) for m in breakdown.collectives] == [("s", 1), ("t", 3)]
    other_direction = permute("t", 3, "{0,6},{6,0}")
    assert run(lines[0], other_direction, *lines[2:]).seconds == 5


STRADDLE = (done("d", "p"), permute("s", 3).replace("%p", "%i"), work("a", 2))


def test_transfers_straddle_iterations():
    """Iteration k waits until 3k for the transfer that k - 1 started, and computes for 2 s beside its own."""
    more, lines = loop("l", 5, *STRADDLE, carried="s", init="s0")
    after = ("%got = u8[8]{0} get-tuple-element(%l), index=1", done("d0", "got"))
    breakdown = run(permute("s0", 3), *lines, *after, END, more=more)
    assert breakdown.seconds == 6 * 3
    first, others = breakdown.collectives
    assert (first.count, first.seconds, first.exposed_s, first.computed_s) == (1, 3, 3, 0)
    assert (others.count, others.seconds, others.exposed_s, others.computed_s) == (5, 15, 5, 10)


def test_a_transfer_that_straddles_a_long_computation_is_hidden(monkeypatch):
    """A billion iterations are not walked one by one."""
    walked, run_uncounted = [], schedule.Walk.run

    def counted(self, computation, arguments):
        walked.append(computation)
        assert len(walked) < 10
        return run_uncounted(self, computation, arguments)

    monkeypatch.setattr(schedule.Walk, "run", counted)
    more, lines = loop("l", 10**9, *STRADDLE[:2], work("a", 4), carried="s", init="s0")
    after = ("%got = u8[8]{0} get-tuple-element(%l), index=1", done("d0", "got"))
    breakdown = run(permute("s0", 3), work("b", 10), *lines, *after, END, more=more)
    assert breakdown.seconds == 10 + 4e9
    assert [(m.count, m.exposed_s, m.computed_s) for m in breakdown.messages] == [(1, 0, 10), (10**9, 0, 4e9)]


def test_a_transfer_over_a_loop_delays_those_inside():
    """A transfer before the loop takes the link for 20 s: the first iteration waits for it, later ones do not."""
    more, lines = loop("l", 6, permute("s", 1), work("a", 2), done("d", "s"))
    breakdown = run(permute("long", 20), *lines, done("e", "long"), END, more=more)
    assert breakdown.seconds == 21 + 5 * 2
    long, short = breakdown.collectives
    assert (long.exposed_s, short.exposed_s, short.count) == (18, 1, 6)


def random_body(source: random.Random, prefix: str) -> list[str]:
    """Work and transfers, waited for in a random order; so is the last transfer of the iteration before."""
    lines, in_flight, number = [], ["p"], 0
    for _ in range(source.randrange(3, 9)):
        number += 1
        kind = source.choice(["work", "start", "done"])
        if kind == "work":
            lines.append(work(f"{prefix}w{number}", source.randrange(6)).replace("%p)", "%i)"))
        elif kind == "start":
            pairs = source.choice(["{0,2},{2,0}", "{0,6},{6,0}"])
            lines.append(permute(f"{prefix}s{number}", source.randrange(1, 7), pairs).replace("%p)", "%i)"))
            in_flight.append(f"{prefix}s{number}")
        elif in_flight:
            lines.append(done(f"{prefix}d{number}", in_flight.pop(source.randrange(len(in_flight)))))
    lines += [done(f"{prefix}f{number}", start) for number, start in enumerate(in_flight)]
    return [*lines, permute(f"{prefix}last", source.randrange(1, 7)).replace("%p)", "%i)")]


@pytest.mark.parametrize("seed", range(40))
def test_a_loop_takes_as_long_as_its_iterations_written_out(seed):
    body = random_body(random.Random(seed), "")
    more, lines = loop("l", 9, *body, carried="last", init="zero")
    entry = [permute("zero", 4), *lines, "%got = u8[8]{0} get-tuple-element(%l), index=1", done("z", "got"), END]
    rolled = run(*entry, more=more)

    written, carried = [permute("zero", 4), "%i = s32[] constant(0)"], "zero"
    for number in range(9):
        again = [re.sub(r"%(?=[wsdfl]\w*[ )])", f"%n{number}", line) for line in body]
        written += [line.replace("(%p)", f"(%{carried})") for line in again]
        carried = f"n{number}last"
    unrolled = run(*written, done("z", carried), END)
    assert rolled.seconds == pytest.approx(unrolled.seconds, rel=1e-12) and unrolled.seconds > 0
    assert rolled.exposed_s == pytest.approx(unrolled.exposed_s, rel=1e-12)
    assert math.fsum(rolled.categories.values()) == pytest.approx(rolled.seconds, rel=1e-12)
    sum_of = lambda breakdown: [
        sum(getattr(m, f) for m in breakdown.messages) for f in ("count", "seconds", "computed_s")
    ]
    assert sum_of(rolled) == pytest.approx(sum_of(unrolled), rel=1e-12)

    faster = walk(parse(text(*entry, more=more)), rates=dataclasses.replace(RATES, link_bytes_per_s=2.0))
    assert faster.seconds <= rolled.seconds
    computed = sum(op.seconds for op in rolled.ops)
    assert rolled.seconds == pytest.approx(computed + rolled.exposed_s, rel=1e-12)


@pytest.mark.parametrize(
    "attribute", ["branch_computations={%yes, %no}", "true_computation=%yes, false_computation=%no"]
)
def test_conditionals_take_the_longest_branch_if_the_index_is_unknown(attribute):
    branch = lambda name, *lines: computation(name, "%p = u8[8]{0} parameter(0)", *lines)
    more = branch("yes", work("a", 3), work("b", 4), END) + branch("no", permute("s", 9), done("d", "s"))
    breakdown = run(f"%if = u8[8]{{0}} conditional(%p, %p, %p), {attribute}", work("c", 1), END, more=more)
    assert breakdown.seconds == 10 and [op.name for op in breakdown.ops] == ["c"]  # the other branch is not counted
    assert [(m.name, m.before) for m in breakdown.messages] == [("s", "op/c")]
    more = more.replace("u8[9]", "u8[2]")
    breakdown = run(f"%if = u8[8]{{0}} conditional(%p, %p, %p), {attribute}", END, more=more)
    assert breakdown.seconds == 7 and not breakdown.messages


@pytest.mark.parametrize("number, taken", [(0, "yes"), (1, "no"), (2, "no"), (-1, "no")])
def test_conditionals_take_the_branch_of_a_known_index(number, taken):
    branch = lambda name, *lines: computation(name, "%p = u8[8]{0} parameter(0)", *lines)
    more = branch("yes", work("a", 3), END) + branch("no", work("b", 8), END)
    conditional = "%if = u8[8]{0} conditional(%n, %p, %p), branch_computations={%yes, %no}"
    assert run(f"%n = s32[] constant({number})", conditional, END, more=more).seconds == dict(yes=3, no=8)[taken]
    conditional = "%if = u8[8]{0} conditional(%n, %p, %p), true_computation=%yes, false_computation=%no"
    value = dict(yes="true", no="false")[taken]
    assert run(f"%n = pred[] constant({value})", conditional, END, more=more).seconds == dict(yes=3, no=8)[taken]


@pytest.mark.parametrize("through", ["", "fusion", "async"])
def test_a_branch_of_every_third_layer(through):
    """A scan over ten layers takes one branch in the layers i with i % 3 = 2; also inside a loop of two trips."""
    branch = lambda name, *lines: computation(name, "%p = u8[8]{0} parameter(0)", *lines)
    more = branch("others", work("a", 3), END) + branch("third", work("b", 8), END)
    number = ["%at = s32[1]{0} dynamic-slice(%numbers, %i), dynamic_slice_sizes={1}", "%x = s32[] bitcast(%at)"]
    third = ["%three = s32[] constant(3)", "%left = s32[] remainder(%x, %three)", "%two = s32[] constant(2)"]
    third += ["%is = pred[] compare(%left, %two), direction=EQ"]
    if through == "fusion":
        more += computation("is_third", "%x = s32[] parameter(0)", *third)
        third = ["%is = pred[] fusion(%x), kind=kLoop, calls=%is_third"]
    if through == "async":
        number[1:] = [
            "%to = (s32[1]{0}, s32[1]{0:S(1)}, u32[]) copy-start(%at)",
            "%copied = s32[1]{0} copy-done(%to)",
            "%x = s32[] reshape(%copied)",
        ]
    body = [*number, *third, "%n = s32[] convert(%is)"]
    body += ["%if = u8[8]{0} conditional(%n, %p, %p), branch_computations={%others, %third}"]
    numbers = "%numbers = s32[10]{0} iota(), iota_dimension=0"
    inner, lines = loop("layers", 10, numbers, *body, more=more)
    branches = lambda breakdown: {op.name: (op.count, op.seconds) for op in breakdown.ops if op.name in "ab"}
    assert branches(run(*lines, END, more=inner)) == {"a": (7, 7 * 3), "b": (3, 3 * 8)}
    outer, lines = loop("rounds", 2, *lines, more=inner)
    assert branches(run(*lines, END, more=outer)) == {"a": (14, 14 * 3), "b": (6, 6 * 8)}


LOGIC = "and or xor not select".split()
TYPED = [(opcode, dtype) for opcode in sorted(ELEMENTWISE) for dtype in ("s32", "s8", "u32", "pred")]


@pytest.mark.parametrize(
    "opcode, dtype", [(o, d) for o, d in TYPED if (d != "pred" or o in LOGIC) and (o, d) != ("abs", "u32")]
)
def test_integers_as_xla_computes_them(opcode, dtype):
    """Operands of all signs and at the limits of the type, against XLA on the CPU; a quotient by 0 is unknown."""
    kind = {"s32": np.int32, "u32": np.uint32, "s8": np.int8, "pred": np.bool_}[dtype]
    if dtype == "pred":
        a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    else:
        lowest, highest = np.iinfo(kind).min, np.iinfo(kind).max
        a = np.array([7, -7, 6, -6, 0, 5, lowest, highest, highest]).astype(kind)
        b = np.array([3, 3, -4, -3, 2, 7, 1, highest, 1]).astype(kind)
    names = {"abs": lax.abs, "and": lax.bitwise_and, "clamp": lax.clamp, "divide": lax.div, "maximum": lax.max}
    names |= {"minimum": lax.min, "multiply": lax.mul, "negate": lax.neg, "not": lax.bitwise_not, "or": lax.bitwise_or}
    names |= {"remainder": lax.rem, "select": lax.select, "subtract": lax.sub, "xor": lax.bitwise_xor, "add": lax.add}
    low, high = np.minimum(b, kind(2)), np.maximum(b, kind(2))
    operands = {"abs": [a], "negate": [a], "not": [a], "clamp": [low, a, high], "select": [a > 0, a, b]}
    operands = operands.get(opcode, [a, b])
    line = f"%r = {dtype}[{len(a)}]{{0}} {opcode}({', '.join('%p' for _ in operands)})"
    numbers = lambda x: Numbers(x.shape, tuple(map(int, x)))
    assert evaluated(line, *map(numbers, operands)) == numbers(np.asarray(names[opcode](*operands)))
    if opcode in ("divide", "remainder"):
        assert evaluated(line, numbers(a), numbers(0 * b)) is None


def evaluated(line: str, *operands) -> object:
    """The result of `hlo.evaluate` for an instruction whose operands have these values."""
    program = parse(text(line, END))
    return evaluate(program, program.computations["main"]["r"], operands)


@pytest.mark.parametrize(
    "instruction, operands, expected",
    [
        ("s32[3]{0} constant({1, -2, 3})", (), (1, -2, 3)),
        ("pred[] constant(true)", (), (1,)),
        ("u64[] constant(18446744073709551615)", (), (2**64 - 1,)),
        ("f32[] constant(1)", (), None),
        ("s32[3]{0} iota(), iota_dimension=0", (), (0, 1, 2)),
        ("s32[5000]{0} iota(), iota_dimension=0", (), None),
        ("pred[2]{0} compare(%p, %p), direction=GE", ((1, 2), (2, 2)), (0, 1)),
        ("u8[] convert(%p)", (300,), (44,)),
        ("pred[] convert(%p)", (2,), (1,)),
        ("s32[2,1]{1,0} bitcast(%p)", ((4, 5),), (4, 5)),
        ("s32[3]{0} broadcast(%p), dimensions={}", (7,), (7, 7, 7)),
        ("s32[2]{0} dynamic-slice(%p, %p), dynamic_slice_sizes={2}", ((1, 2, 3), 1), (2, 3)),
        ("s32[2]{0} dynamic-slice(%p, %p), dynamic_slice_sizes={2}", ((1, 2, 3), 9), (2, 3)),
        ("s32[2]{0} dynamic-slice(%p, %p), dynamic_slice_sizes={2}", ((1, 2, 3), -1), (1, 2)),
        ("s32[] add(%p, %p)", (1, None), None),
    ],
)
def test_values_that_follow_from_the_operands(instruction, operands, expected):
    known = lambda x: x if x is None else Numbers((len(x),), x) if isinstance(x, tuple) else Numbers((), (x,))
    result = evaluated(f"%r = {instruction}", *map(known, operands))
    assert (result and result.values) == expected


def test_a_bitcast_of_two_dims_may_be_a_transpose():
    assert evaluated("%r = s32[3,2]{1,0} bitcast(%p)", Numbers((2, 3), tuple(range(6)))) is None


# -- collectives


def rings(number: int, sparsecore: bool = True) -> str:
    ring = {"phase_rings": [{"ring_type": "ICI_RING_TYPE_UNIDIR_CW"}]}
    config = {"collective_offload_config": {"x": {"ici_strategy_config": {"color_strategies": [ring] * number}}}}
    config |= {"device_type": "DEVICE_TYPE_SPARSECORE"} if sparsecore else {}
    return f"backend_config={json.dumps(config)}"


GROUPS = "replica_groups={{0,2,4,6},{1,3,5,7}}"
GATHER = computation(
    "gather",
    "%p = u8[2]{0} parameter(0)",
    f"%ag = u8[8]{{0}} all-gather(%p), {GROUPS}, channel_id=3, {rings(2)}",
    tail=', execution_thread="sparsecore"',
)


@pytest.mark.parametrize("other", ["all-gather", "all-to-all"])
def test_collectives_that_share_a_start_run_one_after_another(other):
    """XLA:TPU merges the gathers of a layer's experts into one call, and these with the reduce-scatters before them."""
    on_sparsecore = ', execution_thread="sparsecore"'
    kinds = enumerate(("all-gather", other), 1)
    gathers = [f"%g{n} = u8[{8 * n}]{{0}} {kind}(%p), {GROUPS}, channel_id={n}, {rings(2)}" for n, kind in kinds]
    first, second = (
        computation(f"of{n}", "%p = u8[2]{0} parameter(0)", gathers[n - 1], tail=on_sparsecore) for n in (1, 2)
    )
    both = computation(
        "both",
        "%p = u8[2]{0} parameter(0)",
        *gathers,
        "%all = (u8[8]{0}, u8[16]{0}) tuple(%g1, %g2)",
        tail=on_sparsecore,
    )
    call = lambda name: f'%s = u8[8]{{0}} call-start(%p), async_execution_thread="sparsecore", to_apply=%{name}'
    first_alone, second_alone, merged = (
        run(call(name), done("d", "s", "call-done"), END, more=more)
        for name, more in (("of1", first), ("of2", second), ("both", both))
    )
    assert merged.seconds == first_alone.seconds + second_alone.seconds > first_alone.seconds
    (message,) = merged.messages
    assert message.engine == "SparseCore"
    assert message.kind == ("all-gather" if other == "all-gather" else "all-gather and all-to-all")
    assert merged.collectives == (message,) and merged.exposed_s == merged.seconds
    assert merged.categories == {"waits for collectives": merged.seconds}


@pytest.mark.parametrize("update", [False, True])
def test_collectives_on_the_sparsecores(update):
    """Two groups of 4 devices gather 8 bytes over two rings that they share: 2 * 8 * 3/4 / 2 = 6 s.

    If there is a call-update, the transfer begins with it.
    """
    thread = 'async_execution_thread="sparsecore", to_apply=%gather, metadata={op_name="op/gather"}'
    if update:
        start = f"%s = ((), (), (s32[1]{{0:T(128)S(2)}})) call-start(), {thread}"
        begin = "%u = ((u8[2]{0}), u8[8]{0}) call-update(%s, %p)"
    else:
        start = "%idle = u8[8]{0} bitcast(%p)"
        begin = f"%u = ((u8[2]{{0}}, token[]), u8[8]{{0}}) call-start(%p, %p), {thread}"
    breakdown = run(
        start, work("a", 5), begin, work("b", 1), done("d", "u", "call-done"), work("c", 1), END, more=GATHER
    )
    assert breakdown.seconds == 5 + 6 + 1
    (message,) = breakdown.collectives
    assert (message.kind, message.engine, message.rings, message.group_size) == ("all-gather", "SparseCore", 2, 4)
    assert message.groups == ((0, 2, 4, 6), (1, 3, 5, 7)) and message.op_name == "op/gather"
    assert (message.nbytes, message.seconds, message.exposed_s, message.computed_s) == (8, 6, 5, 1)
    assert (message.after, message.before) == ("op/a", "op/c")


def test_other_work_on_the_sparsecores():
    """A transpose reads and writes HBM beside a gather; a computation of two operations is an error."""
    lines = ("%p = u8[8]{0} parameter(0)", "%transposed = u8[8]{0} transpose(%p), dimensions={0}")
    more = computation("one", *lines) + computation("two", *lines, "%copied = u8[8]{0} copy(%transposed)") + GATHER
    start = 'u8[8]{0} call-start(%p), async_execution_thread="sparsecore"'
    call = lambda name, computation: f"%{name} = {start}, to_apply=%{computation}"
    ends = done("d", "s", "call-done"), done("e", "g", "call-done"), END
    breakdown = run(call("s", "one"), call("g", "gather"), *ends, more=more)
    assert breakdown.seconds == 16 / 2
    assert breakdown.categories == {"waits for SparseCore copies": 8}
    assert [(m.kind, m.engine) for m in breakdown.messages] == [
        ("transpose", "SparseCore"),
        ("all-gather", "SparseCore"),
    ]
    with pytest.raises(ValueError, match="two has 2 operations, not one"):
        run(call("s", "two"), call("g", "gather"), *ends, more=more)


@pytest.mark.parametrize(
    "opcode, attributes, seconds, nbytes",
    [
        ("all-gather", GROUPS, 2 * 6, 8),  # each chip has a device of either group
        ("all-gather", f"{GROUPS}, {rings(3)}", 2 * 2, 8),
        ("all-reduce", f"{GROUPS}, to_apply=%vector", 2 * 12, 8),
        ("reduce-scatter", f"{GROUPS}, to_apply=%vector", 2 * 24, 32),
        ("all-to-all", GROUPS, 6, 8),
        ("all-gather", "replica_groups={}", 7, 8),  # all 8 devices
        ("all-gather", "replica_groups={{0,1},{2,3},{4,5},{6,7}}", 1, 8),  # the two of a chip, over the die-to-die link
        ("all-gather", f"replica_groups={{{{0,1}},{{2,3}}}}, {rings(2)}", 1, 8),
        ("all-gather", "replica_groups={{0,2},{1,3}}", 2 * 4, 8),
        ("all-gather", "replica_groups={{0,1,2,3}}", 6, 8),  # both devices of two chips: no other group on its links
        ("collective-permute", "source_target_pairs={{0,2},{2,4}}", 8, 8),
        ("collective-permute", "source_target_pairs={{0,2},{1,3}}", 2 * 8, 8),
        ("collective-permute", "source_target_pairs={{0,1},{1,0}}", 2, 8),
        (
            "all-reduce",
            GROUPS
            + r', to_apply=%vector, backend_config={"collective_algorithm_config":{"debug":"\nND{colors:2 p:2}"}}',
            2 * 6,
            8,
        ),
    ],
)
def test_synchronous_collectives_stall_in_full(opcode, attributes, seconds, nbytes):
    breakdown = run(work("a", 1), f"%c = u8[8]{{0}} {opcode}(%p), {attributes}", END)
    assert breakdown.seconds == 1 + seconds
    assert breakdown.categories["synchronous collectives"] == seconds
    (message,) = breakdown.collectives
    assert message.synchronous and message.exposed_s == message.seconds == seconds and message.nbytes == nbytes


def test_chips_say_which_devices_share_one_if_the_order_of_devices_is_another():
    seconds = lambda groups, **chips: (
        run(f"%c = u8[8]{{0}} all-gather(%p), replica_groups={groups}", END, **chips).seconds
    )
    order = dict(chips=[(0, x, 0, 0) for x in (0, 1, 0, 1)])
    assert seconds("{{0,1},{2,3}}") == seconds("{{0,2},{1,3}}", **order) == 1
    assert seconds("{{0,2},{1,3}}") == seconds("{{0,1},{2,3}}", **order) == 8
    call = '%c = u8[8]{0} call-start(%p), async_execution_thread="sparsecore", to_apply=%gather'
    gather = "%gather (x: u8[2]) -> u8[8] {\n  %x = u8[2]{0} parameter(0)\n"
    gather += "  ROOT %g = u8[8]{0} all-gather(%x), replica_groups={{0,1},{2,3}}\n}\n\n"
    beside = lambda **chips: run(call, done("d", "c", "call-done"), END, more=gather, **chips).seconds
    assert (beside(), beside(**order)) == (1, 8)


def places(topology):
    """(slice, x, y, z) of each device in the order of ids: two devices a chip, x varies fastest, z slowest."""
    X, Y, Z = topology
    return [(0, x, y, z) for z in range(Z) for y in range(Y) for x in range(X) for _ in range(2)]


@pytest.mark.parametrize(
    "topology, groups, bytes_over_link",
    [
        ((2, 2, 1), [range(8)], 1),  # 8/2 devices send half of V over 2 links
        ((2, 2, 1), [[0, 2], [1, 3]], 1),  # two groups send half over one
        ((2, 2, 1), [range(4), range(4, 8)], 1),
        ((4, 4, 4), [range(128)], 1),  # 128/2 halves, 2 * 16 links
        ((4, 4, 4), [[0, 2, 4, 6], [1, 3, 5, 7]], 1),  # 2 groups of 4/2 halves, a ring's 2 links
        ((4, 4, 4), [range(8)], 1),
        ((2, 4, 4), [range(64)], 2),  # 64/2 halves over 8 links, of lines
    ],
)
def test_an_all_to_all_crosses_the_middle(topology, groups, bytes_over_link):
    """By hand: bytes that cross the middle of the longest axis one way, over the links there; a byte takes a second."""
    chips = places(topology)
    text = f"replica_groups={{{','.join('{' + ','.join(map(str, group)) + '}' for group in groups)}}}"
    breakdown = run(f"%c = u8[8]{{0}} all-to-all(%p), {text}", END, chips=chips)
    assert breakdown.seconds == pytest.approx(8 * bytes_over_link)


@pytest.mark.parametrize(
    "topology, devices, links",
    [
        ((2, 2, 1), slice(None), 2),  # all 8: a link along x and one along y
        ((2, 2, 1), slice(0, 4), 1),
        ((2, 2, 1), slice(0, None, 2), 2),
        ((2, 4, 4), slice(None), 3),  # not of whole cubes: lines
        ((4, 4, 4), slice(None), 6),  # a torus
        ((4, 4, 4), slice(0, 8), 2),  # one of its rings, along x
        ((4, 4, 4), slice(0, 4), 1),  # half of that ring: a line
        ((4, 4, 4), slice(0, 32), 4),
    ],
)
def test_links_out_of_a_chip(topology, devices, links):
    chips = places(topology)
    group = range(len(chips))[devices]
    assert schedule.links_out(group, chips) == links and schedule.links_out(group, ()) == math.inf
    one_of_a_chip = all(device % 2 == 0 for device in group)
    groups = [list(group), [device + 1 for device in group]] if one_of_a_chip else [list(group)]
    for colours in (1, 2, 4, 6):
        text = f"replica_groups={{{','.join('{' + ','.join(map(str, g)) + '}' for g in groups)}}}, {rings(colours)}"
        breakdown = run(f"%c = u8[8]{{0}} all-gather(%p), {text}", END, chips=chips)
        expected = 8 * (1 - 1 / len(group)) / min(colours, links) * len(groups)
        assert breakdown.seconds == pytest.approx(expected)


@pytest.mark.parametrize("colors, seconds", [(1, 48), (2, 24)])
def test_an_all_reduce_fused_with_a_slice_is_a_reduce_scatter(colors, seconds):
    """XLA:TPU writes it so if the shards are padded; here for two arrays at once."""
    fused = computation(
        "all-reduce-scatter",
        "%q = u8[8]{0} parameter(0)",
        "%zero = u8[] constant(0)",
        "%padded = u8[16]{0} pad(%q, %zero), padding=0_8",
        f"%sum = (u8[16]{{0}}, u8[16]{{0}}) all-reduce(%padded, %padded), {GROUPS}, to_apply=%vector",
        "%first = u8[16]{0} get-tuple-element(%sum), index=0",
        "%second = u8[16]{0} get-tuple-element(%sum), index=1",
        "%at = u32[] partition-id()",
        "%mine = u8[4]{0} dynamic-slice(%first, %at), dynamic_slice_sizes={4}",
        "%also = u8[4]{0} dynamic-slice(%second, %at), dynamic_slice_sizes={4}",
        "%both = (u8[4]{0}, u8[4]{0}) tuple(%mine, %also)",
    )
    debug = f'"debug":"\\nStrategyRing{{colors:{colors} phases:1}}"'
    config = f'backend_config={{"collective_algorithm_config":{{"emitter":"AllReduceScatterFusion",{debug}}}}}'
    line = f"%c = (u8[4]{{0}}, u8[4]{{0}}) fusion(%p), kind=kCustom, calls=%all-reduce-scatter, {config}"
    breakdown = run(work("a", 1), line, END, more=fused)
    assert breakdown.seconds == 1 + seconds
    (message,) = breakdown.collectives
    assert (message.kind, message.nbytes, message.synchronous, message.groups) == (
        "reduce-scatter",
        32,
        True,
        ((0, 2, 4, 6), (1, 3, 5, 7)),
    )


@pytest.mark.parametrize("capacity", [3, 32])
def test_a_ragged_all_to_all_moves_at_most_the_smaller_buffer(capacity):
    out, sizes = f"%out = u8[{capacity}]{{0}} iota(), iota_dimension=0", "%sizes = s32[4]{0} iota(), iota_dimension=0"
    ragged = f"ragged-all-to-all(%p, %out, %sizes, %sizes, %sizes, %sizes), {GROUPS}"
    (message,) = run(out, sizes, f"%c = u8[{capacity}]{{0}} {ragged}", END).collectives
    assert message.nbytes == min(capacity, 8) and message.seconds == min(capacity, 8) * 3 / 4


def test_asynchronous_collectives_of_the_tensorcore():
    start = f"%s = (u8[8]{{0}}, u8[32]{{0}}) all-gather-start(%p), {GROUPS}"
    reduce = f"%r = u8[8]{{0}} all-reduce-start(%p), {GROUPS}, to_apply=%vector"
    breakdown = run(start, done("d", "s", "all-gather-done"), reduce, done("e", "r", "all-reduce-done"), END)
    assert [(m.nbytes, m.seconds, m.engine) for m in breakdown.collectives] == [
        (32, 2 * 24, "TensorCore"),
        (8, 2 * 12, "TensorCore"),
    ]
    assert breakdown.seconds == 72
    start += ', backend_config={"device_type":"DEVICE_TYPE_SPARSECORE"}'
    assert run(start, done("d", "s", "all-gather-done"), END).collectives[0].engine == "SparseCore"


@pytest.mark.parametrize(
    "groups, expected",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=1,'b'=8] {'a','b'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_replica_groups(groups, expected):
    (message,) = run(f"%c = u8[8]{{0}} all-gather(%p), replica_groups={groups}", END).collectives
    assert message.groups == expected


# -- copies


@pytest.mark.parametrize(
    "start, opcode, seconds, category",
    [
        ("(u8[8]{0:S(1)}, u8[8]{0}, u32[]{:S(2)}) copy-start(%p)", "copy", 4, "waits for DMA copies"),
        ("(u8[8]{0}, u8[8]{0}, u32[]{:S(2)}) copy-start(%p)", "copy", 8, "waits for DMA copies"),
        ("(u8[8]{0:T(8)S(5)}, u8[8]{0}, u32[]{:S(2)}) copy-start(%p)", "copy", 16, "host"),
        ("(u8[8]{0}, u8[8]{0:T(8)S(5)}, u32[]{:S(2)}) copy-start(%p)", "copy", 16, "host"),
        (
            "((u8[8]{0}), u8[2]{0:S(1)}, s32[]{:S(2)}) slice-start(%p), slice={[0:2]}",
            "slice",
            1,
            "waits for DMA copies",
        ),
        ("((u8[8]{0:S(5)}), u8[2]{0}, u32[]{:S(2)}) dynamic-slice-start(%far)", "dynamic-slice", 4, "host"),
        (
            "((u8[8]{0:S(5)}, u8[3]{0}), u8[8]{0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%far, %three)",
            "dynamic-update-slice",
            6,
            "host",
        ),
        ("(u8[8]{0}, u32[], token[]) send(%p), channel_id=1", "send", 32, "waits for network copies"),
        ("(u8[8]{0}, u32[], token[]) recv(%p), channel_id=1, is_host_transfer=true", "recv", 16, "host"),
    ],
)
def test_copies_occupy_their_own_queue(start, opcode, seconds, category):
    far = ("%far = u8[8]{0:S(5)} bitcast(%p)", "%three = u8[3]{0} bitcast(%p)")
    breakdown = run(*far, f"%s = {start}", permute("q", 2), work("a", 1), done("d", "s", f"{opcode}-done"), END)
    assert breakdown.seconds == seconds
    assert breakdown.categories == ({"elementwise": 1, category: seconds - 1} if seconds > 1 else {"elementwise": 1})


def test_copies_to_and_from_the_host_do_not_wait_for_each_other():
    down = "%s = (u8[8]{0:S(5)}, u8[8]{0}, u32[]{:S(2)}) copy-start(%p)"
    up = "%t = (u8[8]{0}, u8[8]{0:S(5)}, u32[]{:S(2)}) copy-start(%p)"
    ends = (done("d", "s", "copy-done"), done("e", "t", "copy-done"), END)
    assert run(down, up, *ends).seconds == 16
    assert run(down, down.replace("%s", "%t"), *ends).seconds == 32


@pytest.mark.parametrize(
    "line, seconds",
    [
        ("%x = u8[8]{0} add(%p, %p)", 12),
        ("%x = u8[8]{0:S(1)} add(%p, %near)", 4),  # VMEM is not HBM
        ("%x = u8[8]{0} dynamic-update-slice(%p, %two, %zero)", 2),  # in place: the update is read and written
        ("%x = u8[2]{0} dynamic-slice(%p, %zero), dynamic_slice_sizes={2}", 2),
        ("%x = s32[]{:S(6)} add(%zero, %zero)", 0),
        ("%x = u8[8]{0} sort(%p), dimensions={0}, to_apply=%vector", 48),  # 3 * 4 / 2 = 6 passes
    ],
)
def test_without_an_estimate_the_bytes_count(line, seconds):
    operands = ("%near = u8[8]{0:S(1)} bitcast(%p)", "%two = u8[2]{0} bitcast(%p)", "%zero = s32[] constant(0)")
    assert run(*operands, line, END).seconds == seconds


SLICED = """%sliced (stack: u8[8], index: s32[], row: u8[2]) -> (u8[8], u8[2]) {
  %stack = u8[8]{0} parameter(0)
  %index = s32[] parameter(1)
  %row = u8[2]{0} parameter(2)
  %flat = u8[8]{0} bitcast(%stack)
  %old = u8[2]{0} dynamic-slice(%flat, %index), dynamic_slice_sizes={2}
  %sum = u8[2]{0} add(%old, %row)
  %new = u8[8]{0} dynamic-update-slice(%stack, %sum, %index)
  %same = u8[8]{0} bitcast(%new)
  ROOT %both = (u8[8]{0}, u8[2]{0}) tuple(%same, %sum)
}

%outer (a: u8[8], i: s32[], r: u8[2]) -> (u8[8], u8[2]) {
  %a = u8[8]{0} parameter(0)
  %i = s32[] parameter(1)
  %r = u8[2]{0} parameter(2)
  ROOT %inner = (u8[8]{0}, u8[2]{0}) fusion(%a, %i, %r), kind=kLoop, calls=%sliced
}

"""


@pytest.mark.parametrize("called", ["sliced", "outer"])
def test_a_fusion_moves_the_slices_that_it_reads_and_writes(called):
    """A row of two bytes is read of the stack and one of its own; the sum is written twice, once into the stack."""
    line = "%x = (u8[8]{0}, u8[2]{0}) fusion(%p, %zero, %two), kind=kLoop, calls=%" + called
    operands = ("%two = u8[2]{0} bitcast(%p)", "%zero = s32[] constant(0)")
    assert run(*operands, line, END, more=SLICED).seconds == (2 + 2 + 2 + 2) / RATES.hbm_bytes_per_s


CONVERTED = """%converted (wide: f32[8], stack: u8[8], index: s32[]) -> (u8[8], u8[8]) {
  %wide = f32[8]{0} parameter(0)
  %stack = u8[8]{0} parameter(1)
  %index = s32[] parameter(2)
  %sum = f32[8]{0} add(%wide, %wide)
  %narrow = u8[8]{0} convert(%sum)
  %more = f32[8]{0} convert(%stack)
  %part = f32[2]{0} slice(%sum), slice={[0:2]}
  %new = f32[8]{0} dynamic-update-slice(%more, %part, %index)
  %updated = u8[8]{0} convert(%new)
  ROOT %both = (u8[8]{0}, u8[8]{0}) tuple(%narrow, %updated)
}

"""


def test_a_fusion_writes_its_results_in_their_own_type():
    """It computes in float32 and writes 8 bytes of one result, 2 into the other; it reads 32 bytes."""
    line = "%x = (u8[8]{0}, u8[8]{0}) fusion(%w, %p, %zero), kind=kLoop, calls=%converted"
    operands = ("%w = f32[8]{0} bitcast(%p)", "%zero = s32[] constant(0)")
    assert run(*operands, line, END, more=CONVERTED).seconds == (32 + 8 + 2) / RATES.hbm_bytes_per_s


def test_an_operation_takes_its_counted_cycles_or_its_bytes():
    """It reads 8 bytes and writes 8, at 2 a second."""
    rates = dataclasses.replace(RATES, clock_hz=2.0, estimates_hz=4.0)
    for counted, seconds, by in (({"a": 100}, 50, "bundles"), ({"a": 6}, 8, "bytes"), ({"b": 1}, 20, "cycles")):
        breakdown = walk(parse(text(work("a", 80), END)), rates=rates, counted=counted)
        assert (breakdown.seconds, breakdown.ops[0].by) == (seconds, by)
        assert breakdown.counted == (by != "cycles")


def test_the_largest_integer_is_no_estimate():
    assert run(work("a", 2**63 - 1), END).seconds == 8


# -- unknown cycles, and text that cannot be parsed


KERNEL = '%flash.3 = u8[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name="op/attention"}'


def test_kernels_without_cycles():
    with pytest.raises(ValueError, match=r"tpu_custom_call %flash.3 op/attention\n  .*other\ngive them: kernels="):
        run(KERNEL, KERNEL.replace("flash.3", "other").replace("op/attention", "other"), END)
    for pattern in ("flash", "op/att", "^tpu_custom"):
        breakdown = run(KERNEL, END, kernels={"nothing": 5, pattern: 11})
        assert breakdown.seconds == 11 and breakdown.categories == {"kernel flash": 11}
        assert breakdown.ops[0].by == "caller" and not breakdown.uncounted
    breakdown = run(KERNEL, work("a", 2), END, uncounted=True)
    assert breakdown.seconds == 2 and "flash.3" in breakdown.uncounted[0]


@pytest.mark.parametrize(
    "line",
    [
        "%x = u8[8]{0} newfangled(%p)",
        "%x = u8[8]{0} convolution(%p, %p)",
        "%x = u8[8]{0} fusion(%p), kind=kOutput, calls=%matmul",
        '%x = u8[8]{0} custom-call(%p), custom_call_target="Unheard"',
        "%x = ((u8[8]{0}), u8[8]{0}) newfangled-start(%p)",
        '%x = ((u8[8]{0}), u8[8]{0}) call-start(%p), async_execution_thread="host", to_apply=%vector',
    ],
)
def test_an_instruction_of_unknown_time_is_an_error(line):
    with pytest.raises(ValueError, match=r"line (15|5): "):
        run(line, END)
    assert len(run(line, END, uncounted=True).uncounted) == 1


def test_instructions_that_take_no_time():
    free = '%x = u8[8]{0} custom-call(%p), custom_call_target="AllocateBuffer"'
    assert run(free.replace("AllocateBuffer", "SliceId"), END).seconds == 0
    assert run(free, "%t = (u8[8]{0}) tuple(%x)", "%g = u8[8]{0} get-tuple-element(%t), index=0", END).seconds == 0


def test_a_custom_call_that_writes_zeros_takes_the_time_of_its_bytes():
    breakdown = run('%x = u8[8]{0} custom-call(%p), custom_call_target="ZeroCrop"', END)
    assert breakdown.categories == {"copies and layouts": (8 + 8) / RATES.hbm_bytes_per_s}


@pytest.mark.parametrize(
    "old, new, wrong",
    [
        ("is_scheduled=true", "", "is_scheduled=true is not in its first line"),
        ("%a = u8[8]{0} fusion(", "%a = u8[8]{0} ", "line 15: no opcode after the type"),
        ("kind=kLoop, calls", "kind=kLoop, (calls", "line 15: a bracket stays open"),
        ("kind=kLoop, calls", "kind, calls", "line 15: 'kind' is not an attribute"),
        ('"3"}}', '"3"}', "line 15: "),
        ('"3"}}', "3x}}", "line 15: "),
        ("u8[8]{0} fusion", "q8[8]{0} fusion", "line 15: "),
        ("u8[8]{0} fusion", "u8[8, 9]{0} fusion", "line 15: "),
        ("calls=%vector", "calls=%nowhere", "line 15: there is no computation nowhere"),
        ("fusion(%p)", "fusion(%q)", "line 15: there is no %q"),
        ("%a = ", "%p = ", "line 15: main has %p twice"),
        ("  %a = ", "  a = ", "line 15: no instruction"),
        ("  ROOT %end", "  %end", "line 17: main ends without a ROOT"),
        ("ENTRY %main", "%main", "ends without an ENTRY"),
        ("ENTRY %main (p: u8[8]) -> u8[8] {", "ENTRY %main", "line 13: no computation begins here"),
    ],
)
def test_errors_of_the_parser_name_the_line(old, new, wrong):
    program = text(work("a", 3), END)
    assert program.count(old) >= 1 and walk(parse(program), rates=RATES).seconds == 3
    head, _, tail = program.rpartition(old)
    with pytest.raises(ValueError, match=re.escape(wrong)):
        parse(head + new + tail)


def test_done_without_a_start():
    with pytest.raises(ValueError, match="%d waits for what was not started"):
        run(done("d", "p"), END)
    with pytest.raises(ValueError, match="has a form that is not known"):
        run("%c = u8[8]{0} all-gather(%p), replica_groups=mesh['a'=8] {'a':(1)2}", END)


def test_instructions_that_span_lines_and_tables_of_sources():
    tables = (
        'FileNames\n1 "m.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n1 {file_name_id=1 function_name_id=1 line=9}\n'
    )
    tables += "\nStackFrames\n7 {file_location_id=1 parent_frame_id=7}\n\n"
    kernel = KERNEL.replace('attention"}', 'attention" stack_frame_id=7}')
    kernel += ', backend_config={"custom_call_config":{"metadata":{\n"a": "x, {y",\n  "b": [1,\n 2]\n}\n}}'
    program = parse(text(kernel, work("a", 1), END).replace("\n\n", "\n\n" + tables, 1))
    instruction = program.computations["main"]["flash.3"]
    assert instruction.config["custom_call_config"]["metadata"] == {"a": "x, {y", "b": [1, 2]}
    assert walk(program, rates=RATES, kernels={"flash": 4}).ops[0].source == "m.py:9"


def test_the_fields_of_an_instruction():
    line = "%c = (f32[2,<=3]{1,0:T(8,128)S(1)}, /*index=1*/pred[]) async-start(%p, f32[] %q), calls=%vector, "
    line += 'channel_id=7, async_execution_thread="sparsecore", control-predecessors={%q, %p}, custom={a, b}'
    program = parse(text("%q = f32[] constant(1.5)", line, END))
    c = program.computations["main"]["c"]
    assert [(s.dtype, s.dims, s.space, s.nbytes) for s in c.shapes] == [("f32", (2, 3), 1, 24), ("pred", (), 0, 1)]
    assert (c.operands, c.called, c.channel) == (("p", "q"), {"calls": ("vector",)}, 7)
    assert (c.thread, c.after, c.attributes) == ("sparsecore", ("q", "p"), {"custom": "{a, b}"})
    assert program.computations["main"]["q"].literal == "1.5" and program.root("main").name == "end"


# -- constants and command line


def test_the_rates_equal_those_of_the_other_predictions():
    chip, rates = CHIPS["tpu7x"], TPU7X
    assert (rates.clock_hz, rates.estimates_hz, rates.kernel_clock_hz) == (1.9e9, 2.2e9, 1.76e9)
    fastest = rates_of(hardware.chip_of("tpu7x+p_state=7"))
    for name in ("clock_hz", "estimates_hz", "kernel_clock_hz"):
        assert getattr(fastest, name) == pytest.approx(2.2 / 1.9 * getattr(rates, name))
    assert fastest.hbm_bytes_per_s == rates.hbm_bytes_per_s
    assert rates.link_bytes_per_s == TODAY.links * chip.link_bytes_per_s == 89e9
    assert rates.die_to_die_bytes_per_s == TODAY.links * chip.die_to_die_bytes_per_s
    assert rates.hbm_bytes_per_s == TODAY.hbm * chip.hbm_bytes_per_s / 2
    assert rates.host_bytes_per_s == TODAY.host_bytes_per_s


def test_another_chip_has_the_same_shares_of_its_own_figures():
    lines = (work("a", 7), permute("s", 8 * 89 * 10**9), done("d", "s"), KERNEL, END)
    seconds = lambda rates: walk(parse(text(*lines)), rates=rates, kernels={"flash": 14e9}).seconds
    v6e = CHIPS["v6e"]
    assert seconds(rates_of(v6e)) == pytest.approx(8 + 14e9 / (1.76 / 1.9 * 1.75e9))  # a link is as fast as TPU7x's
    assert seconds(TPU7X) == pytest.approx(8 + 14e9 / 1.76e9)
    assert rates_of(v6e).hbm_bytes_per_s == 0.87 * 1638e9
    assert rates_of(v6e).host_bytes_per_s == v6e.pcie_bytes_per_s == 32e9


def test_command_line(tmp_path, capsys):
    more, lines = loop("l", 3, permute("s" * 90, 5 * 10**9), work("a" * 90, 22 * 10**8), done("d", "s" * 90))
    (tmp_path / "p.hlo").write_text(text(*lines, KERNEL, END, more=more))
    schedule.main([str(tmp_path / "p.hlo"), "--kernel=flash=1.76e9", "--link_bytes_per_s=2.5e9"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 120
    assert "total, predicted                    7.000000 s" in printed  # 3 * 2 s on the link, 1 s of the kernel
    slower = ["--link_bytes_per_s=2.5e9", "--estimates_hz=1.1e9", "--kernel_clock_hz=0.88e9"]
    schedule.main([str(tmp_path / "p.hlo"), "--kernel=flash=1.76e9", *slower, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["seconds"] == pytest.approx(3 * 2 + 2) and printed["messages"][0]["hidden_s"] == pytest.approx(3 * 2)
    program = str(tmp_path / "p.hlo")
    for arguments in ([program, "--kernel=flash"], [program], [str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            command.run(schedule.main, arguments)
        assert "error:" in capsys.readouterr().err


# -- FLOPs of matmuls


@pytest.mark.parametrize(
    "lhs, rhs, result, attributes, products",
    [
        ("bf16[4,8]", "bf16[8,2]", "f32[4,2]", "dim_labels=bf_io->bf", 4 * 8 * 2),
        ("bf16[8,4]", "bf16[2,8]", "f32[4,2]", "dim_labels=fb_oi->bf", 4 * 8 * 2),
        # Two dims contracted: the second is a window over all of it.
        ("f32[4,3,8]", "f32[2,3,8]", "f32[4,2,1]", "window={size=3}, dim_labels=b0f_o0i->bf0", 4 * 3 * 8 * 2),
        # Two dims of the result: the window slides over padding and covers one element at each position.
        (
            "f32[4,8,1]",
            "f32[8,3,2]",
            "f32[4,3,2]",
            "window={size=3 pad=2_2 rhs_reversal=1}, dim_labels=bf0_i0o->b0f",
            4 * 3 * 8 * 2,
        ),
        # A convolution: 5 positions of 3 taps; at the first and the last position one tap is in the padding.
        ("f32[4,5,8]", "f32[3,8,2]", "f32[4,5,2]", "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 4 * 13 * 8 * 2),
        (
            "f32[1,4,4,1]",
            "f32[2,2,1,1]",
            "f32[1,2,2,1]",
            "window={size=2x2 stride=2x2}, dim_labels=b01f_01io->b01f",
            16,
        ),
        ("pred[8,4]", "s8[4,16]", "s8[8,16]", "dim_labels=bf_io->bf", 8 * 4 * 16),
        # The gradient of a convolution: products with the zeros between the elements are not counted either.
        ("f32[1,2,1]", "f32[2,1,1]", "f32[1,4,1]", "window={size=2 pad=1_1 lhs_dilate=2}, dim_labels=b0f_0io->b0f", 4),
        # A window as long as a device has tokens. Pairs of a position and a tap, one by one, would take half an hour.
        (
            "f32[1,131072,1]",
            "f32[131072,1,1]",
            "f32[1,131071,1]",
            "window={size=131072 pad=65535_65535}, dim_labels=b0f_0io->b0f",
            131_071 * 131_072 - 65_535 * 65_536,
        ),
        (
            "f32[1,81920,1]",
            "f32[81920,1,1]",
            "f32[1,81920,1]",
            "window={size=81920 stride=81919 lhs_dilate=81920}, dim_labels=b0f_0io->b0f",
            81_920,
        ),
    ],
)
def test_flops_of_a_convolution(lhs, rhs, result, attributes, products):
    program = parse(
        f"{HEADER}\n%fused (a: {lhs}, b: {rhs}) -> {result} {{\n  %a = {lhs} parameter(0)\n  %b = {rhs} parameter(1)\n"
        f"  ROOT %c = {result} convolution(%a, %b), {attributes}\n}}\n\n"
        f"ENTRY %main (x: {lhs}, y: {rhs}) -> {result} {{\n  %x = {lhs} parameter(0)\n  %y = {rhs} parameter(1)\n"
        f"  ROOT %f = {result} fusion(%x, %y), kind=kOutput, calls=%fused\n}}\n"
    )
    bits = int(re.search(r"\d+", rhs)[0])
    main = program.computations["main"]
    assert matmul_flops(program, main, main["f"]) == {bits: 2 * products}


@pytest.mark.parametrize(
    ("lhs", "rhs", "bits"),
    [
        ("f32", "bf16", 32),
        ("bf16", "f32", 32),
        ("f8e5m2", "bf16", 16),
        ("bf16", "f8e4m3fn", 16),
        ("f8e5m2", "f8e4m3fn", 8),
        ("pred", "bf16", 16),
        ("bf16", "s8", 16),
    ],
)
@pytest.mark.parametrize(
    "matmul",
    ["dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "convolution(%x, %y), dim_labels=bf_io->bf"],
)
def test_flops_of_mixed_types_count_as_the_wider_type(lhs, rhs, bits, matmul):
    program = parse(
        f"{HEADER}\nENTRY %main (x: {lhs}[4,8], y: {rhs}[8,2]) -> f32[4,2] {{\n  %x = {lhs}[4,8] parameter(0)\n"
        f"  %y = {rhs}[8,2] parameter(1)\n  ROOT %c = f32[4,2] {matmul}\n}}\n"
    )
    main = program.computations["main"]
    assert matmul_flops(program, main, main["c"]) == {bits: 2 * 4 * 8 * 2}


def test_products_of_random_convolutions_are_those_with_an_element():
    rng = random.Random(0)
    for _ in range(200):
        length, size, stride, inner, outer = (rng.randint(1, 5) for _ in range(5))
        low, high = (rng.randint(0, 4) for _ in range(2))
        padded = [False] * low + [i % inner == 0 for i in range((length - 1) * inner + 1)] + [False] * high
        positions = range(0, len(padded) - (size - 1) * outer, stride)
        if not positions:
            continue
        products = sum(padded[position + tap * outer] for position in positions for tap in range(size))
        window = f"size={size} stride={stride} pad={low}_{high} lhs_dilate={inner} rhs_dilate={outer}"
        line = f"%c = f32[1,{len(positions)},1] convolution(%a, %b), window={{{window}}}, dim_labels=b0f_0io->b0f"
        program = parse(text(f"%a = f32[1,{length},1] iota()", f"%b = f32[{size},1,1] iota()", line))
        main = program.computations["main"]
        assert matmul_flops(program, main, main["c"]) == {32: 2 * products}


def test_a_convolution_with_batch_groups_is_an_error():
    line = "%c = u8[8]{0} convolution(%p, %p), batch_group_count=2, dim_labels=bf_io->bf"
    program = parse(text(line))
    with pytest.raises(ValueError, match="batch_group_count are not counted"):
        matmul_flops(program, program.computations["main"], program.computations["main"]["c"])


# -- compiled for TPU7x


def mesh_of(topology: str, size: int) -> Mesh:
    wrap = {"wrap": (True, True, True)} if topology == "4x4x4" else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=f"tpu7x:{topology}", **wrap).devices
    devices = np.array(sorted(devices, key=lambda device: device.id))
    return Mesh(devices.reshape(-1, size), ("rest", "x"), axis_types=(AxisType.Auto,) * 2)


def spec(mesh: Mesh, shape: tuple, *dims, **kind) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*dims), **kind))


@pytest.mark.slow
def test_compiled_scan_of_matmuls():
    mesh = mesh_of("2x2x1", 8)
    scan = jax.jit(lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
    program = scan.lower(spec(mesh, (1024, 1024)), spec(mesh, (7, 1024, 1024))).compile().as_text()
    breakdown = walk(parse(program))
    (matmul,) = [op for op in breakdown.ops if op.category == "matmul"]
    assert matmul.count == 7 and matmul.op_name.endswith("dot_general") and "test_schedule.py" in matmul.source
    (cycles,) = re.findall(rf'%{re.escape(matmul.name)} = .*"estimated_cycles":"(\d+)"', program)
    assert matmul.seconds == pytest.approx(7 * int(cycles) / 2.2e9)
    assert not breakdown.collectives
    waits = sum(message.exposed_s for message in breakdown.messages)
    assert breakdown.seconds == pytest.approx(sum(op.seconds for op in breakdown.ops) + waits)


@pytest.mark.slow
@pytest.mark.parametrize("topology, colours", [("2x2x1", 4), ("4x4x4", 2)])
def test_compiled_gather_beside_matmuls(topology, colours, full_effort):
    """8 devices gather 64 MiB on the SparseCores; on 2x2x1 three matmuls beside it take longer and hide it.

    Two links lead out of a chip: to two neighbours on 2x2x1, in both directions along x on 4x4x4.
    """

    def per_device(w, x, y, matmuls):
        gathered = lax.all_gather(w, "x", tiled=True)
        for _ in range(matmuls):
            x = x @ y
        return gathered[:8] + 1, x

    mesh, links = mesh_of(topology, 8), 2
    chips = [(0, *device.coords) for device in mesh.devices.flat]
    breakdowns = {}
    for matmuls in (0, 3) if topology == "2x2x1" else (0,):
        function = jax.shard_map(
            lambda *args, matmuls=matmuls: per_device(*args, matmuls),
            mesh=mesh,
            in_specs=(P("x"), P(), P()),
            out_specs=(P("x"), P()),
            check_vma=False,
        )
        args = spec(mesh, (8 * 4096, 1024), "x"), spec(mesh, (4096, 4096)), spec(mesh, (4096, 4096))
        breakdowns[matmuls] = walk(parse(jax.jit(function).lower(*args).compile().as_text()), chips=chips)
    for matmuls, breakdown in breakdowns.items():
        (gather,) = breakdown.collectives
        assert (gather.kind, gather.engine, gather.rings) == ("all-gather", "SparseCore", colours)
        assert gather.groups[0] == tuple(range(8)) and len(gather.groups) == mesh.size // 8
        assert gather.seconds == pytest.approx(64 * 2**20 * 7 / 8 / (links * 89e9))
        matmul_s = sum(op.seconds for op in breakdown.ops if op.category == "matmul")
        assert gather.computed_s == pytest.approx(matmul_s, rel=0.1, abs=1e-5)
        assert gather.exposed_s == pytest.approx(max(gather.seconds - gather.computed_s, 0), abs=2e-5)
        assert (gather.exposed_s == 0) == (matmuls > 0)
    assert breakdowns[max(breakdowns)].seconds < 0.001 < 64 * 2**20 * 7 / 8 / (links * 89e9 / 20)


@pytest.mark.slow
def test_compiled_copies_from_and_to_the_host():
    """The host has the weights; each is fetched during the matmul before it. One copy returns the results."""
    mesh = mesh_of("2x2x1", 8)
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    device = NamedSharding(mesh, P())

    def stream(ws, x):
        return jax.device_put(lax.scan(lambda x, w: (x @ jax.device_put(w, device), x), x, ws)[1], host)

    args = spec(mesh, (7, 1024, 1024), memory_kind="pinned_host"), spec(mesh, (1024, 1024))
    breakdown = walk(parse(jax.jit(stream, out_shardings=host).lower(*args).compile().as_text()))
    copies = {end: [m for m in breakdown.messages if m.kind.endswith(end)] for end in ("from host", "to host")}
    for messages in copies.values():
        assert sum(m.nbytes * m.count for m in messages) == 7 * 2 * 2**20
        assert sum(m.seconds for m in messages) == pytest.approx(7 * 2 * 2**20 / 16e9)
    exposed_s = sum(m.exposed_s for messages in copies.values() for m in messages)
    assert breakdown.categories["host"] == pytest.approx(exposed_s)


def test_compiled_kernels_need_their_cycles():
    """A ring all-gather by remote DMA, and a matmul of its result."""
    multiply = lambda x: jnp.ones((8, 8 * 4096), x.dtype) @ ring_all_gather(x, "ring")
    program = parse(compiled_on_ring(multiply, (4096, 4096), jnp.bfloat16).as_text())
    with pytest.raises(ValueError, match=r"tpu_custom_call %all_gather_kernel\S* jit.*pallas_call"):
        walk(program)
    counted, uncounted = walk(program, kernels={"all_gather_kernel": 1.76e6}), walk(program, uncounted=True)
    assert counted.categories["kernel all_gather_kernel"] == pytest.approx(1e-3)
    assert counted.seconds == pytest.approx(uncounted.seconds + 1e-3) and uncounted.categories["matmul"] > 0


ATTENTION = {"flash_forward": 2e4, "flash_backward": 5e4}  # cycles of a call


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [True, False])
def test_compiled_train_step(prefetch, programs, full_effort):
    """Seven matrices a layer are gathered for the forward and the backward pass; their gradients are scattered once.

    With prefetch each pass gathers one layer more: one before the loop, and the last iteration's is not used. Without,
    these are attention's matrices only. The norms of all layers are gathered together, as two arrays; embedding and
    unembedding once.
    """
    layers, matrices, once = TPU["num_layers"], 7, 4
    more = matrices if prefetch else 4
    breakdown = walk(parse(compiled_step(Config(**TPU, prefetch=prefetch), programs)), kernels=ATTENTION)
    count = lambda kind: sum(message.count for message in breakdown.collectives if message.kind == kind)
    assert count("all-gather") == 2 * (layers * matrices + more) + once
    assert count("reduce-scatter") == layers * matrices + once
    on_sparsecores = [m for m in breakdown.collectives if m.kind in ("all-gather", "reduce-scatter")]
    assert {(m.engine, m.group_size, m.rings) for m in on_sparsecores} == {("SparseCore", 8, 4)}
    largest = max(m.nbytes for m in breakdown.collectives if m.synchronous)
    assert largest <= 2 * TPU["model_dim"]
    assert not breakdown.uncounted and breakdown.by_bytes_s < 0.01 * breakdown.seconds
    assert math.fsum(breakdown.categories.values()) == pytest.approx(breakdown.seconds)
    computed = math.fsum(op.seconds for op in breakdown.ops)
    assert breakdown.seconds == pytest.approx(computed + sum(m.exposed_s for m in breakdown.messages))
    gathered = sum(m.nbytes * m.count for m in on_sparsecores if m.kind == "all-gather")
    scattered = sum(m.nbytes * m.count for m in on_sparsecores if m.kind == "reduce-scatter")
    D, F, V, N, K, H = (TPU[k] for k in ("model_dim", "ff_dim", "vocab_size", "num_heads", "num_kv_heads", "head_dim"))
    layer = (attention := D * (2 * N + 2 * K) * H) + 3 * D * F
    more = layer if prefetch else attention
    assert gathered == pytest.approx(2 * (2 * (layers * layer + more) + 2 * V * D), rel=0.01)
    assert scattered == pytest.approx(2 * (layers * layer + 2 * V * D), rel=0.01)


@pytest.mark.slow
def test_faster_links_never_lengthen_a_train_step(programs):
    program = parse(compiled_step(Config(**TPU), programs))
    speeds = [
        walk(program, rates=dataclasses.replace(TPU7X, link_bytes_per_s=speed), kernels=ATTENTION)
        for speed in (1e9, 2e9, 4e9, 8e9, 89e9, 178e9)
    ]
    seconds = [breakdown.seconds for breakdown in speeds]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.5 * seconds[-1]
    computed = [math.fsum(op.seconds for op in breakdown.ops) for breakdown in speeds]
    assert max(computed) == pytest.approx(min(computed))
