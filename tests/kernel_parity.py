"""Parity of the fused ops with the float64 truth of the same inputs, judged by what plain PyTorch reaches.

For an output or gradient x, with `truth` in float64 and `eager` in the dtype of the inputs,

    |x - truth| <= 2 |eager - truth| + a few float32 roundings of |truth|

in the norm of the whole tensor, and again for the worst element of a vector, or the worst row of a matrix relative to
that row's size (a row's gradient may be a millionth of its neighbour's). Tolerances thus come from the dtype, not from
a table.

The logits are peaked as a language model's are: the target has a log-prob between 0 and about -15. Random normal
logits over a large vocabulary have nearly no gradient, and a kernel that returns 0 would pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import grpo_kernels
from grpo.config import LossConfig
from grpo.loss import grpo_loss
from grpo_kernels.objective import CLIP_DUAL, CLIP_HIGH, CLIP_LOW, TokenStats

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The config with every term of the loss in it.
EVERYTHING = LossConfig(beta=0.1, entropy_coef=0.05, delta=1.5, mismatch="token_clip")
TINY = 16 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Problem:
    """Inputs of all five ops. N rows, D hidden, V vocabulary."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    logits: Tensor  # [N, V]
    logprobs: Tensor  # [N]
    entropy: Tensor  # [N]
    targets: Tensor  # [N] int64
    upstream: tuple[Tensor, Tensor]  # gradients of log-prob and entropy, [N] each
    tokens: dict[str, Tensor | None]  # [N] each: advantages, token_weights, old, ref and sampler log-probs
    config: LossConfig = EVERYTHING
    temperature: float = 1.0
    scale: float = 1.0  # upstream gradient of the loss
    leaves: tuple[str, ...] = field(default=("hidden", "weight", "logits", "logprobs", "entropy"))

    def double(self) -> Problem:
        def wide(tensor):
            return None if tensor is None else tensor.double()

        fields = {name: wide(getattr(self, name)) for name in self.leaves}
        upstream, tokens = tuple(map(wide, self.upstream)), {name: wide(t) for name, t in self.tokens.items()}
        return replace(self, **fields, upstream=upstream, tokens=tokens)


