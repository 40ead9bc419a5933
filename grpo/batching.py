"""Episodes -> microbatches of padded rows, and the index of the positions that are trained.

The index is built here, on the CPU, from the episodes' loss masks: no device synchronisation, and masked tokens never
reach the LM head. Token weights come in from `grpo.advantages.token_weights`, computed once over the whole optimiser
step, so that 1 x 64 and 8 x 8 microbatches give the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo.data_types import Episode, TokenBatch


def make_microbatches(
    episodes: Sequence[Episode],
    weights: Sequence[float],
    *,
    max_tokens: int,
    pad_id: int = 0,
) -> list[TokenBatch]:
    """Split a step's episodes into microbatches of at most `max_tokens` padded tokens (at least one row each).

    Args:
        episodes: the E episodes of the step.
        weights: the weight of each trained token, one per episode. Episodes of weight 0 are left out: they are in
            neither the numerator nor the denominator of the loss.
        max_tokens: rows times the longest row of the microbatch.
        pad_id: any valid token id; padding is recognised by length alone.
    """
    # Longest first: rows of similar length share a microbatch, and the largest one comes first (memory fails early).
    kept = [i for i, weight in enumerate(weights) if weight > 0 and episodes[i].num_trained > 0]
    kept.sort(key=lambda i: (-_length(episodes[i]), i))
    batches, rows = [], []
    for i in kept:
        if rows and (len(rows) + 1) * _length(episodes[rows[0]]) > max_tokens:
            batches.append(rows)
            rows = []
        rows.append(i)
    if rows:
        batches.append(rows)
    return [_collate(sorted(rows), episodes, weights, pad_id) for rows in batches]


def _length(episode: Episode) -> int:
    return len(episode.prompt_ids) + len(episode.completion_ids)


def _collate(
    rows: list[int], episodes: Sequence[Episode], weights: Sequence[float], pad_id: int
) -> TokenBatch:
    width = max(_length(episodes[i]) for i in rows)
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)  # [B, T]
    index: list[tuple[int, int, int, int]] = []  # (row, predicting column, target, episode) per trained token
    sampler_logprobs: list[float] = []
    for row, i in enumerate(rows):
        episode = episodes[i]
        ids = episode.prompt_ids + episode.completion_ids
        input_ids[row, : len(ids)] = torch.tensor(ids)
        prompt = len(episode.prompt_ids)
        for t, trained in enumerate(episode.loss_mask):
            if trained:
                # The token at column prompt + t is predicted by the column before it.
                index.append((row, prompt + t - 1, ids[prompt + t], i))
                sampler_logprobs.append(episode.sampler_logprobs[t])
    predict_rows, predict_cols, targets, episode_index = torch.tensor(index).T.contiguous()  # each [N]
    return TokenBatch(
        input_ids=input_ids,
        predict_rows=predict_rows,
        predict_cols=predict_cols,
        targets=targets,
        episode_index=episode_index,
        sampler_logprobs=torch.tensor(sampler_logprobs),
        token_weights=torch.tensor([weights[i] for i in episode_index.tolist()]),
        rows=tuple(rows),
    )
