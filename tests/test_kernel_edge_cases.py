"""The five ops at the edges: sizes, layouts, masked rows, NaN and infinities, extreme logits and ratios."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_parity import (
    DEVICE,
    EVERYTHING,
    TINY,
    Problem,
    assert_parity,
    call,
    evaluate,
    from_logits,
    judge,
    problem,
)  # fmt: skip

from grpo.config import LossConfig
from grpo_kernels import CLIP_HIGH, OPS, logprob_from_logits
from grpo_kernels.dispatch import rows_backend
from grpo_kernels.objective import Objective

IMPLS = ["torch", "triton"]
LOSS_OPS = ["linear_grpo_loss", "grpo_token_loss"]
by_impl = pytest.mark.parametrize("impl", IMPLS)
SIXTEEN = {"torch": torch.bfloat16, "triton": torch.float16}  # the interpreter has no sound bfloat16


def interpreted(impl: str) -> bool:
    return impl == "triton" and DEVICE.type == "cpu"


# --- sizes and layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "dim", "vocab"),
    [(6, 5, 1), (0, 8, 7), (1, 33, 7), (127, 8, 7), (129, 8, 7), (12, 8, 1000), (6, 40, 1025)],
)
@by_impl
@pytest.mark.parametrize("op", OPS)
def test_sizes(op, impl, rows, dim, vocab):
    """One column, no row, one row, a row less and a row more than a block of 128, columns around a block of 1024."""
    # Seconds each in the interpreter, of kernels that other cases run: op 3 is made of those of op 2 and op 4.
    slow = {"linear_logprob_autograd": rows > 100 or vocab > 100, "linear_logprob": vocab == 1000}
    if interpreted(impl) and slow.get(op):
        return
    ours = assert_parity(op, problem(rows, dim, vocab), impl)
    if vocab == 1 and op != "linear_grpo_loss" and op != "grpo_token_loss":
        assert all(not value.any() for name, value in ours.items() if name != "lse")  # p = 1: 0 in everything


@by_impl
@pytest.mark.parametrize("op", ["linear_grpo_loss", "linear_logprob", "logprob_from_logits"])
def test_the_vocabulary_of_qwen3(op, impl):
    """151936 columns: not a multiple of 1024. Logits of -70 to -20, where a stray column of 0 would be 29 nats off."""
    if interpreted(impl) and op == "linear_logprob":
        return  # 594 tiles, minutes in the interpreter; `test_sizes` has tails of 232 and 1 columns
    given = problem(3, 8, 151936, SIXTEEN[impl])
    hidden, weight = given.hidden.clone(), given.weight.clone()
    hidden[:, 0], weight[:, 0] = 8.0, -8.0
    logits = (hidden.double() @ weight.double().T).to(hidden.dtype)
    assert logits.max() < -20
    assert_parity(op, replace(given, hidden=hidden, weight=weight, logits=logits), impl)


LAYOUTS = {
    "padded rows": lambda t: torch.cat([t, t + 1], dim=1)[:, : t.shape[1]],
    "transposed": lambda t: t.T.contiguous().T,
    "every second row": lambda t: torch.stack([t, t + 1], dim=1)[:, 0],
    "every second column": lambda t: torch.stack([t, t + 1], dim=2)[:, :, 0],
    "expanded rows": lambda t: t.mean(0, keepdim=True).expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@by_impl
@pytest.mark.parametrize("op", [op for op in OPS if op != "grpo_token_loss"])
def test_layouts(op, impl, layout):
    view, given = LAYOUTS[layout], problem(9, 16, 40)
    if op == "linear_logprob":  # it has no leaves
        given = replace(given, hidden=view(given.hidden), weight=view(given.weight))
        assert not given.weight.is_contiguous()
    ours = evaluate(op, given, impl, view)
    definition = [evaluate(op, each, "definition", view) for each in (given.double(), given)]
    judge(ours, *definition, TINY)


@by_impl
def test_offsets_are_counted_in_64_bits(impl):
    """Two rows 2^31 elements apart: a 32-bit offset would be negative. Memory that is not touched is never mapped."""
    vocab, stride = 100, 2**31 + 64
    base = torch.empty(stride + vocab, dtype=SIXTEEN[impl], device=DEVICE)
    logits = base.as_strided((2, vocab), (stride, 1))
    given = problem(2, 8, vocab, SIXTEEN[impl])
    logits.copy_(given.logits)
    expected = evaluate("logprob_from_logits", given, impl)
    for inplace in (False, True):
        leaf = logits.detach().requires_grad_()
        outputs = logprob_from_logits(leaf, given.targets, inplace_backward=inplace, impl=impl)
        assert torch.equal(outputs[0], expected["logprobs"]) and torch.equal(outputs[1], expected["entropy"])
        (gradient,) = torch.autograd.grad(outputs, leaf, given.upstream)
        assert torch.equal(gradient, expected["d_logits"])
    assert torch.equal(logits, expected["d_logits"])  # written at the rows' own place


# --- masked rows ------------------------------------------------------------------------------------------------------


@by_impl
@pytest.mark.parametrize("op", LOSS_OPS)
def test_all_rows_masked(op, impl):
    given = problem(6, 16, 40)
    tokens = dict(given.tokens, token_weights=torch.zeros(6, device=DEVICE))
    ours = evaluate(op, replace(given, tokens=tokens), impl)
    for name, value in ours.items():
        assert torch.equal(value, torch.full_like(value, float(name in ("stats.ratio", "stats.mismatch_weight"))))


@by_impl
@pytest.mark.parametrize("op", LOSS_OPS)
def test_a_masked_row_may_hold_anything(op, impl):
    """Loss, stats and gradients stay what they are, to the bit, when the masked rows turn into NaN and infinities."""
    given = problem(10, 16, 40)
    clean = evaluate(op, given, impl)
    masked = given.tokens["token_weights"] == 0
    assert masked.sum() == 2
    for junk in (torch.nan, torch.inf, -torch.inf):
        tokens = {k: t if k == "token_weights" else t.masked_fill(masked, junk) for k, t in given.tokens.items()}
        spoilt = replace(
            given, tokens=tokens, hidden=given.hidden.masked_fill(masked[:, None], junk),
            logprobs=given.logprobs.masked_fill(masked, junk), entropy=given.entropy.masked_fill(masked, junk),
        )  # fmt: skip
        for name, value in evaluate(op, spoilt, impl).items():
            assert torch.equal(value, clean[name]), (junk, name)


@by_impl
@pytest.mark.parametrize("op", ["linear_logprob_autograd", "logprob_from_logits"])
def test_a_row_without_upstream_gradient_may_hold_nan(op, impl):
    given = problem(10, 16, 40)
    idle = torch.arange(10, device=DEVICE) == 3
    given = replace(given, upstream=tuple(g.masked_fill(idle, 0) for g in given.upstream))
    clean = evaluate(op, given, impl)
    spoilt = {name: getattr(given, name).masked_fill(idle[:, None], torch.nan) for name in ("hidden", "logits")}
    leaves = {name: value.requires_grad_() for name, value in spoilt.items()} | {
        "weight": given.weight.requires_grad_()
    }
    torch.autograd.backward(call(op, replace(given, **leaves), impl), given.upstream)
    for name, leaf in leaves.items():
        if f"d_{name}" in clean:
            assert torch.equal(leaf.grad, clean[f"d_{name}"])


# --- infinities and extreme logits ------------------------------------------------------------------------------------


def rows_of(given: Problem, impl: str, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ops 1 (its row kernel, on a tile of logits) and 4 on the same logits."""
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = logprob_from_logits(leaf, targets, impl=impl)
    (gradient,) = torch.autograd.grad((logprobs, entropy), leaf, given.upstream)
    tile = logits.clone()
    stats = rows_backend(impl).grpo_rows_(tile, targets, objective=Objective.of(given.config), **given.tokens)
    named = {f"stats.{name}": value for name, value in stats._asdict().items()}
    return {"logprobs": logprobs, "entropy": entropy, "d_logits": gradient, "tile": tile} | named


