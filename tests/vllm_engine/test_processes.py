"""vLLM in two of torchrun's processes: one engine each, and one over both, sample the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def log(folder, *flags):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "train.py", "--recipe", "tiny", "--device", "cpu", "--engine", "vllm", "--num-steps", "2"]
    sizes = ["--prompts-per-step", "3", "--num-generations", "2", "--max-completion-len", "32", "--eval-limit", "0"]
    done = subprocess.run(
        [*command, *sizes, "--warmup-steps", "0", "--output-dir", str(folder), *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    return json.loads((folder / "log_history.json").read_text())


def test_one_engine_over_two_processes_samples_what_an_engine_in_each_does(tmp_path):
    each, over_both = log(tmp_path / "each"), log(tmp_path / "both", "--tensor-parallel", "2")
    for one, two in zip(each, over_both, strict=True):
        for row in (one, two):
            assert 0 < row["sampler_gap/mean"] < 1e-4  # they have the trainer's weights, also after an update
        for name in ("reward", "completions/mean_length", "loss", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
