"""`python -m grpo.reproduce`: plan and check everything, run what is left, write the report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo import console, run_folder
from grpo.config import RunStopped
from grpo.reproduce import plan
from grpo.reproduce.processes import carry_out, left_of
from grpo.reproduce.report import check_replaceable, verdict_line, write_report
from grpo.reproduce.results import Result, numbers_of
from grpo.signals import Signals


def main() -> None:
    """The command.

    Raises:
        UsageError: bad flags, or what is there is of other settings. Nothing has been started then.
        RunStopped: something failed; the report holds the rest.
        SystemExit: a signal; the same command goes on.
    """
    args, extra = plan.parse(sys.argv[1:])
    runs = plan.make_runs(args, extra)
    chains = plan.make_chains(args, runs)
    about = {
        "command": ["python", "-m", "grpo.reproduce", *sys.argv[1:]],
        "settings": next(iter(runs.values()))[0].settings,
        "eval_limit": args.eval_limit,
        "models": list(runs),
        "betas": list(args.betas),
        "seeds": list(args.seeds),
    }
    check_replaceable(args.output_dir, about, args.overwrite)
    jobs, threads = plan.side_by_side(args, runs)
    with Signals() as signals, run_folder.locked(args.runs_dir, "--runs-dir"), signals.finish_first():
        to_do = f"{sum(bool(chain.stages) for chain in chains)} of {len(chains)}, {jobs} at a time"
        console.print_header(header(args, about, to_do, threads), title="What the KL anchor does: the ablation")
        with progress_over(left_of(chains)) as progress:
            carry_out(chains, jobs, threads, signals, progress)
        if signals.received is not None:
            print("\nto continue: the same command once more")
            raise SystemExit(signals.exit_code)
        failed = {chain.name: chain.failed for chain in chains if chain.failed}
        results = [
            Result(model, plan.base_evaluation(args, model), [run for run in of_model if run.complete])
            for model, of_model in runs.items()
            if plan.base_evaluation(args, model).exists()
        ]
        if any(result.runs for result in results):
            report(args, numbers_of(results, about, failed))
    if failed:
        what = f"{len(failed)} of {len(chains)} failed: {', '.join(failed)} (reasons above)"
        raise RunStopped(f"{what}; the others are done, and the same command tries these again")


def header(args: plan.Arguments, about: Mapping[str, Any], to_do: str, threads: int) -> dict[str, str]:
    """What is about to run."""
    settings = about["settings"]
    return {
        "models": ", ".join(about["models"]),
        "betas": " ".join(f"{beta:g}" for beta in args.betas),
        "seeds": " ".join(map(str, args.seeds)),
        "a run": f"recipe {settings.run.recipe}, {settings.optim.num_steps} steps",
        "evaluation": f"{args.eval_limit} held-out scenarios, the same for all",
        "to do": f"{to_do} (each run, and the base of each model)" + (f", {threads} thread(s) each" if threads else ""),
        "runs": str(args.runs_dir),
        "report": str(args.output_dir / "report.md"),
    }


@contextlib.contextmanager
def progress_over(total: int) -> Iterator[Callable[[int, int], None]]:
    """Progress over everything, with an estimate; nothing is shown where there is nothing to do."""
    if total:
        with console.episode_progress("all", total, unit="steps, evaluations counted as such", every=30) as show:
            yield show
    else:
        yield lambda done, total: None


def report(args: plan.Arguments, numbers: Mapping[str, Any]) -> None:
    """Write the report and print its verdicts."""
    try:
        path = write_report(args.output_dir, numbers)
    except OSError as error:
        raise RunStopped(f"--output-dir {args.output_dir}: {error.strerror}; the runs are kept") from error
    for found in numbers["results"]:
        for verdict in found["verdicts"]:
            print(f"{found['name']}: {verdict_line(found, verdict)}")
    print(f"report: {path}")


if __name__ == "__main__":
    console.run_entry(main)
