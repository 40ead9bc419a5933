"""Be the agent: `python -m env.play` plays one episode in a terminal.

A line may be a plain question, `plan {"date": "today", ...}`, `info`, or a raw tool call as a model writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path

from env.clarify import ClarifyEnv, EpisodeRecord
from env.families import FAMILIES, FAMILY_ALIASES
from env.rubrics import score
from env.tools import NO_CALL, InvalidTurn, format_call, parse_turn
from scenarios.generator import DIFFICULTIES, generate
from scenarios.schema import Scenario, load_scenarios

HELP = 'Type a question, plan {"field": "value", ...}, info, or a raw tool call. Ctrl-D leaves.'


def main(args: list[str] | None = None) -> int:
    """Plays one episode. Returns the exit code: 0, 1 where the output is not read on, 2 for bad input."""
    options = _options(args)
    try:
        scenario = choose_scenario(options.family, options.difficulty, options.seed, options.scenarios)
    except ValueError as error:
        print(f"env.play: {error}", file=sys.stderr)
        return 2
    try:
        try:
            play(ClarifyEnv(scenario))
        except (EOFError, KeyboardInterrupt):
            print("\nLeft before the end: no score.")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def choose_scenario(family: str | None, difficulty: str | None, seed: int | None, path: str | None) -> Scenario:
    """The seed's generated scenario, or, with a file, one of its scenarios that fit. Any where nothing is asked for.

    Raises ValueError naming the flag and what would be right.
    """
    if family is not None:
        family = FAMILY_ALIASES.get(family, family)
    if family not in (None, *FAMILIES):
        raise ValueError(f"--family {family}: must be one of {', '.join(FAMILIES)}")
    if difficulty not in (None, *DIFFICULTIES):
        raise ValueError(f"--difficulty {difficulty}: must be one of {', '.join(DIFFICULTIES)}")
    if path is None:
        return generate(random.randrange(10_000) if seed is None else seed, difficulty, family)
    wanted = {"family": family, "task_id": difficulty, "seed": seed}
    fitting = [
        scenario
        for scenario in load_scenarios(Path(path))
        if all(value is None or getattr(scenario, key) == value for key, value in wanted.items())
    ]
    if not fitting:
        raise ValueError(f"--scenarios {path}: holds no scenario with that family, difficulty and seed")
    return random.choice(fitting)


def play(env: ClarifyEnv) -> EpisodeRecord:
    """Reads lines from stdin until the episode ends, then shows the score. EOFError and KeyboardInterrupt pass."""
    system, user = env.reset()
    print(f"{system['content']}\n\n{user['content']}\n\n{HELP}")
    while env.record.stop_reason is None:
        line = input(f"\n[{_budget(env.record)}] > ").strip()
        if line:
            reply = env.step(as_turn(line)).reply
            if reply is not None:
                print(reply)
    print(f"\n{describe(env.record)}")
    return env.record


def as_turn(line: str) -> str:
    """A typed line as the text of a model's turn; what is not recognised is a question."""
    command, _, rest = line.partition(" ")
    if command == "plan" and rest.lstrip().startswith("{"):
        return f"PROPOSE: {rest}"
    if line == "info":
        return format_call("get_task_info", {})
    if parse_turn(line) == InvalidTurn(NO_CALL):
        return format_call("ask_question", {"question": line})
    return line


def describe(record: EpisodeRecord) -> str:
    """How the episode ended, what the user wanted, and the score with its parts."""
    assert record.stop_reason
    lines = [
        f"Ended by: {record.stop_reason.value}",
        f"The user wanted: {json.dumps(record.scenario.hidden_profile)}",
        f"Your plan:       {json.dumps(record.plan)}",
    ]
    for name, value in vars(score(record)).items():
        lines.append(f"  {name:<20}{'-' if value is None else format(value, '.3f')}")
    return "\n".join(lines)


def _budget(record: EpisodeRecord) -> str:
    turns = record.scenario.max_steps - record.num_turns
    questions = record.scenario.max_questions - len(record.questions)
    return f"{turns} turns, {questions} questions left"


def _options(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m env.play", description=__doc__)
    parser.add_argument("--family", help=f"one of {', '.join(FAMILIES)}; default: any")
    parser.add_argument("--difficulty", help=f"one of {', '.join(DIFFICULTIES)}; default: any")
    parser.add_argument("--seed", type=int, help="which scenario; default: a random one")
    parser.add_argument("--scenarios", metavar="FILE", help="play from this file instead of generating")
    return parser.parse_args(args)


if __name__ == "__main__":
    sys.exit(main())
