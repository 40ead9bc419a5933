"""Held-out evaluation of a model behind a chat endpoint (`grpo.chat_api`): the same episodes and report as for others.

Several episodes are played at once, each waiting for its own turn. A finished one is kept in a file beside the output,
so that an evaluation which was stopped goes on where it was, and nothing is paid for twice. An episode that the
endpoint failed counts as an environment error; it is not kept, so that the same command asks for it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from env.clarify import ClarifyEnv, EnvFactory, EpisodeRecord, StopReason
from env.literals import printable
from env.prompts import SYSTEM, TOOLS
from env.time_limit import time_limit
from grpo.chat import ChatTokens
from grpo.chat_api import CONTEXT_FULL, FILTERED, Answer, ChatEndpoint, Message, tools_as_text
from grpo.config import RunStopped, UsageError
from grpo.console import counted
from grpo.endpoint import InFlight, ServerError
from grpo.evaluate import report, scenarios_hash
from grpo.files import write_atomic
from grpo.metrics import conversation, dumps
from grpo.rollout import ENV_SECONDS, Player
from grpo.rollout_record import read_record, record_values
from grpo.run_folder import versions
from grpo.sampling import SamplingConfig, random_stream
from scenarios.schema import Scenario

log = logging.getLogger(__name__)

LOST_IN_A_ROW = 8
"""So many lost episodes without a turn in between, and the endpoint counts as gone."""
NO_CONTEXT_LIMIT = 2**31  # that is the endpoint's affair
NO_CHAT = cast(ChatTokens, None)  # so are ids


@dataclass(frozen=True)
class Played:
    """A finished episode."""

    record: EpisodeRecord
    said: list[tuple[str, str | None]]
    """Turns: the agent's text, the environment's reply."""
    tokens: tuple[int, int]
    """Of all its requests' prompts, and of all its answers, where the endpoint counts them."""
    lost: str | None
    """Where the endpoint failed it: how."""


class ChatPlayer(Player):
    """An episode as in a rollout, in messages: the tokens are the endpoint's, and counted as it says.

    `max_completion_len` so holds to within one reply, which is counted with the turn after it, and per turn only where
    the endpoint says nothing of tokens.
    """

    def __init__(self, index: int, scenario: Scenario, max_completion_len: int):
        super().__init__((index, 0), scenario, NO_CHAT, (max_completion_len, NO_CONTEXT_LIMIT), lambda record: 0.0)
        self.messages: list[Message] = []
        self.said: list[tuple[str, str | None]] = []
        self.tokens = [0, 0]  # of all its requests' prompts, of all its answers
        self.used = 0  # tokens after the first prompt
        self.first_prompt: int | None = None
        self.lost: str | None = None

    def begin(self, env_factory: EnvFactory) -> bool:
        """Reset the environment. True if there is a turn to ask for."""
        try:
            with time_limit(ENV_SECONDS):
                self.env = env_factory(self.scenario)
                self.messages = list(self.env.reset())
        except Exception as error:  # noqa: BLE001 (any fault of the environment costs this episode alone)
            return self._fail(error)
        return True

    def hear(self, answer: Answer) -> bool:
        """Take in a turn and the environment's reply to it. True if there is another turn to ask for."""
        room = self.room
        self._count(answer)
        if answer.finish == "content_filter":
            self.said.append((answer.text, None))
            return self.lose(ServerError("the content filter cut a turn off", FILTERED))
        cut = answer.finish == "length"
        try:
            assert self.env is not None
            with time_limit(ENV_SECONDS):
                result = self.env.step(answer.spoken, truncated=cut)
                record = self.env.record
            reply = None if cut or result.done else printable(cast(str, result.reply))
        except Exception as error:  # noqa: BLE001
            return self._fail(error)
        self.said.append((answer.text, reply))
        if result.done:
            return self._finish(record)
        if cut:
            # It stopped before its own limit: what was full is the model's context.
            full = answer.completion_tokens is not None and answer.completion_tokens < room
            return self._stop(StopReason.CONTEXT_FULL if full else StopReason.TOKEN_CAP)
        if self.room < 1:
            return self._stop(StopReason.TOKEN_CAP)
        self.messages += [answer.message, *answer.replies(reply or "")]
        return True

    @property
    def room(self) -> int:
        """Tokens that the next turn may have."""
        return self.max_completion - self.used

    def lose(self, error: ServerError) -> bool:
        """The endpoint cost us this episode. Always False."""
        self.lost = error.kind
        log.warning("scenario of seed %d: lost (%s)", self.scenario.seed, error)
        return self._stop(StopReason.ENV_ERROR)

    def stop(self, reason: StopReason) -> bool:
        """End it from outside. Always False."""
        return self._stop(reason)

    def played(self) -> Played:
        """The finished episode."""
        return Played(self.record, self.said, (self.tokens[0], self.tokens[1]), self.lost)

    def _count(self, answer: Answer) -> None:
        prompt, completion = answer.prompt_tokens, answer.completion_tokens
        self.tokens = [self.tokens[0] + (prompt or 0), self.tokens[1] + (completion or 0)]
        if prompt is None or completion is None:
            return
        self.first_prompt = prompt if self.first_prompt is None else self.first_prompt
        # Replies are in the prompts; earlier thoughts may not be.
        self.used = max(prompt - self.first_prompt + completion, self.tokens[1])


