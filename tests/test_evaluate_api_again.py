"""`eval.py --api-base` that was stopped, or lost episodes: what is kept, and how the same command goes on."""

# ruff: noqa: F811 (fixtures are imported, and arguments bear their names)

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from env.clarify import ClarifyEnv
from env.prompts import brief
from grpo.evaluate import evaluate_policy
from scenarios.generator import held_out
from tests.stand_in import StandIn, serve
from tests.test_evaluate_api import PATH, evaluate, first_turn, native, partial, patience  # noqa: F401

ROOT = Path(__file__).parent.parent


def kept(tmp_path) -> dict:
    return json.loads(partial(tmp_path).read_text())


def test_a_killed_evaluation_asks_nothing_twice(evaluate, tmp_path):
    output, stuck, killed, begun = tmp_path / "out.json", threading.Event(), threading.Event(), []

    def complete(body):
        if first_turn(body):
            begun.append(body["messages"][1]["content"])
            if len(begun) == 7:
                stuck.set()
                killed.wait(60)
        return native(body)

    with serve(StandIn(complete, path=PATH)) as server:
        command = [sys.executable, "eval.py", "--api-base", server.url, "--model", "toy", "--limit", "7"]
        with subprocess.Popen([*command, "--concurrency", "2", "--output", str(output)], cwd=ROOT) as process:
            assert stuck.wait(100)
            deadline = time.monotonic() + 60
            while len(kept(tmp_path)["episodes"]) < 6 and time.monotonic() < deadline:
                time.sleep(0.05)
            there, asked = kept(tmp_path), len(server.bodies)
            code, _, out, err, _ = evaluate(complete, "--api-base", server.url, "--overwrite", limit=7)
            assert (code, out) == (2, "") and err == f"error: --output {output}: another evaluation is writing to it\n"
            assert kept(tmp_path) == there and len(server.bodies) == asked
            process.kill()
        killed.set()
        assert sorted(os.listdir(tmp_path)) == [".out.json.lock", "out.json.partial"]  # the lock's file is not locked
        finished, begun[:] = begun[:6], []
        code, report, out, err, _ = evaluate(complete, "--api-base", server.url, limit=7)
    assert code == 0 and err == "" and "going on: 6 of 7 episodes were kept" in out and "7/7" in out
    assert len(begun) == 1 and begun[0] not in finished
    assert report["episodes"] == evaluate_policy("ask-all", held_out(7))["episodes"]
    assert report["server"]["tokens"]["completion"] == 10 * sum(row["turns"] for row in report["episodes"])
    assert os.listdir(tmp_path) == ["out.json"]


def test_ctrl_c_says_what_is_kept(evaluate, tmp_path):
    def complete(body):
        if first_turn(body) and len([each for each in server.bodies if first_turn(each)]) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return native(body)

    server = StandIn(complete, path=PATH)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    try:
        code, _, _, err, _ = evaluate(None, "--concurrency", 1, server=server)
    finally:
        signal.signal(signal.SIGINT, before)
    where = f"kept: 3 episodes in {partial(tmp_path)}: the same command goes on from there"
    assert code == 130 and err == f"{where}\ninterrupted\n"


def test_an_endpoint_that_goes_away_stops_the_evaluation_and_what_is_finished_stays(evaluate, tmp_path, caplog):
    """After twelve answers: one episode, and a few turns of the next."""
    for trouble, lost in (((401, {"error": {"message": "key expired"}}), 0), ((500, b""), 7)):
        caplog.clear()
        answered = []

        def complete(body, answered=answered, trouble=trouble):
            answered.append(body)
            return native(body) if len(answered) <= 12 else trouble

        code, _, _, err, _ = evaluate(complete, "--concurrency", 1, limit=15)
        assert code == 1 and err.count("\n") == 1 and f"answered with {trouble[0]}" in err
        assert f"1 episode in {partial(tmp_path)}: the same command goes on from there" in err
        assert len(kept(tmp_path)["episodes"]) == 1 and len(caplog.records) == lost
        partial(tmp_path).unlink()


