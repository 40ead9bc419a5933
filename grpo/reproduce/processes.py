"""Chains of processes, several at a time: started, watched, stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo import console
from grpo.signals import Signals

POLL = 0.2  # seconds
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Stage:
    """One process."""

    label: str
    command: list[str]
    units: int
    """What is left of it, in training steps."""
    history: Path | None = None
    """The log of a training run, which shows how far it is."""
    start: int = 0
    """Steps in it at the start."""

    @property
    def left(self) -> int:
        """Of a process under way. A resumed run may have to repeat steps first."""
        done = rows_in(self.history) - self.start if self.history else 0
        return self.units - min(self.units, max(0, done))


@dataclass
class Chain:
    """Processes that follow each other, and what came of them."""

    name: str
    stages: list[Stage]
    log: Path
    running: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failed: str = ""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The newest of its processes, ended or not."""
        assert self.running is not None
        return self.running


def carry_out(
    chains: Sequence[Chain], jobs: int, threads: int, signals: Signals, progress: Callable[[int, int], None]
) -> None:
    """Run what is left of the chains, `jobs` at a time. A process that fails ends its chain alone.

    After a first signal nothing new is started, and what runs gets SIGTERM: training finishes its step and leaves a
    checkpoint. However this ends, no process is left behind.
    """
    env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    waiting, active = [chain for chain in chains if chain.stages], list[Chain]()
    total, told = left_of(chains), False
    try:
        while waiting or active:
            if signals.received is not None and not told:
                told = True
                waiting.clear()
                for chain in active:
                    chain.process.terminate()
            while waiting and len(active) < jobs:
                chain = waiting.pop(0)
                if begin(chain, env):
                    active.append(chain)
            for chain in [chain for chain in active if chain.process.poll() is not None]:
                goes_on = ended_well(chain, told) and chain.stages and not told
                if not (goes_on and begin(chain, env)):
                    active.remove(chain)
            progress(max(0, total - left_of(chains)), total)
            time.sleep(POLL if active else 0)
    finally:
        for chain in active:
            with contextlib.suppress(OSError):  # gone in the meantime
                os.killpg(chain.process.pid, signal.SIGKILL)
            chain.process.wait()


def begin(chain: Chain, env: dict[str, str]) -> bool:
    """Start the chain's next process, in a group of its own: Ctrl-C reaches it once, from here."""
    stage = chain.stages[0]
    print(f"{chain.name}: {stage.label}", flush=True)
    chain.started = time.monotonic()
    try:
        with open(chain.log, "ab") as log:
            chain.running = subprocess.Popen(
                [sys.executable, *stage.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
    except OSError as error:
        chain.failed = f"{stage.label} cannot start: {error}"
        print(f"{chain.name}: {chain.failed}", flush=True)
    return not chain.failed


def _end_with_parent() -> None:
    """SIGTERM for this process when the one that started it is gone, even by SIGKILL, where the system can do that."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def ended_well(chain: Chain, stopping: bool) -> bool:
    """What a process that ended leaves behind: one stage less, or the reason why the chain failed."""
    stage, code = chain.stages[0], chain.process.returncode
    took = console.duration(time.monotonic() - chain.started)
    if code == 0:
        chain.stages.pop(0)
        print(f"{chain.name}: {stage.label} done in {took}", flush=True)
    elif stopping:
        print(f"{chain.name}: {stage.label} stopped", flush=True)
    else:
        lines = [line for line in chain.log.read_text(errors="replace").splitlines() if line.strip()]
        how = f"was killed by signal {-code}, its last line" if code < 0 else f"failed with code {code}"
        chain.failed = f"{stage.label} {how}: {lines[-1].strip() if lines else ''} ({chain.log})"
        print(f"{chain.name}: {chain.failed}", flush=True)
    return code == 0


def left_of(chains: Sequence[Chain]) -> int:
    """What is left to do, in training steps; of a chain that failed nothing is."""
    return sum(stage.left for chain in chains if not chain.failed for stage in chain.stages)


def rows_in(history: Path) -> int:
    """Steps in a log, which has one line for each; cheaper than reading it, and it may be under way."""
    try:
        return history.read_bytes().count(b"\n{")
    except OSError:
        return 0
