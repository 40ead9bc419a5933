"""Comparisons pair by scenario, resample by seed, and refuse what cannot be compared."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from env.families import FAMILIES
from grpo import console
from grpo.compare import (
    compare,
    compare_groups,
    direction,
    load_report,
    names_of,
    newcombe_interval,
    seeds_interval,
    student_interval,
)
from grpo.config import UsageError
from grpo.evaluate import bootstrap_interval

RATES = dict.fromkeys(
    ("completion_rate", "format_pass_rate", "hallucination_rate", "revealing_share", "invalid_turn_rate",
     "truncation_rate"), 0.5,
)  # fmt: skip


def made_report(scores: list[float], model: str = "m", rubric: str = "card", sha: str = "same", families=None) -> dict:
    """A report of len(scores) episodes, three per seed."""
    families = families or ["event_planning"] * len(scores)
    episodes = [
        {"family": family, "seed": 100 + i // 3, "scores": {"card": score, "gated": score / 2}}
        for i, (score, family) in enumerate(zip(scores, families))
    ]
    counts = {"mean_questions": 2.0, "mean_revealing_questions": 1.5, "env_errors": 0}
    return {"model": model, "rubric": rubric, "scenarios": {"sha256": sha}, "episodes": episodes, **RATES, **counts}


def row_of(comparison: dict, family: str) -> dict:
    return next(row for row in comparison["rows"] if row["family"] == family)


def test_means_maxima_and_paired_changes():
    base = made_report([0.0, 0.2, 0.4, 0.6, 0.0, 0.0], families=["event_planning"] * 3 + ["coding"] * 3)
    trained = made_report([0.1, 0.3, 0.5, 0.6, 0.3, 0.0], families=["event_planning"] * 3 + ["coding"] * 3)
    result = compare([base, trained])
    event, coding, total = (row_of(result, name) for name in ("event_planning", "coding", "all"))
    assert [row["n"] for row in (event, coding, total)] == [3, 3, 6]
    assert event["models"][0]["mean"] == pytest.approx(0.2) and event["models"][0]["max"] == 0.4
    assert event["models"][1]["delta"] == pytest.approx(0.1)
    assert coding["models"][1]["delta"] == pytest.approx(0.1)
    assert total["models"][1]["delta"] == pytest.approx(0.1)
    assert total["models"][0]["delta"] is None
    assert event["models"][1]["delta_interval"] is None  # one seed says nothing about the spread
    assert [row["family"] for row in result["rows"]] == [*FAMILIES, "all"]
    nothing = row_of(result, "medical_intake")
    assert nothing["n"] == 0 and nothing["models"][1]["mean"] is None and nothing["models"][1]["delta"] is None


def test_pairing_removes_what_both_share():
    """Scores that vary a lot between scenarios but rise by 0.1 everywhere: the change has no spread at all."""
    base = [0.1 * (i % 9) for i in range(30)]
    low, high = row_of(compare([made_report(base), made_report([x + 0.1 for x in base])]), "all")["models"][1][
        "delta_interval"
    ]
    assert low == pytest.approx(0.1) and high == pytest.approx(0.1)
    unpaired = row_of(compare([made_report(base), made_report(base)]), "all")["models"][0]["interval"]
    assert unpaired[1] - unpaired[0] > 0.05


def test_changes_are_resampled_by_seed():
    """Three scenarios of a seed move together: as clusters they are 10 draws and not 30."""
    base, trained = [0.0] * 30, [float(i // 3 % 2) for i in range(30)]
    clustered = row_of(compare([made_report(base), made_report(trained)]), "all")["models"][1]["delta_interval"]
    independent = bootstrap_interval(trained, list(range(30)))
    assert clustered[1] - clustered[0] > 1.4 * (independent[1] - independent[0])


def test_rubric_is_the_reports_own_or_the_one_asked_for():
    base, other = made_report([0.4] * 6), made_report([0.8] * 6)
    assert row_of(compare([base, other], rubric="gated"), "all")["models"][1]["delta"] == pytest.approx(0.2)
    with pytest.raises(UsageError, match="different rubrics.*--rubric"):
        compare([base, made_report([0.4] * 6, rubric="gated")])


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UsageError, match="at least two"):
        compare([made_report([0.1])])
    with pytest.raises(UsageError, match="other scenarios than base .*3 against 6"):
        compare([made_report([0.1] * 6), made_report([0.1] * 3, sha="other")], names=["base", "b"])


def test_files_that_are_no_reports(tmp_path):
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "good.json").write_text(json.dumps(made_report([0.5])))
    for name, message in (("missing", "No such file"), ("text", "not JSON"), ("list", "not an evaluation")):
        with pytest.raises(UsageError, match=f"{name}.json: {message}") as error:
            load_report(tmp_path / f"{name}.json")
        assert "\n" not in str(error.value)
    assert load_report(tmp_path / "good.json")["model"] == "m"


def test_models_sampled_in_different_ways_are_named(capsys):
    sampled = made_report([0.1] * 6, "a") | {"temperature": 0.7, "top_p": 1.0}
    greedy = made_report([0.1] * 6, "b") | {"temperature": 0.0, "top_p": 1.0}
    scripted = made_report([0.1] * 6, "c")
    assert compare([sampled, scripted])["differences"] == {}
    console.print_comparison(compare([sampled, greedy]))
    assert "note: temperature differs: a 0.7, b 0.0" in capsys.readouterr().out


def test_names_are_distinct_and_short():
    reports = [made_report([0.1] * 3, model=model) for model in ("tiny", "runs/beta0/final", "runs/beta2/final/")]
    assert compare(reports)["models"] == ["tiny", "beta0", "beta2"]
    trained = [made_report([0.1] * 3, model="trained") for _ in range(3)]
    assert names_of(trained) == ["trained", "trained (2)", "trained (3)"]
    paths = [Path("runs/beta0/eval_after.json"), Path("runs/beta2/eval_after.json"), Path("runs/beta0/eval_after.json")]
    assert names_of(trained, paths) == ["beta0/eval_after", "beta2/eval_after", "beta0/eval_after (2)"]


def test_table_shows_every_family_model_and_change(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    base, trained = made_report([0.25] * 6, "tiny"), made_report([0.75] * 6, "trained [x]")
    console.print_comparison(compare([base, trained]))
    out = capsys.readouterr().out
    assert "trained [x]" in out and "tiny" in out  # square brackets are text, not markup
    assert "0.250 (0.250)" in out and "+0.500 [+0.500, +0.500]" in out
    for family in FAMILIES:
        assert family in out
    assert "plan fields never told" in out


GOOD = made_report([0.5, 0.6])
BROKEN = {
    "null": None,
    "number for text": GOOD | {"model": 3},
    "unknown rubric": GOOD | {"rubric": "star"},
    "missing rate": {key: value for key, value in GOOD.items() if key != "completion_rate"},
    "text for a rate": GOOD | {"completion_rate": "all"},
    "list for a setting": GOOD | {"temperature": [0.7]},
    "no episodes": GOOD | {"episodes": []},
    "fewer episodes": GOOD | {"scenarios": {"sha256": "same", "n": 3}},
    "episodes are numbers": GOOD | {"episodes": [1, 2]},
    "NaN": made_report([0.5, float("nan")]),
    "no gated score": GOOD | {"episodes": [{"family": "coding", "seed": 1, "scores": {"card": 0.5}}]},
    "unknown family": made_report([0.5], families=["cooking"]),
    "seed is a list": GOOD | {"episodes": [GOOD["episodes"][0] | {"seed": []}]},
}


@pytest.mark.parametrize("document", BROKEN.values(), ids=BROKEN.keys())
def test_a_malformed_report_is_named(tmp_path, document):
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="bad.json: not an evaluation report") as error:
        load_report(tmp_path / "bad.json")
    assert "\n" not in str(error.value)


def test_a_report_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="deep.json: not an evaluation report"):
        load_report(tmp_path / "deep.json")


def test_a_report_cut_by_hand_is_not_paired():
    with pytest.raises(UsageError, match="other scenarios.*1 against 2"):
        compare([GOOD, GOOD | {"episodes": GOOD["episodes"][:1]}])


# ------------------------------------------------------------------------------------------- several seeds of training


def test_groups_of_seeds_by_hand():
    base = made_report([0.0, 0.2, 0.4, 0.6, 0.0, 0.0])
    seeds = [made_report([0.1, 0.3, 0.5, 0.7, 0.1, 0.1]), made_report([0.3, 0.5, 0.7, 0.9, 0.3, 0.3])]
    seeds[0]["completion_rate"], seeds[1]["completion_rate"] = 0.25, 1.0
    seeds[0]["hallucination_rate"] = None
    result = compare_groups([[base], seeds], None, ["base", "trained"])
    cell = row_of(result, "all")["models"][1]
    assert cell["means"] == pytest.approx([0.3, 0.5]) and cell["mean"] == pytest.approx(0.4) and cell["max"] == 0.9
    assert cell["deltas"] == pytest.approx([0.1, 0.3]) and cell["delta"] == pytest.approx(0.2)
    assert result["summary"]["completion_rate"] == [0.5, 0.625] and result["summary"]["hallucination_rate"] == [
        0.5,
        0.5,
    ]
    # No spread between scenarios, 0.1 * sqrt(2) between two seeds: Student's t with one degree of freedom.
    assert cell["delta_interval"] == pytest.approx([0.2 - 12.706 * 0.1, 0.2 + 12.706 * 0.1], rel=0.03)


def test_between_groups_seeds_are_paired():
    """Seeds that differ a lot, by 0.1 between the groups each time: no spread of the change."""
    groups = [[made_report([x + gain] * 6) for x in (0.1, 0.5, 0.8)] for gain in (0.0, 0.1)]
    cell = row_of(compare_groups(groups, None, ["a", "b"]), "all")["models"][1]
    assert cell["delta_interval"] == pytest.approx([0.1, 0.1])
    with pytest.raises(ValueError, match="seeds are paired"):
        compare_groups([groups[0], groups[1][:1]], None, ["a", "b"])
    with pytest.raises(UsageError, match="b was evaluated on other scenarios"):
        compare_groups([groups[0][:1], [groups[1][0], made_report([0.1] * 6, sha="other")]], None, ["a", "b"])


def test_one_seed_has_the_interval_of_its_scenarios():
    values, clusters = [0.1 * (i % 7) for i in range(30)], [i // 3 for i in range(30)]
    assert seeds_interval([values], clusters) == bootstrap_interval(values, clusters)
    # Seeds that agree entirely say no more, and no less, than one.
    assert seeds_interval([values] * 4, clusters) == pytest.approx(bootstrap_interval(values, clusters), abs=1e-3)
    assert seeds_interval([[0.1, 0.2], [0.3, 0.4]], [7, 7]) is None  # one cluster says nothing about the spread


def test_scenarios_of_a_seed_are_drawn_together_in_groups_too():
    values = [[float(i // 3 % 2) for i in range(30)]] * 3
    clustered, independent = (seeds_interval(values, ids) for ids in ([i // 3 for i in range(30)], range(30)))
    assert clustered[1] - clustered[0] > 1.4 * (independent[1] - independent[0])


@pytest.mark.parametrize("seeds, quantile", [(2, 12.706), (3, 4.303), (5, 2.776)])
def test_spread_between_seeds_has_students_interval(seeds, quantile):
    """Quantiles of Student's t from a table; scenarios without any spread."""
    of_seeds = [0.01 * i for i in range(seeds)]
    half = quantile * np.std(of_seeds, ddof=1) / math.sqrt(seeds)
    middle = sum(of_seeds) / seeds
    expected = pytest.approx([middle - half, middle + half], abs=0.03 * half)
    assert student_interval(of_seeds) == expected
    assert seeds_interval([[x] * 4 for x in of_seeds], range(4)) == expected


