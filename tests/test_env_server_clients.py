"""The environment server and clients that are wrong, hostile, greedy or silent; its tools over MCP, its pages."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

pytest.importorskip("openenv", reason='needs openenv: pip install -e ".[server]"')

import yaml  # noqa: E402
from websockets.exceptions import ConnectionClosed  # noqa: E402
from websockets.sync.client import connect  # noqa: E402

from env.clarify import ClarifyEnv, StopReason  # noqa: E402
from env.server import NAME, VERSION  # noqa: E402
from env.server.app import ServerLimits  # noqa: E402
from env.server.environment import ClarifyEnvironment, as_turn  # noqa: E402
from env.server.models import ClarifyAction  # noqa: E402
from env.server.remote import RemoteEnvs  # noqa: E402
from env.tools import TOOL_NAMES  # noqa: E402
from scenarios.generator import generate, held_out  # noqa: E402
from tests.env_servers import FOREIGN, HTTP, ROOT, ask, in_thread  # noqa: E402


@pytest.fixture(scope="module")
def url():
    with in_thread(ServerLimits(), web=True) as address:
        yield address


@pytest.fixture
def socket(url):
    with connect(url.replace("http", "ws") + "/ws", proxy=None) as connection:
        yield connection


def test_too_early_too_late_and_nonsense_are_errors_and_the_session_goes_on(url, socket):
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
        answer = HTTP.request("POST", f"{url}/{path}", json=body)
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


def test_hostile_messages_cost_their_session_at_most(url):
    address = url.replace("http", "ws") + "/ws"
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


def test_tools_over_mcp_are_turns_of_the_session(url):
    def rpc(method, **params):
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return HTTP.request("POST", f"{url}/mcp", json=request).json()

    declared = yaml.safe_load((ROOT / "openenv.yaml").read_text())["validation"]["capabilities"]["declared_tools"]
    assert tuple(declared) == TOOL_NAMES
    assert [tool["name"] for tool in rpc("tools/list")["result"]["tools"]] == declared
    call = {"name": "ask_question", "arguments": {"question": "Where?"}}
    assert "has not started" in json.dumps(rpc("tools/call", **call))
    session = rpc("openenv/session/create")["result"]["session_id"]
    with connect(url.replace("http", "ws") + f"/ws?session_id={session}", proxy=None) as connection:
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


def test_health_metadata_schema_and_page(url):
    def get(path):
        answer = HTTP.request("GET", url + path)
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
    page = HTTP.request("POST", f"{url}/web/reset", json={}).json()["observation"]
    assert page["messages"][0]["role"] == "system"
    step = {"action": {"type": "call_tool", "tool_name": "propose_plan", "arguments": {"plan": {"date": "<b>"}}}}
    end = HTTP.request("POST", f"{url}/web/step", json=step).json()
    drawing = ClarifyEnvironment().render_web(end["observation"] | {"done": True})
    assert "The user wanted" in drawing and "<b>" not in drawing


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


def test_a_session_of_its_own_for_each_episode_and_used_again(url):
    envs = RemoteEnvs(url)
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
