"""Drafting advances a row by several tokens a forward and changes nothing else, be the guesses right or wrong."""

import random

import pytest
import torch

from grpo.config import Config
from grpo.engines.choice import make_engine
from grpo.engines.drafts import Drafts
from grpo.model import load_policy
from grpo.rollout import rollout
from grpo.run import make_chat
from grpo.sampling import SamplingConfig
from scenarios.generator import held_out
from tests import toy
from tests.engine_episodes import TOKENIZER, engine_for, episodes_of, largest_gap, play

SHARP = SamplingConfig(temperature=0.15)


def run(sampling=None, guess=None, monkeypatch=None, max_delay=0, **options):
    """Episodes played, and how many forwards that took."""
    model = toy.make_model(TOKENIZER)
    engine = engine_for(model, **{"slots": 64} | options)
    episodes, forwards = episodes_of(), []
    if guess is not None:
        monkeypatch.setattr(Drafts, "guess", guess)
    handle = model.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(1))
    play(engine, episodes, sampling=sampling, max_delay=max_delay)
    handle.remove()
    return episodes, len(forwards), model


def assert_same(first, second):
    assert [e.ids for e in first] == [e.ids for e in second]
    assert [e.finishes for e in first] == [e.finishes for e in second]
    for one, other in zip(first, second):
        a, b = (torch.tensor([logprob for _, _, logprob in e.sampled]) for e in (one, other))
        assert torch.allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("sampling", [None, SHARP, SamplingConfig(temperature=0)], ids=["1.0", "low", "greedy"])
@pytest.mark.parametrize("max_delay", [0, 3])
def test_the_result_is_that_of_one_token_at_a_time(sampling, max_delay):
    plain, forwards, _ = run(sampling, draft_length=0, max_delay=max_delay)
    for length in (1, 6):
        drafted, fewer, _ = run(sampling, draft_length=length, max_delay=max_delay)
        assert_same(plain, drafted)
        assert fewer <= forwards


def test_logprobs_of_drafted_tokens_are_those_of_a_fresh_forward():
    episodes, _, model = run(SHARP, draft_length=6)
    assert largest_gap(model, episodes, temperature=0.15) < 1e-4


@pytest.mark.parametrize("compiled", [True, False])
def test_perfect_guesses_and_wrong_ones(compiled, monkeypatch):
    plain, forwards, _ = run(draft_length=0)
    everything = [e.ids for e in plain]

    def oracle(drafts, ids, length):
        whole = next(each for each in everything if each[: len(ids)] == ids)
        return whole[len(ids) : len(ids) + max(0, length)]

    perfect, fewest, _ = run(draft_length=6, compiled=compiled, guess=oracle, monkeypatch=monkeypatch)
    assert_same(plain, perfect)
    assert fewest < 0.4 * forwards  # turns are short, and their first token is never drafted

    rng = random.Random(0)

    def half_wrong(drafts, ids, length):
        right = oracle(drafts, ids, length)
        return [token if rng.random() < 0.6 else rng.randrange(len(TOKENIZER)) for token in right[: rng.randint(0, 6)]]

    mixed, between, _ = run(draft_length=6, compiled=compiled, guess=half_wrong, monkeypatch=monkeypatch)
    assert_same(plain, mixed)
    assert fewest < between < forwards


def test_the_last_tokens_of_a_full_context():
    """No position beyond the context is ever asked for, however long the draft might be."""
    model = toy.make_model(TOKENIZER)
    episodes = episodes_of(groups=1, members=2)
    longest = 30 + max(len(e.prompt) for e in episodes)
    engine = engine_for(model, max_context=longest, draft_length=6)
    engine.eos_ids = frozenset()
    positions = []
    handle = model.model.rotary_emb.register_forward_hook(lambda module, args, out: positions.append(args[1].max()))
    engine.start(0, SHARP)
    for episode in episodes:
        request = episode.request()
        engine.submit(type(request)(request.key, request.prompt_ids, longest - len(request.prompt_ids), 0, 0, 0))
    outputs = []
    while len(outputs) < 2:
        outputs += engine.step()
    handle.remove()
    assert all(o.finish == "length" and len(o.token_ids) == longest - len(episodes[0].prompt) for o in outputs)
    assert max(positions) < longest


def test_the_bundled_policy_needs_far_fewer_forwards():
    settings = Config().with_values({"model": "tiny", "device": "cpu"})
    policy = load_policy(settings.model)
    chat, scenarios = make_chat(policy), held_out(2)
    counts, groups = [], []
    for length in (0, 6):
        engine = make_engine(settings, policy, chat, scenarios)
        engine.draft_length, forwards = length, []
        handle = policy.model.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(1))  # noqa: B023 (removed below)
        groups.append(rollout(engine, chat, scenarios, num_generations=4, max_completion_len=160, step=0,
                              reward_fn=lambda record: 0.0))  # fmt: skip
        handle.remove()
        counts.append(len(forwards))
    assert [[e.completion_ids for e in g.episodes] for g in groups[0]] == [
        [e.completion_ids for e in g.episodes] for g in groups[1]
    ]
    assert counts[1] < 0.6 * counts[0]


def test_guesses_follow_the_longest_known_context():
    drafts = Drafts()
    sampled = [1, 2, 3, 4, 5, 9, 2, 3, 4, 6]
    for end in range(2, len(sampled) + 1):
        drafts.learn(sampled[:end])
    assert drafts.guess([7, 3, 4], 3) == [6]  # after 3 4, 6 was the latest; nothing is known after it
    assert drafts.guess([1, 2, 3, 4], 3) == [5, 9, 2]  # a longer context knows better
    assert drafts.guess([1, 2, 3, 4], 0) == drafts.guess([8, 8], 3) == []


def test_a_new_start_has_forgotten():
    engine = engine_for(toy.make_model(TOKENIZER))
    play(engine, episodes_of(), sampling=SHARP)
    assert engine._drafts._next
    engine.start(1)
    assert not engine._drafts._next


def test_the_batch_before_saves_forwards_and_changes_nothing():
    settings = Config().with_values({"model": "tiny", "device": "cpu"})
    policy = load_policy(settings.model)
    chat, scenarios = make_chat(policy), held_out(4)
    engine, forwards = make_engine(settings, policy, chat, scenarios), []
    handle = policy.model.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(1))
    options = dict(num_generations=4, max_completion_len=160, reward_fn=lambda record: 0.0)
    before = rollout(engine, chat, scenarios[:2], step=0, **options)
    batches, counts = [], []
    for known in ([], before):
        forwards.clear()
        batches.append(rollout(engine, chat, scenarios[2:], step=1, before=known, **options))
        counts.append(len(forwards))
    handle.remove()
    alone, helped = ([e.completion_ids for g in batch for e in g.episodes] for batch in batches)
    assert alone == helped and counts[1] < 0.8 * counts[0]


def test_only_what_was_sampled_is_learned():
    settings = Config().with_values({"model": "tiny", "device": "cpu"})
    policy = load_policy(settings.model)
    chat, scenarios = make_chat(policy), held_out(1)
    engine = make_engine(settings, policy, chat, scenarios)
    options = dict(num_generations=1, max_completion_len=160, reward_fn=lambda record: 0.0)
    [group] = rollout(engine, chat, scenarios, step=0, **options)
    sampled = dict(engine._drafts._next)
    engine.start(1, before=group.episodes)
    assert engine._drafts._next == sampled
