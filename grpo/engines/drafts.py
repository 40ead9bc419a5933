"""Guesses of what a row will sample next, for the sampler to check several tokens in one forward."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.data_types import Episode

DRAFT_LENGTH = 6  # ids drafted at most: 66 forwards instead of 198 for a rollout batch of the trained tiny policy


class Drafts:
    """Guesses of the next ids from what has been sampled since `TorchEngine.start`, and in the batch before: a table of
    n-grams.

    Anything older is forgotten, so that a step's forwards, rounding included, depend on what a resumed run still has:
    it repeats them to the bit.
    """

    ORDERS = (4, 3, 2)  # ids of context, longest first

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}

    def learn(self, ids: Sequence[int]) -> None:
        """The last id followed those before it."""
        for order in self.ORDERS:
            self._next[tuple(ids[-order - 1 : -1])] = ids[-1]

    def study(self, episode: Episode) -> None:
        """Learn what was sampled in it."""
        longest = max(self.ORDERS)
        ids, before = (*episode.prompt_ids[-longest:], *episode.completion_ids), len(episode.prompt_ids[-longest:])
        for place, trained in enumerate(episode.loss_mask, before):
            if trained:
                self.learn(ids[max(0, place - longest) : place + 1])

    def guess(self, ids: list[int], length: int) -> list[int]:
        """At most `length` ids that may follow."""
        context = ids[-max(self.ORDERS) :]
        guessed: list[int] = []
        while len(guessed) < length:
            for order in self.ORDERS:
                following = self._next.get(tuple(context[-order:]))
                if following is not None:
                    break
            else:
                break
            guessed.append(following)
            context = [*context[1:], following]
        return guessed
