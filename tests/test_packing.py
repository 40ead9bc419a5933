"""Packed microbatches compute the same as padded rows: log-probs, loss and every gradient; the reference's caches."""

import dataclasses
import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from grpo import model as model_module
from grpo import reference as reference_module
from grpo import run, tree_attention
from grpo.batching import Packing, make_microbatches
from grpo.config import Config, LossConfig, ModelConfig
from grpo.head import policy_loss, score
from grpo.model import Policy, enable_packing, hidden_states, load_policy
from grpo.reference import Reference
from grpo.tree_attention import Segment, TreeLayout
from tests import toy
from tests.test_batching import episode
from tests.test_trainer import make

PADDED = Packing(packed=False)
SYSTEM = tuple(range(100, 120))
LENGTHS = [(31, (3, 17, 1, 40)), (20, (9, 2)), (26, (1, 1, 25, 8)), (45, (12,))]  # prompt length, completion lengths


def make_episodes():
    """Groups of unequal sizes and lengths; one prompt is the common prefix itself, one member has no trained token."""
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return tuple(torch.randint(5, 350, (n,), generator=generator).tolist())

    episodes = []
    for prompt_length, completions in LENGTHS:
        prompt = SYSTEM + ids(prompt_length - len(SYSTEM))
        for n in completions:
            mask = (1, *(torch.rand(n - 1, generator=generator) < 0.7).int().tolist())
            episodes.append(episode(prompt, ids(n), mask))
    episodes.append(episode(episodes[0].prompt_ids, ids(6), [0] * 6))
    episodes.append(episodes[1])  # the same content twice
    return episodes


EPISODES = make_episodes()
WEIGHTS = [0.01 * (1 + i % 3) for i in range(len(EPISODES))]
WEIGHTS[2] = 0.0


@pytest.fixture(scope="module")
def policies(folder):
    """The same model with its own attention and with tree attention."""
    padded, packed = (load_policy(ModelConfig(model=str(folder), device="cpu")) for _ in range(2))
    assert enable_packing(packed, max_context=100) is None
    return padded, packed


def pass_over(policy, packing, max_tokens, config=LossConfig(beta=0.2)):  # noqa: B008 (frozen)
    """Loss, gradients and log-probs by episode of all microbatches."""
    policy.model.zero_grad()
    total, logprobs = 0.0, {}
    advantages = torch.sin(torch.arange(len(EPISODES)) * 1.7)
    for batch in make_microbatches(EPISODES, WEIGHTS, max_tokens=max_tokens, packing=packing):
        wobble = torch.cat([torch.sin(torch.arange(EPISODES[i].num_trained) * 2.3 + i) for i in batch.episodes])
        own = score(policy, batch)[0]
        loss, _, found = policy_loss(
            policy, batch, advantages=advantages[batch.episode_index], config=config,
            old_logprobs=own + 0.1 * wobble, ref_logprobs=own - 0.3 * wobble,
        )  # fmt: skip
        loss.backward()
        total += loss.item()
        logprobs |= {i: found[batch.episode_index == i] for i in batch.episodes}
    return total, {name: p.grad.clone() for name, p in policy.model.named_parameters()}, logprobs


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
@pytest.mark.parametrize("prefix", [(), SYSTEM], ids=["no prefix", "prefix"])
@pytest.mark.parametrize("max_tokens", [10_000, 150, 60])
def test_packed_equals_padded(policies, max_tokens, prefix, loss_type):
    padded, packed = policies
    config = LossConfig(beta=0.2, loss_type=loss_type)
    expected, gradients, logprobs = pass_over(padded, PADDED, 10_000, config)
    actual, ours, found = pass_over(packed, Packing(prefix=prefix), max_tokens, config)
    assert abs(expected) > 1e-3 and actual == pytest.approx(expected, rel=1e-5)
    assert found.keys() == logprobs.keys() == set(range(len(EPISODES))) - {2, len(EPISODES) - 2}
    for i, values in logprobs.items():
        assert torch.allclose(found[i], values, atol=1e-5)
    for name, gradient in gradients.items():
        assert gradient.norm() > 0
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_gradients_of_several_threads_repeat_to_the_bit():
    """A prompt's last position predicts the first token of all members: what they add there has one order."""
    policy = load_policy(ModelConfig(model="tiny", device="cpu"))
    assert enable_packing(policy, max_context=400) is None
    prompt = tuple(range(100, 140))
    members = [episode(prompt, tuple(range(5 + i, 105 + i)), [1] * 100) for i in range(8)]
    (batch,) = make_microbatches(members, [1.0] * 8, max_tokens=2000, packing=Packing())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        hidden = hidden_states(policy, batch)
        gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        weight = policy.model.model.norm.weight
        first, *others = (torch.autograd.grad(hidden_states(policy, batch), weight, gradient)[0] for _ in range(10))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in others)


