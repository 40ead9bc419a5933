"""SIGINT (Ctrl-C) and SIGTERM (`kill`, a scheduler): what is under way is finished first, so that nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """A context in which the first signal inside `finish_first` only sets `received`; it is for the body to stop soon.

    Everywhere else, and for a second signal, SystemExit with the shell's code for it (130, 143) is raised at once.
    Threads other than the main one get no signals: there this does nothing.
    """

    def __init__(self, tell: bool = True) -> None:
        """`tell`: say on a first signal that it was heard; of several processes one does."""
        self.tell = tell
        self.received: int | None = None
        self._finishing = False
        self._previous: dict[int, Any] = {}  # what `signal.signal` gives and takes

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; 0 before any."""
        return 128 + self.received if self.received else 0

    @contextlib.contextmanager
    def finish_first(self) -> Iterator[None]:
        """What is inside is not broken off by a first signal."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in HANDLED}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self.received = self.received is None, number
        if not (first and self._finishing):
            raise SystemExit(self.exit_code)
        # Not print: the signal may have come in the middle of one.
        if self.tell:
            os.write(2, b"\nfinishing this step, then writing a checkpoint; a second signal stops at once\n")
