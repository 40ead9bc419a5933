"""Linear layers on a CPU when few rows pass through them, as in decoding, where reading the weights is all the work.

`F.linear(x, W)` with a handful of rows reads W at a fraction of what memory gives: the BLAS packs W for a GEMM that is
hardly there. `W @ x^T` with up to four columns has a kernel that streams W instead. So the rows go by fours, over a
block of W that stays in cache between one four and the next. Measured on 2 cores (Zen 4, MKL), weights of a 0.6B
model in float32, gigabytes of weights a second:

    rows            1     2     4     8    16    32
    F.linear       18    10    12    12    10     6
    here           18    43    43    21    14     9
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 4  # of x^T at a time
BLOCK_BYTES = 8 << 20  # of W: it shall stay in the last level of cache
BY_FOURS = 12  # rows; with more, one GEMM over all of them is faster
LONG = 2048  # inputs of a layer; with more, that kernel is no faster than F.linear once there is a second four
ROWS = 48  # with more, F.linear is as fast
SMALLEST = 2 << 20  # bytes of W; a smaller one is in cache anyway


def linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """`F.linear(x, weight, bias)` for any x [..., K]; weight [V, K], float32, on a CPU."""
    rows = x.numel() // x.shape[-1]
    if rows < 2 or rows > ROWS or (x.shape[-1] > LONG and COLUMNS < rows <= BY_FOURS):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1).t()  # [K, rows]
    if rows > BY_FOURS:
        out = torch.mm(weight, flat)  # [V, rows]
    else:
        out = x.new_empty(len(weight), rows)
        step = max(1, BLOCK_BYTES // (weight.shape[1] * weight.element_size())) if rows > COLUMNS else len(weight)
        for start in range(0, len(weight), step):
            block = weight[start : start + step]
            for column in range(0, rows, COLUMNS):
                columns = slice(column, column + COLUMNS)
                out[start : start + step, columns] = torch.mm(block, flat[:, columns])
    out = out.t().contiguous().view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def worth_it(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Linear]:
    """The linear layers for which `linear` is meant."""
    return [
        module
        for module in modules
        if type(module) is torch.nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.nbytes >= SMALLEST
    ]


@contextlib.contextmanager
def few_rows(layers: Iterable[torch.nn.Linear]) -> Iterator[None]:
    """Within, these layers run through `linear`. Only without gradients."""
    layer: Any  # its method is replaced, which a Linear's type does not foresee
    for layer in layers:
        layer.forward = functools.partial(linear, layer.weight, layer.bias)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
