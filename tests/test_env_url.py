"""`--env-url`: training and evaluation on an environment server, and how they say that one cannot be used."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from env.clarify import StopReason
from env.server import __main__ as server_script
from grpo.config import Config, RunStopped, UsageError, refuse_changes
from grpo.environment import environment, sessions_needed
from grpo.evaluate import evaluate_policy
from grpo.metrics import without_times
from scenarios.generator import held_out
from tests.env_servers import FOREIGN, free_port, in_thread
from tests.local_server import Response, listening
from tests.test_rollout import ScriptedEngine, StubChat, play
from tests.test_run import arguments, train_py

needs_openenv = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason='needs openenv: pip install -e ".[server]"'
)


@pytest.fixture(scope="module")
def url():
    """Of a server in this process: openenv takes seconds to import, and its client is needed here anyway."""
    from env.server.app import ServerLimits

    with in_thread(ServerLimits(max_sessions=60)) as address:
        yield address


@pytest.fixture
def without_openenv(monkeypatch):
    """As where the extra is not installed, whatever has been imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "openenv"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("remote", "client", "models", "app", "environment"):
        monkeypatch.delitem(sys.modules, f"env.server.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "openenv", None)


# ---------------------------------------------------------------------------------------------------- the same numbers


@pytest.fixture
def played(monkeypatch):
    """The scenarios that were given to a server: equal numbers alone would not show that one was asked."""
    from env.server.remote import RemoteEnv

    seen, reset = [], RemoteEnv.reset
    monkeypatch.setattr(RemoteEnv, "reset", lambda self: seen.append(self.scenario) or reset(self))
    return seen


@needs_openenv
def test_evaluations_on_a_server_are_those_in_process(url, run_eval, played, tmp_path):
    for model in ("ask-all", "random", "tiny"):
        here, there = tmp_path / f"{model}.here.json", tmp_path / f"{model}.there.json"
        assert run_eval("--model", model, "--limit", 15, "--output", here)[0] == 0
        code, _, err = run_eval("--model", model, "--limit", 15, "--output", there, "--env-url", url)
        assert code == 0, err
        assert json.loads(here.read_text()) == json.loads(there.read_text())
    assert len(played) == 3 * 15


@needs_openenv
def test_foreign_scenarios_are_played_on_a_server_too(url, run_eval, tmp_path):
    file, reports = tmp_path / "mine.json", []
    file.write_text(json.dumps([FOREIGN.model_dump(mode="json")]))
    for extra in ([], ["--env-url", url]):
        output = tmp_path / f"{len(extra)}.json"
        assert run_eval("--model", "ask-all", "--scenarios", file, "--output", output, *extra)[0] == 0
        reports.append(json.loads(output.read_text()))
    assert reports[0] == reports[1] and reports[0]["avg_score"] > 0.5


@needs_openenv
def test_a_run_on_a_server_is_the_run_in_process(url, played, tmp_path):
    changes = dict(model="tiny", num_steps=2, max_completion_len=96, eval_limit=5, num_iterations=1, save_every=1)
    for name, extra in (("here", {}), ("there", {"env_url": url})):
        assert train_py(arguments("tiny", tmp_path / name, **changes, **extra)) == 0
    here, there = (json.loads((tmp_path / name / "log_history.json").read_text()) for name in ("here", "there"))
    assert without_times(here) == without_times(there)
    assert len(played) == 2 * 2 * 3 + 2 * 2 * 5  # steps of 2 x 3 episodes; two evaluations, sampled and greedy
    assert all(row["stop/env_error"] == 0 for row in there) and here[-1]["reward_std"] > 0
    assert (tmp_path / "there/config.json").read_text().count(url) == 1


def test_a_resumed_run_may_find_its_server_elsewhere():
    stored = Config().with_values({"env_url": "http://one:1"})
    refuse_changes(stored, stored.with_values({"env_url": "http://two:2"}))
    with pytest.raises(UsageError, match="--temperature"):
        refuse_changes(stored, stored.with_values({"temperature": 0.5}))
    assert sessions_needed(Config().with_values({"prompts_per_step": 9, "num_generations": 8})) == 72
    assert sessions_needed(Config()) == 50  # those of the evaluation


# --------------------------------------------------------------------------------------------------------- what breaks


def turns(key, turn):
    return (5, 6, 151645)


class SpokenChat(StubChat):
    """Every turn of the model is a question."""

    def decode_turn(self, ids):
        return 'ask_question("Which day?")'


@needs_openenv
def test_a_session_that_breaks_costs_its_episode_alone(url, caplog):
    envs = environment(url, 8)
    made = []

    def factory(scenario):
        env = envs(scenario)
        made.append(env)
        if len(made) == 2:
            step, calls = env.step, []

            def cut(text, truncated=False):
                calls.append(text)
                if len(calls) == 2:  # the line goes dead between two turns

                    async def abort():
                        env._session._ws.transport.abort()

                    envs.run(abort())
                return step(text, truncated)

            env.step = cut
        return env

    with caplog.at_level(logging.WARNING, "grpo.rollout"):
        (group,) = play(
            ScriptedEngine(turns), SpokenChat(), num_generations=3, env_factory=factory, reward_fn=lambda record: 1.0
        )
    assert group.rewards == [1.0, None, 1.0]
    reasons = [episode.stop_reason for episode in group.episodes]
    assert reasons == [StopReason.QUESTION_CAP, StopReason.ENV_ERROR, StopReason.QUESTION_CAP]
    assert len(group.episodes[0].record.questions) == 6 and len(caplog.records) == 1
    (again,) = play(ScriptedEngine(turns), SpokenChat(), num_generations=3, env_factory=envs)
    assert [episode.stop_reason for episode in again.episodes] == [StopReason.QUESTION_CAP] * 3


@needs_openenv
def test_a_server_that_is_gone_costs_the_episodes_under_way_and_is_waited_for(monkeypatch, capsys):
    from env.server.app import ServerLimits
    from env.server.remote import RemoteEnvs

    port = free_port()

    def reasons(envs):
        (group,) = play(ScriptedEngine(turns), SpokenChat(), num_generations=2, env_factory=envs)
        return {episode.stop_reason for episode in group.episodes}

    with in_thread(ServerLimits(), port=port) as address:
        envs = environment(address, 3)
        assert reasons(envs) == {StopReason.QUESTION_CAP}
        bare = RemoteEnvs(address)
        assert reasons(bare) == {StopReason.QUESTION_CAP}
    assert reasons(bare) == {StopReason.ENV_ERROR}
    report = evaluate_policy("ask-all", held_out(3), env_factory=bare)
    assert report["env_errors"] == report["n"] == 3 and report["avg_score"] == 0
    with pytest.raises(UsageError, match="no server answers"):
        environment(address)
    monkeypatch.setattr("grpo.environment.WAIT_SECONDS", 0.3)
    with pytest.raises(RunStopped, match="--env-url .* no server answers .* --resume"):
        reasons(envs)
    one_line(capsys.readouterr().err, "waiting up to 0.3 s", address)
    monkeypatch.setattr("grpo.environment.WAIT_SECONDS", 60.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reasons, envs)
        time.sleep(0.3)
        with in_thread(ServerLimits(), port=port):
            assert waiting.result(30) == {StopReason.QUESTION_CAP}


# ---------------------------------------------------------------------------------------------------- one line, code 2


def one_line(err, *words):
    assert err.count("\n") == 1 and "Traceback" not in err, err
    for word in words:
        assert word in err, err


@needs_openenv
def test_no_server_is_one_line_and_nothing_is_written(run_eval, tmp_path, capsys):
    url = f"http://127.0.0.1:{free_port()}"
    for model in ("ask-all", "tiny"):
        code, _, err = run_eval("--model", model, "--env-url", url, "--output", tmp_path / "out.json")
        assert code == 2
        one_line(err, f"--env-url {url}: no server answers there", "refused", "python -m env.server")
    assert train_py(arguments("tiny", tmp_path / "run", env_url=url)) == 2
    one_line(capsys.readouterr().err, f"--env-url {url}: no server answers there")
    for bad in ("127.0.0.1:8000", "ws://x:1", "http://", "http://[", "nonsense"):
        code, _, err = run_eval("--model", "ask-all", "--env-url", bad)
        assert code == 2
        one_line(err, f"--env-url {bad}: must be an address like http://127.0.0.1:8000")
    assert not list(tmp_path.iterdir())


@needs_openenv
def test_another_server_another_version_and_too_few_sessions(url):
    answers = {
        "not this environment": b'{"name": "chess"}',
        "has version 0.1, this side has": b'{"name": "clarify", "version": "0.1"}',
        "what answers there": b"<html>",
    }
    for words, body in answers.items():
        with listening(lambda request, body=body: Response(body)) as other:
            with pytest.raises(UsageError, match=words):
                environment(other)
    with pytest.raises(UsageError, match="takes on 60 sessions, 61 are needed at once; .* --max-sessions 61"):
        environment(url, 61)


def test_a_missing_package_is_named_with_its_install_command(without_openenv, run_eval, capsys, tmp_path):
    code, _, err = run_eval("--model", "ask-all", "--env-url", "http://127.0.0.1:1")
    assert code == 2
    one_line(err, "--env-url: the package openenv is missing", 'pip install -e ".[server]"')
    assert train_py(arguments("tiny", tmp_path / "run", env_url="http://127.0.0.1:1")) == 2
    one_line(capsys.readouterr().err, "--env-url: the package openenv is missing", 'pip install -e ".[server]"')
    assert server_script.main([]) == 2
    one_line(capsys.readouterr().err, "env.server: the package openenv is missing", 'pip install -e ".[server]"')
    assert environment("") is environment(None)  # and without the flag nothing is needed


@needs_openenv
def test_bad_flags_of_the_server(capsys, url):
    for flag, value, words in [
        ("--port", 0, "from 1 to 65535"),
        ("--port", 70000, "from 1 to 65535"), ("--port", url.rpartition(":")[2], "in use"),
        ("--max-sessions", 0, "at least 1"), ("--max-message-kib", 0, "at least 1"), ("--idle-minutes", 0, "above 0"),
        ("--idle-minutes", "nan", "above 0"), ("--host", "no.such.host.invalid", "--host no.such.host.invalid"),
    ]:  # fmt: skip
        assert server_script.main([flag, str(value)]) == 2
        one_line(capsys.readouterr().err, f"env.server: {flag}" if flag != "--port" else "--port", words)


def test_compare_plays_nothing(run_eval, tmp_path):
    code, _, err = run_eval("--compare", tmp_path / "a.json", tmp_path / "b.json", "--env-url", "http://127.0.0.1:1")
    assert code == 2
    one_line(err, "--env-url: nothing is evaluated with --compare")
