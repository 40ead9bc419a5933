"""The loss against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch
from loss_inputs import CLIPPED, KL_ESTIMATORS, LOSS_TYPES, random_inputs, run, vector

from grpo.config import LossConfig
from grpo.loss import clip_range, grpo_loss, kl_divergence, kl_reward_penalty

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
    config = LossConfig(loss_type="sapo")
    ratio = vector(1.0, 1.0, 2.0, 2.0)
    old = vector(-3.0, -3.0, -3.0, -3.0)
    loss, grad, _ = run(config, old + ratio.log(), old, vector(1.0, -1.0, 1.0, -1.0))
    s1, s2 = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-1.05))  # sigmoid(tau * (2 - 1)), tau by the sign of A
    assert loss.item() == pytest.approx(-(4 * 0.5) + 4 / 1.05 * 0.5 - 4 * s1 + 4 / 1.05 * s2)
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
        ("cispo", None, (0.0, 5.0)),
        ("dapo", 0.4, (0.8, 1.4)),
        ("cispo", 2.0, (0.0, 3.0)),
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


@pytest.mark.parametrize("mismatch", ["none", "token_clip"])
def test_logprobs_other_than_the_policys_are_constants_even_where_they_carry_a_graph(mismatch):
    policy = vector(-1.0, -2.0).requires_grad_()
    loss, _ = grpo_loss(
        policy_logprobs=policy, old_logprobs=policy, ref_logprobs=policy - 1, sampler_logprobs=policy,
        advantages=vector(1.0, -1.0), token_weights=vector(1.0, 1.0), episode_index=torch.tensor([0, 0]),
        config=LossConfig(beta=0.1, mismatch=mismatch),
    )  # fmt: skip
    loss.backward()
    kl_slope = 0.1 * (1 - math.exp(-1))
    assert policy.grad.tolist() == pytest.approx([-1.0 + kl_slope, 1.0 + kl_slope])


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
    # Whatever the loss uses, the log shows k3: runs with different estimators compare.
    for estimator in KL_ESTIMATORS:
        config = LossConfig(beta=0.2, kl_estimator=estimator)
        assert run(config, policy, policy - 0.5, vector(0.0, 0.0), ref_logprobs=ref)[2]["kl"] == metrics["kl"]


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
    assert metrics["sampler_sequence_ratio"] == pytest.approx(0.75 + 0.75 + 4.0)
    assert metrics["sampler_sequence_ratio_min"] == pytest.approx(0.75)
    assert metrics["sampler_sequence_ratio_max"] == pytest.approx(4.0)
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
