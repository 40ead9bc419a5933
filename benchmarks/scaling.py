"""How the cost of a step grows with group size, prompt length, turns and scenarios per step.

    python benchmarks/scaling.py

Synthetic episodes on a small random model go through the trainer's own path: sampler, microbatches of unique tokens,
reference, update. Each point's reference + update time is compared with what the number of its unique tokens predicts:
a constant, so much a unique token, so much a trained one (the LM head) and so much a pair of token and key
(attention), fitted to all *other* points. Beside it: the same episodes as padded rows, and the reference's share.

Prints markdown tables and, as the last line, JSON; draws a plot.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from synthetic import ModelShape, Shape, Side, counts, sample, write_model
from table import finish, machine, markdown, number, one_line_errors, say

from grpo.batching import Packing
from grpo.config import UsageError, tyro_cli
from grpo.engines.torch_engine import TorchEngine

FEATURES = ("constant", "unique_tokens", "pairs", "trained_tokens")
GOAL = 1.15
SWEEPS = {"group size": "members", "prompt tokens": "prompt", "turns": "turns", "scenarios": "groups"}


@dataclass(frozen=True)
class Arguments:
    """How the cost of a step grows with group size, prompt length, turns and scenarios per step."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    rounds: int = 3
    """Timed rounds over all points; the median counts."""
    padded_rounds: int = 1
    """Rounds of the padded rows, which take most of the time. 0: leave them out."""
    threads: int | None = None
    """CPU threads. Default: PyTorch's, one a core."""
    out: Path = Path(__file__).with_name("scaling.png")
    """Where the plot goes."""
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Tiny shapes: does everything run?"""
    json: Path | None = None
    """Also write the JSON document to this file."""


@dataclass
class Point:
    """A shape of one sweep with its counts and times. `control`: as many unique tokens as `of`, in fewer episodes."""

    sweep: str
    value: int
    shape: Shape
    control: bool = False
    counts: dict[str, float] = field(default_factory=dict)
    rollout: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    padded: list[float] = field(default_factory=list)
    predicted: float = math.nan

    @property
    def cost(self) -> float:
        """Seconds of reference and update."""
        return statistics.median(map(sum, zip(self.reference, self.update)))


def sweeps(smoke: bool) -> list[Point]:
    """All points. Between two of a sweep nothing but the swept value changes."""
    values: dict[str, tuple[int, ...]]
    if smoke:
        values = {"members": (2, 4), "prompt": (24, 48), "turns": (1, 2), "groups": (1, 2)}
        base = Shape(members=2, prompt=32, shared=8, turn_tokens=4)
        bases = dict.fromkeys(values, base)
    else:
        values = {"members": (4, 8, 16, 32), "prompt": (128, 256, 512, 1024, 2048), "turns": (1, 2, 4, 8),
                  "groups": (1, 2, 4, 8)}  # fmt: skip
        bases = {
            "members": Shape(prompt=1024),
            "prompt": Shape(members=8),
            "turns": Shape(members=8, prompt=256, turn_tokens=32),
            "groups": Shape(members=4, prompt=256),
        }
    points = [
        Point(sweep, value, dataclasses.replace(bases[name], **{name: value}))
        for sweep, name in SWEEPS.items()
        for value in values[name]
    ]
    low, high = values["members"][0], values["members"][-1]
    long = dataclasses.replace(bases["members"], members=low, turn_tokens=bases["members"].turn_tokens * high // low)
    return [*points, Point("group size", high, long, control=True)]


def predict(points: list[Point]) -> dict[str, float]:
    """Fill in each point's prediction from the others. Returns the coefficients fitted to all, in microseconds.

    Least squares of the relative error, coefficients >= 0.
    """
    rows = np.array([[1.0, *(point.counts[name] for name in FEATURES[1:])] for point in points])
    costs = np.array([point.cost for point in points])
    for i, point in enumerate(points):
        others = np.arange(len(points)) != i
        point.predicted = float(rows[i] @ _fit(rows[others], costs[others]))
    return {name: 1e6 * value for name, value in zip(FEATURES, _fit(rows, costs).tolist())}


def _fit(rows: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Leaves out the feature with the most negative coefficient until none is left."""
    kept = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, kept] / costs[:, None], np.ones(len(costs)), rcond=None)
        if found.min() >= 0 or len(kept) == 1:
            full = np.zeros(rows.shape[1])
            full[kept] = found
            return full
        del kept[int(found.argmin())]


