"""One GRPO step of ours beside one of TRL's GRPOTrainer: time by phase, and peak memory of each.

    python benchmarks/step_vs_trl.py --case a --trl-python PATH

Both sides load the same model folder and play the same scenarios in groups of the same size, with the same token
budget and one optimiser step a round. Each runs in a process of its own, in its own environment, and is asked for a
step at a time, so that the rounds interleave. The first round warms both up and is not counted where there are more.

Prints markdown tables and, as the last line, JSON: `step_time_ratio` and `peak_memory_ratio` are theirs / ours.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
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

PHASES = ("rollout", "reference", "update")
INSTALL = 'pip install "trl==1.16.*" accelerate datasets'


@dataclass(frozen=True)
class Arguments:
    """One GRPO step of ours beside one of TRL's: time by phase, peak memory."""

    case: Literal["a", "b", "c"] = "a"
    """a: 2 layers, V=151936, forced 128 tokens; b: tiny policy, multi-turn episodes; c: Qwen3-0.6B's shape, as a."""
    rounds: int = 6
    """Steps of each side, the first of which is a warm-up (counted only where it is the only one)."""
    threads: int | None = None
    """CPU threads of each side. Default: one a core."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    trl_python: str = sys.executable
    """Interpreter of an environment that has trl."""
    trl_batch: int = 0
    """Episodes of TRL's per-device batch; 0: all of a step in one. Smaller ones are accumulated to the same step."""
    trl_checkpointing: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """TRL with gradient checkpointing."""
    order: Literal["auto", "rounds", "sides"] = "auto"
    """rounds: interleaved. sides: all of ours, then all of theirs, where both do not fit into memory at once."""
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A tiny model, few tokens: does everything run?"""
    json: Path | None = None
    """Also write the JSON document to this file."""


def check(args: Arguments, case: Case) -> str:
    """The device both sides use. Raises UsageError."""
    if not 1 <= args.rounds <= 1000:
        raise UsageError(f"--rounds {args.rounds}: must be between 1 and 1000")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads {args.threads}: must be at least 1")
    if args.trl_batch < 0 or args.trl_batch and case.episodes % args.trl_batch:
        raise UsageError(f"--trl-batch {args.trl_batch}: must divide the {case.episodes} episodes of a step")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist")
    try:
        found = subprocess.run(
            [args.trl_python, "-c", "import importlib.util as u; print(u.find_spec('trl') is not None)"],
            capture_output=True, text=True,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"--trl-python {args.trl_python}: {error.strerror}") from None
    if found.stdout.strip() != "True":
        raise UsageError(f"trl is not installed there: {args.trl_python} -m {INSTALL}")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA device")
    return "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"


def interleave(args: Arguments, folder: Path, device: str) -> bool:
    """Whether both sides fit into memory at once. Each holds about five copies of the weights between two steps
    (policy, reference, gradients, two moments), and the step in progress needs memory too."""
    if args.order != "auto":
        return args.order == "rounds"
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if device == "cuda":
        import torch

        available = torch.cuda.mem_get_info()[0]
    else:
        lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
        available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 1 << 62)
    return 2 * 5 * weights < 0.5 * available


def start(name: str, args: Arguments, settings: dict[str, Any]) -> Side:
    script = {"ours": "side_ours.py", "trl": "side_trl.py"}[name]
    python = {"ours": sys.executable, "trl": args.trl_python}[name]
    say(f"{name}: starting")
    return Side(name, python, script, settings, settings["threads"])


def ask(side: Side, number: int, rounds: int) -> None:
    """Step `number`, unless the side has died."""
    if side.died:
        return
    say(f"{side.name}: step {number + 1}/{rounds}")
    result = side.step()
    outcome = f"{result['seconds']:.2f} s" if result else f"died: {side.died}"
    say(f"{side.name}: step {number + 1}/{rounds}: {outcome}")


def alone(name: str, args: Arguments, settings: dict[str, Any]) -> Side:
    """All rounds of one side."""
    with start(name, args, settings) as side:
        for number in range(args.rounds):
            ask(side, number, args.rounds)
    return side


def easier(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The settings with which TRL needs less memory next: half as many episodes at once (accumulated to the same
    step), at last gradient checkpointing. None: nothing left to try."""
    rows = settings["trl_batch"] or settings["case"]["groups"] * settings["case"]["group_size"]
    if rows % 2 == 0:
        return settings | {"trl_batch": rows // 2}
    return None if settings["trl_checkpointing"] else settings | {"trl_checkpointing": True}


def play(args: Arguments, settings: dict[str, Any], interleaved: bool) -> tuple[dict[str, Side], list[str]]:
    """All rounds; a side that died is left out from then on. Where TRL's was killed before it finished a step, it is
    run again, alone, with settings that need less memory. Returns the sides and what became of such attempts."""
    attempts: list[str] = []
    if interleaved:
        with start("ours", args, settings) as ours, start("trl", args, settings) as theirs:
            for number in range(args.rounds):
                for side in (ours, theirs) if number % 2 == 0 else (theirs, ours):
                    ask(side, number, args.rounds)
    else:
        ours, theirs = alone("ours", args, settings), alone("trl", args, settings)
    while theirs.died and not theirs.steps and ("memory" in theirs.died.lower()) and (smaller := easier(settings)):
        settings = smaller
        attempts.append(f"died in its first step with at least {theirs.peak_seen / 1e6:.0f} MB: {theirs.died[:200]}")
        say(f"trl: again, with {settings['trl_batch'] or 'all'} episodes at once"
            + (" and gradient checkpointing" if settings["trl_checkpointing"] else ""))  # fmt: skip
        theirs = alone("trl", args, settings)
    return {"ours": ours, "trl": theirs}, attempts


def summary(side: Side) -> dict[str, Any]:
    """Medians over the counted steps, and everything raw."""
    steps = counted(side.steps)
    return {
        "seconds": median([step["seconds"] for step in steps]),
        "phases": {name: median([step["phases"][name] for step in steps]) for name in PHASES},
        "peak_bytes": side.peak,
        "resident_bytes": side.about.get("resident_bytes"),
        "sampled_tokens": median([step["sampled_tokens"] for step in steps]),
        "completion_tokens": median([step["completion_tokens"] for step in steps]),
        "turns": median([step["turns"] for step in steps]),
        "ms_per_sampled_token": median([1e3 * step["seconds"] / step["sampled_tokens"] for step in steps]),
        "counted_steps": len(steps),
        "warm_up_counted": len(side.steps) == 1,
        "died": side.died or None,
        "versions": side.about.get("versions", {}),
        "settings": side.about.get("settings", {}),
        "steps": side.steps,
    }


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float | None]:
    """Theirs / ours: the median of the ratios within a round; per sampled token too, as turns may differ."""
    pairs = list(zip(counted(ours["steps"]), counted(theirs["steps"])))
    pairs = pairs if len(ours["steps"]) > 1 and len(theirs["steps"]) > 1 else list(zip(ours["steps"], theirs["steps"]))
    tokens = [
        (b["seconds"] / b["sampled_tokens"]) / (a["seconds"] / a["sampled_tokens"]) for a, b in pairs
    ]  # fmt: skip
    memory = (ours["peak_bytes"], theirs["peak_bytes"])
    return {
        "step_time_ratio": median([b["seconds"] / a["seconds"] for a, b in pairs]),
        "step_time_per_sampled_token_ratio": median(tokens),
        "rollout_time_ratio": median([b["phases"]["rollout"] / a["phases"]["rollout"] for a, b in pairs]),
        "rest_time_ratio": median(
            [(b["seconds"] - b["phases"]["rollout"]) / (a["seconds"] - a["phases"]["rollout"]) for a, b in pairs]
        ),
        "peak_memory_ratio": memory[1] / memory[0] if all(memory) else None,
    }


