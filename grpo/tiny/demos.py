"""What the tiny policy learns from: token sequences with one loss weight per token.

Three kinds, one per stage of `grpo.tiny.make`:

- `recall`: a few answers ("key: value."), then a plan that repeats them. Keys and values are invented, so memory does
  not help and the only way to lower the loss is to look the value up.
- `clean`: whole episodes by a demonstrator that asks and then copies.
- `imperfect`: whole episodes by one that also skips questions, invents values, asks in vain and breaks the format.

The imperfections lie in what is *chosen* (see `Habits`); a value that the user gave is always copied right. Episodes
run in the real environment, so prompts, replies and error messages are those of the rollouts.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import lru_cache

from env.clarify import ClarifyEnv
from env.families import FAMILIES, Family
from env.tools import InvalidTurn, parse_turn
from env.user_simulator import asked_field
from grpo.chat import ChatTokens
from scenarios.schema import Scenario

Part = tuple[str, float]  # a piece of text and the loss weight of its tokens

TEXT, VALUE, ENV = 1.0, 3.0, 0.0
"""Loss weights: the model's own words, values to be looked up, and what the environment says."""


@dataclass
class Example:
    """Token ids and, for each, its weight in the loss (0: not learnt)."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: list[int] | tuple[int, ...], weight: float) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))


class Vocabulary:
    """Encodes pieces of text, and invents words from the tokenizer's own pieces."""

    def __init__(self, chat: ChatTokens):
        self.chat = chat
        tokenizer = chat.tokenizer
        self.end_of_turn = tokenizer.eos_token
        self.encode = lru_cache(maxsize=65536)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        texts = [tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in tokenizer.added_tokens_decoder]
        self.pieces = [text for text in texts if text.isascii() and text.rstrip(" _").isalnum()]
        self.ends = [text for text in self.pieces if text.isalnum()]

    def value(self, rng: random.Random) -> str:
        """One to three pieces of the vocabulary; what real values consist of is among them."""
        return "".join(rng.choices(self.pieces, k=rng.choice((0, 0, 0, 1, 1, 2)))) + rng.choice(self.ends)

    def word(self, rng: random.Random) -> str:
        """A field name that no family has."""
        return "".join(rng.choices(self.pieces, k=rng.choice((0, 0, 1)))) + rng.choice(self.ends)


# --------------------------------------------------------------------------------------------------- stage 1: recall


def recall(vocabulary: Vocabulary, rng: random.Random, num_fields: int, as_replies: bool) -> Example:
    """`num_fields` answers in one order, then a plan in another. Only the plan's values are worth much.

    `as_replies` puts each answer between the tags in which the environment replies; without them the sequence is short.
    """
    names = [name for family in FAMILIES.values() for name in family.fields]
    facts: dict[str, str] = {}
    while len(facts) < num_fields:
        key = rng.choice(names) if rng.random() < 0.5 else vocabulary.word(rng)
        facts[key] = vocabulary.value(rng)
    example = Example()
    for key, value in facts.items():
        answer = f"{key.replace('_', ' ')}: {value}.\n"
        wrapped = f"<tool_response>\n{answer}</tool_response>{vocabulary.end_of_turn}\n" if as_replies else answer
        example.add(vocabulary.encode(wrapped), ENV)
    keys = list(facts)
    rng.shuffle(keys)
    for text, weight in plan_parts({key: facts[key] for key in keys}, set(keys)):
        example.add(vocabulary.encode(text), weight if weight == VALUE else 0.1)
    return example


def plan_parts(plan: dict[str, str | None], told: set[str]) -> list[Part]:
    """A `propose_plan` turn in pieces; the values of `told` fields weigh more."""
    parts: list[Part] = []
    before = '<tool_call>\n{"name": "propose_plan", "arguments": {"plan": {'
    for key, value in plan.items():
        if value is None:
            parts.append((f'{before}"{key}": null', TEXT))
        else:
            parts += [(f'{before}"{key}": "', TEXT), (value, VALUE if key in told else TEXT)]
        before = ", " if value is None else '", '
    close = before[:-2]
    return [*parts, (close + "}}}\n</tool_call>", TEXT)]


# ---------------------------------------------------------------------------------------- stages 2 and 3: episodes


