"""Op 5: the elementwise GRPO loss on log-probs, forward and backward at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo.config import LossConfig
from grpo_kernels import reference
from grpo_kernels.checks import check_sampler, check_tokens
from grpo_kernels.dispatch import resolve
from grpo_kernels.objective import Objective, Tokens, TokenStats, each_tensor, token_terms


def grpo_token_loss(
    policy_logprobs: Tensor,
    entropy: Tensor | None = None,
    *,
    advantages: Tensor,
    token_weights: Tensor,
    config: LossConfig,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, TokenStats]:
    """The loss of `grpo.loss.grpo_loss` for losses that see a token at a time, with its derivative in closed form.

    Formulas and derivatives: `grpo_kernels.objective`. All tensors are [N] of a floating dtype and are computed with in
    float32 (float64 where `policy_logprobs` is). Only `policy_logprobs` and `entropy` get gradients.

    Args:
        old_logprobs: None stands for the policy's own, detached: every ratio is then exactly 1.
    Returns:
        the loss, a scalar, and the detached `TokenStats`. Memory traffic: each input read once, each output written
        once; about twenty elementwise kernels become one.
    Raises:
        ValueError: a loss that needs whole episodes (named), wrong shapes, a tensor that the config asks for is None.
        RuntimeError: an implementation that cannot run here.
    """
    tokens = Tokens(
        advantages=advantages, token_weights=token_weights, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        sampler_logprobs=sampler_logprobs,
    )  # fmt: skip
    objective = Objective.of(config)
    if policy_logprobs.dim() != 1:
        raise ValueError(f"policy_logprobs: {tuple(policy_logprobs.shape)}, but must be [N]")
    check_tokens(len(policy_logprobs), policy_logprobs=policy_logprobs, entropy=entropy, **tokens)
    check_sampler(config.mismatch, sampler_logprobs)
    if config.entropy_coef and entropy is None:
        raise ValueError("entropy_coef is not 0 but no entropy was given")
    impl = resolve("grpo_token_loss", impl, policy_logprobs.device)
    if impl == "reference":
        return reference.grpo_token_loss(policy_logprobs, entropy, config=config, **tokens)
    terms = token_terms if impl == "torch" else importlib.import_module("grpo_kernels.triton_token_loss").token_terms
    dtype = torch.float64 if policy_logprobs.dtype == torch.float64 else torch.float32
    settings = dict(each_tensor(tokens, lambda t: t.detach().to(dtype)), objective=objective)
    loss, *stats = _GrpoTokenLoss.apply(policy_logprobs, entropy, terms, settings, dtype)
    return loss, TokenStats(*stats)


class _GrpoTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropy: Tensor | None,
        terms: Callable[..., tuple[TokenStats, Tensor, Tensor]],
        settings: dict[str, Any],
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        stats, grad, grad_entropy = terms(
            logprobs.to(dtype).contiguous(), None if entropy is None else entropy.to(dtype).contiguous(), **settings
        )
        ctx.save_for_backward(grad, grad_entropy)
        ctx.dtypes = logprobs.dtype, None if entropy is None else entropy.dtype
        ctx.mark_non_differentiable(*stats)
        return stats.loss.sum(), *stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad, grad_entropy = ctx.saved_tensors
        dtype, entropy_dtype = ctx.dtypes
        entropy_part = (grad_entropy * upstream).to(entropy_dtype) if ctx.needs_input_grad[1] else None
        return (grad * upstream).to(dtype), entropy_part, None, None, None
