"""Draws every figure of `docs/`: python docs/make_figures.py [FOLDER], a few seconds.

Curves come from the functions that training runs (`grpo/loss.py`, `grpo/advantages.py`); what is drawn of the kernels
is a diagram, or a formula of docs/kernels.md; what is drawn of many devices comes from benchmarks/cost_report.py. Grey,
dashes and hatches: the figures are to be read in black and white.
Each PNG holds a fingerprint of its numbers, so that a test can tell a figure that is no longer what the code computes.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import get_args

import kernel_figures
import matplotlib
import numpy as np
import scaling_figures
import torch
from figure_style import DASHED, DOTTED, GREYS, HATCHES, MIXED, RC, SOLID, STYLES, curve, new_figure
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from grpo.advantages import group_advantages, has_spread, token_weights
from grpo.config import LossConfig, LossType
from grpo.loss import grpo_loss, kl_divergence, surrogate

FOLDER = Path(__file__).parent / "figures"


def mask() -> Figure:
    """The tokens of the worked example in grpo.data_types.Episode, and which of them are trained."""
    figure, (axes,) = new_figure(1, height=1.75, width=8.6)
    axes.axis("off")
    groups = [("prompt", 3, False), ("turn 1, sampled", 3, True), ("reply of the environment", 10, False),
              ("turn 2, sampled", 2, True)]  # fmt: skip
    tokens = "1 2 3 5 6 end \\n start user \\n 9 end \\n start asst \\n 7 end".split()
    x = 0
    for name, count, trained in groups:
        axes.text(x + count / 2, 1.45, name, ha="center", fontsize=8.5)
        for i in range(x, x + count):
            axes.add_patch(Rectangle((i + 0.04, 0.5), 0.92, 0.7, facecolor="0.75" if trained else "white",
                                     edgecolor="black", hatch="////" if trained else None, linewidth=0.8))  # fmt: skip
            box = dict(facecolor="white", edgecolor="none", pad=0.8) if trained else None
            axes.text(i + 0.5, 0.85, tokens[i], ha="center", va="center", fontsize=7.5, bbox=box)
            if trained:
                axes.annotate("", (i + 0.5, 0.48), (i - 0.5, 0.48), arrowprops=dict(
                    arrowstyle="->", connectionstyle="arc3,rad=0.6", linewidth=0.8))  # fmt: skip
        x += count
    axes.text(9, -0.25, "hatched: trained.  arrow: the position whose logits give the token its log-prob",
              ha="center", fontsize=8.5)  # fmt: skip
    axes.set(xlim=(0, x), ylim=(-0.4, 1.7))
    return figure


def group_size() -> Figure:
    """What the number of members does to the advantages, and to the share of groups that teach nothing."""
    figure, (left, right) = new_figure(2)
    sizes = [2, 3, 4, 6, 8, 12, 16, 24, 32]
    groups = [group_advantages([[1.0] + [0.0] * (size - 1)])[0] for size in sizes]
    curve(left, sizes, [group[0] for group in groups], "the winner", marker="o", markersize=3)
    curve(left, sizes, [group[1] for group in groups], "each loser", DASHED, marker="s", markersize=3)
    left.axhline(0, color="0.7", linewidth=0.8)
    left.set(title="one reward 1, the others 0", xlabel="group size G", ylabel="advantage")
    for rate, style in zip((0.5, 0.2, 0.05), STYLES):
        silent = [
            sum(
                math.comb(size, wins) * rate**wins * (1 - rate) ** (size - wins)
                for wins in range(size + 1)
                if not has_spread([1.0] * wins + [0.0] * (size - wins))
            )
            for size in sizes
        ]
        curve(right, sizes, silent, f"success rate {rate:.0%}", style, marker="o", markersize=3)
    right.set(title="groups without spread of rewards", xlabel="group size G", ylabel="share of groups", ylim=(0, 1))
    for each in (left, right):
        each.legend(frameon=False, fontsize=8)
    return figure


def epsilon() -> Figure:
    """The clipped surrogate over the ratio, for advantages of either sign."""
    figure, panels = new_figure(2)
    ratio = torch.linspace(0.2, 2.2, 201, dtype=torch.float64)
    cases = [("$\\epsilon$ = 0.1", LossConfig(epsilon=0.1)), ("$\\epsilon$ = 0.2 (default)", LossConfig()),
             ("0.2 below, 0.28 above (dapo)", LossConfig(loss_type="dapo")),
             ("$\\epsilon$ = 0.2, $\\delta$ = 1.6", LossConfig(delta=1.6))]  # fmt: skip
    for axes, advantage in zip(panels, (1.0, -1.0)):
        for (label, config), style in zip(cases, STYLES):
            values = surrogate(ratio, ratio.log(), torch.full_like(ratio, advantage), config)
            curve(axes, ratio, values, label, style, color="0.55" if style == DOTTED else "black")
        axes.set(title=f"A = {advantage:+.0f}", xlabel="ratio r", ylabel="surrogate S")
    panels[1].legend(frameon=False, fontsize=7.5)
    return figure


def push(ratio: torch.Tensor, advantage: float, loss_type: LossType, companions: int = 0) -> torch.Tensor:
    """-dL/d(log-prob) of a token of weight 1 at each `ratio` [K], in an episode with `companions` more, at ratio 1."""
    log_ratio = torch.cat([ratio.log()[:, None], ratio.new_zeros(len(ratio), companions)], 1)  # [K, 1 + companions]
    policy = (log_ratio.flatten() - 3.0).requires_grad_()
    loss, _ = grpo_loss(
        policy_logprobs=policy, old_logprobs=torch.full_like(policy, -3.0),
        advantages=torch.full_like(policy, advantage), token_weights=torch.ones_like(policy),
        episode_index=torch.arange(len(ratio)).repeat_interleave(1 + companions),
        config=LossConfig(loss_type=loss_type),
    )  # fmt: skip
    return -torch.autograd.grad(loss, policy)[0].view(log_ratio.shape)[:, 0]


def loss_types() -> Figure:
    """How hard each loss type pushes a token's log-prob, over its ratio."""
    figure, panels = new_figure(4, height=4.1, rows=2, width=8.6)
    ratio = torch.logspace(math.log10(0.2), math.log10(8), 241, dtype=torch.float64)
    for axes, loss_type in zip(panels, get_args(LossType)):
        for advantage, style in ((1.0, SOLID), (-1.0, DASHED)):
            values = push(ratio, advantage, loss_type, companions=3 if loss_type == "gspo" else 0)
            curve(axes, ratio, values, f"A = {advantage:+.0f}", style)
        axes.axvline(1, color="0.7", linewidth=0.8)
        axes.set(xscale="log", ylim=(-8.4, 6), title=loss_type)
        axes.set_xticks([0.2, 1, 2, 8], ["0.2", "1", "2", "8"])
        axes.minorticks_off()
    panels[0].set_ylabel("push on the log-prob", fontsize=8.5)
    panels[4].set_ylabel("push on the log-prob", fontsize=8.5)
    for axes in panels[4:7]:
        axes.set_xlabel("ratio of the token", fontsize=8.5)
    panels[7].axis("off")
    panels[7].legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="upper left")
    note = "token of weight 1,\ndefault clip ranges;\ngspo: one of four tokens,\nthe others at ratio 1"
    panels[7].text(0, 0.05, note, fontsize=8, transform=panels[7].transAxes)
    return figure


