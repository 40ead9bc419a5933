"""The five ops as one would write them on a whiteboard: all logits at once, autograd for every gradient.

Tests, benchmarks and docs compare with these. Compute is in float32, or float64 for float64 inputs, whatever the dtype
of the inputs; the token objective is `grpo.loss.grpo_loss` itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo.config import LossConfig
from grpo.loss import grpo_loss
from grpo_kernels.objective import Objective, Tokens, TokenStats, each_tensor, token_terms


def wide(tensor: Tensor) -> Tensor:
    """float32, or float64 where it was float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def logprob_from_logits(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Op 4: log-prob of the target and entropy, [N] each, from logits [N, V]."""
    logprobs = torch.log_softmax(wide(logits) / temperature, dim=-1)  # [N, V]
    # A token of probability 0 (logit -inf) adds 0 to the entropy, not 0 * -inf.
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)  # [N]
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def linear_logprob_autograd(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Op 3: the same from hidden [N, D] and the head's weight [V, D]."""
    return logprob_from_logits(wide(hidden) @ wide(weight).T, targets, temperature)


@torch.no_grad()
def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Op 2: log-prob, entropy and log-sum-exp of logits / temperature, [N] each."""
    logits = wide(hidden) @ wide(weight).T  # [N, V]
    return *logprob_from_logits(logits, targets, temperature), torch.logsumexp(logits / temperature, dim=-1)


def grpo_token_loss(
    policy_logprobs: Tensor,
    entropy: Tensor | None,
    *,
    advantages: Tensor,
    token_weights: Tensor,
    config: LossConfig,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
) -> tuple[Tensor, TokenStats]:
    """Op 5: the loss by `grpo.loss.grpo_loss`, a token at a time, and the stats by the closed form."""
    Objective.of(config)
    old = policy_logprobs.detach() if old_logprobs is None else old_logprobs
    given = Tokens(
        advantages=advantages, token_weights=token_weights, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        sampler_logprobs=sampler_logprobs,
    )  # fmt: skip
    tokens = each_tensor(given, wide)
    loss, _ = grpo_loss(
        policy_logprobs=wide(policy_logprobs),
        old_logprobs=wide(old),
        advantages=tokens["advantages"],
        token_weights=tokens["token_weights"],
        episode_index=torch.arange(len(policy_logprobs), device=policy_logprobs.device),
        config=config,
        ref_logprobs=tokens["ref_logprobs"],
        sampler_logprobs=tokens["sampler_logprobs"],
        entropy=entropy,
    )
    entropy = None if entropy is None else wide(entropy.detach())
    stats, _, _ = token_terms(wide(policy_logprobs.detach()), entropy, objective=Objective.of(config), **tokens)
    return loss, stats


def linear_grpo_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, **of_loss: Any
) -> tuple[Tensor, TokenStats]:
    """Op 1: op 3, then op 5 with its keyword arguments."""
    return grpo_token_loss(*linear_logprob_autograd(hidden, weight, targets, temperature), **of_loss)
