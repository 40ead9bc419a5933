"""The files of all runs as one JSON document, with a verdict on every comparison.

No conclusion is written by hand: a verdict is `grpo.compare.direction` of an interval.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo import compare, machine, run_folder
from grpo.card_text import PRIVATE
from grpo.config import Config, UsageError
from grpo.evaluate import RUBRIC_PARTS, wilson_interval
from grpo.metrics import mean, read_log, strict
from grpo.reproduce.plan import Run

LAST = 20
"""Steps at the end of a run whose mean is reported."""
RATES = (
    "completion_rate", "format_pass_rate", "hallucination_rate", "mean_questions", "mean_revealing_questions",
    "truncation_rate",
)  # fmt: skip
CANNOT = "cannot be told"
WORDS = {
    "score": {"higher": "better", "lower": "worse"},
    "KL": {"higher": "further from the base", "lower": "closer to the base"},
}

PUBLISHED_N = 50
PUBLISHED = {
    # model, beta (None: the base), average score, plans submitted, event_planning mean and max, meeting_scheduling too
    "Qwen3-0.6B, base": ("Qwen3-0.6B", None, 0.000, 0, (0.000, 0.000), (0.000, 0.000)),
    "run 1: 0.6B, beta 0": ("Qwen3-0.6B", 0.0, 0.008, 1, (0.032, 0.382), (0.000, 0.000)),
    "Qwen3-1.7B, base": ("Qwen3-1.7B", None, 0.067, 9, (0.138, 0.522), (0.153, 0.500)),
    "run 2: 1.7B, beta 0": ("Qwen3-1.7B", 0.0, 0.029, 3, (0.000, 0.000), (0.130, 0.725)),
    "run 4: 1.7B, beta 0.2": ("Qwen3-1.7B", 0.2, 0.056, 7, (0.175, 0.510), (0.064, 0.350)),
}
"""The published numbers: 50 held-out scenarios, gated rubric, one run each."""
PUBLISHED_PAIRS = (
    ("run 1: 0.6B, beta 0", "Qwen3-0.6B, base"),
    ("run 2: 1.7B, beta 0", "Qwen3-1.7B, base"),
    ("run 4: 1.7B, beta 0.2", "Qwen3-1.7B, base"),
    ("run 4: 1.7B, beta 0.2", "run 2: 1.7B, beta 0"),
)


@dataclass(frozen=True)
class Result:
    """What one model has: its base's evaluation, and the runs that are complete."""

    model: str
    base: Path
    runs: Sequence[Run]

    @property
    def name(self) -> str:
        """What to call the model, also in files' names."""
        return Path(self.model).name


# ------------------------------------------------------------------------------------------------------------- numbers


def numbers_of(results: Sequence[Result], about: Mapping[str, Any], failed: Mapping[str, str]) -> dict[str, Any]:
    """Everything that the report says, as JSON data, and the runs' curves under `curves`, which only the plots need.

    `about`: `settings` (Config), `eval_limit, models, betas, seeds` as asked for, `command`.
    """
    models = [_of_model(result, about) for result in results if result.runs]
    return {
        **about,
        "settings": public(about["settings"]),
        "commit": machine.commit(),
        "processor": machine.cpu_name(),
        "failed": dict(failed),
        "results": models,
        "published": _published(),
    }


def public(settings: Config) -> dict[str, Any]:
    """What all runs of the ablation share: the settings less what differs between them or changes no result."""
    own = (*PRIVATE, "model", "beta", "seed", "eval_limit")
    return strict({name: value for name, value in settings.flat().items() if name not in own})


def _of_model(result: Result, about: Mapping[str, Any]) -> dict[str, Any]:
    base = compare.load_report(result.base)
    runs = sorted(map(_of_run, result.runs), key=lambda run: (run["beta"], run["seed"]))
    bases = {run.pop("base_sha256") for run in runs}
    if len(bases) > 1:
        raise UsageError(f"--models {result.model}: the runs started from different bases; move the older ones away")
    conditions, groups = [_condition("base", [], [base])], [[base]]
    for beta in about["betas"]:
        of_beta = [run for run in runs if run["beta"] == beta]
        if of_beta:
            groups.append([run.pop("report") for run in of_beta])
            conditions.append(_condition(f"beta {beta:g}", of_beta, groups[-1]))
    names = [condition["name"] for condition in conditions]
    comparisons = {rubric: compare.compare_groups(groups, rubric, names) for rubric in RUBRIC_PARTS}
    return {
        "model": result.model,
        "name": result.name,
        "rubric": base["rubric"],
        "temperature": base.get("temperature"),
        "n": len(base["episodes"]),
        "conditions": conditions,
        "comparisons": comparisons,
        "verdicts": verdicts(conditions, groups, base["rubric"]),
        "curves": {c["name"]: [run.pop("rows") for run in runs if run["beta"] == c["beta"]] for c in conditions[1:]},
        "runs": runs,
    }


