"""Time and peak memory of one call, and a description of where they were measured."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grpo import machine

PACKAGES = ("torch", "triton", "trl", "liger-kernel", "transformers")
# More than the L2 cache of any GPU in use (50 MB on an H100), so that no row finds its inputs there.
FLUSH_BYTES = 256 << 20


class Sample(NamedTuple):
    seconds: float
    peak_bytes: int | None
    """Most memory held at once during the call, beyond what was held before it. None where it cannot be read."""


def measure(run: Callable[[], Any], device: torch.device) -> tuple[Sample, Any]:
    """One call of `run`: its sample and what it returned."""
    gc.collect()  # a cycle from the row before would be freed inside this one
    return _measure_cuda(run, device) if device.type == "cuda" else _measure_cpu(run)


def _measure_cuda(run: Callable[[], Any], device: torch.device) -> tuple[Sample, Any]:
    """Events around the call. The flush is queued first, so that the host is ahead of the device when they start."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush = _flush_buffer(device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    flush.zero_()
    start.record()
    result = run()
    end.record()
    end.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - before
    return Sample(start.elapsed_time(end) / 1e3, peak), result


@functools.lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def _measure_cpu(run: Callable[[], Any]) -> tuple[Sample, Any]:
    """Peak memory by the kernel's high-water mark of the resident set, reset before the call."""
    _trim()
    before = _reset_peak()
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    peak = None if before is None else _status("VmHWM") - before
    return Sample(seconds, peak), result


def _trim() -> None:
    """Give freed memory back to the system: a row that reused it would seem to need none."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)


def _reset_peak() -> int | None:
    """Resident bytes now, with the high-water mark set to them; None where /proc does not offer it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: no {key}")


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge the numbers: device, threads, versions, commit. JSON types only."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__
    about: dict[str, Any] = {"device": device.type, "versions": versions, "commit": machine.commit()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "name": properties.name,
            "sm": f"{properties.major}.{properties.minor}",
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    else:
        about |= {"name": machine.cpu_name(), "threads": torch.get_num_threads(), "cores": os.cpu_count()}
        about["load_average_at_start"] = round(os.getloadavg()[0], 2)
    return about
