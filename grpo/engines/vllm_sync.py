"""How the trainer makes sure that vLLM samples with its weights: both sides score one fixed text.

Nothing here imports vLLM: these functions see two plain modules and two lists of log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from grpo.config import RunStopped
from grpo.data_types import TokenBatch
from grpo.engines.vllm_tensors import differing_tensors
from grpo.head import score
from grpo.model import Policy

CANARY_LENGTH = 128  # tokens at most
ROUNDINGS_PER_LAYER = 8  # norm, q/k/v, rotation, attention, output; norm, gate and up, down
SAFETY = 2.0


def canary_batch(ids: Sequence[int], device: torch.device) -> TokenBatch:
    """One row in which each token but the first is to be predicted, N = len(ids) - 1."""
    row = torch.tensor([list(ids)])
    count = len(ids) - 1
    zeros = torch.zeros(count)
    return TokenBatch(
        input_ids=row,
        position_ids=torch.arange(len(ids))[None],
        predict_rows=zeros.long(),
        predict_cols=torch.arange(count),
        targets=row[0, 1:],
        episode_index=zeros.long(),
        sampler_logprobs=zeros,
        token_weights=zeros + 1,
        episodes=(0,),
    ).to(device)


def canary_logprobs(policy: Policy, ids: Sequence[int]) -> list[float]:
    """The trainer's log-probs of ids[1:], each given what is before it, at temperature 1."""
    return score(policy, canary_batch(ids, policy.device))[0].tolist()


def canary_tolerance(config: Any, dtype: torch.dtype, logprobs: Sequence[float]) -> float:
    """The largest mean |trainer - vLLM| of the canary's log-probs that rounding explains, in nats.

    Both sides compute the same function with other kernels. Each of the R = 8 L roundings on the way through L layers
    changes the residual stream by a relative u (the unit roundoff of `dtype`), in random directions, so together by
    u * sqrt(R). Matrix products accumulate K = hidden_size terms in float32, which adds u32 * sqrt(R * K). A relative
    error of the logits is one of log-probs times their size. The bound is twice that.

    Measured on a CPU on models of 2 to 28 layers, gaps were at most 1/28 of it in float32 and 1/11 in bfloat16. Without
    one MLP, float32 log-probs were off by more than 300 times the bound; in bfloat16 that can lie below it, and the
    checksums are the sharper test.
    """
    roundings = ROUNDINGS_PER_LAYER * config.num_hidden_layers
    unit, unit32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    relative = unit * math.sqrt(roundings) + unit32 * math.sqrt(roundings * config.hidden_size)
    scale = max(1.0, sum(map(abs, logprobs)) / len(logprobs))
    return SAFETY * relative * scale


def check_canary(policy: Policy, ids: Sequence[int], actual: Sequence[float], sampler: torch.nn.Module | None) -> None:
    """Compare vLLM's log-probs of the canary and its tensors with the trainer's.

    Args:
        ids: the canary.
        actual: vLLM's log-probs of ids[1:].
        sampler: vLLM's model; None where it has a part of each tensor only.

    Raises:
        RunStopped: they differ; names the tensors that do.
    """
    compare(policy, ids, actual, [] if sampler is None else differing_tensors(policy.model, sampler))


def compare(
    policy: Policy, ids: Sequence[int], actual: Sequence[float], wrong: Sequence[str], who: str = "vLLM"
) -> None:
    """The same where the names of the tensors that differ, `wrong`, are known; `who` begins what is said."""
    expected = canary_logprobs(policy, ids)
    gap = sum(abs(a - b) for a, b in zip(actual, expected, strict=True)) / len(expected)
    bound = canary_tolerance(policy.model.config.get_text_config(), policy.dtype, expected)
    if gap <= bound and not wrong:
        return
    named = f"{len(wrong)} tensors differ, first {', '.join(wrong[:3])}" if wrong else "no tensor's checksum differs"
    raise RunStopped(
        f"{who} does not have the trainer's weights: log-probs of a fixed text differ by {gap:.2g} nats on average, "
        f"rounding explains {bound:.2g}; {named}"
    )
