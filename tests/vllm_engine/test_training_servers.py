"""Training with rollouts from real vLLM servers: their log-probs follow the trainer's weights, and what breaks that is
noticed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import urllib3

from grpo import run
from grpo.config import RunStopped
from grpo.engines import TurnRequest, server_weights
from grpo.engines.choice import make_engine
from grpo.engines.server_weights import EXTENSION, SCALE_OUT
from grpo.engines.vllm_sync import canary_logprobs
from grpo.engines.vllm_tensors import named_weights
from grpo.sampling import SamplingConfig
from grpo.trainer import Trainer
from scenarios.generator import held_out
from tests.vllm_engine.helpers import PROMPT, ROOT, sampled, serving, settings_for, trainers

TRAINING = [SCALE_OUT, *EXTENSION.split()]
SCALED = ["--logprobs-mode", "processed_logprobs"]
GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def url(settings, tmp_path_factory):
    with serving(
        settings.model.model, tmp_path_factory.mktemp("server") / "log.txt", *TRAINING, *SCALED, dev=True
    ) as address:
        yield address


@contextlib.contextmanager
def training(settings, *urls, **values):
    """A trainer whose engine is on the servers; they are free for another one afterwards."""
    settings = settings_for(settings.model.model, engine="auto", vllm_url=urls, **values)
    policy = run.load_policy(settings.model)
    chat = run.make_chat(policy)
    engine = make_engine(settings, policy, chat, held_out(None))
    packing = run.make_packing(settings, policy, chat, engine.max_context)
    try:
        yield Trainer(settings, policy, engine, chat, None, packing)
    finally:
        engine.sender.close()


def edit(policy, name="model.layers.0.self_attn.v_proj.weight", factor=-1.0):
    with torch.no_grad():
        policy.model.get_parameter(name).mul_(factor)


def one_turn(engine, prompt=PROMPT * 3):
    engine.submit(TurnRequest((0, 0), prompt, max_tokens=1))
    [output] = engine.step()
    engine.release(output.key)
    return output


def test_log_probs_follow_the_weights(url, settings):
    with training(settings, url) as trainer:
        before = canary_logprobs(trainer.policy, PROMPT * 2)
        for step in range(2):
            result = trainer.step(step)
            assert result.losses["sampler_gap/max"] < 1e-3
            assert abs(result.losses["sampler_gap/sequence_ratio_max"] - 1) < 1e-2
        trainer.engine.wake()
        after = canary_logprobs(trainer.policy, PROMPT * 2)
        assert max(abs(a - b) for a, b in zip(before, after)) > 0.05
        episode = trainer.sample_groups(3)[0].episodes[0]
        assert sampled(episode) == pytest.approx(trainers(trainer.policy, episode), abs=1e-3)


def test_log_probs_are_of_the_distribution_that_was_sampled_from(url, settings):
    with training(settings, url, temperature=0.7, prompts_per_step=1, num_generations=2) as trainer:
        for episode in trainer.sample_groups(0)[0].episodes:
            assert sampled(episode) == pytest.approx(trainers(trainer.policy, episode, 0.7), abs=1e-3)
            assert sampled(episode) != pytest.approx(trainers(trainer.policy, episode, 1.0), abs=1e-2)


def test_prefixes_cached_with_older_weights_are_not_read(url, settings, monkeypatch):
    """After an edit that the prompt's keys and values pass through, with and without what forgets them."""
    with training(settings, url) as trainer:
        engine, policy = trainer.engine, trainer.policy
        for forgets in (True, False):
            with monkeypatch.context() as patch:
                engine.start(0, GREEDY)
                one_turn(engine)
                edit(policy)
                engine.weights_changed()
                if not forgets:
                    patch.setattr(engine, "forget_prefixes", lambda server: None)
                    # Pausing forgets them as well.
                    patch.setattr(engine.served[0].server, "command", keeping(engine.served[0].server))
                    with pytest.raises(RunStopped, match="no tensor's checksum differs"):
                        engine.wake()
                    continue
                engine.start(1, GREEDY)
                output = one_turn(engine)
                expected = canary_logprobs(policy, PROMPT * 3 + output.token_ids)[-1]
                assert output.logprobs[0] == pytest.approx(expected, abs=1e-3)


def keeping(server):
    """Its `command`, with pauses that keep the cache."""
    command = server.command
    return lambda path, *rest: command(path.replace("mode=abort", "mode=abort&clear_cache=false"), *rest)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.3.mlp.down_proj.weight"])
