"""What must hold at every step, checked while training runs. Cheap, and always on.

In the order of a step:

| when               | check                                                         | where it fails               |
|--------------------|---------------------------------------------------------------|------------------------------|
| a rollout is over  | `audit_groups`: prompts, ids, masks, log-probs, sampled ids   | `BrokenInvariant`            |
| batches are made   | `audit_batches`: what is trained is what was sampled          | `BrokenInvariant`            |
| an update is made  | `audit_update`: ratio 1 at the first inner iteration, KL >= 0 | `BrokenInvariant`            |
|                    | `all_finite`: loss and gradient norm                          | the update is dropped        |
| a step is logged   | `bad_steps`: updates dropped in a row                         | at MAX_BAD_STEPS: stop       |
|                    | `alarms`: no signal, constant reward, sampler gap             | one line, once per streak    |

A broken invariant is a fault of the program, not of the run: what was learnt from here on would be wrong, so it stops
the run. Alarms depend on nothing but the rows of the log, so a resumed run gives those of an uninterrupted one.

Everything is compared on the CPU, by whole tuples and lists (no Python loop over tokens), before anything is sent to
the device; `audit_update` reads metrics that are read for the log anyway.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, compress
from typing import Any

import torch

from env.clarify import StopReason
from env.prompts import first_messages
from grpo.chat import ChatTokens
from grpo.config import Config
from grpo.data_types import Episode, Group, TokenBatch, Turn
from grpo.engines import Engine, Key, TurnOutput
from grpo.sampling import SamplingConfig

STREAK = 10
"""Rollout batches without signal, or steps with the same reward, before the alarm."""

ROUNDING = 1e-6
"""Nats by which rounding may push a log-prob above 0, or a mean KL below it."""

GAP_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Mean |trainer - sampler| log-prob in nats that rounding explains where both compute on the same weights. The bundled
policy has 2e-7 in float32 and 5e-4 in bfloat16."""


class BrokenInvariant(RuntimeError):
    """Something that holds in every correct step does not: a bug. The message names the episode and what differs."""

    groups: Sequence[Group] = ()
    """The rollout batch it was found in."""


# ------------------------------------------------------------------------------------------------------- the rollout


class Witness:
    """An engine that remembers what it sampled: the other side of the comparison in `audit_groups`.

    What an episode holds went through the rollout loop; `turns` did not.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.turns: dict[Key, list[TurnOutput]] = {}
        """The turns of each episode of the newest rollout batch, in order."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def start(self, step: int, sampling: SamplingConfig | None = None, before: Sequence[Episode] = ()) -> None:
        self.turns = {}
        self.engine.start(step, sampling, before)

    def step(self) -> Sequence[TurnOutput]:
        outputs = self.engine.step()
        for output in outputs:
            self.turns.setdefault(output.key, []).append(output)
        return outputs


def audit_groups(
    groups: Sequence[Group],
    *,
    chat: ChatTokens,
    vocab_size: int,
    sampled: Mapping[Key, Sequence[TurnOutput]] | None = None,
) -> None:
    """Audit the episodes of a rollout batch.

    Args:
        vocab_size: ids of the model, V: every id is in [0, V).
        sampled: `Witness.turns`, with the groups in the order of the rollout; None for episodes read from a file.

    Raises:
        BrokenInvariant: in one of them
            completion ids, loss mask and sampler log-probs differ in length;
            an id is not in the vocabulary;
            the mask is not binary, or does not mark exactly the turns;
            a turn's ids or log-probs are not those that the engine sampled;
            an id between two turns is not of the environment's reply;
            a sampler log-prob is not finite, is above 0, or is not 0 where nothing was sampled;
            the first prompt is not the one that evaluation renders for the scenario.
    """
    for g, group in enumerate(groups):
        expected = chat.first_prompt(first_messages(group.scenario))
        for m, episode in enumerate(group.episodes):
            turns = None if sampled is None else sampled.get((g, m), ())
            problem = _first(_audit_episode(episode, m, expected, chat, vocab_size, turns))
            if problem:
                scenario = f"{group.scenario.family}, {group.scenario.task_id}, seed {group.scenario.seed}"
                error = BrokenInvariant(f"group {g} ({scenario}), member {m}: {problem}")
                error.groups = groups
                raise error


