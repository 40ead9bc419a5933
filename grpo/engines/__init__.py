"""What the rollout loop asks of a sampler: submit turns, step, collect the turns that ended.

An engine speaks token ids only. It runs many episodes at once, each at its own pace: `step` does a little work for all
of them and hands back whatever turns ended in it, and the caller answers with the next turn of these episodes (or
releases them) while the others go on.

The trainer tells an engine three things about weights: `weights_changed` after an update, `sleep` when rollouts are
over, `wake` before the next ones. An engine that samples with the trainer's own weights has nothing to do then; one
that holds a copy renews it in `wake`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from grpo.data_types import Episode
from grpo.sampling import SamplingConfig

Key = tuple[int, int]  # (scenario index within the rollout batch, member of its group)


@dataclass(frozen=True)
class TurnRequest:
    """Sample one assistant turn.

    `prompt_ids` is the whole conversation so far; from an episode's second turn on it begins with its previous turn's
    prompt and sampled ids, exactly. `position` is the index in the episode's completion of the first token to be
    sampled; `turn` and `position` only feed the randomness. Requests of one `group` share their first prompt.
    """

    key: Key
    prompt_ids: tuple[int, ...]
    max_tokens: int
    turn: int = 0
    position: int = 0
    group: int = 0

    def check(self, max_context: int) -> None:
        """Raises ValueError where there is nothing to sample from, or no room in `max_context` tokens."""
        name, length = f"turn {self.turn} of episode {self.key}", len(self.prompt_ids)
        if not length or self.max_tokens < 1:
            raise ValueError(f"{name}: empty prompt or max_tokens < 1")
        if length + self.max_tokens > max_context:
            raise ValueError(
                f"{name}: {length} prompt tokens and max_tokens {self.max_tokens} exceed max_context {max_context}"
            )


@dataclass(frozen=True)
class TurnOutput:
    """One sampled turn: its ids (the end-of-turn id included where it was sampled) and their log-probs in nats.

    `finish` is "stop" for a sampled end-of-turn id, "length" where `max_tokens` cut the turn.
    """

    key: Key
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]


class Engine(Protocol):
    """A sampler. `max_context` is the most tokens, prompt and completion together, an episode can have."""

    max_context: int
    eos_ids: frozenset[int]
    """Ids that end a turn."""

    @property
    def description(self) -> str:
        """For the run's header."""

    def wake(self) -> None:
        """Get ready to sample with the trainer's present weights. Does nothing where that is so already."""

    def weights_changed(self) -> None:
        """An update has changed the trainer's weights. Cheap: whatever it takes is done in `wake`."""

    def sleep(self) -> None:
        """No turn will be sampled until the next `wake`: device memory may be given back."""

    def start(self, step: int, sampling: SamplingConfig | None = None, before: Sequence[Episode] = ()) -> None:
        """Begin a rollout batch: forget all episodes and everything computed with older weights.

        `step` enters the seeds; `sampling` replaces the engine's own settings for this batch only. An engine that
        sleeps or holds older weights wakes first. `before` are episodes of the batch before, for an engine that guesses
        what will be sampled; nothing but rounding may depend on them.
        """

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn. ValueError if it is empty or cannot fit into `max_context`."""

    def step(self) -> Sequence[TurnOutput]:
        """Work a little on every episode; return the turns that ended."""

    def release(self, key: Key) -> None:
        """The episode is over: its place is free for a queued one."""

    @property
    def num_active(self) -> int:
        """Episodes that hold a place or wait for one."""
