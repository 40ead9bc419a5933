"""The run's configuration: one small dataclass per concern, one field and one line of help per knob.

Where a value comes from, strongest first: command-line flag, environment variable of the published recipe
(`BETA LEARNING_RATE NUM_STEPS NUM_GENERATIONS MAX_COMPLETION_LEN BASE_MODEL`), recipe, default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import tyro

HELD_OUT_SIZE = 250  # scenarios in scenarios/held_out.json; a test compares

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "gspo", "sapo"]
KLEstimator = Literal["k1", "k2", "k3", "k3_ratio"]


class UsageError(ValueError):
    """Bad input by the user: shown as one line, exit code 2."""


class RunStopped(RuntimeError):
    """The run cannot go on, through no fault of its flags: shown as one line, exit code 1."""


@dataclass(frozen=True)
class ModelConfig:
    model: str = "tiny"
    """`tiny` (bundled), a Hugging Face causal LM folder, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type (weights stay float32). auto: float32 on a CPU, bfloat16 on a GPU."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more compute."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank (alpha twice that) instead of all weights; the base inside is the reference."""
    impl: Literal["auto", "reference", "torch", "triton", "cuda"] = "auto"
    """Kernels of the LM head and the loss (kernels/README.md). auto: triton on a GPU, torch elsewhere."""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["auto", "torch", "vllm"] = "auto"
    """Sampler. auto: vllm on a GPU where it is installed, else torch (in process)."""
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
    tensor_parallel: int = 1
    """vLLM over this many of torchrun's processes, each with a part of every layer; divides their number."""
    gpu_memory: float = 0.0
    """Share of the card that vLLM may use. 0: chosen from the card, the model and the recipe."""
    vllm_url: tuple[str, ...] = ()
    """Sample on the vLLM servers at these addresses (README, vLLM): they get the weights after each update."""
    env_url: str = ""
    """Play all episodes on the environment server at this address (`python -m env.server`), not in this process."""


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
    """Upper clip: ratio <= 1 + epsilon_high. Default: epsilon; 0.28 for dapo, 4.0 for cispo."""
    delta: float | None = None
    """Dual clip: for negative advantages the ratio is capped at delta (> 1 + epsilon_high)."""
    entropy_coef: float = 0.0
    """Entropy bonus: loss -= entropy_coef * token entropy, weighted like the loss."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the std of the group, of the batch, or not at all."""
    mask_truncated: bool = False
    """Leave episodes that hit a length limit out of the loss and its normaliser; rewards stay in the baseline."""
    mismatch: Literal["none", "token_clip", "token_mask", "sequence_mask"] = "none"
    """Importance weights for a sampler whose probabilities differ from the trainer's."""
    mismatch_cap: float = 2.0
    """Truncation or masking threshold of those weights."""


