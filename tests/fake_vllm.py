"""vLLM as far as grpo/engines/vllm_engine.py uses it, on a plain transformers model, with the order of calls kept.

It has the real one's traps: weights that start as arbitrary numbers, a prefix cache that outlives the weights it was
computed with, a sleep that loses weights and cache, and nothing that works while asleep.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

Ids = tuple[int, ...]


class LLM:
    """`calls` holds a line for each call that concerns weights, memory or sampling."""

    def __init__(self, model: str, **options: Any):
        self.model, self.options = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval(), options
        self.calls: list[str] = []
        self.loaded: list[list[str]] = []  # of each sync, the names in the order they came
        self.awake = {"weights", "kv_cache"}
        self.cache: dict[Ids, torch.Tensor] = {}  # a prompt and its last logits
        self.running: dict[str, tuple[list[int], Any, list[int], list[dict]]] = {}
        self.llm_engine = self

    # ------------------------------------------------------------------------------------------ weights and memory

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights" and kwargs["is_checkpoint_format"] and "weights" in self.awake
        self.loaded.append([])
        parameters = dict(self.model.named_parameters())
        weights: Iterable[tuple[str, torch.Tensor]] = kwargs["weights_iterator"]
        for name, tensor in weights:
            self.calls.append("load")
            self.loaded[-1].append(name)
            parameters[name].data.copy_(tensor)
        self.calls.append("loaded")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        if self.running:
            return False
        self.cache.clear()
        return True

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.awake.clear()
        self.cache.clear()
        if level == 2:
            for parameter in self.model.parameters():
                parameter.data.fill_(0.01)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append("wake " + " ".join(tags))
        self.awake.update(tags)

    # ---------------------------------------------------------------------------------------------------- sampling

    def generate(self, prompts: list[dict], parameters: Any, use_tqdm: bool) -> list[Any]:
        """One token; log-probs of the prompt are computed without the cache, as vLLM does."""
        self.calls.append("generate")
        (ids,) = (prompt["prompt_token_ids"] for prompt in prompts)
        self.add_request("generate", prompts[0], parameters, said=False)
        (output,) = self._advance(["generate"])
        logprobs = torch.log_softmax(self._forward(ids), -1)
        output.prompt_logprobs = [None, *(self._entry(ids[i + 1], logprobs[i]) for i in range(len(ids) - 1))]
        return [output]

    def add_request(self, name: str, prompt: dict, parameters: Any, said: bool = True) -> None:
        if said:
            self.calls.append("add")
        self.running[name] = (list(prompt["prompt_token_ids"]), parameters, [], [])

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]

    def step(self) -> list[Any]:
        """One token for everybody."""
        self.calls.append("step")
        return self._advance(list(self.running))

    def _advance(self, names: list[str]) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}, "asleep"
        finished = []
        for name in names:
            ids, parameters, sampled, entries = self.running[name]
            logits = self._last_logits((*ids, *sampled))
            logprobs = torch.log_softmax(logits / (parameters.temperature or 1.0), -1)
            if parameters.temperature == 0:
                token = int(logits.argmax())
            else:
                generator = torch.Generator().manual_seed((parameters.seed + len(sampled)) % 2**63)
                token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            sampled.append(token)
            entries.append(self._entry(token, logprobs))
            if len(sampled) == parameters.max_tokens or token in (getattr(parameters, "stop_token_ids", None) or ()):
                del self.running[name]
                output = SimpleNamespace(token_ids=sampled, logprobs=entries)
                finished.append(SimpleNamespace(request_id=name, finished=True, outputs=[output]))
        return finished

    def _last_logits(self, ids: Ids) -> torch.Tensor:
        if ids not in self.cache:
            self.cache[ids] = self._forward(ids)[-1]
        return self.cache[ids]

    @torch.no_grad()
    def _forward(self, ids: Iterable[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(ids)])).logits[0]

    def _entry(self, token: int, logprobs: torch.Tensor) -> dict:
        return {token: SimpleNamespace(logprob=float(logprobs[token]))}


def modules() -> dict[str, types.ModuleType]:
    """To stand in `sys.modules` for vLLM's own."""
    vllm, platforms, parameters = (
        types.ModuleType(name) for name in ("vllm", "vllm.platforms", "vllm.sampling_params")
    )
    vllm.__version__, vllm.__version_tuple__ = "0.32.0", (0, 32, 0)
    vllm.LLM, vllm.SamplingParams = LLM, SimpleNamespace
    vllm.platforms, vllm.sampling_params = platforms, parameters
    platforms.current_platform = SimpleNamespace(device_type="cpu")
    parameters.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    return {module.__name__: module for module in (vllm, platforms, parameters)}
