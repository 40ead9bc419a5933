"""What is compiled for the sampler on a CPU, against the same in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from grpo import compiled
from grpo.engines.vllm_numba import hide_llvmlite


def exponentials(x: np.ndarray) -> np.ndarray:
    found = x.copy()
    compiled._exponentials(found, np.empty(len(x), np.int32))
    return found


def test_exponentials_to_float32s_rounding():
    x = np.concatenate([np.linspace(-87, 88, 200_001), -np.logspace(-8, 0, 1000), [0.0]]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(exponentials(x) / expected - 1) < 1e-7 + 8e-8 * np.abs(x)).all()


def test_exponentials_of_what_is_no_ordinary_number():
    found = exponentials(np.array([-np.inf, -1e30, -89.0, np.nan, 0.0], dtype=np.float32))
    assert found[:3].tolist() == [0, 0, 0] and math.isnan(found[3]) and found[4] == 1


@pytest.mark.parametrize("with_change", [True, False])
def test_norm_of_a_sum(with_change):
    torch.manual_seed(0)
    x, change, weight = torch.randn(7, 96), torch.randn(7, 96), torch.rand(96) + 0.5
    total = x + change if with_change else x.clone()
    expected = F.rms_norm(total.double(), (96,), weight.double(), 1e-6)
    normed = torch.empty_like(x)
    compiled.add_norm(x.numpy(), change.numpy()[: len(x) * with_change], weight.numpy(), 1e-6, normed.numpy())
    assert torch.equal(x, total)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-6, atol=1e-6)


def test_gate():
    gate = torch.cat([torch.randn(3, 50) * 3, torch.tensor([[-200.0, -88.5, 88.5, 200.0, 0.0] * 10])])
    up = torch.randn_like(gate)
    expected = F.silu(gate.double()) * up.double()
    compiled.gated(gate.numpy(), up.numpy())
    torch.testing.assert_close(gate.double(), expected, rtol=1e-6, atol=1e-6)


def pools(slots: int, heads: int, capacity: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(slots, heads, capacity, d), torch.randn(slots, heads, capacity, d)


@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_normed_rotated_and_written(normed):
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    weights = [torch.rand(16) + 0.5 if normed else torch.empty(0) for _ in range(2)]
    angles = torch.randn(5, 8).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    rows, positions = np.array([0, 0, 1, 2, 1]), np.array([3, 4, 0, 7, 1])

    def rotated(x, weight):
        x = x.double()
        if normed:
            x = F.rms_norm(x, (16,), weight.double(), 1e-6)
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    expected = [rotated(x, weight) for x, weight in zip((query, key), weights)]
    keys, values = pools(3, 2, 8, 16)
    untouched = keys.clone()
    inputs, norms = (x.numpy() for x in (query, key, value)), (w.numpy() for w in weights)
    compiled.write(*inputs, *norms, 1e-6, cos.numpy(), sin.numpy(), rows, positions, keys.numpy(), values.numpy())
    torch.testing.assert_close(query.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(keys[rows, :, positions].double(), expected[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(values[rows, :, positions], value)
    keys[rows, :, positions] = untouched[rows, :, positions]
    assert torch.equal(keys, untouched)


def attend(query, keys, values, rows, positions, twins):
    out = torch.empty_like(query)
    arrays = (x.numpy() for x in (query, keys, values))
    compiled.attend(*arrays, np.array(rows), np.array(positions), np.array(twins), query.shape[-1] ** -0.5, out.numpy())
    return out


@pytest.mark.parametrize("heads, kv_heads, d", [(4, 4, 32), (6, 2, 16), (4, 1, 20)])
def test_attention_of_ragged_rows(heads, kv_heads, d):
    """Grouped queries, rows of all lengths, several tokens of a row; what lies behind a position is never read."""
    torch.manual_seed(0)
    keys, values = pools(3, kv_heads, 64, d)
    rows, positions = [0, 1, 1, 2, 0], [0, 40, 41, 63, 5]
    query = torch.randn(5, heads, d) * 3
    found = attend(query, keys, values, rows, positions, [(0, 0)] * 3)
    for i, (row, position) in enumerate(zip(rows, positions)):
        k, v = (x[row, :, : position + 1].double().repeat_interleave(heads // kv_heads, 0) for x in (keys, values))
        expected = F.scaled_dot_product_attention(query[i, :, None].double(), k, v)[:, 0]
        torch.testing.assert_close(found[i].double(), expected, rtol=1e-5, atol=1e-5)


def test_what_a_row_has_in_common_is_read_at_its_twin():
    torch.manual_seed(0)
    keys, values = pools(2, 2, 32, 16)
    query = torch.randn(2, 2, 16)
    for pool in (keys, values):
        pool[1, :, :20] = pool[0, :, :20]
    expected = attend(query, keys, values, [1, 1], [10, 31], [(0, 0), (1, 0)])
    for pool in (keys, values):
        pool[1, :, :20] = torch.nan
    found = attend(query, keys, values, [1, 1], [10, 31], [(0, 0), (0, 20)])
    assert torch.equal(found, expected)
    assert attend(query, keys, values, [1, 1], [10, 31], [(0, 0), (1, 0)]).isnan().all()  # and NaN goes through


def test_where_nothing_can_be_written_it_is_compiled_without_a_cache(monkeypatch):
    njit = compiled.njit

    def nowhere(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(compiled, "njit", nowhere)
    assert compiled.compiled(lambda x: x + 1)(2) == 3


def test_llvmlite_is_hidden_from_vllm_and_still_compiles():
    """What vLLM's start does to each object of each module, once numba is imported."""
    from llvmlite.binding import ffi

    hide_llvmlite()
    hide_llvmlite()
    values = [value for value in vars(ffi).values() if hasattr(value, "__dict__")]
    assert values and all(vars(value).get("kernel") is None for value in values)
    assert compiled.compiled(lambda x: 2 * x + 1)(3) == 7
