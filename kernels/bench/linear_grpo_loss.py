"""Benchmark of op 1: head, log-probs, KL and GRPO loss, forward and backward.

    python kernels/bench/linear_grpo_loss.py                    # CPU: three cases, under three minutes on two cores
    python kernels/bench/linear_grpo_loss.py --budget 900       # more rounds
    python kernels/bench/linear_grpo_loss.py --device cuda      # headline shape N=8192, D=2048, V=151936 in bfloat16

The objective is the clipped ratio with beta 0.2 and the k3 estimate of the KL; entropy is a statistic. Rows:

| row                    | what it is                                                                       |
|------------------------|----------------------------------------------------------------------------------|
| bare GEMMs             | logits = X W^T, dX = Z W, dW = Z^T X in the case's dtype: what no head can avoid |
| eager                  | log_softmax of all logits, `grpo.loss.grpo_loss`, autograd                       |
| torch.compile          | the same, compiled                                                               |
| TRL                    | its chunked log-prob op (four GEMMs), then the same loss                         |
| Liger                  | its fused-linear GRPO loss, two chunk sizes                                      |
| F.linear_cross_entropy | PyTorch's chunked head with plain cross entropy                                  |
| ours ...               | `grpo_kernels.linear_grpo_loss`, each implementation that runs on the device     |

TRL and Liger: `make bench-baselines` (downloads), or `pip install trl==1.16.* accelerate datasets liger-kernel==0.8.5`.
Memory: each row allocates what it needs, but for "logits kept", which writes them to a buffer that exists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import baselines
import harness
import torch
from harness import Arguments, Benchmark, Goal, Row, RowResult, why_not_timed
from problems import CONFIG, Case, Problem, head_problem
from torch import Tensor

from grpo_kernels import OPS, linear_grpo_loss, reference

CASES = {
    "cpu": ("N=1024,D=1024,V=151936,fp32", "N=1024,D=256,V=32768,fp32", "N=1024,D=1024,V=151936,bf16"),
    "smoke": ("N=256,D=32,V=1000,fp32",),
    "cuda": ("N=8192,D=2048,V=151936,bf16", "N=8192,D=1024,V=151936,bf16", "N=4096,D=4096,V=128256,bf16"),
}
# At most this many times the bare GEMMs, in the CPU's cases, and this much memory beyond dX and dW.
CPU_RATIO = {("fp32", 1024, 151936): 1.15, ("fp32", 256, 32768): 1.2, ("bf16", 1024, 151936): 1.2}
CPU_EXTRA_MB = 85


def bare_gemms(case: Case, device: torch.device, gemms: int = 3, keep_logits: bool = False) -> Row:
    """The floor: `gemms` is 3, or 1 for an op without gradients. dX and dW are allocated anew, as in every row.

    `keep_logits`: the [N, V] logits go to a buffer that exists already, which spares the first touch of that memory but
    holds it all the time; a second floor, below the one that allocates them like every other result.
    """
    shape = (case.N, case.V)
    buffer = torch.ones(shape, dtype=case.torch_dtype, device=device) if keep_logits else None  # touched, not reserved

    def run(problem: Problem) -> dict[str, Tensor]:
        hidden, weight = problem.inputs["hidden"].detach(), problem.inputs["weight"].detach()
        z = torch.mm(hidden, weight.T, out=None if buffer is None else buffer[: len(hidden)])
        return {"d_hidden": z @ weight, "d_weight": z.T @ hidden} if gemms == 3 else {}

    name = "bare GEMMs" if gemms == 3 else "bare GEMM"
    if keep_logits:
        return Row(f"{name}, logits kept", run, kind="floor", truth=None)
    return Row(name, run, kind="floor", truth=None)


def ours(impl: str, device: torch.device) -> Row:
    def run(problem: Problem) -> dict[str, Tensor]:
        hidden, weight = problem.inputs["hidden"], problem.inputs["weight"]
        tokens: dict[str, Any] = problem.tokens
        loss, _ = linear_grpo_loss(hidden, weight, problem.targets, config=CONFIG, impl=impl, **tokens)
        return baselines.backward(loss, problem)

    missing = why_not_timed("linear_grpo_loss", impl, device)
    return Row(f"ours {impl}", run, missing=missing, kind="ours", wide_accumulator=True)


def with_loss(loss_of: Callable[..., Tensor]) -> Callable[[Problem], dict[str, Tensor]]:
    """A row's `run` from a function of hidden, weight, targets and tokens."""

    def run(problem: Problem) -> dict[str, Tensor]:
        loss = loss_of(problem.inputs["hidden"], problem.inputs["weight"], problem.targets, problem.tokens)
        return baselines.backward(loss, problem)

    return run