def test_lost_episodes_count_and_are_asked_for_again(evaluate, tmp_path):
    lost = held_out(5)[1].request
    with serve(StandIn(lambda body: (500, b"") if lost in str(body) else native(body), path=PATH)) as server:
        at = ("--api-base", server.url)
        code, report, _, err, _ = evaluate(None, *at)
        assert code == 0 and report["env_errors"] == 1 and report["server"]["lost"] == {"status 500": 1}
        assert report["n"] == 5 and report["episodes"][1]["scores"]["card"] == 0
        assert "warning: 1 episode lost, which counts as 0 (status 500: 1)" in err
        assert f"kept: 4 episodes in {partial(tmp_path)}: the same command goes on from there, with --overwrite" in err
        code, report, *_ = evaluate(None, *at, "--overwrite")  # lost once more, and nothing else is left to ask
        assert code == 0 and report["server"]["lost"] == {"status 500": 1}
        server.complete, before = native, len(server.bodies)
        assert evaluate(None, *at)[0] == 2  # the report is not replaced unasked
        code, report, *_ = evaluate(None, *at, "--overwrite")
    assert code == 0 and report["server"]["lost"] == {} and not partial(tmp_path).exists()
    assert all(lost in str(body) for body in server.bodies[before:])
    assert report["episodes"] == evaluate_policy("ask-all", held_out(5))["episodes"]


def test_many_lost_episodes_are_no_end_while_others_are_played(evaluate):
    lost = [brief(scenario) for scenario in held_out(18)[1::2]]

    def complete(body):
        return (500, b"") if body["messages"][1]["content"] in lost else native(body)

    code, report, *_ = evaluate(complete, "--concurrency", 1, limit=18)
    assert code == 0 and report["server"]["lost"] == {"status 500": report["env_errors"]} and report["env_errors"] >= 9


OTHER = {
    "temperature": ["--temperature", "0.2"],
    "seed": ["--seed", "1"],
    "model": ["--model", "other"],
    "max_completion_len": ["--max-completion-len", "9"],
    "tools": ["--api-tools", "prompt"],
    "extra": ["--api-extra", '{"top_k": 1}'],
    "address": ["--api-base", "http://127.0.0.1:9"],
    "scenarios sha256": ["--limit", "6"],
}


def test_it_does_not_go_on_with_other_settings_or_a_damaged_file(evaluate, tmp_path):
    with serve(StandIn(lambda body: native(body) if len(server.bodies) < 12 else (401, b""), path=PATH)) as server:
        at = ("--api-base", server.url, "--concurrency", 1)
        assert evaluate(None, *at)[0] == 1
        there, asked = partial(tmp_path).read_text(), len(server.bodies)
        for name, options in OTHER.items():
            code, _, out, err, _ = evaluate(None, *at, *options, "--overwrite")
            assert code == 2 and out == "" and err.count("\n") == 1
            assert f"{partial(tmp_path)}: is of an evaluation with another {name}" in err
        assert partial(tmp_path).read_text() == there and len(server.bodies) == asked
        for damaged in (there[:-9], "[]", "{}", there.replace('"record"', '"x"'), there.replace('"said"', '"x"')):
            partial(tmp_path).write_text(damaged)
            code, _, out, err, _ = evaluate(None, *at)
            assert code == 2 and "damaged" in err and err.count("\n") == 1 and partial(tmp_path).read_text() == damaged


def test_an_environment_that_breaks_costs_its_episode_and_is_asked_again(evaluate, monkeypatch, tmp_path):
    step, lost = ClarifyEnv.step, held_out(5)[1].request

    def breaks(self, text, truncated=False):
        if self.scenario.request == lost:
            raise OSError("gone")
        return step(self, text, truncated)

    monkeypatch.setattr(ClarifyEnv, "step", breaks)
    with serve(StandIn(native, path=PATH)) as server:
        at = ("--api-base", server.url)
        code, report, _, err, _ = evaluate(None, *at)
        assert code == 0 and report["env_errors"] == 1 and report["server"]["lost"] == {}
        assert "1 episode lost, which counts as 0 (environment: 1)" in err and "with --overwrite" in err
        assert len(kept(tmp_path)["episodes"]) == 4
        monkeypatch.setattr(ClarifyEnv, "step", step)
        before = len(server.bodies)
        code, report, _, err, _ = evaluate(None, *at, "--overwrite")
        assert code == 0 and err == "" and report["env_errors"] == 0 and not partial(tmp_path).exists()
        assert all(lost in str(body) for body in server.bodies[before:])


def test_what_is_kept_of_another_pass_is_not_counted(evaluate, tmp_path):
    lost = held_out(5)[1].request
    with serve(StandIn(lambda body: (500, b"") if lost in str(body) else native(body), path=PATH)) as server:
        at = ("--api-base", server.url)
        assert evaluate(None, *at, "--also-greedy")[0] == 0 and len(kept(tmp_path)["episodes"]) == 8
        _, _, out, _, _ = evaluate(None, *at, "--overwrite")
    assert "going on: 4 of 5 episodes" in out