def measure(args: Arguments, points: list[Point], folder: Path, model: ModelShape, device: str) -> dict[str, Any]:
    """Fill in the points' times; returns the seconds of the reference in its variants."""
    context = max(point.shape.prompt + point.shape.completion for point in points) + 64
    max_tokens = 64 if args.smoke else 16384
    write_model(folder, model, context)
    shared = points[0].shape.shared
    prefix = sample(Side(folder, device, Packing(), context, max_tokens).engine,
                    Shape(prompt=shared + 1, shared=shared, turn_tokens=1), model.vocab, 0).episodes[0]  # fmt: skip
    packed = Side(folder, device, Packing(prefix=prefix.prompt_ids[:shared]), context, max_tokens)
    padded = Side(folder, device, Packing(packed=False), context, max_tokens)
    engine = packed.engine
    episodes = []
    sample(engine, points[0].shape, model.vocab, 0)  # warms up
    for step, point in enumerate(points):
        say(f"sampling: {point.sweep} {point.value} ({step + 1}/{len(points)})")
        played = sample(engine, point.shape, model.vocab, step)
        point.rollout.append(played.seconds)
        point.counts = counts(packed.batches(played.episodes))
        episodes.append(played.episodes)
    for round_number in range(-1, max(args.rounds, args.padded_rounds)):  # round -1 warms up
        began = time.perf_counter()
        for point, each in zip(points, episodes):
            if round_number < args.rounds and (round_number >= 0 or point in points[:3]):
                seconds, logprobs = packed.reference_seconds(each)
                update = packed.update_seconds(each, logprobs)
                if round_number >= 0:
                    point.reference.append(seconds)
                    point.update.append(update)
            if 0 <= round_number < args.padded_rounds:
                seconds, logprobs = padded.reference_seconds(each)
                point.padded.append(seconds + padded.update_seconds(each, logprobs))
        say(f"round {round_number + 1}/{max(args.rounds, args.padded_rounds)}: {time.perf_counter() - began:.1f} s")
    return reference_share(args, folder, device, engine, context, model.vocab)


def reference_share(
    args: Arguments, folder: Path, device: str, engine: TorchEngine, context: int, vocab: int
) -> dict[str, Any]:
    """The reference beside an update, in its variants: four scenarios whose prompts share three quarters."""
    shape = Shape(4, 2, 32, 24, 1, 4) if args.smoke else Shape(4, 8, 512, 384, 1, 64)
    played = sample(engine, shape, vocab, 0)
    prefix = played.episodes[0].prompt_ids[: shape.shared]
    variants = {
        "unique tokens, cached prefix": Packing(prefix=prefix),
        "unique tokens": Packing(),
        "padded rows": Packing(packed=False),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    updates: list[float] = []
    sides = {name: Side(folder, device, packing, context, 16384) for name, packing in variants.items()}
    for again in range(args.rounds + 1):
        for name, side in sides.items():
            say(f"reference, {name}: round {again}/{args.rounds}")
            seconds, logprobs = side.reference_seconds(played.episodes)
            if again:
                times[name].append(seconds)
            if side.packing.prefix:
                update = side.update_seconds(played.episodes, logprobs)
                if again:
                    updates.append(update)
    update = statistics.median(updates)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "shape": dataclasses.asdict(shape),
        "update_seconds": update,
        "rollout_seconds": played.seconds,
        "reference_seconds": medians,
        "share_of_reference_and_update": {name: value / (value + update) for name, value in medians.items()},
        "share_of_step": {name: value / (value + update + played.seconds) for name, value in medians.items()},
        "raw": {"reference": times, "update": updates},
    }


def point_json(point: Point) -> dict[str, Any]:
    cost, padded = point.cost, statistics.median(point.padded) if point.padded else None
    return {
        "sweep": point.sweep,
        "value": point.value,
        "control": point.control,
        "shape": dataclasses.asdict(point.shape),
        **point.counts,
        "seconds": cost,
        "seconds_with_rollout": cost + point.rollout[0],
        "reference_seconds": statistics.median(point.reference),
        "update_seconds": statistics.median(point.update),
        "predicted_seconds": None if math.isnan(point.predicted) else point.predicted,
        "measured_over_predicted": None if math.isnan(point.predicted) else cost / point.predicted,
        "padded_seconds": padded,
        "padded_over_unique": padded / cost if padded else None,
        "raw": {"reference": point.reference, "update": point.update, "padded": point.padded},
    }


def goals(points: list[Point]) -> list[dict[str, Any]]:
    """The largest group against the same unique tokens in small groups, and the worst prediction."""
    found = []
    groups = [point for point in points if point.sweep == "group size" and not point.control]
    control = next(point for point in points if point.control)
    small, large = groups[0], groups[-1]
    what = (f"group size {large.value} against as many tokens in {small.value} longer episodes, behind a "
            f"{large.shape.prompt}-token prompt")  # fmt: skip
    found.append((what, large.cost / control.cost))
    worst = max(points, key=lambda point: point.cost / point.predicted)
    found.append((f"worst point against its prediction ({worst.sweep} {worst.value})", worst.cost / worst.predicted))
    return [{"what": what, "value": value, "limit": GOAL, "met": value <= GOAL} for what, value in found]


