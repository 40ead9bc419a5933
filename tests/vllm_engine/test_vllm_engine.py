"""Sampling with vLLM: what it reports is what the trainer computes, settings mean what they say, limits are kept."""

import dataclasses
from collections import Counter

import pytest
import torch

from env.clarify import StopReason
from grpo.config import UsageError
from grpo.engines import TurnRequest
from grpo.engines.torch_engine import TorchEngine
from grpo.sampling import SamplingConfig, _nucleus
from scenarios.generator import held_out
from tests.vllm_engine.helpers import PROMPT, play, sampled, trainers, turns


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_multi_turn_log_probs_are_the_trainers(engine, policy, chat, temperature):
    groups = play(engine, chat, held_out(4), sampling=SamplingConfig(temperature))
    episodes = [episode for group in groups for episode in group.episodes]
    assert max(len(episode.turns) for episode in episodes) >= 3
    for episode in episodes:
        assert len(sampled(episode)) > 0
        assert sampled(episode) == pytest.approx(trainers(policy, episode, temperature), abs=1e-3)
    if temperature != 1:  # the test can tell: log-probs at temperature 1 are far away
        assert abs(sum(sampled(episodes[0])) - sum(trainers(policy, episodes[0]))) > 0.1


def test_top_p_log_probs_are_those_after_the_filter(engine, policy, chat):
    [group] = play(engine, chat, held_out(1), num_generations=2, sampling=SamplingConfig(1.0, top_p=0.8))
    for episode in group.episodes:
        ids = torch.tensor([episode.prompt_ids + episode.completion_ids])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0, len(episode.prompt_ids) - 1 : -1]
        expected = _nucleus(torch.log_softmax(logits, -1), 0.8)[range(len(logits)), episode.completion_ids]
        kept = torch.tensor(episode.loss_mask).bool()
        assert expected[kept].tolist() == pytest.approx(sampled(episode), abs=1e-3)


def test_greedy_decoding_is_the_torch_engines(engine, policy, chat):
    in_process = TorchEngine(policy.model, chat.eos_ids, engine.max_context)
    greedy = dict(num_generations=1, sampling=SamplingConfig(temperature=0.0))
    ours, theirs = (play(each, chat, held_out(50), **greedy) for each in (in_process, engine))
    different = [i for i in range(50) if ours[i].episodes[0].completion_ids != theirs[i].episodes[0].completion_ids]
    assert different == []
    for a, b in zip(ours, theirs):
        assert sampled(a.episodes[0]) == pytest.approx(sampled(b.episodes[0]), abs=1e-3)  # at temperature 1, both
    assert len({group.episodes[0].completion_ids for group in ours}) > 10  # not one episode over and over


def test_a_models_generation_config_changes_nothing(engine, policy):
    """One prompt, so a top_k of 20 would leave 20 ids."""
    assert policy.model.generation_config.top_k == 20
    with torch.no_grad():
        policy.model.get_decoder().norm.weight.mul_(1e-3)
    engine.weights_changed()
    engine.start(0)
    outputs = turns(engine, [TurnRequest((0, member), PROMPT, max_tokens=1) for member in range(2000)])
    counts = Counter(output.token_ids[0] for output in outputs.values())
    vocab = policy.model.config.vocab_size
    assert len(counts) > 20
    # 2000 uniform draws from V ids: V (1 - (1 - 1/V)^2000) distinct ones are expected, with a deviation below 20.
    assert len(counts) == pytest.approx(vocab * (1 - (1 - 1 / vocab) ** 2000), abs=80)
    assert outputs[0, 0].logprobs[0] == pytest.approx(-torch.tensor(vocab).log().item(), abs=0.1)


def test_members_differ_steps_differ_seeds_differ_and_a_rerun_repeats(engine):
    engine.eos_ids = frozenset()
    requests = [TurnRequest((0, member), PROMPT, max_tokens=16) for member in range(4)]

    def ids(step=0, sampling=None):
        engine.start(step, sampling)
        return [turns_[key].token_ids for turns_ in [turns(engine, requests)] for key in sorted(turns_)]

    first = ids()
    assert len(set(first)) == 4
    assert ids() == first
    assert not set(ids(step=1)) & set(first)
    assert not set(ids(sampling=SamplingConfig(1.0, seed=5))) & set(first)
    engine.seed = 1
    assert not set(ids()) & set(first)


def test_an_episodes_tokens_do_not_depend_on_who_else_is_there(engine):
    engine.start(0)
    together = turns(engine, [TurnRequest((0, member), PROMPT, max_tokens=24) for member in range(24)])
    engine.start(0)
    alone = turns(engine, [TurnRequest((0, 5), PROMPT, max_tokens=24)])
    assert alone[0, 5].token_ids == together[0, 5].token_ids


def test_every_episode_moves_on_its_own(engine):
    """One turn ends and its episode goes on while another one is still being sampled."""
    engine.eos_ids = frozenset()
    engine.submit(TurnRequest((0, 0), PROMPT, max_tokens=3))
    engine.submit(TurnRequest((0, 1), PROMPT, max_tokens=40))
    order, prompt = [], PROMPT
    while len(order) < 4:
        for output in engine.step():
            order.append(output.key)
            if output.key == (0, 0) and order.count((0, 0)) < 3:
                prompt += output.token_ids + (9, 9)
                engine.submit(TurnRequest((0, 0), prompt, max_tokens=3, turn=order.count((0, 0))))
    assert order == [(0, 0), (0, 0), (0, 0), (0, 1)]
    assert len(prompt) == len(PROMPT) + 2 * 5


