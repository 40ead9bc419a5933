"""The log, the readable episodes, and what is said on the terminal."""

import io
import json
import math
import os
import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from env.clarify import ClarifyEnv, StopReason
from grpo import console
from grpo.config import LossConfig, UsageError
from grpo.data_types import Episode, Group, Turn
from grpo.loss import grpo_loss
from grpo.metrics import (
    METRICS,
    LogHistory,
    behaviour,
    dumps,
    is_time,
    step_metrics,
    stop_rates,
    without_times,
    write_completions,
)
from grpo.trainer import combine_metrics
from scenarios.generator import generate

# ------------------------------------------------------------------------------------------------- log_history.json


def test_log_is_valid_json_after_every_step_and_keeps_what_it_had(tmp_path):
    path = tmp_path / "log_history.json"
    log = LogHistory(path)
    assert json.loads(path.read_text()) == []
    for step in range(1, 6):
        log.append({"step": step, "reward": 0.1 * step, "note": "ü"})
        assert json.loads(path.read_text()) == [{"step": s, "reward": 0.1 * s, "note": "ü"} for s in range(1, step + 1)]
    again = LogHistory(path)
    assert again.rows == log.rows
    again.append({"step": 6})
    assert [row["step"] for row in json.loads(path.read_text())] == [1, 2, 3, 4, 5, 6]


