"""The loss's gradients against finite differences, extreme inputs, and what must not change the result."""

import math

import pytest
import torch
from loss_inputs import CLIPPED, KL_ESTIMATORS, LOSS_TYPES, random_inputs, run, vector

from grpo.config import LossConfig
from grpo.loss import clip_range, grpo_loss, kl_divergence

# --- gradients against finite differences -----------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradcheck(loss_type, estimator):
    inputs = random_inputs()
    if loss_type == "cispo":  # its ratio is a constant only where it is truncated: put every token above the bound
        inputs["old_logprobs"] = inputs["policy_logprobs"] - 3
    policy, entropy = inputs.pop("policy_logprobs").requires_grad_(), inputs.pop("entropy").requires_grad_()
    config = LossConfig(
        beta=0.3, loss_type=loss_type, kl_estimator=estimator, entropy_coef=0.1, delta=1.4, mismatch="token_clip"
    )
    ratio = (policy - inputs["old_logprobs"]).exp().detach()
    for kink in (*clip_range(config), config.delta):
        assert (ratio - kink).abs().min() > 1e-3  # finite differences mean nothing across a kink

    def loss(policy, entropy):
        return grpo_loss(policy_logprobs=policy, entropy=entropy, config=config, **inputs)[0]

    assert torch.autograd.gradcheck(loss, (policy, entropy))
    assert torch.autograd.grad(loss(policy, entropy), policy)[0].abs().min() > 0  # there is a gradient to check


@pytest.mark.parametrize(("log_ratio", "advantage"), [(-0.5, -1.0), (0.5, 1.0)])
@pytest.mark.parametrize("loss_type", CLIPPED)
def test_a_ratio_on_the_bound_counts_as_inside(loss_type, log_ratio, advantage):
    policy, old = vector(log_ratio - 1.0), vector(-1.0)
    ratio = (policy - old).exp().item()
    bound = abs(ratio - 1.0)  # exact, as is adding 1 again
    config = LossConfig(loss_type=loss_type, epsilon=min(bound, 0.5), epsilon_high=bound)
    assert ratio in clip_range(config)
    _, grad, metrics = run(config, policy, old, vector(advantage))
    assert grad.item() == -ratio * advantage  # all of it: neither 0 nor the half that a min at a tie could give
    assert metrics["clip_low"] == metrics["clip_high"] == 0


# --- extremes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_extreme_gaps_give_finite_losses_and_gradients(loss_type, estimator):
    policy = torch.tensor([-120.0, -1.0, -1.0, -1.0, -200.0, -1.0])
    ref = torch.tensor([-1.0, -120.0, -1.0, -1.0, -1.0, -1.0])
    old = torch.tensor([-1.0, -1.0, -1.0, -200.0, -1.0, -200.0])
    config = LossConfig(beta=0.1, loss_type=loss_type, kl_estimator=estimator, mismatch="token_mask")
    for advantage in (1.0, -1.0):
        loss, grad, metrics = run(
            config, policy, old, torch.full((6,), advantage), None, torch.arange(6), ref_logprobs=ref,
            sampler_logprobs=torch.full((6,), -300.0),
        )  # fmt: skip
        assert torch.isfinite(loss) and torch.isfinite(grad).all()
        assert all(map(math.isfinite, metrics.values()))


def test_k3_of_extreme_gaps():
    policy, ref = torch.tensor([-1.0, -120.0, -1.0]).requires_grad_(), torch.tensor([-120.0, -1.0, -1.0])
    kl = kl_divergence(policy, ref, "k3", torch.ones(3))
    kl.sum().backward()
    assert kl[0].item() == pytest.approx(118.0)
    assert kl[1].item() > 1e8
    assert kl[2].item() == 0.0
    # Past the cut there is no gradient. With the linear term uncut it would be +1: away from the reference.
    assert policy.grad.tolist() == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_untrained_tokens_contribute_exactly_nothing(loss_type):
    config = LossConfig(beta=0.1, loss_type=loss_type, entropy_coef=0.1, mismatch="sequence_mask", delta=2.0)
    names = ("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy", "advantages")
    inputs = random_inputs(dtype=torch.float32)
    padded = {key: torch.cat([value, value[:3]]) for key, value in inputs.items()}
    padded["token_weights"][-3:] = 0
    for name in names:
        padded[name][-3:] = torch.tensor([0.0, math.nan, math.inf])
    padded["old_logprobs"][-3] = -200.0  # exp(200) overflows

    def gradients(inputs):
        inputs = {key: value.clone() for key, value in inputs.items()}
        inputs["policy_logprobs"].requires_grad_(), inputs["entropy"].requires_grad_()
        loss, metrics = grpo_loss(**inputs, config=config)
        loss.backward()
        return loss.detach(), inputs["policy_logprobs"].grad, inputs["entropy"].grad, metrics

    loss, policy_grad, entropy_grad, metrics = gradients(inputs)
    padded_loss, padded_policy_grad, padded_entropy_grad, padded_metrics = gradients(padded)
    assert loss != 0
    torch.testing.assert_close((padded_loss, padded_metrics), (loss, metrics), rtol=1e-6, atol=0)  # order of summation
    for grad, padded_grad in ((policy_grad, padded_policy_grad), (entropy_grad, padded_entropy_grad)):
        assert torch.equal(padded_grad, torch.cat([grad, torch.zeros(3)]))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("n", [0, 4], ids=["no tokens", "all masked"])
