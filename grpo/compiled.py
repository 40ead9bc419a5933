"""What stands between the products of a Llama-like layer, for few tokens on a CPU in float32, compiled by numba.

A product of 50 tokens takes some 20 microseconds, and each of PyTorch's small operations around it nearly as long, so
that norms, rotation, the cache and attention over a few hundred keys were most of a forward. Here they are four
functions, and drawing a token from logits is a fifth. Arrays are C-contiguous; N tokens, width D, H query heads on H_kv
key heads of d.

NaN goes through: `fastmath` leaves out the flags that assume there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit


def compiled(function: Callable[..., Any]) -> Any:
    """Compiled at its first call, and kept for other processes where there is a folder for it. The first call raises
    OSError where the disk of that folder is full."""
    options: Any = dict(nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"})
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither this folder nor the user's can be written
        return njit(**options)(function)


@compiled
def add_norm(x, change, weight, eps, normed):
    """x += change, then normed = weight * x / rms(x). x, change, normed [N, D], weight [D]; `change` may be empty."""
    width = x.shape[1]
    for i in range(len(x)):
        row, out = x[i], normed[i]
        if len(change):
            for j in range(width):
                row[j] += change[i, j]
        total = np.float32(0)
        for j in range(width):
            total += row[j] * row[j]
        inverse = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(eps))
        for j in range(width):
            out[j] = weight[j] * (row[j] * inverse)


@compiled
def _norm_and_rotate(x, weight, eps, cos, sin, out):
    """One head: out = rotated(norm(x)), [d], which may be x itself; an empty weight: no norm."""
    d = len(x)
    half = d // 2
    scale = np.float32(1)
    if len(weight):
        total = np.float32(0)
        for j in range(d):
            total += x[j] * x[j]
        scale = np.float32(1) / np.sqrt(total / np.float32(d) + np.float32(eps))
    for j in range(half):
        a, b = x[j] * scale, x[j + half] * scale
        if len(weight):
            a, b = a * weight[j], b * weight[j + half]
        out[j] = a * cos[j] - b * sin[j]
        out[j + half] = b * cos[j + half] + a * sin[j + half]


@compiled
def write(query, key, value, query_weight, key_weight, eps, cos, sin, rows, positions, keys, values):
    """Norm and rotate queries (in place) and keys, and write keys and values to their slots.

    query [N, H, d], key and value [N, H_kv, d], cos and sin [N, d], keys and values [slots, H_kv, capacity, d]
    """
    for i in range(len(query)):
        row, position = rows[i], positions[i]
        for h in range(query.shape[1]):
            _norm_and_rotate(query[i, h], query_weight, eps, cos[i], sin[i], query[i, h])
        for h in range(key.shape[1]):
            _norm_and_rotate(key[i, h], key_weight, eps, cos[i], sin[i], keys[row, h, position])
            values[row, h, position] = value[i, h]


LOG2_E = np.float32(math.log2(math.e))
# 2^f for |f| <= 1/2: ln(2)^n / n!, to float32's rounding.
C1, C2, C3, C4, C5, C6, C7 = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 8))


@compiled
def _exponentials(x, powers):
    """x = e^x for x <= 88, [n], as 2^n 2^f, in a form that a compiler makes vectors of. powers: int32 [n], overwritten.

    From about -87.7 down it is 0, of NaN NaN. Above, its relative error is below 1e-7 + 8e-8 |x|: x log2(e) is rounded.
    """
    factors = powers.view(np.float32)
    for j in range(len(x)):
        t = max(x[j] * LOG2_E, np.float32(-127))
        n = np.rint(t)
        f = t - n
        powers[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
        power = np.float32(1) + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * (C5 + f * (C6 + f * C7))))))
        x[j] = power if x[j] == x[j] else x[j]
    for j in range(len(x)):
        x[j] *= factors[j]


@compiled
def gated(gate, up):
    """gate = silu(gate) * up, [N, D]."""
    width = gate.shape[1]
    e, powers = np.empty(width, np.float32), np.empty(width, np.int32)
    for i in range(len(gate)):
        g, u = gate[i], up[i]
        for j in range(width):
            e[j] = min(-g[j], np.float32(88))
        _exponentials(e, powers)
        for j in range(width):
            g[j] = g[j] / (np.float32(1) + e[j]) * u[j]


@compiled
def attend(query, keys, values, rows, positions, twins, scaling, out):
    """Attention of each token over its own slot up to its own position.

    query and out [N, H, d], keys and values [slots, H_kv, capacity, d], twins [slots, 2]: what a row has in common with
    its twin is read there, as by the twin itself, and so comes from the processor's cache.
    """
    heads, kv_heads, d = query.shape[1], keys.shape[1], query.shape[2]
    longest = positions.max() + 1
    scores, powers = np.empty(longest, np.float32), np.empty(longest, np.int32)
    accumulator = np.empty(d, np.float32)
    for i in range(len(query)):
        row, length = rows[i], positions[i] + 1
        twin, common = twins[row]
        for h in range(heads):
            q, kv = query[i, h], h * kv_heads // heads
            maximum = np.float32(-np.inf)
            for j in range(length):
                k = keys[twin if j < common else row, kv, j]
                score = np.float32(0)
                for c in range(d):
                    score += q[c] * k[c]
                scores[j] = score * np.float32(scaling)
                maximum = max(maximum, scores[j])
            for j in range(length):
                scores[j] -= maximum
            _exponentials(scores[:length], powers[:length])
            accumulator[:] = 0
            total = np.float32(0)
            for j in range(length):
                total += scores[j]
                v, p = values[twin if j < common else row, kv, j], scores[j]
                for c in range(d):
                    accumulator[c] += p * v[c]
            for c in range(d):
                out[i, h, c] = accumulator[c] / total


@compiled
def draw(logits, uniform, inverse_temperature, block_size, tokens, logprobs):
    """`grpo.sampling.sample`'s inversion: logits [n, V] float32, uniform [n] float64 -> tokens [n] int64 and logprobs
    [n] float32."""
    vocab = logits.shape[1]
    masses, powers = np.empty(vocab, np.float32), np.empty(vocab, np.int32)
    blocks = np.empty(-(-vocab // block_size))
    for i in range(len(logits)):
        row = logits[i]
        maximum = row.max()
        for j in range(vocab):
            masses[j] = (row[j] - maximum) * np.float32(inverse_temperature)
        _exponentials(masses, powers)
        last = 0  # block with some mass
        for b in range(len(blocks)):
            total = 0.0  # float64: what rounding adds to a sum would all go to the block's last token
            for j in range(b * block_size, min((b + 1) * block_size, vocab)):
                total += masses[j]
            blocks[b] = total
            if total > 0:
                last = b
        whole = blocks.sum()
        rest = uniform[i] * whole
        block = 0
        while block < last and rest >= blocks[block]:
            rest -= blocks[block]
            block += 1
        token = block * block_size
        for j in range(token, min(token + block_size, vocab)):
            if masses[j] > 0:
                token = j
                rest -= masses[j]
                if rest < 0:
                    break
        tokens[i] = token
        logprobs[i] = (row[token] - maximum) * np.float32(inverse_temperature) - np.float32(np.log(whole))
