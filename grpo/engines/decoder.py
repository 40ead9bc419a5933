"""The forward of a flat batch of tokens over the slots, without gradient: written out, or the model's own.

Where few tokens pass, transformers' own forward costs more in calls than in arithmetic: wrappers around every module,
masks nobody reads, queries and keys rotated apart. With N tokens x [N, D] and a cache, a layer like Llama's is

    h = norm(x);  q, k, v = W_q h, W_k h, W_v h;  q, k = rotated(norm(q)), rotated(norm(k))
    x = x + W_o attention(q, cached keys and values, k and v among them)
    h = norm(x);  x = x + W_down (silu(W_gate h) * W_up h)

`Decoder` calls the model's modules for it: linear layers may have adapters, norms and rotary embeddings are whatever
they are. For few tokens on a CPU in float32 only the linear layers are, and `grpo.compiled` does what stands between
them. Hooks on modules inside of layers do not run. `OwnForward` takes any model whose attention is pluggable.
`TorchEngine` compares either with a plain forward before it uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.engines.slots import ATTENTION_NAME, Layout, SlotCache, attend

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers of transformers that compute what is written above, norms of queries and keys being Qwen3's alone; with the
default `hidden_act`."""

FEW_TOKENS = 256
FEW_TERMS = 8 << 20  # of attention: tokens * keys * width
NO_WEIGHT = np.empty(0, dtype=np.float32)


class Decoder:
    """The forward of `model`, which must be one of these: `Decoder.of` gives None for others."""

    few_tokens = FEW_TOKENS

    def __init__(self, model: Any):
        self.body = model.get_decoder()
        self.head = model.get_output_embeddings()
        heads = model.config.get_text_config().num_attention_heads
        self.width = heads * self.body.layers[0].self_attn.head_dim

    @classmethod
    def of(cls, model: Any) -> Decoder | None:
        body = model.get_decoder() if hasattr(model, "get_decoder") else None
        layers = getattr(body, "layers", ())
        known = bool(layers) and all(map(_is_known, layers)) and _is_of_transformers(model)
        return cls(model) if known and model.get_output_embeddings() is not None else None

    def __call__(self, ids: Tensor, cache: SlotCache, layout: Layout) -> Tensor:
        """Logits [M, V] of the last M tokens; ids [N] int64."""
        x = self.body.embed_tokens(ids)  # [N, D]
        cos, sin = self.body.rotary_emb(x, layout.positions[None])  # [1, N, d]
        if self._is_small(x, cache, layout):
            return self._compiled(x, cos[0], sin[0], cache, layout)
        # rotate_half negates one half and swaps the two; the sign goes to the sines, once for all layers.
        first, second = sin.chunk(2, -1)
        cos, sin = cos[0, :, None], torch.cat([-first, second], -1)[0, :, None]  # [N, 1, d]
        for index, layer in enumerate(self.body.layers):
            attention = _attention(layer.self_attn, layer.input_layernorm.forward(x), cos, sin, cache, layout)
            if index == len(self.body.layers) - 1:
                x, attention = x[layout.unread :], attention[layout.unread :]
            x = x + layer.self_attn.o_proj.forward(attention)
            h, mlp = layer.post_attention_layernorm.forward(x), layer.mlp
            x = x + mlp.down_proj.forward(F.silu(mlp.gate_proj.forward(h)).mul_(mlp.up_proj.forward(h)))
        return self.head.forward(self.body.norm.forward(x))

    def _is_small(self, x: Tensor, cache: SlotCache, layout: Layout) -> bool:
        """Is what stands between the products little enough for one thread, and of a type that is compiled?"""
        few = len(x) <= self.few_tokens and len(x) * layout.longest * self.width <= FEW_TERMS
        weight = self.body.norm.weight
        return few and x.device.type == "cpu" and x.dtype == cache.dtype == weight.dtype == torch.float32

    def _compiled(self, x: Tensor, cos: Tensor, sin: Tensor, cache: SlotCache, layout: Layout) -> Tensor:
        """The same by `compiled`'s functions. Each layer's last sum is left to the next one's norm."""
        from grpo import compiled  # here, as numba takes half a second to import

        rows, positions = layout.rows.numpy(), layout.positions.numpy()
        twins = np.array(layout.twins, dtype=np.int64)
        cosines, sines, change = cos.numpy(), sin.numpy(), x.numpy()[:0]

        def norm(module: Any) -> Tensor:
            normed = torch.empty_like(x)
            compiled.add_norm(x.numpy(), change, _copied(module.weight), module.variance_epsilon, normed.numpy())
            return normed

        for layer in self.body.layers:
            attention = layer.self_attn
            h, split = norm(layer.input_layernorm), (len(x), -1, attention.head_dim)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            query, key, value = (p.forward(h).view(split).numpy() for p in projections)
            weights, eps = (NO_WEIGHT, NO_WEIGHT), 0.0
            if hasattr(attention, "q_norm"):
                weights = tuple(_copied(each.weight) for each in (attention.q_norm, attention.k_norm))
                eps = attention.q_norm.variance_epsilon
            pools = [pool.numpy() for pool in cache.layer(attention.layer_idx, key.shape[1], key.shape[2])]
            compiled.write(query, key, value, *weights, eps, cosines, sines, rows, positions, *pools)
            if layer is self.body.layers[-1]:
                x = x[layout.unread :]
                query, rows, positions = (each[layout.unread :] for each in (query, rows, positions))
            mixed = torch.empty(query.shape)
            compiled.attend(query, *pools, rows, positions, twins, attention.scaling, mixed.numpy())
            change = attention.o_proj.forward(mixed.flatten(1)).numpy()
            h, mlp = norm(layer.post_attention_layernorm), layer.mlp
            gate = mlp.gate_proj.forward(h)
            compiled.gated(gate.numpy(), mlp.up_proj.forward(h).numpy())
            change = mlp.down_proj.forward(gate).numpy()
        return self.head.forward(norm(self.body.norm))


