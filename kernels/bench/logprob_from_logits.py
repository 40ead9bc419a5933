"""Benchmark of op 4: log-prob and entropy from logits that exist, forward and backward.

    python kernels/bench/logprob_from_logits.py [--device cuda] [--cases N=256,V=151936,fp32] [--budget SECONDS]

Bound by memory: useful traffic is one read of the logits forward, one read and one write backward. The floor row does
just that (a maximum, then a copy).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import baselines
import harness
import torch
from harness import Arguments, Benchmark, Row, why_not_timed
from problems import Case, Problem, logits_problem
from torch import Tensor

from grpo_kernels import OPS, logprob_from_logits, reference

CASES = {
    "cpu": ("N=256,V=151936,fp32", "N=1024,V=32768,fp32", "N=256,V=151936,bf16"),
    "smoke": ("N=96,V=1000,fp32",),
    "cuda": ("N=8192,V=151936,bf16", "N=4096,V=151936,fp32", "N=8192,V=32768,bf16"),
}


def with_backward(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Problem], dict[str, Tensor]]:
    """A row's `run` from an op on logits and targets."""

    def run(problem: Problem) -> dict[str, Tensor]:
        logprobs, entropy = op(problem.inputs["logits"], problem.targets)
        upstream = problem.tokens["grad_logprobs"].to(logprobs.dtype)
        # Not backward(): a leaf's gradient is copied where the op still holds it, which no model's logits would be.
        gradient = torch.autograd.grad(logprobs, problem.inputs["logits"], upstream)[0]
        return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "d_logits": gradient}

    return run


def bare_traffic(problem: Problem) -> dict[str, Tensor]:
    logits = problem.inputs["logits"].detach()
    return {"maximum": logits.amax(-1), "copy": logits.clone()}


def trl(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As TRL 1.16 treats logits that a model returned: log-probs with, entropy without a gradient."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    with torch.no_grad():
        entropy = entropy_from_logits(logits)
    return selective_log_softmax(logits, targets), entropy


def ours(impl: str, inplace: bool, device: torch.device) -> Row:
    op = functools.partial(logprob_from_logits, inplace_backward=inplace, impl=impl)
    missing = why_not_timed("logprob_from_logits", impl, device)
    name = f"ours {impl}" + (", in place" if inplace else "")
    return Row(name, with_backward(op), missing=missing, kind="ours", fresh_inputs=inplace)


def rows(case: Case, device: torch.device, args: Arguments) -> list[Row]:
    return [
        Row("bare traffic", bare_traffic, kind="floor", truth=None),
        Row("eager", with_backward(baselines.eager_logprobs)),
        baselines.compiled(with_backward, baselines.eager_logprobs, device, args),
        Row("TRL", with_backward(trl), "selective_log_softmax, entropy_from_logits",
            baselines.missing_package("trl", "trl", "1.16.")),
        *(ours(impl, inplace, device) for impl in OPS["logprob_from_logits"] if impl != "reference"
          for inplace in (False, True)),
    ]  # fmt: skip


BENCHMARK = Benchmark(
    name="logprob_from_logits",
    title="logprob_from_logits: log-prob and entropy from logits, forward + backward",
    needs=("N", "V"),
    cases=CASES,
    problem=logits_problem,
    rows=rows,
    truths=lambda problem: {"op": with_backward(reference.logprob_from_logits)(problem)},
    bytes=lambda case: 3.0 * case.N * case.V * case.torch_dtype.itemsize,
    outputs=lambda case: (case.N * case.V * case.torch_dtype.itemsize, 0),
)

if __name__ == "__main__":
    harness.main([BENCHMARK], sys.argv[1:])
