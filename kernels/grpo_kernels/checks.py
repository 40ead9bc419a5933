"""What every op demands of its inputs, checked once, with the name of the argument in the error."""

from __future__ import annotations

import torch
from torch import Tensor


def check_temperature(temperature: float) -> None:
    """Raises ValueError unless 0 < temperature < inf: at 0 there is no distribution to take a log-prob of."""
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature: {temperature} is not a positive number")


def check_targets(targets: Tensor, num_rows: int, vocab: int) -> None:
    """Raises ValueError for a wrong shape or dtype, or an id outside [0, vocab).

    On a GPU the range is asserted on the device, without waiting for it: the error shows at the next synchronisation.
    """
    if targets.shape != (num_rows,) or targets.dtype != torch.int64:
        raise ValueError(f"targets: {targets.dtype} {tuple(targets.shape)}, but must be int64 ({num_rows},)")
    inside = ((targets >= 0) & (targets < vocab)).all()
    if targets.is_cuda:
        torch._assert_async(inside)
    elif not inside:
        wrong = int(targets[(targets < 0) | (targets >= vocab)][0])
        raise ValueError(f"targets: {wrong} is outside the vocabulary of {vocab}")


def check_linear(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> None:
    """Raises ValueError unless hidden is [N, D], weight [V, D] with V > 0 and targets [N] int64 in [0, V)."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or not len(weight):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}: must be [N, D] and [V, D], V > 0"
        )
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name}: {tensor.dtype} is not a floating dtype")
    check_targets(targets, len(hidden), len(weight))
    check_temperature(temperature)


def check_tokens(num_tokens: int, **tensors: Tensor | None) -> None:
    """Raises ValueError unless each tensor that is not None is floating [num_tokens]."""
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.shape != (num_tokens,) or not tensor.dtype.is_floating_point):
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, but must be floating ({num_tokens},)")


def check_sampler(mismatch: str, sampler_logprobs: Tensor | None) -> None:
    """Raises ValueError, as `grpo_loss` does, for importance weights without the sampler's log-probs."""
    if mismatch != "none" and sampler_logprobs is None:
        raise ValueError(f"mismatch is {mismatch!r} but no sampler_logprobs were given")
