"""Signals, full disks and folders that cannot be written: one line, an exit code, and nothing that is lost."""

# ruff: noqa: F811 (fixtures are imported, and arguments bear their names)

import errno
import resource
import shutil
import signal
from pathlib import Path

import pytest

from grpo import checkpoint, run, saver, trainer
from grpo.metrics import without_times
from grpo.rollout_record import Recorder
from tests.test_resume import (  # noqa: F401 (fixtures among them)
    copy,
    finished,
    forget_rollouts,
    history,
    quick,
    resume,
    same,
    start,
    stopped,
    stopping_at,
    weights,
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(finished, tmp_path, monkeypatch, number, code):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stopping_at(patch, 1, lambda: signal.raise_signal(number))
        assert start(folder) == code
    assert len(history(folder)) == 1 and [path.name for path in checkpoint.finished(folder)] == ["step-000001"]
    assert resume(folder) == 0
    assert without_times(history(folder)) == without_times(history(finished)) and weights(folder) == weights(finished)


def test_a_signal_in_the_last_step_counts_too(copy, finished, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(saver, "position", lambda *args: signal.raise_signal(signal.SIGTERM) or trainer.position(*args))
        assert resume(copy) == 143
    assert len(history(copy)) == 4 and not (copy / "final").exists()
    assert resume(copy) == 0 and same(copy, finished)


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_stops_at_once(finished, tmp_path, monkeypatch, second, code):
    folder = tmp_path / "run"

    def twice():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(second)

    with monkeypatch.context() as patch:
        stopping_at(patch, 1, twice)
        assert start(folder) == code
    assert history(folder) == [] and checkpoint.finished(folder) == []
    assert resume(folder) == 0 and same(folder, finished)


def test_a_signal_outside_the_steps_stops_at_once(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(run.evaluate, "evaluate_model", lambda *a, **k: signal.raise_signal(signal.SIGTERM))
        assert start(folder) == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


FULL = OSError(errno.ENOSPC, "No space left on device", "somewhere")


def full(*args, **kwargs):
    raise FULL


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Recorder, "save"), (run.LogHistory, "append"), (saver, "write_completions"), (run, "save_final")],
)
def test_a_full_disk_stops_the_run_in_one_line_and_a_resumed_one_loses_nothing(
    copy, finished, capsys, monkeypatch, owner, name
):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        if owner is Recorder:
            forget_rollouts(copy)
        assert resume(copy) == 1
    error = capsys.readouterr().err.strip()
    assert "cannot write somewhere (No space left on device)" in error and f"--resume {copy}" in error
    assert "Traceback" not in error and error.count("\n") == 0
    assert resume(copy) == 0
    assert same(copy, finished)


def test_a_file_system_that_takes_no_file_as_large_as_a_checkpoint(copy, finished, capsys):
    """The error that safetensors itself meets: the process may write files of at most 1 MB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, hard))
    try:
        assert resume(copy) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: step 4: cannot write ") and "File too large" in error and error.count("\n") == 0
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["step-000002"]
    assert resume(copy) == 0
    assert same(copy, finished)


def test_a_disk_without_room_for_the_checkpoints_is_refused_at_the_start(copy, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000_000))
    assert start(tmp_path / "new") == 2
    error = capsys.readouterr().err
    assert "20.0 MB free" in error and "--keep-checkpoints" in error and not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    assert resume(copy) == 2
    assert f"--resume {copy}: 10.0 MB free" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000_000))
    assert start(tmp_path / "one", keep_checkpoints=1, save_every=0) == 0  # room enough for its only checkpoint


def test_a_disk_that_fills_up_is_announced_before_a_checkpoint_fails(copy, capsys, monkeypatch):
    usage = shutil.disk_usage(copy)
    calls = []
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: calls.append(path) or usage._replace(free=10**9 if len(calls) < 2 else 10**6)
    )
    assert resume(copy) == 0
    error = capsys.readouterr().err
    assert error.count("nearly full: 1.0 MB free") == 1


def test_an_unwritable_folder_is_refused_at_the_start(copy, capsys, monkeypatch):
    original = Path.write_bytes

    def refuse(self, content):
        if self.name.startswith(".writable"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(self, content)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert resume(copy) == 2
    assert f"--resume {copy}: cannot write there (Permission denied)" in capsys.readouterr().err
