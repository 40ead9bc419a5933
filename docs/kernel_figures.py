"""The figures of docs/kernels.md: diagrams, one recurrence and one formula. Drawn by make_figures.py."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from figure_style import DOTTED, STYLES, new_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from grpo_kernels.chunking import chunk_rows, chunks


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str,
    grey: str = "white", hatch: str | None = None, size: float = 7.5,
) -> None:  # fmt: skip
    axes.add_patch(Rectangle((x, y), width, height, facecolor=grey, edgecolor="black", linewidth=0.9, hatch=hatch))
    patch = dict(facecolor="white", edgecolor="none", pad=0.8) if hatch else None
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, bbox=patch)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", above: float = 0.16
) -> None:
    axes.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color="black", linewidth=1.0))
    if text:
        axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + above, text, ha="center", fontsize=7.5)


def gemms() -> Figure:
    """Three ways through the head: which products there are, and what is kept between them."""
    figure, (axes,) = new_figure(1, height=4.3, width=8.8)
    axes.axis("off")
    axes.set(xlim=(0, 15.9), ylim=(-0.1, 6.5))
    lanes = [
        (4.6, "everything at once\n3 GEMMs", [("logits\n[N, V]", "1"), ("loss", ""), ("dlogits\n[N, V]", "")], "kept"),
        (2.5, "a layer that waits\nfor its gradient\n4 GEMMs",
         [("logits\n[n, V]", "1"), ("loss", "thrown\naway"), ("logits\n[n, V]", "2"), ("dlogits\n[n, V]", "")], ""),
        (0.4, "a head that owns\nits loss\n3 GEMMs", [("logits\n[n, V]", "1"), ("dlogits\n[n, V]", "in place")], ""),
    ]  # fmt: skip
    for y, name, boxes, kept in lanes:
        axes.text(0.05, y + 0.6, name, va="center", fontsize=8.5, fontweight="bold")
        x = 3.1
        box(axes, x, y + 0.2, 0.8, 0.8, "X")
        x += 0.8
        for text, label in boxes:
            of_logits = "logits" in text
            label = f"GEMM {label}" if label.isdigit() else label
            arrow(axes, (x, y + 0.6), (x + 1.2, y + 0.6), label, 0.1)
            x += 1.2
            size = 1.2 if "N" in text else 0.8
            look = ("0.8", "//") if of_logits else ("white", None)
            box(axes, x, y + 0.6 - size / 2, 1.15, size, text, *look)
            x += 1.15
        first = 3 if len(boxes) == 4 else 2
        arrow(axes, (x, y + 0.75), (x + 1.25, y + 1.0))
        arrow(axes, (x, y + 0.45), (x + 1.25, y + 0.2))
        box(axes, x + 1.25, y + 0.75, 0.75, 0.5, "dX")
        box(axes, x + 1.25, y - 0.05, 0.75, 0.5, "dW")
        axes.text(x + 0.62, y + 1.12, f"GEMM {first}", ha="center", fontsize=7.5)
        axes.text(x + 0.62, y - 0.06, f"GEMM {first + 1}", ha="center", fontsize=7.5)
        if kept:
            axes.annotate("", (9.6, y + 1.35), (5.7, y + 1.35), arrowprops=dict(arrowstyle="<|-|>", linewidth=0.8))
            axes.text(7.6, y + 1.45, "all N x V of it is held from here to there", ha="center", fontsize=7.5)
    return figure


def chunk() -> Figure:
    """Where logits live in `linear_grpo_loss`: one buffer, used again for each chunk of tokens."""
    figure, (axes,) = new_figure(1, height=2.5, width=8.6)
    axes.axis("off")
    axes.set(xlim=(0, 13.6), ylim=(-0.7, 3.6))
    for k in range(5):
        box(axes, 0.2, 2.4 - 0.6 * k, 1.3, 0.6, "", "0.8" if k == 1 else "white", "//" if k == 1 else None)
    axes.text(0.85, -0.5, "hidden X\n[N, D]", ha="center", fontsize=8)
    box(axes, 2.8, 1.7, 5.6, 0.8, "one buffer: logits, then their gradient  [n, V]", "0.8", "//", 8)
    box(axes, 2.8, 0.0, 5.6, 0.5, "W [V, D], read for GEMM 1 and GEMM 2")
    arrow(axes, (1.5, 2.1), (2.8, 2.1), "GEMM 1", 0.12)
    axes.annotate("", (4.6, 2.5), (6.6, 2.5), arrowprops=dict(arrowstyle="-|>", connectionstyle="arc3,rad=0.5"))
    axes.text(5.6, 3.15, "row kernel, in place", ha="center", fontsize=7.5)
    arrow(axes, (5.6, 0.5), (5.6, 1.7))
    arrow(axes, (8.4, 2.3), (10.6, 2.7), "GEMM 2", 0.22)
    arrow(axes, (8.4, 1.9), (10.6, 1.0), "GEMM 3", 0.22)
    for k in range(5):
        box(axes, 10.6, 3.0 - 0.25 * k, 1.3, 0.25, "", "0.8" if k == 1 else "white", "//" if k == 1 else None)
    axes.text(12.05, 2.6, "dX [N, D]\na row each,\nwritten once", fontsize=7.5, va="center")
    box(axes, 10.6, 0.2, 1.3, 1.1, "+=")
    axes.text(12.05, 0.75, "dW [V, D]\nfloat32, all\nchunks add up", fontsize=7.5, va="center")
    return figure


def row_passes() -> Figure:
    """How often a row of logits crosses the bus to main memory."""
    figure, panels = new_figure(3, height=2.5, width=8.8)
    kinds = [
        ("Triton: two walks", ["read", "read", "write"], ["statistics", "gradient"], "a block of 4096 at a time"),
        ("CUDA C++: row-resident", ["read", "write"], ["statistics,\nthen gradient"], "registers + shared memory"),
        ("PyTorch rows, on a CPU", ["read", "write"], ["max, shift, exp,\nsums, gradient"], "a few rows in cache"),
    ]
    for axes, (title, crossings, work, where) in zip(panels, kinds):
        axes.axis("off")
        axes.set(xlim=(0, 6), ylim=(0, 4.2), title=title)
        box(axes, 0.1, 0.1, 5.8, 0.7, "row of V logits in main memory", "0.8", "//")
        box(axes, 0.1, 2.4, 5.8, 1.6, "")
        axes.text(3, 3.7, where, ha="center", va="center", fontsize=7.5, style="italic")
        places = {3: (1.0, 3.9, 5.3), 2: (1.0, 5.0)}[len(crossings)]
        for x, crossing in zip(places, crossings):
            up = crossing == "read"
            arrow(axes, (x, 0.8 if up else 2.4), (x, 2.4 if up else 0.8))
            axes.text(x + (0.12 if x < 4.6 else -0.12), 1.6, crossing, fontsize=8, ha="left" if x < 4.6 else "right")
        for x, text in zip((1.3, 4.6) if len(work) == 2 else (3,), work):
            axes.text(x, 2.95, text, ha="center", va="center", fontsize=8)
    return figure


def online_softmax() -> Figure:
    """Maximum and sum of one row, block by block, in the recurrence of the row kernels (in plain Python here)."""
    figure, (left, right) = new_figure(2)
    row = 3.0 * torch.randn(4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    maximum, total, history = -math.inf, 0.0, []
    for block in row.split(256):
        new = max(maximum, float(block.max()))
        total = total * math.exp(maximum - new) + float((block - new).exp().sum())
        maximum = new
        history.append((maximum, total, maximum + math.log(total)))
    blocks = np.arange(1, len(history) + 1)
    for axes, columns in ((left, (0, 2)), (right, (1,))):
        for column in columns:
            label = ("maximum m so far", "sum s", "m + log s")[column]
            axes.step(blocks, [h[column] for h in history], color="black", linestyle=STYLES[column % 3], where="post",
                      label=label, linewidth=1.5)  # fmt: skip
        axes.set_xlabel("blocks of 256 logits seen")
    left.axhline(float(row.logsumexp(0)), color="0.5", linewidth=1.0, linestyle=DOTTED, label="log-sum-exp of the row")
    left.set_title("a row of 4096 logits")
    left.legend(frameon=False, fontsize=8)
    right.set_title("s, rescaled where the maximum rises")
    return figure


def traffic_bytes(num_tokens: int, width: int, vocab: int, item: int, row_passes: int) -> dict[str, int]:
    """Bytes to and from main memory of `linear_grpo_loss` on a GPU, by the formulas of docs/kernels.md.

    `row_passes`: reads and writes of a row by the row kernel, 3 for Triton, 2 where the row is resident.
    """
    most = chunk_rows(vocab, {2: torch.bfloat16, 4: torch.float32}[item], torch.device("cuda"))
    count = len(list(chunks(num_tokens, most)))
    return {
        "logits": (3 + row_passes) * num_tokens * vocab * item,
        "W": 2 * count * vocab * width * item,
        "dW": (2 * count + 1) * vocab * width * 4,
        "X, dX": 7 * num_tokens * width * item,
    }


def traffic() -> Figure:
    """`traffic_bytes` for one shape."""
    figure, (axes,) = new_figure(1, height=2.1)
    left = np.zeros(2)
    rows = [traffic_bytes(8192, 2048, 151936, 2, passes) for passes in (3, 2)]
    looks = itertools.cycle(zip(("0.75", "0.3", "white", "0"), ("//", "", "...", "")))
    for part, (grey, hatch) in zip(rows[0], looks):
        values = np.array([row[part] for row in rows]) / 1e9
        axes.barh([1, 0], values, 0.6, left=left, color=grey, hatch=hatch, edgecolor="black", linewidth=0.7, label=part)
        left += values
    axes.set_yticks([1, 0], ["Triton rows", "resident rows"])
    axes.set(xlabel="GB, by formula: N = 8192, D = 2048, V = 151936, bfloat16")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.28))
    return figure


FIGURES = (gemms, chunk, row_passes, online_softmax, traffic)
