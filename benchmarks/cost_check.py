"""The cost model against what was measured on a CPU.

    python benchmarks/cost_check.py

Four rates of the machine come from four figures (`calibrated`); everything else that was measured is predicted from
them and compared: the phases of the whole steps of `step_vs_trl.py`, all points of `scaling.py`, the head of
`kernels/bench`, the peak memory. Prints a markdown table and, as the last line, JSON.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CASES, TINY
from cost_machines import Machine
from cost_model import (
    Lengths,
    Shape,
    Work,
    adamw_seconds,
    decode_seconds,
    head_seconds,
    prefill_seconds,
    reference_seconds,
    update_seconds,
    work,
)
from synthetic import REPLY_TOKENS
from table import finish, markdown

RESULTS = Path(__file__).parent / "results"
# Of the time when MKL computed all products, the layers' and the head's, at one rate; layers now go to oneDNN
# (grpo/cpu_linear.py), at another.
ONE_RATE = RESULTS / "mkl"
KERNELS = Path(__file__).resolve().parents[1] / "kernels/bench/results/linear_grpo_loss.cpu.json"
DRAFTED_FORWARDS = 532 / 8  # a rollout batch of case b, whose sampler drafts: measured, docs/LOG.md
PROCESS_BYTES = 0.5e9  # Python and its libraries: what is resident at the start of case b, without its 14 MB of weights
LAYER_POINT, ROW_POINT = ("prompt tokens", 512), ("scenarios", 8)


@dataclass(frozen=True)
class Comparison:
    """Seconds, or bytes."""

    what: str
    phase: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


@functools.cache
def document(name: str) -> dict[str, Any]:
    path = ONE_RATE / f"{name}.cpu.json"
    return json.loads((path if path.exists() else RESULTS / path.name).read_text())


def measured_lengths() -> tuple[Lengths, int]:
    """Of `episodes.py`, and the limit they had."""
    found = document("episodes")
    return Lengths(np.array(found["sampled_tokens"]), np.array(found["completion_tokens"])), found["limit"]


@functools.cache
def case_shape(name: str) -> Shape:
    model = CASES[name].model
    if not model:
        model = json.loads((TINY / "config.json").read_text())
    return Shape(f"case {name}", model["num_hidden_layers"], model["hidden_size"], model["num_attention_heads"],
                 model["num_key_value_heads"], model["head_dim"], model["intermediate_size"], model["vocab_size"],
                 True)  # fmt: skip


@functools.cache
def case_work(name: str) -> tuple[Work, dict[str, float]]:
    """Of a case's median step, and its tokens an episode: prompt, shared, sampled, completion."""
    case, side = CASES[name], document(f"step_vs_trl.{name}")["sides"]["ours"]
    steps = side["steps"][1:]
    per = {key: float(np.median([each[f"{key}_tokens"] for each in steps])) / case.episodes
           for key in ("prompt", "sampled", "completion")}  # fmt: skip
    per["shared"] = int(side["settings"]["packing"].split(", ")[1].split()[0])
    spread = [per["completion"]]
    if not case.forced:
        lengths, _ = measured_lengths()
        spread = lengths.completion * (per["completion"] / lengths.completion.mean())
    return work(case.groups, case.group_size, per["prompt"], per["shared"], spread, per["sampled"]), per


