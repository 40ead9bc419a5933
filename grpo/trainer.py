"""One step of GRPO, in the order of the algorithm: rollout, reward, advantages, reference, loss, update, log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from env.clarify import ClarifyEnv, EnvFactory, EpisodeRecord
from env.rubrics import reward
from grpo import advantages as adv
from grpo import distributed
from grpo.batching import Packing, make_microbatches
from grpo.chat import ChatTokens
from grpo.config import Config
from grpo.data_types import Episode, Group, TokenBatch
from grpo.engines import Engine
from grpo.head import moves_at_reference, policy_loss, score
from grpo.invariants import BrokenInvariant, Witness, all_finite, audit_batches, audit_groups, audit_update
from grpo.loss import kl_reward_penalty
from grpo.machine import give_back_memory
from grpo.model import Policy
from grpo.optimizer import make_optimizer
from grpo.reference import Reference
from grpo.rollout import rollout
from grpo.schedule import learning_rate
from scenarios.generator import training_scenario
from scenarios.schema import Scenario

LARGE_MODEL = 256 << 20  # bytes of weights
LAYERS = 4  # of a large model on a CPU, between one return of freed memory and the next


@dataclass
class Stopwatch:
    """Seconds by phase of one step, logged as `time/<phase>`."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for the log. `losses` are Python floats, averaged over the optimiser steps of the batch."""

    groups: list[Group]
    advantages: list[list[float]]
    losses: dict[str, float]
    seconds: dict[str, float]


