"""Between messages and tokens: the first prompt, the tokens between turns, and what a sampled turn says.

A conversation is rendered once, before its first turn. After that it only grows: sampled ids, then the ids between
turns, then sampled ids. It is never rendered again, because templates rewrite the past (they drop the reasoning of
earlier turns, or an empty think block that the generation prompt had), and then the ids trained on would not be the
ids sampled from.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from env.literals import printable
from env.prompts import TOOLS
from env.time_limit import time_limit
from grpo.config import UsageError

Message = dict[str, str]
_TURN = "turn of the assistant"  # stands for a sampled turn in the dummy conversation
_PROBE = "probe of the reply"
CACHED_LENGTH = 4096  # characters
RENDER_SECONDS = 30.0
"""A template is a program; one that takes longer than this for a conversation does not end."""


class ChatTokens:
    """A tokenizer with its chat template, seen from the rollout loop.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools: function descriptions for the template's `tools`; the environment's by default.
        generation_config: the model's, whose `eos_token_id` (one or several) also end a turn.

    Environment replies travel in the role `tool` where the template renders it, and otherwise as `user`, with the same
    text. Thinking is switched off in templates that have the switch (`enable_thinking`): a turn here is one short call.

        vocab_size: rows of the model's embedding. Templates that write a token beyond them are refused.

    Raises:
        UsageError: no chat template, no end-of-turn token, or a template that cannot render a tool conversation, or
            not with the model's tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[dict] = TOOLS,
        generation_config: Any = None,
        vocab_size: int | None = None,
    ):
        self.tokenizer, self.tools = tokenizer, list(tools) or None
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        template = tokenizer.chat_template
        if not template:
            raise UsageError(f"tokenizer {self.name}: no chat template; use an instruction-tuned model")
        self._options = {"enable_thinking": False} if "enable_thinking" in str(template) else {}
        self.vocab_size = vocab_size
        self._num_ids = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self.eos_ids = _eos_ids(tokenizer, generation_config)
        if not self.eos_ids:
            raise UsageError(f"tokenizer {self.name}: no end-of-turn token (eos_token) in it or the generation config")
        self._known([min(self.eos_ids)])  # one that the model can sample
        self._control_texts = _control_texts(tokenizer)
        self.reply_role = self._find_reply_role()
        # Replies repeat a lot (the same answer to every member of a group), and so do first prompts.
        self._first_prompt = functools.lru_cache(maxsize=1024)(self._render_first_prompt)
        self._cached_reply_ids = functools.lru_cache(maxsize=8192)(self._reply_ids)
        self.reply_ids(_PROBE)  # what is wrong with it shows now

    def first_prompt(self, messages: Iterable[Message]) -> tuple[int, ...]:
        """Ids before the first turn, generation prompt included.

        Raises:
            UsageError: the template refuses the messages (some know no system role).
        """
        return self._first_prompt(tuple((message["role"], message["content"]) for message in messages))

    def reply_ids(self, text: str) -> tuple[int, ...]:
        """Ids between a sampled turn and the next: what follows its end-of-turn token, the reply, the next header.

        Example (Qwen3's template, text "9"), the first of these tokens being the newline after <|im_end|>::

            \\n<|im_start|>user\\n<tool_response>\\n9\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

        They are a difference within one rendering of a dummy conversation: all ids less those up to the end of the
        dummy turn. Rendered for each text, because templates may trim or quote it.
        """
        # Megabytes of text from a broken environment would stay in the cache for good.
        return self._cached_reply_ids(text) if len(text) <= CACHED_LENGTH else self._reply_ids(text)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn for the environment and the log: without its end-of-turn token, tags kept.

        Never encoded again: training uses `ids`.
        """
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        # An embedding often has more rows than the tokenizer has tokens. What such an id spells is nothing to a fast
        # tokenizer and an error to others.
        ids = [i for i in ids if i < self._num_ids]
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return printable(text)

    def _render_first_prompt(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        rendered = [self._message(role, content) for role, content in messages]
        try:
            text = self._render(rendered)
        except Exception as error:  # noqa: BLE001 (a template is a program: it raises what it likes)
            reason = _one_line(error)
            raise UsageError(f"tokenizer {self.name}: its chat template refuses the prompt ({reason})") from error
        return tuple(self._known(self._encode(text)))

    def _message(self, role: str, content: str) -> Message:
        # The system prompt is ours; a request comes from a scenario file.
        return {"role": role, "content": content if role == "system" else self._without_control(content)}

    def _without_control(self, text: str) -> str:
        """`text` less all control texts, those included that would join around a removed one. One pass: time is linear
        whatever the text."""
        text = printable(text)
        if not any(control in text for control in self._control_texts):
            return text
        endings: dict[str, list[str]] = {}
        for control in self._control_texts:
            endings.setdefault(control[-1], []).append(control)
        kept: list[str] = []
        for char in text:
            kept.append(char)
            for control in endings.get(char, ()):
                if "".join(kept[-len(control) :]) == control:
                    del kept[-len(control) :]
                    break
        return "".join(kept)

    def _reply_ids(self, text: str) -> tuple[int, ...]:
        rendered = self._render_reply(self.reply_role, self._without_control(text))
        ids, head = self._encode(rendered), self._encode(rendered[: self._end_of_turn(rendered)])
        if ids[: len(head)] != head:
            raise UsageError(f"tokenizer {self.name}: merges an end-of-turn token with the text after it")
        return tuple(self._known(ids[len(head) :]))

    def _find_reply_role(self) -> str:
        """`tool`, or `user` where the template refuses tool messages or leaves their text out."""
        reason = ""
        for role in ("tool", "user"):
            try:
                rendered = self._render_reply(role, _PROBE)
            except Exception as error:  # noqa: BLE001
                reason = _one_line(error)
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
        # A generation config may list ids that the tokenizer does not have.
        tokens = sorted(filter(None, self.tokenizer.convert_ids_to_tokens(list(self.eos_ids))))
        turn = rendered.find(_TURN)
        places = [(rendered.find(token, turn), len(token)) for token in tokens]
        found = [start + length for start, length in places if start >= 0]
        if turn < 0 or not found:
            raise UsageError(
                f"tokenizer {self.name}: its chat template does not close a turn with {' or '.join(tokens)}"
            )
        return min(found)

    def _render(self, messages: list[Message]) -> str:
        with time_limit(RENDER_SECONDS):
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=True, **self._options
            )

    def _encode(self, text: str) -> list[int]:
        # The template writes the special tokens itself, a leading BOS included.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _known(self, ids: list[int]) -> list[int]:
        """`ids`, all of which the model has."""
        if self.vocab_size is not None and ids and max(ids) >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise UsageError(
                f"tokenizer {self.name}: its token {token!r} has id {max(ids)}, the model's embedding has "
                f"{self.vocab_size} rows; resize the embedding or use the tokenizer that belongs to the model"
            )
        return ids


def _control_texts(tokenizer: Any) -> list[str]:
    """Tokens that open or close something. Environment text must not hold them: an error message may quote what the
    model wrote. Added tokens that are plain words or white space are ordinary text and stay."""
    special = set(tokenizer.all_special_tokens)
    added = tokenizer.get_added_vocab()
    return [text for text in added if text and (text in special or re.search(r"[^\w\s]", text))]


def _eos_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    more = getattr(generation_config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(more if isinstance(more, (list, tuple)) else [more])]
    return frozenset(i for i in ids if isinstance(i, int) and i >= 0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
