"""Cases and their data: real numbers with peaked logits, as a trained model has them, never zeros."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.config import LossConfig, UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The objective of every case: clipped ratio, KL to a reference in the loss. All episodes have the same length, so that
# grpo's weights are 1 / N.
CONFIG = LossConfig(loss_type="grpo", beta=0.2, kl_estimator="k3")
EPISODE_TOKENS = 128
LOGIT_SPREAD = 2.0


@dataclass(frozen=True)
class Case:
    """N tokens, D hidden, V vocabulary; an op uses those it has. Written `N=1024,D=256,V=32768,fp32`."""

    dtype: str
    N: int = 1024
    D: int = 0
    V: int = 0

    @classmethod
    def parse(cls, text: str, needs: tuple[str, ...]) -> Case:
        """Raises UsageError for anything but the sizes in `needs` (N has a default) and a dtype."""
        sizes, dtype = {}, None
        for part in text.split(","):
            match = re.fullmatch(r"([NDV])=([1-9][0-9]{0,8})", part.strip())
            if match and match[1] in needs and match[1] not in sizes:
                sizes[match[1]] = int(match[2])
            elif part.strip() in DTYPES and dtype is None:
                dtype = part.strip()
            else:
                raise UsageError(f"--cases {text}: {part!r} is not one of {', '.join(f'{n}=INT' for n in needs)}, "
                                 f"{', '.join(DTYPES)}, each once")  # fmt: skip
        missing = [name for name in needs if name != "N" and name not in sizes]
        if missing or dtype is None:
            raise UsageError(f"--cases {text}: lacks {' and '.join(missing or ['a dtype'])}")
        return cls(dtype=dtype, **sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in "NDV" if getattr(self, name)) + f",{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Problem:
    """Inputs of an op. Only what it uses is there; `inputs` names the differentiable ones."""

    inputs: dict[str, Tensor]
    targets: Tensor
    """[N] int64; [0] for an op that is given log-probs."""
    tokens: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """[N] float32: advantages, token_weights, old_logprobs, ref_logprobs; for ops with any upstream gradient, that."""

    def __len__(self) -> int:
        return len(next(iter(self.tokens.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.inputs.values())).device

    @property
    def episode_tokens(self) -> int:
        """Length of each episode: the tokens are [B, T] flattened."""
        return EPISODE_TOKENS if len(self) % EPISODE_TOKENS == 0 else len(self)

    def first(self, count: int) -> Problem:
        """The first `count` tokens, a whole number of episodes or less than one, weighted 1 / count."""
        inputs = {name: tensor if name == "weight" else _leaf(tensor[:count]) for name, tensor in self.inputs.items()}
        tokens = {name: tensor[:count] for name, tensor in self.tokens.items()}
        if "token_weights" in tokens:
            tokens["token_weights"] = tokens["token_weights"] * (len(self) / count)
        return Problem(inputs, self.targets[:count], tokens)

    def double(self) -> Problem:
        """The same numbers in float64: what is computed from them counts as the truth."""
        inputs = {name: _leaf(tensor.double()) for name, tensor in self.inputs.items()}
        return Problem(inputs, self.targets, {name: tensor.double() for name, tensor in self.tokens.items()})

    def gradients(self) -> dict[str, Tensor]:
        """Take the gradients off the inputs, so that the next call finds none."""
        gradients = {f"d_{name}": tensor.grad for name, tensor in self.inputs.items() if tensor.grad is not None}
        for tensor in self.inputs.values():
            tensor.grad = None
        return gradients


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def head_problem(case: Case, device: torch.device) -> Problem:
    """hidden [N, D], weight [V, D], targets and everything the loss needs.

    A hidden state is noise plus the row of its target, scaled so that the target's log-prob is around -2 give or take
    2: the noise alone would give logits of spread 2, a log-sum-exp of log V + 2, and no gradient to test.
    """
    random: dict[str, Any] = dict(generator=_generator(device), device=device)
    weight = torch.randn(case.V, case.D, **random).div_(math.sqrt(case.D))
    targets = torch.randint(case.V, (case.N,), **random)
    lift = math.log(case.V) + LOGIT_SPREAD**2 / 2 + 2 * torch.randn(case.N, 1, **random)  # [N, 1]
    hidden = LOGIT_SPREAD * torch.randn(case.N, case.D, **random) + lift * weight[targets]
    hidden, weight = hidden.to(case.torch_dtype), weight.to(case.torch_dtype)
    logprobs = []
    for part in range(0, case.N, 256):
        logits = hidden[part : part + 256].float() @ weight.float().T
        picked = logits.gather(1, targets[part : part + 256, None])[:, 0]
        logprobs.append(picked - logits.logsumexp(-1))
    del logits
    tokens = token_values(torch.cat(logprobs).clamp(max=-1e-4), **random)
    return Problem({"hidden": _leaf(hidden), "weight": _leaf(weight)}, targets, tokens)


def token_values(logprobs: Tensor, **random: Any) -> dict[str, Tensor]:
    """Old and reference log-probs near the policy's, one advantage for each episode, equal weights: [N] float32.

    One ratio in eight is clearly outside the clip range and the others clearly inside: next to a bound it is the
    rounding of a bfloat16 logit that decides whether there is a gradient at all, and errors would tell nothing else.
    """
    num_tokens = len(logprobs)
    per_episode = EPISODE_TOKENS if num_tokens % EPISODE_TOKENS == 0 else num_tokens
    advantages = torch.randn(num_tokens // per_episode, **random).repeat_interleave(per_episode)
    gap = 0.05 * torch.randn(num_tokens, **random)
    gap += 0.5 * gap.sign() * (torch.rand(num_tokens, **random) < 1 / 8)
    return {
        "advantages": advantages,
        "token_weights": torch.full_like(advantages, 1 / num_tokens),
        "old_logprobs": (logprobs + gap).clamp(max=0),
        "ref_logprobs": (logprobs + 0.5 * torch.randn(num_tokens, **random)).clamp(max=0),
    }


def logits_problem(case: Case, device: torch.device) -> Problem:
    """logits [N, V] with a lifted target, and an upstream gradient of the log-probs."""
    random: dict[str, Any] = dict(generator=_generator(device), device=device)
    logits = LOGIT_SPREAD * torch.randn(case.N, case.V, **random)
    targets = torch.randint(case.V, (case.N,), **random)
    lift = math.log(case.V) + LOGIT_SPREAD**2 / 2 + 2 * torch.randn(case.N, 1, **random)
    logits.scatter_add_(1, targets[:, None], lift)
    upstream = torch.randn(case.N, **random) / case.N
    return Problem({"logits": _leaf(logits.to(case.torch_dtype))}, targets, {"grad_logprobs": upstream})


def token_problem(case: Case, device: torch.device) -> Problem:
    """Log-probs [N] of a policy, and everything the loss needs."""
    random: dict[str, Any] = dict(generator=_generator(device), device=device)
    logprobs = -torch.randn(case.N, **random).abs() - 1e-3
    no_targets = torch.empty(0, dtype=torch.int64, device=device)
    return Problem({"logprobs": _leaf(logprobs)}, no_targets, token_values(logprobs, **random))