def _first(problems: Iterable[str]) -> str | None:
    return next(iter(problems), None)


def _audit_episode(
    episode: Episode,
    member: int,
    prompt: tuple[int, ...],
    chat: ChatTokens,
    vocab_size: int,
    sampled: Sequence[TurnOutput] | None,
) -> Iterable[str]:
    """What is wrong with an episode, the most basic fault first: later checks rely on the ones before."""
    ids, mask, logprobs = episode.completion_ids, episode.loss_mask, episode.sampler_logprobs
    failed = episode.stop_reason == StopReason.ENV_ERROR
    if not len(ids) == len(mask) == len(logprobs):
        yield f"{len(ids)} completion ids, {len(mask)} mask entries, {len(logprobs)} sampler log-probs"
    if episode.member != member:
        yield f"calls itself member {episode.member}"
    if (episode.reward is None) != failed or not math.isfinite(episode.reward or 0.0):
        yield f"reward {episode.reward} at stop reason {episode.stop_reason.value}"
    if not set(mask) <= {0, 1}:
        yield f"the loss mask holds {sorted(set(mask) - {0, 1})}, not only 0 and 1"
    yield from _outside(ids, vocab_size, "completion")
    # An environment that broke before its first message leaves no prompt.
    if episode.prompt_ids != prompt and not (failed and not episode.prompt_ids and not ids):
        yield f"the first prompt differs from evaluation's {_difference(episode.prompt_ids, prompt)}"
    yield from _outside(episode.prompt_ids, vocab_size, "prompt")
    if mask != _mask_of(episode.turns):
        yield f"the loss mask differs from the turns {_difference(mask, _mask_of(episode.turns))}"
    # sum() is not finite if any term is not, and runs in C.
    if not math.isfinite(sum(logprobs)) or max(logprobs, default=0.0) > ROUNDING:
        t = next(t for t, value in enumerate(logprobs) if not -math.inf < value <= ROUNDING)
        yield f"sampler log-prob {logprobs[t]} at completion index {t}"
    for k, (turn, after) in enumerate(zip(episode.turns, episode.turns[1:])):
        reply = chat.reply_ids(turn.reply or "")
        if ids[turn.stop : after.start] != reply:
            yield f"ids after turn {k} differ from the reply's {_difference(ids[turn.stop : after.start], reply)}"
        if any(logprobs[turn.stop : after.start]):
            yield f"a sampler log-prob is not 0 in the reply after turn {k}"
    if sampled is None:
        return
    if len(sampled) != len(episode.turns):
        yield f"{len(episode.turns)} turns, but the engine sampled {len(sampled)}"
    for k, (turn, output) in enumerate(zip(episode.turns, sampled)):
        if ids[turn.start : turn.stop] != tuple(output.token_ids):
            found = _difference(ids[turn.start : turn.stop], output.token_ids)
            yield f"ids of turn {k} differ from what the engine sampled {found}"
        if logprobs[turn.start : turn.stop] != tuple(output.logprobs):
            found = _difference(logprobs[turn.start : turn.stop], output.logprobs)
            yield f"sampler log-probs of turn {k} differ from the engine's {found}"


def _outside(ids: tuple[int, ...], vocab_size: int, name: str) -> Iterable[str]:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        t = next(t for t, token in enumerate(ids) if not 0 <= token < vocab_size)
        yield f"{name} id {ids[t]} at index {t} is not in the vocabulary of {vocab_size}"


def _mask_of(turns: Sequence[Turn]) -> tuple[int, ...]:
    """The loss mask that the turns say: 1 where they are, 0 between them. A completion ends with its last turn."""
    mask: tuple[int, ...] = ()
    for turn in turns:
        mask += (0,) * (turn.start - len(mask)) + (1,) * (turn.stop - turn.start)
    return mask


