"""Synthetic episodes of given shape on a small random model, and what a step on them costs: for `scaling.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from cases import TINY
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from env.clarify import EpisodeRecord, StopReason
from grpo.batching import Packing, make_microbatches
from grpo.chat import ChatTokens
from grpo.config import Config
from grpo.data_types import Episode, TokenBatch
from grpo.engines import TurnRequest
from grpo.engines.torch_engine import TorchEngine
from grpo.model import enable_packing, load_policy
from grpo.reference import Reference
from grpo.trainer import Trainer

REPLY_TOKENS = 16


@dataclass(frozen=True)
class Shape:
    """A step: `groups` prompts of `prompt` tokens, the first `shared` of them in all, each with `members` episodes of
    `turns` turns of `turn_tokens` sampled tokens, and an untrained reply between two turns."""

    groups: int = 1
    members: int = 4
    prompt: int = 512
    shared: int = 96
    turns: int = 1
    turn_tokens: int = 64

    @property
    def completion(self) -> int:
        return self.turns * self.turn_tokens + (self.turns - 1) * REPLY_TOKENS


@dataclass(frozen=True)
class ModelShape:
    layers: int = 4
    width: int = 128
    vocab: int = 8192


def write_model(folder: Path, shape: ModelShape, context: int) -> Path:
    """A random Qwen3 with the tiny policy's tokenizer (that a model folder must have one is all it is for)."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocab,
            hidden_size=shape.width,
            intermediate_size=2 * shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=shape.width // 4,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id, do_sample=True)
    model.save_pretrained(folder)
    return folder


class Side:
    """A trainer with its reference, its sampler and one way to lay out tokens."""

    def __init__(
        self, folder: Path, device: str, packing: Packing, context: int, max_tokens: int, **settings: object
    ):
        config = Config().with_values(
            dict(model=str(folder), device=device, dtype="float32", beta=0.2, microbatch_tokens=max_tokens,
                 warmup_steps=0, lr_schedule="constant", learning_rate=1e-5)
            | settings
        )  # fmt: skip
        policy = load_policy(config.model)
        if packing.packed:
            reason = enable_packing(policy, context)
            if reason:
                raise RuntimeError(reason)
        self.packing, self.max_tokens = packing, max_tokens
        reference = Reference(config.model, packing, context, policy)
        self.engine = TorchEngine(policy.model, (), max_context=context, slots=64, device=device)
        no_chat = cast(ChatTokens, None)  # its episodes are ids from the start
        self.reference = reference
        self.trainer = Trainer(config, policy, self.engine, no_chat, reference, packing)

    def batches(self, episodes: list[Episode]) -> list[TokenBatch]:
        weights = [1.0 / (len(episodes) * episode.num_trained) for episode in episodes]
        batches = make_microbatches(episodes, weights, max_tokens=self.max_tokens, packing=self.packing)
        return [batch.to(self.trainer.policy.device) for batch in batches]

    def reference_seconds(self, episodes: list[Episode]) -> tuple[float, list[torch.Tensor]]:
        start = self._now()
        found = self.reference.logprobs(episodes, 1.0, self.max_tokens)
        return self._now() - start, found

    def update_seconds(self, episodes: list[Episode], reference: list[torch.Tensor]) -> float:
        """One optimiser step, microbatches made anew as in `Trainer.step`."""
        advantages = torch.linspace(-1, 1, len(episodes))
        start = self._now()
        batches = self.batches(episodes)
        by_batch = [torch.cat([reference[i] for i in batch.episodes]) for batch in batches]
        self.trainer.update(0, batches, by_batch, advantages)
        return self._now() - start

    def _now(self) -> float:
        if self.trainer.policy.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class Rollout:
    """Sampled episodes of a shape, and the seconds it took."""

    episodes: list[Episode] = field(default_factory=list)
    seconds: float = 0.0


def sample(engine: TorchEngine, shape: Shape, vocab: int, step: int) -> Rollout:
    """Play the episodes with the engine, which must know no end-of-turn id: every turn has its full length."""
    shared = _ids(shape.shared, vocab, 0)
    prompts = [shared + _ids(shape.prompt - shape.shared, vocab, 1 + group) for group in range(shape.groups)]
    reply = _ids(REPLY_TOKENS, vocab, 12345)
    ids: dict[tuple[int, int], list[int]] = {}
    turns: dict[tuple[int, int], int] = {}
    logprobs: dict[tuple[int, int], list[float]] = {}
    start = time.perf_counter()
    engine.start(step)
    for group, prompt in enumerate(prompts):
        for member in range(shape.members):
            key = (group, member)
            ids[key], turns[key], logprobs[key] = [], 0, []
            engine.submit(TurnRequest(key, prompt, shape.turn_tokens, group=group))
    while any(done < shape.turns for done in turns.values()):
        for output in engine.step():
            key = output.key
            ids[key] += output.token_ids
            logprobs[key] += output.logprobs
            turns[key] += 1
            if turns[key] == shape.turns:
                engine.release(key)
                continue
            ids[key] += reply
            logprobs[key] += [0.0] * REPLY_TOKENS
            prompt = prompts[key[0]] + tuple(ids[key])
            engine.submit(TurnRequest(key, prompt, shape.turn_tokens, turns[key], len(ids[key]), key[0]))
    seconds = time.perf_counter() - start
    turn, between = [1] * shape.turn_tokens, [0] * REPLY_TOKENS
    mask = tuple((turn + between) * (shape.turns - 1) + turn)
    record, reason = cast(EpisodeRecord, None), StopReason.PLAN  # nobody asks for the record
    episodes = [
        Episode(prompts[key[0]], tuple(ids[key]), mask, tuple(logprobs[key]), (), reason, record, 0.0, key[1])
        for key in sorted(ids)
    ]
    return Rollout(episodes, seconds)


def _ids(count: int, vocab: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab, (count,), generator=generator).tolist())


def counts(batches: list[TokenBatch]) -> dict[str, float]:
    """What a step must compute at least: unique tokens, pairs of a token and a key it attends to, trained tokens."""
    pairs = 0
    for batch in batches:
        assert batch.layout
        lengths = [segment.length for segment in batch.layout.segments]
        for index, length in enumerate(lengths):
            before = sum(lengths[i] for i in batch.layout.ancestors(index))
            pairs += length * before + length * (length + 1) // 2
    return {
        "unique_tokens": sum(batch.input_ids.numel() for batch in batches),
        "pairs": pairs,
        "trained_tokens": sum(len(batch.targets) for batch in batches),
    }
