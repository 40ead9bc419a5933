"""The step: identities before the first update, independence of the split, what is (not) loaded, and that it learns."""

import dataclasses
from unittest import mock

import pytest
import torch

from env.prompts import TOOLS
from grpo import run, trainer
from grpo.chat import ChatTokens
from grpo.config import Config
from grpo.model import Policy
from grpo.reference import Reference
from grpo.trainer import Trainer
from scenarios.generator import held_out

SMALL = dict(
    recipe="tiny", prompts_per_step=2, num_generations=4, max_completion_len=48, beta=0.2, device="cpu",
    learning_rate=1e-3, warmup_steps=0, num_steps=10,
)  # fmt: skip


def spread_rewards(groups):
    """Rewards that differ within a group, whatever the toy model does: whether its first token's id is even."""
    return [
        dataclasses.replace(
            group,
            episodes=tuple(dataclasses.replace(e, reward=float(e.completion_ids[0] % 2 == 0)) for e in group.episodes),
        )
        for group in groups
    ]


class ToyTrainer(Trainer):
    def sample_groups(self, step):
        return spread_rewards(super().sample_groups(step))


def make(folder, cls=ToyTrainer, **values) -> Trainer:
    config = Config().with_values(SMALL | {"model": str(folder)} | values)
    policy = run.load_policy(config.model)
    chat = run.make_chat(policy)
    engine = run.make_engine(config, policy, chat, held_out(5))
    packing = run.make_packing(config, policy, chat, engine.max_context)
    reference = Reference(config.model, packing, engine.max_context) if config.loss.beta > 0 else None
    return cls(config, policy, engine, chat, reference, packing)


def test_before_the_first_update_kl_is_0_and_every_ratio_1(folder):
    """With attention dropout in the model's config: a trainer that leaves it on has a huge KL here."""
    losses = make(folder).step(0).losses
    assert abs(losses["kl"]) < 1e-6
    assert losses["ratio/min"] == losses["ratio/max"] == 1.0
    assert losses["sampler_gap/max"] < 1e-4
    assert losses["grad_norm"] > 0


def test_after_an_update_kl_is_positive_and_the_reference_still_the_base(folder):
    trained = make(folder)
    before = {k: v.clone() for k, v in trained.reference.policy.model.state_dict().items()}
    trained.step(0)
    assert trained.step(1).losses["kl"] > 1e-5
    after = trained.reference.policy.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(p.requires_grad for p in trained.reference.policy.model.parameters())
    held = {id(p) for group in trained.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trained.policy.model.parameters()}  # tied tensors once, nothing of the reference
    assert not trained.reference.policy.model.training


def test_beta_without_a_reference_is_refused(folder):
    each = make(folder)
    with pytest.raises(ValueError, match="reference is None"):
        Trainer(each.config, each.policy, each.engine, each.chat, None, each.packing)


def test_the_second_inner_iteration_has_moved_ratios(folder):
    once, twice = make(folder).step(0).losses, make(folder, num_iterations=2).step(0).losses
    assert once["ratio/min"] == once["ratio/max"] == 1.0
    assert twice["ratio/max"] > 1.001  # old log-probs are frozen at the rollout


def test_beta_0_loads_no_reference(folder, monkeypatch, tmp_path):
    def refuse(*args):
        raise AssertionError("a reference was loaded")

    monkeypatch.setattr(run, "Reference", refuse)
    config = Config().with_values(SMALL | {"model": str(folder), "beta": 0.0, "num_steps": 1, "eval_limit": 0})
    run.train(config, tmp_path / "run")
    with pytest.raises(AssertionError, match="a reference was loaded"):
        run.train(config.with_values({"beta": 0.1}), tmp_path / "other")


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo"])
def test_gradients_do_not_depend_on_the_microbatches(folder, loss_type):
    """64 episodes at once against about 8 at a time: the normaliser is that of the whole step."""
    gradients, splits = [], []
    loss = trainer.policy_loss
    for budget in (1_000_000, 300):  # unique tokens: one microbatch, about a group each
        each = make(folder, prompts_per_step=8, num_generations=8, max_completion_len=12, loss_type=loss_type,
                    microbatch_tokens=budget)  # fmt: skip
        each.optimizer.step = lambda: None
        with pytest.MonkeyPatch.context() as patch:
            counted = mock.Mock(side_effect=loss)
            patch.setattr(trainer, "policy_loss", counted)
            patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, m: torch.zeros(()))
            each.step(0)
        gradients.append([p.grad.clone() for p in each.policy.model.parameters()])
        splits.append(counted.call_count)
    assert splits[0] == 1 and splits[1] >= 8
    scale = max(g.abs().max() for g in gradients[0])
    assert scale > 1e-3
    assert max((a - b).abs().max() for a, b in zip(*gradients)) <= 1e-6 * max(1.0, scale)


