"""Tests of compiled/liveness.py: peaks from the compiler's buffer assignment, and from its refusals."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from compiled import liveness
from compiled.liveness import GiB, grouped, peak, refusal

# -- an assignment written by hand: w is donated and updated in a loop that carries a sum

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <1 add.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4096, parameter 0, shape |f32[8,128]| at ShapeIndex {}, output shape is |f32[8,128]|, maybe-live-out:
 value: <2 w.1 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
 value: <9 fusion.9 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 2: size 8192, page 0, parameter 1, shape |f32[16,128]| at ShapeIndex {}:
 value: <3 x.1 @0> (size=8192,offset=0): f32[16,128]{1,0:T(8,128)}
allocation 3: size 20480, page 0, preallocated-temp:
 value: <4 convert.4 @0> (size=4096,offset=0): bf16[16,128]{1,0:T(8,128)(2,1)}
 value: <5 fusion.5{1} @0> (size=8192,offset=4096): f32[16,128]{1,0:T(8,128)}
 value: <6 while.6{2} (phi) @0> (size=8192,offset=4096): f32[16,128]{1,0:T(8,128)}
 value: <7 fusion.7 @0> (size=4096,offset=16384): f32[8,128]{1,0:T(8,128)}
 value: <8 fusion.8 @0> (size=2048,offset=16384): bf16[8,128]{1,0:T(8,128)(2,1)}
allocation 4: size 65536, color 1, page 0, preallocated-temp:
 value: <10 copy.10 @1> (size=65536,offset=0): f32[128,128]{1,0:T(8,128)S(1)}
allocation 5: size 262144, color 5, parameter 2, shape |f32[512,128]| at ShapeIndex {}:
 value: <11 h.1 @5> (size=262144,offset=0): f32[512,128]{1,0:T(8,128)S(5)}
"""

RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:w.1
    1:x.1
    2:convert.4
    3:fusion.5
    4:while.6
    5:fusion.7
    6:fusion.8
    7:copy.10
    8:fusion.9
  BufferLiveRange:
    w.1{}:0-8
    x.1{}:1-9
    convert.4{}:2-5
    fusion.5{1}:3-4
    while.6{2}:4-6
    fusion.7{}:5-6
    fusion.8{}:6-8
    copy.10{}:7-8
    fusion.9{}:8-9
  Live ranges at 7 (peak):
    copy.10{}: 65536 bytes (cumulative: 65536 bytes)
"""


def block(number: int, name: str, instruction: str, index: str = "", positions: tuple[str, ...] = ()) -> str:
    listed = "\n".join(f"  {position}" for position in (f"{name} {index}".strip(), *positions))
    phi = " (phi)" if "while" in name else ""
    return (
        f"<{number} {name}{index}{phi} @0>\n positions:\n{listed}\n uses:\n  other, operand 0\n from instruction: "
        f"%{name} = {instruction}\n"
    )


F = "f32[8,128]{1,0:T(8,128)}"
VALUES = "\nTotal bytes used: 1 (1B)\n\nUsed values:\n" + "".join(
    [
        block(1, "add.1", "f32[]{:T(128)} add(%a, %b)"),
        block(2, "w.1", f'{F} parameter(0), metadata={{op_name="state.params.layers.w_q"}}'),
        block(3, "x.1", f'{F} parameter(1), metadata={{op_name="batch.tokens"}}'),
        block(4, "convert.4", "bf16[16,128]{1,0} convert(%bitcast.3)"),
        block(5, "fusion.5", f'({F}, {F}) fusion(%x.1), metadata={{op_name="jit(f)/add" stack_frame_id=1}}', "{1}"),
        block(6, "while.6", f'({F}, /*index=1*/{F}) while(%t), metadata={{op_name="jit(f)/while"}}', "{2}"),
        block(7, "fusion.7", f'{F} fusion(%x.1), metadata={{op_name="jit(f)/mul" stack_frame_id=2}}'),
        block(8, "fusion.8", f'{F} fusion(%x.1), metadata={{op_name="jit(f)/mul" stack_frame_id=2}}'),
    ]
).replace("  x.1\n", "  x.1\n  bitcast.3\n")

PROGRAM = """HloModule jit_f, is_scheduled=true

FileNames
1 "/project/model.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=11 end_line=11 column=2 end_column=38}
2 {file_name_id=1 function_name_id=1 line=22 end_line=22 column=2 end_column=38}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""


