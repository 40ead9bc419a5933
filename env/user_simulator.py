"""The simulated user: answers a question with at most one field of the hidden profile, by whole words.

A question asks for the field whose phrase it contains. The field's own name beats any other phrase; then the longer
phrase wins (in words, then in letters), then the field that comes first in the family. Whether a field is in the
profile plays no part in that, and there is no memory: the same question gets the same answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from env.families import FAMILIES, Value
from scenarios.schema import Scenario

UNITS = {"guest_count": "people", "duration_minutes": "minutes"}
"""The word that the user says after a number."""

NOT_UNDERSTOOD = "I am not sure what you mean."


@dataclass(frozen=True)
class Answer:
    """What the user says, and the profile field that it reveals (None where it reveals nothing)."""

    text: str
    field: str | None


def answer(scenario: Scenario, question: str) -> Answer:
    """What the user answers: "venue: rented hall.", "No preference on the theme.", or NOT_UNDERSTOOD."""
    field = asked_field(scenario.family, question)
    if field is None:
        return Answer(NOT_UNDERSTOOD, None)
    if field not in scenario.hidden_profile:
        return Answer(f"No preference on the {field.replace('_', ' ')}.", None)
    return Answer(f"{field.replace('_', ' ')}: {spoken(field, scenario.hidden_profile[field])}.", field)


def spoken(field: str, value: Value) -> str:
    """A profile value as the user says it: "20 people", "30 minutes", otherwise the value itself."""
    return f"{value} {UNITS[field]}" if field in UNITS and isinstance(value, int) else str(value)


def asked_field(family: str, question: str) -> str | None:
    """The family's field that a question asks for, None where no phrase occurs in it."""
    text = f" {_words(question)} "
    # Best phrase first, so the first hit decides.
    return next((field for phrase, field in _phrases(family) if f" {phrase} " in text), None)


@cache
def _phrases(family: str) -> list[tuple[str, str]]:
    """(phrase, field) of a family, best first."""
    ranked = []
    for order, (name, field) in enumerate(FAMILIES[family].fields.items()):
        for phrase in {_words(name), *map(_words, field.asked_by)}:
            own_name = phrase == _words(name)
            ranked.append(((not own_name, -phrase.count(" "), -len(phrase), order), phrase, name))
    return [(phrase, name) for _, phrase, name in sorted(ranked)]


def _words(text: str) -> str:
    """Lower-case words separated by single blanks; hyphens and underscores separate words, a possessive 's goes.

    >>> _words("What\u2019s the Order-ID?")
    'what the order id'
    """
    text = text.casefold().replace("\u2019", "'").replace("_", " ")
    words = (word.strip("'").removesuffix("'s") for word in re.findall(r"[\w']+", text))
    return " ".join(word for word in words if word)
