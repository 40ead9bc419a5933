"""From hidden states to log-probs and to the loss: the LM head, through the kernels of `grpo_kernels`.

The head is where a small model spends its memory (N x V logits) and much of its time. Three ways through it:

- `policy_loss`, training: head, log-probs, KL and loss in one pass of three GEMMs (`linear_grpo_loss`). Losses that
  need whole episodes at once take `linear_logprob_autograd` and `grpo.loss.grpo_loss` instead, four GEMMs; the run's
  header says which one it is and why.
- `score`, old and reference log-probs: `linear_logprob`, nothing kept for a backward pass.
- `token_logprobs`: differentiable log-probs for a loss of one's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo.config import LossConfig, UsageError
from grpo.data_types import TokenBatch
from grpo.loss import grpo_loss
from grpo.model import Policy, hidden_states
from grpo_kernels import OPS, linear_grpo_loss, linear_logprob, linear_logprob_autograd, resolve, unsupported


def implementation(policy: Policy, op: str) -> str:
    """The implementation of `op` that runs for this policy. `cuda` has op 1 only; beside it the others run in Triton.

    Raises UsageError, with the reason, for one that cannot run here.
    """
    impl = "triton" if policy.impl == "cuda" and "cuda" not in OPS[op] else policy.impl
    try:
        return resolve(op, impl, policy.device)
    except RuntimeError as error:
        raise UsageError(f"--{error}; auto chooses one that runs") from error


def describe(policy: Policy, config: LossConfig) -> str:
    """How the loss is computed, for the run's header."""
    reason = unsupported(config)
    op, gemms = ("linear_logprob_autograd", "four GEMMs") if reason else ("linear_grpo_loss", "three GEMMs")
    return f"{op} ({implementation(policy, op)}, {gemms})" + (f", because {reason}" if reason else "")


def head_inputs(policy: Policy, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Hidden states [N, D] in the compute dtype and the head's weight [V, D] in its own.

    A head with a bias is a head with one more column, which reads a constant 1.
    """
    hidden = hidden_states(policy, batch).to(policy.dtype)
    head = policy.model.get_output_embeddings()
    if getattr(head, "bias", None) is None:
        return hidden, head.weight
    return torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1), torch.cat([head.weight, head.bias[:, None]], 1)


@torch.no_grad()
def score(policy: Policy, batch: TokenBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of the batch's targets under softmax(logits / temperature) and that distribution's entropy.

    Returns:
        logprobs [N], entropy [N], float32, nats, without gradients.
    """
    hidden, weight = head_inputs(policy, batch)
    impl = implementation(policy, "linear_logprob")
    logprobs, entropy, _ = linear_logprob(hidden, weight, batch.targets, temperature, impl=impl)
    return logprobs, entropy


def token_logprobs(policy: Policy, batch: TokenBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same as `score`, both differentiable."""
    impl = implementation(policy, "linear_logprob_autograd")
    return linear_logprob_autograd(*head_inputs(policy, batch), batch.targets, temperature, impl=impl)


def policy_loss(
    policy: Policy,
    batch: TokenBatch,
    *,
    advantages: Tensor,
    config: LossConfig,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    at_reference: bool = False,
    temperature: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """`grpo.loss.grpo_loss` of a microbatch, from its tokens.

    Args:
        advantages: [N], one per trained token.
        old_logprobs: [N], or None for the policy's own, detached: every ratio is 1.
        ref_logprobs: [N] or None.
        at_reference: the policy still is its reference, so that its own log-probs stand for `ref_logprobs`. The KL and
            its gradient are then 0 (`moves_at_reference` names the estimator for which that is not so).
    Returns:
        the loss, a differentiable scalar; the metrics of `grpo_loss`; the policy's log-probs [N], detached.
    """
    named: dict[str, Any] = dict(
        advantages=advantages,
        token_weights=batch.token_weights,
        sampler_logprobs=batch.sampler_logprobs,
        config=config,
    )
    fused = unsupported(config) is None
    if fused:
        impl = implementation(policy, "linear_grpo_loss")
        hidden, weight = head_inputs(policy, batch)
        fused_loss, tokens = linear_grpo_loss(
            hidden, weight, batch.targets, temperature=temperature, impl=impl,
            old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, **named,
        )  # fmt: skip
        policy_logprobs, entropy = tokens.logprobs, tokens.entropy
    else:
        policy_logprobs, entropy = token_logprobs(policy, batch, temperature)
    # The readable objective on the same log-probs: the loss itself where it was not fused, and always the metrics.
    loss, metrics = grpo_loss(
        policy_logprobs=policy_logprobs,
        old_logprobs=policy_logprobs.detach() if old_logprobs is None else old_logprobs,
        ref_logprobs=policy_logprobs.detach() if at_reference else ref_logprobs,
        entropy=entropy,
        episode_index=batch.episode_index,
        **named,
    )
    return fused_loss if fused else loss, metrics, policy_logprobs.detach()


def moves_at_reference(config: LossConfig) -> bool:
    """Does the KL term move a policy that equals its reference? Only k1's does: its gradient is 1 everywhere."""
    return config.kl_estimator == "k1" and config.kl_in == "loss"
