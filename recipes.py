"""What is predicted of every recipe of published.py, beside what was measured; and what the planner finds instead.

    python recipes.py [NAME ...] [--json] [--plot=recipes.png]
    python recipes.py llama3.1-70b-8k-bf16 --better
    python recipes.py --what_if

The step, its MFU (of the peak in bfloat16) and its memory are those of `roofline.py step --recipe=NAME`: of this
project's program. The measured runs are MaxText's. It is predicted as what it is
(workload.PUBLISHED): a slower attention kernel, experts' SwiGLU outside of their kernel, more hidden of offloads and
sums, no copies of weights; the ratio is that prediction over what was measured. One set of efficiencies serves all.
What was compiled is this project's program, its step by the schedule of the compiler (compiled/results.py).

`--better` asks planner.py for the same model, batch and slice, and prints the flags in which its answer differs, with
the parts of the step that they make shorter or longer. The planner leaves 8% of the memory free, which a published run
need not; and of plans within 5% of the fastest it takes that with the fewest mesh axes, as a prediction is not better.

`--what_if` asks what the chip would have to be: each recipe's gain, as its mesh and batch are, if one of the chip's
figures were twice what it is (hardware.py, "What if").
"""

import json

import command
import flags as flags_lib
from compiled import results
from hardware import parse_topology
from predicted import planner, recompute
from predicted.step import GiB, Prediction, as_json, predict
from predicted.workload import PUBLISHED, TODAY, Efficiency, run_of
from published import RECIPES


def predicted(name: str, efficiency: Efficiency = TODAY) -> Prediction:
    recipe = RECIPES[name]
    run = run_of(
        flags_lib.from_recipe(name),
        *parse_topology(recipe.topology),
        num_slices=recipe.num_slices,
        efficiency=efficiency,
    )
    return predict(run)


def row(name: str) -> dict:
    """Of a recipe, in seconds and bytes: what `roofline.py step --json` has, and what was measured."""
    recipe, found = RECIPES[name], predicted(name)
    measured_s, tflops = recipe.measured_step_s, recipe.measured_tflops
    of_it = predicted(name, PUBLISHED).step_s if measured_s else None
    measured = dict(
        measured_step_s=measured_s,
        measured_mfu=tflops * 1e12 / found.run.chip.bf16_flops_per_s if tflops else None,
        predicted_of_measured_s=of_it,
        ratio=of_it / measured_s if measured_s else None,
    )
    told = dict(recipe=name, source=recipe.source, differs=recipe.differs, compiled=results.load(found))
    return told | as_json(found) | measured


def better(name: str) -> dict:
    """The planner's answer: the flags that lead to it, and the seconds that each part of the step takes more."""
    own = predicted(name)
    of = own.run
    found = planner.plan(of.config, of.chip, of.topology, num_slices=of.num_slices).best
    seconds = lambda step: {part.name: part.exposed_s for part in step.parts}
    before, after = seconds(own), seconds(found)
    more = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in before | after}
    return dict(
        recipe=name,
        flags=planner.changed_flags(of.config, of.sizes, found),
        step_s=(own.step_s, found.step_s),
        mfu=(own.mfu, found.mfu),
        hbm_bytes=(own.hbm_bytes, found.hbm_bytes),
        compiled=(results.load(own), results.load(found)),
        gain=own.step_s / found.step_s - 1,
        compiled_gain=_gain(results.load(own), results.load(found)),
        more_s=dict(sorted(more.items(), key=lambda item: -abs(item[1]))),
    )


def _gain(before: dict | None, after: dict | None) -> float | None:
    """Of two compiled steps; -1 if the second does not fit, None if one of them was not compiled."""
    if not (before and after and before["fits"]):
        return None
    return before["step_s"] / after["step_s"] - 1 if after["fits"] else -1.0


def table(names: list[str]) -> str:
    """As Markdown; below it, in what the recipes differ from what was published."""
    lines = [
        "| recipe | slice | mesh | batch | step | MFU | GiB a device | compiled: step, GiB | measured, MFU | "
        "predicted of that | ratio |"
    ]
    lines.append("|" + "---|" * 11)
    differing: dict[str, list[str]] = {}
    for its in map(row, names):
        mesh = ",".join(f"{axis}:{size}" for axis, size in its["mesh"].items())
        measured = "| | |"
        if its["ratio"]:
            mfu = f", {its['measured_mfu']:.1%}" if its["measured_mfu"] else ""
            predicted_of_it = f"{its['predicted_of_measured_s']:.2f} s | {its['ratio']:.3f}"
            measured = f"{its['measured_step_s']:.2f} s{mfu} | {predicted_of_it} |"
        slices = f"{its['num_slices']} x " if its["num_slices"] > 1 else ""
        lines.append(
            f"| {its['recipe']} | {slices}{its['topology']} | {mesh} | {its['batch']:,} x {its['seq_len']:,} | "
            f"{its['step_s']:.2f} s | {its['mfu']:.1%} | {its['hbm_bytes'] / GiB:.1f} of "
            f"{its['hbm_limit_bytes'] / GiB:.1f}, {'fits' if its['fits'] else 'DOES NOT FIT'} | "
            f"{_compiled(its['compiled'])} | {measured}"
        )
        if its["differs"]:
            differing.setdefault(its["differs"], []).append(its["recipe"])
    notes = [f"- {', '.join(names)}: {differs}" for differs, names in differing.items()]
    return "\n".join([*lines, *(["", "What differs from what was published:", "", *notes] if notes else [])])


def _compiled(found: dict | None) -> str:
    if found is None:
        return ""
    needed = results.memory_of(found)
    return f"{results.step_text(found)}, {needed / GiB:.1f}" if needed else results.step_text(found)


