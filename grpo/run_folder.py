"""A run's folder: where it is, what identifies it, and that nothing of another run is ever overwritten.

config.json              every knob and the versions of what computed it
log_history.json         one object per step
completions/             readable episodes with rewards, per step
eval_before.json, eval_after.json
checkpoints/             for --resume
rollouts/                what was sampled since the oldest checkpoint, for --resume and `python -m grpo.replay`
final/                   the trained model: transformers loads it, tokenizer and chat template included; its card
plots/
wandb/, tensorboard/     with --report-to
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grpo import hints
from grpo.config import Config, RunStopped, UsageError, validate
from grpo.files import ASIDE, lock, write_atomic
from grpo.metrics import dumps

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba")


def choose(config: Config) -> Path:
    """The folder of a new run: `--output-dir`, or a free name under `runs/`. Nothing is created.

    Raises:
        UsageError: `--output-dir` already holds a run, or something that is not a run, or cannot be written.
    """
    try:
        return _choose(config)
    except OSError as error:
        raise UsageError(f"--output-dir {config.run.output_dir}: {error.strerror}") from error


def _choose(config: Config) -> Path:
    if config.run.output_dir:
        folder = Path(config.run.output_dir)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--output-dir {folder}: is a file; give a folder")
        # A start that was killed leaves what was never finished, and nothing else.
        if folder.is_dir() and not all(path.name.endswith(ASIDE) for path in folder.iterdir()):
            what = "holds another run" if (folder / "config.json").exists() else "is not empty"
            raise UsageError(f"--output-dir {folder}: {what}; give a new folder, or --resume to continue a run")
    else:
        model = Path(config.model.model).name
        name = f"{model}-beta{config.loss.beta:g}-seed{config.run.seed}"
        tries = [name] + [f"{name}-{i}" for i in range(2, 10_000)]
        folder = next(Path("runs") / tried for tried in tries if not (Path("runs") / tried).exists())
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    probe = existing / f".{secrets.token_hex(8)}{ASIDE}"
    try:  # permissions alone do not tell: not everything that looks like a folder takes one
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise UsageError(f"--output-dir {folder}: cannot write in {existing} ({error.strerror})") from error
    return folder


def create(folder: Path, config: Config, base: str, machine: dict[str, Any]) -> None:
    """Make a run of `folder`, which is there and locked: write `config.json`.

    Args:
        base: the fingerprint of the model that training starts from.
        machine: what the same numbers depend on besides the settings: device, type, threads.
    """
    document = {
        "run_id": secrets.token_hex(8),
        "config": config.flat(),
        "base_sha256": base,
        "machine": machine,
        "versions": versions(),
    }
    try:
        if (folder / "config.json").exists():  # another process was faster
            raise UsageError(f"--output-dir {folder}: holds another run; give a new folder")
        write_json(folder / "config.json", document)
    except OSError as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}") from error


@contextlib.contextmanager
def locked(folder: Path, flag: str) -> Iterator[None]:
    """Hold the run for this process; a killed process lets go of it by itself.

    Raises:
        UsageError: another process holds it, or it cannot be opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{flag} {folder}: {error.strerror}") from error
    try:
        if not lock(descriptor):
            raise UsageError(f"{flag} {folder}: another process is at work on this run")
        yield
    finally:
        os.close(descriptor)


def require_writable(folder: Path) -> None:
    """Raises UsageError where a run could not be continued because its folder takes no new file."""
    probe = folder / f".writable{ASIDE}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--resume {folder}: cannot write there ({error.strerror})") from error


def require_space(folder: Path, needed: int, what: str, flag: str) -> None:
    """Raises UsageError where fewer than `needed` bytes are free: better now than at the first checkpoint."""
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UsageError(f"{flag} {folder}: {megabytes(free)} free, {megabytes(needed)} needed ({what})")


@contextlib.contextmanager
def writing(folder: Path, step: int) -> Iterator[None]:
    """An error of the disk inside (full, gone) stops the run with one line; what was saved before stays as it is."""
    try:
        yield
    except BrokenPipeError:  # nobody reads standard output on: no fault of the disk
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunStopped(
            f"step {step}: cannot write {getattr(error, 'filename', None) or folder} ({reason}); what was saved before "
            f"is intact. Then: python train.py --resume {folder}"
        ) from error


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def check_base(folder: Path, base: str) -> None:
    """Raises UsageError where the model that `config.json` names is not the one this run started from any more."""
    if stored(folder).get("base_sha256") != base:
        raise UsageError(f"--resume {folder}: the base model has changed since this run started; restore it to go on")


def changed_machine(folder: Path, machine: dict[str, Any]) -> list[str]:
    """What differs from the machine and versions that the run was started with: it goes on, but not bit for bit."""
    document = stored(folder)
    before = {**document.get("versions", {}), **document.get("machine", {})}
    now = {**versions(), **machine}
    return [f"{name} {before[name]} -> {now[name]}" for name in now if name in before and before[name] != now[name]]


def stored(folder: Path) -> dict[str, Any]:
    """`config.json` of a run. Raises UsageError where `folder` holds none, or a damaged one."""
    path = folder / "config.json"
    if not hints.is_run(folder) and (hint := hints.run(folder)):
        raise UsageError(f"--resume {folder}: is not the folder of a run{hint}")
    if not path.is_file():
        raise UsageError(f"--resume {folder}: holds no run (no config.json)")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document["config"], dict):
            raise ValueError("config: not an object")
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise UsageError(f"{path}: damaged, or of another version ({error})") from error
    return document


def stored_config(folder: Path) -> Config:
    """The configuration a run was started with. Raises UsageError where `folder` holds no run."""
    path, values = folder / "config.json", stored(folder)["config"]
    try:
        # JSON has no tuples.
        config = Config().with_values({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        if set(values) != set(config.flat()):
            raise KeyError(sorted(set(config.flat()) ^ set(values))[0])
        validate(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: damaged, or of another version ({error})") from error
    return config


def versions() -> dict[str, str]:
    """Versions of Python, the machine and the packages that compute."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_json(path: Path, document: object) -> None:
    """Strict JSON, complete or not at all."""
    write_atomic(path, dumps(document, indent=1) + "\n")
