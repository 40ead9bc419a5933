"""The GEMMs of the LM head, a chunk of tokens at a time, so that [N, V] never exists.

Chunk sizes depend on the vocabulary and the device alone, never on N.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of one chunk of logits. CPU: 128 rows of Qwen3's 151936 columns in float32: each chunk reads W twice and reads
# and writes all of dW, so more rows mean less of that. GPU: enough rows to fill every SM several times.
CHUNK_BYTES = {"cpu": 128 * 151936 * 4, "cuda": 256 << 20}
# Chunks have a multiple of this many rows where they can: GEMMs and sums over a tile stored column by column are up to
# five times slower where a column does not begin on a cache line.
ROW_MULTIPLE = 16
# Scoring works on chunks of exactly this many rows, the last one padded: the bits of a GEMM's row depend on how many
# rows it has, and a token's log-prob shall not depend on its company.
SCORING_ROWS = 128
# Rows of dW whose 16-bit contribution is held at once on a CPU, where no GEMM adds 16-bit products to float32.
DW_BLOCK = 2048


def chunk_rows(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Most rows of logits of one training chunk, at least 1."""
    return max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (vocab * dtype.itemsize))


def chunks(num_rows: int, most: int) -> Iterator[slice]:
    """Slices of at most `most` rows that cover `num_rows`, of nearly the same size: a short last GEMM wastes time."""
    if not num_rows:
        return
    size = -(-num_rows // -(-num_rows // most))
    size = min(most, -(-size // ROW_MULTIPLE) * ROW_MULTIPLE)
    for first in range(0, num_rows, size):
        yield slice(first, min(first + size, num_rows))


def logits_buffer(rows: int, weight: Tensor) -> Tensor:
    """Memory for `rows` rows of logits, one-dimensional: `logits_of` gives it a shape."""
    return weight.new_empty(rows * len(weight))


def logits_of(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    """hidden @ weight.T, [n, V], in the memory of `buffer`; hidden [n, D] and weight [V, D] of one dtype.

    On a CPU in float32 the columns lie one after the other (see `grpo_kernels.torch_columns`), else the rows.
    """
    n, vocab = len(hidden), len(weight)
    tile = buffer[: n * vocab]
    if hidden.device.type == "cpu" and hidden.dtype in (torch.float32, torch.float64):
        return torch.mm(weight, hidden.T, out=tile.view(vocab, n)).T
    return torch.mm(hidden, weight.T, out=tile.view(n, vocab))


def accumulate_outer_(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total (+)= left.T @ right, with `total` [V, D] in float32 whatever the dtype of `left` [n, V], `right` [n, D].

    The first call overwrites. Accumulating in bfloat16 instead would double the error of dW and bias it.
    """
    beta = 0 if first else 1
    if left.dtype == total.dtype:
        torch.addmm(total, left.T, right, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        for column in range(0, len(total), DW_BLOCK):
            block, part = total[column : column + DW_BLOCK], left[:, column : column + DW_BLOCK].T @ right
            block.copy_(part) if first else block.add_(part)
