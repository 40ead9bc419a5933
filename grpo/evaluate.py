"""Held-out evaluation: play fixed scenarios with fixed seeds, then describe what happened.

`report` is pure: records of finished episodes in, a dictionary of plain JSON data out. What feeds it is either a model
(`evaluate_model`) or a scripted policy that needs none (`evaluate_policy`).

Averages and rates are over *all* episodes. One without a plan scores 0 and fails the format check, and so does one the
environment lost, which is counted apart as well (`env_errors`): a denominator that drops failures flatters a model.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from env.clarify import ClarifyEnv, EnvFactory, EpisodeRecord, StopReason
from env.families import FAMILIES
from env.policies import ScriptedPolicy, play
from env.rubrics import Score, reward, score
from grpo.metrics import behaviour, conversation, dumps, episode_conversation, mean, stop_rates, strict
from grpo.run_folder import versions
from grpo.sampling import SamplingConfig
from scenarios.generator import DIFFICULTIES
from scenarios.schema import Scenario

if TYPE_CHECKING:  # a scripted policy needs neither tokens nor a sampler
    from grpo.chat import ChatTokens
    from grpo.engines import Engine

log = logging.getLogger(__name__)

EVAL_SEED = 20_000
"""Seed of the evaluation's sampling. Not the run's: every model meets the same random numbers."""

RUBRIC_PARTS = {
    "card": ("output_correctness", "efficiency", "format_check"),
    "gated": ("field_match", "info_gain", "question_efficiency", "hallucination_check"),
}

RESAMPLES = 10_000
DRAWN_AT_ONCE = 1_000_000


# --------------------------------------------------------------------------------------------------------- intervals


def bootstrap_means(values: Sequence[float], clusters: Sequence[Any]) -> np.ndarray | None:
    """Means of resamples of whole clusters, [RESAMPLES]; deterministic. None where there are fewer than two clusters:
    nothing can be said about the spread then.

    Scenarios that share a seed share a profile, so they are not independent draws.
    """
    names = list(dict.fromkeys(clusters))
    if len(names) < 2:
        return None
    index = {name: i for i, name in enumerate(names)}
    of = np.array([index[name] for name in clusters])  # [n]
    sums = np.bincount(of, weights=np.asarray(values, dtype=float), minlength=len(names))  # [clusters]
    sizes = np.bincount(of, minlength=len(names))  # [clusters]
    rng, means, rows = np.random.default_rng(0), np.empty(RESAMPLES), max(1, DRAWN_AT_ONCE // len(names))
    for start in range(0, RESAMPLES, rows):  # all at once would be gigabytes for thousands of scenarios
        part = means[start : start + rows]
        drawn = rng.integers(0, len(names), (len(part), len(names)))
        part[:] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return means


def bootstrap_interval(values: Sequence[float], clusters: Sequence[Any], level: float = 0.95) -> list[float] | None:
    """Percentile bootstrap interval of the mean, resampling whole clusters (`bootstrap_means`)."""
    means = bootstrap_means(values, clusters)
    return None if means is None else [float(x) for x in np.quantile(means, [(1 - level) / 2, (1 + level) / 2])]


def wilson_interval(successes: int, n: int, z: float = 1.959964) -> list[float] | None:
    """Wilson's score interval of a proportion (1927); it stays sensible at 0 and at n of n."""
    if n == 0:
        return None
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [max(0.0, centre - half), min(1.0, centre + half)]


# ------------------------------------------------------------------------------------------------------------- report


