"""How a predicted step is printed, drawn, and written as JSON: `python roofline.py step`.

    python roofline.py step --preset=llama3.1-70b --topology=tpu7x:4x4x4 --mesh=fsdp:128 --batch=256 --explain
    python roofline.py step --preset=qwen3-235b-a22b --topology=tpu7x:4x8x8 --batch=2048 --json
    python roofline.py step --recipe=llama3.1-70b-8k-bf16 --program=maxtext --topology=tpu7x+p_state=7:4x4x4

The step itself is predicted by predicted/step.py, its interval by predicted/residuals.py.
"""

import argparse
import json
import math
from collections.abc import Callable

import command
import flags as flags_lib
import report
from hardware import by, parse_topology, si
from predicted import residuals
from predicted.step import GiB, Prediction, cliffs, describe_shortfall, predict
from predicted.workload import PROGRAMS, layers_of, local_shape, moved_bytes, run_of


def as_json(prediction: Prediction) -> dict:
    """Returns the object that --json prints, in seconds, bytes and FLOPs."""
    run, config, interval = prediction.run, prediction.run.config, residuals.interval(prediction)
    return {
        "preset": config.preset,
        "topology": f"{run.chip.name}:{by(run.topology)}",
        "num_slices": run.num_slices,
        "num_chips": run.num_chips,
        "mesh": {axis: size for axis, size in run.sizes.items() if size > 1},
        "batch": config.batch,
        "seq_len": config.seq_len,
        "microbatches": config.microbatches,
        "remat": config.remat,
        "fp8": config.fp8,
        "kind": "predicted",
        "program": run.program,
        "step_s": prediction.step_s,
        "step_s_low": interval.low_s,
        "step_s_high": interval.high_s,
        "interval": interval.basis,
        "mfu": prediction.mfu,
        "own_precision_mfu": prediction.own_precision_mfu,
        "flops_per_step": prediction.flops_per_step,
        "tokens_per_s_per_chip": prediction.tokens_per_s_per_chip,
        "exposed_comm_s": prediction.exposed_comm_s,
        "bound": prediction.bound,
        "hbm_bytes": prediction.hbm_bytes,
        "hbm_limit_bytes": run.hbm_limit,
        "host_bytes": prediction.host_bytes,
        "host_limit_bytes": run.host_limit if math.isfinite(run.host_limit) else None,
        "fits": prediction.fits,
        "passes": prediction.passes,
        "parts": {part.name: {"seconds": part.seconds, "exposed_s": part.exposed_s} for part in prediction.parts},
        "memory_bytes": prediction.memory,
    }