def test_the_peak_is_where_most_bytes_are_live_and_a_place_counts_once():
    result = peak(ASSIGNMENT, RANGES, VALUES, PROGRAM)
    assert result.total_bytes == 512 + 4096 + 8192 + 20480  # HBM alone: VMEM is color 1, the host 5
    # Live at 5: the bfloat16 copy, the loop's result in the place of fusion.5, and fusion.7; fusion.8 comes later.
    sizes = {(buffer.op, buffer.source): buffer.nbytes for buffer in result.buffers if buffer.kind == "temporary"}
    assert sizes == {
        ("convert of batch.tokens", ""): 4096,
        ("jit(f)/add", "/project/model.py:11"): 8192,
        ("jit(f)/mul", "/project/model.py:22"): 4096,
    }
    assert (result.op, result.source) == ("jit(f)/mul", "/project/model.py:22")
    assert result.live_bytes == 512 + 4096 + 8192 + 16384
    assert [buffer.nbytes for buffer in result.buffers] == sorted((b.nbytes for b in result.buffers), reverse=True)
    arguments = 512 + 4096 + 8192
    assert result.over_step == (
        ("w.1", arguments),
        ("x.1", arguments),
        ("convert.4", arguments + 4096),
        ("fusion.5", arguments + 12288),
        ("while.6", arguments + 12288),
        ("fusion.7", arguments + 16384),
        ("fusion.8", arguments + 12288),
        ("copy.10", arguments + 2048),
        ("fusion.9", arguments + 2048),
    )


def test_a_donated_argument_is_one_buffer_of_its_own_kind():
    kinds = {buffer.op: (buffer.kind, buffer.nbytes) for buffer in peak(ASSIGNMENT, RANGES, VALUES, PROGRAM).buffers}
    assert kinds["state.params.layers.w_q"] == ("donated argument", 4096)
    assert kinds["batch.tokens"] == ("argument", 8192)


def test_text_that_cannot_be_parsed_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="neither a value nor an allocation: something new"):
        peak(ASSIGNMENT + "something new\n", RANGES, VALUES, PROGRAM)
    with pytest.raises(ValueError, match=r"convert.4\{\} has 4096 bytes in HBM and no live range"):
        peak(ASSIGNMENT, RANGES.replace("    convert.4{}:2-5\n", ""), VALUES, PROGRAM)
    with pytest.raises(ValueError, match="wrote no buffer assignment"):
        liveness.read(tmp_path)


def test_buffers_of_one_line_and_arguments_of_one_subtree_are_one_row():
    buffer = lambda nbytes, op, kind="temporary", source="": liveness.Buffer(nbytes, kind, f"u8[{nbytes}]", op, source)
    rows = grouped(
        [
            buffer(5, "state.params.layers.w_q", "argument"),
            buffer(7, "state.params.layers.w_k", "argument"),
            buffer(100, "state.params.embed", "argument"),
            buffer(20, "jit(f)/dot.general", source="m.py:1"),
            buffer(30, "jit(f)/dot.general", source="m.py:1"),
            buffer(40, "jit(f)/dot.general", source="m.py:2"),
        ]
    )
    assert [(row["op"], row["source"], row["bytes"], row["count"], row["largest_shape"]) for row in rows] == [
        ("state.params.embed", "", 100, 1, "u8[100]"),
        ("jit(f)/dot.general", "m.py:1", 50, 2, "u8[30]"),
        ("jit(f)/dot.general", "m.py:2", 40, 1, "u8[40]"),
        ("state.params.layers.*", "", 12, 2, "u8[7]"),
    ]
    lines = liveness.describe({"largest_buffers": rows}, GiB, top=2)
    assert len(lines) == 4 and "2      in all others" not in lines[-1] and lines[-1].endswith("3  in all others")


# -- compiled programs


def traced(function, *shapes: tuple[int, ...], donate: tuple[int, ...] = ()):
    device = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[0]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(device)) for shape in shapes]
    return jax.jit(function, donate_argnums=donate).lower(*args)


def scanned(x, ws):
    """Sixteen layers whose inputs are saved for the backward pass."""

    def loss(ws):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)
        return (y**2).sum()

    return ws - jax.grad(loss)(ws)


@pytest.mark.slow
def test_the_live_bytes_of_a_loop_sum_to_the_compilers_peak(tmp_path):
    lowered = traced(scanned, (8192, 1024), (16, 1024, 1024), donate=(1,))
    stats = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)}).memory_analysis()
    result = liveness.read(tmp_path)
    assert result.total_bytes == pytest.approx(getattr(stats, "total_allocation_bytes", result.total_bytes), rel=1e-3)
    assert result.live_bytes <= result.total_bytes  # counted twice, the loop's arrays would exceed it
    assert result.live_bytes == pytest.approx(stats.peak_memory_in_bytes, rel=0.02)
    rows = {row["op"]: row for row in grouped(result.buffers)}
    assert rows["ws"]["kind"] == "donated argument" and rows["ws"]["bytes"] == 16 * 2**22
    assert rows["x"]["kind"] == "argument" and rows["x"]["bytes"] == 2**25
    # The largest buffer holds what the scan saves for each layer; its name is that of the write, not of the loop.
    saved = next(row for row in grouped(result.buffers) if "dynamic_update_slice" in row["op"])
    assert saved["bytes"] >= 16 * 8192 * 1024 * 2 and "test_liveness.py" in saved["source"]


def refused(size: int, folder) -> str:
    """The compiler's message for a program with an array of size x size in float32."""
    lowered = traced(lambda x: jnp.sin(x @ x.T).sum(0) @ jnp.cos(x @ x.T), (size, 128))
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        lowered.compile(compiler_options={"xla_dump_to": str(folder)})
    return str(error.value)


