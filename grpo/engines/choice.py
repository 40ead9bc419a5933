"""Which sampler a run gets: the one in process, vLLM beside the trainer, or vLLM servers elsewhere."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch

from env.prompts import first_messages
from grpo import distributed
from grpo.chat import ChatTokens
from grpo.config import Config, RolloutConfig, UsageError
from grpo.engines import Engine
from grpo.engines.torch_engine import TorchEngine
from grpo.engines.vllm_memory import make_plan
from grpo.model import Policy
from grpo.sampling import SamplingConfig
from scenarios.schema import Scenario

PROMPT_MARGIN = 64  # tokens


def make_engine(
    settings: Config, policy: Policy, chat: ChatTokens, scenarios: Sequence[Scenario], training: bool = True
) -> Engine:
    """The sampler that the settings ask for.

    An episode has room for the longest first prompt of `scenarios` (and a little more: training draws others of the
    same kind) plus its token budget, as far as the model's positions go.
    """
    rollout = settings.rollout
    prompts = [chat.first_prompt(first_messages(scenario)) for scenario in scenarios]
    longest = max(map(len, prompts))
    context = longest + PROMPT_MARGIN + rollout.max_completion_len
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < longest + PROMPT_MARGIN:
        raise UsageError(
            f"--model {policy.name}: {positions} positions are too few for first prompts of {longest} tokens"
        )
    context = min(context, positions or context)
    options: dict[str, Any] = dict(
        slots=rollout.max_concurrent,
        seed=settings.run.seed,
        sampling=SamplingConfig(rollout.temperature, rollout.top_p),
    )
    if rollout.vllm_url:
        from grpo.engines import server_training

        options["concurrency"] = options.pop("slots")
        return server_training.connect(rollout.vllm_url, policy, chat, prompts, context, **options)
    which = which_engine(rollout.engine, policy.device)
    if rollout.gpu_memory and (which, policy.device.type) != ("vllm", "cuda"):
        raise UsageError(f"--gpu-memory {rollout.gpu_memory:g}: is vLLM's share of a GPU; leave it out without both")
    if which == "vllm":
        from grpo.engines.vllm_engine import VllmEngine

        plan = make_plan(settings, policy, context, longest, training)
        return VllmEngine(
            policy, chat.eos_ids, plan, canary=prompts[0], tensor_parallel=rollout.tensor_parallel, **options
        )
    return TorchEngine(
        policy.model, chat.eos_ids, max_context=context, device=policy.device, dtype=policy.dtype, **options
    )


def which_engine(asked: str, device: torch.device) -> str:
    """`torch` or `vllm`: what `auto` means on this device, with what is installed."""
    if asked != "auto":
        return asked
    installed = any(importlib.metadata.distributions(name="vllm"))
    return "vllm" if device.type == "cuda" and installed else "torch"


def check_processes(rollout: RolloutConfig) -> None:
    """Raises UsageError where an engine cannot be spread over these processes as `--tensor-parallel` says, or what is
    said of it is not for servers."""
    width, there = rollout.tensor_parallel, distributed.size()
    if rollout.vllm_url:
        check_servers(rollout)
    if width == 1:
        return
    if there % width:
        raise UsageError(f"--tensor-parallel {width}: must divide the number of processes, which is {there} (torchrun)")
    if rollout.engine != "vllm":
        raise UsageError(f"--tensor-parallel {width}: is vLLM's; needs --engine vllm")
    if rollout.env_url:  # its replies reach the processes of one engine in different orders
        raise UsageError(f"--tensor-parallel {width}: plays in this process only; leave out --env-url")


def check_servers(rollout: RolloutConfig) -> None:
    """Raises UsageError for an address that is there twice, and for flags that would have no effect."""
    for url in rollout.vllm_url:
        if rollout.vllm_url.count(url) > 1:
            raise UsageError(f"--vllm-url {url}: is there twice; give each address once")
    served = {"engine": ("auto", "--vllm-url is another sampler"),
              "tensor_parallel": (1, "with --vllm-url, give --tensor-parallel-size to `vllm serve`"),
              "gpu_memory": (0.0, "with --vllm-url, give --gpu-memory-utilization to `vllm serve`")}  # fmt: skip
    for name, (left_out, instead) in served.items():
        if (value := getattr(rollout, name)) != left_out:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be left out; {instead}")
