"""Several evaluations of the same scenarios side by side: means, maxima, and changes against the first.

A change is the mean over scenarios of (score - score of the first on the same scenario). Its interval comes from
resampling the clusters of scenarios that share a seed, so what made a scenario easy for both drops out. Where a model
was trained with several seeds (`compare_groups`), the interval holds the spread between them as well: `seeds_interval`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, StrictInt, StrictStr, ValidationError, create_model

from env.families import FAMILIES
from grpo import hints
from grpo.config import UsageError
from grpo.evaluate import bootstrap_interval, bootstrap_means, wilson_interval
from grpo.metrics import mean

SUMMARY_KEYS = (
    "completion_rate", "format_pass_rate", "hallucination_rate", "mean_questions", "mean_revealing_questions",
    "revealing_share", "invalid_turn_rate", "truncation_rate", "env_errors",
)  # fmt: skip
SAMPLING_KEYS = ("temperature", "top_p", "max_completion_len", "seed")

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _known_family(name: str) -> str:
    if name not in FAMILIES:
        raise ValueError(f"must be one of {', '.join(FAMILIES)}")
    return name


class _Scores(BaseModel):
    card: Number
    gated: Number


class _Episode(BaseModel):
    family: Annotated[str, AfterValidator(_known_family)]
    seed: StrictInt
    scores: _Scores


class _Scenarios(BaseModel):
    sha256: StrictStr
    n: StrictInt | None = None


_fields: dict[str, Any] = dict(
    model=(StrictStr, ...),
    rubric=(Literal["card", "gated"], ...),
    scenarios=(_Scenarios, ...),
    episodes=(Annotated[list[_Episode], Field(min_length=1)], ...),
    **{key: (Number | None, ...) for key in SUMMARY_KEYS if key != "env_errors"},
    env_errors=(StrictInt, ...),
    **{key: (Number | None, None) for key in SAMPLING_KEYS},
)
_Report: Any = create_model("_Report", **_fields)
"""What a comparison reads of a report."""


def load_report(path: str | Path) -> dict[str, Any]:
    """An evaluation written by `eval.py --output` or by a training run. Raises `UsageError` where it is not one."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--compare {path}: {error.strerror}{hints.evaluation(Path(path))}") from error
    except ValueError as error:
        raise UsageError(f"--compare {path}: not JSON ({error})") from error
    except RecursionError:
        raise UsageError(f"--compare {path}: not an evaluation report (nested too deeply)") from None
    try:
        checked = _Report.model_validate(report)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = " ".join(filter(None, (where and f"{where}:", first["msg"])))
        raise UsageError(f"--compare {path}: not an evaluation report ({what})") from None
    if checked.scenarios.n not in (None, len(checked.episodes)):
        what = f"{len(checked.episodes)} episodes of {checked.scenarios.n} scenarios"
        raise UsageError(f"--compare {path}: not an evaluation report ({what})")
    return report


# ---------------------------------------------------------------------------------------------------------- intervals


def seeds_interval(
    values: Sequence[Sequence[float]], clusters: Sequence[Any], level: float = 0.95
) -> list[float] | None:
    """Interval of the mean over training seeds and scenarios, for both as draws from many.

    Args:
        values: [K seeds][n scenarios], the scenarios the same for every seed.
        clusters: [n], the scenarios' own seeds.

    Returns:
        Quantiles of (mean over resampled scenario clusters, seeds averaged) + t * s / sqrt(K): s is the standard
        deviation (ddof 1) of the seeds' means, t Student's with K - 1 degrees of freedom. With one seed the plain
        bootstrap over scenarios, which says nothing about other seeds. None where there are fewer than two clusters.

    Three seeds are too few to resample them. Simulated (3 seeds x 250 scenarios; standard deviations 0.05 between
    seeds, 0.2 between scenarios, 0.3 within): a bootstrap of scenarios alone covers the truth in 70 % of the cases, one
    of scenarios and seeds in 91 %, this interval in 97 %. It is on the wide side, as the chance within scenarios is
    counted in both terms.
    """
    table = np.asarray(values, dtype=float)  # [K, n]
    if len(table) == 1:
        return bootstrap_interval(table[0], clusters, level)
    means = bootstrap_means(table.mean(axis=0), clusters)
    return None if means is None else _with_seeds(means, table.mean(axis=1), level)


