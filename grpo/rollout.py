"""Multi-turn rollouts: episodes of an environment, played by an engine, kept as tokens.

The environment speaks messages, the engine speaks ids. A completion grows by what was sampled and by the tokens of the
environment's replies, and by nothing else; the ids that are trained are the ids that were sampled. Text is decoded for
the environment and the log only.

Every episode goes at its own pace: a turn that ends is answered at once, while the others are still being sampled.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from env.clarify import ClarifyEnv, Env, EnvFactory, EpisodeRecord, StopReason
from env.literals import printable
from env.time_limit import time_limit
from grpo.chat import ChatTokens
from grpo.data_types import Episode, Group, Turn
from grpo.engines import Engine, Key, TurnOutput, TurnRequest
from grpo.sampling import SamplingConfig
from scenarios.schema import Scenario

log = logging.getLogger(__name__)

RewardFn = Callable[[EpisodeRecord], float]
Progress = Callable[[int, int], None]  # (finished episodes, all episodes)

ENV_SECONDS = 30.0
"""Most seconds of one call into the environment or the reward; sampling waits for it."""


def rollout(
    engine: Engine,
    chat: ChatTokens,
    scenarios: Sequence[Scenario],
    *,
    num_generations: int,
    max_completion_len: int,
    step: int,
    reward_fn: RewardFn,
    sampling: SamplingConfig | None = None,
    progress: Progress | None = None,
    env_factory: EnvFactory = ClarifyEnv,
    before: Sequence[Group] = (),
) -> list[Group]:
    """Play `num_generations` episodes of each scenario. Training and evaluation both use it.

    Args:
        max_completion_len: most tokens of an episode after its first prompt, environment replies included.
        step: enters the seeds of the sampled tokens, with the scenario's index, the member, the turn and the position.
        reward_fn: of the finished record; called once per episode, as soon as it ends.
        sampling: temperature and top-p instead of the engine's own (evaluation).
        before: the batch before, from which the engine may guess.

    Returns:
        One group per scenario, in the order given; its members in order, whatever the order they finished in.

    An exception in the environment or in `reward_fn`, a call that takes longer than ENV_SECONDS, messages, replies or
    records that are none, or a reward that is not finite cost that episode alone: it gets stop reason `env_error` and
    reward None, and the reason is logged. Where the environment broke before it gave a first message, that episode's
    prompt and completion are empty.
    """
    if (ready := getattr(env_factory, "ready", None)) is not None:
        ready()  # environments that are elsewhere; not for the episodes to find out
    limits = (max_completion_len, engine.max_context)
    players = {
        (index, member): Player((index, member), scenario, chat, limits, reward_fn)
        for index, scenario in enumerate(scenarios)
        for member in range(num_generations)
    }
    engine.start(step, sampling, [episode for group in before for episode in group.episodes])
    live = 0
    for player in players.values():
        if player.begin(env_factory):
            engine.submit(player.request())
            live += 1
    while live:
        for output in engine.step():
            player = players[output.key]
            if player.play(output):
                engine.submit(player.request())
            else:
                engine.release(output.key)
                live -= 1
        if progress:
            progress(len(players) - live, len(players))
    return [
        Group(scenario, tuple(players[index, member].episode() for member in range(num_generations)))
        for index, scenario in enumerate(scenarios)
    ]


class Player:
    """One episode under way: its environment, its ids so far, and the limits it must keep."""

    def __init__(self, key: Key, scenario: Scenario, chat: ChatTokens, limits: tuple[int, int], reward_fn: RewardFn):
        self.key, self.scenario, self.chat, self.reward_fn = key, scenario, chat, reward_fn
        self.max_completion, self.max_context = limits
        self.env: Env | None = None
        self.prompt_ids: tuple[int, ...] = ()
        self.completion_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.turns: list[Turn] = []
        self.record = EpisodeRecord(scenario)
        self.reward: float | None = None

    def begin(self, env_factory: EnvFactory) -> bool:
        """Reset the environment and render the first prompt. True if there is a turn to sample."""
        try:
            with time_limit(ENV_SECONDS):
                self.env = env_factory(self.scenario)
                messages = self.env.reset()
            self.prompt_ids = self.chat.first_prompt(messages)
        except Exception as error:  # noqa: BLE001 (any fault of the environment costs this episode alone)
            return self._fail(error)
        limit = self._limit_without(1)
        return self._stop(limit) if limit else True

    def request(self) -> TurnRequest:
        """The next turn: it may use what is left of the budget and of the context."""
        used = len(self.completion_ids)
        room = min(self.max_completion - used, self.max_context - len(self.prompt_ids) - used)
        prompt = self.prompt_ids + tuple(self.completion_ids)
        return TurnRequest(self.key, prompt, room, turn=len(self.turns), position=used, group=self.key[0])

    def play(self, output: TurnOutput) -> bool:
        """Take in a sampled turn and the environment's reply to it. True if there is another turn to sample."""
        start = len(self.completion_ids)
        self._extend(output.token_ids, 1, output.logprobs)
        text = self.chat.decode_turn(output.token_ids)
        self.turns.append(Turn(start, len(self.completion_ids), text, None))
        cut = output.finish == "length"
        try:
            assert self.env is not None
            with time_limit(ENV_SECONDS):
                result = self.env.step(text, truncated=cut)
                record = self.env.record
            # The check is `printable`'s: it raises TypeError for a reply that is no text, None included.
            reply = None if cut or result.done else printable(cast(str, result.reply))
            reply_ids = () if reply is None else self.chat.reply_ids(reply)
        except Exception as error:  # noqa: BLE001
            return self._fail(error)
        if result.done:
            return self._finish(record)
        # A reply that leaves no room for an answer is dropped whole: half a reply would be a conversation that the
        # model never has at another length, and a whole one at the very end would only be padding.
        limit = self._limit_without(len(reply_ids) + 1)
        if limit or cut:
            return self._stop(limit or StopReason.TOKEN_CAP)
        self._extend(reply_ids, 0, (0.0,) * len(reply_ids))
        self.turns[-1] = replace(self.turns[-1], reply=reply)
        return True

    def episode(self) -> Episode:
        """The finished episode."""
        return Episode(
            prompt_ids=self.prompt_ids,
            completion_ids=tuple(self.completion_ids),
            loss_mask=tuple(self.loss_mask),
            sampler_logprobs=tuple(self.logprobs),
            turns=tuple(self.turns),
            stop_reason=cast(StopReason, self.record.stop_reason),  # what `_finish` and `_fail` make sure of
            record=self.record,
            reward=self.reward,
            member=self.key[1],
        )

    def _extend(self, ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self.completion_ids.extend(ids)
        self.loss_mask.extend([mask] * len(ids))
        self.logprobs.extend(logprobs)

    def _limit_without(self, tokens: int) -> StopReason | None:
        """The limit that `tokens` more tokens would break, if any."""
        used = len(self.completion_ids) + tokens
        if used > self.max_completion:
            return StopReason.TOKEN_CAP
        return StopReason.CONTEXT_FULL if len(self.prompt_ids) + used > self.max_context else None

    def _stop(self, reason: StopReason) -> bool:
        try:
            assert self.env is not None
            with time_limit(ENV_SECONDS):
                record = self.env.finish(reason)
            return self._finish(record)
        except Exception as error:  # noqa: BLE001
            return self._fail(error)

    def _finish(self, record: EpisodeRecord) -> bool:
        """The episode is over: score it. Always False (no turn to sample)."""
        try:
            if not isinstance(record, EpisodeRecord) or not isinstance(record.stop_reason, StopReason):
                raise TypeError("the episode ended without a record that says why")
            self.record = record
            with time_limit(ENV_SECONDS):
                self.reward = float(self.reward_fn(record))
            if not math.isfinite(self.reward):
                raise ValueError(f"reward {self.reward} is not finite")
        except Exception as error:  # noqa: BLE001
            return self._fail(error)
        return False

    def _fail(self, error: Exception) -> bool:
        """The environment or the reward broke: end this episode. Always False."""
        # What it says may be of any length, or fail to say anything.
        reason = printable(" ".join(traceback.format_exception_only(error)[-1].split())[:300])
        log.warning("episode %s: environment error, episode left out (%s)", self.key, reason)
        log.debug("episode %s", self.key, exc_info=error)
        record = self.record
        if self.env is not None and record.stop_reason is None:
            try:
                with time_limit(ENV_SECONDS):
                    record = self.env.record
            except Exception:  # noqa: BLE001 (broken before its first reset)
                pass
        known = record if isinstance(record, EpisodeRecord) else self.record
        self.record = replace(known, stop_reason=StopReason.ENV_ERROR)
        self.reward = None
        return False
