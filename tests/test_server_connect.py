"""A served model for evaluation: which servers are taken, which are refused in one line, and the command.

The server here is a stand-in; tests/vllm_engine/test_server.py has a real one.
"""

from __future__ import annotations

import socket
import time

import pytest
import toy

from grpo.chat import ChatTokens
from grpo.config import UsageError
from grpo.endpoint import Server
from grpo.engines.server_engine import connect
from grpo.rollout import rollout
from tests.stand_in import StandIn, completion, serve
from tests.test_rollout import SCENARIO, StubChat, StubEnv


@pytest.fixture(scope="module")
def chat():
    return ChatTokens(toy.make_tokenizer())


class ToyServer(StandIn):
    """Reads text as the toy tokenizer does, and answers every turn with one end-of-turn token."""

    def __init__(self, chat, **options):
        super().__init__(self.echo, **options)
        self.chat = chat

    def echo(self, body):
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else self.chat.tokenizer.encode(prompt, add_special_tokens=False)
        return completion([self.chat.tokenizer.eos_token_id], prompt_ids=ids)


def connected(server, chat, name="toy", prompts=((5, 6, 7),), **options):
    return connect(server.url, name, name, chat, prompts, **options)


def test_connecting_finds_model_and_context(chat):
    with serve(ToyServer(chat)) as server:
        engine = connected(server, chat, concurrency=2)
        (group,) = rollout(
            engine, StubChat(), [SCENARIO], num_generations=2, max_completion_len=9, step=0, reward_fn=lambda r: 0.0,
            env_factory=StubEnv,
        )  # fmt: skip
    assert (engine.model, engine.max_context, engine.concurrency, engine.eos_ids) == ("toy", 2048, 2, chat.eos_ids)
    assert [episode.num_trained for episode in group.episodes] == [1, 1]


def card(**values):
    return {"data": [{"id": "served", "root": "served", "max_model_len": 512} | values]}


def test_a_model_is_known_by_name_root_or_folder(chat, tmp_path, monkeypatch):
    (tmp_path / "final").mkdir()
    monkeypatch.chdir(tmp_path)
    for models, name in [
        (card(), "served"),
        (card(root="/elsewhere/final"), "/elsewhere/final"),
        (card(id="./final", root="./final"), "final"),
        (card(id="x", root=str(tmp_path / "final")), "final"),
    ]:
        with serve(ToyServer(chat, models=models)) as server:
            assert connected(server, chat, name).model == models["data"][0]["id"]


def test_an_adapter_has_its_models_context(chat):
    adapter = {"id": "lora", "root": "/a", "parent": "served", "max_model_len": None}
    with serve(ToyServer(chat, models={"data": [*card()["data"], adapter]})) as server:
        engine = connected(server, chat, "lora")
    assert (engine.model, engine.max_context) == ("lora", 512)
    assert server.bodies[0]["model"] == "lora"


REFUSED = {
    "another model": (card(), "serves served, not --model toy; .*--served-model-name toy"),
    "no model": ({"data": []}, "serves nothing, not --model toy"),
    "no list": ({"models": []}, "lists no models at /v1/models"),
    "no context": (card(id="toy", max_model_len=None), "does not say how long its context is"),
    "short context": (card(id="toy", max_model_len=3), "context of 3 tokens .* too short for first prompts of 3"),
    "no such address": ((404, {"detail": "Not Found"}), "GET /v1/models was answered with 404"),
    "not allowed": ((401, {"error": "Unauthorized"}), "401, .* .a key is read from VLLM_API_KEY"),
    "a web page": (b"<html>", "GET /v1/models was answered with no JSON: <html>"),
}


@pytest.mark.parametrize("models, message", REFUSED.values(), ids=REFUSED.keys())
def test_a_server_without_the_model_is_refused(chat, models, message):
    with serve(ToyServer(chat, models=models)) as server:
        with pytest.raises(UsageError, match=message) as raised:
            connected(server, chat)
    assert str(raised.value).startswith(f"--vllm-url {server.url}: ") and not server.bodies


def test_a_server_with_another_tokenizer_is_refused(chat):
    other = ToyServer(chat)
    other.complete = lambda body: completion([9], "length", prompt_ids=[1, 2])
    with serve(other) as server, pytest.raises(UsageError, match="toy has another tokenizer than --model"):
        connected(server, chat)
    other.complete = lambda body: completion([9], "length", token_ids=None)
    with serve(other) as server, pytest.raises(UsageError, match="returns no token ids"):
        connected(server, chat)


def test_nobody_there_is_said_at_once(chat):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(UsageError, match=f"--vllm-url {url}: cannot be reached .*Connection refused.*vllm serve"):
        connect(url, "toy", "toy", chat, [(1,)])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://[::1", "http://x?y=1", "http://x:y"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(UsageError, match="must be an address such as http://localhost:8000"):
        Server(url)


def test_addresses_and_keys(chat, monkeypatch):
    for url in ("http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/", "http://me:secret@x:1/v1"):
        assert Server(url).url == "http://x:1"
    assert Server("https://x/proxy/v1").url == "https://x/proxy"
    with serve(ToyServer(chat)) as server:
        Server(server.url).get("/v1/models")
        monkeypatch.setenv("VLLM_API_KEY", "abc")
        Server(server.url).get("/v1/models")
    assert [headers.get("authorization") for headers in server.headers] == [None, "Bearer abc"]


# -------------------------------------------------------------------------------------------------------- the commands


def test_eval_of_a_served_model(run_eval, chat, folder, tmp_path):
    models = card(id="anything", root=str(folder))
    with serve(ToyServer(chat, models=models | {"data": [models["data"][0] | {"max_model_len": 4096}]})) as server:
        code, out, err = run_eval(
            "--model", folder, "--vllm-url", server.url + "/v1", "--limit", 2, "--also-greedy",
            "--output", tmp_path / "served.json",
        )  # fmt: skip
    assert code == 0, err
    assert f"anything served by {server.url}, 4096 tokens of context; for evaluation only" in out and "4/4 after" in out
    report = (tmp_path / "served.json").read_text()
    assert '"server"' in report and '"max_context": 4096' in report and server.url not in report
    assert {body["temperature"] for body in server.bodies} == {0.0, 0.7}


BAD_FLAGS = {
    "--engine": ["--engine", "torch"],
    "--device": ["--device", "cpu"],
    "--dtype": ["--dtype", "float32"],
    "scripted": ["--model", "guess"],
    "--compare": ["--compare", "a.json", "b.json"],
    "must be an address": ["--vllm-url", "localhost:8000"],
    "cannot be reached": [],
}


@pytest.mark.parametrize("message", BAD_FLAGS)
def test_eval_refuses_in_one_line(run_eval, tmp_path, message):
    arguments = ["--vllm-url", "http://127.0.0.1:9", *BAD_FLAGS[message]]
    code, out, err = run_eval(*arguments, *([] if "--compare" in arguments else ["--output", tmp_path / "x.json"]))
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