def _difference(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Where two sequences differ first, in words."""
    t = next((t for t, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
    if t < min(len(found), len(expected)):
        return f"at index {t}: {found[t]}, not {expected[t]}"
    return f"in length: {len(found)}, not {len(expected)}"


# --------------------------------------------------------------------------------------------------------- the update


def audit_batches(batches: Sequence[TokenBatch], episodes: Sequence[Episode], weights: Sequence[float]) -> None:
    """Audit a step's microbatches, on the CPU, against the episodes they were made from.

    Raises:
        BrokenInvariant: an episode with weight is in none or in several of them; of a trained token the id, the
            weight, the sampler's log-prob, or the position and the id before it are not those of its episode; or its
            last one attends to other ids than the episode's.
    """
    kept = [i for i, episode in enumerate(episodes) if weights[i] > 0 and any(episode.loss_mask)]
    found = sorted(i for batch in batches for i in batch.episodes)
    if found != kept:
        raise BrokenInvariant(f"the episodes in the microbatches differ from those to train {_difference(found, kept)}")
    for k, batch in enumerate(batches):
        predicting = batch.predict_rows, batch.predict_cols
        carried: dict[str, tuple[torch.Tensor, list[float], torch.dtype]] = {
            "episode": (batch.episode_index, [], torch.int64),
            "trained id": (batch.targets, [], torch.int64),
            "sampler log-prob": (batch.sampler_logprobs, [], torch.float32),
            "weight": (batch.token_weights, [], torch.float32),
            "id before it": (batch.input_ids[predicting], [], torch.int64),
            "position": (batch.position_ids[predicting], [], torch.int64),
        }
        for i in batch.episodes:
            episode = episodes[i]
            mask, length = episode.loss_mask, len(episode.prompt_ids)
            ids = list(compress(episode.completion_ids, mask))
            before = (*episode.prompt_ids[-1:], *episode.completion_ids)  # of completion token t, at index t
            columns: tuple[Iterable[float], ...] = (
                [i] * len(ids), ids, compress(episode.sampler_logprobs, mask), [weights[i]] * len(ids),
                compress(before, mask), compress(range(length - 1, length - 1 + len(mask)), mask),
            )  # fmt: skip
            for (_, values, _), column in zip(carried.values(), columns):
                values.extend(column)
        for name, (tensor, values, dtype) in carried.items():
            expected = torch.tensor(values, dtype=dtype)
            if not torch.equal(tensor, expected):
                where = _difference(tensor.tolist(), expected.tolist())
                raise BrokenInvariant(f"microbatch {k}: the {name} of a trained token differs {where}")
        _audit_contexts(k, batch, episodes)


def _audit_contexts(k: int, batch: TokenBatch, episodes: Sequence[Episode]) -> None:
    """The last trained token of each episode is predicted from the whole conversation before it. The others are on the
    way there: their positions and the ids before them are right already."""
    rows, columns = batch.input_ids.tolist(), batch.predict_cols.tolist()
    segments = batch.layout.segments if batch.layout else ()
    starts = [0, *accumulate(segment.length for segment in segments)]
    done = 0
    for i in batch.episodes:
        episode = episodes[i]
        done += sum(episode.loss_mask)
        row, column = rows[int(batch.predict_rows[done - 1])], columns[done - 1]
        first = 0  # of the columns from which on everything up to `column` is attended to
        path: Sequence[int] = ()
        if batch.layout is not None and segments:
            index = bisect_right(starts, column) - 1
            first, path = starts[index], batch.layout.ancestors(index)
        found = [token for each in path for token in row[starts[each] : starts[each + 1]]] + row[first : column + 1]
        last = len(episode.loss_mask) - 1 - episode.loss_mask[::-1].index(1)
        expected = [*episode.prompt_ids, *episode.completion_ids[:last]]
        if found != expected:
            where = _difference(found, expected)
            raise BrokenInvariant(f"microbatch {k}: episode {i} is conditioned on other ids than its own {where}")


def all_finite(*values: torch.Tensor) -> bool:
    """Whether scalars (the loss, the gradient norm) are finite. Waits for the device; they may lie on several."""
    return all(math.isfinite(float(value)) for value in values)


def audit_update(iteration: int, values: Mapping[str, float]) -> None:
    """Audit the metrics of one inner iteration (names of the log), read from the device already.

    At the first one the policy is the old policy, so every ratio is exactly 1; k3 is never negative. Metrics of an
    update that is dropped, since its loss is not finite, may be anything.

    Raises:
        BrokenInvariant: otherwise.
    """
    low, high = values.get("ratio/min", 1.0), values.get("ratio/max", 1.0)
    if iteration == 0 and not low == high == 1.0:
        raise BrokenInvariant(f"policy / old probability from {low} to {high} before the first update, not 1")
    if values.get("kl", 0.0) < -ROUNDING:
        raise BrokenInvariant(f"the mean KL (k3) is {values['kl']}: it cannot be negative")


# ------------------------------------------------------------------------------------------------------------ the log


def bad_steps(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many of the newest steps in a row dropped an update, as loss or gradient was not finite."""
    return _streak(rows, lambda row: row["skipped_updates"], len(rows))


def alarms(rows: Sequence[Mapping[str, Any]], config: Config, gap_limit: float | None) -> list[str]:
    """What the newest row of the log gives reason to say: one line each, once per streak.

    Args:
        rows: the log history, oldest first, the new row last.
        gap_limit: of `sampler_gap/mean` (see `gap_limit`), or None.
    """
    row, lines = rows[-1], []
    # With dynamic sampling a step without signal has seen this many rollout batches without any.
    batches = 1 + config.rollout.dynamic_sampling
    limit = math.ceil(STREAK / batches)
    silent = _streak(rows, lambda each: without_signal(each, config), limit + 1)
    constant = _streak(rows, lambda each: each["reward"] == row["reward"], STREAK + 1)
    since = f"steps {row['step'] - limit + 1} to {row['step']}" if limit > 1 else f"step {row['step']}"
    if silent == limit:
        why = without_signal(row, config)
        again = f", in {batches} rounds of sampling each" if batches > 1 else ""
        same = f" (reward {row['reward']} in each step)" if constant >= limit else ""
        pull = "; the KL term still pulls towards the base" if config.loss.beta > 0 else ""
        lines.append(f"{since}: {why}{again}{same}, so there is nothing to learn from{pull}")
    elif constant == STREAK and silent < limit:
        first, last = row["step"] - STREAK + 1, row["step"]
        lines.append(f"steps {first} to {last}: the mean reward is exactly {row['reward']} in each")
    if gap_limit is not None:
        over = _streak(rows, lambda each: (each["sampler_gap/mean"] or 0.0) > gap_limit, 2)
        if over == 1:
            lines.append(
                f"step {row['step']}: sampler and trainer differ by {row['sampler_gap/mean']:.2g} nats per token, "
                f"more than the {gap_limit:g} that rounding explains; they should compute the same distribution"
            )
    return lines


def without_signal(row: Mapping[str, Any], config: Config) -> str:
    """Why no token of the step has an advantage, in words; empty where some may have one."""
    if config.loss.mask_truncated and row["completions/clipped_ratio"] == 1:
        return "all episodes are truncated, and masked"
    return "no group's rewards differ" if row["frac_reward_zero_std"] == 1 else ""


def gap_limit(config: Config, dtype: torch.dtype, in_process: bool) -> float | None:
    """The limit of the mean sampler gap. None where a gap is no fault: another engine, or a truncated distribution."""
    return GAP_LIMIT.get(dtype) if in_process and config.rollout.top_p == 1 else None


def _streak(rows: Sequence[Mapping[str, Any]], holds: Callable[[Mapping[str, Any]], Any], most: int) -> int:
    """How many of the newest rows in a row fulfil `holds`; counts to `most`."""
    n = 0
    while n < min(most, len(rows)) and holds(rows[-1 - n]):
        n += 1
    return n
