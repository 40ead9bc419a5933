"""Keys and values of the live episodes, and attention of a flat batch of tokens over them.

transformers hands each layer's new keys and values to the cache and what the cache returns to the attention function;
both are replaced here, and nothing else of a model is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from grpo.config import UsageError

ATTENTION_NAME = "grpo_slots"
KEY_MULTIPLE = 64  # key lengths are rounded up to this: few distinct shapes, aligned masks
CAPACITY_MULTIPLE = 256  # of the cache; a multiple of KEY_MULTIPLE
ROW_MULTIPLE = 8


@dataclass(frozen=True)
class Grid:
    """M tokens of n rows, `counts` of each in a row, as an [n, w] rectangle; w is the largest count.

    Example, counts [1, 3]::

        place   [[0, 0, 0], [1, 2, 3]]     a short row repeats its first token
        taken   [0, 3, 4, 5]               where the M tokens lie in the flat rectangle
    """

    place: torch.Tensor  # [n, w] int64
    taken: torch.Tensor | None  # [M] int64; None: all of it

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Grid:
        n, width = len(counts), max(counts)
        if width == 1:
            return cls(torch.arange(n, device=device)[:, None], None)
        starts = torch.tensor([0, *counts]).cumsum(0)[:-1, None]  # [n, 1]
        column, count = torch.arange(width), torch.tensor(counts)[:, None]
        place = torch.where(column < count, starts + column, starts)
        taken = None if min(counts) == width else torch.arange(n * width)[(column < count).flatten()].to(device)
        return cls(place.to(device), taken)

    def spread(self, values: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[..., M, ...] -> [..., n, w, ...]."""
        if self.taken is None:
            return values.unflatten(dim, self.place.shape)
        return values.index_select(dim, self.place.flatten()).unflatten(dim, self.place.shape)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[n, w, ...] -> [M, ...]."""
        flat = values.flatten(0, 1)
        return flat if self.taken is None else flat[self.taken]


@dataclass
class Layout:
    """Who is who among the N tokens of one forward: first spans of tokens whose logits nobody needs, one after the
    other, then M tokens of n rows, a row's last one and what is drafted behind it.

    Example without drafts: row 0 goes on with one token; row 1 holds 4 tokens and got a reply of 3, all of which it
    feeds::

        flat tokens   [reply 0, reply 1 | row 0's last, reply 2]
        spans         [(0, 2, row 1, position 4)]
        row_mask      [2, 1, 1, K]: row 0 up to its length, row 1 up to position 6
    """

    rows: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    longest: int  # the largest of them, and 1
    spans: Sequence[tuple[int, int, int, int]]  # (start, stop, row, position of the first token)
    counts: Sequence[int]  # of the last M tokens, those of each row
    dtype: torch.dtype  # of the cache
    shared: int = 0  # leading positions that hold the same in all n rows, and are read from the first
    prompts: Sequence[tuple[int, ...]] = ()  # of each row the first prompt

    @property
    def unread(self) -> int:
        """Tokens before the last M."""
        return len(self.rows) - sum(self.counts)

    @cached_property
    def chunks(self) -> list[tuple[int, int, int, torch.Tensor]]:
        """The spans with their masks: (start, stop, row, mask [1, 1, q, K_row])."""
        chunks = []
        for start, stop, row, first in self.spans:
            columns = torch.arange(round_up(first + stop - start), device=self.rows.device)
            mask = columns <= self.positions[start:stop, None]  # [q, K]
            chunks.append((start, stop, row, self._additive(mask[None, None])))
        return chunks

    @cached_property
    def grid(self) -> Grid:
        """Of the last M tokens."""
        return Grid.of(self.counts, self.rows.device)

    @cached_property
    def row_mask(self) -> torch.Tensor:
        """[n, 1, w, K - shared], 0 where a token attends and -inf elsewhere."""
        columns = torch.arange(self.shared, round_up(self.longest), device=self.rows.device)
        last = self.grid.spread(self.positions[self.unread :])  # [n, w]
        return self._additive(columns <= last[:, None, :, None])

    @property
    def twins(self) -> list[tuple[int, int]]:
        """For each row the first one with the same first prompt, and in how many leading positions they are equal."""
        first: dict[tuple[int, ...], int] = {}
        return [(first.setdefault(prompt, index), len(prompt)) for index, prompt in enumerate(self.prompts)]

    def _additive(self, mask: torch.Tensor) -> torch.Tensor:
        """A boolean mask as 0 and -inf: attention on a CPU is a tenth faster than with booleans."""
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


class SlotCache(Cache):
    """KV of the live slots: per layer two tensors [rows, H_kv, capacity, d], made at the first forward.

    `rows` follows the number of live rows, at most `slots`, and `capacity` the longest of them, so that neither 64
    slots nor a model with 40k positions cost memory that nobody uses.
    """

    def __init__(self, slots: int, dtype: torch.dtype):
        super().__init__(layers=[])
        self.slots, self.dtype = slots, dtype
        self.pools: dict[int, list[torch.Tensor]] = {}
        self.rows = self.columns = torch.empty(0, dtype=torch.int64)
        self.capacity = self.num_rows = 0
        self._line_numbers: dict[tuple[int, int], torch.Tensor] = {}  # of this forward, the same in all layers

    def place(self, rows: torch.Tensor, columns: torch.Tensor, live: int, longest: int) -> None:
        """The next forward's token i goes to slot rows[i] < live, position columns[i] < longest (both [N])."""
        self.rows, self.columns = rows, columns
        self._line_numbers.clear()
        self.reserve(live, longest)

    def reserve(self, live: int, longest: int) -> None:
        """Make room for `live` rows of `longest` positions; what is there stays."""
        num_rows = max(self.num_rows, min(self.slots, round_up(live, ROW_MULTIPLE)))
        capacity = max(self.capacity, round_up(longest, CAPACITY_MULTIPLE))
        if (num_rows, capacity) == (self.num_rows, self.capacity):
            return
        padding = (0, 0, 0, capacity - self.capacity, 0, 0, 0, num_rows - self.num_rows)
        for pools in self.pools.values():
            pools[:] = [F.pad(pool, padding) for pool in pools]
        self.num_rows, self.capacity = num_rows, capacity

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' call: [1, H_kv, N, d] states to their places; the whole pools, for `slot_attention` to read."""
        return self.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))

    def layer(self, layer: int, heads: int, d: int) -> list[torch.Tensor]:
        """The pools of a layer, keys and values, [rows, heads, capacity, d]."""
        if layer not in self.pools:
            # Zeros, not empty: masked positions get weight 0, and 0 times a stray NaN would still be NaN.
            shape = self.num_rows, heads, self.capacity, d
            self.pools[layer] = [torch.zeros(shape, dtype=self.dtype, device=self.rows.device) for _ in range(2)]
        return self.pools[layer]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this forward's keys and values [N, H_kv, d] to their places; returns the layer's pools."""
        key_pool, value_pool = self.layer(layer, keys.shape[1], keys.shape[2])
        for pool, states in ((key_pool, keys), (value_pool, values)):
            _, heads, capacity, d = pool.shape
            pool.view(-1, d).index_copy_(0, self._lines(heads, capacity), states.reshape(-1, d).to(self.dtype))
        return key_pool, value_pool

    def _lines(self, heads: int, capacity: int) -> torch.Tensor:
        """Where the forward's N tokens go in a pool of lines [rows * heads * capacity, d]: [N * heads] int64."""
        if (heads, capacity) not in self._line_numbers:
            head = torch.arange(heads, device=self.rows.device)
            lines = (self.rows[:, None] * heads + head) * capacity + self.columns[:, None]
            self._line_numbers[heads, capacity] = lines.flatten()
        return self._line_numbers[heads, capacity]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pools in self.pools.values() for pool in pools)

    def clear(self) -> None:
        """Free the memory. The next forward makes pools of the size these had grown to."""
        self.pools.clear()

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of one slot to others."""
        for pools in self.pools.values():
            for pool in pools:
                pool[targets, :, :length] = pool[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given explicitly; no model may derive them from the cache


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, d]
    key: torch.Tensor,  # [rows, H_kv, capacity, d], this forward's keys already in it
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    slot_layout: Layout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a flat batch over the slots (transformers' attention interface). Returns [1, N, H, d]."""
    for name in ("softcap", "s_aux", "position_bias", "sinks"):
        if options.get(name) is not None:
            raise UsageError(f"--engine torch: attention option `{name}` of {type(module).__name__} is not supported")
    if slot_layout is None:
        raise UsageError(f"--engine torch: {type(module).__name__} does not pass options to its attention function")
    return attend(query[0].transpose(0, 1), key, value, slot_layout, scaling)[None], None


