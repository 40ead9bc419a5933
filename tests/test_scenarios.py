"""Scenarios: the schema, the generator, the held-out file."""

import json
from collections import Counter

import pytest

from env.families import FAMILIES
from scenarios.generator import (
    DIFFICULTIES,
    HELD_OUT_FILE,
    HELD_OUT_SEEDS,
    generate,
    held_out,
    main,
    training_scenario,
)
from scenarios.schema import Scenario, load_scenarios

PUBLISHED_10005 = {
    "family": "event_planning", "task_id": "hard", "task_title": "High Ambiguity", "request": "Plan a birthday party.",
    "hidden_profile": {"event_type": "anniversary", "date": "today", "guest_count": 10, "venue": "home",
                       "budget_band": "<$100", "theme": "formal"},
    "critical_fields": ["date", "event_type", "guest_count", "venue"],
    "required_keys": ["event_type", "date", "guest_count", "venue"],
    "field_keys": ["budget_band", "date", "event_type", "guest_count", "theme", "venue"],
    "max_steps": 12, "max_questions": 6, "seed": 10005,
}  # fmt: skip
EASY = PUBLISHED_10005 | {"task_id": "easy", "hidden_profile": {"date": "today", "venue": "home"}, "max_steps": 8}

SAMPLE = [training_scenario(run, i) for run in range(3) for i in range(1000)] + held_out(None)


def key(scenario: Scenario) -> tuple:
    return scenario.family, scenario.request, frozenset(scenario.hidden_profile.items())


def test_fault_1_required_keys_are_in_the_profile():
    assert all(set(s.required_keys) <= set(s.hidden_profile) and s.required_keys for s in SAMPLE)


def test_fault_1_a_loaded_scenario_demands_no_key_that_its_profile_lacks():
    assert Scenario.model_validate(EASY).required_keys == ("date", "venue")
    assert Scenario.model_validate(EASY).critical_fields == ("date", "venue")


def test_fault_2_a_request_never_contradicts_the_profile():
    seen = Counter()
    for scenario in SAMPLE:
        request = next(r for r in FAMILIES[scenario.family].requests if r.text == scenario.request)
        for field, allowed in request.says:
            if field in scenario.hidden_profile:
                seen[scenario.request] += 1
                assert scenario.hidden_profile[field] in allowed
        # The user would answer "no preference" on what was just asked for.
        assert set(request.told) <= set(scenario.hidden_profile)
    assert set(seen) == {
        "Plan a birthday party.", "Organize a team event.", "Get a call on the calendar.", "My order is wrong.",
    }  # fmt: skip


def test_the_shape_of_each_difficulty():
    sizes = {"easy": (2, 3), "medium": (4, 5), "hard": (6, 7)}
    for scenario in SAMPLE:
        spec = FAMILIES[scenario.family]
        low, high = (min(size, len(spec.fields)) for size in sizes[scenario.task_id])
        assert low <= len(scenario.hidden_profile) <= high
        assert scenario.field_keys == tuple(scenario.hidden_profile)
        assert list(scenario.hidden_profile) == [f for f in spec.fields if f in scenario.hidden_profile]
        assert set(scenario.critical_fields) == set(spec.critical) & set(scenario.hidden_profile)
        assert all(value in spec.values[field] for field, value in scenario.hidden_profile.items())
        if scenario.task_id != "easy":
            assert scenario.required_keys == spec.required


def test_every_value_and_request_occurs():
    for name, spec in FAMILIES.items():
        mine = [s for s in SAMPLE if s.family == name]
        assert {s.request for s in mine} == {r.text for r in spec.requests}
        for field, values in spec.values.items():
            assert {s.hidden_profile.get(field) for s in mine} >= set(values)


