"""What the benchmarks share: correctness first, then interleaved timing, a table for people and JSON for scripts.

1. Correctness. Every row runs on the first `CHECK_TOKENS` tokens; its loss and gradients are compared with float64.
   A row of ours must be at most twice as far off as eager PyTorch in the same dtype, a baseline must not be plainly
   wrong. Otherwise the benchmark ends with exit code 1 and times nothing.
2. Timing. In each round every row runs once on the whole case, beginning with another one each time, so that drift of
   the machine hits all alike. Reported are medians with p20 and p80; the ratio to the floor row is the median of the
   ratios within a round. Rounds go on until the time budget is spent, at least one.

JSON: `benchmarks`, a list; each has `benchmark`, `environment`, `settings` and `cases`; a case has `case`, `rounds`,
`check_tokens`, `rows` and `goals`. The keys of a row are the fields of `RowResult`, those of a goal of `Goal`.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import report
import torch
import tyro
from measure import Sample, environment, measure
from problems import Case, Problem
from torch import Tensor

from grpo.config import UsageError, tyro_cli
from grpo_kernels import why_not

CHECK_TOKENS = 160
MAX_ROUNDS = {"cpu": 11, "cuda": 30}
BUDGET = {"cpu": 120.0, "cuda": 400.0}
# What a row of ours may be off beyond twice eager's error (some errors of eager are 0 by luck), and what no baseline
# may be off: relative to the gradient's norm, or for the loss to the sum of the tokens' absolute terms.
TINY = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 2e-4}
PLAINLY_WRONG = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.02}


class WrongResult(Exception):
    """A row computed something else than what it is timed for."""


@dataclass(frozen=True)
class Arguments:
    """Benchmark one op: correctness against float64 first, then interleaved timing."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    cases: tuple[str, ...] = ()
    """Shapes, like N=1024,D=256,V=32768,fp32. Default: those of the device."""
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One tiny case and one round: does everything run and is everything right?"""
    rows: tuple[str, ...] = ()
    """Only rows whose name contains one of these; the floor and eager always run, to compare with."""
    rounds: int | None = None
    """Timed rounds of each case. Default: as many as the budget allows."""
    budget: float | None = None
    """Seconds for everything. Default: 160 on a CPU, 400 on a GPU."""
    threads: int | None = None
    """CPU threads. Default: PyTorch's, one a core."""
    compile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Include torch.compile of eager on a CPU, where it takes half a minute to compile a case."""
    json: Path | None = None
    """Also write the JSON document to this file."""


@dataclass(frozen=True)
class Row:
    """One implementation. `run` computes everything anew and returns the tensors that `truth` names, and others."""

    name: str
    run: Callable[[Problem], dict[str, Tensor]] | None = None
    note: str = ""
    """What it does differently, for the table's footnotes."""
    missing: str | None = None
    """Why it cannot run here."""
    kind: Literal["floor", "baseline", "ours"] = "baseline"
    truth: str | None = "op"
    """Key of the benchmark's truths that it computes; None: nothing to compare."""
    fresh_inputs: bool = False
    """Whether it overwrites its inputs: each call then gets a copy, made outside the measurement."""
    compiles: bool = False
    """Whether its first call on a new shape compiles: that call is then not timed."""
    wide_accumulator: bool = False
    """Whether a 16-bit dW is accumulated in a float32 [V, D], which counts as dW and not as extra memory."""

    def measure(self, problem: Problem) -> tuple[Sample, dict[str, Tensor]]:
        if self.fresh_inputs:
            problem = problem.first(len(problem))
        run = self.run
        assert run, self.missing
        return measure(lambda: run(problem), problem.device)


def why_not_timed(op: str, impl: str, device: torch.device) -> str | None:
    """Why a row of ours is left out, or None. Triton's interpreter runs kernels on a CPU, for tests of their values."""
    reason = why_not(op, impl, device)
    if reason is None and impl == "triton" and device.type == "cpu":
        return "Triton's interpreter is on (TRITON_INTERPRET=1), whose times say nothing"
    return reason