def describe(prediction: Prediction, *, explain: bool = False) -> str:
    """The prediction as text: the run, the parts of the step, MFU and memory; formulas with `explain`."""
    run, config, chip = prediction.run, prediction.run.config, prediction.run.chip
    mesh = ", ".join(
        f"{axis} {size} ({', '.join(link.name for link in run.links[axis])})"
        for axis, size in run.sizes.items()
        if size > 1
    )
    slices = f"{run.num_slices} slices of " if run.num_slices > 1 else ""
    tokens, passes = config.batch * config.seq_len, prediction.passes
    lines = [
        f"{config.preset} on {slices}{chip.name}:{by(run.topology)}, {run.num_chips:,} chips, predicted"
        + (f" for the program {run.program}" if run.program != "this" else ""),
        f"  mesh     {mesh or 'one device'}",
        f"  batch    {config.batch:,} sequences of {config.seq_len:,}: {tokens:,} tokens"
        + (f", in {config.microbatches} microbatches" if config.microbatches > 1 else ""),
        f"  how      {'bf16' if config.fp8 == 'none' else f'fp8 ({config.fp8})'}, remat {config.remat}"
        + (f" {config.remat_tensors}" if config.remat_tensors else ""),
        "",
        f"{'':26}{'total':>12}{'exposed':>12}{'of the step':>13}   waits for",
    ]
    for part in prediction.parts:
        share = part.exposed_s / prediction.step_s
        times = f"{si(part.seconds, 's'):>12}{si(part.exposed_s, 's'):>12}"
        lines.append(f"  {part.name:24}{times}{share:13.1%}   {part.resource}")
        if explain:
            lines.append(f"      = {part.formula}")
    interval = residuals.interval(prediction)
    own = f" of bf16's peak, {prediction.own_precision_mfu:.1%} of fp8's" if config.fp8 != "none" else ""
    lines += [
        f"  {'step':36}{si(prediction.step_s, 's'):>12}{'100.0%':>13}   bound by {prediction.bound}",
        f"  {'nine of ten steps take':25}{interval} ({interval.basis})",
        "",
        f"  layers   compute {si(passes['forward'], 's')} forward, {si(passes['backward'], 's')} backward",
        f"  MFU      {prediction.mfu:.1%}{own}; {prediction.tokens_per_s_per_chip:,.0f} tokens/s a chip; "
        f"{si(prediction.flops_per_step, 'FLOP')} a step",
        f"  memory   {prediction.hbm_bytes / GiB:.1f} of {run.hbm_limit / GiB:.1f} GiB a device"
        + ("" if prediction.fits else f": DOES NOT FIT, {describe_shortfall(prediction.shortfall())}"),
    ]
    shown = {name: nbytes for name, nbytes in prediction.memory.items() if nbytes}
    shown |= {"on the host": prediction.host_bytes} if prediction.host_bytes else {}
    width = max(map(len, shown))
    lines += [f"           {name:{width}} {nbytes / GiB:8.2f} GiB" for name, nbytes in shown.items()]
    if prediction.host_bytes and math.isfinite(run.host_limit):
        lines[-1] += f" of {run.host_limit / GiB:.1f}"
    lines += [f"  cliff    {sentence}" for sentence in cliffs(run)]
    if explain:
        peaks = f"{run.num_chips} * {si(chip.bf16_flops_per_s, 'FLOP/s')}"
        lines.append(f"  MFU      = {si(prediction.flops_per_step, 'FLOP')} / ({prediction.step_s:.4g} s * {peaks})")
    return "\n".join(lines)


def matmuls(prediction: Prediction) -> list[tuple[str, float, float, float]]:
    """Returns (weight, FLOPs, bytes of HBM, FLOP/s at the roofline) for each forward matmul of a layer on a device.

    Matmuls that are the same in both kinds of layers are listed once.
    """
    run, rows = prediction.run, []
    for layer in layers_of(run):
        for product in layer.products:
            m, k, n, _ = local_shape(run, product)
            flops, nbytes = 2 * m * k * n, moved_bytes(run, product)
            passes = run.efficiency.passes_of_f32 if product.dtype == "f32" else 1
            peak = run.chip.flops_per_s(product.dtype) / run.chip.devices / passes
            rows.append((product.weight, flops, nbytes, min(peak, flops / nbytes * run.hbm_bytes_per_s)))
    return list(dict.fromkeys(rows))


def describe_matmuls(prediction: Prediction) -> str:
    """Returns a table of the matmuls of a layer on the roofline of a device."""
    run = prediction.run
    ridge = run.chip.flops_per_s(run.dtype) / run.chip.hbm_bytes_per_s
    lines = [f"matmuls of a layer, forward, on a device (ridge: {ridge:.1f} FLOPs a byte of HBM)"]
    lines.append(f"  {'weight':16}{'FLOPs':>14}{'bytes':>14}{'FLOPs a byte':>14}{'FLOP/s at most':>18}   bound by")
    for name, flops, nbytes, speed in matmuls(prediction):
        bound = "memory" if speed == flops / nbytes * run.hbm_bytes_per_s else "compute"
        intensity = f"{flops / nbytes:,.1f}"
        lines.append(
            f"  {name:16}{si(flops, ''):>14}{si(nbytes, 'B'):>14}{intensity:>14}{si(speed, 'FLOP/s'):>18}   {bound}"
        )
    return "\n".join(lines)


