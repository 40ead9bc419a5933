"""The GRPO loss in plain PyTorch: log-probs of the trained tokens in, one scalar and its metrics out.

N is the number of trained tokens of a microbatch (tokens the model sampled; prompts, environment replies and padding
never get here). A step's objective is a weighted sum over all its trained tokens,

    L = - sum_t  w_t * S_t  +  beta * sum_t  w_t * KL_t  -  entropy_coef * sum_t  w_t * H_t

with S the surrogate of the loss type, KL the estimate of the divergence from the frozen reference and H the entropy.
The weights w (`grpo.advantages.token_weights`) hold the whole step's normaliser, so that the losses of the
microbatches add up to the loss of the step however it is split; sequence ratios (gspo, sequence_mask) need whole
episodes in a microbatch. Everything is elementwise in the dtype of the inputs: pass float32.

| loss type          | surrogate S                          | source                                                  |
|--------------------|--------------------------------------|---------------------------------------------------------|
| grpo               | clipped ratio                        | DeepSeekMath, arXiv 2402.03300, eq. 3                   |
| bnpo, dapo         | clipped ratio; dapo clips higher     | DAPO, arXiv 2503.14476, eq. 8                           |
| dr_grpo            | clipped ratio                        | Dr. GRPO, arXiv 2503.20783                              |
| gspo               | clipped ratio of the whole episode   | GSPO, arXiv 2507.18071, eq. 5-7                         |
| cispo              | detached truncated ratio * log-prob  | CISPO in MiniMax-M1, arXiv 2506.13585, eq. 4-5          |
| sapo               | sigmoid gate of the ratio            | SAPO, arXiv 2511.20347                                  |

What grpo, bnpo, dapo and dr_grpo do differently lies in the weights, not here.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from grpo.config import LossConfig, LossType

# exp(20) = 5e8. Log-ratios are cut here *before* exp: cutting the result would leave a gradient of 0 * inf = NaN.
MAX_LOG_RATIO = 20.0
DEFAULT_EPSILON_HIGH = {"dapo": 0.28, "cispo": 4.0}
# sapo's temperatures, its paper's: the gate closes a little sooner where A < 0.
SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE = 1.0, 1.05


def clip_range(config: LossConfig) -> tuple[float, float]:
    """Bounds of the ratio, (1 - epsilon, 1 + epsilon_high), with the loss type's default for epsilon_high.

    cispo has no lower bound. Two conventions to know when settings come from elsewhere: TRL's cispo calls the bound
    itself epsilon_high (its recommended 5.0 is our default of 4.0), and the GSPO paper uses 3e-4 and 4e-4, which must
    be asked for.
    Raises ValueError for an unknown loss type.
    """
    if config.loss_type not in get_args(LossType):
        raise ValueError(f"loss_type: {config.loss_type!r} is not one of {', '.join(get_args(LossType))}")
    high = config.epsilon_high
    if high is None:
        high = DEFAULT_EPSILON_HIGH.get(config.loss_type, config.epsilon)
    return (0.0 if config.loss_type == "cispo" else 1.0 - config.epsilon), 1.0 + high


def episode_sum(values: Tensor, episode_index: Tensor) -> Tensor:
    """The sum of `values` [N] over each token's episode, at every token of it: [N]. Differentiable."""
    # The first place of an episode in sorted order is an id below N, so the device need not be asked how many
    # episodes there are (torch.unique would wait for the answer).
    slots = torch.searchsorted(episode_index.sort().values, episode_index)  # [N] int64
    totals = torch.zeros_like(values).index_add(0, slots, values)  # [N], used at the first slot of each episode
    return totals.index_select(0, slots)


