"""One engine of `engines.py`: a rollout batch at a time. Argument: settings as JSON."""

from __future__ import annotations

import json
import sys
import time

import torch
from cases import SCENARIO_SEED, Case, forced_rewards
from side_ours import report
from sides import Channel, process_memory

from grpo.config import Config
from grpo.engines.choice import make_engine
from grpo.model import load_policy
from grpo.rollout import rollout
from grpo.run import make_chat
from grpo.trainer import StepResult
from scenarios.generator import held_out, training_scenario


def main() -> None:
    channel = Channel()
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    case = Case(**settings["case"])
    config = Config().with_values(
        dict(
            engine=settings["engine"],
            model=settings["model"],
            device=settings["device"],
            seed=SCENARIO_SEED,
            prompts_per_step=case.groups,
            num_generations=case.group_size,
            max_completion_len=case.completion,
            temperature=case.temperature,
            beta=0.0,
        )
    )
    policy = load_policy(config.model)
    chat = make_chat(policy)
    started = time.perf_counter()
    engine = make_engine(config, policy, chat, held_out(None))
    if case.forced:
        engine.eos_ids = frozenset()
    channel.send(
        {
            "settings": {
                "engine": engine.description,
                "dtype": str(policy.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "start_seconds": round(time.perf_counter() - started, 1),
            },
            "resident_bytes": process_memory("self", "VmRSS"),
        }
    )
    for number, _ in enumerate(channel.requests()):
        engine.weights_changed()  # as after an optimiser step
        began = time.perf_counter()
        engine.wake()
        awake, cpu = time.perf_counter(), time.process_time()
        groups = rollout(
            engine,
            chat,
            [training_scenario(SCENARIO_SEED, number * case.groups + i) for i in range(case.groups)],
            num_generations=case.group_size,
            max_completion_len=case.completion,
            step=number,
            reward_fn=lambda record: forced_rewards(1)[0],
        )
        seconds, cpu_seconds = time.perf_counter() - awake, time.process_time() - cpu
        step = report(StepResult(groups, [], {}, {"rollout": seconds}), seconds, policy.device)
        channel.send(step | {"sync_seconds": awake - began, "cpu_seconds": cpu_seconds, "episodes": case.episodes})


if __name__ == "__main__":
    main()
