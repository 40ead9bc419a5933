"""Linear layers by oneDNN: the numbers and gradients of PyTorch's own, and what is not meant for it left alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import toy

from grpo import cpu_linear, lean_modules
from grpo.config import ModelConfig
from grpo.model import load_policy

pytestmark = pytest.mark.skipif(not cpu_linear.available(), reason="this build of PyTorch has no oneDNN")


def layer(inputs: int, outputs: int, bias: bool = False) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize("shape", [(1, 1, 1024), (1, 8, 1024), (5, 1024), (2, 300, 1024), (1, 0, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_numbers_and_gradients(shape, bias, monkeypatch):
    used, product = [], cpu_linear.product
    monkeypatch.setattr(cpu_linear, "wide_vectors", lambda: True)
    monkeypatch.setattr(cpu_linear, "product", lambda a, b: used.append(1) or product(a, b))
    own = layer(1024, 520, bias)
    other = copy.deepcopy(own)
    assert cpu_linear.use(other) == 1
    results = []
    for each in (own, other):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = each(x)
        (y * torch.linspace(-1, 1, 520)).sum().backward()
        results.append([y, x.grad, *(p.grad for p in each.parameters())])
    assert len(used) == (3 if x.numel() else 0)  # forward, dx, dW
    for expected, found in zip(*results, strict=True):
        assert found.is_contiguous() and found.shape == expected.shape
        scale = float(expected.detach().abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * scale)
    with torch.inference_mode():
        torch.testing.assert_close(other(x), results[0][0], rtol=0, atol=1e-5)


def test_gradients_of_strided_tensors():
    """Attention's output is a transposed view, and frozen weights want no gradient."""
    weight = torch.randn(600, 1000)
    x = torch.randn(4, 1000, 130).transpose(1, 2)
    expected, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = torch.randn(4, 600, 130).transpose(1, 2)
    F.linear(expected, weight).backward(grad)
    cpu_linear._Linear.apply(found, weight).backward(grad)
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=2e-6 * float(expected.grad.abs().max()))
    assert weight.grad is None


@pytest.mark.parametrize(
    "x, outputs, with_avx512, without",
    [
        (torch.randn(1, 4, 128), 256, False, False),  # small: a new shape costs more than it saves
        (torch.randn(1, 4, 1024), 512, True, True),  # 2 MB of weights
        (torch.randn(1, 129, 1024), 512, True, False),  # and many rows
        (torch.randn(2, 256, 128), 256, True, False),  # 512 rows
        (torch.randn(2, 255, 128), 256, False, False),
        (torch.randn(1024), 512, False, False),
        (torch.randn(1, 4, 1024).double(), 512, False, False),
        (torch.randn(1, 4, 1024).bfloat16(), 512, False, False),
    ],
)
def test_what_it_is_for(x, outputs, with_avx512, without, monkeypatch):
    weight = torch.randn(outputs, x.shape[-1], dtype=x.dtype)
    for wide, meant in ((False, without), (True, with_avx512)):
        monkeypatch.setattr(cpu_linear, "wide_vectors", lambda: wide)  # noqa: B023 (used within the loop)
        assert cpu_linear.worth_it(x, weight) == meant
    with torch.autocast("cpu", torch.bfloat16):
        assert not cpu_linear.worth_it(x, weight)
    torch.testing.assert_close(cpu_linear.multiply(x, weight), F.linear(x, weight), rtol=1e-4, atol=1e-3)


def test_under_autocast_as_without_it():
    own = layer(1024, 520)
    other = copy.deepcopy(own)
    cpu_linear.use(other)
    x = torch.randn(3, 1024)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(own(x), other(x)) and other(x).dtype == torch.bfloat16


def test_only_plain_linear_layers_and_copies_follow_their_own_weights():
    class Other(torch.nn.Linear):
        """May compute something else."""

    model = torch.nn.Sequential(layer(1024, 512), Other(512, 8), torch.nn.LayerNorm(8))
    assert cpu_linear.use(model) == 1
    assert "forward" not in vars(model[1])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    x = torch.randn(2, 1024)
    with torch.no_grad():
        assert float(twin[0](x).abs().max()) == 0 < float(model[0](x).abs().max())


def test_a_loaded_policy_has_both_this_and_modules_that_keep_less(tmp_path):
    """A module that keeps less is compared with the one that it replaces: the same products must be in both."""
    tokenizer = toy.make_tokenizer()
    model = toy.make_model(tokenizer, hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    mlp = load_policy(ModelConfig(model=str(tmp_path), device="cpu")).model.model.layers[0].mlp
    assert mlp.forward.func is lean_modules.gated_mlp and mlp.down_proj.forward.func is cpu_linear.linear
