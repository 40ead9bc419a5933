"""Supervised training of the tiny policy: one function, used for every stage."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo.tiny.demos import VALUE, Example

Source = Callable[[random.Random], Example]


@dataclass(frozen=True)
class Stage:
    """What a stage learns from, and how long. `rows` examples a step; the learning rate ends at a tenth of its peak."""

    name: str
    source: Source
    steps: int
    rows: int
    learning_rate: float
    warmup: int = 50


def new_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int, heads: int, intermediate: int, context: int
) -> Qwen3ForCausalLM:
    """A Qwen3 model from nothing, in float32, with tied embeddings."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, stage: Stage, *, pad_id: int, seed: int, report: Callable[[str], None]) -> float:
    """Runs one stage in place. Returns the seconds it took; `report` gets a line of progress now and then."""
    rng = random.Random(f"{stage.name} {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    batches = bucketed(stage, rng)
    started, tokens = time.monotonic(), 0
    losses, right, looked_up = list[float](), 0.0, 0.0
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, step)
        ids, weights = padded(next(batches), pad_id)
        tokens += ids.numel()
        # Rows are padded on the right and attention is causal: no attention mask is needed.
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        weight, target = weights[:, 1:], ids[:, 1:]
        kept = weight > 0
        logits = model.lm_head(hidden[kept])  # [N, V]
        loss = (F.cross_entropy(logits, target[kept], reduction="none") * weight[kept]).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = weight[kept] == VALUE
        losses.append(loss.item())
        right += (logits.argmax(-1) == target[kept])[value].sum().item()
        looked_up += value.sum().item()
        if (step + 1) % 100 == 0 or step + 1 == stage.steps:
            seconds = time.monotonic() - started
            left = seconds / (step + 1) * (stage.steps - step - 1)
            report(
                f"{stage.name} {step + 1}/{stage.steps}  loss {sum(losses) / len(losses):.3f}  "
                f"values right {right / max(1, looked_up):.1%}  {tokens / seconds:.0f} tokens/s  {left:.0f} s left"
            )
            losses, right, looked_up = [], 0, 0
    return time.monotonic() - started


def learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return stage.learning_rate * min(1.0, (step + 1) / stage.warmup) * (0.1 + 0.9 * cosine)


def bucketed(stage: Stage, rng: random.Random, pool: int = 16) -> Iterator[list[Example]]:
    """Endless batches of `rows` examples of similar length: little is computed on padding."""
    while True:
        examples = sorted((stage.source(rng) for _ in range(pool * stage.rows)), key=lambda e: len(e.ids))
        batches = [examples[i : i + stage.rows] for i in range(0, len(examples), stage.rows)]
        rng.shuffle(batches)
        yield from batches


def padded(examples: list[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] int64 and loss weights [B, T] float32 (0 on padding)."""
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), pad_id, dtype=torch.int64)
    weights = torch.zeros(len(examples), longest)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, : len(example.weights)] = torch.tensor(example.weights)
    return ids, weights
