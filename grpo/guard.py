"""Between the steps of a run: what goes wrong is said in one line, kept in a file, and ends the run where it stays so.

    RUN/dumps/step_00012.json.gz                 the rollout batch (`grpo.rollout_record`), the settings, the reason
    RUN/dumps/weights_step_00012.safetensors     the weights that met it (LoRA: the adapters')

`python -m grpo.replay RUN/dumps/step_00012.json.gz` trains on that batch again, on a CPU and without an engine. The
batch of a step is small (some 100 kB); of the weights the newest `--keep-checkpoints` are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grpo import distributed, rollout_record, run_folder
from grpo.config import Config, RunStopped
from grpo.data_types import Group
from grpo.engines import Engine
from grpo.engines.torch_engine import TorchEngine
from grpo.files import ASIDE, sync, sync_folder
from grpo.invariants import BrokenInvariant, alarms, bad_steps, gap_limit
from grpo.lora import save_trained
from grpo.model import Policy
from grpo.resume import say
from grpo.shared_errors import shared

FOLDER = "dumps"
MAX_BAD_STEPS = 3
"""Dropped steps in a row that end the run."""


class Guard:
    """Watches a run from outside its steps. It remembers nothing: streaks are read off the log."""

    def __init__(self, folder: Path, settings: Config, policy: Policy, engine: Engine):
        self.folder, self.settings, self.policy = folder, settings, policy
        self.run = run_folder.stored(folder)
        self.gap_limit = gap_limit(settings, policy.dtype, in_process=isinstance(engine, TorchEngine))

    @contextlib.contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around step number `step`, from 1: where an invariant breaks, its rollouts are dumped before the run ends."""
        try:
            yield
        except BrokenInvariant as error:
            shared(error)
            if not distributed.is_first():
                raise
            # Of several processes, each of which has a part, one alone cannot keep whole weights.
            kept = self._dump(step, error.groups, str(error), weights=distributed.size() == 1)
            raise BrokenInvariant(f"step {step}: {error}; {kept}. This is a bug of the program") from error

    def after(self, rows: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> RunStopped | None:
        """Say what is to be said of the newest row of the log, whose step was made from `groups`.

        Returns:
            Why the run must end now, or None.
        """
        for line in alarms(rows, self.settings, self.gap_limit):
            say(f"warning: {line}")
        bad, row = bad_steps(rows), rows[-1]
        if not bad:
            return None
        reason = f"loss {_finite(row['loss'])}, gradient norm {_finite(row['grad_norm'])}"
        say(f"step {row['step']}: update dropped ({reason}); {self._dump(row['step'], groups, reason, bad)}")
        if bad < MAX_BAD_STEPS:
            return None
        return RunStopped(
            f"{bad} steps in a row had a loss or gradient that is not finite; the weights are still good. "
            f"See {self.folder / FOLDER}; python train.py --resume {self.folder} goes on behind them"
        )

    def _dump(self, step: int, groups: Sequence[Group], reason: str, bad: int = 1, weights: bool = True) -> str:
        """Write a step's dump; what to tell the user about it. A full disk costs the dump, not the run.

        Without `weights` a replay repeats the steps since the checkpoint.
        """
        dumps = self.folder / FOLDER
        path = dumps / f"step_{step:05d}.json.gz"
        try:
            about = {name: self.run[name] for name in ("run_id", "config", "base_sha256")}
            if weights:
                about["weights"] = self._weights(step, bad).name
            rollout_record.save(path, groups, step=step, reason=reason, **about)
        except (OSError, SafetensorError) as error:
            return f"its rollouts could not be kept ({error})"
        return f"python -m grpo.replay {path} runs it again"

    def _weights(self, step: int, bad: int) -> Path:
        """The weights as they are. A streak has left them alone since its first step, unless it made a first one of
        several inner updates."""
        dumps = self.folder / FOLDER
        if bad > 1 and self.settings.optim.num_iterations == 1:
            first = dumps / f"weights_step_{step - bad + 1:05d}.safetensors"
            if first.exists():
                return first
        path = dumps / f"weights_step_{step:05d}.safetensors"
        aside = path.with_name(f".{path.name}{ASIDE}")
        dumps.mkdir(parents=True, exist_ok=True)
        try:
            save_trained(self.policy.model, aside)
            sync(aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        sync_folder(dumps)
        saved = sorted(dumps.glob("weights_step_*.safetensors"), key=lambda each: (len(each.name), each.name))
        for old in saved[: -self.settings.run.keep_checkpoints]:
            old.unlink()
        return path


def _finite(value: float | None) -> str:
    """The log has null where a number has no value."""
    return "not finite" if value is None else f"{value:.3g}"
