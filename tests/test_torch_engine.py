"""The in-process sampler: what it samples is what a plain forward says, whoever shares the batch."""

from __future__ import annotations

import pytest
import torch
import toy
import transformers

from grpo import compiled
from grpo.config import UsageError
from grpo.engines import TurnRequest, decoder, slots
from grpo.engines.decoder import Decoder, OwnForward
from grpo.engines.torch_engine import TorchEngine
from grpo.sampling import SamplingConfig
from tests.engine_episodes import EOS, TOKENIZER, engine_for, episodes_of, largest_gap, play

# ---------------------------------------------------------------------------------------------------- right log-probs


@pytest.mark.parametrize(
    "shape",
    [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False}],
    ids=["grouped queries", "as many key heads", "one key head, untied"],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_logprobs_equal_a_fresh_forward(shape, compiled):
    """Several turns of unequal lengths, groups, more episodes than slots, replies that come late."""
    model = toy.make_model(TOKENIZER, **shape)
    episodes = episodes_of()
    play(engine_for(model, compiled), episodes, max_delay=3)
    assert all(len(episode.finishes) >= 3 for episode in episodes)
    assert {finish for episode in episodes for finish in episode.finishes} == {"stop", "length"}
    assert largest_gap(model, episodes) < 1e-4


def test_logprobs_stay_right_while_the_cache_grows():
    """Prompts of all lengths around the cache's first size, and conversations well beyond it."""
    model = toy.make_model(TOKENIZER)
    episodes = episodes_of(groups=6, members=2, prompt=(200, 500))
    play(engine_for(model, slots=7), episodes)
    assert largest_gap(model, episodes) < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_of_the_scaled_distribution(temperature):
    model = toy.make_model(TOKENIZER)
    episodes = episodes_of(groups=2, members=2)
    play(engine_for(model), episodes, sampling=SamplingConfig(temperature))
    assert largest_gap(model, episodes, temperature) < 1e-4


def test_greedy_takes_the_most_probable_token():
    model = toy.make_model(TOKENIZER)
    episodes = episodes_of(groups=2, members=1)
    play(engine_for(model), episodes, sampling=SamplingConfig(0.0))
    for episode in episodes:
        best = model(torch.tensor([episode.ids])).logits[0].argmax(-1)
        assert all(best[index - 1] == token for index, token, _ in episode.sampled)


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Mistral", "Qwen2", "Gemma3Text"])
def test_other_architectures(architecture):
    """Those like Llama through the decoder that is written out, the others through their own forward."""
    config_class = getattr(transformers, f"{architecture}Config")
    sizes = {"vocab_size": len(TOKENIZER), "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None}
    if architecture == "GPT2":
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4}
    else:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**sizes)).eval()
    episodes = episodes_of(groups=2, members=2)
    engine = engine_for(model, max_context=512)
    assert isinstance(engine._decode, Decoder if architecture in ("Llama", "Mistral", "Qwen2") else OwnForward)
    play(engine, episodes)
    assert largest_gap(model, episodes) < 1e-4


def test_a_models_own_forward_gives_the_same():
    model, results = toy.make_model(TOKENIZER), []
    for kind in (Decoder, OwnForward):
        engine, episodes = engine_for(model), episodes_of()
        assert isinstance(engine._decode, Decoder)
        engine._decode = kind(model)
        play(engine, episodes, max_delay=3)
        results.append([sample for episode in episodes for sample in episode.sampled])
    assert [sample[:2] for sample in results[0]] == [sample[:2] for sample in results[1]]
    assert [sample[2] for sample in results[0]] == pytest.approx([sample[2] for sample in results[1]], abs=1e-5)


@pytest.mark.parametrize("wrong", ["other numbers", "an error"])
def test_a_decoder_that_disagrees_is_not_used(wrong, monkeypatch):
    """A release of transformers may change what a layer computes or what it is made of; its own forward stays right."""
    attention = decoder._attention

    def changed(module, h, cos, sin, cache, layout):
        if wrong == "an error":
            raise AttributeError("no q_proj")
        return attention(module, h, cos, -sin, cache, layout)

    monkeypatch.setattr(decoder, "_attention", changed)
    model, episodes = toy.make_model(TOKENIZER), episodes_of(groups=2, members=2)
    engine = engine_for(model)
    assert isinstance(engine._decode, OwnForward)
    play(engine, episodes)
    assert largest_gap(model, episodes) < 1e-4


@pytest.mark.parametrize("name", ["add_norm", "write", "attend", "gated"])
def test_a_compiled_function_that_does_nothing_is_noticed(name, monkeypatch):
    monkeypatch.setattr(compiled, name, lambda *args: None)
    model, episodes = toy.make_model(TOKENIZER), episodes_of(groups=2, members=2)
    engine = engine_for(model)
    assert isinstance(engine._decode, OwnForward)
    play(engine, episodes)
    assert largest_gap(model, episodes) < 1e-4


class ScaledLogits(transformers.Qwen3ForCausalLM):
    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = output.logits * 1.05
        return output


