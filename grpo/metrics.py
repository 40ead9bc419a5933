"""What a run writes down: one dictionary of numbers per step, and the episodes themselves in readable form.

`log_history.json` is a JSON list with one object per step under the names that scripts of this field read; `METRICS`
says in one line what each key means. Everything that depends on the clock is `step_time` or lies under `time/`, so
two runs are compared with `without_times`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from env.clarify import EpisodeRecord, StopReason
from env.families import FAMILIES
from env.prompts import first_messages
from env.rubrics import Score, score
from grpo.advantages import MIN_SPREAD, has_spread
from grpo.config import UsageError
from grpo.data_types import Episode, Group
from grpo.files import write_atomic
from scenarios.schema import Scenario

FULL_GROUPS = 2
"""Groups written out in full to a step's markdown file; the others get one line per episode."""

STOP_REASON_HELP = {
    StopReason.PLAN: "ended with a plan",
    StopReason.TURN_CAP: "used all turns without a plan",
    StopReason.QUESTION_CAP: "asked more questions than allowed",
    StopReason.TOKEN_CAP: "ran out of tokens (max_completion_len)",
    StopReason.CONTEXT_FULL: "filled the model's context",
    StopReason.ENV_ERROR: "were lost to an error of the environment (no reward)",
}

METRICS: dict[str, str] = {
    "step": "Optimiser step, from 1: this line's rollouts, and the update made from them.",
    "loss": "Loss of the step, KL term and entropy bonus included.",
    "grad_norm": "Global gradient norm before clipping.",
    "learning_rate": "Learning rate of this step's update.",
    "reward": "Mean training reward (score minus the no-plan penalty) over episodes that have one.",
    "reward_std": "Mean over groups of the standard deviation (ddof 1) of the rewards in the group.",
    "frac_reward_zero_std": f"Share of groups whose rewards differ by less than {MIN_SPREAD:g}: they give no gradient.",
    "kl": "Mean KL estimate to the frozen base per trained token; null where no reference is loaded.",
    "entropy": "Mean entropy in nats of the policy's next-token distribution at trained tokens.",
    "skipped_updates": "Share of the step's updates skipped because loss or gradient was not finite.",
    "clip_ratio/low_mean": "Share of trained tokens clipped at 1 - epsilon (negative advantage).",
    "clip_ratio/high_mean": "Share of trained tokens clipped at 1 + epsilon_high (positive advantage).",
    "clip_ratio/region_mean": "Share of trained tokens clipped at either side.",
    "clip_ratio/dual_mean": "Share of trained tokens capped by the dual clip (delta).",
    "ratio/mean": "Mean of policy / old probability at trained tokens; 1 with one update per rollout batch.",
    "ratio/min": "Smallest such ratio (at most 1).",
    "ratio/max": "Largest such ratio (at least 1).",
    "sampler_gap/mean": "Mean |trainer - sampler| log-prob of trained tokens, in nats.",
    "sampler_gap/max": "Largest |trainer - sampler| log-prob of the step, in nats.",
    "sampler_gap/sequence_ratio_mean": "Mean over trained tokens of trainer / sampler probability of their episode.",
    "sampler_gap/sequence_ratio_min": "Smallest such ratio (at most 1).",
    "sampler_gap/sequence_ratio_max": "Largest such ratio (at least 1).",
    "sampler_gap/weight_mean": "Mean importance weight that corrects for the sampler; null where --mismatch is none.",
    "completions/mean_length": "Mean tokens of an episode after its first prompt, environment replies included.",
    "completions/min_length": "Shortest episode of the step, counted in the same way.",
    "completions/max_length": "Longest episode of the step, counted in the same way.",
    "completions/clipped_ratio": "Share of episodes that a length limit ended (token_cap or context_full).",
    "num_tokens": "Tokens of all episodes so far, prompts and environment replies included.",
    "completion_rate": "Share of episodes that submitted a plan.",
    "format_pass_rate": "Share of all episodes whose plan passes the format check.",
    "questions/mean": "Mean questions asked per episode (a refused one does not count).",
    "questions/revealing": "Mean questions per episode that revealed a field not known before.",
    "invalid_turns": "Share of turns that hold no valid tool call.",
    "hallucination_rate": "Share of a plan's fields that the agent was never told; mean over episodes with a plan.",
    **{f"stop/{reason.value}": f"Share of episodes that {text}." for reason, text in STOP_REASON_HELP.items()},
    **{f"reward/{family}": f"Mean reward of the step's {family} episodes; null without any." for family in FAMILIES},
    "step_time": "Seconds of the whole step.",
    "time/tokens_per_second": "Sampled (trained) tokens per second of the whole step.",
}


