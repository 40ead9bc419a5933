"""A rollout batch as a file: gzipped JSON that gives back exactly the groups that were sampled.

What a step is trained on can so be kept (a killed run goes on with the rollouts of its half-finished step) and trained
on again without an engine (`grpo.replay`). Exact means: every id, mask and text is equal, every float bit for bit.

    {"format": 1, "about": {...}, "groups": [{"scenario": {...}, "episodes": [{"prompt_ids": [...], ...}]}]}

Two things go beyond strict JSON, because they are what one wants to see again when something has gone wrong: numbers
without a value, written NaN and Infinity as Python's json does, and lone surrogates, written as the three bytes that
UTF-8 would give them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env.clarify import EpisodeRecord, Question, StopReason
from grpo.data_types import Episode, Group, Turn
from grpo.files import write_atomic
from scenarios.schema import Scenario

FORMAT = 1
LEVEL = 1  # of gzip: a third more bytes than level 9, in a tenth of the time


@dataclass(frozen=True)
class RolloutRecord:
    """The groups of one step, and what was said about them: run, step, settings."""

    groups: list[Group]
    about: dict[str, Any]


class DamagedRecord(ValueError):
    """A file that is no rollout record, or was one."""


class Recorder:
    """The rollouts of a run, one file a step, from the oldest kept checkpoint on: `rollouts/step-000012.json.gz`.

    A resumed run trains on what is there instead of sampling it again: the step that was half-finished, and those
    between it and the checkpoint. `about` goes into each record; its `run_id` says whose rollouts they are.
    """

    FOLDER = "rollouts"

    def __init__(self, run_folder: Path, **about: Any):
        self.folder, self.about = run_folder / self.FOLDER, about

    def path(self, step: int) -> Path:
        """The file of step number `step`, from 1 as in the log."""
        return self.folder / f"step-{step:06d}.json.gz"

    def save(self, step: int, groups: Sequence[Group]) -> None:
        """Record a step's rollouts. Raises OSError."""
        save(self.path(step), groups, step=step, **self.about)

    def load(self, step: int) -> list[Group] | None:
        """The recorded rollouts of a step; None where there are none.

        Raises:
            DamagedRecord: damaged, or of another run.
        """
        if not self.path(step).exists():
            return None
        record = load(self.path(step))
        if (record.about.get("run_id"), record.about.get("step")) != (self.about["run_id"], step):
            raise DamagedRecord(f"{self.path(step)}: belongs to another run or step")
        return record.groups

    def prune(self, step: int) -> None:
        """Remove the records up to `step`."""
        for path in self.folder.glob("step-*.json.gz"):
            number = path.name.removeprefix("step-").removesuffix(".json.gz")
            if number.isdecimal() and int(number) <= step:
                path.unlink()


def save(path: str | Path, groups: Sequence[Group], **about: Any) -> None:
    """Write `groups` to `path`, whole or not at all. `about` is plain JSON data. Raises OSError."""
    document = {"format": FORMAT, "about": about, "groups": [_group(group) for group in groups]}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=_plain)
    write_atomic(path, gzip.compress(text.encode("utf-8", "surrogatepass"), LEVEL, mtime=0))


def load(path: str | Path) -> RolloutRecord:
    """Read what `save` wrote. Raises DamagedRecord with the reason, OSError where it cannot be read."""
    content = Path(path).read_bytes()
    try:
        document = json.loads(gzip.decompress(content).decode("utf-8", "surrogatepass"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, this version reads {FORMAT}")
        return RolloutRecord([_read_group(group) for group in document["groups"]], dict(document["about"]))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DamagedRecord(f"{path}: not a rollout record, or damaged ({type(error).__name__}: {reason})") from error


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch, which engines may leave among the ids."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in a rollout record")


def _group(group: Group) -> dict[str, Any]:
    return {
        "scenario": _scenario(group.scenario),
        "episodes": [_episode(episode, group.scenario) for episode in group.episodes],
    }


def _episode(episode: Episode, scenario: Scenario) -> dict[str, Any]:
    values = {field.name: getattr(episode, field.name) for field in dataclasses.fields(Episode)}
    turns = [dataclasses.asdict(turn) for turn in episode.turns]
    return values | {"turns": turns, "record": record_values(episode.record, scenario)}


def record_values(record: EpisodeRecord, scenario: Scenario) -> dict[str, Any]:
    """An episode's record as JSON data; `scenario` is known elsewhere."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(EpisodeRecord)}
    values["questions"] = [dataclasses.asdict(question) for question in record.questions]
    # Its scenario is the group's, unless an environment has changed it.
    del values["scenario"]
    return values if record.scenario == scenario else values | {"scenario": _scenario(record.scenario)}


def _scenario(scenario: Scenario) -> Mapping[str, Any]:
    return scenario.model_dump()


def _read_group(values: dict[str, Any]) -> Group:
    scenario = Scenario.model_validate(values["scenario"])
    return Group(scenario, tuple(_read_episode(episode, scenario) for episode in values["episodes"]))


def _read_episode(values: dict[str, Any], scenario: Scenario) -> Episode:
    for name in ("prompt_ids", "completion_ids", "loss_mask", "sampler_logprobs"):
        values[name] = tuple(values[name])
    if not len(values["completion_ids"]) == len(values["loss_mask"]) == len(values["sampler_logprobs"]):
        raise ValueError("ids, mask and log-probs of an episode differ in length")
    turns = tuple(Turn(**turn) for turn in values["turns"])
    reason, record = _read_reason(values["stop_reason"]), read_record(values["record"], scenario)
    return Episode(**values | {"turns": turns, "stop_reason": reason, "record": record})


def read_record(values: Mapping[str, Any], scenario: Scenario) -> EpisodeRecord:
    """What `record_values` gave. Raises KeyError, TypeError or ValueError."""
    values = dict(values)
    own = values.pop("scenario", None)
    values["questions"] = tuple(Question(**question) for question in values["questions"])
    values["stop_reason"] = _read_reason(values["stop_reason"])
    return EpisodeRecord(scenario if own is None else Scenario.model_validate(own), **values)


def _read_reason(value: str | None) -> StopReason | None:
    return None if value is None else StopReason(value)
