"""Run folders as the page needs them: which runs there are, their steps, episodes and evaluations.

Files keep an episode's texts. What each turn did, what it revealed and what the rubric says is found out by playing
these texts once more in the environment, which is deterministic: one code for training steps and evaluations, and none
that could disagree with the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from env.clarify import OUTSIDE_REASONS, ClarifyEnv, EpisodeRecord, StopReason
from env.families import FAMILIES
from env.rubrics import Score, score
from env.tools import InvalidTurn, ToolCall, parse_turn
from scenarios.schema import Scenario

T = TypeVar("T")

MARKS = ("log_history.json", "completions", "rollouts", "eval_before.json")
"""A folder that holds one of these is a run; `config.json` alone may be a model's."""

STEP_FILE = re.compile(r"step[_-](\d+)\.jsonl?(?:\.gz)?")


class Unreadable(ValueError):
    """A file of a run that is missing or damaged: one line that names it."""


@dataclass(frozen=True)
class Turn:
    """One turn of the agent and what it led to.

    `field` is the profile field that the user's answer revealed, None where it revealed nothing; `known` says that it
    was known before. `reply` is None where the episode ended with this turn.
    """

    text: str
    call: ToolCall | InvalidTurn
    reply: str | None
    field: str | None = None
    known: bool = False


@dataclass(frozen=True)
class Shown:
    """An episode as it is shown. `reward` and `advantage` are None outside of training.

    `differs` is True where an answer in the file is not the one that this version's user gives.
    """

    record: EpisodeRecord
    turns: tuple[Turn, ...]
    reward: float | None = None
    advantage: float | None = None
    group: int = 0
    member: int = 0
    tokens: int | None = None
    differs: bool = False

    @property
    def scenario(self) -> Scenario:
        return self.record.scenario

    @property
    def score(self) -> Score:
        return score(self.record)


def turn_between(before: EpisodeRecord, after: EpisodeRecord, text: str, reply: str | None, cut: bool = False) -> Turn:
    """The turn that led from one record of an episode to the next. `cut`: a length limit ended the text."""
    asked = after.questions[len(before.questions) :]
    field = asked[0].field if asked else None
    return Turn(text, parse_turn(text, cut), reply, field, known=field in before.revealed)


@dataclass(frozen=True)
class Run:
    """A run's folder. `steps` have their episodes in `completions/`, `recorded` their tokens in `rollouts/`."""

    folder: Path
    steps: tuple[int, ...]
    recorded: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    def completions(self, step: int) -> Path:
        return self.folder / "completions" / f"step_{step:05d}.jsonl"

    def rollouts(self, step: int) -> Path:
        return self.folder / "rollouts" / f"step-{step:06d}.json.gz"

    @property
    def first_choice(self) -> int | None:
        """A step whose tokens can be scored at once: the first recorded one stands right behind a checkpoint."""
        both = [step for step in self.recorded if step in self.steps]
        return next(iter(both or self.steps[-1:]), None)


def find_runs(root: Path) -> list[Run]:
    """The runs in `root`, the one that was at work last first; `root` itself where it is one. [] where there is none.

    Raises Unreadable where the folder cannot be read.
    """
    try:
        if not root.is_dir():
            if root.exists():
                raise Unreadable(f"{root}: is a file; give a folder that holds runs")
            return []
        folders = [root] if _is_run(root) else [path for path in root.iterdir() if path.is_dir() and _is_run(path)]
        return [open_run(path) for path in sorted(folders, key=lambda path: (-_last_change(path), path.name))]
    except OSError as error:
        raise Unreadable(f"{root}: {error.strerror}") from error


def open_run(folder: Path) -> Run:
    """The run in `folder` as it stands now. Raises OSError."""
    return Run(folder, _steps(folder / "completions", ".jsonl"), _steps(folder / "rollouts", ".gz"))


def _is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


def _last_change(folder: Path) -> float:
    return max((folder / mark).stat().st_mtime for mark in MARKS if (folder / mark).exists())


def _steps(folder: Path, suffix: str) -> tuple[int, ...]:
    if not folder.is_dir():
        return ()
    names = [STEP_FILE.fullmatch(path.name) for path in folder.iterdir() if path.suffix == suffix]
    return tuple(sorted(int(match[1]) for match in names if match))


def as_it_is(read: Callable[[Path, int], T], path: Path) -> T:
    """`read(path, when it was last changed)`, which remembers what it found. Raises Unreadable."""
    try:
        return read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error


def step_episodes(run: Run, step: int) -> tuple[Shown, ...]:
    """The episodes of a training step, in the order of the batch. Raises Unreadable."""
    return as_it_is(_step_episodes, run.completions(step))


