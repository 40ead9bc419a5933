"""The frozen reference: the base model, never trained, never in the optimiser, never in training mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo.config import ModelConfig
from grpo.data_types import TokenBatch
from grpo.head import score
from grpo.model import load_policy


class Reference:
    """Log-probs under the base that `--model` names.

    It is always loaded from there, also on resume: the checkpoint holds the moved policy, and a reference taken from
    it would make the KL start again at 0.
    """

    def __init__(self, config: ModelConfig):
        self.policy = load_policy(config)
        self.policy.model.requires_grad_(False)

    def logprobs(self, batches: Sequence[TokenBatch], temperature: float) -> list[torch.Tensor]:
        """One [N] float32 tensor per microbatch. Computed once per rollout batch, whatever `num_iterations`."""
        return [score(self.policy, batch, temperature)[0] for batch in batches]
