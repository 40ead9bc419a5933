"""A run's pictures, as PNG files. Colours are Okabe and Ito's set, which colour-blind readers can tell apart.

Figures are made without pyplot: no display, no global state, nothing to close.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from env.clarify import StopReason
from grpo.files import write_atomic

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F",
)  # fmt: skip

STOP_COLOURS = {
    StopReason.PLAN: GREEN,
    StopReason.TURN_CAP: ORANGE,
    StopReason.QUESTION_CAP: SKY,
    StopReason.TOKEN_CAP: VERMILION,
    StopReason.CONTEXT_FULL: PURPLE,
    StopReason.ENV_ERROR: "#000000",
}

MODEL_COLOURS = (GREY, BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)

Rows = Sequence[Mapping[str, Any]]
"""Lines of `log_history.json`."""


def plot_run(folder: str | Path, history: Rows, comparison: Mapping[str, Any] | None = None) -> list[Path]:
    """Draw everything a run has into `folder` and return the files.

    `comparison` is `grpo.compare.compare([before, after])`, where both evaluations were made. Charts of what the
    history never measured (KL without a reference) are left out.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    charts = (("reward", plot_reward), ("kl", plot_kl), ("entropy", plot_entropy), ("stop_reasons", plot_stop_reasons))
    for name, plot in charts:
        key = "stop/plan" if name == "stop_reasons" else name
        if any(row.get(key) is not None for row in history):
            drawn.append(plot(history, folder / f"{name}.png"))
    if comparison is not None:
        drawn.append(plot_families(comparison, folder / "families.png"))
        drawn.append(plot_deltas(comparison, folder / "deltas.png"))
    return drawn


def plot_reward(history: Rows, path: str | Path) -> Path:
    """Mean reward per step, its moving average, and a band of one within-group standard deviation."""
    figure, axes = _figure("Training reward")
    steps, reward = _series(history, "reward")
    _, spread = _series(history, "reward_std")
    centre, half, label = _moving_average(reward), _moving_average(spread), "± standard deviation within a group"
    if len(steps) == 1:  # a band needs a width
        axes.errorbar(steps, centre, half, color=BLUE, alpha=0.3, linewidth=8, label=label)
    else:
        axes.fill_between(steps, centre - half, centre + half, color=BLUE, alpha=0.15, linewidth=0, label=label)
    _line(axes, steps, reward, "reward", BLUE)
    return _save_steps(figure, axes, path, "mean reward of the step")


def plot_kl(history: Rows, path: str | Path) -> Path:
    """Mean KL to the frozen base per trained token."""
    return _plot_one(history, path, "kl", "KL divergence from the frozen base", "KL per token (nats)", VERMILION)


def plot_entropy(history: Rows, path: str | Path) -> Path:
    """Mean entropy of the policy's next-token distribution at trained tokens."""
    return _plot_one(history, path, "entropy", "Entropy of the policy", "entropy per token (nats)", GREEN)


def plot_stop_reasons(history: Rows, path: str | Path) -> Path:
    """Why episodes ended: shares stacked to 100 %, smoothed, with only the reasons that occurred."""
    figure, axes = _figure("Why episodes end")
    shares = {reason: _series(history, f"stop/{reason.value}") for reason in StopReason}
    shares = {reason: (steps, values) for reason, (steps, values) in shares.items() if np.nansum(values) > 0}
    steps = np.array([row["step"] for row in history], dtype=float)
    heights = [_moving_average(np.nan_to_num(values)) for _, values in shares.values()]
    if len(steps) == 1:  # an area needs a width
        steps, heights = np.array([steps[0] - 0.5, steps[0] + 0.5]), [np.repeat(height, 2) for height in heights]
    labels = [reason.value.replace("_", " ") for reason in shares]
    axes.stackplot(steps, heights, labels=labels, colors=[STOP_COLOURS[reason] for reason in shares], alpha=0.9)
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return _save_steps(figure, axes, path, "share of the step's episodes", legend_outside=True)


def plot_families(comparison: Mapping[str, Any], path: str | Path) -> Path:
    """Mean score per family, one bar per model, with 95 % intervals; last the mean over all."""
    models, rows = comparison["models"], _rows_with_episodes(comparison)
    figure, axes = _figure(f"Held-out score by family ({comparison['rubric']} rubric)", wide=True)
    width = 0.8 / len(models)
    for index, model in enumerate(models):
        at = np.arange(len(rows)) + (index - (len(models) - 1) / 2) * width
        cells = [row["models"][index] for row in rows]
        means = np.array([cell["mean"] for cell in cells])
        axes.bar(at, means, width * 0.92, color=MODEL_COLOURS[index % len(MODEL_COLOURS)], label=model)
        _error_bars(axes, at, means, [cell["interval"] for cell in cells])
    axes.set_xticks(np.arange(len(rows)), [_family_label(row) for row in rows])
    axes.set_ylabel("mean score (95 % interval)")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    return _save(figure, path)


