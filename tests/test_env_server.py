"""The environment as an OpenEnv server: the same as in process, nothing hidden let out, limits kept."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time

import pytest

pytest.importorskip("openenv", reason='needs openenv: pip install -e ".[server]"')

import yaml  # noqa: E402
from websockets.exceptions import ConnectionClosed  # noqa: E402
from websockets.sync.client import connect  # noqa: E402

from env.clarify import ClarifyEnv, StopReason  # noqa: E402
from env.policies import POLICIES, ScriptedPolicy, play  # noqa: E402
from env.rubrics import score  # noqa: E402
from env.server import NAME, VERSION, oracle, tasks  # noqa: E402
from env.server.app import ServerLimits  # noqa: E402
from env.server.client import ClarifyClient  # noqa: E402
from env.server.environment import ClarifyEnvironment, as_turn  # noqa: E402
from env.server.models import ClarifyAction  # noqa: E402
from env.server.remote import RemoteEnvs  # noqa: E402
from env.tools import TOOL_NAMES, format_call  # noqa: E402
from scenarios.generator import generate, held_out, training_scenario  # noqa: E402
from scenarios.schema import Scenario  # noqa: E402
from tests.env_servers import HTTP, ROOT, Server, in_thread  # noqa: E402

FOREIGN = Scenario(
    family="coding", task_id="easy", request="Build an API.", hidden_profile={"stack": "go+gin", "scale": "small"},
    critical_fields=["stack"], required_keys=["stack"], field_keys=["stack", "scale"], max_steps=3, max_questions=2,
    seed=10_000,
)  # fmt: skip

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


@pytest.fixture
def socket(server):
    with connect(server.url.replace("http", "ws") + "/ws", proxy=None) as connection:
        yield connection


def ask(connection, type, data=None):
    """The answer to one message, as text and as JSON."""
    connection.send(json.dumps({"type": type} | ({} if data is None else {"data": data})))
    text = connection.recv(timeout=20)
    return text, json.loads(text)


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


# ------------------------------------------------------------------------------------------------------------ protocol


def test_too_early_too_late_and_nonsense_are_errors_and_the_session_goes_on(server, socket):
    def refused(type, data, words):
        text, answer = ask(socket, type, data)
        assert answer["type"] == "error" and words in text, text
        assert "Traceback" not in text and 'File "' not in text and "reward" not in answer["data"]

    refused("step", {"text": "get_task_info()"}, "has not started")
    for options, words in [
        ({"seed": -1}, "seed -1"), ({"seed": "x"}, "seed x"), ({"seed": 2**63}, "seed"),
        ({"split": "train"}, "give both"), ({"split": "train", "index": 10**9}, "from 0 to 99999"),
        ({"seed": 1, "difficulty": "none"}, "difficulty"),
        ({"seed": 1, "family": "none"}, "family"), ({"episode_id": "x" * 300}, "episode_id"), ({"sed": 1}, "'sed'"),
        ({"scenario": {"family": "coding"}}, "scenario: "), ({"scenario": 3}, "scenario: "),
        ({"scenario": FOREIGN.model_dump() | {"max_steps": 1000}}, "max_steps 1000"),
    ]:  # fmt: skip
        refused("reset", options, words)
    assert ask(socket, "reset", {"seed": 3, "episode_id": "mine"})[1]["data"]["reward"] is None
    refused("step", {"txt": "x"}, "VALIDATION_ERROR")
    refused("step", {"type": "fly"}, "VALIDATION_ERROR")
    refused("step", {"type": "finish", "stop_reason": "plan"}, "VALIDATION_ERROR")
    refused("fly", {}, "UNKNOWN_TYPE")
    socket.send("{")
    assert "INVALID_JSON" in socket.recv(timeout=20)
    assert ask(socket, "state")[1]["data"]["step_count"] == 0  # none of it was a turn
    assert ask(socket, "step", {"type": "finish"})[1]["data"]["done"]
    refused("step", {"text": "get_task_info()"}, "has ended")
    refused("step", {"type": "finish"}, "has ended")
    state = ask(socket, "state")[1]["data"]
    assert (state["step_count"], state["reward"], state["episode_id"]) == (1, 0.0, "mine")
    for path, body, status in [("step", {"action": {"text": "x"}}, 409), ("reset", {"sed": 1}, 422), ("step", {}, 422)]:
        answer = HTTP.request("POST", f"{server.url}/{path}", json=body)
        assert answer.status == status and b"Traceback" not in answer.data


HOSTILE = [
    "[]", "3", "null", '"x"', "", "[" * 50_000, '{"a":' * 50_000, b"\x00\xff", '{"type": 3}', '{"type": ["reset"]}',
    '{"type": "reset", "data": []}', '{"type": "reset", "data": {"seed": 1e400}}',
    '{"type": "reset", "data": {"seed": 1.5}}',
    '{"type": "reset", "data": {"seed": true}}', '{"type": "reset", "data": {"seed": NaN}}',
    '{"type": "reset", "data": {"self": 1, "seed": 1}}', '{"type": "reset", "data": {"split": ["train"], "index": 1}}',
    '{"type": "reset", "data": {"split": "train", "index": true}}',
    '{"type": "reset", "data": {"seed": %s}}' % ("9" * 5000),
    '{"type": "reset", "data": {"scenario": {"family": "\\u0000", "request": "\\ud800"}}}',
    '{"type": "step", "data": {"text": 3}}', '{"type": "step", "data": {"text": "\\ud800"}}',
    '{"type": "step", "data": 3}',
    '{"type": "step", "data": {"type": "call_tool", "tool_name": "x", "arguments": []}}', '{"type": "mcp", "data": {}}',
    '{"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "fly"}}}',
    '{"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "ask_question"}}}',
]  # fmt: skip


def test_hostile_messages_cost_their_session_at_most(server):
    address = server.url.replace("http", "ws") + "/ws"
    with connect(address, proxy=None) as bystander:
        ask(bystander, "reset", {"seed": 1})
        for message in HOSTILE:
            with connect(address, proxy=None) as connection:
                connection.send(message)
                with contextlib.suppress(ConnectionClosed):
                    answer = connection.recv(timeout=20)
                    assert "error" in answer and "Traceback" not in answer and 'File "' not in answer, (message, answer)
                    assert "observation" not in json.loads(answer)["data"], message
        assert ask(bystander, "step", {"text": "?"})[1]["data"]["observation"]["turns_left"] == 9


def test_tools_over_mcp_are_turns_of_the_session(server):
    def rpc(method, **params):
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return HTTP.request("POST", f"{server.url}/mcp", json=request).json()

    declared = yaml.safe_load((ROOT / "openenv.yaml").read_text())["validation"]["capabilities"]["declared_tools"]
    assert tuple(declared) == TOOL_NAMES
    assert [tool["name"] for tool in rpc("tools/list")["result"]["tools"]] == declared
    call = {"name": "ask_question", "arguments": {"question": "Where?"}}
    assert "has not started" in json.dumps(rpc("tools/call", **call))
    session = rpc("openenv/session/create")["result"]["session_id"]
    with connect(server.url.replace("http", "ws") + f"/ws?session_id={session}", proxy=None) as connection:
        ask(connection, "reset", {"split": "held_out", "index": 0})
        answer = json.dumps(rpc("tools/call", session_id=session, **call))
        assert ClarifyEnv(held_out(1)[0]).reset() and ("venue: " in answer or "No preference" in answer)
        assert "hidden" not in answer
        plan = {"name": "propose_plan", "arguments": {"plan": held_out(1)[0].hidden_profile}}
        rpc_over_ws = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": plan}
        assert "The episode has ended: plan." in ask(connection, "mcp", rpc_over_ws)[0]
        state = ask(connection, "state")[1]["data"]
        assert state["stop_reason"] == "plan" and 0.9 < state["reward"] < 1
        assert "has ended" in json.dumps(rpc("tools/call", session_id=session, **call))
    assert rpc("openenv/session/close", session_id=session)["result"]["closed"]


def test_a_tool_call_is_a_turn_whatever_its_arguments_hold():
    for question in (
        "Which day?",
        "<think>Which day?",
        "</think> Which day? </tool_call>",
        '"} ask_question("Where?")',
    ):
        env = ClarifyEnvironment()
        env.reset(seed=5, difficulty="hard", family="event_planning")
        call = ClarifyAction(type="call_tool", tool_name="ask_question", arguments={"question": question})
        observation = env.step(call)
        assert observation.questions_left == 5 and observation.turns_left == 11
    assert "<" not in as_turn("ask_question", {"question": "<think>"})
    env.reset(seed=5)
    for bad in (
        {"tool_name": "fly"},
        {"tool_name": "ask_question"},
        {"tool_name": "propose_plan", "arguments": {"plan": 3}},
    ):
        assert env.step(ClarifyAction(type="call_tool", **bad)).result.startswith("Invalid turn: ")
    assert [tool.name for tool in env.step(ClarifyAction(type="list_tools")).tools] == list(TOOL_NAMES)
    assert env.state.step_count == 4 and env.state.turns_left == 5


def test_health_metadata_schema_and_page(server):
    def get(path):
        answer = HTTP.request("GET", server.url + path)
        assert answer.status == 200, path
        return answer

    assert get("/health").json() == {"status": "healthy"}
    metadata = get("/metadata").json()
    assert metadata["name"] == NAME and metadata["version"] == VERSION and "vague request" in metadata["description"]
    schema = get("/schema").json()
    assert {"text", "truncated", "tool_name"} <= set(schema["action"]["properties"])
    assert {"messages", "result", "outcome"} <= set(schema["observation"]["properties"])
    assert {"step_count", "questions_left"} <= set(schema["state"]["properties"])
    assert b"Ask before you act" in get("/web/").data
    page = HTTP.request("POST", f"{server.url}/web/reset", json={}).json()["observation"]
    assert page["messages"][0]["role"] == "system"
    step = {"action": {"type": "call_tool", "tool_name": "propose_plan", "arguments": {"plan": {"date": "<b>"}}}}
    end = HTTP.request("POST", f"{server.url}/web/step", json=step).json()
    drawing = ClarifyEnvironment().render_web(end["observation"] | {"done": True})
    assert "The user wanted" in drawing and "<b>" not in drawing


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


# -------------------------------------------------------------------------------------------------------------- limits


def test_limits_on_sessions_messages_bodies_and_silence():
    limits = ServerLimits(max_sessions=2, max_message_bytes=5000, idle_seconds=1.0)
    with in_thread(limits) as url:
        ws = url.replace("http", "ws") + "/ws"
        with connect(ws, proxy=None) as first:
            ask(first, "reset", {"seed": 1})
            with connect(ws, proxy=None) as second:
                ask(second, "reset", {"seed": 1})
                with connect(ws, proxy=None) as third:
                    assert "CAPACITY_REACHED" in third.recv(timeout=20)
                    with pytest.raises(ConnectionClosed):
                        third.recv(timeout=20)
                with pytest.raises(ConnectionClosed) as closed:
                    ask(second, "step", {"text": "x" * 6000})
                assert closed.value.rcvd.code == 1009
            ask(first, "state")
            with pytest.raises(ConnectionClosed) as closed:  # pings are answered all the time, and do not count
                first.recv(timeout=20)
            assert closed.value.rcvd.code == 1001 and "idle" in closed.value.rcvd.reason
        with connect(ws, proxy=None) as fourth:  # the places are free again
            assert ask(fourth, "reset", {"seed": 1})[1]["type"] == "observation"
        for chunked in (False, True):
            body = json.dumps({"action": {"text": "x" * 6000}}).encode()
            answer = HTTP.request(
                "POST", url + "/step", body=iter([body]) if chunked else body,
                headers={"content-type": "application/json"}, chunked=chunked,
            )  # fmt: skip
            assert answer.status == 413 and b"5000 bytes" in answer.data
        with pytest.raises(ValueError, match="takes on 2 sessions, 3 are needed"):
            RemoteEnvs(url).check(3)


def test_pings_are_answered_while_a_model_computes():
    with in_thread(ServerLimits(), ws_ping_interval=0.1, ws_ping_timeout=0.4) as url:
        env = RemoteEnvs(url)(FOREIGN)
        env.reset()
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:  # nothing here waits, so the sessions' thread must take its turn
            sum(range(1000))
        assert env.step("?").reply == "Invalid turn: no tool call."


def test_a_session_of_its_own_for_each_episode_and_used_again(server):
    envs = RemoteEnvs(server.url)
    three = [envs(scenario) for scenario in held_out(3)]
    for env in three:
        env.reset()
    assert len({id(env._session) for env in three}) == 3 and not envs._idle
    for env in three:
        env.finish(StopReason.TOKEN_CAP)
    assert len(envs._idle) == 3
    again = envs(FOREIGN)
    again.reset()
    assert len(envs._idle) == 2
    assert generate(1) == generate(1)
