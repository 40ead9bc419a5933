"""One side of the comparison in a process of its own, and the pipe between the two.

The parent writes a line for each step it wants; the worker answers with a line of JSON. So the rounds of the two sides
interleave, a side's peak memory is its process's, and one that is killed takes nobody along.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def counted(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps behind the first, which is a warm-up; the first where it is the only one."""
    return steps[1:] if len(steps) > 1 else steps


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


class Channel:
    """The worker's end. What libraries print to stdout goes to stderr from here on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        try:  # where memory runs out, the system ends a worker and not the parent, which reports it
            Path("/proc/self/oom_score_adj").write_text("500")
        except OSError:
            pass

    def send(self, document: dict[str, Any]) -> None:
        self._out.write(json.dumps(document) + "\n")
        self._out.flush()

    def requests(self) -> Iterator[None]:
        """One item for each step that is asked for."""
        for _ in sys.stdin:
            yield


def peak_bytes(device: Any) -> int | None:
    """Most memory so far: of the device where it is a GPU, else resident memory of this process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return process_memory("self", "VmHWM")


def process_memory(pid: int | str, key: str) -> int | None:
    """`VmHWM` (most) or `VmRSS` (now) of a process in bytes; None where /proc does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


class Side:
    """The parent's end: starts `script` with `settings` and asks it for steps. Ends with it as a context."""

    def __init__(self, name: str, python: str, script: str, settings: dict[str, Any], threads: int):
        self.name, self.died, self.steps = name, "", list[dict[str, Any]]()
        self.peak_seen = 0
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._errors = tempfile.TemporaryFile("w+")
        command = [python, str(Path(__file__).with_name(script)), json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self.about = self._read() or {}

    def step(self) -> dict[str, Any] | None:
        """One optimiser step; None where the process has died, of which `died` gives the reason."""
        if self.died:
            return None
        try:
            self._requests.write("step\n")
            self._requests.flush()
        except OSError:
            pass  # reading says how it ended
        result = self._read()
        if result is not None:
            self.steps.append(result)
        return result

    @property
    def peak(self) -> int | None:
        """Peak memory in bytes: as of its last finished step, or more if it was seen to use more before it died."""
        reported = self.steps[-1]["peak_bytes"] if self.steps else 0
        return max(reported or 0, self.peak_seen if self.died else 0) or None

    def close(self) -> None:
        """Let it end; kill it if it does not."""
        try:
            self._requests.close()
        except OSError:
            pass
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._errors.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any] | None:
        line = self._answers.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        killed = code == -9
        self.died = "killed, as the system does where memory runs out" if killed else (lines or [f"exit {code}"])[-1]
        return None

    def _watch(self) -> None:
        """A process that is killed cannot report its peak any more: look once in a while."""
        gone = threading.Event()
        while self._process.poll() is None:
            self.peak_seen = max(self.peak_seen, process_memory(self._process.pid, "VmHWM") or 0)
            gone.wait(0.2)
