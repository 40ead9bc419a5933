"""benchmarks/engines.py without vLLM: what it refuses, its torch side, its arithmetic.

tests/vllm_engine runs all of it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import cases  # noqa: E402
import engines  # noqa: E402
import sides  # noqa: E402


@pytest.mark.parametrize(
    "args, flag",
    [
        (("--rounds", 0), "--rounds 0"),
        (("--threads", 0), "--threads 0"),
        (("--json", "/nowhere/file.json"), "--json"),
        (("--cases", "8b"), "--cases"),
        ((), "vLLM is not installed in this environment; `make test-vllm` makes one"),
    ],
)
def test_it_refuses(args, flag, capsys, monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    with pytest.raises(SystemExit) as stopped:
        engines.main(list(map(str, args)))
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == ""
    (line,) = said.err.splitlines()
    assert flag in line


def test_the_torch_side_plays_batches_of_a_forced_length(tmp_path):
    case = cases.smoke(cases.CASES[engines.WORK["0.6b"]])
    model = cases.make_model(case, tmp_path)
    settings = dict(case=dataclasses.asdict(case), model=str(model), device="cpu", threads=1, engine="torch")
    with sides.Side("torch", sys.executable, "side_engine.py", settings, threads=1) as side:
        first, second = side.step(), side.step()
    assert side.died == "" and side.about["settings"]["engine"].startswith("torch, in process")
    for step in (first, second):
        assert step["sampled_tokens"] == case.episodes * case.completion and step["episodes"] == case.episodes
        assert step["turns"] == 1 and step["seconds"] > 0 and step["sync_seconds"] >= 0
    assert first["prompts_crc"] != second["prompts_crc"]
    summary = engines.summary(side)
    assert summary["counted_rounds"] == 1 and summary["peak_bytes"] > 100e6
    assert summary["tokens_per_second"] == second["sampled_tokens"] / second["seconds"]


def made_up(seconds, tokens=100, sync=0.0):
    steps = [
        {
            "seconds": each,
            "sync_seconds": sync,
            "cpu_seconds": 1.0,
            "sampled_tokens": tokens,
            "episodes": 4,
            "turns": 1,
            "prompts_crc": 5,
        }
        for each in seconds
    ]
    return {"steps": steps}


def test_ratios_leave_the_warm_up_out():
    found = engines.ratios(made_up([9, 2, 2, 4]), made_up([99, 1, 1, 1], tokens=200, sync=1.0))
    assert found["tokens_per_second_ratio"] == 4  # of 4, 4, 8
    assert found["tokens_per_second_with_sync_ratio"] == 2
    assert found["episodes_per_second_ratio"] == 2


@pytest.mark.parametrize("rounds", [0, 1])
def test_an_engine_that_died(rounds, monkeypatch, capsys):
    """It is said, what is there is compared, and the exit code is 1."""

    class Dead:
        def __init__(self, name, python, script, settings, threads):
            self.name, self.died, self.steps, self.peak, self.about = name, "", [], 5, {}
            self.lasts = rounds if name == "vllm" else 2

        def step(self):
            if len(self.steps) == self.lasts:
                self.died = "out of memory"
                return None
            self.steps += made_up([2.0 if self.name == "vllm" else 1.0])["steps"]
            return self.steps[-1]

        def close(self):
            pass

    monkeypatch.setattr(engines, "Side", Dead)
    monkeypatch.setattr(engines, "vllm_version", lambda: "vllm 0.32.0")
    with pytest.raises(SystemExit) as stopped:
        engines.main(["--cases", "tiny", "--rounds", "2", "--device", "cpu"])
    out = capsys.readouterr().out
    assert stopped.value.code == 1 and f"vllm DIED after {rounds} rounds: out of memory" in out
    assert ("tokens per second ratio (vLLM / torch): 0.50" in out) == (rounds == 1)
