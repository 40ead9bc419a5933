"""Device functions that the Triton kernels share: online softmax statistics, expm1, the token objective.

Statistics of a row, kept in base 2 because the hardware's exponential is one. With z the logits, m their maximum so
far, T the temperature and k = log2(e) / T:

    b_j = (z_j - m) k          s = sum_j 2^b_j          u = sum_j 2^b_j b_j
    logprob = (z_y - m) / T - ln s                      entropy = ln s - ln(2) u / s

The loops leave the target out of s and u; `finish` adds it.

All of it is float32. A logit of -inf adds 0 to s and 0, the limit, to u. NaN is never dropped: it reaches s.
`grpo_kernels.objective` derives the token objective.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# 2^-1000 is 0 in float32. Shifted logits are cut here where they multiply their exponential: 0 * -inf is NaN.
MIN_SHIFTED = tl.constexpr(-1000.0)
MAX_LOG_RATIO = tl.constexpr(20.0)  # that of grpo.loss

# Contracting a * b + c into one rounding: on, and said at every launch because Triton's default changed between
# versions. Nothing here relies on a product being rounded before it is added.
FP_FUSION = True
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def refuse_float64(**tensors: Tensor | None) -> None:
    """Raises RuntimeError for a float64 tensor: the kernels compute in float32, so it would be a silent downcast."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype == torch.float64:
            raise RuntimeError(f"{name}: float64 is not supported by impl='triton', use impl='torch'")


def as_float32(tensor: Tensor | None) -> Tensor | None:
    """A per-token input as the kernels read it, contiguous float32."""
    return None if tensor is None else tensor.float().contiguous()


