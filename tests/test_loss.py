"""The loss against numbers worked out by hand, its gradients against finite differences, and what it must never do."""

import dataclasses
import math
from typing import get_args

import pytest
import torch

from grpo.advantages import token_weights
from grpo.config import KLEstimator, LossConfig, LossType
from grpo.loss import clip_range, grpo_loss, kl_divergence, kl_reward_penalty

LOSS_TYPES, KL_ESTIMATORS = get_args(LossType), get_args(KLEstimator)
CLIPPED = ["grpo", "bnpo", "dapo", "dr_grpo"]


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(config: LossConfig, policy, old, advantages, weights=None, episodes=None, **tensors):
    """Loss, gradient with respect to the policy's log-probs, and metrics as floats."""
    policy = policy.clone().requires_grad_()
    n = len(policy)
    loss, metrics = grpo_loss(
        policy_logprobs=policy,
        old_logprobs=old,
        advantages=advantages,
        token_weights=torch.ones(n, dtype=policy.dtype) if weights is None else weights,
        episode_index=torch.zeros(n, dtype=torch.int64) if episodes is None else episodes,
        config=config,
        **tensors,
    )
    loss.backward()
    return loss.detach(), policy.grad, {key: float(value) for key, value in metrics.items()}


def random_inputs(seed=0, counts=(3, 1, 5), dtype=torch.float64, gap=0.5) -> dict[str, torch.Tensor]:
    """Log-probs of three episodes with gaps of either sign, advantages of either sign, weights as in grpo."""
    generator = torch.Generator().manual_seed(seed)
    episodes = torch.repeat_interleave(torch.tensor([4, 0, 2])[: len(counts)], torch.tensor(counts))
    n = len(episodes)

    def noise(scale):
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    policy = -1.5 - noise(0.5).abs()
    weights = token_weights(counts, "grpo", 8, [True] * len(counts))
    inputs = {
        "policy_logprobs": policy,
        "old_logprobs": policy + noise(gap),
        "ref_logprobs": policy + noise(gap),
        "sampler_logprobs": policy + noise(gap),
        "entropy": noise(1.0).abs(),
        "advantages": torch.tensor([1.1, -0.7, 0.0, 0.3, -1.2])[episodes].double(),
        "token_weights": torch.repeat_interleave(torch.tensor(weights, dtype=torch.float64), torch.tensor(counts)),
    }
    inputs = {key: value.to(dtype) for key, value in inputs.items()}
    return inputs | {"episode_index": episodes}


# --- the surrogates by hand -------------------------------------------------------------------------------------------

# Ratios 0.5, 0.9, 1, 1.1, 1.5; clip range [0.8, 1.2] (dapo: [0.8, 1.28], set explicitly below).
RATIOS = vector(0.5, 0.9, 1.0, 1.1, 1.5)
OLD = vector(-1.0, -2.0, -0.5, -3.0, -1.0)


@pytest.mark.parametrize("loss_type", CLIPPED)
def test_clipped_surrogate_by_hand(loss_type):
    config = LossConfig(loss_type=loss_type, epsilon_high=0.2)
    # A = 2: min(2r, 2clip(r)) = 1, 1.8, 2, 2.2, 2.4. d/dlogp = 2r, and 0 above the upper bound.
    loss, grad, metrics = run(config, OLD + RATIOS.log(), OLD, torch.full((5,), 2.0).double())
    assert loss.item() == pytest.approx(-9.4, abs=1e-12)
    assert grad.tolist() == pytest.approx([-1.0, -1.8, -2.0, -2.2, 0.0], abs=1e-12)
    assert (metrics["clip_low"], metrics["clip_high"]) == (0, 1)
    assert metrics["surrogate"] == pytest.approx(9.4)
    # A = -1: min(-r, -clip(r)) = -0.8, -0.9, -1, -1.1, -1.5. Gradient 0 below the lower bound, none cut above.
    loss, grad, metrics = run(config, OLD + RATIOS.log(), OLD, torch.full((5,), -1.0).double())
    assert loss.item() == pytest.approx(5.3, abs=1e-12)
    assert grad.tolist() == pytest.approx([0.0, 0.9, 1.0, 1.1, 1.5], abs=1e-12)
    assert (metrics["clip_low"], metrics["clip_high"]) == (1, 0)
    assert (metrics["ratio"], metrics["ratio_max"], metrics["ratio_min"]) == pytest.approx((5.0, 1.5, 0.5))


