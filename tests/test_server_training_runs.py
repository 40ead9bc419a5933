"""`train.py --vllm-url`: which servers are refused before anything is written, runs that lose theirs, and several
processes. The servers are stand-ins; tests/vllm_engine/test_training_servers.py has real ones."""

# ruff: noqa: F811 (fixtures are imported, and arguments bear their names)

from __future__ import annotations

import gc
import json
import socket

import pytest

from grpo import distributed
from grpo.config import parse
from grpo.metrics import without_times
from grpo.replay import replay_settings
from grpo.run import make_trainer
from tests import processes, toy
from tests.stand_in import serve
from tests.test_run import arguments, history, rewards_with_spread, train_py  # noqa: F401
from tests.test_server_training import chat, serving  # noqa: F401
from tests.vllm_stand_in import VllmStandIn

FLAGS = dict(beta=0, eval_limit=0, num_iterations=1, warmup_steps=0)


def flags(folder, output, servers, **changes):
    return [*arguments(folder, output, **FLAGS | changes), "--vllm-url", *(server.url for server in servers)]


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(folder, output, capsys, servers, more=(), **changes) -> str:
    """The one line with which a run of these servers is refused, before anything is written."""
    assert train_py([*flags(folder, output, servers, **changes), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and not output.exists()
    return error


def no_route(server):
    original = server.answer
    server.answer = lambda request: (404, {"detail": "Not Found"}) if "rpc" in request.path else original(request)


def no_extension(server):
    server.rpc = lambda body: (500, {"error": {"message": "no method grpo_describe"}})


def no_scale_out(server):
    server.generate = lambda body: (403, {"error": {"message": "Scale-out endpoints are disabled"}})


def another_tokenizer(server):
    server.chat = type(server.chat)(toy.make_tokenizer())
    server.chat.tokenizer.add_tokens(["the"])


def unlike(server):
    """Same name, same tokenizer, other widths."""
    model = toy.make_model(toy.make_tokenizer(), hidden_size=64)
    server.llm.model = model


STARTED_OTHERWISE = {
    "without VLLM_SERVER_DEV_MODE=1, which training needs: VLLM_SERVER_DEV_MODE=1 vllm serve": ({}, no_route),
    "without --worker-extension-cls grpo.engines.server_worker.WeightReceiver, which": ({}, no_extension),
    "without --enable-scale-out, which training needs": ({}, no_scale_out),
    "has another tokenizer than --model": ({}, another_tokenizer),
    "RuntimeError": ({}, unlike),
    "context of 300 tokens is shorter than episodes may be; start it with --max-model-len ": ({"context": 300}, None),
    "--data-parallel-size: start a server for each replica": ({"data_parallel_size": 2}, None),
    "its weights are quantized (fp8)": ({"quantization": "fp8"}, None),
    "computes in bfloat16, training in float32; start it with --dtype float32": ({"dtype": toy.torch.bfloat16}, None),
}


@pytest.mark.parametrize("message", STARTED_OTHERWISE)
def test_a_server_that_cannot_be_trained_with_is_refused(folder, chat, tmp_path, capsys, message):
    options, change = STARTED_OTHERWISE[message]
    with serving(chat, folder, **options) as [server]:
        if change:
            change(server)
        error = refused(folder, tmp_path / "run", capsys, [server])
        assert f"--vllm-url {server.url}: " in error and message in error


def test_log_probs_of_another_distribution_are_refused(folder, chat, tmp_path, capsys):
    with serving(chat, folder) as [server]:
        for more in (["--temperature", "0.7"], ["--top-p", "0.9"]):
            error = refused(folder, tmp_path / "run", capsys, [server], more)
            assert "start it with --logprobs-mode processed_logprobs" in error and " ".join(more) in error
    with serving(chat, folder, logprobs_mode="processed_logprobs") as [server]:
        args = flags(folder, tmp_path / "run", [server], num_steps=1)
        assert train_py([*args, "--temperature", "0.7"]) == 0
        assert history(tmp_path / "run")[0]["sampler_gap/max"] < 1e-4


def test_another_model_and_nobody_are_refused(folder, chat, tmp_path, capsys):
    with serving(chat, folder) as [server]:
        server.models["data"][0] |= {"id": "other", "root": "other"}
        assert "serves other, not --model" in refused(folder, tmp_path / "run", capsys, [server])
    error = refused(folder, tmp_path / "run", capsys, [server])
    assert "cannot be reached" in error and "--worker-extension-cls" in error


def test_a_server_has_one_trainer(folder, chat, tmp_path, capsys):
    with serving(chat, folder) as [server]:
        settings = parse(flags(folder, tmp_path / "first", [server]), {})
        first, _ = make_trainer(settings)
        error = refused(folder, tmp_path / "second", capsys, [server])
        assert "is the sampler of another training run that goes on; a server has one trainer" in error
        first.step(0)  # which has not been disturbed
        del first
        gc.collect()  # as if its process had ended,
        server.paused = True  # while it sent weights
        assert train_py(flags(folder, tmp_path / "second", [server], num_steps=1)) == 0


def test_a_server_under_two_names_is_refused(folder, chat, tmp_path, capsys):
    with serving(chat, folder) as [server]:
        other = VllmStandIn(chat, folder)
        other.url = server.url.replace("127.0.0.1", "localhost")
        if socket.gethostbyname("localhost") != "127.0.0.1":
            pytest.skip("localhost is another address here")
        error = refused(folder, tmp_path / "run", capsys, [server, other])
        assert "is the same server as another one" in error
        assert "is there twice" in refused(folder, tmp_path / "run", capsys, [server, server])


@pytest.mark.parametrize("more", [["--engine", "vllm"], ["--tensor-parallel", "2"], ["--gpu-memory", "0.5"]], ids=str)
def test_flags_that_would_do_nothing_are_refused(folder, chat, tmp_path, capsys, more):
    with serving(chat, folder) as [server]:
        assert f"{' '.join(more)}: must be left out; " in refused(folder, tmp_path / "run", capsys, [server], more)
        assert not server.posts


def test_what_is_no_address_is_refused(folder, tmp_path, capsys):
    server = VllmStandIn(None, folder)
    server.url = "localhost:8000"
    assert "--vllm-url localhost:8000: must be an address" in refused(folder, tmp_path / "run", capsys, [server])


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_run_that_loses_its_server_goes_on_with_another(folder, chat, tmp_path, capsys):
    with serving(chat, folder, count=2) as servers:
        assert train_py(flags(folder, tmp_path / "whole", servers)) == 0
        out = " ".join(capsys.readouterr().out.replace("│", " ").split())  # the box breaks lines where it likes
        assert f"vllm serve at {servers[0].url}, {servers[1].url} (2 workers)" in out
        card = (tmp_path / "whole" / "final" / "README.md").read_text()
        assert "train.py --recipe" in card and "http://127" not in card  # it may be published
    with serving(chat, folder, count=2) as servers:
        generate = servers[1].generate

        def dies(body):
            log = tmp_path / "run" / "log_history.json"
            servers[1].gone |= log.exists() and len(history(tmp_path / "run")) == 3
            return None if servers[1].gone else generate(body)

        servers[1].generate = dies
        assert train_py(flags(folder, tmp_path / "run", servers)) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"--vllm-url {servers[1].url}: cannot be reached" in error
        assert "`python train.py --resume RUN` goes on" in error and len(history(tmp_path / "run")) == 3
    with serving(chat, folder, count=2) as servers:  # elsewhere
        urls = [server.url for server in servers]
        assert train_py(["--resume", str(tmp_path / "run"), "--vllm-url", *urls]) == 0
    assert without_times(history(tmp_path / "run")) == without_times(history(tmp_path / "whole"))
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert len(stored["vllm_url"]) == 2 and replay_settings(stored, "cpu").rollout.vllm_url == ()


def steps(settings):
    """Of two steps: which tokens were sampled, and the losses."""
    trainer, _ = make_trainer(settings)
    results = [trainer.step(index) for index in range(2)]
    ids = [[list(e.completion_ids) for group in result.groups for e in group.episodes] for result in results]
    return {"ids": ids, "losses": [result.losses for result in results]}


def test_two_processes_sample_and_train_what_one_does(folder, chat, tmp_path):
    """Weights are sharded: the first process sends whole ones, and both ask both servers."""
    with serve(VllmStandIn(chat, folder)) as first, serve(VllmStandIn(chat, folder)) as second:
        settings = parse(flags(folder, "unused", [first, second], prompts_per_step=3, learning_rate=1e-3), {})

        def work():
            with distributed.session():
                found = steps(settings)
                if distributed.is_first():
                    (tmp_path / "two.json").write_text(json.dumps(found))

        gc.collect()
        ended = processes.run(2, tmp_path, work)
        assert ended.codes == [0, 0], ended.output
        for server in (first, second):
            server.restart()
        one, two = steps(settings), json.loads((tmp_path / "two.json").read_text())
    assert two["ids"] == one["ids"] and one["ids"][0] != one["ids"][1]
    for ours, expected in zip(two["losses"], one["losses"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert ours["grad_norm"] > 0 and ours["sampler_gap/max"] < 1e-4


def test_all_processes_end_with_one_line(folder, chat, tmp_path):
    with serving(chat, folder, quantization="fp8") as [server]:
        words = flags(folder, tmp_path / "run", [server])
        gc.collect()  # connections of earlier tests must not be closed in a fork, which has not their threads
        ended = processes.run(2, tmp_path, lambda: exit(train_py(words)))
    assert ended.codes == [2, 2]
    lines = [line for output in ended.output for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "its weights are quantized" in lines[0]
