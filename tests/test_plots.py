"""Plots are drawn from whatever a history holds: no values, one step, hundreds of steps."""

import math

import pytest
from matplotlib.image import imread

from env.clarify import StopReason
from env.families import FAMILIES
from grpo import plots


def history(steps: int, **fixed) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        plan = 1 - math.exp(-step / 100)
        row = {"step": step, "reward": plan, "reward_std": 0.2, "kl": step * 1e-5, "entropy": 0.5}
        row |= {f"stop/{reason.value}": 0.0 for reason in StopReason} | {"stop/plan": plan, "stop/turn_cap": 1 - plan}
        rows.append(row | fixed)
    return rows


def comparison(models: int = 2, interval=(0.1, 0.5)) -> dict:
    cell = {"mean": 0.3, "max": 0.9, "interval": interval, "delta": 0.1, "delta_interval": interval}
    nothing = {key: None for key in cell}
    rows = [{"family": family, "n": 10, "models": [cell] * models} for family in (*FAMILIES, "all")]
    rows[-2] = {"family": "coding", "n": 0, "models": [nothing] * models}
    return {"models": [f"model {i}" for i in range(models)], "rubric": "card", "n": 40, "rows": rows}


def dark_pixels(path) -> float:
    """Share of pixels that are not nearly white: something was drawn."""
    return float((imread(path)[..., :3].min(axis=-1) < 0.9).mean())


@pytest.mark.parametrize("steps", [1, 2, 300])
def test_a_run_draws_every_chart(tmp_path, steps):
    drawn = plots.plot_run(tmp_path / "plots", history(steps), comparison())
    names = ["reward", "kl", "entropy", "stop_reasons", "families", "deltas"]
    assert [path.name for path in drawn] == [f"{name}.png" for name in names]
    for path in drawn:
        assert dark_pixels(path) > 0.01, path


def test_what_was_not_measured_is_left_out(tmp_path):
    drawn = plots.plot_run(tmp_path, history(20, kl=None))
    assert [path.name for path in drawn] == ["reward.png", "entropy.png", "stop_reasons.png"]
    assert plots.plot_run(tmp_path / "empty", []) == []


def test_gaps_do_not_spoil_the_rest(tmp_path):
    rows = history(100)
    for row in rows[10:30]:
        row["reward"] = row["reward_std"] = None
    smooth = plots._moving_average(plots._series(rows, "reward")[1])
    assert all(math.isfinite(value) for value in smooth[:10]) and all(math.isfinite(value) for value in smooth[30:])
    assert math.isnan(smooth[20])
    assert dark_pixels(plots.plot_reward(rows, tmp_path / "reward.png")) > 0.01


def test_moving_average_is_centred_and_keeps_constants():
    values = plots._series(history(300, reward=0.25), "reward")[1]
    assert plots._moving_average(values) == pytest.approx([0.25] * 300)
    step = plots._series([{"step": i, "x": float(i >= 150)} for i in range(300)], "x")[1]
    assert plots._moving_average(step)[150] == pytest.approx(6 / 11)  # 5 steps on either side


def test_intervals_and_bars_stand_where_the_numbers_say(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    plots.plot_families(comparison(3), tmp_path / "x.png")
    plots.plot_deltas(comparison(3), tmp_path / "x.png")
    bars, deltas = (figure.axes[0] for figure in figures)
    assert len(bars.patches) == 5 * 3  # four families with episodes and "all", three models
    assert {round(bar.get_height(), 6) for bar in bars.patches} == {0.3}
    segments = [line.get_xdata() for line in deltas.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 2]
    assert len(segments) == 5 * 2 and all(list(xs) == [0.1, 0.5] for xs in segments)


def test_one_cluster_has_no_interval_and_still_draws(tmp_path):
    path = plots.plot_deltas(comparison(interval=None), tmp_path / "deltas.png")
    assert dark_pixels(path) > 0.005


def test_seeds_are_a_line_with_a_band_and_dots_at_the_end(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    groups = {"beta 0": [history(50, kl=None)] * 2, "beta 0.2": [history(50, kl=0.1), history(40, kl=0.3)]}
    ends = {"base": [0.0], "beta 0": [0.7, 0.9], "beta 0.2": [0.2]}
    plots.plot_seeds(groups, "kl", tmp_path / "x.png", "KL", "nats", ends)
    axes = figures[0].axes[0]
    drawn = {line.get_label(): line for line in axes.lines}
    assert set(drawn) == {"beta 0.2", "beta 0, final models", "beta 0.2, final models"}  # beta 0 logs no KL
    line = drawn["beta 0.2"]
    assert list(line.get_xdata()) == list(range(1, 41))  # as far as both seeds go
    assert list(line.get_ydata()) == pytest.approx([0.2] * 40)
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.ymin, band.ymax) == pytest.approx((0.1, 0.3))
    dots = drawn["beta 0, final models"]
    assert list(dots.get_ydata()) == [0.7, 0.9] and min(dots.get_xdata()) > 50
    assert (dots.get_color(), line.get_color()) == plots.MODEL_COLOURS[1:3]  # grey is the base's
