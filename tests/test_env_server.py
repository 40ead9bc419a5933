"""The environment as an OpenEnv server: the same as in process, nothing hidden let out, OpenEnv's own checks pass."""

from __future__ import annotations

import contextlib
import json
import re
import shutil

import pytest

pytest.importorskip("openenv", reason='needs openenv: pip install -e ".[server]"')

import yaml  # noqa: E402
from websockets.sync.client import connect  # noqa: E402

from env.clarify import ClarifyEnv, StopReason  # noqa: E402
from env.policies import POLICIES, ScriptedPolicy, play  # noqa: E402
from env.rubrics import score  # noqa: E402
from env.server import NAME, VERSION, oracle, tasks  # noqa: E402
from env.server.client import ClarifyClient  # noqa: E402
from env.server.environment import ClarifyEnvironment  # noqa: E402
from env.server.models import ClarifyAction  # noqa: E402
from env.server.remote import RemoteEnvs  # noqa: E402
from env.tools import format_call  # noqa: E402
from scenarios.generator import held_out, training_scenario  # noqa: E402
from tests.env_servers import FOREIGN, HTTP, ROOT, Server, ask  # noqa: E402

TEXTS = [
    "",
    "nothing to call",
    "<think>never closed ask_question('Where?')",
    '<tool_call>{"name": "ask_question", "arguments": {"question": "Welcher Tag? \u2019 \U0001f389 \\ud83d\\ude00"}}',
    "caf\u00e9 \x00 \ud83d half a pair ask_question('When \ud83d?')",
    "ask_question(question='Which day?') ask_question('Where?')",
    'PROPOSE: {"date": null, "venue": ["x", {"y": 123456789012345678901234567890, "z": 1e300}], "other": -0.0}',
    "propose_plan({'plan': {'date': True, 'date': 'today'}})",
    "x" * 20_000,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server") / "log.txt")
    try:
        yield server.wait()
        log = server.log.read_text()
        assert "Traceback" not in log, log
    finally:
        server.stop()


def scripts(number):
    """(options of a reset, the scenario it plays, the turns) of so many episodes."""
    for i in range(number):
        if i % 10 == 9:
            scenario, options = FOREIGN, tasks.name_of(FOREIGN)
        elif i % 2:
            scenario, options = tasks.scenario_of("train", i), {"split": "train", "index": i}
        else:
            scenario, options = held_out(None)[i], {"split": "held_out", "index": i}
        if i % 5 == 4:
            yield options, scenario, [ClarifyAction(text=text, truncated=i % 3 == 0) for text in TEXTS[i % 7 :]]
        else:
            _, turns = play(ScriptedPolicy(POLICIES[i % 3], seed=i), scenario)
            yield options, scenario, [ClarifyAction(text=text) for text, _ in turns]


# ----------------------------------------------------------------------------------------------- in process and served


def test_200_episodes_say_the_same_in_process_and_over_the_wire(server):
    local, rewards, ends = ClarifyEnvironment(), [], set()
    with ClarifyClient(base_url=server.url).sync() as session:
        for number, (options, scenario, turns) in enumerate(scripts(200)):
            alone = ClarifyEnv(scenario)
            messages = alone.reset()
            here = local.reset(**options, episode_id=str(number))
            there = session.reset(**options, episode_id=str(number))
            assert here == there.observation and here.messages == messages
            for action in turns:
                if alone.record.stop_reason is not None:
                    break
                result = alone.step(session._step_payload(action).get("text", ""), action.truncated)
                here, there = local.step(action), session.step(action)
                assert here.model_dump(mode="json") == there.observation.model_dump(mode="json")
                assert (there.reward, there.done) == (here.reward, result.done)
                assert (here.result, here.stop_reason) == (result.reply, result.stop_reason)
                rewards.append(here.reward)
            if alone.record.stop_reason is None:
                finish = ClarifyAction(type="finish", stop_reason="context_full")
                alone.finish(StopReason.CONTEXT_FULL)
                here, there = local.step(finish), session.step(finish)
                assert here == there.observation
            assert here.reward == score(alone.record).card
            assert here.outcome.record(scenario, here.stop_reason) == alone.record
            assert local.state == session.state()
            ends.add(alone.record.stop_reason)
    assert all(isinstance(reward, float) and 0 <= reward <= 1 for reward in rewards)
    assert {StopReason.PLAN, StopReason.TURN_CAP, StopReason.CONTEXT_FULL} <= ends and max(rewards) > 0.5


def test_remote_environments_play_like_local_ones(server):
    envs = RemoteEnvs(server.url).check()
    for i, scenario in enumerate([*held_out(20), *(training_scenario(3, i) for i in range(20)), FOREIGN]):
        policy = ScriptedPolicy(POLICIES[i % 3], seed=i)
        assert play(policy, scenario, envs) == play(policy, scenario)
    env = envs(FOREIGN)
    with pytest.raises(RuntimeError, match="call reset"):
        env.record  # noqa: B018
    assert env.reset() == ClarifyEnv(FOREIGN).reset() and env.record.stop_reason is None
    assert env.step("?").reply == "Invalid turn: no tool call." and env.record.num_turns == 1
    record = env.finish(StopReason.TOKEN_CAP)
    assert record == env.record and record.stop_reason == StopReason.TOKEN_CAP and record.num_invalid_turns == 1
    for late in (lambda: env.step("?"), lambda: env.finish(StopReason.TOKEN_CAP)):
        with pytest.raises(RuntimeError, match="has ended"):
            late()
    env.reset()
    env.scenario = FOREIGN.model_copy(update={"hidden_profile": {"stack": "other"}})
    with pytest.raises(ValueError, match="another scenario"):
        env.finish(StopReason.TOKEN_CAP)


def test_ours_are_named_and_only_foreign_ones_are_sent():
    env = ClarifyEnvironment()
    for scenario in [*held_out(None), *(training_scenario(1, i) for i in range(50))]:
        assert set(tasks.name_of(scenario)) == {"seed", "difficulty", "family"}
        assert env.reset(**tasks.name_of(scenario)).messages == ClarifyEnv(scenario).reset()
    assert set(tasks.name_of(FOREIGN)) == {"scenario"}


def test_sessions_do_not_touch_each_other_and_seeds_decide(server):
    options = [{"seed": 1}, {"seed": 2}, {"seed": 1, "difficulty": "hard"}, {"split": "train", "index": 7}]
    turn = ClarifyAction(text='ask_question("Which day?")')
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(ClarifyClient(base_url=server.url).sync()) for _ in range(8)]
        firsts = [session.reset(**options[i % 4]).observation for i, session in enumerate(sessions)]
        assert firsts[:4] == firsts[4:] and len({str(first) for first in firsts}) == 4
        for session in sessions[:4]:  # the second four see nothing of what the first do
            session.step(turn)
            session.step(ClarifyAction(text="PROPOSE: {}"))
        later = [session.step(turn).observation for session in sessions[4:]]
        assert [o.questions_left for o in later] == [5] * 4 and all(not o.done for o in later)
        states = [session.state() for session in sessions]
        assert [state.step_count for state in states] == [2] * 4 + [1] * 4
    random_ones = {str(ClarifyEnvironment().reset().messages) for _ in range(20)}
    assert len(random_ones) > 3


