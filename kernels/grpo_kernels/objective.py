"""The token objective in closed form: from a token's log-prob to its loss and to dL/dlogprob.

`grpo.loss.grpo_loss` is the definition; autograd differentiates it in `grpo_kernels.reference`. A kernel cannot call
autograd, so here is the derivative by hand, as the torch implementation and as the text that the Triton and CUDA row
kernels follow line by line.

With x = policy log-prob, r = exp(clamp(x - old, +-20)), w the token's weight, A its advantage and m its importance
weight, the loss of a token is

    L = w * ( -m * S + beta * KL - entropy_coef * H )

| surrogate S                              | dS/dx                                                              |
|------------------------------------------|--------------------------------------------------------------------|
| clip:  min(r A, clip(r) A)               | A r where r A <= clip(r) A (and r <= delta where A < 0), else 0    |
| cispo: sg[min(r, high)] A x              | min(r, high) A                                                     |
| sapo:  4/tau sigmoid(tau (r - 1)) A      | 4 g (1 - g) A r, g the sigmoid                                     |

| KL, d = ref - x, k3 = exp(d) - 1 - d     | dKL/dx                                                             |
|------------------------------------------|--------------------------------------------------------------------|
| k1: -d                                   | 1                                                                  |
| k2: d^2 / 2                              | -d                                                                 |
| k3 (d cut at 20)                         | -(exp(d) - 1), 0 beyond the cut                                    |
| k3_ratio: r k3                           | r k3 - r (exp(d) - 1)                                              |

Every r inside dS/dx has derivative r, but 0 where x - old left +-20.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, cast

import torch
from torch import Tensor

from grpo.config import LossConfig
from grpo.loss import MAX_LOG_RATIO, SAPO_TAU_NEGATIVE, SAPO_TAU_POSITIVE, clip_range, mismatch_weights


class Tokens(TypedDict):
    """What a loss takes of each token beside its log-prob, [N] each: the keyword arguments of the fused ops."""

    advantages: Tensor
    token_weights: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    sampler_logprobs: Tensor | None


def each_tensor(tokens: Tokens, change: Callable[[Tensor], Tensor]) -> Tokens:
    """`change` of every tensor that is there; what is None stays None."""
    tensors = cast("dict[str, Tensor | None]", tokens)
    return cast(Tokens, {name: None if tensor is None else change(tensor) for name, tensor in tensors.items()})


# Bits of `TokenStats.clipped`.
CLIP_LOW, CLIP_HIGH, CLIP_DUAL = 1, 2, 4


class TokenStats(NamedTuple):
    """What a fused op tells about each token, detached, [N] float32 (float64 for float64 inputs) unless said.

    A token of weight 0 has ratio 1 and 0 everywhere else.
    """

    loss: Tensor
    """The token's term of the loss, its weight included: the loss is the sum."""
    logprobs: Tensor
    """Log-prob of the target, nats, at most 0."""
    entropy: Tensor
    """Entropy of the temperature-scaled distribution, nats."""
    ratio: Tensor
    """policy / old, exactly 1 where old is the policy itself."""
    kl: Tensor
    """k3 estimate of KL(policy || reference) whatever estimator the loss uses; 0 without a reference."""
    surrogate: Tensor
    """S, without importance weight."""
    mismatch_weight: Tensor
    """The limited importance weight m; 1 with `mismatch="none"`."""
    clipped: Tensor
    """int32 bits: CLIP_LOW (r below the range, A < 0), CLIP_HIGH (above, A > 0), CLIP_DUAL (r > delta, A < 0)."""


@dataclass(frozen=True)
class Objective:
    """A `LossConfig` reduced to what a kernel needs: names resolved, defaults filled in, no None."""

    surrogate: str  # clip | cispo | sapo
    kl_estimator: str  # none | k1 | k2 | k3 | k3_ratio; none: no KL term in the loss
    mismatch: str  # none | token_clip | token_mask
    ratio_low: float
    ratio_high: float
    delta: float  # inf without dual clip
    tau_positive: float
    tau_negative: float
    beta: float
    entropy_coef: float
    mismatch_cap: float

    @classmethod
    def of(cls, config: LossConfig) -> Objective:
        """Raises ValueError, with the reason of `unsupported`, for a loss that needs whole episodes."""
        reason = unsupported(config)
        if reason:
            raise ValueError(f"not a per-token loss: {reason}; use linear_logprob_autograd and grpo.loss.grpo_loss")
        low, high = clip_range(config)
        in_loss = bool(config.beta) and config.kl_in == "loss"
        return cls(
            surrogate=config.loss_type if config.loss_type in ("cispo", "sapo") else "clip",
            kl_estimator=config.kl_estimator if in_loss else "none",
            mismatch=config.mismatch,
            ratio_low=low,
            ratio_high=high,
            delta=math.inf if config.delta is None else config.delta,
            tau_positive=SAPO_TAU_POSITIVE,
            tau_negative=SAPO_TAU_NEGATIVE,
            beta=config.beta,
            entropy_coef=config.entropy_coef,
            mismatch_cap=config.mismatch_cap,
        )


