"""The scenarios as tasks by split and number, described without what is hidden.

`train` is endless; its first TRAIN_TASKS are listed. `held_out` is the fixed file that evaluations play. They share no
profile (`scenarios.generator`).
"""

from __future__ import annotations

import random
from typing import Any

from pydantic import ValidationError

from scenarios.generator import DIFFICULTIES, HELD_OUT_SEEDS, generate, held_out, training_scenario
from scenarios.schema import Scenario

SPLITS = {"train": "train", "held_out": "test"}
"""Name and OpenEnv's type of each split."""

TRAIN_TASKS = 100_000
PREVIEW = 100
"""How many tasks of the training split a listing without bounds holds."""
MAX_RANGE = 1000
MAX_BUDGET = 100
"""Turns and questions of a scenario that a client brings along."""


def num_tasks(split: str) -> int:
    """The number of tasks that can be named."""
    _check_split(split)
    return TRAIN_TASKS if split == "train" else len(held_out(None))


def scenario_of(split: str, index: int) -> Scenario:
    """The scenario of a task. Raises ValueError for an unknown split, IndexError for a number out of range."""
    size = num_tasks(split)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
        raise IndexError(f"index {index!r}: must be a whole number from 0 to {size - 1}")
    return training_scenario(0, index) if split == "train" else held_out(None)[index]


def describe(split: str, index: int) -> dict[str, Any]:
    """A task as anybody may see it: what the agent is told before its first turn."""
    scenario = scenario_of(split, index)
    return {
        "id": f"{split}-{index}",
        "split": split,
        "index": index,
        "request": scenario.request,
        "family": scenario.family,
        "difficulty": scenario.task_id,
        "required_keys": list(scenario.required_keys),
        "max_steps": scenario.max_steps,
        "max_questions": scenario.max_questions,
    }


def describe_range(split: str, start: int | None, stop: int | None) -> list[dict[str, Any]]:
    """Tasks `start` to `stop`, as a slice takes them. Raises ValueError for more than MAX_RANGE."""
    chosen = range(num_tasks(split))[start:stop]
    if len(chosen) > MAX_RANGE:
        raise ValueError(f"{len(chosen)} tasks: ask for at most {MAX_RANGE} at once")
    return [describe(split, index) for index in chosen]


def choose(
    seed: int | None,
    split: str | None,
    index: int | None,
    difficulty: str | None,
    family: str | None,
    scenario: dict[str, Any] | None,
) -> Scenario:
    """The scenario that a reset asks for: a task; or a seed's; or one that the client brings; else any of training.

    Raises ValueError in one line, or IndexError.
    """
    if scenario is not None:
        return _brought(scenario)
    if split is not None or index is not None:
        if split is None or index is None:
            raise ValueError("a task is named by split and index: give both")
        return scenario_of(split, index)
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed {str(seed)[:40]}: must be a whole number from 0 to 2^63 - 1")
        return generate(seed, difficulty, family)
    if difficulty is None and family is None:
        return training_scenario(random.getrandbits(48), 0)
    return generate(HELD_OUT_SEEDS.stop + random.getrandbits(48), difficulty, family)


def name_of(scenario: Scenario) -> dict[str, Any]:
    """What to give a reset so that it plays this scenario: its name, or itself where it is not one of ours.

    A name tells nothing that is hidden: the server makes the scenario from it.
    """
    if scenario.seed >= 0 and scenario.task_id in DIFFICULTIES:
        name = {"seed": scenario.seed, "difficulty": scenario.task_id, "family": scenario.family}
        made = generate(scenario.seed, scenario.task_id, scenario.family)
        if made == scenario.model_copy(update={"task_title": None}):
            return name
    return {"scenario": scenario.model_dump(mode="json")}


def _brought(document: dict[str, Any]) -> Scenario:
    try:
        scenario = Scenario.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        raise ValueError(f"scenario: {where + ': ' if where else ''}{first['msg']}") from None
    for name in ("max_steps", "max_questions"):
        if getattr(scenario, name) > MAX_BUDGET:
            raise ValueError(f"scenario: {name} {getattr(scenario, name)}: must be at most {MAX_BUDGET}")
    return scenario


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {str(split)[:40]!r}: must be one of {', '.join(SPLITS)}")