def test_turns_end_at_the_engines_eos_ids_and_at_max_tokens(engine):
    engine.eos_ids = frozenset(range(0, 1536, 5))
    outputs = turns(engine, [TurnRequest((0, member), PROMPT, max_tokens=12) for member in range(24)]).values()
    assert {output.finish for output in outputs} == {"stop", "length"}
    for output in outputs:
        assert not engine.eos_ids & set(output.token_ids[:-1])
        if output.finish == "stop":
            assert output.token_ids[-1] in engine.eos_ids and len(output.token_ids) <= 12
        else:
            assert len(output.token_ids) == 12 == len(output.logprobs)


def test_the_context_is_kept_and_ends_episodes_without_an_exception(engine, chat):
    limit = len(play(engine, chat, held_out(1), num_generations=1)[0].episodes[0].prompt_ids) + 12
    engine.max_context = limit
    [group] = play(engine, chat, held_out(1), num_generations=4)
    for episode in group.episodes:
        assert len(episode.completion_ids) <= 12 and len(episode.prompt_ids) + len(episode.completion_ids) <= limit
    assert StopReason.CONTEXT_FULL in {episode.stop_reason for episode in group.episodes}


def test_a_full_context_can_be_used_to_its_last_token(engine):
    engine.eos_ids = frozenset()
    room = engine.max_context - len(PROMPT)
    assert len(turns(engine, [TurnRequest((0, 0), PROMPT, max_tokens=room)])[0, 0].token_ids) == room


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (TurnRequest((0, 0), (), 4), "empty prompt"),
        (TurnRequest((0, 0), PROMPT, 0), "max_tokens < 1"),
        (TurnRequest((0, 0), PROMPT, 10_000), "exceed max_context"),
    ],
)
def test_impossible_turns_are_refused(engine, request_, says):
    with pytest.raises(ValueError, match=says):
        engine.submit(request_)
    assert engine.num_active == 0


def test_a_past_cannot_be_rewritten_and_turns_of_an_episode_do_not_overlap(engine):
    request = TurnRequest((0, 0), PROMPT, max_tokens=4)
    engine.submit(request)
    with pytest.raises(ValueError, match="still sampling"):
        engine.submit(request)
    while not (outputs := engine.step()):
        pass
    with pytest.raises(ValueError, match="turns before it"):
        engine.submit(TurnRequest((0, 0), PROMPT + (1,) + outputs[0].token_ids, max_tokens=4, turn=1))
    assert engine.num_active == 1
    engine.release((0, 0))
    assert engine.num_active == 0


def test_what_was_running_is_forgotten_at_a_start_and_at_a_release(engine):
    engine.submit(TurnRequest((0, 0), PROMPT, max_tokens=50))
    engine.submit(TurnRequest((0, 1), PROMPT, max_tokens=50))
    engine.step()
    engine.release((0, 0))
    assert engine.num_active == 1
    engine.start(1)
    assert engine.num_active == 0 and engine.step() == []
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_a_temperature_that_vllm_would_change_is_refused(engine):
    with pytest.raises(UsageError, match="0.005: must be 0 or at least 0.01"):
        engine.start(0, SamplingConfig(temperature=0.005))


def test_prefixes_are_reused(engine, chat):
    """Blocks of 32 tokens: the second member reads the first one's prompt from the cache."""
    engine.start(0)
    prompt = tuple(i % 1000 for i in range(7, 7 + 130))
    counts = []
    for member in range(2):
        engine.submit(TurnRequest((0, member), prompt, max_tokens=1))
        finished = []
        while not finished:
            finished = [output for output in engine.llm.llm_engine.step() if output.finished]
        counts.append(finished[0].num_cached_tokens)
        engine._running.clear()
        engine.release((0, member))
    assert counts == [0, 128]


def test_the_process_keeps_its_settings(engine):
    assert torch.get_num_threads() >= 1
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)  # vLLM replaces this by a function that does nothing
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
    assert torch.get_float32_matmul_precision() == "highest"


def test_another_release_or_a_build_for_another_device_is_refused(engine, policy, monkeypatch):
    from grpo.engines import vllm_engine

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine.vllm, "__version_tuple__", (0, 31, 1))
        patch.setattr(vllm_engine.vllm, "__version__", "0.31.1")
        with pytest.raises(UsageError, match=r'vLLM 0.31.1 is installed, 0.32 is needed; pip install -e "\.\[vllm\]"'):
            vllm_engine.VllmEngine(policy, (), engine.plan)
    on_gpu = dataclasses.replace(policy, device=torch.device("cuda"))
    with pytest.raises(UsageError, match=r"computes on cpu, the policy is on cuda"):
        vllm_engine.VllmEngine(on_gpu, (), engine.plan)


def test_what_vllm_cannot_start_with_is_one_line(engine, policy):
    from grpo.engines.vllm_engine import VllmEngine

    huge = dataclasses.replace(engine.plan, max_context=10**7)
    with pytest.raises(UsageError, match="--engine vllm: cannot run Qwen3ForCausalLM here") as error:
        VllmEngine(policy, (), huge)
    assert "\n" not in str(error.value)
    assert turns(engine, [TurnRequest((0, 0), PROMPT, 2)])[0, 0].token_ids  # the one that runs goes on
