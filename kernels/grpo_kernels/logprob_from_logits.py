"""Op 4: log-prob and entropy from logits that exist already."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import reference
from grpo_kernels.checks import check_targets, check_temperature
from grpo_kernels.dispatch import resolve, rows_backend


def logprob_from_logits(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, inplace_backward: bool = False, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Log-prob of the target and entropy of softmax(logits / temperature).

        logprob = a_y - log s        dz_j = ( g ([j = y] - p_j) - h p_j (log p_j + H) ) / T

    with the notation of `grpo_kernels.torch_rows`, g and h the upstream gradients of the two outputs.

    Args:
        logits: [N, V] float32, float16, bfloat16 or float64; differentiable.
        targets: [N] int64.
        inplace_backward: the backward pass writes the gradient over the logits instead of a second [N, V] tensor; a
            second backward call, or another use of the logits, is then an error that autograd reports.
    Returns:
        logprobs [N] and entropy [N], float32 (float64 for float64), nats. Memory traffic: one read forward (Triton:
        each row is read once), one read and one write backward.
    Raises:
        ValueError: shapes, an id outside the vocabulary, a temperature that is not positive.
        RuntimeError: an implementation that cannot run here.
    """
    if logits.dim() != 2 or not logits.shape[1] or not logits.dtype.is_floating_point:
        raise ValueError(f"logits: {logits.dtype} {tuple(logits.shape)}, but must be floating [N, V], V > 0")
    check_targets(targets, *logits.shape)
    check_temperature(temperature)
    impl = resolve("logprob_from_logits", impl, logits.device)
    if impl == "reference":
        return reference.logprob_from_logits(logits, targets, temperature)
    return _LogprobFromLogits.apply(logits, targets, temperature, inplace_backward, rows_backend(impl))


class _LogprobFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, inplace_backward: bool, rows: ModuleType
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # without a gradient of the entropy its half of the work is skipped
        stats = rows.logprob_rows(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, *stats)
        ctx.settings = temperature, inplace_backward, rows
        return stats.logprobs, stats.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, *stats = ctx.saved_tensors
        temperature, inplace_backward, rows = ctx.settings
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(stats[0])
        gradient = logits if inplace_backward else logits.clone()
        rows.logprob_rows_backward_(gradient, targets, rows.RowStats(*stats), grad_logprobs, grad_entropy, temperature)
        if inplace_backward:
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None, None, None
