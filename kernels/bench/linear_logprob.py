"""Benchmarks of ops 2 and 3: log-prob and entropy straight from hidden states, for scoring and with a backward pass.

    python kernels/bench/linear_logprob.py [--device cuda] [--cases N=1024,D=256,V=32768,fp32] [--budget SECONDS]

Op 2 (`linear_logprob`, no gradients) is one GEMM; op 3 (`linear_logprob_autograd`) computes the logits twice: four
GEMMs, of which three count as useful. Baselines are those of `linear_grpo_loss.py` that return log-probs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import baselines
import harness
import torch
from harness import Arguments, Benchmark, Row, why_not_timed
from linear_grpo_loss import bare_gemms, outputs
from problems import Case, Problem, head_problem
from torch import Tensor

from grpo_kernels import OPS, linear_logprob, linear_logprob_autograd, reference

CASES = {
    "cpu": ("N=1024,D=256,V=32768,fp32", "N=1024,D=256,V=32768,bf16"),
    "smoke": ("N=96,D=32,V=1000,fp32",),
    "cuda": ("N=8192,D=2048,V=151936,bf16", "N=8192,D=1024,V=151936,bf16"),
}


def eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return baselines.eager_logprobs(hidden @ weight.T, targets)


def scoring(op: Callable[..., tuple[Tensor, ...]]) -> Callable[[Problem], dict[str, Tensor]]:
    """A row's `run` from an op on hidden, weight and targets, without gradients."""

    @torch.no_grad()
    def run(problem: Problem) -> dict[str, Tensor]:
        logprobs, entropy, *_ = op(problem.inputs["hidden"], problem.inputs["weight"], problem.targets)
        return {"logprobs": logprobs, "entropy": entropy}

    return run


def with_backward(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Problem], dict[str, Tensor]]:
    """The same with a backward pass; the upstream gradient is that of a policy gradient."""

    def run(problem: Problem) -> dict[str, Tensor]:
        logprobs, entropy = op(problem.inputs["hidden"], problem.inputs["weight"], problem.targets)
        logprobs.backward(problem.tokens["advantages"].to(logprobs.dtype) * problem.tokens["token_weights"])
        return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), **problem.gradients()}

    return run


def ours(op: str, function: Callable, make: Callable, device: torch.device) -> list[Row]:
    """One row for each implementation."""

    def row(impl: str) -> Row:
        run = make(lambda *inputs: function(*inputs, impl=impl))
        return Row(f"ours {impl}", run, missing=why_not_timed(op, impl, device), kind="ours", wide_accumulator=True)

    return [row(impl) for impl in OPS[op] if impl != "reference"]


def scoring_rows(case: Case, device: torch.device, args: Arguments) -> list[Row]:
    return [
        bare_gemms(case, device, 1),
        Row("eager", scoring(eager)),
        baselines.compiled(scoring, eager, device, args),
        baselines.trl_row(scoring(baselines.trl_logprobs)),
        *ours("linear_logprob", linear_logprob, scoring, device),
    ]


def autograd_rows(case: Case, device: torch.device, args: Arguments) -> list[Row]:
    return [
        bare_gemms(case, device, 3),
        Row("eager", with_backward(eager)),
        baselines.compiled(with_backward, eager, device, args),
        baselines.trl_row(with_backward(baselines.trl_logprobs)),
        *ours("linear_logprob_autograd", linear_logprob_autograd, with_backward, device),
    ]


SCORING = Benchmark(
    name="linear_logprob",
    title="linear_logprob: log-prob and entropy from hidden states, no gradients",
    needs=("N", "D", "V"),
    cases=CASES,
    problem=head_problem,
    rows=scoring_rows,
    truths=lambda problem: {"op": scoring(reference.linear_logprob)(problem)},
    flops=lambda case: 2.0 * case.N * case.D * case.V,
)
AUTOGRAD = Benchmark(
    name="linear_logprob_autograd",
    title="linear_logprob_autograd: log-prob and entropy from hidden states, forward + backward",
    needs=("N", "D", "V"),
    cases=CASES,
    problem=head_problem,
    rows=autograd_rows,
    truths=lambda problem: {"op": with_backward(reference.linear_logprob_autograd)(problem)},
    flops=lambda case: 6.0 * case.N * case.D * case.V,
    outputs=outputs,
)

if __name__ == "__main__":
    harness.main([SCORING, AUTOGRAD], sys.argv[1:])
