"""The benchmarks of the kernels run, refuse wrong results and bad flags, and say what they promise to say."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "kernels" / "bench"
SCRIPTS = {
    "linear_grpo_loss.py": ["linear_grpo_loss"],
    "linear_logprob.py": ["linear_logprob", "linear_logprob_autograd"],
    "logprob_from_logits.py": ["logprob_from_logits"],
    "grpo_token_loss.py": ["grpo_token_loss"],
}


@pytest.fixture
def bench(monkeypatch):
    """Import a module of the benchmarks; all are forgotten afterwards, as their names are common ones."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["bench"])
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if (BENCH / f"{name}.py").exists():
            del sys.modules[name]


def main(bench, script: str, *flags: str) -> None:
    module = bench(script.removesuffix(".py"))
    bench("harness").main([module.SCORING, module.AUTOGRAD] if "logprob.py" in script else [module.BENCHMARK], [*flags])


def rows_of(document: dict) -> list[dict]:
    return [row for each in document["benchmarks"] for case in each["cases"] for row in case["rows"]]


@pytest.mark.parametrize("script", [*SCRIPTS, "."])
def test_script_prints_tables_and_ends_with_one_json_document(script, tmp_path):
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, BENCH / script, "--smoke", "--device", "cpu", "--threads", "1", "--json", out],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.strip().splitlines()
    document = json.loads(last)
    assert json.loads(out.read_text()) == document
    names = SCRIPTS.get(script) or sum(SCRIPTS.values(), [])
    assert [each["benchmark"] for each in document["benchmarks"]] == names
    for each in document["benchmarks"]:
        assert set(each) == {"benchmark", "environment", "settings", "cases"}
        assert each["environment"]["versions"]["torch"] == torch.__version__
        for case in each["cases"]:
            assert set(case) == {"case", "rounds", "check_tokens", "rows", "goals"}
    rows = rows_of(document)
    assert {row["name"] for row in rows if row["ms"]} >= {"eager", "ours torch"}
    for row in rows:
        # Nothing is dropped in silence: a row has a time or a reason, and stands in the text.
        assert bool(row["ms"]) != bool(row["missing"])
        assert any(line.startswith((f"| {row['name']} ", f"- {row['name']}: not run: ")) for line in table)
        if row["ms"]:
            assert 0 < row["p20"] <= row["ms"] <= row["p80"]
            assert row["kind"] == "floor" or row["errors"]


def test_keys_of_a_row_are_the_documented_fields(bench, capsys):
    main(bench, "grpo_token_loss.py", "--smoke")
    row = rows_of(json.loads(capsys.readouterr().out.strip().splitlines()[-1]))[0]
    assert set(row) == {field.name for field in dataclasses.fields(bench("harness").RowResult)}


def off_by_a_thousandth(monkeypatch, script: str) -> str:
    """Make the implementation slightly wrong; the output that must be noticed."""
    import grpo_kernels.grpo_token_loss  # noqa: F401  the name in the package is the function
    from grpo_kernels import torch_rows

    if script == "grpo_token_loss.py":
        module = sys.modules["grpo_kernels.grpo_token_loss"]
        terms = module.token_terms

        def wrong(*args, **kwargs):
            stats, grad, grad_entropy = terms(*args, **kwargs)
            return stats, grad * 1.001, grad_entropy

        monkeypatch.setattr(module, "token_terms", wrong)
        return "d_logprobs"
    if script == "linear_logprob.py":
        finish = torch_rows._finish

        def wrong(*args):
            stats, total = finish(*args)
            return stats._replace(logprobs=stats.logprobs * 1.001), total

        monkeypatch.setattr(torch_rows, "_finish", wrong)
        return "logprobs"
    name = "grpo_rows_" if script == "linear_grpo_loss.py" else "logprob_rows_backward_"
    write = getattr(torch_rows, name)

    def wrong(logits, *args, **kwargs):
        result = write(logits, *args, **kwargs)
        logits.mul_(1.001)
        return result

    monkeypatch.setattr(torch_rows, name, wrong)
    return "d_hidden" if script == "linear_grpo_loss.py" else "d_logits"


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_implementation_ends_with_exit_code_1_before_any_timing(script, bench, monkeypatch, capsys):
    output = off_by_a_thousandth(monkeypatch, script)
    with pytest.raises(SystemExit) as stop:
        main(bench, script, "--smoke")
    said = capsys.readouterr()
    assert stop.value.code == 1
    wrong = said.err.strip().splitlines()[-1]
    assert wrong.startswith("wrong result: ") and "ours torch: " in wrong and f" {output} " in wrong
    assert "| ours torch" not in said.out and "{" not in said.out


