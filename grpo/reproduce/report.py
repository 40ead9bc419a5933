"""The document of grpo/reproduce/results.py as `report.json`, and as text and pictures made from it alone."""

from __future__ import annotations

import json
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo import plots
from grpo.config import UsageError
from grpo.console import SUMMARY
from grpo.files import write_atomic
from grpo.metrics import mean, strict
from grpo.reproduce.results import CANNOT, LAST, PUBLISHED_N, RATES, public


def check_replaceable(folder: Path, about: Mapping[str, Any], overwrite: bool) -> None:
    """Raises UsageError where the report cannot be written, or would take the place of one of other settings."""
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(f"--output-dir {folder}: cannot write in {existing}")
    if overwrite or not any((folder / name).exists() for name in ("report.md", "report.json")):
        return
    hint = "give another folder, or --overwrite to replace it"
    try:
        before = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        held = {name: list(before[name]) for name in ("models", "betas", "seeds")}
        settings = dict(before["settings"]) | {"eval_limit": before["eval_limit"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--output-dir {folder}: holds something else ({error}); {hint}") from None
    now = public(about["settings"]) | {"eval_limit": about["eval_limit"]}
    for name, value in now.items():
        if name in settings and settings[name] != value:
            flag = name.replace("_", "-")
            raise UsageError(f"--output-dir {folder}: its report is of --{flag} {settings[name]}, not {value}; {hint}")
    for name, values in held.items():
        more = [value for value in values if value not in about[name]]
        if more:
            text = " ".join(map(str, more))
            raise UsageError(f"--output-dir {folder}: its report has --{name} {text} as well; {hint}")


def write_report(folder: Path, numbers: Mapping[str, Any]) -> Path:
    """Draw the plots, then write `report.json` and `report.md`; the latter's path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for found in numbers["results"]:
        draw(folder, found)
    kept = {k: v for k, v in numbers.items() if k != "results"}
    kept["results"] = [{k: v for k, v in found.items() if k != "curves"} for found in numbers["results"]]
    exact = strict(kept)  # settings are compared with those of the next call: only results are rounded
    stored = exact | {"results": _rounded(exact["results"])}
    write_atomic(folder / "report.json", json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    write_atomic(folder / "report.md", text(kept))
    return folder / "report.md"


def draw(folder: Path, found: Mapping[str, Any]) -> None:
    """The pictures of one model."""
    name, curves = found["name"], found["curves"]
    comparison = found["comparisons"][found["rubric"]]
    plots.plot_deltas(comparison, folder / f"{name}-deltas.png")
    plots.plot_families(comparison, folder / f"{name}-families.png")
    title = f"Training reward of {name}: mean and range over seeds"
    plots.plot_seeds(curves, "reward", folder / f"{name}-reward.png", title, "mean reward of the step")
    kl = {condition["name"]: condition["kl"] for condition in found["conditions"]}
    title = f"KL of {name} to its base: mean and range over seeds"
    plots.plot_seeds(curves, "kl", folder / f"{name}-kl.png", title, "KL per token (nats)", kl)


def _rounded(value: Any) -> Any:
    """Six decimals: the file is for reading, and small."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


# ---------------------------------------------------------------------------------------------------------------- text


def text(numbers: Mapping[str, Any]) -> str:
    """report.md."""
    parts = [_head(numbers), _verdict_section(numbers)]
    for found in numbers["results"]:
        parts.append(_model_section(found))
    parts += [_published_section(numbers), _how_section(numbers), _runs_section(numbers)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(numbers: Mapping[str, Any]) -> str:
    settings = numbers["settings"]
    runs = [run for found in numbers["results"] for run in found["runs"]]
    count = f"{len(runs)} training run{'' if len(runs) == 1 else 's'}"
    lines = [
        "# What the KL anchor does: the ablation, with its verdict",
        "",
        f"{count} of {settings['num_steps']} steps (recipe `{settings['recipe']}`), beta "
        f"{_listed(f'{beta:g}' for beta in numbers['betas'])}, seed{'s' * (len(numbers['seeds']) > 1)} "
        f"{_listed(numbers['seeds'])}, base "
        f"{_listed(f'`{model}`' for model in numbers['models'])}; every final model and the base on the same "
        f"{numbers['eval_limit']} held-out scenarios. All numbers are in [report.json](report.json); this page is made "
        "from them by",
        "",
        "```",
        shlex.join(map(str, numbers["command"])),
        "```",
    ]
    if numbers["failed"]:
        lines += ["", "**Failed, and missing here:**", ""]
        lines += [f"- {name}: {reason}" for name, reason in numbers["failed"].items()]
    return "\n".join(lines)


RULE = """\
The rule was fixed before the numbers: a change is the mean over training seeds and scenarios of (score - score of the
other model on the same scenario), between two betas with the same training seed. Where its 95 % interval lies on one
side of 0, and two seeds or more stand behind it, the verdict is *better* or *worse*; else it is *cannot be told*. The
interval holds both kinds of chance: between scenarios (bootstrap; those of one profile are drawn together) and between
training seeds (Student's t of the seeds' means, as three seeds are too few to resample). For the KL it is Student's.
Each verdict is at 95 % by itself: of twenty changes that are none, one would be told by chance."""


def verdict_line(found: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    """One verdict in one line, for the terminal."""
    what, change, interval, _, told = _verdict_cells(found, verdict)
    interval = "(one seed: no interval)" if verdict["interval"] is None else interval
    return f"{what} {change} {interval}: {told}"


def _verdict_cells(found: Mapping[str, Any], verdict: Mapping[str, Any]) -> list[str]:
    score = verdict["measure"] == "score"
    what = f"average score ({found['rubric']})" if score else "KL to the base, nats per token"
    form = "+.3f" if score else "+.4f"
    return [
        f"{verdict['name']} against {verdict['against']}: {what}",
        _number(verdict["change"], form),
        _interval(verdict["interval"], form),
        ", ".join(format(change, form) for change in verdict["by_seed"]),
        verdict["verdict"],
    ]


def _verdict_section(numbers: Mapping[str, Any]) -> str:
    table = [["model", "", "change", "95 % interval", "by seed", "verdict"]]
    for found in numbers["results"]:
        for verdict in found["verdicts"]:
            *cells, told = _verdict_cells(found, verdict)
            table.append([found["name"], *cells, f"**{told}**"])
    lines = ["## Verdict", "", RULE, "", _markdown(table)]
    single = [c for found in numbers["results"] for c in found["conditions"][1:] if len(c["seeds"]) < 2]
    if single:
        lines += ["", "One seed shows what one run does, not what the setting does: give `--seeds` two or more."]
    return "\n".join(lines)


def _model_section(found: Mapping[str, Any]) -> str:
    name = found["name"]
    return "\n".join(
        [
            f"## {name}",
            "",
            f"{found['rubric']} rubric, temperature {_number(found['temperature'], 'g')}, {found['n']} scenarios, the "
            "same random numbers for every model. Mean ± standard deviation over seeds; maxima over all seeds.",
            "",
            main_table(found),
            "",
            f"![Changes against the base on the same scenarios, per family]({name}-deltas.png)",
            "",
            f"![Scores per family]({name}-families.png)",
            "",
            f"![Training reward]({name}-reward.png)",
            "",
            f"![KL to the base]({name}-kl.png)",
        ]
    )


def main_table(found: Mapping[str, Any]) -> str:
    """The model's results in one table, a column for the base and for each beta."""
    conditions, rows = found["conditions"], found["comparisons"][found["rubric"]]["rows"]
    average = rows[-1]["models"]
    table = [[""] + [condition["name"] for condition in conditions]]
    table.append(["**average score**"] + [f"**{_plus_minus(cell['means'])}**" for cell in average])
    table.append(["... 95 % interval"] + [_interval(cell["interval"], ".3f") for cell in average])
    table.append(["greedy"] + [_plus_minus(condition["greedy"]) for condition in conditions])
    for row in rows[:-1]:
        if row["n"]:
            cells = [f"{_plus_minus(cell['means'])} ({_number(cell['max'], '.3f')})" for cell in row["models"]]
            table.append([f"{row['family']} (n={row['n']}), mean (max)", *cells])
    for key in RATES:
        label, form = SUMMARY[key]
        table.append([label] + [_plus_minus(condition["rates"][key], form) for condition in conditions])
    table.append(
        ["plans submitted, Wilson interval"]
        + [f"{c['completed']}/{c['n']} {_interval(c['completion_interval'], '.2f')}" for c in conditions]
    )
    for key, label, digits in (("training_reward", f"training reward, last {LAST} steps", ".3f"),
                               ("kl", "KL to the base, nats per token", ".4f")):  # fmt: skip
        table.append([label] + [_plus_minus(condition[key], digits) for condition in conditions])
    return _markdown(table)


def _published_section(numbers: Mapping[str, Any]) -> str:
    table = [["", "average score", "plans submitted", "Wilson interval", "event_planning, mean / max",
              "meeting_scheduling, mean / max"]]  # fmt: skip
    for name, row in numbers["published"]["rows"].items():
        families = ["{:.3f} / {:.3f}".format(*row[family]) for family in ("event_planning", "meeting_scheduling")]
        table.append([f"published, {name}", f"{row['avg_score']:.3f}", f"{row['completed']}/{row['n']}",
                      _interval(row["completion_interval"], ".2f"), *families])  # fmt: skip
    for found in numbers["results"]:
        rows = {row["family"]: row["models"] for row in found["comparisons"]["gated"]["rows"]}
        for i, condition in enumerate(found["conditions"]):
            families = [
                f"{_number(rows[f][i]['mean'], '.3f')} / {_number(rows[f][i]['max'], '.3f')}"
                for f in ("event_planning", "meeting_scheduling")
            ]
            table.append([f"here, {found['name']}, {condition['name']}", _plus_minus(rows["all"][i]["means"]),
                          f"{condition['completed']}/{condition['n']}",
                          _interval(condition["completion_interval"], ".2f"), *families])  # fmt: skip
    changes = [["published", "change in the share of plans", "95 % interval (Newcombe)", "verdict"]]
    for change in numbers["published"]["changes"]:
        changes.append([f"{change['name']} against {change['against']}", f"{change['change']:+.2f}",
                        _interval(change["interval"], "+.2f"), change["verdict"]])  # fmt: skip
    told = [change for change in numbers["published"]["changes"] if change["verdict"] != CANNOT]
    summary = (
        "The published models are within noise of each other and of their bases: every interval of a change holds 0."
        if not told
        else f"{len(told)} of {len(changes) - 1} published differences can be told from noise."
    )
    return "\n".join(
        [
            "## Beside the published numbers",
            "",
            f"Gated rubric. The published ones are of {PUBLISHED_N} scenarios, one run each. Wilson's interval takes "
            "every episode for an independent one; the published scenarios share 17 seeds and hold no coding scenario, "
            "and here the seeds of a beta play the same scenarios, so these intervals are rather too narrow.",
            "", _markdown(table), "", _markdown(changes), "", f"**{summary}**", "", *_beside(numbers),
        ]
    )  # fmt: skip


def _beside(numbers: Mapping[str, Any]) -> list[str]:
    """What each model here says on the published question, whether the anchor helps."""
    known = {row["model"] for row in numbers["published"]["rows"].values()}
    lines = []
    for found in numbers["results"]:
        told = "; ".join(f"{v['name']} against {v['against']}: {v['verdict']}" for v in found["verdicts"]
                         if v["measure"] == "score")  # fmt: skip
        same = "a published base" if found["name"] in known else "another base than the published ones, so that levels"
        same += "" if found["name"] in known else " cannot be compared, only directions"
        lines.append(f"- {found['name']} ({same}): {told}.")
    return lines


def _how_section(numbers: Mapping[str, Any]) -> str:
    runs = [run for found in numbers["results"] for run in found["runs"]]
    machines = _distinct([", ".join(f"{key} {value}" for key, value in run["machine"].items()) for run in runs])
    versions = _distinct([", ".join(f"{key} {value}" for key, value in run["versions"].items()) for run in runs])
    seconds = [run["seconds"] for run in runs]
    return "\n".join(
        [
            "## How it was measured",
            "",
            f"- Machine: {numbers['processor']}; the runs: {machines}. A run is a function of its settings, its seed, "
            "the versions and the number of threads: with another number sums round differently, and other tokens are "
            "sampled.",
            f"- Versions: {versions}; commit {numbers['commit'] or 'unknown'}.",
            f"- Training took {mean(seconds):.0f} s a run ({min(seconds):.0f} to {max(seconds):.0f} s, evaluations not "
            "included), with what else ran beside it.",
            "- The KL is measured on what each final model samples on the held-out scenarios at temperature 1 (k3, "
            "`python -m grpo.divergence`), for every beta in the same way; a run with beta 0 loads no base and logs "
            "none. The base's own is 0 by definition.",
            "- An episode without a plan scores 0. Fields never told (hallucination) are a share of a plan's fields, "
            "over episodes with a plan; all other rates are over all episodes.",
        ]
    )


def _runs_section(numbers: Mapping[str, Any]) -> str:
    table = [["run", "average score", "greedy", "plans", "format check", "never told", "training reward", "KL", "s"]]
    for found in numbers["results"]:
        rows = found["comparisons"][found["rubric"]]["rows"][-1]["models"]
        for i, condition in enumerate(found["conditions"]):
            for k, seed in enumerate(condition["seeds"]):
                run = next(r for r in found["runs"] if (r["beta"], r["seed"]) == (condition["beta"], seed))
                rates = [
                    SUMMARY[key][1](condition["rates"][key][k])
                    for key in ("completion_rate", "format_pass_rate", "hallucination_rate")
                ]
                table.append(
                    [f"{found['name']}, {condition['name']}, seed {seed}", f"{rows[i]['means'][k]:.3f}",
                     _number(condition["greedy"][k], ".3f"), *rates, _number(run["training_reward"], ".3f"),
                     f"{run['kl']:.4f}", f"{run['seconds']:.0f}"]
                )  # fmt: skip
    return "## Every run\n\n" + _markdown(table)


# -------------------------------------------------------------------------------------------------------------- pieces


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def _plus_minus(values: Sequence[float | None], form: Any = ".3f") -> str:
    """Mean ± standard deviation (ddof 1) of the values that are there."""
    show = form if callable(form) else lambda value: format(value, form)
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    return show(mean(there)) + (f" ± {show(statistics.stdev(there))}" if len(there) > 1 else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(interval: Sequence[float] | None, form: str) -> str:
    return "-" if interval is None else f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def _listed(values: Any) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _distinct(values: Sequence[str]) -> str:
    return " | ".join(dict.fromkeys(values))