def test_a_corrupted_tensor_stops_the_run_and_is_named(url, settings, monkeypatch, name):
    def weights(model, tied_twice=False):
        for key, tensor in named_weights(model, tied_twice):
            yield key, tensor * 1.1 if key == name and not tied_twice else tensor

    with training(settings, url) as trainer:
        monkeypatch.setattr(server_weights, "named_weights", weights)
        trainer.engine.weights_changed()
        with pytest.raises(RunStopped) as error:
            trainer.engine.start(1)
        assert f"1 tensors differ, first {name}" in str(error.value) and "\n" not in str(error.value)


def test_a_tied_head_has_the_new_weights(url, settings):
    """On a CPU vLLM's own loading leaves its packed copy as it was."""
    with training(settings, url) as trainer:
        edit(trainer.policy, "model.embed_tokens.weight", 1.5)
        trainer.engine.weights_changed()
        trainer.engine.wake()  # or it would have been noticed


def test_an_answer_from_other_weights_stops_the_run(url, settings):
    with training(settings, url) as trainer:
        trainer.engine.start(0)
        urllib3.request("POST", f"{url}/update_weight_version", json={"new_version": "somebody else's"})
        with pytest.raises(RunStopped, match="sampled with other weights .somebody else's. than it was sent"):
            one_turn(trainer.engine)


def test_a_transfer_that_breaks_off_leaves_a_server_for_the_next_run(url, settings, monkeypatch):
    def weights(model, tied_twice=False):
        for number, pair in enumerate(named_weights(model, tied_twice)):
            if number == 5 and sending:
                raise KeyboardInterrupt
            yield pair

    sending = False
    with training(settings, url) as trainer, monkeypatch.context() as patch:
        shapes = server_weights._names_and_shapes

        def and_then(pairs):
            nonlocal sending
            found = shapes(pairs)
            sending = True
            return found

        patch.setattr(server_weights, "named_weights", weights)
        patch.setattr(server_weights, "_names_and_shapes", and_then)
        trainer.engine.weights_changed()
        with pytest.raises(KeyboardInterrupt):
            trainer.engine.wake()
    with training(settings, url) as trainer:
        assert one_turn(trainer.engine).token_ids


FLAGS = (
    "--recipe tiny --device cpu --beta 0 --num-steps 3 --warmup-steps 0 --prompts-per-step 3 --num-generations 2 "
    "--max-completion-len 64 --eval-limit 0 --save-every 1"
).split()


def start(url, settings, folder, *more, torchrun=()):
    command = [*torchrun, "train.py", *FLAGS, "--model", settings.model.model, "--vllm-url", url]
    return subprocess.Popen(
        [sys.executable, *command, "--output-dir", str(folder), *more],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def history(folder):
    path = folder / "log_history.json"
    return json.loads(path.read_text()) if path.exists() else []


def test_two_processes_train_what_one_does(url, settings, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, more in {"one": (), "two": torchrun}.items():
        process = start(url, settings, tmp_path / name, torchrun=more)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
        assert f"vllm serve at {url} (1 worker)" in out
    for one, two in zip(history(tmp_path / "one"), history(tmp_path / "two"), strict=True):
        for row in (one, two):
            assert 0 < row["sampler_gap/max"] < 1e-3 and row["time/sync"] > 0
        for key in ("reward", "completions/mean_length", "loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


def test_a_killed_run_leaves_a_server_that_the_next_one_can_have(url, settings, tmp_path):
    first = start(url, settings, tmp_path / "run", "--num-steps", "500")
    while len(history(tmp_path / "run")) < 2:
        assert first.poll() is None, first.stderr.read()[-2000:]
        time.sleep(0.1)
    second = start(url, settings, tmp_path / "other")
    assert second.wait(120) == 2 and not (tmp_path / "other").exists()
    assert "is the sampler of another training run" in second.stderr.read() and first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    third = start(url, settings, tmp_path / "other")
    assert third.wait(300) == 0, third.stderr.read()[-2000:]
    assert len(history(tmp_path / "other")) == 3


def test_a_server_over_two_workers(settings, tmp_path):
    """Tensor parallelism: every worker takes its part of each tensor."""
    flags = [*TRAINING, "--tensor-parallel-size", "2"]
    cores = sorted(os.sched_getaffinity(0))  # vLLM wants to be told where there are fewer NUMA nodes than workers
    threads = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(settings.model.model, tmp_path / "log.txt", *flags, dev=True, **threads))
        with training(settings, address, num_generations=2) as trainer:
            assert "(2 workers)" in trainer.engine.description
            for step in range(2):
                assert trainer.step(step).losses["sampler_gap/max"] < 1e-3
                edit(trainer.policy)  # whatever the update did
                trainer.engine.weights_changed()
            stack.close()  # the server ends
            with pytest.raises(RunStopped, match="cannot be reached .* --resume RUN. goes on"):
                trainer.step(2)
