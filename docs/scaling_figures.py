"""The figures of docs/scaling.md, from the cost model in benchmarks/. Drawn by make_figures.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from figure_style import DASHED, DOTTED, STYLES, curve, new_figure
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import cost_check  # noqa: E402
import cost_job  # noqa: E402
import cost_report  # noqa: E402

PARTS = (("rollout", "0.3", ""), ("sync", "1", "xxx"), ("reference", "0.85", ".."), ("update", "0.6", "//"),
         ("waiting", "0", ""))  # fmt: skip
MODELS = cost_report.MODELS


def scaling_phases() -> Figure:
    """Shares of a predicted step, by model: weak scaling at 64 GPUs, strong at 512."""
    figure, panels = new_figure(2, height=2.9, width=8.6)
    cases = ((cost_report.weak, 64, "8 groups a GPU, 64 GPUs"), (cost_report.strong, 512, "512 groups, 512 GPUs"))
    for axes, (make, gpus, title) in zip(panels, cases):
        found = [cost_job.step(make(model, gpus)) for model in MODELS]
        steps = [step for step in found if step]
        assert len(steps) == len(found), "a model that does not fit"
        bottom = np.zeros(len(MODELS))
        for name, grey, hatch in PARTS:
            shares = np.array([getattr(step, name) / step.seconds for step in steps])
            axes.bar(range(len(MODELS)), shares, 0.6, bottom=bottom, color=grey, hatch=hatch, edgecolor="black",
                     linewidth=0.7, label=name)  # fmt: skip
            bottom += shares
        labels = [f"{model}\n{step.seconds:.1f} s" for model, step in zip(MODELS, steps)]
        axes.set_xticks(range(len(MODELS)), labels)
        axes.set(title=title, ylabel="share of a step, predicted", ylim=(0, 1))
    entries = panels[0].get_legend_handles_labels()
    figure.legend(*entries, frameon=False, fontsize=8, ncols=5, loc="outside lower center")
    return figure


def scaling_strong() -> Figure:
    """Seconds of a step over GPUs, 512 groups in all; and the rollout alone, which stops shrinking."""
    figure, panels = new_figure(2, height=3.0, width=8.6)
    counts = [2**k for k in range(10)]
    for k, model in enumerate(MODELS):
        found = [(gpus, cost_job.step(cost_report.strong(model, gpus))) for gpus in counts]
        fitting = [(gpus, step) for gpus, step in found if step is not None]
        gpus = [gpus for gpus, _ in fitting]
        look = dict(marker="os^Dv"[k], markersize=3.5, style=STYLES[k % 4], color="0.55" if k == 4 else "black")
        curve(panels[0], gpus, [step.seconds for _, step in fitting], model, **look)
        curve(panels[1], gpus, [step.rollout for _, step in fitting], model, **look)
    for axes, title in zip(panels, ("whole step", "rollout alone")):
        curve(axes, counts, [200 / gpus for gpus in counts], "a perfect split", DOTTED, color="0.6")
        axes.set(xscale="log", yscale="log", title=title, xlabel="H100s", ylabel="seconds, predicted", ylim=(1, 400))
        axes.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        axes.minorticks_off()
    panels[1].legend(frameon=False, fontsize=7.5)
    return figure


def scaling_check() -> Figure:
    """Predicted over measured seconds on a CPU."""
    figure, (axes,) = new_figure(1, height=3.4, width=4.6)
    found = [c for c in cost_check.comparisons(cost_check.calibrated()) if c.phase != "peak memory"]
    kinds = {"rollout": ("o", "white"), "reference": ("s", "0.6"), "update": ("^", "0.6"),
             "reference and update": ("D", "0.6"), "three GEMMs and rows": ("v", "black"),
             "whole step": ("P", "black")}  # fmt: skip
    for phase, (marker, grey) in kinds.items():
        points = [c for c in found if c.phase == phase]
        axes.plot([c.measured for c in points], [c.predicted for c in points], marker, color=grey, markersize=4.5,
                  markeredgecolor="black", markeredgewidth=0.6, label=phase)  # fmt: skip
    ends = np.array([0.04, 60])
    curve(axes, ends, ends, color="0.5")
    for factor in (0.5, 2):
        curve(axes, ends, factor * ends, "a factor of 2" if factor == 2 else None, DASHED, color="0.7")
    axes.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
    axes.legend(frameon=False, fontsize=7)
    return figure


FIGURES = (scaling_check, scaling_phases, scaling_strong)
