"""The CUDA C++ row kernel: values, gradients and indices, on the host library and, where it is built, on the device.

The host library is the kernel's own code, thread after thread (kernels/csrc/grpo_rows_host.cpp).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cuda_row_checks import (
    CHECKS,
    CSRC,
    SM_80,
    SM_90,
    SMALL,
    STATIC,
    assert_like_torch,
    assert_rows,
    check_coverage,
    check_extremes,
    check_tiers,
    compile_host,
    place,
    run_rows,
    standard,
)  # fmt: skip
from kernel_parity import check, problem

from grpo.config import LossConfig
from grpo_kernels import chunking, cuda_rows, linear_grpo_loss
from grpo_kernels.objective import Objective

COMPILER = shutil.which("g++")
NO_DEVICE = "no CUDA device" if not torch.cuda.is_available() else cuda_rows.why_not_built()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("g++ not found")
    return compile_host(COMPILER, tmp_path_factory.mktemp("host") / "librows.so")


@pytest.fixture(
    params=["host", pytest.param("device", marks=pytest.mark.skipif(bool(NO_DEVICE), reason=str(NO_DEVICE)))]
)
def library(request):
    return request.getfixturevalue("host") if request.param == "host" else cuda_rows.load(cuda_rows.LIBRARY)


@pytest.mark.parametrize("mismatch", ["none", "token_clip", "token_mask"])
@pytest.mark.parametrize("kl_estimator", [None, "k1", "k2", "k3", "k3_ratio"])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo"])
def test_parity_of_every_term(library, loss_type, kl_estimator, mismatch):
    config = LossConfig(
        loss_type=loss_type,
        beta=0.1 if kl_estimator else 0.0,
        kl_estimator=kl_estimator or "k3",
        mismatch=mismatch,
        delta=1.5 if loss_type == "grpo" else None,
        entropy_coef=0.05 if mismatch == "token_clip" else 0.0,
    )
    assert_rows(library, standard(vocab=600, config=config))


@pytest.mark.parametrize("without", ["old_logprobs", "ref_logprobs", "sampler_logprobs"])
def test_parity_without_an_input(library, without):
    config = LossConfig(beta=0.0 if without == "ref_logprobs" else 0.1, entropy_coef=0.05)
    assert_rows(library, standard(without=(without,), config=config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [7, 1000, 1025])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_parity_of_shapes_and_dtypes(library, dtype, vocab, temperature):
    assert_rows(library, standard(dtype, vocab=vocab, temperature=temperature))


def test_one_column_has_no_gradient(library):
    given = place(
        replace(standard(vocab=7), logits=torch.randn(24, 1), targets=torch.zeros(24, dtype=torch.int64)), library
    )
    ours = run_rows(library, given)
    assert (ours["stats.logprobs"] == 0).all() and (ours["stats.entropy"] == 0).all()
    assert (ours["d_logits"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_nan_and_peaks(host, dtype):
    check_extremes(host, dtype)


def test_common_offset(host):
    given = standard(temperature=0.9)
    # Multiples of 2^-10 lose nothing when 1e4 is added.
    logits = (given.logits * 1024).round() / 1024
    near = run_rows(host, replace(given, logits=logits))
    far = run_rows(host, replace(given, logits=logits + 8192.0))
    assert all(torch.equal(near[name], far[name]) for name in near)


def test_nan_of_a_trained_row_is_not_hidden(host):
    given = standard(rows=4, without=("old_logprobs",))
    given.logits[1, 17] = torch.nan
    ours = run_rows(host, given)
    assert ours["stats.loss"][1].isnan() and ours["stats.entropy"][1].isnan() and ours["d_logits"][1].isnan().any()
    assert ours["d_logits"][[0, 2, 3]].isfinite().all()


def test_ties_at_the_clip_bounds_count_as_inside(host):
    # Without old log-probs every ratio is exactly 1: on both bounds, and on delta.
    objective = replace(Objective.of(LossConfig(beta=0.0)), ratio_low=1.0, ratio_high=1.0, delta=1.0)
    given = standard(without=("old_logprobs", "sampler_logprobs"))
    ours = assert_like_torch(host, given, objective)
    moves = (given.tokens["token_weights"] != 0) & (given.tokens["advantages"] != 0)
    assert (ours["stats.ratio"] == 1).all() and (ours["stats.clipped"] == 0).all()
    assert (ours["d_logits"].abs().amax(-1) > 0).equal(moves)


def test_target_outside_the_vocabulary_is_nan_and_touches_nothing_else(library):
    given = place(standard(rows=3, without=("old_logprobs", "sampler_logprobs")), library)
    good = run_rows(library, given)
    given.targets[0], given.targets[1] = -1, 1000
    ours = run_rows(library, given)
    assert ours["stats.loss"][:2].isnan().all() and ours["d_logits"][:2].isnan().all()
    assert torch.equal(ours["d_logits"][2], good["d_logits"][2])


def test_each_column_once_in_each_tier(host):
    check_tiers(host)


def test_each_column_once_at_each_length(host):
    check_coverage(host, range(1, 720), torch.bfloat16, offset=3, padding=1, variant=SMALL, shared_limit=STATIC + 80)


@pytest.mark.parametrize(("vocab", "dtype", "limit", "offset", "padding"), [
    (151936, torch.bfloat16, SM_80, 0, 0),
    (151936, torch.bfloat16, SM_90, 0, 0),
    (151936, torch.bfloat16, SM_80, 3, 1),
    (151936, torch.float32, SM_80, 0, 0),
    (151937, torch.float32, SM_90, 1, 2),
    (32000, torch.float16, SM_80, 0, 0),
    (5, torch.float32, SM_80, 3, 0),
])  # fmt: skip
def test_each_column_once_in_the_shipped_variants(library, vocab, dtype, limit, offset, padding):
    if library.grpo_rows_needs_device():
        limit = 0  # the device's own
    check_coverage(library, [vocab], dtype, offset, padding, shared_limit=limit)


@pytest.mark.parametrize("variant", range(4))
def test_parity_of_every_variant(host, variant):
    for dtype in (torch.float32, torch.bfloat16):
        assert_rows(
            host, standard(dtype, vocab=1025), variant=variant, shared_limit=STATIC + 64 if variant == SMALL else 0
        )


def test_a_row_does_not_depend_on_the_others(library):
    given = place(standard(vocab=1000), library)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3)).to(given.logits.device)
    tokens = {name: t[order] for name, t in given.tokens.items()}
    shuffled = replace(given, logits=given.logits[order], targets=given.targets[order], tokens=tokens)
    ours, permuted = run_rows(library, given), run_rows(library, shuffled)
    assert all(torch.equal(ours[name][order], permuted[name]) for name in ours)


def test_without_backward_the_logits_stay(library):
    given = place(standard(), library)
    logits, objective = given.logits.clone(), Objective.of(given.config)
    stats = cuda_rows.launch(library, logits, given.targets, given.tokens, objective, 1.0, False)
    ours = run_rows(library, given)
    assert torch.equal(logits, given.logits)
    assert all(torch.equal(value, ours[f"stats.{name}"]) for name, value in stats._asdict().items())


def test_no_rows(library):
    given = place(standard(rows=1), library)
    empty = replace(given, logits=given.logits[:0], targets=given.targets[:0],
                    tokens={name: t[:0] for name, t in given.tokens.items()})  # fmt: skip
    assert all(len(value) == 0 for value in run_rows(library, empty).values())


def test_the_whole_op_with_this_row_kernel(host, monkeypatch):
    monkeypatch.setattr(chunking, "_by_columns", lambda hidden: False)  # rows in one piece, as on a GPU
    given = problem(rows=24, dim=32, vocab=300)

    def launch(logits, targets, *, objective, temperature, backward, **tokens):
        return cuda_rows.launch(host, logits, targets, tokens, objective, temperature, backward)

    def one_pass(given, **rows):
        _, stats, (d_hidden, d_weight, scale) = linear_grpo_loss_module().one_pass(
            given.hidden, given.weight, given.targets, given.tokens, Objective.of(given.config), 1.0, **rows
        )
        return {"stats.loss": stats.loss, "d_hidden": d_hidden * scale, "d_weight": d_weight * scale}

    given = place(given, host)
    ours = one_pass(given, rows=SimpleNamespace(grpo_rows_=launch))
    truth, eager = one_pass(given.double()), one_pass(given)
    for name in truth:
        check(name, ours[name], truth[name], eager[name])


def linear_grpo_loss_module():
    """The module: the package's attribute of that name is the function."""
    import sys

    return sys.modules[linear_grpo_loss.__module__]


