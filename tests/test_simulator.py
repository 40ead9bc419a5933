"""The simulated user: whole words, own names, no dependence on order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.families import FAMILIES
from env.user_simulator import NOT_UNDERSTOOD, Answer, _phrases, answer, asked_field
from scenarios.generator import generate
from scenarios.schema import Scenario

FIELDS = [(family, field) for family, spec in FAMILIES.items() for field in spec.fields]


def full_profile(family: str) -> Scenario:
    """A scenario whose profile holds every field of the family, with its first value."""
    spec = FAMILIES[family]
    return generate(1, "hard", family).model_copy(
        update={"hidden_profile": {name: field.values[0] for name, field in spec.fields.items()}}
    )


@pytest.mark.parametrize(
    "family, question, right",
    [
        ("medical_intake", "What dosage do you take?", (None, "medications")),
        ("coding", "Do you need a feedback form?", (None,)),
        ("coding", "Should it use the latest release?", (None,)),
        ("coding", "How should users log in?", ("auth",)),
        ("support_triage", "Do you have a preference for a refund or a replacement?", ("refund_or_replace",)),
        ("meeting_scheduling", "Should I send you an update?", (None,)),
        ("event_planning", "How many hours will the event last?", (None,)),
    ],
)
def test_fault_3_keywords_match_whole_words(family, question, right):
    assert answer(full_profile(family), question).field in right


def test_fault_3_whole_does_not_ask_who():
    assert answer(full_profile("meeting_scheduling"), "Should the whole day be blocked?").field != "participants"


@pytest.mark.parametrize("family, field", FIELDS)
def test_fault_3_a_fields_own_name_reveals_it(family, field):
    scenario = full_profile(family)
    forms = ["What is the {}?", "{}", "what's the {}", "\u201c{}\u201d?", "Tell me: '{}'"]
    for name in (field, field.replace("_", " "), field.replace("_", "-"), field.upper()):
        for form in forms:
            assert answer(scenario, form.format(name)).field == field, (form, name)


@pytest.mark.parametrize("family, field", FIELDS)
def test_every_phrase_asks_for_its_field(family, field):
    for phrase in FAMILIES[family].fields[field].asked_by:
        assert asked_field(family, f"So, {phrase}, please?") == field, phrase


def test_fault_3_a_curly_apostrophe_is_an_apostrophe():
    for apostrophe in "'\u2019":
        assert asked_field("medical_intake", f"What{apostrophe}s wrong?") == "primary_symptom"
        assert asked_field("event_planning", f"What is the venue{apostrophe}s name?") == "venue"


def test_fault_3_ties_do_not_depend_on_dict_order():
    """Between phrases of the same length the family's order decides, however profile and question are ordered."""
    scenario = full_profile("event_planning")
    backwards = dict(reversed(scenario.hidden_profile.items()))
    shuffled = scenario.model_copy(update={"hidden_profile": backwards})
    for question in ("What are the date and the venue?", "What is the venue, and the date?", "theme, venue"):
        assert answer(scenario, question) == answer(shuffled, question)
    # "venue" and "theme" are both names of five letters; the family lists the venue first.
    assert asked_field("event_planning", "theme or venue?") == "venue"


def test_the_longest_phrase_wins_and_an_own_name_beats_any():
    assert asked_field("coding", "How many users will log in?") == "scale"
    assert asked_field("coding", "Which version of the language?") == "language_version"
    assert asked_field("support_triage", "How shall we resolve the issue?") == "refund_or_replace"
    assert asked_field("meeting_scheduling", "At what time, and for how many minutes, is it?") == "time"


@pytest.mark.parametrize(
    "family, question, field",
    [
        ("event_planning", "What kind of event is it?", "event_type"),
        ("event_planning", "How many people are coming?", "guest_count"),
        ("event_planning", "When should it be?", "date"),
        ("event_planning", "Where should it take place?", "venue"),
        ("event_planning", "What's your budget?", "budget_band"),
        ("event_planning", "Any allergies?", "dietary_constraints"),
        ("event_planning", "Budget for food (in EUR, e.g. 500)?", "budget_band"),
        ("event_planning", "Formal, casual, or just fun :) ?", "theme"),
        ("meeting_scheduling", "Who should attend?", "participants"),
        ("meeting_scheduling", "Which day suits you?", "date"),
        ("meeting_scheduling", "How long should it be?", "duration_minutes"),
        ("meeting_scheduling", "Video call or in person?", "platform"),
        ("medical_intake", "What symptoms do you have?", "primary_symptom"),
        ("medical_intake", "How severe is the pain?", "severity"),
        ("medical_intake", "When did the symptoms start?", "duration"),
        ("medical_intake", "How old are you?", "age_band"),
        ("medical_intake", "Do you have any medical conditions?", "prior_conditions"),
        ("medical_intake", "Are you on any medication?", "medications"),
        ("support_triage", "Could you give me your order number?", "order_id"),
        ("support_triage", "What is the issue with your order?", "item_issue"),
        ("support_triage", "Would you like a refund or a replacement?", "refund_or_replace"),
        ("support_triage", "How urgent is it?", "urgency"),
        ("support_triage", "How should we contact you?", "channel_preferred"),
        ("coding", "Which programming language do you prefer?", "stack"),
        ("coding", "How many users do you expect?", "scale"),
        ("coding", "Which database?", "datastore"),
        ("coding", "Where will you deploy it?", "deployment_target"),
        ("coding", "Do you want unit tests?", "test_coverage"),
        ("coding", "Nice weather, isn't it?", None),
        ("coding", "", None),
        ("coding", "预算大约多少?", None),
    ],
)
def test_questions_that_people_ask(family, question, field):
    assert asked_field(family, question) == field


def test_what_the_user_says():
    scenario = generate(1, "easy", "event_planning").model_copy(
        update={"hidden_profile": {"guest_count": 20, "venue": "rented hall"}}
    )
    assert answer(scenario, "How many guests?") == Answer("guest count: 20 people.", "guest_count")
    assert answer(scenario, "What is the venue?") == Answer("venue: rented hall.", "venue")
    assert answer(scenario, "Any theme?") == Answer("No preference on the theme.", None)
    assert answer(scenario, "Hm?") == Answer(NOT_UNDERSTOOD, None)
    meeting = full_profile("meeting_scheduling")
    assert answer(meeting, "How long?").text == "duration minutes: 15 minutes."
    assert answer(full_profile("support_triage"), "order id").text == "order id: #1199."


def test_the_same_question_gets_the_same_answer():
    scenario = full_profile("coding")
    assert answer(scenario, "Which database?") == answer(scenario, "Which database?")


@given(st.sampled_from(list(FAMILIES)), st.text(st.characters()))
def test_any_text_is_answered(family, question):
    reply = answer(full_profile(family), question)
    assert reply.text and (reply.field is None) == (reply.text == NOT_UNDERSTOOD)


def test_no_phrase_is_shared_by_two_fields_of_a_family():
    for family in FAMILIES:
        phrases = [phrase for phrase, _ in _phrases(family)]
        assert len(phrases) == len(set(phrases))


def test_words_around_a_phrase_do_not_join_it():
    rng = random.Random(0)
    for family, field in rng.sample(FIELDS, 10):
        name = field.replace("_", " ")
        assert asked_field(family, f"x{name}x") != field
