"""The predictions for every recipe of published.py, beside what was measured, and what the planner finds instead.

    python recipes.py [NAME ...] [--json] [--plot=recipes.png]
    python recipes.py llama3.1-70b-8k-bf16 --better
    python recipes.py --what_if
    python recipes.py --misses

**The table.** The step, its MFU (of the peak in bfloat16) and its memory are those that
`roofline.py step --recipe=NAME` predicts for this project's program. The measured runs are MaxText's. For the ratio
they have a prediction of their own (workload.MAXTEXT): tokamax's kernels at their measured times, the experts' SwiGLU
outside of their kernel, more of the offloads and sums hidden, no copies of weights. The ratio is that prediction over
the measured time. In brackets is the interval of predicted/residuals.py. One set of efficiencies serves all recipes.
The compiled step is this project's program, timed by the compiler's schedule (compiled/results.py).

**`--better`** runs predicted/planner.py for the same model, batch and slice. It prints the flags in which the plan
differs from the recipe, and the parts of the step that get shorter or longer. The planner leaves 8% of the memory free,
which a published run need not. Of the plans within 5% of the fastest it takes the one with the fewest mesh axes, as
predictions are no more accurate than that.

**`--misses`** lists every measured run, also those of slices that no recipe has, by how far its prediction is off.

**`--what_if`** shows what the chip is short of: the gain of each recipe, with its mesh and batch unchanged, if one
figure of the chip were doubled (hardware.py, "What if").
"""

import json
import math
import statistics

import command
import flags as flags_lib
from compiled import results
from hardware import parse_topology
from predicted import planner, recompute, residuals
from predicted.presentation import as_json
from predicted.step import GiB, Prediction, predict
from predicted.workload import MAXTEXT, TODAY, Efficiency, run_of
from published import RECIPES


def predicted(name: str, efficiency: Efficiency = TODAY) -> Prediction:
    """The prediction of a recipe's step."""
    return residuals.prediction_of(RECIPES[name], efficiency, recipe=name)


def row(name: str) -> dict:
    """Returns a recipe's figures in seconds and bytes: those of `roofline.py step --json`, and what was measured."""
    recipe, prediction = RECIPES[name], predicted(name)
    measured_s, tflops = recipe.measured_step_s, recipe.measured_tflops
    maxtext_s = predicted(name, MAXTEXT).step_s if measured_s else None
    measured = dict(
        measured_step_s=measured_s,
        measured_mfu=tflops * 1e12 / prediction.run.chip.bf16_flops_per_s if tflops else None,
        predicted_of_measured_s=maxtext_s,
        ratio=maxtext_s / measured_s if measured_s else None,
    )
    about = dict(recipe=name, source=recipe.source, differs=recipe.differs, compiled=results.load(prediction))
    return about | as_json(prediction) | measured


def better(name: str) -> dict:
    """Returns the planner's plan for a recipe: the flags that differ, and the extra seconds of each part of a step."""
    own = predicted(name)
    run = own.run
    plan = planner.plan(run.config, run.chip, run.topology, num_slices=run.num_slices).best
    seconds = lambda step: {part.name: part.exposed_s for part in step.parts}
    before, after = seconds(own), seconds(plan)
    more = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in before | after}
    return dict(
        recipe=name,
        flags=planner.changed_flags(run.config, run.sizes, plan),
        step_s=(own.step_s, plan.step_s),
        mfu=(own.mfu, plan.mfu),
        hbm_bytes=(own.hbm_bytes, plan.hbm_bytes),
        compiled=(results.load(own), results.load(plan)),
        gain=own.step_s / plan.step_s - 1,
        compiled_gain=_gain(results.load(own), results.load(plan)),
        more_s=dict(sorted(more.items(), key=lambda item: -abs(item[1]))),
    )


def _gain(before: dict | None, after: dict | None) -> float | None:
    """The gain of one compiled step over another: -1 if it does not fit, None if either was not compiled."""
    if not (before and after and before["fits"]):
        return None
    return before["step_s"] / after["step_s"] - 1 if after["fits"] else -1.0