@dataclass(frozen=True)
class Habits:
    """How a demonstrator chooses. Each row: what the last turn was -> weights of what this turn will be.

    A habit feeds on itself: who asked well goes on asking, who fell out of the format tends to stay out. So whole
    episodes differ a lot, though every single decision is uncertain.
    """

    first: dict[str, float]
    after: dict[str, dict[str, float]]
    all_asked: dict[str, float]  # once every field that the prompt names has been asked for
    in_order: float = 1.0  # share of questions that follow the order of the prompt
    optional: float = 0.0  # share of questions about a field that the prompt does not name
    unasked: dict[str, float] = field(default_factory=lambda: {"leave_out": 1.0})
    extra: dict[str, float] = field(default_factory=lambda: {"nothing": 1.0})
    broken_plan: float = 0.0


CLEAN = Habits(
    first={"ask": 1.0, "propose": 0.05},
    after={"ask": {"ask": 0.9, "propose": 0.1}},
    all_asked={"propose": 0.75, "ask": 0.25},
    in_order=0.85,
    optional=0.15,
)

IMPERFECT = Habits(
    first={"ask": 0.31, "propose": 0.24, "vain": 0.17, "invalid": 0.24, "info": 0.04},
    after={
        "ask": {"ask": 0.62, "propose": 0.18, "vain": 0.10, "invalid": 0.08, "info": 0.02},
        "vain": {"ask": 0.16, "propose": 0.12, "vain": 0.54, "invalid": 0.15, "info": 0.03},
        "invalid": {"ask": 0.10, "propose": 0.10, "vain": 0.08, "invalid": 0.68, "info": 0.04},
        "info": {"ask": 0.30, "propose": 0.22, "vain": 0.20, "invalid": 0.24, "info": 0.04},
    },
    all_asked={"propose": 0.56, "ask": 0.16, "vain": 0.14, "invalid": 0.14},
    in_order=0.85,
    optional=0.12,
    unasked={"invent": 0.45, "leave_out": 0.43, "null": 0.06, "unknown": 0.06},
    extra={"nothing": 0.66, "invent": 0.14, "foreign": 0.20},
    broken_plan=0.25,
)

VAGUE = ("Can you tell me more?", "What else?", "Is that all?", "Any other wishes?", "Anything else?")
FOREIGN_FIELDS = ("name", "color", "notes", "title", "summary")
CHATTER = ("Sure, I can help.", "Let me think.", "I will make a plan.", "Here is the plan.", "Okay.")