@pytest.mark.parametrize("count", [1, 1024, 1030])
@by_impl
def test_logits_of_minus_infinity_are_columns_that_are_not_there(impl, count):
    """One, the first 1024 (a whole block of a published kernel, which gave NaN), and a few more."""
    given = problem(7, 16, 60)
    wide = torch.cat([torch.full((7, count), -torch.inf, device=DEVICE), given.logits], dim=1)
    ours = rows_of(given, impl, wide, given.targets + count)
    without = rows_of(given, impl, given.logits, given.targets)
    for name, value in ours.items():
        if name in ("tile", "d_logits"):
            assert not value[:, :count].any()
            value = value[:, count:]
        torch.testing.assert_close(value, without[name], rtol=2e-6, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}")


@by_impl
def test_a_target_of_probability_zero(impl):
    """Its log-prob is -inf, its row's gradient that of the limit p = 0, and no other row changes."""
    given = problem(7, 16, 60)
    row, target = 2, given.targets[2]
    logits = given.logits.clone()
    logits[row, target] = -torch.inf
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = logprob_from_logits(leaf, given.targets, impl=impl)
    (gradient,) = torch.autograd.grad(logprobs, leaf, torch.ones_like(logprobs))
    clean = given.logits.clone().requires_grad_()
    expected, expected_entropy = logprob_from_logits(clean, given.targets, impl=impl)
    (expected_gradient,) = torch.autograd.grad(expected, clean, torch.ones_like(expected))
    others = torch.arange(7, device=DEVICE) != row
    assert logprobs[row] == -torch.inf and torch.isfinite(entropy[row])
    assert torch.equal(logprobs[others], expected[others]) and torch.equal(entropy[others], expected_entropy[others])
    assert torch.equal(gradient[others], expected_gradient[others])
    limit = -torch.softmax(logits[row], dim=0)
    limit[target] = 1.0
    torch.testing.assert_close(gradient[row], limit, rtol=1e-6, atol=1e-8)