def test_refusals_name_the_argument(host):
    given = place(standard(rows=4), host)
    with pytest.raises(ValueError, match="float64.*float32, bfloat16 and float16"):
        run_rows(host, given.double())
    with pytest.raises(ValueError, match="advantages: torch.float64"):
        run_rows(host, replace(given, tokens=given.double().tokens))
    with pytest.raises(ValueError, match="targets: torch.int32"):
        run_rows(host, replace(given, targets=given.targets.int()))
    with pytest.raises(ValueError, match="strides"):
        run_rows(host, replace(given, logits=given.logits.T.contiguous().T.requires_grad_(False)[:, ::2]))
    with pytest.raises(ValueError, match="needs cpu"):
        run_rows(host, replace(given, logits=given.logits.to("meta")))
    with pytest.raises(RuntimeError, match="no such kernel variant"):
        run_rows(host, given, variant=9)
    with pytest.raises(RuntimeError, match="shared memory limit"):
        run_rows(host, given, shared_limit=100)


def test_an_overlapping_view_is_refused(host):
    given = place(standard(rows=4), host)
    with pytest.raises(ValueError, match="overlap"):
        cuda_rows.launch(
            host, given.logits.as_strided((4, 1000), (10, 1)), given.targets, given.tokens, Objective.of(given.config),
            1.0, True,
        )  # fmt: skip