class Trainer:
    """Holds the policy, its optimiser and its sampler; `step(i)` is one GRPO step.

    Nothing is remembered between steps but weights, optimiser state and, for the sampler to guess from, the groups of
    the step before: scenarios, every sampled token and the learning rate are functions of (config, i). That is what
    makes a resumed run repeat an uninterrupted one.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        engine: Engine,
        chat: ChatTokens,
        reference: Reference | None,
        packing: Packing,
        env_factory: EnvFactory = ClarifyEnv,
    ):
        if (config.loss.beta > 0) != (reference is not None):
            raise ValueError(f"beta is {config.loss.beta} but reference is {reference}")
        self.config, self.policy, self.engine, self.chat, self.reference = config, policy, engine, chat, reference
        self.packing, self.env_factory = packing, env_factory
        self.optimizer = make_optimizer(policy.model.parameters(), config.optim.optimizer, config.optim.learning_rate)
        self.gives_back = policy.device.type == "cpu" and 4 * policy.num_parameters > LARGE_MODEL
        if self.gives_back:
            names = policy.model._no_split_modules or ()
            layers = [m for m in policy.model.modules() if type(m).__name__.removeprefix("FSDP") in names]
            # The gradient of an embedding is as large as its weight; what all layers kept is free by then.
            for module in [policy.model.get_input_embeddings(), *layers[::LAYERS]]:
                module.register_forward_hook(_give_back_behind)
        self.before: Sequence[Group] = ()
        self.moved = False  # True where weights that are not the base's were loaded without optimiser state

    def step(
        self, step: int, groups: list[Group] | None = None, on_sampled: Callable[[list[Group]], None] | None = None
    ) -> StepResult:
        """Step number `step`, from 0.

        Args:
            groups: a recorded rollout batch of this step, to be trained on instead of a newly sampled one.
            on_sampled: called with a newly sampled batch before anything is done with it (it is recorded then).

        Raises:
            BrokenInvariant: with the batch in its `groups`.
        """
        watch = Stopwatch()
        if groups is None:
            self.optimizer.zero_grad(set_to_none=True)
            self.give_back_memory()
            with distributed.awake(self.engine, self.policy.model):
                watch.lap("sync")
                groups = self.sample_groups(step)
                watch.lap("rollout")
            self.engine.sleep()
            self.give_back_memory()
            watch.lap("sync")
            if on_sampled:
                on_sampled(groups)
                watch.lap("record")
        else:
            self.audit(groups)
        self.before = groups
        try:
            return self.train_on(step, groups, watch)
        except BrokenInvariant as error:
            error.groups = groups
            raise

    def train_on(self, step: int, groups: list[Group], watch: Stopwatch) -> StepResult:
        """The part of a step behind the rollout."""
        config = self.config
        episodes = [episode for group in groups for episode in group.episodes]  # E = P * G
        kept = [e.reward is not None and not (config.loss.mask_truncated and e.truncated) for e in episodes]
        weights = adv.token_weights(
            [e.num_trained for e in episodes], config.loss.loss_type, config.rollout.max_completion_len, kept
        )
        owned = distributed.owned(groups, weights)
        weights = [weight if own else 0.0 for weight, own in zip(weights, owned)]
        batches = make_microbatches(episodes, weights, max_tokens=config.optim.microbatch_tokens, packing=self.packing)
        distributed.agreed(audit_batches, batches, episodes, weights)
        batches = [batch.to(self.policy.device) for batch in batches]
        watch.lap("update")
        ref_logprobs = self.reference_logprobs(episodes, weights, batches)
        self.give_back_memory()
        watch.lap("reference")

        rewards = [group.rewards for group in groups]
        if config.loss.kl_in == "reward" and not self.at_reference:  # there the penalty is 0
            masked = [own and weight == 0 for own, weight in zip(owned, weights)]
            rewards = self.anchor_rewards(rewards, episodes, masked, batches, ref_logprobs)
        if all(r is None or math.isfinite(r) for group in rewards for r in group):
            advantages = adv.group_advantages(rewards, config.loss.scale_rewards)
        else:  # a penalty that is not: so is the loss then, and the update is dropped
            advantages = [[math.nan] * len(group) for group in rewards]
        losses = self.update(step, batches, ref_logprobs, torch.tensor([a for group in advantages for a in group]))
        watch.lap("update")
        return StepResult(groups, advantages, losses, watch.seconds)

    def give_back_memory(self) -> None:
        """Between phases: what a large model has freed on a CPU. A small one is faster with what it has."""
        if self.gives_back:
            give_back_memory()

    def sample_groups(self, step: int) -> list[Group]:
        """P groups of G episodes. With dynamic sampling, groups without reward spread are replaced, as far as the cap
        of extra rounds allows; what is still missing then is filled with the groups that were set aside."""
        config, wanted = self.config, self.config.rollout.prompts_per_step
        rounds = 1 + config.rollout.dynamic_sampling
        chosen: list[Group] = []
        aside: list[Group] = []
        for extra in range(rounds):
            missing = wanted - len(chosen)
            first = (step * rounds + extra) * wanted
            scenarios = [training_scenario(config.run.seed, first + i) for i in range(missing)]
            for group in distributed.play_all(self.engine, scenarios, partial(self.play, step * rounds + extra)):
                spread = rounds == 1 or adv.has_spread(group.rewards)
                (chosen if spread else aside).append(group)
            if len(chosen) == wanted:
                break
        return chosen + aside[: wanted - len(chosen)]

    def play(self, batch: int, engine: Engine, scenarios: Sequence[Scenario]) -> list[Group]:
        """Rollout batch number `batch`, or this process's share of it, audited."""
        witness = Witness(engine)
        groups = rollout(
            witness,
            self.chat,
            scenarios,
            num_generations=self.config.rollout.num_generations,
            max_completion_len=self.config.rollout.max_completion_len,
            step=batch,
            reward_fn=self.reward,
            env_factory=self.env_factory,
            before=self.before,
        )
        self.audit(groups, witness)
        return groups

    def audit(self, groups: list[Group], witness: Witness | None = None) -> None:
        """Of a rollout batch; without a witness, of one from a file. Raises BrokenInvariant."""
        vocab_size = self.policy.model.get_input_embeddings().weight.shape[0]
        audit_groups(groups, chat=self.chat, vocab_size=vocab_size, sampled=witness.turns if witness else None)

    def reward(self, record: EpisodeRecord) -> float:
        """Training reward: the rubric's score, less the documented shaping."""
        return reward(record, self.config.eval.rubric, self.config.eval.no_plan_penalty)

    @property
    def at_reference(self) -> bool:
        """True as long as no update has moved the policy away from its reference."""
        return self.reference is not None and not self.optimizer.state and not self.moved

    @property
    def needs_reference(self) -> bool:
        """False where there is none, or the policy's own log-probs stand for its."""
        return self.reference is not None and not (self.at_reference and not moves_at_reference(self.config.loss))

    def reference_logprobs(
        self, episodes: Sequence[Episode], weights: Sequence[float], batches: Sequence[TokenBatch]
    ) -> list[torch.Tensor | None]:
        """[N] of each microbatch; None where there is no reference or the policy's own log-probs stand for it."""
        config = self.config
        if not self.needs_reference:
            return [None] * len(batches)
        assert self.reference
        trained = [i for i, weight in enumerate(weights) if weight > 0]
        found = self.reference.logprobs(
            [episodes[i] for i in trained], config.rollout.temperature, config.optim.microbatch_tokens
        )
        by_episode = dict(zip(trained, found))
        return [torch.cat([by_episode[i] for i in batch.episodes]) for batch in batches]

    def anchor_rewards(
        self,
        rewards: list[list[float | None]],
        episodes: Sequence[Episode],
        masked: Sequence[bool],
        batches: Sequence[TokenBatch],
        ref_logprobs: Sequence[torch.Tensor | None],
    ) -> list[list[float | None]]:
        """`--kl-in reward`: r - beta * (mean k1 over the episode's sampled tokens).

        A truncated episode that is masked is not in `batches`, but its reward is in its group's baseline: it is
        penalised like the others.
        """
        group_size = self.config.rollout.num_generations
        penalties = torch.zeros(len(rewards) * group_size)
        extra = [float(out and episode.reward is not None) for episode, out in zip(episodes, masked)]
        more = make_microbatches(episodes, extra, max_tokens=self.config.optim.microbatch_tokens, packing=self.packing)
        more = [batch.to(self.policy.device) for batch in more]
        more_ref = self.reference_logprobs(episodes, extra, more)
        with distributed.whole(self.policy.model):
            for batch, ref in zip([*batches, *more], [*ref_logprobs, *more_ref]):
                assert ref is not None  # a KL in the reward has a reference
                logprobs, _ = score(self.policy, batch, self.config.rollout.temperature)
                penalties += kl_reward_penalty(logprobs, ref, batch.episode_index, len(penalties)).cpu()
        penalties = distributed.total(penalties)
        beta, flat = self.config.loss.beta, penalties.tolist()
        return [
            [None if r is None else r - beta * flat[g * group_size + i] for i, r in enumerate(group)]
            for g, group in enumerate(rewards)
        ]

    def update(
        self,
        step: int,
        batches: Sequence[TokenBatch],
        ref_logprobs: Sequence[torch.Tensor | None],
        advantages: torch.Tensor,  # [E]
    ) -> dict[str, float]:
        """`num_iterations` optimiser steps on one rollout batch; returns means of the loss's metrics.

        Old log-probs are the policy's own at the first iteration, detached: no extra pass, and frozen from then on.
        """
        config = self.config
        advantages = advantages.to(self.policy.device, torch.float32)
        old_logprobs: list[torch.Tensor] = []
        ref_logprobs, at_reference = list(ref_logprobs), self.at_reference
        if missing := distributed.most(len(batches)) - len(batches):
            fillers = [distributed.filler(self.packing.packed).to(self.policy.device)] * missing
            batches, needs_reference = [*batches, *fillers], self.needs_reference
            ref_logprobs += [each.sampler_logprobs if needs_reference else None for each in fillers]
        num_tokens = sum(len(batch.targets) for batch in batches if batch.episodes)
        num_tokens = int(distributed.total(torch.tensor(num_tokens)))
        lr = learning_rate(step, config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        logged: list[dict[str, float]] = []
        for iteration in range(config.optim.num_iterations):
            self.optimizer.zero_grad(set_to_none=True)
            step_loss = torch.zeros((), device=self.policy.device)
            step_metrics: list[dict[str, torch.Tensor]] = []
            for k, batch in enumerate(batches):
                objective = partial(
                    policy_loss,
                    self.policy,
                    batch,
                    advantages=advantages[batch.episode_index],
                    config=config.loss,
                    old_logprobs=old_logprobs[k] if k < len(old_logprobs) else None,
                    ref_logprobs=ref_logprobs[k],
                    at_reference=at_reference and ref_logprobs[k] is None,
                    temperature=config.rollout.temperature,
                )
                loss, metrics, policy_logprobs = distributed.within_forward(self.policy.model, objective)
                if k == len(old_logprobs):
                    old_logprobs.append(policy_logprobs)
                    if at_reference and ref_logprobs[k] is None:
                        ref_logprobs[k] = policy_logprobs
                loss.backward()
                step_loss += loss.detach()
                step_metrics.append(metrics)
            grad_norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), config.optim.max_grad_norm)
            grad_norm, step_loss = distributed.full(grad_norm), distributed.total(step_loss)
            # A non-finite loss or gradient never reaches the weights or the moments.
            finite = all_finite(grad_norm, step_loss)
            values = combine_metrics(step_metrics, num_tokens)
            values |= {"grad_norm": float(grad_norm), "learning_rate": lr, "skipped_updates": not finite}
            logged.append(values | {"loss": float(step_loss)})
            if not finite:
                break  # what is left of the step would start from the same numbers
            audit_update(iteration, values)
            if batches:
                self.optimizer.step()
                self.engine.weights_changed()
        return {name: sum(values[name] for values in logged) / len(logged) for name in logged[0]}