def test_not_a_number_is_an_error(bench):
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    error = bench("harness").relative_error
    assert error(torch.tensor([1.0, float("nan")]), truth) == float("inf")
    assert error(truth.float(), truth) == 0
    assert error(2 * truth, truth) == pytest.approx(1)
    assert error(torch.tensor([1.5]), torch.tensor([1.0]).double(), torch.tensor(10.0)) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "flags",
    [
        ["--rouds", "3"],
        ["--rounds", "0"],
        ["--budget", "nan"],
        ["--budget", "-1"],
        ["--threads", "0"],
        ["--device", "tpu"],
        ["--smoke", "--cases", "N=8,D=8,V=8,fp32"],
        ["--cases", "N=8,D=8,fp32"],
        ["--cases", "N=8,D=8,V=8"],
        ["--cases", "N=8,D=8,V=8,V=9,fp32"],
        ["--cases", "N=0,D=8,V=8,fp32"],
        ["--cases", "N=8,D=8,V=8,int8"],
        ["--json", "/no/such/folder/out.json"],
    ],
    ids=" ".join,
)
def test_bad_flags_are_one_line_and_exit_code_2(flags, bench, capsys):
    with pytest.raises(SystemExit) as stop:
        main(bench, "linear_grpo_loss.py", *flags)
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert not said.out
    assert len(said.err.strip().splitlines()) == 1 and said.err.startswith("error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_one_line(bench, capsys):
    with pytest.raises(SystemExit) as stop:
        main(bench, "linear_grpo_loss.py", "--device", "cuda")
    assert stop.value.code == 2 and "no CUDA device" in capsys.readouterr().err


def test_rounds_are_interleaved_and_begin_with_another_row_each_time(bench):
    harness, problems = bench("harness"), bench("problems")
    calls = []

    def row(name, kind):
        return harness.Row(name, lambda problem: calls.append(name) or {}, kind=kind, truth=None)

    rows = [row("a", "floor"), row("b", "baseline"), harness.Row("c", missing="not here"), row("d", "ours")]
    problem = problems.token_problem(problems.Case("fp32", N=8), torch.device("cpu"))
    samples = harness.time_rounds(rows, [None] * 4, problem, 3, 60.0, "")
    assert "".join(calls) == "abd" + "bda" + "dab"
    assert [len(each) for each in samples] == [3, 3, 0, 3]


def test_baseline_that_fails_is_a_row_with_the_reason_and_ours_is_not(bench):
    harness, problems = bench("harness"), bench("problems")

    def fail(problem):
        raise RuntimeError("out of memory\nmuch more")

    problem = problems.token_problem(problems.Case("fp32", N=8), torch.device("cpu"))
    rows, results = [harness.Row("x", fail)], [harness.RowResult("x", "baseline")]
    assert harness.run_or_drop(0, rows, results, problem) is None
    assert results[0].missing == rows[0].missing == "failed: RuntimeError: out of memory"
    with pytest.raises(RuntimeError):
        harness.run_or_drop(0, [harness.Row("y", fail, kind="ours")], results, problem)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")
def test_peak_memory_counts_what_is_held_at_once_and_freed_again(bench):
    def run():
        for _ in range(3):
            torch.ones(64 << 20, dtype=torch.uint8)  # one after the other: 67 MB, not 201

    sample, _ = bench("measure").measure(run, torch.device("cpu"))
    assert 60e6 < sample.peak_bytes < 90e6


def test_data_is_peaked_and_the_ratios_are_away_from_the_clip_bounds(bench):
    problems = bench("problems")
    case = problems.Case("fp32", N=256, D=64, V=4096)
    problem = problems.head_problem(case, torch.device("cpu"))
    hidden, weight = problem.inputs["hidden"].detach(), problem.inputs["weight"].detach()
    logprobs = torch.log_softmax(hidden @ weight.T, -1).gather(1, problem.targets[:, None])[:, 0]
    assert 0.2 < logprobs.exp().mean() < 0.8
    ratio = (logprobs - problem.tokens["old_logprobs"]).exp()
    outside = (ratio < 0.8) | (ratio > 1.2)
    assert 0.05 < outside.float().mean() < 0.25
    low, high = torch.tensor(0.8).log(), torch.tensor(1.2).log()
    near = ((ratio.log() - low).abs() < 0.01) | ((ratio.log() - high).abs() < 0.01)
    assert near.float().mean() < 0.03
    assert problem.first(128).tokens["token_weights"].sum() == pytest.approx(1)
