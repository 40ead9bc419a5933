"""What a run shows on the terminal: header, live progress, tables. Without a terminal it degrades to plain lines."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from grpo.config import RunStopped, UsageError

PLAIN_EVERY = 10
"""Steps between progress lines where stdout is no terminal."""


def run_entry(main: Callable[[], None]) -> None:
    """Run a command's `main`: bad input (`UsageError`) becomes one line on stderr and exit code 2, Ctrl-C 130; a run
    that cannot go on (`RunStopped`) one line and 1.

    Where nobody reads the output on (`| head`) it ends quietly with exit code 1.

    Any other exception is a fault of the program and keeps its traceback.
    """
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UsageError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except RunStopped as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


@contextlib.contextmanager
def user_input(what: str = "") -> Iterator[None]:
    """Reading what the user gave: a ValueError or OSError inside is the input's fault and becomes a `UsageError`.

    Only wrap the reading itself, so that a ValueError elsewhere stays a visible fault of the program.
    """
    try:
        yield
    except UsageError:
        raise
    except (ValueError, OSError) as error:
        raise UsageError(f"{what}: {error}" if what else str(error)) from error


def make_console() -> Console:
    """A console on stdout; wide enough for the tables where stdout is a file or a pipe."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=160 if piped else None, highlight=False)


def print_header(rows: Mapping[str, Any], title: str = "GRPO") -> None:
    """A panel of `name  value` lines: what is about to run."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, value in rows.items():
        grid.add_row(escape(str(name)), escape(str(value)))
    make_console().print(Panel(grid, title=escape(title), title_align="left", expand=False))


# ----------------------------------------------------------------------------------------------------------- progress


class StepProgress:
    """Live display of a training run, as a context manager; `update` takes the step's log line (`step_metrics`)."""

    def __init__(self, total: int, done: int = 0):
        self.total, self.done = total, done
        self.console = make_console()
        self._seconds: deque[float] = deque(maxlen=20)
        self._status = Text("waiting for the first step", style="dim")
        self._bar = _progress_bar(self.console)
        self._task = self._bar.add_task("step", total=total, completed=done)
        self._live = Live(self._render(), console=self.console, refresh_per_second=4)

    def __enter__(self) -> StepProgress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a finished step."""
        first, self.done = not self._seconds, row["step"]
        self._seconds.append(row["step_time"])
        if self.console.is_terminal:
            self._bar.update(self._task, completed=self.done)
            self._status = Text(status_line(row))
            self._live.update(self._render())
        elif first or self.done % PLAIN_EVERY == 0 or self.done == self.total:
            left = duration(self.seconds_left)
            line = f"step {self.done}/{self.total}  {status_line(row)}  {left} left"
            print(line, flush=True)  # not through rich: a plain line is never wrapped

    @property
    def seconds_left(self) -> float:
        """Mean of the last steps' times, times the steps that remain."""
        return (self.total - self.done) * sum(self._seconds) / max(1, len(self._seconds))

    def _render(self) -> Group:
        left = f"  {duration(self.seconds_left)} left" if self._seconds else ""
        return Group(self._bar, Text("  ") + self._status + Text(left, style="dim"))


def status_line(row: Mapping[str, Any]) -> str:
    """A log line in words: reward, KL, stop reasons that occurred, speed."""
    parts = [f"reward {_number(row['reward'], '+.3f')} ± {_number(row['reward_std'], '.3f')}"]
    if row.get("kl") is not None:
        parts.append(f"KL {row['kl']:.4f}")
    stops = [(key.removeprefix("stop/"), share) for key, share in row.items() if key.startswith("stop/") and share]
    parts += [" ".join(f"{reason} {share:.0%}" for reason, share in stops)]
    if row.get("skipped_updates"):
        parts.append("UPDATE SKIPPED: not finite")
    parts.append(f"{_number(row['time/tokens_per_second'], '.0f')} tokens/s")
    return "  ".join(parts)


@contextlib.contextmanager
def episode_progress(
    label: str, total: int, before: int = 0, unit: str = "episodes", every: float = 10
) -> Iterator[Callable[[int, int], None]]:
    """Progress of an evaluation: yields the function that `rollout` calls with (episodes that ended, all episodes).

    `before` of them had ended before it began, and say nothing of how long the others take.

    Without a terminal: one line at the start, then one every `every` seconds at most, and one at the end.
    """
    console = make_console()
    if console.is_terminal:
        with _progress_bar(console, eta=True, transient=True) as bar:
            task = bar.add_task(escape(label), total=total, completed=before)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    start = last = time.monotonic()
    print(f"{label}: {total} {unit}", flush=True)

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done and (done == total or now - last >= every):
            last = now
            each = (now - start) / max(1, done - before)
            left = "" if done == total else f", {duration(each * (total - done))} left"
            print(f"{label}: {done}/{total} after {duration(now - start)}{left}", flush=True)

    yield show


