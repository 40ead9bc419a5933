"""Op 5 in Triton: the elementwise GRPO loss on log-probs, its value and its derivative, in one kernel.

Formulas: `grpo_kernels.objective`; the device function is the one of the row kernel. Traffic per token: 4 bytes read
for each input that is present (3 to 7), 40 written. A microbatch of 8192 tokens is under 0.6 MB, so the launch is all
it costs; 256 tokens a program (two for each of 128 threads) only spread them over some SMs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.objective import Objective, TokenStats
from grpo_kernels.triton_math import FP_FUSION, as_float32, refuse_float64, token_objective
from grpo_kernels.triton_rows import objective_arguments, objective_constants

LAUNCH = dict(BLOCK=256, num_warps=4, num_stages=1, enable_fp_fusion=FP_FUSION)


@triton.jit(do_not_specialize=["num_tokens"])
def token_loss_kernel(
    logprobs_ptr, entropy_ptr, advantages_ptr, weights_ptr, old_ptr, ref_ptr, sampler_ptr, out_ptr, clipped_ptr,
    num_tokens,
    ratio_low, ratio_high, delta, tau_positive, tau_negative, beta, entropy_coef, mismatch_cap,
    SURROGATE: tl.constexpr, KL: tl.constexpr, MISMATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss term and derivatives of BLOCK tokens. `out_ptr` [9, n] float32: TokenStats, dL/dlogprob, dL/dentropy.

    `entropy_ptr`, `old_ptr`, `ref_ptr` and `sampler_ptr` may be None.
    """
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    logprob = tl.load(logprobs_ptr + tokens, mask=inside, other=0.0)
    weight = tl.load(weights_ptr + tokens, mask=inside, other=0.0)
    advantage = tl.load(advantages_ptr + tokens, mask=inside, other=0.0)
    entropy, old, ref, sampler = 0.0, 0.0, 0.0, 0.0
    if entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + tokens, mask=inside, other=0.0)
    if old_ptr is not None:
        old = tl.load(old_ptr + tokens, mask=inside, other=0.0)
    if ref_ptr is not None:
        ref = tl.load(ref_ptr + tokens, mask=inside, other=0.0)
    if sampler_ptr is not None:
        sampler = tl.load(sampler_ptr + tokens, mask=inside, other=0.0)
    loss, grad, x, entropy_out, ratio, kl, surrogate, importance, clipped = token_objective(
        logprob, entropy, advantage, weight, old, ref, sampler,
        ratio_low, ratio_high, delta, tau_positive, tau_negative, beta, entropy_coef, mismatch_cap,
        old_ptr is not None, ref_ptr is not None, sampler_ptr is not None, SURROGATE, KL, MISMATCH,
    )  # fmt: skip
    tl.store(out_ptr + tokens, loss, mask=inside)
    tl.store(out_ptr + num_tokens + tokens, x, mask=inside)
    tl.store(out_ptr + 2 * num_tokens + tokens, entropy_out, mask=inside)
    tl.store(out_ptr + 3 * num_tokens + tokens, ratio, mask=inside)
    tl.store(out_ptr + 4 * num_tokens + tokens, kl, mask=inside)
    tl.store(out_ptr + 5 * num_tokens + tokens, surrogate, mask=inside)
    tl.store(out_ptr + 6 * num_tokens + tokens, importance, mask=inside)
    tl.store(out_ptr + 7 * num_tokens + tokens, grad, mask=inside)
    tl.store(out_ptr + 8 * num_tokens + tokens, -entropy_coef * weight, mask=inside)
    tl.store(clipped_ptr + tokens, clipped, mask=inside)


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
    """`objective.token_terms`: stats, dL/dlogprob [N], dL/dentropy [N], float32. Raises RuntimeError for float64."""
    refuse_float64(policy_logprobs=logprobs)
    num_tokens = len(logprobs)
    out = torch.empty(9, num_tokens, dtype=torch.float32, device=logprobs.device)
    clipped = torch.empty(num_tokens, dtype=torch.int32, device=logprobs.device)
    if num_tokens:
        tokens = (logprobs, entropy, advantages, token_weights, old_logprobs, ref_logprobs, sampler_logprobs)
        token_loss_kernel[(triton.cdiv(num_tokens, LAUNCH["BLOCK"]),)](
            *map(as_float32, tokens), out, clipped, num_tokens,
            *objective_arguments(objective), *objective_constants(objective), **LAUNCH,
        )  # fmt: skip
    *stats, grad, grad_entropy = out
    return TokenStats._make([*stats, clipped]), grad, grad_entropy
