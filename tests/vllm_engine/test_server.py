"""`eval.py --vllm-url` and the server engine against a real vLLM server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from grpo.config import UsageError
from grpo.engines import TurnRequest
from grpo.engines.server_engine import connect
from grpo.engines.torch_engine import TorchEngine
from grpo.sampling import SamplingConfig
from scenarios.generator import held_out
from tests import toy
from tests.vllm_engine.helpers import PROMPT, ROOT, play, sampled, serving, trainers, turns

GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def url(settings, tmp_path_factory):
    """A server of the bundled policy, whose folder has a generation config that would sample quite differently."""
    with serving(settings.model.model, tmp_path_factory.mktemp("server") / "log.txt") as address:
        yield address


@pytest.fixture
def served(url, settings, chat):
    return connect(url, settings.model.model, settings.model.model, chat, [PROMPT])


def test_the_server_says_what_it_has(served, settings):
    assert served.max_context == 1024 and served.model == settings.model.model


def test_greedy_episodes_are_the_torch_engines(served, policy, chat):
    """Token for token over 50 scenarios, although the folder asks for a repetition penalty and two new tokens."""
    in_process = TorchEngine(policy.model, chat.eos_ids, served.max_context)
    options = dict(num_generations=1, sampling=GREEDY)
    ours, theirs = (play(each, chat, held_out(50), **options) for each in (in_process, served))
    for a, b in zip(ours, theirs):
        assert a.episodes[0].completion_ids == b.episodes[0].completion_ids
        assert sampled(a.episodes[0]) == pytest.approx(sampled(b.episodes[0]), abs=1e-3)
    assert len({group.episodes[0].completion_ids for group in theirs}) > 10


def test_sampled_episodes_have_several_turns_and_the_models_log_probs(served, policy, chat):
    groups = play(served, chat, held_out(3), sampling=SamplingConfig(1.0))
    episodes = [episode for group in groups for episode in group.episodes]
    assert max(len(episode.turns) for episode in episodes) >= 3
    for episode in episodes:
        assert sampled(episode) == pytest.approx(trainers(policy, episode), abs=1e-3)
    assert all(len({episode.completion_ids for episode in group.episodes}) == 4 for group in groups)


def test_seeds_are_per_request(served):
    requests = [TurnRequest((0, member), PROMPT, max_tokens=16) for member in range(4)]

    def ids(step=0):
        served.start(step)
        outputs = turns(served, requests)
        return [outputs[key].token_ids for key in sorted(outputs)]

    first = ids()
    assert len(set(first)) == 4 and ids() == first
    assert not set(ids(step=1)) & set(first)


def test_what_the_server_refuses_is_one_line(served):
    served.start(0)
    served.max_context = 5000  # so that the server has to say it
    served.submit(TurnRequest((0, 0), PROMPT, max_tokens=2000))
    with pytest.raises(UsageError, match=f"--vllm-url {served.server.url}: .* 400, .*1024"):
        served.step()


def test_another_model_is_noticed(url, settings, chat, tmp_path):
    with pytest.raises(UsageError, match="not --model other"):
        connect(url, "other", "other", chat, [PROMPT])
    name = settings.model.model
    with pytest.raises(UsageError, match="has another tokenizer than --model"):
        connect(url, name, name, type(chat)(toy.make_tokenizer()), [PROMPT])
    with pytest.raises(UsageError, match="1024 tokens .* too short for first prompts of 1024"):
        connect(url, name, name, chat, [tuple(range(1024))])


def test_eval_py(url, settings, tmp_path):
    """The command, beside the same command without a server."""
    flags = ["--limit", "5", "--temperature", "0", "--max-completion-len", "320"]
    folder = tmp_path / "model"
    shutil.copytree(settings.model.model, folder)
    for name, more in {"served": ["--model", settings.model.model, "--vllm-url", url + "/v1"], "own": []}.items():
        more = more or ["--model", str(folder), "--engine", "torch", "--device", "cpu"]
        done = subprocess.run(
            [sys.executable, "eval.py", *flags, *more, "--output", str(tmp_path / f"{name}.json")],
            cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
    served, own = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("served", "own"))
    assert served["server"] == {"model": settings.model.model, "max_context": 1024}
    assert served["avg_score"] == own["avg_score"]
    assert [row["conversation"] for row in served["episodes"]] == [row["conversation"] for row in own["episodes"]]
