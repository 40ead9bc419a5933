"""Episodes -> microbatches of unique tokens, and the index of the positions that are trained.

The index is built here, on the CPU, from the episodes' loss masks: no device synchronisation, and masked tokens never
reach the LM head. Token weights come in from `grpo.advantages.token_weights`, computed once over the whole optimiser
step, so that 1 x 64 and 8 x 8 microbatches give the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo.data_types import Episode, TokenBatch
from grpo.tree_attention import Segment, TreeLayout


@dataclass(frozen=True)
class Packing:
    """How the tokens of a run are laid out."""

    packed: bool = True
    """One row of unique segments, else padded rows."""
    prefix: tuple[int, ...] = ()
    """Ids that all prompts begin with: a packed microbatch computes them once."""
    reason: str = ""
    """Why it is not packed."""


def make_microbatches(
    episodes: Sequence[Episode],
    weights: Sequence[float],
    *,
    max_tokens: int,
    packing: Packing = Packing(),  # noqa: B008 (frozen)
) -> list[TokenBatch]:
    """Split a step's episodes into microbatches of at most `max_tokens` tokens (at least one episode each).

    Args:
        episodes: the E episodes of the step.
        weights: the weight of each trained token, one per episode. Episodes of weight 0 are left out: they are in
            neither the numerator nor the denominator of the loss.
        max_tokens: unique tokens of a microbatch; not packed: rows times the longest row.
    """
    kept = [i for i, weight in enumerate(weights) if weight > 0 and episodes[i].num_trained > 0]
    split, collate = (_split_packed, _collate_packed) if packing.packed else (_split_padded, _collate_padded)
    members = split(kept, episodes, max_tokens, packing.prefix)
    return [collate(each, episodes, weights, packing.prefix) for each in members]


def inputs(episode: Episode) -> tuple[int, ...]:
    """The episode's ids up to the last one that predicts a trained token."""
    last = max(t for t, trained in enumerate(episode.loss_mask) if trained)
    return episode.prompt_ids + episode.completion_ids[:last]


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ids that all prompts begin with, but for the last of the shortest: () for no prompt."""
    if not prompts:
        return ()
    first, last = min(prompts), max(prompts)  # in lexicographic order: what these two share, all share
    limit = min(map(len, prompts)) - 1
    shared = next((i for i in range(limit) if first[i] != last[i]), limit)
    return tuple(first[:shared])


def _split_packed(
    kept: list[int], episodes: Sequence[Episode], max_tokens: int, prefix: Sequence[int]
) -> list[list[int]]:
    """Members of a group stay together; the longest groups come first (memory fails early)."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in kept:
        groups.setdefault(episodes[i].prompt_ids, []).append(i)
    lengths = {i: len(inputs(episodes[i])) - len(episodes[i].prompt_ids) for i in kept}
    order = sorted(groups, key=lambda prompt: (-len(prompt) - sum(lengths[i] for i in groups[prompt]), groups[prompt]))
    batches: list[list[int]] = []
    members: list[int] = []
    used = 0
    for prompt in order:
        opened = False  # is the prompt in the microbatch that is being filled?
        for i in groups[prompt]:
            more = lengths[i] + (0 if opened else len(prompt) - len(prefix))
            if members and used + more > max_tokens:
                batches.append(members)
                members, opened = [], False
            if not members:
                used = len(prefix)
            used += lengths[i] + (0 if opened else len(prompt) - len(prefix))
            members.append(i)
            opened = True
    return [*batches, members] if members else batches


