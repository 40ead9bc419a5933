"""In which order the rollout loop, the trainer and the vLLM engine call what is below them.

vLLM itself is a recorder here (tests/fake_vllm.py); tests/vllm_engine has the real one.
"""

from __future__ import annotations

import importlib
import sys
from itertools import groupby

import fake_vllm
import pytest
import torch

import grpo.engines
from grpo import run, trainer
from grpo.engines import TurnRequest
from grpo.engines.vllm_memory import MemoryPlan
from grpo.sampling import SamplingConfig
from scenarios.generator import held_out
from tests.test_rollout import SCENARIO, ScriptedEngine, StubChat, play, two_turns
from tests.test_trainer import SMALL, ToyTrainer, make


class Recorder:
    """An engine with the order of calls: what is asked, and at the end of a step, which turns ended with it."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []

    def __getattr__(self, name):
        value = getattr(self.engine, name)
        if name not in ("wake", "sleep", "weights_changed", "start", "submit", "step", "release"):
            return value

        def call(*args):
            about = {"submit": lambda r: (r.key, r.turn), "release": lambda key: key, "start": lambda n, *_: n}
            self.calls.append((name, about[name](*args)) if name in about else (name,))
            result = value(*args)
            if name == "step":
                self.calls.extend(("ended", output.key) for output in result)
            return result

        return call


# --------------------------------------------------------------------------------------------------- the rollout loop

A, B = (0, 0), (0, 1)


class AllAtOnce(ScriptedEngine):
    """Every turn that is waiting ends in the next step."""

    def step(self):
        return [output for _ in list(self.pending) for output in super(AllAtOnce, self).step()]


def calls_of(engine, **options):
    recorder = Recorder(engine)
    play(recorder, **options)
    return recorder.calls


def test_one_episode_plays_all_its_turns_while_another_one_is_in_its_first():
    """No barrier: as soon as one request ends its environment answers, and the next turn is asked for."""
    engine = ScriptedEngine(two_turns, rank=lambda key, turn: key[1])
    assert calls_of(engine, num_generations=2, step=7) == [
        ("start", 7), ("submit", (A, 0)), ("submit", (B, 0)),
        ("step",), ("ended", A), ("submit", (A, 1)),
        ("step",), ("ended", A), ("release", A),
        ("step",), ("ended", B), ("submit", (B, 1)),
        ("step",), ("ended", B), ("release", B),
    ]  # fmt: skip


def test_turns_that_end_together_are_all_answered_before_the_next_step():
    assert calls_of(AllAtOnce(two_turns), num_generations=2) == [
        ("start", 0), ("submit", (A, 0)), ("submit", (B, 0)),
        ("step",), ("ended", A), ("ended", B), ("submit", (A, 1)), ("submit", (B, 1)),
        ("step",), ("ended", A), ("ended", B), ("release", A), ("release", B),
    ]  # fmt: skip


@pytest.mark.parametrize("rank", [lambda key, turn: 0, lambda key, turn: hash((key, turn)) % 7], ids=["fair", "mixed"])
def test_whatever_the_order_of_ending(rank):
    """Any order: start once, all first turns first, each ended turn answered before the next step, one release each."""
    calls = calls_of(ScriptedEngine(two_turns, rank=rank), scenarios=[SCENARIO] * 3, num_generations=4)
    keys = [(s, m) for s in range(3) for m in range(4)]
    assert calls[:14] == [("start", 0), *(("submit", (key, 0)) for key in keys), ("step",)]
    assert [name for name, *_ in calls].count("start") == 1
    assert sorted(key for name, *key in calls if name == "release") == [[key] for key in keys]
    for is_step, block in groupby(calls[14:], key=lambda call: call == ("step",)):
        block = list(block)
        if not is_step:
            (ended, (answer, about)) = block
            assert ended[0] == "ended"
            assert (answer, about) in [("submit", (ended[1], 1)), ("release", ended[1])]


def test_an_episode_without_a_turn_is_neither_submitted_nor_released():
    calls = calls_of(ScriptedEngine(two_turns, max_context=512), chat=StubChat(range(512)), num_generations=2)
    assert calls == [("start", 0)]


# --------------------------------------------------------------------------------------------------------- the trainer


def trainer_of(folder, **values):
    """A toy trainer whose engine and optimiser write into one list; turns are left out of it."""
    each = make(folder, **values)
    each.engine = Recorder(each.engine)
    step = each.optimizer.step

    def update():
        each.engine.calls.append(("update",))
        step()

    each.optimizer.step = update
    return each


def outline(calls):
    return [name for name, *_ in calls if name in ("wake", "start", "sleep", "update", "weights_changed")]


STEP = ["wake", "start", "sleep", "update", "weights_changed"]


def test_a_step_wakes_samples_sleeps_updates_and_says_so(folder):
    each = trainer_of(folder)
    each.step(0), each.step(1)
    assert outline(each.engine.calls) == STEP * 2


def test_every_optimiser_step_is_said(folder):
    each = trainer_of(folder, num_iterations=2)
    each.step(0)
    assert outline(each.engine.calls) == [*STEP, "update", "weights_changed"]


def test_all_rounds_of_dynamic_sampling_are_on_one_wake(folder, monkeypatch):
    each = trainer_of(folder, dynamic_sampling=2)
    monkeypatch.setattr(trainer.adv, "has_spread", lambda rewards: False)
    each.step(0)
    assert outline(each.engine.calls)[:5] == ["wake", "start", "start", "start", "sleep"]


def test_a_dropped_update_changes_nothing(folder, monkeypatch):
    each = trainer_of(folder)
    original = trainer.policy_loss

    def poison(*args, **options):
        loss, *rest = original(*args, **options)
        return loss * float("nan"), *rest

    monkeypatch.setattr(trainer, "policy_loss", poison)
    each.step(0)
    assert outline(each.engine.calls) == ["wake", "start", "sleep"]


# --------------------------------------------------------------------------------------------------------------- vLLM


@pytest.fixture
def vllm_engine(monkeypatch):
    """The module, imported with vLLM's stand-in in vLLM's place."""
    name = "grpo.engines.vllm_engine"
    for fake, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, fake, module)
    before = sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name], grpo.engines.vllm_engine
    if before is not None:
        sys.modules[name] = grpo.engines.vllm_engine = before


@pytest.fixture
def parts(vllm_engine, folder):
    """Toy policy, chat, and a function that makes the engine; nothing of it has been called then."""
    values = {"model": str(folder), "beta": 0.0, "prompts_per_step": 2, "max_completion_len": 8}
    settings = run.Config().with_values(SMALL | values)
    policy = run.load_policy(settings.model)
    chat = run.make_chat(policy)
    plan = dict(max_context=1500, kv_cache_bytes=1)

    def make_engine(sleep_level=0, **options):
        return vllm_engine.VllmEngine(policy, chat.eos_ids, MemoryPlan(sleep_level=sleep_level, **plan), **options)

    return settings, policy, chat, make_engine


PROMPT = tuple(range(20, 60))
GREEDY = SamplingConfig(temperature=0.0)
SYNC = ["load", "loaded", "reset"]  # `load` stands for all tensors
CANARY = ["generate", "generate"]
TURN = ["add", "step"]


def turn(engine, key=(0, 0), turn=0):
    """One token after PROMPT."""
    engine.submit(TurnRequest(key, PROMPT, 1, turn))
    (output,) = engine.step()
    engine.release(key)
    return output


def taken(llm):
    """The calls since the last time, runs of `load` as one."""
    calls, llm.calls = llm.calls, []
    return [name for name, _ in groupby(calls) if name != "generate"], calls.count("generate")


def test_weights_are_loaded_once_each_and_cached_prefixes_forgotten_after_the_last(parts):
    """generate -> update -> generate, then sleep -> evaluation without an update in between."""
    _, policy, _, make_engine = parts
    engine = make_engine(sleep_level=2)
    assert engine.llm.calls == []
    engine.start(0, GREEDY)
    first = turn(engine)
    assert taken(engine.llm) == ([*SYNC, *TURN], 2)  # what vLLM starts with are arbitrary numbers

    engine.weights_changed()
    engine.weights_changed()
    engine.start(1, GREEDY)
    turn(engine)
    assert taken(engine.llm) == ([*SYNC, *TURN], 2)

    engine.sleep()
    engine.sleep()
    engine.start(2, GREEDY)
    assert turn(engine) == first
    assert taken(engine.llm) == (["sleep 2", "wake weights", *SYNC, "wake kv_cache", *TURN], 2)

    engine.start(3, GREEDY)  # neither slept nor changed
    turn(engine)
    assert taken(engine.llm) == (TURN, 0)

    names = [name for name, _ in policy.model.named_parameters()]  # tied ones once
    assert engine.llm.loaded == [names] * 3 and "lm_head.weight" not in names


def test_where_nothing_has_to_sleep_nothing_is_sent_without_an_update(parts):
    _, _, _, make_engine = parts
    engine = make_engine()
    engine.start(0, GREEDY)
    turn(engine)
    taken(engine.llm)
    engine.sleep()
    engine.wake()
    turn(engine)
    assert taken(engine.llm) == (TURN, 0)


@pytest.mark.parametrize("sleep_level", [0, 2])
def test_a_head_edited_to_favour_token_7_is_seen_by_the_next_turn(parts, sleep_level):
    _, policy, _, make_engine = parts
    engine = make_engine(sleep_level)
    engine.start(0, GREEDY)
    assert turn(engine).token_ids != (7,)
    with torch.no_grad():
        hidden = policy.model.get_decoder()(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0, -1]
        policy.model.get_output_embeddings().weight[7] = 3 * hidden
    engine.sleep()
    engine.weights_changed()
    engine.wake()
    engine.start(1, GREEDY)
    assert turn(engine).token_ids == (7,)


def test_a_cache_that_is_not_forgotten_stops_the_run(parts, vllm_engine, monkeypatch):
    """The stand-in would give the old answer; the comparison after the sync reads the cache, and sees that."""
    _, policy, _, make_engine = parts
    engine = make_engine()
    engine.start(0, GREEDY)
    monkeypatch.setattr(engine, "forget_prefixes", lambda: None)
    with torch.no_grad():
        policy.model.get_parameter("model.layers.0.self_attn.v_proj.weight").mul_(-1)
    engine.weights_changed()
    with pytest.raises(run.config.RunStopped, match="no tensor's checksum differs"):
        engine.start(1, GREEDY)


def test_turns_that_run_are_dropped_before_weights_change(parts):
    _, _, _, make_engine = parts
    engine = make_engine(sleep_level=2)
    engine.start(0, GREEDY)
    engine.submit(TurnRequest((0, 0), PROMPT, 50))
    engine.step()
    engine.weights_changed()
    engine.wake()
    assert not engine.llm.running and engine.step() == []


@pytest.mark.parametrize("sleep_level", [0, 2])
def test_training_steps_and_an_evaluation_through_it(parts, sleep_level):
    """The gap between sampler and trainer is rounding, and does not grow with the steps."""
    settings, policy, chat, make_engine = parts
    engine = make_engine(sleep_level, canary=PROMPT)
    each = ToyTrainer(settings, policy, engine, chat, None, run.make_packing(settings, policy, chat, 1500))
    losses = [each.step(step).losses for step in range(3)]
    assert max(loss["sampler_gap/max"] for loss in losses) < 1e-4
    assert all(loss["grad_norm"] > 0 for loss in losses)
    weights = len(list(policy.model.parameters()))
    calls = [name for name in engine.llm.calls if name not in ("add", "step")]
    sync = [*["load"] * weights, "loaded", "reset"]
    if sleep_level:
        again = ["wake weights", *sync, "wake kv_cache", *CANARY, "sleep 2"]
        assert calls == [*sync, *CANARY, "sleep 2", *again, *again]
    else:
        assert calls == [*sync, *CANARY] * 3
    engine.llm.calls.clear()
    trainer.rollout(
        engine, chat, held_out(1), num_generations=1, max_completion_len=4, step=0, reward_fn=lambda record: 0.0,
        sampling=GREEDY,
    )  # fmt: skip
    first = engine.llm.calls.index("add")
    woken = ["wake weights", *sync, "wake kv_cache"] if sleep_level else sync  # the last update has to get there
    assert engine.llm.calls[:first] == [*woken, *CANARY] and "load" not in engine.llm.calls[first:]
