"""What is printed: fits, and reads well."""

from __future__ import annotations

from grpo import console
from grpo.metrics import METRICS
from grpo.replay import Replayed, _and_steps, show


def test_one_of_a_thing_has_no_plural():
    assert [console.counted(n, "thread") for n in (0, 1, 2)] == ["0 threads", "1 thread", "2 threads"]


def test_the_progress_of_what_goes_on_estimates_from_its_own_episodes(monkeypatch, capsys):
    clock = iter([0.0, 20.0, 60.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.episode_progress("x", 10, before=6) as show:
        show(8, 10)  # two in 20 seconds, two are left
        show(10, 10)
    assert capsys.readouterr().out.splitlines()[1:] == ["x: 8/10 after 20s, 20s left", "x: 10/10 after 1m00s"]


def test_the_table_of_a_replay_fits_into_80_columns(capsys):
    losses = dict.fromkeys(METRICS, -1.23456789e-105)
    show(Replayed(3, "those of the base", losses, losses, {}, None))
    table = capsys.readouterr().out.splitlines()[1:-1]
    assert len(table) == 1 + len(METRICS) and max(map(len, table)) <= 80 and len(set(map(len, table))) == 1
    assert all(len(line.split()) == 3 for line in table[1:])


def test_steps_before_a_replay_are_counted():
    assert [_and_steps(5, last) for last in (4, 5, 6)] == ["", " and step 5", " and steps 5 to 6"]