@triton.jit
def finite_or_zero(maximum):
    """The shift for a maximum: 0 while everything seen was -inf, as -inf - -inf is NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def shifted_exp(z, shift, k):
    """b = (z - shift) k, cut below at MIN_SHIFTED, and 2^b. where, not tl.maximum: the latter drops NaN."""
    b = (z - shift) * k
    b = tl.where(b < MIN_SHIFTED, MIN_SHIFTED, b)
    return b, tl.exp2(b)


@triton.jit
def rescale(old_maximum, maximum, s, u, k):
    """s and u, taken relative to `old_maximum`, relative to `maximum` >= old_maximum instead.

    With d = (old - new) k <= 0:  s' = 2^d s,  u' = 2^d (u + d s). Empty statistics (maximum -inf, s = u = 0) stay 0.
    """
    d = tl.where(old_maximum == -float("inf"), 0.0, (old_maximum - finite_or_zero(maximum)) * k)
    # Far below the new maximum the factor is 0 whatever d; cut, so that 0 * -inf does not occur.
    d = tl.where(d < MIN_SHIFTED, MIN_SHIFTED, d)
    factor = tl.exp2(d)
    return s * factor, (u + d * s) * factor


@triton.jit
def push(z, maximum, s, u, k):
    """One more block of logits z [B] into a row's statistics: `maximum` a scalar, s and u [B], one partial sum a lane.

    Only the maximum is reduced over the block; s and u are summed over the lanes once, after the last block.
    """
    new = tl.maximum(maximum, tl.max(z, axis=0))
    s, u = rescale(maximum, new, s, u, k)
    b, e = shifted_exp(z, finite_or_zero(new), k)
    return new, s + e, u + e * b


@triton.jit
def expm1(x):
    """e^x - 1 without cancellation near 0, by Kahan: with v = e^x as rounded, (v - 1) x / ln v.

    v - 1 is exact near 0 and ln v belongs to the rounded v, so that the error of v cancels in their quotient. This
    needs a logarithm with a small *relative* error near 1, which tl.log has (libdevice) and the hardware's has not.
    """
    v = tl.exp(x)
    # v = 1: the quotient would be 0 / 0, and the answer is x. v = 0 or inf: the logarithm would be infinite.
    special = (v == 1.0) | (v == 0.0) | (v == float("inf"))
    quotient = (v - 1.0) * (x / tl.log(tl.where(special, 2.0, v)))
    return tl.where(special, tl.where(v == 1.0, x, v - 1.0), quotient)


@triton.jit
def log1p(x):
    """ln(1 + x), 0 <= x < inf, without losing a small x beside the 1: with w = 1 + x as rounded, ln(w) x / (w - 1)."""
    w = 1.0 + x
    exact = w == 1.0
    quotient = tl.log(w) * (x / tl.where(exact, 1.0, w - 1.0))
    return tl.where(exact, x, quotient)


@triton.jit
def finish(maximum, s, u, target_logit, inverse_temperature):
    """logprob, entropy, maximum and ln s of a row, from the statistics of all its columns but the target.

    The target joins last: beside its 1 in s, the rest of a confident row (below 6e-8) would be lost, and with it every
    digit of 1 - p. Where the target is the maximum, ln s = ln(1 + rest), rounded once. NaN where s is; where every
    logit was -inf the maximum is -inf and all else NaN, as log_softmax has it.
    """
    k = inverse_temperature * LOG2E
    new = tl.maximum(maximum, target_logit)
    rest, u = rescale(maximum, new, s, u, k)
    b, e = shifted_exp(target_logit, finite_or_zero(new), k)
    s = rest + e
    new = tl.where(s == s, new, s)  # the maximum may have dropped a NaN
    s = tl.where(new == -float("inf"), float("nan"), s)
    shifted = (target_logit - new) * inverse_temperature
    log_sum = tl.where(shifted == 0.0, log1p(rest), tl.log(s))
    return shifted - log_sum, log_sum - LN2 * (u + e * b) / s, new, log_sum


@triton.jit
def kl_terms(gap, ratio, ratio_slope, KL: tl.constexpr):
    """k3 for the report, then the estimator of the loss and its derivative, from gap = ref - logprob."""
    cut = tl.where(gap > MAX_LOG_RATIO, MAX_LOG_RATIO, gap)
    growth = expm1(cut)
    k3 = growth - cut
    k3_slope = tl.where(gap <= MAX_LOG_RATIO, -growth, 0.0)
    if KL == "k1":
        value, slope = -gap, tl.where(gap == gap, 1.0, 1.0)  # a one in the shape of gap
    elif KL == "k2":
        value, slope = 0.5 * gap * gap, -gap
    elif KL == "k3_ratio":
        value, slope = ratio * k3, ratio_slope * k3 + ratio * k3_slope
    else:
        value, slope = k3, k3_slope
    return k3, value, slope


@triton.jit
def token_objective(
    x, entropy, advantage, weight, old, ref, sampler,
    ratio_low, ratio_high, delta, tau_positive, tau_negative, beta, entropy_coef, mismatch_cap,
    HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, HAS_SAMPLER: tl.constexpr,
    SURROGATE: tl.constexpr, KL: tl.constexpr, MISMATCH: tl.constexpr,
):  # fmt: skip
    """`grpo_kernels.objective.token_terms` of one token or a block of them, in registers.

    Inputs that are absent (HAS_* false) may hold anything. Returns loss, dL/dlogprob, logprob, entropy, ratio, kl,
    surrogate, mismatch weight, clip bits; the first two exactly 0 for a token of weight 0.
    """
    trained = weight != 0.0
    # Untrained tokens are zeroed before exp, never multiplied away after it: 0 * inf is NaN.
    x = tl.where(trained, x, 0.0)
    advantage = tl.where(trained, advantage, 0.0)
    entropy = tl.where(trained, entropy, 0.0)
    if HAS_OLD:
        old = tl.where(trained, old, 0.0)
        log_ratio = x - old
        # where, not tl.clamp: NaN stays NaN.
        cut = tl.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio)
        cut = tl.where(cut < -MAX_LOG_RATIO, -MAX_LOG_RATIO, cut)
        ratio = tl.exp(cut)  # exactly 1 where x == old
        ratio_slope = tl.where(tl.abs(log_ratio) <= MAX_LOG_RATIO, ratio, 0.0)
    else:
        old = x
        ratio = tl.where(trained, 1.0, 1.0)  # ones in the shape of x
        ratio_slope = ratio

    if SURROGATE == "cispo":
        truncated = tl.where(ratio > ratio_high, ratio_high, ratio)
        surrogate = truncated * advantage * x
        slope = truncated * advantage
    elif SURROGATE == "sapo":
        tau = tl.where(advantage > 0.0, tau_positive, tau_negative)
        gate = tl.sigmoid(tau * (ratio - 1.0))
        surrogate = 4.0 / tau * gate * advantage
        slope = 4.0 * gate * (1.0 - gate) * advantage * ratio_slope
    else:
        capped = tl.where((advantage < 0.0) & (ratio > delta), delta, ratio)
        bounded = tl.where(ratio < ratio_low, ratio_low, tl.where(ratio > ratio_high, ratio_high, ratio))
        inside = capped * advantage
        outside = bounded * advantage
        surrogate = tl.where(inside <= outside, inside, outside)
        moves = (inside <= outside) & ((advantage >= 0.0) | (ratio <= delta))
        slope = tl.where(moves, advantage * ratio_slope, 0.0)

    importance = tl.where(trained, 1.0, 1.0)
    if HAS_SAMPLER and MISMATCH != "none":
        importance = tl.exp(old - tl.where(trained, sampler, 0.0))
        limit = mismatch_cap if MISMATCH == "token_clip" else 0.0
        importance = tl.where(importance > mismatch_cap, limit, importance)
        importance = tl.where(trained, importance, 1.0)
    loss = -importance * surrogate
    grad = -importance * slope

    kl = tl.where(trained, 0.0, 0.0)
    if HAS_REF:
        kl, value, kl_slope = kl_terms(tl.where(trained, ref, 0.0) - x, ratio, ratio_slope, KL)
        if KL != "none":
            loss += beta * value
            grad += beta * kl_slope
    loss -= entropy_coef * entropy

    # Clip bits: CLIP_LOW 1, CLIP_HIGH 2, CLIP_DUAL 4 of grpo_kernels.objective.
    clipped = ((ratio < ratio_low) & (advantage < 0.0)).to(tl.int32)
    clipped += 2 * ((ratio > ratio_high) & (advantage > 0.0)).to(tl.int32)
    clipped += 4 * ((ratio > delta) & (advantage < 0.0)).to(tl.int32)
    loss = tl.where(trained, weight * loss, 0.0)
    grad = tl.where(trained, weight * grad, 0.0)
    return loss, grad, x, entropy, ratio, kl, surrogate, importance, clipped
