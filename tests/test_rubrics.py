"""The score: hand-worked examples, what counts as the same value, and that nothing breaks it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.clarify import EpisodeRecord, Question, StopReason
from env.rubrics import reward, same_value, score
from scenarios.schema import Scenario
from tests.test_env import PARTY

SUPPORT = Scenario.model_validate(
    # Published seed 10001, easy: an honest plan cannot hold the third key.
    {"family": "support_triage", "task_id": "easy", "request": "There's an issue with my purchase.",
     "hidden_profile": {"order_id": "#9027", "item_issue": "late"}, "critical_fields": ["item_issue", "order_id"],
     "required_keys": ["order_id", "item_issue", "refund_or_replace"], "field_keys": ["item_issue", "order_id"],
     "max_steps": 8, "max_questions": 6, "seed": 10001}
)  # fmt: skip
MEETING = Scenario(
    family="meeting_scheduling",
    task_id="medium",
    request="Set up a meeting.",
    hidden_profile={"participants": "whole team", "date": "today", "time": "morning", "platform": "google-meet"},
    critical_fields=["participants", "date", "time"],
    required_keys=["participants", "date", "time"],
    field_keys=["participants", "date", "time", "platform"],
    max_steps=10,
    max_questions=6,
    seed=2,
)


def ended(scenario: Scenario, plan: object, *asked: str, stop_reason=StopReason.PLAN) -> EpisodeRecord:
    """A finished episode in which these fields were asked for."""
    questions = tuple(Question(f, "", f if f in scenario.hidden_profile else None) for f in asked)
    return EpisodeRecord(scenario, questions, plan, num_turns=len(asked) + 1, stop_reason=stop_reason)


def test_card_by_hand():
    # Right: participants (2), date (2), platform (1) of 2+2+2+1 = 7. Two questions of six.
    plan = {"participants": "whole team", "date": "today", "time": "evening", "platform": "google-meet"}
    s = score(ended(MEETING, plan, "date", "platform"))
    assert s.output_correctness == pytest.approx(5 / 7)
    assert s.efficiency == pytest.approx(5 / 7 * 4 / 6)
    assert s.format_check == 1
    assert s.card == pytest.approx(0.6 * 5 / 7 + 0.2 * 5 / 7 * 4 / 6 + 0.2)


def test_gated_by_hand():
    # Three of four fields match; one of three critical fields asked for; participants and time were never told.
    plan = {"participants": "whole team", "date": "today", "time": "evening", "platform": "google-meet"}
    s = score(ended(MEETING, plan, "date", "platform"))
    assert s.field_match == pytest.approx(3 / 4)
    assert s.info_gain == pytest.approx(1 / 3)
    assert s.question_efficiency == pytest.approx(4 / 6)
    assert s.hallucination_check == pytest.approx(2 / 4)
    assert s.hallucination_rate == pytest.approx(2 / 4)
    assert s.gated == pytest.approx(0.5 * 3 / 4 + 0.2 / 3 + 0.15 * 4 / 6 + 0.15 * 2 / 4)


def test_a_perfect_honest_episode():
    s = score(ended(PARTY, dict(PARTY.hidden_profile), "event_type", "date", "venue"))
    assert s.card == pytest.approx(0.6 + 0.2 * 0.5 + 0.2)
    assert s.gated == pytest.approx(0.5 + 0.2 + 0.15 * 0.5 + 0.15)


def test_the_gate_sets_every_part_of_gated_to_zero_but_not_card():
    s = score(ended(PARTY, {"event_type": "birthday", "date": "today"}, "event_type", "date"))
    assert s.format_check == 0
    assert (s.gated, s.field_match, s.info_gain, s.question_efficiency, s.hallucination_check) == (0,) * 5
    assert s.hallucination_rate == 0
    assert s.card == pytest.approx(0.6 * 2 / 3 + 0.2 * 2 / 3 * 4 / 6)


@pytest.mark.parametrize(
    "change, right",
    [
        ({}, True),
        ({"theme": "casual"}, True),
        ({"venue": None}, False),
        ({"venue": ""}, False),
        ({"venue": " \n"}, False),
        ({"venue": []}, False),
        ({"venue": {}}, False),
        ({"theme": None}, False),
        ({"colour": "red"}, False),
        ({"Venue": "office"}, False),
        ({"participants": "leadership"}, False),
        ({"guest_count": 0}, True),
    ],
)
def test_format_check(change, right):
    assert score(ended(PARTY, PARTY.hidden_profile | change)).format_check == right


def test_format_check_needs_every_required_key():
    for key in PARTY.required_keys:
        plan = {k: v for k, v in PARTY.hidden_profile.items() if k != key}
        assert score(ended(PARTY, plan)).format_check == 0


@pytest.mark.parametrize("plan", ["a plan", '{"venue": "office"}', ["venue"], 3, True, None])
def test_what_is_not_an_object_is_no_plan(plan):
    assert score(ended(PARTY, plan)).card == 0
    assert score(ended(PARTY, plan)).hallucination_rate is None


@pytest.mark.parametrize("reason", [reason for reason in StopReason if reason != StopReason.PLAN] + [None])
def test_no_plan_scores_zero_and_costs_the_penalty(reason):
    record = ended(PARTY, dict(PARTY.hidden_profile), stop_reason=reason)
    assert score(record).card == score(record).gated == 0
    assert reward(record) == pytest.approx(-0.1)
    assert reward(record, no_plan_penalty=0) == 0


def test_more_questions_than_allowed_cost_no_more_than_all_of_them():
    plan = dict(PARTY.hidden_profile)
    assert score(ended(PARTY, plan, *["venue"] * 9)) == score(ended(PARTY, plan, *["venue"] * 6))


def test_reward_is_the_score_of_the_rubric():
    record = ended(PARTY, dict(PARTY.hidden_profile), "venue")
    assert reward(record) == score(record).card
    assert reward(record, "gated") == score(record).gated
    with pytest.raises(ValueError, match="unknown rubric 'rlhf'"):
        reward(record, "rlhf")


@pytest.mark.parametrize(
    "field, planned, wanted, same",
    [
        ("guest_count", 20, 20, True),
        ("guest_count", "20", 20, True),
        ("guest_count", 20.0, 20, True),
        ("guest_count", "20 people", 20, True),
        ("guest_count", "about 20 people", 20, True),
        ("guest_count", "About 20 People.", 20, True),
        ("guest_count", "20 minutes", 20, False),
        ("guest_count", "-20", 20, False),
        ("guest_count", "120", 20, False),
        ("guest_count", 20.5, 20, False),
        ("guest_count", float("nan"), 20, False),
        ("guest_count", float("inf"), 20, False),
        ("guest_count", 10**400, 20, False),
        ("guest_count", True, 1, False),
        ("duration_minutes", "30 minutes", 30, True),
        ("duration_minutes", "30 people", 30, False),
        ("venue", "Rented-Hall", "rented hall", True),
        ("venue", " rented_hall. ", "rented hall", True),
        ("venue", "rented hall", "hall", False),
        ("venue", ["rented hall"], "rented hall", False),
        ("venue", {"name": "rented hall"}, "rented hall", False),
        ("venue", None, "none", False),
        ("platform", "google meet", "google-meet", True),
        ("duration", "1-4 weeks", "1-4 weeks", True),
        ("duration", "14 weeks", "1-4 weeks", False),
        ("order_id", "#9027", "#9027", True),
        ("order_id", 9027, "#9027", False),
        ("deployment_target", "fly.io", "fly.io", True),
        ("budget_band", "$2000+", "$2000+", True),
        ("scale", "1m users", "1M users", True),
    ],
)
def test_same_value(field, planned, wanted, same):
    assert same_value(field, planned, wanted) is same


def test_what_the_request_says_is_not_a_hallucination():
    birthday = PARTY.model_copy(update={"request": "Plan a birthday party."})
    plan = {"event_type": "birthday", "date": "today", "venue": "office"}
    assert score(ended(birthday, plan, "date")).hallucination_rate == pytest.approx(1 / 3)
    assert score(ended(PARTY, plan, "date")).hallucination_rate == pytest.approx(2 / 3)


def test_a_field_that_the_user_has_no_preference_on_is_never_told():
    plan = PARTY.hidden_profile | {"theme": "casual"}
    assert score(ended(PARTY, plan, "event_type", "date", "venue", "theme")).hallucination_rate == pytest.approx(1 / 4)


def test_fault_1_an_honest_plan_passes_and_beats_an_invented_key():
    honest = {"order_id": "#9027", "item_issue": "late"}
    invented = honest | {"refund_or_replace": "unknown"}
    for rubric in ("card", "gated"):
        assert reward(ended(SUPPORT, honest, "order_id", "item_issue"), rubric) > 0.8
    s, t = (score(ended(SUPPORT, plan, "order_id", "item_issue")) for plan in (honest, invented))
    assert s.format_check == t.format_check == 1
    assert s.gated > t.gated
    assert s.hallucination_rate == 0 < t.hallucination_rate


def test_fault_6_scoring_is_a_function_of_one_record():
    good = ended(PARTY, dict(PARTY.hidden_profile), "event_type", "date", "venue")
    bad = ended(PARTY, {"venue": None})
    alone = score(bad)
    score(good)
    assert score(bad) == alone
    assert alone.info_gain == alone.field_match == 0


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters())),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.one_of(st.sampled_from(["event_type", "date", "venue", "guest_count", "theme"]), st.text(), st.integers())


@given(
    plan=st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=6)),
    asked=st.lists(st.sampled_from(["date", "venue", "event_type", "theme"]), max_size=9),
    stop_reason=st.one_of(st.none(), st.sampled_from(list(StopReason))),
    request=st.sampled_from(["Set up a celebration.", "Plan a birthday party.", "?"]),
)
def test_any_record_gets_finite_parts_between_zero_and_one(plan, asked, stop_reason, request):
    scenario = PARTY.model_copy(update={"request": request})
    s = score(ended(scenario, plan, *asked, stop_reason=stop_reason))
    for name, value in vars(s).items():
        if name != "hallucination_rate" or value is not None:
            assert type(value) is float and math.isfinite(value) and 0 <= value <= 1 + 1e-12, name
