"""Loss and parameter gradients equal those of TRL 1.16's GRPOTrainer, with its flags set explicitly.

Optional: needs `pip install -e ".[test,trl]"`. Both sides get the same tiny random Qwen3, the same multi-turn episodes
(prompts and completions of unequal length, environment replies masked), advantages, old and reference log-probs. TRL's
side is `GRPOTrainer._compute_loss` on its padded batch; ours is the training path, batching included, in several
microbatches. `pytest -s` prints the differences.
"""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed (pip install -e '.[test,trl]')", allow_module_level=True)
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")
trl = pytest.importorskip("trl", minversion="1.16", reason="needs trl >= 1.16: earlier versions differ in their flags")

from datasets import Dataset  # noqa: E402
from toy import make_model, make_tokenizer  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from env.clarify import StopReason  # noqa: E402
from grpo.advantages import group_advantages, token_weights  # noqa: E402
from grpo.batching import make_microbatches  # noqa: E402
from grpo.config import LossConfig  # noqa: E402
from grpo.data_types import Episode  # noqa: E402
from grpo.head import token_logprobs  # noqa: E402
from grpo.loss import grpo_loss  # noqa: E402
from grpo.model import Policy, enable_packing  # noqa: E402

TEMPERATURE, MAX_COMPLETION_LEN = 0.8, 24
# Per episode: prompt length, then the lengths of its segments, sampled and environment in turn.
SHAPES = [(5, (3,)), (5, (4, 6, 2)), (9, (1, 3, 5, 2, 3)), (9, (7, 5, 4))]
REWARDS = [[0.2, 0.9], [0.5, -0.1]]


def make_episodes(vocab_size: int) -> list[Episode]:
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return tuple(torch.randint(vocab_size, (n,), generator=generator).tolist())

    episodes = []
    for prompt, segments in SHAPES:
        mask = tuple(int(turn % 2 == 0) for turn, n in enumerate(segments) for _ in range(n))
        logprobs = tuple(-1.0 * m for m in mask)
        episodes.append(Episode(ids(prompt), ids(len(mask)), mask, logprobs, (), StopReason.PLAN, None, 0.0))
    return episodes


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Tokenizer, model folder, episodes, and [E, T] old and reference log-probs near those of the model."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    make_model(tokenizer).save_pretrained(folder)
    episodes = make_episodes(len(tokenizer))
    policy = load(folder, tokenizer)
    width = max(len(episode.completion_ids) for episode in episodes)
    logprobs = torch.full((len(episodes), width), -3.0)
    with torch.no_grad():
        for batch in make_microbatches(episodes, [1.0] * len(episodes), max_tokens=10_000):
            logprobs[grid_index(batch, episodes)] = token_logprobs(policy, batch, TEMPERATURE)[0]
    generator = torch.Generator().manual_seed(1)
    old, ref = (logprobs + 0.3 * torch.randn(logprobs.shape, generator=generator) for _ in range(2))
    return tokenizer, folder, episodes, old, ref


def load(folder, tokenizer) -> Policy:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = Policy("toy", model, tokenizer, torch.device("cpu"), torch.float32)
    assert enable_packing(policy, max_context=100) is None
    return policy


def grid_index(batch, episodes):
    """Where each trained token of a microbatch lies in TRL's [E, T] completion tensors."""
    prompt_lengths = torch.tensor([len(episode.prompt_ids) for episode in episodes])
    positions = batch.position_ids[batch.predict_rows, batch.predict_cols]
    return batch.episode_index, positions + 1 - prompt_lengths[batch.episode_index]


def pad(rows, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(r)) + list(r) if left else list(r) + [0] * (width - len(r)) for r in rows])


def trl_side(setup, flags, advantages, kept, tmp_path):
    tokenizer, folder, episodes, old, ref = setup
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=4, num_generations=2, max_completion_length=MAX_COMPLETION_LEN,
        temperature=TEMPERATURE, epsilon=0.2, **({"use_bias_correction_kl": False} | flags),
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop
    completion_mask = pad([[int(keep)] * len(e.completion_ids) for e, keep in zip(episodes, kept)])
    # TRL pads its tool mask with 1, so the two masks have to be combined.
    tool_mask = pad([[1 - m for m in e.loss_mask] for e in episodes]).neg() + 1
    inputs = {
        "prompt_ids": pad([e.prompt_ids for e in episodes], left=True),
        "prompt_mask": pad([[1] * len(e.prompt_ids) for e in episodes], left=True),
        "completion_ids": pad([e.completion_ids for e in episodes]),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": (completion_mask * tool_mask).sum(),
    }
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in trainer.model.named_parameters()}


