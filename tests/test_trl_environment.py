"""The environment in TRL: what TRL calls plays our episodes, and a run of TRL's trainer on it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from env import trl_environment
from env.clarify import ClarifyEnv
from env.prompts import TOOLS, first_messages
from env.rubrics import reward
from env.tools import format_call
from env.trl_environment import ClarifyTools
from scenarios.generator import training_scenario


def test_the_tools_are_described_as_in_our_prompts():
    methods = {name for name in vars(ClarifyTools) if not name.startswith("_")} - {"reset", "get_reward"}
    ours = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
    assert methods == set(ours)
    for name in methods:
        theirs = get_json_schema(getattr(ClarifyTools, name))["function"]
        assert theirs["parameters"]["properties"].keys() == ours[name]["parameters"]["properties"].keys()
        assert theirs["description"] == ours[name]["description"]


def test_an_episode_is_ours_and_goes_on_earning_nothing_after_its_end():
    tools = ClarifyTools()
    for index in range(5):
        scenario = training_scenario(0, index)
        assert trl_environment.rows(5)[index] == {"prompt": first_messages(scenario), "index": index}
        tools.reset(index=index, prompt="...")
        assert tools.get_reward() == -0.1  # an episode that never proposes a plan
        alone = ClarifyEnv(scenario)
        alone.reset()
        replies = [tools.ask_question("Which day?"), tools.get_task_info()]
        for reply, call in zip(replies, [("ask_question", {"question": "Which day?"}), ("get_task_info", {})]):
            assert reply == alone.step(format_call(*call)).reply
        plan = {"plan": dict(list(scenario.hidden_profile.items())[1:])}
        alone.step(format_call("propose_plan", plan))
        assert tools.propose_plan(**plan) == "The task is over."
        earned = tools.get_reward()
        assert earned == reward(alone.record) > 0
        assert tools.propose_plan(plan=scenario.hidden_profile) == tools.ask_question("Where?") == "The task is over."
        assert tools.get_reward() == earned


def test_bad_flags_are_one_line(capsys):
    assert trl_environment.main(["--episodes", "5", "--generations", "2"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--episodes" in err


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason='needs trl: pip install -e ".[trl]"')
def test_trl_trains_on_it(tmp_path):
    flags = ["--steps", "2", "--episodes", "4", "--generations", "4", "--max-completion-len", "128"]
    # A process of its own: TRL would take folders of the tests for packages of the same names.
    done = subprocess.run(
        [sys.executable, "-m", "env.trl_environment", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(-0.1 <= row["reward"] <= 1 for row in steps)
    assert max(row["tools/call_frequency"] for row in steps) > 0.5