def test_dual_clip_by_hand():
    config = LossConfig(delta=3.0)
    old = vector(-4.0, -4.0, -4.0)
    policy = old + vector(2.0, 3.5, 3.5).log()
    loss, grad, metrics = run(config, policy, old, vector(-1.0, -1.0, 1.0))
    # A < 0: ratio 2 is under delta (S = -2), 3.5 is held at 3 without gradient. A > 0: the upper clip at 1.2 rules.
    assert loss.item() == pytest.approx(2.0 + 3.0 - 1.2)
    assert grad.tolist() == pytest.approx([2.0, 0.0, 0.0])
    assert metrics["clip_dual"] == 1
    without, _, metrics = run(dataclasses.replace(config, delta=None), policy, old, vector(-1.0, -1.0, 1.0))
    assert without.item() == pytest.approx(2.0 + 3.5 - 1.2)
    assert "clip_dual" not in metrics


def test_delta_leaves_positive_advantages_alone():
    config = LossConfig(delta=1.1)  # below the upper clip, which the configuration refuses
    old = vector(-4.0)
    assert run(config, old + math.log(1.15), old, vector(1.0))[0].item() == pytest.approx(-1.15)


def test_cispo_by_hand():
    config = LossConfig(loss_type="cispo", epsilon_high=1.0)
    old = vector(-4.0, -4.0, -4.0)
    policy = old + vector(0.1, 1.5, 7.0).log()
    loss, grad, metrics = run(config, policy, old, vector(2.0, -1.0, 1.0))
    # S = sg[min(r, 2)] * A * logp; no lower bound; the token above the bound keeps a gradient, of size 2 instead of 7.
    expected = 0.1 * 2 * policy[0] - 1.5 * policy[1] + 2 * policy[2]
    assert loss.item() == pytest.approx(-expected.item())
    assert grad.tolist() == pytest.approx([-0.2, 1.5, -2.0])
    assert (metrics["clip_low"], metrics["clip_high"]) == (0, 1)


def test_sapo_by_hand():
    config = LossConfig(loss_type="sapo", sapo_tau=(1.0, 2.0))
    ratio = vector(1.0, 1.0, 2.0, 2.0)
    old = vector(-3.0, -3.0, -3.0, -3.0)
    loss, grad, _ = run(config, old + ratio.log(), old, vector(1.0, -1.0, 1.0, -1.0))
    s1, s2 = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))  # sigmoid(tau * (2 - 1)) for tau 1 and 2
    assert loss.item() == pytest.approx(-(4 * 0.5) + 2 * 0.5 - 4 * s1 + 2 * s2)
    # dS/dlogp = 4 * s * (1 - s) * r * A: slope A at r = 1 whatever tau, and less than r * A away from it.
    assert grad.tolist() == pytest.approx([-1.0, 1.0, -8 * s1 * (1 - s1), 8 * s2 * (1 - s2)])


def test_gspo_by_hand():
    # Episode 7 has tokens 0, 1, 3, episode 2 has token 2: whole episodes, in any order, any numbers.
    config = LossConfig(loss_type="gspo")
    log_ratio = vector(0.3, -0.3, 0.9, 0.15)
    old, episodes = vector(-1.0, -2.0, -3.0, -4.0), torch.tensor([7, 7, 2, 7])
    weights = vector(1 / 6, 1 / 6, 1 / 2, 1 / 6)  # 1 / (2 episodes * 3 tokens), 1 / (2 * 1)
    loss, grad, metrics = run(config, old + log_ratio, old, vector(2.0, 2.0, 1.0, 2.0), weights, episodes)
    # Sequence ratios exp(0.15 / 3) = exp(0.05) and exp(0.9) > 1.2. Loss: mean over episodes of -S.
    assert loss.item() == pytest.approx(-(2 * math.exp(0.05) + 1.2) / 2)
    # dS/dlogp_t = A * ratio / 3 for each token of episode 7; the other one is clipped as a whole.
    share = -2 * math.exp(0.05) / 3 / 2
    assert grad.tolist() == pytest.approx([share, share, 0.0, share])
    assert metrics["clip_high"] == 1
    assert metrics["ratio"] == pytest.approx(3 * math.exp(0.05) + math.exp(0.9))


@pytest.mark.parametrize(
    ("loss_type", "epsilon_high", "expected"),
    [
        ("grpo", None, (0.8, 1.2)),
        ("gspo", None, (0.8, 1.2)),
        ("dapo", None, (0.8, 1.28)),
        ("cispo", None, (0.0, 6.0)),
        ("dapo", 0.4, (0.8, 1.4)),
        ("cispo", 4.0, (0.0, 5.0)),
    ],
)
def test_clip_range(loss_type, epsilon_high, expected):
    assert clip_range(LossConfig(loss_type=loss_type, epsilon_high=epsilon_high)) == pytest.approx(expected)


