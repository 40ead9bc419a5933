"""A stopped run goes on as if it had not been stopped: killed processes, signals, damaged files, full disks."""

import functools
import json
import multiprocessing
import os
import random
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo import checkpoint, model, reference, run, run_folder
from grpo.metrics import without_times
from grpo.rollout_record import Recorder
from grpo.trainer import Trainer
from tests import kill_and_resume
from tests.test_run import arguments, history, train_py

TINY = dict(
    model="tiny", recipe="tiny", beta=0.2, device="cpu", num_steps=4, prompts_per_step=2, num_generations=3,
    max_completion_len=48, eval_limit=1, save_every=2, learning_rate=1e-3, warmup_steps=1, num_iterations=2,
)  # fmt: skip


def start(folder, **changes):
    return train_py(arguments("tiny", folder, **TINY | changes))


def resume(folder, *more):
    return train_py(["--resume", str(folder), *more])


def weights(folder):
    return (folder / "final" / "model.safetensors").read_bytes()


def stopping_at(patch, step, action):
    """Call `action` when the rollouts of step number `step` are recorded and its update has not begun."""
    original = Recorder.save

    def save(self, number, groups):
        original(self, number, groups)
        if number == step:
            action()

    patch.setattr(Recorder, "save", save)


def killed(*args):
    raise KeyboardInterrupt


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Models are loaded once and copied, and no plots are drawn: most of a short run's time."""
    loaded = functools.cache(model.load_policy)
    with pytest.MonkeyPatch.context() as patch:
        for module in (run, reference):
            patch.setattr(module, "load_policy", lambda settings: deepcopy(loaded(settings)))
        patch.setattr(run.plots, "plot_run", lambda *args: None)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert start(folder) == 0
    assert len({json.dumps(row["reward"]) for row in history(folder)}) > 1  # it does something
    return folder


@pytest.fixture(scope="module")
def stopped(finished, tmp_path_factory):
    """Killed in step 4, between rollouts and update; checkpoint of step 2, log of 3 steps, rollouts of 1 to 4."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        stopping_at(patch, 4, killed)
        assert start(folder) == 130
    assert len(history(folder)) == 3 and not (folder / "final").exists()
    assert len(list((folder / "rollouts").iterdir())) == 4
    return folder


@pytest.fixture
def copy(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def same(folder, finished):
    return without_times(history(folder)) == without_times(history(finished)) and weights(folder) == weights(finished)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# ------------------------------------------------------------------------------------------------ killed processes


class Child:
    """`train.py ARGS` in a process of its own, forked from one that has imported everything: quicker than Popen."""

    def __init__(self, args, output):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["grpo.run"])
        self.process = context.Process(target=train_in_child, args=(args, str(output)))
        self.process.start()

    def kill(self):
        self.process.kill()

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()
        return self.process.exitcode


def train_in_child(args, output):
    from grpo.console import run_entry

    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    run.plots.plot_run = lambda *args: None
    run_entry(lambda: run.start(args))
    sys.stdout.flush()


def test_killed_processes_end_with_the_same_log_and_the_same_weights(tmp_path):
    """The short form of `tests/kill_and_resume.py`."""
    flags = [*kill_and_resume.FLAGS, "--num-iterations", "2"]
    alone = kill_and_resume.Run(tmp_path / "alone", flags, Child)
    alone.start()
    alone.finish()
    each = kill_and_resume.Run(tmp_path / "run", flags, Child)
    kills = kill_and_resume.survive(each, ["rollout", "update", "checkpoint", "final model"], random.Random(0))
    assert sum(kills.values()) == 4
    assert kill_and_resume.differences(each.folder, alone.folder) == []


def test_the_comparison_sees_a_difference(finished, tmp_path):
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    assert kill_and_resume.differences(other, finished) == []
    rows = history(other)
    (other / "log_history.json").write_text(json.dumps([*rows[:-1], rows[-1] | {"kl": rows[-1]["kl"] * (1 + 1e-15)}]))
    path = other / "final" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert kill_and_resume.differences(other, finished) == ["log_history.json", "final/model.safetensors"]


# -------------------------------------------------------------------------------------------- what a run goes on from


def test_recorded_rollouts_are_trained_on_and_not_sampled_again(copy, finished, monkeypatch):
    sampled = []
    original = Trainer.sample_groups
    monkeypatch.setattr(Trainer, "sample_groups", lambda self, step: sampled.append(step) or original(self, step))
    assert resume(copy) == 0
    assert sampled == [] and same(copy, finished)


def forget_rollouts(folder):
    """All that were recorded but those of the newest checkpoint's own step: the sampler guesses from them."""
    kept = Recorder(folder).path(checkpoint.number(checkpoint.finished(folder)[-1]))
    assert kept.exists()
    for path in kept.parent.iterdir():
        if path != kept:
            path.unlink()


def test_nothing_depends_on_global_random_generators(copy, finished):
    forget_rollouts(copy)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    assert resume(copy) == 0
    assert same(copy, finished)


def test_without_a_checkpoint_a_run_starts_at_its_base(copy, finished):
    shutil.rmtree(copy / "checkpoints")
    assert resume(copy) == 0
    assert same(copy, finished)


