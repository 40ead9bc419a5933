"""The worked examples in the docstrings of grpo/data_types.py, asserted as they stand there."""

import dataclasses
import re

import pytest

from env.clarify import StopReason
from grpo.advantages import group_advantages
from grpo.batching import make_microbatches
from grpo.data_types import Episode, Group, TokenBatch, Turn

TURNS = (Turn(0, 3, "", "a reply"), Turn(13, 15, "", None))


def numbers(cls, name):
    """The list after `name` in the example of a docstring."""
    found = re.search(rf"^ +{name} +\[([^\]]*)\]", cls.__doc__, re.MULTILINE)
    return tuple(int(number) for number in found[1].split(","))


@pytest.fixture
def episode():
    mask = numbers(Episode, "loss_mask")
    return Episode(
        prompt_ids=numbers(Episode, "prompt_ids"),
        completion_ids=numbers(Episode, "completion_ids"),
        loss_mask=mask,
        sampler_logprobs=tuple(-0.1 * trained for trained in mask),
        turns=TURNS,
        stop_reason=StopReason.PLAN,
        record=None,
        reward=1.0,
    )


def test_episode_and_turn(episode):
    assert len(episode.completion_ids) == len(episode.loss_mask) == 15
    assert episode.num_trained == 5 and not episode.truncated
    assert "0:3, 13:15" in Episode.__doc__ and [(t.start, t.stop) for t in TURNS] == [(0, 3), (13, 15)]
    sampled = {i for turn in TURNS for i in range(turn.start, turn.stop)}
    assert {i for i, trained in enumerate(episode.loss_mask) if trained} == sampled
    assert episode.completion_ids[TURNS[1].start : TURNS[1].stop] == (7, 151645)


@pytest.mark.parametrize("reason", StopReason)
def test_truncated_means_a_length_limit(episode, reason):
    cut = dataclasses.replace(episode, stop_reason=reason)
    assert cut.truncated == (reason in (StopReason.TOKEN_CAP, StopReason.CONTEXT_FULL))


def test_group(episode):
    members = tuple(dataclasses.replace(episode, reward=r, member=i) for i, r in enumerate((0.0, 0.0, 0.0, 1.0)))
    group = Group(scenario=None, episodes=members)
    assert group.rewards == [0.0, 0.0, 0.0, 1.0]
    assert group_advantages([group.rewards])[0] == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-3)


def test_token_batch(episode):
    second = dataclasses.replace(
        episode, completion_ids=(6, 151645), loss_mask=(1, 1), sampler_logprobs=(-1.0, -1.0), member=1
    )
    (batch,) = make_microbatches([episode, second], [1.0, 1.0], max_tokens=100)
    assert tuple(batch.input_ids.shape) == (1, 18) and len(batch.targets) == 7
    for name in ("predict_cols", "targets", "episode_index"):
        assert tuple(getattr(batch, name).tolist()) == numbers(TokenBatch, name)


@pytest.mark.parametrize("cls", [Turn, Episode, Group, TokenBatch])
def test_all_are_frozen(cls):
    assert cls.__dataclass_params__.frozen