class Kept:
    """Finished episodes of an evaluation in a file, written whole after each. Without a path nothing is kept.

    Raises UsageError where the file is of an evaluation with other settings, or damaged.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]):
        self.path, self.settings = path, dict(settings)
        self._episodes: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._load()

    def __len__(self) -> int:
        return len(self._episodes)

    def of(self, temperatures: Sequence[float], count: int) -> int:
        """How many episodes are there of passes over `count` scenarios at these temperatures."""
        return sum(name in self._episodes for t in temperatures for name in episode_names(t, count))

    def get(self, name: str, scenario: Scenario) -> Played | None:
        """A finished episode."""
        if name not in self._episodes:
            return None
        values = self._episodes[name]
        try:
            said, tokens = [tuple(turn) for turn in values["said"]], tuple(values["tokens"])
            return Played(read_record(values["record"], scenario), said, tokens, values["lost"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.path}: episode {name} is damaged ({error}); remove the file") from error

    def add(self, name: str, scenario: Scenario, played: Played) -> None:
        """Keep an episode. Raises RunStopped where the disk does not take it."""
        values = {"said": played.said, "tokens": played.tokens, "lost": played.lost}
        self._episodes[name] = values | {"record": record_values(played.record, scenario)}
        if self.path is None:
            return
        try:
            write_atomic(self.path, dumps({"settings": self.settings, "episodes": self._episodes}))
        except OSError as error:
            raise RunStopped(f"cannot write {self.path} ({error.strerror}); {self.advice}") from error

    @property
    def advice(self) -> str:
        """How an evaluation that was stopped goes on."""
        if self.path is None:
            return "nothing was kept: give --output to be able to go on"
        return f"kept: {counted(len(self), 'episode')} in {self.path}: the same command goes on from there"

    def remove(self) -> None:
        """The report is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _load(self) -> None:
        assert self.path
        advice = "finish it with the settings it was started with, give another --output, or remove the file"
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            before, self._episodes = dict(document["settings"]), dict(document["episodes"])
        except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
            what = f"damaged ({type(error).__name__})"
            raise UsageError(f"{self.path}: {what}; give another --output, or remove the file") from error
        for name, value in self.settings.items():
            if before.get(name) != value:
                what = "" if "sha256" in name else f" ({before.get(name)}, now {value})"
                raise UsageError(f"{self.path}: is of an evaluation with another {name}{what}; {advice}")


def episode_names(temperature: float, count: int) -> list[str]:
    """Of one pass, in the file of kept episodes."""
    return [f"temperature {temperature:g}, {i}" for i in range(count)]


