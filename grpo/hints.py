"""What may have been meant by a path or a name that is nearly right: half a sentence to end an error with, or none. And
what a model is called."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a training run. A model's folder has a config.json as well."""
    try:
        return "run_id" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def run_around(path: Path) -> Path | None:
    """The run that `path` is, or lies in."""
    return next((folder for folder in (path, *path.parents) if is_run(folder)), None)


def model(name: str) -> str:
    """For something that is no model: a run, what lies in one, or a name."""
    path = Path(name)
    if (path / "adapter_config.json").is_file() and (path.parent / "config.json").is_file():
        return f"; did you mean {path.parent}, where the adapters are merged?"
    if (run := run_around(path)) is None:
        return "" if path.exists() else did_you_mean(name, ["tiny"])
    final = run / "final"
    if (final / "config.json").is_file():
        return f"; did you mean {final}?"
    return f"; the run {run} has no trained model yet: python train.py --resume {run}"


def run(path: Path) -> str:
    """For something that is no run: what lies in one."""
    found = run_around(path)
    return "" if found is None else f"; did you mean {found}?"


def record(path: Path) -> str:
    """For something that is no rollout record: a run, its folder of records, or a step that has none any more."""
    found = run_around(path)
    folders = [path, path.parent] + ([found / "rollouts"] if found else [])
    records = [file for folder in folders for file in sorted(folder.glob("step[-_]*.json.gz"))]
    return f"; did you mean {records[-1]}?" if records else ""


def evaluation(path: Path) -> str:
    """For something that is no evaluation: a run, or what lies in one."""
    found = run_around(path)
    file = found and found / "eval_after.json"
    return f"; did you mean {file}?" if file and file.is_file() else ""


def model_name(model: str) -> str:
    """`runs/beta0.2/final` -> beta0.2: every run's model lies in a folder called final."""
    path = Path(model)
    return path.parent.name if path.name == "final" and path.parent.name else path.name
