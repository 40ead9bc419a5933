"""Generated model outputs through full episodes: `python -m tests.fuzz_episodes --episodes 10000 --seed 0`.

Every output goes through parser, simulated user and rubric; each tenth episode also travels as tokens, through the
rollout loop. Checked after every episode: it ended for a typed reason within its budgets, its rewards are finite, and
what the log would say of it is strict JSON and valid UTF-8. A call of more than `LIMIT` seconds, or an exception, ends
the script with the episode's number, which with the seed repeats it. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from env.clarify import ClarifyEnv, StopReason
from env.families import FAMILIES
from env.rubrics import RUBRICS, reward, score
from env.time_limit import time_limit
from env.tools import TOOL_NAMES, format_call
from grpo.chat import ChatTokens
from grpo.engines import TurnOutput
from grpo.metrics import conversation, dumps
from grpo.rollout import rollout
from scenarios.generator import generate
from scenarios.schema import Scenario
from tests import toy

LIMIT = 10.0

PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", *TOOL_NAMES, "proposed_plan", "TOOL: ", "ASK: ",
    "ARGS: ", "PROPOSE:", "(", ")", "{", "}", "[", "]", '"', "'", "\\", "\\u", "\\ud800", "\\x00", ",", ":", "=", "==",
    " ", "\n", "\t", "\r\n", "name", "arguments", "parameters", "question", "plan", "NaN", "Infinity", "-Infinity", "-",
    "1e999", "1e-999", "0x1f", "1_000", "9" * 400, "null", "None", "True", "\0", "\ud800", "\udfff", "é", "\u202e",
    "🎂", "\u2028", '"name": ', "__import__('os').system('id')", "{{ 7 * 7 }}", "%s%n", "'; DROP TABLE x; --", "x",
)  # fmt: skip


@dataclass
class Tally:
    """What a run has seen."""

    episodes: int = 0
    outputs: int = 0
    characters: int = 0
    longest: int = 0
    slowest_ms: float = 0.0
    reasons: Counter = field(default_factory=Counter)


def random_value(rng: random.Random, depth: int = 0) -> object:
    """A JSON value, strange ones included."""
    kind = rng.randrange(12 if depth < 4 else 9)
    if kind == 9:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind >= 10:
        return {random_text(rng, 8): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    simple = (
        None,
        True,
        0,
        -1.5,
        10 ** rng.randrange(40),
        float("nan"),
        float("-inf"),
        random_text(rng, 30),
        "20 people",
    )
    return simple[kind]


def random_text(rng: random.Random, length: int) -> str:
    """Characters of all planes: ASCII, the first 64 ki with surrogates and NUL, and beyond."""
    top = rng.choice((128, 128, 0x800, 0x10000, 0x110000))
    return "".join(chr(rng.randrange(top)) for _ in range(rng.randrange(length + 1)))


def random_call(rng: random.Random, scenario: Scenario) -> str:
    """A well-formed call, sensible or not, in one of the forms."""
    fields = list(FAMILIES[scenario.family].fields)
    name = rng.choice((*TOOL_NAMES, "ask_question", "proposed_plan", random_text(rng, 6)))
    question = rng.choice((f"What is the {rng.choice(fields)}?", " and ".join(fields), random_text(rng, 80)))
    plan: object = {
        rng.choice((*fields, random_text(rng, 5))): rng.choice(
            (random_value(rng), *FAMILIES[scenario.family].values[rng.choice(fields)])
        )
        for _ in range(rng.randrange(9))
    }
    plan = rng.choice((plan, plan, dict(scenario.hidden_profile), random_value(rng)))
    arguments = {"ask_question": {"question": question}, "propose_plan": {"plan": plan}}.get(name, {"x": plan})
    text = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
    text = text.replace("Infinity", rng.choice(("Infinity", "1e999")))
    return rng.choice((
        format_call(name, arguments), f"{name}({text})", f"{name}(plan={json.dumps(plan)})", f"ASK: {text}",
        f"PROPOSE: {text}", f"TOOL: {name}\nARGS: {text}", f"{name}({question!r})", f"propose_plan({plan!r})",
    ))  # fmt: skip


def random_output(rng: random.Random, scenario: Scenario, depth: int = 0) -> str:
    """What a model might write in a turn."""
    kind = rng.randrange(100)
    if kind < 35:
        return random_call(rng, scenario)
    if kind < 60:  # a call with a few characters changed
        text = list(random_call(rng, scenario))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randrange(3)] = rng.choice((rng.choice(PIECES), ""))
        return "".join(text)
    if kind < 75:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(60)))
    if kind < 83:
        return random_text(rng, 300)
    if kind < 88:  # deep, or long
        opening = rng.choice(("[", "{", "(", '{"a":', "[[{", '"', "<think>", "\\"))
        return rng.choice(("", "propose_plan(", "<tool_call>")) + opening * rng.randrange(3000)
    if kind < 89 and rng.random() < 0.2:
        piece = rng.choice(PIECES)
        return rng.choice(("", "ask_question(", 'ask_question("', "propose_plan({")) + piece * (1_000_000 // len(piece))
    if depth < 3:
        first, second = (random_output(rng, scenario, depth + 1) for _ in range(2))
        return rng.choice((f"{first}\n{second}", f"<think>{first}</think>{second}", f"{first}</think>\n\n{second}"))
    return ""


def text_episode(rng: random.Random, seed: int, tally: Tally) -> None:
    """One episode in text."""
    scenario = generate(seed)
    env = ClarifyEnv(scenario)
    env.reset()
    turns = []
    only_asks = rng.random() < 0.1  # few others would meet the limit on questions
    while env.record.stop_reason is None:
        text = random_output(rng, scenario)
        if only_asks:
            text = format_call("ask_question", {"question": random_text(rng, 50) + "?"})
        started = time.perf_counter()
        with time_limit(LIMIT):
            result = env.step(text, truncated=rng.random() < 0.03)
        tally.slowest_ms = max(tally.slowest_ms, 1000 * (time.perf_counter() - started))
        tally.longest = max(tally.longest, len(text))
        tally.characters += len(text)
        turns.append((text, result.reply))
    tally.outputs += len(turns)
    tally.reasons[env.record.stop_reason.value] += 1
    check_record(env.record, turns)
    tally.episodes += 1


def check_record(record, turns) -> None:
    """Raises AssertionError where an episode is not as it must be."""
    scenario = record.scenario
    assert isinstance(record.stop_reason, StopReason)
    assert record.num_invalid_turns <= record.num_turns <= scenario.max_steps
    assert len(record.questions) <= scenario.max_questions
    assert all(math.isfinite(value) for value in vars(score(record)).values() if value is not None)
    for rubric in RUBRICS:
        assert -0.1 <= reward(record, rubric) <= 1 + 1e-12
    replies = [reply for _, reply in turns if reply is not None]
    assert all(len(reply) < 1000 for reply in replies)
    # The environment's own words and all that it keeps can be written down; the model's text comes decoded from ids.
    json.dumps(record.plan, allow_nan=False)
    dumps({"plan": record.plan, "questions": [vars(q) for q in record.questions], "replies": replies}).encode()


class FuzzEngine:
    """Samples generated outputs, as the tokens that spell them."""

    max_context = 6000

    def __init__(self, rng: random.Random, tokenizer, scenarios):
        self.rng, self.tokenizer, self.scenarios, self.pending = rng, tokenizer, scenarios, []

    def start(self, step, sampling=None, before=()):
        pass

    def submit(self, request):
        self.pending.append(request)

    def release(self, key):
        pass

    def step(self):
        request = self.pending.pop(self.rng.randrange(len(self.pending)))
        text = random_output(self.rng, self.scenarios[request.key[0]])[:20_000]
        ids = self.tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)
        if self.rng.random() < 0.2:  # ids that spell nothing, the model's unused ones included
            ids = [self.rng.randrange(len(self.tokenizer) + 50) for _ in range(self.rng.randrange(60))]
        ids = [*ids, self.tokenizer.eos_token_id]
        ids = ids[: ids.index(self.tokenizer.eos_token_id) + 1]  # a sampler stops there
        finish = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        return [TurnOutput(request.key, tuple(ids), (-1.0,) * len(ids), finish)]


def token_episodes(rng: random.Random, seed: int, chat: ChatTokens, members: int, tally: Tally) -> None:
    """A group of episodes as tokens, through the rollout loop."""
    scenarios = [generate(seed)]
    groups = rollout(
        FuzzEngine(rng, chat.tokenizer, scenarios), chat, scenarios, num_generations=members,
        max_completion_len=rng.choice((40, 400, 4000)), step=0, reward_fn=reward,
    )  # fmt: skip
    for episode in groups[0].episodes:
        assert episode.stop_reason != StopReason.ENV_ERROR and math.isfinite(episode.reward)
        check_tokens(episode, chat)
        check_record(episode.record, [(turn.text, turn.reply) for turn in episode.turns])
        dumps(conversation(scenarios[0], [(turn.text, turn.reply) for turn in episode.turns])).encode()
        tally.outputs += len(episode.turns)
        tally.reasons[episode.stop_reason.value] += 1
        tally.episodes += 1


def check_tokens(episode, chat: ChatTokens) -> None:
    """The sampled ids are the trained ones, and what stands between them are the replies, whole."""
    assert len(episode.completion_ids) == len(episode.loss_mask) == len(episode.sampler_logprobs)
    expected = [0] * len(episode.completion_ids)
    between, end = (), 0
    for turn in episode.turns:
        assert episode.completion_ids[end : turn.start] == between
        expected[turn.start : turn.stop] = [1] * (turn.stop - turn.start)
        between, end = () if turn.reply is None else chat.reply_ids(turn.reply), turn.stop
    assert list(episode.loss_mask) == expected and end == len(episode.completion_ids)
    assert all((logprob != 0) == bool(mask) for logprob, mask in zip(episode.sampler_logprobs, expected))


def run(episodes: int, seed: int, report=lambda tally: None) -> Tally:
    """Play `episodes` episodes, one in ten of them as tokens. Raises RuntimeError naming the one that fails."""
    tally = Tally()
    chat = ChatTokens(toy.make_tokenizer())
    while tally.episodes < episodes:
        number = tally.episodes
        rng = random.Random(f"{seed} {number}")
        try:
            if number % 40 == 36:
                token_episodes(rng, number, chat, 4, tally)
            else:
                text_episode(rng, number, tally)
        except Exception as error:
            raise RuntimeError(f"episode {number} of seed {seed}") from error
        report(tally)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_episodes", description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    last = [0.0]

    def report(tally: Tally) -> None:
        if time.monotonic() - last[0] > 2:
            last[0] = time.monotonic()
            print(f"{tally.episodes}/{options.episodes} episodes, {tally.outputs} outputs", file=sys.stderr, flush=True)

    started = time.perf_counter()
    tally = run(options.episodes, options.seed, report)
    print(json.dumps({
        "episodes": tally.episodes, "outputs": tally.outputs, "characters": tally.characters,
        "longest_output": tally.longest, "slowest_call_ms": round(tally.slowest_ms, 1),
        "stop_reasons": dict(sorted(tally.reasons.items())), "seconds": round(time.perf_counter() - started, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
