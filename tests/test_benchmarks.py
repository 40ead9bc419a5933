"""The scripts in benchmarks/ run, with tiny settings and without trl. That they measure is asserted, not what."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import cases  # noqa: E402
import lora_memory  # noqa: E402
import memory  # noqa: E402
import scaling  # noqa: E402
import sides  # noqa: E402
import step_vs_trl  # noqa: E402
import synthetic  # noqa: E402


def run(script: str, *args: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_scaling_smoke(tmp_path):
    plot = tmp_path / "plot.png"
    done = run("scaling.py", "--smoke", "--rounds", 1, "--threads", 1, "--device", "cpu", "--out", plot)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert plot.stat().st_size > 1000
    assert {point["sweep"] for point in document["points"]} == set(scaling.SWEEPS)
    for point in document["points"]:
        assert point["seconds"] > 0 and point["padded_seconds"] > 0 and point["predicted_seconds"] > 0
        assert point["seconds_with_rollout"] > point["seconds"]
    assert [goal["limit"] for goal in document["goals"]] == [scaling.GOAL] * 2
    assert set(document["reference"]["reference_seconds"]) == {
        "unique tokens, cached prefix", "unique tokens", "padded rows"
    }  # fmt: skip


def test_scaling_counts_unique_tokens(tmp_path):
    """Two groups of three behind a common prefix: each token once, the last of an episode not at all."""
    shape = synthetic.Shape(groups=2, members=3, prompt=20, shared=8, turns=2, turn_tokens=4)
    synthetic.write_model(tmp_path, synthetic.ModelShape(1, 16, 2048), context=128)
    side = synthetic.Side(tmp_path, "cpu", scaling.Packing(), 128, 4096)
    episodes = synthetic.sample(side.engine, shape, 2048, step=0).episodes
    assert [len(e.completion_ids) for e in episodes] == [shape.completion] * 6
    assert len({e.completion_ids for e in episodes}) == 6
    side.packing = scaling.Packing(prefix=episodes[0].prompt_ids[:8])
    found = synthetic.counts(side.batches(episodes))
    tail = shape.completion - 1
    assert found["unique_tokens"] == 8 + 2 * 12 + 6 * tail
    assert found["trained_tokens"] == 6 * 2 * 4
    assert found["pairs"] == 8 * 9 // 2 + 2 * (12 * 8 + 12 * 13 // 2) + 6 * (tail * 20 + tail * (tail + 1) // 2)


def test_scaling_prediction_is_made_without_the_point():
    """Costs that are linear in the counts are predicted exactly; one outlier does not predict itself."""
    points = []
    for tokens, pairs, trained in [(100, 900, 40), (250, 2000, 60), (400, 9000, 10), (800, 5000, 300), (90, 50, 5),
                                   (600, 700, 500)]:  # fmt: skip
        point = scaling.Point("turns", tokens, synthetic.Shape())
        point.counts = {"unique_tokens": tokens, "pairs": pairs, "trained_tokens": trained}
        seconds = 0.01 + 2e-4 * tokens + 1e-6 * pairs + 3e-4 * trained
        point.reference, point.update = [0.3 * seconds], [0.7 * seconds]
        points.append(point)
    coefficients = scaling.predict(points)
    assert coefficients == pytest.approx(
        {"constant": 1e4, "unique_tokens": 200, "pairs": 1, "trained_tokens": 300}, rel=1e-6
    )
    for point in points:
        assert point.predicted == pytest.approx(point.cost, rel=1e-6)
    honest = points[2].predicted
    points[2].update = [2 * points[2].cost]
    scaling.predict(points)
    assert points[2].predicted == pytest.approx(honest, rel=1e-6)


def test_step_vs_trl_without_trl(tmp_path):
    """An interpreter that finds no trl: one line that says how to install it, exit code 2."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: no site-packages
    python.chmod(0o755)
    done = run("step_vs_trl.py", "--smoke", "--device", "cpu", "--trl-python", python)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: trl is not installed") and "pip install" in line and "trl==1.16.*" in line


@pytest.mark.parametrize(
    "args, flag",
    [
        (("--rounds", 0), "--rounds 0"),
        (("--trl-python", "/nowhere/python"), "--trl-python"),
        (("--trl-batch", 5), "--trl-batch 5"),
        (("--json", "/nowhere/file.json"), "--json"),
    ],
)
def test_step_vs_trl_refuses(args, flag, capsys):
    with pytest.raises(SystemExit) as stopped:
        step_vs_trl.main(list(map(str, args)))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line


def worker(case: cases.Case, model: Path) -> sides.Side:
    settings = dict(case=dataclasses.asdict(case), model=str(model), device="cpu", threads=1, steps=2)
    return sides.Side("ours", sys.executable, "side_ours.py", settings, threads=1)


def test_our_side_plays_steps_of_a_forced_case(tmp_path):
    case = cases.smoke(cases.CASES["a"])
    with worker(case, cases.make_model(case, tmp_path)) as side:
        first, second = side.step(), side.step()
    assert side.died == "" and side.steps == [first, second]
    for step in (first, second):
        assert step["sampled_tokens"] == case.groups * case.group_size * case.completion
        assert step["turns"] == 1 and step["reward"] == pytest.approx(0.375)
        assert abs(step["prompt_tokens"] / (case.groups * case.group_size) - case.prompt) < 15
        assert sum(step["phases"].values()) <= step["seconds"] + 1e-3
    assert first["prompts_crc"] != second["prompts_crc"]
    assert second["phases"]["reference"] > 0
    assert side.peak >= second["peak_bytes"] > 100e6
    summary = step_vs_trl.summary(side)
    assert summary["counted_steps"] == 1 and summary["seconds"] == second["seconds"]