def plot_deltas(comparison: Mapping[str, Any], path: str | Path) -> Path:
    """Each model's gain over the first on the same scenarios, per family, with paired 95 % intervals."""
    models, rows = comparison["models"], _rows_with_episodes(comparison)[::-1]
    figure, axes = _figure(f"Change against {models[0]} on the same scenarios", wide=True)
    others = range(1, len(models))
    for index in others:
        offset = (index - len(models) / 2) * 0.5 / max(1, len(models) - 1)
        at = np.arange(len(rows)) - offset
        deltas = [row["models"][index] for row in rows]
        means = np.array([cell["delta"] for cell in deltas])
        colour = MODEL_COLOURS[index % len(MODEL_COLOURS)]
        axes.plot(means, at, "o", color=colour, markersize=7, label=models[index])
        for y, cell in zip(at, deltas, strict=True):
            if cell["delta_interval"] is not None:
                axes.plot(cell["delta_interval"], [y, y], color=colour, linewidth=2, solid_capstyle="round")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(np.arange(len(rows)), [_family_label(row, " ") for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x", alpha=0.3)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"change in mean score ({comparison['rubric']} rubric), 95 % interval paired by scenario")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    return _save(figure, path)


def plot_seeds(
    groups: Mapping[str, Sequence[Rows]],
    key: str,
    path: str | Path,
    title: str,
    label: str,
    ends: Mapping[str, Sequence[float]] | None = None,
) -> Path:
    """A number of the log for groups of runs, one per seed: moving averages, their mean as a line and their range as a
    band, up to the last step that all of a group have. Groups without values get no line.

    `ends`: what was measured on each run's final model, as dots behind the last step. A group keeps its colour in every
    chart, also in `plot_families` and `plot_deltas` where the base comes first.
    """
    figure, axes = _figure(title)
    last = max(row["step"] for runs in groups.values() for rows in runs for row in rows)
    for colour, (name, runs) in zip(_colours(len(groups), first=1), groups.items(), strict=True):
        length = min(len(rows) for rows in runs)
        steps = _series(runs[0][:length], key)[0]
        curves = np.array([_moving_average(_series(rows[:length], key)[1]) for rows in runs])  # [seeds, steps]
        if np.isfinite(curves).any():
            marker = "o" if length < 5 else None
            axes.plot(steps, curves.mean(axis=0), color=colour, linewidth=2, marker=marker, label=name)
            axes.fill_between(steps, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.2, linewidth=0)
        values = (ends or {}).get(name, ())
        if values:
            dots = [1.02 * last] * len(values)
            axes.plot(dots, values, "o", color=colour, markersize=6, label=f"{name}, final models")
    return _save_steps(figure, axes, path, label)


# ------------------------------------------------------------------------------------------------------------- pieces


def _colours(number: int, first: int = 0) -> list[str]:
    return [MODEL_COLOURS[(first + i) % len(MODEL_COLOURS)] for i in range(number)]


def _figure(title: str, wide: bool = False) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.5 if wide else 7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _series(history: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, both [rows] float64; NaN where the line has no value."""
    steps = np.array([row["step"] for row in history], dtype=float)
    values = np.array([np.nan if row.get(key) is None else row[key] for row in history], dtype=float)
    return steps, values


def _moving_average(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a thirtieth of the run (1 step in a short one), ignoring NaN."""
    half = len(values) // 60
    known = np.isfinite(values)
    kernel = np.ones(2 * half + 1)
    total = np.convolve(np.where(known, values, 0.0), kernel)[half : half + len(values)]
    count = np.convolve(known.astype(float), kernel)[half : half + len(values)]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _line(axes: Axes, steps: np.ndarray, values: np.ndarray, label: str, colour: str) -> None:
    smooth = _moving_average(values)
    marker = "o" if np.isfinite(values).sum() < 5 else None  # a line needs two points to be seen
    if len(values) >= 60:
        axes.plot(steps, values, color=colour, alpha=0.35, linewidth=0.8, label=f"{label}, each step")
        axes.plot(steps, smooth, color=colour, linewidth=2, label=f"{label}, moving average")
    else:
        axes.plot(steps, values, color=colour, linewidth=2, marker=marker, label=label)


def _plot_one(history: Rows, path: str | Path, key: str, title: str, label: str, colour: str) -> Path:
    figure, axes = _figure(title)
    steps, values = _series(history, key)
    _line(axes, steps, values, label.split()[0], colour)
    low, high = float(np.nanmin(values, initial=0.0)), float(np.nanmax(values, initial=0.0))
    if high > low:  # from 0, so that a wobble does not look like a change
        axes.set_ylim(low, high + 0.08 * (high - low))
    return _save_steps(figure, axes, path, label)


def _error_bars(axes: Axes, at: np.ndarray, means: np.ndarray, intervals: Sequence[Sequence[float] | None]) -> None:
    for x, mean, interval in zip(at, means, intervals, strict=True):
        if interval is not None:
            below, above = max(0.0, mean - interval[0]), max(0.0, interval[1] - mean)
            axes.errorbar(x, mean, [[below], [above]], color="black", capsize=3, linewidth=1)


def _rows_with_episodes(comparison: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in comparison["rows"] if row["n"]]


def _family_label(row: Mapping[str, Any], line_break: str = "\n") -> str:
    name = row["family"].replace("_", line_break)
    return f"{name}{line_break}(n={row['n']})"


def _save_steps(figure: Figure, axes: Axes, path: str | Path, label: str, legend_outside: bool = False) -> Path:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if legend_outside:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1), reverse=True)
    elif len(axes.get_legend_handles_labels()[0]) > 1:  # a single line is what the axis says
        axes.legend(frameon=False)
    return _save(figure, path)


def _save(figure: Figure, path: str | Path) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format=Path(path).suffix[1:] or "png")
    write_atomic(path, picture.getvalue())
    return Path(path)
