"""Checkpoints: weights, optimiser and step counter, enough to go on exactly where the run stopped.

Nothing else is needed: scenarios and every sampled token are functions of (run seed, step, ...), the learning rate is
a function of the step, and the reference is the base that `config.json` names.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model

from grpo.config import UsageError

FOLDER = "checkpoints"
FILES = ("model.safetensors", "optimizer.pt", "state.json")


def save(run_folder: Path, step: int, model: Any, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Write `checkpoints/step-<step>`, complete or not at all, then drop all but the newest `keep`."""
    target = run_folder / FOLDER / f"step-{step:06d}"
    aside = target.with_name(target.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_model(model, str(aside / "model.safetensors"))
    torch.save(optimizer.state_dict(), aside / "optimizer.pt")
    (aside / "state.json").write_text(json.dumps({"step": step}))
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    for old in _complete(run_folder)[:-keep]:
        shutil.rmtree(old)
    return target


def newest(run_folder: Path) -> Path:
    """The newest complete checkpoint. Raises UsageError where there is none."""
    found = _complete(run_folder)
    if not found:
        raise UsageError(f"--resume {run_folder}: holds no checkpoint to continue from")
    return found[-1]


def load(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Restore `model` and `optimizer` in place; returns the number of finished steps.

    Raises:
        UsageError: a file is missing or damaged.
    """
    try:
        step = int(json.loads((checkpoint / "state.json").read_text())["step"])
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        load_model(model, str(checkpoint / "model.safetensors"), device=str(next(model.parameters()).device))
        optimizer.load_state_dict(state)
    except Exception as error:  # damaged files raise almost anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--resume: {checkpoint} is damaged ({reason}); remove it to use the one before") from error
    if step != _number(checkpoint):
        raise UsageError(f"--resume: {checkpoint} is damaged (state.json says step {step}); remove it")
    return step


def _complete(run_folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first, in numeric order."""
    folders = (run_folder / FOLDER).glob("step-*")
    complete = [f for f in folders if _number(f) is not None and all((f / name).is_file() for name in FILES)]
    return sorted(complete, key=_number)


def _number(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for other folders (`step-000003.tmp` was never finished)."""
    text = folder.name.removeprefix("step-")
    return int(text) if text.isdecimal() else None
