"""Fuzzing tokens: rollouts and masks, packing and tree attention, each against a naive way to say the same."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env.clarify import ClarifyEnv, StepResult, StopReason
from grpo import tree_attention
from grpo.batching import Packing, common_prefix, make_microbatches
from grpo.data_types import Episode
from grpo.tree_attention import Segment, TreeLayout
from tests.test_batching import episode
from tests.test_rollout import EOS, ScriptedEngine, StubChat, play

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---------------------------------------------------------------------------------------------------------- rollouts


class AnyEnv(ClarifyEnv):
    """Ends after as many turns as the first sampled id says."""

    def step(self, text, truncated=False):
        turns = self.record.num_turns + 1
        done = not truncated and turns > int(text.split()[0]) % 5
        reason = StopReason.PLAN if done else None
        self._record = dataclasses.replace(self.record, num_turns=turns, plan={}, stop_reason=reason)
        return StepResult(None if done else "9", done, reason)


TURNS = st.lists(st.lists(st.integers(0, 30), min_size=0, max_size=9), min_size=6, max_size=6)


@QUICK
@given(
    scripts=st.lists(TURNS, min_size=1, max_size=4), prompt=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    delta=st.lists(st.sampled_from([1, 2, EOS]), min_size=0, max_size=6), budget=st.integers(1, 30),
    context=st.integers(1, 50), order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_rollout_keeps_its_books(scripts, prompt, delta, budget, context, order):
    """Lengths, masks, limits and the prefix property, whatever is sampled, in whatever order turns end."""
    engine = ScriptedEngine(
        lambda key, turn: (*scripts[key[1]][turn % 6], EOS), max_context=context, rank=lambda key, turn: order.random()
    )
    (group,) = play(
        engine, StubChat(prompt, delta), num_generations=len(scripts), max_completion_len=budget, env_factory=AnyEnv
    )
    asked: dict = {}
    for request in engine.requests:
        asked.setdefault(request.key, []).append(request)
        assert 1 <= request.max_tokens and len(request.prompt_ids) + request.max_tokens <= context
    assert [e.member for e in group.episodes] == list(range(len(scripts)))
    for e in group.episodes:
        assert e.prompt_ids == tuple(prompt)
        assert len(e.completion_ids) == len(e.loss_mask) == len(e.sampler_logprobs) <= budget
        assert not e.completion_ids or len(prompt) + len(e.completion_ids) <= context
        # Said naively: turns and whole replies alternate, and the mask is 1 on the turns.
        ids, mask = [], []
        for n in range(len(e.turns)):
            sampled = (*scripts[e.member][n], EOS)
            sampled = sampled[: sampled.index(EOS) + 1] if EOS in sampled else sampled
            request = asked[0, e.member][n]
            assert request.prompt_ids == (*prompt, *ids)
            ids += sampled[: request.max_tokens]
            mask += [1] * (len(ids) - len(mask))
            if n + 1 < len(e.turns):
                ids += delta
                mask += [0] * len(delta)
        assert (e.completion_ids, e.loss_mask) == (tuple(ids), tuple(mask))
        assert all((logprob < 0) == bool(m) for logprob, m in zip(e.sampler_logprobs, e.loss_mask))
        assert e.stop_reason in (StopReason.PLAN, StopReason.TOKEN_CAP, StopReason.CONTEXT_FULL)
        assert not mask or mask[-1] == 1  # never ends in half a conversation, or in a reply that nobody answers
    assert sorted(engine.released) == sorted(asked)


# ----------------------------------------------------------------------------------------------------------- packing


@st.composite
def steps(draw) -> tuple[list[Episode], list[float], tuple[int, ...]]:
    """Episodes in groups: prompts that may share a prefix or be one, masks of any kind, weights with zeros."""
    ids = st.integers(0, 4)  # few ids: equal tokens everywhere
    system = tuple(draw(st.lists(ids, max_size=4)))
    episodes = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = system + tuple(draw(st.lists(ids, min_size=1, max_size=4)))
        for _ in range(draw(st.integers(1, 4))):
            mask = draw(st.lists(st.integers(0, 1), max_size=7))
            logprobs = [-0.25 * (t + 1) * m for t, m in enumerate(mask)]
            completion = draw(st.lists(ids, min_size=len(mask), max_size=len(mask)))
            episodes.append(episode(prompt, completion, mask, logprobs or None, member=len(episodes)))
    order = draw(st.permutations(range(len(episodes))))
    episodes = [episodes[i] for i in order]
    weights = draw(st.lists(st.sampled_from([0.0, 0.5, 0.25]), min_size=len(episodes), max_size=len(episodes)))
    return episodes, weights, system


def conversations(batch) -> list[tuple[int, ...]]:
    """For each predicting position, all ids that it sees, oldest first: read off the layout, naively."""
    if batch.layout is None:
        return [
            tuple(batch.input_ids[row, : column + 1].tolist())
            for row, column in zip(batch.predict_rows.tolist(), batch.predict_cols.tolist())
        ]
    ids = batch.input_ids[0].tolist()
    spans = list(itertools.accumulate([segment.length for segment in batch.layout.segments], initial=0))
    seen = []
    for column in batch.predict_cols.tolist():
        index = next(i for i in range(len(spans) - 1) if spans[i] <= column < spans[i + 1])
        path = ids[spans[index] : column + 1]
        parent = batch.layout.segments[index].parent
        while parent >= 0:
            path = ids[spans[parent] : spans[parent + 1]] + path
            parent = batch.layout.segments[parent].parent
        assert batch.position_ids[0, column] == len(path) - 1
        seen.append(tuple(path))
    return seen


@settings(QUICK, max_examples=300)
@given(steps(), st.integers(1, 60), st.booleans(), st.booleans())
def test_a_packed_step_holds_what_padded_rows_would(step, max_tokens, packed, use_prefix):
    episodes, weights, system = step
    prefix = common_prefix([e.prompt_ids for e in episodes]) if use_prefix else ()
    packing = Packing(packed=packed, prefix=prefix)
    batches = make_microbatches(episodes, weights, max_tokens=max_tokens, packing=packing)
    kept = [i for i, weight in enumerate(weights) if weight > 0 and any(episodes[i].loss_mask)]
    assert sorted(i for batch in batches for i in batch.episodes) == kept  # each once
    found = {}
    for batch in batches:
        assert batch.episode_index.tolist() == sorted(batch.episode_index.tolist())
        for values in zip(
            batch.episode_index.tolist(), conversations(batch), batch.targets.tolist(),
            batch.sampler_logprobs.tolist(), batch.token_weights.tolist(), strict=True,
        ):  # fmt: skip
            found.setdefault(values[0], []).append(values[1:])
        if len(batch.episodes) > 1:
            assert batch.input_ids.numel() <= max_tokens
        if packed:  # unique: members of a prompt share it, prompts share the prefix
            prompts = {episodes[i].prompt_ids for i in batch.episodes}
            own = sum(max(t for t, m in enumerate(episodes[i].loss_mask) if m) for i in batch.episodes)
            unique = len(prefix) + sum(len(prompt) - len(prefix) for prompt in prompts) + own
            assert batch.input_ids.numel() == unique
    for i in kept:
        e = episodes[i]
        assert found[i] == [
            (e.prompt_ids + e.completion_ids[:t], e.completion_ids[t], e.sampler_logprobs[t], weights[i])
            for t, m in enumerate(e.loss_mask)
            if m
        ]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5))
def test_the_common_prefix_is_the_longest_that_leaves_every_prompt_a_token(prompts):
    prefix = common_prefix(prompts)
    assert all(prompt[: len(prefix)] == prefix and len(prompt) > len(prefix) for prompt in prompts)
    longer = {prompt[: len(prefix) + 1] for prompt in prompts}
    assert len(longer) > 1 or min(map(len, prompts)) == len(prefix) + 1


# --------------------------------------------------------------------------------------------------- tree attention


@st.composite
def layouts(draw) -> TreeLayout:
    segments = []
    for i in range(draw(st.integers(1, 7))):
        segments.append(Segment(draw(st.integers(1, 5)), draw(st.integers(-1, i - 1))))
    return TreeLayout(tuple(segments), prefix_length=draw(st.sampled_from([0, 0, 3])))


def seen_by(layout: TreeLayout) -> torch.Tensor:
    """[T, P + T] bool, pair by pair: a token sees the prefix, its ancestors, and its own segment up to itself."""
    owner = [i for i, segment in enumerate(layout.segments) for _ in range(segment.length)]
    tokens = len(owner)

    def above(segment: int) -> set[int]:
        parent = layout.segments[segment].parent
        return set() if parent < 0 else {parent} | above(parent)

    mask = torch.zeros(tokens, layout.prefix_length + tokens, dtype=torch.bool)
    mask[:, : layout.prefix_length] = True
    for i, j in itertools.product(range(tokens), repeat=2):
        mask[i, layout.prefix_length + j] = owner[j] in above(owner[i]) or (owner[i] == owner[j] and j <= i)
    return mask


@QUICK
@given(layouts(), st.sampled_from([(2, 2), (4, 2), (2, 1)]), st.integers(0, 2**31))
def test_tree_attention_is_attention_under_the_naive_mask(layout, heads, seed):
    """Values and gradients, to rounding; double precision, so that a wrong pair cannot hide."""
    query_heads, key_heads = heads
    mask = seen_by(layout)
    tokens, keys = mask.shape
    generator = torch.Generator().manual_seed(seed)

    def random(n_heads, n):
        return torch.randn(1, n_heads, n, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    query, key, value = random(query_heads, tokens), random(key_heads, keys), random(key_heads, keys)
    share = query_heads // key_heads
    scores = 0.5 * query @ key.repeat_interleave(share, 1).transpose(-1, -2)
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
    expected = (weights @ value.repeat_interleave(share, 1)).transpose(1, 2)
    actual = tree_attention._segment_by_segment(query, key, value, layout, 0.5)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(actual, (query, key, value), upstream),
        torch.autograd.grad(expected, (query, key, value), upstream),
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@QUICK
@given(layouts())
def test_positions_and_key_columns_are_those_of_the_naive_mask(layout):
    mask = seen_by(layout)
    assert (layout.positions() == mask.sum(1) - 1).all()
    columns, cu_queries, cu_keys, longest_query, longest_key = layout.key_columns(torch.device("cpu"))
    lengths = [segment.length for segment in layout.segments]
    assert cu_queries.diff().tolist() == lengths and longest_query == max(lengths)
    assert longest_key == cu_keys.diff().max()
    for i in range(len(lengths)):
        last = int(cu_queries[i + 1]) - 1  # the last token of a segment sees all of its keys
        assert columns[cu_keys[i] : cu_keys[i + 1]].tolist() == mask[last].nonzero()[:, 0].tolist()