def report(
    records: Sequence[EpisodeRecord],
    *,
    rubric: str = "card",
    conversations: Sequence[list[dict[str, str]]] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """What the evaluation says, as JSON data.

    Args:
        records: one finished episode per scenario, in the scenarios' order.
        rubric: `card` or `gated`: which score `avg_score`, the families and the intervals are about. Both are computed.
        conversations: the readable episodes, put into the rows.
        metadata: `model`, `temperature`, ... go to the top as they are.
    """
    scores = [score(record) for record in records]
    totals = [s.total(rubric) for s in scores]
    scenarios = [record.scenario for record in records]
    document = {
        **metadata,
        "rubric": rubric,
        "n": len(records),
        "scenarios": {"n": len(records), "sha256": scenarios_hash(scenarios)},
        "avg_score": mean(totals),
        "avg_score_interval": bootstrap_interval(totals, [scenario.seed for scenario in scenarios]),
        "max_score": max(totals, default=None),
        **behaviour(records, scores),
        "completion_interval": wilson_interval(sum(record.plan_accepted for record in records), len(records)),
        "env_errors": sum(record.stop_reason == StopReason.ENV_ERROR for record in records),
        "stop_reasons": stop_rates(records) if records else {},
        "families": {family: _family(family, records, totals) for family in FAMILIES},
        "rubrics": {name: _rubric(name, scores) for name in RUBRIC_PARTS},
        "episodes": [
            _row(record, s, conversations[i] if conversations else None)
            for i, (record, s) in enumerate(zip(records, scores, strict=True))
        ],
    }
    return strict(document)


def spread(scenarios: Sequence[Scenario], limit: int) -> list[Scenario]:
    """`limit` of the scenarios, spread evenly over families and difficulties, in the file's order.

    The first of a file alone may be one family: published scenarios come sorted by family.
    """
    seen: Counter[tuple[str, str]] = Counter()
    rank: list[tuple[Any, ...]] = []
    for scenario in scenarios:
        cell = (scenario.family, scenario.task_id)
        rank.append((seen[cell], DIFFICULTIES.index(scenario.task_id), len(rank)))
        seen[cell] += 1
    chosen = sorted(range(len(scenarios)), key=rank.__getitem__)[:limit]
    return [scenarios[i] for i in sorted(chosen)]


def scenarios_hash(scenarios: Sequence[Scenario]) -> str:
    """SHA-256 of what was played, in order: two reports with the same hash can be compared scenario by scenario."""
    text = "\n".join(dumps(scenario.model_dump(mode="json", exclude={"task_title"})) for scenario in scenarios)
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _family(family: str, records: Sequence[EpisodeRecord], totals: Sequence[float]) -> dict[str, Any]:
    chosen = [i for i, record in enumerate(records) if record.scenario.family == family]
    scores = [totals[i] for i in chosen]
    return {
        "n": len(chosen),
        "mean": mean(scores),
        "interval": bootstrap_interval(scores, [records[i].scenario.seed for i in chosen]),
        "max": max(scores, default=None),
        "completion_rate": mean(records[i].plan_accepted for i in chosen),
    }


def _rubric(rubric: str, scores: Sequence[Score]) -> dict[str, Any]:
    parts = {part: mean(getattr(s, part) for s in scores) for part in RUBRIC_PARTS[rubric]}
    return {"avg_score": mean(s.total(rubric) for s in scores), "parts": parts}


def _row(record: EpisodeRecord, s: Score, messages: list[dict[str, str]] | None) -> dict[str, Any]:
    scenario = record.scenario
    return {
        "family": scenario.family,
        "task_id": scenario.task_id,
        "seed": scenario.seed,
        "request": scenario.request,
        "hidden_profile": dict(scenario.hidden_profile),
        "scores": {rubric: s.total(rubric) for rubric in RUBRIC_PARTS},
        "parts": {part: getattr(s, part) for parts in RUBRIC_PARTS.values() for part in parts},
        "hallucination_rate": s.hallucination_rate,
        "stop_reason": record.stop_reason and record.stop_reason.value,
        "turns": record.num_turns,
        "invalid_turns": record.num_invalid_turns,
        "questions": [{"text": q.text, "answer": q.answer, "revealed": q.field} for q in record.questions],
        "plan": record.plan,
        "conversation": messages,
    }


# ------------------------------------------------------------------------------------------------------------ playing


def evaluate_model(
    engine: Engine,
    chat: ChatTokens,
    scenarios: Sequence[Scenario],
    *,
    model: str,
    rubric: str = "card",
    temperature: float = 0.7,
    top_p: float = 1.0,
    max_completion_len: int,
    seed: int = EVAL_SEED,
    also_greedy: bool = False,
    progress: Callable[[int, int], None] | None = None,
    env_factory: EnvFactory = ClarifyEnv,
) -> dict[str, Any]:
    """Play each scenario once with a model and report; `temperature` 0 is greedy.

    The same code and prompts as training, with groups of one. `also_greedy` plays everything once more at temperature
    0 and puts that report, less its episodes, under `greedy`. `progress` is called with the number of episodes that
    have ended and of all, both passes together.
    """
    from grpo.distributed import play_all
    from grpo.rollout import rollout

    if also_greedy:
        half = partial(evaluate_model, engine, chat, scenarios, model=model, rubric=rubric, top_p=top_p,
                       max_completion_len=max_completion_len, seed=seed, env_factory=env_factory)  # fmt: skip
        first, second = _halves(progress)
        document = half(temperature=temperature, progress=first)
        greedy = half(temperature=0.0, progress=second)
        return document | {"greedy": {key: value for key, value in greedy.items() if key != "episodes"}}
    play = partial(
        rollout,
        chat=chat,
        num_generations=1,
        max_completion_len=max_completion_len,
        step=0,
        reward_fn=lambda record: reward(record, rubric, no_plan_penalty=0.0),
        sampling=SamplingConfig(temperature, top_p, seed),
        progress=progress,
        env_factory=env_factory,
    )
    groups = play_all(engine, scenarios, lambda engine, share: play(engine, scenarios=share))
    episodes = [group.episodes[0] for group in groups]
    return report(
        [episode.record for episode in episodes],
        rubric=rubric,
        conversations=[episode_conversation(episode) for episode in episodes],
        model=model,
        temperature=temperature,
        top_p=top_p,
        max_completion_len=max_completion_len,
        seed=seed,
        versions=versions(),
    )


def _halves(progress: Callable[[int, int], None] | None) -> tuple[Callable[[int, int], None] | None, ...]:
    """`progress` of two passes of the same length, seen from the first and from the second one."""
    if progress is None:
        return None, None
    return lambda done, n: progress(done, 2 * n), lambda done, n: progress(n + done, 2 * n)


def _played(
    policy: ScriptedPolicy, scenario: Scenario, env_factory: EnvFactory
) -> tuple[EpisodeRecord, list[tuple[str, str | None]]]:
    """As `env.policies.play`. An environment that breaks costs its episode alone, as it does in a rollout."""
    try:
        return play(policy, scenario, env_factory)
    except Exception as error:  # noqa: BLE001
        log.warning("scenario of seed %d: environment error (%s)", scenario.seed, error)
        return EpisodeRecord(scenario, stop_reason=StopReason.ENV_ERROR), []


def evaluate_policy(
    name: str,
    scenarios: Sequence[Scenario],
    *,
    rubric: str = "card",
    seed: int = EVAL_SEED,
    env_factory: EnvFactory = ClarifyEnv,
) -> dict[str, Any]:
    """Play each scenario with a scripted policy (`env.policies`), through the same text that a model speaks.

    Raises ValueError for an unknown policy.
    """
    policy = ScriptedPolicy(name, seed)
    played = [_played(policy, scenario, env_factory) for scenario in scenarios]
    return report(
        [record for record, _ in played],
        rubric=rubric,
        conversations=[conversation(record.scenario, turns) for record, turns in played],
        model=name,
        seed=seed,
        versions=versions(),
    )
