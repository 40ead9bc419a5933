"""The tensors that the trainer sends to vLLM, and whether they arrived.

Nothing here imports vLLM, or anything but torch: a `vllm serve` of its own uses these functions too (`server_worker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


def named_weights(model: torch.nn.Module, tied_twice: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight once, under its checkpoint name: tied ones under the first of their names, as vLLM ties them too.

    The tensors are the trainer's own; whoever loads them casts and copies. A layer with LoRA adapters (peft's, not
    merged) gives the sum of its base and what the active ones add, a new tensor.
    """
    for name, parameter in model.named_parameters(remove_duplicate=not tied_twice):
        if ".lora_" in name:
            continue
        weight, (layer_name, base, _) = parameter.detach(), name.rpartition(".base_layer.weight")
        if base:
            layer: Any = model.get_submodule(layer_name)
            for adapter in () if layer.merged or layer.disable_adapters else layer.active_adapters:
                weight = weight + layer.get_delta_weight(adapter).detach()
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), weight


def repack_heads(sampler: torch.nn.Module) -> None:
    """On a CPU vLLM computes a linear layer from a packed copy of its weight. Loading renews the copies of the layers
    that it loads, so not that of a tied head, whose weight arrives as the embedding's: renew it here."""
    module: Any  # vLLM's layers have members that torch's type does not know
    for module in sampler.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


@dataclass(frozen=True)
class Expected:
    """A parameter as the trainer has it: its shape, and its checksum in a given type."""

    shape: tuple[int, ...]
    checksum: Callable[[torch.dtype], torch.Tensor]


def differing_tensors(model: torch.nn.Module, sampler: torch.nn.Module) -> list[str]:
    """Names of the trainer's parameters whose checksum in the sampler is another one, tied ones under each name."""
    weights = named_weights(model, tied_twice=True)
    return differing_checksums({name: Expected(tuple(w.shape), partial(checksum, w)) for name, w in weights}, sampler)


def differing_checksums(parameters: Mapping[str, Expected], sampler: torch.nn.Module) -> list[str]:
    """The same for parameters of which only shapes and checksums are here.

    The checksum of a matrix W is W x for one fixed x, one number per row: rows that vLLM stacked into one matrix
    (q, k, v; gate, up) are told apart. Where vLLM computes with a packed copy (on a CPU), the layer itself is asked
    for W x. A parameter that has no counterpart of its shape there is left out.
    """
    parts: Mapping[str, list[str]] = getattr(sampler, "packed_modules_mapping", {})
    fused = {part: (whole, names) for whole, names in parts.items() for part in names}
    there: dict[str, list[tuple[torch.Tensor, torch.dtype]]] = {}
    wrong = []
    for name, parameter in parameters.items():
        path, first = name.split("."), 0
        if len(path) > 1 and path[-2] in fused:
            whole, names = fused[path[-2]]
            before = [".".join([*path[:-2], other, path[-1]]) for other in names[: names.index(path[-2])]]
            first, path[-2] = sum(parameters[other].shape[0] for other in before if other in parameters), whole
        target = ".".join(path)
        if target not in there:
            there[target] = _checksums_there(sampler, target, parameter.shape)
        for values, dtype in there[target]:
            expected = parameter.checksum(dtype).to(values.device)
            actual = values[first : first + len(expected)]
            # W x is exact up to the order of a float32 sum, or up to the type that a packed layer answers in.
            bound = (1e-5 if dtype == torch.float32 else 2e-2) * float(expected.abs().max()) + 1e-6
            if actual.shape != expected.shape or not bool(((actual - expected).abs() <= bound).all()):
                wrong.append(name)
                break
    return wrong


def checksum(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[rows] float32, of the tensor in `dtype`: W x for a matrix, the values themselves for a vector."""
    if tensor.dim() < 2:
        return tensor.to(dtype).float()
    x = probe(tensor[0].numel(), tensor.device)
    # In parts, as an embedding in float32 is not small.
    return torch.cat([rows.to(dtype).float().flatten(1) @ x for rows in tensor.split(8192)])


def probe(length: int, device: torch.device) -> torch.Tensor:
    """The fixed x, [length] float32: entries between 0.5 and 1.5 without period, exact in bfloat16."""
    index = torch.arange(length, device=device, dtype=torch.float64)
    return (0.5 + torch.frac(index * 0.6180339887498949)).to(torch.bfloat16).float()


def _checksums_there(
    sampler: torch.nn.Module, name: str, shape: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.dtype]]:
    """What `name` is in vLLM's model: its checksum as stored, and as computed with where that is another copy."""
    module_name, _, attribute = name.rpartition(".")
    try:
        module: Any = sampler.get_submodule(module_name)
        tensor = getattr(module, attribute).detach()
    except AttributeError:
        return []
    found = []
    if tensor.numel() and tensor.shape[1:] == shape[1:]:
        found.append((checksum(tensor, tensor.dtype), tensor.dtype))
    if hasattr(module, "cpu_linear") and len(shape) == 2:
        answer = module.quant_method.apply(module, probe(shape[1], tensor.device).to(tensor.dtype)[None], None)
        found.append((answer[0].float(), tensor.dtype))
    return found