def surrogate(ratio: Tensor, policy_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """What each token contributes to the objective that is maximised: [N]."""
    low, high = clip_range(config)
    if config.loss_type == "cispo":
        # S = sg[min(r, 1 + eps_high)] * A * log pi. A token beyond the bound still has a gradient, of bounded size.
        return ratio.clamp(max=high).detach() * advantages * policy_logprobs
    if config.loss_type == "sapo":
        # S = 4 / tau * sigmoid(tau * (r - 1)) * A, tau by the sign of A. The slope at r = 1 is A, that of grpo.
        tau = torch.full_like(advantages, SAPO_TAU_NEGATIVE).masked_fill(advantages > 0, SAPO_TAU_POSITIVE)
        return 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    # S = min(r * A, clip(r, 1 - eps, 1 + eps_high) * A). A ratio exactly on a bound counts as inside.
    clipped_ratio = ratio.clamp(low, high)
    if config.delta is not None:
        # Dual clip (arXiv 1912.09729): S >= delta * A where A < 0, else r * A has no bound there.
        ratio = torch.where(advantages < 0, ratio.clamp(max=config.delta), ratio)
    return torch.min(ratio * advantages, clipped_ratio * advantages)


def kl_divergence(policy_logprobs: Tensor, ref_logprobs: Tensor, estimator: str, ratio: Tensor) -> Tensor:
    """Estimates of KL(policy || reference) from one sampled token each, in nats: [N].

    Estimators k1-k3: http://joschu.net/blog/kl-approx.html; k3 is GRPO's (DeepSeekMath eq. 4). On average over
    tokens sampled from the policy, k1's gradient is zero and k2's is that of the KL: use k1 in the reward.
    """
    log_ratio = policy_logprobs - ref_logprobs  # [N]
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    # k3 = pi_ref / pi - log(pi_ref / pi) - 1, never negative. expm1 keeps its digits near 0, where exp(x) - 1 would
    # not. Both terms see the cut: with the linear one alone a far token would be pushed further away.
    gap = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    k3 = torch.expm1(gap) - gap
    if estimator == "k3":
        return k3
    if estimator == "k3_ratio":  # DeepSeek-V3.2, arXiv 2512.02556; the gradient flows through the ratio as well
        return ratio * k3
    raise ValueError(f"kl_estimator: {estimator!r} is not one of k1, k2, k3, k3_ratio")


def mismatch_weights(log_weights: Tensor, mismatch: str, cap: float) -> Tensor:
    """Importance weights w = pi_old / pi_sampler, limited, for a sampler that is not the trainer: [N], constant.

    `token_clip` min(w, cap); `token_mask` w, or 0 above the cap; `sequence_mask` the same with the product of w over
    the episode, so that `log_weights` [N] is then the sum of old - sampler over it, not a token's own. No lower bound,
    as in TRL, whose cap is called vllm_importance_sampling_clip_max.
    """
    weights = log_weights.exp()  # an overflow is above the cap, and there is no gradient to spoil
    if mismatch == "token_clip":
        return weights.clamp(max=cap)
    if mismatch in ("token_mask", "sequence_mask"):
        return weights.masked_fill(weights > cap, 0.0)
    raise ValueError(f"mismatch: {mismatch!r} is not one of none, token_clip, token_mask, sequence_mask")


def ratio_summary(name: str, ratio: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Sum over the trained tokens, largest (at least 1) and smallest (at most 1) of a ratio [N]."""
    padded = torch.cat([torch.where(trained, ratio, 1), ratio.new_ones(1)])  # [N + 1], as there may be no token
    return {name: torch.where(trained, ratio, 0).sum(), f"{name}_max": padded.max(), f"{name}_min": padded.min()}


def ratio_metrics(ratio: Tensor, advantages: Tensor, trained: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """How far the policy has moved since the rollout; keys in `grpo_loss`. All inputs [N]."""
    low, high = clip_range(config)
    metrics = ratio_summary("ratio", ratio, trained) | {
        "clip_low": ((ratio < low) & (advantages < 0)).sum(),
        "clip_high": ((ratio > high) & (advantages > 0)).sum(),
    }
    if config.delta is not None:
        metrics["clip_dual"] = ((ratio > config.delta) & (advantages < 0)).sum()
    return metrics


def grpo_loss(
    *,
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    episode_index: Tensor,
    config: LossConfig,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one microbatch, a scalar, and its metrics. Pure: writes into no input, never waits for the device.

    All tensors are [N]; `episode_index` is int64, the rest one floating dtype. Log-probs are natural logs under the
    temperature-scaled distribution. Only `policy_logprobs` and `entropy` get gradients. A token of weight 0 is not
    trained: it contributes exactly 0 to the loss, the gradient and the metrics, whatever its other values are.
    There is no KL term where beta is 0, `ref_logprobs` is None or the penalty acts in the reward.

    Metrics are detached scalars. Sums over the trained tokens, which add up over microbatches and give means when
    divided by the step's number of trained tokens: `surrogate`, S; `ratio` (gspo: the episode's); `clip_low` and
    `clip_high`, tokens outside `clip_range` where A < 0 and A > 0; `clip_dual`, tokens above delta where A < 0; `kl`
    (with a reference), always plain k3 so that runs compare; `entropy` (where given); with sampler log-probs
    `sampler_gap` = |old - sampler|, `mismatch_weight` and `sampler_sequence_ratio`, the product of old / sampler
    probabilities over a token's episode. Extremes, which combine by max and min: `ratio_max` (at least 1), `ratio_min`
    (at most 1), the same of `sampler_sequence_ratio`, and `sampler_gap_max`.
    Raises ValueError where the configuration asks for a tensor that is None, or has an unknown name.
    """
    if config.entropy_coef and entropy is None:
        raise ValueError("entropy_coef is not 0 but no entropy was given")
    if config.mismatch != "none" and sampler_logprobs is None:
        raise ValueError(f"mismatch is {config.mismatch!r} but no sampler_logprobs were given")

    # Untrained tokens are zeroed before exp, never multiplied away after it: 0 * inf is NaN.
    trained = token_weights != 0  # [N] bool
    policy_logprobs, advantages = torch.where(trained, policy_logprobs, 0), torch.where(trained, advantages, 0)
    old_logprobs = torch.where(trained, old_logprobs.detach(), 0)

    # r = pi / pi_old for each token; gspo: r = (pi(episode) / pi_old(episode)) ** (1 / length), one for all its tokens
    log_ratio = policy_logprobs - old_logprobs  # [N]
    if config.loss_type == "gspo":
        length = episode_sum(trained.to(log_ratio.dtype), episode_index).clamp(min=1)  # [N]
        log_ratio = episode_sum(log_ratio, episode_index) / length
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # [N], exactly 1 where policy == old
    objective = surrogate(ratio, policy_logprobs, advantages, config)  # [N]
    metrics = {"surrogate": objective.sum()} | ratio_metrics(ratio, advantages, trained, config)

    if sampler_logprobs is not None:
        sampler_logprobs = torch.where(trained, sampler_logprobs.detach(), 0)
        log_weights = old_logprobs - sampler_logprobs  # [N]
        gap = log_weights.abs()  # [N]
        metrics |= {"sampler_gap": gap.sum(), "sampler_gap_max": torch.cat([gap, gap.new_zeros(1)]).max()}
        # prod_t pi_old / pi_sampler over an episode, at each of its tokens
        log_product = episode_sum(log_weights, episode_index)  # [N]
        product = log_product.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        metrics |= ratio_summary("sampler_sequence_ratio", product, trained)
        if config.mismatch != "none":
            of_unit = log_product if config.mismatch == "sequence_mask" else log_weights
            weights = mismatch_weights(of_unit, config.mismatch, config.mismatch_cap)  # [N]
            metrics["mismatch_weight"] = torch.where(trained, weights, 0).sum()
            objective = objective * weights

    # L = - sum w * S
    loss = -(token_weights * objective).sum()
    if ref_logprobs is not None:
        ref_logprobs = torch.where(trained, ref_logprobs.detach(), 0)
        metrics["kl"] = kl_divergence(policy_logprobs, ref_logprobs, "k3", ratio).sum()
        if config.beta and config.kl_in == "loss":
            # + beta * sum w * KL
            kl = kl_divergence(policy_logprobs, ref_logprobs, config.kl_estimator, ratio)  # [N]
            loss = loss + config.beta * (token_weights * kl).sum()
    if entropy is not None:
        entropy = torch.where(trained, entropy, 0)
        metrics["entropy"] = entropy.sum()
        if config.entropy_coef:
            # - entropy_coef * sum w * H
            loss = loss - config.entropy_coef * (token_weights * entropy).sum()
    return loss, {key: value.detach() for key, value in metrics.items()}


def kl_reward_penalty(
    policy_logprobs: Tensor, ref_logprobs: Tensor, episode_index: Tensor, num_episodes: int
) -> Tensor:
    """Mean k1 = log(policy / ref) over each episode's trained tokens, nats per token: [num_episodes], constant.

    With `kl_in="reward"`, beta times this is subtracted from an episode's reward before the advantages. The log-probs
    [N] are those at rollout time, `episode_index` [N] int64 below `num_episodes`. An episode without tokens gets 0.
    """
    k1 = (policy_logprobs - ref_logprobs).detach()  # [N]
    zeros = k1.new_zeros(num_episodes)  # [E]
    num_tokens = zeros.index_add(0, episode_index, torch.ones_like(k1))  # [E]
    return zeros.index_add(0, episode_index, k1) / num_tokens.clamp(min=1)
