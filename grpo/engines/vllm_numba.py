"""vLLM in a process that has imported numba (`grpo.compiled` does)."""

from __future__ import annotations

import sys
from typing import Any


def hide_llvmlite() -> None:
    """vLLM 0.32 on a CPU looks into the `__dict__` of every object of every module. llvmlite's library object, which
    numba brings, answers each name with a function, this one too, and vLLM would fail on it."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or not hasattr(ffi.lib, "__dict__"):
        return
    kind, answer = type(ffi.lib), type(ffi.lib).__getattr__

    def answer_but_one(library: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(library, name)

    kind.__getattr__ = answer_but_one
