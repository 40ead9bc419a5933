"""What both sides of `step_vs_trl.py` run: the cases, and the random models that two of them need.

Imported in either side's environment, so nothing here needs `grpo_kernels` or trl.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

TINY = Path(__file__).resolve().parents[1] / "grpo" / "tiny"
SCENARIO_SEED = 0
# One system message, the same for every conversation, in front of what the environment says.
TEMPLATE = """\
{{- '<|im_start|>system\\n@FILLER@<|im_end|>\\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Case:
    """One workload. `model` holds the shape of a random Qwen3, empty for the bundled tiny policy."""

    name: str
    title: str
    groups: int
    group_size: int
    completion: int
    """Tokens of an episode after its prompt: exactly, where `forced`, else at most (environment replies included)."""
    forced: bool
    """No token ends an episode, and rewards are a fixed pattern; else multi-turn episodes of the environment."""
    prompt: int = 0
    """Tokens of a prompt, about; 0: whatever the environment's texts need."""
    model: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    beta: float = 0.2
    learning_rate: float = 1e-4

    @property
    def episodes(self) -> int:
        return self.groups * self.group_size


_SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
              intermediate_size=128, vocab_size=151936)  # fmt: skip
_QWEN3_0_6B = dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                   intermediate_size=3072, vocab_size=151936)  # fmt: skip
CASES = {
    "a": Case("a", "random Qwen3, 2 layers, D=64, V=151936", 2, 4, 128, True, 530, _SMALL),
    "b": Case("b", "bundled tiny policy, multi-turn episodes", 3, 8, 320, False),
    "c": Case("c", "random Qwen3 of 0.6B's shape", 2, 4, 128, True, 530, _QWEN3_0_6B),
}


def smoke(case: Case) -> Case:
    """The same kind of work, small enough for a test."""
    if not case.model:
        return dataclasses.replace(case, groups=1, group_size=2, completion=64)
    small = _SMALL | {"vocab_size": 2048}
    return dataclasses.replace(case, title="smoke: " + case.title, group_size=2, completion=8, prompt=150, model=small)


def forced_rewards(count: int) -> list[float]:
    """Rewards of a forced case's episodes, in order: every group has some spread, whatever was sampled."""
    return [0.25 * (i % 4) for i in range(count)]


def make_model(case: Case, folder: Path) -> Path:
    """The model folder of a case. A random one is written into `folder`: weights of std 0.02, the tiny policy's
    tokenizer (its ids are below V), and a chat template that brings prompts to about `case.prompt` tokens."""
    if not case.model:
        return TINY
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    from env.prompts import SYSTEM, first_messages
    from scenarios.generator import training_scenario

    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    messages = first_messages(training_scenario(SCENARIO_SEED, 0))
    words: list[str] = []
    for word in cycle(SYSTEM.split()):
        tokenizer.chat_template = TEMPLATE.replace("@FILLER@", " ".join(words))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if len(tokenizer.encode(text, add_special_tokens=False)) >= case.prompt:
            break
        words.append(word)
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        **case.model,
        max_position_embeddings=max(2048, 2 * (case.prompt + case.completion)),
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.02,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id, do_sample=True)
    model.save_pretrained(folder)
    return folder
