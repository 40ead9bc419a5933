"""Sampling tokens without a generator: each token's randomness is a pure function of where the token stands.

A counter-based hash maps (run seed, step, scenario, member, turn, position) to one uniform number, and inverse-CDF
sampling maps that number to a token. So a result depends neither on which other episodes are in the batch nor on the
order in which they are computed (beyond the rounding of the forward), members of a group differ, a step differs from
the next, and a resumed run repeats what it would have sampled.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"),
applied once per field. It is not cryptographic and need not be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: SplitMix64's increment
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class SamplingConfig:
    """Distribution to sample from. `temperature` 0 is greedy, for evaluation only; `seed` None keeps the engine's."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number >= 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, elementwise on uint64: a bijection in which each input bit changes half the output."""
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLY_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLY_2
    return state ^ (state >> np.uint64(31))


def random_stream(*fields: int) -> np.ndarray:
    """Hash integers, in order, to the identity of a random stream: uint64 array of shape [1].

    An engine calls it once per turn, with (seed, step, scenario, member, turn).
    """
    state = np.zeros(1, dtype=np.uint64)
    for field in fields:
        # The increment keeps a field of 0 from being the fixed point 0 of the finaliser.
        state = _mix(state + _GOLDEN + _mix(np.array([field & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN))
    return state


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One uniform number per (stream, position).

    Args:
        streams: uint64 [n], from `random_stream`.
        positions: non-negative integers [n], the completion position of the token to be sampled.

    Returns:
        float64 [n], strictly between 0 and 1: 52 random bits and a half, so that neither end is reached.
    """
    bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


BLOCK = 512  # columns
FEW_LOGITS = 1 << 20  # up to so many on a CPU, the same is compiled: 25 small operations of PyTorch take 0.5 ms


def sample(logits: torch.Tensor, uniform: torch.Tensor, config: SamplingConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution, in vocabulary order.

    Args:
        logits: [n, V], any float dtype; -inf marks a token that cannot occur.
        uniform: [n] float64 in (0, 1), ignored when greedy.

    Returns:
        tokens [n] int64, and log-probs [n] float32 in nats under the distribution that was sampled from: after
        temperature and top-p. Greedy decoding has no such distribution; its log-probs are those at temperature 1.
    """
    logits = logits.float()
    if config.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
    inverse_temperature = 1.0 / config.temperature
    if config.top_p < 1:
        logits, inverse_temperature = _nucleus(torch.log_softmax(logits * inverse_temperature, -1), config.top_p), 1.0

    if logits.device.type == "cpu" and logits.numel() <= FEW_LOGITS:
        from grpo import compiled  # here, as numba takes half a second to import

        tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        arrays = (each.numpy() for each in (tokens, logprobs))
        compiled.draw(logits.detach().contiguous().numpy(), uniform.numpy(), inverse_temperature, BLOCK, *arrays)
        return tokens, logprobs

    # One buffer of V columns: masses e^((z - max) / T), padded with zeros to whole blocks. A float32 running sum over
    # 150k tokens stalls (terms below its rounding vanish); a float64 copy of everything would cost most of a step. So
    # blocks are summed first, float64 runs over the block sums, and then over the one block that is hit.
    num_rows, vocab = logits.shape
    maximum = logits.amax(-1, keepdim=True)  # [n, 1]
    masses = logits.new_zeros(num_rows, -(-vocab // BLOCK) * BLOCK)
    torch.sub(logits, maximum, out=masses[:, :vocab]).mul_(inverse_temperature).exp_()
    blocks = masses.view(num_rows, -1, BLOCK)
    cumulative = blocks.sum(-1).double().cumsum(-1)  # [n, V / BLOCK]
    total = cumulative[:, -1:]
    # The first block whose cumulative mass exceeds the target. target < total, because uniform is below 1 by more than
    # half a rounding step. Only NaN logits reach the clamp: their log-prob is NaN then, which the engine reports.
    target = uniform[:, None] * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)  # [n, 1]
    mass = cumulative.gather(1, block)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    # The same within the block, whose float64 sum differs from its float32 sum by rounding: hence a share of it, below
    # 1 again. A token of probability 0 does not raise the sum, so it is never the first to exceed a target.
    inner = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)  # [n, BLOCK]
    share = (target - before) / (mass - before)
    token = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    tokens = (block * BLOCK + token).clamp_(max=vocab - 1)  # [n, 1]
    logprobs = (logits.gather(1, tokens) - maximum) * inverse_temperature - total.log().float()
    return tokens[:, 0], logprobs[:, 0]


def _nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most probable tokens whose mass reaches `top_p` (at least one), renormalised: [n, V]."""
    ordered, order = torch.sort(logprobs, stable=True, dim=-1, descending=True)
    mass = ordered.double().exp().cumsum(-1)
    outside = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], -1) >= top_p  # mass before a token is enough
    kept = logprobs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return kept - torch.logsumexp(kept, -1, keepdim=True)
