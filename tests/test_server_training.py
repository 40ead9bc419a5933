"""Training with rollouts from servers: who has which weights, in which order, and what stops a run.

The servers here are stand-ins with the real receiving end of weights; tests/vllm_engine/test_training_servers.py has
real ones.
"""

from __future__ import annotations

import contextlib
import re
import time

import pytest
import torch

from grpo import run
from grpo.config import Config, RunStopped
from grpo.engines import TurnRequest, server_weights
from grpo.engines.choice import make_engine
from grpo.engines.vllm_tensors import named_weights
from grpo.engines.weight_channel import TRANSFER_SECONDS
from grpo.sampling import SamplingConfig
from scenarios.generator import held_out
from tests.stand_in import serve
from tests.test_trainer import SMALL, ToyTrainer
from tests.vllm_stand_in import VllmStandIn

PROMPT = tuple(range(20, 60))


@pytest.fixture(scope="module")
def chat(folder):
    return run.make_chat(run.load_policy(Config().with_values({"model": str(folder), "device": "cpu"}).model))


@contextlib.contextmanager
def serving(chat, folder, count=1, **options):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serve(VllmStandIn(chat, folder, **options))) for _ in range(count)]


def settings_of(folder, servers, **values) -> Config:
    urls = tuple(server.url for server in servers)
    return Config().with_values(SMALL | {"model": str(folder), "beta": 0.0, "vllm_url": urls} | values)


def make(folder, servers, **values):
    """A trainer whose engine is on the servers."""
    settings = settings_of(folder, servers, **values)
    policy = run.load_policy(settings.model)
    chat = run.make_chat(policy)
    engine = make_engine(settings, policy, chat, held_out(5))
    packing = run.make_packing(settings, policy, chat, engine.max_context)
    return ToyTrainer(settings, policy, engine, chat, None, packing)