def scaling_shape() -> Shape:
    model = document("scaling")["model"]  # synthetic.write_model
    width = model["width"]
    return Shape("scaling", model["layers"], width, 4, 4, width // 4, 2 * width, model["vocab"], True)


def point_work(shape: dict[str, int]) -> Work:
    sampled = shape["turns"] * shape["turn_tokens"]
    completion = sampled + (shape["turns"] - 1) * REPLY_TOKENS
    return work(shape["groups"], shape["members"], shape["prompt"], shape["shared"], [completion], sampled)


def rollout_seconds(
    shape: Shape, machine: Machine, load: Work, episodes: int, common: float, own: float, forwards: float
) -> float:
    """Prefill of the prompts' unique tokens, then `forwards` forwards of all episodes over `own` keys each on average
    and, read once, the `common` ones of all prompts (grpo/engines/slots.py)."""
    rows = np.full(round(forwards), float(episodes))
    decode = decode_seconds(shape, machine, rows, common + rows * own)
    return prefill_seconds(shape, machine, load.prompts, load.prompts**2 / 2) + decode


def point_rollout(point: dict[str, Any], machine: Machine) -> float:
    shape = point["shape"]
    sampled, replies = shape["turns"] * shape["turn_tokens"], (shape["turns"] - 1) * REPLY_TOKENS
    common = shape["prompt"] if shape["groups"] == 1 else shape["shared"]
    own = shape["prompt"] - common + (sampled + replies) / 2
    episodes = shape["groups"] * shape["members"]
    return rollout_seconds(scaling_shape(), machine, point_work(shape), episodes, common, own, sampled)


def case_rollout(name: str, machine: Machine) -> float:
    case, (load, per) = CASES[name], case_work(name)
    own = per["prompt"] - per["shared"] + per["completion"] / 2
    forwards = per["sampled"] if case.forced else DRAFTED_FORWARDS
    return rollout_seconds(case_shape(name), machine, load, case.episodes, per["shared"], own, forwards)


def peak_bytes(shape: Shape, load: Work) -> float:
    """Of a process that trains in float32, one microbatch a step. Weights, moments and reference are always there; at
    the loss activations and of gradients the head's, at the end all gradients."""
    activations = load.unique * shape.size.activation_bytes_per_token(False, torch.float32)
    return PROCESS_BYTES + 16 * shape.parameters + max(4 * shape.head + activations, 4 * shape.parameters)


def measured_rollout(point: dict[str, Any]) -> float:
    return point["seconds_with_rollout"] - point["seconds"]


@functools.cache
def gemm_cases() -> list[dict[str, Any]]:
    """Cases of `linear_grpo_loss` in float32, with their rows by name."""
    (found,) = json.loads(KERNELS.read_text())["benchmarks"]
    cases = [case for case in found["cases"] if case["case"].endswith("fp32")]
    return [case | {"rows": {row["name"]: row for row in case["rows"]}} for case in cases]


def solve(f: Callable[[float], float], low: float, high: float, target: float) -> float:
    """Where a falling or rising `f` is `target`, to a part in a million."""
    rising = f(high) > f(low)
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if (f(middle) > target) == rising else (middle, high)
    return low


def calibrated() -> Machine:
    """The 2-core machine, from four figures in float32: its GEMM rate is that of three bare GEMMs of 1024 x 1024 x
    151936, its bandwidth makes a rollout of the 0.6B shape come out, what a layer and a row cost beside arithmetic two
    rollouts of the small model. The head's row kernel on a CPU reads a logit three times and writes it twice."""
    (head,) = [case for case in gemm_cases() if "D=1024" in case["case"]]
    points = {(p["sweep"], p["value"]): p for p in document("scaling")["points"] if not p["control"]}
    torch_engine = document("engines")["cases"][1]["engines"]["torch"]
    machine = Machine(
        "2-core AMD EPYC (Zen 4)", flops=1e12 * head["rows"]["bare GEMMs"]["tflops"], bandwidth=10e9, weight_bytes=4,
        logit_bytes=20, decode_seconds=0.0, row_seconds=0.0,
    )  # fmt: skip

    def bandwidth(value: float) -> Machine:
        return replace(machine, bandwidth=value)

    def layer(value: float) -> Machine:
        return replace(machine, layer_seconds=value, decode_layer_seconds=value)

    def row(value: float) -> Machine:
        return replace(machine, row_seconds=value)

    def of_point(point: dict[str, Any], rate: Callable[[float], Machine], value: float) -> float:
        return point_rollout(point, rate(value))

    for _ in range(5):  # they depend a little on each other
        found = solve(lambda x: case_rollout("c", bandwidth(x)), 1e8, 1e12, torch_engine["seconds"])
        machine = bandwidth(found)
        for point, rate in ((points[LAYER_POINT], layer), (points[ROW_POINT], row)):
            target = measured_rollout(point)
            machine = rate(solve(functools.partial(of_point, point, rate), 1e-8, 1.0, target))
    return machine


def comparisons(machine: Machine) -> list[Comparison]:
    """All that was measured and not used for `calibrated`."""
    found = []
    for case in gemm_cases():
        sizes = dict(part.split("=") for part in case["case"].split(",")[:3])
        tokens, width, vocab = (int(sizes[key]) for key in "NDV")
        head = Shape("head", 0, width, 1, 1, 1, 0, vocab, True)
        name = f"head, D={width}, V={vocab}"
        found.append(Comparison(name, "three GEMMs and rows", case["rows"]["ours torch"]["ms"] / 1e3,
                                head_seconds(head, machine, tokens, 3)))  # fmt: skip
    for name in "abc":
        shape, (load, _) = case_shape(name), case_work(name)
        side = document(f"step_vs_trl.{name}")["sides"]["ours"]
        predicted = {
            "rollout": case_rollout(name, machine),
            "reference": reference_seconds(shape, machine, load),
            "update": update_seconds(shape, machine, load) + adamw_seconds(shape, machine),
        }
        title = f"case {name}: {CASES[name].title}"
        if name == "c":  # its rollout is the one that the bandwidth is from, once more: not held out
            del predicted["rollout"]
            now = json.loads((RESULTS / "step_vs_trl.c.cpu.json").read_text())["sides"]["ours"]["peak_bytes"]
            found.append(Comparison(title, "peak memory", now, peak_bytes(shape, load)))
        found += [Comparison(title, phase, side["phases"][phase], seconds) for phase, seconds in predicted.items()]
        whole = "reference and update" if name == "c" else "whole step"
        measured = sum(side["phases"][phase] for phase in predicted)
        found.append(Comparison(title, whole, measured, sum(predicted.values())))
    shape = scaling_shape()
    for point in document("scaling")["points"]:
        load, name = point_work(point["shape"]), f"{point['sweep']} {point['value']}" + ", control" * point["control"]
        seconds = reference_seconds(shape, machine, load) + update_seconds(shape, machine, load)
        seconds += adamw_seconds(shape, machine)
        found.append(Comparison(name, "reference and update", point["seconds"], seconds))
        if (point["sweep"], point["value"]) not in (LAYER_POINT, ROW_POINT) or point["control"]:
            found.append(Comparison(name, "rollout", measured_rollout(point), point_rollout(point, machine)))
    return found


def describe(machine: Machine) -> str:
    return (f"{machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s, {1e3 * machine.layer_seconds:.2f} "
            f"ms a layer and forward, {1e3 * machine.row_seconds:.2f} ms an episode and forward")  # fmt: skip


def main() -> None:
    machine = calibrated()
    found = comparisons(machine)
    print(f"{describe(machine)}\n")
    print(markdown(["what", "phase", "measured", "predicted", "predicted / measured"],
                   [[c.what, c.phase, c.measured, c.predicted, c.ratio] for c in found]))  # fmt: skip
    finish({"benchmark": "cost_check", "machine": asdict(machine),
            "comparisons": [asdict(c) | {"ratio": c.ratio} for c in found]}, None)  # fmt: skip


if __name__ == "__main__":
    main()
