"""Checkpoints: everything that a run needs to go on exactly where it stopped.

    checkpoints/step-000050/
        model.safetensors        weights (LoRA: the adapters' only)
        optimizer.safetensors    AdamW's moments and step counts, `<parameter index>.<name>`
        state.json               run, settings, step, position in the data and the schedule, place in the log
        manifest.json            size and SHA-256 of the other files; written last

Several processes write a file each instead of the first two (`grpo.shards`). Any number of processes reads either.

No generator's state is in it, because none is drawn from: scenarios and every sampled token are functions of (run seed,
step, ...), the learning rate is a function of the step. The rollouts of a step that was not finished lie beside the
checkpoints (`grpo.rollout_record`), and the reference is the base that `config.json` names.

Safetensors and JSON only: nothing that is read here can run code.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from grpo import distributed, shards
from grpo.config import UsageError
from grpo.files import ASIDE, commit_folder, remove_folder, sha256
from grpo.lora import load_trained, save_trained

FOLDER = "checkpoints"
FORMAT = 1
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"


class Damaged(ValueError):
    """A checkpoint that cannot be used; the text says which file and why."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, as `state.json` holds it; plain JSON data throughout."""

    run_id: str
    config: dict[str, Any]
    step: int
    """Finished steps."""
    position: dict[str, Any]
    """What the next step will use, for comparison: the run seed, its first scenario, its learning rate."""
    log: dict[str, Any]
    """Where `log_history.json` ended: rows, bytes, tokens so far."""


