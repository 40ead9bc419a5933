"""Episodes as HTML. Pure: an episode in, text out. Whatever a model, a person or a file wrote goes through `esc`."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from demo.runs import Shown, Turn
from env.clarify import StopReason
from env.families import FAMILIES
from env.rubrics import Score, same_value
from env.tools import InvalidTurn
from env.user_simulator import spoken
from scenarios.schema import Scenario

ENDINGS = {
    None: "still running",
    StopReason.PLAN: "ended with a plan",
    StopReason.TURN_CAP: "ended without a plan: all turns used",
    StopReason.QUESTION_CAP: "ended without a plan: one question too many",
    StopReason.TOKEN_CAP: "ended without a plan: token budget used up",
    StopReason.CONTEXT_FULL: "ended without a plan: the model's context is full",
    StopReason.ENV_ERROR: "lost: the environment failed",
}

PARTS = {
    "card": {"output_correctness": 0.6, "efficiency": 0.2, "format_check": 0.2},
    "gated": {"field_match": 0.5, "info_gain": 0.2, "question_efficiency": 0.15, "hallucination_check": 0.15},
}
"""The rubrics' parts and weights, as the formulas in `env.rubrics` have them."""

MEANINGS = {
    "output_correctness": "share of the user's wishes that the plan meets, critical ones twice",
    "efficiency": "the same, times the share of questions left unasked",
    "format_check": "every required field, none empty, none unknown",
    "field_match": "share of the user's wishes that the plan meets",
    "info_gain": "share of critical wishes that questions revealed",
    "question_efficiency": "share of questions left unasked",
    "hallucination_check": "share of plan fields that the agent was told",
}


def esc(text: object) -> str:
    """Text for HTML, in elements and attributes. `$`, braces and backticks too: gr.HTML renders through a template."""
    safe = html.escape(str(text), quote=True)
    return safe.replace("$", "&#36;").replace("{", "&#123;").replace("}", "&#125;").replace("`", "&#96;")


def notice(text: str, kind: str = "empty") -> str:
    """A box with one message. `kind`: empty, error, wait."""
    return f'<div class="notice {esc(kind)}" role="status">{esc(text)}</div>'


def words(name: str) -> str:
    """A field's or a family's name for people."""
    return esc(name.replace("_", " "))


# -------------------------------------------------------------------------------------------------------- conversation


def conversation(shown: Shown, agent: str = "agent", user: str = "user", waiting: str = "") -> str:
    """The episode as messages, each question with what it revealed.

    `agent` and `user` name the two; one called "you" stands on the right, and nobody can tell a plan's right fields
    from wrong ones where that is the user. `waiting`: whose turn it is, while the episode runs.
    """
    blocks = [_message("user", user, esc(shown.scenario.request), _request_note(shown.scenario))]
    for turn in shown.turns:
        blocks.append(_agent_message(turn, shown, agent, judged=user != "you"))
        if turn.reply is not None:
            blocks.append(_message("user", user, esc(turn.reply), _reveals(turn)))
    ending = waiting or ENDINGS[shown.record.stop_reason]
    blocks.append(f'<p class="ending">{esc(ending)}</p>')
    if shown.differs:
        blocks.append('<p class="faint">Answers in this file are not those of this version’s simulated user.</p>')
    return f'<div class="talk{" mine" if user == "you" else ""}">{"".join(blocks)}</div>'


def _message(side: str, who: str, body: str, note: str = "", raw: str = "") -> str:
    fold = f"<details><summary>as written</summary><pre>{esc(raw)}</pre></details>" if raw else ""
    return f'<div class="msg {side}"><div class="who">{esc(who)}</div><div class="body">{body}</div>{note}{fold}</div>'


def _badge(kind: str, text: str) -> str:
    return f'<span class="badge {kind}">{text}</span>'


def _request_note(scenario: Scenario) -> str:
    told = FAMILIES[scenario.family].told_by(scenario.request)
    return f'<div class="notes">{"".join(_badge("good", f"tells {words(field)}") for field in told)}</div>'


def _reveals(turn: Turn) -> str:
    if isinstance(turn.call, InvalidTurn) or turn.call.name != "ask_question":
        return ""
    if turn.field is None:
        badge = _badge("flat", "reveals nothing")
    elif turn.known:
        badge = _badge("flat", f"{words(turn.field)}: known already")
    else:
        badge = _badge("good", f"reveals {words(turn.field)}")
    return f'<div class="notes">{badge}</div>'


def _agent_message(turn: Turn, shown: Shown, agent: str, judged: bool) -> str:
    if isinstance(turn.call, InvalidTurn):
        note = f'<div class="notes">{_badge("bad", "invalid turn: " + esc(turn.call.reason))}</div>'
        return _message("agent", agent, f"<pre>{esc(turn.text)}</pre>", note)
    if turn.call.name == "ask_question":
        return _message("agent", agent, esc(turn.call.arguments["question"]), raw=turn.text)
    if turn.call.name == "propose_plan":
        return _message("agent", agent, plan_table(turn.call.arguments["plan"], shown, judged), raw=turn.text)
    return _message("agent", agent, "<em>asks for the task once more</em>", raw=turn.text)