def test_one_seed_has_no_students_interval():
    assert student_interval([0.3]) is None


def test_intervals_over_seeds_cover_the_truth_where_those_of_scenarios_do_not():
    """The figures of `seeds_interval`'s docstring, in small: 3 seeds x 250 scenarios, truth 0."""
    rng, covered, scenarios_alone = np.random.default_rng(0), 0, 0
    for _ in range(60):
        values = rng.normal(0, 0.05, (3, 1)) + rng.normal(0, 0.2, (1, 250)) + rng.normal(0, 0.3, (3, 250))
        low, high = seeds_interval(values, range(250))
        covered += low <= 0 <= high
        low, high = bootstrap_interval(values.mean(axis=0), range(250))
        scenarios_alone += low <= 0 <= high
    assert covered >= 55 and scenarios_alone <= 50


def test_difference_of_proportions_of_the_literature():
    """Newcombe 1998, table II: 56/70 against 48/80 by method 10."""
    assert newcombe_interval(56, 70, 48, 80) == pytest.approx([0.0524, 0.3339], abs=5e-5)
    assert newcombe_interval(0, 10, 0, 20) == pytest.approx([-0.1611, 0.2775], abs=5e-5)


def test_the_decision_rule():
    assert direction([0.01, 0.2], 3) == "higher" and direction([-0.2, -0.01], 2) == "lower"
    for interval, seeds in (([-0.01, 0.2], 3), ([0.0, 0.2], 3), ([-0.2, 0.0], 3), ([0.1, 0.2], 1), (None, 3)):
        assert direction(interval, seeds) == "cannot be told"
