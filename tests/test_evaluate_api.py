"""`eval.py --api-base` at a local endpoint: the same report, many episodes at once, and what becomes of trouble."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from env.policies import ScriptedPolicy
from env.tools import format_call, parse_turn
from grpo import chat_api
from grpo.evaluate import evaluate_policy
from scenarios.generator import held_out
from tests.stand_in import StandIn, chat_answer, serve

PATH = "/v1/chat/completions"
POLICY = ScriptedPolicy("ask-all")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Tests have less of it."""
    monkeypatch.setattr(chat_api, "RETRIES", chat_api.RETRIES.new(backoff_factor=0, backoff_jitter=0))
    monkeypatch.setattr(chat_api, "READ_SECONDS", 20.0)


def as_text(message) -> str:
    """A message of the conversation as local models have it."""
    calls = [each["function"] for each in message.get("tool_calls", [])]
    return "\n".join(format_call(call["name"], json.loads(call["arguments"])) for call in calls) or message["content"]


def native(body, tokens=(50, 10)):
    """The scripted policy ask-all, as an endpoint that knows tools."""
    call = parse_turn(POLICY.act([message | {"content": as_text(message)} for message in body["messages"]]))
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    calls = [{"id": f"c{len(body['messages'])}", "type": "function", "function": function}]
    return chat_answer(None, "tool_calls", tokens, tool_calls=calls)


def in_text(body):
    """The same one without."""
    return chat_answer(POLICY.act(body["messages"]))


def first_turn(body) -> bool:
    return len(body["messages"]) == 2


@pytest.fixture
def evaluate(run_eval, tmp_path):
    """Runs `eval.py --api-base` at an endpoint; returns exit code, report or None, stdout, stderr, and the server."""

    def run_it(complete, *args, server=None, limit=5):
        output = tmp_path / "out.json"
        with serve(server or StandIn(complete, path=PATH)) as server:
            options = ("--api-base", server.url, "--model", "toy", "--limit", limit, "--output", output)
            code, out, err = run_eval(*options, *args)
        report = json.loads(output.read_text()) if code == 0 else None
        return code, report, out, err, server

    return run_it


def partial(tmp_path) -> Path:
    return tmp_path / "out.json.partial"


# ----------------------------------------------------------------------------------------------------- the same report


@pytest.mark.parametrize("complete, args", [(native, []), (in_text, ["--api-tools", "prompt"])])
def test_the_report_is_that_of_the_same_policy_in_process(evaluate, run_eval, tmp_path, complete, args):
    code, report, out, err, server = evaluate(complete, *args)
    assert code == 0 and err == "" and "5/5 after" in out
    expected = evaluate_policy("ask-all", held_out(5))
    assert report["episodes"] == expected["episodes"]
    assert set(report) - set(expected) == {"temperature", "top_p", "max_completion_len", "server"}
    asked = len(server.bodies)
    assert asked == sum(row["turns"] for row in report["episodes"])
    about = {"api": "chat", "tools": args[-1] if args else "native", "extra": {}, "left_out": [], "lost": {}}
    assert report["server"] == about | {"tokens": {"prompt": 50 * asked, "completion": 10 * asked}}
    assert server.url not in json.dumps(report) and list(tmp_path.iterdir()) == [tmp_path / "out.json"]
    run_eval("--model", "guess", "--limit", 5, "--output", tmp_path / "guess.json")
    code, out, _ = run_eval("--compare", tmp_path / "guess.json", tmp_path / "out.json")
    assert code == 0 and "toy" in out and "note" not in out


def test_greedy_too_and_seeds_that_differ_by_episode_and_turn(evaluate):
    code, report, out, _, server = evaluate(native, "--also-greedy", "--temperature", 0.3)
    assert code == 0 and "10/10 after" in out and report["greedy"]["temperature"] == 0 and report["temperature"] == 0.3
    assert report["greedy"]["avg_score"] == report["avg_score"] > 0.5
    sampled = [body["seed"] for body in server.bodies if body["temperature"] == 0.3]
    greedy = [body["seed"] for body in server.bodies if body["temperature"] == 0]
    assert len(set(sampled)) == len(sampled) > 20 and sorted(sampled) == sorted(greedy)
    assert all(0 <= seed < 2**31 for seed in sampled)
    again = evaluate(native, "--overwrite")[4]
    assert sorted(body["seed"] for body in again.bodies) == sorted(sampled)
    other = evaluate(native, "--overwrite", "--seed", 1)[4]
    assert not {body["seed"] for body in other.bodies} & set(sampled)


def test_episodes_are_played_at_once_and_no_more_than_allowed(evaluate):
    lock, now, most = threading.Lock(), 0, 0
    together = threading.Barrier(3)

    def slow(body):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if first_turn(body) and len(server.bodies) <= 3:
            together.wait(20)  # the first three are under way at the same time
        time.sleep(0.01)
        with lock:
            now -= 1
        return native(body)

    server = StandIn(slow, path=PATH)
    code, report, *_ = evaluate(None, "--concurrency", 3, server=server, limit=10)
    assert code == 0 and most == 3 and report["episodes"] == evaluate_policy("ask-all", held_out(10))["episodes"]


# ------------------------------------------------------------------------------------------------------- typed reasons


