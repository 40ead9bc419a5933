"""Between messages and tokens: the first prompt, the tokens between turns, and what a sampled turn says.

A conversation is rendered once, before its first turn. After that it only grows: sampled ids, then the ids between
turns, then sampled ids. It is never rendered again, because templates rewrite the past (they drop the reasoning of
earlier turns, or an empty think block that the generation prompt had), and then the ids trained on would not be the
ids sampled from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError

from env.prompts import TOOLS
from grpo.config import UsageError

Message = dict[str, str]
_TURN = "turn of the assistant"  # stands for a sampled turn in the dummy conversation
_PROBE = "probe of the reply"


class ChatTokens:
    """A tokenizer with its chat template, seen from the rollout loop.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools: function descriptions for the template's `tools`; the environment's by default.
        generation_config: the model's, whose `eos_token_id` (one or several) also end a turn.

    Environment replies travel in the role `tool` where the template renders it, and otherwise as `user`, with the same
    text. Thinking is switched off in templates that have the switch (`enable_thinking`): a turn here is one short call.

    Raises:
        UsageError: no chat template, no end-of-turn token, or a template that cannot render a tool conversation.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[dict] = TOOLS, generation_config: Any = None):
        self.tokenizer, self.tools = tokenizer, list(tools) or None
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        template = tokenizer.chat_template
        if not template:
            raise UsageError(f"tokenizer {self.name}: no chat template; use an instruction-tuned model")
        self._options = {"enable_thinking": False} if "enable_thinking" in str(template) else {}
        self.eos_ids = _eos_ids(tokenizer, generation_config)
        if not self.eos_ids:
            raise UsageError(f"tokenizer {self.name}: no end-of-turn token (eos_token) in it or the generation config")
        # Environment text must not be able to end a turn or open one: an error message may quote what the model wrote.
        self._control_texts = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self.reply_role = self._find_reply_role()
        # Replies repeat a lot (the same answer to every member of a group), and so do first prompts.
        self._first_prompt = functools.lru_cache(maxsize=1024)(self._render_first_prompt)
        self.reply_ids = functools.lru_cache(maxsize=8192)(self._reply_ids)

    def first_prompt(self, messages: Iterable[Message]) -> tuple[int, ...]:
        """Ids before the first turn, generation prompt included.

        Raises:
            UsageError: the template refuses the messages (some know no system role).
        """
        return self._first_prompt(tuple((message["role"], message["content"]) for message in messages))

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn for the environment and the log: without its end-of-turn token, tags kept.

        Never encoded again: training uses `ids`.
        """
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _render_first_prompt(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        try:
            text = self._render([self._message(role, content) for role, content in messages])
        except (TemplateError, TypeError) as error:
            raise UsageError(f"tokenizer {self.name}: its chat template refuses the prompt ({error})") from error
        return tuple(self._encode(text))

    def _message(self, role: str, content: str) -> Message:
        # The system prompt is ours; a request comes from a scenario file.
        return {"role": role, "content": content if role == "system" else self._without_control(content)}

    def _without_control(self, text: str) -> str:
        before = None
        while text != before:  # what stands around a removed text may join to another one
            before = text
            for control in self._control_texts:
                text = text.replace(control, "")
        return text

    def _reply_ids(self, text: str) -> tuple[int, ...]:
        """Ids between a sampled turn and the next: what follows its end-of-turn token, the reply, the next header.

        Example (Qwen3's template, text "9"), the first of these tokens being the newline after <|im_end|>::

            \\n<|im_start|>user\\n<tool_response>\\n9\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

        They are a difference within one rendering of a dummy conversation: all ids less those up to the end of the
        dummy turn. Rendered for each text, because templates may trim or quote it.
        """
        rendered = self._render_reply(self.reply_role, self._without_control(text))
        ids, head = self._encode(rendered), self._encode(rendered[: self._end_of_turn(rendered)])
        if ids[: len(head)] != head:
            raise UsageError(f"tokenizer {self.name}: merges an end-of-turn token with the text after it")
        return tuple(ids[len(head) :])

    def _find_reply_role(self) -> str:
        """`tool`, or `user` where the template refuses tool messages or leaves their text out."""
        reason = ""
        for role in ("tool", "user"):
            try:
                rendered = self._render_reply(role, _PROBE)
            except (TemplateError, TypeError) as error:
                reason = str(error)
                continue
            end = self._end_of_turn(rendered)
            if _PROBE in rendered[end:]:
                return role
        raise UsageError(f"tokenizer {self.name}: its chat template cannot render a reply ({reason or 'left out'})")

    def _render_reply(self, role: str, text: str) -> str:
        turns = [("user", "Begin."), ("assistant", _TURN), (role, text)]
        return self._render([{"role": role, "content": content} for role, content in turns])

    def _end_of_turn(self, rendered: str) -> int:
        """Index in `rendered` just after the end-of-turn token of the dummy turn."""
        tokens = sorted(self.tokenizer.convert_ids_to_tokens(list(self.eos_ids)))
        turn = rendered.find(_TURN)
        places = [(rendered.find(token, turn), len(token)) for token in tokens]
        found = [start + length for start, length in places if start >= 0]
        if turn < 0 or not found:
            raise UsageError(
                f"tokenizer {self.name}: its chat template does not close a turn with {' or '.join(tokens)}"
            )
        return min(found)

    def _render(self, messages: list[Message]) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=False, add_generation_prompt=True, **self._options
        )

    def _encode(self, text: str) -> list[int]:
        # The template writes the special tokens itself, a leading BOS included.
        return self.tokenizer.encode(text, add_special_tokens=False)


def _eos_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    ids = {tokenizer.eos_token_id}
    more = getattr(generation_config, "eos_token_id", None)
    ids.update(more if isinstance(more, (list, tuple)) else [more])
    return frozenset(i for i in ids if i is not None)
