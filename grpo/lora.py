"""Low-rank adapters (LoRA, arXiv 2106.09685) with peft: only they are trained, saved in checkpoints and optimised.

Adapters start at B = 0, so the policy begins as its base. The base stays inside the policy, frozen: with the adapters
switched off it is the reference, without a second copy of the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model

from grpo import distributed
from grpo.config import UsageError
from grpo.optimizer import quiet_bitsandbytes

INSTALL = 'pip install -e ".[lora]"'
ALPHA_PER_RANK = 2  # what an adapter adds is scaled by alpha / rank


def add_adapters(model: torch.nn.Module, rank: int) -> None:
    """Give every linear layer but the LM head an adapter of this rank, in place; all else is frozen.

    The layers' A matrices are drawn from a fixed seed, so that two runs begin alike.

    Raises:
        UsageError: peft is not installed, or the model has no layer that it can adapt.
    """
    quiet_bitsandbytes()  # which peft imports where it is installed
    try:
        import peft
    except ImportError:
        raise UsageError(f"--lora-rank {rank}: needs peft: {INSTALL}") from None
    config = peft.LoraConfig(
        r=rank, lora_alpha=ALPHA_PER_RANK * rank, lora_dropout=0.0, bias="none", target_modules="all-linear"
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise UsageError(f"--lora-rank {rank}: {type(model).__name__} cannot have adapters ({error})") from error


def adapted_layers(model: torch.nn.Module) -> list[Any]:
    """peft's layers in `model`; none where there are no adapters."""
    return [module for module in model.modules() if hasattr(module, "enable_adapters") and hasattr(module, "lora_A")]


@contextlib.contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Within, `model` is its base. Not in the middle of a forward or backward pass."""
    layers = adapted_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What is trained, by parameter name."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


def trained_weights(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """What is trained, with its names: tied weights have several, the first is the one that safetensors keeps."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return names


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds beside parameters, by its name there: biases of routers, for example."""
    # Not from `state_dict`: of a sharded model that call takes the gathered weights away again.
    found = {}
    for prefix, module in model.named_modules():
        for name, tensor in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[-1] not in module._non_persistent_buffers_set:
                found[name.replace(".base_layer.", ".")] = tensor
    return found


def save_trained(model: torch.nn.Module, path: Path) -> None:
    """What training changes, as safetensors: all weights, or with adapters those alone."""
    adapters = adapter_weights(model)
    if adapters or distributed.size() > 1:
        # Not by the model's `state_dict`, which of a sharded model is this process's part.
        tensors = {names[0]: weight.detach().contiguous() for weight, names in trained_weights(model).items()}
        save_file(tensors if adapters else tensors | saved_buffers(model), str(path))
    else:
        save_model(model, str(path))


def load_trained(model: torch.nn.Module, path: Path) -> None:
    """Take over what `save_trained` wrote, in place.

    Raises ValueError where the file holds something else than this model's adapters; RuntimeError, SafetensorError or
    OSError for what is not this model's weights, not safetensors or not there.
    """
    device, adapters = str(next(model.parameters()).device), adapter_weights(model)
    if not adapters:
        load_model(model, str(path), device=device)
        return
    stored = load_file(str(path), device=device)
    if stored.keys() != adapters.keys():
        raise ValueError(f"{path.name} holds other tensors than this model's adapters")
    with torch.no_grad():
        for name, weight in adapters.items():
            weight.copy_(stored[name])


def save_adapter(model: torch.nn.Module, folder: Path, base: str) -> None:
    """The adapter as a peft folder: `peft.PeftModel.from_pretrained(base_model, folder)` loads it."""
    import dataclasses

    from peft.utils import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, state_dict=dict(model.named_parameters()), adapter_name="default")
    # peft's loader looks under the names of its own wrapper.
    tensors = {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in state.items()}
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    settings: Any = model.peft_config
    config = dataclasses.replace(settings["default"], base_model_name_or_path=base, inference_mode=True)
    config.save_pretrained(str(folder))
