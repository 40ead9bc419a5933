"""What goes over the wire: actions in, observations and state out. Typed, so that `/schema` says all of it."""

from __future__ import annotations

from typing import Any, Literal

from openenv.core.env_server.mcp_types import Tool
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel, ConfigDict, Field

from env.clarify import EpisodeRecord, Question, StopReason
from env.rubrics import score
from scenarios.schema import Scenario


class ClarifyAction(Action):
    """One turn of the agent: as text, as a model wrote it, or as a tool call.

    Examples::

        {"text": 'ask_question("Which day?")'}
        {"type": "call_tool", "tool_name": "ask_question", "arguments": {"question": "Which day?"}}
        {"type": "finish", "stop_reason": "token_cap"}
        {"type": "list_tools"}
    """

    type: Literal["turn", "call_tool", "list_tools", "finish"] = Field(
        default="turn",
        description="`turn`: text. `call_tool`: a turn that is this call. `finish`: the agent can say no more, "
        "the episode ends without a plan. `list_tools` is no turn and costs nothing.",
    )
    text: str = Field(default="", description="All of the turn's text; the first tool call in it is run.")
    truncated: bool = Field(default=False, description="A length limit cut the text off: nothing in it is run.")
    tool_name: str = Field(default="", description="Of `call_tool`: ask_question, propose_plan or get_task_info.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Of `call_tool`.")
    stop_reason: Literal["token_cap", "context_full", "env_error"] = Field(
        default="token_cap", description="Of `finish`: which limit was met."
    )


class Answered(BaseModel):
    """A question of the episode; `field` is what the answer revealed."""

    model_config = ConfigDict(extra="forbid")

    text: str
    answer: str
    field: str | None


class Outcome(BaseModel):
    """What may be known after the end: what the user wanted, what was asked, and every part of the score."""

    model_config = ConfigDict(extra="forbid")

    hidden_profile: dict[str, str | int]
    questions: list[Answered]
    plan: dict[str, Any] | None
    num_turns: int
    num_invalid_turns: int
    scores: dict[str, float | None] = Field(description="`card` and `gated`, the totals; then their parts.")

    @classmethod
    def of(cls, record: EpisodeRecord) -> Outcome:
        """Of a finished episode."""
        assert record.plan is None or isinstance(record.plan, dict)
        return cls(
            hidden_profile=record.scenario.hidden_profile,
            questions=[Answered(text=q.text, answer=q.answer, field=q.field) for q in record.questions],
            plan=record.plan,
            num_turns=record.num_turns,
            num_invalid_turns=record.num_invalid_turns,
            scores=dict(vars(score(record))),
        )

    def record(self, scenario: Scenario, stop_reason: StopReason) -> EpisodeRecord:
        """The record that the server holds. Raises ValueError where it was of another scenario."""
        if self.hidden_profile != scenario.hidden_profile:
            raise ValueError("the server played another scenario: it runs another version of the environment")
        questions = tuple(Question(q.text, q.answer, q.field) for q in self.questions)
        return EpisodeRecord(scenario, questions, self.plan, self.num_turns, self.num_invalid_turns, stop_reason)


class ClarifyObservation(Observation):
    """What the agent is told. `reward` is None at the reset, 0 while the episode runs, the card score at its end."""

    messages: list[dict[str, str]] = Field(
        default_factory=list, description="At the reset: the conversation before the first turn (system, user)."
    )
    result: str | None = Field(default=None, description="The reply to the turn; null where it ended the episode.")
    stop_reason: StopReason | None = Field(default=None, description="Why the episode ended.")
    turns_left: int | None = None
    questions_left: int | None = None
    outcome: Outcome | None = Field(default=None, description="At the end of the episode only.")
    tools: list[Tool] | None = Field(default=None, description="The answer to `list_tools`.")


class ClarifyState(State):
    """Where the episode stands. Nothing hidden is in it."""

    family: str | None = None
    difficulty: str | None = None
    turns_left: int | None = None
    questions_left: int | None = None
    stop_reason: StopReason | None = None
    reward: float | None = Field(default=None, description="Of a finished episode.")