# --- identities at the first step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_before_any_update_every_ratio_is_exactly_one_and_the_kl_zero(loss_type, estimator):
    inputs = random_inputs(dtype=torch.float32)
    logprobs = inputs["policy_logprobs"]
    inputs |= {"old_logprobs": logprobs, "ref_logprobs": logprobs, "sampler_logprobs": logprobs}
    del inputs["entropy"], inputs["policy_logprobs"], inputs["old_logprobs"]
    tensors = {key: inputs.pop(key) for key in ("ref_logprobs", "sampler_logprobs")}
    weights, episodes = inputs["token_weights"], inputs["episode_index"]
    anchored = LossConfig(beta=0.5, loss_type=loss_type, kl_estimator=estimator, mismatch="token_clip")
    loss, grad, metrics = run(anchored, logprobs, logprobs, inputs["advantages"], weights, episodes, **tensors)
    n = len(logprobs)
    assert (metrics["ratio"], metrics["ratio_max"], metrics["ratio_min"]) == (n, 1.0, 1.0)
    assert metrics["kl"] == metrics["sampler_gap"] == metrics["clip_low"] == metrics["clip_high"] == 0.0
    assert metrics["mismatch_weight"] == n
    # Every surrogate has the policy gradient w * A here. The KL adds nothing, but for k1, whose gradient is 1 always.
    expected = -weights * inputs["advantages"] + (0.5 * weights if estimator == "k1" else 0.0)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-7)


def test_old_logprobs_that_carry_a_graph_are_constants():
    policy = vector(-1.0, -2.0).requires_grad_()
    loss, _ = grpo_loss(
        policy_logprobs=policy, old_logprobs=policy, ref_logprobs=policy, sampler_logprobs=policy,
        advantages=vector(1.0, -1.0), token_weights=vector(1.0, 1.0), episode_index=torch.tensor([0, 0]),
        config=LossConfig(beta=0.1, mismatch="token_clip"),
    )  # fmt: skip
    loss.backward()
    assert policy.grad.tolist() == [-1.0, 1.0]


# --- KL ---------------------------------------------------------------------------------------------------------------


def test_kl_estimators_by_hand():
    policy, ref, ratio = vector(-1.0, -1.0, -2.0), vector(-1.5, -1.0, -1.0), vector(2.0, 3.0, 0.5)
    # log(policy / ref) = 0.5, 0, -1
    expected = {
        "k1": [0.5, 0.0, -1.0],
        "k2": [0.125, 0.0, 0.5],
        "k3": [math.exp(-0.5) + 0.5 - 1, 0.0, math.e - 1 - 1],
        "k3_ratio": [2 * (math.exp(-0.5) + 0.5 - 1), 0.0, 0.5 * (math.e - 2)],
    }
    assert set(expected) == set(KL_ESTIMATORS)
    for estimator, values in expected.items():
        assert kl_divergence(policy, ref, estimator, ratio).tolist() == pytest.approx(values, abs=1e-12)


def test_k3_keeps_its_digits_near_zero_in_float32():
    gap = torch.tensor([1e-3])
    kl = kl_divergence(-gap, torch.zeros(1), "k3", torch.ones(1))
    assert kl.item() == pytest.approx(1e-6 / 2 + 1e-9 / 6, rel=1e-3)


def test_beta_and_the_weights_scale_the_kl_term():
    policy, ref = vector(-1.0, -2.0), vector(-1.5, -1.0)
    loss, grad, metrics = run(
        LossConfig(beta=0.2), policy, policy, vector(0.0, 0.0), vector(0.25, 0.5), ref_logprobs=ref
    )
    kl = [math.exp(-0.5) - 0.5, math.e - 2]
    assert loss.item() == pytest.approx(0.2 * (0.25 * kl[0] + 0.5 * kl[1]))
    # d k3 / d logp = 1 - pi_ref / pi: up where the policy is above the reference, down where it is below.
    assert grad.tolist() == pytest.approx([0.2 * 0.25 * (1 - math.exp(-0.5)), 0.2 * 0.5 * (1 - math.e)])
    assert metrics["kl"] == pytest.approx(sum(kl))