# ---------------------------------------------------------------------------------------------------------- what leaks


def hidden(scenario, revealed):
    """Values that nobody has told, as they would stand in a text."""
    untold = {f: v for f, v in scenario.hidden_profile.items() if f not in revealed and isinstance(v, str)}
    return [str(value) for value in untold.values() if value.casefold() not in scenario.request.casefold()]


def test_no_frame_before_the_end_holds_what_is_hidden(server):
    from env.families import FAMILIES

    seen, checked = 0, 0
    with connect(server.url.replace("http", "ws") + "/ws", proxy=None) as connection:
        for index, scenario in enumerate(held_out(60)):
            told = set(FAMILIES[scenario.family].told_by(scenario.request))
            frames = [ask(connection, "reset", {"split": "held_out", "index": index})[0]]
            field = next(name for name in scenario.hidden_profile if name not in told)
            turns = [
                "?",
                "get_task_info()",
                f'ask_question("What is the {field.replace("_", " ")}?")',
                "get_task_info()",
            ]
            for turn in turns:
                frames += [ask(connection, "step", {"text": turn})[0], ask(connection, "state")[0]]
                frames.append(ask(connection, "step", {"type": "list_tools"})[0])
                frames.append(ask(connection, "reset", {"split": "nowhere", "index": 0})[0])  # an error, said aloud
            told.add(field)
            for frame in frames:
                assert "hidden" not in frame
                assert json.loads(frame)["data"].get("observation", {}).get("outcome") is None
                # What any episode shows: descriptions of the tools, and how difficult the scenario is.
                text = re.sub(r'"difficulty":"\w+"', "", frame.partition('"tools":[')[0])
                for value in hidden(scenario, told):
                    assert not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text), (value, frame)
                    checked += 1
            end, answer = ask(connection, "step", {"text": 'PROPOSE: {"date": "someday"}'})
            assert answer["data"]["observation"]["outcome"]["hidden_profile"] == scenario.hidden_profile
            seen += "hidden_profile" in end
    assert seen == 60 and checked > 500