@lru_cache(maxsize=32)
def _step_episodes(path: Path, changed: int) -> tuple[Shown, ...]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return tuple(_shown(_json(line, f"{path}: line {i}"), f"{path}: line {i}") for i, line in enumerate(lines, 1))


def evaluation(run: Run, which: str) -> tuple[Shown, ...]:
    """The held-out episodes of `eval_before.json` or `eval_after.json` (`which`: before, after).

    Raises Unreadable, also where the file is not there.
    """
    return as_it_is(_evaluation, run.folder / f"eval_{which}.json")


@lru_cache(maxsize=8)
def _evaluation(path: Path, changed: int) -> tuple[Shown, ...]:
    document = _json(path.read_text(encoding="utf-8", errors="replace"), str(path))
    rows = document.get("episodes") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        raise Unreadable(f"{path}: not an evaluation (no episodes)")
    return tuple(_shown(row, f"{path}: episode {i}") for i, row in enumerate(rows, 1))


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{where}: damaged, not JSON ({str(error)[:100]})") from error


def _shown(row: Any, where: str) -> Shown:
    """An episode from its line in a file."""
    try:
        shown = _replay(row)
        numbers = {name: row.get(name) for name in ("reward", "advantage", "tokens")}
        numbers = {name: value if isinstance(value, (int, float)) else None for name, value in numbers.items()}
        return replace(shown, group=int(row.get("group", 0)), member=int(row.get("member", 0)), **numbers)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error).splitlines()[0][:120]
        if isinstance(error, ValidationError):
            reason = "its scenario breaks the schema"
        raise Unreadable(f"{where}: damaged ({reason})") from error


def _replay(row: Mapping[str, Any]) -> Shown:
    """Play the row's texts in the environment. Raises what a row that is none makes it raise."""
    first, *messages = row["conversation"]
    scenario = _scenario(row, first["content"])
    asked = row.get("questions")
    asked = len(asked) if isinstance(asked, list) else asked
    reason = StopReason(row["stop_reason"])
    shown = _play(scenario, messages, reason, cut=False)
    # A length limit cuts the last turn off, or leaves no room for the reply to it: what the turn did says which.
    if reason in OUTSIDE_REASONS and (shown.record.stop_reason != reason or len(shown.record.questions) != asked):
        shown = _play(scenario, messages, reason, cut=True)
    return shown


def _play(scenario: Scenario, messages: Iterable[Mapping[str, str]], reason: StopReason, cut: bool) -> Shown:
    env, turns, differs = ClarifyEnv(scenario), [], False
    env.reset()
    messages = list(messages)
    agent = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i in agent:
        reply = messages[i + 1]["content"] if i + 1 < len(messages) and i + 1 not in agent else None
        before, text, last = env.record, messages[i]["content"], i == agent[-1]
        if before.stop_reason is not None:
            raise ValueError("the episode goes on after its end")
        result = env.step(text, truncated=cut and last)
        # An episode that was stopped from outside did not get its last reply.
        differs |= result.reply != reply and not (last and reason in OUTSIDE_REASONS)
        turns.append(turn_between(before, env.record, text, reply, cut and last))
    if env.record.stop_reason is None and reason in OUTSIDE_REASONS:
        env.finish(reason)
    return Shown(env.record, tuple(turns), differs=differs or env.record.stop_reason != reason)


def _scenario(row: Mapping[str, Any], brief: str) -> Scenario:
    """The row's scenario: its budgets and required fields are those that the first message told the agent."""
    told = dict(re.findall(r"^([\w ]+): (.*)$", brief, re.MULTILINE))
    turns, questions = re.findall(r"\d+", told["Budget"])
    profile = row["hidden_profile"]
    return Scenario.model_validate(
        {
            "family": row["family"],
            "task_id": row["task_id"],
            "request": row["request"],
            "hidden_profile": profile,
            "critical_fields": [name for name in profile if name in FAMILIES[row["family"]].critical],
            "required_keys": [name for name in told["Plan fields"].split(", ") if name in profile],
            "field_keys": list(profile),
            "max_steps": int(turns),
            "max_questions": int(questions),
            "seed": row.get("seed", 0),
        }
    )


def most_telling(episodes: Iterable[Shown]) -> int:
    """The index of an episode worth looking at first: the best of those whose questions revealed something."""
    episodes = list(episodes)
    return max(
        range(len(episodes)),
        key=lambda i: (bool(episodes[i].record.revealed), episodes[i].score.card, -i),
        default=0,
    )
