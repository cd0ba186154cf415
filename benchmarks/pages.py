"""Opens pages of report.py in headless Chromium: what they show, what they load, how fast they are, and a screenshot.

    python benchmarks/pages.py pages/8b pages/run                          check pages that exist
    python benchmarks/pages.py pages/8b --screenshot=docs/figures/step_page.png --height=1330 --ms=425,482
    python benchmarks/pages.py                                             check a page that it draws itself
    python benchmarks/pages.py --trace=step.json       read a trace of aot.py with the parser of Chrome's trace viewer

**Idea.** The tests read a page as text; only a browser shows whether it works. ChromeDriver controls one by JSON over
HTTP, so no library is needed: Debian's packages chromium and chromium-driver. For each page it asks

    errors    messages of the console, which must be none
    loads     resources that the page asked for, which must be none; the page's own policy forbids them, too
    figures   drawn by the library, as many as the page has; those without data are errors
    paint     seconds until the first content is painted, at most 2
    bytes     of the file, at most 5 MB

A trace is read with the parser of catapult, which xprof's package contains (extra `[profile]`). It prints the spans and
the seconds of each track. Warnings of the parser are faults, and so is another sum on the TensorCore than the step's
seconds. The exit status is 1 if a page or the trace fails.
"""

import base64
import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import command
import outputs
import report

MOST_BYTES, MOST_PAINT_S = 5e6, 2.0
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()
FLAGS += ["--disable-component-update", "--disable-sync", "--hide-scrollbars"]
ASK = """
const painted = performance.getEntriesByName("first-contentful-paint")[0];
const figures = typeof Bokeh === "undefined" ? [] : Bokeh.documents.flatMap((each) => each.roots());
return {
  paint_s: painted ? painted.startTime / 1000 : null,
  loads: performance.getEntriesByType("resource").map((each) => each.name).filter((name) => !/^data:/.test(name)),
  figures: figures.length,
  empty: figures.filter((each) => each.renderers.length == 0).length,
  canvases: document.querySelectorAll("[data-root-id]").length,
  titles: [...document.querySelectorAll("h2")].map((each) => each.textContent),
};
"""


ZOOM = """
const [begin, end] = arguments;
Bokeh.documents[0].roots()[0].x_range.setv({start: begin, end: end});
"""


READ = """
const model = new tr.Model();
new tr.importer.Import(model, new tr.importer.ImportOptions()).importTraces([arguments[0]]);
const tracks = {};
for (const process of Object.values(model.processes)) {
  for (const thread of Object.values(process.threads)) {
    const slices = thread.sliceGroup.slices;
    const ms = slices.reduce((sum, slice) => sum + slice.duration * (slice.args.times || 0), 0);
    tracks[process.name + ": " + thread.name] = [slices.length, ms / 1000];
  }
}
return {tracks, warnings: model.importWarnings.map((each) => each.message)};
"""


