"""How far a trained model has moved from its base: `python -m grpo.divergence runs/NAME/final --base tiny`.

Plays held-out scenarios with the trained model at temperature 1 and reports the mean KL(trained || base) per sampled
token, in nats, by the k3 estimator: the `kl` of `log_history.json`, also for runs with beta 0, which load no base.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from grpo.advantages import token_weights
from grpo.batching import Packing, make_microbatches
from grpo.config import Config, tyro_cli
from grpo.console import run_entry
from grpo.head import score
from grpo.loss import kl_divergence
from grpo.model import load_policy
from grpo.rollout import rollout
from grpo.run import make_chat, make_engine
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


@torch.no_grad()
def divergence(model: str, base: str, limit: int) -> float:
    """Mean k3 estimate over the tokens that `model` samples on `limit` held-out scenarios."""
    settings = Config().with_values({"model": model})
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
    print(f"KL({args.model} || {args.base}) = {divergence(args.model, args.base, args.limit):.4f} nats per token")


if __name__ == "__main__":
    run_entry(main)