@pytest.mark.parametrize(
    "config", [LossConfig(beta=0.0), LossConfig(beta=0.2, kl_in="reward")], ids=["beta 0", "in the reward"]
)
def test_no_kl_in_the_loss_but_in_the_metrics(config):
    policy, ref = vector(-1.0, -2.0), vector(-1.5, -1.0)
    loss, grad, metrics = run(config, policy, policy, vector(1.0, 1.0), ref_logprobs=ref)
    assert loss.item() == -2.0
    assert grad.tolist() == [-1.0, -1.0]
    assert metrics["kl"] == pytest.approx(math.exp(-0.5) - 0.5 + math.e - 2)


def test_without_a_reference_there_is_no_kl_to_report():
    policy = vector(-1.0, -2.0)
    loss, _, metrics = run(LossConfig(beta=0.2), policy, policy, vector(1.0, 1.0))
    assert loss.item() == -2.0
    assert "kl" not in metrics


def test_kl_reward_penalty_by_hand():
    penalty = kl_reward_penalty(
        vector(-1.0, -1.0, -2.0), vector(-2.0, -1.5, -1.0), torch.tensor([3, 3, 0]), num_episodes=4
    )
    assert penalty.tolist() == [-1.0, 0.0, 0.0, 0.75]


# --- entropy, mismatch, temperature -----------------------------------------------------------------------------------


def test_entropy_bonus_by_hand():
    policy, entropy = vector(-1.0, -2.0), vector(0.5, 2.0).requires_grad_()
    config = LossConfig(entropy_coef=0.1)
    loss, _, metrics = run(config, policy, policy, vector(1.0, 1.0), vector(0.5, 0.25), entropy=entropy)
    assert loss.item() == pytest.approx(-0.75 - 0.1 * (0.25 + 0.5))
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.025])
    assert metrics["entropy"] == 2.5


# pi_old / pi_sampler = 0.5, 1.5 (episode 0, product 0.75) and 4 (episode 1)
@pytest.mark.parametrize(
    ("mismatch", "expected"),
    [
        ("none", [1.0, 1.0, 1.0]),
        ("token_clip", [0.5, 1.5, 2.0]),
        ("token_mask", [0.5, 1.5, 0.0]),
        ("sequence_mask", [0.75, 0.75, 0.0]),
    ],
)
def test_mismatch_weights_by_hand(mismatch, expected):
    old, episodes = vector(-3.0, -3.0, -3.0), torch.tensor([0, 0, 1])
    sampler = old - vector(0.5, 1.5, 4.0).log()
    config = LossConfig(mismatch=mismatch, mismatch_cap=2.0, beta=0.1)
    loss, grad, metrics = run(
        config, old, old, vector(1.0, 1.0, 1.0), None, episodes, sampler_logprobs=sampler, ref_logprobs=old - 1
    )
    # The weights act on the surrogate, not on the KL: k3 of a gap of 1 is exp(-1), its slope 1 - exp(-1).
    assert loss.item() == pytest.approx(-sum(expected) + 0.1 * 3 * math.exp(-1))
    assert grad.tolist() == pytest.approx([-w + 0.1 * (1 - math.exp(-1)) for w in expected])
    assert metrics["sampler_gap"] == pytest.approx(math.log(2) + math.log(1.5) + math.log(4))
    assert metrics["sampler_gap_max"] == pytest.approx(math.log(4))
    if mismatch != "none":
        assert metrics["mismatch_weight"] == pytest.approx(sum(expected))


def test_sampler_and_trainer_must_share_the_temperature():
    logits, temperature = vector(2.0, 1.0, 0.0), 0.5
    scaled, raw = torch.log_softmax(logits / temperature, -1)[1:2], torch.log_softmax(logits, -1)[1:2]
    assert (scaled.item(), raw.item()) == pytest.approx((-2.1429, -1.4076), abs=1e-4)
    ratios = [
        run(LossConfig(), policy, scaled, vector(1.0), sampler_logprobs=scaled)[2]["ratio"] for policy in (scaled, raw)
    ]
    assert ratios == [1.0, pytest.approx(math.exp(2.1429 - 1.4076), abs=1e-4)]
    # A sampler that reports raw log-probs is seen at once.
    _, _, metrics = run(LossConfig(mismatch="token_clip"), scaled, scaled, vector(1.0), sampler_logprobs=raw)
    assert metrics["mismatch_weight"] == pytest.approx(0.479, abs=1e-3)
    assert metrics["sampler_gap"] == pytest.approx(0.7353, abs=1e-4)


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
    assert metrics.pop("ratio_max") == metrics.pop("ratio_min") == 1.0
    assert set(metrics.values()) == {0.0}


# --- purity and splits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_input_is_modified(loss_type):
    inputs = random_inputs()
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