def is_time(key: str) -> bool:
    """True for keys that depend on the clock."""
    return key == "step_time" or key.startswith("time/")


def without_times(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows less everything that depends on the clock: equal for two runs with the same seed on one machine."""
    return [{key: value for key, value in row.items() if not is_time(key)} for row in rows]


# ---------------------------------------------------------------------------------------------- strict JSON, atomic


def strict(value: Any) -> Any:
    """`value` as plain JSON data: numbers without a value (NaN, infinities) become null, tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(value)  # numpy and torch scalars too
    return number if math.isfinite(number) else None


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON text: no NaN, no Infinity, UTF-8 kept as it is."""
    return json.dumps(strict(value), allow_nan=False, ensure_ascii=False, indent=indent)


class LogHistory:
    """`log_history.json`: a JSON list, one object per line and step, valid after every `append`.

    An append overwrites only the closing bracket, so step 5000 costs what step 1 costs. Opening an existing file
    continues it; a last line that a killed process left half-written is dropped. Raises `UsageError` where the file is
    something else.
    """

    CLOSE = b"\n]\n"

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = read_log(self.path)
        self._rewrite()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the row of the next step. Raises ValueError where its step does not follow the last one, and OSError
        where it cannot be written (a full disk): the file holds the rows before it then."""
        row = strict(row)
        if self.rows and row["step"] <= self.rows[-1]["step"]:
            raise ValueError(f"{self.path}: step {row['step']} after step {self.rows[-1]['step']}")
        text = ((",\n" if self.rows else "\n") + dumps(row)).encode()
        with open(self.path, "r+b", buffering=0) as file:
            try:
                self._write_at_end(file, text + self.CLOSE)
            except OSError:
                self._write_at_end(file, self.CLOSE)  # where it stood before, so this needs no room
                file.truncate()
                raise
        self.end += len(text)
        self.rows.append(dict(row))

    def truncate_to(self, step: int) -> None:
        """Drop the rows after `step`: a run resumed from that step's checkpoint writes them again."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._rewrite()

    @property
    def position(self) -> dict[str, int]:
        """Where the log stands, as a checkpoint remembers it."""
        return {"rows": len(self.rows), "bytes": self.end, "num_tokens": last_num_tokens(self.rows)}

    def _write_at_end(self, file: BinaryIO, content: bytes) -> None:
        """One write call of a few kilobytes: the file goes from valid to valid. A full disk may cut it short."""
        file.seek(self.end)
        while content:
            content = content[file.write(content) :]

    def _rewrite(self) -> None:
        body = "[" + ",".join("\n" + dumps(row) for row in self.rows)
        self.end = len(body.encode())  # where the next row goes
        content = body.encode() + self.CLOSE
        if not self.path.exists() or self.path.read_bytes() != content:
            write_atomic(self.path, content)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, [] where there is none yet. Raises UsageError where it is something else."""
    return _read_rows(path) if path.exists() else []


def last_num_tokens(rows: Sequence[Mapping[str, Any]]) -> int:
    """`num_tokens` of the last row."""
    return (rows[-1].get("num_tokens") or 0) if rows else 0


def _read_rows(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        rows = json.loads(text)
    except json.JSONDecodeError:
        rows = _whole_lines(text)
    except (RecursionError, ValueError):  # nested too deeply, a number too long
        rows = None
    steps = [row.get("step") if isinstance(row, dict) else None for row in rows] if isinstance(rows, list) else [None]
    numbers = [step for step in steps if type(step) is int]
    if len(numbers) < len(steps) or any(a >= b for a, b in zip(numbers, numbers[1:])):
        raise UsageError(f"{path}: not a log history (a JSON list with one object per step, in order)")
    return rows


def _whole_lines(text: str) -> list[dict[str, Any]] | None:
    """The rows before a half-written last line, or None where the text is no log history at all."""
    first, *lines = text.split("\n")
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line.removesuffix(",")))
        except json.JSONDecodeError:
            break
    # Only a last line can be half-written; a broken one further up is damage, not to be cut off with what follows.
    whole = first == "[" and not any(line.strip("] ") for line in lines[len(rows) + 1 :])
    return rows if whole else None