def test_tasks_are_described_without_what_is_hidden(server):
    def post(path, **body):
        answer = HTTP.request("POST", f"{server.url}/{NAME}/{path}", json=body)
        return answer.status, answer.json()

    splits = HTTP.request("GET", f"{server.url}/{NAME}/splits").json()
    declared = yaml.safe_load((ROOT / "openenv.yaml").read_text())["validation"]["capabilities"]["declared_task_count"]
    assert {s["name"]: s["type"] for s in splits} == {"train": "train", "held_out": "test"}
    for split in declared:
        assert post("num_tasks", split=split) == (200, {"num_tasks": declared[split]})
    listed = post("tasks", split="held_out")[1]["tasks"]
    assert len(listed) == 250 and len(post("tasks", split="train")[1]["tasks"]) == tasks.PREVIEW
    assert post("task_range", split="held_out", start=-2, stop=None)[1]["tasks"] == listed[-2:]
    assert post("task", split="held_out", index=3)[1]["task"] == listed[3]
    for task, scenario in zip(listed, held_out(None)):
        assert task["request"] == scenario.request and not {"hidden_profile", "seed", "field_keys"} & set(task)
        assert not [
            v for v in hidden(scenario, ()) if re.search(rf"\b{re.escape(v)}\b", json.dumps(task | {"difficulty": ""}))
        ]
    for status, path, body in [
        (400, "task", {"split": "held_out", "index": 250}), (400, "task", {"split": "train", "index": -1}),
        (422, "task", {"split": "test", "index": 0}), (422, "task_range", {"split": "train"}),
    ]:  # fmt: skip
        code, answer = post(path, **body)
        assert code == status and "Traceback" not in str(answer)


# ------------------------------------------------------------------------------------------------------- OpenEnv's own


def test_the_readme_runs(server, capsys):
    text = (ROOT / "env/server/README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("http://127.0.0.1:8000", server.url)
    exec(code, {})
    assert "guest count: 20 people. 0.0 False" in capsys.readouterr().out


def test_openenv_validate_passes_on_the_manifest_and_on_the_running_server(server, tmp_path):
    from openenv.cli._validation import validate_running_environment
    from openenv.validation import Level, Verdict, run_validation

    shutil.copy(ROOT / "openenv.yaml", tmp_path)
    assert run_validation(tmp_path, max_level=Level.STATIC).verdict is Verdict.PASS
    report = validate_running_environment(server.url, timeout_s=20)
    assert report["passed"], report
    assert yaml.safe_load((ROOT / "openenv.yaml").read_text())["version"] == VERSION


def test_openenvs_runtime_checks_pass_on_a_server_that_is_a_process(server, tmp_path):
    """With the lines of openenv.yaml that want Docker, and a provider that starts no container."""
    from openenv.validation import Level, run_validation

    class Process:
        name, capabilities, supported_network_modes = "process", None, frozenset({"public", "no-network"})
        base_url = server.url

        def build(self, root, execution):
            assert (root / execution.dockerfile).is_file()
            return "sha256:" + "0" * 64

        def start(self, spec):
            return self

        def inspect(self):
            return {}

        def stop(self):
            pass

    from openenv.validation.types import ProviderCapability

    Process.capabilities = frozenset({ProviderCapability.IMAGE_BUILD})
    text = (ROOT / "openenv.yaml").read_text()
    assert text.count("  # execution:\n") == 1
    (tmp_path / "openenv.yaml").write_text(re.sub(r"(?m)^  # (execution:|  \w+: env/)", r"  \1", text))
    shutil.copytree(ROOT / "env/server", tmp_path / "env/server", ignore=shutil.ignore_patterns("__pycache__"))
    report = run_validation(tmp_path, max_level=Level.RUNTIME, provider=Process())
    status = {result.check_id: (result.status.value, result.evidence) for result in report.results}
    for check in ("startup", "reward_well_formed", "observation_schema", "state_contract"):
        assert status[f"runtime.{check}"][0] == "pass", status
    assert not [result for result, _ in status.values() if result in ("fail", "error")], status


def test_the_oracle_gets_the_maximum_and_doing_nothing_gets_nothing(server, capsys):
    assert oracle.main(["--url", server.url, "--tasks", "60"]) == 0
    assert "120 of 120" in capsys.readouterr().out
    env = ClarifyEnvironment()
    env.reset(split="held_out", index=0)
    assert env.step(ClarifyAction(type="finish")).reward == 0.0
    assert score(play(ScriptedPolicy("ask-all"), held_out(1)[0])[0]).card < 1  # the maximum needs what is hidden
    assert oracle.oracle_turn(FOREIGN) == format_call("propose_plan", {"plan": FOREIGN.hidden_profile})
