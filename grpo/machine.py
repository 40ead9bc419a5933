"""The machine: what a reader needs to judge a measured number (processor and commit), and memory given back to it."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path


def cpu_name() -> str:
    """The processor's name as its maker gives it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit() -> str | None:
    """The commit of this checkout, with `+changes` where tracked files differ from it; None outside a checkout."""

    def git(*args: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def give_back_memory() -> None:
    """Return what was freed to the system, where the C library (glibc) can.

    It keeps freed blocks below 32 MB, and those of one phase of a step do not fit the next one's: the process of a
    large model would grow by gigabytes.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