def peaked_head(rows: int, dim: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [N, D], weight [V, D] in float64 and targets [N].

    A row's logits peak at one token, from not at all to a probability of .9997; three rows in four have it as target.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    peak = torch.randint(vocab, (rows,), generator=generator)
    strength = torch.linspace(0.0, math.log(vocab) + 9.0, max(rows, 2), dtype=torch.float64)[:rows, None]
    direction = weight[peak] / (weight[peak] ** 2).sum(-1, keepdim=True)
    noise = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    other = torch.randint(vocab, (rows,), generator=generator)
    targets = torch.where(torch.arange(rows) % 4 == 3, other, peak)
    return (strength * direction + noise).to(DEVICE), weight.to(DEVICE), targets.to(DEVICE)


def problem(
    rows: int = 48,
    dim: int = 64,
    vocab: int = 1000,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    seed: int = 0,
    without: tuple[str, ...] = (),
    **settings,
) -> Problem:
    """Peaked inputs in `dtype`, per-token ones in float32, those named in `without` None. Row 4, 9, ... is masked."""
    hidden, weight, targets = peaked_head(rows, dim, vocab, seed)
    hidden, weight = hidden.to(dtype), weight.to(weight_dtype or dtype)
    logits = (hidden.double() @ weight.double().T).to(dtype)
    temperature = settings.get("temperature", 1.0)
    logprobs, entropy, _ = from_logits(logits.double(), targets, temperature)
    generator = torch.Generator().manual_seed(seed + 1)

    def noise(size: float) -> Tensor:
        return size * torch.randn(rows, generator=generator, dtype=torch.float64).to(DEVICE)

    # Ratios on either side of the clip range and inside it, but none so near a bound that rounding could move it over.
    gaps = torch.tensor([-0.9, -0.04, 0.0, 0.05, 0.9, 2.5], dtype=torch.float64)
    gap = gaps[torch.randint(len(gaps), (rows,), generator=generator)].to(DEVICE)
    old = logprobs - gap
    index = torch.arange(rows, device=DEVICE)
    tokens = {
        "advantages": noise(1.0) * (index % 7 != 6),
        "token_weights": (0.5 + noise(1.0).abs()) / max(rows, 1) * (index % 5 != 4),
        "old_logprobs": old,
        "ref_logprobs": logprobs + noise(0.7),
        "sampler_logprobs": old + noise(0.7),
    }
    tokens = {name: None if name in without else value.float() for name, value in tokens.items()}
    upstream = (noise(1.0).float(), noise(0.3).float())
    return Problem(hidden, weight, logits, logprobs.to(dtype), entropy.to(dtype), targets, upstream, tokens, **settings)


# --- the definition: log_softmax, autograd and grpo.loss.grpo_loss ----------------------------------------------------


def from_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, log-sum-exp, [N] each: float32 whatever the logits are, or float64."""
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1), scaled.logsumexp(-1)


def by_definition(op: str, given: Problem) -> tuple:
    """What op returns, from a GEMM in the dtype of the inputs, log_softmax and `grpo_loss`."""
    if op == "logprob_from_logits":
        return from_logits(given.logits, given.targets, given.temperature)[:2]
    if op == "grpo_token_loss":
        return loss_by_definition(given.logprobs, given.entropy, given)
    logits = given.hidden @ given.weight.to(given.hidden.dtype).T
    logprobs, entropy, lse = from_logits(logits, given.targets, given.temperature)
    if op == "linear_grpo_loss":
        return loss_by_definition(logprobs, entropy, given)
    return (logprobs, entropy, lse) if op == "linear_logprob" else (logprobs, entropy)


def loss_by_definition(logprobs: Tensor, entropy: Tensor, given: Problem) -> tuple[Tensor, TokenStats]:
    """`grpo_loss` of all tokens, and of one token at a time: a token's stats are the metrics of its own loss."""
    wide = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    logprobs, entropy = logprobs.to(wide), entropy.to(wide)
    tokens = {name: None if t is None else t.to(wide) for name, t in given.tokens.items()}
    if tokens["old_logprobs"] is None:
        tokens["old_logprobs"] = logprobs.detach()

    def loss(part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return grpo_loss(
            policy_logprobs=logprobs[part],
            entropy=entropy[part],
            episode_index=torch.arange(len(logprobs[part]), device=logprobs.device),
            config=given.config,
            **{name: None if t is None else t[part] for name, t in tokens.items()},
        )

    rows = []
    with torch.no_grad():
        for i in range(len(logprobs)):
            value, metrics = loss(slice(i, i + 1))
            trained = bool(tokens["token_weights"][i] != 0)
            bits = [("clip_low", CLIP_LOW), ("clip_high", CLIP_HIGH), ("clip_dual", CLIP_DUAL)]
            zero = value.new_zeros(())
            rows.append(
                TokenStats(
                    loss=value,
                    logprobs=logprobs[i] if trained else zero,
                    entropy=metrics["entropy"],
                    ratio=metrics["ratio"] if trained else zero + 1,
                    kl=metrics.get("kl", zero),
                    surrogate=metrics["surrogate"],
                    mismatch_weight=metrics.get("mismatch_weight", zero + 1) if trained else zero + 1,
                    clipped=sum(bit * metrics[name] for name, bit in bits if name in metrics),
                )
            )
    columns = zip(*rows) if rows else [[]] * len(TokenStats._fields)
    stats = TokenStats(*(torch.stack(c) if c else logprobs.new_empty(0) for c in map(list, columns)))
    return loss(slice(None))[0], stats


# --- running an op, and judging it ------------------------------------------------------------------------------------

LEAVES = {
    "linear_grpo_loss": ("hidden", "weight"),
    "linear_logprob": (),
    "linear_logprob_autograd": ("hidden", "weight"),
    "logprob_from_logits": ("logits",),
    "grpo_token_loss": ("logprobs", "entropy"),
}


def call(op: str, given: Problem, impl: str) -> tuple:
    """The public op on the problem's inputs."""
    function = getattr(grpo_kernels, op)
    if op == "grpo_token_loss":
        return function(given.logprobs, given.entropy, **given.tokens, config=given.config, impl=impl)
    if op == "logprob_from_logits":
        return function(given.logits, given.targets, given.temperature, impl=impl)
    if op == "linear_grpo_loss":
        return function(
            given.hidden, given.weight, given.targets, **given.tokens, config=given.config, impl=impl,
            temperature=given.temperature,
        )  # fmt: skip
    return function(given.hidden, given.weight, given.targets, given.temperature, impl=impl)


def evaluate(op: str, given: Problem, impl: str, view=lambda leaf: leaf) -> dict[str, Tensor]:
    """Every output and every gradient (d_<input>) by name. impl: as in the ops, or `definition`.

    The op gets `view(leaf)`: the same values in another memory layout.
    """
    leaves = {name: getattr(given, name).detach().clone().requires_grad_() for name in LEAVES[op]}
    given = replace(given, **{name: view(leaf) for name, leaf in leaves.items()})
    outputs = by_definition(op, given) if impl == "definition" else call(op, given, impl)
    if op in ("linear_grpo_loss", "grpo_token_loss"):
        (outputs[0] * given.scale).backward()
        results = {"loss": outputs[0]} | {f"stats.{name}": value for name, value in outputs[1]._asdict().items()}
    else:
        if leaves:
            logprobs, entropy = outputs
            grad, grad_entropy = (g.to(logprobs.dtype) for g in given.upstream)
            ((grad * logprobs).sum() + (grad_entropy * entropy).sum()).backward()
        results = dict(zip(("logprobs", "entropy", "lse"), outputs))
    # None, no way to the output at all, is a gradient of 0.
    results |= {f"d_{k}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for k, leaf in leaves.items()}
    return {name: value.detach() for name, value in results.items()}


def check(name: str, ours: Tensor, truth: Tensor, eager: Tensor, tiny: float = TINY) -> None:
    """Raises AssertionError, naming the tensor, unless the rule of the module docstring holds."""
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, not {tuple(truth.shape)}"
    assert ours.dtype == eager.dtype, f"{name}: {ours.dtype}, not {eager.dtype}"
    if name == "stats.clipped":
        assert torch.equal(ours.double(), truth.double()), f"{name}: {ours.tolist()}, not {truth.tolist()}"
        return
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    error, allowed = (ours.double() - truth).abs(), (eager.double() - truth).abs()
    assert error.norm() <= 2 * allowed.norm() + tiny * truth.norm(), (
        f"{name}: error {error.norm():.3e}, eager {allowed.norm():.3e}, size {truth.norm():.3e}"
    )
    if truth.dim() == 2:
        # Relative to each row's own size. The worst of all rows: in one row eager may be lucky tenfold.
        size = truth.norm(dim=1)
        error, allowed = (torch.where(e == 0, e, e / size) for e in (error.norm(dim=1), allowed.norm(dim=1)))
        size = 1.0
    else:
        size = truth.abs().max() if truth.numel() else 0.0
    worst, best = ((each.max().item() if each.numel() else 0.0) for each in (error, allowed))
    assert worst <= 2 * best + tiny * size, f"{name}: worst error {worst:.3e}, eager {best:.3e}, size {size:.3e}"


def judge(ours: dict[str, Tensor], truth: dict[str, Tensor], eager: dict[str, Tensor], eps: float) -> None:
    """Check every tensor. A scalar loss may meet its truth by luck in eager: it gets one rounding of the dtype more.

    For that, it must be the sum of the tokens' losses to float32.
    """
    assert ours.keys() == truth.keys()
    for name in truth:
        target = eager[name].int() if name == "stats.clipped" else eager[name]
        check(name, ours[name], truth[name], target, eps if name == "loss" else TINY)
    if "loss" in ours:
        parts = ours["stats.loss"].double()
        difference = abs(ours["loss"].double() - parts.sum())
        assert difference <= TINY * parts.abs().sum(), f"loss: {difference:.3e} from the sum of the tokens' losses"


def assert_parity(op: str, given: Problem, impl: str, ours: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Raises AssertionError unless `impl` of `op` is as near to the truth as the rule asks, in everything it gives."""
    ours = evaluate(op, given, impl) if ours is None else ours
    truth, eager = evaluate(op, given.double(), "definition"), evaluate(op, given, "definition")
    judge(ours, truth, eager, max(TINY, torch.finfo(given.hidden.dtype).eps))
    return ours
