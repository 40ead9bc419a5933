"""Paths and names that are nearly right: the error says what was perhaps meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo import compare, hints, replay, run_folder
from grpo.config import Config, UsageError
from grpo.model import source_of


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """The skeleton of a finished run, by its relative path."""
    monkeypatch.chdir(tmp_path)
    for folder in ("final/adapter", "checkpoints/step-000002", "rollouts"):
        (Path("run") / folder).mkdir(parents=True)
    Path("run/config.json").write_text(json.dumps({"run_id": "x", "config": {}}))
    Path("run/final/config.json").write_text('{"model_type": "qwen3"}')
    Path("run/final/adapter/adapter_config.json").write_text("{}")
    Path("run/eval_after.json").write_text("{}")
    for step in (1, 2):
        Path(f"run/rollouts/step-00000{step}.json.gz").write_text("")
    return Path("run")


def refused(function, *args) -> str:
    with pytest.raises(UsageError) as error:
        function(*args)
    return str(error.value)


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-000002", "rollouts", "config.json"])
def test_a_model_inside_a_run(run, name):
    assert refused(source_of, str(run / name)).endswith("; did you mean run/final?")


def test_models_that_are_nearly_there(run):
    assert source_of("run/final") == "run/final"
    assert refused(source_of, "run/final/adapter").endswith("did you mean run/final, where the adapters are merged?")
    assert refused(source_of, "./nowhere").endswith("hub id (owner/name)")
    assert refused(source_of, "tny").endswith("; did you mean tiny?")
    (run / "final/config.json").unlink()
    assert refused(source_of, "run").endswith("no trained model yet: python train.py --resume run")


@pytest.mark.parametrize("name", ["final", "checkpoints", "checkpoints/step-000002", "config.json", "nowhere"])
def test_what_to_resume(run, name):
    line = refused(run_folder.stored, run / name)
    assert line == f"--resume run/{name}: is not the folder of a run; did you mean run?"


def test_what_is_no_run_stays_so(tmp_path):
    assert refused(run_folder.stored, tmp_path) == f"--resume {tmp_path}: holds no run (no config.json)"


@pytest.mark.parametrize("name", ["", "rollouts", "final", "rollouts/step-000009.json.gz"])
def test_which_record_to_replay(run, name):
    assert refused(replay.replay, run / name).endswith("; did you mean run/rollouts/step-000002.json.gz?")


def test_no_record_to_replay(tmp_path):
    assert refused(replay.replay, tmp_path / "x") == f"{tmp_path / 'x'}: No such file or directory"


def test_which_evaluation_to_compare(run):
    assert refused(compare.load_report, "run") == "--compare run: Is a directory; did you mean run/eval_after.json?"
    (run / "eval_after.json").unlink()
    assert refused(compare.load_report, "run") == "--compare run: Is a directory"


MEANT = {"askall": "ask-all", "ASK_ALL": "ask-all", "rndom": "random", "tny": "tiny"}


@pytest.mark.parametrize("name, meant", MEANT.items())
def test_scripted_policies(run_eval, name, meant):
    code, out, err = run_eval("--model", name)
    assert (code, out) == (2, "")
    assert err == f"error: --model {name}: no such model or scripted policy; did you mean {meant}?\n"


def test_names_unlike_any_are_left_alone():
    assert hints.did_you_mean("gpt-5", ["tiny", "guess"]) == ""


def test_a_folder_that_takes_nothing_is_not_called_full():
    if Path("/proc/self").exists():
        line = refused(run_folder.choose, Config().with_values({"output_dir": "/proc/x"}))
        assert line.startswith("--output-dir /proc/x: cannot write in /proc (") and "free" not in line


def test_choosing_a_folder_leaves_nothing(tmp_path):
    assert run_folder.choose(Config().with_values({"output_dir": str(tmp_path / "a/b")})) == tmp_path / "a/b"
    assert not list(tmp_path.iterdir())
