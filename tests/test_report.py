"""Tests of report.py and predicted/page.py: a page loads nothing, embeds its numbers, and shows them."""

import json
import re
from html.parser import HTMLParser

import pytest

import command
import report
import roofline
from compiled.trace import Span

VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """The elements of a page; `open` is empty at its end if each is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.attributes, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *each) for each in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def data(self) -> dict:
        return json.loads(max((text for tag, text in self.texts if tag == "script"), key=lambda t: t[:1] == "{"))

    @property
    def cells(self) -> list[str]:
        return [text for tag, text in self.texts if tag in ("td", "th")]


def read(folder) -> Page:
    """The page in a folder, after the checks that each page must pass."""
    text = (folder / report.PAGE).read_text()
    page = Page(text)
    assert page.open == [] and len(text) < 5e6
    loaded = [each for each in page.attributes if each[1] in ("src", "href", "srcset", "action")]
    assert loaded == []
    assert ("meta", "content", report.POLICY) in page.attributes and report.POLICY.startswith("default-src 'none'")
    assert not re.search(r"@import|url\(\s*['\"]?http", report.STYLE)
    return page


def span(process: str, kind: str, begin: float, end: float, category: str = "matmul", **args) -> Span:
    args = dict(source="a/fsdp.py:7", times=2, concept="FSDP", seconds=end - begin) | args
    name = f"wait for {category}" if kind == "wait" else category
    return Span(process, "row", name, kind, category, begin, end, args)


SPANS = [
    span("TensorCore", "op", 0.0, 2.0, cycles=7),
    span("TensorCore", "wait", 2.0, 3.0, "gather"),
    span("TensorCore", "skipped", 3.0, 6.0, "skipped", times=0),
    span("links", "transfer", 0.0, 3.0, "all-gather", bytes=1e6),
]


def test_a_predicted_step_has_the_numbers_of_its_json(tmp_path, capsys):
    flags = ["step", "--preset=tiny", "--mesh=fsdp:8", "--topology=tpu7x:2x2x1", "--json"]
    roofline.main([*flags, f"--report={tmp_path / 'page'}"])
    printed = json.loads(capsys.readouterr().out)
    page = read(tmp_path / "page")
    assert page.data["prediction"] == printed
    assert f"{printed['mfu']:.1%}" in page.cells and set(printed["parts"]) <= set(page.cells)
    assert "--mesh=fsdp:8" in page.cells and page.data["plan"]["words"]
    drawn = max((text for _, text in page.texts if "const docs_json" in text), key=len)
    assert all(name in drawn for name in printed["parts"])


def test_an_embedded_text_cannot_end_the_script(tmp_path):
    data = {"report": "</script><script>alert(1)</script>"}
    report.write(str(tmp_path), "a < b", [report.Section("c & d", "e <f>", None, [["g"], ["<h>"]])], data)
    page = read(tmp_path)
    assert page.data == data and page.open == []
    assert ("h1", "a < b") in page.texts and "<h>" in page.cells


def test_waits_are_listed_with_all_their_executions():
    rows = report.waits([*SPANS, span("TensorCore", "wait", 7.0, 8.5, "gather")], 10.0)
    assert rows[1:] == [["gather", "5 s", "50.0%", "FSDP", "fsdp.py:7"]]


def test_a_timeline_has_a_row_for_each_track_and_a_colour_for_each_kind():
    drawn = report.timeline(SPANS)
    assert list(drawn.y_range.factors) == ["links: row", "TensorCore: row"]
    entries = {item.label.value: item.renderers[0] for item in drawn.legend[0].items}
    assert list(entries) == ["matmul", "wait", "collective", "skipped iterations"]
    assert entries["wait"].glyph.fill_color == report.VERMILION
    wait = entries["wait"].data_source.data
    assert (wait["left"], wait["right"], wait["times"]) == ([2000.0], [3000.0], ["2"])
    colours = list(report.KINDS.values())
    assert len({*colours}) == len(colours)


def test_a_long_timeline_is_joined_and_covers_the_same_time():
    ops = [span("TensorCore", "op", i / 1000, (i + 0.5) / 1000, "matmul" if i % 3 else "copy") for i in range(1000)]
    waits = [span("TensorCore", "wait", 1 + i, 2 + i, "gather") for i in range(9)]
    shorter = report.joined([*ops, *waits], 100)
    assert 9 < len(shorter) <= 100 and [each for each in shorter if each.kind == "wait"] == waits
    assert sum(each.args.get("joined", 1) for each in shorter) == 1009
    assert (shorter[0].begin, shorter[-10].end) == (ops[0].begin, ops[-1].end)
    assert report.joined(SPANS) == SPANS


def test_bytes_over_the_step_are_drawn_when_their_instruction_runs():
    """Two iterations of 1 s are skipped, which have the most bytes of the one before."""
    work = [span("TensorCore", "op", at / 2, at / 2 + 0.5, name) for at, name in enumerate("abcd")]
    loop = Span("TensorCore", "operations", "x 2 more", "skipped", "skipped", 2.0, 4.0, dict(trips=2, times=0))
    spans = [*work, loop, span("TensorCore", "op", 4.0, 5.0, "a")]
    over_step = [(name, number * report.GiB) for name, number in dict(a=1, b=1, unseen=9, c=3, d=2).items()]
    (line, *_) = report.memory(over_step, spans, 4 * report.GiB).renderers
    points = line.data_source.data
    assert list(zip(points["x"], points["y"], points["name"], strict=True)) == [
        (0.0, 1.0, "a"),
        (1000.0, 3.0, "c"),
        (1500.0, 2.0, "d"),
        (2000.0, 3.0, "x 2 more"),
        (4000.0, 1.0, "a"),
        (5000.0, 1.0, "end"),
    ]


def test_folders_that_cannot_be_written_are_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder, words in ((tmp_path / "file", "cannot be written"), ("/dev/null/x", "cannot be written")):
        with pytest.raises(SystemExit):
            command.run(roofline.main, ["step", "--preset=tiny", "--mesh=fsdp:8", f"--report={folder}"])
        assert words in capsys.readouterr().err
    (tmp_path / report.PAGE).write_text("")
    with pytest.raises(ValueError, match="it would be lost"):
        report.check("--report", str(tmp_path), {"FILE": str(tmp_path / report.PAGE)})


# -- runs, and steps beside each other


def rows(seed: int) -> list[dict]:
    """Rows of a metrics file: four steps, the third of which was skipped, and an evaluation."""
    losses = [5.0, 4.0, None, 3.0 + seed]
    named = [dict(step=n, loss=loss, grad_norm=loss, learning_rate=1e-3) for n, loss in enumerate(losses, 1)]
    rates = dict(step_s=0.5, tokens_per_s=4e3, input_wait_s=1e-3, load_imbalance=1.5)
    return [row | rates | dict(skipped=int(row["step"] > 2)) for row in named] + [dict(step=4, eval_loss=3.5)]


def test_the_imbalance_of_experts_is_an_image_of_layers_and_steps():
    """Five steps in two columns: the means of three and of two steps."""
    steps = [dict(step=n, load_imbalance_by_layer=[n, 10.0 * n, None]) for n in range(1, 6)]
    (painted,) = report.heat_map([*steps, dict(step=5, event="saved")], most=2).renderers
    (image,) = painted.data_source.data["image"]
    assert image[:2].tolist() == [[2.0, 4.5], [20.0, 45.0]] and image.shape == (3, 2)
    assert (painted.glyph.x, painted.glyph.dw) == (0.5, 5)
    assert report.heat_map([dict(step=1, loss=1.0)]) is None


def test_the_loads_of_experts_are_an_image_with_a_band_for_each_layer():
    """Two layers of three experts; the row of an earlier model, with other experts, is left out."""
    loads = [dict(step=10 * n, expert_loads={"0": [100 * n, 0, 0], "4": [0, 0, n]}) for n in (1, 2, 3)]
    drawn = report.load_map([dict(step=1, expert_loads={"0": [100, 100]}), *loads, dict(step=30, event="saved")])
    painted = drawn.renderers[0]
    assert painted.data_source.data["image"][0].tolist() == [
        [100, 200, 300],
        [0] * 3,
        [0] * 3,
        [0] * 3,
        [0] * 3,
        [1, 2, 3],
    ]
    assert (painted.glyph.x, painted.glyph.dw, painted.glyph.dh) == (5, 30, 6)
    assert drawn.yaxis.ticker.ticks == [1.0, 4.0] and drawn.yaxis.major_label_overrides == {1.0: "0", 4.0: "4"}
    assert (painted.glyph.color_mapper.low, painted.glyph.color_mapper.high) == (0, 300)
    assert report.load_map([dict(step=1, loss=1.0)]) is None


def test_a_long_run_is_shortened_to_means_of_its_steps():
    """Five steps in three rows; the loss of step 2 was not finite."""
    steps = [dict(step=n, loss=float(n), step_s=0.5, skipped=int(n > 1), expert_loads={"0": [n]}) for n in range(1, 6)]
    steps[1]["loss"] = None
    others = [dict(step=2, eval_loss=4.5), dict(step=3, event="saved")]
    row = lambda step, loss: dict(step=step, loss=loss, step_s=0.5, skipped=1)
    shorter = report.shortened([*steps[:2], others[0], steps[2], others[1], *steps[3:]], most=3)
    assert shorter == [row(2, 1.0), others[0], others[1], row(4, 3.5), row(5, 5.0)]
    assert report.shortened(steps, most=5)[0] == dict(step=1, loss=1.0, step_s=0.5, skipped=0)


def test_saves_and_resumes_are_marked():
    drawn = report._lines(
        {"a": [*rows(0), dict(step=2, event="saved"), dict(step=3, event="resumed")]}, {"loss": ""}, ""
    )
    marks = {item.label.value: item.renderers[0].data_source.data["x"] for item in drawn.legend[0].items}
    assert (marks["saved"], marks["resumed"]) == ([2], [3])


def test_a_page_has_the_ends_of_a_run_and_its_samples():
    failed = dict(step=2, event="failed", why="OSError: no space is left")
    samples = [dict(step=n, event="sample", prompt="3 cubed", text=f" is\n{n}") for n in range(1, 15)]
    events = [failed, dict(step=1, event="resumed"), *samples, dict(step=15, event="terminated", why="SIGTERM")]
    *_, ends, shown = report.of_runs({"a": [*rows(0), *events], "b": rows(1)})
    assert (ends.title, shown.title) == ("Ends and resumes", "Samples")
    assert ends.table[1:] == [
        ["a", "2", "failed", "OSError: no space is left"],
        ["a", "1", "resumed", ""],
        ["a", "15", "terminated", "SIGTERM"],
    ]
    assert shown.table[1:] == [["a", str(n), "3 cubed", f" is\n{n}"] for n in range(3, 15)]
    titles = [section.title for section in report.of_runs({"b": rows(1)})]
    assert not {"Ends and resumes", "Samples"} & {*titles}
    drawn = report._lines({"a": [*rows(0), *events]}, {"loss": ""}, "")
    marks = {item.label.value: item.renderers[0].data_source.data["x"] for item in drawn.legend[0].items}
    assert (marks["failed"], marks["terminated"]) == ([2], [15])


def written(path, content: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def test_two_runs_are_drawn_in_the_same_figures(tmp_path, capsys):
    loads = dict(expert_loads={"0": [100, 100]})
    files = [written(tmp_path / f"{seed}.jsonl", [row | loads for row in rows(seed)]) for seed in (0, 1)]
    report.main([*files, f"--report={tmp_path / 'page'}"])
    assert f"written    {tmp_path / 'page' / report.PAGE}" in capsys.readouterr().out
    page = read(tmp_path / "page")
    assert page.data == {"files": {file: rows(seed) for seed, file in enumerate(files)}}
    assert {"3.0000", "4.0000", "3.5000", "500 ms", "4,000"} <= set(page.cells)
    titles = [text for tag, text in page.texts if tag == "h2"]
    assert titles[:2] == ["Summary", "Loss"] and {
        "Experts",
        "Load of each expert, 1",
        "Steps skipped",
        "Time of a step",
    } <= set(titles)


def test_a_line_has_the_values_of_its_rows_and_a_colour_of_its_run():
    drawn = report._lines({"a": rows(0), "b": rows(1)}, {"loss": "training", "eval_loss": "held out"}, "nats")
    lines = {item.label.value: item.renderers[0] for item in drawn.legend[0].items}
    assert list(lines) == ["a: training", "a: held out", "b: training", "b: held out"]
    assert lines["b: training"].data_source.data["y"] == (5.0, 4.0, 4.0)  # JSON has no NaN: a gap
    assert lines["a: held out"].data_source.data["x"] == (4,)
    assert [line.glyph.line_color for line in lines.values()] == [report.BLUE] * 2 + [report.ORANGE] * 2
    assert report._lines({"a": rows(0)}, {"dropped_fraction": "dropped"}, "share") is None


def test_steps_compiled_and_predicted_are_put_beside_each_other(tmp_path, capsys):
    common = dict(mfu=0.5, tokens_per_s_per_chip=1e3, exposed_comm_s=0.1)
    compiled = common | dict(step_s=2.0, by_category_s={"matmul": 1.5, "elementwise": 0.5}, peak_hbm_bytes=1e9)
    predicted = common | dict(step_s=1.0, parts={"matmul": {"seconds": 1.0, "exposed_s": 1.0}}, hbm_bytes=2e9)
    files = []
    for name, step in (("a", compiled), ("b", predicted)):
        (tmp_path / name).write_text(json.dumps(step))
        files.append(str(tmp_path / name))
    report.main([*files, f"--report={tmp_path / 'page'}"])
    page = read(tmp_path / "page")
    assert page.data["files"] == dict(zip(files, (compiled, predicted), strict=True))
    assert {"compiled", "predicted", "1.5 s", "2 GB", "elementwise"} <= set(page.cells)
    assert report._adding_up(predicted) == {"matmul": 1.0}


def test_files_that_are_neither_are_refused(tmp_path, capsys):
    (tmp_path / "x").write_text("7")
    (tmp_path / "y").write_text('{"step": 1}}')
    run, step = written(tmp_path / "run", rows(0)), written(tmp_path / "step", [dict(step_s=1.0)])
    for files, words in (
        ([str(tmp_path / "x")], "is neither a --metrics_file nor"),
        ([str(tmp_path / "y")], "is neither a --metrics_file nor"),
        ([run, step], "runs and steps do not go into one page"),
        ([step], "a step that does not fit has no parts to draw"),
        ([str(tmp_path / "none")], "No such file"),
    ):
        with pytest.raises(SystemExit):
            command.run(report.main, [*files, f"--report={tmp_path / 'page'}"])
        assert words in capsys.readouterr().err