# --- wrong kernels are noticed ----------------------------------------------------------------------------------------

FAULTS = {
    "gradient 0": ("row_math.h", ": power * row.base;", ": 0.0f;"),
    "gradient negated": ("row_math.h", "out.base = -(grad", "out.base = (grad"),
    "temperature forgotten": ("row_math.h", "terms.grad_logprob * args.inverse_temperature", "terms.grad_logprob"),
    "p rounded first": ("row_math.h", "-grad * expm1f(logprob)", "grad * (1.0f - expf(logprob))"),
    "entropy not rescaled": ("row_math.h", "part.weighted + part.sum * fmaxf(t, GRPO_MIN_T)", "part.weighted"),
    "0 * -inf": ("row_math.h", "power * fmaxf(t, GRPO_MIN_T);", "power * t;"),
    "target in the sum": ("row_tiles.h", "if (index != row.target_vector) return;", "if (index > -9) return;"),
    "shared index": ("row_tiles.h", "(rest + v, shared[v], gradient", "(rest + v, shared[v / 2], gradient"),
    "last streamed vector": ("row_tiles.h", "v < beyond; v += THREADS) {", "v < beyond - 1; v += THREADS) {"),
    "tail shifted": ("row_tiles.h", "thread + row.vectors * T::PER_VECTOR : -1", "thread : -1"),
    "target's owner": ("row_tiles.h", "row.target_vector % threads;", "row.target_vector % (threads - 1);"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.skipif(COMPILER is None, reason="g++ not found")
def test_a_wrong_kernel_fails(tmp_path, fault):
    sources = tmp_path / "csrc"
    shutil.copytree(CSRC, sources, ignore=shutil.ignore_patterns("__pycache__"))
    name, old, new = FAULTS[fault]
    text = (sources / name).read_text()
    assert text.count(old) == 1, f"{name} has changed: {old!r} is there {text.count(old)} times"
    (sources / name).write_text(text.replace(old, new))
    broken = compile_host(COMPILER, tmp_path / "librows.so", sources)
    noticed = []
    for each in CHECKS:
        try:
            each(broken)
        except AssertionError as error:
            noticed.append(error)
    assert noticed, f"{fault}: no check noticed"