def show(document: dict[str, Any]) -> None:
    about, model = document["machine"], document["model"]
    print(f"\n## How the cost of a step grows\n\n{about['name']}, {about['threads']} threads, device "
          f"{about['device']}, torch {document['torch']}; commit {about['commit']}\n\nRandom Qwen3, {model['layers']} "
          f"layers, D={model['width']}, V={model['vocab']}, fp32; {document['rounds']} rounds, medians.\n")  # fmt: skip
    header = ["sweep", "value", "unique tokens", "trained", "reference s", "update s", "both s", "with rollout s",
              "measured / predicted", "padded rows s", "padded / unique"]  # fmt: skip
    rows = [
        [point["sweep"] + (", longer episodes instead" if point["control"] else ""), point["value"],
         int(point["unique_tokens"]), int(point["trained_tokens"]), point["reference_seconds"],
         point["update_seconds"], point["seconds"], point["seconds_with_rollout"], point["measured_over_predicted"],
         point["padded_seconds"], point["padded_over_unique"]]
        for point in document["points"]
    ]  # fmt: skip
    print(markdown(header, rows))
    fit = document["microseconds_per"]
    print("\nFitted: " + ", ".join(f"{number(value)} us {'once' if name == 'constant' else 'per ' + name}"
                                   for name, value in fit.items()))  # fmt: skip
    share = document["reference"]
    print(f"\nThe reference beside an update of {share['update_seconds']:.3g} s and a rollout of "
          f"{share['rollout_seconds']:.3g} s ({share['shape']}):\n")  # fmt: skip
    print(markdown(["reference", "s", "share of reference + update", "share of the step"],
                   [[name, seconds, f"{share['share_of_reference_and_update'][name]:.0%}",
                     f"{share['share_of_step'][name]:.0%}"]
                    for name, seconds in share["reference_seconds"].items()]))  # fmt: skip
    print()
    for goal in document["goals"]:
        print(f"- goal: {goal['what']} at most {goal['limit']:g}: {goal['value']:.3g}, "
              f"{'met' if goal['met'] else 'MISSED'}")  # fmt: skip


def draw(document: dict[str, Any], path: Path) -> None:
    """One panel a sweep: seconds against the swept value; unique tokens, their prediction, padded rows, and rollout."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, sweep in zip(figure.subplots(2, 2).flat, SWEEPS):
        points = [point for point in document["points"] if point["sweep"] == sweep and not point["control"]]
        values = [point["value"] for point in points]
        lines = (
            ("padded_seconds", "padded rows", "#D55E00", "s-"),
            ("seconds_with_rollout", "unique tokens, rollout included", "#7F7F7F", "^-"),
            ("seconds", "unique tokens", "#0072B2", "o-"),
            ("predicted_seconds", "predicted by unique tokens", "#009E73", "x--"),
        )
        for key, label, colour, style in lines:
            if all(point[key] is not None for point in points):
                axes.plot(values, [point[key] for point in points], style, color=colour, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
        axes.set_xlabel(sweep)
        axes.set_ylabel("seconds of reference + update")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    about = document["machine"]
    figure.suptitle(f"Cost of a step; {about['name']}, {about['threads']} threads, device {about['device']}")
    figure.savefig(path, dpi=110)


def run(args: Arguments) -> dict[str, Any]:
    """Measure everything. Returns the JSON document. Raises UsageError."""
    if not 1 <= args.rounds <= 1000 or not 0 <= args.padded_rounds <= 1000:
        raise UsageError("--rounds must be between 1 and 1000, --padded-rounds between 0 and 1000")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads {args.threads}: must be at least 1")
    for name, path in (("out", args.out), ("json", args.json)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"--{name} {path}: its folder does not exist")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA device")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    model = ModelShape(2, 32, 256) if args.smoke else ModelShape()
    points = sweeps(args.smoke)
    with tempfile.TemporaryDirectory() as folder:
        reference = measure(args, points, Path(folder), model, device)
    coefficients = predict(points)
    return {
        "benchmark": "scaling",
        "machine": machine(device, torch.get_num_threads()),
        "torch": torch.__version__,
        "model": dataclasses.asdict(model),
        "rounds": args.rounds,
        "goals": goals(points),
        "microseconds_per": coefficients,
        "reference": reference,
        "points": [point_json(point) for point in points],
    }


def main(argv: list[str]) -> None:
    """Exit codes: 0; 2 for bad input, with one line on stderr."""
    with one_line_errors():
        args = tyro_cli(Arguments, argv, prog="scaling.py", description=__doc__.splitlines()[0])
        document = run(args)
    show(document)
    draw(document, args.out)
    print(f"\nplot: {args.out}; {os.cpu_count()} cores")
    finish(document, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
