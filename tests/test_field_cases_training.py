"""Cases from the field: loss and kernels (L), sampling (V), checkpoints and logs (C). One test per right value.

| kind | cases | their tests | the same, more widely |
|---|---|---|---|
| tool calls | P1, P4, P5 | test_field_cases.py | test_tools.py, test_env.py |
| tokens, masks | T1, T3, T6 | test_field_cases.py | test_chat.py, test_rollout.py, test_batching.py |
| advantages, groups | A1, A4 | test_field_cases.py | test_advantages.py, test_rollout.py |
| loss, kernels | L1, L4, L6 | here | test_loss_invariants.py, test_kernel_edge_cases.py, test_trainer.py |
| sampling | V1, V5 | here | test_sampling.py, test_torch_engine.py |
| engines | V3: order of weight updates | test_engine_order.py | |
| resume | C1: interrupted equals uninterrupted | test_resume.py | test_schedule.py |
| checkpoints | C3, C5 | here | test_run.py, test_scenarios.py |
| evaluation | E1, E4, E6 | test_field_cases.py | test_simulator.py, test_evaluate.py, test_env_policies.py |
"""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo import config as config_module
from grpo import run
from grpo.batching import make_microbatches
from grpo.config import LossConfig, ModelConfig, OptimConfig, UsageError
from grpo.head import score as trainer_logprobs
from grpo.loss import grpo_loss, kl_divergence
from grpo.model import load_policy
from grpo.sampling import SamplingConfig, random_stream, sample, uniforms
from grpo.schedule import learning_rate
from grpo.trainer import Trainer
from grpo_kernels import linear_logprob, logprob_from_logits
from scenarios.generator import training_scenario
from tests import test_kernel_edge_cases as kernels
from tests import toy
from tests.test_trainer import make

# ------------------------------------------------------------------------------------------- L: loss and kernels


def test_l1_k3_and_its_gradient_stay_finite_and_exact_where_they_can():
    policy = torch.tensor([-120.0, -1.0, -1.0, -2.0], requires_grad=True)
    ref = torch.tensor([-1.0, -120.0, -1.0, -2.5])
    kl = kl_divergence(policy, ref, "k3", torch.ones(4))
    (0.1 * kl).sum().backward()
    assert torch.isfinite(kl).all() and torch.isfinite(policy.grad).all()
    assert kl[1].item() == pytest.approx(118.0)
    assert kl[2].item() == 0
    assert kl[3].item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)  # moderate gaps are exact


def test_l1_a_masked_position_contributes_exactly_nothing():
    def loss_of(n):
        policy = torch.tensor([-1.0, 0.0])[:n].requires_grad_()
        loss, _ = grpo_loss(
            policy_logprobs=policy, old_logprobs=torch.tensor([-1.5, -200.0])[:n], advantages=torch.ones(n),
            ref_logprobs=torch.tensor([-2.0, -300.0])[:n], token_weights=torch.tensor([1.0, 0.0])[:n],
            episode_index=torch.arange(n), config=LossConfig(beta=0.1),
        )  # fmt: skip
        loss.backward()
        return loss, policy.grad

    (loss, gradient), (padded, padded_gradient) = loss_of(1), loss_of(2)
    assert padded == loss and torch.isfinite(loss)
    assert padded_gradient[1] == 0 and padded_gradient[0] == gradient[0]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_l4_rows_beyond_2_to_the_31_elements(impl):
    kernels.test_offsets_are_counted_in_64_bits(impl)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="13 GB of logits and gradients: needs a GPU")
