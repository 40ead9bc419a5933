"""The demo without its page: reading runs, episodes as HTML, token numbers."""

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from demo import tokens, views
from demo.runs import Shown, Unreadable, evaluation, find_runs, most_telling, open_run, step_episodes, turn_between
from env.clarify import ClarifyEnv, StopReason
from env.policies import ScriptedPolicy, play
from env.rubrics import reward
from env.tools import format_call
from grpo import rollout_record
from grpo.metrics import conversation, read_log
from scenarios.generator import generate, held_out
from tests.test_resume import quick, start  # noqa: F401 (quick is a fixture)

HOSTILE = "<script>hacked=1</script><img src=x onerror=hacked=1> ${hacked=1} {{value}} `x` **bold** \"'&amp;"
SHORT = dict(num_steps=3, max_completion_len=160, num_iterations=1, eval_limit=6, save_every=2, keep_checkpoints=9)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three steps, checkpoints of steps 2 and 3, everything recorded."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    assert start(folder, **SHORT) == 0
    return open_run(folder)


@pytest.fixture(scope="module")
def scored(finished):
    return tokens.scored(finished, 3)


# -------------------------------------------------------------------------------------------------------- reading runs


def rows_of(run, step):
    return [json.loads(line) for line in run.completions(step).read_text().splitlines()]


def test_episodes_are_what_the_run_saw(finished):
    """Played again from their texts alone, they get the reward and the end that training wrote down."""
    for step in finished.steps:
        for shown, row in zip(step_episodes(finished, step), rows_of(finished, step), strict=True):
            assert reward(shown.record) == pytest.approx(row["reward"], abs=1e-12)
            assert shown.record.stop_reason.value == row["stop_reason"] and not shown.differs
            assert len(shown.record.questions) == row["questions"]
            assert (shown.group, shown.member, shown.advantage) == (row["group"], row["member"], row["advantage"])
    for which in ("before", "after"):
        document = json.loads((finished.folder / f"eval_{which}.json").read_text())
        for shown, row in zip(evaluation(finished, which), document["episodes"], strict=True):
            assert shown.score.card == row["scores"]["card"] and shown.score.gated == row["scores"]["gated"]
            assert [q.field for q in shown.record.questions] == [q["revealed"] for q in row["questions"]]


def write_step(folder, *rows):
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / "completions" / "step_00001.jsonl").write_text(text)
    return open_run(folder)


def row_of(scenario, turns, **changes):
    """A line of completions/ with `turns` of (text, reply)."""
    return {
        "group": 0, "member": 0, "family": scenario.family, "task_id": scenario.task_id, "request": scenario.request,
        "hidden_profile": dict(scenario.hidden_profile), "reward": 0.5, "advantage": 1.0, "stop_reason": "plan",
        "questions": 0, "tokens": 9, "conversation": conversation(scenario, turns),
    } | changes  # fmt: skip


def ask(question):
    return format_call("ask_question", {"question": question})


@pytest.mark.parametrize("index", range(15))
def test_a_scenario_comes_back_from_its_line(tmp_path, index):
    """All that the rubric reads: budgets, required and critical fields."""
    scenario = held_out(15)[index]
    record, turns = play(ScriptedPolicy("ask-all"), scenario)
    (shown,) = step_episodes(write_step(tmp_path, row_of(scenario, turns, questions=len(record.questions))), 1)
    assert shown.scenario.model_copy(update={"seed": scenario.seed}) == scenario
    assert [turn.field for turn in shown.turns[:-1]] == [question.field for question in record.questions]
    assert shown.turns[-1].reply is None and shown.record.plan == record.plan