def student_interval(values: Sequence[float], level: float = 0.95) -> list[float] | None:
    """Student's interval of the mean of K values, one per seed. None for fewer than two."""
    return _with_seeds(np.array([mean(values)]), np.asarray(values, dtype=float), level) if len(values) > 1 else None


def _with_seeds(means: np.ndarray, of_seeds: np.ndarray, level: float) -> list[float]:
    """Quantiles of the sum of `means` [draws] and the uncertainty that the K values `of_seeds` show."""
    error = of_seeds.std(ddof=1) / math.sqrt(len(of_seeds))
    t = np.random.default_rng(1).standard_t(len(of_seeds) - 1, 100_000)  # no package here has its quantiles
    sums = np.resize(means, 2 * len(t)) + error * np.concatenate([t, -t])
    return [float(x) for x in np.quantile(sums, [(1 - level) / 2, (1 + level) / 2])]


def _wilson(successes: int, n: int) -> list[float]:
    interval = wilson_interval(successes, n)
    if interval is None:
        raise ValueError("an interval of a rate of nothing")
    return interval


def newcombe_interval(successes: int, n: int, successes_base: int, n_base: int) -> list[float]:
    """95 % interval of the difference of two independent proportions, from their Wilson intervals (Newcombe 1998,
    method 10)."""
    p, base = successes / n, successes_base / n_base
    (low, high), (base_low, base_high) = _wilson(successes, n), _wilson(successes_base, n_base)
    return [p - base - math.hypot(p - low, base_high - base), p - base + math.hypot(high - p, base - base_low)]


def direction(interval: Sequence[float] | None, seeds: int) -> str:
    """The decision rule: `higher` or `lower` where the interval of a change lies on one side of 0 and two seeds or more
    stand behind it, else `cannot be told`."""
    if interval is None or seeds < 2 or interval[0] <= 0 <= interval[1]:
        return "cannot be told"
    return "higher" if interval[0] > 0 else "lower"


# --------------------------------------------------------------------------------------------------------- comparison


