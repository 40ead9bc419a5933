"""Op 1: the LM head, the log-probs, the KL and the GRPO loss, with their exact gradient, in three GEMMs.

A layer in the middle of a network must wait for its upstream gradient, so a memory-saving head computes the logits
twice: forward, and again in the backward pass (four GEMMs). This head owns the loss. Once a row's sum of exponentials
is known, so is the token's dL/dlogprob, and the logits are turned into their own gradient while they are still there:

    per chunk of tokens     logits  = hidden W^T                                             GEMM 1
                            dlogits = row kernel, in place (see grpo_kernels.torch_rows)
                            dX      = dlogits W, summed over all of V in float32             GEMM 2
                            dW     += dlogits^T hidden, in float32                           GEMM 3

The backward pass multiplies the stashed dX and dW by the upstream scalar. Memory beyond dX and dW: one chunk of logits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grpo.config import LossConfig
from grpo_kernels import chunking, reference, torch_rows
from grpo_kernels.checks import check_linear, check_sampler, check_tokens
from grpo_kernels.dispatch import resolve, rows_backend
from grpo_kernels.objective import Objective, Tokens, TokenStats, each_tensor


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    advantages: Tensor,
    token_weights: Tensor,
    config: LossConfig,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    temperature: float = 1.0,
    impl: str = "auto",
) -> tuple[Tensor, TokenStats]:
    """`grpo.loss.grpo_loss` of the log-probs of `targets` under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [N, D] hidden states that predict the trained tokens; differentiable. Its dtype is the GEMMs' dtype.
        weight: [V, D] of the LM head; differentiable. Cast to the dtype of `hidden` where they differ, gradient in its
            own dtype; a frozen weight costs no GEMM 3.
        targets: [N] int64.
        advantages, token_weights: [N]. The weights hold the normaliser of the whole step. A token of weight 0 adds
            exactly 0 to loss and gradients, even where its row holds NaN.
        config: the objective; `grpo_kernels.unsupported(config)` says which ones need another op.
        old_logprobs: [N], or None for the policy's own, detached: every ratio is then exactly 1.
        ref_logprobs, sampler_logprobs: [N] or None, as in `grpo_loss`.
        temperature: divides the logits; above 0.
        impl: auto, reference, torch, triton or cuda; see `grpo_kernels.dispatch`.
    Returns:
        the loss, a float32 scalar, and the detached `TokenStats`. A second backward call over a retained graph runs the
        pass again: the first one gives the stash away instead of copying it.
    Raises:
        ValueError: shapes, dtypes, a target outside the vocabulary, a temperature that is not positive, a loss that
            needs whole episodes, importance weights without the sampler's log-probs.
        RuntimeError: an implementation that cannot run here.
    """
    named = Tokens(
        advantages=advantages, token_weights=token_weights, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        sampler_logprobs=sampler_logprobs,
    )  # fmt: skip
    objective = Objective.of(config)
    check_linear(hidden, weight, targets, temperature)
    check_tokens(len(hidden), **named)
    check_sampler(config.mismatch, sampler_logprobs)
    impl = resolve("linear_grpo_loss", impl, hidden.device)
    if impl == "reference":
        return reference.linear_grpo_loss(hidden, weight, targets, config=config, temperature=temperature, **named)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    tokens = each_tensor(named, lambda t: t.detach().to(dtype).contiguous())
    differentiable = torch.is_grad_enabled()
    loss, *stats = _LinearGrpoLoss.apply(
        hidden, weight, targets, tokens, objective, temperature, rows_backend(impl), differentiable
    )
    return loss, TokenStats(*stats)


class _LinearGrpoLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tokens: Tokens,
        objective: Objective,
        temperature: float,
        rows: ModuleType,
        differentiable: bool,
    ) -> tuple[Tensor, ...]:
        needs = [differentiable and need for need in ctx.needs_input_grad[:2]]
        ctx.again = tokens, objective, temperature, rows, needs
        ctx.save_for_backward(hidden, weight, targets)
        loss, stats, ctx.stash = one_pass(hidden, weight, targets, *ctx.again)
        ctx.mark_non_differentiable(*stats)
        return loss, *stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        stash = ctx.stash or one_pass(hidden, weight, targets, *ctx.again)[2]
        ctx.stash = None
        d_hidden, d_weight, scale = stash
        factor = upstream * scale  # a tensor: no wait for the device
        if factor.is_cuda or factor.item() != 1:  # on a CPU one may look, and spare a pass over dW
            d_hidden = None if d_hidden is None else d_hidden.mul_(factor)
            d_weight = None if d_weight is None else d_weight.mul_(factor)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None, None, None, None


def one_pass(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tokens: Tokens,
    objective: Objective,
    temperature: float,
    rows: ModuleType = torch_rows,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, TokenStats, tuple[Tensor | None, Tensor | None, Tensor]]:
    """Loss, stats and (dX, dW, scale); the gradients are dX * scale and dW * scale.

    `rows` is the module whose `grpo_rows_` works on the tiles of logits, `needs` says whether dX and dW are wanted.
    """
    num_rows, vocab = len(hidden), len(weight)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    weight = weight.to(hidden.dtype)
    # The loss is linear in the weights, so dividing them by a power of two is exact.
    scale = chunking.underflow_scale(hidden.dtype, tokens["token_weights"])
    tokens = Tokens(**{**tokens, "token_weights": tokens["token_weights"] / scale})
    trained = (tokens["token_weights"] != 0)[:, None]  # [N, 1]

    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
    d_weight = weight.new_empty(weight.shape, dtype=dtype) if needs[1] else None
    if not num_rows and d_weight is not None:
        d_weight.zero_()
    most = max(1, min(num_rows, chunking.chunk_rows(vocab, hidden.dtype, hidden.device)))
    buffer = chunking.logits_buffer(most, weight)
    parts: list[TokenStats] = []
    for part in chunking.chunks(num_rows, most):
        # An untrained row may hold NaN, and 0 * NaN would reach dW: it is replaced, not multiplied away.
        inputs = torch.where(trained[part], hidden[part], 0)  # [n, D]
        logits = chunking.logits_of(inputs, weight, buffer)  # [n, V]
        of_chunk = each_tensor(tokens, lambda t: t[part])  # noqa: B023 (called here)
        parts.append(
            rows.grpo_rows_(
                logits, targets[part], objective=objective, temperature=temperature, backward=any(needs), **of_chunk
            )
        )
        if d_hidden is not None:
            chunking.hidden_gradient_(d_hidden[part], logits, weight)
        if d_weight is not None:
            chunking.accumulate_outer_(d_weight, logits, inputs, first=part.start == 0)
    if not parts:
        empty = hidden.new_empty(0, dtype=dtype)
        parts = [TokenStats._make([*[empty] * (len(TokenStats._fields) - 1), empty.int()])]
    stats = torch_rows.concatenate(parts)
    stats = stats._replace(loss=stats.loss * scale)
    return stats.loss.sum(), stats, (d_hidden, d_weight, scale)