def test_a_side_that_dies_is_reported(tmp_path):
    """Killed between two steps: the finished one stays, and so does the reason."""
    case = cases.smoke(cases.CASES["b"])
    with worker(case, cases.make_model(case, tmp_path)) as side:
        first = side.step()
        side._process.kill()
        assert side.step() is None and side.step() is None
        assert side.steps == [first] and "killed" in side.died and side.peak > 100e6
    assert step_vs_trl.summary(side)["died"]


def made_up(seconds: list[float], rollout: float, tokens: int, peak: float) -> dict:
    steps = [
        {"seconds": each, "phases": {"rollout": rollout, "reference": 0.0, "update": each - rollout},
         "sampled_tokens": tokens}
        for each in seconds
    ]  # fmt: skip
    return {"steps": steps, "peak_bytes": peak}


def test_ratios_leave_the_warm_up_out():
    found = step_vs_trl.ratios(made_up([9, 2, 2, 4], 1, 100, 1e9), made_up([9, 6, 8, 8], 2, 200, 3e9))
    assert found["step_time_ratio"] == 3 and found["peak_memory_ratio"] == 3
    assert found["step_time_per_sampled_token_ratio"] == 1.5
    assert found["rollout_time_ratio"] == 2 and found["rest_time_ratio"] == 4


def test_ratios_of_a_side_that_died():
    """After its first step: that one is compared. Before: nothing is."""
    ours = made_up([3, 2, 2], 1, 100, 1e9)
    assert step_vs_trl.ratios(ours, made_up([9], 3, 100, 2e9))["step_time_ratio"] == 3
    assert step_vs_trl.ratios(ours, made_up([], 3, 100, None))["step_time_ratio"] is None


class FakeSide:
    """Stands for a worker: TRL's is killed unless it has at most two episodes at once and checkpointing."""

    def __init__(self, name: str, settings: dict, reason: str):
        self.name, self.settings, self.steps, self.died, self.peak_seen = name, settings, [], "", 7_000_000
        self.fits = name == "ours" or settings["trl_batch"] == 1 and settings["trl_checkpointing"]
        self.reason = reason

    def step(self):
        if not self.fits:
            self.died = self.reason
            return None
        self.steps.append({"seconds": 1.0})
        return self.steps[-1]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("reason, attempts", [("killed: out of memory", 4), ("ImportError: no such name", 0)])
def test_trl_is_run_again_where_memory_ran_out(monkeypatch, interleaved, reason, attempts):
    """8 -> 4 -> 2 -> 1 episodes at once, then checkpointing; another error than memory is only reported."""
    monkeypatch.setattr(step_vs_trl, "start", lambda name, args, settings: FakeSide(name, settings, reason))
    settings = dict(case=dataclasses.asdict(cases.CASES["a"]), trl_batch=0, trl_checkpointing=False)
    played, failed = step_vs_trl.play(step_vs_trl.Arguments(rounds=2), settings, interleaved)
    assert len(failed) == attempts and all(reason in line and "7 MB" in line for line in failed)
    assert len(played["ours"].steps) == 2
    assert len(played["trl"].steps) == (2 if attempts else 0)
    assert played["trl"].died == ("" if attempts else reason)


def test_invariants_smoke():
    done = run("invariants.py", "--smoke", "--steps", 1, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert all(seconds > 0 for seconds in document["check_seconds"].values())  # each one has run, under its timer
    assert sum(document["check_seconds"].values()) < document["step_seconds"]
    assert document["share"] == pytest.approx(sum(document["check_seconds"].values()) / document["step_seconds"])


@pytest.mark.parametrize("leak, met", [(0, True), (10_000, True), (100_000, False)])
def test_memory_that_grows_is_not_flat(leak, met):
    """600 MB that go up and down by 1 %, and so many bytes a step: 6 or 60 MB between the two fifths."""
    samples = [
        {"step": n, "resident": 600_000_000 + leak * n + 6_000_000 * (n % 3 - 1), "peak": 606_000_000 + leak * n}
        for n in range(1, 1001)
    ]
    found = memory.judge(samples, 1000)
    assert found["met"] == met and found["resident_bytes_per_step"] == pytest.approx(leak, abs=50)


def test_memory_refuses(capsys):
    with pytest.raises(SystemExit) as stopped:
        memory.main(["--steps", "3"])
    assert stopped.value.code == 2 and "--steps" in capsys.readouterr().err


def test_lora_takes_less_memory_than_all_weights_and_a_copy():
    pytest.importorskip("peft", reason="peft is not installed (the `lora` extra)")
    # 7M parameters: 20 bytes each are 142 MB, with adapters little more than 4.
    done = run("lora_memory.py", "--layers", 4, "--width", 384, "--rank", 4)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    first, lora = document["ways"][0], document["ways"][-1]
    assert lora["settings"] == {"lora_rank": 4} and first["settings"] == {}
    assert first["counted_bytes"] == 20 * first["parameters"] and first["trained"] == first["parameters"]
    adapters = lora["parameters"] - first["parameters"]
    assert lora["trained"] == adapters and lora["counted_bytes"] == 4 * first["parameters"] + 16 * adapters
    for way in (first, lora):  # what is counted is there
        assert way["peak_bytes"] - way["libraries_bytes"] > way["counted_bytes"]
    saved = first["counted_bytes"] - lora["counted_bytes"]
    assert first["peak_bytes"] - lora["peak_bytes"] > 0.6 * saved


@pytest.mark.parametrize("flags", [["--width", "12"], ["--vocab", "100"], ["--layers", "0"]])
def test_lora_memory_refuses(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        lora_memory.main(flags)
    assert stopped.value.code == 2 and flags[0] in capsys.readouterr().err
