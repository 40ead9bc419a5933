"""The scripted baselines."""

import pytest

from env.clarify import ClarifyEnv, StopReason
from env.families import FAMILIES
from env.policies import POLICIES, ScriptedPolicy, play
from env.prompts import first_messages
from env.rubrics import score
from env.tools import InvalidTurn, parse_turn
from scenarios.generator import DIFFICULTIES, generate, held_out
from tests.test_rubrics import SUPPORT

SCENARIOS = [generate(seed, level, family) for seed in range(20) for level in DIFFICULTIES for family in FAMILIES]


def mean_card(name: str, scenarios) -> float:
    return sum(score(play(ScriptedPolicy(name, s.seed), s)[0]).card for s in scenarios) / len(scenarios)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_sees_the_conversation_only(name):
    """Two users who say the same get the same turns, whatever else they want."""
    scenario = generate(4, "hard", "event_planning")
    other = scenario.model_copy(update={"hidden_profile": dict.fromkeys(scenario.hidden_profile, "something else")})
    policy = ScriptedPolicy(name)
    assert policy.act(first_messages(scenario)) == policy.act(first_messages(other))


@pytest.mark.parametrize("name", POLICIES)
def test_every_turn_is_a_valid_call_and_repeats(name):
    for scenario in SCENARIOS[::7]:
        record, turns = play(ScriptedPolicy(name, 3), scenario)
        assert record.num_invalid_turns == 0
        assert not any(isinstance(parse_turn(text), InvalidTurn) for text, _ in turns)
        assert turns[-1][1] is None and all(reply for _, reply in turns[:-1])
        assert play(ScriptedPolicy(name, 3), scenario) == (record, turns)


def test_fault_1_ask_all_passes_the_gate_on_all_seeds_and_difficulties():
    for scenario in [*SCENARIOS, SUPPORT]:
        record, _ = play(ScriptedPolicy("ask-all"), scenario)
        s = score(record)
        assert s.format_check == 1
        assert s.hallucination_rate == 0
        assert s.output_correctness >= 0.8
        assert len(record.questions) <= 6
        # The same plan plus an invented key is worth less.
        missing = [f for f in FAMILIES[scenario.family].fields if f not in record.plan]
        if missing:
            worse = score(type(record)(**(vars(record) | {"plan": record.plan | {missing[0]: "unknown"}})))
            assert worse.gated < s.gated and worse.card <= s.card


def test_ask_all_only_misses_what_no_question_was_left_for():
    for scenario in SCENARIOS:
        record, _ = play(ScriptedPolicy("ask-all"), scenario)
        told = FAMILIES[scenario.family].told_by(scenario.request)
        assert set(record.plan) == record.revealed | set(told)
        # Seven fields, six questions: only then can one stay unknown.
        if len(FAMILIES[scenario.family].fields) - len(told) <= 6:
            assert score(record).output_correctness == 1


def test_ask_all_does_not_ask_for_what_the_request_says():
    seed = next(s for s in range(100) if generate(s, "hard", "event_planning").request == "Plan a birthday party.")
    record, _ = play(ScriptedPolicy("ask-all"), generate(seed, "hard", "event_planning"))
    assert "event_type" not in record.revealed
    assert record.plan["event_type"] == "birthday"
    assert score(record).output_correctness == 1


def test_guess_asks_nothing_and_invents():
    for scenario in SCENARIOS:
        record, _ = play(ScriptedPolicy("guess"), scenario)
        assert (record.stop_reason, record.num_turns, record.questions) == (StopReason.PLAN, 1, ())
        assert set(record.plan) >= set(scenario.required_keys)
        assert record.plan.items() >= FAMILIES[scenario.family].told_by(scenario.request).items()
        assert score(record).format_check == 1
    assert len({str(play(ScriptedPolicy("guess", seed), SCENARIOS[1])[0].plan) for seed in range(20)}) > 5


def test_asking_pays():
    scenarios = held_out()
    assert mean_card("random", scenarios) < 0.25 < mean_card("guess", scenarios) < 0.5
    assert 0.75 < mean_card("ask-all", scenarios)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="unknown policy 'oracle': must be one of random, ask-all, guess"):
        ScriptedPolicy("oracle")


def test_ask_all_survives_a_reply_that_answers_nothing():
    scenario = generate(0, "easy", "support_triage")
    env = ClarifyEnv(scenario)
    messages = env.reset()
    messages += [
        {"role": "assistant", "content": "hm"},
        {"role": "tool", "content": "Invalid turn: no tool call."},
    ]
    assert parse_turn(ScriptedPolicy("ask-all").act(messages)).name == "ask_question"
