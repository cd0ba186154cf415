"""Strong and weak scaling of training on TPU7x, from 4 chips to a pod of 9,216, with the planner's best plan for each.

    python benchmarks/scaling.py                          tables, predicted: a minute or two
    python benchmarks/scaling.py --plot=docs/figures/scaling.png
    python benchmarks/scaling.py --compile                the first model's weak scaling, also by the TPU7x compiler

Strong scaling has 2,048 sequences of 8,192 a step on every slice, weak scaling 2 sequences a device. Efficiency is MFU
over that of the smallest slice in the table. A slice on which nothing fits, or nothing divides, has no row. A compile
takes minutes, which do not grow with the slice. A program that is in results_tpu7x.json is not compiled again.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command
from compiled import results
from flags import from_preset
from hardware import by, parse_topology
from predicted.planner import flags_of, plan
from predicted.step import GiB
from presets import PRESETS

SLICES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24 16x24x24".split()
MODELS = ("llama3.1-8b", "llama3.1-70b", "llama3.1-405b")
STRONG_BATCH, WEAK_BATCH = 2048, 2  # sequences in all, a device


def rows(model: str, kind: str, slices: list[str]) -> list[dict]:
    """A row for each slice on which the model can be trained with this batch, in the order of the slices."""
    table_rows = []
    for name in slices:
        chip, topology = parse_topology(f"tpu7x:{name}")
        devices = chip.devices
        for length in topology:
            devices *= length
        batch = STRONG_BATCH if kind == "strong" else WEAK_BATCH * devices
        try:
            best = plan(from_preset(model, batch=batch, seq_len=8192), chip, topology).best
        except ValueError:
            continue
        table_rows.append(
            dict(
                model=model,
                kind=kind,
                slice=by(topology),
                chips=devices // chip.devices,
                batch=batch,
                step_s=best.step_s,
                mfu=best.mfu,
                efficiency=best.mfu / (table_rows[0]["mfu"] if table_rows else best.mfu),
                tokens_per_s=batch * 8192 / best.step_s,
                hbm_bytes=best.hbm_bytes,
                waits=best.exposed_comm_s / best.step_s,
                flags=flags_of(best),
            )
        )
    return table_rows


def table(table_rows: list[dict]) -> str:
    columns = "model, chips, mesh, sequences, step, MFU, of the smallest's, waits for messages, GiB a device".split(
        ", "
    )
    some_compiled = any("compiled" in row for row in table_rows)
    columns += ["step, compiled", "GiB, compiled"] if some_compiled else []
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in table_rows:
        mesh = next(flag.removeprefix("--mesh=") for flag in row["flags"] if flag.startswith("--mesh="))
        cells = [row["model"], f"{row['chips']:,}", f"`{mesh}`", f"{row['batch']:,}", f"{row['step_s']:.2f} s"]
        cells += [f"{row['mfu']:.1%}", f"{row['efficiency']:.0%}", f"{row['waits']:.1%}"]
        cells += [f"{row['hbm_bytes'] / GiB:.1f}"]
        if result := row.get("compiled"):
            memory = f"{result['peak_hbm_bytes'] / GiB:.1f}" if result["fits"] else "refused"
            cells += [f"{result['step_s']:.2f} s" if result["fits"] else "", memory]
        elif some_compiled:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(table_rows: list[dict], path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("strong", "weak"), strict=True):
        for number, model in enumerate(dict.fromkeys(row["model"] for row in table_rows)):
            points = [row for row in table_rows if (row["model"], row["kind"]) == (model, kind)]
            mfu = [row["mfu"] for row in points]
            axes.plot([row["chips"] for row in points], mfu, "o-", color=f"C{number}", label=model)
            compiled = [row for row in points if row.get("compiled", {}).get("fits")]
            mfu = [row["compiled"]["mfu"] for row in compiled]
            axes.plot([row["chips"] for row in compiled], mfu, "x", ms=10, color=f"C{number}")
        axes.set(xscale="log", xlabel="chips", ylabel="MFU", ylim=(0, 0.8))
        axes.grid(alpha=0.3)
    strong, weak = figure.axes
    strong.set_title(f"Strong scaling, {STRONG_BATCH:,} sequences a step")
    weak.set_title(f"Weak scaling, {WEAK_BATCH} sequences a device")
    strong.legend(title="predicted; crosses are compiled")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("--models", default=",".join(MODELS), metavar="A,B", help="presets [%(default)s]")
    parser.add_argument("--slices", default=",".join(SLICES), metavar="A,B", help="slices of TPU7x [%(default)s]")
    parser.add_argument(
        "--compile", action="store_true", help="compile what is not stored of the first model's weak scaling"
    )
    parser.add_argument("--plot", type=command.path, metavar="FILE.png", help="draw MFU against chips; [plot] extra")
    parser.add_argument("--json", action="store_true", help="a list of JSON objects, a row each")
    args = command.arguments(parser)
    models, slices = args.models.split(","), args.slices.split(",")
    command.check_names(models, PRESETS)
    command.check_names(slices, SLICES)
    shown = []
    for kind in ("strong", "weak"):
        series = [row for model in models for row in rows(model, kind, slices)]
        for row in series:
            prediction = results.prediction_of(" ".join(row["flags"]))
            result = results.load(prediction)
            if args.compile and kind == "weak" and row["model"] == models[0]:
                result = results.load_or_compile(prediction)
            if result:
                row["compiled"] = result
        if not args.json:
            batch = f"{STRONG_BATCH:,} sequences" if kind == "strong" else f"{WEAK_BATCH} sequences a device"
            print(f"{kind} scaling, {batch} of 8,192, predicted\n\n{table(series)}\n", flush=True)
        shown += series
    if args.plot:
        plot(shown, args.plot)
    if args.json:
        print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    command.run(main)
