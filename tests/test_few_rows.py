"""Linear layers with few rows: the same numbers as F.linear, and modules left as they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from grpo.engines import few_rows
from grpo.engines.few_rows import linear


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 11, 12, 13, 48, 49])
@pytest.mark.parametrize("inputs", [96, few_rows.LONG + 8])
def test_equals_a_plain_linear_layer(monkeypatch, rows, inputs):
    monkeypatch.setattr(few_rows, "BLOCK_BYTES", 4 * inputs * 7)  # several blocks, the last one shorter
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(30, inputs), torch.randn(30), torch.randn(1, rows, inputs)
    scale = F.linear(x.abs(), weight.abs()).max()  # rounding of a sum grows with the sum of absolute terms
    for b in (None, bias):
        found = linear(weight, b, x)
        assert found.shape == (1, rows, 30) and found.is_contiguous()
        torch.testing.assert_close(found, F.linear(x, weight, b), rtol=0, atol=1e-6 * float(scale))


def test_only_large_float32_layers_are_changed_and_only_within():
    layers = {
        "large": torch.nn.Linear(1024, 513, bias=False),
        "small": torch.nn.Linear(32, 32),
        "half": torch.nn.Linear(1024, 2048, dtype=torch.bfloat16),
    }

    class Subclass(torch.nn.Linear):
        """May compute something else."""

    layers["other"] = Subclass(1024, 513)
    before = {name: layer.forward for name, layer in layers.items()}
    with few_rows.few_rows(few_rows.worth_it(layers.values())):
        changed = {name for name, layer in layers.items() if "forward" in vars(layer)}
        x = torch.randn(3, 1024)
        torch.testing.assert_close(layers["large"](x), F.linear(x, layers["large"].weight), rtol=0, atol=1e-4)
    assert changed == {"large"}
    assert all("forward" not in vars(layer) and layer.forward == before[name] for name, layer in layers.items())


def test_put_back_after_an_error():
    layer = torch.nn.Linear(1024, 513)
    with pytest.raises(KeyError), few_rows.few_rows(few_rows.worth_it([layer])):
        raise KeyError
    assert "forward" not in vars(layer)
