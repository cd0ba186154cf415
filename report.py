"""Draws a step or a run as one page of HTML that needs no server and loads nothing from outside. No jax.

    python aot.py --preset=llama3.1-8b --mesh=fsdp:8 --batch=8 --report=pages/8b     a compiled step
    python roofline.py step --preset=llama3.1-70b --batch=256 --report=pages/70b     a predicted step
    python report.py metrics.jsonl --report=pages/run                                a run, by its --metrics_file
    python report.py a.jsonl b.jsonl --report=pages/both                             two runs beside each other
    python report.py a.json b.json --report=pages/plans                              two steps, each printed by --json

**Idea.** The numbers are those of `--json`: the page embeds the object itself in <script id="data">, and draws it. A
table repeats the main numbers of a picture. DIR/index.html opens in any browser, also without a network.

**Layout** of the page of a compiled step: its summary beside the prediction; the timeline of compiled/trace.py, on
which one can zoom, hover, and hide a kind; what the TensorCore waits for, the exposed part of the critical path; the
memory over the step; collectives by mesh axis; the step by part; its flags, and what the planner would change.

The page of a run has its losses, norms, times and rates over the steps, the loads of experts as images, what ended it
and where it resumed, and the texts that it sampled.

**Cost**: 1.3 MB for the library, and about 250 bytes a span. A timeline of more than `MOST_SPANS` spans is drawn with
neighbours joined, the shortest first. The table of waits and the embedded numbers are computed before that. A run of
more than `MOST_STEPS` steps is drawn, and embedded, as means of several: one of 100,000 steps takes 2.4 MB.

**Why bokeh** (extra `[report]`): its minified script is 1.3 MB, plotly's 4.8 MB, and a page should stay under 5 MB.
matplotlib draws pictures that do not zoom. A policy in the page's head forbids every load from outside.

**Left out**: a live page. A run that is killed writes no reason: the page has its resume alone.

**Source**: colours from M. Okabe and K. Ito, "Color Universal Design", which readers of all kinds distinguish.
"""

import html
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import command
import outputs
from compiled.trace import Span
from hardware import si