@pytest.mark.parametrize("unlike", ["another activation", "a forward of its own"])
def test_what_a_comparison_in_bfloat16_cannot_tell_is_known_beforehand(unlike):
    """Either changes log-probs by 0.05 and logits by less than their rounding may."""
    gelu = unlike == "another activation"
    model = toy.make_model(TOKENIZER, initializer_range=0.05, hidden_act="gelu" if gelu else "silu")
    if not gelu:
        model = ScaledLogits(model.config).eval()
    engine, episodes = engine_for(model, dtype=torch.bfloat16), episodes_of(groups=2, members=2)
    assert isinstance(engine._decode, OwnForward)
    play(engine, episodes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert largest_gap(model, episodes) < 0.01


def test_bfloat16_compute_is_the_trainers_autocast():
    model = toy.make_model(TOKENIZER)
    episodes = episodes_of(groups=2, members=2)
    play(engine_for(model, dtype=torch.bfloat16), episodes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert largest_gap(model, episodes) < 0.3  # rounding of bfloat16, at logits of about 10
    assert largest_gap(model, episodes) > 1e-3  # and not float32 after all


# ----------------------------------------------------------------------------------------------------------- seeds


def sampled_ids(episodes) -> dict:
    return {episode.key: [token for _, token, _ in episode.sampled] for episode in episodes}


def test_result_depends_neither_on_the_batch_nor_on_the_order():
    model = toy.make_model(TOKENIZER)
    together = episodes_of()
    play(engine_for(model, slots=64), together)
    narrow = episodes_of()
    play(engine_for(model, slots=2), narrow[::-1], max_delay=2)
    assert sampled_ids(narrow) == sampled_ids(together)
    alone = episodes_of()[6:7]
    play(engine_for(model), alone)
    assert sampled_ids(alone)[alone[0].key] == sampled_ids(together)[alone[0].key]


def sample_group(model, seed=42, step=0) -> list[tuple[int, ...]]:
    engine = TorchEngine(model, (), seed=seed)
    engine.start(step)
    for member in range(4):
        engine.submit(TurnRequest((0, member), (1, 2, 3), 16))
    outputs = []
    while len(outputs) < 4:
        outputs += engine.step()
    return [output.token_ids for output in sorted(outputs, key=lambda output: output.key)]


def test_members_steps_and_seeds_differ_and_a_rerun_repeats():
    model = toy.make_model(TOKENIZER, initializer_range=0.1)
    first = sample_group(model)
    assert len(set(first)) == 4
    assert not set(first) & set(sample_group(model, step=1))
    assert not set(first) & set(sample_group(model, seed=43))
    assert first == sample_group(model)


def test_sampling_seed_replaces_the_engines():
    model = toy.make_model(TOKENIZER)
    runs = []
    for engine_seed, seed in [(0, 7), (1, 7), (7, None), (0, None)]:
        episodes = episodes_of(groups=1, members=2)
        play(engine_for(model, seed=engine_seed), episodes, sampling=SamplingConfig(seed=seed))
        runs.append(sampled_ids(episodes))
    assert runs[0] == runs[1] == runs[2] != runs[3]


# ------------------------------------------------------------------------------------------------------- refusals


def test_turns_that_cannot_be_sampled_are_refused():
    engine = engine_for(toy.make_model(TOKENIZER), max_context=16)
    with pytest.raises(ValueError, match="max_context 16"):
        engine.submit(TurnRequest((0, 0), (1,) * 10, 7))
    for request in (TurnRequest((0, 0), (), 3), TurnRequest((0, 0), (1, 2), 0)):
        with pytest.raises(ValueError, match="empty prompt or max_tokens"):
            engine.submit(request)
    engine.submit(TurnRequest((0, 0), (1,) * 10, 6))
    with pytest.raises(ValueError, match="already waits"):
        engine.submit(TurnRequest((0, 0), (1,) * 10, 6))


def test_a_rewritten_past_is_refused():
    engine = TorchEngine(toy.make_model(TOKENIZER), ())
    engine.start(0)
    engine.submit(TurnRequest((0, 0), (1, 2, 3), 2))
    engine.step()
    with pytest.raises(ValueError, match="still sampling"):
        engine.submit(TurnRequest((0, 0), (1, 2, 3, 4), 2))
    (output,) = engine.step()
    ids = (1, 2, 3, *output.token_ids)
    with pytest.raises(ValueError, match="does not begin with"):
        engine.submit(TurnRequest((0, 0), ids[:-1] + (ids[-1] ^ 1, 5), 2, turn=1))
    engine.submit(TurnRequest((0, 0), ids + (5,), 2, turn=1))


@pytest.mark.parametrize(
    "overrides, max_context, message",
    [
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, 65, "sliding_window 64 of Qwen3"),
        ({"max_position_embeddings": 128}, 129, "max_position_embeddings 128"),
    ],
)
def test_contexts_the_model_cannot_have_are_refused(overrides, max_context, message):
    model = toy.make_model(TOKENIZER, **overrides)
    with pytest.raises(UsageError, match=message):
        TorchEngine(model, EOS, max_context)
    assert TorchEngine(model, EOS).max_context == max_context - 1


def test_models_it_would_run_wrongly_are_refused(monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    mamba = transformers.AutoModelForCausalLM.from_config(transformers.MambaConfig(**sizes))
    with pytest.raises(UsageError, match="layers that are not attention"):
        TorchEngine(mamba, EOS, 32)
    mpt = transformers.MptConfig(vocab_size=64, d_model=32, n_heads=4, n_layers=1)
    with pytest.raises(UsageError, match="MptForCausalLM"):
        TorchEngine(transformers.AutoModelForCausalLM.from_config(mpt), EOS, 32)
    softcap = transformers.Gemma2Config(**sizes, intermediate_size=32, num_attention_heads=2, head_dim=8)
    with pytest.raises(UsageError, match="softcap"):
        TorchEngine(transformers.AutoModelForCausalLM.from_config(softcap), EOS, 32)
    attend = slots._attend
    monkeypatch.setattr(slots, "_attend", lambda q, k, v, mask, scaling: attend(q, k, v, mask, 0.1))
    with pytest.raises(UsageError, match="gives other logits"):
        TorchEngine(toy.make_model(TOKENIZER), EOS)


def test_logits_that_are_not_finite_are_reported():
    model = toy.make_model(TOKENIZER)
    engine = engine_for(model)
    engine.submit(TurnRequest((0, 0), (1, 2, 3), 4))
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.step()
