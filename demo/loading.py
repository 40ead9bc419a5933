"""What threads of a server must not do at the same time: import transformers, and load models with it."""

from __future__ import annotations

import threading

_IMPORTING = threading.Lock()

LOADING = threading.Lock()
"""transformers loads with switches of the whole process (which weights are made, tied, initialised): two threads that
load at once leave models with weights missing, and the process unable to load another. Held while scoring too."""


def import_trainer() -> None:
    """Import the trainer, and torch with it: seconds the first time, which is why nothing does at the start.

    Names of transformers appear while it is imported by and by, so a second thread finds some of them missing. What
    imports anything of `grpo` that needs it calls this first.
    """
    with _IMPORTING:
        import grpo.replay  # noqa: F401 (it draws in all the rest)
