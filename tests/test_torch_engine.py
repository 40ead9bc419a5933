"""The in-process sampler: what it samples is what a plain forward says, whoever shares the batch."""

from __future__ import annotations

import random

import pytest
import torch
import toy
import transformers

from grpo.config import UsageError
from grpo.engines import TurnRequest, slots, torch_engine
from grpo.engines.torch_engine import TorchEngine
from grpo.sampling import SamplingConfig

TOKENIZER = toy.make_tokenizer()
EOS = frozenset(range(0, len(TOKENIZER), 15))  # many, so that a random model ends its turns at different lengths


def engine_for(model, **options) -> TorchEngine:
    return TorchEngine(model, EOS, **{"max_context": 1024, "slots": 5} | options)


def some_ids(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(len(TOKENIZER)) for _ in range(n))


class Episode:
    """What one episode sends and gets: three to five turns with replies of different lengths."""

    def __init__(self, key, prompt, seed=0):
        self.rng = random.Random(hash((key, seed)))
        self.key, self.prompt = key, prompt
        self.replies = [some_ids(self.rng, self.rng.randint(0, 20)) for _ in range(self.rng.randint(2, 4))]
        self.ids, self.turn, self.delay = list(prompt), 0, 0
        self.sampled: list[tuple[int, int, float]] = []  # (index in ids, token, log-prob)
        self.finishes: list[str] = []

    def request(self) -> TurnRequest:
        return TurnRequest(
            self.key, tuple(self.ids), self.rng.randint(1, 30), self.turn, len(self.ids) - len(self.prompt), self.key[0]
        )

    def take(self, output) -> bool:
        """True if there is another turn."""
        for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
            self.sampled.append((len(self.ids), token, logprob))
            self.ids.append(token)
        self.finishes.append(output.finish)
        assert (output.token_ids[-1] in EOS) == (output.finish == "stop")
        assert not EOS & set(output.token_ids[:-1])
        if self.turn == len(self.replies):
            return False
        self.ids.extend(self.replies[self.turn])
        self.turn += 1
        return True


def episodes_of(groups=3, members=4, prompt=(30, 90), seed=0) -> list[Episode]:
    """Groups share a prompt; all groups share a prefix of 20 tokens."""
    rng = random.Random(seed)
    system = some_ids(rng, 20)
    prompts = [system + some_ids(rng, rng.randint(*prompt)) for _ in range(groups)]
    return [Episode((g, m), prompts[g], seed) for g in range(groups) for m in range(members)]


def play(engine, episodes, step=0, sampling=None, max_delay=0) -> None:
    """Drive the engine until all is done; `max_delay`: an environment that takes up to that many steps to answer."""
    engine.start(step, sampling)
    by_key = {episode.key: episode for episode in episodes}
    rng = random.Random(1)
    for episode in episodes:
        engine.submit(episode.request())
    late: list[list] = []
    while engine.num_active:
        for output in engine.step():
            if by_key[output.key].take(output):
                late.append([rng.randint(0, max_delay), by_key[output.key]])
            else:
                engine.release(output.key)
        for entry in late:
            entry[0] -= 1
            if entry[0] < 0:
                engine.submit(entry[1].request())
        late = [entry for entry in late if entry[0] >= 0]


def largest_gap(model, episodes, temperature=1.0) -> float:
    """Largest difference between a sampled log-prob and that of a fresh forward over the whole episode."""
    gap = 0.0
    for episode in episodes:
        with torch.no_grad():
            logits = model(torch.tensor([episode.ids]), use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits / temperature, -1)
        for index, token, logprob in episode.sampled:
            assert episode.ids[index] == token
            gap = max(gap, abs(logprobs[index - 1, token].item() - logprob))
    return gap


# ---------------------------------------------------------------------------------------------------- right log-probs


@pytest.mark.parametrize(
    "shape",
    [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False}],
    ids=["grouped queries", "as many key heads", "one key head, untied"],
)
def test_logprobs_equal_a_fresh_forward(shape):
    """Several turns of unequal lengths, groups, more episodes than slots, replies that come late."""
    model = toy.make_model(TOKENIZER, **shape)
    episodes = episodes_of()
    play(engine_for(model), episodes, max_delay=3)
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


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Mistral", "Gemma3Text"])
def test_other_architectures(architecture):
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
    play(engine_for(model, max_context=512), episodes)
    assert largest_gap(model, episodes) < 1e-4


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


# ------------------------------------------------------------------------------------------- continuous batching


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
        engine = engine_for(model, slots=8)
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
