"""What the invariants of a step cost.

    python benchmarks/invariants.py

Whole steps of a recipe (`grpo.trainer.Trainer.step`), in which every check of `grpo.invariants` runs under a timer of
its own. What is compared is CPU time of this process, not the clock: other processes then change nothing but the
caches. The timers' own cost counts as the checks', and what a run does between its steps (log, files) is left out of
the step, so the share is an upper bound. On a GPU the step is taken by the clock, as the CPU mostly waits.

Prints a markdown table and, as the last line, JSON.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import tyro
from table import finish, machine, markdown, one_line_errors, say

from grpo import invariants, trainer
from grpo.config import RECIPES, Config, UsageError, tyro_cli
from grpo.engines import Engine
from grpo.metrics import step_metrics
from grpo.run import make_trainer

GOAL = 0.02  # of a step
WARM_UP = 2  # steps
CHECKS = ("audit_groups", "audit_batches", "audit_update", "all_finite")  # as `grpo.trainer` calls them


@dataclass(frozen=True)
class Arguments:
    """What the invariants of a step cost."""

    recipe: Literal["tiny", "clarify-run4", "clarify-run1"] = "tiny"
    """Settings of the steps."""
    model: str = ""
    """Instead of the recipe's."""
    steps: int = 12
    """Measured steps, after two of warm-up."""
    threads: int = 1
    """CPU threads."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Short episodes: does everything run?"""
    json: Path | None = None
    """Also write the JSON document to this file."""


class Timers:
    """CPU seconds of each check in the step at hand."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable) -> Callable:
        """`function`, its CPU time booked under `name`."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.book(name, time.thread_time() - start)

        return wrapper

    def book(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class TimedWitness(invariants.Witness):
    """A witness that books what it adds to the engine's own time."""

    timers: Timers

    def step(self) -> Any:
        engine, inner = self.engine, [0.0]

        class Stand:
            @staticmethod
            def step() -> Any:
                start = time.thread_time()
                outputs = engine.step()
                inner[0] = time.thread_time() - start
                return outputs

        self.engine = cast(Engine, Stand)
        start = time.thread_time()
        outputs = super().step()
        self.timers.book("witness", time.thread_time() - start - inner[0])
        self.engine = engine
        return outputs


def measure(args: Arguments) -> tuple[list[dict[str, Any]], Config]:
    """One row a step: its CPU and clock seconds, and those of each check."""
    values = RECIPES[args.recipe] | {"device": args.device, "recipe": args.recipe}
    if args.model:
        values["model"] = args.model
    if args.smoke:
        values |= {"max_completion_len": 40, "num_generations": 2}
    config = Config().with_values(values)
    timers = Timers()
    for name in CHECKS:
        setattr(trainer, name, timers.timed(name, getattr(trainer, name)))
    TimedWitness.timers = timers
    setattr(trainer, "Witness", TimedWitness)  # noqa: B010 (a class of the module, replaced on purpose)
    alarms = timers.timed("alarms", invariants.alarms)
    bad_steps = timers.timed("bad_steps", invariants.bad_steps)
    each, _ = make_trainer(config)
    limit = invariants.gap_limit(config, each.policy.dtype, in_process=True)
    rows, log = [], []
    for step in range(WARM_UP + args.steps):
        say(f"step {step + 1} of {WARM_UP + args.steps}")
        timers.seconds = {}
        cpu, clock = time.process_time(), time.perf_counter()
        result = each.step(step)
        if each.policy.device.type == "cuda":
            torch.cuda.synchronize()
        cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
        log.append(step_metrics(result.groups, step=step + 1, losses=result.losses, seconds=result.seconds))
        bad_steps(log)
        alarms(log, config, limit)
        if step >= WARM_UP:
            lengths = [len(episode.completion_ids) for group in result.groups for episode in group.episodes]
            rows.append({"cpu": cpu, "clock": clock, "checks": timers.seconds, "episodes": len(lengths),
                         "tokens": sum(lengths)})  # fmt: skip
    return rows, config


def run(args: Arguments) -> dict[str, Any]:
    """Measure. Returns the JSON document. Raises UsageError."""
    for name, most in (("steps", 10_000), ("threads", 1024)):
        if not 1 <= getattr(args, name) <= most:
            raise UsageError(f"--{name} {getattr(args, name)}: must be between 1 and {most}")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA device")
    torch.set_num_threads(args.threads)
    rows, config = measure(args)
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    whole = "clock" if device == "cuda" else "cpu"
    names = [*CHECKS, "witness", "bad_steps", "alarms"]
    seconds = {name: statistics.median(row["checks"].get(name, 0.0) for row in rows) for name in names}
    shares = [sum(row["checks"].values()) / row[whole] for row in rows]
    return {
        "benchmark": "invariants",
        "machine": machine(device, args.threads),
        "torch": torch.__version__,
        "recipe": args.recipe,
        "model": config.model.model,
        "step_of": whole,
        "step_seconds": statistics.median(row[whole] for row in rows),
        "check_seconds": seconds,
        "share": statistics.median(shares),
        "largest_share": max(shares),
        "goal": GOAL,
        "met": max(shares) < GOAL,
        "steps": rows,
    }


def show(document: dict[str, Any]) -> None:
    about, whole = document["machine"], document["step_seconds"]
    first = document["steps"][0]
    print(f"\n## What the invariants of a step cost\n\n{about['name']}, {about['threads']} threads, device "
          f"{about['device']}, torch {document['torch']}; commit {about['commit']}\n\nRecipe {document['recipe']} "
          f"({document['model']}), {len(document['steps'])} steps of {first['episodes']} episodes; medians, "
          f"{'the clock' if document['step_of'] == 'clock' else 'CPU time'}.\n")  # fmt: skip
    rows = [[name, f"{1e3 * seconds:.3f}", f"{seconds / whole:.3%}"]
            for name, seconds in document["check_seconds"].items()]  # fmt: skip
    total = sum(document["check_seconds"].values())
    rows += [["all", f"{1e3 * total:.3f}", f"{document['share']:.3%}"], ["step", f"{1e3 * whole:.1f}", ""]]
    print(markdown(["", "ms", "share of the step"], rows))
    print(f"\n- goal: under {document['goal']:.0%} of every step: at most {document['largest_share']:.3%}, "
          f"{'met' if document['met'] else 'MISSED'}")  # fmt: skip


def main(argv: list[str]) -> None:
    """Exit codes: 0; 2 for bad input, with one line on stderr."""
    with one_line_errors():
        args = tyro_cli(Arguments, argv, prog="invariants.py", description=__doc__.splitlines()[0])
        document = run(args)
    show(document)
    finish(document, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