@by_impl
def test_a_row_of_minus_infinity_is_nan_and_alone(impl):
    """As log_softmax has it: there is no distribution. The other rows do not notice."""
    given = problem(7, 16, 60)
    logits = given.logits.clone()
    logits[3] = -torch.inf
    others = torch.arange(7, device=DEVICE) != 3
    ours, clean = (rows_of(given, impl, each, given.targets) for each in (logits, given.logits))
    assert ours["logprobs"][3].isnan() and ours["stats.logprobs"][3].isnan()
    for name, value in ours.items():
        assert torch.equal(value[others], clean[name][others]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@by_impl
def test_huge_logits(impl, dtype):
    given = problem(9, 16, 60, dtype)
    signs = torch.where(torch.arange(60, device=DEVICE) % 3 == 0, 1.0, -1.0)
    logits = (given.logits.float() + 1e4 * signs).to(dtype)
    assert_parity("logprob_from_logits", replace(given, logits=logits), impl)


@pytest.mark.parametrize("offset", [1e4, -1e4, 30.0])
@by_impl
def test_a_common_offset_changes_nothing(impl, offset):
    """To the bit, for logits that stay exact beside 1e4."""
    given = problem(9, 16, 60)
    logits = (given.logits * 64).round() / 64
    ours, moved = (rows_of(given, impl, each, given.targets) for each in (logits, logits + offset))
    assert torch.equal((logits + offset) - offset, logits)
    for name, value in ours.items():
        assert torch.equal(value, moved[name]), name


@by_impl
def test_probabilities_near_0_and_1(impl):
    """Log-probs from -1e-7 (p = .9999999) to -90 in one batch."""
    logits = torch.zeros(16, 12, device=DEVICE)
    logits[:, 5] = torch.linspace(-90.0, 18.5, 16)
    targets, upstream = torch.full((16,), 5, device=DEVICE), torch.ones(16, device=DEVICE)
    given = replace(problem(16, 8, 12), logits=logits, targets=targets, upstream=(upstream, upstream * 0))
    ours = assert_parity("logprob_from_logits", given, impl)
    assert -2e-7 < ours["logprobs"][-1] < 0 and ours["d_logits"][-1, 5] > 0
    assert abs(ours["d_logits"][0, 5] - 1) < 1e-6


# --- ratios, KL, clip bounds ------------------------------------------------------------------------------------------


@by_impl
@pytest.mark.parametrize("op", LOSS_OPS)
def test_old_equal_to_new_is_a_ratio_of_exactly_1(op, impl):
    given = problem(10, 16, 40)
    _, stats = call(op, given, impl)
    for old in (None, stats.logprobs):
        _, again = call(op, replace(given, tokens=dict(given.tokens, old_logprobs=old)), impl)
        assert (again.ratio == 1).all() and not again.clipped.any()


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_ratio"])
@by_impl
@pytest.mark.parametrize("op", LOSS_OPS)
def test_kl_to_oneself_is_0_with_gradient_0(op, impl, estimator):
    given = problem(10, 16, 40, config=LossConfig(beta=0.5, kl_estimator=estimator), without=("sampler_logprobs",))
    _, stats = call(op, given, impl)
    tokens = dict(given.tokens, ref_logprobs=stats.logprobs, advantages=torch.zeros(10, device=DEVICE))
    ours = evaluate(op, replace(given, tokens=tokens), impl)
    assert ours["stats.logprobs"].any()
    for name in ("loss", "stats.kl", *(name for name in ours if name.startswith("d_"))):
        assert not ours[name].any(), name


@by_impl
def test_a_ratio_on_the_bound_counts_as_inside(impl):
    logprobs, old = torch.tensor([-0.5, -1.0], device=DEVICE), torch.tensor([-1.0, -0.75], device=DEVICE)
    given = replace(problem(2, 4, 5), logprobs=logprobs, entropy=logprobs * 0)
    tokens = {
        "advantages": torch.tensor([1.0, -1.0], device=DEVICE), "token_weights": torch.ones(2, device=DEVICE),
        "old_logprobs": old, "ref_logprobs": None, "sampler_logprobs": None,
    }  # fmt: skip
    given = replace(given, tokens=tokens, config=LossConfig())
    _, stats = call("grpo_token_loss", given, impl)
    above, below = stats.ratio[0].item() - 1.0, 1.0 - stats.ratio[1].item()  # exact, as is going back
    bound = LossConfig(epsilon=below, epsilon_high=above)
    ours = evaluate("grpo_token_loss", replace(given, config=bound), impl)
    assert not ours["stats.clipped"].any()
    assert torch.equal(ours["d_logprobs"], -stats.ratio * tokens["advantages"])  # all of it, neither 0 nor half
    inner = replace(bound, epsilon_high=above - 1e-6)
    ours = evaluate("grpo_token_loss", replace(given, config=inner), impl)
    assert ours["stats.clipped"].tolist() == [CLIP_HIGH, 0] and ours["d_logprobs"][0] == 0


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo"])
@by_impl
def test_log_ratios_beyond_20_are_finite(impl, loss_type):
    logprobs = torch.tensor([-1.0, -120.0, -1.0, -120.0, -1.0, -45.0], device=DEVICE)
    tokens = {
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0], device=DEVICE),
        "token_weights": torch.full((6,), 0.5, device=DEVICE),
        "old_logprobs": torch.tensor([-1.0, -1.0, -200.0, -99.0, -22.0, -25.5], device=DEVICE),
        "ref_logprobs": torch.tensor([-150.0, -1.0, -1.0, -99.0, -30.0, -2.0], device=DEVICE),
        "sampler_logprobs": None,
    }
    for estimator in ("k1", "k2", "k3", "k3_ratio"):
        config = LossConfig(beta=0.1, loss_type=loss_type, kl_estimator=estimator)
        given = replace(problem(6, 4, 5), logprobs=logprobs, entropy=-logprobs, tokens=tokens, config=config)
        ours = assert_parity("grpo_token_loss", given, impl)
        assert all(torch.isfinite(value).all() for value in ours.values())


