"""The evaluation report: right keys, right denominators, intervals that mean something."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest
import toy

from env import policies
from env.clarify import ClarifyEnv, EpisodeRecord, StopReason
from env.families import FAMILIES
from env.policies import POLICIES, ScriptedPolicy
from env.prompts import TOOLS
from env.rubrics import score
from grpo import console
from grpo.chat import ChatTokens
from grpo.engines import TurnOutput, TurnRequest
from grpo.engines.torch_engine import TorchEngine
from grpo.evaluate import (
    EVAL_SEED,
    RUBRIC_PARTS,
    bootstrap_interval,
    bootstrap_means,
    evaluate_model,
    evaluate_policy,
    report,
    scenarios_hash,
    spread,
    wilson_interval,
)
from scenarios.generator import generate, held_out
from scenarios.schema import Scenario


def play(scenario: Scenario, texts: list[str], end: StopReason | None = None) -> EpisodeRecord:
    env = ClarifyEnv(scenario)
    env.reset()
    for text in texts:
        env.step(text)
    return env.finish(end) if end else env.record


def honest(scenario: Scenario) -> list[str]:
    """Ask for every field of the profile, then propose it."""
    fields = scenario.hidden_profile
    return [f'ask_question("What is the {field}?")' for field in fields] + [f"propose_plan({json.dumps(fields)})"]


@pytest.fixture
def four() -> list[EpisodeRecord]:
    """A plan that passes, a plan that fails the format check, no plan after seven questions, an error."""
    scenarios = [generate(10_000 + i, "easy", family) for i, family in enumerate(
        ["event_planning", "event_planning", "coding", "support_triage"])]  # fmt: skip
    return [
        play(scenarios[0], honest(scenarios[0])),
        play(scenarios[1], ['propose_plan({"wrong_key": 1})']),
        play(scenarios[2], ['ask_question("Really?")'] * 7),
        play(scenarios[3], [], StopReason.ENV_ERROR),
    ]


def test_denominators_are_all_episodes(four):
    """The published evaluation looked a wrong key up, left out episodes without a plan, counted refused questions."""
    result = report(four, model="m")
    assert result["n"] == 4
    assert result["format_pass_rate"] == 1 / 4
    assert result["completion_rate"] == 2 / 4  # plan submitted, not score above 0
    asked = {"text": "Really?", "answer": "I am not sure what you mean.", "revealed": None}
    assert result["episodes"][2]["questions"] == [asked] * 6
    assert result["env_errors"] == 1
    assert {family: row["n"] for family, row in result["families"].items()} == {
        "event_planning": 2, "meeting_scheduling": 0, "medical_intake": 0, "support_triage": 1, "coding": 1,
    }  # fmt: skip
    first = score(four[0]).card
    assert result["avg_score"] == pytest.approx(first / 4)
    assert result["families"]["event_planning"]["mean"] == pytest.approx(first / 2)
    assert result["families"]["event_planning"]["max"] == pytest.approx(first)
    assert result["families"]["medical_intake"]["mean"] is None
    assert result["stop_reasons"] == {"plan": 0.5, "turn_cap": 0, "question_cap": 0.25, "token_cap": 0,
                                      "context_full": 0, "env_error": 0.25}  # fmt: skip


def test_questions_turns_and_hallucinations(four):
    result = report(four)
    asked = len(four[0].questions)
    assert result["mean_questions"] == (asked + 6) / 4
    assert result["mean_revealing_questions"] == asked / 4
    assert result["revealing_share"] == asked / (asked + 6)
    assert result["hallucination_rate"] == 0.5  # over the two plans: none and all of it invented
    assert result["invalid_turn_rate"] == 0
    assert result["truncation_rate"] == 0
    scenario = four[0].scenario
    cut = play(scenario, ["nothing", *honest(scenario)[:1]], StopReason.TOKEN_CAP)
    full = play(scenario, [], StopReason.CONTEXT_FULL)
    result = report([cut, full, four[0], four[0]])
    assert result["truncation_rate"] == 0.5
    assert result["invalid_turn_rate"] == 1 / (2 + 2 * four[0].num_turns)


@pytest.mark.parametrize("rubric", ["card", "gated"])
def test_both_rubrics_and_their_parts_whichever_is_asked_for(four, rubric):
    result = report(four, rubric=rubric)
    assert result["avg_score"] == result["rubrics"][rubric]["avg_score"]
    for name in RUBRIC_PARTS:
        rows = [row["scores"][name] for row in result["episodes"]]
        assert result["rubrics"][name]["avg_score"] == pytest.approx(sum(rows) / 4)
    card = result["rubrics"]["card"]["parts"]
    assert result["rubrics"]["card"]["avg_score"] == pytest.approx(
        0.6 * card["output_correctness"] + 0.2 * card["efficiency"] + 0.2 * card["format_check"]
    )
    gated = result["rubrics"]["gated"]["parts"]
    assert result["rubrics"]["gated"]["avg_score"] == pytest.approx(
        0.5 * gated["field_match"] + 0.2 * gated["info_gain"] + 0.15 * gated["question_efficiency"]
        + 0.15 * gated["hallucination_check"]
    )  # fmt: skip


def test_report_is_strict_json_and_holds_the_episodes(four):
    odd = dataclasses.replace(four[1], plan={"venue": float("nan"), "guest_count": float("inf")})
    talk = [{"role": "user", "content": "hello"}]
    result = report([*four, odd], conversations=[talk] * 5, model="m", temperature=0.7)
    again = json.loads(json.dumps(result, allow_nan=False), parse_constant=pytest.fail)
    assert again == result
    row = result["episodes"][0]
    assert row["family"] == "event_planning" and row["task_id"] == "easy" and row["seed"] == 10_000
    assert row["plan"] == four[0].scenario.hidden_profile and row["stop_reason"] == "plan"
    assert row["questions"][0]["revealed"] in four[0].scenario.hidden_profile
    assert row["conversation"] == talk
    assert result["temperature"] == 0.7


def test_an_empty_evaluation_has_no_numbers():
    result = report([])
    assert result["n"] == 0 and result["avg_score"] is None and result["completion_interval"] is None


def test_hash_depends_on_what_is_played_and_on_its_order():
    scenarios = held_out(6)
    assert scenarios_hash(scenarios) == scenarios_hash(held_out(6))
    assert len({scenarios_hash(s) for s in (scenarios, scenarios[:5], scenarios[::-1])}) == 3
    changed = scenarios[0].model_copy(update={"request": "Something else."})
    assert scenarios_hash([changed]) != scenarios_hash(scenarios[:1])


def test_spread_takes_from_every_family_and_difficulty():
    """A file sorted by family, as the published one is."""
    scenarios = sorted(held_out(None), key=lambda s: s.family)
    assert {s.family for s in spread(scenarios, 5)} == set(FAMILIES)
    cells = [(s.family, s.task_id) for s in spread(scenarios, 50)]
    counts = [cells.count(cell) for cell in set(cells)]
    assert len(counts) == 15 and max(counts) - min(counts) <= 1
    assert spread(scenarios, 250) == scenarios and len(spread(scenarios, 7)) == 7


# --------------------------------------------------------------------------------------------------------- intervals


def test_wilson_interval_against_published_anchors():
    """9 of 50 and 7 of 50 completed: the published base and its best run are within noise of each other."""
    assert wilson_interval(9, 50) == pytest.approx([0.0977, 0.3080], abs=5e-4)
    assert wilson_interval(7, 50) == pytest.approx([0.0695, 0.2619], abs=5e-4)
    low, high = wilson_interval(0, 10)
    assert low == 0 and 0.25 < high < 0.3
    assert wilson_interval(10, 10)[1] == pytest.approx(1)


def test_bootstrap_interval_is_deterministic_and_near_the_normal_one():
    values = list(np.random.default_rng(1).normal(size=400))
    interval = bootstrap_interval(values, range(400))
    assert interval == bootstrap_interval(values, range(400))
    half = 1.96 * np.std(values) / 20
    assert interval == pytest.approx([np.mean(values) - half, np.mean(values) + half], abs=0.15 * half)


def test_bootstrap_of_many_scenarios_takes_little_memory_and_is_what_one_draw_gives():
    values = np.random.default_rng(1).random(1500)
    tracemalloc.start()
    means = bootstrap_means(values, range(1500))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    drawn = np.random.default_rng(0).integers(0, 1500, (10_000, 1500))
    assert np.array_equal(means, values[drawn].sum(axis=1) / 1500) and peak < drawn.nbytes / 3


def test_bootstrap_interval_covers_the_true_mean():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(60):
        low, high = bootstrap_interval(list(rng.normal(size=50)), range(50))
        covered += low < 0 < high
    assert 50 <= covered <= 60  # 95 % of 60 is 57


def test_scenarios_of_one_seed_are_one_draw():
    values = [float(i % 10) for i in range(30)]
    doubled = bootstrap_interval(values * 3, list(range(30)) * 3)
    assert doubled == pytest.approx(bootstrap_interval(values, range(30)), abs=1e-9)
    independent = bootstrap_interval(values * 3, range(90))
    assert independent[1] - independent[0] < 0.7 * (doubled[1] - doubled[0])
    assert bootstrap_interval(values, [7] * 30) is None and bootstrap_interval([], []) is None


def test_bootstrap_weighs_clusters_by_their_size():
    """A seed with three scenarios counts three times in a draw, and not as one mean."""
    low, high = bootstrap_interval([0.0, 1.0, 1.0, 1.0], [1, 2, 2, 2])
    assert (low, high) == (0.0, 1.0)
    sizes = bootstrap_interval([0.0] * 10 + [1.0] * 30, [*range(10), *[i // 3 + 10 for i in range(30)]])
    assert sizes[0] < 0.75 < sizes[1]


# ------------------------------------------------------------------------------------------------------------- table


def test_table_shows_families_average_interval_and_both_rubrics(four, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    console.print_report(report(four, model="tiny", temperature=0.7))
    out = capsys.readouterr().out
    for family in FAMILIES:
        assert family in out
    assert "temperature 0.7" in out and "50% [15%, 85%]" in out and "card rubric" in out and "gated rubric" in out
    assert "environment errors" in out


# ------------------------------------------------------------------------------------------------------------ playing


class ScriptedEngine:
    """An engine whose model always writes the given turns: texts[scenario index][turn]."""

    max_context = 4096
    num_active = 0

    def __init__(self, tokenizer, texts: list[list[str]]):
        self.tokenizer, self.texts = tokenizer, texts
        self.requests: list[TurnRequest] = []
        self.queue: list[TurnRequest] = []
        self.sampling = None

    def start(self, step, sampling=None, before=()):
        self.step_number, self.sampling = step, sampling

    def submit(self, request):
        self.requests.append(request)
        self.queue.append(request)

    def step(self):
        request = self.queue.pop()  # the last submitted first: episodes end in another order than they were given
        text = self.texts[request.key[0]][request.turn]
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        return [TurnOutput(request.key, ids, (0.0,) * len(ids), "stop")]

    def release(self, key):
        pass


def test_a_model_that_writes_what_a_script_writes_gets_the_same_report():
    """Through tokens or through text: one environment, one report."""
    scenarios = held_out(15)
    expected = evaluate_policy("ask-all", scenarios)
    turns = [policies.play(ScriptedPolicy("ask-all", expected["seed"]), scenario)[1] for scenario in scenarios]
    tokenizer = toy.make_tokenizer()
    engine = ScriptedEngine(tokenizer, [[text for text, _ in played] for played in turns])
    progress = []
    result = evaluate_model(
        engine, ChatTokens(tokenizer, TOOLS), scenarios, model="m", temperature=0.7, max_completion_len=4000,
        progress=lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    for key in ("avg_score", "families", "rubrics", "stop_reasons", "scenarios", "mean_questions", "episodes"):
        assert result[key] == expected[key], key
    assert progress[-1] == (15, 15)
    assert (engine.sampling.temperature, engine.sampling.seed, engine.step_number) == (0.7, EVAL_SEED, 0)
    assert {request.key for request in engine.requests} == {(index, 0) for index in range(15)}  # groups of one


def test_evaluation_of_a_real_model_is_repeatable_whatever_the_run_seed():
    tokenizer = toy.make_tokenizer()
    model, chat, scenarios = toy.make_model(tokenizer), ChatTokens(tokenizer, TOOLS), held_out(2)

    def played(run_seed: int, **options) -> dict:
        engine = TorchEngine(model, chat.eos_ids, max_context=2000, slots=2, seed=run_seed)
        options = {"temperature": 1.0, "max_completion_len": 12, "model": "toy"} | options
        return evaluate_model(engine, chat, scenarios, **options)

    first = played(run_seed=1)
    assert first == played(run_seed=2)
    assert first["truncation_rate"] == 1 and first["avg_score"] == 0  # random weights say nothing in 12 tokens
    assert first["episodes"] != played(1, seed=5)["episodes"]
    greedy = played(1, temperature=0.0)
    assert greedy["episodes"] == played(1, temperature=0.0, seed=5)["episodes"]

    progress = []
    both = played(1, also_greedy=True, progress=lambda *numbers: progress.append(numbers))
    beside = both.pop("greedy")
    assert both == first and beside == {key: value for key, value in greedy.items() if key != "episodes"}
    assert progress[-1] == (4, 4) and (2, 4) in progress and progress == sorted(progress)


def test_baselines_rank_as_they_should():
    scores = {name: evaluate_policy(name, held_out(50)) for name in POLICIES}
    assert scores["ask-all"]["avg_score"] > 0.75 > scores["guess"]["avg_score"] > scores["random"]["avg_score"]
    assert scores["ask-all"]["hallucination_rate"] == 0 and scores["guess"]["mean_questions"] == 0
    assert scores["ask-all"]["format_pass_rate"] == 1
    assert all(row["n"] == 10 for row in scores["guess"]["families"].values())


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="unknown policy 'asker'"):
        evaluate_policy("asker", held_out(1))