@dataclass(frozen=True)
class OptimConfig:
    num_steps: int = 300
    """Optimiser steps of rollout batches."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit: moments in 8 bits, by bitsandbytes (`pip install -e ".[adamw8bit]"`); weights stay float32."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up, to 0 at num_steps."""
    warmup_steps: int = 10
    """Linear warm-up from 0."""
    max_grad_norm: float = 1.0
    """Gradient clipping by global norm."""
    num_iterations: int = 1
    """Optimiser steps per rollout batch; > 1 freezes the old log-probs once."""
    microbatch_tokens: int = 8192
    """Unique tokens per microbatch (padded ones without packing); gradients do not depend on it."""
    packing: Literal["auto", "padded"] = "auto"
    """auto: unique tokens in one row (prompts once per group) where the model can, else padded rows."""


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
    """Run folder; refused where it holds another run. Default: runs/<model>-beta<beta>-seed<seed>, where that is taken
    with -2, -3, ... behind it."""
    resume: str = ""
    """Continue the run in this folder from its newest checkpoint."""
    save_every: int = 50
    """Steps between checkpoints. 0: only at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    report_to: tuple[Literal["none", "wandb", "trackio", "tensorboard"], ...] = ("none",)
    """Trackers that get a copy of the log, one or several; Weights & Biases stays offline where there is no key."""


@dataclass(frozen=True)
class Config:
    """All knobs of a training run, by concern."""

    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=RunConfig)
    model: tyro.conf.OmitArgPrefixes[ModelConfig] = field(default_factory=ModelConfig)
    rollout: tyro.conf.OmitArgPrefixes[RolloutConfig] = field(default_factory=RolloutConfig)
    loss: tyro.conf.OmitArgPrefixes[LossConfig] = field(default_factory=LossConfig)
    optim: tyro.conf.OmitArgPrefixes[OptimConfig] = field(default_factory=OptimConfig)
    eval: tyro.conf.OmitArgPrefixes[EvalConfig] = field(default_factory=EvalConfig)

    def flat(self) -> dict[str, Any]:
        """Every knob by its flag's name (underscores), as `config.json` holds them."""
        return {
            knob.name: getattr(getattr(self, concern.name), knob.name)
            for concern in dataclasses.fields(self)
            for knob in dataclasses.fields(getattr(self, concern.name))
        }

    def with_values(self, values: dict[str, object]) -> Config:
        """A copy with the knobs in `values` (flat names) replaced. Raises UsageError for an unknown name."""
        unknown = set(values) - set(self.flat())
        if unknown:
            raise UsageError(f"unknown setting {sorted(unknown)[0]!r}")
        changed = {}
        for concern in dataclasses.fields(self):
            part = getattr(self, concern.name)
            names = {knob.name for knob in dataclasses.fields(part)}
            changed[concern.name] = dataclasses.replace(part, **{k: v for k, v in values.items() if k in names})
        return Config(**changed)


# A recipe pins every semantic that makes a run comparable; what it leaves out is the default above.
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        model="tiny", beta=0.2, learning_rate=1e-4, lr_schedule="cosine", warmup_steps=10, num_steps=300,
        prompts_per_step=3, num_generations=8, max_completion_len=320, temperature=1.0, top_p=1.0,
        loss_type="grpo", kl_estimator="k3", epsilon=0.2, scale_rewards="group", num_iterations=1,
        max_grad_norm=1.0, rubric="card", microbatch_tokens=8192,
    ),
    # The published run 4: KL-anchored, two groups of four episodes a step, learning rate decaying to ~0.
    "clarify-run4": dict(
        model="Qwen/Qwen3-1.7B", beta=0.2, learning_rate=5e-7, lr_schedule="cosine", warmup_steps=10, num_steps=300,
        prompts_per_step=2, num_generations=4, max_completion_len=768, temperature=1.0, top_p=1.0,
        loss_type="grpo", kl_estimator="k3", epsilon=0.2, scale_rewards="group", num_iterations=1,
        max_grad_norm=1.0, rubric="gated", microbatch_tokens=8192,
    ),
    # The published run 1: no anchor, the smaller model.
    "clarify-run1": dict(
        model="Qwen/Qwen3-0.6B", beta=0.0, learning_rate=1e-6, lr_schedule="cosine", warmup_steps=10, num_steps=300,
        prompts_per_step=2, num_generations=4, max_completion_len=768, temperature=1.0, top_p=1.0,
        loss_type="grpo", kl_estimator="k3", epsilon=0.2, scale_rewards="group", num_iterations=1,
        max_grad_norm=1.0, rubric="gated", microbatch_tokens=8192,
    ),
}  # fmt: skip

ENVIRONMENT_VARIABLES = {
    "BETA": ("beta", float),
    "LEARNING_RATE": ("learning_rate", float),
    "NUM_STEPS": ("num_steps", int),
    "NUM_GENERATIONS": ("num_generations", int),
    "MAX_COMPLETION_LEN": ("max_completion_len", int),
    "BASE_MODEL": ("model", str),
}


UNUSED_CLIP = {"cispo": ("epsilon",), "sapo": ("epsilon", "epsilon_high")}
"""Clip bounds that a loss type does not use (grpo/loss.py): giving one is refused, as it would do nothing."""


