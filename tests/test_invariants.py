"""Each invariant holds in correct steps and fires when the code under it is broken; what a run then does."""

import dataclasses
import math

import pytest
import torch

from grpo import batching, invariants, trainer
from grpo import rollout as rollout_module
from grpo.data_types import Turn
from grpo.invariants import BrokenInvariant, Witness, audit_batches, audit_groups, audit_update
from tests.test_trainer import make

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def toy(folder):
    return make(folder, max_completion_len=60)


@pytest.fixture(scope="module")
def sampled(toy):
    """A rollout batch and what the engine says it sampled."""
    witness = Witness(toy.engine)
    groups = trainer.rollout(
        witness, toy.chat, [trainer.training_scenario(0, i) for i in range(2)], num_generations=3,
        max_completion_len=60, step=0, reward_fn=toy.reward,
    )  # fmt: skip
    return groups, witness.turns


def two_turns(toy, groups):
    """The batch with member 1 of group 0 replaced by an episode of two turns, and its witness."""
    episode = groups[0].episodes[1]
    reply = toy.chat.reply_ids("9")
    first, second = (5, 6, 7), (8, 9)
    logprobs = (-1.0, -2.0, -0.5), (-0.25, -3.0)
    ids = first + reply + second
    start = len(first) + len(reply)
    changed = dataclasses.replace(
        episode,
        completion_ids=ids,
        loss_mask=(1,) * 3 + (0,) * len(reply) + (1,) * 2,
        sampler_logprobs=logprobs[0] + (0.0,) * len(reply) + logprobs[1],
        turns=(Turn(0, 3, "a", "9"), Turn(start, start + 2, "b", None)),
    )
    outputs = [invariants.TurnOutput((0, 1), first, logprobs[0], "stop"),
               invariants.TurnOutput((0, 1), second, logprobs[1], "length")]  # fmt: skip
    return with_episode(groups, 0, 1, changed), outputs


def with_episode(groups, g, m, episode):
    episodes = list(groups[g].episodes)
    episodes[m] = episode
    return [dataclasses.replace(group, episodes=tuple(episodes)) if i == g else group for i, group in enumerate(groups)]


def audit(toy, groups, turns):
    audit_groups(groups, chat=toy.chat, vocab_size=toy.policy.model.config.vocab_size, sampled=turns)


@pytest.fixture(scope="module")
def batch(toy, sampled):
    """Correct: passes the audit with and without its witness."""
    groups, turns = sampled
    groups, outputs = two_turns(toy, groups)
    turns = turns | {(0, 1): outputs}
    audit(toy, groups, turns)
    audit(toy, groups, None)
    return groups, turns


def put(values, index, value):
    values = list(values)
    values[index] = value
    return tuple(values)


BROKEN_EPISODES = {
    "ids too short": (lambda e: dict(completion_ids=e.completion_ids[:-1]), "completion ids, "),
    "log-probs too short": (lambda e: dict(sampler_logprobs=e.sampler_logprobs[:-1]), "sampler log-probs"),
    "mask too long": (lambda e: dict(loss_mask=(*e.loss_mask, 1)), "mask entries"),
    "mask not binary": (lambda e: dict(loss_mask=put(e.loss_mask, 1, 2)), r"the loss mask holds \[2\]"),
    "reply trained": (lambda e: dict(loss_mask=put(e.loss_mask, 3, 1)), "loss mask differs from the turns at index 3"),
    "sampled not trained": (lambda e: dict(loss_mask=put(e.loss_mask, 2, 0)), "turns at index 2: 0, not 1"),
    "ends after its last turn": (lambda e: dict(turns=e.turns[:1]), "turns in length"),
    "negative id": (lambda e: dict(completion_ids=put(e.completion_ids, 0, -1)), "completion id -1 at index 0"),
    "id beyond the vocabulary": (lambda e: dict(completion_ids=put(e.completion_ids, -1, 10**6)), "id 1000000"),
    "prompt id": (lambda e: dict(prompt_ids=put(e.prompt_ids, 4, e.prompt_ids[4] + 1)), "first prompt .* at index 4"),
    "prompt cut": (lambda e: dict(prompt_ids=e.prompt_ids[:-1]), "first prompt .* in length"),
    "no prompt": (lambda e: dict(prompt_ids=()), "first prompt .* in length: 0"),
    "NaN log-prob": (lambda e: dict(sampler_logprobs=put(e.sampler_logprobs, 1, NAN)), "log-prob nan at completion i"),
    "-inf log-prob": (lambda e: dict(sampler_logprobs=put(e.sampler_logprobs, 1, -INF)), "log-prob -inf at completion"),
    "positive log-prob": (lambda e: dict(sampler_logprobs=put(e.sampler_logprobs, 1, 0.5)), "log-prob 0.5 at compl"),
    "log-prob of the reply": (lambda e: dict(sampler_logprobs=put(e.sampler_logprobs, 4, -1.0)), "not 0 in the reply"),
    "another log-prob": (
        lambda e: dict(sampler_logprobs=put(e.sampler_logprobs, 0, -1.5)),
        "turn 0 differ .* engine's",
    ),
    "another id": (lambda e: dict(completion_ids=put(e.completion_ids, 1, 7)), "turn 0 differ .* index 1: 7, not 6"),
    "another reply": (lambda e: dict(completion_ids=put(e.completion_ids, 3, 0)), "after turn 0 differ from the reply"),
    "another member": (lambda e: dict(member=0), "calls itself member 0"),
    "no reward": (lambda e: dict(reward=None), "reward None at stop reason"),
    "NaN reward": (lambda e: dict(reward=NAN), "reward nan at stop reason"),
}