@by_impl
def test_float16_gradients_do_not_underflow(impl):
    """Weights of 1e-6 times probabilities are below float16's 6e-8; a loss scale comes too late if they are lost."""
    given = problem(12, 16, 40, torch.float16, scale=1e6)
    tokens = dict(given.tokens, token_weights=given.tokens["token_weights"] * 1e-6)
    given = replace(given, tokens=tokens, config=replace(EVERYTHING, entropy_coef=0.0))
    ours, truth = evaluate("linear_grpo_loss", given, impl), evaluate("linear_grpo_loss", given.double(), "definition")
    for name in ("d_hidden", "d_weight"):
        assert (ours[name].double() - truth[name]).norm() < 4e-3 * truth[name].norm()


def test_the_definition_itself_is_log_softmax():
    """The truth of these tests, by hand: two logits one apart, at temperature 2."""
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    logprobs, entropy, lse = from_logits(logits, torch.tensor([0]), 2.0)
    p = 1 / (1 + torch.tensor(-0.5, dtype=torch.float64).exp())
    torch.testing.assert_close(logprobs[0], p.log())
    torch.testing.assert_close(entropy[0], -(p * p.log() + (1 - p) * (1 - p).log()))
    torch.testing.assert_close(lse[0], 0.5 - p.log())
