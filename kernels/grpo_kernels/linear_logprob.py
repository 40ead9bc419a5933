"""Ops 2 and 3: log-prob and entropy straight from hidden states, for scoring and for losses of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels import chunking, reference, torch_rows
from grpo_kernels.checks import check_linear
from grpo_kernels.dispatch import resolve, rows_backend


@torch.no_grad()
def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, *, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Op 2: log-prob of the targets, entropy and log-sum-exp under softmax(hidden @ weight.T / temperature).

    For old and reference log-probs: nothing is kept for a backward pass. A token's result does not depend, to the bit,
    on the tokens beside it.

    Args:
        hidden: [N, D]; its dtype is the GEMM's. weight: [V, D]. targets: [N] int64.
        impl: auto, reference, torch or triton. torch: chunks of logits by GEMM, in the dtype of `hidden`. triton: one
            program per (128 tokens x 256 vocabulary) tile, logits never leave the chip.
    Returns:
        logprobs, entropy, lse: [N] float32 each (float64 for float64), nats.
    Raises:
        ValueError: shapes, dtypes, a target outside the vocabulary, a temperature that is not positive.
        RuntimeError: an implementation that cannot run here.
    """
    check_linear(hidden, weight, targets, temperature)
    impl = resolve("linear_logprob", impl, hidden.device)
    if impl == "reference":
        return reference.linear_logprob(hidden, weight, targets, temperature)
    stats = _score(impl, hidden, weight, targets, temperature)
    return stats.logprobs, stats.entropy, stats.maximum / temperature + stats.log_sum


def _score(impl: str, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> torch_rows.RowStats:
    weight = weight.to(hidden.dtype)
    if impl == "triton":
        from grpo_kernels.triton_linear_logprob import linear_logprob_stats

        return linear_logprob_stats(hidden, weight, targets, temperature)
    rows, parts = chunking.SCORING_ROWS, []
    buffer = chunking.logits_buffer(rows, weight)
    for first in range(0, len(hidden), rows):
        count = min(rows, len(hidden) - first)
        inputs = torch.nn.functional.pad(hidden[first : first + count], (0, 0, 0, rows - count))
        of_chunk = torch.nn.functional.pad(targets[first : first + count], (0, rows - count))
        stats = torch_rows.logprob_rows(chunking.logits_of(inputs, weight, buffer), of_chunk, temperature)
        parts.append(torch_rows.RowStats(*(field[:count] for field in stats)))
    return torch_rows.RowStats(*map(torch.cat, zip(*parts))) if parts else torch_rows.empty_stats(hidden)


def linear_logprob_autograd(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Op 3: log-prob of the targets and entropy, differentiable by any upstream gradient, in four GEMMs.

    Forward is op 2; backward computes each chunk of logits again and turns it into its gradient in place,

        dz_j = ( g ([j = y] - p_j) - h p_j (log p_j + H) ) / T        dX = dz W        dW = dz^T hidden,

    with g and h the upstream gradients. For losses that need whole episodes (gspo) and losses of one's own. Arguments,
    dtypes and errors as in `linear_logprob`; dW is accumulated in float32 and comes in the dtype of `weight`.

    Returns:
        logprobs, entropy: [N] float32 each (float64 for float64), nats.
    """
    check_linear(hidden, weight, targets, temperature)
    impl = resolve("linear_logprob_autograd", impl, hidden.device)
    if impl == "reference":
        return reference.linear_logprob_autograd(hidden, weight, targets, temperature)
    return _LinearLogprob.apply(hidden, weight, targets, temperature, impl)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, impl: str
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # without a gradient of the entropy its half of the work is skipped
        stats = _score(impl, hidden, weight, targets, temperature)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.settings = temperature, impl
        return stats.logprobs, stats.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        temperature, impl = ctx.settings
        rows = rows_backend(impl)
        if grad_logprobs is None:
            if grad_entropy is None:
                return None, None, None, None, None
            grad_logprobs = torch.zeros_like(grad_entropy)
        upstream = [grad_logprobs] if grad_entropy is None else [grad_logprobs, grad_entropy]
        scale = chunking.underflow_scale(hidden.dtype, *upstream)
        grads = [g / scale for g in upstream]
        idle = torch.stack([g == 0 for g in grads]).all(0)[:, None]  # [N, 1]

        compute_weight, wide = weight.to(hidden.dtype), grad_logprobs.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        d_weight = weight.new_zeros(weight.shape, dtype=wide) if needs_weight else None
        most = max(1, min(len(hidden), chunking.chunk_rows(len(weight), hidden.dtype, hidden.device)))
        buffer = chunking.logits_buffer(most, compute_weight)
        for part in chunking.chunks(len(hidden), most):
            inputs = torch.where(idle[part], 0, hidden[part])
            logits = chunking.logits_of(inputs, compute_weight, buffer)
            # Not with the statistics of the forward pass: its logits were rounded elsewhere (a GEMM of another shape,
            # or never to 16 bits), and in a peaked row the difference is as large as the gradient.
            rows.logprob_rows_backward_(logits, targets[part], None, *(g[part] for g in grads), temperature=temperature)
            if d_hidden is not None:
                chunking.hidden_gradient_(d_hidden[part], logits, compute_weight)
            if d_weight is not None:
                chunking.accumulate_outer_(d_weight, logits, inputs, first=False)
        d_hidden = None if d_hidden is None else d_hidden.mul_(scale)
        d_weight = None if d_weight is None else d_weight.mul_(scale).to(weight.dtype)
        return d_hidden, d_weight, None, None, None