def say_better(its: dict) -> str:
    """A recipe's `better`, in two lines, and a third if both plans were compiled: that then judges."""
    (own_s, step_s), (own_bytes, nbytes) = its["step_s"], its["hbm_bytes"]
    if not its["flags"]:
        return f"{its['recipe']}: {own_s:.2f} s, and the planner finds the same"
    gain, its_compiled = its["compiled_gain"], ""
    if gain is None:
        gain = its["gain"]
    else:
        before, after = map(_compiled, its["compiled"])
        its_compiled = f"\n    compiled: {before} to {after} GiB a device, {gain:+.1%} speed"
    judged = "better" if gain > planner.WITHIN - 1 else "as good" if gain >= 0 else "none is better, its answer"
    parts = ", ".join(f"{part} {s:+.2f} s" for part, s in its["more_s"].items() if abs(s) > 0.005 * own_s)
    return (
        f"{its['recipe']}: {judged}: {' '.join(its['flags'])}\n"
        f"    {own_s:.2f} to {step_s:.2f} s, {its['gain']:+.1%} speed; MFU {its['mfu'][0]:.1%} to {its['mfu'][1]:.1%}; "
        f"{parts or 'no part by 0.5%'}; {own_bytes / GiB:.1f} to {nbytes / GiB:.1f} GiB a device{its_compiled}"
    )


# What could be twice as much of a chip, and the figures that this is. More matrix units are a faster kernel as well:
# of attention's, whose exponentials are the vector unit's, that is too kind.
WHAT_IF = {
    "matrix units": ("bf16_flops_per_s", "fp8_flops_per_s"),
    "HBM's bandwidth": ("hbm_bytes_per_s",),
    "HBM's bytes": ("hbm_bytes",),
    "links": ("link_bytes_per_s", "die_to_die_bytes_per_s"),
}


def what_if(name: str) -> dict:
    """By what share more tokens a second a recipe trains with twice as much of one thing.

    In each case with the recipe's --remat or one that is faster and fits: else more memory would be of no use.
    """
    recipe = RECIPES[name]
    config = flags_lib.from_recipe(name)
    chip, _ = parse_topology(recipe.topology)

    def fastest(*figures: str) -> Prediction:
        plus = "".join(f"+{figure}=2x" for figure in figures if getattr(chip, figure))
        more, topology = parse_topology(recipe.topology.replace(":", f"{plus}:"))
        own = predict(run_of(config, more, topology, num_slices=recipe.num_slices))
        others = recompute.predictions(config, more, topology, num_slices=recipe.num_slices).values()
        return min([own, *filter(recompute.fits, others)], key=lambda found: found.step_s)

    own = fastest()
    gain = {case: own.step_s / fastest(*of).step_s - 1 for case, of in WHAT_IF.items()}
    return dict(recipe=name, step_s=own.step_s, mfu=own.mfu, gain=gain)


def table_of_what_if(names: list[str]) -> str:
    """As Markdown."""
    lines = [f"| recipe | step | MFU | twice the {' | '.join(WHAT_IF)} |", "|---" * (3 + len(WHAT_IF)) + "|"]
    for its in map(what_if, names):
        gains = (f"{gain:+.1%}" for gain in its["gain"].values())
        lines.append(f"| {its['recipe']} | {its['step_s']:.2f} s | {its['mfu']:.1%} | {' | '.join(gains)} |")
    return "\n".join(lines)


def plot(rows: list[dict], path: str) -> None:
    """MFU of each recipe and of what was measured, as a picture. Raises ValueError: there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(10, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    fits = [its["compiled"]["mfu"] if its["compiled"] and its["compiled"]["fits"] else None for its in rows]
    for label, marker, values in (
        ("this program, predicted", "o", [its["mfu"] for its in rows]),
        ("this program, compiled", "x", fits),
        ("MaxText, measured", "s", [its["measured_mfu"] for its in rows]),
        ("MaxText, predicted", "+", [its["measured_mfu"] and its["measured_mfu"] / its["ratio"] for its in rows]),
    ):
        there = [(value, number) for number, value in enumerate(values) if value is not None]
        if there:
            axes.scatter(*zip(*there, strict=True), marker=marker, label=label, zorder=2)
    axes.set_yticks(range(len(rows)), [f"{its['recipe']}, {its['topology']}" for its in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set(xlabel="MFU, of the peak in bfloat16, in 8 bits too")
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__file__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all: {', '.join(RECIPES)}")
    parser.add_argument("--better", action="store_true", help="what the planner finds in their place")
    parser.add_argument("--what_if", action="store_true", help="what twice as much of each figure would gain")
    parser.add_argument("--json", action="store_true", help="a list of JSON objects, in seconds and bytes")
    parser.add_argument(
        "--plot", type=command.path, metavar="FILE.png", help="MFU as a picture beside the table; [plot] extra"
    )
    args = command.arguments(parser, argv)
    names = args.names or list(RECIPES)
    if args.better + args.what_if + bool(args.plot) > 1:
        raise ValueError("one of --better, --what_if and --plot: the picture is of the recipes themselves")
    for name in names:
        flags_lib.recipe_of(name)
    if args.json:
        found = better if args.better else what_if if args.what_if else row
        print(json.dumps(list(map(found, names))))
    elif args.better:
        for name in names:
            print(say_better(better(name)), flush=True)
    else:
        print(table_of_what_if(names) if args.what_if else table(names))
    if args.plot:
        plot(list(map(row, names)), args.plot)


if __name__ == "__main__":
    command.run(main)
