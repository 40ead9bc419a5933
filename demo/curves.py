"""A run's log as tables for gradio's line plots."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from demo.loading import import_trainer
from demo.runs import Run, Unreadable

FIRST = ("reward", "kl", "entropy", "completion_rate")
"""Metrics that are always shown, as far as a run has them."""

BINS = 60  # points of a curve: longer runs are averaged, or noise is all that one sees


def logs(runs: Sequence[Run]) -> dict[str, list[dict]]:
    """Each run's `log_history.json` by name. Raises Unreadable."""
    import_trainer()
    from grpo.config import UsageError
    from grpo.metrics import read_log

    try:
        return {run.name: read_log(run.folder / "log_history.json") for run in runs}
    except UsageError as error:
        raise Unreadable(str(error)) from error
    except OSError as error:
        raise Unreadable(f"{error.filename}: {error.strerror}") from error


def metrics(histories: dict[str, list[dict]]) -> list[str]:
    """Names that have a number in at least one line, in the log's order."""
    found: dict[str, None] = {}
    for rows in histories.values():
        for row in rows:
            found.update((key, None) for key, value in row.items() if isinstance(value, (int, float)) and key != "step")
    return list(found)


def table(histories: dict[str, list[dict]], metric: str) -> pd.DataFrame:
    """Columns run, step, value: the mean of about `len / BINS` neighbouring steps; steps without a value left out."""
    rows = [
        {"run": name, "step": row["step"], "value": float(row[metric])}
        for name, log in histories.items()
        for row in log
        if isinstance(row.get(metric), (int, float))
    ]
    frame = pd.DataFrame(rows, columns=["run", "step", "value"])
    width = max(1, int(frame["step"].max() - frame["step"].min() + 1) // BINS) if len(frame) else 1
    if width == 1:
        return frame
    return frame.groupby(["run", frame["step"] // width], sort=False)[["step", "value"]].mean().reset_index("run")


def meaning(metric: str) -> str:
    """What `grpo.metrics` says of a key."""
    from grpo.metrics import METRICS

    return METRICS.get(metric, "")