@dataclass
class RowResult:
    name: str
    kind: str
    missing: str | None = None
    note: str = ""
    ms: float | None = None
    """Median; also p20 and p80, milliseconds."""
    p20: float | None = None
    p80: float | None = None
    samples: list[float] = field(default_factory=list)
    ratio_to_floor: float | None = None
    percent_of_floor: float | None = None
    tflops: float | None = None
    """Useful TFLOP/s, whatever is recomputed."""
    gbps: float | None = None
    """Useful GB/s: what must be read and written once."""
    peak_mb: float | None = None
    """Peak memory beyond the inputs, 1e6 bytes, median (a library's first call may add a pool that stays)."""
    extra_mb: float | None = None
    """The same without the outputs (dX, dW and its float32 accumulator)."""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative to float64, by output, from the correctness pass."""


@dataclass(frozen=True)
class Goal:
    what: str
    limit: float
    value: float
    met: bool


@dataclass(frozen=True)
class Benchmark:
    """One op. `problem`, `rows` and the rest get the case and the device."""

    name: str
    title: str
    needs: tuple[str, ...]
    cases: dict[str, tuple[str, ...]]
    """By device type; `smoke` is the tiny one."""
    problem: Callable[[Case, torch.device], Problem]
    rows: Callable[[Case, torch.device, Arguments], list[Row]]
    truths: Callable[[Problem], dict[str, dict[str, Tensor]]]
    """Of a float64 problem: outputs by name, and optionally `loss_scale`, what the loss's error is relative to."""
    flops: Callable[[Case], float] = lambda case: 0.0
    bytes: Callable[[Case], float] = lambda case: 0.0
    outputs: Callable[[Case], tuple[int, int]] = lambda case: (0, 0)
    """Bytes of what every row must return, and of a float32 accumulator of a 16-bit dW."""
    goals: Callable[[Case, dict[str, RowResult]], list[Goal]] = lambda case, rows: []


def relative_error(value: Tensor, truth: Tensor, scale: Tensor | None = None) -> float:
    """|value - truth| / |truth| in the 2-norm, in blocks: a float64 copy of dW would be 1.2 GB."""
    value, truth = value.detach().reshape(-1), truth.detach().reshape(-1)
    difference = total = 0.0
    for part in range(0, len(truth), 1 << 20):
        block = truth[part : part + (1 << 20)]
        difference += float((value[part : part + (1 << 20)].double() - block).square().sum())
        total += float(block.square().sum())
    size = total**0.5 if scale is None else float(scale)
    error = difference**0.5 / max(size, 1e-300)
    return error if error == error else float("inf")


def run_or_drop(i: int, rows: list[Row], results: list[RowResult], problem: Problem) -> tuple[Sample, dict] | None:
    """Measure row `i`. A baseline that cannot run (out of memory, no compiler) is marked as missing: None."""
    try:
        return rows[i].measure(problem)
    except (RuntimeError, ImportError) as error:
        if rows[i].kind != "baseline":
            raise
        problem.gradients()
        results[i].missing = report.one_line(error)
        rows[i] = dataclasses.replace(rows[i], missing=results[i].missing)
        return None


