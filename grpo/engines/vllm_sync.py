"""What the trainer sends to vLLM, and how it makes sure that it arrived.

Nothing here imports vLLM: these functions see two plain modules and two lists of log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from grpo.config import RunStopped
from grpo.data_types import TokenBatch
from grpo.head import score
from grpo.model import Policy

CANARY_LENGTH = 128  # tokens at most
ROUNDINGS_PER_LAYER = 8  # norm, q/k/v, rotation, attention, output; norm, gate and up, down
SAFETY = 2.0


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


def canary_batch(ids: Sequence[int], device: torch.device) -> TokenBatch:
    """One row in which each token but the first is to be predicted, N = len(ids) - 1."""
    row = torch.tensor([list(ids)])
    count = len(ids) - 1
    zeros = torch.zeros(count)
    return TokenBatch(
        input_ids=row,
        position_ids=torch.arange(len(ids))[None],
        predict_rows=zeros.long(),
        predict_cols=torch.arange(count),
        targets=row[0, 1:],
        episode_index=zeros.long(),
        sampler_logprobs=zeros,
        token_weights=zeros + 1,
        episodes=(0,),
    ).to(device)


def canary_logprobs(policy: Policy, ids: Sequence[int]) -> list[float]:
    """The trainer's log-probs of ids[1:], each given what is before it, at temperature 1."""
    return score(policy, canary_batch(ids, policy.device))[0].tolist()


def canary_tolerance(config: Any, dtype: torch.dtype, logprobs: Sequence[float]) -> float:
    """The largest mean |trainer - vLLM| of the canary's log-probs that rounding explains, in nats.

    Both sides compute the same function with other kernels. Each of the R = 8 L roundings on the way through L layers
    changes the residual stream by a relative u (the unit roundoff of `dtype`), in random directions, so together by
    u * sqrt(R). Matrix products accumulate K = hidden_size terms in float32, which adds u32 * sqrt(R * K). A relative
    error of the logits is one of log-probs times their size. The bound is twice that.

    Measured on a CPU on models of 2 to 28 layers, gaps were at most 1/28 of it in float32 and 1/11 in bfloat16. Without
    one MLP, float32 log-probs were off by more than 300 times the bound; in bfloat16 that can lie below it, and the
    checksums are the sharper test.
    """
    roundings = ROUNDINGS_PER_LAYER * config.num_hidden_layers
    unit, unit32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    relative = unit * math.sqrt(roundings) + unit32 * math.sqrt(roundings * config.hidden_size)
    scale = max(1.0, sum(map(abs, logprobs)) / len(logprobs))
    return SAFETY * relative * scale


def check_canary(policy: Policy, ids: Sequence[int], actual: Sequence[float], sampler: torch.nn.Module | None) -> None:
    """Compare vLLM's log-probs of the canary and its tensors with the trainer's.

    Args:
        ids: the canary.
        actual: vLLM's log-probs of ids[1:].
        sampler: vLLM's model; None where it has a part of each tensor only.

    Raises:
        RunStopped: they differ; names the tensors that do.
    """
    expected = canary_logprobs(policy, ids)
    gap = sum(abs(a - b) for a, b in zip(actual, expected, strict=True)) / len(expected)
    bound = canary_tolerance(policy.model.config.get_text_config(), policy.dtype, expected)
    wrong = [] if sampler is None else differing_tensors(policy.model, sampler)
    if gap <= bound and not wrong:
        return
    named = f"{len(wrong)} tensors differ, first {', '.join(wrong[:3])}" if wrong else "no tensor's checksum differs"
    raise RunStopped(
        f"vLLM does not have the trainer's weights: log-probs of a fixed text differ by {gap:.2g} nats on average, "
        f"rounding explains {bound:.2g}; {named}"
    )


def repack_heads(sampler: torch.nn.Module) -> None:
    """On a CPU vLLM computes a linear layer from a packed copy of its weight. Loading renews the copies of the layers
    that it loads, so not that of a tied head, whose weight arrives as the embedding's: renew it here."""
    module: Any  # vLLM's layers have members that torch's type does not know
    for module in sampler.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def differing_tensors(model: torch.nn.Module, sampler: torch.nn.Module) -> list[str]:
    """Names of the trainer's parameters whose checksum in the sampler is another one, tied ones under each name.

    The checksum of a matrix W is W x for one fixed x, one number per row: rows that vLLM stacked into one matrix
    (q, k, v; gate, up) are told apart. Where vLLM computes with a packed copy (on a CPU), the layer itself is asked
    for W x. A parameter that has no counterpart of its shape there is left out.
    """
    parts: Mapping[str, list[str]] = getattr(sampler, "packed_modules_mapping", {})
    fused = {part: (whole, names) for whole, names in parts.items() for part in names}
    parameters = dict(named_weights(model, tied_twice=True))
    there: dict[str, list[tuple[torch.Tensor, torch.dtype]]] = {}
    wrong = []
    for name, parameter in parameters.items():
        path, first = name.split("."), 0
        if len(path) > 1 and path[-2] in fused:
            whole, names = fused[path[-2]]
            before = [".".join([*path[:-2], other, path[-1]]) for other in names[: names.index(path[-2])]]
            first, path[-2] = sum(len(parameters[other]) for other in before if other in parameters), whole
        target = ".".join(path)
        if target not in there:
            there[target] = _checksums_there(sampler, target, parameter)
        for values, dtype in there[target]:
            expected = checksum(parameter, dtype)
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


def _checksums_there(sampler: torch.nn.Module, name: str, like: torch.Tensor) -> list[tuple[torch.Tensor, torch.dtype]]:
    """What `name` is in vLLM's model: its checksum as stored, and as computed with where that is another copy."""
    module_name, _, attribute = name.rpartition(".")
    try:
        module: Any = sampler.get_submodule(module_name)
        tensor = getattr(module, attribute).detach()
    except AttributeError:
        return []
    found = []
    if tensor.numel() and tensor.shape[1:] == like.shape[1:]:
        found.append((checksum(tensor, tensor.dtype), tensor.dtype))
    if hasattr(module, "cpu_linear") and like.dim() == 2:
        answer = module.quant_method.apply(module, probe(like.shape[1], tensor.device).to(tensor.dtype)[None], None)
        found.append((answer[0].float(), tensor.dtype))
    return found
