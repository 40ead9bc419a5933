"""The live tab: a person plays the agent, or the user of a model."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr

from demo import chat, views
from demo.runs import Unreadable, find_runs
from env.families import FAMILIES
from grpo.config import UsageError
from grpo.hints import model_name
from scenarios.generator import DIFFICULTIES, HELD_OUT_SEEDS, generate

ANY = "any"
MOST_FIELDS = max(len(family.fields) for family in FAMILIES.values())
HEIGHT = 520  # pixels of a conversation, so that the line to type in stays in sight
TASKS = [(name.replace("_", " "), name) for name in FAMILIES]


def tab(root: Path, model: str) -> gr.Dropdown:
    """Build it, inside the page's tab. Returns the choice of a model."""
    with gr.Row():
        who = gr.Radio(
            [("the agent: I ask and plan", "agent"), ("the user: a model asks me", "user")],
            value="agent", label="I play", elem_id="who", min_width=280,
        )  # fmt: skip
        models = gr.Dropdown(
            choices=_models(root, model), value=model, label="Model", elem_id="model", min_width=240,
            allow_custom_value=False,
        )  # fmt: skip
    with gr.Column() as as_agent:
        _agent(models)
    with gr.Column(visible=False) as as_user:
        _user(models)
    who.input(
        lambda side: (gr.Column(visible=side == "agent"), gr.Column(visible=side == "user")), who, [as_agent, as_user]
    )
    return models


@cache
def _played_once(model: str) -> None:
    try:
        chat.model_plays(chat.load(model), generate(HELD_OUT_SEEDS.stop))
    except UsageError:
        pass  # who plays with it is told


def warm_up(model: str) -> None:
    """Behind the first screen: load what a first live turn needs, so that it comes at once."""
    threading.Thread(target=_played_once, args=(model,), daemon=True).start()


def _models(root: Path, model: str) -> list[tuple[str, str]]:
    choices = {model: model, "tiny": "tiny"}
    try:
        for run in find_runs(root):
            if (run.folder / "final" / "config.json").is_file():
                choices[f"{run.name}, trained"] = str(run.folder / "final")
    except Unreadable:
        pass
    return list(choices.items())


# ---------------------------------------------------------------------------------------------- the person is the agent


def _agent(models: gr.Dropdown) -> None:
    game = gr.State(None)
    with gr.Row():
        family = gr.Dropdown([ANY, *TASKS], value=ANY, label="Task", min_width=160, elem_id="family")
        difficulty = gr.Dropdown([ANY, *DIFFICULTIES], value=ANY, label="Difficulty", min_width=160)
        new = gr.Button("New scenario", min_width=160, elem_id="new", elem_classes="beside")
    head = gr.HTML(elem_id="agent_head")
    talk = gr.HTML(max_height=HEIGHT, autoscroll=True, elem_id="agent_talk")
    with gr.Row(visible=False) as asking:
        question = gr.Textbox(
            label="Your question", placeholder="Ask for one thing at a time", max_length=chat.LONGEST, scale=4,
            min_width=220, elem_id="question",
        )  # fmt: skip
        ask = gr.Button("Ask", variant="primary", scale=1, min_width=100, elem_id="ask", elem_classes="beside")
    with gr.Accordion("Your plan: leave blank what you were not told", open=True, visible=False) as planning:
        with gr.Row():
            fields = [
                gr.Textbox(visible=False, max_length=chat.LONGEST, min_width=200, elem_id=f"field{i}")
                for i in range(MOST_FIELDS)
            ]
        propose = gr.Button("Propose this plan", variant="primary", elem_id="propose")
    with gr.Row(elem_classes="pair"):
        result = gr.HTML(min_width=300, elem_id="result")
        rival = gr.HTML(min_width=300, elem_id="rival")

    outputs = [game, talk, asking, question, planning, result, rival]
    page = gr.context.Context.root_block
    assert page  # this is called inside it
    gr.on(
        [new.click, page.load], _start, [family, difficulty],
        [game, head, talk, asking, question, planning, *fields, result, rival], show_progress="hidden",
    )  # fmt: skip
    for event in (ask.click, question.submit):
        event(_on_ask, [game, question, models], outputs, show_progress="hidden")
    propose.click(_on_propose, [game, models, *fields], outputs, show_progress="hidden")


def _start(family: str, difficulty: str) -> tuple:
    seed = HELD_OUT_SEEDS.stop + random.randrange(10**9)  # none that evaluations use
    scenario = generate(seed, *(None if value == ANY else value for value in (difficulty, family)))
    playing = chat.AgentGame(scenario)
    names = FAMILIES[scenario.family].fields
    boxes = [_box(name, name in scenario.required_keys) for name in names]
    boxes += [gr.Textbox(visible=False, value="")] * (MOST_FIELDS - len(boxes))
    shown, there = playing.shown(), gr.update(visible=True)
    return playing, views.heading(shown), _agent_talk(playing), there, "", there, *boxes, "", ""


