"""The learning rate of each step, as a function of the step's index alone: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from grpo.config import OptimConfig


def learning_rate(step_index: int, config: OptimConfig) -> float:
    """Learning rate used *for* step `step_index` (0-based): linear warm-up from 0 to the peak, then decay to 0.

    The peak is used at step `warmup_steps`, 0 would be reached at step `num_steps`, which is never run. Steps beyond
    the last get the final value. Warm-up 2, 10 steps, linear, peak 1: 0, .5, 1, .875, .75, .625, ... .125.
    Raises ValueError for an unknown schedule.
    """
    if step_index < config.warmup_steps:
        return config.learning_rate * step_index / config.warmup_steps
    progress = min(1.0, (step_index - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps))
    if config.lr_schedule == "constant":
        return config.learning_rate
    if config.lr_schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    if config.lr_schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"lr_schedule: {config.lr_schedule!r} is not one of constant, linear, cosine")