def table(names: list[str]) -> str:
    """Returns the table as Markdown, followed by how the recipes differ from what was published."""
    lines = [
        "| recipe | slice | mesh | batch | step | MFU | GiB a device | compiled: step, GiB | measured, MFU | "
        "predicted of that | ratio |"
    ]
    lines.append("|" + "---|" * 11)
    differing: dict[str, list[str]] = {}
    for result in map(row, names):
        mesh = ",".join(f"{axis}:{size}" for axis, size in result["mesh"].items())
        measured = "| | |"
        if result["ratio"]:
            mfu = f", {result['measured_mfu']:.1%}" if result["measured_mfu"] else ""
            maxtext = f"{result['predicted_of_measured_s']:.2f} s | {result['ratio']:.3f}"
            measured = f"{result['measured_step_s']:.2f} s{mfu} | {maxtext} |"
        slices = f"{result['num_slices']} x " if result["num_slices"] > 1 else ""
        fits = "fits" if result["fits"] else "DOES NOT FIT"
        step = f"{result['step_s']:.2f} s ({result['step_s_low']:.2f} to {result['step_s_high']:.2f})"
        lines.append(
            f"| {result['recipe']} | {slices}{result['topology']} | {mesh} | "
            f"{result['batch']:,} x {result['seq_len']:,} | {step} | {result['mfu']:.1%} | "
            f"{result['hbm_bytes'] / GiB:.1f} of {result['hbm_limit_bytes'] / GiB:.1f}, {fits} | "
            f"{_compiled(result['compiled'])} | {measured}"
        )
        if result["differs"]:
            differing.setdefault(result["differs"], []).append(result["recipe"])
    notes = [f"- {', '.join(names)}: {differs}" for differs, names in differing.items()]
    return "\n".join([*lines, *(["", "Differences from what was published:", "", *notes] if notes else [])])


def _compiled(result: dict | None) -> str:
    if result is None:
        return ""
    needed = results.memory_of(result)
    return f"{results.step_text(result)}, {needed / GiB:.1f}" if needed else results.step_text(result)


def describe_better(result: dict) -> str:
    """Describes the result of `better` in two lines. If both steps were compiled, a third line has them and decides."""
    (own_s, step_s), (own_bytes, nbytes) = result["step_s"], result["hbm_bytes"]
    if not result["flags"]:
        return f"{result['recipe']}: {own_s:.2f} s, and the planner finds the same"
    gain, compiled = result["compiled_gain"], ""
    if gain is None:
        gain = result["gain"]
    else:
        before, after = map(_compiled, result["compiled"])
        compiled = f"\n    compiled: {before} to {after} GiB a device, {gain:+.1%} speed"
    verdict = "better" if gain > planner.WITHIN - 1 else "as good" if gain >= 0 else "none is better, its answer"
    parts = ", ".join(f"{part} {s:+.2f} s" for part, s in result["more_s"].items() if abs(s) > 0.005 * own_s)
    before, after = result["mfu"]
    return (
        f"{result['recipe']}: {verdict}: {' '.join(result['flags'])}\n"
        f"    {own_s:.2f} to {step_s:.2f} s, {result['gain']:+.1%} speed; MFU {before:.1%} to {after:.1%}; "
        f"{parts or 'no part by 0.5%'}; {own_bytes / GiB:.1f} to {nbytes / GiB:.1f} GiB a device{compiled}"
    )


# The parts of a chip that could be doubled, and their figures. Matrix units are taken to make every kernel faster in
# proportion. That flatters attention's, whose exponentials are computed by the vector unit.
WHAT_IF = {
    "matrix units": ("bf16_flops_per_s", "fp8_flops_per_s"),
    "HBM's bandwidth": ("hbm_bytes_per_s",),
    "HBM's bytes": ("hbm_bytes",),
    "links": ("link_bytes_per_s", "die_to_die_bytes_per_s"),
}


def what_if(name: str) -> dict:
    """Returns the gain in tokens a second of a recipe with twice as much of each part of the chip.

    Each case has the recipe's --remat, or a faster one that fits; otherwise more memory would not help.
    """
    recipe = RECIPES[name]
    config = flags_lib.from_recipe(name)
    chip, _ = parse_topology(recipe.topology)

    def fastest(*figures: str) -> Prediction:
        plus = "".join(f"+{figure}=2x" for figure in figures if getattr(chip, figure))
        more, topology = parse_topology(recipe.topology.replace(":", f"{plus}:"))
        own = predict(run_of(config, more, topology, num_slices=recipe.num_slices))
        others = recompute.predictions(config, more, topology, num_slices=recipe.num_slices).values()
        return min([own, *filter(recompute.fits, others)], key=lambda prediction: prediction.step_s)

    own = fastest()
    gain = {case: own.step_s / fastest(*figures).step_s - 1 for case, figures in WHAT_IF.items()}
    return dict(recipe=name, step_s=own.step_s, mfu=own.mfu, gain=gain)


def table_of_what_if(names: list[str]) -> str:
    """Returns the gains of `what_if` as Markdown."""
    lines = [f"| recipe | step | MFU | twice the {' | '.join(WHAT_IF)} |", "|---" * (3 + len(WHAT_IF)) + "|"]
    for result in map(what_if, names):
        gains = (f"{gain:+.1%}" for gain in result["gain"].values())
        lines.append(f"| {result['recipe']} | {result['step_s']:.2f} s | {result['mfu']:.1%} | {' | '.join(gains)} |")
    return "\n".join(lines)


