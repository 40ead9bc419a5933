"""The episode: one scenario, the agent's turns as text, and the record that is scored.

Rules: a turn holds one tool call (`env.tools`). A question costs one of `max_questions`; one more ends the episode
without a plan and is not counted. A readable plan, right or wrong, ends the episode (`plan`): it is *accepted*, which
is what the completion rate counts; `env.rubrics` says what it is worth. A turn that cannot be read, a plan that is not
a JSON object included, costs a turn, is told so in one line, and the episode goes on. After `max_steps` turns without a
plan it ends (`turn_cap`). Nothing is ever done in the agent's place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from env.prompts import brief, first_messages
from env.tools import InvalidTurn, parse_turn
from env.user_simulator import Answer, answer
from scenarios.schema import Scenario


class StopReason(str, Enum):
    """Why an episode ended. The last three come from outside: the sampler's limits, or an error in the environment."""

    PLAN = "plan"
    TURN_CAP = "turn_cap"
    QUESTION_CAP = "question_cap"
    TOKEN_CAP = "token_cap"
    CONTEXT_FULL = "context_full"
    ENV_ERROR = "env_error"


OUTSIDE_REASONS = (StopReason.TOKEN_CAP, StopReason.CONTEXT_FULL, StopReason.ENV_ERROR)


@dataclass(frozen=True)
class Question:
    """A question that was asked and answered; `field` is the profile field that the answer reveals, or None."""

    text: str
    answer: str
    field: str | None


@dataclass(frozen=True)
class EpisodeRecord:
    """All that scoring needs to know of an episode. `stop_reason` is None while it runs.

    Example: "Set up a celebration.", one question, then a plan::

        questions      (Question("Where?", "venue: office.", "venue"),)
        plan           {"venue": "office"}
        num_turns      2
        stop_reason    StopReason.PLAN
    """

    scenario: Scenario
    questions: tuple[Question, ...] = ()
    plan: object | None = None
    num_turns: int = 0
    num_invalid_turns: int = 0
    stop_reason: StopReason | None = None

    @property
    def plan_accepted(self) -> bool:
        """True where a plan object ended the episode within its rules, whatever it is worth."""
        return self.stop_reason == StopReason.PLAN and isinstance(self.plan, dict)

    @property
    def revealed(self) -> frozenset[str]:
        """Profile fields that the user's answers revealed."""
        return frozenset(question.field for question in self.questions if question.field is not None)


@dataclass(frozen=True)
class StepResult:
    """The environment's side of a turn: its reply, None where the turn ended the episode."""

    reply: str | None
    done: bool
    stop_reason: StopReason | None


class Env(Protocol):
    """What an episode is played on: a `ClarifyEnv`, or an `env.server.remote.RemoteEnv`, whose game is on a server."""

    scenario: Scenario

    @property
    def record(self) -> EpisodeRecord: ...
    def reset(self) -> list[dict[str, str]]: ...
    def step(self, text: str, truncated: bool = False) -> StepResult: ...
    def finish(self, stop_reason: StopReason) -> EpisodeRecord: ...


EnvFactory = Callable[[Scenario], Env]


class ClarifyEnv:
    """One scenario, played as often as wanted: `reset()`, then `step(text)` until a result is `done`.

    It holds no randomness and no state besides the record of the episode.
    """

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self._record: EpisodeRecord | None = None

    @property
    def record(self) -> EpisodeRecord:
        """The episode so far. Raises RuntimeError before the first reset."""
        if self._record is None:
            raise RuntimeError("the episode has not started: call reset() first")
        return self._record

    def reset(self) -> list[dict[str, str]]:
        """Starts a new episode. Returns the messages before the agent's first turn (system, user)."""
        self._record = EpisodeRecord(self.scenario)
        return first_messages(self.scenario)

    def step(self, text: str, truncated: bool = False) -> StepResult:
        """Plays one turn of the agent. `truncated`: a length limit cut the text off, so nothing in it is run.

        Raises RuntimeError before reset and after the end: a turn that comes too late can earn nothing.
        """
        self._require_running()
        self._update(num_turns=self.record.num_turns + 1)
        reply = self._play(text, truncated)
        if self.record.stop_reason is None and self.record.num_turns >= self.scenario.max_steps:
            self._update(stop_reason=StopReason.TURN_CAP)
        stop_reason = self.record.stop_reason
        done = stop_reason is not None
        return StepResult(None if done else reply, done, stop_reason)

    def finish(self, stop_reason: StopReason) -> EpisodeRecord:
        """Ends a running episode from outside: `token_cap`, `context_full` or `env_error`.

        Raises RuntimeError where it does not run, ValueError for another reason.
        """
        stop_reason = StopReason(stop_reason)
        if stop_reason not in OUTSIDE_REASONS:
            raise ValueError(f"{stop_reason.value}: only the environment ends an episode for this reason")
        self._require_running()
        self._update(stop_reason=stop_reason)
        return self.record

    def answer(self, question: str) -> Answer:
        """What the user says to a question; where a person is the user, that person (`demo.chat`)."""
        return answer(self.scenario, question)

    def _play(self, text: str, truncated: bool) -> str:
        call = parse_turn(text, truncated)
        if isinstance(call, InvalidTurn):
            self._update(num_invalid_turns=self.record.num_invalid_turns + 1)
            return f"Invalid turn: {call.reason}."
        if call.name == "ask_question":
            reply = self._ask(call.arguments["question"])
        elif call.name == "propose_plan":
            self._update(plan=call.arguments["plan"], stop_reason=StopReason.PLAN)
            reply = ""
        else:
            reply = self._task_info()
        return f"{reply} Only the first call was run." if call.dropped_calls else reply

    def _ask(self, question: str) -> str:
        asked = self.record.questions
        if len(asked) >= self.scenario.max_questions:
            self._update(stop_reason=StopReason.QUESTION_CAP)
            return ""
        reply = self.answer(question)
        self._update(questions=(*asked, Question(question, reply.text, reply.field)))
        return reply.text

    def _task_info(self) -> str:
        turns = self.scenario.max_steps - self.record.num_turns
        questions = self.scenario.max_questions - len(self.record.questions)
        return f"{brief(self.scenario)}\nLeft: {turns} turns, {questions} questions"

    def _update(self, **changes: Any) -> None:
        self._record = replace(self.record, **changes)

    def _require_running(self) -> None:
        if self.record.stop_reason is not None:
            raise RuntimeError(f"the episode has ended ({self.record.stop_reason.value}): call reset() first")
