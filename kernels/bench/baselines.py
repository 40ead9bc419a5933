"""The field: eager PyTorch, torch.compile, TRL, Liger and `F.linear_cross_entropy`, each as its users call it.

TRL and Liger are not dependencies: `make bench-baselines` installs the versions that these rows were written for. A
row whose package is missing says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import version

import torch
from harness import Arguments, Row
from problems import CONFIG, Problem
from torch import Tensor

from grpo.loss import grpo_loss

# Rows of logits that F.linear_cross_entropy and Liger hold; for the former about what the op under test holds.
CROSS_ENTROPY_ROWS = {"cpu": 128, "cuda": 1024}


def eager_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs [N] and, without a gradient, entropy [N], both in float32, from logits [N, V]."""
    logprobs = torch.log_softmax(logits.float(), -1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def loss_of(logprobs: Tensor, entropy: Tensor | None, tokens: dict[str, Tensor]) -> Tensor:
    """`grpo.loss.grpo_loss` of the benchmarks' objective."""
    episodes = torch.zeros(len(logprobs), dtype=torch.int64, device=logprobs.device)  # per-token loss: not used
    return grpo_loss(policy_logprobs=logprobs, entropy=entropy, episode_index=episodes, config=CONFIG, **tokens)[0]


def eager_loss(hidden: Tensor, weight: Tensor, targets: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    return loss_of(*eager_logprobs(hidden @ weight.T, targets), tokens)


def backward(loss: Tensor, problem: Problem) -> dict[str, Tensor]:
    """`loss.backward()`, and what there is to compare."""
    loss.backward()
    return {"loss": loss.detach(), **problem.gradients()}


def compiled(make: Callable[[Callable], Callable], eager: Callable, device: torch.device, args: Arguments) -> Row:
    """torch.compile of `eager`; `make` turns a function like `eager` into a row's `run`."""
    if device.type == "cpu" and not args.compile:
        return Row("torch.compile", missing="left out on a CPU by default, compiling takes too long; --compile")
    torch.compiler.reset()  # beyond eight shapes of one function dynamo would run eager in silence
    function = torch.compile(eager, dynamic=False, fullgraph=True)
    return Row("torch.compile", make(function), "of eager, one graph, default mode", compiles=True)


def missing_package(package: str, distribution: str, wanted: str) -> str | None:
    """Why the baseline cannot run, or None: the package, in the version these rows were written for."""
    if importlib.util.find_spec(package) is None:
        return f"{distribution} is not installed (make bench-baselines)"
    if not version(distribution).startswith(wanted):
        return f"{distribution} {version(distribution)} is installed, {wanted} is what this row was written for"
    return None


def trl_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy by TRL's chunked op, with the arguments GRPOTrainer's fused head gives it."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
    )
    return logprobs, entropy


TRL_NOTE = "ChunkedLogProbFunction with log-probs and entropy, 4096 x 32768 tiles (GRPOTrainer's setting)"


def trl_row(run: Callable[[Problem], dict[str, Tensor]], note: str = "") -> Row:
    missing = missing_package("trl", "trl", "1.16.")
    return Row("TRL", run, TRL_NOTE + note, missing, wide_accumulator=True)


def trl_loss(hidden: Tensor, weight: Tensor, targets: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    logprobs, entropy = trl_logprobs(hidden, weight, targets)
    return loss_of(logprobs, entropy.detach(), tokens)


def liger_rows(device: torch.device, args: Arguments) -> list[Row]:
    """Liger's fused-linear GRPO loss at its default chunk of one sequence; on a GPU also with all sequences at once."""
    missing = missing_package("liger_kernel", "liger-kernel", "0.8.5") or (
        None if importlib.util.find_spec("triton") else "liger-kernel needs triton, which is not installed"
    )
    compile_loss = device.type == "cuda" or args.compile
    note = f"no entropy statistics; compiled={compile_loss} (of its elementwise loss)"

    def row(name: str, all_at_once: bool) -> Row:
        def run(problem: Problem) -> dict[str, Tensor]:
            return liger_loss(problem, all_at_once, compile_loss)

        return Row(name, run, note, missing, compiles=compile_loss, wide_accumulator=True)

    rows = [row("Liger, chunk_size=1", False)]
    return rows + [row("Liger, one chunk", True)] if device.type == "cuda" else rows


def liger_loss(problem: Problem, all_at_once: bool, compile_loss: bool) -> dict[str, Tensor]:
    """The same tokens as [B, T] sequences. Its `grpo` normaliser over equal lengths is the benchmarks' 1 / N."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, weight, tokens = problem.inputs["hidden"], problem.inputs["weight"], problem.tokens
    shape = (-1, problem.episode_tokens)
    op = LigerFusedLinearGRPOLoss(
        beta=CONFIG.beta,
        compiled=compile_loss,
        use_ref_model=True,
        chunk_size=len(hidden) // problem.episode_tokens if all_at_once else 1,
        epsilon_low=CONFIG.epsilon,
        epsilon_high=CONFIG.epsilon,
        loss_type="grpo",
    )
    targets = problem.targets.view(shape)
    loss, _ = op(
        hidden.view(*shape, hidden.shape[-1]),
        weight,
        targets,
        attention_mask=torch.ones_like(targets, dtype=torch.float32),
        advantages=tokens["advantages"].view(shape)[:, 0],
        ref_per_token_logps=tokens["ref_logprobs"].view(shape),
        old_per_token_logps=tokens["old_logprobs"].view(shape),
    )
    return backward(loss, problem)


def cross_entropy_row(device: torch.device) -> Row:
    """PyTorch's own memory-saving head. Plain cross entropy: neither ratio, KL, advantages nor entropy."""
    chunk = CROSS_ENTROPY_ROWS[device.type]
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        missing = f"torch {torch.__version__} has no F.linear_cross_entropy"
    else:
        missing = None

    def run(problem: Problem) -> dict[str, Tensor]:
        # The default chunk (`auto`) is a few rows at these shapes and many times slower.
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
        hidden, weight = problem.inputs["hidden"], problem.inputs["weight"]
        loss = torch.nn.functional.linear_cross_entropy(hidden, weight, problem.targets, options=options)
        return backward(loss, problem)

    note = f"plain cross entropy, the head's part of the work only; {chunk} tokens a chunk"
    return Row("F.linear_cross_entropy", run, note, missing, truth="cross_entropy")


def cross_entropy_truth(problem: Problem) -> dict[str, Tensor]:
    hidden, weight = problem.inputs["hidden"], problem.inputs["weight"]
    return backward(torch.nn.functional.cross_entropy(hidden @ weight.T, problem.targets), problem)
