"""Attention over a prefix tree: every segment sees its ancestors, and itself causally.

A group's members share their prompt, and all prompts share the system prefix. Laid out as rows, these tokens are
computed once per member. Here each unique token is computed once: a microbatch is one row of segments,

    [ system prefix | prompt A | completion A1 | completion A2 | prompt B | completion B1 | ... ]

with positions that continue from the parent's. Everything in a transformer but attention acts on single tokens, so an
attention function registered with transformers is all it takes; the model's code is not touched.

On a CPU each segment is one call of SDPA over the keys of its ancestors and its own: blocks of other segments are never
computed. On a GPU all segments travel in one call of variable-length flash attention (`torch.nn.attention.varlen`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.config import UsageError

ATTENTION_NAME = "grpo_tree"
UNSUPPORTED_OPTIONS = ("softcap", "s_aux", "position_bias", "sinks")


@dataclass(frozen=True)
class Segment:
    """`length` tokens after those of its parent. The parent comes earlier in the list; -1: no parent."""

    length: int
    parent: int


@dataclass
class TreeLayout:
    """The segments of one packed row of T tokens, and what attention derives from them once for all layers.

    Example, two members of one group behind a prefix of 4 tokens::

        segments   (4, -1), (3, 0), (2, 1), (5, 1)         T = 14
        keys of the last one   columns 0..6 and 9..13      positions 7..11

    `prefix` holds keys and values of tokens before the root, one pair [1, H_kv, P, d] a layer, computed by an earlier
    forward of a frozen model; `record` makes a forward leave its own there.
    """

    segments: Sequence[Segment]
    prefix: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    prefix_length: int = 0
    record: bool = False
    _cached: dict[Any, Any] = field(default_factory=dict)

    def ancestors(self, index: int) -> list[int]:
        """The path to segment `index`, root first, without itself."""
        path, parent = [], self.segments[index].parent
        while parent >= 0:
            path.append(parent)
            parent = self.segments[parent].parent
        return path[::-1]

    def positions(self) -> Tensor:
        """Position of each of the T tokens in its own conversation: [T] int64."""
        starts: list[int] = []
        for segment in self.segments:
            parent = segment.parent
            starts.append(self.prefix_length if parent < 0 else starts[parent] + self.segments[parent].length)
        parts = [torch.arange(s, s + segment.length) for s, segment in zip(starts, self.segments)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def mask(self, index: int, share: int, like: Tensor) -> Tensor:
        """Additive mask [1, 1, share * n, P + ancestors + n]: 0 for ancestors and the past, -inf for the future."""
        n = self.segments[index].length
        before = self.prefix_length + sum(self.segments[i].length for i in self.ancestors(index))
        key = (n, before, share, like.dtype, like.device)
        if key not in self._cached:
            mask = torch.full((n, before + n), -torch.inf, dtype=like.dtype, device=like.device).triu_(before + 1)
            self._cached[key] = mask.repeat(share, 1)[None, None]
        return self._cached[key]

    def key_columns(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """For variable-length attention: the column of each key ([K] int64, behind the prefix's P columns), and
        cumulative query and key lengths ([S + 1] int32) with the longest of each."""
        if device not in self._cached:
            starts = [0]
            for segment in self.segments:
                starts.append(starts[-1] + segment.length)
            columns, lengths = [], []
            for index in range(len(self.segments)):
                own = [torch.arange(self.prefix_length)]
                for i in [*self.ancestors(index), index]:
                    own.append(self.prefix_length + torch.arange(starts[i], starts[i + 1]))
                columns.append(torch.cat(own))
                lengths.append(len(columns[-1]))
            keys = torch.tensor([0, *lengths]).cumsum(0)
            queries = torch.tensor(starts)
            self._cached[device] = (
                torch.cat(columns).to(device),
                queries.to(device, torch.int32),
                keys.to(device, torch.int32),
                int(queries.diff().max()),
                int(keys.diff().max()),
            )
        return self._cached[device]


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, T, d]
    key: Tensor,  # [B, H_kv, T, d]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_layout: TreeLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, [1, T, H, d]; without a layout transformers' own SDPA.

    Raises UsageError for attention that this function would compute wrongly.
    """
    if tree_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    for name in UNSUPPORTED_OPTIONS:
        if options.get(name) is not None:
            raise UsageError(f"attention option `{name}` of {type(module).__name__}")
    if tree_layout.record:
        tree_layout.prefix[module.layer_idx] = key.detach(), value.detach()
    elif tree_layout.prefix_length:
        past_key, past_value = tree_layout.prefix[module.layer_idx]
        key, value = torch.cat([past_key.to(key.dtype), key], 2), torch.cat([past_value.to(value.dtype), value], 2)
    # Flash attention takes 16-bit types only; under autocast the norms leave queries and keys in float32.
    half = value.dtype in (torch.float16, torch.bfloat16)
    attend = _varlen if value.is_cuda and half and varlen_attn is not None else _segment_by_segment
    return attend(query, key, value, tree_layout, scaling), None


def _segment_by_segment(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scaling: float | None) -> Tensor:
    """One SDPA call per segment. `split` and not slices: the backward of a slice fills a tensor of the whole row."""
    lengths = [segment.length for segment in layout.segments]
    key_parts, value_parts = (x.split([layout.prefix_length, *lengths], dim=2) for x in (key, value))
    heads, share = query.shape[1], query.shape[1] // key.shape[1]
    outputs = []
    for index, q in enumerate(query.split(lengths, dim=2)):
        path = [0] * bool(layout.prefix_length) + [1 + i for i in (*layout.ancestors(index), index)]
        k, v = (parts[path[0]] if len(path) == 1 else torch.cat([parts[i] for i in path], 2)
                for parts in (key_parts, value_parts))  # fmt: skip
        # Grouped queries: the heads that share a key head become more query positions of it, so that keys are not
        # repeated.
        n = q.shape[2]
        grouped = q.reshape(1, key.shape[1], share * n, -1)
        if len(path) == 1 and share == 1:
            output = F.scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scaling)
        else:
            mask = layout.mask(index, share, q)
            output = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scaling)
        outputs.append(output.reshape(1, heads, n, -1))
    return torch.cat(outputs, 2).transpose(1, 2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scaling: float | None) -> Tensor:
    """All segments in one call; the keys of an ancestor are read once per descendant, by index.

    Flash attention aligns a causal mask to the last query and the last key, which is what a segment behind its
    ancestors needs.
    """
    columns, cu_queries, cu_keys, longest_query, longest_key = layout.key_columns(query.device)
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # [T, H, d]
    output = varlen_attn(
        q.contiguous(), k[columns], v[columns], cu_queries, cu_keys, longest_query, longest_key,
        scale=scaling, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return output.to(query.dtype)[None]


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

AttentionInterface.register(ATTENTION_NAME, tree_attention)
# Without a layout a forward is a plain one, so its masks are SDPA's.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