def parse(args: list[str], env: dict[str, str] | None = None, defaults: Config | None = None) -> Config:
    """The configuration of `train.py ARGS`; `defaults` (a resumed run's settings) takes the recipe's place.

    Raises:
        UsageError: a value that cannot be; exits with code 2 where a flag does not parse.
    """
    env = dict(os.environ) if env is None else env
    if defaults is None:
        recipe = _recipe_name(args)
        defaults = Config().with_values(RECIPES[recipe] | {"recipe": recipe})
    values = {}
    for variable, (name, kind) in ENVIRONMENT_VARIABLES.items():
        if env.get(variable, "") != "":
            try:
                values[name] = kind(env[variable])
            except ValueError:
                raise UsageError(f"{variable}={env[variable]!r}: must be {kind.__name__}") from None
    config = tyro_cli(
        Config,
        args,
        default=defaults.with_values(values),
        prog="train.py",
        description="Train a language model with GRPO to ask before it acts.",
    )
    if config.run.recipe == "auto":
        config = config.with_values({"recipe": defaults.run.recipe})
    with naming_variables(args, env):
        validate(config)
    if not config.rollout.vllm_url and "--vllm-url" in (arg.replace("_", "-") for arg in args):
        raise UsageError("--vllm-url: needs an address such as http://localhost:8000")  # an empty variable in a shell
    loss_type = config.loss.loss_type
    for name in UNUSED_CLIP.get(loss_type, ()):
        value = flag_value(args, name)
        if value is not None:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {value}: must be left out, --loss-type {loss_type} does not use it")
    return config


@contextlib.contextmanager
def naming_variables(args: list[str], env: Mapping[str, str] | None = None) -> Iterator[None]:
    """A UsageError inside about a value that an environment variable gave names the variable, not a flag."""
    env = os.environ if env is None else env
    try:
        yield
    except UsageError as error:
        head, colon, rest = str(error).partition(": ")
        for variable, (name, _) in ENVIRONMENT_VARIABLES.items():
            flag = "--" + name.replace("_", "-")
            if head.split(" ")[0] == flag and env.get(variable, "") != "" and flag_value(args, name) is None:
                raise UsageError(f"{variable}={env[variable]}{colon}{rest}") from error
        raise


def cautions(config: Config) -> list[str]:
    """What the settings allow but a reader of the results should know: one line each, shown at the start of a run."""
    lines = []
    if config.rollout.top_p < 1:
        lines.append(
            f"--top-p {config.rollout.top_p:g}: episodes are sampled from a truncated distribution and trained under "
            "the full one, so training is off-policy by construction (sampler_gap/mean in the log says by how much)"
        )
    if config.loss.beta == 0 and config.loss.kl_estimator != LossConfig.kl_estimator:
        lines.append(f"--kl-estimator {config.loss.kl_estimator}: has no effect, there is no KL where beta is 0")
    return lines


