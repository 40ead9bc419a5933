"""A random two-layer Qwen3 with its own small tokenizer and a Qwen3-like chat template with tools, built on the spot.

    tokenizer = toy.make_tokenizer()
    model = toy.make_model(tokenizer)

Both are the same on every call with the same arguments. Nothing is read from disk or downloaded.
"""

from __future__ import annotations

import functools

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")  # not special

CORPUS = (
    "You plan with the user. Ask what is missing with ask_question, then propose_plan once. get_task_info",
    'user assistant system tool {"name": "ask_question", "arguments": {"question": "What is the venue?"}}',
    'Request: Set up a celebration. Family: event_planning. {"plan": {"venue": "rented hall", "date": "friday"}}',
    "guest count: 20 people. order id: #9027. No preference on the theme. I am not sure what you mean.",
)

# Same habits as Qwen3's: tool replies travel as a user message, and with enable_thinking=False the generation prompt
# ends in an empty think block that the rendering of a past assistant turn does not have.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


@functools.lru_cache(maxsize=1)
def _byte_bpe() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return bpe


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE, about 400 entries; eos <|im_end|>, pad <|endoftext|>. A fresh object: tests may change it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_bpe().to_str()), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **overrides) -> Qwen3ForCausalLM:
    """Two layers, width 32, four query heads over two key heads, float32, in eval mode.

    Weights are larger than usual (std 0.3), so that the distribution is far from uniform and each token depends
    visibly on its context: wrong positions or a wrong mask change log-probs by much more than any tolerance.
    """
    config = Qwen3Config(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **overrides,
        }
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    return model
