"""The run's configuration: one small dataclass per concern, one field and one line of help per knob.

Where a value comes from, strongest first: command-line flag, environment variable of the published recipe
(`BETA LEARNING_RATE NUM_STEPS NUM_GENERATIONS MAX_COMPLETION_LEN BASE_MODEL`), recipe, default.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
import tyro

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "gspo", "sapo"]
KLEstimator = Literal["k1", "k2", "k3", "k3_ratio"]


class UsageError(ValueError):
    """Bad input by the user: shown as one line, exit code 2."""


@dataclass(frozen=True)
class ModelConfig:
    model: str = "tiny"
    """`tiny` (bundled), a Hugging Face causal LM folder, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and activations. auto: float32 on a CPU, bfloat16 on a GPU."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more compute."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off unless asked for."""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["auto", "torch", "vllm"] = "auto"
    """Sampler. auto: torch (in process)."""
    prompts_per_step: int = 4
    """Scenarios (groups) per step, P."""
    num_generations: int = 8
    """Episodes per scenario (group size), G. At least 2."""
    max_completion_len: int = 320
    """Tokens of an episode after its first prompt, environment replies included."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts; log-probs are of the scaled distribution."""
    top_p: float = 1.0
    """Nucleus sampling of the rollouts."""
    dynamic_sampling: int = 0
    """Replace groups without reward spread, sampling at most this many extra rounds a step. 0: off."""
    max_concurrent: int = 64
    """Episodes the sampler holds in its cache at once."""


@dataclass(frozen=True)
class LossConfig:
    beta: float = 0.0
    """KL coefficient towards the frozen base. 0: no reference is loaded."""
    loss_type: LossType = "grpo"
    """Aggregation and surrogate; see grpo/loss.py."""
    kl_estimator: KLEstimator = "k3"
    """k1 | k2 | k3 | k3_ratio (k3 times the ratio, the later default elsewhere)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where beta * KL acts: a loss term, or subtracted from each episode's reward (mean k1 per trained token)."""
    epsilon: float = 0.2
    """Lower clip: ratio >= 1 - epsilon."""
    epsilon_high: float | None = None
    """Upper clip: ratio <= 1 + epsilon_high. Default: epsilon; 0.28 for dapo, 5.0 for cispo."""
    delta: float | None = None
    """Dual clip: for negative advantages the ratio is capped at delta (> 1 + epsilon_high)."""
    entropy_coef: float = 0.0
    """Entropy bonus: loss -= entropy_coef * mean token entropy."""
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    """sapo's temperatures for positive and negative advantages."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the std of the group, of the batch, or not at all."""
    mask_truncated: bool = False
    """Leave episodes that hit a length limit out of the loss and its normaliser."""
    mismatch: Literal["none", "token_clip", "token_mask", "sequence_mask"] = "none"
    """Importance weights for a sampler whose probabilities differ from the trainer's."""
    mismatch_cap: float = 2.0
    """Truncation or masking threshold of those weights."""


@dataclass(frozen=True)
class OptimConfig:
    num_steps: int = 300
    """Optimiser steps of rollout batches."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up, to 0 at num_steps."""
    warmup_steps: int = 10
    """Linear warm-up from 0."""
    weight_decay: float = 0.0
    """AdamW weight decay on matrices."""
    adam_beta2: float = 0.999
    """AdamW's second-moment decay (the first is 0.9)."""
    max_grad_norm: float = 1.0
    """Gradient clipping by global norm."""
    num_iterations: int = 1
    """Optimiser steps per rollout batch; > 1 freezes the old log-probs once."""
    microbatch_tokens: int = 8192
    """Padded tokens per microbatch; gradients do not depend on it."""


@dataclass(frozen=True)
class EvalConfig:
    rubric: Literal["card", "gated"] = "card"
    """Score of training and evaluation; evaluation reports the parts of both."""
    no_plan_penalty: float = 0.1
    """Training only: subtracted from an episode that ends without an accepted plan. 0: off."""
    eval_limit: int = 50
    """Held-out scenarios before and after training; 0: no evaluation."""
    eval_temperature: float = 0.7
    """Sampling temperature of the evaluation (fixed seeds). 0: greedy."""


@dataclass(frozen=True)
class RunConfig:
    recipe: Literal["auto", "tiny", "clarify-run4", "clarify-run1"] = "auto"
    """Named settings. auto: tiny on a CPU, clarify-run4 on a GPU."""
    seed: int = 0
    """Seeds scenarios and every sampled token."""
    output_dir: str = ""
    """Run folder. Default: runs/<model>-beta<beta>-seed<seed>; refused where it holds another run."""
    resume: str = ""
    """Continue the run in this folder from its newest checkpoint."""
    save_every: int = 50
    """Steps between checkpoints. 0: only at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""


@dataclass(frozen=True)
class Config:
    """All knobs of a training run."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    model: Annotated[ModelConfig, tyro.conf.arg(name="")] = field(default_factory=ModelConfig)
    rollout: Annotated[RolloutConfig, tyro.conf.arg(name="")] = field(default_factory=RolloutConfig)
    loss: Annotated[LossConfig, tyro.conf.arg(name="")] = field(default_factory=LossConfig)
    optim: Annotated[OptimConfig, tyro.conf.arg(name="")] = field(default_factory=OptimConfig)
    eval: Annotated[EvalConfig, tyro.conf.arg(name="")] = field(default_factory=EvalConfig)
