"""A person plays in a terminal."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from env import play
from env.families import FAMILIES
from env.tools import format_call, parse_turn
from scenarios.generator import HELD_OUT_FILE, generate, held_out


@pytest.fixture
def typed(monkeypatch):
    """What the person types: lines, or an exception to raise in a line's place. Ctrl-D follows the last."""

    def set_lines(*lines):
        rest = iter(lines)

        def read(prompt=""):
            print(prompt, end="")
            line = next(rest, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)

    return set_lines


def test_an_episode_to_its_score(typed, capsys):
    scenario = generate(3, "medium", "event_planning")
    typed("What is the date?", "", "info", f"plan {json.dumps(scenario.hidden_profile)}")
    assert play.main(["--family", "event_planning", "--difficulty", "medium", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert f"Request: {scenario.request}" in out
    assert f"date: {scenario.hidden_profile['date']}." in out
    assert "[10 turns, 6 questions left]" in out
    assert "Left: 8 turns, 5 questions" in out
    assert "Ended by: plan" in out
    assert "output_correctness  1.000" in out
    assert "Traceback" not in out


@pytest.mark.parametrize("leave", [EOFError(), KeyboardInterrupt()])
def test_ctrl_d_and_ctrl_c_leave_cleanly(typed, capsys, leave):
    typed("What is the date?", leave)
    assert play.main(["--seed", "1"]) == 0
    assert capsys.readouterr().out.endswith("Left before the end: no score.\n")


@pytest.mark.parametrize(
    "line, call",
    [
        ("Which day?", ("ask_question", {"question": "Which day?"})),
        ("plan next week?", ("ask_question", {"question": "plan next week?"})),
        ('plan {"date": "today"}', ("propose_plan", {"plan": {"date": "today"}})),
        ("info", ("get_task_info", {})),
        ('ask_question("Which day?")', ("ask_question", {"question": "Which day?"})),
        (format_call("get_task_info", {}), ("get_task_info", {})),
        ('Is it "formal" (or not)?', ("ask_question", {"question": 'Is it "formal" (or not)?'})),
    ],
)
def test_what_may_be_typed(line, call):
    turn = parse_turn(play.as_turn(line))
    assert (turn.name, turn.arguments) == call


def test_a_raw_call_that_is_broken_stays_broken(typed, capsys):
    typed('ask_question("Which day?"')
    play.main(["--seed", "1"])
    assert "Invalid turn: unreadable arguments" in capsys.readouterr().out


def test_scenarios_come_from_a_file_where_one_is_given(typed, capsys):
    wanted = next(s for s in held_out(None) if s.family == "coding" and s.task_id == "hard")
    typed()
    args = ["--scenarios", str(HELD_OUT_FILE), "--family", "coding_requirements", "--seed", str(wanted.seed)]
    assert play.main(args) == 0
    assert f"Request: {wanted.request}\nFamily: coding" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, message",
    [
        (["--family", "cooking"], f"--family cooking: must be one of {', '.join(FAMILIES)}"),
        (["--difficulty", "x"], "--difficulty x: must be one of easy, medium, hard"),
        (["--scenarios", "none.json"], "none.json: cannot be read (No such file or directory)"),
        (["--scenarios", str(HELD_OUT_FILE), "--seed", "1"],
         f"--scenarios {HELD_OUT_FILE}: holds no scenario with that family, difficulty and seed"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(capsys, args, message):
    assert play.main(args) == 2
    assert capsys.readouterr().err == f"env.play: {message}\n"


def test_the_command_runs_and_ends_at_the_end_of_input():
    """As a program, with a byte on stdin that is not text."""
    done = subprocess.run(
        [sys.executable, "-m", "env.play", "--seed", "1"],
        input=b"what is the date \xff?\n",
        capture_output=True,
        cwd=Path(play.__file__).parent.parent,
    )
    assert done.returncode == 0 and done.stderr == b""
    assert b"Left before the end" in done.stdout


def test_output_that_is_not_read_on_ends_it_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "env.play", "--seed", "1"],
        stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, cwd=Path(play.__file__).parent.parent,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
