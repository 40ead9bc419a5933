"""What the figures of `docs/` share: grey, dashes and hatches, to be read in black and white."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SOLID, DASHED, DOTTED, MIXED = "-", (0, (6, 3)), (0, (1.2, 1.8)), (0, (6, 2, 1, 2))
STYLES = (SOLID, DASHED, MIXED, DOTTED)
GREYS, HATCHES = ("0.25", "0.6", "0.92"), ("", "//", "..")
RC: dict[Any, Any] = {
    "axes.titlesize": 9.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "hatch.linewidth": 0.6,
    "legend.handlelength": 3.2,
}


def new_figure(columns: int, height: float = 2.7, rows: int = 1, width: float = 8.0) -> tuple[Figure, list[Axes]]:
    """A white figure, `width` x `height` inches, and its axes in reading order."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(np.ravel(figure.subplots(rows, columns)))
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def curve(axes: Axes, x: Any, y: Any, label: str | None = None, style: Any = SOLID, **keywords: Any) -> None:
    axes.plot(x, y, linestyle=style, color=keywords.pop("color", "black"), linewidth=1.5, label=label, **keywords)
