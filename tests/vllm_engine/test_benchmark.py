"""benchmarks/engines.py runs, with both engines. That it measures is asserted, not what."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_engines_smoke(tmp_path):
    command = [sys.executable, "benchmarks/engines.py", "--smoke", "--rounds", "2", "--threads", "1", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "engines.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "engines.json").read_text())
    assert [case["name"] for case in document["cases"]] == ["tiny", "0.6b"]
    for case in document["cases"]:
        assert case["same_prompts"] and case["tokens_per_second_ratio"] > 0
        for name, side in case["engines"].items():
            assert side["settings"]["engine"].startswith(name) and side["counted_rounds"] == 1
            assert side["tokens_per_second"] > 0 and side["episodes_per_second"] > 0 and side["peak_bytes"] > 1e8
        assert case["engines"]["vllm"]["sync_seconds"] > 0
    forced = document["cases"][1]["engines"]
    assert forced["torch"]["sampled_tokens"] == forced["vllm"]["sampled_tokens"] == 4 * 8
