"""Our side of `step_vs_trl.py`: `Trainer.step`, one at a time. Argument: settings as JSON."""

from __future__ import annotations

import itertools
import json
import sys
import time
import zlib
from typing import Any

import torch
from cases import SCENARIO_SEED, Case, forced_rewards
from sides import Channel, peak_bytes, process_memory

from grpo.config import Config
from grpo.engines.choice import make_engine
from grpo.head import describe
from grpo.model import load_policy
from grpo.reference import Reference
from grpo.run import make_chat, make_packing
from grpo.trainer import StepResult, Trainer
from scenarios.generator import held_out


def make_trainer(case: Case, model: str, device: str) -> Trainer:
    """As `grpo.run` builds it, with the settings of the case."""
    config = Config().with_values(
        dict(
            model=model,
            device=device,
            dtype="float32",
            seed=SCENARIO_SEED,
            prompts_per_step=case.groups,
            num_generations=case.group_size,
            max_completion_len=case.completion,
            temperature=case.temperature,
            beta=case.beta,
            learning_rate=case.learning_rate,
            lr_schedule="constant",
            warmup_steps=0,
        )
    )
    policy = load_policy(config.model)
    chat = make_chat(policy)
    engine = make_engine(config, policy, chat, held_out(None))
    packing = make_packing(config, policy, chat, engine.max_context)
    reference = Reference(config.model, packing, engine.max_context) if case.beta > 0 else None
    trainer = Trainer(config, policy, engine, chat, reference, packing)
    if case.forced:
        engine.eos_ids = frozenset()
        rewards = itertools.cycle(forced_rewards(case.episodes))
        setattr(trainer, "reward", lambda record: next(rewards))  # noqa: B010 (a method, replaced on purpose)
    return trainer


def report(result: StepResult, seconds: float, device: torch.device) -> dict[str, Any]:
    """What the parent wants to know of a step."""
    episodes = [episode for group in result.groups for episode in group.episodes]
    prompts = [list(group.episodes[0].prompt_ids) for group in result.groups]
    return {
        "seconds": seconds,
        "phases": {name: result.seconds.get(name, 0.0) for name in ("rollout", "reference", "update")},
        "sampled_tokens": sum(episode.num_trained for episode in episodes),
        "completion_tokens": sum(len(episode.completion_ids) for episode in episodes),
        "prompt_tokens": sum(len(episode.prompt_ids) for episode in episodes),
        "prompts_crc": zlib.crc32(json.dumps(prompts).encode()),
        "turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
        "reward": sum(episode.reward or 0.0 for episode in episodes) / len(episodes),
        "peak_bytes": peak_bytes(device),
    }


def main() -> None:
    channel = Channel()
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    case = Case(**settings["case"])
    trainer = make_trainer(case, settings["model"], settings["device"])
    device, packing = trainer.policy.device, trainer.packing
    channel.send(
        {
            "versions": {"torch": torch.__version__},
            "settings": {
                "dtype": "float32",
                "loss": describe(trainer.policy, trainer.config.loss),
                "packing": f"unique tokens, {len(packing.prefix)} in every prompt" if packing.packed else "padded rows",
                "microbatch_tokens": trainer.config.optim.microbatch_tokens,
            },
            "resident_bytes": process_memory("self", "VmRSS"),
        }
    )
    for number, _ in enumerate(channel.requests()):
        start = time.perf_counter()
        result = trainer.step(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        channel.send(report(result, time.perf_counter() - start, device))


if __name__ == "__main__":
    main()
