"""The gated MLP that keeps less: the same numbers and gradients, fewer tensors kept, other MLPs left alone."""

from __future__ import annotations

import copy

import pytest
import torch
import toy
from transformers import GPT2Config, GPT2LMHeadModel

from grpo import gated_mlp

TOKENIZER = toy.make_tokenizer()


def kept_bytes(model, x) -> int:
    """Of all tensors that autograd keeps but parameters, by storage."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum().backward()
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


def test_numbers_and_gradients_are_the_models_own():
    plain = toy.make_model(TOKENIZER)
    lean = copy.deepcopy(plain)
    assert gated_mlp.keep_less(lean) == plain.config.num_hidden_layers
    ids = torch.arange(24).view(2, 12)
    outputs = [model(input_ids=ids).logits for model in (plain, lean)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6 * float(p.grad.abs().max()), msg=name)


def test_gradients_in_double():
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(gated_mlp._Gate.apply, (gate, up))


def test_one_of_four_tensors_is_not_kept():
    mlp = toy.make_model(TOKENIZER).model.layers[0].mlp
    x = torch.randn(1, 50, mlp.gate_proj.in_features, requires_grad=True)
    before = kept_bytes(mlp, x)
    assert gated_mlp.keep_less(mlp) == 1
    assert before - kept_bytes(mlp, x) == 50 * mlp.gate_proj.out_features * 4


@pytest.mark.parametrize("fault", [None, "another activation", "another formula"])
def test_what_computes_something_else_is_left_alone(fault):
    model = toy.make_model(TOKENIZER)
    if fault is None:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    for layer in model.model.layers if fault else ():
        if fault == "another activation":
            layer.mlp.act_fn = torch.nn.GELU()
        else:
            own = layer.mlp.forward
            layer.mlp.forward = lambda x, own=own: 2 * own(x)
    assert gated_mlp.keep_less(model) == 0