def check(rows: list[Row], results: list[RowResult], benchmark: Benchmark, case: Case, problem: Problem) -> float:
    """Fill in the errors, mark baselines that cannot run as missing, return seconds that one round will take.

    Raises WrongResult.
    """
    count = min(len(problem), CHECK_TOKENS)
    small = problem.first(count)
    truths = benchmark.truths(small.double())
    estimate, eager = 0.0, {}
    for i, row in sorted(enumerate(rows), key=lambda pair: pair[1].name != "eager"):
        if row.missing:
            continue
        report.say(f"{benchmark.name} {case}: checking {row.name}")
        measured = run_or_drop(i, rows, results, small)
        if measured is None:
            if row.name == "eager":
                raise WrongResult(f"{benchmark.name} {case}: nothing to compare with, eager {results[i].missing}")
            continue
        sample, outputs = measured
        estimate += sample.seconds * len(problem) / count
        truth = truths[row.truth] if row.truth else {}
        scale = truth.get("loss_scale")
        for name, true in truth.items():
            if name != "loss_scale":
                results[i].errors[name] = relative_error(outputs[name], true, scale if name == "loss" else None)
        if row.name == "eager":
            eager = results[i].errors
        for name, error in results[i].errors.items():
            limit = PLAINLY_WRONG[case.dtype]
            if row.kind == "ours":
                limit = min(limit, 2 * eager.get(name, limit) + TINY[case.dtype])
            if not error <= limit:
                raise WrongResult(f"{benchmark.name} {case}: {row.name}: relative error of {name} is {error:.3g}, "
                                  f"at most {limit:.3g} was allowed; nothing is timed")  # fmt: skip
    return estimate


def time_rounds(
    rows: list[Row], results: list[RowResult], problem: Problem, rounds: int | None, seconds: float, label: str
) -> list[list[Sample]]:
    """Samples of each row, one a round. Without `rounds`: until `seconds` are spent, at least one round."""
    samples: list[list[Sample]] = [[] for _ in rows]
    cuda, start, done = problem.device.type == "cuda", time.perf_counter(), 0
    most = rounds or MAX_ROUNDS[problem.device.type]
    # On a CPU the correctness pass was the warm-up; a GPU's allocator and clocks need the full size.
    for i, row in enumerate(rows):
        if not row.missing and (cuda or row.compiles):
            report.say(f"{label}: warming up {row.name}")
            run_or_drop(i, rows, results, problem)
    runnable = [i for i, row in enumerate(rows) if not row.missing]
    begin = time.perf_counter()
    while done < most:
        for i in (runnable[(done + k) % len(runnable)] for k in range(len(runnable))):
            left = report.remaining(start, seconds, done, rounds)
            report.say(f"{label}: round {done + 1}{f'/{rounds}' if rounds else ''}, {rows[i].name}, {left}")
            samples[i].append(rows[i].measure(problem)[0])
        done += 1
        each = (time.perf_counter() - begin) / done
        if rounds is None and time.perf_counter() - start + each > seconds:
            break
    return samples


def summarise(
    results: list[RowResult], samples: list[list[Sample]], rows: list[Row], benchmark: Benchmark, case: Case
) -> None:
    """Fill in times, rates and memory. The floor row, if any, is the first."""
    floor = samples[0] if rows[0].kind == "floor" else []
    outputs, accumulator = benchmark.outputs(case)
    for row, result, of_row in zip(rows, results, samples):
        if not of_row:
            continue
        seconds = [sample.seconds for sample in of_row]
        result.samples = [round(each * 1e3, 4) for each in seconds]
        result.p20, result.ms, result.p80 = (report.quantile(seconds, q) * 1e3 for q in (0.2, 0.5, 0.8))
        if floor:
            ratios = [mine.seconds / bare.seconds for mine, bare in zip(of_row, floor)]
            result.ratio_to_floor = statistics.median(ratios)
            result.percent_of_floor = 100 / result.ratio_to_floor
        result.tflops = benchmark.flops(case) / result.ms / 1e9 or None
        result.gbps = benchmark.bytes(case) / result.ms / 1e6 or None
        peaks = [sample.peak_bytes for sample in of_row if sample.peak_bytes is not None]
        if peaks:
            result.peak_mb = statistics.median(peaks) / 1e6
            known = outputs + (accumulator if row.wide_accumulator else 0)
            result.extra_mb = max(0.0, (statistics.median(peaks) - known) / 1e6)