class Demonstrator:
    """Plays one scenario with given habits and writes it down as an `Example`."""

    def __init__(self, vocabulary: Vocabulary, scenario: Scenario, habits: Habits, rng: random.Random):
        self.vocabulary, self.scenario, self.habits, self.rng = vocabulary, scenario, habits, rng
        self.family: Family = FAMILIES[scenario.family]
        self.told: dict[str, str] = {k: str(v) for k, v in self.family.told_by(scenario.request).items()}
        self.asked: list[str] = []
        self.env = ClarifyEnv(scenario)

    def play(self) -> Example:
        """The whole episode, up to a plan or a limit of the environment."""
        example = Example()
        example.add(self.vocabulary.chat.first_prompt(self.env.reset()), ENV)
        mode = None
        while True:
            mode, parts = self._turn(mode)
            for text, weight in parts:
                example.add(self.vocabulary.encode(text), weight)
            example.add(self.vocabulary.encode(self.vocabulary.end_of_turn), TEXT)
            text = "".join(text for text, _ in parts)
            if mode == "invalid" and not isinstance(parse_turn(text), InvalidTurn):
                raise AssertionError(f"meant to be invalid, but is a call: {text!r}")
            result = self.env.step(text)
            if result.reply is None:
                return example
            example.add(self.vocabulary.chat.reply_ids(result.reply), ENV)
            self._hear()

    def _hear(self) -> None:
        for question in self.env.record.questions[-1:]:
            if question.field:
                self.told[question.field] = question.answer.partition(": ")[2].removesuffix(".")

    def _turn(self, mode: str | None) -> tuple[str, list[Part]]:
        habits = self.habits
        table = habits.first if mode is None else habits.after.get(mode, habits.first)
        if not self._unasked():
            table = habits.all_asked
        choice = self._draw(table)
        if choice == "ask" and (name := self._next_field()) is not None:
            return "ask", self._ask(name)
        if choice == "vain":
            return "vain", self._in_vain()
        if choice == "info":
            return "info", [('<tool_call>\n{"name": "get_task_info", "arguments": {}}\n</tool_call>', TEXT)]
        if choice == "invalid":
            return "invalid", self._invalid()
        parts = plan_parts(self._plan(), set(self.told))
        if self.rng.random() < habits.broken_plan:
            # One closing brace is missing.
            text, weight = parts[-1]
            return "invalid", [*parts[:-1], (text.replace("}}}", "}}"), weight)]
        return "propose", parts

    def _unasked(self) -> list[str]:
        """Fields that the prompt names and that are still unknown, in its order."""
        return [name for name in self.scenario.required_keys if name not in self.told and name not in self.asked]

    def _next_field(self) -> str | None:
        named = self._unasked()
        others = [name for name in self.family.fields if name not in {*named, *self.told, *self.asked}]
        if not named or (others and self.rng.random() < self.habits.optional):
            return self.rng.choice(others) if others else None
        return named[0] if self.rng.random() < self.habits.in_order else self.rng.choice(named)

    def _ask(self, name: str) -> list[Part]:
        self.asked.append(name)
        return [(question_turn(f"What is the {name.replace('_', ' ')}?"), TEXT)]

    def _in_vain(self) -> list[Part]:
        """A question that reveals nothing new: vague, about something else, or asked before."""
        kind = self.rng.random()
        if kind < 0.5 or (kind < 0.75 and not self.asked):
            question = self.rng.choice(VAGUE)
        elif kind < 0.75:
            question = f"What is the {self.rng.choice(self.asked).replace('_', ' ')}?"
        else:
            question = f"What is the {self.rng.choice(FOREIGN_FIELDS)}?"
        return [(question_turn(question), TEXT)]

    def _invalid(self) -> list[Part]:
        kind = self.rng.random()
        if kind < 0.5:
            return [(self.rng.choice(CHATTER), TEXT)]
        question = f"What is the {(self._unasked() or ['date'])[0].replace('_', ' ')}?"
        if kind < 0.7:
            return [(question, TEXT)]
        return [(question_turn(question, close='"}\n</tool_call>'), TEXT)]

    def _plan(self) -> dict[str, str | None]:
        """What was told, in the order of the telling; then the other named fields as the habits have it."""
        # The order of the telling lets the model walk from one answer to the next without losing track.
        plan: dict[str, str | None] = dict(self.told)
        for name in self.scenario.required_keys:
            if name in plan:
                continue
            choice = self._draw(self.habits.unasked)
            if choice == "invent":
                plan[name] = self._invent(name)
            elif choice != "leave_out":
                plan[name] = {"null": None, "unknown": "unknown"}[choice]
        choice = self._draw(self.habits.extra)
        others = [name for name in self.family.fields if name not in plan]
        if choice == "invent" and others:
            name = self.rng.choice(others)
            plan[name] = self._invent(name)
        elif choice == "foreign":
            plan[self.rng.choice(FOREIGN_FIELDS)] = "unknown"
        # A plan is never empty: the first field is there at least.
        return plan or {name: self._invent(name) for name in self.scenario.required_keys[:1]}

    def _invent(self, name: str) -> str:
        return str(self.rng.choice(self.family.fields[name].values))

    def _draw(self, table: dict[str, float]) -> str:
        return self.rng.choices(list(table), list(table.values()))[0]


def question_turn(text: str, close: str = '"}}\n</tool_call>') -> str:
    """The turn that asks `text`."""
    return f'<tool_call>\n{{"name": "ask_question", "arguments": {{"question": "{text}{close}'


def with_invented_values(scenario: Scenario, vocabulary: Vocabulary, rng: random.Random) -> Scenario:
    """The same scenario with a profile of values that no list holds (what the request tells stays true)."""
    told = FAMILIES[scenario.family].told_by(scenario.request)
    profile = {name: told.get(name) or vocabulary.value(rng) for name in scenario.hidden_profile}
    return scenario.model_copy(update={"hidden_profile": profile})


def check_texts() -> None:
    """Vain questions must reveal nothing in any family. Raises AssertionError."""
    for family in FAMILIES:
        for question in [*VAGUE, *(f"What is the {name}?" for name in FOREIGN_FIELDS)]:
            assert asked_field(family, question) is None, (family, question)


def texts_of_the_domain() -> list[str]:
    """All fixed texts that the policy will read or write, for the tokenizer to learn its merges from."""
    texts = [json.dumps(FOREIGN_FIELDS), *VAGUE, *CHATTER]
    for family in FAMILIES.values():
        texts += [request.text for request in family.requests]
        for name, spec in family.fields.items():
            spaced = name.replace("_", " ")
            texts.append(f"Family: {family.name}\n{name}, {name}\n{spaced}\nWhat is the {spaced}?")
            texts += [f'{spaced}: {value}.\n"{name}": "{value}", ' for value in spec.values]
    return texts
