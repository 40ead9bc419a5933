"""What every GPU kernel needs on an A100 and an H100, from ahead-of-time compilation: no GPU is involved.

Each test starts a process of its own, as a process that interprets Triton kernels cannot compile them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "kernels" / "bench"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# A tile too large in each way, and a float32 product that is taken for one of 16 bits.
BAD = """
import json, resources as r
of = lambda dtype, config: r.Case(
    r.op2.tile_kernel, 80, "bad", dtype, config.launch(r.DTYPES[dtype]), dict(hidden_stride_d=1, weight_stride_d=1),
    tensor_cores=True,
)
large = r.op2.tile_config((8, 0), r.DTYPES["bf16"])
bad = dict(
    spills=of("bf16", large._replace(num_warps=4)),
    shared=of("bf16", large._replace(num_stages=5)),
    tensor=of("fp32", r.op2.SMALL),
    good=of("bf16", large),
)
print(json.dumps({name: r.problems(r.measure(case)) for name, case in bad.items()}))
"""


def run(*arguments: str) -> tuple[int, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=environment, cwd=BENCH, capture_output=True, text=True)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report():
    return run("resources.py")


def test_no_kernel_spills_or_needs_more_than_the_chip_has(report):
    code, document = report
    assert document["problems"] == []
    assert code == 0
    for row in document["kernels"]:
        assert row["spills"] == row["stack"] == 0, row
        assert row["shared"] <= {80: 163, 86: 99, 90: 227}[row["sm"]] * 1024, row
        assert 0 < row["registers"] <= 255, row


def test_products_of_16_bits_use_tensor_cores(report):
    tiles = [row for row in report[1]["kernels"] if row["kernel"] == "tile_kernel" and "fp32" not in row["variant"]]
    assert {row["sm"] for row in tiles} >= {80, 90}
    assert all(row["tensor_core"] > 0 for row in tiles)


def test_every_kernel_is_compiled_for_both_chips(report):
    compiled = {(row["kernel"], row["sm"]) for row in report[1]["kernels"]}
    files = [
        ROOT / "kernels" / "grpo_kernels" / f"triton_{name}.py" for name in ("rows", "linear_logprob", "token_loss")
    ]
    names = {
        line.removeprefix("def ").split("(")[0]
        for file in files
        for line in file.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert len(names) == 6
    assert {(name, sm) for name in names for sm in (80, 90)} <= compiled


def test_the_table_of_the_readme_lists_these_kernels(report):
    text = (ROOT / "kernels" / "README.md").read_text()
    table = text.split("<!-- resources:begin -->")[1].split("<!-- resources:end -->")[0].splitlines()
    lines = [tuple(cell.strip() for cell in line.strip("|").split("|"))[:4] for line in table if line.startswith("|")][
        2:
    ]
    expected = {}
    for row in report[1]["kernels"]:
        key = (row["kernel"], row["config"], f"sm_{row['sm']}")
        expected[key] = expected.get(key, 0) + 1
    if not any(kernel.endswith(".cu)") for kernel, _, _ in expected):  # no nvcc here
        lines = [line for line in lines if not line[0].endswith(".cu)")]
    assert {line[:3]: int(line[3]) for line in lines} == expected, "run python kernels/bench/resources.py --write"


def test_bad_configurations_are_noticed():
    _, found = run("-c", BAD)
    assert found["good"] == []
    assert any("spills" in text for text in found["spills"])
    assert any("shared memory" in text for text in found["shared"])
    assert any("tensor-core" in text for text in found["tensor"])