def _of_run(run: Run) -> dict[str, Any]:
    rows, document = read_log(run.folder / "log_history.json"), run_folder.stored(run.folder)
    report = compare.load_report(run.evaluation)
    try:
        kl = float(json.loads(run.divergence.read_text(encoding="utf-8"))["kl"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run.divergence}: damaged ({error}); remove it to have it measured again") from None
    logged = [row["kl"] for row in rows[-LAST:] if row.get("kl") is not None]
    return {
        "beta": run.settings.loss.beta,
        "seed": run.settings.run.seed,
        "steps": len(rows),
        "seconds": sum(row.get("step_time") or 0.0 for row in rows),
        "training_reward": mean(row["reward"] for row in rows[-LAST:] if row.get("reward") is not None),
        "training_kl": mean(logged),
        "kl": kl,
        "machine": document.get("machine", {}),
        "versions": {k: v for k, v in document.get("versions", {}).items() if k != "platform"},
        "base_sha256": document.get("base_sha256"),
        "report": report,
        "rows": rows,
    }


def _condition(name: str, runs: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A column of the report: lists have one entry per seed."""
    n = sum(len(report["episodes"]) for report in reports)
    completed = sum(round(report["completion_rate"] * len(report["episodes"])) for report in reports)
    return {
        "name": name,
        "beta": runs[0]["beta"] if runs else None,
        "seeds": [run["seed"] for run in runs],
        "greedy": [(report.get("greedy") or {}).get("avg_score") for report in reports],
        "rates": {key: [report[key] for report in reports] for key in RATES},
        "completed": completed,
        "n": n,
        "completion_interval": wilson_interval(completed, n),
        "training_reward": [run["training_reward"] for run in runs],
        "training_kl": [run["training_kl"] for run in runs],
        "kl": [run["kl"] for run in runs] or [0.0],
    }


def verdicts(
    conditions: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Mapping[str, Any]]], rubric: str
) -> list[dict[str, Any]]:
    """Every beta against the base, then every other beta against beta 0, by score and by KL.

    Pairs: the same scenario and, between betas, the same training seed. The first of `conditions` and `groups` is the
    base.
    """
    found = []
    for condition, group in zip(conditions[1:], groups[1:]):
        found.append(_score_verdict(condition["name"], "base", [groups[0], group], rubric, condition["seeds"]))
    plain = next((i for i, condition in enumerate(conditions) if condition["beta"] == 0), None)
    for i, condition in enumerate(conditions):
        if plain is None or not condition["beta"]:
            continue
        seeds = [seed for seed in condition["seeds"] if seed in conditions[plain]["seeds"]]
        if not seeds:
            continue
        picks = {j: [conditions[j]["seeds"].index(seed) for seed in seeds] for j in (plain, i)}
        pair = [[groups[j][k] for k in picks[j]] for j in (plain, i)]
        found.append(_score_verdict(condition["name"], "beta 0", pair, rubric, seeds))
        kl = [condition["kl"][a] - conditions[plain]["kl"][b] for a, b in zip(picks[i], picks[plain])]
        found.append(_verdict(condition["name"], "beta 0", "KL", mean(kl), compare.student_interval(kl), kl, seeds))
    return found


def _score_verdict(
    name: str, against: str, pair: Sequence[Sequence[Mapping[str, Any]]], rubric: str, seeds: Sequence[int]
) -> dict[str, Any]:
    cell = compare.compare_groups(pair, rubric, [against, name])["rows"][-1]["models"][1]
    return _verdict(name, against, "score", cell["delta"], cell["delta_interval"], cell["deltas"], seeds)


def _verdict(
    name: str,
    against: str,
    measure: str,
    change: float | None,
    interval: Sequence[float] | None,
    by_seed: Sequence[float],
    seeds: Sequence[int],
) -> dict[str, Any]:
    told = compare.direction(interval, len(seeds))
    return {
        "name": name,
        "against": against,
        "measure": measure,
        "change": change,
        "interval": interval,
        "by_seed": list(by_seed),
        "seeds": list(seeds),
        "verdict": WORDS[measure].get(told, CANNOT),
    }


def _published() -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {
        name: {"model": model, "beta": beta, "avg_score": average, "completed": plans, "n": PUBLISHED_N,
               "completion_interval": wilson_interval(plans, PUBLISHED_N), "event_planning": event,
               "meeting_scheduling": meeting}
        for name, (model, beta, average, plans, event, meeting) in PUBLISHED.items()
    }  # fmt: skip
    changes = []
    for name, against in PUBLISHED_PAIRS:
        plans, before = rows[name]["completed"], rows[against]["completed"]
        interval = compare.newcombe_interval(plans, PUBLISHED_N, before, PUBLISHED_N)
        told = WORDS["score"].get(compare.direction(interval, 2), CANNOT)
        changes.append(
            {"name": name, "against": against, "change": (plans - before) / PUBLISHED_N, "interval": interval,
             "verdict": told}
        )  # fmt: skip
    return {"rows": rows, "changes": changes}
