"""In-process sampler over any Hugging Face causal LM: continuous batching on the trainer's own weights.

Each live episode owns a slot: one row of a static KV cache that keeps the whole conversation across turns. One forward
serves everybody. Its N tokens travel as one flat sequence, without padding:

    [ tokens whose logits nobody needs: prompts and environment replies | each live row's last token and its draft ]

so a row in the middle of a turn contributes one token and its draft, a row that just got a reply contributes the reply
too, and the last M hidden states are the ones to sample from. There is no prefill phase and no barrier between turns.

What agents write is largely template: tool-call JSON, the question asked a turn ago. Where the last ids of a row have
been seen before, the ids that followed then are fed along as a draft (`Drafts`), and one forward can advance the row by
1 + draft tokens. Each token's randomness belongs to its position, so what
would be sampled there is known as soon as its logits are: a draft is right or wrong, nothing is rejected with some
probability, and the result is that of sampling one token at a time.

Live rows are 0..n-1 always (a released row is filled with the last one), so that attention reads the cache through a
view. A new episode copies the longest prefix that any live row has in common with its prompt: members of a group copy
the prompt, other groups copy the system prefix. Whoever has to wait for a prefix that is being computed joins one step
later; so a batch computes its unique tokens, plus each member's last prompt token (its logits are needed anyway).

The forward of Llama-like models is written out in `decoder`; that of others is their own, for which the engine supplies
the cache and an attention function. The constructor compares the result with a plain forward, and refuses a model where
they differ.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grpo.batching import common_prefix
from grpo.config import UsageError
from grpo.data_types import Episode
from grpo.engines import Key, TurnOutput, TurnRequest
from grpo.engines.context_limit import checked_context
from grpo.engines.decoder import FEW_TOKENS, Decoder, OwnForward
from grpo.engines.drafts import DRAFT_LENGTH, Drafts
from grpo.engines.slots import Layout, SlotCache
from grpo.sampling import SamplingConfig, random_stream, sample, uniforms

KEPT_BYTES = 256 << 20  # a cache up to this size is kept while the trainer works: making it anew takes time
SHARING_ROWS = 4  # with fewer, one call of attention is faster than two


@dataclass
class Row:
    """One live episode. `ids` is the conversation so far, of which the first `cached` have their KV in the slot."""

    key: Key
    first_prompt: tuple[int, ...]
    ids: list[int]
    cached: int = 0
    sampling: bool = False  # a turn is being sampled; otherwise the engine waits for the episode's next turn
    max_tokens: int = 0
    position: int = 0
    stream: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.uint64))
    logprobs: list[float] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)


class TorchEngine:
    """Continuous batching in process (see the module's text). Implements `grpo.engines.Engine`.

    Args:
        model: a causal LM, used as it is: after an optimiser step nothing has to be copied. Sampling leaves its mode
            and its attention as they were.
        eos_ids: ids that end a turn.
        max_context: most tokens an episode can have, prompt and completion together. None: what the model can have.
        slots: episodes held at once; more than that wait in line.
        device: of the model.
        seed: run seed; a token's randomness is a hash of (seed, step, scenario, member, turn, position).
        sampling: temperature and top-p unless `start` says otherwise.
        dtype: compute type, through autocast where it is not the weights' own. Default: the weights'.
        draft_length: ids drafted at most for each row and forward; 0: none.

    Raises:
        UsageError: a model this engine would run wrongly (sliding window shorter than `max_context`, recurrent layers,
            attention that is not pluggable), or `max_context` beyond the model's positions.
    """

    def __init__(
        self,
        model: Any,
        eos_ids: Collection[int],
        max_context: int | None = None,
        slots: int = 64,
        device: torch.device | str = "cpu",
        seed: int = 0,
        sampling: SamplingConfig | None = None,
        dtype: torch.dtype | None = None,
        draft_length: int = DRAFT_LENGTH,
    ):
        self.draft_length = draft_length
        self.model, self.eos_ids, self.slots = model, frozenset(eos_ids), slots
        self.device, self.seed, self.default_sampling = torch.device(device), seed, sampling or SamplingConfig()
        weights = next(model.parameters()).dtype
        self.autocast_dtype = dtype if dtype not in (None, weights) else None
        self.max_context = checked_context(model, max_context)
        self.cache = SlotCache(slots, self.autocast_dtype or weights)
        self._decode: Decoder | OwnForward = self._decoder_for(model)
        self.start(0)

    def start(self, step: int, sampling: SamplingConfig | None = None, before: Sequence[Episode] = ()) -> None:
        """Begin a rollout batch. Every cached key and value is forgotten: the weights may have changed."""
        self._step, self.sampling = step, sampling or self.default_sampling
        self._seed = self.seed if self.sampling.seed is None else self.sampling.seed
        self._rows: list[Row] = []  # row i of the cache belongs to _rows[i]
        self._queue: deque[TurnRequest] = deque()
        self._prefix = 0  # ids that the first prompts of all rows begin with
        self._drafts = Drafts()
        for episode in before:
            self._drafts.study(episode)

    description = "torch, in process, on the policy's own weights"

    def wake(self) -> None:
        """Nothing to do: what the trainer changes is what the next forward reads."""

    weights_changed = wake

    def sleep(self) -> None:
        """Free the cache, where it is large enough for the trainer to miss it. Episodes are over by then."""
        if self.cache.nbytes > KEPT_BYTES:
            self.cache.clear()

    @property
    def num_active(self) -> int:
        """Episodes that hold a slot or wait for one."""
        return len(self._rows) + len(self._queue)

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn. An episode that holds a slot goes on in it; its prompt must begin with what is there.

        Raises:
            ValueError: nothing to sample from or no room, a turn of this episode is still running, or a prompt that
                rewrites the episode's past.
        """
        request.check(self.max_context)
        prompt, key = request.prompt_ids, request.key
        if any(waiting.key == key for waiting in self._queue):
            raise ValueError(f"episode {key} already waits for a slot")
        row = next((row for row in self._rows if row.key == key), None)
        if row is None:
            self._queue.append(request)
            return
        if row.sampling:
            raise ValueError(f"episode {key} is still sampling its previous turn")
        if list(prompt[: len(row.ids)]) != row.ids:
            raise ValueError(f"turn {request.turn} of episode {key} does not begin with the turns before it")
        row.ids.extend(prompt[len(row.ids) :])
        self._begin_turn(row, request)

    def release(self, key: Key) -> None:
        """Free the episode's slot; the last row moves into it, so that live rows stay 0..n-1."""
        self._queue = deque(request for request in self._queue if request.key != key)
        for index, row in enumerate(self._rows):
            if row.key == key:
                last = self._rows.pop()
                if last is not row:
                    with torch.inference_mode():
                        self.cache.copy(len(self._rows), [index], last.cached)
                    self._rows[index] = last
                return

    @torch.inference_mode()
    def step(self) -> list[TurnOutput]:
        """One forward: each live episode gets at least one token further. Returns the turns that ended with it.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        self._admit()
        if not self._rows:
            return []
        room = self.max_context - max(len(row.ids) for row in self._rows)
        for row in self._rows:
            length = min(self.draft_length, room, row.max_tokens - len(row.logprobs) - 1)
            row.draft = self._drafts.guess(row.ids, length) if row.sampling else []
        logits = self._forward()  # [M, V]
        counts = [1 + len(row.draft) for row in self._rows]
        streams = np.concatenate([row.stream for row in self._rows]).repeat(counts)
        positions = np.concatenate(
            [row.position + len(row.logprobs) + np.arange(c) for row, c in zip(self._rows, counts)]
        )
        uniform = torch.from_numpy(uniforms(streams, positions)).to(self.device)
        tokens, logprobs = (values.tolist() for values in sample(logits, uniform, self.sampling))
        return self._collect(tokens, logprobs)

    def _begin_turn(self, row: Row, request: TurnRequest) -> None:
        row.sampling, row.max_tokens, row.position, row.logprobs = True, request.max_tokens, request.position, []
        row.stream = random_stream(self._seed, self._step, *request.key, request.turn)

    def _admit(self) -> None:
        """Give free slots to waiting episodes, each with the longest prefix of its prompt that a live row has.

        An episode whose prefix is only being computed in this step keeps waiting: one step later it can copy it.
        """
        if not self._queue:
            return
        donors: dict[tuple[int, ...], int] = {}  # a prompt and one row that begins with it
        for index, row in enumerate(self._rows):
            donors.setdefault(row.first_prompt, index)
        copies: dict[tuple[int, int], list[int]] = {}  # (source row, length) -> target rows
        waiting: deque[TurnRequest] = deque()
        for request in self._queue:
            prompt = request.prompt_ids
            donor, shared = _longest_prefix(prompt, donors)
            shared = min(shared, len(prompt) - 1)  # the last token is always fed: its logits are needed
            if len(self._rows) == self.slots or (shared and self._rows[donor].cached < shared):
                waiting.append(request)
                continue
            index = len(self._rows)
            row = Row(request.key, prompt, list(prompt), cached=shared)
            self._begin_turn(row, request)
            self._rows.append(row)
            donors.setdefault(prompt, index)
            if shared:
                copies.setdefault((donor, shared), []).append(index)
        self._queue = waiting
        self._prefix = len(common_prefix([row.first_prompt for row in self._rows]))
        if copies:
            self.cache.reserve(len(self._rows), max(row.cached for row in self._rows))
        for (source, length), targets in copies.items():
            self.cache.copy(source, targets, length)

    def _forward(self) -> torch.Tensor:
        """Feed every row's tokens that are not cached yet, and its draft: logits after each row's last token and after
        each one drafted behind it, row by row, [M, V]."""
        ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        spans: list[tuple[int, int, int, int]] = []

        def feed(index: int, tokens: Sequence[int], first: int) -> None:
            """Append tokens of a row, the first of them at position `first`."""
            ids.extend(tokens)
            rows.extend([index] * len(tokens))
            positions.extend(range(first, first + len(tokens)))

        for index, row in enumerate(self._rows):
            if row.cached < len(row.ids) - 1:
                spans.append((len(ids), len(ids) + len(row.ids) - 1 - row.cached, index, row.cached))
                feed(index, row.ids[row.cached : -1], row.cached)
        for index, row in enumerate(self._rows):
            feed(index, [row.ids[-1], *row.draft], len(row.ids) - 1)
        longest = max(positions) + 1
        table = torch.tensor([ids, rows, positions], device=self.device)  # [3, N], one transfer
        self.cache.place(table[1], table[2], len(self._rows), longest)
        layout = Layout(
            rows=table[1],
            positions=table[2],
            longest=longest,
            spans=spans,
            counts=[1 + len(row.draft) for row in self._rows],
            dtype=self.cache.dtype,
            shared=self._shared(longest),
            prompts=[row.first_prompt for row in self._rows],
        )
        with self._autocast():
            logits = self._decode(table[0], self.cache, layout)
        for row in self._rows:
            row.cached = len(row.ids)
        return logits

    def _shared(self, longest: int) -> int:
        """Leading positions that attention reads once for all rows: none unless they are most of what it reads.

        On a GPU none either: its attention kernels do not give the log-sum-exp in one public call.
        """
        few = len(self._rows) < SHARING_ROWS or 2 * self._prefix < longest
        return 0 if few or self.device.type != "cpu" else self._prefix

    def _collect(self, tokens: list[int], logprobs: list[float]) -> list[TurnOutput]:
        """Take each row's sampled tokens as far as its draft was right, and one more."""
        outputs, start = [], 0
        for row in self._rows:
            first, start = start, start + 1 + len(row.draft)
            if not row.sampling:
                continue  # waits for its next turn: its last token was only fed again, to the same place
            row_tokens, row_logprobs = tokens[first:start], logprobs[first:start]
            for token, logprob, drafted in zip(row_tokens, row_logprobs, [*row.draft, None]):
                if logprob != logprob:
                    raise FloatingPointError(f"episode {row.key}: the model's logits are not finite")
                row.ids.append(token)
                row.logprobs.append(logprob)
                self._drafts.learn(row.ids)
                stopped = token in self.eos_ids
                if stopped or len(row.logprobs) == row.max_tokens:
                    row.sampling = False
                    sampled = tuple(row.ids[-len(row.logprobs) :])
                    outputs.append(TurnOutput(row.key, sampled, tuple(row.logprobs), "stop" if stopped else "length"))
                    break
                if token != drafted:
                    break
            row.cached = len(row.ids) - 1  # right drafts are cached; of wrong ones later tokens overwrite the keys
        return outputs

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self.autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype) if dtype else contextlib.nullcontext()

    def _decoder_for(self, model: Any) -> Decoder | OwnForward:
        """The first that gives a plain forward's logits. Raises UsageError for a model that this engine would run
        wrongly, whichever way."""
        name, own = type(model).__name__, OwnForward(model)
        written_out = Decoder.of(model)
        ways: list[Decoder | OwnForward] = [written_out, own] if written_out else [own]
        for decode in ways:
            self.start(0)
            self.cache.clear()
            self._decode = decode
            try:
                if self._agrees(own):
                    return decode
                reason = (
                    f"{name} gives other logits through this engine's cache than by itself; its attention is of a kind "
                    "this engine does not support"
                )
            except (TypeError, AttributeError, RuntimeError) as error:
                reason = f"cannot run {name} ({str(error).splitlines()[0]})"
        raise UsageError(f"--engine torch: {reason}")

    @torch.inference_mode()
    def _agrees(self, own: OwnForward) -> bool:
        """Do two turns through the cache give the logits of one plain forward, be their tokens few or many?"""
        vocab = self.model.config.get_text_config().vocab_size
        ids = [(7 * i + 3) % vocab for i in range(min(9, self.max_context))]
        half, actual = len(ids) // 2, []
        for few in (0, FEW_TOKENS):
            self.cache.clear()  # or the second way might read what the first has written
            self._decode.few_tokens = few
            self._rows = [Row((0, 0), (), ids[:half])]
            first = self._forward()
            self._rows[0].ids.extend(ids[half:-2])
            self._rows[0].draft = ids[-2:]
            actual.append(torch.cat([first, self._forward()]).float())
        with self._autocast():
            logits = own.plain(torch.tensor(ids, device=self.device))
        expected = logits[[half - 1, *range(len(ids) - 3, len(ids))]].float()
        tolerance = (1e-3 if self.cache.dtype == torch.float32 else 0.1) * float(expected.abs().max())
        return all(torch.allclose(each, expected, atol=tolerance, rtol=0) for each in actual)


def _longest_prefix(prompt: tuple[int, ...], donors: dict[tuple[int, ...], int]) -> tuple[int, int]:
    """The row whose first prompt shares the most leading ids with `prompt`, and how many: (row, length)."""
    if prompt in donors:
        return donors[prompt], len(prompt)
    best = (0, 0)
    for other, row in donors.items():
        low, high = 0, min(len(prompt), len(other))
        while low < high:  # bisection: comparing slices is much faster than comparing ids one by one
            middle = (low + high + 1) // 2
            low, high = (middle, high) if prompt[low:middle] == other[low:middle] else (low, middle - 1)
        if low > best[1]:
            best = (row, low)
    return best
