"""The page: `python -m demo`. Replays of runs, their tokens and curves, and live episodes, at http://127.0.0.1:7860."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from demo import INSTALL
from demo.runs import Unreadable, find_runs
from env.address import check_address
from grpo.config import UsageError, tyro_cli
from grpo.console import run_entry, user_input


@dataclass(frozen=True)
class Arguments:
    """Look at runs, token by token, and play against a policy: a page for the browser."""

    runs: Path = Path("runs")
    """Folder that holds run folders, or one run's own."""
    host: str = "127.0.0.1"
    """Address to listen at. The default is reached from this machine only."""
    port: int = 7860
    """Port to listen at."""
    model: str = "tiny"
    """What the live chat plays with at first: `tiny`, a model folder or a hub id. The runs' models are offered too."""


def main() -> None:
    """Check everything that can be wrong, then serve until Ctrl-C."""
    args = tyro_cli(Arguments, sys.argv[1:], prog="python -m demo")
    check(args)
    # Before gradio is imported: it would tell its makers of each start.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    from demo.app import serve

    serve(args.runs, args.host, args.port, args.model)


def check(args: Arguments) -> None:
    """Raises UsageError, in one line, for what would not work."""
    if importlib.util.find_spec("gradio") is None:
        raise UsageError(f"the package gradio is missing: {INSTALL}")
    if args.runs != Arguments.runs and not args.runs.exists():  # before a first run there is no `runs`
        raise UsageError(f"--runs {args.runs}: no such folder")
    try:
        find_runs(args.runs)
    except Unreadable as error:
        raise UsageError(f"--runs {error}") from error
    check_model(args.model)
    with user_input():
        check_address(args.host, args.port)


def check_model(model: str) -> None:
    """Raises UsageError for a name that is no model's. Only a name: loading it is left until somebody plays."""
    if model == "tiny":
        return
    from grpo.model import source_of

    source_of(model)


if __name__ == "__main__":
    run_entry(main)
