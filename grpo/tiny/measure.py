"""What the finished policy can do, measured on held-out scenarios by the same engine and prompts as training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from env.clarify import ClarifyEnv, EpisodeRecord
from env.rubrics import reward, same_value
from env.tools import ToolCall, parse_turn
from env.user_simulator import answer, spoken
from grpo.chat import ChatTokens
from grpo.engines import TurnRequest
from grpo.engines.torch_engine import TorchEngine
from grpo.evaluate import evaluate_model
from grpo.rollout import rollout
from grpo.sampling import SamplingConfig
from grpo.tiny.demos import Vocabulary, question_turn, with_invented_values
from scenarios.generator import held_out
from scenarios.schema import Scenario

MAX_COMPLETION_LEN = 320
PLAN_TURN = '<tool_call>\n{"name": "propose_plan", "arguments": {"plan": {"'
REPORTED = (
    "avg_score", "completion_rate", "format_pass_rate", "mean_questions", "mean_revealing_questions",
    "invalid_turn_rate", "hallucination_rate", "truncation_rate",
)  # fmt: skip


def measure(model: Any, tokenizer: Any, seed: int = 0) -> dict[str, Any]:
    """All figures of the README: copying, evaluation at temperature 0.7 and greedy, reward spread in groups."""
    chat = ChatTokens(tokenizer, generation_config=model.generation_config)
    # As it is loaded from the file: bfloat16 weights, computed with in float32.
    model = model.to(torch.bfloat16).to(torch.float32).eval()
    engine = TorchEngine(model, chat.eos_ids, seed=seed)
    everything, usual = held_out(None), held_out(50)
    vocabulary, rng = Vocabulary(chat), random.Random(seed)
    invented = [with_invented_values(scenario, vocabulary, rng) for scenario in everything]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "copying": copying(engine, chat, everything),
        "copying_invented_values": copying(engine, chat, invented),
        "evaluation_0.7": evaluation(engine, chat, usual, 0.7),
        "evaluation_0.7_full": evaluation(engine, chat, everything, 0.7),
        "evaluation_1.0": evaluation(engine, chat, usual, 1.0),
        "evaluation_greedy": evaluation(engine, chat, usual, 0.0),
        "groups_of_8": groups(engine, chat, usual),
    }


def evaluation(engine: TorchEngine, chat: ChatTokens, scenarios: Sequence[Scenario], temperature: float) -> dict:
    """The held-out evaluation's main figures, and per family: mean, max and completion rate."""
    report = evaluate_model(
        engine, chat, scenarios, model="tiny", temperature=temperature, max_completion_len=MAX_COMPLETION_LEN
    )
    families = {
        name: {key: figures[key] for key in ("mean", "max", "completion_rate") if key in figures}
        for name, figures in report["families"].items()
    }
    return {key: report[key] for key in REPORTED} | {"stop_reasons": report["stop_reasons"], "families": families}


def groups(engine: TorchEngine, chat: ChatTokens, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """Groups of 8 at temperature 1: how many have different rewards, and how the mean reward spreads."""
    played = rollout(
        engine, chat, scenarios, num_generations=8, max_completion_len=MAX_COMPLETION_LEN, step=0, reward_fn=reward,
        sampling=SamplingConfig(1.0),
    )  # fmt: skip
    rewards = torch.tensor([group.rewards for group in played])  # [groups, 8]
    episodes = [episode for group in played for episode in group.episodes]
    honest = [e.record.plan_accepted and bool(e.record.plan) and not unasked(e.record) for e in episodes]
    finished = {
        family: sum(e.record.plan_accepted for e in episodes if e.record.scenario.family == family)
        for family in sorted({scenario.family for scenario in scenarios})
    }
    return {
        "groups_with_spread": ((rewards.max(1).values - rewards.min(1).values) > 1e-6).float().mean().item(),
        "mean_reward": rewards.mean().item(),
        "mean_std_in_group": rewards.std(1).mean().item(),
        "asked_for_all_required": sum(honest) / len(honest),
        "mean_completion_tokens": sum(len(e.completion_ids) for e in episodes) / len(episodes),
        "mean_sampled_tokens": sum(e.num_trained for e in episodes) / len(episodes),
        "plans_by_family": finished,
    }


def unasked(record: EpisodeRecord) -> set[str]:
    """Required fields that no answer revealed."""
    return set(record.scenario.required_keys) - record.revealed


def copying(engine: TorchEngine, chat: ChatTokens, scenarios: Sequence[Scenario]) -> dict[str, float]:
    """Greedy copying: every profile field is asked for, in a shuffled order; do the answers land in the plan?

    The questions and the beginning of the plan's turn are given, the plan is the model's own. `right` is the share of
    answered fields whose plan value equals the answer, `right_where_present` that among the fields it put in.
    """
    answered = right = present = 0
    engine.start(0, SamplingConfig(0.0))
    prefix = tuple(chat.tokenizer.encode(PLAN_TURN, add_special_tokens=False))
    end_of_turn = chat.tokenizer.eos_token
    for index, scenario in enumerate(scenarios):
        ids = list(chat.first_prompt(ClarifyEnv(scenario).reset()))
        names = list(scenario.hidden_profile)
        random.Random(index).shuffle(names)
        for name in names:
            question = f"What is the {name.replace('_', ' ')}?"
            ids += chat.tokenizer.encode(question_turn(question) + end_of_turn, add_special_tokens=False)
            ids += chat.reply_ids(answer(scenario, question).text)
        engine.submit(TurnRequest((index, 0), (*ids, *prefix), max_tokens=160, group=index))
    while engine.num_active:
        for output in engine.step():
            engine.release(output.key)
            profile = scenarios[output.key[0]].hidden_profile
            call = parse_turn(PLAN_TURN + chat.decode_turn(output.token_ids))
            plan = call.arguments["plan"] if isinstance(call, ToolCall) else {}
            copied = {name for name, value in profile.items() if same_value(name, plan.get(name), spoken(name, value))}
            answered += len(profile)
            present += sum(name in plan for name in profile)
            right += len(copied)
    return {"answered": answered, "right": right / answered, "right_where_present": right / max(1, present)}
