"""Scenarios from seeds: endless ones for training, a fixed file for evaluation.

`python -m scenarios.generator` rewrites `held_out.json`, byte for byte the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from functools import cache
from itertools import count
from pathlib import Path
from typing import cast

from env.families import FAMILIES, FAMILY_ALIASES, Family, Request, Value
from scenarios.schema import Difficulty, Scenario, load_scenarios

HELD_OUT_FILE = Path(__file__).with_name("held_out.json")
HELD_OUT_PER_FAMILY = 50
HELD_OUT_SEEDS = range(10_000, 20_000)
"""Reserved for evaluation, as in the published set; training seeds start above it."""

DIFFICULTIES = ("easy", "medium", "hard")
TRAINING_MIX = (0.5, 0.3, 0.2)
"""Share of each difficulty in training."""
HIDDEN_FIELDS = {"easy": (2, 3), "medium": (4, 5), "hard": (6, 7)}
"""How many fields a profile holds, at most as many as the family has."""
MAX_STEPS = {"easy": 8, "medium": 10, "hard": 12}
MAX_QUESTIONS = 6


def generate(seed: int, difficulty: str | None = None, family: str | None = None) -> Scenario:
    """The scenario of a seed: pure, the same on every machine.

    Difficulty and family are drawn from the seed where they are not given; giving the drawn ones changes nothing.
    Raises ValueError for an unknown difficulty or family.
    """
    rng = random.Random(f"scenario {seed}")
    drawn_difficulty = rng.choices(DIFFICULTIES, TRAINING_MIX)[0]
    drawn_family = rng.choice(list(FAMILIES))
    difficulty = drawn_difficulty if difficulty is None else difficulty
    family = drawn_family if family is None else FAMILY_ALIASES.get(family, family)
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"unknown difficulty {difficulty!r}: must be one of {', '.join(DIFFICULTIES)}")
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}: must be one of {', '.join(FAMILIES)}")
    spec = FAMILIES[family]
    names = _hidden_fields(rng, spec, difficulty)
    # A request that names a value is only made by a user who has that field.
    request = rng.choice([request for request in spec.requests if set(request.told) <= set(names)])
    return Scenario(
        family=family,
        task_id=cast(Difficulty, difficulty),
        request=request.text,
        hidden_profile={name: rng.choice(_possible_values(spec, request, name)) for name in names},
        critical_fields=tuple(name for name in names if name in spec.critical),
        required_keys=tuple(name for name in spec.required if name in names),
        field_keys=tuple(names),
        max_steps=MAX_STEPS[difficulty],
        max_questions=MAX_QUESTIONS,
        seed=seed,
    )


def _hidden_fields(rng: random.Random, family: Family, difficulty: str) -> list[str]:
    """Names of the profile's fields, in the family's order.

    Easy profiles hold critical fields only; the others all required fields and some of the rest.
    """
    size = min(rng.choice(HIDDEN_FIELDS[difficulty]), len(family.fields))
    if difficulty == "easy":
        chosen = rng.sample(family.critical, size)
    else:
        others = [name for name in family.fields if name not in family.required]
        chosen = [*family.required, *rng.sample(others, size - len(family.required))]
    return [name for name in family.fields if name in chosen]


def _possible_values(family: Family, request: Request, field: str) -> tuple[Value, ...]:
    return dict(request.says).get(field, family.values[field])


def training_scenario(run_seed: int, index: int) -> Scenario:
    """Training scenario number `index` (0, 1, ...) of a run: pure, so a resumed run goes on where it stopped.

    A profile of the held-out file is never used, whatever the request: its draw is repeated with the next seed.
    """
    for attempt in count():
        digest = hashlib.blake2b(f"{run_seed} {index} {attempt}".encode(), digest_size=6).digest()
        scenario = generate(HELD_OUT_SEEDS.stop + int.from_bytes(digest, "big"))
        if _profile_key(scenario) not in _held_out_profiles():
            return scenario
    raise AssertionError("count() has no end")


def held_out(limit: int | None = 50) -> list[Scenario]:
    """The first `limit` scenarios of the fixed held-out file, all of them (50 per family) for None.

    The file's order makes every prefix stratified: families alternate, and so do difficulties.
    Raises ValueError where the limit is negative or above the file's length.
    """
    scenarios = _held_out_file()
    if limit is None:
        return list(scenarios)
    if not 0 <= limit <= len(scenarios):
        raise ValueError(f"{limit} held-out scenarios: must be between 0 and {len(scenarios)}")
    return list(scenarios[:limit])


def make_held_out() -> list[Scenario]:
    """The scenarios of `held_out.json`, made anew: no profile occurs twice."""
    seeds = iter(HELD_OUT_SEEDS)
    scenarios: dict[tuple, Scenario] = {}
    families = list(FAMILIES)
    for slot in range(HELD_OUT_PER_FAMILY * len(families)):
        # Five families and three difficulties have no common divisor: fifteen slots hold each pair once.
        family, difficulty = families[slot % len(families)], DIFFICULTIES[slot % len(DIFFICULTIES)]
        candidates = (generate(seed, difficulty, family) for seed in seeds)
        scenario = next(s for s in candidates if _profile_key(s) not in scenarios)
        scenarios[_profile_key(scenario)] = scenario
    return list(scenarios.values())


def held_out_text() -> str:
    """The text of `held_out.json`: a JSON list, one scenario a line."""
    lines = [json.dumps(s.model_dump(mode="json", exclude={"task_title"})) for s in make_held_out()]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _profile_key(scenario: Scenario) -> tuple:
    return (scenario.family, frozenset(scenario.hidden_profile.items()))


@cache
def _held_out_file() -> tuple[Scenario, ...]:
    return tuple(load_scenarios(HELD_OUT_FILE))


@cache
def _held_out_profiles() -> frozenset:
    return frozenset(_profile_key(scenario) for scenario in _held_out_file())


def main(args: list[str] | None = None) -> int:
    """Writes the held-out file anew. Returns the exit code: 0, or 2 for a file that cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m scenarios.generator", description="Write the held-out scenarios.")
    parser.add_argument("--out", metavar="FILE", type=Path, default=HELD_OUT_FILE, help="default: the bundled file")
    path = parser.parse_args(args).out
    try:
        path.write_text(held_out_text(), encoding="utf-8", newline="\n")
    except OSError as error:
        print(f"scenarios.generator: --out {path}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{path}: {len(load_scenarios(path))} scenarios")
    return 0


if __name__ == "__main__":
    sys.exit(main())
