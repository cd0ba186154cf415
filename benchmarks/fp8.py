"""What 8 bits change in the compiled step: matmuls, saved activations, gathered bytes, bfloat16 against fp8.

    python benchmarks/fp8.py [--topology=tpu7x:4x4x4] [--fp8=dynamic] [--json] [any flag of train.py]

The step of llama3.1-70b with 4 of its layers, by default, is compiled for TPU7x twice (aot.py), with --fp8=none and as
asked, and its layer loops are read: which operands go into the matrix units, in how many cycles by the compiler's own
estimate, with all that is fused to a matmul; what is cast in front of them; what the forward loop keeps of all layers
for the backward one; what is gathered. Compiled are types and bytes; cycles and seconds are predicted from that.
"""

import collections
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import command
import compiler_flags

compiler_flags.without_tpu()

import aot
import config as config_lib
import flags as flags_lib
from compiled import hlo, schedule
from hardware import by, parse_topology, si
from predicted.workload import run_of

EIGHT = ("f8e4m3fn", "f8e5m2")
DEFAULTS = dict(preset="llama3.1-70b", num_layers=4, mesh="fsdp:128", batch=256, fp8="dynamic", remat="full")


def called_by(program: hlo.Program, name: str) -> Iterator[str]:
    """A computation and all that it calls."""
    yield name
    for instruction in program.computations[name].values():
        for inner in (n for names in instruction.called.values() for n in names):
            yield from called_by(program, inner)


def layer_loops(program: hlo.Program) -> list[hlo.Instruction]:
    """The forward and the backward loop over layers: those of the entry computation with the most matmuls in them."""

    def num_matmuls(loop):
        names = called_by(program, loop.called["body"][0])
        return sum(i.opcode == "convolution" for name in names for i in program.computations[name].values())

    loops = [i for i in program.computations[program.entry].values() if i.opcode == "while"]
    return sorted(sorted(loops, key=num_matmuls)[-2:], key=lambda loop: loop.line)


def matmuls(program: hlo.Program, loop: hlo.Instruction) -> Iterator[tuple[str, float, int]]:
    """(types of the operands, cycles, casts of 8 bits to more in the same fusion) of each matmul of a loop's body."""
    for instruction in program.computations[loop.called["body"][0]].values():
        inside = [
            (name, i)
            for outer in (n for names in instruction.called.values() for n in names)
            for name in called_by(program, outer)
            for i in program.computations[name].values()
        ]
        kinds = [
            " x ".join(program.computations[name][operand].shapes[0].dtype for operand in i.operands)
            for name, i in inside
            if i.opcode == "convolution"
        ]
        operand = lambda name, i: program.computations[name][i.operands[0]].shapes[0].dtype
        casts = sum(i.opcode == "convert" and operand(name, i) in EIGHT for name, i in inside)
        if kinds and instruction.opcode == "fusion":
            yield kinds[0], float(instruction.cycles or 0), casts


def read(program: hlo.Program, config: config_lib.Config) -> dict:
    """Of the layer loops: matmuls by operands, what the forward one keeps, and the bytes gathered, a layer."""
    loops = layer_loops(program)
    found = [matmul for loop in loops for matmul in matmuls(program, loop)]
    cycles, count = collections.Counter(), collections.Counter()
    for kind, its, _ in found:
        cycles[kind] += its
        count[kind] += 1
    kept = [s for s in loops[0].shapes if s.dims[:1] == (config.num_layers,) and config.seq_len in s.dims]
    gathered = collections.Counter()
    for loop in loops:
        for name in set(called_by(program, loop.called["body"][0])):
            for i in program.computations[name].values():
                if i.opcode in ("all-gather", "all-gather-start"):
                    whole = max(i.shapes, key=lambda shape: shape.nbytes)
                    gathered[whole.dtype] += whole.nbytes
    return {
        "matmuls": dict(count),
        "matmul_cycles": dict(cycles),
        "casts": sum(casts for *_, casts in found),
        "kept_bytes": {str((s.dtype, s.dims[1:])): s.nbytes / config.num_layers for s in kept},
        "gathered_bytes": dict(gathered),
    }


def measure(config: config_lib.Config, topology: str, num_slices: int) -> dict:
    """Compiles a step, and reads it."""
    lowered = aot.lower_step(config, topology, num_slices)
    memory, text = aot.compile_step(lowered, compiler_flags.for_run(config), config.compilation_cache)
    program = hlo.parse(text)
    of = run_of(config, *parse_topology(topology), num_slices=num_slices)
    cycles = aot.kernel_cycles(aot.kernels_of(lowered), of.experts_filled, config.compilation_cache)
    breakdown = schedule.walk(program, kernels=aot.cycles_by_name(program, cycles), chips=lowered.chips)
    found = read(program, config)
    return found | {"step_s": breakdown.seconds, "peak_hbm_bytes": memory["peak_hbm_bytes"]}


def describe(config: config_lib.Config, topology: str, found: dict[str, dict]) -> str:
    chip, chips = parse_topology(topology)
    lines = [f"{config.preset}, {config.num_layers} layers, on {chip.name}:{by(chips)}, mesh {config.mesh}, batch "]
    lines[0] += f"{config.batch} of {config.seq_len:,}; a device, compiled; cycles and seconds predicted from it"
    for name, its in found.items():
        lines += ["", f"--fp8={name}"]
        total = sum(its["matmul_cycles"].values())
        lines.append(f"  matmuls of a layer, forward and backward: {total / 1e6:.1f} M cycles")
        for kind, cycles in sorted(its["matmul_cycles"].items()):
            lines.append(f"    {its['matmuls'][kind]:3} of {kind:24}{cycles / 1e6:8.1f} M cycles")
        lines.append(f"  casts of 8-bit operands beside them: {its['casts']}")
        kept, gathered = its["kept_bytes"], its["gathered_bytes"]
        lines.append(f"  kept of a layer for the backward pass: {si(sum(kept.values()), 'B')}")
        lines += [f"    {key:40}{si(nbytes, 'B'):>12}" for key, nbytes in kept.items()]
        text = ", ".join(f"{si(nbytes, 'B')} in {dtype}" for dtype, nbytes in gathered.items())
        lines.append(f"  gathered of a layer, forward and backward: {text}")
        lines.append(f"  step {si(its['step_s'], 's')}, memory {si(its['peak_hbm_bytes'], 'B')}")
    plain, eight = found.values()
    ratio = lambda value: value(eight) / value(plain)
    lines += [
        "",
        f"fp8 over bfloat16: matmul cycles {ratio(lambda one: sum(one['matmul_cycles'].values())):.2f}, kept "
        f"{ratio(lambda one: sum(one['kept_bytes'].values())):.2f}, gathered "
        f"{ratio(lambda one: sum(one['gathered_bytes'].values())):.2f}, step {ratio(lambda one: one['step_s']):.2f}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = command.parser(__file__, usage="%(prog)s [--flag=value ...]")
    parser.add_argument("--json", action="store_true", help="a JSON object")
    flags_lib.add_run_flags(parser, "tpu7x:4x4x4")
    args = command.arguments(parser)
    config = flags_lib.from_args(args, **DEFAULTS)
    topology, num_slices = flags_lib.slice_of(args)
    modes = {"none": "none", config.fp8: config.fp8}
    found = {name: measure(config_lib.changed(config, fp8=fp8), topology, num_slices) for name, fp8 in modes.items()}
    print(json.dumps(found) if args.json else describe(config, topology, found))


if __name__ == "__main__":
    command.run(main)
