"""Scripted policies: baselines that need no model and speak through the same text as one.

- `random`: any tool, any arguments.
- `ask-all`: asks for every field of the family, required ones first, until the questions run out; then plans with what
  it was told and nothing else. The honest ceiling of what a plan can get right.
- `guess`: plans at once, with invented values for the required fields. What not asking is worth.

They read the conversation and never the hidden profile. What the request itself says, they take from it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from env.clarify import ClarifyEnv, EnvFactory, EpisodeRecord
from env.families import FAMILIES, Family
from env.tools import TOOL_NAMES, format_call
from scenarios.schema import Scenario

POLICIES = ("random", "ask-all", "guess")

Message = dict[str, str]


@dataclass(frozen=True)
class ScriptedPolicy:
    """A policy by name. Its act is a pure function of the seed and the messages. Raises ValueError for another name."""

    name: str
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ValueError(f"unknown policy {self.name!r}: must be one of {', '.join(POLICIES)}")

    def act(self, messages: Sequence[Message]) -> str:
        """The next turn's text. `messages` begin with the environment's system and user message."""
        task = Task.read(messages)
        rng = random.Random(f"{self.seed} {len(messages)} {messages[1]['content']}")
        if self.name == "random":
            return _random_call(task, rng)
        if self.name == "guess":
            invented = {name: rng.choice(task.family.values[name]) for name in task.required}
            return format_call("propose_plan", {"plan": invented | task.told})
        return _ask_all(task)


def play(
    policy: ScriptedPolicy, scenario: Scenario, env_factory: EnvFactory = ClarifyEnv
) -> tuple[EpisodeRecord, list[tuple[str, str | None]]]:
    """Plays one episode. Returns its record and its turns as (text, the environment's reply or None)."""
    env = env_factory(scenario)
    messages = env.reset()
    turns: list[tuple[str, str | None]] = []
    while env.record.stop_reason is None:
        text = policy.act(messages)
        reply = env.step(text).reply
        turns.append((text, reply))
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": reply or ""}]
    return env.record, turns


@dataclass(frozen=True)
class Task:
    """What the conversation says: family, required fields, question budget, fields asked for, values told."""

    family: Family
    required: tuple[str, ...]
    max_questions: int
    asked: tuple[str, ...]
    told: dict[str, object]

    @classmethod
    def read(cls, messages: Sequence[Message]) -> Task:
        lines = dict(re.findall(r"^([\w ]+): (.*)$", messages[1]["content"], re.MULTILINE))
        family = FAMILIES[lines["Family"]]
        names = {name.replace("_", " "): name for name in family.fields}
        turns = [message["content"] for message in messages[2:]]
        told: dict[str, object] = dict(family.told_by(lines["Request"]))
        for reply in turns[1::2]:
            name, _, value = reply.partition(": ")
            if name in names:
                told[names[name]] = value.removesuffix(".")
        return cls(
            family=family,
            required=tuple(name for name in lines["Plan fields"].split(", ") if name in family.fields),
            max_questions=int(re.findall(r"(\d+) questions", lines["Budget"])[0]),
            asked=tuple(name for name in family.fields if any(_question(name) in turn for turn in turns[::2])),
            told=told,
        )


def _ask_all(task: Task) -> str:
    wanted = dict.fromkeys([*task.required, *task.family.critical, *task.family.fields])
    missing = [name for name in wanted if name not in task.told and name not in task.asked]
    if missing and len(task.asked) < task.max_questions:
        return format_call("ask_question", {"question": _question(missing[0])})
    return format_call("propose_plan", {"plan": task.told})


def _random_call(task: Task, rng: random.Random) -> str:
    tool = rng.choice(TOOL_NAMES)
    fields = list(task.family.fields)
    if tool == "ask_question":
        return format_call(tool, {"question": _question(rng.choice(fields))})
    if tool == "propose_plan":
        chosen = rng.sample(fields, rng.randint(1, len(fields)))
        return format_call(tool, {"plan": {name: rng.choice(task.family.values[name]) for name in chosen}})
    return format_call(tool, {})


def _question(field: str) -> str:
    return f"What is the {field.replace('_', ' ')}?"