def our_side(setup, config, advantages, kept):
    tokenizer, folder, episodes, old, ref = setup
    policy = load(folder, tokenizer)
    weights = token_weights([e.num_trained for e in episodes], config.loss_type, MAX_COMPLETION_LEN, kept)
    batches = make_microbatches(episodes, weights, max_tokens=25)
    assert len(batches) > 1
    total, clipped = torch.tensor(0.0), 0
    for batch in batches:
        logprobs, entropy = token_logprobs(policy, batch, TEMPERATURE)
        at = grid_index(batch, episodes)
        loss, metrics = grpo_loss(
            policy_logprobs=logprobs, old_logprobs=old[at], ref_logprobs=ref[at], entropy=entropy,
            advantages=advantages[batch.episode_index], token_weights=batch.token_weights,
            episode_index=batch.episode_index, config=config,
        )  # fmt: skip
        loss.backward()
        total += loss.detach()
        clipped += int(metrics["clip_low"] + metrics["clip_high"])
    return total, {name: p.grad for name, p in policy.model.named_parameters()}, clipped


GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
CASES = {
    "grpo": (LossConfig(beta=0.1), {"loss_type": "grpo"}),
    "bnpo": (LossConfig(beta=0.1, loss_type="bnpo"), {"loss_type": "bnpo"}),
    "dr_grpo": (LossConfig(beta=0.1, loss_type="dr_grpo"), {"loss_type": "dr_grpo"}),
    "dapo": (LossConfig(beta=0.1, loss_type="dapo"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (LossConfig(beta=0.1, loss_type="gspo", epsilon_high=0.01), GSPO | {"epsilon_high": 0.01}),
    # TRL's epsilon_high is the bound itself for cispo.
    "cispo": (LossConfig(beta=0.1, loss_type="cispo", epsilon_high=0.1), {"loss_type": "cispo", "epsilon_high": 1.1}),
    "sapo": (LossConfig(beta=0.1, loss_type="sapo"), {"loss_type": "sapo"}),  # temperatures 1.0 and 1.05 on both sides
    "grpo, beta 0": (LossConfig(beta=0.0), {"loss_type": "grpo"}),
    "grpo, dual clip": (LossConfig(beta=0.1, delta=1.25), {"loss_type": "grpo", "delta": 1.25}),
    "grpo, k3_ratio": (LossConfig(beta=0.1, kl_estimator="k3_ratio"),
                       {"loss_type": "grpo", "use_bias_correction_kl": True}),
    "bnpo, entropy": (LossConfig(loss_type="bnpo", entropy_coef=0.1), {"loss_type": "bnpo", "entropy_coef": 0.1}),
    "dapo, truncated masked": (LossConfig(beta=0.1, loss_type="dapo", mask_truncated=True),
                               {"loss_type": "dapo", "epsilon_high": 0.28}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_trl(case, setup, tmp_path):
    config, flags = CASES[case]
    kept = [True, True, not config.mask_truncated, True]
    advantages = torch.tensor(group_advantages(REWARDS)).flatten()
    trl_loss, trl_grads = trl_side(setup, flags | {"beta": config.beta}, advantages, kept, tmp_path)
    loss, grads, clipped = our_side(setup, config, advantages, kept)

    assert clipped > 0  # the clipped branch is compared as well
    assert grads.keys() == trl_grads.keys()
    largest = max(grad.abs().max().item() for grad in trl_grads.values())
    assert largest > 0.1
    difference = max((grads[name] - trl_grads[name]).abs().max().item() for name in grads)
    norm = torch.cat([grad.flatten() for grad in trl_grads.values()]).norm().item()
    distance = torch.cat([(grads[name] - trl_grads[name]).flatten() for name in grads]).norm().item()
    print(
        f"\n{case:>22}: loss {loss.item():+.6f}, off by {abs(loss - trl_loss).item():.1e}; gradients up to "
        f"{largest:.2f}, off by at most {difference:.1e}, relative distance {distance / norm:.1e}"
    )
    assert abs(loss - trl_loss) < 1e-5
    assert difference < 1e-5
    assert distance < 1e-5 * norm