@pytest.mark.parametrize("name", BROKEN_EPISODES)
def test_a_broken_episode_is_named_with_what_differs(toy, batch, name):
    groups, turns = batch
    change, message = BROKEN_EPISODES[name]
    episode = groups[0].episodes[1]
    broken = with_episode(groups, 0, 1, dataclasses.replace(episode, **change(episode)))
    with pytest.raises(BrokenInvariant, match=message) as error:
        audit(toy, broken, turns)
    assert str(error.value).startswith("group 0 (") and "member 1: " in str(error.value)
    assert error.value.groups == broken


def test_a_turn_the_engine_did_not_sample_is_noticed(toy, batch):
    groups, turns = batch
    with pytest.raises(BrokenInvariant, match="2 turns, but the engine sampled 1"):
        audit(toy, groups, turns | {(0, 1): turns[0, 1][:1]})


def test_an_environment_that_broke_at_once_is_no_broken_invariant(toy, batch):
    groups, turns = batch
    reason = type(groups[0].episodes[0].stop_reason).ENV_ERROR
    failed = dataclasses.replace(groups[0].episodes[1], prompt_ids=(), completion_ids=(), loss_mask=(), turns=(),
                                 sampler_logprobs=(), stop_reason=reason, reward=None)  # fmt: skip
    audit(toy, with_episode(groups, 0, 1, failed), turns | {(0, 1): []})


# ------------------------------------------------------------------------------------- the code under each one broken


def broken_step(folder, match, **values):
    with pytest.raises(BrokenInvariant, match=match) as error:
        each = make(folder, **{"max_completion_len": 24} | values)
        before = [p.detach().clone() for p in each.policy.model.parameters()]
        each.step(0)
    assert all(torch.equal(a, b) for a, b in zip(before, each.policy.model.parameters()))
    assert not each.optimizer.state
    assert len(error.value.groups) == 2  # what to dump


@pytest.fixture
def player(monkeypatch):
    """Replaces a method of the rollout loop by one that gets the original as its first argument."""

    def replace(name, method):
        original = getattr(rollout_module.Player, name)
        monkeypatch.setattr(rollout_module.Player, name, lambda self, *args: method(self, original, *args))

    return replace


def test_a_loop_that_encodes_text_again_is_noticed(folder, player):
    def encodes(self, original, ids, mask, logprobs):
        if mask and len(ids) > 1:
            ids = (ids[1], ids[0], *ids[2:])
        original(self, ids, mask, logprobs)

    player("_extend", encodes)
    broken_step(folder, "differ from what the engine sampled at index 0")