def show(document: dict[str, Any]) -> None:
    case, sides = document["case"], document["sides"]
    print(f"\n## A step of ours and of TRL, case {case['name']}: {case['title']}\n")
    about = document["machine"]
    length = f"{case['completion']} tokens" if case["forced"] else f"at most {case['completion']} tokens"
    prompts = [step["prompt_tokens"] // (case["groups"] * case["group_size"])
               for side in sides.values() for step in side["steps"][:1]]  # fmt: skip
    print(f"{about['name']}, {about['threads']} threads, device {about['device']}; commit {about['commit']}\n")
    print(f"- {case['groups']} groups of {case['group_size']} episodes of {length} behind prompts of about "
          f"{prompts[0] if prompts else '?'} tokens; {document['order']}\n"
          f"- same prompts on both sides: {document['same_prompts']}")  # fmt: skip
    for name, side in sides.items():
        versions = ", ".join(f"{package} {version}" for package, version in side["versions"].items())
        print(f"- {name}: {versions}; {', '.join(f'{key} {value}' for key, value in side['settings'].items())}")
    rows = []
    for name, side in sides.items():
        mb = [side[key] and side[key] / 1e6 for key in ("peak_bytes", "resident_bytes")]
        rows.append([name, side["seconds"], *side["phases"].values(), side["ms_per_sampled_token"],
                     side["sampled_tokens"], side["completion_tokens"], side["turns"], *mb,
                     side["counted_steps"]])  # fmt: skip
    print()
    header = ["side", "step s", "rollout s", "reference s", "update s", "ms per sampled token", "sampled tokens",
              "completion tokens", "turns", "peak MB", "MB before the first step", "steps counted"]  # fmt: skip
    print(markdown(header, rows))
    print()
    for name in ("step_time_ratio", "step_time_per_sampled_token_ratio", "rollout_time_ratio", "rest_time_ratio",
                 "peak_memory_ratio"):  # fmt: skip
        value = document[name]
        print(f"- {name.replace('_', ' ')} (theirs / ours): {'-' if value is None else f'{value:.2f}'}")
    for attempt in document["failed_attempts"]:
        print(f"- an earlier attempt of trl {attempt}; its settings were then changed to those shown")
    for name, side in sides.items():
        if side["died"]:
            print(f"- {name} DIED after {len(side['steps'])} finished steps, which are what is compared: "
                  f"{side['died'][:300]}")  # fmt: skip
        if side["warm_up_counted"]:
            print(f"- {name}: the only step is the warm-up, and is counted")