# ------------------------------------------------------------------------------------------------------ what happened


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else None


def behaviour(records: Sequence[EpisodeRecord], scores: Sequence[Score]) -> dict[str, float | None]:
    """How the agent behaved; the same definitions in training and in evaluation.

    Every rate is over *all* episodes, those without a plan and those the environment lost included. Exceptions:
    `invalid_turn_rate` is over turns, `revealing_share` over questions, `hallucination_rate` over episodes with a plan.
    None where a denominator is 0.
    """
    questions = sum(len(record.questions) for record in records)
    # Distinct fields: asking again what is known reveals nothing.
    revealing = sum(len(record.revealed) for record in records)
    turns = sum(record.num_turns for record in records)
    invalid_turns = sum(record.num_invalid_turns for record in records)
    truncated = [record.stop_reason in (StopReason.TOKEN_CAP, StopReason.CONTEXT_FULL) for record in records]
    return {
        "completion_rate": mean(record.plan_accepted for record in records),
        "format_pass_rate": mean(s.format_check for s in scores),
        "mean_questions": questions / len(records) if records else None,
        "mean_revealing_questions": revealing / len(records) if records else None,
        "revealing_share": revealing / questions if questions else None,
        "invalid_turn_rate": invalid_turns / turns if turns else None,
        "hallucination_rate": mean(s.hallucination_rate for s in scores if s.hallucination_rate is not None),
        "truncation_rate": mean(truncated),
    }


