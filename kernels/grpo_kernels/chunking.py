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
# Chunks have a multiple of this many rows where they can: reductions over a tile stored column by column are up to five
# times slower where a column does not begin on a cache line.
ROW_MULTIPLE = 16
# Scoring works on chunks of exactly this many rows, the last one padded: the bits of a GEMM's row depend on how many
# rows it has, and a token's log-prob shall not depend on its company.
SCORING_ROWS = 128
# Rows of W in one product of a batched GEMM, float32 on a CPU: the BLAS repacks W for every chunk of tokens, which
# costs a fifth of a chunk in one go and little where the packed block stays in cache. dX gets V / DX_BLOCK summands.
LOGITS_BLOCK, DX_BLOCK = 1024, 32768
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


def underflow_scale(dtype: torch.dtype, *gradients: Tensor) -> Tensor:
    """A power of two (a scalar tensor) that divides per-token gradients [n] before they multiply logits in `dtype`.

    float16 has no room for w p of 1e-8 and less; 16 is left above for ratios up to 1000. Other dtypes: 1. No wait for
    the device.
    """
    if dtype != torch.float16:
        return gradients[0].new_ones(())
    largest = torch.cat([g.abs() for g in gradients] + [gradients[0].new_full((1,), 1e-30)]).amax()
    return torch.exp2(torch.ceil(torch.log2(largest)) - 4)


def logits_buffer(rows: int, weight: Tensor) -> Tensor:
    """Memory for `rows` rows of logits, one-dimensional: `logits_of` gives it a shape."""
    return weight.new_empty(rows * len(weight))


def _by_columns(hidden: Tensor) -> bool:
    """Whether logits of `hidden` are stored column by column (see `grpo_kernels.torch_columns`)."""
    return hidden.device.type == "cpu" and hidden.dtype in (torch.float32, torch.float64)


def _blocks(tensor: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The rows of a matrix as whole blocks [B, size, ...], and the rest. Views."""
    whole = len(tensor) // size * size
    return tensor[:whole].unflatten(0, (whole // size, size)), tensor[whole:]


def logits_of(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    """GEMM 1: hidden @ weight.T, [n, V], in the memory of `buffer`; hidden [n, D] and weight [V, D] of one dtype."""
    n, vocab = len(hidden), len(weight)
    tile = buffer[: n * vocab]
    if not _by_columns(hidden):
        return torch.mm(hidden, weight.T, out=tile.view(n, vocab))
    transposed = tile.view(vocab, n)
    (blocks, rest), (out, out_rest) = _blocks(weight, LOGITS_BLOCK), _blocks(transposed, LOGITS_BLOCK)
    if len(blocks):
        torch.bmm(blocks, hidden.T.expand(len(blocks), -1, -1), out=out)
    torch.mm(rest, hidden.T, out=out_rest)
    return transposed.T


def hidden_gradient_(out: Tensor, logits: Tensor, weight: Tensor) -> None:
    """GEMM 2: out = logits @ weight, [n, D], over all of V."""
    if not _by_columns(logits):
        torch.mm(logits, weight, out=out)
        return
    (blocks, rest), (tile, tile_rest) = _blocks(weight, DX_BLOCK), _blocks(logits.T, DX_BLOCK)
    torch.mm(tile_rest.T, rest, out=out)
    if len(blocks):
        out += torch.bmm(tile.transpose(1, 2), blocks).sum(0)


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