def test_l4_the_last_rows_of_4_gigabytes_of_logits():
    torch.manual_seed(0)
    logits = torch.randn(14_200, 151_936, dtype=torch.bfloat16, device="cuda").requires_grad_()
    targets = torch.randint(0, 151_936, (14_200,), device="cuda")
    logprobs, _ = logprob_from_logits(logits, targets, impl="triton")
    logprobs.sum().backward()
    tail = logits.detach()[-8:].float().requires_grad_()
    expected = torch.log_softmax(tail, -1).gather(-1, targets[-8:, None])[:, 0]
    expected.sum().backward()
    torch.testing.assert_close(logprobs[-8:], expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(logits.grad[-8:].float(), tail.grad, atol=2e-2, rtol=0)


SMALL = dict(beta=0.1, prompts_per_step=1, max_completion_len=8)


def test_l6_step_0_identities_hold_with_dropout_in_the_config(folder):
    assert json.loads((folder / "config.json").read_text())["attention_dropout"] == 0.1
    trainer = make(folder, **SMALL)
    trainer.moved = True  # else the policy's own log-probs stand for the reference's, and the KL is 0 whatever it is
    losses = trainer.step(0).losses
    assert abs(losses["kl"]) < 1e-6 and losses["sampler_gap/max"] < 1e-3
    assert losses["ratio/min"] == pytest.approx(1, abs=1e-5) and losses["ratio/max"] == pytest.approx(1, abs=1e-5)


def test_l6_old_values_are_frozen_and_a_resumed_run_keeps_the_base_as_reference(folder):
    trained, resumed = (make(folder, num_iterations=2, **SMALL) for _ in range(2))
    losses = trained.step(0).losses
    assert losses["ratio/min"] < 1 - 1e-5 or losses["ratio/max"] > 1 + 1e-5  # the second pass, after an update
    assert not trained.reference.policy.model.training
    held = {id(p) for group in trained.optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in trained.reference.policy.model.parameters()}
    # What a resume does: a fresh trainer of the same config gets weights and moments.
    resumed.policy.model.load_state_dict(trained.policy.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    assert resumed.step(1).losses["kl"] == trained.step(1).losses["kl"] > 1e-6


def test_l6_beta_0_loads_no_reference(folder):
    assert make(folder, beta=0.0).reference is None


# ------------------------------------------------------------------------------------------- V: sampling, engines


@pytest.mark.parametrize("temperature, expected", [(0.5, -2.1429), (1.0, -1.4076)])
def test_v1_sampler_and_trainer_agree_on_the_scaled_distribution(temperature, expected):
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    token, sampled = sample(logits, torch.tensor([0.9]).double(), SamplingConfig(temperature))
    assert token.tolist() == [1] and sampled.item() == pytest.approx(expected, abs=1e-4)
    trained = linear_logprob(logits, torch.eye(3), token, temperature)[0]
    assert trained.item() == pytest.approx(expected, abs=1e-4)
    assert (trained - sampled).exp().item() == pytest.approx(1, abs=1e-5)


def test_v1_temperature_0_is_refused_in_training():
    with pytest.raises(UsageError, match="--temperature 0.0: must be above 0"):
        config_module.parse(["--temperature", "0"], env={})


def test_v1_sampled_logprobs_are_the_trainers_at_another_temperature(folder):
    trainer = make(folder, cls=Trainer, temperature=0.5)
    episodes = [e for group in trainer.sample_groups(0) for e in group.episodes]
    for batch in make_microbatches(episodes, [1.0] * len(episodes), max_tokens=10_000, packing=trainer.packing):
        logprobs = trainer_logprobs(trainer.policy, batch, 0.5)[0]
        torch.testing.assert_close(logprobs, batch.sampler_logprobs, atol=1e-4, rtol=0)


def test_v5_members_steps_and_seeds_differ_and_a_rerun_repeats():
    """An engine's draws come from (seed, step, scenario, member, turn, position); a second engine has another seed."""
    flat, position = torch.zeros(16, 64), torch.arange(16).numpy()

    def completion(seed, step, member):
        uniform = uniforms(random_stream(seed, step, 0, member, 0).repeat(16), position)
        return tuple(sample(flat, torch.from_numpy(uniform), SamplingConfig())[0].tolist())

    all_of_them = [completion(seed, step, member) for seed in (42, 43) for step in (0, 1) for member in range(4)]
    assert len(set(all_of_them)) == 16
    assert all_of_them[:4] == [completion(42, 0, member) for member in range(4)]


# ---------------------------------------------------------------------------------- C: checkpoints, resume, logs


def test_c1_the_learning_rate_is_a_function_of_the_step():
    optim = OptimConfig(num_steps=10, warmup_steps=2, learning_rate=1.0, lr_schedule="linear")
    assert [learning_rate(i, optim) for i in range(6)] == [0, 0.5, 1, 0.875, 0.75, 0.625]
    assert learning_rate(9, optim) > 0  # the last line of the log shows the rate that was used


@pytest.mark.parametrize("tied", [True, False])
def test_c3_tied_embeddings_survive_training_saving_and_loading(tied, tmp_path):
    tokenizer = toy.make_tokenizer()
    base, final = tmp_path / "base", tmp_path / "final"
    toy.make_model(tokenizer, tie_word_embeddings=tied).save_pretrained(base)
    tokenizer.save_pretrained(base)
    trainer = make(base, beta=0.0, max_completion_len=4)
    model = trainer.policy.model
    count = trainer.policy.num_parameters
    held = [id(p) for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    trainer.step(0)
    run.save_final(trainer.policy, final)
    theirs = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32).eval()
    ours = load_policy(ModelConfig(model=str(final), device="cpu"))
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, model(ids).logits) and torch.equal(
            ours.model(ids).logits, model(ids).logits
        )
        assert ours.num_parameters == count
        head = ours.model.get_output_embeddings().weight
        before = head.clone()
        ours.model.get_input_embeddings().weight.add_(1.0)
        assert torch.equal(head, before) != tied


@pytest.mark.parametrize("prompts", [2, 4])
def test_c5_training_never_runs_out_of_scenarios(folder, prompts):
    """Scenarios are generated without end, a function of (seed, index): no epochs, nothing to run out of or to save."""
    trainer = make(folder, cls=Trainer, prompts_per_step=prompts, num_generations=2, max_completion_len=2)
    seen = []
    for step in range(5):
        groups = trainer.sample_groups(step)
        assert len(groups) == prompts and all(len(group.episodes) == 2 for group in groups)
        seen += [group.scenario.seed for group in groups]
    assert len(set(seen)) == 5 * prompts
    assert seen == [training_scenario(0, i).seed for i in range(5 * prompts)]
