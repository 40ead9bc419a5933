"""How results are shown: progress on stderr, markdown tables and one JSON line on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

_console = Console(stderr=True)
_status = _console.status("") if _console.is_terminal else None
_LINES_EVERY = 3.0  # seconds, where stderr is no terminal
_last_line = 0.0


def say(text: str) -> None:
    """What is happening now: a spinner on a terminal, a line now and then elsewhere. Empty: nothing any more."""
    global _last_line
    if _status is None:
        if text and time.perf_counter() - _last_line > _LINES_EVERY:
            _last_line = time.perf_counter()
            print(text, file=sys.stderr, flush=True)
    elif text:
        _status.update(text)
        _status.start()
    else:
        _status.stop()


def fail(text: str, code: int) -> NoReturn:
    """One line on stderr, then exit."""
    say("")
    print(" ".join(text.split()), file=sys.stderr)
    sys.exit(code)


def one_line(error: BaseException) -> str:
    """The first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {lines[0][:120]}"


def remaining(start: float, seconds: float, done: int, rounds: int | None) -> str:
    """How long it will go on: by the rounds where they are given, else by the budget."""
    spent = time.perf_counter() - start
    if rounds is None:
        return f"about {max(0.0, seconds - spent):.0f} s left"
    return f"about {spent / done * (rounds - done):.0f} s left" if done else "first round"


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between the sorted values."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def heading(title: str, about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    where = f"{about['name']}" + (f", {about['threads']} threads" if "threads" in about else f", sm {about['sm']}")
    return f"\n## {title}\n\n{where}; {versions}; commit {about['commit'] or 'unknown'}"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits without an exponent for times and rates; `-` for what was not measured."""
    if value is None:
        return "-"
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{digits}g}" if value < 1 else f"{value:.{max(0, digits - len(str(int(value))))}f}"


def error_of(name: str, row: dict[str, Any]) -> str:
    return f"{row['errors'][name]:.1e}" if name in row["errors"] else "-"


def case_table(case: dict[str, Any]) -> str:
    """Markdown: one line a row, reasons for what did not run, notes, goals."""
    rows = case["rows"]
    ran = [row for row in rows if row["ms"] is not None]
    errors = list(dict.fromkeys(name for row in ran for name in row["errors"]))
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("implementation", lambda row: row["name"]),
        ("ms", lambda row: number(row["ms"])),
        ("p20-p80", lambda row: f"{number(row['p20'])}-{number(row['p80'])}"),
        ("x floor", lambda row: number(row["ratio_to_floor"])),
        ("% of floor", lambda row: number(row["percent_of_floor"])),
        ("TFLOP/s", lambda row: number(row["tflops"])),
        ("GB/s", lambda row: number(row["gbps"])),
        ("peak MB", lambda row: number(row["peak_mb"])),
        ("extra MB", lambda row: number(row["extra_mb"])),
    ]
    columns += [(f"err {name}", partial(error_of, name)) for name in errors]
    cells = [[show(row) for _, show in columns] for row in ran]
    # A column that has nothing to say for this op is left out.
    keep = [i for i in range(len(columns)) if any(line[i] not in ("-", "---") for line in cells)]
    lines = [[columns[i][0] for i in keep], *([line[i] for i in keep] for line in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keep))]
    shown = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    plural = "" if case["rounds"] == 1 else "s"
    head = f"\n### {case['case']}: {case['rounds']} round{plural}, errors on {case['check_tokens']} tokens\n"
    notes = [f"- {row['name']}: not run: {row['missing']}" for row in rows if row["missing"]]
    notes += [f"- {row['name']}: {row['note']}" for row in ran if row["note"]]
    notes += [f"- goal: {goal['what']} at most {goal['limit']:g}: {goal['value']:.3g}, "
              f"{'met' if goal['met'] else 'MISSED'}" for goal in case["goals"]]  # fmt: skip
    return "\n".join([head, *shown, *([""] if notes else []), *notes])


def emit(document: dict[str, Any], path: Path | None) -> None:
    """The JSON document as the last line of stdout, and in a file where one is named."""
    text = json.dumps(document, allow_nan=False)
    if path is not None:
        path.write_text(text + "\n")
    print("\n" + text, flush=True)
