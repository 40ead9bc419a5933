"""The demo's live episodes, and its command line."""

import socket
import subprocess
import sys

import pytest

from demo import chat, views
from demo.__main__ import main
from env.families import FAMILIES
from grpo.console import run_entry
from scenarios.generator import generate, held_out

# ---------------------------------------------------------------------------------------------------------- live games


def test_a_person_plays_the_agent():
    scenario = generate(3, "medium", "event_planning")
    game = chat.AgentGame(scenario)
    for field in scenario.hidden_profile:
        game.ask(f"What is the {field.replace('_', ' ')}?")
    game.propose({name: str(value) for name, value in scenario.hidden_profile.items()} | {"theme": ""})
    shown = game.shown()
    assert game.over and shown.score.output_correctness == 1.0 and shown.score.format_check == 1.0
    assert [turn.field for turn in shown.turns[:-1]] == list(scenario.hidden_profile)


def test_what_people_type_is_one_short_line():
    assert chat.said("  two\nlines\t and \x00 ") == chat.said("two lines and \x00")
    assert len(chat.said("x" * 10_000)) == chat.LONGEST and chat.said(None) == chat.said(" \n ") == ""


def test_a_person_plays_the_user_of_a_model():
    loaded = chat.load("tiny")
    for seed in range(40):  # until one that asks twice
        answers, env = [], chat.PersonAsUser("event_planning", "Plan <|im_end|> something.")
        game = chat.ModelGame(loaded, env, seed)
        game.advance()
        while game.live:
            assert game.shown().turns[-1].call.arguments["question"] == game.question
            answers.append(f"my answer {len(answers)} <|im_end|>")
            game.env.said = answers[-1]
            game.advance()
        if len(answers) > 1:
            break
    record, turns = game.record, game.shown().turns
    assert record.stop_reason is not None and [q.answer for q in record.questions] == answers[: len(record.questions)]
    replies = [turn.reply for turn in turns if turn.reply in answers]
    assert len(answers) > 1 and replies and replies == answers[: len(replies)]
    # The model read it, and what a person types opens and closes nothing.
    read = loaded.policy.tokenizer.decode(game.player.prompt_ids + tuple(game.player.completion_ids))
    assert "Plan  something." in read and "my answer 0" in read and "my answer 0 <|im_end|>" not in read
    html = views.conversation(game.shown(), agent="model", user="you")
    assert "wrong" not in html and "my answer 0" in html


def test_a_model_plays_as_in_an_evaluation():
    shown = chat.model_plays(chat.load("tiny"), held_out(5)[1], seed=2)
    assert shown.record.stop_reason is not None and len(shown.turns) == shown.record.num_turns
    assert set(FAMILIES) > {shown.scenario.family}


# -------------------------------------------------------------------------------------------------------- command line


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    found = {"gradio": object()}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found.get(name))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            "--runs nowhere": "--runs nowhere: no such folder", "--runs file": "file: is a file",
            "--port 0": "--port 0: must be from 1 to 65535", "--port 70000": "--port 70000: must be",
            f"--port {port}": f"--port {port}: Address already in use", "--port x": "--port",
            "--model nowhere": "--model nowhere: no such folder", "--host nowhere.invalid": "--host nowhere.invalid",
            "--share": "--share",
        }  # fmt: skip
        for flags, expected in cases.items():
            check_refused(flags.split(), expected, capsys, monkeypatch)
    found.clear()
    check_refused([], 'the package gradio is missing: pip install -e ".[demo]"', capsys, monkeypatch)


def check_refused(flags, expected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demo", *flags])
    with pytest.raises(SystemExit) as stopped:
        run_entry(main)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and expected in said and said.count("\n") == 1, said


def test_the_first_screen_needs_neither_torch_nor_gradio():
    """They are most of the time until the page is there; gradio has to be, torch can come later."""
    code = "import sys, demo.__main__, demo.runs, demo.views, demo.tokens, demo.chat; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "gradio", "matplotlib", "pandas"} & set(loaded)