def test_the_budget_is_what_the_endpoint_counts(evaluate):
    def counting(body):
        return native(body, (100 + 15 * (len(body["messages"]) - 2), 10))  # a reply has 20 tokens

    _, report, _, _, server = evaluate(counting, "--max-completion-len", 75, "--concurrency", 1, limit=1)
    assert [body["max_tokens"] for body in server.bodies] == [75, 65, 35, 5]
    (row,) = report["episodes"]
    assert (row["stop_reason"], row["turns"], len(row["questions"])) == ("token_cap", 4, 4)
    _, report, _, _, server = evaluate(lambda body: native(body, None), "--overwrite", limit=1)
    assert {body["max_tokens"] for body in server.bodies} == {768} and report["episodes"][0]["stop_reason"] == "plan"


REASONS = {
    "token_cap": lambda body: chat_answer("ASK: {", "length", (50, body["max_tokens"])),
    "context_full": lambda body: chat_answer(None, "length", (50, body["max_tokens"] - 1), reasoning_content="Hm"),
    "turn_cap": lambda body: chat_answer(""),
}
REASONS["token_cap, not counted"] = lambda body: chat_answer('ASK: {"question": "Who?"}', "length", None)


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_have_types(evaluate, reason):
    code, report, _, err, _ = evaluate(REASONS[reason])
    assert code == 0 and err == "" and report["env_errors"] == 0
    assert {row["stop_reason"] for row in report["episodes"]} == {reason.split(",")[0]}
    assert not any(row["questions"] for row in report["episodes"])


def test_a_context_that_is_full_later_ends_the_episode_and_is_no_loss(evaluate, tmp_path):
    full = (400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
    code, report, _, err, _ = evaluate(lambda body: native(body) if len(body["messages"]) < 6 else full)
    assert code == 0 and err == "" and report["server"]["lost"] == {}
    assert {(row["stop_reason"], len(row["questions"])) for row in report["episodes"]} == {("context_full", 2)}
    assert not partial(tmp_path).exists()


@pytest.mark.parametrize("answer", [chat_answer("As", "content_filter"), (400, {"error": {"code": "content_filter"}})])
def test_a_filter_costs_an_episode_and_is_not_asked_again(evaluate, tmp_path, answer):
    lost = held_out(5)[1].request
    code, report, _, err, server = evaluate(lambda body: answer if lost in str(body) else native(body))
    assert code == 0 and "warning: 1 episode lost, which counts as 0 (content filter: 1)" in err
    assert report["server"]["lost"] == {"content filter": 1} and report["env_errors"] == 1
    assert [row["stop_reason"] for row in report["episodes"]].index("env_error") == 1
    assert not partial(tmp_path).exists()


def test_nothing_but_filtered_episodes_is_a_report(evaluate):
    code, report, *_ = evaluate(lambda body: (400, {"error": {"code": "content_filter"}}))
    assert code == 0 and report["env_errors"] == 5 and report["avg_score"] == 0


# -------------------------------------------------------------------------------------------------- nothing to evaluate

NOTHING = {
    "401, Unauthorized (a key is read from OPENAI_API_KEY)": (401, {"error": "Unauthorized"}),
    "404, no such model; --model toy: it has a, b": (404, {"error": "no such model"}),
    "was answered with 500": (500, b""),
    "answered with no JSON: <html>": b"<html>",
    "not as the OpenAI API has it": {"choices": 1},
    "--api-tools prompt describes the tools": (400, {"error": "tool use is not supported"}),
    "no answer within 0.2 s": None,
}


@pytest.mark.parametrize("message", NOTHING)
def test_nothing_to_evaluate_is_one_line_and_code_2(evaluate, tmp_path, monkeypatch, message):
    if NOTHING[message] is None:
        monkeypatch.setattr(chat_api, "READ_SECONDS", 0.2)
    server = StandIn(lambda body: NOTHING[message] or time.sleep(1), {"data": [{"id": "a"}, {"id": "b"}]}, PATH)
    code, _, _, err, _ = evaluate(None, server=server)
    assert code == 2 and message in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


BAD_FLAGS = {
    "--engine torch: is the server's choice with --api-base": ["--engine", "torch"],
    "--api-base: guess is a scripted policy": ["--model", "guess"],
    "--api-base: give --model too": ["--model", "tiny"],
    "--vllm-url: is another way": ["--vllm-url", "http://x"],
    "--api-base x: must be an address": ["--api-base", "x"],
    "cannot be reached": ["--api-base", "http://127.0.0.1:9"],
    "--api-extra {: not JSON": ["--api-extra", "{"],
    '--api-extra {"x": NaN}: not JSON': ["--api-extra", '{"x": NaN}'],
    "--api-extra []: must be a JSON object": ["--api-extra", "[]"],
    "--api-extra model: is set by eval.py": ["--api-extra", '{"model": "x"}'],
    "--concurrency 0: must be at least 1": ["--concurrency", "0"],
}


@pytest.mark.parametrize("message", BAD_FLAGS)
def test_bad_flags_are_one_line_and_code_2(evaluate, tmp_path, message):
    code, _, out, err, server = evaluate(native, *BAD_FLAGS[message])
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert not server.bodies and not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", [["--api-tools", "prompt"], ["--api-extra", "{}"], ["--concurrency", "2"]])
def test_flags_of_an_endpoint_need_one(run_eval, flag):
    code, _, err = run_eval("--model", "guess", *flag)
    assert code == 2 and err == f"error: {flag[0]}: needs --api-base\n"


def test_the_key_is_nowhere(evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    written = []
    monkeypatch.setattr("grpo.evaluate_api.write_atomic", lambda path, text: written.append(text))
    code, report, out, err, server = evaluate(native)
    assert code == 0 and server.headers[0]["authorization"] == "Bearer sk-secret" and len(written) == 5
    assert "sk-secret" not in json.dumps(report) + out + err + "".join(written)
