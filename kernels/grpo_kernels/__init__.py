"""Fused log-prob and GRPO loss ops: see `kernels/README.md`."""

from grpo_kernels.dispatch import IMPLEMENTATIONS, OPS, resolve, why_not
from grpo_kernels.grpo_token_loss import grpo_token_loss
from grpo_kernels.linear_grpo_loss import linear_grpo_loss
from grpo_kernels.linear_logprob import linear_logprob, linear_logprob_autograd
from grpo_kernels.logprob_from_logits import logprob_from_logits
from grpo_kernels.objective import CLIP_DUAL, CLIP_HIGH, CLIP_LOW, TokenStats, unsupported

__all__ = [
    "CLIP_DUAL", "CLIP_HIGH", "CLIP_LOW", "IMPLEMENTATIONS", "OPS", "TokenStats", "grpo_token_loss",
    "linear_grpo_loss", "linear_logprob", "linear_logprob_autograd", "logprob_from_logits", "resolve", "unsupported",
    "why_not",
]  # fmt: skip
