"""Cases from the field, one test per right value, named by the case's id: faults that public reports describe.

P: tool calls, T: tokens and masks, A: groups and advantages, E: environment and evaluation. The kinds L (loss and
kernels), V (sampling) and C (checkpoints) are in test_field_cases_training.py, which lists all of them. Where a case
leaves a choice, the choice made here is in the test's docstring.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from env.clarify import ClarifyEnv, StopReason
from env.families import FAMILIES
from env.policies import ScriptedPolicy, play
from env.rubrics import score
from env.tools import ToolCall, format_call, parse_turn
from env.user_simulator import _phrases, asked_field
from grpo import config as config_module
from grpo import evaluate
from grpo.advantages import group_advantages, token_weights
from grpo.batching import Packing, make_microbatches
from grpo.chat import ChatTokens
from grpo.config import LossConfig, UsageError
from grpo.loss import grpo_loss
from grpo.metrics import step_metrics
from scenarios.generator import DIFFICULTIES, generate, training_scenario
from scenarios.schema import Scenario
from tests import test_rollout as rollouts
from tests import toy
from tests.test_evaluate import honest
from tests.test_evaluate import play as played

THINK = "<think>\n\n</think>\n\n"
PLAN = {"event_type": "farewell", "date": "next week", "guest_count": 20, "venue": "rented hall (2nd floor)"}


def started(seed: int = 10_001, difficulty: str = "medium", family: str = "event_planning") -> ClarifyEnv:
    env = ClarifyEnv(generate(seed, difficulty, family))
    env.reset()
    return env


# -------------------------------------------------------------------------------------------- P: tool-call parsing


@pytest.mark.parametrize("text, name, arguments", [
    ('ask_question("Budget for food (in EUR, e.g. 500)?")', "ask_question",
     {"question": "Budget for food (in EUR, e.g. 500)?"}),
    ('ask_question(question="Formal, casual, or just fun :) ?")', "ask_question",
     {"question": "Formal, casual, or just fun :) ?"}),
    (r'ask_question("They said \"cheap\" - how cheap?")', "ask_question",
     {"question": 'They said "cheap" - how cheap?'}),
    (f"propose_plan(plan='{json.dumps(PLAN)}')", "propose_plan", {"plan": PLAN}),
    ('ASK: {"question": "Which day suits you?"}', "ask_question", {"question": "Which day suits you?"}),
    ('PROPOSE: {"date": "today", "time": "morning", "participants": "leadership"}', "propose_plan",
     {"plan": {"date": "today", "time": "morning", "participants": "leadership"}}),
    ('TOOL: ask_question\nARGS: {"question": "Which day?"}', "ask_question", {"question": "Which day?"}),
    ("tool: get_task_info", "get_task_info", {}),
    ('ask_question("预算大约多少（人民币）？🎂")', "ask_question", {"question": "预算大约多少（人民币）？🎂"}),
])  # fmt: skip
def test_p1_call_forms_small_models_really_emit(text, name, arguments):
    assert parse_turn(text) == ToolCall(name, arguments)


def test_p1_a_near_miss_name_is_reported_and_never_run():
    env = started()
    result = env.step('proposed_plan({"stack": "go+gin"})')
    assert "unknown tool 'proposed_plan'" in result.reply
    assert env.record.plan is None and not env.record.questions and env.record.num_invalid_turns == 1


@pytest.mark.parametrize("text", [
    '<think>\nMaybe propose_plan({"date": "x"}) later.\n</think>\n\nask_question("Which day?")',
    'Maybe propose_plan({}) later.\n</think>\n\nask_question("Which day?")',
])  # fmt: skip
def test_p4_a_call_inside_reasoning_is_not_run(text):
    assert parse_turn(text) == ToolCall("ask_question", {"question": "Which day?"})


def test_p4_reasoning_cut_by_length_holds_no_call_and_the_turn_counts_as_truncated():
    env = started()
    result = env.step('<think>\nI could call ask_question("a") or', truncated=True)
    assert "cut off by the length limit" in result.reply
    assert not env.record.questions and env.record.num_invalid_turns == 1


def test_p4_an_empty_think_block_before_the_call():
    call = '<tool_call>\n{"name": "get_task_info", "arguments": {}}\n</tool_call>'
    assert parse_turn(THINK + call) == ToolCall("get_task_info", {})


@pytest.mark.parametrize("text", [
    format_call("ask_question", {"question": "Which day?"}) + "\n"
    + format_call("propose_plan", {"plan": {"date": "today", "venue": "home", "guest_count": 5}}),
    'ask_question("Which day?")\nask_question("Where?")',
])  # fmt: skip
def test_p5_of_several_calls_the_first_is_run_and_the_reply_says_so(text):
    """One call per turn, in training and in evaluation: the same parser serves both."""
    env = started()
    reply = env.step(text).reply
    assert reply.startswith("date: ") and reply.endswith("Only the first call was run.")
    assert [question.text for question in env.record.questions] == ["Which day?"] and env.record.plan is None
    assert env.step("get_task_info()").reply.endswith("Left: 8 turns, 5 questions")  # 6 -> 5


def test_p5_all_sampled_tokens_of_such_a_turn_are_trained():
    tokenizer = toy.make_tokenizer()
    turn = tokenizer.encode('ask_question("A?")\nask_question("B?")<|im_end|>', add_special_tokens=False)
    engine = rollouts.ScriptedEngine(lambda key, n: turn, eos=tokenizer.eos_token_id)
    (group,) = rollouts.play(engine, ChatTokens(tokenizer), env_factory=ClarifyEnv, max_completion_len=len(turn) + 5)
    assert group.episodes[0].completion_ids == tuple(turn) and set(group.episodes[0].loss_mask) == {1}


# ------------------------------------------------------------------------------------ T: tokens, templates, masks


@pytest.mark.parametrize("thinking", [False, True])
def test_t1_every_turn_begins_with_the_prompt_and_the_turns_before_it(thinking):
    """Templates rewrite history (the toy one drops reasoning, as Qwen3's does); the conversation is never rendered
    again, so there is one training sample per episode and it is what was sampled."""
    template = toy.CHAT_TEMPLATE.replace("enable_thinking", "no_switch") if thinking else toy.CHAT_TEMPLATE
    tokenizer = toy.make_tokenizer(template)
    chat = ChatTokens(tokenizer)
    eos = tokenizer.eos_token_id
    thought = tokenizer.encode("<think>", add_special_tokens=False) + [7] * 18 + [tokenizer.encode("</think>")[-1]]
    sampled = [*thought, 5, 6, eos] if thinking else [5, 6, eos]
    engine = rollouts.ScriptedEngine(lambda key, turn: sampled, eos=eos)
    rollouts.play(engine, chat, env_factory=ClarifyEnv)
    assert tokenizer.decode(engine.requests[0].prompt_ids).endswith(THINK) != thinking
    assert len(engine.requests) > 3
    for first, second in itertools.pairwise(engine.requests):
        grown = first.prompt_ids + tuple(sampled)
        assert second.prompt_ids[: len(grown)] == grown


def test_t3_separator_mask_and_the_position_that_predicts():
    engine = rollouts.ScriptedEngine(rollouts.two_turns)
    (episode,) = rollouts.play(engine)[0].episodes
    assert len(episode.completion_ids) == 15
    assert episode.loss_mask == (1, 1, 1, *[0] * 10, 1, 1) and episode.num_trained == 5
    assert episode.completion_ids[3] == 198  # the newline after the end of a turn belongs to the environment
    for packing in (Packing(), Packing(packed=False)):
        (batch,) = make_microbatches([episode], [1.0], max_tokens=100, packing=packing)
        # Toy logits at a position depend on its token alone: which token predicts which?
        predictors = batch.input_ids[batch.predict_rows, batch.predict_cols].tolist()
        assert list(zip(predictors, batch.targets.tolist())) == [
            (3, 5), (5, 6), (6, 151645), (198, 7), (7, 151645)
        ]  # fmt: skip
    assert batch.predict_cols.tolist()[3] - len(episode.prompt_ids) == 12
    assert not set(episode.prompt_ids) & set(batch.targets.tolist())  # nothing of the prompt is trained on


def test_t6_a_reply_that_does_not_fit_is_dropped_whole():
    engine = rollouts.ScriptedEngine(rollouts.two_turns)
    (episode,) = rollouts.play(engine, max_completion_len=8, reward_fn=lambda record: -0.1)[0].episodes
    assert (episode.completion_ids, episode.loss_mask) == ((5, 6, 151645), (1, 1, 1))
    assert episode.truncated and episode.reward == -0.1


def test_t6_a_turn_asks_for_what_the_context_has_left_and_a_full_one_ends_the_episode():
    engine = rollouts.ScriptedEngine(rollouts.two_turns, max_context=512)
    rollouts.play(engine, rollouts.StubChat(range(500)), max_completion_len=64)
    assert engine.requests[0].max_tokens == 12
    for length in (512, 513):
        engine = rollouts.ScriptedEngine(rollouts.two_turns, max_context=512)
        groups = rollouts.play(engine, rollouts.StubChat(range(length)), max_completion_len=64, num_generations=2)
        assert [e.stop_reason for e in groups[0].episodes] == [StopReason.CONTEXT_FULL] * 2 and not engine.requests


def test_t6_a_masked_truncated_episode_is_in_neither_numerator_nor_denominator():
    assert token_weights([3, 4], "grpo", 8, [True, False]) == token_weights([3], "grpo", 8, [True]) + [0.0]


# ---------------------------------------------------------------------------------- A: rewards, groups, advantages


@pytest.mark.parametrize("rewards", [[0.15] * 4, [0.7], [0.1 + 0.2, 0.3, 0.3, 0.3]])
def test_a1_a_group_without_spread_has_no_advantage_and_no_gradient(rewards):
    ((*advantages,),) = group_advantages([rewards])
    assert all(abs(a) < 1e-6 for a in advantages)
    logprobs = torch.linspace(-3, -1, len(rewards)).requires_grad_()
    n = torch.arange(len(rewards))
    loss, _ = grpo_loss(
        policy_logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=torch.tensor(advantages),
        token_weights=torch.full((len(rewards),), 1 / len(rewards)), episode_index=n, config=LossConfig(beta=0.0),
    )  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss) and not logprobs.grad.any()
    values = iter(rewards)
    groups = rollouts.play(
        rollouts.ScriptedEngine(rollouts.two_turns), num_generations=len(rewards), reward_fn=lambda r: next(values)
    )
    assert step_metrics(groups, step=1, losses={}, seconds={"rollout": 1.0})["frac_reward_zero_std"] == 1


def test_a1_one_winner_in_four():
    ((*advantages,),) = group_advantages([[0, 0, 0, 1]])
    assert advantages == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-3)
    assert sum(advantages) == pytest.approx(0, abs=1e-12)


def test_a1_a_group_of_one_is_refused_at_the_start():
    with pytest.raises(UsageError, match="--num-generations 1: must be at least 2"):
        config_module.parse(["--num-generations", "1"], env={})


def test_a4_members_of_a_group_play_the_same_scenario_whatever_order_they_finish_in():
    tokenizer = toy.make_tokenizer()

    def script(key, turn):  # member m proposes a plan that says who proposed it
        call = format_call("propose_plan", {"plan": {"date": f"{key[0]}-{key[1]}"}})
        return tokenizer.encode(call + "<|im_end|>", add_special_tokens=False)

    def run_once():
        scenarios = [training_scenario(0, i) for i in range(3)]
        engine = rollouts.ScriptedEngine(
            script, rank=lambda key, turn: (3, 1, 0, 2).index(key[1]), eos=tokenizer.eos_token_id
        )
        chat = ChatTokens(tokenizer)
        reward = lambda record: float(record.plan["date"].replace("-", "."))  # noqa: E731
        return rollouts.play(
            engine, chat, scenarios, num_generations=4, reward_fn=reward, env_factory=ClarifyEnv
        ), tokenizer

    groups, tokenizer = run_once()
    for s, group in enumerate(groups):
        assert [e.member for e in group.episodes] == [0, 1, 2, 3]
        assert group.rewards == [float(f"{s}.{member}") for member in range(4)]
        for episode in group.episodes:
            assert episode.record.scenario == group.scenario
            assert f'"{s}-{episode.member}"' in episode.turns[0].text
            prompt = tokenizer.decode(episode.prompt_ids)
            for part in (group.scenario.request, group.scenario.family, *group.scenario.required_keys):
                assert part in prompt
    keys = [json.dumps([g.scenario.request, g.scenario.hidden_profile]) for g in groups]
    assert len(set(keys)) == 3
    assert [e.completion_ids for g in run_once()[0] for e in g.episodes] == [
        e.completion_ids for g in groups for e in g.episodes
    ]


# ---------------------------------------------------------------------------------- E: environment, evaluation


@pytest.mark.parametrize("family, question, wrong, right", [
    ("medical_intake", "What dosage do you take?", "age_band", {None, "medications"}),
    ("coding", "Do you need a feedback form?", "datastore", {None}),
    ("coding", "Should it use the latest release?", "test_coverage", {None}),
    ("coding", "How should users log in?", "scale", {"auth"}),
    ("support_triage", "Do you have a preference for a refund or a replacement?", "order_id", {"refund_or_replace"}),
    ("meeting_scheduling", "Should I send you an update?", "date", {None}),
    ("meeting_scheduling", "Should the whole day be blocked?", "participants",
     {None, *FAMILIES["meeting_scheduling"].fields} - {"participants"}),
    ("event_planning", "How many hours will the event last?", "guest_count", {None}),
])  # fmt: skip
def test_e1_keywords_are_whole_words(family, question, wrong, right):
    assert asked_field(family, question) in right and wrong not in right


def test_e1_ties_do_not_depend_on_the_order_of_a_dictionary(monkeypatch):
    """The fields' order in the family is fixed and documented; the phrases' order within a field does not matter."""
    questions = [f"{a} and {b}?" for family in FAMILIES.values() for a, b in itertools.permutations(
        [phrase for field in family.fields.values() for phrase in field.asked_by[:2]], 2)]  # fmt: skip
    before = [asked_field("coding", q) for q in questions]
    family = FAMILIES["coding"]
    fields = {n: dataclasses.replace(f, asked_by=f.asked_by[::-1]) for n, f in family.fields.items()}
    monkeypatch.setitem(FAMILIES, "coding", dataclasses.replace(family, fields=fields))
    _phrases.cache_clear()
    assert [asked_field("coding", q) for q in questions] == before
    _phrases.cache_clear()


def test_e4_keys_and_denominators_of_the_evaluation():
    scenarios = [generate(10_000 + i, "easy", "event_planning") for i in range(4)]
    records = [
        played(scenarios[0], honest(scenarios[0])),
        played(scenarios[1], ['propose_plan({"wrong_key": 1})']),
        played(scenarios[2], ['ask_question("Really?")'] * 7),
        played(scenarios[3], [], StopReason.ENV_ERROR),
    ]
    report = evaluate.report(records)
    assert report["format_pass_rate"] == 1 / 4
    assert report["completion_rate"] == 2 / 4
    assert len(report["episodes"][2]["questions"]) == 6
    assert report["env_errors"] == 1
    assert report["families"]["event_planning"]["n"] == 4 and report["families"]["coding"]["n"] == 0


def test_e6_an_honest_policy_wins_every_scenario():
    """The invented key costs the gated score; the card score does not look for one of the family's own keys."""
    for seed, difficulty, family in itertools.product(range(10_000, 10_024), DIFFICULTIES, FAMILIES):
        scenario = generate(seed, difficulty, family)
        assert set(scenario.required_keys) <= set(scenario.hidden_profile)
        request = next(r for r in FAMILIES[family].requests if r.text == scenario.request)
        assert all(scenario.hidden_profile.get(k, v[0]) in v for k, v in request.says)
        record, _ = play(ScriptedPolicy("ask-all"), scenario)
        honest_score = score(record)
        assert honest_score.format_check == 1
        for key in [k for k in FAMILIES[family].fields if k not in record.plan][:1]:
            invented = score(dataclasses.replace(record, plan=record.plan | {key: "unknown"}))
            assert invented.gated < honest_score.gated and invented.card <= honest_score.card
        foreign = score(dataclasses.replace(record, plan=record.plan | {"colour": "unknown"}))
        assert foreign.gated < honest_score.gated and foreign.card < honest_score.card


def test_e6_a_published_scenario_demands_only_what_its_profile_has():
    """Published seed 10001 demands refund_or_replace of a user who does not have it: the honest plan got 0 there."""
    scenario = Scenario(
        family="support_triage", task_id="easy", request="I need help with an order.",
        hidden_profile={"order_id": "#4521", "item_issue": "late"}, critical_fields=["order_id", "item_issue"],
        required_keys=["order_id", "item_issue", "refund_or_replace"], field_keys=["order_id", "item_issue"],
        max_steps=8, max_questions=6, seed=10_001,
    )  # fmt: skip
    record, _ = play(ScriptedPolicy("ask-all"), scenario)
    assert record.plan == scenario.hidden_profile
    assert score(record).format_check == 1 and score(record).gated > 0.8
