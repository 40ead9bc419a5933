"""The worst-case first step: as large as a step can get, and without a trace."""

import copy

import pytest
import torch

from grpo import rehearsal
from grpo.config import UsageError
from scenarios.generator import held_out
from tests.test_trainer import SMALL, make

E = SMALL["prompts_per_step"] * SMALL["num_generations"]


def test_episodes_are_as_long_as_they_may_be(folder):
    trainer = make(folder)
    eos_ids = trainer.engine.eos_ids
    episodes = rehearsal.longest_episodes(trainer, held_out(20))
    assert len(episodes) == E and len({episode.prompt_ids for episode in episodes}) == 2
    assert {len(episode.completion_ids) for episode in episodes} == {SMALL["max_completion_len"]}
    prompts = [len(trainer.chat.first_prompt(rehearsal.first_messages(scenario))) for scenario in held_out(20)]
    assert max(len(episode.prompt_ids) for episode in episodes) == max(prompts)
    assert trainer.engine.eos_ids == eos_ids and trainer.engine.num_active == 0


def test_a_run_is_the_same_after_it(folder):
    trainer, other = make(folder), make(folder)
    before = copy.deepcopy(trainer.policy.model.state_dict())
    said = rehearsal.rehearse(trainer, held_out(20))
    assert said.startswith(f"{E} episodes, {E * SMALL['max_completion_len']} sampled tokens")
    after = trainer.policy.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not trainer.optimizer.state and all(p.grad is None for p in trainer.policy.model.parameters())
    assert trainer.at_reference
    for step in range(2):
        a, b = trainer.step(step), other.step(step)
        assert a.losses == b.losses
        assert [e.completion_ids for g in a.groups for e in g.episodes] == [
            e.completion_ids for g in b.groups for e in g.episodes
        ]


def test_it_computes_gradients_of_every_token(folder, monkeypatch):
    seen = []
    real = rehearsal.policy_loss

    def counted(policy, batch, **options):
        seen.append((len(batch.targets), options["ref_logprobs"].shape))
        return real(policy, batch, **options)

    monkeypatch.setattr(rehearsal, "policy_loss", counted)
    trainer = make(folder)
    grads = []
    monkeypatch.setattr(
        trainer.optimizer, "zero_grad", lambda **_: grads.append(trainer.policy.model.model.norm.weight.grad)
    )
    rehearsal.rehearse(trainer, held_out(20))
    assert sum(count for count, _ in seen) == E * SMALL["max_completion_len"]
    assert all(shape == (count,) for count, shape in seen)
    assert grads[0] is not None and grads[0].abs().max() > 0


def test_out_of_memory_is_one_line_that_says_what_to_do(folder, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore text.")

    monkeypatch.setattr(rehearsal, "policy_loss", full)
    trainer = make(folder)
    with pytest.raises(UsageError) as error:
        rehearsal.rehearse(trainer, held_out(5))
    assert "Tried to allocate 20.00 GiB" in str(error.value) and "--microbatch-tokens" in str(error.value)
    assert "\n" not in str(error.value)
