"""The episode's rules. The numbers in test names are those of the faults in env/README.md."""

import re

import pytest

from env.clarify import ClarifyEnv, EpisodeRecord, StopReason
from env.families import FAMILIES
from env.prompts import SYSTEM, TOOLS, brief, first_messages
from env.rubrics import reward, score
from env.tools import format_call
from env.user_simulator import NOT_UNDERSTOOD
from scenarios.generator import generate, held_out, training_scenario
from scenarios.schema import Scenario

PARTY = Scenario(
    family="event_planning",
    task_id="easy",
    request="Set up a celebration.",
    hidden_profile={"event_type": "birthday", "date": "today", "venue": "rented hall"},
    critical_fields=["event_type", "date", "venue"],
    required_keys=["event_type", "date", "venue"],
    field_keys=["event_type", "date", "venue"],
    max_steps=8,
    max_questions=6,
    seed=1,
)


def ask(question: str) -> str:
    return format_call("ask_question", {"question": question})


def propose(plan: object) -> str:
    return format_call("propose_plan", {"plan": plan})


def started(scenario: Scenario = PARTY) -> ClarifyEnv:
    env = ClarifyEnv(scenario)
    env.reset()
    return env


def test_an_episode_from_start_to_plan():
    env = ClarifyEnv(PARTY)
    assert [m["role"] for m in env.reset()] == ["system", "user"]
    result = env.step(ask("Where?"))
    assert (result.reply, result.done, result.stop_reason) == ("venue: rented hall.", False, None)
    result = env.step(propose({"venue": "rented hall"}))
    assert (result.reply, result.done, result.stop_reason) == (None, True, StopReason.PLAN)
    record = env.record
    assert record.plan == {"venue": "rented hall"}
    assert record.plan_accepted
    assert [(q.text, q.answer, q.field) for q in record.questions] == [("Where?", "venue: rented hall.", "venue")]
    assert (record.num_turns, record.num_invalid_turns) == (2, 0)


def test_the_first_prompt_says_what_is_asked_and_nothing_hidden():
    assert brief(PARTY) == (
        "Request: Set up a celebration.\nFamily: event_planning\nPlan fields: event_type, date, venue\n"
        "Budget: 8 turns, 6 questions"
    )
    assert len(SYSTEM.split()) <= 45
    assert "diagnosis" in brief(generate(0, family="medical_intake"))


@pytest.mark.parametrize("scenario", held_out(50), ids=lambda s: str(s.seed))
def test_fault_8_no_prompt_holds_an_example_value(scenario):
    """The request may say a value, and a field's name may hold one (refund_or_replace)."""
    prompt = " ".join(m["content"] for m in first_messages(scenario)) + str(TOOLS)
    rest = prompt.replace(scenario.request, "")
    for field, values in FAMILIES[scenario.family].values.items():
        rest = rest.replace(field, "")
        for value in values:
            # 5 and 10 are also budgets.
            if isinstance(value, str):
                assert not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", rest, re.IGNORECASE), value


def test_a_repeated_question_costs_again_and_reveals_nothing_new():
    env = started()
    first, second = env.step(ask("Where?")), env.step(ask("Where?"))
    assert first.reply == second.reply
    assert len(env.record.questions) == 2
    assert env.record.revealed == {"venue"}


def test_the_seventh_question_ends_the_episode_and_is_not_counted():
    env = started()
    results = [env.step(ask("Where?")) for _ in range(7)]
    assert [r.done for r in results] == [False] * 6 + [True]
    assert results[-1].stop_reason == StopReason.QUESTION_CAP
    assert results[-1].reply is None
    assert len(env.record.questions) == 6
    assert not env.record.plan_accepted


def test_the_turn_cap_ends_the_episode():
    env = started()
    results = [env.step("hm") for _ in range(8)]
    assert [r.done for r in results] == [False] * 7 + [True]
    assert results[-1].stop_reason == StopReason.TURN_CAP
    assert (env.record.num_turns, env.record.num_invalid_turns) == (8, 8)


def test_a_plan_in_the_last_turn_counts_and_so_does_its_question():
    env = started()
    for _ in range(7):
        env.step("hm")
    assert env.step(propose({"venue": "x"})).stop_reason == StopReason.PLAN
    env = started()
    for _ in range(7):
        env.step("hm")
    assert env.step(ask("Where?")).stop_reason == StopReason.TURN_CAP
    assert env.record.revealed == {"venue"}


@pytest.mark.parametrize("difficulty, turns", [("easy", 8), ("medium", 10), ("hard", 12)])
def test_turn_caps(difficulty, turns):
    scenario = generate(3, difficulty)
    assert (scenario.max_steps, scenario.max_questions) == (turns, 6)
    env = started(scenario)
    for _ in range(turns - 1):
        assert not env.step("hm").done
    assert env.step("hm").done


def test_an_invalid_turn_is_told_in_one_line_and_goes_on():
    env = started()
    result = env.step('proposed_plan({"venue": "x"})')
    assert (result.reply, result.done) == ("Invalid turn: unknown tool 'proposed_plan'.", False)
    result = env.step("propose_plan(plan='a nice party')")
    assert not result.done and "\n" not in result.reply
    assert env.record.plan is None
    assert env.record.num_invalid_turns == 2
    assert env.step(propose({})).stop_reason == StopReason.PLAN