def _progress_bar(console: Console, eta: bool = False, transient: bool = False) -> Progress:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    if eta:
        columns.append(TimeRemainingColumn())
    return Progress(*columns, console=console, transient=transient)


def counted(number: int, noun: str) -> str:
    """1 thread, 2 threads."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """45 -> 45s, 372 -> 6m12s, 7500 -> 2h05m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _interval(interval: Sequence[float] | None, form: str = ".3f") -> str:
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"


# ------------------------------------------------------------------------------------------------------------- tables

SUMMARY: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "completion_rate": ("plan submitted", _percent),
    "format_pass_rate": ("format check passed", _percent),
    "hallucination_rate": ("plan fields never told", _percent),
    "mean_questions": ("questions", lambda value: _number(value, ".2f")),
    "mean_revealing_questions": ("questions that revealed something", lambda value: _number(value, ".2f")),
    "revealing_share": ("... as a share of all questions", _percent),
    "invalid_turn_rate": ("invalid turns", _percent),
    "truncation_rate": ("cut by a length limit", _percent),
    "env_errors": ("environment errors", lambda value: _number(value, "d")),
}
"""Lines under the family table, in evaluation and comparison: report key -> label and number format."""


def print_report(report: Mapping[str, Any]) -> None:
    """One evaluation: families, then what the agent did."""
    console = make_console()
    title = f"{report['model']}: {report['n']} scenarios, {report['rubric']} rubric, {_sampling(report)}"
    table = Table("family", title=escape(title), title_justify="left", title_style="bold")
    for name in ("n", "mean score", "max", "plan submitted"):
        table.add_column(name, justify="right")
    for family, row in report["families"].items():
        mean, best = _number(row["mean"], ".3f"), _number(row["max"], ".3f")
        table.add_row(family, str(row["n"]), mean, best, _percent(row["completion_rate"]))
    table.add_section()
    completed = _percent(report["completion_rate"]) + _interval(report["completion_interval"], ".0%")
    average = _number(report["avg_score"], ".3f") + _interval(report["avg_score_interval"])
    table.add_row("all", str(report["n"]), average, _number(report["max_score"], ".3f"), completed, style="bold")
    console.print(table)
    grid = Table.grid(padding=(0, 2))
    for key, (label, form) in SUMMARY.items():
        grid.add_row("  " + label, form(report[key]))
    for rubric, scores in report["rubrics"].items():
        parts = ", ".join(f"{name} {_number(value, '.3f')}" for name, value in scores["parts"].items())
        grid.add_row(f"  {rubric} rubric", f"{_number(scores['avg_score'], '.3f')}  ({parts})")
    console.print(grid)


def print_comparison(comparison: Mapping[str, Any]) -> None:
    """Several evaluations on the same scenarios: means, maxima, paired changes against the first."""
    title = f"{comparison['n']} scenarios, {comparison['rubric']} rubric; 95 % intervals of changes, paired by scenario"
    table = Table("family", title=title, title_justify="left", title_style="bold")
    table.add_column("n", justify="right")
    for index, model in enumerate(comparison["models"]):
        table.add_column(f"{escape(model)}\nmean (max)", justify="right")
        if index:
            table.add_column(f"change against\n{escape(comparison['models'][0])}", justify="right")
    for row in comparison["rows"]:
        if row["family"] == "all":
            table.add_section()
        table.add_row(*_comparison_cells(row), style="bold" if row["family"] == "all" else None)
    table.add_section()
    for key, (label, form) in SUMMARY.items():
        values = comparison["summary"][key]
        cells = [form(values[0])]
        for value in values[1:]:
            cells += [form(value), ""]
        table.add_row(label, "", *cells)
    make_console().print(table)
    for key, values in comparison["differences"].items():
        print(f"note: {key} differs: " + ", ".join(f"{m} {v}" for m, v in zip(comparison["models"], values)))


def _comparison_cells(row: Mapping[str, Any]) -> list[str]:
    cells = [row["family"], str(row["n"])]
    for index, model in enumerate(row["models"]):
        cells.append("-" if model["mean"] is None else f"{model['mean']:.3f} ({model['max']:.3f})")
        if index:
            delta = _number(model["delta"], "+.3f") + _interval(model["delta_interval"], "+.3f")
            cells.append(delta)
    return cells


def _sampling(report: Mapping[str, Any]) -> str:
    temperature = report.get("temperature")
    if temperature is None:
        return "scripted"
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def print_outcome(comparison: Mapping[str, Any] | None, artefacts: Mapping[str, Any]) -> None:
    """The end of a run: the before/after table, where it was evaluated, and where everything is."""
    if comparison is not None:
        print_comparison(comparison)
    print_header(artefacts, title="Where everything is")
