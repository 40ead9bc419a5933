"""`--resume FOLDER`: what is checked before anything is loaded, and how the run gets back to where it was.

A run goes on from its newest checkpoint that is whole; before its first one, from the base. Steps behind that whose
rollouts are recorded are trained again on those, so that a sampler which does not repeat itself changes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo import checkpoint, compare, distributed, run_folder
from grpo.config import Config, UsageError
from grpo.data_types import Group
from grpo.evaluate import scenarios_hash
from grpo.metrics import last_num_tokens, read_log
from grpo.rollout_record import DamagedRecord, Recorder
from grpo.trainer import Trainer, position
from scenarios.generator import held_out

EVALUATIONS = ("eval_before.json", "eval_after.json")


@dataclass(frozen=True)
class Restart:
    """Where a run goes on."""

    checkpoint: Path | None
    """None: at the base."""
    done: int
    """Finished steps."""
    problems: list[str]
    """One line on each newer checkpoint, all of them damaged."""

    def apply(self, folder: Path, trainer: Trainer) -> None:
        """Put the trainer there. Damaged checkpoints get another name, so that none counts as one that is kept."""
        if self.checkpoint is not None:
            checkpoint.load(self.checkpoint, trainer.policy.model, trainer.optimizer)
            trainer.engine.weights_changed()
        for problem in self.problems:
            say(f"warning: {problem}; going on from " + (f"step {self.done}" if self.done else "the base"))
        distributed.first(checkpoint.set_aside, folder, self.done)


def find_restart(folder: Path, settings: Config) -> Restart:
    """Where the run in `folder` goes on. Nothing is loaded or written.

    Raises:
        UsageError: nothing to continue from; a checkpoint or a log that is not this run's; an evaluation that the
            comparison at the end of the run could not use.
    """
    run_folder.require_writable(folder)
    for name in EVALUATIONS:
        if settings.eval.eval_limit and (folder / name).exists():
            check_evaluation(folder / name, settings)
    document = run_folder.stored(folder)
    if "run_id" not in document:
        raise UsageError(f"{folder / 'config.json'}: no run_id: of an earlier version, whose checkpoints are not read")
    path, progress, problems = checkpoint.newest_whole(folder, document["run_id"], document["config"])
    rows = read_log(folder / "log_history.json")
    if progress is None:
        _require_all_rollouts(folder, rows, problems)
        return Restart(None, 0, problems)
    _check_log(folder, rows, progress)
    _check_position(folder, progress, settings)
    return Restart(path, progress.step, problems)


def recorded(recorder: Recorder, step: int) -> list[Group] | None:
    """The rollouts of a step that the run had sampled before it was stopped; None: sample them."""
    try:
        return recorder.load(step)
    except (DamagedRecord, OSError) as error:
        say(f"warning: {error}; the rollouts of step {step} are sampled again")
        return None


def recorded_before(recorder: Recorder, done: int) -> list[Group]:
    """The rollouts of the last finished step. The sampler guesses from them: where they are lost, the next step differs
    by rounding at most."""
    try:
        return recorder.load(done) or []
    except (DamagedRecord, OSError) as error:
        say(f"warning: {error}; without it the next step may differ in the last digits")
        return []


def say(line: str) -> None:
    """One line on stderr, of the first process."""
    if distributed.is_first():
        print(line, file=sys.stderr, flush=True)


def check_evaluation(path: Path, settings: Config) -> None:
    """That a comparison at the end of the run can use it. Raises UsageError."""
    try:
        report = compare.load_report(path)
    except UsageError as error:
        what = str(error).removeprefix(f"--compare {path}: ")
        raise UsageError(f"{path}: {what}; remove it to have that evaluation made again") from None
    expected = {
        "rubric": settings.eval.rubric,
        "temperature": settings.eval.eval_temperature,
        "max_completion_len": settings.rollout.max_completion_len,
    }
    for name, value in expected.items():
        if report.get(name) != value:
            raise UsageError(f"{path}: not of this run ({name} {report.get(name)}, config.json has {value})")
    if report["scenarios"]["sha256"] != scenarios_hash(held_out(settings.eval.eval_limit)):
        raise UsageError(f"{path}: not of this run (other scenarios than --eval-limit {settings.eval.eval_limit})")


def _require_all_rollouts(folder: Path, rows: Sequence[Mapping[str, Any]], problems: Sequence[str]) -> None:
    """Without a checkpoint the run starts at its base. That loses nothing as long as every step can be repeated."""
    recorder = Recorder(folder)
    missing = next((row["step"] for row in rows if not recorder.path(row["step"]).exists()), None)
    if missing is not None:
        why = "; ".join(problems) or "it has none"
        raise UsageError(
            f"--resume {folder}: no checkpoint to continue from ({why}), and no rollouts of step {missing}"
        )


def _check_log(folder: Path, rows: Sequence[Mapping[str, Any]], progress: checkpoint.Progress) -> None:
    covered = [row for row in rows if row["step"] <= progress.step]
    found = {"rows": len(covered), "num_tokens": last_num_tokens(covered)}
    expected = {name: progress.log.get(name) for name in found}
    if found != expected:
        raise UsageError(
            f"--resume {folder}: log_history.json is not the one of its checkpoint of step {progress.step} "
            f"({json.dumps(found)}, the checkpoint says {json.dumps(expected)}); restore it"
        )


def _check_position(folder: Path, progress: checkpoint.Progress, settings: Config) -> None:
    now = position(settings, progress.step)
    for name, value in progress.position.items():
        if now.get(name) != value:
            raise UsageError(
                f"--resume {folder}: the next step would use {name} {now.get(name)}, but it was to be {value}; "
                "continue with the version of this program that the run was started with"
            )
