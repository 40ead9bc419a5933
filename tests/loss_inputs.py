"""Inputs of the loss for its tests, and one call that returns loss, gradient and metrics."""

from typing import get_args

import torch

from grpo.advantages import token_weights
from grpo.config import KLEstimator, LossConfig, LossType
from grpo.loss import grpo_loss

LOSS_TYPES, KL_ESTIMATORS = get_args(LossType), get_args(KLEstimator)
CLIPPED = ["grpo", "bnpo", "dapo", "dr_grpo"]


def vector(*values: float) -> torch.Tensor:
    """[N] float64."""
    return torch.tensor(values, dtype=torch.float64)


def run(config: LossConfig, policy, old, advantages, weights=None, episodes=None, **tensors):
    """Loss, gradient with respect to the policy's log-probs, and metrics as floats."""
    policy = policy.clone().requires_grad_()
    n = len(policy)
    loss, metrics = grpo_loss(
        policy_logprobs=policy,
        old_logprobs=old,
        advantages=advantages,
        token_weights=torch.ones(n, dtype=policy.dtype) if weights is None else weights,
        episode_index=torch.zeros(n, dtype=torch.int64) if episodes is None else episodes,
        config=config,
        **tensors,
    )
    loss.backward()
    return loss.detach(), policy.grad, {key: float(value) for key, value in metrics.items()}


def random_inputs(seed=0, counts=(3, 1, 5), dtype=torch.float64, gap=0.5) -> dict[str, torch.Tensor]:
    """Log-probs of three episodes with gaps of either sign, advantages of either sign, weights as in grpo."""
    generator = torch.Generator().manual_seed(seed)
    episodes = torch.repeat_interleave(torch.tensor([4, 0, 2])[: len(counts)], torch.tensor(counts))
    n = len(episodes)

    def noise(scale):
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    policy = -1.5 - noise(0.5).abs()
    weights = token_weights(counts, "grpo", 8, [True] * len(counts))
    inputs = {
        "policy_logprobs": policy,
        "old_logprobs": policy + noise(gap),
        "ref_logprobs": policy + noise(gap),
        "sampler_logprobs": policy + noise(gap),
        "entropy": noise(1.0).abs(),
        "advantages": torch.tensor([1.1, -0.7, 0.0, 0.3, -1.2])[episodes].double(),
        "token_weights": torch.repeat_interleave(torch.tensor(weights, dtype=torch.float64), torch.tensor(counts)),
    }
    inputs = {key: value.to(dtype) for key, value in inputs.items()}
    return inputs | {"episode_index": episodes}
