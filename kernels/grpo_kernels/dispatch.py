"""Which implementation of an op runs: asked for by name, or `auto`. Nothing falls back in silence.

| impl      | what it is                                      | where                                         |
|-----------|-------------------------------------------------|-----------------------------------------------|
| reference | the obvious PyTorch, [N, V] at once, autograd   | anywhere; tests, benchmarks and docs use it   |
| torch     | chunked PyTorch                                 | anywhere; what `auto` means on a CPU          |
| triton    | Triton kernels                                  | CUDA; the interpreter with TRITON_INTERPRET=1 |
| cuda      | the CUDA C++ row kernel (linear_grpo_loss only) | CUDA, where `setup.py` built the extension    |
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import torch

IMPLEMENTATIONS = ("reference", "torch", "triton", "cuda")
# op -> its implementations
OPS = {
    "linear_grpo_loss": ("reference", "torch", "triton", "cuda"),
    "linear_logprob": ("reference", "torch", "triton"),
    "linear_logprob_autograd": ("reference", "torch", "triton"),
    "logprob_from_logits": ("reference", "torch", "triton"),
    "grpo_token_loss": ("reference", "torch", "triton"),
}


def why_not(op: str, impl: str, device: torch.device) -> str | None:
    """Why `impl` of `op` cannot run on tensors of `device`, or None where it can."""
    if impl not in OPS[op]:
        return f"{op} has no {impl!r} implementation; there are {', '.join(OPS[op])}"
    return {"triton": _why_not_triton, "cuda": _why_not_cuda}.get(impl, lambda device: None)(device)


def _why_not_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"triton needs a CUDA device, not {device.type} (TRITON_INTERPRET=1 interprets its kernels on a CPU)"
    return None


def _why_not_cuda(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the CUDA kernel needs a CUDA device, not {device.type}"
    from grpo_kernels.cuda_rows import why_not_built

    return why_not_built()


def resolve(op: str, impl: str, device: torch.device) -> str:
    """The implementation that runs: `impl` itself, or for `auto` triton on a CUDA device that has it, else torch.

    Raises ValueError for an unknown name and RuntimeError, with the reason, for one that cannot run here.
    """
    if impl == "auto":
        return "triton" if device.type == "cuda" and why_not(op, "triton", device) is None else "torch"
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: {impl!r} is not one of auto, {', '.join(IMPLEMENTATIONS)}")
    reason = why_not(op, impl, device)
    if reason:
        raise RuntimeError(f"impl {impl}: {reason}")
    return impl


def rows_backend(impl: str) -> ModuleType:
    """The module with the row kernels of `impl`; see `grpo_kernels.torch_rows` for what each must provide."""
    return importlib.import_module(f"grpo_kernels.{impl}_rows")
