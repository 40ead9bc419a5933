"""Linear layers in float32 on a CPU, by oneDNN.

PyTorch multiplies float32 matrices with MKL. oneDNN, which comes with PyTorch too, is about twice as fast on the AMD
processor that was measured, 2 cores (Zen 4); 3072 x 1024 weights, GFLOP/s of large products, and gigabytes of weights a
second where few rows pass, as in decoding:

    rows          1585 (forward, dX, dW)        1     4     8    16    32    64
    F.linear      193   206   205 GFLOP/s      18    11    11     9     5     3 GB/s
    here          431   400   382              53    25    21    18    14     9

A product of a new shape costs a quarter of a millisecond more, once: small ones are left to PyTorch.

On an AMD processor without AVX-512 (Zen 3, 2 cores) MKL is as fast or faster in large products, and oneDNN reads large
weights faster where few rows pass; time of F.linear over time here:

    rows              1     4     8    32    64   256  1600
    3072 x 1024     1.9   2.4   1.9   1.1   1.2   0.9   1.0
    18992 x 1024    1.6   2.8   2.6   1.8   1.3   1.2   0.9
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE_WEIGHT = 2 << 20  # bytes: from here on reading it is what takes time, however few rows there are
MANY_ROWS = 512
FEW_ROWS = 128


@functools.cache
def wide_vectors() -> bool:
    """Has this processor AVX-512?"""
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


@functools.cache
def available() -> bool:
    """Does this build of PyTorch have the operator? It is the one that its compiler uses, for want of a public one."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., K], b [N, K] -> a b^T [..., N], float32, contiguous; any strides. Not differentiable."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


class _Linear(torch.autograd.Function):
    """y = x W^T: dx = dy W, dW = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = product(grad.flatten(0, -2).t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def worth_it(x: Tensor, weight: Tensor) -> bool:
    """Is this product one for oneDNN?"""
    large, rows = weight.nbytes >= LARGE_WEIGHT, x.shape[:-1].numel()
    return (
        (large or rows >= MANY_ROWS if wide_vectors() else large and rows <= FEW_ROWS)
        and available()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.dim() > 1
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a [..., K], b [N, K] -> a b^T, by whoever is faster. Not differentiable."""
    return product(a, b) if worth_it(a, b) else F.linear(a, b)


def linear(module: Any, x: Tensor) -> Tensor:
    """The layer's forward."""
    weight, bias = module.weight, module.bias
    if not worth_it(x, weight):
        return F.linear(x, weight, bias)
    output = _Linear.apply(x, weight) if torch.is_grad_enabled() else product(x, weight)
    return output if bias is None else output + bias


def use(model: torch.nn.Module) -> int:
    """Let the linear layers of `model` run through `linear`, in place; returns how many."""
    changed = 0
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            vars(module)["forward"] = functools.partial(linear, module)
            changed += 1
    return changed
