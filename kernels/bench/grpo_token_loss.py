"""Benchmark of op 5: the elementwise GRPO loss on log-probs, forward and backward.

    python kernels/bench/grpo_token_loss.py [--device cuda] [--cases N=8192,fp32] [--budget SECONDS]

Tiny: on a GPU it costs the latency of its launches. Useful traffic is five reads and one write of [N] (log-prob, old,
reference, advantage, weight; gradient); the floor row copies as many bytes. Statistics come on top, for all but the
floor row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import baselines
import harness
import torch
from harness import Arguments, Benchmark, Row, why_not_timed
from problems import CONFIG, Case, Problem, token_problem
from torch import Tensor

from grpo_kernels import OPS, grpo_token_loss, reference

SIZES = ("N=8192,fp32", "N=262144,fp32")
CASES = {"cpu": SIZES, "cuda": SIZES, "smoke": ("N=96,fp32",)}


def eager(logprobs: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    return baselines.loss_of(logprobs, None, tokens)


def with_loss(loss_of: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Callable[[Problem], dict[str, Tensor]]:
    """A row's `run` from a function of log-probs and tokens."""

    def run(problem: Problem) -> dict[str, Tensor]:
        return baselines.backward(loss_of(problem.inputs["logprobs"], problem.tokens), problem)

    return run


def bare_traffic(problem: Problem) -> dict[str, Tensor]:
    """Three copies: three reads and three writes of [N]."""
    return {name: problem.tokens[name].clone() for name in ("advantages", "old_logprobs", "ref_logprobs")}


def ours(impl: str, device: torch.device) -> Row:
    run = with_loss(lambda logprobs, tokens: grpo_token_loss(logprobs, config=CONFIG, impl=impl, **tokens)[0])
    return Row(f"ours {impl}", run, missing=why_not_timed("grpo_token_loss", impl, device), kind="ours")


def rows(case: Case, device: torch.device, args: Arguments) -> list[Row]:
    return [
        Row("bare traffic", bare_traffic, kind="floor", truth=None),
        Row("eager", with_loss(eager)),
        baselines.compiled(with_loss, eager, device, args),
        *(ours(impl, device) for impl in OPS["grpo_token_loss"] if impl != "reference"),
    ]


def truths(problem: Problem) -> dict[str, dict[str, Tensor]]:
    loss, stats = reference.grpo_token_loss(problem.inputs["logprobs"], None, config=CONFIG, **problem.tokens)
    return {"op": baselines.backward(loss, problem) | {"loss_scale": stats.loss.abs().sum()}}


BENCHMARK = Benchmark(
    name="grpo_token_loss",
    title="grpo_token_loss: the loss on log-probs, forward + backward",
    needs=("N",),
    cases=CASES,
    problem=token_problem,
    rows=rows,
    truths=truths,
    bytes=lambda case: 6.0 * case.N * case.torch_dtype.itemsize,
    outputs=lambda case: (case.N * case.torch_dtype.itemsize, 0),
)

if __name__ == "__main__":
    harness.main([BENCHMARK], sys.argv[1:])
