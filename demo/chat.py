"""Live episodes: a person plays the agent against the simulated user, or the user against a model.

The rules are the environment's, and a model's turns go through the same `Player` and sampler as in training: what is
shown is what a rollout does, one turn at a time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from demo.loading import LOADING, import_trainer
from demo.runs import Shown, Turn, turn_between
from env.clarify import ClarifyEnv, EpisodeRecord
from env.families import FAMILIES
from env.literals import printable
from env.play import as_turn
from env.tools import InvalidTurn, format_call, parse_turn
from env.user_simulator import Answer, asked_field
from scenarios.generator import MAX_QUESTIONS, MAX_STEPS
from scenarios.schema import Scenario

if TYPE_CHECKING:
    from grpo.chat import ChatTokens
    from grpo.engines import TurnOutput
    from grpo.model import Policy

LONGEST = 500  # characters of a person's message
SMALL = 50_000_000  # parameters
TEMPERATURE = 0.7  # that of evaluations


def said(text: str | None) -> str:
    """What a person typed, in one line of at most LONGEST characters; "" for nothing."""
    return printable(" ".join((text or "").split()))[:LONGEST]


class AgentGame:
    """A person is the agent: questions, then one plan."""

    def __init__(self, scenario: Scenario):
        self.env = ClarifyEnv(scenario)
        self.env.reset()
        self.turns: list[Turn] = []

    @property
    def over(self) -> bool:
        return self.env.record.stop_reason is not None

    def ask(self, line: str) -> None:
        """A question, or whatever `python -m env.play` takes."""
        self._step(as_turn(line))

    def propose(self, plan: dict[str, str]) -> None:
        """Fields left blank are no part of the plan."""
        self._step(format_call("propose_plan", {"plan": {name: text for name, text in plan.items() if text}}))

    def shown(self) -> Shown:
        return Shown(self.env.record, tuple(self.turns))

    def _step(self, text: str) -> None:
        before = self.env.record
        result = self.env.step(text)
        self.turns.append(turn_between(before, self.env.record, text, result.reply))


# ------------------------------------------------------------------------------------------------------------- a model


@dataclass
class Loaded:
    """A model that is ready to play. `lock`: the sampler switches the model's attention while it works."""

    policy: Policy
    chat: ChatTokens
    lock: threading.Lock


def load(model: str) -> Loaded:
    """`tiny`, a folder, or a hub id, on the CPU; the last two stay in memory. Raises UsageError."""
    import_trainer()
    with LOADING:
        return _load(model)


@lru_cache(maxsize=2)
def _load(model: str) -> Loaded:
    import torch

    from grpo.config import ModelConfig
    from grpo.model import load_policy
    from grpo.run import make_chat

    policy = load_policy(ModelConfig(model=model, device="cpu"))
    policy.model.requires_grad_(False)
    if policy.num_parameters < SMALL:
        torch.set_num_threads(1)  # there is one row to compute: more threads would wait for each other
    return Loaded(policy, make_chat(policy), threading.Lock())


class ModelGame:
    """A model is the agent. `advance` plays its turns up to the next one that needs a person, or to the end."""

    def __init__(self, loaded: Loaded, env: ClarifyEnv, seed: int = 0):
        from eval import default_length
        from grpo.config import Config
        from grpo.engines.choice import make_engine
        from grpo.rollout import Player

        # People's answers are longer than the simulated user's.
        length = 2 * default_length(loaded.policy.name)
        knobs: dict[str, Any] = dict(max_completion_len=length, max_concurrent=1, engine="torch", device="cpu")
        settings = Config().with_values(knobs | {"temperature": TEMPERATURE, "seed": seed})
        self.loaded, self.env, self.turns = loaded, env, list[Turn]()
        with loaded.lock:
            self.engine = make_engine(settings, loaded.policy, loaded.chat, [env.scenario], training=False)
        self.player = Player(
            (0, 0), env.scenario, loaded.chat, (length, self.engine.max_context), reward_fn=lambda record: 0.0
        )
        self.live = self.player.begin(lambda scenario: env)
        self.sampled: TurnOutput | None = None

    @property
    def record(self) -> EpisodeRecord:
        return self.env.record if self.live else self.player.record

    @property
    def question(self) -> str | None:
        """What the model asks the person now, None where it is not waiting for an answer."""
        if self.sampled is None:
            return None
        call = parse_turn(self.loaded.chat.decode_turn(self.sampled.token_ids), self.sampled.finish == "length")
        full = len(self.record.questions) >= self.env.scenario.max_questions  # the environment ends it, unanswered
        if isinstance(call, InvalidTurn) or call.name != "ask_question" or full:
            return None
        return call.arguments["question"]

    def advance(self) -> None:
        """Sample and play turns until a question waits for the person, or the episode is over."""
        while self.live:
            if self.sampled is None:
                self.sampled = self._sample()
            if self.question is not None and isinstance(self.env, PersonAsUser) and self.env.said is None:
                return
            before = self.env.record
            self.live = self.player.play(self.sampled)
            cut, self.sampled = self.sampled.finish == "length", None
            text, reply = self.player.turns[-1].text, self.player.turns[-1].reply
            self.turns.append(turn_between(before, self.record, text, reply, cut))
            if isinstance(self.env, PersonAsUser):
                self.env.said = None

    def shown(self) -> Shown:
        """The episode so far, a question that waits included."""
        turns = list(self.turns)
        if self.sampled is not None:
            text = self.loaded.chat.decode_turn(self.sampled.token_ids)
            turns.append(Turn(text, parse_turn(text), None))
        return Shown(self.record, tuple(turns))

    def _sample(self) -> TurnOutput:
        with self.loaded.lock:
            self.engine.submit(self.player.request())
            while not (ended := self.engine.step()):
                pass
        return ended[0]


class PersonAsUser(ClarifyEnv):
    """The environment with a person for the user: `said` is the answer to the next question.

    What the person wants is not known here, so every field of the family counts as wished for, and there is no score.
    """

    def __init__(self, family: str, request: str):
        spec = FAMILIES[family]
        super().__init__(
            Scenario(
                family=family,
                task_id="hard",
                request=request,
                hidden_profile=dict.fromkeys(spec.fields, "known to the person"),
                critical_fields=spec.critical,
                required_keys=spec.required,
                field_keys=tuple(spec.fields),
                max_steps=MAX_STEPS["hard"],
                max_questions=MAX_QUESTIONS,
                seed=0,
            )
        )
        self.said: str | None = None

    def answer(self, question: str) -> Answer:
        return Answer(self.said or "", asked_field(self.scenario.family, question))


def model_plays(loaded: Loaded, scenario: Scenario, seed: int = 0) -> Shown:
    """The model's own episode of a scenario, against the simulated user."""
    game = ModelGame(loaded, ClarifyEnv(scenario), seed)
    game.advance()
    return game.shown()
