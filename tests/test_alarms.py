"""What the alarms say of a log, and when: no signal, a constant reward, a sampler that differs from its trainer."""

import dataclasses

import pytest
import torch

from grpo import invariants, trainer
from grpo.config import Config, parse
from grpo.invariants import alarms, bad_steps
from tests.test_trainer import make


def row(step, **values):
    return {"step": step, "reward": 0.1 * step, "frac_reward_zero_std": 0.5, "skipped_updates": 0.0,
            "completions/clipped_ratio": 0.5, "sampler_gap/mean": 1e-6} | values  # fmt: skip


def said(rows, gap=1e-3, **values):
    """The lines after each step of the log, by step."""
    config = Config().with_values(values)
    lines = {len(rows[:n]): alarms(rows[:n], config, gap) for n in range(1, len(rows) + 1)}
    return {step: found for step, found in lines.items() if found}


def test_no_alarm_in_a_run_that_learns():
    rows = [row(n, frac_reward_zero_std=float(n % 10 != 0)) for n in range(1, 41)]
    assert said(rows) == {}


def test_a_streak_without_signal_is_one_line_and_a_second_streak_another():
    flat = dict(frac_reward_zero_std=1.0)
    rows = [row(1)] + [row(n, **flat) for n in range(2, 31)] + [row(31)] + [row(n, **flat) for n in range(32, 60)]
    found = said(rows)
    assert list(found) == [11, 41] and all(len(lines) == 1 for lines in found.values())
    assert found[11] == ["steps 2 to 11: no group's rewards differ, so there is nothing to learn from"]
    assert said(rows, beta=0.1)[11] == [found[11][0] + "; the KL term still pulls towards the base"]


def test_steps_of_masked_episodes_alone_are_without_signal():
    rows = [row(n, **{"completions/clipped_ratio": 1.0}) for n in range(1, 20)]
    assert said(rows) == {}
    (line,) = said(rows, mask_truncated=True)[10]
    assert "all episodes are truncated, and masked" in line


def test_with_dynamic_sampling_a_step_counts_for_all_its_rounds():
    rows = [row(n, frac_reward_zero_std=1.0) for n in range(1, 20)]
    (line,) = said(rows, dynamic_sampling=4)[2]  # two steps of five rounds
    assert "in 5 rounds of sampling each" in line
    assert list(said(rows, dynamic_sampling=4)) == [2]
    assert list(said(rows, dynamic_sampling=20)) == [1]


def test_a_reward_that_never_changes_is_one_line():
    rows = [row(n, reward=-0.1) for n in range(1, 30)]
    found = said(rows)
    assert list(found) == [10] and found[10] == ["steps 1 to 10: the mean reward is exactly -0.1 in each"]
    assert said([row(n, reward=-0.1 + 1e-9 * n) for n in range(1, 30)]) == {}


def test_constant_and_without_signal_is_one_line_not_two():
    rows = [row(n, reward=-0.1, frac_reward_zero_std=1.0) for n in range(1, 30)]
    assert [len(lines) for lines in said(rows).values()] == [1]
    assert "reward -0.1" in said(rows)[10][0]


def test_a_sampler_that_differs_is_one_line_per_streak():
    rows = [row(n, **{"sampler_gap/mean": 0.2 if n in (3, 4, 5, 9) else 1e-6}) for n in range(1, 12)]
    assert list(said(rows)) == [3, 9] and "0.2 nats" in said(rows)[3][0]
    assert said(rows, gap=None) == {}
    assert said([row(1, **{"sampler_gap/mean": None})]) == {}


@pytest.mark.parametrize("fault", ["temperature", "positions", "none"])
def test_a_trainer_that_computes_another_distribution_than_its_sampler_is_an_alarm(folder, monkeypatch, fault):
    """Both faults leave every ratio at 1 and the loss finite: only the sampler's log-probs give them away."""
    each, original = make(folder, max_completion_len=24, temperature=1.3), trainer.policy_loss

    def wrong(policy, batch, **kwargs):
        if fault == "temperature":
            kwargs["temperature"] = 1.0
        if fault == "positions":
            batch = dataclasses.replace(batch, position_ids=batch.position_ids.flip(1))
        return original(policy, batch, **kwargs)

    monkeypatch.setattr(trainer, "policy_loss", wrong)
    losses = each.step(0).losses
    lines = said([row(1) | losses], gap=invariants.gap_limit(each.config, each.policy.dtype, in_process=True))
    assert losses["ratio/max"] == 1 and len(lines) == (fault != "none")


def test_where_a_sampler_gap_is_an_alarm():
    plain = parse([], {})
    assert invariants.gap_limit(plain, torch.float32, in_process=True) == 1e-4
    assert invariants.gap_limit(plain, torch.float32, in_process=False) is None  # another engine rounds otherwise
    assert invariants.gap_limit(parse(["--top-p", "0.9"], {}), torch.float32, in_process=True) is None


def test_bad_steps_in_a_row():
    skipped = [0.0, 1.0, 1.0, 0.0, 0.5, 1.0]
    rows = [row(n, skipped_updates=value) for n, value in enumerate(skipped)]
    assert [bad_steps(rows[:n]) for n in range(len(rows) + 1)] == [0, 0, 1, 2, 0, 1, 2]
