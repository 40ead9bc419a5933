"""The scenario schema (that of the published held-out file) and its loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from env.families import FAMILIES, FAMILY_ALIASES
from env.literals import printable


def _readable(text: str) -> str:
    """In a plan a blank value counts as none, so nobody could plan for a profile that holds one."""
    if not text.strip():
        raise PydanticCustomError("unreadable", "is blank")
    if printable(text) != text:
        raise PydanticCustomError("unreadable", "holds NUL or half a surrogate pair")
    return text


Text = Annotated[str, StringConstraints(strict=True), AfterValidator(_readable)]
# The rubric compares numbers as floats, exact in this range.
Number = Annotated[StrictInt, Field(gt=-(10**15), lt=10**15)]
Budget = Annotated[StrictInt, Field(gt=0)]
Difficulty = Literal["easy", "medium", "hard"]


class Scenario(BaseModel):
    """One task: what the user says, what the user really wants, and the budgets. Immutable.

    Example::

        {"family": "event_planning", "task_id": "easy", "request": "Set up a celebration.",
         "hidden_profile": {"event_type": "birthday", "date": "today", "venue": "office"},
         "critical_fields": ["event_type", "date", "venue"], "required_keys": ["event_type", "date", "venue"],
         "field_keys": ["event_type", "date", "venue"], "max_steps": 8, "max_questions": 6, "seed": 10000}

    `required_keys` and `critical_fields` are cut to the keys of the profile when a scenario is made: what the user
    does not have cannot be demanded of an honest plan (92 of 100 published easy scenarios do). `coding_requirements`
    is read as `coding`; keys that are not listed here are ignored. Raises ValueError (pydantic's) on anything else.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    family: str
    task_id: Difficulty
    request: Text
    hidden_profile: dict[str, Text | Number]
    critical_fields: tuple[str, ...]
    required_keys: tuple[str, ...]
    field_keys: tuple[str, ...]
    max_steps: Budget
    max_questions: Budget
    seed: StrictInt
    task_title: Text | None = None

    @field_validator("family")
    @classmethod
    def _known_family(cls, name: str) -> str:
        name = FAMILY_ALIASES.get(name, name)
        if name not in FAMILIES:
            raise ValueError(f"unknown family {name[:40]!r}: must be one of {', '.join(FAMILIES)}")
        return name

    @model_validator(mode="after")
    def _fields_of_the_family(self) -> Scenario:
        if not self.hidden_profile:
            raise ValueError("hidden_profile is empty")
        known = FAMILIES[self.family].fields
        for key in (*self.hidden_profile, *self.critical_fields, *self.required_keys, *self.field_keys):
            if key not in known:
                raise ValueError(f"{self.family} has no field {key[:40]!r}: must be one of {', '.join(known)}")
        for name in ("critical_fields", "required_keys"):
            # The model is frozen for everybody else; here it is still being made.
            object.__setattr__(self, name, tuple(key for key in getattr(self, name) if key in self.hidden_profile))
        return self


def load_scenarios(path: str | Path) -> list[Scenario]:
    """The scenarios of a JSON file (a non-empty list of objects).

    Raises ValueError with one line naming the file, the scenario's index and the key for anything that is wrong.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not JSON (not UTF-8 text)") from None
    except (RecursionError, ValueError):
        raise ValueError(f"{path}: not JSON that can be read (nested too deeply, or a number too long)") from None
    if not isinstance(data, list) or not data:
        raise ValueError(f"{path}: must be a non-empty JSON list of scenarios")
    return [_scenario(item, f"{path}: scenario {index}") for index, item in enumerate(data)]


def _scenario(item: object, where: str) -> Scenario:
    if not isinstance(item, dict):
        raise ValueError(f"{where}: must be a JSON object")
    try:
        return Scenario.model_validate(item)
    except ValidationError as error:
        raise ValueError(f"{where}: {_first_line(error)}") from None


def _first_line(error: ValidationError) -> str:
    """Pydantic's first complaint in one line: `missing key 'request'`, `max_steps: must be ...`."""
    first = error.errors()[0]
    # A key of the file is quoted where it is no plain word: it may hold anything, line breaks too.
    parts = [str(part) for part in first["loc"][:2]]
    key = ".".join(part if part.isascii() and part.isidentifier() else ascii(part)[:40] for part in parts)
    if first["type"] == "unreadable":
        return f"{key} {first['msg']}"
    if len(parts) > 1 and parts[0] == "hidden_profile":
        return f"{key}: must be text or a whole number below 10^15"
    if first["type"] == "missing":
        return f"missing key {key!r}"
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    return f"{key}: {message}" if key and first["type"] != "value_error" else message