def _copied(weight: Tensor) -> Any:
    """A norm's weight as an array. `numpy` of the parameter itself would make it one whose memory FSDP cannot free."""
    return weight.detach().clone().numpy()


def _is_known(layer: Any) -> bool:
    """By what it is made of: in bfloat16 the engine's comparison cannot tell a GELU of small numbers from a SiLU."""
    known = type(layer).__name__ in LAYERS and _is_of_transformers(layer)
    return known and type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _is_of_transformers(module: Any) -> bool:
    """Code of others may have the same names, or a forward around transformers' that does more."""
    return type(module).__module__.startswith("transformers.models.")


def _attention(module: Any, h: Tensor, cos: Tensor, sin: Tensor, cache: SlotCache, layout: Layout) -> Tensor:
    """Attention of N tokens over their slots before the output projection: [N, H * d]."""
    split = (len(h), -1, module.head_dim)
    query, key, value = (p.forward(h).view(split) for p in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        query, key = module.q_norm.forward(query), module.k_norm.forward(key)
    both = torch.cat([query, key], 1)  # [N, H + H_kv, d]
    rotated = torch.addcmul(both * cos, both.roll(module.head_dim // 2, -1), sin)
    query, key = rotated.split([query.shape[1], key.shape[1]], 1)
    keys, values = cache.write(module.layer_idx, key, value)
    return attend(query, keys, values, layout, module.scaling).flatten(1)


class OwnForward:
    """The same by the model's own forward, which is given the cache and an attention function."""

    few_tokens = 0  # asks nobody: there is one way for all

    def __init__(self, model: Any):
        self.model, self.config = model, model.config.get_text_config()

    def __call__(self, ids: Tensor, cache: SlotCache, layout: Layout) -> Tensor:
        """As `Decoder`'s."""
        with self._sampling(ATTENTION_NAME):
            return self.model(
                input_ids=ids[None],
                position_ids=layout.positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=sum(layout.counts),
                slot_layout=layout,
            ).logits[0]

    def plain(self, ids: Tensor) -> Tensor:
        """Logits [N, V] of one conversation, without cache and with the attention that the model has."""
        with self._sampling(self.config._attn_implementation):
            return self.model(input_ids=ids[None], use_cache=False).logits[0]

    @contextlib.contextmanager
    def _sampling(self, attention: str) -> Iterator[None]:
        """Eval mode and this attention, both put back afterwards: the trainer shares the module."""
        training = [module for module in self.model.modules() if module.training] if self.model.training else []
        trainers_attention = self.config._attn_implementation
        for module in training:
            module.training = False
        self.config._attn_implementation = attention
        try:
            yield
        finally:
            self.config._attn_implementation = trainers_attention
            for module in training:
                module.training = True
