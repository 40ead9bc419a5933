"""The CUDA C++ row kernel of op 1 (`kernels/csrc`), bound with ctypes.

`grpo_rows_` of `torch_rows`, one read and one write of each row of logits. The library holds plain C symbols, so it
needs neither torch's headers to build nor a rebuild when torch changes. `kernels/csrc/grpo_rows_host.cpp` has the same
interface on the CPU; the tests bind it with the functions below.

A row's bits depend on its own content and on the 16-byte alignment of its address alone, not on the rows next to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_kernels.objective import Objective, TokenStats

LIBRARY = Path(__file__).resolve().parent / "libgrpo_rows.so"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SURROGATES = {"clip": 0, "cispo": 1, "sapo": 2}
KL_ESTIMATORS = {"none": 0, "k1": 1, "k2": 2, "k3": 3, "k3_ratio": 4}
MISMATCHES = {"none": 0, "token_clip": 1, "token_mask": 2}
TOKEN_TENSORS = ("advantages", "token_weights", "old_logprobs", "ref_logprobs", "sampler_logprobs")


class Args(ctypes.Structure):
    """GrpoRowsArgs of csrc/grpo_rows.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "targets", *TOKEN_TENSORS, "stats", "clipped", "stream")),
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "row_stride", "shared_limit")),
        *((name, ctypes.c_int32) for name in ("dtype", "surrogate", "kl_estimator", "mismatch", "backward", "variant")),
        *((name, ctypes.c_float) for name in ("ratio_low", "ratio_high", "delta", "tau_positive", "tau_negative")),
        *((name, ctypes.c_float) for name in ("beta", "entropy_coef", "mismatch_cap")),
        *((name, ctypes.c_float) for name in ("inverse_temperature", "base2_scale")),
    ]


class Plan(ctypes.Structure):
    """Where the columns of an aligned row live: bytes, but for `variant` and `threads`."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("variant", "threads", "in_registers", "in_shared", "streamed", "scalar")
    ]


def why_not_built(path: Path = LIBRARY) -> str | None:
    """Why the kernel cannot be loaded, with the command that builds it, or None."""
    if path.exists():
        return None
    return (
        f"{path.name} is not in {path.parent}: where nvcc and a CUDA build of torch are, run "
        "`pip install --no-build-isolation -e .` (without the flag pip hides torch from the build), "
        "or `python kernels/csrc/build.py` in the repository"
    )


def load(path: Path | str) -> ctypes.CDLL:
    """The library at `path` with its signatures declared. Raises RuntimeError for one built from other sources."""
    library = ctypes.CDLL(str(path))
    library.grpo_rows.argtypes = [ctypes.POINTER(Args)]
    library.grpo_rows_error.argtypes, library.grpo_rows_error.restype = [ctypes.c_int], ctypes.c_char_p
    library.grpo_rows_plan.argtypes = [
        ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, ctypes.POINTER(Plan),
    ]  # fmt: skip
    if library.grpo_rows_args_size() != ctypes.sizeof(Args):
        raise RuntimeError(f"{path} was built from another version of kernels/csrc: build it again")
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    reason = why_not_built()
    if reason:
        raise RuntimeError(reason)
    return load(LIBRARY)


def _raise_for(library: ctypes.CDLL, code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA row kernel: {library.grpo_rows_error(code).decode()} (code {code})")


def plan(library: ctypes.CDLL, vocab: int, dtype: torch.dtype, shared_limit: int, variant: int = -1) -> dict[str, int]:
    """The tiers of a row under `shared_limit` bytes of shared memory a block: the fields of `Plan`."""
    out = Plan()
    _raise_for(library, library.grpo_rows_plan(vocab, DTYPES[dtype], shared_limit, variant, ctypes.byref(out)))
    return {field[0]: getattr(out, field[0]) for field in Plan._fields_}


def _check(library: ctypes.CDLL, logits: Tensor, targets: Tensor, tokens: Mapping[str, Tensor | None]) -> None:
    if logits.dtype not in DTYPES:
        raise ValueError(f"logits: {logits.dtype}, but the CUDA row kernel takes float32, bfloat16 and float16")
    if logits.dim() != 2 or not logits.shape[1] or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits: shape {tuple(logits.shape)}, strides {logits.stride()}: must be [n, V] rows, V > 0")
    if len(logits) > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(f"logits: rows overlap, stride {logits.stride(0)} of {logits.shape[1]} columns")
    kind = "cuda" if library.grpo_rows_needs_device() else "cpu"
    for name, tensor, dtype in [
        ("logits", logits, logits.dtype),
        ("targets", targets, torch.int64),
        *((name, tensor, torch.float32) for name, tensor in tokens.items() if tensor is not None),
    ]:
        if tensor.device != logits.device or tensor.device.type != kind:
            raise ValueError(f"{name}: on {tensor.device}, logits on {logits.device}; this library needs {kind}")
        if tensor is not logits and (tensor.dtype != dtype or tensor.shape != logits.shape[:1]):
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, must be {dtype} ({len(logits)},)")


def _scalars(objective: Objective, temperature: float) -> dict[str, float | int]:
    """Names become numbers; the rest of the objective passes as it is, rounded to float32 like torch's scalars."""
    floats = ("ratio_low", "ratio_high", "delta", "tau_positive", "tau_negative", "beta", "entropy_coef")
    return {
        **{name: getattr(objective, name) for name in (*floats, "mismatch_cap")},
        "surrogate": SURROGATES[objective.surrogate],
        "kl_estimator": KL_ESTIMATORS[objective.kl_estimator],
        "mismatch": MISMATCHES[objective.mismatch],
        "inverse_temperature": 1.0 / temperature,
        "base2_scale": math.log2(math.e) / temperature,
    }


