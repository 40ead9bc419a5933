"""Attention over a prefix tree: every segment sees its ancestors, and itself causally.

A group's members share their prompt, and all prompts share the system prefix. Laid out as rows, these tokens are
computed once per member. Here each unique token is computed once: a microbatch is one row of segments,

    [ system prefix | prompt A | completion A1 | completion A2 | prompt B | completion B1 | ... ]

with positions that continue from the parent's. Everything in a transformer but attention acts on single tokens, so an
attention function registered with transformers is all it takes; the model's code is not touched.

On a CPU the keys of a segment are read in place, by two calls of SDPA's kernel: its own queries, causally, and all its
descendants, who stand right behind it. What a query finds in the segments on its path is averaged, weighted by the
exponentials of their log-sum-exps. Nothing is masked and blocks of other segments are never computed. On a GPU all
segments travel in one call of variable-length flash attention (`torch.nn.attention.varlen`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
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

    def blocks(self) -> tuple[list[int], list[tuple[slice, slice]]]:
        """What attends to what, by segments: the length of each, which attends to itself, and the segments that have
        descendants, with these: (keys among P + T, queries among T). Raises ValueError unless segments are in
        depth-first order, descendants right behind."""
        if "blocks" not in self._cached:
            for i, segment in enumerate(self.segments):
                if segment.parent >= 0 and segment.parent not in (i - 1, *self.ancestors(i - 1)):
                    raise ValueError(f"segment {i} does not stand among the descendants of its parent {segment.parent}")
            lengths = [segment.length for segment in self.segments]
            starts = [0, *itertools.accumulate(lengths)]
            dense = []
            for i in range(len(lengths)):
                end = i + 1
                while end < len(lengths) and i in self.ancestors(end):
                    end += 1
                if end > i + 1:
                    keys = slice(self.prefix_length + starts[i], self.prefix_length + starts[i + 1])
                    dense.append((keys, slice(starts[i + 1], starts[end])))
            if self.prefix_length:
                dense.append((slice(0, self.prefix_length), slice(0, starts[-1])))
            self._cached["blocks"] = lengths, dense
        return self._cached["blocks"]

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
        tree_layout.prefix[cast(int, module.layer_idx)] = key.detach(), value.detach()
    elif tree_layout.prefix_length:
        past_key, past_value = tree_layout.prefix[cast(int, module.layer_idx)]
        key, value = torch.cat([past_key.to(key.dtype), key], 2), torch.cat([past_value.to(value.dtype), value], 2)
    # Under autocast the norms leave queries and keys in float32; attention is in the type of the linear layers.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if value.device.type == "cpu":
        output = _TreeAttention.apply(query, key, value, tree_layout, scaling or query.shape[-1] ** -0.5)
        return output.transpose(1, 2), None
    half = value.dtype in (torch.float16, torch.bfloat16)  # all that flash attention takes
    attend = _varlen if half else _segment_by_segment
    return attend(query, key, value, tree_layout, scaling), None


class _TreeAttention(torch.autograd.Function):
    """Attention by key segments, on a CPU. For each query, over the segments s on its path:

        o = sum_s exp(l_s - l) o_s    with l_s, o_s of that segment's keys alone, l = logsumexp_s l_s

    Backward of SDPA's kernel needs o and l of all keys, and then gives each segment's share of the gradients by
    itself. Kept for it: query, key, value, o and l; no keys are copied or repeated for descendants.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scaling: float) -> Tensor:
        """query [1, H, T, d], key and value [1, H_kv, P + T, d] -> [1, H, T, d]."""
        own, dense = layout.blocks()
        parts = zip(query.split(own, 2), *(x[:, :, layout.prefix_length :].split(own, 2) for x in (key, value)))
        found = [_block_forward(q, k, v, True, scaling) for q, k, v in parts]
        # [1, T, H, d] in memory: what the model reshapes it to next, without a copy.
        output = torch.cat([each.transpose(1, 2) for each, _ in found], 1).transpose(1, 2)
        lse = torch.cat([each for _, each in found], 2)
        for keys, queries in dense:
            q, k, v = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            more, more_lse = _block_forward(q, k, v, False, scaling)
            so_far, so_far_lse = output[:, :, queries], lse[:, :, queries]
            so_far.lerp_(more, torch.sigmoid(more_lse - so_far_lse)[..., None].to(more.dtype))
            torch.logaddexp(so_far_lse, more_lse, out=so_far_lse)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.layout, ctx.scaling = layout, scaling
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        own, dense = ctx.layout.blocks()
        start = ctx.layout.prefix_length
        of_queries = [x.split(own, 2) for x in (grad, query, output, lse)]
        of_keys = [x[:, :, start:].split(own, 2) for x in (key, value)]
        parts = zip(*of_queries, *of_keys)
        found = [_block_backward(g, q, o, own_lse, k, v, True, ctx.scaling) for g, q, o, own_lse, k, v in parts]
        grad_query, *grad_keys = (torch.cat(each, 2) for each in zip(*found))
        grad_key, grad_value = (F.pad(each, (0, 0, start, 0)) if start else each for each in grad_keys)
        for keys, queries in dense:
            g, q, o, of_lse = (x[:, :, queries] for x in (grad, query, output, lse))
            q, k, v = _block_backward(g, q, o, of_lse, key[:, :, keys], value[:, :, keys], False, ctx.scaling)
            grad_query[:, :, queries].add_(q)
            grad_key[:, :, keys].add_(k)
            grad_value[:, :, keys].add_(v)
        return grad_query, grad_key, grad_value, None, None


# SDPA's kernel for CPUs itself: the public function keeps the log-sum-exp to itself. It takes as many heads of keys as
# of queries. Where key heads serve several query heads, these become more queries of one head, so that keys are not
# repeated; behind a causal mask that cannot be, and keys (of one segment) are.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[1, H, n, ...] -> [1, H_kv, share * n, ...]."""
    return x.reshape(1, kv_heads, -1, *x.shape[3:])


def _block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """q [1, H, n, d] over k, v [1, H_kv, m, d]: output [1, H, n, d] and log-sum-exp [1, H, n]."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if causal:
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)) if heads > kv_heads else (k, v)
        return _flash(q, k, v, 0.0, True, scale=scaling)
    output, lse = _flash(_fold(q, kv_heads), k, v, 0.0, False, scale=scaling)
    return output.reshape(q.shape), lse.reshape(q.shape[:3])


def _block_backward(
    grad: Tensor, q: Tensor, output: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by these keys, given the output and log-sum-exp over all keys."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if not causal:
        folded = (_fold(x, kv_heads) for x in (grad, q))
        rest = (_fold(x, kv_heads) for x in (output, lse))
        grad_q, grad_k, grad_v = _flash_backward(*folded, k, v, *rest, 0.0, False, scale=scaling)
        return grad_q.reshape(q.shape), grad_k, grad_v
    share = heads // kv_heads
    many = [x.repeat_interleave(share, 1) for x in (k, v)] if share > 1 else [k, v]
    grad_q, *grads = _flash_backward(grad, q, *many, output, lse, 0.0, True, scale=scaling)
    grad_k, grad_v = (x.unflatten(1, (kv_heads, share)).sum(2) for x in grads) if share > 1 else grads
    return grad_q, grad_k, grad_v


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
    assert isinstance(output, Tensor)  # nothing else was asked for
    return output.to(query.dtype)[None]


AttentionInterface.register(ATTENTION_NAME, tree_attention)
# Without a layout a forward is a plain one, so its masks are SDPA's.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