def compare(
    reports: Sequence[Mapping[str, Any]], rubric: str | None = None, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Compare evaluations with the first of them.

    Args:
        reports: at least two results of `grpo.evaluate.report`, of the same scenarios in the same order.
        rubric: `card` or `gated`; default: the one the reports were made with, which then has to be the same.
        names: what to call them; default: `names_of`.

    Returns:
        `models` (names), `rubric`, `n`, `rows` (one per family, then `all`; each with `family`, `n` and per model
        `mean, max, interval, delta, delta_interval`, None where there is nothing to say), `summary` (key -> values),
        `differences` (how the models were sampled, where that differs: setting -> values).

    Raises:
        UsageError: fewer than two reports, or reports that cannot be compared.
    """
    return compare_groups([[report] for report in reports], rubric, names_of(reports) if names is None else names)


def compare_groups(
    groups: Sequence[Sequence[Mapping[str, Any]]], rubric: str | None, names: Sequence[str]
) -> dict[str, Any]:
    """As `compare`, where a model is a group of reports, one per training seed.

    The first group holds one report, with which every other one is paired, or one for each of the others' seeds, in
    their order. `mean`, `delta` and `summary` are means over the seeds; a cell has them by seed too, as `means` and
    `deltas`.
    """
    if len(groups) < 2:
        raise UsageError("--compare: give at least two evaluation files, the base first")
    names = list(names)
    rubric = rubric or _common_rubric([group[0] for group in groups], names)
    if len(groups[0]) > 1 and {len(group) for group in groups} != {len(groups[0])}:
        raise ValueError("seeds are paired: every group needs the same ones")
    base = groups[0][0]
    for name, group in zip(names, groups):
        for report in group:
            if report["scenarios"]["sha256"] != base["scenarios"]["sha256"] or _played(report) != _played(base):
                raise UsageError(
                    f"--compare: {name} was evaluated on other scenarios than {names[0]} "
                    f"({len(report['episodes'])} against {len(base['episodes'])}); evaluate both on the same file and "
                    "limit"
                )
    return {
        "models": names,
        "rubric": rubric,
        "n": len(base["episodes"]),
        "rows": [_row(family, groups, rubric) for family in (*FAMILIES, "all")],
        "summary": {key: [_over_seeds(group, key) for group in groups] for key in SUMMARY_KEYS},
        "differences": _differences([group[0] for group in groups]),
    }


def _over_seeds(group: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """None where no seed has a value (no plan: nothing to call invented)."""
    if len(group) == 1:
        return group[0][key]
    return mean(report[key] for report in group if report[key] is not None)


def _played(report: Mapping[str, Any]) -> list[tuple[str, int]]:
    """What the rows are paired by; a file that was cut by hand keeps the hash of its scenarios."""
    return [(row["family"], row["seed"]) for row in report["episodes"]]


def _row(family: str, groups: Sequence[Sequence[Mapping[str, Any]]], rubric: str) -> dict[str, Any]:
    """One line of the comparison; `all` takes every episode."""
    chosen = [i for i, row in enumerate(groups[0][0]["episodes"]) if family in ("all", row["family"])]
    seeds = [groups[0][0]["episodes"][i]["seed"] for i in chosen]
    tables = [
        np.array([[report["episodes"][i]["scores"][rubric] for i in chosen] for report in group]) for group in groups
    ]  # [K, n] each
    models = []
    for index, scores in enumerate(tables):
        cell = _estimate(scores, seeds)
        # A base that was evaluated once stands for every seed.
        change = _estimate(scores - tables[0], seeds) if index else dict.fromkeys(cell)
        models.append(
            {
                "mean": cell["mean"],
                "max": float(scores.max()) if chosen else None,
                "interval": cell["interval"],
                "delta": change["mean"],
                "delta_interval": change["interval"],
                "means": cell["by_seed"],
                "deltas": change["by_seed"],
            }
        )
    return {"family": family, "n": len(chosen), "models": models}


def _estimate(values: np.ndarray, clusters: Sequence[Any]) -> dict[str, Any]:
    """Mean, its interval and the seeds' own means of [K, n] values."""
    by_seed = [mean(row.tolist()) for row in values]
    interval = seeds_interval(values.tolist(), clusters)
    return {"mean": mean(values.ravel().tolist()), "interval": interval, "by_seed": by_seed}


def _differences(reports: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A scripted policy is not sampled: None does not differ from anything."""
    settings = {key: [report.get(key) for report in reports] for key in SAMPLING_KEYS}
    return {key: values for key, values in settings.items() if len(set(values) - {None}) > 1}


def _common_rubric(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    rubrics = [report["rubric"] for report in reports]
    if len(set(rubrics)) > 1:
        listed = ", ".join(f"{name}: {rubric}" for name, rubric in zip(names, rubrics))
        raise UsageError(f"--compare: the evaluations use different rubrics ({listed}); choose one with --rubric")
    return rubrics[0]


def names_of(reports: Sequence[Mapping[str, Any]], paths: Sequence[Path] | None = None) -> list[str]:
    """Short, distinct names: the model's; where two are the same, the file's (`beta0/eval_after`), else a number."""
    names = [hints.model_name(report["model"]) for report in reports]
    if paths is not None and len(set(names)) < len(names):
        names = [f"{path.absolute().parent.name}/{path.stem}" for path in paths]
    return [name if names.index(name) == i else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]
