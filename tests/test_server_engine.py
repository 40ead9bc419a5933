"""A served model as an engine: what is asked, what is retried, and what becomes of each kind of wrong answer.

The server here is a stand-in; tests/vllm_engine/test_server.py has a real one. tests/test_server_connect.py has what
comes before the first turn.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from env.clarify import StopReason
from grpo.config import UsageError
from grpo.endpoint import RETRIES, Server
from grpo.engines import TurnRequest
from grpo.engines.server_engine import ServerEngine
from grpo.sampling import SamplingConfig
from tests.stand_in import StandIn, completion, serve
from tests.test_rollout import EOS, SCENARIO, ScriptedEngine, play, two_turns

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


def test_weights_are_the_servers():
    engine = engine_at("http://x:1")
    engine.wake(), engine.sleep()
    with pytest.raises(UsageError, match="--vllm-url http://x:1: a server is for evaluation only"):
        engine.weights_changed()


# -------------------------------------------------------------------------------------------------------------- Ctrl-C

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
