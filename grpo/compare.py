"""Several evaluations of the same scenarios side by side: means, maxima, and changes against the first.

A change is the mean over scenarios of (score - score of the first on the same scenario). Its interval comes from
resampling the clusters of scenarios that share a seed, so what made a scenario easy for both drops out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError, create_model

from env.families import FAMILIES
from grpo.config import UsageError
from grpo.evaluate import bootstrap_interval
from grpo.metrics import mean

SUMMARY_KEYS = (
    "completion_rate", "format_pass_rate", "hallucination_rate", "mean_questions", "mean_revealing_questions",
    "revealing_share", "invalid_turn_rate", "truncation_rate", "env_errors",
)  # fmt: skip
SAMPLING_KEYS = ("temperature", "top_p", "max_completion_len", "seed")

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _Scores(BaseModel):
    card: Number
    gated: Number


class _Episode(BaseModel):
    family: Literal[tuple(FAMILIES)]
    seed: StrictInt
    scores: _Scores


class _Scenarios(BaseModel):
    sha256: StrictStr
    n: StrictInt | None = None


_Report = create_model(
    "_Report",
    model=(StrictStr, ...),
    rubric=(Literal["card", "gated"], ...),
    scenarios=(_Scenarios, ...),
    episodes=(Annotated[list[_Episode], Field(min_length=1)], ...),
    **{key: (Number | None, ...) for key in SUMMARY_KEYS if key != "env_errors"},
    env_errors=(StrictInt, ...),
    **{key: (Number | None, None) for key in SAMPLING_KEYS},
)
"""What a comparison reads of a report."""


def load_report(path: str | Path) -> dict[str, Any]:
    """An evaluation written by `eval.py --output` or by a training run. Raises `UsageError` where it is not one."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--compare {path}: {error.strerror}") from error
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
    if len(reports) < 2:
        raise UsageError("--compare: give at least two evaluation files, the base first")
    names = names_of(reports) if names is None else list(names)
    rubric = rubric or _common_rubric(reports, names)
    base = reports[0]
    for name, report in zip(names, reports):
        if report["scenarios"]["sha256"] != base["scenarios"]["sha256"] or _played(report) != _played(base):
            raise UsageError(
                f"--compare: {name} was evaluated on other scenarios than {names[0]} "
                f"({len(report['episodes'])} against {len(base['episodes'])}); evaluate both on the same file and limit"
            )
    rows = [_row(family, reports, rubric) for family in (*FAMILIES, "all")]
    return {
        "models": names,
        "rubric": rubric,
        "n": len(base["episodes"]),
        "rows": rows,
        "summary": {key: [report[key] for report in reports] for key in SUMMARY_KEYS},
        "differences": _differences(reports),
    }


def _played(report: Mapping[str, Any]) -> list[tuple[str, int]]:
    """What the rows are paired by; a file that was cut by hand keeps the hash of its scenarios."""
    return [(row["family"], row["seed"]) for row in report["episodes"]]


def _row(family: str, reports: Sequence[Mapping[str, Any]], rubric: str) -> dict[str, Any]:
    """One line of the comparison; `all` takes every episode."""
    chosen = [i for i, row in enumerate(reports[0]["episodes"]) if family in ("all", row["family"])]
    seeds = [reports[0]["episodes"][i]["seed"] for i in chosen]
    base = [reports[0]["episodes"][i]["scores"][rubric] for i in chosen]
    models = []
    for index, report in enumerate(reports):
        scores = [report["episodes"][i]["scores"][rubric] for i in chosen]
        deltas = [score - first for score, first in zip(scores, base, strict=True)]
        models.append(
            {
                "mean": mean(scores),
                "max": max(scores, default=None),
                "interval": bootstrap_interval(scores, seeds),
                "delta": mean(deltas) if index else None,
                "delta_interval": bootstrap_interval(deltas, seeds) if index else None,
            }
        )
    return {"family": family, "n": len(chosen), "models": models}


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
    names = [_model_name(report["model"]) for report in reports]
    if paths is not None and len(set(names)) < len(names):
        names = [f"{path.absolute().parent.name}/{path.stem}" for path in paths]
    return [name if names.index(name) == i else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def _model_name(model: str) -> str:
    """`runs/beta0.2/final` -> beta0.2: every run's model lies in a folder called final."""
    path = Path(model)
    return path.parent.name if path.name == "final" and path.parent.name else path.name
