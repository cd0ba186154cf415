"""Draws the concepts of this project from the code's own numbers, and writes docs/TOUR.md.

    python benchmarks/tour.py                 all chapters
    python benchmarks/tour.py ring fp8        the page, and the pictures of some

A chapter is a function that returns its numbers, the sentences in which they appear, and its picture. The page is
regenerated in tests/test_tour.py, except for the last chapter's numbers, which need a compile for TPU7x.
"""

import json
import math
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import collectives
import command
import context
import fp8
import groups
import masks
import moe
import pipeline
from compiled import bundles, grid
from hardware import si
from predicted import residuals, workload
from predicted.step import Kind
from published import RECIPES

PAGE, FIGURES = ROOT / "docs/TOUR.md", ROOT / "docs/figures/tour"
STORED = ROOT / "benchmarks/tour.json"  # of the last chapter
# Okabe and Ito's colours, which also differ for colour-blind readers.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000 #E69F00 #56B4E9 #009E73 #F0E442 #0072B2 #D55E00 #CC79A7".split()
)
LIGHT = "#E8E8E8"


class Chapter(NamedTuple):
    """A chapter: its heading, the file that it is about, its text, and a function that draws it into a figure."""

    title: str
    file: str
    text: str
    draw: Callable


# -- chapters


def ring(n: int = 8) -> Chapter:
    """The device whose block arrives at each device, hop by hop, in a gather around a ring."""
    mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,))
    x = jnp.zeros((n, 128, 1024), jnp.bfloat16)
    arrivals, sent = {}, {}
    for algorithm in ("ring", "ring_bidirectional"):
        devices = lambda x, algorithm=algorithm: jnp.stack(
            [device for device, _ in collectives._arrivals(x, "x", algorithm)]
        )[:, None]
        run = jax.jit(jax.shard_map(devices, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x")))
        arrivals[algorithm] = np.asarray(run(x)).T  # [device, place in the order of arrival]
        gather = jax.shard_map(
            partial(collectives.all_gather, axis="x", algorithm=algorithm), mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )
        sent[algorithm] = collectives.messages(gather, x)
    steps = {name: max(map(len, rings.values())) for name, rings in sent.items()}
    sizes = {name: max(map(sum, rings.values())) for name, rings in sent.items()}
    text = (
        f"All {n} devices need all {n} blocks. Each sends the block that it received last to its neighbour. Around a "
        f"ring in one direction that takes {steps['ring']} hops, and {si(sizes['ring'], 'B')} pass each link for "
        f"blocks of {si(sizes['ring'] / (n - 1), 'B')}. In both directions at once it takes "
        f"{steps['ring_bidirectional']} hops, and a link carries {si(sizes['ring_bidirectional'], 'B')} each way. A "
        "number in the picture is the owner of a block; a row is a device, from left to right the order in which "
        "blocks arrive there."
    )

    def draw(figure):
        for axes, (name, owners) in zip(figure.subplots(1, 2), arrivals.items(), strict=True):
            axes.imshow((owners - np.arange(n)[:, None]) % n, cmap="Blues", vmax=2 * n)
            for device in range(n):
                for place in range(n):
                    axes.text(place, device, owners[device, place], ha="center", va="center")
            axes.set(title=f"{name}: {steps[name]} hops", xlabel="order of arrival", ylabel="device")

    return Chapter("A gather around a ring", "collectives.py", text, draw)


def fsdp(recipe: str = "llama3.1-70b-8k-bf16") -> Chapter:
    """The time of a layer's compute and of its messages, predicted."""
    prediction = residuals.prediction_of(RECIPES[recipe], workload.TODAY, recipe=recipe)
    run = prediction.run
    (layer,) = workload.layers_of(run)
    kind = Kind(layer, run)
    gather = run.collective_s("all_gather", layer.gathered_bytes(run), "fsdp")
    scatter = run.collective_s("reduce_scatter", layer.gradient_bytes(run), "fsdp")
    ms = lambda seconds: f"{1e3 * seconds:.1f} ms"
    text = (
        f"A device has 1/{run.sizes['fsdp']} of each layer's weights. While it computes a layer, it gathers the next "
        f"one's: for Llama 3.1 70B, {si(layer.gathered_bytes(run), 'B')} in {ms(gather)}, behind {ms(kind.forward)} of "
        f"a layer's forward pass. In the backward pass ({ms(kind.backward)} a layer, with what is recomputed) it "
        f"gathers them again, and sums the gradients of the layer after, in {ms(scatter)}. So the messages are hidden, "
        f"but for the first and the last. (Predicted for {RECIPES[recipe].topology}.)"
    )

    def draw(figure):
        axes = figure.subplots()
        begin = 0.0
        for number in range(3):
            axes.broken_barh([(begin, kind.forward)], (1, 0.8), facecolor=SKY, edgecolor=BLACK)
            axes.text(begin + kind.forward / 2, 1.4, f"layer {number}", ha="center", va="center")
            axes.broken_barh([(begin, gather)], (0, 0.8), facecolor=ORANGE, edgecolor=BLACK)
            axes.text(begin + gather, 0.4, f" gather {number + 1}", va="center")
            begin += kind.forward
        begin += 0.2 * kind.forward
        for number in (2, 1):
            axes.broken_barh([(begin, kind.backward)], (1, 0.8), facecolor=BLUE, edgecolor=BLACK)
            axes.text(
                begin + kind.backward / 2, 1.4, f"layer {number}, backward", ha="center", va="center", color="white"
            )
            axes.broken_barh([(begin, gather)], (0, 0.8), facecolor=ORANGE, edgecolor=BLACK)
            end = begin + kind.backward
            axes.broken_barh([(end - scatter, scatter)], (0, 0.8), facecolor=GREEN, edgecolor=BLACK)
            axes.text(end - scatter, 0.4, f"sum {number} ", ha="right", va="center")
            begin = end
        axes.set_yticks([0.4, 1.4], ["links", "TensorCore"])
        axes.set(xlabel="seconds", title=f"Llama 3.1 70B on {RECIPES[recipe].topology}, predicted")

    return Chapter("Fully sharded weights, gathered ahead", "fsdp.py", text, draw)


def zigzag(n: int = 8, T: int = 2048) -> Chapter:
    """The share of the scores that each device computes, in order and in zigzag order."""
    shares = {}
    for name, balanced in (("in order", False), ("zigzag", True)):
        seen = (context.order(T, n, balanced) + 1).reshape(n, -1).sum(1)
        shares[name] = seen / seen.sum()
    last = shares["in order"].max() * n
    text = (
        f"A causal query sees the keys before it. With a sequence over {n} devices in order, the last device has "
        f"{last:.2f} times its share of the scores, and the first {shares['in order'].min() * n:.2f} times: all wait "
        "for the last. In zigzag order a device has a chunk from the front and one from the back, and all have "
        f"{shares['zigzag'].max():.1%} to within {np.ptp(shares['zigzag']):.1%}."
    )

    def draw(figure):
        axes = figure.subplots()
        for number, (name, values) in enumerate(shares.items()):
            axes.bar(np.arange(n) + 0.4 * number - 0.2, values, 0.4, label=name, color=(ORANGE, BLUE)[number])
        axes.axhline(1 / n, color=BLACK, lw=0.8, ls="--")
        axes.set(xlabel="device", ylabel="share of all scores", title="Causal attention over 8 devices")
        axes.legend()

    return Chapter("A sequence over devices, in zigzag order", "context.py", text, draw)


def ticks(stages: int = 4, microbatches: int = 8) -> Chapter:
    """The passes of each stage of a pipeline in each tick, by schedule."""
    schedules = [
        pipeline.make_schedule(name, stages, microbatches, 2 if name == "circular" else 1)
        for name in pipeline.SCHEDULES
    ]
    idle = {schedule.name: pipeline.idle_share(schedule) for schedule in schedules}
    live = {schedule.name: schedule.live / schedule.rounds for schedule in schedules}
    text = (
        f"{stages} stages of layers, {microbatches} microbatches. Blue is a forward pass, orange a backward pass, with "
        f"the microbatch's number; a stage that does both in a tick has both. GPipe is idle for {idle['gpipe']:.0%} of "
        f"the time and holds {live['gpipe']:.0f} microbatches' activations at once. 1F1B is idle for "
        f"{idle['1f1b']:.0%} and holds {live['1f1b']:.0f}. With two rounds through the stages (circular) "
        f"{idle['circular']:.0%} are idle, and {live['circular']:.1f} are held."
    )

    def draw(figure):
        for axes, schedule in zip(figure.subplots(len(schedules), 1), schedules, strict=True):
            for stage in range(stages):
                for tick in range(schedule.num_ticks):
                    for row, (at, colour) in enumerate(((schedule.forward_at, SKY), (schedule.backward_at, ORANGE))):
                        work = at(tick, stage)
                        if work.busy:
                            place = stage + 0.45 * row
                            axes.broken_barh([(tick, 1)], (place, 0.45), facecolor=colour, edgecolor="white")
                            axes.text(tick + 0.5, place + 0.22, work.microbatch, ha="center", va="center", fontsize=6)
            axes.set(title=f"{schedule.name}: {idle[schedule.name]:.0%} idle", xlim=(0, schedule.num_ticks))
            axes.set_xticks(range(0, schedule.num_ticks + 1, 2))
            axes.set_yticks([stage + 0.45 for stage in range(stages)], [f"stage {stage}" for stage in range(stages)])
            axes.invert_yaxis()
        axes.set(xlabel="tick")

    return Chapter("A pipeline's ticks", "pipeline.py", text, draw)


def blocks(length: int = 2048, block: int = 128) -> Chapter:
    """The blocks of scores that a kernel computes, and those for which it needs the mask."""
    ids = (jnp.arange(length) // (length // 3))[None]
    chosen = {
        "causal": masks.Mask(),
        "prefix": masks.Mask(prefix=length // 3),
        "window": masks.Mask(window=length // 4),
        "documents": masks.Mask(segments=(ids, ids)),
    }
    grids, words, n = {}, [], length // block
    for name, mask in chosen.items():
        ranges = np.asarray(masks.block_ranges((length, length), (block, block), mask)[0][0])
        k = np.arange(n)
        visited = (k >= ranges[:, :1]) & (k < ranges[:, 3:])
        full = (k >= ranges[:, 1:2]) & (k < ranges[:, 2:3])
        grids[name] = visited.astype(int) + full
        words.append(f"{name} {visited.mean():.0%}, of which {full.sum() / visited.sum():.0%} need no mask")
    text = (
        f"A kernel works on blocks of {block} x {block} scores, here of {length:,} queries and keys. It skips blocks "
        "that no query sees, and applies the mask only to blocks that its edge crosses. Of all blocks it computes: "
        f"{'; '.join(words)}."
    )

    def draw(figure):
        from matplotlib.colors import ListedColormap

        for axes, (name, blocks) in zip(figure.subplots(1, len(grids)), grids.items(), strict=True):
            axes.imshow(blocks, cmap=ListedColormap([LIGHT, ORANGE, BLUE]), vmin=0, vmax=2)
            axes.set(title=name, xlabel="keys", xticks=[], yticks=[])
        figure.supylabel("queries")
        figure.suptitle("blue: computed, without a mask    orange: with the mask    grey: skipped", fontsize=9)

    return Chapter("Masks by blocks", "masks.py", text, draw)


def experts(tokens: int = 4096, E: int = 16, X: int = 2) -> Chapter:
    """How many rows each expert has, and the tiles in which a kernel multiplies them."""
    key = jax.random.key(0)
    logits = jax.random.normal(key, (tokens, E)) + 0.08 * jnp.arange(E)
    sizes = np.asarray(moe.loads(moe.route(logits, X).experts_tX, E)).astype(int)
    tiles = groups.Tiles(rows=256, cols=512, step=64)
    counts = grid.tile_counts(sizes, tokens * X, tiles, jnp.bfloat16)
    least = math.ceil(tokens * X / tiles.rows)
    computed = sum(int(name.split()[0]) * count for name, count in counts.items() if name.endswith(" rows"))
    text = (
        f"A router sends {tokens:,} tokens to {X} of {E} experts each, and prefers some: the largest has "
        f"{sizes.max() / sizes.mean():.2f} times the mean of {sizes.mean():.0f} rows. The rows are sorted by expert, "
        f"and one kernel multiplies them in tiles of at most {tiles.rows} rows of one expert. It takes "
        f"{counts['tile']} tiles, where {least} would do without edges. The last tile of an expert is as low as its "
        f"rest, so {computed:,} rows are multiplied for {tokens * X:,}: {computed / tokens / X - 1:.1%} more."
    )

    def draw(figure):
        axes = figure.subplots()
        axes.bar(range(E), sizes, color=SKY, edgecolor=BLACK)
        for expert, size in enumerate(sizes):
            axes.hlines(range(tiles.rows, size, tiles.rows), expert - 0.4, expert + 0.4, color=BLACK, lw=0.8)
        axes.axhline(sizes.mean(), color=RED, ls="--", label="mean")
        axes.set(xlabel="expert", ylabel="rows", title=f"rows by expert, in tiles of at most {tiles.rows}")
        axes.legend()

    return Chapter("Tokens to experts", "moe.py", text, draw)


def eight_bits() -> Chapter:
    """The values of the two formats, and the error of a product of matrices by granularity."""
    formats = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
    grids, worst = {}, {}
    for name, dtype in formats.items():
        values = np.asarray(jax.lax.bitcast_convert_type(jnp.arange(128, dtype=jnp.uint8), dtype).astype(jnp.float32))
        grids[name] = values[np.isfinite(values)]
        x = jnp.asarray(np.geomspace(2.0**-4, 64, 4001), jnp.float32)
        worst[name] = float(jnp.max(jnp.abs(fp8.cast(x, jnp.float32(1), dtype).astype(jnp.float32) / x - 1)))
    draws = np.random.default_rng(0).standard_normal
    x, w = jnp.asarray(draws((256, 512)), jnp.float32), jnp.asarray(draws((512, 256)), jnp.float32)
    spiky = x.at[0, 0].set(1e6)
    errors = {
        case: {g: fp8.matmul_error(fp8.Recipe(granularity=g), operand, w) for g in fp8.GRANULARITIES}
        for case, operand in (("normal", x), ("one element 1e6", spiky))
    }
    text = (
        f"e4m3 has {len(grids['e4m3'])} values up to {grids['e4m3'].max():.0f}, e5m2 {len(grids['e5m2'])} up to "
        f"{grids['e5m2'].max():,.0f}: more range, half as many between powers of two. Rounding a normal number is off "
        f"by at most {worst['e4m3']:.1%} and {worst['e5m2']:.1%}. A scale moves a tensor's largest element to the end "
        f"of the range. A product of random matrices is then off by {errors['normal']['per_tensor']:.1%} (the median "
        "row). With one element of 1e6, one scale for the tensor loses all other rows "
        f"({errors['one element 1e6']['per_tensor']:.0%}), a scale for each row or column does not "
        f"({errors['one element 1e6']['per_axis']:.1%}), nor one for each block "
        f"({errors['one element 1e6']['block']:.1%})."
    )

    def draw(figure):
        left, right = figure.subplots(1, 2)
        for row, values in enumerate(grids.values()):
            inside = values[(values >= 0.5) & (values <= 8)]
            left.plot(inside, np.full(len(inside), row), "|", ms=16, color=(BLUE, ORANGE)[row])
        left.set_xscale("log", base=2)
        left.set_yticks(range(len(grids)), list(grids))
        left.set(title="values from 1/2 to 8", ylim=(-0.6, 1.6))
        for number, granularity in enumerate(fp8.GRANULARITIES):
            heights = [errors[case][granularity] for case in errors]
            right.bar(
                np.arange(2) + 0.25 * (number - 1),
                heights,
                0.25,
                label=granularity,
                color=(BLUE, ORANGE, GREEN)[number],
            )
        right.set_xticks(range(2), list(errors))
        right.set_yscale("log")
        right.set(title="error of a product", ylabel="relative, median row")
        right.legend(fontsize=7)

    return Chapter("Eight bits", "fp8.py", text, draw)


def kernel_numbers(size: int = 2048) -> dict:
    """The regions of a matmul's kernel as compiled for TPU7x: {label: cycles of one execution, shares of its slots}."""
    kernel = bundles.measure("dense:build", M=size, N=size, K=size).kernel()
    rows = []
    for region, depth in bundles.walk(kernel.root):
        uses = {unit: use for unit, use in region.slots.items() if unit not in bundles.COUNTS}
        rows.append(dict(label=region.label, kind=region.kind, depth=depth, cycles=region.cycles, slots=uses))
    return dict(size=size, grid=kernel.grid, cycles=kernel.cycles().compute, regions=rows)


def kernel() -> Chapter:
    """How full the instruction bundles of a kernel's inner loop are, by unit."""
    stored = json.loads(STORED.read_text())
    steps, size = math.prod(stored["grid"]), stored["size"]
    ideal = 2 * size**3 / (2 * 2 * 256 * 256 * 2)
    busiest = max(stored["regions"], key=lambda region: region["cycles"])
    uses = dict(sorted(busiest["slots"].items(), key=lambda item: -item[1]))
    unit, use = next(iter(uses.items()))
    text = (
        "A TensorCore runs one bundle of instructions a cycle: a slot for each matrix unit, vector unit, load, store. "
        f"A matmul of {size:,} x {size:,} x {size:,} in bfloat16 takes {stored['cycles']:,} cycles in {steps} steps of "
        f"the grid, where its matrix units need {ideal:,.0f}: {ideal / stored['cycles']:.1%} of their peak. In the "
        f"largest region, {unit} has {use:.0%} of its slots in use. (Compiled for TPU7x.)"
    )

    def draw(figure):
        axes = figure.subplots()
        shown = {unit: use for unit, use in uses.items() if use > 0.005}
        axes.barh(list(shown), list(shown.values()), color=BLUE)
        axes.invert_yaxis()
        axes.set(
            xlabel="share of its slots in use", xlim=(0, 1), title=f"{busiest['cycles']:,} bundles of a step, by unit"
        )

    return Chapter("A kernel's bundles", "dense.py", text, draw)


CHAPTERS = {
    "ring": ring,
    "fsdp": fsdp,
    "zigzag": zigzag,
    "ticks": ticks,
    "blocks": blocks,
    "experts": experts,
    "fp8": eight_bits,
    "kernel": kernel,
}
HEAD = """# A tour

One picture for each idea, drawn from the numbers of the code itself. `python benchmarks/tour.py` draws them again.
"""


def page(chapters: dict[str, Chapter]) -> str:
    """The text of docs/TOUR.md."""
    sections = [HEAD]
    for number, (name, chapter) in enumerate(chapters.items(), 1):
        lines = textwrap.fill(chapter.text, 120)
        picture = f"![{chapter.title}](figures/tour/{name}.png)"
        sections.append(
            f"## {number}. {chapter.title}\n\n{lines}\n\n{picture}\n\nThe code: [{chapter.file}](../{chapter.file})\n"
        )
    return "\n".join(sections)


def draw(chapter: Chapter, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6 if chapter.file != "pipeline.py" else 6), layout="constrained")
    chapter.draw(figure)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main() -> None:
    parser = command.parser(__file__)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=f"to draw; default: all: {', '.join(CHAPTERS)}")
    parser.add_argument("--compile", action="store_true", help="compile the last chapter's kernel anew")
    args = command.arguments(parser)
    command.check_names(args.chapters, CHAPTERS)
    jax.config.update("jax_num_cpu_devices", 8)
    if args.compile or not STORED.exists():
        STORED.write_text(json.dumps(kernel_numbers(), indent=1) + "\n")
    chapters = {name: chapter() for name, chapter in CHAPTERS.items()}
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name in args.chapters or CHAPTERS:
        draw(chapters[name], FIGURES / f"{name}.png")
        print(FIGURES / f"{name}.png")
    PAGE.write_text(page(chapters))


if __name__ == "__main__":
    command.run(main)