def plot(predictions: dict[str, Prediction], path: str) -> None:
    """Draws two charts into the file `path`: the parts of each step, and the first run's matmuls on the roofline."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(15, 4 + 0.3 * len(predictions)), layout="constrained")
    bars, roof = figure.subplots(1, 2)
    names = dict.fromkeys(part.name for prediction in predictions.values() for part in prediction.parts)
    left = dict.fromkeys(predictions, 0.0)
    for number, name in enumerate(names):
        exposed = lambda prediction, name=name: math.fsum(
            part.exposed_s for part in prediction.parts if part.name == name
        )
        seconds = [exposed(prediction) for prediction in predictions.values()]
        bars.barh(list(predictions), seconds, left=list(left.values()), color=f"C{number}", label=name)
        left = {label: left[label] + s for label, s in zip(left, seconds, strict=True)}
    for label, prediction in predictions.items():
        interval = residuals.interval(prediction)
        middle, half = (interval.low_s + interval.high_s) / 2, (interval.high_s - interval.low_s) / 2
        bars.errorbar(middle, label, xerr=half, color="k", capsize=3)
    bars.invert_yaxis()
    bars.set(xlabel="seconds", title="Time of a step by part, predicted")
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)

    label, prediction = next(iter(predictions.items()))
    run = prediction.run
    peak = run.chip.flops_per_s(run.dtype) / run.chip.devices
    ridge = peak / run.hbm_bytes_per_s
    points = [(name, flops / nbytes, speed) for name, flops, nbytes, speed in matmuls(prediction)]
    low, high = min(ridge / 4, *(x for _, x, _ in points)), max(ridge * 16, *(x for _, x, _ in points)) * 1.5
    roof.loglog([low, ridge, high], [low * run.hbm_bytes_per_s, peak, peak], color="k", label="roofline")
    for number, (name, intensity, speed) in enumerate(points):
        roof.plot(intensity, speed, marker="o", ls="", color=f"C{number}", label=name)
    roof.set(title=f"Matmuls of a layer on a device, {label}, predicted")
    roof.set(xlabel="FLOPs a byte of HBM", ylabel="FLOP/s at most")
    roof.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    roof.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def print_step(args: argparse.Namespace) -> None:
    config = flags_lib.from_args(args)
    if args.report:
        report.check("--report", args.report)
    topology, num_slices = flags_lib.slice_of(args)
    efficiency = PROGRAMS[args.program]
    prediction = predict(run_of(config, *parse_topology(topology), num_slices=num_slices, efficiency=efficiency))
    if args.plot:
        plot({config.preset: prediction}, args.plot)
    if args.report:
        args.draw(args.report, prediction)
    if args.json:
        return print(json.dumps(as_json(prediction) | {"cliffs": cliffs(prediction.run)}))
    print(describe(prediction, explain=args.explain))
    if args.explain:
        print(f"\n{describe_matmuls(prediction)}")


def add_program_flag(parser: argparse.ArgumentParser) -> None:
    about = "predict the time of this project's program, or of MaxText's with the same flags; the memory is this one's"
    parser.add_argument("--program", choices=PROGRAMS, default="this", help=about)


def add_step_command(commands, draw: Callable[[str, Prediction], None]) -> None:
    """Adds the command. `draw` writes the page of a prediction into a folder (predicted/page.py)."""
    about = "time of a training step by part, memory, MFU"
    parser = commands.add_parser(
        "step", help=about, description=about, allow_abbrev=False, usage="%(prog)s [--flag=value ...]"
    )
    parser.add_argument("--explain", action="store_true", help="show the formulas with the numbers in them")
    parser.add_argument("--json", action="store_true", help="a JSON object, in seconds, bytes and FLOPs")
    parser.add_argument(
        "--plot",
        type=command.path,
        metavar="FILE.png",
        help="draw the parts, and the matmuls on a roofline; needs matplotlib",
    )
    add_program_flag(parser)
    about = "draw the step as a page of HTML, in this folder (report.py)"
    parser.add_argument("--report", type=command.path, metavar="DIR", help=about)
    flags_lib.add_run_flags(parser, "tpu7x:4x4x4", without_preset="tpu7x:2x2x1")  # the default model is small
    parser.set_defaults(run=print_step, draw=draw, parser=parser)