@pytest.mark.slow
def test_a_program_that_does_not_fit_in_hbm(tmp_path):
    message = refused(200_000, tmp_path)
    parsed = refusal(message)
    assert parsed["memory"] == "hbm" and parsed["limit_bytes"] / GiB == pytest.approx(94.74, abs=0.02)
    assert parsed["used_bytes"] >= 200_000**2 * 4
    assert parsed["over_bytes"] == parsed["used_bytes"] - parsed["limit_bytes"]
    # The message leaves out what the assignment has: rows of 200,000 floats are padded to 200,064.
    full = liveness.read_refused(tmp_path, message)
    largest = full.buffers[0]
    assert (largest.nbytes, largest.shape) == (200_000 * 200_064 * 4, "f32[200000,200000]")
    assert largest.op.endswith("dot_general") and "test_liveness.py:" in largest.source
    assert full.live_bytes == pytest.approx(parsed["used_bytes"], rel=1e-3)
    assert liveness.read_refused(tmp_path, "exceeded scoped vmem") is None
    assert liveness.read_refused(tmp_path / "nothing", message) is None


@pytest.mark.slow
@pytest.mark.parametrize("num_arrays", [1, 2])
def test_a_program_that_does_not_fit_on_its_host(num_arrays):
    """A loop offloads more than 128 GiB, in one array or in two: the compiler words its messages differently."""
    num_layers = 16 * (130 // num_arrays + 2)

    def offloading(x):
        def forward(x, _):
            saved = [jnp.sin(x + i) for i in range(num_arrays)]
            return sum(saved), [jax.device_put(array, jax.memory.Space.Host) for array in saved]

        def backward(x, saved):
            return x * sum(jax.device_put(array, jax.memory.Space.Device) for array in saved), None

        x, saved_L = lax.scan(forward, x, length=num_layers)
        return lax.scan(backward, x, saved_L, reverse=True)[0]

    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        traced(offloading, (64, 1024, 256)).compile()
    parsed = refusal(str(error.value))
    assert (parsed["memory"], parsed["limit_bytes"]) == ("host", 128 * GiB)
    assert parsed["used_bytes"] == num_layers * num_arrays * GiB // 16
    assert [row["largest_shape"] for row in parsed["largest_buffers"]] == [f"f32[{num_layers},64,1024,256]"] * (
        num_arrays > 1
    )


# -- messages


def test_a_message_that_lists_the_largest_buffers():
    text = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 96.00G of 94.74G hbm. Exceeded by 1.26G.

  Largest program allocations in hbm:

  1. Size: 32.00G
     Operator: op_name="jit(step)/dot_general" source_file="/x/model.py" source_line=12
     Shape: bf16[131072,131072]{1,0:T(8,128)(2,1)}

  2. Size: 512.0M
     Shape: f32[8192,16384]{1,0:T(8,128)}
"""
    parsed = refusal(text)
    assert (parsed["memory"], parsed["used_bytes"]) == ("hbm", 96 * 2**30)
    first, second = parsed["largest_buffers"]
    assert first["bytes"] == 2**35 and first["source"] == "/x/model.py:12" and "jit(step)/dot_general" in first["op"]
    assert (second["bytes"], second["largest_shape"], second["op"]) == (2**29, "f32[8192,16384]", "")


@pytest.mark.parametrize(
    "text, memory, used, limit",
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (149.16G) exceeds available HBM (94.74G). HLO module: jit_step.\nSee https://openxla.org",
            "hbm",
            149.16 * 2**30,
            94.74 * 2**30,
        ),
        (
            "Scoped allocation with size 48.00M and limit 32.00M exceeded scoped vmem limit by 16.00M.",
            "vmem",
            48 * 2**20,
            32 * 2**20,
        ),
        (
            "Ran out of memory in memory space vmem. Used 75.91M of 63.94M vmem. Exceeded vmem capacity by 11.97M",
            "vmem",
            75.91 * 2**20,
            63.94 * 2**20,
        ),
        (
            "Ran out of memory in memory space host. Used 185.00G of 128.00G host. Exceeded host capacity by 57.00G.",
            "host",
            185 * 2**30,
            128 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=139586437120) would exceed memory (size=137438953472) :: %s0 = "
            "inlined_call_operand.host [shape: f32[130,1024,1024,256], index: 0] /* operand 0 */ :: custom-call.2",
            "host",
            130 * 2**30,
            128 * 2**30,
        ),
    ],
)
def test_which_memory_and_how_much_is_missing(text, memory, used, limit):
    parsed = refusal(text)
    assert parsed["memory"] == memory and parsed["largest_buffers"] == []
    assert (parsed["used_bytes"], parsed["limit_bytes"]) == pytest.approx((used, limit))
    assert parsed["over_bytes"] == pytest.approx(used - limit)


def test_the_first_line_of_an_unknown_message_is_shown():
    parsed = refusal("RESOURCE_EXHAUSTED: something else\nand more")
    assert (parsed["memory"], parsed["message"]) == ("unknown", "RESOURCE_EXHAUSTED: something else")
