"""Every output and gradient of the five ops against the float64 truth, for each dtype and each form of the loss.

The Triton kernels run on the GPU where there is one, else under Triton's interpreter, which truncates float32 to
bfloat16 where a GPU rounds: bfloat16 is left to the GPU there, and the shapes are small.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from kernel_parity import DEVICE, assert_parity, evaluate, problem

from grpo.config import LossType
from grpo_kernels import OPS, why_not

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
SHAPES = {"torch": [(48, 64, 1000), (129, 40, 1025)], "interpreted": [(11, 40, 300), (5, 72, 1025)]}


def shapes(impl: str) -> list[tuple[int, int, int]]:
    return SHAPES["interpreted" if impl == "triton" and INTERPRETED else "torch"]


CASES = [
    (op, impl, dtypes)
    for op, impl, dtypes in product(OPS, IMPLS, DTYPES)
    if impl in OPS[op] and not (impl == "triton" and INTERPRETED and torch.bfloat16 in DTYPES[dtypes])
]


@pytest.mark.parametrize(("op", "impl", "dtypes"), CASES)
def test_outputs_and_gradients(op, impl, dtypes):
    for seed, (rows, dim, vocab) in enumerate(shapes(impl)):
        dtype, weight_dtype = DTYPES[dtypes]
        given = problem(rows, dim, vocab, dtype, weight_dtype, seed, temperature=0.8, scale=3.0)
        assert given.logprobs.max() > -0.01 and given.logprobs.min() < -5  # peaked
        ours = assert_parity(op, given, impl)
        for name, value in ours.items():
            assert value.double().norm() > 0, f"{name} is 0: there was nothing to compare"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_gradient_keeps_its_digits_as_p_goes_to_1(dtype):
    # 1 - p down to 1e-11, beside the 1 in s far below one rounding of float32: eager's gradient there is 0 or a
    # multiple of 6e-8. Ours is within float32 roundings of the truth.
    logits = torch.zeros(24, 9, dtype=dtype, device=DEVICE)
    logits[:, 3] = torch.linspace(2.0, 27.0, 24).to(dtype)
    targets, upstream = torch.full((24,), 3, device=DEVICE), torch.ones(24, device=DEVICE)
    given = replace(problem(24, 4, 9), logits=logits, targets=targets, upstream=(upstream, upstream * 0))
    ours = evaluate("logprob_from_logits", given, "torch")
    # softmax in float64 loses digits here as well: with k equal others of weight e each, 1 - p = k e / (1 + k e)
    others = 8 * (-logits[:, 3].double()).exp()
    one_minus = others / (1 + others)
    tolerance = torch.finfo(dtype).eps if dtype == torch.float16 else 8 * torch.finfo(torch.float32).eps
    gradient = ours["d_logits"][:, 3].double()
    assert ((gradient - one_minus).abs() <= tolerance * one_minus + 3e-8 * (dtype == torch.float16)).all()
    assert torch.allclose(ours["logprobs"].double(), -torch.log1p(others), rtol=tolerance, atol=0)
