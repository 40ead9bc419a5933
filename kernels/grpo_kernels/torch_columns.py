"""The row kernels of `torch_rows` for logits [n, V] whose columns lie one after the other in memory (strides 1, n).

That is how a CPU computes them fastest in float32: logits^T = W hidden^T is a plain product with n, the small side,
running fastest, where hidden W^T makes the BLAS repack all of W for every chunk of tokens. A statistic of a row is then
a sum over the slow axis, vectorised over the n tokens.

Traffic: the tile is walked in blocks of vocabulary that stay in cache: one read for the maximum, one read and one write
that leaves the exponentials in it, one read and one write for the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Float32 bytes of one block of columns; two such blocks are in use.
BLOCK_BYTES = 1 << 19
# exp of this is 0 even in float64. Shifted logits are cut here, so that 0 * -inf never occurs.
MIN_SHIFTED = -1000.0


def is_column_major(logits: Tensor) -> bool:
    """True for a tile that is the transpose of a contiguous [V, n] tensor."""
    return logits.dim() == 2 and logits.shape[0] > 1 and logits.stride() == (1, logits.shape[0])


class ColumnStats(NamedTuple):
    """Per row, [n]: a of the target (not cut), sum of the other e^a, u = sum e^a a, maximum m of the logits."""

    target_shifted: Tensor
    rest: Tensor
    weighted: Tensor
    maximum: Tensor


def _blocks(transposed: Tensor) -> Iterator[Tensor]:
    """A [V, n] tile in blocks of vocabulary."""
    vocab, num_rows = transposed.shape
    step = max(1, BLOCK_BYTES // (4 * num_rows))
    for first in range(0, vocab, step):
        yield transposed[first : first + step]


def _shift_(block: Tensor, maximum: Tensor, temperature: float, out: Tensor) -> Tensor:
    """a = (z - m) / T, cut."""
    shifted = torch.sub(block, maximum, out=out)
    if temperature != 1.0:
        shifted.mul_(1.0 / temperature)
    return shifted.clamp_(min=MIN_SHIFTED)


def statistics(logits: Tensor, targets: Tensor, temperature: float, exponentials: bool = False) -> ColumnStats:
    """Statistics of float32 or float64 `logits`, which stay as they are, or become e^a with `exponentials`."""
    transposed, index = logits.T, (targets, torch.arange(len(targets), device=targets.device))
    maximum = torch.full_like(transposed[0], -torch.inf)
    for block in _blocks(transposed):
        maximum = torch.maximum(maximum, block.amax(0))
    target = transposed[index]
    # The target is summed apart: next to a 1 in the sum the rest would lose its digits, and with it 1 - p.
    transposed[index] = -torch.inf
    rest, weighted = torch.zeros_like(maximum), torch.zeros_like(maximum)
    shifted_buffer = torch.empty_like(next(_blocks(transposed)))
    exp_buffer = None if exponentials else torch.empty_like(shifted_buffer)
    for block in _blocks(transposed):
        shifted = _shift_(block, maximum, temperature, shifted_buffer[: len(block)])
        exps = torch.exp(shifted, out=block if exp_buffer is None else exp_buffer[: len(block)])
        rest += exps.sum(0)
        weighted += shifted.mul_(exps).sum(0)
    target_shifted = (target - maximum) * (1.0 / temperature)
    cut = target_shifted.clamp(min=MIN_SHIFTED)
    transposed[index] = cut.exp() if exponentials else target
    return ColumnStats(target_shifted, rest, weighted + cut.exp() * cut, maximum)


def scale_exponentials_(logits: Tensor, scale: Tensor) -> None:
    """e^a, as `statistics` left them, times scale [n]."""
    logits.T.mul_(scale)


def write_gradient(
    logits: Tensor, maximum: Tensor, total: Tensor, slope: Tensor, offset: Tensor, temperature: float
) -> None:
    """Overwrite `logits` by e^a / s * (slope * a + offset), [n] each."""
    shifted_buffer = torch.empty_like(next(_blocks(logits.T)))
    exp_buffer = torch.empty_like(shifted_buffer)
    for block in _blocks(logits.T):
        shifted = _shift_(block, maximum, temperature, shifted_buffer[: len(block)])
        exps = torch.exp(shifted, out=exp_buffer[: len(block)])
        torch.mul(exps.mul_(1.0 / total), shifted.mul_(slope).add_(offset), out=block)