def run_case(
    benchmark: Benchmark, case: Case, device: torch.device, args: Arguments, deadline: float, cases_left: int
) -> dict[str, Any]:
    """Check and time one case. The remaining time is shared equally among the cases that are left."""
    start = time.perf_counter()
    share = (deadline - start) / cases_left
    report.say(f"{benchmark.name} {case}: data and float64 truth")
    rows = [
        row
        for row in benchmark.rows(case, device, args)
        if not args.rows
        or row.kind == "floor"
        or row.name == "eager"
        or any(wanted in row.name for wanted in args.rows)
    ]
    problem = benchmark.problem(case, device)
    results = [RowResult(row.name, row.kind, row.missing, row.note) for row in rows]
    estimate = check(rows, results, benchmark, case, problem)
    left = share - (time.perf_counter() - start)
    if args.rounds is None and estimate > left:
        report.say(f"{benchmark.name} {case}: one round takes about {estimate:.0f} s, {max(left, 0):.0f} s are left")
    samples = time_rounds(rows, results, problem, args.rounds, left, f"{benchmark.name} {case}")
    summarise(results, samples, rows, benchmark, case)
    goals = benchmark.goals(case, {result.name: result for result in results if result.ms})
    return {
        "case": str(case),
        "rounds": max(map(len, samples)),
        "check_tokens": min(len(problem), CHECK_TOKENS),
        "rows": [dataclasses.asdict(result) for result in results],
        "goals": [dataclasses.asdict(goal) for goal in goals],
    }


def run_benchmark(benchmark: Benchmark, args: Arguments, device: torch.device, seconds: float) -> dict[str, Any]:
    """All cases, the quickest first (what they leave of the budget goes to the slow ones), and the tables.

    Returns the JSON document. Raises UsageError, WrongResult.
    """
    about = environment(device)
    deadline = time.perf_counter() + seconds
    cases = [
        Case.parse(text, benchmark.needs)
        for text in args.cases or benchmark.cases["smoke" if args.smoke else device.type]
    ]
    print(report.heading(benchmark.title, about), flush=True)
    done: dict[Case, dict[str, Any]] = {}
    for i, case in enumerate(sorted(cases, key=lambda case: case.N * max(case.D, 1) * max(case.V, 1))):
        done[case] = run_case(benchmark, case, device, args, deadline, len(cases) - i)
        print(report.case_table(done[case]), flush=True)
    report.say("")
    return {
        "benchmark": benchmark.name,
        "environment": about,
        "settings": {"rounds": args.rounds, "budget_seconds": seconds, "rows": list(args.rows)},
        "cases": [done[case] for case in cases],
    }


def prepare(args: Arguments) -> torch.device:
    """The device, with the settings applied. Raises UsageError before anything runs."""
    for name, low in (("rounds", 1), ("budget", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and not low <= value < 1e6:
            raise UsageError(f"--{name} {value}: must be at least {low} and below a million")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist")
    if args.smoke and args.cases:
        raise UsageError("--smoke: has cases of its own; leave out --cases")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA device")
    if args.threads:
        torch.set_num_threads(args.threads)
    cuda = args.device == "cuda" or args.device == "auto" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def main(benchmarks: Sequence[Benchmark], argv: list[str], shares: Sequence[float] = ()) -> None:
    """Entry point of the scripts. `shares`: how the budget is divided among several benchmarks.

    Exit codes: 0, 1 for a wrong result, 2 for bad input, with one line on stderr for either.
    """
    try:
        args = tyro_cli(Arguments, argv, prog=Path(sys.argv[0]).name, description=benchmarks[0].title)
        device = prepare(args)
        if args.smoke:
            args = dataclasses.replace(args, rounds=args.rounds or 1)
        for benchmark in benchmarks:
            for text in args.cases:
                Case.parse(text, benchmark.needs)
        budget = args.budget or BUDGET[device.type]
        weights = list(shares) or [1 / len(benchmarks)] * len(benchmarks)
        documents = [run_benchmark(each, args, device, budget * w) for each, w in zip(benchmarks, weights)]
    except UsageError as error:
        report.fail(f"error: {error}", 2)
    except WrongResult as error:
        report.fail(f"wrong result: {error}", 1)
    except KeyboardInterrupt:
        report.fail("interrupted", 130)
    report.emit({"benchmarks": documents}, args.json)