def attend(
    query: torch.Tensor,  # [N, H, d]
    key: torch.Tensor,  # [rows, H_kv, capacity, d], this forward's keys already in it
    value: torch.Tensor,
    layout: Layout,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of the N tokens over their slots: [N, H, d]."""
    outputs = []
    for start, stop, row, mask in layout.chunks:
        keys, values = (pool[row : row + 1, :, : mask.shape[-1]] for pool in (key, value))
        outputs.append(_attend(query[None, start:stop].transpose(1, 2), keys, values, mask, scaling)[0])
    n, shared = len(layout.row_mask), layout.shared
    length = shared + layout.row_mask.shape[-1]
    tail = layout.chunks[-1][1] if layout.chunks else 0
    last = layout.grid.spread(query[tail:]).transpose(1, 2)  # [n, H, w, d]
    rows = key[:n, :, :length], value[:n, :, :length], layout.row_mask, scaling
    output = _attend_shared(last, *rows, shared) if shared else _attend(last, *rows)  # [n, w, H, d]
    outputs.append(layout.grid.gather(output))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    query: torch.Tensor,  # [b, H, q, d]
    key: torch.Tensor,  # [b, H_kv, K, d]
    value: torch.Tensor,
    mask: torch.Tensor,  # [b, 1, q, K]
    scaling: float | None,
) -> torch.Tensor:
    """softmax(query key^T * scaling + mask) value: [b, q, H, d].

    Grouped queries: the heads that share a key head become more query positions of it, so keys are read once and not
    repeated.
    """
    b, heads, q, _ = query.shape
    share = heads // key.shape[1]
    if share > 1:
        query = query.reshape(b, key.shape[1], share * q, -1)
        mask = mask if q == 1 else mask.repeat(1, 1, share, 1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype), scale=scaling)
    return output.reshape(b, heads, q, -1).transpose(1, 2)


def _attend_shared(
    query: torch.Tensor,  # [n, H, w, d]
    key: torch.Tensor,  # [n, H_kv, K, d]
    value: torch.Tensor,
    mask: torch.Tensor,  # [n, 1, w, K - shared]
    scaling: float | None,
    shared: int,
) -> torch.Tensor:
    """`_attend` where the first `shared` keys are those of every row, on a CPU: [n, w, H, d].

    All n * w queries read them once, in larger GEMMs, and each row reads its other keys. Softmax over both together
    is the average of the two outputs, weighted by the exponentials of their log-sum-exps.
    """
    n, heads, w, d = query.shape
    kv_heads = key.shape[1]
    share = heads // kv_heads
    # SDPA's own kernel for CPUs; the public function keeps the log-sum-exp to itself.
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # The public function would do this under autocast: norms leave queries in float32 there.
    query = query.to(key.dtype).reshape(n, kv_heads, share * w, d)
    everybody = query.transpose(0, 1).reshape(1, kv_heads, n * share * w, d)
    common, common_lse = attend(everybody, key[:1, :, :shared], value[:1, :, :shared], scale=scaling)
    common = common.view(kv_heads, n, share * w, d).transpose(0, 1)  # [n, H_kv, share * w, d]
    common_lse = common_lse.view(kv_heads, n, share * w).transpose(0, 1)  # [n, H_kv, share * w]
    mask = mask.repeat(1, 1, share, 1) if share > 1 else mask
    own, own_lse = attend(
        query, key[:, :, shared:], value[:, :, shared:], attn_mask=mask.to(query.dtype), scale=scaling
    )
    weight = torch.sigmoid(own_lse - common_lse)[..., None].to(own.dtype)
    return torch.lerp(common, own, weight).reshape(n, heads, w, d).transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, slot_attention)


def round_up(length: int, multiple: int = KEY_MULTIPLE) -> int:
    return -(-length // multiple) * multiple
