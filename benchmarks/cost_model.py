"""What a step costs one device, by arithmetic: parameters, tokens, FLOPs, bytes, seconds by phase.

Pure functions; nothing is measured here. GEMMs take time by their FLOPs, elementwise work and decoding by their bytes,
at the rates of a `Machine` (`cost_machines.py`). `cost_job.py` makes whole steps on many devices of it, `cost_check.py`
holds it against measured steps, `cost_report.py` prints tables.

Tokens: P groups of G episodes; every prompt begins with the same `shared` tokens. A trainer computes each unique token
once (the shared ones once a microbatch, the rest of a prompt once a group) and the head at trained positions only.

Left out: the environment and other work of the host, checkpoints, evaluations, a network that others use too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cost_machines import Machine

from grpo.engines.vllm_memory import ModelSize

ATTENTION_BACKWARD = 2.5  # backward / forward: five products of queries and keys (flash recomputes one) against two
ELEMENTWISE_FORWARD, ELEMENTWISE_BACKWARD = 2, 3  # passes over what a layer makes: written, read; read twice, written
ADAMW_BYTES = 32  # a parameter, float32: weight, gradient and two moments read, three written; the norm reads once more


@dataclass(frozen=True)
class Shape:
    """What of a decoder decides about its costs: Qwen3 and Llama-like models, without biases."""

    name: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    qk_norm: bool = True

    @classmethod
    def of(cls, name: str, config: Any) -> Shape:
        """From a Hugging Face configuration of a Qwen3 or a Llama."""
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(name, config.num_hidden_layers, config.hidden_size, config.num_attention_heads,
                   config.num_key_value_heads, width, config.intermediate_size, config.vocab_size,
                   config.tie_word_embeddings, config.model_type == "qwen3")  # fmt: skip

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer that every token is multiplied with: q and o, k and v, gate, up and down."""
        return 2 * self.hidden * self.query + 2 * self.hidden * self.key + 3 * self.hidden * self.mlp

    @property
    def matrices(self) -> int:
        return self.layers * self.layer_matrices

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, a tied embedding once."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim * self.qk_norm) + self.hidden
        return self.matrices + norms + self.head * (1 if self.tied else 2)

    @property
    def size(self) -> ModelSize:
        """For the estimates that training itself uses."""
        return ModelSize(self.parameters, self.layers, self.hidden, self.query, self.key, self.mlp)

    def kv_bytes(self, weight_bytes: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.key * weight_bytes


def _qwen3(name: str, layers: int, hidden: int, heads: int, mlp: int, tied: bool) -> Shape:
    return Shape(name, layers, hidden, heads, 8, 128, mlp, 151936, tied)


# The published config.json of each, and a dense model of 70B in Llama 3's shape.
SHAPES = {
    "0.6B": _qwen3("0.6B", 28, 1024, 16, 3072, True),
    "1.7B": _qwen3("1.7B", 28, 2048, 16, 6144, True),
    "4B": _qwen3("4B", 36, 2560, 32, 9728, True),
    "8B": _qwen3("8B", 36, 4096, 32, 12288, False),
    "14B": _qwen3("14B", 40, 5120, 40, 17408, False),
    "32B": _qwen3("32B", 64, 5120, 64, 25600, False),
    "70B": Shape("70B", 80, 8192, 64, 8, 128, 28672, 128256, False, qk_norm=False),
}


# Tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a trainer must compute of a step at least, as `synthetic.counts` counts it on real microbatches."""

    unique: float
    pairs: float
    """Of a token and a key that it attends to."""
    reference: float
    """Unique tokens without the shared ones, whose keys and values the frozen model keeps."""
    reference_pairs: float
    prompts: float
    """Unique tokens of prompts, the shared ones once: what a sampler must prefill."""
    trained: float
    microbatches: int = 1


def work(
    groups: float, members: float, prompt: float, shared: float, completions: Sequence[float] | np.ndarray,
    trained: float, microbatch_tokens: float = math.inf,
) -> Work:  # fmt: skip
    """Of `groups` groups of `members` episodes, whose lengths behind the prompt are spread like `completions`.

    `trained`: mean trained tokens of an episode. An episode's last token predicts nothing and is not computed.
    """
    episodes, own = groups * members, prompt - shared
    tails = np.asarray(completions, dtype=float) - 1
    mean, triangle = float(tails.mean()), float((tails * (tails + 1) / 2).mean())
    behind = groups * own + episodes * mean
    microbatches = max(1, math.ceil(behind / (microbatch_tokens - shared)))
    reference_pairs = groups * (own * shared + own * (own + 1) / 2) + episodes * (mean * prompt + triangle)
    return Work(
        unique=behind + microbatches * shared,
        pairs=reference_pairs + microbatches * shared * (shared + 1) / 2,
        reference=behind,
        reference_pairs=reference_pairs,
        prompts=shared + groups * own,
        trained=episodes * trained,
        microbatches=microbatches,
    )


@dataclass(frozen=True)
class Lengths:
    """The spread of episodes' lengths: what was measured, scaled to another limit."""

    sampled: np.ndarray
    completion: np.ndarray

    def scaled(self, factor: float) -> Lengths:
        return Lengths(self.sampled * factor, self.completion * factor)

    def longest(self, episodes: float) -> float:
        """Expected sampled tokens of the longest of so many episodes, drawn from those measured."""
        ordered = np.sort(self.sampled)
        reached = (np.arange(len(ordered) + 1) / len(ordered)) ** max(episodes, 1)
        return float(ordered @ np.diff(reached))

    def live(self, position: np.ndarray) -> np.ndarray:
        """Share of the episodes that sample more than `position` tokens."""
        ordered = np.sort(self.sampled)
        return 1 - np.searchsorted(ordered, position, side="right") / len(ordered)


# FLOPs and seconds of one device ------------------------------------------------------------------------------------


def layers_flops(shape: Shape, tokens: float, pairs: float) -> tuple[float, float]:
    """A forward of all layers: GEMMs with weights (2 a weight and token), attention (4 a pair and query channel)."""
    return 2 * shape.matrices * tokens, 4 * shape.layers * shape.query * pairs


def head_flops(shape: Shape, trained: float, gemms: int) -> float:
    return gemms * 2 * shape.head * trained


def made_bytes(shape: Shape) -> int:
    """What the layers' elementwise operations make of one token, in bytes, whether it is kept or made again.

    Per layer two norms of the residual stream in float32 with their 16-bit results (32 D); queries and keys before and
    after norm and rotation, values, attention's output (20 each); gate, up, activation and their product (10).
    """
    return shape.layers * (32 * shape.hidden + 20 * (shape.query + shape.key) + 10 * shape.mlp)


def head_seconds(shape: Shape, machine: Machine, trained: float, gemms: int) -> float:
    moved = trained * shape.vocab * machine.logit_bytes
    return head_flops(shape, trained, gemms) / machine.flops + moved / machine.bandwidth


def forward_seconds(shape: Shape, machine: Machine, tokens: float, pairs: float) -> float:
    moved = ELEMENTWISE_FORWARD * tokens * made_bytes(shape)
    computed = sum(layers_flops(shape, tokens, pairs)) / machine.flops
    return computed + moved / machine.bandwidth + shape.layers * machine.layer_seconds


def reference_seconds(shape: Shape, machine: Machine, load: Work) -> float:
    """One forward, and one GEMM of the head."""
    layers = forward_seconds(shape, machine, load.reference, load.reference_pairs)
    extra = (load.microbatches - 1) * shape.layers * machine.layer_seconds
    return layers + extra + head_seconds(shape, machine, load.trained, 1)


def update_seconds(shape: Shape, machine: Machine, load: Work, checkpointing: bool = False) -> float:
    """Forward and backward of the layers and the head's three GEMMs; the optimiser is apart."""
    gemm, attention = layers_flops(shape, load.unique, load.pairs)
    backward = (2 * gemm + ATTENTION_BACKWARD * attention) / machine.flops
    backward += ELEMENTWISE_BACKWARD * load.unique * made_bytes(shape) / machine.bandwidth
    forward = forward_seconds(shape, machine, load.unique, load.pairs)
    extra = (load.microbatches * 3 - 1) * shape.layers * machine.layer_seconds
    return (2 if checkpointing else 1) * forward + backward + extra + head_seconds(shape, machine, load.trained, 3)


def adamw_seconds(shape: Shape, machine: Machine, gpus: int = 1) -> float:
    return ADAMW_BYTES * shape.parameters / gpus / machine.bandwidth


def decode_seconds(shape: Shape, machine: Machine, rows: np.ndarray, keys: np.ndarray, tp: int = 1) -> float:
    """Of one forward per entry of `rows`: episodes that are live then, with `keys` cached tokens in all.

    A forward reads all weights and the live episodes' keys and values once, or multiplies, whichever takes longer.
    """
    rows, keys = np.asarray(rows, dtype=float), np.asarray(keys, dtype=float)
    weights = (shape.matrices + shape.head) * machine.weight_bytes
    read = weights + keys * shape.kv_bytes(machine.weight_bytes) + rows * shape.vocab * machine.logit_bytes
    flops = 2 * (shape.matrices + shape.head) * rows + 4 * shape.layers * shape.query * keys
    latency = machine.decode_seconds + shape.layers * machine.decode_layer_seconds + rows * machine.row_seconds
    if tp > 1:
        latency = latency + 2 * shape.layers * machine.reduce_seconds
    return float((np.maximum(read / machine.bandwidth, flops / machine.flops) / tp + latency).sum())


def prefill_seconds(shape: Shape, machine: Machine, tokens: float, pairs: float, tp: int = 1) -> float:
    """Prompts, each unique token once (prefix caching), and the environment's replies."""
    return forward_seconds(shape, machine, tokens, pairs) / tp