def test_bfloat16_is_as_good_packed_as_padded(policies, folder):
    exact = pass_over(policies[0], PADDED, 10_000)[2]
    errors = []
    for packing in (PADDED, Packing(prefix=SYSTEM)):
        policy = load_policy(ModelConfig(model=str(folder), device="cpu", dtype="bfloat16"))
        if packing.packed:
            assert enable_packing(policy, 100) is None
        found = pass_over(policy, packing, 10_000)[2]
        errors.append(torch.cat([found[i] - exact[i] for i in exact]).norm())
    assert 0 < errors[1] <= 1.2 * errors[0]


def test_gradient_checkpointing_recomputes_with_the_tree(policies, folder):
    recomputing = load_policy(ModelConfig(model=str(folder), device="cpu", gradient_checkpointing=True))
    assert enable_packing(recomputing, 100) is None and recomputing.model.is_gradient_checkpointing
    expected, actual = (pass_over(policy, Packing(prefix=SYSTEM), 10_000)[1] for policy in (policies[1], recomputing))
    assert all(torch.allclose(expected[name], actual[name], atol=1e-6) for name in expected)


def test_a_wrong_tree_fails_the_comparison(policies, monkeypatch):
    """The parity test can fail: members that do not see their prompt, positions that do not go on."""
    expected, blocks = pass_over(policies[0], PADDED, 10_000)[1], TreeLayout.blocks
    for name, fault in (
        ("blocks", lambda layout: (blocks(layout)[0], [])),
        ("positions", lambda layout: torch.arange(sum(segment.length for segment in layout.segments))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(TreeLayout, name, fault)
            actual = pass_over(policies[1], Packing(prefix=SYSTEM), 10_000)[1]
        assert any((actual[key] - expected[key]).norm() > 1e-2 * expected[key].norm() for key in expected)


def test_a_packed_batch_without_tree_attention_is_an_error(policies):
    (batch,) = make_microbatches(EPISODES, WEIGHTS, max_tokens=10_000)
    with pytest.raises(RuntimeError, match="enable_packing"):
        score(policies[0], batch)


def varlen_by_hand(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch.nn.attention.varlen.varlen_attn documents, a segment at a time: causal, aligned to the last key."""
    assert window_size == (-1, 0) and max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    assert cu_q.dtype == cu_k.dtype == torch.int32 and enable_gqa == (query.shape[1] != key.shape[1])
    outputs = []
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(int((d - c) - (b - a)))
        q, k, v = query[a:b], key[c:d], value[c:d]
        outputs.append(
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("prefix_length", [0, 4])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_variable_length_attention_is_given_the_same_tree(monkeypatch, prefix_length, key_heads):
    monkeypatch.setattr(tree_attention, "varlen_attn", varlen_by_hand)
    segments = [Segment(5, -1), Segment(3, 0), Segment(1, 1), Segment(6, 1), Segment(2, 0), Segment(4, -1)]
    layout = TreeLayout(segments, prefix_length=prefix_length)
    tokens = sum(segment.length for segment in segments)
    torch.manual_seed(0)
    query = torch.randn(1, 4, tokens, 8)
    key, value = (torch.randn(1, key_heads, prefix_length + tokens, 8) for _ in range(2))
    expected = tree_attention._segment_by_segment(query, key, value, layout, 0.3)
    actual = tree_attention._varlen(query, key, value, layout, 0.3)
    assert actual.shape == (1, tokens, 4, 8) and torch.allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("prefix_length", [0, 4])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_by_key_segments_and_its_gradients(prefix_length, key_heads):
    """In double, against one masked call of SDPA per segment and autograd."""
    segments = [Segment(5, -1), Segment(3, 0), Segment(1, 1), Segment(6, 1), Segment(2, 0), Segment(4, -1)]
    tokens = sum(segment.length for segment in segments)
    torch.manual_seed(0)
    query = torch.randn(1, 4, tokens, 8, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(1, key_heads, prefix_length + tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    layout = TreeLayout(segments, prefix_length=prefix_length)
    expected = tree_attention._segment_by_segment(query, key, value, layout, 0.3)
    actual = tree_attention._TreeAttention.apply(query, key, value, layout, 0.3).transpose(1, 2)
    assert actual.is_contiguous()  # the model reshapes it to [1, T, H * d]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    outside = torch.randn_like(expected)
    for found, right in zip(
        torch.autograd.grad(actual, (query, key, value), outside),
        torch.autograd.grad(expected, (query, key, value), outside),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_segments_out_of_order_are_refused():
    layout = TreeLayout([Segment(5, -1), Segment(3, -1), Segment(2, 0)])
    with pytest.raises(ValueError, match="segment 2 does not stand among the descendants of its parent 0"):
        layout.blocks()


def causal_lm(kind):
    tokenizer = toy.make_tokenizer()
    small = dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    if kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**small, intermediate_size=64, num_key_value_heads=2, head_dim=8,
                                                 sliding_window=64))  # fmt: skip
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=256,
                                           attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))  # fmt: skip
    return Policy(kind, model.eval(), tokenizer, torch.device("cpu"), torch.float32)


def test_a_sliding_window_is_refused_only_where_an_episode_can_leave_it():
    policy = causal_lm("mistral")
    assert "window of 64 tokens, an episode may have 65" in enable_packing(policy, 65)
    assert policy.model.config._attn_implementation != tree_attention.ATTENTION_NAME
    assert enable_packing(policy, 64) is None
    assert policy.model.config._attn_implementation == tree_attention.ATTENTION_NAME


def test_learned_positions_pack_as_well():
    padded, packed = causal_lm("gpt2"), causal_lm("gpt2")
    packed.model.load_state_dict(padded.model.state_dict())
    assert enable_packing(packed, 200) is None
    expected, actual = pass_over(padded, PADDED, 10_000)[1], pass_over(packed, Packing(prefix=SYSTEM), 10_000)[1]
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_a_model_that_computes_something_else_keeps_its_own_attention(folder, monkeypatch):
    policy = load_policy(ModelConfig(model=str(folder), device="cpu"))
    blocks = TreeLayout.blocks
    monkeypatch.setattr(TreeLayout, "blocks", lambda layout: (blocks(layout)[0], []))
    before = policy.model.config._attn_implementation
    assert "other hidden states packed than alone" in enable_packing(policy, 100)
    assert policy.model.config._attn_implementation == before


def test_the_header_says_how_tokens_are_laid_out_and_why(folder, monkeypatch):
    config = Config().with_values({"model": str(folder), "device": "cpu"})
    policy = load_policy(config.model)
    chat = run.make_chat(policy)

    def row(settings):
        packing = run.make_packing(settings, policy, chat, 100)
        return run.header(settings, policy, None, "kernels", packing, folder, 0)["tokens"]

    assert row(config.with_values({"packing": "padded"})) == "padded rows (asked for)"
    monkeypatch.setattr(run, "enable_packing", lambda *_: "Toy has a window")
    assert row(config) == "padded rows (Toy has a window)"
    monkeypatch.undo()
    assert "each unique token once" in row(config)


def test_a_saved_model_does_not_ask_for_tree_attention(policies, tmp_path):
    run.save_final(policies[1], tmp_path / "final")
    assert "tree" not in json.dumps(json.loads((tmp_path / "final" / "config.json").read_text()))


# The reference


@pytest.fixture()
def reference(folder):
    return Reference(ModelConfig(model=str(folder), device="cpu"), Packing(prefix=SYSTEM), max_context=100)


def counted(monkeypatch):
    """Tokens of each forward that a reference makes."""
    seen = []
    original = model_module.hidden_states

    def hidden_states(policy, batch):
        seen.append(batch.input_ids.numel())
        return original(policy, batch)

    monkeypatch.setattr("grpo.head.hidden_states", hidden_states)
    monkeypatch.setattr(reference_module, "hidden_states", hidden_states)
    return seen


def test_reference_logprobs_are_the_models_own(policies, reference, monkeypatch):
    seen = counted(monkeypatch)
    for _ in range(2):
        found = reference.logprobs(EPISODES, 0.8, max_tokens=10_000)
        for i, each in enumerate(EPISODES):
            assert len(found[i]) == each.num_trained
            if each.num_trained:
                (batch,) = make_microbatches([each], [1.0], max_tokens=1000, packing=PADDED)
                assert torch.allclose(found[i], score(policies[0], batch, 0.8)[0], atol=1e-5)
                del seen[-1]
    unique = sum(p - len(SYSTEM) for p, _ in LENGTHS) + sum(
        max(t for t, m in enumerate(each.loss_mask) if m) for each in EPISODES[:-2]
    )
    # One prefix for the life of the reference; equal episodes once. One prompt *is* the prefix, whose last hidden
    # state is needed: such a batch computes it again.
    assert seen == [unique + len(SYSTEM), unique + len(SYSTEM)]


def test_the_prefix_of_the_reference_is_computed_once(policies, reference, monkeypatch):
    seen = counted(monkeypatch)
    some = [each for each in EPISODES if len(each.prompt_ids) > len(SYSTEM)]
    for budget in (10_000, 60):
        found = reference.logprobs(some, 1.0, max_tokens=budget)
        (batch,) = make_microbatches(some, [1.0] * len(some), max_tokens=10_000, packing=PADDED)
        expected = score(policies[0], batch)[0]
        del seen[-1]
        kept = torch.cat([found[i] for i in batch.episodes])
        assert torch.allclose(kept, expected, atol=1e-5)
    assert seen.count(len(SYSTEM)) == 1 and seen[0] == len(SYSTEM) and len(seen) > 4


def test_step_0_needs_no_reference_and_several_iterations_need_one(folder):
    trainer = make(folder, num_iterations=3)
    with mock.patch.object(trainer.reference, "logprobs", wraps=trainer.reference.logprobs) as asked:
        first = trainer.step(0)
        assert asked.call_count == 0 and first.losses["kl"] > 0  # of iterations two and three
        trainer.step(1)
        assert asked.call_count == 1


@pytest.mark.parametrize("estimator, expected", [("k1", 1), ("k2", 0), ("k3", 0), ("k3_ratio", 0)])
def test_step_0_is_the_same_with_and_without_the_reference(folder, estimator, expected, monkeypatch):
    gradients = []
    for shortcut in (True, False):
        trainer = make(folder, kl_estimator=estimator, beta=0.5)
        trainer.optimizer.step = lambda: None
        with monkeypatch.context() as patch:
            if not shortcut:
                patch.setattr("grpo.trainer.moves_at_reference", lambda config: True)
            with mock.patch.object(trainer.reference, "logprobs", wraps=trainer.reference.logprobs) as asked:
                result = trainer.step(0)
            assert asked.call_count == (expected if shortcut else 1)
        assert result.losses["kl"] < 1e-9
        gradients.append([p.grad.clone() for p in trainer.policy.model.parameters()])
    assert max(g.abs().max() for g in gradients[0]) > 1e-3
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))


def test_equal_tokens_of_one_step_are_counted_once(folder):
    trainer = make(folder)
    groups = trainer.sample_groups(0)
    episodes = [dataclasses.replace(e) for group in groups for e in group.episodes]
    weights = [1.0] * len(episodes)
    packed = make_microbatches(episodes, weights, max_tokens=10**6, packing=trainer.packing)
    padded = make_microbatches(episodes, weights, max_tokens=10**6, packing=PADDED)
    prompts = {e.prompt_ids for e in episodes}
    prefix = len(trainer.packing.prefix)
    completions = sum(max(t for t, m in enumerate(e.loss_mask) if m) for e in episodes)
    unique = prefix + sum(len(p) - prefix for p in prompts) + completions
    assert sum(b.input_ids.numel() for b in packed) == unique < sum(b.input_ids.numel() for b in padded) / 2