def save(run_folder: Path, progress: Progress, model: Any, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Write `checkpoints/step-<step>`, complete or not at all, then drop all but the newest `keep`.

    Raises:
        OSError: (disk full, ...) with all earlier checkpoints as they were and nothing left of this one.
    """
    folder = run_folder / FOLDER
    target = folder / f"step-{progress.step:06d}"
    aside = target.with_name(target.name + ASIDE)
    distributed.first(tidy, run_folder, keep)
    try:
        distributed.first(aside.mkdir, 0o777, True)
        _write(aside, progress, model, optimizer)
        distributed.first(commit_folder, aside, target)
    except (OSError, SafetensorError) as error:
        if distributed.is_first():
            shutil.rmtree(aside, ignore_errors=True)
        raise _as_os_error(error, target) from error
    distributed.first(tidy, run_folder, keep)
    return target


def tidy(run_folder: Path, keep: int) -> None:
    """Drop all checkpoints but the newest `keep`, and what a process that was killed left unfinished."""
    for leftover in (run_folder / FOLDER).glob(f"*{ASIDE}"):
        shutil.rmtree(leftover, ignore_errors=True)
    for old in finished(run_folder)[:-keep]:
        remove_folder(old)


def size(model: Any) -> int:
    """Bytes that a checkpoint takes, about: weights and two moments."""
    return sum(3 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) + (1 << 16)


def newest_whole(
    run_folder: Path, run_id: str, config: Mapping[str, Any]
) -> tuple[Path | None, Progress | None, list[str]]:
    """The newest checkpoint whose every byte is as it was written, and its progress; None, None where there is none.

    Returns:
        Also one line on each newer checkpoint that is damaged.

    Raises:
        UsageError: it belongs to another run, or was saved with other settings.
    """
    problems: list[str] = []
    for checkpoint in reversed(finished(run_folder)):
        try:
            verify(checkpoint)
            progress = read_progress(checkpoint)
        except Damaged as error:
            problems.append(str(error))
            continue
        _check_same_run(checkpoint, progress, run_id, config)
        return checkpoint, progress, problems
    return None, None, problems


def verify(checkpoint: Path) -> None:
    """Compare every file with the manifest. Raises Damaged with the first that differs."""
    try:
        files = _read_json(checkpoint / MANIFEST)["files"]
        names = (
            dict.fromkeys([*files, STATE])
            if any(name.startswith("shard-") for name in files)
            else (MODEL, OPTIMIZER, STATE)
        )
        expected = {name: (files[name]["bytes"], files[name]["sha256"]) for name in names}
    except (KeyError, TypeError) as error:
        raise Damaged(f"{checkpoint} is damaged ({MANIFEST}: not a manifest)") from error
    for name, (length, digest) in expected.items():
        path = checkpoint / name
        try:
            found = path.stat().st_size
            if found != length:
                raise Damaged(f"{checkpoint} is damaged ({name}: {found} bytes, {length} were written)")
            if sha256(path) != digest:
                raise Damaged(f"{checkpoint} is damaged ({name}: other bytes than were written)")
        except FileNotFoundError as error:
            raise Damaged(f"{checkpoint} is damaged ({name} is missing)") from error
        except OSError as error:  # of the disk
            raise Damaged(f"{checkpoint} is damaged ({name}: {error.strerror})") from error


def read_progress(checkpoint: Path) -> Progress:
    """`state.json` of a checkpoint. Raises Damaged."""
    document = _read_json(checkpoint / STATE)
    try:
        progress = Progress(**{name: document[name] for name in Progress.__dataclass_fields__})
    except (KeyError, TypeError) as error:
        raise Damaged(f"{checkpoint} is damaged ({STATE}: {error} is missing)") from error
    if progress.step != number(checkpoint):
        raise Damaged(f"{checkpoint} is damaged ({STATE} says step {progress.step})")
    return progress


def load(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Restore `model` and `optimizer` in place, from a checkpoint that `verify` has found whole.

    Raises:
        UsageError: it does not fit them.
    """
    try:
        if distributed.size() == 1 and (checkpoint / MODEL).is_file():
            state = _optimizer_state(checkpoint)
            load_trained(model, checkpoint / MODEL)
        else:
            state = shards.read(checkpoint, model, optimizer)
        optimizer.load_state_dict({"state": state, "param_groups": _param_groups(checkpoint)})
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{checkpoint}: cannot be loaded into this model ({reason})") from error


def finished(run_folder: Path) -> list[Path]:
    """Checkpoints, whole or damaged, oldest first, in numeric order."""
    numbered = ((number(folder), folder) for folder in (run_folder / FOLDER).glob("step-*"))
    return [folder for _, folder in sorted((step, folder) for step, folder in numbered if step is not None)]


def number(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for other folders (`step-000003.tmp` was never finished)."""
    match = re.fullmatch(r"step-([0-9]+)", folder.name)
    return int(match[1]) if match else None


def set_aside(run_folder: Path, newer_than: int) -> None:
    """Rename the (damaged) checkpoints after step `newer_than`, so that they never count as one that is kept."""
    for checkpoint in finished(run_folder):
        if (number(checkpoint) or 0) > newer_than:
            names = (checkpoint.with_name(f"{checkpoint.name}.damaged{i or ''}") for i in range(1000))
            checkpoint.rename(next(name for name in names if not name.exists()))


def _write(folder: Path, progress: Progress, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if distributed.size() > 1:
        files = shards.write(folder, model, optimizer)
    else:
        files = {}
        tensors = {
            f"{index}.{name}": tensor.contiguous()
            for index, values in optimizer.state_dict()["state"].items()
            for name, tensor in values.items()
        }
        save_trained(model, folder / MODEL)
        save_file(tensors, str(folder / OPTIMIZER))
    distributed.first(_describe, folder, progress, optimizer.state_dict()["param_groups"], files)


def _describe(folder: Path, progress: Progress, param_groups: list[dict[str, Any]], files: dict[str, Any]) -> None:
    """The two files of JSON; `files` is what the manifest says of those whose digests are known already."""
    document = {"format": FORMAT, **progress.__dict__, "param_groups": param_groups}
    (folder / STATE).write_text(json.dumps(document, indent=1), encoding="utf-8")
    more = [path for path in sorted(folder.iterdir()) if path.name not in files]
    files = files | {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in more}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")


def _optimizer_state(checkpoint: Path) -> dict[int, dict[str, torch.Tensor]]:
    """By index of the parameter, as `optimizer.load_state_dict` takes it."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(str(checkpoint / OPTIMIZER)).items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    return state


def _param_groups(checkpoint: Path) -> list[dict[str, Any]]:
    groups = _read_json(checkpoint / STATE)["param_groups"]
    # JSON has no tuples.
    return [{key: tuple(v) if key == "betas" else v for key, v in group.items()} for group in groups]


def _check_same_run(checkpoint: Path, progress: Progress, run_id: str, config: Mapping[str, Any]) -> None:
    if progress.run_id != run_id:
        raise UsageError(f"--resume: {checkpoint} belongs to another run ({progress.run_id}, this one is {run_id})")
    for name, before, now in _differences(progress.config, config):
        raise UsageError(
            f"--resume: {checkpoint} was saved with {name} {before}, config.json says {now}; a resumed run keeps its "
            "settings"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(knob, before, now) where two flat configurations differ; JSON has no tuples."""
    plain = [json.loads(json.dumps(dict(values))) for values in (before, now)]
    for name in dict.fromkeys([*plain[0], *plain[1]]):
        if name != "resume" and plain[0].get(name) != plain[1].get(name):
            yield name, plain[0].get(name), plain[1].get(name)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise Damaged(f"{path.parent} is damaged ({path.name}: {reason})") from error


def _as_os_error(error: Exception, target: Path) -> OSError:
    """safetensors reports a full disk in words of its own: `... (os error 28)`."""
    if isinstance(error, OSError):
        return error
    match = re.search(r"os error (\d+)", str(error))
    return OSError(int(match[1]) if match else errno.EIO, str(error), str(target))
