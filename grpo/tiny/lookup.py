"""Where training starts from: random weights, and in a few heads the beginnings of a look-up.

Copying the answer "venue: rented hall." into `"venue": "` needs two steps that only pay together: heads that know which
tokens came just before, and a head that compares these and copies what it finds. In trials, random weights had
31 % of the values right after 0.66 million tokens and 55 % after six million (guessing among the values in the context
gives 20-30 %); these had 99 % after 0.4 million. The trials also differed in the RoPE base and the number of fields.
Nothing here is frozen, and nothing knows about fields or values: it is all learnt from there.
The idea is that of Trockman and Kolter (2023), "Mimetic initialization of self-attention layers".
"""

from __future__ import annotations

import math

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SHARPNESS = 1.6  # gain of the query and key norms in the heads that look back
MATCH = 1.5  # the same in the heads that compare
NOTE = 4.0  # how loudly the look-back heads write, relative to an embedding's entries
COPY = 2.0  # the same for the heads that copy


@torch.no_grad()
def start_with_lookup(model: Qwen3ForCausalLM, seed: int = 0) -> None:
    """Set the look-up heads of a new model, in place. Needs two layers, and heads that fill the hidden size.

    Layer 0: head 0 attends one token back and head 1 two tokens back; each notes what it saw in dimensions of its own.
    Layer 1: head 0 looks for the place *after* an earlier copy of its own token (so a value of several tokens goes on);
    head 1 looks for the place whose token before last is its own last token (`venue` `": "` finds the token after
    `venue` `: `). Both add what they see to the output.
    """
    config = model.config
    hidden, size = config.hidden_size, config.head_dim
    generator = torch.Generator().manual_seed(seed)
    look_back, compare = (layer.self_attn for layer in model.model.layers[:2])
    embedding = model.model.embed_tokens.weight
    scale = embedding.pow(2).mean().sqrt()
    # One dimension is the same for every token: what a head needs to attend by position alone. The head is tied to the
    # embedding, where a constant column changes no probability.
    embedding[:, 0] = scale * math.sqrt(hidden) / 2
    notes = _orthonormal(hidden, generator)  # [D, D]; head h writes into columns h*size .. (h+1)*size
    view = _orthonormal(hidden, generator)[:size]  # [d, D]: what the look-back heads see of a token
    copied = _orthonormal(hidden, generator)
    heads = [slice(h * size, (h + 1) * size) for h in range(2)]

    for head, offset in zip(heads, (1, 2)):
        look_back.q_proj.weight[head, 0], look_back.k_proj.weight[head, 0] = _looking_back(offset, size, config)
        look_back.v_proj.weight[head] = view
        look_back.o_proj.weight[:, head] = notes[:, head] * scale * NOTE
    look_back.q_norm.weight.fill_(SHARPNESS)
    look_back.k_norm.weight.fill_(SHARPNESS)

    last, before_last = notes[:, heads[0]].T, notes[:, heads[1]].T
    for head, wanted, offered in zip(heads, (view, last), (last, before_last)):
        compare.q_proj.weight[head], compare.k_proj.weight[head] = wanted, offered
        compare.v_proj.weight[head] = copied[head]
        compare.o_proj.weight[:, head] = copied[head].T * scale * COPY
    compare.q_norm.weight.fill_(MATCH)
    compare.k_norm.weight.fill_(MATCH)


def _looking_back(offset: int, size: int, config: Qwen3Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key (both [d]) whose rotary score is greatest where the key is `offset` tokens before the query.

    A pair with frequency f contributes cos(f * (distance - offset)); the five fastest pairs are enough to tell
    neighbours apart, and the slow ones could not.
    """
    half = size // 2
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    amplitude = (torch.arange(half) < 5).float()
    angle = -frequencies * offset
    query = torch.cat([amplitude * torch.cos(angle), amplitude * torch.sin(angle)])
    return query, torch.cat([amplitude, torch.zeros(half)])


def _orthonormal(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
