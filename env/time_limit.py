"""A time limit for calls into an environment that may hang.

An interval timer (SIGALRM) raises TimeoutError in the midst of the call. Threads would not do: the interpreter cannot
stop one, so each hung call would leave a thread behind, and a loop or a regular expression that keeps the interpreter
busy would not even let the waiting thread go on. The alarm interrupts loops, regular expressions, sleeps, locks and
blocking reads alike, and costs a few microseconds per call.

What it cannot do: signals reach the main thread only, and only on systems that have them; elsewhere the block runs
without a limit. An extension that neither returns nor looks for signals is not interrupted. An environment of that
kind belongs in another process, behind a client whose reads have a timeout.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

REPEAT_SECONDS = 1.0
"""The alarm comes again at this interval, for code that catches the first one and goes on."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside the block once it has run for `seconds`.

    Whatever else uses the timer, an outer limit for instance, goes on with what it has left once the block has ended.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    armed = True

    def on_alarm(number: int, frame: Any) -> None:
        if armed:
            raise TimeoutError(f"no answer within {seconds:g} s")

    started = time.monotonic()
    outer_handler = signal.signal(signal.SIGALRM, on_alarm)
    outer_left, outer_repeat = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_SECONDS)
    try:
        try:
            yield
        finally:
            # An alarm that comes from here on must not keep the rest from being put back.
            armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer_handler or signal.SIG_DFL)
        if outer_left:
            signal.setitimer(signal.ITIMER_REAL, max(outer_left - (time.monotonic() - started), 1e-3), outer_repeat)
