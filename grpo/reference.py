"""The frozen reference: the base model, never trained, never in the optimiser, never in training mode."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch

from grpo import distributed
from grpo.batching import Packing, make_microbatches
from grpo.config import ModelConfig, UsageError
from grpo.data_types import Episode, TokenBatch
from grpo.head import score
from grpo.lora import adapters_off
from grpo.model import Policy, enable_packing, hidden_states, load_policy
from grpo.tree_attention import Segment, TreeLayout


class Reference:
    """Log-probs under the base that `--model` names.

    It is always loaded from there, also on resume: the checkpoint holds the moved policy, and a reference taken from
    it would make the KL start again at 0. Where the policy is that base with adapters, it is the policy with its
    adapters off: no second copy of the weights.

    Being frozen, it computes little twice: keys and values of the prefix that all prompts share once per run, a group's
    prompt once per rollout batch, equal episodes of a rollout batch once.
    """

    def __init__(self, config: ModelConfig, packing: Packing, max_context: int, policy: Policy | None = None):
        """`policy` is needed, and used, with `config.lora_rank` only."""
        self.packing, self.adapted = packing, config.lora_rank > 0
        if self.adapted:
            if policy is None:
                raise ValueError("the reference of a policy with adapters is that policy; it was not given")
            self.policy = policy
        else:
            self.policy = load_policy(config)
            self.policy.model.requires_grad_(False)
        if packing.packed and not self.adapted:
            reason = enable_packing(self.policy, max_context)
            if reason:
                raise UsageError(f"--packing auto: the policy can be packed but its reference cannot: {reason}")
        self._prefix: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # per layer, [1, H_kv, P, d]

    def logprobs(self, episodes: Sequence[Episode], temperature: float, max_tokens: int) -> list[torch.Tensor]:
        """Log-probs of each episode's trained tokens, [num_trained] float32. Once per rollout batch, whatever
        `num_iterations`. Memory is bounded by `max_tokens` unique tokens a forward."""
        first: dict[tuple, int] = {}  # content -> the episode that is computed for it
        for i, episode in enumerate(episodes):
            if episode.num_trained:
                first.setdefault((episode.prompt_ids, episode.completion_ids, episode.loss_mask), i)
        weights = [0.0] * len(episodes)
        for i in first.values():
            weights[i] = 1.0
        found: dict[int, torch.Tensor] = {}
        off = adapters_off(self.policy.model) if self.adapted else contextlib.nullcontext()
        with distributed.whole(self.policy.model), off:
            for batch in make_microbatches(episodes, weights, max_tokens=max_tokens, packing=self.packing):
                batch = self._without_prefix(batch).to(self.policy.device)
                counts = [episodes[i].num_trained for i in batch.episodes]
                found.update(zip(batch.episodes, score(self.policy, batch, temperature)[0].split(counts)))
        empty = torch.empty(0, device=self.policy.device)
        return [found[first[e.prompt_ids, e.completion_ids, e.loss_mask]] if e.num_trained else empty for e in episodes]

    def _without_prefix(self, batch: TokenBatch) -> TokenBatch:
        """The batch behind the cached keys and values of the common prefix, where it begins with that."""
        length = len(self.packing.prefix)
        if batch.layout is None or not length or batch.layout.segments[0] != Segment(length, -1):
            return batch
        if tuple(batch.input_ids[0, :length].tolist()) != self.packing.prefix or int(batch.predict_cols.min()) < length:
            return batch
        if not self._prefix:
            self._prefix = self._record_prefix(batch)
        # Children of the prefix become roots; everybody else's parent moves down by one.
        segments = [Segment(s.length, s.parent - 1) for s in batch.layout.segments[1:]]
        layout = TreeLayout(segments, prefix=self._prefix, prefix_length=length)
        return dataclasses.replace(
            batch,
            input_ids=batch.input_ids[:, length:],
            position_ids=batch.position_ids[:, length:],
            predict_cols=batch.predict_cols - length,
            layout=layout,
        )

    @torch.no_grad()
    def _record_prefix(self, batch: TokenBatch) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        length = len(self.packing.prefix)
        layout = TreeLayout([Segment(length, -1)], record=True)
        alone = dataclasses.replace(
            batch,
            input_ids=batch.input_ids[:, :length],
            position_ids=batch.position_ids[:, :length],
            predict_rows=batch.predict_rows[:0],
            predict_cols=batch.predict_cols[:0],
            layout=layout,
        )
        hidden_states(self.policy, alone.to(self.policy.device))
        return layout.prefix