class Browser:
    """A session of ChromeDriver."""

    def __init__(self, port: int, width: int, height: int, folder: str):
        self.address = f"http://127.0.0.1:{port}/session"
        options = {"args": [*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.address += "/" + self.ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def ask(self, path: str, body: dict | None = None):
        """The value of the answer to a command; a POST if it has a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]


@contextlib.contextmanager
def browser(width: int, height: int) -> Iterator[Browser]:
    """Yields a session of headless Chromium. Raises ValueError if it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            line = ["chromedriver", "--port=0"]
            driver = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            raise ValueError("there is no chromedriver: install Debian's chromium and chromium-driver") from None
        session = None
        try:
            started = next(line for line in driver.stdout if "started successfully on port" in line)
            session = Browser(int(started.rstrip(". \n").rpartition(" ")[2]), width, height, folder)
            yield session
        finally:
            if session:
                request = urllib.request.Request(session.address, method="DELETE")
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(request, timeout=30).close()
            driver.terminate()
            driver.wait()


def look(session: Browser, page: Path) -> dict:
    """The figures, loads and errors of a page, in seconds and bytes, once its figures are drawn."""
    session.ask("/url", {"url": page.resolve().as_uri()})
    begun = time.perf_counter()
    shown = {"paint_s": None}
    while shown["paint_s"] is None or shown["figures"] != shown["canvases"]:
        time.sleep(0.2)
        shown = session.ask("/execute/sync", {"script": ASK, "args": []})
        if time.perf_counter() - begun > 60:
            break
    messages = session.ask("/se/log", {"type": "browser"})
    shown["errors"] = [each["message"] for each in messages if each["level"] in ("SEVERE", "WARNING")]
    return shown | {"bytes": page.stat().st_size}


def faults(shown: dict) -> list[str]:
    """The faults of a page by what it shows."""
    return [
        *(f"console: {message}" for message in shown["errors"]),
        *(f"loads {name}" for name in shown["loads"]),
        *([f"{shown['figures']} of {shown['canvases']} figures"] if shown["figures"] != shown["canvases"] else []),
        *([f"{shown['empty']} figures are empty"] if shown["empty"] else []),
        *(["nothing is painted"] if shown["paint_s"] is None else []),
        *([f"painted after {shown['paint_s']:.2f} s"] if (shown["paint_s"] or 0) > MOST_PAINT_S else []),
        *([f"{shown['bytes']:,} bytes"] if shown["bytes"] > MOST_BYTES else []),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__file__)
    parser.add_argument("folders", type=command.path, nargs="*", metavar="DIR", help="folders of pages")
    parser.add_argument("--screenshot", type=command.path, metavar="FILE", help="a PNG of the first page")
    about = "read this trace of aot.py --trace, in place of pages"
    parser.add_argument("--trace", type=command.path, metavar="FILE", help=about)
    about = "milliseconds of the timeline that the screenshot shows"
    parser.add_argument("--ms", type=command.whole_numbers, default=[], metavar="BEGIN,END", help=about)
    parser.add_argument("--width", type=command.at_least(100), default=1280, help="of the window [%(default)s]")
    parser.add_argument("--height", type=command.at_least(100), default=1800, help="of the window [%(default)s]")
    args = command.arguments(parser, argv)
    if args.ms and len(args.ms) != 2:
        raise ValueError(f"--ms={','.join(map(str, args.ms))} must be two numbers, as in --ms=400,450")
    if args.screenshot:
        outputs.check_writable(f"--screenshot={args.screenshot}", args.screenshot)
    for folder in args.folders:
        if not Path(folder, report.PAGE).is_file():
            raise ValueError(
                f"{folder!r} has no {report.PAGE}: aot.py, roofline.py step or report.py --report writes one"
            )
    if args.trace:
        several = read_trace(args.trace, args.width, args.height)
        print("; ".join(several) or "no fault")
        return int(bool(several))
    wrong = 0
    with tempfile.TemporaryDirectory() as own, browser(args.width, args.height) as session:
        folders = args.folders or [_own_page(own)]
        for folder in folders:
            shown = look(session, Path(folder, report.PAGE))
            several = faults(shown)
            wrong += bool(several)
            print(
                f"{folder}: {shown['figures']} figures, painted in {shown['paint_s'] or 0:.2f} s, "
                f"{shown['bytes']:,} bytes: {'; '.join(several) or 'no fault'}"
            )
            if args.screenshot and folder == folders[0]:
                if args.ms:
                    session.ask("/execute/sync", {"script": ZOOM, "args": args.ms})
                    time.sleep(1)
                with outputs.replacing(args.screenshot, "wb") as file:
                    file.write(base64.b64decode(session.ask("/screenshot")))
    return int(bool(wrong))


def read_trace(path: str, width: int, height: int) -> list[str]:
    """Prints the tracks of a trace as catapult's parser reads them, and returns the faults.

    Raises ValueError if xprof is not installed or the file is no trace of `aot.py --trace`.
    """
    if not (package := importlib.util.find_spec("xprof")):
        raise ValueError('--trace needs the parser in xprof: pip install -e ".[profile]"')
    text = command.read_text(path)
    try:
        step_s = json.loads(text)["otherData"]["step_s"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--trace={path} is no trace of aot.py --trace") from None
    viewer = Path(package.submodule_search_locations[0], "static", "trace_viewer_index.html")
    with browser(width, height) as session:
        session.ask("/url", {"url": viewer.as_uri()})
        model = session.ask("/execute/sync", {"script": READ, "args": [text]})
    for track, (number, seconds) in model["tracks"].items():
        print(f"{track:40}{number:8,} spans{seconds:14.6f} s")
    _, seconds = model["tracks"].get("TensorCore: operations", (0, 0.0))
    off = abs(seconds - step_s) > 1e-4 * step_s
    print(f"{path}: {seconds:.6f} s on the TensorCore, and {step_s:.6f} s in the report")
    return [*model["warnings"], *([f"{seconds:.6f} s are not {step_s:.6f} s"] if off else [])]


def _own_page(folder: str) -> str:
    """The page of a predicted step."""
    import roofline

    with contextlib.redirect_stdout(None):
        roofline.main(["step", "--preset=tiny-moe", "--topology=tpu7x:2x2x1", "--mesh=fsdp:8", f"--report={folder}"])
    return folder


if __name__ == "__main__":
    sys.exit(command.run(main))