def test_a_non_finite_gradient_never_reaches_the_weights(folder, monkeypatch):
    poisoned = make(folder)
    before = [p.detach().clone() for p in poisoned.policy.model.parameters()]
    original = trainer.policy_loss

    def poison(*args, **kwargs):
        loss, *rest = original(*args, **kwargs)
        return loss * float("nan"), *rest

    monkeypatch.setattr(trainer, "policy_loss", poison)
    assert poisoned.step(0).losses["skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, poisoned.policy.model.parameters()))
    assert not poisoned.optimizer.state
    monkeypatch.undo()
    assert poisoned.step(1).losses["skipped_updates"] == 0


def test_groups_without_spread_and_beta_0_move_nothing(folder):
    still = make(folder, cls=Trainer, beta=0.0)
    still.reward = lambda record: 0.3
    before = [p.detach().clone() for p in still.policy.model.parameters()]
    result = still.step(0)
    assert result.losses["grad_norm"] == 0 and all(a == 0 for group in result.advantages for a in group)
    assert all(torch.equal(a, b) for a, b in zip(before, still.policy.model.parameters()))


def test_kl_in_the_reward_acts_on_advantages_not_in_the_loss(folder):
    inside = make(folder, kl_in="reward", beta=5.0)
    inside.step(0)
    moved = inside.step(1)
    rewards = [[e.reward for e in group.episodes] for group in moved.groups]
    plain = trainer.adv.group_advantages(rewards)
    assert moved.losses["kl"] > 0
    assert max(abs(a - b) for x, y in zip(plain, moved.advantages) for a, b in zip(x, y)) > 1e-3


@pytest.mark.parametrize("cap", [0, 3])
def test_dynamic_sampling_replaces_groups_without_spread_up_to_its_cap(folder, cap):
    """Groups have spread from the third round on."""
    rounds = []

    def sampler(engine, chat, scenarios, **kwargs):
        rounds.append(kwargs["step"])
        groups = original(engine, chat, scenarios, **kwargs)
        rewards = (0.0, 1.0) if len(rounds) > 2 else (0.5, 0.5)
        return [
            dataclasses.replace(
                group, episodes=tuple(dataclasses.replace(e, reward=rewards[e.member % 2]) for e in group.episodes)
            )
            for group in groups
        ]

    original = trainer.rollout
    each = make(folder, cls=Trainer, dynamic_sampling=cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "rollout", sampler)
        groups = each.sample_groups(0)
    assert len(groups) == 2
    assert len(rounds) == len(set(rounds)) == (3 if cap else 1)
    assert all((len(set(group.rewards)) == 2) == bool(cap) for group in groups)


def test_truncated_episodes_can_be_masked(folder):
    """The toy model never stops in time, so masking leaves nothing to train on, and nothing breaks."""
    masked = make(folder, mask_truncated=True, max_completion_len=6)
    result = masked.step(0)
    assert all(e.truncated for group in result.groups for e in group.episodes)
    assert result.losses["loss"] == 0 and result.losses["grad_norm"] == 0


def test_it_learns(folder):
    """Eight steps towards even first tokens."""
    learner = make(folder, beta=0.0, learning_rate=1e-2, max_completion_len=1, num_steps=8)
    rewards = []
    for step in range(8):
        episodes = [e for group in learner.step(step).groups for e in group.episodes]
        rewards.append(sum(e.reward for e in episodes) / len(episodes))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.25


def test_training_and_evaluation_prompts_are_the_same_ids(folder):
    from env.prompts import first_messages

    each = make(folder, max_completion_len=4)
    assert isinstance(each.policy, Policy)
    for group in each.step(0).groups:
        expected = ChatTokens(each.policy.tokenizer, TOOLS).first_prompt(first_messages(group.scenario))
        assert all(episode.prompt_ids == expected for episode in group.episodes)


@pytest.mark.parametrize("large", [True, False])
def test_a_large_models_memory_is_given_back_between_phases_and_before_the_embeddings_gradient(
    folder, monkeypatch, large
):
    monkeypatch.setattr(trainer, "LARGE_MODEL", 0 if large else 1 << 40)
    held = []  # parameters with a gradient at that time

    def spy():
        held.append(sum(p.grad is not None for p in made.policy.model.parameters()))

    monkeypatch.setattr(trainer, "give_back_memory", spy)
    made = make(folder)
    made.step(0)
    made.step(1)
    total = len(list(made.policy.model.parameters()))
    layer = len(list(made.policy.model.model.layers[0].parameters()))
    # Before and behind sampling, behind the reference, in the forward pass (embedding, every fourth layer) and at the
    # same places in the backward pass: at its end all but the (tied) embedding have their gradient.
    assert held == ([0, 0, 0, 0, 0, total - 1 - layer, total - 1] * 2 if large else [])


def test_memory_is_given_back_behind_layers_that_return_a_tuple(monkeypatch):
    given = []
    monkeypatch.setattr(trainer, "give_back_memory", lambda: given.append(1))
    layer = torch.nn.LSTM(4, 4)
    layer.register_forward_hook(trainer._give_back_behind)
    layer(torch.randn(2, 1, 4))[0].sum().backward()
    assert given == [1, 1]
    with torch.no_grad():
        layer(torch.randn(2, 1, 4))
    assert given == [1, 1]
