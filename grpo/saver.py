"""What a run writes between its steps, and in which order."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo import checkpoint, distributed, run_folder
from grpo.checkpoint import Progress
from grpo.config import Config
from grpo.data_types import Group
from grpo.files import sync
from grpo.metrics import LogHistory, completion_paths, write_completions
from grpo.resume import say
from grpo.rollout_record import Recorder
from grpo.trainer import StepResult, Trainer, position


class Saver:
    """A kill at any moment leaves something whole: rollouts are written before they are used, the log's line after the
    update, and what a checkpoint covers before the checkpoint.

    Of several processes the first one writes (`history` is None in the others), but for its part of a checkpoint."""

    def __init__(self, folder: Path, settings: Config, trainer: Trainer, history: LogHistory | None, done: int):
        document = run_folder.stored(folder)
        self.folder, self.settings, self.trainer, self.history = folder, settings, trainer, history
        self.run_id, self.config = document["run_id"], document["config"]
        self.recorder = Recorder(folder, run_id=self.run_id, config=self.config, base_sha256=document["base_sha256"])
        self.saved = done
        self.warned = False

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Keep a step's rollouts before anything is done with them. Raises RunStopped on a full disk."""
        with run_folder.writing(self.folder, step):
            distributed.first(self.recorder.save, step, groups)

    def log(self, row: dict[str, Any], result: StepResult) -> None:
        """Write a finished step's line and episodes. Raises OSError."""
        assert self.history  # the first process logs
        write_completions(self.folder / "completions", row["step"], result.groups, result.advantages)
        self.history.append(row)
        free, needed = shutil.disk_usage(self.folder).free, checkpoint.size(self.trainer.policy.model)
        if free < needed and not self.warned:
            sizes = f"{run_folder.megabytes(free)} free, the next checkpoint needs {run_folder.megabytes(needed)}"
            say(f"warning: the disk of {self.folder} is nearly full: {sizes}")
        self.warned = free < needed

    def due(self, step: int) -> bool:
        """Is a checkpoint due after this step?"""
        return bool(self.settings.run.save_every) and step % self.settings.run.save_every == 0

    def checkpoint(self, step: int) -> None:
        """Save the state after `step`. Raises OSError."""
        progress = distributed.first(self._progress, step)
        keep = self.settings.run.keep_checkpoints
        checkpoint.save(self.folder, progress, self.trainer.policy.model, self.trainer.optimizer, keep)
        distributed.first(self.tidy)
        self.saved = step

    def _progress(self, step: int) -> Progress:
        """What a checkpoint says of the run; what it covers is on the disk by then."""
        assert self.history
        progress = Progress(self.run_id, self.config, step, position(self.settings, step), self.history.position)
        sync(self.history.path)
        for covered in range(self.saved + 1, step + 1):
            for path in completion_paths(self.folder / "completions", covered):
                sync(path)
        return progress

    def begin(self) -> None:
        """Drop what lies behind the checkpoint that the run goes on from."""
        assert self.history
        self.history.truncate_to(self.saved)
        self.tidy()

    def tidy(self) -> None:
        """Drop what no kept checkpoint needs. A run may have been killed before it did, so a resumed one begins so."""
        keep = self.settings.run.keep_checkpoints
        checkpoint.tidy(self.folder, keep)
        # The base is the checkpoint of step 0: its rollouts are kept until `keep` others are there.
        kept = [0, *(checkpoint.number(each) or 0 for each in checkpoint.finished(self.folder))][-keep:]
        self.recorder.prune(kept[0] - 1)  # one more, which the sampler guesses from
