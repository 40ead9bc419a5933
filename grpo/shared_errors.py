"""Exceptions that several processes raise together: how they are sent, and which process tells of one."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `function()` gives, and what it raises."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 (whatever it is, the others wait for it)
        return None, error


def sendable(value: Any, error: Exception | None) -> tuple[Any, Exception | None]:
    """The same; an exception that does not survive pickling as its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        error = RuntimeError("".join(traceback.format_exception(error)))
    return value, error


def told(received: Exception, number: int, own: Exception | None) -> Exception:
    """An exception of process `number`, which tells of it, as all raise it: there the original, elsewhere a copy."""
    error = received if own is None else own
    error.__dict__["told_by"] = number
    return error


def shared(error: E) -> E:
    """`error`, which all processes raise here alike: the first one tells of it."""
    error.__dict__["told_by"] = 0
    return error


def teller(error: BaseException | None) -> int | None:
    """Which process tells of an error that all of them raise, or of one that came of it; None for any other."""
    while error is not None:
        if "told_by" in error.__dict__:
            return int(error.__dict__["told_by"])
        error = error.__cause__ or error.__context__
    return None
