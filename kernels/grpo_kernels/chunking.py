"""The GEMMs of the LM head, a chunk of tokens at a time, so that [N, V] never exists.

Chunk sizes depend on the vocabulary and the device alone, never on N.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of one chunk of logits. CPU: as many rows as 72 MB hold (118 of Qwen3's 151936 columns in float32): each chunk
# reads and writes the whole of dW, so more rows mean less of that. GPU: enough rows to fill every SM several times.
CHUNK_BYTES = {"cpu": 72 << 20, "cuda": 256 << 20}
# Scoring works on chunks of exactly this many rows, the last one padded: the bits of a GEMM's row depend on how many
# rows it has, and a token's log-prob shall not depend on its company.
SCORING_ROWS = 64
# Rows of dW whose 16-bit contribution is held at once on a CPU, where no GEMM adds 16-bit products to float32.
DW_BLOCK = 2048


def chunk_rows(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of logits of one training chunk: a multiple of 8 where there are that many, at least 1."""
    rows = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (vocab * dtype.itemsize)
    return max(1, rows - rows % 8 if rows > 8 else rows)


def chunks(num_rows: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` that cover `num_rows`, all of nearly the same size (a short last GEMM wastes time)."""
    count = -(-num_rows // rows)
    for i in range(count):
        yield slice(i * num_rows // count, (i + 1) * num_rows // count)


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