def _collate_packed(
    members: list[int], episodes: Sequence[Episode], weights: Sequence[float], prefix: tuple[int, ...]
) -> TokenBatch:
    ids: list[int] = []
    segments: list[Segment] = []
    last: list[int] = []  # column of each segment's last token

    def add(tokens: Sequence[int], parent: int) -> int:
        """Append a segment; the index of the segment that descendants hang on."""
        if not tokens:
            return parent
        segments.append(Segment(len(tokens), parent))
        ids.extend(tokens)
        last.append(len(ids) - 1)
        return len(segments) - 1

    shared = prefix if all(episodes[i].prompt_ids[: len(prefix)] == prefix for i in members) else ()
    root = add(shared, -1)
    prompts: dict[tuple[int, ...], int] = {}  # prompt -> its segment
    predictors: dict[int, list[int]] = {}  # episode -> columns that predict its trained tokens
    for i in sorted(members, key=lambda i: episodes[i].prompt_ids):  # stable: a prompt, then its members in order
        prompt = episodes[i].prompt_ids
        if prompt not in prompts:
            prompts[prompt] = add(prompt[len(shared) :], root)
        first = len(ids)
        add(inputs(episodes[i])[len(prompt) :], prompts[prompt])
        # The prompt's last token predicts the first sampled token of every member.
        before = [last[prompts[prompt]], *range(first, len(ids))]  # column before completion token t
        predictors[i] = [before[t] for t, trained in enumerate(episodes[i].loss_mask) if trained]
    layout = TreeLayout(tuple(segments))
    columns = torch.tensor([column for i in sorted(members) for column in predictors[i]])  # [N]
    return TokenBatch(
        input_ids=torch.tensor([ids]),
        position_ids=layout.positions()[None],
        predict_rows=torch.zeros_like(columns),
        predict_cols=columns,
        layout=layout,
        **_token_fields(sorted(members), episodes, weights),
    )


def _token_fields(members: list[int], episodes: Sequence[Episode], weights: Sequence[float]) -> dict:
    """What a trained token carries, in the order of `members`: each [N]."""
    trained = [(i, t) for i in members for t, mask in enumerate(episodes[i].loss_mask) if mask]
    return dict(
        targets=torch.tensor([episodes[i].completion_ids[t] for i, t in trained]),
        episode_index=torch.tensor([i for i, _ in trained]),
        sampler_logprobs=torch.tensor([episodes[i].sampler_logprobs[t] for i, t in trained]),
        token_weights=torch.tensor([weights[i] for i, _ in trained]),
        episodes=tuple(members),
    )


def _split_padded(
    kept: list[int], episodes: Sequence[Episode], max_tokens: int, prefix: Sequence[int]
) -> list[list[int]]:
    """Longest first: rows of similar length share a microbatch, and the largest one comes first."""
    lengths = {i: len(inputs(episodes[i])) for i in kept}
    batches: list[list[int]] = []
    members: list[int] = []
    for i in sorted(kept, key=lambda i: (-lengths[i], i)):
        if members and (len(members) + 1) * lengths[members[0]] > max_tokens:
            batches.append(members)
            members = []
        members.append(i)
    return [*batches, members] if members else batches


def _collate_padded(
    members: list[int], episodes: Sequence[Episode], weights: Sequence[float], prefix: tuple[int, ...]
) -> TokenBatch:
    members = sorted(members)
    width = max(len(inputs(episodes[i])) for i in members)
    # Padding is id 0 and needs no mask: rows are padded on the right and attention is causal.
    input_ids = torch.zeros(len(members), width, dtype=torch.int64)  # [B, T]
    index: list[tuple[int, int]] = []
    for row, i in enumerate(members):
        ids, prompt = inputs(episodes[i]), len(episodes[i].prompt_ids)
        input_ids[row, : len(ids)] = torch.tensor(ids)
        # The token at column prompt + t is predicted by the column before it.
        index += [(row, prompt + t - 1) for t, trained in enumerate(episodes[i].loss_mask) if trained]
    rows, columns = torch.tensor(index).T.contiguous()  # each [N]
    return TokenBatch(
        input_ids=input_ids,
        position_ids=torch.arange(width).expand(len(members), -1),
        predict_rows=rows,
        predict_cols=columns,
        **_token_fields(members, episodes, weights),
    )
