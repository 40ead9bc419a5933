"""Row kernels in PyTorch: what happens between the GEMMs, on a [n, V] tile of logits.

Three functions, which every backend provides under the same names (`torch_rows`, `triton_rows`; `cuda_rows` has the
first one only). With z the logits, m a row's maximum, T the temperature, y the target:

    a_j = (z_j - m) / T          s = sum_j e^a_j          u = sum_j e^a_j a_j
    logprob = a_y - log s        entropy = log s - u / s

Shifted like this a log-prob is never above 0, a common offset of the logits cancels, and a logit of -inf counts as the
limit 0 in u instead of 0 * inf. The sum is taken without the target first, s = e^a_y + rest: where the target is the
maximum its log-prob is then -log1p(rest), which keeps its digits as p -> 1, and so does 1 - p = -expm1(logprob). Next
to the 1 in s, a rest of 1e-8 would be lost, and the row's whole gradient with it.

Traffic on a CPU: rows are taken a few at a time, so that the passes over them (max; shift; exp; two sums; write) run in
cache and main memory sees one read and one write of the tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.objective import Objective, TokenStats, token_terms

# Float32 bytes of one group of rows: with its twin (the exponentials) this stays in the last-level cache of one core.
ROWS_BYTES = 5 << 19
# exp of this is 0 even in float64. Shifted logits are cut here, so that 0 * -inf never occurs.
MIN_SHIFTED = -1000.0


class RowStats(NamedTuple):
    """Per row, [n] float32 (float64 for float64 logits), nats. log-sum-exp of z / T is maximum / T + log_sum."""

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    """m, not divided by the temperature."""
    log_sum: Tensor
    """log s."""


class _Rows(NamedTuple):
    rows: slice
    targets: Tensor  # [k, 1]
    target_shifted: Tensor  # a_y, not cut, [k, 1]
    shifted: Tensor  # a, [k, V]
    exponentials: Tensor  # e^a, [k, V]
    rest: Tensor  # the sum of the exponentials but the target's, [k, 1]
    total: Tensor  # s, [k, 1]
    maximum: Tensor  # m, [k, 1]


def _statistics(logits: Tensor, targets: Tensor, temperature: float, inplace: bool) -> Iterator[_Rows]:
    """Shifted logits and exponentials of a few rows at a time. `inplace` may use the logits' memory for the former."""
    num_rows, vocab = logits.shape
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    step = max(1, ROWS_BYTES // (4 * vocab))
    exponentials = logits.new_empty(min(step, num_rows), vocab, dtype=dtype)
    spare = None if inplace and logits.dtype == dtype else torch.empty_like(exponentials)
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        tile, exps = logits[rows], exponentials[: rows.stop - first]
        maximum = tile.amax(-1, keepdim=True).to(dtype)
        # Before the cut below: a target a thousand nats down has a log-prob all the same.
        target_shifted = (tile.gather(1, targets[rows, None]) - maximum) * (1.0 / temperature)
        if spare is None:
            shifted = tile.sub_(maximum)
        else:
            shifted = torch.sub(spare[: rows.stop - first].copy_(tile), maximum, out=spare[: rows.stop - first])
        if temperature != 1.0:
            shifted.mul_(1.0 / temperature)
        shifted.clamp_(min=MIN_SHIFTED)
        torch.exp(shifted, out=exps)
        of_target = exps.gather(1, targets[rows, None])
        rest = exps.scatter_(1, targets[rows, None], 0).sum(-1, keepdim=True)
        exps.scatter_(1, targets[rows, None], of_target)
        yield _Rows(rows, targets[rows, None], target_shifted, shifted, exps, rest, rest + of_target, maximum)


def _row_stats(each: _Rows) -> RowStats:
    log_sum = each.total.log()
    target = each.target_shifted
    logprobs = torch.where(target == 0, -torch.log1p(each.rest), target - log_sum)
    # u as a dot product: it needs no third buffer, and vecdot runs at the speed of memory where bmm does not.
    entropy = log_sum - torch.linalg.vecdot(each.exponentials, each.shifted)[:, None] / each.total
    return RowStats(logprobs[:, 0], entropy[:, 0], each.maximum[:, 0], log_sum[:, 0])


def logprob_rows(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> RowStats:
    """Statistics of each row of `logits` [n, V]; `targets` [n] int64. Nothing is overwritten."""
    parts = [_row_stats(each) for each in _statistics(logits, targets, temperature, inplace=False)]
    return RowStats(*map(torch.cat, zip(*parts))) if parts else empty_stats(logits)


def empty_stats(logits: Tensor) -> RowStats:
    """The statistics of no rows."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return RowStats(*(logits.new_empty(0, dtype=dtype) for _ in RowStats._fields))


def logprob_rows_backward_(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Overwrite `logits` [n, V] by the gradient of sum(grad_logprobs * logprob + grad_entropy * entropy), [n] each:

        dz_j = ( g ([j = y] - p_j) - h p_j (log p_j + H) ) / T

    1 - p of the target is -expm1(logprob), rounded once. A row whose two gradients are 0 becomes 0, whatever it held.
    """
    for each in _statistics(logits, targets, temperature, inplace=True):
        rows = RowStats(*(field[each.rows] for field in stats))
        entropy_part = None if grad_entropy is None else grad_entropy[each.rows]
        _write_gradient(logits, each, rows, grad_logprobs[each.rows], entropy_part, temperature)
    return logits


def _write_gradient(
    logits: Tensor, each: _Rows, stats: RowStats, grad: Tensor, grad_entropy: Tensor | None, temperature: float
) -> None:
    total, log_sum = each.total, each.total.log()
    grad = grad[:, None] / temperature
    out = logits[each.rows]
    probability = each.exponentials  # e^a, to be divided by s
    one_minus = -torch.expm1(stats.logprobs)[:, None]  # of the target
    at_target = grad * one_minus
    idle = grad == 0
    if grad_entropy is None:
        scale = -grad / total
        torch.mul(probability, scale, out=out) if out.dtype == scale.dtype else out.copy_(probability.mul_(scale))
    else:
        slope = -grad_entropy[:, None] / temperature  # of p_j (log p_j + H)
        idle &= slope == 0
        offset = stats.entropy[:, None] - log_sum  # log p_j + H = a_j + offset
        target_shift = each.shifted.gather(1, each.targets) + offset
        at_target += slope * stats.logprobs.exp()[:, None] * target_shift
        factor = each.shifted.mul_(slope).add_(slope * offset - grad)
        out.copy_(probability.mul_(1.0 / total).mul_(factor))
    out.scatter_(1, each.targets, at_target.to(out.dtype))
    # 0 * NaN is NaN: a row that is not trained is overwritten, not multiplied away. Asking a GPU would wait for it.
    if out.is_cuda or bool(idle.any()):
        out.masked_fill_(idle, 0)


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
    """Statistics, token loss and, with `backward`, its gradient over `logits` [n, V], in one pass over each row.

    All other tensors are [n], `targets` int64, the rest float32 (float64 with float64 logits). Without `backward` the
    content of `logits` is undefined afterwards.
    """
    parts = []
    for each in _statistics(logits, targets, temperature, inplace=True):
        stats = _row_stats(each)

        def part(tensor: Tensor | None, rows: slice = each.rows) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        tokens, grad, grad_entropy = token_terms(
            stats.logprobs,
            stats.entropy,
            advantages=advantages[each.rows],
            token_weights=token_weights[each.rows],
            objective=objective,
            old_logprobs=part(old_logprobs),
            ref_logprobs=part(ref_logprobs),
            sampler_logprobs=part(sampler_logprobs),
        )
        if backward:
            _write_gradient(logits, each, stats, grad, grad_entropy if objective.entropy_coef else None, temperature)
        parts.append(tokens)
    return concatenate(parts)


def concatenate(parts: list[TokenStats]) -> TokenStats:
    """Stats of several tiles in order; at least one."""
    return TokenStats(*map(torch.cat, zip(*parts)))
