"""Op 2 in Triton: log-prob and entropy of hidden [N, D] @ weight[V, D]^T without the logits ever leaving the chip.

`tile_kernel`: one program for each tile of tokens x vocabulary accumulates its logits in float32 over D and reduces
them where they are:

    z = X W^T      m = max_j z_j      s = sum_j 2^b_j      u = sum_j 2^b_j b_j,      b_j = (z_j - m) log2(e) / T

over all columns but the target, to three numbers a row, written to a [3, N, tiles] scratch, plus z_y from the tile that
holds the target: the same accumulator as everything else. `combine_kernel`: one program for each row merges its tiles
and adds the target. No atomics, no locks: the order of every sum is fixed, and a row's bits depend neither on N nor on
its neighbours. (A loop over the vocabulary inside one program would need no scratch, but keeps statistics alive
beside the accumulator and leaves most of the chip idle when N is small.)

Traffic, w bytes an element: a tile reads (tokens + vocabulary) D w, mostly from L2, and writes 12 bytes a row; the
combination reads 12 bytes for each row and tile. For N = 8192, V = 151936 and 256 columns a tile that is 58 MB of
scratch, against 2.5 GB for the logits in bfloat16. The scratch is [N, tiles] although a tile then writes in steps
of `tiles`: a row is contiguous for the combination, and the program that runs next to a tile fills the same sectors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.torch_rows import RowStats
from grpo_kernels.triton_math import (
    FP_FUSION,
    INTERPRETED,
    LOG2E,
    finish,
    finite_or_zero,
    refuse_float64,
    rescale,
    shifted_exp,
)

MAX_STRIDE = 2**31 // 256
# Bytes of hidden states that one group of row tiles works on.
GROUP_BYTES = 16 << 20


class TileConfig(NamedTuple):
    """How `tile_kernel` is launched."""

    tokens: int
    vocab: int
    depth: int
    num_warps: int
    num_stages: int

    def launch(self, dtype: torch.dtype) -> dict:
        """Keyword arguments of a launch, constants included."""
        return dict(
            BLOCK_N=self.tokens, BLOCK_V=self.vocab, BLOCK_D=self.depth,
            PRECISION="ieee" if dtype == torch.float32 else "tf32",  # looked at for float32 operands only
            UPCAST=INTERPRETED, num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip


# 16 bits: 128 x 256 does 85 multiply-adds for each element it loads, 128 x 128 would do 64. The accumulator takes 128
# of the 255 registers of each of 256 threads, and leaves room for offsets and the statistics. A stage is
# (128 + 256) * 64 * 2 bytes = 48 KB. An A100 has 163 KB, an H100 227 KB, others as little as 99 KB; a pipeline of n
# stages holds n - 1 of them with cp.async and all n with wgmma: 144, 192 and 96 KB.
STAGES = {(8, 0): 4, (9, 0): 4}
# Small tiles where the large one would spill. float32 is multiplied exactly (ieee), without tensor cores, and its
# operands come to the registers as well. 16-bit operands that are not aligned to 16 elements are loaded one by one and
# need an address each.
SMALL = TileConfig(64, 64, 32, num_warps=4, num_stages=2)


def tile_config(capability: tuple[int, int], dtype: torch.dtype, aligned: bool = True) -> TileConfig:
    """Fixed by chip, dtype and layout, whatever V: tuned on N, a token's bits would depend on the batch."""
    if dtype == torch.float32 or not aligned:
        return SMALL
    return TileConfig(128, 256, 64, num_warps=8, num_stages=STAGES.get(capability, 3))


def is_aligned(matrix: Tensor) -> bool:
    """Whether rows can be loaded 16 bytes at a time: what Triton can tell from strides, width and address."""
    return matrix.stride(1) == 1 and not any(n % 16 for n in (matrix.stride(0), matrix.shape[1], matrix.data_ptr()))