def test_a_truncated_turn_runs_nothing():
    env = started()
    env.step(propose({"venue": "x"}), truncated=True)
    assert env.record.stop_reason is None
    assert env.record.num_invalid_turns == 1


def test_get_task_info_repeats_the_brief_and_says_what_is_left():
    env = started()
    env.step(ask("Where?"))
    reply = env.step(format_call("get_task_info", {})).reply
    assert reply == f"{brief(PARTY)}\nLeft: 6 turns, 5 questions"
    assert len(env.record.questions) == 1


@pytest.mark.parametrize(
    "text",
    [ask("Which day?") + "\n" + propose({"date": "x", "venue": "y", "event_type": "z"}),
     'ask_question("Which day?")\nask_question("Where?")'],
)  # fmt: skip
def test_of_several_calls_only_the_first_is_run_and_the_model_is_told(text):
    env = started()
    result = env.step(text)
    assert result.reply == "date: today. Only the first call was run."
    assert not result.done
    assert env.record.plan is None
    assert len(env.record.questions) == 1


def test_fault_4_an_episode_depends_on_its_scenario_alone():
    """Members of a group reset environments of one scenario: same prompt, same answers, in any order."""
    for index in range(3):
        scenario = training_scenario(0, index)
        members = [ClarifyEnv(scenario) for _ in range(4)]
        prompts = [members[i].reset() for i in (3, 1, 0, 2)]
        assert all(prompt == prompts[0] for prompt in prompts)
        for part in (scenario.request, scenario.family, *scenario.required_keys):
            assert part in prompts[0][1]["content"]
        assert len({m.step(ask("What is the date?")).reply for m in members}) == 1
    assert [training_scenario(0, i) for i in range(3)] == [training_scenario(0, i) for i in range(3)]


def test_fault_5_nothing_is_done_in_the_agents_place():
    env = started()
    for _ in range(8):
        env.step("I do not know what to do.")
    assert env.record == EpisodeRecord(PARTY, num_turns=8, num_invalid_turns=8, stop_reason=StopReason.TURN_CAP)


def test_fault_6_an_episode_does_not_know_the_one_before():
    env = started()
    for name in ("event_type", "date", "venue"):
        env.step(ask(name))
    env.step(propose(PARTY.hidden_profile))
    good = env.record
    env.reset()
    assert env.record == EpisodeRecord(PARTY)
    env.step(propose({"venue": None}))
    bad = score(env.record)
    assert (bad.gated, bad.field_match, bad.info_gain, bad.question_efficiency, bad.hallucination_check) == (0,) * 5
    assert score(good).gated > 0.9


def test_fault_7_a_turn_after_the_end_is_refused():
    env = started()
    for _ in range(8):
        env.step("hm")
    with pytest.raises(RuntimeError, match="turn_cap"):
        env.step(propose(PARTY.hidden_profile))
    assert env.record.plan is None
    assert reward(env.record) == pytest.approx(-0.1)


def test_fault_7_a_plan_of_an_episode_that_ended_otherwise_earns_nothing():
    late = EpisodeRecord(PARTY, plan=dict(PARTY.hidden_profile), num_turns=9, stop_reason=StopReason.TURN_CAP)
    assert score(late).card == score(late).gated == 0
    assert reward(late) == pytest.approx(-0.1)


def test_a_turn_before_the_start_is_refused():
    with pytest.raises(RuntimeError, match="reset"):
        ClarifyEnv(PARTY).step(ask("Where?"))


@pytest.mark.parametrize("reason", [StopReason.TOKEN_CAP, StopReason.CONTEXT_FULL, StopReason.ENV_ERROR])
def test_an_episode_can_be_ended_from_outside(reason):
    env = started()
    env.step(ask("Where?"))
    record = env.finish(reason)
    assert record.stop_reason == reason
    assert score(record).card == 0
    with pytest.raises(RuntimeError):
        env.step(ask("Where?"))
    with pytest.raises(RuntimeError):
        env.finish(reason)


def test_only_the_environment_ends_an_episode_with_a_plan():
    with pytest.raises(ValueError, match="plan: only the environment"):
        started().finish(StopReason.PLAN)


def test_an_answer_that_was_not_understood_costs_a_question():
    env = started()
    assert env.step(ask("Hm?")).reply == NOT_UNDERSTOOD
    assert len(env.record.questions) == 1
    assert env.record.revealed == frozenset()


def test_four_ways_to_end():
    """Gate passed; gate failed; no plan after seven questions; environment error."""
    plans = [dict(PARTY.hidden_profile), {"venue": "office"}]
    records = []
    for plan in plans:
        env = started()
        env.step(propose(plan))
        records.append(env.record)
    env = started()
    for _ in range(7):
        env.step(ask("Where?"))
    records.append(env.record)
    records.append(started().finish(StopReason.ENV_ERROR))
    assert [r.plan_accepted for r in records] == [True, True, False, False]
    assert sum(score(r).format_check for r in records) / 4 == 0.25
    assert [len(r.questions) for r in records] == [0, 0, 6, 0]