def stop_rates(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Share of episodes per stop reason; every reason is a key, and they sum to 1."""
    counts = Counter(record.stop_reason for record in records)
    return {reason.value: counts[reason] / len(records) for reason in StopReason}


def step_metrics(
    groups: Sequence[Group],
    *,
    step: int,
    losses: Mapping[str, float | None],
    seconds: Mapping[str, float],
    num_tokens_before: int = 0,
) -> dict[str, Any]:
    """The log line of one step, with every key of `METRICS`; null where something was not measured.

    `step` counts from 1. `losses` holds what the update measured (`loss, grad_norm, learning_rate, kl`, ...), `seconds`
    one entry per phase (`rollout`, `update`, ...), together the whole step; `num_tokens_before` is the last line's
    `num_tokens`.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    records = [episode.record for episode in episodes]
    rates = behaviour(records, [score(record) for record in records])
    lengths = [len(episode.completion_ids) for episode in episodes]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    spreads = [_spread(group) for group in groups]
    step_time = math.fsum(seconds.values())
    return {
        **dict.fromkeys(METRICS),
        "step": step,
        **losses,
        "reward": mean(rewards),
        "reward_std": mean(spreads),
        "frac_reward_zero_std": mean(not has_spread(group.rewards) for group in groups),
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": rates["truncation_rate"],
        "num_tokens": num_tokens_before + sum(lengths) + sum(len(episode.prompt_ids) for episode in episodes),
        "completion_rate": rates["completion_rate"],
        "format_pass_rate": rates["format_pass_rate"],
        "questions/mean": rates["mean_questions"],
        "questions/revealing": rates["mean_revealing_questions"],
        "invalid_turns": rates["invalid_turn_rate"],
        "hallucination_rate": rates["hallucination_rate"],
        **{f"stop/{reason}": rate for reason, rate in stop_rates(records).items()},
        **{f"reward/{family}": _family_reward(groups, family) for family in FAMILIES},
        "step_time": step_time,
        **{f"time/{phase}": value for phase, value in seconds.items()},
        "time/tokens_per_second": sum(episode.num_trained for episode in episodes) / max(step_time, 1e-9),
    }


def _spread(group: Group) -> float:
    rewards = [reward for reward in group.rewards if reward is not None]
    return statistics.stdev(rewards) if len(rewards) > 1 else 0.0


def _family_reward(groups: Sequence[Group], family: str) -> float | None:
    members = [group for group in groups if group.scenario.family == family]
    return mean(reward for group in members for reward in group.rewards if reward is not None)


# --------------------------------------------------------------------------------------------- episodes, readable


def conversation(scenario: Scenario, turns: Iterable[tuple[str, str | None]]) -> list[dict[str, str]]:
    """The episode as messages, from the user's request on: `turns` are (agent's text, environment's reply)."""
    messages = [dict(message) for message in first_messages(scenario) if message["role"] != "system"]
    for text, reply in turns:
        messages.append({"role": "assistant", "content": text})
        if reply is not None:
            messages.append({"role": "tool", "content": reply})
    return messages


def episode_conversation(episode: Episode) -> list[dict[str, str]]:
    """`conversation` of a sampled episode."""
    return conversation(episode.record.scenario, [(turn.text, turn.reply) for turn in episode.turns])


def write_completions(
    folder: str | Path, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> None:
    """Write a step's episodes: `step_00012.md` for people, `step_00012.jsonl` for programs.

    `advantages` is [P][G], as the groups are. The markdown file shows the first `FULL_GROUPS` groups turn by turn and
    one line for each other episode; the JSON lines hold every episode. Sizes are bounded by the episode's token budget:
    about 1.5 kB per episode. Nobody waits for the disk: a checkpoint does, for the files of all steps it covers.
    """
    folder = Path(folder)
    rows = [
        _episode_row(index, episode, advantage)
        for index, (group, row) in enumerate(zip(groups, advantages, strict=True))
        for episode, advantage in zip(group.episodes, row, strict=True)
    ]
    lines = "".join(dumps({"step": step} | row) + "\n" for row in rows)
    markdown, programs = completion_paths(folder, step)
    write_atomic(programs, lines, durable=False)
    write_atomic(markdown, _markdown(step, groups, rows), durable=False)


def completion_paths(folder: Path, step: int) -> tuple[Path, Path]:
    """A step's two files: for people, for programs."""
    return folder / f"step_{step:05d}.md", folder / f"step_{step:05d}.jsonl"


def _episode_row(index: int, episode: Episode, advantage: float) -> dict[str, Any]:
    scenario = episode.record.scenario
    return {
        "group": index,
        "member": episode.member,
        "family": scenario.family,
        "task_id": scenario.task_id,
        "request": scenario.request,
        "hidden_profile": dict(scenario.hidden_profile),
        "reward": episode.reward,
        "advantage": advantage,
        "stop_reason": episode.stop_reason.value,
        "questions": len(episode.record.questions),
        "tokens": len(episode.completion_ids),
        "conversation": episode_conversation(episode),
    }


def _markdown(step: int, groups: Sequence[Group], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"# Step {step}: {len(groups)} groups, {len(rows)} episodes", ""]
    for index, group in enumerate(groups):
        scenario = group.scenario
        profile = ", ".join(f"{field}: {value}" for field, value in scenario.hidden_profile.items())
        lines += [f"## Group {index}: {scenario.family}, {scenario.task_id}", ""]
        lines += [f"> {scenario.request}", "", f"Hidden profile: {profile}", ""]
        for row in rows:
            if row["group"] == index:
                lines += _markdown_episode(row, full=index < FULL_GROUPS)
        lines.append("")
    return "\n".join(lines)


def _markdown_episode(row: Mapping[str, Any], full: bool) -> list[str]:
    reward = "none" if row["reward"] is None else f"{row['reward']:+.3f}"
    head = (
        f"member {row['member']}: reward {reward}, advantage {row['advantage']:+.3f}, "
        f"{row['stop_reason']}, {row['questions']} questions, {row['tokens']} tokens"
    )
    if not full:
        return [f"- {head}"]
    lines = [f"### {head}", ""]
    for message in row["conversation"][1:]:  # the request is the group's heading
        speaker = "**agent**" if message["role"] == "assistant" else "**user**"
        # Indented text is a code block: whatever the model wrote cannot break the page.
        lines += [speaker, "", *("    " + line for line in message["content"].split("\n")), ""]
    return lines