def test_training_mix():
    training = SAMPLE[:3000]
    share = {d: sum(s.task_id == d for s in training) / len(training) for d in DIFFICULTIES}
    assert share == pytest.approx({"easy": 0.5, "medium": 0.3, "hard": 0.2}, abs=0.03)
    families = Counter(s.family for s in training)
    assert set(families) == set(FAMILIES)
    assert max(families.values()) < 1.2 * min(families.values())


def test_generation_is_pure_and_what_is_drawn_may_be_given():
    for seed in range(50):
        scenario = generate(seed)
        assert generate(seed) == scenario
        assert generate(seed, scenario.task_id, scenario.family) == scenario
    assert generate(0, "hard", "coding_requirements").family == "coding"
    assert len({key(generate(seed)) for seed in range(50)}) > 45


def test_generation_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown difficulty 'extreme': must be one of easy, medium, hard"):
        generate(0, "extreme")
    with pytest.raises(ValueError, match="unknown family 'cooking'"):
        generate(0, family="cooking")


def test_a_pinned_scenario():
    """Another machine or Python version must make the same scenario."""
    scenario = generate(7, "medium", "support_triage")
    assert scenario.request == "There's an issue with my purchase."
    assert scenario.hidden_profile == {
        "order_id": "#4521",
        "item_issue": "damaged",
        "refund_or_replace": "store-credit",
        "urgency": "high",
        "channel_preferred": "phone",
    }


def test_training_never_meets_a_held_out_scenario():
    held = {key(s) for s in held_out(None)}
    held_profiles = {(family, profile) for family, _, profile in held}
    trained = [key(training_scenario(5, i)) for i in range(10_000)]
    assert not held & set(trained)
    assert not held_profiles & {(family, profile) for family, _, profile in trained}
    # Without the exclusion some would be met: easy profiles are few.
    assert held_profiles & {(s.family, frozenset(s.hidden_profile.items())) for s in map(generate, range(10_000))}
    # Training still has plenty, easy scenarios of every family included.
    for family in FAMILIES:
        easy = {k for k in trained if k[0] == family and len(k[2]) <= 3}
        assert len(easy) > 300


def test_training_and_held_out_seeds_do_not_overlap():
    held = {s.seed for s in held_out(None)}
    assert all(seed in HELD_OUT_SEEDS for seed in held) and len(held) == 250
    assert all(training_scenario(run, i).seed >= HELD_OUT_SEEDS.stop for run in range(3) for i in range(500))


def test_training_scenarios_depend_on_run_and_index():
    first = [training_scenario(0, i) for i in range(20)]
    assert first == [training_scenario(0, i) for i in range(20)]
    assert first != [training_scenario(1, i) for i in range(20)]
    assert len({s.seed for s in first}) == 20
    # A resumed run goes on where it stopped: no state but the index.
    assert training_scenario(0, 10) == first[10]


