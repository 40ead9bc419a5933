"""Kill training runs with SIGKILL at random moments, resume each, and compare it with a run that was left alone.

    python tests/kill_and_resume.py --kills 40

Each run is a process of its own (`train.py`, the bundled policy, beta 0.2; with one and with two updates a step) and is
killed several times: while it loads, evaluates, samples, updates, writes a checkpoint or the final model. Then it must
have the same log (times aside), the same episodes, and bit for bit the same weights and optimiser state. Exits with 1
where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS = 6
FLAGS = (
    f"--model tiny --recipe tiny --device cpu --beta 0.2 --num-steps {STEPS} --save-every 2 --prompts-per-step 2 "
    "--num-generations 4 --max-completion-len 96 --warmup-steps 1 --learning-rate 1e-3 --eval-limit 1"
).split()
PHASES = ("loading", "evaluation", "rollout", "update", "checkpoint", "final model")
# Where to strike: the phases with state at stake more often than the others. None: at any time.
TARGETS = ("rollout", "rollout", "update", "update", "checkpoint", "checkpoint", "evaluation", "final model", None)
PATIENCE = 120  # seconds without the phase that was waited for
PANEL = "GRPO: ask before you act"  # printed when everything is loaded

Launch = Callable[[list[str], Path], Any]
"""Starts `train.py ARGS` with its output in a file; the process has `kill()`, `wait()` and `poll()` as Popen has."""


def popen(args: list[str], output: Path) -> subprocess.Popen:
    """A process from nothing, as a user starts it."""
    with open(output, "w") as file:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *args], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        )


@dataclass
class Run:
    """A run's folder, the process at work on it, and where that is."""

    folder: Path
    flags: list[str]
    launch: Launch
    process: Any = None

    @property
    def output(self) -> Path:
        """What the process has printed."""
        return self.folder.with_suffix(".txt")

    def start(self) -> None:
        """A new run, or the rest of one."""
        self.output.unlink(missing_ok=True)
        begun = (self.folder / "config.json").exists()
        args = ["--resume", str(self.folder)] if begun else [*self.flags, "--output-dir", str(self.folder)]
        self.process = self.launch(args, self.output)

    def rows(self) -> int:
        """Steps in the log."""
        with contextlib.suppress(OSError):
            return (self.folder / "log_history.json").read_bytes().count(b"\n{")
        return 0

    def phase(self) -> str:
        """Where the process is, or was when it died, as its files tell."""
        if not self.output.exists() or PANEL not in self.output.read_text():
            return "loading"
        if any(not path.name.endswith(".old.tmp") for path in self.folder.glob("checkpoints/*.tmp")):
            return "checkpoint"
        if not (self.folder / "eval_before.json").exists():
            return "evaluation"
        rows = self.rows()
        if rows == STEPS:
            return "evaluation" if (self.folder / "final").exists() else "final model"
        return "update" if (self.folder / f"rollouts/step-{rows + 1:06d}.json.gz").exists() else "rollout"

    def strike(self, target: str | None, rng: random.Random) -> str | None:
        """Kill the process in the phase `target`, a random moment in it; the phase in which that was.

        None where the process had ended before.
        """
        not_before = rng.randrange(STEPS) if target in ("rollout", "update") else 0
        deadline = time.monotonic() + (rng.uniform(0.0, 8.0) if target is None else PATIENCE)
        while self.process.poll() is None and time.monotonic() < deadline:
            if target and self.phase() == target and self.rows() >= not_before:
                break
            time.sleep(0.0005)
        time.sleep(rng.uniform(0.0, 0.01 if target == "checkpoint" else 0.1))
        if self.process.poll() is not None:
            return None
        self.process.kill()
        self.process.wait()
        return self.phase()

    def finish(self) -> None:
        """Let it run to its end. Raises RuntimeError with its output where that is not exit code 0."""
        if self.process.wait():
            raise RuntimeError(f"exit code {self.process.poll()}:\n{self.output.read_text()}")


def survive(run: Run, targets: list[str | None], rng: random.Random) -> Counter[str]:
    """Start `run`, kill it once for each target and resume it every time, then let it finish; kills by phase."""
    kills: Counter[str] = Counter()
    run.start()
    for target in targets:
        phase = run.strike(target, rng)
        if phase is None:  # it was done before it could be killed
            break
        kills[phase] += 1
        run.start()
    run.finish()
    return kills


def differences(run: Path, reference: Path) -> list[str]:
    """What is not the same in two runs' folders; [] is what is wanted."""
    from grpo.metrics import without_times

    logs = [without_times(json.loads((folder / "log_history.json").read_text())) for folder in (run, reference)]
    found = [] if logs[0] == logs[1] else ["log_history.json"]
    patterns = ("final/**/*", "checkpoints/*/*.safetensors", "completions/*", "rollouts/*")
    for pattern in patterns:
        names = [
            sorted(str(path.relative_to(folder)) for path in folder.glob(pattern) if path.is_file())
            for folder in (run, reference)
        ]
        if names[0] != names[1]:
            found.append(f"{pattern}: {names[0]} against {names[1]}")
            continue
        if pattern != "rollouts/*":  # these hold the run's id
            found += [name for name in names[0] if (run / name).read_bytes() != (reference / name).read_bytes()]
    reports = [json.loads((folder / "eval_after.json").read_text())["episodes"] for folder in (run, reference)]
    return found if reports[0] == reports[1] else [*found, "eval_after.json"]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill training runs, resume them, compare them with one left alone.")
    parser.add_argument("--kills", type=int, default=20, help="at least this many (default: 20)")
    parser.add_argument("--per-run", type=int, default=6, help="kills of one run at most (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    rng, kills, wrong, runs = random.Random(options.seed), Counter(), 0, 0
    with tempfile.TemporaryDirectory() as name:
        references = {}
        for iterations in (1, 2):
            flags = [*FLAGS, "--num-iterations", str(iterations)]
            references[iterations] = Run(Path(name) / f"reference{iterations}", flags, popen)
            references[iterations].start()
            references[iterations].finish()
        while sum(kills.values()) < options.kills:
            reference = references[1 + runs % 2]
            run = Run(Path(name) / f"run{runs}", reference.flags, popen)
            targets = [rng.choice(TARGETS) for _ in range(options.per_run)]
            # In the order in which a run comes by these phases, so that each one is met.
            targets.sort(key=lambda target: PHASES.index(target) if target in ("evaluation", "final model") else 2)
            killed = survive(run, targets, rng)
            different = differences(run.folder, reference.folder)
            wrong += bool(different)
            runs, kills = runs + 1, kills + killed
            verdict = f"DIFFERS: {', '.join(different)}" if different else "the same"
            print(f"run {runs}, {1 + (runs - 1) % 2} update(s) a step: killed in {dict(killed)}: {verdict}", flush=True)
            shutil.rmtree(run.folder)
    print(f"{sum(kills.values())} kills of {runs} runs: " + ", ".join(f"{kills[phase]} {phase}" for phase in PHASES))
    print(f"{runs - wrong} of {runs} runs equal the one that was left alone, bit for bit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
