"""What it costs to record the rollouts of each step (`grpo.rollout_record`).

    python benchmarks/recording.py

Whole steps of the bundled policy. CPU time of this process is compared, so that other processes change little; waiting
for the disk is given apart, by the clock, as it is a matter of the disk. Prints one line, and as the last one JSON.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from grpo.config import parse
from grpo.data_types import Group
from grpo.rollout_record import Recorder
from grpo.run import make_trainer

STEPS = 12
WARM_UP = 2


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    settings = parse(["--recipe", "tiny", "--device", "cpu"], env={})
    trainer, _ = make_trainer(settings)
    cpu, clock, steps, sizes = list[float](), list[float](), list[float](), list[int]()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        recorder = Recorder(Path(folder), run_id="", config=settings.flat(), base_sha256="")

        def record(groups: list[Group]) -> None:
            before = time.process_time(), time.perf_counter()
            recorder.save(len(sizes) + 1, groups)
            cpu.append(time.process_time() - before[0])
            clock.append(time.perf_counter() - before[1])
            sizes.append(recorder.path(len(sizes) + 1).stat().st_size)

        for index in range(WARM_UP + STEPS):
            before = time.process_time()
            trainer.step(index, on_sampled=record)
            steps.append(time.process_time() - before)
    found = {
        "cpu_share": sum(cpu[WARM_UP:]) / sum(steps[WARM_UP:]),
        "cpu_ms": 1e3 * statistics.median(cpu[WARM_UP:]),
        "step_cpu_ms": 1e3 * statistics.median(steps[WARM_UP:]),
        "wall_ms": 1e3 * statistics.median(clock[WARM_UP:]),
        "bytes": statistics.mean(sizes),
    }
    share = f"{found['cpu_share']:.1%} of a step's CPU time ({found['cpu_ms']:.1f} of {found['step_cpu_ms']:.0f} ms)"
    size = f"{found['bytes'] / 1e3:.0f} kB"
    print(f"recording a step: {share}, {found['wall_ms']:.1f} ms by the clock with the disk; {size}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