def test_nothing_to_train_on(loss_type, n):
    config = LossConfig(beta=0.1, loss_type=loss_type, entropy_coef=0.1, mismatch="token_clip")
    tensors = {key: torch.full((n,), -1.0) for key in ("ref_logprobs", "sampler_logprobs", "entropy")}
    weights, episodes = torch.zeros(n), torch.arange(n)
    loss, grad, metrics = run(
        config, torch.full((n,), -2.0), torch.full((n,), -3.0), torch.ones(n), weights, episodes, **tensors
    )
    assert loss.item() == 0.0
    assert torch.equal(grad, torch.zeros(n))
    extremes = [metrics.pop(name) for name in list(metrics) if name.endswith(("ratio_max", "ratio_min"))]
    assert len(extremes) == 4 and set(extremes) == {1.0}
    assert set(metrics.values()) == {0.0}


# --- purity and splits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_input_is_modified(loss_type):
    inputs = random_inputs()
    inputs["policy_logprobs"].requires_grad_(), inputs["entropy"].requires_grad_()
    before = {key: value.clone() for key, value in inputs.items()}
    config = LossConfig(beta=0.1, loss_type=loss_type, mismatch="sequence_mask", entropy_coef=0.1, delta=1.5)
    versions = {key: value._version for key, value in inputs.items()}
    _, metrics = grpo_loss(**inputs, config=config)
    assert all(torch.equal(inputs[key], before[key]) for key in inputs)
    assert versions == {key: value._version for key, value in inputs.items()}
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("mismatch", ["token_clip", "sequence_mask"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_microbatches_of_whole_episodes_add_up_to_the_step(loss_type, mismatch):
    config = LossConfig(beta=0.2, loss_type=loss_type, entropy_coef=0.1, mismatch=mismatch, mismatch_cap=3.0)
    inputs = random_inputs(seed=3)

    def total(splits):
        policy = inputs["policy_logprobs"].clone().requires_grad_()
        loss, metrics = 0.0, []
        for tokens in splits:
            part = {key: value[tokens] for key, value in (inputs | {"policy_logprobs": policy}).items()}
            part_loss, part_metrics = grpo_loss(**part, config=config)
            loss = loss + part_loss
            metrics.append(part_metrics)
        loss.backward()
        names = metrics[0]
        merge = {name: {"max": max, "min": min}.get(name.rsplit("_", 1)[-1], sum) for name in names}
        return loss.item(), policy.grad, {name: float(merge[name]([m[name] for m in metrics])) for name in names}

    episodes = inputs["episode_index"]
    whole = total([torch.ones_like(episodes, dtype=torch.bool)])
    split = total([episodes == 2, (episodes == 4) | (episodes == 0)])
    shuffled = total([torch.randperm(len(episodes), generator=torch.Generator().manual_seed(1))])
    assert whole[1].abs().max() > 1e-2
    for other in (split, shuffled):
        assert other[0] == pytest.approx(whole[0], abs=1e-12)
        torch.testing.assert_close(other[1], whole[1], rtol=0, atol=1e-12)
        assert other[2] == pytest.approx(whole[2], abs=1e-12)


def test_a_group_without_spread_gives_no_gradient_without_an_anchor():
    inputs = random_inputs(dtype=torch.float32)
    advantages = torch.zeros_like(inputs["advantages"])
    for loss_type in LOSS_TYPES:
        config = LossConfig(loss_type=loss_type)
        loss, grad, _ = run(config, inputs["policy_logprobs"], inputs["old_logprobs"], advantages)
        assert loss == 0 and not grad.any()


def test_missing_tensors_and_unknown_names():
    policy = vector(-1.0)
    for config, message in [
        (LossConfig(entropy_coef=0.1), "no entropy"),
        (LossConfig(mismatch="token_clip"), "no sampler_logprobs"),
        (LossConfig(loss_type="ppo"), "'ppo' is not one of grpo, bnpo"),
        (LossConfig(beta=1.0, kl_estimator="k4"), "'k4'"),
        (LossConfig(mismatch="tis"), "'tis'"),
    ]:
        sampler = policy if config.mismatch == "tis" else None
        with pytest.raises(ValueError, match=message):
            run(config, policy, policy, vector(1.0), ref_logprobs=policy, sampler_logprobs=sampler)
