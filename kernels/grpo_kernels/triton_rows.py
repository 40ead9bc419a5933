"""Row kernels in Triton: what happens between the GEMMs, on a [n, V] tile of logits. Interface: `torch_rows`.

One program owns one row and walks over it in blocks. A row of Qwen3's 151936 bfloat16 logits is 304 KB, more than a
program can hold, so the training kernel walks twice: statistics, then the gradient over the logits.

| kernel                | memory traffic per row of V logits of w bytes (plus < 100 bytes of per-token values) |
|-----------------------|---------------------------------------------------------------------------------------|
| `row_stats_kernel`    | V w read                                                                              |
| `row_backward_kernel` | V w read, V w written; V w written where both upstream gradients are 0                 |
| `grpo_rows_kernel`    | 2 V w read, V w written; where dL/dlogprob is 0 (clipped away) V w read, V w written;  |
|                       | weight 0: V w written                                                                 |

Block size and warps, by reasoning for A100 and H100 (`kernels/bench/resources.py` shows the registers they lead to):
each of 256 threads takes 16 logits of a 4096 block, two 16-byte loads of bfloat16, and keeps 16 partial sums of s and
u. At 128 registers or fewer two programs or more share an SM; each has 8 KB of loads in flight, and one computes while
another waits for the maximum of its block, the only reduction inside the loop. A larger block needs more registers, a
smaller one more reductions. Vocabularies up to 1024 (tests, toys) take one block of 1024 with four warps.

The second walk goes from the end of the row to its start: the blocks read last are the likeliest to be in L2 still.

Offsets: rows are counted in 64 bits, as n V passes 2^31 at 14135 rows. float64 logits are refused with a RuntimeError.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.objective import Objective, TokenStats
from grpo_kernels.torch_rows import RowStats
from grpo_kernels.triton_math import (
    FP_FUSION,
    LN2,
    LOG2E,
    as_float32,
    expm1,
    finish,
    finite_or_zero,
    push,
    refuse_float64,
    shifted_exp,
    token_objective,
)

__all__ = ["RowStats", "grpo_rows_", "logprob_rows", "logprob_rows_backward_"]


class RowsConfig(NamedTuple):
    """How the three kernels are launched."""

    block: int
    num_warps: int
    num_stages: int = 1  # nothing to pipeline through shared memory

    def launch(self) -> dict:
        """Keyword arguments of a launch, constants included."""
        return dict(BLOCK=self.block, num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=FP_FUSION)


SMALL, LARGE = RowsConfig(1024, 4), RowsConfig(4096, 8)


def rows_config(vocab: int) -> RowsConfig:
    """Fixed by the vocabulary: never tuned on the number of rows, so that a row's result does not depend on it."""
    return SMALL if vocab <= SMALL.block else LARGE