def test_a_turn_says_what_it_revealed(tmp_path):
    scenario = generate(7, "medium", "event_planning")
    field = next(iter(scenario.hidden_profile))
    env = ClarifyEnv(scenario)
    env.reset()
    texts = [ask(f"What is the {field}?"), ask(f"And the {field}?"), ask("Hm?"), "prose", ask("What is the theme?")]
    turns = [(text, env.step(text).reply) for text in texts]
    row = row_of(scenario, turns, stop_reason="context_full", questions=4)
    (shown,) = step_episodes(write_step(tmp_path, row), 1)
    expected = [(field, False), (field, True), (None, False), (None, False)]
    assert [(turn.field, turn.known) for turn in shown.turns[:4]] == expected
    html = views.conversation(shown)
    name = views.words(field)
    for badge in (f"reveals {name}", f"{name}: known already", "reveals nothing", "invalid turn: no tool call"):
        assert badge in html
    assert html.count("reveals nothing") == (1 if "theme" in scenario.hidden_profile else 2)


def test_a_last_turn_that_was_cut_off_is_not_run(tmp_path):
    """A whole plan in a text that a length limit ended, a question that was asked, and one that was not."""
    scenario = generate(7, "medium", "event_planning")
    plan = format_call("propose_plan", {"plan": dict(scenario.hidden_profile)})
    cases = [(plan, 0, False), (ask("What is the date?"), 1, False), (ask("What is the date?"), 0, True)]
    rows = [row_of(scenario, [(text, None)], stop_reason="token_cap", questions=n) for text, n, _ in cases]
    for shown, (_, asked, cut) in zip(step_episodes(write_step(tmp_path, *rows), 1), cases, strict=True):
        assert shown.record.stop_reason == StopReason.TOKEN_CAP and not shown.record.plan_accepted
        assert len(shown.record.questions) == asked
        assert (shown.record.num_invalid_turns == 1) == (cut or not asked)
    assert not shown.differs


def test_another_answer_in_the_file_is_said(tmp_path):
    scenario = generate(7, "medium", "event_planning")
    turns = [(ask("Hm?"), "I do not answer."), (format_call("propose_plan", {"plan": {"date": "today"}}), None)]
    (shown,) = step_episodes(write_step(tmp_path, row_of(scenario, turns, questions=1)), 1)
    assert shown.differs and "not those of this version" in views.conversation(shown)


GOOD = row_of(generate(7), [(ask("Hm?"), "I am not sure what you mean.")], stop_reason="turn_cap", questions=1)


