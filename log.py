"""The log of a run: lines every few steps, a progress line on a terminal, metrics as JSON lines and for TensorBoard.

    python train.py --metrics_file=metrics.jsonl --tensorboard_dir=charts
    python log.py plot metrics.jsonl --out=run.png             the run as a picture, also while it goes on
    python log.py plot a.jsonl b.jsonl --out=both.png          runs in the same panels

A picture has the losses, the norm of the gradients, the time of a step, and tokens a second. It needs the [plot] extra.
report.py makes a page of a run that zooms, from the same file.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import jax
import numpy as np

import command
import data_mixtures
import outputs
from config import Config
from hardware import PEAK_BF16_FLOPS_PER_DEVICE
from predicted import transformer

PROGRAM = "train_step.hlo"  # in the folder of a profile
FAILED, MOST_WHY = "failed", 500  # the event of a run that an error ends; characters of the error in it
MOST_LOADS = 2048  # of experts, in a row of the metrics file
# Others depend on the model.
COMMON_METRICS = "step loss grad_norm learning_rate skipped skipped_in_a_row spikes".split()


class Scalars:
    """Metrics for TensorBoard, in two of its runs: DIR/train and DIR/held_out, so that one chart has both losses.

    TensorBoard shows a step once. A resumed run hides what was written of the steps after its first one, and a new run
    hides all of an earlier one's. Its files stay.
    """

    def __init__(self, folder: str, first_step: int, evaluates: bool, say: Callable[[str], None]):
        """
        Args:
          first_step, evaluates: as those of `open_metrics`.
          say: prints an error.

        Raises OSError where the folder cannot be written.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder, self.say, self.writers = folder, say, {}
        self.event, self.summary = event_pb2.Event, summary_pb2.Summary
        started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        for part, hidden_from in (("train", first_step + 1), ("held_out", first_step + (not evaluates))):
            self.writers[part] = EventFileWriter(os.path.join(folder, part), flush_secs=30)
            self.writers[part].add_event(self._dated(hidden_from, session_log=started))

    def write(self, part: str, step: int, metrics: dict) -> None:
        """Writes the numbers among the metrics; {name: {source: number}} becomes name/source. Lists are left out."""
        numbers = {}
        for name, value in metrics.items():
            several = value.items() if isinstance(value, dict) else [("", value)]
            numbers |= {f"{name}/{each}" if each else name: x for each, x in several if isinstance(x, int | float)}
        values = [self.summary.Value(tag=name, simple_value=x) for name, x in numbers.items() if name != "step"]
        if part in self.writers:
            self._guarded(self.writers[part].add_event, self._dated(step, summary=self.summary(value=values)))

    def flush(self) -> None:
        """Waits until all is in the files, so that no kill loses it."""
        for writer in [*self.writers.values()]:
            self._guarded(writer.flush)

    def close(self) -> None:
        writers, self.writers = self.writers, {}
        for writer in writers.values():
            with contextlib.suppress(OSError):
                writer.close()

    def _dated(self, step: int, **content):
        return self.event(wall_time=time.time(), step=step, **content)

    def _guarded(self, act: Callable, *args) -> None:
        """Acts, and after an error of the disk writes no more: that is no reason to end the run."""
        try:
            act(*args)
        except OSError as error:
            self.say(f"scalars    {self.folder}: {error}; no more are written")
            self.close()


