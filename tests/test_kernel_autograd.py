"""The five ops inside autograd, what they refuse, and which implementation runs."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from kernel_parity import DEVICE, LEAVES, call, evaluate, problem

from grpo_kernels import IMPLEMENTATIONS, OPS, chunking, logprob_from_logits, resolve, why_not

IMPLS = ["torch", "triton"]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
by_impl = pytest.mark.parametrize("impl", IMPLS)
differentiable = pytest.mark.parametrize("op", [op for op in OPS if LEAVES[op]])
with_head = pytest.mark.parametrize("op", ["linear_grpo_loss", "linear_logprob_autograd"])


def leaves_of(op: str, given):
    """The problem with fresh leaves, and those."""
    leaves = {name: getattr(given, name).detach().clone().requires_grad_() for name in LEAVES[op]}
    return replace(given, **leaves), leaves


def scalar(op: str, given, impl: str) -> torch.Tensor:
    """The loss, or a weighted sum of the outputs."""
    outputs = call(op, given, impl)
    if op in ("linear_grpo_loss", "grpo_token_loss"):
        return outputs[0]
    return sum((grad * output).sum() for grad, output in zip(given.upstream, outputs))


# --- backward calls ---------------------------------------------------------------------------------------------------


@by_impl
@differentiable
def test_two_backward_calls_give_the_same_gradient(op, impl):
    """To the bit, also after the first gradient was changed in place: what is stashed is given away once."""
    given, leaves = leaves_of(op, problem(9, 16, 40))
    loss = scalar(op, given, impl)
    first = torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    for gradient in first:
        assert gradient.any()
        gradient.fill_(torch.nan)
    for _ in range(2):
        again = torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True)
        assert all(map(torch.equal, again, copies))


@pytest.mark.parametrize("factor", [0.0, -0.5, 4.0])
@by_impl
@differentiable
def test_upstream_gradients_multiply(op, impl, factor):
    given, leaves = leaves_of(op, problem(9, 16, 40))
    plain = torch.autograd.grad(scalar(op, given, impl), tuple(leaves.values()))
    given, leaves = leaves_of(op, given)
    scaled = torch.autograd.grad(scalar(op, given, impl) * factor, tuple(leaves.values()))
    for one, other in zip(plain, scaled):  # powers of two: exact
        assert torch.equal(one * factor, other)


@by_impl
@differentiable
def test_gradients_accumulate(op, impl):
    given, leaves = leaves_of(op, problem(9, 16, 40))
    other = problem(9, 16, 40, seed=5)
    other = replace(other, **leaves)
    expected = [
        [gradient.clone() for gradient in torch.autograd.grad(scalar(op, each, impl), tuple(leaves.values()))]
        for each in (given, other)
    ]
    for each in (given, other):
        scalar(op, each, impl).backward()
    for leaf, first, second in zip(leaves.values(), *expected):
        torch.testing.assert_close(leaf.grad, first + second, rtol=0, atol=0)


@by_impl
@differentiable
def test_a_second_derivative_is_an_error(op, impl):
    given, leaves = leaves_of(op, problem(5, 8, 11))
    factor = torch.ones((), device=DEVICE, requires_grad=True)
    loss = scalar(op, given, impl) * factor
    gradient = torch.autograd.grad(loss, next(iter(leaves.values())), create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --- what needs a gradient --------------------------------------------------------------------------------------------


@by_impl
@with_head
def test_a_frozen_head_costs_no_gemm_and_changes_nothing(op, impl, monkeypatch):
    full = evaluate(op, problem(9, 16, 40), impl)
    given, leaves = leaves_of(op, problem(9, 16, 40))
    leaves["weight"].requires_grad_(False)
    monkeypatch.setattr(chunking, "accumulate_outer_", lambda *args, **kwargs: pytest.fail("dW of a frozen head"))
    scalar(op, given, impl).backward()
    assert leaves["weight"].grad is None and torch.equal(leaves["hidden"].grad, full["d_hidden"])


@by_impl
@with_head
def test_hidden_without_gradient(op, impl):
    full = evaluate(op, problem(9, 16, 40), impl)
    given, leaves = leaves_of(op, problem(9, 16, 40))
    leaves["hidden"].requires_grad_(False)
    scalar(op, given, impl).backward()
    assert leaves["hidden"].grad is None and torch.equal(leaves["weight"].grad, full["d_weight"])


@pytest.mark.parametrize("how", ["frozen", "no_grad"])
@by_impl
@differentiable
def test_without_gradients_the_values_are_the_same(op, impl, how):
    given, leaves = leaves_of(op, problem(9, 16, 40))
    expected = scalar(op, given, impl)
    if how == "no_grad":
        with torch.no_grad():
            value = scalar(op, given, impl)
    else:
        for leaf in leaves.values():
            leaf.requires_grad_(False)
        value = scalar(op, given, impl)
    assert not value.requires_grad and expected.requires_grad and torch.equal(value, expected)


@by_impl
@pytest.mark.parametrize("op", OPS)
def test_inputs_are_not_written_to(op, impl):
    given = problem(9, 16, 40)
    before = {name: getattr(given, name).clone() for name in given.leaves}
    tokens = {name: tensor.clone() for name, tensor in given.tokens.items()}
    _, leaves = leaves_of(op, given)
    if leaves:
        scalar(op, replace(given, **{k: v.requires_grad_() for k, v in before.items()}), impl).backward()
    call(op, given, impl)
    for name, tensor in before.items():
        assert torch.equal(tensor, getattr(given, name)), name
    assert all(torch.equal(tensor, given.tokens[name]) for name, tensor in tokens.items())


@by_impl
@with_head
def test_tied_embeddings_get_both_gradients(op, impl):
    """One parameter as embedding and head, with a layer between."""
    given = problem(9, 16, 40)
    tokens = torch.randint(40, (9,), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def gradient(impl: str, dtype: torch.dtype) -> torch.Tensor:
        each = given.double() if dtype == torch.float64 else given
        shared = each.weight.detach().clone().requires_grad_()
        tied = replace(each, hidden=each.hidden.detach() + torch.tanh(shared[tokens]), weight=shared)
        scalar(op, tied, impl).backward()
        return shared.grad

    truth, eager, ours = gradient("reference", torch.float64), gradient("reference", torch.float32), None
    ours = gradient(impl, torch.float32)
    assert (ours - truth).norm() <= 2 * (eager - truth).norm() + 1e-6 * truth.norm()


@by_impl
def test_inplace_backward_writes_over_the_logits(impl):
    given = problem(9, 16, 40)
    expected = evaluate("logprob_from_logits", given, impl)["d_logits"]
    leaf = given.logits.clone().requires_grad_()
    logits = leaf * 1.0
    outputs = logprob_from_logits(logits, given.targets, inplace_backward=True, impl=impl)
    loss = sum((grad * output).sum() for grad, output in zip(given.upstream, outputs))
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, expected) and torch.equal(logits.detach(), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@by_impl
def test_inplace_backward_and_another_use_of_the_logits(impl):
    """exp keeps no logits and sees no change; a product keeps them, and autograd reports it."""
    given = problem(9, 16, 40)
    logits = given.logits.clone().requires_grad_() * 1.0
    square = (logits * logits).sum()
    outputs = logprob_from_logits(logits, given.targets, inplace_backward=True, impl=impl)
    outputs[0].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


# --- refusals ---------------------------------------------------------------------------------------------------------

HEADED = ["linear_grpo_loss", "linear_logprob", "linear_logprob_autograd"]
WITH_TARGETS = [*HEADED, "logprob_from_logits"]
WITH_TOKENS = ["linear_grpo_loss", "grpo_token_loss"]


def refused(op: str, impl: str, match: str, **changes) -> None:
    with pytest.raises(ValueError, match=match):
        call(op, replace(problem(5, 8, 11), **changes), impl)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("impl", ["auto", "reference", *IMPLS])
@pytest.mark.parametrize("op", WITH_TARGETS)
def test_temperatures_without_a_distribution(op, impl, temperature):
    refused(op, impl, "temperature", temperature=temperature)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the range is asserted there, and ends the context")
@pytest.mark.parametrize("wrong", [-1, -100, 11])
@pytest.mark.parametrize("impl", ["auto", "reference", *IMPLS])
@pytest.mark.parametrize("op", WITH_TARGETS)
def test_targets_outside_the_vocabulary(op, impl, wrong):
    refused(op, impl, f"{wrong} is outside the vocabulary of 11", targets=torch.tensor([0, 1, wrong, 3, 4]))


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("op", WITH_TARGETS)
def test_targets_of_a_wrong_shape_or_dtype(op, impl):
    targets = problem(5, 8, 11).targets
    for wrong in (targets.int(), targets.double(), targets[:4], targets[:, None], targets[0]):
        refused(op, impl, "targets", targets=wrong)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("op", HEADED)
def test_hidden_and_weight_of_wrong_shapes_or_dtypes(op, impl):
    given = problem(5, 8, 11)
    refused(op, impl, r"hidden \(5, 7\), weight \(11, 8\)", hidden=given.hidden[:, :7])
    refused(op, impl, "hidden", hidden=given.hidden[None])
    refused(op, impl, "weight", weight=given.weight[0])
    refused(op, impl, "weight", weight=given.weight[:0])
    refused(op, impl, "hidden: torch.int64", hidden=given.hidden.long())
    refused(op, impl, "weight: torch.int64", weight=given.weight.long())


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_logits_of_wrong_shapes_or_dtypes(impl):
    given = problem(5, 8, 11)
    for wrong in (given.logits[0], given.logits[None], given.logits.long(), given.logits[:, :0]):
        refused("logprob_from_logits", impl, "logits", logits=wrong)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("op", WITH_TOKENS)
def test_per_token_inputs_of_wrong_shapes_or_dtypes(op, impl):
    tokens = problem(5, 8, 11).tokens
    for name, tensor in tokens.items():
        for wrong in (tensor[:4], tensor[:, None], tensor.long(), tensor.sum()):
            refused(op, impl, name, tokens=dict(tokens, **{name: wrong}))


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_log_probs_and_entropy_of_wrong_shapes(impl):
    given = problem(5, 8, 11)
    refused("grpo_token_loss", impl, "policy_logprobs", logprobs=given.logprobs[:, None])
    refused("grpo_token_loss", impl, "policy_logprobs", logprobs=given.targets)
    refused("grpo_token_loss", impl, "entropy", entropy=given.entropy[:4])
    refused("grpo_token_loss", impl, "no entropy was given", entropy=None)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("op", WITH_TOKENS)
def test_mismatch_needs_sampler_log_probs(op, impl):
    """As `grpo_loss` does; silence would leave the importance weights out of the loss."""
    given = problem(5, 8, 11)
    refused(op, impl, "sampler_logprobs", tokens=dict(given.tokens, sampler_logprobs=None))


# --- which implementation runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_implementation_is_refused_by_name(op):
    with pytest.raises(ValueError, match="impl: 'tritn' is not one of auto, reference, torch, triton, cuda"):
        call(op, problem(3, 4, 5), "tritn")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what is refused on a CPU")
@pytest.mark.parametrize("op", OPS)
def test_cuda_on_a_cpu_says_why_not(op):
    reason = "needs a CUDA device, not cpu" if "cuda" in OPS[op] else f"{op} has no 'cuda' implementation"
    with pytest.raises(RuntimeError, match=reason):
        call(op, problem(3, 4, 5), "cuda")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what is refused on a CPU")
@pytest.mark.parametrize("op", OPS)
def test_triton_on_a_cpu_without_the_interpreter_says_why_not(op, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="triton needs a CUDA device, not cpu"):
        call(op, problem(3, 4, 5), "triton")


def test_triton_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="triton is not installed"):
        resolve("linear_logprob", "triton", CUDA)


@pytest.mark.parametrize("op", OPS)
def test_auto(op, monkeypatch):
    """torch on a CPU, interpreter or not; triton on a GPU that has it."""
    assert resolve(op, "auto", CPU) == "torch"
    assert resolve(op, "auto", CUDA) == "triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolve(op, "auto", CUDA) == "torch"
    assert set(OPS[op]) <= set(IMPLEMENTATIONS) and why_not(op, "torch", CPU) is None


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what runs on a CPU")
@pytest.mark.parametrize("op", OPS)
def test_auto_on_a_cpu_runs_torch(op, monkeypatch):
    given = problem(3, 4, 5)
    expected = evaluate(op, given, "torch")
    for name, value in evaluate(op, given, "auto").items():
        assert torch.equal(value, expected[name]), name