def test_a_loop_that_trains_environment_replies_is_noticed(folder, player):
    """Turns of two tokens that count as stopped, so that there are replies."""

    def short(self, original):
        request = original(self)
        return dataclasses.replace(request, max_tokens=min(2, request.max_tokens))

    player("request", short)
    player("play", lambda self, original, output: original(self, dataclasses.replace(output, finish="stop")))
    each = make(folder, max_completion_len=400)
    assert max(len(e.turns) for group in each.sample_groups(0) for e in group.episodes) > 1  # it passes as it is
    player("_extend", lambda self, original, ids, mask, logprobs: original(self, ids, 1, logprobs))
    broken_step(folder, "loss mask differs from the turns", max_completion_len=400)


def test_another_first_prompt_than_evaluation_s_is_noticed(folder, player):
    def other(self, original, env_factory):
        try:
            return original(self, env_factory)
        finally:
            self.prompt_ids = (self.prompt_ids[0], *self.prompt_ids)

    player("begin", other)
    broken_step(folder, "first prompt differs from evaluation's")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("targets", "trained id of a trained token differs at index 0"),
        ("sampler_logprobs", "sampler log-prob of a trained token differs"),
        ("token_weights", "weight of a trained token differs"),
        ("episode_index", "episode of a trained token differs"),
        ("predict_cols", "id before it of a trained token differs"),
        ("position_ids", "position of a trained token differs"),
    ],
)
@pytest.mark.parametrize("packing", ["auto", "padded"])
def test_a_microbatch_that_carries_other_values_is_noticed(folder, monkeypatch, packing, field, message):
    original = batching._collate_packed if packing == "auto" else batching._collate_padded

    def shifted(*args):
        made = original(*args)
        values = getattr(made, field).roll(1, -1)
        if torch.equal(values, getattr(made, field)):
            values = values + 1
        return dataclasses.replace(made, **{field: values})

    monkeypatch.setattr(batching, original.__name__, shifted)
    broken_step(folder, message, packing=packing)


@pytest.mark.parametrize("packing", ["auto", "padded"])
def test_a_microbatch_with_another_context_is_noticed(folder, monkeypatch, packing):
    """One id in the middle of the prompt, far from anything that is trained."""
    original = batching._collate_packed if packing == "auto" else batching._collate_padded

    def changed(*args):
        made = original(*args)
        ids = made.input_ids.clone()
        ids[0, 7] += 1
        return dataclasses.replace(made, input_ids=ids)

    monkeypatch.setattr(batching, original.__name__, changed)
    broken_step(folder, "conditioned on other ids than its own at index 7", packing=packing)


def test_a_segment_behind_another_prompt_is_noticed(toy, batch):
    episodes = [episode for group in batch[0] for episode in group.episodes]
    weights = [0.5] * len(episodes)
    (made,) = trainer.make_microbatches(episodes, weights, max_tokens=10**6, packing=toy.packing)
    segments = list(made.layout.segments)
    assert segments[1].parent == 0 and segments[2].parent == 1
    segments[2] = dataclasses.replace(segments[2], parent=0)  # an episode behind the common prefix alone
    broken = dataclasses.replace(made, layout=dataclasses.replace(made.layout, segments=segments))
    with pytest.raises(BrokenInvariant, match="conditioned on other ids"):
        audit_batches([broken], episodes, weights)


def test_an_episode_that_is_trained_twice_or_not_at_all_is_noticed(toy, batch):
    episodes = [episode for group in batch[0] for episode in group.episodes]
    weights = [0.5] * len(episodes)
    made = trainer.make_microbatches(episodes, weights, max_tokens=1, packing=toy.packing)
    audit_batches(made, episodes, weights)
    with pytest.raises(BrokenInvariant, match="episodes in the microbatches differ"):
        audit_batches([*made, made[0]], episodes, weights)
    with pytest.raises(BrokenInvariant, match="episodes in the microbatches differ"):
        audit_batches(made[1:], episodes, weights)
    with pytest.raises(BrokenInvariant, match="episodes in the microbatches differ"):
        audit_batches(made, episodes, put(weights, 0, 0.0))


def test_old_log_probs_that_are_not_the_policy_s_are_noticed(folder, monkeypatch):
    """The sampler's instead: equal up to rounding, and so not exactly."""
    original = trainer.policy_loss
    monkeypatch.setattr(
        trainer,
        "policy_loss",
        lambda policy, batch, **kwargs: original(
            policy, batch, **kwargs | {"old_logprobs": batch.sampler_logprobs + 1e-6}
        ),
    )
    broken_step(folder, "before the first update, not 1")


