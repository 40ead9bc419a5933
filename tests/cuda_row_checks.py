"""Checks of the CUDA C++ row kernel that take a library: the device's, the host's, a broken one."""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import torch
from kernel_parity import Problem, check, from_logits, judge, loss_by_definition, problem
from torch import Tensor

from grpo.config import LossConfig
from grpo_kernels import cuda_rows, torch_rows
from grpo_kernels.objective import Objective

CSRC = Path(__file__).resolve().parents[1] / "kernels" / "csrc"
SMALL = 3  # the host's variant of 32 threads: 512 16-bit columns in registers
STATIC = 512  # bytes of a limit that are not for the row
SM_80, SM_90 = 166912, 232448  # bytes of shared memory a block may have


def build_module():
    """kernels/csrc/build.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("csrc_build", CSRC / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_host(compiler: str, output: Path, sources: Path = CSRC):
    """The host library of `sources`, loaded."""
    subprocess.run(build_module().host_command(compiler, output, sources), check=True, capture_output=True, text=True)
    return cuda_rows.load(output)


def place(given: Problem, library) -> Problem:
    """The problem on the kind of device that the library takes."""
    device = "cuda" if library.grpo_rows_needs_device() else "cpu"

    def move(value):
        if isinstance(value, dict):
            return {name: move(each) for name, each in value.items()}
        return value.to(device) if isinstance(value, Tensor) else value

    return replace(given, **{f.name: move(getattr(given, f.name)) for f in fields(given)})


def run_rows(library, given: Problem, objective: Objective | None = None, **force) -> dict[str, Tensor]:
    """The kernel's outputs and gradient by name."""
    logits = given.logits.clone()
    objective = objective or Objective.of(given.config)
    stats = cuda_rows.launch(
        library, logits, given.targets, given.tokens, objective, given.temperature, True, **force
    )  # fmt: skip
    return {f"stats.{name}": value for name, value in stats._asdict().items()} | {"d_logits": logits}


def by_definition(given: Problem) -> dict[str, Tensor]:
    """log_softmax, `grpo_loss` and autograd, in float32 or float64; the gradient in the dtype of the logits."""
    logits = given.logits.clone().requires_grad_()
    logprobs, entropy, _ = from_logits(logits, given.targets, given.temperature)
    loss, stats = loss_by_definition(logprobs, entropy, given)
    loss.backward()
    results = {f"stats.{name}": value.detach() for name, value in stats._asdict().items()}
    return results | {"stats.clipped": stats.clipped.int(), "d_logits": logits.grad}


def by_torch_rows(given: Problem, objective: Objective | None = None) -> dict[str, Tensor]:
    """torch_rows: what -inf and NaN give is defined there, autograd would make NaN of them."""
    logits = given.logits.clone()
    stats = torch_rows.grpo_rows_(
        logits, given.targets, objective=objective or Objective.of(given.config), temperature=given.temperature,
        **{name: None if t is None else t.to(torch.promote_types(logits.dtype, torch.float32))
           for name, t in given.tokens.items()},
    )  # fmt: skip
    return {f"stats.{name}": value for name, value in stats._asdict().items()} | {"d_logits": logits}


def assert_rows(library, given: Problem, **force) -> None:
    """Parity with the definition, as in kernel_parity."""
    given = place(given, library)
    judge(run_rows(library, given, **force), by_definition(given.double()), by_definition(given), 0.0)


def assert_like_torch(library, given: Problem, objective: Objective | None = None, **force) -> dict[str, Tensor]:
    """The same infinities and NaNs as torch_rows in float64, and parity of everything that is finite."""
    given = place(given, library)
    ours = run_rows(library, given, objective, **force)
    truth, eager = by_torch_rows(given.double(), objective), by_torch_rows(given, objective)
    for name in truth:
        parts = [each[name] for each in (ours, truth, eager)]
        odd = [torch.where(each.isfinite(), 0, each).double().nan_to_num(nan=5.0) for each in parts]
        assert torch.equal(odd[0], odd[1]), f"{name}: {parts[0].flatten()[:9]}, not {parts[1].flatten()[:9]}"
        check(name, *(torch.where(each.isfinite(), each, 0) for each in parts))
    return ours


def standard(dtype=torch.float32, rows=24, vocab=1000, **settings) -> Problem:
    return problem(rows=rows, dim=32, vocab=vocab, dtype=dtype, **settings)


