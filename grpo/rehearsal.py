"""The largest step that a run can have, tried before its first one: what does not fit shows now, not after an hour.

Every episode has its longest prompt and all the tokens it may have, and no two episodes share a sampled token's place,
so microbatches are as full as they can get. Everything of a step that takes memory is done: sampling, reference,
forward and backward, the moments of the optimiser. Weights, moments and randomness are left as they were.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from env.clarify import EpisodeRecord, StopReason
from env.prompts import first_messages
from grpo import advantages as adv
from grpo import distributed
from grpo.batching import make_microbatches
from grpo.config import UsageError
from grpo.data_types import Episode, Turn
from grpo.engines import Key, TurnOutput, TurnRequest
from grpo.head import policy_loss
from grpo.optimizer import MOMENT_BYTES
from grpo.trainer import Trainer
from scenarios.schema import Scenario


def rehearse(trainer: Trainer, scenarios: Sequence[Scenario]) -> str:
    """Try the worst case; what it took, in a few words. Its prompts are the longest ones of `scenarios`.

    Raises:
        UsageError: it does not fit into the device's memory; names the flags that make it smaller.
    """
    started = time.perf_counter()
    device = trainer.policy.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with distributed.awake(trainer.engine, trainer.policy.model):
            episodes = longest_episodes(trainer, scenarios)
        trainer.engine.sleep()
        heaviest_update(trainer, episodes)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"out of memory on {device} in a worst-case step ({' '.join(str(error).split())[:120]}); smaller: "
            "--microbatch-tokens, --max-completion-len, --num-generations, --gpu-memory; or --gradient-checkpointing"
        ) from error
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.empty_cache()
    tokens = sum(len(episode.completion_ids) for episode in episodes)
    took = f"{len(episodes)} episodes, {tokens} sampled tokens, {time.perf_counter() - started:.1f} s"
    if not on_gpu:
        return took
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return f"{took}, {peak / 2**30:.1f} of {total / 2**30:.0f} GiB in the trainer"


def longest_episodes(trainer: Trainer, scenarios: Sequence[Scenario]) -> list[Episode]:
    """A rollout batch of E episodes, each of one turn that only its length ends."""
    config, engine = trainer.config.rollout, trainer.engine
    prompts = [(trainer.chat.first_prompt(first_messages(scenario)), scenario) for scenario in scenarios]
    prompts.sort(key=lambda pair: -len(pair[0]))
    requests = {}
    for index in range(distributed.share(config.prompts_per_step, config.tensor_parallel)):
        prompt, scenario = prompts[index % len(prompts)]
        room = min(config.max_completion_len, engine.max_context - len(prompt))
        for member in range(config.num_generations):
            key = (index, member)
            requests[key] = TurnRequest(key, prompt, room, group=index), scenario
    eos_ids, engine.eos_ids = engine.eos_ids, frozenset()
    try:
        engine.start(0)
        for request, _ in requests.values():
            engine.submit(request)
        outputs: dict[Key, TurnOutput] = {}
        while len(outputs) < len(requests):
            for output in engine.step():
                outputs[output.key] = output
                engine.release(output.key)
    finally:
        engine.eos_ids = eos_ids
    return [
        Episode(
            prompt_ids=request.prompt_ids,
            completion_ids=outputs[key].token_ids,
            loss_mask=(1,) * len(outputs[key].token_ids),
            sampler_logprobs=outputs[key].logprobs,
            turns=(Turn(0, len(outputs[key].token_ids), "", None),),
            stop_reason=StopReason.TOKEN_CAP,
            record=EpisodeRecord(scenario),
            reward=float(key[1] % 2),
            member=key[1],
        )
        for key, (request, scenario) in requests.items()
    ]


def heaviest_update(trainer: Trainer, episodes: Sequence[Episode]) -> None:
    """An update without its last line: all that `Trainer.update` allocates, and no change of weights."""
    config, policy = trainer.config, trainer.policy
    lengths = [episode.num_trained for episode in episodes]
    kept = [True] * len(episodes)
    weights = adv.token_weights(lengths, config.loss.loss_type, config.rollout.max_completion_len, kept)
    batches = make_microbatches(episodes, weights, max_tokens=config.optim.microbatch_tokens, packing=trainer.packing)
    references: list[torch.Tensor] | None = None
    if trainer.reference is not None:
        references = trainer.reference.logprobs(episodes, config.rollout.temperature, config.optim.microbatch_tokens)
    moments = [
        torch.empty(
            distributed.part(p).numel() * MOMENT_BYTES[config.optim.optimizer], dtype=torch.uint8, device=p.device
        )
        for p in policy.model.parameters()
        if p.requires_grad and p not in trainer.optimizer.state
    ]
    for batch in batches:
        batch = batch.to(policy.device)
        objective = partial(
            policy_loss,
            policy,
            batch,
            advantages=torch.ones_like(batch.token_weights),
            config=config.loss,
            ref_logprobs=None if references is None else torch.cat([references[i] for i in batch.episodes]),
            temperature=config.rollout.temperature,
        )
        loss, _, _ = distributed.within_forward(policy.model, objective)
        loss.backward()
    del moments