class Log:
    """Prints and writes the metrics of each step while the next one runs, so that the devices never wait for the host.

    In a run of several processes only the first one prints and writes.
    """

    def __init__(
        self,
        config: Config,
        first_step: int,
        mesh: jax.sharding.Mesh,
        epochs: Callable[[int], dict[str, float]] = lambda step: {},
        batches: data_mixtures.Batches = (),
    ):
        """
        Args:
          epochs: steps done -> {name of a corpus: how often it was trained on}.
          batches: sequences in a batch, of each stage of the run; empty: always `config.batch`.
        """
        self.batches = batches or ((0, config.batch),)
        self.flops_per_token = transformer.train_flops_per_token(config)
        self.peak_flops = PEAK_BF16_FLOPS_PER_DEVICE.get(mesh.devices.flat[0].device_kind)  # None: no MFU
        self.epochs = epochs
        self.config, self.num_devices, self.prints = config, mesh.size, jax.process_index() == 0
        self.terminal = self.prints and sys.stdout.isatty()
        self.file, self.scalars, self.first_step, self.last_step = None, None, first_step, first_step
        evaluates = bool(config.eval_batches) and first_step == config.steps  # again, if all steps are done
        if self.prints and config.metrics_file:
            self.file, moved = open_metrics(config.metrics_file, first_step, evaluates)
            if moved:
                self.say(f"metrics    of the run before are in {moved}")
            if first_step:
                self.event(first_step, "resumed")
        if self.prints and config.tensorboard_dir:
            self.scalars = Scalars(config.tensorboard_dir, first_step, evaluates, self.say)
        self.pending = None  # (metrics on the devices, seconds waited for input) of the running step
        self.waited_s = 0.0
        self.timed_from = None  # (step, time) of the end of the first step, which takes longer
        self.line_is_open = False  # the last line on the terminal is one of progress
        self.steps_s: list[float] = []
        self.sequences: list[int] = []  # in the batches of these steps

    def say(self, text: str) -> None:
        """Prints a line."""
        if self.prints:
            command.say(f"\r\033[K{text}" if self.terminal else text)
            self.line_is_open = False

    def start_clock(self) -> None:
        """Starts the time of the next step."""
        self.clock = time.perf_counter()

    def time_waits(self, batches: Iterable) -> Iterator:
        """Yields the batches, and records the wait for each with its step."""
        batches = iter(batches)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            self.waited_s = time.perf_counter() - begun
            if batch is None:
                return
            yield batch

    def step(self, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step that was started, and shows the step before."""
        waited_s = self.waited_s
        self.finish_step()
        self.pending = metrics, waited_s

    def finish_step(self) -> None:
        """Waits for the running step, if any, and shows it.

        Raises FloatingPointError after `max_skipped` steps in a row that were skipped.
        """
        if self.pending is None:
            return
        (metrics, waited_s), self.pending = self.pending, None
        loads_LE = metrics.get("expert_loads")
        metrics = jax.device_get({name: value for name, value in metrics.items() if name != "expert_loads"})
        metrics = {name: value.tolist() for name, value in metrics.items()}
        shown = [name for name in metrics if name not in COMMON_METRICS and not isinstance(metrics[name], list)]
        extra = [f"{name.replace('_', ' ')} {metrics[name]:.3g}" for name in shown]
        step_s = time.perf_counter() - self.clock
        self.start_clock()
        self.timed_from = self.timed_from or (metrics["step"], self.clock)
        self.last_step = metrics["step"]
        self.steps_s.append(step_s)
        self.sequences.append(data_mixtures.batch_of(metrics["step"] - 1, self.batches))
        metrics |= self._rates(step_s, self.sequences[-1]) | {"input_wait_s": waited_s}
        if epochs := self.epochs(metrics["step"]):
            metrics["epochs"] = epochs
            if len(epochs) > 1 or max(epochs.values()) > 1:
                extra.append(f"epochs {', '.join(f'{number:.3g}' for number in epochs.values())}")
        if loads_LE is not None and self.file and metrics["step"] % self.config.log_every == 0:
            metrics["expert_loads"] = relative_loads(jax.device_get(loads_LE))
        self._write(metrics)
        if self.scalars:
            self.scalars.write("train", metrics["step"], metrics)
        self._show(metrics, extra)
        step, limit = metrics["step"], self.config.max_skipped
        if metrics["skipped_in_a_row"] >= limit:
            spikes = f", or beyond skip_spikes={self.config.skip_spikes:g} standard deviations"
            raise FloatingPointError(
                f"the gradients of steps {step - limit + 1} to {step} were not finite"
                f"{spikes if self.config.skip_spikes else ''} (max_skipped={limit}) and "
                f"left the weights as they were after step {step - limit}; "
                "try a lower --learning_rate, or look at the data of these steps"
            )

    def _rates(self, step_s: float, sequences: float) -> dict[str, float | None]:
        tokens_per_s = sequences * self.config.seq_len / step_s
        flops = tokens_per_s * self.flops_per_token / self.num_devices
        mfu = flops / self.peak_flops if self.peak_flops else None
        return {"step_s": step_s, "tokens_per_s": tokens_per_s, "tflops_per_s_per_device": flops / 1e12, "mfu": mfu}

    def _show(self, metrics: dict, extra: list[str]) -> None:
        total = self.config.steps
        line = (
            f"step {metrics['step']:>{len(str(total))}}/{total}  loss {metrics['loss']:.4f}"
            f"  grad norm {metrics['grad_norm']:.3f}  lr {metrics['learning_rate']:.2e}  {metrics['step_s']:.3f} s"
            f"  {metrics['tokens_per_s']:,.0f} tokens/s  {metrics['tflops_per_s_per_device']:.3g} TFLOP/s/device"
        )
        line += f"  MFU {metrics['mfu']:.1%}" if metrics["mfu"] is not None else ""
        line += "".join(f"  {text}" for text in extra)
        line += f"  input wait {metrics['input_wait_s'] * 1e3:.1f} ms"
        spikes = f" ({metrics['spikes']} as spikes)" if metrics.get("spikes") else ""
        line += f"  skipped {metrics['skipped']}{spikes}" if metrics["skipped"] else ""
        is_end = metrics["step"] in (self.first_step + 1, total)
        if is_end or metrics["step"] % self.config.log_every == 0 or metrics["skipped_in_a_row"]:
            self.say(line)
        elif self.terminal:
            width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be overwritten
            line = f"{command.duration(self.left_s(metrics['step']))} left  {line}"
            command.say(f"\r\033[K{line[:width]}", end="")
            self.line_is_open = True

    def left_s(self, step: int) -> float:
        """Seconds to the last step, at the pace of all sequences since the first step, with evaluations and saves."""
        sequences = partial(data_mixtures.first_sequence, batches=self.batches)
        left = sequences(self.config.steps) - sequences(step)
        first, ended = self.timed_from
        done, seconds = sequences(step) - sequences(first), self.clock - ended
        return left * (seconds / done if done else self.steps_s[-1] / self.sequences[-1])

    def evaluation(self, step: int, eval_loss: float, by_source: dict[str, float] | None = None) -> None:
        """Shows the held-out loss, and that of each corpus where there are several."""
        by_source = by_source or {}
        several = len(by_source) > 1
        self._write({"step": step, "eval_loss": eval_loss} | ({"eval_loss_by_source": by_source} if several else {}))
        if self.scalars:
            self.scalars.write("held_out", step, {"loss": eval_loss, "loss_by_source": by_source if several else {}})
            self.scalars.flush()
        parts = f" ({', '.join(f'{name} {loss:.4f}' for name, loss in by_source.items())})" if several else ""
        self.say(
            f"step {step:>{len(str(self.config.steps))}}/{self.config.steps}  held-out loss {eval_loss:.4f}{parts}"
        )

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Shows what the model wrote after a prompt, and writes it for report.py."""
        bold, end, mark = ("\033[1m", "\033[0m", "") if self.terminal else (">>>", "", ", after >>>")
        self.say(f"sample     of the model after a held-out prompt{mark}:\n{prompt}{bold}{text}{end}")
        self.event(step, "sample", prompt=prompt, text=text)

    def event(self, step: int, name: str, **details: str) -> None:
        """Writes what happened after a step, such as "saved", for report.py."""
        self._write({"step": step, "event": name} | details)
        if self.scalars:
            self.scalars.flush()  # a run that resumes from here has all steps before

    @property
    def mean_step_s(self) -> float:
        """Mean over all steps but the first, which takes longer."""
        steps_s = self.steps_s[1:] or self.steps_s
        return sum(steps_s) / max(len(steps_s), 1)

    def summary(self) -> dict[str, float | None]:
        """Prints and returns the mean rates of the run."""
        sequences = self.sequences[1:] or self.sequences
        rates = self._rates(self.mean_step_s, sum(sequences) / max(len(sequences), 1))
        mfu = f", MFU {rates['mfu']:.1%}" if rates["mfu"] is not None else ""
        self.say(
            f"measured   {rates['step_s']:.3f} s a step (mean but the first), {rates['tokens_per_s']:,.0f} tokens/s, "
            f"{rates['tflops_per_s_per_device']:.3g} TFLOP/s a device{mfu}"
        )
        file = self.config.metrics_file
        none = "" if file else "none: with --metrics_file=run.jsonl, "
        self.say(f"page       {none}python report.py {shlex.quote(file or 'run.jsonl')} draws the run")
        if self.config.tensorboard_dir:
            self.say(f"charts     tensorboard --logdir={shlex.quote(self.config.tensorboard_dir)}")
        return rates

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        """Writes why the run ends, if an error ends it, and closes the files."""
        if isinstance(error, Exception):
            why = f"{kind.__name__}: {error}"[:MOST_WHY].encode(errors="replace").decode()  # names need not be UTF-8
            self.event(self.last_step, FAILED, why=why)
        self.close()

    def close(self) -> None:
        if self.line_is_open:  # so that a message after it begins a line
            command.say("\r\033[K", end="")
        if self.file:
            self.file.close()
        if self.scalars:
            self.scalars.close()

    def _write(self, metrics: dict) -> None:
        if self.file:
            finite = {name: _finite(value) for name, value in metrics.items()}
            try:
                self.file.write(json.dumps(finite) + "\n")  # JSON has no NaN
                self.file.flush()
            except OSError as error:  # a full disk is no reason to end the run
                self.say(f"metrics    {self.config.metrics_file}: {error}; no more are written")
                with contextlib.suppress(OSError):
                    self.file.close()
                self.file = None


def relative_loads(loads_LE: np.ndarray) -> dict[str, list[int]]:
    """{layer with experts: the load of each expert, in percent of their mean}, of layers at equal distances.

    They are as many layers as have `MOST_LOADS` experts together, so that a row of the metrics file stays short.
    """
    L, E = loads_LE.shape
    layers = np.linspace(0, L - 1, min(L, max(1, MOST_LOADS // E))).round().astype(int)
    percent_LE = np.rint(100 * loads_LE / loads_LE.mean(1, keepdims=True)).astype(int)
    return {str(layer): percent_LE[layer].tolist() for layer in layers}


def _finite(value):
    """A metric with None in place of what JSON has no number for, and lists rounded to four digits."""
    if isinstance(value, list):
        return [_finite(float(f"{each:.4g}")) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Profile:
    """A trace of the steps `profile_steps`, and the program that ran, for compiled/timeline.py and xprof."""

    def __init__(self, config: Config, log: Log, programs: dict[int, jax.stages.Compiled]):
        """
        Args:
          programs: {sequences in a batch: the compiled step}.
        """
        self.folder, (self.first, self.last) = config.profile_dir, config.profile_range
        self.programs = programs
        self.log, self.running = log, False
        if self.folder and log.first_step >= self.last:
            log.say(f"profile    none: the run goes on after step {log.first_step}, past {config.profile_steps}")

    def before(self, step: int, state: object) -> None:
        if self.folder and self.first <= step <= self.last and not self.running:
            self.log.finish_step()
            jax.block_until_ready(state)  # the trace has only complete steps
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, step: int, at_end: bool, state: object) -> None:
        if self.running and (at_end or step == self.last):
            self.log.finish_step()
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self.running = False
            if not jax.process_index():
                with outputs.replacing(Path(self.folder, PROGRAM)) as file:
                    file.write(self.programs[data_mixtures.batch_of(step - 1, self.log.batches)].as_text())
            read = f"python aot.py timeline {self.folder}, xprof {self.folder}"
            self.log.say(f"profile    up to step {step} written: {read}")


def check_outputs(config: Config) -> None:
    """Makes the folders that the run writes to. Raises ValueError, with the flag, before the work begins."""
    written = {
        "metrics_file": config.metrics_file,
        "fp8_scales": config.fp8_scales if config.fp8 == "calibrate" else "",
    }
    sources = data_mixtures.paths(config.corpus)
    names = [f"corpus {path}" if sources[1:] else "corpus" for path in sources]
    read = dict(zip(names, sources, strict=True)) | {"weights": config.weights}
    read |= {"fp8_scales": config.fp8_scales if config.fp8 == "static" else ""}
    outputs.check_apart(*({f"--{flag}": path for flag, path in paths.items()} for paths in (written, read)))
    for flag, path in written.items():
        if path:
            outputs.check_writable(f"--{flag}={path}", path)
    if config.tensorboard_dir and importlib.util.find_spec("tensorboard") is None:
        raise ValueError('--tensorboard_dir needs tensorboard: pip install -e ".[tensorboard]"')
    for flag, folder, name in (
        ("tensorboard_dir", config.tensorboard_dir, "train/events"),
        ("profile_dir", config.profile_dir, PROGRAM),
    ):
        if folder:
            outputs.check_writable(f"--{flag}={folder}", Path(folder, name))


def open_metrics(path: str, first_step: int, evaluates: bool = False) -> tuple[IO, str]:
    """Opens the metrics file to append.

    A resumed run keeps the lines of failures, and those up to its first step, but not that step's evaluation if it
    `evaluates` at once. For a new run an old file is moved to the first free name of PATH.1, PATH.2 and so on.

    Returns:
      The file, and the new path of an old one; "" where none was moved.

    Raises ValueError where a resumed run finds a line that is not a step's.
    """
    file, moved = Path(path), ""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and first_step == 0:
        moved = next(
            name for name in (f"{path}.{number}" for number in itertools.count(1)) if not os.path.lexists(name)
        )
        os.rename(file, moved)
    elif file.exists():
        try:
            rows = outputs.json_lines(file.read_text(encoding="utf-8"))
            again = lambda row: evaluates and "eval_loss" in row and row["step"] == first_step
            stays = lambda row: row["step"] <= first_step or row.get("event") == FAILED
            retained = [line for line, row in rows if stays(row) and not again(row)]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"--metrics_file={path} has lines that no run wrote: move it away, or mend it") from None
        with outputs.replacing(file) as unfinished:
            unfinished.writelines(line + "\n" for line in retained)
    return file.open("a", encoding="utf-8"), moved


# -- pictures

PANELS = (  # title, metrics with their line styles, scale; the first step of a program takes longer, and is left out
    ("loss, nats a token", {"loss": "-", "eval_loss": "--"}, "linear", False),
    ("norm of the gradients", {"grad_norm": "-"}, "log", False),
    ("time of a step, s", {"step_s": "-"}, "linear", True),
    ("tokens/s", {"tokens_per_s": "-"}, "linear", True),
)


def draw(runs: dict[str, list[dict]]):
    """A figure of matplotlib: four panels over the steps, a colour for each run, of a palette for all kinds of eyes.

    Args:
      runs: {name: rows of its metrics file}.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    import report  # here, as a training has no use for it

    figure = Figure(figsize=(11, 7), layout="constrained")
    colours = dict(zip(runs, itertools.cycle(report.SERIES), strict=False))
    for panel, (title, styles, scale, rates) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for run, rows in runs.items():
            for name, style in styles.items():
                points = _points(rows, name, without_first=rates)
                marker = {"marker": "."} if len(points) < 60 else {}
                if points:
                    panel.plot(*zip(*points, strict=True), style, color=colours[run], linewidth=1.2, **marker)
        panel.set(title=title, xlabel="step", yscale=scale)
        panel.yaxis.set_major_formatter("{x:,g}")
        if rates:
            panel.set_ylim(bottom=0)
        if scale == "log":
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_minor_formatter("")
        panel.grid(alpha=0.3)
    lines = [Line2D([], [], color=colour, label=run) for run, colour in colours.items()]
    lines += [Line2D([], [], color="k", linestyle="--", label="held-out loss")]
    figure.legend(handles=lines, loc="outside upper center", ncols=4)
    return figure


def _points(rows: list[dict], name: str, *, without_first: bool) -> list[tuple[int, float]]:
    """(step, value) of a metric; `without_first` omits the first step, and that after each resume."""
    points, is_first = [], True
    for row in rows:
        is_first |= row.get("event") == "resumed"
        if row.get(name) is not None and not (is_first and without_first):
            points.append((row["step"], row[name]))
        is_first &= "step_s" not in row
    return points


def plot(files: Sequence[str], out: str) -> None:
    """Draws metrics files into a PNG. Raises ValueError for other files, and OSError for what cannot be written."""
    import report

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('log.py plot needs matplotlib: pip install -e ".[plot]"')
    if not out.lower().endswith(".png"):
        raise ValueError(f"--out={out} must end in .png")
    outputs.check_apart({"--out": out}, {f"FILE {number}": file for number, file in enumerate(files, 1)})
    outputs.check_writable(f"--out={out}", out)
    contents = {file: report.read(file) for file in files}
    for file, rows in contents.items():
        if isinstance(rows, dict):
            raise ValueError(f"{file!r} is a step, not a run: python report.py draws it")
    with outputs.replacing(out, "wb") as file:
        draw(report.by_short_name(contents)).savefig(file, format="png", dpi=120)
    print(f"written    {out}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser(__file__)
    about = "draw runs as a picture"
    of_plot = parser.add_subparsers(dest="command", required=True).add_parser("plot", help=about, description=about)
    of_plot.add_argument("files", type=command.path, nargs="+", metavar="FILE", help="a --metrics_file of train.py")
    of_plot.add_argument("--out", type=command.path, default="run.png", metavar="FILE.png", help="[%(default)s]")
    of_plot.set_defaults(parser=of_plot)
    args = command.arguments(parser, argv)
    plot(args.files, args.out)


if __name__ == "__main__":
    command.run(main)