def _play_on(playing: chat.AgentGame, model: str) -> Iterator[tuple]:
    """What follows a turn: the conversation, and after the last one the score and the model's own try."""
    there = gr.update(visible=not playing.over)
    common = (playing, _agent_talk(playing), there, "", there)
    if not playing.over:
        yield *common, "", ""
        return
    result = '<div class="title">You</div>' + views.scores(playing.shown()) + views.profile(playing.shown())
    yield *common, result, views.notice(f"{model} plays the same scenario ...", "wait")
    try:
        played = chat.model_plays(chat.load(model), playing.env.scenario)
    except UsageError as error:
        yield *common, result, views.notice(str(error), "error")
        return
    title = f'<div class="title">{views.esc(model_name(model))} on the same scenario</div>'
    yield *common, result, title + views.scores(played) + views.conversation(played)


def _on_ask(playing: chat.AgentGame | None, text: str, model: str) -> Iterator[tuple]:
    line = chat.said(text)
    if playing is None or playing.over or not line:
        yield (gr.skip(),) * 7
        return
    playing.ask(line)
    yield from _play_on(playing, model)


def _on_propose(playing: chat.AgentGame | None, model: str, *values: str) -> Iterator[tuple]:
    if playing is None or playing.over:
        yield (gr.skip(),) * 7
        return
    plan = {name: chat.said(text) for name, text in zip(FAMILIES[playing.env.scenario.family].fields, values)}
    if not any(plan.values()):
        gr.Info("Fill in at least one field of the plan.")
        yield (gr.skip(),) * 7
        return
    playing.propose(plan)
    yield from _play_on(playing, model)


def _box(name: str, required: bool) -> Any:
    return gr.Textbox(label=name.replace("_", " ") + (" (needed)" if required else ""), value="", visible=True)


def _agent_talk(playing: chat.AgentGame) -> str:
    record = playing.env.record
    questions = playing.env.scenario.max_questions - len(record.questions)
    turns = playing.env.scenario.max_steps - record.num_turns
    waiting = "" if playing.over else f"your turn: {questions} questions and {turns} turns left"
    return views.conversation(playing.shown(), agent="you", user="simulated user", waiting=waiting)


# ----------------------------------------------------------------------------------------------- the person is the user


def _user(models: gr.Dropdown) -> None:
    game = gr.State(None)
    first = next(iter(FAMILIES))
    with gr.Row():
        family = gr.Dropdown(TASKS, value=first, label="Task", min_width=220, scale=1, elem_id="user_family")
        request = gr.Textbox(
            label="Your request: be vague", value=FAMILIES[first].requests[0].text, max_length=chat.LONGEST, scale=3,
            min_width=240, elem_id="request",
        )  # fmt: skip
        start = gr.Button("Send request", variant="primary", min_width=140, elem_id="start", elem_classes="beside")
    talk = gr.HTML(
        views.notice("Send a request: the model then asks you, up to six questions, and proposes a plan."),
        max_height=HEIGHT, autoscroll=True, elem_id="user_talk",
    )  # fmt: skip
    with gr.Row(visible=False) as answering:
        answer = gr.Textbox(label="Your answer", max_length=chat.LONGEST, scale=4, min_width=220, elem_id="answer")
        send = gr.Button("Answer", variant="primary", scale=1, min_width=100, elem_id="send", elem_classes="beside")

    def on_start(family: str, text: str, model: str) -> tuple:
        line = chat.said(text)
        if not line:
            return None, views.notice("Write a request first."), gr.Row(visible=False), ""
        try:
            playing = chat.ModelGame(chat.load(model), chat.PersonAsUser(family, line), seed=random.randrange(2**31))
        except UsageError as error:
            return None, views.notice(str(error), "error"), gr.Row(visible=False), ""
        playing.advance()
        return _user_view(playing)

    def on_answer(playing: chat.ModelGame | None, text: str) -> tuple:
        line = chat.said(text)
        if playing is None or playing.question is None or not line:
            return (gr.skip(),) * 4
        assert isinstance(playing.env, chat.PersonAsUser)
        playing.env.said = line
        playing.advance()
        return _user_view(playing)

    outputs = [game, talk, answering, answer]
    start.click(on_start, [family, request, models], outputs, show_progress="minimal", concurrency_id="torch")
    request.submit(on_start, [family, request, models], outputs, show_progress="minimal", concurrency_id="torch")
    for event in (send.click, answer.submit):
        event(on_answer, [game, answer], outputs, show_progress="minimal", concurrency_id="torch")
    family.input(lambda name: random.choice(FAMILIES[name].requests).text, family, request, show_progress="hidden")


def _user_view(playing: chat.ModelGame) -> tuple:
    waiting = "" if playing.question is None else "the model waits for your answer"
    shown = views.conversation(playing.shown(), agent="model", user="you", waiting=waiting)
    return playing, shown, gr.Row(visible=playing.question is not None), ""