def test_the_held_out_file_is_rewritten_byte_for_byte(tmp_path):
    assert main(["--out", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_bytes() == HELD_OUT_FILE.read_bytes()


def test_only_a_right_command_line_writes(tmp_path, capsys):
    before = HELD_OUT_FILE.stat().st_mtime_ns
    assert main(["--out", str(tmp_path / "no" / "where.json")]) == 2
    error = capsys.readouterr().err
    assert error.endswith("where.json: No such file or directory\n") and error.count("\n") == 1
    for args, code in ((["--help"], 0), (["--seed", "1"], 2)):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == code
    assert HELD_OUT_FILE.stat().st_mtime_ns == before


def test_held_out_is_stratified_in_every_prefix():
    everything = held_out(None)
    assert len(everything) == 250
    assert Counter(s.family for s in everything) == dict.fromkeys(FAMILIES, 50)
    assert len({key(s) for s in everything}) == 250
    for n in range(251):
        part = held_out(n)
        assert part == everything[:n]
        for groups in (Counter(s.family for s in part), Counter(s.task_id for s in part)):
            if n >= 5:
                assert max(groups.values()) - min(groups.values()) <= 1
        if n % 15 == 0:
            assert set(Counter((s.family, s.task_id) for s in part).values()) <= {n // 15}
    assert held_out() == everything[:50]
    assert Counter(s.family for s in held_out()) == dict.fromkeys(FAMILIES, 10)


@pytest.mark.parametrize("limit", [-1, 251])
def test_held_out_refuses_a_limit_outside_the_file(limit):
    with pytest.raises(ValueError, match=f"{limit} held-out scenarios: must be between 0 and 250"):
        held_out(limit)


def test_the_lists_of_held_out_are_copies():
    held_out(5).clear()
    assert len(held_out(5)) == 5


def test_the_published_schema_is_read(tmp_path):
    path = tmp_path / "published.json"
    coding = EASY | {
        "family": "coding_requirements",
        "hidden_profile": {"auth": "jwt", "deployment_target": "heroku"},
        "critical_fields": ["auth", "deployment_target"],
        "required_keys": ["stack", "scale", "auth", "datastore"],
        "field_keys": ["auth", "deployment_target"],
    }
    path.write_text(json.dumps([PUBLISHED_10005, coding]))
    first, second = load_scenarios(path)
    assert (first.family, first.hidden_profile["guest_count"]) == ("event_planning", 10)
    assert (second.family, second.required_keys) == ("coding", ("auth",))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{not json", "not JSON \\(line 1, column 2"),
        ("", "not JSON \\(line 1, column 1"),
        ("{}", "must be a non-empty JSON list"),
        ("[]", "must be a non-empty JSON list"),
        ("[3]", "scenario 0: must be a JSON object"),
        ("[" * 100_000, "not JSON that can be read"),
        (json.dumps([PUBLISHED_10005, PUBLISHED_10005 | {"family": "cooking"}]),
         "scenario 1: unknown family 'cooking': must be one of event_planning, "),
        (json.dumps([{k: v for k, v in EASY.items() if k != "request"}]), "scenario 0: missing key 'request'"),
        (json.dumps([EASY | {"max_steps": 0}]), "scenario 0: max_steps: Input should be greater than 0"),
        (json.dumps([EASY | {"max_steps": True}]), "scenario 0: max_steps: Input should be a valid integer"),
        (json.dumps([EASY | {"max_questions": "6"}]), "scenario 0: max_questions: Input should be a valid integer"),
        (json.dumps([EASY | {"seed": 7.0}]), "scenario 0: seed: Input should be a valid integer"),
        (json.dumps([EASY | {"request": " \n"}]), "scenario 0: request is blank"),
        (json.dumps([EASY | {"task_id": "extreme"}]), "task_id: Input should be 'easy', 'medium' or 'hard'"),
        (json.dumps([EASY | {"hidden_profile": {}}]), "scenario 0: hidden_profile is empty"),
        (json.dumps([EASY | {"hidden_profile": {"colour": "red"}}]), "event_planning has no field 'colour'"),
        (json.dumps([EASY | {"hidden_profile": {"date": True}}]), "scenario 0: hidden_profile.date: "),
        (json.dumps([EASY | {"hidden_profile": {"date": ""}}]), "scenario 0: hidden_profile.date is blank"),
        (json.dumps([EASY | {"hidden_profile": {"date": {"a": 1}}}]), "scenario 0: hidden_profile.date: "),
        (json.dumps([EASY | {"required_keys": ["time"]}]), "event_planning has no field 'time'"),
        (json.dumps([EASY | {"family": ["coding"]}]), "scenario 0: family: "),
    ],
)  # fmt: skip
def test_a_bad_scenario_file_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_scenarios(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="missing.json: cannot be read"):
        load_scenarios(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_scenarios(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'["\xff"]')
    with pytest.raises(ValueError, match="not UTF-8"):
        load_scenarios(tmp_path / "latin.json")


def test_a_scenario_cannot_be_changed():
    with pytest.raises(ValueError):
        held_out(1)[0].request = "x"