def _give_back_behind(module: torch.nn.Module, args: object, output: object) -> None:
    """A hook on a module's forward: memory is given back now, and when the backward pass comes here.

    What a layer frees leaves holes between what it keeps, half as large as that.
    """
    output = output[0] if isinstance(output, tuple) else output
    if isinstance(output, torch.Tensor) and output.requires_grad:
        give_back_memory()
        output.register_hook(lambda grad: give_back_memory())


def position(config: Config, step: int) -> dict[str, object]:
    """Where step number `step`, from 0, stands in data and schedule. A checkpoint holds it, a resumed run compares."""
    return {
        "seed": config.run.seed,
        "next_scenario": step * (1 + config.rollout.dynamic_sampling) * config.rollout.prompts_per_step,
        "learning_rate": learning_rate(step, config.optim),
    }


# The loss's metrics (see `grpo_loss`) -> their names in the log.
LOGGED = {
    "kl": "kl",
    "entropy": "entropy",
    "ratio": "ratio/mean",
    "ratio_min": "ratio/min",
    "ratio_max": "ratio/max",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "clip_dual": "clip_ratio/dual_mean",
    "sampler_gap": "sampler_gap/mean",
    "sampler_gap_max": "sampler_gap/max",
    "sampler_sequence_ratio": "sampler_gap/sequence_ratio_mean",
    "sampler_sequence_ratio_min": "sampler_gap/sequence_ratio_min",
    "sampler_sequence_ratio_max": "sampler_gap/sequence_ratio_max",
    "mismatch_weight": "sampler_gap/weight_mean",
}


def combine_metrics(microbatches: Sequence[dict[str, torch.Tensor]], num_tokens: int) -> dict[str, float]:
    """The metrics of one optimiser step, of all processes: extremes kept, sums divided by the token count."""
    step: dict[str, torch.Tensor] = {}
    for name in LOGGED:
        parts = [metrics[name] for metrics in microbatches if name in metrics]
        if parts:
            stacked = torch.stack(parts)
            step[name] = {"max": stacked.max, "min": stacked.min}.get(name.rsplit("_")[-1], stacked.sum)()
    values = {
        LOGGED[name]: float(value if name.endswith(("_max", "_min")) else value / num_tokens)
        for name, value in distributed.merged(step).items()
    }
    if "clip_ratio/low_mean" in values:
        values["clip_ratio/region_mean"] = values["clip_ratio/low_mean"] + values["clip_ratio/high_mean"]
    return values
