"""One turn at a chat endpoint: what is asked, how each kind of answer is read, and how each kind of refusal is said."""

from __future__ import annotations

import json
import time

import pytest

from env.prompts import TOOLS, first_messages
from env.tools import InvalidTurn, parse_turn
from grpo import chat_api
from grpo.chat_api import EMPTY, NOT_RUN, ChatEndpoint, read_choice
from grpo.config import UsageError
from grpo.endpoint import ServerError
from grpo.sampling import SamplingConfig
from scenarios.generator import held_out
from tests.local_server import Response
from tests.stand_in import StandIn, chat_answer, serve

PATH = "/v1/chat/completions"
MESSAGES = tuple(first_messages(held_out(5)[0]))
AT_ONCE = chat_api.RETRIES.new(backoff_factor=0, backoff_jitter=0)
FINE = chat_answer("ASK: {}")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Tests have less of it."""
    monkeypatch.setattr(chat_api, "RETRIES", AT_ONCE)
    monkeypatch.setattr(chat_api, "READ_SECONDS", 20.0)


def call(name, arguments, number="c0"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def ask(complete, sampling=SamplingConfig(0.7), path=PATH, models=None, url="", **options):  # noqa: B008
    """The answer to one turn, and the server."""
    with serve(StandIn(complete, models, path)) as server:
        endpoint = ChatEndpoint(server.url + url, "toy", **options)
        endpoint.connect()
        return endpoint.answer(MESSAGES, 100, sampling, 7), server, endpoint


# --------------------------------------------------------------------------------------------------------- what it asks


def test_a_turn_is_one_request_with_the_prompts_and_tools_of_local_models():
    answer, server, endpoint = ask(lambda body: chat_answer("hello"))
    assert server.bodies == [
        {"model": "toy", "messages": list(MESSAGES), "tools": TOOLS, "temperature": 0.7, "seed": 7, "max_tokens": 100}
    ]
    assert (answer.spoken, answer.text, answer.finish) == ("hello", "hello", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (50, 10)
    assert endpoint.about == {"api": "chat", "tools": "native", "extra": {}, "left_out": []}


def test_tools_in_the_text_further_fields_and_a_nucleus():
    _, server, endpoint = ask(lambda body: FINE, SamplingConfig(0.7, 0.9), tools="prompt", extra={"top_k": 5})
    (body,) = server.bodies
    system = body["messages"][0]
    assert (body["top_p"], body["top_k"]) == (0.9, 5) and "tools" not in body
    assert system["role"] == "system" and system["content"].startswith(MESSAGES[0]["content"])
    assert all(json.dumps(tool["function"]) in system["content"] for tool in TOOLS)
    assert body["messages"][1:] == list(MESSAGES[1:]) and endpoint.about["extra"] == {"top_k": 5}
    _, server, _ = ask(lambda body: FINE, SamplingConfig(0.0, 0.9))
    assert "top_p" not in server.bodies[0] and server.bodies[0]["temperature"] == 0
    with pytest.raises(UsageError, match="--api-extra seed: is set by eval.py itself"):
        ChatEndpoint("http://x", "toy", extra={"seed": 1})


def test_what_an_endpoint_does_not_take_is_left_out_and_said():
    def picky(body):
        if "max_tokens" in body:
            return 400, {"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'."}}
        if "seed" in body:
            return 422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"]}]}
        return FINE

    with serve(StandIn(picky, path=PATH)) as server:
        endpoint = ChatEndpoint(server.url, "toy")
        for _ in range(2):
            endpoint.answer(MESSAGES, 100, SamplingConfig(), 7)
    assert len(server.bodies) == 3 + 1 and endpoint.about["left_out"] == ["max_tokens", "seed"]
    assert server.bodies[-1]["max_completion_tokens"] == 100 and "seed" not in server.bodies[-1]


@pytest.mark.parametrize("written", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_addresses_with_and_without_v1(written):
    answer, server, endpoint = ask(lambda body: FINE, url=written)
    assert answer.spoken and endpoint.models == ["toy"] and endpoint.url == server.url


@pytest.mark.parametrize("path, url", [("/api/v4/chat/completions", "/api/v4"), ("/chat/completions", "")])
def test_addresses_that_have_no_v1(path, url):
    assert ask(lambda body: FINE, path=path, url=url)[0].spoken


@pytest.mark.parametrize("path, url", [("/api/v4/chat/completions", "/api/v4"), (PATH, ""), (PATH, "/v1")])
@pytest.mark.parametrize("models", [(405, b"<html>"), (403, {"error": "no right to list"}), b"<html>", {"models": []}])
def test_an_endpoint_may_list_no_models(path, url, models):
    assert ask(lambda body: FINE, path=path, url=url, models=models)[0].spoken


def test_the_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " sk-secret\n")
    _, server, _ = ask(lambda body: FINE)
    assert server.headers[0]["authorization"] == "Bearer sk-secret"
    with pytest.raises(ServerError, match="401, no such key: [*]{3} .a key is read from OPENAI_API_KEY") as raised:
        ask(lambda body: (401, {"error": {"message": "no such key: sk-secret"}}))
    assert "sk-secret" not in str(raised.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk\nsecret")
    with pytest.raises(UsageError, match="^OPENAI_API_KEY: holds characters that cannot be sent$"):
        ChatEndpoint("http://x", "toy")


# ---------------------------------------------------------------------------------------------------- how it is read


def read(content, finish="stop", **message):
    return read_choice(chat_answer(content, finish, **message)["choices"][0])


def test_calls_become_the_text_that_local_models_speak():
    answer = read("I will ask.", tool_calls=[call("ask_question", '{"question": "When?"}', "a")])
    assert answer.spoken == '<tool_call>\n{"name": "ask_question", "arguments": {"question": "When?"}}\n</tool_call>'
    assert answer.text == "I will ask.\n" + answer.spoken  # prose beside a call is shown, not searched for another
    assert answer.message["tool_calls"] == [call("ask_question", '{"question": "When?"}', "a")]
    assert answer.message["content"] == "I will ask."
    assert answer.replies("Friday.") == [{"role": "tool", "tool_call_id": "a", "content": "Friday."}]


def test_each_of_several_calls_is_answered_and_the_first_one_run():
    answer = read(None, tool_calls=[call("get_task_info", "", "a"), call("propose_plan", '{"plan": {}}', None)])
    parsed = parse_turn(answer.spoken)
    assert (parsed.name, parsed.dropped_calls) == ("get_task_info", True)
    replies = [(reply["tool_call_id"], reply["content"]) for reply in answer.replies("x")]
    assert replies == [("a", "x"), ("call_1", NOT_RUN)]
    assert [each["id"] for each in answer.message["tool_calls"]] == ["a", "call_1"]


def test_arguments_that_are_no_object_are_the_parsers_affair_and_come_back_as_text():
    answer = read(None, tool_calls=[call("ask_question", '{"question": "Whe')])
    assert parse_turn(answer.spoken).reason.startswith("unreadable arguments")
    assert answer.message == {"role": "assistant", "content": answer.spoken} and not answer.call_ids
    assert answer.replies("x") == [{"role": "user", "content": "x"}]
    forgiven = read(None, tool_calls=[call("ask_question", "{'question': 'When?'}")])
    assert parse_turn(forgiven.spoken).arguments == {"question": "When?"}
    assert parse_turn(read(None, tool_calls=[call("ask_question", {"question": "When?"})]).spoken).arguments


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_and_not_spoken(name):
    thought = 'Perhaps propose_plan({"a": 1})?</think> ask_question("no")'
    answer = read('ask_question("When?")', **{name: thought})
    assert answer.spoken == 'ask_question("When?")'
    assert answer.text == f"<think>\n{thought}\n</think>\n\n{answer.spoken}"
    assert name not in answer.message
    called = read("", tool_calls=[call("get_task_info", "{}")], **{name: thought})
    assert called.message[name] == thought and parse_turn(called.spoken).name == "get_task_info"
    only = read(None, **{name: thought})
    assert only.spoken == "" and only.message["content"] == EMPTY


def test_thoughts_in_the_text_are_not_searched():
    assert parse_turn(read('<think>propose_plan({"a": 1})</think>ask_question("When?")').spoken).name == "ask_question"


@pytest.mark.parametrize("content, message, text", [
    ("", {}, ""), (None, {}, ""), (None, {"refusal": "I cannot."}, "I cannot."), (7, {}, ""),
    ([{"type": "thinking", "thinking": []}, {"type": "text", "text": "Hi"}, "x"], {}, "Hi"),
    ("\ud800\0", {}, "\ufffd" * 2),
])  # fmt: skip
def test_turns_without_a_call(content, message, text):
    answer = read(content, **message)
    assert (answer.spoken, answer.message["content"]) == (text, text or EMPTY)
    assert isinstance(parse_turn(answer.spoken), InvalidTurn)


def test_why_a_turn_ended():
    ends = {"stop": "stop", "tool_calls": "stop", "length": "length", "MAX_TOKENS": "length", None: "stop",
            "content_filter": "content_filter"}  # fmt: skip
    assert {end: read("x", end).finish for end in ends} == ends


# ------------------------------------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize("trouble", [(500, b""), (429, {"error": "slow"}), (529, b""), (503, b"<html>"), None])
def test_passing_trouble_is_asked_again(trouble):
    answers = iter([trouble, trouble])
    answer, server, _ = ask(lambda body: next(answers, FINE))
    assert answer.spoken and len(server.bodies) == 3 and server.bodies[0] == server.bodies[2]


def test_retry_after_is_respected():
    times = []

    def busy(body):
        times.append(time.monotonic())
        return Response(b"", 429, {"retry-after": "1"}) if len(times) == 1 else FINE

    ask(busy)
    assert times[1] - times[0] >= 1


def failure(complete, **options) -> tuple[ServerError, StandIn]:
    with serve(StandIn(complete, options.pop("models", None), options.pop("path", PATH))) as server:
        endpoint = ChatEndpoint(server.url, "toy", **options)
        with pytest.raises(ServerError) as raised:
            endpoint.connect()
            endpoint.answer(MESSAGES, 100, SamplingConfig(), 7)
    assert str(raised.value).startswith(f"--api-base {server.url}: ") and "\n" not in str(raised.value)
    return raised.value, server


QUOTA = (429, {"error": {"message": "You have no credit.", "code": "insufficient_quota"}})
LASTING = {
    "always busy": ((429, b""), "429, an empty body", 9),
    "no credit": (QUOTA, "429, You have no credit.", 1),
    "not allowed": ((401, {"error": "Unauthorized"}), "401, Unauthorized .a key is read from OPENAI_API_KEY", 1),
    "no such model": ((404, {"error": {"message": "not found"}}), "404, not found; --model toy: it has a, b", 1),
    "tools": ((400, {"error": "llama does not support tools"}), "--api-tools prompt describes", 1),
    "temperature": ((400, {"error": "temperature: only 1 is supported"}), "such models take --temperature 1", 1),
    "context": ((400, {"error": "maximum context length is 9"}), "--max-completion-len may be too large", 1),
    "filter": ((400, {"error": {"message": "no", "code": "content_filter"}}), "400, no$", 1),
    "elsewhere": (Response(b"", 307, {"location": "https://x/"}), "sends requests elsewhere", 1),
    "no JSON": (b"<html>\nhi", "answered with no JSON: <html> hi", 1),
    "a list": ([1], "answered with no JSON object", 1),
    "no choices": ({"choices": []}, "not as the OpenAI API has it: ", 1),
    "no message": ({"choices": [{}]}, "not as the OpenAI API has it: ", 1),
    "choices of text": ({"choices": ["x"]}, "not as the OpenAI API has it: ", 1),
    "calls of text": (chat_answer("", tool_calls=["x"]), "not as the OpenAI API has it: ", 1),
    "an error as an answer": ({"error": {"message": "provider is down"}}, "an error came back: provider is down", 1),
}


@pytest.mark.parametrize("answer, message, times", LASTING.values(), ids=LASTING.keys())
def test_lasting_trouble_is_one_line(answer, message, times):
    error, server = failure(lambda body: answer, models={"data": [{"id": "a"}, {"id": "b"}]})
    assert len(server.bodies) == times
    with pytest.raises(ServerError, match=message):
        raise error


def test_kinds_that_say_something_of_the_episode():
    filtered, _ = failure(lambda body: LASTING["filter"][0])
    full, _ = failure(lambda body: LASTING["context"][0])
    assert (filtered.kind, full.kind) == (chat_api.FILTERED, chat_api.CONTEXT_FULL)


def test_an_endpoint_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(chat_api, "READ_SECONDS", 0.2)
    error, server = failure(lambda body: time.sleep(0.5) or FINE)
    assert str(error).endswith("no answer within 0.2 s") and error.kind == "no answer"
    assert len(server.bodies) == 2
    monkeypatch.setattr(chat_api, "CONTACT_SECONDS", 0.1)
    slow = Response(b"", 200)
    monkeypatch.setattr(StandIn, "answer", lambda self, request: time.sleep(0.3) or slow)
    assert str(failure(lambda body: FINE)[0]).endswith("no answer within 0.1 s")


def test_a_wrong_address_is_said():
    error, _ = failure(lambda body: FINE, path="/elsewhere/chat/completions")
    assert "is the address complete, as in https://host/v1?" in str(error)
    with pytest.raises(ServerError, match="cannot be reached .*refused.*is it running, and the address right"):
        ChatEndpoint("http://127.0.0.1:9", "toy").connect()
