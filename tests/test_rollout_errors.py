"""What fails in one episode of the multi-turn loop costs that episode alone."""

from __future__ import annotations

import logging
import math

import pytest

from env.clarify import EpisodeRecord, StopReason
from grpo.data_types import Episode
from tests.test_rollout import EOS, ScriptedEngine, StubEnv, play, two_turns


class FaultyEnv(StubEnv):
    """The second environment that is made breaks in the place given by `fault`."""

    made = 0
    fault = ""

    def __init__(self, scenario):
        type(self).made += 1
        self.broken = type(self).made == 2
        self._break("init")
        super().__init__(scenario)

    def _break(self, place):
        if self.broken and self.fault == place:
            raise OSError(f"broken in {place}")

    def reset(self):
        self._break("reset")
        return super().reset()

    def step(self, text, truncated=False):
        result = super().step(text, truncated)
        self._break("step")
        return result

    def finish(self, stop_reason):
        self._break("finish")
        return super().finish(stop_reason)


@pytest.mark.parametrize("fault", ["init", "reset", "step", "finish"])
def test_a_broken_environment_costs_its_own_episode(fault, caplog):
    env_class = type("Env", (FaultyEnv,), {"made": 0, "fault": fault})
    length = 8 if fault == "finish" else 1000
    with caplog.at_level(logging.WARNING, "grpo.rollout"):
        (group,) = play(ScriptedEngine(two_turns), num_generations=3, env_factory=env_class, max_completion_len=length)
    first, second, third = group.episodes
    assert group.rewards == [1.0, None, 1.0]
    assert second.stop_reason == second.record.stop_reason == StopReason.ENV_ERROR
    assert not second.truncated
    assert first.stop_reason == third.stop_reason != StopReason.ENV_ERROR
    assert first.completion_ids == third.completion_ids
    assert f"broken in {fault}" in caplog.text and "(0, 1)" in caplog.text
    if fault in ("step", "finish"):
        assert second.completion_ids == (5, 6, EOS) and second.record.num_turns == 1
    else:
        assert second.completion_ids == second.prompt_ids == ()


def test_a_broken_reward_costs_its_own_episode(caplog):
    for bad in (ZeroDivisionError("no"), math.nan, math.inf, None):
        rewards = iter([0.25, bad, 0.5])

        def reward_fn(record: EpisodeRecord, rewards=rewards):
            value = next(rewards)
            if isinstance(value, Exception):
                raise value
            return value

        (group,) = play(ScriptedEngine(two_turns), num_generations=3, reward_fn=reward_fn)
        assert group.rewards == [0.25, None, 0.5]
        assert [episode.stop_reason for episode in group.episodes] == [
            StopReason.PLAN, StopReason.ENV_ERROR, StopReason.PLAN,
        ]  # fmt: skip
        assert isinstance(group.episodes[1], Episode) and group.episodes[1].completion_ids
    assert len(caplog.records) == 4


def test_an_interrupt_is_not_an_environment_error():
    class Interrupted(StubEnv):
        def step(self, text, truncated=False):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(ScriptedEngine(two_turns), env_factory=Interrupted)
