"""The in-process sampler's continuous batching: unique tokens only, no barrier, nothing kept that is old."""

from __future__ import annotations

import random

import pytest
import torch
import toy

from grpo.engines import TurnRequest, slots, torch_engine
from grpo.engines.torch_engine import TorchEngine
from tests.engine_episodes import TOKENIZER, Episode, engine_for, episodes_of, largest_gap, play, some_ids


def test_only_unique_tokens_are_computed():
    """The system prefix once, each group's prompt once, each member's last prompt token, and then each token once."""
    model = toy.make_model(TOKENIZER)
    episodes = episodes_of(groups=3, members=4)
    engine = engine_for(model, slots=64, draft_length=0)
    fed = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(args[0].numel()))
    play(engine, episodes)
    handle.remove()
    prompts = {episode.prompt for episode in episodes}
    grown = sum(len(episode.ids) - len(episode.prompt) - 1 for episode in episodes)  # the very last is never fed
    unique = 20 + sum(len(prompt) - 20 for prompt in prompts) + (len(episodes) - len(prompts)) + grown
    # Groups might by chance share more than the common prefix.
    assert unique - 3 <= sum(fed) <= unique


@pytest.mark.parametrize("shape", [{}, {"num_attention_heads": 4, "num_key_value_heads": 2}], ids=["one", "grouped"])
def test_attention_that_shares_a_prefix_changes_nothing(monkeypatch, shape):
    model = toy.make_model(TOKENIZER, **shape)
    results, used, attend = [], [], slots._attend_shared
    monkeypatch.setattr(slots, "_attend_shared", lambda *args: used.append(args[-1]) or attend(*args))
    for rows in (4, 99):  # from how many rows on the prefix is read once; 99: never
        monkeypatch.setattr(torch_engine, "SHARING_ROWS", rows)
        engine = engine_for(model, compiled=False, slots=8)
        used.clear()
        rng = random.Random(3)
        system = some_ids(rng, 150)
        episodes = [Episode((g, m), system + some_ids(random.Random(g), 9)) for g in range(2) for m in range(4)]
        play(engine, episodes, max_delay=2)
        assert (set(used) >= {150} and 0 not in used) if rows == 4 else not used
        results.append([episode.sampled for episode in episodes])
    for shared, alone in zip(*results, strict=True):
        assert [s[:2] for s in shared] == [s[:2] for s in alone]
        assert [s[2] for s in shared] == pytest.approx([s[2] for s in alone], abs=1e-4)


def test_a_shared_prefix_in_bfloat16(monkeypatch):
    """Norms leave queries in float32 under autocast; the cache is in bfloat16."""
    used, attend = [], slots._attend_shared
    monkeypatch.setattr(slots, "_attend_shared", lambda *args: used.append(args[-1]) or attend(*args))
    engine = engine_for(toy.make_model(TOKENIZER), slots=8, dtype=torch.bfloat16)
    prompt = some_ids(random.Random(3), 150)
    episodes = [Episode((0, member), prompt) for member in range(4)]
    play(engine, episodes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for episode in episodes:
            expected = torch.log_softmax(engine.model(input_ids=torch.tensor([episode.ids])).logits[0].float(), -1)
            for index, token, logprob in episode.sampled:
                assert logprob == pytest.approx(float(expected[index - 1, token]), abs=0.3)  # as for bfloat16 above
    assert used


def test_a_large_cache_is_given_back_while_the_trainer_works(monkeypatch):
    engine = engine_for(toy.make_model(TOKENIZER))
    play(engine, episodes_of())
    size = engine.cache.nbytes
    engine.sleep()
    assert engine.cache.nbytes == size > 0  # a small one is kept
    monkeypatch.setattr(torch_engine, "KEPT_BYTES", size - 1)
    engine.sleep()
    assert engine.cache.nbytes == 0
    again, fresh = episodes_of(seed=1), episodes_of(seed=1)
    play(engine, again)
    play(engine_for(toy.make_model(TOKENIZER)), fresh)
    assert [episode.sampled for episode in again] == [episode.sampled for episode in fresh]


def test_no_barrier_between_turns():
    """One episode plays three turns while another is still in its first."""
    model = toy.make_model(TOKENIZER)
    engine = TorchEngine(model, ())
    engine.start(0)
    engine.submit(TurnRequest((0, 0), (1, 2, 3), 30))
    engine.submit(TurnRequest((1, 0), (1, 2, 4), 3))
    ids, turns = (1, 2, 4), []
    for _ in range(20):
        for output in engine.step():
            turns.append(output.key)
            ids += output.token_ids + (9, 9, 9)
            engine.submit(TurnRequest((1, 0), ids, 3, len(turns)))
    assert turns[:3] == [(1, 0)] * 3


def test_new_weights_need_no_sync_but_a_start():
    model = toy.make_model(TOKENIZER)
    engine = engine_for(model)
    play(engine, episodes_of())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    episodes = episodes_of()
    play(engine, episodes)
    assert largest_gap(model, episodes) < 1e-4


def test_start_forgets_everything():
    model = toy.make_model(TOKENIZER)
    engine = engine_for(model, slots=2)
    for member in range(4):
        engine.submit(TurnRequest((0, member), (1, 2, 3), 30))
    engine.step()
    assert engine.num_active == 4
    engine.start(1)
    assert engine.num_active == 0 and engine.step() == []


def test_release_of_a_waiting_episode():
    model = toy.make_model(TOKENIZER)
    engine = engine_for(model, slots=1)
    for member in range(3):
        engine.submit(TurnRequest((0, member), (1, 2, 3), 1))
    assert [output.key for output in engine.step()] == [(0, 0)]
    engine.release((0, 1))
    engine.release((0, 0))
    assert [output.key for output in engine.step()] == [(0, 2)]


def test_mode_and_attention_are_put_back():
    """The trainer shares the module: its dropout stays out of sampling, its mode and attention come back."""
    model = toy.make_model(TOKENIZER, attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    episodes = episodes_of(groups=1, members=2)
    play(engine_for(model), episodes)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()  # weights are still trainable
    model.eval()
    assert largest_gap(model, episodes) < 1e-4
