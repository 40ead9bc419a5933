"""The way through the LM head that training takes gives the readable objective: value, gradients and metrics."""

import dataclasses
import itertools

import pytest
import torch

from grpo import head
from grpo.batching import Packing, make_microbatches
from grpo.config import LossConfig, ModelConfig, UsageError
from grpo.loss import grpo_loss
from grpo.model import load_policy
from grpo_kernels import chunking
from tests.test_batching import episode

FUSED = [
    LossConfig(loss_type=loss_type, kl_estimator=estimator, beta=0.3)
    for loss_type, estimator in itertools.product(
        ["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo"], ["k1", "k2", "k3", "k3_ratio"]
    )
] + [
    LossConfig(beta=0.0),
    LossConfig(beta=0.3, kl_in="reward"),
    LossConfig(beta=0.3, delta=1.4, epsilon_high=0.3),
    LossConfig(beta=0.3, entropy_coef=0.1),
    LossConfig(beta=0.3, mismatch="token_clip", mismatch_cap=1.1),
    LossConfig(beta=0.3, mismatch="token_mask", mismatch_cap=1.1),
]
EPISODE_WISE = [
    (LossConfig(beta=0.3, loss_type="gspo"), "loss_type gspo"),
    (LossConfig(beta=0.3, mismatch="sequence_mask", mismatch_cap=3.0), "mismatch sequence_mask"),
]


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(ModelConfig(model=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def batch():
    rows = [episode(range(5, 5 + p), range(40, 40 + c), [1, 0, 1, 1, 1, 1, 1][:c]) for p, c in ((3, 7), (6, 1), (2, 5))]
    (batch,) = make_microbatches(rows, [0.2, 0.1, 0.3], max_tokens=1000, packing=Packing(packed=False))
    return batch


@pytest.fixture(scope="module")
def tokens(policy, batch):
    """Old, reference and sampler log-probs around the policy's, advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    logprobs, _ = head.score(policy, batch, 0.8)

    def near(scale):
        return logprobs + scale * torch.randn(logprobs.shape, generator=generator)

    advantages = torch.tensor([1.3, -0.4, -1.1])[batch.episode_index]
    return dict(old_logprobs=near(0.3), ref_logprobs=near(0.5), advantages=advantages), near(0.4)


def gradients(policy):
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def objective(policy, batch, tokens, config):
    """The definition: log-probs by the model's own head and autograd, then grpo_loss."""
    policy.model.zero_grad()
    hidden = head.hidden_states(policy, batch)
    logprobs = torch.log_softmax(policy.model.lm_head(hidden) / 0.8, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, batch.targets[:, None])[:, 0]
    old = chosen.detach() if tokens["old_logprobs"] is None else tokens["old_logprobs"]
    loss, metrics = grpo_loss(
        policy_logprobs=chosen, entropy=entropy, episode_index=batch.episode_index, config=config,
        token_weights=batch.token_weights, sampler_logprobs=batch.sampler_logprobs, **tokens | {"old_logprobs": old},
    )  # fmt: skip
    chosen.retain_grad()
    loss.backward()
    # What rounding of the log-probs, each a difference of a logit and a log-sum-exp, makes of the loss.
    rounding = torch.finfo(torch.float32).eps * (chosen.grad * chosen).abs().sum()
    return loss.detach(), metrics, gradients(policy), rounding.item()


def assert_same(policy, batch, tokens, config):
    loss, metrics, expected, rounding = objective(policy, batch, tokens, config)
    policy.model.zero_grad()
    actual, ours, logprobs = head.policy_loss(policy, batch, config=config, temperature=0.8, **tokens)
    actual.backward()
    assert actual.item() == pytest.approx(loss.item(), rel=2e-6, abs=rounding)
    assert ours.keys() == metrics.keys()
    for name, value in metrics.items():
        assert ours[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-5), name
    for name, gradient in gradients(policy).items():
        assert expected[name].norm() > 0
        assert (gradient - expected[name]).norm() <= 2e-6 * expected[name].norm(), name
    assert not logprobs.requires_grad and torch.allclose(logprobs, head.score(policy, batch, 0.8)[0], atol=1e-6)


@pytest.mark.parametrize("config", FUSED, ids=lambda c: f"{c.loss_type}-{c.kl_estimator}-{c.kl_in}-{c.mismatch}")
@pytest.mark.parametrize("first", [True, False], ids=["old is the policy", "old given"])
def test_the_fused_loss_is_the_readable_one(policy, batch, tokens, config, first):
    values, sampler = tokens
    batch = dataclasses.replace(batch, sampler_logprobs=sampler)
    assert_same(policy, batch, values | ({"old_logprobs": None} if first else {}), config)
    assert head.describe(policy, config) == "linear_grpo_loss (torch, three GEMMs)"


@pytest.mark.parametrize("config, reason", EPISODE_WISE, ids=["gspo", "sequence_mask"])
def test_a_loss_over_whole_episodes_takes_the_recompute_op_and_says_so(policy, batch, tokens, config, reason):
    values, sampler = tokens
    assert_same(policy, dataclasses.replace(batch, sampler_logprobs=sampler), values, config)
    assert head.describe(policy, config).startswith("linear_logprob_autograd (torch, four GEMMs), because " + reason)


def test_the_fused_path_is_taken(policy, batch, tokens, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("four GEMMs")

    monkeypatch.setattr(head, "token_logprobs", refuse)
    head.policy_loss(policy, batch, config=LossConfig(beta=0.1), **tokens[0])
    with pytest.raises(AssertionError, match="four GEMMs"):
        head.policy_loss(policy, batch, config=LossConfig(beta=0.1, loss_type="gspo"), **tokens[0])


@pytest.mark.parametrize("config", [FUSED[2], EPISODE_WISE[0][0]], ids=["fused", "episode-wise"])
def test_chunks_change_nothing(policy, batch, tokens, config, monkeypatch):
    monkeypatch.setattr(chunking, "chunk_rows", lambda *_: 2)
    assert_same(policy, batch, tokens[0], config)


def test_a_head_with_a_bias(folder, batch, tokens):
    policy = load_policy(ModelConfig(model=str(folder), device="cpu"))
    untied = torch.nn.Linear(*reversed(policy.model.lm_head.weight.shape))
    with torch.no_grad():
        untied.weight.copy_(policy.model.lm_head.weight)
        untied.bias.normal_()
    policy.model.lm_head = untied
    assert_same(policy, batch, tokens[0], LossConfig(beta=0.3))
    assert policy.model.lm_head.bias.grad.norm() > 0


def test_bfloat16_uses_bfloat16_logits_and_float32_statistics(folder, policy, batch, tokens):
    half = load_policy(ModelConfig(model=str(folder), device="cpu", dtype="bfloat16"))
    assert head.head_inputs(half, batch)[0].dtype == torch.bfloat16
    loss, _, logprobs = head.policy_loss(half, batch, config=LossConfig(beta=0.3), temperature=0.8, **tokens[0])
    loss.backward()
    assert {p.grad.dtype for p in half.model.parameters()} == {torch.float32}
    assert loss.dtype == logprobs.dtype == torch.float32
    difference = (logprobs - head.score(policy, batch, 0.8)[0]).abs().max()
    assert 0 < difference < 0.1


def test_an_implementation_that_cannot_run_is_one_line(policy, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for impl in ("triton", "cuda"):
        with pytest.raises(UsageError, match=f"--impl {impl}: .*CUDA device, not cpu") as error:
            head.implementation(dataclasses.replace(policy, impl=impl), "linear_grpo_loss")
        assert "\n" not in str(error.value)


def test_beside_the_cuda_row_kernel_the_other_ops_run_in_triton(policy, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for op in ("linear_logprob", "linear_logprob_autograd"):
        assert head.implementation(dataclasses.replace(policy, impl="cuda"), op) == "triton"
