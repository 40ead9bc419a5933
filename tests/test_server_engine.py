"""A served model as an engine: what is asked, what is retried, and what becomes of each kind of wrong answer.

The server here is a stand-in; tests/vllm_engine/test_server.py has a real one.
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import toy

from env.clarify import StopReason
from grpo import config
from grpo.chat import ChatTokens
from grpo.config import UsageError
from grpo.endpoint import RETRIES, Server
from grpo.engines import TurnRequest
from grpo.engines.server_engine import ServerEngine, connect
from grpo.rollout import rollout
from grpo.sampling import SamplingConfig
from tests.stand_in import StandIn, completion, serve
from tests.test_rollout import EOS, SCENARIO, ScriptedEngine, StubChat, StubEnv, play, two_turns

WAIT = 20  # seconds until something that never comes counts as that
ROOT = Path(__file__).parent.parent
AT_ONCE = RETRIES.new(backoff_factor=0, backoff_jitter=0)


def engine_at(url, **options) -> ServerEngine:
    """Without the checks of `connect`."""
    return ServerEngine(Server(url, WAIT, AT_ONCE), "toy", {EOS}, options.pop("max_context", 2048), **options)


def request(key=(0, 0), turn=0, prompt=(1, 2, 3), max_tokens=10, position=0) -> TurnRequest:
    return TurnRequest(key, tuple(prompt), max_tokens, turn, position, key[0])


def one(complete, **options):
    """The output of one turn that `complete` answers."""
    with serve(StandIn(complete)) as server:
        engine = engine_at(server.url, **options)
        engine.submit(request())
        (output,) = engine.step()
        return output, server


# --------------------------------------------------------------------------------------------------------- what it asks


def test_a_turn_is_one_request_of_ids_that_leaves_nothing_to_defaults():
    output, server = one(lambda body: completion((5, 6, EOS)), sampling=SamplingConfig(0.7, 0.9), seed=3)
    assert (output.key, output.token_ids, output.logprobs, output.finish) == (
        (0, 0), (5, 6, EOS), (-0.5, -1.5, -2.5), "stop",
    )  # fmt: skip
    (body,) = server.bodies
    assert body.pop("seed") >= 0
    assert body == {
        "model": "toy", "prompt": [1, 2, 3], "max_tokens": 10, "temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0,
        "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "n": 1, "ignore_eos": True,
        "stop_token_ids": [EOS], "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip


def test_seeds_differ_by_member_turn_step_and_seed_and_repeat():
    def seeds(step, sampling):
        with serve(StandIn(lambda body: completion(two_turns(None, len(body["prompt"]) > 3)))) as server:
            play(engine_at(server.url), num_generations=3, step=step, sampling=sampling)
        return sorted(body["seed"] for body in server.bodies)

    first = seeds(0, SamplingConfig(seed=1))
    assert first == seeds(0, SamplingConfig(seed=1))
    others = [seeds(1, SamplingConfig(seed=1)), seeds(0, SamplingConfig(seed=2)), seeds(0, None)]
    everything = list(itertools.chain(first, *others))
    assert len(first) == 6 and len(set(everything)) == 24
    assert all(0 <= seed < 2**63 for seed in everything)


def test_greedy_has_no_filter_and_tiny_temperatures_are_refused():
    _, server = one(lambda body: completion((5, EOS)), sampling=SamplingConfig(0.0, 0.5))
    assert (server.bodies[0]["temperature"], server.bodies[0]["top_p"]) == (0, 1)
    with pytest.raises(UsageError, match="temperature 0.005 would be raised by vLLM; give 0 or at least 0.01"):
        engine_at("http://x").start(0, SamplingConfig(0.005))


def test_rollouts_are_those_of_any_engine():
    def complete(body):
        return completion(two_turns(None, len(body["prompt"]) > 3))

    with serve(StandIn(complete)) as server:
        groups = play(engine_at(server.url), scenarios=[SCENARIO] * 2, num_generations=3)
    assert groups == play(ScriptedEngine(two_turns), scenarios=[SCENARIO] * 2, num_generations=3)


def test_a_cut_turn_is_cut():
    with serve(StandIn(lambda body: completion(range(5, 5 + body["max_tokens"]), "length"))) as server:
        episode = play(engine_at(server.url), max_completion_len=4)[0].episodes[0]
    assert episode.completion_ids == (5, 6, 7, 8) and episode.stop_reason == StopReason.TOKEN_CAP


# ---------------------------------------------------------------------------------------------------- many in flight


def test_an_episode_goes_on_while_another_ones_turn_is_still_sampled():
    """Member 0's first turn ends only after member 1's second one has been asked for: a barrier would wait for ever."""
    second_turn = threading.Event()

    def complete(body):
        if body["max_tokens"] < 1000:  # a second turn
            second_turn.set()
        elif body["seed"] == seed_of_0:
            assert second_turn.wait(WAIT), "nobody went on"
        return completion(two_turns(None, body["max_tokens"] < 1000))

    seed_of_0 = engine_at("http://x")._body(request())["seed"]
    with serve(StandIn(complete)) as server:
        (group,) = play(engine_at(server.url), num_generations=2)
    assert [episode.num_trained for episode in group.episodes] == [5, 5]
    assert second_turn.is_set()


def test_no_more_requests_are_in_flight_than_allowed():
    lock, now, most = threading.Lock(), 0, 0

    def complete(body):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return completion(two_turns(None, len(body["prompt"]) > 3))

    with serve(StandIn(complete)) as server:
        (group,) = play(engine_at(server.url, concurrency=3), num_generations=10)
    assert most == 3 and len(group.episodes) == 10 and len(server.bodies) == 20


def test_a_new_batch_forgets_answers_of_the_last_one():
    late = threading.Event()

    def complete(body):
        if body["prompt"] == [1]:
            late.wait(WAIT)
            return completion((8, EOS))
        return completion((9, EOS))

    with serve(StandIn(complete)) as server:
        engine = engine_at(server.url)
        engine.submit(request(prompt=(1,)))
        engine.start(1)
        assert engine.num_active == 0 and engine.step() == []
        engine.submit(request(prompt=(2,)))
        assert [output.token_ids for output in engine.step()] == [(9, EOS)]
        late.set()
        time.sleep(0.1)
        engine.submit(request(prompt=(2,), turn=1))
        assert [output.token_ids for output in engine.step()] == [(9, EOS)]


def test_a_released_episode_that_waits_is_never_sent():
    with serve(StandIn(lambda body: completion((9, EOS)))) as server:
        engine = engine_at(server.url, concurrency=1)
        for member in range(3):
            engine.submit(request((0, member), prompt=(member + 1,)))
        assert engine.num_active == 3
        engine.release((0, 1))
        outputs = [*engine.step(), *engine.step()]
    assert [output.key for output in outputs] == [(0, 0), (0, 2)]
    assert [body["prompt"] for body in server.bodies] == [[1], [3]]
    engine.release((0, 0)), engine.release((0, 2))
    assert engine.num_active == 0 and engine.step() == []


@pytest.mark.parametrize(
    "bad, message",
    [
        (request(prompt=()), "empty prompt"),
        (request(max_tokens=0), "max_tokens < 1"),
        (request(prompt=(1,) * 10, max_tokens=11), "exceed max_context 20"),
    ],
)
def test_turns_that_cannot_be_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        engine_at("http://127.0.0.1:9", max_context=20).submit(bad)


def test_a_turn_at_a_time():
    with serve(StandIn(lambda body: completion((9, EOS)))) as server:
        engine = engine_at(server.url)
        engine.submit(request())
        with pytest.raises(ValueError, match="still being sampled"):
            engine.submit(request(turn=1))
        engine.step()
        engine.submit(request(turn=1))
        assert len(engine.step()) == 1


# ------------------------------------------------------------------------------------------------------------- retries

PASSING = {
    "500": (500, {"error": {"message": "boom"}}),
    "429": (429, {"error": {"message": "slow down"}}),
    "503 as text": (503, b"<html>starting</html>"),
    "hang up": None,
}


@pytest.mark.parametrize("trouble", PASSING.values(), ids=PASSING.keys())
def test_passing_trouble_is_retried(trouble):
    answers = iter([trouble, trouble])
    output, server = one(lambda body: next(answers, completion((5, EOS))))
    assert output.token_ids == (5, EOS)
    assert len(server.bodies) == 3 and server.bodies[0] == server.bodies[1] == server.bodies[2]


def test_a_late_answer_is_asked_for_again():
    calls = itertools.count()

    def complete(body):
        if next(calls) == 0:
            time.sleep(1)
        return completion((5, EOS))

    with serve(StandIn(complete)) as server:
        engine = ServerEngine(Server(server.url, 0.3, AT_ONCE), "toy", {EOS}, 2048)
        engine.submit(request())
        assert [output.token_ids for output in engine.step()] == [(5, EOS)]
    assert len(server.bodies) == 2


def failure(complete, timeout=WAIT) -> tuple[str, StandIn]:
    """The one line with which a turn fails for good."""
    with serve(StandIn(complete)) as server:
        engine = ServerEngine(Server(server.url, timeout, AT_ONCE), "toy", {EOS}, 2048)
        engine.submit(request(max_tokens=3))
        with pytest.raises(UsageError) as raised:
            engine.step()
    line = str(raised.value)
    assert line.startswith(f"--vllm-url {server.url}: ") and "\n" not in line
    return line, server


def test_lasting_trouble_ends_in_one_line():
    line, server = failure(lambda body: (500, {"error": {"message": "the engine\nis dead"}}))
    assert line.endswith("POST /v1/completions was answered with 500, the engine is dead")
    assert len(server.bodies) == 1 + AT_ONCE.total


def test_no_answer_in_time_ends_in_one_line():
    line, server = failure(lambda body: time.sleep(0.6), timeout=0.2)
    assert line.endswith("no answer within 0.2 s") and len(server.bodies) == 2


def test_the_users_mistakes_are_not_retried():
    line, server = failure(lambda body: (400, {"error": {"message": "max_tokens is too large"}}))
    assert "400, max_tokens is too large" in line and len(server.bodies) == 1


WRONG = {
    "no JSON": (b"<html>hello\nthere</html>", "answered with no JSON: <html>hello there</html>"),
    "empty": (b"", "answered with no JSON: an empty body"),
    "a list": ([1, 2], "answered with no JSON object"),
    "no choices": ({"id": 1}, "a completion is not as the OpenAI API has it"),
    "two choices": ({"choices": [{}, {}]}, "a completion is not as the OpenAI API has it"),
    "choices of text": ({"choices": ["text"]}, "a completion is not as the OpenAI API has it"),
    "no ids": (completion((5, EOS), token_ids=None), "returns no token ids"),
    "ids as text": (completion((5, EOS), token_ids=["5", "6"]), "returns no token ids"),
    "no log-probs": (completion((5, EOS), logprobs=None), "returns no log-prob for each token"),
    "too few log-probs": (completion((5, EOS), logprobs={"token_logprobs": [-1]}), "returns no log-prob for each"),
    "log-prob null": (completion((5, EOS), logprobs={"token_logprobs": [-1, None]}), "returns no log-prob for each"),
    "log-prob NaN": (completion((5, EOS), logprobs={"token_logprobs": [-1, float("nan")]}), "returns no log-prob"),
    "no tokens": (completion(()), "0 tokens came back where 1 to 3 were asked for"),
    "too many tokens": (completion((5, 6, 7, EOS)), "4 tokens came back where 1 to 3"),
    "an end of its own": (completion((5, 6)), "a turn ended with token 6, which ends no turn of --model"),
    "aborted": (completion((5, 6), "abort"), "a turn ended for the reason 'abort'"),
}


@pytest.mark.parametrize("answer, message", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_one_line(answer, message):
    line, server = failure(lambda body: answer)
    assert message in line and len(server.bodies) == 1


# ----------------------------------------------------------------------------------------------------------- the server


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


def test_training_through_a_server_is_refused():
    engine = engine_at("http://x:1")
    engine.wake(), engine.sleep()
    with pytest.raises(UsageError, match="--vllm-url http://x:1: a server is for evaluation only"):
        engine.weights_changed()
    for arguments in (["--vllm-url", "http://x:1"], ["--vllm_url=http://x:1"]):
        with pytest.raises(UsageError, match="--vllm-url: for evaluation only"):
            config.parse(arguments, env={})


CTRL_C = """
import os, signal, sys, threading
from grpo.endpoint import Server
from grpo.engines import TurnRequest
from grpo.engines.server_engine import ServerEngine

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
engine = ServerEngine(Server(sys.argv[1]), "toy", {5}, 100)
engine.submit(TurnRequest((0, 0), (1, 2, 3), 10))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
engine.step()
"""


def test_ctrl_c_does_not_wait_for_answers():
    """A process with a request in flight ends although no answer comes."""
    hang = threading.Event()
    with serve(StandIn(lambda body: hang.wait(60) and None)) as server:
        done = subprocess.run(
            [sys.executable, "-c", CTRL_C, server.url], cwd=ROOT, capture_output=True, text=True, timeout=50
        )
        hang.set()
    assert len(server.bodies) == 1 and "KeyboardInterrupt" in done.stderr
