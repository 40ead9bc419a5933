"""How much of a card vLLM gets beside the trainer: pure arithmetic on bytes, before anything is allocated.

N parameters cost the trainer 4 N bytes in float32, and 12 bytes more for each one that is trained: its gradient and two
moments of AdamW (6 with `adamw8bit`). The reference costs 4 N more, unless it is the base under LoRA adapters. An
update needs the 16-bit copies of weights that autocast makes, 2 N, and activations (`activation_bytes_per_token`).
vLLM needs a copy of the weights in its own type and a KV cache.

    rollout   trainer's weights, gradients, moments | reference | vLLM: weights, KV cache, working memory
    update    the same                              | reference | copies, activations of the largest microbatch

Where the card has room for all of this at once, vLLM stays as it is between rollouts (level 0). Where it has not, vLLM
drops its weights and its KV cache before each update (vLLM's sleep level 2) and gets the weights again afterwards.
Level 1 would keep a copy of weights in host memory that the next update makes worthless, so it is never chosen.

These are estimates; the run's worst-case first step shows whether they hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from grpo import distributed
from grpo.config import Config, UsageError
from grpo.model import Policy
from grpo.optimizer import MOMENT_BYTES

GIB = 2**30
BLOCK = 32  # tokens; KV caches are handed out in blocks
USABLE = 0.94  # of a card: the rest goes to the CUDA context, libraries and fragmentation
WORKING_BYTES = 2 * GIB  # vLLM beside weights and KV cache: activations of a prefill, CUDA graphs
ASLEEP_BYTES = 1 * GIB  # what of that a sleeping vLLM keeps


@dataclass(frozen=True)
class MemoryPlan:
    """What vLLM may use. `gpu_memory` is its share of the card (vLLM's gpu_memory_utilization), 0 on a CPU, where
    `kv_cache_bytes` is the size of its KV cache."""

    max_context: int
    sleep_level: int = 0
    gpu_memory: float = 0.0
    kv_cache_bytes: int = 0
    reason: str = ""

    def describe(self) -> str:
        """For the run's header."""
        if not self.gpu_memory:
            return f"KV cache {self.kv_cache_bytes / GIB:.2f} GiB, no sleep mode on a CPU"
        return f"{self.gpu_memory:.0%} of the card, sleep level {self.sleep_level} ({self.reason})"


@dataclass(frozen=True)
class ModelSize:
    """What of a model decides about memory. Widths are in numbers per token and layer."""

    parameters: int
    layers: int
    hidden: int
    query: int
    key: int
    mlp: int

    @classmethod
    def of(cls, config: Any, parameters: int) -> ModelSize:
        """From a Hugging Face text configuration."""
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return cls(parameters, config.num_hidden_layers, config.hidden_size, heads * width, key_heads * width, mlp)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.key * dtype.itemsize

    def activation_bytes_per_token(self, checkpointing: bool, dtype: torch.dtype = torch.bfloat16) -> int:
        """What is kept of one token for the backward pass, by the modules of `grpo.lean_modules` and
        `grpo.tree_attention`, computing in `dtype`.

        Per layer, in numbers of D, Q, K and M (hidden, query, key and MLP width):

            two norms              their inputs, the residual stream in float32                          2 D
            q, k, v, gate and up   what they read; autocast casts it for each of them, in float32 there  5 D (2 D)
                                   are two results of norms
            queries                before their norm, rotated, and attention's output                    3 Q
            keys, values           keys before their norm, rotated, and values                           3 K
            MLP                    gate and up                                                           2 M

        With checkpointing one residual per layer, and one layer at a time in full. Left out: a norm's or a softmax's
        one number a head; on a GPU the keys and values of a prompt, copied for each completion behind it (4 K more
        where they are as long); gradients, of which one layer's are there at a time.
        """
        size = dtype.itemsize
        read = 2 if dtype == torch.float32 else 5
        layer = (8 + size * read) * self.hidden + 3 * size * (self.query + self.key) + 2 * size * self.mlp
        return 4 * self.hidden * self.layers + layer if checkpointing else layer * self.layers

    def copy_bytes(self, dtype: torch.dtype) -> int:
        """Weights in the type that an update computes in: autocast keeps each copy until its backward pass."""
        return 0 if dtype == torch.float32 else dtype.itemsize * self.parameters


def make_plan(
    settings: Config, policy: Policy, max_context: int, longest_prompt: int, training: bool = True
) -> MemoryPlan:
    """The plan of a run, or of an evaluation, with the memory of the card that its policy is on."""
    rollout, config = settings.rollout, policy.model.config.get_text_config()
    size = ModelSize.of(config, policy.num_parameters)
    groups = distributed.share(rollout.prompts_per_step, rollout.tensor_parallel)  # of one engine
    episodes = min(rollout.max_concurrent, groups * rollout.num_generations)
    if policy.device.type == "cpu":
        return cpu_plan(size, policy.dtype, max_context, episodes)
    unique = groups * longest_prompt + episodes * rollout.max_completion_len
    adapters = settings.model.lora_rank > 0
    return gpu_plan(
        torch.cuda.get_device_properties(policy.device).total_memory,
        size,
        policy.dtype,
        max_context=max_context,
        min_context=longest_prompt + 1,
        episodes=episodes,
        update_tokens=min(unique, settings.optim.microbatch_tokens),
        trained=policy.num_trained if training else 0,
        moments=MOMENT_BYTES[settings.optim.optimizer],
        reference=settings.loss.beta > 0 and not adapters,
        checkpointing=settings.model.gradient_checkpointing,
        gpu_memory=rollout.gpu_memory,
        processes=distributed.size(),
        tensor_parallel=rollout.tensor_parallel,
    )


def cpu_plan(size: ModelSize, dtype: torch.dtype, max_context: int, episodes: int) -> MemoryPlan:
    """A KV cache for that many episodes of full length, at most 4 GiB but always room for two."""
    episode = math.ceil(max_context / BLOCK) * BLOCK * size.kv_bytes_per_token(dtype)
    return MemoryPlan(max_context, kv_cache_bytes=max(2 * episode, min((episodes + 1) * episode, 4 * GIB)))


def gpu_plan(
    card_bytes: int,
    size: ModelSize,
    dtype: torch.dtype,
    *,
    max_context: int,
    min_context: int,
    episodes: int,
    update_tokens: int,
    trained: int,
    reference: bool,
    moments: int = 8,
    checkpointing: bool = False,
    gpu_memory: float = 0.0,
    processes: int = 1,
    tensor_parallel: int = 1,
) -> MemoryPlan:
    """vLLM's share of a card, its sleep level, and the context it can have.

    Args:
        card_bytes: the card's memory.
        max_context: the context that the recipe asks for, in tokens; less where not even one such episode fits.
        min_context: the least context that makes sense (the longest first prompt and a token).
        episodes: that run at once.
        update_tokens: of the largest microbatch.
        trained: parameters that are trained; 0 where none is, so that there are no updates.
        moments: bytes of the optimiser's moments for each of those.
        reference: is a second, frozen model on the card?
        gpu_memory: vLLM's share where the user has chosen it, else 0.
        processes: over which all that the trainer keeps is sharded; whole weights come and go.
        tensor_parallel: cards over which one vLLM is spread.

    Raises:
        UsageError: trainer and sampler cannot fit, whatever the split.
    """
    kept = ((8 if reference else 4) * size.parameters + (4 + moments) * trained) // processes
    # All weights: while vLLM takes them over, and in the reference's forward passes.
    whole = 4 * size.parameters if processes > 1 else 0
    update = 0
    if trained:
        update = size.copy_bytes(dtype) + update_tokens * size.activation_bytes_per_token(checkpointing, dtype)
    usable = USABLE * card_bytes
    token = -(-size.kv_bytes_per_token(dtype) // tensor_parallel)
    fixed = size.parameters * dtype.itemsize // tensor_parallel + WORKING_BYTES
    room = usable - kept - whole  # for vLLM, during rollouts
    share = min(fixed + episodes * max_context * token, room)
    if gpu_memory:
        share = gpu_memory * card_bytes
    context = min(max_context, int((share - fixed) // token))
    if context < min_context or share > room:
        least = (kept + whole + fixed + min_context * token) / USABLE / GIB
        said = f"--gpu-memory {gpu_memory:g}" if gpu_memory else "--engine vllm"
        raise UsageError(
            f"{said}: a card of {card_bytes / GIB:.0f} GiB is too small: {size.parameters / 1e9:.2f}B parameters take "
            f"{(kept + whole) / GIB:.0f} GiB beside vLLM, which gets {share / GIB:.1f}; {least:.0f} GiB are needed"
        )
    training = kept + max(whole, update)
    together = training + share
    level = 0 if together <= usable else 2
    reason = f"trainer, update and vLLM need about {together / GIB:.0f} GiB of {card_bytes / GIB:.0f}"
    if training + ASLEEP_BYTES > usable:
        reason += ", the update may not fit: lower --microbatch-tokens or use --gradient-checkpointing"
    return MemoryPlan(context, level, gpu_memory or math.floor(1000 * share / card_bytes) / 1000, reason=reason)
