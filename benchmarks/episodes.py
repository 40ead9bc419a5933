"""How long episodes are: turns and tokens of many rollout batches of the bundled policy, before any training.

    python benchmarks/episodes.py --json benchmarks/results/episodes.cpu.json

`cost_model.py` takes the spread of lengths from there: a rollout lasts as long as its longest episode. Prints a table
of quantiles and, as the last line, JSON.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from cases import CASES, TINY
from side_ours import make_trainer
from table import finish, machine, markdown, one_line_errors, say

from grpo.config import UsageError, tyro_cli

QUANTILES = (0.1, 0.5, 0.9, 0.99, 1.0)
COUNTS = ("turns", "sampled_tokens", "completion_tokens")


@dataclass(frozen=True)
class Arguments:
    """How long episodes are: turns and tokens of many rollout batches of the bundled policy."""

    batches: int = 64
    """Rollout batches of 24 episodes."""
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One batch: does everything run?"""
    json: Path | None = None
    """Also write the JSON document to this file."""


def run(args: Arguments) -> dict[str, Any]:
    """Play the batches. Returns the JSON document. Raises UsageError."""
    if not 1 <= args.batches <= 10_000:
        raise UsageError(f"--batches {args.batches}: must be between 1 and 10000")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist")
    case = CASES["b"]
    trainer = make_trainer(case, str(TINY), "cpu")
    found: dict[str, list[int]] = {name: [] for name in COUNTS}
    batches = 1 if args.smoke else args.batches
    for step in range(batches):
        for group in trainer.sample_groups(step):
            found["turns"] += [len(episode.turns) for episode in group.episodes]
            found["sampled_tokens"] += [episode.num_trained for episode in group.episodes]
            found["completion_tokens"] += [len(episode.completion_ids) for episode in group.episodes]
        if step % 8 == 7:
            say(f"batch {step + 1}/{batches}")
    return {
        "benchmark": "episodes",
        "machine": machine("cpu", torch.get_num_threads()),
        "torch": torch.__version__,
        "limit": case.completion,
        "batch": case.episodes,
        **found,
    }


def show(document: dict[str, Any]) -> None:
    print(f"\n## {len(document['turns'])} episodes of the bundled policy, at most {document['limit']} tokens each\n")
    header = ["", "mean", *(f"{q:.0%}" for q in QUANTILES)]
    rows = [[name.replace("_", " "), float(np.mean(document[name])), *np.quantile(document[name], QUANTILES).tolist()]
            for name in COUNTS]  # fmt: skip
    print(markdown(header, rows))


def main(argv: list[str]) -> None:
    """Exit codes: 0; 2 for bad input, with one line on stderr."""
    with one_line_errors():
        args = tyro_cli(Arguments, argv, prog="episodes.py", description=__doc__.splitlines()[0])
        document = run(args)
    show(document)
    finish(document, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
