"""A step that is not finite or breaks an invariant: dumped, said in one line, and in the end it stops the run."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, load_model

from grpo import checkpoint, guard, replay, rollout, rollout_record, trainer
from grpo.invariants import BrokenInvariant
from tests.test_run import arguments, train_py
from tests.test_trainer import make, spread_rewards


@pytest.fixture(autouse=True)
def rewards_with_spread(monkeypatch):
    original = trainer.Trainer.sample_groups
    monkeypatch.setattr(trainer.Trainer, "sample_groups", lambda self, step: spread_rewards(original(self, step)))


@pytest.fixture
def poison(monkeypatch):
    """Makes the loss of chosen steps (from 1) NaN."""
    original, update = trainer.policy_loss, trainer.Trainer.update

    def choose(*steps):
        def counted(self, step, *args):
            with pytest.MonkeyPatch.context() as patch:
                if step + 1 in steps:
                    patch.setattr(trainer, "policy_loss", lambda *a, **k: nan(*original(*a, **k)))
                return update(self, step, *args)

        monkeypatch.setattr(trainer.Trainer, "update", counted)

    def nan(loss, *rest):
        return loss * math.nan, *rest

    return choose


def flags(model, run_folder, **changes):
    values = dict(num_steps=5, eval_limit=0, num_iterations=1, save_every=1, keep_checkpoints=9) | changes
    return arguments(model, run_folder, **values)


def log(folder):
    return json.loads((folder / "log_history.json").read_text())


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a) and set(a) == set(b)


def test_a_step_that_is_not_finite_is_dropped_and_dumped_and_the_run_goes_on(folder, tmp_path, capsys, poison):
    poison(2, 3)
    run = tmp_path / "run"
    assert train_py(flags(folder, run)) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "dropped" in line]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 3"]
    assert str(run / "dumps" / "step_00002.json.gz") in lines[0] and "loss not finite" in lines[0]
    assert [row["skipped_updates"] for row in log(run)] == [0, 1, 1, 0, 0] and log(run)[1]["loss"] is None

    checkpoints = [weights(run / "checkpoints" / f"step-{n:06d}") for n in range(1, 6)]
    assert equal(checkpoints[0], checkpoints[1]) and equal(checkpoints[0], checkpoints[2])  # dropped
    assert not equal(checkpoints[2], checkpoints[3])  # and on it goes

    record = rollout_record.load(run / "dumps" / "step_00003.json.gz")
    stored = json.loads((run / "config.json").read_text())
    assert record.about["step"] == 3 and "not finite" in record.about["reason"]
    assert record.about["config"] == stored["config"] and record.about["run_id"] == stored["run_id"]
    assert record.about["weights"] == "weights_step_00002.safetensors"  # the streak has left them alone
    assert equal(load_file(run / "dumps" / record.about["weights"]), checkpoints[1])
    row = json.loads((run / "completions" / "step_00003.jsonl").read_text().splitlines()[0])
    assert row["reward"] == record.groups[0].episodes[0].reward
    assert len(list((run / "dumps").iterdir())) == 3


def test_a_dump_holds_what_the_step_was_made_from(folder, tmp_path, poison):
    """Its rollouts and weights, without the fault, give bit for bit what the run would have logged."""
    poison(2)
    run = tmp_path / "run"
    assert train_py(flags(folder, run, num_steps=2, beta=0)) == 0
    poison()
    assert train_py(flags(folder, tmp_path / "good", num_steps=2, beta=0)) == 0
    record = rollout_record.load(run / "dumps" / "step_00002.json.gz")
    again = make(folder, **record.about["config"])
    load_model(again.policy.model, str(run / "dumps" / record.about["weights"]))
    losses = again.step(1, groups=record.groups).losses
    expected = log(tmp_path / "good")[1]
    assert {name: losses[name] for name in losses} == {name: expected[name] for name in losses}
    assert losses["grad_norm"] > 0 and losses["skipped_updates"] == 0


def test_with_adapters_a_dump_holds_those_alone(tmp_path, monkeypatch, poison):
    pytest.importorskip("peft", reason="peft is not installed (the `lora` extra)")
    monkeypatch.undo()  # on this model the first token is always the same
    rewards = itertools.count()
    monkeypatch.setattr(trainer.Trainer, "reward", lambda self, record: float(next(rewards)))
    poison(2)
    run = tmp_path / "run"
    assert train_py(flags("tiny", run, num_steps=2, lora_rank=2, max_completion_len=60, warmup_steps=0)) == 0
    stored = load_file(run / "dumps" / "weights_step_00002.safetensors")
    assert stored and all(".lora_" in name for name in stored)
    assert equal(stored, weights(run / "checkpoints" / "step-000001"))
    poison()
    again = replay.replay(run / "dumps" / "step_00002.json.gz")
    assert again.losses["kl"] > 1e-6 and not again.not_finite  # moved from the base, without the fault


def test_a_run_that_only_drops_steps_stops(folder, tmp_path, capsys, monkeypatch, poison):
    poison(2, 3, 4)
    run = tmp_path / "run"
    monkeypatch.setattr(guard, "MAX_BAD_STEPS", 2)
    assert train_py(flags(folder, run, save_every=0)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: 2 steps in a row") and str(run / "dumps") in error
    assert len(log(run)) == 3 and checkpoint.finished(run)[-1].name == "step-000003"  # nothing is lost

    # Resumed behind them: step 4 is the third bad one in a row, as it would have been.
    assert train_py(["--resume", str(run)]) == 1
    assert "3 steps in a row" in capsys.readouterr().err
    poison()
    assert train_py(["--resume", str(run)]) == 0
    assert [row["skipped_updates"] for row in log(run)] == [0, 1, 1, 1, 0] and (run / "final").is_dir()


def test_a_broken_invariant_stops_the_run_and_names_episode_and_dump(folder, tmp_path, monkeypatch):
    original = rollout.Player._extend
    monkeypatch.setattr(
        rollout.Player, "_extend", lambda self, ids, mask, logprobs: original(self, ids[:-1], mask, logprobs[:-1])
    )
    run = tmp_path / "run"
    with pytest.raises(
        BrokenInvariant, match=r"step 1: group 0 .*, member 0: .* sampled in length.*step_00001.json.gz"
    ):
        train_py(flags(folder, run))
    assert log(run) == []
    record = rollout_record.load(run / "dumps" / "step_00001.json.gz")
    assert len(record.groups) == 2 and "member 0" in record.about["reason"]


def test_a_dump_that_cannot_be_written_costs_the_dump_alone(folder, tmp_path, capsys, monkeypatch, poison):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    poison(2)
    monkeypatch.setattr(guard, "save_trained", full)
    assert train_py(flags(folder, tmp_path / "run", num_steps=3)) == 0
    assert "step 2: update dropped" in (error := capsys.readouterr().err) and "No space left" in error
    assert len(log(tmp_path / "run")) == 3


def test_only_the_newest_weights_of_dumps_are_kept(folder, tmp_path, poison):
    poison(1, 3, 5)
    run = tmp_path / "run"
    assert train_py(flags(folder, run, keep_checkpoints=2)) == 0
    names = sorted(path.name for path in (run / "dumps").iterdir())
    assert names == ["step_00001.json.gz", "step_00003.json.gz", "step_00005.json.gz",
                     "weights_step_00003.safetensors", "weights_step_00005.safetensors"]  # fmt: skip


def test_an_alarm_is_one_line_on_stderr(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()  # the toy's own rewards: always the same
    monkeypatch.setattr("grpo.invariants.STREAK", 3)
    assert train_py(flags(folder, tmp_path / "run", save_every=0, beta=0, max_completion_len=6)) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "steps 1 to 3: no group's rewards differ" in warnings[0]


def test_cautions_are_shown_at_the_start(folder, tmp_path, capsys):
    assert train_py(flags(folder, tmp_path / "run", num_steps=1, top_p=0.9)) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert "--top-p 0.9" in line
