"""What the scripts here share: progress on stderr, a markdown table, what the machine is."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from grpo.config import UsageError
from grpo.machine import commit, cpu_name


def say(text: str) -> None:
    """What is happening now."""
    print(text, file=sys.stderr, flush=True)


def fail(text: str, code: int) -> NoReturn:
    """One line on stderr, then exit."""
    print(" ".join(text.split()), file=sys.stderr)
    sys.exit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input inside ends the script with code 2 and one line, Ctrl-C with 130."""
    try:
        yield
    except UsageError as error:
        fail(f"error: {error}", 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def finish(document: dict[str, Any], path: Path | None) -> None:
    """The document as the last line of the output and, where `path` is given, as that file."""
    text = json.dumps(document)
    if path is not None:
        path.write_text(text + "\n")
    print(f"\n{text}", flush=True)


def number(value: Any) -> str:
    """Three significant digits, no exponent; `-` for nothing."""
    if value is None:
        return "-"
    if isinstance(value, (str, int)):
        return str(value)
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with aligned columns."""
    lines = [list(header), *([number(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    shown = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(shown)


def machine(device: str, threads: int) -> dict[str, Any]:
    """What a reader needs to judge the numbers. JSON types only."""
    about: dict[str, Any] = {"device": device, "name": cpu_name(), "threads": threads, "cores": os.cpu_count(),
                             "python": platform.python_version(), "commit": commit(),
                             "load_average_at_end": round(os.getloadavg()[0], 2)}  # fmt: skip
    if device == "cuda":
        import torch

        about["name"] = torch.cuda.get_device_name()
    return about
