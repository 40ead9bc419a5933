"""Comparisons pair by scenario, resample by seed, and refuse what cannot be compared."""

import json
from pathlib import Path

import pytest

from env.families import FAMILIES
from grpo import console
from grpo.compare import compare, load_report, names_of
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