def misses(names: list[str]) -> list[dict]:
    """Every measured run of these names beside its prediction as MaxText's program, the worst first, in seconds."""
    rows = []
    for name in names:
        run = residuals.measured_runs()[name]
        as_maxtext = residuals.prediction_of(run)
        own = residuals.prediction_of(run, TODAY, recipe=name if name in RECIPES else "")
        rows.append(
            dict(
                run=name,
                kind=residuals.kind_of(as_maxtext),
                topology=run.topology,
                measured_step_s=run.measured_step_s,
                predicted_of_measured_s=as_maxtext.step_s,
                ratio=as_maxtext.step_s / run.measured_step_s,
                covered=residuals.covered_without(name),
                step_s=own.step_s,
                compiled=results.load(own),
                source=run.source,
                differs=run.differs,
                miss=run.miss,
            )
        )
    return sorted(rows, key=lambda row: -abs(math.log(row["ratio"])))


def table_of_misses(names: list[str]) -> str:
    """Returns the rows of `misses` as Markdown, and how far they are off by kind."""
    rows = misses(names)
    lines = [
        "| run | slice | kind | measured | predicted | ratio | in its interval | this program, predicted | compiled |"
    ]
    lines.append("|" + "---|" * 9)
    lines += [
        f"| {row['run']} | {row['topology']} | {row['kind']} | {row['measured_step_s']:.2f} s | "
        f"{row['predicted_of_measured_s']:.2f} s | {row['ratio']:.3f} | {'yes' if row['covered'] else 'no'} | "
        f"{row['step_s']:.2f} s | {results.step_text(row['compiled'])} |"
        for row in rows
    ]
    lines.append("")
    for kind in (kind for kind in residuals.KINDS if any(row["kind"] == kind for row in rows)):
        errors = [abs(row["ratio"] - 1) for row in rows if row["kind"] == kind]
        median, worst = statistics.median(errors), max(errors)
        lines.append(f"- {kind}, {len(errors)} runs: off by {median:.1%} in the median, by {worst:.1%} at most")
    lines.append(f"- in an interval from all other runs: {sum(row['covered'] for row in rows)} of {len(rows)}")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["miss"]:
            reasons.setdefault(row["miss"], []).append(row["run"])
    notes = [f"- {', '.join(runs)}: {reason}" for reason, runs in reasons.items()]
    return "\n".join([*lines, *(["", "Why, where it is known:", "", *notes] if notes else [])])


def plot(rows: list[dict], path: str) -> None:
    """Draws the MFU of each recipe and of what was measured. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(10, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    fits = [result["compiled"]["mfu"] if result["compiled"] and result["compiled"]["fits"] else None for result in rows]
    for label, marker, values in (
        ("this program, predicted", "o", [result["mfu"] for result in rows]),
        ("this program, compiled", "x", fits),
        ("MaxText, measured", "s", [result["measured_mfu"] for result in rows]),
        (
            "MaxText, predicted",
            "+",
            [result["measured_mfu"] and result["measured_mfu"] / result["ratio"] for result in rows],
        ),
    ):
        points = [(value, number) for number, value in enumerate(values) if value is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, label=label, zorder=2)
    for number, result in enumerate(rows):
        slowest, fastest = (result["mfu"] * result["step_s"] / result[f"step_s_{end}"] for end in ("high", "low"))
        axes.hlines(number, slowest, fastest, color="C0", alpha=0.5, zorder=1)
    axes.set_yticks(range(len(rows)), [f"{result['recipe']}, {result['topology']}" for result in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set(xlabel="MFU, of the peak in bfloat16, in FP8 too")
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__file__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all: {', '.join(RECIPES)}")
    parser.add_argument("--better", action="store_true", help="the plans that the planner finds instead")
    parser.add_argument("--what_if", action="store_true", help="the gain if a figure of the chip were doubled")
    parser.add_argument("--misses", action="store_true", help="all measured runs, by how far predictions are off")
    parser.add_argument("--json", action="store_true", help="a list of JSON objects, in seconds and bytes")
    parser.add_argument(
        "--plot", type=command.path, metavar="FILE.png", help="draw the MFU as well; needs the [plot] extra"
    )
    args = command.arguments(parser, argv)
    if args.better + args.what_if + args.misses + bool(args.plot) > 1:
        raise ValueError("one of --better, --what_if, --misses and --plot: the picture is of the recipes themselves")
    if args.misses:
        names = args.names or list(residuals.measured_runs())
        command.check_names(names, residuals.measured_runs())
        return print(json.dumps(misses(names)) if args.json else table_of_misses(names))
    names = args.names or list(RECIPES)
    for name in names:
        flags_lib.recipe_of(name)
    if args.json:
        figures = better if args.better else what_if if args.what_if else row
        print(json.dumps(list(map(figures, names))))
    elif args.better:
        for name in names:
            print(describe_better(better(name)), flush=True)
    else:
        print(table_of_what_if(names) if args.what_if else table(names))
    if args.plot:
        plot(list(map(row, names)), args.plot)


if __name__ == "__main__":
    command.run(main)
