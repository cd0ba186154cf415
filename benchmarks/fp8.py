"""Changes that FP8 makes to the compiled step, against bfloat16: matmuls, saved activations, gathered bytes.

    python benchmarks/fp8.py [--topology=tpu7x:4x4x4] [--fp8=dynamic] [--json] [any flag of train.py]

The step is compiled for TPU7x twice (aot.py), with --fp8=none and with the given flag. By default it is that of
llama3.1-70b with 4 of its layers. From the layer loops of each program it reads

- the operands of the matrix units, and the cycles of each matmul with what is fused to it, by the compiler's estimate;
- casts in front of the matmuls;
- the residuals that the forward loop saves for the backward one;
- the gathered bytes.

Dtypes and bytes are compiled; cycles and seconds are predicted from the compiled program.
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

FP8_DTYPES = ("f8e4m3fn", "f8e5m2")
DEFAULTS = dict(preset="llama3.1-70b", num_layers=4, mesh="fsdp:128", batch=256, fp8="dynamic", remat="full")


def called_by(program: hlo.Program, name: str) -> Iterator[str]:
    """Yields the names of a computation and of all computations that it calls."""
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
    """(dtypes of the operands, cycles, casts from FP8 in the same fusion) of each matmul of a loop's body."""
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
        casts = sum(i.opcode == "convert" and operand(name, i) in FP8_DTYPES for name, i in inside)
        if kinds and instruction.opcode == "fusion":
            yield kinds[0], float(instruction.cycles or 0), casts


def read(program: hlo.Program, config: config_lib.Config) -> dict:
    """Matmuls by operands, saved bytes and gathered bytes of the layer loops, a layer."""
    loops = layer_loops(program)
    products = [matmul for loop in loops for matmul in matmuls(program, loop)]
    cycles, count = collections.Counter(), collections.Counter()
    for kind, num_cycles, _ in products:
        cycles[kind] += num_cycles
        count[kind] += 1
    saved = [s for s in loops[0].shapes if s.dims[:1] == (config.num_layers,) and config.seq_len in s.dims]
    gathered = collections.Counter()
    for loop in loops:
        for name in set(called_by(program, loop.called["body"][0])):
            for i in program.computations[name].values():
                if i.opcode in ("all-gather", "all-gather-start"):
                    result = max(i.shapes, key=lambda shape: shape.nbytes)
                    gathered[result.dtype] += result.nbytes
    return {
        "matmuls": dict(count),
        "matmul_cycles": dict(cycles),
        "casts": sum(casts for *_, casts in products),
        "saved_bytes": {str((s.dtype, s.dims[1:])): s.nbytes / config.num_layers for s in saved},
        "gathered_bytes": dict(gathered),
    }


def measure(config: config_lib.Config, topology: str, num_slices: int) -> dict:
    """Compiles a step and reads its layer loops, its time and its memory."""
    lowered = aot.lower_step(config, topology, num_slices)
    memory, text = aot.compile_step(lowered, compiler_flags.for_run(config), config.compilation_cache)
    program = hlo.parse(text)
    run = run_of(config, *parse_topology(topology), num_slices=num_slices)
    cycles = aot.kernel_cycles(aot.kernels_of(lowered), run.experts_filled, config.compilation_cache)
    breakdown = schedule.walk(program, kernels=aot.cycles_by_name(program, cycles), chips=lowered.chips)
    return read(program, config) | {"step_s": breakdown.seconds, "peak_hbm_bytes": memory["peak_hbm_bytes"]}


def describe(config: config_lib.Config, topology: str, results: dict[str, dict]) -> str:
    chip, chips = parse_topology(topology)
    lines = [f"{config.preset}, {config.num_layers} layers, on {chip.name}:{by(chips)}, mesh {config.mesh}, batch "]
    lines[0] += f"{config.batch} of {config.seq_len:,}; a device, compiled; cycles and seconds predicted from it"
    for name, result in results.items():
        lines += ["", f"--fp8={name}"]
        total = sum(result["matmul_cycles"].values())
        lines.append(f"  matmuls of a layer, forward and backward: {total / 1e6:.1f} M cycles")
        for kind, cycles in sorted(result["matmul_cycles"].items()):
            lines.append(f"    {result['matmuls'][kind]:3} of {kind:24}{cycles / 1e6:8.1f} M cycles")
        lines.append(f"  casts of FP8 operands beside them: {result['casts']}")
        saved, gathered = result["saved_bytes"], result["gathered_bytes"]
        lines.append(f"  saved of a layer for the backward pass: {si(sum(saved.values()), 'B')}")
        lines += [f"    {key:40}{si(nbytes, 'B'):>12}" for key, nbytes in saved.items()]
        text = ", ".join(f"{si(nbytes, 'B')} in {dtype}" for dtype, nbytes in gathered.items())
        lines.append(f"  gathered of a layer, forward and backward: {text}")
        lines.append(f"  step {si(result['step_s'], 's')}, memory {si(result['peak_hbm_bytes'], 'B')}")
    bf16, fp8 = results.values()
    ratio = lambda value: f"{value(fp8) / value(bf16):.2f}"
    sum_ratio = lambda key: ratio(lambda result: sum(result[key].values()))
    lines += [
        "",
        f"fp8 over bfloat16: matmul cycles {sum_ratio('matmul_cycles')}, saved {sum_ratio('saved_bytes')}, gathered "
        f"{sum_ratio('gathered_bytes')}, step {ratio(lambda result: result['step_s'])}",
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
    results = {name: measure(config_lib.changed(config, fp8=fp8), topology, num_slices) for name, fp8 in modes.items()}
    print(json.dumps(results) if args.json else describe(config, topology, results))


if __name__ == "__main__":
    command.run(main)
