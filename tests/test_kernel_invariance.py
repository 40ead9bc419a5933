"""What must not change a result: chunk sizes, the order of rows, the rows beside one's own, the microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_parity import DEVICE, TINY, call, evaluate, judge, peaked_head, problem

from grpo_kernels import OPS, chunking, linear_logprob, torch_rows

IMPLS = ["torch", "triton"]
by_impl = pytest.mark.parametrize("impl", IMPLS)
INTERPRETED = DEVICE.type == "cpu"  # what Triton's kernels are there
CHUNKED = ["linear_grpo_loss", "linear_logprob_autograd"]
SUMMED = ("loss", "d_weight")  # over all rows; everything else is a row's own


def rows_of(given, index: torch.Tensor):
    """The problem with the rows of `index` only, in that order."""
    named = {name: getattr(given, name)[index] for name in ("hidden", "logits", "logprobs", "entropy", "targets")}
    tokens = {name: None if t is None else t[index] for name, t in given.tokens.items()}
    return replace(given, **named, tokens=tokens, upstream=tuple(g[index] for g in given.upstream))


def judge_against_truth(op: str, given, ours) -> None:
    judge(ours, *(evaluate(op, each, "definition") for each in (given.double(), given)), TINY)


@pytest.mark.parametrize("rows", [1, 4, 5, 64])
@by_impl
@pytest.mark.parametrize("op", CHUNKED)
def test_chunk_sizes(op, impl, rows, monkeypatch):
    """13 rows in chunks of 1, 4, 5 and all: values to rounding, and each as near to the truth as it must be."""
    if impl == "triton" and INTERPRETED and op == "linear_logprob_autograd" and rows != 5:
        return  # seconds each
    given = problem(13, 16, 40)
    whole = evaluate(op, given, impl)
    seen = []

    def spy(num_rows, size, chunks=chunking.chunks):
        parts = list(chunks(num_rows, size))
        seen.append(len(parts))
        return parts

    monkeypatch.setattr(chunking, "chunks", spy)
    monkeypatch.setattr(chunking, "chunk_rows", lambda *args: rows)
    ours = evaluate(op, given, impl)
    assert set(seen) == {-(-13 // rows)}
    judge_against_truth(op, given, ours)
    for name, value in ours.items():
        torch.testing.assert_close(value, whole[name], rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("step", [1, 3])
def test_groups_of_rows_in_the_torch_row_kernels(step, monkeypatch):
    """How many rows are taken at a time changes no bit: each row is reduced by itself."""
    given = problem(13, 16, 40)
    expected = [evaluate(op, given, "torch") for op in ("logprob_from_logits", "linear_grpo_loss")]
    monkeypatch.setattr(torch_rows, "ROWS_BYTES", 4 * 40 * step)
    for op, before in zip(("logprob_from_logits", "linear_grpo_loss"), expected):
        for name, value in evaluate(op, given, "torch").items():
            assert torch.equal(value, before[name]), name


def test_chunks_cover_every_row_once():
    for rows in (1, 2, 7, 128):
        for num_rows in (0, 1, 7, 127, 129):
            parts = list(chunking.chunks(num_rows, rows))
            assert [i for part in parts for i in range(part.start, part.stop)] == list(range(num_rows))
            sizes = [part.stop - part.start for part in parts]
            assert len(sizes) == -(-num_rows // rows) and max(sizes, default=0) <= rows
    assert [part.stop - part.start for part in chunking.chunks(129, 128)] == [80, 49]  # even, in whole cache lines


@by_impl
@pytest.mark.parametrize("op", OPS)
def test_row_permutation(op, impl):
    """A row's results go where the row goes; sums over rows change by rounding."""
    given = problem(11, 16, 40)
    index = torch.randperm(11, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected, ours = evaluate(op, given, impl), evaluate(op, rows_of(given, index), impl)
    for name, value in ours.items():
        other = expected[name] if name in SUMMED else expected[name][index]
        torch.testing.assert_close(value, other, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@by_impl
@pytest.mark.parametrize("op", ["logprob_from_logits", "grpo_token_loss"])
def test_a_row_of_logits_or_log_probs_does_not_depend_on_the_others(op, impl):
    """To the bit: no sum runs over rows."""
    given = problem(11, 16, 40)
    expected = evaluate(op, given, impl)
    for index in ([3], [10, 3, 0], [4, 4, 4, 3]):
        index = torch.tensor(index, device=DEVICE)
        for name, value in evaluate(op, rows_of(given, index), impl).items():
            if name != "loss":
                assert torch.equal(value, expected[name][index]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "vocab"), [(64, 1000), (64, 32768), (96, 4099), (256, 4096), (1024, 3001)])
def test_scoring_does_not_depend_on_the_batch_to_the_bit(dim, vocab, dtype):
    """torch: a row alone, in any batch, at any place. Realistic widths, where a CPU's GEMM changes its blocking."""
    hidden, weight, targets = peaked_head(150, dim, vocab)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    expected = linear_logprob(hidden, weight, targets, impl="torch")
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    batches = [slice(0, 1), slice(149, 150), slice(3, 10), slice(60, 130), order]
    for batch in batches:
        ours = linear_logprob(hidden[batch], weight, targets[batch], impl="torch")
        for name, value, other in zip(("logprobs", "entropy", "lse"), ours, expected):
            assert torch.equal(value, other[batch]), f"{name} of {batch}"


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16])
def test_triton_scoring_does_not_depend_on_the_batch_to_the_bit(dtype):
    """Rows on either side of a tile boundary (64 tokens in float32, 128 in 16 bits), alone and together."""
    rows, vocab = (70, 70) if dtype == torch.float32 else (132, 300)
    hidden, weight, targets = peaked_head(rows, 40, vocab)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    expected = linear_logprob(hidden, weight, targets, impl="triton")
    last = rows - 1
    for batch in ([last], [0], [last, 5, 0, 66]):
        ours = linear_logprob(hidden[batch], weight, targets[batch], impl="triton")
        for name, value, other in zip(("logprobs", "entropy", "lse"), ours, expected):
            assert torch.equal(value, other[batch]), f"{name} of {batch}"


@by_impl
@pytest.mark.parametrize("op", ["linear_grpo_loss", "grpo_token_loss"])
def test_microbatches_add_up(op, impl):
    """Losses and gradients of the parts sum to those of the whole, as the weights hold the step's normaliser."""
    given = problem(13, 16, 40)
    whole = evaluate(op, given, impl)
    parts = [
        evaluate(op, rows_of(given, torch.arange(start, stop, device=DEVICE)), impl)
        for start, stop in ((0, 1), (1, 6), (6, 6), (6, 13))
    ]
    for name, value in whole.items():
        total = sum(part[name] for part in parts) if name in SUMMED else torch.cat([part[name] for part in parts])
        torch.testing.assert_close(total, value, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@by_impl
def test_temperature_is_a_division_of_the_logits(impl):
    """Powers of two, where both ways are exact: the head at temperature T is the head with its weight divided by T."""
    given = problem(11, 16, 40)
    for temperature in (0.5, 2.0):
        hot = call("logprob_from_logits", replace(given, temperature=temperature), impl)
        divided = call("logprob_from_logits", replace(given, logits=given.logits / temperature), impl)
        for value, other in zip(hot, divided):
            torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-6)
