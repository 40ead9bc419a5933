"""The environment as OpenEnv knows one: `reset`, `step`, `state`, tools over MCP, tasks.

It adds no rules: an episode is a `ClarifyEnv`, which knows nothing of servers. The same class is used in process
(`ClarifyEnvironment().reset(seed=1)`) and served; what it says is the same either way, rewards included.

What is hidden stays here until the episode has ended: observations and state are built from what the agent was told,
and the outcome, with the profile, is put into the last observation only.
"""

from __future__ import annotations

import html
import json
import logging
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction, Tool
from openenv.core.env_server.types import Action, EnvironmentMetadata

from env.clarify import ClarifyEnv, StepResult, StopReason
from env.prompts import TOOLS
from env.rubrics import score
from env.server import NAME, VERSION, tasks
from env.server.models import ClarifyObservation, ClarifyState, Outcome

DESCRIPTION = (
    "A user makes a vague request and knows more than it says. The agent may ask up to six questions, then proposes "
    "one JSON plan, which is scored on what the user really wants."
)
MAX_ID = 255

# It reports each refused tool call with a traceback; the client gets the reason.
logging.getLogger("fastmcp").setLevel(logging.CRITICAL)


class ClarifyEnvironment(MCPEnvironment):
    """One session: episodes one after another."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(self._tool_server())
        self._env: ClarifyEnv | None = None
        self._episode_id: str | None = None
        self._steps = 0

    # ------------------------------------------------------------------------------------------------------- episodes

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        difficulty: str | None = None,
        family: str | None = None,
        scenario: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> ClarifyObservation:
        """Starts an episode and returns the messages before the agent's first turn.

        Args:
            seed: that of a scenario; the same seed, the same scenario. 10000 to 19999 are the held-out ones.
            split, index: a task, in place of a seed.
            difficulty, family: with a seed or without; drawn where they are not given.
            scenario: one that is not ours, in the schema of scenarios/README.md.

        Raises ValueError or IndexError in one line for what cannot be; the episode under way goes on then.
        """
        if unknown:
            raise ValueError(f"unknown option {sorted(unknown)[0][:40]!r} of reset")
        if episode_id is not None and (not isinstance(episode_id, str) or len(episode_id) > MAX_ID):
            raise ValueError(f"episode_id: must be text of at most {MAX_ID} characters")
        env = ClarifyEnv(tasks.choose(seed, split, index, difficulty, family, scenario))
        messages = env.reset()
        self._env, self._episode_id, self._steps = env, episode_id, 0
        return ClarifyObservation(messages=messages, **self._left())

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> ClarifyObservation:
        """Plays a turn, or lists the tools. Raises RuntimeError before the reset and after the end."""
        if isinstance(action, ListToolsAction) or getattr(action, "type", None) == "list_tools":
            self._steps += 1
            return ClarifyObservation(tools=tools(), reward=0.0)
        if isinstance(action, CallToolAction) or action.type == "call_tool":
            observation = self._play(as_turn(action.tool_name, action.arguments))
        elif action.type == "finish":
            self._running().finish(StopReason(action.stop_reason))
            observation = self._after(None)
        else:
            observation = self._play(action.text, action.truncated)
        self._steps += 1
        return observation

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> ClarifyObservation:
        """The same: a turn is a matter of microseconds, and takes no longer than its text is long."""
        return self.step(action)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> ClarifyObservation:
        return self.step(action)

    @property
    def state(self) -> ClarifyState:
        """Where the episode stands; empty before the first reset."""
        if self._env is None:
            return ClarifyState()
        record = self._env.record
        return ClarifyState(
            episode_id=self._episode_id,
            step_count=self._steps,
            family=record.scenario.family,
            difficulty=record.scenario.task_id,
            stop_reason=record.stop_reason,
            reward=None if record.stop_reason is None else score(record).card,
            **self._left(),
        )

    def get_metadata(self) -> EnvironmentMetadata:
        """Name, version and description."""
        return EnvironmentMetadata(name=NAME, description=DESCRIPTION, version=VERSION)

    def _running(self) -> ClarifyEnv:
        if self._env is None:
            raise RuntimeError("the episode has not started: call reset() first")
        return self._env

    def _play(self, text: str, truncated: bool = False) -> ClarifyObservation:
        return self._after(self._running().step(text, truncated))

    def _after(self, result: StepResult | None) -> ClarifyObservation:
        """What is said of a turn. None: it was no turn, the episode was ended from outside."""
        record = self._running().record
        if record.stop_reason is None:
            assert result
            return ClarifyObservation(result=result.reply, reward=0.0, **self._left())
        outcome = Outcome.of(record)
        return ClarifyObservation(
            done=True,
            reward=outcome.scores["card"],
            stop_reason=record.stop_reason,
            outcome=outcome,
            **self._left(),
        )

    def _left(self) -> dict[str, int]:
        record = self._running().record
        return {
            "turns_left": record.scenario.max_steps - record.num_turns,
            "questions_left": record.scenario.max_questions - len(record.questions),
        }

    # ------------------------------------------------------------------------------------------------------------- MCP

    def _tool_server(self) -> FastMCP:
        """The three tools for MCP clients. A call is a turn, as in `step`; the reward is in the session's state."""
        server = FastMCP(NAME, version=VERSION)

        @server.tool(description=_description("ask_question"))
        def ask_question(question: str) -> str:
            return self._called("ask_question", {"question": question})

        @server.tool(description=_description("propose_plan"))
        def propose_plan(plan: dict[str, Any] | str) -> str:
            return self._called("propose_plan", {"plan": plan})

        @server.tool(description=_description("get_task_info"))
        def get_task_info() -> str:
            return self._called("get_task_info", {})

        return server

    def _called(self, name: str, arguments: dict[str, Any]) -> str:
        observation = self._play(as_turn(name, arguments))
        if observation.stop_reason is not None:
            return f"The episode has ended: {observation.stop_reason.value}."
        assert observation.result is not None
        return observation.result

    def _validate_tool_names(self, mcp_server: FastMCP) -> None:
        """The names are fixed and a test compares them; asking the server for them would cost each session a loop."""

    # ----------------------------------------------------------------------------------------------------------- tasks

    def list_splits(self) -> list[dict[str, str]]:
        """`train` and `held_out`."""
        return [{"name": name, "type": kind} for name, kind in tasks.SPLITS.items()]

    def num_tasks(self, split: str) -> int:
        """The number of tasks of a split. Raises ValueError for an unknown one."""
        return tasks.num_tasks(split)

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """All held-out tasks, or the first of the training split."""
        return tasks.describe_range(split, 0, tasks.PREVIEW if split == "train" else None)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """One task. Raises ValueError, or IndexError where there is none."""
        return tasks.describe(split, index)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Tasks as a slice takes them. Raises ValueError."""
        return tasks.describe_range(split, start, stop)

    # ------------------------------------------------------------------------------------------------------------- web

    def render_web(self, observation: dict[str, Any]) -> str | None:
        """The request at the start of an episode, and what the user had wanted at its end."""
        if observation.get("messages"):
            return f"<pre>{html.escape(observation['messages'][-1]['content'])}</pre>"
        outcome = observation.get("outcome")
        if not outcome:
            return None
        rows = [f"Ended by: {observation['stop_reason']}", f"The user wanted: {outcome['hidden_profile']}"]
        rows += [f"Your plan: {outcome['plan']}", f"Score: {outcome['scores']['card']:.3f}"]
        return f"<pre>{html.escape(chr(10).join(rows))}</pre>"


def as_turn(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the text of a turn. Whatever the arguments hold, nothing of it reads as reasoning or as a tag."""
    return json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")


def tools() -> list[Tool]:
    """The tools as prompts describe them."""
    functions = [tool["function"] for tool in TOOLS]
    return [Tool(name=f["name"], description=f["description"], input_schema=f["parameters"]) for f in functions]


def _description(name: str) -> str:
    return next(tool.description for tool in tools() if tool.name == name)