def test_log_is_strict_json(tmp_path):
    log = LogHistory(tmp_path / "log.json")
    log.append({"step": 1, "loss": float("nan"), "kl": np.float32(0.5), "n": np.int64(3), "t": torch.tensor(2.0)})
    text = (tmp_path / "log.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == [{"step": 1, "loss": None, "kl": 0.5, "n": 3, "t": 2.0}]
    assert dumps([float("inf"), (1, None, True)]) == "[null, [1, null, true]]"


def test_truncate_then_append_equals_never_stopped(tmp_path):
    whole, resumed = LogHistory(tmp_path / "whole.json"), LogHistory(tmp_path / "resumed.json")
    for step in range(1, 7):
        whole.append({"step": step})
    for step in range(1, 6):  # saved at 3, killed after 5
        resumed.append({"step": step})
    resumed = LogHistory(tmp_path / "resumed.json")
    resumed.truncate_to(3)
    assert [row["step"] for row in json.loads((tmp_path / "resumed.json").read_text())] == [1, 2, 3]
    for step in range(4, 7):
        resumed.append({"step": step})
    assert (tmp_path / "resumed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_a_half_written_line_is_dropped_wherever_it_was_cut(tmp_path):
    path = tmp_path / "log.json"
    log = LogHistory(path)
    log.append({"step": 1, "a": [1, 2]})
    before = path.read_bytes()
    log.append({"step": 2, "a": "x"})
    after = path.read_bytes()
    for cut in range(len(before) - len("\n]\n"), len(after)):
        path.write_bytes(after[:cut])
        assert [row["step"] for row in LogHistory(path).rows] in ([1], [1, 2])
        json.loads(path.read_text())


def test_a_file_that_is_no_log_is_left_alone(tmp_path):
    for text in (
        "no log", '{"step": 1}', "[1, 2]", '[{"step": "1"}]', '[{"step": true}]', '[{"step": 2}, {"step": 1}]',
        "[" * 100_000, '[\n{"step": 1},\n{"st\n{"step": 3}\n]\n',
    ):  # fmt: skip
        path = tmp_path / "log.json"
        path.write_text(text)
        with pytest.raises(UsageError, match="log.json: not a log history"):
            LogHistory(path)
        assert path.read_text() == text


def test_a_step_logged_twice_is_refused(tmp_path):
    log = LogHistory(tmp_path / "log.json")
    log.append({"step": 4})
    with pytest.raises(ValueError, match="step 4 after step 4"):
        log.append({"step": 4})
    assert len(json.loads(log.path.read_text())) == 1


def test_an_append_writes_one_line_however_long_the_log_is(tmp_path, monkeypatch):
    log = LogHistory(tmp_path / "log.json")
    for step in range(1, 2001):
        log.append({"step": step, "reward": 0.5})
    monkeypatch.setattr(log, "_rewrite", pytest.fail)
    inode = log.path.stat().st_ino
    log.append({"step": 2001})
    assert log.path.stat().st_ino == inode and len(json.loads(log.path.read_text())) == 2001


# ------------------------------------------------------------------------------------------------- numbers of a step


def ask(field: str) -> str:
    return f'ask_question("What is the {field}?")'


def played(scenario, texts: list[str], reward: float | None, member: int = 0, end: StopReason | None = None) -> Episode:
    """The episode that these turns make; every turn is two sampled tokens, every reply three tokens."""
    env = ClarifyEnv(scenario)
    env.reset()
    turns, mask = [], []
    for text in texts:
        reply = env.step(text).reply
        turns.append(Turn(len(mask), len(mask) + 2, text, reply))
        mask += [1, 1] + ([0, 0, 0] if reply is not None else [])
    record = env.finish(end) if end else env.record
    ids = tuple(range(len(mask)))
    return Episode((7, 8, 9, 10), ids, tuple(mask), (0.0,) * len(ids), tuple(turns), record.stop_reason, record, reward,
                   member)  # fmt: skip


@pytest.fixture
def groups() -> list[Group]:
    """Two groups of four: in the first an honest plan, an invented one, a broken turn, an error of the environment."""
    event = generate(10_000, "easy", "event_planning")
    fields = list(event.hidden_profile)
    plan = json.dumps(dict(event.hidden_profile))
    first = (
        played(event, [ask(f) for f in fields] + [ask(fields[0]), f"propose_plan({plan})"], 0.8, 0),
        played(event, [f"propose_plan({json.dumps({'theme': 'x'})})"], 0.0, 1),
        played(event, ["no call", ask(fields[0])], -0.1, 2, StopReason.TOKEN_CAP),
        played(event, [], None, 3, StopReason.ENV_ERROR),
    )
    coding = generate(10_001, "hard", "coding")
    second = tuple(played(coding, [ask("moon")] * 7, -0.1, member) for member in range(4))
    return [Group(event, first), Group(coding, second)]


@pytest.fixture
def row(groups) -> dict:
    losses = {"loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-4, "kl": 0.001}
    return step_metrics(groups, step=3, losses=losses, seconds={"rollout": 1.5, "update": 0.5}, num_tokens_before=1000)


def test_rates_of_a_step(groups, row):
    turns = [len(episode.turns) for group in groups for episode in group.episodes]
    fields = len(groups[0].scenario.hidden_profile)
    assert row["reward"] == pytest.approx((0.8 + 0.0 - 0.1 - 4 * 0.1) / 7)  # the lost episode has no reward
    assert row["reward_std"] == pytest.approx(statistics.stdev([0.8, 0.0, -0.1]) / 2)
    assert row["frac_reward_zero_std"] == 0.5
    assert row["completion_rate"] == 2 / 8 and row["format_pass_rate"] == 1 / 8
    assert row["questions/mean"] == (fields + 1 + 1 + 4 * 6) / 8  # the refused seventh question does not count
    assert row["questions/revealing"] == (fields + 1) / 8  # the repeated one reveals nothing new
    assert row["invalid_turns"] == 1 / sum(turns)
    assert row["hallucination_rate"] == 0.5  # of the two plans one is honest, one invented
    stops = {key.removeprefix("stop/"): value for key, value in row.items() if key.startswith("stop/")}
    assert stops == {"plan": 0.25, "token_cap": 0.125, "env_error": 0.125, "question_cap": 0.5, "turn_cap": 0.0,
                     "context_full": 0.0}  # fmt: skip
    assert row["completions/clipped_ratio"] == 0.125
    assert row["reward/event_planning"] == pytest.approx(0.7 / 3) and row["reward/coding"] == pytest.approx(-0.1)
    assert row["reward/medical_intake"] is None


def test_lengths_and_speed_of_a_step(groups, row):
    lengths = [len(episode.completion_ids) for group in groups for episode in group.episodes]
    assert row["completions/mean_length"] == sum(lengths) / 8
    assert (row["completions/min_length"], row["completions/max_length"]) == (0, max(lengths))
    assert row["num_tokens"] == 1000 + sum(lengths) + 8 * 4
    sampled = sum(episode.num_trained for group in groups for episode in group.episodes)
    assert row["step_time"] == 2.0 and row["time/tokens_per_second"] == sampled / 2.0


def is_documented(key):
    """`METRICS` explains it; `time/<phase>` is seconds of that phase of the step."""
    return key in METRICS or key.startswith("time/")


def test_keys_of_the_field_are_there_and_every_key_is_documented(row):
    expected = (
        "step loss grad_norm learning_rate reward reward_std frac_reward_zero_std kl entropy clip_ratio/low_mean "
        "clip_ratio/high_mean clip_ratio/region_mean completions/mean_length completions/min_length "
        "completions/max_length completions/clipped_ratio num_tokens step_time sampler_gap/mean sampler_gap/max"
    )
    assert set(expected.split()) <= row.keys()
    assert [key for key in row if not is_documented(key)] == []
    assert (row["loss"], row["kl"], row["learning_rate"]) == (0.5, 0.001, 1e-4)
    assert row["entropy"] is None  # not measured, and still a key
    assert all("\n" not in line and line.endswith(".") for line in METRICS.values())


def test_every_metric_of_the_loss_has_a_documented_key(groups):
    ones = torch.ones(2)
    config = LossConfig(beta=0.1, delta=2.0, mismatch="token_clip")
    _, metrics = grpo_loss(
        policy_logprobs=-ones, old_logprobs=-ones, ref_logprobs=-ones, sampler_logprobs=-ones, advantages=ones,
        token_weights=ones, episode_index=torch.zeros(2).long(), entropy=ones, config=config,
    )  # fmt: skip
    row = step_metrics(groups, step=1, losses=combine_metrics([metrics], 2), seconds={"update": 1.0})
    assert [key for key in row if not is_documented(key)] == []
    measured = ("kl", "entropy", "ratio/", "clip_ratio/", "sampler_gap/")
    assert [key for key in METRICS if key.startswith(measured) and row[key] is None] == []


def test_without_times_leaves_what_two_equal_runs_share(groups):
    rows = [step_metrics(groups, step=1, losses={}, seconds={"rollout": seconds}) for seconds in (1.0, 2.0)]
    assert rows[0] != rows[1]
    assert without_times(rows[:1]) == without_times(rows[1:])
    assert without_times(rows)[0].keys() == {key for key in METRICS if not is_time(key)}


def test_rates_of_nothing_are_none():
    assert set(behaviour([], []).values()) == {None}


def test_stop_rates_name_every_reason_and_sum_to_one(groups):
    rates = stop_rates([episode.record for group in groups for episode in group.episodes])
    assert list(rates) == [reason.value for reason in StopReason] and math.isclose(sum(rates.values()), 1)


# ---------------------------------------------------------------------------------------------------------- episodes


def test_completions_are_readable_and_complete(tmp_path, groups):
    advantages = [[1.5, -0.5, -0.75, 0.0], [0.0] * 4]
    write_completions(tmp_path / "completions", 12, groups, advantages)
    rows = [json.loads(line) for line in (tmp_path / "completions/step_00012.jsonl").read_text().splitlines()]
    assert [(row["group"], row["member"]) for row in rows] == [(g, m) for g in range(2) for m in range(4)]
    assert [row["advantage"] for row in rows] == [1.5, -0.5, -0.75, 0.0] + [0.0] * 4
    assert [row["reward"] for row in rows[:4]] == [0.8, 0.0, -0.1, None]
    first = groups[0].episodes[0]
    talk = rows[0]["conversation"]
    assert talk[0]["role"] == "user" and groups[0].scenario.request in talk[0]["content"]
    assert [m["content"] for m in talk[1:]] == [
        text for turn in first.turns for text in (turn.text, turn.reply) if text is not None
    ]
    page = (tmp_path / "completions/step_00012.md").read_text()
    assert "reward +0.800, advantage +1.500, plan" in page and "reward none" in page
    for turn in first.turns:
        assert f"    {turn.text}" in page


def test_only_the_first_groups_are_written_out_in_full(tmp_path, groups):
    many = groups[1:] * 10
    write_completions(tmp_path, 1, many, [[0.0] * 4] * 10)
    page = (tmp_path / "step_00001.md").read_text()
    assert page.count("**agent**") == 2 * 4 * 7 and page.count("- member") == 8 * 4


# ---------------------------------------------------------------------------------------------------------- terminal


def test_without_a_terminal_progress_is_a_plain_line_every_ten_steps(capsys, row):
    with console.StepProgress(total=25) as progress:
        for step in range(1, 26):
            progress.update(row | {"step": step, "step_time": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[1].endswith("30s left") and "KL 0.0010" in lines[1]
    assert "plan 25%" in lines[1] and "question_cap 50%" in lines[1] and "turn_cap" not in lines[1]


def test_progress_on_a_terminal_shows_the_same(row, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "make_console", lambda: Console(file=screen, force_terminal=True, width=160))
    with console.StepProgress(total=25, done=10) as progress:
        progress.update(row | {"step": 11})
    assert "11/25" in screen.getvalue() and "KL 0.0010" in screen.getvalue() and "28s left" in screen.getvalue()


def test_header_prints_values_as_text(capsys):
    console.print_header({"model": "tiny", "step": "4 x 8 episodes [groups]"})
    out = capsys.readouterr().out
    assert "4 x 8 episodes [groups]" in out and "model" in out


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (45, "45s"), (372, "6m12s"), (7500, "2h05m")])
def test_durations(seconds, text):
    assert console.duration(seconds) == text


def test_entry_turns_bad_input_into_one_line_and_hides_no_fault(capsys):
    def bad_input():
        with console.user_input("--scenarios x.json"):
            raise ValueError("two\nlines")

    with pytest.raises(SystemExit) as stop:
        console.run_entry(bad_input)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: --scenarios x.json: two lines\n"

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        console.run_entry(interrupted)
    assert stop.value.code == 130

    def faulty():
        raise ValueError("a fault of the program")

    with pytest.raises(ValueError, match="a fault"):
        console.run_entry(faulty)


def test_groups_without_signal_are_those_that_get_no_advantage():
    """Differences of 1.2e-6 have a smaller standard deviation, and are trained on all the same."""
    scenario = generate(10_000, "easy", "event_planning")
    rewards = [0.3, 0.3, 0.3, 0.3 + 1.2e-6]
    members = tuple(played(scenario, [ask("date")], r, i, StopReason.TOKEN_CAP) for i, r in enumerate(rewards))
    row = step_metrics([Group(scenario, members)], step=1, losses={}, seconds={"rollout": 1.0})
    assert row["reward_std"] < 1e-6 and row["frac_reward_zero_std"] == 0


def test_a_skipped_update_is_said(row):
    assert "UPDATE SKIPPED: not finite" in console.status_line(row | {"skipped_updates": 0.5})
    assert "SKIPPED" not in console.status_line(row | {"skipped_updates": 0.0})


def test_output_that_is_not_read_on_ends_a_command_quietly():
    read, write = os.pipe()
    os.close(read)
    program = "from grpo.console import run_entry; run_entry(lambda: print('x'))"
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