def unsupported(config: LossConfig) -> str | None:
    """Why ops 1 and 5 cannot compute this loss, or None. They see a token at a time."""
    if config.loss_type == "gspo":
        return "loss_type gspo uses one ratio for a whole episode"
    if config.mismatch == "sequence_mask":
        return "mismatch sequence_mask uses one weight for a whole episode"
    return None


def token_terms(
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    advantages: Tensor,
    token_weights: Tensor,
    objective: Objective,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
) -> tuple[TokenStats, Tensor, Tensor]:
    """The table of the module docstring. All inputs [N], one floating dtype, without gradients.

    Returns:
        the stats; dL/dlogprob [N]; dL/dentropy [N]. Both derivatives are exactly 0 for a token of weight 0.
    """
    trained = token_weights != 0  # [N] bool
    zero = logprobs.new_zeros(())
    # Untrained tokens are zeroed before exp, never multiplied away after it: 0 * inf is NaN.
    logprobs, advantages = torch.where(trained, logprobs, zero), torch.where(trained, advantages, zero)
    entropy = zero.expand_as(logprobs) if entropy is None else torch.where(trained, entropy, zero)
    old = logprobs if old_logprobs is None else torch.where(trained, old_logprobs, zero)

    log_ratio = logprobs - old if old_logprobs is not None else torch.zeros_like(logprobs)  # [N]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # [N]
    ratio_slope = torch.where(log_ratio.abs() <= MAX_LOG_RATIO, ratio, zero)  # dr/dx [N]

    if objective.surrogate == "cispo":
        truncated = ratio.clamp(max=objective.ratio_high)
        surrogate, slope = truncated * advantages * logprobs, truncated * advantages
    elif objective.surrogate == "sapo":
        tau = torch.full_like(advantages, objective.tau_negative).masked_fill(advantages > 0, objective.tau_positive)
        gate = torch.sigmoid(tau * (ratio - 1))
        surrogate, slope = 4 / tau * gate * advantages, 4 * gate * (1 - gate) * advantages * ratio_slope
    else:
        capped = torch.where(advantages < 0, ratio.clamp(max=objective.delta), ratio)
        inside, outside = capped * advantages, ratio.clamp(objective.ratio_low, objective.ratio_high) * advantages
        surrogate = torch.minimum(inside, outside)
        moves = (inside <= outside) & ((advantages >= 0) | (ratio <= objective.delta))
        slope = torch.where(moves, advantages * ratio_slope, zero)

    weight = torch.ones_like(logprobs)
    if sampler_logprobs is not None and objective.mismatch != "none":
        log_weights = old - torch.where(trained, sampler_logprobs, zero)
        weight = mismatch_weights(log_weights, objective.mismatch, objective.mismatch_cap)
        weight = torch.where(trained, weight, 1)
    loss, grad = -weight * surrogate, -weight * slope

    kl = zero.expand_as(logprobs)
    if ref_logprobs is not None:
        gap = torch.where(trained, ref_logprobs, zero) - logprobs  # d [N]
        cut = gap.clamp(max=MAX_LOG_RATIO)
        kl, k3_slope = torch.expm1(cut) - cut, torch.where(gap <= MAX_LOG_RATIO, -torch.expm1(cut), zero)
        estimators: dict[str, Callable[[], tuple[Tensor | int, Tensor | int]]] = {
            "none": lambda: (0, 0),
            "k1": lambda: (-gap, 1),
            "k2": lambda: (0.5 * gap * gap, -gap),
            "k3": lambda: (kl, k3_slope),
            "k3_ratio": lambda: (ratio * kl, ratio_slope * kl + ratio * k3_slope),
        }
        value, kl_slope = estimators[objective.kl_estimator]()
        loss, grad = loss + objective.beta * value, grad + objective.beta * kl_slope
    loss = loss - objective.entropy_coef * entropy

    clipped = CLIP_LOW * ((ratio < objective.ratio_low) & (advantages < 0)).int()
    clipped += CLIP_HIGH * ((ratio > objective.ratio_high) & (advantages > 0)).int()
    clipped += CLIP_DUAL * ((ratio > objective.delta) & (advantages < 0)).int()
    # where, not a product alone: a token of weight 0 is 0 even where its inputs were NaN.
    loss, grad = (torch.where(trained, token_weights * each, zero) for each in (loss, grad))
    stats = TokenStats(loss, logprobs, entropy, ratio, kl.clone(), surrogate, weight, clipped)
    return stats, grad, -objective.entropy_coef * token_weights