def plan_table(plan: dict[str, object], shown: Shown, judged: bool = True) -> str:
    """A proposed plan, each field with whether it is right (where it is `judged`), and whether the agent was told."""
    profile = shown.scenario.hidden_profile
    told = shown.record.revealed | set(FAMILIES[shown.scenario.family].told_by(shown.scenario.request))
    rows = []
    for field, value in plan.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if not judged:
            verdict = _badge("good", "told") if field in told else ""
        elif field not in profile:
            verdict = _badge("flat", "no wish")
        elif same_value(field, value, profile[field]):
            verdict = _badge("good", "✓ right")
        else:
            verdict = _badge("bad", "✗ wrong")
        invented = "" if field in told else _badge("warn", "never told")
        rows.append(f"<tr><th>{words(field)}</th><td>{esc(text)}</td><td>{verdict} {invented}</td></tr>")
    body = "".join(rows) or '<tr><td class="faint">an empty plan</td></tr>'
    return f'<div class="title">Plan</div><table class="fields">{body}</table>'


# ---------------------------------------------------------------------------------------------------- profile and score


def profile(shown: Shown, told: bool = True) -> str:
    """What the user really wants: hidden from the agent, which learns a field from its question or the request.

    `told`: with where this episode's agent learned it.
    """
    scenario, record = shown.scenario, shown.record
    by_question: dict[str | None, int] = {}
    for number, question in enumerate(record.questions, 1):
        by_question.setdefault(question.field, number)
    in_request = FAMILIES[scenario.family].told_by(scenario.request)
    rows = []
    for field, value in scenario.hidden_profile.items():
        if not told:
            source = ""
        elif field in by_question:
            source = _badge("good", f"question {by_question[field]}")
        elif field in in_request:
            source = _badge("good", "request")
        else:
            source = _badge("flat", "never told")
        star = ' <span class="star">★</span>' if field in scenario.critical_fields else ""
        rows.append(f"<tr><th>{words(field)}{star}</th><td>{esc(spoken(field, value))}</td><td>{source}</td></tr>")
    return (
        '<div class="card"><div class="title">Hidden profile</div>'
        f'<table class="fields">{"".join(rows)}</table><p class="faint">★ critical: counts twice</p></div>'
    )


def scores(shown: Shown, rewards: Sequence[float | None] = (), advantages: Sequence[float | None] = ()) -> str:
    """The score with the rubric's parts; in training also the reward beside the rest of its group."""
    s = shown.score
    facts = [count(len(shown.record.questions), "question"), count(shown.record.num_turns, "turn")]
    if shown.tokens is not None:
        facts.append(count(shown.tokens, "token"))
    group = _group(shown, rewards, advantages) if rewards else ""
    return (
        f'<div class="card"><div class="title">Score</div><div class="big">{s.card:.3f}</div>'
        f'<p class="faint">{esc(", ".join(facts))}</p>{_bars("card", s)}'
        f"<details><summary>gated rubric: {s.gated:.3f}</summary>{_bars('gated', s)}</details>{group}</div>"
    )


def _bars(rubric: str, s: Score) -> str:
    rows = []
    for part, weight in PARTS[rubric].items():
        value = getattr(s, part)
        rows.append(
            f'<div class="part" title="{esc(MEANINGS[part])}"><span>{words(part)}'
            f' <span class="faint">× {weight:g}</span></span><span class="bar"><i style="width:{100 * value:.0f}%"></i>'
            f"</span><b>{value:.2f}</b></div>"
        )
    return "".join(rows)


def _group(shown: Shown, rewards: Sequence[float | None], advantages: Sequence[float | None]) -> str:
    """The rewards of a group as columns from their lowest, the shown member marked."""
    known = [r for r in rewards if r is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    columns = []
    for member, (reward, advantage) in enumerate(zip(rewards, advantages)):
        height = 12 if reward is None or high == low else 12 + 88 * (reward - low) / (high - low)
        mark = ' class="me"' if member == shown.member else ""
        tip = f"member {member}: reward {_number(reward)}, advantage {_number(advantage)}"
        columns.append(f'<i{mark} style="height:{height:.0f}%" title="{esc(tip)}"></i>')
    return (
        f'<div class="title second">In its group of {len(rewards)}</div><div class="group">{"".join(columns)}</div>'
        f'<p>reward <b>{_number(shown.reward)}</b>, advantage <b>{_number(shown.advantage)}</b></p>'
        '<p class="faint">advantage = (reward − group mean) / (group std + 1e-4)</p>'
    )


def count(n: int, what: str) -> str:
    """Of something, in words: 1 question, 2 questions."""
    return f"{n} {what}" + ("" if n == 1 else "s")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:+.3f}"


def heading(shown: Shown) -> str:
    """Family, difficulty, budgets."""
    scenario = shown.scenario
    required = ", ".join(scenario.required_keys) or "any"
    return (
        f'<p class="heading"><b>{words(scenario.family)}</b> · {esc(scenario.task_id)} · {scenario.max_questions} '
        f"questions, {scenario.max_steps} turns at most · the plan needs {words(required)}</p>"
    )


def label(shown: Shown) -> str:
    """One line for a list of episodes (plain text)."""
    reward = "lost" if shown.reward is None else f"{shown.reward:+.2f}"
    ending = shown.record.stop_reason.value.replace("_", " ") if shown.record.stop_reason else "running"
    scenario = shown.scenario
    task = f"{scenario.family.replace('_', ' ')} {scenario.task_id}, group {shown.group}.{shown.member}"
    return f"{reward} · {task} · {ending}"