def launch(
    library: ctypes.CDLL,
    logits: Tensor,
    targets: Tensor,
    tokens: Mapping[str, Tensor | None],
    objective: Objective,
    temperature: float,
    backward: bool,
    *,
    variant: int = -1,
    shared_limit: int = 0,
) -> TokenStats:
    """`grpo_rows_` by any library of this interface. `tokens` holds TOKEN_TENSORS, a missing one counts as None.

    `variant` and `shared_limit` (bytes of shared memory a block, 0: the device's) force a kernel and the split of its
    rows over registers, shared memory and streaming. Raises ValueError for inputs, RuntimeError with CUDA's text.
    """
    _check(library, logits, targets, tokens)
    num_rows = len(logits)
    # Unbound to the fields of TokenStats: one allocation, and each field is contiguous.
    stats = torch.empty(len(TokenStats._fields) - 1, num_rows, dtype=torch.float32, device=logits.device)
    clipped = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    # Held until the call returns; on a GPU the caching allocator keeps the memory in stream order after that.
    inputs = {name: t.contiguous() for name, t in dict(tokens, targets=targets).items() if t is not None}
    args = Args(
        logits=logits.data_ptr(), stats=stats.data_ptr(), clipped=clipped.data_ptr(),
        rows=num_rows, vocab=logits.shape[1], row_stride=max(logits.stride(0), logits.shape[1]),
        dtype=DTYPES[logits.dtype], backward=backward, variant=variant, shared_limit=shared_limit,
        **{name: tensor.data_ptr() for name, tensor in inputs.items()},
        **_scalars(objective, temperature),
    )  # fmt: skip
    device: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if logits.is_cuda:
        device = torch.cuda.device(logits.device)
        args.stream = torch.cuda.current_stream(logits.device).cuda_stream
    if num_rows:
        with device:
            _raise_for(library, library.grpo_rows(ctypes.byref(args)))
    return TokenStats._make([*stats.unbind(0), clipped])


def grpo_rows_(
    logits: Tensor,
    targets: Tensor,
    *,
    advantages: Tensor,
    token_weights: Tensor,
    objective: Objective,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    temperature: float = 1.0,
    backward: bool = True,
) -> TokenStats:
    """Statistics, token loss and, with `backward`, its gradient over `logits` [n, V], one read and one write of a row.

    As `torch_rows.grpo_rows_`, on CUDA tensors: logits float32, bfloat16 or float16 with any row stride, `targets` [n]
    int64, the rest [n] float32. A target outside the vocabulary turns its row into NaN. Without `backward` the logits
    are left as they are.
    Raises:
        ValueError: dtypes (float64 logits), shapes, devices.
        RuntimeError: the library is not built, or CUDA's error text.
    """
    tokens = dict(
        advantages=advantages, token_weights=token_weights, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        sampler_logprobs=sampler_logprobs,
    )  # fmt: skip
    return launch(_library(), logits, targets, tokens, objective, temperature, backward)
