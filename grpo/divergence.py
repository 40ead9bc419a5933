"""How far a trained model has moved from its base: `python -m grpo.divergence runs/NAME/final --base tiny`.

Plays held-out scenarios with the trained model at temperature 1 and reports the mean KL(trained || base) per sampled
token, in nats, by the k3 estimator: the `kl` of `log_history.json`, also for runs with beta 0, which load no base.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from grpo.advantages import token_weights
from grpo.batching import Packing, make_microbatches
from grpo.config import Config, RolloutConfig, UsageError, tyro_cli
from grpo.console import run_entry, user_input
from grpo.engines.choice import make_engine
from grpo.head import score
from grpo.loss import kl_divergence
from grpo.model import load_policy
from grpo.rollout import rollout
from grpo.run import make_chat
from grpo.run_folder import write_json
from scenarios.generator import held_out


@dataclass(frozen=True)
class Arguments:
    """Mean KL of a trained model to its base, in nats per sampled token."""

    model: Annotated[str, tyro.conf.Positional]
    """Trained model folder."""
    base: str = "tiny"
    """What it was trained from."""
    limit: int = 50
    """Held-out scenarios to play."""
    max_completion_len: int = RolloutConfig.max_completion_len
    """Tokens of an episode after its first prompt, replies included."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the number as JSON, with what it was measured on, to this file."""


@torch.no_grad()
def divergence(
    model: str,
    base: str,
    limit: int,
    max_completion_len: int = RolloutConfig.max_completion_len,
    device: str = "auto",
) -> float:
    """Mean k3 estimate over the tokens that `model` samples on `limit` held-out scenarios."""
    settings = Config().with_values({"model": model, "device": device, "max_completion_len": max_completion_len})
    trained, reference = load_policy(settings.model), load_policy(settings.with_values({"model": base}).model)
    chat, scenarios = make_chat(trained), held_out(limit)
    groups = rollout(
        make_engine(settings, trained, chat, scenarios, training=False),
        chat,
        scenarios,
        num_generations=1,
        max_completion_len=settings.rollout.max_completion_len,
        step=0,
        reward_fn=lambda record: 0.0,
    )
    episodes = [group.episodes[0] for group in groups]
    weights = token_weights([e.num_trained for e in episodes], "bnpo", 1, [True] * len(episodes))
    total = 0.0
    for batch in make_microbatches(episodes, weights, max_tokens=4096, packing=Packing(packed=False)):
        batch = batch.to(trained.device)
        logprobs, ref_logprobs = (score(policy, batch)[0] for policy in (trained, reference))
        k3 = kl_divergence(logprobs, ref_logprobs, "k3", torch.ones_like(logprobs))
        total += float((k3 * batch.token_weights).sum())
    return total


def main() -> None:
    """Print the divergence."""
    args = tyro_cli(Arguments, sys.argv[1:], prog="python -m grpo.divergence")
    for name in ("limit", "max_completion_len"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    kl = divergence(args.model, args.base, args.limit, args.max_completion_len, args.device)
    print(f"KL({args.model} || {args.base}) = {kl:.4f} nats per token")
    if args.output:
        measured_on = {"limit": args.limit, "max_completion_len": args.max_completion_len}
        with user_input(f"--output {args.output}"):
            write_json(args.output, {"model": args.model, "base": args.base, "kl": kl} | measured_on)


if __name__ == "__main__":
    run_entry(main)
