"""The gated MLP that keeps less: the same numbers and gradients, fewer tensors kept, other MLPs left alone."""

from __future__ import annotations

import copy

import pytest
import torch
import toy
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from grpo import lean_modules

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


def gradients(model, ids) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    output = model(input_ids=ids).logits
    output.float().square().mean().backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_numbers_and_gradients_are_the_models_own(checkpointing):
    plain = toy.make_model(TOKENIZER)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    lean = copy.deepcopy(plain)
    # An MLP and four norms a layer, and the last norm.
    assert lean_modules.keep_less(lean) == 5 * plain.config.num_hidden_layers + 1
    if checkpointing:
        lean.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lean.train()
    ids = torch.arange(24).view(2, 12)
    (expected, plain_grads), (output, lean_grads) = gradients(plain, ids), gradients(lean, ids)
    assert torch.equal(output, expected)
    with torch.no_grad():
        assert torch.equal(lean(input_ids=ids).logits, plain(input_ids=ids).logits)
    for name, grad in plain_grads.items():
        torch.testing.assert_close(lean_grads[name], grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_no_further_from_float32_than_the_models_own(autocast):
    truth = toy.make_model(TOKENIZER)
    ids = torch.arange(24).view(2, 12)
    if not autocast:
        truth = truth.to(torch.bfloat16).float()
    plain, lean = (copy.deepcopy(truth).to(torch.float32 if autocast else torch.bfloat16) for _ in range(2))
    assert lean_modules.keep_less(lean) == 5 * plain.config.num_hidden_layers + 1
    _, exact = gradients(truth, ids)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (expected, plain_grads), (output, lean_grads) = gradients(plain, ids), gradients(lean, ids)
    assert torch.equal(output, expected)
    for name, grad in exact.items():
        assert lean_grads[name].dtype == plain_grads[name].dtype
        error, own_error = ((grads[name].float() - grad).norm() for grads in (lean_grads, plain_grads))
        assert error <= 1.5 * own_error + 1e-6 * grad.norm(), name


def test_gradients_in_double():
    gate, up, x = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight, scale = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((4, 5), (5,)))
    assert torch.autograd.gradcheck(lean_modules._Gate.apply, (gate, up))
    assert torch.autograd.gradcheck(lean_modules._GateDown.apply, (gate, up, weight))
    assert torch.autograd.gradcheck(lambda *args: lean_modules._RMSNorm.apply(*args, 1e-3), (x, scale))


def test_what_is_computed_again_is_not_kept():
    layer = toy.make_model(TOKENIZER).model.layers[0]
    mlp, norm = layer.mlp, layer.input_layernorm
    x = torch.randn(1, 50, mlp.gate_proj.in_features, requires_grad=True)
    before = kept_bytes(mlp, x), kept_bytes(norm, x)
    assert lean_modules.keep_less(layer) == 5
    assert before[0] - kept_bytes(mlp, x) == 2 * 50 * mlp.gate_proj.out_features * 4
    assert before[1] - kept_bytes(norm, x) == x.nbytes
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj)  # as with adapters: it keeps its input
    assert before[0] - kept_bytes(mlp, x) == 50 * mlp.gate_proj.out_features * 4


@pytest.mark.parametrize("fault", ["another model", "another activation", "another formula"])
def test_what_computes_something_else_is_left_alone(fault):
    if fault == "another model":
        assert lean_modules.keep_less(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))) == 0
        return
    mlp, norm = (layer := toy.make_model(TOKENIZER).model.layers[0]).mlp, layer.input_layernorm
    if fault == "another activation":
        mlp.act_fn = torch.nn.GELU()
    else:
        for module in (mlp, norm):
            module.forward = lambda x, own=module.forward: 2 * own(x)
    kept = mlp.forward, norm.forward
    # The norms that are not faulty change: three where one is, four where none is.
    assert lean_modules.keep_less(layer) == (4 if fault == "another activation" else 3)
    assert mlp.forward == kept[0] and (fault == "another activation" or norm.forward == kept[1])


def test_a_norm_that_rounds_elsewhere_is_left_alone():
    """Olmo 2 rounds the product with the weight once: in float32 the same numbers, in bfloat16 others."""
    assert lean_modules.keep_less(Olmo2RMSNorm(16)) == 0


def test_a_watched_layer_is_called():
    mlp, seen = toy.make_model(TOKENIZER).model.layers[0].mlp, []
    assert lean_modules.keep_less(mlp) == 1
    mlp.down_proj.register_forward_hook(lambda *args: seen.append(1))
    mlp(torch.randn(1, 3, mlp.gate_proj.in_features)).sum().backward()
    assert seen == [1] and mlp.down_proj.weight.grad is not None