class Evaluation:
    """Plays scenarios at an endpoint, `concurrency` episodes at once.

    Args:
        endpoint: connected.
        progress: called with the number of finished episodes and of all.
    """

    def __init__(
        self,
        endpoint: ChatEndpoint,
        kept: Kept,
        *,
        max_completion_len: int,
        concurrency: int = 8,
        progress: Callable[[int, int], None] | None = None,
        env_factory: EnvFactory = ClarifyEnv,
    ):
        self.endpoint, self.kept, self.env_factory = endpoint, kept, env_factory
        self.max_completion_len, self.concurrency, self.progress = max_completion_len, concurrency, progress
        self._answered = len(kept) > 0  # by this call or one before it: then it is no wrong address
        self._lost_in_a_row = 0

    def play(self, scenarios: Sequence[Scenario], sampling: SamplingConfig) -> list[Played]:
        """One episode of each scenario, in their order.

        Raises:
            ServerError: there is nothing to evaluate there: wrong address, key or model, or no turn is ever answered.
            RunStopped: it was there, and is not any more.
        """
        names = episode_names(sampling.temperature, len(scenarios))
        results = [self.kept.get(name, scenario) for name, scenario in zip(names, scenarios)]
        waiting = deque(i for i, played in enumerate(results) if played is None)
        calls, live = InFlight(self.concurrency), dict[int, ChatPlayer]()

        def go_on(index: int, more: bool) -> None:
            player = live[index]
            if more:
                seed = int(random_stream(sampling.seed or 0, 0, index, 0, len(player.said))[0] >> 33)
                turn = partial(self.endpoint.answer, tuple(player.messages), player.room, sampling, seed)
                calls.submit(index, turn)
                return
            played = live.pop(index).played()
            results[index] = played
            # A filter would answer the same; other errors may pass.
            if played.lost == FILTERED or played.record.stop_reason != StopReason.ENV_ERROR:
                self.kept.add(names[index], scenarios[index], played)
            if self.progress:
                self.progress(sum(each is not None for each in results), len(results))

        if waiting and (ready := getattr(self.env_factory, "ready", None)) is not None:
            ready()
        while waiting or live:
            while waiting and len(live) < self.concurrency:
                index = waiting.popleft()
                live[index] = ChatPlayer(index, scenarios[index], self.max_completion_len)
                go_on(index, live[index].begin(self.env_factory))
            for key, answer in calls.ended():
                index = cast(int, key)
                go_on(index, self._take(live[index], answer))
        return [played for played in results if played is not None]  # all of them

    def _take(self, player: ChatPlayer, answer: Answer | Exception) -> bool:
        """True if the episode goes on."""
        if isinstance(answer, Answer):
            self._answered, self._lost_in_a_row = True, 0
            return player.hear(answer)
        if not isinstance(answer, ServerError):
            raise answer
        if answer.kind == CONTEXT_FULL and player.said:
            return player.stop(StopReason.CONTEXT_FULL)
        if answer.kind != FILTERED:
            self._lost_in_a_row += 1
            if not self._answered:
                raise answer
            if answer.status in (401, 403, 404) or self._lost_in_a_row >= LOST_IN_A_ROW:
                raise RunStopped(f"{answer}; {self.kept.advice}") from answer
        return player.lose(answer)


def _shown(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def evaluate_endpoint(
    endpoint: ChatEndpoint,
    scenarios: Sequence[Scenario],
    kept: Kept,
    sampling: SamplingConfig,
    *,
    max_completion_len: int,
    rubric: str = "card",
    also_greedy: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Play each scenario once and report, as `grpo.evaluate.evaluate_model` does for a model that is loaded here.

    What is said of the endpoint stands under `server`: how it was asked, tokens by its own count, episodes lost to it.
    `options` are those of `Evaluation`, which see also for what is raised.
    """
    passes = [sampling] + [replace(sampling, temperature=0.0)] * also_greedy
    documents: list[dict[str, Any]] = []
    for number, each in enumerate(passes):
        before, total = number * len(scenarios), len(passes) * len(scenarios)
        show = progress and partial(_shown, progress, before, total)
        evaluation = Evaluation(endpoint, kept, max_completion_len=max_completion_len, progress=show, **options)
        played = evaluation.play(scenarios, each)
        prompt, completion = (sum(p.tokens[i] for p in played) for i in (0, 1))
        lost = Counter(p.lost for p in played if p.lost)
        document = report(
            [p.record for p in played],
            rubric=rubric,
            conversations=[conversation(p.record.scenario, p.said) for p in played],
            model=endpoint.model,
            temperature=each.temperature,
            top_p=each.top_p,
            max_completion_len=max_completion_len,
            seed=each.seed,
            versions=versions(),
            server=endpoint.about | {"tokens": {"prompt": prompt, "completion": completion}, "lost": dict(lost)},
        )
        documents.append(document)
    first, *greedy = documents
    if greedy:
        first["greedy"] = {key: value for key, value in greedy[0].items() if key != "episodes"}
    return first


def lost_episodes(report: Mapping[str, Any]) -> tuple[Counter[str], bool]:
    """How many episodes the endpoint or the environment has lost, by kind, greedy ones included; whether it makes sense
    to ask again."""
    passes = [report, report["greedy"]] if "greedy" in report else [report]
    lost = sum((Counter(each["server"]["lost"]) for each in passes), Counter())
    broken = sum(each["env_errors"] for each in passes) - sum(lost.values())
    lost += Counter({"environment": broken})
    return lost, bool(set(lost) - {FILTERED})


def settings_of(
    endpoint: ChatEndpoint, scenarios: Sequence[Scenario], sampling: SamplingConfig, max_completion_len: int
) -> dict[str, Any]:
    """What makes two evaluations the same one: kept episodes are only taken where all of it is equal."""
    return {
        "model": endpoint.model,
        "address": endpoint.url,
        "tools": endpoint.tools,
        "extra": endpoint.extra,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_completion_len": max_completion_len,
        "scenarios sha256": scenarios_hash(scenarios),
        "prompt sha256": hashlib.sha256(dumps([SYSTEM, TOOLS, tools_as_text()]).encode()).hexdigest(),
    }
