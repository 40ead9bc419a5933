"""Does a long run need more and more memory?

    python benchmarks/memory.py                  # 1,000 steps of the tiny policy, about a quarter of an hour
    python benchmarks/memory.py --steps 1000 -- --prompts-per-step 1

Starts `train.py` as it is (rollouts, updates, log, episodes, checkpoints; no evaluation) and reads the process's
resident memory from the system while it runs. What comes after `--` goes to train.py.

Flat means: between its second and its last fifth the run's median memory grows by less than 2 %, and so does the peak
(the second fifth, as the first few hundred batches still meet the largest one). Prints a markdown table and, as the
last line, JSON. Linux only.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sides import process_memory
from table import finish, machine, markdown, one_line_errors, say

from grpo.config import UsageError, tyro_cli

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.02
POLL = 0.5  # seconds


@dataclass(frozen=True)
class Arguments:
    """Does a long run need more and more memory?"""

    steps: int = 1000
    """Steps of the run, at least 10."""
    threads: int = 1
    """CPU threads of the run."""
    json: Path | None = None
    """Also write the JSON document to this file."""


def finished_steps(run: Path) -> int:
    """Lines in the run's log."""
    try:
        return (run / "log_history.json").read_bytes().count(b'{"step": ')
    except FileNotFoundError:
        return 0


def watch(args: Arguments, flags: list[str], run: Path) -> list[dict[str, int]]:
    """Run train.py; `step`, resident and peak bytes, about twice a second. Raises UsageError with what it said."""
    command = [sys.executable, str(ROOT / "train.py"), "--recipe", "tiny", "--device", "cpu", "--eval-limit", "0",
               "--num-steps", str(args.steps), "--output-dir", str(run), *flags]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    samples: list[dict[str, int]] = []
    with (run.parent / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            said = 0
            while process.poll() is None:
                time.sleep(POLL)
                step, resident = finished_steps(run), process_memory(process.pid, "VmRSS")
                if resident and 0 < step < args.steps:  # behind its steps the run still loads matplotlib and draws
                    peak = process_memory(process.pid, "VmHWM") or resident  # where it ended in between
                    samples.append({"step": step, "resident": resident, "peak": peak})
                    if step >= said + 50:
                        said = step
                        say(f"step {step} of {args.steps}: {resident / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
        finally:
            process.kill()
            process.wait()
        if finished_steps(run) < args.steps:
            output.seek(0)
            raise UsageError("the run did not finish: " + " ".join(output.read().split())[-300:])
    return samples


def judge(samples: list[dict[str, int]], steps: int) -> dict[str, Any]:
    """Growth between the second and the last fifth, and the slope of a line through everything behind the first."""
    fifths = [[s for s in samples if (k * steps) // 5 < s["step"] <= ((k + 1) * steps) // 5] for k in range(5)]
    if not all(fifths):
        raise UsageError(f"--steps {steps}: the run was too short to be measured")
    second, last = fifths[1], fifths[4]
    behind = [s for s in samples if s["step"] > steps // 5]
    slope = np.polyfit([s["step"] for s in behind], [s["resident"] for s in behind], 1)[0]
    growth = statistics.median(s["resident"] for s in last) / statistics.median(s["resident"] for s in second)
    peak = last[-1]["peak"] / second[-1]["peak"]
    return {
        "fifths": [
            {"until_step": fifth[-1]["step"], "median_resident": statistics.median(s["resident"] for s in fifth),
             "peak": fifth[-1]["peak"]} for fifth in fifths
        ],
        "resident_growth": growth,
        "peak_growth": peak,
        "resident_bytes_per_step": float(slope),
        "limit": LIMIT,
        "met": max(growth, peak) <= LIMIT,
    }  # fmt: skip


def main(argv: list[str]) -> None:
    """Exit codes: 0; 1 where memory is not flat; 2 for bad input, with one line on stderr."""
    cut = argv.index("--") if "--" in argv else len(argv)
    with one_line_errors():
        args = tyro_cli(Arguments, argv[:cut], prog="memory.py", description=__doc__.splitlines()[0])
        if not 10 <= args.steps <= 10**6 or not 1 <= args.threads <= 1024:
            raise UsageError("--steps must be between 10 and 1000000, --threads between 1 and 1024")
        if args.json is not None and not args.json.absolute().parent.is_dir():
            raise UsageError(f"--json {args.json}: its folder does not exist")
        if not Path("/proc/self/status").exists():
            raise UsageError("memory.py reads /proc: Linux only")
        with tempfile.TemporaryDirectory() as folder:
            samples = watch(args, argv[cut + 1 :], Path(folder) / "run")
        found = judge(samples, args.steps)
    document = {"benchmark": "memory", "machine": machine("cpu", args.threads), "steps": args.steps,
                "flags": argv[cut + 1 :], **found, "columns": ["step", "resident", "peak"],
                "samples": [list(s.values()) for s in samples[:: max(1, len(samples) // 200)]]}  # fmt: skip
    print(f"\n## Memory over {args.steps} steps\n\n{document['machine']['name']}, {args.threads} threads; commit "
          f"{document['machine']['commit']}\n")  # fmt: skip
    rows = [[f"{f['until_step']}", f"{f['median_resident'] / 1e6:.1f}", f"{f['peak'] / 1e6:.1f}"]
            for f in found["fifths"]]  # fmt: skip
    print(markdown(["until step", "median MB", "peak MB so far"], rows))
    print(f"\nFrom the second to the last fifth: memory x{found['resident_growth']:.4f}, peak "
          f"x{found['peak_growth']:.4f}; {found['resident_bytes_per_step'] / 1e3:+.2f} kB a step behind the first.\n"
          f"\n- goal: both at most x{LIMIT:g}: {'met' if found['met'] else 'MISSED'}")  # fmt: skip
    finish(document, args.json)
    sys.exit(0 if found["met"] else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