def test_but_not_where_that_would_throw_steps_away(copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    (copy / "rollouts" / "step-000001.json.gz").unlink()
    before = (copy / "log_history.json").read_bytes()
    assert resume(copy) == 2
    error = capsys.readouterr().err
    assert "no checkpoint to continue from" in error and "no rollouts of step 1" in error and error.count("\n") == 1
    assert (copy / "log_history.json").read_bytes() == before


@pytest.mark.parametrize("harm", ["cut", "other run"])
def test_a_damaged_record_is_named_and_its_step_sampled_again(copy, finished, capsys, harm):
    path = copy / "rollouts" / "step-000003.json.gz"
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        shutil.copy(path.with_name("step-000004.json.gz"), path)
    assert resume(copy) == 0
    assert f"{path}: " in capsys.readouterr().err and same(copy, finished)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(finished, tmp_path, capsys):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    damaged = copy / "checkpoints" / "step-000004" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    shutil.rmtree(copy / "final")
    assert resume(copy) == 0
    error = capsys.readouterr().err
    assert "step-000004 is damaged (optimizer.safetensors" in error and "going on from step 2" in error
    assert same(copy, finished) and (copy / "checkpoints" / "step-000004.damaged").is_dir()
    assert checkpoint.newest_whole(copy, *run_identity(copy))[1].step == 4


def test_where_all_checkpoints_are_damaged_each_is_named_and_nothing_is_written(finished, tmp_path, capsys):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in copy.glob("checkpoints/*/state.json"):
        path.write_text("{")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert resume(copy) == 2
    error = capsys.readouterr().err
    assert "step-000002 is damaged" in error and "step-000004 is damaged" in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_kill_before_the_last_checkpoint_is_tidied_up_leaves_nothing_behind(copy, finished, monkeypatch):
    def dies(self):
        if len(self.history.rows) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.Saver, "tidy", dies)
        assert resume(copy) == 130
    (copy / "checkpoints" / "step-000001.old.tmp").mkdir()
    assert resume(copy) == 0
    assert names(copy) == names(finished) and same(copy, finished)


def run_identity(folder):
    document = run_folder.stored(folder)
    return document["run_id"], document["config"]


def edit_json(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("harm", "names"),
    [
        (lambda f: edit_json(f / "config.json", lambda d: d["config"].update(beta=0.3)), ("beta 0.2", "0.3")),
        (lambda f: edit_json(f / "config.json", lambda d: d.update(run_id="x")), ("belongs to another run",)),
        (lambda f: edit_json(f / "config.json", lambda d: d.pop("run_id")), ("config.json", "run_id")),
        (lambda f: edit_json(f / "log_history.json", lambda d: d.pop(0)), ("log_history.json", '"rows": 1')),
        (lambda f: edit_json(f / "log_history.json", lambda d: d[1].update(num_tokens=7)), ('"num_tokens": 7',)),
        (lambda f: (f / "log_history.json").unlink(), ("log_history.json", '"rows": 0')),
        (lambda f: (f / "log_history.json").write_text("[1"), ("log_history.json", "not a log history")),
        (lambda f: (f / "eval_before.json").write_text("{"), ("eval_before.json", "not JSON", "remove it")),
        (lambda f: (f / "eval_before.json").write_text("{}"), ("eval_before.json", "not an evaluation report")),
        (lambda f: edit_json(f / "eval_before.json", lambda d: d.update(rubric="gated")), ("eval_before", "gated")),
        (lambda f: edit_json(f / "eval_before.json", lambda d: d["scenarios"].update(sha256="0")),
         ("eval_before.json", "other scenarios")),
    ],
)  # fmt: skip
def test_what_is_not_this_run_s_is_refused_by_name_and_left_alone(copy, capsys, monkeypatch, harm, names):
    harm(copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    monkeypatch.setattr(Trainer, "step", killed)
    assert resume(copy) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in names) and error.count("\n") == 1, error
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_damaged_evaluations_are_found_before_a_model_is_loaded(copy, monkeypatch):
    monkeypatch.setattr(run, "load_policy", killed)
    (copy / "eval_before.json").write_text("{")
    assert resume(copy) == 2


def test_a_schedule_that_another_version_computes_is_refused(copy, capsys, monkeypatch):
    monkeypatch.setattr("grpo.trainer.learning_rate", lambda step, config: 1.0)
    assert resume(copy) == 2
    assert "learning_rate 1.0" in capsys.readouterr().err


def test_a_missing_first_evaluation_is_made_with_the_base_not_with_the_trained_policy(copy, finished):
    (copy / "eval_before.json").unlink()
    assert resume(copy) == 0
    first, again = (json.loads((folder / "eval_before.json").read_text()) for folder in (finished, copy))
    assert first == again


def test_one_process_at_a_time(copy, capsys):
    with run_folder.locked(copy, "--resume"):
        assert resume(copy) == 2
    assert "another process is at work on this run" in capsys.readouterr().err


def test_a_start_that_was_killed_before_its_config_was_written_can_be_repeated(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.tmp").write_text("{")
    assert start(tmp_path / "run", num_steps=1, eval_limit=0) == 0


def test_a_resume_with_other_threads_says_that_it_is_not_bit_for_bit(copy, capsys):
    edit_json(copy / "config.json", lambda document: document["machine"].update(threads=64))
    assert resume(copy) == 0
    assert "warning: threads 64 -> " in capsys.readouterr().err


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(finished, tmp_path):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    assert resume(copy) == 0
    assert same(copy, finished) and len(history(copy)) == 4
