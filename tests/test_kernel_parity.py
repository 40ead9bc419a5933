"""Every output and gradient of the five ops against the float64 truth, for each dtype and each form of the loss.

The Triton kernels run on the GPU where there is one, else under Triton's interpreter, which truncates float32 to
bfloat16 where a GPU rounds: bfloat16 is left to the GPU there, and the shapes are small.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import get_args

import pytest
import torch
from kernel_parity import (
    DEVICE,
    EVERYTHING,
    LEAVES,
    Problem,
    assert_parity,
    call,
    evaluate,
    from_logits,
    judge,
    problem,
)  # fmt: skip

from grpo.config import KLEstimator, LossConfig, LossType
from grpo.loss import grpo_loss
from grpo_kernels import CLIP_DUAL, CLIP_HIGH, CLIP_LOW, OPS, TokenStats, chunking, torch_rows, why_not

IMPLS = ["torch", "triton"] + ["cuda"] * (why_not("linear_grpo_loss", "cuda", DEVICE) is None)
LOSS_OPS = ["linear_grpo_loss", "grpo_token_loss"]
TOKEN_LOSSES = [name for name in get_args(LossType) if name != "gspo"]
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "bfloat16 x float32": (torch.bfloat16, torch.float32),
    "float32 x bfloat16": (torch.float32, torch.bfloat16),
}
INTERPRETED = DEVICE.type == "cpu"
# D no multiple of a block; V one more than a block of 1024. Interpreted: the smallest that still has two of each.
SHAPES = [(48, 64, 1000), (129, 40, 1025)]
ROW_SHAPES, TILE_SHAPES = [(11, 40, 300), (5, 72, 1025)], [(11, 40, 100), (9, 72, 65)]


def shapes(op: str, impl: str) -> list[tuple[int, int, int]]:
    if impl == "triton" and INTERPRETED:
        return TILE_SHAPES if op.startswith("linear_logprob") else ROW_SHAPES
    return SHAPES


CASES = [
    (op, impl, dtypes)
    for op, impl, dtypes in product(OPS, IMPLS, DTYPES)
    if impl in OPS[op] and not (impl == "triton" and INTERPRETED and torch.bfloat16 in DTYPES[dtypes])
]


@pytest.mark.parametrize(("op", "impl", "dtypes"), CASES)
def test_outputs_and_gradients(op, impl, dtypes):
    for seed, (rows, dim, vocab) in enumerate(shapes(op, impl)):
        dtype, weight_dtype = DTYPES[dtypes]
        given = problem(rows, dim, vocab, dtype, weight_dtype, seed, temperature=0.8, scale=3.0)
        assert given.logprobs.max() > -0.01 and given.logprobs.min() < -5  # peaked
        ours = assert_parity(op, given, impl)
        for name, value in ours.items():
            assert value.double().norm() > 0, f"{name} is 0: there was nothing to compare"


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [("torch", torch.float32), ("torch", torch.float64), ("torch", torch.float16), ("triton", torch.float32),
     ("triton", torch.float16)],
)  # fmt: skip
def test_the_gradient_keeps_its_digits_as_p_goes_to_1(impl, dtype):
    # 1 - p down to 1e-11, beside the 1 in s far below one rounding of float32: eager's gradient there is 0 or a
    # multiple of 6e-8. Ours is within float32 roundings of the truth.
    logits = torch.zeros(24, 9, dtype=dtype, device=DEVICE)
    logits[:, 3] = torch.linspace(2.0, 27.0, 24).to(dtype)
    targets, upstream = torch.full((24,), 3, device=DEVICE), torch.ones(24, device=DEVICE)
    given = replace(problem(24, 4, 9), logits=logits, targets=targets, upstream=(upstream, upstream * 0))
    ours = evaluate("logprob_from_logits", given, impl)
    # softmax in float64 loses digits here as well: with k equal others of weight e each, 1 - p = k e / (1 + k e)
    others = 8 * (-logits[:, 3].double()).exp()
    one_minus = others / (1 + others)
    tolerance = torch.finfo(dtype).eps if dtype == torch.float16 else 8 * torch.finfo(torch.float32).eps
    gradient = ours["d_logits"][:, 3].double()
    assert ((gradient - one_minus).abs() <= tolerance * one_minus + 3e-8 * (dtype == torch.float16)).all()
    assert torch.allclose(ours["logprobs"].double(), -torch.log1p(others), rtol=tolerance, atol=0)


# --- every form of the loss -------------------------------------------------------------------------------------------

# What the KL may be: (beta, kl_in, estimator, is there a reference)
KL_FORMS = [(0.3, "loss", estimator, True) for estimator in get_args(KLEstimator)]
KL_FORMS += [(0.3, "reward", "k2", True), (0.0, "loss", "k3", True), (0.3, "loss", "k3", False)]
MISMATCHES = ["none", "token_clip", "token_mask"]


def metrics_of(stats: TokenStats, given: Problem) -> dict[str, torch.Tensor]:
    """The metrics of `grpo_loss`, from `TokenStats`; without those of the inputs alone (sampler_gap)."""
    trained = given.tokens["token_weights"] != 0
    ratio, one = stats.ratio[trained], stats.ratio.new_ones(1)
    metrics = {name: getattr(stats, name).sum() for name in ("surrogate", "entropy")}
    metrics |= {"ratio": ratio.sum(), "ratio_max": torch.cat([ratio, one]).max()}
    metrics |= {"ratio_min": torch.cat([ratio, one]).min()}
    bits = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH} | ({"clip_dual": CLIP_DUAL} if given.config.delta else {})
    metrics |= {name: ((stats.clipped & bit) != 0).sum() for name, bit in bits.items()}
    if given.tokens["ref_logprobs"] is not None:
        metrics["kl"] = stats.kl.sum()
    if given.config.mismatch != "none":
        metrics["mismatch_weight"] = stats.mismatch_weight[trained].sum()
    return metrics


@pytest.mark.parametrize("loss_type", TOKEN_LOSSES)
@pytest.mark.parametrize("op", LOSS_OPS)
def test_torch_is_grpo_loss_in_float64(op, loss_type):
    """Value, gradients and metrics; loss type x KL x mismatch x delta x entropy_coef x old given or not."""
    base = problem(12, 5, 9).double()
    seen = set()
    for kl, mismatch, delta, entropy_coef, old in product(
        KL_FORMS, MISMATCHES, [None, 1.5], [0.0, 0.05], [True, False]
    ):
        beta, kl_in, estimator, with_ref = kl
        config = LossConfig(
            loss_type=loss_type, beta=beta, kl_in=kl_in, kl_estimator=estimator, mismatch=mismatch, delta=delta,
            entropy_coef=entropy_coef, mismatch_cap=1.3,
        )  # fmt: skip
        tokens = dict(base.tokens)
        missing = ["ref_logprobs"] * (not with_ref) + ["old_logprobs"] * (not old)
        missing += ["sampler_logprobs"] * (mismatch == "none")
        given = replace(base, config=config, tokens=tokens | dict.fromkeys(missing))
        truth, metrics = differentiate(op, given, "definition")
        ours, stats = differentiate(op, given, "torch")
        message = f"{config}, old {old}"
        for name, value in truth.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n} {m}")
        mine = metrics_of(stats, given)
        assert mine.keys() == {key for key in metrics if not key.startswith("sampler_")}, message
        for name, value in mine.items():
            torch.testing.assert_close(value.double(), metrics[name].double(), rtol=1e-9, atol=1e-12, msg=name)
        seen |= {name for name in ("clip_low", "clip_high", "clip_dual") if metrics.get(name, 0) > 0}
    assert seen == {"clip_high", "clip_dual"} | ({"clip_low"} if loss_type != "cispo" else set())


def differentiate(op: str, given: Problem, impl: str):
    """(loss and gradients by name, metrics of `grpo_loss` or `TokenStats`), of the whole batch at once."""
    leaves = {name: getattr(given, name).clone().requires_grad_() for name in LEAVES[op]}
    given = replace(given, **leaves)
    loss, rest = loss_with_metrics(op, given) if impl == "definition" else call(op, given, impl)
    if loss.requires_grad:  # without a reference and advantages alike there may be none
        loss.backward()
    grads = {f"d_{k}": torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}
    return {"loss": loss.detach()} | grads, rest


def loss_with_metrics(op: str, given: Problem):
    logprobs, entropy = given.logprobs, given.entropy
    if op == "linear_grpo_loss":
        logprobs, entropy, _ = from_logits(given.hidden @ given.weight.T, given.targets, given.temperature)
    tokens = dict(given.tokens)
    if tokens["old_logprobs"] is None:
        tokens["old_logprobs"] = logprobs.detach()
    index = torch.arange(len(logprobs), device=DEVICE)
    return grpo_loss(policy_logprobs=logprobs, entropy=entropy, episode_index=index, config=given.config, **tokens)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss_type", TOKEN_LOSSES)
@pytest.mark.parametrize("op", LOSS_OPS)
def test_every_loss_in_float32(op, loss_type, impl):
    if impl not in OPS[op]:
        return
    forms = product(MISMATCHES, [None, 1.5], [0.0, 0.05], [True, False])
    pairs = list(zip(KL_FORMS, list(forms)[::3]))
    if impl == "triton" and INTERPRETED and op == "linear_grpo_loss":
        pairs = pairs[TOKEN_LOSSES.index(loss_type) % 2 :: 2]  # each form with every other loss: half a second each
    for kl, (mismatch, delta, entropy_coef, old) in pairs:
        beta, kl_in, estimator, with_ref = kl
        config = LossConfig(
            loss_type=loss_type, beta=beta, kl_in=kl_in, kl_estimator=estimator, mismatch=mismatch, delta=delta,
            entropy_coef=entropy_coef,
        )  # fmt: skip
        missing = ["ref_logprobs"] * (not with_ref) + ["old_logprobs"] * (not old)
        missing += ["sampler_logprobs"] * (mismatch == "none")
        assert_parity(op, problem(12, 16, 40, config=config, without=tuple(missing)), impl)


@pytest.mark.parametrize("setting", [{"loss_type": "gspo"}, {"mismatch": "sequence_mask"}])
@pytest.mark.parametrize("impl", ["auto", "reference", *IMPLS])
@pytest.mark.parametrize("op", LOSS_OPS)
def test_losses_of_whole_episodes_are_refused_by_name(op, impl, setting):
    with pytest.raises(ValueError, match=next(iter(setting.values()))):
        call(op, problem(3, 4, 5, config=LossConfig(**setting)), impl)


# --- finite differences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in OPS if LEAVES[op]])
def test_gradcheck(op):
    configs = [EVERYTHING]
    if op in LOSS_OPS:
        names = [("grpo", "k3_ratio"), ("sapo", "k2")]
        configs = [replace(EVERYTHING, loss_type=t, kl_estimator=k, delta=2.0) for t, k in names]
    for config in configs:
        given = replace(problem(8, 5, 11, seed=2, temperature=0.7).double(), config=config)
        ratio = (given.logprobs - given.tokens["old_logprobs"]).exp()
        for kink in (0.8, 1.2, 2.0):  # finite differences mean nothing across one
            assert (ratio - kink).abs().min() > 1e-3
        leaves = [getattr(given, name).requires_grad_() for name in LEAVES[op]]

        def outputs(*leaves, given=given):
            results = call(op, replace(given, **dict(zip(LEAVES[op], leaves))), "torch")
            return results[0] if op in LOSS_OPS else results

        assert torch.autograd.gradcheck(outputs, leaves)


# --- the tests, tested ------------------------------------------------------------------------------------------------


@lru_cache
def reference_points(op: str, dtype: torch.dtype):
    given = problem(24, 32, 300, dtype, temperature=0.8, scale=3.0)
    truth, eager = evaluate(op, given.double(), "definition"), evaluate(op, given, "definition")
    return given, truth, eager, evaluate(op, given, "torch")


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.1, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_a_wrong_output_or_gradient_is_noticed(op, dtype, factor):
    given, truth, eager, ours = reference_points(op, dtype)
    judge(ours, truth, eager, torch.finfo(dtype).eps)
    for name, value in ours.items():
        if name == "stats.clipped" and factor == 1.1:
            continue  # bits
        with pytest.raises(AssertionError, match=f"{name}: "):
            judge(ours | {name: (value * factor).to(value.dtype)}, truth, eager, torch.finfo(dtype).eps)
        # A row a thousand times smaller than the largest is looked at as well. Not so in 16 bits: there a row whose
        # terms cancel is wrong by half its size in eager.
        if value.dim() == 2 and dtype == torch.float32:
            size = value.double().norm(dim=1)
            row = size.masked_fill(size < 1e-3 * size.max(), torch.inf).argmin()
            wrong = value.clone()
            wrong[row] *= factor
            with pytest.raises(AssertionError, match=f"{name}: "):
                judge(ours | {name: wrong}, truth, eager, torch.finfo(dtype).eps)


WRONG_KERNELS = [
    ("linear_grpo_loss", torch_rows, "grpo_rows_", "d_hidden"),
    ("linear_grpo_loss", chunking, "accumulate_outer_", "d_weight"),
    ("linear_logprob", torch_rows, "logprob_rows", "logprobs"),
    ("linear_logprob_autograd", torch_rows, "logprob_rows", "logprobs"),
    ("linear_logprob_autograd", torch_rows, "logprob_rows_backward_", "d_hidden"),
    ("linear_logprob_autograd", chunking, "accumulate_outer_", "d_weight"),
    ("logprob_from_logits", torch_rows, "logprob_rows", "logprobs"),
    ("logprob_from_logits", torch_rows, "logprob_rows_backward_", "d_logits"),
    ("grpo_token_loss", import_module("grpo_kernels.grpo_token_loss"), "token_terms", "d_logprobs"),
]


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.1, 2.0])
@pytest.mark.parametrize(("op", "module", "function", "name"), WRONG_KERNELS)
def test_a_wrong_kernel_is_noticed(op, module, function, name, factor, monkeypatch):
    """The row kernels and the dW accumulation with results times `factor`: each op's parity check raises."""
    right = getattr(module, function)

    def wrong(written, *args, **kwargs):
        result = right(written, *args, **kwargs)
        if function == "logprob_rows":
            return type(result)(*(field * factor for field in result))
        if function == "token_terms":
            return result[0], result[1] * factor, result[2] * factor
        written.mul_(factor)  # written in place: the tile of gradients, or dW
        return result

    given, truth, eager, _ = reference_points(op, torch.float32)
    monkeypatch.setattr(module, function, wrong)
    ours = evaluate(op, given, "torch")
    with pytest.raises(AssertionError, match=f"{name}: "):
        judge(ours, truth, eager, torch.finfo(torch.float32).eps)
