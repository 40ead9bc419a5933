"""A run's folder: where it is, what identifies it, and that nothing of another run is ever overwritten.

    config.json              every knob and the versions of what computed it
    log_history.json         one object per step
    completions/             readable episodes with rewards, per step
    eval_before.json, eval_after.json
    checkpoints/             for --resume
    final/                   the trained model: transformers loads it, tokenizer and chat template included
    plots/
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo.config import Config, UsageError, validate
from grpo.metrics import dumps, write_atomic

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


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
        if folder.is_dir() and any(folder.iterdir()):
            what = "holds another run" if (folder / "config.json").exists() else "is not empty"
            raise UsageError(f"--output-dir {folder}: {what}; give a new folder, or --resume to continue a run")
    else:
        model = Path(config.model.model).name
        name = f"{model}-beta{config.loss.beta:g}-seed{config.run.seed}"
        tries = [name] + [f"{name}-{i}" for i in range(2, 10_000)]
        folder = next(Path("runs") / tried for tried in tries if not (Path("runs") / tried).exists())
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(f"--output-dir {folder}: cannot write in {existing}")
    return folder


def create(folder: Path, config: Config, base: str) -> None:
    """Make the folder and write `config.json`. `base` is the fingerprint of the model that training starts from."""
    document = {"config": config.flat(), "base_sha256": base, "versions": versions()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", document)
    except OSError as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}") from error


def check_base(folder: Path, base: str) -> None:
    """Raises UsageError where the model that `config.json` names is not the one this run started from any more."""
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("base_sha256") != base:
        raise UsageError(f"--resume {folder}: the base model has changed since this run started; restore it to go on")


def stored_config(folder: Path) -> Config:
    """The configuration a run was started with. Raises UsageError where `folder` holds no run."""
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"--resume {folder}: holds no run (no config.json)")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["config"]
        # JSON has no tuples.
        config = Config().with_values({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        if set(values) != set(config.flat()):
            raise KeyError(sorted(set(config.flat()) ^ set(values))[0])
        validate(config)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
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