@pytest.mark.parametrize(
    "line",
    [
        "{", "[" * 100_000, "null", "[]", "{}", '"text"',
        {key: value for key, value in GOOD.items() if key != "hidden_profile"},
        GOOD | {"family": "unknown"}, GOOD | {"hidden_profile": {}}, GOOD | {"hidden_profile": 3},
        GOOD | {"conversation": []}, GOOD | {"conversation": None}, GOOD | {"stop_reason": "boredom"},
        GOOD | {"conversation": [{"role": "user", "content": "Plan fields: date"}]},
        GOOD | {"conversation": [{"role": "user", "content": 7}]}, GOOD | {"group": None},
        GOOD | {"conversation": GOOD["conversation"][:1] + [{"role": "assistant", "content": 3}]},
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, line):
    run = write_step(tmp_path, GOOD, line)
    with pytest.raises(Unreadable, match=r"step_00001\.jsonl: line 2: damaged") as error:
        step_episodes(run, 1)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_missing_and_damaged_files_are_named(tmp_path):
    run = write_step(tmp_path, GOOD)
    with pytest.raises(Unreadable, match="step_00002.jsonl: No such file"):
        step_episodes(run, 2)
    with pytest.raises(Unreadable, match="eval_before.json: No such file"):
        evaluation(run, "before")
    damaged = {"{": "damaged, not JSON", "[]": "no episodes", '{"episodes": [{}]}': "episode 1: damaged"}
    for text, reason in damaged.items():
        (tmp_path / "eval_before.json").write_text(text)
        with pytest.raises(Unreadable, match=f"eval_before.json: .*{reason}"):
            evaluation(run, "before")
    (tmp_path / "rollouts").mkdir()
    run.rollouts(1).write_bytes(b"nothing")
    with pytest.raises(Unreadable, match=r"step-000001\.json\.gz: not a rollout record"):
        tokens.recorded(open_run(tmp_path), 1)
    with pytest.raises(Unreadable, match="step 5 were not kept.*steps 1 to 1"):
        tokens.recorded(open_run(tmp_path), 5)


@pytest.mark.parametrize("about, reward, reason", [
    ({}, 0.5, "says nothing usable of its step"), ({"config": {"beta": -1.0}}, 0.5, "of another version .*--beta -1"),
    ({"config": {"a_knob_of_old": 1}}, 0.5, "of another version of this program .unknown setting"),
    ({"config": {}}, math.nan, "damaged .rewards must be finite"), ({"config": {}}, "much", "damaged"),
])  # fmt: skip
def test_a_record_without_usable_numbers_is_named(finished, tmp_path, about, reward, reason):
    [group, *_] = rollout_record.load(finished.rollouts(1)).groups
    group = dataclasses.replace(group, episodes=[dataclasses.replace(each, reward=reward) for each in group.episodes])
    rollout_record.save(write_step(tmp_path, GOOD).rollouts(1), [group], step=1, **about)
    with pytest.raises(Unreadable, match=rf"step-000001\.json\.gz: {reason}"):
        tokens.recorded(open_run(tmp_path), 1)


def test_runs_are_found_newest_first(tmp_path):
    for age, name in enumerate(("new", "old")):
        write_step(tmp_path / name, GOOD)
        os.utime(tmp_path / name / "completions", (1e9 - age, 1e9 - age))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert [run.name for run in find_runs(tmp_path)] == ["new", "old"]
    assert [run.name for run in find_runs(tmp_path / "old")] == ["old"]
    assert find_runs(tmp_path / "nothing") == find_runs(tmp_path / "model") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(Unreadable, match="is a file"):
        find_runs(tmp_path / "file")


def test_the_first_choice_has_something_to_show(finished, tmp_path):
    assert finished.recorded == (1, 2, 3) and finished.first_choice == 1
    assert write_step(tmp_path, GOOD).first_choice == 1
    assert open_run(tmp_path / "empty").first_choice is None
    guess, best = (Shown(*_played(name)) for name in ("guess", "ask-all"))
    assert most_telling([guess, best, best]) == 1 and most_telling([]) == 0


def _played(policy):
    record, turns = play(ScriptedPolicy(policy), held_out(5)[0])
    return record, tuple(turn_between(record, record, text, reply) for text, reply in turns)


# ---------------------------------------------------------------------------------------------------------------- HTML


class Page(HTMLParser):
    """Elements, attributes and text of a page, as a browser sees them."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.names, self.said = set(), set(), []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        self.said += [value or "" for _, value in attrs]

    def handle_data(self, data):
        self.said.append(data)


TAGS = {"div", "span", "p", "b", "i", "em", "pre", "table", "tr", "th", "td", "details", "summary"}
ATTRIBUTES = {"class", "style", "title", "role", "data-tip", "data-by"}


def hostile_episode():
    scenario = generate(7, "hard", "event_planning").model_copy(update={"request": HOSTILE})
    scenario = scenario.model_copy(update={"hidden_profile": dict(scenario.hidden_profile) | {"theme": HOSTILE}})
    env = ClarifyEnv(scenario)
    env.reset()
    plan = {HOSTILE: HOSTILE, "theme": HOSTILE, "date": {HOSTILE: [HOSTILE]}}
    turns = []
    for text in (HOSTILE, f"{HOSTILE}(", ask(HOSTILE), ask("theme?"), format_call("propose_plan", {"plan": plan})):
        before = env.record
        turns.append(turn_between(before, env.record, text, env.step(text).reply))
        turns[-1] = turn_between(before, env.record, text, turns[-1].reply)
    return Shown(env.record, tuple(turns), reward=0.5, advantage=math.nan)


def test_what_was_written_is_text_and_nothing_else():
    shown = hostile_episode()
    token = tokens.Token(3, HOSTILE, True, 0.1, -0.1)
    numbers = tokens.Scored([], [], [], [], HOSTILE, HOSTILE)
    for html, times in (
        (views.conversation(shown), 8), (views.profile(shown), 1), (views.scores(shown, [0.5, None], [1.0, None]), 0),
        (views.heading(shown), 0), (views.notice(HOSTILE, HOSTILE), 2),
        (tokens.tokens_html([token, token], "advantage", 1.0, 1), 2), (tokens.legend("kl", 1.0, numbers), 2),
    ):  # fmt: skip
        page = Page(html)
        assert page.tags <= TAGS and page.names <= ATTRIBUTES, html
        assert sum(part.count("<script>hacked=1</script>") for part in page.said) >= times
        # gr.HTML renders what it gets through a template.
        assert not any(char in html for char in "${}`")


def test_weights_of_the_parts_are_the_rubrics():
    for seed in range(40):
        policy = ScriptedPolicy(random.Random(seed).choice(["random", "ask-all", "guess"]), seed)
        record, _ = play(policy, generate(seed))
        score = Shown(record, ()).score
        for rubric, parts in views.PARTS.items():
            total = sum(weight * getattr(score, part) for part, weight in parts.items())
            assert total == pytest.approx(score.total(rubric))


def test_plan_and_profile_say_what_was_told():
    scenario = generate(3, "hard", "event_planning")
    env = ClarifyEnv(scenario)
    env.reset()
    env.step(ask("What is the venue?"))
    plan = {"venue": scenario.hidden_profile["venue"], "date": "some day", "theme": "x"}
    env.step(format_call("propose_plan", {"plan": plan}))
    shown = Shown(env.record, ())
    rows = views.plan_table(plan, shown).split("<tr>")[1:]
    assert "✓ right" in rows[0] and "never told" not in rows[0]
    assert "✗ wrong" in rows[1] and "never told" in rows[1]
    assert "right" not in "".join(views.plan_table(plan, shown, judged=False).split("<tr>"))
    assert "question 1" in views.profile(shown) and "never told" in views.profile(shown)
    assert "question 1" not in views.profile(shown, told=False) and "venue" in views.profile(shown, told=False)


# --------------------------------------------------------------------------------------------------------- token view


def test_the_example_of_episode_tokens():
    from types import SimpleNamespace

    episode = SimpleNamespace(prompt_ids=(1, 2), completion_ids=(5, 6, 9), loss_mask=(1, 1, 0),
                              sampler_logprobs=(-0.5, -0.25, 0.0))  # fmt: skip
    numbers = tokens.Scored([[], [-1.0, -2.0]], [[], [-3.0, -4.0]], [[], [0.1, 0.2]], [[], [-0.5, -1.75]], "k3", "")
    found = tokens.episode_tokens(episode, 0.7, str, numbers, 1)
    assert [token.id for token in found] == [1, 2, 5, 6, 9]
    assert [token.trained for token in found] == [False, False, True, True, False]
    assert found[2] == tokens.Token(5, "5", True, 0.7, -0.5, -1.0, -3.0, 0.1, -0.5)
    assert found[3] == tokens.Token(6, "6", True, 0.7, -0.25, -2.0, -4.0, 0.2, -1.75)
    assert found[4] == tokens.Token(9, "9", False)
    tip = tokens.tip(found[3])
    for text in ("'6'", "id 6", "+0.7000", "-0.250000", "-2.000000", "-4.000000", "0.2 nats", "-1.75 nats"):
        assert text in tip
    assert tokens.episode_tokens(episode, 0.7, str)[2].kl is None


def test_numbers_are_those_of_the_log(finished, scored):
    row = read_log(finished.folder / "log_history.json")[2]
    kl = [value for values in scored.kl for value in values]
    gap = [abs(value) for values in scored.gap for value in values]
    assert sum(kl) / len(kl) == pytest.approx(row["kl"], rel=1e-4) and row["kl"] > 1e-5
    assert sum(gap) / len(gap) == pytest.approx(row["sampler_gap/mean"], abs=2e-6) and max(gap) < 1e-4
    record = tokens.recorded(finished, 3)
    assert [len(values) for values in scored.kl] == [episode.num_trained for episode in record.episodes]
    for i, line in enumerate(rows_of(finished, 3)):
        assert record.advantages[i] == pytest.approx(line["advantage"], abs=1e-6)
    for i, episode in enumerate(record.episodes):
        sampled = [value for value, mask in zip(episode.sampler_logprobs, episode.loss_mask) if mask]
        assert scored.policy[i] == pytest.approx([s + g for s, g in zip(sampled, scored.gap[i])], abs=1e-5)


def test_the_gap_is_trainer_minus_sampler(finished, tmp_path):
    """On a record whose sampler was surer of every token by half a nat."""
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    path = open_run(folder).rollouts(3)
    record = rollout_record.load(path)

    def surer(episode):
        values = tuple(p + 0.5 * mask for p, mask in zip(episode.sampler_logprobs, episode.loss_mask))
        return dataclasses.replace(episode, sampler_logprobs=values)

    groups = [dataclasses.replace(group, episodes=tuple(map(surer, group.episodes))) for group in record.groups]
    rollout_record.save(path, groups, **record.about)
    gaps = [gap for values in tokens.scored(open_run(folder), 3).gap for gap in values]
    assert gaps == pytest.approx([-0.5] * len(gaps), abs=1e-3) and len(gaps) > 50


def test_a_step_is_scored_once(finished, scored, monkeypatch):
    monkeypatch.setattr("grpo.replay.prepare", None)
    assert tokens.scored(finished, 3) is scored
    assert [tokens.steps_to_repeat(finished, step) for step in (1, 2, 3)] == [0, 1, 0]
    assert tokens.is_small(finished)


def test_a_run_without_reference_is_compared_with_its_base(tmp_path):
    folder = tmp_path / "free"
    assert start(folder, **SHORT | dict(num_steps=2, beta=0.0, save_every=1, warmup_steps=0, eval_limit=0)) == 0
    kl = [value for values in tokens.scored(open_run(folder), 2).kl for value in values]
    assert min(kl) >= 0 and max(kl) > 1e-6


def test_text_of_tokens_is_the_tokenizers(finished):
    record = tokens.recorded(finished, 3)
    decode = tokens.decoder(finished.folder, record.model)
    text = "".join(decode(i) for i in record.episodes[0].prompt_ids)
    assert record.episodes[0].record.scenario.request in text and "<|im_start|>" in text


def test_colours():
    token = tokens.Token(1, "a", True, advantage=-2.0, kl=0.25, gap=1e-7)
    assert tokens.colour(token, "mask", 0) and not tokens.colour(tokens.Token(1, "a", False), "mask", 0)
    opacity = {by: float(tokens.colour(token, by, 1.0).rsplit(",")[-1][:-1]) for by in ("advantage", "kl")}
    assert opacity == {"advantage": 0.55, "kl": 0.275}  # never stronger than that; the root of a quarter is a half
    assert tokens.colour(token, "advantage", 2.0).startswith("rgba(213,94,0")
    assert tokens.colour(token, "gap", 1e-7).startswith("rgba(0,114,178")
    assert tokens.colour(token, "kl", 0.0) == ""
    assert "gradient" in tokens.colour(tokens.Token(1, "a", True, kl=math.nan), "kl", 1.0)
    assert tokens.largest([1.0, -3.0, math.nan, math.inf]) == 3.0 and tokens.largest([]) == 0.0


def test_a_server_s_threads_may_all_be_the_first(finished):
    """Imports and models, from a fresh process: transformers stands neither two imports nor two loads at once."""
    code = f"""
import threading, sys
from pathlib import Path
from demo import chat, tokens
from demo.runs import open_run
run, done, start = open_run(Path({str(finished.folder)!r})), [], threading.Barrier(4)
def work(what):
    start.wait()
    what()
    done.append(what)
for what in (lambda: tokens.recorded(run, 3), lambda: chat.load("tiny"), lambda: tokens.scored(run, 3),
             lambda: tokens.decoder(run.folder, "tiny")):
    threading.Thread(target=work, args=(what,)).start()
for thread in threading.enumerate()[1:]:
    thread.join()
sys.exit(len(done) != 4)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
