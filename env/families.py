"""The five families: their fields, possible values, vague requests, and the words that ask for a field.

They are data, in `families.json`; the order of families, fields and values in it is part of what a seed means. A field
that is *critical* counts twice in the score; a plan must hold the *required* ones. Values are those of the published
scenarios. Prompts never show them: small models copy example values word for word.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Value = str | int


@dataclass(frozen=True)
class Field:
    """One thing that the user may want: its possible values and the phrases (whole words) that ask for it.

    The field's own name need not be among `asked_by`; it always asks for the field.
    """

    values: tuple[Value, ...]
    asked_by: tuple[str, ...]
    critical: bool = False


@dataclass(frozen=True)
class Request:
    """A vague opening request. `says` limits what a profile may hold, so that a request never contradicts it.

    Where one value is left, the request has told the agent that value: "Plan a birthday party." says
    `event_type: birthday`. Several values ("Get a call on the calendar." is not a meeting in person) tell nothing.
    """

    text: str
    says: tuple[tuple[str, tuple[Value, ...]], ...] = ()

    @property
    def told(self) -> dict[str, Value]:
        """The field values that the request gives away."""
        return {field: values[0] for field, values in self.says if len(values) == 1}


@dataclass(frozen=True)
class Family:
    """A kind of task. `fields` keeps the fixed order that breaks ties and orders profiles and prompts."""

    name: str
    fields: dict[str, Field]
    required: tuple[str, ...]
    requests: tuple[Request, ...]

    @cached_property
    def critical(self) -> tuple[str, ...]:
        """Names of the fields that count twice."""
        return tuple(name for name, field in self.fields.items() if field.critical)

    @cached_property
    def values(self) -> dict[str, tuple[Value, ...]]:
        """The value list of each field."""
        return {name: field.values for name, field in self.fields.items()}

    def told_by(self, request: str) -> dict[str, Value]:
        """Field values that the text of a request gives away; empty for a request that is not one of ours."""
        return next((r.told for r in self.requests if r.text == request), {})


def _read(path: Path) -> dict[str, Family]:
    """The families of `families.json`, in its order."""
    families = {}
    for name, family in json.loads(path.read_text(encoding="utf-8")).items():
        fields = {
            field: Field(tuple(spec["values"]), tuple(spec["asked_by"]), spec["critical"])
            for field, spec in family["fields"].items()
        }
        requests = tuple(
            Request(request["text"], tuple((field, tuple(values)) for field, values in request.get("says", {}).items()))
            for request in family["requests"]
        )
        families[name] = Family(name, fields, tuple(family["required"]), requests)
    return families


FAMILIES: dict[str, Family] = _read(Path(__file__).with_name("families.json"))

FAMILY_ALIASES = {"coding_requirements": "coding"}
"""Names under which published scenarios know a family."""
