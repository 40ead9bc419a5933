"""From rewards to advantages, and from token counts to the weight of a token. Plain Python, pure.

Axes: P groups (scenarios), G members, E = P*G episodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from grpo.config import LossType

STD_EPS = 1e-4
# Equal rewards reach us with rounding residue (0.1 + 0.2 against 0.3); dividing by its std would make it a signal.
MIN_SPREAD = 1e-6


def has_spread(rewards: Sequence[float | None]) -> bool:
    """Whether the group's valid rewards differ by at least `MIN_SPREAD`."""
    valid = valid_rewards(rewards)
    return bool(valid) and max(valid) - min(valid) >= MIN_SPREAD


def group_advantages(
    rewards: Sequence[Sequence[float | None]], scale_rewards: Literal["group", "batch", "none"] = "group"
) -> list[list[float]]:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2), in the shape of `rewards` [P][G].

    A = (r - mean_group) / (std + 1e-4), with the sample std (ddof 1) of the `group` or of all rewards of the
    `batch`; `none` does not divide (Dr. GRPO, arXiv 2503.20783). None (the environment failed) is left out of mean
    and std and gets 0. A group without spread (below 1e-6), or with one valid reward, gets exactly 0 throughout.
    TRL's definitions are the same but for the spread: it divides any residue by std + 1e-4.

    Example: [[0, 0, 0, 1], [0.3, None, 0.3, 0.3]] -> [[-0.4999, -0.4999, -0.4999, 1.4997], [0, 0, 0, 0]].
    Raises ValueError for a reward that is not finite and for an unknown `scale_rewards`.
    """
    if scale_rewards not in ("group", "batch", "none"):
        raise ValueError(f"scale_rewards: {scale_rewards!r} is not one of group, batch, none")
    batch = [reward for group in rewards for reward in valid_rewards(group)]
    advantages = []
    for group in rewards:
        if not has_spread(group):
            advantages.append([0.0] * len(group))
            continue
        valid = valid_rewards(group)
        mean = math.fsum(valid) / len(valid)
        scale = 1.0
        if scale_rewards != "none":
            scale = statistics.stdev(valid if scale_rewards == "group" else batch) + STD_EPS
        advantages.append([0.0 if reward is None else (reward - mean) / scale for reward in group])
    return advantages


def valid_rewards(group: Sequence[float | None]) -> list[float]:
    """The rewards that are not None. Raises ValueError for one that is NaN or infinite."""
    valid = [reward for reward in group if reward is not None]
    if not all(map(math.isfinite, valid)):
        raise ValueError(f"rewards must be finite or None, got {list(group)}")
    return valid


def token_weights(
    num_tokens_per_episode: Sequence[int], loss_type: LossType, max_completion_len: int, kept: Sequence[bool]
) -> list[float]:
    """The weight of each trained token of an episode in the step's loss: [E], one per episode.

    Over the E_kept kept episodes, n_i trained tokens each:

        grpo, gspo, sapo     1 / (E_kept * n_i)                      mean over tokens, then over episodes
        bnpo, dapo, cispo    1 / sum_i n_i                           mean over the step's tokens
        dr_grpo              1 / (E_kept * max_completion_len)       a constant: length does not matter

    Episodes that are not kept (truncated and masked, or ended by an environment error) get 0 and are missing from
    the denominators as well; with none kept all weights are 0. A kept episode without tokens counts as an episode
    whose loss is 0. Each weight covers the whole optimiser step, never a microbatch.

    TRL agrees where nothing is masked: grpo, sapo and dr_grpo are means over equal microbatches, dapo and cispo use the
    count of the whole batch. Its bnpo divides by the tokens of each microbatch, so it is ours with one microbatch.
    With truncated completions masked, TRL's grpo, sapo and dr_grpo keep them in the denominator.
    Raises ValueError for an unknown loss type and where the two sequences differ in length.
    """
    kept_tokens = [n for n, keep in zip(num_tokens_per_episode, kept, strict=True) if keep]
    # max(1, ...) only ever acts where there is no token to weigh.
    if loss_type in ("grpo", "gspo", "sapo"):
        denominators = [len(kept_tokens) * max(1, n) for n in num_tokens_per_episode]
    elif loss_type in ("bnpo", "dapo", "cispo"):
        denominators = [max(1, sum(kept_tokens))] * len(kept)
    elif loss_type == "dr_grpo":
        denominators = [len(kept_tokens) * max_completion_len] * len(kept)
    else:
        raise ValueError(f"loss_type: {loss_type!r} has no normaliser")
    return [1.0 / denominator if keep else 0.0 for denominator, keep in zip(denominators, kept)]