def combine_config(num_tiles: int) -> dict:
    """All tiles of a row at once: 594 for Qwen3 in 16 bits, in a block of 1024, four for each of 256 threads."""
    block = max(128, triton.next_power_of_2(num_tiles))
    return dict(BLOCK=block, num_warps=min(8, block // 128), num_stages=1, enable_fp_fusion=FP_FUSION)


def group_size(config: TileConfig, width: int, itemsize: int) -> int:
    """Row tiles of a group; see `tile_kernel`."""
    return max(1, GROUP_BYTES // (config.tokens * width * itemsize))


@triton.jit
def add_and_max(total, maximum, other_total, other_maximum):
    return total + other_total, tl.maximum(maximum, other_maximum)


@triton.jit
def add_pairs(s, u, other_s, other_u):
    return s + other_s, u + other_u


@triton.jit
def tile_statistics(logits, width, target, k):
    """m, s, u of the rows of a tile of logits, and the logit at column `target`, 0 where the tile does not hold it.

    The first `width` columns exist. The target is left out of the statistics: see `triton_math.finish`.
    """
    columns = tl.arange(0, logits.shape[1])
    hit = columns[None, :] == target[:, None]
    logits = tl.where(columns[None, :] < width, logits, -float("inf"))
    # The target by a sum in which every other column is 0: no NaN of another column reaches it. Each pair of results
    # comes from one reduction: one after the other, all that goes into both would have to be kept in registers.
    others = tl.where(hit, -float("inf"), logits)
    target_logit, maximum = tl.reduce((tl.where(hit, logits, 0.0), others), 1, add_and_max)
    b, e = shifted_exp(others, finite_or_zero(maximum)[:, None], k)
    s, u = tl.reduce((e, e * b), 1, add_pairs)
    return maximum, s, u, target_logit


@triton.jit(do_not_specialize=["num_rows", "group"])
def tile_kernel(
    hidden_ptr, weight_ptr, targets_ptr, scratch_ptr, target_logits_ptr, num_rows, vocab, width,
    hidden_stride, hidden_stride_d, weight_stride, weight_stride_d, inverse_temperature, group,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Statistics of one tile of logits. `scratch_ptr` [3, N, tiles] (m, s, u) and `target_logits_ptr` [N], float32."""
    # Programs that run together should read the same memory. In order of program id: all row tiles of a group for one
    # vocabulary tile, then for the next one. A group's hidden states (GROUP_BYTES) stay in L2 all the way, each weight
    # tile is read by the whole group while it is there, and all of W comes from memory only once for each group.
    pid = tl.program_id(0)
    row_tiles, vocab_tiles = tl.cdiv(num_rows, BLOCK_N), tl.cdiv(vocab, BLOCK_V)
    first = pid // (group * vocab_tiles) * group
    rows_here = tl.minimum(row_tiles - first, group)
    within = pid % (group * vocab_tiles)
    row_tile, vocab_tile = first + within % rows_here, within // rows_here

    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = vocab_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    depth = tl.arange(0, BLOCK_D)
    # Rows and columns outside read the last one inside: addresses stay valid and the loop needs a mask along D only.
    first_row, first_column = row_tile * BLOCK_N, vocab_tile * BLOCK_V
    safe_rows = tl.minimum(rows, num_rows - 1) - first_row
    safe_columns = tl.minimum(columns, vocab - 1) - first_column
    # A 64-bit base for the tile, 32-bit offsets inside it: 64-bit offsets would cost registers the accumulator needs.
    x_base = hidden_ptr + first_row.to(tl.int64) * hidden_stride
    w_base = weight_ptr + first_column.to(tl.int64) * weight_stride
    x_offsets = safe_rows[:, None] * hidden_stride + depth[None, :] * hidden_stride_d
    w_offsets = safe_columns[None, :] * weight_stride + depth[:, None] * weight_stride_d
    logits = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, width, BLOCK_D):
        x = tl.load(x_base + x_offsets, mask=depth[None, :] < width - start, other=0.0)
        w = tl.load(w_base + w_offsets, mask=depth[:, None] < width - start, other=0.0)
        if UPCAST:  # the interpreter would multiply the bit patterns of bfloat16
            x, w = x.to(tl.float32), w.to(tl.float32)
        logits = tl.dot(x, w, logits, input_precision=PRECISION)
        x_base += BLOCK_D * hidden_stride_d
        w_base += BLOCK_D * weight_stride_d

    inside = rows < num_rows
    target = tl.load(targets_ptr + rows, mask=inside, other=-1) - first_column
    k = inverse_temperature * LOG2E
    maximum, s, u, target_logit = tile_statistics(logits, vocab - first_column, target.to(tl.int32), k)
    holds = (target >= 0) & (target < BLOCK_V)
    tl.store(target_logits_ptr + rows, target_logit, mask=inside & holds)
    scratch = scratch_ptr + rows.to(tl.int64) * vocab_tiles + vocab_tile
    plane = num_rows.to(tl.int64) * vocab_tiles
    tl.store(scratch, maximum, mask=inside)
    tl.store(scratch + plane, s, mask=inside)
    tl.store(scratch + 2 * plane, u, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    scratch_ptr, target_logits_ptr, stats_ptr, num_rows, vocab_tiles, inverse_temperature, BLOCK: tl.constexpr
):
    """Merge the tiles of one row: with M the largest m and d = (m - M) log2(e) / T of each tile,

        s = sum 2^d s      u = sum 2^d (u + d s)

    `stats_ptr` [4, N] float32: logprob, entropy, maximum, ln s.
    """
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK)
    inside = tiles < vocab_tiles
    scratch = scratch_ptr + row * vocab_tiles + tiles
    plane = num_rows.to(tl.int64) * vocab_tiles
    maximum = tl.load(scratch, mask=inside, other=-float("inf"))
    s = tl.load(scratch + plane, mask=inside, other=0.0)
    u = tl.load(scratch + 2 * plane, mask=inside, other=0.0)
    of_row = tl.max(maximum, axis=0)
    s, u = rescale(maximum, of_row, s, u, inverse_temperature * LOG2E)
    logprob, entropy, of_row, log_sum = finish(
        of_row, tl.sum(s, axis=0), tl.sum(u, axis=0), tl.load(target_logits_ptr + row), inverse_temperature
    )
    tl.store(stats_ptr + row, logprob)
    tl.store(stats_ptr + num_rows + row, entropy)
    tl.store(stats_ptr + 2 * num_rows + row, of_row)
    tl.store(stats_ptr + 3 * num_rows + row, log_sum)


def linear_logprob_stats(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> RowStats:
    """Statistics of the rows of hidden [N, D] @ weight [V, D]^T; any strides, one dtype. Targets [N] int64.

    Raises RuntimeError for float64.
    """
    refuse_float64(hidden=hidden, weight=weight)
    (num_rows, width), vocab, device = hidden.shape, len(weight), hidden.device
    stats = torch.empty(4, num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return RowStats(*stats)
    # Offsets inside a tile are 32 bits wide; rows further apart than this (8 M elements) are not a matrix of a model.
    hidden, weight = (m.contiguous() if max(m.stride()) >= MAX_STRIDE else m for m in (hidden, weight))
    capability = torch.cuda.get_device_capability(device) if hidden.is_cuda else (8, 0)
    config = tile_config(capability, hidden.dtype, is_aligned(hidden) and is_aligned(weight))
    vocab_tiles = triton.cdiv(vocab, config.vocab)
    scratch = torch.empty(3, num_rows, vocab_tiles, dtype=torch.float32, device=device)
    target_logits = torch.empty(num_rows, dtype=torch.float32, device=device)
    tile_kernel[(triton.cdiv(num_rows, config.tokens) * vocab_tiles,)](
        hidden, weight, targets.contiguous(), scratch, target_logits, num_rows, vocab, width,
        *hidden.stride(), *weight.stride(), 1.0 / temperature, group_size(config, width, hidden.element_size()),
        **config.launch(hidden.dtype),
    )  # fmt: skip
    combine_kernel[(num_rows,)](
        scratch, target_logits, stats, num_rows, vocab_tiles, 1.0 / temperature, **combine_config(vocab_tiles)
    )
    return RowStats(*stats)
