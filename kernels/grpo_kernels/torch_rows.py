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
cache and main memory sees one read and one write of the tile. A tile stored column by column goes to `torch_columns`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import torch_columns
from grpo_kernels.objective import Objective, Tokens, TokenStats, each_tensor, token_terms
from grpo_kernels.torch_columns import MIN_SHIFTED

# Float32 bytes of one group of rows: with its twin (the exponentials) this stays in the last-level cache of one core.
ROWS_BYTES = 5 << 19


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
    shifted: Tensor  # a, [k, V]
    exponentials: Tensor  # e^a, [k, V]
    stats: RowStats  # [k]
    total: Tensor  # s, [k]


def _finish(target_shifted: Tensor, rest: Tensor, weighted: Tensor, maximum: Tensor) -> tuple[RowStats, Tensor]:
    """Statistics and s from a_y, the sum of the other exponentials, u and m, [n] each."""
    total = rest + target_shifted.clamp(min=MIN_SHIFTED).exp()
    log_sum = total.log()
    logprobs = torch.where(target_shifted == 0, -torch.log1p(rest), target_shifted - log_sum)
    return RowStats(logprobs, log_sum - weighted / total, maximum, log_sum), total


def _groups(logits: Tensor, targets: Tensor, temperature: float, inplace: bool) -> Iterator[_Rows]:
    """Statistics, shifted logits and exponentials of a few rows at a time. `inplace` may use the logits' memory."""
    num_rows, vocab = logits.shape
    dtype = _wide(logits)
    step = max(1, ROWS_BYTES // (4 * vocab))
    exponentials = logits.new_empty(min(step, num_rows), vocab, dtype=dtype)
    spare = None if inplace and logits.dtype == dtype else torch.empty_like(exponentials)
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        exps, of_rows = exponentials[: rows.stop - first], targets[rows, None]
        # 16-bit logits are widened once; a maximum over them would cost more than the copy.
        wide = logits[rows] if spare is None else spare[: rows.stop - first].copy_(logits[rows])
        maximum = wide.amax(-1, keepdim=True)
        # Before the cut below: a target a thousand nats down has a log-prob all the same.
        target_shifted = (wide.gather(1, of_rows) - maximum) * (1.0 / temperature)
        shifted = wide.sub_(maximum)
        if temperature != 1.0:
            shifted.mul_(1.0 / temperature)
        shifted.clamp_(min=MIN_SHIFTED)
        of_target = torch.exp(shifted, out=exps).gather(1, of_rows)
        rest = exps.scatter_(1, of_rows, 0).sum(-1)
        exps.scatter_(1, of_rows, of_target)
        # u as a dot product: it needs no third buffer, and vecdot runs at the speed of memory where bmm does not.
        weighted = torch.linalg.vecdot(exps, shifted)
        yield _Rows(rows, of_rows, shifted, exps, *_finish(target_shifted[:, 0], rest, weighted, maximum[:, 0]))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _by_columns(logits: Tensor) -> bool:
    return torch_columns.is_column_major(logits) and logits.dtype == _wide(logits)


def logprob_rows(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> RowStats:
    """Statistics of each row of `logits` [n, V]; `targets` [n] int64. Nothing is overwritten."""
    if _by_columns(logits):
        return _finish(*torch_columns.statistics(logits, targets, temperature))[0]
    parts = [each.stats for each in _groups(logits, targets, temperature, inplace=False)]
    return RowStats(*map(torch.cat, zip(*parts))) if parts else empty_stats(logits)


def empty_stats(logits: Tensor) -> RowStats:
    """The statistics of no rows."""
    return RowStats(*(logits.new_empty(0, dtype=_wide(logits)) for _ in RowStats._fields))


def logprob_rows_backward_(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Overwrite `logits` [n, V] by the gradient of sum(grad_logprobs * logprob + grad_entropy * entropy), [n] each:

        dz_j = ( g ([j = y] - p_j) - h p_j (log p_j + H) ) / T

    `stats` are those of `logprob_rows`, or None where it was not called on these logits: they are then taken here, by
    the way. 1 - p of the target is -expm1(logprob), rounded once. A row whose two gradients are 0 becomes 0, whatever
    it held.
    """
    if _by_columns(logits):
        if stats is None or grad_entropy is None:  # without an entropy the gradient is written over the exponentials
            own, _ = _finish(*torch_columns.statistics(logits, targets, temperature, exponentials=grad_entropy is None))
            stats = stats or own
        coefficients = _coefficients(stats, grad_logprobs, grad_entropy, temperature)
        return _write_columns(logits, targets, stats, stats.log_sum.exp(), coefficients, temperature)
    for each in _groups(logits, targets, temperature, inplace=True):
        rows = RowStats(*(field[each.rows] for field in stats)) if stats else each.stats
        of_entropy = None if grad_entropy is None else grad_entropy[each.rows]
        _write_rows(logits, each, _coefficients(rows, grad_logprobs[each.rows], of_entropy, temperature))
    return logits


class _Coefficients(NamedTuple):
    """dz_j = e^a_j / s (slope a_j + offset) beside the target, [n] each."""

    slope: Tensor | None
    offset: Tensor
    at_target: Tensor
    idle: Tensor  # bool: the row's gradient is 0


def _coefficients(stats: RowStats, grad: Tensor, grad_entropy: Tensor | None, temperature: float) -> _Coefficients:
    grad = grad / temperature
    at_target, idle = grad * -torch.expm1(stats.logprobs), grad == 0
    if grad_entropy is None:
        return _Coefficients(None, -grad, at_target, idle)
    slope = -grad_entropy / temperature  # of p_j (log p_j + H), where log p_j = a_j - log s
    of_target = stats.logprobs.exp() * (stats.logprobs.clamp(min=MIN_SHIFTED) + stats.entropy)
    offset = slope * (stats.entropy - stats.log_sum) - grad
    return _Coefficients(slope, offset, at_target + slope * of_target, idle & (slope == 0))


def _write_rows(logits: Tensor, each: _Rows, by: _Coefficients) -> None:
    out, total = logits[each.rows], each.total[:, None]
    if by.slope is None:
        scale = by.offset[:, None] / total
        in_place = out.dtype == scale.dtype
        torch.mul(each.exponentials, scale, out=out) if in_place else out.copy_(each.exponentials.mul_(scale))
    else:
        factor = each.shifted.mul_(by.slope[:, None]).add_(by.offset[:, None])
        out.copy_(each.exponentials.mul_(1.0 / total).mul_(factor))
    out.scatter_(1, each.targets, by.at_target[:, None].to(out.dtype))
    _clear(out, by.idle)


def _write_columns(
    logits: Tensor, targets: Tensor, stats: RowStats, total: Tensor, by: _Coefficients, temperature: float
) -> Tensor:
    if by.slope is None:
        torch_columns.scale_exponentials_(logits, by.offset / total)
    else:
        torch_columns.write_gradient(logits, stats.maximum, total, by.slope, by.offset, temperature)
    logits[torch.arange(len(targets), device=targets.device), targets] = by.at_target
    _clear(logits, by.idle)
    return logits


def _clear(logits: Tensor, idle: Tensor) -> None:
    """0 * NaN is NaN: a row that is not trained is overwritten, not multiplied away. Asking a GPU would wait for it."""
    if logits.is_cuda or bool(idle.any()):
        logits.masked_fill_(idle[:, None], 0)


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
    named = Tokens(
        advantages=advantages,
        token_weights=token_weights,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        sampler_logprobs=sampler_logprobs,
    )

    def terms(stats: RowStats, rows: slice) -> tuple[TokenStats, _Coefficients]:
        part = each_tensor(named, lambda tensor: tensor[rows])
        tokens, grad, grad_entropy = token_terms(stats.logprobs, stats.entropy, objective=objective, **part)
        return tokens, _coefficients(stats, grad, grad_entropy if objective.entropy_coef else None, temperature)

    if _by_columns(logits):
        exponentials = backward and not objective.entropy_coef
        stats, total = _finish(*torch_columns.statistics(logits, targets, temperature, exponentials))
        tokens, coefficients = terms(stats, slice(None))
        if backward:
            _write_columns(logits, targets, stats, total, coefficients, temperature)
        return tokens
    parts = []
    for each in _groups(logits, targets, temperature, inplace=True):
        tokens, coefficients = terms(each.stats, each.rows)
        if backward:
            _write_rows(logits, each, coefficients)
        parts.append(tokens)
    return concatenate(parts)


def concatenate(parts: list[TokenStats]) -> TokenStats:
    """Stats of several tiles in order; at least one."""
    return TokenStats(*map(torch.cat, zip(*parts)))