def tyro_cli(cls: type, args: list[str], **options: Any) -> Any:
    """`tyro.cli`, with what it says of a bad flag in one line. Raises UsageError instead of exiting with code 2."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, args=args, **options)
    except SystemExit as error:
        if not error.code:
            raise  # --help
        # What stands in the box that tyro draws, less its title, up to its help; what was perhaps meant comes then.
        drawn = [line for line in said.getvalue().splitlines() if not line.startswith("╭")]
        lines = list(filter(None, (line.strip("│╭╮╰╯─ \t") for line in drawn)))
        helps = ("Argument helptext", "For full helptext", "Perhaps", "Arguments similar")
        end = next((i for i, line in enumerate(lines) if line.startswith(helps)), len(lines))
        similar = [line.split()[0].rstrip(",") for line in lines[end:] if line.startswith("--")]
        hint = f"; did you mean {' or '.join(similar)}?" if similar and not lines[end].startswith("Argument h") else ""
        raise UsageError((" ".join(lines[:end]) or "bad arguments") + hint + " (--help lists the flags)") from None


def _recipe_name(args: list[str]) -> str:
    """The recipe is read before the other flags, because it sets their defaults."""
    name = flag_value(args, "recipe") or "auto"
    if name == "auto":
        import torch  # slow to import, and commands that load no model read this module too

        return "clarify-run4" if torch.cuda.is_available() else "tiny"
    if name not in RECIPES:
        raise UsageError(f"--recipe {name}: must be one of auto, {', '.join(RECIPES)}")
    return name


def validate(config: Config) -> None:
    """Raises UsageError with one line that names the flag and what would be right."""
    from grpo.loss import clip_range  # it needs this module's types

    knobs = config.flat()

    def require(condition: bool, name: str, what: str) -> None:
        if not condition:
            raise UsageError(f"--{name.replace('_', '-')} {knobs[name]}: must be {what}")

    for name, value in knobs.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                require(math.isfinite(number), name, "finite")
    require(config.run.seed < 2**63, "seed", "below 2^63")
    chosen = config.run.report_to
    if not chosen or len(set(chosen)) < len(chosen) or ("none" in chosen and len(chosen) > 1):
        raise UsageError(f"--report-to {' '.join(chosen)}: must be none, or each tracker once")
    require(config.rollout.num_generations >= 2, "num_generations", "at least 2 (advantages compare group members)")
    for name in ("beta", "entropy_coef", "no_plan_penalty", "learning_rate", "eval_temperature"):
        require(knobs[name] >= 0, name, "0 or more")
    for name in ("dynamic_sampling", "warmup_steps", "eval_limit", "save_every", "num_steps", "seed",
                 "lora_rank"):  # fmt: skip
        require(knobs[name] >= 0, name, "0 or more")
    for name in ("prompts_per_step", "max_completion_len", "max_concurrent", "num_iterations", "microbatch_tokens",
                 "keep_checkpoints", "tensor_parallel"):  # fmt: skip
        require(knobs[name] >= 1, name, "at least 1")
    require(config.rollout.temperature > 0, "temperature", "above 0 (greedy rollouts have no spread to learn from)")
    require(config.eval.eval_limit <= HELD_OUT_SIZE, "eval_limit", f"at most {HELD_OUT_SIZE}, the held-out file's size")
    require(0 < config.rollout.top_p <= 1, "top_p", "in (0, 1]")
    require(0 <= config.rollout.gpu_memory < 1, "gpu_memory", "in (0, 1), or 0 to let it be chosen")
    require(0 < config.loss.epsilon < 1, "epsilon", "in (0, 1)")
    require(config.optim.max_grad_norm > 0, "max_grad_norm", "above 0")
    require(config.loss.mismatch_cap >= 1, "mismatch_cap", "at least 1")
    if config.loss.epsilon_high is not None:
        require(config.loss.epsilon_high > 0, "epsilon_high", "above 0")
    if config.loss.delta is not None:
        bound = clip_range(config.loss)[1]
        require(
            config.loss.loss_type not in ("cispo", "sapo"), "delta", f"left out: {config.loss.loss_type} has no clip"
        )
        require(config.loss.delta > bound, "delta", f"above 1 + epsilon_high = {bound:g}")
    require(not (config.loss.kl_in == "reward" and config.loss.beta == 0), "kl_in", "loss where beta is 0")


def flag_value(args: list[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE` in `args`, the last one as the CLI takes it; None without one."""
    flag, value = "--" + name.replace("_", "-"), None
    for i, arg in enumerate(args):
        given = arg.split("=", 1)[0].replace("_", "-")
        if given == flag and "=" in arg:
            value = arg.split("=", 1)[1]
        elif given == flag and i + 1 < len(args):
            value = args[i + 1]
    return value


def refuse_changes(stored: Config, given: Config) -> None:
    """A resumed run keeps its settings. Raises UsageError naming the first knob that differs."""
    for name, value in stored.flat().items():
        # A server may have moved; what it plays is the same. Trackers only watch.
        if name not in ("resume", "env_url", "vllm_url", "report_to") and given.flat()[name] != value:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag} {given.flat()[name]}: the run was started with {value}; a resumed run keeps its settings"
            )