def change(policy, amount=0.3):
    """An update: of what the prompt's keys and values pass through."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "v_proj" in name:
                weight.add_(amount * torch.randn_like(weight))


def one_turn(engine, prompt=PROMPT, group=0):
    engine.submit(TurnRequest((group, 0), prompt, max_tokens=4, group=group))
    [output] = engine.step()
    engine.release(output.key)
    return output


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("workers", [1, 2])
def test_every_step_is_sampled_with_the_trainers_weights(folder, chat, workers):
    with serving(chat, folder, count=2, workers=workers) as servers:
        trainer = make(folder, servers)
        before = [weight.clone() for _, weight in named_weights(trainer.policy.model)]
        for step in range(3):
            losses = trainer.step(step).losses
            assert losses["sampler_gap/max"] < 1e-4 and losses["grad_norm"] > 0
        trainer.engine.wake()
        weights = dict(named_weights(trainer.policy.model))
        assert any(not torch.equal(a, b) for a, b in zip(before, weights.values()))
        for server in servers:
            assert len(server.bodies) > 3 * 4  # both have sampled
            for worker in server.workers:
                there = dict(worker.llm.model.named_parameters())
                assert all(torch.equal(there[name], weight) for name, weight in weights.items())


def test_a_group_is_one_servers(folder, chat):
    with serving(chat, folder, count=2) as servers:
        engine = make(folder, servers).engine
        seen = [len(server.bodies) for server in servers]
        for group in range(3):
            one_turn(engine, group=group)
        assert [len(server.bodies) - n for server, n in zip(servers, seen)] == [2, 1]


ORDER = [
    "/pause", "grpo_load", "grpo_compare", "/update_weight_version", "/reset_prefix_cache", "/resume", "generate",
    "generate",
]  # fmt: skip


def test_order_of_calls(folder, chat):
    """Each tensor once, then the cache, then the comparison; nothing where no update was."""
    with serving(chat, folder) as [server]:
        engine = make(folder, [server]).engine
        assert server.posts == ["grpo_describe", "grpo_meet", "/resume", "generate", "grpo_join", *ORDER]
        server.posts.clear()
        engine.wake(), engine.start(0), engine.sleep()
        assert server.posts == []
        change(engine.policy)
        engine.weights_changed()
        engine.start(1)
        engine.wake()
        assert server.posts == ORDER
        loads = [call for call in server.llm.calls if call in ("load", "loaded", "reset")]
        names = [name for name, _ in named_weights(engine.policy.model)]
        assert server.llm.loaded == [names, names]
        assert loads == ["load"] * len(names) + ["loaded", "reset"] + ["load"] * len(names) + ["loaded", "reset"]


def test_adapters_arrive_merged(folder, chat):
    pytest.importorskip("peft", reason="peft is not installed")
    with serving(chat, folder) as [server]:
        engine = make(folder, [server], lora_rank=2).engine
        with torch.no_grad():
            for name, weight in engine.policy.model.named_parameters():
                if ".lora_B." in name:
                    weight.fill_(0.05)
        engine.weights_changed()
        engine.start(0)
        there = dict(server.llm.model.named_parameters())
        assert all(torch.equal(there[name], weight) for name, weight in named_weights(engine.policy.model))


# --------------------------------------------------------------------------------------------- what ends a run: weights


def stopped(folder, chat, break_it, action=None, **options) -> str:
    """The line with which the run ends, soon, after `break_it(server, engine, monkeypatch)` and an update."""
    with serving(chat, folder, **options) as [server], pytest.MonkeyPatch.context() as patch:
        engine = make(folder, [server]).engine
        engine.start(0, SamplingConfig(0.0))
        one_turn(engine)
        break_it(server, engine, patch)
        change(engine.policy)
        engine.weights_changed()
        began = time.monotonic()
        with pytest.raises(RunStopped) as raised:
            engine.start(1)
            one_turn(engine)
        assert time.monotonic() - began < TRANSFER_SECONDS / 2, "somebody waited for a tensor that nobody takes"
    line = str(raised.value)
    assert line.startswith(f"--vllm-url {server.url}: ") and "\n" not in line
    return line


def loads_nothing(server, engine, patch):
    patch.setattr(server.workers[0], "reload_weights", lambda weights_iterator, **options: list(weights_iterator))


def loads_one_wrongly(server, engine, patch):
    load = server.workers[0].reload_weights

    def reload_weights(weights_iterator, **options):
        wrong = ((n, w * 1.1 if n.endswith("1.self_attn.k_proj.weight") else w) for n, w in weights_iterator)
        load(weights_iterator=wrong, **options)

    patch.setattr(server.workers[0], "reload_weights", reload_weights)


def sends_one_wrongly(server, engine, patch):
    """What the sampler then has is not what it should have, whatever it has been sent."""

    def weights(model, tied_twice=False):
        found = dict(named_weights(model, tied_twice))
        if not tied_twice:
            a, b = "model.layers.0.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"
            found[a], found[b] = found[a] * 1.5, found[b] * 1.5
        yield from found.items()

    patch.setattr(server_weights, "named_weights", weights)


def keeps_prefixes(server, engine, patch):
    patch.setattr(server.llm, "reset_prefix_cache", lambda: True)


def refuses_the_reset(server, engine, patch):
    patch.setattr(server.llm, "reset_prefix_cache", lambda: False)


def was_restarted(server, engine, patch):
    server.restart()


def cannot_load(server, engine, patch):
    def reload_weights(weights_iterator, **options):
        next(weights_iterator)
        raise ValueError("no room\nfor this tensor")

    patch.setattr(server.workers[0], "reload_weights", reload_weights)


def leaves_tensors(server, engine, patch):
    patch.setattr(server.workers[0], "reload_weights", lambda weights_iterator, **options: next(weights_iterator))


def is_gone(server, engine, patch):
    server.gone = True


BROKEN = {
    loads_nothing: r"does not have the trainer's weights: .* 2 tensors differ, first model.layers.0.self_attn.v_proj",
    loads_one_wrongly: r"1 tensors differ, first model.layers.1.self_attn.k_proj.weight",
    sends_one_wrongly: r"2 tensors differ, first model.layers.0.self_attn.q_norm.weight",
    keeps_prefixes: r"log-probs of a fixed text differ by .* no tensor's checksum differs",
    refuses_the_reset: r"its prefix cache could not be reset",
    was_restarted: r"load: a worker there says: RuntimeError: does not know this trainer; was the server restarted\?",
    cannot_load: r"load: a worker there says: ValueError: no room for this tensor",
    leaves_tensors: r"load: a worker there says: RuntimeError: .* was not taken",
    is_gone: r"cannot be reached .*; when its servers are there again, `python train.py --resume RUN` goes on",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: each.__name__)
def test_a_server_without_the_trainers_weights_stops_the_run(folder, chat, broken):
    assert re.search(BROKEN[broken], stopped(folder, chat, broken))


def test_a_worker_of_several_that_cannot_load_stops_the_run(folder, chat):
    def second_cannot(server, engine, patch):
        patch.setattr(server.workers[1], "reload_weights", lambda **options: 1 / 0)

    assert "ZeroDivisionError" in stopped(folder, chat, second_cannot, workers=2)


def test_an_answer_from_other_weights_stops_the_run(folder, chat):
    """Restarted while it samples: its weights are those of its folder again, and the log-probs would not tell."""
    with serving(chat, folder) as [server]:
        engine = make(folder, [server]).engine
        engine.start(0)
        server.restart()
        with pytest.raises(RunStopped, match=r"sampled with other weights \(default\) than it was sent \(.*-1\)"):
            one_turn(engine)


def test_a_trainer_that_says_nothing_of_its_updates_shows_in_the_gap(folder, chat, monkeypatch):
    with serving(chat, folder) as [server]:
        trainer = make(folder, [server], learning_rate=1e-2)
        monkeypatch.setattr(trainer.engine, "weights_changed", lambda: None)
        gaps = [trainer.step(step).losses["sampler_gap/max"] for step in range(2)]
        assert gaps[0] < 1e-4 < 1e-3 < gaps[1]
