"""What a finished episode is worth. Pure: an episode record in, finite floats out, nothing is remembered.

`card` (the default, that of the published model cards)::

    score = 0.6 * OutputCorrectness + 0.2 * Efficiency + 0.2 * FormatCheck

`gated` (that of the published repository); where FormatCheck fails, every part is 0::

    score = 0.50 * FieldMatch + 0.20 * InfoGain + 0.15 * QuestionEfficiency + 0.15 * HallucinationCheck

Every part is in [0, 1], and all are 0 without an accepted plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from env.clarify import EpisodeRecord
from env.families import FAMILIES
from env.user_simulator import UNITS

RUBRICS = ("card", "gated")
CRITICAL_WEIGHT = 2.0

_AMOUNT = re.compile(r"(?:about\s+)?([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?)(?:[\s_-]*([a-z]+))?\.?")


@dataclass(frozen=True)
class Score:
    """The totals of both rubrics, then their parts.

    `hallucination_rate` is the share of plan fields that the agent was never told, None without an accepted plan. It
    does not depend on the format check, `hallucination_check` does.
    """

    card: float
    gated: float
    output_correctness: float
    efficiency: float
    format_check: float
    field_match: float
    info_gain: float
    question_efficiency: float
    hallucination_check: float
    hallucination_rate: float | None

    def total(self, rubric: str) -> float:
        """The score of a rubric. Raises ValueError for an unknown one."""
        if rubric not in RUBRICS:
            raise ValueError(f"unknown rubric {rubric!r}: must be one of {', '.join(RUBRICS)}")
        return self.card if rubric == "card" else self.gated


NO_PLAN = Score(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None)


def score(record: EpisodeRecord) -> Score:
    """Scores one episode under both rubrics."""
    if not record.plan_accepted:
        return NO_PLAN
    plan, profile = record.plan, record.scenario.hidden_profile
    assert isinstance(plan, dict)  # accepted
    matched = {field for field, value in profile.items() if same_value(field, plan.get(field), value)}
    frugality = max(0.0, 1 - len(record.questions) / record.scenario.max_questions)
    format_check = float(format_is_right(record))
    output_correctness = _weighted_share(record, matched)
    efficiency = output_correctness * frugality
    hallucination_rate = _hallucination_rate(record)
    # Multiplied by the gate one by one, so that the reported parts always add up to the score.
    field_match = format_check * len(matched) / len(profile)
    info_gain = format_check * _info_gain(record)
    question_efficiency = format_check * frugality
    hallucination_check = format_check * (1 - hallucination_rate)
    return Score(
        card=0.6 * output_correctness + 0.2 * efficiency + 0.2 * format_check,
        gated=0.5 * field_match + 0.2 * info_gain + 0.15 * question_efficiency + 0.15 * hallucination_check,
        output_correctness=output_correctness,
        efficiency=efficiency,
        format_check=format_check,
        field_match=field_match,
        info_gain=info_gain,
        question_efficiency=question_efficiency,
        hallucination_check=hallucination_check,
        hallucination_rate=hallucination_rate,
    )


def reward(record: EpisodeRecord, rubric: str = "card", no_plan_penalty: float = 0.1) -> float:
    """The training reward: the rubric's score, minus `no_plan_penalty` where no plan was accepted (0 turns it off)."""
    return score(record).total(rubric) - (0.0 if record.plan_accepted else no_plan_penalty)


def format_is_right(record: EpisodeRecord) -> bool:
    """FormatCheck: a plan object with every required key, no null or blank value, no key outside the family."""
    plan = record.plan
    return (
        isinstance(plan, Mapping)
        and all(key in plan for key in record.scenario.required_keys)
        and all(key in FAMILIES[record.scenario.family].fields for key in plan)
        and not any(_is_blank(value) for value in plan.values())
    )


def same_value(field: str, planned: object, wanted: object) -> bool:
    """Whether a plan's value is the profile's, both in normal form (see `_normal`).

    Numbers compare as numbers, and the user's own words count: "20", 20.0, "20 people" and "about 20 people" are 20.
    Lists, objects, booleans and null equal nothing.
    """
    normal = _normal(field, planned)
    return normal is not None and normal == _normal(field, wanted)


def _normal(field: str, value: object) -> float | str | None:
    """A number, or text in lower case with single blanks for spaces, hyphens and underscores; None for the rest."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if not isinstance(value, str):
        # Beyond 1e15 neighbouring integers share a float; no profile goes there. NaN fails the comparison as well.
        return float(value) if -1e15 < value < 1e15 else None
    text = value.casefold().strip()
    amount = _AMOUNT.fullmatch(text)
    if amount and amount[2] in (None, UNITS.get(field)):
        return float(amount[1])
    return re.sub(r"[\s_-]+", " ", text).strip(" .")


def _is_blank(value: object) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or value == [] or value == {}


def _weighted_share(record: EpisodeRecord, matched: set[str]) -> float:
    """OutputCorrectness: the share of profile fields that match, critical ones counted twice."""
    weights = {
        field: CRITICAL_WEIGHT if field in record.scenario.critical_fields else 1.0
        for field in record.scenario.hidden_profile
    }
    return sum(weights[field] for field in matched) / sum(weights.values())


def _info_gain(record: EpisodeRecord) -> float:
    """Share of the critical fields that questions revealed; 1 where there is none to reveal."""
    critical = record.scenario.critical_fields
    return sum(field in record.revealed for field in critical) / len(critical) if critical else 1.0


def _hallucination_rate(record: EpisodeRecord) -> float:
    """Share of plan fields that neither an answer nor the request told."""
    told = record.revealed | set(FAMILIES[record.scenario.family].told_by(record.scenario.request))
    plan = record.plan if isinstance(record.plan, dict) else {}
    return sum(key not in told for key in plan) / len(plan) if plan else 0.0