def rows(case: Case, device: torch.device, args: Arguments) -> list[Row]:
    return [
        bare_gemms(case, device),
        bare_gemms(case, device, keep_logits=True),
        Row("eager", with_loss(baselines.eager_loss)),
        baselines.compiled(with_loss, baselines.eager_loss, device, args),
        baselines.trl_row(with_loss(baselines.trl_loss), ", then grpo.loss.grpo_loss"),
        *baselines.liger_rows(device, args),
        baselines.cross_entropy_row(device),
        *(ours(impl, device) for impl in OPS["linear_grpo_loss"] if impl != "reference"),
    ]


def truths(problem: Problem) -> dict[str, dict[str, Tensor]]:
    hidden, weight = problem.inputs["hidden"], problem.inputs["weight"]
    tokens: dict[str, Any] = problem.tokens
    loss, stats = reference.linear_grpo_loss(hidden, weight, problem.targets, config=CONFIG, **tokens)
    op = baselines.backward(loss, problem) | {"loss_scale": stats.loss.abs().sum()}
    del loss, stats
    return {"op": op, "cross_entropy": baselines.cross_entropy_truth(problem)}


def outputs(case: Case) -> tuple[int, int]:
    """Bytes of dX and dW, and of dW's float32 accumulator where dW is narrower."""
    size = case.torch_dtype.itemsize
    return (case.N + case.V) * case.D * size, case.V * case.D * 4 * (size < 4)


def goals(case: Case, results: dict[str, RowResult]) -> list[Goal]:
    found = []
    limit = CPU_RATIO.get((case.dtype, case.D, case.V))
    mine, eager, trl = results.get("ours torch"), results.get("eager"), results.get("TRL")
    if limit and mine and mine.ratio_to_floor and "ours triton" not in results:
        found.append(Goal("ours torch / bare GEMMs", limit, mine.ratio_to_floor, mine.ratio_to_floor <= limit))
        if mine.extra_mb is not None:
            found.append(Goal("ours torch, extra MB", CPU_EXTRA_MB, mine.extra_mb, mine.extra_mb <= CPU_EXTRA_MB))
    for name, result in results.items():
        if name in ("ours triton", "ours cuda"):
            if result.ratio_to_floor:
                ratio = result.ratio_to_floor
                found.append(Goal(f"{name} / bare GEMMs", 1 / 0.85, ratio, ratio <= 1 / 0.85))
            if trl and trl.ms and trl.peak_mb and result.ms is not None and result.peak_mb is not None:
                found.append(Goal(f"{name} / TRL, time", 0.8, result.ms / trl.ms, result.ms / trl.ms <= 0.8))
                memory = result.peak_mb / trl.peak_mb
                found.append(Goal(f"{name} / TRL, peak memory", 1, memory, memory <= 1))
        if name.startswith("ours") and eager:
            for gradient in ("d_hidden", "d_weight"):
                ratio = result.errors[gradient] / max(eager.errors[gradient], 1e-300)
                # In 16 bits nearly all of the error is that of the logits' rounding, which is eager's as well.
                found.append(Goal(f"{name} / eager, error of {gradient}", 1.01, ratio, ratio <= 1.01))
    return found


BENCHMARK = Benchmark(
    name="linear_grpo_loss",
    title="linear_grpo_loss: head, log-probs, KL and loss, forward + backward",
    needs=("N", "D", "V"),
    cases=CASES,
    problem=head_problem,
    rows=rows,
    truths=truths,
    flops=lambda case: 6.0 * case.N * case.D * case.V,
    outputs=outputs,
    goals=goals,
)

if __name__ == "__main__":
    harness.main([BENCHMARK], sys.argv[1:])