def test_a_negative_kl_is_noticed(folder, monkeypatch):
    import grpo.loss

    monkeypatch.setattr(grpo.loss, "kl_divergence", lambda policy, ref, estimator, ratio: policy - policy.abs() - 1)
    broken_step(folder, "cannot be negative")


def test_metrics_of_correct_updates_pass():
    audit_update(0, {"ratio/min": 1.0, "ratio/max": 1.0, "kl": 0.0})
    audit_update(1, {"ratio/min": 0.5, "ratio/max": 2.0, "kl": 0.1})
    audit_update(0, {})  # nothing was trained
    with pytest.raises(BrokenInvariant):
        audit_update(0, {"ratio/min": 1.0, "ratio/max": 1.0 + 1e-7})


def test_a_recorded_batch_is_audited_without_its_witness(folder):
    each = make(folder, max_completion_len=24)
    groups = each.sample_groups(0)
    assert math.isfinite(each.step(0, groups=groups).losses["loss"])
    episode = groups[1].episodes[2]
    swapped = dataclasses.replace(episode, loss_mask=put(episode.loss_mask, 0, 0))
    with pytest.raises(BrokenInvariant, match="member 2: the loss mask"):
        each.step(1, groups=with_episode(groups, 1, 2, swapped))


def test_a_dropped_update_ends_its_step(folder, monkeypatch):
    """The first of three inner iterations is not finite: the other two, from the same numbers, are not made."""
    each, calls = make(folder, num_iterations=3), []
    original = trainer.policy_loss

    def poison(*args, **kwargs):
        calls.append(1)
        loss, *rest = original(*args, **kwargs)
        return loss * NAN, *rest

    monkeypatch.setattr(trainer, "policy_loss", poison)
    assert each.step(0).losses["skipped_updates"] == 1 and len(calls) == 1


def test_a_penalty_that_is_not_finite_drops_the_step(folder, monkeypatch):
    each = make(folder, kl_in="reward", beta=1.0)
    each.step(0)
    before = [p.detach().clone() for p in each.policy.model.parameters()]
    monkeypatch.setattr(trainer, "kl_reward_penalty", lambda lp, ref, index, n: torch.full((n,), NAN))
    assert each.step(1).losses["skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, each.policy.model.parameters()))


def test_masked_episodes_are_penalised_in_the_baseline_too(folder, monkeypatch):
    """With `--kl-in reward --mask-truncated`: the toy never stops in time, so all are masked but one we let stop."""
    seen = {}
    for masked in (False, True):
        each = make(folder, kl_in="reward", beta=5.0, mask_truncated=masked, learning_rate=1e-2)
        each.mask = masked
        stop = type(each.sample_groups(0)[0].episodes[0].stop_reason).PLAN
        original = each.sample_groups
        each.sample_groups = lambda step, original=original, stop=stop: [
            dataclasses.replace(
                group,
                episodes=tuple(
                    dataclasses.replace(e, stop_reason=stop if e.member == 0 else e.stop_reason) for e in group.episodes
                ),
            )
            for group in original(step)
        ]
        groups = each.sample_groups(0)
        each.config = each.config.with_values({"mask_truncated": False})
        each.step(0, groups=groups)  # the same move away from the reference in both
        each.config = each.config.with_values({"mask_truncated": masked})
        seen[masked] = each.step(1, groups=each.sample_groups(1)).advantages
    # Equal up to rounding: masked episodes are scored in a microbatch of their own, in GEMMs of another shape.
    for with_mask, without in zip(seen[True], seen[False], strict=True):
        assert with_mask == pytest.approx(without, abs=1e-6) != [0.0] * 4


def test_each_round_of_dynamic_sampling_has_its_own_witness(folder):
    """The toy earns the same in every episode, so all rounds are played."""
    rounds, each = [], make(folder, cls=trainer.Trainer, dynamic_sampling=2, max_completion_len=8)
    audit_of = each.audit
    each.audit = lambda groups, witness=None: (rounds.append(len(witness.turns)), audit_of(groups, witness))
    each.sample_groups(0)
    assert rounds == [8, 8, 8]