@triton.jit
def row_statistics(row_ptr, vocab, column_stride, target, k, BLOCK: tl.constexpr):
    """Maximum, s and u (base 2) of all columns but the target of the row at `row_ptr`, in one read.

    Columns from `vocab` on count as -inf, not 0, and so does the target; see `triton_math.finish`.
    """
    lanes = tl.arange(0, BLOCK)
    maximum = tl.full((), -float("inf"), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    u = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + lanes
        z = tl.load(row_ptr + columns.to(tl.int64) * column_stride, mask=columns < vocab, other=-float("inf"))
        z = tl.where(columns == target, -float("inf"), z.to(tl.float32))
        maximum, s, u = push(z, maximum, s, u, k)
    return maximum, tl.sum(s, axis=0), tl.sum(u, axis=0)


@triton.jit
def write_zeros(row_ptr, vocab, column_stride, BLOCK: tl.constexpr):
    """A row without gradient is overwritten unread: 0 * NaN is NaN."""
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        columns = start + lanes
        tl.store(
            row_ptr + columns.to(tl.int64) * column_stride,
            tl.zeros((BLOCK,), row_ptr.dtype.element_ty),
            mask=columns < vocab,
        )


@triton.jit
def write_gradient(
    row_ptr, vocab, column_stride, target, maximum, log_sum, entropy, logprob, grad, grad_entropy,
    inverse_temperature, BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Logits of a row into their gradient, in place, in one read and one write:

        dz_j = ( g ([j = y] - p_j) - h p_j (log p_j + H) ) / T

    with 1 - p of the target as -expm1(logprob), rounded once. `grad_entropy` h is looked at with ENTROPY only.
    """
    k = inverse_temperature * LOG2E
    shift = finite_or_zero(maximum)
    grad = grad * inverse_temperature
    inverse_sum = tl.exp(-log_sum)
    offset = entropy - log_sum  # log p_j + H = a_j + offset, with a_j = b_j ln 2
    lanes = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(vocab, BLOCK)
    for i in range(0, num_blocks):
        columns = (num_blocks - 1 - i) * BLOCK + lanes
        inside = columns < vocab
        pointers = row_ptr + columns.to(tl.int64) * column_stride
        z = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)
        b, e = shifted_exp(z, shift, k)
        p = e * inverse_sum
        at_target = grad * -expm1(logprob)
        if ENTROPY:
            slope = -grad_entropy * inverse_temperature
            of_entropy = slope * (b * LN2 + offset)
            value = p * (of_entropy - grad)
            at_target = at_target + tl.exp(logprob) * of_entropy
        else:
            value = p * -grad
        value = tl.where(columns == target, at_target, value)
        tl.store(pointers, value.to(row_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def row_stats_kernel(
    logits_ptr, targets_ptr, stats_ptr, num_rows, vocab, row_stride, column_stride, inverse_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """logprob, entropy, maximum and ln s of each row; `stats_ptr` [4, n] float32. Formulas: `triton_math`."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row).to(tl.int32)  # as the columns it is compared with
    target_logit = tl.load(row_ptr + target.to(tl.int64) * column_stride).to(tl.float32)
    k = inverse_temperature * LOG2E
    maximum, s, u = row_statistics(row_ptr, vocab, column_stride, target, k, BLOCK)
    logprob, entropy, maximum, log_sum = finish(maximum, s, u, target_logit, inverse_temperature)
    tl.store(stats_ptr + row, logprob)
    tl.store(stats_ptr + num_rows + row, entropy)
    tl.store(stats_ptr + 2 * num_rows + row, maximum)
    tl.store(stats_ptr + 3 * num_rows + row, log_sum)


@triton.jit
def row_backward_kernel(
    logits_ptr, targets_ptr, logprobs_ptr, entropy_ptr, maximum_ptr, log_sum_ptr, grad_ptr, grad_entropy_ptr,
    vocab, row_stride, column_stride, inverse_temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    """`write_gradient` for each row, from the statistics of the forward pass. `grad_entropy_ptr` may be None."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    grad = tl.load(grad_ptr + row)
    grad_entropy = 0.0
    if grad_entropy_ptr is not None:
        grad_entropy = tl.load(grad_entropy_ptr + row)
    if (grad == 0.0) & (grad_entropy == 0.0):
        write_zeros(row_ptr, vocab, column_stride, BLOCK)
    else:
        write_gradient(
            row_ptr, vocab, column_stride, tl.load(targets_ptr + row).to(tl.int32), tl.load(maximum_ptr + row),
            tl.load(log_sum_ptr + row), tl.load(entropy_ptr + row), tl.load(logprobs_ptr + row), grad, grad_entropy,
            inverse_temperature, BLOCK, grad_entropy_ptr is not None,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def grpo_rows_kernel(
    logits_ptr, targets_ptr, advantages_ptr, weights_ptr, old_ptr, ref_ptr, sampler_ptr, stats_ptr, clipped_ptr,
    num_rows, vocab, row_stride, column_stride, inverse_temperature,
    ratio_low, ratio_high, delta, tau_positive, tau_negative, beta, entropy_coef, mismatch_cap,
    SURROGATE: tl.constexpr, KL: tl.constexpr, MISMATCH: tl.constexpr,
    ENTROPY_GRADIENT: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics, token objective and gradient of each row: the middle of the three-GEMM head.

    `old_ptr`, `ref_ptr`, `sampler_ptr` may be None. `stats_ptr` [7, n] float32 in the order of TokenStats,
    `clipped_ptr` [n] int32. The loss term and its derivative are those of `triton_math.token_objective`.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    weight = tl.load(weights_ptr + row)
    target = tl.load(targets_ptr + row).to(tl.int32)  # as the columns it is compared with
    # Read before any block is overwritten: the reductions of the first walk are barriers that lie in between.
    target_logit = tl.load(row_ptr + target.to(tl.int64) * column_stride).to(tl.float32)
    # An untrained row is not read: a walk over no columns.
    columns = tl.where(weight != 0.0, vocab, 0)
    k = inverse_temperature * LOG2E
    maximum, s, u = row_statistics(row_ptr, columns, column_stride, target, k, BLOCK)
    logprob, entropy, maximum, log_sum = finish(maximum, s, u, target_logit, inverse_temperature)

    old, ref, sampler = 0.0, 0.0, 0.0
    if old_ptr is not None:
        old = tl.load(old_ptr + row)
    if ref_ptr is not None:
        ref = tl.load(ref_ptr + row)
    if sampler_ptr is not None:
        sampler = tl.load(sampler_ptr + row)
    loss, grad, x, entropy_out, ratio, kl, surrogate, importance, clipped = token_objective(
        logprob, entropy, tl.load(advantages_ptr + row), weight, old, ref, sampler,
        ratio_low, ratio_high, delta, tau_positive, tau_negative, beta, entropy_coef, mismatch_cap,
        old_ptr is not None, ref_ptr is not None, sampler_ptr is not None, SURROGATE, KL, MISMATCH,
    )  # fmt: skip
    tl.store(stats_ptr + row, loss)
    tl.store(stats_ptr + num_rows + row, x)
    tl.store(stats_ptr + 2 * num_rows + row, entropy_out)
    tl.store(stats_ptr + 3 * num_rows + row, ratio)
    tl.store(stats_ptr + 4 * num_rows + row, kl)
    tl.store(stats_ptr + 5 * num_rows + row, surrogate)
    tl.store(stats_ptr + 6 * num_rows + row, importance)
    tl.store(clipped_ptr + row, clipped)

    if BACKWARD:
        grad_entropy = -entropy_coef * weight
        idle = grad == 0.0
        if ENTROPY_GRADIENT:
            idle = idle & (grad_entropy == 0.0)
        if idle:
            write_zeros(row_ptr, vocab, column_stride, BLOCK)
        else:
            write_gradient(
                row_ptr, vocab, column_stride, target, maximum, log_sum, entropy, logprob, grad, grad_entropy,
                inverse_temperature, BLOCK, ENTROPY_GRADIENT,
            )  # fmt: skip


def logprob_rows(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> RowStats:
    """Statistics of each row of `logits` [n, V], any strides; `targets` [n] int64. Raises RuntimeError for float64."""
    refuse_float64(logits=logits)
    num_rows, vocab = logits.shape
    stats = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        row_stats_kernel[(num_rows,)](
            logits, targets.contiguous(), stats, num_rows, vocab, *logits.stride(), 1.0 / temperature,
            **rows_config(vocab).launch(),
        )  # fmt: skip
    return RowStats(*stats)


def logprob_rows_backward_(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """`torch_rows.logprob_rows_backward_`: overwrite `logits` by the gradient of the log-probs and the entropy.

    With `stats`, the sum included, a row is read once. Raises RuntimeError for float64.
    """
    refuse_float64(logits=logits)
    num_rows, vocab = logits.shape
    stats = stats or logprob_rows(logits, targets, temperature)
    if num_rows:
        row_backward_kernel[(num_rows,)](
            logits, targets.contiguous(), *map(as_float32, stats), as_float32(grad_logprobs), as_float32(grad_entropy),
            vocab, *logits.stride(), 1.0 / temperature, **rows_config(vocab).launch(),
        )  # fmt: skip
    return logits


def grpo_rows_(
    logits: Tensor,
    targets: Tensor,
    *,
    advantages: Tensor,
    token_weights: Tensor,
    objective: Objective,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    temperature: float = 1.0,
    backward: bool = True,
) -> TokenStats:
    """`torch_rows.grpo_rows_`: statistics, token loss and, with `backward`, its gradient over `logits` [n, V].

    Raises RuntimeError for float64 logits.
    """
    refuse_float64(logits=logits)
    num_rows, vocab = logits.shape
    stats = torch.empty(7, num_rows, dtype=torch.float32, device=logits.device)
    clipped = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        tokens = (advantages, token_weights, old_logprobs, ref_logprobs, sampler_logprobs)
        grpo_rows_kernel[(num_rows,)](
            logits, targets.contiguous(), *map(as_float32, tokens), stats, clipped,
            num_rows, vocab, *logits.stride(), 1.0 / temperature,
            *objective_arguments(objective), *objective_constants(objective),
            ENTROPY_GRADIENT=bool(objective.entropy_coef), BACKWARD=backward, **rows_config(vocab).launch(),
        )  # fmt: skip
    return TokenStats._make([*stats, clipped])


def objective_arguments(objective: Objective) -> tuple[float, ...]:
    """The numbers of an objective in the order the kernels take them; changing one compiles nothing."""
    return tuple(
        float(getattr(objective, name))
        for name in (
            "ratio_low", "ratio_high", "delta", "tau_positive", "tau_negative", "beta", "entropy_coef", "mismatch_cap",
        )
    )  # fmt: skip


def objective_constants(objective: Objective) -> tuple[str, str, str]:
    """The choices of an objective, compile-time constants: SURROGATE, KL, MISMATCH."""
    return objective.surrogate, objective.kl_estimator, objective.mismatch