PAGE = "index.html"
MOST_SPANS = 6000
MOST_STEPS = 1500  # of a run, in a line
GiB = 2**30
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
)  # fmt: skip
GREY = "#BBBBBB"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, BLACK)
KINDS = {  # of spans, in the order of the legend
    "matmul": BLUE,
    "kernel": PURPLE,
    "elementwise": SKY,
    "copies and layouts": YELLOW,
    "wait": VERMILION,
    "collective": GREEN,
    "copy": ORANGE,
    "loop": GREY,
    "skipped iterations": "#E8E8E8",
}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #111; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 2em 0 .3em; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; }
td, th { padding: .15em .9em .15em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }
td { white-space: pre-wrap; } td:last-child { overflow-wrap: anywhere; }
td.number { text-align: right; } code { background: #f3f3f3; overflow-wrap: anywhere; } p { max-width: 60em; }
"""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, a sentence, a figure of bokeh, and a table whose first row is its head."""

    title: str
    text: str = ""
    figure: object = None
    table: Sequence[Sequence[str]] = ()


# -- the page


def check(flag: str, folder: str, read: dict[str, str] | None = None) -> None:
    """Makes the folder of a page, before any work.

    Args:
      flag: the flag that named the folder, for messages.
      read: {flag: path} of the inputs, and of other outputs.

    Raises ValueError where bokeh is not installed, the page cannot be written, or it would replace one of these.
    """
    try:
        import bokeh  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(f'{flag} needs bokeh: pip install -e ".[report]"') from None
    path = Path(folder, PAGE)
    outputs.check_apart({flag: str(path)}, read or {})
    outputs.check_writable(f"{flag}={folder}", path)


def write(folder: str, title: str, sections: Sequence[Section], data: dict) -> Path:
    """Writes a page, and returns its path. `data` is embedded as JSON. Raises OSError if it cannot be written."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    figures = {str(number): each.figure for number, each in enumerate(sections) if each.figure is not None}
    script, divs = components(figures) if figures else ("", {})
    library = Resources(mode="inline", components=["bokeh"]).render_js() if figures else ""
    parts = []
    for number, section in enumerate(sections):
        parts.append(f"<section><h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(section.text)}</p>"] if section.text else []
        parts += [divs[str(number)]] if str(number) in divs else []
        parts += [_table(section.table)] if section.table else []
        parts.append("</section>")
    numbers = json.dumps(data).replace("</", "<\\/")
    path = Path(folder, PAGE)
    with outputs.replacing(path) as file:
        file.write(
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head>\n'
            f"<body><h1>{html.escape(title)}</h1>\n{''.join(parts)}\n"
            f'<script type="application/json" id="data">{numbers}</script>\n{library}\n{script}\n</body></html>\n'
        )
    return path


def _table(rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table; cells that begin with a digit are set to the right."""
    head, *body = rows
    kind = lambda text: ' class="number"' if text.lstrip("-+")[:1].isdigit() and len(text) < 24 else ""
    cell = lambda text: f"<td{kind(text)}>{html.escape(text)}</td>"
    lines = ["".join(f"<th>{html.escape(text)}</th>" for text in head)]
    lines += ["".join(map(cell, row)) for row in body]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


# -- figures


def _figure(height: int, **options):
    """An empty figure with zoom and hover."""
    from bokeh.plotting import figure

    tools = "xpan,box_zoom,xwheel_zoom,reset,save" + (",hover" if "tooltips" in options else "")
    drawn = figure(height=height, sizing_mode="stretch_width", tools=tools, **options)
    drawn.toolbar.logo = None
    drawn.min_border_left = 200  # the time axes of figures below each other are aligned
    drawn.xgrid.grid_line_alpha = drawn.ygrid.grid_line_alpha = 0.4
    return drawn


def _figure_by_step(height: int, **options):
    """An empty figure whose axis is the step, in whole numbers."""
    from bokeh.models import NumeralTickFormatter

    drawn = _figure(height, x_axis_label="step", **options)
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0")
    return drawn


def _legend(drawn) -> None:
    """Puts the legend above a figure; a click on an entry hides what it names."""
    if drawn.legend:
        drawn.legend.click_policy = "hide"
        drawn.legend.orientation = "horizontal"
        drawn.add_layout(drawn.legend[0], "above")


def bars(rows: dict[str, dict[str, float]], axis: str, colours: dict[str, str], scale: float = 1.0):
    """Horizontal stacked bars.

    Args:
      rows: {bar: {segment: value}}, from above.
      axis: the name of the axis, with its unit.
      colours: {segment: colour}.
      scale: what values are multiplied by.
    """
    drawn = _figure(
        90 + 24 * len(rows), y_range=list(rows)[::-1], x_axis_label=axis, tooltips="@name: @value{0.[0000]}"
    )
    left = dict.fromkeys(rows, 0.0)
    for segment, colour in colours.items():
        values = {name: scale * row[segment] for name, row in rows.items() if row.get(segment)}
        if not values:
            continue
        source = {"y": list(values), "left": [left[name] for name in values], "value": list(values.values())}
        source |= {"right": [left[name] + value for name, value in values.items()], "name": [segment] * len(values)}
        drawn.hbar("y", 0.7, "right", left="left", source=source, color=colour, legend_label=segment)
        left |= {name: left[name] + value for name, value in values.items()}
    drawn.x_range.start = 0
    _legend(drawn)
    return drawn


def kind_of(span: Span) -> str:
    """The entry of the legend to which a span belongs."""
    if span.kind in ("wait", "synchronous"):
        return "wait"
    if span.kind in ("loop", "iteration"):
        return "loop"
    if span.kind == "skipped":
        return "skipped iterations"
    if span.kind == "transfer":
        return "collective" if span.process in ("links", "network") else "copy"
    return "kernel" if span.category.startswith("kernel") else span.category


def joined(spans: Sequence[Span], most: int = MOST_SPANS) -> list[Span]:
    """About `most` spans: neighbours of a track are joined, the shortest first, and take the kind of the longer."""
    step_s = max((span.end for span in spans), default=0.0)
    shortest = step_s / 2**20
    while len(spans) > most:
        shorter: list[Span] = []
        for span in spans:
            last = shorter[-1] if shorter else None
            same = last and (last.process, last.thread) == (span.process, span.thread)
            short = same and span.begin >= last.end and span.end - last.begin < shortest
            if short and {span.kind, last.kind} <= {"op", "transfer"}:
                number = last.args.get("joined", 1) + span.args.get("joined", 1)
                args = {"joined": number, "op": f"{number} short spans", "source": span.args.get("source", "")}
                longer = max(last, span, key=lambda each: each.seconds)
                shorter[-1] = replace(longer, begin=last.begin, end=span.end, name=f"{number} spans", args=args)
            else:
                shorter.append(span)
        spans, shortest = shorter, 2 * shortest
        if shortest > step_s:
            break
    return list(spans)


def timeline(spans: Sequence[Span]):
    """The spans of compiled/trace.py, a row a track, in milliseconds. Loops have an iteration inside of the loop."""
    tracks = list(dict.fromkeys((span.process, span.thread) for span in spans))
    label = {track: f"{track[0]}: {track[1]}"[-44:] for track in tracks}
    tooltips = [("", "@name"), ("what", "@concept"), ("time", "@ms{0.[000000]} ms x @times"), ("line", "@source")]
    tooltips += [("bytes", "@bytes"), ("cycles", "@cycles"), ("operation", "@op")]
    rows = [label[track] for track in tracks][::-1]
    drawn = _figure(150 + 46 * len(rows), y_range=rows, x_axis_label="ms since the step began", tooltips=tooltips)
    by_kind = defaultdict(list)
    for span in joined(spans):
        by_kind[kind_of(span)].append(span)
    for kind, colour in KINDS.items():
        if not (chosen := by_kind.get(kind)):
            continue
        text = lambda name, chosen=chosen: [str(span.args.get(name, "")) for span in chosen]
        source = {
            "y": [label[span.process, span.thread] for span in chosen],
            "left": [span.begin * 1e3 for span in chosen],
            "right": [span.end * 1e3 for span in chosen],
            "height": [0.5 if span.kind == "iteration" else 0.8 for span in chosen],
            "name": [span.name for span in chosen],
            "ms": [span.seconds * 1e3 for span in chosen],
            "source": [line.rpartition("/")[2] for line in text("source")],
            "bytes": [si(span.args["bytes"], "B") if span.args.get("bytes") else "" for span in chosen],
            **{name: text(name) for name in ("concept", "times", "cycles")},
            "op": [op[-70:] for op in text("op")],
        }
        edge = "white" if kind in ("loop", "skipped iterations") else None
        drawn.hbar("y", "height", "right", left="left", source=source, color=colour, line_color=edge, legend_label=kind)
    drawn.ygrid.grid_line_color = None
    _legend(drawn)
    return drawn


def _changes(points: Sequence[tuple], least: float) -> list[tuple]:
    """The points whose second value differs by `least` from the last one before that is retained."""
    retained: list[tuple] = []
    for point in points:
        if not retained or abs(point[1] - retained[-1][1]) >= least:
            retained.append(point)
    return retained


def memory(over_step: Sequence[tuple[str, float]], spans: Sequence[Span], limit: float, x_range=None):
    """The live bytes over the step, in GiB; skipped iterations have the most of the iteration that they repeat."""
    live = dict(over_step)
    skipped = [
        span for span in spans if (span.process, span.thread, span.kind) == ("TensorCore", "operations", "skipped")
    ]
    begun = [(span.begin if span.issued is None else span.issued, span) for span in spans if span.name in live]
    points = sorted((at, live[span.name] / GiB, span.name) for at, span in begun)
    for span in skipped:
        iteration = span.begin - span.seconds / span.args["trips"]
        repeated = [nbytes for at, nbytes, _ in points if iteration <= at < span.begin]
        points.append((span.begin, max(repeated, default=0.0), span.name))
    points = _changes(sorted(points), max((nbytes for _, nbytes, _ in points), default=0.0) / 1000)
    points = [(at * 1e3, nbytes, name) for at, nbytes, name in points]
    points.append((max((span.end for span in spans), default=0.0) * 1e3, points[-1][1] if points else 0.0, "end"))
    options = {"x_range": x_range} if x_range else {}
    labels = dict(x_axis_label="ms since the step began", y_axis_label="GiB live")
    drawn = _figure(220, tooltips=[("", "@name"), ("live", "@y{0.00} GiB"), ("at", "@x ms")], **labels, **options)
    source = dict(zip(("x", "y", "name"), map(list, zip(*points, strict=True)), strict=True))
    drawn.step("x", "y", source=source, mode="after", color=BLUE, line_width=2)
    drawn.hspan(y=[limit / GiB], line_color=VERMILION, line_dash="dashed")
    drawn.y_range.start = 0
    return drawn


# -- the page of a step


def _ratio(compiled: float, predicted: float) -> str:
    return f"{compiled / predicted:.3f}" if predicted else ""


NUMBERS = {  # of a step: its key in the object of --json, and its text
    "step": ("step_s", lambda x: si(x, "s")),
    "MFU": ("mfu", lambda x: f"{x:.1%}"),
    "tokens/s a chip": ("tokens_per_s_per_chip", lambda x: f"{x:,.0f}"),
    "communication exposed": ("exposed_comm_s", lambda x: si(x, "s")),
}


def summary(result: dict, prediction: dict) -> list[list[str]]:
    """The table of a compiled step beside its prediction."""
    rows = [["", "compiled", "predicted", "compiled / predicted"]]
    for name, (key, text) in NUMBERS.items():
        rows.append([name, text(result[key]), text(prediction[key]), _ratio(result[key], prediction[key])])
    rows.insert(2, ["its interval", "", _interval(prediction), ""])
    hbm, expected = result["peak_hbm_bytes"], prediction["hbm_bytes"]
    rows.append(["HBM of a device", si(hbm, "B"), si(expected, "B"), _ratio(hbm, expected)])
    rows.append(["its limit", si(result["hbm_limit_bytes"], "B"), "", ""])
    return rows


def _interval(prediction: dict) -> str:
    """The interval of a predicted step and its basis, in words."""
    low, high = si(prediction["step_s_low"], "s"), si(prediction["step_s_high"], "s")
    return f"{low} to {high}, by {prediction['interval']}"


def waits(spans: Sequence[Span], step_s: float, top: int = 12) -> list[list[str]]:
    """The table of waits of the TensorCore: the transfers, with the time that no computation hides."""
    seconds: Counter = Counter()
    about = {}
    for span in spans:
        if span.kind in ("wait", "synchronous"):
            key = span.name.removeprefix("wait for ")
            seconds[key] += span.seconds * span.args["times"]
            about[key] = span
    rows = [["transfer", "waited", "of the step", "what", "line"]]
    for name, waited in seconds.most_common(top):
        args = about[name].args
        line = args["source"].rpartition("/")[2]
        what = args["concept"] or about[name].category
        rows.append([name, si(waited, "s"), f"{waited / step_s:.1%}", what, line])
    return rows


def _collectives(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """{"over fsdp: all-gather": {"exposed", "hidden": seconds}}, the longest first."""
    sums: dict[str, Counter] = defaultdict(Counter)
    for row in rows:
        axes = "slices" if row["engine"] == "network" else ", ".join(row["mesh_axes"]) or "all devices"
        sums[f"over {axes}: {row['kind']}"].update(exposed=row["exposed_s"], hidden=row["hidden_s"])
    return dict(sorted(sums.items(), key=lambda item: -sum(item[1].values())))


def _parts(parts: dict) -> dict[str, dict[str, float]]:
    """{part of a predicted step: {"adds to the step", "hidden": seconds}}."""
    return {
        name: {"adds to the step": part["exposed_s"], "hidden": max(part["seconds"] - part["exposed_s"], 0.0)}
        for name, part in parts.items()
    }


EXPOSED = {"exposed": VERMILION, "hidden": GREEN}


def _buffers(result: dict, top: int = 12) -> list[list[str]]:
    rows = [["buffer", "bytes", "of the peak", "number", "largest", "line"]]
    for row in result["largest_buffers"][:top]:
        share = f"{row['bytes'] / result['peak_hbm_bytes']:.1%}"
        line = row["source"].rpartition("/")[2] or row["kind"]
        rows.append([row["op"][-72:], si(row["bytes"], "B"), share, str(row["count"]), row["largest_shape"], line])
    return rows


def of_compiled(data: dict, spans: Sequence[Span], over_step: Sequence[tuple[str, float]]) -> list[Section]:
    """The sections of a compiled step.

    Args:
      data: `report`, the object of aot.py --json; `prediction`, that of roofline.py step --json; `flags`; `plan`.
      spans: those of compiled/trace.py.
      over_step: (instruction, live bytes) of compiled/liveness.py; empty for a program cached before it was stored.
    """
    result, prediction = data["report"], data["prediction"]
    step_s, drawn = result["step_s"], timeline(spans)
    about = (
        "The schedule as compiled, with predicted seconds. Loops show an iteration, then a span for those that repeat "
    )
    about += "it. Scroll or draw a box to zoom, click on the legend to hide a kind."
    exposed = "Time that no computation hides. The rest of the critical path is the TensorCore's own work."
    at = result["peak_source"].rpartition("/")[2]
    live = f"The largest buffers are those at the peak, {at}"
    live += "; the limit is dashed." if over_step else ". This program was cached without its bytes over the step."
    filled = memory(over_step, spans, result["hbm_limit_bytes"], drawn.x_range) if over_step else None
    share = {name: {"compiled": seconds} for name, seconds in result["by_category_s"].items()}
    top_ops = [["operation", "category", "seconds", "of the step", "of the peak", "times", "line"]]
    for op in result["top_ops"]:
        peak = f"{op['of_peak']:.1%}" if op["of_peak"] else ""
        row = [(op["op_name"] or op["name"])[-72:], op["category"], si(op["seconds"], "s")]
        line = op["source"].rpartition("/")[2]
        top_ops.append([*row, f"{op['seconds'] / step_s:.1%}", peak, str(op["count"]), line])
    messages = _collectives(result["collectives"])
    kernels = [["kernel", "VMEM", "blocks"]]
    kernels += [[row["kernel"], si(row["vmem_bytes"], "B"), row["blocks"]] for row in result["kernels"]]
    return [
        Section("Compiled and predicted", "", None, summary(result, prediction)),
        Section("Timeline", about, drawn),
        Section("Waits of the TensorCore", exposed, None, waits(spans, step_s)),
        Section("Memory", live, filled, _buffers(result)),
        Section(
            "Collectives by mesh axis",
            "Seconds of all executions in a step.",
            bars(messages, "ms", EXPOSED, 1e3) if messages else None,
            _rows(messages, ("exposed", "hidden"), "collective"),
        ),
        Section("The step by category, compiled", "", bars(share, "ms", {"compiled": BLUE}, 1e3), _shares(result)),
        Section("Longest operations", "Matmuls beside the peak of the matrix units.", None, top_ops),
        Section("Kernels", "The VMEM of their blocks is by arithmetic.", None, kernels if kernels[1:] else ()),
        *_predicted_sections(data),
    ]


def _rows(sums: dict[str, dict[str, float]], columns: Sequence[str], name: str) -> list[list[str]]:
    return [[name, *columns], *([key, *(si(row.get(c, 0.0), "s") for c in columns)] for key, row in sums.items())]


def _shares(result: dict) -> list[list[str]]:
    step_s = result["step_s"]
    rows = [[name, si(s, "s"), f"{s / step_s:.1%}"] for name, s in result["by_category_s"].items()]
    return [["category", "seconds", "of the step"], *rows, ["step", si(step_s, "s"), "100.0%"]]


def _predicted_sections(data: dict) -> list[Section]:
    """The sections of a prediction: parts, memory, flags, and what the planner would change."""
    prediction, plan = data["prediction"], data["plan"]
    parts = _parts(prediction["parts"])
    stored = {name: {"bytes": nbytes} for name, nbytes in prediction["memory_bytes"].items() if nbytes}
    sections = [
        Section(
            "The step by part, predicted",
            f"Bound by {prediction['bound']}. What is not hidden adds up to the step, {si(prediction['step_s'], 's')}.",
            bars(parts, "ms", {"adds to the step": BLUE, "hidden": SKY}, 1e3),
            _rows(parts, ("adds to the step", "hidden"), "part"),
        ),
        Section(
            "Memory, predicted",
            f"{si(prediction['hbm_bytes'], 'B')} of {si(prediction['hbm_limit_bytes'], 'B')} of HBM a device.",
            bars(stored, "GiB", {"bytes": BLUE}, 1 / GiB),
        ),
        Section("Flags", "", None, [["flag"], *([flag] for flag in data["flags"])]),
    ]
    rows = [["flag"], *([flag] for flag in plan["flags"])] if plan["flags"] else ()
    return [*sections, Section("Changes that the planner proposes", plan["words"], None, rows)]


def of_prediction(data: dict) -> list[Section]:
    """The sections of a predicted step: `prediction`, `flags`, `plan`; `matmuls` (weight, FLOPs, bytes, FLOP/s)."""
    prediction = data["prediction"]
    rows = [["", "predicted"], ["step", si(prediction["step_s"], "s")], ["MFU", f"{prediction['mfu']:.1%}"]]
    rows += [["tokens/s a chip", f"{prediction['tokens_per_s_per_chip']:,.0f}"]]
    rows += [["interval", _interval(prediction)], ["fits", "yes" if prediction["fits"] else "no"]]
    rows += [["bound by", prediction["bound"]]]
    roof = Section(
        "Matmuls of a layer on the roofline of a device",
        "Forward; FLOPs for each byte of HBM, and the FLOP/s that these allow.",
        roofline(data["matmuls"]),
        [["weight", "FLOPs a byte", "FLOP/s at most"]]
        + [[name, f"{flops / nbytes:,.1f}", si(speed, "FLOP/s")] for name, flops, nbytes, speed in data["matmuls"]],
    )
    first, *rest = _predicted_sections(data)
    return [Section("Predicted", "", None, rows), first, roof, *rest]


def roofline(matmuls: Sequence[Sequence]):
    """Points of (name, FLOPs, bytes, FLOP/s at most) on logarithmic axes."""
    labels = dict(x_axis_label="FLOPs a byte of HBM", y_axis_label="FLOP/s at most")
    drawn = _figure(320, x_axis_type="log", y_axis_type="log", tooltips=[("", "@name"), ("FLOP/s", "@y")], **labels)
    for number, (name, flops, nbytes, speed) in enumerate(matmuls):
        source = {"x": [flops / nbytes], "y": [speed], "name": [name]}
        drawn.scatter("x", "y", size=11, color=SERIES[number % len(SERIES)], source=source, legend_label=name)
    _legend(drawn)
    return drawn


# -- the page of runs, and of steps beside each other


def read(path: str) -> list[dict] | dict:
    """The rows of a --metrics_file, or the object that aot.py or roofline.py step printed with --json.

    Raises:
      ValueError: the file is neither.
      OSError: it cannot be read.
    """
    text = command.read_text(path)
    wrong = f"{path!r} is neither a --metrics_file nor the output of aot.py --json or roofline.py step --json"
    try:
        rows = [row for _, row in outputs.json_lines(text)]
    except (ValueError, RecursionError):
        raise ValueError(wrong) from None
    if len(rows) == 1 and isinstance(rows[0], dict) and "step_s" in rows[0] and "loss" not in rows[0]:
        return rows[0]
    if not rows or not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
        raise ValueError(wrong)
    return rows


def by_short_name(contents: dict) -> dict:
    """{path: anything} with the names of the files in place of their paths, if these differ."""
    short = [Path(file).stem for file in contents]
    return dict(zip(short, contents.values(), strict=True)) if len({*short}) == len(short) else contents


def shortened(rows: list[dict], most: int = MOST_STEPS) -> list[dict]:
    """The rows of a run for a page: at most `most` steps, and no load of each expert, which the page has as an image.

    With more steps, a row is that of several: the means of their numbers, and the last of their counts and lists.
    """
    rows = [{name: value for name, value in row.items() if name != "expert_loads"} for row in rows]
    steps = [row for row in rows if "step_s" in row]
    size = -(-len(steps) // most)
    if size <= 1:
        return rows
    joined = [_mean(steps[first : first + size]) for first in range(0, len(steps), size)]
    return sorted([*joined, *(row for row in rows if "step_s" not in row)], key=lambda row: row["step"])


def _mean(rows: list[dict]) -> dict:
    """The last row, with the mean over all rows of each number that is not whole."""
    means = {}
    for name in rows[-1]:
        values = [row[name] for row in rows if isinstance(row.get(name), float)]
        means |= {name: sum(values) / len(values)} if values else {}
    return rows[-1] | means


def _lines(runs: dict[str, list[dict]], names: dict[str, str], axis: str, height: int = 230, **options):
    """Lines over the steps, a colour for each run and a dash for each name; None if no run has one.

    Args:
      names: {name of a metric: its words}.
    """
    dashes = ("solid", "dashed", "dotted")
    labels = dict(y_axis_label=axis, tooltips=[("", "@name"), ("step", "@x"), (axis, "@y")])
    drawn = None
    for number, (run, rows) in enumerate(runs.items()):
        for dash, (name, words) in zip(dashes, names.items(), strict=False):
            points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
            if not points:
                continue
            drawn = drawn or _figure_by_step(height, **labels, **options)
            label = f"{run}: {words}" if len(runs) > 1 else words
            xs, ys = zip(*points, strict=True)
            source = {"x": xs, "y": ys, "name": [label] * len(xs)}
            colour = SERIES[(number if len(runs) > 1 else list(names).index(name)) % len(SERIES)]
            drawn.line("x", "y", source=source, color=colour, line_dash=dash, line_width=1.5, legend_label=label)
            if len(xs) < 60:
                drawn.scatter("x", "y", source=source, color=colour, size=5, legend_label=label)
    if drawn:
        for event, colour, dash in MARKS:
            at = sorted({row["step"] for rows in runs.values() for row in rows if row.get("event") == event})
            if at:
                drawn.vspan(x=at, line_color=colour, line_dash=dash, legend_label=event)
        _legend(drawn)
    return drawn


LOADS = (
    "Tokens that chose an expert, in percent of the mean of the layer: 100 is balanced, and all from 300 on has one "
    "colour. A band is a layer, counted from the first one with experts; a row in it is an expert."
)
MARKS = (  # events of a run, as vertical lines
    ("saved", GREY, "dotted"),
    ("resumed", GREY, "dashdot"),
    ("terminated", ORANGE, "dashed"),
    ("failed", VERMILION, "solid"),
)
MIXTURE = {"load_imbalance": "load imbalance", "extra_rounds": "extra rounds", "dropped_fraction": "share dropped"}


def of_runs(runs: dict[str, list[dict]]) -> list[Section]:
    """The sections of one or more runs, {name: rows of its metrics file}. Each metric that a run lacks is left out."""
    head, *body = [["", *runs]], *_summary_of_runs(runs)
    every, runs = runs, {run: shortened(rows) for run, rows in runs.items()}
    is_joined = any(len(runs[run]) < len(rows) for run, rows in every.items())
    points = " A point is the mean of several steps." if is_joined else ""
    losses = {"loss": "training", "eval_loss": "held out"}
    figures = [
        ("Loss", f"Nats a token.{points}", _lines(runs, losses, "nats a token", 300)),
        ("Norm of the gradients", "", _lines(runs, {"grad_norm": "norm"}, "norm", y_axis_type="log")),
        (
            "Time of a step",
            "The wait for the input is part of the step.",
            _lines(runs, {"step_s": "step", "input_wait_s": "input wait"}, "s"),
        ),
        ("Learning rate", "", _lines(runs, {"learning_rate": "rate"}, "rate", 160)),
        ("Experts", "Imbalance is the largest load over the mean.", _lines(runs, MIXTURE, "ratio")),
        *(
            (f"Imbalance of experts by layer{f', {run}' if len(runs) > 1 else ''}", "", heat_map(rows))
            for run, rows in every.items()
        ),
        *(
            (f"Load of each expert{f', {run}' if len(runs) > 1 else ''}", LOADS, load_map(rows))
            for run, rows in every.items()
        ),
        ("Steps skipped", "Their gradients were not finite, or they were spikes (skip_spikes).", _skipped(runs)),
    ]
    drawn = [Section(title, text, figure) for title, text, figure in figures if figure is not None]
    tables = ("Ends and resumes", _ends(every)), ("Samples", _samples(every))
    tables = [Section(title, "", None, table) for title, table in tables if len(table) > 1]
    return [Section("Summary", "", None, [*head, *body]), *drawn, *tables]


def _ends(runs: dict[str, list[dict]]) -> list[list[str]]:
    """A row for each time that a run did not end as it should, and for each time that it went on."""
    names = {"resumed", "terminated", "failed"}
    happened = [(run, row) for run, rows in runs.items() for row in rows if row.get("event") in names]
    return [
        ["run", "after step", "", "reason"],
        *([run, f"{row['step']:,}", row["event"], row.get("why", "")] for run, row in happened),
    ]


def _samples(runs: dict[str, list[dict]], most: int = 12) -> list[list[str]]:
    """A row for each sampled text, the last `most` of each run."""
    table = [["run", "after step", "prompt", "text"]]
    for run, rows in runs.items():
        samples = [row for row in rows if row.get("event") == "sample"]
        table += [[run, f"{row['step']:,}", row["prompt"], row["text"]] for row in samples[-most:]]
    return table


def heat_map(rows: list[dict], most: int = 300):
    """The imbalance of experts by layer over the steps, in `most` columns. None for a run without experts."""
    steps = [(row["step"], row["load_imbalance_by_layer"]) for row in rows if row.get("load_imbalance_by_layer")]
    if not steps:
        return None
    drawn, _ = _image(steps, most, 12 * len(steps[0][1]), "layer with experts", "largest / mean")
    return drawn


def load_map(rows: list[dict]):
    """The load of each expert over the steps, a band of rows for each layer. None for a run that has no such rows."""
    steps = [(row["step"], row["expert_loads"]) for row in rows if row.get("expert_loads")]
    shape = lambda loads: {layer: len(loads_E) for layer, loads_E in loads.items()}
    steps = [(step, loads) for step, loads in steps if shape(loads) == shape(steps[-1][1])]  # of this model
    if not steps:
        return None
    layers, num_experts = list(steps[-1][1]), len(next(iter(steps[-1][1].values())))
    stacked = [(step, [load for loads_E in loads.values() for load in loads_E]) for step, loads in steps]
    drawn, painted = _image(stacked, 200, min(600, 12 * len(stacked[0][1])), "layer", "% of the mean")
    painted.glyph.color_mapper.update(low=0, high=300)
    bands = [(number + 0.5) * num_experts - 0.5 for number in range(len(layers))]
    drawn.yaxis.ticker = bands[:: -(-len(bands) // 16)]  # 16 labels at most
    drawn.yaxis.major_label_overrides = dict(zip(bands, layers, strict=True))
    drawn.hspan(y=[number * num_experts - 0.5 for number in range(1, len(layers))], line_color="white")
    return drawn


def _image(steps: Sequence[tuple[int, list]], most: int, height: int, axis: str, unit: str):
    """An image of (step, values): a row for each value, a column the mean of some steps, at most `most` columns.

    The colours are those of cividis, which increase in lightness. Returns (figure, the image in it).
    """
    import numpy as np

    values = np.array([row for _, row in steps], float)
    columns = np.array_split(values, min(most, len(values)))
    counts = [np.maximum((~np.isnan(column)).sum(0), 1) for column in columns]
    image = np.stack([np.nansum(column, 0) / n for column, n in zip(columns, counts, strict=True)], 1)
    first, last = steps[0][0], steps[-1][0]
    half = (last - first) / max(len(steps) - 1, 1) / 2 or 0.5  # of the distance of two steps
    tooltips = [("step", "$x{0}"), (axis, "$y{0}"), (unit, "@image")]
    drawn = _figure_by_step(120 + height, tooltips=tooltips, y_axis_label=axis)
    place = dict(x=first - half, y=-0.5, dw=last - first + 2 * half, dh=len(image))
    painted = drawn.image(image=[image.astype("float32")], palette="Cividis256", **place)
    drawn.add_layout(painted.construct_color_bar(title=unit), "right")
    return drawn, painted


def _skipped(runs: dict[str, list[dict]]):
    skipped = any(row.get("skipped") for rows in runs.values() for row in rows)
    return _lines(runs, {"skipped": "skipped"}, "steps", 160) if skipped else None


def _summary_of_runs(runs: dict[str, list[dict]]) -> list[list[str]]:
    """A row for each figure, a column for each run. Mean times leave out the first step, which takes longer."""
    columns = []
    for rows in runs.values():
        steps = [row for row in rows if row.get("loss") is not None]
        evaluations = [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]
        timed = steps[1:] or steps
        mean = lambda name, timed=timed: sum(row[name] for row in timed) / len(timed) if timed else 0.0
        columns.append(
            {
                "steps": f"{steps[-1]['step']:,}" if steps else "0",
                "last loss": f"{steps[-1]['loss']:.4f}" if steps else "",
                "last held-out loss": f"{evaluations[-1]:.4f}" if evaluations else "",
                "mean step": si(mean("step_s"), "s"),
                "tokens/s": f"{mean('tokens_per_s'):,.0f}",
                "input wait": si(mean("input_wait_s"), "s"),
                "steps skipped": str(steps[-1].get("skipped", 0)) if steps else "",
            }
        )
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def of_steps(steps: dict[str, dict]) -> list[Section]:
    """The sections of steps beside each other, {name: object that --json printed}, compiled or predicted."""
    rows = [["", *steps], ["kind", *("compiled" if "by_category_s" in s else "predicted" for s in steps.values())]]
    rows += [[name, *(text(s[key]) for s in steps.values())] for name, (key, text) in NUMBERS.items()]
    nbytes = lambda step: step.get("peak_hbm_bytes", step.get("hbm_bytes"))
    rows.append(["HBM of a device", *(si(nbytes(step), "B") for step in steps.values())])
    seconds = {name: _adding_up(step) for name, step in steps.items()}
    parts = dict.fromkeys(part for row in seconds.values() for part in row)
    colours = {part: (*SERIES, YELLOW)[number % 8] for number, part in enumerate(parts)}
    table = [["part", *steps]]
    table += [[part, *(si(row.get(part, 0.0), "s") for row in seconds.values())] for part in parts]
    return [
        Section("Summary", "", None, rows),
        Section("The step by part", "Seconds that add up to the step.", bars(seconds, "ms", colours, 1e3), table),
    ]


def _adding_up(step: dict) -> dict[str, float]:
    """{part: seconds} of a step, the longest first; they add up to it."""
    parts = step.get("by_category_s") or {name: part["exposed_s"] for name, part in step["parts"].items()}
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


# -- command line


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__)
    about = (
        "a --metrics_file, or what aot.py or roofline.py step printed with --json; several are put beside each other"
    )
    parser.add_argument("files", type=command.path, nargs="+", metavar="FILE", help=about)
    parser.add_argument("--report", type=command.path, default="report", metavar="DIR", help="folder [%(default)s]")
    args = command.arguments(parser, argv)
    check("--report", args.report, {f"FILE {number}": file for number, file in enumerate(args.files, 1)})
    contents = {file: read(file) for file in args.files}
    if len({*map(type, contents.values())}) > 1:
        raise ValueError("runs and steps do not go into one page: name either metrics files, or outputs of --json")
    steps = isinstance(contents[args.files[0]], dict)
    if steps and not all("parts" in each or "by_category_s" in each for each in contents.values()):
        raise ValueError("a step that does not fit has no parts to draw")
    sections = (of_steps if steps else of_runs)(by_short_name(contents))
    title = f"{'Steps' if steps else 'Training'}: {', '.join(args.files)}"
    embedded = {file: content if steps else shortened(content) for file, content in contents.items()}
    print(f"written    {write(args.report, title, sections, {'files': embedded})}")


if __name__ == "__main__":
    command.run(main)