def weights() -> Figure:
    """The weight of one token and of a whole episode, for three lengths and each way to average."""
    figure, (left, right) = new_figure(2)
    lengths = [10, 40, 160]
    kinds: list[tuple[str, LossType]] = [("grpo, gspo, sapo", "grpo"), ("bnpo, dapo, cispo", "bnpo"),
                                         ("dr_grpo (limit 320)", "dr_grpo")]  # fmt: skip
    for k, (label, loss_type) in enumerate(kinds):
        of_token = np.array(token_weights(lengths, loss_type, 320, [True] * 3))
        for axes, values in ((left, of_token), (right, of_token * lengths)):
            axes.bar(np.arange(3) + (k - 1) * 0.27, values, 0.25, color=GREYS[k], hatch=HATCHES[k], edgecolor="black",
                     linewidth=0.7, label=label)  # fmt: skip
    for axes, title in ((left, "weight of one token"), (right, "weight of the whole episode")):
        axes.set(title=title, xlabel="trained tokens of the episode")
        axes.set_xticks(range(3), [str(n) for n in lengths])
    left.legend(frameon=False, fontsize=8)
    return figure


KL_STYLES = {"k1": DOTTED, "k2": DASHED, "k3": SOLID, "k3_ratio": MIXED}


def kl_slopes(policy: torch.Tensor, ref: torch.Tensor, estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and derivatives of an estimator at log-probs [N] with the ratio at 1: old is the policy itself."""
    leaf = policy.clone().requires_grad_()
    values = kl_divergence(leaf, ref, estimator, (leaf - policy).exp())
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


def kl_estimators() -> Figure:
    """Value, slope, and what remains of the slope on average over tokens that the policy samples."""
    figure, (value, slope, mean) = new_figure(3, height=3.0, width=8.8)
    gap = torch.linspace(-2, 2, 161, dtype=torch.float64)  # log(policy / ref)
    # Four possible tokens: the policy prefers the first, the reference the last.
    logits = torch.tensor([1.2, 0.4, 0.0, -0.8], dtype=torch.float64, requires_grad=True)
    policy, ref = torch.log_softmax(logits, 0), torch.log_softmax(logits.detach().flip(0), 0)
    exact = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    width = 0.16
    mean.bar(np.arange(4) - 2 * width, exact, width, color="white", edgecolor="black", label="exact", linewidth=0.8)
    looks = zip(KL_STYLES.items(), ("0", "0.45", "0.2", "0.75"), ("", "", "///", "..."))
    for k, ((name, style), grey, hatch) in enumerate(looks):
        values, slopes = kl_slopes(gap - 3, torch.full_like(gap, -3), name)
        curve(value, gap, values, name, style)
        curve(slope, gap, slopes, name, style)
        # sum over tokens of p * (d estimate / d log p) * (d log p / d logits): the mean gradient of many samples
        _, at_tokens = kl_slopes(policy.detach(), ref, name)
        average = torch.autograd.grad((policy.detach().exp() * at_tokens * policy).sum(), logits, retain_graph=True)[0]
        mean.bar(np.arange(4) + (k - 1) * width, average, width, color=grey, hatch=hatch, edgecolor="black",
                 label=name, linewidth=0.6)  # fmt: skip
    value.set(title="estimate", xlabel="log(policy / reference)", ylabel="nats", ylim=(-2.1, 4.6))
    slope.set(title="its slope in the log-prob", xlabel="log(policy / reference)", ylim=(-4.5, 3))
    mean.set(title="mean gradient, 4 possible tokens", xlabel="logit of token", xticks=range(4))
    for axes in (value, slope, mean):
        axes.axhline(0, color="0.7", linewidth=0.8)
        axes.legend(frameon=False, fontsize=7.5)
    return figure


def anchored_run(beta: float, steps: int = 400) -> tuple[list[float], list[float]]:
    """Expected reward and exact KL per step of a policy over six answers of one token each, groups of 8, SGD.

    The base gives the best answer 3 % and the worst one 40 %.
    """
    base = torch.log_softmax(torch.tensor([0.40, 0.25, 0.17, 0.10, 0.05, 0.03], dtype=torch.float64).log(), 0)
    rewards = torch.tensor([0.0, 0.1, 0.3, 0.5, 0.8, 1.0], dtype=torch.float64)
    logits, generator = base.clone().requires_grad_(), torch.Generator().manual_seed(0)
    weight = token_weights([1] * 8, "grpo", 1, [True] * 8)
    earned, divergence = [], []
    for _ in range(steps):
        logprobs = torch.log_softmax(logits, 0)
        probabilities = logprobs.detach().exp()
        earned.append(float(probabilities @ rewards))
        divergence.append(float(probabilities @ (logprobs.detach() - base)))
        drawn = torch.multinomial(probabilities, 8, replacement=True, generator=generator)
        loss, _ = grpo_loss(
            policy_logprobs=logprobs[drawn], old_logprobs=logprobs[drawn].detach(), ref_logprobs=base[drawn],
            advantages=torch.tensor(group_advantages([rewards[drawn].tolist()])[0], dtype=torch.float64),
            token_weights=torch.tensor(weight, dtype=torch.float64), episode_index=torch.arange(8),
            config=LossConfig(beta=beta),
        )  # fmt: skip
        with torch.no_grad():
            logits -= 0.1 * torch.autograd.grad(loss, logits)[0]
    return earned, divergence


def beta() -> Figure:
    """The same tiny problem trained with four strengths of the anchor."""
    figure, (left, right) = new_figure(2)
    for value, style in zip((0.0, 0.2, 1.0, 4.0), STYLES):
        earned, divergence = anchored_run(value)
        curve(left, range(len(earned)), earned, f"beta {value:g}", style)
        curve(right, range(len(earned)), divergence, f"beta {value:g}", style)
    left.set(title="expected reward", xlabel="step", ylim=(0, 1.02))
    right.set(title="exact KL(policy || base), nats", xlabel="step")
    right.legend(frameon=False, fontsize=8)
    return figure


OF_THE_LOSS = (mask, group_size, epsilon, loss_types, weights, kl_estimators, beta)
FIGURES = {draw.__name__: draw for draw in (*OF_THE_LOSS, *kernel_figures.FIGURES, *scaling_figures.FIGURES)}


def figure_of(name: str) -> Figure:
    with matplotlib.rc_context(RC):
        return FIGURES[name]()


def fingerprint(figure: Figure) -> list[float]:
    """The mean of every curve and the sizes of every box and bar, to six digits: the numbers of the figure."""
    numbers = []
    for axes in figure.axes:
        numbers += [float(np.mean(np.asarray(line.get_ydata(), dtype=float))) for line in axes.lines]
        shapes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        numbers += [float(size) for shape in shapes for size in (shape.get_width(), shape.get_height())]
    return [float(f"{number:.6g}") for number in numbers]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        figure, info = figure_of(name), PngInfo()
        info.add_text("fingerprint", json.dumps(fingerprint(figure)))
        with matplotlib.rc_context(RC):
            figure.set_dpi(130)
            figure.canvas.draw()
        canvas = figure.canvas
        assert isinstance(canvas, FigureCanvasAgg)
        grey = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("L")
        grey.save(folder / f"{name}.png", optimize=True, pnginfo=info)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