def compare(args: Arguments, case: Case, device: str) -> dict[str, Any]:
    """Run both sides. Returns the JSON document."""
    threads = args.threads or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        say("writing the model")
        model = make_model(case, Path(folder))
        settings = dict(case=dataclasses.asdict(case), model=str(model), device=device, threads=threads,
                        steps=args.rounds, trl_batch=args.trl_batch,
                        trl_checkpointing=args.trl_checkpointing)  # fmt: skip
        interleaved = interleave(args, Path(model), device)
        began = time.perf_counter()
        played, attempts = play(args, settings, interleaved)
        sides = {name: summary(side) for name, side in played.items()}
    pairs = list(zip(sides["ours"]["steps"], sides["trl"]["steps"]))
    return {
        "benchmark": "step_vs_trl",
        **ratios(sides["ours"], sides["trl"]),
        "case": dataclasses.asdict(case),
        "order": "rounds interleaved" if interleaved else "all rounds of ours, then all of TRL's",
        "same_prompts": bool(pairs) and all(a["prompts_crc"] == b["prompts_crc"] for a, b in pairs),
        "machine": machine(device, threads),
        "versions_here": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "wall_seconds": time.perf_counter() - began,
        "failed_attempts": attempts,
        "sides": sides,
    }


def main(argv: list[str]) -> None:
    """Exit codes: 0; 1 where our side died; 2 for bad input or no trl, with one line on stderr."""
    with one_line_errors():
        args = tyro_cli(Arguments, argv, prog="step_vs_trl.py", description=__doc__.splitlines()[0])
        case = smoke(CASES[args.case]) if args.smoke else CASES[args.case]
        device = check(args, case)
        document = compare(args, case, device)
    show(document)
    finish(document, args.json)
    if document["sides"]["ours"]["died"]:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
