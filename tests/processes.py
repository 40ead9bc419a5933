"""Several processes as torchrun starts them, forked from this one: it has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Ended:
    codes: list[int | None]
    """Exit codes by rank; -9: killed, or still running after the time limit."""
    output: list[str]
    """What each wrote, standard output and error together."""


def run(count: int, folder: Path, function: Callable[[], object], limit: float = 100) -> Ended:
    """`function()` in `count` processes with torchrun's environment; they may write to `folder`."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    context = multiprocessing.get_context("fork")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"process-{rank}.txt" for rank in range(count)]
    started = [
        context.Process(target=_child, args=(rank, count, store.port, files[rank], function), daemon=True)
        for rank in range(count)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + limit
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return Ended([process.exitcode for process in started], [file.read_text() for file in files])


def _child(rank: int, count: int, port: int, file: Path, function: Callable[[], object]) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with open(file, "w", buffering=1) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
        code: object = 1
        try:
            function()
            code = 0
        except SystemExit as exit_:
            code = exit_.code or 0
        except BaseException:  # noqa: BLE001 (as Python itself would)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 1)