def check_values(library) -> None:
    """Every term of the loss, a temperature, both widths of logits, every tier of the host's small variant."""
    assert_rows(library, standard(torch.bfloat16, vocab=1025), variant=SMALL, shared_limit=STATIC + 16 * 20)
    assert_rows(library, standard(temperature=0.7))
    assert_rows(library, standard(torch.bfloat16))


def check_coverage(library, vocabs, dtype, offset: int = 0, padding: int = 0, **force) -> None:
    """Every column is counted once and written once, and nothing else is.

    Equal logits: the entropy is log V, the gradient of each column -g / V, of the target g (1 - 1 / V).
    """
    device = "cuda" if library.grpo_rows_needs_device() else "cpu"
    objective = Objective.of(LossConfig(beta=0.0))
    ones = torch.ones(2, device=device)
    tokens = dict(advantages=ones, token_weights=ones)
    for vocab in vocabs:
        stride = vocab + padding
        memory = torch.full((offset + 2 * stride + 16,), 3.0, dtype=dtype, device=device)
        logits = memory[offset:].as_strided((2, vocab), (stride, 1))
        targets = torch.tensor([vocab - 1, vocab // 2], device=device)
        stats = cuda_rows.launch(library, logits, targets, tokens, objective, 1.0, True, **force)
        want = torch.full((2, vocab), 1.0 / vocab, dtype=torch.float64, device=device)
        want.scatter_(1, targets[:, None], 1.0 / vocab - 1.0)
        where = f"V {vocab}, offset {offset}, {dtype}, {force}"
        close = torch.isclose(logits.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-7)
        assert close.all(), f"{where}: columns {(~close).nonzero()[:4].tolist()}"
        entropy = torch.full((2,), float(vocab), dtype=torch.float64, device=device).log()
        assert (stats.entropy - entropy).abs().max() < 2e-6 * max(1.0, float(entropy[0])), where
        untouched = memory.clone()
        untouched[offset:].as_strided((2, vocab), (stride, 1)).fill_(3.0)
        assert (untouched == 3.0).all(), f"{where}: written outside the rows"


def check_tiers(library) -> None:
    """Rows that end in each tier of the small variant, at each alignment. 20 vectors of shared memory."""
    for dtype in (torch.float32, torch.bfloat16):
        for offset in range(0, 16 // dtype.itemsize, 3):
            force = dict(variant=SMALL, shared_limit=STATIC + 16 * 20)
            check_coverage(library, (*range(1, 40), *range(245, 350, 7), 511, 512, 519, 672, 673, 901), dtype, offset,
                           padding=5, **force)  # fmt: skip


def set_rows(given: Problem, rows: dict[int, object]) -> Problem:
    """The problem with some rows of logits replaced."""
    logits = given.logits.clone()
    for row, values in rows.items():
        logits[row] = torch.as_tensor(values, dtype=logits.dtype)
    return replace(given, logits=logits)


def check_extremes(library, dtype=torch.float32) -> None:
    """-inf, +-1e4 and logits so peaked that 1 - p is 1e-13. Rows 0 to 7; row 4 and 9 are untrained."""
    given = standard(dtype, rows=16, vocab=1300, without=("old_logprobs", "sampler_logprobs"))
    base, y = given.logits, given.targets.tolist()
    one, first, target = base[0].clone(), base[1].clone(), base[2].clone()
    one[(y[0] + 5) % 1300] = -torch.inf
    first[:1024] = -torch.inf
    target[y[2]] = -torch.inf
    huge = torch.where(torch.arange(1300) % 2 == 0, 1e4, -1e4)
    peaked = torch.full((1300,), -30.0)
    peaked[y[5]] = 7.0
    rows = {0: one, 1: first, 2: target, 3: huge, 4: torch.nan, 5: peaked, 6: -torch.inf, 7: base[7] + 300.0}
    given = set_rows(given, rows)
    given.targets[1], given.targets[3] = 1200, 2
    ours = assert_like_torch(library, given)
    assert (ours["stats.ratio"][[0, 1, 2, 3, 4, 5, 7]] == 1).all()
    assert (ours["d_logits"][4] == 0).all() and ours["stats.loss"][4] == 0
    assert ours["d_logits"][6].isnan().all() and ours["stats.loss"][6].isnan()
    # 1 - p = 1299 e^-37 = 1.1e-13, relative to which the rule of `check` judges row 5: lost if p were rounded first.
    # Nothing below 6e-8 exists in float16.
    assert ours["stats.logprobs"][5] < 0 and (dtype == torch.float16 or ours["d_logits"][5].any())


CHECKS = (check_values, check_tiers, check_extremes)
